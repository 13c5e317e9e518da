"""Collect, report, keep and use again what Triton's autotuner chose: real autotuners, a benchmarker that counts."""

import gc
import getpass
import importlib
import importlib.util
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import timeit
import uuid
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton
from rich.console import Console
from transformers import TrainerCallback
from triton.runtime.autotuner import Autotuner

import onepass
from onepass import autotune
from onepass.autotune import AutotuneRecord, AutotuneReportCallback, ConfigStore, own, store, tuners
from onepass.autotune.record import WORD, here
from onepass.cli.autotune import measure, step_of
from onepass.cli.implementations import OPERATIONS
from onepass.kernels import launch
from onepass.kernels.launch import forget

SOURCE = Path(__file__).with_name("autotuned.py")
KERNELS = ("plain_kernel", "heuristics_outside_kernel", "heuristics_inside_kernel", "closure")


def load(source=SOURCE, name=None):
    """The file as a fresh module, as in another process."""
    spec = importlib.util.spec_from_file_location(name or f"library_{uuid.uuid4().hex}", source)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def library(monkeypatch):
    """A library whose kernels are the only ones in the process; ``library.again()`` is a second process."""
    everywhere = tuners.autotuners
    known = set(everywhere())  # and alive, lest a new one takes the place of an old one
    monkeypatch.setattr(tuners, "autotuners", lambda: [t for t in everywhere() if t not in known])
    monkeypatch.setattr(store, "autotuners", lambda: tuners.autotuners())
    monkeypatch.setattr(own, "collect_own", lambda: [])
    module = load()

    def again(source=SOURCE):
        known.update(everywhere())
        return load(source)

    module.again = again
    return module


def a_record(**fields):
    some = dict(kernel="k", module="local", source_hash="0" * 64, key={"n": 64}, dtypes=[], config={"BLOCK": 8},
                milliseconds=1.0)  # fmt: skip
    return AutotuneRecord(**(some | here() | fields))


# Collect.


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
    gc.freeze()
    try:
        found = autotune.collect()
    finally:
        gc.unfreeze()
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


# Keep and use again.


def test_a_known_key_is_never_benchmarked(library, tmp_path):
    kept = ConfigStore(tmp_path / "store.json")
    assert library.run(n=40) and library.run("heuristics_outside_kernel")
    kept.add(autotune.collect())
    kept.save()
    fresh = library.again()
    assert ConfigStore(kept.path).warm() == 2
    assert fresh.run(n=40) and fresh.run("heuristics_outside_kernel") and fresh.benchmarks == []
    assert fresh.plain_kernel.best_config is fresh.CONFIGS[2]
    assert fresh.run(n=41) and len(fresh.benchmarks) == 3


def test_a_session_warms_what_is_imported_later(library, tmp_path):
    with autotune.session(tmp_path / "store.json"):
        assert library.run() and len(library.benchmarks) == 3
    with autotune.session(tmp_path / "store.json"):
        fresh = library.again()
        assert fresh.run() and fresh.benchmarks == []
        assert fresh.plain_kernel.best_config is fresh.CONFIGS[2]


def test_a_changed_kernel_is_tuned_again(library, tmp_path):
    with autotune.session(tmp_path / "store.json"):
        assert library.run()
    changed = tmp_path / "changed.py"
    changed.write_text(SOURCE.read_text().replace("mask=at < n) * 2", "mask=at < n) + tl.load(x + at, mask=at < n)"))
    with autotune.session(tmp_path / "store.json") as kept:
        fresh = library.again(changed)
        assert kept.warm() == 0
        assert fresh.run() and len(fresh.benchmarks) == 3
    assert len(ConfigStore(tmp_path / "store.json")) == 2


