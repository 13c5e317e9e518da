"""The grouped GEMM of `grouped_gemm` on Hopper GPUs.

The warps of a program have different roles. One warp, or four that also gather rows, load the operands of each step of
K into a ring of stages in shared memory. Two groups of four warps multiply them, each for half of the rows of a tile,
and store the result; while they store, the operands of the next tile are loaded. A group that has no rows of a tile
multiplies nothing, so that the rows of an expert are padded to 64 instead of 128.

The kernel is written in Gluon, since Triton assigns all warps the same role. Triton's interpreter does not run Gluon.
`grouped_gemm_kernel` computes the same, and everything that this kernel does not support.

Bytes moved: as in `grouped_gemm`.
"""

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
from onepass.kernels.launch import Flat, Out, Plan, Rows, Strided
from onepass.kernels.layout import power_of_two
from onepass.kernels.row_gemm import place_of
from onepass.kernels.token_sort import rows_of_tile

Read = tuple[str, int, int]  # of a weight (E, N, K): its contiguous dimension, "K" or "N", and the two other strides
# Of a tile: rows, half of them, columns, and the part of K that is multiplied at once.
ROWS, HALF, WIDTH, STEP = (gl.constexpr(n) for n in (128, 64, 256, 64))
ELEMENT = gl.constexpr(2)  # bytes
SUPPORTED = hasattr(tma, "make_tensor_descriptor") and hasattr(async_copy, "mbarrier_arrive")  # from Triton 3.6 on


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


