"""The divergence of a linear head from a teacher: three products, or operations registered with torch (four)."""

from typing import Any

import torch
from torch import Tensor

from onepass.dispatch import operation, refuse_second_derivatives
from onepass.head.loss import walk
from onepass.head.row_loss import DivergenceLoss, Source
from onepass.head.tiles import Settings, empty_gradients
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
        rows = teacher.detach().reshape(-1, teacher.shape[-1])
        source = (rows if rows.stride(-1) == 1 else rows.contiguous(), None, None), teacher.dtype
    else:
        source = teacher.parts, teacher.dtype
    if student.takes_row_losses:
        return student.loss_of_rows(DivergenceLoss(student.dtype, source, options, vocab), row_mask, divisor)
    row_mask = None if row_mask is None else row_mask.reshape(-1) != 0
    settings = vocab, source[1], *student.settings
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
    composite=True,
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
    teacher_dtype: torch.dtype,
    dtype: torch.dtype,
    max_memory: int | None,
    bias_apart: bool,
    options: PairOptions,
) -> Tensor:
    source = (teacher, teacher_weight, teacher_bias), teacher_dtype
    row_loss = DivergenceLoss(dtype, source, options, vocab)
    return walk((hidden, weight, bias), row_mask, row_loss, Settings(dtype, max_memory, bias_apart))[0]


@operation(
    "onepass::linear_divergence_gradient",
    lambda hidden, weight, bias, needed, **_: empty_gradients((hidden, weight, bias), needed),
    composite=True,
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
    teacher_dtype: torch.dtype,
    dtype: torch.dtype,
    max_memory: int | None,
    bias_apart: bool,
    options: PairOptions,
) -> list[Tensor | None]:
    source = (teacher, teacher_weight, teacher_bias), teacher_dtype
    row_loss = DivergenceLoss(dtype, source, options, vocab)
    settings = Settings(dtype, max_memory, bias_apart)
    gradients = walk((hidden, weight, bias), row_mask, row_loss, settings, needed, grad)[1]
    return gradients.scaled(None)  # type: ignore[union-attr]
