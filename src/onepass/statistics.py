"""The one differentiable primitive: what a row of logits leaves behind after it was read once.

`softmax_statistics` checks its arguments, picks the path (Triton kernels or `eager`) and gives autograd the one
backward that serves every loss. Losses are ordinary PyTorch on the `SoftmaxStatistics` it returns.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onepass import eager
from onepass.checks import (
    INF,
    check_choice,
    check_class_weights,
    check_index,
    check_logits,
    check_number,
    check_row_mask,
    check_transform,
    described,
)
from onepass.dispatch import empty_gradient, is_plain, operation, path_of, refuse_second_derivatives
from onepass.inplace import mark_overwritten
from onepass.options import Options, Results, empty_results, not_differentiable, pick
from onepass.source import Logits

METRICS = ("is_top1", "log_sum_sq_probs", "mean_logit")
DEBUG = os.environ.get("ONEPASS_DEBUG") == "1"


@dataclass(frozen=True)
class SoftmaxStatistics:
    """Per-row numbers of ``z``, the logits after scale, soft-cap and temperature; ``(...)`` are the rows.

    All but `shift` and the metrics are differentiable. Fields that were not asked for are None; masked rows are 0.
    float32 (float64 for float64 logits).

    Attributes:
        shift: ``max_j z_j``, shape ``(...)``. Everything below is relative to it, so that nothing cancels.
        log_normalizer: ``log Σ_j exp(z_j - shift)`` >= 0, shape ``(...)``.
        expected_logit: ``Σ_j p_j (z_j - shift)`` <= 0, shape ``(...)``.
        selected: ``z[index] - shift`` <= 0, the shape of ``index``.
        weighted_logit: ``Σ_j c_j (z_j - shift)`` for class weights ``c``, shape ``(...)``.
        is_top1: whether ``z[index]`` is the row's largest logit, the first of equal ones (as ``argmax``), bool, the
            shape of ``index``.
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


def softmax_statistics(
    logits: Logits,
    index: Tensor | None = None,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    row_mask: Tensor | None = None,
    class_weights: Tensor | float | None = None,
    metrics: Sequence[str] = (),
    expected_logit: bool = True,
) -> SoftmaxStatistics:
    r"""Read every row of logits once and return what losses need of it, differentiably.

    The statistics are those of :math:`z = \mathrm{cap}\cdot\tanh(\mathrm{scale}\cdot x / \mathrm{cap}) / T` (without
    the tanh where ``softcap`` is None), computed in float32 (float64 for float64 logits) whatever the input dtype.
    The gradient has the dtype of the logits and is rounded to it once.

    Args:
        logits: ``(..., V)``, float16, bfloat16, float32 or float64. Any strides; only a last dimension that is not
            contiguous is copied. Or `onepass.LinearLogits`, here and in all losses.
        index: classes to select, ``(...)`` or ``(..., K)``, int32 or int64; may repeat a class.
        temperature: :math:`T > 0`, divides the logits after the soft-cap.
        softcap: the cap > 0, as in Gemma 2; None for none.
        logit_scale: multiplies the logits before the soft-cap, as in Cohere's and Granite's models.
        row_mask: ``(...)``, bool or 0/1. Rows where it is False are not read; their results and gradients are 0.
        class_weights: the ``c`` of ``weighted_logit``: ``(V,)``, or one number for all classes. Not differentiable.
        metrics: any of ``"is_top1"`` (needs ``index``), ``"log_sum_sq_probs"``, ``"mean_logit"``. No gradient.
        expected_logit: False leaves out ``expected_logit``, and the work for it.

    Returns:
        `SoftmaxStatistics`.

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype, shape, device or value.
        IndexError: an index outside ``[0, V)`` in a row that is not masked, on a CPU or with ``ONEPASS_DEBUG=1``.
            On a GPU, where a look would synchronise, all results and gradients of that row are NaN instead.

    -inf logits have probability 0 and gradient 0. A row that holds NaN or +inf, or nothing but -inf, is NaN
    throughout, as in `torch.log_softmax`.

    Reference: Milakov and Gimelshein, "Online normalizer calculation for softmax", arXiv:1805.02867.

    Example::

        s = onepass.softmax_statistics(logits, labels)
        loss = -s.log_probs.mean() + 1e-4 * s.logsumexp.square().mean() - 0.01 * s.entropy.mean()
    """
    check_logits(logits)
    options = wanted(index, class_weights, metrics, expected_logit, logit_scale, softcap, temperature)
    if index is not None:
        check_index(index, logits)
    return SoftmaxStatistics(**read(logits, index, row_mask, options, class_weights=class_weights))


