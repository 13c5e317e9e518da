"""Triton kernels and the functions that launch them. Nothing here depends on losses or autograd.

`onepass.reference` defines the same functions, with the same signatures, in plain PyTorch. `backend.backend_of` chooses
between the two.
"""

from onepass.kernels.decode import decode
from onepass.kernels.divergence import divergence, divergence_states, write_means
from onepass.kernels.divergence_gradient import divergence_gradient
from onepass.kernels.expert_mlp import expert_mlp, expert_mlp_gradient
from onepass.kernels.expert_rows import sum_rows, sum_rows_gradient
from onepass.kernels.few_rows_mm import few_rows_mm
from onepass.kernels.linear_exponentials import (
    exponentials_bytes,
    linear_exponentials,
    scale_exponentials,
    supports_linear_exponentials,
)
from onepass.kernels.linear_statistics import linear_statistics, state_bytes, supports_linear_statistics
from onepass.kernels.merge_shards import merge_divergences, merge_shards
from onepass.kernels.prepared_average import prepare_average
from onepass.kernels.router import route, route_again
from onepass.kernels.router_gradient import route_gradient
from onepass.kernels.row_average import compute_row_weight, row_average
from onepass.kernels.row_gemm import row_gemm
from onepass.kernels.scale import scale
from onepass.kernels.scattered_linear import scattered_linear, scattered_linear_gradient
from onepass.kernels.selected_logits import selected_logits, selected_logits_gradient
from onepass.kernels.softmax_gradient import softmax_gradient, supports_early_gradient
from onepass.kernels.softmax_loss import reads_once, softmax_average, softmax_loss, supports_fused_loss
from onepass.kernels.softmax_statistics import shard_statistics, softmax_statistics
from onepass.kernels.teacher_tokens import teacher_tokens
from onepass.kernels.token_sort import size_of_tile_list, sort_by_expert

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
