"""Linear heads and the losses that are taken of them, in tiles of any size."""

import torch

import onepass
from onepass.logits import tile_plan

N, H, V = 11, 19, 83


def tiles_of(monkeypatch, size, slices=True):
    """Of ``size`` rows, or as many columns where a tile may be a slice of the vocabulary."""

    def shape(count, gathered, heads, use, masked=False):
        vocab, several = heads[0].vocab, 3 if use.gradient and heads[0].logits_dtype != heads[0].dtype else 1
        if use.known and slices:
            return max(count, 1), max(count, 1), min(vocab, size), None
        return max(1, min(count, size)), max(1, min(count, several * size)), vocab, None

    monkeypatch.setattr(tile_plan, "tile_shape", shape)
    return size


def batch(device, dtype=torch.float32, rows=(N,), width=H, vocab=V, seed=0):
    """Hidden states, weight and bias that require gradients, and targets of which some are ignored."""
    g = torch.Generator().manual_seed(seed)
    shapes = ((*rows, width), (vocab, width), (vocab,))
    parts = [(torch.randn(s, generator=g) * scale).to(dtype).to(device) for s, scale in zip(shapes, (1, 0.5, 1))]
    target = torch.randint(vocab, rows, generator=g)
    target.view(-1)[2:4] = -100
    return *[p.requires_grad_() for p in parts], target.to(device)


def exact(*parts):
    return [p.detach().double().requires_grad_() for p in parts]


def gradients(loss, parts):
    return torch.autograd.grad(loss, parts, allow_unused=True)


def assert_all_close(got, expected, name="gradient"):
    """Norms, of sums over tiles in float32 (float64): every product is rounded in an order of its own."""
    for g, e in zip(got, expected, strict=True):
        bound = (1e-12 if g.dtype == torch.float64 else 2e-5) * (e.double().norm() + 1e-3)
        assert (g.double() - e.to(g.device).double()).norm() <= bound, name


POLICY_INPUTS = ("advantages", "old_log_probs")


def policy_loss(s, advantages, old_log_probs):
    ratio = (s.log_probs - old_log_probs).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages) - 0.05 * s.entropy


def teacher_tokens(target):
    ids = torch.stack([target.clamp(min=0), (target.clamp(min=0) + 1) % V], dim=-1)
    return ids, -0.5 - torch.arange(2, device=target.device).expand_as(ids).float()


def teacher_logits(target):
    g = torch.Generator().manual_seed(5)
    return torch.randn((*target.shape, V), generator=g).to(target.device)


LOSSES = {
    "cross_entropy": lambda x, t: onepass.cross_entropy(x, t),
    "cross_entropy, sum": lambda x, t: onepass.cross_entropy(x, t, reduction="sum", softcap=9.0, logit_scale=0.5),
    "cross_entropy, every option": lambda x, t: onepass.cross_entropy(
        x,
        t,
        class_weights=torch.linspace(0, 1, V, device=t.device),
        label_smoothing=0.1,
        z_loss_weight=0.1,
        temperature=2.0,
    ),
    "cross_entropy, none": lambda x, t: onepass.cross_entropy(x, t, reduction="none", z_loss_weight=0.1),
    "cross_entropy, smooth": lambda x, t: onepass.cross_entropy(x, t, label_smoothing=0.2),
    "pair": lambda x, t: torch.stack(onepass.selective_log_softmax_and_entropy(x, t.abs() % V, softcap=9.0)),
    "pair, masked": lambda x, t: torch.stack(
        onepass.selective_log_softmax_and_entropy(x, t, row_mask=t != -100, temperature=0.7)
    ),
    "entropy": lambda x, t: onepass.entropy_from_logits(x, row_mask=(t != -100).int()),
    "topk_kl_div": lambda x, t: onepass.topk_kl_div(x, *teacher_tokens(t), row_mask=t != -100, temperature=2.0),
    "topk_kl_div, renormalized": lambda x, t: onepass.topk_kl_div(
        x, *teacher_tokens(t), row_mask=t != -100, renormalize=True
    ),
    "distillation_loss": lambda x, t: onepass.distillation_loss(x, t, *teacher_tokens(t), temperature=2.0),
    "kl_div": lambda x, t: onepass.kl_div(x, teacher_logits(t), row_mask=t != -100),
    "kl_div, none": lambda x, t: onepass.kl_div(
        x, teacher_logits(t), row_mask=t != -100, reduction="none", vocab_size=V - 7
    ),
    "kl_div, reverse": lambda x, t: onepass.kl_div(x, teacher_logits(t), direction="reverse", temperature=2.0),
    "jsd": lambda x, t: onepass.kl_div(x, teacher_logits(t), direction="jsd", softcap=5.0, num_items=3),
}


class OnCuda:
    """Hidden states of which only their description is asked."""

    def __init__(self, hidden):
        self.shape, self.dtype, self.device, self.is_cuda = hidden.shape, hidden.dtype, torch.device("cuda", 0), True
        self.numel, self.element_size = hidden.numel, hidden.element_size
