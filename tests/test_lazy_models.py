"""`onepass.attach` on models of transformers: the loss and the gradients of the model as it is, and no logits.

Every architecture is tested small, with random weights and on the CPU.
"""

import contextlib
import copy
import inspect
import math
import pickle
import threading
import warnings
from collections import Counter
from functools import partial
from importlib import import_module
from types import MethodType

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map

import onepass

transformers = pytest.importorskip("transformers")
lazy_models = import_module("lazy_models")

CHUNKS = 8
VOCAB = lazy_models.VOCAB
TOLERANCE = 1e-6  # of the loss, and of the largest gradient


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    """As a user's CPU has it."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def warned(caught):
    return [str(w.message) for w in caught if issubclass(w.category, onepass.MaterializedLogits)]


def both(model, given, attach=onepass.attach, theirs=None):
    """`lazy_models.step` of the attached model, that of the model as it is, and the warnings of the former."""
    theirs = theirs or lazy_models.step(model, given)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with attach(model):
            ours = lazy_models.step(model, given)
    return ours, theirs, warned(caught)


def difference(ours, theirs):
    """Of the losses, relative, and of the gradients, relative to the largest one of the model."""
    (out, gradients), (expected, of_expected) = ours, theirs
    assert gradients.keys() == of_expected.keys()
    largest = max(g.abs().max() for g in of_expected.values())
    of_loss = (out.loss - expected.loss).abs() / expected.loss.abs()
    return max(of_loss, *[(g - of_expected[n]).abs().max() / largest for n, g in gradients.items()]).item()


def assert_same(ours, theirs, tolerance=TOLERANCE):
    assert difference(ours, theirs) <= tolerance


def is_lazy(out):
    return isinstance(out.logits, onepass.LinearLogits) and out.logits.tensor is None


def state(model):
    return {name: {k: id(v) for k, v in m.__dict__.items()} for name, m in model.named_modules()}


def made(kind, name, **changes):
    """A small model; ``changes`` are made to its configuration."""
    cls = getattr(transformers, name)
    config = transformers.AutoConfig.for_model(kind)
    lazy_models.shrink(config)
    for key, value in changes.items():
        setattr(config, key, value)
    torch.manual_seed(0)
    return cls(config).float().eval()


def llama(**changes):
    return made("llama", "LlamaForCausalLM", **changes)


def outcome(kind, name):
    """``(what became of this architecture, why)``: "lazy", "warning", "tensor", "wrong" or "not built"."""
    try:
        model, given, *theirs = lazy_models.first_step(kind, name)
    except Exception as error:  # of transformers: this model cannot be built small, or needs other inputs
        return "not built", type(error).__name__
    before = {n: set(m.__dict__) for n, m in model.named_modules()}
    ours, _, messages = both(model, given, theirs=theirs)
    found = difference(ours, theirs)
    if found > TOLERANCE:  # without the rounding of the model itself, which is larger
        found = difference(*both(model.double(), given)[:2])
    if found > TOLERANCE or before != {n: set(m.__dict__) for n, m in model.named_modules()}:
        return "wrong", found
    reasons = messages or [h.reason for h in onepass.attach(model).heads if h.reason]
    if not reasons and is_lazy(ours[0]):
        return "lazy", ""
    return "warning" if messages else "tensor", reasons


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("chunk", [0, 1, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in range(2, CHUNKS))])
def test_every_architecture(chunk):
    """Every small model that trains as it is also trains attached, with the same numbers; nearly all without logits."""
    found = {name: outcome(kind, name) for kind, name in lazy_models.names()[chunk::CHUNKS]}
    built = {name: of for name, of in found.items() if of[0] != "not built"}
    other = {name: of for name, of in built.items() if of[0] != "lazy"}
    assert all(of[0] != "wrong" for of in other.values()), other
    assert len(built) - len(other) >= 20
    assert len(other) <= max(1, 0.05 * len(built)), other


# Models that do something with their logits.


CASES = {
    "soft-cap": lambda: made("gemma2", "Gemma2ForCausalLM", final_logit_softcapping=0.5),
    "scale": lambda: made("cohere", "CohereForCausalLM", logit_scale=0.25),
    "scale by division": lambda: made("granite", "GraniteForCausalLM", logits_scaling=3.0),
    "encoder and decoder": lambda: made("t5", "T5ForConditionalGeneration"),
    "encoder and decoder, tied and scaled": lambda: made("t5", "T5ForConditionalGeneration", tie_word_embeddings=True),
    "bias": lambda: with_bias(made("bart", "BartForConditionalGeneration")),
    "bias of the head": lambda: with_bias(made("phi", "PhiForCausalLM")),
    "tied embeddings": lambda: llama(tie_word_embeddings=True),
    "own embeddings": lambda: llama(tie_word_embeddings=False),
}


def with_bias(model):
    """A bias that is not 0."""
    for name, tensor in [*model.named_buffers(), *model.named_parameters()]:
        if name in ("final_logits_bias", "lm_head.bias"):
            torch.nn.init.normal_(tensor)
            return model
    raise AssertionError("no bias")


@pytest.mark.parametrize("name", CASES)
def test_what_models_do(name):
    model = CASES[name]()
    given = lazy_models.inputs(model)
    ours, theirs, messages = both(model, given)
    assert_same(ours, theirs)
    assert is_lazy(ours[0]) and not messages
    torch.testing.assert_close(ours[0].logits.materialize(), theirs[0].logits, rtol=1e-5, atol=1e-5)
    with onepass.patch("transformers"):
        patched = lazy_models.step(model, given)
    assert is_lazy(patched[0])
    assert_same(patched, theirs)


class Unknown(transformers.LlamaForCausalLM):
    """A model whose logits are changed in a way that onepass does not know: it forbids some tokens."""

    def forward(self, input_ids=None, labels=None, **kwargs):
        hidden = self.model(input_ids=input_ids, **kwargs).last_hidden_state
        logits = self.lm_head(hidden).float()
        logits[..., 5:9] = -50.0
        logits = logits.masked_fill(input_ids[..., None] == 7, -1.0) - logits.mean(-1, keepdim=True)
        loss = None if labels is None else self.loss_function(logits, labels, vocab_size=self.config.vocab_size)
        return transformers.modeling_outputs.CausalLMOutputWithPast(loss=loss, logits=logits)


@pytest.mark.parametrize("attach", [onepass.attach, lambda _: onepass.patch("transformers")], ids=["attach", "patch"])
def test_unknown_operation(attach):
    config = llama().config
    model = Unknown(config).eval()
    ours, theirs, messages = both(model, lazy_models.inputs(model), attach)
    assert_same(ours, theirs)
    assert len(messages) == 1
    assert messages[0].startswith(f"onepass: __setitem__ computes all logits, (2, {lazy_models.TOKENS}, {VOCAB})")
    assert type(ours[0].logits) is torch.Tensor
    torch.testing.assert_close(ours[0].logits, theirs[0].logits)


def test_head_that_is_no_linear_layer():
    """The report gives the reason, and the model is as it was."""

    class Head(nn.Linear):
        def forward(self, hidden):
            return super().forward(hidden) * 2

    model = llama(tie_word_embeddings=False)
    model.lm_head = Head(model.config.hidden_size, VOCAB, bias=False)
    ours, theirs, messages = both(model, lazy_models.inputs(model))
    assert type(ours[0].logits) is torch.Tensor and not messages
    assert difference(ours, theirs) == 0
    with onepass.attach(model) as attached:
        assert str(attached) == "lm_head (Head): materialized logits, Head has a forward of its own"
        assert repr(attached) == "<Attached: 0 of 1 heads without logits>"
    model.lm_head = nn.Sequential(nn.Linear(model.config.hidden_size, VOCAB))
    with onepass.attach(model) as attached:
        reason = "torch.nn.modules.container.Sequential is not torch.nn.Linear"
        assert str(attached) == f"lm_head (Sequential): materialized logits, {reason}"
    assert str(onepass.attach(nn.Linear(2, 3))) == "no output embeddings"
    with pytest.raises(TypeError, match=r"model: expected a torch.nn.Module, got"):
        onepass.attach(model.forward)


@pytest.mark.parametrize("kind", ["hook", "pre_hook"])
@pytest.mark.parametrize("adapted", [False, True], ids=["", "LoRA"])
@pytest.mark.parametrize("attach", [onepass.attach, lambda _: onepass.patch("transformers")], ids=["attach", "patch"])
def test_head_with_backward_hooks(attach, adapted, kind):
    """They see, and may change, the gradient of the logits, which are a tensor until the hooks are removed."""
    model = llama(tie_word_embeddings=False)
    if adapted:
        peft = pytest.importorskip("peft")
        config = peft.LoraConfig(r=2, target_modules=["lm_head", "q_proj"], init_lora_weights=False)
        model = peft.get_peft_model(model, config)
    head = model.get_output_embeddings()
    calls = []
    hook = getattr(getattr(head, "base_layer", head), f"register_full_backward_{kind}")(
        lambda _, *gradients: calls.append(gradients[-1][0].shape) or (gradients[0][0] * 2,)
    )
    ours, theirs, messages = both(model, lazy_models.inputs(model), attach)
    assert len(calls) == 2 and calls[0] == calls[1] and not messages
    assert difference(ours, theirs) < TOLERANCE and type(ours[0].logits) is torch.Tensor
    hook.remove()
    ours, theirs, _ = both(model, lazy_models.inputs(model), attach)
    assert isinstance(ours[0].logits, onepass.LinearLogits) and difference(ours, theirs) < TOLERANCE


@pytest.mark.parametrize("kind", ["forward_hook", "forward_pre_hook", "full_backward_hook"])
@pytest.mark.parametrize("part", ["base_layer", "lora_A.default", "lora_B.default"])
def test_adapted_head_with_hooks_on_its_parts(part, kind):
    """The parts of an adapted head are not called where its logits are lazy."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["lm_head", "q_proj"], init_lora_weights=False)
    model = peft.get_peft_model(llama(tie_word_embeddings=False), config)
    calls = []
    hooked = model.get_output_embeddings().get_submodule(part)
    hook = getattr(hooked, f"register_{kind}")(lambda *_: calls.append(0))
    ours, theirs, messages = both(model, lazy_models.inputs(model), onepass.attach)
    assert len(calls) == 2 and not messages and type(ours[0].logits) is torch.Tensor
    assert difference(ours, theirs) < TOLERANCE
    hook.remove()
    ours, *_ = both(model, lazy_models.inputs(model), onepass.attach)
    assert isinstance(ours[0].logits, onepass.LinearLogits)


