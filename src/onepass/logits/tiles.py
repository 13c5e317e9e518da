"""``hidden @ weight.T + bias`` in tiles: how large a tile is, and the GEMMs that compute it.

`tiled_loss` and `tiled_statistics` loop over `tiles`. A tile of logits is computed by a GEMM of torch, read by the
kernels, overwritten with its own gradient, and replaced by the next. It is some rows of the whole vocabulary or, if the
statistics of the rows are known already, all rows of a slice of the vocabulary. All GEMMs have one dtype, that of
autocast or of the inputs. Sums over tiles are float32.

Where no gradient follows and the device has a kernel for it, a GEMM computes the statistics of its own result, and
there are no logits.

Logits may be float32 while the GEMMs are bfloat16 or float16. Their gradient is then rounded to the dtype of the GEMMs
in a second buffer, which has the rows of several tiles, so that the GEMMs of the gradients are as large as without.
"""

from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

from onepass.backend import backend_of
from onepass.core.options import Inputs, Options, Results, empty_results
from onepass.core.shard import NOT_SHARDED, Shard
from onepass.logits.row_groups import packed
from onepass.logits.valid_rows import valid_rows
from onepass.softmax.shards import empty_states, merged_states, results_of, state_of_rows

GIB = 1 << 30
# The default workspace. If there are several tiles of rows, each costs a pass over the float32 sum of the weight's
# gradient, which is part of the workspace: tiles are twice as large as the sum, within limits. A single tile needs no
# such sum. In a forward without backward, no activations or gradients need the memory, so that it may take a single
# tile, too. Otherwise small tiles cost little.
ONE_TILE, UNTRAINED, SHARDED = int(2.5 * GIB), int(0.595 * GIB), int(1.18 * GIB)
LEAST_TRAINED, MOST_TRAINED = int(1.1 * GIB), int(1.9 * GIB)
WIDE = int(0.59 * GIB)  # workspace for a tile of logits that are wider than the GEMMs' dtype, beyond their gradient
SLICES = int(0.3 * GIB)  # workspace for slices of the vocabulary, beyond the sum of the hidden states' gradient
ON_CPU = 1 << 25
LEAST_COLUMNS = 128  # of a slice: GEMMs are slow below
# Memory of the blocks of rows in `onepass.reference`: its maximum, and bytes per logit.
REFERENCE_BLOCKS, REFERENCE_BYTES = 1 << 26, 64
ROWS_AT_ONCE = 4096  # of a weight whose remainder is computed
ROW, INDEX = 1536, 64  # bytes per row, for its statistics and the programs that share it, and per index of a row
ALIGNED = 16  # bytes to which rows are padded: GEMMs are slow if an odd vocabulary leaves rows unaligned


class Settings(NamedTuple):
    """How logits are computed."""

    dtype: torch.dtype  # of the GEMMs
    logits_dtype: torch.dtype  # that, or float32: the result of the GEMM is then not rounded
    max_memory: int | None = None  # bytes of workspace; None for `default_memory`
    round_before_bias: bool = False  # whether the bias is added to the rounded product, which rounds twice
    exact_weight: bool = False  # whether float32 logits are those of a float32 weight that is not rounded
    shard: Shard = NOT_SHARDED  # the columns that this process holds, if the vocabulary is sharded
    sums_hidden: bool = False  # whether the gradient of the hidden states is summed over the processes
    invariant_gemms: bool = False  # whether rows do not depend on what rows are with them; see `batch_invariant`


class HeadTensors(NamedTuple):
    """The tensors of a linear head: the logits are ``hidden @ weight.T + bias + low @ up.T``."""

    hidden: Tensor  # (N, H)
    weight: Tensor  # (V, H)
    bias: Tensor | None = None  # (V,)
    low: Tensor | None = None  # (N, R): the hidden states in the low rank of an adapter, in the dtype of the GEMMs
    up: Tensor | None = None  # (V, R): the adapter's second factor

    def parameters(self) -> tuple[Tensor | None, ...]:
        """The tensors that may be partitioned over processes."""
        return self.weight, self.bias, self.up


