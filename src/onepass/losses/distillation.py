"""Distillation: from a teacher's K best log-probs a token, gathered from one read, or from its whole logits."""

import math
from copy import copy
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from onepass.checks import (
    check_choice,
    check_index,
    check_integer,
    check_logits,
    check_number,
    check_pair,
    check_row_mask,
    check_teacher,
    check_transform,
)
from onepass.dispatch import is_plain
from onepass.divergence import divergence
from onepass.head.divergence import linear_divergence
from onepass.losses.reduction import divisor_of, reduced
from onepass.options import PairOptions
from onepass.source import Logits, LogitsSource
from onepass.statistics import DEBUG, checked, gather_logits, read, reading

DIRECTIONS = ("forward", "reverse", "jsd")
BETA = 0.5  # unless somebody says otherwise, which only a Jensen-Shannon divergence listens to


def topk_kl_div(
    student_logits: Logits,
    teacher_ids: Tensor,
    teacher_log_probs: Tensor,
    mask: Tensor | None = None,
    *,
    temperature: float = 1.0,
    direction: str = "forward",
    beta: float = BETA,
    renormalize: bool = False,
    reduction: str = "sum",
    num_items: float | Tensor | None = None,
) -> Tensor:
    r"""Divergence between a teacher, known by its K best tokens, and a student, in one read of the student's logits.

    With :math:`t_k` the teacher's and :math:`s_k = \mathrm{softmax}(x / T)[\mathrm{id}_k]` the student's probability
    of the k-th token, the loss of a row is, summed over the tokens that are given,

    - ``"forward"``: :math:`\sum_k t_k \log (t_k / s_k)`, KL(teacher ‖ student)
    - ``"reverse"``: :math:`\sum_k s_k \log (s_k / t_k)`, KL(student ‖ teacher)
    - ``"jsd"``: :math:`\sum_k \beta t_k \log (t_k / m_k) + (1-\beta) s_k \log (s_k / m_k)` with
      :math:`m = \beta t + (1-\beta) s` (Agarwal et al., arXiv:2306.13649, eq. 1); as there, ``beta`` 0 is
      ``"forward"`` and 1 is ``"reverse"``.

    Args:
        student_logits: ``(..., V)``, float16, bfloat16, float32 or float64, any strides.
        teacher_ids: ``(..., K)``, int32 or int64.
        teacher_log_probs: ``(..., K)``, floating-point, in nats, at the temperature that is meant for the teacher; not
            differentiable. A token of log-prob -inf is one that the teacher did not give, as if its ``mask`` were 0.
        mask: ``(..., K)`` or ``(...)``, bool or 0/1; tokens or rows that count. Elsewhere ids and log-probs may be
            anything, and rows without any token are not read: their loss and gradient are exactly 0.
        temperature: :math:`T > 0` of the student. (Hinton's factor :math:`T^2` is the caller's to multiply.)
        direction: ``"forward"``, ``"reverse"`` or ``"jsd"``.
        beta: weight of the teacher in ``"jsd"``, in [0, 1]; an error with another direction.
        renormalize: False: the student is normalised over the whole vocabulary, and the teacher is taken as it is.
            True: both are normalised over the row's given tokens; only those logits are read.
        reduction: ``"sum"``, ``"mean"`` (over the rows that ``mask`` leaves a token of; 0 if there are none) or
            ``"none"`` (the shape of the rows).
        num_items: divides the sum instead of ``reduction``: a number, or a tensor of one element, of items in the whole
            batch, for averages that gradient accumulation does not change.

    Returns:
        float32 (float64 for float64 logits), differentiable with respect to ``student_logits``.

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype, shape, device or value; rows of the teacher that
            are fewer than the student's are not filled up.
        IndexError: an id outside ``[0, V)`` that is not masked, on a CPU or with ``ONEPASS_DEBUG=1``; on a GPU that
            row is NaN instead.
    """
    check_logits(student_logits, "student_logits")
    direction, beta = resolved(direction, beta)
    options = reading("selected" if renormalize else "log_probs", temperature=temperature)
    temperature = options.temperature
    teacher = Teacher(student_logits, teacher_ids, teacher_log_probs, mask, renormalize)
    if renormalize and isinstance(student_logits, Tensor):
        z = gather_logits(student_logits, teacher.ids, "teacher_ids")
        student = teacher.normalized(z if temperature == 1.0 else z / temperature)
        return teacher.loss(student, direction, beta, reduction, num_items)

    def student_of(s: dict[str, Tensor], teacher: Teacher) -> Tensor:
        return teacher.normalized(s["selected"]) if renormalize else s["log_probs"]

    row_mask = teacher.rows_to_read(student_logits, direction)
    if isinstance(student_logits, LogitsSource) and student_logits.takes_row_losses:
        rows = student_logits.shape[:-1].numel()
        divisor = divisor_of(rows if teacher.rows is None else teacher.rows, reduction, num_items)

        def loss_of_rows(s: dict[str, Tensor], log_probs: Tensor) -> Tensor:
            part = teacher.of(log_probs)
            return part.terms(student_of(s, part), direction, beta).sum(-1)

        checked(student_logits, teacher.ids, row_mask, options, index_name="teacher_ids")  # the range of the ids
        return student_logits.loss(loss_of_rows, options, teacher.ids, row_mask, None, (teacher.log_probs,), divisor)
    s = read(student_logits, teacher.ids, row_mask, options, index_name="teacher_ids")
    return teacher.loss(student_of(s, teacher), direction, beta, reduction, num_items)


