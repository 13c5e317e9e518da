"""Keep what Triton's autotuner chose and use it again: real autotuners, a benchmarker that counts."""

import math
import os
import sys
from dataclasses import replace

import pytest
import torch
import triton
from triton.runtime.autotuner import Autotuner

import forks
from autotune_cases import SOURCE, a_record, load
from onepass import autotune
from onepass.autotune import ConfigStore, store, tuners
from onepass.autotune.sources import source_hash
from store_cases import warned


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


def test_records_of_two_gpus_of_one_architecture_are_kept(library, tmp_path):
    """That of this GPU is used, although the other was faster."""
    assert library.run()
    (record,) = autotune.collect()
    other = replace(record, gpu="another", milliseconds=record.milliseconds / 2, config=record.config | {"BLOCK": 1})
    for order in ((record, other), (other, record)):
        kept = ConfigStore()
        kept.add(order)
        assert len(kept) == 2
        fresh = library.again()
        assert kept.warm() == 1 and fresh.run() and fresh.benchmarks == []


def test_a_time_of_another_gpu_is_not_reported_as_that_of_this_one(library, tmp_path):
    assert library.run()
    (record,) = autotune.collect()
    kept = ConfigStore(tmp_path / "store.json")
    kept.add([replace(record, gpu="another")])
    kept.save()
    fresh = library.again()
    with autotune.session(tmp_path / "store.json"):
        assert fresh.run() and fresh.benchmarks == []
        (found,) = autotune.collect()
    assert found.gpu == "another" and found.milliseconds == record.milliseconds


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


def test_of_two_equally_near_the_one_of_this_gpu_is_used(library):
    assert library.run(n=40)
    (record,) = autotune.collect()
    other = replace(record, gpu="another", key=record.key | {"n": 160})
    kept = ConfigStore()
    kept.add([record, other])
    assert kept.records == [other, record]
    key = tuners.cache_key(replace(record, key=record.key | {"n": 80}))
    assert kept.find(library.plain_kernel, key, nearest=True) is record


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


@pytest.mark.parametrize("time", [math.nan, 0.0, -1.0, 1e300])
def test_times_that_are_none_are_not_kept(library, tmp_path, monkeypatch, time):
    monkeypatch.setattr(library.plain_kernel, "do_bench", lambda call, quantiles: [time] * 3)
    with warned(), autotune.session(tmp_path / "store.json"):
        assert library.run()
    with warned():
        (record,) = ConfigStore(tmp_path / "store.json").records
    assert record.milliseconds is None and [c["milliseconds"] for c in record.candidates] == [None] * 3


def test_how_far_apart_numbers_are():
    for known, wanted, apart in (
        (1, 4, 2),
        (12, 3, 2),
        (1, 5, math.inf),
        (5e-324, 1e308, math.inf),
        (2**64, 2.0**63, 1),
    ):
        for a, b in ((known, wanted), (wanted, known)):
            assert store.distance({"n": a}, {"n": b}) == apart
            assert store.distance({"n": a, "m": "x"}, {"m": "x", "n": b}) == apart


def test_a_kernel_without_a_source_is_not_known(library, monkeypatch):
    def missing(function):
        raise OSError("could not get source code")

    assert library.run()
    kept = ConfigStore()
    kept.add(autotune.collect())
    library.again()
    monkeypatch.setattr("inspect.getsource", missing)  # what Triton's interpreter leaves to ask
    assert len(kept) == 1 and kept.warm() == (1 if torch.cuda.is_available() else 0)


@forks.GROUP
def test_a_whole_process_by_an_environment_variable(tmp_path):
    code = f"""
import onepass, importlib.util, sys
spec = importlib.util.spec_from_file_location("library", {str(SOURCE)!r})
library = importlib.util.module_from_spec(spec)
spec.loader.exec_module(library)
assert all(library.run(n=int(n)) for n in sys.argv[2:])
print(len(library.benchmarks))
exec(sys.argv[1])
"""
    for arguments, expected in (("", 40), "3\n"), (("raise KeyError", 40, 80), "3\n"), (("", 40, 80), "0\n"):
        environment = os.environ | {"ONEPASS_AUTOTUNE_STORE": str(tmp_path / "store.json")}
        found = forks.run(code, *arguments, folder=tmp_path, environment=environment)
        assert found.stdout == expected and (found.returncode != 0) == bool(arguments[0]), found.stderr
    assert len(ConfigStore(tmp_path / "store.json")) == 2


WRONG = {
    "path: expected a str or os.PathLike, got 3": lambda tuned: tuned.ConfigStore(3),
    "path: expected a str or os.PathLike, got None": lambda tuned: tuned.session(None).__enter__(),
    "nearest: expected a bool": lambda tuned: tuned.session("s.json", nearest="y").__enter__(),
    "progress: expected a bool": lambda tuned: tuned.session("s.json", progress="y").__enter__(),
    "records: expected AutotuneRecord, got 'x'": lambda tuned: tuned.ConfigStore().add("x"),
    "other: expected a ConfigStore, got 'x'": lambda tuned: tuned.ConfigStore().merge("x"),
    "path: expected a str": lambda tuned: tuned.JSONLSink(3),
    "logger: expected a logging.Logger or None": lambda tuned: tuned.LogSink("x"),
    "level: expected an int": lambda tuned: tuned.LogSink(level="INFO"),
    "tracer: expected an OpenTelemetry tracer or None": lambda tuned: tuned.OpenTelemetrySink(3),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_arguments_are_named(message):
    with pytest.raises(TypeError, match=f"^{message}"):
        WRONG[message](autotune)
