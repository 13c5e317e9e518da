"""The kernel of `moe.route` for selections by scores to which a bias is added, with or without groups of experts.

It searches as `router_topk` does: the largest values of spans of adjacent experts first, and then only in the k spans
where these are largest. A key of 32 bits holds the inverted position of a span or an expert, and the difference of its
float32 value to a lower bound, in units in the last place. Different values above the bound therefore have different
keys. The bound is as far below the token's largest value as the bits allow, a factor of about 2**8. If one of the k
largest values of a token is not above it, the program compares whole values instead, in k passes over the logits.
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
    row,
    slots,
    sorted_keys,
)
from onepass.kernels.router_scores import SIGMOID, add_counts, is_relative, replayed, sigmoid, sqrtsoftplus, weights_of
from onepass.kernels.router_topk import logit, tokens_and_threads

MOST_THREADS = 256
LOGITS = 64  # per thread, at most
SPANS = 8  # at least, per expert of a token, if a thread has no more than MOST_KEYS to sort
MOST_KEYS, MOST_K = 16, 8


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
def value_of(x, bias, inner, outer, SCORE: tl.constexpr, AFTER: tl.constexpr, SOFTCAP: tl.constexpr, PTX: tl.constexpr):
    """What experts are selected by: NaN for a logit without a score, and LOWEST for -inf."""
    z = logit(x, inner, outer, SOFTCAP)
    score = z
    if not AFTER:
        score = fast_sigmoid(z, PTX) if SCORE == SIGMOID else sqrtsoftplus(z)
    if SCORE != SIGMOID:
        score = tl.where(z == float("inf"), float("nan"), score)
    if AFTER:
        value = score + bias.to(tl.float32)
        value = tl.where((value > LOWEST) | (score != score), value, LOWEST)
    else:
        value = score + tl.maximum(bias.to(tl.float32), LOWEST)  # on a GPU, also if the bias is NaN
    return tl.where(z == float("-inf"), LOWEST, value)


@triton.jit
def key_of(value, least, low, BITS: tl.constexpr):
    """An integer of the order of the values above ``least``, with ``low`` in its BITS lowest bits.

    Of all other values the upper bits are the lowest that there are.
    """
    upper = tl.maximum(ordered(value), least) - (least + (1 << (31 - BITS)))
    return (upper << BITS) | low


@triton.jit
def least_of_keys(top, BITS: tl.constexpr):
    """The ``least`` of `key_of`, in the order of `ordered`, if no value is above ``top``."""
    MOST: tl.constexpr = (1 << (32 - BITS)) - 1
    return tl.maximum(ordered(top), least_of(tl.int32) + MOST) - MOST


@triton.constexpr_function
def bits_of(n):
    """Of the numbers that are less than n."""
    return (n - 1).bit_length()


@triton.jit
def two_largest(a, b, c, d):
    """The two largest of four values, of which the first two and the last two are sorted."""
    return tl.maximum(a, c, propagate_nan=tl.PropagateNan.ALL), tl.maximum(tl.minimum(a, c), tl.maximum(b, d))


@triton.jit
def is_kept(of_group, g: tl.constexpr, KEPT: tl.constexpr):
    """Whether group ``g`` is among the KEPT best, where of equal scores the first group's is better."""
    better = tl.zeros_like(of_group[0])
    for other in tl.static_range(len(of_group)):
        if other < g:
            better += (of_group[other] >= of_group[g]).to(tl.int32)
        elif other > g:
            better += 1 - (of_group[g] >= of_group[other]).to(tl.int32)
    return better < KEPT


