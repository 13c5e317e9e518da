"""Matrix products of rows that belong to experts: gathered on the way in, scattered on the way out.

The rows are those that `grouping` sorted. Rows of an operand lie in the order of the slots, SHARE slots having one in
common, or sorted (SHARE 0).
"""

import triton
import triton.language as tl

from onepass.kernels.grouped_rows import activate
from onepass.kernels.launch import Flat, Out, Rows, Strided


@triton.jit
def load_weight(
    w, descriptor, e, k0, n0, column, inside, K: tl.constexpr,
    W_E: tl.constexpr, W_N: tl.constexpr, W_K: tl.constexpr, BLOCK_K: tl.constexpr, WIDTH: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """``w[e, column, k0 : k0 + BLOCK_K]``, transposed; zeros beyond K."""
    if TMA == "K":
        return tl.reshape(descriptor.load([e, 0, n0, k0]), (WIDTH, BLOCK_K)).T
    elif TMA == "N":
        return tl.reshape(descriptor.load([e, k0, n0]), (BLOCK_K, WIDTH))
    else:
        k = k0 + tl.arange(0, BLOCK_K)
        mask = inside[None, :]
        if K % BLOCK_K != 0:
            mask = mask & (k[:, None] < K)
        return tl.load(w + e.to(tl.int64) * W_E + k[:, None] * W_K + column[None, :] * W_N, mask=mask, other=0.0)


@triton.jit(do_not_specialize=["tiles", "group"])
def grouped_matmul_kernel(
    x: "Rows", w: "Strided", low: "Flat", lora: "Strided", bias: "Flat", h: "Out", out: "Out", order: "Flat",
    offsets: "Flat",
    tile_expert: "Flat", tile_row: "Flat",
    tiles: tl.int32, group: tl.int32, scale: tl.float32, alpha: tl.float32, limit: tl.float32,
    E: tl.constexpr, N: tl.constexpr, K: tl.constexpr, R: tl.constexpr, ACTIVATION: tl.constexpr,
    INTERLEAVED: tl.constexpr, SHARE: tl.constexpr, SCATTER: tl.constexpr, X_ROW: tl.constexpr, W_E: tl.constexpr,
    W_N: tl.constexpr, W_K: tl.constexpr, L_E: tl.constexpr, L_N: tl.constexpr, L_R: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """``y = x @ w[e]ᵀ + low @ lora[e]ᵀ + bias[e]`` for the rows of every expert e, and ``out = scale · y``.

    With an ACTIVATION the columns of y are gate and up, N of each, and ``out = activate(gate, up)``; ``h = y`` where it
    is wanted. Programs take tiles in turns: while one stores, it loads for its next. TMA names the dimension in which
    ``w`` is contiguous, if it can be read by tensor-memory loads.
    """
    N_TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    COLUMNS: tl.constexpr = N if ACTIVATION == "" else 2 * N
    WIDTH: tl.constexpr = BLOCK_N if ACTIVATION == "" else 2 * BLOCK_N
    HALVES: tl.constexpr = 1 if ACTIVATION == "" or INTERLEAVED else 2
    PART: tl.constexpr = WIDTH // HALVES
    if TMA == "K":
        descriptor = tl.make_tensor_descriptor(
            w, [E, HALVES, COLUMNS // HALVES, K], [W_E, COLUMNS // HALVES * W_N, W_N, 1], [1, HALVES, PART, BLOCK_K]
        )
    elif TMA == "N":
        descriptor = tl.make_tensor_descriptor(w, [E, K, COLUMNS], [W_E, W_K, 1], [1, BLOCK_K, WIDTH])
    else:
        descriptor = w
    for work in tl.range(tl.program_id(0), tiles * N_TILES, tl.num_programs(0), flatten=True):
        # A group of tiles meets the same columns of the weights at about the same time, which stay in the cache.
        begin = work // (group * N_TILES) * group
        height = tl.minimum(tiles - begin, group)
        tile = begin + work % (group * N_TILES) % height
        n_tile = work % (group * N_TILES) // height
        expert = tl.load(tile_expert + tile)
        if expert < E:
            row = tl.load(tile_row + tile) + tl.arange(0, BLOCK_M)
            there = row < tl.load(offsets + expert + 1)
            slot = tl.load(order + row, mask=there, other=0)
            source = (slot // SHARE if SHARE > 0 else row).to(tl.int64)
            at_row = row.to(tl.int64)[:, None]
            # Gate and up of the same columns of the result: from two places, or one column in turns.
            n0 = n_tile * PART
            column = n0 + tl.arange(0, WIDTH) % PART
            inside = column < COLUMNS // HALVES
            column += tl.arange(0, WIDTH) // PART * (COLUMNS // HALVES)
            acc = tl.zeros((BLOCK_M, WIDTH), tl.float32)
            if bias is not None:
                of_columns = tl.load(bias + expert.to(tl.int64) * COLUMNS + column, mask=inside, other=0.0)
                acc += of_columns[None, :].to(tl.float32)
            if R > 0:
                r = tl.arange(0, BLOCK_R)[None, :]
                adapted = tl.load(low + at_row * R + r, mask=there[:, None] & (r < R), other=0.0)
                adapter = load_weight(lora, lora, expert, 0, n0, column, inside, R, L_E, L_N, L_R, BLOCK_R, WIDTH, "")
                acc = tl.dot(adapted, adapter, acc, input_precision=PRECISION)
            for k0 in tl.range(0, K, BLOCK_K, num_stages=STAGES):
                k = (k0 + tl.arange(0, BLOCK_K))[None, :]
                mask = there[:, None] if K % BLOCK_K == 0 else there[:, None] & (k < K)
                a = tl.load(x + source[:, None] * X_ROW + k, mask=mask, other=0.0)
                b = load_weight(w, descriptor, expert, k0, n0, column, inside, K, W_E, W_N, W_K, BLOCK_K, WIDTH, TMA)
                acc = tl.dot(a, b, acc, input_precision=PRECISION)

            if ACTIVATION == "":
                y = scale * acc
            else:
                if h is not None:
                    at = h + at_row * COLUMNS + column[None, :]
                    tl.store(at, acc.to(h.dtype.element_ty), mask=there[:, None] & inside[None, :])
                if HALVES == 2:
                    gate, up = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, BLOCK_N)), (0, 2, 1)))
                else:
                    gate, up = tl.split(tl.reshape(acc, (BLOCK_M, BLOCK_N, 2)))
                y, _, _ = activate(gate, up, alpha, limit, ACTIVATION)
            n = (n_tile * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
            to = slot.to(tl.int64)[:, None] if SCATTER else at_row
            tl.store(out + to * N + n, y.to(out.dtype.element_ty), mask=there[:, None] & (n < N))


@triton.jit
def grouped_outer_kernel(
    a: "Rows", b: "Rows", out: "Strided", order: "Flat", offsets: "Flat",
    E: tl.constexpr, N: tl.constexpr, K: tl.constexpr, SHARE_A: tl.constexpr, SHARE_B: tl.constexpr,
    A_ROW: tl.constexpr, B_ROW: tl.constexpr, O_E: tl.constexpr, O_N: tl.constexpr, O_K: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """``out[e] = aᵀ @ b`` over the rows of expert e: the gradient of a weight. Zeros for one without rows."""
    K_TILES: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    TILES: tl.constexpr = K_TILES * ((N + BLOCK_N - 1) // BLOCK_N)
    expert = tl.program_id(0) // TILES
    tile = tl.program_id(0) % TILES
    n = tile // K_TILES * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tile % K_TILES * BLOCK_K + tl.arange(0, BLOCK_K)
    begin = tl.load(offsets + expert)
    end = tl.load(offsets + expert + 1)
    acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for start in tl.range(begin, end, BLOCK_M, num_stages=STAGES):
        row = start + tl.arange(0, BLOCK_M)
        there = row < end
        slot = row
        if SHARE_A > 0 or SHARE_B > 0:
            slot = tl.load(order + row, mask=there, other=0)
        a_row = (slot // SHARE_A if SHARE_A > 0 else row).to(tl.int64) * A_ROW
        b_row = (slot // SHARE_B if SHARE_B > 0 else row).to(tl.int64) * B_ROW
        left = tl.load(a + a_row[None, :] + n[:, None], mask=there[None, :] & (n < N)[:, None], other=0.0)
        right = tl.load(b + b_row[:, None] + k[None, :], mask=there[:, None] & (k < K)[None, :], other=0.0)
        acc = tl.dot(left, right, acc, input_precision=PRECISION)
    at = out + expert.to(tl.int64) * O_E + n[:, None] * O_N + k[None, :] * O_K
    tl.store(at, acc.to(out.dtype.element_ty), mask=(n < N)[:, None] & (k < K)[None, :])
