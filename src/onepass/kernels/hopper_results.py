"""How the grouped GEMM of Hopper GPUs stores the products of a tile. Device functions, in Gluon."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import tma

from onepass.kernels.expert_rows import activate
from onepass.kernels.hopper_tiles import PART, WIDTH, columns_of_tile

activate_tile = gluon.jit(activate.fn)
# The columns of a part that a descriptor stores at once, and how many of these there is room for in shared memory, for
# each group of warps.
STORED, BUFFERS = gl.constexpr(64), gl.constexpr(3)


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
def store_columns(
    to, descriptor, results, which: gl.constexpr, EARLIER: gl.constexpr, first, n0, columns
):  # fmt: skip
    """Copy STORED columns of a part to shared memory, which a descriptor stores while the warps go on.

    EARLIER: how many stores of the same part come before this one. This waits for those that read the same buffer, and
    for all of earlier parts and tiles.
    """
    PENDING: gl.constexpr = EARLIER if EARLIER < BUFFERS else BUFFERS - 1
    tma.store_wait(PENDING)
    shared = results.index(which * BUFFERS + EARLIER % BUFFERS)
    shared.store(columns.to(to.dtype.element_ty))
    hopper.fence_async_shared()
    tma.async_copy_shared_to_global(descriptor, [first, n0], shared)


@gluon.jit
def store_rows(
    to, descriptor, results, which: gl.constexpr, EARLIER: gl.constexpr, first, whole, row, there, n0,
    N: gl.constexpr, ROW: gl.constexpr, tile,
):  # fmt: skip
    """`store_tile`, or `store_columns` for a tile of ``whole`` consecutive rows, from the ``first`` on.

    ``results`` is None if no descriptor can store them. EARLIER: as in `store_columns`, but of calls of this function.
    """
    if results is None:
        store_tile(to, row, there, n0, N, ROW, tile)
    elif whole:
        if tile.shape[1] == STORED:
            store_columns(to, descriptor, results, which, EARLIER, first, n0, tile)
        else:
            left, right = gl.split(tile.reshape((PART, 2, STORED)).permute((0, 2, 1)))
            store_columns(to, descriptor, results, which, 2 * EARLIER, first, n0, left)
            store_columns(to, descriptor, results, which, 2 * EARLIER + 1, first, n0 + STORED, right)
    else:
        store_tile(to, row, there, n0, N, ROW, tile)


@gluon.jit
def describe_result(x, count, N: gl.constexpr, ROW: gl.constexpr):
    """The descriptor of a part of the rows of a result ``(count, N)``, of ROW elements a row, and of those columns that
    are stored at once. N and ROW need not be constants."""
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
    products, stores, results, which: gl.constexpr, FIRST: gl.constexpr, order, begin, end, n_tile, numbers,
    W: gl.constexpr,
):  # fmt: skip
    """Store the products of a part of the rows with the columns of a tile from FIRST on, as `multiply` has them.

    Its sorted rows begin at ``begin``.
    """
    N: gl.constexpr = W.N
    ACTIVATION: gl.constexpr = W.ACTIVATION
    COUNT: gl.constexpr = products.shape[1]
    h, out, weights, of_h, of_up, of_out = stores
    scale, alpha, limit = numbers
    shared = None
    if W.BY_TMA:
        shared = results
    row, there, assignment = rows_of_part(products, order, begin, end, weights, W)
    whole = begin + PART <= end
    first, is_range, at = begin, whole, row
    if W.SCATTER:  # within an expert, assignments ascend
        first = gl.load(order + begin)
        last = gl.load(order + begin + (PART - 1), mask=whole, other=0)
        is_range, at = whole & (last == first + (PART - 1)), assignment
    if ACTIVATION != "" and not W.INTERLEAVED:
        left, right = halves_of(products)
    else:
        left, right = gl.split(products.reshape((PART, 2, COUNT // 2)).permute((0, 2, 1)))
    if ACTIVATION != "":
        n0 = n_tile * columns_of_tile(ACTIVATION) + FIRST // 2
        if h is not None:
            n_h = 2 * n0 if W.INTERLEAVED else n0
            END: gl.constexpr = 2 * N if W.INTERLEAVED else N
            UP: gl.constexpr = COUNT // 2 if W.INTERLEAVED else 0
            h_up = h if W.INTERLEAVED else h + N
            store_rows(h, of_h, shared, which, 0, begin, whole, row, there, n_h, END, 2 * N, left)
            store_rows(h_up, of_up, shared, which, 1, begin, whole, row, there, n_h + UP, END, 2 * N, right)
        gate, up = left, right
        if W.INTERLEAVED:
            gate, up = gl.split(products.reshape((PART, COUNT // 2, 2)))
        y, _by_gate, _by_up = activate_tile(gate, up, alpha, limit, ACTIVATION, True)
        y = times_weights(y, weights, assignment, there)
        EARLIER: gl.constexpr = 0 if h is None else 2
        store_rows(out, of_out, shared, which, EARLIER, first, is_range, at, there, n0, N, N, y)
    else:
        n0 = n_tile * WIDTH + FIRST
        if W.SCALED:
            left *= scale
            right *= scale
        left = times_weights(left, weights, assignment, there)
        right = times_weights(right, weights, assignment, there)
        store_rows(out, of_out, shared, which, 0, first, is_range, at, there, n0, N, N, left)
        store_rows(out, of_out, shared, which, 1, first, is_range, at, there, n0 + COUNT // 2, N, N, right)
