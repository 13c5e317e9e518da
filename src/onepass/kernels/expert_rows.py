"""Kernels for the rows of experts between and after the grouped GEMMs: the gradient of the activation, the gradients of
biases, and the sum over the experts, or over the processes, of a token. `expert_mlp`, `scattered_linear` and
`integrations.expert_exchange` call them.

Bytes moved: each row of an input once, each row of a result once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from onepass.core.moe_options import ExpertOptions, Groups
from onepass.kernels.launch import Flat, Out, Plan, Rows, launch
from onepass.kernels.layout import power_of_two
from onepass.kernels.router_values import fast_sigmoid


@triton.jit
def activate(gate, up, alpha, limit, ACTIVATION: tl.constexpr, PTX: tl.constexpr):
    """``activated = f(gate)·up`` and its derivatives with respect to gate and up, float32.

    "swiglu_clamped" clamps gate and up first, and adds 1 to up. PTX: whether the sigmoid may be computed by
    instructions of NVIDIA GPUs, see `fast_sigmoid`.
    """
    if ACTIVATION == "swiglu_clamped":
        inside = gate <= limit
        within = tl.abs(up) <= limit
        gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -limit, limit, propagate_nan=tl.PropagateNan.ALL) + 1.0
        s = fast_sigmoid(alpha * gate, PTX)
        f = gate * s
        slope = tl.where(inside, s + alpha * f * (1.0 - s), 0.0)
        return f * up, slope * up, tl.where(within, f, 0.0)
    elif ACTIVATION == "silu":
        s = fast_sigmoid(gate, PTX)
        f = gate * s
        slope = s + f * (1.0 - s)
    elif ACTIVATION == "gelu":
        phi = 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
        f = gate * phi
        slope = phi + gate * 0.3989422804014327 * tl.exp(-0.5 * gate * gate)
    else:
        inner = 0.7978845608028654 * gate * (1.0 + 0.044715 * gate * gate)
        s = fast_sigmoid(2.0 * inner, PTX)  # (1 + tanh(inner)) / 2
        f = gate * s
        slope = s + f * (1.0 - s) * 2.0 * 0.7978845608028654 * (1.0 + 3.0 * 0.044715 * gate * gate)
    return f * up, slope * up, f


@triton.jit
def glu_gradient_kernel(
    y: "Out", h: "Flat", weights: "Flat", out: "Out", of_weights: "Out", order: "Flat", offsets: "Flat",
    alpha: tl.float32, limit: tl.float32,
    E: tl.constexpr, N: tl.constexpr, ACTIVATION: tl.constexpr, INTERLEAVED: tl.constexpr, KEEP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The gradient of the activation, for the rows of all experts.

    Inputs: ``y`` ``(T·K, N)``, the gradient of the activated rows before it is multiplied by the routing weight; ``h``
    ``(T·K, 2 N)``, gate and up; ``weights`` ``(T, K)``; ``order`` and ``offsets`` of `Groups`.
    Outputs: ``out`` ``(T·K, 2 N)``, the gradient of ``h``; ``of_weights`` ``(T, K)``, the sum of y times the activated
    row. If KEEP, the activated rows times their routing weights overwrite ``y``.
    Bytes moved: see the module docstring.
    """
    end = tl.load(offsets + E)
    if tl.program_id(0) * BLOCK_M >= end:  # the rows of other processes' experts
        return
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    there = row < end
    assignment = tl.load(order + row, mask=there, other=0)
    weight = tl.load(weights + assignment, mask=there, other=0.0)[:, None]
    at_y = y + row.to(tl.int64)[:, None] * N
    row_h = row.to(tl.int64)[:, None] * (2 * N)
    total = tl.zeros((BLOCK_M,), tl.float32)
    for begin in range(0, N, BLOCK_N):
        n = begin + tl.arange(0, BLOCK_N)[None, :]
        mask = there[:, None] & (n < N)
        if INTERLEAVED:
            both = 2 * begin + tl.arange(0, 2 * BLOCK_N)[None, :]
            wide = there[:, None] & (both < 2 * N)
            pair = tl.load(h + row_h + both, mask=wide, other=0.0).to(tl.float32)
            gate, up = tl.split(tl.reshape(pair, (BLOCK_M, BLOCK_N, 2)))
        else:
            gate = tl.load(h + row_h + n, mask=mask, other=0.0).to(tl.float32)
            up = tl.load(h + row_h + N + n, mask=mask, other=0.0).to(tl.float32)
        of_activated = tl.load(at_y + n, mask=mask, other=0.0).to(tl.float32)
        activated, by_gate, by_up = activate(gate, up, alpha, limit, ACTIVATION, False)
        total += tl.sum(tl.where(mask, of_activated * activated, 0.0), 1)
        of_activated *= weight
        by_gate = (of_activated * by_gate).to(out.dtype.element_ty)
        by_up = (of_activated * by_up).to(out.dtype.element_ty)
        if INTERLEAVED:
            tl.store(out + row_h + both, tl.reshape(tl.join(by_gate, by_up), (BLOCK_M, 2 * BLOCK_N)), mask=wide)
        else:
            tl.store(out + row_h + n, by_gate, mask=mask)
            tl.store(out + row_h + N + n, by_up, mask=mask)
        if KEEP:
            tl.store(at_y + n, (activated * weight).to(y.dtype.element_ty), mask=mask)
    tl.store(of_weights + assignment, total, mask=there)


