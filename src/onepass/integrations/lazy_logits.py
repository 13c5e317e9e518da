"""`attach`: the head of a model returns `onepass.LinearLogits` in forwards that train, and no logits are materialized.

The loss function of the model then computes the loss in tiles, whether it is the model's own (through
`torch.nn.functional.cross_entropy`) or that of onepass. No code of the model is replaced.
"""

import functools
import inspect
import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from types import MethodType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo  # torch.compiler.disable imports Dynamo, and Triton, at once
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import register_pytree_node
from torch.utils.weak import WeakTensorKeyDictionary

from onepass.core.checks import check_integer, described
from onepass.core.dispatch import autocast_dtype, is_plain
from onepass.integrations.adapters import adapter_factors, adapter_reason, is_adapted
from onepass.integrations.patching import Restorable
from onepass.logits.linear import LinearLogits
from onepass.logits.partitioned import whole
from onepass.logits.valid_rows import RowCount, expecting


class HeadLogits(LinearLogits):
    """The logits of a linear module, or of PEFT's LoRA layer of one.

    Parameters that FSDP2 has sharded again after the forward are looked up when they are used. For torch's pytrees it
    is a node whose leaf are the hidden states, so that DDP with ``static_graph`` sees a tensor in the model's output.
    """

    def __init__(
        self,
        hidden: Tensor,
        head: nn.Linear,
        max_memory: int | None = None,
        observer: "Metrics | None" = None,
        logits_dtype: torch.dtype | None = None,
    ) -> None:
        self.head, self.observer = head, None if observer is None else Once(observer)
        gemms = autocast_dtype(hidden) or hidden.dtype
        logits_dtype = logits_dtype if gemms.itemsize == 2 else None
        lora = adapter_factors(head)
        super().__init__(hidden, head.weight, head.bias, lora=lora, max_memory=max_memory, logits_dtype=logits_dtype)
        _watched.update((p, None) for p in (head.weight, head.bias, *(lora or ())[:2]) if p is not None)
        _watch_optimizers()

    def check_unchanged(self) -> None:
        held = {} if torch.compiler.is_compiling() else {n: self.__dict__.get(n) for n in ("weight", "bias", "lora")}
        for name, value in held.items():
            if any(is_freed(t) for t in (value if isinstance(value, tuple) else (value,))):
                del self.__dict__[name]  # it is found by __getattr__
                self.__dict__.pop("versions", None)
        super().check_unchanged()

    def with_columns(self, count: int) -> LinearLogits | None:
        self.check_unchanged()  # before the parameters are read
        return super().with_columns(count)

    def with_bias(self, bias: Tensor) -> LinearLogits | None:
        self.check_unchanged()
        return super().with_bias(bias)

    def with_leaf(self, leaf: Any) -> "HeadLogits":
        """The same logits from other hidden states, or these as another tensor if they are materialized."""
        old = self.hidden if self.tensor is None else self.tensor
        if leaf is old:
            return self
        new: HeadLogits = self.changed()
        if self.tensor is not None:
            new.tensor = leaf
        elif isinstance(leaf, Tensor):
            # A cast is meant for the output: `output_dtype` of FSDP2.
            new.hidden, new.dtype = leaf.to(old.dtype), self.dtype if leaf.dtype == old.dtype else leaf.dtype
            if self.__dict__.get("versions"):
                new.versions = (new.hidden._version, *self.versions[1:])  # type: ignore[index]
        else:
            new.hidden = leaf
        return new

    def __getattr__(self, name: str) -> Any:
        if name not in ("weight", "bias", "lora") or "head" not in self.__dict__:
            return super().__getattr__(name)
        parameters: Any = adapter_factors(self.head) or () if name == "lora" else (getattr(self.head, name),)
        parts = [whole(p) if isinstance(p, Tensor) else p for p in parameters]
        last = 1 if name == "lora" else 0  # the one that has rows for the columns of the logits, which may be a slice
        if parts and parts[last] is not None and len(parts[last]) > self.shape[-1]:
            parts[last] = parts[last][: self.shape[-1]]
        found = (tuple(parts) or None) if name == "lora" else parts[0]
        if torch.is_grad_enabled() and any(a is not b for a, b in zip(parts, parameters)):
            self.__dict__[name] = found  # gathered once
        return found


