"""The gradients of the weights of experts: a grouped GEMM that reduces over the rows of every expert.

`expert_mlp` and `scattered_linear` call it. On Hopper GPUs, `grouped_weight_gradient_hopper` computes most of them.
Bytes moved: both operands once for each tile of the other's columns, the gradient once. The speed of the tensor cores
is the limit; with few rows per expert, it is writing the gradient.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from onepass.autotune.own import choose
from onepass.core.moe_options import Groups
from onepass.kernels import layout
from onepass.kernels.launch import Flat, Out, Plan, Rows, launch
from onepass.kernels.layout import power_of_two

try:
    from onepass.kernels.grouped_weight_gradient_hopper import hopper_plan, is_for_hopper
except ImportError:  # Gluon is an experimental part of Triton

    def is_for_hopper(*_: Any) -> bool:  # type: ignore[misc]
        """Refuse all gradients."""
        return False


VERSIONS = {"grouped_weight_gradient_kernel": 4}  # see `autotune.sources.identity_of`


@triton.jit
def next_step(
    offsets, tile, start, end, next_start, next_end, programs, E: tl.constexpr, TILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """The step after that which reads the rows from ``start`` on, of those of ``tile``, which end at ``end``.

    The tile after that has the rows from ``next_start`` to ``next_end``, which are loaded before they are needed.
    """
    last = start + BLOCK_M >= end
    start = tl.where(last, next_start, start + BLOCK_M)
    end = tl.where(last, next_end, end)
    tile = tl.where(last, tile + programs, tile)
    expert = tl.minimum((tile + programs) // TILES, E - 1)
    next_start = tl.load(offsets + expert)
    next_end = tl.load(offsets + expert + 1)
    return tile, start, end, next_start, next_end


@triton.jit
def load_rows(
    x, assignment, row, there, column, COLUMNS: tl.constexpr, SHARE: tl.constexpr, X_ROW: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """The rows of an operand that are ``there``, or their transpose; zeros elsewhere and beyond COLUMNS, if not 0."""
    source = (assignment // SHARE if SHARE > 0 else row).to(tl.int64) * X_ROW
    if TRANSPOSED:
        mask = there[None, :] if COLUMNS == 0 else there[None, :] & (column < COLUMNS)[:, None]
        place = source[None, :] + column[:, None]
    else:
        mask = there[:, None] if COLUMNS == 0 else there[:, None] & (column < COLUMNS)[None, :]
        place = source[:, None] + column[None, :]
    return tl.load(x + place, mask=mask, other=0.0)


@triton.jit
def grouped_weight_gradient_kernel(
    a: "Rows", b: "Rows", out: "Out", order: "Flat", offsets: "Flat",
    E: tl.constexpr, BLOCK_E: tl.constexpr, N: tl.constexpr, K: tl.constexpr, SHARE_A: tl.constexpr,
    SHARE_B: tl.constexpr, A_ROW: tl.constexpr, B_ROW: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_M: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """``out[e] = aᵀ @ b`` over the rows of expert e, the gradient of its weight. It is 0 for an expert without rows.

    Inputs: ``a`` ``(rows, N)`` and ``b`` ``(rows, K)``, where SHARE_A and SHARE_B consecutive assignments have the same
    row (0 if the rows are sorted by expert); ``order`` and ``offsets`` of `Groups`.
    Output: ``out`` ``(E, N, K)``.
    Bytes moved: see the module docstring.

    A program computes many tiles in one loop, whose steps are BLOCK_M rows of a tile, so that the first rows of the
    next tile are loaded while the last is computed and written. Which assignments a step reads is loaded two steps
    ahead. With TMA, a descriptor writes the tiles, which does not keep the program waiting.
    """
    K_TILES: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    TILES: tl.constexpr = K_TILES * ((N + BLOCK_N - 1) // BLOCK_N)
    if TMA:
        descriptor = tl.make_tensor_descriptor(out, [E, N, K], [N * K, K, 1], [1, BLOCK_N, BLOCK_K])
    tile = tl.program_id(0)
    programs = tl.num_programs(0)
    e = tl.arange(0, BLOCK_E)
    rows = tl.load(offsets + e + 1, mask=e < E, other=0) - tl.load(offsets + e, mask=e < E, other=0)
    # How many tiles of each expert this program computes: of every ``programs`` tiles one.
    before = programs - 1 - tile
    mine = ((e + 1) * TILES + before) // programs - (e * TILES + before) // programs
    steps = tl.sum(tl.where(e < E, mine * tl.maximum(tl.cdiv(rows, BLOCK_M), 1), 0))
    expert = tile // TILES
    start = tl.load(offsets + expert)
    end = tl.load(offsets + expert + 1)
    expert = tl.minimum((tile + programs) // TILES, E - 1)
    next_start = tl.load(offsets + expert)
    next_end = tl.load(offsets + expert + 1)
    GATHERED: tl.constexpr = SHARE_A > 0 or SHARE_B > 0
    A_COLUMNS: tl.constexpr = 0 if N % BLOCK_N == 0 else N  # 0: no mask is needed
    B_COLUMNS: tl.constexpr = 0 if K % BLOCK_K == 0 else K
    row = start + tl.arange(0, BLOCK_M)
    assignment = tl.load(order + row, mask=row < end, other=0) if GATHERED else row
    tile1, start1, end1, next_start, next_end = next_step(
        offsets, tile, start, end, next_start, next_end, programs, E, TILES, BLOCK_M
    )
    row = start1 + tl.arange(0, BLOCK_M)
    assignment1 = tl.load(order + row, mask=row < end1, other=0) if GATHERED else row
    zero = tl.program_id(1)
    acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for _ in tl.range(0, steps, num_stages=STAGES):
        n0 = tile % TILES // K_TILES * BLOCK_N
        k0 = tile % K_TILES * BLOCK_K
        n = n0 + tl.arange(0, BLOCK_N)
        k = k0 + tl.arange(0, BLOCK_K)
        row = start + tl.arange(0, BLOCK_M)
        there = row < end
        left = load_rows(a, assignment, row, there, n, A_COLUMNS, SHARE_A, A_ROW, True)
        right = load_rows(b, assignment, row, there, k, B_COLUMNS, SHARE_B, B_ROW, False)
        acc = tl.dot(left, right, acc, input_precision=PRECISION)
        if start + BLOCK_M >= end:  # the last step of this tile
            expert = tile // TILES
            found = acc.to(out.dtype.element_ty)
            if TMA:
                descriptor.store([expert, n0, k0], tl.reshape(found, (1, BLOCK_N, BLOCK_K)))
            else:
                at = out + expert.to(tl.int64) * (N * K) + n[:, None] * K + k[None, :]
                tl.store(at, found, mask=(n < N)[:, None] & (k < K)[None, :])
            acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
        # Triton pipelines no loop that passes a value on unchanged.
        tile = tile1 + zero
        start = start1 + zero
        end = end1 + zero
        tile1, start1, end1, next_start, next_end = next_step(
            offsets, tile1, start1, end1, next_start, next_end, programs, E, TILES, BLOCK_M
        )
        if GATHERED:
            assignment = assignment1 + zero
            row = start1 + tl.arange(0, BLOCK_M)
            assignment1 = tl.load(order + row, mask=row < end1, other=0)


def weight_gradient(
    a: Tensor,
    b: Tensor,
    like: Tensor,
    groups: Groups,
    *,
    share_a: int = 0,
    share_b: int = 0,
    transposed: bool = False,
) -> Tensor:
    """Launch `grouped_weight_gradient_kernel`, and return a gradient like ``like``.

    It is ``(E, N, K)``, or ``(E, K, N)`` if ``transposed``. ``share_a`` and ``share_b`` are SHARE_A and SHARE_B of the
    kernel.
    """
    if transposed:
        a, b, share_a, share_b = b, a, share_b, share_a
    out = torch.empty_like(like, memory_format=torch.contiguous_format)
    if not out.numel():
        return out
    shape, order, offsets = tuple(out.shape), groups.order, groups.offsets
    if (share_a == 0) != (share_b == 0):
        name, x, y = ("a", a, b) if share_a == 0 else ("b", b, a)
        if layout.tma_dimension(x, 1, 0, only_k=True) and is_for_hopper(shape, name == "a", y):
            product = shape, (x.stride(0), y.stride(0)), share_a + share_b, name == "a", len(order), a.device
            launch(hopper_plan, product, (x, y, out, order, offsets))
            return out
    about = shape, (a.stride(0), b.stride(0)), (share_a, share_b), a.element_size(), len(order), a.device
    launch(weight_gradient_plan, about, (a, b, out, order, offsets))
    return out


def weight_gradient_plan(
    shape: tuple[int, ...],
    rows: tuple[int, int],
    shares: tuple[int, int],
    element: int,
    assignments: int,
    device: torch.device,
) -> Plan:
    """The launch of `grouped_weight_gradient_kernel`."""
    E, N, K = shape
    hopper = layout.compute_capability() == 90 and element == 2  # tensor cores read both operands from shared memory
    block_n, block_k = (max(16, min(256 // element, power_of_two(n))) for n in (N, K))
    block_m = 128 // element
    # Larger tiles read the operands less often, and smaller ones, of which two programs share a multiprocessor, wait
    # less between tiles. Those of 256 columns are faster along the smaller dimension. Measured on an H100 and an H200.
    wide = hopper and min(N, K) > 128 and K * element % 16 == 0 and assignments >= 1024 * E
    if wide:
        block_n, block_k = (256, 128) if N < K else (128, 256)
    of_step, of_result = (block_n + block_k) * block_m * element, block_n * block_k * element // (1 if wide else 2)
    most = (layout.shared_memory() - of_result) // of_step
    key = {"rows": assignments, "experts": E, "columns": N, "inner": K, "read": "outer"} | layout.elements(element)
    numbers = choose(grouped_weight_gradient_kernel, key, dict(BLOCK_M=block_m, STAGES=max(2, min(3, most))))
    constexprs = dict(
        E=E, BLOCK_E=power_of_two(E), N=N, K=K, SHARE_A=shares[0], SHARE_B=shares[1], A_ROW=rows[0], B_ROW=rows[1],
        BLOCK_N=block_n, BLOCK_K=block_k, **numbers, PRECISION=layout.precision(), TMA=wide,
    )  # fmt: skip
    of_loop = of_step // block_m * numbers["BLOCK_M"] * numbers["STAGES"]
    fit = 1 if wide else 2 * 128 * 128 // (block_n * block_k)  # by registers
    at_once = max(1, min(8, fit, layout.shared_memory() // (of_loop + of_result)))
    programs = min(E * -(-N // block_n) * -(-K // block_k), at_once * layout.multiprocessors(device))
    return Plan(grouped_weight_gradient_kernel, programs, (), constexprs, 4 if hopper and not wide else 8)
