"""`memo`: a function whose results are cached."""

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


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