class Node:
    """What a pytree keeps of logits beside their leaf. Nodes are compared by identity."""

    def __init__(self, logits: HeadLogits) -> None:
        self.logits = logits


def _flatten(logits: HeadLogits) -> tuple[list[Any], Node]:
    return [logits.hidden if logits.tensor is None else logits.tensor], Node(logits)


register_pytree_node(HeadLogits, _flatten, lambda leaves, node: node.logits.with_leaf(*leaves))


def is_freed(value: Any) -> bool:
    """Whether the memory of a tensor has been freed, as FSDP2 does with parameters that it shards again."""
    return isinstance(value, Tensor) and value.numel() > 0 == value.untyped_storage().size()


_watched = WeakTensorKeyDictionary()  # parameters of heads


@functools.cache
def _watch_optimizers() -> Any:
    """Count the steps of fused optimizers as changes of the heads, so that logits read after one are an error.

    Other optimizers write with torch's operations, which do so themselves.
    """

    def after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        if any(group.get("fused") for group in optimizer.param_groups):
            parameters = [p for group in optimizer.param_groups for p in group["params"] if p in _watched]
            torch.autograd.graph.increment_version(parameters)

    return register_optimizer_step_post_hook(after_step)


class Metrics:
    """Sums over tokens, on the device: of the entropy, of the tokens that are the argmax, and their number."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor | int] = {}

    def begin(self, count: Tensor | int) -> None:
        self.sums["num_tokens"] = self.sums.get("num_tokens", 0) + count

    def add(self, fields: dict[str, Tensor]) -> None:
        for name, field in (("entropy", "entropy"), ("mean_token_accuracy", "is_top1")):
            self.sums[name] = self.sums.get(name, 0) + fields[field].sum()

    def read(self) -> dict[str, Tensor]:
        """The means since the last call, and the number of tokens."""
        sums, self.sums = self.sums, {}
        if not sums:
            return {}
        tokens = torch.as_tensor(sums["num_tokens"])
        means = {name: torch.as_tensor(sums.get(name, 0)) / tokens for name in ("entropy", "mean_token_accuracy")}
        return means | {"num_tokens": tokens}


class Once:
    """Metrics of the first loss of a forward; those of further losses of the same logits are left out."""

    def __init__(self, metrics: Metrics) -> None:
        self.metrics, self.losses, self.backward = metrics, 0, -1

    def begin(self, count: Tensor | int) -> None:
        self.losses += 1
        if self.losses == 1:
            self.backward = torch._C._current_graph_task_id()  # of a checkpoint's recomputation, else -1
            self.metrics.begin(count)

    def add(self, fields: dict[str, Tensor]) -> None:
        # The backward of a loss of each row computes its tiles again.
        if self.losses == 1 and torch._C._current_graph_task_id() == self.backward:
            self.metrics.add(fields)


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
    base: Any = head
    if is_adapted(head):
        base, reason = head.base_layer, adapter_reason(head)
        if reason:
            return reason
    if not isinstance(base, nn.Linear):
        return f"{type(base).__module__}.{type(base).__name__} is not torch.nn.Linear"
    if type(base).forward is not nn.Linear.forward:
        return f"{type(base).__name__} has a forward of its own"
    if any("forward" in m.__dict__ and CALLS not in m.__dict__ for m in (head, base)):
        return "its forward is replaced, as by the hooks of accelerate"
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


def counted(labels: Any) -> CountedLabels | None:
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


@_disable_dynamo(recursive=False)
def run(
    model: nn.Module, forward: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any],
    use: HeadOptions = DEFAULT,
) -> Any:  # fmt: skip
    """Call a forward of the model. If it trains, its heads return `LinearLogits` meanwhile."""
    labels = labels_of(model, args, kwargs)
    heads = [h for h in heads_of(model) if not _reason(h)] if trains(model, labels) else []
    of_labels = _counted.set(counted(labels)) if heads and use is DEFAULT else None
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
    known = known and hidden.shape[-1:] == (self.in_features,) and not hasattr(hidden, "device_mesh")
    if known and (hidden.dtype == self.weight.dtype or torch.is_autocast_enabled(hidden.device.type)):
        if hidden.requires_grad:
            for state in fsdp_states(self):
                # FSDP2 does so for the tensors that a unit returns, of which these logits are none.
                hidden.register_hook(partial(run_before_backward, state))
        return HeadLogits(hidden, self, *use)  # type: ignore[misc]
    return type(self).forward(self, hidden, **others)


def run_before_backward(state: Any, gradient: Tensor) -> None:
    """Have a unit of FSDP2 gather its parameters, and reduce their gradients after the backward."""
    state._pre_backward(gradient)


def fsdp_states(head: nn.Module) -> list[Any]:
    """The states of the units of FSDP2 that a module belongs to, the outermost first."""
    module = sys.modules.get("torch.distributed._composable_state")
    states: Any = getattr(module, "_module_state_mapping", {})
    if not states:
        return []
    known = _units.get(head)
    if known is None or known[0] != len(states):
        units = [m for m in list(states) if hasattr(m, "unshard") and any(part is head for part in m.modules())]
        units.sort(key=lambda m: -sum(1 for _ in m.modules()))
        known = _units[head] = len(states), [weakref.ref(m) for m in units]
    return [unit._get_fsdp_state() for unit in (r() for r in known[1]) if unit is not None]


_units: "WeakKeyDictionary[nn.Module, tuple[int, list[Any]]]" = WeakKeyDictionary()


class Attached(Restorable):
    """A model whose heads return `onepass.LinearLogits`, until `restore` or the end of the ``with`` block.

    Attributes:
        heads: ``(name, module, reason)`` of every head; the reason says why its logits are materialized, if they are.
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
        """Means over all tokens of the forwards that trained since the last call, as tensors on the device.

        Returns:
            ``entropy`` (in nats), ``mean_token_accuracy`` and ``num_tokens``; empty if there was no such forward, or
            if the model materialized the logits before its loss. Means of no tokens are NaN.

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
                continue  # somebody else has wrapped our forward, which calls the model's own from now on
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
        own = MethodType(type(self).forward, self) if before is None else before
        if active != number:
            return own(*args, **kwargs)
        is_copy = owner != id(self)
        return run(self, own, args, kwargs, use._replace(observer=None) if is_copy else use)

    forward.__wrapped__ = type(model).forward  # type: ignore[attr-defined]
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

    This holds for forwards with gradients and ``labels``. The loss, and whatever else a model does with its logits,
    are the same as before. A scale, a soft-cap, a cast, a bias and an index of the rows keep the logits lazy; any other
    operation computes them once, with a `MaterializedLogits` warning. Evaluation and generation see tensors. No code of
    the model is replaced, so that any model works whose ``get_output_embeddings()`` is a `torch.nn.Linear`; heads that
    are not are listed with the reason in the result. `onepass.patch` does the same for all models of transformers.

    Args:
        model: a model, or any module that contains one (PEFT, DDP, FSDP2).
        max_memory: bytes of workspace, see `onepass.LinearLogits`.
        metrics: whether the entropy and the accuracy of the tokens are computed from the same read; see
            `Attached.metrics`.
        logits_dtype: ``torch.float32`` keeps the logits of bfloat16 and float16 heads in float32, see
            `onepass.LinearLogits`. The logits that evaluation and generation see are those of the model.

    Returns:
        `Attached`, with ``restore()``. It can be used in a ``with`` block.

    Raises:
        TypeError: not a module.
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
    return Attached(model, HeadOptions(limit, Metrics() if metrics else None, logits_dtype))
