"""`route` against a definition that takes one token at a time: choice, weights, counts, gradients."""

import functools
import itertools
import math
import sys
from importlib import import_module

import pytest
import torch

from onepass import reference
from onepass.backend import backend_of
from onepass.core.moe_options import RouterOptions
from onepass.moe import route, sigmoid_topk
from paths import interpreted

INF = float("inf")


def definition(x, k, *, score="softmax", selection_bias=None, n_group=1, topk_group=1, group_score="top2_sum",
               renormalize=True, scale=1.0, eps=1e-20, score_after_topk=False, softcap=None):  # fmt: skip
    """Experts and differentiable weights of one token, float64."""
    E = len(x)
    z = x if softcap is None else softcap * torch.tanh(x / softcap)
    scores = {"softmax": lambda z: z.softmax(-1), "sigmoid": torch.sigmoid,
              "sqrtsoftplus": lambda z: torch.log1p(z.exp()).sqrt()}[score]  # fmt: skip
    s = scores(z)
    value = ((z if score_after_topk else s) + (0 if selection_bias is None else selection_bias)).tolist()
    logits = z.tolist()
    ranked = sorted(range(E), key=lambda e: (logits[e] == -INF, -value[e] if logits[e] > -INF else 0, e))
    size = E // n_group
    if n_group > 1:
        taking_part = [
            [v for e, v in enumerate(value) if e // size == g and min(logits[e], v) > -INF] for g in range(n_group)
        ]
        best = [sorted(v, reverse=True)[: 2 if group_score == "top2_sum" else 1] for v in taking_part]
        judged = [sum(v) if v else -INF for v in best]
        kept = sorted(range(n_group), key=lambda g: (-judged[g], g))[:topk_group]
        ranked = [e for e in ranked if e // size in kept]
    experts = torch.tensor(ranked[:k])
    w = scores(z[experts]) if score_after_topk else s[experts]
    if renormalize:
        w = w / (w.sum() + eps)
    return experts, w * scale


CASES = {
    "softmax": (16, 4, {}),
    "softmax, as they are": (60, 4, {"renormalize": False, "scale": 2.5}),
    "softmax, of the chosen": (32, 4, {"score_after_topk": True}),
    "softmax, biased": (20, 3, {"selection_bias": True, "softcap": 4.0}),
    "sigmoid, groups": (64, 6, {"score": "sigmoid", "selection_bias": True, "n_group": 8, "topk_group": 4,
                                "scale": 2.5}),
    "sigmoid, odd groups": (21, 4, {"score": "sigmoid", "n_group": 3, "topk_group": 2, "group_score": "max"}),
    "sigmoid, biased logits": (12, 2, {"score": "sigmoid", "selection_bias": True, "score_after_topk": True}),
    "sqrtsoftplus": (37, 5, {"score": "sqrtsoftplus", "selection_bias": True, "eps": 1e-6}),
    # By `kernels/router_biased.py`:
    "sigmoid, large groups": (128, 8, {"score": "sigmoid", "selection_bias": True, "n_group": 8, "topk_group": 4}),
    "sigmoid, of 256": (256, 8, {"score": "sigmoid", "selection_bias": True, "n_group": 8, "topk_group": 4}),
    "sqrtsoftplus, of 192": (192, 6, {"score": "sqrtsoftplus", "selection_bias": True, "n_group": 3, "topk_group": 2,
                                      "group_score": "max", "scale": 2.5}),
    "softmax, groups": (40, 6, {"n_group": 5, "topk_group": 2, "group_score": "max", "renormalize": False}),
    "one expert": (1, 1, {}),
    "all of them": (9, 9, {"score": "sigmoid"}),
    "ten": (96, 10, {"eps": 1e-6}),
    "many": (1024, 32, {"score": "sigmoid"}),
}  # fmt: skip


def inputs(name, tokens, seed=0):
    E, k, options = CASES[name]
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, E, generator=g, dtype=torch.float64) * 3
    if E > 100:  # apart by more than float32 rounds scores to
        x = x.argsort(-1) * (12 / E) - 6.0
    options = dict(options)
    if "selection_bias" in options:
        options["selection_bias"] = torch.randn(E, generator=g) * 0.5 - 0.5  # selection values of both signs
    return x, k, options


RUNS = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,  # of which `kernels/router_topk.py` selects by keys of 32 bits
    "bfloat16, general kernel": torch.bfloat16,
}