def test_what_compiled_kernels_are_told_by(tmp_path, monkeypatch):
    """The hash that Triton itself goes by: of the source and of the functions that it calls."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    text = SOURCE.read_text()
    helped = text.replace("benchmarks = []", "@triton.jit\ndef twice(x):\n    return x * 2\n\n\nbenchmarks = []")
    helped = helped.replace("tl.load(x + at, mask=at < n) * 2", "twice(tl.load(x + at, mask=at < n))")
    hashes = []
    for n, source in enumerate((text, text, helped, helped.replace("return x * 2", "return x + x"))):
        (tmp_path / f"{n}.py").write_text(source)
        hashes.append(tuners.source_hash(load(tmp_path / f"{n}.py").plain_kernel))
    assert hashes[0] == hashes[1] and len(set(hashes)) == 3


def test_another_gpu_or_triton_is_another_question(library, tmp_path):
    assert library.run()
    (record,) = autotune.collect()
    fresh = library.again()
    for fields in ({"compute_capability": "12.1"}, {"triton": "2.0.1"}, {"source_hash": "1"}):
        kept = ConfigStore()
        kept.add([replace(record, **fields)])
        assert kept.warm() == 0, fields
    kept = ConfigStore()
    major, minor = triton.__version__.split(".")[:2]
    kept.add([replace(record, triton=f"{major}.{minor}.99")])
    assert kept.warm() == 1 and fresh.run() and fresh.benchmarks == []


def test_a_configuration_that_is_not_declared_is_not_used(library):
    assert library.run()
    (record,) = autotune.collect()
    library.again()
    kept = ConfigStore()
    kept.add([replace(record, config=record.config | {"BLOCK": 64})])
    assert kept.warm() == 0


def test_nearest_is_off_unless_asked_for(library, tmp_path):
    with autotune.session(tmp_path / "store.json"):
        assert library.run(n=40)
    fresh = library.again()
    with autotune.session(tmp_path / "store.json", nearest=True):
        assert fresh.run(n=100) and fresh.benchmarks == []
        assert fresh.run(n=100, activation="gelu") and len(fresh.benchmarks) == 3, "only numbers have neighbours"
        assert fresh.run(n=100, dtype=torch.float16) and len(fresh.benchmarks) == 6
        assert fresh.run(n=1000) and len(fresh.benchmarks) == 9, "none within a factor of 4"
    measured = {(r.key["n"], r.key["activation"], r.dtypes[0]) for r in ConfigStore(tmp_path / "store.json").records}
    assert (100, "silu", "torch.float32") not in measured and len(measured) == 4, "what is borrowed is not measured"
    again = library.again()
    with autotune.session(tmp_path / "store.json"):
        assert again.run(n=100) and len(again.benchmarks) == 3


def test_merge_keeps_the_better_timed():
    ours, theirs = ConfigStore(), ConfigStore()
    ours.add([a_record(milliseconds=2.0), a_record(key={"n": 1}, milliseconds=None), a_record(key={"n": 2})])
    theirs.add([a_record(), a_record(key={"n": 1}, milliseconds=9.0), a_record(key={"n": 2}, milliseconds=None)])
    theirs.add([a_record(key={"n": 3})])
    ours.merge(theirs)
    assert [(r.key["n"], r.milliseconds) for r in ours.records] == [(1, 9.0), (2, 1.0), (3, 1.0), (64, 1.0)]


def test_triton_is_as_it_was_after_a_session(library, tmp_path):
    before = Autotuner.prune_configs, Autotuner._bench, Autotuner.run
    with pytest.raises(KeyError), autotune.session(tmp_path / "outer.json"):
        with autotune.session(tmp_path / "inner.json"):
            assert Autotuner.run is before[2], "nothing is in the way of a launch"
            assert library.run()
        raise KeyError
    assert before == (Autotuner.prune_configs, Autotuner._bench, Autotuner.run)
    for name in ("outer", "inner"):
        assert len(ConfigStore(tmp_path / f"{name}.json")) == 1, "an exception loses nothing"


def test_tuning_is_shown(library, tmp_path, capsys):
    with autotune.session(tmp_path / "store.json"):
        assert library.run() and library.run(n=80)
    shown = capsys.readouterr().err
    assert "Triton tunes plain_kernel, 3 configurations" in shown and "(1 tuned before in " in shown
    with autotune.session(tmp_path / "store.json"):
        assert library.run(n=40) and library.run(n=80)
    with autotune.session(tmp_path / "store.json", progress=False):
        assert library.run(n=120)
    assert capsys.readouterr().err == ""


def test_an_autotuner_that_we_do_not_understand_is_tuned_as_always(library, tmp_path, monkeypatch):
    def unknown(tuner, kwargs):
        raise AttributeError("nargs")

    monkeypatch.setattr(tuners, "key_of", unknown)
    with autotune.session(tmp_path / "store.json"):
        assert library.run() and len(library.benchmarks) == 3


def test_a_benchmark_that_raises_is_not_kept(library, tmp_path, monkeypatch):
    def runs_out_of_memory(call, quantiles):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(library.plain_kernel, "do_bench", runs_out_of_memory)
    with pytest.raises(torch.OutOfMemoryError), autotune.session(tmp_path / "store.json"):
        library.run()
    assert len(ConfigStore(tmp_path / "store.json")) == 0
    monkeypatch.setattr(library.plain_kernel, "do_bench", library.benchmark)
    with autotune.session(tmp_path / "store.json"):
        assert library.run()
    assert len(ConfigStore(tmp_path / "store.json")) == 1


# The file.


def written(path, text):
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


VERSIONED = '{{"format": "onepass autotune store", "version": {}, "records": []}}'
FILES = {
    "cut off": ('{"format": "onepass autotune store", "versi', "damaged", "is damaged", True),
    "binary": (b"\xff\xfe", "damaged", "is damaged", True),
    "a record of something else": (VERSIONED.format(1).replace("[]", '[{"a": 1}]'), "damaged", "is damaged", True),
    "another program's": ('{"configs": []}', "foreign", "no store of onepass", False),
    "a list": ("[1, 2]", "foreign", "no store of onepass", False),
    "older": (VERSIONED.format(0), "old", "older version", True),
    "newer": (VERSIONED.format(99), "newer", "newer version", False),
}


@pytest.mark.parametrize("text, aside, says, replaced", FILES.values(), ids=FILES)
def test_a_file_that_is_not_ours(library, tmp_path, text, aside, says, replaced):
    path = written(tmp_path / "store.json", text)
    with pytest.warns(RuntimeWarning, match=says), autotune.session(path):
        assert library.run(), "tuning goes on"
    if replaced:
        assert len(ConfigStore(path)) == 1
        path = tmp_path / f"store.json.{aside}"
    assert path.read_bytes() == written(tmp_path / "expected", text).read_bytes(), "nobody's file is lost"


def test_a_store_that_cannot_be_written_is_a_warning(library, tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.warns(RuntimeWarning, match="not saved: no space left"), autotune.session(tmp_path / "store.json"):
        assert library.run()
    written(tmp_path / "file", "")
    with pytest.raises(NotADirectoryError), autotune.session(tmp_path / "file" / "store.json"):
        pytest.fail("a path that can never work is an error before there is anything to lose")


def test_the_file_is_for_people_too(tmp_path):
    kept = ConfigStore(tmp_path / "new folder" / "store.json")
    kept.add([a_record()])
    kept.save()
    text = kept.path.read_text()
    assert text.count("\n") > 10 and json.loads(text)["version"] == store.VERSION
    assert ConfigStore(kept.path).records == kept.records
    with pytest.raises(ValueError, match="path: expected"):
        ConfigStore().save()


IN_A_PROCESS = """
import os, signal, sys
from onepass.autotune import AutotuneRecord, ConfigStore
from onepass.autotune.record import here

