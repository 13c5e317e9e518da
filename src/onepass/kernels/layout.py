"""The memory layout of rows, and how many programs and threads process a row. The launchers of the kernels use it."""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import triton

from onepass.core.memo import memo

# Threads that saturate a multiprocessor's memory bandwidth. If there are too few rows for that, programs become wider
# first, which costs nothing. Only then do several programs share a row, which costs a zeroed workspace.
THREADS_PER_SM = 512
MAX_SPLITS = 64
MAX_LANES = 256
MAX_LANES_OF_FEW_ROWS = 1024
MANY = 1 << 20  # rows or tokens, for plans that do not depend on their number


def row_groups(*tensors: torch.Tensor) -> list[tuple[int, Sequence[torch.Tensor]]]:
    """Divide tensors of one shape ``(..., V)`` into groups of rows, each described by two strides per tensor.

    Every group is returned with the number of its first row. Nothing is copied. Nearly all tensors are one group: they
    have at most two row dimensions, or more that merge.
    """
    shape = tensors[0].shape
    if len(shape) <= 3:
        return [(0, tensors)]
    try:
        return [(0, tuple(t.view(-1, shape[-1]) for t in tensors))]
    except RuntimeError:  # the rows of some tensor are not evenly spaced
        each = shape[1:-1].numel()
        return [(n * each + first, group) for n, part in enumerate(zip(*tensors)) for first, group in row_groups(*part)]


def row_strides(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, int, int]:
    """``(inner_rows, outer_stride, inner_stride)`` of a tensor with at most two row dimensions."""
    if len(shape) == 3:
        return shape[1], strides[0], strides[1]
    return (shape[0], 0, strides[0]) if len(shape) == 2 else (1, 0, 0)


Layout = tuple[tuple[int, ...], tuple[int, ...], int]  # shape, strides and element size in bytes


def layout_of(tensor: torch.Tensor) -> Layout:
    """The shape, strides and element size of a tensor, from which launches are planned."""
    return tensor.shape, tensor.stride(), tensor.element_size()


