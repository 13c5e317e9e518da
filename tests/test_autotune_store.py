"""Keep what Triton's autotuner chose and use it again: real autotuners, a benchmarker that counts."""

import contextlib
import copy
import json
import math
import multiprocessing
import os
import signal
import stat
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import triton
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from triton.runtime.autotuner import Autotuner

import forks
from autotune_cases import SOURCE, a_record, load
from onepass import autotune
from onepass.autotune import AutotuneRecord, ConfigStore, store, tuners
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


@contextlib.contextmanager
def warned(*expected):
    """Exactly these, and each once."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    found = [(w.category, str(w.message)) for w in caught]
    assert len(found) == len(expected), found
    assert all(c is RuntimeWarning and text in message for (c, message), text in zip(found, expected)), found


def nested(levels):
    return "[" * levels + "]" * levels


# Fields of a record as text of JSON.
HOSTILE = {
    "a dtype that is none": ("key", '{"n": 40, "activation": {"dtype": "nosuch"}}'),
    "a dtype that is something else of torch": ("key", '{"n": 40, "activation": {"dtype": "nn"}}'),
    "a dtype that is a list": ("key", '{"n": 40, "activation": {"dtype": []}}'),
    "an object": ("key", '{"n": 40, "activation": {"a": 1}}'),
    "lists in lists": ("key", '{"n": 40, "activation": ' + nested(300) + "}"),
    "many lists in lists": ("key", '{"n": 40, "activation": ' + nested(100_000) + "}"),
    "an enormous integer": ("key", '{"activation": "silu", "n": 1' + "0" * 400 + "}"),
    "a key that is no number": ("key", '{"n": NaN, "activation": "silu"}'),
    "a key that is infinite": ("key", '{"n": 1e999, "activation": "silu"}'),
    "a path": ("key", '{"n": 40, "activation": "/home/someone"}'),
    "many entries": ("key", json.dumps({f"n{n}": 1 for n in range(5000)})),
    "a configuration that is no number": ("config", '{"BLOCK": NaN}'),
    "a configuration of objects": ("config", '{"BLOCK": {"a": []}}'),
    "an enormous configuration": ("config", '{"BLOCK": 1' + "0" * 400 + "}"),
    "a dtype that is a number": ("dtypes", "[1]"),
    "a dtype in a list": ("dtypes", '[["torch.float32"]]'),
    "a dtype that does not exist": ("dtypes", '["torch.nosuch"]'),
    "a time that is no number": ("milliseconds", "NaN"),
    "an infinite time": ("milliseconds", "Infinity"),
    "a negative time": ("milliseconds", "-1.0"),
    "no time at all": ("milliseconds", "0"),
    "an enormous time": ("milliseconds", "1" + "0" * 400),
    "a time that is true": ("milliseconds", "true"),
    "candidates that are numbers": ("candidates", "[1]"),
    "candidates that are empty": ("candidates", "[{}]"),
    "a candidate with more fields": ("candidates", '[{"config": {}, "milliseconds": 1.0, "path": 1}]'),
    "a candidate without names": ("candidates", '[{"config": [], "milliseconds": 1.0}]'),
    "a time of a candidate that is a word": ("candidates", '[{"config": {"BLOCK": 8}, "milliseconds": "1"}]'),
    "a time of a candidate that is no number": ("candidates", '[{"config": {"BLOCK": 8}, "milliseconds": NaN}]'),
    "negative memory": ("shared_memory", "-1"),
    "enormous memory": ("shared_memory", "1" + "0" * 400),
    "memory that is true": ("shared_memory", "true"),
    "an escape sequence": ("gpu", '"\\u001b[31m"'),
    "half of a character": ("gpu", '"\\ud800"'),
    "a long name": ("module", '"' + "x" * 10_000 + '"'),
}


def a_store_with(record, field, text):
    """A file of this record and a second one, in which a field is replaced."""
    second = json.dumps(record.to_json() | {field: "HERE"}).replace('"HERE"', text)
    records = f"[{json.dumps(replace(record, kernel='other').to_json())}, {second}]"
    return VERSIONED.format(1).replace("[]", records)


def use(path, library):
    """All that can be done with a store."""
    kept = ConfigStore(path)
    for nearest in (False, True):
        for tuner in (library.plain_kernel, library.heuristics_inside_kernel):
            for key in ((40, "silu", "torch.float32", "torch.float32"), (80, "silu"), (1e308,)):
                kept.find(tuner, key, nearest)
    assert kept.warm() >= 0 and len(kept.records) == len(kept)
    kept.add(autotune.collect())
    kept.save()


def use_in_a_session(path, library):
    with autotune.session(path, nearest=True):
        assert library.run() and len(library.benchmarks) == 3, "tuning goes on"


def test_a_hostile_record_damages_its_file(library, tmp_path):
    assert library.run()
    (record,) = autotune.collect()
    fresh = library.again()
    for n, (name, (field, text)) in enumerate(HOSTILE.items()):
        hostile = a_store_with(record, field, text).encode()
        # Every fourth in a session too: a session reads its file as any other does.
        for way in (use, use_in_a_session) if n % 4 == 0 else (use,):
            path = written(tmp_path / f"{n} {way.__name__}.json", hostile)
            with warned(f"autotune store {path}: it is damaged"):
                way(path, fresh if way is use else library.again())
            assert (tmp_path / f"{path.name}.damaged").read_bytes() == hostile, name
            with warned():
                ConfigStore(path)
        with contextlib.suppress(RecursionError):  # of `json`
            data = json.loads(text)
            with pytest.raises(ValueError, match=f"{field}: expected a.*, got|data: expected a dict with .*, got "):
                AutotuneRecord.from_json(record.to_json() | {field: data})


def test_a_record_that_is_right_is_read_as_it_was():
    some = dict(key={"n": -1, "x": 2**64 - 1, "y": [1, [2.5, None, True], {"dtype": "bfloat16"}], "z": ""},
                dtypes=["torch.float8_e4m3fn"], candidates=[{"config": {}, "milliseconds": None}])  # fmt: skip
    record = a_record(**some)
    assert AutotuneRecord.from_json(json.loads(json.dumps(record.to_json()))) == record
    assert tuners.cache_key(record) == (
        -1,
        2**64 - 1,
        (1, (2.5, None, True), torch.bfloat16),
        "",
        "torch.float8_e4m3fn",
    )
    with pytest.raises(ValueError, match="key: expected"):
        a_record(key={"n": 2**64})


def test_a_file_that_is_damaged_while_a_session_runs(library, tmp_path):
    path = tmp_path / "store.json"
    with warned("it is damaged"), autotune.session(path):
        assert library.run(n=40)
        written(path, nested(100_000))
        assert library.run(n=80), "which saves"
    assert len(ConfigStore(path)) == 2 and (tmp_path / "store.json.damaged").read_text() == nested(100_000)


@pytest.mark.parametrize("text", ['{"configs": []}', '{"format": "onepass autotune store", "version": 99}'])
def test_a_file_that_is_never_written_over_is_one_warning(library, tmp_path, text):
    path = written(tmp_path / "store.json", text)
    with warned("nothing is saved"), autotune.session(path):
        assert library.run(n=40) and library.run(n=80)
    assert path.read_text() == text


@pytest.mark.parametrize("where", ["", "folder", "file/store.json"])
def test_a_path_that_is_no_file(library, tmp_path, where):
    (tmp_path / "folder" / "inside").mkdir(parents=True)
    written(tmp_path / "file", "kept")
    path = tmp_path / where
    with warned("it cannot be read"):
        kept = ConfigStore(path)
        assert len(kept) == 0 and kept.warm() == 0
    with pytest.raises(OSError):
        kept.save()
    with warned("it cannot be read", "not saved"), autotune.session(path):
        assert library.run(n=40) and library.run(n=80)
    assert (tmp_path / "folder" / "inside").is_dir() and (tmp_path / "file").read_text() == "kept"


def test_a_file_that_must_not_be_read(library, tmp_path, monkeypatch):
    """Which root may always; therefore what opens files says so."""
    path, real = written(tmp_path / "store.json", "not ours"), open

    def denied(file, *arguments, **options):
        if str(file) == str(path):
            raise PermissionError(13, "Permission denied", str(file))
        return real(file, *arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr("io.open", denied)
        with warned("it cannot be read"):
            assert len(ConfigStore(path)) == 0
        with warned("it cannot be read", "not saved"), autotune.session(path):
            assert library.run(n=40) and library.run(n=80)
    assert path.read_text() == "not ours", "nor is it written over"


def imported(code, *arguments, folder, **environment):
    """What a process prints that imports onepass anew, and runs no kernel."""
    left = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = forks.run(code, *arguments, folder=folder, environment=left | environment, timeout=120)
    return done.returncode, done.stdout, done.stderr


@forks.GROUP
@pytest.mark.parametrize("where", ["damaged", "directory"])
def test_a_process_that_names_a_hostile_store(tmp_path, where):
    path = written(tmp_path / "damaged", nested(100_000)) if where == "damaged" else tmp_path
    code = "import onepass; print('imported')"
    returned, output, errors = imported(code, folder=tmp_path, ONEPASS_AUTOTUNE_STORE=str(path))
    assert returned == 0 and output == "imported\n" and "Traceback" not in errors, errors
    assert errors.count("it is damaged") == (where == "damaged")
    assert errors.count("it cannot be read") == errors.count("not saved") == (where == "directory")


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


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_a_saved_file_keeps_its_mode(tmp_path):
    kept = ConfigStore(tmp_path / "store.json")
    before = os.umask(0o027)
    try:
        kept.save()
        assert mode(kept.path) == 0o640, "a new file has the usual one"
        for text in (None, "damaged"):
            if text is not None:
                written(kept.path, text)
            kept.path.chmod(0o604)
            with warned(*["it is damaged"] * (text is not None)):
                kept.save()
            assert mode(kept.path) == 0o604
    finally:
        os.umask(before)


def test_a_symlink_stays_one(tmp_path):
    (tmp_path / "links").mkdir()
    link, target = tmp_path / "links" / "store.json", tmp_path / "elsewhere" / "real.json"
    link.symlink_to(target)
    for n, text in enumerate((None, None, "damaged")):
        if text is not None:
            written(target, text)
        kept = ConfigStore()
        kept.path = link
        kept.add([a_record(key={"n": n})])
        with warned(*["it is damaged"] * (text is not None)):
            kept.save()
        assert link.is_symlink() and len(ConfigStore(target)) == (n + 1 if text is None else 1)
    assert [p.name for p in link.parent.iterdir()] == ["store.json"]
    assert sorted(p.name for p in target.parent.iterdir()) == ["real.json", "real.json.damaged", "real.json.lock"]


def test_what_a_killed_process_left_is_not_followed(tmp_path):
    other = written(tmp_path / "other", "kept")
    (tmp_path / "store.json.new").symlink_to(other)
    kept = ConfigStore(tmp_path / "store.json")
    kept.add([a_record()])
    kept.save()
    assert other.read_text() == "kept" and len(ConfigStore(kept.path)) == 1 and not kept.path.is_symlink()


@forks.GROUP
def test_reading_needs_no_filelock(tmp_path):
    kept = ConfigStore(tmp_path / "store.json")
    kept.add([a_record()])
    kept.save()
    code = """
