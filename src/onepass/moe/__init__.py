"""Mixture of experts: routing, and the experts."""

from onepass.moe.experts import expert_mlp
from onepass.moe.families import route_block
from onepass.moe.grouping import group_by_expert
from onepass.moe.routing import Routing, load_balancing_loss, route, router_z_loss, sigmoid_topk, softmax_topk
from onepass.moe.scattered import GLUMLP, ParallelExperts, scattered_linear

__all__ = [
    "GLUMLP",
    "ParallelExperts",
    "Routing",
    "expert_mlp",
    "group_by_expert",
    "load_balancing_loss",
    "route",
    "route_block",
    "router_z_loss",
    "scattered_linear",
    "sigmoid_topk",
    "softmax_topk",
]
