"""Losses of a linear head: of ``hidden @ weight.T + bias``, whose logits are never all there."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from onepass.checks import check_class_weights, check_device, check_index, described
from onepass.head.logits import LinearLogits
from onepass.losses.cross_entropy import cross_entropy
from onepass.losses.distillation import kl_div, topk_kl_div
from onepass.losses.log_probs import selective_log_softmax_and_entropy
from onepass.losses.reduction import divisor_of, reduced
from onepass.statistics import SoftmaxStatistics, checked, read, softmax_statistics, wanted


def linear_softmax_statistics(
    hidden: Tensor,
    weight: Tensor,
    index: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    max_memory: int | None = None,
    **options: Any,
) -> SoftmaxStatistics:
    """`softmax_statistics` of a linear head: numbers per row, for any loss, also one that couples rows.

    Forward and backward are four products: the backward computes the tiles again. `linear_loss` needs three.

    Args:
        hidden, weight, bias, max_memory: ``(..., H)``, ``(V, H)``, ``(V,)`` and bytes, see `LinearLogits`.
        index: ``(...)`` or ``(..., K)``, int32 or int64.
        options: those of `softmax_statistics`.
    """
    return softmax_statistics(LinearLogits(hidden, weight, bias, max_memory=max_memory), index, **options)


def linear_selective_log_softmax_and_entropy(
    hidden: Tensor,
    weight: Tensor,
    index: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    row_mask: Tensor | None = None,
    max_memory: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`selective_log_softmax_and_entropy` of a linear head, for any upstream gradient (four products).

    Arguments are those of `linear_softmax_statistics`.
    """
    logits = LinearLogits(hidden, weight, bias, max_memory=max_memory)
    return selective_log_softmax_and_entropy(
        logits, index, temperature=temperature, softcap=softcap, logit_scale=logit_scale, row_mask=row_mask
    )


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    class_weights: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss_weight: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    max_memory: int | None = None,
) -> Tensor:
    """`cross_entropy` of a linear head: forward and backward are three products.

    Args:
        hidden, weight, bias, max_memory: ``(..., H)``, ``(V, H)``, ``(V,)`` and bytes, see `LinearLogits`.
        target: ``(...)``, int32 or int64; rows that are ``ignore_index`` take part in no product.
        class_weights: ``(V,)``, the ``weight`` of `cross_entropy`.

    The other arguments, and what is returned and raised, are those of `cross_entropy`. The gradient is taken in the
    forward pass: a second backward through the result is an error, except with ``reduction="none"``, whose backward
    computes the tiles again (four products).
    """
    logits = LinearLogits(hidden, weight, bias, max_memory=max_memory)
    if class_weights is not None:
        check_class_weights(class_weights, logits, "class_weights")  # which is `weight` there
    return cross_entropy(
        logits, target, class_weights, ignore_index, reduction, label_smoothing, z_loss_weight=z_loss_weight,
        softcap=softcap, logit_scale=logit_scale, temperature=temperature,
    )  # fmt: skip


def linear_topk_kl_div(
    hidden: Tensor,
    weight: Tensor,
    teacher_ids: Tensor,
    teacher_log_probs: Tensor,
    mask: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    max_memory: int | None = None,
    **options: Any,
) -> Tensor:
    """`topk_kl_div` of a student given by its linear head, with the ``options`` of `topk_kl_div`: three products."""
    logits = LinearLogits(hidden, weight, bias, max_memory=max_memory)
    return topk_kl_div(logits, teacher_ids, teacher_log_probs, mask, **options)


def linear_kl_div(
    hidden: Tensor,
    weight: Tensor,
    teacher: Tensor | LinearLogits,
    mask: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    max_memory: int | None = None,
    **options: Any,
) -> Tensor:
    """`kl_div` of a student given by its linear head, with the ``options`` of `kl_div` (three products).

    Args:
        teacher: a constant: logits ``(..., V)``, or ``LinearLogits(teacher_hidden, teacher_weight)``, which adds a
            product and a tile to the workspace; that the two have different widths ``H`` is fine.
    """
    return kl_div(LinearLogits(hidden, weight, bias, max_memory=max_memory), teacher, mask, **options)


