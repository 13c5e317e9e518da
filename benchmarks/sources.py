"""The sources that a result depends on: the functions of onepass that an operation ran through, the constants and
classes that these name, and their hashes.

A result that records them is stale once one of these changes, and stays valid when anything else does. What runs while
a file is imported is not followed: decorators, default values of arguments, and calls outside of functions.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from types import CodeType
from typing import Any

import torch

import onepass
from benchmarks.definitions import Definition, code_of, definitions
from onepass.autotune import ConfigStore, own
from onepass.autotune.sources import jitted, sources
from onepass.kernels.launch import Plan, forget

PACKAGE = Path(onepass.__file__).resolve().parent
COMMAND_LINE = "cli/"  # whose functions call operations, and are no part of them

Hashes = dict[str, str]  # by the path of a file within the package, or "path::name" of what it defines or measured


def sources_of(run: Callable[[], Any]) -> Hashes:
    """Run ``run`` twice and return the hashes of what it ran through: launches that are planned, and repeated ones.

    These are the Python functions that were called, the kernels that were launched, with every device function that
    they name, directly or not, the constants, classes and imports that all of these name, and the shipped measurements
    of these kernels, if any was used.

    The backward runs in the calling thread, so that it is seen too.
    """
    called: set[CodeType] = set()
    kernels: dict[int, Any] = {}

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            called.add(frame.f_code)
        elif event == "return" and isinstance(argument, Plan):
            kernels[id(argument.kernel)] = argument.kernel

    forget_results()
    before = sys.getprofile()
    with torch.autograd.set_multithreading_enabled(False):
        sys.setprofile(note)
        try:
            for _ in range(2):
                run()
        finally:
            sys.setprofile(before)
    for kernel in kernels.values():
        called |= functions_of_kernel(kernel)
    names = {jitted(kernel).fn.__name__ for kernel in kernels.values()}
    used = [record for record in own.collect_own() if record.kernel in names]
    stores = {path: ConfigStore(path).records for path in own.SHIPPED.glob("*.json")} if used else {}
    measured = {
        f"{within_package(path)}::{record.kernel}"
        for path, stored in stores.items()
        for record in used
        if record in stored
    }
    functions = [c for c in called if c.co_name != "<module>"]  # a file that was imported
    inside = {(path, c.co_qualname) for c in functions if (path := within_package(c.co_filename))}
    found = named_by(inside) | measured
    return {key: hash_of(key) for key in sorted(found) if not key.startswith(COMMAND_LINE)}


def within_package(file: str | Path) -> str:
    """The path of a file within the package; the empty string if it is elsewhere."""
    path = Path(file).resolve()
    return path.relative_to(PACKAGE).as_posix() if path.is_relative_to(PACKAGE) else ""


def named_by(called: set[tuple[str, str]]) -> set[str]:
    """The keys of some functions, and of the constants and classes that they name, directly or not.

    A function that is only named is left out, since it would be among those called, except if it is named by code that
    runs when its file is imported.
    """
    found, seen = set[str](), set[tuple[str, str]]()
    waiting = [(file, qualname.partition(".<locals>")[0]) for file, qualname in called]
    while waiting:
        file, name = where = waiting.pop()
        here = definitions_of(file)
        if where in seen:
            continue
        seen.add(where)
        if name not in here:  # a lambda of a constant, or a function that is made when the file is imported
            lambdas = [(file, n) for n, d in here.items() if not d.function and "lambda" in d.code]
            waiting += lambdas
            found |= set() if lambdas else {file}
            continue
        definition, of_class = here[name], name.rpartition(".")[0]
        if not definition.imported:
            found.add(f"{file}::{name}")
        waiting += [(file, of_class)] if of_class else []
        for other in origins(file, definition):
            there = definitions_of(other[0]).get(other[1])
            if there and not (there.function and (definition.function or definition.imported)):
                waiting.append(other)
    return found


def origins(file: str, definition: Definition) -> Iterator[tuple[str, str]]:
    """The file and the name of what a definition names within the package, or imports."""
    here = definitions_of(file)
    if definition.imported:
        module, name = definition.imported
        yield file_of(module), name
    for name in definition.names:
        base, _, attribute = name.partition(".")
        if base in here and not attribute:
            yield file, base
        elif base in here and here[base].imported:  # an attribute of a module
            yield file_of(".".join(part for part in here[base].imported or () if part)), attribute


def file_of(module: str) -> str:
    """The path of a module of onepass within the package; the empty string for any other."""
    first, *parts = module.split(".")
    paths = ["/".join(parts) + ".py", "/".join([*parts, "__init__.py"])] if first == "onepass" else []
    return next((path for path in paths if (PACKAGE / path).is_file()), "")


def definitions_of(file: str) -> dict[str, Definition]:
    path = PACKAGE / file
    return definitions(path.read_bytes()) if path.suffix == ".py" and path.is_file() else {}


def forget_results() -> None:
    """Forget planned launches and cached results, since the functions that computed them would not run again."""
    forget()
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "onepass":
            for value in list(vars(module).values()):
                if hasattr(value, "cache_clear") and value.__module__ == name:
                    value.cache_clear()


def functions_of_kernel(kernel: Any) -> set[CodeType]:
    """The code of a kernel and of all functions that it names, directly or not."""
    functions: set[Callable[..., Any]] = set()
    for _ in sources(jitted(kernel), functions):
        pass
    return {function.__code__ for function in functions}


def hash_of(key: str) -> str:
    """The first digits of a sha256: of a file's code, of a definition in it, or of the measurements of a kernel.

    Empty if there is no such thing.
    """
    file, _, name = key.partition("::")
    path = PACKAGE / file
    if name and path.suffix == ".json":
        return measurements(path.read_bytes()).get(name, "") if path.is_file() else ""
    if name:
        definition = definitions_of(file).get(name)
        return digest(definition.code.encode()) if definition else ""
    return hash_of_file(path.read_bytes(), path.suffix == ".py") if path.is_file() else ""


@lru_cache(maxsize=512)  # many results name the same files
def hash_of_file(content: bytes, is_code: bool) -> str:
    return digest(code_of(content) if is_code else content)


@lru_cache
def measurements(content: bytes) -> Hashes:
    """The hashes of what a file of shipped measurements says of each kernel."""
    found: dict[str, list[str]] = {}
    for record in json.loads(content)["records"]:
        says = [record[field] for field in ("gpu", "source_hash", "key", "config")]
        found.setdefault(record["kernel"], []).append(json.dumps(says, sort_keys=True))
    return {kernel: digest("\n".join(sorted(said)).encode()) for kernel, said in found.items()}


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]


def changed_since(recorded: Hashes) -> list[str]:
    """What is not what it was when its hash was recorded."""
    return [key for key, was in recorded.items() if hash_of(key) != was]


def add_sources(report: dict[str, Any], operation: str, run: Callable[[], Any]) -> None:
    """Add to a report the sources of one more case of an operation."""
    known = report["sources"].get(operation, {})
    report["sources"][operation] = dict(sorted((known | sources_of(run)).items()))


def staleness(report: dict[str, Any], operations: Iterable[str]) -> str:
    """A sentence on whether the results of some operations are of an earlier version, empty if they are not."""
    recorded, commit = report.get("sources", {}), report["environment"]["commit"]
    found = [recorded.get(operation) for operation in operations]
    if not all(found):
        return f"Measured on an earlier version (commit {commit})."
    changed = sorted({name for hashes in found for name in changed_since(hashes)})
    if not changed:
        return ""
    names = ", ".join(f"`{name}`" for name in changed)
    return f"Stale: {names} changed since this was measured (commit {commit})."
