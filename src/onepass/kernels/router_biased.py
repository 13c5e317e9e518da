"""The kernel of `moe.route` for selections by scores to which a bias is added, with or without groups of experts.

It searches as `router_topk` does: the largest values of spans of adjacent experts first, and then only in the k spans
where these are largest. A key of 32 bits holds the inverted position of a span or an expert, and the difference of its
float32 value to a lower bound, in units in the last place. Different values above the bound therefore have different
keys. The bound is as far below the token's largest value as the bits allow, a factor of about 2**8. If one of the k
largest values of a token is not above it, or the largest is infinite or NaN, the program starts again with whole
values, in k + 1 passes over the logits.

The time is that of comparisons, selections and logical operations, which a multiprocessor executes at half the rate of
an addition of floats. What can be added is therefore not selected (`quick_value`, `key_of`).
"""

# mypy: disable-error-code="assignment, var-annotated, misc"
# (tuples grow in a `static_range`)

import math

import triton
import triton.language as tl

from onepass.core.moe_options import RouterOptions
from onepass.kernels import layout
from onepass.kernels.launch import Flat, Out, Plan, Rows
from onepass.kernels.layout import power_of_two
from onepass.kernels.online_softmax import LOWEST
from onepass.kernels.router_keys import (
    LOW,
    columns,
    largest_keys,
    least_of,
    only,
    ordered,
    ordered_number,
    row,
    slots,
    sorted_keys,
)
from onepass.kernels.router_scores import (
    SIGMOID,
    Shape,
    add_changed,
    add_counts,
    number_of,
    replayed,
    scoring,
    sigmoid,
    sqrtsoftplus,
    weights_of,
    write_routing,
)
from onepass.kernels.router_topk import logit, tokens_and_threads
from onepass.kernels.row_programs import unmasked

MOST_THREADS = 256  # per program
REGISTERS = 64  # per thread; ptxas would take 100 to load all logits at once, and is 10% slower
LOGITS = 64  # per thread, at most
SPANS = 8  # at least, per expert of a token, if a thread has no more than MOST_KEYS to sort
MOST_KEYS, MOST_K, MOST_GROUPS = 16, 8, 32
SMALLEST = tl.constexpr(2.0**-149)  # of the positive numbers in float32


