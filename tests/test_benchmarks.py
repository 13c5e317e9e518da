"""The benchmarks of a checkout, for real but small: their commands, and which results are stale."""

import ast
import io
import itertools
import json
import os
import shutil
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import forks
import onepass
from benchmarks import (
    decoder,
    definitions,
    overlap,
    sources,
    table,
    tables,
    versions,
    versions_operations,
    versions_worker,
    workers,
)
from benchmarks.__main__ import app
from benchmarks.harness import follow
from benchmarks.logits import PASSES
from benchmarks.operations_logits import OPERATIONS
from benchmarks.versions import CHECKOUT
from onepass.autotune import ConfigStore, own
from onepass.kernels.softmax_statistics import softmax_statistics_kernel


def run(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def test_help_lists_the_commands():
    result = run("--help")
    commands = ["logits", "heads", "shards", "experts", "expert-parallel", "trainers", "lm", "cpu", "decoder"]
    commands += ["autotune", "versions", "table"]
    assert result.exit_code == 0 and all(command in result.output for command in commands)


def test_a_bar_names_what_is_running(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")  # a dumb one has no bars
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    for n, name in enumerate(follow(["onepass", "torch eager"], "jsd 300x104", str, console)):
        time.sleep(0.3)  # the bar is drawn ten times a second
        shown = console.file.getvalue()
        assert f"{name}: jsd 300x104" in shown and (n > 0 or "torch eager" not in shown)


def test_logits_writes_what_it_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "")
    monkeypatch.setattr("onepass.cli.timing.FEWEST_CALLS", 2)
    monkeypatch.setattr("onepass.cli.timing.WARMUP_CALLS", 1)
    # TRL's kernels would run in the interpreter here.
    alone = "--no-compile", "--no-peers", "--milliseconds", 1
    result = run("logits", "--shape", "300x104", *alone, "--masked", 0.5, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "logits.json").read_text())
    assert report["environment"]["torch"] == torch.__version__ and report["copy_gb_per_s"] > 0
    assert "jsd 300x104 fp32: onepass, torch eager\n" in result.output, "what runs, before it does"
    rows = report["results"]
    ours = {(r["operation"], r["pass"]): r for r in rows if r["implementation"] == "onepass"}
    assert set(ours) == set(itertools.product(OPERATIONS, PASSES))
    assert all(r["ms"] > 0 and r["wall_ms"] > 0 and r["masked"] == 0.5 for r in rows)
    assert all(r["error"] < 1e-4 for (_, name), r in ours.items() if name == "forward")
    assert report["sources"].keys() == OPERATIONS.keys()
    assert "losses/kl_div.py::kl_div" in report["sources"]["jsd"]
    assert not any(key.startswith("moe/") for key in report["sources"]["jsd"])
    assert (tmp_path / "logits.png").stat().st_size > 10_000


def test_cpu_writes_what_it_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "")
    monkeypatch.setattr("benchmarks.cpu.FEWEST_TURNS", 2)
    monkeypatch.setattr("benchmarks.cpu.peak_memory", lambda run, device: 1)  # a profiler, which takes long to start
    threads = torch.get_num_threads()
    shapes = "--shape", "64x500", "--shape", "64x8x500"
    result = run("cpu", *shapes, "--threads", threads, "--seconds", 0, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "cpu.json").read_text())
    found = {(r["operation"], r["dtype"], r["implementation"]) for r in report["results"]}
    head = {("linear_cross_entropy", "fp32", name) for name in ("torch", "onepass")}
    logits = {("cross_entropy", d, n) for d, n in itertools.product(("fp32", "bf16"), ("torch", "onepass"))}
    assert found == {*head, *logits, ("cross_entropy", "bf16", "torch, rounded")}
    assert all(r["ms"] > 0 and r["peak_bytes"] > 0 and r["turns"] >= 2 for r in report["results"])
    assert any(key.startswith("reference/softmax.py::") for key in report["sources"]["linear_cross_entropy"])
    assert table.kind_of(report) == "cpu" and "| 64 × 8 × 500 | fp32 |" in table.cpu_table(tmp_path, report)


