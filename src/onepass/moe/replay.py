"""`record_routing` and `replay_routing`: record the experts that a model's routers select, and select them again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils.weak import WeakIdKeyDictionary

from onepass.core.checks import described
from onepass.moe.blocks import own_description, own_method
from onepass.moe.followers import (
    Follower,
    Running,
    attribute_of,
    computes_again_by_function,
    follow,
    in_backward,
    under_way,
    unfollow,
)
from onepass.moe.probe import method
from onepass.moe.routing_record import RoutingRecord


class Pass:
    """One forward pass: the experts that were selected in it, and the backward through it.

    Attributes:
        experts_of: the experts ``(T, K)`` that each router selected.
        computed_again: for each router, the last backward that has computed its layer again.
        running: the backward of this pass, if it runs.
        calls_model_without_gradients: whether a module around the model checkpoints it as a whole.
    """

    def __init__(self, routers: Sequence[nn.Module]) -> None:
        self.routers = routers
        self.experts_of: dict[nn.Module, Tensor] = {}
        self.computed_again: dict[nn.Module, tuple[str, int]] = {}
        self.running: Callable[[], Running | None] = lambda: None
        self.calls_model_without_gradients = False

    def begin_backward(self, _: Any) -> None:
        """Make layers that are computed again use the same experts, also after the context has ended."""
        running = self.running() or Running()
        self.running = ref(running)
        for router in self.routers:
            follow(router, self, *own_method(router)).backward_of = ref(self), self.running
        # The engine drops the callback, with what it holds, when the backward has ended, also in an error.
        Variable._execution_engine.queue_callback(partial(self.end_backward, running))

    def end_backward(self, _: Running) -> None:
        for router in self.routers:
            followed = follow(router, self, *own_method(router))
            if followed.backward_of is not None and followed.backward_of[0]() is self:
                followed.backward_of = None
            unfollow(router, self)


class Choices(Follower):
    """Counts the calls of each router, by which the forward passes of a model are told apart.

    Attributes:
        routers: the modules of each router, by name, in the order of layers; see `routers_of`.
        decoder: the module that has the list of layers with the routers.
        decoder_layers: the length of this list.
        places: the index of each router's layer in it.
        watched: the modules whose forwards are seen: the decoder, and the model around it. For each, the indices of the
            routers inside it.
        layers: the index of each module's router in this order.
        calls: the number of calls of each router, where an earlier pass that did not call it counts as a call: one that
            skips its layer, or that has no image for a router of images.
        pending_passes: the passes of which no output of the model has been seen yet.
        seen_pass: the current pass, once one of its outputs has been seen.
        hooked: the outputs that have been seen: the pass that has computed each, and its node in the graph.
    """

    keeps_experts = True

    def __init__(self, model: nn.Module) -> None:
        self.routers = routers_of(model)
        self.decoder, self.decoder_layers, self.places = decoder_of(model, self.routers)
        self.layers = {module: n for n, modules in enumerate(self.routers.values()) for module in modules}
        self.watched = {m: {self.layers[x] for x in m.modules() if x in self.layers} for m in (self.decoder, model)}
        self.calls = [0] * len(self.routers)
        self.pending_passes: dict[int, Pass] = {}
        self.seen_pass: Pass | None = None
        self.hooked = WeakIdKeyDictionary()
        self.before_forward: dict[nn.Module, dict[str, Any]] = {}  # the `state` before a forward that is under way

    def note(self, router: nn.Module, experts: Tensor, counts: Tensor, changed: Tensor | None, replayed: bool) -> None:
        layer = self.layers[router]
        n = self.calls[layer]
        self.calls[layer] = n + 1
        if n not in self.pending_passes:
            self.pending_passes[n] = Pass(tuple(self.layers))
        self.pending_passes[n].experts_of[router] = self.keep_experts(n, layer, experts.detach().flatten(0, -2))

    def keep_experts(self, n: int, layer: int, experts: Tensor) -> Tensor:
        """The experts of a layer in the n-th forward pass, as they are kept for its backward."""
        return experts.to(torch.int16)

    def state(self) -> dict[str, Any]:
        """What a forward pass changes."""
        return {"calls": [*self.calls], "pending_passes": {**self.pending_passes}, "seen_pass": None}

    def begin(self, model: nn.Module) -> None:
        """A forward begins."""
        if not in_backward():
            self.undo_failed(model)
            self.before_forward[model] = self.state()

    def undo_failed(self, begins: nn.Module | None = None) -> None:
        """Forget each forward that has ended in an error: it has not come to its `end`, and is not under way.

        A hook with ``always_call`` would be told of an error, but with it torch compiles again in each context.
        """
        for model in [*reversed(self.before_forward)]:
            if model is begins or not under_way(model):
                vars(self).update(self.before_forward.pop(model))

    def end(self, model: nn.Module, output: Any) -> None:
        """The backward through the outputs is that of the last pass."""
        if in_backward():
            return
        before = self.before_forward.pop(model, {"calls": [0]})  # which a context within the forward has not seen
        passes = max(max(before["calls"]) + 1, *self.calls)  # also of a pass that has called no router
        of = self.pending_passes.get(passes - 1)
        for t in tensors_of(output):
            if of is None or not t.requires_grad:
                continue
            by, node = self.hooked.get(t, (of, None))
            # An output of an earlier pass may be an input of this one, which returns it, changed in place or not.
            if by is of or node is not t.grad_fn:
                self.hooked[t] = of, t.grad_fn
                t.register_hook(of.begin_backward)
                self.seen_pass = of
        if self.before_forward:  # of a module around this one, whose outputs are hooked too
            if of is not None and not torch.is_grad_enabled():
                of.calls_model_without_gradients = True
            return
        for layer in self.watched[model]:  # also of routers that it has not called
            self.calls[layer] = passes
        if self.seen_pass is of or not torch.is_grad_enabled() or not any(p.requires_grad for p in model.parameters()):
            self.pending_passes.pop(passes - 1, None)
        self.seen_pass = None


class Watch:
    """The hooks around a forward: one class, for which torch compiles once, whatever the choices."""

    def __init__(self, choices: Choices) -> None:
        self.choices: Choices | None = choices

    def __getstate__(self) -> dict[str, Any]:
        return {"choices": None}  # a copy of the model is not followed, also one that was loaded from a file

    def __call__(self, model: nn.Module, inputs: Any, *output: Any) -> None:
        if torch.compiler.is_compiling() or self.choices is None:
            return
        if output:
            self.choices.end(model, *output)
        else:
            self.choices.begin(model)


class Recorder(Choices):
    """An active recording, whose ``record`` `record_routing` yields."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.record = RoutingRecord()

    def undo_failed(self, begins: nn.Module | None = None) -> None:
        super().undo_failed(begins)
        del self.record.passes[max(self.calls) :]

    def end(self, model: nn.Module, output: Any) -> None:
        super().end(model, output)
        self.lengthen(max(self.calls), torch.empty(0, 0, dtype=torch.int16))

    def keep_experts(self, n: int, layer: int, experts: Tensor) -> Tensor:
        ids = super().keep_experts(n, layer, experts)
        self.lengthen(n + 1, ids[:0])
        self.record.passes[n][layer] = ids
        return ids

    def lengthen(self, passes: int, no_experts: Tensor) -> None:
        """Make the record at least so long, by passes in which no layer has experts."""
        while len(self.record.passes) < passes:
            self.record.passes.append([no_experts] * len(self.routers))


