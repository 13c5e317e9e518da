"""How the source is arranged: what may import what, and that both backends are the same operations."""

import ast
import inspect
from itertools import combinations, product
from pathlib import Path
from unittest.mock import Mock

import pytest

import onepass
from conftest import beyond_pairs
from onepass import kernels, reference

ROOT = Path(onepass.__file__).parent
# Each imports only from those before it, or from itself.
LAYERS = (
    "core", "autotune", "kernels", "reference", "backend", "softmax", "logits", "losses", "moe", "integrations",
    "__init__", "cli", "__main__",
)  # fmt: skip
# Kernels ask for their tuned numbers; no other folder but the command line, axolotl's plugin and the package itself
# knows of the autotuner.
OF_AUTOTUNE = {"kernels": {"onepass.autotune.own"}, "integrations": None, "__init__": None, "cli": None}
APART = {("reference", "kernels"), ("moe", "losses"), ("moe", "softmax")}


def modules():
    return {".".join(("onepass", *p.relative_to(ROOT).with_suffix("").parts)): p for p in sorted(ROOT.rglob("*.py"))}


def imports(path):
    """The names of the modules of onepass that a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "onepass":
            yield from (f"{node.module}.{a.name}" if is_module(f"{node.module}.{a.name}") else node.module
                        for a in node.names)  # fmt: skip
        elif isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.split(".")[0] == "onepass")


def is_module(name):
    path = ROOT.joinpath(*name.split(".")[1:])
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def layer(name):
    return name.split(".")[1] if "." in name else "__init__"


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_imports_only_from_below(name):
    files = [path for module, path in modules().items() if layer(module) == name]
    assert files
    for path in files:
        for imported in imports(path):
            below = layer(imported)
            where = f"{path.relative_to(ROOT)} imports {imported}"
            assert LAYERS.index(below) <= LAYERS.index(name), where
            assert (name, below) not in APART, where
            if below == "autotune" and name != "autotune":
                assert name in OF_AUTOTUNE and OF_AUTOTUNE[name] in (None, {imported}), where


def test_no_modules_import_each_other():
    graph = {}
    for module, path in modules().items():
        package = module.removesuffix(".__init__")
        # A folder's own names are imported from its __init__ by others only.
        graph[package] = {m for m in imports(path) if m != package and not package.startswith(f"{m}.")}
    done, path = set(), []

    def visit(module):
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module in done or module not in graph:
            return
        path.append(module)
        for imported in sorted(graph[module]):
            visit(imported)
        path.pop()
        done.add(module)

    for module in graph:
        visit(module)


def test_every_layer_is_known():
    assert {layer(m) for m in modules()} == set(LAYERS)


def test_both_backends_are_the_same_operations():
    assert kernels.__all__ == reference.__all__
    for name in reference.__all__:
        ours, theirs = (inspect.signature(getattr(m, name), eval_str=True) for m in (kernels, reference))
        assert ours == theirs, name


def test_the_architecture_page_names_every_file_and_walks_at_most_eight():
    page = (ROOT.parents[1] / "docs" / "architecture.md").read_text()
    walks = page.split("## Three call paths")[1].split("\n## ")[0].split("\n\n**")[1:]
    assert len(walks) == 3
    for walk in walks:
        steps = [line for line in walk.splitlines() if line[:1].isdigit()]
        assert 1 <= len(steps) <= 8
        named = [part for line in steps for part in line.split("`") if part.endswith(".py")]
        assert named and all((ROOT / name).exists() or (ROOT / "kernels" / name).exists() for name in named), named
    rows = {line.split("`")[1]: line for line in page.splitlines() if line.startswith("| `")}
    for module, path in modules().items():
        if path.name not in ("__init__.py", "__main__.py"):
            folder = "" if path.parent == ROOT else f"{path.parent.name}/"
            assert f"`{path.name}`" in rows[folder or path.name], module


def test_pairs_of_values_and_no_more():
    """What `make test` runs of a test with the marker ``pairs``."""
    every = [parametrized(a=a, b=b, c=c) for a, b, c in product((False, True), "xyz", (1, 2, 3))]
    beyond = beyond_pairs(every)
    left = [item.callspec.params for item in every if item not in beyond]
    for one, other in combinations("abc", 2):
        assert len({(values[one], values[other]) for values in left}) == (9 if (one, other) == ("b", "c") else 6)
    assert len(left) < 12 < len(every) == 18


def parametrized(**params):
    item = Mock()
    item.callspec.params = params
    return item