@gluon.constexpr_function
def stored_layout(rows, columns):
    """The layout in which a tile is stored, 16 bytes a thread.

    Every row is in the same warp as in the accumulator, so that warps exchange nothing.
    """
    registers = [[0, 1], [0, 2], [0, 4], *[[0, 32 << n] for n in range((columns // 64).bit_length())], [8, 0]]
    lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [rows, columns])


place_of_work, activate_tile = gluon.jit(place_of.fn), gluon.jit(activate.fn)


@gluon.constexpr_function
def columns_of_tile(activation):
    """How many columns of the result a tile has: with an activation, half of those of the product."""
    return 128 if activation != "" else 256


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
def accumulate(
    acc, step, rows, columns, full, empty, which: gl.constexpr, STEPS: gl.constexpr, BY: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Add the products of STEPS steps, and give their stages back."""
    for _k in range(STEPS):
        stage = step % STAGES
        mbarrier.wait(full.index(stage), step // STAGES & 1)
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
    which: gl.constexpr, rows, columns, lora_columns, full, empty, bias, weights, h, out, order, offsets, tile_expert,
    tile_row, tiles, group, scale, alpha, limit, W: gl.constexpr,
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
                        acc, step, rows, lora_columns, full, empty, which, LORA_STEPS, LORA_BY, STAGES
                    )
                acc, step = accumulate(acc, step, rows, columns, full, empty, which, STEPS, BY, STAGES)
                row = begin + gl.arange(0, HALF, gl.SliceLayout(1, of_acc))
                there = row < end
                if GLU:
                    if W.INTERLEAVED:
                        if h is not None:
                            store_tile(h, row, there, n_tile * WIDTH, COLUMNS, COLUMNS, acc)
                        gate, up = gl.split(acc.reshape((HALF, BLOCK_N, 2)))
                    else:
                        gate, up = gl.split(acc.reshape((HALF, 2, BLOCK_N)).permute((0, 2, 1)))
                        if h is not None:
                            store_tile(h, row, there, n0, N, COLUMNS, gate)
                            store_tile(h + N, row, there, n0, N, COLUMNS, up)
                    y, _by_gate, _by_up = activate_tile(gate, up, alpha, limit, ACTIVATION)
                else:
                    y = acc * scale
                if weights is not None:
                    weight = gl.load(weights + assignment, mask=there, other=0.0)
                    y *= gl.convert_layout(weight, gl.SliceLayout(1, y.type.layout))[:, None]
                if W.SCATTER:
                    store_tile(out, assignment, there, n0, N, N, y)
                else:
                    store_tile(out, row, there, n0, N, N, y)
            else:
                for _k in range(LORA_STEPS + STEPS):
                    mbarrier.wait(full.index(step % STAGES), step // STAGES & 1)
                    mbarrier.arrive(empty.index(step % STAGES), count=1)
                    step += 1


@gluon.jit
def load_step(
    of_rows, of_columns, ready, rows, columns, begin, end, expert, n0, k0, BY: gl.constexpr, HALVES: gl.constexpr,
    GATHERED: gl.constexpr,
):  # fmt: skip
    """Load the columns of a step and, unless they are GATHERED, its rows: those of the second half if any are there."""
    OF_COLUMNS: gl.constexpr = WIDTH * STEP * ELEMENT
    OF_ROWS: gl.constexpr = HALF * STEP * ELEMENT
    if GATHERED:
        mbarrier.expect(ready, OF_COLUMNS)
    else:
        both = begin + HALF < end
        mbarrier.expect(ready, OF_COLUMNS + 2 * OF_ROWS, pred=both)
        mbarrier.expect(ready, OF_COLUMNS + OF_ROWS, pred=both == 0)
        tma.async_copy_global_to_shared(of_rows, [begin, k0], ready, rows.slice(0, HALF))
        tma.async_copy_global_to_shared(of_rows, [begin + HALF, k0], ready, rows.slice(HALF, HALF), pred=both)
    if BY == "K":
        to = columns._reinterpret(columns.dtype, [1, HALVES, WIDTH // HALVES, STEP], gl.NVMMASharedLayout(128, 16, 4))
        tma.async_copy_global_to_shared(of_columns, [expert, 0, n0, k0], ready, to)
    else:
        to = columns._reinterpret(columns.dtype, [1, STEP, WIDTH], gl.NVMMASharedLayout(128, 16, 3))
        tma.async_copy_global_to_shared(of_columns, [expert, k0, n0], ready, to)


@gluon.jit
def load(
    x, of_x, of_weight, of_low, of_lora, rows, columns, lora_columns, full, empty, order, offsets, tile_expert,
    tile_row, tiles, group, W: gl.constexpr,
):  # fmt: skip
    """Load what `multiply` multiplies, in its order."""
    ACTIVATION: gl.constexpr = W.ACTIVATION
    HALVES: gl.constexpr = 2 if W.ACTIVATION != "" and not W.INTERLEAVED else 1
    BLOCK_N: gl.constexpr = columns_of_tile(ACTIVATION)
    N_TILES: gl.constexpr = (W.N + BLOCK_N - 1) // BLOCK_N
    STEPS: gl.constexpr = (W.K + STEP - 1) // STEP
    LORA_STEPS: gl.constexpr = (W.R + STEP - 1) // STEP
    GATHERED: gl.constexpr = W.SHARE > 0
    AT_ONCE: gl.constexpr = 4 if GATHERED and STEPS % 4 == 0 else 1  # whose addresses differ by constants
    BY: gl.constexpr = W.BY
    LORA_BY: gl.constexpr = W.LORA_BY
    STAGES: gl.constexpr = W.STAGES
    gathered: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
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
                row = begin + gl.arange(0, ROWS, gl.SliceLayout(1, gathered))
                there = (row < end)[:, None]
                k = gl.arange(0, STEP, gl.SliceLayout(0, gathered))[None, :]
                source = gl.load(order + row, mask=row < end, other=0) // W.SHARE
                at = x + source.to(gl.int64)[:, None] * W.X_ROW + k
            if LORA_STEPS > 0:
                for k0 in range(0, LORA_STEPS * STEP, STEP):
                    stage = step % STAGES
                    mbarrier.wait(empty.index(stage), step // STAGES & 1 ^ 1)
                    load_step(
                        of_low, of_lora, full.index(stage), rows.index(stage), lora_columns.index(stage), begin, end,
                        expert, n0, k0, LORA_BY, HALVES, False,
                    )  # fmt: skip
                    if GATHERED:
                        async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
                    step += 1
            for first in range(0, STEPS * STEP, AT_ONCE * STEP):
                for n in gl.static_range(AT_ONCE):
                    k0 = first + n * STEP
                    stage = step % STAGES
                    mbarrier.wait(empty.index(stage), step // STAGES & 1 ^ 1)
                    load_step(
                        of_x, of_weight, full.index(stage), rows.index(stage), columns.index(stage), begin, end,
                        expert, n0, k0, BY, HALVES, GATHERED,
                    )  # fmt: skip
                    if GATHERED:
                        mask = there if W.K % STEP == 0 else there & (k0 + k < W.K)
                        async_copy.async_copy_global_to_shared(rows.index(stage), at + n * STEP, mask=mask)
                        # Without a proxy fence before the tensor cores read these copies, as in the pipelines that
                        # Triton's compiler generates.
                        async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
                    step += 1
                if GATHERED:
                    at += AT_ONCE * STEP


@gluon.jit
def describe_rows(x, count, K: gl.constexpr, ROW: gl.constexpr):
    """The descriptor of half of the rows of a tile of ``x`` ``(count, K)``."""
    return tma.make_tensor_descriptor(x, [count, K], [ROW, 1], [HALF, STEP], gl.NVMMASharedLayout(128, 16, 2))


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
    if W.SHARE == 0:
        of_x = describe_rows(x, assignments, K, W.X_ROW)
    of_low = of_weight
    of_lora = of_weight
    lora_columns = columns
    if R > 0:
        of_low = describe_rows(low, assignments, R, R)
        of_lora = describe_weight(lora, E, COLUMNS, R, LORA_BY, W.LORA_E_STRIDE, W.LORA_STRIDE, HALVES)
        lora_columns = columns._reinterpret(dtype, by_k if LORA_BY == "K" else by_n, flat)
    full = gl.allocate_shared_memory(gl.int64, [W.STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [W.STAGES, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(STAGES):
        mbarrier.init(full.index(n), count=129 if W.SHARE > 0 else 1)  # the descriptors, and threads that gather
        mbarrier.init(empty.index(n), count=2)
    hopper.fence_async_shared()
    gl.warp_specialize(
        [
            (multiply, (
                0, rows, columns, lora_columns, full, empty, bias, weights, h, out, order, offsets, tile_expert,
                tile_row, tiles, group, scale, alpha, limit, W,
            )),
            (multiply, (
                1, rows, columns, lora_columns, full, empty, bias, weights, h, out, order, offsets, tile_expert,
                tile_row, tiles, group, scale, alpha, limit, W,
            )),
            (load, (
                x, of_x, of_weight, of_low, of_lora, rows, columns, lora_columns, full, empty, order, offsets,
                tile_expert, tile_row, tiles, group, W,
            )),
        ],
        # Warps and registers of the second and the third function; the first has the warps of the launch.
        [4, 4 if W.SHARE > 0 else 1], [208 if W.SHARE > 0 else 232, 72 if W.SHARE > 0 else 24],
    )  # fmt: skip


def hopper_reads(
    p: Product, x: Tensor, w: Tensor, adapter: tuple[Tensor, Tensor] | None, w_tma: str, only_k: bool
) -> tuple[Read, Read] | None:
    """How `grouped_gemm_hopper_kernel` reads the weight and an adapter's; None if it is not used for the product."""
    if not (is_for_hopper(p) and w_tma and x.data_ptr() % 16 == 0):
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

    It does for 65 to 255 rows of an expert, where many rows of the other kernel's tiles are padding: for those of
    Qwen3-Next (160) it was faster on an H200, for 512 it was not. Gathered rows without an activation, or that are
    long, took its loading warps too much time.
    """
    faster = p.assignments < 256 * p.E and (p.share == 0 or (p.glu and p.K <= 2048))
    return faster and is_supported(p)


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
    stages = layout.shared_memory() // ((ROWS.value + WIDTH.value) * STEP.value * ELEMENT.value)
    if p.share:
        stages -= 1  # so that programs that read the same weight are at nearly the same step, and it stays in L2
    work = Work(
        p.E, p.N, p.K, p.R, activation, o.interleaved, p.share, p.scatter, p.x_row, *weight, *lora, stages
    )  # fmt: skip
    programs = min(p.tiles * -(-p.N // columns_of_tile(activation)), layout.multiprocessors(p.device))
    group = min(16, power_of_two(p.assignments // (p.E * ROWS.value)))
    given = p.assignments, p.tiles, group, p.scale, o.alpha, o.limit
    return Plan(grouped_gemm_hopper_kernel, programs, given, dict(WORK=work), 4)
