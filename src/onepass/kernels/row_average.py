"""The reduction of one number per row to a mean or a sum, in one launch.

`softmax.statistics` reduces a loss with it. For few rows, a launch costs more than the reduction itself. The same
launch computes the weight of a row, unless the gradient, which needs it, is computed before: then `row_weight_kernel`
does in a launch of its own.
"""

import torch
import triton
import triton.language as tl

from onepass.core.options import Average
from onepass.kernels.launch import Flat, Out, Plan, launch
from onepass.kernels.row_programs import unmasked

# One program reads all rows: a block at a time, with its latency, so that many rows come in large ones.
FEW, MANY = 1024, 8192


@triton.jit
def part_of(count, divisor, factor, COUNTED: tl.constexpr):
    """The weight of a row in the average."""
    part = factor
    if COUNTED:
        part = factor / tl.sum(count, axis=0).to(tl.float32)
    if divisor is not None:
        part = part / tl.load(divisor).to(tl.float32)
    return part


@triton.jit
def guessed_weight(last, part):
    """``part`` times the upstream gradient of the last average, whose ``row_weight`` is given, or None for 1."""
    upstream = 1.0
    if last is not None:
        upstream = tl.load(last + 2)
    return upstream * part


@triton.jit(do_not_specialize=["rows", "masked"])
def row_weight_kernel(row_weight: "Out", guess: "Out", row_mask: "Flat", divisor: "Flat", last: "Flat",
                     rows: tl.int32, factor: tl.float32, masked: tl.int64, COUNTED: tl.constexpr,
                     BLOCK: tl.constexpr):  # fmt: skip
    """The weight of a row, ``part = factor / divisor``, also divided by the number of rows where the mask is not
    ``masked`` if COUNTED.

    Inputs: ``row_mask``, ``(rows,)``; ``divisor``, one number, or None for 1; ``last``, the ``row_weight`` of an
    earlier average, or None.
    Outputs: ``row_weight`` ``(3,)``, see `FieldGradients`: ``part``, and its product with the upstream gradient of the
    earlier average, ``last[2]`` (None: 1). The third is written in the backward. ``guess`` ``(1,)``, or None: this
    product, too.
    Bytes moved: the mask. One program reads it.
    """
    count = tl.zeros([BLOCK], tl.int32)
    if COUNTED:
        for first in range(0, rows, BLOCK):
            row = first + tl.arange(0, BLOCK)
            count += unmasked(row_mask, row, rows, masked).to(tl.int32)
    part = part_of(count, divisor, factor, COUNTED)
    tl.store(row_weight, part)
    guessed = guessed_weight(last, part)
    tl.store(row_weight + 1, guessed)
    if guess is not None:
        tl.store(guess, guessed)


@triton.jit(do_not_specialize=["rows", "masked"])
def row_average_kernel(values: "Flat", row_mask: "Flat", divisor: "Flat", row_weight: "Out", total: "Out",
                       rows: tl.int32, factor: tl.float32, masked: tl.int64, COUNTED: tl.constexpr,
                       BLOCK: tl.constexpr):  # fmt: skip
    """``total = part·Σ values`` over the rows where the mask is not ``masked``; ``part`` is the weight of a row.

    Inputs: ``values`` and ``row_mask``, ``(rows,)``, or no mask; ``divisor``, one number, or None for 1. Outputs:
    ``part``, which is the first number of ``row_weight``, and ``total``.
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
    tl.store(row_weight, part)
    tl.store(total, tl.sum(sums, axis=0) * part)


def block_for(rows: int) -> int:
    """Rows that a program reads at a time."""
    return FEW if rows <= FEW else MANY


def plan_of_weight(rows: int, factor: float, counted: bool, masked: int) -> Plan:
    """The launch of `row_weight_kernel`."""
    block = block_for(rows if counted else 0)
    return Plan(row_weight_kernel, 1, (rows, factor, masked), dict(COUNTED=counted, BLOCK=block), block // 256)


def plan_of_average(rows: int, factor: float, counted: bool, masked: int) -> Plan:
    """The launch of `row_average_kernel`."""
    block = block_for(rows)
    return Plan(row_average_kernel, 1, (rows, factor, masked), dict(COUNTED=counted, BLOCK=block), block // 256)


def compute_row_weight(
    logits: torch.Tensor, row_mask: torch.Tensor | None, average: Average, last: torch.Tensor | None = None
) -> torch.Tensor:
    """The weight of a row in an average, see `row_weight_kernel`."""
    row_weight = logits.new_empty(3, dtype=torch.float32)
    about = logits.shape[:-1].numel(), average.factor, average.counted, average.masked
    launch(plan_of_weight, about, (row_weight, None, row_mask if average.counted else None, average.divisor, last))
    return row_weight


def row_average(
    values: torch.Tensor, row_mask: torch.Tensor | None, average: Average, row_weight: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The average of ``values``, and the weight of a row: ``row_weight`` if it is known, which is written again."""
    assert row_mask is None or row_mask.numel() == values.numel(), "a value and a mask of every row"
    total = values.new_empty(())
    row_weight = values.new_empty(1) if row_weight is None else row_weight
    about = values.numel(), average.factor, average.counted, average.masked
    launch(plan_of_average, about, (values, row_mask, average.divisor, row_weight, total))
    return total, row_weight
