"""Device functions for the scores of experts, shared by the forward and the backward kernel of a router."""

from typing import NamedTuple

import triton
import triton.language as tl

from onepass.core.moe_options import LOG_TINY, RouterOptions
from onepass.kernels import layout
from onepass.kernels.online_softmax import LOG2E, LOWEST

SOFTMAX, SIGMOID, SQRTSOFTPLUS = tl.constexpr("softmax"), tl.constexpr("sigmoid"), tl.constexpr("sqrtsoftplus")
TINY = tl.constexpr(LOG_TINY)
EXPONENTIAL = tl.constexpr(-17.0)  # below it, exp(z / 2) is `sqrtsoftplus` in float32
MOST_THREADS = 1024
LEAST_EPS = 1e-28  # float32 loses scores below 1e-38
LOST_EPS = 1e-12  # changes no weight of the k largest scores of a softmax, whose sum is at least k / E
Shape = tuple[int, int, int]  # tokens, experts, stride of the logits


class Scoring(NamedTuple):
    """How weights follow from logits, known when a kernel is compiled."""

    SCORE: str
    RENORMALIZE: bool
    RELATIVE: bool  # whether scores that underflow change the weights
    AFTER: bool  # whether the scores are those of the selected logits alone
    SOFTCAP: bool


@triton.jit
def sigmoid(z):
    """``1 / (1 + exp(-z))``."""
    return 1.0 / (1.0 + tl.exp2(-z * LOG2E))


@triton.jit
def sqrtsoftplus(z):
    """``sqrt(log(1 + exp(z)))``, accurate even if ``exp(z)`` is lost when it is added to 1, or is no float32 itself."""
    root = tl.exp2(-tl.abs(z) * (0.5 * LOG2E))
    u = root * root
    w = 1.0 + u
    log1p = tl.where(w == 1.0, u, tl.log(w) * (u / tl.where(w == 1.0, 1.0, w - 1.0)))
    return tl.where(z < EXPONENTIAL, root, tl.sqrt(tl.maximum(z, 0.0) + log1p))


@triton.jit
def summand_of(bias):
    """What a selection bias adds to a score, in float32: LOWEST for -inf and NaN, on every backend of Triton."""
    return tl.where(bias > LOWEST, bias.to(tl.float32), LOWEST)


@triton.jit
def has_no_score(z, SCORE: tl.constexpr):
    """Whether a logit is NaN or its score is infinite. (`undefined` detects the latter for a softmax.)"""
    odd = z != z
    if SCORE != SIGMOID:
        odd = odd | (z == float("inf"))
    return odd


@triton.jit
def undefined(odd, total, SCORE: tl.constexpr):
    """Tokens without a valid routing: a logit has no score or, for a softmax, the normalizer is 0 or not finite."""
    if SCORE == SOFTMAX:
        bad = ((total > 0) & (total < float("inf"))) == 0
    else:
        bad = tl.max(odd.to(tl.int32), axis=1) > 0
    return bad


@triton.constexpr_function
def log2(n):
    return n.bit_length() - 1


