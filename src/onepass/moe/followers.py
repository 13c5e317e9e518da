"""Followers of a router: objects that provide the experts of its calls (a replay), or that record its results.

`follow` gives a router an attribute, `Followed`, which `route_block` reads. So all calls of the router through
`route_block` are followed, and no other call is slower.
"""

import sys
from collections.abc import Callable, Iterator
from copy import copy, deepcopy
from functools import wraps
from inspect import unwrap
from itertools import count
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary, ref

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.utils import checkpoint

from onepass.core.dispatch import operation
from onepass.moe.router import Routing, route

ATTRIBUTE = "_onepass_followed"
# Functions of torch whose frames tell what calls a router. `_COMPUTE_AGAIN` is that in which a checkpoint that is not
# reentrant computes its layers again, and `_BACKWARD` that of the backward of a function in Python, such as a reentrant
# checkpoint.
_CALL = nn.Module._call_impl.__code__
_CHECKPOINT = unwrap(checkpoint.checkpoint).__code__
_BACKWARD = BackwardCFunction.apply.__code__
_COMPUTE_AGAIN = "unpack_hook", checkpoint.__file__


def backward_task() -> int:
    """The number of the backward that autograd is running in this thread; -1 if there is none."""
    return torch._C._current_graph_task_id()


def in_backward() -> bool:
    """Whether autograd is running a backward: a router is then called by gradient checkpointing, a second time."""
    return backward_task() != -1


