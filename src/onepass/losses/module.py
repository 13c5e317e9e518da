"""`LossModule`: what the modules of losses have in common."""

import inspect
from typing import Any

import torch
from torch import Tensor

from onepass.core.checks import described


class LossModule(torch.nn.Module):
    """A loss as a module: each option of the loss is an argument of the constructor and an attribute of that name.

    ``class_weights`` is a buffer.
    """

    option_names: tuple[str, ...]

    def keep(self, given: dict[str, Any]) -> None:
        """Make attributes of the arguments of the constructor, which are its ``locals()``."""
        self.option_names = tuple(n for n in given if n not in ("self", "__class__"))
        for name in self.option_names:
            if name == "class_weights":
                self.register_buffer(name, given[name])
            else:
                setattr(self, name, given[name])

    def options(self) -> dict[str, Any]:
        """The options of the loss, as the attributes are now."""
        return {name: getattr(self, name) for name in self.option_names}

    def extra_repr(self) -> str:
        """The options that do not have their default values."""
        parameters = inspect.signature(type(self).__init__).parameters
        shown = []
        for name, value in self.options().items():
            default = parameters[name].default if name in parameters else inspect.Parameter.empty
            if isinstance(value, Tensor) or value != default:
                shown.append(f"{name}={described(value) if isinstance(value, Tensor) else repr(value)}")
        return ", ".join(shown)
