"""The routers of `onepass bench`: logits of experts instead of a vocabulary, 8 experts a token. Outputs are weights."""

from functools import lru_cache

import torch
from torch import Generator, Tensor

from onepass import moe
from onepass.cli.peers import Forward

K, GROUPS, KEPT_GROUPS = 8, 8, 4


def no_inputs(logits: Tensor, mask: Tensor | None, generator: Generator) -> tuple[Tensor, ...]:
    return ()


def softmax_topk(logits: Tensor, mask: Tensor | None) -> tuple[Tensor, ...]:
    """As Mixtral and Qwen3-MoE in transformers."""
    p = logits.softmax(-1, dtype=None if logits.dtype == torch.float64 else torch.float32)
    weights = p.topk(K, dim=-1)[0]
    return (weights / weights.sum(-1, keepdim=True),)


@lru_cache
def correction_bias(experts: int, device: torch.device) -> Tensor:
    return torch.linspace(-0.1, 0.1, experts, device=device)


def sigmoid_topk(logits: Tensor, mask: Tensor | None) -> tuple[Tensor, ...]:
    """As DeepSeek-V3 in transformers: the best groups by their two best experts."""
    scores = (logits if logits.dtype == torch.float64 else logits.float()).sigmoid()
    value = scores + correction_bias(logits.shape[-1], logits.device)
    grouped = value.view(len(value), GROUPS, -1)
    groups = grouped.topk(2, dim=-1)[0].sum(-1).topk(KEPT_GROUPS, dim=-1, sorted=False)[1]
    kept = torch.zeros_like(grouped[..., 0]).scatter_(1, groups, 1)
    value = value.masked_fill(~kept.unsqueeze(-1).expand_as(grouped).reshape_as(value).bool(), float("-inf"))
    weights = scores.gather(1, value.topk(K, dim=-1)[1])
    return (weights / (weights.sum(-1, keepdim=True) + 1e-20) * 2.5,)


def our_softmax_topk(logits: Tensor, mask: Tensor | None) -> tuple[Tensor, ...]:
    return (moe.softmax_topk(logits, K, token_mask=mask).weights,)


def our_sigmoid_topk(logits: Tensor, mask: Tensor | None) -> tuple[Tensor, ...]:
    bias = correction_bias(logits.shape[-1], logits.device)
    groups = {"n_group": GROUPS, "topk_group": KEPT_GROUPS}
    return (moe.sigmoid_topk(logits, K, bias, **groups, scale=2.5, token_mask=mask).weights,)


ROUTERS: dict[str, tuple[Forward, Forward]] = {
    "softmax_topk": (softmax_topk, our_softmax_topk),
    "sigmoid_topk": (sigmoid_topk, our_sigmoid_topk),
}
