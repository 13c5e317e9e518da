"""Backward kernel: the gradient of any function of the softmax statistics with respect to the logits.

`softmax.statistics` calls it on tensors, `logits` on tiles of logits. For a row with upstream gradients ``g`` of its
statistics,

    dL/dz_j = p_j·(a + b·(z_j - shift)) + c_j·d + r_j·h + Σ_k w_k·[j = index_k]
    a = g_log_normalizer + g_expected_logit·(1 - expected_logit),  b = g_expected_logit,
    d = g_weighted_logit,  w = g_selected,
    h = g_tempered_log_normalizer·sharpness,  r_j = exp(sharpness·(z_j - shift) - tempered_log_normalizer)

and ``dL/dx_j = dL/dz_j·dz_j/dx_j`` for the transform ``z(x)``. Given the gradient of the entropy or of log-probs
instead, ``b = -g_entropy`` and ``a = … + g_entropy·expected_logit``, or ``a = … - Σ_k g_log_prob_k``.

Bytes moved: the logits in, the gradient out. `out` may be the logits themselves. Rows that are masked, or whose
upstream gradients are all 0, are written but not read. If the gradient is there already for the same upstream gradient,
nothing is.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from onepass.autotune.own import choose
from onepass.core.options import FieldGradients, Inputs, Options
from onepass.core.shard import per_row
from onepass.kernels import layout
from onepass.kernels.launch import Flat, Out, Plan, Rows, Strided, launch
from onepass.kernels.layout import Geometry, Layout, flat_gradients, flat_rows, layout_of, power_of_two, row_groups
from onepass.kernels.online_softmax import Reading, factors_of_row, rounded
from onepass.kernels.row_programs import is_active, row_start, write_zeros
from onepass.kernels.softmax_fields import (
    LOG_NORMALIZER,
    SHIFT,
    Derivative,
    OfRows,
    Upstream,
    class_weight_of,
    derivative_of_fields,
    gradient,
    wanted_gradient,
)
from onepass.kernels.support import support_gradient

LEAST_EARLY = 1 << 27  # logits of a gradient that is worth another launch; see `supports_early_gradient`
PROGRAMS_AGAIN = 1024  # about as many as run at once
TILES = 4  # tiles that a program writes: the fewest that reach the bandwidth of the device


class Matrix(NamedTuple):
    """A pointer to the first row of logits or of their gradient, and where the others are, see `row_start`."""

    pointer: Any
    inner_rows: Any
    outer_stride: Any
    inner_stride: Any


@triton.jit
def write_tile(logits, out, reading, derivative, col0, low, high, WANTED: tl.constexpr, LANES: tl.constexpr,
               VEC: tl.constexpr, MASKED: tl.constexpr, CACHED: tl.constexpr):  # fmt: skip
    """Write columns ``[col0, col0 + LANES·VEC)`` of the gradient, only those within [low, high) if MASKED.

    ``reading`` and ``derivative`` are those of `gradient`. The term of the selected classes is left out. CACHED is the
    eviction policy of logits and gradient.
    """
    col = col0 + tl.arange(0, LANES)[:, None] * VEC + tl.arange(0, VEC)[None, :]
    valid = (col >= low) & (col < high) if MASKED else None
    weight = class_weight_of(reading, col - low, valid)
    x = tl.load(logits + col, mask=valid, eviction_policy=CACHED)
    g, slope = gradient(x, weight, reading, derivative, WANTED)
    tl.store(out + col, (g * slope).to(out.dtype.element_ty), mask=valid, eviction_policy=CACHED)


@triton.jit
def write_piece(
    place, part, logits, out, of_rows, upstream, reading, V, WANTED: tl.constexpr, ALIGN: tl.constexpr,
    SAME_PHASE: tl.constexpr, VEC: tl.constexpr, LANES: tl.constexpr, TILES: tl.constexpr, BLOCK_K: tl.constexpr,
    SOME_K: tl.constexpr,
):  # fmt: skip
    """Write the gradient of TILES tiles of a row, the piece number ``place`` of all rows.

    ``logits`` and ``out`` are each a `Matrix`. ``part`` multiplies the gradients of the selected classes.
    """
    TILE: tl.constexpr = LANES * VEC
    pieces = tl.cdiv(V + VEC - 1 if ALIGN else V, TILE * TILES)
    row = (place // pieces).to(tl.int64)
    piece = place % pieces
    start = row_start(row, logits.inner_rows, logits.outer_stride, logits.inner_stride)
    out_start = row_start(row, out.inner_rows, out.outer_stride, out.inner_stride)
    head = (start % VEC).to(tl.int32) if ALIGN else 0
    x_base = logits.pointer + start // VEC * VEC
    g_base = out.pointer + (out_start // VEC * VEC if SAME_PHASE else out_start - head)
    low = piece * (TILE * TILES)
    high = tl.minimum(head + V, low + TILE * TILES)

    inner, outer = factors_of_row(reading.inner, reading.outer, of_rows.temperature, row, WANTED.SOFTCAP)
    reading = Reading(inner, outer, reading.sharpness, reading.class_weights, reading.class_weight)
    a, b, d, h, tempered = 0.0, 0.0, 0.0, 0.0, 0.0
    k = tl.arange(0, BLOCK_K)
    w = tl.zeros([BLOCK_K], tl.float32)
    needed = False
    if is_active(of_rows.row_mask, row, of_rows.masked):
        a, b, d, h, tempered = derivative_of_fields(upstream, of_rows, row, reading.sharpness, WANTED)
        needed = (a != 0.0) | (b != 0.0) | (d != 0.0) | (h != 0.0)
        if upstream.selected is not None:
            w = tl.load(upstream.selected + row * upstream.s_stride + k, mask=k < of_rows.K, other=0.0) * part
            needed = needed | (tl.sum((w != 0.0).to(tl.int32), axis=0) > 0)
            if WANTED.LOG_PROBS:
                a -= tl.sum(w, axis=0)

    if needed:
        rows = of_rows.rows.to(tl.int64)
        shift = tl.load(of_rows.packed + SHIFT * rows + row)
        log_normalizer = tl.load(of_rows.packed + LOG_NORMALIZER * rows + row)
        derivative = Derivative(shift, log_normalizer, tempered, a, b, d, h)
        if upstream.selected is not None:
            # Selected logits are read before `write_tile` may overwrite them, and their gradients are written after it.
            index, K = of_rows.index + row * of_rows.K, of_rows.K
            selected = tl.load(index + k, mask=k < K, other=-1)
            mine = (selected >= 0) & (selected < V) & (selected + head >= low) & (selected + head < high)
            weight = class_weight_of(reading, selected, mine)
            x = tl.load(logits.pointer + start + selected, mask=mine)
            g, slope = gradient(x, weight, reading, derivative, WANTED)
            g = rounded(g)
            # A row may select a class more than once.
            for j0 in range(0, K, SOME_K):
                j = j0 + tl.arange(0, SOME_K)
                others = tl.load(index + j, mask=j < K, other=-1)
                theirs = tl.load(upstream.selected + row * upstream.s_stride + j, mask=j < K, other=0.0)
                theirs = rounded(theirs * part)
                g += tl.sum(tl.where(selected[:, None] == others[None, :], theirs[None, :], 0.0), axis=1)
            selected_gradient = g * slope
        begin = low
        if ALIGN:
            begin = low + tl.where(low < head, TILE, 0)
            if low < head:
                write_tile(x_base, g_base, reading, derivative, low, head, high, WANTED, LANES, VEC, True, "")
        full = begin + tl.maximum(high - begin, 0) // TILE * TILE
        for col in range(begin, full, TILE):
            write_tile(x_base, g_base, reading, derivative, col, head, high, WANTED, LANES, VEC, False, "")
        if full < high:
            write_tile(x_base, g_base, reading, derivative, full, head, high, WANTED, LANES, VEC, True, "")
        if upstream.selected is not None:
            tl.debug_barrier()
            tl.store(out.pointer + out_start + selected, selected_gradient.to(out.pointer.dtype.element_ty), mask=mine)
    else:
        write_zeros(g_base, low, high, head, LANES, VEC)


@triton.jit(
    do_not_specialize=[
        "rows", "V", "K", "inner_rows", "outer_stride", "inner_stride", "out_outer_stride", "out_inner_stride",
        "n_stride", "e_stride", "w_stride", "t_stride", "s_stride", "places", "masked",
    ],
    do_not_specialize_on_alignment=[
        "row_weight", "index", "row_mask", "temperature", "packed",
        "grad_log_normalizer", "grad_expected_logit", "grad_weighted_logit", "grad_tempered", "grad_selected",
    ],
)  # fmt: skip
def softmax_gradient_kernel(
    logits: "Rows", class_weights: "Flat", row_weight: "Out", out: "Rows", index: "Flat", row_mask: "Flat",
    temperature: "Flat", packed: "Flat",
    grad_log_normalizer: "Strided", grad_expected_logit: "Strided", grad_weighted_logit: "Strided",
    grad_tempered: "Strided",
    grad_selected: "Strided",
    rows: tl.int32, V: tl.int32, K: tl.int32, inner_rows: tl.int32, outer_stride: tl.int64, inner_stride: tl.int64,
    out_outer_stride: tl.int64, out_inner_stride: tl.int64, n_stride: tl.int32, e_stride: tl.int32,
    w_stride: tl.int32, t_stride: tl.int32, s_stride: tl.int32, inner: tl.float32, outer: tl.float32,
    class_weight: tl.float32, sharpness: tl.float32, places: tl.int32, masked: tl.int64,
    WANTED: tl.constexpr, ALIGN: tl.constexpr, SAME_PHASE: tl.constexpr, VEC: tl.constexpr, LANES: tl.constexpr,
    TILES: tl.constexpr, BLOCK_K: tl.constexpr, SOME_K: tl.constexpr, AGAIN: tl.constexpr, SEVERAL: tl.constexpr,
):  # fmt: skip
    """The gradient of the logits, by the formula in the module docstring.

    Inputs: ``logits`` ``(rows, V)``; ``class_weights`` ``(V,)``, ``index`` ``(rows, K)``, ``row_mask`` and
    ``temperature`` ``(rows,)``, each or None; ``packed`` ``(len(PACKED), rows)``, the statistics; the upstream
    gradients ``(rows,)``, of the selected classes ``(rows, K)``, each or None; ``row_weight`` ``(3,)`` or None, see
    `FieldGradients`, of which the first multiplies the gradients of the selected classes. With AGAIN, ``out`` was
    written for the second as that product, the same in all rows: nothing is written if it is the product. The third
    becomes the gradient of the selected classes: nothing else writes to this memory. If SEVERAL, programs take
    several of the ``places``, since to start one for each takes longer than to find nothing to be done.
    Output: ``out`` ``(rows, V)``, which may be ``logits``.
    Bytes moved: see the module docstring.
    """
    part = 1.0
    if row_weight is not None:
        part = tl.load(row_weight)
    if AGAIN:
        upstream = tl.load(grad_selected)
        if tl.program_id(0) == 0:
            tl.store(row_weight + 2, upstream)
        if tl.load(row_weight + 1) == upstream * part:
            return
    x = Matrix(logits, inner_rows, outer_stride, inner_stride)
    g = Matrix(out, inner_rows, out_outer_stride, out_inner_stride)
    of_rows = OfRows(packed, rows, index, K, row_mask, masked, temperature)
    upstream = Upstream(
        grad_log_normalizer, grad_expected_logit, grad_weighted_logit, grad_tempered, grad_selected, n_stride, e_stride,
        w_stride, t_stride, s_stride,
    )  # fmt: skip
    reading = Reading(inner, outer, sharpness, class_weights, class_weight)
    if SEVERAL:
        for place in range(tl.program_id(0), places, tl.num_programs(0)):
            write_piece(place, part, x, g, of_rows, upstream, reading, V, WANTED, ALIGN, SAME_PHASE, VEC, LANES, TILES,
                        BLOCK_K, SOME_K)  # fmt: skip
    else:
        write_piece(tl.program_id(0), part, x, g, of_rows, upstream, reading, V, WANTED, ALIGN, SAME_PHASE, VEC, LANES,
                    TILES, BLOCK_K, SOME_K)  # fmt: skip


def plan_for(
    x: Layout, out: Layout, given: tuple[bool, ...], gradient_strides: tuple[int, ...], rows: int, K: int,
    options: Options, again: bool,
) -> Plan:  # fmt: skip
    """The launch for one group of rows, where ``rows`` counts those of all; see `wanted_gradient` for ``given``."""
    g = Geometry(x, out)
    rule = dict(LANES=layout.lanes_for(g.V, g.VEC), TILES=TILES)
    LANES, tiles = choose(softmax_gradient_kernel, g.key(options.fields), rule).values()
    several = again and (layout.compute_capability() > 0 or layout.one_at_a_time())  # AMD's compiler spills registers
    constexprs = dict(
        WANTED=wanted_gradient(options, given), **g.constexprs, LANES=LANES, TILES=tiles, BLOCK_K=power_of_two(K),
        SOME_K=min(power_of_two(K), 16), AGAIN=again, SEVERAL=several,
    )  # fmt: skip
    places = g.rows * g.pieces(LANES * tiles)
    return Plan(
        softmax_gradient_kernel, min(places, PROGRAMS_AGAIN) if several else places,
        (rows, g.V, K, *g.strides, *gradient_strides[:-1], gradient_strides[-1] * K,
         *options.transform.factors(), options.class_weight, options.sharpness, places, options.masked),
        constexprs, layout.warps(LANES),
    )  # fmt: skip


def softmax_gradient(
    logits: torch.Tensor, inputs: Inputs, packed: torch.Tensor, grads: FieldGradients, options: Options,
    out: torch.Tensor, again: bool = False,
) -> None:  # fmt: skip
    """Write the gradient with respect to the logits into ``out``, which may be the logits themselves.

    With ``again``, ``out`` was written for the second number of ``grads.row_weight``, and may be right already; the
    third becomes the upstream gradient.
    """
    index, row_mask, class_weights, temperature = inputs[:4]
    rows = logits.shape[:-1].numel()
    K = per_row(index, logits.dim(), 1)
    if index is not None and K > 1 and grads.selected is not None:
        grads = grads._replace(selected=grads.selected.expand_as(index).contiguous())
    of_fields, strides = flat_gradients(grads[:5])
    given = tuple([g is not None for g in of_fields])
    if inputs.support is not None:
        if grads.row_weight is not None and grads.selected is not None:
            of_fields[-1] = of_fields[-1] * grads.row_weight[0]
        support_gradient(logits, inputs, packed, of_fields, strides, options, out)
        return
    for first, (x, g) in row_groups(logits, out) if rows else ():
        tensors = flat_rows(first, (index, row_mask, temperature, packed, *of_fields), (K, 1, 1, 1, 1, 1, 1, 1, K))
        about = layout_of(x), layout_of(g), given, strides, rows, K, options, again
        launch(plan_for, about, (x, class_weights, grads.row_weight, g, *tensors))


def supports_early_gradient(logits: torch.Tensor, inputs: Inputs) -> bool:
    """Whether `softmax_gradient` can tell that the gradient is there already, and takes longer than another launch."""
    return inputs.support is None and logits.numel() >= LEAST_EARLY
