"""`route` with the experts that another run selected, against a definition in float64 on the same experts."""

import itertools

import pytest
import torch

import onepass
from onepass.moe import load_balancing_loss, route, router_z_loss
from paths import interpreted

INF = float("inf")
BIAS = torch.linspace(-0.6, 0.4, 16)
V3 = dict(score="sigmoid", selection_bias=BIAS, n_group=4, topk_group=2, scale=2.5)
# What the routers of the families of test_moe_families.py ask of `route`, and what none of them does.
OPTIONS = {
    "mixtral, minimax, hunyuan": dict(eps=0.0),
    "qwen2, qwen3, qwen3-next, olmoe": dict(renormalize=False),
    "gpt-oss": dict(renormalize=False, score_after_topk=True),
    "ernie": dict(renormalize=False, selection_bias=BIAS),
    "deepseek-v2": dict(renormalize=False, scale=1.5),
    "deepseek-v2, groups": dict(n_group=4, topk_group=2, group_score="max", renormalize=False, scale=2.5, eps=0.0),
    "deepseek-v3, glm-4, dots1": V3,
    "deepseek-v3, as they are": V3 | dict(renormalize=False),
    "minimax-m2": dict(score="sigmoid", selection_bias=BIAS, eps=0.0),
    "sqrtsoftplus, soft-cap": dict(score="sqrtsoftplus", softcap=3.0, selection_bias=BIAS),
}
every_family = pytest.mark.parametrize("name", OPTIONS)
E, K, T = 16, 4, 30


def inputs(name, device, seed=0):
    options = {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in OPTIONS[name].items()}
    x = torch.randn(T, E, generator=torch.Generator().manual_seed(seed)) * 2
    return x.to(device).requires_grad_(), options


def drifted(device, dtype=torch.int16):
    """Distinct experts that have nothing to do with the logits."""
    return torch.rand(T, E, generator=torch.Generator().manual_seed(7)).argsort(-1)[:, :K].to(device, dtype)


def definition(x, experts, score="softmax", renormalize=True, scale=1.0, eps=1e-20, score_after_topk=False,
               softcap=None, **selection):  # fmt: skip
    """The weights of the given experts, differentiable."""
    z = x if softcap is None else softcap * torch.tanh(x / softcap)
    scores = {"softmax": lambda z: z.softmax(-1), "sigmoid": torch.sigmoid,
              "sqrtsoftplus": lambda z: torch.log1p(z.exp()).sqrt()}[score]  # fmt: skip
    w = scores(z.gather(-1, experts)) if score_after_topk else scores(z).gather(-1, experts)
    return scale * (w / (w.sum(-1, keepdim=True) + eps) if renormalize else w)


def total(routing):
    """A loss of all results that have a gradient."""
    weighted = routing.weights * torch.linspace(-1, 2.5, K, device=routing.weights.device)
    return weighted.sum() + load_balancing_loss(routing) + router_z_loss(routing)


@every_family
def test_the_natural_choice_replayed_is_the_same(device, name):
    x, options = inputs(name, device)
    natural = route(x, K, losses=True, **options)
    again = route(x, K, losses=True, experts=natural.experts.int(), count_changed=True, **options)
    assert all(torch.equal(a, b) for a, b in zip(natural[:5], again)) and again.changed == 0
    assert torch.equal(*(torch.autograd.grad(total(r), x)[0] for r in (natural, again)))


