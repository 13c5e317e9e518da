"""`attach`: the head of a model returns `onepass.LinearLogits` in forwards that train, and no logits are materialized.

The loss function of the model then computes the loss in tiles, whether it is the model's own (through
`torch.nn.functional.cross_entropy`) or that of onepass. No code of the model is replaced.
"""

import inspect
import itertools
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo  # torch.compiler.disable imports Dynamo, and Triton, at once
from torch.nn.utils.parametrize import is_parametrized

from onepass.core.caller import stacklevel_outside
from onepass.core.checks import check_bool, check_integer, described
from onepass.core.dispatch import is_plain
from onepass.integrations.adapters import adapter_layers, adapter_reason, is_adapted
from onepass.integrations.head_logits import HeadLogits, gather_before_backward
from onepass.integrations.patching import Restorable
from onepass.logits.observer import Metrics
from onepass.logits.valid_rows import RowCount, expecting


class HeadOptions(NamedTuple):
    """How the logits of a head are computed; see `attach`."""

    max_memory: int | None = None
    observer: Metrics | None = None
    logits_dtype: torch.dtype | None = None


DEFAULT = HeadOptions()


class HeadReport(NamedTuple):
    """An output embedding of a model, and the reason why it returns tensors; empty if it returns `LinearLogits`."""

    name: str
    module: nn.Module
    reason: str

    def __str__(self) -> str:
        kind = type(self.module).__name__
        return f"{self.name} ({kind}): " + (f"materialized logits, {self.reason}" if self.reason else "no logits")


def heads_of(model: nn.Module) -> list[nn.Module]:
    """The output embeddings of a model, of which there are several if it predicts more than one token."""
    find = getattr(model, "get_output_embeddings", None)
    try:
        found = find() if callable(find) else None
    except (NotImplementedError, AttributeError):
        found = None
    if found is None:
        return []
    heads: list[nn.Module] = []
    for part in found if isinstance(found, nn.ModuleList | tuple | list) else [found]:
        # PEFT wraps a head that is trained besides the adapters; each copy is a linear module.
        wrapped = getattr(part, "modules_to_save", None)
        heads += wrapped.values() if isinstance(wrapped, nn.ModuleDict) else [part]
    return heads


def _reason(head: nn.Module) -> str:
    """Why a head returns tensors; empty if it returns `LinearLogits`."""
    # A wrapper may have the `__module__` of what it wraps.
    module = getattr(torch.nn.functional.cross_entropy, "__globals__", {}).get("__name__") or "an unknown module"
    if module != "torch.nn.functional" and not module.startswith("onepass."):
        # It may take tensors only, and compute no gradient of others.
        return f"torch.nn.functional.cross_entropy is a function of {module}"
    base: Any = head
    inner: list[nn.Module] = []  # the parts of the head, which are not called
    if is_adapted(head):
        base, reason = head.base_layer, adapter_reason(head)
        if reason:
            return reason
        inner = [base, *adapter_layers(head)]
    if not isinstance(base, nn.Linear):
        return f"{type(base).__module__}.{type(base).__name__} is not torch.nn.Linear"
    if type(base).forward is not nn.Linear.forward:
        return f"{type(base).__name__} has a forward of its own"
    if any("forward" in m.__dict__ and CALLS not in m.__dict__ for m in (head, *inner)):
        return "its forward is replaced, as by the hooks of accelerate"
    if any(m._backward_hooks or m._backward_pre_hooks for m in (head, *inner)):  # torch would not call them
        return "it has backward hooks, which see the gradient of a tensor"
    if any((m._forward_hooks or m._forward_pre_hooks) and not hasattr(m, "unshard") for m in inner):  # not FSDP2's
        return "its base layer or its adapter has hooks"
    if is_parametrized(base):  # each read computes the weight again, and may change its buffers
        return "its weight is parametrized"
    if not base.weight.dtype.is_floating_point or base.weight.element_size() < 2:
        return f"its weight is {base.weight.dtype}"
    return ""


CALLS = "_onepass_calls"  # how many calls that train are under way
_lock = threading.Lock()
_use: ContextVar[HeadOptions | None] = ContextVar("_use", default=None)  # how heads compute their logits in this thread
_asked: ContextVar[bool] = ContextVar("_asked", default=False)  # whether labels are not needed


@contextmanager
def asked_for() -> Iterator[None]:
    """Within this context, forwards without labels also return `LinearLogits`."""
    token = _asked.set(True)
    try:
        yield
    finally:
        _asked.reset(token)


