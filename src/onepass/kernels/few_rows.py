"""The average of the log-probs of few rows of logits, and its gradient, with one launch in each direction.

These are the launches of `softmax_average` and of `softmax_gradient`, for contiguous logits and one index per row. The
time of few rows is that of the host, so that everything but the tensors is prepared once for each shape, and all small
results are in one tensor.
"""

from typing import Any

import torch
from torch import Tensor

from onepass.core.options import PACKED, Average, Inputs, Options
from onepass.kernels.launch import launch, repeat, start
from onepass.kernels.layout import layout_of, power_of_two
from onepass.kernels.softmax_gradient import plan_for as plan_for_gradient
from onepass.kernels.softmax_loss import FEW_ROWS, NO_STRIDES, NONE, reads_once
from onepass.kernels.softmax_loss import plan_for as plan_for_average
from onepass.kernels.zeros import zeros

OF_FIELDS = False, False, False, False, True  # which fields have an upstream gradient: the log-probs
WORD, FIRST = 4, 4  # bytes of a float32; where the statistics begin, after the weight of a row


class FewRows:
    """The launches for logits of one shape, dtype and device.

    The small results are parts of one float32 tensor, which is called ``numbers`` here: the weight of a row ``(3,)``,
    the statistics of the rows ``(len(PACKED), rows)``, their log-probs ``(rows,)`` and the workspace of a repeated
    launch. Each begins at a multiple of 16 bytes. The tensor begins with the weight of a row, and can be passed as
    ``row_weight``. It always has the same size, since a checkpoint compares what two forwards save.

    Args:
        logits: of this shape and dtype, on this device.
        rows: the number of rows.
        forward: the arguments of `softmax_loss.plan_for`.
        backward: the arguments of `softmax_gradient.plan_for`.
    """

    def __init__(self, logits: Tensor, rows: int, forward: tuple[Any, ...], backward: tuple[Any, ...]) -> None:
        self.rows, self.forward, self.backward = rows, forward, backward
        self.log_probs = FIRST + aligned(len(PACKED) * rows)
        self.workspace = self.log_probs + aligned(rows)
        with torch.cuda.device_of(logits):
            self.size = power_of_two(self.workspace + (plan_for_average(*forward).workspace or 0))

    def average(self, logits: Tensor, index: Tensor, last: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """The average, its gradient for the upstream gradient of the ``last`` one (None: 1), and the numbers.

        See `softmax_average`. The logits are contiguous and aligned to 16 bytes.
        """
        new = logits.new_empty_strided
        gradient, total = new(logits.shape, logits.stride()), new((), (), dtype=torch.float32)
        inputs = (logits, index) if last is None else (logits, index, last)
        key, known = repeat((self, "average"), inputs)
        if known is None:
            numbers = new((self.size,), (1,), dtype=torch.float32)
            results = self.packed(numbers), numbers[self.log_probs : self.log_probs + self.rows], None
            of_average = None, last, numbers, total
            given = logits, gradient, None, index, index, None, *results, *NONE, *of_average
            launch(plan_for_average, self.forward, given, key)
            return total, gradient, numbers
        numbers = zeros(self.size, logits.device, torch.float32)
        at, of_index = numbers.data_ptr(), index.data_ptr()
        results_at = at + WORD * FIRST, at + WORD * self.log_probs, None
        of_average_at = None, None if last is None else last.data_ptr(), at, total.data_ptr()
        given_at = logits.data_ptr(), gradient.data_ptr(), None, of_index, of_index, None
        start(known, logits.get_device(), (*given_at, *results_at, *NONE, *of_average_at, at + WORD * self.workspace))
        return total, gradient, numbers

    def correct(self, logits: Tensor, index: Tensor, numbers: Tensor, upstream: Tensor, gradient: Tensor) -> None:
        """Write the gradient again if it was computed for another upstream gradient: see `softmax_gradient`."""
        key, known = repeat((self, "correct"), (logits, index, numbers, upstream, gradient))
        if known is None:
            of_rows = numbers, gradient, index, index, None, self.packed(numbers)
            launch(plan_for_gradient, self.backward, (logits, None, *of_rows, *NONE, upstream), key)
            return
        at, of_index = numbers.data_ptr(), index.data_ptr()
        of_rows_at = at, gradient.data_ptr(), of_index, of_index, None, at + WORD * FIRST
        start(known, logits.get_device(), (logits.data_ptr(), None, *of_rows_at, *NONE, upstream.data_ptr()))

    def packed(self, numbers: Tensor) -> Tensor:
        """The statistics of the rows."""
        return numbers[FIRST : FIRST + len(PACKED) * self.rows].view(len(PACKED), self.rows)


def aligned(words: int) -> int:
    """The next multiple of 16 bytes."""
    return -(-words // FIRST) * FIRST


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
    return FewRows(logits, rows, forward, (flat, flat, OF_FIELDS, (0,) * 5, rows, 1, options, True))
