"""How rows lie in memory, and how many programs and threads walk one."""

from collections.abc import Iterator
from functools import lru_cache

import torch
import triton

# Enough programs to keep every multiprocessor busy; fewer rows than this are split.
PROGRAMS_PER_SM = 4
MAX_SPLITS = 64
MAX_LANES = 256


def row_groups(*tensors: torch.Tensor) -> Iterator[tuple[slice, int, list[torch.Tensor], list[int]]]:
    """Cut tensors of one shape ``(..., V)`` into groups of rows that two strides a tensor describe; nothing is copied.

    Yields ``(rows, inner_rows, views, strides)``: the group's rows, the number of rows along the inner stride, the
    tensors' parts and their ``outer, inner`` strides in turn. Nearly every tensor is one group.
    """
    sizes: list[int] = []
    strides: list[tuple[int, ...]] = []
    for dim, size in enumerate(tensors[0].shape[:-1]):
        stride = tuple(t.stride(dim) for t in tensors)
        if size == 1:
            continue
        if sizes and strides[-1] == tuple(size * s for s in stride):
            sizes[-1] *= size
            strides[-1] = stride
        else:
            sizes.append(size)
            strides.append(stride)
    if len(sizes) <= 2:
        zero = (0,) * len(tensors)
        outer, inner = ([zero, zero] + strides)[-2:]
        rows = sizes[0] * sizes[-1] if len(sizes) == 2 else sum(sizes) or 1
        yield slice(0, rows), sizes[-1] if sizes else 1, list(tensors), [s for pair in zip(outer, inner) for s in pair]
        return
    first = 0
    for parts in zip(*tensors):
        for group, inner_rows, views, flat in row_groups(*parts):
            yield slice(first + group.start, first + group.stop), inner_rows, views, flat
        first += parts[0][..., 0].numel()


def flat_rows(tensor: torch.Tensor | None, rows: slice, per_row: int = 1) -> torch.Tensor | None:
    """The part of a contiguous row vector (or ``(rows, per_row)`` matrix) that belongs to a group of rows."""
    if tensor is None or rows.start == 0:
        return tensor
    return tensor.view(-1)[rows.start * per_row :]


def is_aligned(strides: list[int], vec: int) -> bool:
    """Whether every row starts a whole number of vectors after the first."""
    return all(s % vec == 0 for s in strides)


def lanes_for(vocab: int, vec: int) -> int:
    """States a program keeps, one a thread: four tiles or more a row where the row is long enough."""
    return max(32, min(MAX_LANES, triton.next_power_of_2(vocab // (4 * vec) + 1)))


@lru_cache
def threads_per_warp() -> int:
    if triton.knobs.runtime.interpret:
        return 32
    return triton.runtime.driver.active.get_current_target().warp_size


def splits_for(rows: int, tiles: int, device: torch.device) -> int:
    """Programs that share a row: a power of two, 1 once there are rows enough for the card."""
    wanted = min(PROGRAMS_PER_SM * multiprocessors(device) // max(rows, 1), tiles // 4, MAX_SPLITS)
    return 1 << (wanted.bit_length() - 1) if wanted > 1 else 1


@lru_cache
def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":  # the interpreter
        return 8
    return torch.cuda.get_device_properties(device).multi_processor_count
