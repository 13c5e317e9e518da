"""Cross-entropy with class weights, label smoothing and z-loss."""

import torch
from torch import Tensor

from onepass.checks import check_choice, check_class_weights, check_index, check_integer, check_logits, check_number
from onepass.source import Logits, LogitsSource
from onepass.statistics import check_inplace, checked, read, reading


def cross_entropy(
    logits: Logits,
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
    label_smoothing = check_number(label_smoothing, "label_smoothing", 0, 1, open_low=False)
    z_loss_weight = check_number(z_loss_weight, "z_loss_weight", 0, open_low=False)
    ignore_index = check_integer(ignore_index, "ignore_index")
    if weight is not None:
        check_class_weights(weight, logits, "weight")

    fields = "log_probs kept"
    class_weights = None
    if label_smoothing:
        fields += " weighted_logit"
        class_weights = weight if weight is not None else 1.0 / logits.shape[-1]
    if label_smoothing or z_loss_weight:
        fields += " shift log_normalizer"
    options = reading(fields, logit_scale, softcap, temperature, ignore_index)
    if weight is not None:
        weight = weight.detach().to(torch.float64 if logits.dtype == torch.float64 else torch.float32)

    def count_of(target: Tensor, kept: Tensor) -> Tensor:
        if weight is None:
            return kept
        # A target outside the vocabulary has made its row NaN; here it must only not be read.
        return weight[target.clamp(0, len(weight) - 1)] * kept

    def terms(s: dict[str, Tensor], target: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        # The fields of ignored rows are 0, and so is all that follows. Signs are turned once, at the end.
        score, count = s["log_probs"], count_of(target, s["kept"])
        if weight is not None:
            score = score * count
        if label_smoothing:
            total, share = (1.0, 1.0) if weight is None else (weight.sum(), 1.0 / logits.shape[-1])
            smooth = s["weighted_logit"] - total * s["log_normalizer"]  # Σ_j c_j log p_j
            score = (1 - label_smoothing) * score + label_smoothing * share * smooth
        z_loss = z_loss_weight * (s["shift"] + s["log_normalizer"]).square() if z_loss_weight else None
        return score, z_loss, count

    if isinstance(logits, LogitsSource) and reduction != "none" and logits.takes_row_losses:
        if inplace_backward:
            check_inplace(logits)
        _, _, weights, options = checked(
            logits, target, None, options, class_weights=class_weights, index_name="target"
        )
        kept = target != ignore_index
        count = count_of(target, kept).sum()
        share_of_z = count / kept.sum() if reduction == "mean" else 1.0

        def loss_of_rows(s: dict[str, Tensor], target: Tensor) -> Tensor:
            score, z_loss, _ = terms(s, target)
            return -score if z_loss is None else z_loss * share_of_z - score

        options = options._replace(ignore_index=None)  # such rows are masked
        divisor = count if reduction == "mean" else 1.0
        return logits.loss(loss_of_rows, options, target, kept, weights, (target,), divisor, linear=not z_loss_weight)

    s = read(
        logits, target, None, options, class_weights=class_weights, inplace_backward=inplace_backward,
        index_name="target",
    )  # fmt: skip
    score, z_loss, count = terms(s, target)
    if reduction == "mean":
        mean = score.sum() / -count.sum()
        return mean if z_loss is None else mean + z_loss.sum() / s["kept"].sum()
    loss = -score if z_loss is None else z_loss - score
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

    def forward(self, logits: Logits, target: Tensor) -> Tensor:
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
