"""Device functions of kernels of softmax statistics and of their gradient: where results lie, and how they are written.

`softmax_statistics` and `softmax_gradient` read whole rows, `support` only some classes of each.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from onepass.core.options import PACKED, Options
from onepass.kernels.online_softmax import FLOOR, LOG2E, Wanted, transform_and_slope, wanted

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


class Statistics(NamedTuple):
    """The statistics of a row. Those that are not wanted have no meaning."""

    shift: Any
    log_normalizer: Any
    expected_logit: Any
    weighted_logit: Any
    tempered_log_normalizer: Any
    mean_logit: Any


class Derivative(NamedTuple):
    """What the gradient of a row's logits is computed from: the formula in `kernels.softmax_gradient` has the names."""

    shift: Any
    log_normalizer: Any
    tempered_log_normalizer: Any
    a: Any
    b: Any
    d: Any
    h: Any


class Upstream(NamedTuple):
    """Pointers to the upstream gradients of the statistics, each or None, and their strides."""

    log_normalizer: Any
    expected_logit: Any
    weighted_logit: Any
    tempered_log_normalizer: Any
    selected: Any
    n_stride: Any
    e_stride: Any
    w_stride: Any
    t_stride: Any
    s_stride: Any


class OfRows(NamedTuple):
    """What a kernel is given of all rows besides logits: pointers, the last two and ``index`` or None, and numbers."""

    packed: Any
    rows: Any
    index: Any
    K: Any
    row_mask: Any
    masked: Any
    temperature: Any


