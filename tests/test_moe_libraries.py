"""The routers of Megatron-core and torchtitan, alike with and without `onepass.patch`, if these are installed."""

import sys
from itertools import product
from types import ModuleType, SimpleNamespace

import pytest
import torch

import onepass

pytestmark = pytest.mark.usefixtures("eager")
T, H, E, K = 24, 32, 16, 4


def compare(call, leaves):
    """The results of a call and its gradients, with the patch and without."""
    outcomes = []
    for _ in range(2):
        results = call()
        loss = sum(
            (r.float() * torch.linspace(-1, 1, r.numel()).view(r.shape)).sum() for r in results if r.requires_grad
        )
        outcomes.append((results, torch.autograd.grad(loss, leaves)))
        yield
    (theirs, of_theirs), (ours, of_ours) = outcomes
    for a, b in zip((*theirs, *of_theirs), (*ours, *of_ours), strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-6)


def test_megatron():
    pytest.importorskip("megatron.core")
    from megatron.core.transformer.moe.router import TopKRouter

    for score, pre, (groups, chosen), biased, topk in product(
        ("softmax", "sigmoid"), (False, True), ((None, None), (4, 2), (4, 4)), (False, True), (K, 1)
    ):
        if chosen and score == "sigmoid" and pre:
            continue
        config = SimpleNamespace(
            num_moe_experts=E, moe_router_pre_softmax=pre, moe_router_num_groups=groups, moe_router_group_topk=chosen,
            moe_router_topk_scaling_factor=2.5, moe_router_fusion=False, moe_expert_capacity_factor=None,
            moe_z_loss_coeff=None,
        )  # fmt: skip
        router = torch.nn.Module()
        vars(router).update(
            config=config, topk=topk, score_function=score, routing_type="none", router_replay=None,
            expert_bias=torch.rand(E) if biased else None, enable_expert_bias=False, training=False,
            apply_z_loss=lambda logits, **_: logits, _apply_expert_bias=lambda *_, **__: None,
        )  # fmt: skip
        logits = torch.randn(T, 1, E, requires_grad=True)
        steps = compare(lambda r=router, x=logits: TopKRouter.routing(r, x), [logits])
        next(steps)
        with onepass.patch("megatron") as patched:
            assert any(p.name == "topk_routing_with_score_function" for p in patched.replaced)
            next(steps)
        next(steps, None)


def grouped_products(rows, weights, counts, trans_b):
    """What Megatron takes of the package grouped_gemm, which needs a GPU."""
    return torch.cat([x @ w for x, w in zip(rows.split(counts.tolist()), weights)])


@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize("counts", [[5, 0, 9, 2], [0, 0, 0, 0]], ids=["an idle expert", "no rows"])
def test_megatron_experts(monkeypatch, activation, counts):
    pytest.importorskip("megatron.core")
    from megatron.core.transformer.moe import experts as library

    monkeypatch.setattr(library.gg, "ops", SimpleNamespace(gmm=grouped_products), raising=False)
    f, width, local = getattr(torch.nn.functional, activation), 24, len(counts)
    mlp = library.GroupedMLP.__new__(library.GroupedMLP)
    torch.nn.Module.__init__(mlp)
    config = dict(bf16=True, gated_linear_unit=True, activation_func=f, hidden_size=H, moe_apply_probs_on_input=False)
    vars(mlp).update(config=SimpleNamespace(**config), num_local_experts=local, activation_recompute=False)
    mlp.activation_func_with_probs = lambda x, probs: f(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1] * probs
    mlp.weight1 = torch.nn.Parameter(torch.randn(H, local * 2 * width) * H**-0.5)
    mlp.weight2 = torch.nn.Parameter(torch.randn(local * width, H) * width**-0.5)
    rows, probs = torch.randn(sum(counts), H, requires_grad=True), torch.rand(sum(counts), requires_grad=True)

    def call():
        out, bias = mlp(rows, torch.tensor(counts), probs)
        assert bias is None
        return [out]

    steps = compare(call, [rows, probs, mlp.weight1, mlp.weight2])
    next(steps)
    with onepass.patch("megatron") as patched:
        assert any(p.name == "GroupedMLP.forward" for p in patched.replaced)
        next(steps)
        mlp.config.gated_linear_unit, mlp.activation_func_with_probs = False, lambda x, probs: f(x) * probs
        mlp.weight2 = torch.nn.Parameter(torch.randn(local * 2 * width, H))
        assert call()[0].shape == rows.shape
    next(steps, None)


