"""Damaged and hostile files of the autotuner's store are one warning, and stop no session."""

import contextlib
import copy
import json
import math
import os
import warnings
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import forks
from autotune_cases import a_record
from onepass import autotune
from onepass.autotune import AutotuneRecord, ConfigStore, store, tuners
from store_cases import VERSIONED, imported, nested, warned, written

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


@forks.GROUP
@pytest.mark.parametrize("where", ["damaged", "directory"])
def test_a_process_that_names_a_hostile_store(tmp_path, where):
    path = written(tmp_path / "damaged", nested(100_000)) if where == "damaged" else tmp_path
    code = "import onepass; print('imported')"
    returned, output, errors = imported(code, folder=tmp_path, ONEPASS_AUTOTUNE_STORE=str(path))
    assert returned == 0 and output == "imported\n" and "Traceback" not in errors, errors
    assert errors.count("it is damaged") == (where == "damaged")
    assert errors.count("it cannot be read") == errors.count("not saved") == (where == "directory")


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
