"""The code of the README, the notebook and the pages runs as it stands; the reference has every public name."""

import ast
import json
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


def test_its_code_runs(tmp_path):
    """Each block in a namespace of its own, and all of them in one process, which a patch may change."""
    code = [(page.name, n, block) for page in RUN for n, block in enumerate(blocks(page))]
    assert {name for name, _, _ in code} == {page.name for page in RUN}
    script = "\n".join(
        f"exec(compile({block!r}, '{name}, block {n}', 'exec'), {{'__name__': '__main__'}})" for name, n, block in code
    )
    environment = os.environ | {"TRITON_INTERPRET": "", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "error:onepass", "-c", script], cwd=tmp_path, env=environment,
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


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
    command = [sys.executable, "-W", "error:onepass", "-c", "\n".join([*code, claims])]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]


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
