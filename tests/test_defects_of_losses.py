"""Defects of losses of logits, which these tests showed before they were fixed."""

import sys

import pytest
import torch
import torch.nn.functional as F

import onepass
from defect_cases import INF, head, same
from linear_cases import gradients
from onepass.backend import backend_of
from onepass.core.options import FieldGradients, Inputs, Options

# Class weights and a target outside the vocabulary.


@pytest.mark.parametrize("from_head", [False, True], ids=["logits", "head"])
@pytest.mark.parametrize("outside", [40, -1, 2**40])
def test_class_weights_and_a_target_outside(device, raises_index_error, from_head, outside):
    hidden, weight, target = head(device)
    target[4] = outside
    weights = torch.rand(40, device=device)
    source = onepass.LinearLogits(hidden, weight) if from_head else hidden @ weight.T
    if raises_index_error:
        with pytest.raises(IndexError, match=f"target: .*got {outside} in row 4"):
            onepass.cross_entropy(source, target, class_weights=weights)
        return
    loss = onepass.cross_entropy(source, target, class_weights=weights, reduction="none")
    assert torch.equal(loss.isnan(), torch.arange(12, device=device) == 4)
    (gradient,) = torch.autograd.grad(loss.nansum(), hidden)
    mean = onepass.cross_entropy(source, target, class_weights=weights)
    assert mean.isnan() and gradient[5].isfinite().all()
    if device.type == "cuda":
        torch.cuda.synchronize()  # the context is still there


# Programs of a row that wait for each other.


def in_one_or_two(vocab, dtype, rows=3):
    """Cross-entropy of a head whose tile is the logits that are wanted: hidden states of width 1."""
    hidden = torch.ones(rows, 1, device="cuda", dtype=dtype, requires_grad=True)
    g = torch.Generator("cuda").manual_seed(0)
    weight = torch.randn(vocab, 1, generator=g, device="cuda", dtype=torch.float32).to(dtype)
    target = torch.randint(vocab, (rows,), generator=g, device="cuda")
    loss = onepass.linear_cross_entropy(hidden, weight, target, max_memory=2**33)
    loss.backward()
    return loss, hidden.grad, F.cross_entropy(weight.double().T.expand(rows, vocab), target)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [2**24, 2**23, 262144, 151936])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_large_vocabularies(vocab, dtype):
    loss, gradient, expected = in_one_or_two(vocab, dtype)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)
    assert gradient.isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [151936, 327680])
def test_eight_streams(vocab):
    streams = [torch.cuda.Stream() for _ in range(8)]
    logits = [torch.randn(64, vocab, device="cuda", dtype=torch.bfloat16) for _ in streams]
    index = torch.randint(vocab, (64,), device="cuda")
    ones = torch.ones(64, device="cuda")
    kernels, options = sys.modules["onepass.kernels"], Options("log_probs")
    assert kernels.supports_fused_loss(logits[0], index, options)
    expected = [x.float().log_softmax(-1)[torch.arange(64), index] for x in logits]
    torch.cuda.synchronize()
    found = []
    for _ in range(2):
        given = [x.clone() for x in logits]
        torch.cuda.synchronize()
        found = []
        for x, stream in zip(given, streams):
            with torch.cuda.stream(stream):
                grads = FieldGradients(selected=ones)
                found.append(kernels.softmax_loss(x, Inputs(index), grads, options, x)[1])
        torch.cuda.synchronize()
    for got, wanted in zip(found, expected):
        torch.testing.assert_close(got, wanted)


@pytest.mark.gpu
def test_few_multiprocessors(monkeypatch):
    """On a small device, or a slice of one, two launches take the place of one whose programs wait."""
    from onepass.kernels import launch, layout

    logits = torch.empty(4, 151936, device="cuda", dtype=torch.bfloat16)
    index, options = torch.zeros(4, dtype=torch.long, device="cuda"), Options("log_probs")
    kernels = sys.modules["onepass.kernels"]
    assert kernels.supports_fused_loss(logits, index, options)
    monkeypatch.setattr(layout, "multiprocessors", lambda device: 14)
    monkeypatch.setattr(launch, "_launches", {})
    assert not kernels.supports_fused_loss(logits, index, options)
    loss, gradient, expected = in_one_or_two(151936, torch.bfloat16)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)
    assert gradient.isfinite().all()


