"""Replacements for torchtitan's cross-entropy, of logits whose vocabulary may be sharded, its router and its grouped
experts.

torchtitan converts the logits to float32 before its loss; onepass reads them in their own dtype.
`onepass.patch("torchtitan")` installs them.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.core.moe_options import MAX_EXPERTS, MAX_K
from onepass.integrations.patching import Target, original
from onepass.integrations.torch import replicated, sharded_over
from onepass.logits.source import Logits
from onepass.logits.vocab_parallel import VocabParallelLogits
from onepass.losses.cross_entropy import cross_entropy
from onepass.moe.router import route
from onepass.moe.scattered_linear import scattered_linear
from onepass.moe.token_sort import experts_of_rows, group_by_expert

SCORE_FUNCTIONS = "sigmoid", "softmax"
ROUTER = "torchtitan.models.common.moe", "TokenChoiceTopKRouter.forward"
CROSS_ENTROPY = "torchtitan.components.loss", "cross_entropy_loss"


def cross_entropy_loss(pred: Any, labels: Any, **options: Any) -> Tensor:
    """torchtitan's ``cross_entropy_loss``: the sum over all tokens, or before torchtitan 0.2.2 the mean.

    The original is called if the logits are a DTensor that is not sharded over the vocabulary alone, if the labels are
    a DTensor, while spmd_types checks types, and for arguments that no supported version has.
    """
    from torchtitan.components import loss as library

    if options.keys() - {"global_vocab_size"}:
        return original(*CROSS_ENTROPY)(pred, labels, **options)
    logits = source_of(library, pred, labels, options.get("global_vocab_size"))
    if logits is None:
        return original(*CROSS_ENTROPY)(pred, labels, **options)
    loss = cross_entropy(logits, labels, reduction="sum" if hasattr(library, "IGNORE_INDEX") else "mean")
    # From 0.3 on, the loss of a DTensor is a tensor.
    return loss if logits is not pred or type(pred) is Tensor or has_backends(library) else replicated(loss, pred)


def source_of(library: Any, pred: Any, labels: Any, global_vocab_size: int | None) -> Logits | None:
    """The logits that are passed to onepass; None if the original must be called."""
    if hasattr(labels, "device_mesh"):
        return None
    if hasattr(pred, "device_mesh"):
        return pred if sharded_over(pred, pred.dim() - 1) else None
    if not has_backends(library) or library.get_spmd_backend() != "spmd_types":
        return pred
    if library.spmd.is_type_checking():
        return None
    if library.spmd_mesh_size("tp") == 1:
        return pred
    return VocabParallelLogits(pred, library.current_spmd_mesh().get_group("tp"), global_vocab_size)


def has_backends(library: Any) -> bool:
    """Whether this torchtitan has several ways to shard tensors, as from 0.3 on."""
    return hasattr(library, "get_spmd_backend")


def choose_experts(self: Any, x_BLD: Tensor, expert_bias_E: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """`TokenChoiceTopKRouter.forward`: the weights and experts of each token, and the scores of all experts.

    The original is called for DTensors, while spmd_types checks types, for torchtitan's round robin, and for a router
    that `route` does not support.
    """
    from torchtitan.models.common import moe as library

    is_limited = self.num_expert_groups is None or self.num_limited_groups is not None
    known = self.score_func in SCORE_FUNCTIONS and self.top_k <= MAX_K and self.num_experts <= MAX_EXPERTS
    is_sharded = any(hasattr(t, "device_mesh") for t in (x_BLD, *self.gate.parameters()))
    if not (known and is_limited) or is_sharded or self._debug_force_load_balance or library.spmd.is_type_checking():
        return original(*ROUTER)(self, x_BLD, expert_bias_E)
    with torch.autocast(x_BLD.device.type, dtype=torch.float32):
        logits = self.gate(x_BLD)
    groups = {} if self.num_expert_groups is None else {
        "n_group": self.num_expert_groups, "topk_group": self.num_limited_groups
    }  # fmt: skip
    routing = route(
        logits, self.top_k, score=self.score_func, selection_bias=expert_bias_E, renormalize=self.route_norm,
        scale=self.route_scale, **groups,
    )  # fmt: skip
    scores = logits.sigmoid() if self.score_func == "sigmoid" else logits.softmax(-1)
    return routing.weights.to(scores.dtype), routing.experts, scores


def run_experts(w1: Tensor, w2: Tensor, w3: Tensor, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
    """torchtitan's ``_run_experts_grouped_mm``: rows that are grouped by expert, in bfloat16 as there.

    Experts need not have a multiple of some number of rows. Rows behind those of the last expert are 0.

    Args:
        w1, w2, w3: ``(E, I, H)``, ``(E, H, I)``, ``(E, I, H)``.
        x: ``(rows, H)``.
        num_tokens_per_expert: ``(E,)``, integers.
    """
    counts = num_tokens_per_expert.to(x.device, torch.int64)
    experts = experts_of_rows(counts, len(x))
    rows = x.bfloat16()
    groups = group_by_expert(experts, len(w1), rows, counts=counts)

    def linear(rows: Tensor, weight: Tensor) -> Tensor:
        return scattered_linear(rows, weight.bfloat16(), experts, groups, grouped_in=True, grouped_out=True)

    return linear(F.silu(linear(rows, w1)) * linear(rows, w3), w2).type_as(x)


SIGNATURES = "pred, labels", "pred, labels, global_vocab_size"
EXPERTS = "torchtitan.models.moe.moe", "_run_experts_grouped_mm"
TARGETS = [
    Target(*CROSS_ENTROPY, cross_entropy_loss, SIGNATURES, since="0.2", until="0.4"),
    Target(*ROUTER, choose_experts, ("self, x_BLD, expert_bias_E",), since="0.3", until="0.4"),
    Target(*EXPERTS, run_experts, ("w1, w2, w3, x, num_tokens_per_expert",), since="0.2", until="0.3"),
]
