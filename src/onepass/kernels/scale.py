"""A tensor times a number on the device. In place, it is neither read nor written if the number is 1.

`logits.gradients` calls it with the upstream gradient of a loss, which is often 1.
"""

import torch
import triton
import triton.language as tl

from onepass.kernels.launch import Flat, Out, Plan, launch

BLOCK = 4096


@triton.jit(do_not_specialize=["n"])
def scale_kernel(x: "Flat", scale: "Flat", out: "Out", n: tl.int64, INPLACE: tl.constexpr, BLOCK: tl.constexpr):
    """``out = scale * x``. Inputs: ``x`` ``(n,)`` and ``scale`` ``(1,)``. Output: ``out`` ``(n,)``, ``x`` if INPLACE.

    Bytes moved: ``x`` in and ``out`` out; none if it is in place and the scale is 1.
    """
    s = tl.load(scale)
    if not INPLACE or s != 1.0:
        first = tl.program_id(0).to(tl.int64) * BLOCK
        i = first + tl.arange(0, BLOCK)
        if first + BLOCK <= n:  # without a mask, since one that may change at any element prevents wide accesses
            tl.store(out + i, (tl.load(x + i).to(s.dtype) * s).to(out.dtype.element_ty))
        else:
            value = tl.load(x + i, mask=i < n)
            tl.store(out + i, (value.to(s.dtype) * s).to(out.dtype.element_ty), mask=i < n)


def plan_for(n: int, inplace: bool) -> Plan:
    """The launch of `scale_kernel`."""
    return Plan(scale_kernel, triton.cdiv(n, BLOCK), (n,), dict(INPLACE=inplace, BLOCK=BLOCK), 4)


def scale(x: torch.Tensor, factor: torch.Tensor, out: torch.Tensor) -> None:
    """Write ``factor * x``, rounded once, to ``out``, which may be ``x``. ``factor`` has one element.

    ``x`` and ``out`` are contiguous and have one shape.
    """
    if x.numel():
        launch(plan_for, (x.numel(), out is x), (x, factor, out))