def test_probabilities_for_log_probs():
    x, ids = torch.randn(3, 10), torch.tensor([[1, 2]] * 3)
    with pytest.raises(ValueError, match="teacher_log_probs: expected logarithms of probabilities"):
        onepass.topk_kl_div(x, ids, torch.full((3, 2), 0.4))
    assert onepass.topk_kl_div(x, ids, torch.full((3, 2), 0.4), row_mask=torch.zeros(3)) == 0  # masked: may be anything


def test_errors_are_short():
    x, t = torch.randn(3, 10), torch.tensor([1, 2, 3])
    long = [0.5] * 100_000
    for call in (
        lambda: onepass.cross_entropy(x, t, class_weights=long),
        lambda: onepass.cross_entropy(x, long),
        lambda: onepass.cross_entropy(x, t, reduction=long),
        lambda: onepass.cross_entropy(x, t, label_smoothing=long),
        lambda: onepass.kl_div(x, x, num_items=long),
        lambda: onepass.moe.route(x, long),
        lambda: onepass.entropy_from_logits(x, temperature=10**5000),
    ):
        with pytest.raises((TypeError, ValueError)) as error:
            call()
        assert len(str(error.value)) < 500


@pytest.mark.parametrize("value", [None, -100.5, "x", True, 2**64])
def test_ignore_index(value):
    x, t = torch.randn(3, 10), torch.tensor([1, 2, 3])
    with pytest.raises((TypeError, ValueError), match="ignore_index: expected"):
        onepass.cross_entropy(x, t, ignore_index=value)
    with pytest.raises((TypeError, ValueError), match="ignore_index: expected"):
        onepass.distillation_loss(x, t, t.unsqueeze(-1), -torch.ones(3, 1), ignore_index=value)


def test_beta_outside_jsd():
    x = torch.randn(3, 10)
    for direction in ("forward", "reverse"):
        with pytest.raises(ValueError, match="beta: expected direction='jsd' with it"):
            onepass.kl_div(x, x, direction=direction, beta=0.3)


def test_a_float_mask(device):
    x, t = torch.randn(4, 10, device=device), torch.tensor([1, 2, 3, 4], device=device)
    mask = torch.tensor([1.0, 0.0, 1.0, 0.0], device=device)
    for kind in (torch.float32, torch.bfloat16, torch.int32, torch.uint8):
        got = onepass.selective_log_softmax(x, t, row_mask=mask.to(kind))
        assert torch.equal(got, onepass.selective_log_softmax(x, t, row_mask=mask.bool()))
        routing = onepass.moe.route(x, 2, token_mask=mask.to(kind))
        assert torch.equal(routing.weights, onepass.moe.route(x, 2, token_mask=mask.bool()).weights)


def test_columns_of_the_teacher():
    with pytest.raises(ValueError, match=r"teacher_logits: expected 10 columns, those of the student, got 8"):
        onepass.kl_div(torch.randn(3, 10), torch.randn(3, 8))


def test_metrics_as_a_word():
    x, t = torch.randn(3, 10), torch.tensor([1, 2, 3])
    with pytest.raises(TypeError, match=r"metrics: expected a sequence of names, got 'is_top1'"):
        onepass.softmax_statistics(x, t, metrics="is_top1")


def test_labels_beyond_the_dtype_of_ids(device, raises_index_error):
    x = torch.randn(3, 10, device=device)
    ids = torch.tensor([[1], [2], [3]], dtype=torch.int32, device=device)
    labels = torch.tensor([1, 2**32 + 5, 3], device=device)
    call = lambda: onepass.distillation_loss(x, labels, ids, -torch.ones(3, 1, device=device))  # noqa: E731
    if raises_index_error:
        with pytest.raises(IndexError, match="4294967301 in row 1"):
            call()
    else:
        assert call().isnan()