class Replay(Choices):
    """An active replay, which `replay_routing` yields.

    Attributes:
        changed: scalar, int32: how many of the experts that were replayed so far the router would not have selected. It
            stays on the device. None before the first forward pass.
    """

    def __init__(self, model: nn.Module, record: RoutingRecord) -> None:
        super().__init__(model)
        self.changed: Tensor | None = None
        self.has_pass_without_gradients = False
        self.passes = [self.of_routers(layers) for layers in record.passes]

    def of_routers(self, layers: Sequence[Tensor]) -> list[Tensor]:
        """The experts of each router, on its device."""
        numbers = list(range(len(self.routers)))
        if len(layers) != len(numbers):  # those of all layers of the decoder, also of such without experts
            if len(layers) != self.decoder_layers:
                raise ValueError(f"record: expected {len(numbers)} layers, those with a router, or "
                                 f"{self.decoder_layers}, all layers of the decoder, got {len(layers)}")  # fmt: skip
            numbers = self.places
        found = []
        for n, (router, *_) in zip(numbers, self.routers.values()):
            device = next((p.device for p in router.parameters()), layers[n].device)
            found.append(layers[n].to("cpu" if device.type == "meta" else device, torch.int16))
        return found

    def state(self) -> dict[str, Any]:
        return super().state() | {"changed": self.changed}

    def choice(self, router: nn.Module) -> Tensor | None:
        layer = self.layers[router]
        n = self.calls[layer]
        if n >= len(self.passes):
            raise ValueError(f"record: expected one with every forward pass of the model, got {len(self.passes)} and "
                             f"another forward pass")  # fmt: skip
        return self.passes[n][layer]

    def end(self, model: nn.Module, output: Any) -> None:
        super().end(model, output)
        if not in_backward() and not torch.is_grad_enabled() and not self.before_forward:
            self.has_pass_without_gradients = True

    def computes_lost_pass(self) -> bool:
        # A backward that computes only layers again is of another pass: the lost one is computed again as a whole. A
        # checkpoint that is not reentrant loses none.
        return self.has_pass_without_gradients and any(computes_again_by_function(m) for m in self.watched)

    def note(self, router: nn.Module, experts: Tensor, counts: Tensor, changed: Tensor | None, replayed: bool) -> None:
        super().note(router, experts, counts, changed, replayed)
        if changed is not None:
            self.changed = changed.clone() if self.changed is None else self.changed + changed.to(self.changed.device)


