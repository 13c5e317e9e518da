"""Memory for small results, with little time on the host.

`zeros`: one launch clears many of them, since clearing a few numbers takes as long as a small kernel. `empty`: what
compiled code of torch calls, in half the time of `empty_strided`.
"""

import sys
from typing import Any

import torch
from triton.runtime.driver import driver

ROWS, LARGEST = 64, 1 << 16  # rows that are cleared at once, but no more than four of the largest that are kept
GRAPHS = "torch._inductor.cudagraph_trees"  # it lets nothing that was allocated in its memory outlive a call
_rows: dict[tuple[Any, ...], list[torch.Tensor]] = {}  # by device, stream, size and dtype, those still unused


def empty_strided(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Uninitialized memory on the current device. Size and stride are tuples, and no subclass such as `torch.Size`."""
    return torch.empty_strided(size, stride, dtype=dtype, device="cuda")


empty = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", empty_strided)


def may_be_captured(device: torch.device) -> bool:
    """Whether the work on a device is, or may be, captured in a CUDA graph, which lets no memory of its own be kept."""
    return GRAPHS in sys.modules or (device.type == "cuda" and torch.cuda.is_current_stream_capturing())


def zeros(n: int, device: torch.device, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """``(n,)`` zeros, int32 or float32, for a kernel on the current stream.

    On a GPU this is a row of a block that was cleared on the same stream. No row is handed out twice. A CUDA graph
    clears its own, each time that it is replayed.
    """
    if n > LARGEST or device.type != "cuda" or may_be_captured(device):
        return torch.zeros(n, dtype=dtype, device=device)
    index = torch.cuda.current_device() if device.index is None else device.index
    key = index, driver.active.get_current_stream(index), n, dtype
    try:
        return _rows[key].pop()
    except (KeyError, IndexError):  # as other threads may have left it
        pass
    with torch.inference_mode(False):  # rows may be needed for a backward later
        padded = -(-n // 4) * 4  # aligned to 16 bytes
        block = torch.zeros((min(ROWS, 4 * LARGEST // padded), padded), dtype=dtype, device=device)
        first, *_rows[key] = [row.data for row in block[:, :n].unbind()]  # .data: each with its own version counter
    return first


def kept(index: int, stream: int, n: int, dtype: torch.dtype) -> torch.Tensor | None:
    """`zeros` that are kept for the current stream of the current device, which is not captured; None if none are."""
    rows = None if GRAPHS in sys.modules else _rows.get((index, stream, n, dtype))
    try:
        return rows.pop() if rows else None
    except IndexError:  # another thread has taken the last
        return None
