"""Softmax statistics of rows whose distribution is restricted to some classes, and their gradient.

`softmax_statistics`, `shard_statistics` and `softmax_gradient` of this folder call these kernels if the inputs have a
support, the classes to which a row is restricted. A program loops over the support of one row. Bytes moved: the ids of
the support and their logits in; in the backward also the whole row of the gradient out, which is 0 outside of the
support.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from onepass.core.options import Inputs, Options
from onepass.core.shard import per_row
from onepass.kernels.launch import Flat, Out, Plan, Rows, Strided, launch
from onepass.kernels.layout import Layout, flat_rows, layout_of, power_of_two, row_groups, row_strides
from onepass.kernels.online_softmax import (
    Reading,
    State,
    empty_state,
    factors_of_row,
    merge,
    transform,
    update,
    wanted,
)
from onepass.kernels.row_programs import is_active, row_start, write_zeros
from onepass.kernels.softmax_fields import (
    LOG_NORMALIZER,
    NOWHERE,
    SHIFT,
    Derivative,
    OfRows,
    Upstream,
    class_weight_of,
    derivative_of_fields,
    gradient,
    no_statistics,
    statistics_of,
    wanted_gradient,
    write_selected,
    write_selected_state,
    write_state,
    write_statistics,
)

LANES = 128


@triton.jit
def support_of_row(starts, lengths, row, n, V):
    """Where the support of a row begins, how many ids it has, and whether it has all classes instead.

    ``n`` is the number of all ids or, without ``starts``, that of each row.
    """
    first, count, full = row * n, n, n < 0
    if starts is not None:
        length = tl.load(lengths + row).to(tl.int64)
        first = tl.minimum(tl.maximum(tl.load(starts + row).to(tl.int64), 0), n)
        full = length < 0
        count = tl.where(full, V, tl.minimum(tl.maximum(length, 0), n - first))
    return first, count, full


@triton.jit
def read_ids(ids, first, j, count, full):
    """Ids ``j`` of a row, -1 from ``count`` on."""
    there = j < count
    found = tl.load(ids + first + j, mask=there & (full == 0), other=-1).to(tl.int64)
    return tl.where(full & there, j, found)


@triton.jit
def any_equal(ids, column, j, count):
    """Whether each column is among the ids."""
    equal = (ids[:, None] == column[None, :]) & (j < count)[:, None]
    return tl.max(equal.to(tl.int32), axis=0) > 0


@triton.jit(do_not_specialize=["rows", "V", "K", "n", "inner_rows", "outer_stride", "inner_stride", "masked"])
def support_statistics_kernel(
    logits: "Rows", class_weights: "Flat", ids: "Flat", index: "Flat", row_mask: "Flat", temperature: "Flat",
    starts: "Flat", lengths: "Flat", packed: "Out", selected: "Out", is_top1: "Out",
    rows: tl.int32, V: tl.int64, K: tl.int32, n: tl.int64, inner_rows: tl.int32, outer_stride: tl.int64,
    inner_stride: tl.int64,
    inner: tl.float32, outer: tl.float32, class_weight: tl.float32, sharpness: tl.float32, masked: tl.int64,
    WANTED: tl.constexpr, LANES: tl.constexpr, BLOCK_K: tl.constexpr, SHARD: tl.constexpr,
):  # fmt: skip
    """The statistics of every row, or their states if SHARD, as those of `softmax_statistics_kernel`.

    Inputs and outputs are those of that kernel, and the support: ``ids`` ``(n,)``, of which a row has ``lengths`` from
    ``starts`` on, ``(rows,)``, or ``(rows, n)`` without these. Negative ids are skipped. A row of negative length has
    all classes.
    """
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    active = is_active(row_mask, row, masked)
    statistics = no_statistics()
    relative = tl.zeros([BLOCK_K], tl.float32)
    top1 = relative > 0
    if active:
        inner, outer = factors_of_row(inner, outer, temperature, row, WANTED.SOFTCAP)
        reading = Reading(inner, outer, sharpness, class_weights, class_weight)
        x = logits + row_start(row, inner_rows, outer_stride, inner_stride)
        first, count, full = support_of_row(starts, lengths, row, n, V)
        column = tl.full([BLOCK_K], -1, tl.int64)
        member = k < 0
        if index is not None:
            column = tl.load(index + row * K + k, mask=k < K, other=-1).to(tl.int64)
        inside = (column >= 0) & (column < V)
        state = empty_state(tl.zeros([LANES], tl.float32))
        outside = tl.sum(((k < K) & ~inside).to(tl.int32), axis=0) if index is not None else 0
        for j0 in range(0, count, LANES):
            j = j0 + tl.arange(0, LANES)
            token = read_ids(ids, first, j, count, full)
            outside += tl.sum((token >= V).to(tl.int32), axis=0)
            used = (token >= 0) & (token < V)
            z = transform(tl.load(x + token, mask=used, other=0.0), inner, outer, WANTED.SOFTCAP)
            z = tl.where(used, z, float("-inf"))
            weight = tl.where(used, class_weight_of(reading, token, used), 0.0)
            state = update(state, z[:, None], weight[:, None], sharpness, WANTED)
            if index is not None:
                member = member | any_equal(token, column, j, count)
        m, s, t, w, c, q, u = merge(state, sharpness, WANTED)
        if not SHARD:
            # As in softmax_statistics, a row without a distribution is NaN, and so is one of a class that is none.
            s = tl.where((s > 0) & (outside == 0), s, float("nan"))
        if index is not None:
            z_selected = transform(tl.load(x + column, mask=inside, other=0.0), inner, outer, WANTED.SOFTCAP)
            relative = tl.where(member, z_selected - m, float("-inf")) + (s - s)
            if WANTED.TOP1:
                argmax = tl.full([LANES], NOWHERE, tl.int64)
                for j0 in range(0, count, LANES):
                    token = read_ids(ids, first, j0 + tl.arange(0, LANES), count, full)
                    used = (token >= 0) & (token < V)
                    z = transform(tl.load(x + token, mask=used, other=0.0), inner, outer, WANTED.SOFTCAP)
                    argmax = tl.where(used & (z >= m), tl.minimum(argmax, token), argmax)
                # Not `relative >= 0`, since a compiler may fuse that difference with the product in `transform`.
                top1 = member & (z_selected >= m + (s - s)) & (column == tl.min(argmax, axis=0))
        if SHARD:
            to = write_state(packed, row, rows, State(m, s, t, w, c, q, u), None, WANTED)
            if index is not None:
                relative = tl.where(inside, relative, float("inf"))
                write_selected_state(to, rows, k, K, relative, top1, WANTED)
        statistics = statistics_of(State(m, s, t, w, c, q, u))
    if not SHARD:
        write_statistics(packed, row, rows, statistics, WANTED)
        if index is not None:
            write_selected(selected, is_top1, row, k, K, relative, top1, statistics.log_normalizer, WANTED)


@triton.jit(
    do_not_specialize=[
        "rows", "V", "K", "n", "inner_rows", "outer_stride", "inner_stride", "out_outer_stride", "out_inner_stride",
        "n_stride", "e_stride", "w_stride", "t_stride", "s_stride", "masked",
    ]
)  # fmt: skip
def support_gradient_kernel(
    logits: "Rows", class_weights: "Flat", out: "Rows", ids: "Flat", index: "Flat", row_mask: "Flat",
    temperature: "Flat", starts: "Flat", lengths: "Flat", packed: "Flat", grad_log_normalizer: "Strided",
    grad_expected_logit: "Strided", grad_weighted_logit: "Strided", grad_tempered: "Strided",
    grad_selected: "Strided", values: "Out",
    rows: tl.int32, V: tl.int64, K: tl.int32, n: tl.int64, inner_rows: tl.int32, outer_stride: tl.int64,
    inner_stride: tl.int64, out_outer_stride: tl.int64, out_inner_stride: tl.int64, n_stride: tl.int32,
    e_stride: tl.int32, w_stride: tl.int32, t_stride: tl.int32, s_stride: tl.int32, inner: tl.float32,
    outer: tl.float32, class_weight: tl.float32, sharpness: tl.float32, masked: tl.int64,
    WANTED: tl.constexpr, LANES: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The gradient of the logits, by the formula in `kernels.softmax_gradient`; 0 outside of the support.

    A selected class outside of the support has no gradient. ``values`` ``(n,)`` is workspace: the gradients of a row
    are written after all its logits were read, so that ``out`` may be ``logits``. The other inputs are those of
    `softmax_gradient_kernel` and `support_statistics_kernel`.
    """
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    x = logits + row_start(row, inner_rows, outer_stride, inner_stride)
    to = out + row_start(row, inner_rows, out_outer_stride, out_inner_stride)
    inner, outer = factors_of_row(inner, outer, temperature, row, WANTED.SOFTCAP)
    reading = Reading(inner, outer, sharpness, class_weights, class_weight)
    of_rows = OfRows(packed, rows, index, K, row_mask, masked, temperature)
    upstream = Upstream(
        grad_log_normalizer, grad_expected_logit, grad_weighted_logit, grad_tempered, grad_selected, n_stride, e_stride,
        w_stride, t_stride, s_stride,
    )  # fmt: skip
    first, count, full = support_of_row(starts, lengths, row, n, V)
    a, b, d, h, tempered = 0.0, 0.0, 0.0, 0.0, 0.0
    g_selected = tl.zeros([BLOCK_K], tl.float32)
    column = tl.full([BLOCK_K], -1, tl.int64)
    needed = False
    if is_active(row_mask, row, masked):
        a, b, d, h, tempered = derivative_of_fields(upstream, of_rows, row, sharpness, WANTED)
        needed = (a != 0.0) | (b != 0.0) | (d != 0.0) | (h != 0.0)
        if grad_selected is not None:
            column = tl.load(index + row * K + k, mask=k < K, other=-1).to(tl.int64)
            member = k < 0
            for j0 in range(0, count, LANES):
                j = j0 + tl.arange(0, LANES)
                member = member | any_equal(read_ids(ids, first, j, count, full), column, j, count)
            member = member | full
            g_selected = tl.load(grad_selected + row * s_stride + k, mask=(k < K) & member, other=0.0)
            needed = needed | (tl.sum((g_selected != 0.0).to(tl.int32), axis=0) > 0)
            if WANTED.LOG_PROBS:
                a -= tl.sum(g_selected, axis=0)
    if needed:
        shift = tl.load(packed + SHIFT * rows.to(tl.int64) + row)
        log_normalizer = tl.load(packed + LOG_NORMALIZER * rows.to(tl.int64) + row)
        derivative = Derivative(shift, log_normalizer, tempered, a, b, d, h)
        for j0 in range(0, count, LANES):
            j = j0 + tl.arange(0, LANES)
            token = read_ids(ids, first, j, count, full)
            used = (token >= 0) & (token < V)
            weight = class_weight_of(reading, token, used)
            z = tl.load(x + token, mask=used, other=0.0)
            g, slope = gradient(z, weight, reading, derivative, WANTED)
            if grad_selected is not None:
                g += tl.sum(tl.where(token[:, None] == column[None, :], g_selected[None, :], 0.0), axis=1)
            g = g * slope
            if full:
                tl.store(to + token, g.to(out.dtype.element_ty), mask=used)
            else:
                tl.store(values + first + j, g, mask=j < count)
        if not full:
            tl.debug_barrier()
            write_zeros(to, 0, V.to(tl.int32), 0, LANES, 8)
            tl.debug_barrier()
            for j0 in range(0, count, LANES):
                j = j0 + tl.arange(0, LANES)
                token = read_ids(ids, first, j, count, full)
                g = tl.load(values + first + j, mask=j < count, other=0.0)
                tl.store(to + token, g.to(out.dtype.element_ty), mask=(token >= 0) & (token < V))
    else:
        write_zeros(to, 0, V.to(tl.int32), 0, LANES, 8)


