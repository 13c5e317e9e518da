"""Forward kernel: the softmax statistics, a few numbers per row. It reads the logits once.

`softmax.statistics` calls it on tensors, `logits` on tiles of logits. Bytes moved: ``rows·V`` logits in, ``O(rows)``
out. A program loops over one row (or one of ``SPLITS`` pieces of it) and has a state per lane, so that threads exchange
nothing in the loop; the states of lanes are merged once at the end. If a row is split, the program that finishes last
merges the pieces, always in the same order.
"""

import torch
import triton
import triton.language as tl

from onepass.autotune.own import choose
from onepass.core.options import Inputs, Options, Results, empty_results
from onepass.core.shard import per_row, state_size
from onepass.kernels import layout
from onepass.kernels.launch import Flat, Out, Plan, Rows, launch
from onepass.kernels.layout import Geometry, Layout, flat_rows, layout_of, power_of_two, row_groups, workspace
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
from onepass.kernels.row_programs import arrives_last, is_active, row_start
from onepass.kernels.softmax_fields import (
    NOWHERE,
    class_weight_of,
    no_statistics,
    statistics_of,
    write_selected,
    write_selected_state,
    write_state,
    write_statistics,
)
from onepass.kernels.support import support_statistics

STATE = tl.constexpr(7)  # numbers per state


@triton.jit
def read_selected(x, index, row, k, K, V):
    """Load the selected logits of a row. Returns the logits, their columns, and which columns lie in the vocabulary."""
    inside = k < 0
    column = k
    selected = tl.zeros(k.shape, x.dtype.element_ty)
    if index is not None:
        column = tl.load(index + row * K + k, mask=k < K, other=0)
        inside = (column >= 0) & (column < V)
        # Kept in the cache until the main loop reads them, so that they are read from memory once.
        selected = tl.load(x + column, mask=inside, other=0.0, eviction_policy="evict_last")
    return selected, column, inside


@triton.jit
def read_tile(state, first, logits, reading, col0, low, high, WANTED: tl.constexpr, LANES: tl.constexpr,
              VEC: tl.constexpr, MASKED: tl.constexpr, CACHED: tl.constexpr):  # fmt: skip
    """Add columns ``[col0, col0 + LANES·VEC)`` to the state, only those within [low, high) if MASKED.

    ``low`` is the column of the first class. If TOP1 is wanted, ``first`` is the start of the first vector that
    contains a lane's maximum. CACHED is the eviction policy of the logits.
    """
    col = col0 + tl.arange(0, LANES)[:, None] * VEC + tl.arange(0, VEC)[None, :]
    valid = (col >= low) & (col < high) if MASKED else None
    x = tl.load(logits + col, mask=valid, eviction_policy=CACHED)
    z = transform(x, reading.inner, reading.outer, WANTED.SOFTCAP)
    m, s, t, w, c, q, u = state
    if WANTED.MEAN:
        u = u + tl.sum((tl.where(valid, z, 0.0) if MASKED else z) * reading.inverse_vocab, axis=1)
    weight = class_weight_of(reading, col, valid, low)
    if WANTED.WEIGHTED and reading.class_weights is None:
        weight = tl.full([LANES, VEC], 1.0, tl.float32) * weight
    if MASKED:
        z = tl.where(valid, z, float("-inf"))
        if WANTED.WEIGHTED:
            weight = tl.where(valid, weight, 0.0)
    state = update(State(m, s, t, w, c, q, u), z, weight, reading.sharpness, WANTED)
    if WANTED.TOP1:
        larger = (state.m > m) | ((s == 0.0) & (state.s > 0.0))
        first = tl.where(larger, col0 + tl.arange(0, LANES) * VEC, first)
    return state, first


@triton.jit
def load_state(records, SPLITS: tl.constexpr):
    """The states that programs have published, of each program one."""
    return State(
        tl.load(records, volatile=True), tl.load(records + SPLITS, volatile=True),
        tl.load(records + SPLITS * 2, volatile=True), tl.load(records + SPLITS * 3, volatile=True),
        tl.load(records + SPLITS * 4, volatile=True), tl.load(records + SPLITS * 5, volatile=True),
        tl.load(records + SPLITS * 6, volatile=True),
    )  # fmt: skip


@triton.jit
def merge_lanes(state, first, sharpness, WANTED: tl.constexpr):
    """`merge` the states of lanes or programs, and find the ``first`` vector with the maximum of all."""
    of_all = merge(state, sharpness, WANTED)
    if WANTED.TOP1:
        first = tl.min(tl.where(state.m == of_all.m, first, NOWHERE), axis=0)
    return of_all, first


