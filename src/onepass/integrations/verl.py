"""Replacements for verl's log-probs and entropy of logits whose vocabulary is sharded, and of linear heads.

`onepass.patch("verl")` installs them.
"""

from typing import Any

from torch import Tensor

from onepass.integrations.megatron import losses, tensor_parallel_group
from onepass.integrations.patching import Target, original
from onepass.logits.linear import LinearLogits
from onepass.logits.vocab_parallel import VocabParallelLogits
from onepass.losses.log_probs import entropy_from_logits, selective_log_softmax_and_entropy

SHARDED = "verl.utils.megatron.tensor_parallel"
HEAD = "verl.utils.kernel.linear_cross_entropy", "linear_cross_entropy"


def vocab_parallel_entropy(vocab_parallel_logits: Tensor) -> Tensor:
    """The entropy of every token, in the dtype of the logits as verl returns it."""
    entropy = entropy_from_logits(VocabParallelLogits(vocab_parallel_logits, tensor_parallel_group()))
    return entropy.to(vocab_parallel_logits.dtype)


def vocab_parallel_log_probs_from_logits(logits: Tensor, labels: Tensor) -> Tensor:
    """The log-prob of every label, float32; 0 if the label is outside the vocabulary."""
    return -losses(logits, labels, tensor_parallel_group())


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float = 1.0, reduction: str = "none",
    dist_process_group: Any = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Log-probs and entropy of all tokens, ``(tokens,)`` each, from hidden states and the weight of this process.

    The log-prob of a label outside the vocabulary is 0: verl masks it afterwards. The gradient of the hidden states is
    that of the columns of this process alone, which verl's callers sum when they scatter it.
    """
    if reduction.lower() != "none":
        return original(*HEAD)(hidden, weight, labels, temperature, reduction, dist_process_group)
    logits = LinearLogits(hidden.reshape(-1, hidden.shape[-1]), weight, vocab_group=dist_process_group)
    logits.sums_hidden = False
    labels = labels.reshape(-1)
    outside = (labels < 0) | (labels >= logits.shape[-1])
    log_probs, entropy = selective_log_softmax_and_entropy(
        logits, labels.masked_fill(outside, 0), temperature=float(temperature)
    )
    return log_probs.masked_fill(outside, 0.0), entropy


TARGETS = [
    Target(SHARDED, "vocab_parallel_entropy", vocab_parallel_entropy, ("vocab_parallel_logits",), since="0.9"),
    Target(
        SHARDED, "vocab_parallel_log_probs_from_logits", vocab_parallel_log_probs_from_logits,
        ("logits, labels",), since="0.9",
    ),
    Target(*HEAD, linear_cross_entropy, ("args, kwargs",), since="0.9"),
]  # fmt: skip
