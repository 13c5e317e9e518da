"""Logits that are never there as a whole: ``hidden @ weight.T + bias``, computed in tiles wherever they are read.

Two ways to a gradient. `LinearLogits.statistics` leaves numbers per row, of which autograd differentiates any loss; its
backward computes the tiles again (four products). `LinearLogits.loss` is given the loss of a row, so that it can take
the gradient of a tile while the tile is there (three products); what is returned is a sum over rows.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from onepass.checks import FLOATS, described
from onepass.dispatch import is_plain, path_of
from onepass.options import NOT_DIFFERENTIABLE, LogitsSource, Options, Results, empty_results, pick
from onepass.row_loss import RowLoss
from onepass.statistics import upstream_of
from onepass.tiles import INDEX, ROW, Gradients, Head, plan, tiles

Gather = Callable[[Sequence[Tensor]], AbstractContextManager[Any]]
_gather: Gather | None = None


def gather_parameters(gather: Gather | None) -> None:
    """Say how parameters that are partitioned over processes are made whole while a linear head uses them.

    FSDP2's (DTensor) need nothing: they are gathered once a call, and their gradients are scattered. Nor do DeepSpeed's
    ZeRO-3, for which `deepspeed.zero.GatheredParameters` is used. For any other: ``gather(parameters)`` returns a
    context manager within which they are whole; None takes it back.
    """
    global _gather
    _gather = gather


def gathered(*parameters: Tensor | None) -> AbstractContextManager[Any]:
    found = [p for p in parameters if p is not None]
    if _gather is not None:
        return _gather(found)
    partitioned = [p for p in found if hasattr(p, "ds_id")]
    if not partitioned:
        return nullcontext()
    from deepspeed.zero import GatheredParameters  # type: ignore[import-not-found]

    gather: AbstractContextManager[Any] = GatheredParameters(partitioned)
    return gather


def whole(parameter: Tensor) -> Tensor:
    """A DTensor's full tensor, differentiably."""
    full: Tensor = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return full