def test_head_with_a_spectral_norm():
    """Each read of its weight is a power iteration, so that more reads than the model's own would change the loss."""
    models = [llama(tie_word_embeddings=False) for _ in range(2)]
    for model in models:
        torch.manual_seed(0)
        nn.utils.parametrizations.spectral_norm(model.train().lm_head)
    attached = onepass.attach(models[1])
    assert str(attached) == "lm_head (ParametrizedLinear): materialized logits, its weight is parametrized"
    expected, found = [model(**lazy_models.inputs(model)).loss for model in models]
    assert torch.equal(found, expected)


# When logits are lazy.


@pytest.mark.parametrize("attach", [onepass.attach, lambda _: onepass.patch("transformers")], ids=["attach", "patch"])
def test_tensors_where_nothing_trains(attach):
    """Evaluation, generation and forwards without labels return tensors."""
    model = llama()
    given = lazy_models.inputs(model)
    ids = given["input_ids"]
    logits, loss = model(ids).logits, model(**given).loss
    text = model.generate(ids, max_new_tokens=4, do_sample=False)
    with attach(model):
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                out = model(**given)
            assert type(out.logits) is torch.Tensor
            torch.testing.assert_close((out.loss, out.logits), (loss.detach(), logits.detach()))
        out = model(ids)
        assert type(out.logits) is torch.Tensor and out.logits.requires_grad and out.loss is None
        assert model.generate(ids, max_new_tokens=4, do_sample=False).equal(text)
        assert is_lazy(model(**given))
        assert is_lazy(model(ids, labels=ids)) and is_lazy(model(ids, None, None, None, None, ids))
        assert type(model.lm_head(torch.zeros(1, 32, requires_grad=True))) is torch.Tensor
    assert type(model(**given).logits) is torch.Tensor


