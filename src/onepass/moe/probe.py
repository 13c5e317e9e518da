"""A router's method, and a twin of the router on which it is run: an object of the same class with other tensors."""

import ctypes
import inspect
from collections.abc import Callable, Iterator
from functools import cache
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from onepass.core.dispatch import constant_in_trace
from onepass.moe.family import Parts, RouterDescription, call_router, unwrapped
from onepass.moe.followers import ATTRIBUTE

PLAIN = (bool, int, float, str, type(None))
KEYS = frozenset((*PLAIN, FunctionType, torch.dtype, type))
OF_MODULES = frozenset(vars(nn.Module()))  # what every module has, `training` among it
TOKENS = 160  # that are tried
OF_LOGITS = 64  # experts that are tried for a method whose input are logits
DEPTH = 4  # of objects within objects that a key has


@cache
def class_of(cls: Any) -> Any:
    """The class of a module as it was written: FSDP2 and parametrizations make subclasses of it."""
    own = [c for c in cls.__mro__ if issubclass(c, nn.Module) and not c.__module__.startswith("torch.")]
    return own[0] if own else next((c for c in cls.__mro__ if "forward" in vars(c)), cls)


@cache
def written(cls: Any) -> dict[str, Any]:
    """The attributes of a class and of its bases, but those of every module."""
    bases = [c for c in class_of(cls).__mro__ if c not in nn.Module.__mro__ and not c.__module__.startswith("torch.")]
    return {n: method(cls, n) for n in dict.fromkeys(n for c in bases for n in vars(c))}


@cache
def methods_of(cls: Any) -> tuple[str, ...]:
    """The names of methods that may route: `forward`, or methods that it calls, if they call ``topk``."""
    own = {n: f for n, f in written(cls).items() if isinstance(f, FunctionType)}
    topk = [n for n, f in own.items() if "topk" in getattr(inspect.unwrap(f), "__code__", f.__code__).co_names]
    names = ["forward"] if "forward" in topk else ["forward", *topk] if topk else []
    return tuple(n for n in names if n in own and 2 <= len(inspect.signature(own[n]).parameters) <= 3)


@cache
def names_in_code(cls: Any) -> frozenset[str]:
    """The names of attributes that the methods of a class use."""
    functions = [inspect.unwrap(f) for f in written(cls).values() if callable(f)]
    codes = [f.__code__ for f in functions if isinstance(f, FunctionType)]
    for code in codes:  # which grows by the functions inside
        codes += [c for c in code.co_consts if isinstance(c, CodeType)]
    return frozenset(n for code in codes for n in code.co_names)


@cache
def reached(cls: Any, function: Any) -> tuple[tuple[FunctionType, ...], tuple[str, ...]]:
    """A method's function, those of the class that it may call, and the names that the code of all of these uses.

    There are none of a callable that is not a function of Python.
    """
    functions, names = [function] if isinstance(function, FunctionType) else [], dict[str, None]()
    for f in functions:  # which grows
        codes = [f.__code__]
        for code in codes:  # which grows by the functions inside
            codes += [c for c in code.co_consts if isinstance(c, CodeType)]
        new = [n for code in codes for n in code.co_names if n not in names]
        names |= dict.fromkeys(new)
        bases = [vars(c) for c in cls.__mro__ if c not in nn.Module.__mro__]
        found = [held[n] for n in (*new, f.__name__) for held in bases if n in held]
        found = [getattr(x, "fget", None) or getattr(x, "__func__", x) for x in found]
        found = [inspect.unwrap(x) for x in found if callable(x)]
        functions += [x for x in found if isinstance(x, FunctionType) and x not in functions]
    return tuple(functions), tuple(names)


def method(cls: type, name: str) -> Any:
    """A method of a class, and not its replacement by `onepass.patch`."""
    found = next((vars(c)[name] for c in cls.__mro__ if name in vars(c)), None)
    return getattr(found, "of_library", found)


def settings(module: nn.Module, name: str) -> Any:
    """What a description depends on: code, settings and shapes, and, of a `forward`, those of the children."""
    deep = (children_of(module), tuple((n, t.shape) for n, t in tensors_of(module))) if name == "forward" else ()
    return method(type(module), name), held_by(module), *deep