import sys
sys.modules["filelock"] = None
from onepass.autotune import ConfigStore, own, session
assert own.shipped("") is not None and len(ConfigStore(sys.argv[1])) == 1
try:
    ConfigStore(sys.argv[1]).save()
except ModuleNotFoundError:
    print("not saved")
with session(sys.argv[1]):
    print("in a session")
"""
    _, output, errors = imported(code, kept.path, folder=tmp_path)
    assert output == "not saved\nin a session\n" and errors.count("RuntimeWarning") == 1, errors
    assert "not saved" in errors and "filelock" in errors and len(ConfigStore(kept.path)) == 1


# Values that a careless or a hostile program may write.
BAD = [10**400, -1, 0, True, math.nan, math.inf, 1e308, 5e-324, {}, [], [1], {"a": []}, {"dtype": "nosuch"},
       {"dtype": []}, {"dtype": "half"}, [[[[]]]], json.loads(nested(300)), "torch.nn", ["torch.nn"], "/home",
       "x" * 1000, [{"config": {}}], [{"config": {}, "milliseconds": -1}]]  # fmt: skip
VALUES = st.sampled_from(BAD) | st.integers() | st.floats() | st.text(max_size=4)
BYTES = st.sampled_from([b"9" * 400, b"[" * 10**5, b'{"a":' * 10**5, b""]) | st.binary(max_size=3)


def entries(value):
    """All entries of all lists and dictionaries of a document, each as what holds it and its key."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from entries(value[key])


