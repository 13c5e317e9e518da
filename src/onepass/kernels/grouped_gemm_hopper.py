"""The grouped GEMM of `grouped_gemm` on Hopper GPUs, for rows that are sorted by expert.

The warps of a program have different roles. One warp loads the operands of each step of K into a ring of stages in
shared memory, by descriptors. Two groups of four warps multiply them, each for half of the rows of a tile, and store
the result; while they store, the operands of the next tile are loaded. A group that has no rows of a tile multiplies
nothing, so that the rows of an expert are padded to 64 instead of 128.

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
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from onepass.core.memo import memo
from onepass.core.moe_options import Product
from onepass.kernels import layout
from onepass.kernels.launch import Flat, Out, Plan, Rows, Strided
from onepass.kernels.layout import power_of_two
from onepass.kernels.row_gemm import place_of
from onepass.kernels.token_sort import rows_of_tile

Read = tuple[str, int, int]  # of a weight (E, N, K): its contiguous dimension, "K" or "N", and the two other strides
# Of a tile: rows, half of them, columns, and the part of K that is multiplied at once.
ROWS, HALF, WIDTH, STEP = (gl.constexpr(n) for n in (128, 64, 256, 64))
ELEMENT = gl.constexpr(2)  # bytes
SUPPORTED = hasattr(tma, "make_tensor_descriptor")  # from Triton 3.6 on


class Work(NamedTuple):
    """The constants of the kernel, named as in `grouped_gemm_kernel`; BY, E_STRIDE and STRIDE are a `Read`."""

    E: int
    N: int
    K: int
    R: int
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

    Every row is in the same warp as in the accumulator, so that no thread waits for another warp.
    """
    registers = [[0, 1], [0, 2], [0, 4], *[[0, 32 << n] for n in range((columns // 64).bit_length())], [8, 0]]
    lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [rows, columns])


place_of_work = gluon.jit(place_of.fn)


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
    which: gl.constexpr, rows, columns, lora_columns, full, empty, bias, weights, out, order, offsets, tile_expert,
    tile_row, tiles, group, scale, W: gl.constexpr,
):  # fmt: skip
    """Compute and store the first (0) or the second (1) half of the rows of each tile."""
    N_TILES: gl.constexpr = (W.N + WIDTH - 1) // WIDTH
    STEPS: gl.constexpr = (W.K + STEP - 1) // STEP
    LORA_STEPS: gl.constexpr = (W.R + STEP - 1) // STEP
    BY: gl.constexpr = W.BY
    LORA_BY: gl.constexpr = W.LORA_BY
    STAGES: gl.constexpr = W.STAGES
    of_acc: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    stored: gl.constexpr = stored_layout(HALF, WIDTH)
    step = 0
    for work in range(gl.program_id(0), tiles * N_TILES, gl.num_programs(0)):
        tile, n_tile = place_of_work(work, tiles, N_TILES, group)
        expert = gl.load(tile_expert + tile)
        if expert < W.E:
            begin = gl.load(tile_row + tile) + which * HALF
            end = gl.load(offsets + expert + 1)
            if begin < end:
                row = begin + gl.arange(0, HALF, gl.SliceLayout(1, stored))
                there = row < end
                assignment = row
                if W.SCATTER or weights is not None:
                    assignment = gl.load(order + row, mask=there, other=0)
                acc = gl.zeros((HALF, WIDTH), gl.float32, of_acc)
                if bias is not None:
                    n = n_tile * WIDTH + gl.arange(0, WIDTH, gl.SliceLayout(0, of_acc))
                    of_columns = gl.load(bias + expert.to(gl.int64) * W.N + n, mask=n < W.N, other=0.0)
                    acc += of_columns.to(gl.float32)[None, :]
                if LORA_STEPS > 0:
                    acc, step = accumulate(
                        acc, step, rows, lora_columns, full, empty, which, LORA_STEPS, LORA_BY, STAGES
                    )
                acc, step = accumulate(acc, step, rows, columns, full, empty, which, STEPS, BY, STAGES)
                y = acc * scale
                if weights is not None:
                    weight = gl.load(weights + assignment, mask=there, other=0.0)
                    y *= gl.convert_layout(weight, gl.SliceLayout(1, of_acc))[:, None]
                n = n_tile * WIDTH + gl.arange(0, WIDTH, gl.SliceLayout(0, stored))
                to = (assignment if W.SCATTER else row).to(gl.int64)[:, None] * W.N + n[None, :]
                found = gl.convert_layout(y.to(out.dtype.element_ty), stored)
                gl.store(out + to, found, mask=there[:, None] & (n < W.N)[None, :])
            else:
                for _k in range(LORA_STEPS + STEPS):
                    mbarrier.wait(full.index(step % STAGES), step // STAGES & 1)
                    mbarrier.arrive(empty.index(step % STAGES), count=1)
                    step += 1


@gluon.jit
def load_steps(
    of_rows, of_columns, step, rows, columns, full, empty, begin, end, expert, n0, STEPS: gl.constexpr,
    BY: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """Load STEPS steps of a tile. The second half of the rows is loaded only if one of them is there."""
    OF_COLUMNS: gl.constexpr = WIDTH * STEP * ELEMENT
    OF_ROWS: gl.constexpr = HALF * STEP * ELEMENT
    both = begin + HALF < end
    for k in range(STEPS):
        k0 = k * STEP
        stage = step % W.STAGES
        ready = full.index(stage)
        mbarrier.wait(empty.index(stage), step // W.STAGES & 1 ^ 1)
        mbarrier.expect(ready, OF_COLUMNS + 2 * OF_ROWS, pred=both)
        mbarrier.expect(ready, OF_COLUMNS + OF_ROWS, pred=both == 0)
        a = rows.index(stage)
        tma.async_copy_global_to_shared(of_rows, [begin, k0], ready, a.slice(0, HALF))
        tma.async_copy_global_to_shared(of_rows, [begin + HALF, k0], ready, a.slice(HALF, HALF), pred=both)
        b = columns.index(stage)
        flat: gl.constexpr = gl.NVMMASharedLayout(128, 16, 3)
        if BY == "K":
            b = b._reinterpret(b.dtype, [1, WIDTH, STEP], flat)
            tma.async_copy_global_to_shared(of_columns, [expert, n0, k0], ready, b)
        else:
            b = b._reinterpret(b.dtype, [1, STEP, WIDTH], flat)
            tma.async_copy_global_to_shared(of_columns, [expert, k0, n0], ready, b)
        step += 1
    return step


@gluon.jit
def load(
    of_x, of_weight, of_low, of_lora, rows, columns, lora_columns, full, empty, offsets, tile_expert, tile_row, tiles,
    group, W: gl.constexpr,
):  # fmt: skip
    """Load what `multiply` multiplies, in its order."""
    N_TILES: gl.constexpr = (W.N + WIDTH - 1) // WIDTH
    STEPS: gl.constexpr = (W.K + STEP - 1) // STEP
    LORA_STEPS: gl.constexpr = (W.R + STEP - 1) // STEP
    BY: gl.constexpr = W.BY
    LORA_BY: gl.constexpr = W.LORA_BY
    step = 0
    for work in range(gl.program_id(0), tiles * N_TILES, gl.num_programs(0)):
        tile, n_tile = place_of_work(work, tiles, N_TILES, group)
        expert = gl.load(tile_expert + tile)
        if expert < W.E:
            begin = gl.load(tile_row + tile)
            end = gl.load(offsets + expert + 1)
            n0 = n_tile * WIDTH
            if LORA_STEPS > 0:
                step = load_steps(
                    of_low, of_lora, step, rows, lora_columns, full, empty, begin, end, expert, n0, LORA_STEPS,
                    LORA_BY, W,
                )  # fmt: skip
            step = load_steps(of_x, of_weight, step, rows, columns, full, empty, begin, end, expert, n0, STEPS, BY, W)


@gluon.jit
def describe_rows(x, count, K: gl.constexpr, ROW: gl.constexpr, W: gl.constexpr):
    """The descriptor of half of the rows of a tile of ``x`` ``(count, K)``."""
    return tma.make_tensor_descriptor(x, [count, K], [ROW, 1], [HALF, STEP], gl.NVMMASharedLayout(128, 16, 2))


@gluon.jit
def describe_weight(
    w, K: gl.constexpr, BY: gl.constexpr, E_STRIDE: gl.constexpr, STRIDE: gl.constexpr, W: gl.constexpr
):
    """The descriptor of the columns of a tile of a weight ``(E, N, K)``."""
    flat: gl.constexpr = gl.NVMMASharedLayout(128, 16, 3)
    if BY == "K":
        return tma.make_tensor_descriptor(w, [W.E, W.N, K], [E_STRIDE, STRIDE, 1], [1, WIDTH, STEP], flat)
    else:
        return tma.make_tensor_descriptor(w, [W.E, K, W.N], [E_STRIDE, STRIDE, 1], [1, STEP, WIDTH], flat)


@gluon.jit(do_not_specialize=["assignments", "tiles", "group"])
def grouped_gemm_hopper_kernel(
    x: "Rows", w: "Strided", low: "Flat", lora: "Strided", bias: "Flat", weights: "Flat", out: "Out", order: "Flat",
    offsets: "Flat", tile_expert: "Flat", tile_row: "Flat",
    assignments: tl.int32, tiles: tl.int32, group: tl.int32, scale: tl.float32,
    WORK: tl.constexpr,
):  # fmt: skip
    """``out = scale·y`` for the ``y`` of `grouped_gemm_kernel`, times the routing weight of each row if there are any.

    Inputs: ``x`` ``(assignments, K)``, sorted by expert; ``w`` ``(E, N, K)``; the other arguments are as there.
    Output: ``out`` ``(assignments, N)``, in the order of the assignments if SCATTER, else sorted by expert.
    Bytes moved: see the module docstring.
    """
    W: gl.constexpr = WORK
    STAGES: gl.constexpr = W.STAGES
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
    of_x = describe_rows(x, assignments, K, W.X_ROW, W)
    of_weight = describe_weight(w, K, BY, W.E_STRIDE, W.STRIDE, W)
    of_low = of_x
    of_lora = of_weight
    lora_columns = columns
    if R > 0:
        of_low = describe_rows(low, assignments, R, R, W)
        of_lora = describe_weight(lora, R, LORA_BY, W.LORA_E_STRIDE, W.LORA_STRIDE, W)
        lora_columns = columns._reinterpret(dtype, by_k if LORA_BY == "K" else by_n, flat)
    full = gl.allocate_shared_memory(gl.int64, [W.STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [W.STAGES, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(STAGES):
        mbarrier.init(full.index(n), count=1)
        mbarrier.init(empty.index(n), count=2)
    hopper.fence_async_shared()
    gl.warp_specialize(
        [
            (multiply, (
                0, rows, columns, lora_columns, full, empty, bias, weights, out, order, offsets, tile_expert, tile_row,
                tiles, group, scale, W,
            )),
            (multiply, (
                1, rows, columns, lora_columns, full, empty, bias, weights, out, order, offsets, tile_expert, tile_row,
                tiles, group, scale, W,
            )),
            (load, (
                of_x, of_weight, of_low, of_lora, rows, columns, lora_columns, full, empty, offsets, tile_expert,
                tile_row, tiles, group, W,
            )),
        ],
        [4, 1], [232, 24],  # warps and registers of the second and the third
    )  # fmt: skip


def hopper_reads(p: Product, x: Tensor, w: Tensor, lora: Tensor | None, w_tma: str) -> tuple[Read, Read] | None:
    """How `grouped_gemm_hopper_kernel` reads the weight and an adapter's; None if it does not support the product."""
    lora_tma = "" if lora is None else layout.tma_dimension(lora, 2, 1)
    if not (is_for_hopper(p) and w_tma and x.data_ptr() % 16 == 0) or (lora is not None and not lora_tma):
        return None
    return (w_tma, *others_of(w, w_tma)), ("", 0, 0) if lora is None else (lora_tma, *others_of(lora, lora_tma))


def others_of(w: Tensor, contiguous: str) -> tuple[int, int]:
    """The strides of a weight ``(E, N, K)`` in the dimensions in which it is not contiguous."""
    return w.stride(0), w.stride(1 if contiguous == "K" else 2)


@memo
def is_for_hopper(p: Product) -> bool:
    """Whether `grouped_gemm_hopper_kernel` supports a product, as far as this does not depend on the weights.

    Its tiles are large, and its descriptors cannot gather rows.
    """
    if not SUPPORTED or p.share or p.glu or p.element != 2 or layout.compute_capability(p.device.index or 0) != 90:
        return False
    aligned = p.x_row % 8 == 0 and p.R % 8 == 0
    return aligned and rows_of_tile(p.assignments, p.E) == ROWS.value and power_of_two(p.N) >= WIDTH.value


def hopper_plan(p: Product, weight: Read, lora: Read) -> Plan:
    """The launch of `grouped_gemm_hopper_kernel`."""
    stages = layout.shared_memory() // ((ROWS.value + WIDTH.value) * STEP.value * ELEMENT.value)
    work = Work(p.E, p.N, p.K, p.R, p.scatter, p.x_row, *weight, *lora, stages)
    programs = min(p.tiles * -(-p.N // WIDTH.value), layout.multiprocessors(p.device))
    group = min(16, power_of_two(p.assignments // (p.E * ROWS.value)))
    given = p.assignments, p.tiles, group, p.scale
    return Plan(grouped_gemm_hopper_kernel, programs, given, dict(WORK=work), 4)
