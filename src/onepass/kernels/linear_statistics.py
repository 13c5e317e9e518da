"""Softmax statistics of a linear head in one launch: a GEMM whose program reads a tile of logits in its registers.

`logits.head` calls it where `supports_linear_statistics` says so, if no gradient of the logits is needed. Bytes moved:
those of the GEMM (see `kernels.row_gemm`), and a few numbers for every row and tile of columns, written and read once.
A GEMM followed by `softmax_statistics` writes and reads all logits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from onepass.core.options import Inputs, Options, Results
from onepass.kernels import layout
from onepass.kernels.launch import Flat, Out, Plan, Rows, Strided, launch
from onepass.kernels.merge_shards import store_fields
from onepass.kernels.online_softmax import FLOOR, LOG2E, LOWEST, merge, transform, update
from onepass.kernels.row_gemm import GROUP, operand_form, operands, place_of, product, with_aligned_rows
from onepass.kernels.softmax_fields import NOWHERE

ROWS, TILES = 16, 64  # of a program that merges: rows, and tiles of columns at a time


@triton.jit(
    do_not_specialize=["rows"],
    do_not_specialize_on_alignment=["bias", "index", "temperature", "states", "selected", "first_max"],
)
def linear_statistics_kernel(
    a: "Rows", b: "Strided", bias: "Flat", index: "Flat", temperature: "Flat", states: "Out",
    selected: "Out", first_max: "Out",
    rows: tl.int32, inner: tl.float32, outer: tl.float32, sharpness: tl.float32,
    N: tl.constexpr, K: tl.constexpr, A_ROW: tl.constexpr, B_K: tl.constexpr, B_N: tl.constexpr,
    TMA: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr, ROUND: tl.constexpr, TWICE: tl.constexpr,
    PACKED: tl.constexpr, SOFTCAP: tl.constexpr, EXPECTED: tl.constexpr, TEMPERED: tl.constexpr, MEAN: tl.constexpr,
    TOP1: tl.constexpr,
):  # fmt: skip
    """The state of every row of every tile of columns of the logits ``a @ b + bias``.

    Inputs: ``a`` ``(rows, K)``, ``b`` ``(K, N)``, ``bias`` ``(N,)``, ``index`` and ``temperature`` ``(rows,)``, each of
    the last three or None.
    Outputs: ``states`` ``(numbers, N / BLOCK_N, rows)``, of which those that are needed are written;
    ``selected`` ``(rows,)``, the logit of the index if it is in [0, N), and ``first_max`` ``(rows,)``, whether it is
    the first largest of its tile.
    ROUND says that logits are rounded to the dtype of ``a``, TWICE that they are also before the bias is added, PACKED
    that `rounded` may use instructions of an NVIDIA GPU.
    """
    M_TILES = tl.cdiv(rows, BLOCK_M)
    N_TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    QUARTER: tl.constexpr = BLOCK_N // 4
    of_a, of_b = operands(a, b, rows, N, K, A_ROW, B_K, B_N, TMA, BLOCK_M, BLOCK_N, BLOCK_K)
    numbers = N_TILES * rows.to(tl.int64)
    for work in tl.range(tl.program_id(0), M_TILES * N_TILES, tl.num_programs(0), flatten=True):
        m_tile, n_tile = place_of(work, M_TILES, N_TILES, GROUP)
        row = m_tile * BLOCK_M + tl.arange(0, BLOCK_M)
        z = product(of_a, of_b, rows, m_tile * BLOCK_M, n_tile * BLOCK_N, N, K, A_ROW, B_K, B_N, TMA, BLOCK_M,
                    BLOCK_N, BLOCK_K, STAGES, PRECISION)  # fmt: skip
        present = row < rows
        row_inner, row_outer = inner, outer
        if temperature is not None:
            own = tl.load(temperature + row, mask=present, other=1.0)
            own = tl.where((own > 0) & (own < float("inf")), own, float("nan"))[:, None]
            row_inner, row_outer = inner if SOFTCAP else inner / own, outer / own
        column = row.to(tl.int64)
        if index is not None:
            column = tl.load(index + row, mask=present, other=-1).to(tl.int64) - n_tile * BLOCK_N
        here = present & (column >= 0) & (column < min(N - n_tile * BLOCK_N, BLOCK_N))
        column = tl.where(here, column, -1).to(tl.int32)
        empty = tl.zeros([BLOCK_M], tl.float32)
        first = tl.full([BLOCK_M], NOWHERE, tl.int32)
        state = empty + LOWEST, empty, empty, empty, empty, empty, first
        # In four parts, whose temporaries take fewer registers.
        left, right = halves(z, BLOCK_M, BLOCK_N)
        part0, part1 = halves(left, BLOCK_M, BLOCK_N // 2)
        part2, part3 = halves(right, BLOCK_M, BLOCK_N // 2)
        parts = part0, part1, part2, part3
        for n in tl.static_range(4):
            state = read_columns(
                parts[n], n * QUARTER + tl.arange(0, QUARTER), n_tile * BLOCK_N, state, column, bias,
                row_inner, row_outer, sharpness, a.dtype.element_ty, N, BLOCK_N, ROUND, TWICE, PACKED, SOFTCAP,
                EXPECTED, TEMPERED, MEAN, index is not None, TOP1,
            )  # fmt: skip
        m, s, t, q, u, chosen, first = state
        to = states + n_tile.to(tl.int64) * rows + row
        tl.store(to, m, mask=present)
        tl.store(to + numbers, s, mask=present)
        if EXPECTED:
            tl.store(to + 2 * numbers, t, mask=present)
        if TEMPERED:
            tl.store(to + 3 * numbers, q, mask=present)
        if MEAN:
            tl.store(to + 4 * numbers, u, mask=present)
        if index is not None:
            tl.store(selected + row, chosen, mask=here)
            if TOP1:
                tl.store(first_max + row, (first == column).to(tl.int32), mask=here)


@triton.jit
def halves(z, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The left and the right half of the columns of a tile."""
    return tl.split(tl.permute(tl.reshape(z, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))


@triton.jit
def rounded(z, DTYPE: tl.constexpr, PACKED: tl.constexpr):
    """``z`` rounded to DTYPE. The instruction that rounds a pair of numbers takes an eighth of the time of two others.

    Those have the throughput of an exponential, of which there is one a logit.
    """
    if PACKED and tl.bfloat16 == DTYPE:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 pair, low, high;
            cvt.rn.bf16x2.f32 pair, $3, $2;
            shl.b32 low, pair, 16;
            and.b32 high, pair, 0xffff0000;
            mov.b32 $0, low;
            mov.b32 $1, high;
            }""", "=f,=f,f,f", [z], dtype=tl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    if PACKED and tl.float16 == DTYPE:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 pair;
            .reg .b16 low, high;
            cvt.rn.f16x2.f32 pair, $3, $2;
            mov.b32 {low, high}, pair;
            cvt.f32.f16 $0, low;
            cvt.f32.f16 $1, high;
            }""", "=f,=f,f,f", [z], dtype=tl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    return z.to(DTYPE).to(tl.float32)


