"""Routing of tokens to experts in plain PyTorch, as in `kernels.router`."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.core.moe_options import LOG_TINY, RouterOptions, RoutingGradients, RoutingResults
from onepass.reference.softmax import slope_of_tanh


def route(
    logits: Tensor, selection_bias: Tensor | None, token_mask: Tensor | None, given: Tensor | None,
    options: RouterOptions,
) -> RoutingResults:  # fmt: skip
    """Weights, experts, counts, sums and changed choices of ``(T, E)`` logits, as in `empty_routing`."""
    if options.invariant and len(logits) > 1:
        parts = []
        for t in each(logits):
            mask, ids = (None if g is None else g[t] for g in (token_mask, given))
            parts.append(route(logits[t], selection_bias, mask, ids, options))
        return join_tokens(parts, options)
    z = transformed(logits, options)
    experts = select(logits, z, selection_bias, token_mask, options)
    bad, differ = undefined(z, options), torch.zeros_like(experts)
    if given is not None:
        experts, invalid, differ = replayed(given, experts, token_mask, z.shape[-1])
        bad = bad | invalid
    changed = differ.sum(dtype=torch.int32) if options.count_changed else None
    selected = raw_scores(z, experts, options)
    if options.renormalize:
        selected, eps, _ = relative(selected, z, experts, options)
        selected = selected / (selected.sum(-1, keepdim=True) + eps)
    weights = (selected * options.scale).masked_fill(bad, float("nan"))
    prob_sums = logsumexp = None
    if options.sums:
        p, logsumexp = z.softmax(-1), z.logsumexp(-1)
        logsumexp = logsumexp.masked_fill(logsumexp == float("inf"), float("nan"))  # no distribution
        if token_mask is not None:
            p = p.masked_fill((token_mask == 0).unsqueeze(-1), 0.0)
            logsumexp = logsumexp.masked_fill(token_mask == 0, 0.0)
        prob_sums = p.sum(0)
    if token_mask is not None:
        weights = weights.masked_fill((token_mask == 0).unsqueeze(-1), 0.0)
    counts = None
    if options.counts:
        one = torch.ones_like(experts, dtype=torch.int32)
        if token_mask is not None:
            one = one.masked_fill((token_mask == 0).unsqueeze(-1), 0)
        counts = logits.new_zeros(logits.shape[-1], dtype=torch.int32).scatter_add_(0, experts.flatten(), one.flatten())
    return weights, experts, counts, prob_sums, logsumexp, changed


def replayed(given: Tensor, natural: Tensor, token_mask: Tensor | None, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """The ``given`` experts of a token, or the selected (``natural``) ones if a given id is -1 or the token is masked.

    Also returns a mask ``(T, 1)`` of tokens with an id that is repeated or is no expert, which have the experts
    0 … K - 1, and a mask ``(T, K)`` of given ids that are not among the natural ones.

    Raises:
        IndexError, ValueError: there are such tokens, and they are on a CPU.
    """
    ids = given.long()
    free = (ids == -1).any(-1, keepdim=True)
    if token_mask is not None:
        free = free | (token_mask == 0).unsqueeze(-1)
    outside = ((ids < 0) | (ids >= experts)) & ~free
    ordered = ids.sort(-1)[0]
    invalid = outside.any(-1, keepdim=True) | ((ordered[:, 1:] == ordered[:, :-1]).any(-1, keepdim=True) & ~free)
    if given.is_cpu and invalid.any():
        if outside.any():
            raise IndexError(f"experts: expected ids from 0 to {experts - 1}, or -1, got {ids[outside][0].item()}")
        token = int(invalid.view(-1).nonzero()[0])
        raise ValueError(f"experts: expected distinct ids for every token, got {ids[token].tolist()} for token {token}")
    differ = (ids.unsqueeze(-1) != natural.unsqueeze(-2)).all(-1) & ~free
    first = torch.arange(ids.shape[-1], device=ids.device)
    return torch.where(free, natural, torch.where(invalid, first, ids)), invalid, differ


def route_again(logits: Tensor, selection_bias: Tensor | None, options: RouterOptions) -> Any:
    """Return None: there are no launches to repeat."""
    return None


def route_gradient(
    logits: Tensor, experts: Tensor, token_mask: Tensor | None, given: Tensor | None, grads: RoutingGradients,
    options: RouterOptions,
) -> Tensor:  # fmt: skip
    """The gradient of the logits, in their dtype, from those of the weights, summed probabilities and logsumexp."""
    grad_weights, grad_prob_sums, grad_logsumexp = grads
    if options.invariant and len(logits) > 1:
        parts = []
        for t in each(logits):
            rows = token_mask, given, grad_weights, grad_logsumexp
            mask, ids, of_weights, of_sum = (None if g is None else g[t] for g in rows)
            upstream = RoutingGradients(of_weights, grad_prob_sums, of_sum)
            parts.append(route_gradient(logits[t], experts[t], mask, ids, upstream, options))
        return torch.cat(parts)
    z = transformed(logits, options)
    p, selected = z.softmax(-1), z.gather(-1, experts)
    # Through the weights: g is the gradient of the selected scores, then of their logits.
    g = torch.zeros_like(selected) if grad_weights is None else grad_weights * options.scale
    r = s = raw_scores(z, experts, options)
    tiny = torch.zeros_like(s[:, :1], dtype=torch.bool)
    if options.renormalize:
        r, eps, tiny = relative(s, z, experts, options)
        n = r.sum(-1, keepdim=True) + eps
        g = (g - (g * r).sum(-1, keepdim=True) / n) / n
    a = z.new_zeros(len(z), 1)  # the gradient is p·(a + grad_prob_sums), plus g at the selected experts
    if options.score == "softmax":
        g = g * r
        total = g.sum(-1, keepdim=True)
        g, a = (g - r * total, a) if options.score_after_topk else (g, a - total)
    elif options.score == "sigmoid":
        g = g * r * (1 - s)
    else:
        slope = torch.where(s > 0, selected.sigmoid() / (2 * s), 0.0)
        g = g * torch.where(tiny, 0.5 * r, slope)
    if grad_logsumexp is not None:
        a = a + grad_logsumexp.unsqueeze(-1)
    of_sums = 0 if grad_prob_sums is None else grad_prob_sums - (p * grad_prob_sums).sum(-1, keepdim=True)
    every = options.score == "softmax" and not options.score_after_topk
    through_sums = grad_prob_sums is not None or grad_logsumexp is not None
    dense = p * (a + of_sums) if every or through_sums else torch.zeros_like(z)
    grad = dense.scatter_add(-1, experts, g)
    if options.softcap is not None:
        grad = grad * slope_of_tanh(logits.to(z.dtype) * options.factors()[0])
    bad = undefined(z, options)
    if given is not None:
        bad = bad | replayed(given, experts, token_mask, z.shape[-1])[1]
    grad = grad.masked_fill(bad, float("nan"))
    if token_mask is not None:
        grad = grad.masked_fill((token_mask == 0).unsqueeze(-1), 0.0)
    return grad.to(logits.dtype)


def join_tokens(parts: list[RoutingResults], options: RouterOptions) -> RoutingResults:
    """The results of all tokens, from those of each."""
    weights, experts, counts, prob_sums, logsumexp, changed = zip(*parts)
    total = torch.stack(counts).sum(0, dtype=torch.int32) if options.counts else None
    of_sums = (torch.stack(prob_sums).sum(0), torch.cat(logsumexp)) if options.sums else (None, None)
    of_choices = torch.stack(changed).sum(dtype=torch.int32) if options.count_changed else None
    return torch.cat(weights), torch.cat(experts), total, *of_sums, of_choices


def each(logits: Tensor) -> list[slice]:
    """Every token, alone: vectorized functions may give the last tokens of a batch other bits."""
    return [slice(t, t + 1) for t in range(len(logits))]


def transformed(logits: Tensor, options: RouterOptions) -> Tensor:
    """The logits in at least float32, with the soft-cap."""
    z = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if options.softcap is None:
        return z
    inner, outer = options.factors()
    return torch.tanh(z * inner) * outer


def score(z: Tensor, options: RouterOptions) -> Tensor:
    """The score of every expert."""
    if options.score == "softmax":
        return z.softmax(-1)
    off = z == float("-inf")  # the derivative would be 0·inf
    if options.score == "sigmoid":
        return z.sigmoid()
    # Above 40, log(1 + exp(z)) is z in float64 too. By default torch returns z above 20.
    return F.softplus(z.masked_fill(off, 0.0), threshold=40).sqrt().masked_fill(off, 0.0)


def undefined(z: Tensor, options: RouterOptions) -> Tensor:
    """Tokens ``(T, 1)`` without a valid routing: a NaN, an infinite score, or a softmax without a finite normalizer."""
    if options.score == "softmax":
        return z.logsumexp(-1, keepdim=True).isfinite().logical_not()
    bad = z.isnan() if options.score == "sigmoid" else z.isnan() | z.isposinf()
    return bad.any(-1, keepdim=True)


def select(
    logits: Tensor, z: Tensor, selection_bias: Tensor | None, token_mask: Tensor | None, options: RouterOptions
) -> Tensor:
    """The experts of every token, best first.

    Without a bias, experts are selected by their logits: the order is that of the scores, without ties by rounding.
    """
    T, E = z.shape
    lowest = torch.finfo(z.dtype).min
    judged = z if options.score_after_topk else score(z, options)
    value = logits.to(z.dtype)
    if selection_bias is not None:
        value = judged = judged + selection_bias.to(judged.dtype)
        value = judged = value.masked_fill(value.isnan(), lowest)  # the bias is NaN
    value, judged = (v.clamp(min=lowest).masked_fill(z == float("-inf"), lowest) for v in (value, judged))
    if options.n_group > 1:
        scores = judged if options.group_score == "top2_sum" else value
        grouped = scores.view(T, options.n_group, E // options.n_group)
        of_group = grouped.amax(-1)
        if options.group_score == "top2_sum":
            second = grouped.topk(2, dim=-1)[0][..., 1]
            of_group = of_group + second.masked_fill(second == lowest, 0.0)  # 0 for a disabled expert
        best = of_group.clamp(min=lowest).sort(dim=-1, descending=True, stable=True)[1][:, : options.topk_group]
        best_groups = torch.zeros_like(of_group, dtype=torch.bool).scatter_(1, best, True)
        value = value.view(grouped.shape).masked_fill(~best_groups.unsqueeze(-1), float("-inf")).view(T, E)
    nothing = undefined(z, options)
    if token_mask is not None:
        nothing = nothing | (token_mask == 0).unsqueeze(-1)
    value = torch.where(nothing, -torch.arange(E, dtype=z.dtype, device=z.device), value)
    return value.sort(dim=-1, descending=True, stable=True)[1][:, : options.k].contiguous()


def raw_scores(z: Tensor, experts: Tensor, options: RouterOptions) -> Tensor:
    """The scores of the selected experts, ``(T, K)``."""
    if options.score_after_topk:
        return score(z.gather(-1, experts), options)
    return score(z, options).gather(-1, experts)


def relative(s: Tensor, z: Tensor, experts: Tensor, options: RouterOptions) -> tuple[Tensor, Tensor, Tensor]:
    """The selected scores ``s`` and ``eps``, both relative to the largest score in tokens where all scores are tiny.

    Their quotients are the same, but tiny scores would underflow. Also returns a mask of these tokens, ``(T, 1)``.
    """
    selected = z.gather(-1, experts)
    top = selected.amax(-1, keepdim=True)
    if options.score == "softmax" and options.score_after_topk:  # the largest score is at least 1 / K
        return s, torch.full_like(top, options.eps), torch.zeros_like(top, dtype=torch.bool)
    power = 0.5 if options.score == "sqrtsoftplus" else 1.0  # a tiny score is exp(power·(z - offset))
    offset = z.logsumexp(-1, keepdim=True) if options.score == "softmax" else torch.zeros_like(top)
    tiny = (top - offset < LOG_TINY) & top.isfinite()
    eps = torch.full_like(top, options.eps)
    larger = (eps.log() + (offset - top) * power).exp()
    return s.where(~tiny, ((selected - top) * power).exp()), torch.where(tiny, larger, eps), tiny
