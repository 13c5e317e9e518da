"""How attached models are trained: adapters, checkpointing, compilation, dtypes and metrics."""

import contextlib
import math
from importlib import import_module

import pytest
import torch

import onepass
from attach_cases import assert_same, both, is_lazy, llama, state
from onepass.integrations.adapters import adapter_reason

transformers = pytest.importorskip("transformers")
lazy_models = import_module("lazy_models")

pytestmark = pytest.mark.usefixtures("eager")


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


def test_lora_that_is_not_in_effect_yet():
    """Dropout has no effect until the model trains, and PEFT takes a merged adapter out when it is next called."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, init_lora_weights=False, target_modules=["lm_head"], lora_dropout=0.5)
    model = peft.get_peft_model(llama(tie_word_embeddings=False), config).eval()
    head = model.get_output_embeddings()
    assert not adapter_reason(head) and adapter_reason(head, trained=True) == "its adapter has dropout"
    model.merge_adapter()
    model.base_model.disable_adapter_layers()
    with pytest.warns(RuntimeWarning, match="materialized logits, its adapter is merged but disabled"):
        onepass.attach(model).restore()


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


def test_metrics_of_several_losses_and_steps():
    """Of several losses of the same logits the first counts; steps add up."""
    model = llama()
    ids = lazy_models.inputs(model)["input_ids"]

    class Own(type(model)):
        def forward(self, input_ids, labels=None, losses=1):
            z = self.lm_head(self.model(input_ids).last_hidden_state).flatten(0, 1)
            return sum(torch.nn.functional.cross_entropy(z, labels.flatten()) for _ in range(losses))

    model.__class__ = Own
    with onepass.attach(model, metrics=True) as attached:
        found = []
        for losses, steps in ((1, 1), (2, 1), (1, 3)):
            for _ in range(steps):
                model(ids, labels=ids, losses=losses).backward()
            found.append(attached.metrics())
        assert attached.metrics() == {}
    assert [int(f["num_tokens"]) for f in found] == [ids.numel(), ids.numel(), 3 * ids.numel()]
    for other in found[1:]:
        for name in ("entropy", "mean_token_accuracy"):
            torch.testing.assert_close(other[name], found[0][name])


@pytest.mark.parametrize("items", [0, 0.0, -3, math.inf, True])
def test_odd_numbers_of_items(items):
    """transformers divides by them."""
    model = llama()
    given = lazy_models.inputs(model)
    expected = model(**given, num_items_in_batch=items).loss
    with onepass.patch("transformers"):
        found = model(**given, num_items_in_batch=items).loss
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