def test_torchtitan():
    pytest.importorskip("torchtitan")
    from torchtitan.models.common.moe import TokenChoiceTopKRouter

    for score, norm, groups, biased in product(("softmax", "sigmoid"), (False, True), (None, 4), (False, True)):
        router = TokenChoiceTopKRouter.__new__(TokenChoiceTopKRouter)
        torch.nn.Module.__init__(router)
        router.gate = torch.nn.Linear(H, E, bias=False)
        vars(router).update(
            num_experts=E, num_expert_groups=groups, num_limited_groups=groups and 2, top_k=K, score_func=score,
            route_norm=norm, route_scale=2.5, _debug_force_load_balance=False,
        )  # fmt: skip
        x, bias = torch.randn(2, T, H, requires_grad=True), torch.rand(E) if biased else None

        def call(router=router, x=x, bias=bias):
            weights, experts, scores = router(x, bias)
            experts, order = experts.sort()
            return weights.gather(-1, order), experts, scores

        steps = compare(call, [x, router.gate.weight])
        next(steps)
        with onepass.patch("torchtitan") as patched:
            assert any("TokenChoiceTopKRouter" in p.name for p in patched.replaced)
            next(steps)
        next(steps, None)


@pytest.mark.parametrize("changed", [
    {"top_k": 33}, {"num_experts": 1025}, {"score_func": "sqrtsoftplus"}, {"num_expert_groups": 4},
    {"_debug_force_load_balance": True}, {"x": SimpleNamespace(device_mesh=None)}, {},
], ids=lambda changed: next(iter(changed), "none"))  # fmt: skip
def test_torchtitan_keeps_routers_that_are_not_supported(monkeypatch, changed):
    """Its own method is called, before the gate is."""
    of_torchtitan = pytest.importorskip("onepass.integrations.torchtitan")
    for name in ("torchtitan", "torchtitan.models", "torchtitan.models.common", "torchtitan.models.common.moe"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    library = sys.modules["torchtitan.models.common"].moe = sys.modules["torchtitan.models.common.moe"]
    library.spmd = SimpleNamespace(is_type_checking=lambda: False)
    monkeypatch.setattr(of_torchtitan, "original", lambda *name: lambda *given: "original")
    gate = torch.nn.Linear(H, E, bias=False)
    gate.register_forward_hook(lambda *given: calls.append(given))
    calls, x = [], changed.pop("x", torch.randn(2, T, H))
    given = dict(num_experts=E, num_expert_groups=None, num_limited_groups=None, top_k=K, score_func="softmax",
                 route_norm=False, route_scale=1.0, _debug_force_load_balance=False)  # fmt: skip
    found = of_torchtitan.choose_experts(SimpleNamespace(gate=gate, **given | changed), x)
    is_ours = not changed and isinstance(x, torch.Tensor)
    assert len(calls) == is_ours and (found != "original") == is_ours


def test_torchtitan_refuses_arguments_that_it_does_not_have(monkeypatch):
    of_torchtitan = pytest.importorskip("onepass.integrations.torchtitan")
    for name in ("torchtitan", "torchtitan.components", "torchtitan.components.loss"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["torchtitan.components"].loss = sys.modules["torchtitan.components.loss"]
    monkeypatch.setattr(of_torchtitan, "original", lambda *name: lambda pred, labels: None)
    with pytest.raises(TypeError, match="unexpected keyword argument 'reduction'"):
        of_torchtitan.cross_entropy_loss(torch.randn(2, 5), torch.zeros(2, dtype=torch.long), reduction="mean")