@pytest.fixture(params=RUNS)
def dtype(request, device, monkeypatch):
    """A dtype of logits; the last has them routed by `kernels/router.py`, whatever they are."""
    if "general" in request.param:
        if device.type == "cpu" and not interpreted(device):
            pytest.skip("there is one reference")
        for kernel in ("router_topk", "router_biased"):
            monkeypatch.setattr(f"onepass.kernels.{kernel}.takes", lambda *_: False)
        choice = import_module("onepass.kernels.router").choice
        choice.cache_clear()
        request.addfinalizer(choice.cache_clear)
    return RUNS[request.param]


def one_reference(device, dtype, **_):
    return device == "eager" and "general" in dtype


pairs = pytest.mark.pairs(unless=one_reference)


def on(device, options):
    return {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in options.items()}


# One number of tokens for each case. Of 65, `kernels/router_biased.py` has several programs.
OF_MANY = "sigmoid, groups", "sigmoid, of 256"
TOKENS = [
    pytest.param(name, tokens, marks=[] if chosen else pytest.mark.exhaustive)
    for n, name in enumerate(CASES)
    for tokens, chosen in ((1, n % 3 == 0), (33, n % 3 > 0), (65 if name in OF_MANY else 150, name in OF_MANY))
]


@functools.cache
def defined(name, tokens, dtype):
    """Experts, weights, an upstream gradient of these, and the gradient of the logits: the same for every path."""
    x, k, options = inputs(name, tokens)
    exact = x.to(dtype).double().requires_grad_()
    rows = [definition(row, k, **options) for row in exact]
    experts, weights = torch.stack([e for e, _ in rows]), torch.stack([w for _, w in rows])
    upstream = torch.randn(weights.shape, generator=torch.Generator().manual_seed(1))
    return experts, weights.detach(), upstream, *torch.autograd.grad(weights, exact, upstream.double())


@pytest.mark.parametrize("name, tokens", TOKENS)
def test_equals_the_definition(device, dtype, name, tokens):
    if name == "many" and tokens > 33:
        pytest.skip("the definition takes seconds")
    if tokens > 33 and device.type == "cpu" and (dtype == torch.float32 or not interpreted(device)):
        pytest.skip("it has no programs, or the general kernel has as many for bfloat16")
    x, k, options = inputs(name, tokens)
    mine = x.to(device, dtype).requires_grad_()
    routing = route(mine, k, **on(device, options))
    experts, weights, upstream, expected = defined(name, tokens, dtype)
    assert torch.equal(routing.experts.cpu(), experts)
    torch.testing.assert_close(routing.weights.cpu().double(), weights, rtol=1e-6, atol=1e-6)
    assert torch.equal(routing.counts.cpu(), torch.bincount(experts.flatten(), minlength=x.shape[-1]).int())
    (gradient,) = torch.autograd.grad(routing.weights, mine, upstream.to(device))
    rtol = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(gradient.cpu().double(), expected, rtol=rtol, atol=1e-6)
    bare = route(mine.detach(), k, counts=False, **on(device, options))
    assert bare.counts is None and torch.equal(bare.experts, routing.experts)
    torch.testing.assert_close(bare.weights, routing.weights, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["softmax", "sigmoid, groups"])
def test_dtypes(device, dtype, name):
    x, k, options = inputs(name, 50)
    x = x.to(dtype)
    routing = route(x.to(device).requires_grad_(), k, **on(device, options))
    rows = [definition(row.double(), k, **options) for row in x]
    assert routing.weights.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.equal(routing.experts.cpu(), torch.stack([e for e, _ in rows]))
    torch.testing.assert_close(routing.weights.detach().cpu().double(), torch.stack([w for _, w in rows]), rtol=1e-6,
                               atol=1e-6)  # fmt: skip


