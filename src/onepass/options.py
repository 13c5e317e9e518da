"""What both paths and the registered operations share: the fields a row can leave behind, and how it is read."""

from typing import NamedTuple

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
    "kept",  # 1 for a row that was read, 0 for one that is masked or ignored
)
# Fields with one value per index. The two share a place: a caller asks for one of them, as for one of `expected_logit`
# and `entropy`. The normalised ones spare most losses two small kernels each way, which counts where the host is the
# limit.
CHOSEN = ("selected", "log_probs")
NOT_DIFFERENTIABLE = ("shift", "log_sum_sq_probs", "mean_logit", "kept", "is_top1")


class Options(NamedTuple):
    """What is wanted of a row and how it is read; as flat arguments, those of the registered operations."""

    fields: str  # names, separated by spaces
    logit_scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0
    class_weight: float = 0.0  # of every class, where there is no tensor of class weights
    ignore_index: int | None = None  # rows with this index (one a row) are masked

    def wants(self, name: str) -> bool:
        return name in self.fields.split()

    def transform(self) -> tuple[float, float]:
        """``(inner, outer)`` of ``z = outer·tanh(inner·x)``, or of ``z = inner·x`` without a soft-cap."""
        if self.softcap is None:
            return self.logit_scale / self.temperature, 1.0
        return self.logit_scale / self.softcap, self.softcap / self.temperature


Results = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]


def empty_results(logits: torch.Tensor, index: torch.Tensor | None, options: Options) -> Results:
    """Unwritten ``(len(PACKED), ...)`` numbers, and chosen values and `is_top1` of the shape of ``index``."""
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    packed = logits.new_empty((len(PACKED), *logits.shape[:-1]), dtype=dtype)
    chosen = None if index is None else logits.new_empty(index.shape, dtype=dtype)
    is_top1 = (
        logits.new_empty(index.shape, dtype=torch.bool) if index is not None and options.wants("is_top1") else None
    )
    return packed, chosen, is_top1


def pick(results: Results, options: Options) -> tuple[torch.Tensor, ...]:
    """The fields that were asked for, in that order."""
    packed, chosen, is_top1 = results
    fields = (
        packed[PACKED.index(f)] if f in PACKED else chosen if f in CHOSEN else is_top1 for f in options.fields.split()
    )
    return tuple(fields)  # type: ignore[arg-type]
