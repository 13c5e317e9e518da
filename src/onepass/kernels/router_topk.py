"""The kernel of `moe.route` for selections by 16-bit logits alone, without a bias or groups, which are sorted as keys.

A key is an integer of 32 bits that orders as a logit does, with the inverted id of the expert in its lowest bits: all
keys of a token differ, and the largest are those of the selected experts, where ties go to the lower id.

Most logits never become keys. Adjacent experts are a span, whose key is that of its largest logit. The K largest logits
lie in the K spans with the largest keys, so that only these are read once more, from a cache. Spans are ranked as
experts are (`router_keys`), also among equal ones: the first has the lower ids.
"""

# mypy: disable-error-code="assignment, var-annotated, misc"
# (tuples grow in a `static_range`)

import math
from functools import lru_cache
from typing import NamedTuple

import triton
import triton.language as tl

from onepass.core.moe_options import RouterOptions
from onepass.kernels import layout
from onepass.kernels.launch import Flat, Out, Plan, Rows
from onepass.kernels.layout import MANY, power_of_two
from onepass.kernels.online_softmax import LOG2E, LOWEST, transform
from onepass.kernels.router_keys import LOW, columns, largest_keys, only, ordered, row, slots, sorted_keys
from onepass.kernels.router_scores import (
    SOFTMAX,
    SQRTSOFTPLUS,
    Shape,
    add_changed,
    add_counts,
    is_of_selected,
    number_of,
    ordered_sum,
    replayed,
    scoring,
    weights_of,
    write_routing,
)
from onepass.kernels.row_programs import unmasked

LEAST = tl.constexpr(-(2**31))  # the key of no expert
SIGNS = tl.constexpr(-0x7FFF8000)  # the sign bits of two 16-bit floats
MOST_K = 16
LOGITS = 128  # per thread, at most
SPANS = 4  # at least, per expert of a token
# Registers per thread that ptxas may use, on NVIDIA GPUs. Without this number it uses fewer, to fit more threads on a
# multiprocessor, and a thread then loads its logits one after the other: a third slower if they come from memory. It
# does not hold all logits as keys, or those that a normalizer needs again.
REGISTERS = 64


@triton.jit
def ordered_halves(w):
    """Two 16-bit floats in one word as two 16-bit integers of the same order, where -0 is 0."""
    a = w & 0x7FFF7FFF
    negative = ((a + 0x7FFF7FFF) & w) >> 15 & 0x00010001
    return a ^ (negative * 0xFFFF)


@triton.jit
def upper_half(bits, dtype: tl.constexpr):
    """The 16-bit float in the upper half of a word, as a float32."""
    if dtype == tl.bfloat16:
        x = (bits & -65536).to(tl.float32, bitcast=True)
    else:
        x = (bits >> 16).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    return x


@triton.jit
def logit_of_key(key, dtype: tl.constexpr):
    """The logit in a key, as a float32."""
    return upper_half(key ^ ((key >> 31) & 0x7FFF0000), dtype)


@triton.jit
def logit(x, inner, outer, SOFTCAP: tl.constexpr):
    """The logit after its soft-cap, if it has one."""
    return transform(x, inner, outer, SOFTCAP) if SOFTCAP else x.to(tl.float32)


@triton.jit
def keys_of_words(words, first, low, E, WHOLE: tl.constexpr):
    """Keys for pairs of 16-bit logits, where ``first`` is the first expert and ``low`` its inverted id, in a key."""
    keys = ()
    for i in tl.static_range(len(words)):
        m = ordered_halves(words[i])
        there = first + 2 * i < E
        keys = keys + (only(there, (m << 16) | (low - 2 * i), LEAST, WHOLE),)
        keys = keys + (only(there, (m & -65536) | (low - 2 * i - 1), LEAST, WHOLE),)
    return keys


