"""The benchmark that compares two versions of onepass, and the processes that its versions run in."""

import ast
import json
import os
from pathlib import Path

import pytest

import onepass
from benchmark_cases import run
from benchmarks import versions, versions_operations, versions_worker, workers
from benchmarks.versions import CHECKOUT


@pytest.fixture(scope="module")
def baseline():
    """This version, as the baseline of itself."""
    with versions.renamed(CHECKOUT) as folder, pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield folder


@pytest.fixture
def started(monkeypatch, baseline):
    """The arguments of the workers that were started, which answer in this process."""
    found = []

    class InProcess:
        def __init__(self, module, *arguments, environment):
            found.append(arguments)

        def ask(self, do, **request):
            return versions_worker.answer_to({"do": do, **request})

        def stop(self):
            pass

    monkeypatch.setattr(versions, "Worker", InProcess)
    return found


@pytest.mark.exhaustive
def test_every_operation_of_two_versions_runs(monkeypatch, baseline):
    monkeypatch.setenv("TRITON_INTERPRET", "")
    for case in [case for few in (False, True) for case in versions.cases_of(versions.NAMES, True, few)]:
        found = versions_worker.compare(**case, rounds=1, tiny=True)
        assert set(found) == set(case["passes"]), found
        assert all(len(times) == 1 and times[0] > 0 for name in found for times in found[name].values())


def test_the_baseline_is_another_package(baseline):
    old = getattr(versions_worker.versions()["old"], versions.BASELINE)
    assert old is not onepass and Path(old.__file__).is_relative_to(baseline)
    assert old.cross_entropy.__module__.split(".")[0] == versions.BASELINE


def test_two_versions_are_compared(started, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "")
    chosen = "--op", "entropy", "--op", "softmax_topk", "--tiny", "--rounds", 3, "--processes", 2
    result = run("versions", "--baseline", CHECKOUT, *chosen, "--names", "after", "before", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "versions.json").read_text())
    assert report["failed"] == [] and set(report["sources"]) == {"entropy", "softmax_topk"}
    found = [(r["operation"], r["pass"], len(r["new_ms"]), len(r["old_ms"])) for r in report["results"]]
    assert found == [
        ("softmax_topk", versions.WALL, 2, 2),
        ("entropy", versions.BOTH, 3, 3),
        ("softmax_topk", versions.FORWARD, 3, 3),
        ("softmax_topk", versions.BOTH, 3, 3),
    ]
    assert all(r["least"] <= r["ratio"] <= r["most"] for r in report["results"])
    assert started == [("2",), ("2",), ()], "each process for few rows on two cores, and one for many"


def test_the_version_that_fails_is_named(started, monkeypatch):
    """The operation is reported, and the others go on in another process."""
    old = versions_worker.versions()["old"]
    first, *others = old.OPERATIONS
    monkeypatch.setattr(old, "OPERATIONS", [first._replace(call=lambda *inputs: 1 / 0), *others])
    report = {"tiny": True, "rounds": 1, "processes": 2, "results": [], "sources": {}, "failed": []}
    cases = [c for c in versions.cases_of(["cross_entropy", "softmax_topk"], True, few=True)][-2:]
    versions.compare_few_rows(Path(), cases, report, versions.new_console())
    assert [r["operation"] for r in report["results"]] == ["softmax_topk"]
    [failure] = report["failed"]
    assert failure["operation"] == "cross_entropy" and set(failure["errors"]) == {"old"}
    assert "ZeroDivisionError" in failure["errors"]["old"] and len(started) == 3


def test_a_worker_answers_errors_and_tells_when_it_ends(monkeypatch):
    monkeypatch.setattr(workers, "SECONDS_TO_ANSWER", 60)
    # Not as tests.echo_worker: textstat installs a package of the name tests.
    path = os.pathsep.join(map(str, (CHECKOUT, CHECKOUT / "tests")))
    worker = workers.Worker("echo_worker", environment={"PYTHONPATH": path})
    try:
        assert worker.ask("echo", value=[1]) == [1]
        with pytest.raises(workers.Failure, match="KeyError"):
            worker.ask("fail")
        assert worker.ask("echo", value=2) == 2
        with pytest.raises(workers.Failure, match="the process ended: 3"):
            worker.ask("exit")
    finally:
        worker.stop()


def test_the_operations_import_nothing_that_another_version_may_lack():
    imports = ast.parse(Path(versions_operations.__file__).read_text()).body
    names = {node.module for node in imports if isinstance(node, ast.ImportFrom)}
    assert not any(name.startswith(("onepass", "benchmarks")) for name in names)
