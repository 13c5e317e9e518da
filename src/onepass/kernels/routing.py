"""Routing kernels: scores, the k best experts, their weights and everybody's counts from one read of the logits.

Bytes moved: ``T·E`` logits in, ``O(T·K)`` out; backward, the logits in and their gradient out. A program holds all
logits of some tokens. Experts lie in a tile group by group, each group padded to a power of two, so that a group's
value is a reduction and the order of columns is that of ids.
"""

import math

import torch
import triton
import triton.language as tl

from onepass.kernels import layout
from onepass.kernels.launch import Plan, launch
from onepass.kernels.layout import power_of_two
from onepass.kernels.online_softmax import LOG2E, LOWEST, transform, transform_and_slope
from onepass.options import RouterOptions, RoutingResults, empty_routing

SOFTMAX, SIGMOID = tl.constexpr("softmax"), tl.constexpr("sigmoid")
TILE = 2048  # logits of a program
ONE_TILE = 16384  # the most that one program takes alone: then its counts are everybody's
LOGITS_PER_THREAD, MOST_THREADS = 8, 1024


@triton.jit
def sigmoid(z):
    return 1.0 / (1.0 + tl.exp2(-z * LOG2E))


@triton.jit
def sqrtsoftplus(z):
    """``sqrt(log(1 + exp(z)))``, exact also where ``exp(z)`` is lost beside 1."""
    u = tl.exp2(-tl.abs(z) * LOG2E)
    w = 1.0 + u
    log1p = tl.where(w == 1.0, u, tl.log(w) * (u / tl.where(w == 1.0, 1.0, w - 1.0)))
    return tl.sqrt(tl.maximum(z, 0.0) + log1p)


@triton.jit
def columns(GROUPS: tl.constexpr, PER_GROUP: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_J: tl.constexpr):
    """The expert of every column, and whether there is one."""
    i = tl.arange(0, BLOCK_G * BLOCK_J)
    return i // BLOCK_J * PER_GROUP + i % BLOCK_J, (i // BLOCK_J < GROUPS) & (i % BLOCK_J < PER_GROUP)


@triton.jit
def undefined(z, total, there, SCORE: tl.constexpr):
    """Tokens without an answer: a NaN, an infinite score, or nothing to take a softmax of."""
    if SCORE == SOFTMAX:
        bad = ((total > 0) & (total < float("inf"))) == 0
    else:
        odd = z != z
        if SCORE != SIGMOID:
            odd = odd | (z == float("inf"))
        bad = tl.sum((odd & there).to(tl.int32), axis=1) > 0
    return bad


@triton.jit
def raw_scores(z, m, total, valid, SCORE: tl.constexpr, AFTER: tl.constexpr):
    """The scores ``(T, K)`` of chosen logits; ``m`` and ``total`` are the maximum and normaliser of all."""
    if SCORE == SOFTMAX:
        if AFTER:
            top = tl.max(tl.where(valid, z, float("-inf")), axis=1)
            e = tl.where(valid, tl.exp2((z - top[:, None]) * LOG2E), 0.0)
            s = e / tl.sum(e, axis=1)[:, None]
        else:
            s = tl.exp2((z - m[:, None]) * LOG2E) / total[:, None]
    elif SCORE == SIGMOID:
        s = sigmoid(z)
    else:
        s = sqrtsoftplus(z)
    return tl.where(valid, s, 0.0)


