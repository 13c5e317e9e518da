"""`route_block` against the routers of transformers: experts, weights and gradients of every family."""

import importlib
import math

import pytest
import torch
from packaging.version import Version
from torch import nn
from torch.func import functional_call

from onepass.moe import blocks, route_block

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.6"), reason="the routers are those of transformers from 5.6 on"
)

H, E, K = 32, 16, 4
SMALL = dict(
    hidden_size=H, intermediate_size=8, moe_intermediate_size=8, shared_expert_intermediate_size=8, num_local_experts=E,
    num_experts=E, n_routed_experts=E, moe_num_experts=E, num_experts_per_tok=K, moe_k=K, moe_topk=K,
    n_shared_experts=1,
)  # fmt: skip
GROUPS = dict(n_group=4, topk_group=2, routed_scaling_factor=2.5, norm_topk_prob=True)
# The module of the family, the class of its block, and what its config says: once for each of its branches.
CASES = [
    ("mixtral", "Mixtral", "SparseMoeBlock", {}),
    *(("qwen2_moe", "Qwen2Moe", "SparseMoeBlock", dict(norm_topk_prob=norm)) for norm in (False, True)),
    *(("qwen3_moe", "Qwen3Moe", "SparseMoeBlock", dict(norm_topk_prob=norm)) for norm in (False, True)),
    *(("qwen3_next", "Qwen3Next", "SparseMoeBlock", dict(norm_topk_prob=norm)) for norm in (False, True)),
    *(("olmoe", "Olmoe", "SparseMoeBlock", dict(norm_topk_prob=norm)) for norm in (False, True)),
    ("deepseek_v2", "DeepseekV2", "Moe", dict(topk_method="greedy", routed_scaling_factor=1.5)),
    ("deepseek_v2", "DeepseekV2", "Moe", GROUPS | dict(topk_method="group_limited_greedy")),
    ("deepseek_v3", "DeepseekV3", "MoE", GROUPS),
    ("deepseek_v3", "DeepseekV3", "MoE", GROUPS | dict(norm_topk_prob=False)),
    ("glm4_moe", "Glm4Moe", "MoE", GROUPS),
    ("glm4_moe", "Glm4Moe", "MoE", dict(n_group=1, topk_group=1, routed_scaling_factor=1.0)),
    ("minimax", "MiniMax", "SparseMoeBlock", {}),
    ("minimax_m2", "MiniMaxM2", "SparseMoeBlock", {}),
    ("gpt_oss", "GptOss", "MLP", {}),
    ("ernie4_5_moe", "Ernie4_5_Moe", "SparseMoeBlock", {}),
    ("ernie4_5_moe", "Ernie4_5_Moe", "SparseMoeBlock", dict(moe_norm_min=0.4)),
    ("hunyuan_v1_moe", "HunYuanMoEV1", "Moe", {}),
    ("dots1", "Dots1", "MoE", GROUPS),
]
MIXTRAL, QWEN, DEEPSEEK_V2, DEEPSEEK_V3, MINIMAX_M2, ERNIE, HUNYUAN = (CASES[i] for i in (0, 4, 10, 11, 16, 19, 20))
UNSORTED = ("DeepseekV2", "DeepseekV3", "Glm4Moe", "Dots1", "MiniMaxM2")
CAST = (*UNSORTED, "Ernie4_5_Moe", "HunYuanMoEV1")  # take hidden states of another dtype than the gate's
every_case = pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join([c[0], *(f"{v}" for v in c[3].values())]))


def build(case):
    """A block with random weights and correction biases of both signs."""
    module, name, suffix, options = case
    config = importlib.import_module(f"transformers.models.{module}.configuration_{module}")
    modeling = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    block = getattr(modeling, name + suffix)(getattr(config, name + "Config")(**SMALL | options))
    for name, tensor in [*block.named_parameters(), *block.named_buffers()]:
        tensor.data = torch.empty_like(tensor).normal_(std=0.3 if "bias" in name else 0.2)
    return block


