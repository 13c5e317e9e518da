"""Every family of mixtures of experts in transformers, alike with and without `onepass.patch`, or a reason why not."""

import importlib
import inspect
import re
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

import onepass
from onepass.moe import RoutingRecord, record_routing, replay_routing
from onepass.moe.probe import method, methods_of
from onepass.moe.recognition import described_method

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.xdist_group("families")  # one worker builds them, once
MODELS = Path(transformers.__file__).parent / "models"
DOCS = Path(__file__).parent.parent / "docs" / "moe.md"
DOCUMENTED, BEGIN, END = "5.23", "<!-- families: tests/test_moe_coverage.py -->", "<!-- end of families -->"
H, E, K, T = 32, 16, 4, 64
UNCOVERED = {
    "doge": "selects by sums of two keys, from two small selections",
    "inkling": "divides the weights by a sum to which the shared experts belong",
    "jetmoe": "returns the assignments sorted by expert, and their counts as a list on the host",
    "nllb_moe": "has a capacity for each expert, and drops what is above it",
    "phimoe": "samples in training, and computes a weight from the logits that are near the largest (SparseMixer)",
    "switch_transformers": "has a capacity for the expert, and noise in training",
    "zaya": "has a network of several layers as gate, and an expert that skips the layer",
}
NO_ROUTER = {
    "vitpose_backbone": "the data set decides",
    "nemotron3_5_transcribe": "that of its language model, nemotron_h",
}
SMALL = dict(
    hidden_size=H, intermediate_size=8, moe_intermediate_size=8, num_local_experts=E, num_experts=E, n_routed_experts=E,
    moe_num_experts=E, num_experts_per_tok=K, moe_topk=K, moe_top_k=K, top_k_experts=K, n_group=4, topk_group=2,
    routed_scaling_factor=2.5, norm_topk_prob=True, topk_method="group_limited_greedy", output_multiplier=0.3,
    moe_router_logit_softcapping=2.0, router_scaling_factor=1.5, route_scale=1.5, ffn_hidden_size=8, zero_expert_num=0,
    ffn_act_fn={"name": "silu"},
)  # fmt: skip


class Config:
    """The small settings, and the defaults of a class of configs for all others; its validation is of whole models."""

    def __init__(self, cls):
        self.cls = cls

    def __getattr__(self, name):
        if name in SMALL or name == "ffn_config":
            return SMALL.get(name, self)
        return getattr(self.__dict__["cls"], name)


@cache
def families():
    """The models whose config has a number of experts."""
    names = (path.parent.name for path in MODELS.glob("*/configuration_*.py")
             if re.search(r"\b(n_routed_experts|(moe_)?num_(local_)?experts)\b", path.read_text()))  # fmt: skip
    return sorted({name for name in names if (MODELS / name / f"modeling_{name}.py").exists()} - set(NO_ROUTER))


def routers(name):
    """The routers of a family that are recognized: (module, method, description)."""
    modeling = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    configs = vars(importlib.import_module(f"transformers.models.{name}.configuration_{name}")).values()
    configs = [c for c in configs if isinstance(c, type) and issubclass(c, transformers.PretrainedConfig)]
    for cls in vars(modeling).values():
        if isinstance(cls, type) and issubclass(cls, nn.Module) and cls.__module__ == modeling.__name__:
            for of in methods_of(cls):
                router = built(cls, configs)
                d = router and described_method(router, of)
                if d:
                    yield router, of, d


def built(cls, configs):
    def alike(config):
        return next((n for n, (a, b) in enumerate(zip(config.__name__, cls.__name__)) if a != b), 99)

    for config in sorted(configs, key=alike, reverse=True):
        layer = {"layer_idx": 0} if "layer_idx" in inspect.signature(cls.__init__).parameters else {}
        try:
            router = cls(Config(config), **layer)
        except Exception:
            continue
        for tensor in [*router.parameters(), *router.buffers()]:
            if tensor.is_floating_point():
                tensor.data = torch.rand_like(tensor) * (1 if tensor.squeeze().dim() == 1 else 0.4)
        return router
    return None


