"""The softmax statistics of logits whose vocabulary is sharded over the ranks of a process group.

Every rank reads its own columns, sends the few numbers of each row's state, and merges those of all ranks. The
backward exchanges nothing: with the merged statistics, the gradient of a column depends on no other rank.
`logits.vocab_parallel` and the tiles of a linear head call this.

In a function that torch compiles, no registered operation exchanges anything: exchanges are torch's functional
collectives, which compilers run in the same order on all ranks.
"""

from math import prod
from typing import Any

import torch
from torch import Tensor

from onepass import reference
from onepass.backend import backend_of
from onepass.core.collectives import of_all_ranks
from onepass.core.dispatch import check_upstream, empty_gradient, operation, refuse_forward_mode
from onepass.core.options import Average, FieldGradients, Inputs, Options, Results, empty_results, pick
from onepass.core.shard import Shard, per_row, state_size
from onepass.softmax.statistics import average_and_gradient, averaged, keep_row_weight, returned, upstream_of


def statistics_of_shards(
    logits: Tensor,
    inputs: Inputs,
    shard: Shard,
    options: Options,
    average: Average | None = None,
    early: bool = True,
) -> tuple[Tensor, ...]:
    """The fields of ``options`` of every row, the same on all ranks; differentiable.

    Args:
        logits: ``(..., columns)``, those of this rank; columns from ``shard.size`` on are padding.
        inputs: an index relative to the first of these columns, and the class weights of these columns.
        average, early: see `statistics_of`.
    """
    refuse_forward_mode(logits)
    if logits.stride(-1) != 1 and logits.shape[-1] > 1:
        logits = logits.contiguous()
    if torch.is_grad_enabled() and logits.requires_grad:
        return _ShardStatistics.apply(logits, *inputs.passed(), average, shard, options, early)
    results = merged(leading_columns(logits, shard.size), inputs, shard, options)
    return averaged(pick(results, options), inputs, average)[0]


def leading_columns(logits: Tensor, count: int) -> Tensor:
    """The first ``count`` columns."""
    return logits if count == logits.shape[-1] else logits[..., :count]


def results_of(logits: Tensor, inputs: Inputs, shard: Shard, options: Options) -> Results:
    """The results of `softmax_statistics`, those of all ranks if the vocabulary is sharded."""
    if shard.sizes:
        return merged(logits, inputs, shard, options)
    return backend_of(logits).softmax_statistics(logits, inputs, options)


def merged(logits: Tensor, inputs: Inputs, shard: Shard, options: Options) -> Results:
    """The results of `softmax_statistics` for the logits of all ranks, from those of this rank."""
    return merged_states(state_of_rows(logits, inputs, options), logits, inputs, shard, options)


def merged_states(states: Tensor, logits: Tensor, inputs: Inputs, shard: Shard, options: Options) -> Results:
    """`merged`, from the states of this rank. Only shape and dtype of ``logits`` are used."""
    of_all = of_all_ranks(states, shard.group)
    return merge_states(of_all, logits, inputs, shard, options)


def empty_states(logits: Tensor, inputs: Inputs, options: Options) -> Tensor:
    """Uninitialized states of the rows of logits."""
    numbers = state_size(options, per_row(inputs.index, logits.dim()))
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return logits.new_empty((numbers, prod(logits.shape[:-1])), dtype=dtype)  # numel() would make the rows constant


@operation("onepass::shard_statistics", empty_states)
def state_of_rows(logits: Tensor, inputs: Inputs, options: Options) -> Tensor:
    """The state of every row of this rank's columns, ``(numbers, rows)``; see `state_fields`."""
    backend = backend_of(logits) if logits.shape[-1] else reference
    return backend.shard_statistics(logits, inputs, options)


def _like_results(states: Tensor, logits: Tensor, inputs: Inputs, shard: Shard, options: Options) -> Results:
    return empty_results(logits, inputs.index, options)


@operation("onepass::merge_shards", _like_results)
def merge_states(
    states: Tensor, logits: Tensor, inputs: Inputs, shard: Shard, options: Options
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The results of `softmax_statistics` from the states of all ranks. Only shape and dtype of ``logits`` are used."""
    if not isinstance(shard.sizes, tuple):  # a list, from an operation that is registered with torch
        shard = shard._replace(sizes=tuple(shard.sizes))
    return backend_of(logits).merge_shards(states, logits, inputs, shard, options)


class _ShardStatistics(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        *arguments: Any,
    ) -> tuple[Tensor, ...]:
        *tensors, average, shard, options, early = arguments
        inputs = Inputs(*tensors)
        results = merged(leading_columns(logits, shard.size), inputs, shard, options)
        early = early and backend_of(logits).supports_early_gradient(logits, inputs)

        def gradient(upstream: FieldGradients) -> Tensor:
            return gradient_of(logits, inputs, results[0], upstream, shard.size, options)

        fields, row_weight, grad = average_and_gradient(
            pick(results, options), logits, inputs, average, gradient if early else None
        )
        ctx.save_for_backward(logits, *tensors, row_weight, results[0], grad)
        ctx.size, ctx.options, ctx.written = shard.size, options, False
        return returned(ctx, fields, options)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        check_upstream(*grads)
        logits, *tensors, row_weight, packed, early = ctx.saved_tensors
        inputs = Inputs(*tensors)
        upstream = upstream_of(grads, row_weight, ctx.options)
        if early is None or upstream.row_weight is None or ctx.written:
            grad = gradient_of(logits, inputs, packed, upstream, ctx.size, ctx.options)
        else:
            ctx.written, grad = True, early.data  # given away: a second backward computes another gradient
            write_gradient(logits, inputs, packed, upstream, ctx.size, ctx.options, grad, again=True)
            if ctx.size:  # else nothing was launched
                keep_row_weight(logits, row_weight)
        return grad, *[None] * (len(tensors) + 4)


@operation("onepass::shard_gradient", lambda logits, **_: empty_gradient(logits))
def gradient_of(
    logits: Tensor, inputs: Inputs, packed: Tensor, grads: FieldGradients, size: int, options: Options
) -> Tensor:
    """The gradient of the logits of this rank; 0 in the columns from ``size`` on, which are padding."""
    out = empty_gradient(logits)
    write_gradient(logits, inputs, packed, grads, size, options, out)
    if size < logits.shape[-1]:
        out[..., size:] = 0
    return out


def write_gradient(
    logits: Tensor, inputs: Inputs, packed: Tensor, grads: FieldGradients, size: int, options: Options, out: Tensor,
    again: bool = False,
) -> None:  # fmt: skip
    """Write the gradient of the columns that are not padding. For ``again``, see `kernels.softmax_gradient`."""
    if size:
        x, to = leading_columns(logits, size), leading_columns(out, size)
        backend_of(logits).softmax_gradient(x, inputs, packed, grads, options, to, again)