@triton.jit
def ordered_sum(x):
    """The sums of the rows of ``(T, K)``, added in the same order by all kernels, whatever their layouts."""
    T: tl.constexpr = x.shape[0]
    for _ in tl.static_range(log2(x.shape[1])):
        x = tl.sum(tl.reshape(x, [T, x.shape[1] // 2, 2]), axis=2)
    return tl.reshape(x, [T])


@triton.jit
def raw_scores(z, m, total, valid, SCORING: tl.constexpr):
    """The scores ``(T, K)`` of the selected logits ``z``; ``m`` and ``total``: maximum and normalizer of all logits."""
    if SCORING.SCORE == SOFTMAX:
        if SCORING.AFTER:
            top = tl.max(tl.where(valid, z, float("-inf")), axis=1)
            e = tl.where(valid, tl.exp2((z - top[:, None]) * LOG2E), 0.0)
            s = e / ordered_sum(e)[:, None]
        else:
            s = tl.exp2((z - m[:, None]) * LOG2E) / total[:, None]
    elif SCORING.SCORE == SIGMOID:
        s = sigmoid(z)
    else:
        s = sqrtsoftplus(z)
    return tl.where(valid, s, 0.0)


@triton.jit
def relative(s, z, m, total, valid, eps, SCORING: tl.constexpr):
    """The scores and ``eps``, both relative to the largest selected score in tokens where all scores are tiny.

    Their quotients are the same, but tiny scores would underflow. Also returns a mask of these tokens.
    """
    POWER: tl.constexpr = 0.5 if SCORING.SCORE == SQRTSOFTPLUS else 1.0  # a tiny score is exp(POWER·(z - offset))
    offset = m + tl.log(total) if SCORING.SCORE == SOFTMAX else tl.zeros_like(m)
    top = tl.max(tl.where(valid, z, float("-inf")), axis=1)
    tiny = (top - offset < TINY) & (top > float("-inf"))
    s = tl.where(tiny[:, None] & valid, tl.exp2((z - top[:, None]) * (POWER * LOG2E)), s)
    larger = tl.exp2(tl.log2(eps) + (offset - top) * (POWER * LOG2E))
    return s, tl.where(tiny, larger, eps), tiny


@triton.jit
def weights_of(z, m, total, valid, eps, SCORING: tl.constexpr):
    """The weights ``(T, K)`` of the selected logits ``z``, not scaled yet; see `raw_scores`."""
    s = raw_scores(z, m, total, valid, SCORING)
    if SCORING.RENORMALIZE:
        n = eps
        if SCORING.RELATIVE:
            s, n, _ = relative(s, z, m, total, valid, eps, SCORING)
        s = s / (ordered_sum(s) + n)[:, None]
    return s


@triton.jit
def replayed(given, natural, t, k, active, T, E: tl.constexpr, K: tl.constexpr):
    """Replace the selected (``natural``) experts ``(T, K)`` of active tokens by the ``given`` ones, unless one is -1.

    Also returns a mask of tokens with an id that is repeated or is no expert, which have the experts 0 … K - 1, and the
    number of given ids of each token that are not among the natural ones.
    """
    valid = (t[:, None] < T) & (k < K)
    ids = tl.load(given + t[:, None] * K + k, mask=valid, other=0).to(tl.int64)
    free = (tl.max((ids == -1).to(tl.int32), axis=1) > 0) | (active == 0)
    wrong = valid & ((ids < 0) | (ids >= E))
    differ = tl.zeros_like(natural)
    for i in range(K):
        one = tl.load(given + t * K + i, mask=t < T, other=0).to(tl.int64)[:, None]
        wrong = wrong | (valid & (ids == one) & (k != i))
        found = tl.max(((natural.to(tl.int64) == one) & (k < K)).to(tl.int32), axis=1)
        differ = tl.where(k == i, 1 - found[:, None], differ)
    invalid = (tl.max(wrong.to(tl.int32), axis=1) > 0) & (free == 0)
    experts = tl.where(free[:, None], natural, tl.where(invalid[:, None], k, ids.to(tl.int32)))
    return experts, invalid, tl.where(free, 0, tl.sum(differ, axis=1))


@triton.jit
def add_changed(changed, differ, ALONE: tl.constexpr):
    """Add how many replayed choices of the program's tokens ``differ``. They are stored instead if it is ALONE."""
    if changed is not None:
        if ALONE:
            tl.store(changed, tl.sum(differ))
        else:
            tl.atomic_add(changed, tl.sum(differ), sem="relaxed")


@triton.jit
def write_routing(weights, experts, t, k, w, selected, valid, K: tl.constexpr):
    """Write the weights and the experts of some tokens."""
    tl.store(weights + t[:, None] * K + k, w, mask=valid)
    tl.store(experts + t[:, None] * K + k, selected.to(tl.int64), mask=valid)


@triton.jit
def number_of(active, token_mask, T):
    """How many of the program's tokens are ``active``; without a mask, all up to T, which takes no reduction."""
    BLOCK_T: tl.constexpr = active.shape[0]
    if token_mask is None:
        tokens = tl.minimum(T - tl.program_id(0) * BLOCK_T, BLOCK_T)
    else:
        tokens = tl.sum(active.to(tl.int32))
    return tokens


@triton.jit
def add_counts(
    counts, selected, counted, tokens, E: tl.constexpr, K: tl.constexpr, BINS: tl.constexpr, ALONE: tl.constexpr
):
    """Add how often each expert is among the ``selected`` that are ``counted``, K of each of ``tokens``.

    They are stored instead if the program is ALONE.
    """
    SIZE: tl.constexpr = selected.shape[0] * selected.shape[1]
    bins = tl.arange(0, BINS)
    # Without a mask, whose elements Triton may reorder otherwise than the values.
    count = tl.histogram(tl.reshape(tl.where(counted, selected, 0), [SIZE]), BINS)
    count -= tl.where(bins == 0, SIZE - K * tokens, 0)
    if ALONE:
        tl.store(counts + bins, count, mask=bins < E)
    else:
        tl.atomic_add(counts + bins, count, mask=(bins < E) & (count > 0), sem="relaxed")


def warps_of(elements: int, of_thread: int) -> int:
    """Warps per program, where a thread has about ``of_thread`` of the ``elements``."""
    return layout.warps(min(MOST_THREADS, max(1, elements // of_thread)))


def is_relative(options: RouterOptions) -> bool:
    """Whether scores that underflow change the weights: not if they are small against ``eps``."""
    at_least_one_of_k = options.score == "softmax" and options.score_after_topk  # is the largest score
    return options.renormalize and options.eps < LEAST_EPS and not at_least_one_of_k


def is_of_selected(options: RouterOptions) -> bool:
    """Whether renormalized weights of a natural choice are the softmax of the selected logits alone."""
    o = options
    natural = o.score == "softmax" and not o.biased and o.n_group == 1
    return natural and o.renormalize and o.eps <= LOST_EPS and not o.score_after_topk


def scoring(options: RouterOptions) -> Scoring:
    """The `Scoring` of the options."""
    o = options
    return Scoring(o.score, o.renormalize, is_relative(o), o.score_after_topk, o.softcap is not None)
