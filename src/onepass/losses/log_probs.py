"""Log-probabilities of selected classes, and the entropy of each row, from one read of the logits."""

from typing import Any

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
        support: the classes that the softmax of each row is restricted to, see `onepass.softmax_statistics`.
        temperature, softcap, logit_scale: the transform of the logits, see `onepass.softmax_statistics`.
        inplace_backward: write the gradient over the logits instead of allocating it. A later use of those logits,
            or a second backward, is an error. It has no effect under `torch.compile`, which plans memory itself.

    Returns:
        The log-probabilities in nats, of the shape of ``index``; float32 (float64 for float64 logits), differentiable.

    Raises:
        TypeError, ValueError, IndexError: as `onepass.softmax_statistics`, which also documents -inf and NaN logits.
    """
    transform = temperature, softcap, logit_scale
    return compute_fields("log_probs", logits, index, row_mask, support, transform, inplace_backward)["log_probs"]


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

    The arguments and errors are those of `selective_log_softmax`, without an index. The result has the shape of the
    rows, ``(...)``, in float32, or float64 for float64 logits. Classes of probability 0 contribute 0.
    """
    transform = temperature, softcap, logit_scale
    return compute_fields("entropy", logits, None, row_mask, support, transform, inplace_backward)["entropy"]


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

    The arguments, and what is raised, are those of `selective_log_softmax`.

    Returns:
        ``(log_probs, entropy)``, of the shape of ``index`` and of the rows ``(...)``.
    """
    transform = temperature, softcap, logit_scale
    fields = compute_fields("log_probs entropy", logits, index, row_mask, support, transform, inplace_backward)
    return fields["log_probs"], fields["entropy"]


def compute_fields(
    names: str,
    logits: Logits,
    index: Tensor | None,
    row_mask: Tensor | None = None,
    support: Support | None = None,
    transform: tuple[Any, ...] = (1.0, None, 1.0),
    inplace_backward: bool = False,
) -> dict[str, Tensor]:
    """The fields of `Options` of these names, of every row, from one read of the logits.

    Args:
        names: separated by spaces.
        transform: temperature, soft-cap and logit scale.
    """
    source = as_source(logits, inplace_backward=inplace_backward)
    if index is not None or "log_probs" in names:
        check_index(index, source)  # type: ignore[arg-type]
    options = options_for(names, *transform)
    inputs, options = inputs_for(source, options, index, row_mask, temperature=transform[0], support=support)
    return source.statistics(inputs, options)
