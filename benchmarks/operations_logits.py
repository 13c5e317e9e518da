"""The operations on logits: the definition of each in plain torch, onepass's own, its inputs and its traffic.

A function takes ``(logits, *inputs, mask)`` and returns the operation's outputs. ``mask`` is None, or True for the rows
that count; a loss with an ``ignore_index`` finds it in ``target`` as well.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

import onepass
from benchmarks.implementations import Forward, Implementation, available, in_batch_invariant_mode
from benchmarks.operations_routers import ROUTER_PEERS, ROUTERS, no_inputs
from benchmarks.peers_logits import PEERS
from onepass.cli.workloads import LOSS_SHAPES, Workload, log_softmax
from onepass.cli.workloads import OPERATIONS as WORKLOADS
from onepass.cli.workloads import topk_kl_div as topk_workload
from onepass.core.options import Direction

KEPT = 64  # ids of the support of a row
ROUTER_SHAPES = ("65536x256", "65536x128", "16384x512", "8192x128", "8192x64", "64x256")  # tokens x experts


@dataclass(frozen=True)
class Operation:
    """An operation on logits.

    Attributes:
        definition: the operation in plain torch.
        ours: the operation of onepass.
        inputs: makes the inputs besides the logits, from ``(logits, mask, generator)``.
        reads: how many tensors of the logits' size the forward and the backward must read; the backward writes one.
        masks: whether the definition can leave rows out.
        shapes: the default shapes on a GPU.
        shape_on_cpu: the default shape on a CPU.
    """

    definition: Forward
    ours: Forward
    inputs: Callable[[Tensor, Tensor | None, Generator], tuple[Tensor, ...]]
    reads: tuple[int, int] = (1, 1)
    masks: bool = True
    shapes: Sequence[str] = LOSS_SHAPES
    shape_on_cpu: str = "256x32000"


def log_probs_and_entropy(logits: Tensor, target: Tensor, mask: Tensor | None) -> tuple[Tensor, ...]:
    log_p = log_softmax(logits)
    return log_p.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


def log_probs(logits: Tensor, target: Tensor, mask: Tensor | None) -> tuple[Tensor, ...]:
    return (log_softmax(logits).gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1),)


def cross_entropy(logits: Tensor, target: Tensor, mask: Tensor | None) -> tuple[Tensor, ...]:
    """As transformers computes it: in float32, the mean over the targets that are not ignored."""
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


def of(workload: Workload, definition: Forward, reads: tuple[int, int] = (1, 1), masks: bool = True) -> Operation:
    return Operation(definition, workload.ours, workload.inputs, reads, masks)


def supports(logits: Tensor, mask: Tensor | None, generator: Generator) -> tuple[Tensor, ...]:
    """Ids of each row that a sampler might have kept, distinct, and one of them."""
    rows, vocab = logits.shape
    step = vocab // KEPT
    at_random = partial(torch.randint, generator=generator, device=logits.device)
    ids = torch.arange(KEPT, device=logits.device) * step + at_random(step, (rows, KEPT))
    return ids.gather(-1, at_random(KEPT, (rows, 1))).squeeze(-1), ids


def of_support(logits: Tensor, target: Tensor, ids: Tensor, mask: Tensor | None) -> tuple[Tensor, ...]:
    place = (ids == target.unsqueeze(-1)).long().argmax(-1)
    return log_probs_and_entropy(logits.gather(-1, ids), place, mask)


def our_support(logits: Tensor, target: Tensor, ids: Tensor, mask: Tensor | None) -> tuple[Tensor, ...]:
    return onepass.selective_log_softmax_and_entropy(logits, target, row_mask=mask, support=ids)


OPERATIONS: dict[str, Operation] = {
    "log_probs_and_entropy": of(WORKLOADS["log_probs_and_entropy"], log_probs_and_entropy, masks=False),
    "log_probs": of(WORKLOADS["log_probs"], log_probs, masks=False),
    "cross_entropy": of(WORKLOADS["cross_entropy"], cross_entropy),
    "topk_kl_div": of(WORKLOADS["topk_kl_div"], topk_kl_div),
    "topk_kl_div_renormalized": of(
        topk_workload(renormalize=True), partial(topk_kl_div, renormalize=True), reads=(0, 0)
    ),
    "kl_div": of(WORKLOADS["kl_div"], kl_div, reads=(2, 2)),
    "kl_div_reverse": of(WORKLOADS["kl_div_reverse"], partial(kl_div, direction="reverse"), reads=(2, 2)),
    "jsd": of(WORKLOADS["jsd"], partial(kl_div, direction="jsd"), reads=(4, 2)),
    "log_probs_and_entropy_invariant": Operation(
        log_probs_and_entropy, in_batch_invariant_mode(WORKLOADS["log_probs_and_entropy"].ours),
        WORKLOADS["log_probs_and_entropy"].inputs, masks=False,
    ),
    "log_probs_and_entropy_support": Operation(of_support, our_support, supports, reads=(0, 0), masks=False),
    **{name: Operation(definition, ours, no_inputs, masks=False, shapes=ROUTER_SHAPES, shape_on_cpu="1024x64")
       for name, (definition, ours) in ROUTERS.items()},
}  # fmt: skip


def implementations(name: str, compiled: bool, peers: bool) -> tuple[list[Implementation], dict[str, str]]:
    """The implementations of an operation that can be run here, and why each of the others cannot."""
    operation = OPERATIONS[name]
    others = [*ROUTER_PEERS.get(name, ()), *(PEERS.get(name, ()) if peers else ())]
    return available(operation.ours, operation.definition, operation.masks, others, compiled)
