"""Recorded and replayed experts under checkpointing, compilation and FSDP, and passes that raise."""

import copy
import gc
import weakref
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import onepass
from onepass.moe import record_routing, replay_routing
from replay_cases import backward, batches, build, close, drifted, gradients, losses, same

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
