"""Launching the grouped products; see `grouped_matmul`."""

import torch
from torch import Tensor

from onepass.autotune.own import choose
from onepass.kernels import layout
from onepass.kernels.grouped_matmul import grouped_matmul_kernel, grouped_outer_kernel
from onepass.kernels.grouped_rows import combine_kernel, glu_gradient_kernel, grouped_sum_kernel
from onepass.kernels.grouping import group, rows_of_tile, tiles_for
from onepass.kernels.launch import Plan, launch
from onepass.kernels.layout import power_of_two
from onepass.options import ExpertOptions, Groups, ScatterOptions

__all__ = ["group", "scattered_gradient", "scattered_linear", "tiles_for"]  # what `moe` asks a path for

Strides = tuple[int, ...]
PLAIN = ExpertOptions()


def product(
    x: Tensor,
    w: Tensor,
    groups: Groups,
    options: ExpertOptions = PLAIN,
    *,
    share: int = 0,
    scatter: bool = False,
    glu: bool = False,
    low: Tensor | None = None,
    lora: Tensor | None = None,
    scale: float = 1.0,
    bias: Tensor | None = None,
    h: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`grouped_matmul_kernel` with ``w`` ``(E, N, K)`` and ``lora`` ``(E, N, R)``, of any strides; returns ``out``."""
    E, N, K = w.shape
    slots = len(groups.order)
    N = N // 2 if glu else N
    out = x.new_empty((slots, N)) if out is None else out
    about = (
        (slots, len(groups.tile_row), E, N, K, 0 if lora is None else lora.shape[2], share),
        (glu, scatter, scale), options, x.stride(0), w.stride(), () if lora is None else lora.stride(),
        x.element_size(), tensor_memory(w, glu and not options.interleaved), x.device,
    )  # fmt: skip
    if slots:
        launch(product_plan, about, (x, w, low, lora, bias, h, out, *groups))
    return out


def tensor_memory(w: Tensor, halves: bool) -> str:
    """The dimension in which ``w`` is contiguous, if the tensor-memory unit of Hopper and later can read it.

    Of ``halves`` that lie beside each other a tile takes two parts, which that unit makes one only across rows.
    """
    of_expert, of_n, of_k = w.stride()
    name, other = ("K", of_n) if of_k == 1 else ("N", of_k if of_n == 1 and not halves else 0)
    whole = w.numel() and all(n > 0 and n * w.element_size() % 16 == 0 for n in (of_expert, other))
    return name if layout.has_tensor_memory() and whole and w.data_ptr() % 16 == 0 else ""


def product_plan(
    sizes: tuple[int, ...],
    how: tuple[bool, bool, float],
    o: ExpertOptions,
    x_row: int,
    w_strides: Strides,
    lora_strides: Strides,
    element: int,
    tma: str,
    device: torch.device,
) -> Plan:
    slots, tiles, E, N, K, R, share = sizes
    glu, scatter, scale = how
    block_m, block_k = rows_of_tile(slots, E), max(16, min(power_of_two(K), 128 // element))
    products, block_r = 2 if glu else 1, max(16, power_of_two(R))
    block_n, of_stage, most = tile_that_fits(N, products, (block_m, block_k, block_r if R else 0), element, bool(tma))
    if most < 1:
        raise ValueError(f"adapters: expected a rank that fits into shared memory, got {R}")
    tiles_of_expert = power_of_two(slots // (E * block_m))
    rule = dict(STAGES=min(2 + products, most), GROUP=min(16, tiles_of_expert))
    key = {"rows": slots, "experts": E, "columns": N, "inner": K, "read": "glu" if glu else "plain"}
    numbers = choose(grouped_matmul_kernel, key | layout.elements(element), rule)
    stages = min(numbers["STAGES"], most)
    constexprs = dict(
        E=E, N=N, K=K, R=R, ACTIVATION=o.activation if glu else "", INTERLEAVED=o.interleaved, SHARE=share,
        SCATTER=scatter,
        X_ROW=x_row, W_E=w_strides[0], W_N=w_strides[1], W_K=w_strides[2],
        **dict(zip(("L_E", "L_N", "L_R"), lora_strides or (0, 0, 0))),
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, BLOCK_R=block_r, STAGES=stages,
        PRECISION=layout.precision(), TMA=tma,
    )  # fmt: skip
    at_once = max(1, min(4, layout.shared_memory() // (of_stage * stages)))
    programs = min(tiles * -(-N // block_n), at_once * layout.multiprocessors(device))
    warps = 8 if block_m * block_n * products * element >= 128 * 128 * 2 else 4
    return Plan(grouped_matmul_kernel, programs, (tiles, numbers["GROUP"], scale, o.alpha, o.limit), constexprs, warps)


def tile_that_fits(
    N: int, products: int, blocks: tuple[int, int, int], element: int, tma: bool
) -> tuple[int, int, int]:
    """Columns of a tile of the result; the bytes of a stage, and how many stages there may be beside the adapter."""
    block_m, block_k, block_r = blocks
    hopper = layout.compute_capability() == 90
    widest = (256 if tma and (hopper or products == 1) else 128) if element == 2 else 64  # as registers allow
    block_n = max(16, min(power_of_two(N), widest // products))
    while True:
        column_bytes = (block_m + products * block_n) * element
        most = (layout.shared_memory() - column_bytes * block_r) // (column_bytes * block_k)
        if most >= 2 or block_n == 16:
            return block_n, column_bytes * block_k, most
        block_n //= 2


def outer(
    a: Tensor, b: Tensor, like: Tensor, groups: Groups, *, share_a: int = 0, share_b: int = 0, transposed: bool = False
) -> Tensor:
    """`grouped_outer_kernel` into a tensor ``(E, N, K)``, or ``(E, K, N)`` if ``transposed``, which is returned."""
    found = torch.empty_like(like, memory_format=torch.contiguous_format)
    out = found.mT if transposed else found
    strides = out.stride(), a.stride(0), b.stride(0)
    about = tuple(out.shape), strides, (share_a, share_b), a.element_size(), len(groups.order)
    launch(outer_plan, about, (a, b, out, groups.order, groups.offsets))
    return found


def outer_plan(
    shape: Strides,
    strides: tuple[Strides, int, int],
    shares: tuple[int, int],
    element: int,
    slots: int,
) -> Plan:
    (E, N, K), (of_out, a_row, b_row) = shape, strides
    block_n, block_k = (max(16, min(256 // element, power_of_two(n))) for n in (N, K))
    key = {"rows": slots, "experts": E, "columns": N, "inner": K, "read": "outer"} | layout.elements(element)
    block_m = 128 // element
    most = layout.shared_memory() // ((block_n + block_k) * block_m * element)
    numbers = choose(grouped_outer_kernel, key, dict(BLOCK_M=block_m, STAGES=max(2, min(3, most))))
    constexprs = dict(
        E=E, N=N, K=K, SHARE_A=shares[0], SHARE_B=shares[1], A_ROW=a_row, B_ROW=b_row,
        O_E=of_out[0], O_N=of_out[1], O_K=of_out[2], BLOCK_N=block_n, BLOCK_K=block_k, **numbers,
        PRECISION=layout.precision(),
    )  # fmt: skip
    programs = E * -(-N // block_n) * -(-K // block_k)
    hopper = layout.compute_capability() == 90  # which reads factors from shared memory
    warps = 4 if element == 2 and hopper else 8
    return Plan(grouped_outer_kernel, programs, (), constexprs, warps)


def glu_gradient(
    y: Tensor, h: Tensor, weights: Tensor, groups: Groups, options: ExpertOptions, keep: bool
) -> tuple[Tensor, Tensor]:
    """The gradients of ``h`` and of ``weights``; `glu_gradient_kernel` has the rest."""
    out, of_weights = h.new_empty(h.shape), weights.new_zeros(weights.shape)
    if len(y):
        about = tuple(y.shape), len(groups.offsets) - 1, options, keep
        launch(glu_gradient_plan, about, (y, h, weights, out, of_weights, groups.order, groups.offsets))
    return out, of_weights


def glu_gradient_plan(shape: tuple[int, int], E: int, o: ExpertOptions, keep: bool) -> Plan:
    slots, N = shape
    block_n = max(16, min(1024, power_of_two(N)))
    block_m = max(1, 1024 // block_n)
    constexprs = dict(
        E=E, N=N, ACTIVATION=o.activation, INTERLEAVED=o.interleaved, KEEP=keep, BLOCK_M=block_m, BLOCK_N=block_n
    )
    return Plan(glu_gradient_kernel, -(-slots // block_m), (slots, o.alpha, o.limit), constexprs, 4)


def bias_gradient(a: Tensor, weights: Tensor | None, like: Tensor, groups: Groups, share: int) -> Tensor:
    out = torch.empty_like(like, memory_format=torch.contiguous_format)
    about = tuple(out.shape), share, a.stride(0)
    launch(bias_plan, about, (a, weights, out, groups.order, groups.offsets))
    return out


def bias_plan(shape: Strides, share: int, a_row: int) -> Plan:
    E, N = shape
    constexprs = dict(N=N, SHARE=share, A_ROW=a_row, BLOCK_N=64, BLOCK_M=32)
    return Plan(grouped_sum_kernel, E * -(-N // 64), (), constexprs, 4)


def combine(y: Tensor, weights: Tensor | None, experts: Tensor, E: int, like: Tensor) -> Tensor:
    out = torch.empty_like(like, memory_format=torch.contiguous_format)
    T, N = out.shape
    if T:
        launch(combine_plan, (T, E, N, experts.shape[1]), (y, weights, experts, out))
    return out


def combine_plan(T: int, E: int, N: int, topk: int) -> Plan:
    block_n = min(1024, max(16, power_of_two(N)))
    constexprs = dict(E=E, N=N, TOPK=topk, BLOCK_T=1, BLOCK_N=block_n)
    return Plan(combine_kernel, T * -(-N // block_n), (T,), constexprs, 4)


def scattered_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, weights: Tensor | None, experts: Tensor, order: Tensor,
    offsets: Tensor, tile_expert: Tensor, tile_row: Tensor, options: ScatterOptions,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The result, and the rows that were summed to it where there are ``weights``."""
    o, groups = options, Groups(order, offsets, tile_expert, tile_row)
    w = weight.mT if o.transposed else weight
    out = x.new_empty if weights is not None else x.new_zeros  # rows of no expert are not written
    y = product(
        x, w, groups, share=0 if o.grouped_in else o.k, scatter=not o.grouped_out, bias=bias,
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
            rows = y.view(*weights.shape, y.shape[-1]).float()  # type: ignore[union-attr]
            dweights = torch.where(valid, (rows * grad.unsqueeze(1)).sum(-1), 0.0).to(weights.dtype)
        grad = (grad.unsqueeze(1) * weights.unsqueeze(-1)).to(x.dtype).flatten(0, 1)
    share = 0 if o.grouped_out else 1
    share_x = 0 if o.grouped_in else o.k
    if of_x:
        out = x.new_zeros((len(order), w.shape[2])) if o.grouped_in else None
        dx = product(grad, w.mT, groups, share=share, scatter=not o.grouped_in, out=out)
        if not o.grouped_in:
            dx = combine(dx, None, experts, len(w), x)
    if of_weight:
        dw = outer(grad, x, weight, groups, share_a=share, share_b=share_x, transposed=o.transposed)
    if of_bias:
        db = bias_gradient(grad, None, bias, groups, share)  # type: ignore[arg-type]
    return dx, dw, db, dweights
