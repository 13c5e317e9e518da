"""The GEMM of `linear_exponentials` on Hopper GPUs, which writes exponentials of logits and no logits.

Its warps have the roles of those of `grouped_gemm_hopper`: one loads the operands into a ring of stages in shared
memory, and two groups of four multiply them, each for a part of 64 rows and half of a third part. Each group then takes
the exponentials of its products, adds up those of a row, and stores them, while the operands of the next tile are
loaded. If a tile has more steps than there are stages, the second group begins it one step after the first, so that one
group multiplies while the other takes exponentials.

Bytes moved: a row of the hidden states once for each tile of columns, the weight once for each tile of rows, the
exponentials once, and two or three numbers for every row of a tile.
"""

from typing import NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from onepass.kernels.grouped_gemm_hopper import accumulate, accumulate_with_third
from onepass.kernels.hopper_results import BUFFERS, STORED, describe_result, store_columns
from onepass.kernels.hopper_tiles import ELEMENT, HALF, PART, PARTS, STEP, WIDTH, describe_rows, load_range
from onepass.kernels.launch import Flat, Out, Rows
from onepass.kernels.linear_statistics import rounded
from onepass.kernels.online_softmax import FLOOR
from onepass.kernels.row_gemm import GROUP, place_of

place_of_tile = gluon.jit(place_of.fn)
round_logits = gluon.jit(rounded.fn)
LEAST = gl.constexpr(FLOOR.value)
GROUP_OF_ROWS = gl.constexpr(GROUP)


class Work(NamedTuple):
    """The constants of the kernel: its sizes, the strides of rows, and what it computes."""

    V: int
    K: int
    A_ROW: int
    W_ROW: int
    EXPECTED: bool  # whether the sums of ``e·y`` are stored, too
    TOP1: bool  # whether ``ties`` are
    STAGES: int


@gluon.constexpr_function
def lead_of(steps, stages):
    """By how many steps of a tile the first group of warps is ahead of the second.

    One is 1 to 2% faster than none at K = 896, 2048 and 4096 (H200). With fewer steps than stages, the first group
    could arrive twice before the second has waited once, which would then wait forever.
    """
    return 1 if steps > stages else 0


def stages_in(shared_memory: int) -> int:
    """How many stages fit into this many bytes of shared memory."""
    of_stage = (PARTS.value * PART.value + WIDTH.value) * STEP.value * ELEMENT.value
    return (shared_memory - 2 * BUFFERS.value * PART.value * STORED.value * ELEMENT.value) // of_stage


@gluon.constexpr_function
def layout_of_sums():
    """The layout of sums over every eighth column of a part: that of the accumulator of a product."""
    lanes = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([[0, 1], [8, 0]], lanes, [[16, 0], [32, 0]], [], [64, 8])


