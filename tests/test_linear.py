"""The linear head against the same losses of logits that are there: values, gradients, precision, refusals."""

import os

import pytest
import torch
import torch.nn.functional as F

import onepass
from definition import assert_close, statistics
from linear_cases import (
    LOSSES,
    H,
    N,
    V,
    assert_all_close,
    batch,
    exact,
    gradients,
    policy_loss,
    teacher_logits,
    teacher_tokens,
    tiles_of,
)
from onepass.logits import tiled_loss as head_loss
from onepass.logits import tiled_statistics as head_statistics
from onepass.logits import valid_rows

pytestmark = pytest.mark.usefixtures("uninitialised_memory_is_nan")


@pytest.mark.pairs
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("loss", LOSSES)
def test_equals_the_loss_of_logits(device, tile, loss, dtype):
    hidden, weight, bias, target = batch(device, dtype)
    h, w, b = exact(hidden, weight, bias)
    expected = LOSSES[loss](F.linear(h, w, b), target)
    got = LOSSES[loss](onepass.LinearLogits(hidden, weight, bias), target)
    assert got.dtype == dtype
    assert_all_close([got.detach()], [expected.detach()], "loss")
    upstream = torch.rand(expected.shape, dtype=torch.float64).to(device) + 0.5
    assert_all_close(
        gradients((got * upstream).sum(), (hidden, weight, bias)), gradients((expected * upstream).sum(), (h, w, b))
    )
    with torch.no_grad():
        assert_all_close([LOSSES[loss](onepass.LinearLogits(hidden, weight, bias), target)], [expected], "no_grad")


@pytest.mark.parametrize("loss", ["cross_entropy, every option", "cross_entropy, none", "pair, masked", "kl_div"])
def test_masks_that_only_the_kernels_see_to(device, tile, monkeypatch, loss):
    """As while a CUDA graph is captured, when nobody can say how many rows are kept."""
    hidden, weight, bias, target = batch(device)
    expected = LOSSES[loss](onepass.LinearLogits(hidden, weight, bias), target)
    for module in (head_loss, head_statistics, valid_rows):
        monkeypatch.setattr(module, "defers", lambda row_mask: True)
    got = LOSSES[loss](onepass.LinearLogits(hidden, weight, bias), target)
    assert_all_close([got.detach()], [expected.detach()], "loss")
    parts = hidden, weight, bias
    assert_all_close(gradients(got.sum(), parts), gradients(expected.sum(), parts))


@pytest.mark.pairs
@pytest.mark.parametrize("how", ["counted", "not counted", "adapter"])
@pytest.mark.parametrize("loss", LOSSES)
def test_masked_rows_under_an_upstream_gradient_that_is_not_finite(device, tile, monkeypatch, loss, how):
    """Those of the hidden states have a gradient of 0 where those of logits have."""
    hidden, weight, bias, target = batch(device)
    A, B = torch.full((2, H), 0.1, device=device), torch.full((V, 2), 0.1, device=device, requires_grad=True)
    lora = (A, B, 1.0) if how == "adapter" else None
    if how == "not counted":
        for module in (head_loss, head_statistics, valid_rows):
            monkeypatch.setattr(module, "defers", lambda row_mask: row_mask is not None)
    for number in (float("nan"), float("inf")):
        of_rows = []
        for x in (F.linear(hidden, weight, bias), onepass.LinearLogits(hidden, weight, bias, lora=lora)):
            value = LOSSES[loss](x, target)
            of_rows.append(torch.autograd.grad(value, hidden, torch.full_like(value, number))[0].eq(0).all(-1))
        assert torch.equal(*of_rows)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_masked_rows_of_a_mask_that_is_changed_before_the_backward(device, tile, number):
    hidden, weight, bias, target = batch(device)
    scale = torch.ones(*target.shape, 2, device=device, requires_grad=True)
    kept = target != -100
    loss = onepass.linear_loss(
        hidden, weight, target.clamp(min=0), lambda s, a: -s.log_probs * a.sum(-1), scale, bias=bias, row_mask=kept
    )
    kept.fill_(True)
    for found in torch.autograd.grad(loss, (hidden, scale), torch.full_like(loss, number)):
        assert torch.equal(found.eq(0).all(-1), target == -100)


