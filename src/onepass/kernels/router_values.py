"""Device functions for the values that experts are selected by if a bias is added to their scores, and for their keys.

A key of 32 bits holds the inverted position of an expert, or of several, and the difference of its float32 value to a
lower bound, in units in the last place. Different values above the bound therefore have different keys.

The time of a router is that of comparisons, selections and logical operations, which a multiprocessor executes at half
the rate of an addition of floats. What can be added is therefore not selected (`quick_value`, `key_of`, `joined`).
"""

# mypy: disable-error-code="assignment, var-annotated, misc"
# (tuples grow in a `static_range`)

import triton
import triton.language as tl

from onepass.kernels.online_softmax import LOWEST
from onepass.kernels.router_keys import LOW, least_of, ordered
from onepass.kernels.router_scores import SIGMOID, sigmoid, sqrtsoftplus, summand_of
from onepass.kernels.router_topk import logit

SMALLEST = tl.constexpr(2.0**-149)  # of the positive numbers in float32
INFINITE = tl.constexpr(0x7F800000)  # the bits of an infinite float32


@triton.jit
def fast_sigmoid(z, PTX: tl.constexpr):
    """`sigmoid`; by PTX with a third of the instructions, since it need not be exact below 2**-126."""
    if PTX:
        return tl.inline_asm_elementwise(
            """{
            .reg .f32 x;
            mul.ftz.f32 x, $1, 0fBFB8AA3B;
            ex2.approx.ftz.f32 x, x;
            add.ftz.f32 x, x, 0f3F800000;
            rcp.approx.ftz.f32 $0, x;
            }""", "=f,f", [z], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    return sigmoid(z)


@triton.jit
def score_of(z, SCORING: tl.constexpr, PTX: tl.constexpr):
    """The score of a logit, before the k largest are selected."""
    return fast_sigmoid(z, PTX) if SCORING.SCORE == SIGMOID else sqrtsoftplus(z)


@triton.jit
def value_of(x, bias, inner, outer, SCORING: tl.constexpr, PTX: tl.constexpr):
    """What experts are selected by: NaN for a logit without a score, and LOWEST for -inf."""
    z = logit(x, inner, outer, SCORING.SOFTCAP)
    score = z if SCORING.AFTER else score_of(z, SCORING, PTX)
    if SCORING.SCORE != SIGMOID:
        score = tl.where(z == float("inf"), float("nan"), score)
    if SCORING.AFTER:
        value = score + bias.to(tl.float32)
        value = tl.where((value > LOWEST) | (score != score), value, LOWEST)
    else:
        value = score + summand_of(bias)
    return tl.where(z == float("-inf"), LOWEST, value)


@triton.jit
def quick_value(x, bias, inner, outer, SCORING: tl.constexpr, PTX: tl.constexpr):
    """`value_of` if that is finite, but -inf for LOWEST. Otherwise, or if the bias is NaN: NaN or inf."""
    z = logit(x, inner, outer, SCORING.SOFTCAP)
    if SCORING.AFTER:
        value = z + bias.to(tl.float32)
    else:
        mask = z * SMALLEST * SMALLEST  # 0, or infinite as z is
        value = score_of(z, SCORING, PTX) + (bias.to(tl.float32) + mask)
    return value


@triton.constexpr_function
def largest_difference(bits):
    """The largest number of 32 - ``bits`` bits, or all bits of an infinite float32 if these are fewer."""
    return min((1 << (32 - bits)) - 1, INFINITE.value)


@triton.jit
def bound_of(top, BITS: tl.constexpr):
    """The arguments of `key_of` for a token whose largest value is ``top``: a lower bound, a factor and ``start``.

    The bound has the sign of ``top``. The bits of floats of one sign are in the order of the floats, or, if the sign is
    negative, in the inverse order; hence the sign of the factor.
    """
    MOST: tl.constexpr = largest_difference(BITS)
    bits = (top + 0.0).to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    size = tl.where(bits < 0, tl.minimum(size, INFINITE - MOST) + MOST, tl.maximum(size, MOST) - MOST)
    bound = size | (bits & least_of(tl.int32))
    factor = tl.where(bits < 0, -(1 << BITS), 1 << BITS)
    return bound.to(tl.float32, bitcast=True), factor, least_of(tl.int32) - bound * factor


@triton.jit
def key_of(value, bound, factor, start):
    """An integer of the order of the values above ``bound``, with the number that ``start`` includes in its low bits.

    Of all other values, but NaN, the upper bits are the lowest that there are.
    """
    return tl.maximum(value, bound).to(tl.int32, bitcast=True) * factor + start


@triton.constexpr_function
def bits_of(n):
    """The number of bits of numbers below n."""
    return (n - 1).bit_length()


@triton.jit
def two_largest(a, b, c, d):
    """The two largest of four values, of which the first two and the last two are sorted."""
    return tl.maximum(a, c, propagate_nan=tl.PropagateNan.ALL), tl.maximum(tl.minimum(a, c), tl.maximum(b, d))


@triton.jit
def joined(a, of_a, b, of_b):
    """The largest of two sets of values, and the sum of its two largest, from those of both sets.

    The two largest are of one set, or the largest of each. No other pair has a larger sum, also after rounding.
    """
    return larger(a, b), tl.maximum(tl.maximum(of_a, of_b), a + b)


@triton.jit
def best_and_sum(v):
    """The largest of some values, and the sum of the two largest, or -inf if there is one value."""
    N: tl.constexpr = len(v)
    best, of_two = v[0], tl.full(v[0].shape, float("-inf"), tl.float32)
    if N == 2:
        best, of_two = larger(v[0], v[1]), v[0] + v[1]
    elif N > 2:
        a, b = best_and_sum(v[: N // 2]), best_and_sum(v[N // 2 :])
        best, of_two = joined(a[0], a[1], b[0], b[1])
    return best, of_two


@triton.jit
def chosen(v, i):
    """Of tensors ``(T,)``, for every element of ``i`` ``(T, L)`` or ``(1, L)`` the one with this number."""
    w = ()
    for n in tl.static_range(len(v)):
        w = w + (v[n][:, None] + tl.zeros_like(i),)
    for bit in tl.static_range(bits_of(len(v))):
        v, w = w, ()
        for n in tl.static_range(0, len(v), 2):
            if n + 1 < len(v):
                w = w + (tl.where((i >> bit) & 1 == 1, v[n + 1], v[n]),)
            else:
                w = w + (v[n],)
    return w[0]


@triton.jit
def of_group(values, group, SIZE: tl.constexpr):
    """The SIZE values of a group ``(T, L)`` of experts, from those that each lane has of its groups, one by one."""
    GROUPS: tl.constexpr = len(values) // SIZE  # of a lane
    lane, moved = group // GROUPS, ()
    for i in tl.static_range(SIZE):
        value = tl.gather(values[i], lane, 1)
        for n in tl.static_range(1, GROUPS):
            value = tl.where(group % GROUPS == n, tl.gather(values[n * SIZE + i], lane, 1), value)
        moved = moved + (value,)
    return moved


@triton.jit
def larger(a, b):
    """The larger of two values; NaN if one is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def by_whole_values(
    start, selection_bias, active, inner, outer, E: tl.constexpr, K: tl.constexpr, GROUPS: tl.constexpr,
    KEPT: tl.constexpr, TOP2: tl.constexpr, STEP: tl.constexpr, SCORING: tl.constexpr, PTX: tl.constexpr,
    BLOCK_G: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """The K experts with the largest values among the KEPT best groups, in K + 1 passes over the logits.

    They are K tensors ``(T,)``. Also returns a mask of the tokens with a logit that has no score.
    """
    T: tl.constexpr = start.shape[0]
    OF_LANE: tl.constexpr = STEP // LANES if STEP > LANES else 1
    SIZE: tl.constexpr = E // GROUPS
    g = tl.arange(0, BLOCK_G)[None, :]
    lowest = tl.full([T], float("-inf"), tl.float32)
    top = lowest
    keys = tl.full([T, BLOCK_G], least_of(tl.int64), tl.int64)
    for group in range(GROUPS):
        one, two = lowest, lowest
        for r in range(SIZE // STEP):
            e = group * SIZE + r * STEP + tl.arange(0, STEP)[None, :]
            x = tl.load(start[:, None] + e, mask=active[:, None], other=0.0)
            value = value_of(x, tl.load(selection_bias + e), inner, outer, SCORING, PTX)
            best, second = tl.reduce((value, tl.full(value.shape, float("-inf"), tl.float32)), 1, two_largest)
            one, two = two_largest(one, two, best, second)
        top = larger(top, one)
        score = larger(one + tl.where(two > LOWEST, two, 0.0), LOWEST) if TOP2 else one
        keys = tl.where(g == group, ((ordered(score).to(tl.int64) << 32) | (LOW - group))[:, None], keys)
    kept = tl.zeros([T], tl.int32)  # a bit for every group
    for _ in range(KEPT):
        best = tl.max(keys, axis=1)
        keys = tl.where(keys == best[:, None], least_of(tl.int64), keys)
        kept |= 1 << ((best & LOW) ^ LOW).to(tl.int32)

    selected = ()
    for _ in tl.static_range(K):
        selected = selected + (tl.zeros([T], tl.int32),)
    before = tl.full([T], 2**63 - 1, tl.int64)
    for i in range(K):
        largest = tl.full([T], least_of(tl.int64), tl.int64)
        for r in range(E // STEP):
            e = r * STEP + tl.arange(0, STEP)[None, :]
            x = tl.load(start[:, None] + e, mask=active[:, None], other=0.0)
            value = value_of(x, tl.load(selection_bias + e), inner, outer, SCORING, PTX)
            key = (ordered(value).to(tl.int64) << 32) | (LOW - e)
            there = ((kept >> (r * STEP // SIZE)) & 1)[:, None] != 0
            key = tl.where(there & (key < before[:, None]), key, least_of(tl.int64))
            # By lane first, so that the ids have the layout of those that the fast path finds.
            of_lane = tl.max(tl.reshape(key, [T, STEP // OF_LANE, OF_LANE]), axis=2)
            largest = tl.maximum(largest, tl.max(of_lane, axis=1))
        before = largest
        w = ()
        for j in tl.static_range(K):
            w = w + (tl.where(i == j, LOW - (largest & LOW).to(tl.int32), selected[j]),)
        selected = w
    return selected, top != top
