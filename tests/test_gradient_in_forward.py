"""Means and sums of a loss of logits. The forward computes their gradient for a guess at the upstream gradient."""

import math
import sys
from contextlib import nullcontext

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import onepass
from definition import assert_close
from onepass.backend import backend_of
from onepass.core.options import Average
from onepass.logits import source
from onepass.softmax import statistics as primitive

cross_entropy = sys.modules["onepass.losses.cross_entropy"]


@pytest.fixture(params=(72, 77), ids=("one read", "two reads"))
def batch(device, request):
    """Logits that require a gradient, whose rows start on 16 bytes or not, and targets, of which one is ignored."""
    generator = torch.Generator().manual_seed(3)
    target = torch.randint(request.param, (6,), generator=generator)
    target[1] = -100
    return torch.randn(6, request.param, generator=generator).to(device).requires_grad_(), target.to(device)


@pytest.mark.parametrize("dtype", (torch.bool, torch.int64, torch.float32))
@pytest.mark.parametrize("rows", (0, 1, 5, 1024, 2500))
def test_row_average(device, rows, dtype):
    """The kernels, which plain losses are reduced with, against their definition."""
    values = torch.randn(rows, generator=torch.Generator().manual_seed(rows)).to(device)
    mask = (torch.arange(rows, device=device) % 3 != 1).to(dtype)
    values[mask == 0] = float("nan")  # a masked row is not read
    kept = values[mask != 0].double()
    logits, backend = values.new_empty(rows, 2), backend_of(values)
    three = torch.tensor(3, device=device)
    third = Average(1.0, False, three), kept.sum() / 3
    for average, expected in ((Average(-1.0, True), -kept.mean()), (Average(2.0), 2 * kept.sum()), third):
        for last in (None, torch.tensor([5.0, 7.0, 3.0], device=device)):
            share = backend.compute_row_weight(logits, mask, average, last)[:2]
            total, again = backend.row_average(values, mask, average)
            assert_close(backend.row_average(values, mask, average, share)[0], total)
            assert again.tolist() == share[:1].tolist() or math.isnan(again)
            targets, of_targets = torch.where(mask == 0, -100, 3), average._replace(masked=-100)
            assert_close(backend.row_average(values, targets, of_targets)[0], total)
            assert_close(backend.compute_row_weight(logits, targets, of_targets, last)[:2], share)
            torch.testing.assert_close(total.double(), expected, rtol=1e-6, atol=1e-5, equal_nan=True)
            part = {-1.0: -1 / len(kept) if len(kept) else -math.inf, 2.0: 2.0, 1.0: 1 / 3}[average.factor]
            assert share.tolist() == pytest.approx([part, part if last is None else 3 * part])
    assert_close(backend.row_average(values.where(mask != 0, 0.0), None, average)[0], total)


UPSTREAM = (1.0, 1.0, 2.0, 2.0, 1 / 3, 65536.0, 0.0, math.nan, 1.0)


@pytest.fixture(params=(512, 4), ids=("few rows", "many rows"))
def early(monkeypatch, request):
    """Gradients of few logits are computed in the forward too, as those of many are, with the average or without."""
    monkeypatch.setattr(pytest.importorskip("onepass.kernels.softmax_gradient"), "LEAST_EARLY", 0)
    for module in ("softmax_loss", "prepared_average"):
        monkeypatch.setattr(sys.modules[f"onepass.kernels.{module}"], "FEW_ROWS", request.param)
    monkeypatch.setattr(sys.modules["onepass.softmax.prepared_average"], "_known", {})
    monkeypatch.setattr(sys.modules["onepass.kernels.softmax_loss"], "LEAST_LOGITS", 0)
    monkeypatch.setattr(primitive, "LEAST_VOCABULARY", 0)


