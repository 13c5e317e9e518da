"""The divergence between two rows of logits: autograd and the operations registered with torch."""

from typing import Any

import torch
from torch import Tensor

from onepass.dispatch import empty_gradient, is_plain, path_of, refuse_second_derivatives
from onepass.options import PAIR_NUMBERS, PairOptions, empty_pair_numbers

LOSS = PAIR_NUMBERS.index("divergence")


def divergence(
    student: Tensor, teacher: Tensor, row_mask: Tensor | None, options: PairOptions, vocab_size: int | None = None
) -> Tensor:
    """One number a row, ``(...)``, differentiable with respect to both. Arguments are checked already."""
    student, teacher = (x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous() for x in (student, teacher))
    row_mask = None if row_mask is None else row_mask.contiguous()
    vocab = vocab_size or student.shape[-1]
    if torch.is_grad_enabled() and (student.requires_grad or teacher.requires_grad):
        loss: Tensor = _Divergence.apply(student, teacher, row_mask, options, vocab)
        return loss
    return _forward(student, teacher, row_mask, options, vocab)[LOSS]


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, student: Tensor, teacher: Tensor, row_mask: Tensor | None, options: PairOptions, vocab: int
    ) -> Tensor:
        packed = _forward(student, teacher, row_mask, options, vocab)
        ctx.save_for_backward(student, teacher, row_mask, packed)
        ctx.options, ctx.vocab = options, vocab
        return packed[LOSS]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        grads = (
            _gradient(*ctx.saved_tensors, grad, of_teacher, ctx.options, ctx.vocab) if needed else None
            for of_teacher, needed in zip((False, True), ctx.needs_input_grad)
        )
        return *grads, None, None, None


def _forward(student: Tensor, teacher: Tensor, row_mask: Tensor | None, options: PairOptions, vocab: int) -> Tensor:
    if not is_plain(student, teacher):
        packed: Tensor = torch.ops.onepass.divergence(student, teacher, row_mask, vocab, *options)
        return packed
    packed = path_of(student, teacher).divergence(student[..., :vocab], teacher[..., :vocab], row_mask, options)
    return packed


def _gradient(student: Tensor, teacher: Tensor, *arguments: Any) -> Tensor:
    row_mask, packed, grad, of_teacher, options, vocab = arguments
    if not is_plain(student, teacher):
        out: Tensor = torch.ops.onepass.divergence_gradient(
            student, teacher, row_mask, packed, grad, of_teacher, vocab, *options
        )
        return out
    out = empty_gradient(teacher if of_teacher else student)
    path_of(student, teacher).divergence_gradient(
        student[..., :vocab], teacher[..., :vocab], row_mask, packed, grad, of_teacher, options, out[..., :vocab]
    )
    if vocab < out.shape[-1]:
        out[..., vocab:] = 0
    return out


@torch.library.custom_op("onepass::divergence", mutates_args=())
def _divergence_op(
    student: Tensor,
    teacher: Tensor,
    row_mask: Tensor | None,
    vocab: int,
    direction: str,
    beta: float,
    temperature: float,
    softcap: float | None,
    teacher_temperature: float,
    teacher_softcap: float | None,
) -> Tensor:
    options = PairOptions(direction, beta, temperature, softcap, teacher_temperature, teacher_softcap)
    return _forward(student, teacher, row_mask, options, vocab)


@_divergence_op.register_fake
def _(student, teacher, *arguments):
    return empty_pair_numbers(student, teacher)


@torch.library.custom_op("onepass::divergence_gradient", mutates_args=())
def _gradient_op(
    student: Tensor,
    teacher: Tensor,
    row_mask: Tensor | None,
    packed: Tensor,
    grad: Tensor,
    of_teacher: bool,
    vocab: int,
    direction: str,
    beta: float,
    temperature: float,
    softcap: float | None,
    teacher_temperature: float,
    teacher_softcap: float | None,
) -> Tensor:
    options = PairOptions(direction, beta, temperature, softcap, teacher_temperature, teacher_softcap)
    return _gradient(student, teacher, row_mask, packed, grad, of_teacher, options, vocab)


@_gradient_op.register_fake
def _(student, teacher, row_mask, packed, grad, of_teacher, *options):
    return empty_gradient(teacher if of_teacher else student)
