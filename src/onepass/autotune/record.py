"""`AutotuneRecord`: what Triton's autotuner chose for one key of one kernel, as plain data."""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from typing import Any

import torch
import triton

# Strings that may be a key's value ("silu", "bf16"): none that could be a path.
WORD = re.compile(r"[A-Za-z0-9_.+-]{0,64}\Z")


class NotPlain(ValueError):
    """A value that a record does not hold: an object, or a string that could be a path."""


def encode(value: Any) -> Any:
    """A key's or a configuration's value as JSON has it; dtypes are ``{"dtype": name}``."""
    if value is None or isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if isinstance(value, str) and WORD.match(value):
        return value
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, tuple | list):
        return [encode(v) for v in value]
    raise NotPlain(f"a value of type {type(value).__name__}")


def decode(value: Any) -> Any:
    if isinstance(value, dict):
        return getattr(torch, value["dtype"])
    return tuple(decode(v) for v in value) if isinstance(value, list) else value


@dataclass(frozen=True)
class AutotuneRecord:
    """What was chosen, where, and from what. Holds no path, no user, host or model name.

    Attributes:
        kernel: the function's name.
        module: where it is defined, if that is an installed package; else "local".
        source_hash: sha256 of the kernel and the functions that it calls.
        key: the arguments that `triton.autotune` was told to tune by, by name.
        dtypes: of all tensor arguments in their order, which Triton adds to the key.
        config: meta-parameters, ``num_warps``, ``num_stages``, ``num_ctas``.
        milliseconds: of the chosen configuration; None where Triton did not keep it.
        candidates: ``{"config": …, "milliseconds": …}`` of all that were tried, the fastest first; None milliseconds
            for one that cannot run. Empty where Triton did not keep them.
        gpu, compute_capability, shared_memory: name, ``"9.0"`` (``"gfx942"``), bytes a block may have.
        torch, triton: versions.
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

    @property
    def identity(self) -> tuple[str, ...]:
        """What makes it the answer to a question: kernel, its source, architecture, Triton's minor version, key."""
        return (*self.place, self.label)

    @property
    def place(self) -> tuple[str, ...]:
        return self.kernel, self.source_hash, self.compute_capability, minor(self.triton)

    @property
    def label(self) -> str:
        return label_of(self.key, self.dtypes)

    @property
    def margin(self) -> float | None:
        """How much slower the runner-up was, as a fraction; None where it is not known."""
        others = [c["milliseconds"] for c in self.candidates if c["config"] != self.config and c["milliseconds"]]
        return min(others) / self.milliseconds - 1 if others and self.milliseconds else None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> "AutotuneRecord":
        """
        Raises:
            ValueError: it is not what `to_json` wrote.
        """
        names = {f.name for f in fields(cls)}
        if not isinstance(data, dict) or set(data) != names:
            raise ValueError(f"expected a record with {', '.join(sorted(names))}")
        kinds: dict[str, Any] = {
            "key": dict, "dtypes": list, "config": dict, "candidates": list, "shared_memory": int,
            "milliseconds": int | float | None,
        }  # fmt: skip
        for name, value in data.items():
            if not isinstance(value, kinds.get(name, str)):
                raise ValueError(f"{name}: expected {kinds.get(name, str)}, got {value!r}")
        return cls(**data)


def label_of(key: dict[str, Any], dtypes: Sequence[str]) -> str:
    return json.dumps([key, list(dtypes)])


def minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


@lru_cache
def device(index: int | None) -> dict[str, Any]:
    """Fields of a record about where it was made; None for a CPU, which has the interpreter alone."""
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
    """`device` of the current one."""
    return device(torch.cuda.current_device() if torch.cuda.is_available() else None)
