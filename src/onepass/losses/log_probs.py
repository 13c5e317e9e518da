"""Log-probabilities of chosen tokens and entropy of the distribution."""

from torch import Tensor

from onepass.checks import check_index, check_logits
from onepass.source import Logits
from onepass.statistics import read, reading


def selective_log_softmax(
    logits: Logits,
    index: Tensor,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    row_mask: Tensor | None = None,
    inplace_backward: bool = False,
) -> Tensor:
    r"""Log-probabilities of chosen classes, :math:`\log \mathrm{softmax}(x / T)[\mathrm{index}]`, in one read.

    Args:
        logits: ``(..., V)``, float16, bfloat16, float32 or float64, any strides.
        index: ``(...)`` or ``(..., K)``, int32 or int64.
        temperature, softcap, logit_scale: the transform of the logits, see `onepass.softmax_statistics`.
        row_mask: ``(...)``, bool or 0/1. Rows where it is False are not read; their results and gradients are 0.
        inplace_backward: write the gradient over the logits instead of allocating one. A later use of those logits,
            or a second backward, is an error. Without effect under `torch.compile`, which plans memory itself.

    Returns:
        The log-probabilities, the shape of ``index``, float32 (float64 for float64 logits), differentiable.

    Raises:
        TypeError, ValueError, IndexError: as `onepass.softmax_statistics`, which also says what -inf and NaN give.
    """
    check_logits(logits)
    check_index(index, logits)
    options = reading("log_probs", logit_scale, softcap, temperature)
    return read(logits, index, row_mask, options, inplace_backward=inplace_backward)["log_probs"]


def entropy_from_logits(
    logits: Logits,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    row_mask: Tensor | None = None,
    inplace_backward: bool = False,
) -> Tensor:
    r"""Entropy in nats of :math:`p = \mathrm{softmax}(x / T)`, :math:`-\sum_j p_j \log p_j`, in one read.

    Arguments and errors are those of `selective_log_softmax`; the result has the shape of the rows, ``(...)``.
    Classes of probability 0 contribute 0.
    """
    check_logits(logits)
    options = reading("entropy", logit_scale, softcap, temperature)
    return read(logits, None, row_mask, options, inplace_backward=inplace_backward)["entropy"]


def selective_log_softmax_and_entropy(
    logits: Logits,
    index: Tensor,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    row_mask: Tensor | None = None,
    inplace_backward: bool = False,
) -> tuple[Tensor, Tensor]:
    """`selective_log_softmax` and `entropy_from_logits` from one read of the logits, and one gradient for both.

    Returns:
        ``(log_probs, entropy)``: the shape of ``index``, and the shape of the rows.
    """
    check_logits(logits)
    check_index(index, logits)
    options = reading("log_probs entropy", logit_scale, softcap, temperature)
    s = read(logits, index, row_mask, options, inplace_backward=inplace_backward)
    return s["log_probs"], s["entropy"]
