"""Collect and report what Triton's autotuner chose, and our own kernels' numbers: real autotuners."""

import gc
import getpass
import importlib
import json
import logging
import socket
import sys
import timeit
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton
from rich.console import Console
from transformers import TrainerCallback

import onepass
from autotune_cases import SOURCE, a_record, load
from onepass import autotune
from onepass.autotune import AutotuneRecord, AutotuneReportCallback, ConfigStore, own, tuners
from onepass.autotune.record import WORD
from onepass.autotune.sources import identity_of, source_hash
from onepass.cli.autotune import grouped_products, measure, step_of
from onepass.cli.workloads import OPERATIONS
from onepass.kernels import launch
from onepass.kernels.launch import forget

KERNELS = ("plain_kernel", "heuristics_outside_kernel", "heuristics_inside_kernel", "closure")


# Collect.


@pytest.fixture
def everywhere():
    return tuners.autotuners


def test_every_autotuner_is_found_once(library):
    assert autotune.collect() == []
    assert all(library.run(name) for name in KERNELS)
    duplicate = load()  # the same file under another name
    assert duplicate.run()
    found = autotune.collect()
    names = [r.kernel for r in found]
    assert sorted(names) == sorted([*KERNELS[:3], "held_by_a_closure_kernel"])
    assert library.an_alias is library.plain_kernel and library.Held.kernel is library.heuristics_inside_kernel


def test_a_frozen_heap_hides_no_module(library, monkeypatch):
    monkeypatch.setitem(sys.modules, library.__name__, library)
    assert library.run() and library.run("heuristics_outside_kernel")
    gc.freeze()  # which stays, as conftest.py has it
    found = autotune.collect()
    assert [r.kernel for r in found] == ["heuristics_outside_kernel", "plain_kernel"]


def test_what_a_record_says(library):
    assert library.run(n=40, dtype=torch.float32)
    (record,) = autotune.collect()
    assert record.key == {"n": 40, "activation": "silu"} and record.dtypes == ["torch.float32"] * 2
    assert record.config == {"BLOCK": 32, "num_warps": 4, "num_ctas": 1, "num_stages": 3}
    assert record.milliseconds == 1.0 and record.margin == 1.0
    assert [c["milliseconds"] for c in record.candidates] == [1.0, 2.0, 3.0]
    assert record.triton == triton.__version__ and record.torch == torch.__version__
    assert record.module == "local" and len(record.source_hash) == 64
    assert AutotuneRecord.from_json(json.loads(json.dumps(record.to_json()))) == record


@pytest.mark.gpu
def test_triton_s_own_benchmarker_on_a_gpu(library, tmp_path, monkeypatch):
    monkeypatch.setattr(library.plain_kernel, "_do_bench", None)
    with autotune.session(tmp_path / "store.json"):
        assert library.run(n=4096)
    (record,) = ConfigStore(tmp_path / "store.json").records
    assert record.gpu == torch.cuda.get_device_name() and record.shared_memory >= 2**15
    assert len(record.candidates) == 3 and 0 < record.milliseconds == record.candidates[0]["milliseconds"]
    fresh = library.again()
    assert ConfigStore(tmp_path / "store.json").warm() == 1
    assert fresh.run(n=4096) and fresh.benchmarks == []


def test_timings_belong_to_the_key_that_they_were_taken_for(library):
    assert library.run(n=40) and library.run(n=80)
    first, second = autotune.collect()
    assert (first.key["n"], first.milliseconds, first.candidates) == (40, None, [])  # Triton has forgotten them
    assert second.milliseconds == 1.0 and len(second.candidates) == 3


def test_a_session_keeps_the_timings_of_every_key(library, tmp_path):
    with autotune.session(tmp_path / "store.json"):
        assert library.run(n=40) and library.run(n=80)
    assert [r.milliseconds for r in autotune.collect()] == [1.0, 1.0]


