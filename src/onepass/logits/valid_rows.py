"""The rows of a linear head that are not masked. `tile_plan` sizes tiles by their number, read from the device."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from onepass.core.checks import is_debugging


class RowCount:
    """The number of valid rows, copied to the CPU asynchronously.

    `read` waits only for what was launched before this object was created. If that is before the layers of a model, the
    CPU does not wait for the layers.

    Args:
        valid: a bool tensor of any shape.
        rows: the number of rows of the head.
    """

    def __init__(self, valid: Tensor, rows: int) -> None:
        self.rows, self.count = rows, valid.count_nonzero()
        self.event: torch.cuda.Event | None = None
        if valid.is_cuda:
            pinned = torch.empty((), dtype=torch.int64, device="cpu", pin_memory=True)
            with torch.cuda.device(valid.device):
                self.count = pinned.copy_(self.count, non_blocking=True)
                self.event = torch.cuda.Event()
                self.event.record()

    def read(self) -> int:
        if self.event is not None:
            self.event.synchronize()
        return int(self.count)


_expected: ContextVar[RowCount | None] = ContextVar("_expected", default=None)


@contextmanager
def expecting(count: RowCount) -> Iterator[None]:
    """Within this context, row masks of ``count.rows`` rows have this number of valid rows."""
    token = _expected.set(count)
    try:
        yield
    finally:
        _expected.reset(token)


def valid_rows(row_mask: Tensor | None) -> Tensor | None:
    """Ids of the rows that are not masked, or None for all rows.

    Unless their number is `expecting`, the CPU waits until the device has counted them. The device is then idle until
    the first GEMM is launched.
    """
    if row_mask is None or defers(row_mask):
        return None
    expected = _expected.get()
    known = expected is not None and expected.rows == len(row_mask)
    # Counted first: what is launched next, if no row is masked, is the first GEMM.
    count = expected.read() if known else int(row_mask.ne(0).count_nonzero())  # type: ignore[union-attr]
    if known and is_debugging() and count != int(row_mask.ne(0).count_nonzero()):
        raise RuntimeError(f"row_mask: expected {count} valid rows, got {int(row_mask.ne(0).count_nonzero())}")
    if count == len(row_mask):
        return None
    if count == 0:
        return torch.empty(0, dtype=torch.int64, device=row_mask.device)
    return torch.nonzero_static(row_mask, size=count).squeeze(-1)


def defers(row_mask: Tensor | None) -> bool:
    """Whether the CPU cannot read how many rows are masked, so that the kernels have to skip them.

    This is so while a CUDA graph is captured, and on the meta device.
    """
    if row_mask is None:
        return False
    return row_mask.is_meta or (row_mask.is_cuda and torch.cuda.is_current_stream_capturing())
