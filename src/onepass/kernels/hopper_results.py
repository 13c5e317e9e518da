"""How the grouped GEMM of Hopper GPUs stores the products of a tile. Device functions, in Gluon."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import tma

from onepass.kernels.expert_rows import activate
from onepass.kernels.hopper_tiles import HALF, PART, WIDTH, columns_of_tile

activate_tile = gluon.jit(activate.fn)


@gluon.constexpr_function
def buffers_of(parts):
    """How many results of `stored_at_once` columns of a part there is room for in shared memory, for each group of
    warps."""
    return 2 if parts == 2 else 3


@gluon.constexpr_function
def stored_at_once(parts):
    """The columns that a descriptor stores at once. More take less time, and room that tiles of three parts need."""
    return 128 if parts == 2 else 64


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
def store_columns(to, descriptor, results, which: gl.constexpr, EARLIER: gl.constexpr, first, n0, columns):
    """Copy columns of a tile to shared memory, which a descriptor stores while the warps go on.

    EARLIER: how many stores of the same tile come before this one. This waits for those that read the same buffer, and
    for all of earlier tiles.
    """
    BUFFERS: gl.constexpr = results.shape[0] // 2
    PENDING: gl.constexpr = EARLIER if EARLIER < BUFFERS else BUFFERS - 1
    tma.store_wait(PENDING)
    shared = results.index(which * BUFFERS + EARLIER % BUFFERS)
    shared.store(columns.to(to.dtype.element_ty))
    hopper.fence_async_shared()
    tma.async_copy_shared_to_global(descriptor, [first, n0], shared)


@gluon.jit
def store_rows(
    to, descriptor, results, which: gl.constexpr, EARLIER: gl.constexpr, first, whole, row, there, n0, N: gl.constexpr,
    ROW: gl.constexpr, tile,
):  # fmt: skip
    """`store_tile`, or `store_columns` for HALF columns of a ``whole`` tile of consecutive rows from the ``first`` on.

    ``results`` is None if no descriptor can store them. EARLIER: how many of the same tile come before this one.
    """
    if results is None:
        store_tile(to, row, there, n0, N, ROW, tile)
    elif whole:
        STORED: gl.constexpr = results.shape[2]
        if STORED == HALF:
            store_columns(to, descriptor, results, which, EARLIER, first, n0, tile)
        else:
            left, right = gl.split(tile.reshape((PART, 2, STORED)).permute((0, 2, 1)))
            store_columns(to, descriptor, results, which, 2 * EARLIER, first, n0, left)
            store_columns(to, descriptor, results, which, 2 * EARLIER + 1, first, n0 + STORED, right)
    else:
        store_tile(to, row, there, n0, N, ROW, tile)


@gluon.jit
def describe_result(x, count, N: gl.constexpr, ROW: gl.constexpr, PARTS: gl.constexpr):
    """The descriptor of a part of the rows of a result ``(count, N)``, of ROW elements a row, and of those columns that
    are stored at once."""
    STORED: gl.constexpr = stored_at_once(PARTS)
    return tma.make_tensor_descriptor(x, [count, N], [ROW, 1], [PART, STORED], gl.NVMMASharedLayout(128, 16, 2))


@gluon.jit
def rows_of_part(tile, order, begin, end, weights, W: gl.constexpr):
    """The sorted rows of a tile from ``begin`` on, which are before the ``end``, and their assignments if needed."""
    row = begin + gl.arange(0, PART, gl.SliceLayout(1, tile.type.layout))
    assignment = row
    if W.SCATTER or weights is not None:
        assignment = gl.load(order + row, mask=row < end, other=0)
    return row, row < end, assignment


@gluon.jit
def times_weights(tile, weights, assignment, there):
    """The rows of a tile, times their weights if there are any."""
    if weights is None:
        return tile
    else:
        weight = gl.load(weights + assignment, mask=there, other=0.0)
        return tile * gl.convert_layout(weight, gl.SliceLayout(1, tile.type.layout))[:, None]


@gluon.jit
def halves_of(acc):
    """The products with the columns of each half of a weight, which alternate, 64 of each."""
    N: gl.constexpr = acc.shape[1] // 2
    left, right = gl.split(acc.reshape((PART, N // PART, 2, PART)).permute((0, 1, 3, 2)))
    return left.reshape((PART, N)), right.reshape((PART, N))


@gluon.jit
def store_part(
    acc, stores, results, which: gl.constexpr, order, begin, end, n_tile, numbers, W: gl.constexpr
):  # fmt: skip
    """Store the products of the part of a tile whose sorted rows begin at ``begin``, as `multiply` has them."""
    GLU: gl.constexpr = W.ACTIVATION != ""
    N: gl.constexpr = W.N
    COLUMNS: gl.constexpr = 2 * N
    ACTIVATION: gl.constexpr = W.ACTIVATION
    BLOCK_N: gl.constexpr = columns_of_tile(ACTIVATION)
    h, out, weights, of_h, of_up, of_out = stores
    scale, alpha, limit = numbers
    shared = None
    if W.BY_TMA:
        shared = results
    n0 = n_tile * BLOCK_N
    row, there, assignment = rows_of_part(acc, order, begin, end, weights, W)
    whole = begin + PART <= end
    first, is_range, at = begin, whole, row
    if W.SCATTER:  # within an expert, assignments ascend
        first = gl.load(order + begin)
        last = gl.load(order + begin + (PART - 1), mask=whole, other=0)
        is_range, at = whole & (last == first + (PART - 1)), assignment
    if GLU and not W.INTERLEAVED:
        left, right = halves_of(acc)
    else:
        left, right = gl.split(acc.reshape((PART, 2, HALF)).permute((0, 2, 1)))
    if GLU:
        if h is not None:
            n_h = n_tile * WIDTH if W.INTERLEAVED else n0
            END: gl.constexpr = COLUMNS if W.INTERLEAVED else N
            UP: gl.constexpr = HALF if W.INTERLEAVED else 0
            h_up = h if W.INTERLEAVED else h + N
            store_rows(h, of_h, shared, which, 0, begin, whole, row, there, n_h, END, COLUMNS, left)
            store_rows(h_up, of_up, shared, which, 1, begin, whole, row, there, n_h + UP, END, COLUMNS, right)
        gate, up = left, right
        if W.INTERLEAVED:
            gate, up = gl.split(acc.reshape((PART, BLOCK_N, 2)))
        y, _by_gate, _by_up = activate_tile(gate, up, alpha, limit, ACTIVATION, True)
        y = times_weights(y, weights, assignment, there)
        EARLIER: gl.constexpr = 0 if h is None else 2
        store_rows(out, of_out, shared, which, EARLIER, first, is_range, at, there, n0, N, N, y)
    else:
        if W.SCALED:
            left *= scale
            right *= scale
        left = times_weights(left, weights, assignment, there)
        right = times_weights(right, weights, assignment, there)
        store_rows(out, of_out, shared, which, 0, first, is_range, at, there, n0, N, N, left)
        store_rows(out, of_out, shared, which, 1, first, is_range, at, there, n0 + HALF, N, N, right)


@gluon.jit
def store_third(third, stores, which: gl.constexpr, order, begin, end, n_tile, numbers, W: gl.constexpr):
    """Store half of the columns of the products of the third part."""
    N: gl.constexpr = W.N
    ACTIVATION: gl.constexpr = W.ACTIVATION
    h, out, weights, _of_h, _of_up, _of_out = stores
    scale, alpha, limit = numbers
    row, there, assignment = rows_of_part(third, order, begin, end, weights, W)
    at = assignment if W.SCATTER else row
    if ACTIVATION != "":
        n0 = n_tile * HALF + which * PART
        if W.INTERLEAVED:
            gate, up = gl.split(third.reshape((PART, PART, 2)))
            if h is not None:
                left, right = gl.split(third.reshape((PART, 2, PART)).permute((0, 2, 1)))
                store_tile(h, row, there, 2 * n0, 2 * N, 2 * N, left)
                store_tile(h, row, there, 2 * n0 + PART, 2 * N, 2 * N, right)
        else:
            gate, up = halves_of(third)
            if h is not None:
                store_tile(h, row, there, n0, N, 2 * N, gate)
                store_tile(h + N, row, there, n0, N, 2 * N, up)
        y, _by_gate, _by_up = activate_tile(gate, up, alpha, limit, ACTIVATION, True)
        store_tile(out, at, there, n0, N, N, times_weights(y, weights, assignment, there))
    else:
        n0 = n_tile * WIDTH + which * HALF
        if W.SCALED:
            third *= scale
        store_tile(out, at, there, n0, N, N, times_weights(third, weights, assignment, there))
