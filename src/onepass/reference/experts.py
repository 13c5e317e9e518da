"""The operations on experts of `onepass.kernels` in plain PyTorch, one expert after the other.

The gradients are written out, since autograd does not record inside an operation registered with torch.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.core.moe_options import (
    ExpertGradients,
    ExpertOptions,
    ExpertTensors,
    Groups,
    ScatterGradients,
    ScatterOptions,
    ScatterTensors,
)
from onepass.core.quantized import Encoded, Weight
from onepass.reference.decode import decode

Maybe = Tensor | None


def activate(gate: Tensor, up: Tensor, o: ExpertOptions) -> Tensor:
    """The gated activation of ``gate`` and ``up``."""
    if o.activation == "swiglu_clamped":
        gate, up = gate.clamp(max=o.limit), up.clamp(-o.limit, o.limit)
        return (up + 1) * gate * torch.sigmoid(o.alpha * gate)
    if o.activation == "silu":
        return F.silu(gate) * up
    return F.gelu(gate, approximate="none" if o.activation == "gelu" else "tanh") * up


def slopes(gate: Tensor, up: Tensor, o: ExpertOptions) -> tuple[Tensor, Tensor]:
    """The derivatives of `activate` with respect to gate and up, in at least float32: squares overflow in float16."""
    gate, up = gate.to(wide(gate)), up.to(wide(up))
    if o.activation == "swiglu_clamped":
        g, u = gate.clamp(max=o.limit), up.clamp(-o.limit, o.limit) + 1
        s = torch.sigmoid(o.alpha * g)
        by_gate = (s + o.alpha * g * s * (1 - s)) * u
        return by_gate.masked_fill(gate > o.limit, 0.0), (g * s).masked_fill(up.abs() > o.limit, 0.0)
    if o.activation == "silu":
        s = torch.sigmoid(gate)
        return (s + gate * s * (1 - s)) * up, gate * s
    if o.activation == "gelu":
        phi = 0.5 * (1 + torch.erf(gate / math.sqrt(2)))
        return (phi + gate * torch.exp(-0.5 * gate.square()) / math.sqrt(2 * math.pi)) * up, gate * phi
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    s = torch.sigmoid(2 * inner)
    slope = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * gate.square())
    return (s + gate * s * (1 - s) * 2 * slope) * up, gate * s


class Layer:
    """The linear layers of all experts, with optional LoRA adapters.

    `backward` stores the gradients of weight, bias, A and B that are ``needed``.
    """

    def __init__(
        self, weight: Weight, bias: Maybe, a: Maybe, b: Maybe, scale: float, transposed: bool,
        needed: Sequence[bool] = (),
    ) -> None:  # fmt: skip
        self.weight = weight.mT if transposed else weight
        self.tensors = {"bias": bias, "a": a, "b": b}
        self.scale, self.transposed = scale, transposed
        trained: list[Any] = [t if n else None for t, n in zip((self.weight, bias, a, b), needed)] or [None] * 4
        self.grads = [None if t is None else t.new_zeros(t.shape) for t in trained]

    def of(self, e: int) -> Iterator[Maybe]:
        """Weight, bias, A and B of expert e."""
        yield self.weight[e] if isinstance(self.weight, Tensor) else decoded(self.weight, e)
        yield from (None if t is None else t[e] for t in self.tensors.values())

    def __call__(self, x: Tensor, e: int) -> Tensor:
        """The layer of expert e."""
        weight, bias, a, b = self.of(e)
        y = F.linear(x, weight, bias)  # type: ignore[arg-type]
        return y if a is None or b is None else y + self.scale * F.linear(F.linear(x, a), b)

    def backward(self, grad: Tensor, x: Tensor, e: int) -> Tensor:
        """Store the gradients of expert e's tensors, and return the gradient of ``x``."""
        weight, _, a, b = self.of(e)
        of_weight, of_bias, of_a, of_b = self.grads
        of_x = grad @ weight  # type: ignore[operator]
        if of_weight is not None:
            of_weight[e] = grad.mT @ x
        if of_bias is not None:
            of_bias[e] = grad.sum(0)
        if a is not None and b is not None:
            low = self.scale * grad @ b
            of_x = of_x + low @ a
            if of_a is not None:
                of_a[e] = low.mT @ x
            if of_b is not None:
                of_b[e] = self.scale * grad.mT @ F.linear(x, a)
        return of_x

    def results(self) -> tuple[Maybe, ...]:
        """The gradients of weight, bias, A and B of all experts; None for those that are not needed."""
        weight, *others = self.grads
        return (weight.mT.contiguous() if self.transposed and weight is not None else weight, *others)


