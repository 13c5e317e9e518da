"""`experts_implementation="onepass"` against transformers' own experts, and with PEFT's adapters on them."""

import importlib
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import transformers
from packaging.version import Version

import onepass
from onepass.integrations import transformers_experts as integration

pytestmark = pytest.mark.skipif(
    Version(transformers.__version__) < Version(integration.SINCE),
    reason=f"supported from transformers {integration.SINCE} on",
)

FAMILIES = {
    "mixtral": "MixtralExperts", "qwen3_moe": "Qwen3MoeExperts", "olmoe": "OlmoeExperts",
    "deepseek_v3": "DeepseekV3Experts", "glm4_moe": "Glm4MoeExperts", "gpt_oss": "GptOssExperts",
    "openai_privacy_filter": "OpenAIPrivacyFilterExperts",
}  # fmt: skip
SMALL = dict(
    hidden_size=24, intermediate_size=20, moe_intermediate_size=20, num_local_experts=6, num_experts=6,
    n_routed_experts=6, num_experts_per_tok=2, num_attention_heads=2, num_key_value_heads=2, head_dim=12,
)  # fmt: skip


def experts_of(family, **options):
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    config = transformers.AutoConfig.for_model(family, **SMALL | options)
    earlier = FAMILIES[family].replace("Experts", "NaiveMoe")
    found = getattr(module, FAMILIES[family] if hasattr(module, FAMILIES[family]) else earlier)(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in found.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.3)
    return found


def run(experts, implementation, hidden, ids, weights, device="cpu"):
    experts.config._experts_implementation = implementation
    leaves = hidden.detach().to(device).requires_grad_(), weights.detach().to(device).requires_grad_()
    out = experts(leaves[0], ids.to(device), leaves[1])
    wanted = [*leaves, *[p for p in experts.parameters() if p.requires_grad]]
    return [
        out,
        *torch.autograd.grad(
            out, wanted, torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape).to(out)
        ),
    ]


@pytest.fixture(autouse=True)
def registered():
    integration.register()


@pytest.fixture
def routed():
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(33, 24, generator=generator)
    ids = torch.rand(33, 6, generator=generator).argsort(-1)[:, :2]
    return hidden, ids, torch.rand(33, 2, generator=generator)


@pytest.mark.parametrize("family", FAMILIES)
def test_as_the_eager_experts(device, family, routed):
    experts = experts_of(family)
    expected = run(experts, "eager", *routed)
    got = run(experts.to(device), "onepass", *routed, device)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-5, atol=1e-5 * b.abs().max().item())


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_options_that_an_earlier_version_does_not_set(family, routed):
    """``has_post_expert_norm`` is an attribute of experts from transformers 5.20 on."""
    experts = experts_of(family)
    expected = run(experts, "eager", *routed)
    for name, default in integration.DEFAULTS.items():
        if getattr(experts, name, default) == default:
            experts.__dict__.pop(name, None)
    assert not hasattr(experts, "has_post_expert_norm")
    for a, b in zip(run(experts, "onepass", *routed), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * b.abs().max().item())


@pytest.mark.parametrize("how", ["from_config", "set_experts_implementation"])
def test_a_model_is_set_to_it(how, monkeypatch):
    calls, expert_mlp = [], integration.expert_mlp
    monkeypatch.setattr(integration, "expert_mlp", lambda *a, **k: calls.append(a) or expert_mlp(*a, **k))
    config = transformers.AutoConfig.for_model("mixtral", **SMALL, vocab_size=31, num_hidden_layers=2)
    tokens = torch.arange(14).view(2, 7)
    theirs = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    expected = theirs(tokens).logits
    assert not calls
    if how == "from_config":
        ours = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="onepass")
        ours.load_state_dict(theirs.state_dict())
    else:
        ours = theirs
        ours.set_experts_implementation("onepass")
    torch.testing.assert_close(ours(tokens).logits, expected)
    assert len(calls) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_no_further_from_float64_than_grouped_mm(family):
    generator = torch.Generator().manual_seed(1)
    hidden, scores = torch.randn(500, 256, generator=generator), torch.rand(500, 6, generator=generator)
    weights, ids = scores.topk(2)
    sizes = dict(hidden_size=256, intermediate_size=192, moe_intermediate_size=192)
    experts = experts_of(family, **sizes).bfloat16()
    rounded = experts_of(family, **sizes)
    rounded.load_state_dict(experts.state_dict())
    exact = run(rounded.double(), "eager", hidden.bfloat16().double(), ids, weights.double())
    error = {}
    for implementation in ("grouped_mm", "onepass"):
        found = run(experts.cuda(), implementation, hidden.bfloat16(), ids, weights, "cuda")
        error[implementation] = [(a.cpu().double() - b).norm() / b.norm() for a, b in zip(found, exact, strict=True)]
    for ours, theirs in zip(error["onepass"], error["grouped_mm"], strict=True):
        assert ours <= 1.02 * theirs and ours < 5e-2, error  # gpt-oss: gradients jump at its limit


