"""The divergence between two rows of logits: autograd, and the operations registered with torch.

`logits.source` calls `divergence_of` for tensors of logits, `logits.row_loss` calls `pair_numbers` for tiles.
"""

from math import prod
from typing import Any

import torch
from torch import Tensor

from onepass import reference
from onepass.backend import backend_of
from onepass.core.collectives import of_all_ranks
from onepass.core.dispatch import check_upstream, empty_gradient, operation
from onepass.core.options import DIVERGENCE, PAIR_NUMBERS, PairOptions, PairRows, empty_pair_numbers, normalizers
from onepass.core.shard import NOT_SHARDED, PAIR_STATE, Shard
from onepass.softmax.shards import merge_states, state_of_rows
from onepass.softmax.statistics import with_contiguous_rows

MEANS = [n for n, name in enumerate(PAIR_NUMBERS) if name.endswith("mean") or n == DIVERGENCE]


def divergence_of(
    student: Tensor, teacher: Tensor, read: PairRows, options: PairOptions, shard: Shard = NOT_SHARDED
) -> Tensor:
    """The divergence of every row, ``(...)``, differentiable with respect to both tensors.

    Arguments must be checked already. If the vocabulary is sharded, ``options.columns`` counts columns of this process.
    """
    student, teacher = map(with_contiguous_rows, (student, teacher))
    if torch.is_grad_enabled() and (student.requires_grad or teacher.requires_grad):
        return _Divergence.apply(student, teacher, *read, shard, options)
    return pair_numbers(student, teacher, read, shard, options)[DIVERGENCE]


def pair_numbers(student: Tensor, teacher: Tensor, read: PairRows, shard: Shard, options: PairOptions) -> Tensor:
    """`PAIR_NUMBERS` of every row, those of all ranks if the vocabulary is sharded; the logits are those of this rank.

    The ranks exchange 5 numbers per row once or, for ``"jsd"``, 4 numbers and then 3.
    """
    if not shard.sizes:
        return _forward(student, teacher, read, options)
    columns, options = slice(options.columns), options._replace(columns=None)
    student, teacher = student[..., columns], teacher[..., columns]
    if options.direction != "jsd":
        states = of_all_ranks(_states(student, teacher, read, options), shard.group)
        packed = _merged(states, student, teacher, read, options)
        return packed
    fields = list(zip(*normalizers(read, options)))
    parts = [state_of_rows(x, *of_x) for x, of_x in zip((student, teacher), fields)]
    of_both = of_all_ranks(torch.cat(parts), shard.group).chunk(2, 1)
    wide = student if student.dtype.itemsize >= teacher.dtype.itemsize else teacher
    of_student, of_teacher = (
        merge_states(s.contiguous(), wide, inputs, shard, of_x)[0][:2] for s, (inputs, of_x) in zip(of_both, fields)
    )
    means = of_all_ranks(_means(student, teacher, read, of_student, of_teacher, options), shard.group).sum(0)
    return torch.cat([of_student, means[:1], of_teacher, means[1:]])


def _like_states(student: Tensor, teacher: Tensor, **_: Any) -> Tensor:
    numbers = empty_pair_numbers(student, teacher)
    return numbers.new_empty((len(PAIR_STATE), prod(student.shape[:-1])))


@operation("onepass::divergence_states", _like_states)
def _states(student: Tensor, teacher: Tensor, read: PairRows, options: PairOptions) -> Tensor:
    """The state of every row of this rank's columns, ``(len(PAIR_STATE), rows)``."""
    backend = backend_of(student, teacher) if student.shape[-1] else reference
    return backend.divergence_states(student, teacher, read, options)


@operation("onepass::merge_divergences", lambda student, teacher, **_: empty_pair_numbers(student, teacher))
def _merged(states: Tensor, student: Tensor, teacher: Tensor, read: PairRows, options: PairOptions) -> Tensor:
    """`PAIR_NUMBERS` of every row, from the states of all ranks."""
    return backend_of(student, teacher).merge_divergences(states, student, teacher, read, options)


@operation("onepass::divergence_means", lambda student, teacher, **_: empty_pair_numbers(student, teacher)[:3])
def _means(
    student: Tensor,
    teacher: Tensor,
    read: PairRows,
    of_student: Tensor,
    of_teacher: Tensor,
    options: PairOptions,
) -> Tensor:
    """The means of student and teacher and the divergence, ``(3, ...)``, summed over this rank's columns.

    ``of_student`` and ``of_teacher`` have the shift and the log-normalizer of all columns.
    """
    packed = empty_pair_numbers(student, teacher)
    packed[:2], packed[3:5] = of_student, of_teacher
    backend = backend_of(student, teacher) if student.shape[-1] else reference
    backend.write_means(student, teacher, read, packed, options)
    return packed[MEANS]


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor, *rest: Any) -> Tensor:
        *tensors, shard, options = rest
        read = PairRows(*tensors)
        packed = pair_numbers(student, teacher, read, shard, options)
        ctx.save_for_backward(student, teacher, *read, packed)
        ctx.options = options
        return packed[DIVERGENCE].clone()  # not a view, which could not be changed in place

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        check_upstream(grad)
        student, teacher, *read, packed = ctx.saved_tensors
        student, teacher = map(with_contiguous_rows, (student, teacher))
        found = _gradient(student, teacher, PairRows(*read), packed, grad, list(ctx.needs_input_grad[:2]), ctx.options)
        return *found, *[None] * 5


@operation("onepass::divergence", lambda student, teacher, **_: empty_pair_numbers(student, teacher))
def _forward(student: Tensor, teacher: Tensor, read: PairRows, options: PairOptions) -> Tensor:
    columns = slice(options.columns)
    pair = student[..., columns], teacher[..., columns]
    return backend_of(student, teacher).divergence(*pair, read, options)


def _like_gradient(student: Tensor, teacher: Tensor, needed: list[bool], **_: Any) -> list[Tensor | None]:
    return [empty_gradient(x) if n else None for x, n in zip((student, teacher), needed)]


@operation("onepass::divergence_gradient", _like_gradient)
def _gradient(
    student: Tensor,
    teacher: Tensor,
    read: PairRows,
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
                backend_of(student, teacher).divergence_gradient(*pair, read, packed, grad, *rest)
            if options.columns is not None:
                out[..., options.columns :] = 0
        found.append(out)
    return found
