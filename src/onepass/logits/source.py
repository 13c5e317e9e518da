"""The interface through which losses read logits, `LogitsSource`, and its implementation for a tensor.

A loss requests the fields of every row from a source, or passes it a function of these fields, whatever the source is.
A custom source sets `shape`, `dtype` and `device`, overrides `requires_grad` and `materialize`, and may override other
methods that it can compute faster.
"""

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass.core.checks import (
    INF,
    check_bool,
    check_class_weights,
    check_logits,
    check_number,
    check_row_mask,
    check_temperature,
    check_transform,
    is_debugging,
)
from onepass.core.collectives import Replicated
from onepass.core.dispatch import is_plain
from onepass.core.invariance import is_batch_invariant
from onepass.core.options import Average, Inputs, Options, PairOptions, PairRows, Transform
from onepass.core.shard import NOT_SHARDED, Shard, shared_columns
from onepass.core.support import Support, check_support
from onepass.softmax.divergence import divergence_of
from onepass.softmax.statistics import check_range, gather_logits, statistics_of

MOST_ROWS_OF_MEAN = 2**17  # one program reduces them
Fields = dict[str, Tensor]
LossFunction = Callable[..., Tensor]  # computes the loss of every row from (fields, *row_inputs)


class Count(NamedTuple):
    """A divisor: the number of rows where the mask ``rows`` is not ``masked``, times a factor."""

    rows: Tensor
    factor: float
    masked: int = 0

    def number(self) -> Tensor:
        return (self.rows != self.masked).sum() * self.factor


Divisor = Tensor | float | Count | None


class LogitsSource:
    """An object that any function of onepass accepts in place of a tensor of logits.

    Attributes:
        shape: ``(..., V)``.
        dtype, device: of the logits.
        shard: the columns that this process holds, if the vocabulary is sharded.
    """

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    shard = NOT_SHARDED
    early_gradient = True  # whether the forward of a reduced loss may compute the gradient of logits in memory

    def dim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def is_cpu(self) -> bool:
        return self.device.type == "cpu"

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def requires_grad(self) -> bool:
        """Whether the logits require a gradient."""
        raise NotImplementedError

    @property
    def is_eager(self) -> bool:
        """Whether nothing traces the call, so that values may be read."""
        return is_plain()

    @property
    def checks_values(self) -> bool:
        """Whether values of indices and temperatures are checked: on a CPU and in debug mode."""
        return (is_debugging() or self.is_cpu) and self.is_eager

    @property
    def compares_mask(self) -> bool:
        """Whether kernels compare a row mask with `Options.masked`, so that labels can be the mask; else it is bool."""
        return False

    @property
    def divides_late(self) -> bool:
        """Whether the gradient of the logits is rounded to float16 before it is divided by the divisor of a mean."""
        return False

    def materialize(self) -> Tensor:
        """The logits as a tensor, differentiable."""
        raise NotImplementedError

    def all_class_weights(self, weights: Tensor) -> Tensor:
        """The class weights of all V classes, from those of the classes that this process holds."""
        return weights

    def statistics(self, inputs: Inputs, options: Options) -> Fields:
        """The fields of ``options`` of every row, differentiable.

        If ``selected`` is the only field, it may be relative to any number of its row instead of the shift.
        """
        return TensorLogits(self.materialize()).statistics(inputs, options)

    def loss(
        self,
        loss_fn: LossFunction | None,
        inputs: Inputs,
        options: Options,
        row_inputs: Sequence[Tensor],
        divisor: Divisor,
        linear: bool = False,
    ) -> Tensor:
        """``Σ loss_fn(fields, *row_inputs) / divisor`` over all rows or, with ``divisor=None``, the loss of every row.

        Args:
            loss_fn: computes the loss of some rows, ``(n,)`` or ``(n, K)``, which is summed over K, from a dict of
                their fields and the same rows of ``row_inputs``. The fields of a masked row are 0, and its loss must
                then be 0. None if the loss is the only field of ``options``.
            row_inputs: ``(..., *)``, differentiable.
            linear: whether the loss is linear in the fields. Its gradient is then known before the logits are read.
        """
        average = None if loss_fn is not None else average_of(divisor, inputs, options.masked, self.device)
        if average is not None and self.is_eager and self.shape[:-1].numel() <= MOST_ROWS_OF_MEAN:
            reduced = self.average_of_field(inputs, options, average)
            if reduced is not None:
                return reduced
        fields = self.statistics(inputs, options)
        loss = fields[options.fields] if loss_fn is None else loss_fn(fields, *row_inputs)
        return over_divisor(loss, divisor, self.dim() - 1)

    def average_of_field(self, inputs: Inputs, options: Options, average: Average) -> Tensor | None:
        """The average of the only field of ``options``.

        None if this takes no fewer launches than `statistics` and a reduction.
        """
        return None

    def at_once(self, index: Tensor, masked: int) -> Tensor | None:
        """All logits as a tensor, for the average of the log-probs of an index, if that takes less time than the loss.

        None otherwise, and if the index is not valid. What reads them does not read rows whose index is ``masked``.
        """
        return None

    def rows_with(self, selected: Tensor) -> Tensor | None:
        """A row mask of the rows in which any of the tokens ``(..., K)`` is selected; the other rows need not be read.

        None if finding them costs more than reading all rows.
        """
        return selected.any(-1)

    def divergence(self, teacher: "LogitsSource", read: PairRows, options: PairOptions, divisor: Divisor) -> Tensor:
        """The divergence of every row from the ``teacher``, summed and divided as in `loss`."""
        shard = shared_columns(self.shard, teacher.shard, options.columns)
        if shard is None:
            loss = divergence_of(self.materialize(), teacher.materialize(), read, options)
        else:
            pair = self.local_columns(shard), teacher.local_columns(shard)
            loss = divergence_of(*pair, read, options._replace(columns=shard.size), shard)
        return over_divisor(loss, divisor, loss.dim())

    def local_columns(self, shard: Shard) -> Tensor:
        """The logits of this process's columns, at least those of ``shard``, which are compared; differentiable."""
        logits: Tensor = Replicated.apply(self.materialize(), shard.group)
        return logits[..., shard.first : shard.first + shard.size]


