"""Distillation from a teacher's top-K tokens and log-probs, usually in one read of the student's logits."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from onepass.core.checks import (
    check_bool,
    check_index,
    check_integer,
    check_number,
    check_row_mask,
    check_teacher,
    check_teacher_mask,
    check_transform,
    is_debugging,
)
from onepass.core.deprecated import renamed
from onepass.core.dispatch import is_plain
from onepass.core.options import Direction, Inputs, Reduction
from onepass.core.shard import Group
from onepass.logits.source import (
    Logits,
    LogitsSource,
    as_source,
    inputs_for,
    options_for,
    over_divisor,
    over_row_temperature,
    scalar_temperature,
    temperature_of_rows,
)
from onepass.losses.directions import BETA, check_direction
from onepass.losses.log_probs import selective_log_softmax
from onepass.losses.module import LossModule
from onepass.losses.reduction import divisor_of, reduce_loss
from onepass.softmax.statistics import check_range
from onepass.softmax.teacher_tokens import teacher_tokens


def mask_of_rows_or_tokens(given: dict[str, Any]) -> tuple[str, Any]:
    """The new name of ``mask``, which masked rows or the teacher's tokens, depending on its shape."""
    mask, ids = given["mask"], given.get("teacher_ids")
    of_tokens = isinstance(mask, Tensor) and isinstance(ids, Tensor) and mask.dim() == ids.dim()
    return "teacher_mask" if of_tokens else "row_mask", mask


def mask_of_divergence(given: dict[str, Any]) -> tuple[str, Any]:
    """The new form of ``mask`` of `distillation_loss`, which masked rows or tokens of the divergence alone."""
    name, mask = mask_of_rows_or_tokens(given)
    ids = given.get("teacher_ids")
    if name == "row_mask" and isinstance(mask, Tensor) and isinstance(ids, Tensor) and mask.shape == ids.shape[:-1]:
        mask = mask.unsqueeze(-1).expand(ids.shape)
    return "teacher_mask", mask


@renamed(positional=("mask",), mask=mask_of_rows_or_tokens)
def topk_kl_div(
    student_logits: Logits,
    teacher_ids: Tensor,
    teacher_log_probs: Tensor,
    *,
    row_mask: Tensor | None = None,
    teacher_mask: Tensor | None = None,
    direction: Direction = "forward",
    beta: float = BETA,
    renormalize: bool = False,
    reduction: Reduction = "mean",
    num_items: float | Tensor | None = None,
    mean_group: Group | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
) -> Tensor:
    r"""Divergence between a teacher's top-K tokens and a student, in one read of the student's logits.

    With :math:`t_k` the teacher's and :math:`s_k = \mathrm{softmax}(x / T)[\mathrm{id}_k]` the student's probability
    of the k-th token, and sums over the tokens that are not masked, the loss of a row is

    - ``"forward"``: :math:`\sum_k t_k \log (t_k / s_k)`, KL(teacher ‖ student)
    - ``"reverse"``: :math:`\sum_k s_k \log (s_k / t_k)`, KL(student ‖ teacher)
    - ``"jsd"``: :math:`\sum_k \beta t_k \log (t_k / m_k) + (1-\beta) s_k \log (s_k / m_k)` with
      :math:`m = \beta t + (1-\beta) s` (Agarwal et al., arXiv:2306.13649, eq. 1); as there, ``beta`` 0 is
      ``"forward"`` and 1 is ``"reverse"``.

    Args:
        student_logits: ``(..., V)``, float16, bfloat16, float32 or float64, any strides. Or `onepass.LinearLogits`.
        teacher_ids: ``(..., K)``, int32 or int64.
        teacher_log_probs: ``(..., K)``, floating-point, in nats, already at the teacher's temperature; not
            differentiable. A token of log-prob -inf contributes nothing, as if it were masked, but its row counts in a
            mean.
        row_mask: ``(...)``, bool or 0/1; 0 masks a row. Masked ids and log-probs may have any value.
        teacher_mask: ``(..., K)``, bool or 0/1; 0 masks a token, in the same way. Rows whose tokens are all masked are
            not read: their loss and gradient are exactly 0.
        direction: ``"forward"``, ``"reverse"`` or ``"jsd"``.
        beta: weight of the teacher in ``"jsd"``, in [0, 1]; an error with another direction.
        renormalize: False: the student is normalized over the whole vocabulary, and the teacher is not normalized.
            True: both are normalized over the row's tokens that are not masked; only those logits are read.
        reduction: ``"mean"`` (over the rows with a token that is not masked; 0 if there are none), ``"sum"`` or
            ``"none"`` (the shape of the rows).
        num_items, mean_group: divide the sum by another number than that of the rows, see `cross_entropy`.
        temperature, softcap, logit_scale: the transform of the student's logits, see `onepass.softmax_statistics`.
            (The result is not multiplied by Hinton's factor :math:`T^2`.)

    Returns:
        float32 (float64 for float64 logits), differentiable with respect to ``student_logits``.

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype, shape, device or value. A teacher with fewer rows
            than the student is not padded, and is an error.
        IndexError: an id outside ``[0, V)`` that is not masked, on a CPU or with ``ONEPASS_DEBUG=1``; on a GPU that
            row is NaN instead.
    """
    student = as_source(student_logits, "student_logits")
    direction, beta = check_direction(direction, beta)
    renormalize = check_bool(renormalize, "renormalize")
    options = options_for("selected" if renormalize else "log_probs", temperature, softcap, logit_scale)
    teacher = Teacher(student, teacher_ids, teacher_log_probs, row_mask, teacher_mask, direction, renormalize)

    def terms_of(s: dict[str, Tensor], *of_teacher: Tensor) -> Tensor:
        of_student = normalized(s["selected"], *of_teacher) if renormalize else s["log_probs"]
        return terms(of_teacher, of_student, direction, beta)

    inputs, options = inputs_for(student, options, teacher.ids, teacher.to_read, None, "teacher_ids", temperature)
    divisor = divisor_of(student, teacher.rows, reduction, num_items, mean_group)
    return student.loss(terms_of, inputs, options, teacher.tensors, divisor)


