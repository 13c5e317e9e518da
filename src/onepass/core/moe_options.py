"""Options, tensors and results of the mixture-of-experts operations, shared by `moe`, `kernels` and `reference`."""

from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from onepass.core.options import Transform
from onepass.core.quantized import WeightFormat, WeightParts, as_weight

Score = Literal["softmax", "sigmoid", "sqrtsoftplus"]
GroupScore = Literal["top2_sum", "max"]
Activation = Literal["silu", "gelu", "gelu_tanh", "swiglu_clamped"]
SCORES: tuple[str, ...] = get_args(Score)
GROUP_SCORES: tuple[str, ...] = get_args(GroupScore)
ACTIVATIONS: tuple[str, ...] = get_args(Activation)
MAX_EXPERTS, MAX_K = 1024, 32
ALPHA, LIMIT = 1.702, 7.0  # of "swiglu_clamped" in gpt-oss
LOG_TINY = -40.0  # the logarithm of a score below which scores are renormalized relative to the largest


class RouterOptions(NamedTuple):
    """The options of `moe.route`, which documents them."""

    k: int
    score: str = "softmax"
    n_group: int = 1
    topk_group: int = 1
    group_score: str = "top2_sum"
    renormalize: bool = True
    scale: float = 1.0
    eps: float = 1e-20
    score_after_topk: bool = False
    softcap: float | None = None
    sums: bool = False  # whether to return the summed probabilities and logsumexp, for auxiliary losses
    invariant: bool = False  # see `Options.invariant`
    count_changed: bool = False
    counts: bool = True  # whether to count the tokens of each expert
    biased: bool = False  # whether experts are selected by more than their scores

    def factors(self) -> tuple[float, float]:
        """See `Transform.factors`."""
        return Transform(softcap=self.softcap).factors()


class RoutingGradients(NamedTuple):
    """Upstream gradients of the results of a router. None means zero."""

    weights: Tensor | None = None
    prob_sums: Tensor | None = None
    logsumexp: Tensor | None = None


