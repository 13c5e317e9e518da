"""Recorded and replayed experts under checkpointing, compilation and FSDP, and passes that raise."""

import contextlib
import copy
import gc
import weakref
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import onepass
from onepass.moe import record_routing, replay_routing
from replay_cases import backward, batches, build, build_of_images, close, drifted, gradients, losses, same

pytestmark = pytest.mark.usefixtures("one_thread", "eager")


@pytest.mark.parametrize("reentrant", [False, True])
def test_recording_under_checkpointing(reentrant, monkeypatch):
    """No layer is recorded twice, and one that is computed again is given its first choice."""
    model, inputs = build("qwen3_moe"), batches(2)
    with record_routing(model) as expected:
        found = losses(model, inputs)
    backward(found, "first to last")
    of_expected = gradients(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    with record_routing(model) as record:
        found = losses(model, inputs)
        backward(found[:1], "joint")
        with torch.no_grad():
            [model(input_ids=ids) for ids in inputs[:1]]
    route, calls = onepass.moe.route, []

    def seen(logits, k, *, experts, **options):
        calls.append(experts)
        return route(logits, k, experts=experts, **options)

    monkeypatch.setattr("onepass.moe.followers.route", seen)
    backward(found[1:], "joint")
    assert len(record) == 3
    assert same(calls, record.passes[1][::-1])
    assert all(torch.equal(a, b) for p, q in zip(record.passes, expected.passes) for a, b in zip(p, q))
    close(gradients(model), of_expected)


class Again(torch.autograd.Function):
    """A module that its own backward computes again, as tiled MLPs do."""

    @staticmethod
    def forward(ctx, module, x):
        ctx.module = module
        ctx.save_for_backward(x)
        return module(x)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(ctx.module(x), grad)
        return None, x.grad


@pytest.mark.parametrize("within", [True, False])
@pytest.mark.parametrize(
    "inner", [lambda f, x: checkpoint(f, x, use_reentrant=True), Again.apply], ids=("checkpoint", "again")
)
def test_a_backward_within_the_backward_of_a_checkpoint(inner, within):
    """Blocks that are computed again in it use the experts of the pass; those of another pass do not, afterwards."""
    model, inputs = build("qwen3_moe"), batches(2)
    with record_routing(model) as record:
        losses(model, inputs)
    other = drifted(record)
    nested = copy.deepcopy(model)
    for layer in nested.model.layers:
        layer.mlp.forward = lambda x, own=layer.mlp.forward: inner(own, x)
    nested.gradient_checkpointing_enable({"use_reentrant": True})
    found = []
    for each in (model, nested):
        each.enable_input_require_grads()
        natural = losses(each, inputs[:1])
        with replay_routing(each, other):
            replayed = losses(each, inputs)
            if within:
                backward(replayed, "joint")
        if not within:
            backward(replayed, "joint")
        found.append(gradients(each))
        backward(natural, "joint")
        found.append(gradients(each))
    close(found[2], found[0])
    close(found[3], found[1])


def test_compiled_models():
    """No second compilation for another record; recorded, replayed and trained with checkpointing."""
    torch._dynamo.reset()
    model, inputs = build("qwen3_moe"), batches()
    with record_routing(model) as record:
        (expected,) = losses(model, inputs)
    other = drifted(record)
    with replay_routing(model, other):
        (of_other,) = losses(model, inputs)
    backward([of_other], "joint")
    of_other_gradients = gradients(model)
    compiled = torch.compile(model, backend="aot_eager")
    with record_routing(compiled) as again:
        (found,) = losses(compiled, inputs)
    assert len(again) == 1 and same(again.passes[0], record.passes[0])
    torch.testing.assert_close(found, expected)
    with replay_routing(compiled, record) as replay, torch.compiler.set_stance("fail_on_recompile"):
        (found,) = losses(compiled, inputs)
    assert torch.equal(found, expected) and replay.changed == 0
    with replay_routing(compiled, other) as replay:
        (found,) = losses(compiled, inputs)
    backward([found], "joint")
    torch.testing.assert_close(found, of_other)
    close(gradients(model), of_other_gradients)
    assert replay.changed > 0


def test_fsdp(sharded):
    from torch.distributed.fsdp import fully_shard

    model, inputs = build("qwen3_moe"), batches(2)
    with record_routing(model) as record:
        found = losses(model, inputs)
    backward(found, "first to last")
    expected, other = gradients(model), drifted(record)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (1,)))
    with record_routing(model) as again:
        found = losses(model, inputs)
    backward(found, "last to first")
    assert all(same(p, q) for p, q in zip(again.passes, record.passes))
    close([g.full_tensor() for g in gradients(model)], expected)
    with replay_routing(model, other) as replay, record_routing(model) as taken:
        losses(model, inputs)[0].backward()
    assert replay.changed > 0 and all(same(p, q) for p, q in zip(taken.passes, other.passes))


