"""Tiles of the grouped GEMMs of Hopper GPUs, and how their operands are loaded. Device functions, in Gluon."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, tma

from onepass.kernels.token_sort import tile_of_turn

# Of a tile: the rows of a part, how many parts there are at most, the columns and half of them, and the numbers of K
# that are multiplied at once.
PART, PARTS, WIDTH, HALF, STEP = (gl.constexpr(n) for n in (64, 3, 256, 128, 64))
find_tile = gluon.jit(tile_of_turn.fn)
ELEMENT = gl.constexpr(2)  # bytes
SUPPORTED = hasattr(tma, "make_tensor_descriptor") and hasattr(async_copy, "mbarrier_arrive")  # from Triton 3.6 on


@gluon.constexpr_function
def columns_of_tile(activation):
    """How many columns of the result a tile has: with an activation, half of those of the product."""
    return 128 if activation != "" else 256


@gluon.constexpr_function
def columns_of_box(halves):
    """How many columns of each half of a weight are loaded at once; without halves, those of a whole tile."""
    return 64 if halves == 2 else 256


@gluon.constexpr_function
def steps_at_once(steps, gathered):
    """How many steps are loaded in an iteration: more save the warps that gather rows instructions.

    Three of 45 steps were faster than five on an H200, which take more registers.
    """
    return next(n for n in (4, 3, 5, 2, 1) if steps % n == 0) if gathered else 1


@gluon.jit
def announce(to, tile, WARPS: gl.constexpr):
    """Write a tile, as `tile_of_turn` returns it, to shared memory."""
    n_tile, expert, begin, end = tile
    n = gl.arange(0, 4, gl.BlockedLayout([4], [32], [WARPS], [0]))
    to.store(gl.where(n == 0, n_tile, gl.where(n == 1, expert, gl.where(n == 2, begin, end))))


@gluon.jit
def announced(tile):
    """What `announce` wrote."""
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    n = gl.arange(0, 4, layout)
    values = tile.load(layout)
    return (
        gl.sum(gl.where(n == 0, values, 0), 0), gl.sum(gl.where(n == 1, values, 0), 0),
        gl.sum(gl.where(n == 2, values, 0), 0), gl.sum(gl.where(n == 3, values, 0), 0),
    )  # fmt: skip


@gluon.jit
def load_range(of_rows, ready, rows, stage, begin, end, k0, OTHERS: gl.constexpr):
    """Load those parts of a step's rows that begin before the ``end``. OTHERS: bytes that are loaded, too."""
    for n in gl.static_range(PARTS):
        is_last = begin + n * PART < end
        if n + 1 < PARTS:
            is_last = is_last & (begin + (n + 1) * PART >= end)
        mbarrier.expect(ready, OTHERS + (n + 1) * PART * STEP * ELEMENT, pred=is_last)
    for n in gl.static_range(PARTS):
        to = rows.index(stage * PARTS + n)
        tma.async_copy_global_to_shared(of_rows, [begin + n * PART, k0], ready, to, pred=begin + n * PART < end)


@gluon.jit
def gathered_rows(order, begin, end, part: gl.constexpr, of_rows: gl.constexpr, W: gl.constexpr):
    """The places in ``x`` of a part of the rows of a tile, and which of them are before the ``end``."""
    row = begin + part * PART + gl.arange(0, PART, gl.SliceLayout(1, of_rows))
    source = gl.load(order + row, mask=row < end, other=0) // W.SHARE
    if W.FAR:
        source = source.to(gl.int64)
    return source[:, None] * W.X_ROW + gl.arange(0, STEP, gl.SliceLayout(0, of_rows))[None, :], (row < end)[:, None]


@gluon.jit
def copy_part(x, places, to, first, beyond: gl.constexpr, of_rows: gl.constexpr, W: gl.constexpr):
    """Copy a part of the rows of a tile, which are at these places, from column ``first + beyond`` on."""
    place, mask = places
    if W.K % STEP != 0:
        k = gl.arange(0, STEP, gl.SliceLayout(0, of_rows))[None, :]
        mask = mask & (first + beyond + k < W.K)
    async_copy.async_copy_global_to_shared(to, x + first + beyond + place, mask=mask)


