"""The code of the README, the notebook and the pages runs as it stands; the reference has every public name."""

import json
import os
import re
from pathlib import Path

import pytest

import forks
import onepass
import reading
from hub.build import build

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```(py\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
PAGES = sorted(ROOT.glob("docs/**/*.md"))
# Every block that begins with ```python is run. One that cannot be begins with ```py: of each page, how many and why.
NOT_RUN: dict[str, tuple[int, str]] = {}
# Each page runs in a process that is forked from one, which has imported the libraries once: a patch or a process group
# of one page does not reach another.
IMPORTS = """
import onepass, torch, torch.distributed.device_mesh
from transformers import LlamaForCausalLM, MixtralForCausalLM
from trl import DPOTrainer, GRPOTrainer, SFTTrainer
"""
RUN = """
import json, os, sys, traceback
failed = []
for path, blocks in json.load(sys.stdin):
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        namespace, code = {"__name__": "__main__"}, 1
        try:
            for line, block in blocks:
                exec(compile("\\n" * line + block, path, "exec"), namespace)
            code = 0
        except BaseException:
            with open("errors", "a") as file:
                traceback.print_exc(file=file)
        sys.stdout.flush()
        os._exit(code)
    failed += [path] * (os.waitpid(child, 0)[1] != 0)
sys.exit(f"broken: {failed}" if failed else 0)
"""


def blocks(page, *fences):
    """The line before each block of Python of a page, and the block."""
    text = page.read_text()
    return [(text[: m.start(2)].count("\n"), m[2]) for m in BLOCK.finditer(text) if m[1] in fences]


def broken(pages, folder, imports=""):
    """What is wrong with the blocks of these pages: nothing, or a traceback with the page and the line."""
    code = json.dumps([(str(page), blocks(page, "python")) for page in pages])
    environment = os.environ | {"TRITON_INTERPRET": "", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = forks.run(
        imports + RUN, stdin=code, folder=folder, environment=environment, warnings=("error:onepass",), timeout=300
    )
    if not done.returncode:
        return ""
    errors = folder / "errors"
    return (errors.read_text() if errors.exists() else "") + done.stderr[-500:]


@forks.GROUP
def test_its_code_runs(tmp_path):
    """The blocks of a page run one after the other in one namespace, as if a reader had pasted them.

    So a page defines what its blocks use, in an earlier block or in the same one.
    """
    build(tmp_path / "build" / "kernel")  # as `make kernel`, by which integrations.md begins
    pages = [page for page in [ROOT / "README.md", *PAGES] if blocks(page, "python")]
    assert len(pages) > 12
    errors = broken(pages, tmp_path, IMPORTS)
    assert not errors, errors


@forks.GROUP
def test_a_broken_block_is_found(tmp_path):
    """By its page and its line; the pages after it run all the same."""
    texts = {"broken.md": "```python\nx = 1\n```\ntext\n```python\nassert x == 2\n```\n",
             "whole.md": "```python\nopen('ran', 'w')\n```\n", "undefined.md": "```python\nx\n```\n"}  # fmt: skip
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    errors = broken([tmp_path / name for name in texts], tmp_path)
    assert f'File "{tmp_path / "broken.md"}", line 6' in errors and "NameError" in errors
    assert "whole.md" not in errors and (tmp_path / "ran").exists()


def test_what_is_not_run_has_a_reason():
    any_python = re.compile(r"^[ \t]*[`~]{3,}[ \t]*(?:py|pycon|python3?)\b", re.MULTILINE | re.IGNORECASE)
    for page in [ROOT / "README.md", *PAGES]:
        allowed, _ = NOT_RUN.get(str(page.relative_to(ROOT)), (0, ""))
        assert len(blocks(page, "py")) == allowed, page
        assert len(any_python.findall(page.read_text())) == len(blocks(page, "python")) + allowed, page


@forks.GROUP
def test_the_notebook_runs(tmp_path):
    """Its cells, one after the other; and what it shows is so."""
    cells = json.loads((ROOT / "examples" / "quickstart.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    claims = """
assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(of_torch, of_onepass))
assert mib["F.linear, F.cross_entropy"][-1] > 60 and mib["onepass.linear_cross_entropy"] == [0] * len(vocabularies)
assert rewards[-1] > 0.9 and entropies[-1] < entropies[0] / 2
"""
    environment = os.environ | {"TRITON_INTERPRET": "", "CUDA_VISIBLE_DEVICES": "", "MPLBACKEND": "Agg"}
    done = forks.run("\n".join([*code, claims]), folder=tmp_path, environment=environment, warnings=("error:onepass",))
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_reference_has_every_public_name():
    text = "\n".join(page.read_text() for page in ROOT.glob("docs/api/*.md"))
    # A function whose module has its name is written with both, under a heading of its own.
    text = re.sub(r"^::: \S+\n +options:\n +heading:", ":::", text, flags=re.M)
    written = set(re.findall(r"^::: (\S+)", text, re.M))
    public = {f"onepass.{name}" for name in onepass.__all__ if name != "moe"}
    public |= {f"onepass.moe.{name}" for name in onepass.moe.__all__}
    assert public <= written, public - written
    assert len(written - public) == 10  # of `onepass.autotune`, and the callbacks


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text()
    for page in PAGES:
        assert f": {page.relative_to(ROOT / 'docs')}" in navigation, page


def test_no_page_is_harder_to_read_than_those_of_pytorch():
    pytest.importorskip("textstat")
    limit, pages = reading.of_torch(), reading.of_pages()
    assert limit > 40 and len(pages) > 20
    assert not {page: ease for page, (ease, _) in pages.items() if ease < limit}


def test_what_is_prose():
    page = """# A title\n\nA *line* with `code.of(x)`, [a link](docs/moe.md#part) and $`x^2`$.\n\n| a | table |\n
```python\ncode = 1\n```\n- An entry\n  of a list.\n- Another one, here.\n<!-- a comment of words -->\n"""
    prose = ["A line with x, a link and x.", "An entry of a list.", "Another one, here."]
    assert reading.prose_of_page(page) == prose
    docstring = """The sum of :attr:`input` and ``1``.\n
    Args:\n        input: a tensor of words\n\n    .. math::\n        a = b\n
    Note:\n        See `the paper <address>`__ for more.\n\n        >>> code = 1\n    """
    assert reading.prose_of_docstring(docstring) == ["The sum of x and x.", "See the paper for more."]
