"""The grouped GEMM of `grouped_gemm` on Hopper GPUs.

The warps of a program have different roles. One warp, or four that also gather rows, load the operands of each step of
K into a ring of stages in shared memory. Two groups of four warps multiply them, each for a part of 64 rows of a tile,
and store the result; while they store, the operands of the next tile are loaded. A tile has up to three parts, and each
group has half of the columns of the third one: a tile of more rows reads fewer bytes for each product. A group that has
no rows of a tile multiplies nothing, so that the rows of an expert are padded to 64. Only the warps that load look up
the next tile. They write it to shared memory for the others, so that these need not interrupt their products for it.

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
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from onepass.core.memo import memo
from onepass.core.moe_options import Product
from onepass.kernels import layout
from onepass.kernels.hopper_results import BUFFERS, STORED, describe_result, store_part
from onepass.kernels.hopper_tiles import (
    ELEMENT,
    HALF,
    PART,
    PARTS,
    STEP,
    SUPPORTED,
    WIDTH,
    announced,
    columns_of_tile,
    describe_rows,
    describe_weight,
    load,
    loaded_columns,
)
from onepass.kernels.launch import Flat, Out, Plan, Rows, Strided
from onepass.kernels.layout import power_of_two
from onepass.kernels.row_gemm import separate
from onepass.kernels.token_sort import FIELDS, MOST_ROWS, rows_of_tile, shift_of

separate_tile = gluon.jit(separate.fn)
OF_STORES = 8192  # bytes of shared memory through which results are stored that no descriptor stores
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
    SCALED: bool
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
    FAR: bool  # whether places of gathered rows take 64 bits


@gluon.constexpr_function
def registers_of(work, keeps_h):
    """The registers of a thread that multiplies, and of one that loads.

    Threads that gather rows hold their addresses; those that multiply need more registers if they also store the
    products before the activation (``keeps_h``).
    """
    return [232, 24] if work.SHARE == 0 else [232, 40] if keeps_h else [224, 56]


@gluon.jit
def accumulate(
    acc, step, ring, columns, which: gl.constexpr, STEPS: gl.constexpr, BY: gl.constexpr, W: gl.constexpr,
    GATHERED: gl.constexpr, FRESH: gl.constexpr,
):  # fmt: skip
    """Add the products of a part of the rows and of STEPS steps, and give their stages back. If FRESH, the first
    product replaces what ``acc`` was."""
    rows, _, full, empty = ring
    STAGES: gl.constexpr = W.STAGES
    for k in range(STEPS):
        stage = step % STAGES
        mbarrier.wait(full.index(stage), step // STAGES & 1)
        if GATHERED:  # the tensor cores read through another proxy than the copies of rows write through
            hopper.fence_async_shared()
        b = columns.index(stage)
        if BY == "K":
            b = b.permute((1, 0))
        acc = hopper.warpgroup_mma(rows.index(stage * PARTS + which), b, acc, use_acc=not FRESH or k > 0)
        mbarrier.arrive(empty.index(stage), count=1)
        step += 1
    return acc, step


@gluon.jit
def accumulate_with_third(
    acc, third, step, ring, columns, which: gl.constexpr, STEPS: gl.constexpr, BY: gl.constexpr, W: gl.constexpr,
    GATHERED: gl.constexpr, FRESH: gl.constexpr,
):  # fmt: skip
    """The same, and the products of the third part with half of the columns of the tile."""
    rows, _, full, empty = ring
    STAGES: gl.constexpr = W.STAGES
    DIM: gl.constexpr = 0 if BY == "K" else 1
    for k in range(STEPS):
        stage = step % STAGES
        mbarrier.wait(full.index(stage), step // STAGES & 1)
        if GATHERED:
            hopper.fence_async_shared()
        b = columns.index(stage)
        half = b.slice(which * HALF, HALF, DIM)
        if BY == "K":
            b = b.permute((1, 0))
            half = half.permute((1, 0))
        use_acc = not FRESH or k > 0
        acc = hopper.warpgroup_mma(rows.index(stage * PARTS + which), b, acc, use_acc=use_acc, is_async=True)
        third = hopper.warpgroup_mma(rows.index(stage * PARTS + 2), half, third, use_acc=use_acc, is_async=True)
        acc, third = hopper.warpgroup_mma_wait(0, deps=[acc, third])
        mbarrier.arrive(empty.index(stage), count=1)
        step += 1
    return acc, third, step


@gluon.jit
def columns_of_product(n_tile, first: gl.constexpr, COUNT: gl.constexpr, layout: gl.constexpr, W: gl.constexpr):
    """Which columns of the weight the products ``first`` to ``first + COUNT`` of a tile are, and which there are."""
    GLU: gl.constexpr = W.ACTIVATION != ""
    n = first + gl.arange(0, COUNT, gl.SliceLayout(0, layout))
    if GLU and not W.INTERLEAVED:  # 64 columns of each half in turns
        column = n_tile * HALF + n // (2 * PART) * PART + n % PART
        return n // PART % 2 * W.N + column, column < W.N
    else:
        n += n_tile * WIDTH
        return n, n < (2 * W.N if GLU else W.N)


@gluon.jit
def start(
    bias, expert, n_tile, first: gl.constexpr, COUNT: gl.constexpr, layout: gl.constexpr, W: gl.constexpr
):  # fmt: skip
    """What these products of a part of the rows are added to: the bias, or zeros."""
    acc = gl.zeros((PART, COUNT), gl.float32, layout)
    if bias is not None:
        COLUMNS: gl.constexpr = W.N if W.ACTIVATION == "" else 2 * W.N
        n, there = columns_of_product(n_tile, first, COUNT, layout, W)
        of_bias = gl.load(bias + expert.to(gl.int64) * COLUMNS + n, mask=there, other=0.0)
        acc = separate_tile(acc + of_bias.to(gl.float32)[None, :], True)
    return acc


@gluon.jit
def multiply(
    which: gl.constexpr, ring, columns, lora_columns, bias, stores, results, groups, numbers, W: gl.constexpr
):  # fmt: skip
    """Compute and store the first (0) or the second (1) part of the rows of each tile, and half of the third part."""
    _, tile_of_stage, full, empty = ring
    ACTIVATION: gl.constexpr = W.ACTIVATION
    N_TILES: gl.constexpr = (W.N + columns_of_tile(ACTIVATION) - 1) // columns_of_tile(ACTIVATION)
    STEPS: gl.constexpr = (W.K + STEP - 1) // STEP
    LORA_STEPS: gl.constexpr = (W.R + STEP - 1) // STEP
    BY: gl.constexpr = W.BY
    LORA_BY: gl.constexpr = W.LORA_BY
    STAGES: gl.constexpr = W.STAGES
    of_acc: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    of_third: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    order, _, tiles, _ = groups
    GATHERED: gl.constexpr = W.SHARE > 0
    FRESH: gl.constexpr = bias is None  # the first product of a tile replaces those of the tile before
    # With a scale or routing weights, the results take registers of their own. The accumulator is then cleared for each
    # tile: otherwise the products would stay in registers beside the results until the next tile replaces them.
    KEPT: gl.constexpr = FRESH and stores[2] is None and not W.SCALED
    FIRST: gl.constexpr = FRESH and LORA_STEPS == 0
    acc = gl.zeros((PART, WIDTH), gl.float32, of_acc)
    step = 0
    for _turn in range(gl.cdiv(tiles * N_TILES, gl.num_programs(0))):
        mbarrier.wait(full.index(step % STAGES), step // STAGES & 1)
        n_tile, expert, first, end = announced(tile_of_stage.index(step % STAGES))
        begin = first + which * PART
        if begin < end:
            if not KEPT:
                acc = start(bias, expert, n_tile, 0, WIDTH, of_acc, W)
            if first + 2 * PART < end:
                third = start(bias, expert, n_tile, which * HALF, HALF, of_third, W)
                if LORA_STEPS > 0:
                    acc, third, step = accumulate_with_third(
                        acc, third, step, ring, lora_columns, which, LORA_STEPS, LORA_BY, W, False, FRESH
                    )
                acc, third, step = accumulate_with_third(
                    acc, third, step, ring, columns, which, STEPS, BY, W, GATHERED, FIRST
                )
                store_part(
                    third, stores, results, which, which * HALF, order, first + 2 * PART, end, n_tile, numbers, W
                )
            else:
                if LORA_STEPS > 0:
                    acc, step = accumulate(acc, step, ring, lora_columns, which, LORA_STEPS, LORA_BY, W, False, FRESH)
                acc, step = accumulate(acc, step, ring, columns, which, STEPS, BY, W, GATHERED, FIRST)
            store_part(acc, stores, results, which, 0, order, begin, end, n_tile, numbers, W)
        else:
            for _k in range(gl.where(first < end, LORA_STEPS + STEPS, 1)):
                mbarrier.wait(full.index(step % STAGES), step // STAGES & 1)
                mbarrier.arrive(empty.index(step % STAGES), count=1)
                step += 1
    if W.BY_TMA:
        tma.store_wait(0)


@gluon.jit(do_not_specialize=["assignments", "room", "shift"])
def grouped_gemm_hopper_kernel(
    x: "Rows", w: "Strided", low: "Flat", lora: "Strided", bias: "Flat", weights: "Flat", h: "Out", out: "Out",
    order: "Flat", tile_list: "Flat",
    assignments: tl.int32, room: tl.int32, shift: tl.int32, scale: tl.float32, alpha: tl.float32, limit: tl.float32,
    WORK: tl.constexpr,
):  # fmt: skip
    """The results of `grouped_gemm_kernel` for all E experts.

    Inputs and outputs: those of `grouped_gemm_kernel`, with a weight that is not quantized. Each of the two lists of
    ``tile_list`` has room for ``room`` tiles.
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
    rows = gl.allocate_shared_memory(dtype, [STAGES * PARTS, PART, STEP], flat)
    columns = gl.allocate_shared_memory(dtype, by_k if BY == "K" else by_n, flat)
    of_weight = describe_weight(w, E, COLUMNS, K, BY, W.E_STRIDE, W.STRIDE, HALVES)
    of_x = of_weight
    if W.SHARE <= 1 and W.X_ROW > 0:
        of_x = describe_rows(x, assignments, K, W.X_ROW)
    of_low = of_weight
    of_lora = of_weight
    lora_columns = columns
    loaded = loaded_columns(columns, BY, HALVES)
    loaded_lora = loaded
    if R > 0:
        of_low = describe_rows(low, assignments, R, R)
        of_lora = describe_weight(lora, E, COLUMNS, R, LORA_BY, W.LORA_E_STRIDE, W.LORA_STRIDE, HALVES)
        lora_columns = columns._reinterpret(dtype, by_k if LORA_BY == "K" else by_n, flat)
        loaded_lora = loaded_columns(lora_columns, LORA_BY, HALVES)
    of_h = of_weight
    of_up = of_weight
    of_out = of_weight
    results = rows
    if W.BY_TMA:
        N: gl.constexpr = W.N
        results = gl.allocate_shared_memory(dtype, [2 * BUFFERS, PART, STORED], flat)
        of_out = describe_result(out, assignments, N, N)
        if h is not None:
            if W.INTERLEAVED:
                of_h = describe_result(h, assignments, COLUMNS, COLUMNS)
                of_up = of_h
            else:
                of_h = describe_result(h, assignments, N, COLUMNS)
                of_up = describe_result(h + N, assignments, N, COLUMNS)
    # The second list, which has tiles of three parts, and the number of its tiles.
    groups = (order, tile_list + FIELDS * room, gl.load(tile_list + 2 * FIELDS * room + 1), shift)
    stores = (h, out, weights, of_h, of_up, of_out)
    numbers = (scale, alpha, limit)
    tile_of_stage = gl.allocate_shared_memory(gl.int32, [W.STAGES, 4], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [W.STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [W.STAGES, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(STAGES):
        mbarrier.init(full.index(n), count=129 if W.SHARE > 0 else 1)  # the descriptors, and threads that gather
        mbarrier.init(empty.index(n), count=2)
    hopper.fence_async_shared()
    ring = (rows, tile_of_stage, full, empty)  # of stages: memory, and barriers that say whether it is full or empty
    REGISTERS: gl.constexpr = registers_of(W, h is not None)
    gl.warp_specialize(
        [
            (multiply, (0, ring, columns, lora_columns, bias, stores, results, groups, numbers, W)),
            (multiply, (1, ring, columns, lora_columns, bias, stores, results, groups, numbers, W)),
            (load, (x, of_x, of_weight, of_low, of_lora, ring, loaded, loaded_lora, groups, W)),
        ],
        # Warps and registers of the second and the third function; the first has the warps of the launch.
        [4, 4 if W.SHARE > 0 else 1], REGISTERS,
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

    On an H200, with 72 to 1024 rows per expert, it took 0.76 to 1.01 of the time of the general kernel for K up to
    4096, and 0.84 to 1.05 for K = 7168. A sum of one step is left to the general kernel. If there is a bias, the ptxas
    of Triton 3.6 compiles it wrongly: of two branches, it sets the address of some columns in one only.
    """
    if not SUPPORTED or p.element != 2 or layout.compute_capability(p.device.index or 0) != 90:
        return False
    wide = power_of_two(p.N) * (2 if p.glu else 1) >= WIDTH.value
    aligned = not (p.x_row % 8 or p.R % 8 or (p.share and p.K % 8)) and (p.share > 0 or p.x_row > 0)
    return wide and aligned and STEP.value < p.K and rows_of_tile(p.assignments, p.E) == MOST_ROWS


def is_far(p: Product) -> bool:
    """Whether gathered rows are so far apart in ``x`` that their places take 64 bits."""
    return p.share > 0 and p.assignments // p.share * p.x_row >= 2**31


def hopper_plan(p: Product, weight: Read, lora: Read) -> Plan:
    """The launch of `grouped_gemm_hopper_kernel`."""
    o, activation = p.options, p.options.activation if p.glu else ""
    by_tma = p.N % 8 == 0
    of_stage = (PARTS.value * PART.value + WIDTH.value) * STEP.value * ELEMENT.value
    of_results = 2 * BUFFERS.value * PART.value * STORED.value * ELEMENT.value if by_tma else OF_STORES
    stages = (layout.shared_memory() - of_results) // of_stage
    work = Work(
        p.E, p.N, p.K, p.R, activation, o.interleaved, p.share, p.scale != 1, p.scatter, p.x_row, *weight, *lora,
        stages, by_tma, is_far(p),
    )  # fmt: skip
    programs = min(p.tiles * -(-p.N // columns_of_tile(activation)), layout.multiprocessors(p.device))
    given = p.assignments, p.tiles, shift_of(programs), p.scale, o.alpha, o.limit
    return Plan(grouped_gemm_hopper_kernel, programs, given, dict(WORK=work), 4)
