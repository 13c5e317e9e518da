"""The sums of rows that processes have exchanged: the kernel beside the definition in plain PyTorch."""

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
def test_rows_are_summed(tokens, K, width, sent, dtype):
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(n, width, generator=generator).to(DEVICE, dtype) for n in (tokens, sent))
    order = torch.randperm(tokens * K, generator=generator).to(DEVICE, torch.int32)
    places = order.argsort().int().view(tokens, K)
    places = places.where(places != tokens * K - 1, -2)  # one of no row, which does not count from the end
    found, expected = kernels.sum_rows(y, places), reference.sum_rows(y, places)
    torch.testing.assert_close(found, expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-3, atol=1e-3)
    assert found.dtype == dtype
    if dtype == torch.float32:  # the sum is the adjoint of the copy
        rows = x.index_select(0, order[:sent] // K)
        product = (rows * y).sum()
        torch.testing.assert_close(product, (x * found).sum(), rtol=1e-4, atol=1e-4)
