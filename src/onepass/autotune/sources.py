"""`identity_of`: an identifier of a kernel's source, which tells whether a stored measurement still applies to it.

Triton's own hash of what it compiled (``cache_key``) also changes with the kernel's line number in its file, and with
the order in which kernels that share a function are first used.
"""

import hashlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

from triton.language import constexpr

Function = Callable[..., Any]
_hashes: "WeakKeyDictionary[Function, str]" = WeakKeyDictionary()


def jitted(kernel: Any) -> Any:
    """The `triton.jit` function inside an autotuner and heuristics."""
    while not inspect.isfunction(kernel.fn):
        kernel = kernel.fn
    return kernel


def identity_of(kernel: Any) -> str:
    """The ``source_hash`` of a record: the version of a kernel of onepass, `source_hash` of any other.

    The versions of kernels are in the dictionary ``VERSIONS`` of their module, by name; a kernel that is not listed has
    version 1. Records of another version are not used. Raise a version when the tuned numbers change their meaning, or
    when the work of one program changes, so that earlier measurements no longer apply; not for comments, renamed
    arguments or other code for the same work.
    """
    function = jitted(kernel).fn
    if function.__module__.split(".")[0] == "onepass":
        return f"version {function.__globals__.get('VERSIONS', {}).get(function.__name__, 1)}"
    return source_hash(kernel)


def source_hash(kernel: Any) -> str:
    """sha256 of the source of a kernel and of all functions and constants that it refers to, directly or indirectly.

    Triton's own functions are left out, and so are decorators: configurations and heuristics are not compiled.
    """
    kernel = jitted(kernel)
    if kernel.fn not in _hashes:
        _hashes[kernel.fn] = hashlib.sha256("\n".join(sources(kernel, set())).encode()).hexdigest()
    return _hashes[kernel.fn]


def sources(kernel: Any, seen: set[Function]) -> Iterator[str]:
    fn = kernel.fn
    if fn in seen or fn.__module__.startswith("triton."):
        return
    seen.add(fn)
    text = getattr(kernel, "src", None)  # the source when it was decorated; the interpreter keeps none
    text = text or textwrap.dedent(inspect.getsource(fn))
    yield text[re.search(r"^def ", text, re.MULTILINE).start() :]  # type: ignore[union-attr]
    named = inspect.getclosurevars(fn)
    for name, value in sorted({**named.globals, **named.nonlocals}.items()):
        inside = [getattr(value, n, None) for n in sorted(fn.__code__.co_names)] if inspect.ismodule(value) else [value]
        for found in inside:
            if inspect.isfunction(getattr(found, "fn", None)):
                yield from sources(found, seen)
            elif isinstance(found, constexpr | int | float | str):
                yield f"{name} = {found!r}"