def record(**key):
    return AutotuneRecord("k", "local", "0" * 64, key, [], {"BLOCK": 8}, 1.0, **here())
"""


def process(code, *arguments, **environment):
    command = [sys.executable, "-c", IN_A_PROCESS + code, *map(str, arguments)]
    return subprocess.Popen(
        command, env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_processes_that_write_one_store_lose_nothing(tmp_path):
    path, count = tmp_path / "store.json", 20
    code = f"""
for n in range({count}):
    kept = ConfigStore(sys.argv[1])
    kept.add([record(process=int(sys.argv[2]), n=n)])
    kept.save()
"""
    running = [process(code, path, n) for n in range(3)]
    for p in running:
        _, errors = p.communicate(timeout=120)
        assert p.returncode == 0 and "Warning" not in errors, errors
    assert {(r.key["process"], r.key["n"]) for r in ConfigStore(path).records} == {
        (p, n) for p in range(3) for n in range(count)
    }
    assert sorted(p.name for p in tmp_path.iterdir()) == ["store.json", "store.json.lock"]


@pytest.mark.parametrize("where", ["json.dump", "os.fsync", "pathlib.Path.replace"])
def test_a_killed_save_leaves_what_was_there(tmp_path, where):
    kept = ConfigStore(tmp_path / "store.json")
    kept.add([a_record()])
    kept.save()
    code = f"""