def linear_loss(
    hidden: Tensor,
    weight: Tensor,
    index: Tensor | None,
    loss_fn: Callable[..., Tensor],
    *row_inputs: Tensor,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    row_mask: Tensor | None = None,
    class_weights: Tensor | float | None = None,
    metrics: Sequence[str] = (),
    expected_logit: bool = True,
    reduction: str = "mean",
    num_items: float | Tensor | None = None,
    max_memory: int | None = None,
) -> Tensor:
    r"""Any loss that is a function of each row's statistics: forward and backward are three products.

    ``loss_fn(statistics, *row_inputs)`` gets the `SoftmaxStatistics` of ``n`` rows at a time, fields of shape ``(n,)``
    or ``(n, K)``, with those rows of ``row_inputs``, and returns their loss, ``(n,)``. It is differentiated on these
    row vectors while the tile of logits is there. A row's loss must not depend on other rows, since which rows come
    together is not for it to know: a loss that sums over a sequence first, as DPO's, takes `linear_softmax_statistics`.

    Args:
        hidden, weight, bias, max_memory: ``(..., H)``, ``(V, H)``, ``(V,)`` and bytes, see `LinearLogits`.
        index: ``(...)`` or ``(..., K)``, int32 or int64, or None.
        loss_fn: called once a tile, and once more where the backward comes back to it (``reduction="none"``).
        row_inputs: ``(..., *)``, for instance advantages and old log-probs; differentiable.
        temperature, softcap, logit_scale, class_weights, metrics, expected_logit: see `softmax_statistics`.
        row_mask: ``(...)``, bool or 0/1; rows where it is False take part in nothing. Their loss is 0.
        reduction: ``"mean"`` (over the rows that are not masked; 0 if there are none), ``"sum"`` or ``"none"``, which
            has a backward of four products in all.
        num_items: divides the sum instead of ``reduction``, see `topk_kl_div`.

    Returns:
        float32 (float64 for float64 inputs). The gradient of a sum or mean is taken in the forward pass: a second
        backward through it is an error. Under `torch.compile` it is `linear_softmax_statistics` and ``loss_fn``.

    Raises:
        TypeError, ValueError, IndexError: as `softmax_statistics`; ``loss_fn`` returns another shape, or is
            differentiated with respect to a tensor that is not among ``row_inputs``, or (looked for on a CPU and with
            ``ONEPASS_DEBUG=1``, in the gradient of the first row) couples rows.

    Example::

        def policy_loss(s, advantages, old_log_probs):
            ratio = (s.log_probs - old_log_probs).exp()
            clipped = ratio.clamp(0.8, 1.2)
            return -torch.minimum(ratio * advantages, clipped * advantages) - 0.01 * s.entropy

        loss = onepass.linear_loss(hidden, lm_head.weight, tokens, policy_loss, advantages, old_log_probs)
    """
    logits = LinearLogits(hidden, weight, bias, max_memory=max_memory)
    options = wanted(index, class_weights, metrics, expected_logit, logit_scale, softcap, temperature)
    if not callable(loss_fn):
        raise TypeError(f"loss_fn: expected a function of the statistics and the row_inputs, got {described(loss_fn)}")
    if index is not None:
        check_index(index, logits)
    index, row_mask, weights, options = checked(logits, index, row_mask, options, class_weights=class_weights)
    shape = logits.shape[:-1]
    for value in row_inputs:
        if not isinstance(value, Tensor):
            raise TypeError(f"row_inputs: expected tensors, got {described(value)}")
        if value.shape[: len(shape)] != shape:
            raise ValueError(f"row_inputs: expected shapes {(*shape, '...')}, got {tuple(value.shape)}")
        check_device(value, logits, "row_inputs")
    rows = shape.numel() if row_mask is None else row_mask != 0
    if not logits.takes_row_losses:
        s = SoftmaxStatistics(**read(logits, index, row_mask, options, class_weights=class_weights))
        loss = loss_fn(s, *row_inputs)
        loss = loss if row_mask is None else torch.where(row_mask != 0, loss, 0.0)
        return reduced(loss, rows, reduction, num_items)
    divisor = divisor_of(rows, reduction, num_items)
    return logits.loss(
        lambda fields, *parts: loss_fn(SoftmaxStatistics(**fields), *parts),
        options, index, row_mask, weights, row_inputs, divisor,
    )  # fmt: skip


class LinearCrossEntropyLoss(torch.nn.Module):
    """`linear_cross_entropy` as a module, with the same options (see there). ``class_weights`` is kept as a buffer."""

    class_weights: Tensor | None

    def __init__(
        self,
        class_weights: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        *,
        z_loss_weight: float = 0.0,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        temperature: float = 1.0,
        max_memory: int | None = None,
    ) -> None:
        super().__init__()
        self.register_buffer("class_weights", class_weights)
        self.options: dict[str, Any] = {
            "ignore_index": ignore_index,
            "reduction": reduction,
            "label_smoothing": label_smoothing,
            "z_loss_weight": z_loss_weight,
            "softcap": softcap,
            "logit_scale": logit_scale,
            "temperature": temperature,
            "max_memory": max_memory,
        }

    def forward(self, hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear_cross_entropy(hidden, weight, target, bias=bias, class_weights=self.class_weights, **self.options)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())
