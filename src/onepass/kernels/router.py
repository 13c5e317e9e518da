"""The kernel of `moe.route` for all options, which reads the logits once. `router_topk` is for the usual options.

It computes scores, the top-k experts, their weights and the number of tokens of every expert. Bytes moved: ``T·E``
logits in, ``O(T·K)`` out. A program holds all logits of some tokens. The kernel is bound by the instructions of k
searches for a maximum. Experts are therefore divided into chunks, each a tensor of its own. Every lane keeps its values
sorted over the chunks, so that a search looks at one chunk only.
"""

# mypy: disable-error-code="assignment, var-annotated"
# (tuples grow in a `static_range`)

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from onepass.core.moe_options import RouterOptions, RoutingResults, empty_routing
from onepass.kernels import router_biased, router_topk
from onepass.kernels.launch import Flat, Launch, Out, Plan, Rows, launch, repeat, start
from onepass.kernels.layout import MANY, power_of_two
from onepass.kernels.online_softmax import LOG2E, LOWEST, transform
from onepass.kernels.router_keys import only
from onepass.kernels.router_scores import (
    SIGMOID,
    SOFTMAX,
    Shape,
    add_changed,
    add_counts,
    has_no_score,
    replayed,
    scoring,
    sigmoid,
    sqrtsoftplus,
    summand_of,
    undefined,
    warps_of,
    weights_of,
    write_routing,
)
from onepass.kernels.row_programs import unmasked
from onepass.kernels.zeros import empty, zeros

ONE_TILE = 16384  # the most logits that a single program reads; it needs no atomics for the counts
# The forward has THREADS threads per program, at least CHUNK experts per chunk and at most MOST_CHUNKS chunks.
THREADS, CHUNK, MOST_CHUNKS = 128, 16, 4
VALUES = 8  # adjacent logits per thread


@triton.jit
def largest(v, CHUNKS: tl.constexpr):
    """The maximum of all chunks ``(T, W)`` for every token. Each thread reduces its own values first."""
    best = v[0]
    for c in tl.static_range(1, CHUNKS):
        best = tl.maximum(best, v[c])
    return tl.max(best, axis=1)


@triton.jit
def first_equal(v, best, ids, NONE: tl.constexpr, CHUNKS: tl.constexpr):
    """The lowest of the ``ids`` where the value is ``best``; NONE if there is none."""
    first = tl.where(v[0] == best[:, None], ids[0], NONE)
    for c in tl.static_range(1, CHUNKS):
        first = tl.minimum(first, tl.where(v[c] == best[:, None], ids[c], NONE))
    return tl.min(first, axis=1)


@triton.jit
def without(v, first, ids, CHUNKS: tl.constexpr):
    """Set the value of id ``first`` to -inf, for every token."""
    left = ()
    for c in tl.static_range(CHUNKS):
        left = left + (tl.where(ids[c] == first[:, None], float("-inf"), v[c]),)
    return left


@triton.jit
def stacked(v, ids, CHUNKS: tl.constexpr):
    """Sort the chunks lane by lane: the first chunk has the largest values and, among equal ones, the lowest id."""
    for done in tl.static_range(CHUNKS - 1):
        sorted_v, sorted_ids = (), ()
        least, its_id = v[0], ids[0]
        for c in tl.static_range(1, CHUNKS - done):
            larger = v[c] > least
            sorted_v = sorted_v + (tl.where(larger, v[c], least),)
            sorted_ids = sorted_ids + (tl.where(larger, ids[c], its_id),)
            least = tl.where(larger, least, v[c])
            its_id = tl.where(larger, its_id, ids[c])
        sorted_v, sorted_ids = sorted_v + (least,), sorted_ids + (its_id,)
        for c in tl.static_range(CHUNKS - done, CHUNKS):
            sorted_v, sorted_ids = sorted_v + (v[c],), sorted_ids + (ids[c],)
        v, ids = sorted_v, sorted_ids
    return v, ids


