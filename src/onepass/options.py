"""What both paths and the registered operations share: the fields a row can leave behind, and how it is read."""

from functools import lru_cache
from typing import NamedTuple, TypeVar

import torch

# Fields with one number per row, in the order in which the paths pack them.
PACKED = (
    "shift",
    "log_normalizer",
    "expected_logit",
    "entropy",
    "weighted_logit",
    "log_sum_sq_probs",
    "mean_logit",
    "tempered_log_normalizer",  # log Σ exp(sharpness·(z - shift)): the normaliser at a second temperature
    "kept",  # 1 for a row that was read, 0 for one that is masked or ignored
)
PLACES = {name: place for place, name in enumerate(PACKED)}
# Fields with one value per index. The two share a place: a caller asks for one of them, as for one of `expected_logit`
# and `entropy`. The normalised ones spare most losses two small kernels each way, which counts where the host is the
# limit.
CHOSEN = ("selected", "log_probs")
NOT_DIFFERENTIABLE = frozenset(("shift", "log_sum_sq_probs", "mean_logit", "kept", "is_top1"))


class Options(NamedTuple):
    """What is wanted of a row and how it is read; as flat arguments, those of the registered operations."""

    fields: str  # names, separated by spaces
    logit_scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0
    class_weight: float = 0.0  # of every class, where there is no tensor of class weights
    sharpness: float = 2.0  # one over the second temperature; 2 is that of `log_sum_sq_probs`
    ignore_index: int | None = None  # rows with this index (one a row) are masked

    @property
    def names(self) -> tuple[str, ...]:
        return _names(self.fields)

    def wants(self, name: str) -> bool:
        return name in self.names

    def transform(self) -> tuple[float, float]:
        """``(inner, outer)`` of ``z = outer·tanh(inner·x)``, or of ``z = inner·x`` without a soft-cap."""
        if self.softcap is None:
            return self.logit_scale / self.temperature, 1.0
        return self.logit_scale / self.softcap, self.softcap / self.temperature


@lru_cache
def _names(fields: str) -> tuple[str, ...]:
    return tuple(fields.split())


T = TypeVar("T")
# What a divergence between two rows of logits leaves behind; the means are those that the gradients need.
PAIR_NUMBERS = (
    "student_shift", "student_log_normalizer", "student_mean",
    "teacher_shift", "teacher_log_normalizer", "teacher_mean",
    "divergence",
)  # fmt: skip


class PairOptions(NamedTuple):
    """A divergence and how its two rows of logits are read; as flat arguments, those of the registered operations."""

    direction: str  # "forward", "reverse" or "jsd"
    beta: float
    temperature: float = 1.0
    softcap: float | None = None
    teacher_temperature: float = 1.0
    teacher_softcap: float | None = None

    @property
    def student(self) -> Options:
        return Options("shift log_normalizer", softcap=self.softcap, temperature=self.temperature)

    @property
    def teacher(self) -> Options:
        return Options("shift log_normalizer", softcap=self.teacher_softcap, temperature=self.teacher_temperature)

    @property
    def weights(self) -> tuple[float, float]:
        """Of P and Q in the mixture."""
        return self.beta, 1.0 - self.beta

    def ordered(self, student: T, teacher: T) -> tuple[T, T]:
        """``(P, Q)`` of KL(P ‖ Q), and of the mixture."""
        return (student, teacher) if self.direction == "reverse" else (teacher, student)


def empty_pair_numbers(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    dtype = torch.float64 if torch.float64 in (student.dtype, teacher.dtype) else torch.float32
    return student.new_empty((len(PAIR_NUMBERS), *student.shape[:-1]), dtype=dtype)


Results = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]


def empty_results(logits: torch.Tensor, index: torch.Tensor | None, options: Options) -> Results:
    """Unwritten ``(len(PACKED), ...)`` numbers, and chosen values and `is_top1` of the shape of ``index``."""
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    packed = logits.new_empty((len(PACKED), *logits.shape[:-1]), dtype=dtype)
    chosen = None if index is None else index.new_empty(index.shape, dtype=dtype)
    is_top1 = None
    if index is not None and "is_top1" in options.fields:
        is_top1 = index.new_empty(index.shape, dtype=torch.bool)
    return packed, chosen, is_top1