class Head:
    """A linear head whose logits are computed in tiles."""

    def __init__(self, tensors: HeadTensors, settings: Settings) -> None:
        self.hidden, self.weight, self.bias, low, up = tensors
        plain = settings._replace(exact_weight=False)
        self.adapter = None if low is None or up is None else Head(HeadTensors(low, up), plain)
        self.settings, self.dtype, self.logits_dtype = settings, settings.dtype, settings.logits_dtype
        self.vocab = self.weight.shape[0]
        self.held: tuple[slice, Tensor, Tensor | None] | None = None
        self.rest: tuple[slice, Tensor] | None = None
        wide = self.weight.dtype == self.logits_dtype == torch.float32 != self.dtype
        self.is_exact = settings.exact_weight and wide

    def remainder(self, columns: slice) -> Tensor:
        """What rounding the weight of these columns to the dtype of the GEMMs leaves, in this dtype."""
        if self.rest is None or self.rest[0] != columns:
            self.rest = None
            rounded, _ = self.factors(columns)
            rest = torch.empty_like(rounded)
            for part, w, r in zip(*[t.split(ROWS_AT_ONCE) for t in (rest, self.weight[columns], rounded)]):
                part.copy_(w - r)
            self.rest = columns, rest
        return self.rest[1]

    def factors(self, columns: slice) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of these columns in the dtype of the GEMMs. Those of the last call are kept."""
        if self.held is None or self.held[0] != columns:
            self.held = None  # freed before others are allocated
            bias = None if self.bias is None else self.bias[columns].to(self.dtype)
            self.held = columns, self.weight[columns].to(self.dtype), bias
        return self.held[1:]

    def product(self, hidden: Tensor, low: Tensor | None, columns: slice, out: Tensor) -> None:
        """Write the logits of these columns, for hidden states ``(n, H)`` in the dtype of the GEMMs, to ``out``.

        ``low`` are the same rows in the rank of the adapter, if there is one.
        """
        weight, bias = self.factors(columns)
        factors = [(hidden, weight)]  # of which the sum of the products is the logits
        if self.adapter is not None and low is not None:
            factors.insert(0, (low, self.adapter.factors(columns)[0]))  # first: of the smaller part less is rounded off
        wide = out.dtype != self.dtype
        rounds = wide or self.settings.round_before_bias
        if self.settings.invariant_gemms:
            rounds = self.settings.round_before_bias and not wide
            factors += [(hidden, self.remainder(columns))] if self.is_exact else []
            for n, (a, b) in enumerate(factors):
                to = out if n == 0 else torch.empty_like(out)
                backend_of(hidden).row_gemm(a, b.t(), bias if n == 0 and not rounds else None, to)
                if n:
                    out.add_(to)
        elif not wide:
            start = None if rounds else bias
            for a, b in factors:
                start = torch.mm(a, b.t(), out=out) if start is None else torch.addmm(start, a, b.t(), out=out)
        elif self.upcasts:
            step = max(1, ON_CPU // (4 * hidden.shape[1]))  # columns whose weight is copied at a time
            factors[-1] = hidden, self.weight[columns] if self.is_exact else weight
            for n, (a, b) in enumerate(factors):
                for part, rows in zip(out.split(step, 1), b.split(step)):
                    product = torch.mm(a.to(out.dtype), rows.to(out.dtype).t())
                    part.copy_(product) if n == 0 else part.add_(product)
        else:
            factors += [(hidden, self.remainder(columns))] if self.is_exact else []
            torch.mm(factors[0][0], factors[0][1].t(), out_dtype=out.dtype, out=out)
            for a, b in factors[1:]:
                torch.addmm(out, a, b.t(), out_dtype=out.dtype, out=out)
        if rounds and bias is not None:
            out.add_(bias)

    def reads_its_product(self, inputs: Inputs, options: Options) -> bool:
        """Whether one kernel computes the logits and their statistics, and writes no logits."""
        supports: bool = backend_of(self.hidden).supports_linear_statistics(
            self.dtype, self.weight.t(), inputs, options
        )
        return supports and not self.is_exact and self.adapter is None

    def state_bytes(self, options: Options) -> int:
        """Bytes of workspace per row if this head `reads_its_product`; 0 if it is sharded, see `tile_shape`."""
        if self.settings.shard.sizes:
            return 0
        count: int = backend_of(self.hidden).state_bytes(self.vocab, options)
        return count

    def read_product(self, hidden: Tensor, inputs: Inputs, options: Options, results: Results, states: bool) -> None:
        """Write the `softmax_statistics` of the product with ``hidden`` to ``results``, or the states of the rows."""
        weight, bias = self.factors(ALL)
        rounds = self.logits_dtype == self.dtype
        twice = self.settings.round_before_bias and rounds
        backend = backend_of(hidden)
        backend.linear_statistics(hidden, weight.t(), bias, inputs, options, rounds, twice, results, states)

    def row_bytes(self, gathered: bool) -> int:
        """Bytes per row of a tile, without its logits: those of its hidden states if they are gathered or cast."""
        hidden = self.hidden.shape[1] * (self.dtype.itemsize + self.hidden.dtype.itemsize)
        of_adapter = 0 if self.adapter is None else self.adapter.row_bytes(gathered)
        return hidden * (gathered or self.hidden.dtype != self.dtype) + of_adapter

    def logits_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of a row of logits of this dtype."""
        return padded(self.vocab, dtype) * dtype.itemsize

    def cast_bytes(self) -> int:
        """Bytes of weight and bias in the dtype of the GEMMs, if they have another one, and of a `remainder`."""
        casts = [t for t in (self.weight, self.bias) if t is not None and t.dtype != self.dtype]
        rest = self.weight.numel() + 2 * ROWS_AT_ONCE * self.weight.shape[1] if self.is_exact else 0
        of_adapter = 0 if self.adapter is None else self.adapter.cast_bytes()
        return (sum(t.numel() for t in casts) + rest) * self.dtype.itemsize + of_adapter + self.low_bytes()

    def low_bytes(self) -> int:
        """Bytes of all hidden states in the rank of the adapter and of their gradient, and of a copy they come from."""
        if self.adapter is None:
            return 0
        copied = self.hidden.numel() * self.dtype.itemsize * (self.hidden.dtype != self.dtype)
        return self.adapter.hidden.numel() * (self.dtype.itemsize + 4) + copied

    def sum_bytes(self, use: "Use") -> int:
        """Bytes of the float32 sums of the gradients of the weight and of an adapter's factor."""
        weights = [self.weight] if use.weight_gradient else []
        weights += [self.adapter.weight] if self.adapter is not None and use.gradient else []
        copied = self.upcasts and self.hidden.device.type == "cpu"
        return sum(4 * w.numel() * ((w.dtype.itemsize < 4) + copied) for w in weights)

    @property
    def upcasts(self) -> bool:
        """Whether a GEMM with a float32 result needs float32 operands: torch has ``out_dtype`` on CUDA only."""
        return self.dtype.itemsize < 4 and (self.hidden.device.type != "cuda" or torch.version.hip is not None)

    def widest(self) -> "Head":
        """The head of the process that holds most columns, for plans that are the same on all processes."""
        most = max(self.settings.shard.sizes, default=self.vocab)
        if most == self.vocab:
            return self
        weight = self.weight.new_empty((most, self.weight.shape[1]), device="meta")
        bias = None if self.bias is None else self.bias.new_empty(most, device="meta")
        low = up = None
        if self.adapter is not None:
            low, up = self.adapter.hidden, self.adapter.weight.new_empty((most, self.rank), device="meta")
        return Head(HeadTensors(self.hidden, weight, bias, low, up), self.settings)

    @property
    def rank(self) -> int:
        """That of the adapter, 0 without one."""
        return 0 if self.adapter is None else self.adapter.hidden.shape[1]


