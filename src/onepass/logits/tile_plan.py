"""How large a tile of logits is: some rows of the whole vocabulary or, if the statistics of the rows are known already,
all rows of a slice of the vocabulary.

Logits may be float32 while the GEMMs are bfloat16 or float16. Their gradient is then rounded to the dtype of the GEMMs
in a second buffer, which has the rows of several tiles, so that the GEMMs of the gradients are as large as those of
bfloat16 or float16 logits.
"""

from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

from onepass.logits.head import ALIGNED, ALL, ON_CPU, Head
from onepass.logits.row_groups import packed
from onepass.logits.valid_rows import valid_rows

GIB = 1 << 30
# The default workspace. If there are several tiles of rows, each costs a pass over the float32 sum of the weight's
# gradient, which is part of the workspace: tiles are half as large again as the sum, within limits. A single tile needs
# no such sum. In a forward without backward, no activations or gradients need the memory, so that it may take a single
# tile, too. Otherwise small tiles cost little, except for exponentials: their GEMM takes more rows at once than others.
ONE_TILE, UNTRAINED, SHARDED = int(2.5 * GIB), int(0.65 * GIB), int(1.18 * GIB)
# Of exponentials if the weight is frozen: room for 4096 rows of a vocabulary of 151,936 at hidden sizes of up to 4096,
# with copies of float32 hidden states. Half of it costs about 2% at a hidden size of 2048, and 3.5% at 4096 (H200).
# If some rows are masked, there is a product that is copied to its rows, too: then there is room for 3840 of the last.
FROZEN = int(1.3 * GIB)
LEAST_TRAINED, MOST_TRAINED = int(1.65 * GIB), int(2 * GIB)
WIDE = int(0.63 * GIB)  # workspace for a tile of logits that are wider than the GEMMs' dtype, beyond their gradient
SLICES = int(0.3 * GIB)  # workspace for slices of the vocabulary, beyond the sum of the hidden states' gradient
LEAST_COLUMNS = 128  # of a slice: GEMMs are slow below
# The GEMM of the hidden states' gradient has few and long programs, each of a block of rows and columns, of which WAVE
# run at once: that of 1792 rows has 86% of the speed of 2048 (H = 2048, H100). BLOCKS are those that cuBLAS chooses
# among. A program is taken to last as long as its rows times its columns, and a pass over the float32 sum of the
# weight's gradient as PASS times its columns (8 V bytes, H200). All numbers are the same for all GPUs, since processes
# must agree.
BLOCKS, WAVE, PASS = ((256, 128), (128, 256), (320, 128), (128, 320), (192, 192), (128, 128)), 132, 6
STEP = 256  # rows of a tile are a multiple of it
# Of the columns of a tile of exponentials, see `split_columns`: a multiple of the columns of a tile of their kernel.
SPLIT = 256
# Memory of the blocks of rows in `onepass.reference`: its maximum, and bytes per logit.
REFERENCE_BLOCKS, REFERENCE_BYTES = 1 << 26, 64
ROW, INDEX = 1536, 64  # bytes per row, for its statistics and the programs that share it, and per index of a row
ROW_ID = 9  # bytes per row that is masked or not: an int64 id and a bool
SMALL = 1 << 17  # bytes of scalars, and of rounding up the sizes of allocations


