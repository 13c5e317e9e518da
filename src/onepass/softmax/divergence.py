"""The divergence between two rows of logits: autograd, and the operations registered with torch.

`logits.source` calls `divergence_of` for tensors of logits, `logits.row_loss` calls `pair_numbers` for tiles.
"""

from typing import Any

import torch
from torch import Tensor

from onepass import reference
from onepass.backend import backend_of
from onepass.core.dispatch import empty_gradient, operation, refuse_second_derivatives
from onepass.core.options import DIVERGENCE, PAIR_NUMBERS, Inputs, Options, PairOptions, empty_pair_numbers
from onepass.core.shard import NOT_SHARDED, Shard
from onepass.softmax.shards import group_named, of_all_ranks

MEANS = [n for n, name in enumerate(PAIR_NUMBERS) if name.endswith("mean") or n == DIVERGENCE]


def divergence_of(
    student: Tensor, teacher: Tensor, row_mask: Tensor | None, options: PairOptions, shard: Shard = NOT_SHARDED
) -> Tensor:
    """The divergence of every row, ``(...)``, differentiable with respect to both tensors.

    Arguments must be checked already. If the vocabulary is sharded, ``options.columns`` counts columns of this process.
    """
    student, teacher = (x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous() for x in (student, teacher))
    if torch.is_grad_enabled() and (student.requires_grad or teacher.requires_grad):
        loss: Tensor = _Divergence.apply(student, teacher, row_mask, shard, options)
        return loss
    return _pair_numbers(student, teacher, row_mask, shard, options)[DIVERGENCE]


def pair_numbers(
    student: Tensor, teacher: Tensor, row_mask: Tensor | None, shard: Shard, options: PairOptions
) -> Tensor:
    """`PAIR_NUMBERS` of every row, those of all ranks if the vocabulary is sharded; the logits are those of this rank.

    The ranks exchange 5 numbers per row once or, for ``"jsd"``, 4 numbers and then 3.
    """
    backend = backend_of(student, teacher)
    if not shard.sizes:
        packed: Tensor = backend.divergence(student, teacher, row_mask, options)
        return packed
    local = backend if student.shape[-1] else reference
    group = group_named(shard.group)
    if options.direction != "jsd":
        states = of_all_ranks(local.divergence_states(student, teacher, options), group)
        packed = backend.merge_divergences(states, student, teacher, row_mask, options)
        return packed
    packed = empty_pair_numbers(student, teacher)
    read = [
        (x, Options("shift log_normalizer", of)) for x, of in ((student, options.student), (teacher, options.teacher))
    ]
    states = of_all_ranks(torch.cat([local.shard_statistics(x, Inputs(), of_x) for x, of_x in read]), group)
    for (x, of_x), part, place in zip(read, states.chunk(2, 1), (0, 3)):
        merged = backend.merge_shards(part.contiguous(), x, Inputs(row_mask=row_mask), shard, of_x)[0]
        packed[place : place + 2] = merged[:2]
    local.add_means(student, teacher, row_mask, packed, options)
    packed[MEANS] = of_all_ranks(packed[MEANS], group).sum(0)
    return packed


def _pair_numbers(
    student: Tensor, teacher: Tensor, row_mask: Tensor | None, shard: Shard, options: PairOptions
) -> Tensor:
    if not shard.sizes:
        packed: Tensor = _forward(student, teacher, row_mask, options)
        return packed
    columns = slice(options.columns)
    return pair_numbers(student[..., columns], teacher[..., columns], row_mask, shard, options)


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, student: Tensor, teacher: Tensor, row_mask: Tensor | None, shard: Shard, options: PairOptions
    ) -> Tensor:
        packed = _pair_numbers(student, teacher, row_mask, shard, options)
        ctx.save_for_backward(student, teacher, row_mask, packed)
        ctx.options = options
        return packed[DIVERGENCE]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        found = _gradient(*ctx.saved_tensors, grad, list(ctx.needs_input_grad[:2]), ctx.options)
        return *found, None, None, None


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
            if options.columns != 0:  # as on a rank that holds only padding
                backend_of(student, teacher).divergence_gradient(*pair, row_mask, packed, grad, *rest)
            if options.columns is not None:
                out[..., options.columns :] = 0
        found.append(out)
    return found
