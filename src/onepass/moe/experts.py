"""`expert_mlp`: the gated MLPs of a MoE layer, from hidden states and a `Routing`, as two grouped GEMMs."""

import math
from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from onepass import reference
from onepass.backend import backend_of
from onepass.core.checks import (
    FLOATS,
    INF,
    Adapter,
    adapter_of,
    check_bool,
    check_choice,
    check_device,
    check_index_dtype,
    check_number,
    described,
)
from onepass.core.dispatch import PLAIN, autocast_dtype, check_upstream, empty_gradients, operation
from onepass.core.memo import keep
from onepass.core.moe_options import (
    ACTIVATIONS,
    ALPHA,
    EXPERT_TENSORS,
    LIMIT,
    Activation,
    ExpertGradients,
    ExpertOptions,
    ExpertParts,
    ExpertTensors,
    Groups,
)
from onepass.core.quantized import Encoded, Weight, WeightParts, cast
from onepass.moe.quantized import split_weight
from onepass.moe.router import Routing
from onepass.moe.token_sort import check_groups, group_by_expert

_valid: dict[tuple[Any, ...], None] = {}  # shapes, dtypes and devices of the tensors of valid calls


def expert_mlp(
    hidden: Tensor,
    routing: Routing,
    gate_up_weight: Weight,
    down_weight: Weight,
    *,
    activation: Activation = "silu",
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    transposed: bool = False,
    interleaved: bool = False,
    lora_gate_up: Adapter | None = None,
    lora_down: Adapter | None = None,
    alpha: float = ALPHA,
    limit: float = LIMIT,
    groups: Groups | None = None,
    max_memory: int | None = None,
) -> Tensor:
    r"""The weighted sum of a token's experts: :math:`\sum_k w_k\, D_e\, f(G_e x, U_e x)`, e its k-th expert.

    The work is proportional to the number of pairs of a token and an expert, however uneven the experts are used;
    nothing is padded or copied.

    Args:
        hidden: ``(..., H)``, float16, bfloat16, float32 or float64.
        routing: `Routing` with ``weights`` and ``experts`` of shape ``(..., K)``, from `route` or any other router; its
            counts are not read. Out-of-range ids are ignored; a token may have an expert twice.
        gate_up_weight: ``(E, 2 I, H)``: first all rows of G, then all of U; ``(E, H, 2 I)`` if ``transposed``.
        down_weight: ``(E, H, I)``; ``(E, I, H)`` if ``transposed``. Each weight may be a `QuantizedWeight`, frozen.
        activation: :math:`f(g, u)`: ``"silu"``, ``"gelu"`` or ``"gelu_tanh"`` of g, times u; or ``"swiglu_clamped"``,
            :math:`(u' + 1)\, g' \sigma(\alpha g')` with g' at most ``limit`` and u' within it (gpt-oss).
        gate_up_bias, down_bias: ``(E, 2 I)``, ``(E, H)``.
        interleaved: rows of G and U alternate.
        lora_gate_up, lora_down: ``(A, B, scaling)`` with A ``(E, R, inputs)`` and B ``(E, outputs, R)``: scaling·B A is
            added to the weight, without being materialized.
        alpha, limit: parameters of ``"swiglu_clamped"``; an error with another activation.
        groups: the result of `group_by_expert` for ``routing.experts``, as ``(T, K)``; it is called if this is None.
        max_memory: bytes of decoded weights at a time, 384 MiB by default, but at least one expert. It applies only to
            a `QuantizedWeight`, whose experts with tokens are decoded once in the forward and once in the backward. On
            a GPU, this memory is kept for the backward until the next forward of any experts, and what is in it is not
            decoded again. With up to 128 rows per expert on average, experts are decoded within the GEMM,
            without a buffer.

    Returns:
        A tensor with the shape and dtype of ``hidden``, summed over k in float32. Differentiable with respect to
        ``hidden``, the routing weights, both weights, biases and adapters; frozen tensors cost nothing.

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype, shape, device or value.

    Under autocast, all tensors except the routing weights are cast to its dtype, unless ``hidden`` is float64.
    """
    if not isinstance(hidden, Tensor) or hidden.dtype not in FLOATS or hidden.dim() < 1:
        raise TypeError(f"hidden: expected a floating-point tensor (..., H), got {described(hidden)}")
    if not (hasattr(routing, "weights") and hasattr(routing, "experts")):
        raise TypeError(f"routing: expected a Routing, got {described(routing)}")
    check_choice(activation, "activation", ACTIVATIONS)
    alpha = check_number(alpha, "alpha", -INF)
    limit = check_number(limit, "limit", 0)
    if activation != "swiglu_clamped":
        for name, value, default in (("alpha", alpha, ALPHA), ("limit", limit, LIMIT)):
            if value != default:
                raise ValueError(
                    f"{name}: expected activation='swiglu_clamped' with it, got {name}={value} with {activation=}"
                )
    gate_up_a, gate_up_b, gate_up_scaling = adapter_of(lora_gate_up, "lora_gate_up")
    down_a, down_b, down_scaling = adapter_of(lora_down, "lora_down")
    first: Any = gate_up_weight
    second: Any = down_weight
    tensors = ExpertTensors(
        hidden, routing.weights, first, second, gate_up_bias, down_bias, gate_up_a, gate_up_b, down_a,
        down_b,
    )  # fmt: skip
    dtype = autocast_dtype(hidden)
    if dtype is not None:
        tensors = ExpertTensors(*[cast(t, dtype) for t in tensors])._replace(weights=routing.weights)
    transposed, interleaved = check_bool(transposed, "transposed"), check_bool(interleaved, "interleaved")
    check_experts(tensors, routing.experts, transposed)
    gate_up, gate_up_parts, gate_up_format = split_weight(tensors.gate_up, "gate_up_weight", max_memory)
    down, down_parts, down_format = split_weight(tensors.down, "down_weight", max_memory)
    parts = ExpertParts(gate_up_parts, down_parts)
    options = ExpertOptions(
        activation,
        transposed,
        interleaved,
        gate_up_scaling,
        down_scaling,
        alpha,
        limit,
        gate_up_format,
        down_format,
    )
    rows, weights, experts = tensors.hidden, routing.weights, routing.experts
    if hidden.dim() != 2:
        tokens = math.prod(hidden.shape[:-1])
        rows, weights, experts = (t.reshape(tokens, t.shape[-1]) for t in (rows, weights, experts))
    rows = rows.contiguous()
    if rows.dtype != torch.float64:
        weights = weights.float()
    if groups is None:
        groups = group_by_expert(experts, gate_up_weight.shape[0], rows)
    else:
        check_groups(groups, experts, gate_up_weight.shape[0], rows)
    tensors = tensors._replace(hidden=rows, weights=weights, gate_up=gate_up, down=down)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        out: Tensor = _Experts.apply(options, *tensors, experts, *groups, *parts.gate_up, *parts.down)
    else:
        out = _forward(tensors, experts, groups, parts, False, options)[0]
    return out if hidden.dim() == 2 else out.view(hidden.shape)


