"""What losses are given logits by: a small protocol, which a plain tensor implements too.

A loss asks a source for the fields of every row, or hands it a function of these fields; it never asks what the source
is. A source of one's own overrides `LogitsSource.materialize`, or whatever it can do better.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from onepass.backend import is_debugging
from onepass.core.checks import (
    INF,
    check_class_weights,
    check_logits,
    check_number,
    check_row_mask,
    check_transform,
)
from onepass.core.dispatch import is_plain
from onepass.core.options import Inputs, Options, PairOptions, Transform
from onepass.softmax.divergence import divergence_of
from onepass.softmax.statistics import check_range, gather_logits, statistics_of

Fields = dict[str, Tensor]
LossFunction = Callable[..., Tensor]  # (fields, *row_inputs) to the loss of every row
Divisor = Tensor | float | None


class LogitsSource:
    """What can stand for a tensor of logits, in any function of onepass that takes logits.

    Attributes:
        shape: ``(..., V)``.
        dtype, device: of the logits.
    """

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def dim(self) -> int:
        return len(self.shape)

    @property
    def is_cpu(self) -> bool:
        return self.device.type == "cpu"

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def requires_grad(self) -> bool:
        raise NotImplementedError

    @property
    def is_eager(self) -> bool:
        """Whether nothing traces the call, so that values may be looked at."""
        return not torch.compiler.is_compiling()

    def materialize(self) -> Tensor:
        """The logits as a tensor, differentiable."""
        raise NotImplementedError

    def statistics(self, inputs: Inputs, options: Options) -> Fields:
        """The fields of ``options`` of every row, differentiable."""
        return TensorLogits(self.materialize()).statistics(inputs, options)

    def loss(
        self,
        loss_fn: LossFunction,
        inputs: Inputs,
        options: Options,
        row_inputs: Sequence[Tensor],
        divisor: Divisor,
        linear: bool = False,
    ) -> Tensor:
        """``Σ loss_fn(fields, *row_inputs) / divisor`` over all rows; with ``divisor=None`` the loss of every row.

        Args:
            loss_fn: the loss of some rows, ``(n,)`` or ``(n, K)`` to be summed over K, from a dict of their fields and
                the same rows of ``row_inputs``. The loss of a masked row, whose fields are 0, is 0.
            row_inputs: ``(..., *)``, differentiable.
            linear: says that the loss is linear in the fields, so that its gradient is known before the logits are
                read.
        """
        return divided(loss_fn(self.statistics(inputs, options), *row_inputs), divisor, self.dim() - 1)

    def divergence(
        self, teacher: "LogitsSource", row_mask: Tensor | None, options: PairOptions, divisor: Divisor
    ) -> Tensor:
        """The divergence of ``options`` of every row from the ``teacher``, divided and summed as `loss` does."""
        return TensorLogits(self.materialize()).divergence(teacher, row_mask, options, divisor)


class TensorLogits(LogitsSource):
    """A tensor of logits.

    Args:
        inplace_backward: the backward writes the gradient over the logits.
    """

    def __init__(self, logits: Tensor, inplace_backward: bool = False) -> None:
        self.logits, self.inplace_backward = logits, inplace_backward
        self.shape, self.dtype, self.device = logits.shape, logits.dtype, logits.device

    @property
    def requires_grad(self) -> bool:
        return self.logits.requires_grad

    @property
    def is_eager(self) -> bool:
        return is_plain(self.logits)

    def materialize(self) -> Tensor:
        return self.logits

    def statistics(self, inputs: Inputs, options: Options) -> Fields:
        if options.fields == "selected":  # relative to any number of the row: no other logit is needed
            return {"selected": transformed(gather_logits(self.logits, inputs.index), options.transform)}  # type: ignore[arg-type]
        fields = statistics_of(self.logits, inputs, options, self.inplace_backward)
        return dict(zip(options.names, fields))

    def divergence(
        self, teacher: LogitsSource, row_mask: Tensor | None, options: PairOptions, divisor: Divisor
    ) -> Tensor:
        loss = divergence_of(self.logits, teacher.materialize(), row_mask, options)
        return divided(loss, divisor, loss.dim())


Logits = Tensor | LogitsSource


def as_source(logits: Logits, name: str = "logits", inplace_backward: bool = False) -> LogitsSource:
    """The source of ``logits``; a tensor is checked.

    Raises:
        TypeError, ValueError: the logits are no floating-point tensor ``(..., V)`` and no source, or
            ``inplace_backward`` is asked of a source that is no tensor.
    """
    if not isinstance(logits, LogitsSource):
        check_logits(logits, name)
        return TensorLogits(logits, bool(inplace_backward))
    if inplace_backward:
        raise ValueError(f"inplace_backward: expected a tensor of logits, got {type(logits).__name__}")
    return logits


def divided(loss: Tensor, divisor: Divisor, row_dims: int) -> Tensor:
    """The sum of a loss over the divisor; without one the loss of every row, of ``row_dims`` dimensions."""
    if divisor is None:
        return loss.sum(-1) if loss.dim() > row_dims else loss
    if isinstance(divisor, Tensor):
        divisor = divisor.to(loss.device)
    elif divisor in (1, -1):
        return loss.sum() if divisor == 1 else -loss.sum()
    return loss.sum() / divisor


def transformed(logits: Tensor, transform: Transform) -> Tensor:
    """A few logits after their transform, in PyTorch."""
    if transform.softcap is not None or transform.logit_scale != 1.0:
        inner, outer = transform.factors()
        return logits * inner if transform.softcap is None else (logits * inner).tanh() * outer
    return logits if transform.temperature == 1.0 else logits / transform.temperature


def options_for(
    fields: str,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    sharpness: float | None = None,
) -> Options:
    """`Options` of checked and typed numbers.

    Each is passed, and none is a default: one that Dynamo first meets within an autograd function is an input of that
    function's graph alone, and a second loss in the same graph would fail.
    """
    transform = Transform(*check_transform(temperature, softcap, logit_scale))
    return Options(fields, transform, 0.0, 2.0 if sharpness is None else sharpness)


def inputs_for(
    logits: LogitsSource,
    options: Options,
    index: Tensor | None = None,
    row_mask: Tensor | None = None,
    class_weights: Tensor | float | None = None,
    index_name: str = "index",
) -> tuple[Inputs, Options]:
    """What is read beside the logits, checked; one class weight for all classes becomes an option.

    Args:
        index: checked already, but for its values.
        index_name: what the caller's argument is called.
    """
    if row_mask is not None:
        check_row_mask(row_mask, logits)
    weights = None
    if isinstance(class_weights, Tensor) and class_weights.dim():
        check_class_weights(class_weights, logits, "class_weights")
        weights = class_weights.detach()
    elif class_weights is not None:
        options = options._replace(class_weight=check_number(class_weights, "class_weights", -INF))
    inputs = Inputs(index, row_mask, weights)
    if (is_debugging() or logits.is_cpu) and logits.is_eager:
        check_range(logits, inputs, index_name)
    return inputs, options
