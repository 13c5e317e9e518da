"""Mixture of experts: routing, and the experts."""

from onepass.moe.experts import expert_mlp
from onepass.moe.families import route_block
from onepass.moe.routing import Routing, load_balancing_loss, route, router_z_loss, sigmoid_topk, softmax_topk

__all__ = [
    "Routing",
    "expert_mlp",
    "load_balancing_loss",
    "route",
    "route_block",
    "router_z_loss",
    "sigmoid_topk",
    "softmax_topk",
]
