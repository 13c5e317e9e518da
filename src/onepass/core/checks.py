"""Argument checks, shared by all public functions.

An error names the argument, the value that was passed and the value that was expected. Numbers are returned as Python
floats and ints.
"""

import os
import reprlib
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any, Protocol

import torch

from onepass.core.dispatch import is_plain, refuse_forward_mode

INF = float("inf")
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INDEX_DTYPES = (torch.int32, torch.int64)
LARGEST, SMALLEST = torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny


class Short(reprlib.Repr):
    """Representations of values that fit into one line, also of containers of tensors."""

    def repr_Tensor(self, x: torch.Tensor, level: int) -> str:
        return f"{x.dtype} of shape {tuple(x.shape)} on {x.device}"

    repr_Parameter = repr_Tensor

    def repr_instance(self, x: Any, level: int) -> str:
        return " ".join(super().repr_instance(x, level).split())


_SHORT = Short()
_SHORT.maxstring = _SHORT.maxother = 100


def is_set(variable: str) -> bool:
    """Whether an environment variable is 1. Raise unless it is 1, 0, empty or not set."""
    value = os.environ.get(variable, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{variable}: expected 0 or 1, got {value!r}")
    return value == "1"


DEBUG = is_set("ONEPASS_DEBUG")


def is_debugging() -> bool:
    """Whether values are also checked on a GPU, for which the CPU waits (``ONEPASS_DEBUG=1``)."""
    return DEBUG


class LogitsLike(Protocol):
    """The attributes that the checks read. Tensors and all sources of logits have them."""

    @property
    def shape(self) -> torch.Size: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...
    def dim(self) -> int: ...


def short(value: Any) -> str:
    """Describe ``value`` in an error message, in at most one line."""
    try:
        return _SHORT.repr_Tensor(value, 0) if isinstance(value, torch.Tensor) else _SHORT.repr(value)
    except ValueError:  # an int with more digits than Python converts to a string
        return f"an int of {value.bit_length()} bits"


def described(value: Any) -> str:
    """`short`, followed by the type of the value unless it is a tensor."""
    return short(value) if isinstance(value, torch.Tensor) else f"{short(value)} ({type(value).__name__})"


def check_dense(tensor: Any, name: str) -> None:
    """Raise if ``tensor`` is sparse or nested."""
    if isinstance(tensor, torch.Tensor) and (tensor.layout is not torch.strided or tensor.is_nested):
        kind = "nested" if tensor.is_nested else str(tensor.layout)
        raise TypeError(f"{name}: expected a dense tensor, got a {kind} one")


def check_logits(logits: Any, name: str = "logits") -> None:
    """Raise unless ``logits`` is a floating-point tensor of shape ``(..., V)``."""
    check_dense(logits, name)
    if not isinstance(logits, torch.Tensor) or logits.dtype not in FLOATS:
        raise TypeError(f"{name}: expected a float16, bfloat16, float32 or float64 tensor, got {described(logits)}")
    if logits.dim() < 1 or not 0 < logits.shape[-1] < 2**31:
        raise ValueError(f"{name}: expected shape (..., V) with 1 <= V < 2**31, got {tuple(logits.shape)}")


def check_index_dtype(index: Any, name: str) -> None:
    """Raise unless ``index`` is an int32 or int64 tensor."""
    if not isinstance(index, torch.Tensor) or index.dtype not in INDEX_DTYPES:
        raise TypeError(f"{name}: expected an int32 or int64 tensor, got {described(index)}")


def check_index(index: torch.Tensor, logits: LogitsLike, name: str = "index", many: bool = True) -> None:
    """Raise unless ``index`` is an integer tensor of shape ``(...)`` or, with ``many``, ``(..., K)``.

    Its values are not read.
    """
    check_index_dtype(index, name)
    rows = logits.shape[:-1]
    if index.shape != rows and not (many and index.dim() == logits.dim() and index.shape[:-1] == rows):
        wanted = f"{tuple(rows)} or {(*rows, 'K')}" if many else f"{tuple(rows)}"
        raise ValueError(
            f"{name}: expected shape {wanted} for logits of shape {tuple(logits.shape)}, got {tuple(index.shape)}"
        )
    check_device(index, logits, name)


def check_constant(t: torch.Tensor, name: str) -> None:
    """Raise for a tensor that autograd would differentiate the result by, in either mode."""
    if t.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name}: expected a constant, got a tensor that requires a gradient; detach it")
    refuse_forward_mode(t)


