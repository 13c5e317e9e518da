"""The loss of the rows of one tile of logits: its value and, written over the tile, its gradient.

`tiled_loss` and `tiled_divergence` call these losses while a tile is in memory.
"""

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from operator import itemgetter
from typing import Any, Protocol

import torch
from torch import Tensor

from onepass.backend import backend_of
from onepass.core.checks import is_debugging
from onepass.core.options import (
    DIVERGENCE,
    NOT_DIFFERENTIABLE,
    FieldGradients,
    Inputs,
    Options,
    PairOptions,
    PairRows,
    empty_results,
    pick,
)
from onepass.core.shard import Shard
from onepass.logits.head import ALL, Head, HeadTensors, Settings
from onepass.logits.tile_plan import ROW, Rows, Use, row_bytes
from onepass.logits.tiles import Tile
from onepass.softmax.divergence import pair_numbers

Found = tuple[Tensor, Sequence[Tensor | None]]
Scale = Callable[[Rows], Tensor]


class RowLoss(Protocol):
    """The interface of a loss for `tiled_loss`.

    Attributes:
        dtype: of the losses.
        heads: linear heads whose tiles the loss reads in addition to those of the first head.
        row_inputs: differentiable tensors with an entry for every row.
        tensors: all tensors that the loss reads, including those of ``heads`` and the ``row_inputs``. Autograd saves
            them.
        used: how many of the columns the loss reads; None for all.
        groups: how many of the rows that are not masked belong to each group, which a tile holds whole; None for a loss
            of single rows.
        may_draw: whether the loss may draw random numbers.
    """

    may_draw: bool
    dtype: torch.dtype
    used: int | None
    groups: Sequence[int] | None
    heads: Sequence[tuple[HeadTensors, Settings]]
    row_inputs: Sequence[Tensor]

    @property
    def tensors(self) -> Sequence[Tensor | None]: ...

    def holding(self, tensors: Sequence[Tensor | None]) -> "RowLoss":
        """A copy of the loss with other ``tensors``."""

    def use(self, head: Head, gradient: bool) -> Use:
        """What the tiles of the first head are used for; ``gradient`` says whether their gradient is written."""

    def __call__(
        self,
        tile: Tile,
        row_mask: Tensor | None,
        scale: Scale | None,
        out: Tensor | None,
        parts: Iterator[slice],
    ) -> Found:
        """The loss of the rows of a tile, ``(n,)``, or of its groups.

        With ``scale``, which computes one number or one per row, also the gradients of ``Σ scale·loss``: that of the
        first logits is written to ``out``, which may be these logits, and those of the row inputs are returned. The
        rows come in ``parts``: each is written before the next is asked for, by a loss that is not written at once.
        """