def distillation_loss(
    student_logits: Logits,
    labels: Tensor,
    teacher_ids: Tensor,
    teacher_log_probs: Tensor,
    mask: Tensor | None = None,
    *,
    alpha: float = 0.5,
    temperature: float = 1.0,
    direction: str = "forward",
    beta: float = BETA,
    renormalize: bool = False,
    ignore_index: int = -100,
    reduction: str = "mean",
    num_items: float | Tensor | None = None,
) -> Tensor:
    r"""Hard labels and a teacher's K best tokens, from one read of the student's logits and with one gradient.

    :math:`\alpha\, D(\mathrm{teacher}, \mathrm{student}) + (1 - \alpha)\, \mathrm{CE}(\mathrm{labels})`, where D is
    `topk_kl_div` and CE is `cross_entropy`, always at temperature 1.

    Args:
        labels: ``(...)``, int32 or int64; rows that are ``ignore_index`` have no cross-entropy (but a divergence,
            unless ``mask`` says otherwise).
        alpha: weight of the divergence, in [0, 1].
        reduction: ``"mean"`` (of each part over its own rows), ``"sum"`` or ``"none"``.
        num_items: divides the sums of both parts, see `topk_kl_div`.

    The other arguments, and what is raised, are those of `topk_kl_div`.
    """
    check_logits(student_logits, "student_logits")
    check_index(labels, student_logits, "labels", many=False)
    direction, beta = resolved(direction, beta)
    alpha = check_number(alpha, "alpha", 0, 1, open_low=False)
    ignore_index = check_integer(ignore_index, "ignore_index")
    temperature, _, _ = check_transform(temperature, None)
    teacher = Teacher(student_logits, teacher_ids, teacher_log_probs, mask, renormalize)
    labelled = labels != ignore_index
    row_mask = teacher.rows_to_read(student_logits, direction)
    row_mask = None if row_mask is None else labelled | row_mask
    # Rows with a teacher but no label are read too; what they say of token 0 is left out below.
    labels = labels.masked_fill(~labelled, 0).unsqueeze(-1)
    index = torch.cat([t.to(torch.promote_types(labels.dtype, teacher.ids.dtype)) for t in (labels, teacher.ids)], -1)
    one_normalizer = renormalize or temperature == 1.0
    fields = "selected log_normalizer" if one_normalizer else "selected log_normalizer tempered_log_normalizer"
    options = reading(fields, sharpness=1.0 / temperature)
    s = read(student_logits, index, row_mask, options, index_name="labels or teacher_ids")
    selected = s["selected"] if temperature == 1.0 else s["selected"] / temperature
    if renormalize:
        student = teacher.normalized(selected[..., 1:])
    else:
        student = selected[..., 1:] - s["log_normalizer" if one_normalizer else "tempered_log_normalizer"].unsqueeze(-1)
    soft = teacher.loss(student, direction, beta, reduction, num_items)
    hard = reduced((s["log_normalizer"] - s["selected"][..., 0]).where(labelled, 0.0), labelled, reduction, num_items)
    return alpha * soft + (1 - alpha) * hard


