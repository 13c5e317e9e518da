"""The divergence of a linear head from a teacher if the call is traced: operations registered with torch.

`LinearLogits.divergence` calls them. In eager mode it calls `tiled_loss`, which takes three GEMMs; these take four.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass.core.dispatch import check_upstream, like_gradients, operation
from onepass.core.options import PairOptions, PairRows
from onepass.core.shard import NOT_SHARDED, Shard
from onepass.logits.head import COUNT, HeadTensors, Settings
from onepass.logits.row_loss import DivergenceLoss
from onepass.logits.tiled_loss import walk


class TeacherTensors(NamedTuple):
    """A teacher's logits ``(N, V)`` or, with a weight, its hidden states ``(N, H)``."""

    teacher: Tensor
    teacher_weight: Tensor | None = None
    teacher_bias: Tensor | None = None
    teacher_low: Tensor | None = None
    teacher_up: Tensor | None = None


class TeacherDtypes(NamedTuple):
    """The dtypes of the teacher's GEMMs and of its logits; both are those of the logits, if these are given."""

    teacher_dtype: torch.dtype
    teacher_logits_dtype: torch.dtype


def row_divergence(
    dtype: torch.dtype,
    tensors: TeacherTensors,
    dtypes: TeacherDtypes,
    read: PairRows,
    options: PairOptions,
    held: Shard = NOT_SHARDED,
    compared: Shard = NOT_SHARDED,
) -> DivergenceLoss:
    """The divergence as a `RowLoss`, for student logits of ``dtype``.

    If the vocabulary is sharded, ``held`` are the columns of this process, of which ``compared`` are compared.
    """
    teacher, weight, *rest = tensors
    settings = Settings(*dtypes, shard=held, invariant_gemms=options.invariant)
    head = teacher if weight is None else (HeadTensors(teacher, weight, *rest), settings)
    return DivergenceLoss(dtype, head, read[1:], options, compared)


def tiled_divergence(
    tensors: HeadTensors,
    teacher: TeacherTensors,
    read: PairRows,
    dtypes: TeacherDtypes,
    settings: Settings,
    options: PairOptions,
) -> Tensor:
    """The divergence of every row, ``(N,)``, differentiable with respect to the student's head."""
    return _Divergence.apply(*tensors, *teacher, *read, dtypes, settings, options)


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        *tensors, dtypes, settings, options = arguments
        ctx.save_for_backward(*tensors)
        ctx.rest = dtypes, settings, options
        return _forward(*parts(tensors), list(ctx.needs_input_grad[:COUNT]), *ctx.rest)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        check_upstream(grad)
        saved = ctx.saved_tensors
        found = _gradient(*parts(saved), grad, list(ctx.needs_input_grad[:COUNT]), *ctx.rest)
        return *found, *[None] * (len(saved) - COUNT + len(ctx.rest))


def parts(tensors: Sequence[Tensor]) -> tuple[HeadTensors, TeacherTensors, PairRows]:
    """The tensors of the student, of the teacher, and those with a number of every row."""
    stop = COUNT + len(TeacherTensors._fields)
    return HeadTensors(*tensors[:COUNT]), TeacherTensors(*tensors[COUNT:stop]), PairRows(*tensors[stop:])


def _like_forward(tensors: HeadTensors, dtypes: TeacherDtypes, settings: Settings, **_: Any) -> Tensor:
    dtype = torch.promote_types(torch.promote_types(settings.dtype, dtypes.teacher_dtype), torch.float32)
    return tensors.hidden.new_empty(tensors.hidden.shape[0], dtype=dtype)


@operation("onepass::linear_divergence", _like_forward, composite=True)
def _forward(
    tensors: HeadTensors,
    teacher: TeacherTensors,
    read: PairRows,
    later: list[bool],
    dtypes: TeacherDtypes,
    settings: Settings,
    options: PairOptions,
) -> Tensor:
    """The divergence of every row, ``(N,)``; ``later`` says of which tensors the backward needs the gradient."""
    row_loss = row_divergence(settings.dtype, teacher, dtypes, read, options)
    return walk(tensors, read.row_mask, row_loss, settings, later=later)[0]


@operation("onepass::linear_divergence_gradient", like_gradients, composite=True)
def _gradient(
    tensors: HeadTensors,
    teacher: TeacherTensors,
    read: PairRows,
    grad: Tensor,
    needed: list[bool],
    dtypes: TeacherDtypes,
    settings: Settings,
    options: PairOptions,
) -> list[Tensor | None]:
    """The gradients of the student's head, each if ``needed``, from that of every row."""
    row_loss = row_divergence(settings.dtype, teacher, dtypes, read, options)
    gradients = walk(tensors, read.row_mask, row_loss, settings, needed, lambda: grad)[1]
    return gradients.scaled(None)  # type: ignore[union-attr]