def mutated(data, text):
    """The text with some of its bytes changed, or with one or two of its values replaced, left out or renamed."""
    if data.draw(st.integers(0, 3)) == 0:
        at, length = data.draw(st.integers(0, len(text))), data.draw(st.sampled_from([0, 1, 5, 100]))
        return text[:at].encode() + data.draw(BYTES) + text[at + length :].encode()
    document = json.loads(text)
    for _ in range(data.draw(st.integers(1, 2))):
        holder, key = data.draw(st.sampled_from(list(entries(document))))
        what = data.draw(st.sampled_from(["replace", "replace", "replace", "remove", "rename"]))
        if what == "replace":
            holder[key] = copy.deepcopy(data.draw(VALUES))
        else:
            value = holder.pop(key)
            if what == "rename" and isinstance(holder, dict):
                holder[data.draw(st.text(max_size=4))] = value
    return json.dumps(document).encode()


@settings(
    max_examples=200, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_damage_is_one_warning(library, tmp_path, monkeypatch, data):
    tuner = library.plain_kernel
    monkeypatch.setattr(store, "autotuners", lambda: [tuner, library.heuristics_inside_kernel])  # a fast search
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    key = (40, "silu", "torch.float32", "torch.float32")
    kept = ConfigStore(tmp_path / "valid.json")
    timings = {config: time for config, time in zip(library.CONFIGS, (3.0, math.inf, 1.0))}
    for k in (key, (41, torch.float16, "torch.float32")):
        kept.add([tuners.record_of(tuner, k, library.CONFIGS[2], timings)])
    assert len(kept) == 2
    if not kept.path.exists():
        kept.save()
    path = written(tmp_path / "store.json", mutated(data, kept.path.read_text()))
    tuner.cache.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hostile = ConfigStore(path)
        assert hostile.warm() <= 2
        assert hostile.find(tuner, key) in (None, *hostile.records)
        assert hostile.find(tuner, (80, "silu", *key[2:]), nearest=True) in (None, *hostile.records)
        assert all(r.margin is None or r.margin >= -1 for r in hostile.records)
        hostile.save()
    assert len(caught) <= 1 and all(w.category is RuntimeWarning for w in caught), caught
    if not caught or "nothing is saved" not in str(caught[0].message):
        with warned():
            assert len(ConfigStore(path)) == len(hostile)
    else:
        assert len(hostile) == 0


def test_the_file_is_for_people_too(tmp_path):
    kept = ConfigStore(tmp_path / "new folder" / "store.json")
    kept.add([a_record()])
    kept.save()
    text = kept.path.read_text()
    assert text.count("\n") > 10 and json.loads(text)["version"] == store.VERSION
    assert ConfigStore(kept.path).records == kept.records
    with pytest.raises(ValueError, match="path: expected"):
        ConfigStore().save()


def process(code, *arguments, **environment):
    """A Python of its own, as what is read at imports needs."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(
        command, env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def forked(function, *arguments):
    """A process that calls a function, where warnings are errors; nothing need be imported again."""

    def call():
        warnings.simplefilter("error")
        function(*arguments)

    p = multiprocessing.get_context("fork").Process(target=call)
    p.start()
    return p


def test_processes_that_write_one_store_lose_nothing(tmp_path):
    path, count = tmp_path / "store.json", 20

    def save_each(records):
        for record in records:
            kept = ConfigStore(path)
            kept.add([record])
            kept.save()

    running = [forked(save_each, [a_record(key={"process": p, "n": n}) for n in range(count)]) for p in range(3)]
    for p in running:
        p.join(120)
        assert p.exitcode == 0
    assert {(r.key["process"], r.key["n"]) for r in ConfigStore(path).records} == {
        (p, n) for p in range(3) for n in range(count)
    }
    assert sorted(p.name for p in tmp_path.iterdir()) == ["store.json", "store.json.lock"]


@pytest.mark.parametrize("owner, name", [(json, "dump"), (os, "fsync"), (Path, "replace")])
def test_a_killed_save_leaves_what_was_there(tmp_path, owner, name):
    kept = ConfigStore(tmp_path / "store.json")
    kept.add([a_record()])
    kept.save()

    def killed(*arguments, **options):
        if name == "dump":  # half of it is written
            arguments[1].write('{"format": "onepass autotune store", "records": [')
            arguments[1].flush()
        os.kill(os.getpid(), signal.SIGKILL)

    def save(records):
        setattr(owner, name, killed)
        kept.add(records)
        kept.save()

    p = forked(save, [a_record(key={"n": n}) for n in range(1000)])
    p.join(120)
    assert p.exitcode == -signal.SIGKILL
    assert len(kept) == 1 and ConfigStore(kept.path).records == kept.records
    kept.add([a_record(key={"n": 1})])
    kept.save()  # nor is it locked
    assert len(ConfigStore(kept.path)) == 2


def test_processes_killed_at_any_time_leave_a_readable_store(tmp_path):
    path = tmp_path / "store.json"

    def save_again_and_again(records, saved):
        kept = ConfigStore(path)
        kept.add(records)
        kept.save()
        saved.set()
        while True:
            kept.save()

    running = []
    for of in range(2):
        saved = multiprocessing.get_context("fork").Event()
        running.append(
            (forked(save_again_and_again, [a_record(key={"n": n, "of": of}) for n in range(200)], saved), saved)
        )
    for (p, saved), seconds in zip(running, (0.05, 0.173)):
        assert saved.wait(120)
        p.join(seconds)
        assert p.is_alive()
        p.kill()
        p.join()
        assert len(ConfigStore(path)) in (200, 400)
    assert len(ConfigStore(path)) == 400


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
        p = process(code, *arguments, ONEPASS_AUTOTUNE_STORE=str(tmp_path / "store.json"))
        output, errors = p.communicate(timeout=120)
        assert output == expected and (p.returncode != 0) == bool(arguments[0]), errors
    assert len(ConfigStore(tmp_path / "store.json")) == 2
