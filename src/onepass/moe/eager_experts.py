"""Experts in plain PyTorch, one at a time: the path of CPUs and of float64, and the definition.

The gradients are written out: inside a registered operation, autograd does not record.
"""

import math
from collections.abc import Iterator
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.options import EXPERT_TENSORS, ExpertGradients, ExpertOptions, Groups, ScatterOptions

Maybe = Tensor | None


def activate(gate: Tensor, up: Tensor, o: ExpertOptions) -> Tensor:
    if o.activation == "swiglu_clamped":
        gate, up = gate.clamp(max=o.limit), up.clamp(-o.limit, o.limit)
        return (up + 1) * gate * torch.sigmoid(o.alpha * gate)
    if o.activation == "silu":
        return F.silu(gate) * up
    return F.gelu(gate, approximate="none" if o.activation == "gelu" else "tanh") * up


def slopes(gate: Tensor, up: Tensor, o: ExpertOptions) -> tuple[Tensor, Tensor]:
    """The derivatives of `activate` by gate and by up."""
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
    """A linear layer of every expert, with its adapter; sums its gradients up where they are needed."""

    def __init__(self, weight: Tensor, bias: Maybe, a: Maybe, b: Maybe, scale: float, transposed: bool) -> None:
        self.tensors = {"weight": weight.mT if transposed else weight, "bias": bias, "a": a, "b": b}
        self.scale, self.transposed = scale, transposed
        self.grads = {name: None if t is None else t.new_zeros(t.shape) for name, t in self.tensors.items()}

    def of(self, e: int) -> Iterator[Maybe]:
        return (None if t is None else t[e] for t in self.tensors.values())

    def __call__(self, x: Tensor, e: int) -> Tensor:
        weight, bias, a, b = self.of(e)
        y = F.linear(x, weight, bias)  # type: ignore[arg-type]
        return y if a is None or b is None else y + self.scale * F.linear(F.linear(x, a), b)

    def backward(self, grad: Tensor, x: Tensor, e: int) -> Tensor:
        """The gradient of ``x``."""
        weight, _, a, b = self.of(e)
        found = {"weight": grad.mT @ x, "bias": grad.sum(0)}
        of_x = grad @ weight  # type: ignore[operator]
        if a is not None and b is not None:
            low = self.scale * grad @ b
            found |= {"a": low.mT @ x, "b": self.scale * grad.mT @ F.linear(x, a)}
            of_x = of_x + low @ a
        for name, total in self.grads.items():
            if total is not None:
                total[e] = found[name]
        return of_x

    def results(self) -> tuple[Maybe, ...]:
        """The gradients of weight, bias, A and B."""
        weight, *others = self.grads.values()
        return (weight.mT.contiguous() if self.transposed else weight, *others)  # type: ignore[union-attr]