class Rows(NamedTuple):
    """The rows of a tile: a slice of all rows, or ids."""

    ids: slice | Tensor
    n: int
    ends_batch: bool = True  # whether the GEMMs of the gradients follow, see `TilePlan.batch`
    groups: slice | None = None  # of all groups, those of a tile of whole groups

    @property
    def of_losses(self) -> "Rows":
        """The entries of the losses of a tile: its groups, or else its rows."""
        return self if self.groups is None else Rows(self.groups, self.groups.stop - self.groups.start)

    def take(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """The entries of these rows."""
        if isinstance(self.ids, slice):
            return tensor.narrow(dim, self.ids.start, self.n)
        return tensor.index_select(dim, self.ids)

    def part(self, part: slice) -> "Rows":
        """Some of these rows."""
        n = part.stop - part.start
        if isinstance(self.ids, slice):
            return Rows(slice(self.ids.start + part.start, self.ids.start + part.stop), n)
        return Rows(self.ids[part], n)

    def put(self, tensor: Tensor, values: Tensor, dim: int = 0) -> None:
        """Write ``values`` to the entries of these rows."""
        if isinstance(self.ids, slice):
            tensor.narrow(dim, self.ids.start, self.n).copy_(values)
        else:
            tensor.index_copy_(dim, self.ids, values.to(tensor.dtype))


class Use(NamedTuple):
    """What tiles are used for, as far as it determines their size."""

    row_bytes: int = ROW + INDEX  # workspace per row, in addition to its logits
    weight_gradient: bool = False  # whether the gradient of the weight is summed
    gradient: bool = False  # whether the gradient of the logits is written
    known: bool = False  # whether the statistics of the rows are known, so that the vocabulary may be sliced
    final: bool = False  # whether no backward follows
    logits: bool = True  # whether the logits are computed; else `row_bytes` has what takes their place
    exponentials: bool = False  # whether exponentials take the place of the logits, see `Head.writes_exponentials`
    splits: bool = True  # whether `split_columns` may apply: not if a forward without a gradient has the same tiles


class TilePlan(NamedTuple):
    """The rows that are computed, and the size of their tiles, which have all rows or all of the vocabulary."""

    row_ids: Tensor | None  # ids of the valid rows; None for all rows
    n: int
    rows: int  # per tile
    batch: int  # rows per GEMM of the gradients, those of several tiles if logits are wider than the GEMMs' dtype
    vocab: int  # columns of this process
    columns: int  # per tile
    sliced: bool  # whether a tile is a slice of the vocabulary
    split: int | None = None  # columns of a tile that have memory of their own, see `split_columns`; None for all
    lengths: Sequence[int] | None = None  # of groups of rows that a tile holds whole

    def row_tiles(self) -> Iterator[Rows]:
        """The rows of each tile."""
        if self.lengths is not None:
            yield from self.group_tiles(self.lengths)
            return
        for start in range(0, self.n, self.batch):
            end = min(start + self.batch, self.n)
            for first in range(start, end, self.rows):
                stop = min(first + self.rows, end)
                yield self.between(first, stop)._replace(ends_batch=stop == end)

    def group_tiles(self, lengths: Sequence[int]) -> Iterator[Rows]:
        """The rows of each tile, which has whole groups."""
        tiles = packed(lengths, self.rows) if self.n else []
        counts = [sum(lengths[groups]) for groups in tiles]
        ends = {part.stop for part in packed(counts, self.batch)}
        first = 0
        for number, (groups, count) in enumerate(zip(tiles, counts), 1):
            yield self.between(first, first + count)._replace(ends_batch=number in ends, groups=groups)
            first += count

    def between(self, first: int, stop: int) -> Rows:
        """The rows from ``first`` to ``stop``, of those that are computed."""
        part = slice(first, stop)
        return Rows(part if self.row_ids is None else self.row_ids[part], stop - first)

    def slices(self) -> Iterator[slice]:
        """The columns of each tile."""
        if not self.sliced:
            return iter([ALL])
        return (slice(c, min(c + self.columns, self.vocab)) for c in range(0, self.vocab, self.columns))


class WorkspaceTooSmall(ValueError):
    """``max_memory`` is less than the ``least`` that is needed."""

    def __init__(self, least: int, got: int) -> None:
        super().__init__(f"max_memory: expected at least {least} bytes, for one row at a time, got {got}")
        self.least = least


def plan(heads: Sequence[Head], row_mask: Tensor | None, use: Use, later: Use | None = None) -> TilePlan:
    """Plan equal tiles, as large as the workspace of the first head allows.

    The workspace is everything that is allocated in addition to inputs, results and gradients: a tile of each head,
    copies that are gathered or cast, the statistics of the rows, the float32 sum of the weight's gradient. The
    workspace of the GEMMs themselves, which torch keeps for each stream, is not included.

    If the statistics of the rows are known, tiles may be slices of the vocabulary. Each part of the weight's gradient
    is then one GEMM, and the gradient of the hidden states is summed instead. It is far smaller, unless there are more
    rows than classes.

    Raises:
        ValueError: ``max_memory`` is less than a tile of one row needs, now or for ``later`` tiles of the same head.
    """
    vocab, total_rows = heads[0].vocab, heads[0].hidden.shape[0]
    heads = [head.widest() for head in heads]
    raised = []
    for each in [use] if later is None else [later, use]:
        try:
            shape = tile_shape(total_rows, False, heads, each, row_mask is not None)
        except WorkspaceTooSmall as error:
            raised.append(error)
    if raised:
        raise max(raised, key=attrgetter("least"))
    ids, n = valid_rows(row_mask), total_rows
    if ids is not None:
        n = len(ids)
        shape = tile_shape(n, True, heads, use)
    rows, batch, columns, split = shape
    return TilePlan(ids, n, rows, batch, vocab, columns, columns < heads[0].vocab, split)


def row_bytes(index: Tensor | None, row_inputs: Sequence[Tensor] = ()) -> int:
    """Bytes of workspace per row, in addition to the logits."""
    numbers = 1 if index is None or index.dim() == 1 else index.shape[1]
    return ROW + INDEX * (numbers + sum(i[:1].numel() for i in row_inputs))


def tile_shape(
    count: int, gathered: bool, heads: Sequence[Head], use: Use, masked: bool = False
) -> tuple[int, int, int, int | None]:  # fmt: skip
    """Rows of a tile, rows of a GEMM of the gradients, columns of a tile, and the ``split`` of a `TilePlan`.

    ``count`` rows are computed, which are ``gathered`` if some are masked. If the vocabulary is sharded, they follow
    from nothing in which processes may differ, such as the layout of their weights, which decides on logits.
    """
    head, max_memory = heads[0], heads[0].settings.max_memory
    logits = use.logits or bool(head.settings.shard.sizes)
    per_row = use.row_bytes + sum(h.row_bytes(gathered) + logits * h.logits_bytes(h.logits_dtype) for h in heads)
    per_wide = wide = 0  # bytes per row of a tile of wide logits, and of the tile, beyond their gradient
    if use.gradient and head.logits_dtype != head.dtype:
        per_row, per_wide = head.row_bytes(gathered) + head.logits_bytes(head.dtype), per_row
        wide = min(count * per_wide, WIDE if head.hidden.is_cuda else ON_CPU)
    fixed = SMALL + sum(h.cast_bytes() for h in heads) + ROW_ID * head.hidden.shape[0] * gathered
    total = sum_bytes(head, use)  # a float32 gradient needs no other sum
    if head.adapter is not None and head.settings.invariant_gemms:
        per_row += head.logits_bytes(head.logits_dtype)  # the adapter's part of the logits
    if head.hidden.device.type == "cpu":
        fixed += min(REFERENCE_BLOCKS, REFERENCE_BYTES * count * head.vocab)
        per_row += 4 * (head.vocab + head.hidden.shape[1]) * (use.weight_gradient and head.upcasts)
    fixed += 4 * head.hidden.numel() * (head.dtype == torch.float16)  # see `Gradients`
    one_tile = fixed + count * per_row + (total if needs_sum(head, 1) else 0)
    split = None
    splits = use.exponentials and use.weight_gradient and use.splits and not needs_sum(head, 1)
    if splits and one_tile - fixed > ONE_TILE:
        columns = split_columns(count, head)
        one_tile -= count * (head.vocab - columns) * head.dtype.itemsize
        split = columns if columns < head.vocab else None
    if max_memory is None:
        limit = default_memory(head, fixed + total, per_row, one_tile, use)
    else:
        spare = max_memory - fixed - total
        wide = max(min(wide, spare // 2, spare - per_row), per_wide)
        limit = max_memory - wide
    slices = SLICES if head.hidden.is_cuda else ON_CPU
    may_slice = use.known and not head.settings.invariant_gemms  # the number of slices depends on that of the rows
    if may_slice and one_tile > (min(limit, fixed + slices) if max_memory is None else limit):
        columns = tile_columns(count, gathered, head, limit + wide, use.row_bytes, slices + wide)
        if columns:
            return count, count, equal(head.vocab, columns), None
    rows = count if one_tile <= limit or not count else (limit - fixed - total) // per_row
    if count and rows < 1:
        if masked:
            tile_shape(count, True, heads, use)  # which takes more memory, and raises
        raise WorkspaceTooSmall(min(one_tile, fixed + total + per_row) + per_wide, max_memory or 0)
    of_pass = head.hidden.shape[1] * (PASS if use.weight_gradient else 1)  # or else the weight is read once more
    batch = in_waves(count, rows, head.hidden.shape[1], of_pass) if head.hidden.is_cuda else equal(count, rows)
    of_tile = equal(batch, max(1, wide // per_wide)) if per_wide else batch
    return of_tile, batch, head.vocab, split if batch == count else None


def split_columns(count: int, head: Head) -> int:
    """How many columns of a tile of ``count`` rows of exponentials have memory of their own.

    The others are at the beginning of the memory of the weight's gradient. The gradient of their part of the weight,
    which is at its end, is written first, and the rest, where they are, when they are not needed any more.
    """
    of_column, of_class = count * head.dtype.itemsize, head.hidden.shape[1] * head.weight.dtype.itemsize
    # For the other columns, r with padding: r · of_column <= (vocab - r) · of_class
    most = head.vocab * of_class // (of_column + of_class) - ALIGNED
    return min(-(-(head.vocab - most) // SPLIT) * SPLIT, head.vocab)


def tile_columns(count: int, gathered: bool, head: Head, limit: int, row_bytes: int, slices: int) -> int:
    """Columns of a tile with all rows, within the ``limit`` for tiles of rows; 0 if fewer than `LEAST_COLUMNS` fit."""
    H, size = head.hidden.shape[1] + head.rank, head.dtype.itemsize
    cast = size if head.weight.dtype != head.dtype else 0
    logits = size if head.logits_dtype == head.dtype else size + head.logits_dtype.itemsize  # with their gradient
    per_column = count * logits + H * cast + 16 + 4 * (count + H) * head.upcasts
    of_row = row_bytes + H * (size * (gathered or head.hidden.dtype != head.dtype) + 4 + 4 * head.upcasts)
    fixed = 2 * SMALL + ROW_ID * head.hidden.shape[0] * gathered + count * of_row + head.low_bytes()
    fixed += min(REFERENCE_BLOCKS, REFERENCE_BYTES * count * head.vocab) * (head.hidden.device.type == "cpu")
    least = min(LEAST_COLUMNS, head.vocab - 1)
    if head.settings.max_memory is None:
        limit = min(limit, fixed + max(slices, least * per_column))
    columns = min((limit - fixed) // per_column, head.vocab - 1)
    return columns if columns >= least else 0


def equal(count: int, most: int) -> int:
    """Rows or columns per tile, at most ``most``: tiles of about equal size, in whole blocks of the GEMM."""
    if count <= most:
        return max(count, 1)
    block = 256 if most >= 1024 else 128 if most >= 128 else 1
    tiles = -(-count // most)
    return min(-(-count // (tiles * block)) * block, most // block * block)


def in_waves(count: int, most: int, width: int, of_pass: int) -> int:
    """Rows per tile, at most ``most``, for which the GEMMs of all tiles, with ``width`` columns, take the least time.

    They take waves, of as many programs as run at once, and ``of_pass`` for each tile. There is at most one tile more
    than `equal` has. Tiles of fewer than 1024 rows are left as `equal` has them.
    """
    rows = equal(count, most)
    if rows == count or rows < 4 * STEP:
        return rows

    def waves(rows: int, block: tuple[int, int]) -> int:
        return -(-(-(-rows // block[0]) * -(-width // block[1])) // WAVE)

    def of_gemm(rows: int) -> int:
        return min(waves(rows, block) * block[0] * block[1] for block in BLOCKS)

    def of_all(rows: int) -> tuple[int, int, int]:
        tiles, last = divmod(count, rows)
        time = tiles * of_gemm(rows) + of_gemm(last) + -(-count // rows) * of_pass
        return time, tiles * waves(rows, BLOCKS[0]) + waves(last, BLOCKS[0]), -(-count // rows)

    tiles = -(-count // rows)
    candidates = range(-(-count // ((tiles + 1) * STEP)) * STEP, most + 1, STEP)
    return min((rows, *candidates), key=lambda n: (of_all(n), abs(n - rows)))


def default_memory(head: Head, fixed: int, per_row: int, one_tile: int, use: Use) -> int:
    """The default workspace, which follows from shapes alone.

    If it depended on free memory, results would not be bitwise equal between runs, and ranks could disagree.
    """
    if head.hidden.device.type != "cuda":
        return fixed + max(ON_CPU, per_row)
    if (use.weight_gradient or use.final) and one_tile - fixed <= ONE_TILE:
        return one_tile
    # Wide logits take more memory for GEMMs of the same size. Those of a gradient have memory of their own.
    wide = WIDE if not use.gradient and head.logits_dtype != head.dtype else 0
    if head.settings.shard.sizes:  # each tile waits for the other processes twice: fewer are worth the memory
        return fixed + max(SHARDED, per_row)
    trained = min(max(LEAST_TRAINED, 25 * head.weight.numel() // 4), MOST_TRAINED)
    untrained = FROZEN if use.exponentials else UNTRAINED + wide
    return fixed + max(trained if use.weight_gradient else untrained, per_row)


def sum_bytes(head: Head, use: Use) -> int:
    """Bytes of the float32 sums of the gradients of the weight and of an adapter's factor."""
    weights = [head.weight] if use.weight_gradient else []
    weights += [head.adapter.weight] if head.adapter is not None and use.gradient else []
    copied = head.upcasts and head.hidden.device.type == "cpu"
    return sum(4 * w.numel() * ((w.dtype.itemsize < 4) + copied) for w in weights)


def needs_sum(head: Head, tiles: int) -> bool:
    """Whether the weight's gradient is first a float32 sum: over several tiles, or because float16 cannot hold it."""
    return tiles > 1 or head.dtype == torch.float16
