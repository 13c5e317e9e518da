"""``hidden @ weight.T + bias`` in tiles: how large a tile is, and the GEMMs that fill it.

A tile of logits comes from the vendor's matrix product, is read by the core's kernels, is turned into its own gradient
in place, and gives way to the next. It is some rows of all the vocabulary; or, where the numbers of the rows are known
already, all rows of a slice of the vocabulary. All products have one dtype, that of autocast or of the inputs; what is
summed over tiles is summed in float32.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

GIB = 1 << 30
# The workspace where nobody says otherwise. A gradient of the weight pays for each of several tiles of rows with a pass
# over a float32 sum, which is workspace too; one tile needs none. A forward alone has no activations or gradients
# beside it that want the memory, so that it may be one tile, too. Elsewhere little is lost.
ONE_TILE, TRAINED, UNTRAINED = int(2.5 * GIB), int(1.25 * GIB), int(0.585 * GIB)
SLICES = int(0.3 * GIB)  # beside the sum of the hidden states' gradient, which is small
ON_CPU = 1 << 25
LEAST_COLUMNS = 128  # of a slice: products are slow below
REFERENCE_BLOCKS, REFERENCE_BYTES = (
    1 << 26,
    64,
)  # of the blocks that the reference walks rows in: at most, and for a logit
ROW, INDEX = 1536, 64  # bytes for the numbers of a row and what its programs share, and of each of its indices
ALIGNED = 16  # bytes to which rows are padded: matrix products are slow where an odd vocabulary leaves them unaligned


class Settings(NamedTuple):
    """How logits are computed."""

    dtype: torch.dtype  # of the GEMMs and of the logits
    max_memory: int | None = None  # bytes of workspace; None: as `default_memory` says
    round_before_bias: bool = False  # the bias is added to the rounded product, which rounds twice


class HeadTensors(NamedTuple):
    """The tensors of a linear head."""

    hidden: Tensor  # (N, H)
    weight: Tensor  # (V, H)
    bias: Tensor | None = None  # (V,)


class Head:
    """A linear head whose logits are computed in tiles."""

    def __init__(self, tensors: HeadTensors, settings: Settings) -> None:
        self.hidden, self.weight, self.bias = tensors
        self.settings, self.dtype = settings, settings.dtype
        self.vocab = self.weight.shape[0]
        self.held: tuple[slice, Tensor, Tensor | None] | None = None
        self.padded_vocab = padded(self.vocab, self.dtype)

    def factors(self, columns: slice) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of these columns in the dtype of the GEMMs; the last ones are kept."""
        if self.held is None or self.held[0] != columns:
            self.held = None  # before there are others
            bias = None if self.bias is None else self.bias[columns].to(self.dtype)
            self.held = columns, self.weight[columns].to(self.dtype), bias
        return self.held[1:]

    def row_bytes(self, gathered: bool) -> int:
        hidden = self.hidden.shape[1] * (self.dtype.itemsize + self.hidden.dtype.itemsize)
        return self.padded_vocab * self.dtype.itemsize + hidden * (gathered or self.hidden.dtype != self.dtype)

    def cast_bytes(self) -> int:
        return sum(
            t.numel() * self.dtype.itemsize for t in (self.weight, self.bias) if t is not None and t.dtype != self.dtype
        )

    @property
    def upcasts(self) -> bool:
        """Whether a GEMM with a float32 result needs float32 factors: torch has ``out_dtype`` on CUDA alone."""
        return self.dtype.itemsize < 4 and (self.weight.device.type != "cuda" or torch.version.hip is not None)


class Rows(NamedTuple):
    """The rows of a tile: a slice of all, or ids."""

    ids: slice | Tensor
    n: int

    def take(self, tensor: Tensor, dim: int = 0) -> Tensor:
        if isinstance(self.ids, slice):
            return tensor.narrow(dim, self.ids.start, self.n)
        return tensor.index_select(dim, self.ids)

    def put(self, tensor: Tensor, values: Tensor, dim: int = 0) -> None:
        if isinstance(self.ids, slice):
            tensor.narrow(dim, self.ids.start, self.n).copy_(values)
        else:
            tensor.index_copy_(dim, self.ids, values.to(tensor.dtype))


ALL = slice(None)