def slots_of_experts(experts: Tensor, E: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Of each expert that was chosen: the tokens that did, and as which of their choices."""
    for e in experts.unique().tolist():
        if 0 <= e < E:
            yield e, *(experts == e).nonzero(as_tuple=True)


def halves(h: Tensor, o: ExpertOptions) -> tuple[Tensor, ...]:
    return (h[:, ::2], h[:, 1::2]) if o.interleaved else h.chunk(2, -1)


def wide(t: Tensor) -> torch.dtype:
    return torch.promote_types(t.dtype, torch.float32)


def expert_mlp(
    hidden: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, gate_up_bias: Maybe, down_bias: Maybe, a1: Maybe,
    b1: Maybe, a2: Maybe, b2: Maybe, experts: Tensor, order: Tensor, offsets: Tensor, tile_expert: Tensor,
    tile_row: Tensor, options: ExpertOptions,
) -> tuple[Tensor, Maybe]:  # fmt: skip
    """The result, and None: `gradient` computes all again."""
    o = options
    first = Layer(gate_up, gate_up_bias, a1, b1, o.gate_up_scale, o.transposed)
    second = Layer(down, down_bias, a2, b2, o.down_scale, o.transposed)
    out = torch.zeros(hidden.shape, dtype=wide(hidden), device=hidden.device)
    for e, token, k in slots_of_experts(experts, len(gate_up)):
        gate, up = halves(first(hidden[token], e), o)
        y = second(activate(gate, up, o), e)
        out.index_add_(0, token, (y * weights[token, k, None]).to(out.dtype))
    return out.to(hidden.dtype), None


def gradient(
    grad: Tensor, h: Maybe, hidden: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, gate_up_bias: Maybe,
    down_bias: Maybe, a1: Maybe, b1: Maybe, a2: Maybe, b2: Maybe, experts: Tensor, order: Tensor, offsets: Tensor,
    tile_expert: Tensor, tile_row: Tensor, options: ExpertOptions,
) -> ExpertGradients:  # fmt: skip
    """Of `EXPERT_TENSORS`, None where not needed."""
    o = options
    first = Layer(gate_up, gate_up_bias, a1, b1, o.gate_up_scale, o.transposed)
    second = Layer(down, down_bias, a2, b2, o.down_scale, o.transposed)
    of_hidden = torch.zeros(hidden.shape, dtype=wide(hidden), device=hidden.device)
    of_weights = weights.new_zeros(weights.shape)
    for e, token, k in slots_of_experts(experts, len(gate_up)):
        x, g = hidden[token], grad[token]
        both = first(x, e)
        gate, up = halves(both, o)
        activated = activate(gate, up, o)
        of_weights[token, k] = (second(activated, e) * g).sum(-1, dtype=weights.dtype)
        of_activated = second.backward((g * weights[token, k, None]).to(x.dtype), activated, e)
        of_both = torch.empty_like(both)
        for part, slope in zip(halves(of_both, o), slopes(gate, up, o)):
            part.copy_(of_activated * slope)
        of_hidden.index_add_(0, token, first.backward(of_both, x, e).to(of_hidden.dtype))
    (w1, bias1, *adapter1), (w2, bias2, *adapter2) = first.results(), second.results()
    found = of_hidden.to(hidden.dtype), of_weights, w1, w2, bias1, bias2, *adapter1, *adapter2
    return tuple(t if o.needs(name) else None for name, t in zip(EXPERT_TENSORS, found))  # type: ignore[return-value]


def group(experts: Tensor, E: int) -> Groups:
    ids, order = experts.where((experts >= 0) & (experts < E), E).flatten().sort(stable=True)
    offsets = torch.searchsorted(ids, torch.arange(E + 1, dtype=ids.dtype, device=ids.device), out_int32=True)
    return Groups(order.to(torch.int32), offsets, offsets.new_empty(0), offsets.new_empty(0))


def scattered_linear(
    x: Tensor, weight: Tensor, bias: Maybe, weights: Maybe, experts: Tensor, order: Tensor, offsets: Tensor,
    tile_expert: Tensor, tile_row: Tensor, options: ScatterOptions,
) -> tuple[Tensor, Maybe]:  # fmt: skip
    """The result, and the rows of the slots where there are ``weights``."""
    o, slots, bounds = options, order.long(), offsets.tolist()
    layer = Layer(weight, bias, None, None, 0.0, o.transposed)
    rows = x if o.grouped_in else x[slots // o.k]
    y = rows.new_zeros(len(slots), weight.shape[2 if o.transposed else 1])
    for e, (begin, end) in enumerate(pairwise(bounds)):
        y[begin:end] = layer(rows[begin:end], e)
    if o.grouped_out:
        return y, None
    y = torch.zeros_like(y).index_copy_(0, slots, y)
    if weights is None:
        return y, None
    weights = weights.where((experts >= 0) & (experts < len(weight)), 0.0)  # also a NaN of an id that is no expert
    return (y.view(*weights.shape, y.shape[-1]) * weights.unsqueeze(-1)).sum(1).to(x.dtype), y


def scattered_gradient(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Maybe, weights: Maybe, y: Maybe, experts: Tensor, order: Tensor,
    offsets: Tensor, tile_expert: Tensor, tile_row: Tensor, options: ScatterOptions,
) -> tuple[Maybe, Maybe, Maybe, Maybe]:  # fmt: skip
    """Of x, weight, bias and weights, None where not needed."""
    o, slots, bounds = options, order.long(), offsets.tolist()
    layer = Layer(weight, bias, None, None, 0.0, o.transposed)
    of_weights = None
    if weights is not None:
        of_weights = (y.view(*weights.shape, y.shape[-1]) * grad.unsqueeze(1)).sum(-1, dtype=weights.dtype)  # type: ignore[union-attr]
        grad = (grad.unsqueeze(1) * weights.unsqueeze(-1)).to(x.dtype).flatten(0, 1)
    g = grad if o.grouped_out else grad[slots]
    rows = x if o.grouped_in else x[slots // o.k]
    of_rows = torch.zeros_like(rows)
    for e, (begin, end) in enumerate(pairwise(bounds)):
        of_rows[begin:end] = layer.backward(g[begin:end], rows[begin:end], e)
    if not o.grouped_in:
        total = torch.zeros(x.shape, dtype=wide(x), device=x.device)
        of_rows = total.index_add_(0, slots // o.k, of_rows.to(total.dtype)).to(x.dtype)
    found = of_rows, *layer.results()[:2], of_weights
    return tuple(t if o.needed >> n & 1 else None for n, t in enumerate(found))  # type: ignore[return-value]
