"""Divergences between two rows of logits: a few numbers per row.

`softmax.divergence` calls it on tensors and on tiles of logits.

For KL(P ‖ Q), both tensors are read once. With the transformed logits ``p, q`` and their maxima ``m_p, m_q``, the
online state is

    s_p = Σ exp(p - m_p),  s_q = Σ exp(q - m_q),  d = Σ exp(p - m_p)·((p - m_p) - (q - m_q))

and KL = d/s_p - log s_p + log s_q. The generalized Jensen-Shannon divergence (JSD) needs both normalizers before its
first term. `softmax_statistics` computes them in a first read, and this kernel computes in a second read

    mean_p = Σ P·log(P / M),  mean_q = Σ Q·log(Q / M),  M = w_p·P + w_q·Q,  JSD = w_p·mean_p + w_q·mean_q.

Terms of probability 0 are 0. Bytes moved: both tensors in, twice for JSD.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from onepass.autotune.own import choose
from onepass.core.options import PairOptions, PairRows, empty_pair_numbers, normalizers
from onepass.core.shard import PAIR_STATE
from onepass.kernels import layout
from onepass.kernels.launch import Flat, Out, Plan, Rows, launch
from onepass.kernels.layout import Geometry, Layout, flat_rows, layout_of, row_groups, workspace
from onepass.kernels.online_softmax import LOG2E, LOWEST, factors_of_row, transform
from onepass.kernels.row_programs import arrives_last, is_active, row_start
from onepass.kernels.softmax_statistics import softmax_statistics

STATE = tl.constexpr(len(PAIR_STATE))  # numbers per state
SHIFT, LOG_NORMALIZER, MEAN = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # rows of p_numbers and q_numbers
LANES_OF_MANY_ROWS = 512  # twice that of kernels of one tensor: a tile has two loads, and the state is larger


class Divergence(NamedTuple):
    """Which divergence a kernel computes, and of which logits, known when it is compiled."""

    MIXTURE: bool  # JSD; else KL(P ‖ Q)
    P_SOFTCAP: bool
    Q_SOFTCAP: bool


class PairState(NamedTuple):
    """The online state, of each lane or of a row."""

    mp: Any
    sp: Any
    mq: Any
    sq: Any
    d: Any


class Side(NamedTuple):
    """One of the two rows of logits, and its normalizer where it is known. ``weight`` is its part of a mixture."""

    logits: Any
    inner: Any  # the factors of `transform`
    outer: Any
    weight: Any
    shift: Any = 0.0
    log_normalizer: Any = 0.0


@triton.jit
def read_normalizer(numbers, rows, row):
    """Load the shift and the log-normalizer of a row."""
    rows = rows.to(tl.int64)
    return tl.load(numbers + SHIFT * rows + row), tl.load(numbers + LOG_NORMALIZER * rows + row)


@triton.jit
def load_transformed(side, col, valid, SOFTCAP: tl.constexpr):
    """Load some transformed logits."""
    return transform(tl.load(side.logits + col, mask=valid), side.inner, side.outer, SOFTCAP)


@triton.jit
def move(d, s, back_p, back_q, alpha):
    """``d`` relative to other maxima; 0 if its probabilities underflow there, even if ``d`` is infinite."""
    return tl.where(alpha > 0, alpha * (d + s * (back_p - back_q)), 0.0)


@triton.jit
def update_kl(state, zp, zq):
    """Add a tile ``[LANES, VEC]`` of both rows to one state per lane."""
    mp, sp, mq, sq, d = state
    new_p = tl.maximum(mp, tl.max(zp, axis=1))
    new_q = tl.maximum(mq, tl.max(zq, axis=1))
    back_p = tl.maximum(mp - new_p, LOWEST)
    back_q = tl.maximum(mq - new_q, LOWEST)
    alpha = tl.exp2(back_p * LOG2E)
    dp = zp - new_p[:, None]
    dq = zq - new_q[:, None]
    ep = tl.exp2(dp * LOG2E)
    d = move(d, sp, back_p, back_q, alpha) + tl.sum(ep * tl.where(ep > 0, dp - dq, 0.0), axis=1)
    sp = alpha * sp + tl.sum(ep, axis=1)
    sq = tl.exp2(back_q * LOG2E) * sq + tl.sum(tl.exp2(dq * LOG2E), axis=1)
    return PairState(new_p, sp, new_q, sq, d)


@triton.jit
def merge_kl(state):
    """Reduce a vector of states to one."""
    mp, sp, mq, sq, d = state
    new_p = tl.max(mp, axis=0)
    new_q = tl.max(mq, axis=0)
    back_p = tl.maximum(mp - new_p, LOWEST)
    back_q = tl.maximum(mq - new_q, LOWEST)
    alpha = tl.exp2(back_p * LOG2E)
    d = tl.sum(move(d, sp, back_p, back_q, alpha), axis=0)
    sq = tl.sum(tl.exp2(back_q * LOG2E) * sq, axis=0)
    return PairState(new_p, tl.sum(alpha * sp, axis=0), new_q, sq, d)


@triton.jit
def log_ratios(log_p, log_q, w_p, w_q):
    """``P, log(P/M), Q, log(Q/M)`` for ``M = w_p·P + w_q·Q``. A logarithm is 0 where its P or Q is 0."""
    p = tl.exp2(log_p * LOG2E)
    q = tl.exp2(log_q * LOG2E)
    # log(P/M) = -log(w_p + w_q·Q/P) = logsigmoid(x) - log w_p. The mixture, which may underflow, is not needed.
    log_w_p, log_w_q = tl.log(w_p), tl.log(w_q)
    x = (log_p - log_q) + (log_w_p - log_w_q)
    e = tl.exp2(tl.abs(x) * -LOG2E)
    # Minimax fit of log(1 + e) / e over [0, 1], which is faster than a logarithm per element.
    poly = 0.005232504466139768
    poly = poly * e - 0.029504480290833024
    poly = poly * e + 0.07822472076128542
    poly = poly * e - 0.136631417893597
    poly = poly * e + 0.19105958128843514
    poly = poly * e - 0.24842969888962083
    poly = poly * e + 0.33319095281079464
    poly = poly * e - 0.4999949306961083
    poly = poly * e + 0.9999999698748331
    log1p = poly * e
    of_p = tl.minimum(x, 0.0) - log1p - log_w_p
    of_q = -tl.maximum(x, 0.0) - log1p - log_w_q
    return p, tl.where(p > 0, of_p, 0.0), q, tl.where(q > 0, of_q, 0.0)


@triton.jit
def update(state, p, q, col0, low, high, DIVERGENCE: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr,
           MASKED: tl.constexpr):  # fmt: skip
    """Add columns ``[col0, col0 + LANES·VEC)`` to the state, only those within [low, high) if MASKED.

    ``p`` and ``q`` are each a `Side`. Of JSD, only ``sp`` and ``sq`` are used, for the means.
    """
    col = col0 + tl.arange(0, LANES)[:, None] * VEC + tl.arange(0, VEC)[None, :]
    valid = (col >= low) & (col < high) if MASKED else None
    zp = load_transformed(p, col, valid, DIVERGENCE.P_SOFTCAP)
    zq = load_transformed(q, col, valid, DIVERGENCE.Q_SOFTCAP)
    if MASKED:
        zp = tl.where(valid, zp, float("-inf"))
        zq = tl.where(valid, zq, float("-inf"))
    if DIVERGENCE.MIXTURE:
        log_p, log_q = (zp - p.shift) - p.log_normalizer, (zq - q.shift) - q.log_normalizer
        probs_p, ratio_p, probs_q, ratio_q = log_ratios(log_p, log_q, p.weight, q.weight)
        mp, sp, mq, sq, d = state
        sp += tl.sum(probs_p * ratio_p, axis=1)
        sq += tl.sum(probs_q * ratio_q, axis=1)
        state = PairState(mp, sp, mq, sq, d)
    else:
        state = update_kl(state, zp, zq)
    return state


@triton.jit
def merge(state, MIXTURE: tl.constexpr):
    """Reduce a vector of states of either divergence to one."""
    if MIXTURE:
        mp, sp, mq, sq, d = state
        return PairState(tl.max(mp, axis=0), tl.sum(sp, axis=0), tl.max(mq, axis=0), tl.sum(sq, axis=0),
                         tl.sum(d, axis=0))  # fmt: skip
    return merge_kl(state)


@triton.jit
def load_records(records, SPLITS: tl.constexpr):
    """The states that programs have published, of each program one."""
    return PairState(
        tl.load(records, volatile=True), tl.load(records + SPLITS, volatile=True),
        tl.load(records + SPLITS * 2, volatile=True), tl.load(records + SPLITS * 3, volatile=True),
        tl.load(records + SPLITS * 4, volatile=True),
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["rows", "V", "inner_rows", "p_outer_stride", "p_inner_stride", "q_outer_stride",
                       "q_inner_stride"],
    do_not_specialize_on_alignment=[
        "row_mask", "p_temperature", "q_temperature", "p_numbers", "q_numbers", "loss", "pieces",
    ],
)  # fmt: skip
def divergence_kernel(
    p: "Rows", q: "Rows", row_mask: "Flat", p_temperature: "Flat", q_temperature: "Flat",
    p_numbers: "Out", q_numbers: "Out", loss: "Out", pieces: "Out",
    rows: tl.int32, V: tl.int32, inner_rows: tl.int32, p_outer_stride: tl.int64, p_inner_stride: tl.int64,
    q_outer_stride: tl.int64, q_inner_stride: tl.int64, p_inner: tl.float32, p_outer: tl.float32,
    q_inner: tl.float32, q_outer: tl.float32, w_p: tl.float32, w_q: tl.float32,
    DIVERGENCE: tl.constexpr, ALIGN: tl.constexpr, SAME_PHASE: tl.constexpr, VEC: tl.constexpr, LANES: tl.constexpr,
    SPLITS: tl.constexpr, SHARD: tl.constexpr, FIXED: tl.constexpr,
):  # fmt: skip
    """The divergence between each row of ``p`` and the same row of ``q``: KL(P ‖ Q), or JSD.

    Inputs: logits ``p`` and ``q`` ``(rows, V)``; ``row_mask``, ``p_temperature`` and ``q_temperature`` ``(rows,)``,
    each or None. For JSD, also the shifts and log-normalizers in ``p_numbers`` and ``q_numbers``.
    Outputs: ``loss`` ``(rows,)``; ``p_numbers`` and ``q_numbers`` ``(3, rows)``: shift, log-normalizer and mean of each
    row (only the mean for JSD). All are 0 for masked rows. ``pieces`` is the `layout.workspace`.
    If SHARD, the logits are some columns of the vocabulary, and ``p_numbers`` ``(5, rows)`` is the only output: the
    state of every row, see `core.shard.PAIR_STATE`. `merge_divergences` merges the states.
    Bytes moved: see the module docstring.
    """
    TILE: tl.constexpr = LANES * VEC
    row = (tl.program_id(0) // SPLITS).to(tl.int64)
    split = tl.program_id(0) % SPLITS
    rows = rows.to(tl.int64)
    active = is_active(row_mask, row, 0)
    p_inner, p_outer = factors_of_row(p_inner, p_outer, p_temperature, row, DIVERGENCE.P_SOFTCAP)
    q_inner, q_outer = factors_of_row(q_inner, q_outer, q_temperature, row, DIVERGENCE.Q_SOFTCAP)
    last = split == SPLITS - 1
    mp, sp, mq, sq, d = 0.0, 0.0, 0.0, 0.0, 0.0
    kl, p_mean, q_mean = 0.0, 0.0, 0.0
    if active:
        zero = tl.zeros([LANES], tl.float32)
        state = PairState(zero + LOWEST, zero, zero + LOWEST, zero, zero)
        # As in softmax_statistics, columns are counted from an aligned address at or before the row of p.
        start = row_start(row, inner_rows, p_outer_stride, p_inner_stride)
        q_start = row_start(row, inner_rows, q_outer_stride, q_inner_stride)
        head = (start % VEC).to(tl.int32) if ALIGN else 0
        p_base = p + (start // VEC * VEC if not FIXED else start)
        q_base = q + (q_start // VEC * VEC if SAME_PHASE else q_start - head)
        of_p, of_q = Side(p_base, p_inner, p_outer, w_p), Side(q_base, q_inner, q_outer, w_q)
        if DIVERGENCE.MIXTURE:
            p_shift, p_norm = read_normalizer(p_numbers, rows, row)
            q_shift, q_norm = read_normalizer(q_numbers, rows, row)
            of_p = Side(p_base, p_inner, p_outer, w_p, p_shift, p_norm)
            of_q = Side(q_base, q_inner, q_outer, w_q, q_shift, q_norm)
        piece = tl.cdiv(head + V, TILE * SPLITS) * TILE
        low = split * piece
        high = tl.minimum(head + V, low + piece)
        begin = low
        if ALIGN:
            begin = low + tl.where(low < head, TILE, 0)
            if low < head:
                state = update(state, of_p, of_q, low, head, high, DIVERGENCE, LANES, VEC, True)
        full = begin + tl.maximum(high - begin, 0) // TILE * TILE
        for col in range(begin, full, TILE):
            state = update(state, of_p, of_q, col, head, high, DIVERGENCE, LANES, VEC, False)
        if full < high:
            state = update(state, of_p, of_q, full, head, high, DIVERGENCE, LANES, VEC, True)
        state = merge(state, DIVERGENCE.MIXTURE)
        if SPLITS > 1:
            record = pieces + row * (STATE * SPLITS) + split
            for i in tl.static_range(STATE):
                tl.store(record + SPLITS * i, state[i])
            last = arrives_last(pieces, rows, row, STATE, SPLITS)
            if last:
                others = pieces + row * (STATE * SPLITS) + tl.arange(0, SPLITS)
                state = merge(load_records(others, SPLITS), DIVERGENCE.MIXTURE)
        mp, sp, mq, sq, d = state
        if DIVERGENCE.MIXTURE:
            p_mean, q_mean, kl = sp, sq, w_p * sp + w_q * sq
        elif SHARD:
            if last:
                for i in tl.static_range(STATE):
                    tl.store(p_numbers + row + i * rows, state[i])
        else:
            # As in softmax_statistics, a sum of 0 or NaN means that the row defines no distribution.
            sp = tl.where(sp > 0, sp, float("nan"))
            sq = tl.where(sq > 0, sq, float("nan"))
            kl = d / sp - tl.log(sp) + tl.log(sq)
            p_mean = kl
    else:
        sp, sq = 1.0, 1.0
    if last and not SHARD:
        if not DIVERGENCE.MIXTURE:
            tl.store(p_numbers + SHIFT * rows + row, mp)
            tl.store(p_numbers + LOG_NORMALIZER * rows + row, tl.log(sp))
            tl.store(q_numbers + SHIFT * rows + row, mq)
            tl.store(q_numbers + LOG_NORMALIZER * rows + row, tl.log(sq))
        tl.store(p_numbers + MEAN * rows + row, p_mean)
        tl.store(q_numbers + MEAN * rows + row, q_mean)
        tl.store(loss + row, kl)


def plan_for(p: Layout, q: Layout, device: torch.device, rows: int, options: PairOptions, shard: bool) -> Plan:
    """The launch of `divergence_kernel` for one group of rows; ``rows`` counts those of all groups."""
    g = Geometry(p, q, fixed=options.invariant)
    lanes, splits = g.programs(device, LANES_OF_MANY_ROWS)
    rule = dict(LANES=lanes, SPLITS=splits)
    LANES, SPLITS = (rule if g.fixed else choose(divergence_kernel, g.key(options.direction), rule)).values()
    of_p, of_q = options.ordered(options.student, options.teacher)
    what = Divergence(options.direction == "jsd", of_p.softcap is not None, of_q.softcap is not None)
    constexprs = dict(
        DIVERGENCE=what, **g.constexprs, LANES=LANES, SPLITS=SPLITS, SHARD=shard, FIXED=g.fixed and g.unaligned,
    )  # fmt: skip
    numbers = (rows, g.V, *g.strides, *of_p.factors(), *of_q.factors(), *options.weights)
    return Plan(
        divergence_kernel, g.rows * SPLITS, numbers, constexprs, layout.warps(LANES),
        workspace(rows, STATE.value, SPLITS),
    )  # fmt: skip


def divergence(student: torch.Tensor, teacher: torch.Tensor, read: PairRows, options: PairOptions) -> torch.Tensor:
    """`PAIR_NUMBERS` of every row, ``(len(PAIR_NUMBERS), ...)``."""
    packed = empty_pair_numbers(student, teacher)
    if packed[0].numel() and options.direction == "jsd":
        for x, numbers, inputs, of_x in zip((student, teacher), (packed[:2], packed[3:5]), *normalizers(read, options)):
            numbers.copy_(softmax_statistics(x, inputs, of_x)[0][:2])
    write_means(student, teacher, read, packed, options)
    return packed


def write_means(
    student: torch.Tensor, teacher: torch.Tensor, read: PairRows, packed: torch.Tensor,
    options: PairOptions,
) -> None:  # fmt: skip
    """Write the means and the divergence into ``packed`` and, except for JSD, which reads them there, the normalizers.

    If the logits are some columns of the vocabulary, those of JSD are sums over these columns.
    """
    p_numbers, q_numbers = options.ordered(packed[:3], packed[3:6])
    read_pairs(student, teacher, read, (p_numbers, q_numbers, packed[6]), options)


def divergence_states(
    student: torch.Tensor, teacher: torch.Tensor, read: PairRows, options: PairOptions
) -> torch.Tensor:
    """The state of every row of a vocabulary shard, ``(len(PAIR_STATE), rows)``, for KL(P ‖ Q)."""
    states = student.new_empty((STATE.value, student.shape[:-1].numel()), dtype=torch.float32)
    read_pairs(student, teacher, read._replace(row_mask=None), (states, None, None), options, True)
    return states


def read_pairs(
    student: torch.Tensor, teacher: torch.Tensor, read: PairRows, outputs: tuple[torch.Tensor | None, ...],
    options: PairOptions, shard: bool = False,
) -> None:  # fmt: skip
    """Launch `divergence_kernel`."""
    of_rows = read.row_mask, *options.ordered(*read[1:]), *outputs
    rows = student.shape[:-1].numel()
    for first, pair in row_groups(student, teacher) if rows else ():
        p, q = options.ordered(*pair)
        about = layout_of(p), layout_of(q), p.device, rows, options, shard
        launch(plan_for, about, (p, q, *flat_rows(first, of_rows)))
