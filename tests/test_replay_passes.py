"""Which forward pass of a model the call of a router belongs to, also of a layer that a backward computes again."""

import contextlib
import copy
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from onepass.moe import record_routing, replay_routing
from replay_cases import backward, batches, build, build_of_images, close, drifted, gradients, losses, same

pytestmark = pytest.mark.usefixtures("one_thread", "eager")


class Around(torch.nn.Module):
    """A module whose forward calls a model in some way."""

    def __init__(self, model, call):
        super().__init__()
        self.model, self.call = model, call

    def forward(self, ids):
        return self.call(self.model, ids)


def loss_of(model, ids, reentrant=None):
    """With a checkpoint of the whole model, unless its form is None."""

    def run(embedded):
        return model(inputs_embeds=embedded, labels=ids, use_cache=False).loss

    embedded = model.get_input_embeddings()(ids)
    return run(embedded) if reentrant is None else checkpoint(run, embedded, use_reentrant=reentrant)


def drifted_record(module, *inputs):
    """`drifted` experts of forward passes of the module."""
    with record_routing(module) as record, torch.no_grad():
        [module(ids) for ids in inputs]
    return drifted(record)


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
        with replay_routing(model, drifted_record(model, ids)):
            loss_of(model, ids, reentrant).backward()
        return gradients(model)

    close(of(False), of(None))
    close(of(False, layers=True), of(None))
    with pytest.raises(RuntimeError, match="ran without gradients, as in a reentrant checkpoint of the whole model"):
        of(True)


@pytest.mark.parametrize("layers", [None, False, True])
def test_a_checkpoint_of_the_whole_model_before_another_pass(layers):
    """One backward of both: the later pass is known when the earlier is computed again, whose experts are not."""
    model, (ids,) = build("qwen3_moe"), batches()
    record = drifted_record(model, ids, ids)
    if layers is not None:
        model.gradient_checkpointing_enable({"use_reentrant": layers})
    with replay_routing(model, record):
        both = loss_of(model, ids, reentrant=True) + loss_of(model, ids.flip(1))
        with pytest.raises(RuntimeError, match="as in a reentrant checkpoint of the whole model"):
            both.backward()


@pytest.mark.parametrize("after_one_without_gradients", [False, True])
def test_a_module_that_checkpoints_the_model_within_it(after_one_without_gradients):
    """The pass is that of the outer module, which its outputs tell."""
    (ids,) = batches()

    def of(checkpoints):
        outer = Around(build("qwen3_moe"), partial(loss_of, reentrant=True if checkpoints else None))
        record = drifted_record(outer, ids, ids)
        with replay_routing(outer, record):
            if after_one_without_gradients:
                with torch.no_grad():
                    outer(ids)
            outer(ids).backward()
        return gradients(outer)

    close(of(True), of(False))


@pytest.mark.parametrize("inner", [False, True])
def test_a_checkpoint_that_is_not_reentrant_after_a_pass_without_gradients(inner):
    """No pass is lost, also where a checkpoint of the whole model has others of its layers within it."""
    (ids,) = batches()

    def of(checkpoints):
        model = build("qwen3_moe")
        record = drifted_record(model, ids, ids)
        if checkpoints and inner:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        with replay_routing(model, record):
            with torch.no_grad():
                model(ids)
            loss_of(model, ids, reentrant=False if checkpoints else None).backward()
        return gradients(model)

    close(of(True), of(False))


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_backward_within_the_forward_of_a_module(reentrant):
    (ids,) = batches()

    def step(model, ids):
        loss = loss_of(model, ids)
        if loss.requires_grad:
            loss.backward()
        return loss.detach()

    def of(checkpoints):
        module = Around(build("qwen3_moe"), step)
        record = drifted_record(module, ids, ids)
        if checkpoints:
            module.model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        with replay_routing(module, record):
            with torch.no_grad():
                module(ids)
            module(ids)
        return gradients(module)

    close(of(True), of(False))


@pytest.mark.parametrize("reentrant", [True, False])
def test_an_output_that_each_pass_changes(reentrant):
    """A sum of losses in place: the same tensor, which is of another pass each time."""
    inputs = batches(3)

    def of(checkpoints):
        total = torch.zeros(())

        def add(model, ids):
            nonlocal total
            total += loss_of(model, ids, reentrant=reentrant if checkpoints else None)
            return total

        module = Around(build("qwen3_moe"), add)
        record, total = drifted_record(module, *inputs), torch.zeros(())
        with replay_routing(module, record):
            [module(ids) for ids in inputs]
        total.backward()
        return gradients(module)

    close(of(True), of(False))


@pytest.mark.parametrize("changed", [False, True])
@pytest.mark.parametrize("reentrant", [True, False])
def test_an_output_that_is_the_input_of_the_next_pass(reentrant, changed):
    """Which returns it as the first of its hidden states, as in latent reasoning."""
    (ids,) = batches()

    def of(checkpoints):
        model = build("qwen3_moe")
        record = drifted_record(model, ids, ids)
        if checkpoints:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        run = partial(model.model, output_hidden_states=True, use_cache=False)
        with replay_routing(model, record):
            latent = run(inputs_embeds=model.get_input_embeddings()(ids)).last_hidden_state
            if changed:
                with torch.no_grad():
                    latent.clamp_(-1, 1)
            out = run(inputs_embeds=latent)
            assert out.hidden_states[0] is latent
            (out.last_hidden_state * torch.linspace(-1, 1, latent.shape[-1])).sum().backward()
        return gradients(model)

    close(of(True), of(False))


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
