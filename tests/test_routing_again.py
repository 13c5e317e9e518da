"""A routing that was launched before for the same kind of tensors: the launch is repeated with pointers alone."""

import sys
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from onepass import reference
from onepass.backend import backend_of
from onepass.core.moe_options import RouterOptions, RoutingGradients
from onepass.moe import route, sigmoid_topk, softmax_topk
from paths import interpreted

router = sys.modules["onepass.moe.router"]
GROUPED = dict(k=2, score="sigmoid", n_group=4, topk_group=2, biased=True)


class Elsewhere(torch.Tensor):
    def get_device(self):
        return 1


@pytest.fixture
def kernels(device):
    """The module that launches routers."""
    if not interpreted(device):
        pytest.skip("only what is passed to launches is compared")
    return sys.modules[backend_of(torch.zeros(1, device=device)).route.__module__]


@pytest.mark.parametrize("counts", [True, False])
@pytest.mark.parametrize("tokens", [5, 4096], ids=("one program", "many programs"))
@pytest.mark.parametrize("options", [dict(k=2), GROUPED], ids=("topk", "biased"))
def test_a_repeated_launch_is_given_what_the_checked_one_is(kernels, monkeypatch, options, tokens, counts):
    logits = torch.zeros(tokens, 64, dtype=torch.bfloat16)
    bias = torch.zeros(64) if "biased" in options else None
    options = RouterOptions(counts=counts, **options)
    seen, cleared = [], []

    def zeros(n, device):
        cleared.append(torch.zeros(n, dtype=torch.int32))
        return cleared[-1]

    def checked(plan, about, tensors, key):
        programs.append(plan(*about).programs)
        keys.append(key)
        seen.append([t if t is None else t.data_ptr() for t in tensors])

    programs, keys = [], []
    monkeypatch.setattr(kernels, "zeros", zeros)
    monkeypatch.setattr(kernels, "empty", lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype))
    monkeypatch.setattr(kernels, "launch", checked)
    monkeypatch.setattr(kernels, "start", lambda known, index, pointers: seen.append([*pointers]))
    monkeypatch.setattr(kernels, "repeat", lambda name, inputs: ("its key", None))
    first = kernels.route(logits, bias, None, None, options)
    assert keys == ["its key"] and (programs[0] > 1) == (tokens > 5)
    monkeypatch.setattr(kernels, "repeat", lambda name, inputs: ("its key", SimpleNamespace(programs=1 + (tokens > 5))))
    found = [first, kernels.route(logits, bias, None, None, options), kernels.route_again(logits, bias, options)]
    names = []
    for results, pointers in zip(found, seen, strict=True):
        words = "logits", "bias", "weights", "experts", "counts"
        known = {t.data_ptr(): n for n, t in zip(words, (logits, bias, *results[:3])) if t is not None}
        names.append([p if p is None else known[p] for p in pointers])
        assert [None if t is None else (t.shape, t.stride(), t.dtype) for t in results] == [
            None if t is None else (t.shape, t.stride(), t.dtype) for t in first
        ]
    assert names[0] == names[1] == names[2] and "weights" in names[0] and ("counts" in names[0]) == counts
    assert len(cleared) == (3 if counts and tokens > 5 else 0)  # programs add to them
    assert len({t.data_ptr() for r in found for t in r if t is not None}) == 3 * (2 + counts)


