"""The GEMM of `few_rows_mm` on Hopper GPUs, for a reduction over at most 256 rows.

A usual GEMM loads both operands of every tile from the L2 cache, and with so few rows, it takes longer to load and
store a tile than to compute it. Here each program keeps a strip of ``b``, which is WIDTH of its columns, in shared
memory. It loads tiles of ``a`` only, and results are stored from shared memory while the warps compute the next. As in
`grouped_gemm_hopper`, one warp loads, and two groups of four warps multiply, each for half of a tile. Consecutive
programs have different strips and the same tiles, so that whole rows of the result are written at about the same time.

Triton's interpreter does not run Gluon.

Bytes moved: ``a``, ``b`` and the result once, and ``a`` once for each strip of ``b`` from the L2 cache. Up to about 200
rows, writing the result is the limit; above, the speed of the tensor cores.
"""

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from onepass.kernels import layout
from onepass.kernels.grouped_weight_gradient_hopper import tiles_of
from onepass.kernels.hopper_tiles import ELEMENT, STEP, SUPPORTED
from onepass.kernels.launch import Out, Plan, Rows, is_lazy

# Columns of ``a`` in a tile, of which each group of warps has half; columns of ``b`` in a strip, and how many of these
# are stored at once.
TILE, WIDTH, STORED = gl.constexpr(128), gl.constexpr(256), gl.constexpr(128)
HALF = gl.constexpr(TILE.value // 2)
MOST_STAGES = 8
# Torch computes products of fewer elements or rows faster (H200). Of more rows, shared memory holds few stages or none.
LEAST, LEAST_ROWS, MOST_ROWS = 1 << 27, 65, 256
# The least product of two shares: of the multiprocessors that have a program, and of the strips' columns that exist.
BUSY = 0.8


class Work(NamedTuple):
    """The constants of the kernel: its sizes, the strides of rows, and how many parts of STEP rows there are."""

    V: int
    H: int
    A_ROW: int
    B_ROW: int
    PARTS: int
    STAGES: int


@gluon.jit
def place(W: gl.constexpr):
    """Of this program: the first column of its strip, its first tile, and the distance to its next ones."""
    STRIPS: gl.constexpr = tiles_of(W.H, WIDTH)
    return gl.program_id(0) % STRIPS * WIDTH, gl.program_id(0) // STRIPS, gl.num_programs(0) // STRIPS


@gluon.jit
def store(part, of_out, result, v0, h0):
    """Store columns of the result from shared memory, asynchronously."""
    tma.store_wait(0)  # until the columns before have been read from there
    result.store(part.to(result.dtype))
    hopper.fence_async_shared()
    tma.async_copy_shared_to_global(of_out, [v0, h0], result)


@gluon.jit
def multiply(which: gl.constexpr, ring, strip, barriers, of_out, results, W: gl.constexpr):
    """Compute and store the first (0) or the second (1) half of each tile."""
    full, empty, strip_full = barriers
    PARTS: gl.constexpr = W.PARTS
    of_acc: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    h0, first, distance = place(W)
    step = 0
    mbarrier.wait(strip_full, 0)
    for tile in range(first, tiles_of(W.V, TILE), distance):
        acc = gl.zeros((HALF, WIDTH), gl.float32, of_acc)
        for part in gl.static_range(PARTS):
            stage = step % W.STAGES
            mbarrier.wait(full.index(stage), step // W.STAGES & 1)
            a = ring.index(stage).slice(which * HALF, HALF, 1)
            acc = hopper.warpgroup_mma(a.permute((1, 0)), strip.index(part), acc)
            mbarrier.arrive(empty.index(stage), count=1)
            step += 1
        v0 = tile * TILE + which * HALF
        left, right = gl.split(acc.reshape((HALF, 2, STORED)).permute((0, 2, 1)))
        store(left, of_out, results.index(which), v0, h0)
        store(right, of_out, results.index(which), v0, h0 + STORED)
    tma.store_wait(0)


@gluon.jit
def load(of_a, of_b, ring, strip, barriers, W: gl.constexpr):
    """Load the strip of ``b``, and the tiles of ``a`` in the order in which `multiply` takes them."""
    full, empty, strip_full = barriers
    PARTS: gl.constexpr = W.PARTS
    h0, first, distance = place(W)
    mbarrier.expect(strip_full, PARTS * STEP * WIDTH * ELEMENT)
    for part in gl.static_range(PARTS):
        tma.async_copy_global_to_shared(of_b, [part * STEP, h0], strip_full, strip.index(part))
    step = 0
    for tile in range(first, tiles_of(W.V, TILE), distance):
        for part in gl.static_range(PARTS):
            stage = step % W.STAGES
            mbarrier.wait(empty.index(stage), step // W.STAGES & 1 ^ 1)
            mbarrier.expect(full.index(stage), STEP * TILE * ELEMENT)
            tma.async_copy_global_to_shared(of_a, [part * STEP, tile * TILE], full.index(stage), ring.index(stage))
            step += 1


@gluon.jit(do_not_specialize=["rows"])
def few_rows_mm_kernel(a: "Rows", b: "Rows", out: "Out", rows: tl.int32, WORK: tl.constexpr):
    """``out = a.T @ b``.

    Inputs: ``a`` ``(rows, V)`` and ``b`` ``(rows, H)``, of a dtype of 16 bits. Beyond their rows and columns,
    descriptors load zeros.
    Output: ``out`` ``(V, H)``.
    Bytes moved: see the module docstring.
    """
    W: gl.constexpr = WORK
    PARTS: gl.constexpr = W.PARTS
    STAGES: gl.constexpr = W.STAGES
    V: gl.constexpr = W.V
    H: gl.constexpr = W.H
    A_ROW: gl.constexpr = W.A_ROW
    B_ROW: gl.constexpr = W.B_ROW
    flat: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    dtype: gl.constexpr = a.dtype.element_ty
    ring = gl.allocate_shared_memory(dtype, [STAGES, STEP, TILE], flat)
    strip = gl.allocate_shared_memory(dtype, [PARTS, STEP, WIDTH], flat)
    results = gl.allocate_shared_memory(dtype, [2, HALF, STORED], flat)
    of_a = tma.make_tensor_descriptor(a, [rows, V], [A_ROW, 1], [STEP, TILE], flat)
    of_b = tma.make_tensor_descriptor(b, [rows, H], [B_ROW, 1], [STEP, WIDTH], flat)
    of_out = tma.make_tensor_descriptor(out, [V, H], [H, 1], [HALF, STORED], flat)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    strip_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(strip_full, count=1)
    for n in gl.static_range(STAGES):
        mbarrier.init(full.index(n), count=1)
        mbarrier.init(empty.index(n), count=2)
    hopper.fence_async_shared()
    barriers = (full, empty, strip_full)
    gl.warp_specialize(
        [
            (multiply, (0, ring, strip, barriers, of_out, results, W)),
            (multiply, (1, ring, strip, barriers, of_out, results, W)),
            (load, (of_a, of_b, ring, strip, barriers, W)),
        ],
        [4, 1], [240, 24],
    )  # fmt: skip


def is_for_hopper(a: Tensor, b: Tensor) -> bool:
    """Whether this kernel computes ``a.t() @ b``, and faster than torch.

    If the dtypes or the numbers of rows differ, it does not, so that the caller gets the error of torch.
    """
    (rows, V), H = a.shape, b.shape[1]
    if a.dtype != b.dtype or rows != len(b) or is_lazy(a) or is_lazy(b):
        return False
    if not SUPPORTED or not LEAST_ROWS <= rows <= MOST_ROWS or V * H < LEAST or H % 8:
        return False
    if a.dtype not in (torch.bfloat16, torch.float16) or layout.compute_capability(a.device.index or 0) != 90:
        return False
    width = tiles_of(H, WIDTH.value) * WIDTH.value
    if programs_of(H, a.device) * H < BUSY * layout.multiprocessors(a.device) * width:
        return False
    return all([layout.tma_dimension(x, 1, 0, only_k=True) for x in (a, b)])


def programs_of(H: int, device: torch.device) -> int:
    """As many programs for each strip of ``b`` as there are multiprocessors for."""
    strips: int = tiles_of(H, WIDTH.value)
    return layout.multiprocessors(device) // strips * strips


def hopper_plan(rows: int, V: int, H: int, strides: tuple[int, int], device: torch.device) -> Plan:
    """The launch of `few_rows_mm_kernel`. ``strides``: those of the rows of ``a`` and ``b``."""
    parts = -(-rows // STEP.value)
    of_strip, of_results = parts * STEP.value * WIDTH.value, TILE.value * STORED.value
    of_compiler = 1024  # bytes of barriers and descriptors, at most
    left = layout.shared_memory() - of_compiler - (of_strip + of_results) * ELEMENT.value
    stages = min(MOST_STAGES, left // (STEP.value * TILE.value * ELEMENT.value))
    work = Work(V, H, *strides, parts, stages)
    return Plan(few_rows_mm_kernel, programs_of(H, device), (rows,), dict(WORK=work), 4)
