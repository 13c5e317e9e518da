"""Integrations into torch, torchtitan, Megatron, verl, TRL, transformers, PEFT and axolotl.

Importing this package imports none of them. `OnepassCallback` and `SelectionBiasCallback` need transformers.
"""

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    if name in ("OnepassCallback", "SelectionBiasCallback"):
        return getattr(import_module("onepass.integrations.callback"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
