"""A teacher's tokens, prepared for a divergence in one launch: masks applied, ids safe to gather.

`softmax.teacher_tokens` calls it. For a few tokens per row, each launch costs more than its work.
"""

import torch
import triton
import triton.language as tl

from onepass.kernels.launch import Flat, Out, Plan, launch

BLOCK = 512


@triton.jit(do_not_specialize=["n", "K"])
def teacher_tokens_kernel(
    log_probs: "Flat", ids: "Flat", row_mask: "Flat", teacher_mask: "Flat", safe_ids: "Out", given: "Out",
    masked: "Out", probs: "Out", n: tl.int64, K: tl.int64, BLOCK: tl.constexpr,
):  # fmt: skip
    """Masked log-probs are -inf, the ids of tokens without a term are 0.

    A token has a term if its log-prob is not -inf or, with ``probs``, if its probability does not underflow.
    Inputs: ``log_probs`` and ``ids`` ``(rows, K)``, with ``n = rows·K``; masks, or None: ``row_mask`` ``(rows,)`` and
    ``teacher_mask`` ``(rows, K)``. Outputs, ``(rows, K)``: ``safe_ids``; ``given``, whether a token has a term;
    ``masked`` log-probs, or None; ``probs``, or None. Bytes moved: inputs and outputs, once.
    """
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    x = tl.load(log_probs + i, mask=inside, other=0.0).to(tl.float32)
    if row_mask is not None:
        x = tl.where(tl.load(row_mask + i // K, mask=inside, other=0) != 0, x, float("-inf"))
    if teacher_mask is not None:
        x = tl.where(tl.load(teacher_mask + i, mask=inside, other=0) != 0, x, float("-inf"))
    has_term = x != float("-inf")
    if probs is not None:
        p = tl.exp(x)
        has_term = p != 0
        tl.store(probs + i, p, mask=inside)
    token = tl.load(ids + i, mask=inside, other=0)
    tl.store(safe_ids + i, tl.where(has_term, token, 0), mask=inside)
    tl.store(given + i, has_term, mask=inside)
    if masked is not None:
        tl.store(masked + i, x, mask=inside)


def plan_for(n: int, K: int) -> Plan:
    """The launch of `teacher_tokens_kernel`."""
    return Plan(teacher_tokens_kernel, triton.cdiv(n, BLOCK), (n, K), dict(BLOCK=BLOCK), 4)


def teacher_tokens(
    log_probs: torch.Tensor,
    ids: torch.Tensor,
    row_mask: torch.Tensor | None,
    teacher_mask: torch.Tensor | None,
    with_probs: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """``(safe ids, given, masked log-probs, probabilities)``, ``(..., K)`` each; see `teacher_tokens_kernel`.

    The log-probs are None if they are float32 and there is no mask.
    """
    shape = ids.shape
    safe, given = ids.new_empty(shape), ids.new_empty(shape, dtype=torch.bool)
    same = row_mask is None and teacher_mask is None and log_probs.dtype == torch.float32
    masked = None if same else ids.new_empty(shape, dtype=torch.float32)
    probs = ids.new_empty(shape, dtype=torch.float32) if with_probs else None
    if n := ids.numel():
        launch(plan_for, (n, shape[-1]), (log_probs, ids, row_mask, teacher_mask, safe, given, masked, probs))
    return safe, given, masked, probs
