"""`LossModule`: what the modules of losses have in common."""

import inspect
from typing import Any, ClassVar

import torch
from torch import Tensor

from onepass.core.checks import described


class LossModule(torch.nn.Module):
    """A loss as a module: each option of the loss is an argument of the constructor and an attribute of that name.

    A direct subclass declares them as arguments; a subclass of that may have any constructor.
    """

    defaults: ClassVar[dict[str, Any]]  # of the options, by name

    def __init_subclass__(cls, **rest: Any) -> None:
        super().__init_subclass__(**rest)
        if LossModule in cls.__bases__:
            _self, *options = inspect.signature(cls.__init__).parameters.values()
            cls.defaults = {option.name: option.default for option in options}

    def options(self) -> dict[str, Any]:
        """The options of the loss, as the attributes are now."""
        return {name: getattr(self, name) for name in self.defaults}

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # `to` and the like also move an option that is a tensor, such as a temperature of each row.
        super()._apply(fn, recurse)
        for name, value in self.options().items():
            if isinstance(value, Tensor) and value.dim() and name not in self._buffers:
                setattr(self, name, fn(value))
        return self

    def extra_repr(self) -> str:
        """The options that do not have their default values."""
        shown = []
        for name, value in self.options().items():
            if isinstance(value, Tensor) or value != self.defaults[name]:
                shown.append(f"{name}={described(value) if isinstance(value, Tensor) else repr(value)}")
        return ", ".join(shown)