class Rows(NamedTuple):
    """The rows of a tile: a slice of all rows, or ids."""

    ids: slice | Tensor
    n: int
    ends_batch: bool = True  # whether the GEMMs of the gradients follow, see `Plan.batch`
    groups: slice | None = None  # of all groups, those of a tile of whole groups

    @property
    def of_losses(self) -> "Rows":
        """Those of the losses, of which there is one for each row or group."""
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


ALL = slice(None)


class Use(NamedTuple):
    """What tiles are used for, as far as it determines their size."""

    row_bytes: int = ROW + INDEX  # workspace per row, in addition to its logits
    weight_gradient: bool = False  # whether the gradient of the weight is summed
    gradient: bool = False  # whether the gradient of the logits is written
    known: bool = False  # whether the statistics of the rows are known, so that the vocabulary may be sliced
    final: bool = False  # whether no backward follows
    logits: bool = True  # whether the logits are computed; else `row_bytes` has what takes their place


class Plan(NamedTuple):
    """The rows that are computed, and the size of their tiles, which have all rows or all of the vocabulary."""

    row_ids: Tensor | None  # ids of the valid rows; None for all rows
    n: int
    rows: int  # per tile
    batch: int  # rows per GEMM of the gradients, those of several tiles if logits are wider than the GEMMs' dtype
    vocab: int  # columns of this process
    columns: int  # per tile
    sliced: bool  # whether a tile is a slice of the vocabulary
    lengths: Sequence[int] | None = None  # of groups of rows that a tile holds whole

    def cut(self) -> Iterator[Rows]:
        """The rows of each tile."""
        if self.lengths is not None:
            yield from self.cut_groups(self.lengths)
            return
        for start in range(0, self.n, self.batch):
            end = min(start + self.batch, self.n)
            for first in range(start, end, self.rows):
                stop = min(first + self.rows, end)
                yield self.between(first, stop)._replace(ends_batch=stop == end)

    def cut_groups(self, lengths: Sequence[int]) -> Iterator[Rows]:
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


