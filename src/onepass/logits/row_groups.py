"""Groups of consecutive rows, such as the tokens of a sequence, of which a loss is computed together.

`losses.linear_loss` passes `RowGroups` to the user's loss. No group is split over two tiles of a linear head, so that
the gradient can be computed while the tile is in memory.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from onepass.core.checks import INDEX_DTYPES, check_integer, described


class RowGroups:
    """The groups of rows that `linear_loss` passes to a loss function. Groups are consecutive; a group may be empty.

    Args:
        ids: ``(n,)``, int64, the index of each row's group, from 0 on and in ascending order, which is not checked.
        count: the number G of groups.
        row_mask: ``(n,)``, bool; rows where it is False are excluded.

    Attributes:
        ids: as given.
        lengths: ``(G,)``, int64, the number of rows of each group that are not masked.
    """

    def __init__(self, ids: Tensor, count: int, row_mask: Tensor | None = None) -> None:
        if not isinstance(ids, Tensor) or ids.dtype != torch.int64 or ids.dim() != 1:
            raise TypeError(f"ids: expected an int64 tensor (n,), got {described(ids)}")
        is_mask = isinstance(row_mask, Tensor) and row_mask.dtype == torch.bool and row_mask.shape == ids.shape
        if row_mask is not None and not is_mask:
            raise TypeError(f"row_mask: expected a bool tensor of shape {tuple(ids.shape)}, got {described(row_mask)}")
        self.ids, self.row_mask = ids, row_mask
        self._lengths = self._counted(torch.ones_like(ids), count)
        self.lengths = self._lengths if row_mask is None else self._counted(row_mask.long(), count)

    def _counted(self, numbers: Tensor, count: int) -> Tensor:
        return numbers.new_zeros(count).index_add_(0, self.ids, numbers)

    def sum(self, per_row: Tensor) -> Tensor:
        """The sum of ``(n, *)`` over the rows of each group, ``(G, *)``, differentiable. Masked rows are excluded.

        The sum of integers or bools is float32. That of 16-bit numbers is computed in float32, and rounded once.

        Raises:
            TypeError, ValueError: ``per_row`` is not a tensor with an entry for each row of these groups.
        """
        return self._sum(per_row).to(result_dtype(per_row))

    def mean(self, per_row: Tensor) -> Tensor:
        """The mean of ``(n, *)`` over the rows of each group, ``(G, *)``; 0 for a group without unmasked rows.

        Dtypes and errors are those of `sum`.
        """
        total = self._sum(per_row)
        count = self.lengths.clamp(min=1).to(total.dtype)
        return (total / count.reshape(-1, *[1] * (per_row.dim() - 1))).to(result_dtype(per_row))

    def _sum(self, per_row: Tensor) -> Tensor:
        """The sum in float32, or in float64."""
        if not isinstance(per_row, Tensor) or per_row.is_complex():
            raise TypeError(f"per_row: expected a tensor of real numbers, got {described(per_row)}")
        if per_row.shape[:1] != self.ids.shape:
            raise ValueError(f"per_row: expected shape ({len(self.ids)}, ...), a number or more for each row, "
                             f"got {tuple(per_row.shape)}")  # fmt: skip
        per_row = per_row if per_row.dtype == torch.float64 else per_row.float()
        if self.row_mask is not None:
            mask = self.row_mask.reshape(-1, *[1] * (per_row.dim() - 1))
            per_row = per_row.where(mask, torch.zeros((), dtype=per_row.dtype, device=per_row.device))
        # In one order, which atomic additions are not. The lengths are not checked: that would synchronize.
        return torch.segment_reduce(per_row.contiguous(), "sum", lengths=self._lengths, axis=0, unsafe=True, initial=0)


def result_dtype(per_row: Tensor) -> torch.dtype:
    """The dtype of a sum or mean of rows."""
    return per_row.dtype if per_row.is_floating_point() else torch.float32


class GroupTooLong(Exception):
    """A tile does not hold the longest group."""


def check_groups(groups: Any, rows: int) -> list[int]:
    """Return the lengths of groups as ints. Raise unless they are integers >= 0 that add up to the number of rows."""
    if isinstance(groups, Tensor):
        is_lengths = groups.dim() == 1 and groups.dtype in INDEX_DTYPES
        lengths = groups.tolist() if is_lengths and not groups.is_meta else None
    else:
        lengths = list(groups) if isinstance(groups, Sequence) and not isinstance(groups, str) else None
    if lengths is None:
        raise TypeError(f"groups: expected the lengths of groups, int32 or int64 (G,) or ints, got {described(groups)}")
    lengths = [check_integer(n, "groups", 0) for n in lengths]
    if sum(lengths) != rows:
        raise ValueError(f"groups: expected lengths that add up to {rows}, the number of rows, got {sum(lengths)}")
    return lengths


def ids_of(lengths: Sequence[int], device: torch.device) -> Tensor:
    """The group of each row, ``(n,)``."""
    of_groups = torch.tensor(lengths, dtype=torch.int64, device="cpu")
    if device.type == "cuda":  # a copy from memory that is not pinned would wait for the device
        of_groups = of_groups.pin_memory().to(device, non_blocking=True)
    return torch.arange(len(lengths), device=device).repeat_interleave(of_groups.to(device), output_size=sum(lengths))


def packed(lengths: Sequence[int], most: int) -> list[slice]:
    """Consecutive groups that have at most ``most`` rows together, and as many of them as fit.

    Raises:
        GroupTooLong: one has more rows.
    """
    if max(lengths, default=0) > most:
        raise GroupTooLong
    parts, first, rows = [], 0, 0
    for n, length in enumerate(lengths):
        if rows + length > most:
            parts.append(slice(first, n))
            first, rows = n, 0
        rows += length
    return [*parts, slice(first, len(lengths))]