def test_a_launch_is_repeated_for_the_same_kind_of_call_only(kernels, monkeypatch):
    launching = sys.modules["onepass.kernels.launch"]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)  # as a tensor on the CPU says
    monkeypatch.setattr(launching, "_repeated", {})
    x, b, o = torch.zeros(4, 8), torch.zeros(8), RouterOptions(2)
    biased = o._replace(biased=True)
    calls = [
        (x, None, o), (x, b, biased), (x[:2], None, o), (torch.zeros(4, 9), None, o), (x.bfloat16(), None, o),
        (x, None, o._replace(k=3)), (x, None, o._replace(counts=False)), (x, b.bfloat16(), biased),
        (x, b[:7].clone(), biased), (x.as_subclass(Elsewhere), None, o),
        (x[:1], None, o), (torch.zeros(1, 9)[:, :8], None, o),  # one row is contiguous whatever its stride is
    ]  # fmt: skip
    keys = [kernels.kept_launch(*call)[0] for call in calls]
    assert len(set(keys)) == len(calls)
    changed = o._replace(count_changed=True)
    launching._repeated.update(dict.fromkeys([*keys, kernels.kept_launch(x, None, changed)[0]], "a launch"))
    assert kernels.kept_launch(*calls[0]) == (keys[0], "a launch")
    unlike = torch.zeros(33)[1:].view(4, 8), torch._neg_view(x)
    assert [kernels.kept_launch(other, None, o) for other in unlike] == [(keys[0], None)] * 2
    assert kernels.route_again(x, None, changed) is None


@pytest.fixture
def backwards(kernels):
    """The module that launches the backward of routers."""
    return sys.modules[backend_of(torch.zeros(1)).route_gradient.__module__]


def upstream(tokens=4, k=2, dtype=torch.float32):
    return RoutingGradients(torch.ones(tokens, k, dtype=dtype))


def test_a_repeated_gradient_is_given_what_the_checked_one_is(backwards, monkeypatch):
    logits, experts = torch.zeros(4, 8, dtype=torch.bfloat16), torch.zeros(4, 2, dtype=torch.int64)
    grads, options, seen, keys = upstream(), RouterOptions(2), [], []
    known = None

    def checked(plan, about, tensors, key):
        keys.append(key)
        seen.append([t if t is None else t.data_ptr() for t in tensors])

    monkeypatch.setattr(backwards, "empty", lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype))
    monkeypatch.setattr(backwards, "launch", checked)
    monkeypatch.setattr(backwards, "start", lambda launch, index, pointers: seen.append([*pointers]))
    monkeypatch.setattr(backwards, "repeat", lambda name, inputs: ("its key", known))
    found = []
    for known in None, "a launch":  # noqa: B007  (`repeat` reads it)
        found.append(backwards.route_gradient(logits, experts, None, None, grads, options))
    assert keys == ["its key"] and len({t.data_ptr() for t in found}) == 2
    for out, pointers in zip(found, seen, strict=True):
        assert (out.shape, out.stride(), out.dtype) == ((4, 8), (8, 1), torch.bfloat16)
        expected = [logits, out, experts, None, None, grads.weights, None, None]
        assert pointers == [t if t is None else t.data_ptr() for t in expected]


def test_a_gradient_is_repeated_for_the_same_kind_of_call_only(backwards, monkeypatch):
    keys, passed = [], []
    original = backwards.repeat

    def repeat(name, inputs):
        keys.append(original(name, inputs)[0])
        return keys[-1], None

    monkeypatch.setattr(backwards, "repeat", repeat)
    monkeypatch.setattr(backwards, "launch", lambda plan, about, tensors, key: passed.append((key, about)))
    x, e, o = torch.zeros(4, 8), torch.zeros(4, 2, dtype=torch.int64), RouterOptions(2)
    calls = [
        (x, e, upstream(), o), (x[:2], e[:2], upstream(2), o), (torch.zeros(4, 9), e, upstream(), o),
        (x.bfloat16(), e, upstream(), o), (x, e, upstream(dtype=torch.float64), o), (x, e.int(), upstream(), o),
        (x, e, upstream(), o._replace(renormalize=False)), (x.as_subclass(Elsewhere), e, upstream(), o),
        (x[:1], e[:1], upstream(1), o), (torch.zeros(1, 9)[:, :8], e[:1], upstream(1), o),
    ]  # fmt: skip
    for logits, experts, grads, options in calls:
        backwards.route_gradient(logits, experts, None, None, grads, options)
    assert [key for key, _ in passed] == keys and len(set(keys)) == len(calls)
    one = x[:1], e[:1], None, None
    for stride in 0, 1, 7:  # a single row is contiguous with any
        rows = torch.as_strided(torch.ones(2), (1, 2), (stride, 1))
        backwards.route_gradient(*one, RoutingGradients(rows), o)
    assert set(passed[len(calls) :]) == {passed[8]}
    passed.clear(), keys.clear()
    sums = o._replace(sums=True)
    others = [
        (x, e, torch.ones(4, dtype=torch.bool), None, upstream(), o), (x, e, None, e, upstream(), o),
        (x, e, None, None, RoutingGradients(None, torch.ones(8)), sums),
        (x, e, None, None, upstream()._replace(prob_sums=torch.ones(8)), sums),
        (x, e, None, None, upstream()._replace(logsumexp=torch.ones(4)), sums),
    ]  # fmt: skip
    for call in others:
        backwards.route_gradient(*call)
    assert [key for key, _ in passed] == [None] * len(others) and not keys


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Sub(torch.Tensor):
    pass


