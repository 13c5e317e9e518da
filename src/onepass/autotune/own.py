"""What our own kernels are launched with: by rule, unless a measurement on this very GPU was shipped.

A kernel asks `choose` when the launch of a shape is planned, once; a launch never does.
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
MOST_THREADS = 1024  # of a program
Numbers = dict[str, int]


class Question(NamedTuple):
    """What a kernel asked: for the launch of a shape, with the numbers of its rule."""

    kernel: Any
    key: dict[str, Any]
    rule: Numbers


_used: dict[tuple[str, ...], AutotuneRecord] = {}
_asked: dict[str, Question] | None = None
_tried: dict[str, Numbers] = {}  # by the name of a question


def choose(kernel: Any, key: dict[str, Any], rule: Numbers) -> Numbers:
    """The numbers to launch ``kernel`` with: what was shipped for this key or one near it, else those of the rule.

    Any of `candidates` gives the same results, so that a near key's are right, too; and as fast only where the rule
    says the same of both, which is therefore part of the key.
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
    known = [r for r in shipped().get(name, ()) if r.source_hash == identity and r.config.keys() == rule.keys()]
    record = closest(known, key)
    if record is None:
        return rule
    _used[record.identity] = record
    return {number: record.config[number] for number in rule}


def collect_own() -> list[AutotuneRecord]:
    """The shipped records that launches of this process were planned by."""
    return list(_used.values())


@lru_cache
def shipped() -> dict[str, list[AutotuneRecord]]:
    """What was measured on this GPU, by the name of a kernel."""
    found: dict[str, list[AutotuneRecord]] = {}
    for record in (r for path in sorted(SHIPPED.glob("*.json")) for r in ConfigStore(path).records):
        if record.gpu == here()["gpu"]:
            found.setdefault(record.kernel, []).append(record)
    return found


def candidates(rule: Numbers) -> list[Numbers]:
    """Half, once and twice each number of the rule, which comes first; of pipeline stages one less and one more.

    A 1 stays: where one program has a row to itself, a second costs a workspace, and its host time is not measured.
    """
    sizes = []
    for name, n in rule.items():
        others = (n - 1, n + 1) if name == "STAGES" else (n // 2, min(2 * n, MOST_THREADS))
        sizes.append(sorted({n, *others}) if n > 1 else [n])
    found = [dict(zip(rule, numbers)) for numbers in product(*sizes)]
    return sorted(found, key=lambda numbers: numbers != rule)


@contextmanager
def asking() -> Iterator[dict[str, Question]]:
    """What is asked meanwhile, each by its name."""
    global _asked
    found: dict[str, Question] = {}
    _asked = found
    try:
        yield found
    finally:
        _asked = None


@contextmanager
def trying(question: str, numbers: Numbers) -> Iterator[None]:
    """Launches that are planned meanwhile and ask this take these."""
    _tried[question] = numbers
    try:
        yield
    finally:
        del _tried[question]
