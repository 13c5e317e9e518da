"""The grouped GEMM of `grouped_weight_gradient` on Hopper GPUs, for one operand whose rows are sorted by expert.

The warps of a program have different roles, as in `grouped_gemm_hopper`: four load the rows of each step into a ring of
stages in shared memory, and two groups of four multiply them, each for half of a tile. A descriptor stores the result
from shared memory, so that they go on with the next tile, whose rows are loaded already.

Triton's interpreter does not run Gluon. `grouped_weight_gradient_kernel` computes the same gradients, and those that
this kernel does not support.

Bytes moved: as in `grouped_weight_gradient`.
"""

from typing import NamedTuple

import torch
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, tma

from onepass.kernels import layout
from onepass.kernels.hopper_tiles import ELEMENT, STEP, SUPPORTED
from onepass.kernels.launch import Flat, Out, Plan, Rows

# Columns of a tile: of the operand that is sorted, and of the other, whose rows are gathered.
SORTED, GATHERED = gl.constexpr(256), gl.constexpr(128)
FEW = gl.constexpr(32)  # if a step has at most so many rows, only these are multiplied


class Gradient(NamedTuple):
    """The constants of the kernel, named as in `grouped_weight_gradient_kernel`."""

    E: int
    N: int
    K: int
    OF_A: bool  # whether the rows of ``a`` are sorted, or those of ``b``
    SHARE: int
    SORTED_ROW: int
    GATHERED_ROW: int
    STAGES: int


@gluon.constexpr_function
def tiles_of(columns, width):
    return (columns + width - 1) // width


