"""The file of the autotuner's store: what else may be there, its mode and links, and processes that write at once."""

import json
import multiprocessing
import os
import signal
import stat
import warnings
from pathlib import Path

import pytest

import forks
from autotune_cases import a_record
from onepass import autotune
from onepass.autotune import ConfigStore, store
from store_cases import VERSIONED, imported, warned, written

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


def test_a_relative_path_is_that_of_the_folder_in_which_it_was_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").mkdir()
    sink = autotune.JSONLSink("records.jsonl")
    with autotune.session("store.json") as kept:
        monkeypatch.chdir(tmp_path / "other")
        kept.add([a_record()])
    sink([])
    assert (tmp_path / "store.json").exists() and not list((tmp_path / "other").iterdir())


def test_the_file_is_for_people_too(tmp_path):
    kept = ConfigStore(tmp_path / "new folder" / "store.json")
    kept.add([a_record()])
    kept.save()
    text = kept.path.read_text()
    assert text.count("\n") > 10 and json.loads(text)["version"] == store.VERSION
    assert ConfigStore(kept.path).records == kept.records
    with pytest.raises(ValueError, match="path: expected"):
        ConfigStore().save()


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