def check_row_mask(row_mask: torch.Tensor, logits: LogitsLike, name: str = "row_mask") -> None:
    """Raise unless ``row_mask`` is a real tensor of shape ``(...)``, of 0 and 1."""
    check_mask(row_mask, logits.shape[:-1], logits, name)


def check_mask(mask: torch.Tensor, shape: Sequence[int], like: Any, name: str, of: str = "") -> None:
    """Raise unless ``mask`` is a real tensor of this shape on the device of ``like``.

    ``of`` is the name of ``like`` in the error, if the mask has its shape. Without it, ``like`` are the logits.
    The values are read on a CPU and in debug mode, where numbers other than 0 and 1 are an error: the -inf of an
    additive mask, weights of rows, or ids of packed sequences.
    """
    if not isinstance(mask, torch.Tensor) or mask.dtype.is_complex:
        raise TypeError(f"{name}: expected a bool (or 0/1) tensor, got {described(mask)}")
    if mask.shape != shape:
        whose = f", that of {of}" if of else ""
        raise ValueError(f"{name}: expected shape {tuple(shape)}{whose}, got {tuple(mask.shape)}")
    check_device(mask, like, name, of or "the logits")
    if (mask.is_cpu or is_debugging()) and mask.dtype != torch.bool and is_plain(mask):
        bad = mask.detach()[(mask != 0) & (mask != 1)]
        if bad.numel():
            raise ValueError(f"{name}: expected 1 for what to read and 0 for the rest, got {bad[0].item():g}")


def check_temperature(temperature: torch.Tensor, logits: LogitsLike, name: str = "temperature") -> None:
    """Raise unless ``temperature`` is a constant floating-point tensor of shape ``(...)``. Its values are not read."""
    if temperature.dtype not in FLOATS:
        raise TypeError(f"{name}: expected a number or a floating-point tensor, got {described(temperature)}")
    if temperature.shape != logits.shape[:-1]:
        raise ValueError(
            f"{name}: expected a number, or a tensor of shape {tuple(logits.shape[:-1])}, "
            f"got one of shape {tuple(temperature.shape)}"
        )
    check_constant(temperature, name)
    check_device(temperature, logits, name)


def check_class_weights(weights: torch.Tensor, logits: LogitsLike, name: str) -> None:
    """Raise unless ``weights`` is a constant floating-point tensor of shape ``(V,)``."""
    if not isinstance(weights, torch.Tensor) or weights.dtype not in FLOATS:
        raise TypeError(f"{name}: expected a floating-point tensor, got {described(weights)}")
    if weights.shape != logits.shape[-1:]:
        raise ValueError(f"{name}: expected shape ({logits.shape[-1]},), got {tuple(weights.shape)}")
    check_constant(weights, name)
    check_device(weights, logits, name)


def check_teacher(ids: torch.Tensor, log_probs: torch.Tensor, student_logits: LogitsLike) -> None:
    """Raise unless the teacher's ids and log-probs have shape ``(..., K)``, with the rows of the student's logits."""
    check_index_dtype(ids, "teacher_ids")
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
    check_constant(log_probs, "teacher_log_probs")


def check_teacher_mask(mask: torch.Tensor, ids: torch.Tensor) -> None:
    """Raise unless ``mask`` is a bool (or 0/1) tensor of the shape of the teacher's ids."""
    check_mask(mask, ids.shape, ids, "teacher_mask", "teacher_ids")


def check_pair(student: LogitsLike, teacher: LogitsLike, vocab_size: int | None) -> int | None:
    """Return how many leading columns of both are compared, or None if all of them are."""
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
    """Return temperature, soft-cap and logit scale as floats. Raise if float32 cannot represent the transform."""
    floats = softcap is None and type(temperature) is type(logit_scale) is float
    if floats and 1e-30 < temperature < 1e30 and -1e8 < logit_scale < 1e8:
        return temperature, None, logit_scale or 0.0  # nearly every call; the checks below take five times as long
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


def check_local(tensor: LogitsLike, name: str) -> None:
    """Raise if ``tensor`` is a DTensor."""
    if hasattr(tensor, "device_mesh"):
        raise TypeError(
            f"{name}: expected a tensor, got a DTensor of {tuple(tensor.shape)}; pass its full_tensor() or to_local()"
        )