class TensorLogits(LogitsSource):
    """A tensor of logits.

    Args:
        inplace_backward: whether the backward writes the gradient over the logits.
    """

    def __init__(self, logits: Tensor, inplace_backward: bool = False) -> None:
        self.logits, self.inplace_backward = logits, inplace_backward
        self.shape, self.dtype, self.device = logits.shape, logits.dtype, logits.device

    @property
    def requires_grad(self) -> bool:
        return self.logits.requires_grad

    @property
    def is_cpu(self) -> bool:
        return self.logits.is_cpu

    @property
    def is_eager(self) -> bool:
        return is_plain(self.logits)

    @property
    def compares_mask(self) -> bool:
        return not torch.compiler.is_compiling()  # a traced operation takes no tensor as index and mask at once

    def materialize(self) -> Tensor:
        return self.logits

    def statistics(self, inputs: Inputs, options: Options) -> Fields:
        if options.fields == "selected":  # any shift of the row will do, so no other logit is read
            selected = gather_logits(self.logits, inputs.index, options.transform)  # type: ignore[arg-type]
            return {"selected": over_row_temperature(selected, inputs.temperature, inputs.row_mask)}
        fields = statistics_of(self.logits, inputs, options, self.inplace_backward)
        return dict(zip(options.names(), fields))

    def average_of_field(self, inputs: Inputs, options: Options, average: Average) -> Tensor | None:
        return statistics_of(self.logits, inputs, options, self.inplace_backward, average, self.early_gradient)[0]

    def rows_with(self, selected: Tensor) -> Tensor | None:
        return None  # without a mask, nearly every row has a token


Logits = Tensor | LogitsSource
WRAPPERS: dict[str, Callable[[Any, str], LogitsSource]] = {}  # sources of subclasses of Tensor, by the subclass's name


def as_source(
    logits: Logits, name: str = "logits", inplace_backward: bool = False, early_gradient: bool = True
) -> LogitsSource:
    """Return a source, and a tensor of logits, after checking it, as a source. See `LogitsSource.early_gradient`.

    Raises:
        TypeError, ValueError: the logits are neither a floating-point tensor ``(..., V)`` nor a source, or
            ``inplace_backward`` is set for a source that is not a tensor.
    """
    inplace_backward = check_bool(inplace_backward, "inplace_backward")
    if not early_gradient:
        source = copy(as_source(logits, name, inplace_backward))
        source.early_gradient = False
        return source
    if not isinstance(logits, LogitsSource):
        wrapper = WRAPPERS.get(type(logits).__name__)
        if wrapper is not None:
            if inplace_backward:
                raise ValueError(f"inplace_backward: expected a tensor of logits, got a {type(logits).__name__}")
            return as_source(wrapper(logits, name), name)
        check_logits(logits, name)
        return TensorLogits(logits, inplace_backward)
    if inplace_backward:
        raise ValueError(f"inplace_backward: expected a tensor of logits, got {type(logits).__name__}")
    return logits


LEAST = 1e-38  # of numbers whose reciprocal float32 can represent


def average_of(divisor: Divisor, inputs: Inputs, masked: int, device: torch.device) -> Average | None:
    """The average that a sum over rows and this divisor make; None if it is not an `Average`.

    Args:
        masked: see `Options`.
    """
    if isinstance(divisor, Count):
        return Average(1 / divisor.factor, True, None, masked) if divisor.rows is inputs.row_mask else None
    if isinstance(divisor, Tensor):
        constant = divisor.numel() == 1 and not divisor.requires_grad and divisor.device == device
        return Average(1.0, False, divisor.detach(), masked) if constant and is_plain(divisor) else None
    return Average(1 / divisor, False, None, masked) if divisor and abs(divisor) > LEAST else None


