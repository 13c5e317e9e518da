"""A tensor times a number on the device, in place. The tensor is neither read nor written if the number is 1.

`logits.gradients` calls it with the upstream gradient of a loss, which is often 1.
"""

import torch
import triton
import triton.language as tl

from onepass.kernels.launch import Flat, Out, Plan, launch

BLOCK = 4096


@triton.jit(do_not_specialize=["n"])
def scale_kernel(x: "Out", scale: "Flat", n: tl.int64, BLOCK: tl.constexpr):
    """``x *= scale``, for ``x`` ``(n,)`` (input and output) and ``scale`` ``(1,)``.

    Bytes moved: ``x`` in and out; none if the scale is 1.
    """
    s = tl.load(scale)
    if s != 1.0:
        i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(x + i, mask=i < n)
        tl.store(x + i, (value.to(s.dtype) * s).to(x.dtype.element_ty), mask=i < n)


def plan_for(n: int) -> Plan:
    """The launch of `scale_kernel`."""
    return Plan(scale_kernel, triton.cdiv(n, BLOCK), (n,), dict(BLOCK=BLOCK), 4)


def scale_(x: torch.Tensor, scale: torch.Tensor) -> None:
    """``x *= scale`` for a contiguous ``x`` and a ``scale`` with one element."""
    if x.numel():
        launch(plan_for, (x.numel(),), (x, scale))
