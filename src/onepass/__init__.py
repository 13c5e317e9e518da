"""Fused losses for language models: kernels compute statistics of each row of logits, losses are functions of these."""

import importlib
import os
import warnings
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from onepass import moe
from onepass.core.invariance import batch_invariant
from onepass.core.version import __version__ as __version__
from onepass.integrations.lazy_logits import Attached, attach
from onepass.integrations.patching import Patch, patch
from onepass.integrations.switch import patch_process
from onepass.logits.linear import LinearLogits
from onepass.logits.partitioned import gather_parameters
from onepass.logits.row_groups import RowGroups
from onepass.logits.tensor_like import MaterializedLogits
from onepass.logits.vocab_parallel import VocabParallelLogits
from onepass.losses.cross_entropy import CrossEntropyLoss, cross_entropy
from onepass.losses.kl_div import KLDivLoss, kl_div
from onepass.losses.linear import (
    LinearCrossEntropyLoss,
    linear_cross_entropy,
    linear_kl_div,
    linear_selective_log_softmax_and_entropy,
    linear_softmax_statistics,
    linear_topk_kl_div,
)
from onepass.losses.linear_loss import linear_loss
from onepass.losses.log_probs import entropy_from_logits, selective_log_softmax, selective_log_softmax_and_entropy
from onepass.losses.ratio_report import RatioReport, ratio_report
from onepass.losses.statistics import softmax_statistics
from onepass.losses.topk_distillation import TopKKLDivLoss, distillation_loss, topk_kl_div
from onepass.softmax.statistics import SoftmaxStatistics

if TYPE_CHECKING:
    from onepass import autotune as autotune
else:

    def __getattr__(name: str) -> Any:
        if name == "autotune":  # imports Triton, which is slow to import and available on Linux only
            try:
                return importlib.import_module("onepass.autotune")
            except ModuleNotFoundError as error:
                raise AttributeError(str(error)) from error
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if os.environ.get("ONEPASS_AUTOTUNE_STORE"):
    if find_spec("triton") is None:
        text = "ONEPASS_AUTOTUNE_STORE: not used, because triton is not installed, so that nothing is tuned [OP003]"
        warnings.warn(text, RuntimeWarning, stacklevel=2)
    else:
        importlib.import_module("onepass.autotune.session").for_process(os.environ["ONEPASS_AUTOTUNE_STORE"])
patch_process()  # if ONEPASS_PATCH is set

__all__ = [
    "Attached",
    "CrossEntropyLoss",
    "KLDivLoss",
    "LinearCrossEntropyLoss",
    "LinearLogits",
    "MaterializedLogits",
    "Patch",
    "RatioReport",
    "RowGroups",
    "SoftmaxStatistics",
    "TopKKLDivLoss",
    "VocabParallelLogits",
    "attach",
    "batch_invariant",
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
    "ratio_report",
    "selective_log_softmax",
    "selective_log_softmax_and_entropy",
    "softmax_statistics",
    "topk_kl_div",
]
