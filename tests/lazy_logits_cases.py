"""Lazy logits beside the tensor that they stand for, losses of both, and the operations that keep logits lazy."""

import numpy as np
import torch
import torch.nn.functional as F

import onepass

ROWS, H, V = (2, 5), 6, 11
BIAS = torch.linspace(-1, 1, V)
ROW_MASK = torch.tensor([[True, False, True, True, False], [False, True, True, False, True]])
INDEX = torch.tensor([0, 3, 3])


def parts_of(device="cpu", dtype=torch.float32, bias=True, rows=ROWS):
    """Hidden states, weight and bias, which require gradients."""
    g = torch.Generator().manual_seed(0)
    shapes = [((*rows, H), 1.5), ((V, H), 1.0), ((V,), 1.0)][: 3 if bias else 2]
    return [(torch.randn(s, generator=g) * scale).to(dtype).to(device).requires_grad_() for s, scale in shapes]


def both(parts):
    """Lazy logits, and the tensor that they stand for."""
    return onepass.LinearLogits(*parts), F.linear(*parts)


def targets(z):
    count = z.shape[:-1].numel()
    return (torch.arange(count, device=z.device) * 7 % z.shape[-1]).reshape(z.shape[:-1])


def tokens(z):
    ids = torch.stack([targets(z), (targets(z) + 1) % z.shape[-1]], -1)
    return ids, -0.7 - torch.arange(2, device=z.device).expand_as(ids).float()


def teacher(z):
    g = torch.Generator().manual_seed(1)
    return torch.randn(*z.shape[:-1], V, generator=g)[..., : z.shape[-1]].to(z.device)