@pytest.mark.pairs
@pytest.mark.parametrize("eps", [0, 1e-30])
@pytest.mark.parametrize(
    ("score", "after"),
    [("softmax", False), ("sigmoid", False), ("sigmoid", True), ("sqrtsoftplus", False), ("sqrtsoftplus", True)],
)
def test_scores_that_underflow_are_renormalized(device, score, after, eps):
    """All selected scores are so small that float32 has no such numbers, since the bias selects these experts."""
    low = torch.tensor([-900.0, -300.0, -210.0, -88.0, -50.0, -39.0, -3.0]).double()
    x = torch.cat([low.view(-1, 1) + torch.linspace(-2, 2, 28).view(7, 4), torch.zeros(7, 4)], -1)
    if score != "softmax":
        x[:, 4:] = x[:, :4] - 5.0
    bias = torch.tensor([2.0] * 4 + [0.0] * 4)
    given, upstream = x.float().to(device).requires_grad_(), torch.rand(7, 3).double()
    options = dict(score=score, selection_bias=bias.to(device), eps=eps, score_after_topk=after)
    routing = route(given, 3, **options)
    assert (routing.experts < 4).all()
    exact = x.float().double().requires_grad_()
    log = {
        "softmax": lambda z: z.log_softmax(-1),
        "sigmoid": torch.nn.functional.logsigmoid,
        "sqrtsoftplus": lambda z: torch.where(z < -40, z, torch.log1p(z.clamp(min=-60).exp()).log()) / 2,
    }[score](exact)
    log = log.gather(-1, routing.experts.cpu())
    of_eps = torch.full((7, 1), math.log(eps) if eps else -INF)
    weights = torch.cat([log, of_eps], -1).softmax(-1)[:, :3]
    weights.backward(upstream)
    routing.weights.backward(upstream.float().to(device))
    torch.testing.assert_close(routing.weights.detach().cpu().double(), weights.detach(), rtol=1e-4, atol=1e-12)
    torch.testing.assert_close(given.grad.cpu().double(), exact.grad, rtol=2e-4, atol=1e-6)


@pytest.mark.parametrize("size", [48, 192])
def test_ties_go_to_the_lower_id(device, dtype, size):
    x = torch.zeros(4, size, device=device, dtype=dtype)
    bias = torch.zeros(size, device=device) if size > 48 else None
    x[3, 1::2] = -0.0
    x[1, 20:] = 1.0
    x[2, 7] = x[2, 40] = 2.0
    for score in ("softmax", "sigmoid", "sqrtsoftplus"):
        experts = route(x, 4, score=score, selection_bias=bias).experts
        assert experts.tolist() == [[0, 1, 2, 3], [20, 21, 22, 23], [7, 40, 0, 1], [0, 1, 2, 3]]
    for groups in (2, 4):  # of 24 and of 12 experts, or of 96 and of 48
        experts = sigmoid_topk(x, 4, selection_bias=bias, n_group=groups, topk_group=2).experts
        assert experts.tolist() == [[0, 1, 2, 3], [20, 21, 22, 23], [7, 40, 0, 1], [0, 1, 2, 3]]


def test_groups_that_are_not_kept_stay_out_though_all_scores_are_negative(device):
    x = torch.tensor([[3.0, 2.0, 1.0, 0.0, -1.0, -2.0, -3.0, -4.0]], device=device)
    bias = torch.full((8,), -5.0, device=device)
    routing = sigmoid_topk(x, 2, selection_bias=bias, n_group=4, topk_group=1)
    assert routing.experts.tolist() == [[0, 1]]
    off = x.clone()
    off[0, :1] = -INF  # one of two in the best group
    off = off + torch.tensor([0.0, 9, 0, 0, 0, 0, 0, 0], device=device)
    routing = sigmoid_topk(off, 2, selection_bias=bias, n_group=4, topk_group=1, group_score="max")
    assert routing.experts.tolist() == [[1, 0]]