@triton.jit
def popped(v, ids, first, CHUNKS: tl.constexpr):
    """Remove expert ``first`` of every token from `stacked` chunks: lower values of its lane move up by one chunk."""
    here = ids[0] == first[:, None]
    left, left_ids = (), ()
    for c in tl.static_range(1, CHUNKS):
        left = left + (tl.where(here, v[c], v[c - 1]),)
        left_ids = left_ids + (tl.where(here, ids[c], ids[c - 1]),)
    return left + (tl.where(here, float("-inf"), v[CHUNKS - 1]),), left_ids + (ids[CHUNKS - 1],)


@triton.jit(
    do_not_specialize=["T", "stride"],
    do_not_specialize_on_alignment=[
        "selection_bias", "token_mask", "given", "weights", "experts", "counts", "prob_sums", "logsumexp", "changed",
    ],
)  # fmt: skip
def routing_kernel(
    logits: "Rows", selection_bias: "Flat", token_mask: "Flat", given: "Flat", weights: "Out", experts: "Out",
    counts: "Out", prob_sums: "Out", logsumexp: "Out", changed: "Out",
    T: tl.int32, stride: tl.int64, inner: tl.float32, outer: tl.float32, scale: tl.float32, eps: tl.float32,
    E: tl.constexpr, K: tl.constexpr, SCORING: tl.constexpr, GROUPS: tl.constexpr, TOPK_GROUP: tl.constexpr,
    TOP2: tl.constexpr, ALONE: tl.constexpr, VEC: tl.constexpr, CHUNKS: tl.constexpr, STEP: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_K: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Select K experts for every token, and compute their weights, the counts and the sums for auxiliary losses.

    Inputs: ``logits`` ``(T, E)``; ``selection_bias`` ``(E,)``, ``token_mask`` ``(T,)`` and ``given`` ``(T, K)``, the
    experts to replay, each or None.
    Outputs: ``weights`` and ``experts`` ``(T, K)``; and, each or None, ``counts`` ``(E,)``, to which the program adds
    unless it is ALONE; ``prob_sums`` ``(programs, E)``, summed over the tokens of each program; ``logsumexp`` ``(T,)``;
    ``changed`` ``()``, the number of replayed choices that differ, to which the program adds as to ``counts``.
    Bytes moved: see the module docstring.
    """
    SCORE: tl.constexpr = SCORING.SCORE
    SOFTCAP: tl.constexpr = SCORING.SOFTCAP
    GROUPS_OF_CHUNK: tl.constexpr = BLOCK_G // CHUNKS
    W: tl.constexpr = GROUPS_OF_CHUNK * BLOCK_J
    WHOLE: tl.constexpr = E == BLOCK_G * BLOCK_J  # every column has an expert
    column = tl.arange(0, W)[None, :]
    j = tl.arange(0, BLOCK_J)[None, None, :]
    k = tl.arange(0, BLOCK_K)[None, :]
    e, there, group = (), (), ()
    for c in tl.static_range(CHUNKS):
        first_group = c * GROUPS_OF_CHUNK
        e_chunk = (first_group + column // BLOCK_J) * STEP + column % BLOCK_J
        e = e + (e_chunk,)
        there = there + ((column % BLOCK_J < STEP) & (e_chunk < E),)
        group = group + (first_group + tl.arange(0, GROUPS_OF_CHUNK)[None, :],)
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    start = logits + t * stride // VEC * VEC  # VEC divides the stride; this tells the compiler so
    active = unmasked(token_mask, t, T, 0)
    x, z = (), ()
    for c in tl.static_range(CHUNKS):
        of_chunk = tl.load(
            start[:, None] + e[c], mask=active[:, None] if WHOLE else active[:, None] & there[c], other=0.0
        )
        x = x + (of_chunk,)
        z = z + (only(there[c], transform(of_chunk, inner, outer, SOFTCAP), float("-inf"), WHOLE),)
    m = tl.zeros([BLOCK_T], tl.float32)
    total = m + 1.0
    p = z
    if SCORE == SOFTMAX or logsumexp is not None:
        m = tl.maximum(largest(z, CHUNKS), LOWEST)
        p = ()
        p_sum = tl.zeros([BLOCK_T, W], tl.float32)
        for c in tl.static_range(CHUNKS):
            p = p + (tl.exp2((z[c] - m[:, None]) * LOG2E),)
            p_sum += p[c]
        total = tl.sum(p_sum, axis=1)
    inverse = (1.0 / total)[:, None]
    if logsumexp is not None:
        for c in tl.static_range(CHUNKS):
            prob_sum = tl.sum(tl.where(active[:, None], p[c] * inverse, 0.0), axis=0, keep_dims=True)
            tl.store(prob_sums + tl.program_id(0).to(tl.int64) * E + e[c], prob_sum, mask=there[c])
        void = total - total
        tl.store(logsumexp + t, tl.where(active, m + tl.log(total) + void, 0.0), mask=t < T)
    odd = tl.zeros([BLOCK_T, W], tl.int1)
    # Without a bias, experts are selected by their logits: the order is that of the scores, without ties by rounding.
    # Scores are computed only if they are added to others.
    SCORED: tl.constexpr = selection_bias is not None or (GROUPS > 1 and TOP2)
    v, judged = (), ()
    for c in tl.static_range(CHUNKS):
        odd = odd | (has_no_score(z[c], SCORE) & there[c])
        value = x[c].to(tl.float32) if SOFTCAP else z[c]
        score = z[c]
        if SCORED:
            if not SCORING.AFTER:
                if SCORE == SOFTMAX:
                    score = p[c] * inverse
                elif SCORE == SIGMOID:
                    score = sigmoid(z[c])
                else:
                    score = sqrtsoftplus(z[c])
            if selection_bias is not None:  # loaded for every token, so that it has the layout of the logits
                bias = tl.load(selection_bias + e[c] + tl.zeros([BLOCK_T, 1], tl.int32), mask=there[c], other=0.0)
                if SCORING.AFTER:  # logits may be as large as LOWEST, or infinite
                    score += bias.to(tl.float32)
                    score = tl.where(score > LOWEST, score, LOWEST)
                else:
                    score = tl.maximum(score + summand_of(bias), LOWEST)
                value = score
            score = tl.where(z[c] == float("-inf"), LOWEST, score)
        # A logit of -inf becomes LOWEST: it comes last, but before experts that must not be selected, which are -inf.
        value = tl.where(z[c] == float("-inf"), LOWEST, tl.maximum(value, LOWEST))
        v = v + (only(there[c], value, float("-inf"), WHOLE),)
        judged = judged + (only(there[c], score if SCORED and TOP2 else value, float("-inf"), WHOLE),)
    bad = undefined(odd, total, SCORE)
    if GROUPS > 1:
        of_group = ()
        for c in tl.static_range(CHUNKS):
            grouped = tl.reshape(judged[c], [BLOCK_T, GROUPS_OF_CHUNK, BLOCK_J])
            best_j = tl.max(grouped, axis=2)
            score = best_j
            if TOP2:
                first_j = tl.min(tl.where(grouped == best_j[:, :, None], j, BLOCK_J), axis=2)
                second = tl.max(tl.where(j == first_j[:, :, None], float("-inf"), grouped), axis=2)
                score += tl.where(second > LOWEST, second, 0.0)  # 0 for a disabled expert
            of_group = of_group + (tl.where(group[c] < GROUPS, tl.maximum(score, LOWEST), float("-inf")),)
        for _ in range(TOPK_GROUP):
            best_group = largest(of_group, CHUNKS)
            of_group = without(of_group, first_equal(of_group, best_group, group, BLOCK_G, CHUNKS), group, CHUNKS)
        of_all = v
        v = ()
        for c in tl.static_range(CHUNKS):
            grouped = tl.reshape(of_all[c], [BLOCK_T, GROUPS_OF_CHUNK, BLOCK_J])
            kept = of_group[c] == float("-inf")
            v = v + (tl.reshape(tl.where(kept[:, :, None], grouped, float("-inf")), [BLOCK_T, W]),)

    v, ids = stacked(v, e, CHUNKS)
    selected = tl.zeros([BLOCK_T, BLOCK_K], tl.int32)
    for i in range(K):
        best = tl.max(v[0], axis=1)
        first = tl.min(tl.where(v[0] == best[:, None], ids[0], E), axis=1)
        v, ids = popped(v, ids, first, CHUNKS)
        selected = tl.where(k == i, first[:, None], selected)
    selected = tl.where((bad | (active == 0))[:, None], k, selected)
    if given is not None:
        selected, invalid, differ = replayed(given, selected, t, k, active, T, E, K)
        bad = bad | invalid
        add_changed(changed, differ, ALONE)

    valid = (t[:, None] < T) & (k < K)
    counted = valid & active[:, None]
    z_selected = transform(tl.load(start[:, None] + selected, mask=counted, other=0.0), inner, outer, SOFTCAP)
    s = weights_of(z_selected, m, total, k < K, eps, SCORING)
    w = tl.where(active[:, None], tl.where(bad[:, None], float("nan"), s * scale), 0.0)
    write_routing(weights, experts, t, k, w, selected, valid, K)
    if counts is not None:
        add_counts(counts, selected, counted, tl.sum(active.to(tl.int32)), E, K, BINS, ALONE)


def groups_of(E: int, n_group: int) -> tuple[int, int, int]:
    """``(groups, experts per group, chunks)`` of the forward's tile. Without groups, each chunk counts as a group."""
    if n_group > 1:
        groups, size = power_of_two(n_group), E // n_group
        return groups, size, min(MOST_CHUNKS, groups, max(1, groups * power_of_two(size) // CHUNK))
    size = min(power_of_two(E), max(CHUNK, power_of_two(E) // MOST_CHUNKS))
    chunks = power_of_two(-(-E // size))
    return chunks, size, chunks


@lru_cache
def tokens_of_tile(T: int, E: int, options: RouterOptions) -> int:
    """Tokens per program; all of them if they are few."""
    T = MANY if options.invariant else T
    groups, size, chunks = groups_of(E, options.n_group)
    width = groups * power_of_two(size)
    tile = ONE_TILE if T * width <= ONE_TILE else THREADS * VALUES * chunks
    return min(power_of_two(max(T, 2)), max(1, tile // width))  # Triton 3.6 fails to compile some tiles of one


def plan_for(shape: Shape, options: RouterOptions) -> Plan:
    """The launch of `routing_kernel`."""
    T, E, stride = shape
    o = options
    BLOCK_G, STEP, CHUNKS = groups_of(E, o.n_group)
    BLOCK_T, BLOCK_J = tokens_of_tile(T, E, o), power_of_two(STEP)
    constexprs = dict(
        E=E, K=o.k, SCORING=scoring(o), GROUPS=o.n_group, TOPK_GROUP=o.topk_group, TOP2=o.group_score == "top2_sum",
        ALONE=BLOCK_T >= T, VEC=math.gcd(VALUES, stride), CHUNKS=CHUNKS, STEP=STEP, BLOCK_T=BLOCK_T, BLOCK_G=BLOCK_G,
        BLOCK_J=BLOCK_J, BLOCK_K=power_of_two(o.k), BINS=max(64, power_of_two(E)),
    )  # fmt: skip
    numbers = (T, stride, *o.factors(), o.scale, o.eps)
    warps = warps_of(BLOCK_T * BLOCK_G * BLOCK_J // CHUNKS, VALUES)
    return Plan(routing_kernel, -(-T // BLOCK_T), numbers, constexprs, warps)


@lru_cache
def choice(shape: Shape, options: RouterOptions, pairs: bool, biased: bool) -> tuple[Callable[..., Plan], int]:
    """What plans the launch for these logits, and the tokens of a program. ``pairs``: see `router_topk.takes`."""
    T, E, stride = shape
    if pairs and not biased and router_topk.takes(E, stride, options):
        return router_topk.plan_for, router_topk.tile_of(T, E, options)[0]
    if biased and router_biased.takes(E, stride, options):
        return router_biased.plan_for, router_biased.tile_of(T, E, stride, options)[0]
    return plan_for, tokens_of_tile(T, E, options)


def route(
    logits: torch.Tensor, selection_bias: torch.Tensor | None, token_mask: torch.Tensor | None,
    given: torch.Tensor | None, options: RouterOptions,
) -> RoutingResults:  # fmt: skip
    """Weights, experts, counts, summed probabilities, logsumexp and changed choices, as in `empty_routing`.

    This takes one launch, and one to add up the sums of several programs if ``options.sums``. Counts that several
    programs add to are `zeros`.
    """
    T, E = logits.shape
    key = None
    if token_mask is given is None and not options.count_changed:
        key, known = kept_launch(logits, selection_bias, options)
        if known is not None:
            return repeated_route(known, logits, selection_bias, options)
    about = (T, E, logits.stride(0)), options
    pairs = logits.element_size() == 2 and logits.data_ptr() % 4 == 0
    plan, tokens = choice(*about, pairs, selection_bias is not None)
    alone = 0 < T <= tokens
    counts = zeros(E, logits.device) if options.counts and not alone else None
    weights, experts, counts, prob_sums, logsumexp, changed = results = empty_routing(logits, options, counts)
    if changed is not None and (not alone or given is None):
        changed.zero_()
    tensors = token_mask, given, weights, experts, counts
    if T and plan is router_topk.plan_for:
        launch(plan, (*about, given is not None), (logits, *tensors, changed), key)
    elif T and plan is router_biased.plan_for:
        launch(plan, about, (logits, selection_bias, *tensors, changed), key)
    elif T:
        parts = prob_sums if prob_sums is None or alone else prob_sums.new_empty((-(-T // tokens), E))
        launch(plan_for, about, (logits, selection_bias, *tensors, parts, logsumexp, changed))
        if parts is not None and not alone:
            torch.sum(parts, 0, out=prob_sums)
    elif prob_sums is not None:
        prob_sums.zero_()
    return results


def route_again(logits: torch.Tensor, selection_bias: torch.Tensor | None, options: RouterOptions) -> Any:
    """`route` without a token mask and experts to replay, if it has launched the same for tensors of this kind.

    If not, None is returned. This takes less time on the host, which is the limit for few tokens.
    """
    known = None if options.count_changed else kept_launch(logits, selection_bias, options)[1]
    return None if known is None else repeated_route(known, logits, selection_bias, options)


def kept_launch(
    logits: torch.Tensor, selection_bias: torch.Tensor | None, options: RouterOptions
) -> tuple[Any, Launch | None]:
    """What `repeat` returns for a routing without a token mask, experts to replay and changed choices."""
    # The stride of one row, which is contiguous with any, determines its launch, as that of more rows does.
    name = logits.shape, logits.stride(0), logits.get_device(), options
    if selection_bias is None:
        return repeat(name, (logits,))
    return repeat((*name, selection_bias.shape), (logits, selection_bias))


def repeated_route(
    known: Launch, logits: torch.Tensor, selection_bias: torch.Tensor | None, options: RouterOptions
) -> RoutingResults:
    """`route` by a kept launch of `topk_routing_kernel` or `biased_routing_kernel`."""
    counts = zeros(logits.shape[1], logits.device) if options.counts and known.programs > 1 else None
    weights, experts, counts, *_ = results = empty_routing(logits, options, counts, empty)
    inputs = (logits.data_ptr(),) if selection_bias is None else (logits.data_ptr(), selection_bias.data_ptr())
    outputs = weights.data_ptr(), experts.data_ptr(), None if counts is None else counts.data_ptr()
    start(known, logits.get_device(), (*inputs, None, None, *outputs, None))
    return results
