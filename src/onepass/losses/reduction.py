"""The reduction of the losses of all rows to a mean or a sum, which all loss functions call."""

import math

import torch
import torch.distributed as dist
from torch import Tensor

from onepass.core.checks import check_choice, check_constant, check_number, described, short
from onepass.core.collectives import process_group, sum_of_all_ranks
from onepass.core.deprecated import warn_deprecated
from onepass.core.dispatch import constant_in_trace, is_plain
from onepass.core.options import REDUCTIONS, Reduction
from onepass.core.shard import Group
from onepass.logits.source import Divisor, LogitsSource, over_divisor
from onepass.logits.vocab_parallel import group_of


def divisor_of(
    source: LogitsSource,
    rows: Tensor | None,
    reduction: Reduction,
    num_items: float | Tensor | None,
    mean_group: Group | None = None,
) -> Divisor:
    """The divisor of the sum over rows. For a mean, ``num_items`` or the number of ``rows`` (a mask; None for all rows
    of the source; at least 1). None for ``"none"``. A number on the CPU becomes a float, so that no copy synchronizes.
    """
    check_choice(reduction, "reduction", REDUCTIONS)
    group = group_of_mean(source, reduction, num_items, mean_group)
    if num_items is not None:
        if reduction == "none":
            raise ValueError(f"num_items: expected None with reduction='none', got {short(num_items)}")
        if reduction == "sum":  # the sum is divided, as in earlier versions
            warn_deprecated("num_items: pass reduction='mean' with it, instead of 'sum'")
        if isinstance(num_items, Tensor):
            if num_items.numel() != 1 or num_items.is_complex():
                raise TypeError(f"num_items: expected a real number of one element, got {described(num_items)}")
            check_constant(num_items, "num_items")
            if num_items.is_cpu and is_plain(num_items):
                return check_number(num_items.item(), "num_items", 0, open_low=False)
            number = num_items.reshape(())
            return number if number.is_floating_point() else number.double()  # losses negate it, and 0 has a sign
        return check_number(num_items, "num_items", 0, open_low=False)
    if reduction == "mean":
        if rows is None:
            count = math.prod(source.shape[:-1])
            if group is None:
                return max(count, 1)
            rows = torch.full((), count, device=source.device)
        return sum_of_rows(rows, group).clamp(min=1)
    return 1 if reduction == "sum" else None


def reduce_loss(
    source: LogitsSource,
    loss: Tensor,
    rows: Tensor | None,
    reduction: Reduction,
    num_items: float | Tensor | None,
    mean_group: Group | None = None,
) -> Tensor:
    """The mean over ``rows`` (a mask; 0 if none) or the sum / ``num_items``, the sum, or the loss of each row."""
    return over_divisor(loss, divisor_of(source, rows, reduction, num_items, mean_group), loss.dim())


def group_of_mean(
    source: LogitsSource, reduction: Reduction, num_items: float | Tensor | None, mean_group: Group | None
) -> str | None:
    """The name of the group over whose ranks the rows of a mean are counted; None to count those of this process."""
    if mean_group is None:
        return None
    group = group_of(mean_group, "mean_group")
    if reduction != "mean" or num_items is not None:
        got = f"num_items={short(num_items)}" if reduction == "mean" else f"reduction={reduction!r}"
        raise ValueError(f"mean_group: expected reduction='mean' without num_items, got {got}")
    if source.shard.sizes and shared_ranks(group.group_name, source.shard.group) > 1:
        raise ValueError(
            "mean_group: expected no other process of vocab_group than this one, since all of them have the same rows, "
            f"got {shared_ranks(group.group_name, source.shard.group)} of its processes"
        )
    return group.group_name


def shared_ranks(first: str, second: str) -> int:
    """The number of processes that two groups share."""
    ranks, others = (dist.get_process_group_ranks(process_group(name)) for name in (first, second))
    return len(set(ranks) & set(others))


constant_in_trace(shared_ranks)


def sum_of_rows(counts: Tensor, group: str | None) -> Tensor:
    """The sum of the counts of all rows of this process or, with a group, of all its ranks; it stays on the device."""
    total = counts.sum()
    return total if group is None else sum_of_all_ranks(total, group)