@triton.jit
def fast_sigmoid(z, PTX: tl.constexpr):
    """`sigmoid`; by PTX with a third of the instructions, since it need not be exact below 2**-126."""
    if PTX:
        return tl.inline_asm_elementwise(
            """{
            .reg .f32 x;
            mul.ftz.f32 x, $1, 0fBFB8AA3B;
            ex2.approx.ftz.f32 x, x;
            add.ftz.f32 x, x, 0f3F800000;
            rcp.approx.ftz.f32 $0, x;
            }""", "=f,f", [z], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    return sigmoid(z)


@triton.jit
def score_of(z, SCORING: tl.constexpr, PTX: tl.constexpr):
    """The score of a logit, before the k largest are selected."""
    return fast_sigmoid(z, PTX) if SCORING.SCORE == SIGMOID else sqrtsoftplus(z)


@triton.jit
def value_of(x, bias, inner, outer, SCORING: tl.constexpr, PTX: tl.constexpr):
    """What experts are selected by: NaN for a logit without a score, and LOWEST for -inf."""
    z = logit(x, inner, outer, SCORING.SOFTCAP)
    score = z if SCORING.AFTER else score_of(z, SCORING, PTX)
    if SCORING.SCORE != SIGMOID:
        score = tl.where(z == float("inf"), float("nan"), score)
    if SCORING.AFTER:
        value = score + bias.to(tl.float32)
        value = tl.where((value > LOWEST) | (score != score), value, LOWEST)
    else:
        value = score + tl.maximum(bias.to(tl.float32), LOWEST)  # on a GPU, also if the bias is NaN
    return tl.where(z == float("-inf"), LOWEST, value)


@triton.jit
def quick_value(x, bias, inner, outer, SCORING: tl.constexpr, PTX: tl.constexpr):
    """`value_of` if that is finite, but -inf for LOWEST. Otherwise, or if the bias is NaN: NaN or inf."""
    z = logit(x, inner, outer, SCORING.SOFTCAP)
    if SCORING.AFTER:
        value = z + bias.to(tl.float32)
    else:
        mask = z * SMALLEST * SMALLEST  # 0, or infinite as z is
        value = score_of(z, SCORING, PTX) + (bias.to(tl.float32) + mask)
    return value


@triton.jit
def key_of(value, least, low, BITS: tl.constexpr):
    """An integer of the order of the values above ``least``, with ``low`` in its BITS lowest bits.

    Of all other values, but NaN, the upper bits are the lowest that there are.
    """
    # The difference to the bound, shifted: as an addition to the shifted value, which wraps around.
    start = least_of(tl.int32) - (least << BITS)
    return (tl.maximum(ordered_number(value), least) << BITS) + (start + low)


@triton.jit
def least_of_keys(top, BITS: tl.constexpr):
    """The ``least`` of `key_of`, in the order of `ordered`, if no value is above ``top``."""
    MOST: tl.constexpr = (1 << (32 - BITS)) - 1
    return tl.maximum(ordered_number(top), least_of(tl.int32) + MOST) - MOST


@triton.constexpr_function
def bits_of(n):
    """The number of bits of numbers below n."""
    return (n - 1).bit_length()


@triton.jit
def two_largest(a, b, c, d):
    """The two largest of four values, of which the first two and the last two are sorted."""
    return tl.maximum(a, c, propagate_nan=tl.PropagateNan.ALL), tl.maximum(tl.minimum(a, c), tl.maximum(b, d))


@triton.jit
def larger(a, b):
    """The larger of two values; NaN if one is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def by_whole_values(
    start, selection_bias, active, k, inner, outer, E: tl.constexpr, K: tl.constexpr, GROUPS: tl.constexpr,
    KEPT: tl.constexpr, TOP2: tl.constexpr, STEP: tl.constexpr, SCORING: tl.constexpr, PTX: tl.constexpr,
    BLOCK_G: tl.constexpr,
):  # fmt: skip
    """The K experts with the largest values among the KEPT best groups, in K + 1 passes over the logits.

    Also returns a mask of the tokens with a logit that has no score.
    """
    SIZE: tl.constexpr = E // GROUPS
    g = tl.arange(0, BLOCK_G)[None, :]
    lowest = tl.full([start.shape[0]], float("-inf"), tl.float32)
    top = lowest
    keys = tl.full([start.shape[0], BLOCK_G], least_of(tl.int64), tl.int64)
    for group in range(GROUPS):
        one, two = lowest, lowest
        for r in range(SIZE // STEP):
            e = group * SIZE + r * STEP + tl.arange(0, STEP)[None, :]
            x = tl.load(start[:, None] + e, mask=active[:, None], other=0.0)
            value = value_of(x, tl.load(selection_bias + e), inner, outer, SCORING, PTX)
            best, second = tl.reduce((value, tl.full(value.shape, float("-inf"), tl.float32)), 1, two_largest)
            one, two = two_largest(one, two, best, second)
        top = larger(top, one)
        score = larger(one + two, LOWEST) if TOP2 else one
        keys = tl.where(g == group, ((ordered(score).to(tl.int64) << 32) | (LOW - group))[:, None], keys)
    kept = tl.zeros([start.shape[0]], tl.int32)  # a bit for every group
    for _ in range(KEPT):
        best = tl.max(keys, axis=1)
        keys = tl.where(keys == best[:, None], least_of(tl.int64), keys)
        kept |= 1 << ((best & LOW) ^ LOW).to(tl.int32)

    selected = tl.zeros([start.shape[0], k.shape[1]], tl.int32)
    before = tl.full([start.shape[0]], 2**63 - 1, tl.int64)
    for i in range(K):
        largest = tl.full([start.shape[0]], least_of(tl.int64), tl.int64)
        for r in range(E // STEP):
            e = r * STEP + tl.arange(0, STEP)[None, :]
            x = tl.load(start[:, None] + e, mask=active[:, None], other=0.0)
            value = value_of(x, tl.load(selection_bias + e), inner, outer, SCORING, PTX)
            key = (ordered(value).to(tl.int64) << 32) | (LOW - e)
            there = ((kept >> (r * STEP // SIZE)) & 1)[:, None] != 0
            key = tl.where(there & (key < before[:, None]), key, least_of(tl.int64))
            largest = tl.maximum(largest, tl.max(key, axis=1))
        before = largest
        selected = tl.where(k == i, LOW - (largest & LOW).to(tl.int32)[:, None], selected)
    return selected, top != top


@triton.jit(
    do_not_specialize=["T", "stride"],
    do_not_specialize_on_alignment=["token_mask", "given", "counts", "changed"],
)
def biased_routing_kernel(
    logits: "Rows", selection_bias: "Flat", token_mask: "Flat", given: "Flat", weights: "Out", experts: "Out",
    counts: "Out", changed: "Out",
    T: tl.int32, stride: tl.int64, inner: tl.float32, outer: tl.float32, scale: tl.float32, eps: tl.float32,
    E: tl.constexpr, K: tl.constexpr, SCORING: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr,
    TOP2: tl.constexpr, PTX: tl.constexpr, ALONE: tl.constexpr, VEC: tl.constexpr, SPAN: tl.constexpr,
    LANES: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_G: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Select K experts for every token, and compute their weights and the counts.

    Inputs: ``logits`` ``(T, E)``; ``selection_bias`` ``(E,)``; ``token_mask`` ``(T,)`` and ``given`` ``(T, K)``, the
    experts to replay, each or None.
    Outputs: ``weights`` and ``experts`` ``(T, K)``; ``counts`` ``(E,)`` and ``changed`` ``()``, each or None, to which
    the program adds unless it is ALONE.
    Bytes moved: ``T·E`` logits in, ``O(T·K)`` out.
    """
    STEP: tl.constexpr = LANES * VEC  # divides the size of a group
    SIZE: tl.constexpr = E // GROUPS
    SPANS: tl.constexpr = E // SPAN
    SPAN_BITS: tl.constexpr = bits_of(SPANS)
    SLOTS: tl.constexpr = BLOCK_K // LANES if BLOCK_K > LANES else 1  # experts that a lane computes weights of
    BITS: tl.constexpr = bits_of(LANES * SLOTS * SPAN)
    GROUP_BITS: tl.constexpr = bits_of(GROUPS)
    lane = tl.arange(0, LANES)[None, :]
    k = tl.arange(0, LANES * SLOTS)[None, :]
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    start = logits + t * stride // VEC * VEC  # VEC divides the stride; this tells the compiler so
    active = unmasked(token_mask, t, T, 0)

    bests, of_group = (), ()
    top = tl.full([BLOCK_T], float("-inf"), tl.float32)
    best_score = top  # of the groups
    for r in tl.static_range(E // STEP):
        e = r * STEP + tl.arange(0, STEP)[None, :]
        x = tl.load(start[:, None] + e, mask=active[:, None], other=0.0)
        # For every token, so that it has the layout of the logits.
        bias = tl.load(selection_bias + e + tl.zeros([BLOCK_T, 1], tl.int32))
        values = columns(quick_value(x, bias, inner, outer, SCORING, PTX), LANES, VEC)
        for s in tl.static_range(VEC // SPAN):
            best = values[s * SPAN]
            second = tl.full([BLOCK_T, LANES], float("-inf"), tl.float32)
            for i in tl.static_range(s * SPAN + 1, (s + 1) * SPAN):
                second = tl.maximum(second, tl.minimum(best, values[i]))
                best = larger(best, values[i])
            bests = bests + (best,)
            if r * STEP % SIZE == 0 and s == 0:
                first_of_group, second_of_group = best, second
            else:
                first_of_group, second_of_group = two_largest(first_of_group, second_of_group, best, second)
        if (r + 1) * STEP % SIZE == 0:
            one, two = tl.reduce((first_of_group, second_of_group), 1, two_largest)
            top = larger(top, one)
            one = one + two if TOP2 else one
            best_score = tl.maximum(best_score, one)
            of_group = of_group + (one,)

    # The bound of the values; for those of groups that are not kept, above all values.
    least = least_of_keys(top, SPAN_BITS)
    leasts, unclear = (least[:, None],), (tl.abs(top) < float("inf")) == 0
    if GROUPS > 1:
        least_of_group, keys, leasts = least_of_keys(best_score, GROUP_BITS), (), ()
        for g in tl.static_range(GROUPS):
            keys = keys + (key_of(of_group[g], least_of_group, GROUPS - 1 - g, GROUP_BITS),)
        last = sorted_keys(keys, BLOCK_G)[KEPT - 1]
        for g in tl.static_range(GROUPS):
            leasts = leasts + (tl.where(keys[g] >= last, least, 0x7FFFFFFF)[:, None],)
        unclear = unclear | (last < least_of(tl.int32) + (1 << GROUP_BITS))

    # The K spans with the largest values, among groups that are kept.
    keys = ()
    for i in tl.static_range(len(bests)):
        low = SPANS - 1 - (LANES - 1) * (VEC // SPAN) - i // (VEC // SPAN) * (STEP // SPAN) - i % (VEC // SPAN)
        keys = keys + (key_of(bests[i], leasts[i * SPAN * LANES // SIZE], low, SPAN_BITS),)
    v = sorted_keys(keys, BLOCK_K)
    w = ()
    for i in tl.static_range(len(v)):
        w = w + (v[i] + (LANES - 1 - lane) * (VEC // SPAN),)
    v = largest_keys(w, K)
    unclear = unclear | (v[K - 1] < least_of(tl.int32) + (1 << SPAN_BITS))

    # The experts of these spans, in their order, which makes the keys of the first larger among equal values.
    lows = ()
    for i in tl.static_range(K):
        lows = lows + (v[i] & ((1 << SPAN_BITS) - 1),)
    spans = sorted_keys(lows, BLOCK_K)
    first, keys = slots(spans, lane, LANES, SLOTS), ()
    least = least_of_keys(top, BITS)[:, None]
    for j in tl.static_range(SLOTS):
        e = (SPANS - 1 - first[j])[:, :, None] * SPAN + tl.arange(0, SPAN)[None, None, :]
        e = tl.multiple_of(tl.max_contiguous(tl.reshape(e, [BLOCK_T, LANES * SPAN]), [1, SPAN]), [1, SPAN])
        x = tl.load(start[:, None] + e, mask=active[:, None], other=0.0)
        value = quick_value(x, tl.load(selection_bias + e), inner, outer, SCORING, PTX)
        values = columns(value, LANES, SPAN)
        for i in tl.static_range(SPAN):
            key = key_of(values[i], least, (1 << BITS) - 1 - (lane * SLOTS + j) * SPAN - i, BITS)
            keys = keys + (only(lane * SLOTS + j < K, key, least_of(tl.int32), K == LANES * SLOTS),)
    v = largest_keys(sorted_keys(keys, BLOCK_K), K)
    unclear = unclear | (v[K - 1] < least_of(tl.int32) + (1 << BITS))
    found, ids = slots(v, lane, LANES, SLOTS), ()
    for j in tl.static_range(SLOTS):
        place = (1 << BITS) - 1 - (found[j] & ((1 << BITS) - 1))
        span = spans[0][:, None] + tl.zeros_like(lane)
        for i in tl.static_range(1, K):
            span = tl.where(place // SPAN == i, spans[i][:, None], span)
        ids = ids + ((SPANS - 1 - span) * SPAN + place % SPAN,)
    selected = row(ids, SLOTS)
    bad = t < 0
    if tl.max((unclear & active).to(tl.int32)) != 0:
        selected, bad = by_whole_values(
            start, selection_bias, active, k, inner, outer, E, K, GROUPS, KEPT, TOP2, STEP, SCORING, PTX, BLOCK_G
        )
    selected = tl.where((bad | (active == 0))[:, None], k, selected)
    if given is not None:
        selected, invalid, differ = replayed(given, selected, t, k, active, T, E, K)
        bad = bad | invalid
        add_changed(changed, differ, ALONE)

    valid = (t[:, None] < T) & (k < K)
    counted = valid & active[:, None]
    if counts is not None:  # before the weights, which are computed while the sums are on their way
        add_counts(counts, selected, counted, number_of(active, token_mask, T), E, K, BINS, ALONE)
    z = logit(tl.load(start[:, None] + selected, mask=counted, other=0.0), inner, outer, SCORING.SOFTCAP)
    zero = tl.zeros([BLOCK_T], tl.float32)
    w = scale * weights_of(z, zero, zero + 1.0, k < K, eps, SCORING)
    w = tl.where(active[:, None], tl.where(bad[:, None], float("nan"), w), 0.0)
    write_routing(weights, experts, t, k, w, selected, valid, K)


def span_of(E: int, stride: int, options: RouterOptions) -> int:
    """Adjacent experts in a span, such that the groups that are kept have k spans; 0 if there are none.

    A small span has less that is read twice, and a large one fewer keys to sort.
    """
    o = options
    size, most = E // o.n_group, MOST_KEYS * lanes_of(E, stride, o)
    spans = [n for n in (8, 4, 2) if math.gcd(8, stride, size) % n == 0 and o.topk_group * (size // n) >= o.k]
    spans = [n for n in spans if E // n <= most]
    return next((n for n in spans if E // n >= SPANS * o.k), spans[-1] if spans else 0)


def lanes_of(E: int, stride: int, options: RouterOptions) -> int:
    """Threads per token, which read a part of one group at once."""
    vectors = E // options.n_group // math.gcd(8, stride, E // options.n_group)
    return min(vectors & -vectors, max(power_of_two(E // LOGITS), power_of_two(options.k) // 4))


def takes(E: int, stride: int, options: RouterOptions) -> bool:
    """Whether `biased_routing_kernel` computes this: not the sums for losses, nor a softmax over all experts.

    A single thread per token would have so many keys, or of such sizes, that Triton compiles for minutes.
    """
    o = options
    if o.sums or o.k > MOST_K or o.n_group > MOST_GROUPS or o.score == "softmax" or lanes_of(E, stride, o) < 2:
        return False
    return span_of(E, stride, o) > 0


def tile_of(T: int, E: int, stride: int, options: RouterOptions) -> tuple[int, int]:
    """Tokens and threads per program."""
    return tokens_and_threads(T, E, lanes_of(E, stride, options), MOST_THREADS, options)


def plan_for(shape: Shape, options: RouterOptions) -> Plan:
    """The launch of `biased_routing_kernel`."""
    T, E, stride = shape
    o = options
    BLOCK_T, threads = tile_of(T, E, stride, o)
    nvidia = layout.compute_capability() > 0
    constexprs = dict(
        E=E, K=o.k, SCORING=scoring(o), GROUPS=o.n_group, KEPT=o.topk_group, TOP2=o.group_score == "top2_sum",
        PTX=nvidia, ALONE=BLOCK_T >= T, VEC=math.gcd(8, stride, E // o.n_group),
        SPAN=span_of(E, stride, o), LANES=lanes_of(E, stride, o), BLOCK_T=BLOCK_T, BLOCK_K=power_of_two(o.k),
        BLOCK_G=power_of_two(o.n_group), BINS=max(64, power_of_two(E)),
    )  # fmt: skip
    numbers = (T, stride, *o.factors(), o.scale, o.eps)
    warps, registers = layout.warps(threads), REGISTERS if nvidia else None
    return Plan(biased_routing_kernel, -(-T // BLOCK_T), numbers, constexprs, warps, registers=registers)
