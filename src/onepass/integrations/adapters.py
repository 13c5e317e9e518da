"""PEFT's LoRA on an output embedding: its factors, for the ``lora`` of `onepass.LinearLogits`."""

import sys
from typing import Any

from torch import nn

from onepass.core.checks import Adapter
from onepass.core.peft import lora_variant
from onepass.logits.fsdp2 import sharded_parameter


def is_adapted(head: Any) -> bool:
    """Whether a module is PEFT's LoRA layer of a linear one, with the forward of PEFT."""
    layers = sys.modules.get("peft.tuners.lora.layer")  # not imported for this: without it there is no such layer
    if layers is None:
        return False
    kinds = type(head).__mro__ if hasattr(head, "unshard") else (type(head),)
    return layers.Linear in kinds[:3]  # the class that FSDP2 gives to a unit has two bases: FSDP2's, and this one


def active_adapters(head: Any) -> list[str]:
    """The active adapters, which are not merged into the base layer; empty if they are disabled or merged."""
    if head.disable_adapters or head.merged:
        return []
    return [name for name in head.active_adapters if name in head.lora_A]


def adapter_reason(head: Any, trained: bool = False) -> str:
    """Why the logits of an adapted head are not those of `LinearLogits`; empty if they are.

    Args:
        trained: whether to answer for a head that will be trained, whatever its mode is now.
    """
    names = active_adapters(head)
    if head.disable_adapters and head.merged:
        return "its adapter is merged but disabled"
    if len(names) > 1:
        return f"it has several active adapters: {', '.join(names)}"
    for name in names:
        variant = lora_variant(head, name)
        dropout = head.lora_dropout[name]
        if variant:
            return f"its adapter is {variant}, not plain LoRA"
        if not isinstance(dropout, nn.Identity) and (trained or dropout.training):
            return "its adapter has dropout"
        if head.lora_B[name].bias is not None:
            return "its adapter has a bias"
    return ""


def adapter_layers(head: Any) -> list[nn.Module]:
    """The linear layers of the active adapters of a head that `is_adapted`."""
    return [layers[name] for name in active_adapters(head) for layers in (head.lora_A, head.lora_B)]


def adapter_factors(head: Any) -> Adapter | None:
    """``(A, B, scaling)`` of the active adapter of a head without an `adapter_reason`; None if there is none."""
    if not is_adapted(head):
        return None
    for name in active_adapters(head):
        a, b = (sharded_parameter(factor[name], "weight") for factor in (head.lora_A, head.lora_B))
        return a, b, head.scaling[name]
    return None
