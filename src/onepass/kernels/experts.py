"""Experts on a GPU: two grouped products each way, and what is between them in their epilogues."""

import torch
from torch import Tensor

from onepass.kernels.grouped import bias_gradient, columns_of_tile, combine, group, outer, product
from onepass.options import EXPERT_TENSORS, ExpertGradients, ExpertOptions


def expert_mlp(
    hidden: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, gate_up_bias: Tensor | None,
    down_bias: Tensor | None, a1: Tensor | None, b1: Tensor | None, a2: Tensor | None, b2: Tensor | None,
    options: ExpertOptions,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The result, and what `gradient` needs of it: the products before the activation."""
    o = options
    w1, w2 = (w.mT if o.transposed else w for w in (gate_up, down))
    groups, K = group(experts, len(w1)), experts.shape[1]
    h = hidden.new_empty((experts.numel(), w1.shape[1])) if o.saved else None
    low1 = None if a1 is None else product(hidden, a1, groups, o, share=K)
    activated = product(
        hidden, w1, groups, o, share=K, epilogue="glu", low=low1, lora=b1, scale=o.gate_up_scale,
        bias=gate_up_bias, h=h,
    )  # fmt: skip
    low2 = None if a2 is None else product(activated, a2, groups, o)
    y = product(activated, w2, groups, o, scatter=True, low=low2, lora=b2, scale=o.down_scale, bias=down_bias)
    return combine(y, weights, experts, len(w1), hidden), h


def gradient(
    grad: Tensor, hidden: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor,
    gate_up_bias: Tensor | None, down_bias: Tensor | None, a1: Tensor | None, b1: Tensor | None, a2: Tensor | None,
    b2: Tensor | None, h: Tensor, options: ExpertOptions,
) -> ExpertGradients:  # fmt: skip
    """Of all tensors that are floating-point, in their order, None where not needed."""
    o = options
    w1, w2 = (w.mT if o.transposed else w for w in (gate_up, down))
    E, width = len(w1), w2.shape[2]
    slots = experts.numel()
    groups, K = group(experts, E), experts.shape[1]
    found: dict[str, Tensor | None] = dict.fromkeys(EXPERT_TENSORS)

    up2 = None if b2 is None else product(grad, b2.mT, groups, o, share=K)
    weighted = hidden.new_empty((slots, width)) if o.needs("down") or o.needs("a2") or o.needs("b2") else None
    dh = torch.empty_like(h)
    n_tiles = -(-width // columns_of_tile(width, "glu_gradient", h.element_size()))
    parts = weights.new_zeros((n_tiles, slots))
    product(
        grad, w2.mT, groups, o, share=K, epilogue="glu_gradient", low=up2, lora=None if a2 is None else a2.mT,
        scale=o.down_scale, h=h, weights=weights, out=dh, weighted=weighted, parts=parts,
    )  # fmt: skip
    if o.needs("weights"):
        total = parts.sum(0)
        if down_bias is not None:
            of_bias = parts.new_zeros((slots, 1))
            total += product(grad, down_bias.unsqueeze(1), groups, o, share=K, scatter=True, out=of_bias)[:, 0]
        found["weights"] = total.view_as(weights)
    up1 = None
    if b1 is not None:
        up1 = product(dh, b1.mT, groups, o)
    if o.needs("hidden"):
        a1t = None if a1 is None else a1.mT
        y = product(dh, w1.mT, groups, o, scatter=True, low=up1, lora=a1t, scale=o.gate_up_scale)
        found["hidden"] = combine(y, None, experts, E, hidden)
    if o.needs("gate_up"):
        out = torch.empty_like(gate_up, memory_format=torch.contiguous_format)
        outer(dh, hidden, out.mT if o.transposed else out, groups, share_b=K)
        found["gate_up"] = out
    if o.needs("down"):
        out = torch.empty_like(down, memory_format=torch.contiguous_format)
        outer(grad, weighted, out.mT if o.transposed else out, groups, share_a=K)  # type: ignore[arg-type]
        found["down"] = out
    if o.needs("gate_up_bias"):
        found["gate_up_bias"] = bias_gradient(dh, None, gate_up_bias, groups, 0)  # type: ignore[arg-type]
    if o.needs("down_bias"):
        found["down_bias"] = bias_gradient(grad, weights, down_bias, groups, K)  # type: ignore[arg-type]
    if o.needs("a1"):
        found["a1"] = outer(up1, hidden, torch.empty_like(a1), groups, share_b=K, scale=o.gate_up_scale)  # type: ignore[arg-type]
    if o.needs("b1"):
        low1 = product(hidden, a1, groups, o, share=K)  # type: ignore[arg-type]
        found["b1"] = outer(dh, low1, torch.empty_like(b1), groups, scale=o.gate_up_scale)  # type: ignore[arg-type]
    if o.needs("a2"):
        found["a2"] = outer(up2, weighted, torch.empty_like(a2), groups, scale=o.down_scale)  # type: ignore[arg-type]
    if o.needs("b2"):
        low2 = product(weighted, a2, groups, o)  # type: ignore[arg-type]
        found["b2"] = outer(grad, low2, torch.empty_like(b2), groups, share_a=K, scale=o.down_scale)  # type: ignore[arg-type]
    return tuple(found.values())  # type: ignore[return-value]