@renamed(positional=("mask",), labels="target", mask=mask_of_divergence)
def distillation_loss(
    student_logits: Logits,
    target: Tensor,
    teacher_ids: Tensor,
    teacher_log_probs: Tensor,
    *,
    ignore_index: int = -100,
    row_mask: Tensor | None = None,
    teacher_mask: Tensor | None = None,
    alpha: float = 0.5,
    direction: Direction = "forward",
    beta: float = BETA,
    renormalize: bool = False,
    reduction: Reduction = "mean",
    num_items: float | Tensor | None = None,
    mean_group: Group | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
) -> Tensor:
    r"""Cross-entropy with labels plus divergence from a teacher's top-K tokens, in one read of the student's logits.

    There are two reads if ``temperature`` is a tensor and ``renormalize`` is False.

    :math:`\alpha\, D(\mathrm{teacher}, \mathrm{student}) + (1 - \alpha)\, \mathrm{CE}(\mathrm{target})`, where D
    is `topk_kl_div` and CE is `cross_entropy`, always at temperature 1.

    Args:
        target: ``(...)``, int32 or int64; rows that are ``ignore_index`` have no cross-entropy, but do have a
            divergence unless they are masked.
        row_mask: ``(...)``, bool or 0/1; rows where it is False have neither cross-entropy nor divergence.
        alpha: weight of the divergence, in [0, 1]. A part of weight 0 is left out, even if it is infinite or NaN.
        reduction: ``"mean"`` (of each part over its own rows; 0 if there are none, also for the cross-entropy),
            ``"sum"`` or ``"none"``.
        num_items, mean_group: divide the sums of both parts, see `topk_kl_div`.

    The other arguments, and what is raised, are those of `topk_kl_div`.

    Returns:
        float32 (float64 for float64 logits): a scalar, or ``(...)`` for ``reduction="none"``.
    """
    student = as_source(student_logits, "student_logits")
    check_index(target, student, "target", many=False)
    direction, beta = check_direction(direction, beta)
    alpha = check_number(alpha, "alpha", 0, 1, open_low=False)
    ignore_index = check_integer(ignore_index, "ignore_index")
    number = check_transform(scalar_temperature(temperature), None)[0]
    valid = target != ignore_index
    if row_mask is not None:
        check_row_mask(row_mask, student)
        valid &= row_mask != 0
    of_each = temperature_of_rows(temperature, student, row_mask)
    # Rows with a teacher but no label are read too; their cross-entropy with token 0 is masked below.
    target = target.masked_fill(~valid, 0)
    renormalize = check_bool(renormalize, "renormalize")
    if of_each is not None and not renormalize:  # two reads: a read has one second temperature for all rows
        soft = topk_kl_div(
            student, teacher_ids, teacher_log_probs, row_mask=row_mask, teacher_mask=teacher_mask, direction=direction,
            beta=beta, reduction=reduction, num_items=num_items, mean_group=mean_group, temperature=of_each,
            softcap=softcap, logit_scale=logit_scale,
        )  # fmt: skip
        of_target = -selective_log_softmax(student, target, row_mask=valid, softcap=softcap, logit_scale=logit_scale)
        return weighted_sum(alpha, soft, reduce_loss(student, of_target, valid, reduction, num_items, mean_group))
    teacher = Teacher(student, teacher_ids, teacher_log_probs, row_mask, teacher_mask, direction, renormalize)
    if student.checks_values:
        check_range(student, Inputs(target, valid), "target")
        check_range(student, Inputs(teacher.ids, teacher.to_read), "teacher_ids")
    target = target.unsqueeze(-1)
    index = torch.cat([t.to(torch.promote_types(target.dtype, teacher.ids.dtype)) for t in (target, teacher.ids)], -1)
    one_normalizer = renormalize or number == 1.0
    fields = "selected log_normalizer" if one_normalizer else "selected log_normalizer tempered_log_normalizer"
    options = options_for(fields, 1.0, softcap, logit_scale, sharpness=1.0 / number)
    to_read = None if teacher.to_read is None else valid | teacher.to_read
    inputs, options = inputs_for(student, options, index, to_read)
    s = student.statistics(inputs, options)
    selected = over_row_temperature(s["selected"] if number == 1.0 else s["selected"] / number, of_each, row_mask)
    if renormalize:
        log_probs = normalized(selected[..., 1:], *teacher.tensors)
    else:
        normalizer = s["log_normalizer" if one_normalizer else "tempered_log_normalizer"]
        log_probs = selected[..., 1:] - normalizer.unsqueeze(-1)
    of_rows = terms(teacher.tensors, log_probs, direction, beta)
    soft = over_divisor(of_rows, divisor_of(student, teacher.rows, reduction, num_items, mean_group), student.dim() - 1)
    of_target = (s["log_normalizer"] - s["selected"][..., 0]).where(valid, 0.0)
    hard = reduce_loss(student, of_target, valid, reduction, num_items, mean_group)
    return weighted_sum(alpha, soft, hard)