import importlib
kept = ConfigStore(sys.argv[1])
kept.add([record(n=n) for n in range(1000)])
owner, name = {where!r}.rsplit(".", 1)
owner = importlib.import_module("pathlib").Path if owner == "pathlib.Path" else importlib.import_module(owner)
real = getattr(owner, name)
def killed(*arguments, **options):
    if name == "dump":  # half of it is written
        arguments[1].write('{{"format": "onepass autotune store", "records": [')
        arguments[1].flush()
    os.kill(os.getpid(), signal.SIGKILL)
setattr(owner, name, killed)
kept.save()
"""
    p = process(code, kept.path)
    p.communicate(timeout=120)
    assert p.returncode == -signal.SIGKILL
    assert ConfigStore(kept.path).records == kept.records
    kept.add([a_record(key={"n": 1})])
    kept.save()  # nor is it locked
    assert len(ConfigStore(kept.path)) == 2


def test_processes_killed_at_any_time_leave_a_readable_store(tmp_path):
    code = """
kept = ConfigStore(sys.argv[1])
kept.add([record(n=n, of=os.getpid()) for n in range(200)])
kept.save()
print("running", flush=True)
while True:
    kept.save()
"""
    path = tmp_path / "store.json"
    running = [process(code, path) for _ in range(2)]
    for p, seconds in zip(running, (0.05, 0.173)):
        assert p.stdout.readline() == "running\n"
        with pytest.raises(subprocess.TimeoutExpired):
            p.wait(seconds)
        p.kill()
        p.communicate()
        assert len(ConfigStore(path)) in (200, 400)
    assert len(ConfigStore(path)) == 400


@pytest.mark.parametrize("end", ["", "raise KeyError"])
def test_a_whole_process_by_an_environment_variable(tmp_path, end):
    code = f"""
