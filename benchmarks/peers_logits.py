"""The installed peers of each operation on logits, called as their users call them.

A loader raises whatever an absent or broken peer raises. The benchmark then says why the peer was not run.
"""

import importlib
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.implementations import AS_IT_IS, Forward, Implementation, Peer, attribute
from benchmarks.operations_routers import K


def trl_pair(name: str, package: str) -> Implementation:
    call = attribute("trl.kernels.logprob_entropy", "selective_log_softmax_and_entropy")
    return Implementation(name, package, lambda x, t, m: call(x, t, row_mask=m))


def trl_log_probs(name: str, package: str) -> Implementation:
    call = attribute("trl.kernels.logprob_entropy", "selective_log_softmax_and_entropy")
    return Implementation(name, package, lambda x, t, m: (call(x, t, row_mask=m)[0],))


def mean_of_kept(log_probs: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Forward:
    """A cross-entropy from a peer's log-probs. Targets that are ignored (-100) must be left out, as all others do."""

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


def axolotl_topk_kl_div(name: str, package: str) -> Implementation:
    # Loaded from its file, because the packages above it import the whole trainer.
    [root] = importlib.import_module(package).__path__
    loss = runpy.run_path(str(Path(root, "integrations/kd/topk_logprob/forward_kl.py")))["loss"]

    def forward(x: Tensor, ids: Tensor, log_probs: Tensor, m: Tensor | None) -> tuple[Tensor, ...]:
        kept = torch.ones_like(ids, dtype=torch.bool) if m is None else m.unsqueeze(-1).expand_as(ids)
        # The peer takes the mean over rows and K.
        return (loss(x[None], ids[None], log_probs[None], kept[None]) * ids.shape[-1],)

    return Implementation(name, package, forward)


def torch_cross_entropy(name: str, package: str) -> Implementation:
    return Implementation(name, package, lambda x, t, m: (torch.nn.functional.cross_entropy(x, t),))


def liger_cross_entropy(name: str, package: str) -> Implementation:
    loss = attribute("liger_kernel.transformers", "LigerCrossEntropyLoss")()
    return Implementation(name, package, lambda x, t, m: (loss(x, t),))


def liger_kl(loss_class: str, **options: Any) -> Callable[[str, str], Implementation]:
    """Liger's divergences take log-probabilities: the caller computes both softmaxes, in the dtype of the logits."""

    def load(name: str, package: str) -> Implementation:
        loss = attribute("liger_kernel.transformers", loss_class)(**options)
        forward: Forward = lambda x, t, m: (loss(x.log_softmax(-1), t.log_softmax(-1)),)  # noqa: E731
        return Implementation(name, package, forward, masks=False)

    return load


def quack_cross_entropy(name: str, package: str) -> Implementation:
    call = attribute("quack", "cross_entropy")
    return Implementation(name, package, lambda x, t, m: (call(x, t),))


def quack_gradient_in_forward(name: str, package: str) -> Implementation:
    """The gradient of the sum from the forward, which no backward scales: the least that a user of it could do."""
    call = attribute("quack.cross_entropy", "cross_entropy_fwd")

    class CrossEntropy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, t: Tensor) -> Tensor:
            loss, gradient = call(x, t, return_dx=True)
            ctx.save_for_backward(gradient)
            return loss.mean()

        @staticmethod
        def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
            return ctx.saved_tensors[0], None

    return Implementation(name, package, lambda x, t, m: (CrossEntropy.apply(x, t),))


def fla_kl_div(name: str, package: str) -> Implementation:
    """The kernels of flash-linear-attention's linear + KL loss, on logits, launched as that loss launches them.

    The first kernel overwrites the logits with their gradient, even if none is wanted. The second multiplies it by the
    upstream gradient.
    """
    from triton import next_power_of_2

    ops = importlib.import_module("fla.modules.fused_kl_div.ops")

    class KLDiv(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, t: Tensor) -> Tensor:
            rows, vocab = x.shape
            loss = torch.zeros(rows, dtype=torch.float32, device=x.device)
            ops.kl_div_kernel[(rows,)](
                x, t, loss, x.stride(-2), loss.stride(-1), reduction="batchmean", N=rows, V=vocab,
                BV=min(ops.MAX_FUSED_SIZE, next_power_of_2(vocab)), num_warps=ops.STATIC_WARPS,
            )  # fmt: skip
            ctx.save_for_backward(x.detach())
            return loss.sum()

        @staticmethod
        def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
            return ops.fused_kl_div_bwd(upstream[0], *ctx.saved_tensors, None)

    return Implementation(name, package, lambda x, t, m: (KLDiv.apply(x, t),), masks=False)


def quack_softmax_topk(name: str, package: str) -> Implementation:
    """The softmax of the k largest logits, in their dtype: the same as softmax, top-k and renormalization."""
    call = attribute("quack.topk", "topk")
    return Implementation(name, package, lambda x, m: (call(x, K, softmax=True)[0],), masks=False)


QUACK_ROUTER: Peer = "QuACK (bf16 weights, no counts)", "quack-kernels", quack_softmax_topk
PEERS: dict[str, list[Peer]] = {
    "log_probs_and_entropy": [
        ("TRL", "trl", trl_pair),
        ("axolotl", "axolotl", axolotl_pair),
    ],
    "log_probs": [("TRL", "trl", trl_log_probs), ("axolotl", "axolotl", axolotl_log_probs)],
    "cross_entropy": [
        (AS_IT_IS, "torch", torch_cross_entropy),
        ("TRL", "trl", trl_cross_entropy),
        ("axolotl", "axolotl", axolotl_cross_entropy),
        ("QuACK", "quack-kernels", quack_cross_entropy),
        ("QuACK (gradient in the forward, not scaled)", "quack-kernels", quack_gradient_in_forward),
        ("Liger (in place)", "liger-kernel", liger_cross_entropy),
    ],
    "topk_kl_div": [("axolotl", "axolotl", axolotl_topk_kl_div)],
    "kl_div": [
        ("Liger (KLDIVLoss)", "liger-kernel", liger_kl("LigerKLDIVLoss", reduction="batchmean", log_target=True)),
        ("Liger (JSD, beta 0)", "liger-kernel", liger_kl("LigerJSD", beta=0.0)),
        ("fla (kernel, in place)", "fla-core", fla_kl_div),
    ],
    "kl_div_reverse": [("Liger (JSD, beta 1)", "liger-kernel", liger_kl("LigerJSD", beta=1.0))],
    "jsd": [("Liger (JSD)", "liger-kernel", liger_kl("LigerJSD", beta=0.5))],
    "softmax_topk": [QUACK_ROUTER],
    "softmax_topk_uncounted": [QUACK_ROUTER],
}