class StatisticsLoss:
    """``loss_fn(fields, *row_inputs)`` of the fields of a tile's rows, differentiated by autograd.

    Args:
        loss_fn: see `LogitsSource.loss`; None if the loss is the only field.
        inputs: of all rows, without a mask.
        linear: whether the loss is linear in the fields. Its gradient is then known before the tile is read, and
            the tile is read once.
        groups: see `RowLoss`; ``loss_fn`` is then also called with the slice ``groups`` of those in the tile.
        shown: fields that ``loss_fn`` only shows to an observer.

    If the vocabulary is sharded, all processes compute the same loss.
    """

    heads: Sequence[tuple[HeadTensors, Settings]] = ()
    used: int | None = None

    def __init__(
        self,
        loss_fn: Callable[..., Tensor] | None,
        options: Options,
        dtype: torch.dtype,
        inputs: Inputs,
        row_inputs: Sequence[Tensor] = (),
        linear: bool = False,
        groups: Sequence[int] | None = None,
        shown: Sequence[str] = (),
    ) -> None:
        self.loss_fn, self.options, self.linear, self.groups = loss_fn, options, linear, groups
        self.differentiable = [n for n in options.names() if n not in NOT_DIFFERENTIABLE and n not in shown]
        self.inputs, self.row_inputs = inputs, row_inputs
        self.may_draw = loss_fn is not None and not linear
        self.dtype = torch.promote_types(dtype, torch.float32)
        self.row_bytes = row_bytes(inputs.index, row_inputs)
        self.checked = not torch.is_grad_enabled()

    @property
    def tensors(self) -> Sequence[Tensor | None]:
        return [*self.inputs, *self.row_inputs]

    def holding(self, tensors: Sequence[Tensor | None]) -> "StatisticsLoss":
        other = copy(self)
        count = len(self.inputs)
        other.inputs, other.row_inputs = Inputs(*tensors[:count]), tensors[count:]  # type: ignore[assignment]
        return other

    def use(self, head: Head, gradient: bool) -> Use:
        """See `RowLoss.use`."""
        if gradient and self.takes_exponentials(head):
            return Use(self.row_bytes + head.exponentials_bytes(self.options), gradient=True, exponentials=True)
        if gradient or not head.reads_its_product(self.inputs, self.options):
            return Use(self.row_bytes, gradient=gradient)
        return Use(self.row_bytes + head.state_bytes(self.options), logits=False)

    def takes_exponentials(self, head: Head) -> bool:
        """Whether the log-probs have the only gradient, and are computed with it, but for a factor of each row."""
        return self.differentiable == ["log_probs"] and head.writes_exponentials(self.inputs, self.options)

    def __call__(
        self,
        tile: Tile,
        row_mask: Tensor | None,
        scale: Scale | None,
        out: Tensor | None,
        parts: Iterator[slice],
    ) -> Found:
        """See `RowLoss.__call__`."""
        rows, options, backend = tile.rows, self.options, backend_of(tile.hidden[0])
        read = self.inputs.rows(rows.take)._replace(row_mask=row_mask)
        exponentials = out is not None and self.takes_exponentials(tile.heads[0])
        fused = out is not None and self.linear and not exponentials and not tile.heads[0].settings.shard.sizes
        fused = fused and not any(i.requires_grad for i in self.row_inputs)
        fused = fused and read.support is None and backend.supports_fused_loss(tile.logits[0], read.index, options)
        # Launched before all that it does not need: the device may be waiting for the host.
        results = None
        if exponentials:
            results = tile.exponentials(read, options, out)  # type: ignore[arg-type]  # mypy forgets that it is there
        elif not fused:
            results = tile.statistics(read, options)
        inputs = [rows.take(i).detach() for i in self.row_inputs]
        of_rows = None if scale is None else scale(rows)
        if results is None:
            x = tile.logits[0]
            like = pick(empty_results(x, read.index, options), options)
            anywhere = {n: torch.zeros_like(field) for n, field in zip(options.names(), like)}
            _, upstream, _ = self.differentiated(anywhere, inputs, rows, of_rows)
            results = backend.softmax_loss(x, read, upstream, options, out)
        fields = dict(zip(options.names(), pick(results, options)))
        if fused or (of_rows is None and self.checked):
            with torch.no_grad():
                return self.losses(fields, inputs, rows), ()
        if out is None:
            return self.differentiated(fields, inputs, rows, None)[0], ()
        loss, upstream, of_inputs = self.differentiated(fields, inputs, rows, of_rows)
        if tile.row_factors is not None:
            grad = torch.zeros_like(tile.row_factors) if upstream.selected is None else upstream.selected
            backend.scale_exponentials(tile.row_factors, grad, out, tile.rest)
            return loss, of_inputs
        for part in parts:
            x, to, packed, of_part, grads = tile.logits[0], out, results[0], read, upstream
            if part != ALL:
                x, to, packed, of_part = x[part], out[part], packed[:, part], read.rows(itemgetter(part))
                grads = FieldGradients(*[None if g is None else g[part] for g in upstream])
            backend.softmax_gradient(x, of_part, packed, grads, options, to)
        return loss, of_inputs

    def differentiated(
        self,
        fields: dict[str, Tensor],
        inputs: Sequence[Tensor],
        rows: Rows,
        scale: Any,
    ) -> tuple[Tensor, FieldGradients, Sequence[Tensor | None]]:
        """The losses and, with ``scale``, the gradients of ``Σ scale·loss`` with respect to fields and row inputs."""
        if self.loss_fn is None:  # autograd takes longer than the first GEMM of few rows
            field = fields[self.options.fields]
            grad = None if scale is None else scale.view(-1, *[1] * (field.dim() - 1)).expand_as(field)
            return self.losses(fields, inputs, rows), FieldGradients.of(self.options.fields, [grad]), ()
        leaves = self.differentiable
        fields |= {name: fields[name].detach().requires_grad_() for name in leaves}
        for part, whole in zip(inputs, self.row_inputs):
            part.requires_grad_(whole.requires_grad)
        variables = [fields[n] for n in leaves] + [i for i in inputs if i.requires_grad]
        with torch.enable_grad():
            loss = self.losses(fields, inputs, rows)
        grads: Sequence[Tensor | None] = [None] * len(variables)
        if loss.requires_grad:
            self.check(loss, variables, 1 if self.groups is None else self.groups[rows.groups.start])  # type: ignore[union-attr]
            if scale is not None:
                grads = torch.autograd.grad(loss, variables, scale.expand_as(loss), allow_unused=True)
        rest = iter(grads[len(leaves) :])
        of_inputs = [next(rest) if i.requires_grad else None for i in inputs]
        return loss.detach(), FieldGradients.of(" ".join(leaves), grads), of_inputs

    def losses(self, fields: dict[str, Tensor], inputs: Sequence[Tensor], rows: Rows) -> Tensor:
        """Call the loss function, which `linear_loss` checks."""
        if self.loss_fn is None:
            loss: Any = fields[self.options.fields]
        else:
            loss = self.loss_fn(fields, *inputs, **({} if rows.groups is None else {"groups": rows.groups}))
        return loss.sum(-1) if loss.dim() > 1 else loss

    def check(self, loss: Tensor, variables: Sequence[Tensor], own: int) -> None:
        """Check, on the first tile, that the loss differentiates only its arguments and that rows are independent.

        The first loss may depend on the ``own`` first rows.
        """
        if self.checked:
            return
        self.checked = True
        known = {id(v) for v in variables}
        nodes, seen = [loss.grad_fn], set()
        while nodes:
            node = nodes.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            leaf = getattr(node, "variable", None)
            if leaf is not None and id(leaf) not in known:
                raise ValueError(
                    "loss_fn: expected tensors that require a gradient among row_inputs, "
                    f"got one of shape {tuple(leaf.shape)} that the function closes over"
                )
            nodes += [following for following, _ in node.next_functions]
        if (is_debugging() or loss.is_cpu) and len(loss) > 1:
            first = torch.zeros_like(loss).index_fill_(0, torch.zeros(1, dtype=torch.long, device=loss.device), 1.0)
            found = torch.autograd.grad(loss, variables, first, retain_graph=True, allow_unused=True)
            # A NaN does not prove a dependence: it may be 0 times an infinite derivative of another row.
            if any(g is not None and ((g[own:] != 0) & ~g[own:].isnan()).any() for g in found):
                unit = "row" if self.groups is None else "group"
                raise ValueError(
                    f"loss_fn: expected a loss of each {unit} alone, got one whose first {unit} depends on others; "
                    "take groups=, or linear_softmax_statistics, for losses that couple rows"
                )


