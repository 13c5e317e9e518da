"""Operations registered with torch, and the decision whether a call goes through them.

A plain tensor in eager mode bypasses torch's dispatcher, which costs more than a small kernel. Calls that are traced
(compile, export, fake tensors, tensor subclasses, a `TorchDispatchMode`) run the registered operation. `softmax`,
`logits` and `moe` register their operations here.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, get_args, get_origin, get_type_hints

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_dispatch_stack_at, _len_torch_dispatch_stack

PLAIN = frozenset((Tensor, torch.nn.Parameter, type(None)))
TENSORS = PLAIN - {type(None)}


def is_untraced(*arguments: Any) -> bool:
    """Whether all tensors are plain and nothing traces the call.

    What traces is torch.compile, export and `torch.jit.trace`; fake tensors and other subclasses are not plain.
    """
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return False
    # The first test is the fast one, for arguments that are tensors or None.
    return PLAIN.issuperset(map(type, arguments)) or not any(
        [type(a) not in PLAIN and isinstance(a, Tensor) for a in arguments]
    )


def is_plain(*arguments: Any) -> bool:
    """Whether the call can bypass the dispatcher: it is not traced, and no `TorchDispatchMode` is active."""
    return is_untraced(*arguments) and _len_torch_dispatch_stack() == 0


def are_ordinary(*arguments: Any) -> bool:
    """Whether all are dense tensors of torch itself, in a call that nothing but autograd observes.

    Nothing traces it, no `TorchDispatchMode` is active, and it is neither in a transform of `torch.func` nor in a level
    of forward-mode differentiation. No tensor is of a transform that has ended. So a kernel may be launched with the
    addresses of the tensors.
    """
    if not TENSORS.issuperset(map(type, arguments)) or not is_plain():
        return False
    if forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active():
        return False
    for t in arguments:
        if t.is_nested or t.layout is not torch.strided or torch._C._functorch.is_functorch_wrapped_tensor(t):
            return False
    return True


def apply_to_ordinary(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``function.apply`` for `are_ordinary` tensors, which does not look for the wrappers of `torch.func`."""
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


def constant_in_trace(function: Callable[..., Any]) -> None:
    """Have torch call a function while it traces, and take the result for a constant of the graph.

    `torch.compiler.assume_constant_result` does the same after it has imported the compiler, which takes seconds.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]


def refuse_forward_mode(*arguments: Any) -> None:
    """Raise for a dual tensor: its tangent would silently be lost, since no operation here computes one.

    While torch compiles, none is seen, and every call within a level of forward-mode differentiation is refused.
    """
    if forward_ad._current_level < 0:
        return
    if torch.compiler.is_compiling() or any(
        isinstance(a, Tensor) and forward_ad.unpack_dual(a).tangent is not None for a in arguments
    ):
        raise NotImplementedError("onepass: forward-mode differentiation is not implemented, got a dual tensor")


def check_upstream(*grads: Tensor | None) -> None:
    """Check the upstream gradients of a backward.

    Raises:
        RuntimeError: the backward is called with ``create_graph=True``.
        NotImplementedError: the gradients are those of several backwards at once, whose memory no kernel could read.
    """
    if torch.compiler.is_compiling():
        return
    if torch.is_grad_enabled():
        raise RuntimeError("onepass: second derivatives are not implemented, got create_graph=True")
    if any([g is not None and torch._C._functorch.is_legacy_batchedtensor(g) for g in grads]):
        raise NotImplementedError("onepass: batched gradients (is_grads_batched, vmap) are not implemented")


FLOPS: dict[Any, Callable[..., int]] = {}  # the FLOP formula of each operation


def tell_flop_counters() -> None:
    """Register the FLOP formulas with the FLOP counters that are active.

    They are not registered on import, since torch's own table is in a module that imports Triton.
    """
    if torch.compiler.is_compiling():
        return
    for n in range(_len_torch_dispatch_stack()):
        registry = getattr(getattr(_get_dispatch_stack_at(n), "counter", None), "flop_registry", None)
        if registry is not None:
            registry.update(FLOPS)


def operation(
    name: str, like: Callable[..., Any], flops: Callable[..., int] | None = None, composite: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function of tensors with torch, and call it through torch unless nothing could observe that.

    Registered operations take no named tuples and return no None. A parameter annotated with a named tuple is therefore
    flattened into its fields, and a None among the results is an empty tensor inside torch.

    Args:
        name: qualified name of the operation.
        like: the fake implementation: takes the function's arguments by name and returns uninitialized results.
        flops: takes the flattened arguments by name, with shapes in place of tensors, and returns the number that
            `torch.utils.flop_counter` counts. For operations whose GEMMs are kernels of onepass.
        composite: whether the operation consists of torch's GEMMs. A `TorchDispatchMode` then sees these GEMMs instead
            of the operation.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function)
        parameters = list(signature.parameters.values())
        flat_parameters = [f for p in parameters for f in flattened(p)]
        tensors = [n for n, p in enumerate(parameters) if is_tensor(p.annotation)]
        tuples = [n for n, p in enumerate(parameters) if holds_tensors(p.annotation)]
        nesters = [nester(p.annotation) for p in parameters]

        def nested(arguments: Iterable[Any]) -> list[Any]:
            rest = iter(arguments)
            return [nest(rest) for nest in nesters]

        def flat(*arguments: Any) -> Any:
            return _without_none(function(*nested(arguments)), arguments[0])

        def fake(*arguments: Any) -> Any:
            named = {p.name: a for p, a in zip(parameters, nested(arguments))}
            return _without_none(like(**named), arguments[0])

        prototype: Any = flat
        prototype.__signature__ = signature.replace(
            parameters=flat_parameters, return_annotation=_always_tensors(signature.return_annotation)
        )
        registered = torch.library.custom_op(name, prototype, mutates_args=())
        registered.register_fake(fake)
        if flops is not None:
            names = [p.name for p in flat_parameters]

            def counted(*arguments: Any, **_: Any) -> int:
                shapes = [a.shape if isinstance(a, Tensor) else a for a in arguments]
                return flops(**dict(zip(names, shapes)))

            FLOPS[getattr(torch.ops.onepass, name.partition("::")[2])] = counted
        may_skip = is_untraced if composite else is_plain

        def all_plain(arguments: Sequence[Any]) -> bool:
            for n in tensors:  # loops, which are faster than `all` of a generator
                if type(arguments[n]) not in PLAIN:
                    return False
            for n in tuples:  # noqa: SIM110
                if not PLAIN.issuperset(map(type, arguments[n])):
                    return False
            return True

        @wraps(function)
        def call(*arguments: Any) -> Any:
            if forward_ad._current_level >= 0:  # torch drops the tangents of a registered operation
                refuse_forward_mode(*flatten_arguments(arguments))
            if may_skip() and all_plain(arguments):
                return function(*arguments)
            tell_flop_counters()
            return _with_none(registered(*flatten_arguments(arguments)))

        return call

    return register


def is_named_tuple(annotation: Any) -> bool:
    """Whether the annotation is the class of a named tuple."""
    return isinstance(annotation, type) and issubclass(annotation, tuple) and hasattr(annotation, "_fields")


def is_tensor(annotation: Any) -> bool:
    """Whether the annotation is that of a tensor, or of a tensor or None."""
    return annotation is Tensor or Tensor in get_args(annotation)


def holds_tensors(annotation: Any) -> bool:
    """Whether the annotation is the class of a named tuple with tensors among its fields."""
    return is_named_tuple(annotation) and any(map(is_tensor, get_type_hints(annotation).values()))


def flattened(parameter: inspect.Parameter, prefix: str = "") -> list[inspect.Parameter]:
    """The parameter itself or, for a named tuple, a parameter for each field.

    The fields of a nested named tuple are prefixed with its name. `torch.jit.trace` takes no lists of bool, but of int.
    """
    if not is_named_tuple(parameter.annotation):
        annotation = list[int] if parameter.annotation == list[bool] else parameter.annotation
        name = prefix + parameter.name
        return [parameter.replace(name=name, annotation=annotation, default=inspect.Parameter.empty)]
    found = []
    for name, of in get_type_hints(parameter.annotation).items():
        inner = f"{prefix}{name}_" if is_named_tuple(of) else prefix
        found += flattened(parameter.replace(name=name, annotation=of), inner)
    return found


def flatten_arguments(values: Iterable[Any]) -> Iterator[Any]:
    """Replace named tuples among the values by their fields, recursively."""
    for value in values:
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            yield from flatten_arguments(value)
        else:
            yield value


def nester(annotation: Any) -> Callable[[Iterator[Any]], Any]:
    """The inverse of `flatten_arguments` for a parameter with this annotation: takes its value from an iterator."""
    if annotation == list[bool]:
        return lambda values: [bool(v) for v in next(values)]
    if not is_named_tuple(annotation):
        return next
    fields = [nester(of) for of in get_type_hints(annotation).values()]
    return lambda values: annotation(*[nest(values) for nest in fields])


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype that autocast gives ``x`` in a GEMM; None if autocast is off, and for float64, which it ignores."""
    if x.dtype == torch.float64 or not is_autocast_enabled(x):
        return None
    return torch.get_autocast_dtype(x.device.type)