class TooLittle(ValueError):
    """``max_memory`` is less than the ``least`` that is needed."""

    def __init__(self, least: int, got: int) -> None:
        super().__init__(f"max_memory: expected at least {least} bytes, for one row at a time, got {got}")
        self.least = least


def plan(heads: Sequence[Head], row_mask: Tensor | None, use: Use, later: Use | None = None) -> Plan:
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
        except TooLittle as error:
            raised.append(error)
    if raised:
        raise max(raised, key=attrgetter("least"))
    ids, n = valid_rows(row_mask), total_rows
    if ids is not None:
        n = len(ids)
        shape = tile_shape(n, True, heads, use)
    rows, batch, columns = shape
    return Plan(ids, n, rows, batch, vocab, columns, columns < heads[0].vocab)


def tile_shape(
    count: int, gathered: bool, heads: Sequence[Head], use: Use, masked: bool = False
) -> tuple[int, int, int]:  # fmt: skip
    """Rows of a tile, rows of a GEMM of the gradients, and columns of a tile.

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
    fixed = (1 << 17) + sum(h.cast_bytes() for h in heads) + 9 * head.hidden.shape[0] * gathered
    total = head.sum_bytes(use)  # a float32 gradient needs no other sum
    if head.adapter is not None and head.settings.invariant_gemms:
        per_row += head.logits_bytes(head.logits_dtype)  # the adapter's part of the logits
    if head.hidden.device.type == "cpu":
        fixed += min(REFERENCE_BLOCKS, REFERENCE_BYTES * count * head.vocab)
        per_row += 4 * (head.vocab + head.hidden.shape[1]) * (use.weight_gradient and head.upcasts)
    fixed += 4 * head.hidden.numel() * (head.dtype == torch.float16)  # see `Gradients`
    one_tile = fixed + count * per_row + (total if needs_sum(head, 1) else 0)
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
            return count, count, equal(head.vocab, columns)
    rows = count if one_tile <= limit or not count else (limit - fixed - total) // per_row
    if count and rows < 1:
        if masked:
            tile_shape(count, True, heads, use)  # which takes more memory, and raises
        raise TooLittle(min(one_tile, fixed + total + per_row) + per_wide, max_memory or 0)
    batch = equal(count, rows)
    return equal(batch, max(1, wide // per_wide)) if per_wide else batch, batch, head.vocab


def tile_columns(count: int, gathered: bool, head: Head, limit: int, row_bytes: int, slices: int) -> int:
    """Columns of a tile with all rows, within the ``limit`` for tiles of rows; 0 if fewer than `LEAST_COLUMNS` fit."""
    H, size = head.hidden.shape[1] + head.rank, head.dtype.itemsize
    cast = size if head.weight.dtype != head.dtype else 0
    logits = size if head.logits_dtype == head.dtype else size + head.logits_dtype.itemsize  # with their gradient
    per_column = count * logits + H * cast + 16 + 4 * (count + H) * head.upcasts
    of_row = row_bytes + H * (size * (gathered or head.hidden.dtype != head.dtype) + 4 + 4 * head.upcasts)
    fixed = (1 << 18) + 9 * head.hidden.shape[0] * gathered + count * of_row + head.low_bytes()
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
    trained = min(max(LEAST_TRAINED, 8 * head.weight.numel()), MOST_TRAINED)
    return fixed + max(trained if use.weight_gradient else UNTRAINED + wide, per_row)


def needs_sum(head: Head, tiles: int) -> bool:
    """Whether the weight's gradient is first a float32 sum: over several tiles, or because float16 cannot hold it."""
    return tiles > 1 or head.dtype == torch.float16


