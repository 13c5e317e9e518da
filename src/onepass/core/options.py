"""Options, inputs and results of the softmax operations, shared by `kernels`, `reference`, `softmax` and `logits`.

Options and inputs are named tuples. They can be part of the key of a cache and, flattened, of the signature of an
operation registered with torch (`core.dispatch.operation`).
"""

import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, TypeVar, get_args

import torch
from torch import Tensor

from onepass.core.memo import memo

Reduction = Literal["mean", "sum", "none"]
Direction = Literal["forward", "reverse", "jsd"]
Metric = Literal["is_top1", "log_sum_sq_probs", "mean_logit"]
REDUCTIONS: tuple[str, ...] = get_args(Reduction)
DIRECTIONS: tuple[str, ...] = get_args(Direction)
METRICS: tuple[str, ...] = get_args(Metric)
# Fields with one number per row, in the order of the packed results.
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
# Fields with one value per index. Both are returned in the same tensor, so at most one of them can be requested. (The
# same holds for `expected_logit` and `entropy`, whose gradients share an argument.) Computing log-probs in the kernel
# saves most losses two small kernels in the forward and two in the backward, which matters if the host is the
# bottleneck.
PER_INDEX = ("selected", "log_probs")
NOT_DIFFERENTIABLE = frozenset(("shift", "log_sum_sq_probs", "mean_logit", "is_top1"))


class Transform(NamedTuple):
    """The transform of the logits before the softmax.

    It is ``z = softcap·tanh(logit_scale·x / softcap) / temperature``, or ``z = logit_scale·x / temperature`` if
    ``softcap`` is None.
    """

    temperature: float = 1.0
    softcap: float | None = None
    logit_scale: float = 1.0

    def factors(self) -> tuple[float, float]:
        """``(inner, outer)`` of ``z = outer·tanh(inner·x)``, or of ``z = inner·x`` without a soft-cap."""
        if self.softcap is None:
            return self.logit_scale / self.temperature, 1.0
        return self.logit_scale / self.softcap, self.softcap / self.temperature

    def times(self, number: float) -> "Transform | None":
        """The transform, multiplied by a number; None if it is not a `Transform`."""
        if self.softcap is None:
            return Transform(1.0, None, self.factors()[0] * number)
        temperature = self.temperature / number if number > 0 else 0.0
        return self._replace(temperature=temperature) if 0 < temperature < math.inf else None

    def then(self, outer: "Transform") -> "Transform | None":
        """The transform ``outer(self(x))``; None if it is not a `Transform`."""
        if self.softcap is None:
            return outer._replace(logit_scale=outer.logit_scale * self.factors()[0])
        return None if outer.softcap is not None else self.times(outer.factors()[0])


IDENTITY = Transform()


class Options(NamedTuple):
    """The fields to compute for every row, and how."""

    fields: str  # the names of the requested fields, separated by spaces
    transform: Transform = IDENTITY
    class_weight: float = 0.0  # the weight of every class if there is no tensor of class weights
    sharpness: float = 2.0  # the inverse of the second temperature; `log_sum_sq_probs` needs 2
    invariant: bool = False  # whether a row's results are the same whatever rows are with it; see `batch_invariant`
    masked: int = 0  # the value of the row mask in masked rows

    def names(self) -> tuple[str, ...]:
        """The names of the requested fields. A method: Dynamo of torch 2.9 and 2.10 traces no property of a tuple."""
        return _names(self.fields)

    def wants(self, name: str) -> bool:
        """Whether a field is requested."""
        return name in self.names()


class Inputs(NamedTuple):
    """Tensors that are read in addition to the logits."""

    index: Tensor | None = None  # type: ignore[assignment]  # (...) or (..., K): the selected classes
    row_mask: Tensor | None = None  # (...): rows where it equals `Options.masked` are masked and not read
    class_weights: Tensor | None = None  # (V,)
    temperature: Tensor | None = None  # (...): of each row, above 0; it divides the transformed logits
    # The classes that the distribution of a row is restricted to: `lengths` of `support` from `starts` on. Negative ids
    # are skipped, and a row of negative length has all classes. Without starts and lengths, every row has S of them.
    support: Tensor | None = None  # (n,) or (..., S)
    starts: Tensor | None = None  # (...)
    lengths: Tensor | None = None  # (...)

    def rows(self, function: Callable[[Tensor], Tensor]) -> "Inputs":
        """These inputs, with the function applied to every tensor that has an entry for each row."""
        index, row_mask, class_weights, temperature, support, starts, lengths = self
        per_row = [None if t is None else function(t) for t in (index, row_mask, temperature, starts, lengths)]
        support = function(support) if support is not None and starts is None else support
        return Inputs(per_row[0], per_row[1], class_weights, per_row[2], support, *per_row[3:])

    def passed(self) -> tuple[Tensor | None, ...]:
        """The tensors without trailing Nones, as arguments of an autograd function, each of which costs host time."""
        count = len(self)
        while count and self[count - 1] is None:
            count -= 1
        return self[:count]

    def columns(self, first: int, stop: int | None = None) -> "Inputs":
        """The inputs for the classes from ``first`` to ``stop`` only. Class ids are counted from ``first``."""
        index, _, class_weights, _, support, *_ = self
        return self._replace(
            index=index if index is None or not first else index - first,
            class_weights=None if class_weights is None else class_weights[first:stop],
            support=support if support is None or not first else support - first,
        )