def test_a_failed_forward():
    """The head is as before once a forward has failed."""
    model = llama()
    before = dict(model.lm_head.__dict__)
    given = lazy_models.inputs(model)
    with onepass.attach(model), onepass.patch("transformers"):
        with pytest.raises(RuntimeError):
            model(given["input_ids"], labels=given["labels"], attention_mask=torch.ones(3, 5, 7, 9))
        assert model.lm_head.__dict__ == before
        assert is_lazy(model(**given))


def test_restored():
    """Modules are as before, whether a forward had been replaced on the instance or not."""
    for replaced in (False, True):
        model = llama()
        if replaced:
            model.forward = partial(type(model).forward, model)
        before = state(model)
        attached = onepass.attach(model)
        assert state(model) != before
        during = state(model)
        assert is_lazy(model(**lazy_models.inputs(model)))
        assert state(model) == during
        attached.restore()
        assert state(model) == before
        attached.restore()
        assert state(model) == before


def test_unwrapped_by_accelerate():
    """Accelerate removes the functions around a forward that have a `__wrapped__`, and must not remove ours."""
    from accelerate.utils import extract_model_from_parallel
    from accelerate.utils.operations import convert_outputs_to_fp32

    model = llama()
    with onepass.attach(model):
        model._original_forward = model.forward
        model.forward = MethodType(convert_outputs_to_fp32(model.forward.__func__), model)
        extract_model_from_parallel(model, keep_fp32_wrapper=False)
        assert is_lazy(model(**lazy_models.inputs(model)))