class Tile:
    """A tile of the logits of one or several heads, which are computed when they are first asked for.

    Attributes:
        rows, columns: those of the tile.
        hidden: the hidden states of every head, in the dtype of its GEMMs.
    """

    def __init__(self, heads: Sequence[Head], rows: Rows, columns: slice, hidden: list[Tensor], buffers: list[Tensor]):
        self.heads, self.rows, self.columns, self.hidden, self.buffers = heads, rows, columns, hidden, buffers
        self.computed = False

    def low(self, head: Head) -> Tensor | None:
        """The hidden states of a head in the rank of its adapter."""
        return None if head.adapter is None else self.rows.take(head.adapter.hidden)

    @property
    def logits(self) -> list[Tensor]:
        """Those of every head, ``(n, columns)``. They may be overwritten. The next tile uses the same memory."""
        if not self.computed:
            self.computed = True
            for head, hidden, out in zip(self.heads, self.hidden, self.buffers):
                head.product(hidden, self.low(head), self.columns, out)
        return self.buffers

    def start(self) -> None:
        """Launch the GEMM, if it is one that writes logits."""
        if self.buffers:
            _ = self.logits

    def statistics(self, inputs: Inputs, options: Options) -> Results:
        """The `softmax_statistics` of the first head's rows, those of all ranks if the vocabulary is sharded."""
        head, shard = self.heads[0], self.heads[0].settings.shard
        if self.buffers:
            return results_of(self.logits[0], inputs, shard, options)
        if shard.sizes:
            return merged_states(self.states(inputs, options), self.like(), inputs, shard, options)
        results = empty_results(self.like(), inputs.index, options)
        head.read_product(self.hidden[0], inputs, options, results, False)
        return results

    def states(self, inputs: Inputs, options: Options) -> Tensor:
        """The states of the first head's rows, whose vocabulary is sharded, of the columns of this process."""
        if self.buffers:
            found: Tensor = state_of_rows(self.logits[0], inputs, options)
            return found
        states = empty_states(self.like(), inputs, options)
        self.heads[0].read_product(self.hidden[0], inputs, options, (states, None, None), True)
        return states

    def like(self) -> Tensor:
        """An empty tensor with the rows, device and dtype of the logits."""
        return self.hidden[0].new_empty((self.rows.n, 0), dtype=self.heads[0].logits_dtype)


def tiles(heads: Sequence[Head], plan: Plan, logits: bool = True) -> Iterator[Tile]:
    """The tiles of a plan, one after the other. ``logits`` is that of the `Use` that it was made for."""
    count = min(plan.rows, plan.n)
    columns_of = [min(plan.columns, h.vocab) if plan.sliced else h.vocab for h in heads]
    buffers = [empty_logits(h, count, columns, h.logits_dtype) for h, columns in zip(heads, columns_of) if logits]
    for rows in plan.cut():
        hidden = [rows.take(h.hidden).to(h.dtype) for h in heads]
        for columns in plan.slices():
            parts = [b[: rows.n] if columns == ALL else b[:, : columns.stop - columns.start] for b in buffers]
            yield Tile(heads, rows, columns, hidden, parts)


def empty_logits(head: Head, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """An uninitialized tile, with rows padded to `ALIGNED` bytes."""
    width = padded(columns, dtype)
    logits = head.hidden.new_empty((rows, width), dtype=dtype)
    if width > columns:
        logits[:, columns:] = 0  # bfloat16 GEMMs on a CPU multiply the padding by 0, so it must not be NaN
    return logits[:, :columns]


def padded(columns: int, dtype: torch.dtype) -> int:
    """``columns``, rounded up to a multiple of `ALIGNED` bytes."""
    step = max(1, ALIGNED // dtype.itemsize)
    return -(-columns // step) * step
