"""Device functions of kernels of softmax statistics and of their gradient: where results lie, and how they are written.

`softmax_statistics` and `softmax_gradient` read whole rows, `support` only some classes of each.
"""

import triton
import triton.language as tl

from onepass.core.options import PACKED
from onepass.kernels.online_softmax import FLOOR, LOG2E, transform_and_slope

# The positions of the fields in the packed result. Fields that are not requested are not written.
SHIFT = tl.constexpr(PACKED.index("shift"))
LOG_NORMALIZER = tl.constexpr(PACKED.index("log_normalizer"))
EXPECTED_LOGIT = tl.constexpr(PACKED.index("expected_logit"))
ENTROPY = tl.constexpr(PACKED.index("entropy"))
WEIGHTED_LOGIT = tl.constexpr(PACKED.index("weighted_logit"))
LOG_SUM_SQ_PROBS = tl.constexpr(PACKED.index("log_sum_sq_probs"))
TEMPERED_LOG_NORMALIZER = tl.constexpr(PACKED.index("tempered_log_normalizer"))
MEAN_LOGIT = tl.constexpr(PACKED.index("mean_logit"))
NOWHERE = tl.constexpr(2**31 - 1)  # larger than any column


@triton.jit
def write_state(packed, row, rows, k, K, m, s, t, w, c, q, total, selected, top1, EXPECTED: tl.constexpr,
                WEIGHTED: tl.constexpr, TEMPERED: tl.constexpr, MEAN: tl.constexpr, INDEX: tl.constexpr,
                TOP1: tl.constexpr):  # fmt: skip
    """Write the state of a row of some columns of the vocabulary, see `core.shard.state_fields`."""
    state = packed + row
    tl.store(state, m)
    tl.store(state + rows, s)
    if EXPECTED:
        tl.store(state + 2 * rows, t)
    if WEIGHTED:
        tl.store(state + (2 + EXPECTED) * rows, w)
        tl.store(state + (3 + EXPECTED) * rows, c)
    AFTER: tl.constexpr = 2 + EXPECTED + 2 * WEIGHTED
    if TEMPERED:
        tl.store(state + AFTER * rows, q)
    if MEAN:
        tl.store(state + (AFTER + TEMPERED) * rows, total)
    if INDEX:
        state += (AFTER + TEMPERED + MEAN + k).to(tl.int64) * rows
        tl.store(state, selected, mask=k < K)
        if TOP1:
            tl.store(state + K.to(tl.int64) * rows, top1.to(tl.float32), mask=k < K)


@triton.jit
def write_fields(packed, selected, is_top1, row, rows, k, K, shift, log_normalizer, expected_logit, weighted_logit,
                 tempered_log_normalizer, mean_logit, relative, top1, EXPECTED: tl.constexpr, WEIGHTED: tl.constexpr,
                 TEMPERED: tl.constexpr, MEAN: tl.constexpr, INDEX: tl.constexpr, TOP1: tl.constexpr,
                 LOG_PROBS: tl.constexpr):  # fmt: skip
    """Write the statistics of a row."""
    packed += row
    tl.store(packed + SHIFT * rows, shift)
    tl.store(packed + LOG_NORMALIZER * rows, log_normalizer)
    if EXPECTED:
        tl.store(packed + EXPECTED_LOGIT * rows, expected_logit)
        tl.store(packed + ENTROPY * rows, log_normalizer - expected_logit)
    if WEIGHTED:
        tl.store(packed + WEIGHTED_LOGIT * rows, weighted_logit)
    if TEMPERED:
        tl.store(packed + TEMPERED_LOG_NORMALIZER * rows, tempered_log_normalizer)
        tl.store(packed + LOG_SUM_SQ_PROBS * rows, tempered_log_normalizer - 2.0 * log_normalizer)
    if MEAN:
        tl.store(packed + MEAN_LOGIT * rows, mean_logit)
    if INDEX:
        tl.store(selected + row * K + k, relative - log_normalizer if LOG_PROBS else relative, mask=k < K)
        if TOP1:
            tl.store(is_top1 + row * K + k, top1, mask=k < K)


@triton.jit
def gradient(x, weight, shift, log_normalizer, tempered, a, b, d, h, inner, outer, sharpness,
             SOFTCAP: tl.constexpr, EXPECTED: tl.constexpr, WEIGHTED: tl.constexpr,
             TEMPERED: tl.constexpr):  # fmt: skip
    """The gradient with respect to ``z`` without the term of the selected classes, and ``dz/dx``."""
    z, slope = transform_and_slope(x, inner, outer, SOFTCAP)
    # One fused operation by name: the compiler's own choice would differ from kernel to kernel, and with it the bits.
    relative = z - shift if SOFTCAP else tl.fma(x.to(tl.float32), inner, -shift)
    p = tl.exp2((relative - log_normalizer) * LOG2E)
    g = p * a
    if EXPECTED:
        g = p * (a + b * tl.maximum(relative, FLOOR))
    if WEIGHTED:
        g += weight * d
    if TEMPERED:
        g += tl.exp2((relative * sharpness - tempered) * LOG2E) * h
    return g, slope
