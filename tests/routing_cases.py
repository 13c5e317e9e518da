"""Routers that tests route by, and a definition that takes one token at a time."""

from importlib import import_module

import pytest
import torch

from paths import interpreted

INF = float("inf")


def definition(x, k, *, score="softmax", selection_bias=None, n_group=1, topk_group=1, group_score="top2_sum",
               renormalize=True, scale=1.0, eps=1e-20, score_after_topk=False, softcap=None):  # fmt: skip
    """Experts and differentiable weights of one token, float64."""
    E = len(x)
    z = x if softcap is None else softcap * torch.tanh(x / softcap)
    scores = {"softmax": lambda z: z.softmax(-1), "sigmoid": torch.sigmoid,
              "sqrtsoftplus": lambda z: torch.log1p(z.exp()).sqrt()}[score]  # fmt: skip
    s = scores(z)
    value = ((z if score_after_topk else s) + (0 if selection_bias is None else selection_bias)).tolist()
    logits = z.tolist()
    ranked = sorted(range(E), key=lambda e: (logits[e] == -INF, -value[e] if logits[e] > -INF else 0, e))
    size = E // n_group
    if n_group > 1:
        taking_part = [
            [v for e, v in enumerate(value) if e // size == g and min(logits[e], v) > -INF] for g in range(n_group)
        ]
        best = [sorted(v, reverse=True)[: 2 if group_score == "top2_sum" else 1] for v in taking_part]
        judged = [sum(v) if v else -INF for v in best]
        kept = sorted(range(n_group), key=lambda g: (-judged[g], g))[:topk_group]
        ranked = [e for e in ranked if e // size in kept]
    experts = torch.tensor(ranked[:k])
    w = scores(z[experts]) if score_after_topk else s[experts]
    if renormalize:
        w = w / (w.sum() + eps)
    return experts, w * scale


CASES = {
    "softmax": (16, 4, {}),
    "softmax, as they are": (60, 4, {"renormalize": False, "scale": 2.5}),
    "softmax, of the chosen": (32, 4, {"score_after_topk": True}),
    "softmax, biased": (20, 3, {"selection_bias": True, "softcap": 4.0}),
    "sigmoid, groups": (64, 6, {"score": "sigmoid", "selection_bias": True, "n_group": 8, "topk_group": 4,
                                "scale": 2.5}),
    "sigmoid, odd groups": (21, 4, {"score": "sigmoid", "n_group": 3, "topk_group": 2, "group_score": "max"}),
    "sigmoid, biased logits": (12, 2, {"score": "sigmoid", "selection_bias": True, "score_after_topk": True}),
    "sqrtsoftplus": (37, 5, {"score": "sqrtsoftplus", "selection_bias": True, "eps": 1e-6}),
    # By `kernels/router_biased.py`:
    "sigmoid, large groups": (128, 8, {"score": "sigmoid", "selection_bias": True, "n_group": 8, "topk_group": 4}),
    "sigmoid, of 256": (256, 8, {"score": "sigmoid", "selection_bias": True, "n_group": 8, "topk_group": 4}),
    "sqrtsoftplus, of 192": (192, 6, {"score": "sqrtsoftplus", "selection_bias": True, "n_group": 3, "topk_group": 2,
                                      "group_score": "max", "scale": 2.5}),
    "softmax, groups": (40, 6, {"n_group": 5, "topk_group": 2, "group_score": "max", "renormalize": False}),
    "one expert": (1, 1, {}),
    "all of them": (9, 9, {"score": "sigmoid"}),
    "ten": (96, 10, {"eps": 1e-6}),
    "many": (1024, 32, {"score": "sigmoid"}),
}  # fmt: skip


def inputs(name, tokens, seed=0):
    E, k, options = CASES[name]
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, E, generator=g, dtype=torch.float64) * 3
    if E > 100:  # apart by more than float32 rounds scores to
        x = x.argsort(-1) * (12 / E) - 6.0
    options = dict(options)
    if "selection_bias" in options:
        options["selection_bias"] = torch.randn(E, generator=g) * 0.5 - 0.5  # selection values of both signs
    return x, k, options


RUNS = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,  # of which `kernels/router_topk.py` selects by keys of 32 bits
    "bfloat16, general kernel": torch.bfloat16,
}


def dtype_of(request, device, monkeypatch):
    """A dtype of logits, that of `RUNS`; the last has them routed by `kernels/router.py`, whatever they are."""
    if "general" in request.param:
        if device.type == "cpu" and not interpreted(device):
            pytest.skip("there is one reference")
        for kernel in ("router_topk", "router_biased"):
            monkeypatch.setattr(f"onepass.kernels.{kernel}.takes", lambda *_: False)
        choice = import_module("onepass.kernels.router").choice
        choice.cache_clear()
        request.addfinalizer(choice.cache_clear)
    return RUNS[request.param]


def one_reference(device, dtype, **_):
    return device == "eager" and "general" in dtype


pairs = pytest.mark.pairs(unless=one_reference)


def on(device, options):
    return {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in options.items()}
