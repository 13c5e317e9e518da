"""Compatibility with earlier versions: public functions still accept the old names of their arguments."""

import inspect
import warnings
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar

import torch

from onepass.core.caller import stacklevel_outside

F = TypeVar("F", bound=Callable[..., Any])
NewName = str | Callable[[dict[str, Any]], tuple[str, Any]]


def renamed(*, positional: Sequence[str] = (), **names: NewName) -> Callable[[F], F]:
    """Accept the arguments of an earlier version, with a DeprecationWarning that says how to pass them now.

    Args:
        positional: arguments, by their old or unchanged names, that an earlier version accepted by position after the
            current positional ones. They are keyword-only now.
        names: the new name of each old one, or a function that returns the new name and value from a dict of all
            arguments.
    """

    def decorate(function: F) -> F:
        parameters = inspect.signature(function).parameters.values()
        first = [p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if len(args) > len(first) or (kwargs and any([name in kwargs for name in names])):
                args, kwargs = translated(function.__qualname__, first, positional, names, args, kwargs)
            return function(*args, **kwargs)

        return call  # type: ignore[return-value]

    return decorate


def warn_deprecated(text: str) -> None:
    """Warn at the caller of a public function, or of the module whose ``forward`` it is; not while torch traces it."""
    if torch.compiler.is_compiling():  # Dynamo cannot trace a warning
        return
    level = stacklevel_outside("onepass.", "torch.nn.modules.")
    warnings.warn(f"onepass: {text} [OP002]", DeprecationWarning, stacklevel=level)


def translated(
    function: str,
    first: Sequence[str],
    positional: Sequence[str],
    names: dict[str, NewName],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Convert the arguments of a call to keyword arguments with their current names."""
    by_position = dict(zip([*first, *positional], args))
    if len(by_position) < len(args) or by_position.keys() & kwargs.keys():
        return args, kwargs  # too many arguments, or one twice: Python raises the best error
    given = by_position | kwargs
    found: dict[str, Any] = {}
    told = []
    for old, value in given.items():
        new = names.get(old, old)
        if callable(new):
            new, value = new(given)
        if old in names or (old in positional and old not in kwargs):
            told.append(f"{new}= instead of {old}" if new != old else f"{new}= by keyword")
        if new in found:
            raise TypeError(f"{function}: got {new} twice, once by an earlier name")
        found[new] = value
    if told:
        warn_deprecated(f"{function}: pass {', '.join(told)}")
    return (), found
