"""onepass: every logit is read once, and every loss is a few lines of PyTorch on what that one read leaves behind."""

import importlib
import os
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from onepass import moe
from onepass.integrations.patching import Patch, patch
from onepass.logits.linear import LinearLogits
from onepass.logits.partitioned import gather_parameters
from onepass.losses.cross_entropy import CrossEntropyLoss, cross_entropy
from onepass.losses.kl_div import KLDivLoss, kl_div
from onepass.losses.linear import (
    LinearCrossEntropyLoss,
    linear_cross_entropy,
    linear_kl_div,
    linear_loss,
    linear_selective_log_softmax_and_entropy,
    linear_softmax_statistics,
    linear_topk_kl_div,
)
from onepass.losses.log_probs import entropy_from_logits, selective_log_softmax, selective_log_softmax_and_entropy
from onepass.losses.statistics import softmax_statistics
from onepass.losses.topk_distillation import TopKKLDivLoss, distillation_loss, topk_kl_div
from onepass.softmax.statistics import SoftmaxStatistics

try:
    __version__ = version("onepass")
except PackageNotFoundError:  # a source tree on PYTHONPATH
    __version__ = "0.0.0"


def __getattr__(name: str) -> Any:
    if name == "autotune":  # with Triton, which is on Linux only and takes its time
        return importlib.import_module("onepass.autotune")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if os.environ.get("ONEPASS_AUTOTUNE_STORE"):
    importlib.import_module("onepass.autotune.session").for_process(os.environ["ONEPASS_AUTOTUNE_STORE"])

__all__ = [
    "CrossEntropyLoss",
    "KLDivLoss",
    "LinearCrossEntropyLoss",
    "LinearLogits",
    "Patch",
    "SoftmaxStatistics",
    "TopKKLDivLoss",
    "cross_entropy",
    "distillation_loss",
    "entropy_from_logits",
    "gather_parameters",
    "kl_div",
    "linear_cross_entropy",
    "linear_kl_div",
    "linear_loss",
    "linear_selective_log_softmax_and_entropy",
    "linear_softmax_statistics",
    "linear_topk_kl_div",
    "moe",
    "patch",
    "selective_log_softmax",
    "selective_log_softmax_and_entropy",
    "softmax_statistics",
    "topk_kl_div",
]
