"""`route` against a definition that takes one token at a time: choice, weights, counts, gradients."""

import functools
import itertools
import math

import pytest
import torch

from onepass import reference
from onepass.core.moe_options import RouterOptions
from onepass.moe import route, sigmoid_topk
from paths import interpreted
from routing_cases import CASES, INF, RUNS, definition, dtype_of, inputs, on, pairs


@pytest.fixture(params=RUNS)
def dtype(request, device, monkeypatch):
    return dtype_of(request, device, monkeypatch)


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
@pytest.mark.parametrize("eps", [0, 1e-30, 1e-20])
@pytest.mark.parametrize(
    ("score", "after"),
    [("softmax", False), ("sigmoid", False), ("sigmoid", True), ("sqrtsoftplus", False), ("sqrtsoftplus", True)],
)
def test_scores_that_underflow_are_renormalized(device, score, after, eps):
    """All selected scores are so small that float32 has no such numbers, since the bias selects these experts."""
    low = torch.tensor([-900.0, -300.0, -210.0, -104.0, -88.0, -50.0, -39.0, -3.0]).double()
    T = len(low)
    x = torch.cat([low.view(T, 1) + torch.linspace(-2, 2, 4 * T).view(T, 4), torch.zeros(T, 4)], -1)
    if score != "softmax":
        x[:, 4:] = x[:, :4] - 5.0
    bias = torch.tensor([2.0] * 4 + [0.0] * 4)
    given, upstream = x.float().to(device).requires_grad_(), torch.rand(T, 3).double()
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
    of_eps = torch.full((T, 1), math.log(eps) if eps else -INF)
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
