"""The average of the log-probs of rows, with little time on the host, which is the limit for few rows.

The result and the gradient are those of `statistics_of`. What that finds out in every call is looked up here, by the
kind of the tensors. `losses.cross_entropy` calls this for plain tensors, and for the logits of a head with few rows.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._dynamo.guards import TensorGuards
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _len_torch_dispatch_stack

from onepass.backend import backend_of
from onepass.core.checks import FLOATS, INDEX_DTYPES, is_debugging
from onepass.core.dispatch import TENSORS, apply_to_ordinary, are_ordinary, check_upstream
from onepass.core.memo import keep
from onepass.core.options import Average, FieldGradients, Inputs, Options
from onepass.softmax.statistics import _gradient, _last, is_capturing, keep_row_weight, stream_of

MOST_KINDS = 64  # of tensors of one shape


class Known(NamedTuple):
    """The launches for tensors of a kind.

    Attributes:
        check: whether tensors are of this kind, by the function that guards what `torch.compile` compiled. It compares
            types, dtypes, devices, shapes, strides, ``requires_grad``, and the dispatch keys: those of subclasses,
            sparse, nested and lazily negated tensors differ, as do those within autocast, inference mode, transforms of
            `torch.func`, `torch.jit.trace` and a `TorchDispatchMode`.
        how: the average, its options, and whether gradients are enabled.
        backend: that prepared the launches.
        launches: None where `statistics_of` is needed.
    """

    check: Callable[..., bool]
    how: tuple[Average, Options, bool]
    backend: Any
    launches: Any


has_hooks = torch._C._autograd._top_saved_tensors_default_hooks  # the hooks of saved tensors, if there are any
_known: dict[torch.Size, list[Known]] = {}  # by the shape of the logits


def prepared_average(logits: Any, index: Any, average: Average, options: Options) -> Tensor | None:
    """The average of the log-probs of the classes ``index``, where it is not ``options.masked``.

    Nothing is checked: None for tensors that are not valid, and for all others that `statistics_of` is needed for.
    """
    if torch.compiler.is_compiling() or type(logits) not in TENSORS or is_debugging():
        return None
    # What the check does not see, or what would record that the shape is read.
    if forward_ad._current_level >= 0 or _len_torch_dispatch_stack() or torch._C._get_tracing_state() is not None:
        return None
    how, device = (average, options, torch.is_grad_enabled()), logits.get_device()
    kinds = _known.get(logits.shape, [])
    for n, known in enumerate(kinds):
        if known.check(logits, index) and known.how == how and (device >= 0 or backend_of(logits) is known.backend):
            launches = known.launches
            if n:  # the last one is the first that is looked at
                _known[logits.shape] = [known, *kinds[:n], *kinds[n + 1 :]]
            break
    else:
        launches = learned(logits, index, how)
    if launches is None or (device >= 0 and device != torch._C._cuda_getDevice()):
        return None
    at = logits.data_ptr(), index.data_ptr()
    if (at[0] | at[1]) & 15 or not (at[0] and at[1]):  # 0: torch's lazy zeros
        return None
    if how[2] and logits.requires_grad:
        return _apply(logits, (index, launches, at, device))
    return launches.average(logits, index, at)


def learned(logits: Tensor, index: Any, how: tuple[Average, Options, bool]) -> Any:
    """The launches for these tensors, which are kept for all of their kind; None where `statistics_of` is needed."""
    if not are_ordinary(logits, index) or not (logits.is_contiguous() and index.is_contiguous()):
        return None
    if logits.is_neg() or index.is_neg():
        return None
    backend, launches = backend_of(logits), None
    if are_valid(logits, index):
        launches = backend.prepare_average(logits, index, *how[:2], how[2] and logits.requires_grad)
    # A single row is contiguous with any stride, which determines its launches, as that of more rows does.
    sizes, strides = ([list(f(t)) for t in (logits, index)] for f in (Tensor.size, Tensor.stride))
    guards = TensorGuards(logits, index, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)  # type: ignore[arg-type, misc]
    others = _known.get(logits.shape, [])[: MOST_KINDS - 1]
    keep(_known, logits.shape, [Known(guards.check, how, backend, launches), *others])
    return launches


def are_valid(logits: Tensor, index: Tensor) -> bool:
    """Whether there are logits ``(..., V)`` and an index ``(...)``."""
    if logits.dtype not in FLOATS or index.dtype not in INDEX_DTYPES or index.device != logits.device:
        return False
    return logits.dim() > 0 and index.shape == logits.shape[:-1] and logits.numel() > 0


class _Average(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, given: tuple[Tensor, Any, tuple[int, int], int]) -> Tensor:
        index, launches, at, device = given
        last = stream = None
        if not is_capturing(device):
            stream = stream_of(device)
            last = _last.get((device, stream, False))
        total, gradient, numbers, pointers = launches.average(logits, index, at, last, stream)
        if has_hooks(True):
            ctx.save_for_backward(logits, index, numbers, gradient)
            gradient = pointers = None
        else:  # nobody else has the gradient, and to save it takes time
            ctx.save_for_backward(logits, index, numbers)
        ctx.made = launches, at, device, pointers, gradient
        return total

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() or torch._C._functorch.is_legacy_batchedtensor(upstream):
            check_upstream(upstream)
        logits, index, numbers, *saved = ctx.saved_tensors
        launches, at, device, pointers, gradient = ctx.made
        ctx.made = launches, None, device, None, None  # the first backward gives the gradient away
        # Hooks may have given what was saved another layout, and the caller other memory.
        same = not saved and at == (logits.data_ptr(), index.data_ptr())
        if saved and at is not None and saved[0].is_contiguous():
            gradient = saved[0].data  # a second backward unpacks it again: it must not seem to be modified
        if gradient is None or not logits.is_contiguous():
            upstreams = FieldGradients(selected=upstream, row_weight=numbers)
            inputs, columns = Inputs(index, index), logits.shape[-1]
            return _gradient(logits, inputs, launches.packed(numbers), upstreams, columns, launches.options), None
        where = device, stream_of(device)
        launches.correct(logits, index, numbers, upstream, gradient, pointers if same else None, where, same)
        if same and not is_capturing(device):  # the numbers are those of the forward, and need no check
            _last[(*where, False)] = numbers
        else:
            keep_row_weight(logits, numbers)
        return gradient, None


_apply = apply_to_ordinary(_Average)
_Average._backward_cls.apply = _Average.backward  # type: ignore[attr-defined]  # called without choosing `vjp` or this
