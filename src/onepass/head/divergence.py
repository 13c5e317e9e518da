"""The divergence of a linear head from a teacher: three products, or operations registered with torch (four)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from onepass.dispatch import refuse_second_derivatives
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
        ctx.settings = (*settings, *options)
        loss: Tensor = torch.ops.onepass.linear_divergence(*tensors, *ctx.settings)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        needed = ctx.needs_input_grad[:3]
        found = torch.ops.onepass.linear_divergence_gradient(*ctx.saved_tensors, grad, list(needed), *ctx.settings)
        return *[g if need else None for g, need in zip(found, needed)], *[None] * 6


def walked(
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
    options: Sequence[Any],
    needed: Sequence[bool] = (False, False, False),
    grad: Tensor | None = None,
) -> Any:
    source = (teacher, teacher_weight, teacher_bias), teacher_dtype
    row_loss = DivergenceLoss(dtype, source, PairOptions(*options), vocab)
    return walk((hidden, weight, bias), row_mask, row_loss, dtype, max_memory, needed, grad)


@torch.library.custom_op("onepass::linear_divergence", mutates_args=())
def _divergence_op(
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
    direction: str,
    beta: float,
    temperature: float,
    softcap: float | None,
    teacher_temperature: float,
    teacher_softcap: float | None,
) -> Tensor:
    options = direction, beta, temperature, softcap, teacher_temperature, teacher_softcap
    loss: Tensor = walked(
        hidden, weight, bias, teacher, teacher_weight, teacher_bias, row_mask, vocab, dtype, teacher_dtype, max_memory,
        options,
    )[0]  # fmt: skip
    return loss


@_divergence_op.register_fake
def _(hidden, *arguments):
    dtype, teacher_dtype = arguments[7:9]
    return hidden.new_empty(
        hidden.shape[0], dtype=torch.promote_types(torch.promote_types(dtype, teacher_dtype), torch.float32)
    )


@torch.library.custom_op("onepass::linear_divergence_gradient", mutates_args=())
def _gradient_op(
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
    direction: str,
    beta: float,
    temperature: float,
    softcap: float | None,
    teacher_temperature: float,
    teacher_softcap: float | None,
) -> list[Tensor]:
    options = direction, beta, temperature, softcap, teacher_temperature, teacher_softcap
    gradients = walked(
        hidden, weight, bias, teacher, teacher_weight, teacher_bias, row_mask, vocab, dtype, teacher_dtype, max_memory,
        options, needed, grad,
    )[1]  # fmt: skip
    return [hidden.new_empty(0) if g is None else g for g in gradients.scaled(None)]


@_gradient_op.register_fake
def _(hidden, weight, bias, *arguments):
    return empty_gradients((hidden, weight, bias), arguments[5])
