"""`memo` and `memo_of_numbers`: functions whose results are cached; `keep`: an entry of a cache of limited size."""

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])
MOST = 4096  # entries of a table


def memo(function: F) -> F:
    """`functools.lru_cache`, by the types of the arguments too, for functions that `torch.compile` may trace.

    While it does, each result is computed. Dynamo traces the function inside an `lru_cache` too, but with a warning.
    """
    kept = lru_cache(typed=True)(function)

    @wraps(function)
    def call(*arguments: Any) -> Any:
        return function(*arguments) if torch.compiler.is_compiling() else kept(*arguments)

    call.cache_clear = kept.cache_clear  # type: ignore[attr-defined]
    return call  # type: ignore[return-value]


SCALARS = frozenset((int, float, bool, str, type(None)))


def memo_of_numbers(function: F) -> F:
    """`memo` for calls whose arguments are all Python's numbers, strings or None: a tensor may change, and a list has
    no hash. Other calls are computed."""
    kept = memo(function)

    @wraps(function)
    def call(*arguments: Any) -> Any:
        return (kept if SCALARS.issuperset(map(type, arguments)) else function)(*arguments)

    return call  # type: ignore[return-value]


def keep(table: dict[Any, Any], key: Any, value: Any, most: int = MOST) -> None:
    """Add an entry to a table of results, which is cleared when it is full."""
    if len(table) >= most:
        table.clear()
    table[key] = value