def inputs_of(d):
    hidden = torch.randn(T, H).requires_grad_()
    of = {d.given_bias: torch.rand(E), d.inputs[0]: hidden}
    if d.gate is None:
        of[d.inputs[-1]] = torch.randn(T, E).requires_grad_()
    inputs = [of.get(n) for n in d.inputs]
    return [x.view(2, T // 2, -1) if x is not None and 2 not in d.dims and x.dim() > 1 else x for x in inputs]


def dense(d, results):
    """The weights over all experts, and the other results over all experts."""
    results = dict(zip(d.outputs, results if isinstance(results, tuple) else (results,)))
    results = {kind: t.reshape(T, -1) for kind, t in results.items()}
    weights = results["dense"] if "dense" in results else (
        torch.zeros(T, E).scatter(1, results["experts"], results["weights"].float()))  # fmt: skip
    return weights.float(), {kind: t for kind, t in results.items() if kind not in ("dense", "weights", "experts")}


def check(router, of, d):
    """Weights, logits and gradients in float32, and the error of the weights in bfloat16."""
    function, leaves = method(type(router), of), [p for p in router.parameters() if p.requires_grad and d.gate]
    inputs = inputs_of(d)
    theirs, ours = function(router, *inputs), getattr(router, of)(*inputs)
    same_form(theirs, ours)
    (expected, others), (found, same) = dense(d, theirs), dense(d, ours)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(same, others, rtol=1e-6, atol=1e-6)
    upstream, leaves = torch.randn_like(found), [inputs[0 if d.gate else -1], *leaves]
    grads = [torch.autograd.grad((w * upstream).sum(), leaves, allow_unused=True) for w in (expected, found)]
    for a, b in zip(*grads):
        assert (a is None) == (b is None)
        torch.testing.assert_close(*(torch.zeros(1) if g is None else g for g in (b, a)), rtol=1e-5, atol=1e-5)

    inputs = [x if x is None or x.dim() == 1 else x.bfloat16() for x in inputs]
    for weights in (torch.bfloat16, torch.float32):  # some routers keep their weights in float32
        router = router.to(weights)
        try:
            theirs = function(router, *inputs)
        except RuntimeError:
            continue
        ours = getattr(router, of)(*inputs)
        same_form(theirs, ours)
        exact = dense(d, function(router.float(), *(x if x is None else x.float() for x in inputs)))[0]
        found = [dense(d, results)[0].detach() for results in (theirs, ours)]
        same = ((found[0] != 0) == (found[1] != 0)).all(
            1
        )  # of logits that are equal after rounding, either may be chosen
        assert same.float().mean() > 0.75
        errors = [(weights - exact)[same].abs().mean() for weights in found]
        assert errors[1] <= 1.02 * errors[0] + 1e-6
        return
    raise AssertionError(f"{type(router).__name__} was not run in bfloat16")


def check_replay(router, of, d):
    """The natural choice, replayed, is the same bit for bit; the gradients of another one are those in float64."""
    inputs = inputs_of(d)
    at = 0 if d.gate else -1
    with record_routing(router) as record:
        natural = getattr(router, of)(*inputs)
    with replay_routing(router, record) as replay:
        again = getattr(router, of)(*inputs)
    assert replay.changed == 0
    for a, b in zip(*(r if isinstance(r, tuple) else (r,) for r in (natural, again)), strict=True):
        assert torch.equal(a, b)
    others, upstream = torch.rand(T, E).argsort(-1)[:, : record.passes[0][0].shape[1]], torch.rand(T, E)
    found = []
    for dtype in (torch.float32, torch.float64):
        cast = [x if x is None else x.detach().to(dtype).requires_grad_() for x in inputs]
        with replay_routing(router.to(dtype), RoutingRecord([[others]])) as replay:
            weights = dense(d, getattr(router, of)(*cast))[0]
        assert replay.changed > 0
        assert torch.equal(weights != 0, torch.zeros(T, E).scatter(1, others, 1.0) != 0)
        (grad,) = torch.autograd.grad((weights * upstream).sum(), cast[at])
        found.append((weights.detach(), grad.float().reshape(T, -1)))
    router.float()
    for a, b in zip(*found):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert found[1][1].abs().sum(1).min() > 0


def same_form(theirs, ours):
    for a, b in zip(*(r if isinstance(r, tuple) else (r,) for r in (theirs, ours)), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)


@pytest.fixture(scope="module")
def covered():
    """The descriptions of each family whose routers are alike with and without the patch."""
    found = {}
    for name in families():
        importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors are small
    with onepass.patch("transformers"):
        for name in families():
            with pytest.MonkeyPatch.context() as patch:
                patch.delenv("TRITON_INTERPRET", raising=False)  # many calls; only those that are checked run kernels
                recognized = list(routers(name))
            for router, of, d in recognized:
                assert getattr(type(router), of) is not method(type(router), of)
                try:
                    check_replay(router, of, d)
                    check(router, of, d)
                    found.setdefault(name, []).append(d)
                except AssertionError as e:
                    print("FAIL", name, type(router).__name__, str(e)[:300])
    torch.set_num_threads(threads)
    return found


def test_every_family_is_alike_or_has_a_reason(covered):
    assert set(families()) - set(covered) == set(UNCOVERED) & set(families())
    assert len(covered) / len(families()) >= 52 / 59


def test_the_documentation_lists_them(covered):
    """``python -m pytest tests/test_moe_coverage.py`` prints what docs/moe.md must contain."""
    documented = DOCS.read_text().split(BEGIN)[1].split(END)[0].strip()
    if transformers.__version__.startswith(DOCUMENTED):
        assert documented == table(covered), table(covered)
    else:
        assert {f"`{n}`" for n in covered} <= set(re.findall(r"`\w+`", documented))


def kind(d):
    """A router in a few words."""
    of = dict(d.arguments)
    words = [of["score"] + (" of the selected" if of["score_after_topk"] else "")]
    words += ["a selection bias"] * bool(d.selection_bias or d.given_bias) + ["groups"] * (of["n_group"] > 1)
    words += ["not renormalized"] * (not of["renormalize"] and not d.min_sum)
    words += ["a soft-cap"] * (of["softcap"] is not None) + ["a scale for each expert"] * bool(d.expert_scale)
    return ", ".join(words)


def table(covered):
    kinds = {}
    for name, descriptions in covered.items():
        for d in descriptions:
            kinds.setdefault(kind(d), {})[f"`{name}`"] = None
    rows = [f"| {k} | {', '.join(kinds[k])} |" for k in sorted(kinds)]
    head = f"transformers {transformers.__version__}: {len(covered)} of {len(families())} families."
    rows = [
        head,
        "",
        "| scores | families |",
        "| --- | --- |",
        *rows,
        "",
        "| not covered | because it |",
        "| --- | --- |",
    ]
    return "\n".join(rows + [f"| `{name}` | {why} |" for name, why in UNCOVERED.items()])