@pytest.mark.parametrize("act, name", [("gelu", "gelu"), ("gelu_pytorch_tanh", "gelu_tanh"), ("silu", "silu")])
def test_which_activation_it_is(act, name):
    assert integration.gate_of(experts_of("mixtral", hidden_act=act)) == (name, False, 1.702, 7.0)


@pytest.mark.parametrize("family, name, value", [("gpt_oss", "limit", 0.3), ("gpt_oss", "alpha", 0.1),
                                                 ("mixtral", "act_fn", torch.nn.GELU())])  # fmt: skip
def test_a_setting_that_changes(family, name, value, routed):
    experts = experts_of(family)
    before = run(experts, "onepass", *routed)[0]
    setattr(experts, name, value)
    ours, theirs = run(experts, "onepass", *routed)[0], run(experts, "eager", *routed)[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert (ours - before).abs().max() > 1e-3


def test_an_unknown_gate_is_an_error(routed):
    experts = experts_of("mixtral", hidden_act="relu")
    with pytest.raises(NotImplementedError, match=r"MixtralExperts\._apply_gate is none of silu"):
        run(experts, "onepass", *routed)


def test_a_limit_beyond_ordinary_numbers_is_an_error(routed):
    experts = experts_of("mixtral")
    own = type(experts)._apply_gate
    limited = lambda self, x: own(self, x.clamp(-30, 30))  # noqa: E731
    experts.__class__ = type("LimitedExperts", (type(experts),), {"_apply_gate": limited})
    with pytest.raises(NotImplementedError, match=r"LimitedExperts\._apply_gate is none of silu"):
        run(experts, "onepass", *routed)


@pytest.mark.pairs
@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize("parameters", [["gate_up_proj", "down_proj"], ["down_proj"]], ids="+".join)
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_adapters_of_peft(device, family, parameters, patched, routed, monkeypatch):
    """What the experts get is the base weight and the factors; under the patch, nobody multiplies them out.

    Before 0.21 PEFT has no factors to give: it multiplies them out, patched or not.
    """
    peft = pytest.importorskip("peft")
    factors = Version(peft.__version__) >= Version("0.21")
    found, adapted, weight_of = [], [], integration.weight_of

    def spy(*arguments):
        weight, adapter = weight_of(*arguments)
        adapted.append(adapter is not None)
        return weight, adapter

    monkeypatch.setattr(integration, "weight_of", spy)
    for implementation, where in (("eager", "cpu"), ("onepass", device)):
        block = torch.nn.ModuleDict({"experts": experts_of(family)})
        config = peft.LoraConfig(
            r=3, lora_alpha=6, init_lora_weights=False, target_modules=[],
            target_parameters=[f"experts.{name}" for name in parameters],
        )  # fmt: skip
        torch.manual_seed(0)
        peft.inject_adapter_in_model(config, block)
        experts = block["experts"].to(where)
        innermost = experts
        while hasattr(innermost, "base_layer"):
            innermost = innermost.base_layer
        innermost.config._experts_implementation = implementation
        hidden, weights = (t.detach().to(where).requires_grad_() for t in routed[::2])
        adapted.clear()
        with onepass.patch("transformers") if patched else nullcontext(), monkeypatch.context() as m:
            if patched and factors and implementation == "onepass":
                m.setattr(torch.nn.utils.parametrize, "register_parametrization", pytest.fail)
            out = experts(hidden, routed[1].to(where), weights)
        expected = [factors and "gate_up_proj" in parameters, factors] if implementation == "onepass" else []
        assert adapted == expected
        wanted = {n: p for n, p in experts.named_parameters() if "lora" in n}
        assert len(wanted) == 2 * len(parameters)
        grads = torch.autograd.grad(out, [hidden, weights, *wanted.values()], torch.ones_like(out))
        found.append([out, *grads])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(b.cpu(), a, rtol=1e-5, atol=1e-5 * a.abs().max().item())


@pytest.fixture
def to_compile(monkeypatch):
    """Makes experts that onepass runs on a CPU, for tests of `torch.compile`; `ARGUMENTS` are those of a call."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    torch.compiler.reset()

    def made(family="qwen3_moe"):
        experts = experts_of(family)
        experts.config._experts_implementation = "onepass"
        return experts

    yield made
    torch.compiler.reset()


ARGUMENTS = torch.randn(5, 24), torch.tensor([[0, 1]] * 5), torch.rand(5, 2)


@pytest.mark.parametrize("unloads", [False, True])
def test_adapters_are_not_merged_into_a_part_of_the_experts(unloads):
    """PEFT would add the product for all experts to those of this process."""
    peft = pytest.importorskip("peft", "0.21")
    block = torch.nn.ModuleDict({"experts": experts_of("qwen3_moe")})
    config = peft.LoraConfig(r=3, init_lora_weights=False, target_modules=[],
                             target_parameters=["experts.gate_up_proj"])  # fmt: skip
    model = peft.PeftModel(block, config)
    experts = next(m for m in model.modules() if type(m).__name__ == "Qwen3MoeExperts")
    before = experts.gate_up_proj.detach().clone()
    with onepass.patch("transformers"):
        experts._is_expert_parallel = True  # as transformers' expert parallelism says
        with pytest.raises(NotImplementedError, match="gate_up_proj: expected a weight that is whole on every process"):
            model.merge_and_unload() if unloads else model.merge_adapter()
        assert torch.equal(experts.gate_up_proj, before)
        del experts._is_expert_parallel
        model.merge_adapter()
        assert not torch.equal(experts.gate_up_proj, before)


@pytest.mark.parametrize("before", [True, False])
def test_a_limit_that_changes(before, to_compile):
    """Before experts that have run are compiled, and after that."""
    experts = to_compile("gpt_oss")
    compiled = torch.compile(experts, backend="eager", fullgraph=True)
    (experts if before else compiled)(*ARGUMENTS)
    for experts.limit in (0.3, 0.1):
        experts.config._experts_implementation = "eager"
        expected = experts(*ARGUMENTS)
        experts.config._experts_implementation = "onepass"
        torch.testing.assert_close(compiled(*ARGUMENTS), expected)


def test_layers_that_have_run_share_a_graph(to_compile):
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    for layer in [to_compile("gpt_oss") for _ in range(10)]:
        expected = layer(*ARGUMENTS)
        found = torch.compile(layer, backend=counter, fullgraph=True)(*ARGUMENTS)
        torch.testing.assert_close(found, expected)
    assert counter.frame_count == 1


class Function(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


@pytest.mark.parametrize("first", ["compiled", "eager"])
@pytest.mark.parametrize(
    "activations",
    [
        (torch.nn.GELU(), torch.nn.GELU("tanh")),
        (Function(torch.nn.functional.silu), Function(torch.nn.functional.gelu)),
    ],
    ids=["option", "attribute"],
)
def test_another_activation_of_the_same_class(to_compile, activations, first):
    experts = to_compile()
    compiled = torch.compile(experts, backend="eager", fullgraph=True)
    experts.act_fn = activations[0]
    (compiled if first == "compiled" else experts)(*ARGUMENTS)
    experts.act_fn = activations[1]
    found = compiled(*ARGUMENTS)
    torch.testing.assert_close(found, experts(*ARGUMENTS))
    experts.config._experts_implementation = "eager"
    torch.testing.assert_close(found, experts(*ARGUMENTS))


class Mixed(torch.nn.Module):
    """SiLU or GELU, by the value of a buffer."""

    def __init__(self, share):
        super().__init__()
        self.register_buffer("share", torch.tensor(share))

    def forward(self, x):
        return self.share * torch.nn.functional.silu(x) + (1 - self.share) * torch.nn.functional.gelu(x)


@pytest.mark.parametrize("compiled", [False, True])
def test_an_activation_with_tensors_is_an_error(to_compile, compiled):
    """Which activation it is could change with their values, and they could need gradients."""
    experts = to_compile()
    experts.act_fn = Mixed(1.0)
    call = torch.compile(experts, backend="eager") if compiled else experts
    with pytest.raises(Exception, match="_apply_gate uses parameters, buffers or tensors that"):
        call(*ARGUMENTS)


ACTIVATION = torch.nn.functional.silu  # of one of the classes below


def gelu_gate(x, dim):
    gate, up = x.chunk(2, dim)
    return torch.nn.functional.gelu(gate) * up


def derived(kind, way):
    """A subclass of experts whose ``_apply_gate`` does not name the activation in its own code."""

    class Derived(kind):
        @property
        def activation(self):
            return self.act_fn

        def activated(self, gate, up):
            return self.act_fn(gate) * up

        def _apply_gate(self, gate_up):
            gate, up = gate_up.chunk(2, dim=-1)
            if way == "super":
                return super()._apply_gate(gate_up)
            if way == "a method":
                return self.activated(gate, up)
            if way == "a property":
                return self.activation(gate) * up
            if way == "a global":
                return ACTIVATION(gate) * up
            return (lambda x: self.act_fn(x) * up)(gate)

    return Derived


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("way", ["super", "a method", "a property", "a global", "a function inside", "of the object"])
def test_another_activation_that_the_gate_reaches_by(to_compile, monkeypatch, way, compiled):
    experts = to_compile()
    if way != "of the object":
        experts.__class__ = derived(type(experts), way)
    call = torch.compile(experts, backend="eager") if compiled else experts
    before = call(*ARGUMENTS)
    if way == "a global":
        monkeypatch.setitem(globals(), "ACTIVATION", torch.nn.functional.gelu)
    elif way == "of the object":
        experts._apply_gate = partial(gelu_gate, dim=-1)
    else:
        experts.act_fn = torch.nn.GELU()
    found = call(*ARGUMENTS)
    experts.config._experts_implementation = "batched_mm"  # "eager" calls no `_apply_gate`
    torch.testing.assert_close(found, experts(*ARGUMENTS))
    assert (found - before).abs().max() > 1e-3


@pytest.mark.parametrize("change", ["another alpha", "one that is trained"])
def test_parameters_of_a_gate_that_does_not_fit_them(change):
    """Numbers that its code has, and not the attribute; a tensor whose gradient would be lost."""
    experts = experts_of("gpt_oss")
    arguments = torch.randn(5, 24), torch.randint(6, (5, 2)), torch.rand(5, 2)
    if change == "another alpha":
        experts._apply_gate = lambda x: (
            (x[..., 1::2].clamp(-7, 7) + 1) * x[..., ::2].clamp(max=7) * torch.sigmoid(1.702 * x[..., ::2].clamp(max=7))
        )
    experts.config._experts_implementation = "onepass"
    experts(*arguments)
    experts.alpha = 2.5 if change == "another alpha" else torch.tensor(1.702, requires_grad=True)
    with pytest.raises(NotImplementedError, match=r"_apply_gate (is none of|uses parameters, buffers or tensors)"):
        experts(*arguments)


class Observed(torch.nn.Module):
    def forward(self, x):
        x.abs().amax()
        return torch.nn.functional.silu(x)


def test_an_activation_that_needs_rows(to_compile):
    experts = to_compile()
    experts.act_fn = Observed()
    expected = experts(*ARGUMENTS)
    torch.testing.assert_close(torch.compile(experts, backend="eager", fullgraph=True)(*ARGUMENTS), expected)


@pytest.mark.parametrize("has_run", [False, True])
def test_a_graph_break_after_experts(monkeypatch, to_compile, has_run):
    """Torch traces once more what precedes the break, also of a class of which no module has run before."""
    from onepass.integrations.transformers_experts import METHOD

    experts = to_compile()
    if has_run:
        experts(*ARGUMENTS)
    elif hasattr(type(experts), METHOD):
        monkeypatch.delattr(type(experts), METHOD)

    def call(*arguments):
        found = experts(*arguments)
        torch._dynamo.graph_break()
        return found + 1

    found = torch.compile(call, backend="eager")(*ARGUMENTS)
    torch.testing.assert_close(found, experts(*ARGUMENTS) + 1)


def test_an_activation_that_changes_before_compilation(to_compile):
    experts = to_compile()
    experts(*ARGUMENTS)
    experts.act_fn = torch.nn.GELU(approximate="tanh")
    expected = experts(*ARGUMENTS)
    experts.act_fn = torch.nn.SiLU()
    experts(*ARGUMENTS)
    experts.act_fn = torch.nn.GELU(approximate="tanh")
    found = torch.compile(experts, backend="eager", fullgraph=True)(*ARGUMENTS)
    torch.testing.assert_close(found, expected)