@triton.jit
def key_of_span(words, first, low, E, dtype: tl.constexpr, WHOLE: tl.constexpr):
    """The key of the largest of the logits in ``words``, which is NaN if one is, with the bits ``low``."""
    best = upper_half(words[0] << 16, dtype)
    for i in tl.static_range(1, 2 * len(words)):
        x = upper_half(words[i // 2] if i % 2 else words[i // 2] << 16, dtype)
        best = tl.maximum(best, x, propagate_nan=tl.PropagateNan.ALL)
    return only(first < E, (ordered(best) & ~LOW) | low, LEAST, WHOLE)


@triton.jit(
    do_not_specialize=["T", "stride"],
    do_not_specialize_on_alignment=["token_mask", "given", "counts", "changed"],
)
def topk_routing_kernel(
    logits: "Rows", token_mask: "Flat", given: "Flat", weights: "Out", experts: "Out", counts: "Out", changed: "Out",
    T: tl.int32, stride: tl.int64, inner: tl.float32, outer: tl.float32, scale: tl.float32, eps: tl.float32,
    E: tl.constexpr, K: tl.constexpr, SCORING: tl.constexpr, TOTAL: tl.constexpr, EPS_OF_ALL: tl.constexpr,
    ALONE: tl.constexpr, VEC: tl.constexpr, SPAN: tl.constexpr, LANES: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Select K experts for every token, and compute their weights and the counts.

    Inputs: ``logits`` ``(T, E)``; ``token_mask`` ``(T,)`` and ``given`` ``(T, K)``, the experts to replay, each or
    None.
    Outputs: ``weights`` and ``experts`` ``(T, K)``; ``counts`` ``(E,)`` and ``changed`` ``()``, each or None, to which
    the program adds unless it is ALONE.
    TOTAL: whether the weights need the normalizer of all logits; EPS_OF_ALL: whether it is for ``eps`` alone.
    Bytes moved: ``T·E`` logits in, ``O(T·K)`` out.
    """
    dtype: tl.constexpr = logits.dtype.element_ty
    SCORE: tl.constexpr = SCORING.SCORE
    SOFTCAP: tl.constexpr = SCORING.SOFTCAP
    STEP: tl.constexpr = LANES * VEC
    SLOTS: tl.constexpr = BLOCK_K // LANES if BLOCK_K > LANES else 1  # experts that a lane computes weights of
    FULL: tl.constexpr = K == LANES * SLOTS
    NO_LANE: tl.constexpr = LOW - (LANES - 1) * VEC
    lane = tl.arange(0, LANES)[None, :]
    k = tl.arange(0, LANES * SLOTS)[None, :]
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    start = logits + t * stride // VEC * VEC  # VEC divides the stride; this tells the compiler so
    active = unmasked(token_mask, t, T, 0)
    pairs = start.to(tl.pointer_type(tl.int32), bitcast=True)[:, None]

    # All logits, and the keys of their spans or their own. Lanes are told apart in the keys that are kept.
    words, keys = (), ()
    odd = tl.zeros([BLOCK_T, LANES], tl.int32)
    for r in tl.static_range((E + STEP - 1) // STEP):
        first = lane * VEC + r * STEP
        e = r * STEP // 2 + tl.arange(0, STEP // 2)[None, :]
        there = active[:, None]
        if (r + 1) * STEP > E:
            there = there & (2 * e < E)
        new = columns(tl.load(pairs + e, mask=there, other=0), LANES, VEC // 2)
        if SPAN:
            for i in tl.static_range(VEC // SPAN):
                span, low = new[i * SPAN // 2 : (i + 1) * SPAN // 2], NO_LANE - r * STEP - i * SPAN
                keys = keys + (key_of_span(span, first + i * SPAN, low, E, dtype, (r + 1) * STEP <= E),)
        else:
            keys = keys + keys_of_words(new, first, NO_LANE - r * STEP, E, (r + 1) * STEP <= E)
            for i in tl.static_range(VEC // 2):
                odd = odd | ((new[i] & 0x7FFF7FFF) + (0x007F007F if dtype == tl.bfloat16 else 0x03FF03FF))
        words = words + new
    v = sorted_keys(keys, BLOCK_K)
    w = ()
    for i in tl.static_range(len(v)):
        w = w + (v[i] + (LANES - 1 - lane) * VEC,)
    v = largest_keys(w, K)

    if SPAN:  # the K largest logits are in the K spans with the largest maxima
        bad, keys = v[0] > 0x7F80FFFF, ()  # NaN
        spans = slots(v, lane, LANES, SLOTS)
        for j in tl.static_range(SLOTS):
            low = only(lane * SLOTS + j < K, spans[j] & LOW, LOW - E, FULL)
            first = (LOW - low) // SPAN * SPAN
            e = first[:, :, None] // 2 + tl.arange(0, SPAN // 2)[None, None, :]
            e = tl.max_contiguous(tl.reshape(e, [BLOCK_T, LANES * SPAN // 2]), [1, SPAN // 2])
            e = tl.multiple_of(e, [1, SPAN // 2])
            there = active[:, None] if FULL else active[:, None] & (2 * e < E)
            new = columns(tl.load(pairs + e, mask=there, other=0), LANES, SPAN // 2)
            keys = keys + keys_of_words(new, first, low, E, FULL)
        v = largest_keys(sorted_keys(keys, BLOCK_K), K)
    else:
        bad = tl.max(((odd & SIGNS) != 0).to(tl.int32), axis=1) != 0

    # Tokens without a valid routing. The logits in their keys are NaN, which makes their weights NaN.
    top = logit(logit_of_key(v[0], dtype), inner, outer, SOFTCAP)
    if SCORE == SOFTMAX:
        bad = bad | (tl.abs(top) == float("inf"))
    elif SCORE == SQRTSOFTPLUS:
        bad = bad | (top == float("inf"))
    key = row(slots(v, lane, LANES, SLOTS), SLOTS)
    key = tl.where(bad[:, None], (LOW - k) | (0x7FFF << 16), key)
    selected = (key & LOW) ^ LOW
    if given is not None:
        selected, invalid, differ = replayed(given, selected, t, k, active, T, E, K)
        bad = bad | invalid
        add_changed(changed, differ, ALONE)
    valid = (t[:, None] < T) & (k < K)
    counted = valid & active[:, None]
    if counts is not None:  # before the weights, which are computed while the sums are on their way
        add_counts(counts, selected, counted, number_of(active, token_mask, T), E, K, BINS, ALONE)
    if given is not None:
        x_selected = tl.load(start[:, None] + selected, mask=counted, other=0.0).to(tl.float32)
    else:
        x_selected = logit_of_key(key, dtype)
    z_selected = logit(x_selected, inner, outer, SOFTCAP)
    total = tl.zeros([BLOCK_T], tl.float32)
    if TOTAL:
        of_lane = tl.zeros([BLOCK_T, LANES], tl.float32)
        for i in tl.static_range(2 * len(words)):
            x = upper_half(words[i // 2] if i % 2 else words[i // 2] << 16, dtype)
            e = lane * VEC + i // VEC * STEP + i % VEC
            z = only(e < E, logit(x, inner, outer, SOFTCAP), float("-inf"), (i // VEC + 1) * STEP <= E)
            of_lane += tl.exp2((z - top[:, None]) * LOG2E)
        total = tl.sum(of_lane, axis=1)
    if EPS_OF_ALL:  # replayed scores may be as small as eps, which is lost if it is added to those of selected ones
        z_top = tl.maximum(tl.max(tl.where(k < K, z_selected, float("-inf")), axis=1), LOWEST)
        s = tl.where(k < K, tl.exp2((z_selected - z_top[:, None]) * LOG2E), 0.0)
        n = tl.exp2(tl.log2(eps) + (top + tl.log(total) - z_top) * LOG2E)
        w = s / (ordered_sum(s) + n)[:, None]
    else:
        w = weights_of(z_selected, top, total, k < K, eps, SCORING)
    w = w * scale
    if given is not None:
        w = tl.where(bad[:, None], float("nan"), w)
    w = tl.where(active[:, None], w, 0.0)
    write_routing(weights, experts, t, k, w, selected, valid, K)


def takes(E: int, stride: int, options: RouterOptions) -> bool:
    """Whether `topk_routing_kernel` computes this: not the sums for losses.

    It reads pairs of 16-bit logits, which must be aligned as words are, and takes no bias.
    """
    o = options
    return not o.sums and o.k <= MOST_K and o.n_group == 1 and stride % 2 == E % 2 == 0


def span_of(E: int, stride: int, options: RouterOptions) -> int:
    """Experts per span, of which there are enough that most are not read twice; 0 if all logits become keys."""
    most = min(math.gcd(8, stride, E), E // (SPANS * power_of_two(options.k)))
    return 8 if most >= 8 else 4 if most >= 4 else 0


def lanes_of(E: int, options: RouterOptions) -> int:
    """Threads per token."""
    lanes = max(power_of_two(-(-E // LOGITS)), min(4, power_of_two(E) // 16))
    return max(lanes, power_of_two(options.k) // 4)


class Threads(NamedTuple):
    """Threads per program: ``usual``, or ``counting`` in a program that counts the tokens of each expert.

    The latter double, up to ``most``, until all programs together add at most ``additions`` numbers to the counts.
    """

    usual: int
    counting: int
    most: int
    additions: int


# Programs that count add in turns, 36 ps for a number on an H100, so that there must not be too many of them.
THREADS = Threads(128, 256, 512, 1 << 17)


@lru_cache
def tokens_and_threads(T: int, E: int, lanes: int, threads: Threads, options: RouterOptions) -> tuple[int, int]:
    """Tokens and threads per program. If ``threads.most`` suffice for all tokens, a single program takes them."""
    T = MANY if options.invariant else T
    if power_of_two(T) * lanes <= threads.most:
        return power_of_two(T), power_of_two(T) * lanes
    number = threads.counting if options.counts else threads.usual
    while options.counts and number < threads.most and -(-T * lanes // number) * E > threads.additions:
        number *= 2
    return number // lanes, number


def tile_of(T: int, E: int, options: RouterOptions) -> tuple[int, int]:
    """Tokens and threads per program."""
    return tokens_and_threads(T, E, lanes_of(E, options), THREADS, options)


def plan_for(shape: Shape, options: RouterOptions, replays: bool) -> Plan:
    """The launch of `topk_routing_kernel`, with experts to replay or without."""
    T, E, stride = shape
    o = options
    BLOCK_T, threads = tile_of(T, E, o)
    softmax, of_all = o.score == "softmax", is_of_selected(o) and replays
    how = scoring(o)
    if softmax:
        how = how._replace(RELATIVE=False)
    if is_of_selected(o):
        how = how._replace(AFTER=True, RENORMALIZE=False)
    total = softmax and (not how.AFTER or of_all)
    constexprs = dict(
        E=E, K=o.k, SCORING=how, TOTAL=total, EPS_OF_ALL=of_all, ALONE=BLOCK_T >= T,
        VEC=math.gcd(8, stride), SPAN=span_of(E, stride, o), LANES=lanes_of(E, o), BLOCK_T=BLOCK_T,
        BLOCK_K=power_of_two(o.k), BINS=max(64, power_of_two(E)),
    )  # fmt: skip
    numbers = (T, stride, *o.factors(), o.scale, o.eps)
    limited = layout.compute_capability() > 0 and constexprs["SPAN"] and not total
    registers = REGISTERS if limited else None
    return Plan(topk_routing_kernel, -(-T // BLOCK_T), numbers, constexprs, layout.warps(threads), registers=registers)