def test_signature():
    """Trainers inspect it for the columns of their data."""
    model = llama()
    before = inspect.signature(model.forward)
    with onepass.attach(model):
        assert inspect.signature(model.forward) == before


def test_nested():
    """A second attachment is an error; the patch beside it changes nothing."""
    model = llama()
    given = lazy_models.inputs(model)
    theirs, before = lazy_models.step(model, given), state(model)
    outer = onepass.attach(model)
    with pytest.raises(ValueError, match=r"^model: expected a model that is not attached"):
        onepass.attach(nn.Sequential(model))
    with onepass.patch("transformers"):
        ours = lazy_models.step(model, given)
        assert is_lazy(ours[0])
        assert_same(ours, theirs)
    outer.restore()
    assert state(model) == before
    with onepass.patch("transformers"), onepass.patch("transformers"), onepass.attach(model):
        ours = lazy_models.step(model, given)
        assert is_lazy(ours[0])
    assert_same(ours, theirs)
    assert state(model) == before and type(model(**given).logits) is torch.Tensor


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies(copied):
    """A copy of an attached model trains its own parameters."""
    model = llama()
    given = lazy_models.inputs(model)
    theirs = lazy_models.step(model, given)
    model.zero_grad()
    with onepass.attach(model):
        other = copied(model)
    ours = lazy_models.step(other, given)
    assert_same(ours, theirs)
    assert all(p.grad is None for p in model.parameters())
    assert type(model(**given).logits) is torch.Tensor


# How models are trained.


