"""What the pages and docstrings need beyond Markdown to become a site (`make docs`).

mkdocs calls `on_page_markdown`, and mkdocstrings loads `Docstrings`. A link to a file outside of this folder becomes
the file's path, since the site does not have it. A formula of a docstring is written as in Sphinx, with ``:math:`` or
``.. math::``, and becomes MathML, for which browsers need no script. Public names become links.
"""

import re
from pathlib import Path
from typing import Any

import griffe
from latex2mathml.converter import convert

LINK = re.compile(r"\[(?P<text>[^\]]+)\]\((?P<path>\.\./[^)#\s]*)(?:#[^)\s]*)?\)")
ROLE = re.compile(r":math:`(?P<latex>[^`]+)`")
DIRECTIVE = re.compile(r"\.\. math::\s*(?P<latex>.*(?:\n[ \t]+\S.*)*)")
NAME = re.compile(r"(?<!`)`(?P<name>onepass\.[\w.]+)`(?!`)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    pages = Path(__file__).parent
    folder = Path(page.file.abs_src_path).parent

    def outside(link: re.Match[str]) -> str:
        if (folder / link["path"]).resolve().is_relative_to(pages):
            return link[0]
        text, path = link["text"], link["path"].replace("../", "")
        return text if path.strip("/") in text else f"{text} (`{path}`)"

    return LINK.sub(outside, markdown)


class Docstrings(griffe.Extension):
    """Formulas as MathML, and links to public names."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    text = DIRECTIVE.sub(lambda m: convert(" ".join(m["latex"].split()), display="block"), text)
    # Within a span, since Markdown takes a line that begins with another element for a block.
    text = ROLE.sub(lambda m: f"<span>{convert(' '.join(m['latex'].split()))}</span>", text)
    return NAME.sub(lambda m: f"[`{m['name']}`][{m['name']}]" if is_public(m["name"]) else m[0], text)


def is_public(name: str) -> bool:
    import onepass

    module, _, last = name.rpartition(".")
    found = {"onepass": onepass, "onepass.moe": onepass.moe}.get(module)
    return found is not None and last in found.__all__ and last != "moe"
