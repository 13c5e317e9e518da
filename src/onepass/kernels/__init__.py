"""Triton kernels and their launchers. Nothing here knows about users, losses or autograd."""

from onepass.kernels import experts, grouped, routing
from onepass.kernels.divergence import divergence, divergence_gradient
from onepass.kernels.scale import scale_
from onepass.kernels.softmax_gradient import softmax_gradient
from onepass.kernels.softmax_loss import softmax_loss, takes_in_one
from onepass.kernels.softmax_statistics import softmax_statistics

__all__ = [
    "divergence",
    "divergence_gradient",
    "experts",
    "grouped",
    "routing",
    "scale_",
    "softmax_gradient",
    "softmax_loss",
    "softmax_statistics",
    "takes_in_one",
]