@gluon.jit
def by_thread(z):
    """Columns of a part, divided so that those along the second dimension are in one thread.

    To sum over these takes no shuffles. Those over the last dimension follow once, when all columns have been read.
    """
    return z.reshape((PART, STORED // 8, 8))


@gluon.jit
def read_columns(
    z, sums, reference, factor, to, results, which: gl.constexpr, EARLIER: gl.constexpr, row0, to0, W: gl.constexpr
):  # fmt: skip
    """Store the exponentials of STORED columns of a part from column ``to0`` on, and add these to the sums of its rows.

    See `store_columns` for ``results`` and EARLIER.
    """
    m, s, t = sums
    out, descriptor = to
    z = round_logits(z, out.dtype.element_ty, True)
    y = gl.fma(z, factor, -gl.convert_layout(reference, gl.SliceLayout(1, z.type.layout))[:, None])
    e = gl.exp2(y)
    store_columns(out, descriptor, results, which, EARLIER, row0, to0, e)
    m = gl.maximum(m, gl.convert_layout(gl.max(by_thread(z), 1), m.type.layout))
    s += gl.convert_layout(gl.sum(by_thread(e), 1), s.type.layout)
    if W.EXPECTED:
        t += gl.convert_layout(gl.sum(by_thread(e * gl.maximum(y, LEAST)), 1), t.type.layout)
    return m, s, t


@gluon.jit
def load_early(inputs, row0, n_tile, rows, of_rows: gl.constexpr, W: gl.constexpr):
    """The references of a part of the rows, and whether a row has its index in the tile of columns.

    They are loaded before the rows are multiplied, so that nothing waits for them afterwards.
    """
    N_TILES: gl.constexpr = (W.V + WIDTH - 1) // WIDTH
    reference, _index, marks, _due = inputs
    row = row0 + gl.arange(0, PART, of_rows)
    base = gl.load(reference + row, mask=row < rows, other=0.0)
    return base, gl.load(marks + row0 // PART * N_TILES + n_tile)


@gluon.jit
def read_part(
    z, early, inputs, outputs, results, which: gl.constexpr, row0, n0, first, slot0, rows, factor, W: gl.constexpr
):  # fmt: skip
    """Read the products ``z`` of a part of the rows, from row ``row0`` and column ``n0`` on.

    ``early`` is what `load_early` returns. The sums of its rows are stored from ``slot0`` on, of those of the tile of
    columns. The exponentials are stored in a matrix that begins with column ``first``.
    """
    COUNT: gl.constexpr = z.shape[1]
    N_TILES: gl.constexpr = (W.V + WIDTH - 1) // WIDTH
    of_rows: gl.constexpr = gl.SliceLayout(1, z.type.layout)
    base, mark = early
    _reference, index, _marks, _due = inputs
    out, descriptor, states, selected, ties = outputs
    to, n_tile, to0 = (out, descriptor), n0 // WIDTH, n0 - first
    r = gl.arange(0, PART, of_rows)
    n = n0 + gl.arange(0, COUNT, gl.SliceLayout(0, z.type.layout))
    present = row0 + r < rows
    if mark != 0:
        label = gl.load(index + row0 + r, mask=present, other=-1).to(gl.int64)
        is_here = present & (label >= n0) & (label < gl.minimum(n0 + COUNT, W.V))
        label = gl.where(is_here, label, -1).to(gl.int32)[:, None]
        chosen = round_logits(gl.sum(gl.where(n[None, :] == label, z, 0.0), 1), out.dtype.element_ty, True)
        gl.store(selected + row0 + r, chosen, mask=is_here)
        if W.TOP1:
            equal = (n[None, :] < label) & (round_logits(z, out.dtype.element_ty, True) == chosen[:, None])
            gl.store(ties + row0 + r, gl.max(equal.to(gl.int32), 1), mask=is_here)
    if n0 + COUNT > W.V:  # no exponential is left of the columns beyond the last, of which descriptors may store some
        z = gl.where((n < W.V)[None, :], z, -float("inf"))
    left, right = gl.split(z.reshape((PART, 2, COUNT // 2)).permute((0, 2, 1)))
    zeros = gl.zeros((PART, 8), gl.float32, layout_of_sums())
    sums = (zeros - float("inf"), zeros, zeros)
    if COUNT == 2 * STORED:
        sums = read_columns(left, sums, base, factor, to, results, which, 0, row0, to0, W)
        sums = read_columns(right, sums, base, factor, to, results, which, 1, row0, to0 + STORED, W)
    else:
        for half in gl.static_range(2):
            part = left if half == 0 else right
            a, b = gl.split(part.reshape((PART, 2, STORED)).permute((0, 2, 1)))
            to1 = to0 + 2 * half * STORED
            sums = read_columns(a, sums, base, factor, to, results, which, 2 * half, row0, to1, W)
            to1 += STORED
            sums = read_columns(b, sums, base, factor, to, results, which, 2 * half + 1, row0, to1, W)
    m, s, t = sums
    m = gl.convert_layout(gl.max(m, 1), of_rows)
    s = gl.convert_layout(gl.sum(s, 1), of_rows)
    slots = rows + gl.cdiv(rows, PARTS * PART) * PART
    slot = states + n_tile.to(gl.int64) * slots + slot0 + r
    gl.store(slot, m, mask=present)
    gl.store(slot + N_TILES * slots.to(gl.int64), s, mask=present)
    if W.EXPECTED:
        t = gl.convert_layout(gl.sum(t, 1), of_rows)
        gl.store(slot + 2 * N_TILES * slots.to(gl.int64), t, mask=present)


@gluon.jit
def read(z, early, inputs, outputs, results, which: gl.constexpr, row0, n0, slot0, rows, factor, W: gl.constexpr):
    """`read_part`, whose exponentials belong to either side of the split.

    It is compiled for each side: to choose the descriptor at every store takes more registers than there are.
    """
    out, rest, of_out, of_rest, split, states, selected, ties = outputs
    of_first, of_last = (out, of_out, states, selected, ties), (out, of_rest, states, selected, ties)
    if rest is not None:
        if n0 < split:
            read_part(z, early, inputs, of_first, results, which, row0, n0, 0, slot0, rows, factor, W)
        else:
            read_part(z, early, inputs, of_last, results, which, row0, n0, split, slot0, rows, factor, W)
    else:
        read_part(z, early, inputs, of_first, results, which, row0, n0, 0, slot0, rows, factor, W)


@gluon.jit
def number_of_tiles(m_tiles, due, W: gl.constexpr):
    """How many tiles there are, or 0 if ``due`` says that no row is to be computed again."""
    N_TILES: gl.constexpr = (W.V + WIDTH - 1) // WIDTH
    tiles = m_tiles * N_TILES
    if due is not None:
        tiles = gl.where(gl.load(due) != 0, tiles, 0)
    return tiles


@gluon.jit
def is_due(m_tile, due):
    """Whether a tile of rows is to be computed."""
    if due is None:
        return True
    else:
        return gl.load(due + 1 + m_tile) != 0


@gluon.jit
def multiply_tile(sums, step, begun, ring, columns, which: gl.constexpr, W: gl.constexpr):
    """Add the products of a tile to ``sums``, of a part of its rows and, if these are two, of the third part.

    The first group says after the steps of its lead that the tile has ``begun``.
    """
    STEPS: gl.constexpr = (W.K + STEP - 1) // STEP
    FIRST: gl.constexpr = lead_of(STEPS, W.STAGES) if which == 0 else 0
    if FIRST > 0:
        sums, step = multiply_steps(sums, step, ring, columns, which, FIRST, W, True)
        mbarrier.arrive(begun, count=1)
    return multiply_steps(sums, step, ring, columns, which, STEPS - FIRST, W, FIRST == 0)


@gluon.jit
def multiply_steps(
    sums, step, ring, columns, which: gl.constexpr, STEPS: gl.constexpr, W: gl.constexpr, FRESH: gl.constexpr
):  # fmt: skip
    """Add the products of STEPS steps to ``sums``. If FRESH, these have no numbers yet."""
    if len(sums) == 1:
        acc, step = accumulate(sums[0], step, ring, columns, which, STEPS, "K", W, False, FRESH)
        return (acc,), step
    else:
        acc, third, step = accumulate_with_third(
            sums[0], sums[1], step, ring, columns, which, STEPS, "K", W, False, FRESH
        )  # fmt: skip
        return (acc, third), step


@gluon.jit
def multiply(
    which: gl.constexpr, begun, ring, columns, inputs, outputs, results, rows, factor, W: gl.constexpr
):  # fmt: skip
    """Compute the first (0) or the second (1) part of the rows of each tile, and half of the third part."""
    _, _, full, empty = ring
    due = inputs[3]
    STAGES: gl.constexpr = W.STAGES
    STEPS: gl.constexpr = (W.K + STEP - 1) // STEP
    N_TILES: gl.constexpr = (W.V + WIDTH - 1) // WIDTH
    of_acc: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    of_third: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    m_tiles = gl.cdiv(rows, PARTS * PART)
    step = 0
    tile = 0
    for work in range(gl.program_id(0), number_of_tiles(m_tiles, due, W), gl.num_programs(0)):
        m_tile, n_tile = place_of_tile(work, m_tiles, N_TILES, GROUP_OF_ROWS)
        if is_due(m_tile, due):
            row0 = m_tile * (PARTS * PART)
            n0 = n_tile * WIDTH
            begin = row0 + which * PART
            if lead_of(STEPS, STAGES) > 0 and which == 1:
                mbarrier.wait(begun, tile & 1)
            tile += 1
            if begin < rows:
                early = load_early(inputs, begin, n_tile, rows, gl.SliceLayout(1, of_acc), W)
                acc = gl.zeros((PART, WIDTH), gl.float32, of_acc)  # not kept from the tile before, beside what is read
                third0 = row0 + 2 * PART
                if third0 < rows:
                    of_third_rows = load_early(inputs, third0, n_tile, rows, gl.SliceLayout(1, of_third), W)
                    third = gl.zeros((PART, HALF), gl.float32, of_third)
                    sums, step = multiply_tile((acc, third), step, begun, ring, columns, which, W)
                    acc, third = sums
                    slot0 = third0
                    if which == 1:
                        slot0 = rows + m_tile * PART
                    n1 = n0 + which * HALF
                    read(third, of_third_rows, inputs, outputs, results, which, third0, n1, slot0, rows, factor, W)
                else:
                    alone, step = multiply_tile((acc,), step, begun, ring, columns, which, W)
                    acc = alone[0]
                read(acc, early, inputs, outputs, results, which, begin, n0, begin, rows, factor, W)
            else:
                for _k in range(STEPS):
                    mbarrier.wait(full.index(step % STAGES), step // STAGES & 1)
                    mbarrier.arrive(empty.index(step % STAGES), count=1)
                    step += 1
    tma.store_wait(0)


@gluon.jit
def load(of_a, of_weight, ring, columns, due, rows, W: gl.constexpr):
    """Load what `multiply` multiplies, in its order."""
    to_rows, _, full, empty = ring
    STAGES: gl.constexpr = W.STAGES
    STEPS: gl.constexpr = (W.K + STEP - 1) // STEP
    N_TILES: gl.constexpr = (W.V + WIDTH - 1) // WIDTH
    m_tiles = gl.cdiv(rows, PARTS * PART)
    step = 0
    for work in range(gl.program_id(0), number_of_tiles(m_tiles, due, W), gl.num_programs(0)):
        m_tile, n_tile = place_of_tile(work, m_tiles, N_TILES, GROUP_OF_ROWS)
        if is_due(m_tile, due):
            for k0 in range(0, STEPS * STEP, STEP):
                stage = step % STAGES
                mbarrier.wait(empty.index(stage), step // STAGES & 1 ^ 1)
                ready = full.index(stage)
                load_range(of_a, ready, to_rows, stage, m_tile * (PARTS * PART), rows, k0, WIDTH * STEP * ELEMENT)
                tma.async_copy_global_to_shared(of_weight, [n_tile * WIDTH, k0], ready, columns.index(stage))
                step += 1


@gluon.jit(do_not_specialize=["rows", "split", "out_row", "rest_row"])
def linear_exponentials_kernel(
    a: "Rows", w: "Rows", reference: "Flat", index: "Flat", marks: "Flat", due: "Flat", out: "Rows", rest: "Rows",
    states: "Out", selected: "Out", ties: "Out",
    rows: tl.int32, factor: tl.float32, split: tl.int32, out_row: tl.int64, rest_row: tl.int64, WORK: tl.constexpr,
):  # fmt: skip
    """``out = exp2(y)`` with ``y = factor·z - reference``, where ``z = a @ w.T`` is rounded to the dtype of ``a``.

    Inputs: ``a`` ``(rows, K)``; ``w`` ``(V, K)``; ``reference`` and ``index`` ``(rows,)``; ``marks``, one int8 for each
    part of 64 rows and tile of 256 columns, which is not 0 if a row of the part has an index in these columns; ``due``,
    int32, or None to compute all rows: its first number says whether there are rows to compute, and each of the others
    whether a tile of rows is to be computed.
    Outputs: ``out`` ``(rows, split)`` and ``rest`` ``(rows, V - split)``, or ``out`` ``(rows, V)`` and None;
    ``states`` ``(2 or 3, N_TILES, slots)``, the maxima of ``z``, the sums of ``exp2(y)`` and of ``exp2(y)·y`` of every
    row of a tile of columns; ``selected`` ``(rows,)``, ``z`` of the index, if that is in [0, V), and ``ties``
    ``(rows,)``, int32 or None, whether an earlier column of the slot has that ``z``.
    A tile has up to 192 rows. Each half of the columns of its last 64 rows has a slot of its own: the slots of the rows
    come first, and then those of the second halves.
    Bytes moved: see the module docstring.
    """
    W: gl.constexpr = WORK
    STAGES: gl.constexpr = W.STAGES
    dtype: gl.constexpr = a.dtype.element_ty
    flat: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    to_rows = gl.allocate_shared_memory(dtype, [STAGES * PARTS, PART, STEP], flat)
    columns = gl.allocate_shared_memory(dtype, [STAGES, WIDTH, STEP], flat)
    results = gl.allocate_shared_memory(dtype, [2 * BUFFERS, PART, STORED], flat)
    of_a = describe_rows(a, rows, W.K, W.A_ROW)
    of_weight = tma.make_tensor_descriptor(w, [W.V, W.K], [W.W_ROW, 1], [WIDTH, STEP], flat)
    of_out = describe_result(out, rows, split, out_row)
    of_rest = of_out
    if rest is not None:
        of_rest = describe_result(rest, rows, W.V - split, rest_row)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    begun = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(begun, count=1)
    for n in gl.static_range(STAGES):
        mbarrier.init(full.index(n), count=1)
        mbarrier.init(empty.index(n), count=2)
    hopper.fence_async_shared()
    ring = (to_rows, None, full, empty)  # as `accumulate` takes it, which needs no second one for these rows
    inputs = (reference, index, marks, due)
    outputs = (out, rest, of_out, of_rest, split, states, selected, ties)
    gl.warp_specialize(
        [
            (multiply, (0, begun, ring, columns, inputs, outputs, results, rows, factor, W)),
            (multiply, (1, begun, ring, columns, inputs, outputs, results, rows, factor, W)),
            (load, (of_a, of_weight, ring, columns, due, rows, W)),
        ],
        [4, 1], [240, 24],
    )  # fmt: skip
