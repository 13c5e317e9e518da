"""The softmax statistics of every row of a linear head, for any loss, and their gradient.

`LinearLogits.statistics` calls `tiled_statistics`. The backward computes the logits again, which makes four GEMMs.
"""

from typing import Any

import torch
from torch import Tensor

from onepass.backend import backend_of
from onepass.core.dispatch import empty_gradients, operation, refuse_second_derivatives
from onepass.core.options import FieldGradients, Inputs, Options, Results, empty_results, pick
from onepass.logits.gradients import Gradients
from onepass.logits.partitioned import gathered
from onepass.logits.tiles import ALL, INDEX, ROW, Head, HeadTensors, Settings, Use, plan, tiles
from onepass.logits.valid_rows import defers
from onepass.softmax.shards import results_of
from onepass.softmax.statistics import returned


def tiled_statistics(tensors: HeadTensors, inputs: Inputs, settings: Settings, options: Options) -> tuple[Tensor, ...]:
    """The fields of ``options`` of N rows, differentiable. The index is ``(N,)`` or ``(N, K)``."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        fields: tuple[Tensor, ...] = _TiledStatistics.apply(*tensors, *inputs, settings, options)
        return fields
    return pick(_forward(tensors, inputs, True, settings, options), options)


class _TiledStatistics(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        *tensors, settings, options = arguments
        results = _forward(HeadTensors(*tensors[:3]), Inputs(*tensors[3:]), False, settings, options)
        ctx.save_for_backward(*tensors, results[0])
        ctx.settings, ctx.options = settings, options
        return returned(ctx, pick(results, options), options)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        *tensors, packed = ctx.saved_tensors
        upstream = FieldGradients.of(ctx.options.fields, grads)
        head, inputs, needed = HeadTensors(*tensors[:3]), Inputs(*tensors[3:]), list(ctx.needs_input_grad[:3])
        found = _gradient(head, inputs, packed, upstream, needed, ctx.settings, ctx.options)
        return *found, *[None] * 5


def _like_forward(tensors: HeadTensors, inputs: Inputs, settings: Settings, options: Options, **_: Any) -> Results:
    # Only the number of rows, the device and the dtype are used.
    rows = tensors.hidden.new_empty((tensors.hidden.shape[0], 0), dtype=settings.dtype)
    return empty_results(rows, inputs.index, options)


@operation("onepass::linear_statistics", _like_forward, composite=True)
def _forward(
    tensors: HeadTensors, inputs: Inputs, final: bool, settings: Settings, options: Options
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The `softmax_statistics` of the logits. ``final`` says that no backward follows."""
    hidden, weight, bias = tensors
    with gathered(weight, bias), torch.autocast(hidden.device.type, enabled=False):
        head = Head(tensors, settings)
        results = _like_forward(tensors, inputs, settings, options)
        cut = plan([head], inputs.row_mask, Use(row_bytes(inputs.index), final=final))
        row_mask = inputs.row_mask if defers(inputs.row_mask) else None
        if cut.row_ids is not None:
            for result in results:
                if result is not None:
                    result.zero_()
        for rows, _, _, (logits,) in tiles([head], cut):
            index, mask = (None if t is None else rows.take(t) for t in (inputs.index, row_mask))
            parts = results_of(logits, Inputs(index, mask, inputs.class_weights), settings.shard, options)
            for result, part, dim in zip(results, parts, (1, 0, 0)):
                if result is not None:
                    rows.put(result, part, dim)  # type: ignore[arg-type]  # both are None, or none
    return results


def row_bytes(index: Tensor | None) -> int:
    """Bytes of workspace per row, in addition to the logits."""
    return ROW + INDEX * (1 if index is None or index.dim() == 1 else index.shape[1])


def _like_gradient(tensors: HeadTensors, needed: list[bool], **_: Any) -> list[Tensor | None]:
    return empty_gradients(tensors, needed)


@operation("onepass::linear_gradient", _like_gradient, composite=True)
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
    hidden, weight, bias = tensors
    with gathered(weight, bias), torch.autocast(hidden.device.type, enabled=False):
        head = Head(tensors, settings)
        use = Use(row_bytes(inputs.index), weight_gradient=needed[1], known=True)
        cut = plan([head], inputs.row_mask, use)
        row_mask = inputs.row_mask if defers(inputs.row_mask) else None
        gradients = Gradients(head, cut, needed)
        for rows, columns, states, (logits,) in tiles([head], cut):
            if columns == ALL or columns.start == 0:
                index, mask, *of_rows = (None if t is None else rows.take(t) for t in (inputs.index, row_mask, *grads))
                numbers = rows.take(packed, 1).contiguous()
            # An index outside the slice adds nothing to it. (One outside the vocabulary has made its row NaN already.)
            of_slice = index if index is None or columns == ALL else index - columns.start
            weights = None if inputs.class_weights is None else inputs.class_weights[columns]
            read = Inputs(of_slice, mask, weights)
            backend_of(logits).softmax_gradient(logits, read, numbers, FieldGradients(*of_rows), options, logits)
            gradients.add(rows, columns, states, logits)
        return gradients.scaled(None)