def is_autocast_enabled(x: Tensor) -> bool:
    """Whether autocast is enabled for the device of ``x``."""
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)  # the meta device has no autocast


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """A context manager that disables autocast for the device of ``x``."""
    return torch.autocast(x.device.type, enabled=False) if is_autocast_enabled(x) else nullcontext()


ABSENT = torch.uint8  # dtype of the empty tensor that represents None; no result has this dtype


def _without_none(results: Any, like: Tensor) -> Any:
    """Replace every None among the results by an empty tensor of dtype `ABSENT`."""
    if isinstance(results, Tensor):
        return results
    return type(results)([like.new_empty(0, dtype=ABSENT) if r is None else r for r in results])


def _with_none(results: Any) -> Any:
    """The inverse of `_without_none`."""
    if isinstance(results, Tensor):
        return results
    return type(results)([None if r.dtype == ABSENT else r for r in results])


def _always_tensors(annotation: Any) -> Any:
    """The return annotation without None, for torch's schema."""
    if annotation is Tensor:
        return Tensor
    return list[Tensor] if get_origin(annotation) is list else tuple[(Tensor,) * len(get_args(annotation))]  # type: ignore[misc]


def empty_gradients(tensors: Iterable[Tensor | None], needed: Iterable[bool]) -> list[Tensor | None]:
    """Uninitialized contiguous gradients of the tensors, None where not ``needed``."""
    return [
        torch.empty_like(t, memory_format=torch.contiguous_format) if t is not None and n else None
        for t, n in zip(tensors, needed)
    ]


def like_gradients(tensors: Iterable[Tensor | None], needed: Iterable[bool], **_: Any) -> list[Tensor | None]:
    """The fake implementation of an operation that returns `empty_gradients`."""
    return empty_gradients(tensors, needed)


def like_logits(logits: Tensor, **_: Any) -> Tensor:
    """The fake implementation of an operation that returns a contiguous gradient of the logits."""
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def empty_gradient(logits: Tensor) -> Tensor:
    """An uninitialized gradient of the logits, with a contiguous last dimension."""
    out = torch.empty_like(logits)
    return out if out.stride()[-1] == 1 else logits.new_empty(logits.shape)  # the logits are expanded
