"""`onepass.attach` on models of transformers: the loss and the gradients of the model as it is, and no logits.

Every architecture is tested small, with random weights and on the CPU.
"""

import contextlib
import warnings
from collections import Counter
from importlib import import_module

import pytest
import torch
from torch import nn

import onepass
from attach_cases import TOLERANCE, VOCAB, assert_same, both, difference, is_lazy, llama, made

transformers = pytest.importorskip("transformers")
lazy_models = import_module("lazy_models")

pytestmark = pytest.mark.usefixtures("eager")

CHUNKS = 8


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
@pytest.mark.parametrize("chunk", [0, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in range(1, CHUNKS))])
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
