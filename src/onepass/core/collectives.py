"""Exchanges between the ranks of a process group, also differentiable ones.

Groups are given by name, which torch can trace and pass to registered operations. In a function that torch compiles,
the exchanges are torch's functional collectives, which compilers run in the same order on all ranks.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from onepass.core.dispatch import check_upstream
from onepass.core.shard import Shard

# Names since torch 2.13, which deprecates the earlier ones.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def process_group(name: str) -> Any:
    """The process group of this name."""
    return _resolve_process_group(name)  # type: ignore[arg-type]


def of_all_ranks(tensor: Tensor, group: str) -> Tensor:
    """The tensors ``(...)`` of all ranks, ``(ranks, ...)``."""
    if torch.compiler.is_compiling():
        return functional.all_gather_tensor(tensor.unsqueeze(0), 0, group)  # type: ignore[arg-type]
    of_ranks = process_group(group)
    ranks = dist.get_world_size(of_ranks)
    if ranks == 1:
        return tensor.unsqueeze(0)
    out = tensor.new_empty(ranks * tensor.numel())
    all_gather(out, tensor.reshape(-1), group=of_ranks)
    return out.view(ranks, *tensor.shape)


def sum_of_all_ranks(tensor: Tensor, group: str) -> Tensor:
    """The sum of the tensors of all ranks, contiguous."""
    if torch.compiler.is_compiling():
        return functional.all_reduce(tensor.contiguous(), "sum", group)  # type: ignore[arg-type]
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=process_group(group))
    return total


def gathered_columns(tensor: Tensor, shard: Shard) -> Tensor:
    """All columns of a tensor that is sharded over its last dimension like the logits."""
    padded = tensor.new_zeros((*tensor.shape[:-1], max(shard.sizes)))
    padded[..., : shard.size] = tensor[..., : shard.size]
    parts = of_all_ranks(padded, shard.group)
    return torch.cat([part[..., :size] for part, size in zip(parts, shard.sizes)], -1)


class Sum(torch.autograd.Function):
    """The sum of the tensors of all ranks, each of which computes the same loss of it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: str) -> Tensor:
        return sum_of_all_ranks(tensor, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        check_upstream(grad)
        return grad, None


class Replicated(torch.autograd.Function):
    """A tensor that is the same on all ranks, each of which computes a part of its gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: str) -> Tensor:
        ctx.group = group
        # Torch computes a view of an input that a graph returns outside of the graph, without this backward.
        return tensor.clone() if torch.compiler.is_compiling() else tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        check_upstream(grad)
        return sum_of_all_ranks(grad, ctx.group), None


class GatheredRows(torch.autograd.Function):
    """The tensors of all ranks, one after the other; each rank computes a part of the gradient of all of them."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: str) -> Tensor:
        ctx.group = group
        return of_all_ranks(tensor.contiguous(), group).flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        check_upstream(grad)
        if torch.compiler.is_compiling():
            return functional.reduce_scatter_tensor(grad.contiguous(), "sum", 0, ctx.group), None
        group = process_group(ctx.group)
        mine = grad.new_empty((grad.shape[0] // dist.get_world_size(group), *grad.shape[1:]))
        reduce_scatter(mine, grad.contiguous(), group=group)
        return mine, None


class GatheredColumns(torch.autograd.Function):
    """All-gather of the columns. All ranks compute the same loss, so the backward takes the columns of this rank."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, shard: Shard) -> Tensor:
        ctx.shard, ctx.columns = shard, logits.shape[-1]
        return gathered_columns(logits, shard)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        check_upstream(grad)
        first, size = ctx.shard.first, ctx.shard.size
        mine = grad[..., first : first + size]
        return torch.nn.functional.pad(mine, (0, ctx.columns - size)), None