def weighted_sum(alpha: float, soft: Tensor, hard: Tensor) -> Tensor:
    """The weighted sum of the two parts of a distillation loss."""
    if alpha in (0.0, 1.0):
        return soft if alpha else hard
    return alpha * soft + (1 - alpha) * hard


class Teacher:
    """A teacher's top-K tokens, checked: ids that are safe to gather, log-probs that are safe to multiply.

    Attributes:
        ids: ``(..., K)``; 0 for tokens without a term.
        tensors: what `terms` reads, ``(..., K)`` each: log-probs, -inf for masked tokens; whether a token has a term,
            bool; and its probability, if it has been computed.
        to_read: ``(...)``, bool: rows with a token that has a term; None for all rows.
        rows: ``(...)``, bool: rows in which the masks leave a token, which a mean counts; None for all rows.
    """

    def __init__(
        self,
        student: LogitsSource,
        ids: Tensor,
        log_probs: Tensor,
        row_mask: Tensor | None,
        teacher_mask: Tensor | None,
        direction: Direction,
        renormalize: bool,
    ) -> None:
        check_teacher(ids, log_probs, student)
        self.rows: Tensor | None = None
        if row_mask is not None:
            check_row_mask(row_mask, student)
            self.rows = row_mask != 0
        if teacher_mask is not None:
            check_teacher_mask(teacher_mask, ids)
            some = (teacher_mask != 0).any(-1)
            self.rows = some if self.rows is None else self.rows & some
        log_probs, is_float64 = log_probs.detach(), student.dtype == torch.float64
        if is_float64 != (log_probs.dtype == torch.float64):
            log_probs = log_probs.to(torch.float64 if is_float64 else torch.float32)
        if not torch.compiler.is_compiling() and log_probs.is_inference() and torch.is_grad_enabled():
            log_probs = log_probs.clone()  # which autograd can save
        # In the other forms, the teacher's probability may matter where it underflows.
        with_probs = direction == "forward" and not renormalize
        self.ids, given, masked_log_probs, probs = teacher_tokens(log_probs, ids, row_mask, teacher_mask, with_probs)
        log_probs = log_probs if masked_log_probs is None else masked_log_probs
        check_values = not renormalize and (is_debugging() or log_probs.is_cpu) and is_plain(log_probs)
        if check_values and (log_probs > 1e-3).any():
            raise ValueError(
                f"teacher_log_probs: expected logarithms of probabilities, at most 0, got {log_probs.max().item():g}"
            )
        if renormalize:  # log_softmax makes a row without any token NaN
            log_probs = log_probs.log_softmax(-1).where(given, log_probs)
        self.tensors = (log_probs, given) if probs is None else (log_probs, given, probs)
        has_mask = row_mask is not None or teacher_mask is not None
        # The loss and the gradient of a row without any token are 0, even if it is read.
        self.to_read = given.any(-1) if has_mask else student.rows_with(given)