def test_overlapping_logits_in_place():
    t = torch.tensor([1, 2, 3])
    for shape, strides in (((3, 10), (5, 1)), ((3, 10), (9, 1)), ((3, 10), (0, 1))):
        x = torch.randn(40).as_strided(shape, strides).requires_grad_()
        with pytest.raises(ValueError, match="inplace_backward: expected logits of which no two elements share memory"):
            onepass.cross_entropy(x, t, inplace_backward=True)
    apart = torch.randn(3, 12)[:, :10].requires_grad_()
    onepass.cross_entropy(apart, t, inplace_backward=True).backward()
    assert apart.grad.isfinite().all()


@pytest.mark.parametrize(
    "value", [1e-40, 10**400, 10**5000, -(10**400), 1e39], ids=["1e-40", "10**400", "10**5000", "-10**400", "1e39"]
)
@pytest.mark.parametrize("name", ["temperature", "softcap"])
def test_numbers_that_float32_does_not_hold(name, value):
    with pytest.raises(ValueError, match=f"{name}: expected"):
        onepass.entropy_from_logits(torch.randn(3, 10), **{name: value})


def test_class_weights_that_require_a_gradient():
    x, t = torch.randn(3, 10), torch.tensor([1, 2, 3])
    with pytest.raises(ValueError, match="class_weights: expected a constant"):
        onepass.cross_entropy(x, t, class_weights=torch.rand(10, requires_grad=True))


def test_ids_of_tokens_that_are_not_given(device):
    """Of log-prob -inf, as of those that a mask leaves out, ids and the rows may be anything."""
    x = torch.randn(5, 33, device=device)
    x[1] = float("nan")
    x.requires_grad_()
    ids, log_probs = torch.zeros(5, 2, dtype=torch.long, device=device), torch.full((5, 2), -1.0, device=device)
    ids[0, 1], log_probs[0, 1] = -1, -INF
    ids[1], log_probs[1] = 10**6, -INF
    for renormalize in (False, True):
        options = {"renormalize": renormalize, "reduction": "none"}
        got = onepass.topk_kl_div(x, ids, log_probs, **options)
        expected = onepass.topk_kl_div(x, ids, log_probs, teacher_mask=log_probs.isfinite(), **options)
        (gradient,) = torch.autograd.grad(got.sum(), x)
        assert torch.equal(got, expected) and got[1] == 0
        assert gradient.isfinite().all() and (gradient[1] == 0).all()


@pytest.mark.parametrize("value", [-2, float("nan"), True])
def test_items_in_a_tensor_are_checked(value):
    with pytest.raises((TypeError, ValueError), match="num_items: expected"):
        onepass.cross_entropy(torch.randn(2, 5), torch.tensor([1, 2]), num_items=torch.tensor(value))


def test_a_weight_without_bound_of_a_class_that_no_row_has(device):
    x, t = torch.randn(4, 7, device=device, requires_grad=True), torch.tensor([-100, 3, 3, 3], device=device)
    weights = torch.rand(7, device=device).index_fill(0, torch.tensor(0, device=device), INF)
    same(onepass.cross_entropy(x, t, class_weights=weights), F.cross_entropy(x, t, weight=weights), (x,))


@pytest.mark.parametrize("renormalize", [False, True])
def test_a_teacher_of_nan_is_not_a_teacher_that_is_absent(device, renormalize):
    x, ids = torch.randn(4, 7, device=device), torch.zeros(4, 1, dtype=torch.long, device=device)
    log_probs = torch.full((4, 1), float("nan"), device=device)
    head = torch.eye(7, device=device)
    assert onepass.topk_kl_div(x, ids, log_probs, renormalize=renormalize).isnan()
    assert onepass.linear_topk_kl_div(x, head, ids, log_probs, renormalize=renormalize).isnan()


