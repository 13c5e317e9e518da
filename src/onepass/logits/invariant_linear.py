"""A linear layer for the batch-invariant mode: of logits that are materialized, and of the gates of routers."""

from typing import Any

import torch
from torch import Tensor

from onepass.backend import backend_of
from onepass.core.dispatch import check_upstream, is_plain
from onepass.core.invariance import is_batch_invariant


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear`. In the batch-invariant mode its rows, and their gradient, are those of `row_gemm`.

    A call that is traced takes torch's, which a compiler then replaces.
    """
    if not is_batch_invariant() or not is_plain(x, weight, bias) or torch.is_autocast_enabled(x.device.type):
        return torch.nn.functional.linear(x, weight, bias)
    out: Tensor = _Linear.apply(x.reshape(-1, x.shape[-1]), weight, bias)
    return out.view(*x.shape[:-1], weight.shape[0])


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return invariant_mm(x, weight.t(), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        check_upstream(grad)
        x, weight = ctx.saved_tensors
        needed = ctx.needs_input_grad
        return (
            invariant_mm(grad, weight) if needed[0] else None,
            grad.t() @ x if needed[1] else None,
            grad.sum(0) if needed[2] else None,
        )


def invariant_mm(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """``a @ b + bias``, whose rows do not depend on each other."""
    out = a.new_empty(len(a), b.shape[1])
    backend_of(a).row_gemm(a if a.stride(-1) == 1 else a.contiguous(), b, bias, out)
    return out
