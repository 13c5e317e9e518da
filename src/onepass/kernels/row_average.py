"""The reduction of one number per row to a mean or a sum, in one launch.

`softmax.statistics` reduces a loss with it. For few rows, a launch costs more than the reduction itself. What a row
counts for is known after it, unless the gradient is computed before: then a launch of its own.
"""

import torch
import triton
import triton.language as tl

from onepass.core.options import Average
from onepass.kernels.launch import Flat, Out, Plan, launch

# One program reads all rows: a block at a time, with its latency, so that many rows come in large ones.
FEW, MANY = 1024, 8192


@triton.jit
def part_of(count, divisor, factor, COUNTED: tl.constexpr):
    """What a row counts for."""
    part = factor
    if COUNTED:
        part = factor / tl.sum(count, axis=0).to(tl.float32)
    if divisor is not None:
        part = part / tl.load(divisor).to(tl.float32)
    return part


@triton.jit
def unmasked(row_mask, row, rows, masked):
    """A mask of those of the ``row`` that exist, below ``rows``, and are not masked."""
    active = row < rows
    if row_mask is not None:
        active = active & (tl.load(row_mask + row, mask=active, other=0) != masked)
    return active


@triton.jit
def guessed_share(last, part):
    """``part`` times the upstream gradient of the last average, whose ``share`` is given, or None for 1."""
    upstream = 1.0
    if last is not None:
        upstream = tl.load(last + 2)
    return upstream * part


@triton.jit(do_not_specialize=["rows", "masked"])
def row_share_kernel(share: "Out", row_mask: "Flat", divisor: "Flat", last: "Flat", rows: tl.int32,
                     factor: tl.float32, masked: tl.int64, COUNTED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """What a row counts for: ``part = factor / divisor``, also divided by the number of rows where the mask is not
    ``masked`` if COUNTED.

    Inputs: ``row_mask``, ``(rows,)``; ``divisor``, one number, or None for 1; ``last``, the ``share`` of an earlier
    average, or None.
    Output: ``share`` ``(3,)``: ``part``, and what it is for the upstream gradient of the earlier average, which is
    ``last[2]`` (None: 1). The third is written in the backward.
    Bytes moved: the mask. One program reads it.
    """
    count = tl.zeros([BLOCK], tl.int32)
    if COUNTED:
        for first in range(0, rows, BLOCK):
            row = first + tl.arange(0, BLOCK)
            count += unmasked(row_mask, row, rows, masked).to(tl.int32)
    part = part_of(count, divisor, factor, COUNTED)
    tl.store(share, part)
    tl.store(share + 1, guessed_share(last, part))


@triton.jit(do_not_specialize=["rows", "masked"])
def row_average_kernel(values: "Flat", row_mask: "Flat", divisor: "Flat", share: "Out", total: "Out", rows: tl.int32,
                       factor: tl.float32, masked: tl.int64, COUNTED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """``total = part·Σ values`` over the rows where the mask is not ``masked``, for the ``part`` of `row_share_kernel`.

    Inputs: ``values`` and ``row_mask``, ``(rows,)``, or no mask; ``divisor``, one number, or None for 1. Outputs:
    ``part``, which is the first number of ``share``, and ``total``.
    Bytes moved: the inputs. One program reads them, so that the order of the sum is fixed.
    """
    sums = tl.zeros([BLOCK], tl.float32)
    count = tl.zeros([BLOCK], tl.int32)
    for first in range(0, rows, BLOCK):
        row = first + tl.arange(0, BLOCK)
        active = unmasked(row_mask, row, rows, masked)
        sums += tl.load(values + row, mask=active, other=0.0)
        count += active.to(tl.int32)
    part = part_of(count, divisor, factor, COUNTED)
    tl.store(share, part)
    tl.store(total, tl.sum(sums, axis=0) * part)


def block_for(rows: int) -> int:
    """Rows that a program reads at a time."""
    return FEW if rows <= FEW else MANY


def plan_of_share(rows: int, factor: float, counted: bool, masked: int) -> Plan:
    """The launch of `row_share_kernel`."""
    block = block_for(rows if counted else 0)
    return Plan(row_share_kernel, 1, (rows, factor, masked), dict(COUNTED=counted, BLOCK=block), block // 256)


def plan_of_average(rows: int, factor: float, counted: bool, masked: int) -> Plan:
    """The launch of `row_average_kernel`."""
    block = block_for(rows)
    return Plan(row_average_kernel, 1, (rows, factor, masked), dict(COUNTED=counted, BLOCK=block), block // 256)


def row_share(
    logits: torch.Tensor, row_mask: torch.Tensor | None, average: Average, last: torch.Tensor | None = None
) -> torch.Tensor:
    """What every row of the logits counts for in an average, see `row_share_kernel`."""
    share = logits.new_empty(3, dtype=torch.float32)
    about = logits.shape[:-1].numel(), average.factor, average.counted, average.masked
    launch(plan_of_share, about, (share, row_mask if average.counted else None, average.divisor, last))
    return share


def row_average(
    values: torch.Tensor, row_mask: torch.Tensor | None, average: Average, share: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The average of ``values``, and what every row counts for: ``share`` if it is known, which is written again."""
    total = values.new_empty(())
    share = values.new_empty(1) if share is None else share
    about = values.numel(), average.factor, average.counted, average.masked
    launch(plan_of_average, about, (values, row_mask, average.divisor, share, total))
    return total, share