def lanes_for(K: int) -> int:
    """Ids that a program reads at a time: fewer if each is compared with many selected classes."""
    return max(16, min(LANES, 1024 // power_of_two(K)))


def plan_for(x: Layout, n: int, rows: int, K: int, options: Options, top1: bool, shard: bool) -> Plan:
    """The launch of `support_statistics_kernel` for one group of rows; ``rows`` counts those of all groups."""
    shape, strides, _ = x
    constexprs = dict(WANTED=wanted(options, top1), LANES=lanes_for(K), BLOCK_K=power_of_two(K), SHARD=shard)
    numbers = (rows, shape[-1], K, n, *row_strides(shape, strides), *options.transform.factors(), options.class_weight,
               options.sharpness, options.masked)  # fmt: skip
    return Plan(support_statistics_kernel, shape[:-1].numel(), numbers, constexprs, 4)


def support_statistics(
    logits: torch.Tensor, inputs: Inputs, results: tuple[torch.Tensor | None, ...], options: Options, shard: bool
) -> None:
    """Write the statistics of every row, or their states if ``shard``, into the tensors of ``results``."""
    rows = logits.shape[:-1].numel()
    index, row_mask, class_weights, temperature, ids, starts, lengths = inputs
    K = per_row(index, logits.dim(), 1)
    top1 = index is not None and options.wants("is_top1")
    packed, selected, is_top1 = results
    n, S = sizes(ids, starts)
    for first, (x,) in row_groups(logits) if rows else ():
        of_rows = ids, index, row_mask, temperature, starts, lengths, packed, selected, is_top1
        tensors = flat_rows(first, of_rows, (S, K, 1, 1, 1, 1, 1, K, K))
        launch(plan_for, (layout_of(x), n, rows, K, options, top1, shard), (x, class_weights, *tensors))


def sizes(ids: torch.Tensor | None, starts: torch.Tensor | None) -> tuple[int, int]:
    """The number of ids as `support_of_row` takes it, and how many lie between those of two rows."""
    if starts is None:
        return ids.shape[-1], ids.shape[-1]  # type: ignore[union-attr]
    return ids.numel(), 0  # type: ignore[union-attr]


def gradient_plan_for(
    x: Layout, out: Layout, n: int, given: tuple[bool, ...], gradient_strides: tuple[int, ...], rows: int, K: int,
    options: Options,
) -> Plan:  # fmt: skip
    """The launch of `support_gradient_kernel` for one group of rows, see `softmax_gradient.plan_for`."""
    shape, strides, _ = x
    constexprs = dict(WANTED=wanted_gradient(options, given), LANES=lanes_for(K), BLOCK_K=power_of_two(K))
    numbers = (rows, shape[-1], K, n, *row_strides(shape, strides), *row_strides(shape, out[1])[1:],
               *gradient_strides[:-1], gradient_strides[-1] * K, *options.transform.factors(), options.class_weight,
               options.sharpness, options.masked)  # fmt: skip
    return Plan(support_gradient_kernel, shape[:-1].numel(), numbers, constexprs, 4)


def support_gradient(
    logits: torch.Tensor, inputs: Inputs, packed: torch.Tensor, grads: Sequence[torch.Tensor | None],
    gradient_strides: tuple[int, ...], options: Options, out: torch.Tensor,
) -> None:  # fmt: skip
    """Write the gradient with respect to the logits into ``out``, which may be the logits themselves."""
    rows = logits.shape[:-1].numel()
    index, row_mask, class_weights, temperature, ids, starts, lengths = inputs
    K = per_row(index, logits.dim(), 1)
    values = torch.empty(ids.shape, dtype=torch.float32, device=logits.device)  # type: ignore[union-attr]
    n, S = sizes(ids, starts)
    given = tuple([g is not None for g in grads])
    for first, (x, g) in row_groups(logits, out) if rows else ():
        of_rows = ids, index, row_mask, temperature, starts, lengths, packed, *grads, values
        tensors = flat_rows(first, of_rows, (S, K, 1, 1, 1, 1, 1, 1, 1, 1, 1, K, S))
        about = layout_of(x), layout_of(g), n, given, gradient_strides, rows, K, options
        launch(gradient_plan_for, about, (x, class_weights, g, *tensors))
