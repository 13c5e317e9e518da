"""Gather the logits of selected classes, and scatter their gradient. No other logit is read.

`softmax.statistics` gathers with it where a loss needs nothing else of a row, as a distillation that is normalized over
the teacher's tokens.
"""

import torch
import triton
import triton.language as tl

from onepass.core.options import Transform
from onepass.kernels.launch import Flat, Out, Plan, Strided, launch
from onepass.kernels.layout import Layout, flat_rows, layout_of, power_of_two, row_groups, row_strides
from onepass.kernels.online_softmax import transform_and_slope
from onepass.kernels.row_programs import row_start

BLOCK = 512


@triton.jit(do_not_specialize=["n", "K", "V", "inner_rows", "outer_stride", "inner_stride", "stride"])
def selected_logits_kernel(
    logits: "Strided", index: "Flat", out: "Out",
    n: tl.int64, K: tl.int64, V: tl.int64, inner_rows: tl.int64, outer_stride: tl.int64, inner_stride: tl.int64,
    stride: tl.int64, inner: tl.float32, outer: tl.float32, SOFTCAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``out[row, k] = z[row, index[row, k]]``, NaN for an index outside the vocabulary.

    Inputs: ``logits`` ``(rows, V)``; ``index`` ``(rows, K)``, with ``n = rows·K``. Output: ``out`` ``(rows, K)``.
    Bytes moved: the index, the selected logits and the output.
    """
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column = tl.load(index + i, mask=i < n, other=-1).to(tl.int64)
    inside = (column >= 0) & (column < V)
    place = row_start(i // K, inner_rows, outer_stride, inner_stride) + column * stride
    z, _ = transform_and_slope(tl.load(logits + place, mask=inside, other=0.0), inner, outer, SOFTCAP)
    tl.store(out + i, tl.where(inside, z, float("nan")), mask=i < n)


@triton.jit(do_not_specialize=["K", "V", "inner_rows", "outer_stride", "inner_stride", "stride"])
def selected_logits_gradient_kernel(
    logits: "Strided", index: "Flat", grad: "Flat", out: "Out",
    K: tl.int32, V: tl.int64, inner_rows: tl.int64, outer_stride: tl.int64, inner_stride: tl.int64, stride: tl.int64,
    inner: tl.float32, outer: tl.float32, SOFTCAP: tl.constexpr, BLOCK: tl.constexpr, SOME: tl.constexpr,
):  # fmt: skip
    """Write the gradients of the selected logits into ``out``, which holds zeros. Classes may repeat.

    Inputs: ``logits`` ``(rows, V)``; ``index`` and ``grad`` ``(rows, K)``. Output: ``out`` ``(rows, V)``.
    Bytes moved: the index and the gradients in, K elements of each row out; with a soft-cap, the selected logits in.
    """
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    column = tl.load(index + row * K + k, mask=k < K, other=-1).to(tl.int64)
    inside = (column >= 0) & (column < V)
    total = tl.zeros([BLOCK], tl.float32)
    for j0 in range(0, K, SOME):
        j = j0 + tl.arange(0, SOME)
        others = tl.load(index + row * K + j, mask=j < K, other=-1).to(tl.int64)
        theirs = tl.load(grad + row * K + j, mask=j < K, other=0.0)
        total += tl.sum(tl.where(column[:, None] == others[None, :], theirs[None, :], 0.0), axis=1)
    slope = inner
    if SOFTCAP:
        place = row_start(row, inner_rows, outer_stride, inner_stride) + column * stride
        _, slope = transform_and_slope(tl.load(logits + place, mask=inside, other=0.0), inner, outer, SOFTCAP)
    # The logit of a token without a gradient may be NaN.
    result = tl.where(total == 0.0, 0.0, total * slope)
    tl.store(out + row * V + column, result.to(out.dtype.element_ty), mask=inside)


def plan_for(x: Layout, K: int, transform: Transform) -> Plan:
    """The launch of `selected_logits_kernel` for one group of rows."""
    shape, strides, _ = x
    n = shape[:-1].numel() * K
    numbers = (n, K, shape[-1], *row_strides(shape, strides), strides[-1], *transform.factors())
    constexprs = dict(SOFTCAP=transform.softcap is not None, BLOCK=BLOCK)
    return Plan(selected_logits_kernel, triton.cdiv(n, BLOCK), numbers, constexprs, 4)


def plan_for_gradient(x: Layout, K: int, transform: Transform) -> Plan:
    """The launch of `selected_logits_gradient_kernel` for one group of rows."""
    shape, strides, _ = x
    numbers = (K, shape[-1], *row_strides(shape, strides), strides[-1], *transform.factors())
    block = power_of_two(K)
    constexprs = dict(SOFTCAP=transform.softcap is not None, BLOCK=block, SOME=min(block, 16))
    return Plan(selected_logits_gradient_kernel, shape[:-1].numel(), numbers, constexprs, 1 if block <= 64 else 4)


def selected_logits(logits: torch.Tensor, index: torch.Tensor, transform: Transform) -> torch.Tensor:
    """The transformed logits of the classes ``index``, ``(..., K)``, in the dtype of the fields."""
    out = torch.empty_like(index, dtype=torch.float32, memory_format=torch.contiguous_format)
    K = index.shape[-1]
    for first, (x,) in row_groups(logits) if index.numel() else ():
        launch(plan_for, (layout_of(x), K, transform), (x, *flat_rows(first, (index, out), (K, K))))
    return out


def selected_logits_gradient(
    logits: torch.Tensor, index: torch.Tensor, grad: torch.Tensor, transform: Transform
) -> torch.Tensor:
    """The gradient of the logits, from that of `selected_logits`, rounded once to their dtype."""
    out = torch.zeros_like(logits, memory_format=torch.contiguous_format)
    K, V = index.shape[-1], logits.shape[-1]
    for first, (x,) in row_groups(logits) if index.numel() else ():
        tensors = flat_rows(first, (index, grad, out), (K, K, V))
        launch(plan_for_gradient, (layout_of(x), K, transform), (x, *tensors))
    return out