@pytest.mark.pairs
@every_family
@pytest.mark.parametrize("eps", [0.0, 1e-5], ids=str)
def test_half_precision(device, name, eps):
    """Without losses, in the kernel that sorts keys: natural choices are the same, and small scores are not lost."""
    options, tokens = OPTIONS[name] | dict(eps=eps), 40
    if "selection_bias" in options:
        options["selection_bias"] = torch.linspace(-0.6, 0.4, 64).to(device)
    g = torch.Generator().manual_seed(0)
    x = (torch.randn(tokens, 64, generator=g) * 10).to(device)
    mask = torch.arange(tokens, device=device) % 5 != 0
    # The bits of a sum could depend on the kernel's variant only where threads share a row.
    for dtype in (torch.float32, torch.float16, torch.bfloat16)[0 if device.type == "cuda" else 2 :]:
        x = x.to(dtype)
        natural = route(x, K, token_mask=mask, **options)
        given = natural.experts.int()
        given[3:5, 1] = -1
        again = route(x, K, experts=given, token_mask=mask, count_changed=True, **options)
        assert all(torch.equal(a, b) for a, b in zip(natural[:3], again[:3])) and again.changed == 0
    ids = torch.rand(tokens, 64, generator=g).argsort(-1)[:, :K]
    got = route(x, K, experts=ids.to(device), count_changed=True, **options)
    kinds = {n: v for n, v in OPTIONS[name].items() if n not in ("selection_bias", "eps")}
    expected = definition(x.cpu().double(), ids, eps=eps, **kinds)
    torch.testing.assert_close(got.weights.cpu().double(), expected, rtol=1e-5, atol=1e-7)
    assert torch.equal(got.experts.cpu(), ids) and torch.equal(got.counts.cpu(), ids.flatten().bincount(minlength=64))
    every = route(x, K, **options).experts
    assert got.changed == sum(len({*a} - {*b}) for a, b in zip(ids.tolist(), every.tolist())) > tokens
    if interpreted(device) or device.type == "cuda":
        ids[7, 1] = ids[7, 0]
        routing = route(x, K, experts=ids.to(device), **options)
        assert routing.weights.isnan().any(-1).nonzero().tolist() == [[7]]
        assert routing.experts[7].tolist() == list(range(K))


