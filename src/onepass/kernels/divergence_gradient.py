"""The gradient of a divergence with respect to one of the two rows of logits.

That of KL(P ‖ Q) is ``P·(log P - log Q - KL)`` with respect to the logits of P, and ``Q - P`` with respect to those of
Q. That of JSD with respect to the logits of P is ``w_p·P·(log(P/M) - mean_p)``, in the terms of `kernels.divergence`.
Bytes moved: both tensors in, one gradient out.
"""

import torch
import triton
import triton.language as tl

from onepass.autotune.own import choose
from onepass.core.options import PairOptions, PairRows
from onepass.kernels import layout
from onepass.kernels.divergence import MEAN, Divergence, Side, load_transformed, log_ratios, read_normalizer
from onepass.kernels.launch import Flat, Plan, Rows, Strided, launch
from onepass.kernels.layout import Geometry, Layout, flat_rows, layout_of, row_groups
from onepass.kernels.online_softmax import LOG2E, factors_of_row, transform_and_slope
from onepass.kernels.row_programs import is_active, row_start, write_zeros

TILES = 4  # tiles that a program writes


@triton.jit
def write_tile(x, y, out, mean, g, col0, low, high, DIVERGENCE: tl.constexpr, FIRST: tl.constexpr, LANES: tl.constexpr,
               VEC: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """Write one tile of the gradient with respect to ``x``; ``x`` and ``y`` are each a `Side`.

    ``x`` defines a distribution of the mixture, or P (FIRST) or Q of KL(P ‖ Q). In DIVERGENCE, P stands for ``x`` and
    Q for ``y``.
    """
    col = col0 + tl.arange(0, LANES)[:, None] * VEC + tl.arange(0, VEC)[None, :]
    valid = (col >= low) & (col < high) if MASKED else None
    zx, slope = transform_and_slope(tl.load(x.logits + col, mask=valid), x.inner, x.outer, DIVERGENCE.P_SOFTCAP)
    log_x = (zx - x.shift) - x.log_normalizer
    log_y = (load_transformed(y, col, valid, DIVERGENCE.Q_SOFTCAP) - y.shift) - y.log_normalizer
    if DIVERGENCE.MIXTURE:
        px, ratio, _, _ = log_ratios(log_x, log_y, x.weight, y.weight)
        dz = x.weight * px * (ratio - mean)
    elif FIRST:
        px = tl.exp2(log_x * LOG2E)
        dz = px * (tl.where(px > 0, log_x - log_y, 0.0) - mean)
    else:
        dz = tl.exp2(log_x * LOG2E) - tl.exp2(log_y * LOG2E)
    tl.store(out + col, (dz * g * slope).to(out.dtype.element_ty), mask=valid)


@triton.jit(
    do_not_specialize=["rows", "V", "inner_rows", "x_outer_stride", "x_inner_stride", "y_outer_stride",
                       "y_inner_stride", "out_outer_stride", "out_inner_stride", "g_stride"],
    do_not_specialize_on_alignment=["row_mask", "x_temperature", "y_temperature", "x_numbers", "y_numbers", "grad"],
)  # fmt: skip
def divergence_gradient_kernel(
    x: "Rows", y: "Rows", out: "Rows", row_mask: "Flat", x_temperature: "Flat", y_temperature: "Flat",
    x_numbers: "Flat", y_numbers: "Flat", grad: "Strided",
    rows: tl.int32, V: tl.int32, inner_rows: tl.int32, x_outer_stride: tl.int64, x_inner_stride: tl.int64,
    y_outer_stride: tl.int64, y_inner_stride: tl.int64, out_outer_stride: tl.int64, out_inner_stride: tl.int64,
    g_stride: tl.int32, x_inner: tl.float32, x_outer: tl.float32, y_inner: tl.float32, y_outer: tl.float32,
    w_x: tl.float32, w_y: tl.float32,
    DIVERGENCE: tl.constexpr, FIRST: tl.constexpr, ALIGN: tl.constexpr, SAME_PHASE: tl.constexpr, VEC: tl.constexpr,
    LANES: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """The gradient of the divergence with respect to one of the two tensors.

    Inputs: logits ``x``, with respect to which the gradient is taken, and ``y``, the other ones, ``(rows, V)``;
    ``row_mask``, ``x_temperature`` and ``y_temperature`` ``(rows,)``, each or None; ``x_numbers``, ``y_numbers``
    ``(3, rows)`` of `divergence_kernel`; the upstream gradient ``grad`` ``(rows,)``.
    Output: ``out`` ``(rows, V)``, which may be ``x`` itself. Rows that are masked or have an upstream gradient of 0 are
    written but not read.
    Bytes moved: see the module docstring.
    """
    TILE: tl.constexpr = LANES * VEC
    pieces = tl.cdiv(V + VEC - 1 if ALIGN else V, TILE * TILES)
    row = (tl.program_id(0) // pieces).to(tl.int64)
    low = tl.program_id(0) % pieces * (TILE * TILES)
    start = row_start(row, inner_rows, x_outer_stride, x_inner_stride)
    y_start = row_start(row, inner_rows, y_outer_stride, y_inner_stride)
    out_start = row_start(row, inner_rows, out_outer_stride, out_inner_stride)
    head = (start % VEC).to(tl.int32) if ALIGN else 0
    x_base = x + start // VEC * VEC
    y_base = y + (y_start // VEC * VEC if SAME_PHASE else y_start - head)
    out_base = out + (out_start // VEC * VEC if SAME_PHASE else out_start - head)
    high = tl.minimum(head + V, low + TILE * TILES)

    x_inner, x_outer = factors_of_row(x_inner, x_outer, x_temperature, row, DIVERGENCE.P_SOFTCAP)
    y_inner, y_outer = factors_of_row(y_inner, y_outer, y_temperature, row, DIVERGENCE.Q_SOFTCAP)
    g = 0.0
    if is_active(row_mask, row, 0):
        g = tl.load(grad + row * g_stride)
    if g != 0.0:
        x_shift, x_norm = read_normalizer(x_numbers, rows, row)
        y_shift, y_norm = read_normalizer(y_numbers, rows, row)
        mean = tl.load(x_numbers + MEAN * rows.to(tl.int64) + row)
        of_x = Side(x_base, x_inner, x_outer, w_x, x_shift, x_norm)
        of_y = Side(y_base, y_inner, y_outer, w_y, y_shift, y_norm)
        for col in range(low, high, TILE):
            if (col >= head) & (col + TILE <= high):
                write_tile(of_x, of_y, out_base, mean, g, col, head, high, DIVERGENCE, FIRST, LANES, VEC, False)
            else:
                write_tile(of_x, of_y, out_base, mean, g, col, head, high, DIVERGENCE, FIRST, LANES, VEC, True)
    else:
        write_zeros(out_base, low, high, head, LANES, VEC)


def gradient_plan_for(
    x: Layout, y: Layout, out: Layout, g_stride: int, rows: int, of_teacher: bool, options: PairOptions
) -> Plan:
    """The launch of `divergence_gradient_kernel` for one group of rows; ``rows`` counts those of all groups."""
    g = Geometry(x, y, out)
    rule = dict(LANES=layout.lanes_for(g.V, g.VEC), TILES=TILES)
    LANES, tiles = choose(divergence_gradient_kernel, g.key(options.direction), rule).values()
    of_x, of_y = (options.teacher, options.student) if of_teacher else (options.student, options.teacher)
    w_x, w_y = options.weights if of_teacher else options.weights[::-1]
    constexprs = dict(
        DIVERGENCE=Divergence(options.direction == "jsd", of_x.softcap is not None, of_y.softcap is not None),
        FIRST=of_teacher == (options.direction == "forward"), **g.constexprs, LANES=LANES, TILES=tiles,
    )  # fmt: skip
    numbers = (rows, g.V, *g.strides, g_stride, *of_x.factors(), *of_y.factors(), w_x, w_y)
    programs = g.rows * g.pieces(LANES * tiles)
    return Plan(divergence_gradient_kernel, programs, numbers, constexprs, layout.warps(LANES))


def divergence_gradient(
    student: torch.Tensor,
    teacher: torch.Tensor,
    read: PairRows,
    packed: torch.Tensor,
    grad: torch.Tensor,
    of_teacher: bool,
    options: PairOptions,
    out: torch.Tensor,
) -> None:
    """Write the gradient with respect to the student's logits, or the teacher's if ``of_teacher``, into ``out``.

    ``out`` has the shape and dtype of these logits and may be these logits themselves.
    """
    rows = packed[0].numel()
    grad = grad if grad.dim() == 1 else grad.reshape(-1)
    numbers = (packed[3:6], packed[:3]) if of_teacher else (packed[:3], packed[3:6])
    temperatures = read[:0:-1] if of_teacher else read[1:]
    for first, (s, t, g) in row_groups(student, teacher, out) if rows else ():
        x, y = (t, s) if of_teacher else (s, t)
        about = layout_of(x), layout_of(y), layout_of(g), grad.stride(0), rows, of_teacher, options
        tensors = flat_rows(first, (read.row_mask, *temperatures, *numbers, grad))
        launch(gradient_plan_for, about, (x, y, g, *tensors))
