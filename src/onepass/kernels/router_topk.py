"""The kernel of `moe.route` for plain selections, where the logits or the values they are ranked by are sorted as keys.

A key is an integer that orders as a value does, with the inverted id of the expert in its lowest bits: all keys of a
token differ, and the largest are those of the selected experts, where ties go to the lower id. A logit of 16 bits and
an id take 32 bits; a float32 takes 64.

LANES threads share a token. Each sorts its keys in runs of a vector by Batcher's network, and merges the runs, of which
it keeps the largest K. Then K rounds take the maximum over the heads of all lanes and remove it from its lane. So
nearly all the work is in minima and maxima of registers.
"""

# mypy: disable-error-code="assignment, var-annotated, misc"
# (tuples grow in a `static_range`)

import math
from functools import lru_cache

import torch
import triton
import triton.language as tl

from onepass.core.moe_options import RouterOptions
from onepass.kernels import layout
from onepass.kernels.launch import Flat, Out, Plan, Rows
from onepass.kernels.layout import MANY, power_of_two
from onepass.kernels.online_softmax import LOG2E, LOWEST, transform
from onepass.kernels.router_scores import (
    SIGMOID,
    SOFTMAX,
    SQRTSOFTPLUS,
    has_no_score,
    is_relative,
    raw_scores,
    relative,
    replayed,
    sigmoid,
    sqrtsoftplus,
)

LOW = tl.constexpr(8191)  # the bits of an inverted id
SIGNS = tl.constexpr(-0x7FFF8000)  # the sign bits of two 16-bit floats
MOST_K, MOST_K_WITH_BIAS = 16, 8  # in keys of 32 or 64 bits
LEAST_EPS = 1e-12  # below this, eps changes no weight of a softmax, whose selected scores sum up to at least K / E
LOGITS, LOGITS_WITH_BIAS, MOST_LANES = 64, 32, 16  # per thread, in keys of 32 or 64 bits; threads per token
# Threads per program. Programs add to the counts in turns, so that there must not be too many of them.
THREADS_WITHOUT_COUNTS, THREADS, MOST_THREADS, MOST_ADDITIONS = 32, 128, 256, 1 << 18
ONE_PROGRAM = 512  # the most threads of a program that is alone


@triton.constexpr_function
def is_lower(a, n, p, q):
    """Whether a of n elements is the lower one of a pair in step q of stage p of Batcher's odd-even merge sort."""
    p, k = 1 << p, (1 << p) >> q
    return a >= k % p and a + k < n and (a - k % p) // k % 2 == 0 and a // (2 * p) == (a + k) // (2 * p)


@triton.constexpr_function
def log2(n):
    return n.bit_length() - 1


@triton.jit
def sorted_run(v, N: tl.constexpr):
    """N tensors, sorted element by element, the largest first."""
    for p in tl.static_range(log2(N)):
        for q in tl.static_range(p + 1):
            w = ()
            for a in tl.static_range(N):
                if is_lower(a, N, p, q):
                    w = w + (tl.maximum(v[a], v[a + ((1 << p) >> q)]),)
                elif is_lower(a - ((1 << p) >> q), N, p, q):
                    w = w + (tl.minimum(v[a - ((1 << p) >> q)], v[a]),)
                else:
                    w = w + (v[a],)
            v = w
    return v


@triton.jit
def merged(a, b, N: tl.constexpr):
    """The N largest of two sorted runs of N, sorted: half of a bitonic merge."""
    v = ()
    for i in tl.static_range(N):
        v = v + (tl.maximum(a[i], b[N - 1 - i]),)
    for s in tl.static_range(log2(N)):
        w = ()
        for i in tl.static_range(N):
            if i & (N >> (s + 1)):
                w = w + (tl.minimum(v[i - (N >> (s + 1))], v[i]),)
            else:
                w = w + (tl.maximum(v[i], v[i + (N >> (s + 1))]),)
        v = w
    return v


@triton.jit
def columns(x, V: tl.constexpr):
    """The V columns of ``(T, L, V)`` as V tensors ``(T, L)``. It costs nothing if a thread has all of them."""
    if V == 8:
        parts = (tl.reshape(x, [x.shape[0], x.shape[1], 2, 2, 2]),)
    elif V == 4:
        parts = (tl.reshape(x, [x.shape[0], x.shape[1], 2, 2]),)
    elif V == 2:
        parts = (x,)
    else:
        parts = (tl.reshape(x, [x.shape[0], x.shape[1]]),)
    for _ in tl.static_range(log2(V)):
        firsts, seconds = (), ()
        for i in tl.static_range(len(parts)):
            a, b = tl.split(parts[i])
            firsts, seconds = firsts + (a,), seconds + (b,)
        parts = firsts + seconds
    return parts


