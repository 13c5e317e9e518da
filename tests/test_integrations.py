"""What `onepass.patch("transformers")` puts in place, each against its original; and the plugin of axolotl."""

from importlib import import_module
from inspect import signature

import pytest
import torch

import onepass
from integration_cases import H, N, V, assert_same, both

transformers = pytest.importorskip("transformers")
pytest.importorskip("trl")
utils = import_module("trl.trainer.utils")
loss_utils = import_module("transformers.loss.loss_utils")
moe_cases = import_module("test_moe_families")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("items", [None, 11, True, float("inf"), torch.tensor(11), torch.tensor([11.0])], ids=str)
@pytest.mark.parametrize("given", ["labels", "shift_labels", "another ignore_index", "flat"])
def test_causal_lm_loss(items, given):
    logits, labels = torch.randn(3, 8, V, requires_grad=True), torch.randint(V, (3, 8))
    options = dict(num_items_in_batch=items, ignore_index=7 if given == "another ignore_index" else -100)
    labels[0, :3] = options["ignore_index"]
    if given == "shift_labels":
        options["shift_labels"], labels = labels, None
    x = logits.view(24, V) if given == "flat" else logits
    labels = labels.flatten() if given == "flat" else labels
    theirs, ours = both(
        "ForCausalLMLoss", x, labels, V, of=loss_utils, module="transformers", inputs=[logits], unknown="ignored",
        **options,
    )  # fmt: skip
    assert_same((theirs, ours))


def test_labels_that_do_not_fit():
    logits, labels = torch.randn(2, 5, V), torch.randint(V, (2, 4))
    with onepass.patch("transformers"):
        for error, match, of in (
            (ValueError, r"^labels: expected 10 labels for .*, got shape \(2, 4\)", dict(labels=labels)),
            (ValueError, "^shift_labels: expected 10 labels", dict(labels=None, shift_labels=labels)),
            (TypeError, "^labels: expected a tensor, got", dict(labels=labels.tolist())),
        ):
            with pytest.raises(error, match=match):
                loss_utils.ForCausalLMLoss(logits, vocab_size=V, **of)


def test_the_loss_is_exported_with_dynamic_sizes():
    class Loss(torch.nn.Module):
        def forward(self, logits, labels):
            return onepass.integrations.transformers.ForCausalLMLoss(logits, labels, V)

    tokens = torch.export.Dim("tokens", min=2, max=64)
    arguments = torch.randn(2, 5, V), torch.randint(V, (2, 5))
    exported = torch.export.export(Loss(), arguments, dynamic_shapes=({1: tokens}, {1: tokens})).module()
    for n in (5, 9):
        arguments = torch.randn(2, n, V), torch.randint(V, (2, n))
        torch.testing.assert_close(exported(*arguments), Loss()(*arguments))


def test_a_model_with_a_softcap_and_bfloat16_logits():
    config = transformers.Gemma2Config(
        vocab_size=V, hidden_size=H, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, final_logit_softcapping=3.0,
    )  # fmt: skip
    model, tokens = transformers.Gemma2ForCausalLM(config), torch.randint(V, (2, 9))
    theirs = model(tokens, labels=tokens).loss
    with onepass.patch("transformers"):
        ours = model(tokens, labels=tokens).loss
        loss = model.bfloat16()(tokens, labels=tokens).loss
    torch.testing.assert_close(ours, theirs)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, theirs, rtol=2e-2, atol=2e-2)


