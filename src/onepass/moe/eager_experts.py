"""Experts in plain PyTorch, one at a time: the path of CPUs and of float64, and the definition."""

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.options import EXPERT_TENSORS, ExpertGradients, ExpertOptions


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
    wanted = [t for t in leaves if t is not None and t.requires_grad]
    if not out.requires_grad:  # no token came to any expert
        return tuple(torch.zeros_like(t) if t is not None and t.requires_grad else None for t in leaves)  # type: ignore[return-value]
    found = iter(torch.autograd.grad(out, wanted, grad, allow_unused=True, materialize_grads=True))
    return tuple(next(found) if t is not None and t.requires_grad else None for t in leaves)  # type: ignore[return-value]