@contextmanager
def record_routing(model: nn.Module) -> Iterator[RoutingRecord]:
    """Record the experts that the routers of a model select, in every forward pass within the context.

    Within the context, the routers compute `route_block`, as under `onepass.patch`, so that a replay has bitwise the
    same weights; the code of transformers may round differently. A layer that gradient checkpointing computes again is
    not recorded again, and uses the experts of the first time, also after the context has ended. A forward pass that
    ends in an error is not recorded.

    Args:
        model: a model of transformers, also compiled, sharded by FSDP2 or with adapters; see `route_block` for the
            model families.

    Yields:
        A `RoutingRecord`, to which each forward pass is added.

    Raises:
        TypeError: the model has no router that `route_block` supports, or has a block with experts but without such a
            router.
    """
    recorder = Recorder(model)
    with following(model, recorder):
        yield recorder.record


@contextmanager
def replay_routing(model: nn.Module, record: RoutingRecord) -> Iterator[Replay]:
    """Make the routers of a model select the experts of a record, in every forward pass within the context.

    The n-th forward pass uses the n-th pass of the record; a pass that ends in an error does not count. Weights and
    gradients are computed for the recorded experts, from the current logits, as by `route` with ``experts``. The
    backward may run within the context or after it, and those of several passes in any order: a layer that gradient
    checkpointing computes again uses the experts of its own forward pass. The backward has to pass through an output of
    the model or of its decoder, by which the pass is found. If replays of one model are nested, the innermost one
    selects the experts, and a forward pass counts for each of them.

    Args:
        model: as in `record_routing`.
        record: from `record_routing`, or from arrays of an inference engine (`RoutingRecord.from_array`).

    Yields:
        A `Replay`. Its ``changed`` is a scalar tensor, the number of recorded experts that the routers would not have
        selected.

    Raises:
        TypeError: as `record_routing`, or the record is not a `RoutingRecord`.
        ValueError: the record has other layers than the model. Within the context: the record has too few passes, or a
            pass has another number of tokens.
    """
    if not isinstance(record, RoutingRecord):
        raise TypeError(f"record: expected a RoutingRecord, got {described(record)}")
    replay = Replay(model, record)
    with following(model, replay):
        yield replay