@pytest.mark.parametrize(
    "value, labelled",
    [(1, 1), (2.5, 2.5), (True, True), (None, None), ("bf16", "bf16"), (torch.bfloat16, {"dtype": "bfloat16"}),
     ((1, "a"), [1, "a"]), ("torch.float16", "torch.float16")],
)  # fmt: skip
def test_keys_come_back_as_they_were(library, value, labelled):
    key = (40, value, "torch.float32", "torch.float32")
    assert tuners.labelled(library.plain_kernel, key) == (
        {"n": 40, "activation": labelled}, ["torch.float32", "torch.float32"],
    )  # fmt: skip
    record = tuners.record_of(library.plain_kernel, key, library.CONFIGS[0], None)
    assert tuners.cache_key(record) == key


@pytest.mark.parametrize("value", [object(), "/home/someone", "C:\\models", float("inf"), len, torch.zeros(1)])
def test_a_key_that_is_no_plain_data_is_left_out(library, value):
    library.plain_kernel.cache[(40, value)] = library.CONFIGS[0]
    assert autotune.collect() == []


def test_a_kernel_of_which_nothing_runs_is_left_out(library):
    timings = {config: float("inf") for config in library.CONFIGS}
    assert tuners.record_of(library.plain_kernel, (1, "a"), library.CONFIGS[0], timings) is None


def test_records_name_nobody(library, tmp_path):
    path = tmp_path / "modeling_secretmodel.py"
    path.write_text(SOURCE.read_text())
    private = load(path, f"transformers_modules.{getpass.getuser()}.secretmodel")
    assert all(m.run(name) for m in (library, private) for name in KERNELS)
    private.plain_kernel.cache[(40, str(tmp_path))] = private.CONFIGS[0]
    with autotune.session(tmp_path / "store.json"):
        pass
    records = autotune.collect()
    assert len(records) == 4
    text = json.dumps([r.to_json() for r in records]) + (tmp_path / "store.json").read_text()
    gpu = records[0].gpu
    secrets = {
        getpass.getuser(),
        socket.gethostname(),
        "secretmodel",
        str(Path.home()),
        str(tmp_path),
        str(SOURCE.parent),
    }
    for secret in secrets - {"/"}:
        assert f'"{secret}' not in text and (
            len(secret) < 5 or secret.lower() not in text.lower().replace(gpu.lower(), "")
        )
    assert not [s for r in records for s in strings(r.to_json()) if not (WORD.match(s) or s == gpu)]


def strings(data):
    if isinstance(data, dict):
        return [s for item in data.items() for part in item for s in strings(part)]
    if isinstance(data, list):
        return [s for part in data for s in strings(part)]
    return [data] if isinstance(data, str) else []


def test_modules_of_installed_packages_are_named():
    assert tuners.public_module("triton.language.core") == "triton.language.core"
    assert tuners.public_module("transformers_modules.someone.model") == "local" == tuners.public_module("__main__")


# Report.


def step(callback, zero=True):
    callback.on_step_end(None, SimpleNamespace(is_world_process_zero=zero), None)


def test_a_report_after_the_first_step_that_has_data(library):
    reports = []
    callback = AutotuneReportCallback([reports.append])
    assert isinstance(callback, TrainerCallback)
    step(callback), step(callback)
    assert reports == []
    assert library.run()
    step(callback)
    assert library.run(n=80)
    step(callback)
    assert [len(r) for r in reports] == [1] and reports[0][0].key["n"] == 40


def test_five_looks_and_no_more(library, monkeypatch):
    looks = []
    monkeypatch.setattr("onepass.autotune.callback.collect", lambda: looks.append(1) or [])
    callback = AutotuneReportCallback([pytest.fail])
    for _ in range(20):
        step(callback)
    assert len(looks) == 5
    other = AutotuneReportCallback([pytest.fail])
    for _ in range(20):
        step(other, zero=False)
    assert len(looks) == 5, "the first process alone"


