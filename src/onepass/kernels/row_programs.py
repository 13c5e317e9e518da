"""Device functions that kernels share: where a row starts, which rows are masked, how programs share a row, zeros."""

import triton
import triton.language as tl


@triton.jit
def row_start(row, inner_rows, outer_stride, inner_stride):
    """The element offset of a row in a tensor whose row dimensions collapse to (outer, inner)."""
    row = row.to(tl.int64)
    return (row // inner_rows) * outer_stride + (row % inner_rows) * inner_stride


@triton.jit
def is_active(row_mask, row, masked):
    """Whether a row is not masked, as it is where ``row_mask`` has the number ``masked``."""
    active = True
    if row_mask is not None:
        active = tl.load(row_mask + row) != masked
    return active


@triton.jit
def unmasked(row_mask, row, rows, masked):
    """Which of several rows exist, which are those below ``rows``, and are not masked; see `is_active` for one row."""
    active = row < rows
    if row_mask is not None:
        active = active & (tl.load(row_mask + row, mask=active, other=0) != masked)
    return active


@triton.jit
def arrives_last(pieces, rows, row, STATE: tl.constexpr, SPLITS: tl.constexpr):
    """Whether all SPLITS programs of a row have published their STATE numbers, this one being the last.

    ``pieces`` is the `layout.workspace`: numbers ``(rows, STATE, SPLITS)``, and then a count of arrivals per row.
    """
    tl.debug_barrier()
    arrived = (pieces + rows * (STATE * SPLITS)).to(tl.pointer_type(tl.int32), bitcast=True) + row
    return tl.atomic_add(arrived, 1, sem="acq_rel") == SPLITS - 1


@triton.jit
def publish(words, a, b):
    """Write two float32 numbers to ``words`` as one word, which is never 0: see `collect`."""
    high = tl.where(a == a, a, float("nan")).to(tl.int32, bitcast=True).to(tl.int64) + 1  # any NaN becomes this one
    low = b.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    tl.atomic_xchg(words, (high << 32) | low, sem="relaxed")


@triton.jit
def collect(words, PIECES: tl.constexpr, BLOCK: tl.constexpr):
    """Wait for the words of PIECES programs of a row, and return their pairs of numbers, BLOCK of each.

    A word says by not being 0 that it has been written, and is written at once. So nothing has to be ordered, and no
    fence empties the cache of the multiprocessor, in which the programs find their piece of the row again.
    """
    piece = tl.arange(0, BLOCK)
    there = piece < PIECES
    found = tl.load(words + piece, mask=there, other=1, volatile=True)
    while tl.min((found != 0).to(tl.int32), axis=0) == 0:
        found = tl.load(words + piece, mask=there, other=1, volatile=True)
    high = ((found >> 32) - 1).to(tl.int32).to(tl.float32, bitcast=True)
    low = (found & 0xFFFFFFFF).to(tl.int32).to(tl.float32, bitcast=True)
    return high, low, there


@triton.jit
def take_turn(turns):
    """A number for every program, in the order in which the programs start to run; ``turns`` is 0 before the launch.

    Programs that wait for others must not keep these from starting. With this number, the programs of a row start one
    after the other. Programs that wait for one that has not started all belong to the row that was begun last, and the
    next programs to start are those of this row.
    """
    return tl.atomic_add(turns.to(tl.pointer_type(tl.int32), bitcast=True), 1, sem="relaxed")


@triton.jit
def write_zeros(base, low, high, head, LANES: tl.constexpr, VEC: tl.constexpr):
    """Write zeros to columns ``[max(low, head), high)`` of a row."""
    zeros = tl.zeros([LANES, VEC], base.dtype.element_ty)
    for col0 in range(low, high, LANES * VEC):
        col = col0 + tl.arange(0, LANES)[:, None] * VEC + tl.arange(0, VEC)[None, :]
        if (col0 >= head) & (col0 + LANES * VEC <= high):
            tl.store(base + col, zeros)
        else:
            tl.store(base + col, zeros, mask=(col >= head) & (col < high))
