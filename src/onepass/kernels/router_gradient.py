"""The kernel of the backward of `moe.route`. It writes the gradient of the logits and reads the logits at most once.

Many weights depend on the selected logits alone: those of scores that are no softmax, and those of a softmax that is
renormalized. Without sums for losses, the gradient of all other logits is 0, and only the selected ones are read.
"""

import math

import torch
import triton
import triton.language as tl

from onepass.core.moe_options import RouterOptions, RoutingGradients
from onepass.kernels.launch import Flat, Out, Plan, Rows, Strided, launch, repeat, start
from onepass.kernels.layout import MANY, power_of_two
from onepass.kernels.online_softmax import LOG2E, LOWEST, transform_and_slope
from onepass.kernels.router_scores import (
    EXPONENTIAL,
    SIGMOID,
    SOFTMAX,
    Shape,
    has_no_score,
    is_of_selected,
    raw_scores,
    relative,
    replayed,
    scoring,
    sigmoid,
    undefined,
    warps_of,
)
from onepass.kernels.row_programs import unmasked
from onepass.kernels.zeros import empty

TILE, VECTORS, VALUES = 1024, 4, 8  # logits per program; vectors per thread, which holds several tokens; of a vector


@triton.jit
def read_rows(row, mask, there, inner, outer, SCORE: tl.constexpr, SOFTCAP: tl.constexpr):
    """Of all logits: the slope of their soft-cap, their maximum, ``exp`` of their differences to it, its sum, and
    whether a token has no valid routing.
    """
    z, slope = transform_and_slope(tl.load(row, mask=mask, other=0.0), inner, outer, SOFTCAP)
    z = tl.where(there, z, float("-inf"))
    m = tl.maximum(tl.max(z, axis=1), LOWEST)
    p = tl.exp2((z - m[:, None]) * LOG2E)
    total = tl.sum(p, axis=1)
    return slope, m, p, total, undefined(has_no_score(z, SCORE) & there, total, SCORE)