@pytest.mark.parametrize("attach", [onepass.attach, lambda _: onepass.patch("transformers")], ids=["attach", "patch"])
@pytest.mark.parametrize("of", ["plain", "modules_to_save", "head", "head among others", "a tied copy"])
def test_lora(of, attach):
    peft = pytest.importorskip("peft")
    if of == "a tied copy" and "ensure_weight_tying" not in peft.LoraConfig.__dataclass_fields__:
        pytest.skip("needs a PEFT that ties copies")
    options = {
        "plain": {"target_modules": ["q_proj", "v_proj"]},
        "modules_to_save": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        "head": {"target_modules": ["lm_head"]},
        "head among others": {"target_modules": ["q_proj", "lm_head"]},
        "a tied copy": {
            "target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True,
        },
    }[of]  # fmt: skip
    model = llama(tie_word_embeddings=of == "a tied copy")
    given = lazy_models.inputs(model)
    torch.manual_seed(0)
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, init_lora_weights=False, lora_dropout=0.0, **options))
    model.eval()
    before = state(model)
    ours, theirs, messages = both(model, given, attach)
    assert_same(ours, theirs)
    assert not messages and state(model) == before
    assert is_lazy(ours[0])
    report = str(onepass.attach(model))
    assert report.endswith("(Linear): no logits") and "\n" not in report.replace("original_module", "")


def test_transforms_of_functions():
    """`torch.func` knows tensors only, which the head then returns."""
    model = llama(tie_word_embeddings=False).eval()
    given = lazy_models.inputs(model)
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters):
        return torch.func.functional_call(model, parameters, (), given).loss

    expected = torch.func.grad(loss)(parameters)
    with onepass.attach(model):
        torch.testing.assert_close(torch.func.grad(loss)(parameters), expected)
        assert isinstance(model(**given).logits, onepass.LinearLogits)


NOT_PLAIN = {
    "dropout": "has dropout", "DoRA": "DoraLinearVariant, not plain LoRA", "a bias": "has a bias",
    "several": "several active adapters: default, second", "disabled": "", "merged": "",
}  # fmt: skip


@pytest.mark.parametrize("why", NOT_PLAIN)
def test_lora_that_is_not_plain(why):
    """The logits of some are materialized, with the reason; without an adapter in effect the base layer is lazy."""
    peft = pytest.importorskip("peft")
    options = {"dropout": {"lora_dropout": 0.5}, "DoRA": {"use_dora": True}, "a bias": {"lora_bias": True}}
    config = peft.LoraConfig(
        r=2, init_lora_weights=False, target_modules=["lm_head"], **({"lora_dropout": 0.0} | options.get(why, {}))
    )
    base = llama(tie_word_embeddings=False)
    if why == "a bias":
        base.lm_head = torch.nn.Linear(base.lm_head.in_features, base.lm_head.out_features)
    given = lazy_models.inputs(base)
    torch.manual_seed(0)
    model = peft.get_peft_model(base, config)
    head = base.get_output_embeddings()
    if why == "several":
        model.add_adapter("second", config)
        model.base_model.set_adapter(["default", "second"])
    if why == "merged":
        model.merge_adapter()
    if why == "disabled":
        model.base_model.disable_adapter_layers()
    base_is_lazy = why in ("disabled", "merged")
    head.base_layer.weight.requires_grad_(base_is_lazy)
    torch.manual_seed(1)
    ours, theirs, messages = both(model, given, onepass.attach)
    if why != "dropout":  # which draws other numbers
        assert_same(ours, theirs)
    assert not messages and is_lazy(ours[0]) == base_is_lazy
    with onepass.attach(model) as attached:
        assert str(attached).endswith("no logits" if base_is_lazy else NOT_PLAIN[why])


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant):
    model = llama().train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    ours, theirs, messages = both(model, lazy_models.inputs(model))
    assert is_lazy(ours[0]) and not messages
    assert_same(ours, theirs)


@pytest.mark.filterwarnings("ignore::UserWarning:torch._dynamo")
@pytest.mark.parametrize("by", [pytest.param("attach", marks=pytest.mark.exhaustive), "patch"])
def test_compiled(by):
    """The body of the model is compiled, and its head is not; before the model is attached and afterwards."""
    model = llama(num_hidden_layers=1)
    given = lazy_models.inputs(model)
    theirs = lazy_models.step(model, given)
    torch.compiler.reset()
    model.compile(backend="aot_eager")
    if by == "attach":  # the model has been compiled with its logits
        lazy_models.step(model, given)
    with onepass.attach(model) if by == "attach" else onepass.patch("transformers"):
        ours = [lazy_models.step(model, given) for _ in range(2)]
    for step in ours:
        assert_same(step, theirs, 1e-5)
    assert is_lazy(ours[1][0])
    torch.compiler.reset()


