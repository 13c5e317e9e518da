"""`softmax_statistics`: the statistics of each row of logits, from which users write their own losses."""

from collections.abc import Sequence

from torch import Tensor

from onepass.core.checks import check_bool, check_choice, check_index, described
from onepass.core.options import METRICS, Metric
from onepass.core.support import Support
from onepass.logits.source import Logits, as_source, inputs_for, options_for
from onepass.softmax.statistics import SoftmaxStatistics


def softmax_statistics(
    logits: Logits,
    index: Tensor | None = None,
    *,
    class_weights: Tensor | float | None = None,
    row_mask: Tensor | None = None,
    metrics: Sequence[Metric] = (),
    expected_logit: bool = True,
    support: Support | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
) -> SoftmaxStatistics:
    r"""Read every row of logits once and return its differentiable statistics, of which losses are functions.

    The statistics are those of :math:`z = \mathrm{cap}\cdot\tanh(\mathrm{scale}\cdot x / \mathrm{cap}) / T` (without
    the tanh if ``softcap`` is None), computed in float32 (float64 for float64 logits) whatever the input dtype. The
    gradient has the dtype of the logits and is rounded to it once.

    Args:
        logits: ``(..., V)``, float16, bfloat16, float32 or float64. Any strides; logits are copied only if the last
            dimension is not contiguous. Or `onepass.LinearLogits`, here and in all losses.
        index: classes to select, ``(...)`` or ``(..., K)``, int32 or int64; classes may repeat.
        class_weights: the ``c`` of ``weighted_logit``: ``(V,)``, or one number for all classes. Not differentiable.
        row_mask: ``(...)``, bool or 0/1. Rows where it is False are not read; their results and gradients are 0.
        support: the classes to which the softmax of each row is restricted, as in top-k or top-p sampling; no other
            logit is read. Either ids ``(..., S)``, padded with -1 in a row that has fewer than S, or a tuple of the
            concatenated ids of all rows, ``(n,)``, and the offsets at which the rows begin, ``(rows + 1,)``; int32 or
            int64. An id may not occur twice in a row. A bool tensor ``(...)`` at the end of the tuple, ``(ids, full)``
            or ``(ids, offsets, full)``, marks rows that are not restricted. A selected class outside of the support has
            log-prob -inf and gradient 0. The results of a row with an empty support are NaN.
        temperature: :math:`T > 0`, by which the logits are divided after the soft-cap. A number, or a tensor ``(...)``
            with one for each row, floating-point and not differentiable. On a GPU, the results of a row whose
            temperature is not above 0 are NaN; on a CPU, this is an error.
        softcap: the cap > 0, as in Gemma 2; None for no soft-cap.
        logit_scale: multiplies the logits before the soft-cap, as in Cohere's and Granite's models.
        metrics: any of ``"is_top1"`` (needs ``index``), ``"log_sum_sq_probs"``, ``"mean_logit"``. Not differentiable.
        expected_logit: whether to compute ``expected_logit``, which `SoftmaxStatistics.entropy` needs.

    Returns:
        `SoftmaxStatistics`.

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype, shape, device or value.
        IndexError: an index outside ``[0, V)`` in a row that is not masked, on a CPU or with ``ONEPASS_DEBUG=1``.
            On a GPU, where a check would synchronize, all results and gradients of that row are NaN instead.

    -inf logits have probability 0 and gradient 0. All results of a row that contains NaN or +inf, or only -inf, are
    NaN, as in `torch.log_softmax`.

    Reference: Milakov and Gimelshein, "Online normalizer calculation for softmax", arXiv:1805.02867.

    Example::

        s = onepass.softmax_statistics(logits, labels)
        loss = -s.log_probs.mean() + 1e-4 * s.logsumexp.square().mean() - 0.01 * s.entropy.mean()
    """
    source = as_source(logits)
    if index is not None:
        check_index(index, source)
    fields = requested_fields(index, class_weights, metrics, expected_logit)
    options = options_for(fields, temperature, softcap, logit_scale)
    inputs, options = inputs_for(
        source, options, index, row_mask, class_weights, temperature=temperature, support=support
    )
    return SoftmaxStatistics(**source.statistics(inputs, options))


def requested_fields(
    index: Tensor | None, class_weights: Tensor | float | None, metrics: Sequence[Metric], expected_logit: bool
) -> str:
    """The fields of `SoftmaxStatistics` that these arguments of `softmax_statistics` request."""
    if isinstance(metrics, str) or not isinstance(metrics, Sequence):
        raise TypeError(f"metrics: expected a sequence of names, got {described(metrics)}")
    for metric in metrics:
        check_choice(metric, "metrics", METRICS)
    if "is_top1" in metrics and index is None:
        raise ValueError("metrics: expected an index with 'is_top1', got index=None")
    fields = ["shift", "log_normalizer"]
    fields += ["expected_logit"] if check_bool(expected_logit, "expected_logit") else []
    fields += ["selected"] if index is not None else []
    fields += ["weighted_logit"] if class_weights is not None else []
    return " ".join([*fields, *metrics])
