"""The replacement for torch's cross-entropy of a DTensor whose vocabulary is sharded, as under `loss_parallel`.

`onepass.patch("torch")` installs it.
"""

from typing import Any

from torch import Tensor

from onepass.core.dispatch import is_plain
from onepass.integrations.patching import Target, original
from onepass.logits.partitioned import in_order
from onepass.losses import cross_entropy as losses

CROSS_ENTROPY = "torch.nn.functional", "cross_entropy"


def cross_entropy(
    input: Any, target: Any, weight: Tensor | None = None, size_average: bool | None = None, ignore_index: int = -100,
    reduce: bool | None = None, reduction: str = "mean", label_smoothing: float = 0.0,
) -> Tensor:  # fmt: skip
    """`torch.nn.functional.cross_entropy`: by onepass for a DTensor with a sharded vocabulary, else the original."""
    # In a compiled function, torch also calls this with fake tensors.
    taken = sharded_over(input, 1) and input.dim() == 2 and is_plain() and is_plain(input.to_local())
    taken = taken and isinstance(target, Tensor) and not target.is_floating_point()
    taken = taken and all(in_order(input.device_mesh, n) for n in range(input.device_mesh.ndim))
    if not taken or size_average is not None or reduce is not None:
        return original(*CROSS_ENTROPY)(
            input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing
        )
    from torch.distributed.tensor import DTensor

    target, weight = (t.full_tensor() if isinstance(t, DTensor) else t for t in (target, weight))
    loss = losses.cross_entropy(
        input, target, class_weights=weight, ignore_index=ignore_index, label_smoothing=label_smoothing,
        reduction=reduction,  # type: ignore[arg-type]
    )  # fmt: skip
    return replicated(loss.to(input.dtype), input)


def replicated(loss: Tensor, logits: Any) -> Tensor:
    """A loss that is the same on all processes, as a DTensor on the mesh of the logits."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh = logits.device_mesh
    return DTensor.from_local(loss, mesh, [Replicate()] * mesh.ndim, run_check=False)


def sharded_over(logits: Any, dim: int) -> bool:
    """Whether the logits are a DTensor that is sharded over this dimension alone."""
    if not hasattr(logits, "device_mesh"):
        return False
    sharded = [p for p in logits.placements if not p.is_replicate()]
    return len(sharded) == 1 and sharded[0].is_shard(dim)


PARAMETERS = "input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing"
TARGETS = [Target(*CROSS_ENTROPY, cross_entropy, (PARAMETERS,), since="2.9")]
