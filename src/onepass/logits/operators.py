"""The operators of logits that are not materialized. `TensorLike` inherits them.

Each computes the logits as a tensor, and is applied to it. Those that only change the description of the logits, such
as a product with a number, are methods of `TensorLike`.
"""

import operator
from collections.abc import Callable
from typing import Any

from torch import Tensor


class Operators:
    """The operators of a tensor, for a class that has a tensor's value when one is needed."""

    tensor: Tensor | None = None

    def materialize_for(self, name: str) -> Tensor:
        """The value as a tensor, for an operation that needs it."""
        raise NotImplementedError

    def become(self, result: Any) -> Any:
        """Take the value of a result, for an operation in place."""
        raise NotImplementedError

    def written(self) -> None:
        """Note that the values were changed in place."""
        raise NotImplementedError


def is_lazy(value: Any) -> bool:
    return isinstance(value, Operators)


def is_in_place(name: str) -> bool:
    """Whether an operation of a tensor changes its numbers."""
    return name.endswith("_") and not name.startswith("_") and name != "requires_grad_"


def as_tensor(value: Any, name: str = "an operation") -> Any:
    """The value as a tensor if it `is_lazy`; any other value as it is."""
    return value.materialize_for(name) if isinstance(value, Operators) else value


def _operator(name: str) -> Callable[..., Any]:
    function = getattr(operator, name)

    def apply(self: Operators, *others: Any) -> Any:
        result = function(self.materialize_for(name), *map(as_tensor, others))
        if name == "__setitem__":
            self.written()
        return result

    return apply


def _reflected(name: str) -> Callable[..., Any]:
    function = getattr(operator, name)
    return lambda self, other: function(as_tensor(other), self.materialize_for(name))


def _in_place(name: str) -> Callable[..., Any]:
    function, of_tensor = getattr(operator, name), getattr(operator, f"i{name}")

    def apply(self: Operators, other: Any) -> Any:
        lazy = function(self, other) if self.tensor is None else None
        if isinstance(lazy, Operators):
            return self.become(lazy)
        return self.become(of_tensor(self.materialize_for(name), as_tensor(other)))  # views of the tensor change too

    return apply


COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
for _name in ("neg", "abs", "pos", "invert", "sub", "pow", "mod", "floordiv", "matmul", "setitem", *COMPARISONS):
    setattr(Operators, f"__{_name}__", _operator(f"__{_name}__"))
for _name in ("sub", "truediv", "floordiv", "pow", "mod", "matmul"):
    setattr(Operators, f"__r{_name}__", _reflected(f"__{_name}__"))
for _name in ("add", "sub", "mul", "truediv", "pow", "mod", "floordiv"):
    setattr(Operators, f"__i{_name}__", _in_place(_name))
