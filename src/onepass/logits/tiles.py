"""The tiles of ``hidden @ weight.T + bias``, over which `tiled_loss` and `tiled_statistics` loop.

A tile of logits is computed by a GEMM of torch, read by the kernels, overwritten with its own gradient, and replaced by
the next. Sums over tiles are float32.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from onepass.backend import backend_of
from onepass.core.options import Inputs, Options, Results, empty_results
from onepass.logits.head import ALL, Head, padded
from onepass.logits.tile_plan import Rows, TilePlan
from onepass.softmax.shards import empty_states, merged, merged_states, state_of_rows


class Tile:
    """A tile of the logits of one or several heads, which are computed when they are first used.

    Attributes:
        rows, columns: those of the tile.
        hidden: the hidden states of every head, in the dtype of its GEMMs.
        row_factors: a float32 number of each row, by which what was written is multiplied to get the gradient of the
            logits; None for 1.
        rest: memory for the last columns of exponentials, if the tile has none, see `tile_plan.split_columns`.
    """

    row_factors: Tensor | None = None
    rest: Tensor | None = None

    def __init__(self, heads: Sequence[Head], rows: Rows, columns: slice, hidden: list[Tensor], buffers: list[Tensor]):
        self.heads, self.rows, self.columns, self.hidden, self.buffers = heads, rows, columns, hidden, buffers
        self.computed = False

    def low(self, head: Head) -> Tensor | None:
        """The hidden states of a head in the rank of its adapter."""
        return None if head.adapter is None else self.rows.take(head.adapter.hidden)

    @property
    def logits(self) -> list[Tensor]:
        """The logits of every head, ``(n, columns)``. They may be overwritten. The next tile uses the same memory."""
        self.start()
        return self.buffers

    def start(self) -> None:
        """Launch the GEMMs that write the logits, unless they have been launched. Some tiles have none."""
        if not self.computed:
            self.computed = True
            for head, hidden, out in zip(self.heads, self.hidden, self.buffers):
                head.product(hidden, self.low(head), self.columns, out)

    def statistics(self, inputs: Inputs, options: Options) -> Results:
        """The `softmax_statistics` of the first head's rows, those of all ranks if the vocabulary is sharded."""
        head, shard = self.heads[0], self.heads[0].settings.shard
        if self.buffers:
            logits = self.logits[0]
            if shard.sizes:
                return merged(logits, inputs, shard, options)
            return backend_of(logits).softmax_statistics(logits, inputs, options)
        if shard.sizes:
            return merged_states(self.states(inputs, options), self.like(), inputs, shard, options)
        results = empty_results(self.like(), inputs.index, options)
        head.read_product(self.hidden[0], inputs, options, results, False)
        return results

    def exponentials(self, inputs: Inputs, options: Options, out: Tensor) -> Results:
        """The `statistics`, and the gradient of the log-probs but for the ``row_factors``.

        It is written to ``out`` and to the ``rest``. The first head `writes_exponentials`.
        """
        results, self.row_factors = self.heads[0].write_exponentials(self.hidden[0], inputs, options, out, self.rest)
        return results

    def states(self, inputs: Inputs, options: Options) -> Tensor:
        """The states of the first head's rows, whose vocabulary is sharded, of the columns of this process."""
        if self.buffers:
            return state_of_rows(self.logits[0], inputs, options)
        states = empty_states(self.like(), inputs, options)
        self.heads[0].read_product(self.hidden[0], inputs, options, (states, None, None), True)
        return states

    def like(self) -> Tensor:
        """An empty tensor with the rows, device and dtype of the logits."""
        return self.hidden[0].new_empty((self.rows.n, 0), dtype=self.heads[0].logits_dtype)


def tiles(heads: Sequence[Head], plan: TilePlan, logits: bool = True) -> Iterator[Tile]:
    """The tiles of a plan, one after the other. ``logits`` is that of the `Use` that it was made for."""
    count = min(plan.rows, plan.n)
    columns_of = [min(plan.columns, h.vocab) if plan.sliced else plan.split or h.vocab for h in heads]
    buffers = [empty_logits(h, count, columns, h.logits_dtype) for h, columns in zip(heads, columns_of) if logits]
    for rows in plan.row_tiles():
        hidden = [rows.take(h.hidden).to(h.dtype) for h in heads]
        for columns in plan.slices():
            parts = [b[: rows.n] if columns == ALL else b[:, : columns.stop - columns.start] for b in buffers]
            yield Tile(heads, rows, columns, hidden, parts)


def empty_logits(head: Head, rows: int, columns: int, dtype: torch.dtype, memory: Tensor | None = None) -> Tensor:
    """An uninitialized tile, with rows padded to `ALIGNED` bytes; at the beginning of ``memory``, if that is given."""
    width = padded(columns, dtype)
    if memory is None:
        logits = head.hidden.new_empty((rows, width), dtype=dtype)
    else:
        logits = memory.view(-1).view(dtype)[: rows * width].view(rows, width)
    if width > columns:
        logits[:, columns:] = 0  # bfloat16 GEMMs on a CPU multiply the padding by 0, so it must not be NaN
    return logits[:, :columns]