LOSSES = {
    "F.cross_entropy": lambda z, **_: F.cross_entropy(z.reshape(-1, z.shape[-1]), targets(z).reshape(-1)),
    "cross_entropy": lambda z, **o: onepass.cross_entropy(z, targets(z), **o),
    "kl_div": lambda z, **o: onepass.kl_div(z, teacher(z), **({"teacher_temperature": 1.0} | o)),
    "topk_kl_div": lambda z, **o: onepass.topk_kl_div(z, *tokens(z), **o),
    "entropy": lambda z, **o: onepass.entropy_from_logits(z, **o).sum(),
}
LAZY = {
    "times a number": lambda z: z * 0.5,
    "a number times": lambda z: 2 * z,
    "a negative number": lambda z: z * -1.5,
    "times numpy": lambda z: z * np.float32(0.5),
    "numpy times": lambda z: np.float32(0.5) * z,
    "times a constant": lambda z: z * torch.tensor(0.5),
    "a constant times": lambda z: torch.tensor(0.5, dtype=torch.float64) * z,
    "over a number": lambda z: z / 0.7,
    "over a constant": lambda z: z / torch.tensor(2),
    "augmented": lambda z: _augmented(z),
    "scales": lambda z: z * 3 / 2 * 0.1,
    "soft-cap": lambda z: torch.tanh(z / 3.0) * 3.0,
    "soft-cap, then scales": lambda z: 0.5 * (4 * torch.tanh(z * 0.2 / 4)) / 0.8,
    "tanh": lambda z: z.tanh(),
    "functions": lambda z: torch.mul(torch.tanh(torch.div(z, 5.0)), 5.0),
    "more functions": lambda z: torch.true_divide(torch.multiply(0.5, torch.divide(z, 0.9)), 2.0),
    "methods": lambda z: z.div(2.0).tanh().mul(3.0).multiply(0.5).true_divide(1.5).divide(2),
    "float": lambda z: z.float(),
    "to dtype": lambda z: z.to(torch.float32),
    "to dtype by name": lambda z: z.to(dtype=torch.float32, non_blocking=True),
    "to device": lambda z: z.to(z.device),
    "to device and dtype": lambda z: z.to(str(z.device), torch.float32),
    "to another": lambda z: z.to(torch.zeros(1, device=z.device)),
    "contiguous": lambda z: z.contiguous(),
    "clone": lambda z: z.clone(),
    "torch.clone": lambda z: torch.clone(z),
    "view": lambda z: z.view(-1, V),
    "view of a size": lambda z: z.view(torch.Size((10, V))),
    "reshape": lambda z: z.reshape(5, 2, -1),
    "torch.reshape": lambda z: torch.reshape(z, (-1, z.size(-1))),
    "reshape by name": lambda z: torch.reshape(z, shape=(-1, V)),
    "flatten": lambda z: z.flatten(0, 1),
    "torch.flatten": lambda z: torch.flatten(z, end_dim=-2),
    "unsqueeze": lambda z: z.unsqueeze(1),
    "unsqueeze from the end": lambda z: z.unsqueeze(-2),
    "squeeze": lambda z: z.unsqueeze(0).squeeze(0),
    "squeeze of no dimension": lambda z: torch.squeeze(z, 1),
    "shifted": lambda z: z[..., :-1, :],
    "shifted rows": lambda z: z[:, 1:],
    "contiguous shifted rows": lambda z: z[..., :-1, :].contiguous().view(-1, V),
    "an index": lambda z: z[1],
    "an index from the end": lambda z: z[:, -1],
    "an index of every dimension of rows": lambda z: z[1, 2],
    "an index and all columns": lambda z: z[0, :, :],
    "indices": lambda z: z[:, INDEX.to(z.device)],
    "indices and all columns": lambda z: z[:, INDEX.to(z.device), :],
    "a list": lambda z: z[:, [0, 3]],
    "a list of the first rows": lambda z: z[[1, 0, 1]],
    "a constant index": lambda z: z[:, torch.tensor(2)],
    "a mask": lambda z: z[ROW_MASK.to(z.device)],
    "a mask of the first rows": lambda z: z[torch.tensor([False, True])],
    "a mask and columns": lambda z: z[ROW_MASK.to(z.device), :7],
    "a mask, then columns": lambda z: z[ROW_MASK.to(z.device)][:, :2],
    "ellipsis": lambda z: z[...],
    "ellipsis at the end": lambda z: z[1:, ...],
    "ellipsis in the middle": lambda z: z[0, ..., :],
    "steps": lambda z: z[:, ::2],
    "a slice of the vocabulary": lambda z: z[..., :7],
    "a slice of rows and of the vocabulary": lambda z: z[:, 1:, :-3],
    "a longer slice of the vocabulary": lambda z: z[..., : V + 5],
    "a bias": lambda z: z + BIAS.to(z.device),
    "a bias in front": lambda z: BIAS.to(z.device) + z,
    "a bias of two dimensions": lambda z: z + BIAS.to(z.device)[None],
    "a bias by function": lambda z: torch.add(z, BIAS.to(z.device)),
    "a bias, then a scale": lambda z: (z + BIAS.to(z.device)) * 0.5,
    "zero": lambda z: 0 + z + 0.0,
    "cast, cut, scaled and shifted": lambda z: (z.float()[..., :9] / 0.8)[..., :-1, :].contiguous().view(-1, 9),
}


def _augmented(z):
    z = z * 1.0
    z = z / 2.0
    return z


def close(got, expected, atol=1e-5, rtol=1e-5):
    torch.testing.assert_close(got, expected, rtol=rtol, atol=atol)


def outcome(loss, parts):
    return loss.detach(), torch.autograd.grad(loss, parts, allow_unused=True, retain_graph=True)


def assert_same_loss(loss, ours, theirs, parts, **tolerances):
    got, expected = outcome(loss(ours), parts), outcome(loss(theirs), parts)
    close(got[0].double(), expected[0].double(), **tolerances)
    for g, e in zip(got[1], expected[1]):
        close(g, torch.zeros_like(g) if e is None else e, **tolerances)