def plain(held: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple((n, v) for n, v in held.items() if type(v) in PLAIN and n not in OF_MODULES)


def closed_over(function: Any) -> list[Any]:
    """The values of the variables that a function has from those around it. Empty for other callables."""
    return [cell.cell_contents for cell in getattr(function, "__closure__", None) or () if cell != CellType()]


def module_of(number: int) -> nn.Module:
    """The module with this ``id``, which exists: torch is tracing a call of it."""
    return ctypes.cast(number, ctypes.py_object).value


def guard_settings(module: nn.Module) -> None:
    """Have torch, which traces this, compile again if a plain setting of the module has changed since."""
    for name, value in settings_of_object(id(module)):
        if getattr(module, name) != value:  # a comparison holds for numbers that torch takes for variables, too
            raise AssertionError(f"{name} changed while it was read")


def settings_of_object(number: int) -> tuple[tuple[str, Any], ...]:
    """The plain settings of `module_of` the number."""
    return tuple([(n, v) for n, v in plain(vars(module_of(number))) if v == v])


constant_in_trace(settings_of_object)


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module, without methods that have been replaced on it, as by `follow`."""
    beside = ("forward", ATTRIBUTE)
    return {n: v for n, v in vars(module).items()
            if n not in beside and not (isinstance(v, MethodType) and hasattr(type(module), n))}  # fmt: skip


def held_by(module: nn.Module) -> tuple[Any, ...]:
    """The class of a module and its attributes, as something that can be hashed."""
    cls: Any = class_of(type(module))  # type: ignore[arg-type]
    named = names_in_code(cls)
    own = [(n, key_of(v) if n in named or type(v) in KEYS else type(v))
           for n, v in attributes_of(module).items() if n not in OF_MODULES]  # fmt: skip
    return cls, tuple([key_of(getattr(cls, n)) for n in constants_of(cls)]), tuple(own)


@cache
def constants_of(cls: Any) -> tuple[str, ...]:
    """The names of a class's attributes that its methods use and that are not methods."""
    return tuple(n for n, v in written(cls).items() if n in names_in_code(cls) and not hasattr(v, "__get__"))


class Same:
    """A key that equals itself alone: that of an object which cannot be read, or a tensor."""

    def __init__(self, of: Any) -> None:
        self.of = of

    def __hash__(self) -> int:
        return id(self.of)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.of is self.of


def key_of(x: Any, depth: int = DEPTH) -> Any:
    """A value as something that can be hashed, and that changes where the value or what it holds does."""
    kind = type(x)
    if kind in KEYS:
        return x
    if depth == 0 or isinstance(x, nn.Module):
        return kind
    if isinstance(x, Tensor):
        return Same(x), None if x.is_inference() else x._version
    if isinstance(x, (list, tuple)):
        return kind, *[v if type(v) in KEYS else key_of(v, depth - 1) for v in x]
    if isinstance(x, (set, frozenset)):
        return kind, frozenset([key_of(v, depth - 1) for v in x])
    held = x if isinstance(x, dict) else getattr(x, "__dict__", None)
    if held is None:
        return Same(x)
    return kind, *[(n, v if type(v) in KEYS else key_of(v, depth - 1)) for n, v in held.items()]


def children_of(module: nn.Module) -> tuple[Any, ...]:
    children = [(n, unwrapped(child)[0]) for n, child in module._modules.items() if child is not None]
    return tuple((n, held_by(c), children_of(c)) for n, c in children if n != "parametrizations")


def tensors_of(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers, under their names without adapters and parametrizations."""
    for held in (module._parameters, module._buffers):
        yield from ((prefix + n, t) for n, t in held.items() if t is not None)
    for name, child in module._modules.items():
        if name == "parametrizations" and child is not None:
            # One that is made of several tensors, as by a weight normalization, is computed.
            for n, p in child.named_children():
                yield prefix + n, p.original if hasattr(p, "original") else getattr(module, n)  # type: ignore[misc]
        elif child is not None:
            yield from tensors_of(unwrapped(child)[0], f"{prefix}{name}.")


def twin_of(module: nn.Module, values: dict[str, Tensor], training: bool = False, prefix: str = "") -> nn.Module:
    """An object of the same class with other tensors, and without hooks, adapters and parametrizations."""
    twin: nn.Module = object.__new__(class_of(type(module)))  # type: ignore[arg-type]
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
        results = call_router(self.parts(), d, *given)
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