def wanted(
    index: Tensor | None,
    class_weights: Tensor | float | None,
    metrics: Sequence[str],
    expected_logit: bool,
    logit_scale: float,
    softcap: float | None,
    temperature: float,
) -> Options:
    """The fields of `SoftmaxStatistics` that these arguments of `softmax_statistics` ask for."""
    if isinstance(metrics, str) or not isinstance(metrics, Sequence):
        raise TypeError(f"metrics: expected a sequence of names, got {described(metrics)}")
    for metric in metrics:
        check_choice(metric, "metrics", METRICS)
    if "is_top1" in metrics and index is None:
        raise ValueError("metrics: expected an index with 'is_top1', got index=None")
    fields = ["shift", "log_normalizer"]
    fields += ["expected_logit"] if expected_logit else []
    fields += ["selected"] if index is not None else []
    fields += ["weighted_logit"] if class_weights is not None else []
    return reading(" ".join([*fields, *metrics]), logit_scale, softcap, temperature)


def reading(
    fields: str,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    ignore_index: int | None = None,
    sharpness: float | None = None,
) -> Options:
    """`Options` of checked and typed numbers.

    Each is passed, and none is a default: one that Dynamo first meets within an autograd function is an input of that
    function's graph alone, and a second loss in the same graph would fail.
    """
    temperature, softcap, logit_scale = check_transform(temperature, softcap, logit_scale)
    sharpness = 2.0 if sharpness is None else sharpness
    return Options(fields, logit_scale, softcap, temperature, 0.0, sharpness, ignore_index)


def read(
    logits: Logits,
    index: Tensor | None,
    row_mask: Tensor | None,
    options: Options,
    *,
    class_weights: Tensor | float | None = None,
    inplace_backward: bool = False,
    index_name: str = "index",
) -> dict[str, Tensor]:
    """The fields of ``options``, differentiable: what every loss is made of. Logits and index are checked already."""
    if isinstance(logits, Tensor) and logits.stride(-1) != 1 and logits.shape[-1] > 1 and not inplace_backward:
        logits = logits.contiguous()
    arguments = checked(logits, index, row_mask, options, class_weights=class_weights, index_name=index_name)
    options = arguments[-1]
    if inplace_backward and not torch.compiler.is_compiling():
        check_inplace(logits)
    if not isinstance(logits, Tensor):
        results = logits.statistics(*arguments)
    elif torch.is_grad_enabled() and logits.requires_grad:
        results = _Statistics.apply(logits, *arguments, inplace_backward)
    else:
        results = pick(_forward(logits, *arguments), options)
    return dict(zip(options.names, results))


def checked(
    logits: Logits,
    index: Tensor | None,
    row_mask: Tensor | None,
    options: Options,
    *,
    class_weights: Tensor | float | None = None,
    index_name: str = "index",
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Options]:
    """Index, mask, class weights and options as the two operations take them."""
    if row_mask is not None:
        check_row_mask(row_mask, logits)
    weights = None
    if isinstance(class_weights, Tensor) and class_weights.dim():
        check_class_weights(class_weights, logits, "class_weights")
        weights = class_weights.detach()
    elif class_weights is not None:
        options = options._replace(class_weight=check_number(class_weights, "class_weights", -INF))
    if (DEBUG or logits.is_cpu) and (is_plain(logits) if isinstance(logits, Tensor) else logits.takes_row_losses):
        _check_range(logits, index, row_mask, options, index_name)
    return index, row_mask, weights, options


def gather_logits(logits: Tensor, index: Tensor, index_name: str = "index") -> Tensor:
    """Logits ``(..., K)`` of the classes ``index``, in the dtype of the results: a loss that needs no other reads no
    other. As everywhere, an index outside the vocabulary is an error or, where a look would synchronise, NaN."""
    if is_plain(logits):
        _check_range(logits, index, None, Options(""), index_name)
    inside = index.clamp(0, logits.shape[-1] - 1)
    chosen = logits.gather(-1, inside.long())
    return chosen.to(torch.promote_types(chosen.dtype, torch.float32)).masked_fill_(inside != index, float("nan"))