@pytest.mark.parametrize("within", [True, False])
def test_a_copy_trains_under_checkpointing(within):
    model, (ids,) = build("mixtral"), batches()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    (expected,) = losses(model, [ids])
    expected.backward()
    of_expected = gradients(model)
    with record_routing(model):
        copied = copy.deepcopy(model)
        if within:
            (found,) = losses(copied, [ids])
    if not within:
        (found,) = losses(copied, [ids])
    found.backward()
    assert torch.equal(found, expected)
    close(gradients(copied), of_expected)


@pytest.mark.exhaustive
def test_a_backward_after_the_context_of_a_compiled_model_with_checkpointing():
    torch.compiler.reset()
    model, ids = build("qwen3_moe"), batches()
    with record_routing(model):
        losses(model, ids)[0].backward()
    expected = gradients(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    compiled = torch.compile(model, backend="aot_eager")
    with record_routing(compiled):
        found = losses(compiled, ids)
    found[0].backward()
    close(gradients(model), expected)


def test_a_backward_within_the_context_of_a_compiled_model():
    torch._dynamo.reset()
    model, inputs = build("mixtral"), batches()
    with record_routing(model) as record:
        losses(model, inputs)
    with replay_routing(model, drifted(record)):
        (expected,) = losses(model, inputs)
    expected.backward()
    of_expected = gradients(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    compiled = torch.compile(model, backend="aot_eager")
    with replay_routing(compiled, drifted(record)) as replay:
        (found,) = losses(compiled, inputs)
        found.backward()
    assert replay.changed > 0
    torch.testing.assert_close(found, expected)
    close(gradients(model), of_expected)


def test_a_backward_that_raises_leaves_nothing():
    model, inputs = build("mixtral"), batches()
    model.gradient_checkpointing_enable({"use_reentrant": False})

    def fails(_):
        raise RuntimeError("out of memory, say")

    with record_routing(model) as record:
        (found,) = losses(model, inputs)
    handle = model.model.embed_tokens.weight.register_hook(fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        found.backward()
    handle.remove()
    del found
    gc.collect()
    for module in model.modules():
        assert not {"forward", "_onepass_followed"} & set(vars(module))
    model.zero_grad()
    with replay_routing(model, record):
        losses(model, inputs)[0].backward()


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("follow", ["record", "replay"])
def test_one_backward_of_passes_within_and_without(follow, reentrant):
    """A layer of a pass outside of any context is computed again as it was, whichever pass comes first."""
    ids = batches(2)

    def of(checkpointed, order):
        model = build("qwen3_moe")
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        with record_routing(model) as record, torch.no_grad():
            losses(model, ids[1:])
        found = []
        for within in order:
            context = contextlib.nullcontext()
            if within:
                context = record_routing(model) if follow == "record" else replay_routing(model, drifted(record))
            with context:
                found += losses(model, ids[within : within + 1])
        sum(found).backward()
        return gradients(model)

    for order in ((False, True), (True, False), (False, True, False)):
        close(of(True, order), of(False, order))


@pytest.mark.parametrize("order", ["first to last", "last to first", "joint"])
def test_a_router_that_is_called_only_with_images(order):
    """The first pass has none, so that the first call of the router is in the second pass."""
    model, (ids,) = build_of_images(), batches()
    images = torch.arange(ids.numel()).view(ids.shape) % 7 > 3

    def outputs(model):
        kinds = (None, images.int())
        return [model(input_ids=ids, moe_mm_token_type_ids=k, use_cache=False).last_hidden_state for k in kinds]

    with record_routing(model) as record:
        outputs(model)
    tokens, of_images = ids.numel(), int(images.sum())
    expected = [[(tokens, 2), (0, 2)], [(tokens - of_images, 2), (of_images, 2)]]
    assert [[tuple(ids.shape) for ids in layers] for layers in record.passes] == expected
    with replay_routing(model, record[1]) as replay:
        model(input_ids=ids, moe_mm_token_type_ids=images.int())
    assert replay.changed == 0
    for follow in (record_routing, lambda m: replay_routing(m, drifted(record))):
        found = []
        for reentrant in (None, False, True):
            each = copy.deepcopy(model)
            if reentrant is not None:
                each.gradient_checkpointing_enable({"use_reentrant": reentrant})
                each.enable_input_require_grads()
            with follow(each):
                hidden = outputs(each)
            backward([(h * h).sum() for h in hidden], order)
            found.append(gradients(each))
        close(found[1], found[0])
        close(found[2], found[0])


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_a_pass_that_skips_layers(reentrant):
    """As with LayerDrop: the next pass is the same for all routers, also if a pass has called none."""
    model, inputs = build("qwen3_moe"), batches(3)
    tokens = [ids.numel() for ids in inputs]

    def step(model):
        layers, found = model.model.layers, []
        for ids, first in zip(inputs, (1, 2, 0)):
            model.model.layers = layers[first:]
            found += losses(model, [ids])
        return found

    with record_routing(model) as record:
        step(model)
        assert len(record) == 3
        model(input_ids=inputs[0])
    assert [[len(ids) for ids in layers] for layers in record.passes] == [
        [0, tokens[0]], [0, 0], [tokens[2]] * 2, [tokens[0]] * 2
    ]  # fmt: skip
    other = drifted(record)
    with replay_routing(model, other), record_routing(model) as taken:
        expected = step(model)
    assert len(taken) == 3 and all(same(p, q) for p, q in zip(taken.passes, other.passes))
    backward(expected[::2], "joint")
    of_expected = gradients(model)
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
    with replay_routing(model, other):
        found = step(model)
    assert same(found, expected)
    backward(found[::2], "joint")
    close(gradients(model), of_expected)


def test_a_record_of_a_pass_that_calls_no_router():
    model, inputs = build("qwen3_moe"), batches()
    with record_routing(model) as record:
        layers, model.model.layers = model.model.layers, model.model.layers[2:]
        losses(model, inputs)
        model.model.layers = layers
    assert [[len(ids) for ids in layers] for layers in record.passes] == [[0, 0]]
    with replay_routing(model, record), pytest.raises(ValueError, match="expected 14 tokens of 2 experts in this forw"):
        losses(model, inputs)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_backward_of_another_pass_after_one_without_gradients(reentrant):
    """As that of old log-probabilities. Only a checkpoint of the whole model would compute the latter again."""
    model, ids = build("qwen3_moe"), batches(2)
    with record_routing(model) as record:
        losses(model, ids[:1])[0].backward()
    expected = gradients(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    (found,) = losses(model, ids[:1])
    with replay_routing(model, drifted(record)):
        with torch.no_grad():
            losses(model, ids[:1])
        found.backward()
    close(gradients(model), expected)


def test_blocks_that_are_called_without_their_model():
    """It is not known of which of the calls the first backward is."""
    model = build("mixtral")
    block, hidden = model.model.layers[0].mlp, torch.randn(2, 1, 3, model.config.hidden_size, requires_grad=True)
    with record_routing(model):
        found = [checkpoint(block, part, use_reentrant=False).sum() for part in hidden]
        with pytest.raises(RuntimeError, match="unknown for which of several forward passes"):
            found[0].backward()


def test_a_checkpoint_of_the_whole_model():
    (ids,) = batches()

    def of(reentrant, layers=None):
        model = build("qwen3_moe")
        if layers is not None:
            model.gradient_checkpointing_enable({"use_reentrant": layers})
        embedded = model.get_input_embeddings()(ids)
        run = lambda e: model(inputs_embeds=e, labels=ids, use_cache=False).loss  # noqa: E731
        with record_routing(model) as record, torch.no_grad():
            run(embedded)
        with replay_routing(model, drifted(record)):
            loss = run(embedded) if reentrant is None else checkpoint(run, embedded, use_reentrant=reentrant)
            loss.backward()
        return gradients(model)

    close(of(False), of(None))
    close(of(False, layers=True), of(None))
    with pytest.raises(RuntimeError, match="ran without gradients, as in a reentrant checkpoint of the whole model"):
        of(True)


@pytest.mark.parametrize("layers", [None, False, True])
def test_a_checkpoint_of_the_whole_model_before_another_pass(layers):
    """One backward of both: the later pass is known when the earlier is computed again, whose experts are not."""
    model, (ids,) = build("qwen3_moe"), batches()
    if layers is not None:
        model.gradient_checkpointing_enable({"use_reentrant": layers})
    with record_routing(model) as record, torch.no_grad():
        losses(model, [ids, ids])
    embedded = model.get_input_embeddings()(ids)
    with replay_routing(model, drifted(record)):
        run = lambda e: model(inputs_embeds=e, labels=ids, use_cache=False).loss  # noqa: E731
        first = checkpoint(run, embedded, use_reentrant=True)
        (second,) = losses(model, [ids.flip(1)])
        with pytest.raises(RuntimeError, match="as in a reentrant checkpoint of the whole model"):
            (first + second).backward()


@pytest.mark.parametrize("after_one_without_gradients", [False, True])
def test_a_module_that_checkpoints_the_model_within_it(after_one_without_gradients):
    """The pass is that of the outer module, which its outputs tell."""

    class Outer(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model, self.checkpoints = model, False

        def forward(self, ids):
            run = lambda e: self.model(inputs_embeds=e, labels=ids, use_cache=False).loss  # noqa: E731
            embedded = self.model.get_input_embeddings()(ids)
            return checkpoint(run, embedded, use_reentrant=True) if self.checkpoints else run(embedded)

    (ids,), found = batches(), []
    for checkpoints in (False, True):
        outer = Outer(build("qwen3_moe"))
        with record_routing(outer) as record, torch.no_grad():
            outer(ids)
            outer(ids)
        outer.checkpoints = checkpoints
        with replay_routing(outer, drifted(record)):
            if after_one_without_gradients:
                with torch.no_grad():
                    outer(ids)
            outer(ids).backward()
        found.append(gradients(outer))
    close(*found)


@pytest.mark.parametrize("inner", [False, True])
def test_a_checkpoint_that_is_not_reentrant_after_a_pass_without_gradients(inner):
    """No pass is lost, also where a checkpoint of the whole model has others of its layers within it."""
    (ids,), found = batches(), []
    for checkpoints in (False, True):
        model = build("qwen3_moe")
        model.config.use_cache = False
        with record_routing(model) as record, torch.no_grad():
            losses(model, [ids, ids])
        run = lambda ids: model(input_ids=ids, labels=ids).loss  # noqa: B023, E731
        if checkpoints and inner:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        with replay_routing(model, drifted(record)):
            with torch.no_grad():
                losses(model, [ids])
            loss = checkpoint(run, ids, use_reentrant=False) if checkpoints else run(ids)
            loss.backward()
        found.append(gradients(model))
    close(*found)


@pytest.mark.parametrize("reentrant", [True, False])
def test_activations_that_are_computed_again_are_freed(reentrant):
    """As soon as the backward has passed their layer, and not when Python collects cycles."""
    model, (ids,) = build("qwen3_moe"), batches()
    with record_routing(model) as record, torch.no_grad():
        losses(model, [ids])
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    seen = []
    gates = [layer.mlp.gate.register_forward_pre_hook(lambda _, x: seen.append(weakref.ref(x[0])))
             for layer in model.model.layers]  # fmt: skip
    gc.disable()
    try:
        with replay_routing(model, drifted(record)):
            losses(model, [ids])[0].backward()
        assert len(seen) >= 2 * len(gates) and all(x() is None for x in seen)
    finally:
        gc.enable()


def test_a_compiled_layer_in_two_checkpoints():
    (ids,), found = batches(), []
    for checkpoints in (False, True):
        model = build("qwen3_moe")
        with record_routing(model) as record, torch.no_grad():
            losses(model, [ids])
        model.enable_input_require_grads()
        for layer in model.model.layers if checkpoints else ():
            compiled = torch.compile(layer.forward, backend="aot_eager")
            inner = partial(checkpoint, compiled, use_reentrant=False)
            layer.forward = lambda x, *a, inner=inner, **k: checkpoint(
                lambda x: inner(x, *a, **k),
                x,
                use_reentrant=True,
            )
        with replay_routing(model, drifted(record)):
            losses(model, [ids])[0].backward()
        found.append(gradients(model))
    close(*found)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_backward_within_the_forward_of_a_module(reentrant):
    class Step(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, ids):
            (loss,) = losses(self.model, [ids])
            if loss.requires_grad:
                loss.backward()
            return loss.detach()

    (ids,), found = batches(), []
    for checkpoints in (False, True):
        step = Step(build("qwen3_moe"))
        with record_routing(step) as record, torch.no_grad():
            step(ids)
            step(ids)
        if checkpoints:
            step.model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            step.model.enable_input_require_grads()
        with replay_routing(step, drifted(record)):
            with torch.no_grad():
                step(ids)
            step(ids)
        found.append(gradients(step))
    close(*found)


@pytest.mark.parametrize("reentrant", [True, False])
def test_an_output_that_each_pass_changes(reentrant):
    """A sum of losses in place: the same tensor, which is of another pass each time."""

    class Sum(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model, self.checkpoints = model, False

        def forward(self, ids, total):
            run = lambda e: self.model(inputs_embeds=e, labels=ids, use_cache=False).loss  # noqa: E731
            embedded = self.model.get_input_embeddings()(ids)
            total += checkpoint(run, embedded, use_reentrant=reentrant) if self.checkpoints else run(embedded)
            return total

    inputs, found = batches(3), []
    for checkpoints in (False, True):
        module = Sum(build("qwen3_moe"))
        with record_routing(module) as record, torch.no_grad():
            [module(ids, torch.zeros(())) for ids in inputs]
        module.checkpoints, total = checkpoints, torch.zeros(())
        with replay_routing(module, drifted(record)):
            for ids in inputs:
                total = module(ids, total)
        total.backward()
        found.append(gradients(module))
    close(*found)


@pytest.mark.parametrize("changed", [False, True])
@pytest.mark.parametrize("reentrant", [True, False])
def test_an_output_that_is_the_input_of_the_next_pass(reentrant, changed):
    """Which returns it as the first of its hidden states, as in latent reasoning."""
    (ids,), found = batches(), []
    for checkpoints in (False, True):
        model = build("qwen3_moe")
        if checkpoints:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        run = lambda e: model.model(inputs_embeds=e, output_hidden_states=True, use_cache=False)  # noqa: B023, E731
        with record_routing(model) as record, torch.no_grad():
            run(run(model.get_input_embeddings()(ids)).last_hidden_state)
        with replay_routing(model, drifted(record)):
            latent = run(model.get_input_embeddings()(ids)).last_hidden_state
            if changed:
                with torch.no_grad():
                    latent.clamp_(-1, 1)
            out = run(latent)
            assert out.hidden_states[0] is latent
            (out.last_hidden_state * torch.linspace(-1, 1, latent.shape[-1])).sum().backward()
        found.append(gradients(model))
    close(*found)


class Two(torch.nn.Module):
    """Two models, which are called one after the other."""

    def __init__(self):
        super().__init__()
        self.actor, self.critic = build("qwen3_moe"), build("mixtral")

    def forward(self, ids):
        return [m(input_ids=ids, labels=ids, use_cache=False).loss for m in (self.actor, self.critic)]


def test_a_module_with_two_decoders():
    """Its passes are the same, whether its own hooks are called or not."""
    two, inputs = Two(), batches(3)
    with record_routing(two) as expected:
        [two(ids) for ids in inputs]
    with record_routing(two) as record:
        [two.forward(ids) for ids in inputs]
    assert len(record) == len(expected) == 3
    assert all(same(a, b) for a, b in zip(record.passes, expected.passes))
    with record_routing(two) as again, replay_routing(two, drifted(record)):
        [two.forward(ids) for ids in inputs]
    assert all(same(a, b) for a, b in zip(again.passes, drifted(record).passes))


@pytest.mark.parametrize("compiles", [False, True])
def test_a_replay_within_one_that_is_used_up(compiles):
    model, inputs = build("mixtral"), batches(2)
    called = torch.compile(model, backend="eager") if compiles else model
    with record_routing(called) as record, torch.no_grad():
        [called(input_ids=ids, use_cache=False) for ids in inputs]
    with torch.no_grad(), replay_routing(called, record[:1]), replay_routing(called, record) as inner:
        [called(input_ids=ids, use_cache=False) for ids in inputs]
    assert inner.changed == 0


def test_a_record_of_inference_mode():
    model, (ids,) = build("qwen3_moe"), batches()
    with torch.inference_mode(), record_routing(model) as record:
        model(input_ids=ids)
    with replay_routing(model, record) as replay:
        losses(model, [ids])[0].backward()
    assert replay.changed == 0 and gradients(model)


@pytest.mark.parametrize("reentrant", [True, False])
def test_nothing_is_left_of_a_backward_that_raised(reentrant):
    """While its loss is still referenced, which keeps the pass."""
    model, ids = build("qwen3_moe"), batches(2)
    losses(model, ids[1:])[0].backward()
    expected = gradients(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    with record_routing(model) as record, torch.no_grad():
        losses(model, ids[:1])
    with replay_routing(model, drifted(record)):
        kept = losses(model, ids[:1])

    def fail(_):
        raise ZeroDivisionError

    handle = model.model.layers[1].input_layernorm.weight.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        kept[0].backward(retain_graph=True)
    handle.remove()
    model.zero_grad()
    losses(model, ids[1:])[0].backward()
    close(gradients(model), expected)


def test_a_forward_that_raises_is_undone():
    """Passes are told apart by how often routers were called, which a forward that fails half way must not change."""
    model, (ids, other) = build("mixtral").eval(), batches(2)

    def fails(*_):
        raise RuntimeError("out of memory, say")

    def fail(inputs):
        handle = model.model.layers[1].register_forward_pre_hook(fails)
        with pytest.raises(RuntimeError, match="out of memory"):
            model(input_ids=inputs)
        handle.remove()

    with record_routing(model) as expected:
        logits = [model(input_ids=x).logits for x in (ids, other)]
    with record_routing(model) as record:
        model(input_ids=ids)
        fail(ids)
        model(input_ids=other)
        fail(ids)
    assert len(record) == 2 and all(same(a, b) for a, b in zip(record.passes, expected.passes, strict=True))
    with replay_routing(model, record) as replay:
        for x, of_x in zip((ids, other), logits):
            fail(x)
            assert torch.equal(model(input_ids=x).logits, of_x)
    assert replay.changed == 0


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_forward_of_the_decoder_after_one_of_the_model_that_raises(error):
    """The decoder has come to its end in the pass that raises."""
    model, (ids, other) = build("mixtral"), batches(2)

    def fails(*_):
        raise error("out of memory, say")

    def fail(inputs):
        handle = model.lm_head.register_forward_pre_hook(fails)
        with pytest.raises(error, match="out of memory"):
            model(input_ids=inputs)
        handle.remove()

    with record_routing(model) as expected:
        hidden = model.model(input_ids=other).last_hidden_state
    hidden.sum().backward()
    of_expected = gradients(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with record_routing(model) as record:
        fail(ids)
        model.model(input_ids=other)
        assert len(record) == 1
        fail(ids)
    assert len(record) == 1 and same(record.passes[0], expected.passes[0])
    with replay_routing(model, record) as replay:
        for of in (model, model.model):
            with pytest.raises(ValueError, match="in this forward pass"):
                of(input_ids=ids)
        found = model.model(input_ids=other).last_hidden_state
    assert replay.changed == 0 and torch.equal(found, hidden)
    found.sum().backward()
    close(gradients(model), of_expected)
