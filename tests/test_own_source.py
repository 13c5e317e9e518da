"""A source of logits that onepass does not know goes through every loss."""

import pytest
import torch

import onepass
from linear_cases import LOSSES as EVERY_LOSS
from linear_cases import V, assert_all_close, batch, gradients
from onepass.logits.source import LogitsSource


class SumOfLogits(LogitsSource):
    """The logits of two models, added: as contrastive decoding or an ensemble has them."""

    def __init__(self, first, second):
        self.first, self.second = first, second
        self.shape, self.dtype, self.device = first.shape, first.dtype, first.device

    @property
    def requires_grad(self):
        return self.first.requires_grad or self.second.requires_grad

    def materialize(self):
        return self.first + self.second


@pytest.mark.parametrize("loss", EVERY_LOSS)
def test_every_loss(device, loss):
    *_, target = batch(device)
    generator = torch.Generator().manual_seed(3)
    pair = [torch.randn(*target.shape, V, generator=generator).to(device).requires_grad_() for _ in range(2)]
    got, expected = (EVERY_LOSS[loss](x, target) for x in (SumOfLogits(*pair), sum(pair)))
    assert_all_close([got.detach()], [expected.detach()], "loss")
    assert_all_close(gradients(got.sum(), pair), gradients(expected.sum(), pair))


def test_a_source_of_ones_own_as_a_teacher(device):
    x = torch.randn(3, V, device=device, requires_grad=True)
    source = SumOfLogits(torch.randn(3, V, device=device), torch.randn(3, V, device=device))
    torch.testing.assert_close(onepass.kl_div(x, source), onepass.kl_div(x, source.materialize()))
    head = torch.eye(V, device=device)
    got, expected = (onepass.linear_kl_div(x, head, t) for t in (source, source.materialize()))
    torch.testing.assert_close(got, expected)


def test_what_only_a_tensor_can(device):
    source = SumOfLogits(torch.ones(3, V, device=device), torch.ones(3, V, device=device))
    with pytest.raises(ValueError, match="inplace_backward: expected a tensor of logits, got SumOfLogits"):
        onepass.entropy_from_logits(source, inplace_backward=True)