def check_experts(tensors: ExpertTensors, experts: Tensor, transposed: bool) -> None:
    """Raise as `expert_mlp` says, unless tensors of these shapes, dtypes and devices are known to be valid."""
    every = *tensors, experts
    key: Any = None
    is_dense = all([t is None or (type(t) in PLAIN and t.layout is torch.strided and not t.is_nested) for t in every])
    if is_dense and not torch.compiler.is_compiling():
        key = transposed, *[t if t is None else (t.shape, t.dtype, t.device) for t in every]
        if key in _valid:
            return
    _check_experts(tensors, experts, transposed)
    if key is not None:
        keep(_valid, key, None)


def _check_experts(tensors: ExpertTensors, experts: Tensor, transposed: bool) -> None:
    hidden, weights, gate_up, down, gate_up_bias, down_bias, *lora = tensors
    check_index_dtype(experts, "routing.experts")
    if experts.dim() != hidden.dim() or experts.shape[:-1] != hidden.shape[:-1]:
        raise ValueError(
            f"routing.experts: expected shape {(*hidden.shape[:-1], 'K')} for hidden of {tuple(hidden.shape)}, "
            f"got {tuple(experts.shape)}"
        )
    for t, name in ((gate_up, "gate_up_weight"), (down, "down_weight")):
        if not isinstance(t, Tensor | Encoded) or t.dim() != 3:
            raise TypeError(f"{name}: expected a tensor of three dimensions, got {described(t)}")
    if not len(gate_up):
        raise ValueError(f"gate_up_weight: expected one expert or more, got shape {tuple(gate_up.shape)}")
    H = hidden.shape[-1]
    E, I = gate_up.shape[0], down.shape[1 if transposed else 2]  # noqa: E741
    shapes: dict[str, tuple[Tensor | None, tuple[Any, ...]]] = {
        "routing.weights": (weights, tuple(experts.shape)),
        "gate_up_weight": (gate_up, (E, H, 2 * I) if transposed else (E, 2 * I, H)),
        "down_weight": (down, (E, I, H) if transposed else (E, H, I)),
        "gate_up_bias": (gate_up_bias, (E, 2 * I)), "down_bias": (down_bias, (E, H)),
    }  # fmt: skip
    for name, (a, b), inputs, outputs in (("lora_gate_up", lora[:2], H, 2 * I), ("lora_down", lora[2:], I, H)):
        # Of two that do not fit together, A is taken to have the rank if its other sizes fit.
        rank = a.shape[1] if isinstance(a, Tensor) and a.shape[::2] == (E, inputs) else "R"
        shapes |= {f"{name}[0]": (a, (E, rank, inputs)), f"{name}[1]": (b, (E, outputs, rank))}
    for name, (tensor, shape) in shapes.items():
        if tensor is None and name != "routing.weights":
            continue
        if not isinstance(tensor, Tensor | Encoded) or not tensor.is_floating_point():
            raise TypeError(f"{name}: expected a floating-point tensor, got {described(tensor)}")
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"{name}: expected shape {shape} for hidden of {tuple(hidden.shape)}, got {tuple(tensor.shape)}"
            )
        if tensor.dtype != hidden.dtype and name != "routing.weights":
            raise TypeError(f"{name}: expected {hidden.dtype}, that of hidden, got {tensor.dtype}")
        check_device(tensor, hidden, name, "hidden")
    check_device(experts, hidden, "routing.experts", "hidden")


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, options: ExpertOptions, *arguments: Any) -> Tensor:
        ctx.options = options
        tensors, experts, groups, parts = split_arguments(arguments)
        out, h = _forward(tensors, experts, groups, parts, True, options)
        ctx.save_for_backward(h, *arguments)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        check_upstream(grad)
        h, *arguments = ctx.saved_tensors
        needed = list(ctx.needs_input_grad[1 : 1 + len(ExpertTensors._fields)])
        found = _gradient(grad.contiguous(), h, *split_arguments(arguments), needed, ctx.options)
        return None, *found, *(None,) * (len(arguments) - len(found))


