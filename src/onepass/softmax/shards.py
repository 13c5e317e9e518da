"""The softmax statistics of logits whose vocabulary is sharded over the ranks of a process group.

Every rank reads its own columns, sends the few numbers of each row's state, and merges those of all ranks. The
backward exchanges nothing: with the merged statistics, the gradient of a column depends on no other rank.
`softmax.statistics`, `softmax.divergence` and the tiles of a linear head call this.

In a function that torch compiles, no registered operation exchanges anything: exchanges are torch's functional
collectives, which compilers run in the same order on all ranks.
"""

from math import prod

import torch
from torch import Tensor

from onepass import reference
from onepass.backend import backend_of
from onepass.core.collectives import of_all_ranks
from onepass.core.dispatch import operation
from onepass.core.options import Inputs, Options, Results, empty_results
from onepass.core.shard import Shard, per_row, state_size


def leading_columns(logits: Tensor, count: int) -> Tensor:
    """The first ``count`` columns."""
    return logits if count == logits.shape[-1] else logits[..., :count]


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
