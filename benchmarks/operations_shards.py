"""The operations on a vocabulary that is sharded over processes: of onepass, of torch and of the installed peers.

A function takes a `Shard` and returns the operation's outputs. All processes call it at the same time.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import onepass
from benchmarks.implementations import Tensors, attribute
from benchmarks.operations_heads import draw_head, policy_loss

ROW_BLOCK = 256


@dataclass
class Shard:
    """The inputs of one process.

    Attributes:
        mesh: of all processes, in one dimension.
        logits: those of this process, ``(N, V / processes)``, for an operation on logits.
        hidden: ``(N, H)``, the same on all processes, for an operation on a linear head.
        weight: the rows of the head that this process holds.
        target: ``(N,)``, of the whole vocabulary.
        advantages: ``(N,)``, and ``old``, log-probs: for the policy loss.
    """

    mesh: Any
    target: Tensor
    advantages: Tensor
    old: Tensor
    logits: Any = None
    hidden: Any = None
    weight: Any = None
    expected: Tensors = ()
    upstream: tuple[Tensor | None, ...] = ()

    @property
    def group(self) -> Any:
        return self.mesh.get_group()

    @property
    def leaves(self) -> list[Tensor]:
        return [t for t in (self.logits, self.hidden, self.weight) if t is not None and t.requires_grad]

    @property
    def columns(self) -> int:
        return int(len(self.weight) if self.logits is None else self.logits.shape[-1])


Run = Callable[[Shard], Tensors]
Load = tuple[str, Callable[[Shard], Run]]  # a package, and what loads its function


def draw(
    operation: str, shape: tuple[int, int, int], dtype: torch.dtype, mesh: Any, device: torch.device
) -> Shard:  # fmt: skip
    """The inputs of a process, from rows, width (0 for logits) and vocabulary; what it expects is in float64."""
    rows, width, vocab = shape
    ranks, rank = mesh.size(), mesh.get_local_rank()
    generator = torch.Generator(device).manual_seed(0)  # the same on all processes
    target = torch.randint(vocab, (rows,), generator=generator, device=device)
    advantages = torch.randn(rows, generator=generator, device=device)
    shard = Shard(mesh, target, advantages, torch.full((rows,), -10.0, device=device))
    if width:
        hidden, _ = draw_head((rows, width), 1, dtype, generator)
        _, weight = draw_head((1, width), vocab // ranks, dtype, torch.Generator(device).manual_seed(1 + rank))
        shard.hidden = hidden.requires_grad_()
        shard.weight = weight.requires_grad_(operation != "linear_cross_entropy_frozen")
    else:
        of_rank = torch.Generator(device).manual_seed(1 + rank)
        logits = torch.empty(rows, vocab // ranks, dtype=dtype, device=device).normal_(0, 3, generator=of_rank)
        shard.logits = logits.requires_grad_()
    with torch.no_grad():
        shard.expected = exact(operation, shard)
    shard.upstream = tuple(
        [torch.randn(e.shape, generator=generator, device=device) if e.dim() else None for e in shard.expected]
    )
    return shard


def exact(operation: str, shard: Shard) -> Tensors:
    """The outputs in float64, from blocks of the rows of all processes."""
    parts = []
    first = shard.mesh.get_local_rank() * shard.columns
    weight = None if shard.weight is None else shard.weight.double()
    for rows in torch.arange(len(shard.target), device=shard.target.device).split(ROW_BLOCK):
        x = shard.logits[rows].double() if weight is None else shard.hidden[rows].double() @ weight.T
        local = x.logsumexp(-1)
        every = [torch.empty_like(local) for _ in range(shard.mesh.size())]
        dist.all_gather(every, local, group=shard.group)
        lse = torch.stack(every).logsumexp(0)
        p, at = (x - lse[:, None]).exp(), shard.target[rows] - first
        mine = (at >= 0) & (at < x.shape[-1])
        label = x.gather(-1, at.where(mine, 0).unsqueeze(-1)).squeeze(-1).where(mine, 0.0)
        both = torch.stack([label, (p * x).sum(-1)])
        dist.all_reduce(both, group=shard.group)
        parts.append(torch.stack([both[0] - lse, lse - both[1]]))
    log_probs, entropy = torch.cat(parts, -1)
    if operation == "log_probs_and_entropy":
        return log_probs, entropy
    if operation == "linear_policy_loss":
        return (policy_loss(shard.advantages.double(), shard.old.double(), log_probs, entropy).mean(),)
    return (-log_probs.mean(),)


def our_logits(shard: Shard) -> onepass.VocabParallelLogits:
    return onepass.VocabParallelLogits(shard.logits, shard.group)


def our_policy_loss(shard: Shard) -> Tensors:
    row_loss = lambda s, a, old: policy_loss(a, old, s.log_probs, s.entropy)  # noqa: E731
    return (
        onepass.linear_loss(
            shard.hidden,
            shard.weight,
            shard.target,
            row_loss,
            shard.advantages,
            shard.old,
            vocab_group=shard.group,
        ),
    )


def our_linear_cross_entropy(shard: Shard) -> Tensors:
    return (onepass.linear_cross_entropy(shard.hidden, shard.weight, shard.target, vocab_group=shard.group),)


OURS: dict[str, Run] = {
    "cross_entropy": lambda s: (onepass.cross_entropy(our_logits(s), s.target),),
    "log_probs_and_entropy": lambda s: onepass.selective_log_softmax_and_entropy(our_logits(s), s.target),
    "linear_cross_entropy": our_linear_cross_entropy,
    "linear_cross_entropy_frozen": our_linear_cross_entropy,
    "linear_policy_loss": our_policy_loss,
}
PRODUCTS = {"linear_cross_entropy": 3, "linear_cross_entropy_frozen": 2, "linear_policy_loss": 3}


def baseline(operation: str, shard: Shard) -> tuple[str, Callable[[], Any]]:
    """What nobody can do without: one shard alone, or the bare GEMMs and the sum of the gradient of hidden states."""
    if shard.logits is not None:
        target = shard.target % shard.columns
        of: dict[str, Callable[..., Tensor | Tensors]] = {
            "cross_entropy": onepass.cross_entropy,
            "log_probs_and_entropy": onepass.selective_log_softmax_and_entropy,
        }
        return "one shard alone", lambda: run(lambda s: as_tuple(of[operation](s.logits, target)), shard)
    hidden, weight = shard.hidden.detach(), shard.weight.detach()
    logits, grad_hidden, grad_weight = (
        hidden.new_empty(len(hidden), len(weight)),
        *map(torch.empty_like, (hidden, weight)),
    )

    def bare() -> None:
        torch.mm(hidden, weight.T, out=logits)
        torch.mm(logits, weight, out=grad_hidden)
        dist.all_reduce(grad_hidden, group=shard.group)
        if PRODUCTS[operation] == 3:
            torch.mm(logits.T, hidden, out=grad_weight)

    return f"{PRODUCTS[operation]} GEMMs and an all-reduce", bare


def as_tuple(outputs: Tensor | Tensors) -> Tensors:
    return (outputs,) if isinstance(outputs, Tensor) else outputs


def run(forward: Run, shard: Shard) -> Tensors:
    """The forward and the backward."""
    for t in shard.leaves:
        t.grad = None
    outputs = forward(shard)
    torch.autograd.backward(outputs, shard.upstream)
    return outputs


def of_torch(dtype: torch.dtype | None, shard: Shard) -> Run:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor import Shard as Sharded
    from torch.distributed.tensor.parallel import loss_parallel

    of_shards: Callable[..., Any] = F.cross_entropy
    loss_parallel().__enter__()  # for the backward too; only DTensors notice it

    def forward(s: Shard) -> Tensors:
        logits: Any = DTensor.from_local(s.logits, s.mesh, [Sharded(1)])
        return (of_shards(logits if dtype is None else logits.to(dtype), s.target).to_local(),)

    return forward


def with_megatron(shard: Shard) -> ModuleType:
    """Megatron's tensor parallelism over all processes."""
    state = importlib.import_module("megatron.core.parallel_state")
    if not state.model_parallel_is_initialized():
        state.initialize_model_parallel(tensor_model_parallel_size=shard.mesh.size())
    return state