def pick(results: Results, options: Options) -> tuple[torch.Tensor, ...]:
    """The fields that were asked for, in that order."""
    packed = results[0]
    return tuple([packed[place] if place >= 0 else results[place] for place in _places(options.fields)])  # type: ignore[misc]


@lru_cache
def _places(fields: str) -> tuple[int, ...]:
    """In the packed numbers or, counted from the end, in the results."""
    return tuple(PLACES.get(f, -2 if f in CHOSEN else -1) for f in _names(fields))


@lru_cache
def not_differentiable(fields: str) -> tuple[int, ...]:
    """Which of the fields are not."""
    return tuple(n for n, f in enumerate(_names(fields)) if f in NOT_DIFFERENTIABLE)


SCORES = ("softmax", "sigmoid", "sqrtsoftplus")
GROUP_SCORES = ("top2_sum", "max")
MAX_EXPERTS, MAX_K = 1024, 32


class RouterOptions(NamedTuple):
    """See `moe.route`; as flat arguments, those of the registered operations."""

    k: int
    score: str = "softmax"
    n_group: int = 1
    topk_group: int = 1
    group_score: str = "top2_sum"
    renormalize: bool = True
    scale: float = 1.0
    eps: float = 1e-20
    score_after_topk: bool = False
    softcap: float | None = None
    sums: bool = False  # whether the sums for the losses are wanted

    def transform(self) -> tuple[float, float]:
        """``(inner, outer)`` of ``z = outer·tanh(inner·x)``, or of ``z = inner·x`` without a soft-cap."""
        return (1.0, 1.0) if self.softcap is None else (1.0 / self.softcap, self.softcap)


RoutingResults = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]


def empty_routing(logits: torch.Tensor, options: RouterOptions) -> RoutingResults:
    """Unwritten weights ``(T, K)``, experts ``(T, K)``, counts ``(E,)``, summed probabilities ``(E,)`` and logsumexp
    ``(T,)``; the last two are None where they are not wanted."""
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    T, E = logits.shape
    return (
        logits.new_empty((T, options.k), dtype=dtype),
        logits.new_empty((T, options.k), dtype=torch.int64),
        logits.new_empty(E, dtype=torch.int32),
        logits.new_empty(E, dtype=dtype) if options.sums else None,
        logits.new_empty(T, dtype=dtype) if options.sums else None,
    )


ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "swiglu_clamped")


class ExpertOptions(NamedTuple):
    """See `moe.expert_mlp`; as flat arguments, those of the registered operations."""

    activation: str = "silu"
    transposed: bool = False
    interleaved: bool = False
    gate_up_scale: float = 0.0  # of the adapters
    down_scale: float = 0.0
    alpha: float = 1.702
    limit: float = 7.0
    needed: int = 0  # of which tensors a gradient will be wanted: bit n is that of the n-th of `EXPERT_TENSORS`

    def needs(self, name: str) -> bool:
        return bool(self.needed >> EXPERT_TENSORS.index(name) & 1)


# What is differentiable, in the order of the arguments. a1, b1: adapter of gate_up; a2, b2: of down.
EXPERT_TENSORS = ("hidden", "weights", "gate_up", "down", "gate_up_bias", "down_bias", "a1", "b1", "a2", "b2")
ExpertGradients = tuple[
    torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None,
    torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None,
]  # fmt: skip


class Groups(NamedTuple):
    """The slots of tokens, sorted by expert. A slot is one of the K choices of a token: t·K + k is its number.

    Attributes:
        order: ``(S,)``, int32: the slots, those of no expert last; each expert's in their order.
        offsets: ``(E + 1,)``, int32: expert e has ``order[offsets[e]:offsets[e + 1]]``.
        tile_expert, tile_row: how kernels cut them into tiles; empty on a CPU.
    """

    order: torch.Tensor
    offsets: torch.Tensor
    tile_expert: torch.Tensor
    tile_row: torch.Tensor


class GroupOptions(NamedTuple):
    num_experts: int


class ScatterOptions(NamedTuple):
    """See `moe.scattered_linear`."""

    transposed: bool = False
    grouped_in: bool = False
    grouped_out: bool = False
    k: int = 1  # choices of a token
    needed: int = 0  # gradients: bits of x, weight, bias, weights
