"""Grouped GEMM: one GEMM per expert. The kernel gathers the rows as it reads them and scatters them as it writes them.

`expert_mlp` and `scattered_linear` call it. `token_sort` has sorted the token-expert assignments. The rows of an
operand are in the order of the assignments, and SHARE consecutive assignments have the same row. SHARE is 0 if the rows
are sorted by expert.

Bytes moved: every row once for each tile of columns, every expert's weight once for each of its tiles of rows, the
result once. The speed of the tensor cores is the limit. With few rows per expert, it is reading the weights: the kernel
then reads the codes of a quantized weight and decodes them itself.
"""

from math import gcd
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from onepass.autotune.own import choose
from onepass.core.moe_options import ExpertOptions, Groups, Product
from onepass.core.quantized import Weight, WeightFormat
from onepass.kernels import layout
from onepass.kernels.decode import SEGMENT, Encoding, code_of, codes_of, decode_tile
from onepass.kernels.decoded_experts import decoded_chunks
from onepass.kernels.expert_rows import activate
from onepass.kernels.launch import Flat, Out, Plan, Rows, Strided, launch
from onepass.kernels.layout import power_of_two
from onepass.kernels.row_gemm import place_of, separate
from onepass.kernels.token_sort import FIELDS, lengths_of_lists, rows_of_tile

try:
    from onepass.kernels.grouped_gemm_hopper import hopper_plan, hopper_reads
except ImportError:  # Gluon is an experimental part of Triton

    def hopper_reads(*_: Any, **__: Any) -> None:  # type: ignore[misc]
        """Refuse all products."""


Adapter = tuple[Tensor, Tensor]
PLAIN = ExpertOptions()
# By the rows of a tile: columns and K of a tile, stages, warps, programs per multiprocessor, of a kernel that decodes.
# Measured on an H100. With more rows per expert than the largest key, it is faster to decode the weight first.
DECODING = {16: (64, 128, 3, 4, 8), 32: (128, 64, 4, 4, 8), 64: (128, 64, 3, 4, 4), 128: (256, 64, 3, 8, 1)}
MOST_OF_SEGMENT = 64  # codes that are read at once
RANK = "lora (lora_gate_up, lora_down): expected a rank that fits into {} bytes of shared memory, got {}"


class WeightStrides(NamedTuple):
    """The strides of a weight ``(E, N, K)``."""

    E: int
    N: int
    K: int