@triton.jit(
    do_not_specialize=["rows", "V", "K", "inner_rows", "outer_stride", "inner_stride", "masked"],
    do_not_specialize_on_alignment=["index", "row_mask", "temperature", "packed", "selected", "is_top1", "pieces"],
)
def softmax_statistics_kernel(
    logits: "Rows", class_weights: "Flat", index: "Flat", row_mask: "Flat", temperature: "Flat", packed: "Out",
    selected: "Out", is_top1: "Out", pieces: "Out",
    rows: tl.int32, V: tl.int32, K: tl.int32, inner_rows: tl.int32, outer_stride: tl.int64, inner_stride: tl.int64,
    inner: tl.float32, outer: tl.float32, class_weight: tl.float32, sharpness: tl.float32, masked: tl.int64,
    WANTED: tl.constexpr, ALIGN: tl.constexpr, VEC: tl.constexpr, LANES: tl.constexpr, UNROLL: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_K: tl.constexpr, SHARD: tl.constexpr, FIXED: tl.constexpr,
):  # fmt: skip
    """The statistics of every row.

    Inputs: ``logits`` ``(rows, V)``; ``class_weights`` ``(V,)``, ``index`` ``(rows, K)``, ``row_mask`` and
    ``temperature`` ``(rows,)``, each or None.
    Outputs: ``packed`` ``(len(PACKED), rows)``; ``selected`` ``(rows, K)``, the logits of the index relative to the
    shift, or their log-probs; ``is_top1`` ``(rows, K)`` or None. ``pieces`` is the `layout.workspace`.
    If SHARD, the logits are some columns of the vocabulary, and the only output is ``packed``: the state of every row
    and then its K selected logits, +inf for those in other columns, and whether each is the first maximum if TOP1 is
    wanted, a row of the output each. `merge_shards` merges them.
    Bytes moved: see the module docstring.
    """
    TILE: tl.constexpr = LANES * VEC
    NUMBERS: tl.constexpr = STATE + 1 if WANTED.TOP1 else STATE
    row = (tl.program_id(0) // SPLITS).to(tl.int64)
    split = tl.program_id(0) % SPLITS
    k = tl.arange(0, BLOCK_K)
    active = is_active(row_mask, row, masked)
    inner, outer = factors_of_row(inner, outer, temperature, row, WANTED.SOFTCAP)
    last = split == SPLITS - 1
    statistics = no_statistics()
    relative = tl.zeros([BLOCK_K], tl.float32)
    top1 = relative > 0
    if active:
        state = empty_state(tl.zeros([LANES], tl.float32))
        first = tl.full([LANES], NOWHERE, tl.int32)
        reading = Reading(inner, outer, sharpness, class_weights, class_weight, 1.0 / V)
        # Columns are counted from an aligned address at or before the first logit: the row has [head, head + V).
        start = row_start(row, inner_rows, outer_stride, inner_stride)
        base = logits + (start // VEC * VEC if not FIXED else start)
        head = (start % VEC).to(tl.int32) if ALIGN else 0
        if SPLITS == 1:  # before the loop, which hides the latency
            x_selected, column, inside = read_selected(logits + start, index, row, k, K, V)
        piece = tl.cdiv(head + V, TILE * SPLITS) * TILE
        low = split * piece
        high = tl.minimum(head + V, low + piece)
        begin = low
        if ALIGN:
            begin = low + tl.where(low < head, TILE, 0)
            if low < head:
                state, first = read_tile(state, first, base, reading, low, head, high, WANTED, LANES, VEC, True, "")
        full = begin + tl.maximum(high - begin, 0) // TILE * TILE
        for col in tl.range(begin, full, TILE, loop_unroll_factor=UNROLL):
            state, first = read_tile(state, first, base, reading, col, head, high, WANTED, LANES, VEC, False, "")
        if full < high:
            state, first = read_tile(state, first, base, reading, full, head, high, WANTED, LANES, VEC, True, "")
        state, first = merge_lanes(state, first, sharpness, WANTED)

        if SPLITS > 1:
            # Publish the state of this piece. The program that arrives last merges all pieces.
            record = pieces + row * (NUMBERS * SPLITS) + split
            for i in tl.static_range(STATE):
                tl.store(record + SPLITS * i, state[i])
            if WANTED.TOP1:
                tl.store(record + SPLITS * STATE, first.to(tl.float32, bitcast=True))
            last = arrives_last(pieces, rows, row, NUMBERS, SPLITS)
            if last:
                others = pieces + row * (NUMBERS * SPLITS) + tl.arange(0, SPLITS)
                firsts = first
                if WANTED.TOP1:
                    firsts = tl.load(others + SPLITS * STATE, volatile=True).to(tl.int32, bitcast=True)
                state, first = merge_lanes(load_state(others, SPLITS), firsts, sharpness, WANTED)
        if last:
            m, s, t, w, c, q, u = state
            if index is not None:
                if SPLITS > 1:
                    x_selected, column, inside = read_selected(logits + start, index, row, k, K, V)
                z = transform(x_selected, inner, outer, WANTED.SOFTCAP)
                relative = z - m
                # An index outside the vocabulary makes all results of the row NaN, and through them its gradient.
                if not SHARD:
                    s = tl.where(tl.sum((~inside).to(tl.int32), axis=0) > 0, float("nan"), s)
            # s is 0 if all logits are -inf, and NaN if one is NaN or +inf. Such rows define no distribution: NaN.
            if not SHARD:
                s = tl.where(s > 0, s, float("nan"))
            relative = relative + (s - s)
            if WANTED.TOP1:
                # The first of equal maxima, as in argmax. Its vector is known; loading it again tells its column.
                near = first + tl.arange(0, VEC)
                valid = (near >= head) & (near < head + V)
                largest = valid & (transform(tl.load(base + near, mask=valid), inner, outer, WANTED.SOFTCAP) >= m)
                argmax = tl.min(tl.where(largest, near, NOWHERE), axis=0) - head
                top1 = (z >= m + (s - s)) & (column == argmax)
            if SHARD:
                to = write_state(packed, row, rows, State(m, s, t, w, c, q, u * V), None, WANTED)
                if index is not None:
                    relative = tl.where(inside, relative, float("inf"))
                    write_selected_state(to, rows, k, K, relative, top1, WANTED)
            statistics = statistics_of(State(m, s, t, w, c, q, u))
    if last and not SHARD:
        write_statistics(packed, row, rows, statistics, WANTED)
        if index is not None:
            write_selected(selected, is_top1, row, k, K, relative, top1, statistics.log_normalizer, WANTED)


def plan_for(x: Layout, device: torch.device, rows: int, K: int, options: Options, top1: bool, shard: bool) -> Plan:
    """The launch for one group of rows; ``rows`` counts those of all groups."""
    g = Geometry(x, fixed=options.invariant)
    lanes, splits = g.programs(device)
    what = wanted(options, top1)
    rule = dict(LANES=lanes, UNROLL=1 if what.TEMPERED else 2, SPLITS=splits)  # the larger state needs the registers
    numbers = rule if g.fixed else choose(softmax_statistics_kernel, g.key(options.fields), rule)
    LANES, UNROLL, SPLITS = numbers.values()
    constexprs = dict(
        WANTED=what, **g.constexprs, LANES=LANES, UNROLL=UNROLL, SPLITS=SPLITS,
        BLOCK_K=1 if K == 1 else max(power_of_two(K), LANES),  # so that no two threads read the same index
        SHARD=shard, FIXED=g.fixed and g.unaligned,
    )  # fmt: skip
    return Plan(
        softmax_statistics_kernel, g.rows * SPLITS,
        (rows, g.V, K, *g.strides, *options.transform.factors(), options.class_weight, options.sharpness,
         options.masked),
        constexprs, layout.warps(LANES), workspace(rows, STATE.value + top1, SPLITS),
    )  # fmt: skip


def softmax_statistics(logits: torch.Tensor, inputs: Inputs, options: Options) -> Results:
    """The packed statistics and, for every index, its logit (or log-prob) and whether it is the largest of its row."""
    index, row_mask, class_weights, temperature = inputs[:4]
    packed, selected, is_top1 = results = empty_results(logits, index, options)
    if inputs.support is not None:
        support_statistics(logits, inputs, results, options, False)
        return results
    rows = logits.shape[:-1].numel()
    K = per_row(index, logits.dim(), 1)
    for first, (x,) in row_groups(logits) if rows else ():
        tensors = flat_rows(first, (index, row_mask, temperature, packed, selected, is_top1), (K, 1, 1, 1, K, K))
        about = layout_of(x), x.device, rows, K, options, is_top1 is not None, False
        launch(plan_for, about, (x, class_weights, *tensors))
    return results


def shard_statistics(logits: torch.Tensor, inputs: Inputs, options: Options) -> torch.Tensor:
    """The state of every row of a vocabulary shard, ``(numbers, rows)``, see `softmax_statistics_kernel`.

    The index is relative to the first of these columns, and the class weights are theirs.
    """
    index, row_mask, class_weights, temperature = inputs[:4]
    rows, K = logits.shape[:-1].numel(), per_row(index, logits.dim())
    state = logits.new_empty((state_size(options, K), rows), dtype=torch.float32)
    if inputs.support is not None:
        support_statistics(logits, inputs, (state, None, None), options, True)
        return state
    for first, (x,) in row_groups(logits) if rows else ():
        tensors = flat_rows(first, (index, row_mask, temperature, state), (K, 1, 1, 1))
        about = layout_of(x), x.device, rows, max(K, 1), options, K > 0 and options.wants("is_top1"), True
        launch(plan_for, about, (x, class_weights, *tensors, None, None))
    return state
