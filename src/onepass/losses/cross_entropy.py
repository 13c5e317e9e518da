"""Cross-entropy of class indices, with class weights, label smoothing and z-loss."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass.core.checks import (
    INDEX_DTYPES,
    check_bool,
    check_choice,
    check_class_weights,
    check_index,
    check_integer,
    check_number,
    check_row_mask,
)
from onepass.core.deprecated import renamed
from onepass.core.invariance import is_batch_invariant
from onepass.core.memo import memo_of_numbers
from onepass.core.options import REDUCTIONS, Average, Options, Reduction
from onepass.core.shard import Group
from onepass.logits.source import (
    Count,
    Divisor,
    Logits,
    LogitsSource,
    as_source,
    inputs_for,
    options_for,
    scalar_temperature,
)
from onepass.logits.tensor_like import TORCH_FUNCTIONS
from onepass.losses.module import LossModule
from onepass.losses.reduction import divisor_of, group_of_mean, sum_of_rows
from onepass.softmax.prepared_average import prepared_average

POSITIONAL = ("weight", "ignore_index", "reduction", "label_smoothing")  # torch's order, in earlier versions


@renamed(positional=POSITIONAL, weight="class_weights")
def cross_entropy(
    logits: Logits,
    target: Tensor,
    *,
    class_weights: Tensor | None = None,
    ignore_index: int = -100,
    row_mask: Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss_weight: float = 0.0,
    reduction: Reduction = "mean",
    num_items: float | Tensor | None = None,
    mean_group: Group | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    inplace_backward: bool = False,
    gradient_in_forward: bool = True,
) -> Tensor:
    r"""Cross-entropy between logits and class indices, in one read; see also `torch.nn.functional.cross_entropy`.

    With :math:`\log p` the log-softmax of the transformed logits, target :math:`y`, class weights :math:`c` and label
    smoothing :math:`\varepsilon`, the loss of a row is

    .. math:: -(1 - \varepsilon)\, c_y \log p_y - \tfrac{\varepsilon}{V} \sum_j c_j \log p_j
              + \mathrm{z\_loss\_weight} \cdot (\log \textstyle\sum_j e^{z_j})^2

    Args:
        logits: ``(..., V)``, classes in the last dimension (unlike torch); float16, bfloat16, float32 or float64. Or
            `onepass.LinearLogits`.
        target: ``(...)``, int32 or int64.
        class_weights: ``(V,)``, floating-point (torch's ``weight``); not differentiable.
        ignore_index: rows with this target are not read: their loss and gradient are 0, and a mean excludes them.
        row_mask: ``(...)``, bool or 0/1; rows where it is False are excluded likewise.
        label_smoothing: :math:`\varepsilon` in [0, 1].
        z_loss_weight: weight of the squared log-normalizer (PaLM, arXiv:2204.02311, section 5), >= 0.
        reduction: ``"mean"`` (weighted by ``class_weights[target]``, as in torch; NaN without any valid row, and NaN or
            infinite if the weights of all targets are 0; the z-loss is averaged over the valid rows), ``"sum"`` or
            ``"none"``.
        num_items: the number of items in the whole batch, a number or a tensor of one element. A mean divides the sum
            by it instead, so that gradient accumulation does not change the average (the result is NaN or infinite if
            it is 0). It is an error with ``"none"``.
        mean_group: a process group, or a `DeviceMesh` with one dimension, whose processes hold different rows of one
            batch (data or context parallelism). A mean then divides the sum of this process by the number of rows of
            all processes, so that the losses of the processes, and their gradients, add up to those of the whole batch.
            Multiply the loss by the number of processes if gradients are averaged over them, as in DDP and FSDP. It is
            an error with another reduction or with ``num_items``.
        temperature, softcap, logit_scale: the transform of the logits, see `onepass.softmax_statistics`.
        inplace_backward: see `onepass.selective_log_softmax`.
        gradient_in_forward: whether the forward may also compute the gradient of the logits while it reads them, if the
            loss is a mean or a sum without class weights, label smoothing and z-loss. The backward computes the
            gradient again if its upstream gradient is not that of the last backward. Set this to False if logits
            require a gradient but ``backward`` will not be called. It has no effect on a linear head.

    Returns:
        float32 (float64 for float64 logits): a scalar, or ``(...)`` for ``reduction="none"``.

    Raises:
        TypeError, ValueError, IndexError: as `onepass.softmax_statistics`, which also documents -inf and NaN logits.
    """
    number = scalar_temperature(temperature)
    given = reduction, ignore_index, label_smoothing, z_loss_weight, number, softcap, logit_scale
    how = check_options(*given, inplace_backward, gradient_in_forward, is_batch_invariant())
    is_plain = class_weights is row_mask is num_items is mean_group is None and number is temperature
    if is_plain and how.average is not None:
        if isinstance(logits, LogitsSource):
            few = logits.at_once(target, how.ignore_index)
            logits = logits if few is None else few
        loss = prepared_average(logits, target, how.average, how.options)
        if loss is not None:
            return loss
    source = as_source(logits, inplace_backward=how.inplace_backward, early_gradient=how.gradient_in_forward)
    ignore_index, label_smoothing, z_loss_weight = how.ignore_index, how.label_smoothing, how.z_loss_weight
    weights = class_weights
    if isinstance(weights, Tensor):
        weights = source.all_class_weights(weights)
    if weights is not None:
        check_class_weights(weights, source, "class_weights")
        weights = weights.detach().to(torch.float64 if source.dtype == torch.float64 else torch.float32)
        if source.divides_late and reduction == "mean" and num_items is mean_group is None:
            weights = about_one(weights)
    check_index(target, source, "target", many=False)
    if target.dtype == torch.int32 and not -(2**31) <= ignore_index < 2**31:
        target = target.long()  # torch would compare with what is left of the number in 32 bits
    group = group_of_mean(source, reduction, num_items, mean_group)
    if source.compares_mask and row_mask is weights is group is None:
        valid, masked = target, ignore_index  # saves a launch, which takes long for few rows
    else:
        valid, masked = target != ignore_index, 0
    if row_mask is not None:
        check_row_mask(row_mask, source)
        valid &= row_mask != 0
    smoothed = None if not label_smoothing else 1.0 / source.shape[-1] if weights is None else weights
    options = how.options._replace(masked=masked)
    inputs, options = inputs_for(source, options, target, valid, smoothed, "target", temperature)

    # A target outside the vocabulary makes its row NaN; the clamp only keeps the lookup of its weight in bounds.
    count = valid if weights is None else weights[target.clamp(0, len(weights) - 1)].where(valid, 0.0)
    total = 1.0 if weights is None or not label_smoothing else weights.sum()
    share = 1.0 if weights is None else 1.0 / source.shape[-1]
    of_z: float | Tensor = z_loss_weight
    divisor: Divisor = None
    # The divisor is negated, which is cheaper than negating the loss of every row.
    if reduction == "mean" and num_items is None and weights is None and group is None:
        divisor = Count(valid, -1.0, masked)
    elif reduction == "mean" and num_items is None:
        total_weight = sum_of_rows(count, group)
        divisor = -total_weight
        if z_loss_weight and weights is not None:
            of_z = z_loss_weight * (total_weight / sum_of_rows(valid, group))
    else:
        items = divisor_of(source, None, reduction, num_items)
        divisor = None if items is None else -items  # type: ignore[operator]

    def score_of(s: dict[str, Tensor], *counts: Tensor) -> Tensor:
        """The negative loss of rows."""
        score = s["log_probs"] * counts[0] if counts else s["log_probs"]
        if label_smoothing:
            smooth = s["weighted_logit"] - total * s["log_normalizer"]  # Σ_j c_j log p_j
            score = (1 - label_smoothing) * score + label_smoothing * share * smooth
        return score - of_z * (s["shift"] + s["log_normalizer"]).square() if z_loss_weight else score

    counts = () if weights is None else (count,)
    is_field = options.fields == "log_probs" and weights is None  # the negative loss is one of the fields
    score = source.loss(None if is_field else score_of, inputs, options, counts, divisor, linear=not z_loss_weight)
    return -score if divisor is None else score


def about_one(weights: Tensor) -> Tensor:
    """Class weights times the power of two that brings the largest magnitude to between 0.5 and 1.

    The mean that they weight is the same. See `LogitsSource.divides_late`: float16 holds neither the gradients of
    weights of 1e5 nor those of 1e-8.
    """
    largest = weights.abs().amax()
    exponent = largest.frexp()[1].where(largest.isfinite(), 0).clamp(-126, 126)
    return weights.ldexp(-exponent)


class CheckedOptions(NamedTuple):
    """Options of `cross_entropy`, checked and converted.

    Attributes:
        options: of the fields that the loss is computed from, which leave out rows whose target is ``ignore_index``.
        average: of the log-probs, if the loss is that and may be `prepared_average`.
    """

    ignore_index: int
    label_smoothing: float
    z_loss_weight: float
    inplace_backward: bool
    gradient_in_forward: bool
    options: Options
    average: Average | None


@memo_of_numbers
def check_options(
    reduction: Any, ignore_index: Any, label_smoothing: Any, z_loss_weight: Any, temperature: Any, softcap: Any,
    logit_scale: Any, inplace_backward: Any, gradient_in_forward: Any, invariant: bool,
) -> CheckedOptions:  # fmt: skip
    """Check the options of `cross_entropy`, where ``temperature`` is a number. ``invariant`` is part of the key."""
    inplace = check_bool(inplace_backward, "inplace_backward")
    early = check_bool(gradient_in_forward, "gradient_in_forward")
    check_choice(reduction, "reduction", REDUCTIONS)
    smoothing = check_number(label_smoothing, "label_smoothing", 0, 1, open_low=False)
    z_weight = check_number(z_loss_weight, "z_loss_weight", 0, open_low=False)
    masked = check_integer(ignore_index, "ignore_index")
    fields = "log_probs weighted_logit" if smoothing else "log_probs"
    if smoothing or z_weight:
        fields += " shift log_normalizer"
    options = options_for(fields, temperature, softcap, logit_scale, masked=masked)
    # An int32 target is not compared with an ignore_index that int32 cannot hold.
    plain = fields == "log_probs" and reduction != "none" and early and not inplace and -(2**31) <= masked < 2**31
    average = Average(-1.0, reduction == "mean", None, masked) if plain else None
    return CheckedOptions(masked, smoothing, z_weight, inplace, early, options, average)


class CrossEntropyLoss(LossModule):
    """`cross_entropy` as a module with the same options, all keyword-only; see also `torch.nn.CrossEntropyLoss`.

    ``class_weights`` is a buffer.
    """

    class_weights: Tensor | None

    @renamed(positional=POSITIONAL, weight="class_weights")
    def __init__(
        self,
        *,
        class_weights: Tensor | None = None,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss_weight: float = 0.0,
        reduction: Reduction = "mean",
        mean_group: Group | None = None,
        temperature: float | Tensor = 1.0,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        inplace_backward: bool = False,
        gradient_in_forward: bool = True,
    ) -> None:
        super().__init__()
        self.register_buffer("class_weights", class_weights)
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        self.z_loss_weight = z_loss_weight
        self.reduction: Reduction = reduction
        self.mean_group = mean_group
        self.temperature, self.softcap, self.logit_scale = temperature, softcap, logit_scale
        self.inplace_backward, self.gradient_in_forward = inplace_backward, gradient_in_forward

    def forward(
        self,
        logits: Logits,
        target: Tensor,
        *,
        row_mask: Tensor | None = None,
        num_items: float | Tensor | None = None,
    ) -> Tensor:
        return cross_entropy(logits, target, row_mask=row_mask, num_items=num_items, **self.options())

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        old = f"{prefix}weight" in state_dict and f"{prefix}class_weights" not in state_dict
        if old and not hasattr(self, "weight"):  # its name in earlier versions
            state_dict[f"{prefix}class_weights"] = state_dict.pop(f"{prefix}weight")
        super()._load_from_state_dict(state_dict, prefix, *rest)


def torch_cross_entropy(
    input: Logits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """`torch.nn.functional.cross_entropy` for logits that are not a tensor; None if it must be computed from a tensor.

    A tensor is needed for targets that are probabilities, classes in another dimension, and deprecated arguments.
    """
    rows = input.shape[:-1]
    is_index = isinstance(target, Tensor) and target.dtype in INDEX_DTYPES and target.shape == rows
    is_source = not isinstance(input, Tensor) and size_average is reduce is None and reduction in REDUCTIONS
    if not is_source or not is_index or len(rows) > 1:
        return None
    return cross_entropy(
        input, target, class_weights=weight, ignore_index=ignore_index, label_smoothing=label_smoothing,
        reduction=reduction,  # type: ignore[arg-type]
    )  # fmt: skip


TORCH_FUNCTIONS[torch.nn.functional.cross_entropy] = torch_cross_entropy
