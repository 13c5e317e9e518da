"""How the grouped GEMM of Hopper GPUs stores the products of a tile. Device functions, in Gluon."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import tma

from onepass.kernels.expert_rows import activate
from onepass.kernels.hopper_tiles import PART, STORED, WIDTH, columns_of_tile

activate_tile = gluon.jit(activate.fn)


@gluon.constexpr_function
def buffers_of(parts):
    """How many results of a group of warps there is room for in shared memory."""
    return 2 if parts == 2 else 1


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
def describe_result(x, count, N: gl.constexpr, ROW: gl.constexpr):
    """The descriptor of STORED columns of a part of the rows of a result ``(count, N)``, of ROW elements a row."""
    return tma.make_tensor_descriptor(x, [count, N], [ROW, 1], [PART, STORED], gl.NVMMASharedLayout(128, 16, 2))


@gluon.jit
def times_weights(tile, weights, assignment, there):
    """The rows of a tile, times their weights if there are any."""
    if weights is None:
        return tile
    else:
        weight = gl.load(weights + assignment, mask=there, other=0.0)
        return tile * gl.convert_layout(weight, gl.SliceLayout(1, tile.type.layout))[:, None]


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
    BUFFERS: gl.constexpr = buffers_of(W.PARTS)
    h, out, weights, of_h, of_up, of_out = stores
    scale, alpha, limit = numbers
    buffer = None
    second = None
    if W.BY_TMA:
        buffer = results.index(which * BUFFERS)
        second = results.index(which * BUFFERS + BUFFERS - 1)
    n0 = n_tile * BLOCK_N
    row = begin + gl.arange(0, PART, gl.SliceLayout(1, acc.type.layout))
    there = row < end
    whole = begin + PART <= end
    assignment = row
    if W.SCATTER or weights is not None:
        assignment = gl.load(order + row, mask=there, other=0)
    first, is_range, at = begin, whole, row
    if W.SCATTER:  # within an expert, assignments ascend
        first = gl.load(order + begin)
        last = gl.load(order + begin + (PART - 1), mask=whole, other=0)
        is_range, at = whole & (last == first + (PART - 1)), assignment
    OTHERS: gl.constexpr = BUFFERS - 1  # of the stores before, these last ones may go on: they read the other buffer
    left, right = gl.split(acc.reshape((PART, 2, STORED)).permute((0, 2, 1)))
    if GLU:
        if h is not None:
            n_h = n_tile * WIDTH if W.INTERLEAVED else n0
            END: gl.constexpr = COLUMNS if W.INTERLEAVED else N
            UP: gl.constexpr = STORED if W.INTERLEAVED else 0
            h_up = h if W.INTERLEAVED else h + N
            store_rows(h, of_h, buffer, begin, whole, row, there, n_h, END, COLUMNS, 0, left)
            store_rows(h_up, of_up, second, begin, whole, row, there, n_h + UP, END, COLUMNS, OTHERS, right)
        gate, up = left, right
        if W.INTERLEAVED:
            gate, up = gl.split(acc.reshape((PART, BLOCK_N, 2)))
        y, _by_gate, _by_up = activate_tile(gate, up, alpha, limit, ACTIVATION)
        y = times_weights(y, weights, assignment, there)
        PENDING: gl.constexpr = OTHERS if h is not None else 0
        store_rows(out, of_out, buffer, first, is_range, at, there, n0, N, N, PENDING, y)
    else:
        left = times_weights(left * scale, weights, assignment, there)
        right = times_weights(right * scale, weights, assignment, there)
        store_rows(out, of_out, buffer, first, is_range, at, there, n0, N, N, OTHERS, left)
        store_rows(out, of_out, second, first, is_range, at, there, n0 + STORED, N, N, OTHERS, right)


@gluon.jit
def store_third(left, right, stores, order, begin, end, n0, numbers, W: gl.constexpr):
    """Store 64 columns of the left and of the right half of the products of the third part, from column ``n0`` on."""
    N: gl.constexpr = W.N
    ACTIVATION: gl.constexpr = W.ACTIVATION
    h, out, weights, _of_h, _of_up, _of_out = stores
    scale, alpha, limit = numbers
    row = begin + gl.arange(0, PART, gl.SliceLayout(1, left.type.layout))
    there = row < end
    assignment = row
    if W.SCATTER or weights is not None:
        assignment = gl.load(order + row, mask=there, other=0)
    at = assignment if W.SCATTER else row
    if ACTIVATION != "":
        if h is not None:
            store_tile(h, row, there, n0, N, 2 * N, left)
            store_tile(h + N, row, there, n0, N, 2 * N, right)
        y, _by_gate, _by_up = activate_tile(left, right, alpha, limit, ACTIVATION)
        store_tile(out, at, there, n0, N, N, times_weights(y, weights, assignment, there))
    else:
        store_tile(out, at, there, n0, N, N, times_weights(left * scale, weights, assignment, there))
        store_tile(out, at, there, n0 + STORED, N, N, times_weights(right * scale, weights, assignment, there))
