"""The operations that `versions.py` compares, and their inputs.

Two versions of onepass run this file, the older one as a copy that imports `BASELINE`. So it uses only public functions
with a meaning that is the same in both.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import onepass

BASELINE = "baseline_of_onepass"  # what the package of the older version is called
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FORWARD, BOTH, WALL = "forward", "forward + backward", "forward + backward, wall"
TOP_K, CHOICES, RANK = 64, 8, 16
Tensors = tuple[Tensor, ...]

# Inputs, made from the sizes of a shape. Every tensor of which the gradient is measured requires it.


def normal(*shape: int, std: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=DEVICE).normal_(std=std)


def integers(end: int, *shape: int) -> Tensor:
    return torch.randint(end, shape, device=DEVICE)


def labelled(rows: int, vocab: int) -> Tensors:
    return normal(rows, vocab, std=3.0).requires_grad_(), integers(vocab, rows)


def masked(rows: int, vocab: int) -> Tensors:
    (logits, target), mask = labelled(rows, vocab), integers(2, rows).bool()
    return logits, target.where(mask, -100), mask


def teacher(rows: int, vocab: int) -> Tensors:
    return labelled(rows, vocab)[0], normal(rows, vocab, std=3.0)


def top_k(rows: int, vocab: int) -> Tensors:
    """Logits and labels; ids, distinct within a row, and log-probs whose probabilities sum to less than 1."""
    step = vocab // TOP_K
    ids = torch.arange(TOP_K, device=DEVICE) * step + integers(step, rows, TOP_K)
    return *labelled(rows, vocab), ids, normal(rows, TOP_K, dtype=torch.float32).log_softmax(-1) - 0.1


def router(tokens: int, experts: int) -> Tensors:
    return normal(tokens, experts, std=3.0).requires_grad_(), torch.linspace(-0.1, 0.1, experts, device=DEVICE)


def head(rows: int, width: int, vocab: int, trained: bool = True) -> Tensors:
    weight = normal(vocab, width, std=3.0 / math.sqrt(width)).requires_grad_(trained)
    return normal(rows, width).requires_grad_(), weight, integers(vocab, rows)


def policy(rows: int, width: int, vocab: int) -> Tensors:
    """Advantages, and the log-probs of a slightly older policy, so that the ratio is about 1."""
    parts = head(rows, width, vocab)
    with torch.no_grad():
        log_probs, _ = onepass.linear_selective_log_softmax_and_entropy(*parts)
    return *parts, torch.randn_like(log_probs), log_probs + 0.1 * torch.randn_like(log_probs)


def experts(T: int, H: int, width: int, E: int, lora: bool = False) -> Tensors:
    """Hidden states, both weights, the fields of `onepass.moe.Routing` and, with ``lora``, A and B of both weights."""
    weights, chosen = normal(T, E, dtype=torch.float32).softmax(-1).topk(CHOICES)
    counts = torch.bincount(chosen.flatten(), minlength=E).int()
    frozen = [normal(E, 2 * width, H, std=H**-0.5), normal(E, H, width, std=width**-0.5)]
    shapes = ((E, RANK, H), (E, 2 * width, RANK), (E, RANK, width), (E, H, RANK)) if lora else ()
    adapters = [normal(*shape, std=shape[-1] ** -0.5).requires_grad_() for shape in shapes]
    both = [weight.requires_grad_(not lora) for weight in frozen]
    return normal(T, H).requires_grad_(), *both, weights.requires_grad_(), chosen, counts, *adapters


# Operations: functions of these inputs that return a tensor or a tuple of tensors, all differentiable.


def log_probs_and_entropy(x: Tensor, t: Tensor, mask: Tensor | None = None) -> Tensors:
    return onepass.selective_log_softmax_and_entropy(x, t, row_mask=mask)


def kl_div(direction: Any) -> Callable[..., Tensor]:
    return lambda x, teacher: onepass.kl_div(x, teacher, direction=direction, reduction="mean")


def topk_kl_div(renormalize: bool) -> Callable[..., Tensor]:
    return lambda x, t, ids, p: onepass.topk_kl_div(x, ids, p, renormalize=renormalize, reduction="mean")


def sigmoid_topk(x: Tensor, bias: Tensor) -> Tensor:
    return onepass.moe.sigmoid_topk(x, CHOICES, selection_bias=bias, n_group=8, topk_group=4, scale=2.5).weights


def expert_mlp(x: Tensor, gate_up: Tensor, down: Tensor, w: Tensor, e: Tensor, n: Tensor, *lora: Tensor) -> Tensor:
    adapters: dict[str, Any] = {"lora_gate_up": (*lora[:2], 2.0), "lora_down": (*lora[2:], 2.0)} if lora else {}
    return onepass.moe.expert_mlp(x, onepass.moe.Routing(w, e, n), gate_up, down, **adapters)


def policy_loss(s: Any, advantages: Tensor, old_log_probs: Tensor) -> Tensor:
    ratio = (s.log_probs - old_log_probs).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages) - 0.01 * s.entropy


class Operation(NamedTuple):
    """An operation and what is measured of it.

    Attributes:
        name: what tables call it.
        call: the operation, a function of the inputs.
        inputs: makes the inputs, from the sizes of a shape.
        shapes: of many rows, where the time of the device is measured.
        passes: which passes are measured for these shapes.
        few: shapes of few rows, where the wall time of forward and backward is measured.
        tiny: what the sizes are divided by with ``--tiny``.
    """

    name: str
    call: Callable[..., Any]
    inputs: Callable[..., Tensors]
    shapes: Sequence[tuple[int, ...]]
    passes: Sequence[str] = (FORWARD, BOTH)
    few: Sequence[tuple[int, ...]] = ()
    tiny: tuple[int, ...] = (256, 256)


VOCABS = [(8192, 151936), (8192, 128256), (16384, 32000), (8192, 50257)]
FEW = [(64, 151936), (200, 128256), (512, 151936)]
of_router = partial(Operation, inputs=router, tiny=(1024, 1))
of_experts = partial(Operation, inputs=experts, shapes=[(8192, 2048, 768, 128)], passes=[BOTH], tiny=(128, 32, 32, 8))
of_head = partial(Operation, inputs=head, shapes=[(8192, 4096, 151936)], passes=[BOTH], tiny=(64, 64, 256))
OPERATIONS = [
    Operation("cross_entropy", lambda x, t: onepass.cross_entropy(x, t), labelled, VOCABS, few=FEW),
    Operation("cross_entropy_masked", lambda x, t, m: onepass.cross_entropy(x, t), masked, VOCABS[:1]),
    Operation("cross_entropy_softcap", lambda x, t: onepass.cross_entropy(x, t, softcap=30.0), labelled, VOCABS[1:2]),
    Operation("log_probs_and_entropy", log_probs_and_entropy, labelled, VOCABS, few=FEW),
    Operation("log_probs_and_entropy_masked", log_probs_and_entropy, masked, VOCABS[:1]),
    Operation("entropy", lambda x, t: onepass.entropy_from_logits(x), labelled, VOCABS[:1], [BOTH]),
    Operation("topk_kl_div", topk_kl_div(renormalize=False), top_k, VOCABS[:1]),
    Operation("topk_kl_div_renormalized", topk_kl_div(renormalize=True), top_k, VOCABS[:1]),
    Operation("distillation_loss", lambda *inputs: onepass.distillation_loss(*inputs), top_k, VOCABS[:1], [BOTH]),
    Operation("kl_div", kl_div("forward"), teacher, [(4096, 151936)]),
    Operation("kl_div_reverse", kl_div("reverse"), teacher, [(4096, 151936)]),
    Operation("jsd", kl_div("jsd"), teacher, [(4096, 151936)]),
    of_router("softmax_topk", lambda x, b: onepass.moe.softmax_topk(x, CHOICES).weights,
              shapes=[(65536, 128)], few=[(64, 128)]),
    of_router("sigmoid_topk", sigmoid_topk, shapes=[(65536, 256)], few=[(64, 256)]),
    of_experts("experts_forward", expert_mlp, passes=[FORWARD]),
    of_experts("experts", expert_mlp),
    of_experts("experts_lora", expert_mlp, inputs=partial(experts, lora=True)),
    of_experts("scattered_linear", lambda x, up, down, w, e, n: onepass.moe.scattered_linear(x, up, e, weights=w)),
    of_head("linear_cross_entropy", lambda *parts: onepass.linear_cross_entropy(*parts), few=[(256, 4096, 128256)]),
    of_head("linear_cross_entropy_frozen", lambda *parts: onepass.linear_cross_entropy(*parts),
            inputs=partial(head, trained=False)),
    of_head("linear_log_probs_and_entropy", lambda *parts: onepass.linear_selective_log_softmax_and_entropy(*parts),
            passes=[FORWARD, BOTH]),
    of_head("linear_policy_loss", lambda h, w, t, *rows: onepass.linear_loss(h, w, t, policy_loss, *rows),
            inputs=policy),
]  # fmt: skip
