"""Matrix products of rows that belong to experts: gathered on the way in, scattered on the way out.

A slot is one of the T * TOPK choices of an expert by a token. `order` has the slots sorted by expert, so that expert e
has the sorted rows ``offsets[e]`` to ``offsets[e + 1]``; slots of no expert lie outside of all. No row is padded: tiles
of BLOCK_M rows are counted out to the experts by `tile_kernel`, and a tile that is not full masks the rest.

Rows of an operand lie in the order of the slots, SHARE slots having one in common, or sorted (SHARE 0).
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["TILES"])
def tile_kernel(
    offsets, tile_expert, tile_row, TILES, E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Which expert a tile belongs to (E for none) and its first sorted row."""
    e = tl.arange(0, BLOCK_E)
    begin = tl.load(offsets + e, mask=e < E, other=0)
    tiles = tl.cdiv(tl.load(offsets + e + 1, mask=e < E, other=0) - begin, BLOCK_M)
    last = tl.cumsum(tiles, 0)  # of the tiles of expert e, plus 1
    tile = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mine = (tile[:, None] < last[None, :]) & (tile[:, None] >= (last - tiles)[None, :])
    expert = tl.sum(tl.where(mine, e[None, :], 0), 1) + tl.where(tl.sum(mine.to(tl.int32), 1) == 0, E, 0)
    row = tl.sum(tl.where(mine, (begin - (last - tiles) * BLOCK_M)[None, :], 0), 1) + tile * BLOCK_M
    tl.store(tile_expert + tile, expert, mask=tile < TILES)
    tl.store(tile_row + tile, row, mask=tile < TILES)


@triton.jit
def activate(gate, up, alpha, limit, ACTIVATION: tl.constexpr):
    """``(activated, its derivative by gate, by up)``, float32."""
    if ACTIVATION == "swiglu_clamped":
        inside = gate <= limit
        within = tl.abs(up) <= limit
        gate = tl.minimum(gate, limit)
        up = tl.clamp(up, -limit, limit) + 1.0
        s = tl.sigmoid(alpha * gate)
        f = gate * s
        slope = tl.where(inside, s + alpha * f * (1.0 - s), 0.0)
        return f * up, slope * up, tl.where(within, f, 0.0)
    elif ACTIVATION == "silu":
        s = tl.sigmoid(gate)
        f = gate * s
        slope = s + f * (1.0 - s)
    elif ACTIVATION == "gelu":
        phi = 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
        f = gate * phi
        slope = phi + gate * 0.3989422804014327 * tl.exp(-0.5 * gate * gate)
    else:
        inner = 0.7978845608028654 * gate * (1.0 + 0.044715 * gate * gate)
        s = tl.sigmoid(2.0 * inner)  # (1 + tanh(inner)) / 2
        f = gate * s
        slope = s + f * (1.0 - s) * 2.0 * 0.7978845608028654 * (1.0 + 3.0 * 0.044715 * gate * gate)
    return f * up, slope * up, f


@triton.jit
def load_columns(w, k, column, K: tl.constexpr, N, W_K: tl.constexpr, W_N: tl.constexpr, EVEN_K: tl.constexpr):
    """A tile of a weight, columns last."""
    mask = column[None, :] < N
    if not EVEN_K:
        mask = mask & (k[:, None] < K)
    return tl.load(w + k[:, None] * W_K + column[None, :] * W_N, mask=mask, other=0.0)


