"""Routers, which the benchmark of logits measures too: logits of experts, of which every token chooses 8 (a power of
two, since QuACK takes no other number).

The outputs that are compared are the weights of the chosen experts.
"""

from functools import lru_cache

import torch
from torch import Generator, Tensor

from benchmarks.implementations import Forward, Implementation, Peer
from onepass import moe

K, GROUPS, KEPT_GROUPS = 8, 8, 4


def no_inputs(logits: Tensor, mask: Tensor | None, generator: Generator) -> tuple[Tensor, ...]:
    return ()


def softmax_topk(logits: Tensor, mask: Tensor | None) -> tuple[Tensor, ...]:
    """As Mixtral and Qwen3-MoE route in transformers."""
    p = logits.softmax(-1, dtype=None if logits.dtype == torch.float64 else torch.float32)
    weights, experts = p.topk(K, dim=-1)
    return weights / weights.sum(-1, keepdim=True), experts


@lru_cache
def correction_bias(experts: int, device: torch.device) -> Tensor:
    return torch.linspace(-0.1, 0.1, experts, device=device)


def sigmoid_topk(logits: Tensor, mask: Tensor | None) -> tuple[Tensor, ...]:
    """As DeepSeek-V3 routes in transformers: the best groups by their two best experts."""
    scores = (logits if logits.dtype == torch.float64 else logits.float()).sigmoid()
    value = scores + correction_bias(logits.shape[-1], logits.device)
    grouped = value.view(len(value), GROUPS, -1)
    groups = grouped.topk(2, dim=-1)[0].sum(-1).topk(KEPT_GROUPS, dim=-1, sorted=False)[1]
    kept = torch.zeros_like(grouped[..., 0]).scatter_(1, groups, 1)
    value = value.masked_fill(~kept.unsqueeze(-1).expand_as(grouped).reshape_as(value).bool(), float("-inf"))
    experts = value.topk(K, dim=-1)[1]
    weights = scores.gather(1, experts)
    return weights / (weights.sum(-1, keepdim=True) + 1e-20) * 2.5, experts


def uncounted(router: Forward) -> Forward:
    """The weights of a router alone, which is less than `onepass.moe.route` returns."""
    return lambda logits, mask: router(logits, mask)[:1]


def counted(router: Forward) -> Forward:
    """The weights of a router; also computes how many tokens each expert gets, as transformers' grouped GEMMs need."""

    def call(logits: Tensor, mask: Tensor | None) -> tuple[Tensor, ...]:
        weights, experts = router(logits, mask)
        count = logits.shape[-1]
        ids = experts.float() if experts.is_cpu else experts.int()
        torch.histc(ids, bins=count, min=0, max=count - 1)
        return (weights,)

    return call


def our_softmax_topk(logits: Tensor, mask: Tensor | None) -> tuple[Tensor, ...]:
    return (moe.softmax_topk(logits, K, token_mask=mask).weights,)


def our_softmax_topk_uncounted(logits: Tensor, mask: Tensor | None) -> tuple[Tensor, ...]:
    return (moe.route(logits, K, counts=False, token_mask=mask).weights,)


def our_sigmoid_topk(logits: Tensor, mask: Tensor | None) -> tuple[Tensor, ...]:
    bias = correction_bias(logits.shape[-1], logits.device)
    routing = moe.sigmoid_topk(
        logits, K, selection_bias=bias, n_group=GROUPS, topk_group=KEPT_GROUPS, scale=2.5, token_mask=mask
    )
    return (routing.weights,)


ROUTERS: dict[str, tuple[Forward, Forward]] = {
    "softmax_topk": (uncounted(softmax_topk), our_softmax_topk),
    "softmax_topk_uncounted": (uncounted(softmax_topk), our_softmax_topk_uncounted),
    "sigmoid_topk": (uncounted(sigmoid_topk), our_sigmoid_topk),
}


def eager_with_counts(router: Forward) -> Peer:
    return (
        "torch eager, with counts",
        "torch",
        lambda name, package: Implementation(name, package, counted(router), masks=False),
    )


ROUTER_PEERS: dict[str, list[Peer]] = {
    "softmax_topk": [eager_with_counts(softmax_topk)],
    "sigmoid_topk": [eager_with_counts(sigmoid_topk)],
}
