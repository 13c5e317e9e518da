"""The experts of a MoE layer: inputs, onepass's experts, and dense matrix products of as many FLOPs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.implementations import Tensors
from benchmarks.in_turns import Batch
from onepass import moe

RANK, SCALING = 16, 2.0
MORE_MEMORY = 1088 * 2**20  # bytes of decoded experts, instead of 384 MiB
# How many times the GEMMs of a forward are needed: for the forward, for the gradient of the inputs, of the weights.
OPERATIONS = {"experts_forward": 1, "experts": 3, "experts_lora": 2}
# As experts_lora, with weights in a format of `moe.quantize`. They run only if they are named.
QUANTIZED = {"experts_nf4": "nf4", "experts_mxfp4": "mxfp4", "experts_fp8": "fp8_block", "experts_int8": "int8",
             "experts_gpt_oss": "mxfp4"}  # fmt: skip


@dataclass
class ExpertsBatch(Batch):
    hidden: Tensor
    routing: moe.Routing
    gate_up: Tensor
    down: Tensor
    lora: list[Tensor] = field(default_factory=list)  # A and B of gate_up, A and B of down
    quantized: list[moe.QuantizedWeight] = field(default_factory=list)  # of which gate_up and down are the values
    options: dict[str, Any] = field(default_factory=dict)  # of `moe.expert_mlp`
    expected: Tensors = ()
    upstream: Sequence[Tensor] = ()

    @property
    def tensors(self) -> list[Tensor]:
        return [self.hidden, self.routing.weights, self.gate_up, self.down, *self.lora]

    @property
    def weight_bytes(self) -> int:
        return sum(w.nbytes for w in self.quantized or (self.gate_up, self.down))

    @property
    def arguments(self) -> tuple["ExpertsBatch"]:
        return (self,)


def make_batch(
    operation: str, sizes: tuple[int, ...], kind: str, dtype: torch.dtype, device: torch.device
) -> ExpertsBatch:
    """Random inputs.

    Args:
        operation: one of `OPERATIONS` or `QUANTIZED`.
        sizes: tokens, hidden, intermediate, experts, choices.
        kind: ``"uniform"`` routing, or ``"zipf"``, where the n-th expert is chosen with a frequency of 1 / n.
        dtype: of all floating-point tensors but the routing weights.
        device: of all tensors.
    """
    T, H, width, E, K = sizes
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int, std: float = 1.0) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device).normal_(std=std, generator=generator)

    share = torch.ones(E, device=device)
    if kind == "zipf":
        share = 1 / torch.arange(1, E + 1, device=device)[torch.randperm(E, device=device, generator=generator)]
    gumbel = -torch.empty(T, E, device=device).exponential_(generator=generator).log()
    weights, experts = (gumbel + share.log()).softmax(-1).topk(K)
    counts = torch.bincount(experts.flatten(), minlength=E).int()
    batch = ExpertsBatch(
        normal(T, H), moe.Routing(weights / weights.sum(-1, keepdim=True), experts, counts),
        normal(E, 2 * width, H, std=H**-0.5), normal(E, H, width, std=width**-0.5),
    )  # fmt: skip
    if operation in QUANTIZED:
        batch.quantized = [moe.quantize(w, QUANTIZED[operation]) for w in (batch.gate_up, batch.down)]
        batch.gate_up, batch.down = (w.dequantize() for w in batch.quantized)
    if operation == "experts_lora" or operation in QUANTIZED:
        shapes = (E, RANK, H), (E, 2 * width, RANK), (E, RANK, width), (E, H, RANK)
        batch.lora = [normal(*shape, std=shape[-1] ** -0.5) for shape in shapes]
    if operation == "experts_gpt_oss":
        biases = {"gate_up_bias": normal(E, 2 * width), "down_bias": normal(E, H)}
        batch.options = biases | {"activation": "swiglu_clamped", "interleaved": True}
    with torch.no_grad():
        routing = batch.routing._replace(weights=batch.routing.weights.double())
        hidden, gate_up, down = (t.double() for t in (batch.hidden, batch.gate_up, batch.down))
        lora = [t.double() for t in batch.lora]
        options = {n: t.double() if isinstance(t, Tensor) else t for n, t in batch.options.items()}
        exact = ExpertsBatch(hidden, routing, gate_up, down, lora, options=options)
        batch.expected = (ours(exact),)  # the definition
    batch.upstream = (normal(T, H),)
    for t in (batch.hidden, batch.routing.weights, *batch.lora):
        t.requires_grad_(operation != "experts_forward")
    for t in (batch.gate_up, batch.down):
        t.requires_grad_(operation == "experts")
    return batch


def dense(batch: ExpertsBatch, times: int) -> Callable[[], None]:
    """Matrix products of as many FLOPs, each of them a single call on whole tensors."""
    assignments, width = batch.routing.experts.numel(), batch.down.shape[2]
    rows = batch.hidden.detach().repeat(batch.routing.experts.shape[1], 1)
    first, second = batch.gate_up[0].detach(), batch.down[0].detach()
    both, out = rows.new_empty(assignments, 2 * width), torch.empty_like(rows)

    def products() -> None:
        for _ in range(times):
            torch.mm(rows, first.T, out=both)
            torch.mm(both[:, :width], second.T, out=out)

    return products


def decoded(batch: ExpertsBatch) -> Tensor:
    """The same with the values of quantized weights."""
    return ours(replace(batch, quantized=[]))


def with_more_memory(batch: ExpertsBatch) -> Tensor:
    """Onepass where decoded experts may take `MORE_MEMORY` bytes."""
    return ours(replace(batch, options=batch.options | {"max_memory": MORE_MEMORY}))


def ours(batch: ExpertsBatch) -> Tensor:
    first = second = None
    if batch.lora:
        a1, b1, a2, b2 = batch.lora
        first, second = (a1, b1, SCALING), (a2, b2, SCALING)
    weights = batch.quantized or (batch.gate_up, batch.down)
    return moe.expert_mlp(batch.hidden, batch.routing, *weights, lora_gate_up=first, lora_down=second, **batch.options)
