"""What `onepass bench` runs: onepass, torch and each installed peer, called as their users call them.

A function takes ``(logits, target, mask)`` and returns the operation's outputs. ``mask`` is None, or the rows that
count; losses with an ``ignore_index`` find it in ``target`` as well.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import onepass
from onepass.cli.environment import package_version

Forward = Callable[[Tensor, Tensor, Tensor | None], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Implementation:
    name: str
    package: str
    forward: Forward
    backward: bool = True  # whether all outputs are differentiable
    masks: bool = True  # whether it can leave rows out

    @property
    def version(self) -> str | None:
        return onepass.__version__ if self.package == "onepass" else package_version(self.package)


def log_probs_and_entropy(logits: Tensor, target: Tensor, mask: Tensor | None) -> tuple[Tensor, ...]:
    """The definition, in plain torch."""
    log_p = logits.log_softmax(-1, dtype=None if logits.dtype == torch.float64 else torch.float32)
    return log_p.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


def log_probs(logits: Tensor, target: Tensor, mask: Tensor | None) -> tuple[Tensor, ...]:
    log_p = logits.log_softmax(-1, dtype=None if logits.dtype == torch.float64 else torch.float32)
    return (log_p.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1),)


def cross_entropy(logits: Tensor, target: Tensor, mask: Tensor | None) -> tuple[Tensor, ...]:
    """As transformers computes it: in float32, mean over the targets that are not ignored."""
    return (F.cross_entropy(logits if logits.dtype == torch.float64 else logits.float(), target),)


DEFINITIONS: dict[str, Forward] = {
    "log_probs_and_entropy": log_probs_and_entropy,
    "log_probs": log_probs,
    "cross_entropy": cross_entropy,
}

OURS: dict[str, Forward] = {
    "log_probs_and_entropy": lambda x, t, m: onepass.selective_log_softmax_and_entropy(x, t, row_mask=m),
    "log_probs": lambda x, t, m: (onepass.selective_log_softmax(x, t, row_mask=m),),
    "cross_entropy": lambda x, t, m: (onepass.cross_entropy(x, t),),
}


def implementations(operation: str, compiled: bool) -> tuple[list[Implementation], dict[str, str]]:
    """The implementations of an operation that are here, and why each of the others is not."""
    found = [
        Implementation("onepass", "onepass", OURS[operation]),
        Implementation("torch eager", "torch", DEFINITIONS[operation], masks=operation == "cross_entropy"),
    ]
    if compiled:
        definition = torch.compile(DEFINITIONS[operation], dynamic=False)
        found.append(Implementation("torch.compile", "torch", definition, masks=operation == "cross_entropy"))
    missing = {}
    for name, package, load in PEERS[operation]:
        try:
            found.append(load(name, package))
        except Exception as error:  # a peer may fail to import in any way; the table says so and goes on
            missing[name] = f"{type(error).__name__}: {error}".split("\n")[0][:200]
    return found, missing


def attribute(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def trl_pair(name: str, package: str) -> Implementation:
    call = attribute("trl.kernels.logprob_entropy", "selective_log_softmax_and_entropy")
    return Implementation(name, package, lambda x, t, m: call(x, t, row_mask=m))


def trl_log_probs(name: str, package: str) -> Implementation:
    call = attribute("trl.kernels.logprob_entropy", "selective_log_softmax_and_entropy")
    return Implementation(name, package, lambda x, t, m: (call(x, t, row_mask=m)[0],))


def mean_of_kept(log_probs: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Forward:
    """A cross-entropy of a peer's log-probs: targets that are ignored (-100) must be left out, as by all others."""

    def forward(x: Tensor, t: Tensor, m: Tensor | None) -> tuple[Tensor, ...]:
        kept = t != -100
        return (-(log_probs(x, t.clamp(min=0), kept) * kept).sum() / kept.sum(),)

    return forward


def trl_cross_entropy(name: str, package: str) -> Implementation:
    call = attribute("trl.kernels.logprob_entropy", "selective_log_softmax_and_entropy")
    return Implementation(name, package, mean_of_kept(lambda x, t, kept: call(x, t, row_mask=kept)[0]))


def axolotl_pair(name: str, package: str) -> Implementation:
    select = attribute("axolotl.monkeypatch.trainer.utils", "selective_log_softmax")
    entropy = attribute("axolotl.monkeypatch.trainer.utils", "entropy_from_logits")
    forward: Forward = lambda x, t, m: (select(x, t), entropy(x))  # noqa: E731
    return Implementation(name, package, forward, backward=False, masks=False)


def axolotl_log_probs(name: str, package: str) -> Implementation:
    select = attribute("axolotl.monkeypatch.trainer.utils", "selective_log_softmax")
    return Implementation(name, package, lambda x, t, m: (select(x, t),), masks=False)


def axolotl_cross_entropy(name: str, package: str) -> Implementation:
    select = attribute("axolotl.monkeypatch.trainer.utils", "selective_log_softmax")
    return Implementation(name, package, mean_of_kept(lambda x, t, kept: select(x, t)), masks=False)


def liger_cross_entropy(name: str, package: str) -> Implementation:
    loss = attribute("liger_kernel.transformers", "LigerCrossEntropyLoss")()
    return Implementation(name, package, lambda x, t, m: (loss(x, t),))


def quack_cross_entropy(name: str, package: str) -> Implementation:
    call = attribute("quack", "cross_entropy")
    return Implementation(name, package, lambda x, t, m: (call(x, t),))


PEERS: dict[str, list[tuple[str, str, Callable[[str, str], Implementation]]]] = {
    "log_probs_and_entropy": [("TRL", "trl", trl_pair), ("axolotl", "axolotl", axolotl_pair)],
    "log_probs": [("TRL", "trl", trl_log_probs), ("axolotl", "axolotl", axolotl_log_probs)],
    "cross_entropy": [
        ("TRL", "trl", trl_cross_entropy),
        ("axolotl", "axolotl", axolotl_cross_entropy),
        ("QuACK", "quack-kernels", quack_cross_entropy),
        ("Liger (in place)", "liger-kernel", liger_cross_entropy),
    ],
}
