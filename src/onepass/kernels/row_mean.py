"""The mean of one number per row over the rows that are not masked, in one launch.

`softmax.statistics` reduces a loss with it. For few rows, each launch costs more than the reduction itself.
"""

import torch
import triton
import triton.language as tl

from onepass.kernels.launch import Flat, Out, Plan, launch

BLOCK = 1024


@triton.jit(do_not_specialize=["rows"])
def row_mean_kernel(values: "Flat", row_mask: "Flat", guess: "Flat", mean: "Out", share: "Out", rows: tl.int32,
                    factor: tl.float32, BLOCK: tl.constexpr):  # fmt: skip
    """``part = factor / number of rows`` and ``mean = part·Σ values``, over the rows where the mask is not 0.

    Inputs: ``values`` and ``row_mask``, ``(rows,)``; ``guess``, one number, or None for 1.
    Outputs: ``mean``, one number; ``share``, which are ``part`` and ``part·guess``.
    Bytes moved: the inputs. One program reads them, so that the order of the sum is fixed.
    """
    total = tl.zeros([BLOCK], tl.float32)
    count = tl.zeros([BLOCK], tl.int32)
    for first in range(0, rows, BLOCK):
        row = first + tl.arange(0, BLOCK)
        active = tl.load(row_mask + row, mask=row < rows, other=0) != 0
        total += tl.load(values + row, mask=active, other=0.0)
        count += active.to(tl.int32)
    part = factor / tl.sum(count, axis=0).to(tl.float32)
    tl.store(share, part)
    upstream = 1.0
    if guess is not None:
        upstream = tl.load(guess)
    tl.store(share + 1, upstream * part)
    tl.store(mean, tl.sum(total, axis=0) * part)


def plan_for(rows: int, factor: float) -> Plan:
    """The launch of `row_mean_kernel`."""
    return Plan(row_mean_kernel, 1, (rows, factor), dict(BLOCK=BLOCK), BLOCK // 128)


def row_mean(
    values: torch.Tensor, row_mask: torch.Tensor, factor: float, guess: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``factor`` times the mean of ``values`` over the rows that are not masked, and ``factor`` over their number.

    The second result also has the gradient of a row for an upstream gradient of ``guess``.
    """
    mean, share = values.new_empty(()), values.new_empty(2)
    launch(plan_for, (values.numel(), factor), (values, row_mask, guess, mean, share))
    return mean, share