@pytest.mark.pairs
@pytest.mark.parametrize("many", [False, True], ids=["one index", "three indices"])
def test_statistics_and_their_gradients(device, tile, many):
    hidden, weight, bias, target = batch(device, rows=(3, 4))
    mask = target != -100
    index = target.clamp(min=0)
    index = torch.stack([index, (index + 5) % V, index], dim=-1) if many else index
    options = {"temperature": 0.7, "softcap": 9.0, "logit_scale": 1.5}
    weights = torch.linspace(-1, 1, V, device=device)
    metrics = ("is_top1", "log_sum_sq_probs", "mean_logit")
    s = onepass.linear_softmax_statistics(
        hidden, weight, index, bias=bias, row_mask=mask, class_weights=weights, metrics=metrics, **options
    )
    parts = exact(hidden, weight, bias)
    expected = statistics(F.linear(*parts), index, row_mask=mask, class_weights=weights.double(), **options)
    ours, theirs = 0.0, 0.0
    for i, name in enumerate(vars(s)):
        assert_close(getattr(s, name), expected[name].detach(), scale=60.0, name=name)
        if name in ("log_normalizer", "expected_logit", "selected", "weighted_logit"):
            ours, theirs = ours + (i + 1) * getattr(s, name).sum(), theirs + (i + 1) * expected[name].sum()
    assert_all_close(gradients(ours, (hidden, weight, bias)), gradients(theirs, parts))


@pytest.mark.pairs
@pytest.mark.parametrize("reduction", ["mean", "sum", "none", "num_items"])
def test_a_policy_loss(device, tile, reduction):
    hidden, weight, bias, target = batch(device, rows=(2, 6))
    g = torch.Generator().manual_seed(1)
    advantages = torch.randn(target.shape, generator=g).to(device).requires_grad_()
    mask = target != -100
    with torch.no_grad():
        old = (
            onepass.linear_selective_log_softmax_and_entropy(hidden, weight, target, bias=bias, row_mask=mask)[0] + 0.1
        )
    options = {"num_items": 7} if reduction == "num_items" else {"reduction": reduction}
    got = onepass.linear_loss(hidden, weight, target, policy_loss, advantages, old, bias=bias, row_mask=mask, **options)
    h, w, b, a = exact(hidden, weight, bias, advantages)
    s = onepass.softmax_statistics(F.linear(h, w, b), target, row_mask=mask)
    rows = policy_loss(s, a, old.double()) * mask
    expected = {"mean": rows.sum() / mask.sum(), "sum": rows.sum(), "none": rows, "num_items": rows.sum() / 7}[
        reduction
    ]
    assert_all_close([got.detach()], [expected.detach()], "loss")
    assert_all_close(
        gradients((got * 3).sum(), (hidden, weight, bias, advantages)), gradients((expected * 3).sum(), (h, w, b, a))
    )


