"""Reading the attributes of PEFT's layers, without importing PEFT."""

from typing import Any


def lora_variant(layer: Any, adapter: str) -> str:
    """The variant of LoRA that an adapter of a layer is, "DoRA" or the name of its class; empty for plain LoRA."""
    variant = getattr(layer, "lora_variant", {}).get(adapter)
    if variant is not None:
        return type(variant).__name__
    return "DoRA" if getattr(layer, "use_dora", {}).get(adapter) else ""