def parts(block):
    """The router, which module of the block has the gate's weight, and that weight's name in the router."""
    name = "router" if hasattr(block, "router") else "gate"
    router = getattr(block, name)
    return (router, f"{name}.wg", "wg.weight") if hasattr(router, "wg") else (router, name, "weight")


def theirs(block, hidden, **parameters):
    """``(logits, weights, experts)`` of transformers."""
    bias = [block.e_score_correction_bias] if hasattr(block, "e_score_correction_bias") else []
    return functional_call(parts(block)[0], parameters, (hidden.flatten(0, -2), *bias))


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def logits_of(monkeypatch):
    """The logits that `route` was given."""
    seen = []

    def spy(*args, **kwargs):
        found = routed_parts(*args, **kwargs)
        seen.append(found.logits)
        return found

    routed_parts = blocks.routed_parts
    monkeypatch.setattr(blocks, "routed_parts", spy)
    return seen


def same(routing, expected):
    assert all(torch.equal(ours, other) for ours, other in zip(routing[:3], expected))


class Lora(nn.Module):
    """What PEFT makes of a gate: two adapters, of which the second has a dropout."""

    lora_variant, use_dora, merged, disable_adapters = {}, {}, False, False
    active_adapters = ("a", "of another layer", "b")

    def __init__(self):
        super().__init__()
        self.scaling = {"a": 0.5, "b": 2.0, "idle": 1e3}
        self.lora_dropout = nn.ModuleDict({"a": nn.Identity(), "b": nn.Dropout(0.5), "idle": nn.Identity()})
        self.lora_A = nn.ModuleDict({name: nn.Linear(H, 2, bias=False) for name in self.scaling})
        self.lora_B = nn.ModuleDict({name: nn.Linear(2, E, bias=False) for name in self.scaling})

    def delta(self):
        return sum(self.scaling[n] * self.lora_B[n].weight @ self.lora_A[n].weight for n in "ab")


def add_lora(block, lora=None):
    module, lora = parts(block)[1], lora or Lora().eval()
    lora.base_layer = block.get_submodule(module)
    block.set_submodule(module, lora)
    return lora


