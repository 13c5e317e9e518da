"""`ConfigStore`: autotuning records in a JSON file that several processes may read and write."""

import json
import math
import os
import stat
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from onepass.autotune.record import AutotuneRecord, NotPlain, here, label_of, minor
from onepass.autotune.sources import identity_of
from onepass.autotune.tuners import answered, autotuners, cache_key, labelled, matching
from onepass.core.caller import stacklevel_outside
from onepass.core.checks import check_path, described
from onepass.core.extras import needed_by

FORMAT, VERSION = "onepass autotune store", 1
LEFT_OUT = "it is left out, as if there were none"
KEPT = f"{LEFT_OUT}, and nothing is saved"
# The warnings about a file that is not used, by its state.
WARNINGS = {
    "damaged": f"it is damaged; {LEFT_OUT}",
    "old": f"an older version of onepass wrote it; {LEFT_OUT}",
    "foreign": f"it is no store of onepass; {KEPT}",
    "newer": f"a newer version of onepass wrote it (this one reads version {VERSION}); {KEPT}",
}


class ConfigStore:
    """Autotuning records in a JSON file, which several processes may read and write.

    A record is found by kernel, hash of its source (or version of a kernel of onepass), GPU architecture, minor version
    of Triton, and key.

    Args:
        path: a JSON file, which is read now if it exists. With None, the store exists only in memory.

    If a file cannot be read, contains anything but valid `AutotuneRecord`, or is of another version, there is one
    warning and the store is empty. `save` renames a damaged file and one of an older version (``.damaged``, ``.old``);
    it never overwrites a file of a newer version or of another program.

    Example::

        store = ConfigStore("tuned.json")
        store.warm()
        ...
        store.add(onepass.autotune.collect())
        store.save()
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.path = None if path is None else Path(check_path(path))
        self._records: dict[tuple[str, ...], AutotuneRecord] = {}
        self._warned: set[str] = set()
        if self.path is not None:
            try:
                records, state = self._read()
                problem = WARNINGS.get(state)
            except (OSError, MemoryError) as error:
                records, problem = [], f"it cannot be read: {error}; {LEFT_OUT}"
            self.warn(problem)
            self.add(records)

    @property
    def records(self) -> list[AutotuneRecord]:
        return sorted(self._records.values(), key=lambda r: (r.module, r.kernel, r.label, r.gpu))

    def __len__(self) -> int:
        return len(self._records)

    def add(self, records: Iterable[AutotuneRecord]) -> None:
        """Add records; of two with the same identity, the faster one is kept.

        Raises:
            TypeError: one is not an `AutotuneRecord`. None is added then.
        """
        records = list(records)
        for record in records:
            if not isinstance(record, AutotuneRecord):
                raise TypeError(f"records: expected AutotuneRecord, got {described(record)}")
        for record in records:
            known = self._records.setdefault(record.identity, record)
            if faster(record, known):
                self._records[record.identity] = record

    def merge(self, other: "ConfigStore") -> None:
        """`add` all of ``other``, which is a store, too."""
        if not isinstance(other, ConfigStore):
            raise TypeError(f"other: expected a ConfigStore, got {described(other)}")
        self.add(other._records.values())

    # Lookup.

    def find(self, tuner: Any, key: tuple[Any, ...], nearest: bool = False) -> AutotuneRecord | None:
        """The record for a key of an autotuner, on the current device, or else on another GPU of the same architecture.

        Args:
            nearest: fall back to the closest record of the same kernel and dtypes in which no number differs by more
                than a factor of 4. Its configuration may be incorrect for this key if the kernel assumes that the key
                is a multiple of some number, so use it only for kernels that do not.
        """
        try:
            labels, dtypes = labelled(tuner, key)
            identity = identity_of(tuner)
        except (NotPlain, OSError):  # a key with objects, or a kernel without a source
            return None
        about = here()
        place = tuner.base_fn.__name__, identity, about["compute_capability"], minor(about["triton"])
        label, gpu = label_of(labels, dtypes), about["gpu"]
        known = self._records.get((*place, label, gpu))
        if known is None:
            here_first = sorted(self.records, key=lambda r: r.gpu != gpu)
            others = [r for r in here_first if r.place == place]
            known = next((r for r in others if r.label == label), None)
            if known is None and nearest:
                known = closest([r for r in others if r.dtypes == dtypes], labels)
        return known

    def warm(self) -> int:
        """Fill the caches of the autotuners of this process, so that keys in the store are not benchmarked.

        Returns the number of keys that were filled. A configuration that the kernel no longer declares is not used.
        Kernels that are imported later are not reached, except by a `session`.
        """
        filled = 0
        for tuner in autotuners():
            for record in self._records.values():
                if record.kernel != tuner.base_fn.__name__ or len(tuner.configs) < 2:
                    continue
                key = cache_key(record)
                config = matching(tuner.configs, record)
                if key not in tuner.cache and config is not None and self.find(tuner, key) is record:
                    tuner.cache[key] = config
                    answered.setdefault(tuner, {})[key] = record
                    filled += 1
        return filled

    # The file.

    def save(self) -> None:
        """Write all records, merged with those that other processes have written, to a new file that then replaces the
        old one atomically. Symlinks are followed, and the file keeps its permissions.

        Raises:
            ValueError: the store has no path.
            OSError: the file cannot be read or written, for example because it is a directory.
            ModuleNotFoundError: the package filelock is missing (extra ``autotune``).
        """
        if self.path is None:
            raise ValueError("path: expected a store with a path, got None")
        with needed_by("ConfigStore.save", "autotune"):
            from filelock import FileLock
        path = Path(os.path.realpath(self.path))
        if path.exists() and not path.is_file():
            raise OSError(f"expected a file, got {path}")
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock"):
            written, state = self._read()
            self.warn(WARNINGS.get(state))
            if state in ("newer", "foreign"):
                return
            mode = None if state == "missing" else stat.S_IMODE(path.stat().st_mode)
            if state in ("damaged", "old"):
                path.replace(f"{path}.{state}")
            self.add(written)
            text = {"format": FORMAT, "version": VERSION, "records": [r.to_json() for r in self.records]}
            beside = Path(f"{path}.new")
            beside.unlink(missing_ok=True)  # left by a process that was killed
            with beside.open("x", encoding="utf-8") as file:
                if mode is not None:
                    beside.chmod(mode)
                json.dump(text, file, indent=1, allow_nan=False)
                file.write("\n")
                file.flush()
                os.fsync(file.fileno())
            beside.replace(path)

    def warn(self, problem: str | None) -> None:
        """Warn about a problem of the file, once; None for no problem."""
        if problem is not None and problem not in self._warned:
            self._warned.add(problem)
            warnings.warn(f"autotune store {self.path}: {problem} [OP003]", RuntimeWarning,
                          stacklevel=stacklevel_outside("onepass.", "contextlib."))  # fmt: skip

    def _read(self) -> tuple[list[AutotuneRecord], str]:
        """The records and the state of the file: "missing", "ours", "damaged", "foreign", "old" or "newer"."""
        records: list[AutotuneRecord] = []
        state = "ours"
        try:
            data = json.loads(self.path.read_text("utf-8"))  # type: ignore[union-attr]
            if not isinstance(data, dict) or data.get("format") != FORMAT or not isinstance(data.get("version"), int):
                state = "foreign"
            elif data["version"] != VERSION:
                state = "newer" if data["version"] > VERSION else "old"
            else:
                records = [AutotuneRecord.from_json(record) for record in data["records"]]
        except FileNotFoundError:
            return [], "missing"
        except (ValueError, KeyError, TypeError, RecursionError):
            records, state = [], "damaged"
        return records, state


def faster(record: AutotuneRecord, known: AutotuneRecord) -> bool:
    if record.milliseconds is None or known.milliseconds is None:
        return known.milliseconds is None and record.milliseconds is not None
    return record.milliseconds < known.milliseconds


def closest(records: Iterable[AutotuneRecord], key: dict[str, Any]) -> AutotuneRecord | None:
    """The record with the nearest key: no number differs by more than a factor of 4, and nothing else differs."""
    near = [(distance(r.key, key), r) for r in records]
    far, record = min(near, key=lambda pair: pair[0], default=(math.inf, None))
    return record if far < math.inf else None


def distance(known: dict[str, Any], wanted: dict[str, Any]) -> float:
    """How far apart two keys are, in factors of two; infinite where anything but numbers differs."""
    if known.keys() != wanted.keys():
        return math.inf
    total = 0.0
    for a, b in ((value, wanted[name]) for name, value in known.items()):
        if a == b and type(a) is type(b):
            continue
        if not (is_positive(a) and is_positive(b) and 1 / 4 <= a / b <= 4):
            return math.inf
        total += abs(math.log2(a / b))
    return total


def is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0