@triton.jit
def read_columns(
    z, place, n0, state, column, bias, inner, outer, sharpness,
    DTYPE: tl.constexpr, N: tl.constexpr, BLOCK_N: tl.constexpr, ROUND: tl.constexpr, TWICE: tl.constexpr,
    PACKED: tl.constexpr, SOFTCAP: tl.constexpr, EXPECTED: tl.constexpr, TEMPERED: tl.constexpr, MEAN: tl.constexpr,
    INDEX: tl.constexpr, TOP1: tl.constexpr,
):  # fmt: skip
    """Add the columns ``place`` of the tile that begins at ``n0`` to the ``state`` of every row.

    The state is that of `kernels.online_softmax` without class weights, followed by the logit of ``column`` and by the
    first column of the largest logit so far.
    """
    m, s, t, q, u, chosen, first = state
    n = n0 + place
    if bias is not None:
        if TWICE:
            z = rounded(z, DTYPE, PACKED)
        z += tl.load(bias + n, mask=n < N, other=0.0)[None, :].to(tl.float32)
    if ROUND:
        z = rounded(z, DTYPE, PACKED)
    z = transform(z, inner, outer, SOFTCAP)
    if N % BLOCK_N != 0:
        inside = (n < N)[None, :]
        if MEAN:
            u += tl.sum(tl.where(inside, z, 0.0), axis=1)
        z = tl.where(inside, z, -float("inf"))
    elif MEAN:
        u += tl.sum(z, axis=1)
    before = m
    m, s, t, _w, _c, q, u = update(m, s, t, 0.0, 0.0, q, u, z, 0.0, sharpness, EXPECTED, False, TEMPERED, MEAN)
    if INDEX:
        chosen += tl.sum(tl.where(place[None, :] == column[:, None], z, 0.0), axis=1)
    if TOP1:
        largest = tl.min(tl.where(z == m[:, None], place[None, :], NOWHERE), axis=1)
        first = tl.where(m > before, largest, first)
    return m, s, t, q, u, chosen, first


@triton.jit
def load_numbers(states, numbers, rows, tile, row, inside, number, other):
    """A number of the states of some tiles and rows, ``[tiles, rows]``."""
    return tl.load(
        states + number * numbers + tile[:, None].to(tl.int64) * rows + row[None, :], mask=inside, other=other
    )


