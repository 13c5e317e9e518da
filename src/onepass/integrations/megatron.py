"""Replacements for Megatron-core's cross-entropy of logits whose vocabulary is sharded.

`onepass.patch("megatron")` installs them.
"""

from typing import Any

from torch import Tensor

from onepass.integrations.patching import Target, original
from onepass.logits.vocab_parallel import VocabParallelLogits
from onepass.losses.cross_entropy import cross_entropy

PLAIN = "megatron.core.tensor_parallel.cross_entropy", "vocab_parallel_cross_entropy"
FUSED = "megatron.core.fusions.fused_cross_entropy", "fused_vocab_parallel_cross_entropy"


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor, target: Tensor, label_smoothing: float = 0.0, tp_group: Any = None
) -> Tensor:
    """The cross-entropy of every token. The original is called with label smoothing, which it takes over each shard."""
    if label_smoothing:
        given = () if tp_group is None else (tp_group,)
        smoothed: Tensor = original(*PLAIN)(vocab_parallel_logits, target, label_smoothing, *given)
        return smoothed
    return losses(vocab_parallel_logits, target, tensor_parallel_group() if tp_group is None else tp_group)


def fused_vocab_parallel_cross_entropy(vocab_parallel_logits: Tensor, target: Tensor, tp_group: Any) -> Tensor:
    """The cross-entropy of every token."""
    return losses(vocab_parallel_logits, target, tp_group)


def tensor_parallel_group() -> Any:
    """The group over which Megatron shards the vocabulary."""
    from megatron.core.parallel_state import get_tensor_model_parallel_group

    return get_tensor_model_parallel_group()


def losses(local_logits: Tensor, target: Tensor, group: Any) -> Tensor:
    """The cross-entropy of every token, float32 and of the shape of ``target``.

    It is 0, with gradient 0, if the target is outside the vocabulary: Megatron masks such losses afterwards.
    """
    logits = VocabParallelLogits(local_logits, group)
    inside = (target >= 0) & (target < logits.shape[-1])
    return cross_entropy(logits, target, row_mask=inside, reduction="none")


TARGETS = [
    Target(
        *PLAIN, vocab_parallel_cross_entropy,
        ("vocab_parallel_logits, target, label_smoothing", "vocab_parallel_logits, target, label_smoothing, tp_group"),
        since="0.16",
    ),
    Target(*FUSED, fused_vocab_parallel_cross_entropy, ("vocab_parallel_logits, target, tp_group",), since="0.16"),
]  # fmt: skip
