"""`HeadLogits`: the logits that the head of a model returns in place of a tensor, and what other libraries see of them.

`lazy_logits` creates them. FSDP2 and DDP look for tensors in the output of a module, and fused optimizers write to
parameters without changing their version: this module handles both.
"""

import copy
import functools
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import register_pytree_node
from torch.utils.weak import WeakTensorKeyDictionary

from onepass.core.checks import short
from onepass.core.dispatch import autocast_dtype
from onepass.integrations.adapters import adapter_factors
from onepass.logits.fsdp2 import sharded_parameter, states_of
from onepass.logits.linear import LinearLogits
from onepass.logits.observer import Metrics, Once
from onepass.logits.partitioned import whole


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
        observer: Metrics | None = None,
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

    def with_leaf(self, leaf: Any) -> Any:
        """The same logits from other hidden states, or these as another tensor if they are materialized.

        Raises:
            TypeError: the leaf is a tensor that is no hidden states, or a tensor of a transform of `torch.func`.
        """
        if isinstance(leaf, Tensor) and not torch.compiler.is_compiling() and is_transformed(leaf):
            raise TypeError("logits: expected a tensor for transforms of torch.func, got logits that are not "
                            "materialized; call logits.materialize() before")  # fmt: skip
        old = self.hidden if self.tensor is None else self.tensor
        if leaf is old:
            return self
        if self.tensor is not None and isinstance(leaf, Tensor) and (leaf.shape, leaf.dtype) != (old.shape, old.dtype):
            return leaf
        new: HeadLogits = self.changed()
        if self.tensor is not None:
            new.tensor = leaf
        elif isinstance(leaf, Tensor):
            if leaf.shape[-1:] != old.shape[-1:] or not leaf.is_floating_point():
                raise TypeError(f"logits: expected hidden states, their leaf in a pytree, such as {short(old)}, "
                                f"got {short(leaf)}; call logits.materialize() before")  # fmt: skip
            # A cast is meant for the output: `output_dtype` of FSDP2.
            new.hidden, new.dtype = leaf.to(old.dtype), self.dtype if leaf.dtype == old.dtype else leaf.dtype
            new.shape = torch.Size((*leaf.shape[:-1], self.shape[-1]))
            if old.requires_grad and not leaf.requires_grad:  # detached
                new.make_constant()
            if self.__dict__.get("versions"):
                new.versions = (new.hidden._version, *self.versions[1:])  # type: ignore[index]
        else:
            new.hidden = leaf
        return new

    # A file or a deep copy has the logits as a tensor, without the head.

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.materialize_for("pickle").__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(self.materialize_for("deepcopy"), memo)

    def __copy__(self) -> "HeadLogits":
        new = object.__new__(type(self))
        new.__dict__ |= self.__getstate__()
        return new

    def __getattr__(self, name: str) -> Any:
        if name not in ("weight", "bias", "lora") or "head" not in self.__dict__:
            return super().__getattr__(name)
        parameters: Any = adapter_factors(self.head) or () if name == "lora" else (sharded_parameter(self.head, name),)
        parts = [whole(p) if isinstance(p, Tensor) else p for p in parameters]
        last = 1 if name == "lora" else 0  # the one that has rows for the columns of the logits, which may be a slice
        if parts and parts[last] is not None and len(parts[last]) > self.shape[-1]:
            parts[last] = parts[last][: self.shape[-1]]
        found = (tuple(parts) or None) if name == "lora" else parts[0]
        if torch.is_grad_enabled() and any(a is not b for a, b in zip(parts, parameters)):
            self.__dict__[name] = found  # gathered once
        return found


def is_transformed(value: Tensor) -> bool:
    """Whether a tensor is one of `torch.func.vmap` or `torch.func.grad`, which lazy logits would lose."""
    functorch = torch._C._functorch
    return functorch.is_batchedtensor(value) or functorch.is_gradtrackingtensor(value)


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


def gather_before_backward(hidden: Tensor, head: nn.Module) -> None:
    """Have the units of FSDP2 that a head belongs to gather their parameters before the backward of its logits.

    FSDP2 does so for the tensors that a unit returns, of which these logits are none.
    """
    if hidden.requires_grad:
        for state in states_of(head):
            hidden.register_hook(partial(run_before_backward, state))


def run_before_backward(state: Any, gradient: Tensor) -> None:
    """Have a unit of FSDP2 gather its parameters, and reduce their gradients after the backward."""
    state._pre_backward(gradient)
