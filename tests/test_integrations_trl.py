"""What `onepass.patch("trl")` puts in place, each against the original that it stands for."""

from contextlib import nullcontext
from functools import partial
from importlib import import_module

import pytest
import torch

import integration_cases
import onepass
from integration_cases import H, N, V, assert_same

transformers = pytest.importorskip("transformers")
trl = pytest.importorskip("trl")
utils = import_module("trl.trainer.utils")
of_trl = import_module("onepass.integrations.trl")
both = partial(integration_cases.both, of=utils, module="trl")

LATEST = pytest.mark.skipif(tuple(map(int, trl.__version__.split(".")[:2])) < (1, 16), reason="not in this TRL")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


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