def normalized(z: Tensor, teacher: Tensor, given: Tensor) -> Tensor:
    """The student's log-probs from its logits ``z`` of the teacher's tokens. Those of masked tokens have no meaning."""
    z = z.where(given, teacher)  # the teacher's log-probs of masked tokens are -inf
    return z.where(given.any(-1, keepdim=True), 0.0).log_softmax(-1)


def terms(of_teacher: Sequence[Tensor], student: Tensor, direction: Direction, beta: float) -> Tensor:
    """The terms of the divergence between log-probs ``(..., K)``, from the `Teacher.tensors` and the student's."""
    # A term p·x is 0 wherever p is 0. Selecting x instead of the product keeps NaN out of the gradient too, and the
    # backward of the selection does so for the log_softmax of a row without any token.
    teacher, given, *probs = of_teacher
    if direction == "forward":
        t = probs[0] if probs else teacher.exp()
        return t * (teacher - student).where(given if probs else t != 0, t)  # t is 0 there; 0.0 would be a launch
    s = student.where(given, teacher).exp()  # 0 for masked tokens, with gradient 0 even if their log-prob is NaN
    if direction == "reverse":
        return s * (student - teacher).where(s != 0, 0.0)
    # log(t/m) = logsigmoid(x) - log β and log(s/m) = logsigmoid(-x) - log(1-β): no mixture that could underflow.
    x = (teacher - student).where(given, 0.0) + math.log(beta / (1 - beta))
    to_mixture = beta * teacher.exp() * (logsigmoid(x) - math.log(beta))
    from_mixture = (1 - beta) * s * (logsigmoid(-x).where(s != 0, 0.0) - math.log(1 - beta))
    return to_mixture + from_mixture


class TopKKLDivLoss(LossModule):
    """`topk_kl_div` as a module with the same options."""

    def __init__(
        self,
        *,
        direction: Direction = "forward",
        beta: float = BETA,
        renormalize: bool = False,
        reduction: Reduction = "mean",
        mean_group: Group | None = None,
        temperature: float | Tensor = 1.0,
        softcap: float | None = None,
        logit_scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.direction, self.beta, self.renormalize = direction, beta, renormalize
        self.reduction: Reduction = reduction
        self.mean_group = mean_group
        self.temperature, self.softcap, self.logit_scale = temperature, softcap, logit_scale

    @renamed(positional=("mask", "num_items"), mask=mask_of_rows_or_tokens)
    def forward(
        self,
        student_logits: Logits,
        teacher_ids: Tensor,
        teacher_log_probs: Tensor,
        *,
        row_mask: Tensor | None = None,
        teacher_mask: Tensor | None = None,
        num_items: float | Tensor | None = None,
    ) -> Tensor:
        return topk_kl_div(
            student_logits, teacher_ids, teacher_log_probs, row_mask=row_mask, teacher_mask=teacher_mask,
            num_items=num_items, **self.options(),
        )  # fmt: skip
