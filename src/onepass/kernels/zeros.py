"""Counters that are 0: one launch clears many of them, since to clear a few numbers takes as long as a small kernel."""

import sys

import torch
from triton.runtime.driver import driver

BLOCK = 64  # rows that are cleared at once
GRAPHS = "torch._inductor.cudagraph_trees"  # it lets nothing that was allocated in its memory outlive a call
_rows: dict[tuple[int, int, int], list[torch.Tensor]] = {}  # for each device, stream and size, those still unused


def zeros(n: int, device: torch.device) -> torch.Tensor:
    """``(n,)`` int32 zeros, for a kernel on the current stream.

    On a GPU this is a row of a block that was cleared on the same stream. No row is handed out twice. A CUDA graph
    clears its own, each time that it is replayed.
    """
    if device.type != "cuda" or GRAPHS in sys.modules or torch.cuda.is_current_stream_capturing():
        return torch.zeros(n, dtype=torch.int32, device=device)
    index = torch.cuda.current_device() if device.index is None else device.index
    key = index, driver.active.get_current_stream(index), n
    rows = _rows.setdefault(key, [])
    try:
        return rows.pop()
    except IndexError:
        block = torch.zeros((BLOCK, -(-n // 4) * 4), dtype=torch.int32, device=device)  # rows aligned to 16 bytes
        first, *rest = [row.data for row in block[:, :n].unbind()]  # .data: each with a version counter of its own
        rows += rest
        return first
