"""The contract of the softmax operations: what is asked of a row of logits, and what kernels and reference return.

Everything here is a named tuple, so that it can be part of a cache's key and, flattened, of the signature of an
operation that is registered with torch (`core.dispatch.operation`).
"""

from functools import lru_cache
from typing import Literal, NamedTuple, TypeVar, get_args

import torch
from torch import Tensor

Reduction = Literal["mean", "sum", "none"]
Direction = Literal["forward", "reverse", "jsd"]
Metric = Literal["is_top1", "log_sum_sq_probs", "mean_logit"]
REDUCTIONS: tuple[str, ...] = get_args(Reduction)
DIRECTIONS: tuple[str, ...] = get_args(Direction)
METRICS: tuple[str, ...] = get_args(Metric)
# Fields with one number per row, in the order in which the backends pack them.
PACKED = (
    "shift",
    "log_normalizer",
    "expected_logit",
    "entropy",
    "weighted_logit",
    "log_sum_sq_probs",
    "mean_logit",
    "tempered_log_normalizer",  # log Σ exp(sharpness·(z - shift)): the normalizer at a second temperature
)
PLACES = {name: place for place, name in enumerate(PACKED)}
# Fields with one value per index. The two share a place: a caller asks for one of them, as for one of `expected_logit`
# and `entropy`. The normalized ones spare most losses two small kernels each way, which counts where the host is the
# limit.
PER_INDEX = ("selected", "log_probs")
NOT_DIFFERENTIABLE = frozenset(("shift", "log_sum_sq_probs", "mean_logit", "is_top1"))


class Transform(NamedTuple):
    """The transform of logits before the softmax: ``z = softcap·tanh(logit_scale·x / softcap) / temperature``, without
    the tanh where ``softcap`` is None."""

    temperature: float = 1.0
    softcap: float | None = None
    logit_scale: float = 1.0

    def factors(self) -> tuple[float, float]:
        """``(inner, outer)`` of ``z = outer·tanh(inner·x)``, or of ``z = inner·x`` without a soft-cap."""
        if self.softcap is None:
            return self.logit_scale / self.temperature, 1.0
        return self.logit_scale / self.softcap, self.softcap / self.temperature


IDENTITY = Transform()


class Options(NamedTuple):
    """Which fields are wanted of a row, and how it is read."""

    fields: str  # names, separated by spaces
    transform: Transform = IDENTITY
    class_weight: float = 0.0  # of every class, where there is no tensor of class weights
    sharpness: float = 2.0  # one over the second temperature; 2 is that of `log_sum_sq_probs`

    @property
    def names(self) -> tuple[str, ...]:
        return _names(self.fields)

    def wants(self, name: str) -> bool:
        return name in self.names


class Inputs(NamedTuple):
    """Tensors that are read beside the logits."""

    index: Tensor | None = None  # type: ignore[assignment]  # (...) or (..., K): the classes to select
    row_mask: Tensor | None = None  # (...): rows where it is 0 are not read
    class_weights: Tensor | None = None  # (V,)


class FieldGradients(NamedTuple):
    """Upstream gradients of the fields, None for 0."""

    log_normalizer: Tensor | None = None
    expected_logit: Tensor | None = None  # or that of `entropy`, if the options want it
    weighted_logit: Tensor | None = None
    tempered_log_normalizer: Tensor | None = None
    selected: Tensor | None = None  # or that of `log_probs`, if the options want them

    @classmethod
    def of(cls, g: dict[str, Tensor | None]) -> "FieldGradients":
        return cls(
            g.get("log_normalizer"),
            g.get("entropy" if "entropy" in g else "expected_logit"),
            g.get("weighted_logit"),
            g.get("tempered_log_normalizer"),
            g.get("log_probs" if "log_probs" in g else "selected"),
        )


@lru_cache
def _names(fields: str) -> tuple[str, ...]:
    return tuple(fields.split())


Results = tuple[Tensor, Tensor | None, Tensor | None]


def empty_results(logits: Tensor, index: Tensor | None, options: Options) -> Results:
    """Unwritten ``(len(PACKED), ...)`` numbers, and the fields `PER_INDEX` and `is_top1`, of the shape of ``index``."""
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    packed = logits.new_empty((len(PACKED), *logits.shape[:-1]), dtype=dtype)
    per_index = None if index is None else index.new_empty(index.shape, dtype=dtype)
    is_top1 = None
    if index is not None and "is_top1" in options.fields:
        is_top1 = index.new_empty(index.shape, dtype=torch.bool)
    return packed, per_index, is_top1


def pick(results: Results, options: Options) -> tuple[Tensor, ...]:
    """The fields that the options name, in that order."""
    packed = results[0]
    return tuple([packed[place] if place >= 0 else results[place] for place in _places(options.fields)])  # type: ignore[misc]


@lru_cache
def _places(fields: str) -> tuple[int, ...]:
    """Places in the packed numbers or, counted from the end, in the results."""
    return tuple(PLACES.get(f, -2 if f in PER_INDEX else -1) for f in _names(fields))


@lru_cache
def not_differentiable(fields: str) -> tuple[int, ...]:
    """The places of fields that have no gradient."""
    return tuple(n for n, f in enumerate(_names(fields)) if f in NOT_DIFFERENTIABLE)


# What a divergence between two rows of logits leaves behind; the means are those that the gradients need.
PAIR_NUMBERS = (
    "student_shift", "student_log_normalizer", "student_mean",
    "teacher_shift", "teacher_log_normalizer", "teacher_mean",
    "divergence",
)  # fmt: skip
DIVERGENCE = PAIR_NUMBERS.index("divergence")
T = TypeVar("T")


class PairOptions(NamedTuple):
    """A divergence, and how its two rows of logits are read."""

    direction: str  # "forward", "reverse" or "jsd"
    beta: float
    student: Transform = IDENTITY
    teacher: Transform = IDENTITY
    columns: int | None = None  # only the first columns of both are compared; None for all

    @property
    def weights(self) -> tuple[float, float]:
        """The weights of P and Q in the mixture."""
        return self.beta, 1.0 - self.beta

    def ordered(self, student: T, teacher: T) -> tuple[T, T]:
        """``(P, Q)`` of KL(P ‖ Q), and of the mixture."""
        return (student, teacher) if self.direction == "reverse" else (teacher, student)


def empty_pair_numbers(student: Tensor, teacher: Tensor) -> Tensor:
    dtype = torch.float64 if torch.float64 in (student.dtype, teacher.dtype) else torch.float32
    return student.new_empty((len(PAIR_NUMBERS), *student.shape[:-1]), dtype=dtype)