@pytest.mark.parametrize("E, biased", [(160, False), (128, True)])
def test_many_experts(device, E, biased):
    """As many as are searched by spans: ties, zeros of both signs, experts that are off, rows that are not finite."""
    g = torch.Generator().manual_seed(3)
    x = torch.randn(13, E, generator=g)
    x[0], x[1], x[2] = x[0].round(), 0.0, x[2].sort(descending=True)[0]
    x[3] = torch.where(torch.rand(E, generator=g) < 0.5, -0.0, 0.0)
    x[4, 3:], x[5], x[6, E - 2] = -INF, -x[5].abs() - 1, INF
    x[7, 5], x[8, E - 1], x[9, : E // 2], x[12] = math.nan, -math.nan, -INF, -1e-40
    options, bias = dict(k=4), None
    if biased:
        options, bias = dict(k=4, score="sigmoid", n_group=4, topk_group=2), torch.linspace(-0.3, 0.3, E).to(device)
        bias[3], bias[::2] = -INF, 0.0
    mask = (torch.arange(13) != 11).to(device)
    logits = x.to(device, torch.bfloat16)
    expected = reference.route(logits, bias, mask, None, RouterOptions(**options))
    routing = route(logits, selection_bias=bias, token_mask=mask, **options)
    assert torch.equal(routing.experts[mask], expected[1][mask]) and torch.equal(routing.counts, expected[2])
    torch.testing.assert_close(routing.weights, expected[0], rtol=1e-5, atol=1e-7, equal_nan=True)


@pytest.mark.pairs
@pytest.mark.parametrize("E, k, groups, kept", [(128, 8, 4, 2), (128, 8, 8, 4), (64, 6, 8, 8), (192, 6, 3, 2)])
@pytest.mark.parametrize("spread", [1.0, 40.0, 1e4])
def test_biased_values_near_and_far_apart(device, E, k, groups, kept, spread):
    """The kernel's keys have 32 bits; programs where these cannot tell all values apart compare whole values."""
    g = torch.Generator().manual_seed(5)
    logits = torch.randn(20, E, generator=g).mul(spread)
    logits[::4] = -logits[::4].abs()
    bias = torch.zeros(E) if spread == 40 else torch.rand(E, generator=g).sub(0.5).round(decimals=2)
    logits, bias = logits.to(device, torch.bfloat16), bias.to(device)
    for score, after in ("sigmoid", False), ("sqrtsoftplus", False), ("sigmoid", True):
        options = dict(score=score, score_after_topk=after, n_group=groups, topk_group=kept)
        expected = reference.route(logits, bias, None, None, RouterOptions(k, **options))
        routing = route(logits, k, selection_bias=bias, **options)
        x = logits.float()
        scores = x if after else x.sigmoid() if score == "sigmoid" else torch.nn.functional.softplus(x).sqrt()
        values = scores + bias
        # Values that differ by rounding may change places.
        chosen, best = values.gather(1, routing.experts), values.gather(1, expected[1])
        torch.testing.assert_close(chosen, best, rtol=1e-5, atol=0 if spread == 40 else 1e-7)
        assert (routing.experts == expected[1]).float().mean() > 0.99


@pairs
@pytest.mark.parametrize("far", ["values", "negative", "sums", "biases", "logits", "off"])
def test_groups_far_apart(device, dtype, far):
    """Scores of groups whose keys of 32 bits cannot tell them apart, of both signs, and infinite ones."""
    E, k, groups = 128, 8, 4
    x = torch.stack([torch.randperm(E, generator=torch.Generator().manual_seed(t)) for t in range(6)]) * 0.0625 - 4.0
    bias = torch.zeros(E)
    options = dict(score="sigmoid", n_group=groups, topk_group=2)
    if far == "values":  # one group is as usual; sums of the others are 1e-24 to 1e-31
        x.view(6, groups, -1)[:, 1:] -= torch.tensor([60.0, 68.0, 52.0]).view(3, 1)
    elif far == "negative":
        bias -= 1.5
    elif far == "sums":  # the first is 0.002, those of the next two are -0.3 and -0.22
        x, k, options = x - 8.0, 2, options | {"score_after_topk": True}
        x[:, [5, 9, 40, 41, 70, 71]] = torch.tensor([0.5, -0.498046875, 0.45, -0.75, 0.48, -0.7])
    elif far == "biases":
        bias[[3, 40, 70, 100]] = torch.tensor([INF, -INF, INF, INF])
    elif far == "logits":  # more than k scores of 1
        bias = torch.randperm(E, generator=torch.Generator().manual_seed(9)) / E
        x[2, ::2] = INF
    else:
        bias[70:72], x[:3, 71] = torch.tensor([1.0, 1.5]), -INF
    routing = route(x.to(device, dtype), k, selection_bias=bias.to(device), **options)
    exact = [definition(row.to(dtype).double(), k, selection_bias=bias.double(), **options) for row in x]
    assert torch.equal(routing.experts.cpu(), torch.stack([experts for experts, _ in exact]))
    torch.testing.assert_close(routing.weights.cpu().double(), torch.stack([w for _, w in exact]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("logit, others", [(INF, 0.0), (1e38, -3e38)])
@pytest.mark.parametrize("E, score", [(64, "sigmoid"), (63, "sigmoid"), (63, "sqrtsoftplus"), (64, "softmax")])
@pytest.mark.parametrize("off", [-INF, math.nan])
def test_a_bias_of_minus_infinity_outweighs_every_logit(device, logit, others, E, score, off):
    """In the kernel for biases, and in the one for an odd number of experts and for a softmax."""
    logits = torch.zeros(2, E, device=device)
    bias = torch.full((E,), others, device=device)
    logits[0, 60], bias[60] = logit, off
    routing = route(logits, 8, score=score, selection_bias=bias, score_after_topk=True)
    assert routing.experts.tolist() == [[*range(8)]] * 2


@pairs
@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_experts_that_are_off(device, dtype, score, after):
    """-inf comes last, has weight 0 and no gradient; a large bias does not bring it back."""
    x = torch.randn(6, 10, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    x[:, 3] = -INF
    x[1, 2:] = -INF
    x.requires_grad_()
    bias = torch.zeros(10, device=device)
    bias[3] = 100.0
    plain = route(x, 4, score=score, score_after_topk=after)
    assert plain.experts[1].tolist() == [*plain.experts[1, :2].tolist(), 2, 3] and (plain.weights[1, 2:] == 0).all()
    assert not (plain.experts[[0, 2, 3, 4, 5]] == 3).any() and plain.weights.isfinite().all()
    routing = route(x, 4, score=score, selection_bias=bias, score_after_topk=after)
    assert not (routing.experts[[0, 2, 3, 4, 5]] == 3).any()
    assert set(routing.experts[1, :2].tolist()) == {0, 1} and routing.experts[1, 2:].tolist() == [2, 3]
    assert (routing.weights[1, 2:] == 0).all() and routing.weights.isfinite().all()
    (gradient,) = torch.autograd.grad((routing.weights * torch.rand(6, 4, device=device)).sum(), x)
    assert gradient.isfinite().all() and (gradient[x == -INF] == 0).all() and (gradient[0] != 0).any()


@pytest.mark.parametrize("losses", [False, True])
def test_a_token_whose_experts_are_all_off_has_no_gradient(device, dtype, losses):
    x = torch.stack([torch.arange(8.0), torch.full((8,), -INF)]).to(device, dtype).requires_grad_()
    routing = route(x, 2, score="sigmoid", losses=losses)
    (gradient,) = torch.autograd.grad(routing.weights[:, 0].sum(), x)
    assert (routing.weights[1] == 0).all() and (gradient[1] == 0).all() and gradient[0].count_nonzero() == 2


@pytest.mark.parametrize("E, groups", [(32, 16), (64, 4)])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("group_score", ["top2_sum", "max"])
def test_groups_with_one_expert_or_none(device, dtype, E, groups, biased, group_score):
    """An expert that is not disabled is selected before those that are, wherever it is."""
    x = torch.full((6, E), -INF)
    x[0, 9] = 4.0
    x[1, [5, 20, 31]] = torch.tensor([5.0, -3.0, -3.5])
    x[2, : E // 2], x[3, 1::2] = 1.0, -8.0
    x[4:] = torch.randn(2, E, generator=torch.Generator().manual_seed(2))
    x[4, torch.arange(E) % 5 > 0], x[5, : E - 1] = -INF, -INF
    options = dict(score="sigmoid", n_group=groups, topk_group=2, group_score=group_score)
    if biased:
        options["selection_bias"] = torch.linspace(-0.2, 0.5, E)
    routing = route(x.to(device, dtype), 2, **on(device, options))
    exact = [definition(row.to(dtype).double(), 2, **options) for row in x]
    enabled = x.gather(1, torch.stack([experts for experts, _ in exact])) > -INF
    assert (enabled.sum(1) == (x > -INF).sum(1).clamp(max=2)).all()
    assert torch.equal(routing.experts.cpu(), torch.stack([experts for experts, _ in exact]))
    torch.testing.assert_close(routing.weights.cpu().double(), torch.stack([w for _, w in exact]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("after", [False, True])
def test_the_lowest_number_disables_an_expert_of_a_group(device, after):
    """Whatever the other tokens of its program are, which may need whole values."""
    lowest = torch.finfo(torch.float32).min
    value = torch.full((16,), 0.15)
    value[0], value[1:4] = 0.9, lowest
    x, bias = (value, torch.zeros(16)) if after else (torch.zeros(16), value - 0.5)
    x = torch.stack([x, torch.full((16,), float("nan"))]).to(device)
    for tokens in (x[:1], x):
        found = route(
            tokens, 2, score="sigmoid", selection_bias=bias.to(device), n_group=4, topk_group=2, score_after_topk=after
        )
        assert found.experts[0].tolist() == [0, 4]


@pairs
@pytest.mark.parametrize("name", [name for name, (_, _, options) in CASES.items() if "selection_bias" in options])
def test_a_bias_of_nan_disables_an_expert_as_one_of_minus_infinity_does(device, dtype, name):
    x, k, options = inputs(name, 3)
    x, E = x.to(device, dtype), x.shape[-1]
    for some in (torch.arange(E) == 1, torch.arange(E) != E - 2, torch.ones(E, dtype=torch.bool)):
        of_nan, of_inf = (options["selection_bias"].masked_fill(some, value).to(device) for value in (math.nan, -INF))
        expected = route(x, k, **on(device, options) | {"selection_bias": of_inf})
        found = route(x, k, **on(device, options) | {"selection_bias": of_nan})
        assert torch.equal(found.experts, expected.experts) and found.experts.max() < E
        assert torch.equal(found.weights, expected.weights) and torch.equal(found.counts, expected.counts)


@pairs
@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize("size", [48, 192])
def test_tokens_without_an_answer(device, dtype, score, groups, size):
    x = torch.randn(5, size, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    bias = torch.zeros(size, device=device) if size > 48 else None
    x[1, 4] = float("nan")
    x[2] = -INF
    x[3, 5] = INF
    x = torch.cat([x, x[1:2].flip(1), -x[1:2]])  # also the second of two logits, and a negative NaN
    x.requires_grad_()
    routing = route(x, 3, score=score, selection_bias=bias, n_group=groups, topk_group=(groups + 1) // 2)
    void = {"softmax": [1, 2, 3, 5, 6], "sigmoid": [1, 5, 6], "sqrtsoftplus": [1, 3, 5, 6]}[score]
    assert routing.experts[void].tolist() == [[0, 1, 2]] * len(void)
    assert routing.weights[void].isnan().all()
    others = [t for t in range(7) if t not in void]
    assert routing.weights[others].isfinite().all()
    assert routing.counts.sum() == 21
    (gradient,) = torch.autograd.grad(routing.weights[:, 0].sum(), x)
    assert gradient[void].isnan().all() and gradient[others].isfinite().all()


@pairs
@pytest.mark.parametrize("tokens", [40, 900])
@pytest.mark.parametrize("losses", [False, True], ids=["", "losses"])
def test_masked_tokens(device, dtype, tokens, losses):
    x, k, options = inputs("sigmoid, groups" if losses else "softmax", tokens)
    x = x.to(device, dtype)
    mask = torch.arange(tokens, device=device) % 3 != 1
    x[1] = float("nan")  # which is masked
    x.requires_grad_()
    got = route(x, k, token_mask=mask, losses=losses, **on(device, options))
    kept = route(x[mask], k, losses=losses, **on(device, options))
    for name in ("weights", "experts", "logsumexp") if losses else ("weights", "experts"):
        assert torch.equal(getattr(got, name)[mask], getattr(kept, name)), name
    assert torch.equal(got.counts, kept.counts)
    assert (got.weights[~mask] == 0).all() and (got.experts[~mask] < x.shape[-1]).all()
    total = (got.weights.square() * 3).sum()
    if losses:
        torch.testing.assert_close(got.prob_sums, kept.prob_sums)
        total = total + (got.logsumexp**2).sum() + (got.prob_sums**2).sum()
    (gradient,) = torch.autograd.grad(total, x)
    assert (gradient[~mask] == 0).all() and (gradient[mask] != 0).any(-1).all()


def test_random_descriptions(device, dtype):
    """Every combination of what differs between families, on a few tokens."""
    g = torch.Generator().manual_seed(0)
    for score, groups, after, renormalize, biased in itertools.product(
        ("softmax", "sigmoid", "sqrtsoftplus"), (1, 4), (False, True), (False, True), (False, True)
    ):
        E = 4 * int(torch.randint(2, 12, (), generator=g))
        k = int(torch.randint(1, E // 2, (), generator=g))
        options = {"score": score, "n_group": groups, "topk_group": math.ceil(groups / 2), "renormalize": renormalize,
                   "score_after_topk": after}  # fmt: skip
        x = torch.randn(5, E, generator=g).to(dtype)
        bias = torch.randn(E, generator=g) if biased else None
        got = route(x.to(device), k, selection_bias=None if bias is None else bias.to(device), **options)
        rows = [definition(row.double(), k, selection_bias=bias, **options) for row in x]
        assert torch.equal(got.experts.cpu(), torch.stack([e for e, _ in rows])), options
        torch.testing.assert_close(got.weights.cpu().double(), torch.stack([w for _, w in rows]), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("stride", [0, 1, 9])
def test_a_gradient_of_one_token_with_any_stride(device, k, stride):
    """Such as that of a row of `torch.cat`. A single row is contiguous with any stride."""
    x = torch.randn(1, 20, generator=torch.Generator().manual_seed(2)).to(device).requires_grad_()
    upstream = torch.tensor([1.0, -2.0, 0.5], device=device)[None, :k]
    rows = torch.as_strided(upstream, (1, k), (stride, 1))
    found, expected = [torch.autograd.grad(route(x, k, renormalize=False).weights, x, g)[0] for g in (rows, upstream)]
    weights, experts = x.detach().cpu().double().requires_grad_(), route(x, k).experts.cpu()
    (exact,) = torch.autograd.grad(weights.softmax(-1).gather(1, experts), weights, upstream.cpu().double())
    assert torch.equal(found, expected)
    torch.testing.assert_close(found.cpu().double(), exact, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("tokens", [5, 100])
def test_tokens_that_are_masked_or_missing_are_not_compared_by_whole_values(device, monkeypatch, tokens):
    """Their logits are read as 0, which with a bias of 0 is as far below the largest value as a number can be."""
    if not interpreted(device):
        pytest.skip("counts the calls in the interpreter")
    kernel = sys.modules[backend_of(torch.zeros(1, device=device)).route.__module__].router_biased
    calls, original = [], kernel.by_whole_values
    monkeypatch.setattr(kernel, "by_whole_values", lambda *a: calls.append(1) or original(*a))
    x = torch.rand(tokens, 64, generator=torch.Generator().manual_seed(3)).to(device) + 1
    options = dict(k=8, score="sigmoid", score_after_topk=True, selection_bias=torch.zeros(64, device=device))
    route(x, token_mask=torch.arange(tokens) % 7 != 3, **options)
    assert not calls
    route(x.index_fill(1, torch.tensor(5), float("nan")), **options)
    assert calls
