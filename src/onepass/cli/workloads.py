"""What `onepass autotune run` measures: operations, their random inputs and their shapes.

The benchmarks of a checkout measure the same operations.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import typer
from torch import Generator, Tensor

import onepass
from onepass.core.options import Direction

TOP_K = 64
LOSS_FORM, LOSS_SHAPES = "ROWSxVOCABULARY", ("8192x151936", "8192x128256", "16384x32000", "64x151936")
EXPERT_FORM = "TOKENSxHIDDENxINTERMEDIATExEXPERTSxCHOICES"
QWEN3_30B, MIXTRAL = "8192x2048x768x128x8", "4096x4096x14336x8x2"
GPT_OSS, QWEN3_NEXT, OLMOE = "8192x2880x2880x32x4", "8192x2048x512x512x10", "8192x2048x1024x64x8"
WIDE = "2048x7168x2048x64x8"  # a quarter of the experts of DeepSeek-V3's width


class Workload(NamedTuple):
    """An operation of onepass on logits ``(rows, vocabulary)``.

    Attributes:
        ours: takes ``(logits, *inputs, mask)`` and returns the outputs. ``mask`` is None, or True for the rows that
            count; a loss with an ``ignore_index`` finds it in ``target`` as well.
        inputs: takes ``(logits, mask, generator)`` and returns the inputs.
    """

    ours: Callable[..., tuple[Tensor, ...]]
    inputs: Callable[[Tensor, Tensor | None, Generator], tuple[Tensor, ...]]


def parse_shape(text: str, form: str, example: str) -> tuple[int, ...]:
    """The sizes in a shape such as ``8192x151936``, as many as ``form`` names."""
    sizes = text.split("x")
    if len(sizes) != len(form.split("x")) or not all(s.isdigit() for s in sizes):
        raise typer.BadParameter(f"shape {text!r}: expected {form}, e.g. {example}")
    return tuple(map(int, sizes))


def random_logits(shape: Sequence[int], dtype: torch.dtype, generator: Generator) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device=generator.device).normal_(std=3.0, generator=generator)


def log_softmax(logits: Tensor) -> Tensor:
    """In float32, or float64 for float64 logits."""
    return logits.log_softmax(-1, dtype=None if logits.dtype == torch.float64 else torch.float32)


def targets(logits: Tensor, mask: Tensor | None, generator: Generator) -> tuple[Tensor, ...]:
    target = torch.randint(logits.shape[-1], logits.shape[:1], generator=generator, device=logits.device)
    return (target if mask is None else target.where(mask, -100),)


def teacher(logits: Tensor, mask: Tensor | None, generator: Generator) -> tuple[Tensor, ...]:
    return (random_logits(logits.shape, logits.dtype, generator),)


def teacher_top_k(logits: Tensor, mask: Tensor | None, generator: Generator) -> tuple[Tensor, ...]:
    """Token ids and log-probabilities, from blocks of rows, so that a whole teacher is never in memory."""
    shapes = [x.shape for x in logits.split(256)]
    top = [log_softmax(random_logits(s, logits.dtype, generator)).topk(min(TOP_K, s[-1])) for s in shapes]
    return torch.cat([t.indices for t in top]), torch.cat([t.values for t in top])


def topk_kl_div(renormalize: bool) -> Workload:
    return Workload(
        lambda x, ids, p, m: (onepass.topk_kl_div(x, ids, p, row_mask=m, renormalize=renormalize),), teacher_top_k
    )


def kl_div(direction: Direction) -> Workload:
    return Workload(lambda x, t, m: (onepass.kl_div(x, t, row_mask=m, direction=direction),), teacher)


OPERATIONS: dict[str, Workload] = {
    "log_probs_and_entropy": Workload(
        lambda x, t, m: onepass.selective_log_softmax_and_entropy(x, t, row_mask=m), targets
    ),
    "log_probs": Workload(lambda x, t, m: (onepass.selective_log_softmax(x, t, row_mask=m),), targets),
    "cross_entropy": Workload(lambda x, t, m: (onepass.cross_entropy(x, t),), targets),
    "topk_kl_div": topk_kl_div(renormalize=False),
    "kl_div": kl_div("forward"),
    "kl_div_reverse": kl_div("reverse"),
    "jsd": kl_div("jsd"),
}
