"""The operations of `onepass.kernels` in plain PyTorch, with the same names and signatures.

They run on CPUs and for float64, and define the results that the kernels are tested against.
"""

import torch

from onepass.reference.decode import decode
from onepass.reference.divergence import divergence, divergence_gradient, divergence_states, write_means
from onepass.reference.experts import (
    expert_mlp,
    expert_mlp_gradient,
    scattered_linear,
    scattered_linear_gradient,
    size_of_tile_list,
    sort_by_expert,
    sum_rows,
    sum_rows_gradient,
)
from onepass.reference.linear_exponentials import (
    exponentials_bytes,
    linear_exponentials,
    scale_exponentials,
    supports_linear_exponentials,
)
from onepass.reference.linear_statistics import linear_statistics, state_bytes, supports_linear_statistics
from onepass.reference.router import route, route_again, route_gradient
from onepass.reference.shards import merge_divergences, merge_shards, shard_statistics
from onepass.reference.softmax import (
    few_rows_mm,
    row_gemm,
    scale,
    selected_logits,
    selected_logits_gradient,
    softmax_gradient,
    softmax_statistics,
    teacher_tokens,
)
from onepass.reference.softmax_loss import (
    compute_row_weight,
    prepare_average,
    reads_once,
    row_average,
    softmax_average,
    softmax_loss,
    supports_early_gradient,
    supports_fused_loss,
)

# The first exp of a process that several threads share is off by 1e-4 in 1 to 3 of 100 processes (torch 2.13, x86); not
# after one of a single element, in 250 processes.
torch.zeros(1, dtype=torch.float32, device="cpu").exp()

__all__ = [
    "compute_row_weight",
    "decode",
    "divergence",
    "divergence_gradient",
    "divergence_states",
    "expert_mlp",
    "expert_mlp_gradient",
    "exponentials_bytes",
    "few_rows_mm",
    "linear_exponentials",
    "linear_statistics",
    "merge_divergences",
    "merge_shards",
    "prepare_average",
    "reads_once",
    "route",
    "route_again",
    "route_gradient",
    "row_average",
    "row_gemm",
    "scale",
    "scale_exponentials",
    "scattered_linear",
    "scattered_linear_gradient",
    "selected_logits",
    "selected_logits_gradient",
    "shard_statistics",
    "size_of_tile_list",
    "softmax_average",
    "softmax_gradient",
    "softmax_loss",
    "softmax_statistics",
    "sort_by_expert",
    "state_bytes",
    "sum_rows",
    "sum_rows_gradient",
    "supports_early_gradient",
    "supports_fused_loss",
    "supports_linear_exponentials",
    "supports_linear_statistics",
    "teacher_tokens",
    "write_means",
]