@pytest.mark.pairs
@pytest.mark.parametrize("shape", [(5, 70), (5, 72), (2, 3, 129), (2, 3, 128)])
def test_the_gradient_of_a_mean_is_that_of_its_upstream_gradient(device, early, shape):
    """Whatever that of the last call was, from which the forward computes a gradient that the backward may correct."""
    generator = torch.Generator(device).manual_seed(5)
    for n, upstream in enumerate(UPSTREAM):
        x = torch.randn(shape, device=device, generator=generator).bfloat16().requires_grad_()
        target = torch.randint(shape[-1], shape[:-1], device=device, generator=generator)
        target.view(-1)[1] = -100
        (found,) = torch.autograd.grad(onepass.cross_entropy(x, target) * upstream, x)
        part = backend_of(x).compute_row_weight(x, target != -100, Average(-1.0, True))[
            0
        ]  # -1 / rows, as the device rounds it
        scaled = torch.tensor(upstream, device=device) * part
        rows = -onepass.cross_entropy(x, target, reduction="none")
        (expected,) = torch.autograd.grad(rows, x, scaled.expand(target.shape))
        assert torch.equal(found.nan_to_num(), expected.nan_to_num()), (n, upstream)
        assert torch.equal(found.isnan(), expected.isnan())


REDUCED = ({"reduction": "mean"}, {"reduction": "sum"}, {"num_items": 3}, {"num_items": 2.5}, {"num_items": "tensor"})


@pytest.mark.pairs
@pytest.mark.parametrize("options", REDUCED, ids=str)
@pytest.mark.parametrize("logits", [{"temperature": 0.7, "logit_scale": -2.0}, {"temperature": "rows"}], ids=str)
def test_statistics_and_gradient_take_one_read(device, early, monkeypatch, options, logits):
    """The gradient is bitwise that of the backward, for a right guess of its upstream gradient and for wrong ones."""
    x = torch.randn(2, 5, 72, device=device).requires_grad_()
    target = torch.randint(72, (2, 5), device=device)
    target[0, 2], target[1, 3] = -100, 71
    items = torch.tensor(3, device=device)
    options = options | logits | ({"num_items": items} if options.get("num_items") == "tensor" else {})
    if logits.get("temperature") == "rows":
        options["temperature"] = torch.rand(2, 5, device=device) + 0.5
    reads, backend = [], backend_of(x)
    for name in ("softmax_average", "softmax_statistics", "softmax_gradient"):
        real = getattr(backend, name)
        monkeypatch.setattr(backend, name, lambda *a, n=name, f=real, **k: (reads.append(n), f(*a, **k))[1])
    launches = sys.modules["onepass.kernels.prepared_average"].PreparedAverage  # the same kernels
    for of_few, name in (("average", "softmax_average"), ("correct", "softmax_gradient")):
        real = getattr(launches, of_few)
        monkeypatch.setattr(launches, of_few, lambda *a, n=name, f=real: (reads.append(n), f(*a))[1])
    for upstream in (1.0, 2.0, 1 / 3, torch.tensor(0.3, device=device)):
        found = []
        for turn in range(2):  # a guess that is wrong, and then one that is right
            reads.clear()
            loss = onepass.cross_entropy(x, target, **options)
            found += torch.autograd.grad(loss * upstream, x)
            part, guessed, last = primitive.last_row_weight(x)[:3].tolist()
            assert last == pytest.approx(float(upstream)) and (turn == 0 or guessed == pytest.approx(part * last))
            assert reads == ["softmax_average", "softmax_gradient"]  # the second only compares, if the guess was right
        reads.clear()
        late = onepass.cross_entropy(x, target, **options, gradient_in_forward=False)
        (expected,) = torch.autograd.grad(late * upstream, x)
        assert reads == ["softmax_statistics", "softmax_gradient"]
        assert torch.equal(*found)
        assert_close(found[0], expected)
        assert_close(loss, late)
    onepass.cross_entropy(x, target).backward()  # the next test guesses 1


