"""The Triton autotuners of this process, their keys and selected configurations, for `collect` and `ConfigStore`.

All dependencies on the internals of `triton.runtime.autotuner` are in this file.
"""

import gc
import logging
import sys
from collections.abc import Sequence
from functools import lru_cache
from importlib.metadata import packages_distributions
from typing import Any
from weakref import WeakKeyDictionary

from triton import Config
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import KernelInterface

from onepass.autotune.record import AutotuneRecord, NotPlain, decode, encode, here, is_time
from onepass.autotune.sources import identity_of, jitted

LOG = logging.getLogger(__name__)
Timings = dict[Config, float]
# Timings that a session observed. Triton itself keeps only the timings of the last key.
observed: "WeakKeyDictionary[Autotuner, dict[tuple[Any, ...], Timings]]" = WeakKeyDictionary()
# Keys that a store answered, which therefore were not measured, with the record; None for that of a near key.
answered: "WeakKeyDictionary[Autotuner, dict[tuple[Any, ...], AutotuneRecord | None]]" = WeakKeyDictionary()


def autotuners() -> list[Autotuner]:
    """All autotuners, found by type, since closures and classes may reference a kernel as well as modules."""
    objects = gc.get_objects()  # without objects from before a gc.freeze(), so modules are searched too
    for module in list(sys.modules.values()):
        for value in list(getattr(module, "__dict__", {}).values()):
            while issubclass(type(value), KernelInterface):  # isinstance() would resolve lazy proxies
                objects.append(value)
                value = getattr(value, "fn", None)
    return list({id(o): o for o in objects if issubclass(type(o), Autotuner)}.values())


def record_of(tuner: Autotuner, key: tuple[Any, ...], config: Config, timings: Timings | None) -> AutotuneRecord | None:
    try:
        labels, dtypes = labelled(tuner, key)
        found = [(described(c), t) for c, t in (timings or {}).items()]
        return record_from(tuner.fn, labels, dtypes, described(config), found)
    except NotPlain as reason:
        LOG.debug("%s is left out: %s", tuner.base_fn.__name__, reason)
    except Exception:  # another library's kernel must not end a training run
        LOG.debug("%s is left out", tuner.base_fn.__name__, exc_info=True)
    return None


def record_from(
    kernel: Any,
    key: dict[str, Any],
    dtypes: list[str],
    config: dict[str, Any],
    timings: Sequence[tuple[dict[str, Any], float]] = (),
) -> AutotuneRecord:
    """A record of a `triton.jit` function in any wrapper; the timing of a candidate that cannot run is infinite."""
    time = next((t for c, t in timings if c == config), None)
    if time == float("inf"):
        raise NotPlain("none of its configurations runs")
    candidates = [
        {"config": c, "milliseconds": t if is_time(t) else None} for c, t in sorted(timings, key=lambda pair: pair[1])
    ]
    function = jitted(kernel).fn
    return AutotuneRecord(
        kernel=function.__name__, module=public_module(function.__module__), source_hash=identity_of(kernel), key=key,
        dtypes=dtypes, config=config, milliseconds=time if is_time(time) else None, candidates=candidates, **here(),
    )  # fmt: skip


def key_of(tuner: Autotuner, kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The cache key of `Autotuner.run`, while it runs."""
    given = {k: v for k, v in {**tuner.nargs, **kwargs}.items() if k in tuner.arg_names}
    return (
        *[given[name] for name in tuner.keys if name in given],
        *[str(a.dtype) for a in given.values() if hasattr(a, "dtype")],
    )


def labelled(tuner: Autotuner, key: tuple[Any, ...]) -> tuple[dict[str, Any], list[str]]:
    """The key's declared arguments by name, and the dtypes of the tensors."""
    count = len(key)
    while count > 0 and isinstance(key[count - 1], str) and key[count - 1].startswith("torch."):
        count -= 1
    count = max(count, min(len(tuner.keys), len(key)))  # a declared argument may look like a dtype
    names = list(tuner.keys) if count == len(tuner.keys) else [f"key{n}" for n in range(count)]
    return {n: encode(v) for n, v in zip(names, key)}, [encode(d) for d in key[count:]]


def cache_key(record: AutotuneRecord) -> tuple[Any, ...]:
    """Triton's cache key; the inverse of `labelled`."""
    return (*[decode(v) for v in record.key.values()], *record.dtypes)


def described(config: Config) -> dict[str, Any]:
    found = config.all_kwargs()
    if found.pop("ir_override", None) is not None:
        raise NotPlain("a configuration with a file of its own")
    return {name: encode(value) for name, value in found.items()}


def matching(configs: Sequence[Config], record: AutotuneRecord) -> Config | None:
    """The candidate that is the record's, or None if it is no longer declared: it may not even be correct."""
    for config in configs:
        try:
            if described(config) == record.config:
                return config
        except NotPlain:
            continue
    return None


def timings_of(tuner: Autotuner, key: tuple[Any, ...]) -> Timings | None:
    seen = observed.get(tuner, {}).get(key)
    last = getattr(tuner, "configs_timings", None)
    if seen is None and last and key == next(reversed(tuner.cache)):
        timings = {config: median(t) for config, t in last.items()}
        if min(timings, key=timings.__getitem__) == tuner.cache[key]:
            return timings
    return seen


def median(timing: Any) -> float:
    """The median of the result of a benchmark: the first of several quantiles, or a single number."""
    return float(timing[0] if isinstance(timing, list | tuple) else timing)


def public_module(name: str) -> str:
    """The name of a module of an installed package, else "local": others may name a person or a model."""
    return name if name.split(".")[0] in installed() else "local"


@lru_cache
def installed() -> frozenset[str]:
    return frozenset({"onepass", *packages_distributions()})
