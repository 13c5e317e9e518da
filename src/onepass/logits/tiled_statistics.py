"""The softmax statistics of every row of a linear head, for any loss, and their gradient.

`LinearLogits.statistics` calls `tiled_statistics`. The backward computes the logits again, which makes four GEMMs.

If only the hidden states require a gradient (or also their product with an adapter's A), and only one field of a row
has a gradient, the gradient of the hidden states is a multiple of the derivative of this field, whatever the loss will
be. The forward then computes this derivative, ``(N, H)`` in float32, while a tile of logits is in memory, and the
backward multiplies its rows by the upstream gradient. This takes two GEMMs. If exponentials take the place of the
logits, the derivative lacks a factor of each row, which is kept beside it for the backward.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from onepass.backend import backend_of
from onepass.core.collectives import of_all_ranks
from onepass.core.dispatch import (
    check_upstream,
    is_untraced,
    like_gradients,
    operation,
    without_autocast,
)
from onepass.core.options import NOT_DIFFERENTIABLE, FieldGradients, Inputs, Options, Results, empty_results, pick
from onepass.logits.gradients import Gradients, times_rows
from onepass.logits.head import ALL, COUNT, Head, HeadTensors, Settings
from onepass.logits.partitioned import gathered
from onepass.logits.tile_plan import Use, plan, row_bytes
from onepass.logits.tiles import Tile, tiles
from onepass.logits.valid_rows import defers
from onepass.softmax.shards import empty_states, merge_states
from onepass.softmax.statistics import differentiable_results


def tiled_statistics(tensors: HeadTensors, inputs: Inputs, settings: Settings, options: Options) -> tuple[Tensor, ...]:
    """The fields of ``options`` of N rows, differentiable. The index is ``(N,)`` or ``(N, K)``."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        return _TiledStatistics.apply(*tensors, *inputs.passed(), settings, options)
    return pick(results(tensors, inputs, True, settings, options), options)


def results(tensors: HeadTensors, inputs: Inputs, final: bool, settings: Settings, options: Options) -> Results:
    """The `softmax_statistics` of the logits. ``final`` says that no backward follows."""
    shard = settings.shard
    if not (shard.sizes and torch.compiler.is_compiling()):
        return _forward(tensors, inputs, final, settings, options)
    states = of_all_ranks(_states(tensors, inputs, final, settings, options), shard.group)
    return merge_states(states, rows_of(tensors, settings), inputs, shard, options)


def field_to_derive(
    tensors: HeadTensors, inputs: Inputs, needed: Sequence[bool], settings: Settings, options: Options
) -> str | None:
    """The field whose derivative the forward computes; None if the backward computes the gradient.

    Of several fields these are the log-probs: an entropy beside them is mostly logged. If it has a gradient after all,
    the backward computes that of both. The choice depends on nothing that a backward changes, so that a forward that is
    computed again, in a checkpoint, chooses alike, and so do all processes.
    """
    of = dict(zip(HeadTensors._fields, needed))
    if of["weight"] or of["bias"] or of["up"] or not is_untraced(*tensors):
        return None
    # A float16 derivative may overflow where the gradient, of a small loss, does not. Of a row that selects a class
    # outside of its support, a gradient is 0, whatever its upstream gradient is.
    if settings.max_memory is not None or settings.dtype == torch.float16 or inputs.support is not None:
        return None
    names = {name for name in options.names() if name not in NOT_DIFFERENTIABLE}
    if inputs.index is not None and inputs.index.dim() > 1 and names & {"log_probs", "selected"}:
        return None  # each index of a row has a derivative
    if "log_probs" in names:
        return "log_probs"
    return names.pop() if len(names) == 1 else None