class FieldGradients(NamedTuple):
    """Upstream gradients of the fields. None means zero. A tensor without dimensions is that of all rows."""

    log_normalizer: Tensor | None = None
    expected_logit: Tensor | None = None  # that of `entropy` instead, if it is requested
    weighted_logit: Tensor | None = None
    tempered_log_normalizer: Tensor | None = None
    selected: Tensor | None = None  # that of `log_probs` instead, if they are requested
    # Of an average, (3,):
    # [0] the weight of a row, `factor / count / divisor`, which multiplies the gradient of `selected`;
    # [1] the gradient of every row's number that the forward assumed when it computed the gradient of the logits;
    # [2] the upstream gradient, which the backward writes, for the next average to assume.
    row_weight: Tensor | None = None

    @classmethod
    def of(cls, fields: str, grads: Sequence[Tensor | None]) -> "FieldGradients":
        """From the gradients of the fields, in the order in which ``fields`` names them."""
        return cls(*[None if place is None else grads[place] for place in _gradient_places(fields)])


@memo
def _gradient_places(fields: str) -> tuple[int | None, ...]:
    """For each of the `FieldGradients`, the position of its field in ``fields``; None if that is not requested."""
    places = {name: n for n, name in enumerate(_names(fields))}
    instead = {"expected_logit": "entropy", "selected": "log_probs"}
    return tuple(places.get(instead.get(name, name), places.get(name)) for name in FieldGradients._fields)


@memo
def _names(fields: str) -> tuple[str, ...]:
    return tuple(fields.split())


class Average(NamedTuple):
    """How one number of every row is reduced: the sum over the rows that are not masked, times ``factor``.

    It is divided by the number of these rows if ``counted``, and by the ``divisor``, one element on the rows' device.
    """

    factor: float
    counted: bool = False
    divisor: Tensor | None = None
    masked: int = 0  # see `Options.masked`


Results = tuple[Tensor, Tensor | None, Tensor | None]


def empty_results(logits: Tensor, index: Tensor | None, options: Options) -> Results:
    """Uninitialized results for ``(..., V)`` logits.

    Returns:
        The packed fields, ``(len(PACKED), ...)``, and the tensors of the `PER_INDEX` field and of ``is_top1``, which
        have the shape of ``index``, or None.
    """
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    packed = logits.new_empty((len(PACKED), *logits.shape[:-1]), dtype=dtype)
    contiguous = torch.contiguous_format
    per_index = None if index is None else torch.empty_like(index, dtype=dtype, memory_format=contiguous)
    is_top1 = None
    if index is not None and "is_top1" in options.fields:
        is_top1 = index.new_empty(index.shape, dtype=torch.bool)
    return packed, per_index, is_top1


def pick(results: Results, options: Options) -> tuple[Tensor, ...]:
    """The requested fields, in the order in which the options name them."""
    packed = results[0]
    return tuple([packed[place] if place >= 0 else results[place] for place in _places(options.fields)])  # type: ignore[misc]


@memo
def _places(fields: str) -> tuple[int, ...]:
    """The positions of the fields in the packed results or, if negative, in the tuple of results."""
    return tuple(PLACES.get(f, -2 if f in PER_INDEX else -1) for f in _names(fields))


@memo
def not_differentiable(fields: str) -> tuple[int, ...]:
    """The positions of the requested fields that have no gradient."""
    return tuple(n for n, f in enumerate(_names(fields)) if f in NOT_DIFFERENTIABLE)


# The results of a divergence between two rows of logits. The gradients need the shifts, log-normalizers and means.
PAIR_NUMBERS = (
    "student_shift", "student_log_normalizer", "student_mean",
    "teacher_shift", "teacher_log_normalizer", "teacher_mean",
    "divergence",
)  # fmt: skip
DIVERGENCE = PAIR_NUMBERS.index("divergence")
T = TypeVar("T")


class PairRows(NamedTuple):
    """Tensors ``(...)`` that a divergence reads in addition to the logits."""

    row_mask: Tensor | None = None  # rows where it is 0 are masked and not read
    student_temperatures: Tensor | None = None  # see `Inputs.temperature`
    teacher_temperatures: Tensor | None = None

    def rows(self, function: Callable[[Tensor], Tensor]) -> "PairRows":
        """These tensors, with the function applied to each."""
        return PairRows(*[None if t is None else function(t) for t in self])


class PairOptions(NamedTuple):
    """A divergence, and the transforms of the two rows of logits that it compares."""

    direction: str  # "forward", "reverse" or "jsd"
    beta: float
    student: Transform = IDENTITY
    teacher: Transform = IDENTITY
    columns: int | None = None  # how many leading columns of both are compared; None for all
    invariant: bool = False  # see `Options.invariant`

    @property
    def weights(self) -> tuple[float, float]:
        """The weights of P and Q in the mixture of the Jensen-Shannon divergence."""
        return self.beta, 1.0 - self.beta

    def ordered(self, student: T, teacher: T) -> tuple[T, T]:
        """Order student and teacher as ``(P, Q)`` in KL(P ‖ Q) and in the mixture."""
        return (student, teacher) if self.direction == "reverse" else (teacher, student)


def normalizers(read: PairRows, options: PairOptions) -> tuple[list[Inputs], list[Options]]:
    """What `softmax_statistics` takes for the normalizers of student and teacher."""
    inputs = [
        Inputs(row_mask=read.row_mask, temperature=t) for t in (read.student_temperatures, read.teacher_temperatures)
    ]
    of_rows = Options("shift log_normalizer", invariant=options.invariant)
    return inputs, [of_rows._replace(transform=of) for of in (options.student, options.teacher)]


def empty_pair_numbers(student: Tensor, teacher: Tensor) -> Tensor:
    """Uninitialized results of a divergence, ``(len(PAIR_NUMBERS), ...)``."""
    dtype = torch.float64 if torch.float64 in (student.dtype, teacher.dtype) else torch.float32
    return student.new_empty((len(PAIR_NUMBERS), *student.shape[:-1]), dtype=dtype)
