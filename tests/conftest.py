"""Every test of an operation runs on each path: eager on the CPU, the kernels in Triton's interpreter, the GPU."""

import gc
import importlib
import logging
import os
import warnings
from collections import Counter
from importlib.util import find_spec
from itertools import combinations
from logging.handlers import BufferingHandler

import pytest
import torch

import onepass
from linear_cases import tiles_of
from paths import interpreted, quick_interpreter
from references import search_fewer_modules

gc.disable()  # until all tests are imported
if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers whose threads wait for each other's cores are several times slower.
    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that tests start
    torch.set_num_threads(1)
HAS_TRITON = find_spec("triton") is not None
if HAS_TRITON:
    if not torch.cuda.is_available():
        # Triton decides at decoration whether a kernel is interpreted.
        os.environ["TRITON_INTERPRET"] = "1"
    importlib.import_module("onepass.kernels")

SLOW_TILES = 1, 1000  # in the interpreter
NEIGHBOURS = 8  # few enough that no worker waits long for another one at the end
PATHS = [
    pytest.param("eager", id="eager"),
    pytest.param("interpreter", id="interpreter"),
    pytest.param("gpu", id="gpu", marks=pytest.mark.gpu),
]


@pytest.fixture(scope="session", autouse=True)
def _quick_interpreter_and_search():
    with pytest.MonkeyPatch.context() as patch:
        search_fewer_modules(patch)
        if HAS_TRITON:
            quick_interpreter(patch)
        yield


def pytest_collection_finish():
    # The millions of objects of the imported libraries stay. Python need not look through them for garbage again.
    gc.collect()
    gc.freeze()
    gc.enable()
    gc.set_threshold(100_000, 20, 20)  # 700, 10, 10 in Python 3.11, and what torch compiles is many more


@pytest.hookimpl(tryfirst=True)  # before ``-m`` selects
def pytest_collection_modifyitems(config, items):
    if not torch.cuda.is_available():
        of_gpus = [item for item in items if item.get_closest_marker("gpu")]
        config.hook.pytest_deselected(items=of_gpus)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]
    of_pairs = {}
    for item in items:
        marker = item.get_closest_marker("pairs")
        if marker and not is_skipped(item.callspec.params, **marker.kwargs):
            of_pairs.setdefault((item.path, item.originalname), []).append(item)
    for tests in of_pairs.values():
        for item in beyond_pairs(tests):
            item.add_marker("exhaustive")
    group_neighbours(items)


def group_neighbours(items):
    """Have one worker run tests that follow each other, which share what is made once.

    After every test, pytest-xdist counts all groups that it has sent. With a group for each of thousands of tests, that
    takes longer than many tests do.
    """
    before = Counter()
    for item in items:
        if not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group(f"{item.path.stem} {before[item.path] // NEIGHBOURS}"))
            before[item.path] += not item.get_closest_marker("exhaustive")


def is_skipped(values, unless=lambda **_: False):
    """By the fixture `tile`, or by the test itself, as its marker says."""
    skips_tile = values.get("device") == "interpreter" and values.get("tile", (4,))[0] in SLOW_TILES
    return skips_tile or unless(**values)


def beyond_pairs(items):
    """Those of a test's items whose every two parameters have the same values in another item, too."""
    values = {item: [(name, id(value)) for name, value in item.callspec.params.items()] for item in items}
    pairs = {item: set(combinations(of_item, 2)) for item, of_item in values.items()}
    missing = set().union(*pairs.values())
    while missing:
        best = max(pairs, key=lambda item: len(pairs[item] & missing))  # the first of these
        missing -= pairs.pop(best)
    return list(pairs)


@pytest.fixture
def one_thread():
    """For small tensors, of which several threads only take longer."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=PATHS)
def device(request, monkeypatch):
    """The device of a path; the path itself is chosen as `onepass.backend` does."""
    if request.param == "gpu":
        return torch.device("cuda")
    if request.param == "interpreter":
        if not HAS_TRITON:
            pytest.skip("no Triton here")
        if torch.cuda.is_available():
            pytest.skip("the kernels are compiled here")
        return torch.device("cpu")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    return torch.device("cpu")


@pytest.fixture
def eager(monkeypatch, request):
    """As a user's CPU has it, for the tests that do not run on every path."""
    if "device" not in request.fixturenames:
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.fixture
def logged():
    """Records of onepass, from the level INFO on. For pytest's `caplog`, every test would look at the loggers of all
    libraries."""
    logger, handler = logging.getLogger("onepass"), BufferingHandler(10_000)
    level = logger.level
    logger.setLevel("INFO")
    logger.addHandler(handler)
    yield handler.buffer
    logger.removeHandler(handler)
    logger.setLevel(level)