import onepass, importlib.util
spec = importlib.util.spec_from_file_location("library", {str(SOURCE)!r})
library = importlib.util.module_from_spec(spec)
spec.loader.exec_module(library)
assert library.run()
print(len(library.benchmarks))
{end}
"""
    for expected in ("3\n", "0\n"):
        p = process(code, ONEPASS_AUTOTUNE_STORE=str(tmp_path / "store.json"))
        output, errors = p.communicate(timeout=120)
        assert output == expected, errors
    assert len(ConfigStore(tmp_path / "store.json")) == 1


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


def test_sinks(library, tmp_path, caplog):
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

    with caplog.at_level(logging.INFO, "onepass.autotune"):
        step(AutotuneReportCallback())
        step(AutotuneReportCallback([fails, lines, traced]))
        step(AutotuneReportCallback([lines]))
    assert caplog.text.count("autotuned local.plain_kernel") == 1 and "the next 100.0% slower" in caplog.text
    assert "no network" in caplog.text, "a sink that fails is a warning"
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
    assert "2 records" in command("merge", *paths, "--out", tmp_path / "c.json")
    assert len(ConfigStore(tmp_path / "c.json")) == 2
    assert "1 records" in command(
        "export", tmp_path / "c.json", "--out", tmp_path / "d.json", "--kernel", "k", "--no-candidates"
    )
    (record,) = ConfigStore(tmp_path / "d.json").records
    assert record == a_record() and record.margin is None
    assert "0 records" in command("export", tmp_path / "c.json", "--out", tmp_path / "e.json", "--gpu", "H100")
    assert len(ConfigStore(tmp_path / "e.json")) == 0
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


@pytest.mark.parametrize("op, kernels", [
    ("log_probs_and_entropy", ["softmax_statistics_kernel", "softmax_gradient_kernel"]),
    ("kl_div", ["divergence_kernel", "divergence_gradient_kernel"]),
])  # fmt: skip
@pytest.mark.parametrize("shape", [(2, 700), (5, 83)], ids=str)
def test_any_candidate_gives_the_same_results(interpreted, op, kernels, shape):
    step = step_of(OPERATIONS[op], *shape, torch.float32, torch.device("cpu"))
    expected = step()
    times = iter(range(1, 1000))

    def time(call):
        for got, same in zip(call(), expected):
            torch.testing.assert_close(got, same, rtol=1e-5, atol=1e-6)
        return float(next(times))

    records = list(measure(step, time, Console(quiet=True)))
    assert [r.kernel for r in records] == kernels
    for record in records:
        assert record.key["rows"] == shape[0] and record.key["vocab"] == shape[1]
        assert len(record.candidates) > 3 and record.config == record.candidates[0]["config"], "the first took least"
        assert all(c["config"].keys() == record.config.keys() for c in record.candidates)


def test_what_is_shipped_is_used(interpreted, monkeypatch):
    logits = torch.randn(6, 300)
    target = torch.zeros(6, dtype=torch.long)
    with own.asking() as asked:
        forget()
        expected = onepass.selective_log_softmax(logits, target)
    (question,) = asked.values()
    numbers = {name: 2 * n for name, n in question.rule.items()}
    key = question.key | {"rows": 12, "vocab": 250}  # near enough
    record = a_record(
        kernel="softmax_statistics_kernel", source_hash=tuners.source_hash(question.kernel), key=key, config=numbers
    )
    plans = []
    real = launch.Plan
    kernels = importlib.import_module("onepass.kernels.softmax_statistics")  # not the function of that name
    monkeypatch.setattr(kernels, "Plan", lambda *a: plans.append(real(*a)) or plans[-1])
    monkeypatch.setattr(own, "_used", {})
    for fields, used in (
        ({}, True), ({"source_hash": "1"}, False), ({"key": key | {"vocab": 5000}}, False),
        ({"key": key | {"read": "entropy"}}, False), ({"config": {"LANES": 64}}, False), ({"kernel": "other"}, False),
    ):  # fmt: skip
        forget()
        monkeypatch.setattr(own, "shipped", lambda fields=fields: [replace(record, **fields)])
        torch.testing.assert_close(onepass.selective_log_softmax(logits, target), expected)
        taken = {name: plans[-1].constexprs[name] for name in numbers}
        assert taken == (numbers if used else question.rule), fields
    assert own.collect_own() == [record] and record in autotune.collect()


def test_what_is_shipped_is_readable_and_of_the_gpu_that_its_name_says():
    for path in own.SHIPPED.glob("*.json"):
        records = ConfigStore(path).records
        assert records and {path.stem in r.gpu.lower() for r in records} == {True}


def test_run_needs_a_gpu(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(AssertionError, match="expected a GPU"):
        command("run", "--out", tmp_path / "store.json")