def test_heads_writes_what_it_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "")
    alone = "--no-compile", "--no-peers", "--rounds", 1, "--milliseconds", 5, "--masked", 0.5
    result = run("heads", "--op", "linear_policy_loss", "--shape", "40x16x100", *alone, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "heads.json").read_text())
    what = "linear_policy_loss, 40 x 16 x 100, fp32, 50% of the rows masked"
    for running in "error and memory: onepass, torch eager\n", "time in turns: ":
        assert f"{what}, {running}" in result.output, result.output
    bare, ours, eager = report["results"]
    assert [r["implementation"] for r in (bare, ours, eager)] == ["three bare GEMMs", "onepass", "torch eager"]
    assert [ours[k] for k in ("rows", "hidden", "vocab", "masked")] == [40, 16, 100, 0.5]
    assert bare["ratio"] == 1 and bare["error"] is None
    assert all(r["ms"] == r["runs"][0] > 0 and r["error"] < 1e-4 for r in (ours, eager))
    assert "losses/linear_loss.py::linear_loss" in report["sources"]["linear_policy_loss"]
    assert report["not_run"] == {} and (tmp_path / "heads.png").stat().st_size > 5_000


def test_experts_writes_what_it_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "")
    alone = "--no-peers", "--rounds", 1, "--milliseconds", 5, "--routing", "zipf"
    result = run("experts", "--shape", "20x16x8x4x2", *alone, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "experts.json").read_text())
    assert [r["implementation"] for r in report["results"]] == ["dense", "onepass"] * 3
    assert [r["operation"] for r in report["results"][1::2]] == ["experts_forward", "experts", "experts_lora"]
    assert [report["results"][0][k] for k in ("tokens", "intermediate", "experts", "routing")] == [20, 8, 4, "zipf"]
    assert all(r["ms"] == r["runs"][0] > 0 and r["error"] < 1e-4 for r in report["results"][1::2])
    assert (
        all("moe/experts.py::expert_mlp" in found for found in report["sources"].values())
        and len(report["sources"]) == 3
    )
    assert report["not_run"] == {} and (tmp_path / "experts.png").stat().st_size > 5_000


def test_decoder_writes_what_its_processes_measured(tmp_path, monkeypatch):
    """Real models are built where there is a GPU; here the processes are not started."""
    measured = {"runs": [2.0, 4.0], "peak_bytes": 3 << 30, "busy_ms": None, "layers": 2, "experts": ["nf4"]}
    whole = {"layers": 48, "bytes_of_layer": 1 << 30, "peak_bytes": 49 << 30}

    class Answers:
        def __init__(self, module, way, environment):
            self.way = way

        def ask(self, do, name, **sizes):
            if self.way == "PEFT" and name == "tiny":
                raise workers.Failure("out of memory")
            losses = [1.0, 0.5 if self.way == "PEFT" else 0.498]
            return {"moe/experts.py": "0"} if do == "sources" else {**measured, "losses": losses, "whole": whole}

        def stop(self):
            pass

    monkeypatch.setattr(decoder, "Worker", Answers)
    given = "--model", "qwen3-30b-a3b", "--model", "tiny", "--layers", 2
    result = run("decoder", *given, "--out", tmp_path)
    assert result.exit_code == 0 and "losses differ by at most 2.0e-03" in result.output, result.output
    assert "not run: tiny, PEFT: out of memory" in result.output
    report = json.loads((tmp_path / "decoder.json").read_text())
    assert [(r["model"], r["way"]) for r in report["results"]][1:] == [
        ("qwen3-30b-a3b", "onepass"),
        ("tiny", "onepass"),
    ]
    assert report["results"][0]["ms"] == 3.0 and report["sources"]["tiny"] == {"moe/experts.py": "0"}
    assert table.kind_of(report) == "decoder"
    text = table.decoder_table(tmp_path / "decoder.json", report)
    assert "| qwen3-30b-a3b | onepass | 3 | 0.4980 | 3.0 | 48 | 49.0 |" in text


def test_shards_writes_what_it_measured(tmp_path, monkeypatch):
    """With one process, which is this one."""
    monkeypatch.setenv("TRITON_INTERPRET", "")
    operations = "--op", "log_probs_and_entropy", "--op", "linear_cross_entropy", "--shape", "6x40", "--shape", "6x4x40"
    result = run("shards", "--processes", 1, "--rounds", 1, "--no-peers", *operations, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "shards.json").read_text())
    assert report["processes"] == 1 and not report["not_run"]
    ours = [r for r in report["results"] if r["implementation"] == "onepass"]
    assert [r["operation"] for r in ours] == ["log_probs_and_entropy", "linear_cross_entropy"]
    assert all(r["error"] < 1e-5 and r["ratio"] > 0 for r in ours) and len(report["results"]) == 4
    assert any(key.startswith("softmax/shards.py::") for key in report["sources"]["log_probs_and_entropy"])


