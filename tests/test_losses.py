"""The losses against torch's own, their gradients by gradcheck, and writing the gradient in place."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import onepass
from definition import assert_close, assert_gradient_close, statistics, transform
from onepass.core.options import IDENTITY, Inputs, Options, Transform
from onepass.softmax.statistics import gather_logits
from paths import interpreted

ROWS, VOCAB = 6, 77


def batch(device, dtype=torch.float32, ignored=True):
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(ROWS, VOCAB, generator=generator) * 3).to(dtype).to(device)
    target = torch.randint(VOCAB, (ROWS,), generator=generator)
    if ignored:
        target[2] = -100
    weight = torch.rand(VOCAB, generator=generator).to(device)
    return logits, target.to(device), weight


def gradients(loss, logits, upstream=None):
    upstream = torch.ones_like(loss) if upstream is None else upstream.to(loss.dtype)
    return torch.autograd.grad(loss, logits, upstream)[0]


@pytest.mark.pairs
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("weighted", [False, True], ids=["", "class weights"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_cross_entropy_is_torchs(device, dtype, weighted, smoothing, reduction):
    logits, target, weight = batch(device, dtype)
    weight = weight if weighted else None
    ours, theirs = logits.clone().requires_grad_(), logits.double().requires_grad_()
    got = onepass.cross_entropy(ours, target, class_weights=weight, reduction=reduction, label_smoothing=smoothing)
    expected = F.cross_entropy(
        theirs, target, weight if weight is None else weight.double(), reduction=reduction, label_smoothing=smoothing
    )
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert_close(got, expected.detach(), scale=10.0)
    upstream = torch.rand(expected.shape, dtype=torch.float64).to(device)
    assert_gradient_close(gradients(got, ours, upstream), gradients(expected, theirs, upstream))


@pytest.mark.parametrize("weight_dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_class_weights_of_any_dtype(device, weight_dtype):
    logits, target, weight = batch(device)
    weight = weight.to(weight_dtype)
    got = onepass.cross_entropy(logits, target, class_weights=weight, label_smoothing=0.3)
    expected = F.cross_entropy(logits.double(), target, weight.double(), label_smoothing=0.3)
    assert_close(got, expected)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_transform_and_z_loss(device, reduction):
    logits, target, _ = batch(device)
    options = {"softcap": 5.0, "logit_scale": 1.5, "temperature": 0.7}
    ours, theirs = logits.clone().requires_grad_(), logits.double().requires_grad_()
    got = onepass.cross_entropy(ours, target, reduction=reduction, z_loss_weight=0.1, **options)
    z = transform(theirs, **options)
    kept = target != -100
    rows = F.cross_entropy(z, target, reduction="none") + 0.1 * z.logsumexp(-1) ** 2 * kept
    expected = {"mean": rows.sum() / kept.sum(), "sum": rows.sum(), "none": rows}[reduction]
    assert_close(got, expected.detach(), scale=10.0)
    assert_gradient_close(gradients(got, ours), gradients(expected, theirs), upstream=3.0)


def test_all_rows_ignored(device):
    logits, target, _ = batch(device)
    target[:] = -100
    logits.requires_grad_()
    assert onepass.cross_entropy(logits, target).isnan()  # as in torch
    total = onepass.cross_entropy(logits, target, reduction="sum", label_smoothing=0.1, z_loss_weight=0.1)
    assert total == 0 and (gradients(total, logits) == 0).all()


def test_ignore_index_may_be_a_class(device):
    logits, target, _ = batch(device, ignored=False)
    target[1] = 5
    got = onepass.cross_entropy(logits, target, ignore_index=5)
    assert_close(got, F.cross_entropy(logits.double(), target, ignore_index=5))


def test_empty_batch(device):
    logits = torch.randn(0, VOCAB, device=device, requires_grad=True)
    target = torch.zeros(0, dtype=torch.int64, device=device)
    assert onepass.cross_entropy(logits, target).isnan()
    loss = onepass.cross_entropy(logits, target, reduction="sum") + onepass.entropy_from_logits(logits).sum()
    assert loss == 0 and gradients(loss, logits).shape == (0, VOCAB)


def test_module_has_the_functions_options(device):
    logits, target, weight = batch(device)
    options = {"ignore_index": 7, "reduction": "sum", "label_smoothing": 0.2, "z_loss_weight": 0.1}
    options |= {"softcap": 5.0, "logit_scale": 2.0, "temperature": 0.5}
    target = target.clamp(min=0)
    module = onepass.CrossEntropyLoss(class_weights=weight, **options).to(device)
    assert torch.equal(module(logits, target), onepass.cross_entropy(logits, target, class_weights=weight, **options))
    assert "class_weights" in module.state_dict() and "label_smoothing=0.2" in repr(module)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_log_probs_and_entropy(device, dtype, temperature):
    logits, target, _ = batch(device, dtype, ignored=False)
    many = torch.stack([target, (target + 1) % VOCAB, target], -1)  # a class twice
    exact = logits.double().requires_grad_()
    expected = statistics(exact, many, temperature=temperature)
    ours = logits.clone().requires_grad_()
    log_p, entropy = onepass.selective_log_softmax_and_entropy(ours, many, temperature=temperature)
    assert log_p.dtype == entropy.dtype == torch.float32
    assert_close(log_p, expected["log_probs"].detach())
    assert_close(entropy, expected["entropy"].detach())
    u, v = torch.randn(ROWS, 3, dtype=torch.float64).to(device), torch.randn(ROWS, dtype=torch.float64).to(device)
    both = gradients((log_p * u).sum() + (entropy * v).sum(), ours)
    assert_gradient_close(
        both, gradients((expected["log_probs"] * u).sum() + (expected["entropy"] * v).sum(), exact), upstream=20.0
    )
    # The functions that give one of the two say the same.
    assert torch.equal(onepass.selective_log_softmax(logits, many, temperature=temperature), log_p)
    assert torch.equal(onepass.entropy_from_logits(logits, temperature=temperature), entropy)


def test_rows_that_no_loss_reaches_get_zeros(device):
    logits, target, _ = batch(device, ignored=False)
    logits.requires_grad_()
    log_p, entropy = onepass.selective_log_softmax_and_entropy(logits, target)
    keep = torch.arange(ROWS, device=device) % 2
    gradient = gradients((log_p * keep).sum() + (entropy * keep).sum(), logits)
    assert (gradient[::2] == 0).all() and (gradient[1::2] != 0).any(-1).all()


@pytest.mark.parametrize("dims", [(2, 3, 4), (3, 2, 2, 2)], ids=str)
def test_strides_that_do_not_merge(device, dims):
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(*dims, 41, generator=generator).to(device)
    orders = list(itertools.permutations(range(len(dims))))
    for order in orders[:: 5 if interpreted(device) and len(dims) == 4 else 1]:
        logits = base.permute(*order, len(dims)).detach().requires_grad_()
        target = torch.randint(41, logits.shape[:-1], generator=generator).to(device)
        log_p = onepass.selective_log_softmax(logits, target)
        exact = logits.detach().double().requires_grad_()
        expected = exact.log_softmax(-1).gather(-1, target.unsqueeze(-1)).squeeze(-1)
        assert_close(log_p, expected.detach())
        upstream = torch.randn(expected.shape, generator=generator, dtype=torch.float64).to(device)
        assert_gradient_close(gradients(log_p, logits, upstream), gradients(expected, exact, upstream), upstream=4.0)


def shift_free(s):
    """The fields are differentiated at a constant shift; these combinations do not depend on it."""
    weighted = s.weighted_logit + 0.3 * VOCAB_OF_GRADCHECK * (s.logsumexp - s.log_normalizer)
    return s.logsumexp, s.entropy, s.log_probs, weighted - 0.3 * VOCAB_OF_GRADCHECK * s.logsumexp


VOCAB_OF_GRADCHECK = 9
LOSSES = {
    "cross_entropy": lambda x, t: onepass.cross_entropy(x, t),
    "smoothed, weighted, z-loss": lambda x, t: onepass.cross_entropy(
        x,
        t,
        class_weights=torch.linspace(0, 1, x.shape[-1], dtype=x.dtype),
        label_smoothing=0.2,
        z_loss_weight=0.1,
        softcap=4.0,
    ),
    "log_probs": lambda x, t: onepass.selective_log_softmax(x, t.clamp(min=0), temperature=0.7),
    "entropy": lambda x, t: onepass.entropy_from_logits(x, temperature=0.7, row_mask=t >= 0),
    "pair": lambda x, t: onepass.selective_log_softmax_and_entropy(x, t.clamp(min=0).unsqueeze(-1).expand(-1, 3)),
    "statistics": lambda x, t: shift_free(
        onepass.softmax_statistics(x, t.clamp(min=0), class_weights=0.3, logit_scale=0.5)
    ),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_gradcheck(loss):
    logits = torch.randn(4, VOCAB_OF_GRADCHECK, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([3, -100, 0, 8])
    assert torch.autograd.gradcheck(lambda x: LOSSES[loss](x, target), (logits,))


IN_PLACE = {
    "cross_entropy": lambda x, t, **kw: onepass.cross_entropy(x, t, **kw),
    "log_probs": lambda x, t, **kw: onepass.selective_log_softmax(x, t.clamp(min=0), **kw).sum(),
    "entropy": lambda x, t, **kw: onepass.entropy_from_logits(x, **kw).sum(),
    "pair": lambda x, t, **kw: sum(o.sum() for o in onepass.selective_log_softmax_and_entropy(x, t.clamp(min=0), **kw)),
}


@pytest.mark.parametrize("loss", IN_PLACE)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_gradient_in_place(device, dtype, loss):
    base, target, _ = batch(device, dtype)
    leaf, other = base.clone().requires_grad_(), base.clone().requires_grad_()
    IN_PLACE[loss](other, target).backward()
    logits = leaf * 1  # as from a head
    memory = logits.data_ptr()
    seen = []
    logits.register_hook(lambda g: seen.append(g.data_ptr()))
    IN_PLACE[loss](logits, target, inplace_backward=True).backward()
    assert seen == [memory], "the gradient lies where the logits lay"
    assert torch.equal(leaf.grad, other.grad)


def test_in_place_makes_later_use_an_error(device):
    base, target, _ = batch(device)
    leaf = base.clone().requires_grad_()
    whole = leaf * 1
    logits = whole.view(ROWS, VOCAB)
    squared = logits.square().sum()  # has saved the logits
    loss = onepass.cross_entropy(logits, target, inplace_backward=True)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squared.backward()
    for use in (
        lambda: logits.argmax(-1),
        lambda: logits + 1,
        lambda: logits[0],
        lambda: whole.sum(),
        lambda: logits.T,
    ):
        with pytest.raises(RuntimeError, match="logits: used after their gradient was written over them"):
            use()
    with pytest.raises(RuntimeError, match="logits: used after"):
        onepass.cross_entropy(logits, target)
    assert logits.shape == (ROWS, VOCAB) and leaf.grad is not None


def test_in_place_on_a_leaf(device):
    base, target, _ = batch(device)
    leaf = base.clone().requires_grad_()
    onepass.cross_entropy(leaf, target, inplace_backward=True).backward()
    other = base.clone().requires_grad_()
    onepass.cross_entropy(other, target).backward()
    assert torch.equal(leaf.grad, other.grad)
    leaf.grad = None  # as zero_grad() does
    assert leaf.grad is None


def test_no_second_derivative(device):
    logits, target, _ = batch(device)
    logits.requires_grad_()
    with pytest.raises(RuntimeError, match="second derivatives are not implemented, got create_graph=True"):
        onepass.cross_entropy(logits, target).backward(create_graph=True)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int64, torch.float16])
def test_num_items_of_any_dtype(device, dtype):
    x, target, _ = batch(device)
    items = torch.tensor(3, dtype=dtype, device=device)
    expected = onepass.cross_entropy(x, target, num_items=3)
    assert_close(onepass.cross_entropy(x, target, num_items=items), expected)
    with FlopCounterMode(display=False):  # a number on a CPU is not read
        assert_close(onepass.cross_entropy(x, target, num_items=items), expected)


@pytest.mark.parametrize("items", [0, 0.0, torch.tensor(0)], ids=str)
def test_no_items(device, items):
    x, target, _ = batch(device)
    x.requires_grad_()
    loss = onepass.cross_entropy(x, target, num_items=items.to(device) if isinstance(items, torch.Tensor) else items)
    assert loss.item() == float("inf")
    loss.backward()
    assert not x.grad.isfinite().all()


def test_no_items_in_a_compiled_function():
    """An integer has no -0, which the divisor of a negated loss would be."""
    x, target, _ = batch("cpu")
    compiled = torch.compile(lambda n: onepass.cross_entropy(x, target, num_items=n), backend="aot_eager")
    assert compiled(torch.tensor(0)).item() == float("inf")
    torch._dynamo.reset()


def test_a_number_of_items_without_a_reciprocal(device):
    x, target, _ = batch(device)
    assert onepass.cross_entropy(x, target, num_items=1e-300).item() == float("inf")


def test_a_sum_with_items_is_deprecated(device):
    x, target, _ = batch(device)
    said = r"onepass: num_items: pass reduction='mean' with it, instead of 'sum' \[OP002\]"
    with pytest.warns(DeprecationWarning, match=said) as warned:
        loss = onepass.cross_entropy(x, target, reduction="sum", num_items=3)
    assert [w.filename for w in warned if w.category is DeprecationWarning] == [__file__]
    assert_close(loss, onepass.cross_entropy(x, target, num_items=3))


SELECTED = {
    "contiguous": lambda x: x,
    "every second column": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "transposed": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
    "expanded": lambda x: x[:1].expand(x.shape),
    "many dimensions": lambda x: x.reshape(3, 1, 2, 5, -1).transpose(0, 2),
    "one row": lambda x: x[0, 0],
    "no row": lambda x: x[:0],
}


@pytest.mark.pairs
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32, torch.float64))
@pytest.mark.parametrize("name", SELECTED)
def test_selected_logits(device, name, dtype):
    """The kernel, of which a divergence that is normalized over the teacher's tokens is made, and its gradient."""
    x = SELECTED[name](torch.randn(6, 5, 700, device=device).to(dtype)).detach().requires_grad_()
    index = torch.randint(700, (*x.shape[:-1], 130), device=device, dtype=torch.int32)
    selected = gather_logits(x, index, IDENTITY)
    expected = x.double().gather(-1, index.long())
    assert torch.equal(selected.double(), expected)
    upstream = torch.randn_like(selected)
    (grad,) = torch.autograd.grad(selected, x, upstream)
    (of_torch,) = torch.autograd.grad(expected, x, upstream.double())
    assert_close(grad, of_torch.to(dtype))


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32, torch.float64))
def test_selected_logits_under_a_softcap(device, dtype):
    """A class that is selected often is rounded once; a NaN logit without a gradient is left out."""
    transform = Transform(0.7, 5.0, 1.5)
    x = torch.randn(4, 9, device=device).mul(3).to(dtype)
    x[1] = math.nan
    x[2, 0] = math.nan
    x.requires_grad_()
    index = torch.tensor(
        [[1, 1, 1, 1, 1, 2], [0, 1, 2, 3, 4, 5], [0, 8, 8, 3, 3, 7], [5, 4, 3, 2, 1, 0]], device=device
    )
    upstream = torch.rand(index.shape, device=device).add(0.1).to(torch.promote_types(dtype, torch.float32))
    upstream[1], upstream[2, 0] = 0, 0
    selected = gather_logits(x, index, transform)
    (grad,) = torch.autograd.grad(selected, x, upstream)
    expected = x.detach().double().requires_grad_()
    z = 5.0 * torch.tanh(1.5 * expected / 5.0) / 0.7
    read = z.gather(-1, index)
    assert_close(selected, read.to(selected.dtype))
    unread = (upstream != 0).double()
    (of_torch,) = torch.autograd.grad((read.where(unread != 0, 0.0) * upstream.double()).sum(), expected)
    of_torch = of_torch.nan_to_num(0.0)  # the derivative of tanh at NaN, times 0
    assert_close(grad, of_torch.to(dtype))
    assert not grad[1].any() and not grad[2, 0].any()


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
def test_masked_tokens_under_a_softcap_have_no_gradient(device, dtype):
    x = torch.randn(3, 5, device=device).to(dtype)
    x[1], x[2, 0] = math.nan, math.nan
    x.requires_grad_()
    ids, log_probs = (
        torch.tensor([[1, 2, 3]] * 3, device=device),
        torch.tensor([[0.5, 0.4, 0.1]] * 3, device=device).log(),
    )
    masks = dict(row_mask=torch.tensor([1, 0, 1], device=device))
    masks["teacher_mask"] = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 1, 0]], device=device)
    onepass.topk_kl_div(x, ids, log_probs, renormalize=True, softcap=5.0, **masks).backward()
    assert x.grad.isfinite().all() and not x.grad[1].any() and x.grad[2, 1:3].any() and not x.grad[2, 0].any()


