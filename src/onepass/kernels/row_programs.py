"""Device functions that kernels share: where a row starts, how programs share a row, and writing zeros to a row."""

import triton
import triton.language as tl


@triton.jit
def row_start(row, inner_rows, outer_stride, inner_stride):
    """The element offset of a row in a tensor whose row dimensions collapse to (outer, inner)."""
    row = row.to(tl.int64)
    return (row // inner_rows) * outer_stride + (row % inner_rows) * inner_stride


@triton.jit
def arrives_last(pieces, rows, row, STATE: tl.constexpr, SPLITS: tl.constexpr):
    """Whether all SPLITS programs of a row have published their STATE numbers, this one being the last.

    ``pieces`` is the `layout.workspace`: numbers ``(rows, STATE, SPLITS)``, and then a count of arrivals per row.
    """
    tl.debug_barrier()
    arrived = (pieces + rows * (STATE * SPLITS)).to(tl.pointer_type(tl.int32), bitcast=True) + row
    return tl.atomic_add(arrived, 1, sem="acq_rel") == SPLITS - 1


@triton.jit
def wait_for_all(pieces, rows, row, STATE: tl.constexpr, SPLITS: tl.constexpr):
    """Wait until all SPLITS programs of a row have published their numbers. ``pieces`` is as in `arrives_last`."""
    tl.debug_barrier()
    arrived = (pieces + rows * (STATE * SPLITS)).to(tl.pointer_type(tl.int32), bitcast=True) + row
    count = tl.atomic_add(arrived, 1, sem="acq_rel") + 1
    while count < SPLITS:
        count = tl.atomic_add(arrived, 0, sem="acquire")


@triton.jit
def take_turn(pieces, rows, STATE: tl.constexpr, SPLITS: tl.constexpr):
    """A number for every program, in the order in which the programs start to run.

    Programs that wait for others must not keep these from starting. With this number, the programs of a row start one
    after the other. Programs that wait for one that has not started all belong to the row that was begun last, and the
    next programs to start are those of this row.
    """
    turns = (pieces + rows * (STATE * SPLITS + 1)).to(tl.pointer_type(tl.int32), bitcast=True)
    return tl.atomic_add(turns, 1, sem="relaxed")


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