class _TiledStatistics(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        *tensors, settings, options = arguments
        head, inputs, needed = *parts(tensors), ctx.needs_input_grad[:COUNT]
        derivatives: Sequence[Tensor | None] = None, None, None
        field = field_to_derive(head, inputs, needed, settings, options)
        if field is None:
            found = results(head, inputs, False, settings, options)
        else:
            found = _like_forward(head, inputs, settings, options)
            of_field = field, needed
            derivatives = read_tiles(head, inputs, False, settings, options, zip(found, (1, 0, 0)), field=of_field)
        ctx.save_for_backward(*tensors, found[0], *derivatives)
        ctx.settings, ctx.options, ctx.field = settings, options, field
        return differentiable_results(ctx, pick(found, options), options)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        check_upstream(*grads)
        *tensors, packed, of_hidden, of_low, row_factors = ctx.saved_tensors
        options = ctx.options
        head, inputs, needed = *parts(tensors), list(ctx.needs_input_grad[:COUNT])
        have = [name for name, grad in zip(options.names(), grads) if grad is not None]
        if have == [ctx.field]:
            grad = grads[options.names().index(ctx.field)]
            found: list[Tensor | None] = [None] * COUNT
            scale = grad if inputs.row_mask is None else grad.where(inputs.row_mask != 0, 0.0)
            first, second = (scale, None) if row_factors is None else (row_factors, scale)
            for n, derivative in ((0, of_hidden), (HeadTensors._fields.index("low"), of_low)):
                if derivative is not None:
                    out = torch.empty_like(derivative, dtype=tensors[n].dtype)
                    found[n] = times_rows(derivative, first, out, second)
        else:
            upstream = FieldGradients.of(options.fields, grads)
            found = _gradient(head, inputs, packed, upstream, needed, ctx.settings, options)
        return *found, *[None] * (len(inputs) + 2)


def parts(tensors: Sequence[Tensor | None]) -> tuple[HeadTensors, Inputs]:
    """The tensors of the head, and those that are read beside them."""
    return HeadTensors(*tensors[:COUNT]), Inputs(*tensors[COUNT:])  # type: ignore[arg-type]


def rows_of(tensors: HeadTensors, settings: Settings) -> Tensor:
    """An empty tensor ``(N, 0)`` with the number of rows, the device and the dtype of the logits."""
    return tensors.hidden.new_empty((tensors.hidden.shape[0], 0), dtype=settings.logits_dtype)


def _like_forward(tensors: HeadTensors, inputs: Inputs, settings: Settings, options: Options, **_: Any) -> Results:
    return empty_results(rows_of(tensors, settings), inputs.index, options)


@operation("onepass::linear_statistics", _like_forward, composite=True)
def _forward(
    tensors: HeadTensors, inputs: Inputs, final: bool, settings: Settings, options: Options
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    found = _like_forward(tensors, inputs, settings, options)
    read_tiles(tensors, inputs, final, settings, options, zip(found, (1, 0, 0)))
    return found


def _like_states(tensors: HeadTensors, inputs: Inputs, settings: Settings, options: Options, **_: Any) -> Tensor:
    return empty_states(rows_of(tensors, settings), inputs, options)


@operation("onepass::linear_shard_statistics", _like_states, composite=True)
def _states(tensors: HeadTensors, inputs: Inputs, final: bool, settings: Settings, options: Options) -> Tensor:
    """The states of all rows of this process's columns."""
    states = _like_states(tensors, inputs, settings, options)
    read_tiles(tensors, inputs, final, settings, options, [(states, 1)], exchange=False)
    return states


def read_tiles(
    tensors: HeadTensors, inputs: Inputs, final: bool, settings: Settings, options: Options,
    found: Iterable[tuple[Tensor | None, int]], exchange: bool = True,
    field: tuple[str, Sequence[bool]] | None = None,
) -> Sequence[Tensor | None]:  # fmt: skip
    """Write the statistics to the tensors ``found``, each with the dimension of its rows; 0 where masked.

    Without ``exchange`` they are the states of this process's columns. With a ``field``, returns its derivatives as
    `Gradients.derivatives` has them, with respect to the tensors for which they are needed.
    """
    hidden, weight = tensors[:2]
    whole = [(tensor, dim) for tensor, dim in found if tensor is not None]
    with gathered(*tensors.parameters()), without_autocast(hidden):
        head = Head(tensors, settings)
        logits = field is not None or not head.reads_its_product(inputs, options)
        bytes_of_row = row_bytes(inputs.index) + (0 if logits else head.state_bytes(options))
        later = None if final else gradient_use(inputs, weight.requires_grad)
        exponentials = field is not None and field[0] == "log_probs" and head.writes_exponentials(inputs, options)
        if exponentials:
            bytes_of_row += head.exponentials_bytes(options, in_place=inputs.row_mask is None)
        use = Use(bytes_of_row, gradient=field is not None, final=final, logits=logits, exponentials=exponentials)
        tile_plan = plan([head], inputs.row_mask, use, later)
        gradients = None if field is None else Gradients(head, tile_plan, field[1], wide=True)
        row_mask = inputs.row_mask if defers(inputs.row_mask) else None
        if tile_plan.row_ids is not None:
            for tensor, _ in whole:
                tensor.zero_()
        for tile in tiles([head], tile_plan, logits):
            read = inputs._replace(row_mask=row_mask).rows(tile.rows.take)
            if gradients is None or field is None:
                parts = tile.statistics(read, options) if exchange else (tile.states(read, options),)
            else:
                place = gradients.place(tile)
                if exponentials:
                    parts = tile.exponentials(read, options, place)
                else:
                    parts = statistics_and_derivative(tile, read, options, field[0], place)
                gradients.add(tile, place)
            for (tensor, dim), part in zip(whole, [p for p in parts if p is not None]):
                tile.rows.put(tensor, part, dim)
        return () if gradients is None else gradients.derivatives()


def statistics_and_derivative(tile: Tile, inputs: Inputs, options: Options, field: str, out: Tensor) -> Results:
    """The statistics of a tile, and the derivative of a field with respect to its logits, which is written to ``out``.

    One launch computes both if `supports_fused_loss`. In the batch-invariant mode the statistics are those of a forward
    without a gradient, bit for bit, so that the kernel is the same.
    """
    logits, shard = tile.logits[0], tile.heads[0].settings.shard
    backend = backend_of(logits)
    ones = torch.ones((), dtype=torch.promote_types(logits.dtype, torch.float32), device=logits.device)
    grads = [ones.expand(tile.rows.n) if name == field else None for name in options.names()]
    upstream = FieldGradients.of(options.fields, grads)
    fused = not (shard.sizes or options.invariant) and inputs.support is None
    if fused and backend.supports_fused_loss(logits, inputs.index, options):
        return backend.softmax_loss(logits, inputs, upstream, options, out)
    found = tile.statistics(inputs, options)
    backend_of(out).softmax_gradient(logits, inputs, found[0], upstream, options, out)
    return found


def gradient_use(inputs: Inputs, of_weight: bool) -> Use:
    """What the backward uses tiles for."""
    return Use(row_bytes(inputs.index), weight_gradient=of_weight, gradient=True, known=True)


@operation("onepass::linear_gradient", like_gradients, composite=True)
def _gradient(
    tensors: HeadTensors,
    inputs: Inputs,
    packed: Tensor,
    grads: FieldGradients,
    needed: list[bool],
    settings: Settings,
    options: Options,
) -> list[Tensor | None]:
    """The gradients of the tensors, each if ``needed``, from those of the fields.

    The statistics of the rows are known, so that the gradient of a slice of the vocabulary depends on no other slice.
    """
    with gathered(*tensors.parameters()), without_autocast(tensors.hidden):
        head = Head(tensors, settings)
        tile_plan = plan([head], inputs.row_mask, gradient_use(inputs, needed[1]))
        row_mask = inputs.row_mask if defers(inputs.row_mask) else None
        gradients = Gradients(head, tile_plan, needed)
        for tile in tiles([head], tile_plan):
            rows, columns, (logits,) = tile.rows, tile.columns, tile.logits
            if columns == ALL or columns.start == 0:
                of_rows = [None if t is None else rows.take(t) for t in grads]
                of_tile = inputs._replace(row_mask=row_mask).rows(rows.take)
                numbers = rows.take(packed, 1).contiguous()
            # An index outside the slice adds nothing to it. (One outside the vocabulary has made its row NaN already.)
            read = of_tile if columns == ALL else of_tile.columns(columns.start, columns.stop)
            place = gradients.place(tile)
            backend_of(logits).softmax_gradient(logits, read, numbers, FieldGradients(*of_rows), options, place)
            gradients.add(tile, place)
        return gradients.scaled(None)
