"""Experts on a GPU, from hidden states to the gradients: grouped products, and what is between them."""

import torch
from torch import Tensor

from onepass.kernels.grouped import bias_gradient, combine, glu_gradient, outer, product
from onepass.options import EXPERT_TENSORS, ExpertGradients, ExpertOptions, Groups


def expert_mlp(
    hidden: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, gate_up_bias: Tensor | None,
    down_bias: Tensor | None, a1: Tensor | None, b1: Tensor | None, a2: Tensor | None, b2: Tensor | None,
    experts: Tensor, order: Tensor, offsets: Tensor, tile_expert: Tensor, tile_row: Tensor, options: ExpertOptions,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The result, and what `gradient` needs of it: the products before the activation."""
    o = options
    w1, w2 = (w.mT if o.transposed else w for w in (gate_up, down))
    groups, K = Groups(order, offsets, tile_expert, tile_row), experts.shape[1]
    h = hidden.new_empty((experts.numel(), w1.shape[1])) if o.saved else None
    low1 = None if a1 is None else product(hidden, a1, groups, o, share=K)
    activated = product(
        hidden, w1, groups, o, share=K, glu=True, low=low1, lora=b1, scale=o.gate_up_scale,
        bias=gate_up_bias, h=h,
    )  # fmt: skip
    low2 = None if a2 is None else product(activated, a2, groups, o)
    y = product(activated, w2, groups, o, scatter=True, low=low2, lora=b2, scale=o.down_scale, bias=down_bias)
    return combine(y, weights, experts, len(w1), hidden), h


def gradient(
    grad: Tensor, h: Tensor, hidden: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor,
    gate_up_bias: Tensor | None, down_bias: Tensor | None, a1: Tensor | None, b1: Tensor | None, a2: Tensor | None,
    b2: Tensor | None, experts: Tensor, order: Tensor, offsets: Tensor, tile_expert: Tensor, tile_row: Tensor,
    options: ExpertOptions,
) -> ExpertGradients:  # fmt: skip
    """Of all tensors that are floating-point, in their order, None where not needed."""
    o = options
    w1, w2 = (w.mT if o.transposed else w for w in (gate_up, down))
    groups, K = Groups(order, offsets, tile_expert, tile_row), experts.shape[1]
    found: dict[str, Tensor | None] = dict.fromkeys(EXPERT_TENSORS)

    up2 = None if b2 is None else product(grad, b2.mT, groups, o, share=K)
    a2t = None if a2 is None else a2.mT
    of_activated = product(grad, w2.mT, groups, o, share=K, low=up2, lora=a2t, scale=o.down_scale)
    keep = o.needs("down") or o.needs("a2") or o.needs("b2")
    dh, of_weights = glu_gradient(of_activated, h, weights, groups, o, keep)
    weighted = of_activated  # now the activated times the routing weight
    if o.needs("weights"):
        if down_bias is not None:
            of_bias = of_weights.new_zeros((weights.numel(), 1))
            product(grad, down_bias.unsqueeze(1), groups, o, share=K, scatter=True, out=of_bias)
            of_weights += of_bias.view_as(weights)
        found["weights"] = of_weights
    up1 = None
    if b1 is not None:
        up1 = product(dh, b1.mT, groups, o)
    if o.needs("hidden"):
        a1t = None if a1 is None else a1.mT
        y = product(dh, w1.mT, groups, o, scatter=True, low=up1, lora=a1t, scale=o.gate_up_scale)
        found["hidden"] = combine(y, None, experts, len(w1), hidden)
    if o.needs("gate_up"):
        out = torch.empty_like(gate_up, memory_format=torch.contiguous_format)
        outer(dh, hidden, out.mT if o.transposed else out, groups, share_b=K)
        found["gate_up"] = out
    if o.needs("down"):
        out = torch.empty_like(down, memory_format=torch.contiguous_format)
        outer(grad, weighted, out.mT if o.transposed else out, groups, share_a=K)
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
