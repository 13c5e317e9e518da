"""Balancing without an auxiliary loss: a router's selection bias follows from the number of tokens of its experts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from onepass.core.checks import FLOATS, check_bool, check_device, check_number, described
from onepass.core.shard import Group
from onepass.logits.vocab_parallel import group_of
from onepass.moe.blocks import own_description, own_method
from onepass.moe.family import Parts, selection_bias_of
from onepass.moe.followers import Follower, follow, unfollow
from onepass.moe.replay import routers_of
from onepass.moe.router import INTEGERS


def update_selection_bias(bias: Tensor, counts: Tensor, rate: float, group: Group | None = None) -> Tensor:
    r"""Move a router's selection bias towards equal loads, to :math:`b_e + u\,\mathrm{sign}(\bar c - c_e)`.

    An expert with more tokens than the mean of all becomes less likely to be selected, one with fewer more likely.
    Weights and gradients do not depend on the bias.

    Args:
        bias: ``(E,)`` or any shape of E elements, float32 or float64, or such a DTensor; changed in place. Half
            precision, to which a cast of the whole model converts it, is an error, since an update of 0.001 would be
            lost.
        counts: ``(E,)``, integers: the tokens of each expert (`Routing`, ``counts``), summed over the micro-batches of
            a step.
        rate: :math:`u`, at least 0; 0.001 in DeepSeek-V3.
        group: the processes over which the counts are summed, a ProcessGroup or a DeviceMesh of one dimension. None
            uses the counts as they are; the processes of a DTensor must then pass the same counts.

    Returns:
        ``bias``. The CPU does not wait for the GPU.

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype, shape, device or value.

    Reference: Wang et al., "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts", arXiv:2408.15664,
    algorithm 1; DeepSeek-V3, arXiv:2412.19437, section 2.1.2.
    """
    if not isinstance(bias, Tensor) or bias.dtype not in FLOATS:
        raise TypeError(f"bias: expected a floating-point tensor, got {described(bias)}")
    if bias.element_size() < 4:
        raise TypeError(f"bias: expected float32 or float64, got {bias.dtype}, in which small updates are lost")
    if bias.dim() == 0 or not bias.numel():
        raise ValueError(f"bias: expected one number for each expert, got shape {tuple(bias.shape)}")
    if any(stride == 0 and size > 1 for stride, size in zip(bias.stride(), bias.shape)):
        raise ValueError(f"bias: expected a tensor that is not expanded, got strides {bias.stride()}")
    if not isinstance(counts, Tensor) or counts.dtype not in INTEGERS:
        raise TypeError(f"counts: expected a tensor of integers, got {described(counts)}")
    if counts.dim() != 1 or counts.numel() != bias.numel():
        raise ValueError(f"counts: expected shape ({bias.numel()},), got {tuple(counts.shape)}")
    check_device(counts, bias, "counts", "the bias")
    rate = check_number(rate, "rate", 0, open_low=False)
    loads = counts.to(torch.int64, copy=True)
    if group is not None:
        dist.all_reduce(loads, group=group_of(group))
    sign = (loads.sum() - loads * len(loads)).sign().view(bias.shape)  # of the mean less the load, in integers
    with torch.no_grad():
        if hasattr(bias, "device_mesh"):
            sign = own_part(sign, bias)
        return bias.add_(sign.to(bias.dtype), alpha=rate)


def own_part(whole: Tensor, like: Any) -> Tensor:
    """A DTensor that is sharded as ``like``, from a tensor that all processes have."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh = like.device_mesh
    replicated = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return replicated.redistribute(placements=like.placements)


class ExpertCounts(Follower):
    """The number of tokens of each expert since the last update, which `count_experts` yields.

    Attributes:
        counts: a list of ``(E,)``, int64, one for each router that has a selection bias and was called, in the order of
            layers.
    """

    def __init__(self, model: nn.Module, replayed: bool) -> None:
        self.replayed = replayed
        self.parents = {
            router: model.get_submodule(name.rpartition(".")[0])
            for name, routers in routers_of(model).items()
            for router in routers
        }
        if not self.biases:
            raise TypeError(f"model: expected routers with a selection bias, got {type(model).__name__}, "
                            "whose routers have none")  # fmt: skip
        self.of_router: dict[nn.Module, Tensor] = {}

    @property
    def biases(self) -> dict[nn.Module, Tensor]:
        """The selection bias of each router that has one, as it is now: a cast of the model makes another tensor."""
        found = {}
        for router, parent in self.parents.items():
            d = own_description(router)
            bias = d and selection_bias_of(Parts(router, [], parent), d)
            if bias is not None:
                found[router] = bias
        return found

    @property
    def counts(self) -> list[Tensor]:
        return [self.of_router[router] for router in self.biases if router in self.of_router]

    def note(self, router: nn.Module, experts: Tensor, counts: Tensor, changed: Tensor | None, replayed: bool) -> None:
        if router.training and (self.replayed or not replayed):
            before = self.of_router.get(router)
            self.of_router[router] = counts.long() if before is None else before + counts

    def update(self, rate: float, group: Group | None = None) -> None:
        """Apply `update_selection_bias` to every router, and set the counts to 0. Call it after an optimizer's step.

        All processes of the group must call it.
        """
        for router, bias in self.biases.items():
            counts = self.of_router.get(router)
            if counts is None:
                if group is None:
                    continue
                counts = torch.zeros(bias.numel(), dtype=torch.int64, device=bias.device)
            update_selection_bias(bias, counts, rate, group)
        self.of_router.clear()


@contextmanager
def count_experts(model: nn.Module, *, replayed: bool = True) -> Iterator[ExpertCounts]:
    """Count the tokens of each expert while a model trains, for an update of its selection biases.

    ::

        with count_experts(model) as counts:
            for micro_batches in steps:
                for batch in micro_batches:
                    model(**batch).loss.backward()
                optimizer.step()
                counts.update(0.001)

    Counts are summed over forward passes of modules in training mode until `ExpertCounts.update` is called. A layer
    that gradient checkpointing computes again does not count twice; its backward has to run within the context if the
    forward did, and outside otherwise. Padding tokens are routed and therefore counted. A forward pass that ends in an
    error is counted by the layers that it has reached.

    Args:
        model: as in `record_routing`.
        replayed: whether to count the tokens of passes whose experts are replayed by `replay_routing`, for the replayed
            experts, which are the ones that are trained. With False, such passes do not count.

    Yields:
        `ExpertCounts`.

    Raises:
        TypeError: as `record_routing`, or no router of the model has a selection bias.
    """
    counts = ExpertCounts(model, check_bool(replayed, "replayed"))
    routers = list(counts.biases)
    try:
        for router in routers:
            follow(router, counts, *own_method(router))
        yield counts
    finally:
        for router in routers:
            unfollow(router, counts)
