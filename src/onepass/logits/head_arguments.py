"""Checks of the tensors of a linear head. DTensors are replaced by full tensors."""

from typing import Any

from torch import Tensor

from onepass.core.checks import FLOATS, Adapter, adapter_of, check_dense, check_device, described
from onepass.core.dispatch import is_autocast_enabled
from onepass.logits.partitioned import whole


def checked_head(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, group: Any
) -> tuple[Tensor, Tensor | None, tuple[int, ...]]:
    """Weight and bias, of which a DTensor is gathered unless ``group`` shards it, and the shape of the weight."""
    for value, name in ((hidden, "hidden"), (weight, "weight"), (bias, "bias")):
        if (value is not None or name != "bias") and (not isinstance(value, Tensor) or value.dtype not in FLOATS):
            raise TypeError(f"{name}: expected a floating-point tensor, got {described(value)}")
        if value is not None:
            check_dense(value, name)
    weight, bias = whole(weight, group), None if bias is None else whole(bias, group, "bias")
    shape = tuple(getattr(weight, "ds_shape", weight.shape))  # parameters of ZeRO-3 are empty unless gathered
    none = shape[:1] == (0,) and group is None  # else all processes raise, once they know of each other's columns
    if hidden.dim() < 1 or len(shape) != 2 or none or 0 in shape[1:] or hidden.shape[-1] != shape[1]:
        raise ValueError(
            "weight: expected shape (V, H) for hidden states (..., H), "
            f"got {shape} for hidden states of shape {tuple(hidden.shape)}"
        )
    if bias is not None and tuple(getattr(bias, "ds_shape", bias.shape)) != shape[:1]:
        raise ValueError(f"bias: expected shape {shape[:1]}, got {tuple(bias.shape)}")
    for value, name in ((weight, "weight"), (bias, "bias")):
        if value is None:
            continue
        check_device(value, hidden, name, "hidden")
        if value.dtype != hidden.dtype and not is_autocast_enabled(hidden):
            raise TypeError(f"{name}: expected {hidden.dtype}, the dtype of hidden, got {value.dtype}")
    return weight, bias, shape


def checked_adapter(
    lora: Adapter | None, hidden: Tensor, shape: tuple[int, ...], group: Any
) -> tuple[Tensor, Tensor, float] | None:
    """The argument ``lora`` of a head with a weight of this shape, with full tensors in place of DTensors."""
    A, B, scaling = adapter_of(lora, "lora")
    if A is None or B is None:
        return None
    A, B = whole(A, None, "lora[0]"), whole(B, group, "lora[1]")
    of_a = tuple(getattr(A, "ds_shape", A.shape))
    # Of two that do not fit together, A is taken to have the rank if its other size fits.
    rank = of_a[0] if of_a[1:] == shape[1:] else "R"
    for n, (value, expected) in enumerate(((A, (rank, shape[1])), (B, (shape[0], rank)))):
        if value.dtype not in FLOATS:
            raise TypeError(f"lora[{n}]: expected a floating-point tensor, got {described(value)}")
        if tuple(getattr(value, "ds_shape", value.shape)) != expected or 0 in (
            *expected[1:],
            1 if n and group is not None else expected[0],
        ):
            of_rank = ", with a rank of at least 1," if rank == 0 else ""
            raise ValueError(
                f"lora[{n}]: expected shape {expected}{of_rank} for a weight of shape {shape}, got {tuple(value.shape)}"
            )
        check_device(value, hidden, f"lora[{n}]", "hidden")
    return A, B, scaling
