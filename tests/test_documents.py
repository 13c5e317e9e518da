"""The code of the README and the pages runs as it stands, and the reference has every public name."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import onepass

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
RUN = [ROOT / "README.md", *[ROOT / "docs" / name for name in ("index.md", "tutorials/trl.md", "tutorials/loop.md")]]
PAGES = sorted(ROOT.glob("docs/**/*.md"))


def blocks(page):
    return BLOCK.findall(page.read_text())


@pytest.mark.parametrize("page", RUN, ids=lambda page: page.name)
def test_its_code_runs(page, tmp_path):
    """Each block in a namespace of its own, and all blocks of a page in one process, which patches may change."""
    script = "\n".join(f"exec({block!r}, {{'__name__': '__main__'}})" for block in blocks(page))
    environment = os.environ | {"TRITON_INTERPRET": "", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "error:onepass", "-c", script], cwd=tmp_path, env=environment,
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert blocks(page) and done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_its_code_is_python(page):
    for block in blocks(page):
        ast.parse(block)


def test_the_reference_has_every_public_name():
    written = {
        name for page in ROOT.glob("docs/api/*.md") for name in re.findall(r"^::: (\S+)", page.read_text(), re.M)
    }
    public = {f"onepass.{name}" for name in onepass.__all__ if name != "moe"}
    public |= {f"onepass.moe.{name}" for name in onepass.moe.__all__}
    assert public <= written, public - written
    assert len(written - public) == 9  # of `onepass.autotune`, and `OnepassCallback`


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text()
    for page in PAGES:
        assert f": {page.relative_to(ROOT / 'docs')}" in navigation, page