@triton.jit
def row(v, N: tl.constexpr):
    """N tensors ``(T,)`` as one ``(T, N)``."""
    T: tl.constexpr = v[0].shape[0]
    for _ in tl.static_range(log2(N)):
        w = ()
        for i in tl.static_range(len(v) // 2):
            w = w + (tl.join(v[i], v[i + len(v) // 2]),)
        v = w
    return tl.reshape(v[0], [T, N])


@triton.jit
def ordered(bits, MASK: tl.constexpr):
    """The bits of a float as an integer of the same order, which is its own inverse; MASK has all bits but the sign."""
    return bits ^ ((bits >> 31) & MASK)


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
def logit(x, inner, outer, SOFTCAP: tl.constexpr):
    """The logit after its soft-cap, if it has one."""
    return transform(x, inner, outer, SOFTCAP) if SOFTCAP else x.to(tl.float32)


@triton.jit
def only(there, x, least, WHOLE: tl.constexpr):
    """``x``, but ``least`` where there is no expert. WHOLE says that there is one everywhere."""
    return x if WHOLE else tl.where(there, x, least)


@triton.jit
def values_of(z, x, bias, SCORE: tl.constexpr, AFTER: tl.constexpr):
    """What experts are ranked by, without -0: logits, or scores (logits, if scores are computed AFTER) plus a bias."""
    value = x.to(tl.float32)
    if bias is not None:
        value = z
        if not AFTER:
            value = sigmoid(z) if SCORE == SIGMOID else sqrtsoftplus(z)
        value = tl.maximum(value + bias.to(tl.float32), LOWEST)  # on a GPU, also if the bias is NaN
        value = tl.where(z == float("-inf"), LOWEST, value)
    return value + 0.0


@triton.jit
def keys_of_words(words, first, E, BITS_OF_LANE: tl.constexpr, OFFSET: tl.constexpr, WHOLE: tl.constexpr):
    """Keys of 32 bits for pairs of 16-bit logits, where ``first`` is the first expert. The bits of its lane are 0."""
    keys = ()
    for i in tl.static_range(len(words)):
        m = ordered_halves(words[i])
        there = first + 2 * i < E
        inverted = LOW - BITS_OF_LANE - OFFSET - 2 * i
        keys = keys + (only(there, (m << 16) | inverted, -(2**31), WHOLE),)
        keys = keys + (only(there, (m & -65536) | (inverted - 1), -(2**31), WHOLE),)
    return keys


@triton.jit
def key_of_value(value, e):
    """A key of 64 bits."""
    return (ordered(value.to(tl.int32, bitcast=True), 0x7FFFFFFF).to(tl.int64) << 32) | (e ^ LOW).to(tl.int64)


@triton.jit
def value_of_key(key):
    """The inverse of `key_of_value`."""
    return ordered((key >> 32).to(tl.int32), 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def score_of_group(z, SCORE: tl.constexpr, AFTER: tl.constexpr):
    """The score of an expert without a bias by which its group is judged."""
    score = z
    if not AFTER:
        score = sigmoid(z) if SCORE == SIGMOID else sqrtsoftplus(z)
    return tl.where(z == float("-inf"), LOWEST, score)


@triton.jit
def largest_keys(v, LEAST: tl.constexpr, K: tl.constexpr):
    """The K largest keys of every token, as K tensors ``(T,)``, from the sorted keys ``(T, L)`` of each lane."""
    selected = ()
    for k in tl.static_range(K):
        best = tl.max(v[0], axis=1)
        selected = selected + (best,)
        here = v[0] == best[:, None]
        w = ()
        for i in tl.static_range(len(v)):
            if i < K - 1 - k:  # no more can be selected
                if i + 1 < len(v):
                    w = w + (tl.where(here, v[i + 1], v[i]),)
                else:
                    w = w + (tl.where(here, LEAST, v[i]),)
        v = w
    return selected


@triton.jit(
    do_not_specialize=["T", "stride"],
    do_not_specialize_on_alignment=[
        "selection_bias", "token_mask", "given", "weights", "experts", "counts", "changed",
    ],
)  # fmt: skip
def topk_routing_kernel(
    logits: "Rows", selection_bias: "Flat", token_mask: "Flat", given: "Flat", weights: "Out", experts: "Out",
    counts: "Out", changed: "Out",
    T: tl.int32, stride: tl.int64, inner: tl.float32, outer: tl.float32, scale: tl.float32, eps: tl.float32,
    E: tl.constexpr, K: tl.constexpr, SCORE: tl.constexpr, GROUPS: tl.constexpr, TOPK_GROUP: tl.constexpr,
    TOP2: tl.constexpr, RENORMALIZE: tl.constexpr, RELATIVE: tl.constexpr, AFTER: tl.constexpr,
    SOFTCAP: tl.constexpr, TOTAL: tl.constexpr, EPS_OF_ALL: tl.constexpr, ALONE: tl.constexpr, VEC: tl.constexpr,
    LANES: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Select K experts for every token, and compute their weights and the counts.

    Inputs: ``logits`` ``(T, E)``; ``selection_bias`` ``(E,)``, ``token_mask`` ``(T,)`` and ``given`` ``(T, K)``, the
    experts to replay, each or None.
    Outputs: ``weights`` and ``experts`` ``(T, K)``; ``counts`` ``(E,)`` and ``changed`` ``()``, each or None, to which
    the program adds unless it is ALONE.
    TOTAL: whether the weights need the normalizer of all logits; EPS_OF_ALL: whether it is for ``eps`` alone.
    Bytes moved: ``T·E`` logits in, ``O(T·K)`` out.
    """
    dtype: tl.constexpr = logits.dtype.element_ty
    WIDE: tl.constexpr = selection_bias is not None or GROUPS > 1 or dtype == tl.float32  # keys of 64 bits
    LEAST: tl.constexpr = -(2**63) if WIDE else -(2**31)
    VECTOR: tl.constexpr = 4 if dtype == tl.float32 and VEC == 8 else VEC  # adjacent logits of a thread: 16 bytes
    RUN: tl.constexpr = BLOCK_K if BLOCK_K > 8 else 8
    N: tl.constexpr = 2 if GROUPS > 1 and BLOCK_K == 1 else BLOCK_K  # keys that a lane keeps
    STEP: tl.constexpr = LANES * VECTOR
    VECTORS: tl.constexpr = (E + STEP - 1) // STEP  # of a thread
    lane = tl.arange(0, LANES)[None, :]
    k = tl.arange(0, BLOCK_K)[None, :]
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    start = logits + t * stride // VEC * VEC  # VEC divides the stride; this tells the compiler so
    active = t < T
    if token_mask is not None:
        active = active & (tl.load(token_mask + t, mask=t < T, other=0) != 0)

    # A key for every logit, and whether one of a token has no score.
    keys, z = (), ()
    odd = tl.zeros([BLOCK_T, LANES], tl.int32)
    lane_e = lane * (VECTORS * VECTOR if GROUPS > 1 else VECTOR)  # with groups, a lane has the experts of one
    for r in tl.static_range(VECTORS):
        first = lane_e + r * (VECTOR if GROUPS > 1 else STEP)
        if WIDE:
            e = first[:, :, None] + tl.arange(0, VECTOR)[None, None, :]
            there = active[:, None, None] & (e < E)
            if (r + 1) * STEP <= E:
                there = active[:, None, None]
            x = columns(tl.load(start[:, None, None] + e, mask=there, other=0.0), VECTOR)
            if selection_bias is not None:  # loaded for every token, so that it has the layout of the logits
                every = e + tl.zeros([BLOCK_T, 1, 1], tl.int32)
                bias = columns(tl.load(selection_bias + every, mask=every < E, other=0.0), VECTOR)
            for i in tl.static_range(VECTOR):
                z_i = logit(x[i], inner, outer, SOFTCAP)
                odd = odd | has_no_score(z_i, SCORE).to(tl.int32)
                value = values_of(z_i, x[i], bias[i] if selection_bias is not None else None, SCORE, AFTER)
                key = key_of_value(value, first + i)
                keys = keys + (only(first + i < E, key, LEAST, (r + 1) * STEP <= E),)
                z = z + (only(first + i < E, z_i, float("-inf"), (r + 1) * STEP <= E),)
        else:
            pairs = start.to(tl.pointer_type(tl.int32), bitcast=True)
            e = first[:, :, None] // 2 + tl.arange(0, VECTOR // 2)[None, None, :]
            there = active[:, None, None] & (2 * e < E)
            if (r + 1) * STEP <= E:
                there = active[:, None, None]
            words = columns(tl.load(pairs[:, None, None] + e, mask=there, other=0), VECTOR // 2)
            keys = keys + keys_of_words(words, first, E, (LANES - 1) * VECTOR, r * STEP, (r + 1) * STEP <= E)
            for i in tl.static_range(VECTOR // 2):
                odd = odd | ((words[i] & 0x7FFF7FFF) + (0x007F007F if dtype == tl.bfloat16 else 0x03FF03FF))
                for half in tl.static_range(2 if TOTAL else 0):
                    z_i = logit(upper_half(words[i] if half else words[i] << 16, dtype), inner, outer, SOFTCAP)
                    z = z + (only(first + 2 * i < E, z_i, float("-inf"), (r + 1) * STEP <= E),)

    # The largest keys of each lane, sorted.
    v = ()
    for run in tl.static_range((VECTORS * VECTOR + RUN - 1) // RUN):
        new = ()
        for i in tl.static_range(RUN):
            if run * RUN + i < VECTORS * VECTOR:
                new = new + (keys[run * RUN + i],)
            else:
                new = new + (tl.full([BLOCK_T, LANES], LEAST, tl.int64 if WIDE else tl.int32),)
        new = sorted_run(new, RUN)[:N]
        v = new if run == 0 else merged(v, new, N)
    if not WIDE:
        w = ()
        for i in tl.static_range(N):
            w = w + (v[i] + (LANES - 1 - lane) * VECTOR,)
        v = w
    if GROUPS > 1:
        judged = value_of_key(v[0])
        if TOP2:
            second = value_of_key(v[1])
            if selection_bias is None:
                judged = score_of_group(logit(judged, inner, outer, SOFTCAP), SCORE, AFTER)
                second = score_of_group(logit(second, inner, outer, SOFTCAP), SCORE, AFTER)
            judged += second
        judged = tl.maximum(judged, LOWEST)
        for _ in tl.static_range(TOPK_GROUP):
            best = tl.max(judged, axis=1)
            first_best = tl.min(tl.where(judged == best[:, None], lane, LANES), axis=1)
            judged = tl.where(lane == first_best[:, None], float("-inf"), judged)
        w = ()
        for i in tl.static_range(N):
            w = w + (tl.where(judged == float("-inf"), v[i], LEAST),)
        v = w
    v = largest_keys(v, LEAST, K)

    # Tokens without a valid routing; the largest logit, unless there is a bias.
    if WIDE:
        bad = tl.max(odd, axis=1) != 0
        top = value_of_key(v[0])
    else:
        bad = tl.max(((odd & SIGNS) != 0).to(tl.int32), axis=1) != 0
        top = upper_half(ordered(v[0], 0x7FFF0000), dtype)
    top = logit(top, inner, outer, SOFTCAP)
    if SCORE == SOFTMAX:
        bad = bad | (tl.abs(top) == float("inf"))
    elif SCORE == SQRTSOFTPLUS and not WIDE:
        bad = bad | (top == float("inf"))
    if not WIDE:  # the logits of these are NaN, which makes their weights NaN
        w = ()
        for i in tl.static_range(K):
            w = w + (tl.where(bad, (0x7FFF << 16) | (8191 - i), v[i]),)
        v = w
    for _ in tl.static_range(K, BLOCK_K):
        v = v + (v[0],)
    key = row(v, BLOCK_K)
    selected = (key & LOW).to(tl.int32) ^ LOW
    if WIDE:
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
    if WIDE or given is not None:
        x_selected = tl.load(start[:, None] + selected, mask=counted, other=0.0).to(tl.float32)
    else:
        x_selected = upper_half(ordered(key, 0x7FFF0000), dtype)
    z_selected = logit(x_selected, inner, outer, SOFTCAP)
    total = tl.zeros([BLOCK_T], tl.float32)
    if TOTAL:
        of_lane = tl.zeros([BLOCK_T, LANES], tl.float32)
        for i in tl.static_range(len(z)):
            of_lane += tl.exp2((z[i] - top[:, None]) * LOG2E)
        total = tl.sum(of_lane, axis=1)
    s = raw_scores(z_selected, top, total, k < K, SCORE, AFTER)
    if EPS_OF_ALL:  # replayed scores may be as small as eps; added to those of the natural choice, it is lost
        z_top = tl.maximum(tl.max(tl.where(k < K, z_selected, float("-inf")), axis=1), LOWEST)
        s = tl.where(k < K, tl.exp2((z_selected - z_top[:, None]) * LOG2E), 0.0)
        n = tl.exp2(tl.log2(eps) + (top + tl.log(total) - z_top) * LOG2E)
        s = s / (tl.sum(s, axis=1) + n)[:, None]
    if RENORMALIZE:
        n = eps
        if RELATIVE:
            s, n, _ = relative(s, z_selected, top, total, k < K, eps, SCORE)
        s = s / (tl.sum(s, axis=1) + n)[:, None]
    w = s * scale
    if WIDE or given is not None:
        w = tl.where(bad[:, None], float("nan"), w)
    w = tl.where(active[:, None], w, 0.0)
    tl.store(weights + t[:, None] * K + k, w, mask=valid)
    tl.store(experts + t[:, None] * K + k, selected.to(tl.int64), mask=valid)
    if counts is not None:
        bins = tl.arange(0, BINS)
        count = tl.histogram(tl.reshape(selected, [BLOCK_T * BLOCK_K]), BINS,
                             mask=tl.reshape(counted, [BLOCK_T * BLOCK_K]))  # fmt: skip
        if ALONE:
            tl.store(counts + bins, count, mask=bins < E)
        else:
            tl.atomic_add(counts + bins, count, mask=(bins < E) & (count > 0), sem="relaxed")


Shape = tuple[int, int, int]  # tokens, experts, stride of the logits


def takes(logits: torch.Tensor, selection_bias: torch.Tensor | None, options: RouterOptions) -> bool:
    """Whether `topk_routing_kernel` computes this: not the sums for losses, nor a softmax plus a bias."""
    o, E = options, logits.shape[1]
    wide = o.n_group > 1 or selection_bias is not None
    if (
        o.sums or o.k > (MOST_K_WITH_BIAS if wide else MOST_K) or logits.stride(0) % 2 or E % 2 or logits.data_ptr() % 4
    ):  # pairs are read
        return False
    if wide and o.score == "softmax":
        return False
    if o.n_group > 1:
        size = E // o.n_group
        return o.n_group == power_of_two(o.n_group) <= MOST_LANES and size % 8 == 0 and size <= LOGITS
    return wide or logits.element_size() == 2


def lanes_of(E: int, options: RouterOptions, biased: bool = False) -> int:
    """Threads per token."""
    if options.n_group > 1:
        return options.n_group
    lanes = max(power_of_two(-(-E // (LOGITS_WITH_BIAS if biased else LOGITS))), min(2, power_of_two(E) // 8))
    return max(lanes, power_of_two(options.k) // 4)


@lru_cache
def tile_of(T: int, E: int, options: RouterOptions, biased: bool = False) -> tuple[int, int]:
    """Tokens and threads per program; one program if the tokens are few."""
    lanes, T = lanes_of(E, options, biased), MANY if options.invariant else T
    if power_of_two(T) * lanes <= ONE_PROGRAM:
        return power_of_two(T), power_of_two(T) * lanes
    if not options.counts:
        threads = THREADS_WITHOUT_COUNTS if E > LOGITS else THREADS
        return threads // lanes, threads
    threads = THREADS
    while threads < MOST_THREADS and -(-T * lanes // threads) * E > MOST_ADDITIONS:
        threads *= 2
    return threads // lanes, threads


def plan_for(shape: Shape, options: RouterOptions, biased: bool, replays: bool) -> Plan:
    """The launch of `topk_routing_kernel`, with a bias and with experts to replay or without."""
    T, E, stride = shape
    o = options
    BLOCK_T, threads = tile_of(T, E, o, biased)
    after, renormalize, softmax = o.score_after_topk, o.renormalize, o.score == "softmax"
    of_all = softmax and renormalize and not after and o.eps <= LEAST_EPS and replays
    if softmax and renormalize and o.eps <= LEAST_EPS:  # the same weights, without the normalizer of all logits
        after, renormalize = True, False
    constexprs = dict(
        E=E, K=o.k, SCORE=o.score, GROUPS=o.n_group, TOPK_GROUP=o.topk_group, TOP2=o.group_score == "top2_sum",
        RENORMALIZE=renormalize, RELATIVE=is_relative(o) and not softmax, AFTER=after, SOFTCAP=o.softcap is not None,
        TOTAL=softmax and (not after or of_all), EPS_OF_ALL=of_all, ALONE=BLOCK_T >= T, VEC=math.gcd(8, stride),
        LANES=lanes_of(E, o, biased), BLOCK_T=BLOCK_T, BLOCK_K=power_of_two(o.k), BINS=max(64, power_of_two(E)),
    )  # fmt: skip
    numbers = (T, stride, *o.factors(), o.scale, o.eps)
    return Plan(topk_routing_kernel, -(-T // BLOCK_T), numbers, constexprs, layout.warps(threads))