class LinearLogits(LogitsSource):
    """The logits ``hidden @ weight.T + bias``, for any function of onepass that takes logits; they are never all there.

    Args:
        hidden: ``(..., H)``, float16, bfloat16, float32 or float64. Hidden states whose rows are not evenly spaced
            (``hidden[:, :-1]``) are copied.
        weight: ``(V, H)``, any strides; the dtype of ``hidden``, or any under autocast, whose dtype the products have
            then. A DTensor is gathered once.
        bias: ``(V,)`` or None, likewise.
        max_memory: bytes of workspace, beyond inputs, results and gradients. None: about 0.3 GiB, where a gradient of
            the weight is taken up to 2.5 GiB, and never more than half of what is free.

    All three are differentiable; what needs no gradient costs neither time nor memory for one. Gradients of the weight
    are summed over tiles in float32 and rounded once. The logits have the dtype of the products, as a linear layer's.

    Rows that are masked or ignored take part in no product. (How many are left is read from the device, once a call,
    unless a CUDA graph is being captured: then they do take part.)

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype, shape or device.

    Example::

        logits = onepass.LinearLogits(hidden, lm_head.weight)
        log_probs, entropy = onepass.selective_log_softmax_and_entropy(logits, labels)
    """

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None = None, *, max_memory: int | None = None
    ) -> None:
        for value, name in ((hidden, "hidden"), (weight, "weight"), (bias, "bias")):
            if (value is not None or name != "bias") and (not isinstance(value, Tensor) or value.dtype not in FLOATS):
                raise TypeError(f"{name}: expected a floating-point tensor, got {described(value)}")
        weight, bias = whole(weight), None if bias is None else whole(bias)
        shape = tuple(getattr(weight, "ds_shape", weight.shape))  # ZeRO-3's are empty where they are not gathered
        if hidden.dim() < 1 or len(shape) != 2 or 0 in shape or hidden.shape[-1] != shape[1]:
            raise ValueError(
                "weight: expected shape (V, H) for hidden states (..., H), "
                f"got {shape} for hidden states of shape {tuple(hidden.shape)}"
            )
        if bias is not None and tuple(getattr(bias, "ds_shape", bias.shape)) != shape[:1]:
            raise ValueError(f"bias: expected shape {shape[:1]}, got {tuple(bias.shape)}")
        kind = hidden.device.type
        self.dtype = hidden.dtype
        if hidden.dtype != torch.float64 and torch.is_autocast_enabled(kind):
            self.dtype = torch.get_autocast_dtype(kind)
        for value, name in ((weight, "weight"), (bias, "bias")):
            if value is None:
                continue
            if value.device != hidden.device:
                raise ValueError(f"{name}: expected device {hidden.device}, that of hidden, got {value.device}")
            if value.dtype != hidden.dtype and not torch.is_autocast_enabled(kind):
                raise TypeError(f"{name}: expected {hidden.dtype}, the dtype of hidden, got {value.dtype}")
        if max_memory is not None and (isinstance(max_memory, bool) or not isinstance(max_memory, int)):
            raise TypeError(f"max_memory: expected a number of bytes or None, got {described(max_memory)}")
        self.hidden, self.weight, self.bias, self.max_memory = hidden, weight, bias, max_memory
        self.shape = torch.Size((*hidden.shape[:-1], shape[0]))
        self.device = hidden.device

    @property
    def requires_grad(self) -> bool:
        return any(t is not None and t.requires_grad for t in (self.hidden, self.weight, self.bias))

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Rows of hidden states, weight and bias."""
        return self.hidden.reshape(-1, self.hidden.shape[-1]), self.weight, self.bias

    @property
    def head(self) -> Head:
        return Head(*self.parts, self.dtype)

    @property
    def takes_row_losses(self) -> bool:
        return is_plain(*[t for t in (self.hidden, self.weight, self.bias) if t is not None])

    def statistics(
        self, index: Tensor | None, row_mask: Tensor | None, class_weights: Tensor | None, options: Options
    ) -> tuple[Tensor, ...]:
        """The fields of ``options`` of every row, differentiable. Arguments are checked already."""
        rows = self.shape[:-1]
        index = None if index is None else index.reshape(self.shape[:-1].numel(), *index.shape[len(rows) :])
        row_mask = None if row_mask is None else row_mask.reshape(-1)
        arguments = (*self.parts, index, row_mask, class_weights, options, self.dtype, self.max_memory)
        if torch.is_grad_enabled() and self.requires_grad:
            fields = _LinearStatistics.apply(*arguments)
        else:
            fields = pick(_forward(*arguments), options)
        return tuple([f.reshape(*rows, *f.shape[1:]) for f in fields])

    def loss(
        self, row_loss: RowLoss, row_mask: Tensor | None, divisor: Tensor | float | None, inputs: Sequence[Tensor] = ()
    ) -> Tensor:
        """``Σ row_loss / divisor`` over the rows that are not masked or, without a divisor, the loss of every row.

        ``inputs`` are those of ``row_loss``; a sum is differentiable with respect to them too.
        """
        row_mask = None if row_mask is None else row_mask.reshape(-1) != 0
        if divisor is not None:
            divisor = torch.as_tensor(divisor, dtype=row_loss.dtype, device=self.device).detach()
        arguments = (*self.parts, row_mask, divisor, row_loss, self.dtype, self.max_memory, *inputs)
        differentiable = self.requires_grad or any(i.requires_grad for i in inputs)
        if torch.is_grad_enabled() and differentiable:
            loss: Tensor = _LinearLoss.apply(*arguments)
        else:
            loss = walk(self.head, row_mask, row_loss, None, (False,) * 3, self.max_memory)[0]
            loss = loss if divisor is None else loss.sum() / divisor
        return loss if divisor is not None else loss.reshape(self.shape[:-1])


def kept_rows(row_mask: Tensor | None) -> Tensor | None:
    """Ids of the rows that are kept, None for all of them."""
    if row_mask is None or (row_mask.is_cuda and torch.cuda.is_current_stream_capturing()):
        return None
    kept = row_mask.nonzero().squeeze(-1)
    return None if kept.shape[0] == row_mask.shape[0] else kept


# Numbers per row, and a backward that computes the tiles again.


class _LinearStatistics(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        *tensors, options, dtype, max_memory = arguments
        results = _forward(*arguments)
        ctx.save_for_backward(*tensors, results[0])
        ctx.options, ctx.settings = options, (dtype, max_memory)
        fields = pick(results, options)
        if not NOT_DIFFERENTIABLE.isdisjoint(options.names):
            ctx.mark_non_differentiable(*[f for f, n in zip(fields, options.names) if n in NOT_DIFFERENTIABLE])
        ctx.set_materialize_grads(False)
        return fields

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        upstream = upstream_of(dict(zip(ctx.options.names, grads)))
        found = _gradient(*ctx.saved_tensors, *upstream, ctx.options, ctx.needs_input_grad[:3], *ctx.settings)
        return (*found, *[None] * 6)


def refuse_second_derivatives() -> None:
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError("onepass: second derivatives are not implemented, got create_graph=True")


def _forward(hidden: Tensor, weight: Tensor, bias: Tensor | None, *arguments: Any) -> Results:
    index, row_mask, class_weights, options, dtype, max_memory = arguments
    others = index, row_mask, class_weights
    if not is_plain(*[t for t in (hidden, weight, bias) if t is not None]):
        return torch.ops.onepass.linear_statistics(hidden, weight, bias, *others, dtype, max_memory, *options)
    return linear_statistics(hidden, weight, bias, *others, options, dtype, max_memory)


def _gradient(hidden: Tensor, weight: Tensor, bias: Tensor | None, *arguments: Any) -> Sequence[Tensor | None]:
    others: Sequence[Any]
    *others, options, needed, dtype, max_memory = arguments
    if not is_plain(*[t for t in (hidden, weight, bias) if t is not None]):
        found = torch.ops.onepass.linear_gradient(
            hidden, weight, bias, *others, list(needed), dtype, max_memory, *options
        )
        return [g if need else None for g, need in zip(found, needed)]
    return linear_gradient(hidden, weight, bias, *arguments)


def linear_statistics(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    index: Tensor | None,
    row_mask: Tensor | None,
    class_weights: Tensor | None,
    options: Options,
    dtype: torch.dtype,
    max_memory: int | None,
) -> Results:
    """As `kernels.softmax_statistics`, of ``(N, V)`` logits."""
    with gathered(weight, bias), torch.autocast(hidden.device.type, enabled=False):
        head = Head(hidden, weight, bias, dtype)
        results = empty_linear_results(hidden, index, dtype, options)
        kept, index, row_mask, options = selected_rows(index, row_mask, options)
        cut = plan([head], kept, False, max_memory, row_bytes(index))
        if kept is not None:
            for result in results:
                if result is not None:
                    result.zero_()
        for rows, _, (logits,) in tiles([head], cut):
            of_tile = path_of(logits).softmax_statistics(
                logits, *[None if t is None else rows.take(t) for t in (index, row_mask)], class_weights, options
            )
            for result, part, dim in zip(results, of_tile, (1, 0, 0)):
                if result is not None:
                    rows.put(result, part, dim)
    return results


def selected_rows(
    index: Tensor | None, row_mask: Tensor | None, options: Options
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Options]:
    """Ids of the rows that are kept, index, and what mask and options are left for the kernels to see to."""
    if options.ignore_index is not None and index is not None:
        row_mask = index != options.ignore_index
        options = options._replace(ignore_index=None)
    kept = kept_rows(row_mask)
    if row_mask is None or not (row_mask.is_cuda and torch.cuda.is_current_stream_capturing()):
        row_mask = None
    return kept, index, row_mask, options


def row_bytes(index: Tensor | None) -> int:
    return ROW + INDEX * (1 if index is None or index.dim() == 1 else index.shape[1])


def linear_gradient(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    index: Tensor | None,
    row_mask: Tensor | None,
    class_weights: Tensor | None,
    packed: Tensor,
    grad_log_normalizer: Tensor | None,
    grad_expected_logit: Tensor | None,
    grad_weighted_logit: Tensor | None,
    grad_tempered: Tensor | None,
    grad_selected: Tensor | None,
    options: Options,
    needed: Sequence[bool],
    dtype: torch.dtype,
    max_memory: int | None,
) -> Sequence[Tensor | None]:
    """Of hidden, weight and bias, each where ``needed``, from the gradients of the statistics."""
    upstream = (grad_log_normalizer, grad_expected_logit, grad_weighted_logit, grad_tempered, grad_selected)
    with gathered(weight, bias), torch.autocast(hidden.device.type, enabled=False):
        head = Head(hidden, weight, bias, dtype)
        kept, index, row_mask, options = selected_rows(index, row_mask, options)
        cut = plan([head], kept, needed[1], max_memory, row_bytes(index))
        gradients = Gradients(head, cut, needed)
        for rows, states, (logits,) in tiles([head], cut):
            of_rows = [None if t is None else rows.take(t) for t in (index, row_mask)]
            of_tile = [None if g is None else rows.take(g) for g in upstream]
            path_of(logits).softmax_gradient(
                logits, *of_rows, class_weights, rows.take(packed, 1).contiguous(), *of_tile, options, logits
            )
            gradients.add(rows, states, logits)
        return gradients.scaled(None, path_of(hidden).scale_)


def empty_linear_results(hidden: Tensor, index: Tensor | None, dtype: torch.dtype, options: Options) -> Results:
    """Of logits ``(N, V)``, of which only rows, device and dtype matter here."""
    return empty_results(hidden.new_empty((hidden.shape[0], 0), dtype=dtype), index, options)


# A loss per row, known while the tile is there.


def walk(
    head: Head,
    row_mask: Tensor | None,
    row_loss: RowLoss,
    scale: Tensor | None,
    needed: Sequence[bool],
    max_memory: int | None,
    of_inputs: Sequence[Tensor | None] = (),
) -> tuple[Tensor, Gradients | None]:
    """The loss of every row and, with ``scale`` (of all rows or of each), the gradients of ``Σ scale·loss``.

    Those of the inputs of ``row_loss`` are written into ``of_inputs``.
    """
    with gathered(head.weight, head.bias), torch.autocast(head.hidden.device.type, enabled=False):
        kept = kept_rows(row_mask)
        capturing = row_mask is not None and row_mask.is_cuda and torch.cuda.is_current_stream_capturing()
        heads = [head, *row_loss.heads]
        cut = plan(heads, kept, needed[1], max_memory, row_loss.row_bytes)
        losses = head.hidden.new_zeros(head.hidden.shape[0], dtype=row_loss.dtype)
        gradients = None if scale is None else Gradients(head, cut, needed)
        for rows, states, logits in tiles(heads, cut):
            of_tile = scale if scale is None or scale.dim() == 0 else rows.take(scale)
            mask = rows.take(row_mask) if capturing else None  # type: ignore[arg-type]
            part, found = row_loss(logits, rows, mask, of_tile)
            rows.put(losses, part)
            for out, value in zip(of_inputs, found):
                if out is not None and value is not None:
                    rows.put(out, value)
            if gradients is not None and any(needed):
                gradients.add(rows, states, logits[0])
    return losses, gradients


class _LinearLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        row_mask: Tensor | None,
        divisor: Tensor | None,
        row_loss: RowLoss,
        dtype: torch.dtype,
        max_memory: int | None,
        *inputs: Tensor,
    ) -> Tensor:
        head = Head(hidden, weight, bias, dtype)
        needed = ctx.needs_input_grad[:3]
        of_inputs = [torch.zeros_like(i) if n else None for i, n in zip(inputs, ctx.needs_input_grad[8:])]
        ctx.divisor, ctx.row_loss = divisor, row_loss
        if divisor is None:  # every row has an upstream gradient of its own: the tiles come back for it
            ctx.save_for_backward(hidden, weight, bias, row_mask)
            ctx.settings = dtype, max_memory
            ctx.inputs = of_inputs
            return walk(head, row_mask, row_loss, None, needed, max_memory)[0]
        # float16 cannot hold the gradient of a mean before the scale of the loss meets it.
        ctx.late = dtype == torch.float16
        scale = torch.ones_like(divisor) if ctx.late else 1 / divisor
        losses, ctx.gradients = walk(head, row_mask, row_loss, scale, needed, max_memory, of_inputs)
        ctx.inputs = of_inputs
        return losses.sum() / divisor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        needed = ctx.needs_input_grad[:3]
        if ctx.divisor is None:
            hidden, weight, bias, row_mask = ctx.saved_tensors
            dtype, max_memory = ctx.settings
            head = Head(hidden, weight, bias, dtype)
            of_inputs = [None if i is None else torch.zeros_like(i) for i in ctx.inputs]
            _, gradients = walk(head, row_mask, ctx.row_loss, grad.contiguous(), needed, max_memory, of_inputs)
            found = gradients.scaled(None, path_of(hidden).scale_)  # type: ignore[union-attr]
        else:
            if ctx.gradients is None:
                raise RuntimeError(
                    "onepass: a second backward through a sum of row losses, whose gradient is already given away; "
                    "call it again, or take reduction='none'"
                )
            scale = grad / ctx.divisor if ctx.late else grad
            gradients, ctx.gradients = ctx.gradients, None
            found = gradients.scaled(scale, path_of(gradients.head.hidden).scale_)
            of_inputs = [None if i is None else i * scale for i in ctx.inputs]
        return (*found, *[None] * 5, *of_inputs)


# The registered operations: see `dispatch.is_plain` for when they are used.


@torch.library.custom_op("onepass::linear_statistics", mutates_args=())
def _statistics_op(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    index: Tensor | None,
    row_mask: Tensor | None,
    class_weights: Tensor | None,
    dtype: torch.dtype,
    max_memory: int | None,
    fields: str,
    logit_scale: float,
    softcap: float | None,
    temperature: float,
    class_weight: float,
    sharpness: float,
    ignore_index: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    options = Options(fields, logit_scale, softcap, temperature, class_weight, sharpness, ignore_index)
    return _tensors(linear_statistics(hidden, weight, bias, index, row_mask, class_weights, options, dtype, max_memory))


def _tensors(results: Results) -> tuple[Tensor, Tensor, Tensor]:
    packed, chosen, is_top1 = results
    none = packed.new_empty(0)
    return packed, none if chosen is None else chosen, none.clone() if is_top1 is None else is_top1


@_statistics_op.register_fake
def _(hidden, weight, bias, index, row_mask, class_weights, dtype, max_memory, *options):
    return _tensors(empty_linear_results(hidden, index, dtype, Options(*options)))


@torch.library.custom_op("onepass::linear_gradient", mutates_args=())
def _gradient_op(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    index: Tensor | None,
    row_mask: Tensor | None,
    class_weights: Tensor | None,
    packed: Tensor,
    grad_log_normalizer: Tensor | None,
    grad_expected_logit: Tensor | None,
    grad_weighted_logit: Tensor | None,
    grad_tempered: Tensor | None,
    grad_selected: Tensor | None,
    needed: list[bool],
    dtype: torch.dtype,
    max_memory: int | None,
    fields: str,
    logit_scale: float,
    softcap: float | None,
    temperature: float,
    class_weight: float,
    sharpness: float,
    ignore_index: int | None,
) -> list[Tensor]:
    options = Options(fields, logit_scale, softcap, temperature, class_weight, sharpness, ignore_index)
    found = linear_gradient(
        hidden, weight, bias, index, row_mask, class_weights, packed,
        grad_log_normalizer, grad_expected_logit, grad_weighted_logit, grad_tempered, grad_selected,
        options, needed, dtype, max_memory,
    )  # fmt: skip
    return [hidden.new_empty(0) if g is None else g for g in found]


@_gradient_op.register_fake
def _(hidden, weight, bias, *arguments):
    needed = arguments[9]
    of = (hidden, weight, bias)
    return [
        torch.empty_like(t, memory_format=torch.contiguous_format) if n else hidden.new_empty(0)
        for t, n in zip(of, needed)
    ]