def megatron(shard: Shard) -> Run:
    with_megatron(shard)
    call = attribute("megatron.core.tensor_parallel.cross_entropy", "vocab_parallel_cross_entropy")
    return lambda s: (call(s.logits, s.target).mean(),)


def megatron_fused(shard: Shard) -> Run:
    with_megatron(shard)
    call = attribute("megatron.core.fusions.fused_cross_entropy", "fused_vocab_parallel_cross_entropy")
    return lambda s: (call(s.logits.unsqueeze(1), s.target.unsqueeze(1), s.group).mean(),)


def transformer_engine(shard: Shard) -> Run:
    call = attribute("transformer_engine.pytorch.cross_entropy", "parallel_cross_entropy")
    return lambda s: (call(s.logits.unsqueeze(1), s.target.unsqueeze(1), 0.0, False, s.group).mean(),)


def liger(shard: Shard) -> Run:
    call = attribute("liger_kernel.transformers.vocab_parallel_cross_entropy", "LigerVocabParallelCrossEntropy")()
    return lambda s: (call(s.logits.unsqueeze(1), s.target.unsqueeze(1), s.group).mean(),)


def verl(shard: Shard) -> Run:
    with_megatron(shard)
    of = importlib.import_module("verl.utils.megatron.tensor_parallel")

    def forward(s: Shard) -> Tensors:  # as verl calls them: Megatron's cross-entropy writes to its logits
        log_probs = of.vocab_parallel_log_probs_from_logits(s.logits.clone(), s.target)
        return log_probs, of.vocab_parallel_entropy(s.logits)

    return forward


