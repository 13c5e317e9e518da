"""`DistributedConfig(ep_implementation="onepass")`: the exchange of tokens under transformers' expert parallelism.

A token is sent once to each process that has any of its experts, with their ids and weights, and not once for each
expert as in transformers' ``"all_to_all"``. The process that receives it copies it for each of its experts there, and
returns the weighted sum of their outputs. The sender adds what the processes of a token return.

With ``"all_to_all"``, `combine_tokens` replaces the sums of transformers for experts of onepass, not the exchange.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers.distributed.expert_parallel import EPImplementation

from onepass.backend import backend_of
from onepass.core.dispatch import check_upstream
from onepass.moe.token_sort import group_by_expert


class Exchange(NamedTuple):
    """How many rows this process sends to each process of a group, and receives from it."""

    sent: list[int]
    received: list[int]
    group: Any

    def __call__(self, rows: Tensor) -> Tensor:
        """Send the rows, which are in the order of the processes, and return those that are received."""
        out = rows.new_empty((sum(self.received), *rows.shape[1:]))
        dist.all_to_all_single(out, rows.contiguous(), self.received, self.sent, group=self.group)
        return out

    def back(self, rows: Tensor) -> Tensor:
        """Send rows back to the processes from which rows were received."""
        return Exchange(self.received, self.sent, self.group)(rows)


class OnepassEP(EPImplementation):
    """The `EPImplementation` of transformers that is registered as ``"onepass"``, for any implementation of experts.

    Nothing is sent for ids that are not an expert. The CPU reads the numbers of rows once for each call, as in
    transformers' own exchange, so that a CUDA graph cannot capture it. In a compiled model, it is not compiled.
    """

    @torch.compiler.disable
    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        tokens = len(hidden_states)
        if self.tp_mesh.size() > 1:  # these processes have the same batch, of which each sends its part
            hidden_states, top_k_index, top_k_weights = (
                part_of_process(t, self.tp_mesh) for t in (hidden_states, top_k_index, top_k_weights)
            )
        own, group = self.num_local_experts, self.ep_mesh.get_group()
        pairs, places, counts, ids = pair(top_k_index, own, self.ep_mesh.size(), hidden_states)
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=group)
        sent, arrived, assigned = torch.stack([counts[:, 0], *received.unbind(1)]).tolist()
        exchange, pairs = Exchange(sent, arrived, group), pairs[: sum(sent)]
        there = exchange(ids.index_select(0, pairs // len(sent))) - own * self.ep_mesh.get_local_rank()
        hidden, weights = _Copy.apply(pairs, places, exchange, hidden_states, top_k_weights)
        partial = self.sum_of_experts(hidden, there, weights, sum(assigned))
        output = _Sum.apply(places, exchange, partial, None)
        return whole_batch(output, tokens, self.tp_mesh) if self.tp_mesh.size() > 1 else output

    def sum_of_experts(self, hidden: Tensor, ids: Tensor, weights: Tensor, assigned: int) -> Tensor:
        """The weighted sum over the experts of this process. ``assigned`` of the ids ``(T, K)`` are in range."""
        if not assigned:  # not all experts take no rows; one row leads the backward to the exchange, too
            one = hidden.sum(0, keepdim=True), ids.new_zeros((1, 1), dtype=torch.int64)
            return self.experts_forward(*one, weights.sum().view(1, 1))[:0]
        order, places = sort(ids, self.num_local_experts, hidden)
        order = order[:assigned]
        (rows,) = _Copy.apply(order, places, None, hidden)
        of_rows = (t.flatten().index_select(0, order).unsqueeze(1) for t in (ids.long(), weights))
        return _Sum.apply(places, None, self.experts_forward(rows, *of_rows), None)


@torch.compiler.disable
def combine_tokens(self: Any, expert_output: Tensor, state: Any) -> Tensor:
    """`AllToAllEP._combine_tokens` of transformers: sends the rows back, and adds those of a token times their weights.

    A kernel reads each row once and adds in float32, and another one computes both gradients.
    """
    exchange = Exchange(state.send_sizes, state.recv_sizes, self.ep_mesh.get_group())
    assignments = torch.arange(len(state.order), dtype=torch.int32, device=state.order.device)
    places = torch.empty_like(assignments).scatter_(0, state.order, assignments).view(state.top_k_weights.shape)
    output = _Sum.apply(places, exchange, expert_output, state.top_k_weights)
    return whole_batch(output, state.num_tokens, self.tp_mesh) if self.tp_mesh.size() > 1 else output


def pair(experts: Tensor, own: int, processes: int, like: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The processes that have any expert of each token, of which each process has ``own``.

    Returns:
        The pairs of a token and a process, ``token * P + process``, sorted by process, and the places of all pairs in
        this order: see `sort`. The numbers ``(P, 2)`` of tokens and of assignments of each process. The ids, int32,
        where those of no expert are -1.
    """
    ids = experts.where((experts >= 0) & (experts < own * processes), -1)
    process = torch.arange(processes, device=ids.device)
    chosen = (ids // own).unsqueeze(-1) == process  # (T, K, P)
    of_token = chosen.any(1)
    pairs, places = sort(process.where(of_token, -1), processes, like)
    return pairs, places, torch.stack([of_token.sum(0), chosen.sum((0, 1))], 1), ids.int()


def sort(ids: Tensor, groups: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """The assignments of ``ids`` ``(T, K)`` in the order of their groups, and the place ``(T, K)`` of each in it.

    Both are int32. Assignments to ids that are out of range come last, and have a place beyond all.
    """
    found = group_by_expert(ids, groups, like)
    return found.order, found.places.view(ids.shape)


class _Copy(torch.autograd.Function):
    """The rows of tensors ``(T, ...)`` for these assignments ``(rows,)``, which are exchanged if there is an exchange.

    ``places`` ``(T, K)`` are those of all assignments; those beyond the rows are of assignments that are left out.
    """

    @staticmethod
    def forward(
        ctx: Any, order: Tensor, places: Tensor, exchange: Exchange | None, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(places)
        ctx.exchange = exchange
        copies = [t.index_select(0, order // places.shape[1]) for t in tensors]
        return tuple(copies if exchange is None else [exchange(t) for t in copies])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        check_upstream(*grads)
        (places,) = ctx.saved_tensors
        # Also of tensors that need no gradient here: they may need one on other processes, which wait for the exchange.
        back = [sent_back(g, ctx.exchange) for g in grads]
        needed = ctx.needs_input_grad[3:]
        found = [backend_of(g).sum_rows(g, places) if n else None for g, n in zip(back, needed)]
        return None, None, None, *found


class _Sum(torch.autograd.Function):
    """The sum of the rows of each token, times their weights ``(T, K)`` if there are any: the opposite of `_Copy`.

    ``places`` ``(T, K)`` are those of its rows. Each row has one of them.
    """

    @staticmethod
    def forward(ctx: Any, places: Tensor, exchange: Exchange | None, rows: Tensor, weights: Tensor | None) -> Tensor:
        received = sent_back(rows, exchange)
        ctx.save_for_backward(places, weights, received if ctx.needs_input_grad[3] else None)
        ctx.exchange, ctx.count = exchange, len(received)
        out: Tensor = backend_of(received).sum_rows(received, places, weights)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        check_upstream(grad)
        places, weights, received = ctx.saved_tensors
        of_rows, of_weights = backend_of(grad).sum_rows_gradient(grad, places, ctx.count, weights, received)
        # Rows that need no gradient, as of frozen experts, need none on the other processes, which do not exchange it.
        if ctx.exchange is not None and ctx.needs_input_grad[2]:
            of_rows = ctx.exchange(of_rows)
        return None, None, of_rows if ctx.needs_input_grad[2] else None, of_weights


def sent_back(rows: Tensor, exchange: Exchange | None) -> Tensor:
    """The rows that were sent to other processes, from them; the rows themselves if there is no exchange."""
    return rows if exchange is None else exchange.back(rows)


def part_of_process(t: Tensor, mesh: Any) -> Tensor:
    """This process' part of what all processes of the mesh have. The gradients of all parts are gathered."""
    return DTensor.from_local(t, mesh, [Replicate()], run_check=False).redistribute(mesh, [Shard(0)]).to_local()


def whole_batch(out: Tensor, tokens: int, mesh: Any) -> Tensor:
    """The results of all tokens, from the parts of the processes of the mesh."""
    width = out.shape[1]
    return DTensor.from_local(out, mesh, [Shard(0)], shape=(tokens, width), stride=(width, 1)).full_tensor()  # type: ignore[arg-type]
