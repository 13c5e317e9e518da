"""Rows that processes exchange: copied for the assignments that are sent, and summed over those of each token.

`integrations.expert_exchange` calls them. Each is the gradient of the other.

Bytes moved: each row of the assignments once, each row of the tokens once.
"""

import triton
import triton.language as tl
from torch import Tensor

from onepass.kernels.launch import Flat, Out, Plan, launch
from onepass.kernels.layout import power_of_two


@triton.jit(do_not_specialize=["rows"])
def gather_rows_kernel(
    x: "Flat", order: "Flat", out: "Out",
    rows: tl.int32,
    N: tl.constexpr, SHARE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """``out[i] = x[order[i] // SHARE]``: SHARE consecutive assignments have the same row.

    Inputs: ``x`` ``(T, N)``; ``order`` ``(rows,)``.
    Output: ``out`` ``(rows, N)``.
    Bytes moved: see the module docstring.
    """
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    there = row < rows
    source = (tl.load(order + row, mask=there, other=0) // SHARE).to(tl.int64)
    for begin in range(0, N, BLOCK_N):
        n = begin + tl.arange(0, BLOCK_N)[None, :]
        mask = there[:, None] & (n < N)
        part = tl.load(x + source[:, None] * N + n, mask=mask, other=0.0)
        tl.store(out + row.to(tl.int64)[:, None] * N + n, part, mask=mask)


@triton.jit(do_not_specialize=["rows"])
def sum_rows_kernel(
    y: "Flat", places: "Flat", out: "Out",
    rows: tl.int32,
    N: tl.constexpr, TOPK: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """``out[t]`` is the sum of the rows ``y[places[t, k]]`` over k, in float32. Places beyond the rows are left out.

    Inputs: ``y`` ``(rows, N)``; ``places`` ``(T, TOPK)``.
    Output: ``out`` ``(T, N)``.
    Bytes moved: see the module docstring.
    """
    TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    t = (tl.program_id(0) // TILES).to(tl.int64)
    n = tl.program_id(0) % TILES * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_N,), tl.float32)
    for k in tl.static_range(TOPK):
        place = tl.load(places + t * TOPK + k)
        mask = (n < N) & (place < rows)
        acc += tl.load(y + place.to(tl.int64) * N + n, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + t * N + n, acc.to(out.dtype.element_ty), mask=n < N)


def gather_rows(x: Tensor, order: Tensor, share: int) -> Tensor:
    """Launch `gather_rows_kernel`, and return its output."""
    out = x.new_empty((len(order), x.shape[1]))
    if out.numel():
        launch(gather_plan, (tuple(out.shape), share), (x, order, out))
    return out


def gather_plan(shape: tuple[int, int], share: int) -> Plan:
    """The launch of `gather_rows_kernel`."""
    rows, N = shape
    block_n = max(16, min(1024, power_of_two(N)))
    block_m = max(1, 2048 // block_n)
    return Plan(
        gather_rows_kernel, -(-rows // block_m), (rows,), dict(N=N, SHARE=share, BLOCK_M=block_m, BLOCK_N=block_n), 4
    )


def sum_rows(y: Tensor, places: Tensor) -> Tensor:
    """Launch `sum_rows_kernel`, and return its output."""
    rows, N = y.shape
    out = y.new_empty((len(places), N))
    if out.numel():
        launch(sum_plan, (len(places), rows, N, places.shape[1]), (y, places, out))
    return out


def sum_plan(tokens: int, rows: int, N: int, topk: int) -> Plan:
    """The launch of `sum_rows_kernel`."""
    block_n = max(16, min(1024, power_of_two(N)))
    return Plan(sum_rows_kernel, tokens * -(-N // block_n), (rows,), dict(N=N, TOPK=topk, BLOCK_N=block_n), 4)
