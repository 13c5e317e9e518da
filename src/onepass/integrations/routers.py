"""The routers of transformers' models, which are found by what they compute; see `onepass.moe.recognition`."""

import sys
from collections.abc import Iterable

from torch import nn

from onepass.integrations.patching import Target, parameters
from onepass.moe.blocks import routing_method
from onepass.moe.probe import method, methods_of

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
