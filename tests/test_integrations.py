"""What `onepass.patch` puts in place, each against the original that it stands for; and the plugin of axolotl."""

from contextlib import nullcontext
from importlib import import_module
from inspect import signature

import pytest
import torch

import onepass

transformers = pytest.importorskip("transformers")
trl = pytest.importorskip("trl")
utils = import_module("trl.trainer.utils")
loss_utils = import_module("transformers.loss.loss_utils")
of_trl = import_module("onepass.integrations.trl")
moe_cases = import_module("test_moe_families")

LATEST = pytest.mark.skipif(tuple(map(int, trl.__version__.split(".")[:2])) < (1, 16), reason="not in this TRL")
N, H, V = 23, 16, 67


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def both(name, *arguments, of=utils, module="trl", inputs=(), **options):
    """Results and gradients of the original and of what replaces it."""
    ours = getattr(import_module(f"onepass.integrations.{module}"), name.lstrip("_"))
    outcomes = []
    for function in (getattr(of, name), ours):
        results = function(*arguments, **options)
        results = results if isinstance(results, tuple) else (results,)
        loss = sum(
            (r * torch.linspace(-1, 1, r.numel()).view(r.shape)).sum() + r.sum()
            for r in results
            if r is not None and r.requires_grad
        )
        outcomes.append((results, torch.autograd.grad(loss, inputs) if inputs else ()))
    return outcomes


