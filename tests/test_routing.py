"""`route` against a definition that takes one token at a time: choice, weights, counts, gradients, losses."""

import functools
import itertools
import math
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

import onepass
from onepass import reference
from onepass.core.moe_options import RouterOptions
from onepass.moe import Routing, load_balancing_loss, route, router_z_loss, sigmoid_topk, softmax_topk
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
    ranked = sorted(range(E), key=lambda e: (z[e] == -INF, -value[e] if z[e] > -INF else 0, e))
    size = E // n_group
    if n_group > 1:
        taking_part = [
            [v for e, v in enumerate(value) if e // size == g and min(z[e], v) > -INF] for g in range(n_group)
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


# One number of tokens for each case. Of 150, there are several programs.
OF_MANY = "softmax", "sigmoid, groups", "sigmoid, of 256"
TOKENS = [
    pytest.param(name, tokens, marks=[] if chosen else pytest.mark.exhaustive)
    for n, name in enumerate(CASES)
    for tokens, chosen in ((1, n % 3 == 0), (33, n % 3 > 0), (150, name in OF_MANY))
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
@pytest.mark.parametrize("E, k, groups, kept", [(128, 8, 4, 2), (192, 6, 3, 2)])
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
def test_a_bias_of_minus_infinity_outweighs_every_logit(device, logit, others):
    logits = torch.zeros(2, 64, device=device)
    bias = torch.full((64,), others, device=device)
    logits[0, 60], bias[60] = logit, -INF
    routing = route(logits, 8, score="sigmoid", selection_bias=bias, score_after_topk=True)
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


def switch_loss(layers, k, mask):
    """As transformers spells it: over one-hot experts of all layers, and an attention mask of each."""
    p = torch.cat(layers).softmax(-1)
    chosen = torch.nn.functional.one_hot(p.topk(k)[1], p.shape[-1]).double()
    m = torch.ones(len(p)) if mask is None else mask.repeat(len(layers)).double()
    share = (chosen * m[:, None, None]).sum(0) / m.sum()
    return (share * ((p * m[:, None]).sum(0) / m.sum())).sum() * p.shape[-1]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("tokens", [20, 600])
def test_losses(device, masked, tokens):
    g = torch.Generator().manual_seed(3)
    exact = [torch.randn(tokens, 24, generator=g, dtype=torch.float64).requires_grad_() for _ in range(3)]
    mask = torch.rand(tokens, generator=g) > 0.4 if masked else None
    mine = [x.detach().float().to(device).requires_grad_() for x in exact]
    layers = [softmax_topk(x, 4, losses=True, token_mask=None if mask is None else mask.to(device)) for x in mine]
    kept = slice(None) if mask is None else mask
    for got, expected in (
        (load_balancing_loss(layers), switch_loss(exact, 4, mask)),
        (load_balancing_loss(layers[0]), switch_loss(exact[:1], 4, mask)),
        (router_z_loss(layers), torch.cat([x[kept] for x in exact]).logsumexp(-1).square().mean()),
    ):
        torch.testing.assert_close(got.cpu().double(), expected, rtol=1e-5, atol=1e-6)
        ours = torch.autograd.grad(got, mine, allow_unused=True, retain_graph=True)
        for o, e in zip(ours, torch.autograd.grad(expected, exact, allow_unused=True)):
            if e is not None:
                torch.testing.assert_close(o.cpu().double(), e, rtol=1e-4, atol=1e-8)


def test_losses_equal_those_of_transformers():
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    layers = tuple(torch.randn(2 * 30, 8, generator=torch.Generator().manual_seed(i)) for i in range(3))
    mask = torch.ones(2, 30)
    mask[1, 20:] = 0
    for attention in (None, mask):
        flat = None if attention is None else attention.view(-1)
        ours = load_balancing_loss([softmax_topk(x, 2, losses=True, token_mask=None if flat is None else flat.bool())
                                    for x in layers])  # fmt: skip
        theirs = mixtral.load_balancing_loss_func(layers, 8, 2, attention)
        torch.testing.assert_close(ours, theirs)


def test_shapes_and_layouts(device):
    x = torch.randn(4, 6, 10, generator=torch.Generator().manual_seed(0)).to(device)
    flat = route(x.reshape(24, 10), 3)
    got = route(x, 3, losses=True)
    assert got.weights.shape == got.experts.shape == (4, 6, 3) and got.logsumexp.shape == (4, 6)
    assert torch.equal(got.experts.view(24, 3), flat.experts) and torch.equal(got.weights.view(24, 3), flat.weights)
    for other in (x.transpose(0, 1), x[:, 1:], x[..., 1:9], x.transpose(1, 2).contiguous().transpose(1, 2), x[0, 0]):
        view = other.detach().requires_grad_()
        plain = other.detach().clone(memory_format=torch.contiguous_format).requires_grad_()
        a, b = route(view, 3), route(plain, 3)
        assert torch.equal(a.experts, b.experts)
        torch.testing.assert_close(a.weights, b.weights, atol=1e-6, rtol=1e-6)  # sums run over other lanes
        grads = [torch.autograd.grad(r.weights.square().sum(), p)[0] for r, p in ((a, view), (b, plain))]
        torch.testing.assert_close(*grads, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("shape", [(0, 8), (0, 3, 8), (3, 0, 8)])
def test_no_tokens(device, shape):
    x = torch.empty(shape, device=device, requires_grad=True)
    routing = route(x, 2, losses=True)
    assert routing.weights.shape == (*shape[:-1], 2) and (routing.counts == 0).all() and (routing.prob_sums == 0).all()
    assert torch.autograd.grad(routing.weights.sum(), x)[0].shape == shape


def test_upstream_of_any_layout(device):
    x = torch.randn(50, 16, generator=torch.Generator().manual_seed(0)).to(device).requires_grad_()
    grads = []
    for reduce in (lambda w: w.sum(), lambda w: w.mul(torch.ones_like(w)).sum(), lambda w: w.t().contiguous().sum()):
        grads.append(torch.autograd.grad(reduce(route(x, 3, renormalize=False).weights), x)[0])
    assert torch.equal(grads[0], grads[1]) and torch.equal(grads[0], grads[2])


def test_the_same_every_time(device):
    x = torch.randn(3000, 64, generator=torch.Generator().manual_seed(0)).to(device)
    a, b = (route(x, 6, losses=True) for _ in range(2))
    assert all(torch.equal(p, q) for p, q in zip(a[:5], b))


def traced(x, bias, mask):
    routing = sigmoid_topk(x, 3, selection_bias=bias, n_group=4, topk_group=2, scale=1.5, token_mask=mask, losses=True)
    scale = routing.counts.float().mean() + routing.experts.float().mean()
    replayed = route(x, 3, experts=routing.experts.flip(0), token_mask=mask, count_changed=True)
    loss = routing.weights.square().sum() + router_z_loss(routing) + load_balancing_loss(routing)
    return loss * scale + replayed.weights.square().sum() * replayed.changed


def test_compile_without_graph_breaks(dynamo, device):
    x = torch.randn(40, 16, generator=torch.Generator().manual_seed(0)).to(device).requires_grad_()
    bias, mask = torch.randn(16).to(device), (torch.arange(40) % 4 != 0).to(device)
    backend = "inductor" if device.type == "cuda" else "aot_eager"
    got = torch.compile(traced, fullgraph=True, backend=backend)(x, bias, mask)
    expected = traced(x, bias, mask)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(*(torch.autograd.grad(v, x)[0] for v in (got, expected)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_operations_are_well_formed(device, dtype):
    options = RouterOptions(3, "sigmoid", 4, 2, sums=True)
    x = torch.randn(20, 16, device=device, dtype=dtype)
    bias, mask = torch.randn(16, device=device), torch.arange(20, device=device) % 3 != 0
    torch.library.opcheck(torch.ops.onepass.route, (x, bias, mask, None, *options))
    weights, experts, _, prob_sums, logsumexp, _ = torch.ops.onepass.route(x, bias, mask, None, *options)
    given, options = experts.flip(0).short(), options._replace(count_changed=True)
    torch.library.opcheck(torch.ops.onepass.route, (x, bias, mask, given, *options))
    arguments = x, given.long(), mask, given, weights, prob_sums, logsumexp, *options
    torch.library.opcheck(torch.ops.onepass.route_gradient, arguments)


@pytest.mark.gpu
def test_cuda_graph():
    x = torch.randn(500, 64, device="cuda", requires_grad=True)
    stream = torch.cuda.Stream()

    def step():
        x.grad = None
        routing = sigmoid_topk(x, 6, n_group=8, topk_group=4, losses=True)
        (routing.weights.square().sum() + router_z_loss(routing)).backward()
        return routing

    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = step()
    gradient = x.grad
    for seed in range(2):
        x.data.copy_(torch.randn(500, 64, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        got = [t.clone() for t in (*held[:5], gradient)]
        assert all(torch.equal(a, b) for a, b in zip(got, (*step()[:5], x.grad)))


BAD = {
    "router_logits: expected a float16": lambda x: route(x.long(), 2),
    "router_logits: expected at most 1024 experts, got 1025": lambda x: route(torch.zeros(1, 1025), 2),
    "router_logits: expected a tensor, got [[1.0]]": lambda x: route([[1.0]], 1),
    "k: expected 1 to 8, got 9": lambda x: route(x, 9),
    "k: expected 1 to 8, got 0": lambda x: route(x, 0),
    "k: expected an int, got 2.0": lambda x: route(x, 2.0),
    "k: expected at most the 2 experts of 1 groups, got 3": lambda x: route(x, 3, n_group=4, topk_group=1),
    "n_group: expected a divisor of 8 experts, got 3": lambda x: route(x, 2, n_group=3),
    "topk_group: expected 1 to 4, got 5": lambda x: route(x, 2, n_group=4, topk_group=5),
    "group_score: expected 'max' for groups of one expert": lambda x: route(x, 2, n_group=8, topk_group=4),
    "group_score: expected one of 'top2_sum', 'max', got 'sum'": lambda x: route(x, 2, group_score="sum"),
    "score: expected one of 'softmax', 'sigmoid', 'sqrtsoftplus', got 'relu'": lambda x: route(x, 2, score="relu"),
    "selection_bias: expected shape (8,), got (7,)": lambda x: route(x, 2, selection_bias=torch.zeros(7)),
    "selection_bias: expected a floating-point tensor": lambda x: route(x, 2, selection_bias=torch.arange(8)),
    "token_mask: expected shape (4,), got (5,)": lambda x: route(x, 2, token_mask=torch.ones(5, dtype=torch.bool)),
    "token_mask: expected a bool": lambda x: route(x, 2, token_mask=torch.ones(4, dtype=torch.complex64)),
    "softcap: expected a finite number above 0, got 0.0": lambda x: route(x, 2, softcap=0.0),
    "eps: expected a finite number of at least 0, got -1.0": lambda x: route(x, 2, eps=-1.0),
    "scale: expected a number, got '1'": lambda x: route(x, 2, scale="1"),
    "routing: expected one or more from route(..., losses=True)": lambda x: load_balancing_loss(route(x, 2)),
}


def test_options_that_were_right_once_are_checked_by_type():
    x = torch.zeros(4, 8)
    route(x, 1, scale=1.0)
    with pytest.raises(TypeError, match="k: expected an int, got True"):
        route(x, True, scale=1.0)
    with pytest.raises(TypeError, match="scale: expected a number"):
        route(x, 1, scale=[1.0])


@pytest.mark.parametrize("message", BAD)
def test_one_clear_error(message):
    with pytest.raises((TypeError, ValueError)) as error:
        BAD[message](torch.randn(4, 8))
    assert message in str(error.value)


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


def test_the_shorthands():
    x, bias = torch.randn(5, 8), torch.randn(8)
    for a, b in (
        (softmax_topk(x, 2, renormalize=False), route(x, 2, renormalize=False)),
        (sigmoid_topk(x, 2, selection_bias=bias, n_group=4, topk_group=2, scale=2.0),
         route(x, 2, score="sigmoid", selection_bias=bias, n_group=4, topk_group=2, scale=2.0)),
    ):  # fmt: skip
        assert isinstance(a, Routing) and torch.equal(a.weights, b.weights) and torch.equal(a.experts, b.experts)
    assert onepass.moe.route is route


def fake_cuda(monkeypatch, zeros, stream, capturing):
    """Have `zeros` believe that the CPU is a GPU."""
    cuda = SimpleNamespace(current_device=lambda: 0, is_current_stream_capturing=lambda: capturing[0])
    on_cpu = lambda *shape, dtype, device: torch.zeros(*shape, dtype=dtype)  # noqa: E731
    monkeypatch.setattr(zeros, "torch", SimpleNamespace(
        zeros=on_cpu, cuda=cuda, int32=torch.int32, inference_mode=torch.inference_mode,
    ))  # fmt: skip
    active = SimpleNamespace(get_current_stream=lambda index: stream[0])
    monkeypatch.setattr(zeros, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(zeros, "_rows", {})
    monkeypatch.setattr(zeros, "GRAPHS", "no module")


def test_counters_are_cleared_and_handed_out_once(monkeypatch):
    zeros = pytest.importorskip("onepass.kernels.zeros")
    stream, capturing, cuda = [1], [False], torch.device("cuda", 0)
    fake_cuda(monkeypatch, zeros, stream, capturing)
    rows = [zeros.zeros(6, cuda) for _ in range(150)]
    assert all(r.shape == (6,) and r.dtype == torch.int32 and r.data_ptr() % 16 == 0 for r in rows)
    assert len({r.untyped_storage().data_ptr() for r in rows}) == 3  # 64 rows each
    for n, r in enumerate(rows):
        r += n
    assert [r.tolist() for r in rows] == [[n] * 6 for n in range(150)]
    assert all(r._version == 1 for r in rows)  # autograd would take the change of one for a change of all
    storages = {r.untyped_storage().data_ptr() for r in rows}
    stream[0] = 2  # it waits for no other
    with torch.inference_mode():
        other = zeros.zeros(6, cuda)
    assert other.untyped_storage().data_ptr() not in storages and not other.is_inference()
    stream[0], capturing[0] = 1, True  # a replay has to clear them
    captured = zeros.zeros(6, cuda)
    assert captured.untyped_storage().data_ptr() not in storages and captured.untyped_storage().nbytes() == 24


@pytest.mark.gpu
@pytest.mark.parametrize("experts, k", [(64, 6), (8, 2), (40, 16), (9, 2)])
@pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])
def test_counts_of_many_calls(experts, k, half):
    """On two streams. The counts of 8 experts were wrong when Triton was told by a mask what to count."""
    x = torch.randn(5000, experts, device="cuda", dtype=torch.bfloat16 if half else torch.float32)
    streams = torch.cuda.Stream(), torch.cuda.current_stream()
    torch.cuda.synchronize()
    found = []
    for n in range(150):
        with torch.cuda.stream(streams[n % 2]):
            found.append(route(x[: 4000 + n], k))
    torch.cuda.synchronize()
    for r in found:
        assert torch.equal(r.counts, torch.bincount(r.experts.flatten(), minlength=experts).int())
