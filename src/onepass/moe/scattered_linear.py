"""`scattered_linear`: a linear layer per expert as one grouped GEMM, and modules for custom MoE blocks."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from onepass.backend import backend_of
from onepass.core.checks import FLOATS, check_bool, check_choice, check_device, check_integer, described
from onepass.core.dispatch import autocast_dtype, check_upstream, empty_gradients, operation
from onepass.core.moe_options import ACTIVATIONS, Activation, Groups, ScatterGradients, ScatterOptions, ScatterTensors
from onepass.core.quantized import Encoded, Weight, WeightParts, as_weight, cast
from onepass.moe.experts import expert_mlp
from onepass.moe.quantized import split_weight
from onepass.moe.router import Routing
from onepass.moe.token_sort import check_assignments, check_groups, group_by_expert


def scattered_linear(
    x: Tensor,
    weight: Weight,
    experts: Tensor,
    groups: Groups | None = None,
    *,
    bias: Tensor | None = None,
    weights: Tensor | None = None,
    transposed: bool = False,
    grouped_in: bool = False,
    grouped_out: bool = False,
    max_memory: int | None = None,
) -> Tensor:
    r"""Apply to each assignment :math:`a` the linear layer of its expert: :math:`y_a = W_{e(a)} x + b_{e(a)}`.

    An assignment is a pair of a token and one of its experts; T tokens with K experts each have T K assignments.

    Args:
        x: ``(T, inputs)``, whose rows are shared by the K assignments of a token; ``(T K, inputs)`` if ``grouped_in``;
            float16, bfloat16, float32 or float64.
        weight: ``(E, outputs, inputs)``; ``(E, inputs, outputs)`` if ``transposed``. It may be a `QuantizedWeight`.
        experts: ``(T, K)``, int32 or int64.
        groups: the result of `group_by_expert`, which is called if it is None.
        bias: ``(E, outputs)``.
        weights: ``(T, K)``, floating-point, used in float32: the outputs of a token's K experts are added with these
            weights.
        grouped_in, grouped_out: whether the rows of ``x`` and of the result are sorted by expert, in the order of
            ``groups``. ``grouped_out`` is not possible with ``weights``.
        max_memory: bytes of decoded experts at a time, as in `expert_mlp`.

    Returns:
        ``(T, outputs)`` with ``weights``; otherwise ``(T K, outputs)``, where row ``t·K + k`` is the output of the k-th
        expert of token t, unless ``grouped_out``. Rows of out-of-range ids are 0. Differentiable with respect to ``x``,
        ``weight``, ``bias`` and ``weights``.

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype, shape, device or value.

    Under autocast ``x``, ``weight`` and ``bias`` are cast to its dtype, unless ``x`` is float64.

    Reference: Tan et al., "Scattered Mixture-of-Experts Implementation", arXiv:2403.08245.
    """
    transposed, grouped_in = check_bool(transposed, "transposed"), check_bool(grouped_in, "grouped_in")
    grouped_out = check_bool(grouped_out, "grouped_out")
    if not isinstance(x, Tensor) or x.dtype not in FLOATS or x.dim() != 2:
        raise TypeError(f"x: expected a floating-point tensor (rows, inputs), got {described(x)}")
    if not isinstance(weight, Tensor | Encoded) or weight.dim() != 3:
        raise TypeError(f"weight: expected a tensor of three dimensions, got {described(weight)}")
    dtype = autocast_dtype(x)
    if dtype is not None:
        x, weight, bias = (cast(t, dtype) for t in (x, weight, bias))
    for of_type, name in ((weight, "weight"), (bias, "bias")):
        allowed = Tensor | Encoded if name == "weight" else Tensor
        if of_type is not None and (not isinstance(of_type, allowed) or of_type.dtype != x.dtype):
            raise TypeError(f"{name}: expected a tensor of {x.dtype}, that of x, got {described(of_type)}")
    if weights is not None and (not isinstance(weights, Tensor) or weights.dtype not in FLOATS):
        raise TypeError(f"weights: expected a floating-point tensor, got {described(weights)}")
    check_assignments(experts)
    if not len(weight):
        raise ValueError(f"weight: expected one expert or more, got shape {tuple(weight.shape)}")
    (T, K), (E, N, inputs) = experts.shape, weight.mT.shape if transposed else weight.shape
    shapes = {
        "weight": (weight, tuple(weight.shape)), "experts": (experts, (T, K)),
        "x": (x, (T * K if grouped_in else T, inputs)), "bias": (bias, (E, N)), "weights": (weights, (T, K)),
    }  # fmt: skip
    for name, (t, shape) in shapes.items():
        if t is not None and tuple(t.shape) != shape:
            raise ValueError(f"{name}: expected shape {shape}, got {tuple(t.shape)}")
        if t is not None:
            check_device(t, x, name, "x")
    if groups is None:
        groups = group_by_expert(experts, E, x)
    else:
        check_groups(groups, experts, E, x)
    if weights is not None and grouped_out:
        raise ValueError("grouped_out: expected False where there are weights, got True")
    weights = weights if weights is None or x.dtype == torch.float64 else weights.float()
    data, parts, format = split_weight(weight, "weight", max_memory)
    options = ScatterOptions(transposed, grouped_in, grouped_out, K, format)
    return _Scattered.apply(x.contiguous(), data, bias, weights, experts, options, *groups, *parts)


class ParallelExperts(nn.Module):
    """`scattered_linear` as a module, with a weight ``(E, outputs, inputs)`` and an optional bias ``(E, outputs)``.

    The arguments of ``forward``, its result and what it raises are those of `scattered_linear`.
    """

    def __init__(self, num_experts: int, input_size: int, output_size: int, bias: bool = False) -> None:
        super().__init__()
        sizes = {"num_experts": num_experts, "output_size": output_size, "input_size": input_size}
        E, outputs, inputs = [check_integer(size, name, 1) for name, size in sizes.items()]
        self.weight = nn.Parameter(torch.empty(E, outputs, inputs))
        self.bias = nn.Parameter(torch.zeros(E, outputs)) if check_bool(bias, "bias") else None
        nn.init.normal_(self.weight, std=0.02)

    def extra_repr(self) -> str:
        return "num_experts={}, output_size={}, input_size={}".format(*self.weight.shape)

    def forward(
        self,
        x: Tensor,
        experts: Tensor,
        groups: Groups | None = None,
        *,
        weights: Tensor | None = None,
        grouped_in: bool = False,
        grouped_out: bool = False,
    ) -> Tensor:
        return scattered_linear(
            x, self.weight, experts, groups, bias=self.bias, weights=weights, grouped_in=grouped_in,
            grouped_out=grouped_out,
        )  # fmt: skip


class GLUMLP(nn.Module):
    """`expert_mlp` as a module: ``experts`` are the gate and up projections, ``output_experts`` the down projection.

    ``forward`` takes hidden states ``(..., input_size)`` and a `Routing`, and returns what `expert_mlp` does.
    """

    def __init__(
        self, input_size: int, hidden_size: int, num_experts: int, bias: bool = False, activation: Activation = "silu"
    ) -> None:
        super().__init__()
        check_choice(activation, "activation", ACTIVATIONS)
        self.activation = activation
        self.experts = ParallelExperts(num_experts, input_size, 2 * hidden_size, bias)
        self.output_experts = ParallelExperts(num_experts, hidden_size, input_size, bias)

    def forward(self, hidden: Tensor, routing: Routing) -> Tensor:
        return expert_mlp(
            hidden, routing, self.experts.weight, self.output_experts.weight, activation=self.activation,
            gate_up_bias=self.experts.bias, down_bias=self.output_experts.bias,
        )  # fmt: skip


class _Scattered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, weights: Tensor | None, experts: Tensor,
        options: ScatterOptions, *rest: Any,
    ) -> Tensor:  # fmt: skip
        ctx.options = options
        tensors = ScatterTensors(x, weight, bias, weights)
        out, y = _forward(tensors, experts, *groups_and_parts(rest), options)
        ctx.save_for_backward(*tensors, y, experts, *rest)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        check_upstream(grad)
        x, weight, bias, weights, y, experts, *rest = ctx.saved_tensors
        tensors, needed = ScatterTensors(x, weight, bias, weights), list(ctx.needs_input_grad[:4])
        found = _gradient(grad.contiguous(), y, tensors, experts, *groups_and_parts(rest), needed, ctx.options)
        return *found, *(None,) * (2 + len(rest))


def groups_and_parts(arguments: Sequence[Any]) -> tuple[Groups, WeightParts]:
    """The last arguments of the autograd function: the fields of both."""
    count = len(Groups._fields)
    return Groups(*arguments[:count]), WeightParts(*arguments[count:])


def _like_forward(
    tensors: ScatterTensors, groups: Groups, options: ScatterOptions, **_: Any
) -> tuple[Tensor, Tensor | None]:
    x, weights = tensors.x, tensors.weights
    outputs = as_weight(tensors.weight, WeightParts(), options.format, x).shape[2 if options.transposed else 1]
    rows = x.new_empty((groups.order.shape[0], outputs))
    return (rows, None) if weights is None else (x.new_empty((weights.shape[0], outputs)), rows)


def _like_gradient(tensors: ScatterTensors, needed: list[bool], **_: Any) -> Any:
    return tuple(empty_gradients(tensors, needed))


def _flops(weight: Sequence[int], experts: Sequence[int], needed: Sequence[bool] = (), **given: Any) -> int:
    """FLOPs of the GEMM of all assignments; in the backward once for each of the gradients of x and weight."""
    sizes = (given["format_rows"], given["format_columns"]) if given["format_name"] else weight[1:]
    return 2 * math.prod(experts) * math.prod(sizes) * (sum(needed[:2]) if "grad" in given else 1)


@operation("onepass::scattered_linear", _like_forward, _flops)
def _forward(
    tensors: ScatterTensors, experts: Tensor, groups: Groups, parts: WeightParts, options: ScatterOptions
) -> tuple[Tensor, Tensor | None]:
    if tensors.x.is_meta:
        return _like_forward(tensors, groups, options)
    tensors = tensors._replace(weight=as_weight(tensors.weight, parts, options.format, tensors.x))
    return backend_of(tensors.x).scattered_linear(tensors, experts, groups, options)


@operation("onepass::scattered_linear_gradient", _like_gradient, _flops)
def _gradient(
    grad: Tensor, y: Tensor | None, tensors: ScatterTensors, experts: Tensor, groups: Groups, parts: WeightParts,
    needed: list[bool], options: ScatterOptions,
) -> ScatterGradients:  # fmt: skip
    if grad.is_meta:
        return _like_gradient(tensors, needed)
    tensors = tensors._replace(weight=as_weight(tensors.weight, parts, options.format, tensors.x))
    return backend_of(tensors.x).scattered_linear_gradient(grad, y, tensors, experts, groups, needed, options)
