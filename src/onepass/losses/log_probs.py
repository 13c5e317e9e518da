"""Log-probabilities of selected classes, and the entropy of each row, from one read of the logits."""

from torch import Tensor

from onepass.core.checks import check_index
from onepass.core.support import Support
from onepass.logits.source import Logits, as_source, inputs_for, options_for


def selective_log_softmax(
    logits: Logits,
    index: Tensor,
    *,
    row_mask: Tensor | None = None,
    support: Support | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    inplace_backward: bool = False,
) -> Tensor:
    r"""Log-probabilities of selected classes, :math:`\log \mathrm{softmax}(x / T)[\mathrm{index}]`, in one read.

    Args:
        logits: ``(..., V)``, float16, bfloat16, float32 or float64, any strides. Or `onepass.LinearLogits`.
        index: ``(...)`` or ``(..., K)``, int32 or int64.
        row_mask: ``(...)``, bool or 0/1. Rows where it is False are not read; their results and gradients are 0.
        support: the classes that each row is restricted to, see `onepass.softmax_statistics`.
        temperature, softcap, logit_scale: the transform of the logits, see `onepass.softmax_statistics`.
        inplace_backward: write the gradient over the logits instead of allocating it. A later use of those logits,
            or a second backward, is an error. It has no effect under `torch.compile`, which plans memory itself.

    Returns:
        The log-probabilities in nats, of the shape of ``index``; float32 (float64 for float64 logits), differentiable.

    Raises:
        TypeError, ValueError, IndexError: as `onepass.softmax_statistics`, which also documents -inf and NaN logits.
    """
    source = as_source(logits, inplace_backward=inplace_backward)
    check_index(index, source)
    options = options_for("log_probs", temperature, softcap, logit_scale)
    inputs, options = inputs_for(source, options, index, row_mask, temperature=temperature, support=support)
    return source.statistics(inputs, options)["log_probs"]


def entropy_from_logits(
    logits: Logits,
    *,
    row_mask: Tensor | None = None,
    support: Support | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    inplace_backward: bool = False,
) -> Tensor:
    r"""Entropy in nats of :math:`p = \mathrm{softmax}(x / T)`, :math:`-\sum_j p_j \log p_j`, in one read.

    The arguments and errors are those of `selective_log_softmax`; the result has the shape of the rows, ``(...)``.
    Classes of probability 0 contribute 0.
    """
    source = as_source(logits, inplace_backward=inplace_backward)
    options = options_for("entropy", temperature, softcap, logit_scale)
    inputs, options = inputs_for(source, options, row_mask=row_mask, temperature=temperature, support=support)
    return source.statistics(inputs, options)["entropy"]


def selective_log_softmax_and_entropy(
    logits: Logits,
    index: Tensor,
    *,
    row_mask: Tensor | None = None,
    support: Support | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    inplace_backward: bool = False,
) -> tuple[Tensor, Tensor]:
    """`selective_log_softmax` and `entropy_from_logits` from one read of the logits, with one gradient for both.

    Returns:
        ``(log_probs, entropy)``, of the shape of ``index`` and of the rows ``(...)``.
    """
    source = as_source(logits, inplace_backward=inplace_backward)
    check_index(index, source)
    options = options_for("log_probs entropy", temperature, softcap, logit_scale)
    inputs, options = inputs_for(source, options, index, row_mask, temperature=temperature, support=support)
    fields = source.statistics(inputs, options)
    return fields["log_probs"], fields["entropy"]
