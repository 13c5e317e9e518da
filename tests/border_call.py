"""A valid call of a public function, whose arguments have each a name and a value: a `Case`.

What is in a parameter has a name of its own, as errors have it: ``routing.weights``, ``lora_down[0]``,
``row_inputs[1]``, ``teacher.hidden``. So every tensor and every number that reaches a function is a *leaf*, which a
test can replace by another of the same value, or by a bad one.
"""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy
import torch
from torch import Tensor, nn

import onepass
from onepass import RatioReport
from onepass.moe import Groups, Routing

INF, NAN = float("inf"), float("nan")
signature = cache(inspect.signature)
N, V, H, K, E, I, R = 3, 27, 16, 2, 3, 8, 2  # noqa: E741


@dataclass(frozen=True)
class Number:
    """A number of which tests try every type: one with a fraction, an integral one, and what is out of range."""

    value: float
    whole: int
    bad: tuple[Any, ...] = (INF,)


@dataclass(frozen=True)
class Integer:
    """An int, which may also be one of numpy or of a tensor without dimensions."""

    value: int
    bad: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Derived:
    """Leaves that are computed of others on the path that is tested."""

    of: Callable[[dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """A valid call.

    Attributes:
        function: its public name, those of mixtures of experts with ``moe.`` before it.
        arguments: the leaves and their values, on a CPU.
        grad: leaves of which a gradient is taken.
        note: tells cases of one function apart.
        fixed: leaves that other leaves follow from, so that only views of the same values can stand for them.
        refused: leaves whose last dimension must be contiguous, and what then begins the error.
    """

    function: str
    arguments: dict[str, Any]
    grad: tuple[str, ...] = ()
    note: str = ""
    fixed: frozenset[str] = frozenset()
    refused: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.function + (f", {self.note}" if self.note else "")

    @property
    def is_module(self) -> bool:
        return inspect.isclass(resolve(self.function)) and issubclass(resolve(self.function), nn.Module)

    def leaves(self, kind: type | tuple[type, ...]) -> list[str]:
        return [name for name, value in self.arguments.items() if isinstance(value, kind)]

    def values(self, device: Any = "cpu", **changes: Any) -> dict[str, Any]:
        """Fresh leaves, of which those in ``grad`` require a gradient. ``changes`` are taken as they are."""
        found: dict[str, Any] = {}
        for name, value in self.arguments.items():
            if isinstance(value, Derived):
                found |= value.of(found)
            elif isinstance(value, Tensor):
                found[name] = value.clone().to(device).requires_grad_(name in self.grad)
            else:
                found[name] = value.value if isinstance(value, (Number, Integer)) else value
        assert set(changes) <= set(found)
        return found | changes

    def call(self, values: dict[str, Any]) -> Any:
        arguments = assembled(values)
        function = resolve(self.function)
        if self.is_module:
            known = signature(function).parameters
            torch.manual_seed(0)
            module = function(**{n: v for n, v in arguments.items() if n in known})
            for parameter in module.parameters():
                parameter.data.normal_()
            device = next((v.device for v in values.values() if isinstance(v, Tensor)), "cpu")
            return module.to(device)(**{n: v for n, v in arguments.items() if n not in known})
        positional = []
        kinds = signature(function).parameters
        if any(p.kind is p.VAR_POSITIONAL for p in kinds.values()):
            for name, parameter in kinds.items():
                if parameter.kind is parameter.VAR_POSITIONAL:
                    positional += arguments.pop(name, [])
                    break
                positional.append(arguments.pop(name))
        result = function(*positional, **arguments)
        return onepass.entropy_from_logits(result) if function is onepass.LinearLogits else result

    def results(self, values: dict[str, Any]) -> dict[str, Tensor]:
        """All results and the gradients of `grad`, for one upstream gradient of each result."""
        outputs = flattened(self.call(values))
        return {n: t.detach() for n, t in outputs.items()} | self.gradients(outputs, values)

    def gradients(self, outputs: dict[str, Tensor], values: dict[str, Any]) -> dict[str, Tensor]:
        if not self.grad:
            return {}
        given = [t for t in outputs.values() if t.requires_grad]
        upstream = [torch.linspace(0.5, 1.5, t.numel()).view(t.shape).to(t) for t in given]
        found = torch.autograd.grad(given, [values[n] for n in self.grad], upstream, allow_unused=True)
        return {f"gradient of {n}": g for n, g in zip(self.grad, found) if g is not None}


def resolve(name: str) -> Any:
    module, _, last = name.rpartition(".")
    return getattr(onepass.moe if module else onepass, last)


def public_names() -> list[str]:
    return [*onepass.__all__, *(f"moe.{name}" for name in onepass.moe.__all__)]


def parameters(name: str) -> dict[str, inspect.Parameter]:
    """All that a public function takes; of a module what its forward takes too."""
    function = resolve(name)
    signatures = [signature(function)]
    if inspect.isclass(function) and issubclass(function, nn.Module):
        signatures.append(signature(function.forward))
    found: dict[str, inspect.Parameter] = {}
    for parameter in [p for s in signatures for p in s.parameters.values() if p.name != "self"]:
        assert parameter.kind is not parameter.VAR_KEYWORD, f"{name}: **{parameter.name} hides what may be given"
        found[parameter.name] = parameter
    return found


def root(leaf: str) -> str:
    return re.split(r"[.\[]", leaf)[0]


class MixtralSparseMoeBlock(nn.Module):
    """A block of a family that `route_block` knows by its name."""

    def __init__(self, weight: Any) -> None:
        super().__init__()
        self.gate, self.top_k = nn.Linear(H, E, bias=False), K
        del self.gate.weight
        self.gate.weight = weight


def _routing(**given: Any) -> Routing:
    return Routing(**(dict.fromkeys(("weights", "experts", "counts")) | given))


CONTAINERS = {
    "routing": _routing,
    "groups": Groups,
    "block": lambda weight: MixtralSparseMoeBlock(weight),
    **dict.fromkeys(("logits", "student_logits", "teacher_logits"), onepass.LinearLogits),
}


def assembled(values: dict[str, Any]) -> dict[str, Any]:
    """The arguments of which these are the leaves."""
    found: dict[str, Any] = {}
    parts: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        if name == root(name):
            found[name] = value
        elif name.endswith("]"):
            found.setdefault(root(name), []).append(value)
        else:
            parts.setdefault(root(name), {})[name.partition(".")[2]] = value
    return found | {name: CONTAINERS[name](**given) for name, given in parts.items()}


def flattened(result: Any) -> dict[str, Tensor]:
    if isinstance(result, Tensor):
        return {"result": result}
    named = vars(result) if isinstance(result, (onepass.SoftmaxStatistics, RatioReport)) else None
    if named is None:
        named = result._asdict() if hasattr(result, "_asdict") else {f"result {n}": t for n, t in enumerate(result)}
    return {name: t for name, t in named.items() if t is not None}


def forms(value: float) -> dict[str, Any]:
    """The same number in every type that one may come in."""
    found: dict[str, Any] = {"float": float(value)}
    found |= {"numpy.float32": numpy.float32(value), "numpy.float64": numpy.float64(value)}
    found |= {"tensor": torch.tensor(float(value)), "float64 tensor": torch.tensor(value, dtype=torch.float64)}
    if value == int(value):
        found |= {"int": int(value), "numpy.int64": numpy.int64(value), "int64 tensor": torch.tensor(int(value))}
    return found


def integer_forms(value: int) -> dict[str, Any]:
    return {
        "int": value, "numpy.int64": numpy.int64(value), "numpy.int32": numpy.int32(value),
        "int64 tensor": torch.tensor(value), "int32 tensor": torch.tensor(value, dtype=torch.int32),
    }  # fmt: skip
