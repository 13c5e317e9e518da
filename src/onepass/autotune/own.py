"""Launch parameters of the kernels of onepass: by rule, unless a measurement on this GPU model is shipped.

`choose` is called once per shape, when its launch is planned, and never by a launch itself.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from onepass.autotune.record import AutotuneRecord, here
from onepass.autotune.sources import identity_of, jitted
from onepass.autotune.store import ConfigStore, closest

SHIPPED = Path(__file__).parent / "shipped"
MOST_THREADS = 1024  # per program
Numbers = dict[str, int]


class Question(NamedTuple):
    """A call of `choose`: the kernel, the key of a shape, and the numbers of the rule."""

    kernel: Any
    key: dict[str, Any]
    rule: Numbers


_used: dict[tuple[str, ...], AutotuneRecord] = {}
_asked: dict[str, Question] | None = None
_tried: dict[str, Numbers] = {}  # by the name of a `Question`


def choose(kernel: Any, key: dict[str, Any], rule: Numbers) -> Numbers:
    """The numbers to launch ``kernel`` with: those shipped for this key or a near one, else those of the rule.

    All `candidates` give the same results, so the numbers of a near key are correct too. They are only as fast if the
    rule gives the same numbers for both keys, so these numbers are part of the key.
    """
    name = jitted(kernel).fn.__name__
    key = key | {"rule": "+".join(map(str, rule.values()))}
    if _asked is not None or _tried:
        question = json.dumps([name, key])
        if _asked is not None:
            _asked[question] = Question(kernel, key, rule)
        if question in _tried:
            return _tried[question]
    identity = identity_of(kernel)
    records = shipped(here()["gpu"]).get(name, ())
    known = [r for r in records if r.source_hash == identity and r.config.keys() == rule.keys()]
    record = closest(known, key)
    if record is None:
        return rule
    _used[record.identity] = record
    return {number: record.config[number] for number in rule}


def collect_own() -> list[AutotuneRecord]:
    """The shipped records that launches of this process use."""
    return list(_used.values())


@lru_cache
def shipped(gpu: str) -> dict[str, list[AutotuneRecord]]:
    """The records of a GPU model, by the name of the kernel."""
    found: dict[str, list[AutotuneRecord]] = {}
    for record in (r for path in sorted(SHIPPED.glob("*.json")) for r in ConfigStore(path).records):
        if record.gpu == gpu:
            found.setdefault(record.kernel, []).append(record)
    return found


def candidates(rule: Numbers) -> list[Numbers]:
    """Half, once and twice each number of the rule, which comes first; for pipeline stages one less and one more.

    A 1 is not changed: a second program per row costs a workspace, whose host time is not measured.
    """
    sizes = []
    for name, n in rule.items():
        others = (n - 1, n + 1) if name == "STAGES" else (n // 2, min(2 * n, MOST_THREADS))
        sizes.append(sorted({n, *others}) if n > 1 else [n])
    found = [dict(zip(rule, numbers)) for numbers in product(*sizes)]
    return sorted(found, key=lambda numbers: numbers != rule)


@contextmanager
def record_questions() -> Iterator[dict[str, Question]]:
    """Record the calls of `choose` within the ``with`` block, by the name of the `Question`."""
    global _asked
    found: dict[str, Question] = {}
    _asked = found
    try:
        yield found
    finally:
        _asked = None


@contextmanager
def override_answer(question: str, numbers: Numbers) -> Iterator[None]:
    """Answer ``question`` with ``numbers`` for launches that are planned within the ``with`` block."""
    _tried[question] = numbers
    try:
        yield
    finally:
        del _tried[question]