def frames() -> Iterator[FrameType]:
    """The frames of this thread's stack, from this call outwards."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def is_call_of(frame: FrameType, module: nn.Module) -> bool:
    """Whether a frame is that of a call of the module."""
    return frame.f_code is _CALL and frame.f_locals.get("self") is module


def under_way(module: nn.Module) -> bool:
    """Whether this thread is inside a call of the module."""
    return any(is_call_of(frame, module) for frame in frames())


def frames_of_recomputation() -> Iterator[FrameType]:
    """The `frames` up to that in which a backward computes something again, by checkpoints of either form.

    They are not kept: a frame holds activations.
    """
    for frame in frames():
        yield frame
        if frame.f_code is _BACKWARD or (frame.f_code.co_name, frame.f_code.co_filename) == _COMPUTE_AGAIN:
            break


def computes_again_by_function(module: nn.Module) -> bool:
    """Whether the backward of a function in Python, as of a reentrant checkpoint, calls the module."""
    calls = by_function = False
    for frame in frames_of_recomputation():
        calls = calls or is_call_of(frame, module)
        by_function = frame.f_code is _BACKWARD
    del frame
    return calls and by_function


def in_inner_checkpoint() -> bool:
    """Whether a layer that is computed again is in another checkpoint, which will compute it once more."""
    return in_backward() and any(frame.f_code is _CHECKPOINT for frame in frames_of_recomputation())


class Running:
    """It exists as long as a backward runs, also those within it, as of a checkpoint in another one."""

    def __init__(self) -> None:
        self.number = next(_numbers)


class Follower:
    """An object that may provide the experts of a router in each forward pass, and that gets the router's results.

    Attributes:
        keeps_experts: whether a layer that is computed again uses the experts of the first time.
    """

    keeps_experts = False

    def computes_lost_pass(self) -> bool:
        """Whether a backward may be computing a forward pass again that ran without gradients and cannot be found."""
        return False

    def choice(self, router: nn.Module) -> Tensor | None:
        """The experts ``(T, K)`` of this call, or None if the follower provides none."""
        return None

    def note(self, router: nn.Module, experts: Tensor, counts: Tensor, changed: Tensor | None, replayed: bool) -> None:
        """Record the results of this call; ``replayed`` is whether any follower provided its experts."""


class Followed:
    """The followers of one router.

    Attributes:
        slot: the number of this object, by which operations inside a compiled graph find it when they run.
        followers: in the order in which they were added; the last one that provides experts is used.
        users: weak references to the objects that need this one; it is removed with the last of them.
        backward_of: weak references to the forward pass whose backward runs, if it is known, and to its `Running`, so
            that a backward that has ended in an error does not affect the next.
        is_of_copy: whether the router was copied from one that is followed.
    """

    def __init__(self, router: nn.Module, name: str, method: Callable[..., Any]) -> None:
        self.router, self.followers, self.users = router, list[Follower](), list[ref[Any]]()
        self.backward_of: tuple[Callable[[], Any], Callable[[], Running | None]] | None = None
        self.is_of_copy = False
        # The same number as before: a compiled graph whose backward is still to come has kept it.
        number = _numbers_of.setdefault(router, next(_numbers))
        self.slot = torch.tensor(number)
        _followed[number] = self
        self.name = attribute_of(router, name)
        self.before = vars(router).get(self.name)
        setattr(router, self.name, unless_copied(method).__get__(router))

    def __getstate__(self) -> dict[str, Any]:
        # A copy of the router has no followers, also one that was loaded from a file. It calls its `own` method.
        nobody: dict[str, Any] = {"followers": [], "users": [], "backward_of": None, "is_of_copy": True}
        return vars(self) | nobody

    def __deepcopy__(self, memo: dict[int, Any]) -> "Followed":
        found = copy(self)
        found.router, found.before = deepcopy(self.router, memo), deepcopy(self.before, memo)
        return found

    def own(self, *args: Any, **kwargs: Any) -> Any:
        """The method of the router as it is without followers."""
        if self.before is not None:
            return self.before(*args, **kwargs)
        return getattr(type(self.router), self.name)(self.router, *args, **kwargs)

    def remove(self) -> None:
        """Restore the router."""
        if self.before is None:
            delattr(self.router, self.name)
        else:
            setattr(self.router, self.name, self.before)
        delattr(self.router, ATTRIBUTE)

    def forget(self, user: "ref[Any]") -> None:
        """Remove a user that no longer exists, such as a forward pass whose backward raised an error."""
        self.users = [u for u in self.users if u is not user]
        if not self.users and vars(self.router).get(ATTRIBUTE) is self:
            self.remove()

    def route(self, logits: Tensor, arguments: dict[str, Any]) -> Routing:
        """`route` with the experts that followers provide; all followers get the results."""
        arguments = {n: v for n, v in arguments.items() if n not in ("experts", "count_changed")}
        shape = (*logits.shape[:-1], arguments["k"])
        if torch.compiler.is_compiling():
            ids = _choice(logits, arguments["k"], self.slot)
            routing = route(logits, experts=ids, count_changed=True, **arguments)
            experts = _noted(routing.experts, routing.counts, routing.changed, self.slot)
            return routing._replace(experts=experts)
        last = torch.is_grad_enabled() and not in_inner_checkpoint()
        given = self.choice(shape, logits.device, last=last)
        replayed = given is not None
        selects = given is None and not in_backward() and torch.is_grad_enabled()
        if selects and any([f.keeps_experts for f in self.followers]):
            # Gradient checkpointing demands that a layer saves as many tensors when it is computed again.
            given = logits.new_full(shape, -1, dtype=torch.int16)
        routing = route(logits, experts=given, count_changed=replayed, **arguments)
        self.note(routing.experts, routing.counts, routing.changed, replayed)  # type: ignore[arg-type]
        return routing

    def choice(self, shape: tuple[int, ...], device: torch.device, last: bool) -> Tensor | None:
        """The experts of this call, of the given shape; None if the router selects them.

        ``last`` says whether a layer that is computed again in a backward is computed for the last time in it.
        """
        ids = None
        if in_backward():
            of = self.recomputed_pass()
            if of is not None and last:
                of.computed_again[self.router] = self.this_backward()
            ids = None if of is None else of.experts_of.get(self.router)
        else:
            for follower in reversed(self.followers):
                ids = follower.choice(self.router)
                if ids is not None:
                    break
        if ids is None:
            return None
        if ids.numel() != torch.Size(shape).numel() or ids.shape[-1] != shape[-1]:
            raise ValueError(f"record: expected {torch.Size(shape[:-1]).numel()} tokens of {shape[-1]} experts in this "
                             f"forward pass, as the model has, got {tuple(ids.shape)}")  # fmt: skip
        return ids.to(device, non_blocking=True).reshape(shape)

    def recomputed_pass(self) -> Any:
        """The forward pass whose layer is computed again in a backward; None of a pass that was not followed.

        A backward computes each layer of a pass again once. The next time is that of another pass.
        """
        this = self.this_backward()
        known = this[0] == "known"
        of = self.backward_of[0]() if known else self.only_pass()  # type: ignore[index]
        if not (known and of is not None and of.calls_model_without_gradients) and any(
            [f.computes_lost_pass() for f in self.followers]
        ):
            raise RuntimeError(
                "a layer is computed again for a forward pass that ran without gradients, as in a reentrant checkpoint "
                "of the whole model, and its choices are unknown: checkpoint the layers, or pass use_reentrant=False"
            )
        return None if of is None or of.computed_again.get(self.router) == this else of

    def this_backward(self) -> tuple[str, int]:
        """What identifies the backward that runs: its `Running` if its pass is known, or its task."""
        running = None if self.backward_of is None else self.backward_of[1]()
        return ("task", backward_task()) if running is None else ("known", running.number)

    def is_called(self) -> bool:
        """Whether anybody follows this call: not a forward that only waits for a backward, nor a layer that is computed
        again for a forward pass that called the router's own method."""
        if torch.compiler.is_compiling() or any([not f.keeps_experts for f in self.followers]):
            return True
        return self.recomputed_pass() is not None if in_backward() else bool(self.followers)

    def only_pass(self) -> Any:
        """The forward pass of a backward that has not said which it belongs to; None if there is none."""
        waiting = [p for follower in self.followers for p in getattr(follower, "pending_passes", {}).values()]
        if len(waiting) > 1:
            raise RuntimeError(
                "a layer is computed again, and it is unknown for which of several forward passes: call "
                "record_routing and replay_routing with the model that is called, such as that of torch.compile(model)"
            )
        return waiting[0] if waiting else None

    def note(self, experts: Tensor, counts: Tensor, changed: Tensor | None, replayed: bool) -> None:
        """Tell the followers the results, unless this call only computes a layer again."""
        if not in_backward():
            for follower in self.followers:
                follower.note(self.router, experts, counts, changed, replayed)


