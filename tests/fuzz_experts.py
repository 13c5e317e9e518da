"""Random calls of routers and experts, and what they should give: for test_fuzz.py."""

from typing import Any

import torch
from torch import Tensor

from border_call import flattened
from definition import transform
from fuzz_problem import INF, NAN, Problem, Source, Spec, in_row, magnitude_of, masked, pick
from onepass.moe import Routing, expert_mlp, group_by_expert, load_balancing_loss, route, router_z_loss
from onepass.moe import scattered_linear as scattered


def of_route(spec: Spec) -> Problem:
    """Properties of the choice, which rounding may turn, and the weights of what was chosen."""
    s, options = Source(spec), dict(spec["options"])
    E, k = s.vocab, min(spec["k"] or 1, s.vocab)
    groups = options.get("n_group", 1)
    if E % groups or E // groups < 2 or k > options.get("topk_group", 1) * (E // groups):
        for name in ("n_group", "topk_group"):
            options.pop(name, None)
    tensors = {"router_logits": s.logits()}
    if options.pop("saturated", False):
        tensors["router_logits"] = tensors["router_logits"] * 30
    if spec["weights"]:
        tensors["selection_bias"] = torch.randn(E, generator=s.generator) * 0.3
    if spec["mask"]:
        tensors["token_mask"] = s.mask(*s.rows)
    s.constant(tensors)
    chosen: dict[str, Tensor] = {}
    score, after = options.get("score", "softmax"), options.get("score_after_topk", False)

    def call(t: dict[str, Any]) -> dict[str, Tensor]:
        given = {n: t[n] for n in ("selection_bias", "token_mask") if n in t}
        routing = route(t["router_logits"], k, losses=True, **given, **options)
        chosen["experts"], chosen["counts"] = routing.experts.cpu(), routing.counts.cpu()
        found = {"weights": routing.weights, "logsumexp": routing.logsumexp, "prob_sums": routing.prob_sums}
        if spec["hard"] in ("none", "constant") and s.size:
            found |= {"balance": load_balancing_loss(routing), "z": router_z_loss(routing)}
        return found

    def scores(z: Tensor) -> Tensor:
        if score == "softmax":
            return z.softmax(-1)
        off = (z == -INF) | (z < -700)  # where a root of 0 has no slope
        z = z.masked_fill(off, 0.0)
        found = torch.sigmoid(z) if score == "sigmoid" else torch.log1p(z.clamp(max=300).exp()).sqrt()
        if score == "sqrtsoftplus":
            found = torch.where(z > 30, z.clamp(min=1).sqrt(), found)
        return found.masked_fill(off, 0.0)

    def renormalized(chosen: Tensor, z: Tensor, eps: float) -> Tensor:
        """The scores over their sum and eps, from their logarithms: float64 has no scores below exp(-745) either."""
        if score == "softmax":
            log = chosen - chosen.logsumexp(-1, keepdim=True) if after else chosen - z.logsumexp(-1, keepdim=True)
        elif score == "sigmoid":
            log = torch.nn.functional.logsigmoid(chosen)
        else:
            far = chosen < -40
            log = torch.where(far, chosen, scores(chosen.masked_fill(far, 0.0)).log() * 2) / 2
        top = log.detach().amax(-1, keepdim=True)
        top = top.masked_fill(top == -INF, 0.0)
        share = (log - top).exp()
        return share / (share.sum(-1, keepdim=True) + (eps * (-top).exp() if eps else 0.0))

    def define(t: dict[str, Any]) -> dict[str, Tensor]:
        kept = t["token_mask"] != 0 if "token_mask" in t else torch.ones(s.rows, dtype=torch.bool)
        x, experts = masked(t["router_logits"], kept), chosen["experts"]
        z = transform(x, **pick(options, "softcap"))
        lse = z.logsumexp(-1)
        nothing = lse.isfinite().logical_not()
        bad = nothing if score == "softmax" else z.isnan().any(-1) | ((score == "sqrtsoftplus") & (z == INF).any(-1))
        assert experts.shape == (*s.rows, k) and ((experts >= 0) & (experts < E)).all()
        assert all(len(set(row)) == k for row in experts.view(-1, k).tolist())
        assert (experts[bad | ~kept] == torch.arange(k)).all() or (~kept).any()
        assert (experts[bad & kept] == torch.arange(k)).all()
        count = torch.bincount(experts[kept].flatten(), minlength=E).int()
        assert torch.equal(chosen["counts"], count)
        check_choice(x, z.detach(), experts, t, kept & ~bad)
        w = scores(z.gather(-1, experts)) if after else scores(z).gather(-1, experts)
        if options.get("renormalize", True):
            w = renormalized(z.gather(-1, experts), z, options.get("eps", 1e-20))
        w = torch.where(bad.unsqueeze(-1), NAN, w * options.get("scale", 1.0))
        p = torch.where(kept.unsqueeze(-1), z.softmax(-1), 0.0).reshape(-1, E).sum(0)
        lse = torch.where((z == INF).any(-1), NAN, lse)
        found = {"weights": torch.where(kept.unsqueeze(-1), w, 0.0), "logsumexp": torch.where(kept, lse, 0.0),
                 "prob_sums": p}  # fmt: skip
        if spec["hard"] in ("none", "constant") and s.size:
            tokens = kept.sum().double()
            found["balance"] = E * (count / tokens * p / tokens).sum()
            found["z"] = found["logsumexp"].square().sum() / tokens
        return found

    def check_choice(x: Tensor, z: Tensor, experts: Tensor, t: dict[str, Any], rows: Tensor) -> None:
        value = z if after else scores(z)
        bias = t.get("selection_bias")
        value = (value if bias is None else value + bias).masked_fill(z == -INF, -INF)
        got = value.gather(-1, experts)
        slack = 1e-5 * (1 + value.masked_fill(value == -INF, 0.0).abs().amax(-1, keepdim=True))
        in_order = (got[..., 1:] <= got[..., :-1] + slack) | (got[..., 1:] == -INF)
        assert in_order[rows].all(), "not in descending order"
        if options.get("n_group", 1) == 1:
            others = value.scatter(-1, experts, -INF).amax(-1, keepdim=True)
            assert (others <= got[..., -1:] + slack)[rows].all(), "a better expert was left out"
        if bias is None and options.get("n_group", 1) == 1 and options.get("softcap"):
            # A soft-cap that saturates makes many equal: they stay in the order of their logits.
            best = x.sort(dim=-1, descending=True, stable=True)[1][..., :k]
            assert torch.equal(experts[rows], best[rows]), "not in the order of the logits"

    extreme = spec["hard"] in ("one +inf", "a row of -inf", "one NaN", "a row of NaN")
    scale = abs(options.get("scale", 1.0)) * max(1, s.size)
    magnitude = magnitude_of(tensors["router_logits"], **pick(options, "softcap"))
    bounds = scale * magnitude, 4 * scale * (1 + magnitude)
    why = "a token has no answer" if extreme else ""
    return Problem(tensors, ("router_logits",), call, define, None, bounds, why)


