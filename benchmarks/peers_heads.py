"""The installed peers that take hidden states and the weight of the head, called as their users call them.

A function takes ``(hidden, weight, *rows, *constants, mask)``, see `operations_heads.py`.
"""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.implementations import Forward, Implementation, Peer, attribute
from benchmarks.operations_heads import HEAD_OPERATIONS, policy_loss
from benchmarks.operations_logits import mean

TRL_UTILS = "trl.trainer.utils"
TRL_CHUNK_SIZE = 32768  # of its trainers: trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE


@contextmanager
def stand_in(name: str, **names: Any) -> Iterator[None]:
    """Replace a module by one that has these names alone; `sys.modules` is restored afterwards."""
    before = {name: sys.modules[name]} if name in sys.modules else {}
    sys.modules[name] = module = ModuleType(name)
    vars(module).update(names)
    try:
        yield
    finally:
        del sys.modules[name]
        sys.modules.update(before)


def without_trainers(function: Any) -> Any:
    """TRL's autograd function where the modules of TRL's trainers cannot be imported.

    Its backward imports from them the context in which ZeRO-3 gathers the weight of the head. Here that one is empty.
    """

    class WithoutTrainers(function):
        @staticmethod
        def backward(*arguments: Any) -> Any:
            with stand_in(TRL_UTILS, maybe_gather_lm_head_ctx=lambda *parameters: nullcontext()):
                return function.backward(*arguments)

    return WithoutTrainers


def trl(*outputs: str) -> Callable[..., tuple[Tensor, ...]]:
    """Log-probs and ``outputs`` of each row. Masked rows are left out, as TRL's trainers do, and have the value 0."""
    function = attribute("trl.kernels.chunked_logprob", "ChunkedLogProbFunction")
    try:
        importlib.import_module(TRL_UTILS)
    except (ImportError, RuntimeError):  # transformers raises either
        function = without_trainers(function)
    call = function.apply

    def rows(hidden: Tensor, weight: Tensor, target: Tensor, mask: Tensor | None) -> tuple[Tensor, ...]:
        kept = (hidden, target) if mask is None else (hidden[mask], target[mask])
        found = call(kept[0], weight, None, kept[1], 1.0, TRL_CHUNK_SIZE, None, 1.0, outputs)[: 1 + len(outputs)]
        return found if mask is None else tuple([x.new_zeros(mask.shape).masked_scatter(mask, x) for x in found])

    return rows


def trl_pair(name: str, package: str) -> Implementation:
    return Implementation(name, package, trl("entropy"))


def trl_log_probs(name: str, package: str) -> Implementation:
    rows = trl("entropy")
    return Implementation(name, package, lambda h, w, t, m: rows(h, w, t, m)[:1])


def trl_cross_entropy(name: str, package: str) -> Implementation:
    log_probs = trl()
    return Implementation(name, package, lambda h, w, t, m: mean(-log_probs(h, w, t, m)[0], m))


def trl_policy_loss(name: str, package: str) -> Implementation:
    pair = trl("entropy")
    forward: Forward = lambda h, w, t, a, old, m: mean(policy_loss(a, old, *pair(h, w, t, m)), m)  # noqa: E731
    return Implementation(name, package, forward)


def liger_cross_entropy(name: str, package: str) -> Implementation:
    loss = attribute("liger_kernel.transformers", "LigerFusedLinearCrossEntropyLoss")()
    return Implementation(name, package, lambda h, w, t, m: (loss(w, h, t),))


def liger_sm90(name: str, package: str) -> Implementation:
    """Liger's kernels for Hopper, which need CuTe DSL and a vocabulary that is a multiple of 256."""
    module = "liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90"
    loss = attribute(module, "liger_fused_linear_cross_entropy_sm90")
    return Implementation(name, package, lambda h, w, t, m: (loss(h, w, t),))


def quack_scaled_exp(name: str, package: str) -> Implementation:
    loss = attribute("quack.linear_cross_entropy", "scaled_exp_linear_cross_entropy")
    return Implementation(name, package, lambda h, w, t, m: (loss(h, w, t),))