@contextmanager
def following(model: nn.Module, follower: Choices) -> Iterator[None]:
    """A context in which the routers are followed, and the outputs of the model and its decoder are watched."""
    watched, watch = follower.watched, Watch(follower)
    handles = [m.register_forward_pre_hook(watch) for m in watched]
    handles += [m.register_forward_hook(watch) for m in watched]
    try:
        for router in follower.layers:
            follow(router, follower, *own_method(router))
        yield
    finally:
        for handle in handles:
            handle.remove()
        follower.undo_failed()
        for router in follower.layers:
            unfollow(router, follower)


def routers_of(model: nn.Module) -> dict[str, list[nn.Module]]:
    """The routers of a model by name, in the order of its layers.

    A router is one module, or several of which one is called: PEFT's ``modules_to_save`` keeps the original module
    beside the copy that is trained.

    Raises:
        TypeError: there are none, a block with experts has one of an unknown class, or one has a method of its own.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a model of transformers, got {described(model)}")
    found = {}
    for name, module in model.named_modules():
        d = own_description(module)
        if d is not None:
            own = vars(module).get(attribute_of(module, d.function))
            own = getattr(own, "__func__", own)
            if own is not None and getattr(own, "of_library", own) is not method(type(module), d.function):
                raise TypeError(f"model: expected routers with the methods of their class, got {d.function} of its own "
                                f"in {type(module).__name__} ({name or 'the model'})")  # fmt: skip
            found[name] = module
    for name, module in model.named_modules():
        children = dict(module.named_children())
        inside = f"{name}." if name else ""
        if "experts" in children and name not in found and not any(router.startswith(inside) for router in found):
            gate = children.get("gate", children.get("router", module))
            raise TypeError(f"model: expected routers that route_block recognizes, got {type(gate).__name__} in "
                            f"{type(module).__name__} ({name or 'the model'})")  # fmt: skip
    if not found:
        raise TypeError(f"model: expected a model with routers that route_block recognizes, got "
                        f"{type(model).__name__}, which has none")  # fmt: skip
    wrappers = [n for n, m in model.named_modules() if {"original_module", "modules_to_save"} <= m._modules.keys()]
    places: dict[str, list[nn.Module]] = {}
    for name, module in found.items():
        for wrapper in wrappers:
            rest = name.removeprefix(f"{wrapper}.")
            if rest != name:  # "original_module" or "modules_to_save.<adapter>", and what is inside
                name = ".".join([wrapper, *rest.split(".")[1 + rest.startswith("modules_to_save.") :]])
        places.setdefault(name, []).append(module)
    return places


def decoder_of(model: nn.Module, routers: dict[str, list[nn.Module]]) -> tuple[nn.Module, int, list[int]]:
    """The module that has the list of layers with the routers, the length of this list, and the index of each router.

    If not all routers are in one list, they count as all layers.
    """
    names = [name.split(".") for name in routers]
    decoder = model
    for n in range(1, len(names[0])):
        layers = model.get_submodule(".".join(names[0][:n]))
        if isinstance(layers, (nn.ModuleList, nn.ModuleDict)):
            decoder, keys = model.get_submodule(".".join(names[0][: n - 1])), list(layers._modules)
            if all(name[:n] == names[0][:n] for name in names):
                return decoder, len(keys), [keys.index(name[n]) for name in names]
            break
    return decoder, len(names), list(range(len(names)))


def tensors_of(output: Any) -> Iterator[Tensor]:
    """The tensors among the outputs of a model."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from tensors_of(value)
    elif isinstance(output, (tuple, list)):
        for value in output:
            yield from tensors_of(value)
