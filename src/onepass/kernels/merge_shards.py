"""Statistics and divergences of rows whose logits are sharded over the vocabulary, from the states of all ranks.

`softmax.shards` and `softmax.divergence` call them after the exchange.
"""

import torch
import triton
import triton.language as tl

from onepass.core.options import Inputs, Options, PairOptions, PairRows, Results, empty_pair_numbers, empty_results
from onepass.core.shard import Shard, per_row, state_fields
from onepass.kernels import layout
from onepass.kernels.divergence import MEAN, STATE, PairState, merge_kl
from onepass.kernels.launch import Flat, Out, Plan, launch
from onepass.kernels.layout import power_of_two
from onepass.kernels.online_softmax import LOWEST, State, merge, wanted
from onepass.kernels.row_programs import unmasked
from onepass.kernels.softmax_fields import (
    LOG_NORMALIZER,
    SHIFT,
    statistics_of,
    write_statistics,
)

BLOCK = 128
REGISTERS = 64  # per thread, at most; without a limit ptxas takes 32, and one more in memory


@triton.jit
def places_of(row_mask, rows, ranks, RANKS: tl.constexpr, BLOCK: tl.constexpr):
    """The ranks, the rows of this program, and masks: of rows that exist, of active rows, and of states to load."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    rank = tl.arange(0, RANKS)
    present = row < rows
    active = unmasked(row_mask, row, rows, 0)
    return rank, row, present, active, (rank < ranks)[:, None] & active[None, :]


@triton.jit
def load_state(states, numbers, rows, rank, row, inside, number, other):
    """A number of the states of some rows on all ranks, ``(ranks, rows)``; ``other`` where there is no state."""
    place = (rank[:, None] * numbers + number).to(tl.int64) * rows + row[None, :]
    return tl.load(states + place, mask=inside, other=other)


@triton.jit(do_not_specialize=["rows", "K", "ranks", "numbers"])
def merge_shards_kernel(
    states: "Flat", row_mask: "Flat", packed: "Out", selected: "Out", is_top1: "Out",
    rows: tl.int32, K: tl.int32, ranks: tl.int32, numbers: tl.int32, sharpness: tl.float32, vocab: tl.float32,
    WANTED: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The statistics of every row.

    Inputs: ``states`` ``(ranks, numbers, rows)``, see `core.shard.state_fields`; ``row_mask`` ``(rows,)`` or None.
    Outputs: as of `softmax_statistics_kernel`. Bytes moved: inputs and outputs; the selected numbers are read twice.
    """
    rank, row, present, active, inside = places_of(row_mask, rows, ranks, RANKS, BLOCK)
    m = load_state(states, numbers, rows, rank, row, inside, 0, LOWEST)
    s = load_state(states, numbers, rows, rank, row, inside, 1, 0.0)
    t, w, c, q, u = s * 0.0, s * 0.0, s * 0.0, s * 0.0, s * 0.0
    if WANTED.EXPECTED:
        t = load_state(states, numbers, rows, rank, row, inside, 2, 0.0)
    if WANTED.WEIGHTED:
        w = load_state(states, numbers, rows, rank, row, inside, 2 + WANTED.EXPECTED, 0.0)
        c = load_state(states, numbers, rows, rank, row, inside, 3 + WANTED.EXPECTED, 0.0)
    AFTER: tl.constexpr = 2 + WANTED.EXPECTED + 2 * WANTED.WEIGHTED
    if WANTED.TEMPERED:
        q = load_state(states, numbers, rows, rank, row, inside, AFTER, 0.0)
    if WANTED.MEAN:
        u = load_state(states, numbers, rows, rank, row, inside, AFTER + WANTED.TEMPERED, 0.0)
    SELECTED: tl.constexpr = AFTER + WANTED.TEMPERED + WANTED.MEAN
    first = tl.min(tl.where((m == tl.max(m, axis=0)[None, :]) & (s > 0), rank[:, None], RANKS), axis=0)
    move = m - tl.max(m, axis=0)[None, :]
    m, s, t, w, c, q, u = merge(State(m, s, t, w, c, q, u), sharpness, WANTED)
    if selected is not None:
        # An index that no rank holds makes all results of the row NaN.
        for k in range(0, K):
            x = load_state(states, numbers, rows, rank, row, inside, SELECTED + k, float("inf"))
            s = tl.where(tl.min(x, axis=0) == float("inf"), float("nan"), s)
    s = tl.where(s > 0, s, float("nan"))
    void = s - s  # 0, or NaN
    statistics = statistics_of(State(m, s, t, w, c, q, u / vocab))
    write_statistics(packed, row, rows, statistics, WANTED, active, present)
    if selected is not None:
        for k in range(0, K):
            x = load_state(states, numbers, rows, rank, row, inside, SELECTED + k, float("inf"))
            relative = tl.sum(tl.where(x == float("inf"), 0.0, x + move), axis=0) + void
            if WANTED.LOG_PROBS:
                relative -= statistics.log_normalizer
            place = row.to(tl.int64) * K + k
            tl.store(selected + place, tl.where(active, relative, 0.0), mask=present)
            if is_top1 is not None:
                top1 = load_state(states, numbers, rows, rank, row, inside, SELECTED + K + k, 0.0)
                # The lower rank holds the lower columns. A comparison with NaN is False.
                of_first = tl.sum(tl.where(rank[:, None] == first[None, :], top1, 0.0), axis=0) > 0
                tl.store(is_top1 + place, active & of_first & (s > 0), mask=present)


