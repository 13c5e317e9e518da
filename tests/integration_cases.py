"""What the tests of `onepass.patch` compare: a function of a library, and what replaces it."""

from importlib import import_module

import torch

N, H, V = 23, 16, 67


def both(name, *arguments, of, module, inputs=(), **options):
    """Results and gradients of the original and of what replaces it."""
    ours = getattr(import_module(f"onepass.integrations.{module}"), name.lstrip("_"))
    outcomes = []
    for function in (getattr(of, name), ours):
        results = function(*arguments, **options)
        results = results if isinstance(results, tuple) else (results,)
        loss = sum(
            (r * torch.linspace(-1, 1, r.numel()).view(r.shape)).sum() + r.sum()
            for r in results
            if r is not None and r.requires_grad
        )
        outcomes.append((results, torch.autograd.grad(loss, inputs) if inputs else ()))
    return outcomes


def assert_same(outcomes, atol=1e-5):
    (theirs, of_theirs), (ours, of_ours) = outcomes
    assert len(theirs) == len(ours)
    for a, b in zip((*theirs, *of_theirs), (*ours, *of_ours)):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.shape == b.shape
            torch.testing.assert_close(b.float(), a.float(), rtol=1e-5, atol=atol)
