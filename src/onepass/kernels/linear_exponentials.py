"""The exponentials of the logits of a linear head, from which its gradients are computed without another pass.

The gradient of the log-prob of a class y with respect to the logits of a row is ``onehot(y) - exp(z) / Σ exp(z)``. The
usual way writes the logits, reads them and writes their gradient, since the normalizer of a row is known only when all
of its logits are. Here a GEMM writes exponentials instead, relative to a reference, which is computed before: the
largest of the row's logits of its own class and of the classes of the other rows in its block of 16 rows. Only one
exponential, that of the class, is written again when the normalizer is known. The rest of the gradient is a factor for
each row, by which `logits.gradients` multiplies the rows of the smaller matrices that the exponentials are multiplied
with. `logits.tiles` calls this.

If a row has a logit that is far larger than its reference, its exponentials could overflow. The maxima of the rows show
it. A second launch then computes the tiles of these rows again, relative to the maxima, and does nothing otherwise, so
that the CPU does not wait.

Bytes moved: those of the GEMM, see `linear_exponentials_hopper`, and for the references once more a row of the hidden
states and one of the weight for each row.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from onepass.core.options import Inputs, Options, Results
from onepass.kernels import layout
from onepass.kernels.launch import Flat, Out, Plan, Rows, Strided, launch
from onepass.kernels.linear_statistics import load_numbers
from onepass.kernels.online_softmax import LOG2E, LOWEST, wanted
from onepass.kernels.row_gemm import with_aligned_rows
from onepass.kernels.row_programs import unmasked
from onepass.kernels.softmax_fields import ENTROPY, EXPECTED_LOGIT, LOG_NORMALIZER, SHIFT, write_number

try:
    from onepass.kernels.hopper_tiles import SUPPORTED
    from onepass.kernels.linear_exponentials_hopper import Work, linear_exponentials_kernel, stages_in
except ImportError:  # Gluon is an experimental part of Triton
    SUPPORTED = False

FIELDS = {"log_probs", "shift", "log_normalizer", "expected_logit", "entropy", "is_top1"}  # that are computed
PART, PARTS, WIDTH = 64, 3, 256  # as in `hopper_tiles`
TILE_ROWS = PART * PARTS
# The largest logit of a row and its reference differ by at most so many powers of two. The sum of a row is then finite,
# and so is its inverse.
FARTHEST = tl.constexpr(80.0)
ROWS, BLOCK_K = 16, 256  # of `reference_kernel`
# Rows of a program of `merge_exponentials_kernel`, and tiles and logits of these that it reads or writes at once: few
# rows, so that there are programs for all multiprocessors, but whole sectors of memory.
MERGED, TILES, BLOCK = 16, 256, 256
# Of a head: with fewer, what is launched beside the GEMM takes longer than a pass over the logits (H200).
LEAST_LOGITS = 1 << 29


Places = tuple[int, int, int]  # numbers, not constants: a split follows from the number of valid rows


def places_of(out: Tensor, rest: Tensor | None) -> Places:
    """Where the columns of a result are: the first one in ``rest``, and the elements from a row to the next in both."""
    return out.shape[1], out.stride(0), 0 if rest is None else rest.stride(0)


@triton.jit(do_not_specialize=["rows", "masked"])
def reference_kernel(
    a: "Rows", w: "Rows", index: "Flat", row_mask: "Flat", reference: "Out", marks: "Out", due: "Out",
    rows: tl.int32, masked: tl.int64, factor: tl.float32,
    V: tl.constexpr, K: tl.constexpr, A_ROW: tl.constexpr, W_ROW: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr, PART: tl.constexpr, TILE_ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The number to which the exponentials of a row are relative: the largest of its logits at the indices of the ROWS
    rows of a program, times ``factor``. Masked rows, and indices outside of the vocabulary, do not count.

    The program reads the weight at the indices of all of its rows anyway, so that the logits at the indices of other
    rows cost no memory traffic. If the class at its own index is unlikely, a row then has a reference closer to its
    largest logit, and fewer rows are computed again. A head with random indices also takes about 1% less time (hidden
    size 2048, H200). The last bits of the results of a row depend on the indices of the other rows.

    Inputs: ``a`` ``(rows, K)``; ``w`` ``(V, K)``; ``index`` and ``row_mask`` ``(rows,)``, the second or None.
    Outputs: ``reference`` ``(rows,)``, infinite for masked rows, NaN if the index is outside of the vocabulary or has
    a NaN logit; ``marks``, which holds zeros, see `linear_exponentials_kernel`; zeros in ``due``.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    active = unmasked(row_mask, row, rows, masked)
    label = tl.load(index + row, mask=active, other=-1).to(tl.int64)
    inside = (label >= 0) & (label < V)
    total = tl.zeros([ROWS, ROWS], tl.float32)  # the logits of each row at the indices of all rows
    for k0 in range(0, K, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)
        mask = inside[:, None] & (k < K)[None, :]
        x = tl.load(a + row[:, None].to(tl.int64) * A_ROW + k[None, :], mask=mask, other=0.0)
        y = tl.load(w + label[:, None] * W_ROW + k[None, :], mask=mask, other=0.0)
        total = tl.dot(x, tl.trans(y), total)
    z = total.to(a.dtype.element_ty).to(tl.float32)
    place = tl.arange(0, ROWS)
    own = tl.sum(tl.where(place[:, None] == place[None, :], z, 0.0), axis=1)
    highest = tl.max(tl.where(inside[None, :], z, -float("inf")), axis=1)
    found = tl.where(inside & (own == own), highest * factor, float("nan"))
    tl.store(reference + row, tl.where(active, found, float("inf")), mask=row < rows)
    tl.store(marks + row // PART * tl.cdiv(V, WIDTH) + label // WIDTH, tl.full([ROWS], 1, tl.int8), mask=inside)
    tl.store(due, 0)
    tl.store(due + 1 + row // TILE_ROWS, tl.zeros([ROWS], tl.int32), mask=row < rows)


@triton.jit
def write_zeros(out, row, there, columns, out_row, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Write zeros to the rows of ``out`` that are ``there``."""
    for n0 in range(0, columns, BLOCK):
        n = n0 + tl.arange(0, BLOCK)
        place = row.to(tl.int64)[:, None] * out_row + n[None, :]
        nothing = tl.zeros([ROWS, BLOCK], out.dtype.element_ty)
        tl.store(out + place, nothing, mask=there[:, None] & (n < columns)[None, :])


