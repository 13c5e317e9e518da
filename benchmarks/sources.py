"""The source files that a result depends on: which files of onepass an operation ran through, and their hashes.

A result that records them is stale once one of these files changes, and stays valid when any other does.
"""

import hashlib
import io
import sys
import tokenize
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

import onepass
from onepass.autotune import ConfigStore, own
from onepass.autotune.sources import jitted, sources
from onepass.kernels.launch import Plan, forget

PACKAGE = Path(onepass.__file__).resolve().parent
COMMAND_LINE = "cli/"  # whose functions call operations, and are no part of them

Hashes = dict[str, str]  # by the path of a file within the package


def sources_of(run: Callable[[], Any]) -> Hashes:
    """Run ``run`` and return the hashes of the files of onepass that it ran through.

    These are the files of the Python functions that were called, those of the kernels that were launched, with every
    device function that they name, directly or not, and the stores of shipped measurements that chose the numbers of
    these kernels. Files of which only a constant was used are not found.

    The backward runs in the calling thread, so that it is seen too.
    """
    files: set[str] = set()
    kernels: dict[int, Any] = {}

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            files.add(frame.f_code.co_filename)
        elif event == "return" and isinstance(argument, Plan):
            kernels[id(argument.kernel)] = argument.kernel

    forget_results()
    before = sys.getprofile()
    with torch.autograd.set_multithreading_enabled(False):
        sys.setprofile(note)
        try:
            run()
        finally:
            sys.setprofile(before)
    for kernel in kernels.values():
        files |= files_of_kernel(kernel)
    names = {jitted(kernel).fn.__name__ for kernel in kernels.values()}
    measured = [record for record in own.collect_own() if record.kernel in names]
    files |= {str(path) for path in own.SHIPPED.glob("*.json") if holds_any(path, measured)}
    inside = sorted({path for path in (Path(f).resolve() for f in files) if path.is_relative_to(PACKAGE)})
    found = [path.relative_to(PACKAGE).as_posix() for path in inside]
    return {name: hash_of(PACKAGE / name) for name in found if not name.startswith(COMMAND_LINE)}


def forget_results() -> None:
    """Forget planned launches and cached results, since the functions that computed them would not run again."""
    forget()
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "onepass":
            for value in list(vars(module).values()):
                if hasattr(value, "cache_clear") and value.__module__ == name:
                    value.cache_clear()


def files_of_kernel(kernel: Any) -> set[str]:
    """The files of a kernel and of all functions that it names, directly or not."""
    functions: set[Callable[..., Any]] = set()
    for _ in sources(jitted(kernel), functions):
        pass
    return {function.__code__.co_filename for function in functions}


def holds_any(path: Path, records: list[Any]) -> bool:
    stored = ConfigStore(path).records if records else []
    return any(record in stored for record in records)


def hash_of(path: Path) -> str:
    """The first digits of the sha256 of a file's code; the empty string if there is no such file."""
    if not path.is_file():
        return ""
    content = path.read_bytes()
    return hashlib.sha256(code_of(content) if path.suffix == ".py" else content).hexdigest()[:12]


@lru_cache(maxsize=512)  # many results name the same files
def code_of(source: bytes) -> bytes:
    """Python code without its comments and docstrings, which do not change what it computes."""
    lines, statement, removed = source.decode().splitlines(keepends=True), list[tokenize.TokenInfo](), []
    for token in tokenize.tokenize(io.BytesIO(source).readline):
        if token.type == tokenize.COMMENT:
            removed.append((token.start, token.end))
        elif token.type not in (tokenize.NL, tokenize.ENCODING, tokenize.INDENT, tokenize.DEDENT):
            statement.append(token)
        if token.type == tokenize.NEWLINE:
            if len(statement) == 2 and statement[0].type == tokenize.STRING:
                removed.append((statement[0].start, statement[0].end))
            statement = []
    for (first, begin), (last, end) in reversed(removed):
        lines[first - 1 : last] = [lines[first - 1][:begin] + lines[last - 1][end:]]
    return "\n".join(line.rstrip() for line in "".join(lines).splitlines() if line.strip()).encode()


def changed_since(recorded: Hashes) -> list[str]:
    """The files that are not what they were when their hashes were recorded."""
    return [name for name, was in recorded.items() if hash_of(PACKAGE / name) != was]


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
