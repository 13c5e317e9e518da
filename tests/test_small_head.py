"""Heads of few rows, whose logits are computed at once: values, gradients, which heads these are, and refusals."""

from contextlib import nullcontext

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import onepass
from linear_cases import assert_all_close, batch, gradients
from onepass.logits import small_head
from onepass.logits import tiled_loss as head_loss
from onepass.logits.observer import Metrics

pytestmark = pytest.mark.usefixtures("uninitialised_memory_is_nan")


SMALL = {"mean": {}, "sum": {"reduction": "sum", "softcap": 9.0}, "num_items": {"num_items": 3, "temperature": 0.7}}


@pytest.mark.parametrize("options", SMALL)
def test_logits_of_few_rows_are_computed_at_once(device, monkeypatch, options):
    """What masked rows hold, NaN too, reaches no gradient; nobody counts them."""
    hidden, weight, bias, target = batch(device, rows=(3, 4))
    parts = hidden, weight, bias
    expected = onepass.cross_entropy(onepass.LinearLogits(*parts), target, **SMALL[options])
    expected = expected.detach(), gradients(expected, parts)
    monkeypatch.setattr(small_head, "SMALL_ON", (device.type,))
    monkeypatch.setattr(head_loss, "plan", lambda *arguments: pytest.fail("tiles"))
    with torch.no_grad():
        hidden[target == -100] = torch.nan
    got = onepass.cross_entropy(onepass.LinearLogits(*parts), target, **SMALL[options])
    assert_all_close([got.detach()], [expected[0]], "loss")
    assert_all_close(gradients(got, parts), expected[1])


@pytest.mark.parametrize("small", [False, True])
def test_masked_rows_under_a_weight_that_is_nan(device, monkeypatch, small):
    """Their gradient is 0, and not 0 times NaN."""
    monkeypatch.setattr(small_head, "SMALL_ON", (device.type,) if small else ())
    hidden, weight, _, target = batch(device)
    with torch.no_grad():
        weight[3] = torch.nan
    (found,) = gradients(onepass.linear_cross_entropy(hidden, weight, target), (hidden,))
    masked = target == -100
    assert not found[masked].any() and found[~masked].isnan().all()


@pytest.mark.parametrize("of_hidden", [True, False])
@pytest.mark.parametrize("changed", ["hidden", "target"])
@pytest.mark.parametrize("count", [7, 22])
def test_data_of_few_rows_that_is_replaced_before_the_backward(device, monkeypatch, changed, count, of_hidden):
    """No kernel reads beyond it."""
    monkeypatch.setattr(small_head, "SMALL_ON", (device.type,))
    hidden, weight = torch.randn(11, 8, device=device), torch.randn(37, 8, device=device, requires_grad=True)
    target = torch.zeros(11, dtype=torch.long, device=device)
    loss = onepass.cross_entropy(onepass.LinearLogits(hidden.requires_grad_(of_hidden), weight), target)
    of = {"hidden": hidden, "target": target}[changed]
    of.data = of.data.new_zeros(count, *of.shape[1:])
    with pytest.raises(RuntimeError, match="invalid for input of size"):
        loss.backward()


def test_which_logits_are_few(device, monkeypatch):
    def is_small(hidden=None, weight=None, index=None, **options):
        given = torch.zeros(11, 8, device=device), torch.zeros(37, 8, device=device, requires_grad=True)
        hidden, weight = given[0] if hidden is None else hidden, given[1] if weight is None else weight
        return small_head.small_logits(onepass.LinearLogits(hidden, weight, **options), index, 0) is not None

    monkeypatch.setattr(small_head, "SMALL_ON", (device.type,))
    hidden, weight = torch.zeros(11, 8, device=device), torch.zeros(37, 8, device=device)
    assert is_small() and not is_small(max_memory=1 << 20) and not is_small(weight=weight)
    assert not is_small(hidden.half(), weight.half().requires_grad_())
    low = torch.zeros(2, 8, device=device), torch.zeros(37, 2, device=device), 1.0
    assert not is_small(lora=low)
    for name, value in (("observer", Metrics()), ("round_before_bias", True)):
        with monkeypatch.context() as patched:
            patched.setattr(onepass.LinearLogits, name, value)
            assert not is_small()
    assert not is_small(hidden.bfloat16(), weight.bfloat16().requires_grad_(), logits_dtype=torch.float32)
    with torch.no_grad():
        assert not is_small()
    with torch.inference_mode():
        index = torch.zeros(11, dtype=torch.long, device=device)
    assert not is_small(index=index)
    with onepass.batch_invariant():
        assert not is_small()
    onepass.gather_parameters(lambda parameters: nullcontext())
    assert not is_small()  # autograd would save a weight that is partitioned again
    onepass.gather_parameters(None)
    for name, least in (("SMALL_PRODUCT", 11 * 8 * 37), ("SMALL_LOGITS", 11 * 37 * 4)):
        monkeypatch.setattr(small_head, name, least)
        assert is_small()
        monkeypatch.setattr(small_head, name, least - 1)
        assert not is_small()
        monkeypatch.setattr(small_head, name, least)


def test_a_mode_that_is_entered_for_the_backward_sees_it(device, monkeypatch):
    monkeypatch.setattr(small_head, "SMALL_ON", (device.type,))
    hidden, weight, bias, target = batch(device)
    parts = hidden, weight, bias
    expected = gradients(onepass.linear_cross_entropy(hidden, weight, target, bias=bias), parts)
    loss = onepass.linear_cross_entropy(hidden, weight, target, bias=bias)
    monkeypatch.setattr(small_head, "backend_of", lambda *tensors: pytest.fail("not seen"))
    with FlopCounterMode(display=False) as counter:
        found = gradients(loss, parts)
    assert counter.get_total_flops() == 2 * 2 * len(hidden) * weight.numel()
    assert_all_close(found, expected)
