"""Device functions for routers that sort keys: integers that order as the values of experts do, all different.

LANES threads share a token, and each has its keys in registers, as tensors ``(T, LANES)``. It sorts them in runs by
Batcher's network, and merges the runs, of which it keeps the largest K. Then K rounds take the maximum over the heads
of all lanes and remove it from its lane. So nearly all the work is in minima and maxima of registers.
"""

# mypy: disable-error-code="assignment, var-annotated, misc"
# (tuples grow in a `static_range`)

import triton
import triton.language as tl

from onepass.kernels.router_scores import log2

LOW = tl.constexpr(8191)  # the bits of an inverted id


@triton.constexpr_function
def least_of(dtype):
    """The key of no expert."""
    return -(1 << (dtype.primitive_bitwidth - 1))


@triton.constexpr_function
def is_lower(a, n, p, q):
    """Whether a of n elements is the lower one of a pair in step q of stage p of Batcher's odd-even merge sort."""
    p, k = 1 << p, (1 << p) >> q
    return a >= k % p and a + k < n and (a - k % p) // k % 2 == 0 and a // (2 * p) == (a + k) // (2 * p)


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
def columns(x, L: tl.constexpr, V: tl.constexpr):
    """The V columns of ``(T, L·V)``, by lane, as V tensors ``(T, L)``. It costs nothing if a thread has all of them."""
    if V == 8:
        parts = (tl.reshape(x, [x.shape[0], L, 2, 2, 2]),)
    elif V == 4:
        parts = (tl.reshape(x, [x.shape[0], L, 2, 2]),)
    elif V == 2:
        parts = (tl.reshape(x, [x.shape[0], L, 2]),)
    else:
        parts = (tl.reshape(x, [x.shape[0], L]),)
    for _ in tl.static_range(log2(V)):
        firsts, seconds = (), ()
        for i in tl.static_range(len(parts)):
            a, b = tl.split(parts[i])
            firsts, seconds = firsts + (a,), seconds + (b,)
        parts = firsts + seconds
    return parts


@triton.jit
def row(v, N: tl.constexpr):
    """N tensors ``(T, L)`` as one ``(T, L·N)``, where the N elements of a lane are adjacent."""
    for _ in tl.static_range(log2(N)):
        w = ()
        for i in tl.static_range(len(v) // 2):
            w = w + (tl.join(v[i], v[i + len(v) // 2]),)
        v = w
    return tl.reshape(v[0], [v[0].shape[0], v[0].shape[1] * N])


@triton.jit
def only(there, x, least, WHOLE: tl.constexpr):
    """``x``, but ``least`` where there is no expert. WHOLE says that there is one everywhere."""
    return x if WHOLE else tl.where(there, x, least)


@triton.jit
def ordered_number(x):
    """A float32 that is not NaN as an integer of the same order, where -0 is 0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def ordered(x):
    """A float32 as an integer of the same order, where -0 is 0 and NaN the largest."""
    return tl.where(x == x, ordered_number(x), 0x7FFFFFFF)


@triton.jit
def sorted_keys(keys, N: tl.constexpr):
    """The N largest keys of every lane, sorted; all, if they are fewer. N is a power of two."""
    COUNT: tl.constexpr = len(keys)
    RUN: tl.constexpr = N if N > 8 else 8
    v = ()
    for run in tl.static_range((COUNT + RUN - 1) // RUN):
        new = ()
        for i in tl.static_range(RUN):
            if run * RUN + i < COUNT:
                new = new + (keys[run * RUN + i],)
            else:
                new = new + (tl.full(keys[0].shape, least_of(keys[0].dtype), keys[0].dtype),)
        new = sorted_run(new, RUN)[:N]
        v = new if run == 0 else merged(v, new, N)
    return v[:COUNT] if COUNT < N else v


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
                    w = w + (tl.where(here, least_of(best.dtype), v[i]),)
        v = w
    return selected


@triton.jit
def slots(selected, lane, LANES: tl.constexpr, SLOTS: tl.constexpr):
    """K tensors ``(T,)`` as SLOTS tensors ``(T, LANES)``, a lane after the other. Slots in excess have the first."""
    mine = ()
    for j in tl.static_range(SLOTS):
        x = selected[0][:, None] + tl.zeros_like(lane)
        for i in tl.static_range(LANES):
            if i * SLOTS + j < len(selected):
                x = tl.where(lane == i, selected[i * SLOTS + j][:, None], x)
        mine = mine + (x,)
    return mine
