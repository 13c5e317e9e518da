"""The average of the log-probs of few rows of logits, and its gradient, with one launch in each direction.

These are the launches of `softmax_average` and of `softmax_gradient`, for contiguous logits and one index per row. The
time of few rows is that of the host, so that everything but the tensors is prepared once for each shape.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass.core.options import PACKED, Average, Inputs, Options
from onepass.kernels.launch import launch
from onepass.kernels.layout import layout_of
from onepass.kernels.softmax_gradient import plan_for as plan_for_gradient
from onepass.kernels.softmax_loss import FEW_ROWS, NO_STRIDES, NONE, reads_once
from onepass.kernels.softmax_loss import plan_for as plan_for_average

OF_FIELDS = False, False, False, False, True  # which fields have an upstream gradient: the log-probs


class FewRows(NamedTuple):
    """What the launches depend on besides the tensors."""

    rows: int
    forward: tuple[Any, ...]  # the arguments of `softmax_loss.plan_for`
    backward: tuple[Any, ...]  # the arguments of `softmax_gradient.plan_for`

    def average(self, logits: Tensor, index: Tensor, last: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The average, its gradient for the upstream gradient of the ``last`` one (None: 1), the statistics of the
        rows and the weight of a row: see `softmax_average`."""
        new, rows = logits.new_empty_strided, self.rows
        gradient = torch.empty_like(logits)
        packed = new((len(PACKED), rows), (rows, 1), dtype=torch.float32)
        log_probs = new((rows,), (1,), dtype=torch.float32)
        row_weight, total = new((3,), (1,), dtype=torch.float32), new((), (), dtype=torch.float32)
        results, of_average = (packed, log_probs, None), (None, last, row_weight, total)
        given = logits, gradient, None, index, index, None, *results, *NONE, *of_average
        launch(plan_for_average, self.forward, given)
        return total, gradient, packed, row_weight

    def correct(
        self, logits: Tensor, index: Tensor, packed: Tensor, row_weight: Tensor, upstream: Tensor, gradient: Tensor
    ) -> None:
        """Write the gradient again if it was computed for another upstream gradient: see `softmax_gradient`."""
        given = logits, None, row_weight, gradient, index, index, None, packed, None, None, None, None, upstream
        launch(plan_for_gradient, self.backward, given)


def few_rows(logits: Tensor, index: Tensor, average: Average, options: Options) -> Any:
    """`FewRows` for tensors of these shapes, dtypes and devices; None if `softmax_average` is not one launch for them.

    Args:
        logits: contiguous, aligned to 16 bytes.
        index: contiguous. It is the row mask, too.
        average: without a divisor.
    """
    rows = index.numel()
    if rows > FEW_ROWS or not reads_once(logits, Inputs(index), options):
        return None
    flat = layout_of(logits.view(-1, logits.shape[-1]))
    forward = flat, flat[1][0], False, NO_STRIDES, options, (average.factor, average.counted)
    return FewRows(rows, forward, (flat, flat, OF_FIELDS, (0,) * 5, rows, 1, options, True))
