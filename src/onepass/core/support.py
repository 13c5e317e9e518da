"""Checks of the argument ``support``: the classes to which the softmax of each row is restricted."""

import math
from typing import Any

import torch
from torch import Tensor

from onepass.core.checks import INDEX_DTYPES, check_device, described

# A tensor of ids, ids and offsets, or either of these followed by which rows have all classes.
Support = Tensor | tuple[Tensor, ...]
EXPECTED = (
    "support: expected ids (..., S), or a tuple (ids, offsets), each with a bool tensor of full rows behind or not"
)


Ids = tuple[Tensor, Tensor | None, Tensor | None]


def check_support(support: Any, logits: Any, row_mask: Tensor | None, check_values: bool) -> Ids:
    """Return the ids ``(n,)`` of all rows, where those of a row start, and how many it has, -1 for all classes.

    If every row has S, these are the ids ``(..., S)``, None and None.

    Args:
        check_values: whether to check the values of ids and lengths too.

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype, shape or device.
        IndexError: an id outside of the vocabulary.
    """
    parts = support if isinstance(support, tuple | list) else (support,)
    rows, full = logits.shape[:-1], None
    if not parts or not all(isinstance(t, Tensor) for t in parts):
        raise TypeError(f"{EXPECTED}, got {described(support)}")
    if len(parts) > 1 and parts[-1].dtype == torch.bool:
        *parts, full = parts
        if full.shape != rows:
            raise ValueError(f"support: expected full rows of shape {tuple(rows)}, got {tuple(full.shape)}")
    if len(parts) > 2 or any(t.dtype not in INDEX_DTYPES for t in parts):
        raise TypeError(f"{EXPECTED}, got dtypes {[str(t.dtype) for t in parts]}")
    for t in parts if full is None else (*parts, full):
        check_device(t, logits, "support")
    ids, n = parts[0], math.prod(rows)
    starts: Tensor | None = None
    lengths: Tensor | None = None
    if len(parts) == 1:
        if ids.dim() != len(rows) + 1 or ids.shape[:-1] != rows:
            raise ValueError(f"support: expected ids of shape {(*rows, 'S')}, got {tuple(ids.shape)}")
    else:
        offsets = parts[1]
        if ids.dim() != 1 or offsets.shape != (n + 1,):
            raise ValueError(
                f"support: expected ids of shape (n,) and offsets of shape ({n + 1},), the number of rows and one, "
                f"got {tuple(ids.shape)} and {tuple(offsets.shape)}"
            )
        offsets = offsets.to(torch.int64)
        starts, lengths = offsets[:-1].clone(), offsets.diff()
        if check_values and (int(offsets[0]) < 0 or bool((lengths < 0).any()) or int(offsets[-1]) > len(ids)):
            raise ValueError(
                f"support: expected ascending offsets between 0 and {len(ids)}, the number of ids, "
                f"got {offsets[:8].tolist()}{' ...' if len(offsets) > 8 else ''}"
            )
        lengths = lengths.clamp(min=0)
    if full is not None:
        ids, starts, lengths = of_each_row(ids, starts, lengths)
        lengths = lengths.masked_fill(full.reshape(-1), -1)
    if check_values:
        check_ids(*of_each_row(ids, starts, lengths), row_mask, logits.shape[-1])
    if starts is None or lengths is None:
        return ids, None, None
    return ids, starts.view(rows), lengths.view(rows)


def of_each_row(ids: Tensor, starts: Tensor | None, lengths: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The flattened ids, where those of each row start, and how many it has."""
    if starts is not None and lengths is not None:
        return ids, starts.reshape(-1), lengths.reshape(-1)
    n, S = math.prod(ids.shape[:-1]), ids.shape[-1]
    return ids.reshape(-1), torch.arange(n, device=ids.device) * S, torch.full((n,), S, device=ids.device)


def entries(ids: Tensor, starts: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """The row of each id that is in a row, and the id (int64). Row n has ``counts[n]`` ids, from ``starts[n]`` on."""
    row = torch.arange(len(counts), device=ids.device).repeat_interleave(counts)
    place = torch.arange(len(row), device=ids.device) - (counts.cumsum(0) - counts)[row] + starts[row]
    return row, ids[place].long()


def check_ids(ids: Tensor, starts: Tensor, lengths: Tensor, row_mask: Tensor | None, vocab: int) -> None:
    """Raise for an id outside of the vocabulary but -1, and for one that a row has twice."""
    if row_mask is not None:
        lengths = lengths.masked_fill(row_mask.reshape(-1) == 0, 0)
    counts = lengths.clamp(min=0)
    row, of_rows = entries(ids, starts, counts)
    bad = (of_rows < -1) | (of_rows >= vocab)
    if bad.any():
        n = int(bad.nonzero()[0])
        raise IndexError(f"support: expected ids in [0, {vocab}), or -1, got {int(of_rows[n])} in row {int(row[n])}")
    key = (row * vocab + of_rows)[of_rows >= 0].sort().values
    twice = (key.diff() == 0).nonzero()
    if len(twice):
        found = int(key[twice[0]])
        raise ValueError(f"support: expected an id once per row, got {found % vocab} twice in row {found // vocab}")
