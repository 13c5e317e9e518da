"""`collect`: what every autotuned kernel of this process has chosen."""

from onepass.autotune import own, tuners
from onepass.autotune.record import AutotuneRecord
from onepass.autotune.store import ConfigStore


def collect() -> list[AutotuneRecord]:
    """What every autotuned kernel of this process has chosen so far, ours and other libraries'.

    Finds all that `triton.autotune` made (or a subclass of its own), under whatever name and in whatever wrapper, each
    once. A module that was imported twice counts once. What a record does not hold (a key or a configuration with
    objects in it) is left out. Costs nothing until it is called, then some 100 ms in a large process.
    """
    found = ConfigStore()
    found.add(own.collect_own())
    for tuner in tuners.autotuners():
        measured = [key for key in tuner.cache if key not in tuners.borrowed.get(tuner, ())]
        records = [tuners.record_of(tuner, key, tuner.cache[key], tuners.timings_of(tuner, key)) for key in measured]
        found.add([r for r in records if r is not None])
    return found.records
