"""The grouped GEMM of `grouped_gemm` on Hopper GPUs.

The warps of a program have different roles. One warp, or four that also gather rows, load the operands of each step of
K into a ring of stages in shared memory. Two groups of four warps multiply them, each for half of the rows of a tile,
and store the result; while they store, the operands of the next tile are loaded. A group that has no rows of a tile
multiplies nothing, so that the rows of an expert are padded to 64 instead of 128.

The kernel is written in Gluon, since Triton assigns all warps the same role. Triton's interpreter does not run Gluon.
`grouped_gemm_kernel` computes the same products, and those that this kernel does not support.

Bytes moved: as in `grouped_gemm`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, tma

from onepass.core.memo import memo
from onepass.core.moe_options import Product
from onepass.kernels import layout
from onepass.kernels.expert_rows import activate
from onepass.kernels.hopper_tiles import (
    ELEMENT,
    HALF,
    ROWS,
    STEP,
    SUPPORTED,
    WIDTH,
    describe_result,
    describe_rows,
    describe_weight,
    load_columns,
    load_range,
    store_rows,
)
from onepass.kernels.launch import Flat, Out, Plan, Rows, Strided
from onepass.kernels.layout import power_of_two
from onepass.kernels.row_gemm import place_of
from onepass.kernels.token_sort import rows_of_tile

Read = tuple[str, int, int]  # of a weight (E, N, K): its contiguous dimension, "K" or "N", and the two other strides


class Work(NamedTuple):
    """The constants of the kernel, named as in `grouped_gemm_kernel`; BY, E_STRIDE and STRIDE are a `Read`."""

    E: int
    N: int
    K: int
    R: int
    ACTIVATION: str
    INTERLEAVED: bool
    SHARE: int
    SCATTER: bool
    X_ROW: int
    BY: str
    E_STRIDE: int
    STRIDE: int
    LORA_BY: str
    LORA_E_STRIDE: int
    LORA_STRIDE: int
    STAGES: int
    BY_TMA: bool  # whether descriptors store results


place_of_work, activate_tile = gluon.jit(place_of.fn), gluon.jit(activate.fn)


@gluon.constexpr_function
def columns_of_tile(activation):
    """How many columns of the result a tile has: with an activation, half of those of the product."""
    return 128 if activation != "" else 256


@gluon.jit
def accumulate(
    acc, step, rows, columns, full, empty, which: gl.constexpr, STEPS: gl.constexpr, BY: gl.constexpr,
    STAGES: gl.constexpr, GATHERED: gl.constexpr,
):  # fmt: skip
    """Add the products of STEPS steps, and give their stages back."""
    for _k in range(STEPS):
        stage = step % STAGES
        mbarrier.wait(full.index(stage), step // STAGES & 1)
        if GATHERED:  # the tensor cores read through another proxy than the copies of rows write through
            hopper.fence_async_shared()
        a = rows.index(stage).slice(which * HALF, HALF)
        b = columns.index(stage)
        if BY == "K":
            b = b.permute((1, 0))
        acc = hopper.warpgroup_mma(a, b, acc)
        mbarrier.arrive(empty.index(stage), count=1)
        step += 1
    return acc, step


@gluon.jit
def multiply(
    which: gl.constexpr, rows, columns, lora_columns, full, empty, bias, weights, h, out, stores, results, groups,
    tiles, group, scale, alpha, limit, W: gl.constexpr,
):  # fmt: skip
    """Compute and store the first (0) or the second (1) half of the rows of each tile."""
    ACTIVATION: gl.constexpr = W.ACTIVATION
    GLU: gl.constexpr = W.ACTIVATION != ""
    N: gl.constexpr = W.N
    COLUMNS: gl.constexpr = 2 * W.N if GLU else W.N
    BLOCK_N: gl.constexpr = columns_of_tile(ACTIVATION)
    N_TILES: gl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    STEPS: gl.constexpr = (W.K + STEP - 1) // STEP
    LORA_STEPS: gl.constexpr = (W.R + STEP - 1) // STEP
    BY: gl.constexpr = W.BY
    LORA_BY: gl.constexpr = W.LORA_BY
    STAGES: gl.constexpr = W.STAGES
    of_acc: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    order, offsets, tile_expert, tile_row = groups
    of_h, of_up, of_out = stores
    shared = None  # memory for what is stored, and its two halves
    first_half = None
    second_half = None
    if W.BY_TMA:
        shared = results.index(which)
        halves = shared._reinterpret(shared.dtype, [2, HALF, WIDTH // 2], gl.NVMMASharedLayout(128, 16, 2))
        first_half = halves.index(0)
        second_half = halves.index(1)
    step = 0
    for work in range(gl.program_id(0), tiles * N_TILES, gl.num_programs(0)):
        tile, n_tile = place_of_work(work, tiles, N_TILES, group)
        expert = gl.load(tile_expert + tile)
        if expert < W.E:
            begin = gl.load(tile_row + tile) + which * HALF
            end = gl.load(offsets + expert + 1)
            if begin < end:
                n0 = n_tile * BLOCK_N
                if W.SCATTER or weights is not None:
                    sorted_row = begin + gl.arange(0, HALF, gl.SliceLayout(1, of_acc))
                    assignment = gl.load(order + sorted_row, mask=sorted_row < end, other=0)
                acc = gl.zeros((HALF, WIDTH), gl.float32, of_acc)
                if bias is not None:
                    n = gl.arange(0, WIDTH, gl.SliceLayout(0, of_acc))
                    if GLU and not W.INTERLEAVED:
                        inside = n0 + n % BLOCK_N < N
                        n = n // BLOCK_N * N + n0 + n % BLOCK_N
                    else:
                        n += n_tile * WIDTH
                        inside = n < COLUMNS
                    of_columns = gl.load(bias + expert.to(gl.int64) * COLUMNS + n, mask=inside, other=0.0)
                    acc += of_columns.to(gl.float32)[None, :]
                if LORA_STEPS > 0:
                    acc, step = accumulate(
                        acc, step, rows, lora_columns, full, empty, which, LORA_STEPS, LORA_BY, STAGES, False
                    )
                acc, step = accumulate(
                    acc, step, rows, columns, full, empty, which, STEPS, BY, STAGES, W.SHARE > 0
                )  # fmt: skip
                row = begin + gl.arange(0, HALF, gl.SliceLayout(1, of_acc))
                there = row < end
                whole = begin + HALF <= end
                of_result = first_half if GLU else shared
                PENDING: gl.constexpr = 1 if GLU and h is not None and not W.INTERLEAVED else 0
                if GLU:
                    if W.INTERLEAVED:
                        if h is not None:
                            store_rows(
                                h, of_h, shared, begin, whole, row, there, n_tile * WIDTH, COLUMNS, COLUMNS, 0, acc
                            )  # fmt: skip
                        gate, up = gl.split(acc.reshape((HALF, BLOCK_N, 2)))
                    else:
                        gate, up = gl.split(acc.reshape((HALF, 2, BLOCK_N)).permute((0, 2, 1)))
                        if h is not None:
                            store_rows(h, of_h, first_half, begin, whole, row, there, n0, N, COLUMNS, 0, gate)
                            store_rows(h + N, of_up, second_half, begin, whole, row, there, n0, N, COLUMNS, 1, up)
                    y, _by_gate, _by_up = activate_tile(gate, up, alpha, limit, ACTIVATION)
                else:
                    y = acc * scale
                if weights is not None:
                    weight = gl.load(weights + assignment, mask=there, other=0.0)
                    y *= gl.convert_layout(weight, gl.SliceLayout(1, y.type.layout))[:, None]
                first = begin
                if W.SCATTER:  # within an expert, assignments ascend
                    first = gl.load(order + begin)
                    whole = whole & (gl.load(order + begin + (HALF - 1), mask=whole, other=0) == first + (HALF - 1))
                    row = assignment
                store_rows(out, of_out, of_result, first, whole, row, there, n0, N, N, PENDING, y)
            else:
                for _k in range(LORA_STEPS + STEPS):
                    mbarrier.wait(full.index(step % STAGES), step // STAGES & 1)
                    mbarrier.arrive(empty.index(step % STAGES), count=1)
                    step += 1
    if W.BY_TMA:
        tma.store_wait(0)


@gluon.jit
def load(
    x, of_x, of_weight, of_low, of_lora, rows, columns, lora_columns, full, empty, groups, tiles, group,
    W: gl.constexpr,
):  # fmt: skip
    """Load what `multiply` multiplies, in its order."""
    ACTIVATION: gl.constexpr = W.ACTIVATION
    HALVES: gl.constexpr = 2 if W.ACTIVATION != "" and not W.INTERLEAVED else 1
    BLOCK_N: gl.constexpr = columns_of_tile(ACTIVATION)
    N_TILES: gl.constexpr = (W.N + BLOCK_N - 1) // BLOCK_N
    STEPS: gl.constexpr = (W.K + STEP - 1) // STEP
    LORA_STEPS: gl.constexpr = (W.R + STEP - 1) // STEP
    GATHERED: gl.constexpr = W.SHARE > 0
    # Rows that other processes have sent are consecutive in most tiles, but not where those of two processes meet.
    MAY_BE_RANGE: gl.constexpr = W.SHARE == 1 and W.X_ROW > 0
    AT_ONCE: gl.constexpr = 4 if GATHERED and STEPS % 4 == 0 else 1  # whose addresses differ by constants
    OF_COLUMNS: gl.constexpr = WIDTH * STEP * ELEMENT
    BY: gl.constexpr = W.BY
    LORA_BY: gl.constexpr = W.LORA_BY
    STAGES: gl.constexpr = W.STAGES
    of_rows: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    order, offsets, tile_expert, tile_row = groups
    step = 0
    for work in range(gl.program_id(0), tiles * N_TILES, gl.num_programs(0)):
        tile, n_tile = place_of_work(work, tiles, N_TILES, group)
        expert = gl.load(tile_expert + tile)
        if expert < W.E:
            begin = gl.load(tile_row + tile)
            end = gl.load(offsets + expert + 1)
            n0 = n_tile * (WIDTH // HALVES)
            at = x
            if GATHERED:
                row = begin + gl.arange(0, ROWS, gl.SliceLayout(1, of_rows))
                there = (row < end)[:, None]
                k = gl.arange(0, STEP, gl.SliceLayout(0, of_rows))[None, :]
                source = gl.load(order + row, mask=row < end, other=0) // W.SHARE
                at = x + source.to(gl.int64)[:, None] * W.X_ROW + k
            if MAY_BE_RANGE:
                row0 = gl.load(order + begin)
                last = gl.load(order + begin + (ROWS - 1), mask=begin + ROWS <= end, other=-1)
                is_range = last - row0 == ROWS - 1  # within an expert, assignments ascend
            if LORA_STEPS > 0:
                for k0 in range(0, LORA_STEPS * STEP, STEP):
                    stage = step % STAGES
                    mbarrier.wait(empty.index(stage), step // STAGES & 1 ^ 1)
                    ready = full.index(stage)
                    load_range(of_low, ready, rows.index(stage), begin, end, k0, OF_COLUMNS)
                    load_columns(of_lora, ready, lora_columns.index(stage), expert, n0, k0, LORA_BY, HALVES)
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
                        load_range(of_x, ready, rows.index(stage), begin, end, k0, OF_COLUMNS)
                    elif not MAY_BE_RANGE:
                        mbarrier.expect(ready, OF_COLUMNS)
                    elif is_range:
                        load_range(of_x, ready, rows.index(stage), row0, row0 + ROWS, k0, OF_COLUMNS)
                    else:
                        mbarrier.expect(ready, OF_COLUMNS)
                    load_columns(of_weight, ready, columns.index(stage), expert, n0, k0, BY, HALVES)
                    if GATHERED:
                        mask = there if W.K % STEP == 0 else there & (k0 + k < W.K)
                        if not MAY_BE_RANGE:  # noqa: SIM114  (known when the kernel is compiled)
                            async_copy.async_copy_global_to_shared(rows.index(stage), at + n * STEP, mask=mask)
                        elif not is_range:
                            async_copy.async_copy_global_to_shared(rows.index(stage), at + n * STEP, mask=mask)
                        async_copy.mbarrier_arrive(ready, increment_count=False)
                    step += 1
                if GATHERED:
                    at += AT_ONCE * STEP


@gluon.jit(do_not_specialize=["assignments", "tiles", "group"])
def grouped_gemm_hopper_kernel(
    x: "Rows", w: "Strided", low: "Flat", lora: "Strided", bias: "Flat", weights: "Flat", h: "Out", out: "Out",
    order: "Flat", offsets: "Flat", tile_expert: "Flat", tile_row: "Flat",
    assignments: tl.int32, tiles: tl.int32, group: tl.int32, scale: tl.float32, alpha: tl.float32, limit: tl.float32,
    WORK: tl.constexpr,
):  # fmt: skip
    """The results of `grouped_gemm_kernel` for all E experts.

    Inputs and outputs: those of `grouped_gemm_kernel`, with a weight that is not quantized.
    Bytes moved: see the module docstring.
    """
    W: gl.constexpr = WORK
    STAGES: gl.constexpr = W.STAGES
    HALVES: gl.constexpr = 2 if W.ACTIVATION != "" and not W.INTERLEAVED else 1
    COLUMNS: gl.constexpr = W.N if W.ACTIVATION == "" else 2 * W.N
    E: gl.constexpr = W.E
    K: gl.constexpr = W.K
    R: gl.constexpr = W.R
    BY: gl.constexpr = W.BY
    LORA_BY: gl.constexpr = W.LORA_BY
    flat: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    dtype: gl.constexpr = x.dtype.element_ty
    by_k: gl.constexpr = [W.STAGES, WIDTH, STEP]
    by_n: gl.constexpr = [W.STAGES, STEP, WIDTH]
    rows = gl.allocate_shared_memory(dtype, [W.STAGES, ROWS, STEP], flat)
    columns = gl.allocate_shared_memory(dtype, by_k if BY == "K" else by_n, flat)
    of_weight = describe_weight(w, E, COLUMNS, K, BY, W.E_STRIDE, W.STRIDE, HALVES)
    of_x = of_weight
    if W.SHARE <= 1 and W.X_ROW > 0:
        of_x = describe_rows(x, assignments, K, W.X_ROW)
    of_low = of_weight
    of_lora = of_weight
    lora_columns = columns
    if R > 0:
        of_low = describe_rows(low, assignments, R, R)
        of_lora = describe_weight(lora, E, COLUMNS, R, LORA_BY, W.LORA_E_STRIDE, W.LORA_STRIDE, HALVES)
        lora_columns = columns._reinterpret(dtype, by_k if LORA_BY == "K" else by_n, flat)
    of_h = of_weight
    of_up = of_weight
    of_out = of_weight
    results = rows
    if W.BY_TMA:
        N: gl.constexpr = W.N
        BLOCK_N: gl.constexpr = columns_of_tile(W.ACTIVATION)
        results = gl.allocate_shared_memory(dtype, [2, HALF, WIDTH], flat)
        of_out = describe_result(out, assignments, N, N, BLOCK_N)
        if h is not None:
            if W.INTERLEAVED:
                of_h = describe_result(h, assignments, COLUMNS, COLUMNS, WIDTH)
            else:
                of_h = describe_result(h, assignments, N, COLUMNS, BLOCK_N)
                of_up = describe_result(h + N, assignments, N, COLUMNS, BLOCK_N)
    groups = (order, offsets, tile_expert, tile_row)
    stores = (of_h, of_up, of_out)
    full = gl.allocate_shared_memory(gl.int64, [W.STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [W.STAGES, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(STAGES):
        mbarrier.init(full.index(n), count=129 if W.SHARE > 0 else 1)  # the descriptors, and threads that gather
        mbarrier.init(empty.index(n), count=2)
    hopper.fence_async_shared()
    gl.warp_specialize(
        [
            (multiply, (
                0, rows, columns, lora_columns, full, empty, bias, weights, h, out, stores, results, groups, tiles,
                group, scale, alpha, limit, W,
            )),
            (multiply, (
                1, rows, columns, lora_columns, full, empty, bias, weights, h, out, stores, results, groups, tiles,
                group, scale, alpha, limit, W,
            )),
            (load, (
                x, of_x, of_weight, of_low, of_lora, rows, columns, lora_columns, full, empty, groups, tiles, group, W,
            )),
        ],
        # Warps and registers of the second and the third function; the first has the warps of the launch.
        [4, 4 if W.SHARE > 0 else 1], [216 if W.SHARE > 0 else 232, 72 if W.SHARE > 0 else 24],
    )  # fmt: skip


def hopper_reads(
    p: Product, x: Tensor, w: Tensor, adapter: tuple[Tensor, Tensor] | None, w_tma: str, only_k: bool,
    results: Sequence[Tensor | None],
) -> tuple[Read, Read] | None:  # fmt: skip
    """How `grouped_gemm_hopper_kernel` reads the weight and an adapter's; None if it is not used for the product."""
    if not (is_for_hopper(p) and w_tma and x.data_ptr() % 16 == 0):
        return None
    if any([t is not None and (t.data_ptr() % 16 or t.dtype != x.dtype) for t in results]):
        return None
    if adapter is None:
        return (w_tma, *others_of(w, w_tma)), ("", 0, 0)
    low, lora = adapter
    lora_tma = layout.tma_dimension(lora, 2, 1, only_k)
    if not lora_tma or low.data_ptr() % 16:
        return None
    return (w_tma, *others_of(w, w_tma)), (lora_tma, *others_of(lora, lora_tma))


