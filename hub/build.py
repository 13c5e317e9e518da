"""Write onepass as a kernel of the library `kernels`: ``python -m hub.build FOLDER`` (``make kernel``).

A kernel is a folder of Python files for each backend, which is imported under a name of its own, so that several
versions can be loaded in one process, beside an installed onepass. Its files are those of ``src/onepass`` that the
public names need, without `onepass.integrations`. Imports are made relative, and wherever the code has the name of the
package (in the namespace of operations registered with torch, and in comparisons of modules' names), it has the
kernel's identifier. The identifier contains a hash of the files.
"""

import ast
import hashlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from string import Template

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "onepass"
BACKENDS = ("cpu", "cuda", "rocm")
VERSION = re.findall(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[0]
NAME = re.compile(r"onepass(?=$|\.|::)")  # the package, and not the beginning of a message


def build(folder: Path) -> None:
    """Write the kernel to ``folder``, as a repository of the Hub has it: a card, and ``build/torch-BACKEND``."""
    files = sources()
    digest = hashlib.sha256(json.dumps(sorted(files.items())).encode()).hexdigest()[:12]
    for backend in BACKENDS:
        identifier = f"_onepass_{backend}_{digest}"
        variant = folder / "build" / f"torch-{backend}"
        for name, text in files.items():
            path = variant / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(renamed(text, name, identifier) if path.suffix == ".py" else text)
        about = {
            "id": identifier,
            "name": "onepass",
            "version": int(VERSION.split(".")[0]),
            "license": "Apache-2.0",
            "python-depends": [],
            "backend": {"type": backend},
        }
        (variant / "metadata.json").write_text(json.dumps(about, indent=2) + "\n")
    card = Template((ROOT / "hub" / "README.md").read_text())
    (folder / "README.md").write_text(card.substitute(version=VERSION))
    (folder / "LICENSE").write_text((ROOT / "LICENSE").read_text())


def sources() -> dict[str, str]:
    """The files of the kernel by their paths in it, before they are `renamed`."""
    found = {
        "__init__.py": entry(),
        "layers.py": (ROOT / "hub" / "layers.py").read_text(),
        "core/version.py": f'"""The version of onepass."""\n\n__version__ = "{VERSION}"\n',
        "autotune/__init__.py": '"""The tuned numbers that kernels are launched with."""\n',
    }
    left = list(found)
    while left:
        for name in imported(found[left.pop()]):
            if name not in found:
                found[name] = (PACKAGE / name).read_text()
                left.append(name)
    found |= {f"autotune/shipped/{p.name}": p.read_text() for p in (PACKAGE / "autotune" / "shipped").glob("*.json")}
    return found


def entry() -> str:
    """``__init__.py``: the public names of onepass that are not its patches of other libraries."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    imports = [
        node for node in tree.body
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("onepass")
        and not (node.module or "").startswith("onepass.integrations")
    ]  # fmt: skip
    imports.append(ast.ImportFrom("onepass", [ast.alias("layers")], 0))
    names = sorted(alias.name for node in imports for alias in node.names if alias.name != "__version__")
    lines = [f'"""{ast.get_docstring(tree)}"""', "", *map(ast.unparse, imports), "", f"__all__ = {names}", ""]
    return "\n".join(lines)


def imported(text: str) -> Iterator[str]:
    """The files of onepass that a file imports, and those of the packages which they are in."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and NAME.match(node.module or ""):
            for alias in node.names:
                parts = [*(node.module or "").split("."), alias.name][1:]
                for n in range(1, len(parts) + 1):
                    for name in ("/".join(parts[:n]) + ".py", "/".join([*parts[:n], "__init__.py"])):
                        if (PACKAGE / name).exists():
                            yield name


def renamed(text: str, name: str, identifier: str) -> str:
    """The text of the file ``name`` with relative imports and the ``identifier`` in place of ``onepass``.

    Raises:
        ValueError: the file names the package in another way than the ones that are known here.
    """
    tree = ast.parse(text)
    lines = text.encode().splitlines(keepends=True)  # the columns of `ast` are bytes
    has_docstring = ast.Module | ast.ClassDef | ast.FunctionDef
    docstrings = {id(n.body[0].value) for n in ast.walk(tree)
                  if isinstance(n, has_docstring) and n.body and isinstance(n.body[0], ast.Expr)}  # fmt: skip
    edits = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level and NAME.match(node.module or ""):
            dots = "." * (name.count("/") + 1)
            relative = dots + (node.module or "").removeprefix("onepass").removeprefix(".")
            edits.append((node.lineno, node.col_offset, f"from {node.module} import", f"from {relative} import"))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and NAME.match(node.value):
            if id(node) not in docstrings:
                edits.append((node.lineno, node.col_offset, '"onepass', f'"{identifier}'))
        elif isinstance(node, ast.Attribute) and node.attr == "onepass" and ast.unparse(node.value) == "torch.ops":
            edits.append((node.lineno, node.col_offset, "torch.ops.onepass", f"torch.ops.{identifier}"))
        elif isinstance(node, ast.Import) and any(NAME.match(alias.name) for alias in node.names):
            raise ValueError(f"{name}:{node.lineno}: write `from {node.names[0].name} import ...`")
    for line, column, old, new in sorted(edits, reverse=True):
        before, after = lines[line - 1][:column], lines[line - 1][column:].decode()
        if not after.startswith(old):
            raise ValueError(f"{name}:{line}: expected {old!r}, got {after!r}")
        lines[line - 1] = before + (new + after[len(old) :]).encode()
    return b"".join(lines).decode()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m hub.build FOLDER")
    build(Path(sys.argv[1]))
