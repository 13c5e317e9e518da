"""A router's method, and a twin of the router on which it is tried: the same class with other tensors."""

import inspect
from collections.abc import Callable, Iterator
from functools import cache
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from onepass.moe.family import Parts, RouterDescription, called, unwrapped
from onepass.moe.followers import ATTRIBUTE

PLAIN = (bool, int, float, str, type(None))
LISTS = (list, tuple, dict, set)
OF_MODULES = frozenset(vars(nn.Module()))  # what every module has, `training` among it
TOKENS = 160  # that are tried
OF_LOGITS = 64  # experts that are tried for a method whose input are logits


@cache
def methods_of(cls: Any) -> tuple[str, ...]:
    """The names of methods that may route: `forward`, or methods that it calls, if they call ``topk``."""
    cls = next((c for c in cls.__mro__ if "forward" in vars(c)), cls)  # FSDP2 and parametrizations make subclasses
    own = {n: f for n in vars(cls) if isinstance(f := method(cls, n), FunctionType)}
    topk = [n for n, f in own.items() if "topk" in inspect.unwrap(f).__code__.co_names]
    names = ["forward"] if "forward" in topk else ["forward", *topk] if topk else []
    return tuple(n for n in names if 2 <= len(inspect.signature(own[n]).parameters) <= 3)


def method(cls: type, name: str) -> Any:
    """A method of a class, and not its replacement by `onepass.patch`."""
    found = next((vars(c)[name] for c in cls.__mro__ if name in vars(c)), None)
    return getattr(found, "of_library", found)


def settings(module: nn.Module, name: str) -> Any:
    """What a description depends on: code, settings and shapes, and, of a `forward`, those of the children."""
    config = getattr(vars(module).get("config"), "__dict__", {})
    deep = (children_of(module), tuple((n, t.shape) for n, t in tensors_of(module))) if name == "forward" else ()
    return method(type(module), name), held_by(module), plain(config), *deep


def plain(held: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple((n, v) for n, v in held.items() if type(v) in PLAIN and n not in OF_MODULES)


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module, without methods that have been replaced on it, as by `follow`."""
    beside = ("forward", ATTRIBUTE)
    return {n: v for n, v in vars(module).items()
            if n not in beside and not (isinstance(v, MethodType) and hasattr(type(module), n))}  # fmt: skip


def held_by(module: nn.Module) -> tuple[tuple[str, Any], ...]:
    """The attributes of a module as something that can be hashed; of other objects, their class."""
    return tuple(
        (n, v if isinstance(v, (*PLAIN, FunctionType, torch.dtype)) else repr(v) if type(v) in LISTS else type(v))
        for n, v in attributes_of(module).items() if n not in OF_MODULES
    )  # fmt: skip


def children_of(module: nn.Module) -> tuple[Any, ...]:
    children = [(n, unwrapped(child)[0]) for n, child in module._modules.items() if child is not None]
    return tuple((n, type(c), held_by(c), children_of(c)) for n, c in children if n != "parametrizations")


def tensors_of(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers, under their names without adapters and parametrizations."""
    for held in (module._parameters, module._buffers):
        yield from ((prefix + n, t) for n, t in held.items() if t is not None)
    for name, child in module._modules.items():
        if name == "parametrizations" and child is not None:
            yield from ((prefix + n, p.original) for n, p in child.named_children())  # type: ignore[misc]
        elif child is not None:
            yield from tensors_of(unwrapped(child)[0], f"{prefix}{name}.")


def twin_of(module: nn.Module, values: dict[str, Tensor], training: bool = False, prefix: str = "") -> nn.Module:
    """An object of the same class with other tensors, and without hooks, adapters and parametrizations."""
    twin: nn.Module = object.__new__(next(c for c in type(module).__mro__ if "forward" in vars(c)))
    twin.__dict__ |= attributes_of(module) | vars(nn.Module())
    twin.__dict__["training"] = training
    for held, own in ((module._parameters, twin._parameters), (module._buffers, twin._buffers)):
        own.update({n: values.get(prefix + n) for n in held})  # type: ignore[misc]
    for name, child in module._modules.items():
        if name == "parametrizations" and child is not None:
            twin._parameters.update({n: values.get(prefix + n) for n, _ in child.named_children()})  # type: ignore
        elif child is not None:
            twin._modules[name] = twin_of(unwrapped(child)[0], values, training, f"{prefix}{name}.")
    return twin


class Probe(NamedTuple):
    """A method of a module, and what it is given."""

    module: nn.Module
    method: Callable[..., Any]
    name: str
    gate: str | None
    names: tuple[str, ...]  # of the method's parameters
    values: dict[str, Tensor]  # the twin's tensors
    inputs: tuple[Tensor, ...]

    def run(self, dim: int = 2, training: bool = False) -> tuple[Tensor, ...] | None:
        """What the method returns, for tokens in an input of ``dim`` dimensions; None if it does not take them."""
        given = [x.view(2, TOKENS // 2, -1) if dim == 3 and x.dim() == 2 else x for x in self.inputs]
        try:
            results = self.method(twin_of(self.module, self.values, training), *(x.clone() for x in given))
        except Exception:  # of the library's code, which need not take every form and dtype of input
            return None
        results = results if isinstance(results, tuple) else (results,)
        tensors = all(isinstance(r, Tensor) and r.dim() > 1 and r.numel() == TOKENS * r.shape[-1] for r in results)
        return results if tensors else None

    def ours(self, d: RouterDescription, dim: int = 2) -> tuple[Tensor, ...]:
        """What `route` makes of it."""
        given = [x.view(2, TOKENS // 2, -1) if dim == 3 and x.dim() == 2 else x for x in self.inputs]
        results = called(self.parts(), d, *given)
        return results if isinstance(results, tuple) else (results,)

    def parts(self) -> Parts:
        twin = twin_of(self.module, self.values)
        return Parts(twin, [], twin)

    def cast(self, hidden: torch.dtype, weights: torch.dtype) -> "Probe":
        inputs = (self.inputs[0].to(hidden), *self.inputs[1:]) if self.gate else (
            *(x.to(hidden) for x in self.inputs[:-1]), self.inputs[-1].to(weights))  # fmt: skip
        return self._replace(values={n: v.to(weights) for n, v in self.values.items()}, inputs=inputs)

    def paired(self) -> "Probe":
        """Each expert twice, one after the other."""

        def twice(x: Tensor) -> Tensor:
            return x[: (len(x) + 1) // 2].repeat_interleave(2, 0)[: len(x)]

        E = self.experts
        values = {n: twice(v.flatten() if v.numel() == E else v).view_as(v) if v.numel() == E or n == self.gate else v
                  for n, v in self.values.items()}  # fmt: skip
        inputs = tuple(twice(x) if x.shape == (E,) else x for x in self.inputs)
        if self.gate is None:
            inputs = (*inputs[:-1], twice(inputs[-1].T).T)
        return self._replace(values=values, inputs=inputs)

    @property
    def experts(self) -> int:
        return len(self.values[self.gate]) if self.gate else OF_LOGITS