@triton.jit
def load_weight(
    w, descriptor, e, k0, n0, column, inside, K: tl.constexpr, COLUMNS: tl.constexpr, STRIDES: tl.constexpr,
    BLOCK_K: tl.constexpr, WIDTH: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """``w[e, column, k0 : k0 + BLOCK_K]``, transposed to ``[BLOCK_K, WIDTH]``; zeros beyond K."""
    if TMA == "K":
        return tl.reshape(descriptor.load([e, 0, n0, k0]), (WIDTH, BLOCK_K)).T
    elif TMA == "N":
        return tl.reshape(descriptor.load([e, k0, n0]), (BLOCK_K, WIDTH))
    else:
        k = k0 + tl.arange(0, BLOCK_K)
        mask = inside[None, :]
        if K % BLOCK_K != 0:
            mask = mask & (k[:, None] < K)
        if K * STRIDES.K + COLUMNS * STRIDES.N >= 2**31:
            k, column = k.to(tl.int64), column.to(tl.int64)
        place = e.to(tl.int64) * STRIDES.E + k[:, None] * STRIDES.K + column[None, :] * STRIDES.N
        return tl.load(w + place, mask=mask, other=0.0)


@triton.jit(do_not_specialize=["tiles", "group", "first", "chunk"])
def grouped_gemm_kernel(
    x: "Rows", w: "Strided", low: "Flat", lora: "Strided", bias: "Flat", weights: "Flat", h: "Out", out: "Out",
    order: "Flat", offsets: "Flat",
    tile_list: "Flat", scales: "Flat", outer_scales: "Flat", table: "Flat", offset: "Flat",
    codes: "Flat",
    tiles: tl.int32, group: tl.int32, first: tl.int32, chunk: tl.int32, scale: tl.float32, alpha: tl.float32,
    limit: tl.float32,
    E: tl.constexpr, BLOCK_E: tl.constexpr, N: tl.constexpr, K: tl.constexpr, R: tl.constexpr, ACTIVATION: tl.constexpr,
    INTERLEAVED: tl.constexpr, SHARE: tl.constexpr, SCATTER: tl.constexpr, X_ROW: tl.constexpr, W_STRIDES: tl.constexpr,
    LORA_STRIDES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, CODE: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """``y = x @ w[e]ᵀ + low @ lora[e]ᵀ + bias[e]`` for the rows of every expert e, and ``out = scale·y``,
    times the routing weight of each row if there are any.

    With an ACTIVATION, the COLUMNS of y are gate and up, N each, and ``out = activate(gate, up)``.

    Inputs: ``x`` ``(rows, K)`` and ``w`` ``(chunk, COLUMNS, K)``, of the experts from ``first`` on, whose rows alone
    are computed (all E of them if BLOCK_E is 0); the rows ``low`` ``(assignments, R)``, sorted by expert, and weights
    ``lora`` ``(E, COLUMNS, R)`` of a LoRA adapter, or None; ``bias`` ``(E, COLUMNS)`` or None; ``weights``, one of each
    assignment, or None; the fields of `Groups`.
    With a CODE, ``w`` are the codes of a quantized weight, and the arguments after these are as in `decode_kernel`.
    W_STRIDES is None for a quantized weight, and LORA_STRIDES without an adapter.
    Outputs: ``out`` ``(assignments, N)``, in the order of the assignments if SCATTER, else sorted by expert. With an
    ACTIVATION, ``h`` ``(assignments, COLUMNS)``, sorted by expert, is y, unless it is None.
    Bytes moved: see the module docstring.

    A program may compute several tiles, and loads the operands of the next while it stores a result. TMA names the
    dimension in which ``w`` is contiguous if its tiles are loaded by descriptors, and is empty otherwise. PTX says
    whether instructions of NVIDIA GPUs may be used.
    """
    N_TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    COLUMNS: tl.constexpr = N if ACTIVATION == "" else 2 * N
    WIDTH: tl.constexpr = BLOCK_N if ACTIVATION == "" else 2 * BLOCK_N
    HALVES: tl.constexpr = 1 if ACTIVATION == "" or INTERLEAVED else 2
    PART: tl.constexpr = WIDTH // HALVES
    if TMA == "K":
        descriptor = tl.make_tensor_descriptor(
            w, [chunk, HALVES, COLUMNS // HALVES, K], [W_STRIDES.E, COLUMNS // HALVES * W_STRIDES.N, W_STRIDES.N, 1],
            [1, HALVES, PART, BLOCK_K],
        )  # fmt: skip
    elif TMA == "N":
        descriptor = tl.make_tensor_descriptor(
            w, [chunk, K, COLUMNS], [W_STRIDES.E, W_STRIDES.K, 1], [1, BLOCK_K, WIDTH]
        )
    else:
        descriptor = w
    encoding = Encoding(w, scales, outer_scales, table, offset, codes)
    if CODE is not None:  # noqa: SIM102  (the first is known when the kernel is compiled)
        if CODE.FORMAT == "table":
            encoding = Encoding(w, scales, outer_scales, table, offset, codes, tl.load(codes + tl.arange(0, 16)))
    tile0 = 0
    if BLOCK_E > 0:  # the tiles of these experts, counted as `token_sort` does
        e = tl.arange(0, BLOCK_E)
        rows = tl.load(offsets + e + 1, mask=e < E, other=0) - tl.load(offsets + e, mask=e < E, other=0)
        of_expert = tl.cdiv(rows, BLOCK_M)
        tile0 = tl.sum(tl.where(e < first, of_expert, 0))
        tiles = tl.sum(tl.where((e >= first) & (e < first + chunk), of_expert, 0))
    for work in tl.range(tl.program_id(0), tiles * N_TILES, tl.num_programs(0), flatten=True):
        tile, n_tile = place_of(work, tiles, N_TILES, group)
        tile += tile0
        expert = tl.load(tile_list + FIELDS * tile)
        if expert < E:
            row = tl.load(tile_list + FIELDS * tile + 1) + tl.arange(0, BLOCK_M)
            there = row < tl.load(tile_list + FIELDS * tile + 2)
            assignment = tl.load(order + row, mask=there, other=0)
            source = (assignment // SHARE if SHARE > 0 else row).to(tl.int64)
            at_row = row.to(tl.int64)[:, None]
            # A tile has gate and up of the same output columns: two ranges of columns, or one if INTERLEAVED.
            n0 = n_tile * PART
            column = n0 + tl.arange(0, WIDTH) % PART
            inside = column < COLUMNS // HALVES
            column += tl.arange(0, WIDTH) // PART * (COLUMNS // HALVES)
            acc = tl.zeros((BLOCK_M, WIDTH), tl.float32)
            if bias is not None:
                of_columns = tl.load(bias + expert.to(tl.int64) * COLUMNS + column, mask=inside, other=0.0)
                acc = separate(acc + of_columns[None, :].to(tl.float32), PTX)
            if R > 0:
                r = tl.arange(0, BLOCK_R)[None, :]
                adapted = tl.load(low + at_row * R + r, mask=there[:, None] & (r < R), other=0.0)
                adapter = load_weight(
                    lora, lora, expert, 0, n0, column, inside, R, COLUMNS, LORA_STRIDES, BLOCK_R, WIDTH, ""
                )
                acc = tl.dot(adapted, adapter, acc, input_precision=PRECISION)
            for k0 in tl.range(0, K, BLOCK_K, num_stages=STAGES):
                k = (k0 + tl.arange(0, BLOCK_K))[None, :]
                mask = there[:, None] if K % BLOCK_K == 0 else there[:, None] & (k < K)
                a = tl.load(x + source[:, None] * X_ROW + k, mask=mask, other=0.0)
                if CODE is None:
                    b = load_weight(
                        w,
                        descriptor,
                        expert - first,
                        k0,
                        n0,
                        column,
                        inside,
                        K,
                        COLUMNS,
                        W_STRIDES,
                        BLOCK_K,
                        WIDTH,
                        TMA,
                    )
                else:
                    b = decode_tile(encoding, expert.to(tl.int64), k0, n0, CODE, HALVES, BLOCK_K, WIDTH)
                    b = b.to(x.dtype.element_ty)
                acc = tl.dot(a, b, acc, input_precision=PRECISION)

            if ACTIVATION == "":
                y = scale * acc
            else:
                if h is not None:
                    at = h + at_row * COLUMNS + column[None, :]
                    tl.store(at, acc.to(h.dtype.element_ty), mask=there[:, None] & inside[None, :])
                if HALVES == 2:
                    gate, up = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, BLOCK_N)), (0, 2, 1)))
                else:
                    gate, up = tl.split(tl.reshape(acc, (BLOCK_M, BLOCK_N, 2)))
                y, _, _ = activate(gate, up, alpha, limit, ACTIVATION, PTX)
            if weights is not None:
                y *= tl.load(weights + assignment, mask=there, other=0.0)[:, None]
            n = (n_tile * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
            to = assignment.to(tl.int64)[:, None] if SCATTER else at_row
            tl.store(out + to * N + n, y.to(out.dtype.element_ty), mask=there[:, None] & (n < N))


def grouped_gemm(
    x: Tensor,
    w: Weight,
    groups: Groups,
    options: ExpertOptions = PLAIN,
    *,
    share: int = 0,
    scatter: bool = False,
    glu: bool = False,
    adapter: Adapter | None = None,
    scale: float = 1.0,
    bias: Tensor | None = None,
    weights: Tensor | None = None,
    h: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Launch `grouped_gemm_kernel`, and return ``out``. ``w`` and the weights of an adapter may have any strides.

    A quantized ``w`` is decoded by the kernel itself, or beforehand for many rows: a chunk of experts at a time, for
    each of which the kernel is launched.

    Args:
        share: how many consecutive assignments have the same row of ``x``; 0 if the rows are sorted by expert.
        scatter: whether ``out`` is in the order of the assignments instead of sorted by expert.
        glu: whether the columns of ``w`` are gate and up, to which the activation of ``options`` is applied.
        adapter: the rows ``(assignments, R)`` and weights ``(E, N, R)`` of a LoRA adapter.
        weights: what the row of each assignment is multiplied by, float32, in the order of the assignments.
        h: is overwritten with the rows before the activation.
    """
    E, N, K = w.shape
    assignments = len(groups.order)
    N = N // 2 if glu else N
    out = x.new_empty((assignments, N)) if out is None else out
    if not assignments:
        return out
    halves = 2 if glu and not options.interleaved else 1
    low, lora = adapter or (None, None)
    rank, lora_strides = (0, ()) if lora is None else (lora.shape[2], lora.stride())
    product = Product(
        assignments, lengths_of_lists(assignments, E)[0], E, N, K, rank, share, scatter, glu, scale, options,
        x.stride(0), lora_strides, x.element_size(), x.device,
    )  # fmt: skip
    others, tiles = (low, lora, bias, weights, h, out, groups.order), (groups.offsets, groups.tile_list)
    if not isinstance(w, Tensor) and is_decoded_in_loop(w.format, assignments, halves):
        about = product, w.format._replace(max_memory=0)
        launch(decoding_plan, about, (x, w.data, *others, *tiles, *w.parts, codes_of(w.format.name, w.device)))
        return out
    for first, part in [(0, w)] if isinstance(w, Tensor) else decoded_chunks(w, groups):
        # A tile has two ranges of columns, gate and up. One load by a descriptor covers both only if K is contiguous.
        tma = layout.tma_dimension(part, 2, 1, only_k=halves == 2)
        if len(part) == E and (reads := hopper_reads(product, x, part, adapter, tma, halves == 2, (out, h))):
            launch(hopper_plan, (product, *reads), (x, part, *others, groups.tile_list))
            continue
        launch(gemm_plan, (product, part.stride(), tma, (first, len(part))), (x, part, *others, *tiles, *(None,) * 5))
    return out


def is_decoded_in_loop(f: WeightFormat, assignments: int, halves: int) -> bool:
    """Whether the kernel decodes a weight itself: few rows an expert, and enough codes that can be read at once."""
    segment = gcd(code_of(f, SEGMENT).LENGTH, f.columns // (halves if f.flipped else 1))
    return assignments <= max(DECODING) * f.experts and f.columns > 0 and segment == SEGMENT


def gemm_plan(p: Product, w_strides: tuple[int, ...], tma: str, chunk: tuple[int, int]) -> Plan:
    """The launch of `grouped_gemm_kernel`, for a chunk of experts: the first, and how many the weight has.

    Raises:
        ValueError: the LoRA rank does not fit into shared memory.
    """
    E, N, K, element = p.E, p.N, p.K, p.element
    same = same_constexprs(p)
    block_m, block_k, block_r = same["BLOCK_M"], max(16, min(power_of_two(K), 128 // element)), same["BLOCK_R"]
    products = 2 if p.glu else 1
    blocks = block_m, block_k, block_r if p.R else 0
    block_n, of_stage, most = tile_that_fits(N, products, blocks, element, bool(tma))
    if most < 1:
        raise ValueError(RANK.format(layout.shared_memory(), p.R))
    tiles_of_expert = power_of_two(p.assignments // (E * block_m))
    rule = dict(STAGES=min(2 + products, most), GROUP=min(16, tiles_of_expert))
    key = {"rows": p.assignments, "experts": E, "columns": N, "inner": K, "read": "glu" if p.glu else "plain"}
    numbers = choose(grouped_gemm_kernel, key | layout.elements(element), rule)
    stages = min(numbers["STAGES"], most)
    constexprs = same | dict(
        BLOCK_E=power_of_two(E) if chunk[1] < E else 0, W_STRIDES=WeightStrides(*w_strides), BLOCK_N=block_n,
        BLOCK_K=block_k, STAGES=stages, TMA=tma, CODE=None,
    )  # fmt: skip
    at_once = max(1, min(4, layout.shared_memory() // (of_stage * stages)))
    programs = min(p.tiles * -(-N // block_n), at_once * layout.multiprocessors(p.device))
    warps = 8 if block_m * block_n * products * element >= 128 * 128 * 2 else 4
    given = p.tiles, numbers["GROUP"], *chunk, p.scale, p.options.alpha, p.options.limit
    return Plan(grouped_gemm_kernel, programs, given, constexprs, warps)


def decoding_plan(p: Product, f: WeightFormat) -> Plan:
    """The launch of `grouped_gemm_kernel` with a quantized weight that it decodes.

    Raises:
        ValueError: the LoRA rank does not fit into shared memory.
    """
    element, products = p.element, 2 if p.glu else 1
    halves = 1 if p.options.interleaved else products
    same = same_constexprs(p)
    block_m, of_rank = same["BLOCK_M"], same["BLOCK_R"] * element if p.R else 0
    width, block_k, stages, warps, at_once = DECODING[block_m]
    block_k = max(16, min(power_of_two(p.K), 2 * block_k // element))
    widest = 256 if layout.compute_capability() == 90 else 128  # limited by registers
    width = max(16 * products, min(products * power_of_two(p.N), 2 * width // element, widest))

    def needed() -> int:
        """Bytes of shared memory: rows and codes of each stage, the decoded tile, and an adapter."""
        of_stages = stages * block_k * (block_m * element + width)
        return of_stages + width * block_k * element + (block_m + width) * of_rank

    while needed() > layout.shared_memory() and (width > 16 * products or stages > 1):
        if width > 16 * products:
            width //= 2
        else:
            stages -= 1
    if needed() > layout.shared_memory():
        raise ValueError(RANK.format(layout.shared_memory(), p.R))
    most = gcd(MOST_OF_SEGMENT, width // halves, f.columns // halves) if f.flipped else min(MOST_OF_SEGMENT, block_k)
    constexprs = same | dict(
        BLOCK_E=0, W_STRIDES=None, BLOCK_N=width // products, BLOCK_K=block_k, STAGES=stages, TMA="",
        CODE=code_of(f, most, f.flipped),
    )  # fmt: skip
    programs = min(p.tiles * -(-p.N * products // width), at_once * layout.multiprocessors(p.device))
    given = p.tiles, 1, 0, p.E, p.scale, p.options.alpha, p.options.limit
    return Plan(grouped_gemm_kernel, programs, given, constexprs, warps)


def same_constexprs(p: Product) -> dict[str, Any]:
    """The constants of `grouped_gemm_kernel` that do not depend on how the weight is read."""
    o = p.options
    return dict(
        E=p.E, N=p.N, K=p.K, R=p.R, ACTIVATION=o.activation if p.glu else "", INTERLEAVED=o.interleaved,
        SHARE=p.share, SCATTER=p.scatter, X_ROW=p.x_row,
        LORA_STRIDES=WeightStrides(*p.lora_strides) if p.lora_strides else None,
        BLOCK_M=rows_of_tile(p.assignments, p.E), BLOCK_R=max(16, power_of_two(p.R)), PRECISION=layout.precision(),
        PTX=layout.compute_capability() > 0,
    )  # fmt: skip


def tile_that_fits(
    N: int, products: int, blocks: tuple[int, int, int], element: int, tma: bool
) -> tuple[int, int, int]:
    """Columns of a tile of the result, bytes of a pipeline stage, and how many stages fit beside the adapter."""
    block_m, block_k, block_r = blocks
    hopper = layout.compute_capability() == 90
    widest = (256 if tma and (hopper or products == 1) else 128) if element == 2 else 64  # limited by registers
    block_n = max(16, min(power_of_two(N), widest // products))
    while True:
        column_bytes = (block_m + products * block_n) * element
        most = (layout.shared_memory() - column_bytes * block_r) // (column_bytes * block_k)
        if most >= 2 or block_n == 16:
            return block_n, column_bytes * block_k, most
        block_n //= 2
