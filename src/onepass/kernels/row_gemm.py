"""A GEMM whose rows do not depend on each other, not even in their last bits: for the batch-invariant mode.

`logits.head`, `logits.gradients` and `logits.invariant_linear` call it. The size of the tiles and the order of the sum
follow from the columns and the inner dimension alone. Bytes moved: a row once for each tile of columns, the second
operand once for each tile of rows, the result once. The rate of the tensor cores is the limit.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from onepass.kernels import layout
from onepass.kernels.launch import Flat, Plan, Rows, Strided, launch

GROUP = 16  # tiles of rows that read the same columns at about the same time


class Gemm(NamedTuple):
    """How a product ``(rows, K) @ (K, N)`` is computed, known when a kernel is compiled."""

    N: int
    K: int
    A_ROW: int  # strides of the operands
    B_K: int
    B_N: int
    TMA: str  # the dimension in which the second operand is contiguous if descriptors load them; else empty
    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    STAGES: int
    PRECISION: str


@triton.jit
def operands(a, b, rows, GEMM: tl.constexpr):
    """The two operands as `product` takes them: descriptors with TMA, else pointers."""
    N: tl.constexpr = GEMM.N
    K: tl.constexpr = GEMM.K
    of_a, of_b = a, b
    if GEMM.TMA != "":
        of_a = tl.make_tensor_descriptor(a, [rows, K], [GEMM.A_ROW, 1], [GEMM.BLOCK_M, GEMM.BLOCK_K])
    if GEMM.TMA == "K":
        of_b = tl.make_tensor_descriptor(b, [N, K], [GEMM.B_N, 1], [GEMM.BLOCK_N, GEMM.BLOCK_K])
    elif GEMM.TMA == "N":
        of_b = tl.make_tensor_descriptor(b, [K, N], [GEMM.B_K, 1], [GEMM.BLOCK_K, GEMM.BLOCK_N])
    return of_a, of_b


@triton.jit
def place_of(work, m_tiles, N_TILES: tl.constexpr, group):
    """The tile of rows and of columns of a unit of work.

    The tiles of a ``group`` of rows come before the next columns. They read the same columns of the second operand at
    about the same time, so that these stay in the cache.
    """
    begin = work // (group * N_TILES) * group
    height = tl.minimum(m_tiles - begin, group)
    return begin + work % (group * N_TILES) % height, work % (group * N_TILES) // height


@triton.jit
def separate(acc, PTX: tl.constexpr):
    """``acc``, to which a product will be added, with each number in a register of its own, for NVIDIA GPUs (PTX).

    The rows of a bias are equal, and Triton keeps those of a thread in one register. On Hopper it then copies it to the
    others after the fence before a product of tensor cores (``wgmma.fence``), for which PTX does not define the result
    (Triton 3.6 and 3.7).
    """
    if PTX:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [acc], tl.float32, is_pure=False, pack=1)
    return acc


@triton.jit
def product(of_a, of_b, rows, m0, n0, GEMM: tl.constexpr):
    """The tile ``[BLOCK_M, BLOCK_N]`` of the product from row ``m0`` and column ``n0`` on, in float32."""
    N: tl.constexpr = GEMM.N
    K: tl.constexpr = GEMM.K
    BLOCK_M: tl.constexpr = GEMM.BLOCK_M
    BLOCK_N: tl.constexpr = GEMM.BLOCK_N
    row = (m0 + tl.arange(0, BLOCK_M))[:, None]
    n = (n0 + tl.arange(0, BLOCK_N))[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k0 in tl.range(0, K, GEMM.BLOCK_K, num_stages=GEMM.STAGES):
        if GEMM.TMA != "":
            x = of_a.load([m0, k0])
            y = of_b.load([n0, k0]).T if GEMM.TMA == "K" else of_b.load([k0, n0])
        else:
            k = k0 + tl.arange(0, GEMM.BLOCK_K)
            at = row.to(tl.int64) * GEMM.A_ROW + k[None, :]
            x = tl.load(of_a + at, mask=(row < rows) & (k[None, :] < K), other=0.0)
            at = k[:, None].to(tl.int64) * GEMM.B_K + n.to(tl.int64) * GEMM.B_N
            y = tl.load(of_b + at, mask=(k[:, None] < K) & (n < N), other=0.0)
        acc = tl.dot(x, y, acc, input_precision=GEMM.PRECISION)
    return acc


@triton.jit(do_not_specialize=["rows"])
def row_gemm_kernel(
    a: "Rows", b: "Strided", bias: "Flat", out: "Rows", rows: tl.int32,
    GEMM: tl.constexpr, OUT_ROW: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """``out = a @ b + bias``, summed in float32 and rounded once.

    Inputs: ``a`` ``(rows, K)``, ``b`` ``(K, N)``, ``bias`` ``(N,)`` or None. Output: ``out`` ``(rows, N)``.
    """
    N: tl.constexpr = GEMM.N
    BLOCK_M: tl.constexpr = GEMM.BLOCK_M
    BLOCK_N: tl.constexpr = GEMM.BLOCK_N
    M_TILES = tl.cdiv(rows, BLOCK_M)
    N_TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    of_a, of_b = operands(a, b, rows, GEMM)
    for work in tl.range(tl.program_id(0), M_TILES * N_TILES, tl.num_programs(0), flatten=True):
        m_tile, n_tile = place_of(work, M_TILES, N_TILES, GROUP)
        row = (m_tile * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
        n = (n_tile * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
        acc = product(of_a, of_b, rows, m_tile * BLOCK_M, n_tile * BLOCK_N, GEMM)
        if bias is not None:
            acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
        to = out + row.to(tl.int64) * OUT_ROW + n
        tl.store(to, acc.to(out.dtype.element_ty), mask=(row < rows) & (n < N))


def plan_for(
    sizes: tuple[int, int, int],
    strides: tuple[int, int, int, int],
    elements: tuple[int, int],
    tma: str,
    device: torch.device,
) -> Plan:
    """The launch of `row_gemm_kernel`; ``elements`` are the sizes of those of operands and result.

    Nothing but the number of programs depends on the number of rows.
    """
    (rows, N, K), (element, of_out) = sizes, elements
    wide = tma and N > 128 and of_out == 2  # a float32 result of this width does not fit beside the operands
    block_m, block_n, block_k = (128, 256 if wide else 128, 64) if element == 2 else (64, 64, 32)
    stages = min(3 if wide else 4, layout.shared_memory() // ((block_m + block_n) * block_k * element))
    gemm = Gemm(N, K, *strides[:3], tma, block_m, block_n, block_k, stages, layout.precision())
    constexprs = dict(GEMM=gemm, OUT_ROW=strides[3], GROUP=GROUP)
    warps = 8 if wide or (element == 2 and not tma) else 4  # addresses of elements take registers
    at_once = max(1, layout.shared_memory() // ((block_m + block_n) * block_k * element * stages))
    tiles = -(-rows // block_m) * -(-N // block_n)
    programs = min(tiles, at_once * layout.multiprocessors(device))
    return Plan(row_gemm_kernel, programs, (rows,), constexprs, warps)


def row_gemm(a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Write ``a @ b + bias`` to ``out``, whose last dimension is contiguous. ``a`` is copied if its own is not.

    All operands have one dtype; that of ``out`` may be float32.
    """
    rows, K = a.shape
    N = b.shape[1]
    if not rows:
        return
    tma = layout.tma_dimension(b, 0, 1)
    a = a if a.stride(1) == 1 else a.contiguous()
    a = with_aligned_rows(a) if tma else a
    strides = a.stride(0), *b.stride(), out.stride(0)
    about = (rows, N, K), strides, (a.element_size(), out.element_size()), tma, a.device
    launch(plan_for, about, (a, b, bias, out))


def with_aligned_rows(a: Tensor) -> Tensor:
    """``a``, copied unless its rows are contiguous, do not overlap, and begin on 16 bytes, as descriptors need them."""
    (rows, K), size = a.shape, a.element_size()
    if a.stride(0) * size % 16 or a.data_ptr() % 16 or a.stride(1) != 1 or a.stride(0) < K:
        a = a.new_empty(rows, -(-K * size // 16) * 16 // size)[:, :K].copy_(a)
    return a