@every_family
def test_weights_and_gradients_of_drifted_experts(device, name):
    """Of experts far from the k best and in groups that are not kept: live logits, and no gradient is lost."""
    x, options = inputs(name, device)
    ids = drifted(device)
    routing = route(x, K, experts=ids, count_changed=True, losses=True, **options)
    natural = route(x, K, **options).experts
    assert torch.equal(routing.experts, ids.long())
    assert torch.equal(routing.counts.long(), ids.long().flatten().bincount(minlength=E))
    assert routing.changed.dtype == torch.int32
    differ = [len({*a} - {*b}) for a, b in zip(ids.tolist(), natural.tolist())]
    assert routing.changed == sum(differ) > T
    exact = x.detach().cpu().double().requires_grad_()
    expected = definition(exact, ids.cpu().long(), **OPTIONS[name])
    torch.testing.assert_close(routing.weights.detach().cpu().double(), expected.detach(), rtol=1e-5, atol=1e-7)
    (of_weights,) = torch.autograd.grad((expected * torch.linspace(-1, 2.5, K)).sum(), exact, retain_graph=True)
    assert (of_weights.gather(-1, ids.cpu().long()) != 0).all()
    p, f = exact.softmax(-1).mean(0), routing.counts.cpu() / T
    loss = (expected * torch.linspace(-1, 2.5, K)).sum()
    if OPTIONS[name].get("softcap") is None:
        (got,) = torch.autograd.grad(total(routing), x)
        loss = loss + E * (p * f).sum() + exact.logsumexp(-1).square().mean()
    else:
        (got,) = torch.autograd.grad((routing.weights * torch.linspace(-1, 2.5, K, device=x.device)).sum(), x)
    (expected,) = torch.autograd.grad(loss, exact)
    torch.testing.assert_close(got.cpu().double(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("tokens", [5, 2000], ids=["one program", "several"])
def test_tokens_with_a_minus_one_are_routed_naturally(device, tokens):
    """So are masked ones, whose ids may be anything; of both nothing counts as changed."""
    g = torch.Generator().manual_seed(2)
    x = torch.randn(tokens, E, generator=g).to(device).requires_grad_()
    options = {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in V3.items()}
    ids = torch.rand(tokens, E, generator=g).argsort(-1)[:, :K]
    ids[::3, torch.arange(tokens)[::3] % K] = -1
    ids[1] = 7
    given, mask = ids.to(device), torch.ones(tokens, dtype=torch.bool, device=device)
    mask[1], free = False, (ids == -1).any(-1).to(device)
    got = route(x, K, experts=given, token_mask=mask, losses=True, count_changed=True, **options)
    natural = route(x, K, token_mask=mask, losses=True, **options)
    told = ids.clone()
    told[free.cpu()] = natural.experts.cpu()[free.cpu()]
    told[1] = torch.arange(K)
    alone = route(x, K, experts=told.to(device), token_mask=mask, losses=True, count_changed=True, **options)
    assert torch.equal(got.experts.cpu(), told) and all(torch.equal(a, b) for a, b in zip(got, alone))
    assert torch.equal(got.weights[free], natural.weights[free]) and (got.weights[1] == 0).all()
    assert got.counts.sum() == K * (tokens - 1)
    of_got, of_natural = (torch.autograd.grad(r.weights[:, 0].sum(), x)[0] for r in (got, natural))
    assert torch.equal(of_got[free], of_natural[free]) and (of_got[1] == 0).all()
    assert (of_got[~free & mask].gather(-1, given[~free & mask]) != 0).all()


UNSIGNED = torch.uint8, torch.uint16, torch.uint32
DTYPES = torch.int8, torch.int16, torch.int32, torch.int64, *UNSIGNED, torch.uint64


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_of_ids(device, dtype):
    x, options = inputs("mixtral, minimax, hunyuan", device)
    ids = drifted("cpu", torch.int64)
    got = route(x, K, experts=ids.to(dtype).to(device), **options)
    assert torch.equal(got.experts.cpu(), ids) and torch.equal(got.weights, route(x, K, experts=ids.to(device),
                                                                                  **options).weights)  # fmt: skip


def test_many_experts_and_ids_that_only_int64_holds(device):
    x = torch.randn(3, 1024, generator=torch.Generator().manual_seed(0)).to(device)
    ids = torch.arange(32).mul(31).expand(3, 32).contiguous().to(device)
    assert torch.equal(route(x, 32, experts=ids).experts, ids)
    ids[1, 5] += 2**32
    invalid_tokens(x, 32, ids, [1], IndexError, rf"expected ids from 0 to 1023, or -1, got {2**32 + 155}")


def invalid_tokens(x, k, ids, rows, error, match):
    """An error on a CPU; else NaN weights and gradients of these tokens, and valid experts."""
    if x.device.type == "cpu" and not interpreted(x.device):
        with pytest.raises(error, match=match):
            route(x, k, experts=ids)
        return
    x = x.detach().requires_grad_()
    routing = route(x, k, experts=ids)
    others = [t for t in range(len(x)) if t not in rows]
    (gradient,) = torch.autograd.grad(routing.weights[:, 0].sum(), x)
    for found in (routing.weights, gradient):
        assert found[rows].isnan().all() and found[others].isfinite().all()
    assert routing.experts[rows].tolist() == [list(range(k))] * len(rows) and routing.counts.sum() == k * len(x)


@pytest.mark.parametrize("bad, error, match", [
    (E, IndexError, "experts: expected ids from 0 to 15, or -1, got 16"),
    (-2, IndexError, "experts: expected ids from 0 to 15, or -1, got -2"),
    (2**15 - 1, IndexError, "experts: expected ids from 0 to 15, or -1, got 32767"),
    (None, ValueError, "experts: expected distinct ids for every token, got .* for token 3"),
], ids=str)  # fmt: skip
def test_ids_that_are_no_choice(device, bad, error, match):
    x, _ = inputs("gpt-oss", device)
    ids = drifted(device)
    ids[3, 1] = ids[3, 2] if bad is None else bad
    invalid_tokens(x, K, ids, [3], error, match)
    ids[3, 3] = -1  # so that the token is free
    assert route(x, K, experts=ids).weights.isfinite().all()


def test_float64_and_batch_invariance(device):
    x, options = inputs("deepseek-v3, glm-4, dots1", device)
    ids, mask = drifted(device), torch.arange(T, device=device) % 5 != 0
    ids[4, 0] = -1
    with onepass.batch_invariant():
        every = route(x, K, experts=ids, token_mask=mask, losses=True, count_changed=True, **options)
        parts = [route(x[s], K, experts=ids[s], token_mask=mask[s], losses=True, count_changed=True, **options)
                 for s in (slice(0, 7), slice(7, T))]  # fmt: skip
        grads = [torch.autograd.grad(sum(r.weights.square().sum() for r in rs), x)[0] for rs in ([every], parts)]
    assert torch.equal(every.weights, torch.cat([p.weights for p in parts])) and torch.equal(*grads)
    assert torch.equal(every.counts, sum(p.counts for p in parts)) and every.changed == sum(p.changed for p in parts)
    exact = x.detach().double().requires_grad_()
    double = route(exact, K, experts=ids, token_mask=mask, **options)
    assert double.weights.dtype == torch.float64
    torch.testing.assert_close(double.weights.float(), every.weights, rtol=1e-5, atol=1e-6)
    (of_double,) = torch.autograd.grad(double.weights.square().sum(), exact)
    torch.testing.assert_close(of_double.float(), grads[0], rtol=1e-4, atol=1e-5)


def test_experts_that_are_off_or_have_no_score(device):
    x, ids = torch.zeros(3, 8), torch.tensor([[1, 2], [1, 3], [4, 0]])
    x[0, 1], x[1, 1:4], x[2, 6] = -INF, -INF, float("nan")
    x = x.to(device).requires_grad_()
    routing = route(x, 2, experts=ids.to(device), renormalize=False)
    assert torch.equal(routing.experts.cpu(), ids)
    assert routing.weights[0, 0] == 0 and (routing.weights[1] == 0).all() and routing.weights[2].isnan().all()
    (gradient,) = torch.autograd.grad(routing.weights[:, 1].sum(), x)
    assert gradient[:2].isfinite().all() and gradient[2].isnan().all()


def test_infinite_logits_that_have_a_score(device):
    """A sigmoid of infinity is 1, so that the other experts of a replayed choice have their gradients."""
    x = torch.randn(3, E, generator=torch.Generator().manual_seed(3)).to(device)
    x[0, 2], x[1, 9] = INF, INF
    ids = torch.tensor([[2, 4, 7, 1], [0, 4, 7, 1], [-1, 4, 7, 1]], device=device)
    for renormalize in (True, False):
        mine, exact = x.clone().requires_grad_(), x.double().requires_grad_()
        routing = route(mine, K, score="sigmoid", renormalize=renormalize, experts=ids)
        w = exact.sigmoid().gather(1, routing.experts)
        w = w / (w.sum(-1, keepdim=True) + 1e-20) if renormalize else w
        upstream = torch.randn(w.shape, generator=torch.Generator().manual_seed(4)).to(device)
        (gradient,) = torch.autograd.grad(routing.weights, mine, upstream)
        (expected,) = torch.autograd.grad(w, exact, upstream.double())
        torch.testing.assert_close(gradient.double(), expected, rtol=1e-5, atol=1e-6)


def test_shapes_layouts_and_no_tokens(device):
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0)).to(device)
    ids = torch.rand(2, 3, 5, generator=torch.Generator().manual_seed(1)).argsort(1).transpose(1, 2).to(device)
    got = route(x, 3, experts=ids)
    assert torch.equal(got.experts, ids) and got.experts.is_contiguous() and got.changed is None
    assert torch.equal(got.weights, route(x, 3, experts=ids.contiguous()).weights)
    assert route(x[0, 0], 3, experts=ids[0, 0]).experts.tolist() == ids[0, 0].tolist()
    none = route(x[:0], 3, experts=ids[:0], count_changed=True)
    assert none.weights.shape == (0, 5, 3) and none.changed == 0
    assert route(x, 3, count_changed=True).changed == 0


