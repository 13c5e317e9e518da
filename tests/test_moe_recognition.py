"""How routers are recognized: what is told apart, what is refused, and that the router itself is left alone."""

import importlib
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import onepass
from onepass.core.moe_options import MAX_EXPERTS, MAX_K
from onepass.moe import recognition, route_block
from onepass.moe.blocks import recognized_parts, routed, routing_method

pytestmark = pytest.mark.usefixtures("eager")
H, E, K = 12, 16, 4


class Router(nn.Module):
    """A router of no library, with everything that `route` knows as an option."""

    def __init__(self, score="sigmoid", bias=True, groups=0, best=2, eps=0.0, scale=1.0, cap=0.0, least=0.0, **other):
        super().__init__()
        self.gate, self.correction = nn.Linear(H, E, bias=other.pop("gate_bias", False)), nn.Buffer(torch.rand(E))
        self.score, self.biased, self.groups, self.best, self.eps, self.scale, self.cap = (
            score, bias, groups, best, eps, scale, cap)  # fmt: skip
        self.least, self.half, self.other = least, 2, other
        nn.init.normal_(self.gate.weight)

    def forward(self, states):
        x = states.reshape(-1, H)
        z = self.gate(x) if not self.other.get("float32") else x.float() @ self.gate.weight.float().T
        z = self.cap * torch.tanh(z / self.cap) if self.cap else z
        scores = {"softmax": lambda: z.softmax(-1), "sigmoid": z.sigmoid, "square": lambda: z * z,
                  "sqrtsoftplus": lambda: nn.functional.softplus(z).sqrt()}[self.score]()  # fmt: skip
        if self.training and self.other.get("noise"):
            scores = scores * torch.rand_like(scores)
        choice = scores + self.correction if self.biased else scores
        if self.groups:
            of = choice.view(-1, self.groups, E // self.groups)
            chosen = of.topk(self.best, -1)[0].sum(-1).topk(self.half)[1]
            choice = of.masked_fill(torch.ones(of.shape[:2]).scatter(1, chosen, 0)[..., None] > 0, -torch.inf).flatten(
                1
            )
        experts = choice.topk(K)[1]
        weights = scores.gather(1, experts)
        if self.other.get("norm", True):
            total = weights.sum(-1, keepdim=True)
            weights = weights / (total.clamp(min=self.least) if self.least else total + self.eps)
        if self.other.get("twice"):
            weights = weights.square()
        return (experts.int(), weights.to(states.dtype) * self.scale)[:: self.other.get("order", 1)]


SAME = [
    {}, {"score": "softmax", "bias": False, "norm": False}, {"score": "sqrtsoftplus", "scale": 2.5, "order": -1},
    {"groups": 4}, {"groups": 4, "best": 1}, {"groups": 8, "bias": False, "score": "softmax"}, {"eps": 1e-6},
    {"eps": 3e-4, "cap": 1.5}, {"score": "softmax", "least": 1e-9}, {"least": 0.7}, {"gate_bias": True},
    {"score": "softmax", "eps": 1e-12}, {"float32": True, "scale": 0.1}, {"noise": False, "norm": False},
]  # fmt: skip


@pytest.mark.parametrize("options", SAME, ids=lambda o: "-".join(f"{k}={v}" for k, v in o.items()) or "plain")
def test_what_is_recognized(options):
    torch.manual_seed(0)
    router, x = Router(**options), torch.randn(2, 40, H)
    d = recognized_parts(router)[1]
    of = dict(d.arguments)
    assert (of["n_group"], d.selection_bias) == (options.get("groups") or 1, "correction" if router.biased else None)
    assert of["group_score"] == "top2_sum" or router.groups == 0 or router.best == 1
    if router.eps:
        assert of["eps"] == router.eps
    assert d.float32 == bool(options.get("float32")) and d.weights == "hidden" and of["scale"] == router.scale
    router.correction.mul_(-1)  # read at each call
    by_kind = dict(zip(d.outputs, router(x)))
    routing = route_block(router, x)
    assert routing.experts.shape == (2, 40, K)
    chosen = (by_kind["experts"], by_kind["weights"]), (routing.experts.view(80, K), routing.weights.view(80, K))
    dense = [torch.zeros(80, E).scatter(1, e.long(), w) for e, w in chosen]
    torch.testing.assert_close(dense[1], dense[0], rtol=2e-6, atol=1e-6)
    replayed = routed(router, x, scale=2 * router.scale).routing  # an argument of the caller has precedence
    torch.testing.assert_close(replayed.weights, 2 * routing.weights, rtol=2e-6, atol=1e-6)


def test_groups_that_rarely_change_the_choice():
    """Experts, groups, groups that are kept and K of routers that were taken for others."""
    models = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    for experts, groups, kept, k in [
        (4, 2, 1, 1), (6, 3, 1, 2), (6, 3, 2, 2), (8, 4, 3, 4), (16, 2, 1, 1), (16, 8, 6, 4), (16, 8, 7, 8),
        (32, 16, 12, 6), (64, 8, 6, 4), (64, 8, 7, 6), (64, 16, 13, 8), (64, 16, 15, 1),
    ]:  # fmt: skip
        config = models.DeepseekV3Config(
            hidden_size=64, n_routed_experts=experts, n_group=groups, topk_group=kept, num_experts_per_tok=k
        )
        router = models.DeepseekV3TopkRouter(config)
        torch.manual_seed(0)
        nn.init.normal_(router.weight, std=0.1)
        x = torch.randn(2000, 64)
        _, _, theirs = router(x)
        assert torch.equal(route_block(router, x).experts.sort()[0], theirs.sort()[0]), (experts, groups, kept, k)


DIFFERENT = [{"score": "square"}, {"noise": True}, {"twice": True}, {"groups": 4, "best": 3}]


@pytest.mark.parametrize("options", DIFFERENT, ids=str)
def test_what_is_refused(options):
    router = Router(**options).train()
    assert recognized_parts(router) is None
    with pytest.raises(TypeError, match=r"block: expected .*got Router"):
        route_block(router, torch.randn(3, H))


class TopK(nn.Module):
    """A softmax router of any size."""

    def __init__(self, experts, k):
        super().__init__()
        self.gate, self.k = nn.Linear(H, experts, bias=False), k

    def forward(self, states):
        weights, experts = self.gate(states.reshape(-1, H)).softmax(-1).topk(self.k)
        return experts, weights


@pytest.mark.parametrize("experts, k", [(MAX_EXPERTS, 2), (MAX_EXPERTS + 1, 2), (64, MAX_K), (64, MAX_K + 1)])
def test_no_more_than_route_takes_is_recognized(experts, k):
    recognized = recognized_parts(TopK(experts, k))
    assert (recognized is not None) == (experts <= MAX_EXPERTS and k <= MAX_K)


def test_settings_that_change_and_modules_that_are_left_alone():
    router, other, calls = Router(groups=4), Router(groups=4), []
    router.register_forward_hook(lambda *_: calls.append(1))
    before, state = {n: t.clone() for n, t in router.state_dict().items()}, torch.get_rng_state()
    first = recognized_parts(router)[1]
    assert recognized_parts(router)[1] is first and recognized_parts(other)[1] is first
    router.groups = 0
    assert dict(recognized_parts(router)[1].arguments)["n_group"] == 1
    router.scale = 3.0
    assert dict(recognized_parts(router)[1].arguments)["scale"] == 3.0
    assert not calls and torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(t, before[n]) for n, t in router.state_dict().items())
    with torch.device("meta"):
        assert dict(recognized_parts(Router(groups=2))[1].arguments)["n_group"] == 1  # both groups are chosen


