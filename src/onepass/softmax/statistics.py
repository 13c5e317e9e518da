"""The differentiable primitive of all losses: softmax statistics of rows of logits, each of which is read once.

`statistics_of` chooses the backend and has one backward for all losses of these statistics. Losses are ordinary PyTorch
on the statistics that it returns, the fields.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onepass import reference
from onepass.backend import backend_of
from onepass.core.checks import is_debugging
from onepass.core.dispatch import (
    check_upstream,
    empty_gradient,
    is_plain,
    like_logits,
    operation,
    refuse_forward_mode,
)
from onepass.core.options import (
    Average,
    FieldGradients,
    Inputs,
    Options,
    Results,
    Transform,
    empty_results,
    not_differentiable,
    pick,
)
from onepass.core.shard import NOT_SHARDED, Shard
from onepass.reference.softmax import active_rows, out_of_range
from onepass.softmax.inplace import mark_overwritten
from onepass.softmax.shards import leading_columns, merged

# The smallest vocabulary of a gradient that the forward computes with another read: below, the comparison in the
# backward takes more than a hundredth of its time. Sharded logits have no such limit, since their exchange makes the
# host later.
LEAST_VOCABULARY = 1 << 16


@dataclass(frozen=True)
class SoftmaxStatistics:
    """Statistics of each row of ``z``, the logits after scale, soft-cap and temperature, which have shape ``(..., V)``.

    All fields are differentiable, except for `shift` and the metrics (`is_top1`, `log_sum_sq_probs`, `mean_logit`).
    Fields that were not requested are None. The fields of masked rows are 0. The dtype is float32 (float64 for float64
    logits).

    Attributes:
        shift: ``max_j z_j``, the maximum of the row, shape ``(...)``. It is subtracted from the logits in the other
            fields, so that no digits cancel.
        log_normalizer: ``log Σ_j exp(z_j - shift)`` >= 0, shape ``(...)``.
        expected_logit: ``Σ_j p_j (z_j - shift)`` <= 0, shape ``(...)``.
        selected: ``z[index] - shift`` <= 0, the shape of ``index``.
        weighted_logit: ``Σ_j c_j (z_j - shift)`` for class weights ``c``, shape ``(...)``.
        is_top1: whether ``index`` is the ``argmax`` of ``z`` (the first of equal logits), bool, the shape of ``index``.
        log_sum_sq_probs: ``log Σ_j p_j²``, shape ``(...)``.
        mean_logit: ``Σ_j z_j / V`` (not relative to `shift`), shape ``(...)``.
    """

    shift: Tensor
    log_normalizer: Tensor
    expected_logit: Tensor | None = None
    selected: Tensor | None = None
    weighted_logit: Tensor | None = None
    is_top1: Tensor | None = None
    log_sum_sq_probs: Tensor | None = None
    mean_logit: Tensor | None = None

    @property
    def log_probs(self) -> Tensor:
        """``log p[index] = selected - log_normalizer``, the shape of ``index``."""
        if self.selected is None:
            raise ValueError("log_probs: expected statistics taken with an index, got index=None")
        if self.selected.dim() > self.log_normalizer.dim():
            return self.selected - self.log_normalizer.unsqueeze(-1)
        return self.selected - self.log_normalizer

    @property
    def entropy(self) -> Tensor:
        """``-Σ_j p_j log p_j = log_normalizer - expected_logit`` in nats, shape ``(...)``."""
        if self.expected_logit is None:
            raise ValueError("entropy: expected statistics with expected_logit, got expected_logit=None")
        return self.log_normalizer - self.expected_logit

    @property
    def logsumexp(self) -> Tensor:
        """``log Σ_j exp(z_j) = shift + log_normalizer``, shape ``(...)``."""
        return self.shift + self.log_normalizer


def statistics_of(
    logits: Tensor,
    inputs: Inputs,
    options: Options,
    inplace_backward: bool = False,
    average: Average | None = None,
    early: bool = True,
    shard: Shard = NOT_SHARDED,
) -> tuple[Tensor, ...]:
    """The fields of ``options`` of every row of ``(..., V)`` logits, differentiable. Arguments must be checked already.

    Args:
        inplace_backward: whether the backward writes the gradient over the logits.
        average: if given, the result is this average of the only field, the log-probs. It takes one or two launches
            more; with operations that autograd records, it would take six.
        early: whether the gradient of an average may be computed in the forward, see `early_gradient`.
        shard: the logits are these columns of a sharded vocabulary, and columns from ``shard.size`` on are padding. The
            index is relative to the first column, and the class weights are those of these columns. The fields are the
            same on all ranks.
    """
    if not inplace_backward:
        logits = with_contiguous_rows(logits)
    if inplace_backward and not torch.compiler.is_compiling():
        check_inplace(logits)
    if torch.is_grad_enabled() and logits.requires_grad:
        early = early and average is not None and not inplace_backward
        how = average, options, inplace_backward, early, shard  # one argument, of which each costs time
        fields: tuple[Tensor, ...] = _Statistics.apply(logits, *inputs.passed(), how)
        return fields
    return average_fields(pick(results_of(logits, inputs, options, shard), options), inputs, average)[0]


def results_of(logits: Tensor, inputs: Inputs, options: Options, shard: Shard) -> Results:
    """The results of `softmax_statistics`, those of all ranks if the vocabulary is sharded."""
    if shard.sizes:
        return merged(leading_columns(logits, shard.size), inputs, shard, options)
    return _forward(logits, inputs, options)


def gather_logits(logits: Tensor, index: Tensor, transform: Transform) -> Tensor:
    """The transformed logits ``(..., K)`` of the classes ``index``, in the dtype of the fields. No other logit is read.

    An index outside the vocabulary raises an error or, if the check would synchronize, gives NaN.
    """
    refuse_forward_mode(logits)
    if is_plain(logits):
        check_range(logits, Inputs(index))
    selected: Tensor = _SelectedLogits.apply(logits, index, transform)
    return selected


class _SelectedLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, index: Tensor, transform: Transform) -> Tensor:
        ctx.save_for_backward(logits, index)
        ctx.transform = transform
        return _selected_logits(logits, index, transform)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        check_upstream(grad)
        logits, index = ctx.saved_tensors
        return _selected_gradient(logits, index, grad, ctx.transform), None, None


def _like_index(logits: Tensor, index: Tensor, **_: Any) -> Tensor:
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return torch.empty_like(index, dtype=dtype, memory_format=torch.contiguous_format)


@operation("onepass::selected_logits", _like_index)
def _selected_logits(logits: Tensor, index: Tensor, transform: Transform) -> Tensor:
    return backend_of(logits).selected_logits(logits, index, transform)


@operation("onepass::selected_logits_gradient", like_logits)
def _selected_gradient(logits: Tensor, index: Tensor, grad: Tensor, transform: Transform) -> Tensor:
    return backend_of(logits).selected_logits_gradient(logits, index, grad, transform)


def check_inplace(logits: Tensor) -> None:
    """Raise unless no two elements of the logits share memory and their last dimension is contiguous."""
    if overlaps(logits):
        raise ValueError(
            "inplace_backward: expected logits of which no two elements share memory, got overlapping (expanded?) "
            f"logits of shape {tuple(logits.shape)} and strides {logits.stride()}"
        )
    if logits.stride(-1) != 1 and logits.shape[-1] > 1 and logits.numel():
        raise ValueError(f"inplace_backward: expected a contiguous last dimension, got strides {logits.stride()}")


def overlaps(tensor: Tensor) -> bool:
    """Whether two elements may share memory: a stride is within the span of the dimensions with smaller strides."""
    span = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):
        if size > 1 and stride <= span:
            return tensor.numel() > 1
        span += stride * (size - 1)
    return False


def check_range(logits: Any, inputs: Inputs, name: str = "index", masked: int = 0) -> None:
    """Raise for an index outside the vocabulary, if the check does not synchronize or in debug mode.

    Otherwise the results of its row are NaN.
    """
    index = inputs.index
    if index is None or not (is_debugging() or (logits.is_cpu and backend_of(logits) is reference)):
        return
    rows = index.reshape(logits.shape[:-1].numel(), index.shape[-1] if index.dim() == logits.dim() else 1)
    bad = out_of_range(rows, active_rows(inputs.row_mask, masked), logits.shape[-1])
    if bad.any():
        row, k = bad.nonzero()[0].tolist()
        raise IndexError(f"{name}: expected values in [0, {logits.shape[-1]}), got {int(rows[row, k])} in row {row}")


def row_weight_of(logits: Tensor, inputs: Inputs, average: Average) -> Tensor:
    """``(3,)``, see `FieldGradients`: the upstream gradient of the last average predicts that of this one."""
    return backend_of(logits).compute_row_weight(logits, inputs.row_mask, average, last_row_weight(logits))


def last_row_weight(logits: Tensor) -> Tensor | None:
    """The row weight of the last average on this stream, whose backward has written its upstream gradient, or None.

    Each stream has its own: the programs of a forward that read a number while another stream writes it would compute
    rows with different gradients.
    """
    return None if is_capturing(logits.get_device()) else _last.get(key_of_row_weight(logits))


def keep_row_weight(logits: Tensor, row_weight: Tensor) -> None:
    """Make this the `last_row_weight`, after its backward has been launched.

    A tensor of a subclass would come back in other losses, and one that a hook has unpacked may have another layout.
    """
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    if type(row_weight) is not Tensor or row_weight.dtype != dtype or row_weight.get_device() != logits.get_device():
        return
    if row_weight.is_contiguous() and not row_weight.data_ptr() & 15 and not is_capturing(logits.get_device()):
        _last[key_of_row_weight(logits)] = row_weight


def key_of_row_weight(logits: Tensor) -> tuple[int, int, bool]:
    """What a kept row weight is for: the device, its current stream, and whether it is float64."""
    device = logits.get_device()
    return device, stream_of(device), logits.dtype == torch.float64


def average_fields(
    fields: tuple[Tensor, ...], inputs: Inputs, average: Average | None, row_weight: Tensor | None = None
) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """The fields, or the average of the only field; and the weight of a row, if it is not known."""
    if average is None:
        return fields, None
    total, row_weight = backend_of(*fields).row_average(*fields, inputs.row_mask, average, row_weight)
    return (total,), row_weight


_last: dict[tuple[int, int, bool], Tensor] = {}  # by the `key_of_row_weight` of the logits


def stream_of(device: int) -> int:
    """The current stream of a GPU; 0 for the CPU, whose index is -1."""
    return torch._C._cuda_getCurrentRawStream(device) if device >= 0 else 0


def is_capturing(device: int) -> bool:
    """Whether the device is a GPU, and a CUDA graph is captured on the current stream. Such a graph cannot read what
    changes between its replays."""
    return device >= 0 and torch._C._cuda_isCurrentStreamCapturing()


def upstream_of(grads: tuple[Tensor | None, ...], row_weight: Tensor | None, options: Options) -> FieldGradients:
    """The upstream gradients of the fields, from those of what `average_fields` returned."""
    if row_weight is None or grads[0] is None:
        return FieldGradients.of(options.fields, grads)
    return FieldGradients(selected=grads[0], row_weight=row_weight)


def differentiable_results(ctx: Any, fields: tuple[Tensor, ...], options: Options) -> tuple[Tensor, ...]:
    """The requested fields, as outputs of an autograd function."""
    # Views of the same tensor could not be changed in place, and torch 2.11 loses their gradients when it compiles.
    fields = tuple([f.clone() if torch.compiler.is_compiling() or f._is_view() else f for f in fields])
    if silent := not_differentiable(options.fields):
        ctx.mark_non_differentiable(*[fields[n] for n in silent])
    ctx.set_materialize_grads(False)
    return fields


class _Statistics(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        *arguments: Any,
    ) -> tuple[Tensor, ...]:
        *tensors, (average, options, inplace, early, shard) = arguments
        inputs, backend = Inputs(*tensors), backend_of(logits)
        size = shard.size if shard.sizes else logits.shape[-1]
        grad = row_weight = None
        if early and not shard.sizes and backend.reads_once(logits, inputs, options):
            grad, last = empty_gradient(logits), last_row_weight(logits)
            results, total, row_weight = backend.softmax_average(logits, inputs, average, last, options, grad)
            fields: tuple[Tensor, ...] = (total,)
        else:
            results = results_of(logits, inputs, options, shard)
            early = early and (bool(shard.sizes) or size >= LEAST_VOCABULARY)
            if early and backend.supports_early_gradient(logits, inputs):  # else the GPU waits for the CPU
                # For the predicted upstream gradient. The device compares, and the backward computes the gradient again
                # if the prediction was wrong.
                row_weight = row_weight_of(logits, inputs, average)
                predicted = FieldGradients(selected=row_weight[1])
                grad = _gradient(logits, inputs, results[0], predicted, size, options)
            fields, row_weight = average_fields(pick(results, options), inputs, average, row_weight)
        ctx.save_for_backward(logits, *tensors, row_weight, results[0], grad)
        ctx.options, ctx.inplace, ctx.size, ctx.written = options, inplace, size, False
        return differentiable_results(ctx, fields, options)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        check_upstream(*grads)
        logits, *tensors, row_weight, packed, early = ctx.saved_tensors
        inputs = Inputs(*tensors)
        upstream = upstream_of(grads, row_weight, ctx.options)
        if early is not None and upstream.row_weight is not None and not ctx.written:
            ctx.written = True  # and given away: a second backward computes another gradient
            # A second backward unpacks the saved tensor again, which must not seem to be modified.
            grad = with_contiguous_rows(early.data)
            write_gradient(logits, inputs, packed, upstream, ctx.size, ctx.options, grad, again=True)
            if ctx.size:  # else nothing was launched
                keep_row_weight(logits, row_weight)
        elif ctx.inplace and not torch.compiler.is_compiling():
            if ctx.written:  # autograd does not detect this if hooks have packed the logits
                raise RuntimeError(
                    "inplace_backward: a second backward, after the first has written the gradient over the logits"
                )
            ctx.written = True
            grad = logits.detach()
            write_gradient(logits, inputs, packed, upstream, ctx.size, ctx.options, grad)
            mark_overwritten(logits)
        else:
            grad = _gradient(logits, inputs, packed, upstream, ctx.size, ctx.options)
        return grad, *[None] * (len(tensors) + 1)


def _like_forward(logits: Tensor, inputs: Inputs, options: Options) -> Results:
    return empty_results(logits, inputs.index, options)


@operation("onepass::softmax_statistics", _like_forward)
def _forward(logits: Tensor, inputs: Inputs, options: Options) -> tuple[Tensor, Tensor | None, Tensor | None]:
    check_range(logits, inputs, masked=options.masked)
    return backend_of(logits).softmax_statistics(logits, inputs, options)


@operation("onepass::softmax_gradient", lambda logits, **_: empty_gradient(logits))
def _gradient(
    logits: Tensor, inputs: Inputs, packed: Tensor, grads: FieldGradients, size: int, options: Options
) -> Tensor:
    """The gradient of the logits; 0 in the columns from ``size`` on, which are padding."""
    out = empty_gradient(logits)
    write_gradient(logits, inputs, packed, grads, size, options, out)
    if size < logits.shape[-1]:
        out[..., size:] = 0
    return out


def with_contiguous_rows(x: Tensor) -> Tensor:
    """The tensor, or a contiguous copy: the caller, or a hook of saved tensors, may have any layout."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def write_gradient(
    logits: Tensor, inputs: Inputs, packed: Tensor, grads: FieldGradients, size: int, options: Options, out: Tensor,
    again: bool = False,
) -> None:  # fmt: skip
    """Write the gradient of the columns that are not padding. For ``again``, see `kernels.softmax_gradient`."""
    if size:
        x, to = leading_columns(with_contiguous_rows(logits), size), leading_columns(out, size)
        backend_of(logits).softmax_gradient(x, inputs, packed, grads, options, to, again)