def assert_same(outcomes, atol=1e-5):
    (theirs, of_theirs), (ours, of_ours) = outcomes
    assert len(theirs) == len(ours)
    for a, b in zip((*theirs, *of_theirs), (*ours, *of_ours)):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.shape == b.shape
            torch.testing.assert_close(b.float(), a.float(), rtol=1e-5, atol=atol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("K", [None, 3])
def test_selective_log_softmax(K, dtype):
    x = torch.randn(3, 7, V).to(dtype).requires_grad_()
    index = torch.randint(V, (3, 9) if K is None else (3, 9, K))[:, 1:8]
    found = [both("selective_log_softmax", x, index, inputs=[x]), both("entropy_from_logits", x, 5, inputs=[x])]
    if tuple(map(int, trl.__version__.split(".")[:2])) >= (1, 14):
        mask = torch.rand(index.shape) < 0.5
        found.append(both("selective_log_softmax", x, index, inputs=[x], temperature=0.7, row_mask=mask.long()))
    for outcomes in found:
        assert_same(outcomes)
        assert [r.dtype for r, _ in zip(*outcomes[1])] == [dtype]
    with pytest.raises(ValueError, match="temperature: expected a finite number above 0"):
        _ours("selective_log_softmax")(x, index, temperature=0.0)


@LATEST
@pytest.mark.parametrize("requires_grad", [False, True])
def test_selective_log_softmax_and_entropy(requires_grad):
    x, index, mask = torch.randn(3, 7, V, requires_grad=True), torch.randint(V, (3, 7)), torch.rand(3, 7) < 0.5
    options = dict(entropy_requires_grad=requires_grad, temperature=0.7)
    assert_same(both("selective_log_softmax_and_entropy", x, index, inputs=[x], **options))
    outcomes = both("selective_log_softmax_and_entropy", x, index, inputs=[x], row_mask=mask.int(), **options)
    assert_same(outcomes)
    assert outcomes[1][0][1].requires_grad == requires_grad


def test_log_probs_may_be_changed_in_place():
    """As trainers do with padding; the gradient is that of the rows that were not."""
    from onepass.integrations.trl import selective_log_softmax_and_entropy

    x, index = torch.randn(3, 7, V, requires_grad=True), torch.randint(V, (3, 7))
    log_probs, entropy = selective_log_softmax_and_entropy(x, index)
    log_probs[0, 2] = 0.0
    (got,) = torch.autograd.grad((log_probs + entropy).sum(), x)
    log_p = x.log_softmax(-1)
    chosen, entropy = log_p.gather(-1, index[..., None])[..., 0], -(log_p.exp() * log_p).sum(-1)
    kept = torch.ones(3, 7)
    kept[0, 2] = 0
    (expected,) = torch.autograd.grad((chosen * kept + entropy).sum(), x)
    torch.testing.assert_close(got, expected)


@LATEST
@pytest.mark.parametrize("outputs", [(), ("entropy",), ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")])
@pytest.mark.parametrize("softcap, scale", [(None, 1.0), (None, 0.25), (5.0, 1.5)])
def test_fused_head(softcap, scale, outputs):
    from trl.kernels import chunked_logprob

    hidden, weight = torch.randn(N, H, requires_grad=True), torch.randn(V, H, requires_grad=True)
    bias, targets = torch.randn(V, requires_grad=True), torch.randint(V, (N,))
    for b in (None, bias):
        arguments = hidden, weight, b, targets, 0.7, 10, softcap, scale, outputs
        inputs = [hidden, weight] if b is None else [hidden, weight, b]
        theirs, ours = chunked_logprob.ChunkedLogProbFunction, _ours("ChunkedLogProbFunction")
        found = []
        for function in (theirs, ours):
            results = function.apply(*arguments)
            loss = sum(r.square().sum() for r in results if r is not None and r.requires_grad)
            found.append((results, torch.autograd.grad(loss, inputs)))
            assert [r is not None and r.requires_grad for r in results[2:]] == [False] * 3
        assert_same(found, atol=2e-4)
        assert len(outputs) < 4 or found[1][0][4].dtype == torch.bool


@LATEST
@pytest.mark.parametrize("autocast, trained", [(False, True), (False, False), (True, True)])
def test_a_head_that_trl_casts_to_float32(autocast, trained, monkeypatch):
    """Its logits are float32, from factors of half precision where the hidden states have it.

    The weight of a frozen head is taken to be one of half precision that was cast.
    """
    from transformers import AutoModelForCausalLM, LlamaConfig
    from trl.trainer import utils

    dtypes = []
    made = of_trl.LinearLogits.__init__

    def recorded(self, *args, **options):
        made(self, *args, **options)
        dtypes.append((self.gemm_dtype, self.dtype))

    monkeypatch.setattr(of_trl.LinearLogits, "__init__", recorded)
    sizes = dict(vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4)
    ids = torch.randint(99, (2, 9), generator=torch.Generator().manual_seed(0))
    # As with a master copy of the weights, of which TRL casts hidden states that are float32 already.
    dtype = torch.float32 if autocast else torch.bfloat16

    def results(patched, cast):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes), dtype=dtype)
        with torch.no_grad():
            model.lm_head.weight.mul_(40)
        if cast:
            model.lm_head.float()
            with torch.no_grad():  # a step of an optimizer leaves what half precision cannot hold
                model.lm_head.weight.add_(1e-2 * trained * torch.randn(model.lm_head.weight.shape))
                model.lm_head.weight.requires_grad_(trained)
        with onepass.patch("trl") if patched else nullcontext():
            utils.add_fused_lm_head(model, 0.7, cast, ("log_probs", "entropy"))
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                found = model(input_ids=ids, labels=ids, fused_lm_head=True)
            (found.log_probs.sum() + found.entropy.sum()).backward()
        return found, [model.lm_head.weight.grad, model.model.embed_tokens.weight.grad][not trained :]

    theirs, ours = results(False, True), results(True, True)
    assert set(dtypes) == {(torch.float32,) * 2 if autocast else (torch.bfloat16, torch.float32)}
    for name in ("log_probs", "entropy"):
        torch.testing.assert_close(ours[0][name], theirs[0][name], rtol=1e-5, atol=1e-5)
    for a, b in zip(ours[1], theirs[1]):
        assert a.dtype == b.dtype
        assert (a - b).norm() <= (1e-5 if autocast else 1e-2) * b.norm()
    if not autocast:  # which rounded logits do not reach
        rounded = results(True, False)[0].log_probs
        assert (rounded - theirs[0].log_probs).abs().max() > 1e-2


@LATEST
def test_fused_head_rounds_a_bias_as_trl_does():
    """Of whole numbers, whose products no order of summing changes: only when they are rounded matters."""
    from trl.kernels import chunked_logprob

    hidden, weight = (torch.randint(-15, 16, (n, H)).bfloat16().requires_grad_() for n in (N, V))
    bias, targets = (200 * torch.randn(V)).bfloat16().requires_grad_(), torch.randint(V, (N,))
    found = []
    for function in (chunked_logprob.ChunkedLogProbFunction, _ours("ChunkedLogProbFunction")):
        results = function.apply(hidden, weight, bias, targets, 50.0, 10, None, 1.0, ("entropy", "mean_logits"))
        of = results[0].sum() + 2 * results[1].sum()
        found.append((results, [g.float() for g in torch.autograd.grad(of, [hidden, weight, bias])]))
    (theirs, of_theirs), (ours, of_ours) = found
    assert_same([(theirs, ()), (ours, ())], atol=1e-4)
    for a, b in zip(of_theirs, of_ours):
        torch.testing.assert_close(b, a, rtol=1e-2, atol=1e-2 * a.abs().max().item())
    once = onepass.softmax_statistics(onepass.LinearLogits(hidden, weight, bias), targets, temperature=50.0)
    assert (once.log_probs - ours[0]).abs().max() > 1e-2


@LATEST
def test_fused_head_takes_no_more_tokens_at_a_time_than_trl_is_told_to(monkeypatch):
    from trl.kernels import chunked_logprob

    arguments = (
        torch.randn(N, H, requires_grad=True),
        torch.randn(V, H, requires_grad=True),
        None,
        torch.randint(V, (N,)),
    )
    assert import_module("onepass.integrations.trl_heads").TOKENS == chunked_logprob.TOKEN_CHUNK_SIZE
    taken, mm = [], torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b, **kwargs: taken.append(len(a)) or mm(a, b, **kwargs))
    found = []
    for tokens in (N, N - 1, 4):
        monkeypatch.setattr(chunked_logprob, "TOKEN_CHUNK_SIZE", tokens)
        taken.clear()
        results = _ours("ChunkedLogProbFunction").apply(*arguments, 1.0, 16, None, 1.0, ("entropy",))
        assert taken == [tokens] * (N // tokens) + [N % tokens] * (N % tokens > 0)
        found.append((results, torch.autograd.grad(results[0].sum() + results[1].sum(), arguments[:2])))
    assert_same(found[:2])
    assert_same(found[1:])


@LATEST
def test_the_fused_kernel():
    """TRL's own has no path for a CPU: against what its trainers call there."""
    from trl.trainer.utils import selective_log_softmax_and_entropy

    x, index = torch.randn(2, 5, V, requires_grad=True), torch.randint(V, (2, 5))
    mask = torch.tensor([[1, 1, 0, 1, 1], [1, 0, 1, 1, 1]])
    found = []
    for function in (selective_log_softmax_and_entropy, _ours("fused_log_probs_and_entropy")):
        results = function(x, index, temperature=0.7, row_mask=mask.bool())
        found.append((results, torch.autograd.grad(results[0].sum() + 2 * results[1].sum(), x)))
    assert_same(found)


def _ours(name):
    return getattr(import_module("onepass.integrations.trl"), name)


@LATEST
@pytest.mark.parametrize("ties", [0, 1])
def test_only_the_first_of_equal_logits_is_top1(ties):
    """As argmax: rows of half precision often have several largest logits."""
    from trl.kernels import chunked_logprob

    hidden = torch.eye(8)
    weight = torch.zeros(V, 8)
    weight[5:60:9] = 1.0 + ties
    targets = torch.tensor([5, 14, 23, 0, 66, 59, 32, 5])
    theirs, ours = (
        f.apply(hidden, weight, None, targets, 1.0, 16)[4]
        for f in (chunked_logprob.ChunkedLogProbFunction, _ours("ChunkedLogProbFunction"))
    )
    assert theirs.tolist() == ours.tolist() == [t == 5 for t in targets.tolist()]


@LATEST
def test_fused_head_in_mixed_precision():
    from trl.kernels import chunked_logprob

    theirs, ours = chunked_logprob.ChunkedLogProbFunction.apply, _ours("ChunkedLogProbFunction").apply
    weight, targets = torch.randn(V, H, requires_grad=True), torch.randint(V, (N,))
    for hidden, autocast in ((torch.randn(N, H).bfloat16(), False), (torch.randn(N, H), True)):
        found = []
        for function in (theirs, ours):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                log_probs = function(hidden, weight, None, targets, 1.0, 16)[0]
            (grad,) = torch.autograd.grad(log_probs.sum(), weight)
            assert log_probs.dtype == grad.dtype == torch.float32
            found.append((log_probs, grad))
        for a, b in zip(*found):
            torch.testing.assert_close(b, a, rtol=2e-2, atol=5e-2)


@LATEST
def test_fused_head_of_a_sharded_weight(sharded):
    hidden, weight, targets = torch.randn(N, H), torch.randn(V, H, requires_grad=True), torch.randint(V, (N,))
    function, parameter = _ours("ChunkedLogProbFunction").apply, torch.nn.Parameter(sharded(weight))
    expected = function(hidden, weight, None, targets, 1.0, 16)[0]
    log_probs = function(hidden, parameter, None, targets, 1.0, 16)[0]
    log_probs.sum().backward()
    assert torch.equal(log_probs, expected) and type(parameter.grad) is type(parameter.data)
    torch.testing.assert_close(parameter.grad.full_tensor(), *torch.autograd.grad(expected.sum(), weight))


@LATEST
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("options", [{}, dict(temperature=0.7, num_items_in_batch=torch.tensor(30)), dict(
    student_logit_scale=0.5, teacher_logit_scale=2.0, student_final_logit_softcapping=5.0,
    teacher_final_logit_softcapping=3.0)], ids=["plain", "items", "scale and cap"])  # fmt: skip
def test_divergence(beta, options):
    from trl.trainer import distillation_trainer

    leaves = [torch.randn(*shape, requires_grad=True) for shape in ((2, 5, H), (2, 5, 24), (V, H), (V, 24), (V,), (V,))]
    student, teacher, weight, teacher_weight, bias, teacher_bias = leaves
    mask = torch.tensor([[1, 1, 1, 0, 0], [0, 1, 1, 1, 1]])
    assert_same(
        both(
            "_chunked_divergence_loss",
            student,
            teacher,
            weight,
            teacher_weight,
            mask,
            beta,
            of=distillation_trainer,
            inputs=[student, weight, bias],
            student_lm_head_bias=bias,
            teacher_lm_head_bias=teacher_bias,
            **options,
        )
    )
    nothing = both(
        "_chunked_divergence_loss", student, teacher, weight, teacher_weight, 0 * mask, beta, of=distillation_trainer,
        inputs=[student, weight],
    )  # fmt: skip
    assert_same(nothing)


@LATEST
def test_divergence_from_a_teacher_that_is_padded_further():
    """Only the columns of the student are compared, which TRL cannot do."""
    student, teacher, weight = torch.randn(2, 5, H), torch.randn(2, 5, 24), torch.randn(V, H)
    teacher_weight, mask = torch.randn(V + 3, 24), torch.ones(2, 5)
    loss = _ours("chunked_divergence_loss")
    results = [loss(student, teacher, weight, w, mask, 0.5) for w in (teacher_weight, teacher_weight[:V])]
    torch.testing.assert_close(*results)
    with pytest.raises(ValueError, match="vocab_size: expected"):
        loss(student, teacher, weight, teacher_weight[: V - 1], mask, 0.5)


@LATEST
def test_a_head_of_another_dtype_than_the_hidden_states():
    """As without a patch in mixed precision, the head is cast, and its bias too."""
    hidden, weight, bias = torch.randn(2, 5, H).bfloat16(), torch.randn(V, H), torch.randn(V)
    labels = torch.randint(V, (2, 5))
    loss = _ours("chunked_cross_entropy_loss")
    results = [loss(hidden, w, 4, labels=labels, lm_head_bias=b)[0] for w, b in
               ((weight, bias), (weight.bfloat16(), bias.bfloat16()))]  # fmt: skip
    torch.testing.assert_close(*results)


@pytest.mark.skipif(not hasattr(import_module("trl.trainer.sft_trainer"), "_chunked_cross_entropy_loss"),
                    reason="TRL 1.10 to 1.14")  # fmt: skip
@pytest.mark.parametrize("options", [{}, dict(num_items_in_batch=torch.tensor(30)), dict(
    logit_scale=0.5, final_logit_softcapping=5.0)], ids=["plain", "items", "scale and cap"])  # fmt: skip
def test_chunked_cross_entropy(options):
    from trl.trainer import sft_trainer

    hidden, weight = torch.randn(2, 9, H, requires_grad=True), torch.randn(V, H, requires_grad=True)
    bias, labels = torch.randn(V, requires_grad=True), torch.randint(V, (2, 9))
    labels[0, :4] = -100
    for name, target in (("labels", labels), ("shift_labels", labels), ("labels", torch.full_like(labels, -100))):
        options[name] = target
        assert_same(
            both(
                "_chunked_cross_entropy_loss",
                hidden,
                weight,
                4,
                of=sft_trainer,
                inputs=[hidden, weight, bias],
                lm_head_bias=bias,
                **options,
            )
        )
        del options[name]
    with pytest.raises(ValueError, match="labels and shift_labels is expected, got neither"):
        _ours("chunked_cross_entropy_loss")(hidden, weight, 4)


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