def attribute_of(router: nn.Module, name: str) -> str:
    """The attribute of a router that has this method, if it has one of its own.

    Accelerate replaces `forward` by a function that moves the inputs and then calls ``_old_forward``.
    """
    return "_old_forward" if name == "forward" and "_old_forward" in vars(router) else name


def unless_copied(method: Callable[..., Any]) -> Callable[..., Any]:
    """The ``method`` of a router that is followed. In a copy, or without followers, it is the router's own."""

    @wraps(method)
    def call(router: nn.Module, *args: Any, **kwargs: Any) -> Any:
        followed: Followed | None = getattr(router, ATTRIBUTE, None)
        if followed is None:
            return getattr(type(router), method.__name__)(router, *args, **kwargs)
        follows = not followed.is_of_copy and followed.is_called()
        return method(router, *args, **kwargs) if follows else followed.own(*args, **kwargs)

    return call


def followed_of(router: nn.Module) -> Followed | None:
    """The `Followed` of a router; None for a router without followers, such as a copy of one that is followed."""
    followed: Followed | None = getattr(router, ATTRIBUTE, None)
    return None if followed is None or followed.is_of_copy else followed


_numbers = count()
_numbers_of: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
_followed: WeakValueDictionary[int, Followed] = WeakValueDictionary()


def follow(router: nn.Module, user: Any, name: str, method: Callable[..., Any]) -> Followed:
    """Follow calls of the router as long as ``user`` needs it, with ``method`` in place of its own."""
    followed: Followed | None = getattr(router, ATTRIBUTE, None)
    if followed is not None and followed.is_of_copy:
        followed.remove()
        followed = None
    if followed is None:
        followed = Followed(router, name, method)
        setattr(router, ATTRIBUTE, followed)
    if not any(u() is user for u in followed.users):
        followed.users.append(ref(user, followed.forget))
    if isinstance(user, Follower) and user not in followed.followers:
        followed.followers.append(user)
    return followed


def unfollow(router: nn.Module, user: Any) -> None:
    """End what `follow` began; the last user restores the router."""
    followed: Followed | None = getattr(router, ATTRIBUTE, None)
    if followed is not None:
        followed.users = [u for u in followed.users if u() is not user]
        followed.followers = [f for f in followed.followers if f is not user]
        if not followed.users:
            followed.remove()


# The followers are asked and told when a compiled graph runs, not when it is traced.


@operation("onepass::followed_choice", lambda logits, k, slot: logits.new_empty((*logits.shape[:-1], k)).short())
def _choice(logits: Tensor, k: int, slot: Tensor) -> Tensor:
    shape = (*logits.shape[:-1], k)
    followed = _followed.get(int(slot))  # None once there are no followers
    ids = None if followed is None else followed.choice(shape, logits.device, last=not in_inner_checkpoint())
    if ids is None:
        return logits.new_full(shape, -1, dtype=torch.int16)
    return ids.to(torch.int16, copy=True, memory_format=torch.contiguous_format)


@operation("onepass::followed_results", lambda experts, counts, changed, slot: torch.empty_like(experts))
def _noted(experts: Tensor, counts: Tensor, changed: Tensor, slot: Tensor) -> Tensor:
    followed = _followed.get(int(slot))
    if followed is None:
        return experts.clone()
    # As in `choice`: the followers before the one that provides the experts are not asked.
    provided = (f.choice(followed.router) is not None for f in reversed(followed.followers))
    replayed = not in_backward() and any(provided)
    followed.note(experts, counts, changed, replayed)
    return experts.clone()
