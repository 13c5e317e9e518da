"""The commands, for real but small."""

import itertools
import json
import re

import pytest
import torch
from typer.testing import CliRunner

from onepass.autotune import AutotuneRecord
from onepass.cli import distill
from onepass.cli.app import app
from onepass.cli.bench import PASSES
from onepass.cli.implementations import OPERATIONS


def run(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def test_help_lists_the_commands():
    result = run("--help")
    assert result.exit_code == 0
    assert all(command in result.output for command in ("demo", "bench", "bench-head", "doctor"))


@pytest.mark.parametrize("path", ["", "1"], ids=["eager", "interpreter"])
def test_doctor_finds_no_fault(monkeypatch, path):
    monkeypatch.setenv("TRITON_INTERPRET", path)
    result = run("doctor")
    assert result.exit_code == 0, result.output
    assert "18 of 18 checks passed" in result.output or torch.cuda.is_available()


def test_doctor_sees_a_wrong_gradient(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "")
    right = torch.Tensor.copy_
    monkeypatch.setattr("torch.Tensor.copy_", lambda self, other: right(self, other * 1.01))
    result = run("doctor")
    assert result.exit_code == 1 and "FAIL" in result.output


def test_bench_writes_what_it_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "")
    monkeypatch.setattr("onepass.cli.bench.ROUNDS", 2)  # the walls of few rows, for which a CPU takes minutes
    # TRL's kernels would run in the interpreter here.
    alone = "--no-compile", "--no-peers", "--milliseconds", 5
    result = run("bench", "--shape", "300x104", *alone, "--masked", 0.5, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "bench.json").read_text())
    assert report["environment"]["torch"] == torch.__version__ and report["copy_gb_per_s"] > 0
    rows = report["results"]
    ours = {(r["operation"], r["pass"]): r for r in rows if r["implementation"] == "onepass"}
    assert set(ours) == set(itertools.product(OPERATIONS, PASSES))
    assert all(r["ms"] > 0 and r["masked"] == 0.5 for r in rows)
    assert all(r["error"] < 1e-4 for (_, name), r in ours.items() if name == "forward")
    assert (tmp_path / "bench.png").stat().st_size > 10_000


def test_bench_head_writes_what_it_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "")
    alone = "--no-compile", "--no-peers", "--rounds", 1, "--masked", 0.5
    result = run("bench-head", "--op", "linear_policy_loss", "--shape", "40x16x100", *alone, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "bench-head.json").read_text())
    bare, ours, eager = report["results"]
    assert [r["implementation"] for r in (bare, ours, eager)] == ["three bare GEMMs", "onepass", "torch eager"]
    assert [ours[k] for k in ("rows", "hidden", "vocab", "masked")] == [40, 16, 100, 0.5]
    assert bare["ratio"] == 1 and bare["error"] is None
    assert all(r["ms"] == r["runs"][0] > 0 and r["error"] < 1e-4 for r in (ours, eager))
    assert report["not_run"] == {} and (tmp_path / "bench-head.png").stat().st_size > 5_000


def test_bench_experts_writes_what_it_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "")
    alone = "--no-peers", "--rounds", 1, "--milliseconds", 5, "--routing", "zipf"
    result = run("bench-experts", "--shape", "20x16x8x4x2", *alone, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "bench-experts.json").read_text())
    assert [r["implementation"] for r in report["results"]] == ["dense", "onepass"] * 3
    assert [r["operation"] for r in report["results"][1::2]] == ["experts_forward", "experts", "experts_lora"]
    assert [report["results"][0][k] for k in ("tokens", "intermediate", "experts", "routing")] == [20, 8, 4, "zipf"]
    assert all(r["ms"] == r["runs"][0] > 0 and r["error"] < 1e-4 for r in report["results"][1::2])
    assert report["not_run"] == {} and (tmp_path / "bench-experts.png").stat().st_size > 5_000


@pytest.mark.parametrize("command", ["bench", "bench-head", "bench-experts"])
@pytest.mark.parametrize("arguments", [("--shape", "8192"), ("--op", "softmax"), ("--dtype", "int8")])
def test_bench_refuses_what_it_does_not_know(command, arguments):
    result = run(command, *arguments)
    assert result.exit_code == 2 and "expected" in result.output


def test_demo_trains_the_same_curve(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "")
    record = AutotuneRecord("k", "local", "0", {}, [], {}, None)
    monkeypatch.setattr("onepass.autotune.callback.collect", lambda: [record])
    arguments = "--steps", 3, "--device", "cpu", "--autotune-report", tmp_path / "autotuned.jsonl"
    result = run("demo", *arguments, "--out", tmp_path / "curves.png")
    assert result.exit_code == 0, result.output
    lines = (tmp_path / "autotuned.jsonl").read_text().splitlines()
    assert [AutotuneRecord.from_json(json.loads(line)) for line in lines] == [record], "once"
    assert run("demo", "--distill", *arguments).exit_code == 2
    assert "largest difference" in result.output and "over 3 steps" in result.output
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_demo_trains_the_same_curves_from_hidden_states(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "")
    arguments = "--head", "linear", "--steps", 3, "--vocab", 512, "--device", "cpu"
    result = run("demo", *arguments, "--out", tmp_path / "curves.png")
    assert result.exit_code == 0, result.output
    for series in "training loss", "mean entropy":
        verdict = rf"largest difference of the {series} \S+ over 3 steps \(below 1e-03\)"
        assert re.search(verdict, result.output), result.output
    assert (tmp_path / "curves.png").stat().st_size > 10_000


@pytest.mark.parametrize("taught", [True, False])
def test_demo_distils_and_fails_without_a_gain(tmp_path, monkeypatch, taught):
    monkeypatch.setenv("TRITON_INTERPRET", "")
    monkeypatch.setattr(distill, "TEACHER_STEPS", 6)
    if not taught:
        monkeypatch.setattr(distill, "distillation", lambda teacher: distill.hard_labels)
    result = run("demo", "--distill", "--steps", 3, "--device", "cpu", "--out", tmp_path / "curves.png")
    assert result.exit_code == (0 if taught else 1), result.output
    assert ("not below" in result.output) is not taught
    assert (tmp_path / "curves.png").stat().st_size > 10_000
