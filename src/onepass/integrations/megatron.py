"""Replacements for Megatron-core's cross-entropy of a sharded vocabulary, its selection of experts and its experts.

`onepass.patch("megatron")` installs them.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.core.moe_options import MAX_EXPERTS, MAX_K, SCORES
from onepass.integrations.patching import Target, original
from onepass.logits.vocab_parallel import VocabParallelLogits
from onepass.losses.cross_entropy import cross_entropy
from onepass.moe.experts import expert_mlp
from onepass.moe.router import Routing, route
from onepass.moe.token_sort import experts_of_rows, group_by_expert

PLAIN = "megatron.core.tensor_parallel.cross_entropy", "vocab_parallel_cross_entropy"
ROUTER = "megatron.core.transformer.moe.moe_utils", "topk_routing_with_score_function"
EXPERTS = "megatron.core.transformer.moe.experts", "GroupedMLP.forward"
ACTIVATIONS = {F.silu: "silu", F.gelu: "gelu"}
FUSED = "megatron.core.fusions.fused_cross_entropy", "fused_vocab_parallel_cross_entropy"


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor, target: Tensor, label_smoothing: float = 0.0, tp_group: Any = None
) -> Tensor:
    """The cross-entropy of every token. The original is called with label smoothing, which it takes over each shard."""
    if label_smoothing:
        given = () if tp_group is None else (tp_group,)
        return original(*PLAIN)(vocab_parallel_logits, target, label_smoothing, *given)
    return losses(vocab_parallel_logits, target, tensor_parallel_group() if tp_group is None else tp_group)


def fused_vocab_parallel_cross_entropy(vocab_parallel_logits: Tensor, target: Tensor, tp_group: Any) -> Tensor:
    """The cross-entropy of every token."""
    return losses(vocab_parallel_logits, target, tp_group)


def tensor_parallel_group() -> Any:
    """The group over which Megatron shards the vocabulary."""
    from megatron.core.parallel_state import get_tensor_model_parallel_group

    return get_tensor_model_parallel_group()


def losses(local_logits: Tensor, target: Tensor, group: Any) -> Tensor:
    """The cross-entropy of every token, of the shape of ``target``; float32, or float64 for float64 logits.

    It is 0, with gradient 0, if the target is outside the vocabulary: Megatron masks such losses afterwards.
    """
    logits = VocabParallelLogits(local_logits, group)
    inside = (target >= 0) & (target < logits.shape[-1])
    return cross_entropy(logits, target, row_mask=inside, reduction="none")


def topk_routing_with_score_function(
    logits: Tensor,
    topk: int,
    use_pre_softmax: bool = False,
    num_groups: int | None = None,
    group_topk: int | None = None,
    scaling_factor: float | None = None,
    score_function: str = "softmax",
    expert_bias: Tensor | None = None,
    fused: bool = False,
    router_replay: Any = None,
) -> tuple[Tensor, Tensor]:
    """The choice of `TopKRouter`: the weights ``(T, E)``, 0 for experts that are not selected, and which are.

    The original is called with Transformer Engine's router (``fused``), with Megatron's own replay, and with groups
    whose score is a sum of more than two experts, or of none.
    """
    best = topk // group_topk if group_topk else 1  # experts whose scores are a group's
    known = score_function in SCORES and topk <= MAX_K and logits.shape[-1] <= MAX_EXPERTS and 1 <= best <= 2
    if fused or router_replay is not None or not known:
        options = (use_pre_softmax, num_groups, group_topk, scaling_factor, score_function, expert_bias, fused)
        return original(*ROUTER)(logits, topk, *options, router_replay)
    softmax = score_function == "softmax"
    routing = route(
        logits, topk, score=score_function, selection_bias=None if softmax else expert_bias,  # type: ignore[arg-type]
        n_group=num_groups if group_topk and num_groups else 1, topk_group=group_topk or 1,
        group_score="top2_sum" if best == 2 else "max", renormalize=not softmax and topk > 1,
        scale=scaling_factor or 1.0, eps=1e-20, score_after_topk=softmax and not use_pre_softmax,
    )  # fmt: skip
    probs = torch.zeros_like(logits).scatter(1, routing.experts, routing.weights.to(logits.dtype))
    return probs, torch.zeros_like(logits, dtype=torch.bool).scatter(1, routing.experts, True)


def run_experts(
    self: Any, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
) -> tuple[Tensor, None]:
    """`GroupedMLP.forward`: rows that are grouped by expert, ``(rows, H)``, each with a weight, ``(rows,)``.

    The original is called for experts without a gate, for weights that are applied to the input, and where Megatron
    computes the activations again in the backward. `SequentialMLP` is not replaced: each expert has parameters of its
    own, which a grouped GEMM would have to copy.
    """
    rows, probs, config = permuted_local_hidden_states, permuted_probs, self.config
    activation = ACTIVATIONS.get(config.activation_func) if config.gated_linear_unit else None
    if activation is None or config.moe_apply_probs_on_input or self.activation_recompute:
        return original(*EXPERTS)(self, rows, tokens_per_expert, probs)
    count = self.num_local_experts
    counts = tokens_per_expert.to(rows.device, torch.int64)
    experts = experts_of_rows(counts, len(rows))
    out = expert_mlp(
        rows, Routing(probs.view(-1, 1), experts, counts), self.weight1.view(count, config.hidden_size, -1),
        self.weight2.view(count, -1, config.hidden_size), activation=activation,  # type: ignore[arg-type]
        transposed=True, groups=group_by_expert(experts, count, rows, counts=counts),
    )  # fmt: skip
    return out, None


SIGNATURE = (
    "logits, topk, use_pre_softmax, num_groups, group_topk, scaling_factor, score_function, expert_bias, fused, "
    "router_replay"
)
TARGETS = [
    Target(
        *PLAIN, vocab_parallel_cross_entropy,
        ("vocab_parallel_logits, target, label_smoothing", "vocab_parallel_logits, target, label_smoothing, tp_group"),
        since="0.16",
    ),
    Target(*FUSED, fused_vocab_parallel_cross_entropy, ("vocab_parallel_logits, target, tp_group",), since="0.16"),
    Target(*ROUTER, topk_routing_with_score_function, (SIGNATURE,), since="0.16", until="0.17"),
    Target(
        *EXPERTS, run_experts, ("self, permuted_local_hidden_states, tokens_per_expert, permuted_probs",),
        since="0.16", until="0.17",
    ),
]  # fmt: skip