@gluon.jit
def multiply(
    which: gl.constexpr, of_sorted, of_gathered, full, empty, of_out, results, offsets, G: gl.constexpr
):  # fmt: skip
    """Compute and store the first (0) or the second (1) half of each tile."""
    STAGES: gl.constexpr = G.STAGES
    OF_A: gl.constexpr = G.OF_A
    BLOCK_N: gl.constexpr = SORTED if OF_A else GATHERED
    BLOCK_K: gl.constexpr = GATHERED if OF_A else SORTED
    HALF: gl.constexpr = BLOCK_N // 2
    K_TILES: gl.constexpr = tiles_of(G.K, BLOCK_K)
    TILES: gl.constexpr = K_TILES * tiles_of(G.N, BLOCK_N)
    of_acc: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_K, 16])
    result = results.index(which)
    step = 0
    for tile in range(gl.program_id(0), G.E * TILES, gl.num_programs(0)):
        expert = tile // TILES
        begin = gl.load(offsets + expert)
        end = gl.load(offsets + expert + 1)
        acc = gl.zeros((HALF, BLOCK_K), gl.float32, of_acc)
        for start in range(begin, end, STEP):
            stage = step % STAGES
            mbarrier.wait(full.index(stage), step // STAGES & 1)
            hopper.fence_async_shared()  # as for gathered rows in `grouped_gemm_hopper`
            if OF_A:
                a = of_sorted.index(stage).slice(which * HALF, HALF, 1)
                b = of_gathered.index(stage)
            else:
                a = of_gathered.index(stage).slice(which * HALF, HALF, 1)
                b = of_sorted.index(stage)
            if end - start > FEW:
                acc = hopper.warpgroup_mma(a.permute((1, 0)), b, acc)
            else:
                acc = hopper.warpgroup_mma(a.slice(0, FEW).permute((1, 0)), b.slice(0, FEW), acc)
            mbarrier.arrive(empty.index(stage), count=1)
            step += 1
        tma.store_wait(0)  # until the tile before has been read
        result.store(acc.to(result.dtype))
        hopper.fence_async_shared()
        n0 = tile % TILES // K_TILES * BLOCK_N + which * HALF
        whole = result._reinterpret(result.dtype, [1, HALF, BLOCK_K], gl.NVMMASharedLayout(128, 16, 3))
        tma.async_copy_shared_to_global(of_out, [expert, n0, tile % K_TILES * BLOCK_K], whole)
    tma.store_wait(0)


@gluon.jit
def load(x, of_x, y, of_sorted, of_gathered, full, empty, order, offsets, G: gl.constexpr):
    """Load what `multiply` multiplies, in its order: the sorted rows of ``x``, and rows of ``y``.

    A descriptor has no mask. So the sorted rows of the last step of an expert are copied with one, as the gathered rows
    are, and no row of the next expert is read.
    """
    STAGES: gl.constexpr = G.STAGES
    OF_A: gl.constexpr = G.OF_A
    K_TILES: gl.constexpr = tiles_of(G.K, GATHERED if OF_A else SORTED)
    TILES: gl.constexpr = K_TILES * tiles_of(G.N, SORTED if OF_A else GATHERED)
    SORTED_COLUMNS: gl.constexpr = G.N if OF_A else G.K
    GATHERED_COLUMNS: gl.constexpr = G.K if OF_A else G.N
    of_rows: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    step = 0
    for tile in range(gl.program_id(0), G.E * TILES, gl.num_programs(0)):
        expert = tile // TILES
        begin = gl.load(offsets + expert)
        end = gl.load(offsets + expert + 1)
        if OF_A:
            first = tile % TILES // K_TILES * SORTED
            second = tile % K_TILES * GATHERED
        else:
            first = tile % K_TILES * SORTED
            second = tile % TILES // K_TILES * GATHERED
        column = second + gl.arange(0, GATHERED, gl.SliceLayout(0, of_rows))
        inside = (column < GATHERED_COLUMNS)[None, :]
        row = begin + gl.arange(0, STEP, gl.SliceLayout(1, of_rows))
        assignment = gl.load(order + row, mask=row < end, other=0)
        for start in range(begin, end, STEP):
            there = (row < end)[:, None]
            at = y + (assignment // G.SHARE).to(gl.int64)[:, None] * G.GATHERED_ROW + column[None, :]
            row += STEP
            assignment = gl.load(order + row, mask=row < end, other=0)  # before it is needed
            stage = step % STAGES
            mbarrier.wait(empty.index(stage), step // STAGES & 1 ^ 1)
            if start + STEP <= end:
                mbarrier.expect(full.index(stage), STEP * SORTED * ELEMENT)
                tma.async_copy_global_to_shared(of_x, [start, first], full.index(stage), of_sorted.index(stage))
            else:
                sorted_column = first + gl.arange(0, SORTED, gl.SliceLayout(0, of_rows))
                own = start + gl.arange(0, STEP, gl.SliceLayout(1, of_rows))
                at_own = x + own.to(gl.int64)[:, None] * G.SORTED_ROW + sorted_column[None, :]
                mask = (own < end)[:, None] & (sorted_column < SORTED_COLUMNS)[None, :]
                async_copy.async_copy_global_to_shared(of_sorted.index(stage), at_own, mask=mask)
                mbarrier.arrive(full.index(stage), count=1)
            async_copy.async_copy_global_to_shared(of_gathered.index(stage), at, mask=there & inside)
            async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
            step += 1


@gluon.jit(do_not_specialize=["assignments"])
def grouped_weight_gradient_hopper_kernel(
    x: "Rows", y: "Rows", out: "Out", order: "Flat", offsets: "Flat",
    assignments: tl.int32,
    WORK: tl.constexpr,
):  # fmt: skip
    """The results of `grouped_weight_gradient_kernel` for 16-bit operands.

    Inputs: ``x`` ``(assignments, ...)``, the operand whose rows are sorted, and ``y``, the other; ``order`` and
    ``offsets`` of `Groups`.
    Output: ``out`` ``(E, N, K)``.
    Bytes moved: see the module docstring.
    """
    G: gl.constexpr = WORK
    STAGES: gl.constexpr = G.STAGES
    E: gl.constexpr = G.E
    N: gl.constexpr = G.N
    K: gl.constexpr = G.K
    HALF: gl.constexpr = SORTED // 2 if G.OF_A else GATHERED // 2
    BLOCK_K: gl.constexpr = GATHERED if G.OF_A else SORTED
    COLUMNS: gl.constexpr = G.N if G.OF_A else G.K
    ROW: gl.constexpr = G.SORTED_ROW
    flat: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    dtype: gl.constexpr = x.dtype.element_ty
    of_sorted = gl.allocate_shared_memory(dtype, [STAGES, STEP, SORTED], flat)
    of_gathered = gl.allocate_shared_memory(dtype, [STAGES, STEP, GATHERED], flat)
    of_x = tma.make_tensor_descriptor(x, [assignments, COLUMNS], [ROW, 1], [STEP, SORTED], flat)
    of_out = tma.make_tensor_descriptor(
        out, [E, N, K], [N * K, K, 1], [1, HALF, BLOCK_K], gl.NVMMASharedLayout(128, 16, 3)
    )  # fmt: skip
    results = gl.allocate_shared_memory(dtype, [2, HALF, BLOCK_K], flat)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(STAGES):
        mbarrier.init(full.index(n), count=129)  # the descriptor, and threads that gather
        mbarrier.init(empty.index(n), count=2)
    hopper.fence_async_shared()
    gl.warp_specialize(
        [
            (multiply, (0, of_sorted, of_gathered, full, empty, of_out, results, offsets, G)),
            (multiply, (1, of_sorted, of_gathered, full, empty, of_out, results, offsets, G)),
            (load, (x, of_x, y, of_sorted, of_gathered, full, empty, order, offsets, G)),
        ],
        [4, 4], [216, 72],
    )  # fmt: skip


def is_for_hopper(shape: tuple[int, ...], of_a: bool, gathered: torch.Tensor) -> bool:
    """Whether `grouped_weight_gradient_hopper_kernel` computes a gradient of this shape.

    Args:
        of_a: whether the rows of ``a`` are the sorted ones. A descriptor must be able to load them.
        gathered: the other operand.
    """
    if not SUPPORTED or gathered.element_size() != ELEMENT.value:
        return False
    wide, narrow = shape[1:] if of_a else shape[:0:-1]
    large = wide > SORTED.value // 2 and narrow > GATHERED.value // 2
    aligned = not any(n % 8 for n in (*shape[1:], gathered.stride(0))) and gathered.data_ptr() % 16 == 0
    return large and aligned and layout.compute_capability(gathered.device.index or 0) == 90


def hopper_plan(
    shape: tuple[int, ...], rows: tuple[int, int], share: int, of_a: bool, assignments: int, device: torch.device
) -> Plan:
    """The launch of `grouped_weight_gradient_hopper_kernel`. ``rows``: the strides of ``x`` and ``y``."""
    E, N, K = shape
    block_n, block_k = (SORTED.value, GATHERED.value)[:: 1 if of_a else -1]
    of_step, of_result = (n * ELEMENT.value for n in ((block_n + block_k) * STEP.value, block_n * block_k))
    stages = (layout.shared_memory() - of_result) // of_step
    work = Gradient(E, N, K, of_a, share, *rows, stages)
    programs = min(E * -(-N // block_n) * -(-K // block_k), layout.multiprocessors(device))
    return Plan(grouped_weight_gradient_hopper_kernel, programs, (assignments,), dict(WORK=work), 4)
