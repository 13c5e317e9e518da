"""Argument checks: one error that names the argument, what came and what was expected."""

from collections.abc import Sequence
from typing import Any

import torch

from onepass.source import Logits, LogitsSource

INF = float("inf")
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} of shape {tuple(value.shape)} on {value.device}"
    return f"{value!r} ({type(value).__name__})"


def check_logits(logits: Logits, name: str = "logits") -> None:
    if isinstance(logits, LogitsSource):
        return  # which checks itself
    if not isinstance(logits, torch.Tensor) or logits.dtype not in FLOATS:
        raise TypeError(f"{name}: expected a float16, bfloat16, float32 or float64 tensor, got {described(logits)}")
    if logits.dim() < 1 or not 0 < logits.shape[-1] < 2**31:
        raise ValueError(f"{name}: expected shape (..., V) with 1 <= V < 2**31, got {tuple(logits.shape)}")


def check_index(index: torch.Tensor, logits: Logits, name: str = "index", many: bool = True) -> None:
    if not isinstance(index, torch.Tensor) or index.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name}: expected an int32 or int64 tensor, got {described(index)}")
    rows = logits.shape[:-1]
    if index.shape != rows and not (many and index.dim() == logits.dim() and index.shape[:-1] == rows):
        wanted = f"{tuple(rows)} or {(*rows, 'K')}" if many else f"{tuple(rows)}"
        raise ValueError(
            f"{name}: expected shape {wanted} for logits of shape {tuple(logits.shape)}, got {tuple(index.shape)}"
        )
    check_device(index, logits, name)


def check_row_mask(row_mask: torch.Tensor, logits: Logits, name: str = "row_mask") -> None:
    if not isinstance(row_mask, torch.Tensor) or row_mask.dtype.is_floating_point or row_mask.dtype.is_complex:
        raise TypeError(f"{name}: expected a bool (or 0/1 integer) tensor, got {described(row_mask)}")
    if row_mask.shape != logits.shape[:-1]:
        raise ValueError(f"{name}: expected shape {tuple(logits.shape[:-1])}, got {tuple(row_mask.shape)}")
    check_device(row_mask, logits, name)


def check_class_weights(weights: torch.Tensor, logits: Logits, name: str) -> None:
    if not isinstance(weights, torch.Tensor) or weights.dtype not in FLOATS:
        raise TypeError(f"{name}: expected a floating-point tensor, got {described(weights)}")
    if weights.shape != logits.shape[-1:]:
        raise ValueError(f"{name}: expected shape ({logits.shape[-1]},), got {tuple(weights.shape)}")
    check_device(weights, logits, name)


def check_teacher(
    ids: torch.Tensor, log_probs: torch.Tensor, mask: torch.Tensor | None, student_logits: Logits
) -> None:
    if not isinstance(ids, torch.Tensor) or ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"teacher_ids: expected an int32 or int64 tensor, got {described(ids)}")
    if not isinstance(log_probs, torch.Tensor) or log_probs.dtype not in FLOATS:
        raise TypeError(f"teacher_log_probs: expected a floating-point tensor, got {described(log_probs)}")
    rows = student_logits.shape[:-1]
    if ids.dim() != student_logits.dim() or ids.shape[:-1] != rows:
        hint = ""
        if ids.dim() == student_logits.dim() > 1 and ids.shape[-2] != rows[-1]:
            hint = f": the teacher has {ids.shape[-2]} positions, the student {rows[-1]}; slice or mask one of them"
        raise ValueError(f"teacher_ids: expected shape {(*rows, 'K')}, got {tuple(ids.shape)}{hint}")
    if log_probs.shape != ids.shape:
        raise ValueError(f"teacher_log_probs: expected {tuple(ids.shape)}, the shape of teacher_ids, "
                         f"got {tuple(log_probs.shape)}")  # fmt: skip
    check_device(ids, student_logits, "teacher_ids")
    check_device(log_probs, student_logits, "teacher_log_probs")
    if mask is not None:
        if not isinstance(mask, torch.Tensor) or mask.dtype.is_complex:
            raise TypeError(f"mask: expected a bool (or 0/1) tensor, got {described(mask)}")
        if mask.shape not in (ids.shape, rows):
            raise ValueError(f"mask: expected shape {tuple(ids.shape)} or {tuple(rows)}, got {tuple(mask.shape)}")
        check_device(mask, student_logits, "mask")


def check_pair(student: Logits, teacher: Logits, vocab_size: int | None) -> None:
    if student.shape[:-1] != teacher.shape[:-1]:
        raise ValueError(f"teacher_logits: expected the rows of the student, {tuple(student.shape[:-1])}, "
                         f"got {tuple(teacher.shape[:-1])}")  # fmt: skip
    check_device(teacher, student, "teacher_logits")
    if vocab_size is None:
        if student.shape[-1] != teacher.shape[-1]:
            raise ValueError(f"vocab_size: expected a number of columns for {student.shape[-1]} of the student and "
                             f"{teacher.shape[-1]} of the teacher, got None")  # fmt: skip
    elif isinstance(vocab_size, bool) or not isinstance(vocab_size, int):
        raise TypeError(f"vocab_size: expected an int, got {described(vocab_size)}")
    elif not 0 < vocab_size <= min(student.shape[-1], teacher.shape[-1]):
        raise ValueError(f"vocab_size: expected 1 to {min(student.shape[-1], teacher.shape[-1])}, got {vocab_size}")


def check_transform(temperature: Any, softcap: Any, logit_scale: Any = 1.0, prefix: str = "") -> None:
    if softcap is None and type(temperature) is type(logit_scale) is float and 0 < temperature < INF > abs(logit_scale):
        return  # nearly every call; what follows costs five times as much
    check_number(temperature, f"{prefix}temperature", 0)
    check_number(logit_scale, f"{prefix}logit_scale", -float("inf"))
    if softcap is not None:
        check_number(softcap, f"{prefix}softcap", 0)


def check_device(tensor: Logits, logits: Logits, name: str) -> None:
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