def test_a_step_costs_a_look_at_a_flag(library):
    callback = AutotuneReportCallback([lambda records: None])
    state = SimpleNamespace(is_world_process_zero=True)
    for _ in range(5):
        callback.on_step_end(None, state, None)
    ours, nothing = (
        min(timeit.repeat(lambda c=c: c.on_step_end(None, state, None), number=10_000)) / 10_000 * 1e9
        for c in (callback, TrainerCallback())
    )
    print(f"a step: {ours:.0f} ns, of the empty callback {nothing:.0f} ns")
    assert ours < nothing + 500


def test_sinks(library, tmp_path, logged):
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    traced = autotune.OpenTelemetrySink(provider.get_tracer("test"))
    lines = autotune.JSONLSink(tmp_path / "reports" / "autotuned.jsonl")
    assert library.run() and library.run("heuristics_inside_kernel")

    def fails(records):
        raise OSError("no network")

    step(AutotuneReportCallback())
    step(AutotuneReportCallback([fails, lines, traced]))
    step(AutotuneReportCallback([lines]))
    text = "\n".join(logging.Formatter().format(record) for record in logged)
    assert text.count("autotuned local.plain_kernel") == 1 and "the next 100.0% slower" in text
    assert "no network" in text, "a sink that fails is a warning"
    reported = [AutotuneRecord.from_json(json.loads(line)) for line in lines.path.read_text().splitlines()]
    assert reported == autotune.collect() * 2
    (span,) = exporter.get_finished_spans()
    assert [e.attributes["kernel"] for e in span.events] == [r.kernel for r in autotune.collect()]
    assert json.loads(span.events[1].attributes["config"])["BLOCK"] == 32


# The command line.


