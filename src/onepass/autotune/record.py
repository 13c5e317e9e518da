"""`AutotuneRecord`: the configuration that Triton's autotuner selected for one key of one kernel, as plain data."""

import json
import math
import re
import reprlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton

# Strings that may be values of a key ("silu", "bf16"), which excludes paths.
WORD = re.compile(r"[A-Za-z0-9_.+-]{0,64}\Z")
DTYPES = {str(d): d for d in vars(torch).values() if isinstance(d, torch.dtype)}  # "torch.bfloat16": torch.bfloat16
# Upper bounds of the contents of a record.
MOST_LETTERS = 256  # in a name
MOST_ENTRIES = 4096  # in a list or dictionary
MOST_LEVELS = 8  # of nested lists
MOST_BITS = 64  # in an integer
MOST_MILLISECONDS = 1e9


class NotPlain(ValueError):
    """A value that a record cannot hold: an object, or a string that could be a path."""


def encode(value: Any) -> Any:
    """A value of a key or a configuration as JSON; dtypes become ``{"dtype": name}``."""
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, tuple | list):
        value = [encode(v) for v in value]
    if isinstance(value, dict) or not is_encoded(value):
        raise NotPlain(f"a value of type {type(value).__name__}")
    return value


def decode(value: Any) -> Any:
    """The inverse of `encode`, for a value that `is_encoded`."""
    if isinstance(value, dict):
        return DTYPES[f"torch.{value['dtype']}"]
    return tuple(decode(v) for v in value) if isinstance(value, list) else value


def is_encoded(value: Any, levels: int = MOST_LEVELS) -> bool:
    """Whether `encode` can return this value."""
    if isinstance(value, dict):
        name = value.get("dtype")
        return len(value) == 1 and isinstance(name, str) and is_dtype(f"torch.{name}")
    if isinstance(value, list):
        return levels > 0 and is_list(value, lambda v: is_encoded(v, levels - 1))
    if isinstance(value, str):
        return WORD.match(value) is not None
    if isinstance(value, int):  # or bool
        return value.bit_length() <= MOST_BITS
    return value is None or (isinstance(value, float) and math.isfinite(value))


