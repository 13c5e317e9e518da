"""Weights, inputs and results of experts for the tests of quantized ones."""

from types import SimpleNamespace

import torch

from onepass.moe import expert_mlp


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.3


T, H, I, E, K = 14, 40, 48, 5, 2  # noqa: E741


def inputs(device, transposed=False):
    of = {
        "hidden": randn(T, H, seed=1), "weights": randn(T, K, seed=2).abs(), "gate_up_bias": randn(E, 2 * I, seed=3),
        "down_bias": randn(E, H, seed=4), "a1": randn(E, 3, H, seed=5), "b1": randn(E, 2 * I, 3, seed=6),
        "a2": randn(E, 3, I, seed=7), "b2": randn(E, H, 3, seed=8),
    }  # fmt: skip
    of = {name: t.to(device).requires_grad_() for name, t in of.items()}
    ids = torch.rand(T, E - 1, generator=torch.Generator().manual_seed(9)).argsort(-1)[:, :K]  # one expert has no token
    ids[0, 0] = -1
    weights = randn(E, 2 * I, H, seed=10), randn(E, H, I, seed=11)
    return of, ids.to(device), [w.mT.contiguous() if transposed else w for w in weights]


def results(of, ids, weights, **options):
    out = expert_mlp(
        of["hidden"], SimpleNamespace(weights=of["weights"], experts=ids), *weights, gate_up_bias=of["gate_up_bias"],
        down_bias=of["down_bias"], lora_gate_up=(of["a1"], of["b1"], 0.7), lora_down=(of["a2"], of["b2"], 1.3),
        **options,
    )  # fmt: skip
    upstream = torch.linspace(-1, 1, out.numel(), device=out.device, dtype=out.dtype).view(out.shape)
    return [out, *torch.autograd.grad(out, list(of.values()), upstream)]


def close(got, expected):
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6 * b.abs().max().item())