@gluon.jit
def copy_rows(
    x, places, rows, stage, first, beyond: gl.constexpr, has_third, of_rows: gl.constexpr, W: gl.constexpr
):  # fmt: skip
    """Copy the rows of a tile to a stage, from column ``first + beyond`` on."""
    for part in gl.static_range(2):
        copy_part(x, places[part], rows.index(stage * PARTS + part), first, beyond, of_rows, W)
    if has_third:
        copy_part(x, places[2], rows.index(stage * PARTS + 2), first, beyond, of_rows, W)


@gluon.jit
def load_columns(of_columns, ready, columns, stage, expert, n0, k0, BY: gl.constexpr, HALVES: gl.constexpr):
    """Load the columns of a step. Those of two halves of the weight alternate, 64 of each: so the left and the right
    half of the tile have as many of both."""
    if BY == "K":
        layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 4)
        for n in gl.static_range(HALVES):
            to = columns.index(stage * HALVES + n)
            to = to._reinterpret(columns.dtype, [1, HALVES, columns_of_box(HALVES), STEP], layout)
            tma.async_copy_global_to_shared(of_columns, [expert, 0, n0 + n * PART, k0], ready, to)
    else:
        to = columns.index(stage)._reinterpret(columns.dtype, [1, STEP, WIDTH], gl.NVMMASharedLayout(128, 16, 3))
        tma.async_copy_global_to_shared(of_columns, [expert, k0, n0], ready, to)