@every_case
@pytest.mark.parametrize("shape", [(2, 9), (13,)], ids=str)
@pytest.mark.parametrize("lora", [False, True], ids=["", "lora"])
def test_equals_transformers(case, shape, lora, device, logits_of):
    T, block = math.prod(shape), build(case).to(device)
    hidden, grad = torch.randn(*shape, H).to(device).requires_grad_(), torch.randn(T, E).to(device)
    router, _, weight = parts(block)
    parameters, leaves = {}, [hidden, router.get_parameter(weight)]
    if lora:
        adapter = Lora().to(device).eval()
        parameters = {weight: leaves[1] + adapter.delta()}
        leaves += [m.weight for n in "ab" for m in (adapter.lora_A[n], adapter.lora_B[n])]
    logits, weights, experts = theirs(block, hidden, **parameters)
    expected = torch.zeros_like(grad).scatter(1, experts, weights)
    expected_grads = torch.autograd.grad((expected * grad).sum(), [logits, *leaves])

    if lora:
        add_lora(block, adapter)
    routing = route_block(block, hidden)
    if case[1] != "MiniMaxM2":  # whose correction bias is the block's
        same(route_block(parts(block)[0], hidden), routing)
    assert routing.weights.shape == routing.experts.shape == (*shape, K)
    found = routing.experts.view(T, K)
    assert torch.equal(found.sort()[0], experts.sort()[0])
    assert case[1] in UNSORTED or torch.equal(found, experts)
    assert torch.equal(routing.counts.long(), experts.flatten().bincount(minlength=E))
    dense = torch.zeros_like(grad).scatter(1, found, routing.weights.view(T, K))
    torch.testing.assert_close(dense, expected, rtol=1e-6, atol=1e-6)
    of_logits, *grads = torch.autograd.grad((dense * grad).sum(), [logits_of[0], *leaves])
    torch.testing.assert_close(of_logits.view(T, E), expected_grads[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(grads, list(expected_grads[1:]), rtol=1e-5, atol=1e-5)  # of sums over tokens


@every_case
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
def test_logits_in_the_precision_of_the_family(case, dtype, autocast, logits_of):
    block = build(case).to(dtype)
    hidden = torch.randn(11, H).to(torch.bfloat16 if autocast or case[1] in CAST else dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected, *_ = theirs(block, hidden)
        routing = route_block(block, hidden)
    torch.testing.assert_close(logits_of[0], expected, rtol=0, atol=0)
    assert routing.weights.dtype == torch.float32


def test_mask_and_losses():
    block = build(MIXTRAL)
    hidden, mask = torch.randn(2, 5, H), torch.rand(2, 5) < 0.5
    routing, expected = route_block(block, hidden, token_mask=mask, losses=True), route_block(block, hidden)
    assert torch.equal(routing.weights, expected.weights * mask.unsqueeze(-1))
    assert routing.counts.sum() == K * mask.sum() and routing.logsumexp.shape == (2, 5)


GROUPED = dict(top_k=K, routed_scaling_factor=2.5, topk_group=2)
EARLIER = [  # as in transformers 4: the gate is a Linear, and the block says the rest. The last is of no known class
    (MIXTRAL, "MixtralSparseMoeBlock", dict(top_k=K)),
    (QWEN, "Qwen3MoeSparseMoeBlock", dict(top_k=K, norm_topk_prob=True)),
    (DEEPSEEK_V2, "DeepseekV2MoE", GROUPED | dict(num_group=4, topk_method="group_limited_greedy")),
    (ERNIE, "Ernie4_5_MoeSparseMoeBlock", dict(top_k=K, moe_statics=None, norm_min=0.4)),
    (DEEPSEEK_V3, "SomeMoE", GROUPED | dict(
        n_group=4, norm_topk_prob=True, scoring_func="sigmoid", e_score_correction_bias=None)),
]  # fmt: skip


@pytest.mark.parametrize("case, name, said", EARLIER, ids=[name for _, name, _ in EARLIER])
def test_other_layouts_and_missing_attributes(case, name, said):
    block, hidden = build(case), torch.randn(7, H)
    router = block.gate
    earlier = type("FSDP" + name, (type(name, (nn.Module,), {}),), {})()  # as FSDP2 renames it
    with pytest.raises(TypeError, match=rf"'gate' or 'router'.*got FSDP{name}"):
        route_block(earlier, hidden)
    earlier.gate = nn.Linear(H, E, bias=False)
    earlier.gate.weight = router.weight
    said = {attribute: getattr(router, attribute) if value is None else value for attribute, value in said.items()}
    for attribute, value in said.items():
        setattr(earlier, attribute, value)
    same(route_block(earlier, hidden), route_block(block, hidden))
    for attribute, value in said.items():
        delattr(earlier, attribute)
        with pytest.raises(TypeError, match=rf"block: expected .*the attribute .*{attribute}.*, got FSDP{name}"):
            route_block(earlier, hidden)
        setattr(earlier, attribute, value)


@pytest.mark.parametrize("case", [QWEN, DEEPSEEK_V3, HUNYUAN], ids=lambda c: c[0])
def test_state_of_the_lora(case, logits_of):
    block, hidden = build(case), torch.randn(4, H)
    lora = add_lora(block)
    base = hidden @ lora.base_layer.weight.T

    def logits():
        route_block(block, hidden)
        return logits_of[-1]

    torch.testing.assert_close(logits(), base + hidden @ lora.delta().T)
    lora.train()  # dropout, of the second alone
    torch.manual_seed(5)
    expected = base
    for name, x in (("a", hidden), ("b", nn.functional.dropout(hidden, 0.5))):
        expected = expected + lora.scaling[name] * lora.lora_B[name](lora.lora_A[name](x))
    torch.manual_seed(5)
    torch.testing.assert_close(logits(), expected)
    lora.merged = True  # into the base weight
    torch.testing.assert_close(logits(), base)
    lora.merged, lora.disable_adapters = False, True
    torch.testing.assert_close(logits(), base)
    lora.disable_adapters, lora.use_dora = False, {"b": True}
    with pytest.raises(TypeError, match="plain LoRA on the gate, got DoRA as adapter 'b'"):
        logits()
    del lora.lora_A
    with pytest.raises(TypeError, match="plain LoRA on the gate's weight, got Lora"):
        logits()


def test_lora_of_a_higher_precision(logits_of):
    """As PEFT: in the adapter's dtype, and the sum in the gate's."""
    block, hidden = build(MIXTRAL).bfloat16(), torch.randn(4, H).bfloat16()
    base = hidden @ block.gate.weight.T
    lora = add_lora(block)
    route_block(block, hidden)
    torch.testing.assert_close(logits_of[0], (base + hidden.float() @ lora.delta().T).bfloat16(), rtol=0, atol=1e-6)


def test_sharded_gate_with_a_plain_lora(sharded):
    block, hidden = build(DEEPSEEK_V3), torch.randn(6, H)
    router, lora = block.gate, add_lora(block)
    expected = route_block(block, hidden)
    router.weight = nn.Parameter(sharded(router.weight))
    routing = route_block(block, hidden)
    same(routing, expected)
    routing.weights[:, 0].sum().backward()
    assert type(router.weight.grad) is type(router.weight.data) and lora.lora_B["a"].weight.grad.abs().max() > 0


@every_case
def test_peft(case):
    peft = pytest.importorskip("peft")
    block, hidden = build(case), torch.randn(6, H)
    base, *_ = theirs(block, hidden)
    name = "mlp." + parts(block)[1]
    if name.endswith("wg"):
        target = dict(target_modules=[name])
    else:
        target = dict(target_modules=[], target_parameters=[f"{name}.weight"])
    config = peft.LoraConfig(r=2, lora_alpha=8, use_rslora=True, init_lora_weights=False, **target)
    peft.inject_adapter_in_model(config, nn.ModuleDict({"mlp": block}))
    logits, weights, experts = theirs(block, hidden)
    assert (logits - base).abs().max() > 0.1
    routing = route_block(block, hidden)
    dense = [torch.zeros(6, E).scatter(1, e, w) for w, e in ((weights, experts), routing[:2])]
    torch.testing.assert_close(dense[1], dense[0], rtol=1e-6, atol=1e-6)


def test_bad_arguments():
    def refused(error, match, block, hidden):
        with pytest.raises(error, match=match):
            route_block(block, hidden)

    block, hidden = build(MIXTRAL), torch.zeros(3, H)
    refused(TypeError, "block: expected a MoE block or router, got 3", 3, hidden)
    refused(ValueError, r"hidden_states: expected shape \(..., 32\).*got \(3, 33\)", block, torch.zeros(3, H + 1))
    refused(TypeError, "hidden_states: expected a floating-point tensor, got torch.int64", block, hidden.long())
    block.gate.weight = nn.Parameter(torch.zeros(E * H // 2, 1, dtype=torch.uint8), requires_grad=False)
    refused(TypeError, "block: expected a floating-point gate.*quantized.*got torch.uint8", block, hidden)
    alone = build(MINIMAX_M2).gate
    refused(
        TypeError, "'e_score_correction_bias', which it passes to its router, got MiniMaxM2TopKRouter", alone, hidden
    )
    block = build(DEEPSEEK_V2)
    block.gate.topk_method = "noaux_tc"
    refused(ValueError, "topk_method: expected one of 'greedy', 'group_limited_greedy', got", block, hidden)
