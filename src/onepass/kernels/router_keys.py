"""Device functions that make keys of logits and sort them, for `router_topk`, which says what a key is."""

# mypy: disable-error-code="assignment, var-annotated, misc"
# (tuples grow in a `static_range`)

import triton
import triton.language as tl

from onepass.kernels.online_softmax import LOWEST, transform
from onepass.kernels.router_scores import SIGMOID, sigmoid, sqrtsoftplus

LOW = tl.constexpr(8191)  # the bits of an inverted id


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
