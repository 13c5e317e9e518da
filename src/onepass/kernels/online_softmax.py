"""Device functions of the online softmax: transform a logit, update a state, merge states. Most kernels call them.

A state describes a set of logits ``z`` of one row relative to their maximum ``m``. States of disjoint sets merge
exactly, so that `merge` serves both the lanes of a program and the programs that share a row.

======  =============================  ======================================================
name    value                          needed for
======  =============================  ======================================================
``m``   ``max z``                      always
``s``   ``Σ exp(z - m)``               always
``t``   ``Σ exp(z - m)·(z - m)``       ``expected_logit``
``w``   ``Σ c·(z - m)``                ``weighted_logit``
``c``   ``Σ c``                        ``weighted_logit`` (to move ``w`` to another maximum)
``q``   ``Σ exp(sharpness·(z - m))``   ``tempered_log_normalizer``, ``log_sum_sq_probs``
``u``   ``Σ z / V``                    ``mean_logit``
======  =============================  ======================================================

Reference: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from onepass.core.options import Options

LOG2E = tl.constexpr(1.4426950408889634)
# The maximum of an empty set. It is finite, so that a difference of two maxima is never inf - inf.
LOWEST = tl.constexpr(-3.4028234663852886e38)
# Differences are clamped to this before they are multiplied by their exp(): exp(FLOOR)·FLOOR is 0, but 0·(-inf) is NaN.
# A product with a large upstream gradient must be finite, too.
FLOOR = tl.constexpr(-1e18)


class Wanted(NamedTuple):
    """Which numbers a kernel computes, and of which logits: a constant of the compiled kernel."""

    SOFTCAP: bool
    LOG_PROBS: bool = False  # log-probs instead of selected logits
    ENTROPY: bool = False  # of a gradient: that of ``expected_logit`` is given as that of the entropy
    EXPECTED: bool = False
    WEIGHTED: bool = False
    TEMPERED: bool = False
    MEAN: bool = False
    TOP1: bool = False


class State(NamedTuple):
    """The numbers of the table above, of each lane or of a row. Those that are not wanted are 0.

    In the state of a shard of the vocabulary, or of a tile of a linear head, ``u`` is not divided by V.
    """

    m: Any
    s: Any
    t: Any
    w: Any
    c: Any
    q: Any
    u: Any


class Reading(NamedTuple):
    """How the logits of a row are read: what is the same for all of them."""

    inner: Any  # the factors of `transform`
    outer: Any
    sharpness: Any
    class_weights: Any  # a pointer to those of all classes, or None
    class_weight: Any  # that of every class, if there is no pointer
    inverse_vocab: Any = 0.0


def wanted(options: Options, top1: bool = False, reads_logits: bool = True) -> Wanted:
    """What a kernel of the softmax statistics computes for these options.

    A kernel that merges states reads no logits. It is compiled once, with a soft-cap and without.
    """
    return Wanted(
        SOFTCAP=reads_logits and options.transform.softcap is not None,
        LOG_PROBS=options.wants("log_probs"),
        EXPECTED=options.wants("expected_logit") or options.wants("entropy"),
        WEIGHTED=options.wants("weighted_logit"),
        TEMPERED=options.wants("log_sum_sq_probs") or options.wants("tempered_log_normalizer"),
        MEAN=options.wants("mean_logit"),
        TOP1=top1,
    )


@triton.jit
def tanh_and_slope(y):
    """``tanh(y)`` and ``1 - tanh(y)²`` to about 2 float32 ulps each, without the cancellation of the usual formulas."""
    e = tl.exp2(tl.abs(y) * (-2.0 * LOG2E))
    r = 1.0 / (1.0 + e)
    far = (1.0 - e) * r
    y2 = y * y
    # Weighted least-squares fit of (tanh(y) - y) / y³ in y² over |y| <= 0.6.
    poly = -0.005893945228308439
    poly = poly * y2 + 0.020794617012143135
    poly = poly * y2 - 0.053783293813467026
    poly = poly * y2 + 0.13331915438175201
    poly = poly * y2 - 0.33333298563957214
    tanh = tl.where(tl.abs(y) < 0.6, y + y * (y2 * poly), tl.where(y < 0, -far, far))
    return tanh, 4.0 * e * r * r


@triton.jit
def transform(x, inner, outer, SOFTCAP: tl.constexpr):
    """The logit after scale, soft-cap and temperature: ``outer·tanh(inner·x)``, or ``inner·x`` without a soft-cap."""
    z = x.to(tl.float32) * inner
    if SOFTCAP:
        z, _ = tanh_and_slope(z)
        z = z * outer
    return z


@triton.jit
def temperature_of(temperature, row, present=None):
    """The temperatures of a row, or of those that are ``present``; NaN unless they are above 0 and finite."""
    t = tl.load(temperature + row, mask=present, other=None if present is None else 1.0)
    return tl.where((t > 0) & (t < float("inf")), t, float("nan"))


@triton.jit
def factors_of_row(inner, outer, temperature, row, SOFTCAP: tl.constexpr):
    """The factors of `transform`, over the temperature of the row if each has its own; NaN unless it is above 0."""
    if temperature is not None:
        t = temperature_of(temperature, row)
        if SOFTCAP:
            outer = outer / t
        else:
            inner = inner / t
    return inner, outer


@triton.jit
def transform_and_slope(x, inner, outer, SOFTCAP: tl.constexpr):
    """`transform` and its derivative with respect to ``x``."""
    z = x.to(tl.float32) * inner
    slope = inner
    if SOFTCAP:
        z, sech2 = tanh_and_slope(z)
        z = z * outer
        slope = sech2 * (inner * outer)
    return z, slope


@triton.jit
def move(w, c, back):
    """``w`` relative to another maximum; an empty state stays 0."""
    return tl.where(c == 0.0, w, w + c * back)


@triton.jit
def empty_state(zero):
    """The state of no logits, in the shape of ``zero``."""
    return State(zero + LOWEST, zero, zero, zero, zero, zero, zero)


@triton.jit
def update(state, z, weight, sharpness, WANTED: tl.constexpr):
    """Add a tile of logits ``z[lanes, vec]`` to one state per lane, without traffic between lanes.

    Padding has ``z = -inf`` and ``weight = 0``. The caller adds to ``u``, since -inf is not neutral in a sum.
    """
    m, s, t, w, c, q, u = state
    new = tl.maximum(m, tl.max(z, axis=1))
    # max() ignores NaN, but d propagates it: s, and with it every result of the row, becomes NaN.
    back = tl.maximum(m - new, FLOOR)
    alpha = tl.exp2(back * LOG2E)
    d = z - new[:, None]
    e = tl.exp2(d * LOG2E)
    if WANTED.EXPECTED:
        t = alpha * (t + s * back) + tl.sum(e * tl.maximum(d, FLOOR), axis=1)
    s = alpha * s + tl.sum(e, axis=1)
    if WANTED.TEMPERED:
        q = tl.exp2(back * (sharpness * LOG2E)) * q + tl.sum(tl.exp2(d * (sharpness * LOG2E)), axis=1)
    if WANTED.WEIGHTED:
        # A class of weight 0 is left out even if its logit is -inf. (The where() also avoids a bug of Triton 3.6's
        # thread-locality pass, which a sum of weights that were just loaded triggers.)
        used = weight != 0.0
        w = move(w, c, m - new) + tl.sum(tl.where(used, weight * d, 0.0), axis=1)
        c = c + tl.sum(tl.where(used, weight, 0.0), axis=1)
    return State(new, s, t, w, c, q, u)


@triton.jit
def rounded(product):
    """The product as a float32: the 0 takes the place of another term that the compiler would add before it rounds."""
    return product + 0.0


@triton.jit
def merge(state, sharpness, WANTED: tl.constexpr):
    """Reduce a vector of states to one, always in the same order.

    Products are rounded before they are added. Else each lane would round all of them but its own, and lanes would
    disagree about the sum.
    """
    m, s, t, w, c, q, u = state
    new = tl.max(m, axis=0)
    back = tl.maximum(m - new, FLOOR)
    alpha = tl.exp2(back * LOG2E)
    t_out, w_out, c_out, q_out, u_out = 0.0, 0.0, 0.0, 0.0, 0.0
    if WANTED.EXPECTED:
        t_out = tl.sum(rounded(alpha * (t + s * back)), axis=0)
    if WANTED.WEIGHTED:
        w_out = tl.sum(move(w, c, m - new), axis=0)
        c_out = tl.sum(c, axis=0)
    if WANTED.TEMPERED:
        q_out = tl.sum(rounded(tl.exp2(back * (sharpness * LOG2E)) * q), axis=0)
    if WANTED.MEAN:
        u_out = tl.sum(u, axis=0)
    return State(new, tl.sum(rounded(alpha * s), axis=0), t_out, w_out, c_out, q_out, u_out)