def check_inplace(logits: Logits) -> None:
    if not isinstance(logits, Tensor):
        raise ValueError(f"inplace_backward: expected a tensor of logits, got {type(logits).__name__}")
    if overlaps(logits):
        raise ValueError(
            "inplace_backward: expected logits of which no two elements share memory, got overlapping (expanded?) "
            f"logits of shape {tuple(logits.shape)} and strides {logits.stride()}"
        )
    if logits.stride(-1) != 1 and logits.shape[-1] > 1:
        raise ValueError(f"inplace_backward: expected a contiguous last dimension, got strides {logits.stride()}")


def overlaps(tensor: Tensor) -> bool:
    """Whether two elements may share memory: whether a dimension steps by less than the smaller ones span."""
    span = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):
        if size > 1 and stride <= span:
            return tensor.numel() > 1
        span += stride * (size - 1)
    return False


def _check_range(
    logits: Logits, index: Tensor | None, row_mask: Tensor | None, options: Options, name: str = "index"
) -> None:
    """Where a look costs no synchronisation, or debugging asks for it; elsewhere the row becomes NaN."""
    if index is None or not (DEBUG or (logits.is_cpu and path_of(logits) is eager)):
        return
    rows = index.reshape(logits.shape[:-1].numel(), index.shape[-1] if index.dim() == logits.dim() else 1)
    bad = eager.out_of_range(rows, eager.active_rows(index, row_mask, options), logits.shape[-1])
    if bad.any():
        row, k = bad.nonzero()[0].tolist()
        raise IndexError(f"{name}: expected values in [0, {logits.shape[-1]}), got {int(rows[row, k])} in row {row}")


def upstream_of(g: dict[str, Tensor | None]) -> tuple[Tensor | None, ...]:
    """The gradients of fields, in the order in which `softmax_gradient` takes them."""
    return (
        g.get("log_normalizer"),
        g.get("entropy" if "entropy" in g else "expected_logit"),
        g.get("weighted_logit"),
        g.get("tempered_log_normalizer"),
        g.get("log_probs" if "log_probs" in g else "selected"),
    )


def returned(ctx: Any, results: Results, options: Options) -> tuple[Tensor, ...]:
    """The fields, as an autograd function returns them."""
    fields = pick(results, options)
    if silent := not_differentiable(options.fields):
        ctx.mark_non_differentiable(*[fields[n] for n in silent])
    ctx.set_materialize_grads(False)
    return fields


class _Statistics(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        index: Tensor | None,
        row_mask: Tensor | None,
        class_weights: Tensor | None,
        options: Options,
        inplace: bool,
    ) -> tuple[Tensor, ...]:
        results = _forward(logits, index, row_mask, class_weights, options)
        ctx.save_for_backward(logits, index, row_mask, class_weights, results[0])
        ctx.options, ctx.inplace, ctx.written = options, inplace, False
        return returned(ctx, results, options)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        logits, *saved = ctx.saved_tensors
        upstream = upstream_of(dict(zip(ctx.options.names, grads)))
        if ctx.inplace and not torch.compiler.is_compiling():
            if ctx.written:  # which autograd does not see where hooks have packed the logits
                raise RuntimeError("inplace_backward: a second backward, whose logits are their gradient already")
            ctx.written = True
            grad = logits.detach()
            path_of(logits).softmax_gradient(logits, *saved, *upstream, ctx.options, grad)
            mark_overwritten(logits)
        else:
            grad = _gradient(logits, *saved, *upstream, ctx.options)
        return grad, None, None, None, None, None


@operation("onepass::softmax_statistics", lambda logits, index, options, **_: empty_results(logits, index, options))
def _forward(
    logits: Tensor, index: Tensor | None, row_mask: Tensor | None, class_weights: Tensor | None, options: Options
) -> Results:
    _check_range(logits, index, row_mask, options)
    results: Results = path_of(logits).softmax_statistics(logits, index, row_mask, class_weights, options)
    return results


@operation("onepass::softmax_gradient", lambda logits, **_: empty_gradient(logits))
def _gradient(
    logits: Tensor,
    index: Tensor | None,
    row_mask: Tensor | None,
    class_weights: Tensor | None,
    packed: Tensor,
    grad_log_normalizer: Tensor | None,
    grad_expected_logit: Tensor | None,
    grad_weighted_logit: Tensor | None,
    grad_tempered: Tensor | None,
    grad_selected: Tensor | None,
    options: Options,
) -> Tensor:
    upstream = grad_log_normalizer, grad_expected_logit, grad_weighted_logit, grad_tempered, grad_selected
    out = empty_gradient(logits)
    path_of(logits).softmax_gradient(logits, index, row_mask, class_weights, packed, *upstream, options, out)
    return out