def few_rows_of(device, name):
    """Logits, targets and options of a call, by what is particular about them."""
    generator = torch.Generator().manual_seed(7)
    shape = {"few dimensions": (96,), "more dimensions": (2, 2, 3, 96), "no rows": (0, 96)}
    x = torch.randn(shape.get(name, (6, 96)), generator=generator).to(device)
    target = torch.randint(x.shape[-1], x.shape[:-1], generator=generator).to(device)
    if target.numel() > 1 and name != "huge":
        target.view(-1)[1] = 0 if name == "0" else -100
    if name == "every other row":
        x = x.repeat_interleave(2, 0)[::2]
    elif name == "every other target":
        target = target.repeat_interleave(2)[::2]
    elif name == "not aligned":
        x = torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)
    elif name == "target not aligned":
        target = torch.cat([target.new_zeros(1), target])[1:]
    elif name == "negated target":
        target = torch._neg_view(-target)
    elif name == "float64":
        x = x.double()
    elif name in ("bfloat16", "float16"):
        x = x.to(getattr(torch, name))
    elif name == "int32":
        target = target.int()
    options = {
        "sum": {"reduction": "sum"}, "transformed": {"temperature": 0.7, "logit_scale": -2.0}, "0": {"ignore_index": 0},
        "rows": {"reduction": "none"}, "softcap": {"softcap": 3.0}, "z-loss": {"z_loss_weight": 0.1},
        "smoothed": {"label_smoothing": 0.1}, "in place": {"inplace_backward": True}, "items": {"num_items": 4},
        "late": {"gradient_in_forward": False}, "mask": {"row_mask": target != 3}, "huge": {"ignore_index": 1 << 40},
        "temperatures": {"temperature": torch.rand(6, device=device) + 0.5},
        "weights": {"class_weights": torch.rand(96, device=device)},
    }  # fmt: skip
    return x, target, options.get(name, {})


FEW = "", "sum", "transformed", "0", "bfloat16", "float16", "int32", "few dimensions", "more dimensions", "many rows"
OTHERS = (
    "rows", "softcap", "z-loss", "smoothed", "in place", "items", "late", "mask", "huge", "temperatures", "weights",
    "no rows", "every other row", "every other target", "not aligned", "target not aligned", "negated target",
    "float64", "too many rows",
)  # fmt: skip


WITHOUT = OTHERS[:1] + OTHERS[2:11]  # calls that are known by their options to be others


@pytest.mark.parametrize("name", (*FEW, *OTHERS))
def test_few_rows_are_computed_as_others(device, monkeypatch, name):
    """The result and the gradients, bitwise, for right and wrong guesses, and in two backwards of a call; the result
    without a gradient, too."""
    x, target, options = few_rows_of(device, name)
    if name == "many rows":
        for module in ("softmax_loss", "prepared_average"):
            monkeypatch.setattr(pytest.importorskip(f"onepass.kernels.{module}"), "FEW_ROWS", 5)
        monkeypatch.setattr(sys.modules["onepass.kernels.softmax_loss"], "LEAST_LOGITS", 0)
        monkeypatch.setattr(sys.modules["onepass.softmax.prepared_average"], "_known", {})
    if name == "too many rows":
        few = pytest.importorskip("onepass.kernels.prepared_average")
        assert few.MOST_ROWS == source.MOST_ROWS_OF_MEAN
        monkeypatch.setattr(few, "MOST_ROWS", 5)
        monkeypatch.setattr(sys.modules["onepass.softmax.prepared_average"], "_known", {})
    taken, average = [], cross_entropy.prepared_average

    def averages(*args):
        taken.append(average(*args))
        return taken[-1]

    found = []
    for function in (averages, lambda *_: None):
        monkeypatch.setattr(cross_entropy, "prepared_average", function)
        primitive._last.clear()
        found.append([])
        for upstream in (1.0, 3.0, 3.0):
            leaf = x.detach().clone(memory_format=torch.preserve_format) if name == "in place" else x.detach()
            loss = onepass.cross_entropy(leaf.requires_grad_(), target, **options)
            grad = torch.full_like(loss, upstream)
            twice = 1 if name == "in place" else 2
            grads = [torch.autograd.grad(loss, leaf, n * grad, retain_graph=n < twice)[0] for n in range(1, 1 + twice)]
            found[-1] += [loss.detach(), *[g.clone() for g in grads]]
        found[-1].append(onepass.cross_entropy(x.detach(), target, **options))
    assert all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(*found))
    on_kernels = backend_of(x).__name__ == "onepass.kernels"
    expected = [on_kernels and name in FEW] * 3 + [on_kernels and name in (*FEW, "softcap")]
    assert [t is not None for t in taken] == ([] if name in WITHOUT else expected)


