"""Argument checks: one error that names the argument, what came and what was expected."""

from collections.abc import Sequence
from typing import Any

import torch

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} of shape {tuple(value.shape)} on {value.device}"
    return f"{value!r} ({type(value).__name__})"


def check_logits(logits: torch.Tensor, name: str = "logits") -> None:
    if not isinstance(logits, torch.Tensor) or logits.dtype not in FLOATS:
        raise TypeError(f"{name}: expected a float16, bfloat16, float32 or float64 tensor, got {described(logits)}")
    if logits.dim() < 1 or not 0 < logits.shape[-1] < 2**31:
        raise ValueError(f"{name}: expected shape (..., V) with 1 <= V < 2**31, got {tuple(logits.shape)}")


def check_index(index: torch.Tensor, logits: torch.Tensor, name: str = "index", many: bool = True) -> None:
    if not isinstance(index, torch.Tensor) or index.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name}: expected an int32 or int64 tensor, got {described(index)}")
    rows = logits.shape[:-1]
    if index.shape != rows and not (many and index.dim() == logits.dim() and index.shape[:-1] == rows):
        wanted = f"{tuple(rows)} or {(*rows, 'K')}" if many else f"{tuple(rows)}"
        raise ValueError(
            f"{name}: expected shape {wanted} for logits of shape {tuple(logits.shape)}, got {tuple(index.shape)}"
        )
    check_device(index, logits, name)


def check_row_mask(row_mask: torch.Tensor, logits: torch.Tensor, name: str = "row_mask") -> None:
    if not isinstance(row_mask, torch.Tensor) or row_mask.dtype.is_floating_point or row_mask.dtype.is_complex:
        raise TypeError(f"{name}: expected a bool (or 0/1 integer) tensor, got {described(row_mask)}")
    if row_mask.shape != logits.shape[:-1]:
        raise ValueError(f"{name}: expected shape {tuple(logits.shape[:-1])}, got {tuple(row_mask.shape)}")
    check_device(row_mask, logits, name)


def check_class_weights(weights: torch.Tensor, logits: torch.Tensor, name: str) -> None:
    if not isinstance(weights, torch.Tensor) or weights.dtype not in FLOATS:
        raise TypeError(f"{name}: expected a floating-point tensor, got {described(weights)}")
    if weights.shape != logits.shape[-1:]:
        raise ValueError(f"{name}: expected shape ({logits.shape[-1]},), got {tuple(weights.shape)}")
    check_device(weights, logits, name)


def check_device(tensor: torch.Tensor, logits: torch.Tensor, name: str) -> None:
    if tensor.device != logits.device:
        raise ValueError(f"{name}: expected device {logits.device}, that of the logits, got {tensor.device}")


def check_number(value: Any, name: str, low: float, high: float = float("inf"), open_low: bool = True) -> None:
    if type(value) is float and low < value < min(high, float("inf")):
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}: expected a number, got {described(value)}")
    if not (low < value < float("inf") if open_low else low <= value <= high):
        bounds = f"a finite number above {low:g}" if open_low else f"a number in [{low:g}, {high:g}]"
        raise ValueError(f"{name}: expected {bounds}, got {value!r}")


def check_choice(value: Any, name: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(map(repr, choices))}, got {value!r}")