@triton.jit
def by_whole_values(
    start, selection_bias, active, groups, k, inner, outer, E: tl.constexpr, K: tl.constexpr, SIZE: tl.constexpr,
    STEP: tl.constexpr, SCORE: tl.constexpr, AFTER: tl.constexpr, SOFTCAP: tl.constexpr, PTX: tl.constexpr
):  # fmt: skip
    """The K experts with the largest values, in the groups whose bits are set, in as many passes over the logits."""
    selected = tl.zeros([start.shape[0], k.shape[1]], tl.int32)
    before = tl.full([start.shape[0]], 2**63 - 1, tl.int64)
    for i in range(K):
        largest = tl.full([start.shape[0]], least_of(tl.int64), tl.int64)
        for r in range(E // STEP):
            e = r * STEP + tl.arange(0, STEP)[None, :]
            x = tl.load(start[:, None] + e, mask=active[:, None], other=0.0)
            value = value_of(x, tl.load(selection_bias + e), inner, outer, SCORE, AFTER, SOFTCAP, PTX)
            key = (ordered(value).to(tl.int64) << 32) | (LOW - e)
            there = ((groups >> (r * STEP // SIZE)) & 1)[:, None] != 0
            key = tl.where(there & (key < before[:, None]), key, least_of(tl.int64))
            largest = tl.maximum(largest, tl.max(key, axis=1))
        before = largest
        selected = tl.where(k == i, LOW - (largest & LOW).to(tl.int32)[:, None], selected)
    return selected


@triton.jit(
    do_not_specialize=["T", "stride"],
    do_not_specialize_on_alignment=["token_mask", "given", "counts", "changed"],
)
def biased_routing_kernel(
    logits: "Rows", selection_bias: "Flat", token_mask: "Flat", given: "Flat", weights: "Out", experts: "Out",
    counts: "Out", changed: "Out",
    T: tl.int32, stride: tl.int64, inner: tl.float32, outer: tl.float32, scale: tl.float32, eps: tl.float32,
    E: tl.constexpr, K: tl.constexpr, SCORE: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr,
    TOP2: tl.constexpr, RENORMALIZE: tl.constexpr, RELATIVE: tl.constexpr, AFTER: tl.constexpr,
    SOFTCAP: tl.constexpr, PTX: tl.constexpr, ALONE: tl.constexpr, VEC: tl.constexpr, SPAN: tl.constexpr,
    LANES: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BINS: tl.constexpr,
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
    lane = tl.arange(0, LANES)[None, :]
    k = tl.arange(0, LANES * SLOTS)[None, :]
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    start = logits + t * stride // VEC * VEC  # VEC divides the stride; this tells the compiler so
    active = t < T
    if token_mask is not None:
        active = active & (tl.load(token_mask + t, mask=t < T, other=0) != 0)

    bests, of_group = (), ()
    top = tl.full([BLOCK_T], float("-inf"), tl.float32)
    for r in tl.static_range(E // STEP):
        e = r * STEP + tl.arange(0, STEP)[None, :]
        x = tl.load(start[:, None] + e, mask=active[:, None], other=0.0)
        # For every token, so that it has the layout of the logits.
        bias = tl.load(selection_bias + e + tl.zeros([BLOCK_T, 1], tl.int32))
        values = columns(value_of(x, bias, inner, outer, SCORE, AFTER, SOFTCAP, PTX), LANES, VEC)
        for s in tl.static_range(VEC // SPAN):
            best = values[s * SPAN]
            second = tl.full([BLOCK_T, LANES], float("-inf"), tl.float32)
            for i in tl.static_range(s * SPAN + 1, (s + 1) * SPAN):
                second = tl.maximum(second, tl.minimum(best, values[i]))
                best = tl.maximum(best, values[i], propagate_nan=tl.PropagateNan.ALL)
            bests = bests + (best,)
            if r * STEP % SIZE == 0 and s == 0:
                first_of_group, second_of_group = best, second
            else:
                first_of_group, second_of_group = two_largest(first_of_group, second_of_group, best, second)
        if (r + 1) * STEP % SIZE == 0:
            one, two = tl.reduce((first_of_group, second_of_group), 1, two_largest)
            top = tl.maximum(top, one, propagate_nan=tl.PropagateNan.ALL)
            if TOP2:
                one = tl.maximum(one + two, LOWEST, propagate_nan=tl.PropagateNan.ALL)
            of_group = of_group + (ordered(one),)
    kept = ()
    for g in tl.static_range(GROUPS):
        kept = kept + (is_kept(of_group, g, KEPT),)

    # The K spans with the largest values, among groups that are kept.
    least, keys = least_of_keys(top, SPAN_BITS)[:, None], ()
    for i in tl.static_range(len(bests)):
        low = SPANS - 1 - (LANES - 1) * (VEC // SPAN) - i // (VEC // SPAN) * (STEP // SPAN) - i % (VEC // SPAN)
        key = key_of(bests[i], least, low, SPAN_BITS)
        keys = keys + (only(kept[i * SPAN * LANES // SIZE][:, None], key, least_of(tl.int32), GROUPS == 1),)
    v = sorted_keys(keys, BLOCK_K)
    w = ()
    for i in tl.static_range(len(v)):
        w = w + (v[i] + (LANES - 1 - lane) * (VEC // SPAN),)
    v = largest_keys(w, K)
    bad = top != top
    unclear = v[K - 1] < least_of(tl.int32) + (1 << SPAN_BITS)

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
        value = value_of(x, tl.load(selection_bias + e), inner, outer, SCORE, AFTER, SOFTCAP, PTX)
        values = columns(value, LANES, SPAN)
        for i in tl.static_range(SPAN):
            key = key_of(values[i], least, (1 << BITS) - 1 - (lane * SLOTS + j) * SPAN - i, BITS)
            keys = keys + (only(lane * SLOTS + j < K, key, least_of(tl.int32), K == LANES * SLOTS),)
    v = largest_keys(sorted_keys(keys, BLOCK_K), K)
    unclear = (unclear | (v[K - 1] < least_of(tl.int32) + (1 << BITS))) & active & (bad == 0)
    found, ids = slots(v, lane, LANES, SLOTS), ()
    for j in tl.static_range(SLOTS):
        place = (1 << BITS) - 1 - (found[j] & ((1 << BITS) - 1))
        span = spans[0][:, None] + tl.zeros_like(lane)
        for i in tl.static_range(1, K):
            span = tl.where(place // SPAN == i, spans[i][:, None], span)
        ids = ids + ((SPANS - 1 - span) * SPAN + place % SPAN,)
    selected = row(ids, SLOTS)
    if tl.max(unclear.to(tl.int32)) != 0:  # values that are further apart than keys of 32 bits tell
        groups = tl.zeros([BLOCK_T], tl.int32)
        for g in tl.static_range(GROUPS):
            groups |= kept[g].to(tl.int32) << g
        selected = by_whole_values(
            start, selection_bias, active, groups, k, inner, outer, E, K, SIZE, STEP, SCORE, AFTER, SOFTCAP, PTX
        )
    selected = tl.where((bad | (active == 0))[:, None], k, selected)
    if given is not None:
        selected, invalid, differ = replayed(given, selected, t, k, active, T, E, K)
        bad = bad | invalid
        if changed is not None:
            if ALONE:
                tl.store(changed, tl.sum(differ))
            else:
                tl.atomic_add(changed, tl.sum(differ), sem="relaxed")

    valid = (t[:, None] < T) & (k < K)
    counted = valid & active[:, None]
    if counts is not None:  # before the weights, which are computed while the sums are on their way
        add_counts(counts, selected, counted, tl.sum(active.to(tl.int32)), E, K, BINS, ALONE)
    z = logit(tl.load(start[:, None] + selected, mask=counted, other=0.0), inner, outer, SOFTCAP)
    zero = tl.zeros([BLOCK_T], tl.float32)
    w = scale * weights_of(z, zero, zero + 1.0, k < K, eps, SCORE, RENORMALIZE, RELATIVE, AFTER)
    w = tl.where(active[:, None], tl.where(bad[:, None], float("nan"), w), 0.0)
    tl.store(weights + t[:, None] * K + k, w, mask=valid)
    tl.store(experts + t[:, None] * K + k, selected.to(tl.int64), mask=valid)


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
    if o.sums or o.k > MOST_K or o.score == "softmax" or lanes_of(E, stride, o) < 2:
        return False
    return span_of(E, stride, o) > 0


def tile_of(T: int, E: int, stride: int, options: RouterOptions) -> tuple[int, int]:
    """Tokens and threads per program."""
    return tokens_and_threads(T, E, lanes_of(E, stride, options), MOST_THREADS, options)


Shape = tuple[int, int, int]  # tokens, experts, stride of the logits


def plan_for(shape: Shape, options: RouterOptions) -> Plan:
    """The launch of `biased_routing_kernel`."""
    T, E, stride = shape
    o = options
    BLOCK_T, threads = tile_of(T, E, stride, o)
    constexprs = dict(
        E=E, K=o.k, SCORE=o.score, GROUPS=o.n_group, KEPT=o.topk_group, TOP2=o.group_score == "top2_sum",
        RENORMALIZE=o.renormalize, RELATIVE=is_relative(o), AFTER=o.score_after_topk, SOFTCAP=o.softcap is not None,
        PTX=layout.compute_capability() > 0, ALONE=BLOCK_T >= T, VEC=math.gcd(8, stride, E // o.n_group),
        SPAN=span_of(E, stride, o), LANES=lanes_of(E, stride, o), BLOCK_T=BLOCK_T, BLOCK_K=power_of_two(o.k),
        BINS=max(64, power_of_two(E)),
    )  # fmt: skip
    numbers = (T, stride, *o.factors(), o.scale, o.eps)
    return Plan(biased_routing_kernel, -(-T // BLOCK_T), numbers, constexprs, layout.warps(threads))
