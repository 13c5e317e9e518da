"""The sums of rows that processes have exchanged: the kernel beside the definition in plain PyTorch."""

import pytest
import torch

from onepass import reference

kernels = pytest.importorskip("onepass.kernels")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


SIZES = [(7, 2, 24, 11, torch.float32), (5, 3, 1040, 15, torch.float16), (0, 2, 8, 0, torch.float32),
         (4, 2, 8, 0, torch.float32), (3, 1, 2048, 2, torch.bfloat16), (5, 4, 2056, 20, torch.bfloat16)]  # fmt: skip


@pytest.mark.parametrize("of_weights", [None, torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("tokens, K, width, sent, dtype", SIZES)
def test_rows_are_summed(tokens, K, width, sent, dtype, of_weights):
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(n, width, generator=generator).to(DEVICE, dtype) for n in (tokens, sent))
    order = torch.randperm(tokens * K, generator=generator).to(DEVICE, torch.int32)
    places = order.argsort().int().view(tokens, K)
    places = places.where(places != tokens * K - 1, -2)  # one of no row, which does not count from the end
    weights = None if of_weights is None else torch.randn(tokens, K, generator=generator).to(DEVICE, of_weights)
    found, expected = kernels.sum_rows(y, places, weights), reference.sum_rows(y, places, weights)
    torch.testing.assert_close(found, expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-3, atol=1e-3)
    assert found.dtype == dtype
    if dtype == torch.float32 and weights is None:  # the sum is the adjoint of the copy
        rows = x.index_select(0, order[:sent] // K)
        product = (rows * y).sum()
        torch.testing.assert_close(product, (x * found).sum(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("of_weights", [torch.float32, torch.bfloat16, None])
@pytest.mark.parametrize("tokens, K, width, sent, dtype", SIZES)
def test_gradients_of_the_sum(tokens, K, width, sent, dtype, of_weights):
    """The kernel, and the definition, beside those that autograd finds in float64."""
    generator = torch.Generator().manual_seed(2)
    y, grad = (torch.randn(n, width, generator=generator).to(DEVICE, dtype) for n in (sent, tokens))
    places = torch.randperm(tokens * K, generator=generator).to(DEVICE, torch.int32).view(tokens, K)
    places = places.where(places != 1, -2)
    weights = None if of_weights is None else torch.randn(tokens, K, generator=generator).to(DEVICE, of_weights)
    if tokens > 4:
        grad[3] = grad[3].clone().fill_(float("nan"))
        grad = grad.repeat(1, 2)[:, ::2]  # of any strides
    leaves = [t.double().requires_grad_() for t in (y, *([] if weights is None else [weights]))]
    reference.sum_rows(leaves[0], places, *leaves[1:]).backward(grad.double())
    there = torch.zeros(sent + 1, dtype=torch.bool, device=DEVICE)
    there[places.flatten()[(places.flatten() >= 0) & (places.flatten() < sent)].long()] = True
    unused = ~((places >= 0) & (places < sent))  # in which autograd multiplies NaN by 0
    for module in (kernels, reference):
        of_y, found = module.sum_rows_gradient(grad, places, sent, weights, y)
        tolerance = 1e-5 if dtype == torch.float32 else 1e-2
        assert of_y.dtype == dtype
        expected = leaves[0].grad[there[:sent]].to(dtype)
        torch.testing.assert_close(of_y[there[:sent]], expected, rtol=tolerance, atol=tolerance, equal_nan=True)
        if weights is None:
            assert found is None
        else:
            assert found.dtype == of_weights and not found[unused].any()
            expected = leaves[1].grad.masked_fill(unused, 0.0).to(of_weights)
            tolerance = max(tolerance, 1e-2 if of_weights == torch.bfloat16 else 1e-4)
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=width**0.5 * tolerance, equal_nan=True)
    assert kernels.sum_rows_gradient(grad, places, sent, weights)[1] is None