@pytest.mark.pairs
@pytest.mark.parametrize("direction", ["forward", "reverse", "jsd"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_teacher_with_a_head_of_its_own(device, tile, direction, reduction):
    hidden, weight, bias, target = batch(device)
    states, others, _, _ = batch(device, width=H + 4, seed=3)
    teacher = onepass.LinearLogits(states.detach(), others.detach())
    options = {"direction": direction, "reduction": reduction, "teacher_temperature": 2.0}
    got = onepass.linear_kl_div(hidden, weight, teacher, row_mask=target != -100, bias=bias, **options)
    parts = exact(hidden, weight, bias)
    expected = onepass.kl_div(
        F.linear(*parts), F.linear(states.double(), others.double()).detach(), row_mask=target != -100, **options
    )
    assert_all_close([got.detach()], [expected.detach()], "loss")
    assert_all_close(gradients(got.sum(), (hidden, weight, bias)), gradients(expected.sum(), parts))


def test_the_shorthands(device):
    hidden, weight, bias, target = batch(device)
    x = onepass.LinearLogits(hidden, weight, bias)
    ids, log_probs = teacher_tokens(target)
    options = {"row_mask": target != -100, "direction": "jsd"}
    class_weights = torch.rand(V, device=device)
    module = onepass.LinearCrossEntropyLoss(class_weights=class_weights, label_smoothing=0.1, reduction="sum")
    pairs = [
        (onepass.linear_topk_kl_div(hidden, weight, ids, log_probs, bias=bias, **options),
         onepass.topk_kl_div(x, ids, log_probs, **options)),
        (module(hidden, weight, target, bias=bias),
         onepass.cross_entropy(x, target, class_weights=class_weights, label_smoothing=0.1, reduction="sum")),
        (onepass.kl_div(F.linear(hidden, weight, bias), x), torch.zeros((), device=device)),
        (onepass.linear_cross_entropy(hidden, weight, target), F.cross_entropy(F.linear(hidden, weight), target)),
    ]  # fmt: skip
    for got, expected in pairs:
        assert_all_close([got.detach()], [expected.detach()], "loss")
    assert "label_smoothing=0.1" in repr(module) and "class_weights" in module.state_dict()


# Precision.


def skip_interpreter(device):
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("the interpreter does not round to the nearest bfloat16")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("loss", ["cross_entropy", "pair", "kl_div"])
def test_no_further_from_float64_than_torch(device, monkeypatch, dtype, loss):
    """Gradients, of one tile and of many, against torch's own path in the same dtype."""
    skip_interpreter(device)
    many = 512 if device.type == "cuda" else 128  # of fewer, single roundings make a difference of 5%
    hidden, weight, bias, target = batch(device, dtype, rows=(many,), width=64)
    parts = exact(hidden, weight, bias)
    expected = gradients(LOSSES[loss](F.linear(*parts), target).sum(), parts)
    x = F.linear(hidden, weight, bias).float()
    eager = {
        "cross_entropy": lambda: F.cross_entropy(x, target),
        "pair": lambda: torch.stack(log_softmax_and_entropy(9.0 * torch.tanh(x / 9.0), target.abs() % V)).sum(),
        "kl_div": lambda: torch_kl(x, teacher_logits(target), target != -100),
    }[loss]()
    theirs = gradients(eager, (hidden, weight, bias))
    for rows in (1000, 7):
        tiles_of(monkeypatch, rows)
        got = gradients(LOSSES[loss](onepass.LinearLogits(hidden, weight, bias), target).sum(), (hidden, weight, bias))
        for name, g, t, e in zip(("hidden", "weight", "bias"), got, theirs, expected):
            assert g.dtype == dtype
            ours, torchs = ((x.double() - e).norm().item() for x in (g, t))
            assert ours <= 1.05 * torchs, (name, rows, ours, torchs)


def log_softmax_and_entropy(x, target):
    log_p = x.log_softmax(-1)
    return log_p.gather(-1, target.unsqueeze(-1)).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


def torch_kl(x, teacher, kept):
    rows = F.kl_div(x.log_softmax(-1), teacher.log_softmax(-1), reduction="none", log_target=True).sum(-1)
    return (rows * kept).sum() / kept.sum()


def test_a_loss_scale_keeps_float16_gradients(device):
    """Gradients of a mean over many rows vanish in float16 unless the scale of the loss meets them first."""
    hidden, weight, _, _ = batch(device, torch.float16, rows=(64,))
    target = torch.zeros(64, dtype=torch.long, device=device)
    loss = onepass.linear_loss(hidden, weight, target, lambda s: -s.log_probs, num_items=2.0**20, bias=None)
    got = gradients(loss * 2.0**16, (hidden, weight))
    parts = exact(hidden, weight)
    expected = gradients(F.cross_entropy(F.linear(*parts), target, reduction="sum") / 16, parts)
    for g, e in zip(got, expected):
        assert (g.double() - e).norm() <= 2e-3 * e.norm()


@pytest.mark.pairs
@pytest.mark.parametrize("products", ["three", "four"])
def test_autocast(device, tile, products):
    """Products in bfloat16, parameters and their gradients in float32, which is where the sums stay."""
    skip_interpreter(device)
    hidden, weight, bias, target = batch(device, rows=(40,))
    kept = target != -100
    with torch.autocast(device.type, torch.bfloat16):
        if products == "three":
            got = onepass.linear_cross_entropy(hidden, weight, target, bias=bias)
        else:
            s = onepass.linear_softmax_statistics(hidden, weight, target.clamp(min=0), bias=bias, row_mask=kept)
            got = -s.log_probs.sum() / kept.sum()
        expected = F.cross_entropy(F.linear(hidden, weight, bias).float(), target)
    ours, theirs = (gradients(loss, (hidden, weight, bias)) for loss in (got, expected))
    parts = exact(hidden, weight, bias)
    best = gradients(F.cross_entropy(F.linear(*parts), target), parts)
    for g, t, e in zip(ours, theirs, best):
        assert g.dtype == torch.float32
        assert (g.double() - e).norm() <= 1.05 * (t.double() - e).norm()


HARD = {
    "a masked half of the vocabulary": lambda h, w, b: (h, w, b.index_fill(0, torch.arange(V // 2), -float("inf"))),
    "magnitudes of 1e4": lambda h, w, b: (h * 1e2, w * 1e2, b),
    "a row of NaN": lambda h, w, b: (h.index_fill(0, torch.tensor([1]), float("nan")), w, b),
    "a row of infinities": lambda h, w, b: (h.index_fill(0, torch.tensor([1]), float("inf")), w.abs(), b),
    "zeros": lambda h, w, b: (h * 0, w, b * 0),
}


@pytest.mark.pairs
@pytest.mark.parametrize("inputs", HARD)
def test_hard_inputs(device, tile, inputs):
    hidden, weight, bias, target = batch("cpu")
    hard = [x.detach().to(device).requires_grad_() for x in HARD[inputs](hidden, weight, bias)]
    target = target.to(device) % V  # of the upper half where the lower is masked
    target = torch.where(target < V // 2, target + V // 2, target)
    got = onepass.linear_selective_log_softmax_and_entropy(hard[0], hard[1], target, bias=hard[2])
    with torch.no_grad():
        logits = F.linear(*(x.double() for x in hard))
    expected = statistics(logits, target)
    for value, name in zip(got, ("log_probs", "entropy")):
        assert_close(value.detach(), expected[name], scale=1e4 if "1e4" in inputs else 10.0, name=name)
    if "row" in inputs:  # the other rows' hidden states still have their gradients
        (gradient,) = gradients(sum(o.sum() for o in got), hard[:1])
        assert gradient[1].isnan().any() and gradient[[0, 2]].isfinite().all()
    else:
        parts = exact(*hard)
        theirs = onepass.selective_log_softmax_and_entropy(F.linear(*parts), target)
        ours = gradients(sum(o.sum() for o in got), hard)
        # The backward's products may add theirs in another order: a logit may be two roundings away from the forward's,
        # and its probability by that factor.
        bound = 2 * torch.finfo(torch.float32).eps * logits.abs().max() if "1e4" in inputs else 1e-5
        for g, e in zip(ours, gradients(sum(o.sum() for o in theirs), parts)):
            assert (g.double() - e).norm() <= bound * (e.norm() + 1e-3)


def test_an_index_outside_the_vocabulary(device, raises_index_error):
    hidden, weight, _, target = batch(device)
    target[5] = V
    if raises_index_error:
        with pytest.raises(IndexError, match=rf"target: expected values in \[0, {V}\), got {V} in row 5"):
            onepass.linear_cross_entropy(hidden, weight, target)
        with pytest.raises(IndexError, match="index: expected"):
            onepass.linear_softmax_statistics(hidden, weight, target, row_mask=target != -100)
    else:
        loss = onepass.linear_cross_entropy(hidden, weight, target, reduction="none")
        assert loss[5].isnan() and loss[[0, 1, 2, 3, 4, 6]].isfinite().all()


@pytest.mark.parametrize("frozen", [False, True])
def test_no_valid_row_and_an_infinite_upstream_gradient(device, frozen):
    """As of a sum that is divided by the 0 labels of a batch: the gradient is 0, as torch's, and not NaN."""
    hidden, weight = torch.randn(6, 8, device=device), torch.randn(17, 8, device=device)
    hidden.requires_grad_(), weight.requires_grad_(not frozen)
    target = torch.full((6,), -100, device=device)
    parts = [p for p in (hidden, weight) if p.requires_grad]
    losses = (
        onepass.linear_cross_entropy(hidden, weight, target, reduction="sum"),
        onepass.linear_loss(hidden, weight, target.clamp(0), lambda s: s.entropy, row_mask=target > 0, reduction="sum"),
    )
    for loss in losses:
        for gradient in torch.autograd.grad(loss / 0, parts):
            assert not gradient.any()


# What is refused.


def test_one_backward(device):
    hidden, weight, bias, target = batch(device)
    loss = onepass.linear_cross_entropy(hidden, weight, target, bias=bias)
    gradients_of = lambda: torch.autograd.grad(loss, hidden, retain_graph=True)  # noqa: E731
    gradients_of()
    with pytest.raises(RuntimeError, match="reduction='none'"):
        gradients_of()
    rows = onepass.linear_cross_entropy(hidden, weight, target, bias=bias, reduction="none").sum()
    first, second = (torch.autograd.grad(rows, hidden, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    with pytest.raises(RuntimeError, match="second derivatives"):
        torch.autograd.grad(rows, hidden, create_graph=True)


@pytest.mark.parametrize("how", ["eager", "rows", "compiled"])
def test_what_masked_rows_hold_is_not_read(how, monkeypatch):
    """Also not by the gradient of row inputs: 0 times NaN is NaN."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    hidden, weight = torch.randn(2, 3, H), torch.randn(V, H)
    target, mask = torch.randint(V, (2, 3)), torch.tensor([[1, 0, 1], [1, 1, 0]]).bool()
    old = torch.randn(2, 3).masked_fill(~mask, float("nan"))
    old[1, 2] = float("-inf")

    def loss(old):
        reduction = "none" if how == "rows" else "sum"
        return onepass.linear_loss(
            hidden, weight, target, lambda s, a: (s.log_probs - a).exp(), old, row_mask=mask, reduction=reduction
        ).sum()

    traced = torch.compile(loss, backend="aot_eager") if how == "compiled" else loss
    leaf = old.clone().requires_grad_()
    (found,) = torch.autograd.grad(traced(leaf), leaf)
    exact = old.masked_fill(~mask, 0.0).requires_grad_()
    log_probs = (hidden @ weight.T).log_softmax(-1).gather(-1, target[..., None])[..., 0]
    (expected,) = torch.autograd.grad((log_probs - exact).exp()[mask].sum(), exact)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


LEARNED = torch.ones(1, requires_grad=True)
BAD_FUNCTIONS = {
    "a sum": (lambda s: s.log_probs.sum(), "loss_fn: expected a loss of every row"),
    "no tensor": (
        lambda s: 1.0,
        r"loss of every row, floating-point of shape \(11,\) on .*, got 1.0",
    ),
    "another device": (lambda s: s.log_probs.to("meta"), r"of shape \(11,\) on .*, got .* on meta"),
    "a sparse one": (lambda s: s.log_probs.to_sparse(), "loss_fn: expected a loss of every row"),
    "eight bits": (lambda s: s.log_probs.to(torch.float8_e4m3fn), "loss_fn: expected a loss of every row"),
    "many a row": (lambda s: s.log_probs.unsqueeze(-1), "loss_fn: expected a loss of every row"),
    "a closure": (lambda s: s.log_probs * LEARNED, "among row_inputs"),
    "coupled rows": (lambda s: s.log_probs - s.log_probs.mean(), "loss of each row alone"),
}


@pytest.mark.parametrize("function", BAD_FUNCTIONS)
def test_loss_functions_that_cannot_be(function):
    hidden, weight, _, target = batch("cpu")
    loss_fn, message = BAD_FUNCTIONS[function]
    with pytest.raises(ValueError, match=message):
        onepass.linear_loss(hidden, weight, target % V, loss_fn)


def linear(**changes):
    hidden, weight, bias, _ = batch("cpu")
    return onepass.LinearLogits(**({"hidden": hidden, "weight": weight, "bias": bias} | changes))


BAD_ARGUMENTS = {
    "hidden: expected a floating-point tensor, got torch.int64": lambda: linear(hidden=torch.ones(2, H).long()),
    "weight: expected a floating-point tensor, got None": lambda: linear(weight=None),
    r"weight: expected shape \(V, H\) for hidden states \(..., H\), got \(83, 18\)": lambda: linear(
        weight=torch.ones(V, H - 1)
    ),
    r"bias: expected shape \(83,\), got \(82,\)": lambda: linear(bias=torch.ones(V - 1)),
    "weight: expected torch.float32, the dtype of hidden, got torch.bfloat16": lambda: linear(
        weight=torch.ones(V, H, dtype=torch.bfloat16)
    ),
    r"hidden: expected a dense tensor, got a torch.sparse_coo one": lambda: linear(hidden=torch.eye(H).to_sparse()),
    r"target: expected a dense tensor": lambda: onepass.cross_entropy(torch.eye(3), torch.arange(3).to_sparse()),
    r"logits: expected a dense tensor, got a nested one": lambda: onepass.entropy_from_logits(
        torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)])
    ),
    r"row_mask: expected a dense tensor": lambda: onepass.entropy_from_logits(
        torch.eye(3), row_mask=torch.ones(3).bool().to_sparse()
    ),
    r"lora\[0\]: expected shape \(0, 19\), with a rank of at least 1, for": lambda: onepass.LinearLogits(
        torch.ones(2, H), torch.ones(V, H), lora=(torch.ones(0, H), torch.ones(V, 0), 1.0)
    ),
    "max_memory: expected an int, got 1.5": lambda: linear(max_memory=1.5),
    "max_memory: expected at least [0-9]+ bytes": lambda: onepass.entropy_from_logits(linear(max_memory=1000)),
    "row_inputs: expected tensors, got 3": lambda: onepass.linear_loss(*batch("cpu")[:2], None, policy_loss, 3),
    r"row_inputs: expected shapes \(11, '...'\), got \(4,\)": lambda: onepass.linear_loss(
        *batch("cpu")[:2], None, policy_loss, torch.ones(4)
    ),
    r"row_mask: expected shape \(11,\), got \(3,\)": lambda: onepass.entropy_from_logits(
        linear(), row_mask=torch.ones(3, dtype=torch.bool)
    ),
    "temperature: expected a finite number above 0": lambda: onepass.entropy_from_logits(linear(), temperature=0.0),
    "inplace_backward: expected a tensor of logits": lambda: onepass.entropy_from_logits(
        linear(), inplace_backward=True
    ),
    "inplace_backward: expected a tensor of logits, got LinearLogits": lambda: onepass.cross_entropy(
        linear(), torch.zeros(N, dtype=torch.long), inplace_backward=True
    ),
    "teacher_logits: expected logits that require no gradient": lambda: onepass.kl_div(linear(), linear()),
    "num_items: expected None": lambda: onepass.linear_loss(
        *batch("cpu")[:2], None, policy_loss, reduction="none", num_items=3
    ),
}


@pytest.mark.parametrize("message", BAD_ARGUMENTS)
def test_one_clear_error(message):
    with pytest.raises((TypeError, ValueError), match=message):
        BAD_ARGUMENTS[message]()
