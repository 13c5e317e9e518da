"""Which slots are whose: what comes before any product of experts."""

from typing import Any

import torch
from torch import Tensor

from onepass.checks import FLOATS, check_device, check_integer, described
from onepass.dispatch import operation, part_of
from onepass.moe import eager_experts
from onepass.options import GroupOptions, Groups


def group_by_expert(experts: Tensor, num_experts: int, like: Tensor) -> Groups:
    """Sort the slots ``t·K + k`` of ``experts`` ``(T, K)`` by expert, for any number of `scattered_linear`.

    Args:
        experts: int32 or int64, the ids that tokens chose. One that is no expert's belongs to nobody.
        num_experts: E.
        like: a tensor of the device and dtype that will be multiplied.

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype, shape, device or value.
    """
    check_choices(experts)
    num_experts = check_integer(num_experts, "num_experts", 1)
    if not isinstance(like, Tensor) or like.dtype not in FLOATS:
        raise TypeError(f"like: expected a floating-point tensor, got {described(like)}")
    check_device(experts, like, "experts")
    return Groups(*_group(experts, like, GroupOptions(num_experts)))


def check_choices(experts: Tensor) -> None:
    if not isinstance(experts, Tensor) or experts.dtype not in (torch.int32, torch.int64) or experts.dim() != 2:
        raise TypeError(f"experts: expected an int32 or int64 tensor (T, K), got {described(experts)}")


def grouped_path(x: Tensor) -> Any:
    return part_of(x, "grouped", eager_experts)


def tile_count(like: Tensor, slots: int, num_experts: int) -> int:
    """How many tiles of rows `Groups` has for a product with ``like``: none where PyTorch computes it."""
    path = grouped_path(like)
    return 0 if path is eager_experts else int(path.tiles_for(slots, num_experts))


def _like_group(experts: Tensor, like: Tensor, options: GroupOptions) -> tuple[Tensor, ...]:
    slots, E = experts.numel(), options.num_experts
    tiles = tile_count(like, slots, E)
    return tuple(experts.new_empty(n, dtype=torch.int32) for n in (slots, E + 1, tiles, tiles))


@operation("onepass::group_by_expert", _like_group)
def _group(experts: Tensor, like: Tensor, options: GroupOptions) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    groups: Groups = grouped_path(like).group(experts, options.num_experts)
    return tuple(groups)  # type: ignore[return-value]
