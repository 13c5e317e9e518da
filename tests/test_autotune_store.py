"""Keep what Triton's autotuner chose and use it again: real autotuners, a benchmarker that counts."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import triton
from triton.runtime.autotuner import Autotuner

from autotune_cases import SOURCE, a_record, load
from onepass import autotune
from onepass.autotune import ConfigStore, store, tuners
from onepass.autotune.sources import source_hash

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


@pytest.mark.parametrize("interpret", ["0", "1"])
def test_what_kernels_are_told_by(tmp_path, monkeypatch, interpret):
    """Their source, and that of the functions and constants that they name; not where in a file they are."""
    monkeypatch.setenv("TRITON_INTERPRET", interpret)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "helpers_of_a_kernel.py").write_text(
        "import triton\n\n@triton.jit\ndef again(x):\n    return x + x\n\n@triton.jit\ndef unused(x):\n    return x\n"
    )
    text = SOURCE.read_text()
    double = "tl.load(x + at, mask=at < n) * 2"
    helped = "TWO = tl.constexpr(2)\n\n\n@triton.jit\ndef twice(x):\n    return x * TWO\n\n\nbenchmarks = []"
    helped = text.replace("benchmarks = []", helped).replace(double, "twice(tl.load(x + at, mask=at < n))")
    imported = "import helpers_of_a_kernel\n" + text.replace(double, f"helpers_of_a_kernel.again({double[:-4]})")
    same = [
        [text, "# A comment.\n" + text, text.replace("num_warps=warps", "num_warps=2 * warps")],
        [helped, helped.replace("benchmarks = []", "UNUSED = tl.constexpr(1)\nbenchmarks = []")],
        [helped.replace("x * TWO", "TWO * x")],
        [helped.replace("constexpr(2)", "constexpr(2.0)")],
        [imported],
    ]
    hashes = []
    for n, sources in enumerate(same):
        found = set()
        for k, source in enumerate(sources):
            path = tmp_path / f"{n}_{k}.py"
            path.write_text(source)
            module = load(path)
            first, second = module.plain_kernel, module.heuristics_inside_kernel
            order = (first, second) if k % 2 else (second, first)  # they share what they call
            found.add(tuple(h for _, h in sorted((kernel is first, source_hash(kernel)) for kernel in order)))
        assert len(found) == 1, n
        hashes += found
    assert len({plain for _, plain in hashes}) == len({inside for inside, _ in hashes}) == len(same)
    helpers = sys.modules.pop("helpers_of_a_kernel")
    helpers.again = helpers.unused
    monkeypatch.setitem(sys.modules, "helpers_of_a_kernel", helpers)
    assert source_hash(load(path).plain_kernel) not in {plain for _, plain in hashes}


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