@triton.jit
def write_zero_rows(
    out, rest, row, there, split, out_row, rest_row, V: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Write zeros to the rows of ``out`` and ``rest`` that are ``there``."""
    write_zeros(out, row, there, split, out_row, ROWS, BLOCK)
    if rest is not None:
        write_zeros(rest, row, there, V - split, rest_row, ROWS, BLOCK)


@triton.jit
def slot_of(row, half, rows, PART: tl.constexpr, TILE_ROWS: tl.constexpr):
    """Where the numbers of a row are, of all columns of a tile or, in its last part, of the first or second half."""
    return tl.where(half == 0, row, rows + row // TILE_ROWS * PART + row % TILE_ROWS - (TILE_ROWS - PART))


@triton.jit(do_not_specialize=["rows", "masked", "split", "out_row", "rest_row"])
def merge_exponentials_kernel(
    states: "Flat", index: "Flat", row_mask: "Flat", selected: "Flat", ties: "Flat", reference: "Out", due: "Out",
    out: "Rows", rest: "Rows", packed: "Out", log_probs: "Out", is_top1: "Out", factors: "Out",
    rows: tl.int32, masked: tl.int64, factor: tl.float32, split: tl.int32, out_row: tl.int64, rest_row: tl.int64,
    V: tl.constexpr, LAST: tl.constexpr, EXPECTED: tl.constexpr, PART: tl.constexpr, TILE_ROWS: tl.constexpr,
    WIDTH: tl.constexpr, MERGED: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Merge the sums of the tiles of a row. If LAST, write the results of the row, else which tiles of rows are to be
    computed again.

    Inputs: ``states``, ``selected`` and ``ties`` of `linear_exponentials_kernel`, and its inputs; ``row_mask``
    ``(rows,)`` or None.
    Outputs: if not LAST, ``due``, and the maxima of the rows that are far from their reference, which replace it. If
    LAST, ``packed``, ``log_probs`` and ``is_top1`` as of `softmax_statistics`; ``factors`` ``(rows,)`` and the
    exponential of the index in ``out`` or, from column ``split`` on, in ``rest``, see `linear_exponentials`; and zeros
    in masked rows of both.
    Bytes moved: the states in, a few numbers for each row out.
    """
    N_TILES: tl.constexpr = (V + WIDTH - 1) // WIDTH
    first = tl.program_id(0) * MERGED
    m_tile = first // TILE_ROWS
    row = first + tl.arange(0, MERGED)
    present = row < rows
    active = unmasked(row_mask, row, rows, masked)
    slots = rows + tl.cdiv(rows, TILE_ROWS) * PART
    halves = tl.where(first % TILE_ROWS >= TILE_ROWS - PART, 2, 1)  # the last part of a tile has a slot for each half
    numbers = N_TILES * slots.to(tl.int64)
    m = tl.full([TILES, MERGED], LOWEST, tl.float32)
    s = tl.zeros([TILES, MERGED], tl.float32)
    t = tl.zeros([TILES, MERGED], tl.float32)
    for half in range(halves):
        slot = slot_of(row, half, rows, PART, TILE_ROWS)
        for tile0 in range(0, N_TILES, TILES):
            tile = tile0 + tl.arange(0, TILES)
            inside = (tile < N_TILES)[:, None] & present[None, :]
            m = tl.maximum(m, load_numbers(states, numbers, slots, tile, slot, inside, 0, LOWEST))
            if LAST:
                s += load_numbers(states, numbers, slots, tile, slot, inside, 1, 0.0)
                if EXPECTED:
                    t += load_numbers(states, numbers, slots, tile, slot, inside, 2, 0.0)
    m = tl.max(m, axis=0)  # which ignores NaN: the sums do not
    base = tl.load(reference + row, mask=present, other=0.0)
    highest = tl.fma(m, factor, -base)
    if LAST:
        s, t = tl.sum(s, axis=0), tl.sum(t, axis=0)
        label = tl.load(index + row, mask=active, other=-1).to(tl.int64)
        inside = active & (label >= 0) & (label < V)
        z = tl.load(selected + row, mask=inside, other=float("nan"))
        relative = tl.fma(z, factor, -base)
        unclean = present & ~active & ~(s == 0)  # a NaN, or an infinity, in a masked row
        s = tl.where(s > 0, s, float("nan"))
        logarithm = tl.log2(s)
        rows64 = rows.to(tl.int64)
        normalizer = logarithm - highest
        shift = tl.where(normalizer == normalizer, m * factor, float("nan"))
        write_number(packed + SHIFT * rows64 + row, shift / LOG2E, active, present)
        write_number(packed + LOG_NORMALIZER * rows64 + row, normalizer / LOG2E, active, present)
        if EXPECTED:
            mean = t / s
            write_number(packed + EXPECTED_LOGIT * rows64 + row, (mean - highest) / LOG2E, active, present)
            write_number(packed + ENTROPY * rows64 + row, (logarithm - mean) / LOG2E, active, present)
        write_number(log_probs + row, (relative - logarithm) / LOG2E, active, present)
        if is_top1 is not None:
            # The slots of the columns before the label's, in which no logit may be as large.
            last = ((label % WIDTH >= WIDTH // 2) & (halves == 2)).to(tl.int32)  # the half of the label
            before = tl.zeros([TILES, MERGED], tl.int32)
            for half in range(halves):
                slot = slot_of(row, half, rows, PART, TILE_ROWS)
                for tile0 in range(0, N_TILES, TILES):
                    tile = tile0 + tl.arange(0, TILES)
                    of_label = (label // WIDTH)[None, :]
                    earlier = (tile[:, None] < of_label) | ((tile[:, None] == of_label) & (half < last)[None, :])
                    earlier = earlier & (tile < N_TILES)[:, None] & inside[None, :]
                    found = load_numbers(states, numbers, slots, tile, slot, earlier, 0, LOWEST)
                    before += (earlier & (found == m[None, :])).to(tl.int32)
            top1 = inside & (z == m) & (tl.load(ties + row, mask=inside, other=1) == 0) & (s > 0)
            tl.store(is_top1 + row, top1 & (tl.sum(before, axis=0) == 0), mask=present)
        write_number(factors + row, -(factor / LOG2E) / s, active, present)
        own = (tl.exp2(relative) - s).to(out.dtype.element_ty)
        tl.store(out + row.to(tl.int64) * out_row + label, own, mask=inside & (label < split))
        if rest is not None:
            tl.store(rest + row.to(tl.int64) * rest_row + label - split, own, mask=inside & (label >= split))
        if tl.max(unclean.to(tl.int32), axis=0) != 0:
            write_zero_rows(out, rest, row, unclean, split, out_row, rest_row, V, MERGED, BLOCK)
    else:
        far = active & ((highest > FARTHEST) | (highest < -FARTHEST))
        tl.debug_barrier()  # every warp has read the references, which one of them overwrites
        tl.store(reference + row, m * factor, mask=far)
        if tl.max(far.to(tl.int32), axis=0) != 0:
            tl.store(due, 1)
            tl.store(due + 1 + m_tile, 1)


@triton.jit(do_not_specialize=["rows", "stride", "split", "out_row", "rest_row"])
def factors_kernel(
    upstream: "Strided", factors: "Out", out: "Rows", rest: "Rows", rows: tl.int32, stride: tl.int64, split: tl.int32,
    out_row: tl.int64, rest_row: tl.int64, V: tl.constexpr, MERGED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Multiply ``factors`` ``(rows,)`` by ``upstream`` ``(rows,)``. Where either is 0, so is the row of ``out`` and of
    ``rest``.

    Bytes moved: both in and the factors out; zeros to rows that are NaN or infinite.
    """
    row = tl.program_id(0) * MERGED + tl.arange(0, MERGED)
    present = row < rows
    factor = tl.load(factors + row, mask=present, other=0.0)
    grad = tl.load(upstream + row * stride, mask=present, other=0.0).to(tl.float32)
    idle = (factor == 0) | (grad == 0)
    tl.debug_barrier()  # every warp has read the factors, which one of them overwrites
    tl.store(factors + row, tl.where(idle, 0.0, factor * grad), mask=present)
    # The sum of the exponentials of a row is NaN, and so is its factor, if one of these is NaN or infinite.
    unclean = idle & (factor != factor)
    if tl.max(unclean.to(tl.int32), axis=0) != 0:
        write_zero_rows(out, rest, row, unclean, split, out_row, rest_row, V, MERGED, BLOCK)


def supports_linear_exponentials(dtype: torch.dtype, rows: int, b: Tensor, inputs: Inputs, options: Options) -> bool:
    """Whether `linear_exponentials` computes this, on a device where that is faster than a GEMM and another kernel.

    It has been measured on Hopper. There is one index per row, the operands are bfloat16, whose exponents are those of
    float32, and no field needs more than the sum of the exponentials and their mean logit.

    Args:
        dtype: of the operands.
        rows: of the first operand.
        b: the second operand, ``(K, V)``, which is still to be cast if it has another dtype.
    """
    index, transform = inputs.index, options.transform
    plain = index is not None and index.dim() == 1 and inputs.class_weights is None and inputs.temperature is None
    plain = plain and inputs.support is None and not options.invariant and FIELDS.issuperset(options.names())
    positive = transform.softcap is None and 0 < transform.factors()[0] < math.inf
    fits = dtype == torch.bfloat16 and rows * b.shape[1] >= LEAST_LOGITS and b.numel() > 0 and b.shape[0] % 8 == 0
    is_hopper = SUPPORTED and not layout.one_at_a_time() and layout.compute_capability() == 90
    aligned = b.dtype != dtype or b.data_ptr() % 16 == 0
    by_rows = aligned and layout.aligned_dimension(b.stride(), dtype.itemsize, 0, 1, False) == "K"
    return plain and positive and fits and is_hopper and by_rows


def exponentials_bytes(vocab: int, width: int, options: Options) -> int:
    """Bytes of workspace per row: of the sums of tiles, or of the float32 product of this width, if it is not 0, that
    `logits.gradients` then multiplies by the factors."""
    return max(4 * numbers_of(options) * -(-vocab // WIDTH) * (TILE_ROWS + PART) // TILE_ROWS, 4 * width)


def numbers_of(options: Options) -> int:
    """How many numbers are stored for every row of a tile."""
    return 3 if wanted(options).EXPECTED else 2


def plan_of_reference(
    rows: int, V: int, K: int, strides: tuple[int, int], options: Options
) -> Plan:  # fmt: skip
    """The launch of `reference_kernel`."""
    numbers = rows, options.masked, options.transform.factors()[0] * LOG2E.value
    constexprs = dict(
        V=V,
        K=K,
        A_ROW=strides[0],
        W_ROW=strides[1],
        ROWS=ROWS,
        BLOCK_K=BLOCK_K,
        PART=PART,
        TILE_ROWS=TILE_ROWS,
        WIDTH=WIDTH,
    )
    return Plan(reference_kernel, -(-rows // ROWS), numbers, constexprs, 2)


def plan_for(
    rows: int, V: int, K: int, strides: tuple[int, int], places: Places, device: torch.device, options: Options
) -> Plan:
    """The launch of `linear_exponentials_kernel`."""
    tiles = -(-rows // TILE_ROWS) * -(-V // WIDTH)
    stages = stages_in(layout.shared_memory())
    work = Work(V, K, *strides, wanted(options).EXPECTED, options.wants("is_top1"), stages)
    programs = min(tiles, layout.multiprocessors(device))
    numbers = rows, options.transform.factors()[0] * LOG2E.value, *places
    return Plan(linear_exponentials_kernel, programs, numbers, dict(WORK=work), 4)


def plan_of_merge(rows: int, V: int, places: Places, last: bool, options: Options) -> Plan:
    """The launch of `merge_exponentials_kernel`."""
    constexprs = dict(
        V=V, LAST=last, EXPECTED=last and wanted(options).EXPECTED, PART=PART, TILE_ROWS=TILE_ROWS, WIDTH=WIDTH,
        MERGED=MERGED, TILES=TILES, BLOCK=BLOCK,
    )  # fmt: skip
    numbers = rows, options.masked, options.transform.factors()[0] * LOG2E.value, *places
    return Plan(merge_exponentials_kernel, -(-rows // MERGED), numbers, constexprs, 4)


def linear_exponentials(
    a: Tensor, b: Tensor, inputs: Inputs, options: Options, results: Results, out: Tensor, rest: Tensor | None = None
) -> Tensor:
    """Write the `softmax_statistics` of the logits ``a @ b``, and their gradient but for a factor of each row.

    Args:
        a: ``(rows, K)``, bfloat16.
        b: ``(K, V)``, contiguous in its first dimension.
        inputs: with an index of each row.
        results: as of `softmax_statistics`.
        out: ``(rows, V)``, in the dtype of ``a``, with rows that begin at multiples of 16 bytes. With a ``rest``, it
            has the first columns only, a multiple of 256.
        rest: ``(rows, V - out.shape[1])``, the other columns, which may be stored elsewhere.

    Returns:
        ``factors``, float32 ``(rows,)``: the gradient of the log-prob of the index with respect to the logits is
        ``factors[:, None] * out``, where ``out`` is followed by the ``rest``. A masked row has zeros in all of them.
    """
    a, w = with_aligned_rows(a), b.t()
    (rows, K), V = a.shape, len(w)
    index, row_mask = inputs[:2]
    packed, log_probs, is_top1 = results
    m_tiles, n_tiles = -(-rows // TILE_ROWS), -(-V // WIDTH)
    states = a.new_empty((numbers_of(options), n_tiles, rows + m_tiles * PART), dtype=torch.float32)
    reference, selected, factors = a.new_empty((3, rows), dtype=torch.float32)
    ties = None if is_top1 is None else a.new_empty(rows, dtype=torch.int32)
    marks = a.new_zeros((m_tiles * PARTS, n_tiles), dtype=torch.int8)
    due = a.new_empty(1 + m_tiles, dtype=torch.int32)
    strides, places = (a.stride(0), w.stride(0)), places_of(out, rest)
    given = a, w, index, row_mask, reference, marks, due
    launch(plan_of_reference, (rows, V, K, strides, options), given)

    def multiply(due: Any) -> None:
        about = rows, V, K, strides, places, a.device, options
        launch(plan_for, about, (a, w, reference, index, marks, due, out, rest, states, selected, ties))

    def merge(last: bool) -> None:
        found = (packed, log_probs, is_top1, factors) if last else (None,) * 4
        given = states, index, row_mask, selected, ties, reference, due, out, rest, *found
        launch(plan_of_merge, (rows, V, places, last, options), given)

    multiply(None)
    merge(False)
    multiply(due)
    merge(True)
    return factors


def plan_of_factors(rows: int, V: int, places: Places, stride: int) -> Plan:
    """The launch of `factors_kernel`."""
    constexprs = dict(V=V, MERGED=MERGED, BLOCK=BLOCK)
    return Plan(factors_kernel, -(-rows // MERGED), (rows, stride, *places), constexprs, 4)


def scale_exponentials(factors: Tensor, upstream: Tensor, out: Tensor, rest: Tensor | None = None) -> None:
    """Multiply ``factors`` of `linear_exponentials` by the ``upstream`` gradients ``(rows,)``, in place.

    Where the upstream gradient is 0, the factor and the row of ``out`` and ``rest`` become 0, even if they are NaN.
    """
    if len(factors):
        V = out.shape[1] + (0 if rest is None else rest.shape[1])
        launch(
            plan_of_factors, (len(factors), V, places_of(out, rest), upstream.stride(0)), (upstream, factors, out, rest)
        )