BAD = {
    "experts: expected a tensor of integers, got [1]": [1],
    "experts: expected a tensor of integers, got torch.float32": torch.zeros(4, 2),
    "experts: expected a tensor of integers, got torch.bool": torch.zeros(4, 2, dtype=torch.bool),
    "experts: expected shape (4, 2), got (4, 3)": torch.zeros(4, 3, dtype=torch.int64),
    "experts: expected device cpu": torch.zeros(4, 2, dtype=torch.int64, device="meta"),
}


@pytest.mark.parametrize("message", BAD)
def test_one_clear_error(message):
    with pytest.raises((TypeError, ValueError)) as error:
        route(torch.randn(4, 8), 2, experts=BAD[message])
    assert message in str(error.value)


def test_random_replays(device):
    """Every combination of what changes the arithmetic of a choice, with ids of its own."""
    g = torch.Generator().manual_seed(0)
    for score, after, renormalize in itertools.product(
        ("softmax", "sigmoid", "sqrtsoftplus"), (False, True), (False, True)
    ):
        experts = int(torch.randint(2, 40, (), generator=g))
        k = int(torch.randint(1, min(experts, 32) + 1, (), generator=g))
        options = {"score": score, "score_after_topk": after, "renormalize": renormalize}
        x, ids = torch.randn(6, experts, generator=g), torch.rand(6, experts, generator=g).argsort(-1)[:, :k]
        mine, exact = x.to(device).requires_grad_(), x.double().requires_grad_()
        upstream = torch.randn(6, k, generator=g)
        got, expected = route(mine, k, experts=ids.to(device), **options).weights, definition(exact, ids, **options)
        torch.testing.assert_close(got.detach().cpu().double(), expected.detach(), rtol=1e-5, atol=1e-6)
        (ours,) = torch.autograd.grad(got, mine, upstream.to(device))
        (theirs,) = torch.autograd.grad(expected, exact, upstream.double())
        torch.testing.assert_close(ours.cpu().double(), theirs, rtol=1e-4, atol=1e-5)
