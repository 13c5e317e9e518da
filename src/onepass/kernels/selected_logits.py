"""The logits of selected classes, in one launch. No other logit is read.

`softmax.statistics` gathers with it where a loss needs nothing else of a row, as a distillation that is normalized over
the teacher's tokens.
"""

import torch
import triton
import triton.language as tl

from onepass.kernels.launch import Flat, Out, Plan, Strided, launch
from onepass.kernels.layout import Layout, flat_rows, layout_of, row_groups, row_strides
from onepass.kernels.row_programs import row_start

BLOCK = 512


@triton.jit(do_not_specialize=["n", "K", "V", "inner_rows", "outer_stride", "inner_stride", "stride"])
def selected_logits_kernel(
    logits: "Strided", index: "Flat", out: "Out",
    n: tl.int64, K: tl.int64, V: tl.int64, inner_rows: tl.int64, outer_stride: tl.int64, inner_stride: tl.int64,
    stride: tl.int64, BLOCK: tl.constexpr,
):  # fmt: skip
    """``out[row, k] = logits[row, index[row, k]]``, NaN for an index outside the vocabulary.

    Inputs: ``logits`` ``(rows, V)``; ``index`` ``(rows, K)``, with ``n = rows·K``. Output: ``out`` ``(rows, K)``.
    Bytes moved: the index, the selected logits and the output.
    """
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column = tl.load(index + i, mask=i < n, other=-1).to(tl.int64)
    inside = (column >= 0) & (column < V)
    place = row_start(i // K, inner_rows, outer_stride, inner_stride) + column * stride
    x = tl.load(logits + place, mask=inside, other=float("nan"))
    tl.store(out + i, x.to(out.dtype.element_ty), mask=i < n)


def plan_for(x: Layout, K: int) -> Plan:
    """The launch for one group of rows."""
    shape, strides, _ = x
    n = shape[:-1].numel() * K
    numbers = (n, K, shape[-1], *row_strides(shape, strides), strides[-1])
    return Plan(selected_logits_kernel, triton.cdiv(n, BLOCK), numbers, dict(BLOCK=BLOCK), 4)


def selected_logits(logits: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The logits of the classes ``index``, ``(..., K)``, in the dtype of the fields."""
    out = torch.empty_like(index, dtype=torch.float32, memory_format=torch.contiguous_format)
    K = index.shape[-1]
    for first, (x,) in row_groups(logits) if index.numel() else ():
        launch(plan_for, (layout_of(x), K), (x, *flat_rows(first, (index, out), (K, K))))
    return out
