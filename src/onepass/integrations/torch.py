"""The replacement for torch's cross-entropy of a DTensor whose vocabulary is sharded, as under `loss_parallel`.

`onepass.patch("torch")` installs it.
"""

from typing import Any

import torch
from torch import Tensor

from onepass.integrations.patching import Target, original
from onepass.losses import cross_entropy as losses

CROSS_ENTROPY = "torch.nn.functional", "cross_entropy"


def cross_entropy(
    input: Any, target: Any, weight: Tensor | None = None, size_average: bool | None = None, ignore_index: int = -100,
    reduce: bool | None = None, reduction: str = "mean", label_smoothing: float = 0.0,
) -> Tensor:  # fmt: skip
    """`torch.nn.functional.cross_entropy`: by onepass for a DTensor with a sharded vocabulary, else the original."""
    if not is_sharded(input) or size_average is not None or reduce is not None or target.is_floating_point():
        found: Tensor = original(*CROSS_ENTROPY)(
            input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing
        )
        return found
    from torch.distributed.tensor import DTensor, Replicate

    target, weight = (t.full_tensor() if isinstance(t, DTensor) else t for t in (target, weight))
    loss = losses.cross_entropy(
        input, target, class_weights=weight, ignore_index=ignore_index, label_smoothing=label_smoothing,
        reduction=reduction,  # type: ignore[arg-type]
    )  # fmt: skip
    replicated = [Replicate()] * input.device_mesh.ndim
    result: Tensor = DTensor.from_local(loss.to(input.dtype), input.device_mesh, replicated, run_check=False)
    return result


def is_sharded(logits: Any) -> bool:
    """Whether the logits are a DTensor ``(rows, V)`` that is sharded over V alone, outside of a compiled function."""
    if not hasattr(logits, "placements") or logits.dim() != 2 or torch.compiler.is_compiling():
        return False
    sharded = [p for p in logits.placements if not p.is_replicate()]
    return len(sharded) == 1 and sharded[0].is_shard(1)


PARAMETERS = "input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing"
TARGETS = [Target(*CROSS_ENTROPY, cross_entropy, (PARAMETERS,), since="2.9")]