def quack_chunked(name: str, package: str) -> Implementation:
    """QuACK's other pipeline; its autotuner would measure for minutes."""
    loss = attribute("quack.linear_cross_entropy", "chunked_linear_cross_entropy")
    forward: Forward = lambda h, w, t, m: (loss(h, w, t, tuned=False, use_scaled_exp=False),)  # noqa: E731
    return Implementation(name, package, forward)


def torch_linear_cross_entropy(name: str, package: str) -> Implementation:
    """That of torch 2.13."""
    loss = attribute("torch.nn.functional", "linear_cross_entropy")
    options = attribute("torch.nn.modules.linear_cross_entropy_options", "LinearCrossEntropyOptions")()
    return Implementation(name, package, lambda h, w, t, m: (loss(h, w, t, options=options),))


def liger_kl_div(name: str, package: str) -> Implementation:
    loss = attribute("liger_kernel.transformers", "LigerFusedLinearJSD")(jsd_beta=0.0)
    forward: Forward = lambda h, w, teacher, t, u, m: (loss(h, w, teacher, u, t),)  # noqa: E731
    return Implementation(name, package, forward)


def cut_cross_entropy(name: str, package: str) -> Implementation:
    loss = attribute("cut_cross_entropy", "linear_cross_entropy")
    return Implementation(name, package, lambda h, w, t, m: (loss(h, w, t),))


def ours(operation: str) -> Callable[[str, str], Implementation]:
    """onepass with logits of the dtype of the factors."""
    return lambda name, package: Implementation(name, package, HEAD_OPERATIONS[operation].ours)


def float32_head(operation: str, precision: str) -> Callable[[str, str], Implementation]:
    """Hidden states and weight cast to float32, as TRL's ``cast_lm_head_to_fp32``, with this precision of GEMMs."""

    def set_precision(gradient: Tensor | None = None) -> None:  # also before the GEMMs of the backward
        torch.set_float32_matmul_precision(precision)

    def forward(hidden: Tensor, weight: Tensor, *others: Tensor | None) -> tuple[Tensor, ...]:
        set_precision()
        logits = F.linear(hidden.float(), weight.float())
        if logits.requires_grad:
            logits.register_hook(set_precision)
        return HEAD_OPERATIONS[operation].definition(logits, *others)

    return lambda name, package: Implementation(name, package, forward)


def wide(operation: str) -> list[Peer]:
    """What float32 logits stand beside."""
    return [
        ("onepass, logits of the dtype of the factors", "torch", ours(operation)),
        ("float32 factors", "torch", float32_head(operation, "highest")),
        ("float32 factors, TF32", "torch", float32_head(operation, "high")),
    ]


CROSS_ENTROPY: list[Peer] = [
    ("TRL", "trl", trl_cross_entropy),
    ("Liger", "liger-kernel", liger_cross_entropy),
    ("Liger (SM90)", "liger-kernel", liger_sm90),
    ("QuACK (scaled exp)", "quack-kernels", quack_scaled_exp),
    ("QuACK (chunked)", "quack-kernels", quack_chunked),
    ("torch linear_cross_entropy", "torch", torch_linear_cross_entropy),
    ("cut-cross-entropy", "cut_cross_entropy", cut_cross_entropy),
]
HEAD_PEERS: dict[str, list[Peer]] = {
    "linear_cross_entropy": CROSS_ENTROPY,
    "linear_cross_entropy_frozen": CROSS_ENTROPY,
    "linear_log_probs_and_entropy_forward": [("TRL", "trl", trl_pair)],
    "linear_log_probs_and_entropy": [("TRL", "trl", trl_pair)],
    "linear_log_probs_frozen": [("TRL", "trl", trl_log_probs)],
    "linear_policy_loss": [("TRL", "trl", trl_policy_loss)],
    "linear_cross_entropy_wide": wide("linear_cross_entropy"),
    "linear_log_probs_and_entropy_forward_wide": wide("linear_log_probs_and_entropy_forward"),
    "linear_cross_entropy_invariant": [("onepass, not in the mode", "torch", ours("linear_cross_entropy"))],
    "linear_log_probs_and_entropy_invariant": [
        ("onepass, not in the mode", "torch", ours("linear_log_probs_and_entropy"))
    ],
    "linear_kl_div": [
        ("onepass, logits of the dtype of the factors", "torch", ours("linear_kl_div_rounded")),
        ("Liger (JSD, beta 0)", "liger-kernel", liger_kl_div),
    ],
}
