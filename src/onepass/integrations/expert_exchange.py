"""`DistributedConfig(ep_implementation="onepass")`: the exchange of tokens under transformers' expert parallelism.

Each token is sent to the processes of its experts, as in transformers' ``"all_to_all"``, a row for each assignment. The
rows are copied in the order of experts. They take their routing weights along, so that an expert's output comes back
multiplied by its weight, and its process computes the gradient of the weight. What is left on the sender's side is one
sum. Apart from the exchange itself, each direction reads or writes the rows once.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers.distributed.expert_parallel import EPImplementation

from onepass.backend import backend_of
from onepass.core.dispatch import refuse_second_derivatives
from onepass.moe.token_sort import group_by_expert


class Sizes(NamedTuple):
    """How many rows this process sends to each process of the group, and receives from it."""

    sent: list[int]
    received: list[int]

    def back(self) -> "Sizes":
        """Those of the exchange in the opposite direction."""
        return Sizes(self.received, self.sent)


class OnepassEP(EPImplementation):
    """The `EPImplementation` of transformers that is registered as ``"onepass"``. The experts may be any.

    Ids that are no expert's are dropped: nothing is sent for them. The numbers of rows are read by the host once for
    each call, as in transformers' own exchange, so that a CUDA graph cannot capture it. A compiled model runs it as it
    is.
    """

    @torch.compiler.disable
    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        tokens, group = len(hidden_states), self.ep_mesh.get_group()
        if self.tp_mesh.size() > 1:  # these processes have the same batch, of which each sends its part
            hidden_states, top_k_index, top_k_weights = (
                part_of_process(t, self.tp_mesh) for t in (hidden_states, top_k_index, top_k_weights)
            )
        order, places, counts = sort(top_k_index, hidden_states, self.num_local_experts, group)
        sizes = Sizes(*counts.sum(2).tolist())
        rows, weights = _Dispatch.apply(hidden_states, top_k_weights, order[: sum(sizes.sent)], places, sizes, group)
        if len(rows):
            output = self.experts_forward(rows, experts_of_rows(counts[1], len(rows)), weights)
        else:  # not all experts take no rows; those of one row lead the backward to this exchange, too
            none = top_k_index.new_zeros((1, 1))
            output = self.experts_forward(rows.sum(0, keepdim=True), none, weights.sum(0, keepdim=True))[:0]
        output = _Combine.apply(output, order[: sum(sizes.sent)], places, sizes, group)
        return whole_batch(output, tokens, self.tp_mesh) if self.tp_mesh.size() > 1 else output


def sort(experts: Tensor, like: Tensor, local_experts: int, group: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Sort the assignments ``(T, K)`` by expert, and exchange their counts.

    Returns:
        The assignments in this order, int32. The place ``(T, K)`` of each in it, int32, where those to no expert come
        last. The rows ``(2, P, E / P)`` that this process sends to each of P processes for each of its experts, and
        those that it receives from each of them for each of its own experts.
    """
    processes = dist.get_world_size(group)
    groups = group_by_expert(experts, processes * local_experts, like)
    places = torch.empty_like(groups.order)
    places.scatter_(0, groups.order.long(), torch.arange(len(places), dtype=torch.int32, device=places.device))
    counts = torch.empty((2, processes, local_experts), dtype=torch.int32, device=experts.device)
    torch.sub(groups.offsets[1:], groups.offsets[:-1], out=counts[0].view(-1))
    dist.all_to_all_single(counts[1], counts[0], group=group)
    return groups.order, places.view(experts.shape), counts


def experts_of_rows(counts: Tensor, rows: int) -> Tensor:
    """The expert ``(rows, 1)`` of each row, from the numbers ``(P, E)`` of rows of each process for each expert."""
    ids = torch.arange(counts.shape[1], device=counts.device).repeat(len(counts))
    return ids.repeat_interleave(counts.flatten(), output_size=rows).unsqueeze(1)


def exchange(rows: Tensor, sizes: Sizes, group: Any) -> Tensor:
    """Send these numbers of rows to the processes of the group, and return those that they send."""
    out = rows.new_empty((sum(sizes.received), *rows.shape[1:]))
    dist.all_to_all_single(out, rows.contiguous(), sizes.received, sizes.sent, group=group)
    return out


class _Dispatch(torch.autograd.Function):
    """The rows and weights of the assignments to this process' experts, from those of this process' tokens."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weights: Tensor, order: Tensor, places: Tensor, sizes: Sizes, group: Any
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(order, places)
        ctx.sizes, ctx.group = sizes, group
        rows = backend_of(hidden).gather_rows(hidden, order, places.shape[1])
        of_rows = weights.reshape(-1, 1).index_select(0, order)
        return exchange(rows, sizes, group), exchange(of_rows, sizes, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, of_weights: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        order, places = ctx.saved_tensors
        hidden = weights = None
        if ctx.needs_input_grad[0]:
            hidden = backend_of(grad).sum_rows(exchange(grad, ctx.sizes.back(), ctx.group), places)
        if ctx.needs_input_grad[1]:
            back = exchange(of_weights, ctx.sizes.back(), ctx.group).flatten()
            weights = back.new_zeros(places.numel()).index_copy_(0, order.long(), back).view(places.shape)
        return hidden, weights, None, None, None, None


class _Combine(torch.autograd.Function):
    """The sum of what the experts of each token have returned."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, places: Tensor, sizes: Sizes, group: Any) -> Tensor:
        ctx.save_for_backward(order)
        ctx.sizes, ctx.group, ctx.share = sizes, group, places.shape[1]
        out: Tensor = backend_of(rows).sum_rows(exchange(rows, sizes.back(), group), places)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        rows = backend_of(grad).gather_rows(grad, *ctx.saved_tensors, ctx.share)
        return exchange(rows, ctx.sizes, ctx.group), None, None, None, None


def part_of_process(t: Tensor, mesh: Any) -> Tensor:
    """This process' part of what all processes of the mesh have. The gradients of all parts are gathered."""
    own: Tensor = DTensor.from_local(t, mesh, [Replicate()], run_check=False).redistribute(mesh, [Shard(0)]).to_local()
    return own


def whole_batch(out: Tensor, tokens: int, mesh: Any) -> Tensor:
    """The results of all tokens, from the parts of the processes of the mesh."""
    width = out.shape[1]
    found: Tensor = DTensor.from_local(out, mesh, [Shard(0)], shape=(tokens, width), stride=(width, 1)).full_tensor()  # type: ignore[arg-type]
    return found
