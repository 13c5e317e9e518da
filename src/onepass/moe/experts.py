"""The experts of a MoE layer, from hidden states and a `Routing`."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from onepass.checks import FLOATS, INF, check_choice, check_device, check_number, described
from onepass.dispatch import autocast_dtype, operation, part_of, refuse_second_derivatives
from onepass.moe import eager_experts
from onepass.moe.grouping import group_by_expert
from onepass.moe.routing import Routing
from onepass.options import ACTIVATIONS, EXPERT_TENSORS, ExpertGradients, ExpertOptions

Adapter = tuple[Tensor, Tensor, float]


def expert_mlp(
    hidden: Tensor,
    routing: Routing,
    gate_up_weight: Tensor,
    down_weight: Tensor,
    *,
    activation: str = "silu",
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    transposed: bool = False,
    interleaved: bool = False,
    lora_gate_up: Adapter | None = None,
    lora_down: Adapter | None = None,
    alpha: float = 1.702,
    limit: float = 7.0,
) -> Tensor:
    r"""What a token's experts make of it: :math:`\sum_k w_k\, D_e\, f(G_e x, U_e x)`, with e the k-th of its experts.

    Work is proportional to the tokens that are routed, however unevenly; nothing is padded or copied per expert.

    Args:
        hidden: ``(..., H)``, float16, bfloat16, float32 or float64.
        routing: `Routing` with ``weights`` and ``experts`` of shape ``(..., K)``, from `route` or made by hand; its
            counts are not read. An id that is no expert adds nothing; a token may name an expert twice.
        gate_up_weight: ``(E, 2 I, H)``: first all rows of G, then all of U; ``(E, H, 2 I)`` if ``transposed``.
        down_weight: ``(E, H, I)``; ``(E, I, H)`` if ``transposed``.
        activation: :math:`f(g, u)`: ``"silu"``, ``"gelu"`` or ``"gelu_tanh"`` of g, times u; or ``"swiglu_clamped"``,
            :math:`(u' + 1)\, g' \sigma(\alpha g')` with g' at most ``limit`` and u' within it (gpt-oss).
        gate_up_bias, down_bias: ``(E, 2 I)``, ``(E, H)``.
        interleaved: rows of G and U take turns.
        lora_gate_up, lora_down: ``(A, B, scaling)`` with A ``(E, R, inputs)`` and B ``(E, outputs, R)``: scaling·B A is
            added to the weight, and never made.
        alpha, limit: of ``"swiglu_clamped"``.

    Returns:
        Of the shape and dtype of ``hidden``; summed over k in float32. Differentiable with respect to ``hidden``, the
        weights of the routing, both weights, biases and adapters; what is frozen costs nothing.

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype, shape, device or value.

    Under autocast all but the routing's weights are taken in its dtype, unless ``hidden`` is float64.
    """
    if not isinstance(hidden, Tensor) or hidden.dtype not in FLOATS or hidden.dim() < 1:
        raise TypeError(f"hidden: expected a floating-point tensor (..., H), got {described(hidden)}")
    if not (hasattr(routing, "weights") and hasattr(routing, "experts")):
        raise TypeError(f"routing: expected a Routing, got {described(routing)}")
    check_choice(activation, "activation", ACTIVATIONS)
    alpha = check_number(alpha, "alpha", -INF)
    limit = check_number(limit, "limit", 0)
    a1, b1, scale1 = adapter_of(lora_gate_up, "lora_gate_up")
    a2, b2, scale2 = adapter_of(lora_down, "lora_down")
    options = ExpertOptions(activation, bool(transposed), bool(interleaved), scale1, scale2, alpha, limit)
    tensors = [hidden, routing.weights, gate_up_weight, down_weight, gate_up_bias, down_bias, a1, b1, a2, b2]
    dtype = autocast_dtype(hidden)
    if dtype is not None:
        tensors = [t.to(dtype) if isinstance(t, Tensor) and n != 1 else t for n, t in enumerate(tensors)]
    check_experts(tensors[0], tensors[1:], routing.experts, options)  # type: ignore[arg-type]
    tokens, K = hidden.shape[:-1].numel(), routing.experts.shape[-1]
    weights, experts = routing.weights.reshape(tokens, K), routing.experts.reshape(tokens, K)
    rows = tensors[0].reshape(tokens, hidden.shape[-1]).contiguous()  # type: ignore[union-attr]
    if rows.dtype != torch.float64:
        weights = weights.float()
    choices = experts, *group_by_expert(experts, len(gate_up_weight), rows)
    arguments = rows, weights, *tensors[2:]
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in arguments):
        out: Tensor = _Experts.apply(options, *arguments, *choices)
    else:
        out = _forward(*arguments, *choices, options)[0]
    return out.view(hidden.shape)


def adapter_of(value: Adapter | None, name: str) -> tuple[Tensor | None, Tensor | None, float]:
    if value is None:
        return None, None, 0.0
    if not isinstance(value, tuple | list) or len(value) != 3 or not all(isinstance(t, Tensor) for t in value[:2]):
        raise TypeError(f"{name}: expected (A, B, scaling), two tensors and a number, got {described(value)}")
    return value[0], value[1], check_number(value[2], f"{name}[2]", -INF)


def check_experts(hidden: Tensor, others: Sequence[Tensor | None], experts: Tensor, o: ExpertOptions) -> None:
    weights, gate_up, down, gate_up_bias, down_bias, a1, b1, a2, b2 = others
    if not isinstance(experts, Tensor) or experts.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"routing.experts: expected an int32 or int64 tensor, got {described(experts)}")
    if experts.dim() != hidden.dim() or experts.shape[:-1] != hidden.shape[:-1]:
        raise ValueError(
            f"routing.experts: expected shape {(*hidden.shape[:-1], 'K')} for hidden of {tuple(hidden.shape)}, "
            f"got {tuple(experts.shape)}"
        )
    for t, name in ((gate_up, "gate_up_weight"), (down, "down_weight")):
        if not isinstance(t, Tensor) or t.dim() != 3:
            raise TypeError(f"{name}: expected a tensor of three dimensions, got {described(t)}")
    H = hidden.shape[-1]
    E, I = gate_up.shape[0], down.shape[1 if o.transposed else 2]  # type: ignore[union-attr] # noqa: E741
    shapes = {
        "routing.weights": (weights, tuple(experts.shape)),
        "gate_up_weight": (gate_up, (E, H, 2 * I) if o.transposed else (E, 2 * I, H)),
        "down_weight": (down, (E, I, H) if o.transposed else (E, H, I)),
        "gate_up_bias": (gate_up_bias, (E, 2 * I)), "down_bias": (down_bias, (E, H)),
    }  # fmt: skip
    for name, a, b, inputs, outputs in (("lora_gate_up", a1, b1, H, 2 * I), ("lora_down", a2, b2, I, H)):
        rank = a.shape[1] if isinstance(a, Tensor) and a.dim() == 3 else "R"
        shapes |= {f"{name}[0]": (a, (E, rank, inputs)), f"{name}[1]": (b, (E, outputs, rank))}
    for name, (t, shape) in shapes.items():
        if t is None and name != "routing.weights":
            continue
        if not isinstance(t, Tensor) or not t.is_floating_point():
            raise TypeError(f"{name}: expected a floating-point tensor, got {described(t)}")
        if tuple(t.shape) != shape:
            raise ValueError(
                f"{name}: expected shape {shape} for hidden of {tuple(hidden.shape)}, got {tuple(t.shape)}"
            )
        if t.dtype != hidden.dtype and name != "routing.weights":
            raise TypeError(f"{name}: expected {hidden.dtype}, that of hidden, got {t.dtype}")
        check_device(t, hidden, name)
    check_device(experts, hidden, "routing.experts")


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, options: ExpertOptions, *tensors: Tensor | None) -> Tensor:
        needed = sum(1 << n for n, needs in enumerate(ctx.needs_input_grad[1:]) if needs)
        ctx.options = options._replace(needed=needed)
        out, h = _forward(*tensors, ctx.options)
        ctx.save_for_backward(h, *tensors)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        found = _gradient(grad.contiguous(), *ctx.saved_tensors, ctx.options)
        return None, *found, *(None,) * 5


def _path(hidden: Tensor) -> Any:
    return part_of(hidden, "experts", eager_experts)


def _like_forward(hidden: Tensor, experts: Tensor, gate_up: Tensor, options: ExpertOptions, **_: Any) -> Any:
    width = gate_up.shape[2 if options.transposed else 1]
    h = hidden.new_empty((experts.numel(), width)) if options.needed else None
    return torch.empty_like(hidden, memory_format=torch.contiguous_format), h


def _like_gradient(options: ExpertOptions, **given: Any) -> Any:
    return tuple(
        torch.empty_like(given[name], memory_format=torch.contiguous_format) if options.needs(name) else None
        for name in EXPERT_TENSORS
    )


def _flops(hidden: Sequence[int], experts: Sequence[int], down: Sequence[int], needed: int, **given: Any) -> int:
    """Of the products of all choices: three of a width each way, and as many for each of the gradients."""
    passes = 1
    if "grad" in given:
        passes = sum(needed >> EXPERT_TENSORS.index(name) & 1 for name in ("hidden", "down"))
    return 6 * math.prod(experts) * down[1] * down[2] * passes


@operation("onepass::expert_mlp", _like_forward, _flops)
def _forward(
    hidden: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, gate_up_bias: Tensor | None,
    down_bias: Tensor | None, a1: Tensor | None, b1: Tensor | None, a2: Tensor | None, b2: Tensor | None,
    experts: Tensor, order: Tensor, offsets: Tensor, tile_expert: Tensor, tile_row: Tensor, options: ExpertOptions,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    arguments = hidden, weights, gate_up, down, gate_up_bias, down_bias, a1, b1, a2, b2
    choices = experts, order, offsets, tile_expert, tile_row
    results: tuple[Tensor, Tensor | None] = _path(hidden).expert_mlp(*arguments, *choices, options)
    return results


@operation("onepass::expert_mlp_gradient", _like_gradient, _flops)
def _gradient(
    grad: Tensor, h: Tensor | None, hidden: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor,
    gate_up_bias: Tensor | None, down_bias: Tensor | None, a1: Tensor | None, b1: Tensor | None, a2: Tensor | None,
    b2: Tensor | None, experts: Tensor, order: Tensor, offsets: Tensor, tile_expert: Tensor, tile_row: Tensor,
    options: ExpertOptions,
) -> ExpertGradients:  # fmt: skip
    arguments = h, hidden, weights, gate_up, down, gate_up_bias, down_bias, a1, b1, a2, b2
    choices = experts, order, offsets, tile_expert, tile_row
    results: ExpertGradients = _path(hidden).gradient(grad, *arguments, *choices, options)
    return results
