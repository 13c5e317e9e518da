"""Routing of tokens to experts, for the routers of many model families: one kernel forward and one backward."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass.backend import backend_of
from onepass.core.checks import (
    INF,
    check_bool,
    check_choice,
    check_device,
    check_integer,
    check_local,
    check_logits,
    check_number,
    check_row_mask,
    check_transform,
    described,
)
from onepass.core.deprecated import renamed
from onepass.core.dispatch import apply_to_ordinary, are_ordinary, check_upstream, like_logits, operation
from onepass.core.invariance import is_batch_invariant
from onepass.core.memo import memo_of_numbers
from onepass.core.moe_options import (
    GROUP_SCORES,
    MAX_EXPERTS,
    MAX_K,
    SCORES,
    GroupScore,
    RouterOptions,
    RoutingGradients,
    RoutingResults,
    Score,
    empty_routing,
)

INTEGERS = frozenset({
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64,
})  # fmt: skip


class Routing(NamedTuple):
    """The experts of each token and their weights. ``(...)`` is the shape of the tokens; each has K of E experts.

    Attributes:
        weights: ``(..., K)``, float32 (float64 for float64 logits), differentiable.
        experts: ``(..., K)``, int64, in descending order of their selection values; replayed ones in the order in which
            they were given.
        counts: ``(E,)``, int32: the number of tokens of each expert; None if `route` was told not to count them.
        prob_sums: ``(E,)``: softmax probabilities summed over tokens, differentiable; None without ``losses``.
        logsumexp: ``(...)``: ``log Σ_e exp(z_e)``, differentiable; None without ``losses``.
        changed: scalar, int32: how many of the replayed experts the router would not have selected; None without
            ``count_changed``.
    """

    weights: Tensor
    experts: Tensor
    counts: Tensor | None
    prob_sums: Tensor | None = None
    logsumexp: Tensor | None = None
    changed: Tensor | None = None


def route(
    router_logits: Tensor,
    k: int,
    *,
    score: Score = "softmax",
    selection_bias: Tensor | None = None,
    n_group: int = 1,
    topk_group: int = 1,
    group_score: GroupScore = "top2_sum",
    renormalize: bool = True,
    scale: float = 1.0,
    eps: float = 1e-20,
    score_after_topk: bool = False,
    softcap: float | None = None,
    token_mask: Tensor | None = None,
    losses: bool = False,
    experts: Tensor | None = None,
    count_changed: bool = False,
    counts: bool = True,
) -> Routing:
    r"""Select ``k`` experts for every token, and compute their weights.

    With :math:`z = \mathrm{cap}\cdot\tanh(x / \mathrm{cap})` (or :math:`z = x`), scores :math:`s = f(z)` and a
    selection bias :math:`b`, the experts are those of the k largest :math:`s_e + b_e`, in descending order; of equal
    values the lower id comes first. (Without a bias, the logits themselves are compared, so that rounding cannot make
    two scores equal.) Their weights are :math:`s_e`, divided by :math:`\sum s + \mathrm{eps}` if ``renormalize``, times
    ``scale``. Everything is computed in float32 (float64 for float64 logits).

    Args:
        router_logits: ``(..., E)``, float16, bfloat16, float32 or float64; E up to 1024.
        k: experts per token, up to 32.
        score: :math:`f`: ``"softmax"`` (over the experts), ``"sigmoid"`` or ``"sqrtsoftplus"``
            (:math:`\sqrt{\log(1 + e^z)}`).
        selection_bias: ``(E,)``, added for the selection and not in the weights (DeepSeek-V3's correction bias,
            arXiv:2412.19437, section 2.1.2); not differentiable. NaN is taken as -inf, which disables an expert.
        n_group, topk_group: only experts of the ``topk_group`` best of ``n_group`` groups of equal size are selected.
        group_score: the score of a group: ``"top2_sum"``, the sum of its two largest selection values, or ``"max"``.
            Experts that a logit or a bias of -inf disables, or whose selection value is the lowest number of float32,
            count as 0 in the sum.
        renormalize, scale, eps: see above.
        score_after_topk: select by :math:`z_e + b_e`, and compute scores over the k selected logits only (gpt-oss).
        softcap: the cap > 0; None for no soft-cap.
        token_mask: ``(...)``, bool or 0/1. Tokens where it is False have weights and gradients of 0 and are excluded
            from counts and sums; their experts are valid ids.
        losses: whether to return the sums that `load_balancing_loss` and `router_z_loss` need, without another read.
        experts: ``(..., K)``, of any integer dtype (uint64 is read as int64): experts to use instead of the selection
            (a replay), such as those of the sampler in reinforcement learning (arXiv:2510.11370). They keep the given
            order, and are not restricted by groups or bias. Weights, counts, sums and gradients are computed for these
            experts, from the given logits. If one id of a token is -1, the router selects all experts of this token,
            whatever its other ids are.
        count_changed: whether to return how many of the replayed experts are not among the k that the router would have
            selected. The number stays on the device.
        counts: whether to count the tokens of each expert, which auxiliary losses (``losses`` always counts them) and
            `update_selection_bias` need. It adds a tenth to a half to the time of the kernel on an H100.

    Returns:
        `Routing`. Weights and sums are differentiable with respect to the logits; the selection is not.

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype, shape, device or value.
        IndexError, ValueError: in a token that is not masked and has no -1, an id of ``experts`` is no expert, or
            occurs twice. This is raised only on a CPU: elsewhere, the token has NaN weights, a NaN gradient and the
            experts 0 … k - 1.

    A logit of -inf disables an expert (unless a ``softcap`` makes it finite): its score is 0, and it is selected only
    if fewer than k others remain. A token with a NaN logit, or whose scores are not finite or (softmax) not a
    distribution, has NaN weights and the experts 0 … k - 1, or those given by ``experts``: no id is ever out of range.
    """
    given_options = (
        k, score, n_group, topk_group, group_score, renormalize, scale, eps, score_after_topk, softcap, losses,
        is_batch_invariant(), count_changed, counts, selection_bias is not None,
    )  # fmt: skip
    if token_mask is experts is None and may_repeat(router_logits, selection_bias):
        options = check_options(router_logits.shape[1], *given_options)
        again = backend_of(router_logits).route_again(router_logits, selection_bias, options)
        if again is not None and router_logits.requires_grad and torch.is_grad_enabled():
            again = _route_again(router_logits, again, options), *again[1:]
        if again is not None:
            return Routing(*again)
    if not isinstance(router_logits, Tensor):
        raise TypeError(f"router_logits: expected a tensor, got {described(router_logits)}")
    check_logits(router_logits, "router_logits")
    check_local(router_logits, "router_logits")
    E = router_logits.shape[-1]
    options = check_options(E, *given_options)
    k = options.k
    if selection_bias is not None:
        if not isinstance(selection_bias, Tensor) or not selection_bias.is_floating_point():
            raise TypeError(f"selection_bias: expected a floating-point tensor, got {described(selection_bias)}")
        if selection_bias.shape != (E,):
            raise ValueError(f"selection_bias: expected shape ({E},), got {tuple(selection_bias.shape)}")
        check_device(selection_bias, router_logits, "selection_bias")
        selection_bias = selection_bias.detach().to(torch.promote_types(router_logits.dtype, torch.float32))
    if token_mask is not None:
        check_row_mask(token_mask, router_logits, "token_mask")
        token_mask = token_mask.reshape(-1)
    if experts is not None:
        if not isinstance(experts, Tensor) or experts.dtype not in INTEGERS:
            raise TypeError(f"experts: expected a tensor of integers, got {described(experts)}")
        if experts.shape != (*router_logits.shape[:-1], k):
            wanted = *router_logits.shape[:-1], k
            raise ValueError(f"experts: expected shape {wanted}, got {tuple(experts.shape)}")
        check_device(experts, router_logits, "experts")
        experts = experts.reshape(-1, k)
    flat = router_logits.dim() == 2
    logits = router_logits if flat else router_logits.reshape(-1, E)
    logits = logits if logits.stride(-1) == 1 or E == 1 else logits.contiguous()
    if logits.requires_grad and torch.is_grad_enabled():
        results: RoutingResults = _Route.apply(logits, selection_bias, token_mask, experts, options)
    else:
        results = _forward(logits, selection_bias, token_mask, experts, options)
    weights, chosen, counted, prob_sums, logsumexp, changed = results
    if not flat:
        tokens = router_logits.shape[:-1]
        weights, chosen = weights.view(*tokens, k), chosen.view(*tokens, k)
        logsumexp = None if logsumexp is None else logsumexp.view(tokens)
    return Routing(weights, chosen, counted, prob_sums, logsumexp, changed)


def may_repeat(logits: Any, selection_bias: Any) -> bool:
    """Whether `route_again` may be asked for the routing of these, which are ordinary tensors."""
    if not (are_ordinary(logits) if selection_bias is None else are_ordinary(logits, selection_bias)):
        return False
    return logits.dim() == 2 and bool(logits.shape[1]) and logits.is_floating_point()


def softmax_topk(
    router_logits: Tensor,
    k: int,
    *,
    renormalize: bool = True,
    scale: float = 1.0,
    eps: float = 1e-20,
    softcap: float | None = None,
    token_mask: Tensor | None = None,
    losses: bool = False,
) -> Routing:
    """`route` as in Mixtral, Qwen and OLMoE: softmax over the experts, then the k largest, renormalized or not.

    Its arguments, the result and what is raised are as in `route`, which has more options.
    """
    return route(
        router_logits, k, score="softmax", renormalize=renormalize, scale=scale, eps=eps, softcap=softcap,
        token_mask=token_mask, losses=losses,
    )  # fmt: skip


@renamed(positional=("selection_bias",))
def sigmoid_topk(
    router_logits: Tensor,
    k: int,
    *,
    selection_bias: Tensor | None = None,
    n_group: int = 1,
    topk_group: int = 1,
    group_score: GroupScore = "top2_sum",
    renormalize: bool = True,
    scale: float = 1.0,
    eps: float = 1e-20,
    softcap: float | None = None,
    token_mask: Tensor | None = None,
    losses: bool = False,
) -> Routing:
    """`route` as in DeepSeek-V3: sigmoid scores, a correction bias for the selection, groups of experts.

    Its arguments, the result and what is raised are as in `route`, which has more options.
    """
    return route(
        router_logits, k, score="sigmoid", selection_bias=selection_bias, n_group=n_group, topk_group=topk_group,
        group_score=group_score, renormalize=renormalize, scale=scale, eps=eps, softcap=softcap, token_mask=token_mask,
        losses=losses,
    )  # fmt: skip


@memo_of_numbers  # a router is called once for each layer with the same options
def check_options(experts: int, *options: Any) -> RouterOptions:
    """Check the options, and convert each to its declared type."""
    o = RouterOptions(*options)
    if experts > MAX_EXPERTS:
        raise ValueError(f"router_logits: expected at most {MAX_EXPERTS} experts, got {experts}")
    n_group = check_integer(o.n_group, "n_group", 1, experts)
    o = RouterOptions(
        k=check_integer(o.k, "k", 1, min(MAX_K, experts)),
        score=o.score,
        n_group=n_group,
        topk_group=check_integer(o.topk_group, "topk_group", 1, n_group),
        group_score=o.group_score,
        renormalize=check_bool(o.renormalize, "renormalize"),
        scale=check_number(o.scale, "scale", -INF),
        eps=check_number(o.eps, "eps", 0, open_low=False),
        score_after_topk=check_bool(o.score_after_topk, "score_after_topk"),
        softcap=check_transform(1.0, o.softcap)[1],
        sums=check_bool(o.sums, "losses"),
        invariant=o.invariant,
        count_changed=check_bool(o.count_changed, "count_changed"),
        counts=check_bool(o.counts, "counts") or bool(o.sums),
        biased=o.biased,
    )
    check_choice(o.score, "score", SCORES)
    check_choice(o.group_score, "group_score", GROUP_SCORES)
    if experts % o.n_group:
        raise ValueError(f"n_group: expected a divisor of {experts} experts, got {o.n_group}")
    size = experts // o.n_group
    if o.n_group > 1 and o.group_score == "top2_sum" and size < 2:
        raise ValueError("group_score: expected 'max' for groups of one expert, got 'top2_sum'")
    if o.k > o.topk_group * size and o.n_group > 1:
        raise ValueError(f"k: expected at most the {o.topk_group * size} experts of {o.topk_group} groups, got {o.k}")
    return o


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, selection_bias: Tensor | None, token_mask: Tensor | None, given: Tensor | None,
        options: RouterOptions,
    ) -> RoutingResults:  # fmt: skip
        results = _forward(logits, selection_bias, token_mask, given, options)
        if given is not None and not torch.compiler.is_compiling() and given.is_inference():
            given = given.clone()  # which autograd can save
        ctx.save_for_backward(logits, results[1], token_mask, given)
        ctx.options = options
        ctx.mark_non_differentiable(*[results[n] for n in (1, 2, 5) if results[n] is not None])
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        check_upstream(*grads)
        weights, _, _, prob_sums, logsumexp, _ = grads
        sums = (prob_sums, logsumexp) if ctx.options.sums else (None, None)
        return _gradient(*ctx.saved_tensors, RoutingGradients(weights, *sums), ctx.options), None, None, None, None


class _RouteAgain(torch.autograd.Function):
    """The weights in the results of `route_again`, differentiable. That takes autograd less time than six results."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, results: RoutingResults, options: RouterOptions) -> Tensor:
        ctx.save_for_backward(logits, results[1])
        ctx.options = options
        return results[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        check_upstream(grad)
        return _gradient(*ctx.saved_tensors, None, None, RoutingGradients(grad), ctx.options), None, None


_route_again = apply_to_ordinary(_RouteAgain)


@operation("onepass::route", lambda logits, options, **_: empty_routing(logits, options))
def _forward(
    logits: Tensor, selection_bias: Tensor | None, token_mask: Tensor | None, given: Tensor | None,
    options: RouterOptions,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    return backend_of(logits).route(logits, selection_bias, token_mask, given, options)


@operation("onepass::route_gradient", like_logits)
def _gradient(
    logits: Tensor, experts: Tensor, token_mask: Tensor | None, given: Tensor | None, grads: RoutingGradients,
    options: RouterOptions,
) -> Tensor:  # fmt: skip
    return backend_of(logits).route_gradient(logits, experts, token_mask, given, grads, options)