@pytest.mark.parametrize("adapted", [False, pytest.param(True, marks=pytest.mark.exhaustive)], ids=["", "LoRA"])
@pytest.mark.parametrize("attach", [onepass.attach, lambda _: onepass.patch("transformers")], ids=["attach", "patch"])
def test_compiled_as_a_whole_where_nothing_trains(attach, adapted):
    model = llama(num_hidden_layers=1).eval()
    if adapted:
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)).eval()
    given = {"input_ids": lazy_models.inputs(model)["input_ids"], "use_cache": False}
    with torch.no_grad(), attach(model):
        expected = model(**given).logits
        torch.compiler.reset()
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(**given).logits, expected)
        exported = torch.export.export(model, (), given, strict=False)
        torch.testing.assert_close(exported.module()(**given).logits, expected)
    torch.compiler.reset()


def test_autocast():
    """The logits of an attached model are not rounded to bfloat16, so its numbers are closer to those in float32."""
    model = llama(initializer_range=0.2)
    given = lazy_models.inputs(model)
    exact = lazy_models.step(model, given)

    def step(model, given):
        with torch.autocast("cpu", torch.bfloat16):
            out = model(**given)
        model.zero_grad()
        out.loss.backward()
        return out, {n: p.grad.clone() for n, p in model.named_parameters()}

    theirs = step(model, given)
    with onepass.attach(model):
        ours = step(model, given)
    assert is_lazy(ours[0]) and ours[0].loss.dtype == torch.float32 and ours[0].logits.gemm_dtype == torch.bfloat16
    assert_same(ours, theirs, 0.02)
    assert_same(ours, exact, 0.05)
    assert all(g.dtype == torch.float32 for g in ours[1].values())


def test_bfloat16():
    model = llama().bfloat16()
    ours, theirs, messages = both(model, lazy_models.inputs(model))
    assert is_lazy(ours[0]) and not messages
    assert_same(ours, theirs, 0.02)


class Float32Head(transformers.LlamaForCausalLM):
    """The head in float32 after a body in bfloat16."""

    def forward(self, input_ids=None, labels=None, **kwargs):
        hidden = self.model(input_ids=input_ids, **kwargs).last_hidden_state
        logits = self.lm_head(hidden.float())
        loss = None if labels is None else self.loss_function(logits, labels, vocab_size=self.config.vocab_size)
        return transformers.modeling_outputs.CausalLMOutputWithPast(loss=loss, logits=logits)


def test_float32_head_after_a_bfloat16_body():
    model = Float32Head(llama(tie_word_embeddings=False).config).bfloat16().eval()
    model.lm_head.float()
    ours, theirs, messages = both(model, lazy_models.inputs(model))
    assert is_lazy(ours[0]) and not messages
    assert ours[0].logits.dtype == ours[0].logits.gemm_dtype == torch.float32
    assert_same(ours, theirs, 1e-2)  # the gradients of the body are rounded to bfloat16
    of_head = ours[1]["lm_head.weight"], theirs[1]["lm_head.weight"]
    assert of_head[0].dtype == torch.float32
    torch.testing.assert_close(*of_head, rtol=1e-5, atol=1e-6)


def test_frozen_head():
    """A head without a gradient, and a body without one."""
    for frozen in ("lm_head", "model"):
        model = llama(tie_word_embeddings=False)
        getattr(model, frozen).requires_grad_(False)
        ours, theirs, messages = both(model, lazy_models.inputs(model))
        assert is_lazy(ours[0]) and not messages and not any(n.startswith(frozen) for n in ours[1])
        assert_same(ours, theirs)


