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
from onepass.kernels.router_topk import Threads, logit, tokens_and_threads
from onepass.kernels.row_programs import unmasked

THREADS = Threads(128, 128, 256, 1 << 18)
REGISTERS = 64  # per thread; ptxas would take 100 to load all logits at once, and is 10% slower
LOGITS, MOST_LOGITS = 64, 128  # per thread, at most: without groups of experts, and with groups
SPANS = 8  # at least, per expert of a token, if a thread has no more than MOST_KEYS to sort
MOST_KEYS, MOST_K, MOST_GROUPS = 16, 8, 32
SMALLEST = tl.constexpr(2.0**-149)  # of the positive numbers in float32
INFINITE = tl.constexpr(0x7F800000)  # the bits of an infinite float32


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
def bound_of(top, BITS: tl.constexpr):
    """The arguments of `key_of` for a token whose largest value is ``top``: a lower bound, a factor and ``start``.

    The bound has the sign of ``top``. The bits of floats of one sign are in the order of the floats, or, if the sign is
    negative, in the inverse order; hence the sign of the factor.
    """
    MOST: tl.constexpr = min((1 << (32 - BITS)) - 1, INFINITE)
    bits = (top + 0.0).to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    size = tl.where(bits < 0, tl.minimum(size, INFINITE - MOST) + MOST, tl.maximum(size, MOST) - MOST)
    bound = size | (bits & least_of(tl.int32))
    factor = tl.where(bits < 0, -(1 << BITS), 1 << BITS)
    return bound.to(tl.float32, bitcast=True), factor, least_of(tl.int32) - bound * factor


@triton.jit
def key_of(value, bound, factor, start):
    """An integer of the order of the values above ``bound``, with the number that ``start`` includes in its low bits.

    Of all other values, but NaN, the upper bits are the lowest that there are.
    """
    return tl.maximum(value, bound).to(tl.int32, bitcast=True) * factor + start


@triton.constexpr_function
def bits_of(n):
    """The number of bits of numbers below n."""
    return (n - 1).bit_length()


@triton.jit
def two_largest(a, b, c, d):
    """The two largest of four values, of which the first two and the last two are sorted."""
    return tl.maximum(a, c, propagate_nan=tl.PropagateNan.ALL), tl.maximum(tl.minimum(a, c), tl.maximum(b, d))


@triton.jit
def joined(a, of_a, b, of_b):
    """The largest of two sets of values, and the sum of its two largest, from those of both sets.

    The two largest are of one set, or the largest of each. No other pair has a larger sum, also after rounding.
    """
    return larger(a, b), tl.maximum(tl.maximum(of_a, of_b), a + b)


