"""`route` of infinite, NaN, far apart and almost equal logits and biases, and of experts that are disabled."""

import math
import sys

import pytest
import torch

from onepass import reference
from onepass.backend import backend_of
from onepass.core.moe_options import RouterOptions
from onepass.moe import route, sigmoid_topk
from paths import interpreted
from routing_cases import CASES, INF, RUNS, definition, dtype_of, inputs, on, pairs


@pytest.fixture(params=RUNS)
def dtype(request, device, monkeypatch):
    return dtype_of(request, device, monkeypatch)


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
