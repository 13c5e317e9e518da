"""The guard of `kernels.launch`: what reaches a kernel is what the kernel declares; what a backward reads is saved."""

import inspect
import re
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import SimpleNamespace

import pytest
import torch

import onepass
from linear_cases import LOSSES as OF_HEADS
from linear_cases import batch, policy_loss
from onepass.core.memo import MOST
from test_torch import ALL, example

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
kernels = import_module("onepass.kernels")
launching = import_module("onepass.kernels.launch")
NAMES = "Flat", "Out", "Plan", "Rows", "Strided", "launch"
Flat, Out, Plan, Rows, Strided, launch = (getattr(launching, name) for name in NAMES)

MODULES = [import_module(m.name) for m in iter_modules(kernels.__path__, "onepass.kernels.")]
KERNELS = {name: k for m in MODULES for name, k in vars(m).items() if name.endswith("_kernel")}


@pytest.fixture
def where(device):
    """The device of a path that runs kernels."""
    import os

    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("no kernel runs here")
    return device


@triton.jit(do_not_specialize=["n", "k"])
def affine_kernel(x: "Flat", rows: "Rows", out: "Out", n: tl.int32, a: tl.float32, k: tl.int64, BLOCK: tl.constexpr):
    """``out = a·x + rows[:, 0]``, of which ``k`` says the stride."""
    i = tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < n) * a + tl.load(rows + i * k, mask=i < n)
    tl.store(out + i, value, mask=i < n)


@triton.jit
def undeclared_tensor_kernel(x, out: "Out", BLOCK: tl.constexpr):
    tl.store(out + tl.arange(0, BLOCK), tl.load(x + tl.arange(0, BLOCK)))


@triton.jit
def undeclared_number_kernel(out: "Out", a, BLOCK: tl.constexpr):
    tl.store(out + tl.arange(0, BLOCK), a + tl.zeros([BLOCK], tl.float32))


def plan(kernel, *numbers):
    return Plan(kernel, 1, numbers, dict(BLOCK=16), 1)


def affine(x, rows, a, out=None, n=None):
    out = torch.full((len(x),), float("nan"), device=x.device) if out is None else out
    about = affine_kernel, len(x) if n is None else n, a, rows.stride(0)
    launch(plan, about, (x, rows, out))
    return out


def test_hooks_of_a_profiler_are_called(where):
    if where.type == "cpu":
        pytest.skip("the interpreter has no hooks")
    x, found = torch.arange(5.0, device=where), []
    enter, leave = triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook
    hooks = [lambda data: found.append(data.get()["name"]), lambda data: found.append("left")]
    for _ in range(3):  # the first calls compile
        affine(x, x[:, None], 2)
    enter.add(hooks[0])
    leave.add(hooks[1])
    try:
        got = affine(x, x[:, None], 2)
    finally:
        enter.remove(hooks[0])
        leave.remove(hooks[1])
    assert found == ["affine_kernel", "left"] and torch.equal(got, 3 * x)


def test_a_quick_launch_passes_what_a_launch_does(monkeypatch):
    """To Triton's launcher or, for a kernel without scratch memory in Triton 3.6, to the function that it calls."""
    seen, through, hooks, calls = [], [], [None] * 3, SimpleNamespace(calls=[])

    class CudaLauncher:
        def __init__(self, scratch):
            self.global_scratch_size, self.profile_scratch_size = scratch, 0
            self.launch_cooperative_grid, self.launch_pdl = "cooperative", "pdl"

        def __call__(self, *args):
            through.append(self)
            self.launch(*args[:5], self.launch_cooperative_grid, self.launch_pdl, None, None, *args[5:])

        def launch(self, *args):
            seen.append(args)

    launcher = CudaLauncher(0)
    compiled = SimpleNamespace(function="function", packed_metadata="metadata", launch_metadata=lambda *_: "data")
    monkeypatch.setattr(launching, "driver", SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda n: 7)))
    monkeypatch.setattr(launching, "_repeated", {})
    monkeypatch.setattr(launching, "_quick", {})
    assert launching.quick("key") is None
    for run in (lambda *args: seen.append(args), launcher, CudaLauncher(4)):
        known = launching.Launch(compiled, run, 3, None, (4, True))
        for version in ("3.6.0", "3.7.1"):
            launching.forget()
            launching._repeated["key"] = known
            monkeypatch.setattr(launching.triton, "__version__", version)
            launching.quick("key")(0, 7, 100, None)
            assert len(through) == (isinstance(run, CudaLauncher) and (run is not launcher or version == "3.7.1"))
            launching.start(known, 0, (100, None))
            assert seen[0] == seen[1] and seen[0][-7:] == (*hooks, 100, None, 4, True) and seen[0][3] == 7
            launching.quick("key")(0, None, 100, None)
            assert seen[2] == seen[1], "the current stream is found"
            seen.clear()
            through.clear()
    with monkeypatch.context() as profiled:
        profiled.setattr(launching, "KNOBS", SimpleNamespace(launch_enter_hook=calls, launch_exit_hook=calls))
        calls.calls.append("a hook")
        launching.quick("key")(0, 7, 100, None)
    assert seen[0][-7:] == ("data", calls, calls, 100, None, 4, True)
    launching._repeated["key"] = known._replace(programs=5)
    launching.quick("key")(0, 7)
    assert seen[-1][0] == 5
    for n in range(MOST + 1):
        launching._repeated[n] = known
        launching.quick(n)
    assert len(launching._quick) <= MOST
    launching.forget()
    assert launching.quick("key") is None


