"""Functions that may still be called by the names that their arguments had."""

import inspect
import warnings
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])
NewName = str | Callable[[dict[str, Any]], str]


def renamed(*, positional: Sequence[str] = (), **names: NewName) -> Callable[[F], F]:
    """Accept the arguments of an earlier version, with a DeprecationWarning that says how they are given now.

    Args:
        positional: arguments (by their old or unchanged names) that could follow the positional ones by position, and
            are keyword-only now.
        names: new names by old ones; or a function that tells the new name from all arguments by name.
    """

    def decorate(function: F) -> F:
        parameters = inspect.signature(function).parameters.values()
        first = [p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if len(args) > len(first) or any([name in kwargs for name in names]):
                args, kwargs = translated(function.__qualname__, first, positional, names, args, kwargs)
            return function(*args, **kwargs)

        return call  # type: ignore[return-value]

    return decorate


def _warn(text: str) -> None:
    warnings.warn(text, DeprecationWarning, stacklevel=4)


def translated(
    function: str,
    first: Sequence[str],
    positional: Sequence[str],
    names: dict[str, NewName],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments as they are given now."""
    extra = args[len(first) :]
    if len(extra) > len(positional):
        return args, kwargs  # an error, which Python describes best
    given = dict(zip(first, args)) | dict(zip(positional, extra)) | kwargs
    found: dict[str, Any] = {}
    for old, value in given.items():
        new = names.get(old, old)
        new = new(given) if callable(new) else new
        if old in names or (old in positional and old not in kwargs):
            told = f"{new}= instead of {old}" if new != old else f"{new}= by keyword"
            if not torch.compiler.is_compiling():  # which cannot trace it
                _warn(f"onepass: {function}: pass {told}")
        if new in found:
            raise TypeError(f"{function}: got {old}, which is {new} now, and {new}")
        found[new] = value
    return (), found