@triton.jit(
    do_not_specialize=["T", "stride"],
    do_not_specialize_on_alignment=[
        "selection_bias", "token_mask", "weights", "experts", "counts", "prob_sums", "logsumexp",
    ],
)  # fmt: skip
def routing_kernel(
    logits, selection_bias, token_mask, weights, experts, counts, prob_sums, logsumexp,
    T, stride: tl.int64, inner, outer, scale, eps,
    K: tl.constexpr, SCORE: tl.constexpr, GROUPS: tl.constexpr, PER_GROUP: tl.constexpr, TOPK_GROUP: tl.constexpr,
    TOP2: tl.constexpr, RENORMALIZE: tl.constexpr, AFTER: tl.constexpr, SOFTCAP: tl.constexpr, ALONE: tl.constexpr,
    VEC: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    E: tl.constexpr = GROUPS * PER_GROUP
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    e, there = columns(GROUPS, PER_GROUP, BLOCK_G, BLOCK_J)
    start = logits + t * stride // VEC * VEC  # VEC divides the stride; this is for the compiler to know
    active = t < T
    if token_mask is not None:
        active = active & (tl.load(token_mask + t, mask=t < T, other=0) != 0)
    x = tl.load(start[:, None] + e[None, :], mask=active[:, None] & there[None, :], other=0.0)
    z = tl.where(there[None, :], transform(x, inner, outer, SOFTCAP), float("-inf"))
    m = tl.maximum(tl.max(z, axis=1), LOWEST)
    p = tl.exp2((z - m[:, None]) * LOG2E)
    total = tl.sum(p, axis=1)
    bad = undefined(z, total, there[None, :], SCORE)
    if SCORE == SOFTMAX or logsumexp is not None:
        p = p / total[:, None]

    v = z
    if not AFTER:
        if SCORE == SOFTMAX:
            v = p
        elif SCORE == SIGMOID:
            v = sigmoid(z)
        else:
            v = sqrtsoftplus(z)
    if selection_bias is not None:
        v += tl.load(selection_bias + e, mask=there, other=0.0).to(tl.float32)[None, :]
    v = tl.where(z == float("-inf"), LOWEST, tl.maximum(v, LOWEST))  # off, but before what must not be chosen
    v = tl.where(there[None, :], v, float("-inf"))
    if GROUPS > 1:
        grouped = tl.reshape(v, [BLOCK_T, BLOCK_G, BLOCK_J])
        j = tl.arange(0, BLOCK_J)[None, None, :]
        of_group = tl.max(grouped, axis=2)
        if TOP2:
            largest = tl.min(tl.where(grouped == of_group[:, :, None], j, BLOCK_J), axis=2)
            of_group += tl.max(tl.where(j == largest[:, :, None], float("-inf"), grouped), axis=2)
        group = tl.arange(0, BLOCK_G)[None, :]
        of_group = tl.where(group < GROUPS, tl.maximum(of_group, LOWEST), float("-inf"))
        kept = of_group != of_group
        for _ in range(TOPK_GROUP):
            best = tl.max(of_group, axis=1)
            first = tl.min(tl.where(of_group == best[:, None], group, BLOCK_G), axis=1)
            kept = kept | (group == first[:, None])
            of_group = tl.where(group == first[:, None], float("-inf"), of_group)
        v = tl.reshape(tl.where(kept[:, :, None], grouped, float("-inf")), [BLOCK_T, BLOCK_G * BLOCK_J])
    nothing = (bad | (active == 0))[:, None]
    v = tl.where(nothing, tl.where(there[None, :], -e.to(tl.float32)[None, :], float("-inf")), v)

    k = tl.arange(0, BLOCK_K)[None, :]
    chosen = tl.zeros([BLOCK_T, BLOCK_K], tl.int32)
    picked = tl.zeros([BLOCK_T, BLOCK_G * BLOCK_J], tl.int32)
    for i in range(K):
        best = tl.max(v, axis=1)
        first = tl.min(tl.where(v == best[:, None], e[None, :], E), axis=1)
        chosen = tl.where(k == i, first[:, None], chosen)
        here = e[None, :] == first[:, None]
        picked = tl.where(here & there[None, :], 1, picked)
        v = tl.where(here, float("-inf"), v)

    valid = (t[:, None] < T) & (k < K)
    z_chosen = transform(tl.load(start[:, None] + chosen, mask=valid & active[:, None], other=0.0),
                         inner, outer, SOFTCAP)  # fmt: skip
    s = raw_scores(z_chosen, m, total, k < K, SCORE, AFTER)
    if RENORMALIZE:
        s = s / (tl.sum(s, axis=1) + eps)[:, None]
    w = tl.where(active[:, None], tl.where(bad[:, None], float("nan"), s * scale), 0.0)
    tl.store(weights + t[:, None] * K + k, w, mask=valid)
    tl.store(experts + t[:, None] * K + k, chosen.to(tl.int64), mask=valid)
    count = tl.sum(tl.where(active[:, None], picked, 0), axis=0)
    if ALONE:
        tl.store(counts + e, count, mask=there)
    else:
        tl.atomic_add(counts + e, count, mask=there & (count > 0), sem="relaxed")
    if logsumexp is not None:
        tl.store(prob_sums + tl.program_id(0).to(tl.int64) * E + e,
                 tl.sum(tl.where(active[:, None], p, 0.0), axis=0), mask=there)  # fmt: skip
        void = total - total
        tl.store(logsumexp + t, tl.where(active, m + tl.log(total) + void, 0.0), mask=t < T)


@triton.jit(
    do_not_specialize=["T", "stride", "w_stride", "p_stride", "l_stride"],
    do_not_specialize_on_alignment=[
        "experts", "token_mask", "grad_weights", "grad_prob_sums", "grad_logsumexp",
    ],
)  # fmt: skip
def routing_gradient_kernel(
    logits, out, experts, token_mask, grad_weights, grad_prob_sums, grad_logsumexp,
    T, stride: tl.int64, w_stride, p_stride, l_stride, inner, outer, scale, eps,
    E: tl.constexpr, K: tl.constexpr, SCORE: tl.constexpr, RENORMALIZE: tl.constexpr, AFTER: tl.constexpr,
    SOFTCAP: tl.constexpr, VEC: tl.constexpr, OUT_VEC: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    e = tl.arange(0, BLOCK_E)[None, :]
    k = tl.arange(0, BLOCK_K)[None, :]
    start = logits + t * stride // VEC * VEC
    active = t < T
    if token_mask is not None:
        active = active & (tl.load(token_mask + t, mask=t < T, other=0) != 0)
    there = e < E
    x = tl.load(start[:, None] + e, mask=active[:, None] & there, other=0.0)
    z, slope = transform_and_slope(x, inner, outer, SOFTCAP)
    z = tl.where(there, z, float("-inf"))
    m = tl.maximum(tl.max(z, axis=1), LOWEST)
    p = tl.exp2((z - m[:, None]) * LOG2E)
    total = tl.sum(p, axis=1)
    bad = undefined(z, total, there, SCORE)
    p = p / total[:, None]

    # Through the weights: g is the gradient of the scores that were chosen, then of their logits.
    valid = (t[:, None] < T) & (k < K)
    chosen = tl.load(experts + t[:, None] * K + k, mask=valid, other=0).to(tl.int32)
    x_chosen = tl.load(start[:, None] + chosen, mask=valid & active[:, None], other=0.0)
    z_chosen, slope_chosen = transform_and_slope(x_chosen, inner, outer, SOFTCAP)
    g = tl.zeros([BLOCK_T, BLOCK_K], tl.float32)
    if grad_weights is not None:
        g = tl.load(grad_weights + t[:, None] * w_stride + k * (w_stride != 0), mask=valid, other=0.0) * scale
    s = raw_scores(z_chosen, m, total, k < K, SCORE, AFTER)
    if RENORMALIZE:
        n = tl.sum(s, axis=1) + eps
        g = (g - (tl.sum(g * s, axis=1) / n)[:, None]) / n[:, None]
    a = tl.zeros([BLOCK_T], tl.float32)  # the gradient is p·(a + G) beside what the chosen have of their own
    if SCORE == SOFTMAX:
        g = g * s
        if AFTER:
            g -= s * tl.sum(g, axis=1)[:, None]
        else:
            a -= tl.sum(g, axis=1)
    elif SCORE == SIGMOID:
        g = g * s * (1.0 - s)
    else:
        g = tl.where(s > 0.0, g * sigmoid(z_chosen) / (2.0 * s), 0.0)

    if grad_logsumexp is not None:
        a += tl.load(grad_logsumexp + t * l_stride, mask=t < T, other=0.0)
    dense = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)
    of_chosen = tl.zeros([BLOCK_T, BLOCK_K], tl.float32)
    if grad_prob_sums is not None:
        G = tl.load(grad_prob_sums + e * p_stride, mask=there, other=0.0)
        a -= tl.sum(tl.where(there, G * p, 0.0), axis=1)
        dense += G
        of_chosen += tl.load(grad_prob_sums + chosen * p_stride, mask=valid, other=0.0)
    p_chosen = tl.exp2((z_chosen - m[:, None]) * LOG2E) / total[:, None]
    if (SCORE == SOFTMAX and not AFTER) or grad_logsumexp is not None or grad_prob_sums is not None:
        dense = p * (dense + a[:, None])
        g += p_chosen * (of_chosen + a[:, None])
    dense = dense * slope
    g = g * slope_chosen
    dense = tl.where(active[:, None], tl.where(bad[:, None], float("nan"), dense), 0.0)
    g = tl.where(active[:, None], tl.where(bad[:, None], float("nan"), g), 0.0)
    base = out + t * E // OUT_VEC * OUT_VEC
    tl.store(base[:, None] + e, dense.to(out.dtype.element_ty), mask=(t[:, None] < T) & there)
    tl.debug_barrier()  # the chosen are written twice
    tl.store(base[:, None] + chosen, g.to(out.dtype.element_ty), mask=valid)


def rows_of_tile(T: int, width: int) -> int:
    """Tokens of a program: all where they are few."""
    return min(power_of_two(max(T, 1)), max(1, (ONE_TILE if T * width <= ONE_TILE else TILE) // width))


def vector(*strides: int) -> int:
    """Elements, up to 16 bytes' worth, that divide all strides."""
    return math.gcd(8, *strides)


def warps_of(rows: int, width: int) -> int:
    return layout.warps(min(MOST_THREADS, rows * width // LOGITS_PER_THREAD))


Shape = tuple[int, int, int]  # tokens, experts, stride


def plan_for(shape: Shape, options: RouterOptions) -> Plan:
    T, E, stride = shape
    o, size = options, E // options.n_group
    BLOCK_G, BLOCK_J = power_of_two(o.n_group), power_of_two(size)
    rows = rows_of_tile(T, BLOCK_G * BLOCK_J)
    constexprs = dict(
        K=o.k, SCORE=o.score, GROUPS=o.n_group, PER_GROUP=size, TOPK_GROUP=o.topk_group,
        TOP2=o.group_score == "top2_sum", RENORMALIZE=o.renormalize, AFTER=o.score_after_topk,
        SOFTCAP=o.softcap is not None, ALONE=rows >= T, VEC=vector(stride), BLOCK_T=rows, BLOCK_G=BLOCK_G,
        BLOCK_J=BLOCK_J, BLOCK_K=power_of_two(o.k),
    )  # fmt: skip
    numbers = (T, stride, *o.transform(), o.scale, o.eps)
    return Plan(routing_kernel, -(-T // rows), numbers, constexprs, warps_of(rows, BLOCK_G * BLOCK_J))


def route(
    logits: torch.Tensor, selection_bias: torch.Tensor | None, token_mask: torch.Tensor | None, options: RouterOptions
) -> RoutingResults:
    """As `moe.eager.route`: one launch, and where there are many tokens one more to clear the counts."""
    weights, experts, counts, prob_sums, logsumexp = empty_routing(logits, options)
    T, E = logits.shape
    if T == 0:
        return weights, experts, counts.zero_(), prob_sums.zero_(), logsumexp
    about = (T, E, logits.stride(0)), options
    width = power_of_two(options.n_group) * power_of_two(E // options.n_group)
    programs = -(-T // rows_of_tile(T, width))
    if programs > 1:
        counts.zero_()
    parts = logits.new_empty((programs, E), dtype=torch.float32) if options.sums else None
    tensors = (selection_bias, token_mask, weights, experts, counts, parts, logsumexp if options.sums else None)
    launch(plan_for, about, (logits,), tensors)
    if parts is not None:
        prob_sums = parts.sum(0) if programs > 1 else parts[0].clone()
    return weights, experts, counts, prob_sums, logsumexp


def gradient_plan_for(shape: Shape, strides: tuple[int, ...], options: RouterOptions) -> Plan:
    T, E, stride = shape
    o, width = options, power_of_two(E)
    rows = rows_of_tile(T, width)
    constexprs = dict(
        E=E, K=o.k, SCORE=o.score, RENORMALIZE=o.renormalize, AFTER=o.score_after_topk, SOFTCAP=o.softcap is not None,
        VEC=vector(stride), OUT_VEC=vector(E), BLOCK_T=rows, BLOCK_E=width, BLOCK_K=power_of_two(o.k),
    )  # fmt: skip
    numbers = (T, stride, *strides, *o.transform(), o.scale, o.eps)
    return Plan(routing_gradient_kernel, -(-T // rows), numbers, constexprs, warps_of(rows, width))


def gradient(
    logits: torch.Tensor,
    experts: torch.Tensor,
    token_mask: torch.Tensor | None,
    grad_weights: torch.Tensor | None,
    grad_prob_sums: torch.Tensor | None,
    grad_logsumexp: torch.Tensor | None,
    options: RouterOptions,
) -> torch.Tensor:
    """Of the logits, in their dtype."""
    out = torch.empty_like(logits, memory_format=torch.contiguous_format)
    T, E = logits.shape
    if grad_weights is not None and any(grad_weights.stride()):
        grad_weights = grad_weights.contiguous()
    strides = tuple([0 if g is None else g.stride(0) for g in (grad_weights, grad_prob_sums, grad_logsumexp)])
    if T:
        about = (T, E, logits.stride(0)), strides, options
        tensors = (experts, token_mask, grad_weights, grad_prob_sums, grad_logsumexp)
        launch(gradient_plan_for, about, (logits, out), tensors)
    return out
