"""The divergence of a linear head from a teacher: three products, or operations registered with torch (four)."""

from typing import Any

import torch
from torch import Tensor

from onepass.dispatch import operation, refuse_second_derivatives
from onepass.head.loss import walk
from onepass.head.row_loss import DivergenceLoss, Source
from onepass.head.tiles import empty_gradients
from onepass.options import PairOptions
from onepass.source import Logits, LogitsSource


def linear_divergence(
    student: LogitsSource,
    teacher: Logits,
    row_mask: Tensor | None,
    options: PairOptions,
    vocab: int,
    divisor: Tensor | float | None,
) -> Tensor:
    """``Σ / divisor`` over the rows that are not masked, or of every row; differentiable in the student."""
    source: Source
    if isinstance(teacher, Tensor):
        source = (teacher.detach().reshape(-1, teacher.shape[-1]), None, None), teacher.dtype
    else:
        source = teacher.parts, teacher.dtype
    if student.takes_row_losses:
        return student.loss_of_rows(DivergenceLoss(student.dtype, source, options, vocab), row_mask, divisor)
    row_mask = None if row_mask is None else row_mask.reshape(-1) != 0
    settings = vocab, student.dtype, source[1], student.max_memory
    loss: Tensor = _Divergence.apply(*student.parts, *source[0], row_mask, settings, options)
    return loss.reshape(student.shape[:-1]) if divisor is None else loss.sum() / divisor


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        *tensors, settings, options = arguments
        ctx.save_for_backward(*tensors)
        ctx.settings = (*settings, options)
        loss: Tensor = _forward(*tensors, *ctx.settings)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        needed = ctx.needs_input_grad[:3]
        found = _gradient(*ctx.saved_tensors, grad, list(needed), *ctx.settings)
        return *found, *[None] * 6


@operation(
    "onepass::linear_divergence",
    lambda hidden, dtype, teacher_dtype, **_: hidden.new_empty(
        hidden.shape[0], dtype=torch.promote_types(torch.promote_types(dtype, teacher_dtype), torch.float32)
    ),
)
def _forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    teacher: Tensor,
    teacher_weight: Tensor | None,
    teacher_bias: Tensor | None,
    row_mask: Tensor | None,
    vocab: int,
    dtype: torch.dtype,
    teacher_dtype: torch.dtype,
    max_memory: int | None,
    options: PairOptions,
) -> Tensor:
    source = (teacher, teacher_weight, teacher_bias), teacher_dtype
    return walk((hidden, weight, bias), row_mask, DivergenceLoss(dtype, source, options, vocab), dtype, max_memory)[0]


@operation(
    "onepass::linear_divergence_gradient",
    lambda hidden, weight, bias, needed, **_: empty_gradients((hidden, weight, bias), needed),
)
def _gradient(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    teacher: Tensor,
    teacher_weight: Tensor | None,
    teacher_bias: Tensor | None,
    row_mask: Tensor | None,
    grad: Tensor,
    needed: list[bool],
    vocab: int,
    dtype: torch.dtype,
    teacher_dtype: torch.dtype,
    max_memory: int | None,
    options: PairOptions,
) -> list[Tensor | None]:
    source = (teacher, teacher_weight, teacher_bias), teacher_dtype
    row_loss = DivergenceLoss(dtype, source, options, vocab)
    gradients = walk((hidden, weight, bias), row_mask, row_loss, dtype, max_memory, needed, grad)[1]
    return gradients.scaled(None)  # type: ignore[union-attr]
