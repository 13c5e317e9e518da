"""The product of the transpose of a matrix with few rows and another: the gradient of a head's weight.

`logits.small_head` calls it. On Hopper GPUs, `few_rows_mm_hopper` computes large products, and torch all others.
"""

from typing import Any

import torch
from torch import Tensor

from onepass.kernels.launch import launch

try:
    from onepass.kernels.few_rows_mm_hopper import hopper_plan, is_for_hopper
except ImportError:  # Gluon is an experimental part of Triton

    def is_for_hopper(*_: Any) -> bool:  # type: ignore[misc]
        """Refuse all products."""
        return False


def few_rows_mm(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a.t() @ b``, rounded once, for ``a`` ``(rows, V)`` and ``b`` ``(rows, H)`` of one dtype."""
    if not is_for_hopper(a, b):
        return torch.mm(a.t(), b)
    (rows, V), H = a.shape, b.shape[1]
    out = a.new_empty((V, H))
    launch(hopper_plan, (rows, V, H, (a.stride(0), b.stride(0)), a.device), (a, b, out))
    return out