@gluon.jit
def loaded_columns(columns, BY: gl.constexpr, HALVES: gl.constexpr):
    """The memory of all stages' columns, divided into what is loaded at once."""
    if BY == "K":
        shape: gl.constexpr = [columns.shape[0] * HALVES, WIDTH // HALVES, STEP]
        return columns._reinterpret(columns.dtype, shape, gl.NVMMASharedLayout(128, 16, 2))
    else:
        return columns


@gluon.jit
def describe_rows(x, count, K: gl.constexpr, ROW: gl.constexpr):
    """The descriptor of a part of the rows of a tile of ``x`` ``(count, K)``."""
    return tma.make_tensor_descriptor(x, [count, K], [ROW, 1], [PART, STEP], gl.NVMMASharedLayout(128, 16, 2))


@gluon.jit
def describe_weight(
    w, E: gl.constexpr, COLUMNS: gl.constexpr, K: gl.constexpr, BY: gl.constexpr, E_STRIDE: gl.constexpr,
    STRIDE: gl.constexpr, HALVES: gl.constexpr,
):  # fmt: skip
    """The descriptor of the columns of a tile of a weight ``(E, COLUMNS, K)``: one range, or as many of each half."""
    if BY == "K":
        N: gl.constexpr = COLUMNS // HALVES
        return tma.make_tensor_descriptor(
            w, [E, HALVES, N, K], [E_STRIDE, N * STRIDE, STRIDE, 1], [1, HALVES, columns_of_box(HALVES), STEP],
            gl.NVMMASharedLayout(128, 16, 4),
        )  # fmt: skip
    else:
        return tma.make_tensor_descriptor(
            w, [E, K, COLUMNS], [E_STRIDE, STRIDE, 1], [1, STEP, WIDTH], gl.NVMMASharedLayout(128, 16, 3)
        )


@gluon.jit
def load(
    x, of_x, of_weight, of_low, of_lora, ring, columns, lora_columns, groups, W: gl.constexpr
):  # fmt: skip
    """Load what `multiply` multiplies, in its order, and announce each tile with the first step of it."""
    rows, tile_of_stage, full, empty = ring
    ACTIVATION: gl.constexpr = W.ACTIVATION
    HALVES: gl.constexpr = 2 if W.ACTIVATION != "" and not W.INTERLEAVED else 1
    BLOCK_N: gl.constexpr = columns_of_tile(ACTIVATION)
    N_TILES: gl.constexpr = (W.N + BLOCK_N - 1) // BLOCK_N
    STEPS: gl.constexpr = (W.K + STEP - 1) // STEP
    LORA_STEPS: gl.constexpr = (W.R + STEP - 1) // STEP
    GATHERED: gl.constexpr = W.SHARE > 0
    # Rows that other processes have sent are consecutive in most tiles, but not where those of two processes meet.
    MAY_BE_RANGE: gl.constexpr = W.SHARE == 1 and W.X_ROW > 0
    AT_ONCE: gl.constexpr = steps_at_once(STEPS, GATHERED)  # whose addresses differ by constants
    OF_COLUMNS: gl.constexpr = WIDTH * STEP * ELEMENT
    BY: gl.constexpr = W.BY
    LORA_BY: gl.constexpr = W.LORA_BY
    STAGES: gl.constexpr = W.STAGES
    of_rows: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    order, tile_list, tiles, shift = groups
    step = 0
    for turn in range(gl.cdiv(tiles * N_TILES, gl.num_programs(0))):
        tile = find_tile(turn, tile_list, tiles, shift, N_TILES, PART, PARTS)
        n_tile, expert, begin, end = tile
        mbarrier.wait(empty.index(step % STAGES), step // STAGES & 1 ^ 1)
        announce(tile_of_stage.index(step % STAGES), tile, 4 if GATHERED else 1)
        if begin < end:
            n0 = n_tile * (WIDTH // HALVES)
            has_third = begin + 2 * PART < end
            if GATHERED:
                places = (
                    gathered_rows(order, begin, end, 0, of_rows, W),
                    gathered_rows(order, begin, end, 1, of_rows, W),
                    gathered_rows(order, begin, end, 2, of_rows, W),
                )
            if MAY_BE_RANGE:
                count = end - begin
                row0 = gl.load(order + begin)
                is_range = gl.load(order + end - 1) - row0 == count - 1  # within an expert, assignments ascend
            if LORA_STEPS > 0:
                for k0 in range(0, LORA_STEPS * STEP, STEP):
                    stage = step % STAGES
                    mbarrier.wait(empty.index(stage), step // STAGES & 1 ^ 1)
                    ready = full.index(stage)
                    load_range(of_low, ready, rows, stage, begin, end, k0, OF_COLUMNS)
                    load_columns(of_lora, ready, lora_columns, stage, expert, n0, k0, LORA_BY, HALVES)
                    if GATHERED:
                        async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
                    step += 1
            for first in range(0, STEPS * STEP, AT_ONCE * STEP):
                for n in gl.static_range(AT_ONCE):
                    k0 = first + n * STEP
                    stage = step % STAGES
                    mbarrier.wait(empty.index(stage), step // STAGES & 1 ^ 1)
                    ready = full.index(stage)
                    if not GATHERED:
                        load_range(of_x, ready, rows, stage, begin, end, k0, OF_COLUMNS)
                    elif not MAY_BE_RANGE:
                        mbarrier.expect(ready, OF_COLUMNS)
                    elif is_range:
                        load_range(of_x, ready, rows, stage, row0, row0 + count, k0, OF_COLUMNS)
                    else:
                        mbarrier.expect(ready, OF_COLUMNS)
                    load_columns(of_weight, ready, columns, stage, expert, n0, k0, BY, HALVES)
                    if GATHERED:
                        if not MAY_BE_RANGE:  # noqa: SIM114  (known when the kernel is compiled)
                            copy_rows(x, places, rows, stage, first, n * STEP, has_third, of_rows, W)
                        elif not is_range:
                            copy_rows(x, places, rows, stage, first, n * STEP, has_third, of_rows, W)
                        async_copy.mbarrier_arrive(ready, increment_count=False)
                    step += 1
        else:
            mbarrier.expect(full.index(step % STAGES), 0)
            if GATHERED:
                async_copy.mbarrier_arrive(full.index(step % STAGES), increment_count=False)
            step += 1
