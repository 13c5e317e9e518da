"""The definitions of a Python file: the code of its functions, classes and constants, and the names that each uses."""

import ast
import io
import textwrap
import tokenize
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef


class Definition(NamedTuple):
    """What a name of a file is.

    Attributes:
        code: without comments and docstrings, and with the imports of the names that it uses. That of a class is
            without its methods, which are definitions too.
        names: what the code uses, with attributes: ``x`` and ``x.y``.
        function: whether it is a function or a method.
        imported: the module that it comes from and its name there, if it is imported.
    """

    code: str
    names: frozenset[str]
    function: bool = False
    imported: tuple[str, str] | None = None


@lru_cache(maxsize=512)  # many results name the same files
def definitions(source: bytes) -> dict[str, Definition]:
    """By the qualified name. A function within another is a part of that."""
    found: dict[str, Definition] = {}
    lines = source.decode().splitlines(keepends=True)
    for name, new in defined(ast.parse(source).body, "", lines):
        if name in found:  # as in both branches of an ``if``
            new = Definition(found[name].code + new.code, found[name].names | new.names, new.function, new.imported)
        found[name] = new
    imports = {name: d.code for name, d in found.items() if d.imported}
    for name, d in found.items():
        found[name] = d._replace(code=d.code + "".join(imports[n] for n in sorted(d.names & imports.keys())))
    return found


def defined(body: Sequence[ast.stmt], within: str, lines: list[str]) -> Iterator[tuple[str, Definition]]:
    for node in body:
        if isinstance(node, FUNCTIONS):
            yield within + node.name, Definition(code_between(lines, node), names_in(node), function=True)
        elif isinstance(node, ast.ClassDef):
            methods = [n for n in node.body if isinstance(n, FUNCTIONS | ast.ClassDef)]
            others = [*node.bases, *node.keywords, *node.decorator_list, *(n for n in node.body if n not in methods)]
            names = frozenset[str]().union(*map(names_in, others))
            yield within + node.name, Definition(code_between(lines, node, methods), names)
            yield from defined(methods, f"{within}{node.name}.", lines)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                name = alias.asname or alias.name.partition(".")[0]
                source = (node.module or "", alias.name) if isinstance(node, ast.ImportFrom) else (alias.name, "")
                yield within + name, Definition(f"{name} = {'.'.join(source)}\n", frozenset(), imported=source)
        elif isinstance(node, ast.If | ast.Try):
            branches = [getattr(node, part, []) for part in ("body", "orelse", "finalbody")]
            branches += [handler.body for handler in getattr(node, "handlers", [])]
            test = names_in(node.test) if isinstance(node, ast.If) else frozenset()
            for name, inner in (pair for branch in branches for pair in defined(branch, within, lines)):
                whole = code_between(lines, node)
                yield name, Definition(whole, inner.names | test, inner.function, inner.imported)
        else:
            for n in ast.walk(node):
                if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store):
                    yield within + n.id, Definition(code_between(lines, node), names_in(node))


def names_in(node: ast.AST) -> frozenset[str]:
    found = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    of_names = (n for n in ast.walk(node) if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name))
    return frozenset(found | {f"{n.value.id}.{n.attr}" for n in of_names})  # type: ignore[attr-defined]


def code_between(lines: list[str], node: ast.stmt, without: Sequence[ast.stmt] = ()) -> str:
    """The code of a statement, without that of some statements in it."""
    left_out = {n for inner in without for n in range(first_line_of(inner), inner.end_lineno or 0)}
    kept = [n for n in range(first_line_of(node), node.end_lineno or 0) if n not in left_out]
    return code_of(textwrap.dedent("".join(lines[n] for n in kept)).encode()).decode() + "\n"


def first_line_of(node: ast.stmt) -> int:
    """From 0, with the decorators."""
    return min(n.lineno for n in (node, *getattr(node, "decorator_list", ()))) - 1


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
