"""The gradients of the weights of experts: a grouped GEMM that reduces over the rows of every expert.

`expert_mlp` and `scattered_linear` call it. Bytes moved: both operands once for each tile of the other's columns, the
gradient once. L2 bandwidth is the limit.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from onepass.autotune.own import choose
from onepass.core.moe_options import Groups
from onepass.kernels import layout
from onepass.kernels.launch import Flat, Plan, Rows, Strided, launch
from onepass.kernels.layout import power_of_two

Strides = tuple[int, ...]


@triton.jit
def grouped_weight_gradient_kernel(
    a: "Rows", b: "Rows", out: "Strided", order: "Flat", offsets: "Flat",
    E: tl.constexpr, N: tl.constexpr, K: tl.constexpr, SHARE_A: tl.constexpr, SHARE_B: tl.constexpr,
    A_ROW: tl.constexpr, B_ROW: tl.constexpr, O_E: tl.constexpr, O_N: tl.constexpr, O_K: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """``out[e] = aᵀ @ b`` over the rows of expert e, the gradient of its weight. It is 0 for an expert without rows.

    Inputs: ``a`` ``(rows, N)`` and ``b`` ``(rows, K)``, where SHARE_A and SHARE_B consecutive assignments have the same
    row (0 if the rows are sorted by expert); ``order`` and ``offsets`` of `Groups`.
    Output: ``out`` ``(E, N, K)``, any strides.
    Bytes moved: see the module docstring.
    """
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
        assignment = row
        if SHARE_A > 0 or SHARE_B > 0:
            assignment = tl.load(order + row, mask=there, other=0)
        a_row = (assignment // SHARE_A if SHARE_A > 0 else row).to(tl.int64) * A_ROW
        b_row = (assignment // SHARE_B if SHARE_B > 0 else row).to(tl.int64) * B_ROW
        left = tl.load(a + a_row[None, :] + n[:, None], mask=there[None, :] & (n < N)[:, None], other=0.0)
        right = tl.load(b + b_row[:, None] + k[None, :], mask=there[:, None] & (k < K)[None, :], other=0.0)
        acc = tl.dot(left, right, acc, input_precision=PRECISION)
    at = out + expert.to(tl.int64) * O_E + n[:, None] * O_N + k[None, :] * O_K
    tl.store(at, acc.to(out.dtype.element_ty), mask=(n < N)[:, None] & (k < K)[None, :])


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
    found = torch.empty_like(like, memory_format=torch.contiguous_format)
    out = found.mT if transposed else found
    strides = out.stride(), a.stride(0), b.stride(0)
    about = tuple(out.shape), strides, (share_a, share_b), a.element_size(), len(groups.order)
    launch(weight_gradient_plan, about, (a, b, out, groups.order, groups.offsets))
    return found


def weight_gradient_plan(
    shape: Strides,
    strides: tuple[Strides, int, int],
    shares: tuple[int, int],
    element: int,
    assignments: int,
) -> Plan:
    """The launch of `grouped_weight_gradient_kernel`."""
    (E, N, K), (of_out, a_row, b_row) = shape, strides
    block_n, block_k = (max(16, min(256 // element, power_of_two(n))) for n in (N, K))
    key = {"rows": assignments, "experts": E, "columns": N, "inner": K, "read": "outer"} | layout.elements(element)
    block_m = 128 // element
    most = layout.shared_memory() // ((block_n + block_k) * block_m * element)
    numbers = choose(grouped_weight_gradient_kernel, key, dict(BLOCK_M=block_m, STAGES=max(2, min(3, most))))
    constexprs = dict(
        E=E, N=N, K=K, SHARE_A=shares[0], SHARE_B=shares[1], A_ROW=a_row, B_ROW=b_row,
        O_E=of_out[0], O_N=of_out[1], O_K=of_out[2], BLOCK_N=block_n, BLOCK_K=block_k, **numbers,
        PRECISION=layout.precision(),
    )  # fmt: skip
    programs = E * -(-N // block_n) * -(-K // block_k)
    hopper = layout.compute_capability() == 90  # its tensor cores read both operands from shared memory
    warps = 4 if element == 2 and hopper else 8
    return Plan(grouped_weight_gradient_kernel, programs, (), constexprs, warps)
