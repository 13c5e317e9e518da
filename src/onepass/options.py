"""What both paths and the registered operations share: the options of a call and the shape of its results."""

from typing import NamedTuple

import torch

# Rows of the packed per-row results. Those that were not asked for are not written.
FIELDS = (
    "shift",
    "log_normalizer",
    "expected_logit",
    "entropy",
    "weighted_logit",
    "log_sum_sq_probs",
    "mean_logit",
)


class Options(NamedTuple):
    """How a row is read and what is wanted of it. The order is that of the registered operations' arguments."""

    logit_scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0
    class_weight: float = 0.0  # of every class, where no tensor of class weights is given
    weighted: bool = False
    expected: bool = True
    # `selected` and `expected_logit` become log_probs and entropy: what most losses want, two small kernels less
    # each way, which at 64 rows is a fifth of the wall time.
    normalized: bool = False
    is_top1: bool = False
    log_sum_sq_probs: bool = False
    mean_logit: bool = False

    def transform(self) -> tuple[float, float]:
        """``(inner, outer)`` of ``z = outer·tanh(inner·x)``, or of ``z = inner·x`` without a soft-cap."""
        if self.softcap is None:
            return self.logit_scale / self.temperature, 1.0
        return self.logit_scale / self.softcap, self.softcap / self.temperature


def empty_results(
    logits: torch.Tensor, index: torch.Tensor | None, options: Options
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Unwritten ``(fields, rows)``, ``selected`` and ``is_top1``; the last two are empty where not asked for."""
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    stats = logits.new_empty((len(FIELDS), *logits.shape[:-1]), dtype=dtype)
    selected = logits.new_empty((0,) if index is None else index.shape, dtype=dtype)
    is_top1 = logits.new_empty(index.shape if index is not None and options.is_top1 else (0,), dtype=torch.bool)
    return stats, selected, is_top1
