"""Experts on a GPU: two grouped products each way, and what is between them in their epilogues."""

from typing import NamedTuple

import torch
from torch import Tensor

from onepass.kernels.grouped_matmul import (
    combine_kernel,
    grouped_matmul_kernel,
    grouped_outer_kernel,
    grouped_sum_kernel,
    tile_kernel,
)
from onepass.kernels.launch import Plan, launch
from onepass.kernels.layout import power_of_two
from onepass.options import EXPERT_TENSORS, ExpertGradients, ExpertOptions

MOST_ROWS = 128  # of a tile


class Groups(NamedTuple):
    """Slots by expert; see `grouped_matmul`."""

    order: Tensor  # (S,), int32
    offsets: Tensor  # (E + 1,), int32
    tile_expert: Tensor
    tile_row: Tensor
    topk: int
    block: int  # rows of a tile


def group(experts: Tensor, E: int) -> Groups:
    """Without waiting for the device: there are as many tiles as there could be at most."""
    slots = experts.numel()
    ids, order = experts.reshape(-1).clamp(-1, E).to(torch.int16 if E < 2**15 else torch.int32).sort(stable=True)
    bounds = torch.arange(E + 1, dtype=ids.dtype, device=ids.device)
    offsets = torch.searchsorted(ids, bounds, out_int32=True)
    block = min(MOST_ROWS, max(16, power_of_two(slots // E)))
    tiles = slots // block + min(E, slots)
    tile_expert, tile_row = experts.new_empty((2, tiles), dtype=torch.int32)
    groups = Groups(order.to(torch.int32), offsets, tile_expert, tile_row, experts.shape[-1], block)
    if tiles:
        launch(tile_plan, (tiles, E, block), (offsets,), (tile_expert, tile_row))
    return groups


def tile_plan(tiles: int, E: int, block: int) -> Plan:
    constexprs = dict(E=E, BLOCK_E=power_of_two(E), BLOCK=16, BLOCK_M=block)
    return Plan(tile_kernel, -(-tiles // 16), (tiles,), constexprs, 4)


Strides = tuple[int, ...]


def product(
    x: Tensor,
    w: Tensor,
    groups: Groups,
    options: ExpertOptions,
    *,
    gather: bool = False,
    scatter: bool = False,
    epilogue: str = "plain",
    low: Tensor | None = None,
    lora: Tensor | None = None,
    scale: float = 0.0,
    bias: Tensor | None = None,
    h: Tensor | None = None,
    weights: Tensor | None = None,
    out: Tensor | None = None,
    weighted: Tensor | None = None,
    parts: Tensor | None = None,
) -> Tensor:
    """`grouped_matmul_kernel` with ``w`` ``(E, N, K)`` and ``lora`` ``(E, N, R)``, of any strides; returns ``out``."""
    E, N, K = w.shape
    slots = len(groups.order)
    N = N // 2 if epilogue == "glu" else N
    out = x.new_empty((slots, N)) if out is None else out
    about = (
        (slots, len(groups.tile_row), E, N, K, 0 if lora is None else lora.shape[2], groups.topk, groups.block),
        (epilogue, gather, scatter, scale), options, x.stride(0), w.stride(), () if lora is None else lora.stride(),
        x.element_size(),
    )  # fmt: skip
    if slots:
        tensors = x, w, low, lora, bias, h, weights, out, weighted, parts, *groups[:4]
        launch(product_plan, about, tensors, ())
    return out


def product_plan(
    sizes: tuple[int, ...],
    how: tuple[str, bool, bool, float],
    o: ExpertOptions,
    x_row: int,
    w_strides: Strides,
    lora_strides: Strides,
    element: int,
) -> Plan:
    slots, tiles, E, N, K, R, topk, block = sizes
    epilogue, gather, scatter, scale = how
    block_n = columns_of_tile(N, epilogue)
    block_k = min(power_of_two(K), 128 // element)
    constexprs = dict(
        E=E, N=N, K=K, R=R, TOPK=topk, EPILOGUE=epilogue, ACTIVATION=o.activation, INTERLEAVED=o.interleaved,
        GATHER=gather, SCATTER=scatter, X_ROW=x_row, W_E=w_strides[0], W_N=w_strides[1], W_K=w_strides[2],
        **dict(zip(("L_E", "L_N", "L_R"), lora_strides or (0, 0, 0))),
        BLOCK_M=block, BLOCK_N=block_n, BLOCK_K=max(16, block_k), BLOCK_R=max(16, power_of_two(R)),
        STAGES=4 if element == 2 else 3,
    )  # fmt: skip
    warps = 8 if block * block_n >= 128 * 64 else 4
    numbers = (slots, scale, o.alpha, o.limit)
    return Plan(grouped_matmul_kernel, tiles * -(-N // block_n), numbers, constexprs, warps)


def columns_of_tile(N: int, epilogue: str) -> int:
    return max(16, min(power_of_two(N), 128 if epilogue == "plain" else 64))


def outer(
    a: Tensor, b: Tensor, out: Tensor, groups: Groups, *, gather_a: bool = False, gather_b: bool = False,
    scale: float = 1.0,
) -> Tensor:  # fmt: skip
    """`grouped_outer_kernel` into ``out`` ``(E, N, K)``, of any strides."""
    about = tuple(out.shape), out.stride(), groups.topk, gather_a, gather_b, a.stride(0), b.stride(0), scale
    launch(outer_plan, about, (a, b, out, groups.order, groups.offsets), ())
    return out


def outer_plan(
    shape: Strides, strides: Strides, topk: int, gather_a: bool, gather_b: bool, a_row: int, b_row: int, scale: float
) -> Plan:
    E, N, K = shape
    block_n, block_k = (max(16, min(128, power_of_two(n))) for n in (N, K))
    constexprs = dict(
        E=E, N=N, K=K, TOPK=topk, GATHER_A=gather_a, GATHER_B=gather_b, A_ROW=a_row, B_ROW=b_row,
        O_E=strides[0], O_N=strides[1], O_K=strides[2], BLOCK_N=block_n, BLOCK_K=block_k, BLOCK_M=32, STAGES=4,
    )  # fmt: skip
    programs = E * -(-N // block_n) * -(-K // block_k)
    return Plan(grouped_outer_kernel, programs, (scale,), constexprs, 8 if block_n * block_k >= 128 * 64 else 4)


def bias_gradient(a: Tensor, weights: Tensor | None, like: Tensor, groups: Groups, gather: bool) -> Tensor:
    out = torch.empty_like(like, memory_format=torch.contiguous_format)
    about = tuple(out.shape), groups.topk, gather, a.stride(0)
    launch(bias_plan, about, (a, weights, out, groups.order, groups.offsets), ())
    return out


def bias_plan(shape: Strides, topk: int, gather: bool, a_row: int) -> Plan:
    E, N = shape
    constexprs = dict(N=N, TOPK=topk, GATHER=gather, A_ROW=a_row, BLOCK_N=64, BLOCK_M=32)
    return Plan(grouped_sum_kernel, E * -(-N // 64), (), constexprs, 4)


def combine(y: Tensor, weights: Tensor | None, experts: Tensor, E: int, like: Tensor) -> Tensor:
    out = torch.empty_like(like, memory_format=torch.contiguous_format)
    T, N = out.shape
    if T:
        launch(combine_plan, (T, E, N, experts.shape[1]), (y, weights, experts, out), ())
    return out


def combine_plan(T: int, E: int, N: int, topk: int) -> Plan:
    block_n = min(1024, max(16, power_of_two(N)))
    constexprs = dict(E=E, N=N, TOPK=topk, BLOCK_T=1, BLOCK_N=block_n)
    return Plan(combine_kernel, T * -(-N // block_n), (T,), constexprs, 4)


def expert_mlp(
    hidden: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, gate_up_bias: Tensor | None,
    down_bias: Tensor | None, a1: Tensor | None, b1: Tensor | None, a2: Tensor | None, b2: Tensor | None,
    options: ExpertOptions,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The result, and what `gradient` needs of it: the products before the activation."""
    o = options
    w1, w2 = (w.mT if o.transposed else w for w in (gate_up, down))
    groups = group(experts, len(w1))
    h = hidden.new_empty((experts.numel(), w1.shape[1])) if o.saved else None
    low1 = None if a1 is None else product(hidden, a1, groups, o, gather=True)
    activated = product(
        hidden, w1, groups, o, gather=True, epilogue="glu", low=low1, lora=b1, scale=o.gate_up_scale,
        bias=gate_up_bias, h=h,
    )  # fmt: skip
    low2 = None if a2 is None else product(activated, a2, groups, o)
    y = product(activated, w2, groups, o, scatter=True, low=low2, lora=b2, scale=o.down_scale, bias=down_bias)
    return combine(y, weights, experts, len(w1), hidden), h


def gradient(
    grad: Tensor, hidden: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor,
    gate_up_bias: Tensor | None, down_bias: Tensor | None, a1: Tensor | None, b1: Tensor | None, a2: Tensor | None,
    b2: Tensor | None, h: Tensor, options: ExpertOptions,
) -> ExpertGradients:  # fmt: skip
    """Of all tensors that are floating-point, in their order, None where not needed."""
    o = options
    w1, w2 = (w.mT if o.transposed else w for w in (gate_up, down))
    E, width = len(w1), w2.shape[2]
    slots = experts.numel()
    groups = group(experts, E)
    found: dict[str, Tensor | None] = dict.fromkeys(EXPERT_TENSORS)

    up2 = None if b2 is None else product(grad, b2.mT, groups, o, gather=True)
    weighted = hidden.new_empty((slots, width)) if o.needs("down") or o.needs("a2") or o.needs("b2") else None
    dh = torch.empty_like(h)
    n_tiles = -(-width // columns_of_tile(width, "glu_gradient"))
    parts = weights.new_zeros((n_tiles, slots))
    product(
        grad, w2.mT, groups, o, gather=True, epilogue="glu_gradient", low=up2, lora=None if a2 is None else a2.mT,
        scale=o.down_scale, h=h, weights=weights, out=dh, weighted=weighted, parts=parts,
    )  # fmt: skip
    if o.needs("weights"):
        total = parts.sum(0)
        if down_bias is not None:
            of_bias = parts.new_zeros((slots, 1))
            total += product(grad, down_bias.unsqueeze(1), groups, o, gather=True, scatter=True, out=of_bias)[:, 0]
        found["weights"] = total.view_as(weights)
    up1 = None
    if b1 is not None:
        up1 = product(dh, b1.mT, groups, o)
    if o.needs("hidden"):
        a1t = None if a1 is None else a1.mT
        y = product(dh, w1.mT, groups, o, scatter=True, low=up1, lora=a1t, scale=o.gate_up_scale)
        found["hidden"] = combine(y, None, experts, E, hidden)
    if o.needs("gate_up"):
        out = torch.empty_like(gate_up, memory_format=torch.contiguous_format)
        outer(dh, hidden, out.mT if o.transposed else out, groups, gather_b=True)
        found["gate_up"] = out
    if o.needs("down"):
        out = torch.empty_like(down, memory_format=torch.contiguous_format)
        outer(grad, weighted, out.mT if o.transposed else out, groups, gather_a=True)  # type: ignore[arg-type]
        found["down"] = out
    if o.needs("gate_up_bias"):
        found["gate_up_bias"] = bias_gradient(dh, None, gate_up_bias, groups, False)  # type: ignore[arg-type]
    if o.needs("down_bias"):
        found["down_bias"] = bias_gradient(grad, weights, down_bias, groups, True)  # type: ignore[arg-type]
    if o.needs("a1"):
        found["a1"] = outer(up1, hidden, torch.empty_like(a1), groups, gather_b=True, scale=o.gate_up_scale)  # type: ignore[arg-type]
    if o.needs("b1"):
        low1 = product(hidden, a1, groups, o, gather=True)  # type: ignore[arg-type]
        found["b1"] = outer(dh, low1, torch.empty_like(b1), groups, scale=o.gate_up_scale)  # type: ignore[arg-type]
    if o.needs("a2"):
        found["a2"] = outer(up2, weighted, torch.empty_like(a2), groups, scale=o.down_scale)  # type: ignore[arg-type]
    if o.needs("b2"):
        low2 = product(weighted, a2, groups, o)  # type: ignore[arg-type]
        found["b2"] = outer(grad, low2, torch.empty_like(b2), groups, gather_a=True, scale=o.down_scale)  # type: ignore[arg-type]
    return tuple(found.values())  # type: ignore[return-value]
