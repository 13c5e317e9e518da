"""The contract of the operations of mixtures of experts: their options, the tensors they take, the shapes they return."""

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from onepass.core.options import Transform

Score = Literal["softmax", "sigmoid", "sqrtsoftplus"]
GroupScore = Literal["top2_sum", "max"]
Activation = Literal["silu", "gelu", "gelu_tanh", "swiglu_clamped"]
SCORES: tuple[str, ...] = get_args(Score)
GROUP_SCORES: tuple[str, ...] = get_args(GroupScore)
ACTIVATIONS: tuple[str, ...] = get_args(Activation)
MAX_EXPERTS, MAX_K = 1024, 32


class RouterOptions(NamedTuple):
    """See `moe.route`."""

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
    sums: bool = False  # whether the sums that the auxiliary losses are made of are wanted

    def factors(self) -> tuple[float, float]:
        return Transform(softcap=self.softcap).factors()


class RoutingGradients(NamedTuple):
    """Upstream gradients of what a router returns, None for 0."""

    weights: Tensor | None = None
    prob_sums: Tensor | None = None
    logsumexp: Tensor | None = None


RoutingResults = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]


def empty_routing(logits: Tensor, options: RouterOptions) -> RoutingResults:
    """Unwritten weights ``(T, K)``, experts ``(T, K)``, counts ``(E,)``, summed probabilities ``(E,)`` and logsumexp
    ``(T,)``; the last two are None where they are not wanted."""
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    T, E = logits.shape
    return (
        logits.new_empty((T, options.k), dtype=dtype),
        logits.new_empty((T, options.k), dtype=torch.int64),
        logits.new_empty(E, dtype=torch.int32),
        logits.new_empty(E, dtype=dtype) if options.sums else None,
        logits.new_empty(T, dtype=dtype) if options.sums else None,
    )


class Groups(NamedTuple):
    """Token-expert assignments sorted by expert. Assignment ``t·K + k`` is the k-th expert of token t.

    Attributes:
        order: ``(T·K,)``, int32: the assignments, sorted by expert and, of one expert, in their order. Out-of-range
            ids come last.
        offsets: ``(E + 1,)``, int32: expert e has ``order[offsets[e]:offsets[e + 1]]``.
        tile_expert, tile_row: the expert and the first sorted row of every tile of rows that a kernel works through;
            empty on a CPU.
    """

    order: Tensor
    offsets: Tensor
    tile_expert: Tensor
    tile_row: Tensor


class ExpertOptions(NamedTuple):
    """See `moe.expert_mlp`."""

    activation: str = "silu"
    transposed: bool = False
    interleaved: bool = False
    gate_up_scaling: float = 0.0  # of the LoRA on gate_up
    down_scaling: float = 0.0
    alpha: float = 1.702
    limit: float = 7.0


class ExpertTensors(NamedTuple):
    """The differentiable inputs of `moe.expert_mlp`; of T tokens, E experts and LoRA rank R."""

    hidden: Tensor  # (T, H)
    weights: Tensor  # (T, K), of the routing
    gate_up: Tensor  # (E, 2 I, H)
    down: Tensor  # (E, H, I)
    gate_up_bias: Tensor | None = None  # (E, 2 I)
    down_bias: Tensor | None = None  # (E, H)
    gate_up_lora_a: Tensor | None = None  # (E, R, H)
    gate_up_lora_b: Tensor | None = None  # (E, 2 I, R)
    down_lora_a: Tensor | None = None  # (E, R, I)
    down_lora_b: Tensor | None = None  # (E, H, R)


EXPERT_TENSORS = ExpertTensors._fields
ExpertGradients = tuple[
    Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None,
    Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None,
]  # fmt: skip


class ScatterOptions(NamedTuple):
    """See `moe.scattered_linear`."""

    transposed: bool = False
    grouped_in: bool = False
    grouped_out: bool = False
    k: int = 1  # experts a token


class ScatterTensors(NamedTuple):
    """The differentiable inputs of `moe.scattered_linear`."""

    x: Tensor
    weight: Tensor  # (E, outputs, inputs)
    bias: Tensor | None = None  # (E, outputs)
    weights: Tensor | None = None  # (T, K), of the routing


ScatterGradients = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