@pytest.mark.parametrize("patched", (False, True))
def test_metrics(patched):
    """They are those of the tokens that are not ignored, over all forwards since the last call."""
    model = llama()
    given = lazy_models.inputs(model)
    with torch.no_grad():
        logits = model(**given).logits[:, :-1]
    labels = given["labels"][:, 1:]
    valid = labels != -100
    log_probs = logits.log_softmax(-1)[valid]
    entropy = -(log_probs.exp() * log_probs).sum(-1).mean()
    accuracy = (logits.argmax(-1) == labels)[valid].float().mean()
    patch = onepass.patch("transformers") if patched else contextlib.nullcontext()
    with patch, onepass.attach(model, metrics=True) as attached:
        assert attached.metrics() == {}
        ours, theirs, caught = both(model, given, attach=lambda model: contextlib.nullcontext())
        found = attached.metrics()  # of two steps
        assert found["num_tokens"] == 2 * valid.sum() and not caught
        torch.testing.assert_close(found["entropy"], entropy)
        torch.testing.assert_close(found["mean_token_accuracy"], accuracy)
        assert attached.metrics() == {}
        lazy_models.step(model, {**given, "labels": torch.full_like(given["labels"], -100)})
        nothing = attached.metrics()
        assert nothing["num_tokens"] == 0 and nothing["entropy"].isnan()
    assert_same(ours, theirs)
    with onepass.attach(model) as attached, pytest.raises(ValueError, match=r"^metrics: expected .*metrics=True"):
        attached.metrics()


def test_max_memory():
    model = llama()
    given = lazy_models.inputs(model)
    with onepass.attach(model, max_memory=2**20):
        out, _ = lazy_models.step(model, given)
        assert out.logits.max_memory == 2**20
    with onepass.attach(model, max_memory=1), pytest.raises(ValueError, match=r"^max_memory: expected at least"):
        lazy_models.step(model, given)
    for wrong in (0, 1.5, "1"):
        with pytest.raises((TypeError, ValueError), match=r"^max_memory: expected"):
            onepass.attach(model, max_memory=wrong)
    with pytest.raises(TypeError, match=r"^model: expected a torch.nn.Module, got"):
        onepass.attach("model")
    assert "forward" not in model.__dict__


def test_mapped_by_pytree():
    """A function of tensors acts on the hidden states: rows, casts and constants are those of the logits."""
    model = llama()
    given = lazy_models.inputs(model)
    with onepass.attach(model):
        expected = model(**given).logits.materialize()
        logits = model(**given).logits
    rows, constant = tree_map(lambda t: t[:1], logits), tree_map(torch.detach, logits)
    assert rows.shape == rows.materialize().shape and torch.equal(rows.materialize(), expected[:1])
    assert rows.requires_grad and not constant.requires_grad and not constant.materialize().requires_grad
    assert torch.equal(constant.materialize(), expected)
    for function in (lambda t: t.argmax(-1), lambda t: t[..., :3], torch.isnan):
        with pytest.raises(TypeError, match=r"logits: expected hidden states, .*call logits.materialize\(\) before"):
            tree_map(function, logits)
    logits.materialize()
    assert torch.equal(tree_map(lambda t: t.argmax(-1), logits), expected.argmax(-1))
    assert torch.equal(tree_map(lambda t: t[:1], logits), expected[:1])


def test_threads():
    """A head stays lazy in the thread whose forward trains, until the last such forward has ended."""
    model = llama()
    given = lazy_models.inputs(model)
    entered, left = threading.Event(), threading.Event()
    found = {}

    def pause(*_):
        if threading.current_thread().name == "first":
            entered.set()
            left.wait(30)

    def forward(name):
        found[name] = type(model(**given).logits)

    with onepass.attach(model):
        hook = model.model.norm.register_forward_pre_hook(pause)
        first = threading.Thread(target=forward, args=("first",), name="first")
        first.start()
        assert entered.wait(30)
        with torch.no_grad():
            forward("evaluation")
        forward("second")
        left.set()
        first.join()
        hook.remove()
    assert issubclass(found["first"], onepass.LinearLogits) and issubclass(found["second"], onepass.LinearLogits)
    assert found["evaluation"] is torch.Tensor and type(model(**given).logits) is torch.Tensor


