"""The routers of transformers' models, which are found by what they compute; see `onepass.moe.recognition`."""

import sys
from collections.abc import Callable, Iterable
from functools import cache, wraps
from typing import Any

from torch import Tensor, nn

from onepass.integrations.patching import Target, parameters
from onepass.moe.family import Parts, called
from onepass.moe.probe import method, methods_of
from onepass.moe.recognition import adapters_of, described_method

MODELS = "transformers.models."


def router_targets(modules: Iterable[str]) -> list[Target]:
    """The methods of classes in these modules that may route. Each decides for each module whether it does."""
    found = []
    for name in list(modules):
        module = sys.modules.get(name)
        if name.startswith(MODELS) and ".modeling_" in name and module is not None:
            for cls in vars(module).copy().values():
                if isinstance(cls, type) and issubclass(cls, nn.Module) and cls.__module__ == name:
                    methods = methods_of(cls)  # type: ignore[arg-type]
                    found += [_target(cls, of) for of in methods if of in vars(cls)]
    return found


def _target(cls: type, name: str) -> Target:
    original = method(cls, name)
    path = f"{cls.__qualname__}.{name}"
    return Target(cls.__module__, path, routing_method(original, name), (parameters(original),), since="4.56")


@cache
def routing_method(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The replacement for a method that routes. It calls the original of a module whose router is not recognised."""

    @wraps(original)
    def replacement(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        d = described_method(self, name)
        if d is not None:
            given = dict(zip(d.inputs, args)) | kwargs
            inputs = [given.get(n) for n in d.inputs]
            x = inputs[0 if d.gate else -1]
            if len(args) <= len(d.inputs) >= len(given) and isinstance(x, Tensor) and x.dim() in d.dims:
                return called(Parts(self, adapters_of(self, d), self), d, *inputs)
        return original(self, *args, **kwargs)

    replacement.__module__ = __name__
    replacement.of_library = original  # type: ignore[attr-defined]
    return replacement
