"""`session`: use the stored selections of Triton's autotuner, show the progress of tuning, and store new selections."""

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from triton import Config
from triton.runtime.autotuner import Autotuner

from onepass.autotune import tuners
from onepass.autotune.collection import collect
from onepass.autotune.record import AutotuneRecord
from onepass.autotune.store import ConfigStore
from onepass.core.checks import check_bool, check_path

LOG = logging.getLogger(__name__)
_lock = threading.RLock()
_sessions: "list[Session]" = []
_originals: dict[str, Any] = {}
_of_thread = threading.local()


@contextmanager
def session(
    path: str | os.PathLike[str], *, nearest: bool = False, progress: bool | None = None
) -> Iterator[ConfigStore]:
    """Use the records of a store, and add new selections to it: ``with session("tuned.json"): trainer.train()``.

    On entry, the caches of the autotuners are filled from the store; the cache of a kernel that is imported later is
    filled at its first call. Triton tunes unknown keys as usual. Meanwhile, progress is shown, and each result is saved
    at once, so that it is not lost if the run is killed. On exit, including by an exception, all selections of the
    process are saved. Launches are not slowed down: only methods that Triton calls to benchmark are wrapped. If a store
    cannot be read or saved, there is a warning. Saving needs the extra ``autotune``.

    Args:
        path: the store, see `ConfigStore`. ``ONEPASS_AUTOTUNE_STORE`` sets it for a whole process.
        nearest: whether to use the nearest record for an unknown key, see `ConfigStore.find`.
        progress: whether to show progress on stderr, with a bar if tqdm is installed. By default, only the first
            process of a node does.

    Raises:
        TypeError: an argument has the wrong type.
    """
    nearest = check_bool(nearest, "nearest")
    progress = os.environ.get("LOCAL_RANK", "0") == "0" if progress is None else check_bool(progress, "progress")
    store = ConfigStore(Path(check_path(path)).absolute())  # whatever the current folder becomes
    store.warm()
    current = Session(store, nearest, progress)
    _begin(current)
    try:
        yield store
    finally:
        _end(current)
        store.add(collect())
        _save(store)


def for_process(path: str) -> None:
    """Start a session that lasts until the process ends."""
    stack = ExitStack()
    stack.enter_context(session(path))
    atexit.register(stack.close)


def _save(store: ConfigStore) -> None:
    try:
        store.save()
    except Exception as error:  # neither a full disk nor a missing package is a reason to lose a training run
        store.warn(f"not saved: {error}")


class Session:
    def __init__(self, store: ConfigStore, nearest: bool, progress: bool) -> None:
        self.store, self.nearest, self.progress = store, nearest, progress
        self.tuned = 0
        self.seconds = 0.0


class Tuning:
    """One key of one kernel, while Triton benchmarks it."""

    def __init__(self, tuner: Autotuner, key: tuple[Any, ...], count: int, so_far: str | None) -> None:
        self.tuner, self.key, self.count = tuner, key, count
        self.timings: tuners.Timings = {}
        self.start = time.perf_counter()
        self.bar: Any = None
        if so_far is not None:
            text = f"onepass: Triton tunes {tuner.base_fn.__name__}, {count} configurations{so_far}"
            try:
                from tqdm import tqdm

                self.bar = tqdm(total=count, desc=text, unit="config", file=sys.stderr, leave=True)
            except ModuleNotFoundError:
                print(text, file=sys.stderr, flush=True)

    def add(self, config: Config, timing: Any) -> None:
        self.timings[config] = tuners.median(timing)
        if self.bar is not None:
            self.bar.update()

    @property
    def done(self) -> bool:
        return len(self.timings) >= self.count

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


def _begin(current: Session) -> None:
    with _lock:
        if not _sessions:
            for name, watched in (("prune_configs", _prune_configs), ("_bench", _bench)):
                _originals[name] = getattr(Autotuner, name)
                setattr(Autotuner, name, watched)
        _sessions.append(current)


def _end(current: Session) -> None:
    with _lock:
        _sessions.remove(current)
        if not _sessions:
            for name, original in _originals.items():
                setattr(Autotuner, name, original)


def _known(tuner: Autotuner, key: tuple[Any, ...]) -> AutotuneRecord | None:
    with _lock:
        for current in reversed(_sessions):
            record = current.store.find(tuner, key, current.nearest)
            if record is not None:
                return record
    return None


def _prune_configs(tuner: Autotuner, kwargs: dict[str, Any]) -> list[Config]:
    """Replaces `Autotuner.prune_configs`: the candidates of an unknown key, or only the stored configuration."""
    configs: list[Config] = _originals["prune_configs"](tuner, kwargs)
    unfinished = getattr(_of_thread, "tuning", None)  # left over if a benchmark raised
    if unfinished is not None:
        unfinished.close()
    _of_thread.tuning = _of_thread.known = _of_thread.wanted = None
    try:
        return _answer(tuner, tuners.key_of(tuner, kwargs), configs)
    except Exception:  # a key that cannot be read is tuned as usual
        LOG.debug("%s is not watched", tuner, exc_info=True)
        return configs


def _answer(tuner: Autotuner, key: tuple[Any, ...], configs: list[Config]) -> list[Config]:
    record = _known(tuner, key)
    config = None if record is None else tuners.matching(configs, record)
    if record is None or config is None:
        _of_thread.wanted = tuner, key, len(configs)
        return configs
    answer = record if tuners.cache_key(record) == key else None
    tuners.answered.setdefault(tuner, {})[key] = answer
    _of_thread.known = tuner, config, record.milliseconds or 0.0
    return [config]


def _bench(tuner: Autotuner, *args: Any, config: Config, **meta: Any) -> Any:
    """Replaces `Autotuner._bench`, which times a candidate."""
    known = getattr(_of_thread, "known", None)
    if known is not None and known[0] is tuner and known[1] is config:
        return [known[2]] * 3  # the only candidate need not be timed
    tuning = getattr(_of_thread, "tuning", None)
    wanted = getattr(_of_thread, "wanted", None)
    if tuning is None and wanted is not None and wanted[0] is tuner:
        _, key, count = wanted
        tuning = _of_thread.tuning = Tuning(tuner, key, count, _so_far())
    timing = _originals["_bench"](tuner, *args, config=config, **meta)
    if tuning is not None and tuning.tuner is tuner:
        tuning.add(config, timing)
        if tuning.done:
            _of_thread.tuning = _of_thread.wanted = None
            _finish(tuning)
    return timing


def _so_far() -> str | None:
    """The end of the progress message; None if no session shows progress."""
    with _lock:
        for current in reversed(_sessions):
            if current.progress:
                return f" ({current.tuned} tuned before in {current.seconds:.0f} s)" if current.tuned else ""
    return None


def _finish(tuning: Tuning) -> None:
    tuning.close()
    tuners.observed.setdefault(tuning.tuner, {})[tuning.key] = tuning.timings
    tuners.answered.get(tuning.tuner, {}).pop(tuning.key, None)
    best = min(tuning.timings, key=tuning.timings.__getitem__)
    record = tuners.record_of(tuning.tuner, tuning.key, best, tuning.timings)
    with _lock:
        for current in _sessions:
            current.tuned += 1
            current.seconds += time.perf_counter() - tuning.start
            if record is not None:
                current.store.add([record])
                _save(current.store)