ACTIVATIONS = {
    "silu": lambda g, u: torch.nn.functional.silu(g) * u,
    "gelu": lambda g, u: torch.nn.functional.gelu(g) * u,
    "gelu_tanh": lambda g, u: torch.nn.functional.gelu(g, approximate="tanh") * u,
    "swiglu_clamped": lambda g, u: (u.clamp(-7, 7) + 1) * g.clamp(max=7) * torch.sigmoid(1.702 * g.clamp(max=7)),
}


def experts_of(s: Source, spec: Spec, E: int, K: int) -> Tensor:
    """Ids, of which some are no expert's."""
    count = s.size
    ids = torch.randint(E, (count, K), generator=s.generator)
    if spec["outside"] is not None and ids.numel():
        ids[:: max(1, count // 2), -1] = E if spec["outside"] == "vocab" else max(-1, min(spec["outside"], 2**31 - 1))
    return ids.view(*s.rows, K).to(torch.int32 if spec["int32"] else torch.int64)


def of_experts(spec: Spec) -> Problem:
    s, options = Source(spec), dict(spec["options"])
    E, K, H, I, R = 1 + s.vocab % 4, spec["k"] or 0, spec["width"], 8, spec["rank"]  # noqa: E741
    flip, interleaved = options.get("transposed", False), options.get("interleaved", False)
    normal = lambda *shape: s.normal(*shape, scale=0.4)  # noqa: E731
    hidden = normal(*s.rows, H)
    tensors = {
        "hidden": in_row(hidden, slice(None), NAN) if spec["hard"] == "a row of NaN" else hidden,
        "weights": s.rand(*s.rows, K).to(torch.float64 if s.dtype == torch.float64 else torch.float32),
        "experts": experts_of(s, spec, E, K),
        "gate_up": normal(E, H, 2 * I) if flip else normal(E, 2 * I, H),
        "down": normal(E, I, H) if flip else normal(E, H, I),
    }  # fmt: skip
    if spec["bias"]:
        tensors |= {"gate_up_bias": normal(E, 2 * I), "down_bias": normal(E, H)}
    if R:
        tensors |= {"a1": normal(E, R, H), "b1": normal(E, 2 * I, R), "a2": normal(E, R, I), "b2": normal(E, H, R)}
    s.constant(tensors)

    def call(t: dict[str, Any]) -> dict[str, Tensor]:
        given = {n: t[n] for n in ("gate_up_bias", "down_bias") if n in t}
        if R:
            given |= {"lora_gate_up": (t["a1"], t["b1"], 0.5), "lora_down": (t["a2"], t["b2"], 1.5)}
        routing = Routing(t["weights"], t["experts"], None)
        return flattened(expert_mlp(t["hidden"], routing, t["gate_up"], t["down"], **given, **options))

    def define(t: dict[str, Any]) -> dict[str, Tensor]:
        x, weights, experts = (t[n].reshape(s.size, t[n].shape[-1]) for n in ("hidden", "weights", "experts"))
        out = torch.zeros_like(x)
        for e in range(E):
            first, second = (t[n][e].mT if flip else t[n][e] for n in ("gate_up", "down"))
            if R:
                first, second = first + 0.5 * t["b1"][e] @ t["a1"][e], second + 1.5 * t["b2"][e] @ t["a2"][e]
            token, slot = (experts == e).nonzero(as_tuple=True)
            h = x[token] @ first.mT + (t["gate_up_bias"][e] if "gate_up_bias" in t else 0.0)
            gate, up = (h[:, ::2], h[:, 1::2]) if interleaved else h.chunk(2, -1)
            y = ACTIVATIONS[options.get("activation", "silu")](gate, up) @ second.mT
            y = y + (t["down_bias"][e] if "down_bias" in t else 0.0)
            out = out.index_add(0, token, y * weights[token, slot, None])
        return {"result": out.view(t["hidden"].shape)}

    grad = tuple(n for n in tensors if n != "experts")
    of = {torch.float64: 1e-10, torch.float32: 2e-5, torch.float16: 4e-2, torch.bfloat16: 0.15}[s.dtype]
    return Problem(tensors, grad, call, define, None, of)


def of_scattered(spec: Spec) -> Problem:
    s, options = Source(spec), dict(spec["options"])
    E, K, H, outputs = 1 + s.vocab % 4, max(1, spec["k"] or 1), spec["width"], 12
    T = s.size
    s.rows = (T,)
    weighted, grouped = options.pop("weighted", False), options.pop("grouped", False)
    if weighted:
        options.pop("grouped_out", None)
    if not grouped:
        options.pop("grouped_in", None)
        options.pop("grouped_out", None)
    flip, grouped_in, grouped_out = (options.get(n, False) for n in ("transposed", "grouped_in", "grouped_out"))
    tensors = {
        "x": s.normal(T * K if grouped_in else T, H), "experts": experts_of(s, spec, E, K),
        "weight": s.normal(E, H, outputs, scale=0.4) if flip else s.normal(E, outputs, H, scale=0.4),
    }  # fmt: skip
    if spec["bias"]:
        tensors["bias"] = s.normal(E, outputs)
    if weighted:
        tensors["weights"] = s.rand(T, K).to(torch.float64 if s.dtype == torch.float64 else torch.float32)
    s.constant(tensors)

    def call(t: dict[str, Any]) -> dict[str, Tensor]:
        groups = group_by_expert(t["experts"], E, t["x"]) if grouped else None
        given = {n: t[n] for n in ("bias", "weights") if n in t}
        return flattened(scattered(t["x"], t["weight"], t["experts"], groups, **given, **options))

    def define(t: dict[str, Any]) -> dict[str, Tensor]:
        ids = t["experts"].reshape(-1).long()
        ids = torch.where((ids >= 0) & (ids < E), ids, E)
        order = ids.sort(stable=True)[1]
        slots = torch.arange(T * K)
        x = t["x"][order.argsort()] if grouped_in else t["x"][slots // K]  # of each slot
        weight = t["weight"].mT if flip else t["weight"]
        weight = torch.cat([weight, torch.zeros_like(weight[:1])])
        y = (weight[ids] @ x.unsqueeze(-1)).squeeze(-1)
        if "bias" in t:
            y = y + torch.cat([t["bias"], torch.zeros_like(t["bias"][:1])])[ids]
        if weighted:
            return {"result": (y.view(T, K, outputs) * t["weights"].unsqueeze(-1)).sum(1)}
        return {"result": y[order] if grouped_out else y}

    grad = tuple(n for n in tensors if n != "experts")
    of = {torch.float64: 1e-10, torch.float32: 2e-5, torch.float16: 4e-2, torch.bfloat16: 0.15}[s.dtype]
    return Problem(tensors, grad, call, define, None, of)
