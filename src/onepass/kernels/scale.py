"""A tensor times a number on the device, or a matrix times one or two numbers for each row.

With one number in place, nothing is read or written if it is 1. `logits.gradients` calls it with the upstream gradient
of a loss, which is often 1, and with the factors of rows of exponentials. `logits.tiled_statistics` calls it with the
upstream gradients of all rows.
"""

import torch
import triton
import triton.language as tl

from onepass.kernels import layout
from onepass.kernels.launch import Flat, Out, Plan, launch

BLOCK = 4096
PROGRAMS = 8  # of each multiprocessor, where there may be nothing to do: to start one of each block takes 0.1 ms


@triton.jit
def product(value, factor, other, one, i, COLUMNS: tl.constexpr):
    """The elements ``i`` of a tensor times their factors, one after the other, or times ``one``."""
    value = value.to(tl.float32)
    if COLUMNS == 0:
        return value * one.to(tl.float32)
    else:
        f = tl.load(factor + i // COLUMNS).to(tl.float32)
        idle = f == 0
        value = value * f
        if other is not None:
            f = tl.load(other + i // COLUMNS).to(tl.float32)
            idle = idle | (f == 0)
            value = value * f
        return tl.where(idle, 0.0, value)


@triton.jit(do_not_specialize=["n"])
def scale_kernel(
    x: "Flat", factor: "Flat", other: "Flat", out: "Out", n: tl.int64,
    COLUMNS: tl.constexpr, INPLACE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``out = other * (factor * x)``. A row with a factor of 0 becomes 0, even where ``x`` is infinite or NaN.

    Inputs: ``x`` ``(n,)``; ``factor``, one for every COLUMNS elements, or ``(1,)`` if COLUMNS is 0; ``other``, as many,
    or None for 1.
    Output: ``out`` ``(n,)``, ``x`` if INPLACE.
    Bytes moved: ``x`` in and ``out`` out; none if it is in place and the one factor is 1.
    """
    one = tl.load(factor)
    if COLUMNS > 0 or not INPLACE or one != 1.0:
        for first in range(tl.program_id(0).to(tl.int64) * BLOCK, n, tl.num_programs(0).to(tl.int64) * BLOCK):
            i = first + tl.arange(0, BLOCK)
            if first + BLOCK <= n:  # without a mask, since one that may change at any element prevents wide accesses
                tl.store(out + i, product(tl.load(x + i), factor, other, one, i, COLUMNS).to(out.dtype.element_ty))
            else:
                there = i < n
                value = product(tl.load(x + i, mask=there), factor, other, one, tl.minimum(i, n - 1), COLUMNS)
                tl.store(out + i, value.to(out.dtype.element_ty), mask=there)


def plan_for(n: int, columns: int, inplace: bool, device: torch.device) -> Plan:
    """The launch of `scale_kernel`."""
    constexprs = dict(COLUMNS=columns, INPLACE=inplace, BLOCK=BLOCK)
    programs = triton.cdiv(n, BLOCK)
    if inplace and not columns:
        programs = min(programs, PROGRAMS * layout.multiprocessors(device))
    return Plan(scale_kernel, programs, (n,), constexprs, 4)


def scale(x: torch.Tensor, factor: torch.Tensor, out: torch.Tensor, other: torch.Tensor | None = None) -> None:
    """Write ``other * (factor * x)``, rounded once, to ``out``, which may be ``x``. ``other`` is 1 if it is None.

    ``factor`` is one number, or ``(N,)`` for ``x`` ``(N, H)``, as is ``other`` then: the product of both factors may be
    too small for float32. A row with a factor of 0 becomes 0, even where it is infinite or NaN. ``x`` and ``out`` are
    contiguous and have one shape.
    """
    if x.numel():
        columns = x.shape[1] if factor.dim() else 0
        launch(plan_for, (x.numel(), columns, out is x, x.device), (x, factor, other, out))
