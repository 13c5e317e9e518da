"""Softmax statistics and gradient in one launch, for losses whose upstream gradients are known before a row is read.

Cross-entropy is such a loss: its gradient with respect to the statistics does not depend on them. With an upstream
gradient of 1, the gradient of a field is its derivative. `logits.row_loss` and `logits.tiled_statistics` call this
kernel on tiles of logits, `softmax.statistics` on all logits. Bytes moved: the logits in, the gradient out, usually
over them; the two separate kernels read the logits twice. Programs that share a row wait for its normalizer, and read
their pieces again while these are still in the cache of the device. For few rows, the same launch also computes the
average, since the time of launches on the CPU is then the limit.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from onepass.core.memo import memo
from onepass.core.options import Average, FieldGradients, Inputs, Options, Results, empty_results
from onepass.kernels import layout
from onepass.kernels.launch import Flat, Out, Plan, Rows, Strided, launch
from onepass.kernels.layout import Layout, flat_gradients, layout_of, power_of_two
from onepass.kernels.online_softmax import (
    LOWEST,
    Reading,
    State,
    empty_state,
    factors_of_row,
    rounded,
    transform,
    wanted,
)
from onepass.kernels.row_average import compute_row_weight, guessed_weight, part_of, row_average
from onepass.kernels.row_programs import collect, is_active, publish, take_turn, unmasked, write_zeros
from onepass.kernels.softmax_fields import (
    NOWHERE,
    Derivative,
    class_weight_of,
    gradient,
    no_statistics,
    statistics_of,
    write_statistics,
)
from onepass.kernels.softmax_gradient import write_tile
from onepass.kernels.softmax_statistics import merge_lanes, read_tile

# The fields that the kernel computes.
FIELDS = {
    "log_probs", "selected", "shift", "log_normalizer", "expected_logit", "entropy", "weighted_logit", "is_top1",
}  # fmt: skip
# A piece is short enough for those of all running programs to stay in the cache, but long enough to hide the waiting.
MOST_LANES, TILES, MOST_SPLITS = 256, 6, 32
# The widest program is faster if a row has 5 to 7 of its tiles, or just 4 (H100; with 4.9, it takes 1.2 x as long).
WIDEST, FEWEST_TILES, MOST_TILES = 1024, 5, 7
LEAST_LOGITS = 1 << 26  # of a tensor of many rows that is read once: below, the host is the limit, with more launches
NONE, NO_STRIDES = (None,) * 4, (0,) * 4  # of four upstream gradients
FEW_ROWS = 512  # up to so many, the same launch computes their average: each program reads the whole row mask


@triton.jit(
    do_not_specialize=[
        "rows", "V", "row_stride", "out_stride", "n_stride", "e_stride", "w_stride", "s_stride", "masked",
    ],
    do_not_specialize_on_alignment=[
        "index", "row_mask", "temperature", "packed", "selected", "is_top1",
        "grad_log_normalizer", "grad_expected_logit", "grad_weighted_logit", "grad_selected", "divisor", "last",
        "row_weight", "total", "pieces",
    ],
)  # fmt: skip
def softmax_loss_kernel(
    logits: "Rows", out: "Rows", class_weights: "Flat", index: "Flat", row_mask: "Flat", temperature: "Flat",
    packed: "Out", selected: "Out", is_top1: "Out",
    grad_log_normalizer: "Strided", grad_expected_logit: "Strided", grad_weighted_logit: "Strided",
    grad_selected: "Strided", divisor: "Flat", last: "Flat", row_weight: "Out", total: "Out", pieces: "Out",
    rows: tl.int32, V: tl.int32, row_stride: tl.int64, out_stride: tl.int64, n_stride: tl.int32, e_stride: tl.int32,
    w_stride: tl.int32, s_stride: tl.int32,
    inner: tl.float32, outer: tl.float32, class_weight: tl.float32, factor: tl.float32, masked: tl.int64,
    WANTED: tl.constexpr, GRADIENT: tl.constexpr, VEC: tl.constexpr, LANES: tl.constexpr, UNROLL: tl.constexpr,
    SPLITS: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr, COUNTED: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """The statistics of every row, and its gradient, which overwrites the logits if ``out`` is None.

    Inputs: ``logits`` ``(rows, V)``; ``class_weights`` ``(V,)``, ``row_mask`` and ``temperature`` ``(rows,)``, each or
    None; ``index`` ``(rows,)``; the upstream gradients ``(rows,)``, each or None; ``divisor`` and ``last``, those of
    `row_weight_kernel`.
    Outputs: the gradient in ``out`` ``(rows, V)`` or in ``logits``; ``packed`` ``(len(PACKED), rows)``; ``selected``
    ``(rows,)``; ``is_top1`` ``(rows,)`` or None. With ``row_weight``, also those of `row_average`: ``row_weight`` and
    ``total`` are those of `row_weight_kernel` and `row_average_kernel`, and the upstream gradient of every row is
    ``row_weight[1]``.
    ``pieces`` is the workspace: how many programs have started and how many rows are finished, and then, of the SPLITS
    programs that share a row, WORDS of two numbers each, ``(rows, WORDS, SPLITS)``. It is 0 before the launch. BLOCK
    and BLOCK_R, of at least ``rows`` rows, are powers of two. WANTED is of the statistics, GRADIENT of the gradient.
    Bytes moved: see the module docstring.
    """
    TILE: tl.constexpr = LANES * VEC
    turn = tl.program_id(0)
    if SPLITS > 1:
        turn = take_turn(pieces)
    row = (turn // SPLITS).to(tl.int64)
    split = turn % SPLITS
    piece = tl.cdiv(V, TILE * SPLITS) * TILE
    low = split * piece
    high = tl.minimum(V, low + piece)
    full = low + tl.maximum(high - low, 0) // TILE * TILE
    x = logits + row * row_stride // VEC * VEC  # for the compiler: `supports_fused_loss` has checked the alignment
    g = x
    if out is not None:
        g = out + row * out_stride // VEC * VEC
    active = is_active(row_mask, row, masked)
    inner, outer = factors_of_row(inner, outer, temperature, row, WANTED.SOFTCAP)
    reading = Reading(inner, outer, 0.0, class_weights, class_weight)
    statistics = no_statistics()
    z_selected = 0.0
    top1 = active & False
    column = tl.load(index + row)
    inside = (column >= 0) & (column < V)
    mine = (column >= low) & (column < high)  # of this program, which is the only one that reads and writes it
    x_selected = tl.load(x + column, mask=mine & active, other=0.0)
    a, b, d, w = 0.0, 0.0, 0.0, 0.0
    if active:
        if grad_log_normalizer is not None:
            a = tl.load(grad_log_normalizer + row * n_stride)
        if GRADIENT.EXPECTED:
            b = tl.load(grad_expected_logit + row * e_stride)
        if grad_weighted_logit is not None:
            d = tl.load(grad_weighted_logit + row * w_stride)
        if grad_selected is not None:
            w = tl.load(grad_selected + row * s_stride)
    part = 1.0
    if row_weight is not None:
        every = tl.arange(0, BLOCK_R)
        count = tl.zeros([BLOCK_R], tl.int32)
        if COUNTED:
            count += unmasked(row_mask, every, rows, masked).to(tl.int32)
        part = part_of(count, divisor, factor, COUNTED)
        of_guess = guessed_weight(last, part)
        w = tl.where(active, of_guess, 0.0)
        if turn == 0:
            tl.store(row_weight, part)
            tl.store(row_weight + 1, of_guess)
    needed = (a != 0.0) | (b != 0.0) | (d != 0.0) | (w != 0.0)
    a -= w if WANTED.LOG_PROBS else 0.0
    if active:
        state = empty_state(tl.zeros([LANES], tl.float32))
        first = tl.full([LANES], NOWHERE, tl.int32)
        # The first read keeps the piece in the cache for the second, after which it is not needed.
        for col in tl.range(low, full, TILE, loop_unroll_factor=UNROLL):
            state, first = read_tile(state, first, x, reading, col, 0, high, WANTED, LANES, VEC, False, "evict_last")
        if full < high:
            state, first = read_tile(state, first, x, reading, full, 0, high, WANTED, LANES, VEC, True, "evict_last")
        state, first = merge_lanes(state, first, 0.0, WANTED)
        if SPLITS > 1:
            words = pieces.to(tl.pointer_type(tl.int64), bitcast=True) + 1 + row * (WORDS * SPLITS)
            state, first = of_all_programs(words, split, state, first, WANTED, SPLITS, WORDS, BLOCK)
        m, s, t, v, c, q, u = state
        # As in softmax_statistics, an index outside the vocabulary or a row without a distribution gives NaN.
        s = tl.where(inside & (s > 0), s, float("nan"))
        statistics = statistics_of(State(m, s, t, v, c, q, u))
        z_selected = transform(x_selected, inner, outer, WANTED.SOFTCAP)
        if WANTED.TOP1:  # the first of equal maxima, by the program that has the index
            near = first + tl.arange(0, VEC)
            valid = (near >= low) & (near < high) & mine
            largest = valid & (transform(tl.load(x + near, mask=valid), inner, outer, WANTED.SOFTCAP) >= m)
            top1 = (z_selected >= statistics.shift) & (tl.min(tl.where(largest, near, NOWHERE), axis=0) == column)
            tl.debug_barrier()  # before the gradient overwrites these logits
        z_selected -= statistics.shift + (statistics.log_normalizer if WANTED.LOG_PROBS else 0.0)
        if GRADIENT.EXPECTED:
            a += b * (statistics.expected_logit if GRADIENT.ENTROPY else 1.0 - statistics.expected_logit)
            b = -b if GRADIENT.ENTROPY else b

    if split == 0:
        write_statistics(packed, row, rows, statistics, WANTED)
    if mine | ((split == 0) & ~inside):
        tl.store(selected + row, z_selected)
        if WANTED.TOP1:
            tl.store(is_top1 + row, top1)
        if row_weight is not None:  # the program that finishes the last row sums all rows, in a fixed order
            tl.debug_barrier()
            finished = tl.atomic_add(pieces.to(tl.pointer_type(tl.int32), bitcast=True) + 1, 1, sem="acq_rel")
            if finished == rows - 1:
                every = tl.arange(0, BLOCK_R)
                values = tl.load(selected + every, mask=every < rows, other=0.0, volatile=True)
                tl.store(total, tl.sum(values, axis=0) * part)
    if needed:
        derivative = Derivative(statistics.shift, statistics.log_normalizer, 0.0, a, b, d, 0.0)
        for col in tl.range(low, full, TILE):
            write_tile(x, g, reading, derivative, col, 0, high, GRADIENT, LANES, VEC, False, "evict_first")
        if full < high:
            write_tile(x, g, reading, derivative, full, 0, high, GRADIENT, LANES, VEC, True, "evict_first")
        weight = class_weight_of(reading, column, mine)
        of_selected, slope = gradient(x_selected, weight, reading, derivative, GRADIENT)
        tl.debug_barrier()
        tl.store(g + column, ((rounded(of_selected) + w) * slope).to(g.dtype.element_ty), mask=mine)
    else:
        write_zeros(g, low, high, 0, LANES, VEC)


@triton.jit
def of_all_programs(words, split, state, first, WANTED: tl.constexpr, SPLITS: tl.constexpr, WORDS: tl.constexpr,
                    BLOCK: tl.constexpr):  # fmt: skip
    """The state and the first maximum of a row, from those of the SPLITS programs that share it.

    ``words`` is the part of the workspace that belongs to the row, see `softmax_loss_kernel`.
    """
    m, s, t, v, c, _q, _u = state
    publish(words + split, m, s)
    if WANTED.EXPECTED or WANTED.TOP1:
        published = t if WANTED.EXPECTED else s
        publish(words + SPLITS + split, published, first.to(tl.float32, bitcast=True) if WANTED.TOP1 else published)
    if WANTED.WEIGHTED:
        publish(words + (WORDS - 1) * SPLITS + split, v, c)
        vs, cs, _ = collect(words + (WORDS - 1) * SPLITS, SPLITS, BLOCK)
    firsts = first
    if WANTED.EXPECTED or WANTED.TOP1:
        ts, firsts, _ = collect(words + SPLITS, SPLITS, BLOCK)
    ms, ss, there = collect(words, SPLITS, BLOCK)
    ms, ss = tl.where(there, ms, LOWEST), tl.where(there, ss, 0.0)
    if WANTED.WEIGHTED:
        vs, cs = tl.where(there, vs, 0.0), tl.where(there, cs, 0.0)
    else:
        vs, cs = ss, ss
    if WANTED.EXPECTED:
        ts = tl.where(there, ts, 0.0)
    else:
        ts = ss
    if WANTED.TOP1:
        firsts = tl.where(there, firsts.to(tl.int32, bitcast=True), NOWHERE)
    return merge_lanes(State(ms, ss, ts, vs, cs, ss, ss), firsts, 0.0, WANTED)


@memo
def programs_for(vocab: int, size: int) -> tuple[int, int]:
    """``(lanes, splits)`` for a row of ``vocab`` logits of ``size`` bytes: a program's width, and their number."""
    vec = 16 // size
    lanes = layout.lanes_for(vocab, vec, MOST_LANES)
    # Programs that wait for each other must run at the same time, but the interpreter runs one after the other.
    if layout.one_at_a_time():
        return lanes, 1
    tile = WIDEST * vec
    if FEWEST_TILES * tile <= vocab <= MOST_TILES * tile or vocab == (FEWEST_TILES - 1) * tile:
        return WIDEST, 1
    splits = -(-vocab // (lanes * vec * TILES))
    if splits == 3 and vocab < 3 * lanes * vec * TILES:  # twice as many of half the width
        return lanes // 2, -(-2 * vocab // (lanes * vec * TILES))
    if splits != 2 and splits <= MOST_SPLITS:
        return lanes, splits
    return 2 * lanes, -(-vocab // (2 * lanes * vec * TILES))  # one wide program, or fewer that wait


def most_splits(device: torch.device) -> int:
    """How many programs of a row may wait for each other.

    In a launch, all programs that wait for one that has not started belong to the row that was begun last. They leave
    room for the other programs of this row as long as they do not fill the device. A multiprocessor runs at least one
    program, in fact several. With a quarter of the multiprocessors, launches on several streams can wait side by side,
    and so can those on a slice of a device.
    """
    return layout.multiprocessors(device) // 4


def plan_for(
    x: Layout, out_stride: int, of_expected: bool, gradient_strides: tuple[int, ...], options: Options,
    average: tuple[float, bool] | None,
) -> Plan:  # fmt: skip
    """The launch of `softmax_loss_kernel`. Of an average, the factor and whether the rows are counted."""
    (rows, V), (row_stride, _), size = x
    VEC = 16 // size
    lanes, SPLITS = programs_for(V, size)
    what = wanted(options, options.wants("is_top1"))
    words = 1 + what.WEIGHTED + (what.EXPECTED or what.TOP1)
    of_gradient = what._replace(EXPECTED=of_expected, ENTROPY=options.wants("entropy"))
    constexprs = dict(
        WANTED=what, GRADIENT=of_gradient, VEC=VEC, LANES=lanes,
        UNROLL=1 if what.WEIGHTED or what.SOFTCAP else 2, SPLITS=SPLITS, WORDS=words, BLOCK=power_of_two(SPLITS),
        COUNTED=average is not None and average[1], BLOCK_R=0 if average is None else max(power_of_two(rows), 32),
    )  # fmt: skip
    waiting = 2 * rows * words * SPLITS if SPLITS > 1 else 0
    return Plan(
        softmax_loss_kernel, rows * SPLITS,
        (rows, V, row_stride, out_stride, *gradient_strides, *options.transform.factors(), options.class_weight,
         1.0 if average is None else average[0], options.masked),
        constexprs, layout.warps(lanes), waiting + 2 if waiting or average is not None else 0,
    )  # fmt: skip


def supports_fused_loss(logits: torch.Tensor, index: torch.Tensor | None, options: Options) -> bool:
    """Whether `softmax_loss` supports these arguments.

    It takes ``(rows, V)`` logits whose rows are aligned to 16 bytes, one index per row, some of the fields, and no more
    programs per row than can wait for each other.
    """
    _, splits = programs_for(logits.shape[-1], logits.element_size())
    if logits.is_cuda and splits > max(1, most_splits(logits.device)):
        return False
    one = index is not None and index.dim() == 1
    aligned = not (logits.stride(0) * logits.element_size() % 16 or logits.data_ptr() % 16)
    return one and aligned and FIELDS.issuperset(options.names())


def reads_once(logits: torch.Tensor, inputs: Inputs, options: Options) -> bool:
    """Whether `softmax_average` supports logits ``(..., V)`` and a new gradient, and is faster than two kernels."""
    index, vocab = inputs.index, logits.shape[-1]
    if index is None or index.dim() != logits.dim() - 1 or inputs.support is not None or options.invariant:
        return False
    # A soft-cap is computed twice and is then the limit, to which waiting for other programs adds.
    if options.transform.softcap is not None or not logits.numel() or vocab * logits.element_size() % 16:
        return False
    if logits.numel() < LEAST_LOGITS and index.numel() > FEW_ROWS:
        return False
    if logits.dim() != 2 and not logits.is_contiguous():
        return False
    if logits.dim() != 2:
        logits, index = logits.view(-1, vocab), index.reshape(-1)
    return supports_fused_loss(logits, index, options)


def softmax_loss(
    logits: torch.Tensor, inputs: Inputs, grads: FieldGradients, options: Options, out: torch.Tensor
) -> Results:
    """Return the `softmax_statistics` of logits ``(..., V)``, and write their `softmax_gradient` to ``out``.

    ``out`` may be the logits. `supports_fused_loss` says whether this is possible.
    """
    results = empty_results(logits, inputs.index, options)
    if logits.numel():
        given = grads.log_normalizer, grads.expected_logit, grads.weighted_logit, grads.selected
        of_fields, strides = flat_gradients(given)
        _launch(logits, inputs, of_fields, strides, options, out, results)
    return results


def softmax_average(
    logits: torch.Tensor, inputs: Inputs, average: Average, last: torch.Tensor | None, options: Options,
    out: torch.Tensor,
) -> tuple[Results, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the `softmax_statistics`, the average of the only field, log-probs, and the weight of a row.

    The gradient of the average is written to ``out``, for the upstream gradient of the ``last`` one (None: 1).
    `reads_once` says whether this is possible.
    """
    rows = logits.shape[:-1].numel()
    if rows > FEW_ROWS:
        row_weight = compute_row_weight(logits, inputs.row_mask, average, last)
        results = softmax_loss(logits, inputs, FieldGradients(selected=row_weight[1]), options, out)
        total, row_weight = row_average(results[1], inputs.row_mask, average, row_weight)  # type: ignore[arg-type]
        return results, total, row_weight
    results = empty_results(logits, inputs.index, options)
    total, row_weight = results[0].new_empty(()), results[0].new_empty(3)
    how = average.factor, average.counted
    _launch(logits, inputs, NONE, NO_STRIDES, options, out, results, how, (average.divisor, last, row_weight, total))
    return results, total, row_weight


def _launch(
    logits: torch.Tensor, inputs: Inputs, grads: Sequence[torch.Tensor | None], strides: tuple[int, ...],
    options: Options, out: torch.Tensor, results: Results, average: tuple[float, bool] | None = None,
    of_average: Sequence[torch.Tensor | None] = NONE,
) -> None:  # fmt: skip
    """Launch the kernel for flat upstream gradients with these strides."""
    index, row_mask, class_weights, temperature = inputs[:4]
    x = logits if logits.dim() == 2 else logits.view(-1, logits.shape[-1])
    to = None if out is logits else out if out.dim() == 2 else out.view(x.shape)
    about = layout_of(x), 0 if to is None else to.stride(0), grads[1] is not None, strides, options, average
    launch(plan_for, about, (x, to, class_weights, index, row_mask, temperature, *results, *grads, *of_average))
