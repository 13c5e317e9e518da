"""The gradients of the tensors of a linear head, summed over tiles of logits.

`tiled_loss`, `tiled_statistics` and `tiled_divergence` use them.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from onepass.backend import backend_of
from onepass.core.collectives import process_group
from onepass.logits.head import ALL, Head
from onepass.logits.tile_plan import Rows, TilePlan, needs_sum
from onepass.logits.tiles import Tile, empty_logits

ROWS_OF_PART = 1024  # see `Gradients.parts`; GEMMs are slow for fewer


class Gradients:
    """The gradients of the `HeadTensors`, each if ``needed``, to which tiles are added.

    That of the hidden states is in the dtype of sums if it is ``wide``, and is then scaled later, which includes the
    factors of its rows; see `derivatives`.
    From column ``used`` on, the gradient of the logits is 0. That of the hidden states does not read these rows of the
    weight, which are padding and may be NaN.
    """

    def __init__(
        self, head: Head, plan: TilePlan, needed: Sequence[bool], wide: bool = False, used: int | None = None
    ) -> None:
        self.head, self.plan, self.needed, self.used = head, plan, needed[:3], used
        self.adapter: Gradients | None = None
        if head.adapter is not None and any(needed[3:]):
            self.adapter = Gradients(head.adapter, plan, (*needed[3:], False), wide, used)
        self.sum_dtype = torch.promote_types(head.dtype, torch.float32)
        self.wide = wide
        self.row_factors: Tensor | None = None  # of all rows, if it is ``wide`` and the tiles have any
        self.hidden: Tensor | None = None
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None
        self.total: Tensor | None = None  # the gradient of hidden, summed over slices of the vocabulary
        self.waiting: tuple[Rows | None, Tensor] | None = None  # what `exchange` sums next
        self.under_way: tuple[Any, Rows | None, Tensor] | None = None  # what it sums now
        self.left = plan.n  # rows that were not added yet
        self.has_hidden = False  # whether the hidden states' part of the tile was added, see `parts`
        self.batch: Tensor | None = None  # the gradient of the logits, in the dtype of the GEMMs if theirs is another
        self.done = self.held = 0  # rows that were added, and that `batch` holds
        # Without rows it is 0, whatever it is scaled by; if slices cover all rows, their total is the gradient itself.
        if needed[0] and plan.n and not (plan.sliced and plan.row_ids is None):
            new = torch.empty if plan.row_ids is None else torch.zeros
            # A float16 gradient is rounded once, after it is scaled.
            dtype = self.sum_dtype if wide or head.dtype == torch.float16 else head.hidden.dtype
            self.hidden = new(head.hidden.shape, dtype=dtype, device=head.hidden.device)
        summed = needs_sum(head, -(-plan.n // plan.batch)) and not plan.sliced
        self.weight_dtype = self.sum_dtype if summed else head.weight.dtype
        # Saved, since the parameters may be partitioned again when the backward runs.
        self.shapes = head.hidden.shape, head.weight.shape, head.weight.shape[:1]

    def place(self, tile: Tile) -> Tensor:
        """Where the gradient of the next tile belongs: over its logits, or in the dtype of the GEMMs."""
        logits = tile.buffers[0]
        if logits.dtype == self.head.dtype:
            return logits
        n, columns = logits.shape
        if self.batch is None:
            self.batch = empty_logits(self.head, min(self.plan.batch, self.plan.n), columns, self.head.dtype)
        return self.batch[self.held : self.held + n, :columns]

    def rest(self, tile: Tile) -> Tensor | None:
        """Where the last columns of a tile belong that has no memory for them, see `tile_plan.split_columns`."""
        if self.plan.split is None:
            return None
        self.weight = tile.buffers[0].new_empty(self.shapes[1], dtype=self.weight_dtype)
        return empty_logits(self.head, tile.rows.n, self.plan.vocab - self.plan.split, self.head.dtype, self.weight)

    def parts(self, tile: Tile, gradient: Tensor) -> Iterator[slice]:
        """The rows of a tile, some at a time. Their ``gradient`` is written before the next are asked for.

        If the gradient of the hidden states is summed over the processes, that of some rows is while the gradient of
        the logits of the next is written. GEMMs occupy all multiprocessors, so that nothing runs beside them; kernels
        that are bound by memory do not.
        """
        n, settings = tile.rows.n, self.head.settings
        sums = self.needed[0] and settings.sums_hidden and settings.shard.ranks > 1
        if not sums or self.plan.sliced or self.batch is not None or n < 2 * ROWS_OF_PART:
            self.exchange()
            yield ALL
            return
        for first in range(0, n, ROWS_OF_PART):
            part = slice(first, min(first + ROWS_OF_PART, n))
            self.exchange()
            yield part
            self.add_hidden(tile.rows.part(part), tile.columns, gradient[part])
        self.has_hidden = True

    def add(self, tile: Tile, gradient: Tensor) -> None:
        """Add a tile, given the ``gradient`` of its logits, in its `place`, but for its ``row_factors``."""
        rows, columns, hidden = tile.rows, tile.columns, tile.hidden[0]
        has_hidden, self.has_hidden = self.has_hidden, False
        self.left -= rows.n
        if self.batch is not None and not self.plan.sliced:
            self.held += rows.n
            if not rows.ends_batch:
                return
            gradient, several = self.batch[: self.held], self.held > rows.n
            if several:
                rows = self.plan.between(self.done, self.done + self.held)
                hidden = rows.take(self.head.hidden).to(self.head.dtype) if self.needed[1] else hidden
            self.done, self.held = self.done + self.held, 0
        self.add_products(rows, columns, gradient, hidden, has_hidden, tile)
        if self.adapter is not None:
            self.adapter.left = self.left
            self.adapter.add_products(rows, columns, gradient, rows.take(self.adapter.head.hidden), False)
        if self.left <= 0:  # the gradients may be kept until the backward, and these are as large as the weight
            self.batch = None
            self.head.release()

    def add_products(
        self, rows: Rows, columns: slice, gradient: Tensor, hidden: Tensor, has_hidden: bool, tile: Tile | None = None
    ) -> None:
        """Add the products of the gradient of some logits, whose rows have the states ``hidden``.

        A ``tile`` may have ``row_factors``, and the ``rest`` of the gradient.
        """
        row_factors, rest = (None, None) if tile is None else (tile.row_factors, tile.rest)
        if self.wide and row_factors is not None:
            if self.row_factors is None:
                self.row_factors = row_factors.new_zeros(self.shapes[0][:1])
            rows.put(self.row_factors, row_factors)
            row_factors = None
        if self.needed[0] and not has_hidden:
            self.add_hidden(rows, columns, gradient, row_factors, rest)
        if self.left <= 0:
            self.exchange()
        if self.needed[1]:
            if row_factors is not None:  # of a row of the gradient, and so of the row that it is multiplied with
                hidden = times_rows(hidden, row_factors, hidden.new_empty(hidden.shape))
            if self.plan.sliced:
                if self.weight is None:
                    self.weight = gradient.new_empty(self.shapes[1], dtype=self.weight_dtype)
                self.gemm(gradient.t(), hidden, self.weight_dtype, self.weight[columns])
            elif rest is not None and self.weight is not None:
                split = gradient.shape[1]
                self.gemm(rest.t(), hidden, self.weight_dtype, self.weight[split:])  # before the rest is overwritten
                self.gemm(gradient.t(), hidden, self.weight_dtype, self.weight[:split])
            elif self.weight is None:
                self.weight = self.gemm(gradient.t(), hidden, self.weight_dtype)
            else:
                self.add_gemm(self.weight, gradient.t(), hidden)
        if self.needed[2]:
            total = gradient.sum(0, dtype=self.sum_dtype)
            if self.bias is None:
                self.bias = total.new_zeros(self.shapes[2]) if self.plan.sliced else torch.zeros_like(total)
            self.bias[columns] += total

    def add_hidden(
        self, rows: Rows, columns: slice, gradient: Tensor, row_factors: Tensor | None = None,
        rest: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Add a tile to the gradient of the hidden states."""
        weight = self.head.factors(columns)[0]
        if self.used is not None:
            gradient, weight = gradient[:, : self.used], weight[: self.used]
        if self.plan.sliced:
            if self.total is None:
                self.total = self.gemm(gradient, weight, self.sum_dtype)
            else:
                self.add_gemm(self.total, gradient, weight)
            if columns.stop == self.plan.vocab:
                if self.hidden is None:
                    self.hidden = self.total
                    self.put(None, self.total)
                else:
                    self.put(rows, self.total)
                self.total = None
        elif self.hidden is not None:
            if row_factors is not None:
                product = self.gemm(gradient, weight[: gradient.shape[1]], self.sum_dtype)
                if rest is not None:
                    self.add_gemm(product, rest, weight[gradient.shape[1] :])
                part = rows.take(self.hidden) if isinstance(rows.ids, slice) else product
                times_rows(product, row_factors, part)
                self.put(None if isinstance(rows.ids, slice) else rows, part)
            elif isinstance(rows.ids, slice):
                self.put(None, self.row_gemm(gradient, weight, self.hidden.dtype, rows.take(self.hidden)))
            else:
                self.put(rows, self.row_gemm(gradient, weight, self.hidden.dtype))

    def put(self, rows: Rows | None, part: Tensor) -> None:
        """Write a part of the gradient of hidden to its ``rows``, which are None if it lies there already.

        If it is summed over the processes, that begins in `exchange`.
        """
        settings = self.head.settings
        if settings.sums_hidden and settings.shard.ranks > 1:
            self.exchange()
            self.waiting = rows, part
        elif rows is not None and self.hidden is not None:
            rows.put(self.hidden, part)

    def exchange(self) -> None:
        """Begin to sum what `put` was given last over the processes, beside the kernels that are launched next."""
        if self.waiting is not None:
            (rows, part), self.waiting = self.waiting, None
            self.finish()
            work = dist.all_reduce(part, group=process_group(self.head.settings.shard.group), async_op=True)
            self.under_way = work, rows, part

    def finish(self) -> None:
        """Wait for the sum that is under way, and write it to its rows."""
        if self.under_way is not None:
            work, rows, part = self.under_way
            self.under_way = None
            work.wait()
            if rows is not None and self.hidden is not None:
                rows.put(self.hidden, part)

    def row_gemm(self, a: Tensor, b: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """`gemm`, whose rows do not depend on each other if the settings say so."""
        if not self.head.settings.invariant_gemms or not a.shape[1]:
            return self.gemm(a, b, dtype, out)
        out = a.new_empty((len(a), b.shape[1]), dtype=dtype) if out is None else out
        backend_of(a).row_gemm(a, b, None, out)
        return out

    def gemm(self, a: Tensor, b: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """``a @ b``, rounded once to ``dtype``, and written into ``out`` if it is given."""
        if dtype == a.dtype:
            return torch.mm(a, b, out=out)
        if dtype == torch.float32 and not self.head.upcasts and a.dtype.itemsize < 4:
            return torch.mm(a, b, out_dtype=dtype, out=out)
        if self.head.upcasts:
            result = torch.mm(a.float(), b.float())
        elif a.dtype.itemsize >= 4:
            result = torch.mm(a, b)
        else:
            result = torch.mm(a, b, out_dtype=torch.float32)
        return result.to(dtype) if out is None else out.copy_(result)

    def add_gemm(self, total: Tensor, a: Tensor, b: Tensor) -> None:
        """``total += a @ b``."""
        if self.head.upcasts:
            total.addmm_(a.float(), b.float())
        elif total.dtype == a.dtype:
            total.addmm_(a, b)
        else:
            torch.addmm(total, a, b, out_dtype=total.dtype, out=total)

    def derivatives(self) -> list[Tensor | None]:
        """The gradients of the hidden states and of those in the rank of the adapter, each if it is needed, but for a
        factor of each row; and these factors, or None for 1.

        The gradients are not rounded, and 0 for rows that were not computed.
        """
        self.exchange()
        self.finish()
        found = self.hidden
        if self.needed[0] and found is None:
            found = self.head.hidden.new_zeros(self.shapes[0], dtype=self.sum_dtype)
        return [found, None if self.adapter is None else self.adapter.derivatives()[0], self.row_factors]

    def scaled(self, scale: Tensor | None, row_mask: Tensor | None = None) -> list[Tensor | None]:
        """The gradients times ``scale``, each rounded once to the dtype of its tensor.

        This can be called only once, since the gradients are not kept.

        Args:
            scale: one number; None for 1.
            row_mask: a bool for each row. Where it is False, the gradient of the hidden states is 0, even if the scale
                is infinite or NaN.
        """
        self.exchange()
        self.finish()
        results: list[Tensor | None] = []
        like = (self.head.hidden, self.head.weight, self.head.bias)
        for value, of, shape, needed in zip((self.hidden, self.weight, self.bias), like, self.shapes, self.needed):
            if not needed or of is None:
                results.append(None)
            elif value is None:  # no row was computed
                results.append(torch.zeros(shape, dtype=of.dtype, device=of.device))
            else:
                out = value if value.dtype == of.dtype else torch.empty_like(value, dtype=of.dtype)
                if scale is not None:
                    backend_of(value).scale(value, scale, out)
                elif out is not value:
                    out.copy_(value)
                results.append(out)
        if row_mask is not None and results[0] is not None:
            times_rows(results[0], row_mask, results[0])
        self.hidden = self.weight = self.bias = None
        return results + ([None, None] if self.adapter is None else self.adapter.scaled(scale, row_mask)[:2])


def times_rows(matrix: Tensor, row_factors: Tensor, out: Tensor, others: Tensor | None = None) -> Tensor:
    """Write ``matrix`` ``(N, H)`` times a factor of each row, rounded once, to ``out``, which is returned.

    Each row is then multiplied by its number in ``others``, if that is given. A row with a factor of 0 becomes 0, even
    where it is infinite or NaN. ``out`` may be ``matrix``.
    """
    backend_of(matrix).scale(matrix.contiguous(), row_factors, out, others)
    return out
