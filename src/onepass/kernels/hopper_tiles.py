"""Tiles of the grouped GEMMs of Hopper GPUs: how descriptors load and store them. Device functions, in Gluon."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, tma

# Of a tile: rows, half of them, columns, and the part of K that is multiplied at once.
ROWS, HALF, WIDTH, STEP = (gl.constexpr(n) for n in (128, 64, 256, 64))
ELEMENT = gl.constexpr(2)  # bytes
SUPPORTED = hasattr(tma, "make_tensor_descriptor") and hasattr(async_copy, "mbarrier_arrive")  # from Triton 3.6 on


@gluon.constexpr_function
def stored_layout(rows, columns):
    """The layout in which a tile is stored, 16 bytes a thread.

    Every row is in the same warp as in the accumulator, so that warps exchange nothing.
    """
    registers = [[0, 1], [0, 2], [0, 4], *[[0, 32 << n] for n in range((columns // 64).bit_length())], [8, 0]]
    registers += [[64, 0]] * (rows // 128)
    lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [rows, columns])


@gluon.jit
def store_tile(to, row, there, n0, N: gl.constexpr, ROW: gl.constexpr, tile):
    """Store the rows of a tile that are ``there`` from column ``n0`` on, of N columns; a row has ROW elements."""
    stored: gl.constexpr = stored_layout(tile.shape[0], tile.shape[1])
    row = gl.convert_layout(row, gl.SliceLayout(1, stored)).to(gl.int64)
    there = gl.convert_layout(there, gl.SliceLayout(1, stored))
    n = n0 + gl.arange(0, tile.shape[1], gl.SliceLayout(0, stored))
    found = gl.convert_layout(tile.to(to.dtype.element_ty), stored)
    gl.store(to + row[:, None] * ROW + n[None, :], found, mask=there[:, None] & (n < N)[None, :])


@gluon.jit
def store_rows(
    to, descriptor, shared, first, whole, row, there, n0, N: gl.constexpr, ROW: gl.constexpr, PENDING: gl.constexpr,
    tile,
):  # fmt: skip
    """`store_tile`, or, for a ``whole`` tile of consecutive rows from the ``first`` on, a copy to ``shared`` memory,
    which a descriptor stores while the warps go on. It is None if no descriptor can.

    This waits until at most PENDING of the earlier stores are not finished, which must be those from other memory.
    """
    if shared is None:
        store_tile(to, row, there, n0, N, ROW, tile)
    elif whole:
        tma.store_wait(PENDING)
        shared.store(tile.to(to.dtype.element_ty))
        hopper.fence_async_shared()
        tma.async_copy_shared_to_global(descriptor, [first, n0], shared)
    else:
        store_tile(to, row, there, n0, N, ROW, tile)


@gluon.jit
def load_range(of_rows, ready, rows, begin, end, k0, OTHERS: gl.constexpr):
    """Load the rows of a step, of the second half if any are before the ``end``. OTHERS: bytes that are loaded, too."""
    OF_HALF: gl.constexpr = HALF * STEP * ELEMENT
    both = begin + HALF < end
    mbarrier.expect(ready, OTHERS + 2 * OF_HALF, pred=both)
    mbarrier.expect(ready, OTHERS + OF_HALF, pred=both == 0)
    tma.async_copy_global_to_shared(of_rows, [begin, k0], ready, rows.slice(0, HALF))
    tma.async_copy_global_to_shared(of_rows, [begin + HALF, k0], ready, rows.slice(HALF, HALF), pred=both)


@gluon.jit
def load_columns(of_columns, ready, columns, expert, n0, k0, BY: gl.constexpr, HALVES: gl.constexpr):
    """Load the columns of a step."""
    if BY == "K":
        to = columns._reinterpret(columns.dtype, [1, HALVES, WIDTH // HALVES, STEP], gl.NVMMASharedLayout(128, 16, 4))
        tma.async_copy_global_to_shared(of_columns, [expert, 0, n0, k0], ready, to)
    else:
        to = columns._reinterpret(columns.dtype, [1, STEP, WIDTH], gl.NVMMASharedLayout(128, 16, 3))
        tma.async_copy_global_to_shared(of_columns, [expert, k0, n0], ready, to)


@gluon.jit
def describe_rows(x, count, K: gl.constexpr, ROW: gl.constexpr):
    """The descriptor of half of the rows of a tile of ``x`` ``(count, K)``."""
    return tma.make_tensor_descriptor(x, [count, K], [ROW, 1], [HALF, STEP], gl.NVMMASharedLayout(128, 16, 2))


@gluon.jit
def describe_result(x, count, N: gl.constexpr, ROW: gl.constexpr, WIDTH: gl.constexpr):
    """The descriptor of WIDTH columns of half of the rows of a result ``(count, N)``, whose rows have ROW elements."""
    return tma.make_tensor_descriptor(x, [count, N], [ROW, 1], [HALF, WIDTH], gl.NVMMASharedLayout(128, 16, 2))


@gluon.jit
def describe_weight(
    w, E: gl.constexpr, COLUMNS: gl.constexpr, K: gl.constexpr, BY: gl.constexpr, E_STRIDE: gl.constexpr,
    STRIDE: gl.constexpr, HALVES: gl.constexpr,
):  # fmt: skip
    """The descriptor of the columns of a tile of a weight ``(E, COLUMNS, K)``: one range of them, or two HALVES."""
    if BY == "K":
        PART: gl.constexpr = COLUMNS // HALVES
        return tma.make_tensor_descriptor(
            w, [E, HALVES, PART, K], [E_STRIDE, PART * STRIDE, STRIDE, 1], [1, HALVES, WIDTH // HALVES, STEP],
            gl.NVMMASharedLayout(128, 16, 4),
        )  # fmt: skip
    else:
        return tma.make_tensor_descriptor(
            w, [E, K, COLUMNS], [E_STRIDE, STRIDE, 1], [1, STEP, WIDTH], gl.NVMMASharedLayout(128, 16, 3)
        )