@pytest.mark.parametrize("name", KERNELS)
def test_every_argument_of_a_kernel_is_declared(name):
    kinds = (*launching.TENSORS, tl.int32, tl.int64, tl.float32, tl.constexpr)
    for parameter in inspect.signature(KERNELS[name].fn, eval_str=True).parameters.values():
        assert any(parameter.annotation is kind for kind in kinds), parameter


def test_kernels_are_launched_in_one_place():
    source = Path(onepass.__file__).parent
    elsewhere = [
        path.name
        for path in source.rglob("*.py")
        if re.search(r"kernel\[|_kernel\.run\(|\.warmup\(", path.read_text())
        and path.name != "launch.py"
        and path.parent.name != "cli"  # peers launch their own
    ]
    assert not elsewhere


def test_an_argument_that_is_not_declared_does_not_run(where):
    x = torch.ones(16, device=where)
    with pytest.raises(TypeError, match="undeclared_tensor_kernel: x is given a tensor, and is not declared"):
        launch(plan, (undeclared_tensor_kernel,), (x, x.clone()))
    with pytest.raises(TypeError, match="undeclared_number_kernel: a is given a number, and declares no type"):
        launch(plan, (undeclared_number_kernel, 1.0), (x.clone(),))
    with pytest.raises(TypeError, match="affine_kernel: expected 3 numbers, got 2"):
        launch(plan, (affine_kernel, 16, 1.0), (x, x, x.clone()))


def test_an_input_that_is_not_contiguous_is_copied(where):
    rows = torch.zeros(7, 3, device=where)
    data = torch.arange(40.0, device=where)
    for x in (data[:7], data[1:8], data[::3][:7], data[5].expand(7), data.view(8, 5)[:7, 2]):
        for _ in range(2):  # the second finds the first's launch
            assert torch.equal(affine(x, rows, 2.0), 2 * x)
    wide = torch.rand(7, 5, device=where)
    assert torch.equal(affine(data[:7], wide[:, 2:], 1.0), data[:7] + wide[:, 2])  # rows apart need no copy


@triton.jit
def strided_kernel(x: "Strided", out: "Out", stride: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i * stride))


@triton.jit
def flat_kernel(x: "Flat", out: "Out", stride: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i))


def test_launches_of_several_plans_are_told_apart(where):
    """Of the same tensors, and with nothing else that the plan depends on."""
    x, plans = torch.arange(32.0, device=where)[::2], {}
    for kernel in (flat_kernel, strided_kernel):
        plans[kernel] = lambda kernel=kernel: Plan(kernel, 1, (), dict(stride=2, BLOCK=16), 1)
    for kernel in (flat_kernel, strided_kernel) * 2:
        out = torch.empty(16, device=where)
        launch(plans[kernel], (), (x, out))
        assert torch.equal(out, x)


def test_what_cannot_be_made_right_is_refused(where):
    x, rows = torch.ones(7, device=where), torch.zeros(7, 3, device=where)
    assert affine(x, rows, 1.0).isfinite().all()
    with pytest.raises(ValueError, match="affine_kernel: out: expected a contiguous tensor to write to"):
        affine(x, rows, 1.0, out=torch.empty(14, device=where)[::2])
    with pytest.raises(ValueError, match="affine_kernel: rows: expected a contiguous last dimension"):
        affine(x, torch.zeros(7, 6, device=where)[:, ::2], 1.0)
    with pytest.raises(ValueError, match="affine_kernel: rows: expected device"):
        affine(x, rows.to("meta"), 1.0)


def test_numbers_have_their_declared_types(where):
    x, rows = torch.ones(7, device=where), torch.zeros(7, 3, device=where)
    for a in (1, 2.5, 1.0, True, 3, 0, 1e-20):
        assert torch.equal(affine(x, rows, a), torch.full_like(x, float(a)))
    with pytest.raises(ValueError, match="affine_kernel: n: expected an int32, got 2147483648"):
        affine(x, rows, 1.0, n=2**31)
    with pytest.raises(ValueError, match=r"affine_kernel: n: expected an int32, got 6\.5"):
        affine(x, rows, 1.0, n=6.5)


