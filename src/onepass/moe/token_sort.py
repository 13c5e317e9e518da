"""`group_by_expert`: token-expert assignments sorted by expert, which grouped GEMMs require."""

import torch
from torch import Tensor

from onepass.backend import backend_of
from onepass.core.checks import FLOATS, check_device, check_integer, described
from onepass.core.dispatch import operation
from onepass.core.moe_options import Groups


def group_by_expert(experts: Tensor, num_experts: int, like: Tensor) -> Groups:
    """Sort token-expert assignments by expert, once for any number of calls of `scattered_linear`.

    Args:
        experts: ``(T, K)``, int32 or int64, the ids of every token's experts. Out-of-range ids are dropped.
        num_experts: the number E of experts.
        like: a tensor of the device and dtype of the GEMMs, float16, bfloat16, float32 or float64.

    Returns:
        ``Groups``, to be passed to `scattered_linear`: its ``order`` is the stable sort, int32.

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype, shape, device or value.
    """
    check_assignments(experts)
    num_experts = check_integer(num_experts, "num_experts", 1)
    if not isinstance(like, Tensor) or like.dtype not in FLOATS:
        raise TypeError(f"like: expected a floating-point tensor, got {described(like)}")
    check_device(experts, like, "experts")
    return Groups(*_sort(experts, like, num_experts))


def check_assignments(experts: Tensor) -> None:
    if not isinstance(experts, Tensor) or experts.dtype not in (torch.int32, torch.int64) or experts.dim() != 2:
        raise TypeError(f"experts: expected an int32 or int64 tensor (T, K), got {described(experts)}")


def _like_sort(experts: Tensor, like: Tensor, num_experts: int) -> tuple[Tensor, ...]:
    count = experts.numel()
    tiles = backend_of(like).count_tiles(count, num_experts)
    return tuple(experts.new_empty(n, dtype=torch.int32) for n in (count, num_experts + 1, tiles, tiles))


@operation("onepass::group_by_expert", _like_sort)
def _sort(experts: Tensor, like: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    groups: Groups = backend_of(like).sort_by_expert(experts, num_experts)
    return tuple(groups)  # type: ignore[return-value]