def command(*arguments):
    from typer.testing import CliRunner

    from onepass.cli.app import app

    result = CliRunner().invoke(app, ["autotune", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.output


def test_show_merge_and_export(tmp_path):
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    tried = [{"config": {"BLOCK": b}, "milliseconds": t} for b, t in ((8, 1.0), (16, 1.25), (32, None))]
    for path, records in zip(paths, ([a_record(candidates=tried)], [a_record(kernel="other", milliseconds=None)])):
        kept = ConfigStore(path)
        kept.add(records)
        kept.save()
    shown = command("show", *paths)
    assert "local.k" in shown and "BLOCK 8" in shown and "+25.0%" in shown and "2 of 2 records" in shown
    assert "1 of 2 records" in command("show", *paths, "--kernel", "OTHER")
    bracketed = ConfigStore(tmp_path / "bracketed.json")
    bracketed.add([a_record(gpu="a GPU [/of] brackets")])
    bracketed.save()
    assert "a GPU [/of] brackets" in command("show", bracketed.path), "names are no markup"
    assert "2 records" in command("merge", *paths, "--out", tmp_path / "c.json")
    assert len(ConfigStore(tmp_path / "c.json")) == 2
    assert "1 records" in command(
        "export", tmp_path / "c.json", "--out", tmp_path / "d.json", "--kernel", "k", "--no-candidates"
    )
    (record,) = ConfigStore(tmp_path / "d.json").records
    assert record == a_record() and record.margin is None
    with pytest.raises(AssertionError, match="Invalid value for --out"):
        command("export", tmp_path / "c.json", "--out", tmp_path / "c.json")
    command("export", tmp_path / "c.json", "--out", tmp_path / "d.jsonl")
    assert len((tmp_path / "d.jsonl").read_text().splitlines()) == 2


# Our own kernels.


@pytest.fixture
def interpreted(monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("the kernels are compiled here")
    yield
    forget()


STATISTICS, DIVERGENCE = (
    (op, [f"{kernel}_kernel" for kernel in kernels])
    for op, kernels in (
        ("log_probs_and_entropy", ("softmax_statistics", "softmax_gradient")),
        ("kl_div", ("divergence", "divergence_gradient")),
    )
)


@pytest.mark.parametrize("op, kernels, shape", [
    (*STATISTICS, (2, 700)), (*STATISTICS, (1, 9000)), (*DIVERGENCE, (2, 700)), (*DIVERGENCE, (5, 83)),
])  # fmt: skip
def test_any_candidate_gives_the_same_results(interpreted, monkeypatch, op, kernels, shape):
    monkeypatch.setattr("onepass.cli.autotune.ROUNDS", 1)
    step = step_of(OPERATIONS[op], *shape, torch.float32, torch.device("cpu"))
    expected = step()
    times = iter(range(1, 1000))

    def time(call):
        for got, same in zip(call(), expected):
            torch.testing.assert_close(got, same, rtol=1e-5, atol=1e-6)
        return float(next(times))

    done = set()
    records = list(measure(step, time, Console(quiet=True), done))
    assert not list(measure(step, time, Console(quiet=True), done)), "known by now"
    assert [r.kernel for r in records] == kernels
    for record in records:
        assert record.key["rows"] == shape[0] and record.key["vocab"] == shape[1]
        assert record.source_hash == "version 1"
        assert len(record.candidates) >= 2 and record.config == record.candidates[0]["config"], "the first took least"
        assert all(c["config"].keys() == record.config.keys() for c in record.candidates)


def test_any_candidate_gives_the_same_product_of_experts(interpreted, monkeypatch):
    monkeypatch.setattr("onepass.cli.autotune.ROUNDS", 1)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    found = []
    for step in grouped_products((140, 72, 40, 2, 1), torch.float32, torch.device("cpu")):
        expected = step()

        def time(call, expected=expected):
            torch.testing.assert_close(call(), expected, rtol=1e-5, atol=1e-4)
            return 1.0

        found += measure(step, time, Console(quiet=True), set())
    assert [r.kernel for r in found] == ["grouped_gemm_kernel"] * 4 + ["grouped_weight_gradient_kernel"] * 2
    assert {r.key["read"] for r in found} == {"glu", "plain", "outer"}
    for record in found:
        tried = [c["config"] for c in record.candidates]
        assert len(tried) == len({tuple(c.values()) for c in tried}) >= 3 and record.config == tried[0]


def test_what_is_shipped_is_used(interpreted, monkeypatch):
    logits = torch.randn(6, 300)
    target = torch.zeros(6, dtype=torch.long)
    with own.record_questions() as asked:
        forget()
        expected = onepass.selective_log_softmax(logits, target)
    (question,) = asked.values()
    numbers = {name: 2 * n for name, n in question.rule.items()}
    key = question.key | {"rows": 12, "vocab": 250}  # near enough
    assert key["rule"] == "+".join(map(str, question.rule.values()))
    record = a_record(
        kernel="softmax_statistics_kernel", source_hash=identity_of(question.kernel), key=key, config=numbers
    )
    plans = []
    real = launch.Plan
    kernels = importlib.import_module("onepass.kernels.softmax_statistics")  # not the function of that name
    monkeypatch.setattr(kernels, "Plan", lambda *a: plans.append(real(*a)) or plans[-1])
    monkeypatch.setattr(own, "_used", {})
    for fields, used in (
        ({}, True), ({"source_hash": "version 2"}, False), ({"source_hash": source_hash(question.kernel)}, False),
        ({"key": key | {"vocab": 5000}}, False),
        ({"key": key | {"read": "entropy"}}, False), ({"key": key | {"rule": "1+1+1"}}, False),
        ({"config": {"LANES": 64}}, False), ({"kernel": "other"}, False),
    ):  # fmt: skip
        forget()
        changed = replace(record, **fields)
        monkeypatch.setattr(own, "shipped", lambda gpu, changed=changed: {changed.kernel: [changed]})
        torch.testing.assert_close(onepass.selective_log_softmax(logits, target), expected)
        taken = {name: plans[-1].constexprs[name] for name in numbers}
        assert taken == (numbers if used else question.rule), fields
    assert own.collect_own() == [record] and record in autotune.collect()
    monkeypatch.setattr(own, "shipped", lambda gpu: {record.kernel: [replace(record, source_hash="version 2"), record]})
    for version, used in ((1, True), (2, True), (3, False)):
        monkeypatch.setattr(kernels, "VERSIONS", {record.kernel: version}, raising=False)
        forget()
        torch.testing.assert_close(onepass.selective_log_softmax(logits, target), expected)
        assert {name: plans[-1].constexprs[name] for name in numbers} == (numbers if used else question.rule), version


def test_our_kernels_are_told_by_their_version_and_all_others_by_their_source(library, tmp_path, monkeypatch):
    changed = tmp_path / "changed.py"
    changed.write_text(SOURCE.read_text().replace("activation", "act"))
    assert changed.read_text() != SOURCE.read_text()
    ours, ours_changed = (load(source, "onepass.kernels.some") for source in (SOURCE, changed))
    ours.VERSIONS = ours_changed.VERSIONS = {"plain_kernel": 3}
    theirs, theirs_changed = (load(source, "onepass_of_others") for source in (SOURCE, changed))
    assert identity_of(ours.plain_kernel) == identity_of(ours_changed.plain_kernel) == "version 3"
    assert identity_of(ours.heuristics_inside_kernel) == "version 1"
    assert identity_of(theirs.plain_kernel) == source_hash(ours.plain_kernel)
    assert identity_of(theirs_changed.plain_kernel) == source_hash(ours_changed.plain_kernel)
    assert source_hash(ours.plain_kernel) != source_hash(ours_changed.plain_kernel)


def test_a_session_tells_our_kernels_by_their_version(library, tmp_path, monkeypatch):
    changed = tmp_path / "changed.py"  # an argument has another name
    changed.write_text(SOURCE.read_text().replace("kernel(x, y, n", "kernel(a, y, n").replace("tl.load(x", "tl.load(a"))
    for source, version, benchmarked in ((SOURCE, 1, 3), (changed, 1, 0), (changed, 2, 3)):
        library.again()
        ours = load(source, "onepass.kernels.some")
        ours.VERSIONS = {"plain_kernel": version}
        with autotune.session(tmp_path / "store.json"):
            assert ours.run() and len(ours.benchmarks) == benchmarked, (source, version)
    assert {r.source_hash for r in ConfigStore(tmp_path / "store.json").records} == {"version 1", "version 2"}


def test_what_is_shipped_is_of_the_gpu_that_its_name_says_and_of_the_versions_of_the_kernels():
    """After a version was raised: `onepass autotune run` again, or no record. An earlier one is never used."""
    shipped = {path.stem: ConfigStore(path).records for path in own.SHIPPED.glob("*.json")}
    assert shipped and all(shipped.values())
    assert all(gpu in record.gpu.lower() for gpu, records in shipped.items() for record in records)
    modules = [module for name, module in sys.modules.items() if name.startswith("onepass.kernels.")]
    for record in (record for records in shipped.values() for record in records):
        # By its name, as it is looked up: it may have moved to another module since.
        kernel = next(getattr(module, record.kernel) for module in modules if hasattr(module, record.kernel))
        assert record.source_hash == identity_of(kernel), record.kernel
    for module in modules:
        assert all(hasattr(module, name) for name in getattr(module, "VERSIONS", {})), f"an unknown kernel in {module}"


def test_run_needs_a_gpu(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(AssertionError, match="expected a CUDA or ROCm GPU"):
        command("run", "--out", tmp_path / "store.json")


def test_a_candidate_with_a_file_of_its_own_is_passed_over():
    own, plain = triton.Config({"BLOCK": 1}, ir_override="kernel.ttir"), triton.Config({"BLOCK": 2})
    record = SimpleNamespace(config=tuners.described(plain))
    assert tuners.matching([own, plain], record) is plain and tuners.matching([own], record) is None


def test_a_timing_is_a_median():
    """Triton measures it as the first of three quantiles; a benchmark of one's own returns a number."""
    assert tuners.median((2.0, 1.0, 3.0)) == tuners.median([2, 1, 3]) == tuners.median(2) == 2.0