class DivergenceLoss:
    """The divergence of rows of logits from those of a teacher.

    Args:
        teacher: logits ``(N, V)``, or a linear head.
        temperatures: ``(N,)`` or None each, those of the rows of student and teacher.
        shard: the columns of a tile and of the teacher that are compared, if the vocabulary is sharded.
    """

    row_inputs: Sequence[Tensor] = ()
    groups: Sequence[int] | None = None
    may_draw = False

    def __init__(
        self,
        dtype: torch.dtype,
        teacher: Tensor | tuple[HeadTensors, Settings],
        temperatures: Sequence[Tensor | None],
        options: PairOptions,
        shard: Shard,
    ) -> None:
        self.temperatures = temperatures
        self.options, self.row_bytes, self.shard, self.used = options, ROW, shard, options.columns
        self.teacher: Tensor | None = None
        self.heads: Sequence[tuple[HeadTensors, Settings]] = ()
        if isinstance(teacher, Tensor):
            self.teacher, teacher_dtype = teacher, teacher.dtype
            most = max(shard.sizes, default=teacher.shape[-1])  # the same on all processes, as plans are
            self.row_bytes += most * teacher.element_size()  # of a copy, if some rows are masked
        else:
            self.heads, teacher_dtype = (teacher,), teacher[1].dtype
        self.dtype = torch.promote_types(torch.promote_types(dtype, teacher_dtype), torch.float32)

    @property
    def tensors(self) -> Sequence[Tensor | None]:
        return [*self.temperatures, *(self.heads[0][0] if self.heads else [self.teacher])]

    def holding(self, tensors: Sequence[Tensor | None]) -> "DivergenceLoss":
        other = copy(self)
        other.temperatures, tensors = tensors[:2], tensors[2:]
        if self.heads:
            other.heads = ((HeadTensors(*tensors), self.heads[0][1]),)  # type: ignore[arg-type]
        else:
            (other.teacher,) = tensors
        return other

    def use(self, head: Head, gradient: bool) -> Use:
        """See `RowLoss.use`."""
        return Use(self.row_bytes, gradient=gradient)

    def __call__(
        self,
        tile: Tile,
        row_mask: Tensor | None,
        scale: Scale | None,
        out: Tensor | None,
        parts: Iterator[slice],
    ) -> Found:
        """See `RowLoss.__call__`."""
        columns, rows, logits = slice(self.options.columns), tile.rows, tile.logits
        teacher = logits[1] if self.teacher is None else rows.take(self.teacher)
        pair = logits[0][:, columns], teacher[:, columns]
        read = PairRows(row_mask, *[None if t is None else rows.take(t) for t in self.temperatures])
        if self.shard.sizes:
            packed = pair_numbers(*pair, read, self.shard, self.options)
        else:
            packed = backend_of(*pair).divergence(*pair, read, self.options)
        if scale is None or out is None:
            return packed[DIVERGENCE], ()
        grad = scale(rows).expand(rows.n)
        for part in parts:
            if self.options.columns != 0:  # as on a rank that holds none of the columns that are compared
                x, y, to = pair[0][part], pair[1][part], out[part, columns]
                of_part = read.rows(itemgetter(part))
                numbers = packed if part == ALL else packed[:, part]
                backend_of(x, y).divergence_gradient(x, y, of_part, numbers, grad[part], False, self.options, to)
            if self.options.columns is not None:
                out[part, self.options.columns :] = 0
        return packed[DIVERGENCE], ()
