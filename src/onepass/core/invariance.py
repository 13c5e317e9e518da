"""The batch-invariant mode. The options of an operation include whether the mode is on when the operation is called."""

import inspect
from collections.abc import Callable
from functools import wraps
from types import TracebackType
from typing import Any, TypeVar

from onepass.core.checks import check_bool, is_set

F = TypeVar("F", bound=Callable[..., Any])

_enabled = is_set("ONEPASS_BATCH_INVARIANT")


def is_batch_invariant() -> bool:
    """Whether the mode is on."""
    return _enabled


class batch_invariant:
    """Make the results and gradients of a row bitwise the same, whatever other rows are computed with it.

    This switches the mode on for the whole process. In a ``with`` statement, the previous state is restored at the end;
    as a decorator, it applies to the calls of a function. ``ONEPASS_BATCH_INVARIANT=1`` switches it on from the start.
    The mode applies to the functions that are called while it is on, and to their backward. Only one thread at a time
    may switch it.

    Usually, a kernel uses more programs per row if there are fewer rows, and GEMMs of different sizes use different
    kernels, so that the last bits of a row's results depend on the number of rows. In this mode:

    - the number of programs per row, and the columns that each thread reads, depend only on the vocabulary;
    - linear heads (`LinearLogits`, all ``linear_*`` functions, and the heads of `onepass.attach` and `onepass.patch`)
      and the gates of routers compute logits and the gradient of hidden states with a GEMM of onepass that sums in a
      fixed order, even if ``torch.mm`` is replaced, and a head never computes slices of the vocabulary;
    - programs of `moe.route` process a fixed number of tokens;
    - on a CPU, every row is computed alone, which is slow.

    The mode does not cover sums over rows (means, the gradients of weights and biases, the losses of a router),
    experts, and sums over more than two processes.

    Args:
        enabled: False switches the mode off.

    Example::

        with onepass.batch_invariant():
            loss = onepass.linear_loss(hidden, lm_head.weight, tokens, policy_loss, advantages, old_log_probs)
        loss.backward()
    """

    def __init__(self, enabled: bool = True) -> None:
        global _enabled
        enabled = check_bool(enabled, "enabled")
        self.before, self.enabled, self.is_new = [_enabled], enabled, True
        _enabled = enabled

    def __call__(self, function: F) -> F:
        """Decorate a function, which then runs in the mode."""
        if self.is_new:  # else the constructor's mode has ended already
            self.__exit__(None, None, None)
            self.is_new = False
        inner = inspect.unwrap(function) if callable(function) else None
        later = inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction
        if not inspect.isroutine(inner) or any(kind(inner) for kind in later):  # their bodies run after the call
            raise TypeError(f"function: expected a function that is no generator or coroutine, got {function!r}")

        @wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            with batch_invariant(self.enabled):
                return function(*arguments, **options)

        return call  # type: ignore[return-value]

    def __enter__(self) -> "batch_invariant":
        global _enabled
        if not self.is_new:  # else the constructor has just done this
            self.before.append(_enabled)
        self.is_new, _enabled = False, self.enabled
        return self

    def __exit__(self, kind: type[BaseException] | None, error: Any, traceback: TracebackType | None) -> None:
        global _enabled
        _enabled = self.before.pop()
