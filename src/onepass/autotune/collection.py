"""`collect`: the selected configurations of all autotuned kernels of this process."""

from onepass.autotune import own, tuners
from onepass.autotune.record import AutotuneRecord
from onepass.autotune.store import ConfigStore


def collect() -> list[AutotuneRecord]:
    """The selected configurations of all autotuned kernels of this process, of onepass and of other libraries.

    All objects that `triton.autotune` or a subclass of its autotuner created are found, under any name and in any
    wrapper. A module that was imported twice counts once. Keys and configurations that contain objects are omitted,
    since a record cannot hold them. A call takes some 100 ms in a large process.
    """
    found = ConfigStore()
    found.add(own.collect_own())
    for tuner in tuners.autotuners():
        answered = tuners.answered.get(tuner, {})
        measured = [key for key in tuner.cache if key not in answered]
        records = [tuners.record_of(tuner, key, tuner.cache[key], tuners.timings_of(tuner, key)) for key in measured]
        found.add([r for r in (*records, *answered.values()) if r is not None])
    return found.records
