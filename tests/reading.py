"""Flesch reading ease of the pages beside that of PyTorch's own documentation: `make reading`.

The measure is 206.835 - 1.015 * words per sentence - 84.6 * syllables per word, so that a higher number is easier to
read. It is taken of the prose alone: paragraphs and entries of lists, without headings, code, tables, formulas, HTML
and the targets of links. Code or a formula within a sentence counts as one short word. What docstrings say of
arguments, shapes and results is left out, as tables are.

PyTorch's is that of the docstrings of all functions of `torch.nn.functional`, as one text. The pages of the reference
are those of the docstrings that they show, but for those of the two callbacks, which import transformers.
"""

import inspect
import re
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
ENTRY = re.compile(r"\s*(?:[-*+•]|\d+[.)])\s+")
WORD = "x"  # in place of code and formulas
# Sections and directives of docstrings that are left out, with the lines that are indented below them.
LEFT_OUT = re.compile(
    r"\s*(?:(?:Args|Arguments|Keyword args?|Attributes|Shapes?|Shape legend|Returns?|Raises|Yields|Examples?)\b.*:\s*$"
    r"|\.\. (?:math\s*::|code|_|versionadded|deprecated|testcode|include|image|figure))",
    re.IGNORECASE,
)


def prose_of_page(text: str) -> list[str]:
    """The paragraphs and entries of lists of a page, which is in Markdown."""
    shown = [doc for name in re.findall(r"^::: (\S+)", text, re.MULTILINE) for doc in docstrings(name)]
    text = re.sub(r"^(```|~~~).*?^\1", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!--.*?-->|<picture>.*?</picture>|<[a-z/][^>]*>", "", text, flags=re.DOTALL)
    text = re.sub(r"^\s*(?:#|\||!\[|:::).*$", "\n", text, flags=re.MULTILINE)
    text = re.sub(r"\[([^\]]*)\](?:\([^)]*\)|\[[^\]]*\])", r"\1", text)
    text = re.sub(r"\$?`+[^`]+`+\$?", WORD, text)
    return paragraphs(text) + [paragraph for doc in shown for paragraph in prose_of_docstring(doc)]


def docstrings(name: str) -> list[str]:
    """Of a public name, and of the members of a class."""
    module, _, last = name.rpartition(".")
    if module.endswith(".callback"):
        return []
    found = getattr(import_module(module), last)
    members = vars(found).items() if inspect.isclass(found) else ()
    documented = [found, *[member for name, member in members if not name.startswith("_")]]
    return [doc for doc in (getattr(thing, "__doc__", None) for thing in documented) if isinstance(doc, str)]


def prose_of_docstring(text: str) -> list[str]:
    """The paragraphs and entries of lists of a docstring, which is in reStructuredText."""
    kept, below = [], None  # the indentation of what is left out, until a line has no more than that
    for line in inspect.cleandoc(text).splitlines():
        depth = len(line) - len(line.lstrip())
        if below is not None and line.strip() and depth <= below:
            below = None
        if below is None and LEFT_OUT.match(line):
            below = depth
        is_code = re.match(r"\s*(?:>>>|\w+\(\w+[,)]|\.\. )", line)
        if below is None and not is_code:
            kept.append(re.sub(r"^\s*(?:Note|Warning)s?:+\s*$", "", line))
    text = re.sub(r":\w+(?::\w+)?:`[^`]+`", WORD, "\n".join(kept))
    text = re.sub(r"`([^`<]+)<[^>]+>`_+|`([^`]+)`_+", r"\1\2", text)
    return paragraphs(re.sub(r"`+[^`]+`+", WORD, text))


def paragraphs(text: str) -> list[str]:
    found: list[list[str]] = [[]]
    for line in text.replace("*", "").splitlines():
        if not line.strip() or ENTRY.match(line):
            found.append([])
        found[-1].append(ENTRY.sub("", line).strip())
    joined = [" ".join(" ".join(lines).split()) for lines in found]
    return [paragraph for paragraph in joined if len(re.findall(r"[A-Za-z]{2,}", paragraph)) > 2]


def reading_ease(prose: list[str]) -> float:
    import textstat

    # A paragraph ends a sentence; a point within a number, a name or an abbreviation does not.
    ended = [re.sub(r"(?<=\w)\.(?=\w)|\b(e\.g|i\.e|etc|vs)\.", "", p).rstrip(".:;,") + "." for p in prose]
    return float(textstat.flesch_reading_ease(" ".join(ended)))


def of_torch() -> float:
    import torch.nn.functional as functional

    internal = "torch.overrides", "torch._jit_internal", "torch._C"  # that its documentation does not have
    texts = {
        value.__doc__
        for name, value in vars(functional).items()
        if not name.startswith("_") and inspect.isroutine(value) and value.__module__ not in internal and value.__doc__
    }
    return reading_ease([paragraph for text in sorted(texts) for paragraph in prose_of_docstring(text)])


def of_pages() -> dict[str, tuple[float, int]]:
    """Of each page that has a sentence: its reading ease, and the number of its words."""
    found = {}
    for page in PAGES:
        prose = prose_of_page(page.read_text())
        if prose:
            found[str(page.relative_to(ROOT))] = reading_ease(prose), len(" ".join(prose).split())
    return found


if __name__ == "__main__":
    limit = of_torch()
    print(f"{'page':34} {'words':>6} {'reading ease':>13}\n{'torch.nn.functional':34} {'':6} {limit:13.1f}")
    for page, (ease, words) in sorted(of_pages().items(), key=lambda item: item[1]):
        print(f"{page:34} {words:6} {ease:13.1f}{'  harder' if ease < limit else ''}")
