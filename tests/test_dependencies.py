"""What onepass imports is declared in pyproject.toml, and without its extras it works with nothing else installed."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest

tomllib = pytest.importorskip("tomllib", reason="part of Python from 3.11 on")
requirements = pytest.importorskip("packaging.requirements")
canonicalize_name = pytest.importorskip("packaging.utils").canonicalize_name

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ONE_WORKER = pytest.mark.xdist_group("alone")  # has the process
distributions = cache(metadata.packages_distributions)  # of every module that is installed


def names(declared: Iterable[str]) -> Iterator[str]:
    """The distributions that requirements ask for here without an extra, by their canonical names."""
    for requirement in map(requirements.Requirement, declared):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield canonicalize_name(requirement.name)


def with_dependencies(found: Iterable[str]) -> set[str]:
    seen, left = set(), list(found)
    while left:
        name = left.pop()
        if name not in seen:
            seen.add(name)
            left += names(metadata.requires(name) or [])
    return seen


# Modules that are not allowed are neither imported nor found. Metadata of distributions is read as always.
ALONE = """
import sys
from importlib.machinery import PathFinder

class Finder:
    finders = list(sys.meta_path)
    find_distributions = PathFinder.find_distributions

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] in {allowed} or name.startswith("_sysconfigdata"):  # the latter is of Python itself
            specs = (finder.find_spec(name, path, target) for finder in cls.finders if hasattr(finder, "find_spec"))
            return next((spec for spec in specs if spec is not None), None)

sys.meta_path[:] = [Finder]
"""


@cache
def printed_alone() -> list[str]:
    """What blocks of code print, one after the other in a process that imports torch once."""
    blocks = README, AUTOTUNE
    return run_alone("\nprint('---')\n".join(blocks)).split("---\n")


def run_alone(code: str, roots: Iterable[str] = (), without: str = "") -> str:
    """What a process prints in which only torch, triton, the ``roots`` and what they depend on can be imported."""
    installed = with_dependencies([*names(PROJECT["dependencies"]), *roots])
    allowed = {"onepass", *sys.stdlib_module_names} | {
        module for module, of in distributions().items() if installed & set(map(canonicalize_name, of))
    }
    allowed -= {without}
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, filter(None, sys.path)))
    done = subprocess.run(
        [sys.executable, "-c", ALONE.format(allowed=allowed) + code], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


README = """
import onepass
print(onepass.patch())
import torch
from importlib.util import find_spec
for name in ("packaging", "numpy", "transformers", "trl"):
    assert find_spec(name) is None
    try:
        __import__(name)
    except ModuleNotFoundError:
        print(name, end=" ")
try:
    onepass.patch("trl")
except ModuleNotFoundError as error:
    print(error)
print(onepass.cross_entropy(torch.zeros(2, 4), torch.tensor([1, 3])).exp().item())
"""
AUTOTUNE = """
from onepass.autotune import *
from onepass import autotune
for name in "AutotuneReportCallback", "OpenTelemetrySink":
    try:
        getattr(autotune, name)()
    except ModuleNotFoundError as error:
        print(error)
"""


@ONE_WORKER
def test_the_first_line_of_the_readme_with_torch_and_triton_alone():
    missing = "packaging numpy transformers trl libraries: trl is not installed; pip install 'onepass[trl]'"
    assert printed_alone()[0] == f"nothing to replace\n{missing}\n4.0\n"


@ONE_WORKER
def test_autotune_with_torch_and_triton_alone():
    expected = [
        "AutotuneReportCallback: transformers is not installed; pip install 'onepass[transformers]'",
        "OpenTelemetrySink: opentelemetry is not installed; pip install 'onepass[opentelemetry]'",
    ]
    assert printed_alone()[1].splitlines() == expected


def test_without_triton():
    """As on macOS and Windows."""
    pytest.importorskip("transformers")
    code = """
import onepass
from onepass.integrations import OnepassCallback, SelectionBiasCallback
assert not hasattr(onepass, "autotune")
try:
    import onepass.autotune
except ModuleNotFoundError as error:
    print(error)
"""
    expected = "onepass.autotune: triton is not installed; it is available on Linux only"
    assert run_alone(code, ["transformers", "accelerate"], without="triton").splitlines() == [expected]
    code = """
import os, warnings
os.environ["ONEPASS_AUTOTUNE_STORE"] = "store.json"
with warnings.catch_warnings(record=True) as caught:
    import onepass
print(*[w.message for w in caught if "OP003" in str(w.message)])
"""
    expected = "ONEPASS_AUTOTUNE_STORE: not used, because triton is not installed, so that nothing is tuned [OP003]"
    assert run_alone(code, [], without="triton").splitlines() == [expected]


@cache
def imported() -> dict[str, str]:
    """Every third-party module that a file of the package imports, at its top or in a function; and one such file."""
    found = {}
    for path in sorted((ROOT / "src/onepass").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                modules = [node.module]
            else:
                continue
            found |= {module.partition(".")[0]: str(path.relative_to(ROOT)) for module in modules}
    return {module: path for module, path in found.items() if module not in {"onepass", *sys.stdlib_module_names}}


def test_what_is_imported_is_declared():
    everything = [*PROJECT["dependencies"], *(r for extra in PROJECT["optional-dependencies"].values() for r in extra)]
    declared = {canonicalize_name(requirements.Requirement(r).name) for r in everything}
    for module, path in imported().items():
        of = set(map(canonicalize_name, distributions().get(module, [module])))
        assert of & declared, f"{path} imports {module}, which pyproject.toml does not declare"


def test_every_import_is_seen():
    assert {"torch", "triton", "typer", "filelock", "pydantic"} <= imported().keys()
