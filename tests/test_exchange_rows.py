"""The rows that processes exchange: the kernels beside the definition in plain PyTorch."""

import pytest
import torch

from onepass import reference

kernels = pytest.importorskip("onepass.kernels")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(
    "tokens, K, width, sent, dtype",
    [(7, 2, 24, 11, torch.float32), (5, 3, 1040, 15, torch.float16), (0, 2, 8, 0, torch.float32),
     (4, 2, 8, 0, torch.float32), (3, 1, 2048, 2, torch.bfloat16)],
)  # fmt: skip
def test_rows_are_copied_and_summed(tokens, K, width, sent, dtype):
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(n, width, generator=generator).to(DEVICE, dtype) for n in (tokens, sent))
    order = torch.randperm(tokens * K, generator=generator).to(DEVICE, torch.int32)
    places = order.argsort().int().view(tokens, K)
    rows = kernels.gather_rows(x, order[:sent], K)
    assert torch.equal(rows, reference.gather_rows(x, order[:sent], K)) and rows.shape == (sent, width)
    found, expected = kernels.sum_rows(y, places), reference.sum_rows(y, places)
    torch.testing.assert_close(found, expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-3, atol=1e-3)
    assert found.dtype == dtype
    # Each is the gradient of the other.
    if dtype == torch.float32:
        product = (rows * y).sum()
        torch.testing.assert_close(product, (x * found).sum(), rtol=1e-4, atol=1e-4)