def labels_of(model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The argument ``labels`` of a forward, or None."""
    given = kwargs.get("labels")
    if given is None and args:
        parameters = inspect.signature(type(model).forward).parameters
        given = dict(zip([*parameters][1:], args)).get("labels")
    return given


def trains(model: nn.Module, labels: Any) -> bool:
    """Whether this is the forward of a training step: gradients are enabled, and labels are given or `asked_for`."""
    if not torch.is_grad_enabled() or getattr(model, "_is_replica", False):  # DataParallel gathers tensors only
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None:  # transforms of torch.func know tensors only
        return False
    return labels is not None or _asked.get()


class CountedLabels(NamedTuple):
    """The labels of a forward, and the number of rows of the causal-LM loss that they leave valid."""

    labels: Tensor
    version: int
    rows: RowCount

    def match(self, labels: Tensor) -> bool:
        """Whether these are the same labels, unchanged."""
        return self.labels is labels and self.version == labels._version


IGNORE_INDEX = -100
_counted: ContextVar[CountedLabels | None] = ContextVar("_counted", default=None)


def start_count(labels: Any) -> CountedLabels | None:
    """Start to count labels, before the layers of the model run; None if they cannot be counted or matched later."""
    if not isinstance(labels, Tensor) or labels.dim() < 2 or labels.is_inference() or not is_plain(labels):
        return None
    if labels.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    return CountedLabels(labels, labels._version, RowCount(labels[..., 1:] != IGNORE_INDEX, labels.numel()))


def expecting_count(labels: Tensor, ignore_index: int) -> AbstractContextManager[None]:
    """`expecting` the number of valid rows of the causal-LM loss, if these labels were counted; else no context."""
    known = None if torch.compiler.is_compiling() else _counted.get()
    if known is None or ignore_index != IGNORE_INDEX or not known.match(labels):
        return nullcontext()
    return expecting(known.rows)


def run(
    model: nn.Module, forward: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any],
    use: HeadOptions = DEFAULT,
) -> Any:  # fmt: skip
    """Call a forward of the model. If it trains, its heads return `LinearLogits` meanwhile."""
    if torch.compiler.is_compiling() and not torch.is_grad_enabled():  # nothing trains, so that no graph need break
        return forward(*args, **kwargs)
    return _run_with_heads(model, forward, args, kwargs, use)


@_disable_dynamo(recursive=False)
def _run_with_heads(
    model: nn.Module, forward: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], use: HeadOptions
) -> Any:
    """See `run`."""
    labels = labels_of(model, args, kwargs)
    heads = [h for h in heads_of(model) if not _reason(h)] if trains(model, labels) else []
    of_labels = _counted.set(start_count(labels)) if heads and use is DEFAULT else None
    outer = _use.get()
    token = _use.set(use if outer is None or use is not DEFAULT else outer) if heads else None
    with _lock:
        for head in heads:
            head.__dict__["forward"] = MethodType(_lazy, head)
            head.__dict__[CALLS] = head.__dict__.get(CALLS, 0) + 1
    try:
        return forward(*args, **kwargs)
    finally:
        if token is not None:
            _use.reset(token)
        if of_labels is not None:
            _counted.reset(of_labels)
        with _lock:
            for head in heads:
                head.__dict__[CALLS] -= 1
                if not head.__dict__[CALLS]:
                    del head.__dict__["forward"], head.__dict__[CALLS]


@_disable_dynamo
def _lazy(self: nn.Linear, hidden: Tensor, **others: Any) -> Any:
    """The forward of a head: its logits as a source, or as a tensor where no gradient is computed."""
    use = _use.get()  # None in another thread
    known = use is not None and torch.is_grad_enabled() and isinstance(hidden, Tensor) and not others
    known = known and not (is_adapted(self) and adapter_reason(self))
    # PEFT's `ensure_weight_tying` makes a head whose `in_features` are those of the embedding.
    known = known and hidden.shape[-1:] in ((self.in_features,), self.weight.shape[-1:])
    known = known and not hasattr(hidden, "device_mesh")
    if known and (hidden.dtype == self.weight.dtype or torch.is_autocast_enabled(hidden.device.type)):
        gather_before_backward(hidden, self)
        return HeadLogits(hidden, self, *use)  # type: ignore[misc]
    return type(self).forward(self, hidden, **others)


class Attached(Restorable):
    """A model whose heads return `onepass.LinearLogits`, until `restore` or the end of the ``with`` block.

    Attributes:
        heads: ``(name, module, reason)`` of every head. The reason explains why its logits are materialized; it is
            empty if they are not.
    """

    def __init__(self, model: nn.Module, use: HeadOptions) -> None:
        self.observer = use.observer
        self.models = [m for m in model.modules() if heads_of(m)]
        if any(m.__dict__.get(OWNER, (None,))[0] == id(m) for m in self.models):
            raise ValueError("model: expected a model that is not attached, got one that is; call restore() first")
        names = {id(module): name for m in self.models for name, module in m.named_modules()}
        heads = {id(h): h for m in self.models for h in heads_of(m)}
        self.heads = [HeadReport(names.get(key, "head"), head, _reason(head)) for key, head in heads.items()]
        for m in self.models:
            if OWNER not in m.__dict__:  # else it is a copy
                m.__dict__[BEFORE] = m.__dict__.get("forward")
            number = next(_attachments)
            m.__dict__[OWNER] = id(m), number
            m.__dict__["forward"] = MethodType(_attached_forward(m, use, number, m.__dict__[BEFORE]), m)

    def metrics(self) -> dict[str, Tensor]:
        """Means over all tokens of the training forwards since the last call, as tensors on the device.

        Returns:
            A dict with ``entropy`` (in nats), ``mean_token_accuracy`` and ``num_tokens``. It is empty if there was no
            such forward, or if the model materialized the logits before its loss. The means are NaN if all tokens were
            ignored.

        Raises:
            ValueError: the model is not attached with ``metrics=True``.
        """
        if self.observer is None:
            raise ValueError("metrics: expected a model that is attached with metrics=True")
        return self.observer.read()

    def restore(self) -> None:
        """Restore the forwards of the model. A second call does nothing."""
        for m in self.models:
            m.__dict__.pop(OWNER, None)
            before = m.__dict__.pop(BEFORE, None)
            if not hasattr(getattr(m.__dict__.get("forward"), "__func__", None), BEFORE):
                continue  # other code has wrapped our forward, which calls the model's own from now on
            if before is None:
                del m.__dict__["forward"]
            else:
                m.__dict__["forward"] = before
        self.models = []

    def __str__(self) -> str:
        return "\n".join(map(str, self.heads)) or "no output embeddings"

    def __repr__(self) -> str:
        return f"<Attached: {sum(not h.reason for h in self.heads)} of {len(self.heads)} heads without logits>"


BEFORE = "_onepass_forward"  # the forward that an instance had of its own, or None
OWNER = "_onepass_owner"  # the id of the attached module (a copy has another id), and the attachment's number
_attachments = itertools.count()


def _attached_forward(model: nn.Module, use: HeadOptions, number: int, replaced: Any) -> Callable[..., Any]:
    """A forward with the model's signature, which trainers inspect, in place of ``replaced``."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        owner, active = self.__dict__.get(OWNER, (None, None))
        # A wrapper may call this after the model was restored, and even attached again.
        before = self.__dict__.get(BEFORE) if active == number else replaced if self is model else None
        own = partial(type(self).forward, self) if before is None else before
        if active != number:
            return own(*args, **kwargs)
        is_copy = owner != id(self)
        return run(self, own, args, kwargs, use._replace(observer=None) if is_copy else use)

    # Accelerate takes functions that have a `__wrapped__` for its own wrappers, and removes them.
    forward.__signature__ = inspect.signature(type(model).forward)  # type: ignore[attr-defined]
    setattr(forward, BEFORE, True)  # marks a forward that `attach` installed
    return forward


def attach(
    model: nn.Module,
    *,
    max_memory: int | None = None,
    metrics: bool = False,
    logits_dtype: torch.dtype | None = None,
) -> Attached:
    """Train a causal language model without its logits: its head returns `onepass.LinearLogits` to its loss function.

    This applies to forwards with gradients and ``labels``; evaluation and generation get tensors. The model's own code
    runs as before, and its loss is the same up to rounding. After a scale, a soft-cap, a cast, a bias or an index of
    the rows, the logits are still not computed. Any other operation computes them once, with a `MaterializedLogits`
    warning. Any model is supported whose ``get_output_embeddings()`` is a `torch.nn.Linear`; other heads are listed in
    the result, with the reason, and if there is no other, there is a RuntimeWarning. `onepass.patch` does the same for
    all models of transformers.

    Args:
        model: a model, or any module that contains one (PEFT, DDP, FSDP2).
        max_memory: bytes of workspace, see `onepass.LinearLogits`.
        metrics: whether the entropy and the accuracy of the tokens are computed along with the loss; see
            `Attached.metrics`.
        logits_dtype: ``torch.float32`` keeps the logits of bfloat16 and float16 heads in float32, see
            `onepass.LinearLogits`. The logits of evaluation and generation keep the dtype of the model.

    Returns:
        `Attached`, with ``restore()``. It can be used in a ``with`` block.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: the model is attached already, or ``logits_dtype`` is another dtype.

    Example::

        onepass.attach(model)
        model(input_ids=ids, labels=ids).loss.backward()
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {described(model)}")
    limit = None if max_memory is None else check_integer(max_memory, "max_memory", 1)
    if logits_dtype not in (None, torch.float32):
        raise ValueError(f"logits_dtype: expected torch.float32 or None, got {described(logits_dtype)}")
    observer = Metrics() if check_bool(metrics, "metrics") else None
    attached = Attached(model, HeadOptions(limit, observer, logits_dtype))
    if all(head.reason for head in attached.heads):
        why = "; ".join(map(str, attached.heads)) or f"{type(model).__name__} has no output embedding"
        text = f"model: expected a head that can return LinearLogits, got none: {why} [OP006]"
        warnings.warn(text, RuntimeWarning, stacklevel=stacklevel_outside("onepass."))
    return attached