@triton.jit
def best_and_sum(v):
    """The largest of some values, and the sum of the two largest, or -inf if there is one value."""
    N: tl.constexpr = len(v)
    best, of_two = v[0], tl.full(v[0].shape, float("-inf"), tl.float32)
    if N == 2:
        best, of_two = larger(v[0], v[1]), v[0] + v[1]
    elif N > 2:
        a, b = best_and_sum(v[: N // 2]), best_and_sum(v[N // 2 :])
        best, of_two = joined(a[0], a[1], b[0], b[1])
    return best, of_two


@triton.jit
def chosen(v, i):
    """Of tensors ``(T,)``, for every element of ``i`` ``(T, L)`` or ``(1, L)`` the one with this number."""
    w = ()
    for n in tl.static_range(len(v)):
        w = w + (v[n][:, None] + tl.zeros_like(i),)
    for bit in tl.static_range(bits_of(len(v))):
        v, w = w, ()
        for n in tl.static_range(0, len(v), 2):
            if n + 1 < len(v):
                w = w + (tl.where((i >> bit) & 1 == 1, v[n + 1], v[n]),)
            else:
                w = w + (v[n],)
    return w[0]


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
        score = larger(one + tl.where(two > LOWEST, two, 0.0), LOWEST) if TOP2 else one
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
    TOP2: tl.constexpr, PTX: tl.constexpr, ALONE: tl.constexpr, VEC: tl.constexpr, SHARED: tl.constexpr,
    TURNS: tl.constexpr, SEARCH: tl.constexpr, SPAN: tl.constexpr, LANES: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_E: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Select K experts for every token, and compute their weights and the counts.

    Inputs: ``logits`` ``(T, E)``; ``selection_bias`` ``(E,)``; ``token_mask`` ``(T,)`` and ``given`` ``(T, K)``, the
    experts to replay, each or None.
    Outputs: ``weights`` and ``experts`` ``(T, K)``; ``counts`` ``(E,)`` and ``changed`` ``()``, each or None, to which
    the program adds unless it is ALONE.
    Bytes moved: ``T·E`` logits in, ``O(T·K)`` out.
    """
    SIZE: tl.constexpr = E // GROUPS
    SPANS: tl.constexpr = E // SPAN
    # Lanes share each group, of which they read vectors in turns, or each has whole groups.
    LANE: tl.constexpr = VEC if SHARED else E // LANES
    STEP: tl.constexpr = LANES * VEC if SHARED else VEC
    PART: tl.constexpr = SIZE // STEP  # vectors of a lane in a group
    SPAN_BITS: tl.constexpr = bits_of(SPANS)
    SLOTS: tl.constexpr = BLOCK_K // LANES if BLOCK_K > LANES else 1  # experts that a lane computes weights of
    # The K largest values lie in K spans, which are searched for, or are compared with all of the groups that are kept.
    PARTS: tl.constexpr = K if SEARCH else KEPT
    EACH: tl.constexpr = SPAN if SEARCH else SIZE  # experts of a part
    READS: tl.constexpr = (PARTS * EACH // SPAN + LANES - 1) // LANES  # of a lane, of SPAN experts each
    BITS: tl.constexpr = bits_of(LANES * READS * SPAN)
    GROUP_BITS: tl.constexpr = bits_of(GROUPS)
    lane = tl.arange(0, LANES)[None, :]
    k = tl.arange(0, LANES * SLOTS)[None, :]
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    start = logits + t * stride // VEC * VEC  # VEC divides the stride; this tells the compiler so
    active = unmasked(token_mask, t, T, 0)

    # Experts of two lanes may lie a multiple of 128 bytes apart, and then in the same banks of the cache. Such lanes
    # read their vectors in different orders.
    turn = (tl.arange(0, LANES) * (LANE * logits.dtype.element_ty.primitive_bitwidth // 8) // 128) & TURNS
    bests, firsts, sums, lows = (), (), (), ()
    first_of_group = tl.full([BLOCK_T, LANES], float("-inf"), tl.float32)
    sum_of_group = first_of_group
    for r in tl.static_range(E // (LANES * VEC)):
        first = tl.arange(0, LANES) * LANE + (turn ^ r) * STEP
        e = first[:, None] + tl.arange(0, VEC)[None, :]
        e = tl.multiple_of(tl.max_contiguous(tl.reshape(e, [1, LANES * VEC]), [1, VEC]), [1, VEC])
        x = tl.load(start[:, None] + e, mask=active[:, None], other=0.0)
        # For every token, so that it has the layout of the logits.
        bias = tl.load(selection_bias + e + tl.zeros([BLOCK_T, 1], tl.int32))
        values = columns(quick_value(x, bias, inner, outer, SCORING, PTX), LANES, VEC)
        for s in tl.static_range(VEC // SPAN):
            best, of_two = best_and_sum(values[s * SPAN : (s + 1) * SPAN])
            bests, lows = bests + (best,), lows + (SPANS - 1 - s - ((turn ^ r) * (STEP // SPAN))[None, :],)
            if r % PART == 0 and s == 0:
                first_of_group, sum_of_group = best, of_two
            else:
                first_of_group, sum_of_group = joined(first_of_group, sum_of_group, best, of_two)
        if (r + 1) % PART == 0:
            if SHARED and GROUPS > 1:
                one, of_two = tl.reduce((first_of_group, sum_of_group), 1, joined)
                first_of_group, sum_of_group = one[:, None], of_two[:, None]
            firsts, sums = firsts + (first_of_group,), sums + (sum_of_group,)
    top = firsts[0]
    for q in tl.static_range(1, len(firsts)):
        top = larger(top, firsts[q])
    top = tl.reduce(top, 1, larger)

    # The groups that are kept: those with keys not less than the last one, in the order of their keys.
    unclear = (tl.abs(top) < float("inf")) == 0
    kept, group_keys = (), ()
    if GROUPS > 1:
        scores = sums if TOP2 else firsts
        best = scores[0]
        for q in tl.static_range(1, len(scores)):
            best = tl.maximum(best, scores[q])
        of_best = bound_of(tl.max(best, axis=1), GROUP_BITS)
        for q in tl.static_range(len(scores)):
            low = GROUPS - 1 - q - (0 if SHARED else lane * len(scores))
            key = key_of(scores[q], of_best[0][:, None], of_best[1][:, None], of_best[2][:, None] + low)
            group_keys = group_keys + (key,)
        keys_of_lane = sorted_keys(group_keys, BLOCK_G if SHARED else BLOCK_G // LANES)
        if SHARED:  # all lanes have the same
            for i in tl.static_range(KEPT):
                kept = kept + (tl.max(keys_of_lane[i], axis=1),)
        else:
            kept = largest_keys(keys_of_lane, KEPT)
        unclear = unclear | (kept[KEPT - 1] < least_of(tl.int32) + (1 << GROUP_BITS))
        if TOP2:
            least = sums[0]
            for q in tl.static_range(1, len(sums)):
                least = tl.minimum(least, sums[q])
            unclear = unclear | (tl.min(least, axis=1) == float("-inf"))  # a group has one expert, or none

    if SEARCH:  # the K spans with the largest values, among groups that are kept; the bound of others is above all
        bound, factor, summand = bound_of(top, SPAN_BITS)
        bound, factor, summand = bound[:, None], factor[:, None], summand[:, None]
        summand -= lane * (LANE // SPAN)
        keys = ()
        for i in tl.static_range(len(bests)):
            key = key_of(bests[i], bound, factor, summand + lows[i])
            if GROUPS > 1:
                here = group_keys[i * len(group_keys) // len(bests)] >= kept[KEPT - 1][:, None]
                key = tl.where(here, key, least_of(tl.int32))
            keys = keys + (key,)
        kept = largest_keys(sorted_keys(keys, BLOCK_K), K)
        unclear = unclear | (kept[K - 1] < least_of(tl.int32) + (1 << SPAN_BITS))

    # These spans or groups in their order, which makes the keys of the first experts larger among equal values.
    parts = (tl.zeros([BLOCK_T], tl.int32),)  # inverted: E // EACH - 1 is the first
    if SEARCH or GROUPS > 1:
        parts = ()
        for i in tl.static_range(PARTS):
            parts = parts + (kept[i] & ((1 << (SPAN_BITS if SEARCH else GROUP_BITS)) - 1),)
        parts = sorted_keys(parts, BLOCK_K if SEARCH else BLOCK_G)

    # The K experts with the largest values in them.
    keys = ()
    bound, factor, summand = bound_of(top, BITS)
    bound, factor, summand = bound[:, None], factor[:, None], summand[:, None]
    for j in tl.static_range(READS):
        place = (lane * READS + j) * SPAN
        e = (E // EACH - 1 - chosen(parts, place // EACH)) * EACH + place % EACH
        e = e[:, :, None] + tl.arange(0, SPAN)[None, None, :]
        e = tl.multiple_of(tl.max_contiguous(tl.reshape(e, [BLOCK_T, LANES * SPAN]), [1, SPAN]), [1, SPAN])
        x = tl.load(start[:, None] + e, mask=active[:, None], other=0.0)
        value = quick_value(x, tl.load(selection_bias + e), inner, outer, SCORING, PTX)
        values = columns(value, LANES, SPAN)
        for i in tl.static_range(SPAN):
            key = key_of(values[i], bound, factor, summand + ((1 << BITS) - 1 - place - i))
            keys = keys + (only(place < PARTS * EACH, key, least_of(tl.int32), PARTS * EACH == LANES * READS * SPAN),)
    v = largest_keys(sorted_keys(keys, BLOCK_K), K)
    unclear = unclear | (v[K - 1] < least_of(tl.int32) + (1 << BITS))
    found, ids = slots(v, lane, LANES, SLOTS), ()
    for j in tl.static_range(SLOTS):
        place = (1 << BITS) - 1 - (found[j] & ((1 << BITS) - 1))
        ids = ids + ((E // EACH - 1 - chosen(parts, place // EACH)) * EACH + place % EACH,)
    selected = row(ids, SLOTS)
    bad = t < 0
    if tl.max((unclear & active).to(tl.int32)) != 0:
        selected, bad = by_whole_values(
            start, selection_bias, active, k, inner, outer, E, K, GROUPS, KEPT, TOP2, BLOCK_E, SCORING, PTX, BLOCK_G
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

    A small span has less that is read twice, and a large one fewer keys to sort. All that is read at once if spans are
    not searched.
    """
    o = options
    if not searches(E, stride, o):
        return math.gcd(8, stride, E // o.n_group)
    size, most = E // o.n_group, MOST_KEYS * lanes_of(E, stride, o)
    spans = [n for n in (8, 4, 2) if math.gcd(8, stride, size) % n == 0 and o.topk_group * (size // n) >= o.k]
    spans = [n for n in spans if E // n <= most]
    return next((n for n in spans if E // n >= SPANS * o.k), spans[-1] if spans else 0)


def searches(E: int, stride: int, options: RouterOptions) -> bool:
    """Whether the spans with the largest values are searched, instead of all values of the groups that are kept."""
    o = options
    VEC = math.gcd(8, stride, E // o.n_group)
    reads = -(-o.topk_group * (E // o.n_group) // VEC // lanes_of(E, stride, o))
    return VEC == 1 or reads * VEC > MOST_KEYS


def lanes_of(E: int, stride: int, options: RouterOptions) -> int:
    """Threads per token, a power of two that divides the number of groups or of a group's vectors."""
    o = options
    size = E // o.n_group
    vectors = size // math.gcd(8, stride, size)
    most = max(power_of_two(E // LOGITS), power_of_two(o.k) // 4)
    if o.n_group > 1:
        most = max(power_of_two(-(-E // MOST_LOGITS)), 4)
    return min(most, max(o.n_group & -o.n_group, vectors & -vectors))


def shares(E: int, stride: int, options: RouterOptions) -> bool:
    """Whether lanes share each group, instead of having whole groups: if the vectors of a group suffice for all."""
    size = E // options.n_group
    return size // math.gcd(8, stride, size) % lanes_of(E, stride, options) == 0


def takes(E: int, stride: int, options: RouterOptions) -> bool:
    """Whether `biased_routing_kernel` computes this: not the sums for losses, nor a softmax over all experts.

    A single thread per token would have so many keys, or of such sizes, that Triton compiles for minutes.
    """
    o = options
    if o.sums or o.k > MOST_K or o.n_group > MOST_GROUPS or o.score == "softmax":
        return False
    return lanes_of(E, stride, o) > 1 and span_of(E, stride, o) > 0


def tile_of(T: int, E: int, stride: int, options: RouterOptions) -> tuple[int, int]:
    """Tokens and threads per program."""
    return tokens_and_threads(T, E, lanes_of(E, stride, options), THREADS, options)


def plan_for(shape: Shape, options: RouterOptions) -> Plan:
    """The launch of `biased_routing_kernel`."""
    T, E, stride = shape
    o = options
    BLOCK_T, threads = tile_of(T, E, stride, o)
    nvidia, size = layout.compute_capability() > 0, E // o.n_group
    VEC, LANES, shared = math.gcd(8, stride, size), lanes_of(E, stride, o), shares(E, stride, o)
    vectors = 1 if shared else size // VEC  # of a group, all in one lane
    constexprs = dict(
        E=E, K=o.k, SCORING=scoring(o), GROUPS=o.n_group, KEPT=o.topk_group, TOP2=o.group_score == "top2_sum",
        PTX=nvidia, ALONE=BLOCK_T >= T, VEC=VEC, SHARED=shared, TURNS=(vectors & -vectors) - 1,
        SEARCH=searches(E, stride, o), SPAN=span_of(E, stride, o), LANES=LANES, BLOCK_T=BLOCK_T,
        BLOCK_K=power_of_two(o.k), BLOCK_G=power_of_two(o.n_group), BLOCK_E=min(LANES * VEC, size & -size),
        BINS=max(64, power_of_two(E)),
    )  # fmt: skip
    numbers = (T, stride, *o.factors(), o.scale, o.eps)
    warps, registers = layout.warps(threads), REGISTERS if nvidia else None
    return Plan(biased_routing_kernel, -(-T // BLOCK_T), numbers, constexprs, warps, registers=registers)