# What a backward reads.

T, E, H, I = 6, 4, 16, 8  # noqa: E741


def routed(device):
    g = torch.Generator().manual_seed(0)
    new = lambda *shape: torch.randn(shape, generator=g).to(device).requires_grad_()  # noqa: E731
    routing = onepass.moe.route(new(T, E), 2, losses=True)
    weights = new(E, 2 * I, H), new(E, H, I)
    return routing, new(T, H), weights


OTHERS = {
    "route": lambda d: sum(r.sum() for r in (routed(d)[0].weights, routed(d)[0].logsumexp)),
    "expert_mlp": lambda d: onepass.moe.expert_mlp(routed(d)[1], routed(d)[0], *routed(d)[2]).sum(),
    "scattered_linear": lambda d: onepass.moe.scattered_linear(
        routed(d)[1], routed(d)[2][0], routed(d)[0].experts, weights=routed(d)[0].weights
    ).sum(),
    "linear_loss, none": lambda d: policy(d, "none").sum(),
    "linear_loss": lambda d: policy(d, "mean"),
}


def policy(device, reduction):
    hidden, weight, bias, target = batch(device)
    inputs = [torch.rand(target.shape, device=device, requires_grad=True) for _ in range(2)]
    return onepass.linear_loss(
        hidden, weight, target.clamp(min=0), policy_loss, *inputs, bias=bias, reduction=reduction
    )  # fmt: skip


def of_heads(name, device):
    hidden, weight, bias, target = batch(device)
    return OF_HEADS[name](onepass.LinearLogits(hidden, weight, bias), target).sum()


def held(value, seen, path=""):
    """Tensors that are reached through the attributes of a node of the graph."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield path
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from held(part, seen, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for n, part in enumerate(value):
            yield from held(part, seen, f"{path}[{n}]")
    elif type(value).__module__.startswith("onepass") and hasattr(value, "__dict__"):
        yield from held(vars(value), seen, path)
    elif inspect.isfunction(value):
        for name, part in inspect.getclosurevars(value).nonlocals.items():
            yield from held(part, seen, f"{path}({name})")


CALLS = (
    {f"logits: {name}": lambda d, name=name: ALL[name](*example(d)) for name in ALL}
    | {f"head: {name}": lambda d, name=name: of_heads(name, d) for name in OF_HEADS}
    | {f"moe: {name}": call for name, call in OTHERS.items()}
)
# Gradients that the forward has taken already, which nobody else has, and the states of generators.
OWN = re.compile(r"\.(gradients|generators)\b")


@pytest.mark.parametrize("name", CALLS)
def test_a_backward_reads_what_autograd_has_saved(device, name):
    """And nothing else: of what hangs on a node, autograd does not see that somebody has written to it."""
    loss = CALLS[name](device)
    nodes, seen, ours = [loss.grad_fn], set(), 0
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [following for following, _ in node.next_functions]
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            ours += 1
            found = [path for path in held(dict(vars(node)), set()) if not OWN.search(path)]
            assert not found, (type(node).__name__, found)
    assert ours or name.endswith("renormalized")  # which is made of torch's own operations


def test_lazy_values_reach_no_kernel_unseen(where):
    """A gradient is copied with its values. What is described by strides is an error, and so is what is written to."""
    x = torch.randn(5, 16, device=where).requires_grad_()
    target = torch.tensor([1, -100, 3, 0, 15], device=where)
    for reduction in ("mean", "none"):
        for lazy in (torch._neg_view(torch.full((5,), -3.0, device=where)), torch._efficientzerotensor((5,))):
            loss = onepass.cross_entropy(x, target, reduction=reduction)
            upstream = lazy[0].to(where) if reduction == "mean" else lazy.to(where)
            for _ in range(2):  # the second launch is one that is known
                (found,) = torch.autograd.grad(loss, x, upstream, retain_graph=True)
                (expected,) = torch.autograd.grad(loss, x, upstream.clone(), retain_graph=True)
                assert torch.equal(found, expected) and bool(found.any()) == lazy.is_neg()
    out, x = torch.zeros(16, device=where), torch.arange(16.0, device=where)
    for _ in range(2):
        launch(plan, (affine_kernel, 16, 2.0, 1), (torch._neg_view(x), x.view(16, 1), out))
        assert torch.equal(out, -x)
    for tensors in ((x, torch._neg_view(x).view(16, 1), out), (x, x.view(16, 1), torch._neg_view(out))):
        with pytest.raises(ValueError, match="expected a tensor with its values in memory"):
            launch(plan, (affine_kernel, 16, 2.0, 1), tensors)
    with pytest.raises(ValueError, match="expected a tensor with its values in memory"):
        onepass.cross_entropy(torch._neg_view(torch.randn(5, 16, device=where)), target)
