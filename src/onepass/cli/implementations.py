"""The operations of `onepass bench`: each in plain torch, ours, its inputs and its traffic. `peers.py` has the peers.

A function takes ``(logits, *inputs, mask)`` and returns the operation's outputs. ``mask`` is None, or the rows that
count; losses with an ``ignore_index`` find it in ``target`` as well.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

import onepass
from onepass.cli.implementations_moe import ROUTER_PEERS, ROUTERS, no_inputs
from onepass.cli.peers import PEERS, Forward, Implementation, Peer
from onepass.core.options import Direction

TOP_K = 64
LOSS_SHAPES = ("8192x151936", "8192x128256", "16384x32000", "64x151936")
ROUTER_SHAPES = ("65536x256", "8192x128", "64x256")  # tokens x experts


def random_logits(shape: Sequence[int], dtype: torch.dtype, generator: Generator) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device=generator.device).normal_(std=3.0, generator=generator)


def targets(logits: Tensor, mask: Tensor | None, generator: Generator) -> tuple[Tensor, ...]:
    target = torch.randint(logits.shape[-1], logits.shape[:1], generator=generator, device=logits.device)
    return (target if mask is None else target.where(mask, -100),)


def teacher(logits: Tensor, mask: Tensor | None, generator: Generator) -> tuple[Tensor, ...]:
    return (random_logits(logits.shape, logits.dtype, generator),)


def teacher_top_k(logits: Tensor, mask: Tensor | None, generator: Generator) -> tuple[Tensor, ...]:
    """Token ids and log-probabilities, from blocks of rows: a whole teacher is never there."""
    shapes = [x.shape for x in logits.split(256)]
    top = [log_softmax(random_logits(s, logits.dtype, generator)).topk(min(TOP_K, s[-1])) for s in shapes]
    return torch.cat([t.indices for t in top]), torch.cat([t.values for t in top])


@dataclass(frozen=True)
class Operation:
    definition: Forward  # in plain torch
    ours: Forward
    inputs: Callable[[Tensor, Tensor | None, Generator], tuple[Tensor, ...]] = targets
    reads: tuple[int, int] = (1, 1)  # of a tensor of the logits' size, forward and backward; the backward writes one
    masks: bool = True  # whether the definition can leave rows out
    shapes: Sequence[str] = LOSS_SHAPES  # on a GPU, where none is asked for
    shape_on_cpu: str = "256x32000"


def log_softmax(logits: Tensor) -> Tensor:
    return logits.log_softmax(-1, dtype=None if logits.dtype == torch.float64 else torch.float32)


def log_probs_and_entropy(logits: Tensor, target: Tensor, mask: Tensor | None) -> tuple[Tensor, ...]:
    log_p = log_softmax(logits)
    return log_p.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


def log_probs(logits: Tensor, target: Tensor, mask: Tensor | None) -> tuple[Tensor, ...]:
    return (log_softmax(logits).gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1),)


def cross_entropy(logits: Tensor, target: Tensor, mask: Tensor | None) -> tuple[Tensor, ...]:
    """As transformers computes it: in float32, mean over the targets that are not ignored."""
    return (F.cross_entropy(logits if logits.dtype == torch.float64 else logits.float(), target),)


def mean(rows: Tensor, mask: Tensor | None) -> tuple[Tensor, ...]:
    return (rows.mean() if mask is None else (rows * mask).sum() / mask.sum(),)


def kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(p || q) of each row, from log-probabilities."""
    return F.kl_div(q, p, reduction="none", log_target=True).sum(-1)


def topk_kl_div(
    logits: Tensor, ids: Tensor, log_probs: Tensor, mask: Tensor | None, renormalize: bool = False
) -> tuple[Tensor, ...]:
    if renormalize:
        return mean(kl(log_softmax(log_probs), log_softmax(logits.gather(-1, ids))), mask)
    return mean(kl(log_probs, log_softmax(logits).gather(-1, ids)), mask)


def kl_div(
    logits: Tensor, teacher: Tensor, mask: Tensor | None, direction: Direction = "forward"
) -> tuple[Tensor, ...]:
    s, t = log_softmax(logits), log_softmax(teacher)
    if direction == "jsd":
        middle = torch.logaddexp(s, t) - math.log(2)
        return mean((kl(t, middle) + kl(s, middle)) / 2, mask)
    return mean(kl(t, s) if direction == "forward" else kl(s, t), mask)


def top_k(renormalize: bool, reads: tuple[int, int]) -> Operation:
    return Operation(
        partial(topk_kl_div, renormalize=renormalize),
        lambda x, ids, p, m: (onepass.topk_kl_div(x, ids, p, row_mask=m, renormalize=renormalize, reduction="mean"),),
        teacher_top_k,
        reads,
    )


def divergence(direction: Direction, reads: tuple[int, int]) -> Operation:
    return Operation(
        partial(kl_div, direction=direction),
        lambda x, t, m: (onepass.kl_div(x, t, row_mask=m, direction=direction, reduction="mean"),),
        teacher,
        reads,
    )


OPERATIONS: dict[str, Operation] = {
    "log_probs_and_entropy": Operation(
        log_probs_and_entropy, lambda x, t, m: onepass.selective_log_softmax_and_entropy(x, t, row_mask=m), masks=False
    ),
    "log_probs": Operation(log_probs, lambda x, t, m: (onepass.selective_log_softmax(x, t, row_mask=m),), masks=False),
    "cross_entropy": Operation(cross_entropy, lambda x, t, m: (onepass.cross_entropy(x, t),)),
    "topk_kl_div": top_k(renormalize=False, reads=(1, 1)),
    "topk_kl_div_renormalized": top_k(renormalize=True, reads=(0, 0)),
    "kl_div": divergence("forward", reads=(2, 2)),
    "kl_div_reverse": divergence("reverse", reads=(2, 2)),
    "jsd": divergence("jsd", reads=(4, 2)),
    **{name: Operation(definition, ours, no_inputs, masks=False, shapes=ROUTER_SHAPES, shape_on_cpu="1024x64")
       for name, (definition, ours) in ROUTERS.items()},
}  # fmt: skip


def implementations(name: str, compiled: bool) -> tuple[list[Implementation], dict[str, str]]:
    """The implementations of an operation that are here, and why each of the others is not."""
    operation = OPERATIONS[name]
    peers = [*ROUTER_PEERS.get(name, ()), *PEERS.get(name, ())]
    return available(operation.ours, operation.definition, operation.masks, peers, compiled)


def available(
    ours: Forward, definition: Forward, masks: bool, peers: Sequence[Peer], compiled: bool
) -> tuple[list[Implementation], dict[str, str]]:
    found = [
        Implementation("onepass", "onepass", ours),
        Implementation("torch eager", "torch", definition, masks=masks),
    ]
    if compiled:
        found.append(Implementation("torch.compile", "torch", torch.compile(definition, dynamic=False), masks=masks))
    missing = {}
    for peer, package, load in peers:
        try:
            found.append(load(peer, package))
        except Exception as error:  # a peer may fail to import in any way; the table says so and goes on
            missing[peer] = f"{type(error).__name__}: {error}".split("\n")[0][:200]
    return found, missing
