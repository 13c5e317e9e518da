"""Softmax statistics and gradient at once, and the average of rows: `softmax_loss` and `row_average` of `kernels`."""

from typing import Any

import torch
from torch import Tensor

from onepass.core.options import Average, FieldGradients, Inputs, Options, Results
from onepass.reference.softmax import read_rows, softmax_gradient, softmax_statistics


def supports_early_gradient(logits: Tensor, inputs: Inputs) -> bool:
    """Return False: a host that computes gains nothing from a backward that has less to launch."""
    return False


def prepare_average(logits: Tensor, index: Tensor, average: Average, options: Options, gradient: bool) -> Any:
    """Return None: there are no launches to prepare."""
    return None


def supports_fused_loss(logits: Tensor, index: Tensor | None, options: Options) -> bool:
    """Whether `softmax_loss` takes less time than its two parts."""
    return reads_once(logits, Inputs(index), options)


def reads_once(logits: Tensor, inputs: Inputs, options: Options) -> bool:
    """Whether one exponential is used for statistics and gradient. On a GPU, the gradient may turn out not to be
    used."""
    plain = options.fields == "log_probs" and inputs.index is not None and inputs.support is None
    return logits.is_cpu and plain


def softmax_loss(logits: Tensor, inputs: Inputs, grads: FieldGradients, options: Options, out: Tensor) -> Results:
    """Return the `softmax_statistics` of the logits, and write their `softmax_gradient` to ``out``."""
    if reads_once(logits, inputs, options):
        return read_rows(logits, inputs, options, grads.selected, out)
    results = softmax_statistics(logits, inputs, options)
    softmax_gradient(logits, inputs, results[0], grads, options, out)
    return results


def softmax_average(
    logits: Tensor, inputs: Inputs, average: Average, last: Tensor | None, options: Options, out: Tensor
) -> tuple[Results, Tensor, Tensor]:
    """Return the `softmax_statistics`, the average of the only field, log-probs, and the weight of a row.

    The gradient of the average is written to ``out``, for the upstream gradient of the ``last`` one (None: 1).
    """
    row_weight = compute_row_weight(logits, inputs.row_mask, average, last)
    results = softmax_loss(logits, inputs, FieldGradients(selected=row_weight[1]), options, out)
    total, row_weight = row_average(results[1], inputs.row_mask, average, row_weight)  # type: ignore[arg-type]
    return results, total, row_weight


def compute_row_weight(logits: Tensor, row_mask: Tensor | None, average: Average, last: Tensor | None = None) -> Tensor:
    """The weight of a row in an average, and how the backward is guessed, ``(3,)``; see `FieldGradients`."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    part = part_of(logits[..., 0], row_mask, average, dtype)
    return torch.stack([part, part if last is None else part * last[2], part])


def part_of(rows: Tensor, row_mask: Tensor | None, average: Average, dtype: torch.dtype) -> Tensor:
    """The weight of a row in an average."""
    part = torch.full((), average.factor, dtype=dtype, device=rows.device)
    if average.counted:
        part = part / (rows.numel() if row_mask is None else (row_mask != average.masked).sum())
    return part if average.divisor is None else part / average.divisor.to(dtype)


def row_average(
    values: Tensor, row_mask: Tensor | None, average: Average, row_weight: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The average of ``values``, and the weight of a row: ``row_weight`` if it is known."""
    row_weight = part_of(values, row_mask, average, values.dtype).view(1) if row_weight is None else row_weight
    return (values if row_mask is None else values.where(row_mask != average.masked, 0.0)).sum() * row_weight[
        0
    ], row_weight