class Geometry:
    """How a kernel walks the rows of one or several tensors of the same shape.

    Columns are counted from an aligned address at or before each row of the first tensor. A thread reads 16 bytes at a
    time of the tensor with the smallest elements.

    Attributes:
        V, rows: the number of columns and rows.
        strides: ``inner_rows``, followed by the outer and the inner stride of every tensor.
        constexprs: ``ALIGN``, whether rows of the first tensor may start at an unaligned address; ``SAME_PHASE``,
            whether the rows of all tensors are equally far from an aligned address; ``VEC``, elements per thread.
        fixed: whether columns are counted from the first of a row at any address, and nothing depends on the other
            rows: for the batch-invariant mode. ``ALIGN`` is then False.
    """

    def __init__(self, *tensors: Layout, fixed: bool = False) -> None:
        shape = tensors[0][0]
        self.V, self.rows = shape[-1], math.prod(shape[:-1])
        self.VEC = 16 // min(size for _, _, size in tensors)
        where = [row_strides(shape, strides) for _, strides, _ in tensors]
        self.strides = where[0] + tuple(s for w in where[1:] for s in w[1:])
        first = where[0][1:]
        unaligned = any(s % self.VEC for s in first)
        self.fixed, self.unaligned, self.align = fixed, unaligned, unaligned and not fixed
        same_phase = not any((a - b) % self.VEC for w in where[1:] for a, b in zip(first, w[1:]))
        same_phase = same_phase and not (fixed and unaligned)
        phase = {"SAME_PHASE": same_phase} if len(tensors) > 1 else {}
        self.constexprs = {"ALIGN": self.align, **phase, "VEC": self.VEC}  # in the order of the kernels' signatures

    def key(self, read: str) -> dict[str, Any]:
        """The key of autotuned configurations. ``read`` says what the kernel computes."""
        return {
            "rows": self.rows,
            "vocab": self.V,
            **elements(16 // self.VEC),
            "read": read.replace(" ", "+"),
        }

    def programs(self, device: torch.device, most: int = MAX_LANES) -> tuple[int, int]:
        """See `programs_for`."""
        return programs_for(MANY if self.fixed else self.rows, self.V, self.VEC, device, most)

    def pieces(self, threads: int) -> int:
        """The number of pieces, of ``threads`` vectors each, that cover a row."""
        return -(-(self.V + self.VEC - 1 if self.align else self.V) // (threads * self.VEC))


def elements(size: int) -> dict[str, str]:
    """The part of the key of autotuned configurations that states the element size."""
    return {"elements": f"{8 * size}-bit"}


def flat_rows(
    first: int, tensors: Sequence[torch.Tensor | None], per_row: Sequence[int] = ()
) -> Sequence[torch.Tensor | None]:
    """The tensors, flattened, from row ``first`` on. They have ``per_row`` elements per row (default 1).

    A tensor without dimensions is a number of all rows.
    """
    if first == 0:
        return tensors
    counts = per_row or [1] * len(tensors)
    return [t if t is None or not t.dim() else t.reshape(-1)[first * n :] for t, n in zip(tensors, counts)]


def flat_gradients(grads: Sequence[torch.Tensor | None]) -> tuple[list[torch.Tensor | None], tuple[int, ...]]:
    """Upstream gradients, flattened, and their strides, which are 0 for None and for one number of all rows."""
    flat: list[torch.Tensor | None] = []
    strides = []
    for g in grads:
        if g is not None and g.dim() > 1:
            g = g.reshape(-1)
        flat.append(g)
        strides.append(g.stride(0) if g is not None and g.dim() else 0)
    return flat, tuple(strides)


def lanes_for(vocab: int, vec: int, most: int = MAX_LANES) -> int:
    """Lanes of a program, one per thread. A row has at least two tiles of this width, if it is long enough."""
    return max(32, min(most, power_of_two(vocab // (4 * vec) + 1)))


def programs_for(rows: int, vocab: int, vec: int, device: torch.device, most: int = MAX_LANES) -> tuple[int, int]:
    """``(lanes, splits)``: the width of a program and the number of programs that share a row, both powers of two."""
    threads = THREADS_PER_SM * multiprocessors(device) // max(rows, 1)  # available per row
    lanes = lanes_for(vocab, vec, min(MAX_LANES_OF_FEW_ROWS, max(most, power_of_two(threads))))
    wanted = min(threads // lanes, vocab // (4 * lanes * vec), MAX_SPLITS)
    return lanes, 1 << (wanted.bit_length() - 1) if wanted > 1 else 1


def workspace(rows: int, state: int, splits: int) -> int:
    """The size of the workspace of programs that share a row: their states, and then a count of arrivals per row."""
    return rows * (state * splits + 1) if splits > 1 else 0


def one_at_a_time() -> bool:
    """Whether programs run one after the other, as in Triton's interpreter."""
    return bool(triton.knobs.runtime.interpret)


def warps(lanes: int) -> int:
    """The number of warps for this many lanes."""
    return max(1, lanes // threads_per_warp())


def power_of_two(n: int) -> int:
    """The smallest power of two that is not below ``n``."""
    return 1 << max(n - 1, 0).bit_length()


@lru_cache
def target_of(device: int) -> Any:
    """What Triton compiles for on a device."""
    driver = triton.runtime.driver.active
    if device == driver.get_current_device():
        return driver.get_current_target()
    with torch.cuda.device(device):
        return driver.get_current_target()


def target(device: int = -1) -> Any:
    """`target_of` a device, of the current one by default."""
    return target_of(triton.runtime.driver.active.get_current_device() if device < 0 else device)


def threads_per_warp() -> int:
    """The warp size of the current device; 32 in the interpreter."""
    return 32 if one_at_a_time() else target().warp_size


def compute_capability(device: int = -1) -> int:
    """That of a device as Triton writes it (90 for Hopper); 0 on AMD GPUs and in the interpreter."""
    found = None if one_at_a_time() else target(device)
    return found.arch if found is not None and found.backend == "cuda" else 0


def precision() -> str:
    """The ``input_precision`` of float32 GEMMs: full accuracy, on tensor cores if possible."""
    return "tf32x3" if compute_capability() else "ieee"


def has_tma(device: int = -1) -> bool:
    """Whether tiles can be loaded by descriptors (TMA): from Hopper on, and in the interpreter."""
    return compute_capability(device) >= 90 or one_at_a_time()


def tma_dimension(operand: torch.Tensor, k: int, n: int, only_k: bool = False) -> str:
    """The dimension in which an operand of a GEMM is contiguous, "K" or "N", if descriptors can load it; else "".

    ``k`` and ``n`` are the positions of these dimensions. With ``only_k``, N is not considered.
    """
    name = aligned_dimension(operand.stride(), operand.element_size(), k, n, only_k)
    fits = name and operand.numel() > 0 and operand.data_ptr() % 16 == 0
    return name if fits and has_tma(operand.get_device()) else ""


@memo
def aligned_dimension(strides: tuple[int, ...], size: int, k: int, n: int, only_k: bool) -> str:
    """`tma_dimension` by the strides alone: all but one are of whole 16 bytes."""
    name, contiguous = ("K", k) if strides[k] == 1 else ("N", n)
    others = [stride for d, stride in enumerate(strides) if d != contiguous]
    fits = strides[contiguous] == 1 and not (only_k and name == "N")
    return name if fits and all(s > 0 and s * size % 16 == 0 for s in others) else ""


SHARED_KIB = {0: 64, 80: 163, 87: 163, 90: 227, 100: 227, 103: 227}


def shared_memory() -> int:
    """Bytes of shared memory per program."""
    return SHARED_KIB.get(compute_capability(), 99) * 1024


@memo
def multiprocessors(device: torch.device) -> int:
    """The number of multiprocessors of the device."""
    if device.type != "cuda":  # the interpreter
        return 8
    return torch.cuda.get_device_properties(device).multi_processor_count