class Normalized(nn.Module):
    """A router with a helper, an attribute of the class and a configuration, which a subclass or a setting changes."""

    normalized = True

    def __init__(self, config=None):
        super().__init__()
        self.weight, self.config = nn.Parameter(torch.randn(E, H)), config

    def scores(self, z):
        return z.softmax(-1)

    def is_normalized(self):
        return self.normalized if self.config is None else self.config.routing["normalized"]

    def forward(self, hidden_states):
        weights, experts = self.scores(hidden_states @ self.weight.T).topk(K)
        return weights / weights.sum(-1, keepdim=True) if self.is_normalized() else weights, experts


class WithConstant(Normalized):
    normalized = False


class WithHelper(Normalized):
    def scores(self, z):
        return z.sigmoid()


class WithSet(Normalized):
    def is_normalized(self):
        return "normalized" in self.config


def assert_recognized(router):
    x = torch.randn(7, H)
    weights, experts = router(x)
    found = route_block(router, x)
    assert torch.equal(found.experts.sort()[0], experts.sort()[0])
    torch.testing.assert_close(found.weights.sort()[0], weights.sort()[0])


def test_subclasses_and_settings_of_held_objects():
    for cls in (Normalized, WithConstant, WithHelper):
        assert_recognized(cls())
    for normalized in (True, False):
        assert_recognized(Normalized(SimpleNamespace(routing={"normalized": normalized})))
    router = Normalized(SimpleNamespace(routing={"normalized": True}))
    assert_recognized(router)
    router.config.routing["normalized"] = False
    assert_recognized(router)
    WithConstant.normalized = True
    assert_recognized(WithConstant())
    WithConstant.normalized = False


