"""Mixtures of experts: routers, experts, and the auxiliary losses of routers."""

from onepass.core.moe_options import Groups
from onepass.moe.blocks import route_block
from onepass.moe.experts import expert_mlp
from onepass.moe.losses import load_balancing_loss, router_z_loss
from onepass.moe.quantize import quantize
from onepass.moe.quantized import QuantizedWeight
from onepass.moe.quantized_modules import dequantize_experts, describe, quantize_experts, set_decoding_memory
from onepass.moe.replay import Replay, record_routing, replay_routing
from onepass.moe.router import Routing, route, sigmoid_topk, softmax_topk
from onepass.moe.routing_record import RoutingRecord
from onepass.moe.scattered_linear import GLUMLP, ParallelExperts, scattered_linear
from onepass.moe.selection_bias import ExpertCounts, count_experts, update_selection_bias
from onepass.moe.token_sort import group_by_expert

__all__ = [
    "GLUMLP",
    "ExpertCounts",
    "Groups",
    "ParallelExperts",
    "QuantizedWeight",
    "Replay",
    "Routing",
    "RoutingRecord",
    "count_experts",
    "dequantize_experts",
    "describe",
    "expert_mlp",
    "group_by_expert",
    "load_balancing_loss",
    "quantize",
    "quantize_experts",
    "record_routing",
    "replay_routing",
    "route",
    "route_block",
    "router_z_loss",
    "scattered_linear",
    "set_decoding_memory",
    "sigmoid_topk",
    "softmax_topk",
    "update_selection_bias",
]