@moe_cases.pytestmark
@moe_cases.every_case
def test_routers(case, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    dtypes = torch.float32, torch.bfloat16
    blocks = [moe_cases.build(case).to(dtype) for dtype in dtypes]
    inputs = [torch.randn(13, moe_cases.H, dtype=dtype, requires_grad=True) for dtype in dtypes]
    theirs = [moe_cases.theirs(*given) for given in zip(blocks, inputs)]
    with onepass.patch("transformers"):
        ours = [moe_cases.theirs(*given) for given in zip(blocks, inputs)]
    for of_dtype in zip(theirs, ours, inputs):
        assert_same_routing(*of_dtype)


def assert_same_routing(theirs, ours, hidden):
    assert [t.dtype for t in ours] == [t.dtype for t in theirs]
    torch.testing.assert_close(ours[0], theirs[0], rtol=0, atol=0)
    # Of equal logits, which bfloat16 often has, transformers takes any and we the first.
    best = theirs[0].sort(descending=True)[0][:, : moe_cases.K + 1]
    clear = (best.diff() != 0).all(-1, keepdim=True)
    assert clear.any()
    dense = [torch.zeros(13, moe_cases.E).scatter(1, e, w.float()) * clear for _, w, e in (theirs, ours)]
    torch.testing.assert_close(dense[1], dense[0], rtol=1e-6, atol=1e-6)
    # Those of gpt-oss, Qwen and Hunyuan are rounded on their way through the softmax.
    tolerance = 1e-5 if hidden.dtype == torch.float32 else 4e-3
    grads = [torch.autograd.grad(d.square().sum(), hidden)[0].float() for d in dense]
    torch.testing.assert_close(grads[1], grads[0], rtol=tolerance, atol=tolerance)


def test_axolotl_plugin(monkeypatch):
    base = pytest.importorskip("axolotl.integrations.base")
    original = utils.selective_log_softmax
    manager = base.PluginManager.get_instance()
    manager.register("onepass.integrations.axolotl.OnepassPlugin")
    (plugin,) = manager.plugins.values()
    manager.pre_model_load({})
    manager.pre_model_load({})
    assert utils.selective_log_softmax is not original and plugin.patch.replaced
    callback = transformers.TrainerCallback()
    monkeypatch.setattr(type(plugin), "callbacks", [callback])
    assert manager.add_callbacks_post_trainer({}, None) == [callback]
    manager.post_train_unload({})
    manager.post_train_unload({})
    assert utils.selective_log_softmax is original and plugin.patch is None


def test_axolotl_plugin_switches_autotune_on(tmp_path):
    base = pytest.importorskip("axolotl.integrations.base")
    from onepass.autotune import AutotuneReportCallback, ConfigStore, JSONLSink, LogSink
    from onepass.integrations.axolotl import OnepassArgs, OnepassPlugin

    name = OnepassPlugin().get_input_args()
    assert name == f"{OnepassArgs.__module__}.{OnepassArgs.__qualname__}"
    store, lines = str(tmp_path / "store.json"), str(tmp_path / "autotuned.jsonl")
    for report, sink in ((None, None), (False, None), (True, LogSink), (lines, JSONLSink)):
        plugin: base.BasePlugin = OnepassPlugin()
        cfg = OnepassArgs(onepass_autotune_store=store, onepass_autotune_report=report).model_dump()
        plugin.pre_model_load(cfg)
        callbacks = plugin.add_callbacks_post_trainer(cfg, None)
        assert [type(c) for c in callbacks] == [AutotuneReportCallback] * bool(sink)
        assert [type(s) for c in callbacks for s in c.sinks] == [sink] * bool(sink)
        plugin.post_train_unload(cfg)
    assert ConfigStore(store).path.exists() and not plugin.patch


@pytest.mark.parametrize("items", [None, 7])
@pytest.mark.parametrize("shift", [False, True], ids=["", "shifted"])
def test_label_smoother(shift, items):
    """With an index of its own that is ignored, outputs in a tuple, and labels with a dimension of size 1."""
    smoother = import_module("transformers.trainer_pt_utils").LabelSmoother(epsilon=0.2, ignore_index=5)
    logits, labels = torch.randn(2, N, V), torch.randint(V, (2, N))
    labels[:, ::4] = 5
    options = {"shift_labels": shift} | ({} if items is None else {"num_items_in_batch": items})
    if items is not None and "num_items_in_batch" not in signature(type(smoother).__call__).parameters:
        pytest.skip("not in this transformers")
    expected = smoother({"logits": logits}, labels, **options)
    of_dim = labels if shift else labels.unsqueeze(-1)
    with onepass.patch("transformers"):
        for outputs, given in (({"logits": logits}, labels), ((logits, None), labels), ((logits,), of_dim)):
            torch.testing.assert_close(smoother(outputs, given, **options), expected)
