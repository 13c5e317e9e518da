"""Experts on a GPU, from hidden states to the gradients: grouped products, and what is between them."""

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
    h = hidden.new_empty((experts.numel(), w1.shape[1])) if o.needed else None
    low1 = None if a1 is None else product(hidden, a1, groups, share=K, scale=o.gate_up_scale)
    activated = product(hidden, w1, groups, o, share=K, glu=True, low=low1, lora=b1, bias=gate_up_bias, h=h)
    low2 = None if a2 is None else product(activated, a2, groups, scale=o.down_scale)
    y = product(activated, w2, groups, scatter=True, low=low2, lora=b2, bias=down_bias)
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

    up2 = None if b2 is None else product(grad, b2.mT, groups, share=K, scale=o.down_scale)
    a2t = None if a2 is None else a2.mT
    of_activated = product(grad, w2.mT, groups, share=K, low=up2, lora=a2t)
    keep = o.needs("down") or o.needs("a2") or o.needs("b2")
    dh, of_weights = glu_gradient(of_activated, h, weights, groups, o, keep)
    if o.needs("weights"):
        if down_bias is not None:
            of_bias = of_weights.new_zeros((weights.numel(), 1))
            product(grad, down_bias.unsqueeze(1), groups, share=K, scatter=True, out=of_bias)
            of_weights += of_bias.view_as(weights)
        found["weights"] = of_weights
    weighted = of_activated  # what it has become: the activated times the routing weight
    if o.needs("down"):
        found["down"] = outer(grad, weighted, down, groups, share_a=K, transposed=o.transposed)
    if o.needs("a2"):
        found["a2"] = outer(up2, weighted, a2, groups)  # type: ignore[arg-type]
    if o.needs("b2"):
        low2 = product(weighted, a2, groups, scale=o.down_scale)  # type: ignore[arg-type]
        found["b2"] = outer(grad, low2, b2, groups, share_a=K)  # type: ignore[arg-type]
    del of_activated, weighted  # before there is more
    up1 = None if b1 is None else product(dh, b1.mT, groups, scale=o.gate_up_scale)
    if o.needs("hidden"):
        a1t = None if a1 is None else a1.mT
        of_slots = product(dh, w1.mT, groups, scatter=True, low=up1, lora=a1t)
        found["hidden"] = combine(of_slots, None, experts, len(w1), hidden)
        del of_slots
    if o.needs("gate_up"):
        found["gate_up"] = outer(dh, hidden, gate_up, groups, share_b=K, transposed=o.transposed)
    if o.needs("a1"):
        found["a1"] = outer(up1, hidden, a1, groups, share_b=K)  # type: ignore[arg-type]
    if o.needs("b1"):
        low1 = product(hidden, a1, groups, share=K, scale=o.gate_up_scale)  # type: ignore[arg-type]
        found["b1"] = outer(dh, low1, b1, groups)  # type: ignore[arg-type]
    if o.needs("gate_up_bias"):
        found["gate_up_bias"] = bias_gradient(dh, None, gate_up_bias, groups, 0)  # type: ignore[arg-type]
    if o.needs("down_bias"):
        found["down_bias"] = bias_gradient(grad, weights, down_bias, groups, K)  # type: ignore[arg-type]
    return tuple(found.values())  # type: ignore[return-value]
