"""What the pages and docstrings need beyond Markdown to become a site (`make docs`).

mkdocs calls `on_page_markdown` and `on_post_page`, and mkdocstrings loads `Docstrings`. A link to a file outside of
this folder becomes the file's path, since the site does not have it. A formula becomes MathML, for which browsers need
no script: in a docstring it is written as in Sphinx, with ``:math:`` or ``.. math::``, and in a page as on GitHub,
between ``$` `` and `` `$`` or in a block ``math``. Public names become links, and pictures links to themselves.
"""

import re
from pathlib import Path
from typing import Any

import griffe
from latex2mathml.converter import convert

LINK = re.compile(r"\[(?P<text>[^\]]+)\]\((?P<path>\.\./[^)#\s]*)(?:#[^)\s]*)?\)")
ROLE = re.compile(r":math:`(?P<latex>[^`]+)`")
DIRECTIVE = re.compile(r"\.\. math::\s*(?P<latex>.*(?:\n[ \t]+\S.*)*)")
INLINE = re.compile(r"\$`(?P<latex>[^`]+)`\$")
BLOCK = re.compile(r"^```math\n(?P<latex>.*?)^```", re.MULTILINE | re.DOTALL)
PICTURE = re.compile(r"(?<!\[)!\[[^\]]*\]\((?P<path>[^)\s#]+)(?:#[\w-]+)?\)")
SHORT = re.compile(r"<(?P<tag>td|th|h[1-6])\b[^>]*>.*?</(?P=tag)>", re.DOTALL)
WITHIN = re.compile(r"(?<=[a-z])(?=[A-Z][a-z])")  # a long name, as in LigerFusedLinearCrossEntropyLoss
BETWEEN = re.compile(r"(?<=[A-Za-z])[._/](?=\w)|(?<=\w)[(=](?=[^\s)])")  # parts of an expression
FUNCTION = re.compile(r"(<mi>(?:log|exp|tanh|max)</mi>)(?=<m(?:i|n|sub|sup|row)\b)")
NAME = re.compile(r"(?<!`)`(?P<name>onepass\.[\w.]+)`(?!`)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    pages = Path(__file__).parent
    folder = Path(page.file.abs_src_path).parent

    def outside(link: re.Match[str]) -> str:
        if (folder / link["path"]).resolve().is_relative_to(pages):
            return link[0]
        text, path = link["text"], link["path"].replace("../", "")
        return text if path.strip("/") in text else f"{text} (`{path}`)"

    text = BLOCK.sub(lambda m: formula(m["latex"], block=True), LINK.sub(outside, markdown))
    text = PICTURE.sub(lambda m: f"[{m[0]}]({m['path']})", text)
    return INLINE.sub(lambda m: formula(m["latex"]), text)


def on_post_page(output: str, **_: Any) -> str:
    """Marks where names in tables and headings may break; after the index of the search was made."""

    def with_breaks(text: str) -> str:
        text = re.sub(r"\w{17,}", lambda name: WITHIN.sub("<wbr>", name[0]), text)
        return BETWEEN.sub(lambda sign: f"{sign[0]}<wbr>", text)

    def marked(part: re.Match[str]) -> str:
        # Text alone: what lies between tags, and not attributes or the names of characters.
        return re.sub(r"(?<=>)[^<>&]+(?=[<&])", lambda text: with_breaks(text[0]), part[0])

    return SHORT.sub(marked, output)


def formula(latex: str, block: bool = False) -> str:
    math = convert(" ".join(latex.split()), display="block" if block else "inline")
    math = FUNCTION.sub(r'\1<mspace width="0.17em"/>', math)
    # Within a span, since Markdown takes a line that begins with another element for a block.
    return f'<span class="formula">{math}</span>' if block else f"<span>{math}</span>"


class Docstrings(griffe.Extension):
    """Formulas as MathML, and links to public names."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    text = DIRECTIVE.sub(lambda m: formula(m["latex"], block=True), text)
    text = ROLE.sub(lambda m: formula(m["latex"]), text)
    text = re.sub(r"::$", ":", text, flags=re.MULTILINE)  # before a block of code
    return NAME.sub(lambda m: f"[`{m['name']}`][{m['name']}]" if is_public(m["name"]) else m[0], text)


def is_public(name: str) -> bool:
    import onepass

    module, _, last = name.rpartition(".")
    found = {"onepass": onepass, "onepass.moe": onepass.moe}.get(module)
    return found is not None and last in found.__all__ and last != "moe"
