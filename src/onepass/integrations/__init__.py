"""Integrations into torch, torchtitan, Megatron, verl, TRL, transformers, PEFT and axolotl.

Importing this package imports none of them. `OnepassCallback` needs transformers.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "OnepassCallback":
        from onepass.integrations.callback import OnepassCallback

        return OnepassCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
