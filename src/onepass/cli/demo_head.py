"""The losses that `onepass demo` compares: of a model's logits, or of its linear head."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import onepass

Loss = Callable[..., Tensor]  # (*inputs of a head, labels) -> scalar


@dataclass(frozen=True)
class Head:
    """What a demo measures apart from the model: a loss of these inputs, by each implementation."""

    name: str
    part: str
    given: str
    inputs: Callable[[Any, Tensor], tuple[Tensor, ...]]  # (model, ids) -> the tensors that get gradients
    losses: dict[str, Loss]
    entropies: dict[str, Loss]  # of the predictions, mean over tokens; none: not recorded
    steps: int
    bound: float  # on the difference of the two curves, where both are float32


def mixed_precision(device: torch.device) -> Any:
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def logits_of(model: Any, ids: Tensor) -> tuple[Tensor, ...]:
    return (model(ids).logits,)


def torch_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """As transformers computes it: upcast (nothing to do in float32), because torch rounds to the logits' dtype."""
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, -2), labels.flatten())


def hidden_and_weight(model: Any, ids: Tensor) -> tuple[Tensor, ...]:
    return model.model(ids).last_hidden_state, model.lm_head.weight


def torch_linear(hidden: Tensor, weight: Tensor) -> Tensor:
    with mixed_precision(hidden.device):
        return torch.nn.functional.linear(hidden, weight)


def torch_linear_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return torch_loss(torch_linear(hidden, weight), labels)


def torch_linear_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    log_probs = torch_linear(hidden, weight).float().log_softmax(-1)
    return -(log_probs.exp() * log_probs).sum(-1).mean()


def onepass_linear_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    with mixed_precision(hidden.device):
        return onepass.linear_cross_entropy(hidden, weight, labels)


def onepass_linear_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    with mixed_precision(hidden.device):
        return onepass.linear_selective_log_softmax_and_entropy(hidden, weight, labels)[1].mean()


HEADS = {
    "logits": Head(
        name="cross-entropy",
        part="loss and its gradient",
        given="the logits",
        inputs=logits_of,
        losses={"torch": torch_loss, "onepass": onepass.cross_entropy},
        entropies={},
        steps=80,
        bound=1e-4,
    ),
    "linear": Head(
        name="linear head with cross-entropy",
        part="linear head, loss and their gradients",
        given="the hidden states and the weight",
        inputs=hidden_and_weight,
        losses={"torch": torch_linear_loss, "onepass": onepass_linear_loss},
        entropies={"torch": torch_linear_entropy, "onepass": onepass_linear_entropy},
        steps=200,
        bound=1e-3,
    ),
}