@pytest.mark.parametrize("moved", ["logits", "hooks"])
def test_few_rows_that_are_elsewhere_in_the_backward(device, early, monkeypatch, moved):
    """Their gradient is corrected from where they are then."""
    x, target, _ = few_rows_of(device, "")
    found, hooks = [], (torch.clone, lambda saved: saved)
    for function in (cross_entropy.prepared_average, lambda *_: None):
        monkeypatch.setattr(cross_entropy, "prepared_average", function)
        for _ in range(3):  # launches are repeated from the third on
            leaf = x.detach().clone().requires_grad_()
            with torch.autograd.graph.saved_tensors_hooks(*hooks) if moved == "hooks" else nullcontext():
                loss = onepass.cross_entropy(leaf, target)
            if moved == "logits":
                leaf.data = 2 * x
            loss.backward(torch.full_like(loss, 3.0))
            onepass.cross_entropy(x.detach().requires_grad_(), target).backward()  # the next guess is 1
        found.append(leaf.grad)
    assert torch.equal(*found)


def test_every_backward_of_a_mean_has_a_gradient_of_its_own(batch, early):
    x, target = batch
    loss = onepass.cross_entropy(x, target)
    grads = [torch.autograd.grad(loss * n, x, retain_graph=True)[0] for n in (1, 2, 1)]
    kept = [g.clone() for g in grads]
    loss.backward()
    assert len({g.data_ptr() for g in (*grads, x.grad)}) == 4
    assert torch.equal(grads[0], grads[2]) and torch.equal(grads[0], x.grad)
    assert_close(grads[1], 2 * grads[0])
    assert all(torch.equal(a, b) for a, b in zip(grads, kept))
    loss = onepass.cross_entropy(x, target)
    with torch.no_grad():
        x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_backward_frees_what_it_needed(device, early):
    """Even if the loss is kept, as in a list for a plot."""
    x, target, _ = few_rows_of(device, "")
    loss = onepass.cross_entropy(x.requires_grad_(), target)
    node = loss.grad_fn
    loss.backward()
    assert not any(isinstance(v, torch.Tensor) for v in getattr(node, "made", ()))
    with pytest.raises(RuntimeError, match="after they have already been freed"):
        _ = node.saved_tensors


def test_the_guess_of_another_dtype_is_left_alone(batch, early):
    """A kernel would compute in float64."""
    x, target = batch
    first = torch.autograd.grad(onepass.cross_entropy(x, target) / 3, x)[0]
    y = x.detach().double().requires_grad_()
    (onepass.cross_entropy(y, target) / 3).backward()
    assert torch.equal(torch.autograd.grad(onepass.cross_entropy(x, target) / 3, x)[0], first)


def test_a_gradient_that_was_given_away_may_be_written_to(batch, early):
    x, target = batch
    loss = onepass.cross_entropy(x, target)
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    kept = first.clone()
    first.mul_(2)
    assert torch.equal(torch.autograd.grad(loss, x)[0], kept)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_batched_gradients_are_refused(batch, early, reduction):
    """And leave no guess for the next loss."""
    x, target = batch
    loss = onepass.cross_entropy(x, target, reduction=reduction)
    upstream = torch.ones(2, *loss.shape, device=x.device)
    with pytest.raises(NotImplementedError, match="batched gradients"):
        torch.autograd.grad(loss, x, upstream, is_grads_batched=True)
    onepass.cross_entropy(x, target).backward()
    assert x.grad.isfinite().all()