def others_of(w: Tensor, contiguous: str) -> tuple[int, int]:
    """The strides of a weight ``(E, N, K)`` in the dimensions in which it is not contiguous."""
    return w.stride(0), w.stride(1 if contiguous == "K" else 2)


@memo
def is_for_hopper(p: Product) -> bool:
    """Whether `grouped_gemm_hopper_kernel` computes a product, as far as weights do not matter.

    It does from a number of rows per expert on, which was measured on an H200. Gathered rows take the loading warps
    more time. With a larger K, programs drift apart and no longer share a weight through the L2 cache: the general
    kernel was faster by up to 25% with 256 rows per expert, and by 2 to 3% in the benchmark with 1024.
    """
    rows = 65 if p.share == 0 else 160 if p.glu else 384
    return p.assignments >= rows * p.E and p.K <= 2048 and is_supported(p)


def is_supported(p: Product) -> bool:
    """Whether `grouped_gemm_hopper_kernel` supports a product, as far as weights do not matter."""
    if not SUPPORTED or p.element != 2 or layout.compute_capability(p.device.index or 0) != 90:
        return False
    wide = power_of_two(p.N) * (2 if p.glu else 1) >= WIDTH.value
    aligned = not (p.x_row % 8 or p.R % 8 or (p.share and p.K % 8)) and (p.share > 0 or p.x_row > 0)
    return wide and aligned and rows_of_tile(p.assignments, p.E) == ROWS.value


def hopper_plan(p: Product, weight: Read, lora: Read) -> Plan:
    """The launch of `grouped_gemm_hopper_kernel`."""
    o, activation = p.options, p.options.activation if p.glu else ""
    by_tma = p.N % 8 == 0
    of_stage, of_results = (
        n * ELEMENT.value for n in ((ROWS.value + WIDTH.value) * STEP.value, ROWS.value * WIDTH.value)
    )
    stages = (layout.shared_memory() - by_tma * of_results) // of_stage
    if p.share:  # so that programs that read the same weight are at nearly the same step, and it stays in L2
        stages = min(3, stages)
    work = Work(
        p.E, p.N, p.K, p.R, activation, o.interleaved, p.share, p.scatter, p.x_row, *weight, *lora, stages, by_tma
    )  # fmt: skip
    programs = min(p.tiles * -(-p.N // columns_of_tile(activation)), layout.multiprocessors(p.device))
    group = min(16, power_of_two(p.assignments // (p.E * ROWS.value)))
    given = p.assignments, p.tiles, group, p.scale, o.alpha, o.limit
    return Plan(grouped_gemm_hopper_kernel, programs, given, dict(WORK=work), 4)
