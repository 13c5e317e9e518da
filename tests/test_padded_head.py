"""A linear head whose weight has more rows than there are classes: ``vocab_size``."""

import pytest
import torch
import torch.nn.functional as F

import onepass
from definition import assert_close
from linear_cases import H, N, V, assert_all_close, batch, exact, gradients

pytestmark = pytest.mark.usefixtures("uninitialised_memory_is_nan")


@pytest.mark.parametrize("adapted", [False, True], ids=["plain", "with an adapter"])
def test_padding_of_the_vocabulary(device, tile, adapted):
    """The rows of the weight from ``vocab_size`` on are in no softmax, and have no gradient."""
    hidden, weight, bias, target = batch(device)
    A, B = (t.requires_grad_() for t in (torch.randn(3, H, device=device), torch.randn(V, 3, device=device)))
    low = {"lora": (A, B, 0.5)} if adapted else {}
    tensors = (hidden, weight, bias, *((A, B) if adapted else ()))
    kept = V - 5
    target = target.clamp(max=kept - 1)
    got = onepass.linear_cross_entropy(hidden, weight, target, bias=bias, vocab_size=kept, **low)
    h, w, b, *factors = exact(*tensors)
    logits = F.linear(h, w, b) + (0.5 * (h @ factors[0].T) @ factors[1].T if adapted else 0.0)
    expected = F.cross_entropy(logits[..., :kept].flatten(0, -2), target.flatten())
    assert_all_close([got.detach()], [expected.detach()], "loss")
    found = gradients(got, tensors)
    assert_all_close(found, gradients(expected, (h, w, b, *factors)))
    assert not found[1][kept:].any()
    assert onepass.LinearLogits(hidden, weight, bias, vocab_size=kept, **low).shape == (*hidden.shape[:-1], kept)


@pytest.mark.parametrize("size", [V - 5, V])
def test_class_weights_of_padding(device, size):
    hidden, weight, _, target = batch(device)
    target, every = target.clamp(max=V - 6), torch.rand(V, device=device) + 0.5
    got = onepass.linear_cross_entropy(hidden, weight, target, class_weights=every[:size], vocab_size=V - 5)
    assert_close(got, F.cross_entropy(F.linear(hidden, weight)[:, : V - 5], target, every[: V - 5]))


def test_padding_cut_where_gradients_are_disabled(device):
    """The parameters have a gradient if the loss is computed where gradients are enabled, as without padding."""
    hidden, weight, bias, target = batch(device)
    with torch.no_grad():
        logits = onepass.LinearLogits(hidden, weight, bias, vocab_size=V - 5)
    onepass.cross_entropy(logits, target.clamp(max=V - 6)).backward()
    assert all(t.grad.any() for t in (hidden, weight, bias))


@pytest.mark.parametrize("adapted", [False, True], ids=["plain", "with an adapter"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_padding_that_a_divergence_does_not_compare(device, tile, adapted, reduction):
    """The parameters of columns that are not compared reach no gradient, whatever they hold."""
    hidden, weight, bias, _ = batch(device)
    A, B = torch.randn(3, H, device=device, requires_grad=True), torch.randn(V, 3, device=device)
    kept, teacher = V - 5, torch.randn(N, V - 5, device=device)
    with torch.no_grad():
        for padded in (weight, B):
            padded[kept:] = float("nan")
    low = {"lora": (A, B.requires_grad_(), 0.5)} if adapted else {}
    tensors = (hidden, weight, bias, *((A, B) if adapted else ()))
    got = onepass.linear_kl_div(hidden, weight, teacher, bias=bias, vocab_size=kept, reduction=reduction, **low)
    h, w, b, *factors = exact(*tensors)
    logits = F.linear(h, w[:kept], b[:kept]) + (0.5 * (h @ factors[0].T) @ factors[1][:kept].T if adapted else 0.0)
    teacher = teacher.double().log_softmax(-1)
    expected = (teacher.exp() * (teacher - logits.log_softmax(-1))).sum(-1)
    expected = expected.mean() if reduction == "mean" else expected
    assert_all_close([got.detach()], [expected.detach()], "loss")
    assert_all_close(gradients(got.sum(), tensors), gradients(expected.sum(), (h, w, b, *factors)))
