"""An implementation of an operation: of onepass, of torch or of a peer (another library that computes the same)."""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import onepass
from onepass.cli.environment import package_version

Tensors = tuple[Tensor, ...]
Forward = Callable[..., Tensors]  # from the operation's inputs and a mask to its outputs


def in_batch_invariant_mode(ours: Forward) -> Forward:
    def forward(*arguments: Tensor | None) -> Tensors:
        with onepass.batch_invariant():
            return ours(*arguments)

    return forward


@dataclass(frozen=True)
class Implementation:
    """An implementation of an operation.

    Attributes:
        name: what tables call it.
        package: the distribution that it comes from.
        forward: takes the operation's inputs and a mask.
        backward: whether all outputs are differentiable.
        masks: whether it can leave rows out.
    """

    name: str
    package: str
    forward: Forward
    backward: bool = True
    masks: bool = True

    @property
    def version(self) -> str | None:
        return onepass.__version__ if self.package == "onepass" else package_version(self.package)


EAGER, AS_IT_IS = "torch eager", "torch eager, in the dtype of the logits"
OF_TORCH = ("torch.compile", AS_IT_IS, EAGER)  # what is no peer; eager is in float32 unless its name says otherwise

Peer = tuple[str, str, Callable[[str, str], Implementation]]  # its name, its package, and what loads it


def attribute(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def first_line(error: Exception) -> str:
    return str(error).split("\n")[0][:200]


def available(
    ours: Forward, definition: Forward, masks: bool, peers: Sequence[Peer], compiled: bool
) -> tuple[list[Implementation], dict[str, str]]:
    """The implementations that can be run here, and why each of the other peers cannot."""
    found = [
        Implementation("onepass", "onepass", ours),
        Implementation(EAGER, "torch", definition, masks=masks),
    ]
    if compiled:
        found.append(Implementation("torch.compile", "torch", torch.compile(definition, dynamic=False), masks=masks))
    missing = {}
    for peer, package, load in peers:
        try:
            found.append(load(peer, package))
        except Exception as error:  # a peer may fail to import in any way; the table says so and goes on
            missing[peer] = f"{type(error).__name__}: {first_line(error)}"
    return found, missing