def kl_div(
    student_logits: Logits,
    teacher_logits: Logits,
    mask: Tensor | None = None,
    *,
    direction: str = "forward",
    beta: float = BETA,
    temperature: float = 1.0,
    softcap: float | None = None,
    teacher_temperature: float | None = None,
    teacher_softcap: float | None = None,
    vocab_size: int | None = None,
    reduction: str = "sum",
    num_items: float | Tensor | None = None,
) -> Tensor:
    r"""Divergence between the distributions of two rows of logits, over the whole vocabulary.

    With :math:`t, s` the teacher's and the student's probabilities and the sums over the vocabulary,

    - ``"forward"``: :math:`\sum_j t_j \log (t_j / s_j)`, as `torch.nn.functional.kl_div` of log-probs
    - ``"reverse"``: :math:`\sum_j s_j \log (s_j / t_j)`
    - ``"jsd"``: :math:`\sum_j \beta t_j \log (t_j / m_j) + (1-\beta) s_j \log (s_j / m_j)` with
      :math:`m = \beta t + (1-\beta) s` (Agarwal et al., arXiv:2306.13649, eq. 1); ``beta`` 0 is ``"forward"`` and 1
      is ``"reverse"``.

    Forward and reverse read each tensor once; ``"jsd"`` twice, since its first term needs both normalisers. Nothing of
    the size of the logits is allocated but the gradients.

    Args:
        student_logits: ``(..., V)``, float16, bfloat16, float32 or float64, any strides.
        teacher_logits: ``(..., V)``, likewise; differentiable too, which costs nothing unless it requires a gradient.
            Of a student that is `onepass.LinearLogits`, a constant: logits, or LinearLogits too.
        mask: ``(...)``, bool or 0/1. Rows where it is 0 are not read; their loss and gradient are 0.
        direction: ``"forward"``, ``"reverse"`` or ``"jsd"``.
        beta: weight of the teacher in ``"jsd"``, in [0, 1]; an error with another direction.
        temperature, softcap: of the student's logits, see `onepass.softmax_statistics`.
        teacher_temperature, teacher_softcap: of the teacher's; without its own temperature it has the student's.
        vocab_size: only the first ``vocab_size`` columns of both are compared: for two models of one tokenizer, of
            which one or both pad their vocabulary. Gradients beyond them are 0.
        reduction: ``"sum"``, ``"mean"`` (over the rows that are not masked) or ``"none"``, ``(...)``.
        num_items: divides the sum instead of ``reduction``, see `topk_kl_div`.

    Returns:
        float32 (float64 if either of the logits are).

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype, shape, device or value.

    What has probability 0 contributes exactly 0 to each expectation under it, so that -inf logits are fine on either
    side. Only where a distribution gives probability 0 to what the other, in whose favour the expectation is taken,
    can produce is the divergence +inf (as in torch), and there is no gradient to speak of. NaN as in
    `onepass.softmax_statistics`, for its row alone.
    """
    check_logits(student_logits, "student_logits")
    check_logits(teacher_logits, "teacher_logits")
    vocab = check_pair(student_logits, teacher_logits, vocab_size)
    if mask is not None:
        check_row_mask(mask, student_logits, "mask")
    direction, beta = resolved(direction, beta)
    temperature, softcap, _ = check_transform(temperature, softcap)
    teacher_temperature = temperature if teacher_temperature is None else teacher_temperature
    teacher_temperature, teacher_softcap, _ = check_transform(teacher_temperature, teacher_softcap, prefix="teacher_")
    options = PairOptions(direction, beta, temperature, softcap, teacher_temperature, teacher_softcap)
    rows = student_logits.shape[:-1].numel() if mask is None else mask != 0
    if isinstance(student_logits, Tensor) and isinstance(teacher_logits, Tensor):
        return reduced(divergence(student_logits, teacher_logits, mask, options, vocab), rows, reduction, num_items)
    if not isinstance(student_logits, LogitsSource):
        raise TypeError("teacher_logits: expected a tensor for a student that is a tensor, got LinearLogits")
    if torch.is_grad_enabled() and teacher_logits.requires_grad:
        raise ValueError("teacher_logits: expected no gradient for a student that is a linear head; detach them")
    divisor = divisor_of(rows, reduction, num_items)
    return linear_divergence(student_logits, teacher_logits, mask, options, vocab, divisor)


