"""Numbers per row of a linear head, for any loss: four products, since the backward computes the logits again."""

from typing import Any

import torch
from torch import Tensor

from onepass.dispatch import operation, path_of, refuse_second_derivatives
from onepass.head.gather import gathered
from onepass.head.tiles import ALL, INDEX, ROW, Gradients, Head, defers, empty_gradients, plan, tiles
from onepass.options import Options, Results, empty_results, pick
from onepass.statistics import returned, upstream_of


def statistics(hidden: Tensor, weight: Tensor, bias: Tensor | None, *arguments: Any) -> tuple[Tensor, ...]:
    """The fields of ``options`` of rows ``(N, H)``, differentiable.

    ``arguments`` are ``(N,)`` or ``(N, K)`` index, ``(N,)`` row mask, class weights, options and `Settings`.
    """
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (hidden, weight, bias)):
        fields: tuple[Tensor, ...] = _LinearStatistics.apply(hidden, weight, bias, *arguments)
        return fields
    *others, options, settings = arguments
    return pick(linear_statistics(hidden, weight, bias, *others, True, *settings, options), options)


class _LinearStatistics(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        *tensors, options, settings = arguments
        results = linear_statistics(*tensors, False, *settings, options)
        ctx.save_for_backward(*tensors, results[0])
        ctx.options, ctx.settings = options, settings
        return returned(ctx, results, options)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        upstream = upstream_of(dict(zip(ctx.options.names, grads)))
        needed = ctx.needs_input_grad[:3]
        found = linear_gradient(*ctx.saved_tensors, *upstream, list(needed), *ctx.settings, ctx.options)
        return *found, *[None] * 5


@operation(
    "onepass::linear_statistics",
    lambda hidden, index, dtype, options, **_: empty_linear_results(hidden, index, dtype, options),
    composite=True,
)
def linear_statistics(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    index: Tensor | None,
    row_mask: Tensor | None,
    class_weights: Tensor | None,
    alone: bool,
    dtype: torch.dtype,
    max_memory: int | None,
    bias_apart: bool,
    options: Options,
) -> Results:
    """As `kernels.softmax_statistics`, of ``(N, V)`` logits; ``alone`` says that no backward follows."""
    with gathered(weight, bias), torch.autocast(hidden.device.type, enabled=False):
        head = Head(hidden, weight, bias, dtype, bias_apart)
        results = empty_linear_results(hidden, index, dtype, options)
        row_mask, options = mask_of(index, row_mask, options)
        cut = plan([head], row_mask, False, max_memory, row_bytes(index), alone=alone)
        row_mask = row_mask if defers(row_mask) else None
        if cut.kept is not None:
            for result in results:
                if result is not None:
                    result.zero_()
        for rows, _, _, (logits,) in tiles([head], cut):
            of_rows = [None if t is None else rows.take(t) for t in (index, row_mask)]
            of_tile = path_of(logits).softmax_statistics(logits, *of_rows, class_weights, options)
            for result, part, dim in zip(results, of_tile, (1, 0, 0)):
                if result is not None:
                    rows.put(result, part, dim)
    return results


def mask_of(index: Tensor | None, row_mask: Tensor | None, options: Options) -> tuple[Tensor | None, Options]:
    """One mask for both ways to leave rows out."""
    if options.ignore_index is None or index is None:
        return row_mask, options
    return index != options.ignore_index, options._replace(ignore_index=None)


def row_bytes(index: Tensor | None) -> int:
    return ROW + INDEX * (1 if index is None or index.dim() == 1 else index.shape[1])


@operation(
    "onepass::linear_gradient",
    lambda hidden, weight, bias, needed, **_: empty_gradients((hidden, weight, bias), needed),
    composite=True,
)
def linear_gradient(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    index: Tensor | None,
    row_mask: Tensor | None,
    class_weights: Tensor | None,
    packed: Tensor,
    grad_log_normalizer: Tensor | None,
    grad_expected_logit: Tensor | None,
    grad_weighted_logit: Tensor | None,
    grad_tempered: Tensor | None,
    grad_selected: Tensor | None,
    needed: list[bool],
    dtype: torch.dtype,
    max_memory: int | None,
    bias_apart: bool,
    options: Options,
) -> list[Tensor | None]:
    """Of hidden, weight and bias, each where ``needed``, from the gradients of the statistics.

    The logits of a slice of the vocabulary have a gradient of their own, given the rows' numbers.
    """
    upstream = (grad_log_normalizer, grad_expected_logit, grad_weighted_logit, grad_tempered, grad_selected)
    with gathered(weight, bias), torch.autocast(hidden.device.type, enabled=False):
        head = Head(hidden, weight, bias, dtype, bias_apart)
        row_mask, options = mask_of(index, row_mask, options)
        cut = plan([head], row_mask, needed[1], max_memory, row_bytes(index), known=True)
        row_mask = row_mask if defers(row_mask) else None
        gradients = Gradients(head, cut, needed)
        of_rows: list[Tensor | None] = []
        for rows, columns, states, (logits,) in tiles([head], cut):
            if columns == ALL or columns.start == 0:
                of_rows = [None if t is None else rows.take(t) for t in (index, row_mask, *upstream)]
                numbers = rows.take(packed, 1).contiguous()
            chosen, mask, *of_tile = of_rows
            # An index outside the slice adds nothing there: one outside the vocabulary has made its row NaN before.
            chosen = chosen if chosen is None or columns == ALL else chosen - columns.start
            weights = None if class_weights is None else class_weights[columns]
            path_of(logits).softmax_gradient(logits, chosen, mask, weights, numbers, *of_tile, options, logits)
            gradients.add(rows, columns, states, logits)
        return gradients.scaled(None)


def empty_linear_results(hidden: Tensor, index: Tensor | None, dtype: torch.dtype, options: Options) -> Results:
    """Of logits ``(N, V)``, of which only rows, device and dtype matter here."""
    return empty_results(hidden.new_empty((hidden.shape[0], 0), dtype=dtype), index, options)
