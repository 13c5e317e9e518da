"""The commands, for real but small."""

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import forks
import onepass
from onepass.autotune import AutotuneRecord
from onepass.cli import demo, demo_curve, demo_report, distill, doctor
from onepass.cli.app import app
from onepass.cli.autotune import sizes_of
from onepass.cli.environment import commit
from onepass.cli.tables import table_of


def run(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


OF_EXPERTS = dict(
    vocab_size=64, hidden_size=64, intermediate_size=32, moe_intermediate_size=32, num_experts=2, num_experts_per_tok=2,
    num_attention_heads=2, num_key_value_heads=2, head_dim=32, num_hidden_layers=1,
)  # fmt: skip


def test_help_lists_the_commands():
    result = run("--help")
    assert result.exit_code == 0
    assert all(command in result.output for command in ("demo", "doctor", "run", "autotune"))


@pytest.mark.parametrize("path", ["", "1"], ids=["eager", "interpreter"])
def test_doctor_finds_no_fault(monkeypatch, path):
    monkeypatch.setenv("TRITON_INTERPRET", path)
    monkeypatch.setattr(doctor, "SHAPE", (2, 3, 203))  # the interpreter is slow
    result = run("doctor")
    assert result.exit_code == 0, result.output
    assert "18 of 18 checks passed" in result.output or torch.cuda.is_available()


def test_version():
    assert run("--version").output == f"onepass {onepass.__version__}\n"


def test_tables_of_a_narrow_terminal_without_unicode():
    written = io.BytesIO()
    console = Console(file=io.TextIOWrapper(written, encoding="ascii"), width=20)
    table = table_of("operation", "results")
    table.add_row("selective_log_softmax", "1.2e-07 (0.03)")
    console.print(table)
    console.file.flush()
    assert written.getvalue().isascii() and len(written.getvalue().splitlines()) > 5


def test_doctor_describes_the_experts_of_a_model(tmp_path):
    config = pytest.importorskip("transformers").AutoConfig.for_model("qwen3_moe", **OF_EXPERTS)
    config.quantization_config = {"quant_method": "fp8", "weight_block_size": [32, 32], "activation_scheme": "dynamic"}
    config.save_pretrained(tmp_path)
    result = run("doctor", "--model", tmp_path)
    gate_up, down = result.output.splitlines()
    assert result.exit_code == 0 and "layers.0.mlp.experts.gate_up_proj: fp8_block (blocks of 32 x 32)" in gate_up
    assert "(2, 64, 32)" in down and "onepass: experts that have tokens are decoded" in down
    result = run("doctor", "--model", tmp_path / "missing")
    assert result.exit_code == 1 and "missing cannot be read: " in result.output


def test_doctor_describes_the_experts_of_a_model_that_reads_images(tmp_path):
    text = OF_EXPERTS | {"head_dim": 16}
    vision = dict(depth=1, hidden_size=32, intermediate_size=32, num_heads=2, out_hidden_size=32)
    try:
        config = pytest.importorskip("transformers").AutoConfig.for_model(
            "qwen3_vl_moe", text_config=text, vision_config=vision | {"deepstack_visual_indexes": [0]}
        )
    except ValueError:
        pytest.skip("a transformers without this model")
    config.save_pretrained(tmp_path)
    result = run("doctor", "--model", tmp_path)
    assert result.exit_code == 0 and "layers.0.mlp.experts.gate_up_proj: float32" in result.output, result.output


def test_doctor_says_what_to_do(monkeypatch):
    of_gpu = {"cpu": "plain PyTorch", "cuda": "Triton kernels"}
    monkeypatch.setattr(doctor, "path", lambda device, dtype: of_gpu[device])
    assert doctor.verdict(2, ["cpu"]).startswith("Failed: 2 checks")
    assert doctor.verdict(0, ["cpu"]).startswith("OK, without a GPU")
    assert doctor.verdict(0, ["cpu", "cuda"]).startswith("OK: the kernels run")
    of_gpu["cuda"] = "none (No module named 'triton')"
    assert doctor.verdict(9, ["cpu", "cuda"]).endswith("pip install triton")  # which the checks fail for


def test_doctor_sees_a_wrong_gradient(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "")
    monkeypatch.setattr(doctor, "SHAPE", (2, 3, 203))
    right = torch.Tensor.copy_
    monkeypatch.setattr("torch.Tensor.copy_", lambda self, other: right(self, other * 1.01))
    result = run("doctor")
    assert result.exit_code == 1 and "FAIL" in result.output


def saved(row, output):
    """The percentage in a row of the demo's tables, which the row's peaks of memory must yield."""
    found = re.search(rf"{row}\W+(\S+)\W+(\S+)\W+(\S+)% less", output)
    assert found, output
    theirs, ours, share = map(float, found.groups())
    assert share == pytest.approx(100 * (1 - ours / theirs), abs=1)
    return share


def test_demo_trains_the_same_curve(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "")
    record = AutotuneRecord("k", "local", "0", {}, [], {}, None)
    monkeypatch.setattr("onepass.autotune.callback.collect", lambda: [record])
    arguments = "--steps", 3, "--device", "cpu", "--autotune-report", tmp_path / "autotuned.jsonl"
    result = run("demo", *arguments, "--out", tmp_path / "curves.png")
    assert result.exit_code == 0, result.output
    assert "32768" not in result.output, "the report is of the training alone"
    lines = (tmp_path / "autotuned.jsonl").read_text().splitlines()
    assert [AutotuneRecord.from_json(json.loads(line)) for line in lines] == [record], "once"
    assert run("demo", "--distill", *arguments).exit_code == 2
    assert re.search(r"largest difference \S+ over 3 steps \(below 1e-04\)", result.output), result.output
    assert re.search(r"largest difference in the Trainer \S+ over 3 steps \(below 1e-04\)", result.output), (
        result.output
    )
    for row in "│ 4096", "peak of tensor memory, MiB":  # of the loss, and of a step
        assert 0 < saved(row, result.output) < 100
    told = " ".join(result.output.split())
    assert "1024 tokens x 4096 entries of the vocabulary x 4 bytes = 16.0 MiB" in told
    assert "training, torch's loss" in told and "training, onepass' loss" in told
    summary = told[told.index("Summary") :]
    expected = "Equal: in float32", "Memory: loss and its gradient, 16.", "Speed: needs a GPU", "onepass.patch()"
    assert all(text in summary for text in expected), summary
    assert (tmp_path / "curves.png").stat().st_size > 10_000


@pytest.mark.exhaustive
def test_demo_trains_the_same_curves_from_hidden_states(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "")
    arguments = "--head", "linear", "--steps", 3, "--vocab", 512, "--device", "cpu"
    result = run("demo", *arguments, "--out", tmp_path / "curves.png")
    assert result.exit_code == 0, result.output
    for series in "training loss", "mean entropy":
        verdict = rf"largest difference of the {series} \S+ over 3 steps \(below 1e-03\)"
        assert re.search(verdict, result.output), result.output
    assert saved("│ 32768", result.output) > saved("│ 16384", result.output) > 50
    assert (tmp_path / "curves.png").stat().st_size > 10_000


@forks.GROUP
def test_demo_trains_the_same_curves_with_a_sharded_head(tmp_path, monkeypatch):
    monkeypatch.setattr("onepass.cli.demo_processes.spawn", forks.spawn)
    monkeypatch.setenv("TRITON_INTERPRET", "")
    arguments = "--head", "linear", "--steps", 3, "--vocab", 257, "--device", "cpu", "--processes", 2
    result = run("demo", *arguments, "--out", tmp_path / "curves.png")
    assert result.exit_code == 0, result.output
    assert "2 processes, each with some of the 257 rows" in result.output
    assert result.output.count("over 3 steps (below 1e-03)") == 2, result.output
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_demo_fails_if_the_curves_of_a_sharded_head_differ(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "")

    def other(head, size, seed, windows, processes):
        loss = torch.full((len(windows),), 7.0, dtype=torch.float64)
        return demo_curve.Curve("onepass", {"training loss": loss}, 1.0, 1)

    monkeypatch.setattr("onepass.cli.demo.train_sharded", other)
    arguments = "--steps", 2, "--vocab", 257, "--device", "cpu", "--processes", 2, "--out", tmp_path / "curves.png"
    result = run("demo", *arguments)
    assert result.exit_code == 1 and "(not below 1e-04)" in result.output, result.output


def test_demo_fails_if_the_losses_of_the_trainer_differ(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "")
    monkeypatch.setattr(demo, "OTHER_VOCABULARIES", ())
    found = demo_report.Agreement(" in the Trainer", 0.1, 1, 1e-4), demo_report.Costs("a step", (2, 1), (1.0, 1.0))
    monkeypatch.setattr("onepass.cli.demo_trainer.compare", lambda *_: found)
    threads = torch.get_num_threads()
    result = run("demo", "--steps", 1, "--device", "cpu", "--out", tmp_path / "curves.png")
    told = " ".join(result.output.split())
    assert result.exit_code == 1 and "Not equal: largest difference in the Trainer 1.0e-01" in told, result.output
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("difference, told", [
    (0.01, "Close: no step differs by more than 1.0e-02"),
    (float("nan"), "Not equal: largest difference nan over 1 steps (not finite)"),
])  # fmt: skip
def test_demo_tells_of_the_speed_on_a_gpu(difference, told):
    console = Console(file=io.StringIO(), width=200)
    found = demo_report.agreement(torch.zeros(1), torch.full((1,), difference), 1e-4, "cuda")
    costs = demo_report.Costs("loss and its gradient", (300 << 20, 75 << 20), (8.0, 2.0))
    demo_report.summarize([found], [costs], "cuda", console)
    printed = console.file.getvalue()
    assert told in printed and found.holds is ("Close" in told)
    assert "Memory: loss and its gradient, 75.0 MiB instead of 300.0 (75% less)." in printed
    assert "Speed: loss and its gradient, 4.0 times as fast." in printed


@pytest.mark.parametrize("wrong, told", [
    (("--processes", 0), "expected 1 to 4096, the number of tokens of the vocabulary, got 0"),
    (("--processes", 300, "--vocab", 299), "expected 1 to 299, the number of tokens of the vocabulary, got 300"),
    (("--processes", 2, "--distill"), "expected 1 with --distill, got 2"),
    (("--processes", 2, "--autotune-report", "a.jsonl"), "expected 1 with --autotune-report, got 2"),
])  # fmt: skip
def test_demo_refuses_processes(wrong, told):
    result = run("demo", "--device", "cpu", *wrong)
    printed = " ".join(result.output.replace("│", " ").split())
    assert result.exit_code == 2 and told in printed and "--processes" in printed, result.output


@pytest.mark.parametrize("wrong, told", [
    (("--out", "plot.xyz"), "expected a name that ends in .png or .svg or .pdf, got plot.xyz"),
    (("--out", "text/plot.png"), "text/plot.png cannot be written"),
    (("--seed", 2**32), "less than or equal to"),
])  # fmt: skip
def test_demo_refuses_before_it_trains(tmp_path, monkeypatch, wrong, told):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").touch()
    result = run("demo", "--device", "cpu", *wrong)
    assert result.exit_code == 2 and told in " ".join(result.output.replace("│", " ").split()), result.output


STORE = '{"format": "onepass autotune store", "version": 1, "records": []}'


@pytest.mark.parametrize("command", [
    ("show", "foreign.json"), ("export", "foreign.json", "--out", "new.json"), ("show", "empty.json"),
    ("merge", "foreign.json", "--out", "new.json"), ("merge", "store.json", "--out", "foreign.json"),
    ("merge", "store.json", "--out", "."), ("merge", "store.json", "--out", "foreign.json/new.json"),
    ("export", "store.json", "--out", "foreign.json/new.jsonl"),
])  # fmt: skip
def test_autotune_refuses_files_that_are_no_stores(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    before = {"store.json": STORE, "foreign.json": '{"a": 1}', "empty.json": ""}
    for name, text in before.items():
        (tmp_path / name).write_text(text)
    result = run("autotune", *command)
    assert result.exit_code == 2 and "Invalid value" in result.output, result.output
    assert {f.name: f.read_text() for f in tmp_path.iterdir()} == before


@pytest.mark.parametrize("options, says", [
    (("--op", "log_probs", "--op", "nope"), "got nope"), (("--dtype", "bf16"), "expected one of bfloat16"),
    (("--op", "experts", "--shape", "8x9"), "8x9: expected shapes of experts"),
    (("--op", "log_probs", "--shape", "8x9x3x4x2"), "8x9x3x4x2: expected shapes of log_probs"),
    (("--shape", "8x9", "--shape", "8x9x3"), "8x9x3': expected TOKENSx"),
])  # fmt: skip
def test_autotune_run_checks_all_options_first(tmp_path, monkeypatch, options, says):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    result = run("autotune", "run", "--out", tmp_path / "out.json", *options)
    assert result.exit_code == 2 and says in " ".join(result.output.replace("│", "").split()), result.output


def test_shapes_of_losses_and_of_experts_in_one_run():
    both = ["8x9", "8x9x3x4x2"]
    assert sizes_of(both, ["log_probs", "experts"]) == (["8x9"], ["8x9x3x4x2"])


def test_a_commit_of_somebody_elses_repository_is_none(tmp_path, monkeypatch):
    monkeypatch.delenv("ONEPASS_COMMIT", raising=False)
    package = tmp_path / "venv" / "onepass"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (tmp_path / ".gitignore").write_text("venv")
    for command in (["init"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-m", "."]):
        subprocess.run(["git", "-C", tmp_path, *command], check=True, capture_output=True)
    monkeypatch.setattr(onepass, "__file__", str(package / "__init__.py"))
    assert commit() is None


def test_autotune_creates_the_folder_of_an_export(tmp_path):
    (tmp_path / "store.json").write_text(STORE)
    result = run("autotune", "export", tmp_path / "store.json", "--out", tmp_path / "folder" / "new.jsonl")
    assert result.exit_code == 0 and (tmp_path / "folder" / "new.jsonl").exists(), result.output


@pytest.mark.parametrize("option", ["--gpu", "--kernel"])
def test_an_export_that_matches_nothing_is_an_error(tmp_path, option):
    shipped = Path(onepass.__file__).parent / "autotune" / "shipped" / "h100.json"
    result = run("autotune", "export", shipped, option, "no such", "--out", tmp_path / "new.json")
    text, known = (
        " ".join(result.output.replace("│", "").split()),
        {"--gpu": "H100 80GB", "--kernel": "divergence_kernel"},
    )
    assert result.exit_code == 2 and f"value for {option}" in text and "'no such'" in text and known[option] in text
    assert not (tmp_path / "new.json").exists()


def test_a_damaged_store_is_not_said_to_be_left_out(tmp_path):
    (tmp_path / "bad.json").write_text("{bad json")
    result = run("autotune", "show", tmp_path / "bad.json")
    text = " ".join(result.output.replace("│", "").split())
    assert result.exit_code == 2 and "it is damaged" in text and "left out" not in text and "OP003" not in text


def test_commands_without_triton():
    """On macOS and Windows there is none, and an installed one may fail to be imported. All but `autotune` run."""
    script = """
import os, sys
import torch
from typer.testing import CliRunner
assert "triton" not in sys.modules
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ImportError("broken") if broken else ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
broken = os.fork() == 0  # the process that is forked comes first
if not broken:
    os.wait()
from onepass.cli.app import app
for command in ["--version"], ["demo", "--help"], ["doctor", "--help"], ["autotune", "show", "x"]:
    result = CliRunner().invoke(app, command)
    print(result.exit_code, "package triton" in result.output, flush=True)
"""
    source = str(Path(onepass.__file__).parents[1])
    done = subprocess.run([sys.executable, "-c", script], env=os.environ | {"PYTHONPATH": source}, capture_output=True)
    assert done.stdout.decode().split() == (["0", "False"] * 3 + ["2", "True"]) * 2, done.stderr.decode()


def test_demo_takes_one_process_for_each_gpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    result = run("demo", "--device", "cuda", "--processes", 2)
    printed = " ".join(result.output.replace("│", " ").split())
    assert result.exit_code == 2 and "expected 1 to 1, the number of GPUs, got 2" in printed, result.output


@pytest.mark.parametrize("taught", [True, False])
def test_demo_distils_and_fails_without_a_gain(tmp_path, monkeypatch, taught):
    monkeypatch.setenv("TRITON_INTERPRET", "")
    monkeypatch.setattr(distill, "TEACHER_STEPS", 2)
    if not taught:
        monkeypatch.setattr(distill, "distillation", lambda teacher: distill.hard_labels)
    result = run("demo", "--distill", "--steps", 3, "--device", "cpu", "--out", tmp_path / "curves.png")
    assert result.exit_code == (0 if taught else 1), result.output
    assert ("not below" in result.output) is not taught
    assert "6 steps on 100% of the text" in result.output, "of the teacher, whose training is shorter too"
    assert (tmp_path / "curves.png").stat().st_size > 10_000
