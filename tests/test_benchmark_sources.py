"""Which results of benchmarks are stale, since their sources have changed; and what tables say of it."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

import onepass
from benchmark_cases import run
from benchmarks import definitions, sources, table, tables
from benchmarks.versions import CHECKOUT
from onepass.autotune import ConfigStore, own
from onepass.kernels.softmax_statistics import softmax_statistics_kernel


def of_cross_entropy():
    logits = torch.randn(3, 40, requires_grad=True)
    onepass.cross_entropy(logits, torch.tensor([1, 2, 3])).backward()


def of_kl_div():
    logits = torch.randn(3, 40, requires_grad=True)
    onepass.kl_div(logits, torch.randn(3, 40)).backward()


def of_router():
    logits = torch.randn(3, 16, requires_grad=True)
    onepass.moe.softmax_topk(logits, 2).weights.sum().backward()


RUNS = {"cross_entropy": of_cross_entropy, "kl_div": of_kl_div, "softmax_topk": of_router}


@pytest.fixture(scope="module")
def recorded():
    return {name: sources.sources_of(run) for name, run in RUNS.items()}


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A copy of the package, whose files a test may change."""
    shutil.copytree(sources.PACKAGE, tmp_path / "onepass", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(sources, "PACKAGE", tmp_path / "onepass")
    return tmp_path / "onepass"


def test_comments_and_docstrings_are_no_code():
    code = b'"""Doc."""\nx = 1  # one\n\ndef f():\n    """Doc.\n\n    More.\n    """\n    return "#" f"{x}"  # two\n'
    same = b'x = 1\n# else\ndef f():\n    return "#" f"{x}"\n'
    assert definitions.code_of(code) == definitions.code_of(same) == b'x = 1\ndef f():\n    return "#" f"{x}"'
    assert definitions.code_of(code) != definitions.code_of(code.replace(b'"#"', b'"##"'))


def test_the_definitions_of_a_file():
    found = definitions.definitions(b"""
import a.b
from c import d as e, f
if e:
    from g import h
else:
    h = None
x = y = f(h)

@e
class C(a.b.D):
    z = x  # one
    def m(self):
        def inner():
            return f.g
        return inner

    class Inner:
        pass
""")
    assert found.keys() == {"a", "e", "f", "h", "x", "y", "C", "C.m", "C.Inner"}
    assert found["x"].code == found["y"].code == "x = y = f(h)\nf = c.f\n" and found["x"].names == {*"xyfh"}
    assert found["C"].names == {"e", "a", "a.b", "x", "z"}
    assert "def m" not in found["C"].code and "z = x" in found["C"].code
    assert found["C.m"].function and found["C.m"].names == {"f", "f.g", "inner"}
    assert found["a"].imported == ("a.b", "") and found["e"].imported == ("c", "d") and found["h"].imported is None


@pytest.mark.parametrize("file, before, after, changed, stale", [
    ("losses/cross_entropy.py", "def cross_entropy(", "def cross_entropy(_, ", "cross_entropy",
     {"cross_entropy"}),
    ("kernels/divergence.py", "def divergence_kernel(", "def divergence_kernel(_, ", "divergence_kernel", {"kl_div"}),
    ("moe/router.py", "def route(", "def route(_, ", "route", {"softmax_topk"}),
    ("kernels/launch.py", "def launch(", "def launch(_, ", "launch", {"cross_entropy", "kl_div", "softmax_topk"}),
    # A constant in a file of which no function is called, a class, and an import.
    ("core/moe_options.py", "MAX_EXPERTS, MAX_K = 1024", "MAX_EXPERTS, MAX_K = 512", "MAX_EXPERTS", {"softmax_topk"}),
    ("core/moe_options.py", "class RouterOptions(NamedTuple):", "class RouterOptions(NamedTuple, ):", "RouterOptions",
     {"softmax_topk"}),
    ("moe/router.py", "from onepass.backend import backend_of", "from onepass.backends import backend_of", "_forward",
     {"softmax_topk"}),
    # Functions that are not called, and new ones.
    ("kernels/divergence.py", "\nimport triton\n", "\nimport triton\n\n\ndef new():\n    pass\n", "", set()),
    ("moe/router.py", "def sigmoid_topk(", "def sigmoid_topk(_, ", "", set()),
    ("integrations/trl.py", "def ", "def  ", "", set()),
    ("cli/workloads.py", "def ", "def  ", "", set()),
])  # fmt: skip
def test_the_results_that_run_through_what_changed_are_stale(recorded, package, file, before, after, changed, stale):
    report = {"environment": {"commit": "abc"}, "sources": recorded}
    assert not any(sources.staleness(report, [name]) for name in recorded)
    text = (package / file).read_text()
    assert before in text
    (package / file).write_text(text.replace(before, after))
    assert {name for name in recorded if sources.staleness(report, [name])} == stale, sources.staleness(
        report, recorded
    )
    for name in stale:
        assert f"`{file}::{changed}`" in sources.staleness(report, [name])
        assert sources.staleness(report, [name]).endswith(" changed since this was measured (commit abc).")


def test_a_file_that_is_gone_has_changed(recorded, package):
    (package / "moe" / "router.py").unlink()
    changed = sources.changed_since(recorded["softmax_topk"])
    assert "moe/router.py::route" in changed and all(key.startswith("moe/router.py::") for key in changed)


def test_the_backward_and_the_device_functions_of_kernels_are_sources():
    logits = torch.randn(3, 40, requires_grad=True)
    found = sources.sources_of(lambda: onepass.entropy_from_logits(logits).sum().backward())
    assert "kernels/softmax_gradient.py::plan_for" in found and all(len(digest) == 12 for digest in found.values())
    # A compiled kernel runs no Python.
    names = {code.co_name for code in sources.functions_of_kernel(softmax_statistics_kernel)}
    assert {"softmax_statistics_kernel", "update"} <= names


def test_what_only_a_later_call_runs_through_is_a_source():
    """The first call plans launches, which later ones repeat by other functions."""
    logits, functions = torch.randn(3, 40), iter((onepass.softmax_statistics, onepass.entropy_from_logits))
    found = sources.sources_of(lambda: next(functions)(logits))
    assert any(key.endswith("::entropy_from_logits") for key in found)


def test_the_shipped_measurements_of_a_kernel_are_a_source_of_what_they_chose(package, monkeypatch):
    store = own.SHIPPED / "h100.json"
    records = [r for r in ConfigStore(store).records if r.kernel == "divergence_kernel"]
    assert records, "this test needs the name of another kernel"
    with monkeypatch.context() as of_package:  # the stores are those of the package that is imported
        of_package.setattr(sources, "PACKAGE", own.SHIPPED.parents[1])
        of_package.setattr(own, "collect_own", lambda: records)
        key = "autotune/shipped/h100.json::divergence_kernel"
        assert {name for name, run in RUNS.items() if key in sources.sources_of(run)} == {"kl_div"}
    before = {key: sources.hash_of(key)}
    path = package / "autotune" / "shipped" / "h100.json"
    file = json.loads(path.read_text())
    for kernel, field, value, stale in (
        ("divergence_kernel", "milliseconds", 1e3, []), ("softmax_statistics_kernel", "config", {"LANES": 7}, []),
        ("divergence_kernel", "config", {"LANES": 7}, [key]), ("divergence_kernel", "kernel", "other_kernel", [key]),
    ):  # fmt: skip
        records = [r | ({field: value} if r["kernel"] == kernel else {}) for r in file["records"]]
        path.write_text(json.dumps(file | {"records": records}))
        assert sources.changed_since(before) == stale, (kernel, field)
    path.unlink()
    assert sources.changed_since(before) == [key]


def test_a_result_without_hashes_is_of_an_earlier_version():
    report = {"environment": {"commit": "abc"}, "sources": {"jsd": {}}}
    assert sources.staleness(report, ["kl_div"]) == "Measured on an earlier version (commit abc)."


def test_documents_mark_stale_results(recorded, package, tmp_path, monkeypatch):
    for name in ("README.md", "docs", "benchmarks/results"):
        (shutil.copytree if (CHECKOUT / name).is_dir() else shutil.copy)(CHECKOUT / name, tmp_path / name)
    monkeypatch.setattr(table, "HERE", tmp_path / "benchmarks")
    path = tmp_path / "benchmarks" / "results" / "h100-kl-div.json"
    for name in ("versions", "lm"):  # whose hashes are those of the real package
        path.with_name(f"h100-{name}.json").unlink()
    report = json.loads(path.read_text())
    of = report["environment"]["commit"][:7]
    path.write_text(json.dumps(report | {"sources": {"kl_div": recorded["kl_div"], "jsd": recorded["kl_div"]}}))
    assert run("table").exit_code == 0
    page = (tmp_path / "docs" / "measured.md").read_text()
    section = page[page.index("## h100-kl-div") : page.index("## h100-linear-head")]
    assert section.count("earlier version") == 1, "of kl_div_reverse, which has no hashes"
    (package / "losses" / "kl_div.py").write_text("")
    result = run("table")
    assert result.exit_code == 0
    changed = (tmp_path / "docs" / "measured.md").read_text()
    section = changed[changed.index("## h100-kl-div") : changed.index("## h100-linear-head")]
    assert section.count(f"**Of an earlier version ({of}): its sources have changed since.**") == 2
    assert section.count(f"**Of an earlier version ({of}).**") == 1
    assert "h100-kl-div.json, kl_div, jsd: Stale: `losses/kl_div.py::" in result.output
    # Other results have hashes of the real package, whose files this one lacks.
    unmarked = (re.sub(r", earlier version|\*\*Of an earlier version.*\*\*", "", text) for text in (page, changed))
    before, after = ([line for line in text.splitlines() if line] for text in unmarked)
    assert before == after


def test_a_mark_that_all_operations_have_is_written_once():
    environment = {"commit": "abcdefghij"}
    report = {"environment": environment, "results": [{"operation": "jsd"}, {"operation": "kl_div"}]}
    assert tables.marks_of(report) == ("**Of an earlier version (abcdefg).**\n\n", {"jsd": "", "kl_div": ""})
    report["sources"] = {"jsd": {"losses/kl_div.py": sources.hash_of("losses/kl_div.py")}}
    assert tables.marks_of(report) == ("", {"jsd": "", "kl_div": "**Of an earlier version (abcdefg).**\n\n"})


@pytest.mark.parametrize("recorded, written", [
    ("onepass bench --op jsd --name x", "`python -m benchmarks logits --op jsd --name x`\n\n"),
    ("onepass bench-head --no-peers", "`python -m benchmarks heads --no-peers`\n\n"),
    ("python -m benchmarks lm --turns 1", "`python -m benchmarks lm --turns 1`\n\n"),
    ("", ""),
])  # fmt: skip
def test_tables_have_the_command_of_today(recorded, written):
    assert tables.command_of({"command": recorded} if recorded else {}) == written


def test_the_summary_leaves_out_few_rows():
    r = {"operation": "jsd", "pass": "forward+backward", "kernel_us": None, "vocab": 9, "ms": 1.0, "share_of_copy": 1.0}
    both = [r | {"implementation": name, "version": "1", "rows": n} for n in (512, 2048) for name in ("onepass", "x")]
    text = tables.summary({Path(): {"results": both, "environment": {"gpu": "NVIDIA H7 80GB", "commit": "abc"}}})
    assert "| 2048 × 9 | H7, earlier version |" in text and "512" not in text