class Use(NamedTuple):
    """What tiles are for, as far as it decides how large they are."""

    row_bytes: int = ROW + INDEX  # of workspace, beside the logits of a row
    weight_gradient: bool = False  # whether the gradient of the weight is summed
    known: bool = False  # whether the numbers of the rows are known already, so that the vocabulary may be cut
    final: bool = False  # whether no backward follows


class Plan(NamedTuple):
    """The rows that are computed, and how they and the vocabulary are cut: one of the two is whole."""

    row_ids: Tensor | None  # None for all
    n: int
    rows: int  # of a tile
    vocab: int
    columns: int  # of a tile

    def cut(self) -> Iterator[Rows]:
        for first in range(0, self.n, self.rows):
            part = slice(first, min(first + self.rows, self.n))
            yield Rows(part if self.row_ids is None else self.row_ids[part], part.stop - first)

    @property
    def sliced(self) -> bool:
        return self.columns < self.vocab

    def slices(self) -> Iterator[slice]:
        if not self.sliced:
            return iter([ALL])
        return (slice(c, min(c + self.columns, self.vocab)) for c in range(0, self.vocab, self.columns))


def plan(heads: Sequence[Head], row_mask: Tensor | None, use: Use) -> Plan:
    """Equal tiles, as large as the workspace of the first head allows.

    The workspace is everything that is allocated beside inputs, results and gradients: a tile of each head, what is
    gathered or cast, the numbers of its rows, the float32 sum of the weight's gradient. That of the GEMMs themselves,
    which torch keeps for each stream, is not ours to bound.

    Where the numbers of the rows are known, tiles may be slices of the vocabulary. Then each part of the weight's
    gradient is one GEMM, and what is summed is the hidden states' gradient: far less, unless there are more rows
    than classes.

    Raises:
        ValueError: ``max_memory`` is less than a tile of one row needs.
    """
    head, total_rows = heads[0], heads[0].hidden.shape[0]
    of_all = tile_shape(total_rows, False, heads, use)
    ids = valid_rows(row_mask)  # waits for the device, which has nothing to do from here to the first GEMM
    if ids is None:
        return Plan(None, total_rows, of_all[0], head.vocab, of_all[1])
    rows, columns = tile_shape(len(ids), True, heads, use)
    return Plan(ids, len(ids), rows, head.vocab, columns)


def tile_shape(count: int, gathered: bool, heads: Sequence[Head], use: Use) -> tuple[int, int]:
    """Rows and columns of a tile where ``count`` rows are computed, which are ``gathered`` if they are not all."""
    head, max_memory = heads[0], heads[0].settings.max_memory
    per_row = use.row_bytes + sum(h.row_bytes(gathered) for h in heads)
    fixed = (1 << 17) + sum(h.cast_bytes() for h in heads) + 9 * head.hidden.shape[0] * gathered
    total = 0  # a float32 gradient is its own sum
    if use.weight_gradient and head.weight.dtype.itemsize < 4:
        total = 4 * head.weight.numel()
    if head.hidden.device.type == "cpu":
        fixed += min(REFERENCE_BLOCKS, REFERENCE_BYTES * count * head.vocab)
        per_row += 4 * (head.vocab + head.hidden.shape[1]) * (use.weight_gradient and head.upcasts)
        total += 4 * head.weight.numel() * (use.weight_gradient and head.upcasts)
    fixed += 4 * head.hidden.numel() * (head.dtype == torch.float16)  # see `Gradients`
    one_tile = fixed + count * per_row + (total if needs_sum(head, 1) else 0)
    limit = max_memory
    if limit is None:
        limit = default_memory(head, fixed + total, per_row, one_tile, use)
    slices = SLICES if head.hidden.is_cuda else ON_CPU
    if use.known and one_tile > (min(limit, fixed + slices) if max_memory is None else limit):
        columns = tile_columns(count, gathered, head, limit, use.row_bytes, slices)
        if columns:
            return count, equal(head.vocab, columns)
    rows = count if one_tile <= limit else (limit - fixed - total) // per_row
    if count and rows < 1:
        least = min(one_tile, fixed + total + per_row)
        raise ValueError(f"max_memory: expected at least {least} bytes, for one row at a time, got {max_memory}")
    return equal(count, rows), head.vocab


