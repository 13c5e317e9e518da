"""The kernel of `moe.route` for selections by scores to which a bias is added, with or without groups of experts.

It searches as `router_topk` does: the largest values of spans of adjacent experts first, and then only in the k spans
where these are largest. If the groups that are kept have few experts, it compares them all instead. The keys are those
of `router_values`. Their bound is as far below the token's largest value as the bits allow, a factor of about 2**8. If
one of the k largest values of a token is not above it, or the largest is infinite or NaN, the program starts again with
whole values, in k + 1 passes over the logits.
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
from onepass.kernels.router_keys import columns, largest_keys, least_of, only, row, slots, sorted_keys
from onepass.kernels.router_scores import (
    Shape,
    add_changed,
    add_counts,
    number_of,
    replayed,
    scoring,
    weights_of,
    write_routing,
)
from onepass.kernels.router_topk import Threads, logit, tokens_and_threads
from onepass.kernels.router_values import (
    best_and_sum,
    bits_of,
    bound_of,
    by_whole_values,
    chosen,
    joined,
    key_of,
    larger,
    of_group,
    quick_value,
)
from onepass.kernels.row_programs import unmasked

# Threads per program, and registers of each, for threads with at most FEW logits and with more. Programs of 128 threads
# with few logits would wait for each other's additions to the counts. ptxas would take 100 registers.
ANY = 1 << 30  # number of additions to the counts
FEW, OF_FEW, OF_MORE = 32, (Threads(128, 256, 512, ANY), 56), (Threads(128, 128, 256, ANY), 80)
LOGITS, MOST_LOGITS = 64, 128  # per thread, at most: without groups of experts, and with groups
SPANS = 8  # at least, per expert of a token, if a thread has no more than MOST_KEYS to sort
MOST_KEYS, MOST_K, MOST_GROUPS = 16, 8, 32


@triton.jit
def turn_of(lane, BYTES: tl.constexpr, TURNS: tl.constexpr):
    """The number with which a lane's r-th read is that of its vector ``number ^ r``.

    A lane's experts take BYTES bytes. Those of two lanes may lie a multiple of 128 bytes apart, and then in the same
    banks of the cache. Such lanes read their vectors in different orders.
    """
    return (lane * BYTES // 128) & TURNS


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
    BYTES: tl.constexpr = LANE * logits.dtype.element_ty.primitive_bitwidth // 8
    SLOTS: tl.constexpr = BLOCK_K // LANES if BLOCK_K > LANES else 1  # experts that a lane computes weights of
    # Where the K largest values are sought: in the K spans with the largest values, or in all groups that are kept.
    PARTS: tl.constexpr = K if SEARCH else KEPT
    EACH: tl.constexpr = SPAN if SEARCH else SIZE  # experts of a part
    READS: tl.constexpr = (PARTS * EACH // SPAN + LANES - 1) // LANES  # of a lane, of SPAN experts each
    BITS: tl.constexpr = bits_of(max(LANES * READS * SPAN, SPANS if SEARCH else 1))
    GROUP_BITS: tl.constexpr = bits_of(GROUPS)
    WHOLE: tl.constexpr = PARTS * EACH == LANES * READS * SPAN
    PAIR: tl.constexpr = 2 if VEC > 1 else 1
    MOVED: tl.constexpr = not (SEARCH or SHARED) and KEPT % LANES == 0 and GROUPS <= 2 * LANES
    lane = tl.arange(0, LANES)[None, :]
    k = tl.arange(0, LANES * SLOTS)[None, :]
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    start = logits + t * stride // VEC * VEC  # VEC divides the stride; this tells the compiler so
    active = unmasked(token_mask, t, T, 0)

    turn = turn_of(tl.arange(0, LANES), BYTES, TURNS)
    all_values, bests, firsts, sums, lows = (), (), (), (), ()
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
        all_values = all_values + values
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
            # A group has one expert that is not disabled, or none. An expert with the lowest value is disabled too.
            unclear = unclear | (tl.min(least, axis=1) < 0.5 * LOWEST)

    bound, factor, summand = bound_of(top, BITS)
    bound, factor, summand = bound[:, None], factor[:, None], summand[:, None]
    if SEARCH:  # the K spans with the largest values, among groups that are kept; the bound of others is above all
        keys = ()
        for q in tl.static_range(len(firsts)):
            here = 0.0
            if GROUPS > 1:
                here = tl.where(group_keys[q] >= kept[KEPT - 1][:, None], 0.0, float("-inf"))
            for i in tl.static_range(len(bests) // len(firsts) * q, len(bests) // len(firsts) * (q + 1)):
                keys = keys + (key_of(bests[i] + here, bound, factor, summand - lane * (LANE // SPAN) + lows[i]),)
        kept = largest_keys(sorted_keys(keys, BLOCK_K), K)
        unclear = unclear | (kept[K - 1] < least_of(tl.int32) + (1 << BITS))

    # These spans or groups in their order, which makes the keys of the first experts larger among equal values.
    parts = (tl.zeros([BLOCK_T], tl.int32),)  # inverted: E // EACH - 1 is the first
    if SEARCH or GROUPS > 1:
        parts = ()
        for i in tl.static_range(PARTS):
            parts = parts + (kept[i] & ((1 << (BITS if SEARCH else GROUP_BITS)) - 1),)
        parts = sorted_keys(parts, BLOCK_K if SEARCH else BLOCK_G)

    # The K experts with the largest values in them.
    keys = ()
    if MOVED:  # a lane takes PARTS // LANES of the groups that are kept, from the lanes that computed their values
        for n in tl.static_range(PARTS // LANES):
            number = lane * (PARTS // LANES) + n
            group = GROUPS - 1 - chosen(parts, number)
            values = of_group(all_values, group, SIZE)
            other_turn = turn_of(group // len(firsts), BYTES, TURNS)
            for r in tl.static_range(PART):
                start_of_r = summand + ((1 << BITS) - 1 - number * SIZE - (other_turn ^ r) * VEC)
                for i in tl.static_range(VEC):
                    keys = keys + (key_of(values[r * VEC + i], bound, factor, start_of_r - i),)
    else:
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
                keys = keys + (only(place < PARTS * EACH, key, least_of(tl.int32), WHOLE),)
    v = largest_keys(sorted_keys(keys, BLOCK_K), K)
    unclear = unclear | (v[K - 1] < least_of(tl.int32) + (1 << BITS))
    bad = t < 0
    # The mask is expanded to the lanes, and so has the layout of the keys. Triton would convert the layout of a mask of
    # tokens, which takes an exchange through shared memory.
    again = tl.max(((unclear & active)[:, None] & (lane >= 0)).to(tl.int32)) != 0
    if again:
        v, bad = by_whole_values(
            start, selection_bias, active, inner, outer, E, K, GROUPS, KEPT, TOP2, BLOCK_E, SCORING, PTX, BLOCK_G,
            LANES,
        )  # fmt: skip
    found, ids = slots(v, lane, LANES, SLOTS), ()
    for j in tl.static_range(SLOTS):
        place = (1 << BITS) - 1 - (found[j] & ((1 << BITS) - 1))
        e = (E // EACH - 1 - chosen(parts, place // EACH)) * EACH + place % EACH
        ids = ids + (tl.where(again, found[j], e),)
    selected = row(ids, SLOTS)
    selected = tl.where((bad | (active == 0))[:, None], k, selected)
    if given is not None:
        selected, invalid, differ = replayed(given, selected, t, k, active, T, E, K)
        bad = bad | invalid
        add_changed(changed, differ, ALONE)

    valid = (t[:, None] < T) & (k < K)
    counted = valid & active[:, None]
    if counts is not None:  # before the weights, which are computed while the sums are on their way
        add_counts(counts, selected, counted, number_of(active, token_mask, T), E, K, BINS, ALONE)
    of_slots, ids = (), columns(selected, LANES, SLOTS)
    for j in tl.static_range(SLOTS):
        # Triton lets the threads load that have the ids, if what they load are pairs of adjacent logits.
        e = (ids[j] & -PAIR)[:, :, None] + tl.arange(0, PAIR)[None, None, :]
        e = tl.multiple_of(tl.max_contiguous(tl.reshape(e, [BLOCK_T, LANES * PAIR]), [1, PAIR]), [1, PAIR])
        x = columns(tl.load(start[:, None] + e, mask=active[:, None], other=0.0), LANES, PAIR)
        of_slots = of_slots + (tl.where(ids[j] & (PAIR - 1) != 0, x[PAIR - 1], x[0]),)
    z = logit(row(of_slots, SLOTS), inner, outer, SCORING.SOFTCAP)
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


def tile_of(T: int, E: int, stride: int, options: RouterOptions) -> tuple[int, int, int]:
    """Tokens and threads per program, and registers per thread."""
    lanes = lanes_of(E, stride, options)
    threads, registers = OF_FEW if E // lanes <= FEW else OF_MORE
    return *tokens_and_threads(T, E, lanes, threads, options), registers


def plan_for(shape: Shape, options: RouterOptions) -> Plan:
    """The launch of `biased_routing_kernel`."""
    T, E, stride = shape
    o = options
    BLOCK_T, threads, registers = tile_of(T, E, stride, o)
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
    return Plan(
        biased_routing_kernel, -(-T // BLOCK_T), numbers, constexprs, layout.warps(threads),
        registers=registers if nvidia else None,
    )  # fmt: skip