@forks.GROUP_OF_SPAWN
def test_expert_parallel_writes_what_its_processes_measured(tmp_path, monkeypatch):
    """Two processes, which exchange tokens by gloo."""
    pytest.importorskip("peft")
    pytest.importorskip("transformers.distributed.expert_parallel", reason="transformers has it from 5.23 on")
    monkeypatch.setenv("TRITON_INTERPRET", "")
    monkeypatch.setattr("benchmarks.processes.spawn", forks.spawn)
    chosen = "--op", "experts_lora", "--shape", "6x16x8x4x2", "--rounds", 1
    result = run("expert-parallel", *chosen, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "expert-parallel.json").read_text())
    assert report["processes"] == 2 and report["environment"]["transformers"]
    ours, peer = (
        {r["exchange"]: r for r in report["results"] if r["implementation"] == name}
        for name in ("onepass", "grouped_mm, adapters multiplied out")
    )
    assert list(ours) == ["none", "all_to_all", "onepass", "all_reduce"]
    assert list(peer) == ["none", "all_to_all", "all_reduce"]
    assert [r["processes"] for r in ours.values()] == [1, 2, 2, 2]
    for r in (*ours.values(), *peer.values()):
        assert r["error"] < 1e-5 and r["ms"] == r["runs"][0] > 0
    assert ours["all_to_all"]["scaling"] == ours["none"]["ms"] / ours["all_to_all"]["ms"]
    assert all(peer[e]["ratio"] == 1 and ours[e]["ratio"] == ours[e]["ms"] / peer[e]["ms"] for e in peer)
    assert ours["onepass"]["ratio"] == ours["onepass"]["ms"] / peer["all_to_all"]["ms"]
    files = {key.partition("::")[0] for key in report["sources"]["experts_lora"]}
    assert {f"integrations/expert_{name}.py" for name in ("shards", "exchange")} < files
    why = list(report["not_run"].values())
    assert len(why) == 2 and all("mixed torch.Tensor and DTensor" in error for error in why), "of PEFT alone"
    assert table.kind_of(report) == "expert-parallel"
    text = table.expert_parallel_table(tmp_path / "expert-parallel.json", report)
    assert "| `experts_lora` | all_reduce | 2 | **onepass** |" in text and "6 tokens a GPU" in text


def test_the_share_of_an_exchange_that_is_hidden(tmp_path):
    timeline = [("ncclDevKernel_AllReduce", 10.0, 20.0), ("nvjet_gemm", 12.0, 16.0), ("scale_kernel", 14.0, 18.0)]
    assert overlap.draw_overlap([("nvjet_gemm", 0.0, 9.0), *timeline], tmp_path / "overlap.png") == 0.6
    assert (tmp_path / "overlap.png").stat().st_size


@pytest.mark.parametrize("command", ["logits", "heads", "experts", "expert-parallel"])
@pytest.mark.parametrize("arguments", [("--shape", "8192"), ("--op", "softmax"), ("--dtype", "int8")])
def test_a_benchmark_refuses_what_it_does_not_know(command, arguments):
    result = run(command, *arguments)
    assert result.exit_code == 2 and "expected" in result.output


# Which results are stale.


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


def test_a_shipped_measurement_is_a_source_of_what_it_chose(monkeypatch):
    store = own.SHIPPED / "h100.json"
    records = [r for r in ConfigStore(store).records if r.kernel.startswith("divergence")]
    assert records, "this test needs the name of another kernel"
    monkeypatch.setattr(own, "collect_own", lambda: records)
    found = {name for name, run in RUNS.items() if "autotune/shipped/h100.json" in sources.sources_of(run)}
    assert found == {"kl_div"}


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
    assert section.count("**Of an earlier version (f07f5ba): its sources have changed since.**") == 2
    assert section.count("**Of an earlier version (f07f5ba).**") == 1
    assert "h100-kl-div.json, kl_div, jsd: Stale: `losses/kl_div.py::" in result.output
    # Other results have hashes of the real package, whose files this one lacks.
    before, after = ([x for x in text.splitlines() if x and "earlier version" not in x] for text in (page, changed))
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
    text = tables.summary({Path(): {"results": both}})
    assert "| 2048 × 9 |" in text and "512" not in text


