"""Splits an index of logits ``(..., V)`` into an index of the rows and one of the columns."""

from typing import Any

import torch
from torch import Tensor


def split_index(key: list[Any], dims: int) -> tuple[tuple[Any, ...], Any] | None:
    """Divide an index into that of the rows and that of the columns; None if it cannot be."""
    if not all(_is_index(k) for k in key):
        return None
    used = sum(k.dim() if isinstance(k, Tensor) and k.dtype == torch.bool else 1 for k in key if k is not Ellipsis)
    if used > dims:
        return None  # an error, which indexing a tensor raises
    if Ellipsis in [k for k in key if not isinstance(k, Tensor)]:
        if used < dims and key[-1] is Ellipsis:
            return tuple(key), slice(None)
        # The last part indexes the columns. For the hidden states it is replaced by a full slice.
        return (*key[:-1], slice(None)), key[-1]
    if used < dims:
        return tuple(key), slice(None)
    return tuple(key[:-1]), key[-1]


def _is_index(part: Any) -> bool:
    """Whether a part of an index can be divided: not a new dimension, a mask that is no tensor, or a nested list."""
    if isinstance(part, list):
        return all(isinstance(n, int) and not isinstance(n, bool) for n in part)
    if isinstance(part, Tensor):
        return part.dtype != torch.uint8
    return part is Ellipsis or isinstance(part, slice) or (isinstance(part, int) and not isinstance(part, bool))


def count_of_columns(columns: Any, vocab: int) -> int | None:
    """How many leading columns a slice selects; None for any other index."""
    if not isinstance(columns, slice) or columns.step not in (None, 1) or columns.start not in (None, 0):
        return None
    return len(range(vocab)[columns]) or None


def is_view(rows: tuple[Any, ...]) -> bool:
    """Whether a tensor that is indexed like this shares memory with the result."""
    return not any(isinstance(part, (Tensor, list)) for part in rows)