X = torch.randn(4, 8)
BIAS = torch.zeros(8)


def under(mode, call):
    with mode():
        return call()


def dual():
    with torch.autograd.forward_ad.dual_level():
        return route(X, 2)


def traced(call):
    found = []

    def function(x):
        found.append(call())
        return x

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.trace(function, torch.zeros(1), check_trace=False)
    return found[0]


def of_ended_transform():
    """A tensor that `torch.func` wraps, without a level that it is of: ``Function.apply`` takes what it wraps."""
    found = []
    torch.func.grad(lambda x: found.append(x) or x.sum())(X)
    return found[0]


ASKED = {
    "plain": lambda: route(X, 2),
    "softmax_topk": lambda: softmax_topk(X, 2),
    "sigmoid_topk": lambda: sigmoid_topk(X, 2, selection_bias=BIAS, n_group=2),
    "a trained bias": lambda: route(X, 2, selection_bias=torch.nn.Parameter(BIAS)),
    "no_grad": lambda: under(torch.no_grad, lambda: route(X.clone().requires_grad_(), 2)),
    "inference_mode": lambda: under(torch.inference_mode, lambda: route(X, 2)),
    "gradient": lambda: route(X.clone().requires_grad_(), 2),
}
NOT_ASKED = {
    "mask": lambda: route(X, 2, token_mask=torch.ones(4, dtype=torch.bool)),
    "replay": lambda: route(X, 2, experts=torch.tensor([[0, 1]] * 4)),
    "batches": lambda: route(X.view(2, 2, 8), 2),
    "one token": lambda: route(X[0], 2),
    "subclass": lambda: route(X.as_subclass(Sub), 2),
    "subclass of the bias": lambda: route(X, 2, selection_bias=BIAS.as_subclass(Sub)),
    "mode": lambda: under(Mode, lambda: route(X, 2)),
    "forward mode": dual,
    "trace": lambda: traced(lambda: route(X, 2)),
    "a transform that has ended": lambda: route(of_ended_transform(), 2),
}


@pytest.mark.parametrize("name", [*ASKED, *NOT_ASKED])
def test_when_a_launch_may_be_repeated(eager, monkeypatch, name):
    asked, answer = [], (torch.ones(4, 2), torch.zeros(4, 2, dtype=torch.int64), None, None, None, None)

    def again(*arguments):
        asked.append(arguments)
        return answer

    backend = SimpleNamespace(route=reference.route, route_again=again)
    monkeypatch.setattr(router, "backend_of", lambda *_: backend)
    routing = {**ASKED, **NOT_ASKED}[name]()
    assert len(asked) == (name in ASKED)
    assert (routing.weights.data_ptr() == answer[0].data_ptr()) == (name in ASKED)
    assert routing.weights.requires_grad == (name == "gradient")


def test_none_is_repeated_within_a_transform_of_torch(eager, monkeypatch):
    backend = SimpleNamespace(route=reference.route, route_again=lambda *_: pytest.fail("asked"))
    monkeypatch.setattr(router, "backend_of", lambda *_: backend)
    weights = torch.func.vmap(lambda x: route(x, 2).weights)(X.view(1, 4, 8))
    torch.testing.assert_close(weights[0], X.softmax(-1).topk(2)[0] / X.softmax(-1).topk(2)[0].sum(-1, keepdim=True))