@triton.jit
def multiply_tile(
    expert, tile, n_tile, x, w, low, lora, bias, h, weights, out, weighted, parts, order, offsets, tile_row,
    slots, lora_scale, alpha, limit,
    N: tl.constexpr, K: tl.constexpr, R: tl.constexpr,
    EPILOGUE: tl.constexpr, ACTIVATION: tl.constexpr, INTERLEAVED: tl.constexpr,
    SHARE: tl.constexpr, SCATTER: tl.constexpr,
    X_ROW: tl.constexpr, W_E: tl.constexpr, W_N: tl.constexpr, W_K: tl.constexpr,
    L_E: tl.constexpr, L_N: tl.constexpr, L_R: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of `grouped_matmul_kernel`."""
    row = tl.load(tile_row + tile) + tl.arange(0, BLOCK_M)
    there = row < tl.load(offsets + expert + 1)
    slot = tl.load(order + row, mask=there, other=0)
    source = slot // SHARE if SHARE > 0 else row
    e = expert.to(tl.int64)
    at_row = row.to(tl.int64)
    two: tl.constexpr = EPILOGUE == "glu" and not INTERLEAVED
    WIDTH: tl.constexpr = 2 * BLOCK_N if EPILOGUE == "glu" and INTERLEAVED else BLOCK_N
    COLUMNS: tl.constexpr = 2 * N if EPILOGUE == "glu" else N
    EVEN_K: tl.constexpr = K % BLOCK_K == 0
    column = n_tile * WIDTH + tl.arange(0, WIDTH)  # of the first product
    edge = N if two else COLUMNS
    x_row = x + source.to(tl.int64)[:, None] * X_ROW
    w += e * W_E
    acc = tl.zeros((BLOCK_M, WIDTH), tl.float32)
    acc_up = tl.zeros((BLOCK_M, WIDTH), tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        k = start + tl.arange(0, BLOCK_K)
        mask = there[:, None] if EVEN_K else there[:, None] & (k[None, :] < K)
        a = tl.load(x_row + k[None, :], mask=mask, other=0.0)
        b = load_columns(w, k, column, K, edge, W_K, W_N, EVEN_K)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
        if two:
            b_up = load_columns(w + N * W_N, k, column, K, edge, W_K, W_N, EVEN_K)
            acc_up = tl.dot(a, b_up, acc_up, input_precision=PRECISION)
    if R > 0:
        r = tl.arange(0, BLOCK_R)
        a = tl.load(low + at_row[:, None] * R + r[None, :], mask=there[:, None] & (r[None, :] < R), other=0.0)
        lora += e * L_E
        b = load_columns(lora, r, column, R, edge, L_R, L_N, False)
        acc += lora_scale * tl.dot(a, b, input_precision=PRECISION)
        if two:
            b_up = load_columns(lora + N * L_N, r, column, R, edge, L_R, L_N, False)
            acc_up += lora_scale * tl.dot(a, b_up, input_precision=PRECISION)
    if bias is not None:
        bias += e * COLUMNS
        acc += tl.load(bias + column, mask=column < edge, other=0.0).to(tl.float32)[None, :]
        if two:
            acc_up += tl.load(bias + N + column, mask=column < edge, other=0.0).to(tl.float32)[None, :]

    n = n_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = there[:, None] & (n < N)[None, :]
    if EPILOGUE == "plain":
        to = slot.to(tl.int64) if SCATTER else at_row
        tl.store(out + to[:, None] * N + n[None, :], acc.to(out.dtype.element_ty), mask=mask)
    elif EPILOGUE == "glu":
        if h is not None:
            at = h + at_row[:, None] * (2 * N) + column[None, :]
            wide = there[:, None] & (column < edge)[None, :]
            tl.store(at, acc.to(h.dtype.element_ty), mask=wide)
            if two:
                tl.store(at + N, acc_up.to(h.dtype.element_ty), mask=wide)
        if two:
            gate, up = acc, acc_up
        else:
            gate, up = tl.split(tl.reshape(acc, (BLOCK_M, BLOCK_N, 2)))
        activated, _, _ = activate(gate, up, alpha, limit, ACTIVATION)
        tl.store(out + at_row[:, None] * N + n[None, :], activated.to(out.dtype.element_ty), mask=mask)
    else:
        at = at_row[:, None] * (2 * N)
        if INTERLEAVED:
            both = n_tile * (2 * BLOCK_N) + tl.arange(0, 2 * BLOCK_N)
            wide = there[:, None] & (both < 2 * N)[None, :]
            at += both[None, :]
            pair = tl.load(h + at, mask=wide, other=0.0).to(tl.float32)
            gate, up = tl.split(tl.reshape(pair, (BLOCK_M, BLOCK_N, 2)))
        else:
            at += n[None, :]
            gate = tl.load(h + at, mask=mask, other=0.0).to(tl.float32)
            up = tl.load(h + at + N, mask=mask, other=0.0).to(tl.float32)
        activated, by_gate, by_up = activate(gate, up, alpha, limit, ACTIVATION)
        weight = tl.load(weights + slot, mask=there, other=0.0)
        part = tl.sum(tl.where(mask, acc * activated, 0.0), 1)
        tl.store(parts + n_tile.to(tl.int64) * slots + slot, part, mask=there)
        gradient = acc * weight[:, None]
        by_gate = (gradient * by_gate).to(out.dtype.element_ty)
        by_up = (gradient * by_up).to(out.dtype.element_ty)
        if INTERLEAVED:
            tl.store(out + at, tl.reshape(tl.join(by_gate, by_up), (BLOCK_M, 2 * BLOCK_N)), mask=wide)
        else:
            tl.store(out + at, by_gate, mask=mask)
            tl.store(out + at + N, by_up, mask=mask)
        if weighted is not None:
            activated = (activated * weight[:, None]).to(weighted.dtype.element_ty)
            tl.store(weighted + at_row[:, None] * N + n[None, :], activated, mask=mask)


@triton.jit(do_not_specialize=["slots", "tiles"])
def grouped_matmul_kernel(
    x, w, low, lora, bias, h, weights, out, weighted, parts, order, offsets, tile_expert, tile_row,
    slots, tiles, lora_scale, alpha, limit,
    E: tl.constexpr, N: tl.constexpr, K: tl.constexpr, R: tl.constexpr,
    EPILOGUE: tl.constexpr, ACTIVATION: tl.constexpr, INTERLEAVED: tl.constexpr,
    SHARE: tl.constexpr, SCATTER: tl.constexpr,
    X_ROW: tl.constexpr, W_E: tl.constexpr, W_N: tl.constexpr, W_K: tl.constexpr,
    L_E: tl.constexpr, L_N: tl.constexpr, L_R: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """``y = x @ w[e]ᵀ + scale · low @ lora[e]ᵀ + bias[e]`` for the rows of every expert e, and then by EPILOGUE:

    "plain": ``out = y``.
    "glu": the columns of y are gate and up, N of each: ``h = y`` where it is wanted, ``out = activate(gate, up)``.
    "glu_gradient": y, of N columns, is the gradient of the activated without the routing weight. From ``h``: ``out`` is
    the gradient of h, ``weighted`` the activated times the routing weight, and ``parts`` the products of y and the
    activated, summed over the columns of a tile: parts of the weight's gradient.
    """
    N_TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    for work in tl.range(tl.program_id(0), tiles * N_TILES, tl.num_programs(0)):
        # GROUP tiles of rows meet the same columns of the weights at about the same time, which stay in the cache.
        first = work // (GROUP * N_TILES) * GROUP
        height = tl.minimum(tiles - first, GROUP)
        tile = first + work % (GROUP * N_TILES) % height
        n_tile = work % (GROUP * N_TILES) // height
        expert = tl.load(tile_expert + tile)
        if expert < E:
            multiply_tile(
                expert, tile, n_tile, x, w, low, lora, bias, h, weights, out, weighted, parts, order, offsets, tile_row,
                slots, lora_scale, alpha, limit, N, K, R, EPILOGUE, ACTIVATION, INTERLEAVED, SHARE, SCATTER,
                X_ROW, W_E, W_N, W_K, L_E, L_N, L_R, BLOCK_M, BLOCK_N, BLOCK_K, BLOCK_R, STAGES, PRECISION,
            )  # fmt: skip


@triton.jit
def grouped_outer_kernel(
    a, b, out, order, offsets, scale,
    E: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    SHARE_A: tl.constexpr, SHARE_B: tl.constexpr, A_ROW: tl.constexpr, B_ROW: tl.constexpr,
    O_E: tl.constexpr, O_N: tl.constexpr, O_K: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """``out[e] = scale · aᵀ @ b`` over the rows of expert e: the gradient of a weight. Zeros for one without rows."""
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
    tl.store(at, (acc * scale).to(out.dtype.element_ty), mask=(n < N)[:, None] & (k < K)[None, :])


@triton.jit
def grouped_sum_kernel(
    a, weights, out, order, offsets, N: tl.constexpr, SHARE: tl.constexpr, A_ROW: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """``out[e]``: the sum of the rows of expert e, each times the weight of its slot: the gradient of a bias."""
    TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    expert = tl.program_id(0) // TILES
    n = tl.program_id(0) % TILES * BLOCK_N + tl.arange(0, BLOCK_N)
    end = tl.load(offsets + expert + 1)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in tl.range(tl.load(offsets + expert), end, BLOCK_M):
        row = start + tl.arange(0, BLOCK_M)
        there = row < end
        slot = tl.load(order + row, mask=there, other=0)
        source = (slot // SHARE if SHARE > 0 else row).to(tl.int64)
        mask = there[:, None] & (n < N)[None, :]
        part = tl.load(a + source[:, None] * A_ROW + n[None, :], mask=mask, other=0.0).to(tl.float32)
        if weights is not None:
            part *= tl.load(weights + slot, mask=there, other=0.0)[:, None]
        acc += part
    tl.store(out + expert.to(tl.int64) * N + n, tl.sum(acc, 0).to(out.dtype.element_ty), mask=n < N)


@triton.jit(do_not_specialize=["T"])
def combine_kernel(
    y, weights, experts, out, T, E: tl.constexpr, N: tl.constexpr, TOPK: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """``out[t]``: the sum over the slots of a token, times their weights where there are some."""
    TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    t = (tl.program_id(0) // TILES).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    n = tl.program_id(0) % TILES * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (t < T)[:, None] & (n < N)[None, :]
    acc = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    for k in tl.static_range(TOPK):
        slot = t * TOPK + k
        expert = tl.load(experts + slot, mask=t < T, other=-1)
        valid = (expert >= 0) & (expert < E)
        part = tl.load(y + slot[:, None] * N + n[None, :], mask=mask & valid[:, None], other=0.0).to(tl.float32)
        if weights is not None:
            part *= tl.load(weights + slot, mask=(t < T) & valid, other=0.0)[:, None]
        acc += part
    tl.store(out + t[:, None] * N + n[None, :], acc.to(out.dtype.element_ty), mask=mask)