def test_tensors_and_sets_among_the_settings():
    router = Normalized(SimpleNamespace(routing={"normalized": torch.tensor(True)}))
    assert_recognized(router)
    router.config.routing["normalized"].fill_(False)
    assert_recognized(router)
    with torch.inference_mode():
        router.config.routing["normalized"] = torch.tensor(True)
    assert_recognized(router)
    for settings in ({"normalized"}, {"another"}):
        assert_recognized(WithSet(settings))


def test_a_subclass_that_calls_its_base(monkeypatch):
    """Only the method of the class itself is replaced, not that of its base, which is a part of what it computes."""
    replacement = routing_method(Normalized.forward, "forward")

    class Scaled(Normalized):
        def forward(self, hidden_states):
            weights, experts = super().forward(hidden_states)
            return weights * 2, experts

    router, x = Scaled(), torch.randn(9, H)
    expected = router(x)
    monkeypatch.setattr(Normalized, "forward", replacement)
    torch.testing.assert_close(router(x), expected)
    before = Normalized.forward
    monkeypatch.setattr(Normalized, "forward", lambda self, h: tuple(t * 3 for t in before(self, h)))
    router = Normalized()
    weights, experts = before(router, x)
    torch.testing.assert_close(router(x), (weights * 3, experts * 3))


def test_classes_that_torch_makes_of_another():
    router = torch.nn.utils.parametrizations.weight_norm(WithHelper(), "weight")
    assert type(router) is not WithHelper
    assert_recognized(router)


def test_no_generator_of_a_device_is_touched(monkeypatch):
    seeds = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    assert recognized_parts(Router(eps=0.123)) is not None and not seeds


def test_few_descriptions_are_kept(monkeypatch):
    monkeypatch.setattr(recognition, "MOST_KNOWN", 3)
    monkeypatch.setattr(recognition, "_known", {})
    for n in range(5):
        assert recognized_parts(Router(scale=2.0 + n)) is not None
        assert len(recognition._known) <= 3


transformers = pytest.importorskip("transformers")
COMMON = dict(
    vocab_size=64, hidden_size=16, intermediate_size=16, moe_intermediate_size=8, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=2, head_dim=8, num_local_experts=8, num_experts=8, n_routed_experts=8,
    num_experts_per_tok=2, pad_token_id=0, bos_token_id=1, eos_token_id=2, max_position_embeddings=64,
)  # fmt: skip
WHOLE = {
    "GraniteMoe": {}, "HYV3": {"first_k_dense_replace": 0}, "Qwen3Moe": {},
    "Lfm2Moe": {"num_dense_layers": 0, "layer_types": ["conv", "full_attention"]},
}  # fmt: skip