def glu_gradient(
    y: Tensor, h: Tensor, weights: Tensor, groups: Groups, options: ExpertOptions, keep: bool
) -> tuple[Tensor, Tensor]:
    """Launch `glu_gradient_kernel`, and return the gradients of ``h`` and of ``weights``."""
    out, of_weights = h.new_empty(h.shape), weights.new_zeros(weights.shape)
    if len(y):
        about = tuple(y.shape), len(groups.offsets) - 1, options, keep
        launch(glu_gradient_plan, about, (y, h, weights, out, of_weights, groups.order, groups.offsets))
    return out, of_weights


def glu_gradient_plan(shape: tuple[int, int], E: int, o: ExpertOptions, keep: bool) -> Plan:
    """The launch of `glu_gradient_kernel`."""
    assignments, N = shape
    block_n = max(16, min(1024, power_of_two(N)))
    block_m = max(1, 1024 // block_n)
    constexprs = dict(
        E=E, N=N, ACTIVATION=o.activation, INTERLEAVED=o.interleaved, KEEP=keep, BLOCK_M=block_m, BLOCK_N=block_n
    )
    return Plan(glu_gradient_kernel, -(-assignments // block_m), (o.alpha, o.limit), constexprs, 4)


@triton.jit
def bias_gradient_kernel(
    a: "Rows", weights: "Flat", out: "Out", order: "Flat", offsets: "Flat",
    N: tl.constexpr, SHARE: tl.constexpr, A_ROW: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """The gradient of a bias: ``out[e]`` is the sum of the rows of expert e, times their weights if there are any.

    Inputs: ``a`` ``(rows, N)``, where SHARE consecutive assignments have the same row (SHARE is 0 if the rows are
    sorted by expert); ``weights`` ``(T, K)`` or None; ``order`` and ``offsets`` of `Groups`.
    Output: ``out`` ``(E, N)``.
    Bytes moved: see the module docstring.
    """
    TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    expert = tl.program_id(0) // TILES
    n = tl.program_id(0) % TILES * BLOCK_N + tl.arange(0, BLOCK_N)
    end = tl.load(offsets + expert + 1)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in tl.range(tl.load(offsets + expert), end, BLOCK_M):
        row = start + tl.arange(0, BLOCK_M)
        there = row < end
        assignment = tl.load(order + row, mask=there, other=0)
        source = (assignment // SHARE if SHARE > 0 else row).to(tl.int64)
        mask = there[:, None] & (n < N)[None, :]
        part = tl.load(a + source[:, None] * A_ROW + n[None, :], mask=mask, other=0.0).to(tl.float32)
        if weights is not None:
            part *= tl.load(weights + assignment, mask=there, other=0.0)[:, None]
        acc += part
    tl.store(out + expert.to(tl.int64) * N + n, tl.sum(acc, 0).to(out.dtype.element_ty), mask=n < N)


def bias_gradient(a: Tensor, weights: Tensor | None, like: Tensor, groups: Groups, share: int) -> Tensor:
    """Launch `bias_gradient_kernel`, and return a gradient like ``like``, ``(E, N)``."""
    out = torch.empty_like(like, memory_format=torch.contiguous_format)
    about = tuple(out.shape), share, a.stride(0)
    launch(bias_plan, about, (a, weights, out, groups.order, groups.offsets))
    return out


def bias_plan(shape: tuple[int, ...], share: int, a_row: int) -> Plan:
    """The launch of `bias_gradient_kernel`."""
    E, N = shape
    constexprs = dict(N=N, SHARE=share, A_ROW=a_row, BLOCK_N=64, BLOCK_M=32)
    return Plan(bias_gradient_kernel, E * -(-N // 64), (), constexprs, 4)


@triton.jit(do_not_specialize=["count"])
def combine_kernel(
    y: "Flat", weights: "Flat", ids: "Flat", out: "Out",
    count: tl.int32,
    N: tl.constexpr, TOPK: tl.constexpr, PLACED: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The sum of the K rows of each token, times their weights if there are any, in float32.

    Inputs: ``y`` ``(rows, N)``; ``weights`` ``(T, K)`` or None; ``ids`` ``(T, K)``: the rows themselves if PLACED, else
    the experts of rows in the order of the assignments. ``count`` is the number of rows or of experts; ids that are not
    from 0 to ``count`` - 1 are left out.
    Output: ``out`` ``(T, N)``.
    Bytes moved: see the module docstring.
    """
    TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    t = (tl.program_id(0) // TILES).to(tl.int64)
    n = tl.program_id(0) % TILES * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_N,), tl.float32)
    for k in tl.static_range(TOPK):
        id = tl.load(ids + t * TOPK + k)
        valid = (id >= 0) & (id < count)
        row = id.to(tl.int64) if PLACED else t * TOPK + k
        part = tl.load(y + row * N + n, mask=(n < N) & valid, other=0.0, eviction_policy="evict_first").to(tl.float32)
        if weights is not None:
            part *= tl.load(weights + t * TOPK + k, mask=valid, other=0.0).to(tl.float32)
        acc += part
    tl.store(out + t * N + n, acc.to(out.dtype.element_ty), mask=n < N)


def combine(y: Tensor, weights: Tensor, experts: Tensor, E: int) -> Tensor:
    """The weighted sum of the rows of each token, which are in the order of the assignments, ``(T, N)``."""
    out = y.new_empty((len(experts), y.shape[1]))
    if out.numel():
        launch(combine_plan, (tuple(out.shape), experts.shape[1], E, False), (y, weights, experts, out))
    return out


def sum_rows(y: Tensor, places: Tensor, weights: Tensor | None = None) -> Tensor:
    """The sum of the rows ``y[places[t, k]]``, times their weights, over k. Places beyond the rows are left out."""
    out = y.new_empty((len(places), y.shape[1]))
    if out.numel():
        launch(combine_plan, (tuple(out.shape), places.shape[1], len(y), True), (y, weights, places, out))
    return out


def combine_plan(shape: tuple[int, int], topk: int, count: int, placed: bool) -> Plan:
    """The launch of `combine_kernel`."""
    T, N = shape
    block_n = min(1024, max(16, power_of_two(N)))
    constexprs = dict(N=N, TOPK=topk, PLACED=placed, BLOCK_N=block_n)
    return Plan(combine_kernel, T * -(-N // block_n), (count,), constexprs, 4)


@triton.jit(do_not_specialize=["count"])
def sum_rows_gradient_kernel(
    grad: "Flat", y: "Flat", weights: "Flat", places: "Flat", of_y: "Out", of_weights: "Out",
    count: tl.int32,
    N: tl.constexpr, TOPK: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The gradients of the sum of rows at places that `combine_kernel` computes. A program has one place.

    Inputs: ``grad`` ``(T, N)``; ``y`` and ``weights`` of the sum, or None; ``places`` ``(T, K)``, each of another row;
    ``count``, the number of rows.
    Outputs: ``of_y`` ``(rows, N)``, of which only rows at these places are written; ``of_weights`` ``(T, K)`` or None.
    Bytes moved: see the module docstring.
    """
    pair = tl.program_id(0).to(tl.int64)
    place = tl.load(places + pair)
    valid = (place >= 0) & (place < count)
    row = place.to(tl.int64) * N
    weight = 1.0
    if weights is not None:
        weight = tl.load(weights + pair).to(tl.float32)
    total = 0.0
    for begin in range(0, N, BLOCK_N):
        n = begin + tl.arange(0, BLOCK_N)
        inside = (n < N) & valid
        g = tl.load(grad + pair // TOPK * N + n, mask=inside, other=0.0).to(tl.float32)
        tl.store(of_y + row + n, (weight * g).to(of_y.dtype.element_ty), mask=inside)
        if of_weights is not None:
            total += tl.sum(g * tl.load(y + row + n, mask=inside, other=0.0).to(tl.float32))
    if of_weights is not None:
        tl.store(of_weights + pair, total)


def sum_rows_gradient(
    grad: Tensor, places: Tensor, count: int, weights: Tensor | None = None, y: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """The gradients of the ``count`` rows and, if the rows ``y`` are given, of the weights of `sum_rows`.

    The gradient of a row without a place is uninitialized.
    """
    N = grad.shape[1]
    of_y = grad.new_empty((count, N))
    of_weights = None if y is None or weights is None else weights.new_empty(weights.shape)
    if places.numel():
        given = grad, y, weights, places, of_y, of_weights
        launch(sum_gradient_plan, (places.numel(), N, places.shape[1], count), given)
    return of_y, of_weights


def sum_gradient_plan(pairs: int, N: int, topk: int, count: int) -> Plan:
    """The launch of `sum_rows_gradient_kernel`."""
    constexprs = dict(N=N, TOPK=topk, BLOCK_N=min(2048, max(16, power_of_two(N))))
    return Plan(sum_rows_gradient_kernel, pairs, (count,), constexprs, 4)


@triton.jit(do_not_specialize=["assignments"])
def clear_dropped_kernel(
    out: "Out", order: "Flat", offsets: "Flat",
    assignments: tl.int32,
    E: tl.constexpr, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write zeros to the rows of assignments to out-of-range ids, which come last in the order.

    Inputs: ``order`` and ``offsets`` of `Groups`.
    Output: ``out`` ``(assignments, N)``, in the order of the assignments; other rows are left as they are.
    Bytes moved: these rows once.
    """
    begin = tl.program_id(0) * BLOCK_M
    valid = tl.load(offsets + E)
    if begin + BLOCK_M > valid:
        row = begin + tl.arange(0, BLOCK_M)
        dropped = (row >= valid) & (row < assignments)
        at = out + tl.load(order + row, mask=dropped, other=0).to(tl.int64)[:, None] * N
        for n0 in range(0, N, BLOCK_N):
            n = n0 + tl.arange(0, BLOCK_N)[None, :]
            zeros = tl.zeros((BLOCK_M, BLOCK_N), out.dtype.element_ty)
            tl.store(at + n, zeros, mask=dropped[:, None] & (n < N))


def clear_dropped(out: Tensor, groups: Groups) -> Tensor:
    """Launch `clear_dropped_kernel`, and return ``out``, which it writes to."""
    if len(out):
        launch(clear_plan, (tuple(out.shape), len(groups.offsets) - 1), (out, groups.order, groups.offsets))
    return out


def clear_plan(shape: tuple[int, int], E: int) -> Plan:
    """The launch of `clear_dropped_kernel`."""
    assignments, N = shape
    constexprs = dict(E=E, N=N, BLOCK_M=16, BLOCK_N=min(256, max(16, power_of_two(N))))
    return Plan(clear_dropped_kernel, -(-assignments // 16), (assignments,), constexprs, 4)