def test_a_large_upstream_gradient_of_an_entropy(device):
    logits = torch.tensor([[0.3, -torch.inf, 1.0, -0.5]], device=device).requires_grad_()
    (grad,) = torch.autograd.grad(onepass.entropy_from_logits(logits).sum() * 1e9, logits)
    z = logits.detach().double()
    p = z.softmax(-1)
    log_p = torch.where(p > 0, p.log(), 0.0)
    expected = -p * (log_p - (p * log_p).sum(-1, keepdim=True)) * 1e9
    torch.testing.assert_close(grad.double(), expected, rtol=1e-5, atol=100.0)


@pytest.mark.parametrize("masked", [False, True])
def test_an_ignore_index_that_int32_cannot_hold(device, masked):
    """Torch would compare with 0, what is left of it in 32 bits."""
    logits, target = torch.randn(3, 33, device=device), torch.tensor([0, 1, 2], device=device)
    options = {"row_mask": torch.ones(3, device=device)} if masked else {}
    loss = onepass.cross_entropy(logits, target.int(), ignore_index=2**40, **options)
    torch.testing.assert_close(loss, F.cross_entropy(logits, target))


def test_inplace_backward_of_empty_logits(device):
    logits = torch.randn(16, 0, device=device).requires_grad_()
    target = torch.zeros(0, dtype=torch.long, device=device)
    onepass.cross_entropy((logits * 1).T, target, reduction="sum", inplace_backward=True).backward()
    assert logits.grad.shape == (16, 0)


def test_one_upstream_gradient_of_several_ids(device):
    """A number is the gradient of all ids of all rows; the kernel must not read beyond it."""
    logits, index = torch.randn(3, 7, device=device), torch.tensor([[0, 6], [3, 3], [5, 1]], device=device)
    backend, inputs, options = backend_of(logits), Inputs(index), Options("log_probs")
    packed, found, expected = backend.softmax_statistics(logits, inputs, options)[0], logits * 0, logits * 0
    number = torch.full((1,), 0.5, device=device)[0]
    backend.softmax_gradient(logits, inputs, packed, FieldGradients(selected=number), options, found)
    every = FieldGradients(selected=number.expand(3, 2).contiguous())
    backend.softmax_gradient(logits, inputs, packed, every, options, expected)
    assert expected.any() and torch.equal(found, expected)


@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
def test_jsd_of_a_probability_that_underflows(device, beta):
    z = torch.tensor([[0.0, -103.0, 0.3], [0.0, -200.0, 1.0]], device=device, requires_grad=True)
    t = torch.tensor([[0.0, -200.0, 1.0], [0.0, -103.5, 0.3]], device=device)
    loss = onepass.kl_div(z, t, direction="jsd", beta=beta, reduction="none")
    exact = z.detach().double().requires_grad_()
    p, q = exact.softmax(-1), t.double().softmax(-1)
    m = beta * q + (1 - beta) * p
    expected = beta * (q * (q.log() - m.log())).sum(-1) + (1 - beta) * (p * (p.log() - m.log())).sum(-1)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)
    for a, b in zip(gradients(loss.sum(), (z,)), gradients(expected.sum(), (exact,))):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("value", [float("-inf"), -1.0, float("nan"), 0.5, 2.0])
def test_a_mask_of_other_numbers_than_0_and_1(value):
    mask, x = torch.tensor([0.0, value, 0.0]), torch.randn(3, 5)
    ids, log_probs = torch.zeros(3, 1, dtype=torch.int64), torch.full((3, 1), -1.0)
    calls = {
        "row_mask": [lambda: onepass.cross_entropy(x, torch.arange(3), row_mask=mask),
                     lambda: onepass.ratio_report(x[:, 0], x[:, 1], row_mask=mask)],
        "teacher_mask": [lambda: onepass.topk_kl_div(x, ids, log_probs, teacher_mask=mask.unsqueeze(-1))],
    }  # fmt: skip
    integers = {-1: (torch.int32,), 2: (torch.int64, torch.uint8)}.get(value, ())
    for dtype in integers:
        calls["row_mask"] += [lambda d=dtype: onepass.cross_entropy(x, torch.arange(3), row_mask=mask.to(d))]
    for name, of_name in calls.items():
        for call in of_name:
            with pytest.raises(ValueError, match=f"{name}: expected 1 for what to read and 0 for the rest, got"):
                call()