class Teacher:
    """A teacher's tokens, checked: ids that are safe to gather, log-probs that are safe to multiply.

    Attributes:
        ids: ``(..., K)``; 0 where no token is given.
        log_probs: ``(..., K)``; -inf where no token is given.
        rows: ``(...)``, bool: rows that ``mask`` leaves a token of, which a mean counts; None if that is all of them.
    """

    def __init__(
        self, student_logits: Logits, ids: Tensor, log_probs: Tensor, mask: Tensor | None, renormalize: bool
    ) -> None:
        check_teacher(ids, log_probs, mask, student_logits)
        self.rows: Tensor | None = None
        log_probs = log_probs.detach().to(torch.float64 if student_logits.dtype == torch.float64 else torch.float32)
        if mask is not None:
            masked = mask == 0
            self.rows = ~masked
            if mask.dim() == ids.dim():
                self.rows = self.rows.any(-1)
            else:
                masked = masked.unsqueeze(-1)
            log_probs = log_probs.masked_fill(masked, -float("inf"))
        look = not renormalize and (DEBUG or log_probs.is_cpu) and is_plain(log_probs)
        if look and (log_probs > 1e-3).any():
            raise ValueError(
                f"teacher_log_probs: expected logarithms of probabilities, at most 0, got {log_probs.max().item():g}"
            )
        self.ids, self.log_probs = ids.where(log_probs > -float("inf"), 0), log_probs
        if renormalize:  # a row without any token would be NaN
            self.log_probs = log_probs.log_softmax(-1).masked_fill_(self.absent, -float("inf"))

    def of(self, log_probs: Tensor) -> "Teacher":
        """The same of some rows, as they were left here."""
        part = copy(self)
        part.log_probs = log_probs
        return part

    def rows_to_read(self, student_logits: Logits, direction: str) -> Tensor | None:
        """Rows with a token that is given. Of a tensor of logits a forward divergence leaves the others alone in any
        case, for its gradient of them is 0."""
        if direction == "forward" and isinstance(student_logits, Tensor):
            return self.rows
        return ~self.absent.all(-1)

    @property
    def absent(self) -> Tensor:
        return self.log_probs == -float("inf")

    def normalized(self, z: Tensor) -> Tensor:
        """The student's log-probs, from its logits ``z`` of the tokens that are given; the others may be NaN."""
        return z.masked_fill(self.absent, -float("inf")).log_softmax(-1)

    def loss(
        self, student: Tensor, direction: str, beta: float, reduction: str, num_items: float | Tensor | None
    ) -> Tensor:
        """The divergence from ``student``, log-probs of the tokens, reduced."""
        terms = self.terms(student, direction, beta)
        rows = student.shape[:-1].numel() if self.rows is None else self.rows
        return reduced(terms.sum(-1) if reduction == "none" else terms, rows, reduction, num_items)

    def terms(self, student: Tensor, direction: str, beta: float) -> Tensor:
        # A term p·x is 0 where p is, whatever x; masking x, and not the product, keeps NaN from the gradient too.
        # So does a backward of masked_fill for the log_softmax of a row without any token.
        if direction == "forward":
            t = self.log_probs.exp()
            return t * (self.log_probs - student).masked_fill_(t == 0, 0.0)
        absent = self.absent
        s = student.exp().masked_fill(absent, 0.0)
        if direction == "reverse":
            return s * (student - self.log_probs).masked_fill_(s == 0, 0.0)
        # log(t/m) = logsigmoid(x) - log β and log(s/m) = logsigmoid(-x) - log(1-β), without a mixture that underflows.
        x = (self.log_probs - student).masked_fill_(absent, 0.0) + math.log(beta / (1 - beta))
        of_teacher = beta * self.log_probs.exp() * (logsigmoid(x) - math.log(beta))
        of_student = (1 - beta) * s * (logsigmoid(-x).masked_fill(s == 0, 0.0) - math.log(1 - beta))
        return of_teacher + of_student