def tile_columns(count: int, gathered: bool, head: Head, limit: int, row_bytes: int, slices: int) -> int:
    """Columns of a tile that has all rows, within the ``limit`` of tiles of rows; 0 if that is too little."""
    H, size = head.hidden.shape[1], head.dtype.itemsize
    cast = size if head.weight.dtype != head.dtype else 0
    per_column = count * size + H * cast + 16 + 4 * (count + H) * head.upcasts
    of_row = row_bytes + H * (size * (gathered or head.hidden.dtype != head.dtype) + 4 + 4 * head.upcasts)
    fixed = (1 << 18) + 9 * head.hidden.shape[0] * gathered + count * of_row
    fixed += min(REFERENCE_BLOCKS, REFERENCE_BYTES * count * head.vocab) * (head.hidden.device.type == "cpu")
    least = min(LEAST_COLUMNS, head.vocab - 1)
    if head.settings.max_memory is None:
        limit = min(limit, fixed + max(slices, least * per_column))
    columns = min((limit - fixed) // per_column, head.vocab - 1)
    return columns if columns >= least else 0


def valid_rows(row_mask: Tensor | None) -> Tensor | None:
    """Ids of the rows that are not masked, None for all. How many these are is read from the device."""
    if row_mask is None or defers(row_mask):
        return None
    if int(row_mask.count_nonzero()) == row_mask.shape[0]:
        return None
    return row_mask.nonzero().squeeze(-1)


def defers(row_mask: Tensor | None) -> bool:
    """Whether masked rows are left to the kernels: a CUDA graph that is being captured cannot be read from."""
    return row_mask is not None and row_mask.is_cuda and torch.cuda.is_current_stream_capturing()


def equal(count: int, most: int) -> int:
    """Rows or columns of a tile, at most ``most``: as many in each, in whole blocks of the matrix product."""
    if count <= most:
        return max(count, 1)
    block = 1024 if most >= 1024 else 128 if most >= 128 else 1
    tiles = -(-count // most)
    return min(-(-count // (tiles * block)) * block, most // block * block)


def default_memory(head: Head, fixed: int, per_row: int, one_tile: int, use: Use) -> int:
    """Our own choice of a workspace. It follows from shapes alone: were it to follow what is free, results would not be
    bitwise the same from run to run, and ranks could disagree."""
    if head.hidden.device.type != "cuda":
        return fixed + max(ON_CPU, per_row)
    if (use.weight_gradient or use.final) and one_tile - fixed <= ONE_TILE:
        return one_tile
    return fixed + max(TRAINED if use.weight_gradient else UNTRAINED, per_row)


def needs_sum(head: Head, tiles: int) -> bool:
    """Whether the weight's gradient is a float32 sum first: of several products, or of what float16 cannot hold."""
    return tiles > 1 or head.dtype == torch.float16


def tiles(heads: Sequence[Head], plan: Plan) -> Iterator[tuple[Rows, slice, Tensor, list[Tensor]]]:
    """Rows, columns, the first head's hidden states, every head's logits, which are the caller's until the next."""
    count = min(plan.rows, plan.n)
    buffers = [empty_logits(h, count, plan.columns if plan.sliced else h.vocab) for h in heads]
    for rows in plan.cut():
        hidden = [rows.take(h.hidden).to(h.dtype) for h in heads]
        for columns in plan.slices():
            logits = [b[: rows.n] if columns == ALL else b[:, : columns.stop - columns.start] for b in buffers]
            for head, x, out in zip(heads, hidden, logits):
                weight, bias = head.factors(columns)
                if bias is None or head.settings.round_before_bias:
                    torch.mm(x, weight.t(), out=out)
                else:
                    torch.addmm(bias, x, weight.t(), out=out)
                if bias is not None and head.settings.round_before_bias:
                    out.add_(bias)
            yield rows, columns, hidden[0], logits


def empty_logits(head: Head, rows: int, columns: int) -> Tensor:
    logits = head.hidden.new_empty((rows, padded(columns, head.dtype)), dtype=head.dtype)
    logits[:, columns:] = 0  # products of bfloat16 on a CPU multiply it by 0, which must not be NaN
    return logits[:, :columns]


def padded(columns: int, dtype: torch.dtype) -> int:
    step = max(1, ALIGNED // dtype.itemsize)
    return -(-columns // step) * step