def split_arguments(arguments: Sequence[Any]) -> tuple[ExpertTensors, Tensor, Groups, ExpertParts]:
    rest = iter(arguments)
    tensors, experts, groups = (
        ExpertTensors._make(islice(rest, len(EXPERT_TENSORS))),
        next(rest),
        islice(rest, len(Groups._fields)),
    )
    return tensors, experts, Groups._make(groups), ExpertParts(*[WeightParts._make(islice(rest, 4)) for _ in range(2)])


def _like_forward(tensors: ExpertTensors, experts: Tensor, save_h: bool, options: ExpertOptions, **_: Any) -> Any:
    shape = ExpertParts().join(tensors, options).gate_up.shape
    width = shape[2 if options.transposed else 1]
    kept = save_h and backend_of(tensors.hidden) is not reference  # which keeps nothing
    h = tensors.hidden.new_empty((experts.numel(), width)) if kept else None
    return torch.empty_like(tensors.hidden, memory_format=torch.contiguous_format), h


def _like_gradient(tensors: ExpertTensors, needed: list[bool], **_: Any) -> Any:
    return tuple(empty_gradients(tensors, needed))


def _flops(experts: Sequence[int], down: Sequence[int], needed: Sequence[bool] = (), **given: Any) -> int:
    """FLOPs of gate, up and down for all assignments; in the backward for the hidden states and for the weights."""
    passes = needed[0] + needed[ExpertTensors._fields.index("down")] if "grad" in given else 1
    rows, columns = (given["down_format_rows"], given["down_format_columns"]) if given["down_format_name"] else down[1:]
    return 6 * math.prod(experts) * rows * columns * passes


@operation("onepass::expert_mlp", _like_forward, _flops)
def _forward(
    tensors: ExpertTensors, experts: Tensor, groups: Groups, parts: ExpertParts, save_h: bool, options: ExpertOptions
) -> tuple[Tensor, Tensor | None]:
    """The result and, if ``save_h``, the first GEMM's output, which the gradient needs."""
    if tensors.hidden.is_meta:
        return _like_forward(tensors, experts, save_h, options)
    return backend_of(tensors.hidden).expert_mlp(parts.join(tensors, options), experts, groups, save_h, options)


@operation("onepass::expert_mlp_gradient", _like_gradient, _flops)
def _gradient(
    grad: Tensor, h: Tensor | None, tensors: ExpertTensors, experts: Tensor, groups: Groups, parts: ExpertParts,
    needed: list[bool], options: ExpertOptions,
) -> ExpertGradients:  # fmt: skip
    if grad.is_meta:
        return _like_gradient(tensors, needed)
    return backend_of(tensors.hidden).expert_mlp_gradient(
        grad, h, parts.join(tensors, options), experts, groups, needed, options
    )