def is_name(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= MOST_LETTERS and value.isprintable()


def is_dtype(name: Any) -> bool:
    """Whether it is the name of a dtype of this version of torch, such as "torch.bfloat16"."""
    return isinstance(name, str) and name in DTYPES


def is_time(value: Any) -> bool:
    """Whether it is a duration in milliseconds: a positive number of plausible size."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= MOST_MILLISECONDS


def is_list(value: Any, check: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and len(value) <= MOST_ENTRIES and all(map(check, value))


def are_arguments(value: Any) -> bool:
    """Whether it is a key or a configuration: a dictionary of values that are `is_encoded`."""
    if not isinstance(value, dict) or len(value) > MOST_ENTRIES:
        return False
    return all(is_name(name) and is_encoded(v) for name, v in value.items())


def is_candidate(value: Any) -> bool:
    if not isinstance(value, dict) or value.keys() != {"config", "milliseconds"}:
        return False
    return are_arguments(value["config"]) and (value["milliseconds"] is None or is_time(value["milliseconds"]))


class Check(NamedTuple):
    """Whether a field of a record may have a value, and which values those are, for the error."""

    holds: Callable[[Any], bool]
    expected: str


ARGUMENTS = Check(are_arguments, "a dict of numbers, words, dtypes, None and lists of these, by name")
NAME = Check(is_name, f"a printable str of at most {MOST_LETTERS} characters")
CHECKS = {  # of the fields that are no names
    "key": ARGUMENTS,
    "dtypes": Check(lambda value: is_list(value, is_dtype), 'a list of names of dtypes, such as "torch.bfloat16"'),
    "config": ARGUMENTS,
    "milliseconds": Check(lambda value: value is None or is_time(value), f"a time up to {MOST_MILLISECONDS:g} or None"),
    "candidates": Check(
        lambda value: is_list(value, is_candidate), 'a list of {"config": a dict, "milliseconds": a time or None}'
    ),
    "shared_memory": Check(
        lambda value: type(value) is int and 0 <= value < 2**MOST_BITS, f"an int >= 0 of at most {MOST_BITS} bits"
    ),
}


@dataclass(frozen=True)
class AutotuneRecord:
    """A selected configuration, its candidates, and the machine. Contains no path and no user, host or model name.

    Attributes:
        kernel: the function's name.
        module: the module that defines it, if it belongs to an installed package; else "local".
        source_hash: `onepass.autotune.sources.identity_of` the kernel: the sha256 of its source and of the functions
            that it calls; for kernels of onepass its version, such as ``"version 1"``.
        key: the arguments in the ``key`` of `triton.autotune`, by name.
        dtypes: the dtypes of all tensor arguments in order, which Triton adds to the key.
        config: the selected meta-parameters, ``num_warps``, ``num_stages`` and ``num_ctas``.
        milliseconds: the time of the selected configuration; None if Triton did not store it.
        candidates: ``{"config": …, "milliseconds": …}`` for all configurations that were timed, the fastest first;
            milliseconds are None for one that cannot run. Empty if Triton did not store them.
        gpu: the name of the GPU.
        compute_capability: such as ``"9.0"``, or ``"gfx942"`` on AMD.
        shared_memory: bytes per block.
        torch, triton: versions.

    Raises:
        ValueError: a field does not have the form above, or exceeds the bounds of this module.
    """

    kernel: str
    module: str
    source_hash: str
    key: dict[str, Any]
    dtypes: list[str]
    config: dict[str, Any]
    milliseconds: float | None
    candidates: list[dict[str, Any]] = field(default_factory=list)
    gpu: str = ""
    compute_capability: str = ""
    shared_memory: int = 0
    torch: str = ""
    triton: str = ""

    def __post_init__(self) -> None:
        for f in fields(self):
            check, value = CHECKS.get(f.name, NAME), getattr(self, f.name)
            if not check.holds(value):
                raise ValueError(f"{f.name}: expected {check.expected}, got {reprlib.repr(value)}")

    @property
    def identity(self) -> tuple[str, ...]:
        """What no two records of a store share: kernel, source, architecture, version of Triton, key, dtypes, GPU."""
        return (*self.place, self.label, self.gpu)

    @property
    def place(self) -> tuple[str, ...]:
        return self.kernel, self.source_hash, self.compute_capability, minor(self.triton)

    @property
    def label(self) -> str:
        return label_of(self.key, self.dtypes)

    @property
    def margin(self) -> float | None:
        """How much slower the second-best candidate is, as a fraction; None if this is not known."""
        others = [c["milliseconds"] for c in self.candidates if c["config"] != self.config and c["milliseconds"]]
        return min(others) / self.milliseconds - 1 if others and self.milliseconds else None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> "AutotuneRecord":
        """
        Raises:
            ValueError: ``data`` is not a result of `to_json`.
        """
        names = {f.name for f in fields(cls)}
        if not isinstance(data, dict) or set(data) != names:
            got = ", ".join(sorted(map(str, data))) if isinstance(data, dict) else type(data).__name__
            raise ValueError(f"data: expected a dict with {', '.join(sorted(names))}, got {got}")
        return cls(**data)


def label_of(key: dict[str, Any], dtypes: Sequence[str]) -> str:
    return json.dumps([key, list(dtypes)])


def minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


@lru_cache
def device(index: int | None) -> dict[str, Any]:
    """The fields of a record that describe the machine; ``index`` None is the CPU (Triton's interpreter)."""
    versions = {"torch": torch.__version__, "triton": triton.__version__}
    if index is None:
        return {"gpu": "cpu", "compute_capability": "cpu", "shared_memory": 0} | versions
    about = torch.cuda.get_device_properties(index)
    capability = f"{about.major}.{about.minor}"
    if torch.version.hip is not None:
        capability = about.gcnArchName.split(":")[0]
    names = "shared_memory_per_block_optin", "shared_memory_per_block"
    shared = next((getattr(about, name) for name in names if hasattr(about, name)), 0)
    return {"gpu": about.name, "compute_capability": capability, "shared_memory": shared} | versions


def here() -> dict[str, Any]:
    """`device` of the current device."""
    return device(torch.cuda.current_device() if torch.cuda.is_available() else None)
