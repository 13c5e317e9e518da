"""The average of the log-probs of logits, and its gradient, by launches that are prepared once for each shape.

These are the launches of `softmax_average` and of `softmax_gradient`, for contiguous logits and one index per row: one
in each direction for few rows, whose time is that of the host, and three and one for many. Without a gradient they are
those of `softmax_statistics` and `row_average`. All small results are in one tensor.
"""

from typing import Any

import torch
from torch import Tensor

from onepass.core.options import PACKED, Average, Inputs, Options
from onepass.kernels.launch import launch, quick, repeated, start
from onepass.kernels.layout import layout_of, power_of_two
from onepass.kernels.row_average import plan_of_average, plan_of_weight
from onepass.kernels.softmax_gradient import plan_for as plan_for_gradient
from onepass.kernels.softmax_loss import FEW_ROWS, NO_STRIDES, NONE, reads_once
from onepass.kernels.softmax_loss import plan_for as plan_for_loss
from onepass.kernels.softmax_statistics import plan_for as plan_for_statistics
from onepass.kernels.zeros import empty, kept, zeros

OF_FIELDS = False, False, False, False, True  # which fields have an upstream gradient: the log-probs
# Bytes of a float32; where the guessed upstream gradient of a row begins, and where the statistics do.
WORD, GUESS, FIRST = 4, 4, 8
Pointers = tuple[int | None, ...]
MOST_ROWS = 2**17  # as in `logits.source`, since one program computes their average


class PreparedAverage:
    """The launches for logits of one shape, dtype and device.

    The small results are parts of one float32 tensor, which is called ``numbers`` here: the weight of a row ``(3,)``,
    the upstream gradient that is guessed for a row ``(1,)``, the statistics of the rows ``(len(PACKED), rows)``, their
    log-probs ``(rows,)`` and, for few rows, the workspace of a repeated launch. Each begins at a multiple of 16 bytes.
    The tensor begins with the weight of a row, and can be passed as ``row_weight``. It always has the same size, since
    a checkpoint compares what two forwards save.

    Args:
        logits: of this shape and dtype, on this device.
        rows: the number of rows.
        average: of the rows, without a divisor.
        options: of `softmax_statistics`.
    """

    def __init__(self, logits: Tensor, rows: int, average: Average, options: Options) -> None:
        self.rows, self.counted, self.at_once = rows, average.counted, rows <= FEW_ROWS
        self.options = options
        self.first, self.later = (self, "first"), (self, "later")  # the keys of launches without and with a last one
        self.like = tuple(logits.shape), logits.stride(), logits.dtype  # the arguments of `empty`
        flat = layout_of(logits.view(-1, logits.shape[-1]))
        how = (average.factor, average.counted) if self.at_once else None
        self.of_loss = flat, flat[1][0], False, NO_STRIDES, options, how  # the arguments of `softmax_loss.plan_for`
        self.of_rows = rows, average.factor, average.counted, average.masked  # of those in `row_average`
        self.of_gradient = flat, flat, OF_FIELDS, (0,) * 5, rows, 1, options, True
        self.log_probs = FIRST + aligned(len(PACKED) * rows)
        self.size = self.workspace = self.log_probs + aligned(rows)
        if self.at_once:
            with torch.cuda.device_of(logits):
                self.size = power_of_two(self.workspace + (plan_for_loss(*self.of_loss).workspace or 0))

    def average(
        self, logits: Tensor, index: Tensor, at: tuple[int, int], last: Tensor | None, stream: int | None
    ) -> tuple[Tensor, Tensor, Tensor, Pointers | None]:
        """The average, its gradient for the upstream gradient of the ``last`` one (None: 1), and the numbers.

        See `softmax_average`. Logits and index are contiguous, aligned to 16 bytes and on the current device.

        Args:
            at: the addresses of logits and index.
            stream: the current one; None if it is captured in a CUDA graph.

        Returns:
            The three tensors, and what `correct` may be given.
        """
        key = self.first if last is None else self.later
        if self.at_once:
            ready: list[Any] = [quick(key)]
        else:
            ready = [repeated(k) for k in (key, (key, "weight"), (key, "mean"))]
        if None in ready:
            return self.first_average(logits, index, last, key)
        of_logits, of_index = at
        device, last_at = logits.get_device(), None if last is None else last.data_ptr()
        gradient, total = empty(*self.like), empty((), (), torch.float32)
        numbers = None
        if not self.at_once:
            numbers = empty((self.size,), (1,), torch.float32)
        elif stream is not None:
            numbers = kept(device, stream, self.size, torch.float32)
        numbers = zeros(self.size, logits.device, torch.float32) if numbers is None else numbers
        of_gradient, to, total_at = gradient.data_ptr(), numbers.data_ptr(), total.data_ptr()
        packed_at, log_probs_at = to + WORD * FIRST, to + WORD * self.log_probs
        given = of_logits, of_gradient, None, of_index, of_index, None, packed_at, log_probs_at, None
        if self.at_once:
            (begin,) = ready
            begin(device, stream, *given, *NONE, None, last_at, to, total_at, to + WORD * self.workspace)
        else:
            of_loss, of_weight, of_mean = ready
            guess_at = to + WORD * GUESS
            start(of_weight, device, (to, guess_at, of_index if self.counted else None, None, last_at))
            space = zeros(of_loss.workspace, logits.device) if of_loss.workspace else None  # alive until the launch
            space_at = None if space is None else space.data_ptr()
            start(of_loss, device, (*given, *NONE[:3], guess_at, *NONE, space_at))
            start(of_mean, device, (log_probs_at, of_index, None, to, total_at))
        return total, gradient, numbers, (of_logits, None, to, of_gradient, of_index, of_index, None, packed_at)

    def first_average(
        self, logits: Tensor, index: Tensor, last: Tensor | None, key: Any
    ) -> tuple[Tensor, Tensor, Tensor, Pointers | None]:
        """The `average` by launches that are not prepared yet, which are kept by the ``key``."""
        new = logits.new_empty_strided
        gradient, total = new(logits.shape, logits.stride()), new((), (), dtype=torch.float32)
        numbers = new((self.size,), (1,), dtype=torch.float32)
        made = total, gradient, numbers, None
        given = logits, gradient, None, index, index, None, *self.results(numbers)
        if self.at_once:
            launch(plan_for_loss, self.of_loss, (*given, *NONE, None, last, numbers, total), key)
            return made
        guess, log_probs = numbers[GUESS : GUESS + 1], self.results(numbers)[1]
        mask = index if self.counted else None
        launch(plan_of_weight, self.of_rows, (numbers, guess, mask, None, last), (key, "weight"))
        launch(plan_for_loss, self.of_loss, (*given, *NONE[:3], guess, *NONE), key)
        launch(plan_of_average, self.of_rows, (log_probs, index, None, numbers, total), (key, "mean"))
        return made

    def correct(
        self, logits: Tensor, index: Tensor, numbers: Tensor, upstream: Tensor, gradient: Tensor,
        pointers: Pointers | None, where: tuple[int, int], repeats: bool,
    ) -> None:  # fmt: skip
        """Write the gradient again if it was computed for another upstream gradient: see `softmax_gradient`.

        Args:
            pointers: to these tensors but for the upstream gradient, in the order of the kernel's arguments, if they
                are still where `average` had them; None if they may have another layout.
            where: the current device and stream.
            repeats: whether the launch may be repeated for other tensors: these are those of `average`.
        """
        begin, of_upstream = quick(self), upstream.data_ptr()
        if pointers is None or begin is None or of_upstream & 15 or not of_upstream or upstream.is_neg():
            given = logits, None, numbers, gradient, index, index, None, self.packed(numbers), *NONE, upstream
            launch(plan_for_gradient, self.of_gradient, given, self if repeats else None)
        else:
            begin(*where, *pointers, *NONE, of_upstream)

    def packed(self, numbers: Tensor) -> Tensor:
        """The statistics of the rows."""
        return numbers[FIRST : FIRST + len(PACKED) * self.rows].view(len(PACKED), self.rows)

    def results(self, numbers: Tensor) -> tuple[Tensor, Tensor, None]:
        """The results of `softmax_loss`."""
        return self.packed(numbers), numbers[self.log_probs : self.log_probs + self.rows], None