def plan_for(rows: int, K: int, shard: Shard, options: Options) -> Plan:
    """The launch of `merge_shards_kernel`."""
    fields = state_fields(options, K)
    constexprs = dict(WANTED=wanted(options, reads_logits=False), RANKS=power_of_two(shard.ranks), BLOCK=BLOCK)
    numbers = (rows, K, shard.ranks, len(fields), options.sharpness, shard.vocab)
    registers = REGISTERS if layout.compute_capability() > 0 else None
    return Plan(merge_shards_kernel, triton.cdiv(rows, BLOCK), numbers, constexprs, 4, registers=registers)


def merge_shards(states: torch.Tensor, logits: torch.Tensor, inputs: Inputs, shard: Shard, options: Options) -> Results:
    """The statistics of every row from the states ``(ranks, numbers, rows)``; ``logits`` are those of one shard."""
    index, row_mask = inputs[:2]
    assert options.masked == 0, "labels are no mask of a sharded vocabulary"
    results = empty_results(logits, index, options)
    rows, K = logits.shape[:-1].numel(), per_row(index, logits.dim())
    if rows:
        launch(plan_for, (rows, K, shard, options), (states, row_mask, *results))
    return results


@triton.jit(do_not_specialize=["rows", "ranks"])
def merge_divergences_kernel(
    states: "Flat", row_mask: "Flat", p_numbers: "Out", q_numbers: "Out", loss: "Out",
    rows: tl.int32, ranks: tl.int32,
    RANKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """KL(P ‖ Q) of every row.

    Inputs: ``states`` ``(ranks, STATE, rows)``, see `core.shard.PAIR_STATE`; ``row_mask`` ``(rows,)`` or None.
    Outputs: as of `divergence_kernel`. Bytes moved: inputs and outputs.
    """
    rows = rows.to(tl.int64)
    rank, row, present, active, inside = places_of(row_mask, rows, ranks, RANKS, BLOCK)
    mp = load_state(states, STATE, rows, rank, row, inside, 0, LOWEST)
    sp = load_state(states, STATE, rows, rank, row, inside, 1, 0.0)
    mq = load_state(states, STATE, rows, rank, row, inside, 2, LOWEST)
    sq = load_state(states, STATE, rows, rank, row, inside, 3, 0.0)
    d = load_state(states, STATE, rows, rank, row, inside, 4, 0.0)
    mp, sp, mq, sq, d = merge_kl(PairState(mp, sp, mq, sq, d))
    log_p = tl.log(tl.where(sp > 0, sp, float("nan")))
    log_q = tl.log(tl.where(sq > 0, sq, float("nan")))
    kl = tl.where(active, d / sp - log_p + log_q, 0.0)
    tl.store(p_numbers + SHIFT * rows + row, tl.where(active, mp, 0.0), mask=present)
    tl.store(p_numbers + LOG_NORMALIZER * rows + row, tl.where(active, log_p, 0.0), mask=present)
    tl.store(p_numbers + MEAN * rows + row, kl, mask=present)
    tl.store(q_numbers + SHIFT * rows + row, tl.where(active, mq, 0.0), mask=present)
    tl.store(q_numbers + LOG_NORMALIZER * rows + row, tl.where(active, log_q, 0.0), mask=present)
    tl.store(q_numbers + MEAN * rows + row, kl * 0.0, mask=present)
    tl.store(loss + row, kl, mask=present)


def divergence_plan_for(rows: int, ranks: int) -> Plan:
    """The launch of `merge_divergences_kernel`."""
    constexprs = dict(RANKS=power_of_two(ranks), BLOCK=BLOCK)
    return Plan(merge_divergences_kernel, triton.cdiv(rows, BLOCK), (rows, ranks), constexprs, 4)


def merge_divergences(
    states: torch.Tensor, student: torch.Tensor, teacher: torch.Tensor, read: PairRows, options: PairOptions,
) -> torch.Tensor:  # fmt: skip
    """`PAIR_NUMBERS` of every row from the states ``(ranks, numbers, rows)``; the logits are those of one shard."""
    packed = empty_pair_numbers(student, teacher)
    rows = packed[0].numel()
    p_numbers, q_numbers = options.ordered(packed[:3], packed[3:6])
    if rows:
        launch(divergence_plan_for, (rows, len(states)), (states, read.row_mask, p_numbers, q_numbers, packed[6]))
    return packed