def resolved(direction: str, beta: float) -> tuple[str, float]:
    """Direction and beta, checked; a Jensen-Shannon divergence with ``beta`` 0 or 1 is one of the others."""
    check_choice(direction, "direction", DIRECTIONS)
    beta = check_number(beta, "beta", 0, 1, open_low=False)
    if direction == "jsd":
        return {0.0: "forward", 1.0: "reverse"}.get(beta, direction), beta
    if beta != BETA:
        raise ValueError(f"beta: expected direction='jsd' with it, got beta={beta} with direction={direction!r}")
    return direction, beta


class TopKKLDivLoss(torch.nn.Module):
    """`topk_kl_div` as a module, with the same options (see there)."""

    def __init__(
        self,
        *,
        temperature: float = 1.0,
        direction: str = "forward",
        beta: float = BETA,
        renormalize: bool = False,
        reduction: str = "sum",
    ) -> None:
        super().__init__()
        self.options: dict[str, Any] = {
            "temperature": temperature,
            "direction": direction,
            "beta": beta,
            "renormalize": renormalize,
            "reduction": reduction,
        }

    def forward(
        self,
        student_logits: Logits,
        teacher_ids: Tensor,
        teacher_log_probs: Tensor,
        mask: Tensor | None = None,
        num_items: float | Tensor | None = None,
    ) -> Tensor:
        return topk_kl_div(student_logits, teacher_ids, teacher_log_probs, mask, num_items=num_items, **self.options)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())


class KLDivLoss(torch.nn.Module):
    """`kl_div` as a module, with the same options (see there)."""

    def __init__(
        self,
        *,
        direction: str = "forward",
        beta: float = BETA,
        temperature: float = 1.0,
        softcap: float | None = None,
        teacher_temperature: float | None = None,
        teacher_softcap: float | None = None,
        vocab_size: int | None = None,
        reduction: str = "sum",
    ) -> None:
        super().__init__()
        self.options: dict[str, Any] = {
            "direction": direction,
            "beta": beta,
            "temperature": temperature,
            "softcap": softcap,
            "teacher_temperature": teacher_temperature,
            "teacher_softcap": teacher_softcap,
            "vocab_size": vocab_size,
            "reduction": reduction,
        }

    def forward(
        self,
        student_logits: Logits,
        teacher_logits: Logits,
        mask: Tensor | None = None,
        num_items: float | Tensor | None = None,
    ) -> Tensor:
        return kl_div(student_logits, teacher_logits, mask, num_items=num_items, **self.options)

    extra_repr = TopKKLDivLoss.extra_repr
