"""Directions of a divergence, and the best tokens of a teacher beside a student's logits."""

import torch

DIRECTIONS = ("forward", "reverse", "jsd")
ROWS, VOCAB = 5, 301


def topk_batch(device, K, dtype=torch.float32, masks="none"):
    """Logits, a teacher's ids and log-probs, and a mask: padding ids are garbage where the mask is 0."""
    generator = torch.Generator().manual_seed(K)
    x = (torch.randn(ROWS, VOCAB, generator=generator) * 3).to(dtype)
    ids = torch.stack([torch.randperm(VOCAB, generator=generator)[:K] for _ in range(ROWS)])
    log_t = torch.randn(ROWS, VOCAB, generator=generator).mul(3).log_softmax(-1).gather(-1, ids)
    mask = None
    if masks == "rows":
        mask = torch.tensor([1, 0, 1, 1, 0])
        ids[1], log_t[4] = -100, float("nan")
    elif masks == "tokens":
        mask = torch.rand(ROWS, K, generator=generator) < 0.7
        mask[0], mask[1] = True, False
        ids, log_t = ids.where(mask, 10**9), log_t.where(mask, float("nan"))
    return x.to(device), ids.to(device), log_t.to(device), None if mask is None else mask.to(device)


def masks_of(mask, ids):
    if mask is None:
        return {}
    return {"teacher_mask" if mask.dim() == ids.dim() else "row_mask": mask}


def judged(direction, beta):
    """A direction, with a beta where that has a meaning."""
    return {"direction": direction} | ({"beta": beta} if direction == "jsd" else {})
