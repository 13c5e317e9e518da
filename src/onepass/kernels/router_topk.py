"""The kernel of `moe.route` for selections by 16-bit logits alone, without a bias or groups, which are sorted as keys.

A key is an integer of 32 bits that orders as a logit does, with the inverted id of the expert in its lowest bits: all
keys of a token differ, and the largest are those of the selected experts, where ties go to the lower id.

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
    SOFTMAX,
    SQRTSOFTPLUS,
    add_counts,
    is_relative,
    raw_scores,
    relative,
    replayed,
)

LOW = tl.constexpr(8191)  # the bits of an inverted id
LEAST = tl.constexpr(-(2**31))  # the key of no expert
SIGNS = tl.constexpr(-0x7FFF8000)  # the sign bits of two 16-bit floats
MOST_K = 16
LEAST_EPS = 1e-12  # below this, eps changes no weight of a softmax, whose selected scores sum up to at least K / E
LOGITS = 64  # per thread
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
def only(there, x, least, WHOLE: tl.constexpr):
    """``x``, but ``least`` where there is no expert. WHOLE says that there is one everywhere."""
    return x if WHOLE else tl.where(there, x, least)


@triton.jit
def keys_of_words(words, first, E, BITS_OF_LANE: tl.constexpr, OFFSET: tl.constexpr, WHOLE: tl.constexpr):
    """Keys for pairs of 16-bit logits, where ``first`` is the first expert. The bits of its lane are 0."""
    keys = ()
    for i in tl.static_range(len(words)):
        m = ordered_halves(words[i])
        there = first + 2 * i < E
        inverted = LOW - BITS_OF_LANE - OFFSET - 2 * i
        keys = keys + (only(there, (m << 16) | inverted, LEAST, WHOLE),)
        keys = keys + (only(there, (m & -65536) | (inverted - 1), LEAST, WHOLE),)
    return keys


@triton.jit
def largest_keys(v, K: tl.constexpr):
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
    do_not_specialize_on_alignment=["token_mask", "given", "weights", "experts", "counts", "changed"],
)
def topk_routing_kernel(
    logits: "Rows", token_mask: "Flat", given: "Flat", weights: "Out", experts: "Out", counts: "Out", changed: "Out",
    T: tl.int32, stride: tl.int64, inner: tl.float32, outer: tl.float32, scale: tl.float32, eps: tl.float32,
    E: tl.constexpr, K: tl.constexpr, SCORE: tl.constexpr, RENORMALIZE: tl.constexpr, RELATIVE: tl.constexpr,
    AFTER: tl.constexpr, SOFTCAP: tl.constexpr, TOTAL: tl.constexpr, EPS_OF_ALL: tl.constexpr, ALONE: tl.constexpr,
    VEC: tl.constexpr, LANES: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BINS: tl.constexpr,
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
    RUN: tl.constexpr = BLOCK_K if BLOCK_K > 8 else 8
    STEP: tl.constexpr = LANES * VEC
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
    pairs = start.to(tl.pointer_type(tl.int32), bitcast=True)
    for r in tl.static_range(VECTORS):
        first = lane * VEC + r * STEP
        e = first[:, :, None] // 2 + tl.arange(0, VEC // 2)[None, None, :]
        there = active[:, None, None] & (2 * e < E)
        if (r + 1) * STEP <= E:
            there = active[:, None, None]
        words = columns(tl.load(pairs[:, None, None] + e, mask=there, other=0), VEC // 2)
        keys = keys + keys_of_words(words, first, E, (LANES - 1) * VEC, r * STEP, (r + 1) * STEP <= E)
        for i in tl.static_range(VEC // 2):
            odd = odd | ((words[i] & 0x7FFF7FFF) + (0x007F007F if dtype == tl.bfloat16 else 0x03FF03FF))
            for half in tl.static_range(2 if TOTAL else 0):
                z_i = logit(upper_half(words[i] if half else words[i] << 16, dtype), inner, outer, SOFTCAP)
                z = z + (only(first + 2 * i < E, z_i, float("-inf"), (r + 1) * STEP <= E),)

    # The largest keys of each lane, sorted.
    v = ()
    for run in tl.static_range((VECTORS * VEC + RUN - 1) // RUN):
        new = ()
        for i in tl.static_range(RUN):
            if run * RUN + i < VECTORS * VEC:
                new = new + (keys[run * RUN + i],)
            else:
                new = new + (tl.full([BLOCK_T, LANES], LEAST, tl.int32),)
        new = sorted_run(new, RUN)[:BLOCK_K]
        v = new if run == 0 else merged(v, new, BLOCK_K)
    w = ()
    for i in tl.static_range(BLOCK_K):
        w = w + (v[i] + (LANES - 1 - lane) * VEC,)
    v = largest_keys(w, K)

    # Tokens without a valid routing. The logits in their keys are NaN, which makes their weights NaN.
    bad = tl.max(((odd & SIGNS) != 0).to(tl.int32), axis=1) != 0
    top = logit(logit_of_key(v[0], dtype), inner, outer, SOFTCAP)
    if SCORE == SOFTMAX:
        bad = bad | (tl.abs(top) == float("inf"))
    elif SCORE == SQRTSOFTPLUS:
        bad = bad | (top == float("inf"))
    w = ()
    for i in tl.static_range(K):
        w = w + (tl.where(bad, (LOW - i) | (0x7FFF << 16), v[i]),)
    v = w
    for _ in tl.static_range(K, BLOCK_K):
        v = v + (v[0],)
    key = row(v, BLOCK_K)
    selected = (key & LOW) ^ LOW
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
    if given is not None:
        x_selected = tl.load(start[:, None] + selected, mask=counted, other=0.0).to(tl.float32)
    else:
        x_selected = logit_of_key(key, dtype)
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
    if given is not None:
        w = tl.where(bad[:, None], float("nan"), w)
    w = tl.where(active[:, None], w, 0.0)
    tl.store(weights + t[:, None] * K + k, w, mask=valid)
    tl.store(experts + t[:, None] * K + k, selected.to(tl.int64), mask=valid)
    if counts is not None:
        add_counts(counts, selected, counted, tl.sum(active.to(tl.int32)), E, K, BINS, ALONE)


Shape = tuple[int, int, int]  # tokens, experts, stride of the logits


def takes(logits: torch.Tensor, selection_bias: torch.Tensor | None, options: RouterOptions) -> bool:
    """Whether `topk_routing_kernel` computes this: not the sums for losses. It reads pairs of logits."""
    o, E = options, logits.shape[1]
    if o.sums or o.k > MOST_K or selection_bias is not None or o.n_group > 1:
        return False
    return logits.element_size() == 2 and logits.stride(0) % 2 == E % 2 == logits.data_ptr() % 4 == 0


def lanes_of(E: int, options: RouterOptions) -> int:
    """Threads per token."""
    lanes = max(power_of_two(-(-E // LOGITS)), min(2, power_of_two(E) // 8))
    return max(lanes, power_of_two(options.k) // 4)


@lru_cache
def tile_of(T: int, E: int, options: RouterOptions) -> tuple[int, int]:
    """Tokens and threads per program; one program if the tokens are few."""
    lanes, T = lanes_of(E, options), MANY if options.invariant else T
    if power_of_two(T) * lanes <= ONE_PROGRAM:
        return power_of_two(T), power_of_two(T) * lanes
    if not options.counts:
        threads = THREADS_WITHOUT_COUNTS if E > LOGITS else THREADS
        return threads // lanes, threads
    threads = THREADS
    while threads < MOST_THREADS and -(-T * lanes // threads) * E > MOST_ADDITIONS:
        threads *= 2
    return threads // lanes, threads


def plan_for(shape: Shape, options: RouterOptions, replays: bool) -> Plan:
    """The launch of `topk_routing_kernel`, with experts to replay or without."""
    T, E, stride = shape
    o = options
    BLOCK_T, threads = tile_of(T, E, o)
    after, renormalize, softmax = o.score_after_topk, o.renormalize, o.score == "softmax"
    of_all = softmax and renormalize and not after and o.eps <= LEAST_EPS and replays
    if softmax and renormalize and o.eps <= LEAST_EPS:  # the same weights, without the normalizer of all logits
        after, renormalize = True, False
    constexprs = dict(
        E=E, K=o.k, SCORE=o.score, RENORMALIZE=renormalize, RELATIVE=is_relative(o) and not softmax, AFTER=after,
        SOFTCAP=o.softcap is not None, TOTAL=softmax and (not after or of_all), EPS_OF_ALL=of_all, ALONE=BLOCK_T >= T,
        VEC=math.gcd(8, stride), LANES=lanes_of(E, o), BLOCK_T=BLOCK_T, BLOCK_K=power_of_two(o.k),
        BINS=max(64, power_of_two(E)),
    )  # fmt: skip
    numbers = (T, stride, *o.factors(), o.scale, o.eps)
    return Plan(topk_routing_kernel, -(-T // BLOCK_T), numbers, constexprs, layout.warps(threads))
