"""Auxiliary losses of routers, from the sums that `moe.route` returns with ``losses=True``."""

from collections.abc import Sequence

import torch
from torch import Tensor

from onepass.core.checks import check_device, described
from onepass.moe.router import Routing


def load_balancing_loss(routing: Routing | Sequence[Routing]) -> Tensor:
    r"""Load-balancing loss :math:`E \sum_e f_e P_e`, which is k if all experts get equally many tokens.

    :math:`f_e` is the fraction of tokens that select expert e (the fractions sum to k), and :math:`P_e` is its mean
    probability, both over the unmasked tokens of all layers. This is transformers' ``load_balancing_loss_func``.

    Args:
        routing: the `Routing` of one layer, or a sequence of those of all layers, from `route` with ``losses=True``.

    Returns:
        A scalar with the dtype of the sums, differentiable with respect to the probabilities; NaN if there is no token.

    Raises:
        TypeError: a field of a routing has the wrong type or dtype.
        ValueError: there is no routing or one without sums, or their shapes, devices or numbers of experts per token
            differ.

    Reference: Fedus et al., "Switch Transformers", arXiv:2101.03961, equations 4 to 6.
    """
    layers = _layers(routing)
    counts = torch.stack([r.counts for r in layers]).sum(0)  # type: ignore[misc]
    probs = torch.stack([r.prob_sums for r in layers]).sum(0)  # type: ignore[misc]
    tokens = counts.sum().to(probs.dtype) / layers[0].experts.shape[-1]
    return (counts * probs).sum() * (len(counts) / tokens.square())


def router_z_loss(routing: Routing | Sequence[Routing]) -> Tensor:
    r"""Router z-loss: the mean of :math:`(\log \sum_e e^{z_e})^2` over the unmasked tokens of one layer or of all.

    The argument, the result and the errors are as in `load_balancing_loss`.

    Reference: Zoph et al., "ST-MoE", arXiv:2202.08906, equation 5.
    """
    layers = _layers(routing)
    total = torch.stack([r.logsumexp.square().sum() for r in layers]).sum()  # type: ignore[union-attr]
    counts = torch.stack([r.counts for r in layers]).sum()  # type: ignore[misc]
    tokens = counts.to(total.dtype) / layers[0].experts.shape[-1]
    return total / tokens


def _layers(routing: Routing | Sequence[Routing]) -> Sequence[Routing]:
    if not isinstance(routing, Routing | Sequence) or isinstance(routing, str):
        raise TypeError(f"routing: expected what `route` returns, or a sequence of these, got {described(routing)}")
    layers = [routing] if isinstance(routing, Routing) else list(routing)
    if not layers or any(getattr(r, "prob_sums", None) is None for r in layers):
        raise ValueError("routing: expected one or more from route(..., losses=True), got none or one without")
    if len({getattr(r.experts, "shape", (0,))[-1] for r in layers}) > 1:
        raise ValueError("routing: expected the same number of experts per token in all layers, got different numbers")
    E = layers[0].counts.shape if isinstance(layers[0].counts, Tensor) else ()
    for r in layers:
        of_tokens = r.experts.shape[:-1] if isinstance(r.experts, Tensor) else ()
        for name, shape, floating in (
            ("experts", None, False), ("counts", E, False), ("prob_sums", E, True), ("logsumexp", of_tokens, True),
        ):  # fmt: skip
            t = getattr(r, name)
            if not isinstance(t, Tensor) or t.is_floating_point() != floating or t.is_complex():
                kind = "a floating-point" if floating else "an integer"
                raise TypeError(f"routing.{name}: expected {kind} tensor, got {described(t)}")
            if shape is not None and (t.shape != shape or (name == "counts" and t.dim() != 1)):
                raise ValueError(f"routing.{name}: expected shape {tuple(shape)}, got {tuple(t.shape)}")
            check_device(t, r.experts, f"routing.{name}", "routing.experts")
    return layers
