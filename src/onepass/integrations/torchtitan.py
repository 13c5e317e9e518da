"""The replacement for torchtitan's cross-entropy, of tensors and of logits whose vocabulary is sharded.

torchtitan converts the logits to float32 before its loss; onepass reads them in their own dtype.
`onepass.patch("torchtitan")` installs it.
"""

from typing import Any

from torch import Tensor

from onepass.integrations.patching import Target, original
from onepass.integrations.torch import replicated, sharded_over
from onepass.logits.source import Logits
from onepass.logits.vocab_parallel import VocabParallelLogits
from onepass.losses.cross_entropy import cross_entropy

CROSS_ENTROPY = "torchtitan.components.loss", "cross_entropy_loss"


def cross_entropy_loss(pred: Any, labels: Any, **options: Any) -> Tensor:
    """torchtitan's ``cross_entropy_loss``: the sum over all tokens, or before torchtitan 0.2.2 the mean.

    The original is called if the logits are a DTensor that is not sharded over the vocabulary alone, if the labels are
    a DTensor, and while spmd_types checks types.
    """
    from torchtitan.components import loss as library

    logits = source_of(library, pred, labels, options.get("global_vocab_size"))
    if logits is None:
        found: Tensor = original(*CROSS_ENTROPY)(pred, labels, **options)
        return found
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


SIGNATURES = "pred, labels", "pred, labels, global_vocab_size"
TARGETS = [Target(*CROSS_ENTROPY, cross_entropy_loss, SIGNATURES, since="0.2", until="0.4")]
