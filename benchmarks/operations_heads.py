"""The operations on hidden states and a linear head: the definition of each in plain torch, onepass's own, and the
matrix products that no implementation can do without.

A function takes ``(hidden, weight, *rows, *constants, mask)``: ``rows`` have a row for each row of ``hidden``,
``constants`` are the same for all rows. ``mask`` is None, or True for the rows that count. The targets of all other
rows are -100.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

import onepass
from benchmarks.harness import exact
from benchmarks.implementations import Forward, Tensors, in_batch_invariant_mode
from benchmarks.in_turns import Batch
from benchmarks.operations_logits import cross_entropy, kl_div, log_probs, log_probs_and_entropy, mean

COUNTS = {1: "one bare GEMM", 2: "two bare GEMMs", 3: "three bare GEMMs", 4: "four bare GEMMs"}


@dataclass
class HeadBatch(Batch):
    hidden: Tensor
    weight: Tensor
    rows: Tensors
    constants: Tensors
    mask: Tensor | None
    expected: Tensors = ()
    upstream: Sequence[Tensor | None] = ()

    @property
    def tensors(self) -> list[Tensor]:
        return [self.hidden, self.weight, *self.constants]

    @property
    def arguments(self) -> tuple[Tensor | None, ...]:
        return self.hidden, self.weight, *self.rows, *self.constants, self.mask


# Makes the rows and the constants from ``(hidden, weight, target, mask, generator)``.
Inputs = Callable[[Tensor, Tensor, Tensor, Tensor | None, Generator], tuple[Tensors, Tensors]]


def labels(
    hidden: Tensor, weight: Tensor, target: Tensor, mask: Tensor | None, generator: Generator
) -> tuple[Tensors, Tensors]:
    return (target,), ()


def policy(
    hidden: Tensor, weight: Tensor, target: Tensor, mask: Tensor | None, generator: Generator
) -> tuple[Tensors, Tensors]:
    """Advantages, and the log-probs of a slightly older policy, so that the ratio is about 1."""
    log_probs, _ = onepass.linear_selective_log_softmax_and_entropy(hidden, weight, target, row_mask=mask)
    advantages, change = (normal(log_probs.shape, 1.0, log_probs.dtype, generator) for _ in range(2))
    return (target, advantages, log_probs + 0.1 * change), ()


def teacher(
    hidden: Tensor, weight: Tensor, target: Tensor, mask: Tensor | None, generator: Generator
) -> tuple[Tensors, Tensors]:
    of_teacher, head = draw_head(hidden.shape, weight.shape[0], hidden.dtype, generator)
    return (of_teacher, target), (head,)


PAIR = 256  # rows: the tokens of a chosen sequence, and as many of a rejected one


def pairs(
    hidden: Tensor, weight: Tensor, target: Tensor, mask: Tensor | None, generator: Generator
) -> tuple[Tensors, Tensors]:
    """Which sequence of its pair a row belongs to, 1 or -1, and the log-probs of a reference model near the policy."""
    (_, _, reference), _ = policy(hidden, weight, target, mask, generator)
    side = 1.0 - 2.0 * (torch.arange(len(target), device=target.device) % PAIR >= PAIR // 2)
    return (target, side.to(reference.dtype), reference), ()


def adapter(
    hidden: Tensor, weight: Tensor, target: Tensor, mask: Tensor | None, generator: Generator
) -> tuple[Tensors, Tensors]:
    """Both factors of an adapter of rank 16."""
    width = hidden.shape[-1]
    A = normal((16, width), 1.0 / math.sqrt(width), hidden.dtype, generator).requires_grad_()
    return (target,), (A, normal((len(weight), 16), 0.1, hidden.dtype, generator).requires_grad_())


def policy_loss(advantages: Tensor, old_log_probs: Tensor, log_probs: Tensor, entropy: Tensor) -> Tensor:
    """The loss of each row: the clipped policy gradient (PPO, GRPO) with an entropy bonus."""
    ratio = (log_probs - old_log_probs).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages) - 0.01 * entropy


@dataclass(frozen=True)
class HeadOperation:
    """An operation on hidden states and a linear head.

    Attributes:
        definition: the operation in plain torch, on logits.
        ours: the operation of onepass.
        products: the bare GEMMs, named by their results: l(ogits), h(idden's gradient), w(eight's gradient).
        inputs: makes the other inputs.
        masks: whether the definition can leave rows out.
    """

    definition: Forward
    ours: Forward
    products: str
    inputs: Inputs = labels
    masks: bool = True

    @property
    def baseline(self) -> str:
        return COUNTS[len(self.products)]

    def eager(self, hidden: Tensor, weight: Tensor, *others: Tensor | None) -> Tensors:
        return self.definition(F.linear(hidden, weight), *others)

    def bare(self, batch: HeadBatch) -> Callable[[], list[Tensor]]:
        """The products alone, each of them a single call on whole tensors that are allocated already."""
        hidden, weight = batch.hidden.detach(), batch.weight.detach()
        logits = hidden.new_empty(hidden.shape[0], weight.shape[0])
        products = {
            "l": partial(torch.mm, hidden, weight.T, out=logits),
            "h": partial(torch.mm, logits, weight, out=torch.empty_like(hidden)),
            "w": partial(torch.mm, logits.T, hidden, out=torch.empty_like(weight)),
        }
        return lambda: [products[p]() for p in self.products]

    def batch(self, shape: tuple[int, int, int], dtype: torch.dtype, masked: float, device: torch.device) -> HeadBatch:
        rows, width, vocab = shape
        generator = torch.Generator(device).manual_seed(0)
        hidden, weight = draw_head((rows, width), vocab, dtype, generator)
        mask = torch.rand(rows, generator=generator, device=device) >= masked if masked else None
        target = torch.randint(vocab, (rows,), generator=generator, device=device)
        target = target if mask is None else target.where(mask, -100)
        batch = HeadBatch(hidden, weight, *self.inputs(hidden, weight, target, mask, generator), mask)
        exact_weight, constants = weight.double(), [c.double() for c in batch.constants]

        def definition(hidden: Tensor, *others: Tensor | None) -> Tensors:
            return self.eager(hidden, exact_weight, *others[:-1], *constants, others[-1])

        with torch.no_grad():
            batch.expected = exact(definition, (hidden, *batch.rows), mask)
        # The gradient of a loss is 1, that of values per row is random.
        batch.upstream = tuple(
            [normal(e.shape, 1.0, torch.float32, generator) if e.dim() else None for e in batch.expected]
        )
        hidden.requires_grad_("h" in self.products)
        weight.requires_grad_("w" in self.products)
        return batch


@dataclass(frozen=True)
class AdaptedHead(HeadOperation):
    """With an adapter, whose factors are the last constants. Its products are not among the bare GEMMs."""

    def eager(self, hidden: Tensor, weight: Tensor, *others: Tensor | None) -> Tensors:
        *rows, A, B, mask = others
        return self.definition(F.linear(hidden, weight) + F.linear(F.linear(hidden, A), B), *rows, mask)  # type: ignore[arg-type]


def normal(shape: torch.Size | tuple[int, ...], std: float, dtype: torch.dtype, generator: Generator) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=generator.device).normal_(std=std, generator=generator)


def draw_head(
    shape: torch.Size | tuple[int, ...], vocab: int, dtype: torch.dtype, generator: Generator
) -> tuple[Tensor, Tensor]:
    """Hidden states and a weight whose logits have the standard deviation of `random_logits`."""
    weight = normal((vocab, shape[-1]), 3.0 / math.sqrt(shape[-1]), dtype, generator)
    return normal(shape, 1.0, dtype, generator), weight


def our_policy_loss(h: Tensor, w: Tensor, t: Tensor, a: Tensor, old: Tensor, m: Tensor | None) -> Tensors:
    row_loss = lambda s, a, old: policy_loss(a, old, s.log_probs, s.entropy)  # noqa: E731
    return (onepass.linear_loss(h, w, t, row_loss, a, old, row_mask=m),)


def dpo(x: Tensor, t: Tensor, side: Tensor, reference: Tensor, m: Tensor | None) -> Tensors:
    """The mean over pairs, of as many rows each."""
    margins = (side * (log_probs(x, t, m)[0] - reference)).split(PAIR)
    return (-F.logsigmoid(0.1 * torch.stack([rows.sum() for rows in margins])).mean(),)


def our_dpo(h: Tensor, w: Tensor, t: Tensor, side: Tensor, reference: Tensor, m: Tensor | None) -> Tensors:
    def loss(s: onepass.SoftmaxStatistics, side: Tensor, reference: Tensor, groups: onepass.RowGroups) -> Tensor:
        return -F.logsigmoid(0.1 * groups.sum(side * (s.log_probs - reference)))

    lengths = [min(PAIR, len(t) - first) for first in range(0, len(t), PAIR)]
    return (onepass.linear_loss(h, w, t, loss, side, reference, groups=lengths),)


def adapted_cross_entropy(products: str) -> HeadOperation:
    def ours(h: Tensor, w: Tensor, t: Tensor, A: Tensor, B: Tensor, m: Tensor | None) -> Tensors:
        return (onepass.linear_cross_entropy(h, w, t, lora=(A, B, 1.0)),)

    return AdaptedHead(cross_entropy, ours, products, adapter)


def our_kl_div(h: Tensor, w: Tensor, teacher: Tensor, t: Tensor, u: Tensor, m: Tensor | None) -> Tensors:
    return (onepass.linear_kl_div(h, w, onepass.LinearLogits(teacher, u), row_mask=m),)


def pair(products: str) -> HeadOperation:
    ours = lambda h, w, t, m: onepass.linear_selective_log_softmax_and_entropy(h, w, t, row_mask=m)  # noqa: E731
    return HeadOperation(log_probs_and_entropy, ours, products, masks=False)


def our_log_probs(h: Tensor, w: Tensor, t: Tensor, m: Tensor | None) -> Tensors:
    """As GRPO needs them: the entropy is logged, and only the log-probs have a gradient."""
    return onepass.linear_selective_log_softmax_and_entropy(h, w, t, row_mask=m)[:1]


def cross_entropy_of(products: str) -> HeadOperation:
    return HeadOperation(cross_entropy, lambda h, w, t, m: (onepass.linear_cross_entropy(h, w, t),), products)


def wide_cross_entropy(h: Tensor, w: Tensor, t: Tensor, m: Tensor | None) -> Tensors:
    return (onepass.linear_cross_entropy(h, w, t, logits_dtype=torch.float32),)


def wide_pair(h: Tensor, w: Tensor, t: Tensor, m: Tensor | None) -> Tensors:
    return onepass.linear_selective_log_softmax_and_entropy(h, w, t, row_mask=m, logits_dtype=torch.float32)


def teacher_kl_div(x: Tensor, h: Tensor, t: Tensor, u: Tensor, m: Tensor | None) -> Tensors:
    return kl_div(x, F.linear(h, u), m)


def rounded_kl_div(h: Tensor, w: Tensor, teacher: Tensor, t: Tensor, u: Tensor, m: Tensor | None) -> Tensors:
    of_teacher = onepass.LinearLogits(teacher, u, logits_dtype=h.dtype)
    return (onepass.linear_kl_div(h, w, of_teacher, row_mask=m, logits_dtype=h.dtype),)


def invariant(operation: HeadOperation) -> HeadOperation:
    return replace(operation, ours=in_batch_invariant_mode(operation.ours))


HEAD_OPERATIONS: dict[str, HeadOperation] = {
    "linear_cross_entropy": cross_entropy_of("lhw"),
    "linear_cross_entropy_frozen": cross_entropy_of("lh"),
    "linear_log_probs_and_entropy_forward": pair("l"),
    "linear_log_probs_and_entropy": pair("llhw"),
    "linear_log_probs_frozen": HeadOperation(log_probs, our_log_probs, "lh", masks=False),
    "linear_policy_loss": HeadOperation(
        lambda x, t, a, old, m: mean(policy_loss(a, old, *log_probs_and_entropy(x, t, m)), m),
        our_policy_loss,
        "lhw",
        policy,
    ),
    "linear_dpo": HeadOperation(dpo, our_dpo, "lhw", pairs, masks=False),
    "linear_cross_entropy_lora": adapted_cross_entropy("lhw"),
    "linear_cross_entropy_lora_frozen": adapted_cross_entropy("lh"),
    "linear_cross_entropy_wide": HeadOperation(cross_entropy, wide_cross_entropy, "lhw"),
    "linear_log_probs_and_entropy_forward_wide": HeadOperation(log_probs_and_entropy, wide_pair, "l", masks=False),
    "linear_cross_entropy_invariant": invariant(cross_entropy_of("lhw")),
    "linear_log_probs_and_entropy_invariant": invariant(pair("llhw")),
    "linear_kl_div": HeadOperation(teacher_kl_div, our_kl_div, "llhw", teacher),
    "linear_kl_div_rounded": HeadOperation(teacher_kl_div, rounded_kl_div, "llhw", teacher),
}