RoutingResults = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def empty_routing(
    logits: Tensor, options: RouterOptions, counts: Tensor | None = None, new: Callable[..., Tensor] | None = None
) -> RoutingResults:
    """Uninitialized results of a router for ``(T, E)`` logits, with these ``counts`` if there are any already.

    Args:
        new: returns memory for a size, strides and a dtype. By default, it is that of the logits' device.

    Returns:
        Weights ``(T, K)``, experts ``(T, K)``, counts ``(E,)``, summed probabilities ``(E,)``, logsumexp ``(T,)`` and
        the number of changed choices ``()``. The counts are None unless ``options.counts``, the next two unless
        ``options.sums``, and the last unless ``options.count_changed``.
    """
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    (T, E), K = logits.shape, options.k
    if new is None:

        def new(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return logits.new_empty_strided(size, stride, dtype=dtype)  # in half the time of `new_empty`

    return (
        new((T, K), (K, 1), dtype),
        new((T, K), (K, 1), torch.int64),
        new((E,), (1,), torch.int32) if counts is None and options.counts else counts,
        new((E,), (1,), dtype) if options.sums else None,
        new((T,), (1,), dtype) if options.sums else None,
        new((), (), torch.int32) if options.count_changed else None,
    )


class Groups(NamedTuple):
    """Token-expert assignments sorted by expert. Assignment ``t·K + k`` is the k-th expert of token t.

    Attributes:
        order: ``(T·K,)``, int32: the assignments, stably sorted by expert (kernels rely on the ascending order within
            an expert). Those to out-of-range ids come last.
        offsets: ``(E + 1,)``, int32: the assignments to expert e are ``order[offsets[e]:offsets[e + 1]]``.
        tile_list: ``(5·tiles + 2,)``, int32: the expert of each tile of rows that a grouped GEMM computes, its first
            sorted row, the end of its rows, and the first and the number of the tiles that read the same columns of a
            weight at about the same time. With many rows, a second list follows. At the end is how many tiles of each
            list are used. There are none where `onepass.reference` sorts.
        places: ``(T·K,)``, int32: the sorted row of each assignment, and T·K for one to an out-of-range id.
    """

    order: Tensor
    offsets: Tensor
    tile_list: Tensor
    places: Tensor


class ExpertOptions(NamedTuple):
    """The options of `moe.expert_mlp`, which documents them."""

    activation: str = "silu"
    transposed: bool = False
    interleaved: bool = False
    gate_up_scaling: float = 0.0  # the scaling of the LoRA adapter of gate_up
    down_scaling: float = 0.0
    alpha: float = ALPHA
    limit: float = LIMIT
    gate_up_format: WeightFormat = WeightFormat()
    down_format: WeightFormat = WeightFormat()


class Product(NamedTuple):
    """What a grouped GEMM of `kernels` computes, and from what, besides its weight: a part of the key of its launch.

    Attributes:
        assignments, tiles: rows of the result, and tiles that the first list of `Groups` has room for.
        E, N, K: experts, columns of the result and of ``x``.
        R: the rank of the adapter; 0 without one.
        share, scatter, glu, scale, options: as in `kernels.grouped_gemm`.
        x_row: the stride of the rows of ``x``.
        element: bytes of an element.
    """

    assignments: int
    tiles: int
    E: int
    N: int
    K: int
    R: int
    share: int
    scatter: bool
    glu: bool
    scale: float
    options: ExpertOptions
    x_row: int
    lora_strides: tuple[int, ...]
    element: int
    device: torch.device


class ExpertTensors(NamedTuple):
    """The differentiable inputs of `moe.expert_mlp`, for T tokens, E experts and LoRA rank R."""

    hidden: Tensor  # (T, H)
    weights: Tensor  # (T, K), the routing weights
    gate_up: Tensor  # (E, 2 I, H), or the codes of a quantized weight; then an `Encoded` for `kernels`
    down: Tensor  # (E, H, I), likewise
    gate_up_bias: Tensor | None = None  # (E, 2 I)
    down_bias: Tensor | None = None  # (E, H)
    gate_up_lora_a: Tensor | None = None  # (E, R, H)
    gate_up_lora_b: Tensor | None = None  # (E, 2 I, R)
    down_lora_a: Tensor | None = None  # (E, R, I)
    down_lora_b: Tensor | None = None  # (E, H, R)


class ExpertParts(NamedTuple):
    """The other tensors of weights that are quantized."""

    gate_up: WeightParts = WeightParts()
    down: WeightParts = WeightParts()

    def join(self, tensors: ExpertTensors, options: ExpertOptions) -> ExpertTensors:
        """The tensors with the weights as `kernels` and `reference` take them."""
        return tensors._replace(
            gate_up=as_weight(tensors.gate_up, self.gate_up, options.gate_up_format, tensors.hidden),
            down=as_weight(tensors.down, self.down, options.down_format, tensors.hidden),
        )


EXPERT_TENSORS = ExpertTensors._fields
ExpertGradients = tuple[
    Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None,
    Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None,
]  # fmt: skip


class ScatterOptions(NamedTuple):
    """The options of `moe.scattered_linear`, which documents them."""

    transposed: bool = False
    grouped_in: bool = False
    grouped_out: bool = False
    k: int = 1  # experts per token
    format: WeightFormat = WeightFormat()


class ScatterTensors(NamedTuple):
    """The differentiable inputs of `moe.scattered_linear`."""

    x: Tensor  # (T, inputs), or (T·K, inputs) with grouped_in
    weight: Tensor  # (E, outputs, inputs), or (E, inputs, outputs) with transposed
    bias: Tensor | None = None  # (E, outputs)
    weights: Tensor | None = None  # (T, K), the routing weights


ScatterGradients = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