# Two versions.


@pytest.fixture(scope="module")
def baseline():
    """This version, as the baseline of itself."""
    with versions.renamed(CHECKOUT) as folder, pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield folder


@pytest.fixture
def started(monkeypatch, baseline):
    """The arguments of the workers that were started, which answer in this process."""
    found = []

    class InProcess:
        def __init__(self, module, *arguments, environment):
            found.append(arguments)

        def ask(self, do, **request):
            return versions_worker.answer_to({"do": do, **request})

        def stop(self):
            pass

    monkeypatch.setattr(versions, "Worker", InProcess)
    return found


@pytest.mark.exhaustive
def test_every_operation_of_two_versions_runs(monkeypatch, baseline):
    monkeypatch.setenv("TRITON_INTERPRET", "")
    for case in [case for few in (False, True) for case in versions.cases_of(versions.NAMES, True, few)]:
        found = versions_worker.compare(**case, rounds=1, tiny=True)
        assert set(found) == set(case["passes"]), found
        assert all(len(times) == 1 and times[0] > 0 for name in found for times in found[name].values())


def test_the_baseline_is_another_package(baseline):
    old = getattr(versions_worker.versions()["old"], versions.BASELINE)
    assert old is not onepass and Path(old.__file__).is_relative_to(baseline)
    assert old.cross_entropy.__module__.split(".")[0] == versions.BASELINE


def test_two_versions_are_compared(started, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "")
    chosen = "--op", "entropy", "--op", "softmax_topk", "--tiny", "--rounds", 3, "--processes", 2
    result = run("versions", "--baseline", CHECKOUT, *chosen, "--names", "after", "before", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "versions.json").read_text())
    assert report["failed"] == [] and set(report["sources"]) == {"entropy", "softmax_topk"}
    found = [(r["operation"], r["pass"], len(r["new_ms"]), len(r["old_ms"])) for r in report["results"]]
    assert found == [
        ("softmax_topk", versions.WALL, 2, 2),
        ("entropy", versions.BOTH, 3, 3),
        ("softmax_topk", versions.FORWARD, 3, 3),
        ("softmax_topk", versions.BOTH, 3, 3),
    ]
    assert all(r["least"] <= r["ratio"] <= r["most"] for r in report["results"])
    assert started == [("2",), ("2",), ()], "each process for few rows on two cores, and one for many"


def test_the_version_that_fails_is_named(started, monkeypatch):
    """The operation is reported, and the others go on in another process."""
    old = versions_worker.versions()["old"]
    first, *others = old.OPERATIONS
    monkeypatch.setattr(old, "OPERATIONS", [first._replace(call=lambda *inputs: 1 / 0), *others])
    report = {"tiny": True, "rounds": 1, "processes": 2, "results": [], "sources": {}, "failed": []}
    cases = [c for c in versions.cases_of(["cross_entropy", "softmax_topk"], True, few=True)][-2:]
    versions.compare_few_rows(Path(), cases, report, versions.new_console())
    assert [r["operation"] for r in report["results"]] == ["softmax_topk"]
    [failure] = report["failed"]
    assert failure["operation"] == "cross_entropy" and set(failure["errors"]) == {"old"}
    assert "ZeroDivisionError" in failure["errors"]["old"] and len(started) == 3


def test_a_worker_answers_errors_and_tells_when_it_ends(monkeypatch):
    monkeypatch.setattr(workers, "SECONDS_TO_ANSWER", 60)
    # Not as tests.echo_worker: textstat installs a package of the name tests.
    path = os.pathsep.join(map(str, (CHECKOUT, CHECKOUT / "tests")))
    worker = workers.Worker("echo_worker", environment={"PYTHONPATH": path})
    try:
        assert worker.ask("echo", value=[1]) == [1]
        with pytest.raises(workers.Failure, match="KeyError"):
            worker.ask("fail")
        assert worker.ask("echo", value=2) == 2
        with pytest.raises(workers.Failure, match="the process ended: 3"):
            worker.ask("exit")
    finally:
        worker.stop()


def test_the_operations_import_nothing_that_another_version_may_lack():
    imports = ast.parse(Path(versions_operations.__file__).read_text()).body
    names = {node.module for node in imports if isinstance(node, ast.ImportFrom)}
    assert not any(name.startswith(("onepass", "benchmarks")) for name in names)