def test_a_wrapper_around_an_attached_forward():
    """It is kept when the model is restored, and the model's own forward runs within it."""
    model = llama()
    given = lazy_models.inputs(model)
    attached = onepass.attach(model)
    inner, calls = model.forward, []
    model.forward = lambda *args, **kwargs: calls.append(1) or inner(*args, **kwargs)
    assert is_lazy(model(**given))
    attached.restore()
    assert type(model(**given).logits) is torch.Tensor and len(calls) == 2


def test_a_wrapper_around_an_earlier_attachment():
    """It calls the model's own forward, also once the model is attached again."""
    model = llama()
    given = lazy_models.inputs(model)
    before = set(model.__dict__)
    attached = onepass.attach(model)
    inner = model.forward
    model.forward = lambda *args, **kwargs: inner(*args, **kwargs)
    attached.restore()
    with onepass.attach(model):
        assert is_lazy(model(**given))
    assert type(model(**given).logits) is torch.Tensor and set(model.__dict__) == {*before, "forward"}
    attached = onepass.attach(model)
    del model.forward
    attached.restore()
    assert set(model.__dict__) == before


@pytest.mark.parametrize("of", [dict(fused=True), dict(foreach=True), dict(foreach=False)], ids=str)
def test_logits_that_are_read_after_a_step(of):
    """They would be those of the new weights."""
    model = llama()
    with onepass.attach(model):
        outputs = model(**lazy_models.inputs(model))
        outputs.loss.backward()
        torch.optim.AdamW(model.parameters(), **of).step()
        with pytest.raises(RuntimeError, match=r"changed|written|modified"):
            outputs.logits.detach().softmax(-1)


def test_metrics_of_a_loss_of_each_row():
    """Its backward computes the tiles again, which are not counted twice."""
    model = llama()
    given = lazy_models.inputs(model)
    del given["labels"]
    labels = given["input_ids"]

    class Own(type(model)):
        def forward(self, input_ids, labels=None, **rest):
            z = self.lm_head(self.model(input_ids).last_hidden_state)
            return torch.nn.functional.cross_entropy(z.flatten(0, 1), labels.flatten(), reduction="none")

    model.__class__ = Own
    with onepass.attach(model, metrics=True) as attached:
        loss = model(input_ids=given["input_ids"], labels=labels)
        before = dict(attached.observer.sums)
        loss.sum().backward()
        assert before and all(
            torch.equal(torch.as_tensor(attached.observer.sums[n]), torch.as_tensor(before[n])) for n in before
        )


@pytest.mark.parametrize("items", [0, 0.0, -3, math.inf, True])
def test_odd_numbers_of_items(items):
    """transformers divides by them."""
    model = llama()
    given = lazy_models.inputs(model)
    expected = model(**given, num_items_in_batch=items).loss
    with onepass.patch("transformers"):
        found = model(**given, num_items_in_batch=items).loss
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


def test_a_copy_can_be_restored():
    model = llama()
    given = lazy_models.inputs(model)
    with onepass.attach(model, metrics=True) as attached:
        other = copy.deepcopy(model)
        lazy_models.step(other, given)
        assert attached.metrics() == {}, "those of the copy"
    with onepass.attach(other):
        assert is_lazy(other(**given))
    assert type(other(**given).logits) is torch.Tensor


if __name__ == "__main__":  # the counts of docs/integrations.md
    warnings.simplefilter("ignore")
    all_found = {name: outcome(kind, name) for kind, name in lazy_models.names()}
    print(
        f"transformers {transformers.__version__}: {len(all_found)} classes,", Counter(o for o, _ in all_found.values())
    )
    print({name: of for name, of in all_found.items() if of[0] not in ("lazy", "not built")})
    with contextlib.suppress(ImportError):
        liger = import_module("liger_kernel.transformers.monkey_patch")
        print(f"Liger patches {len(liger.MODEL_TYPE_TO_APPLY_LIGER_FN)} model types")
