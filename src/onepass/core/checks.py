"""Argument checks: one error that names the argument, what came and what was expected; numbers in their own type."""

import reprlib
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any, Protocol

import torch

INF = float("inf")
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LARGEST, SMALLEST = torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 100


class Logits(Protocol):
    """What checks look at: a tensor has it, and so has every source of logits."""

    @property
    def shape(self) -> torch.Size: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...
    def dim(self) -> int: ...


def short(value: Any) -> str:
    """What ``value`` is in an error: at most a line, however long it is."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} of shape {tuple(value.shape)} on {value.device}"
    try:
        return _SHORT.repr(value)
    except ValueError:  # an int of more digits than Python prints
        return f"an int of {value.bit_length()} bits"


def described(value: Any) -> str:
    return short(value) if isinstance(value, torch.Tensor) else f"{short(value)} ({type(value).__name__})"


def check_logits(logits: Any, name: str = "logits") -> None:
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
    if not isinstance(row_mask, torch.Tensor) or row_mask.dtype.is_complex:
        raise TypeError(f"{name}: expected a bool (or 0/1) tensor, got {described(row_mask)}")
    if row_mask.shape != logits.shape[:-1]:
        raise ValueError(f"{name}: expected shape {tuple(logits.shape[:-1])}, got {tuple(row_mask.shape)}")
    check_device(row_mask, logits, name)


def check_class_weights(weights: torch.Tensor, logits: Logits, name: str) -> None:
    if not isinstance(weights, torch.Tensor) or weights.dtype not in FLOATS:
        raise TypeError(f"{name}: expected a floating-point tensor, got {described(weights)}")
    if weights.shape != logits.shape[-1:]:
        raise ValueError(f"{name}: expected shape ({logits.shape[-1]},), got {tuple(weights.shape)}")
    if weights.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name}: expected constants, got a tensor that requires a gradient; detach it")
    check_device(weights, logits, name)


def check_teacher(ids: torch.Tensor, log_probs: torch.Tensor, student_logits: Logits) -> None:
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


def check_teacher_mask(mask: torch.Tensor, ids: torch.Tensor) -> None:
    if not isinstance(mask, torch.Tensor) or mask.dtype.is_complex:
        raise TypeError(f"teacher_mask: expected a bool (or 0/1) tensor, got {described(mask)}")
    if mask.shape != ids.shape:
        raise ValueError(
            f"teacher_mask: expected {tuple(ids.shape)}, the shape of teacher_ids, got {tuple(mask.shape)}"
        )
    check_device(mask, ids, "teacher_mask")


def check_pair(student: Logits, teacher: Logits, vocab_size: int | None) -> int | None:
    """The number of columns of both that are compared, None for all of them."""
    if student.shape[:-1] != teacher.shape[:-1]:
        raise ValueError(f"teacher_logits: expected the rows of the student, {tuple(student.shape[:-1])}, "
                         f"got {tuple(teacher.shape[:-1])}")  # fmt: skip
    check_device(teacher, student, "teacher_logits")
    columns = student.shape[-1], teacher.shape[-1]
    if vocab_size is None and columns[0] != columns[1]:
        raise ValueError(f"teacher_logits: expected {columns[0]} columns, those of the student, got {columns[1]}; "
                         "vocab_size says how many columns of both are compared")  # fmt: skip
    size = columns[0] if vocab_size is None else check_integer(vocab_size, "vocab_size", 1, min(columns))
    return None if size == columns[0] == columns[1] else size


def check_transform(
    temperature: Any, softcap: Any, logit_scale: Any = 1.0, prefix: str = ""
) -> tuple[float, float | None, float]:
    """Temperature, soft-cap and logit scale as floats, of a transform that float32 can hold."""
    floats = softcap is None and type(temperature) is type(logit_scale) is float
    if floats and 1e-30 < temperature < 1e30 and -1e8 < logit_scale < 1e8:
        return temperature, None, logit_scale  # nearly every call; what follows costs five times as much
    temperature = check_number(temperature, f"{prefix}temperature", 0)
    softcap = None if softcap is None else check_number(softcap, f"{prefix}softcap", 0)
    logit_scale = check_number(logit_scale, f"{prefix}logit_scale", -INF)
    for name, divisor in (("temperature", temperature), ("softcap", softcap)):
        if divisor is not None and not SMALLEST <= max(1.0, abs(logit_scale)) / divisor <= LARGEST:
            raise ValueError(
                f"{prefix}{name}: expected a finite number above 0 by which float32 can divide a logit, "
                f"got {divisor:g} with a logit_scale of {logit_scale:g}"
            )
    return temperature, softcap, logit_scale


def check_device(tensor: Logits, logits: Logits, name: str) -> None:
    if tensor.device != logits.device:
        raise ValueError(f"{name}: expected device {logits.device}, that of the logits, got {tensor.device}")


def check_number(value: Any, name: str, low: float, high: float = LARGEST, open_low: bool = True) -> float:
    """The number as a float, from an int, a float, a scalar of numpy or a tensor of no dimension on the CPU."""
    if type(value) is float and low < value < high:
        return value
    number: Any = scalar(value, name, "a number")
    is_number = isinstance(number, Real) and not isinstance(number, bool)
    if not is_number:
        raise TypeError(f"{name}: expected a number, got {described(value)}")
    if not (low < number <= high if open_low else low <= number <= high):
        bounds = f"a number in [{low:g}, {high:g}]" if high < LARGEST else "a finite number"
        bounds += f" {'above' if open_low else 'of at least'} {low:g}" if high == LARGEST and low > -INF else ""
        raise ValueError(f"{name}: expected {bounds}, got {short(value)}")
    return float(number)


def check_integer(value: Any, name: str, low: int = -(2**63), high: int = 2**63 - 1) -> int:
    """The number as an int, from an int, an integer of numpy or an integer tensor of no dimension on the CPU."""
    number: Any = value if type(value) is int else scalar(value, name, "an int")
    is_integer = isinstance(number, Integral) and not isinstance(number, bool)
    if not is_integer:
        raise TypeError(f"{name}: expected an int, got {described(value)}")
    if not low <= number <= high:
        bounds = f"{low} or more" if high == 2**63 - 1 > number else f"{low} to {high}"
        raise ValueError(f"{name}: expected {bounds}, got {short(value)}")
    return int(number)


def scalar(value: Any, name: str, wanted: str) -> Any:
    """What is in a tensor of no dimension; anything else as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.dim() or value.device.type != "cpu" or value.requires_grad:
        why = ", which requires a gradient" if value.requires_grad else ""
        raise TypeError(f"{name}: expected {wanted}, got {described(value)}{why}")
    return value.item()


def check_choice(value: Any, name: str, choices: Sequence[str]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(map(repr, choices))}, got {short(value)}")