def decoded(weight: Encoded, e: int) -> Tensor:
    """The values of expert e."""
    out = torch.empty((1, weight.format.rows, weight.format.columns), dtype=weight.dtype, device=weight.device)
    values = decode(weight, out, e)[0]
    return values.mT if weight.format.flipped else values


def assignments_of_experts(experts: Tensor, E: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield every expert that has tokens, these tokens, and for each token the position k of the expert."""
    for e in experts.unique().tolist():
        if 0 <= e < E:
            yield e, *(experts == e).nonzero(as_tuple=True)


def halves(h: Tensor, o: ExpertOptions) -> tuple[Tensor, ...]:
    """Gate and up, as views of ``h``."""
    return (h[:, ::2], h[:, 1::2]) if o.interleaved else h.chunk(2, -1)


def wide(t: Tensor) -> torch.dtype:
    """The dtype of sums: at least float32."""
    return torch.promote_types(t.dtype, torch.float32)


def layers(t: ExpertTensors, o: ExpertOptions, needed: Sequence[bool] = ()) -> tuple[Layer, Layer]:
    """The two layers of an expert MLP, gate_up and down. ``needed`` are the gradients, in the order of the tensors."""
    n = ExpertTensors(*needed) if needed else None  # type: ignore[arg-type]

    def layer(name: str, scale: float) -> Layer:
        names = name, f"{name}_bias", f"{name}_lora_a", f"{name}_lora_b"
        weight, bias, a, b = (getattr(t, name) for name in names)
        return Layer(weight, bias, a, b, scale, o.transposed, [getattr(n, name) for name in names] if n else ())

    return layer("gate_up", o.gate_up_scaling), layer("down", o.down_scaling)


def expert_mlp(
    tensors: ExpertTensors, experts: Tensor, groups: Groups, save_h: bool, options: ExpertOptions
) -> tuple[Tensor, Maybe]:
    """The result, and None: `expert_mlp_gradient` computes everything again."""
    t, o = tensors, options
    first, second = layers(t, o)
    out = torch.zeros(t.hidden.shape, dtype=wide(t.hidden), device=t.hidden.device)
    for e, token, k in assignments_of_experts(experts, len(t.gate_up)):
        gate, up = halves(first(t.hidden[token], e), o)
        y = second(activate(gate, up, o), e)
        out.index_add_(0, token, (y * t.weights[token, k, None]).to(out.dtype))
    return out.to(t.hidden.dtype), None


def expert_mlp_gradient(
    grad: Tensor, h: Maybe, tensors: ExpertTensors, experts: Tensor, groups: Groups, needed: list[bool],
    options: ExpertOptions,
) -> ExpertGradients:  # fmt: skip
    """The gradients of the tensors, None where not needed. ``h`` is not used."""
    t, o = tensors, options
    first, second = layers(t, o, needed)
    of_hidden = torch.zeros(t.hidden.shape, dtype=wide(t.hidden), device=t.hidden.device)
    of_weights = t.weights.new_zeros(t.weights.shape)
    for e, token, k in assignments_of_experts(experts, len(t.gate_up)):
        x, g = t.hidden[token], grad[token]
        both = first(x, e)
        gate, up = halves(both, o)
        activated = activate(gate, up, o)
        of_weights[token, k] = (second(activated, e) * g.to(wide(g))).sum(-1).to(t.weights.dtype)
        of_activated = second.backward((g * t.weights[token, k, None]).to(x.dtype), activated, e)
        of_both = torch.empty_like(both)
        for part, slope in zip(halves(of_both, o), slopes(gate, up, o)):
            part.copy_(of_activated * slope)
        of_hidden.index_add_(0, token, first.backward(of_both, x, e).to(of_hidden.dtype))
    (w1, bias1, *lora1), (w2, bias2, *lora2) = first.results(), second.results()
    found = of_hidden.to(t.hidden.dtype), of_weights, w1, w2, bias1, bias2, *lora1, *lora2
    return tuple(g if n else None for n, g in zip(needed, found))  # type: ignore[return-value]


def sort_by_expert(experts: Tensor, num_experts: int, counts: Maybe = None) -> Groups:
    """Sort the assignments ``(T, K)`` by expert. Those to out-of-range ids come last.

    With ``counts`` ``(E,)`` they are sorted already.
    """
    E = num_experts
    if counts is not None:
        ends = counts.cumsum(0, dtype=torch.int32)
        order = torch.arange(experts.numel(), dtype=torch.int32, device=experts.device)
        places = order.where(order < ends[-1], len(order))
        return Groups(order, torch.cat([ends.new_zeros(1), ends]), ends.new_zeros(2), places)
    ids, order = experts.where((experts >= 0) & (experts < E), E).flatten().sort(stable=True)
    offsets = torch.searchsorted(ids, torch.arange(E + 1, dtype=ids.dtype, device=ids.device), out_int32=True)
    places = torch.empty_like(order).scatter_(
        0, order, torch.arange(len(order), device=order.device).where(ids < E, len(order))
    )
    return Groups(order.to(torch.int32), offsets, offsets.new_zeros(2), places.to(torch.int32))


def size_of_tile_list(assignments: int, num_experts: int) -> int:
    """Return 2, the size of a list without tiles: only kernels use them."""
    return 2


def scattered_linear(
    tensors: ScatterTensors, experts: Tensor, groups: Groups, options: ScatterOptions
) -> tuple[Tensor, Maybe]:
    """The result and, with routing weights, the rows ``(T·K, outputs)`` before they are summed; else None."""
    (x, weight, bias, weights), o = tensors, options
    order, bounds = groups.order.long(), groups.offsets.tolist()
    layer = Layer(weight, bias, None, None, 0.0, o.transposed)
    rows = x if o.grouped_in else x[order // o.k]
    y = rows.new_zeros(len(order), weight.shape[2 if o.transposed else 1])
    for e, (begin, end) in enumerate(pairwise(bounds)):
        if begin < end:
            y[begin:end] = layer(rows[begin:end], e)
    if o.grouped_out:
        return y, None
    y = torch.zeros_like(y).index_copy_(0, order, y)
    if weights is None:
        return y, None
    weights = weights.where((experts >= 0) & (experts < len(weight)), 0.0)  # even if that of an invalid id is NaN
    return (y.view(*weights.shape, y.shape[-1]) * weights.unsqueeze(-1)).sum(1).to(x.dtype), y


def scattered_linear_gradient(
    grad: Tensor, y: Maybe, tensors: ScatterTensors, experts: Tensor, groups: Groups, needed: list[bool],
    options: ScatterOptions,
) -> ScatterGradients:  # fmt: skip
    """The gradients of the tensors, None where not needed."""
    (x, weight, bias, weights), o = tensors, options
    order, bounds = groups.order.long(), groups.offsets.tolist()
    layer = Layer(weight, bias, None, None, 0.0, o.transposed, [needed[1], needed[2], False, False])
    of_weights = None
    if weights is not None:
        products = y.view(*weights.shape, y.shape[-1]) * grad.unsqueeze(1).to(wide(grad))  # type: ignore[union-attr]
        of_weights = products.sum(-1).to(weights.dtype)
        of_weights = of_weights.where((experts >= 0) & (experts < len(weight)), 0.0)
        grad = (grad.unsqueeze(1) * weights.unsqueeze(-1)).to(x.dtype).flatten(0, 1)
    g = grad if o.grouped_out else grad[order]
    rows = x if o.grouped_in else x[order // o.k]
    of_rows = torch.zeros_like(rows)
    for e, (begin, end) in enumerate(pairwise(bounds)):
        if begin < end:
            of_rows[begin:end] = layer.backward(g[begin:end], rows[begin:end], e)
    if not o.grouped_in:
        total = torch.zeros(x.shape, dtype=wide(x), device=x.device)
        of_rows = total.index_add_(0, order // o.k, of_rows.to(total.dtype)).to(x.dtype)
    found = of_rows, *layer.results()[:2], of_weights
    return tuple(g if n else None for n, g in zip(needed, found))  # type: ignore[return-value]


def sum_rows(y: Tensor, places: Tensor, weights: Maybe = None) -> Tensor:
    """The sum of the rows ``y[places[t, k]]``, times their weights, over k. Places that are no rows are left out."""
    inside = (places >= 0) & (places < len(y))
    rows = torch.cat([y, y.new_zeros((1, y.shape[1]))])[places.where(inside, len(y)).long()].to(wide(y))
    if weights is not None:
        rows = rows * weights.where(inside, 0.0).unsqueeze(-1)
    return rows.sum(1).to(y.dtype)


def sum_rows_gradient(
    grad: Tensor, places: Tensor, count: int, weights: Maybe = None, y: Maybe = None
) -> tuple[Tensor, Maybe]:
    """The gradients of the ``count`` rows and, if the rows ``y`` are given, of the weights of `sum_rows`."""
    inside = (places >= 0) & (places < count)
    of_pairs = grad.unsqueeze(1).expand(*places.shape, grad.shape[1]).to(wide(grad))
    of_weights = None
    if weights is not None:
        if y is not None:
            rows = torch.cat([y, y.new_zeros((1, y.shape[1]))])[places.where(inside, count).long()]
            of_weights = (of_pairs * rows).sum(-1).where(inside, 0.0).to(weights.dtype)
        of_pairs = of_pairs * weights.unsqueeze(-1)
    of_y = grad.new_zeros((count, grad.shape[1]))
    of_y[places[inside].long()] = of_pairs[inside].to(grad.dtype)
    return of_y, of_weights
