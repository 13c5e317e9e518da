"""The average of the log-probs of rows, with little time on the host, which is the limit for few rows.

The result and the gradient are those of `statistics_of`. What that finds out in every call is looked up here, by the
shapes, dtypes and devices of the tensors. `losses.cross_entropy` calls this for plain tensors.
"""

from typing import Any

import torch
from torch import Tensor

from onepass.backend import backend_of
from onepass.core.checks import FLOATS, INDEX_DTYPES, is_debugging
from onepass.core.dispatch import apply_to_ordinary, are_ordinary, check_upstream
from onepass.core.memo import keep
from onepass.core.options import Average, FieldGradients, Inputs, Options
from onepass.softmax.statistics import _gradient, keep_row_weight, last_row_weight

_known: dict[tuple[Any, ...], Any] = {}  # the launches for tensors of a kind; None where `statistics_of` is needed


def prepared_average(logits: Any, index: Any, average: Average, options: Options) -> Tensor | None:
    """The average of the log-probs of the classes ``index``, where it is not ``options.masked``.

    Nothing is checked: None for tensors that are not valid, and for all others that `statistics_of` is needed for.
    """
    if not are_ordinary(logits, index):
        return None
    if not (logits.is_contiguous() and index.is_contiguous()) or logits.is_neg() or index.is_neg() or is_debugging():
        return None
    at, index_at = logits.data_ptr(), index.data_ptr()
    if (at | index_at) & 15 or not (at and index_at):  # 0: torch's lazy zeros
        return None
    backend, gradient = backend_of(logits), logits.requires_grad and torch.is_grad_enabled()
    of_index = index.shape, index.dtype, index.device
    # A single row is contiguous with any stride, which determines its launches, as that of more rows does.
    key = backend, gradient, logits.shape, logits.stride(), logits.dtype, logits.device, *of_index, average, options
    try:
        launches = _known[key]
    except KeyError:
        launches = None
        if are_valid(logits, index):
            launches = backend.prepare_average(logits, index, average, options, gradient)
        keep(_known, key, launches)
    if launches is None or (logits.is_cuda and logits.get_device() != torch.cuda.current_device()):
        return None
    return _apply(logits, index, launches, options) if gradient else launches.average(logits, index)


def are_valid(logits: Tensor, index: Tensor) -> bool:
    """Whether there are logits ``(..., V)`` and an index ``(...)``."""
    if logits.dtype not in FLOATS or index.dtype not in INDEX_DTYPES or index.device != logits.device:
        return False
    return logits.dim() > 0 and index.shape == logits.shape[:-1] and logits.numel() > 0


def addresses_of(*tensors: Tensor) -> tuple[int, ...]:
    """Where the values of the tensors begin."""
    return tuple([t.data_ptr() for t in tensors])


class _Average(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, index: Tensor, launches: Any, options: Options) -> Tensor:
        total, gradient, numbers = launches.average(logits, index, last_row_weight(logits))
        ctx.save_for_backward(logits, index, numbers, gradient)
        ctx.at = addresses_of(logits, index, numbers, gradient)
        ctx.launches, ctx.options, ctx.given = launches, options, False
        return total

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        check_upstream(upstream)
        logits, index, numbers, early = ctx.saved_tensors
        # A second backward computes another gradient. Hooks may have given what was saved another layout.
        if ctx.given or not (logits.is_contiguous() and early.is_contiguous()):
            upstreams = FieldGradients(selected=upstream, row_weight=numbers)
            inputs, columns = Inputs(index, index), logits.shape[-1]
            gradient = _gradient(logits, inputs, ctx.launches.packed(numbers), upstreams, columns, ctx.options)
            return gradient, None, None, None
        ctx.given = True
        gradient = early.data  # a second backward unpacks the saved tensor again, which must not seem to be modified
        at = addresses_of(logits, index, numbers, gradient)
        ctx.launches.correct(logits, index, numbers, upstream, gradient, at if at == ctx.at else None)
        keep_row_weight(logits, numbers)
        return gradient, None, None, None


_apply = apply_to_ordinary(_Average)
