"""The softmax statistics of logits whose vocabulary is sharded over the ranks of a process group.

Every rank reads its own columns, sends the few numbers of each row's state, and merges those of all ranks. The
backward exchanges nothing: with the merged statistics, the gradient of a column depends on no other rank.
`logits.vocab_parallel` and the tiles of a linear head call this.
"""

from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from onepass import reference
from onepass.backend import backend_of
from onepass.core.dispatch import refuse_forward_mode, refuse_second_derivatives
from onepass.core.options import FieldGradients, Inputs, Options, Results, pick
from onepass.core.shard import Shard
from onepass.softmax.statistics import returned


def statistics_of_shards(logits: Tensor, inputs: Inputs, shard: Shard, options: Options) -> tuple[Tensor, ...]:
    """The fields of ``options`` of every row, the same on all ranks; differentiable.

    Args:
        logits: ``(..., columns)``, those of this rank; columns from ``shard.size`` on are padding.
        inputs: an index relative to the first of these columns, and the class weights of these columns.
    """
    refuse_forward_mode(logits)
    if logits.stride(-1) != 1 and logits.shape[-1] > 1:
        logits = logits.contiguous()
    if torch.is_grad_enabled() and logits.requires_grad:
        fields: tuple[Tensor, ...] = _ShardStatistics.apply(logits, *inputs, shard, options)
        return fields
    return pick(merged(logits[..., : shard.size], inputs, shard, options), options)


def results_of(logits: Tensor, inputs: Inputs, shard: Shard, options: Options) -> Results:
    """The results of `softmax_statistics`, those of all ranks if the vocabulary is sharded."""
    if shard.sizes:
        return merged(logits, inputs, shard, options)
    results: Results = backend_of(logits).softmax_statistics(logits, inputs, options)
    return results


def merged(logits: Tensor, inputs: Inputs, shard: Shard, options: Options) -> Results:
    """The results of `softmax_statistics` for the logits of all ranks, from those of this rank."""
    shard = shard._replace(sizes=tuple(shard.sizes))  # a list, from an operation that is registered with torch
    backend = backend_of(logits) if shard.size else reference
    states = of_all_ranks(backend.shard_statistics(logits, inputs, options), group_named(shard.group))
    results: Results = backend_of(logits).merge_shards(states, logits, inputs, shard, options)
    return results


_groups: "WeakValueDictionary[str, Any]" = WeakValueDictionary()


def name_of(group: Any) -> str:
    """The name of a process group, under which `group_named` finds it.

    Options of an operation that is registered with torch may hold names, but no groups.
    """
    name: str = group.group_name
    _groups[name] = group
    return name


def group_named(name: str) -> Any:
    """The process group of this name."""
    return _groups[name]


def of_all_ranks(tensor: Tensor, group: Any) -> Tensor:
    """The tensors ``(...)`` of all ranks, ``(ranks, ...)``."""
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return tensor.unsqueeze(0)
    out = tensor.new_empty(ranks * tensor.numel())
    dist.all_gather_into_tensor(out, tensor.reshape(-1), group=group)
    return out.view(ranks, *tensor.shape)


def gathered_columns(tensor: Tensor, shard: Shard) -> Tensor:
    """All columns of a tensor that is sharded over its last dimension like the logits."""
    padded = tensor.new_zeros((*tensor.shape[:-1], max(shard.sizes)))
    padded[..., : shard.size] = tensor[..., : shard.size]
    parts = of_all_ranks(padded, group_named(shard.group))
    return torch.cat([part[..., :size] for part, size in zip(parts, shard.sizes)], -1)


class Sum(torch.autograd.Function):
    """The sum of the tensors of all ranks, each of which computes the same loss of it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        total = tensor.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class Replicated(torch.autograd.Function):
    """A tensor that is the same on all ranks, each of which computes a part of its gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


class GatheredRows(torch.autograd.Function):
    """The tensors of all ranks, one after the other; each rank computes a part of the gradient of all of them."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return of_all_ranks(tensor.contiguous(), group).flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ranks = dist.get_world_size(ctx.group)
        mine = grad.new_empty((grad.shape[0] // ranks, *grad.shape[1:]))
        dist.reduce_scatter_tensor(mine, grad.contiguous(), group=ctx.group)
        return mine, None


class GatheredColumns(torch.autograd.Function):
    """All-gather of the columns. All ranks compute the same loss, so the backward takes the columns of this rank."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, shard: Shard) -> Tensor:
        ctx.shard, ctx.columns = shard, logits.shape[-1]
        return gathered_columns(logits, shard)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        first, size = ctx.shard.first, ctx.shard.size
        mine = grad[..., first : first + size]
        return torch.nn.functional.pad(mine, (0, ctx.columns - size)), None


class _ShardStatistics(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        index: Tensor | None,
        row_mask: Tensor | None,
        class_weights: Tensor | None,
        shard: Shard,
        options: Options,
    ) -> tuple[Tensor, ...]:
        inputs = Inputs(index, row_mask, class_weights)
        results = merged(logits[..., : shard.size], inputs, shard, options)
        ctx.save_for_backward(logits, *inputs, results[0])
        ctx.size, ctx.options = shard.size, options
        return returned(ctx, pick(results, options), options)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        logits, *inputs, packed = ctx.saved_tensors
        out = torch.empty_like(logits, memory_format=torch.contiguous_format)
        columns = slice(ctx.size)
        if ctx.size:
            upstream = FieldGradients.of(ctx.options.fields, grads)
            read = logits[..., columns], Inputs(*inputs), packed, upstream, ctx.options, out[..., columns]
            backend_of(logits).softmax_gradient(*read)
        if ctx.size < logits.shape[-1]:
            out[..., ctx.size :] = 0
        return out, *[None] * 5