@triton.jit(
    do_not_specialize=["T", "stride", "w_stride", "p_stride", "l_stride"],
    do_not_specialize_on_alignment=[
        "experts", "token_mask", "given", "grad_weights", "grad_prob_sums", "grad_logsumexp",
    ],
)  # fmt: skip
def routing_gradient_kernel(
    logits: "Rows", out: "Out", experts: "Flat", token_mask: "Flat", given: "Flat", grad_weights: "Strided",
    grad_prob_sums: "Strided", grad_logsumexp: "Strided",
    T: tl.int32, stride: tl.int64, w_stride: tl.int32, p_stride: tl.int32, l_stride: tl.int32, inner: tl.float32,
    outer: tl.float32, scale: tl.float32, eps: tl.float32,
    E: tl.constexpr, K: tl.constexpr, SCORING: tl.constexpr, DENSE: tl.constexpr, VEC: tl.constexpr,
    OUT_VEC: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The gradient of the logits.

    Inputs: ``logits`` ``(T, E)``; ``experts`` ``(T, K)``; ``token_mask`` ``(T,)`` or None; ``given`` ``(T, K)``, the
    experts that the forward was told to replay, or None: their invalid tokens have no gradient; the upstream gradients
    ``grad_weights`` ``(T, K)``, ``grad_prob_sums`` ``(E,)`` and ``grad_logsumexp`` ``(T,)``, each or None.
    Output: ``out`` ``(T, E)``.
    DENSE: whether all logits are read. Otherwise the gradient of those that are not selected is 0.
    Bytes moved: the logits in, if it is DENSE; their gradient out.
    """
    SCORE: tl.constexpr = SCORING.SCORE
    SOFTCAP: tl.constexpr = SCORING.SOFTCAP
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    e = tl.arange(0, BLOCK_E)[None, :]
    k = tl.arange(0, BLOCK_K)[None, :]
    start = logits + t * stride // VEC * VEC
    active = unmasked(token_mask, t, T, 0)
    there = e < E
    valid = (t[:, None] < T) & (k < K)
    selected = tl.load(experts + t[:, None] * K + k, mask=valid, other=0).to(tl.int32)
    row = start[:, None] + e
    m, total, bad = tl.zeros([BLOCK_T], tl.float32), tl.full([BLOCK_T], 1.0, tl.float32), active != active
    if DENSE:
        slope, m, p, total, bad = read_rows(row, active[:, None] & there, there, inner, outer, SCORE, SOFTCAP)
    else:  # the forward gave the experts 0 to K - 1 to tokens without a valid routing
        suspect = active & (tl.max((valid & (selected != k)).to(tl.int32), axis=1) == 0)
        if tl.max(suspect.to(tl.int32), axis=0) > 0:
            bad = read_rows(row, suspect[:, None] & there, there, inner, outer, SCORE, SOFTCAP)[4]
    if given is not None:
        bad = bad | replayed(given, selected, t, k, active, T, E, K)[1]

    # The path through the weights: g is the gradient of the selected scores, then of their logits.
    x_selected = tl.load(start[:, None] + selected, mask=valid & active[:, None], other=0.0)
    z_selected, slope_selected = transform_and_slope(x_selected, inner, outer, SOFTCAP)
    g = tl.zeros([BLOCK_T, BLOCK_K], tl.float32)
    if grad_weights is not None:
        g = tl.load(grad_weights + t[:, None] * w_stride + k * (w_stride != 0), mask=valid, other=0.0) * scale
    s = raw_scores(z_selected, m, total, k < K, SCORING)
    r, tiny = s, m != m
    if SCORING.RENORMALIZE:
        n = eps
        if SCORING.RELATIVE:
            r, n, tiny = relative(s, z_selected, m, total, k < K, eps, SCORING)
        n = tl.sum(r, axis=1) + n
        g = (g - (tl.sum(g * r, axis=1) / n)[:, None]) / n[:, None]
    a = tl.zeros([BLOCK_T], tl.float32)  # the gradient is p·(a + G), plus g at the selected experts
    if SCORE == SOFTMAX:
        of_all = tl.sum(g * r, axis=1)
        if SCORING.AFTER:
            g = (g - of_all[:, None]) * r
        else:
            g, a = g * r, a - of_all
    elif SCORE == SIGMOID:
        g = g * r * (1.0 - s)
    else:
        slope_of_score = tl.where(s > 0.0, sigmoid(z_selected) / (2.0 * s), 0.0)
        slope_of_score = tl.where(z_selected < EXPONENTIAL, 0.5 * s, slope_of_score)
        g = g * tl.where(tiny[:, None], 0.5 * r, slope_of_score)

    dense = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)
    if DENSE:
        if grad_logsumexp is not None:
            a += tl.load(grad_logsumexp + t * l_stride, mask=t < T, other=0.0)
        of_selected = tl.zeros([BLOCK_T, BLOCK_K], tl.float32)
        inverse = (1.0 / total)[:, None]
        p = p * inverse
        if grad_prob_sums is not None:
            G = tl.load(grad_prob_sums + e * p_stride, mask=there, other=0.0)
            a -= tl.sum(tl.where(there, G * p, 0.0), axis=1)
            dense += G
            of_selected += tl.load(grad_prob_sums + selected * p_stride, mask=valid, other=0.0)
        if (SCORE == SOFTMAX and not SCORING.AFTER) or grad_logsumexp is not None or grad_prob_sums is not None:
            dense = p * (dense + a[:, None]) * slope
            g += tl.exp2((z_selected - m[:, None]) * LOG2E) * inverse * (of_selected + a[:, None])
    g = g * slope_selected
    dense = tl.where(active[:, None], tl.where(bad[:, None], float("nan"), dense), 0.0)
    g = tl.where(active[:, None], tl.where(bad[:, None], float("nan"), g), 0.0)
    base = out + t * E // OUT_VEC * OUT_VEC
    tl.store(base[:, None] + e, dense.to(out.dtype.element_ty), mask=(t[:, None] < T) & there)
    tl.debug_barrier()  # the selected experts are written twice
    tl.store(base[:, None] + selected, g.to(out.dtype.element_ty), mask=valid)


def gradient_plan_for(shape: Shape, strides: tuple[int, ...], options: RouterOptions, replays: bool) -> Plan:
    """The launch of `routing_gradient_kernel`; ``strides`` are those of the upstream gradients."""
    T, E, stride = shape
    o, width = options, power_of_two(E)
    of_selected = is_of_selected(o) and not (o.sums or replays)
    how = scoring(o)
    if of_selected:
        how = how._replace(RENORMALIZE=False, RELATIVE=False, AFTER=True)
    dense = o.sums or replays or (o.score == "softmax" and not how.AFTER)
    rows = min(power_of_two(MANY if o.invariant else T), max(1, TILE // width))
    constexprs = dict(
        E=E, K=o.k, SCORING=how, DENSE=dense, VEC=math.gcd(VALUES, stride), OUT_VEC=math.gcd(VALUES, E), BLOCK_T=rows,
        BLOCK_E=width, BLOCK_K=power_of_two(o.k),
    )  # fmt: skip
    numbers = (T, stride, *strides, *o.factors(), o.scale, o.eps)
    warps = warps_of(rows * width, VECTORS * math.gcd(VALUES, stride, E))
    return Plan(routing_gradient_kernel, -(-T // rows), numbers, constexprs, warps)


def route_gradient(
    logits: torch.Tensor, experts: torch.Tensor, token_mask: torch.Tensor | None, given: torch.Tensor | None,
    grads: RoutingGradients, options: RouterOptions,
) -> torch.Tensor:  # fmt: skip
    """The gradient of the logits, in their dtype, from those of the weights, summed probabilities and logsumexp."""
    grad_weights, grad_prob_sums, grad_logsumexp = grads
    T, E = logits.shape
    key = None
    if token_mask is given is grad_prob_sums is grad_logsumexp is None and grad_weights is not None:
        name = routing_gradient_kernel, logits.shape, logits.stride(0), logits.get_device(), options
        key, known = repeat(name, (logits, experts, grad_weights))
        if known is not None:
            out = empty((T, E), (E, 1), logits.dtype)
            inputs = logits.data_ptr(), out.data_ptr(), experts.data_ptr(), None, None
            start(known, logits.get_device(), (*inputs, grad_weights.data_ptr(), None, None))
            return out
    out = torch.empty_like(logits, memory_format=torch.contiguous_format)
    stride = 0  # of a number for all weights. A single row may have this stride too, and other numbers.
    if grad_weights is not None and any(grad_weights.stride()):
        grad_weights, stride = grad_weights.contiguous(), options.k
    upstream = grad_weights, grad_prob_sums, grad_logsumexp
    strides = stride, *[0 if g is None else g.stride(0) for g in upstream[1:]]
    if T:
        about = (T, E, logits.stride(0)), strides, options, given is not None
        launch(gradient_plan_for, about, (logits, out, experts, token_mask, given, *upstream), key)
    return out
