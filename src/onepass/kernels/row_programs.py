"""Device functions that the kernels share: where a row starts, how programs share a row, a row of zeros."""

import triton
import triton.language as tl


@triton.jit
def row_start(row, inner_rows, outer_stride, inner_stride):
    """Element offset of a row in a tensor whose row dimensions collapse to (outer, inner)."""
    row = row.to(tl.int64)
    return (row // inner_rows) * outer_stride + (row % inner_rows) * inner_stride


@triton.jit
def arrives_last(pieces, rows, row, STATE: tl.constexpr, SPLITS: tl.constexpr):
    """Whether all `SPLITS` programs of a row have published their `STATE` numbers, this one among them.

    ``pieces`` is `layout.workspace`: ``(rows, STATE, SPLITS)`` numbers and then a count of arrivals a row.
    """
    tl.debug_barrier()
    arrived = (pieces + rows * (STATE * SPLITS)).to(tl.pointer_type(tl.int32), bitcast=True) + row
    return tl.atomic_add(arrived, 1, sem="acq_rel") == SPLITS - 1


@triton.jit
def wait_for_all(pieces, rows, row, STATE: tl.constexpr, SPLITS: tl.constexpr):
    """As `arrives_last`, but every program goes on, once all have published."""
    tl.debug_barrier()
    arrived = (pieces + rows * (STATE * SPLITS)).to(tl.pointer_type(tl.int32), bitcast=True) + row
    count = tl.atomic_add(arrived, 1, sem="acq_rel") + 1
    while count < SPLITS:
        count = tl.atomic_add(arrived, 0, sem="acquire")


@triton.jit
def take_turn(pieces, rows, STATE: tl.constexpr, SPLITS: tl.constexpr):
    """A number for every program, in the order in which they begin to run.

    Programs that wait for others must not keep these from starting. By this number a row's programs begin one after
    the other, so that all that can be waiting belong to rows of which the first is complete or has the next turn.
    """
    turns = (pieces + rows * (STATE * SPLITS + 1)).to(tl.pointer_type(tl.int32), bitcast=True)
    return tl.atomic_add(turns, 1, sem="relaxed")


@triton.jit
def write_zeros(base, low, high, head, LANES: tl.constexpr, VEC: tl.constexpr):
    """Zeros to columns ``[max(low, head), high)`` of a row."""
    zeros = tl.zeros([LANES, VEC], base.dtype.element_ty)
    for col0 in range(low, high, LANES * VEC):
        col = col0 + tl.arange(0, LANES)[:, None] * VEC + tl.arange(0, VEC)[None, :]
        if (col0 >= head) & (col0 + LANES * VEC <= high):
            tl.store(base + col, zeros)
        else:
            tl.store(base + col, zeros, mask=(col >= head) & (col < high))