def over_divisor(loss: Tensor, divisor: Divisor, row_dims: int) -> Tensor:
    """The sum of a loss over the divisor or, without a divisor, the loss of every row, with ``row_dims`` dimensions."""
    if divisor is None:
        return loss.sum(-1) if loss.dim() > row_dims else loss
    divisor = divisor.number() if isinstance(divisor, Count) else divisor
    if isinstance(divisor, Tensor):
        divisor = divisor.to(loss.device, loss.dtype)
    elif divisor in (1, -1):
        return loss.sum() if divisor == 1 else -loss.sum()
    return loss.sum() / divisor


def over_row_temperature(selected: Tensor, temperature: Tensor | None, row_mask: Tensor | None) -> Tensor:
    """Selected logits ``(...)`` or ``(..., K)`` over the temperature of their row; that of a masked row may be bad."""
    if temperature is None:
        return selected
    temperature = temperature.where((temperature > 0) & (temperature < torch.inf), torch.nan)
    if row_mask is not None:
        temperature = temperature.where(row_mask != 0, 1.0)
    return selected / (temperature if temperature.dim() == selected.dim() else temperature.unsqueeze(-1))


def scalar_temperature(temperature: Tensor | float) -> Any:
    """The temperature of all rows, 1 if each row has its own."""
    return 1.0 if isinstance(temperature, Tensor) and temperature.dim() else temperature


def temperature_of_rows(
    temperature: Tensor | float | None,
    logits: LogitsSource,
    row_mask: Tensor | None,
    name: str = "temperature",
    masked: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Tensor | None:
    """The temperature of each row, checked and in the dtype of the fields; None if all rows have the same.

    Args:
        dtype: that of other logits from which the fields are computed too.

    Raises:
        TypeError, ValueError: it is not a constant floating-point tensor with the shape of the rows or, on a CPU and in
            debug mode, a row that is not masked has none above 0.
    """
    if not isinstance(temperature, Tensor) or not temperature.dim():
        return None
    check_temperature(temperature, logits, name)
    given, wide = temperature, torch.promote_types(torch.promote_types(logits.dtype, torch.float32), dtype)
    temperature = temperature.detach().to(wide)
    if logits.checks_values and is_plain(temperature):
        good = (temperature > 0) & (temperature < INF) & (1 / temperature < INF)
        good = good if row_mask is None else good | (row_mask == masked)
        if not good.all():
            raise ValueError(f"{name}: expected finite numbers above 0, got {given[~good][0].item():g}")
    return temperature


def options_for(
    fields: str,
    temperature: Tensor | float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    sharpness: float | None = None,
    masked: int = 0,
) -> Options:
    """`Options` with numbers that are checked and converted.

    Every number is passed and none is left to a default. Dynamo makes a default that it first encounters within an
    autograd function an input of that function's graph alone, and a second loss in the same graph would fail.
    """
    transform = Transform(*check_transform(scalar_temperature(temperature), softcap, logit_scale))
    return Options(fields, transform, 0.0, 2.0 if sharpness is None else sharpness, is_batch_invariant(), masked)


def inputs_for(
    logits: LogitsSource,
    options: Options,
    index: Tensor | None = None,
    row_mask: Tensor | None = None,
    class_weights: Tensor | float | None = None,
    index_name: str = "index",
    temperature: Tensor | float = 1.0,
    support: Support | None = None,
) -> tuple[Inputs, Options]:
    """Check the tensors that are read in addition to the logits. One class weight for all classes becomes an option.

    Args:
        index: checked already, except for its values.
        index_name: the name of the caller's argument.
        temperature: a number is in the ``options`` already.
        support: see `onepass.softmax_statistics`.
    """
    if row_mask is not None and row_mask is not index:
        check_row_mask(row_mask, logits)
    weights = None
    if isinstance(class_weights, Tensor) and class_weights.dim():
        class_weights = logits.all_class_weights(class_weights)
        check_class_weights(class_weights, logits, "class_weights")
        weights = class_weights.detach()
    elif class_weights is not None:
        options = options._replace(class_weight=check_number(class_weights, "class_weights", -INF))
    inputs = Inputs(index, row_mask, weights, temperature_of_rows(temperature, logits, row_mask, masked=options.masked))
    if support is not None:
        if options.wants("mean_logit"):
            raise ValueError("metrics: expected no 'mean_logit' with a support, whose other logits are not read, "
                             f"got fields {options.fields!r}")  # fmt: skip
        ids, starts, lengths = check_support(support, logits, row_mask, logits.checks_values)
        inputs = inputs._replace(support=ids, starts=starts, lengths=lengths)
    if logits.checks_values:
        check_range(logits, inputs, index_name, options.masked)
    return inputs, options
