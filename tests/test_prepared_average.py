"""The average of few rows: its launches are repeated with addresses alone, so that each must be in its place."""

import sys
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import onepass
from onepass.backend import backend_of
from onepass.core.options import PACKED, Average, Options
from paths import interpreted


def addresses_of(*tensors):
    return tuple(t.data_ptr() for t in tensors)


def empty(size, stride, dtype):
    assert type(size) is type(stride) is tuple  # torch's own function takes no subclass
    return torch.empty_strided(size, stride, dtype=dtype)


def replace(monkeypatch, module, seen, **functions):
    """Record the addresses of what is launched in ``seen``, and replace other functions that the launches call."""
    monkeypatch.setattr(module, "launch", lambda plan, about, given, key: seen.append(
        [None if t is None else t.data_ptr() for t in given]))  # fmt: skip
    for name, function in functions.items():
        monkeypatch.setattr(module, name, function)


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("few", [512, 0], ids=("few rows", "many rows"))
@pytest.mark.parametrize("first", [True, False], ids=("the first average", "a later one"))
@pytest.mark.parametrize("stream", [5, None], ids=("", "captured"))
def test_a_repeated_launch_is_given_what_the_checked_one_is(device, monkeypatch, few, counted, first, stream):
    """It passes pointers without looking at tensors again, so each must be in its place, and memory must be enough."""
    if not interpreted(device):
        pytest.skip("only the pointers are compared, not what a kernel does with them")
    module = sys.modules[backend_of(torch.zeros(1, device=device)).prepare_average.__module__]
    for name in ("softmax_loss", "prepared_average"):
        monkeypatch.setattr(sys.modules[f"onepass.kernels.{name}"], "FEW_ROWS", few)
    monkeypatch.setattr(sys.modules["onepass.kernels.softmax_loss"], "LEAST_LOGITS", 0)
    logits, index = torch.randn(5, 96, device=device), torch.arange(5, device=device)
    average = Average(-1.0, counted, None, -100)
    launches = module.prepare_average(logits, index, average, Options("log_probs", masked=-100), True)
    last, upstream = None if first else torch.zeros(8, device=device), torch.ones((), device=device)
    seen, spaces, alive = [], [], []

    def start(known, index, pointers):
        used = [space() is not None for space, ref in zip(alive, spaces) if ref.data_ptr() in pointers]
        assert all(used), "the workspace is freed before the launch"
        seen.append([*pointers])

    def names(numbers, gradient, total=None):
        """Each pointer as what it points to; into the numbers, with its offset."""
        tensors = logits, index, last, upstream, gradient, total, *spaces
        words = "logits", "index", "last", "of", "gradient", "total", *["space"] * len(spaces)
        known = {t.data_ptr(): n for t, n in zip(tensors, words) if t is not None}
        given = [[p if p is None else known.get(p, (p - numbers.data_ptr()) // 4) for p in each] for each in seen]
        seen.clear()
        return given

    def zeros(n, device, dtype=torch.int32):
        space = torch.zeros(n, dtype=dtype, device=device)
        alive.append(weakref.ref(space))
        spaces.append(space.detach())  # whose memory stays
        return space

    def begin(index, current, *pointers):
        assert current == (9 if index == 0 else stream)
        start(None, index, pointers)

    replace(monkeypatch, module, seen, start=start, zeros=zeros, empty=empty)
    found = []
    for known in (None, SimpleNamespace(workspace=64)):
        monkeypatch.setattr(module, "repeated", lambda key, known=known: known)
        monkeypatch.setattr(module, "quick", lambda key, known=known: known and begin)
        total, gradient, numbers, pointers = launches.average(logits, index, addresses_of(logits, index), last, stream)
        if few:
            spaces.clear()  # it is the numbers
        assert gradient.shape == logits.shape and gradient.stride() == logits.stride() and total.shape == ()
        forward = names(numbers, gradient, total)
        assert (pointers is None) == (known is None)
        launches.correct(logits, index, numbers, upstream, gradient, pointers, (0, 9), True)
        found.append((forward, names(numbers, gradient), numbers.shape, numbers.dtype))
    (checked, *rest), (again, *same) = found
    of_loss = 0 if few else 1
    workspace = again[of_loss].pop()
    assert again == checked and rest == same and len(checked) == (1 if few else 3)
    log_probs = 8 + 4 * -(-len(PACKED) * 5 // 4)  # after the weight of a row, what is guessed, and the statistics
    assert checked[of_loss][6:8] == [8, log_probs]
    given = "index" if counted else None
    if few:
        assert checked[0][14] == (None if first else "last") and checked[0][15] == 0
        words = module.plan_for_loss(*launches.of_loss).workspace
        assert workspace == log_probs + 8 and workspace % 4 == 0 and 0 < words <= numbers.numel() - workspace
    else:
        assert checked[0] == [0, 4, given, None, None if first else "last"] and checked[1][12] == 4
        assert checked[2] == [log_probs, "index", None, 0, "total"] and workspace == "space"
        assert log_probs + 5 <= numbers.numel()


@pytest.mark.parametrize("counted", [True, False])
def test_a_repeated_launch_without_a_gradient_is_given_what_the_checked_one_is(device, monkeypatch, counted):
    if not interpreted(device):
        pytest.skip("only the pointers are compared, not what a kernel does with them")
    module = sys.modules[backend_of(torch.zeros(1, device=device)).prepare_average.__module__]
    logits, index = torch.randn(5, 96, device=device), torch.arange(5, device=device)
    how = Average(-1.0, counted, None, -100), Options("log_probs", masked=-100)
    launches, seen, made, alive = module.prepare_average(logits, index, *how, False), [], [], []

    def zeros(n, device):
        space = torch.zeros(n, dtype=torch.int32)
        alive.append(weakref.ref(space))
        return space

    def start(known, index, pointers):
        assert seen or alive[-1]() is not None, "the workspace is freed before the launch that has it"
        seen.append([*pointers])

    def recorded(size, stride, dtype):
        made.append(empty(size, stride, dtype))
        return made[-1]

    replace(monkeypatch, module, seen, start=start, zeros=zeros, empty=recorded)
    found = []
    for known in (None, SimpleNamespace(workspace=64)):
        monkeypatch.setattr(module, "repeated", lambda key, known=known: known)
        seen.clear()
        total = launches.average(logits, index, addresses_of(logits, index))
        numbers, words = seen[1][3], {logits.data_ptr(): "logits", index.data_ptr(): "index", total.data_ptr(): "total"}
        if known is not None:
            assert seen[0].pop() is not None  # the workspace
            assert made[1].data_ptr() == numbers and total is made[0] and made[1].numel() == launches.size
        found.append([[p if p is None else words.get(p, (p - numbers) // 4) for p in each] for each in seen])
    log_probs = 8 + 4 * -(-len(PACKED) * 5 // 4)
    of_statistics = ["logits", None, "index", "index", None, 8, log_probs, None]
    assert found == [[of_statistics, [log_probs, "index", None, 0, "total"]]] * 2 and launches.size >= log_probs + 5


@pytest.mark.parametrize("what", ["the same", "moved", "upstream not aligned", "upstream negated"])
def test_a_correction_is_repeated_for_tensors_of_the_same_layout_only(device, monkeypatch, what):
    """Hooks may have moved what was saved, and the upstream gradient is the caller's."""
    if not interpreted(device):
        pytest.skip("only the choice between two launches is looked at")
    module = sys.modules[backend_of(torch.zeros(1, device=device)).prepare_average.__module__]
    monkeypatch.setattr(sys.modules["onepass.kernels.softmax_loss"], "LEAST_LOGITS", 0)
    logits, index = torch.randn(5, 96, device=device), torch.arange(5, device=device)
    how = Average(-1.0, True, None, -100), Options("log_probs", masked=-100)
    launches = module.prepare_average(logits, index, *how, True)
    _, gradient, numbers, _ = launches.average(logits, index, addresses_of(logits, index), None, None)
    how = []
    monkeypatch.setattr(module, "quick", lambda key: lambda *_: how.append("repeated"))
    monkeypatch.setattr(module, "launch", lambda *given: how.append(("checked", given[3])))
    upstream = torch.ones(2, device=device)[1] if what == "upstream not aligned" else torch.ones((), device=device)
    upstream = torch._neg_view(upstream) if what == "upstream negated" else upstream
    pointers = None if what == "moved" else (0,)
    launches.correct(logits, index, numbers, upstream, gradient, pointers, (-1, 5), what != "moved")
    assert how == ["repeated" if what == "the same" else ("checked", None if what == "moved" else launches)]


def test_a_call_that_is_observed_is_of_another_kind(device, monkeypatch):
    """Whatever was called before with tensors of that shape: kernels would not see what observes it."""
    if not interpreted(device):
        pytest.skip("only the choice of a path is looked at")
    module = sys.modules["onepass.softmax.prepared_average"]
    monkeypatch.setattr(module, "_known", {})
    monkeypatch.setattr(sys.modules["onepass.kernels.softmax_loss"], "LEAST_LOGITS", 0)
    x, y = torch.randn(3, 96, device=device, requires_grad=True), torch.arange(3, device=device)
    how, taken = (Average(-1.0, True, None, -100), Options("log_probs", masked=-100)), []

    def take(logits, index=y):
        taken.append(module.prepared_average(logits, index, *how))
        return logits.sum()

    def found():
        got = [t is not None for t in taken]
        taken.clear()
        return got

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    class Other(torch.Tensor):
        pass

    for _ in range(2):  # known in the second turn
        for logits in (x, x.detach(), torch.nn.Parameter(x.detach()), x * 1.0, x.detach().clone().requires_grad_()):
            take(logits)
        take(x, y.int())
        with torch.no_grad():
            take(x)
        assert found() == [True] * 7
        torch.func.grad(take)(x.detach())
        torch.func.vmap(lambda v: take(v).view(1))(x.detach()[None])
        torch.func.grad(lambda v: (take(x), v.sum())[1])(x.detach())
        with forward_ad.dual_level():
            take(x)
            take(forward_ad.make_dual(x.detach(), torch.ones_like(x)))
        with Mode():
            take(x)
        torch.jit.trace(
            lambda v: (taken.append(module.prepared_average(x, y, *how)), take(v))[1], (x.detach(),), check_trace=False
        )
        make_fx(lambda v: take(v))(x.detach())
        take(x.detach().as_subclass(Other))
        take(torch._neg_view(x.detach()))
        take(x.detach().t().contiguous().t())
        take(x, y + 0.5)
        take(x, y[:2])
        take(x, None)
        take(x.detach().numpy()[0])
        assert not any(found())
    kinds = module._known[x.shape]
    assert len({id(k.launches) for k in kinds if k.launches is not None}) > 3
    monkeypatch.setattr(module, "MOST_KINDS", 10)
    for n in range(20):
        module.prepared_average(x, y, how[0], how[1]._replace(masked=n))
        module.prepared_average(x, y, how[0], how[1]._replace(masked=0))
    kept = [kind.how[1].masked for kind in module._known[x.shape]]
    assert kept == [0, 19, 18, 17, 16, 15, 14, 13, 12, 11]  # the last that were asked for


def test_one_row_has_the_launches_of_its_stride(device, monkeypatch):
    """It is contiguous with any stride, with which the rows of most batches would not start on 16 bytes."""
    if not interpreted(device):
        pytest.skip("only the choice of the launches is looked at")
    known: dict = {}
    monkeypatch.setattr(sys.modules["onepass.softmax.prepared_average"], "_known", known)
    monkeypatch.setattr(sys.modules["onepass.kernels.softmax_loss"], "LEAST_LOGITS", 0)
    target = torch.zeros(1, dtype=torch.long, device=device)
    for stride in (98, 96):
        logits = torch.randn(1, stride, device=device)[:, :96].requires_grad_()
        assert logits.is_contiguous()
        onepass.cross_entropy(logits, target).backward()
    assert [kind.launches is None for kind in known[logits.shape]] == [False, True]  # the last is the first


def test_a_launch_is_repeated_for_the_same_kind_of_inputs_only(monkeypatch):
    """Hooks may give what was saved another layout, dtype or device."""
    launching = pytest.importorskip("onepass.kernels.launch")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)  # as a tensor on the CPU says
    monkeypatch.setattr(launching, "_repeated", {})
    x, i = torch.randn(4, 8), torch.arange(8)
    key, known = launching.repeat("name", (x, i))
    assert known is None
    launching._repeated[key] = "a launch"
    assert launching.repeat("name", (x, i)) == (key, "a launch")
    assert launching.repeat("name", (x.clone(), i.clone())) == (key, "a launch")
    others = (x.bfloat16(), i), (x, i.int()), (x,), (x, i, i)
    assert len({launching.repeat("name", other)[0] for other in others} | {key}) == 5  # another launch is kept for each
    not_usual = x.t(), torch.randn(33)[1:], torch._neg_view(x), torch.empty(0), torch.empty(4, 8, device="meta")
    for other in not_usual:
        assert launching.repeat("name", (other, i)) == (key, None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert launching.repeat("name", (x, i)) == (key, None)
