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
from onepass.kernels.online_softmax import (
    FLOOR,
    LOG2E,
    LOWEST,
    Reading,
    State,
    empty_state,
    merge,
    temperature_of,
    transform,
    update,
    wanted,
)
from onepass.kernels.row_gemm import GROUP, Gemm, operands, place_of, product, with_aligned_rows
from onepass.kernels.row_programs import unmasked
from onepass.kernels.softmax_fields import NOWHERE, statistics_of, write_state, write_statistics

ROWS, TILES = 16, 64  # of a program that merges: rows, and tiles of columns at a time


@triton.jit(
    do_not_specialize=["rows"],
    do_not_specialize_on_alignment=["bias", "index", "temperature", "states", "selected", "first_max"],
)
def linear_statistics_kernel(
    a: "Rows", b: "Strided", bias: "Flat", index: "Flat", temperature: "Flat", states: "Out",
    selected: "Out", first_max: "Out",
    rows: tl.int32, inner: tl.float32, outer: tl.float32, sharpness: tl.float32,
    GEMM: tl.constexpr, GROUP: tl.constexpr, ROUND: tl.constexpr, TWICE: tl.constexpr, PACKED: tl.constexpr,
    WANTED: tl.constexpr,
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
    N: tl.constexpr = GEMM.N
    BLOCK_M: tl.constexpr = GEMM.BLOCK_M
    BLOCK_N: tl.constexpr = GEMM.BLOCK_N
    M_TILES = tl.cdiv(rows, BLOCK_M)
    N_TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    QUARTER: tl.constexpr = BLOCK_N // 4
    of_a, of_b = operands(a, b, rows, GEMM)
    numbers = N_TILES * rows.to(tl.int64)
    for work in tl.range(tl.program_id(0), M_TILES * N_TILES, tl.num_programs(0), flatten=True):
        m_tile, n_tile = place_of(work, M_TILES, N_TILES, GROUP)
        row = m_tile * BLOCK_M + tl.arange(0, BLOCK_M)
        z = product(of_a, of_b, rows, m_tile * BLOCK_M, n_tile * BLOCK_N, GEMM)
        present = row < rows
        row_inner, row_outer = inner, outer
        if temperature is not None:
            own = temperature_of(temperature, row, present)[:, None]
            row_inner, row_outer = inner if WANTED.SOFTCAP else inner / own, outer / own
        column = row.to(tl.int64)
        if index is not None:
            column = tl.load(index + row, mask=present, other=-1).to(tl.int64) - n_tile * BLOCK_N
        here = present & (column >= 0) & (column < min(N - n_tile * BLOCK_N, BLOCK_N))
        column = tl.where(here, column, -1).to(tl.int32)
        reading = Reading(row_inner, row_outer, sharpness, None, 0.0)
        chosen = tl.zeros([BLOCK_M], tl.float32)
        state, first = empty_state(chosen), tl.full([BLOCK_M], NOWHERE, tl.int32)
        # In four parts, whose temporaries take fewer registers.
        left, right = halves(z, BLOCK_M, BLOCK_N)
        part0, part1 = halves(left, BLOCK_M, BLOCK_N // 2)
        part2, part3 = halves(right, BLOCK_M, BLOCK_N // 2)
        parts = part0, part1, part2, part3
        for n in tl.static_range(4):
            place = n * QUARTER + tl.arange(0, QUARTER)
            x = logits_of(parts[n], bias, n_tile * BLOCK_N + place, a.dtype.element_ty, N, ROUND, TWICE, PACKED)
            state, first, chosen = read_columns(x, place, n_tile * BLOCK_N, state, first, chosen, column, reading, N,
                                                BLOCK_N, WANTED, index is not None)  # fmt: skip
        m, s, t, _w, _c, q, u = state
        to = states + n_tile.to(tl.int64) * rows + row
        tl.store(to, m, mask=present)
        tl.store(to + numbers, s, mask=present)
        if WANTED.EXPECTED:
            tl.store(to + 2 * numbers, t, mask=present)
        if WANTED.TEMPERED:
            tl.store(to + 3 * numbers, q, mask=present)
        if WANTED.MEAN:
            tl.store(to + 4 * numbers, u, mask=present)
        if index is not None:
            tl.store(selected + row, chosen, mask=here)
            if WANTED.TOP1:
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
def logits_of(
    z, bias, n, DTYPE: tl.constexpr, N: tl.constexpr, ROUND: tl.constexpr, TWICE: tl.constexpr, PACKED: tl.constexpr
):
    """The logits of the columns ``n``, from the product ``z``."""
    if bias is not None:
        if TWICE:
            z = rounded(z, DTYPE, PACKED)
        z += tl.load(bias + n, mask=n < N, other=0.0)[None, :].to(tl.float32)
    return rounded(z, DTYPE, PACKED) if ROUND else z


@triton.jit
def read_columns(
    x, place, n0, state, first, chosen, column, reading, N: tl.constexpr, BLOCK_N: tl.constexpr, WANTED: tl.constexpr,
    INDEX: tl.constexpr,
):  # fmt: skip
    """Add the columns ``place`` of the tile that begins at ``n0`` to the ``state`` of every row.

    ``chosen`` is the logit of ``column``, and ``first`` the first column of the largest logit so far.
    """
    z = transform(x, reading.inner, reading.outer, WANTED.SOFTCAP)
    m, s, t, w, c, q, u = state
    if N % BLOCK_N != 0:
        inside = (n0 + place < N)[None, :]
        if WANTED.MEAN:
            u += tl.sum(tl.where(inside, z, 0.0), axis=1)
        z = tl.where(inside, z, -float("inf"))
    elif WANTED.MEAN:
        u += tl.sum(z, axis=1)
    state = update(State(m, s, t, w, c, q, u), z, 0.0, reading.sharpness, WANTED)
    if INDEX:
        chosen += tl.sum(tl.where(place[None, :] == column[:, None], z, 0.0), axis=1)
    if WANTED.TOP1:
        largest = tl.min(tl.where(z == state.m[:, None], place[None, :], NOWHERE), axis=1)
        first = tl.where(state.m > m, largest, first)
    return state, first, chosen


@triton.jit
def load_numbers(states, numbers, rows, tile, row, inside, number, other):
    """A number of the states of some tiles and rows, ``[tiles, rows]``."""
    return tl.load(
        states + number * numbers + tile[:, None].to(tl.int64) * rows + row[None, :], mask=inside, other=other
    )


@triton.jit(
    do_not_specialize=["rows", "N"],
    do_not_specialize_on_alignment=["index", "row_mask", "z_selected", "first_max", "packed", "selected", "is_top1"],
)
def merge_tiles_kernel(
    states: "Flat", index: "Flat", row_mask: "Flat", z_selected: "Flat", first_max: "Flat", packed: "Out",
    selected: "Out", is_top1: "Out",
    rows: tl.int32, N: tl.int32, sharpness: tl.float32,
    N_TILES: tl.constexpr, BLOCK_N: tl.constexpr, WANTED: tl.constexpr, SHARD: tl.constexpr, ROWS: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """The statistics of every row from the states of its tiles of columns, in their order.

    Inputs: ``states``, ``z_selected`` and ``first_max`` of `linear_statistics_kernel`; ``row_mask`` ``(rows,)`` or
    None.
    Outputs: as of `softmax_statistics_kernel`; if SHARD, ``packed`` is the state of each row of the N columns.
    Bytes moved: the states in, the statistics out.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    present = row < rows
    active = unmasked(row_mask, row, rows, 0)
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
        if WANTED.EXPECTED:
            t1 = load_numbers(states, numbers, rows, tile, row, inside, 2, 0.0)
            t = alpha * (t + s * back) + alpha1 * (t1 + s1 * back1)
        if WANTED.TEMPERED:
            q1 = load_numbers(states, numbers, rows, tile, row, inside, 3, 0.0)
            q = tl.exp2(back * (sharpness * LOG2E)) * q + tl.exp2(back1 * (sharpness * LOG2E)) * q1
        if WANTED.MEAN:
            u += load_numbers(states, numbers, rows, tile, row, inside, 4, 0.0)
        m, s = new, alpha * s + alpha1 * s1
    highest = m == tl.max(m, axis=0)[None, :]
    of_max = tl.min(tl.where(highest & (s > 0), first, N_TILES), axis=0)
    m, s, t, w, c, q, u = merge(State(m, s, t, zeros, zeros, q, u), sharpness, WANTED)
    relative = m
    inside = active
    top1 = active
    if index is not None:
        column = tl.load(index + row, mask=present, other=-1).to(tl.int64)
        inside = active & (column >= 0) & (column < N)
        relative = tl.load(z_selected + row, mask=inside, other=0.0) - m
        if WANTED.TOP1:
            top1 = inside & (column // BLOCK_N == of_max)
            top1 = top1 & (tl.load(first_max + row, mask=inside, other=0) != 0) & (relative >= 0)
    if SHARD:
        to = write_state(packed, row, rows, State(m, s, t, w, c, q, u), present, WANTED)
        if index is not None:
            tl.store(to, tl.where(inside, relative, float("inf")), mask=present)
            if WANTED.TOP1:
                tl.store(to + rows, top1.to(tl.float32), mask=present)
    else:
        if index is not None:
            s = tl.where(inside | ~active, s, float("nan"))
        s = tl.where(s > 0, s, float("nan"))
        statistics = statistics_of(State(m, s, t, w, c, q, u / N))
        write_statistics(packed, row, rows, statistics, WANTED, active, present)
        if index is not None:
            relative += s - s
            if WANTED.LOG_PROBS:
                relative -= statistics.log_normalizer
            tl.store(selected + row, tl.where(active, relative, 0.0), mask=present)
            if WANTED.TOP1:
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
    return simple and fast and dtype.itemsize == 2 and b.dtype == dtype and layout.tma_dimension(b, 0, 1) != ""


def state_bytes(vocab: int, options: Options) -> int:
    """Bytes of workspace per row."""
    return 4 * numbers_of(options) * -(-vocab // BLOCK_N)


def numbers_of(options: Options) -> int:
    """How many numbers of a state are stored: all up to the last that is wanted."""
    what = wanted(options)
    return 5 if what.MEAN else 4 if what.TEMPERED else 3 if what.EXPECTED else 2


BLOCK_M, BLOCK_N, BLOCK_K, STAGES = 128, 256, 64, 4


def plan_for(
    sizes: tuple[int, int, int], strides: tuple[int, int, int], tma: str, device: torch.device, options: Options,
    rounds: bool, twice: bool, top1: bool,
) -> Plan:  # fmt: skip
    """The launch of `linear_statistics_kernel`. Nothing but the number of programs depends on the number of rows."""
    rows, N, K = sizes
    gemm = Gemm(N, K, *strides, tma, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, layout.precision())
    # Without what the kernel does not read, so that it is compiled once for both.
    constexprs = dict(
        GEMM=gemm, GROUP=GROUP, ROUND=rounds, TWICE=twice, PACKED=layout.compute_capability() >= 80,
        WANTED=wanted(options, top1)._replace(LOG_PROBS=False),
    )  # fmt: skip
    programs = min(-(-rows // BLOCK_M) * -(-N // BLOCK_N), layout.multiprocessors(device))
    numbers = (rows, *options.transform.factors(), options.sharpness)
    return Plan(linear_statistics_kernel, programs, numbers, constexprs, 8)


def merge_plan_for(rows: int, N: int, options: Options, top1: bool, shard: bool) -> Plan:
    """The launch of `merge_tiles_kernel`."""
    constexprs = dict(
        N_TILES=-(-N // BLOCK_N), BLOCK_N=BLOCK_N, WANTED=wanted(options, top1, reads_logits=False), SHARD=shard,
        ROWS=ROWS, TILES=TILES,
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
    states = a.new_empty((numbers_of(options), -(-N // BLOCK_N), rows), dtype=torch.float32)
    selected = None if index is None else states.new_empty(rows)
    first_max = states.new_empty(rows, dtype=torch.int32) if top1 else None
    tma = layout.tma_dimension(b, 0, 1)
    about = (rows, N, K), (a.stride(0), *b.stride()), tma, a.device, options, rounds, twice, top1
    launch(plan_for, about, (a, b, bias, index, temperature, states, selected, first_max))
    tensors = states, index, row_mask, selected, first_max, *results
    launch(merge_plan_for, (rows, N, options, top1, shard), tensors)