@triton.jit(
    do_not_specialize=["rows"],
    do_not_specialize_on_alignment=["index", "row_mask", "z_selected", "first_max", "packed", "selected", "is_top1"],
)
def merge_tiles_kernel(
    states: "Flat", index: "Flat", row_mask: "Flat", z_selected: "Flat", first_max: "Flat", packed: "Out",
    selected: "Out", is_top1: "Out",
    rows: tl.int32, N: tl.int32, sharpness: tl.float32,
    N_TILES: tl.constexpr, BLOCK_N: tl.constexpr, LOG_PROBS: tl.constexpr, EXPECTED: tl.constexpr,
    TEMPERED: tl.constexpr, MEAN: tl.constexpr, SHARD: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """The statistics of every row from the states of its tiles of columns, in their order.

    Inputs: ``states``, ``z_selected`` and ``first_max`` of `linear_statistics_kernel`; ``row_mask`` ``(rows,)`` or
    None.
    Outputs: as of `softmax_statistics_kernel`; if SHARD, ``packed`` is the state of each row of the N columns.
    Bytes moved: the states in, the statistics out.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    present = row < rows
    active = present
    if row_mask is not None:
        active = active & (tl.load(row_mask + row, mask=present, other=0) != 0)
    zeros = tl.zeros([TILES, ROWS], tl.float32)
    m, s, t, q, u = zeros + LOWEST, zeros, zeros, zeros, zeros
    first = tl.full([TILES, ROWS], N_TILES, tl.int32)
    numbers = N_TILES * rows.to(tl.int64)
    for tile0 in range(0, N_TILES, TILES):
        tile = tile0 + tl.arange(0, TILES)
        inside = (tile < N_TILES)[:, None] & active[None, :]
        m1 = load_numbers(states, numbers, rows, tile, row, inside, 0, LOWEST)
        s1 = load_numbers(states, numbers, rows, tile, row, inside, 1, 0.0)
        first = tl.where((m1 > m) | ((s == 0) & (s1 > 0)), tile[:, None], first)
        new = tl.maximum(m, m1)
        back, back1 = tl.maximum(m - new, FLOOR), tl.maximum(m1 - new, FLOOR)
        alpha, alpha1 = tl.exp2(back * LOG2E), tl.exp2(back1 * LOG2E)
        if EXPECTED:
            t1 = load_numbers(states, numbers, rows, tile, row, inside, 2, 0.0)
            t = alpha * (t + s * back) + alpha1 * (t1 + s1 * back1)
        if TEMPERED:
            q1 = load_numbers(states, numbers, rows, tile, row, inside, 3, 0.0)
            q = tl.exp2(back * (sharpness * LOG2E)) * q + tl.exp2(back1 * (sharpness * LOG2E)) * q1
        if MEAN:
            u += load_numbers(states, numbers, rows, tile, row, inside, 4, 0.0)
        m, s = new, alpha * s + alpha1 * s1
    highest = m == tl.max(m, axis=0)[None, :]
    of_max = tl.min(tl.where(highest & (s > 0), first, N_TILES), axis=0)
    m, s, t, _w, _c, q, u = merge(m, s, t, zeros, zeros, q, u, sharpness, EXPECTED, False, TEMPERED, MEAN)
    relative = m
    inside = active
    top1 = active
    if index is not None:
        column = tl.load(index + row, mask=present, other=-1).to(tl.int64)
        inside = active & (column >= 0) & (column < N)
        relative = tl.load(z_selected + row, mask=inside, other=0.0) - m
        if is_top1 is not None or first_max is not None:
            top1 = inside & (column // BLOCK_N == of_max)
            top1 = top1 & (tl.load(first_max + row, mask=inside, other=0) != 0) & (relative >= 0)
    if SHARD:
        to = packed + row
        tl.store(to, m, mask=present)
        tl.store(to + rows, s, mask=present)
        if EXPECTED:
            tl.store(to + 2 * rows, t, mask=present)
        AFTER: tl.constexpr = 2 + EXPECTED
        if TEMPERED:
            tl.store(to + AFTER * rows, q, mask=present)
        if MEAN:
            tl.store(to + (AFTER + TEMPERED) * rows, u, mask=present)
        if index is not None:
            to += (AFTER + TEMPERED + MEAN) * rows
            tl.store(to, tl.where(inside, relative, float("inf")), mask=present)
            if first_max is not None:
                tl.store(to + rows, top1.to(tl.float32), mask=present)
    else:
        if index is not None:
            s = tl.where(inside | ~active, s, float("nan"))
        s, void, log_normalizer = store_fields(packed, row, rows, present, active, m, s, t, 0.0, q, u / N, EXPECTED,
                                               False, TEMPERED, MEAN)  # fmt: skip
        if index is not None:
            relative += void
            if LOG_PROBS:
                relative -= log_normalizer
            tl.store(selected + row, tl.where(active, relative, 0.0), mask=present)
            if is_top1 is not None:
                tl.store(is_top1 + row, top1 & (s > 0), mask=present)


def supports_linear_statistics(dtype: torch.dtype, b: Tensor, inputs: Inputs, options: Options) -> bool:
    """Whether `linear_statistics` computes this, on a device where that is faster than a GEMM and another kernel.

    It has been measured on Hopper. There is at most one index per row, no support, no class weights, and an operand for
    TMA.
    """
    index = inputs.index
    simple = inputs.support is None and (index is None or index.dim() == 1) and not options.wants("weighted_logit")
    # Triton's interpreter multiplies the bits of bfloat16 numbers.
    fast = dtype == torch.float16 if layout.one_at_a_time() else layout.compute_capability() // 10 == 9
    return simple and fast and dtype.itemsize == 2 and b.dtype == dtype and bool(operand_form(b))


def state_bytes(vocab: int, options: Options) -> int:
    """Bytes of workspace per row."""
    return 4 * numbers_of(options)[1] * -(-vocab // BLOCK_N)


def numbers_of(options: Options) -> tuple[dict[str, bool], int]:
    """Which numbers of a state are needed, and how many are stored: all up to the last of these."""
    wanted = dict(
        EXPECTED=options.wants("expected_logit") or options.wants("entropy"),
        TEMPERED=options.wants("log_sum_sq_probs") or options.wants("tempered_log_normalizer"),
        MEAN=options.wants("mean_logit"),
    )  # fmt: skip
    return wanted, max([2] + [stored for stored, needed in zip((3, 4, 5), wanted.values()) if needed])


BLOCK_M, BLOCK_N, BLOCK_K, STAGES = 128, 256, 64, 4


def plan_for(
    sizes: tuple[int, int, int], strides: tuple[int, int, int], tma: str, device: torch.device, options: Options,
    rounds: bool, twice: bool, top1: bool,
) -> Plan:  # fmt: skip
    """The launch of `linear_statistics_kernel`. Nothing but the number of programs depends on the number of rows."""
    rows, N, K = sizes
    constexprs = dict(
        N=N, K=K, **dict(zip(("A_ROW", "B_K", "B_N"), strides)), TMA=tma, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N,
        BLOCK_K=BLOCK_K, GROUP=GROUP, STAGES=STAGES, PRECISION=layout.precision(), ROUND=rounds, TWICE=twice,
        PACKED=layout.compute_capability() >= 80, SOFTCAP=options.transform.softcap is not None,
        **numbers_of(options)[0], TOP1=top1,
    )  # fmt: skip
    programs = min(-(-rows // BLOCK_M) * -(-N // BLOCK_N), layout.multiprocessors(device))
    numbers = (rows, *options.transform.factors(), options.sharpness)
    return Plan(linear_statistics_kernel, programs, numbers, constexprs, 8)


def merge_plan_for(rows: int, N: int, options: Options, shard: bool) -> Plan:
    """The launch of `merge_tiles_kernel`."""
    constexprs = dict(
        N_TILES=-(-N // BLOCK_N), BLOCK_N=BLOCK_N, LOG_PROBS=options.wants("log_probs"),
        **numbers_of(options)[0], SHARD=shard, ROWS=ROWS, TILES=TILES,
    )  # fmt: skip
    return Plan(merge_tiles_kernel, triton.cdiv(rows, ROWS), (rows, N, options.sharpness), constexprs, 4)


def linear_statistics(
    a: Tensor, b: Tensor, bias: Tensor | None, inputs: Inputs, options: Options, rounds: bool, twice: bool,
    results: Results, shard: bool = False,
) -> None:  # fmt: skip
    """Write the `softmax_statistics` of the logits ``a @ b + bias`` to ``results``.

    Args:
        a: ``(rows, K)``, with a contiguous last dimension.
        b: ``(K, N)``, contiguous in one dimension.
        rounds: whether the logits are rounded to the dtype of the operands.
        twice: whether they are also rounded before the bias is added.
        results: as of `softmax_statistics`; if ``shard``, the first is the state of every row, and the only one.
    """
    (rows, K), N = a.shape, b.shape[1]
    if not rows:
        return
    a = with_aligned_rows(a)
    index, row_mask, _, temperature = inputs[:4]
    top1 = index is not None and options.wants("is_top1")
    states = a.new_empty((numbers_of(options)[1], -(-N // BLOCK_N), rows), dtype=torch.float32)
    selected = None if index is None else states.new_empty(rows)
    first_max = states.new_empty(rows, dtype=torch.int32) if top1 else None
    about = (rows, N, K), (a.stride(0), *b.stride()), operand_form(b), a.device, options, rounds, twice, top1
    launch(plan_for, about, (a, b, bias, index, temperature, states, selected, first_max))
    tensors = states, index, row_mask, selected, first_max, *results
    launch(merge_plan_for, (rows, N, options, shard), tensors)
