"""Launching the grouped products; see `grouped_matmul`."""

import torch
from torch import Tensor

from onepass.kernels import layout
from onepass.kernels.grouped_matmul import (
    combine_kernel,
    grouped_matmul_kernel,
    grouped_outer_kernel,
    grouped_sum_kernel,
    tile_kernel,
)
from onepass.kernels.launch import Plan, launch
from onepass.kernels.layout import power_of_two
from onepass.options import ExpertOptions, Groups, ScatterOptions

MOST_ROWS = 128  # of a tile


def rows_of_tile(slots: int, E: int) -> int:
    return min(MOST_ROWS, max(16, power_of_two(slots // max(E, 1))))


def tiles_for(slots: int, E: int) -> int:
    """As many as there could be."""
    return slots // rows_of_tile(slots, E) + min(E, slots)


def group(experts: Tensor, E: int) -> Groups:
    """Without waiting for the device: there are as many tiles as there could be at most."""
    slots = experts.numel()
    ids, order = experts.reshape(-1).clamp(-1, E).to(torch.int16 if E < 2**15 else torch.int32).sort(stable=True)
    bounds = torch.arange(E + 1, dtype=ids.dtype, device=ids.device)
    offsets = torch.searchsorted(ids, bounds, out_int32=True)
    block, tiles = rows_of_tile(slots, E), tiles_for(slots, E)
    tile_expert, tile_row = experts.new_empty((2, tiles), dtype=torch.int32)
    groups = Groups(order.to(torch.int32), offsets, tile_expert, tile_row)
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
    share: int = 0,
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
        (slots, len(groups.tile_row), E, N, K, 0 if lora is None else lora.shape[2], share),
        (epilogue, scatter, scale), options, x.stride(0), w.stride(), () if lora is None else lora.stride(),
        x.element_size(),
    )  # fmt: skip
    if slots:
        tensors = x, w, low, lora, bias, h, weights, out, weighted, parts, *groups
        launch(product_plan, about, tensors, ())
    return out


def product_plan(
    sizes: tuple[int, ...],
    how: tuple[str, bool, float],
    o: ExpertOptions,
    x_row: int,
    w_strides: Strides,
    lora_strides: Strides,
    element: int,
) -> Plan:
    slots, tiles, E, N, K, R, share = sizes
    block = rows_of_tile(slots, E)
    epilogue, scatter, scale = how
    block_n = columns_of_tile(N, epilogue, element)
    block_k = min(power_of_two(K), 128 // element)
    constexprs = dict(
        E=E, N=N, K=K, R=R, EPILOGUE=epilogue, ACTIVATION=o.activation, INTERLEAVED=o.interleaved,
        SHARE=share, SCATTER=scatter, X_ROW=x_row, W_E=w_strides[0], W_N=w_strides[1], W_K=w_strides[2],
        **dict(zip(("L_E", "L_N", "L_R"), lora_strides or (0, 0, 0))),
        BLOCK_M=block, BLOCK_N=block_n, BLOCK_K=max(16, block_k), BLOCK_R=max(16, power_of_two(R)),
        STAGES=4 if element == 2 else 3, PRECISION=layout.precision(), GROUP=4,
    )  # fmt: skip
    numbers = (slots, tiles, scale, o.alpha, o.limit)
    programs = tiles * -(-N // block_n)
    return Plan(grouped_matmul_kernel, programs, numbers, constexprs, warps_of(block * block_n * element))


def warps_of(size: int) -> int:
    """For a tile of ``size`` bytes, whose sums are float32 in registers."""
    return 8 if size >= 128 * 128 else 4


def columns_of_tile(N: int, epilogue: str, element: int) -> int:
    most = (256 if epilogue == "plain" else 128) // element
    return max(16, min(power_of_two(N), most))


def outer(
    a: Tensor, b: Tensor, out: Tensor, groups: Groups, *, share_a: int = 0, share_b: int = 0,
    scale: float = 1.0,
) -> Tensor:  # fmt: skip
    """`grouped_outer_kernel` into ``out`` ``(E, N, K)``, of any strides."""
    strides = out.stride(), a.stride(0), b.stride(0)
    about = tuple(out.shape), strides, (share_a, share_b), scale, a.element_size()
    launch(outer_plan, about, (a, b, out, groups.order, groups.offsets), ())
    return out


def outer_plan(
    shape: Strides, strides: tuple[Strides, int, int], shares: tuple[int, int], scale: float, element: int
) -> Plan:
    (E, N, K), (of_out, a_row, b_row) = shape, strides
    block_n, block_k = (max(16, min(256 // element, power_of_two(n))) for n in (N, K))
    constexprs = dict(
        E=E, N=N, K=K, SHARE_A=shares[0], SHARE_B=shares[1], A_ROW=a_row, B_ROW=b_row,
        O_E=of_out[0], O_N=of_out[1], O_K=of_out[2], BLOCK_N=block_n, BLOCK_K=block_k, BLOCK_M=32, STAGES=4,
        PRECISION=layout.precision(),
    )  # fmt: skip
    programs = E * -(-N // block_n) * -(-K // block_k)
    return Plan(grouped_outer_kernel, programs, (scale,), constexprs, warps_of(block_n * block_k * element))


def bias_gradient(a: Tensor, weights: Tensor | None, like: Tensor, groups: Groups, share: int) -> Tensor:
    out = torch.empty_like(like, memory_format=torch.contiguous_format)
    about = tuple(out.shape), share, a.stride(0)
    launch(bias_plan, about, (a, weights, out, groups.order, groups.offsets), ())
    return out


def bias_plan(shape: Strides, share: int, a_row: int) -> Plan:
    E, N = shape
    constexprs = dict(N=N, SHARE=share, A_ROW=a_row, BLOCK_N=64, BLOCK_M=32)
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


PLAIN = ExpertOptions()


def scattered_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, weights: Tensor | None, experts: Tensor, order: Tensor,
    offsets: Tensor, tile_expert: Tensor, tile_row: Tensor, options: ScatterOptions,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The result, and the rows that were summed to it where there are ``weights``."""
    o, groups = options, Groups(order, offsets, tile_expert, tile_row)
    w = weight.mT if o.transposed else weight
    out = x.new_empty if weights is not None else x.new_zeros  # rows of no expert are not written
    y = product(
        x, w, groups, PLAIN, share=0 if o.grouped_in else o.k, scatter=not o.grouped_out, bias=bias,
        out=out((len(order), w.shape[1])),
    )  # fmt: skip
    if weights is None:
        return y, None
    return combine(y, weights, experts, len(w), x.new_empty((weights.shape[0], w.shape[1]))), y


def scattered_gradient(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, weights: Tensor | None, y: Tensor | None,
    experts: Tensor, order: Tensor, offsets: Tensor, tile_expert: Tensor, tile_row: Tensor, options: ScatterOptions,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Of x, weight, bias and weights, None where not needed."""
    o, groups = options, Groups(order, offsets, tile_expert, tile_row)
    w = weight.mT if o.transposed else weight
    of_x, of_weight, of_bias, of_weights = (bool(o.needed >> n & 1) for n in range(4))
    dx = dw = db = dweights = None
    if weights is not None:
        if of_weights:
            valid = (experts >= 0) & (experts < len(w))
            rows = y.view(*weights.shape, -1).float()  # type: ignore[union-attr]
            dweights = torch.where(valid, (rows * grad.unsqueeze(1)).sum(-1), 0.0).to(weights.dtype)
        grad = (grad.unsqueeze(1) * weights.unsqueeze(-1)).to(x.dtype).flatten(0, 1)
    share = 0 if o.grouped_out else 1
    share_x = 0 if o.grouped_in else o.k
    if of_x:
        out = x.new_zeros((len(order), w.shape[2])) if o.grouped_in else None
        dx = product(grad, w.mT, groups, PLAIN, share=share, scatter=not o.grouped_in, out=out)
        if not o.grouped_in:
            dx = combine(dx, None, experts, len(w), x)
    if of_weight:
        dw = torch.empty_like(weight, memory_format=torch.contiguous_format)
        outer(grad, x, dw.mT if o.transposed else dw, groups, share_a=share, share_b=share_x)
    if of_bias:
        db = bias_gradient(grad, None, bias, groups, share)  # type: ignore[arg-type]
    return dx, dw, db, dweights