def test_selected_logits_outside_the_vocabulary(device, raises_index_error):
    x = torch.randn(3, 7, device=device)
    index = torch.tensor([[0, 6], [7, 1], [-1, 2]], device=device)
    if raises_index_error:
        with pytest.raises(IndexError, match="index: expected values in"):
            gather_logits(x, index, IDENTITY)
    else:
        found = gather_logits(x, index, IDENTITY)
        assert found.isnan().tolist() == [[False, False], [True, False], [True, False]]
        assert torch.equal(found[:, 1], x.gather(1, index[:, 1:])[:, 0])


def test_a_linear_loss_with_row_inputs_that_have_a_gradient():
    """The loss of statistics that are read once, beside the gradient of what they are multiplied by."""
    hidden, weight = torch.randn(5, 8, requires_grad=True), torch.randn(11, 8)
    index, factors = torch.arange(5), torch.randn(5, requires_grad=True)
    found = []
    for linear in (True, False):
        loss = onepass.LinearLogits(hidden, weight).loss(
            lambda fields, a: fields["log_probs"] * a, Inputs(index), Options("log_probs"), (factors,), 1.0, linear
        )
        found.append(torch.autograd.grad(loss, (hidden, factors)))
    torch.testing.assert_close(*found)
    assert found[0][1].abs().min() > 0


def test_a_softcap_that_saturates(device):
    """Its slope is small there, and not the difference of two numbers next to 1."""
    x = torch.linspace(-300, 300, 4 * 64, dtype=torch.float64).view(4, 64)
    index, found = torch.arange(4) * 20, []
    for logits in (x.float().to(device).requires_grad_(), x.clone().requires_grad_()):
        loss = onepass.cross_entropy(logits, index.to(logits.device), softcap=15.0)
        found.append(torch.autograd.grad(loss, logits)[0].double().cpu())
    torch.testing.assert_close(*found, rtol=1e-4, atol=0)


def test_a_module_moves_the_temperatures_of_its_rows():
    for loss in (onepass.CrossEntropyLoss(temperature=torch.ones(3)), onepass.KLDivLoss(temperature=torch.ones(3))):
        assert loss.to("meta").temperature.device.type == "meta"
