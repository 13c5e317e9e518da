"""The divergence between two rows of logits: autograd and the operations registered with torch."""

from typing import Any

import torch
from torch import Tensor

from onepass.dispatch import empty_gradient, operation, path_of, refuse_second_derivatives
from onepass.options import PAIR_NUMBERS, PairOptions, empty_pair_numbers

LOSS = PAIR_NUMBERS.index("divergence")


def divergence(student: Tensor, teacher: Tensor, row_mask: Tensor | None, options: PairOptions, vocab: int) -> Tensor:
    """Of the first ``vocab`` columns, one number a row, ``(...)``, differentiable with respect to both. Arguments are
    checked already."""
    student, teacher = (x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous() for x in (student, teacher))
    if torch.is_grad_enabled() and (student.requires_grad or teacher.requires_grad):
        loss: Tensor = _Divergence.apply(student, teacher, row_mask, options, vocab)
        return loss
    return _forward(student, teacher, row_mask, vocab, options)[LOSS]


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, student: Tensor, teacher: Tensor, row_mask: Tensor | None, options: PairOptions, vocab: int
    ) -> Tensor:
        packed = _forward(student, teacher, row_mask, vocab, options)
        ctx.save_for_backward(student, teacher, row_mask, packed)
        ctx.options, ctx.vocab = options, vocab
        return packed[LOSS]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        grads = (
            _gradient(*ctx.saved_tensors, grad, of_teacher, ctx.vocab, ctx.options) if needed else None
            for of_teacher, needed in zip((False, True), ctx.needs_input_grad)
        )
        return *grads, None, None, None


@operation("onepass::divergence", lambda student, teacher, **_: empty_pair_numbers(student, teacher))
def _forward(student: Tensor, teacher: Tensor, row_mask: Tensor | None, vocab: int, options: PairOptions) -> Tensor:
    packed: Tensor = path_of(student, teacher).divergence(student[..., :vocab], teacher[..., :vocab], row_mask, options)
    return packed


@operation(
    "onepass::divergence_gradient",
    lambda student, teacher, of_teacher, **_: empty_gradient(teacher if of_teacher else student),
)
def _gradient(
    student: Tensor,
    teacher: Tensor,
    row_mask: Tensor | None,
    packed: Tensor,
    grad: Tensor,
    of_teacher: bool,
    vocab: int,
    options: PairOptions,
) -> Tensor:
    out = empty_gradient(teacher if of_teacher else student)
    path_of(student, teacher).divergence_gradient(
        student[..., :vocab], teacher[..., :vocab], row_mask, packed, grad, of_teacher, options, out[..., :vocab]
    )
    if vocab < out.shape[-1]:
        out[..., vocab:] = 0
    return out