@pytest.mark.parametrize("bad, message", [
    (lambda: route(X.to_sparse(), 2), "router_logits"), (lambda: route(X[0, 0], 2), "router_logits"),
    (lambda: route(X, 2, selection_bias=BIAS.to_sparse()), "selection_bias"), (lambda: route([X], 2), "router_logits"),
    (lambda: route(X, 2, selection_bias=[0.0]), "selection_bias"), (lambda: route(X, 9), "k: "),
    (lambda: route(X[:, :0], 1), "router_logits"), (lambda: route(X.long(), 9), "router_logits"),
    (lambda: route(torch.nested.nested_tensor([X[0, :5], X[0]]), 2), "router_logits"),
])  # fmt: skip
def test_errors_are_those_of_the_checked_call(eager, monkeypatch, bad, message):
    backend = SimpleNamespace(route=reference.route, route_again=lambda *_: pytest.fail("asked"))
    monkeypatch.setattr(router, "backend_of", lambda *_: backend)
    with pytest.raises((TypeError, ValueError), match=message):
        bad()


@pytest.mark.gpu
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("tokens", [64, 5000])
@pytest.mark.parametrize("counts", [True, False])
def test_results_of_repeated_launches(monkeypatch, biased, tokens, counts):
    kernels, launching = (pytest.importorskip(f"onepass.kernels.{n}") for n in ("router", "launch"))
    g = torch.Generator("cuda").manual_seed(tokens)
    options = dict(k=6, counts=counts)
    if biased:
        bias = torch.linspace(-0.2, 0.2, 128, device="cuda")
        options |= dict(score="sigmoid", n_group=8, topk_group=4, selection_bias=bias)
    repeated = []
    original = kernels.repeated_route
    monkeypatch.setattr(kernels, "repeated_route", lambda *a: repeated.append(1) or original(*a))
    batches = [torch.randn(tokens, 128, device="cuda", generator=g).bfloat16() for _ in range(4)]
    monkeypatch.setattr(launching, "_repeated", {})
    expected = []
    for x in batches:
        launching._repeated.clear()
        expected.append(route(x, **options))
    repeated.clear()
    found = [route(x, **options) for x in batches]
    with torch.inference_mode():
        found += [route(x, **options) for x in batches]
    found += [route(x.requires_grad_(), **options) for x in batches]
    assert len(repeated) == 3 * len(batches)
    for a, b in zip(3 * expected, found, strict=True):
        assert torch.equal(a.weights, b.weights) and torch.equal(a.experts, b.experts)
        assert (b.counts is None) == (not counts) and (not counts or torch.equal(a.counts, b.counts))
    assert found[-1].weights.requires_grad and found[4].weights.is_inference()


@pytest.mark.gpu
@pytest.mark.parametrize("biased", [False, True])
def test_gradients_of_repeated_launches(monkeypatch, biased):
    """Those of an expanded upstream gradient too, of another layout, and where a checkpoint routes again."""
    launching = pytest.importorskip("onepass.kernels.launch")
    options = dict(k=6)
    if biased:
        bias = torch.linspace(-0.2, 0.2, 128, device="cuda")
        options |= dict(score="sigmoid", n_group=8, topk_group=4, selection_bias=bias)
    monkeypatch.setattr(launching, "_repeated", {})
    x = torch.randn(300, 128, device="cuda").bfloat16().requires_grad_()
    g = torch.randn(300, 6, device="cuda")

    def gradient(upstream, call=lambda: route(x, **options).weights):
        return torch.autograd.grad(call(), x, upstream)[0]

    expanded = torch.ones((), device="cuda").expand(300, 6)
    for upstream in g, g.t().contiguous().t(), expanded:
        launching._repeated.clear()
        expected = gradient(upstream)
        launching._repeated.clear()
        found = [gradient(upstream, lambda: checkpoint(lambda: route(x, **options).weights, use_reentrant=False))]
        found += [gradient(upstream) for _ in range(2)]
        assert all(torch.equal(expected, f) and f.stride() == x.stride() for f in found)
        assert len(launching._repeated) == 1 + any(upstream.stride())