def test_a_checkpoint_keeps_no_gradient_of_a_mean(batch, early):
    """Nor anything else that the forward has computed."""
    x, target = batch
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t.shape) or t, lambda t: t):
        loss = onepass.cross_entropy(x, target)
    assert seen.count(x.shape) == 2
    (expected,) = torch.autograd.grad(loss, x)
    loss = checkpoint(lambda x: onepass.cross_entropy(x, target), x, use_reentrant=False)
    assert_close(torch.autograd.grad(loss, x)[0], expected)


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_what_is_no_plain_tensor_has_the_error_of_others(batch):
    x, target = batch
    with pytest.raises(TypeError, match=r"logits: expected a float16.*got None"):
        onepass.cross_entropy(None, target)
    with pytest.raises(TypeError, match="target: expected an int32 or int64 tensor, got None"):
        onepass.cross_entropy(x, None)
    with pytest.raises(ValueError, match="target: expected shape"):
        onepass.cross_entropy(x, torch.tensor([[1, 0], [2, 3]], device=x.device).to_sparse_csr())
    with pytest.raises(RuntimeError, match="functorch transforms"):
        torch.func.grad(lambda x: onepass.cross_entropy(x, target))(x.detach())


@pytest.mark.parametrize("upstream", (1.0, 3.0))
@pytest.mark.parametrize("layout", ("longer rows", "columns"))
def test_what_hooks_unpack_may_have_another_layout(batch, early, upstream, layout):
    """As if it had been saved in memory with longer rows, or column by column."""
    x, target = batch

    def unpack(t):
        if layout == "columns":
            return t.mT.contiguous().mT if t.dim() > 1 else t
        wide = torch.full((*t.shape[:-1], t.shape[-1] + 8), 5, dtype=t.dtype, device=t.device) if t.dim() else t
        return wide[..., : t.shape[-1]].copy_(t) if t.dim() else t

    (expected,) = torch.autograd.grad(onepass.cross_entropy(x, target), x, torch.full((), upstream, device=x.device))
    torch.autograd.grad(onepass.cross_entropy(x, target), x)  # which predicts an upstream gradient of 1
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), unpack):
        loss = onepass.cross_entropy(x, target)
    assert_close(torch.autograd.grad(loss, x, torch.full((), upstream, device=x.device))[0], expected)


def test_the_mean_of_more_rows_than_one_program_reduces(device, monkeypatch):
    x, t = torch.randn(6, 9, device=device, requires_grad=True), torch.tensor([1, -100, 3, 8, 0, 2], device=device)
    losses, grads = [], []
    for most in (6, 5):
        monkeypatch.setattr(source, "MOST_ROWS_OF_MEAN", most)
        losses.append(onepass.cross_entropy(x, t))
        grads += torch.autograd.grad(losses[-1], x)
    assert_close(*losses)
    assert_close(*grads)
    losses[0] /= 2  # a loss may be written to


@pytest.mark.parametrize("at", [1.0, 3.0])
def test_upstream_gradients_anywhere_in_memory(batch, early, at):
    """Not aligned, expanded, negated."""
    x, target = batch
    (expected,) = torch.autograd.grad(onepass.cross_entropy(x, target) * at, x)
    number = torch.tensor([0.0, at], device=x.device)
    for upstream in (number[1], number[1:].expand(3)[2], torch._neg_view(-number[1])):
        assert torch.equal(torch.autograd.grad(onepass.cross_entropy(x, target), x, upstream)[0], expected)


@pytest.mark.parametrize(
    "change", [lambda t: t[1:].view(-1), lambda t: t.double(), lambda t: t.repeat_interleave(2)[::2]]
)
def test_a_row_weight_of_another_layout_is_not_kept(batch, change):
    """Hooks may have changed it, and the next forward reads it by its address."""
    x, _ = batch
    primitive._last.clear()
    row_weight = torch.ones(8, device=x.device)
    primitive.keep_row_weight(x, change(row_weight))
    assert primitive.last_row_weight(x) is None
    primitive.keep_row_weight(x, row_weight)
    assert primitive.last_row_weight(x) is row_weight
    primitive._last.clear()
