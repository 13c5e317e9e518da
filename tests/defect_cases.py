"""A linear head, and the comparison of two losses of it, for the tests of defects."""

import torch

from linear_cases import gradients

INF = float("inf")


def head(device, rows=12, width=16, vocab=40):
    g = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, width, generator=g).to(device).requires_grad_() for n in (rows, vocab))
    return hidden, weight, torch.randint(vocab, (rows,), generator=g).to(device)


def same(got, expected, parts, tolerance=1e-5):
    """Values and gradients of two losses of the same parts."""
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    for a, b in zip(gradients(got.sum(), parts), gradients(expected.sum(), parts), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