@triton.jit
def no_statistics():
    """The statistics of a row that is masked."""
    return Statistics(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


@triton.jit
def statistics_of(state):
    """The statistics of a row from its state, whose ``s`` is NaN if the row has none."""
    m, s, t, w, _c, q, u = state
    void = s - s  # 0, or NaN
    return Statistics(m + void, tl.log(s), t / s, w + void, tl.log(q) + void, u + void)


@triton.jit
def write_state(packed, row, rows, state, present, WANTED: tl.constexpr):
    """Write the state of some columns of the vocabulary, where ``u`` is a sum, see `core.shard.state_fields`.

    Of one row, or of those that are ``present``. Returns where the selected logits belong.
    """
    m, s, t, w, c, q, u = state
    to, rows = packed + row, rows.to(tl.int64)
    tl.store(to, m, mask=present)
    tl.store(to + rows, s, mask=present)
    if WANTED.EXPECTED:
        tl.store(to + 2 * rows, t, mask=present)
    if WANTED.WEIGHTED:
        tl.store(to + (2 + WANTED.EXPECTED) * rows, w, mask=present)
        tl.store(to + (3 + WANTED.EXPECTED) * rows, c, mask=present)
    AFTER: tl.constexpr = 2 + WANTED.EXPECTED + 2 * WANTED.WEIGHTED
    if WANTED.TEMPERED:
        tl.store(to + AFTER * rows, q, mask=present)
    if WANTED.MEAN:
        tl.store(to + (AFTER + WANTED.TEMPERED) * rows, u, mask=present)
    return to + (AFTER + WANTED.TEMPERED + WANTED.MEAN) * rows


@triton.jit
def write_selected_state(to, rows, k, K, selected, top1, WANTED: tl.constexpr):
    """Write the selected logits of a row, and whether each is the first maximum, after its state."""
    to += k.to(tl.int64) * rows
    tl.store(to, selected, mask=k < K)
    if WANTED.TOP1:
        tl.store(to + K.to(tl.int64) * rows, top1.to(tl.float32), mask=k < K)


@triton.jit
def write_number(packed, value, active, present):
    """Write a number of one row or, of those that are ``present``, a number that is 0 where rows are not ``active``."""
    tl.store(packed, value if present is None else tl.where(active, value, 0.0), mask=present)


@triton.jit
def write_statistics(packed, row, rows, statistics, WANTED: tl.constexpr, active=True, present=None):
    """Write the statistics that are wanted: of one row, or of several with ``present``. See `write_number`."""
    packed, rows = packed + row, rows.to(tl.int64)
    log_normalizer = statistics.log_normalizer
    write_number(packed + SHIFT * rows, statistics.shift, active, present)
    write_number(packed + LOG_NORMALIZER * rows, log_normalizer, active, present)
    if WANTED.EXPECTED:
        write_number(packed + EXPECTED_LOGIT * rows, statistics.expected_logit, active, present)
        write_number(packed + ENTROPY * rows, log_normalizer - statistics.expected_logit, active, present)
    if WANTED.WEIGHTED:
        write_number(packed + WEIGHTED_LOGIT * rows, statistics.weighted_logit, active, present)
    if WANTED.TEMPERED:
        tempered = statistics.tempered_log_normalizer
        write_number(packed + TEMPERED_LOG_NORMALIZER * rows, tempered, active, present)
        write_number(packed + LOG_SUM_SQ_PROBS * rows, tempered - 2.0 * log_normalizer, active, present)
    if WANTED.MEAN:
        write_number(packed + MEAN_LOGIT * rows, statistics.mean_logit, active, present)


@triton.jit
def write_selected(selected, is_top1, row, k, K, relative, top1, log_normalizer, WANTED: tl.constexpr):
    """Write the selected logits of a row, or their log-probs, and whether each is the largest."""
    tl.store(selected + row * K + k, relative - log_normalizer if WANTED.LOG_PROBS else relative, mask=k < K)
    if WANTED.TOP1:
        tl.store(is_top1 + row * K + k, top1, mask=k < K)


@triton.jit
def derivative_of_fields(upstream, of_rows, row, sharpness, WANTED: tl.constexpr):
    """``a``, ``b``, ``d``, ``h`` and the tempered normalizer of a row. The selected classes still add to ``a``."""
    a, b, d, h, tempered = 0.0, 0.0, 0.0, 0.0, 0.0
    if upstream.log_normalizer is not None:
        a = tl.load(upstream.log_normalizer + row * upstream.n_stride)
    if WANTED.EXPECTED:
        b = tl.load(upstream.expected_logit + row * upstream.e_stride)
        expected_logit = tl.load(of_rows.packed + EXPECTED_LOGIT * of_rows.rows.to(tl.int64) + row)
        a += b * (expected_logit if WANTED.ENTROPY else 1.0 - expected_logit)
        b = -b if WANTED.ENTROPY else b
    if WANTED.WEIGHTED:
        d = tl.load(upstream.weighted_logit + row * upstream.w_stride)
    if WANTED.TEMPERED:
        h = tl.load(upstream.tempered_log_normalizer + row * upstream.t_stride) * sharpness
        tempered = tl.load(of_rows.packed + TEMPERED_LOG_NORMALIZER * of_rows.rows.to(tl.int64) + row)
    return a, b, d, h, tempered


@triton.jit
def class_weight_of(reading, column, valid, first=0):
    """The class weights of some columns. That of the first class is ``first``."""
    weight = reading.class_weight
    if reading.class_weights is not None:
        weight = tl.load(reading.class_weights + column - first, mask=valid).to(tl.float32)
    return weight


@triton.jit
def gradient(x, weight, reading, derivative, WANTED: tl.constexpr):
    """The gradient with respect to ``z`` without the term of the selected classes, and ``dz/dx``.

    ``reading`` and ``derivative`` are the `Reading` and the `Derivative` of the row.
    """
    inner = reading.inner
    z, slope = transform_and_slope(x, inner, reading.outer, WANTED.SOFTCAP)
    # One fused operation by name: the compiler's own choice would differ from kernel to kernel, and with it the bits.
    relative = z - derivative.shift if WANTED.SOFTCAP else tl.fma(x.to(tl.float32), inner, -derivative.shift)
    p = tl.exp2((relative - derivative.log_normalizer) * LOG2E)
    g = p * derivative.a
    if WANTED.EXPECTED:
        g = p * (derivative.a + derivative.b * tl.maximum(relative, FLOOR))
    if WANTED.WEIGHTED:
        g += weight * derivative.d
    if WANTED.TEMPERED:
        g += tl.exp2((relative * reading.sharpness - derivative.tempered_log_normalizer) * LOG2E) * derivative.h
    return g, slope


def wanted_gradient(options: Options, given: tuple[bool, ...]) -> Wanted:
    """What a kernel computes of a gradient, for which the gradients of these fields are ``given``, see `Upstream`."""
    _, expected, weighted, tempered, _ = given
    what = wanted(options)._replace(ENTROPY=options.wants("entropy"), MEAN=False)
    return what._replace(EXPECTED=expected, WEIGHTED=weighted, TEMPERED=tempered)
