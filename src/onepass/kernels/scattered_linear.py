"""`moe.scattered_linear` on a GPU: the linear layers of experts on token-expert assignments, forward and backward."""

import torch
from torch import Tensor

from onepass.core.moe_options import Groups, ScatterGradients, ScatterOptions, ScatterTensors
from onepass.kernels.expert_rows import bias_gradient, combine, sum_rows
from onepass.kernels.grouped_gemm import grouped_gemm
from onepass.kernels.grouped_weight_gradient import weight_gradient


def scattered_linear(
    tensors: ScatterTensors, experts: Tensor, groups: Groups, options: ScatterOptions
) -> tuple[Tensor, Tensor | None]:
    """The result and, with routing weights, the rows ``(T·K, outputs)`` before they are summed; else None."""
    (x, weight, bias, weights), o = tensors, options
    w = weight.mT if o.transposed else weight
    new = x.new_empty if weights is not None else x.new_zeros  # `grouped_gemm` does not write rows of out-of-range ids
    y = grouped_gemm(
        x, w, groups, share=0 if o.grouped_in else o.k, scatter=not o.grouped_out, bias=bias,
        out=new((len(groups.order), w.shape[1])),
    )  # fmt: skip
    if weights is None:
        return y, None
    return combine(y, weights, experts, len(w)), y


def scattered_linear_gradient(
    grad: Tensor, y: Tensor | None, tensors: ScatterTensors, experts: Tensor, groups: Groups, needed: list[bool],
    options: ScatterOptions,
) -> ScatterGradients:  # fmt: skip
    """The gradients of the tensors, None where not needed.

    ``grad`` is the upstream gradient, and ``y`` the second result of `scattered_linear`.
    """
    (x, weight, bias, weights), o = tensors, options
    w = weight.mT if o.transposed else weight
    of_x, of_weight, of_bias, of_weights = needed
    dx = dw = db = dweights = None
    if weights is not None:
        if of_weights:
            valid = (experts >= 0) & (experts < len(w))
            rows = y.view(*weights.shape, y.shape[-1]).float()  # type: ignore[union-attr]
            dweights = torch.where(valid, (rows * grad.unsqueeze(1)).sum(-1), 0.0).to(weights.dtype)
        grad = (grad.unsqueeze(1) * weights.unsqueeze(-1)).to(x.dtype).flatten(0, 1)
    share = 0 if o.grouped_out else 1
    share_x = 0 if o.grouped_in else o.k
    if of_x:
        out = x.new_zeros((len(groups.order), w.shape[2])) if o.grouped_in else None
        dx = grouped_gemm(grad, w.mT, groups, share=share, out=out)
        if not o.grouped_in:
            dx = sum_rows(dx, groups.places.view(experts.shape))
    if of_weight:
        dw = weight_gradient(grad, x, weight, groups, share_a=share, share_b=share_x, transposed=o.transposed)
    if of_bias:
        db = bias_gradient(grad, None, bias, groups, share)  # type: ignore[arg-type]
    return dx, dw, db, dweights
