"""What stands in for the causal-LM loss and the routers of transformers; see `onepass.patch`."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from onepass.integrations.experts import PEFT, activate_lora, register
from onepass.integrations.patching import Target
from onepass.losses.cross_entropy import cross_entropy
from onepass.moe.families import router_outputs

__all__ = ["TARGETS", "ForCausalLMLoss", "register", "router_of"]


def ForCausalLMLoss(
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    num_items_in_batch: Tensor | float | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """`onepass.cross_entropy` of the next token: of the logits as they are, without a float32 copy.

    A model with a soft-cap has applied it already.

    Args:
        logits: ``(..., vocab_size)``.
        labels: ``(...)``, which are shifted here; not read where there are ``shift_labels``, which are shifted already.
        num_items_in_batch: divides the sum; without it the loss is the mean over the labels that are not ignored.
        kwargs: what trainers pass along and the loss does not depend on.
    """
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    logits = logits if logits.shape[-1] == vocab_size else logits.reshape(-1, vocab_size)
    target = shift_labels.reshape(logits.shape[:-1]).to(logits.device)
    if num_items_in_batch is None:
        return cross_entropy(logits, target, ignore_index=ignore_index)
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(logits.device)
    return cross_entropy(logits, target, ignore_index=ignore_index, reduction="sum") / num_items_in_batch


def router_of(family: str) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """What `forward` of the family's router becomes: ``(logits, weights, experts)`` of the tokens ``(T, ...)``."""

    def forward(
        self: nn.Module, hidden_states: Tensor, e_score_correction_bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        given = {} if e_score_correction_bias is None else {"selection_bias": e_score_correction_bias}
        return router_outputs(self, hidden_states.reshape(-1, hidden_states.shape[-1]), **given)

    forward.__name__ = forward.__qualname__ = f"router_of_{family}"
    return forward


# The module and the class of every family's router.
ROUTERS = {
    "mixtral": "MixtralTopKRouter",
    "qwen2_moe": "Qwen2MoeTopKRouter",
    "qwen3_moe": "Qwen3MoeTopKRouter",
    "qwen3_next": "Qwen3NextTopKRouter",
    "olmoe": "OlmoeTopKRouter",
    "deepseek_v2": "DeepseekV2TopkRouter",
    "deepseek_v3": "DeepseekV3TopkRouter",
    "glm4_moe": "Glm4MoeTopkRouter",
    "minimax": "MiniMaxTopKRouter",
    "minimax_m2": "MiniMaxM2TopKRouter",
    "gpt_oss": "GptOssTopKRouter",
    "ernie4_5_moe": "Ernie4_5_MoeTopKRouter",
    "hunyuan_v1_moe": "HunYuanMoEV1Gate",
    "dots1": "Dots1TopkRouter",
}
TARGETS = [
    Target(
        "transformers.loss.loss_utils", "ForCausalLMLoss", ForCausalLMLoss,
        ("logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, kwargs",), since="4.56",
    ),
    *(
        Target(
            f"transformers.models.{family}.modeling_{family}", f"{router}.forward", router_of(family),
            ("self, hidden_states", "self, hidden_states, e_score_correction_bias"),
            since="5.15", returns="(router_logits, ",
        )
        for family, router in ROUTERS.items()
    ),
    *([Target(*PEFT, activate_lora, ("self, active_adapters",), since="0.18")] if find_spec("peft") else []),
]  # fmt: skip