class PreparedValue:
    """The launches for the average of logits of one shape, dtype and device without its gradient.

    The ``numbers`` are one float32 tensor: the weight of a row, the statistics of the rows and their log-probs.

    Args: those of `PreparedAverage`.
    """

    def __init__(self, logits: Tensor, rows: int, average: Average, options: Options) -> None:
        self.rows, self.of_rows = rows, (rows, average.factor, average.counted, average.masked)
        flat = layout_of(logits.view(-1, logits.shape[-1]))
        self.of_statistics = flat, logits.device, rows, 1, options, False, False
        self.log_probs = FIRST + aligned(len(PACKED) * rows)
        self.size = self.log_probs + aligned(rows)

    def average(self, logits: Tensor, index: Tensor, at: tuple[int, int]) -> Tensor:
        """The average. Logits and index are contiguous, aligned to 16 bytes, and ``at`` these addresses."""
        known, of_mean = repeated(self), repeated((self, "mean"))
        if known is None or of_mean is None:
            total, numbers = (logits.new_empty(n, dtype=torch.float32) for n in ((), self.size))
            packed, log_probs = numbers[FIRST:], numbers[self.log_probs : self.log_probs + self.rows]
            given = logits, None, index, index, None, packed, log_probs, None
            launch(plan_for_statistics, self.of_statistics, given, self)
            launch(plan_of_average, self.of_rows, (log_probs, index, None, numbers, total), (self, "mean"))
            return total
        total, numbers = empty((), (), torch.float32), empty((self.size,), (1,), torch.float32)
        (of_logits, of_index), device, to = at, logits.get_device(), numbers.data_ptr()
        packed_at, log_probs_at = to + WORD * FIRST, to + WORD * self.log_probs
        space = zeros(known.workspace, logits.device) if known.workspace else None  # alive until the launch
        given_at = of_logits, None, of_index, of_index, None, packed_at, log_probs_at, None
        start(known, device, (*given_at, None if space is None else space.data_ptr()))
        start(of_mean, device, (log_probs_at, of_index, None, to, total.data_ptr()))
        return total


def aligned(words: int) -> int:
    """The next multiple of 16 bytes."""
    return -(-words // 4) * 4


def prepare_average(logits: Tensor, index: Tensor, average: Average, options: Options, gradient: bool) -> Any:
    """`PreparedAverage` for tensors of these shapes, dtypes and devices; None if they need `softmax_statistics`.

    Args:
        logits: contiguous, aligned to 16 bytes.
        index: contiguous, aligned to 16 bytes. It is the row mask, too.
        average: without a divisor.
        gradient: whether the gradient is computed, too; otherwise this returns a `PreparedValue`.
    """
    rows = index.numel()
    if rows > MOST_ROWS or (gradient and not reads_once(logits, Inputs(index), options)):
        return None
    return (PreparedAverage if gradient else PreparedValue)(logits, rows, average, options)
