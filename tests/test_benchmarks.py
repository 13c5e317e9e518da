"""The benchmarks of a checkout, for real but small: their commands, and what they write."""

import io
import itertools
import json
import time

import pytest
import torch
from rich.console import Console

import forks
from benchmark_cases import run
from benchmarks import decoder, overlap, table, workers
from benchmarks.harness import follow
from benchmarks.logits import PASSES
from benchmarks.operations_logits import OPERATIONS
from benchmarks.trainers import Kernel, head_ms


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


def test_an_operation_of_heads_that_no_peer_has(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "")
    how = "--no-compile", "--rounds", 1, "--milliseconds", 1
    result = run("heads", "--op", "linear_dpo", "--shape", "8x4x16", *how, "--out", tmp_path)
    assert result.exit_code == 0, result.output


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


@pytest.mark.exhaustive
@forks.GROUP
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


def test_the_kernels_of_a_head():
    """Those between the decoder's forward and backward, though some of these have the same names and grids."""

    def kernels(of, *times):
        return [Kernel((name, "[1, 1, 1]"), ms) for name, ms in zip(of, times or itertools.repeat(1.0))]

    decoder = kernels("abc" + "x" + "cba")
    assert head_ms(kernels("abccba"), decoder) == 0
    assert head_ms(kernels("abc" + "yaz" + "cba", 1, 1, 1, 5, 7, 11, 1, 1, 1), decoder) == 23
    assert head_ms(kernels("abc" + "yxb" + "cba", 1, 1, 1, 5, 1.5, 11, 1, 1, 1), decoder) == 16
    assert head_ms(kernels("abc" + "y" + "cba" + "z", *[1] * 3, 5, *[1] * 3, 9), decoder) == 14
    assert head_ms(kernels("yz", 2, 3), decoder) == 5 and head_ms(kernels("a"), []) == 1
    assert head_ms(kernels("abc" + "x" + "cba", 1, 1, 1, 9, 1, 1, 1), decoder) == 9, "a GEMM of another size"
    assert head_ms([], decoder) is None, "a CPU"