def check_device(tensor: LogitsLike, like: LogitsLike, name: str, of: str = "the logits") -> None:
    """Raise unless ``tensor`` is dense, and on the device of ``like``, which the error calls ``of``."""
    check_dense(tensor, name)
    if not hasattr(like, "device_mesh"):
        check_local(tensor, name)
    if tensor.device != like.device:
        raise ValueError(f"{name}: expected device {like.device}, that of {of}, got {tensor.device}")


def check_number(value: Any, name: str, low: float, high: float = LARGEST, open_low: bool = True) -> float:
    """Return ``value`` as a float. Raise unless it is a number between ``low`` and ``high``.

    Ints, floats, NumPy scalars and zero-dimensional CPU tensors are accepted. ``open_low`` excludes ``low`` itself. For
    -0.0 it returns 0.0, which `memo` does not distinguish from it.
    """
    if type(value) is float and (low < value < high or (value == low and not open_low)):
        return value or 0.0
    number: Any = scalar(value, name, "a number")
    is_number = isinstance(number, Real) and not isinstance(number, bool)
    if not is_number:
        raise TypeError(f"{name}: expected a number, got {described(value)}")
    if not (low < number <= high if open_low else low <= number <= high):
        bounds = f"a number in [{low:g}, {high:g}]" if high < LARGEST else "a finite number"
        bounds += f" {'above' if open_low else 'of at least'} {low:g}" if high == LARGEST and low > -INF else ""
        raise ValueError(f"{name}: expected {bounds}, got {short(value)}")
    return float(number) or 0.0


Adapter = tuple[torch.Tensor, torch.Tensor, float]  # (A, B, scaling) of LoRA, whose product is scaling·B A


def adapter_of(value: Adapter | None, name: str) -> tuple[torch.Tensor | None, torch.Tensor | None, float]:
    """Return an adapter with its scaling as a float. Raise unless it has two tensors and a number, or is None."""
    if value is None:
        return None, None, 0.0
    tensors = isinstance(value, tuple | list) and len(value) == 3
    if not tensors or not all(isinstance(t, torch.Tensor) for t in value[:2]):
        raise TypeError(f"{name}: expected (A, B, scaling), two tensors and a number, got {described(value)}")
    return value[0], value[1], check_number(value[2], f"{name}[2]", -INF)


def check_integer(value: Any, name: str, low: int = -(2**63), high: int = 2**63 - 1) -> int:
    """Return ``value`` as an int. Raise unless it is an integer from ``low`` to ``high``.

    Ints, NumPy integers and zero-dimensional integer CPU tensors are accepted.
    """
    if type(value) is int and low <= value <= high:
        return value
    number: Any = scalar(value, name, "an int")
    is_integer = isinstance(number, Integral) and not isinstance(number, bool)
    if not is_integer:
        raise TypeError(f"{name}: expected an int, got {described(value)}")
    if not low <= number <= high:
        bounds = f"{low} or more" if high == 2**63 - 1 > number else f"{low} to {high}"
        raise ValueError(f"{name}: expected {bounds}, got {short(value)}")
    return int(number)


def check_bool(value: Any, name: str) -> bool:
    """Return ``value`` as a bool. Raise unless it is a bool, also of NumPy or symbolic, or 0 or 1."""
    if isinstance(value, (bool, torch.SymBool)):  # Dynamo takes the second for the first, but not for True or False
        return bool(value)
    if not (isinstance(value, Integral) or type(value).__name__ in ("bool_", "bool")) or value not in (0, 1):
        raise TypeError(f"{name}: expected a bool, got {described(value)}")
    return bool(value)


def scalar(value: Any, name: str, wanted: str) -> Any:
    """Return the item of a zero-dimensional CPU tensor, and any value that is not a tensor unchanged."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.dim() or value.device.type != "cpu" or value.requires_grad:
        why = ", which requires a gradient" if value.requires_grad else ""
        raise TypeError(f"{name}: expected {wanted}, got {described(value)}{why}")
    refuse_forward_mode(value)
    return value.item()


def check_path(value: Any) -> Any:
    """Return ``value``. Raise unless it is a str or an `os.PathLike`."""
    if not isinstance(value, str | os.PathLike):
        raise TypeError(f"path: expected a str or os.PathLike, got {described(value)}")
    return value


def check_choice(value: Any, name: str, choices: Sequence[str]) -> None:
    """Raise unless ``value`` is one of the ``choices``."""
    if not isinstance(value, str) or value not in choices:
        kind = ValueError if isinstance(value, str) else TypeError
        raise kind(f"{name}: expected one of {', '.join(map(repr, choices))}, got {short(value)}")
