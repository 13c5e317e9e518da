"""Divergences between a student and a teacher over the whole vocabulary."""

from torch import Tensor

from onepass.core.checks import check_pair, check_row_mask, check_transform
from onepass.core.deprecated import renamed
from onepass.core.invariance import is_batch_invariant
from onepass.core.options import Direction, PairOptions, PairRows, Reduction, Transform
from onepass.core.shard import Group
from onepass.logits.source import Logits, as_source, scalar_temperature, temperature_of_rows
from onepass.losses.directions import BETA, check_direction
from onepass.losses.module import LossModule
from onepass.losses.reduction import divisor_of


@renamed(positional=("mask",), mask="row_mask")
def kl_div(
    student_logits: Logits,
    teacher_logits: Logits,
    *,
    row_mask: Tensor | None = None,
    direction: Direction = "forward",
    beta: float = BETA,
    vocab_size: int | None = None,
    reduction: Reduction = "mean",
    num_items: float | Tensor | None = None,
    mean_group: Group | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    teacher_temperature: float | Tensor | None = None,
    teacher_softcap: float | None = None,
    teacher_logit_scale: float = 1.0,
) -> Tensor:
    r"""Divergence between the distributions of student and teacher logits, over the whole vocabulary.

    With :math:`t, s` the probabilities of teacher and student, and sums over the vocabulary, the loss of a row is

    - ``"forward"``: :math:`\sum_j t_j \log (t_j / s_j)`, as `torch.nn.functional.kl_div` of log-probs
    - ``"reverse"``: :math:`\sum_j s_j \log (s_j / t_j)`
    - ``"jsd"``: :math:`\sum_j \beta t_j \log (t_j / m_j) + (1-\beta) s_j \log (s_j / m_j)` with
      :math:`m = \beta t + (1-\beta) s` (Agarwal et al., arXiv:2306.13649, eq. 1); ``beta`` 0 is ``"forward"`` and 1
      is ``"reverse"``.

    Forward and reverse read each tensor once; ``"jsd"`` reads it twice, since its first term needs both normalizers.
    Only gradients of the size of the logits are allocated.

    Args:
        student_logits: ``(..., V)``, float16, bfloat16, float32 or float64, any strides. Or `onepass.LinearLogits`.
        teacher_logits: as ``student_logits``, also differentiable; a gradient that is not required costs nothing. If
            the student is `LinearLogits`, the teacher must not require a gradient. If the student is a tensor, a
            teacher that is `LinearLogits` is materialized. With a sharded vocabulary, the teacher may be sharded like
            the student, or have all columns.
        row_mask: ``(...)``, bool or 0/1. Rows where it is 0 are not read; their loss and gradient are 0.
        direction: ``"forward"``, ``"reverse"`` or ``"jsd"``.
        beta: weight of the teacher in ``"jsd"``, in [0, 1]; an error with another direction.
        vocab_size: the number of classes, if the logits have more columns: those from there on are padding. They are
            not compared, and their gradients are 0. (Models with the same tokenizer may be padded differently.)
        reduction: ``"mean"`` (over the rows that are not masked; 0 if there are none), ``"sum"`` or ``"none"``.
        num_items, mean_group: divide the sum by another number than that of the rows, see `cross_entropy`.
        temperature, softcap, logit_scale: the transform of the student's logits, see `onepass.softmax_statistics`.
        teacher_temperature, teacher_softcap, teacher_logit_scale: the transform of the teacher's logits. The default of
            ``teacher_temperature`` is ``temperature``.

    Returns:
        float32 (float64 if either of the logits are): a scalar, or ``(...)`` for ``reduction="none"``.

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype, shape, device or value.

    A class of probability 0 contributes exactly 0 to an expectation under its distribution, so both student and teacher
    may have -inf logits. If the student gives probability 0 to a class with a positive probability of the teacher, the
    forward divergence is +inf, as in torch, and its gradient has no meaning; the same holds for the reverse divergence
    with student and teacher exchanged. NaN logits make the results of their row NaN, as in
    `onepass.softmax_statistics`.
    """
    student = as_source(student_logits, "student_logits")
    teacher = as_source(teacher_logits, "teacher_logits")
    columns = check_pair(student, teacher, vocab_size)
    if row_mask is not None:
        check_row_mask(row_mask, student)
    direction, beta = check_direction(direction, beta)
    student_transform = Transform(*check_transform(scalar_temperature(temperature), softcap, logit_scale))
    if teacher_temperature is None:
        teacher_temperature = temperature
    number = scalar_temperature(teacher_temperature)
    teacher_transform = Transform(*check_transform(number, teacher_softcap, teacher_logit_scale, prefix="teacher_"))
    temperatures = temperature_of_rows(temperature, student, row_mask, dtype=teacher.dtype)
    teacher_temperatures = temperature_of_rows(
        teacher_temperature, teacher, row_mask, "teacher_temperature", dtype=student.dtype
    )
    options = PairOptions(direction, beta, student_transform, teacher_transform, columns, is_batch_invariant())
    rows = None if row_mask is None else row_mask != 0
    divisor = divisor_of(student, rows, reduction, num_items, mean_group)
    return student.divergence(teacher, PairRows(row_mask, temperatures, teacher_temperatures), options, divisor)


class KLDivLoss(LossModule):
    """`kl_div` as a module with the same options."""

    def __init__(
        self,
        *,
        direction: Direction = "forward",
        beta: float = BETA,
        vocab_size: int | None = None,
        reduction: Reduction = "mean",
        mean_group: Group | None = None,
        temperature: float | Tensor = 1.0,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        teacher_temperature: float | Tensor | None = None,
        teacher_softcap: float | None = None,
        teacher_logit_scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.direction, self.beta, self.vocab_size = direction, beta, vocab_size
        self.reduction: Reduction = reduction
        self.mean_group = mean_group
        self.temperature, self.softcap, self.logit_scale = temperature, softcap, logit_scale
        self.teacher_temperature, self.teacher_softcap = teacher_temperature, teacher_softcap
        self.teacher_logit_scale = teacher_logit_scale

    @renamed(positional=("mask", "num_items"), mask="row_mask")
    def forward(
        self,
        student_logits: Logits,
        teacher_logits: Logits,
        *,
        row_mask: Tensor | None = None,
        num_items: float | Tensor | None = None,
    ) -> Tensor:
        return kl_div(student_logits, teacher_logits, row_mask=row_mask, num_items=num_items, **self.options())
