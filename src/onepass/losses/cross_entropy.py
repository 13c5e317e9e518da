"""Cross-entropy with class weights, label smoothing and z-loss."""

import torch
from torch import Tensor

from onepass.checks import check_choice, check_class_weights, check_index, check_logits, check_number
from onepass.options import Options
from onepass.statistics import statistics


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    z_loss_weight: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    inplace_backward: bool = False,
) -> Tensor:
    r"""Cross-entropy between logits and class indices, as `torch.nn.functional.cross_entropy`, in one read.

    With :math:`\log p` the log-softmax of the transformed logits, target :math:`y`, class weights :math:`c` and label
    smoothing :math:`\varepsilon`, the loss of a row is

    .. math:: -(1 - \varepsilon)\, c_y \log p_y - \tfrac{\varepsilon}{V} \sum_j c_j \log p_j
              + \mathrm{z\_loss\_weight} \cdot (\log \textstyle\sum_j e^{z_j})^2

    Args:
        logits: ``(..., V)``, classes in the last dimension (unlike torch); float16, bfloat16, float32 or float64.
        target: ``(...)``, int32 or int64.
        weight: class weights ``(V,)``, floating-point; not differentiable.
        ignore_index: rows with this target are not read; their loss and gradient are 0, and means leave them out.
        reduction: ``"mean"`` (weighted by ``weight[target]``, as in torch; NaN if no row is left; the z-loss is
            averaged over the rows that are not ignored), ``"sum"`` or ``"none"``.
        label_smoothing: :math:`\varepsilon` in [0, 1].
        z_loss_weight: weight of the squared log-normaliser (PaLM, arXiv:2204.02311, section 5), >= 0.
        softcap, logit_scale, temperature: the transform of the logits, see `onepass.softmax_statistics`.
        inplace_backward: see `onepass.selective_log_softmax`.

    Returns:
        float32 (float64 for float64 logits): a scalar, or ``(...)`` for ``reduction="none"``.

    Raises:
        TypeError, ValueError, IndexError: as `onepass.softmax_statistics`, which also says what -inf and NaN give.
    """
    check_logits(logits)
    check_index(target, logits, "target", many=False)
    check_choice(reduction, "reduction", ("mean", "sum", "none"))
    check_number(label_smoothing, "label_smoothing", 0, 1, open_low=False)
    check_number(z_loss_weight, "z_loss_weight", 0, open_low=False)
    if weight is not None:
        check_class_weights(weight, logits, "weight")

    mask = target != ignore_index
    smoothed = (weight if weight is not None else 1.0 / logits.shape[-1]) if label_smoothing else None
    options = Options(logit_scale, softcap, temperature, expected=False, normalized=True)
    s = statistics(logits, target, mask, smoothed, options, inplace_backward=inplace_backward, index_name="target")
    # The statistics of ignored rows are 0, and so is their loss.
    loss = -s.log_probs
    count = mask
    if weight is not None:
        weight = weight.detach().to(loss.dtype)
        count = weight[target.where(mask, 0)] * mask
        loss = loss * count
    if s.weighted_logit is not None:
        total, share = (1.0, 1.0) if weight is None else (weight.sum(), 1.0 / logits.shape[-1])
        loss = (1 - label_smoothing) * loss + (label_smoothing * share) * (total * s.log_normalizer - s.weighted_logit)
    z_loss = z_loss_weight * s.logsumexp.square() if z_loss_weight else None
    if reduction == "mean":
        mean = loss.sum() / count.sum()
        return mean if z_loss is None else mean + z_loss.sum() / mask.sum()
    loss = loss if z_loss is None else loss + z_loss
    return loss.sum() if reduction == "sum" else loss


class CrossEntropyLoss(torch.nn.Module):
    """`cross_entropy` as a module, with the same options (see there), as `torch.nn.CrossEntropyLoss`.

    ``weight`` is kept as a buffer.
    """

    weight: Tensor | None

    def __init__(
        self,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        *,
        z_loss_weight: float = 0.0,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        temperature: float = 1.0,
        inplace_backward: bool = False,
    ) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.label_smoothing = label_smoothing
        self.z_loss_weight = z_loss_weight
        self.softcap = softcap
        self.logit_scale = logit_scale
        self.temperature = temperature
        self.inplace_backward = inplace_backward

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(
            logits,
            target,
            self.weight,
            self.ignore_index,
            self.reduction,
            self.label_smoothing,
            z_loss_weight=self.z_loss_weight,
            softcap=self.softcap,
            logit_scale=self.logit_scale,
            temperature=self.temperature,
            inplace_backward=self.inplace_backward,
        )

    def extra_repr(self) -> str:
        return f"ignore_index={self.ignore_index}, reduction={self.reduction!r}, label_smoothing={self.label_smoothing}"