def model_of(name):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**COMMON | WHOLE[name])
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    for name, buffer in model.named_buffers():
        if "bias" in name:
            buffer.data.uniform_()
    return model


@pytest.mark.parametrize("name", WHOLE)
def test_whole_models(name):
    """Loss, router logits and gradients, by way of the hooks with which transformers records them."""
    model, tokens = model_of(name), torch.randint(64, (2, 12))
    outcomes = []
    for _ in range(2):
        out = model(tokens, labels=tokens, output_router_logits=True)
        grads = torch.autograd.grad(
            out.loss, [p for n, p in model.named_parameters() if "gate.weight" in n or "router.weight" in n]
        )
        outcomes.append((out.loss.detach(), out.router_logits, grads))
        if not outcomes[1:]:
            patch = onepass.patch("transformers")
    patch.restore()
    (loss, logits, grads), (of_loss, of_logits, of_grads) = outcomes
    torch.testing.assert_close(of_loss, loss, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(of_logits, logits, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(of_grads, grads, rtol=1e-4, atol=1e-6)
    assert len(grads) == len(logits) > 0 and all(g.abs().max() > 0 for g in grads)


def test_compiled():
    """The router is recognized while it is compiled, without a graph break."""
    torch.compiler.reset()
    module = importlib.import_module("transformers.models.hy_v3.modeling_hy_v3")
    router, x, bias = module.HYV3TopKRouter(transformers.HYV3Config(**COMMON)), torch.randn(9, 16), torch.rand(8)
    nn.init.normal_(router.weight)
    expected = router(x, bias)
    with onepass.patch("transformers"):
        found = torch.compile(router, backend="aot_eager", fullgraph=True)(x, bias)
    for a, b in zip(expected, found):
        torch.testing.assert_close(b.sort()[0], a.sort()[0])
    torch.compiler.reset()


def test_a_setting_that_changes_after_compilation():
    """Torch compiles again, as it does for the router itself."""
    torch.compiler.reset()
    module = importlib.import_module("transformers.models.qwen3_moe.modeling_qwen3_moe")
    router, x = module.Qwen3MoeTopKRouter(transformers.Qwen3MoeConfig(**COMMON)), torch.randn(9, 16)
    nn.init.normal_(router.weight)
    with onepass.patch("transformers"):
        compiled = torch.compile(router, backend="eager", fullgraph=True)
        for router.norm_topk_prob, router.top_k in ((True, 2), (False, 2), (False, 3)):
            for a, b in zip(router(x), compiled(x)):
                torch.testing.assert_close(b, a)
        torch.compiler.reset()
        module = importlib.import_module("transformers.models.hy_v3.modeling_hy_v3")
        router, bias = module.HYV3TopKRouter(transformers.HYV3Config(**COMMON)), torch.rand(8)
        nn.init.normal_(router.weight)
        compiled = torch.compile(router, backend="eager", fullgraph=True)
        factors = [n for n, v in vars(router).items() if type(v) is float]
        assert factors
        for factor in (1.5, 2.5, 3.5):
            setattr(router, factors[0], factor)
            for a, b in zip(router(x, bias), compiled(x, bias)):
                torch.testing.assert_close(b, a)
    torch.compiler.reset()


FIRST_IN_A_TRACE = """
import torch
from transformers.models.mixtral import modeling_mixtral as m
from onepass.moe import route_block
config = m.MixtralConfig(hidden_size=8, num_local_experts=4, num_experts_per_tok=2)
gate = m.MixtralTopKRouter(config).requires_grad_(False)
torch.nn.init.normal_(gate.weight)
x = torch.randn(5, 8)
with torch.no_grad():
    traced = torch.jit.trace(lambda x: route_block(gate, x)[0], x, check_trace=False)
    torch.testing.assert_close(traced(x + 1), route_block(gate, x + 1)[0])
"""


def test_a_router_that_is_first_seen_in_a_trace():
    """Recognition runs a copy of the router, which is not part of what `torch.jit.trace` records."""
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", FIRST_IN_A_TRACE], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
