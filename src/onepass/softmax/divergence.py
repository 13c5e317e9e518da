"""The divergence between two rows of logits: autograd, and the operations registered with torch.

`logits.source` calls `divergence_of` for tensors of logits.
"""

from typing import Any

import torch
from torch import Tensor

from onepass.backend import backend_of
from onepass.core.dispatch import empty_gradient, operation, refuse_second_derivatives
from onepass.core.options import DIVERGENCE, PairOptions, empty_pair_numbers


def divergence_of(student: Tensor, teacher: Tensor, row_mask: Tensor | None, options: PairOptions) -> Tensor:
    """The divergence of every row, ``(...)``, differentiable with respect to both tensors.

    Arguments must be checked already.
    """
    student, teacher = (x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous() for x in (student, teacher))
    if torch.is_grad_enabled() and (student.requires_grad or teacher.requires_grad):
        loss: Tensor = _Divergence.apply(student, teacher, row_mask, options)
        return loss
    return _forward(student, teacher, row_mask, options)[DIVERGENCE]


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor, row_mask: Tensor | None, options: PairOptions) -> Tensor:
        packed = _forward(student, teacher, row_mask, options)
        ctx.save_for_backward(student, teacher, row_mask, packed)
        ctx.options = options
        return packed[DIVERGENCE]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        found = _gradient(*ctx.saved_tensors, grad, list(ctx.needs_input_grad[:2]), ctx.options)
        return *found, None, None


@operation("onepass::divergence", lambda student, teacher, **_: empty_pair_numbers(student, teacher))
def _forward(student: Tensor, teacher: Tensor, row_mask: Tensor | None, options: PairOptions) -> Tensor:
    columns = slice(options.columns)
    pair = student[..., columns], teacher[..., columns]
    packed: Tensor = backend_of(student, teacher).divergence(*pair, row_mask, options)
    return packed


def _like_gradient(student: Tensor, teacher: Tensor, needed: list[bool], **_: Any) -> list[Tensor | None]:
    return [empty_gradient(x) if n else None for x, n in zip((student, teacher), needed)]


@operation("onepass::divergence_gradient", _like_gradient)
def _gradient(
    student: Tensor,
    teacher: Tensor,
    row_mask: Tensor | None,
    packed: Tensor,
    grad: Tensor,
    needed: list[bool],
    options: PairOptions,
) -> list[Tensor | None]:
    """The gradients with respect to both tensors, each if ``needed``; 0 in columns that are not compared."""
    found: list[Tensor | None] = []
    columns = slice(options.columns)
    pair = student[..., columns], teacher[..., columns]
    for of_teacher, x in enumerate((student, teacher)):
        out = None
        if needed[of_teacher]:
            out = empty_gradient(x)
            rest = bool(of_teacher), options, out[..., columns]
            backend_of(student, teacher).divergence_gradient(*pair, row_mask, packed, grad, *rest)
            if options.columns is not None:
                out[..., options.columns :] = 0
        found.append(out)
    return found