@pytest.fixture
def no_warning():
    """Logits that are computed are an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", onepass.MaterializedLogits)
        yield


@pytest.fixture
def path(request, one_thread):
    """The name of the path, where a test has one."""
    if "device" not in request.fixturenames:
        return ""
    device = request.getfixturevalue("device")
    return "interpreter" if interpreted(device) else "gpu" if device.type == "cuda" else "eager"


@pytest.fixture(autouse=True)
def _tiles_of_few_rows(monkeypatch):
    """Tests have few rows, whose logits a GPU would compute at once."""
    monkeypatch.setattr("onepass.logits.small_head.SMALL_ON", ())


@pytest.fixture
def raises_index_error(device):
    """Whether an index outside the vocabulary is an error on this path (else the row is NaN)."""
    return device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1"


@pytest.fixture
def uninitialised_memory_is_nan():
    if torch.cuda.is_available():
        yield  # where not all of torch is deterministic
        return
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def dynamo():
    """Dynamo with nothing compiled. Its warnings about `functools.lru_cache`, each given once a process, are errors."""
    torch._dynamo.reset()
    getattr(torch._dynamo.utils, "warn_once_cache", set()).clear()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Dynamo detected a call")
        yield torch._dynamo


@pytest.fixture
def sharded():
    """Makes a DTensor of a tensor, sharded over its first dimension as FSDP2 does, in a group of one process."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    yield lambda tensor: distribute_tensor(tensor.detach(), mesh, [Shard(0)])
    torch.distributed.destroy_process_group()


@pytest.fixture(
    params=((1, True), (4, True), (4, False), (1000, True)),
    ids=("tiles of 1", "tiles of 4", "tiles of 4 rows", "one tile"),
)
def tile(request, device, monkeypatch):
    if interpreted(device) and request.param[0] in SLOW_TILES:
        pytest.skip(
            "the interpreter takes minutes for tiles of 1, and runs the same kernels on one tile as on four rows"
        )
    size, slices = request.param
    return tiles_of(monkeypatch, 16 if slices and interpreted(device) else size, slices)  # where each takes long


@pytest.fixture
def everywhere(monkeypatch):
    """All autotuners that are made from now on. In test_autotune.py they are searched for, as onepass does."""
    from triton.runtime.autotuner import Autotuner

    made, init = [], Autotuner.__init__

    def remembered(self, *args, **kwargs):
        init(self, *args, **kwargs)
        made.append(self)

    monkeypatch.setattr(Autotuner, "__init__", remembered)
    return lambda: list(made)


@pytest.fixture
def library(monkeypatch, everywhere):
    """A library whose kernels are the only ones in the process; ``library.again()`` is a second process."""
    import autotune_cases
    from onepass.autotune import own, store, tuners

    known = set(everywhere())  # and alive, lest a new one takes the place of an old one
    monkeypatch.setattr(tuners, "autotuners", lambda: [t for t in everywhere() if t not in known])
    monkeypatch.setattr(store, "autotuners", lambda: tuners.autotuners())
    monkeypatch.setattr(own, "collect_own", lambda: [])
    module = autotune_cases.load()

    def again(source=autotune_cases.SOURCE):
        known.update(everywhere())
        return autotune_cases.load(source)

    module.again = again
    return module


@pytest.fixture(scope="module")
def bitsandbytes():
    if not find_spec("bitsandbytes"):
        pytest.skip("bitsandbytes is not installed")
    with pytest.MonkeyPatch.context() as patch:
        # Its import asks a server for a kernel, and its fallbacks are compiled.
        if find_spec("kernels"):
            patch.setattr("kernels.get_kernel", lambda *_, **__: 1 / 0, raising=False)
        patch.setattr("torch._dynamo.config.disable", True)
        pytest.importorskip("bitsandbytes")
        yield pytest.importorskip("bitsandbytes.functional")
