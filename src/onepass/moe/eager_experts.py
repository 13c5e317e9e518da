"""Experts in plain PyTorch, one at a time: the path of CPUs and of float64, and the definition."""

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.options import EXPERT_TENSORS, ExpertGradients, ExpertOptions, Groups, ScatterOptions


def activate(gate: Tensor, up: Tensor, o: ExpertOptions) -> Tensor:
    if o.activation == "swiglu_clamped":
        gate, up = gate.clamp(max=o.limit), up.clamp(-o.limit, o.limit)
        return (up + 1) * gate * torch.sigmoid(o.alpha * gate)
    if o.activation == "silu":
        return F.silu(gate) * up
    return F.gelu(gate, approximate="none" if o.activation == "gelu" else "tanh") * up


def linear(
    x: Tensor, w: Tensor, bias: Tensor | None, a: Tensor | None, b: Tensor | None, scale: float, transposed: bool
) -> Tensor:
    y = F.linear(x, w.mT if transposed else w, bias)
    return y if a is None or b is None else y + scale * F.linear(F.linear(x, a), b)


def of_expert(tensors: tuple[Tensor | None, ...], e: int) -> list[Tensor | None]:
    return [None if t is None else t[e] for t in tensors]


def expert_mlp(
    hidden: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, gate_up_bias: Tensor | None,
    down_bias: Tensor | None, a1: Tensor | None, b1: Tensor | None, a2: Tensor | None, b2: Tensor | None,
    options: ExpertOptions,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The result, and None: `gradient` computes all again."""
    o = options
    out = torch.zeros(hidden.shape, dtype=torch.promote_types(hidden.dtype, torch.float32), device=hidden.device)
    for e in experts.unique().tolist():
        if not 0 <= e < len(gate_up):
            continue
        token, k = (experts == e).nonzero(as_tuple=True)
        w1, bias1, first1, second1 = of_expert((gate_up, gate_up_bias, a1, b1), e)
        w2, bias2, first2, second2 = of_expert((down, down_bias, a2, b2), e)
        h = linear(hidden[token], w1, bias1, first1, second1, o.gate_up_scale, o.transposed)  # type: ignore[arg-type]
        gate, up = (h[:, ::2], h[:, 1::2]) if o.interleaved else h.chunk(2, -1)
        y = linear(activate(gate, up, o), w2, bias2, first2, second2, o.down_scale, o.transposed)  # type: ignore[arg-type]
        out = out.index_add(0, token, (y * weights[token, k, None]).to(out.dtype))
    return out.to(hidden.dtype), None


def gradient(
    grad: Tensor, hidden: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor,
    gate_up_bias: Tensor | None, down_bias: Tensor | None, a1: Tensor | None, b1: Tensor | None, a2: Tensor | None,
    b2: Tensor | None, h: Tensor | None, options: ExpertOptions,
) -> ExpertGradients:  # fmt: skip
    """Of all tensors that are floating-point, in their order, None where not needed."""
    floats = zip(EXPERT_TENSORS, (hidden, weights, gate_up, down, gate_up_bias, down_bias, a1, b1, a2, b2))
    leaves = [None if t is None else t.detach().requires_grad_(options.needs(name)) for name, t in floats]
    with torch.enable_grad():
        out, _ = expert_mlp(leaves[0], leaves[1], experts, *leaves[2:], options)  # type: ignore[arg-type, call-arg]
    return gradients(out, leaves, grad)  # type: ignore[return-value]


def group(experts: Tensor, E: int) -> Groups:
    ids, order = experts.flatten().sort(stable=True)
    offsets = torch.searchsorted(ids, torch.arange(E + 1, dtype=ids.dtype, device=ids.device), out_int32=True)
    none = offsets.new_empty(0)
    return Groups(order.to(torch.int32), offsets, none, none)


def scattered_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, weights: Tensor | None, experts: Tensor, order: Tensor,
    offsets: Tensor, tile_expert: Tensor, tile_row: Tensor, options: ScatterOptions,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The result, and None: `scattered_gradient` computes all again."""
    o, slots, bounds = options, order.long(), offsets.tolist()
    rows = x if o.grouped_in else x[slots // o.k]
    parts = [rows.new_zeros(bounds[0], weight.shape[2 if o.transposed else 1])]
    for e, (begin, end) in enumerate(zip(bounds, bounds[1:])):
        (w, b) = of_expert((weight, bias), e)
        parts.append(linear(rows[begin:end], w, b, None, None, 0.0, o.transposed))  # type: ignore[arg-type]
    parts.append(rows.new_zeros(len(slots) - bounds[-1], parts[0].shape[1]))
    y = torch.cat(parts)
    if o.grouped_out:
        return y, None
    y = torch.zeros_like(y).index_copy(0, slots, y)
    if weights is None:
        return y, None
    return (y.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(1).to(x.dtype), None


def scattered_gradient(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, weights: Tensor | None, y: Tensor | None,
    experts: Tensor, order: Tensor, offsets: Tensor, tile_expert: Tensor, tile_row: Tensor, options: ScatterOptions,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Of x, weight, bias and weights, None where not needed."""
    needs = (bool(options.needed >> n & 1) for n in range(4))
    leaves = [None if t is None else t.detach().requires_grad_(n) for t, n in zip((x, weight, bias, weights), needs)]
    with torch.enable_grad():
        out, _ = scattered_linear(*leaves, experts, order, offsets, tile_expert, tile_row, options)  # type: ignore[arg-type, call-arg]
    return gradients(out, leaves, grad)  # type: ignore[return-value]


def gradients(out: Tensor, leaves: list[Tensor | None], grad: Tensor) -> tuple[Tensor | None, ...]:
    wanted = [t for t in leaves if t is not None and t.requires_grad]
    if not out.requires_grad:  # no token came to any expert
        found = iter([torch.zeros_like(t) for t in wanted])
    else:
        found = iter(torch.autograd.grad(out, wanted, grad, allow_unused=True, materialize_grads=True))
    return tuple(next(found) if t is not None and t.requires_grad else None for t in leaves)