def verl_head(shard: Shard) -> Run:
    call = attribute("verl.utils.kernel.linear_cross_entropy", "linear_cross_entropy")
    return lambda s: (-call(s.hidden, s.weight, s.target, 1.0, "none", s.group)[0].mean(),)


def on_a_head(load: Callable[[Shard], Run], shard: Shard) -> Run:
    """``F.linear`` and a peer's loss of logits. The gradient of the hidden states is summed over the processes.

    In its own memory: `onepass.core.collectives.Replicated` would copy it, at the peer's expense.
    """
    forward = load(shard)

    class Summed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, hidden: Tensor) -> Tensor:
            return hidden.view_as(hidden)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            dist.all_reduce(grad, group=shard.group)
            return grad

    def of_head(s: Shard) -> Tensors:
        logits = F.linear(Summed.apply(s.hidden), s.weight)
        return forward(replace(s, logits=logits))

    return of_head


CROSS_ENTROPY: dict[str, Load] = {
    "torch loss_parallel, float32": ("torch", partial(of_torch, torch.float32)),
    "torch loss_parallel": ("torch", partial(of_torch, None)),
    "Megatron": ("megatron-core", megatron),
    "Megatron, fused": ("megatron-core", megatron_fused),
    "Transformer Engine": ("transformer-engine", transformer_engine),
    "Liger": ("liger-kernel", liger),
}
LINEAR: dict[str, Load] = {
    f"F.linear + {name}": (package, partial(on_a_head, load)) for name, (package, load) in CROSS_ENTROPY.items()
}
PEERS: dict[str, dict[str, Load]] = {
    "cross_entropy": CROSS_ENTROPY,
    "log_probs_and_entropy": {"verl": ("verl", verl)},
    "linear_cross_entropy": LINEAR | {"verl": ("verl", verl_head)},
    "linear_cross_entropy_frozen": LINEAR,
    "linear_policy_loss": {},
}
