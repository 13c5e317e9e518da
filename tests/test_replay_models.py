"""The experts of models of transformers, recorded and replayed: losses, gradients, copies and saved models."""

import contextlib
import copy
import pickle
from functools import partial

import pytest
import torch

import onepass
from onepass.moe import RoutingRecord, record_routing, replay_routing
from replay_cases import FAMILIES, OTHERS, B, S, backward, batches, build, close, drifted, gradients, losses, same

pytestmark = pytest.mark.usefixtures("one_thread", "eager")
every_family = pytest.mark.parametrize("family", FAMILIES)


@pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=[pytest.mark.exhaustive] if f in ("mixtral", "glm4_moe") else []) for f in FAMILIES],
)
def test_replayed_is_recorded(family):
    """Loss and gradients bit for bit, in each form of checkpointing, with three micro-batches in flight, whose
    backwards run after the context and in another order."""
    model, inputs = build(family), batches(3)
    with record_routing(model) as record:
        expected = losses(model, inputs)
    backward(expected, "first to last")
    of_expected = gradients(model)
    routers = 1 if family in ("deepseek_v3", "glm4_moe") else 2
    assert len(record) == 3 and [len(p) for p in record.passes] == [routers] * 3
    assert [ids.shape for ids in record.passes[2]] == [(B * (S - 2), 2)] * routers
    other = drifted(record)
    with replay_routing(model, other) as replay:
        of_others = losses(model, inputs)
    backward(of_others, "first to last")
    of_drifted = gradients(model)
    assert replay.changed > 0 and not torch.equal(of_others[0], expected[0])
    ways = (None, "joint"), (False, "last to first"), (True, "joint")
    for reentrant, order in ways if family == "qwen3_moe" else ways[1:]:
        if reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        with replay_routing(model, record) as replay:
            found = losses(model, inputs)
        assert same(found, expected) and replay.changed == 0
        backward(found, order)
        close(gradients(model), of_expected)
        with replay_routing(model, other):
            found = losses(model, inputs)
            backward(found[:1], order)  # within the context
        backward(found[1:], order)
        assert same(found, of_others)
        close(gradients(model), of_drifted)
        model.gradient_checkpointing_disable()
    for module in model.modules():
        assert not {"forward", "_onepass_followed"} & set(vars(module))


@pytest.mark.parametrize("family", OTHERS)
def test_routers_of_other_forms(family):
    """As above, with the choices counted where the router has a selection bias."""
    model, inputs = build(family), batches()
    natural = losses(model, inputs)
    with record_routing(model) as record:
        expected = losses(model, inputs)
    torch.testing.assert_close(expected, natural)
    with replay_routing(model, record) as replay:
        assert same(losses(model, inputs), expected) and replay.changed == 0
    counted = onepass.moe.count_experts(model) if family != "llama4" else contextlib.nullcontext()
    with replay_routing(model, drifted(record)) as replay, record_routing(model) as taken, counted as counts:
        found = losses(model, inputs)
    backward(found, "joint")
    assert all(same(p, q) for p, q in zip(taken.passes, drifted(record).passes))
    assert replay.changed > 0 and not torch.equal(found[0], expected[0])
    for ids, of in zip(taken.passes[0], counts.counts if counts else ()):
        assert torch.equal(of, ids.long().flatten().bincount(minlength=4))
    for name, p in model.named_parameters():
        assert not name.endswith(("gate.weight", "router.weight", "router.gate.weight")) or p.grad.abs().sum() > 0


@every_family
def test_changed_weights_take_the_recorded_experts(family):
    model, inputs = build(family), batches()
    with record_routing(model) as record:
        losses(model, inputs)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(("gate.weight", "router.weight")):
                p.normal_()
    with record_routing(model) as natural:
        losses(model, inputs)
    with replay_routing(model, record) as replay, record_routing(model) as taken:
        losses(model, inputs)
    differ = [
        len({*a.tolist()} - {*b.tolist()})
        for p, q in zip(record.passes[0], natural.passes[0])
        for a, b in zip(p, q)
    ]  # fmt: skip
    assert same(taken.passes[0], record.passes[0])
    assert replay.changed > 0 and (family in ("qwen3_moe", "mixtral", "gpt_oss") or replay.changed == sum(differ))


def test_arrays_of_all_layers_of_the_decoder():
    """Engines return rows, of zeros, for layers without experts too."""
    model, inputs = build("deepseek_v3").eval(), batches()
    with record_routing(model) as record:
        expected = losses(model, inputs)
    whole = RoutingRecord([[torch.zeros_like(record.passes[0][0]), *record.passes[0]]])
    with replay_routing(model, whole):
        assert same(losses(model, inputs), expected)
    with pytest.raises(ValueError, match=r"record: expected 1 layers, those with a router, or 2, all.* got 0"):
        replay_routing(model, RoutingRecord([[]])).__enter__()


@pytest.mark.parametrize("family, more", [("qwen3_moe", 1), ("deepseek_v3", 1), ("deepseek_v3", 2)])
def test_a_record_of_a_model_with_more_layers(family, more):
    model, inputs = build(family).eval(), batches()
    with record_routing(model) as record:
        losses(model, inputs)
    layers = model.config.num_hidden_layers
    other = RoutingRecord([[record.passes[0][0]] * (layers + more)])
    message = f"record: expected {len(record.passes[0])} layers, .* or {layers}, all .* got {layers + more}"
    with pytest.raises(ValueError, match=message):
        replay_routing(model, other).__enter__()


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_routers_that_peft_has_copied(family):
    """A router and the copy of it that is trained, of which one is called, are one router."""
    peft = pytest.importorskip("peft")
    model, inputs = build(family).eval(), batches()
    with record_routing(model) as record:
        losses(model, inputs)
    options = peft.LoraConfig(r=2, target_modules=["o_proj"], modules_to_save=["gate"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, options)
    absent = [torch.zeros_like(record.passes[0][0])] * (model.config.num_hidden_layers - len(record.passes[0]))
    for layers in (record.passes[0], absent + record.passes[0]):
        with replay_routing(model, RoutingRecord([layers])) as replay:
            losses(model, inputs)
        assert int(replay.changed) == 0
    with record_routing(model) as again:
        with model.disable_adapter():
            losses(model, inputs)
        losses(model, inputs)
    assert len(again) == 2 and all(same(layers, record.passes[0]) for layers in again.passes)
    assert (again[0].to_array(torch.ones(B, S))[0] == record.to_array(torch.ones(B, S))[0]).all()


def test_under_a_patch_and_a_hook_of_accelerate():
    accelerate = pytest.importorskip("accelerate")
    model, inputs = build("mixtral"), batches()
    with record_routing(model) as record:
        expected = losses(model, inputs)
    router = model.model.layers[0].mlp.gate
    accelerate.hooks.add_hook_to_module(router, accelerate.hooks.ModelHook())
    before = dict(vars(router))
    with onepass.patch("transformers"), replay_routing(model, record) as replay:
        torch.testing.assert_close(losses(model, inputs), expected)
    assert replay.changed == 0 and vars(router) == before


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_copy_of_a_frozen_model_trains_as_the_model(reentrant):
    """As a reference model that is copied while it is recorded, with gradients enabled."""

    def trained(model):
        model.train().requires_grad_().zero_grad()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model(input_ids=ids, labels=ids).loss.backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    model, (ids, other) = build("qwen3_moe").requires_grad_(False), batches(2)
    with record_routing(model) as record:
        model(input_ids=other)
        copied, loaded = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        model(input_ids=ids)
    assert len(record) == 2
    expected = trained(model)
    assert all(same(trained(each), expected) for each in (copied, loaded))


def test_passes_of_a_frozen_model_are_not_kept():
    """Without gradients of the outputs there is no backward that a pass would be kept for."""
    model, (ids, other) = build("qwen3_moe").requires_grad_(False), batches(2)
    with record_routing(model) as record:
        (watch,) = {hook for hook in model._forward_hooks.values() if type(hook).__name__ == "Watch"}
        for batch in (ids, other):
            model(input_ids=batch)
            assert not watch.choices.pending_passes
    assert len(record) == 2


def test_a_copy_is_not_followed():
    """As that of the weights' average, which is made while the model trains. It can be followed itself."""
    model, (ids, other) = build("deepseek_v3").eval(), batches(2)
    with record_routing(model) as record:
        model(input_ids=ids)
    expected = copy.deepcopy(model)(input_ids=other).logits
    for follow in (record_routing, onepass.moe.count_experts, lambda m: replay_routing(m, record)):
        with follow(model) as followed:
            copied = copy.deepcopy(model)
            assert torch.equal(copied(input_ids=other).logits, expected)
            model(input_ids=ids)
        assert len(record) == 1 and (follow is not record_routing or len(followed) == 1)
        again = copy.deepcopy(copied)
        for each in (copied, again):
            assert torch.equal(each(input_ids=other).logits, expected)
            with record_routing(each) as of_copy:
                each(input_ids=other)
                each(input_ids=ids)
            assert len(of_copy) == 2 and same(of_copy.passes[1], record.passes[0])
            with replay_routing(each, drifted(record)) as replay:
                each(input_ids=ids)
            assert replay.changed > 0
            with onepass.moe.count_experts(each.train()) as counts:
                each(input_ids=ids)
                assert len(counts.counts) == 1
            assert torch.equal(each.eval()(input_ids=other).logits, expected)
            for module in each.modules():
                assert not {"forward", "_onepass_followed"} & set(vars(module))


@pytest.mark.parametrize("compiles", [False, True])
def test_a_copy_is_not_followed_under_a_patch(compiles):
    model, (ids, other) = build("mixtral").eval(), batches(2)
    with onepass.patch("transformers"), torch.no_grad():
        with record_routing(model) as record:
            model(input_ids=ids)
        expected = copy.deepcopy(model)(input_ids=other).logits
        with replay_routing(model, drifted(record)):
            copied = copy.deepcopy(model)
            call = torch.compile(copied, backend="eager") if compiles else copied
            torch.testing.assert_close(call(input_ids=other).logits, expected)
            model(input_ids=ids)
        torch.testing.assert_close(call(input_ids=other).logits, expected)


def test_a_router_with_a_method_of_its_own():
    """Its results would be lost, as routers compute `route_block`."""
    model = build("mixtral")
    router = model.model.layers[1].mlp.gate
    router.forward = partial(router.forward)
    with pytest.raises(TypeError, match=r"^model: expected routers with the methods of their class, got forward of it"):
        record_routing(model).__enter__()
    del router.forward
    router.forward = router.forward  # bound anew
    with record_routing(model) as record:
        losses(model, batches())
    assert len(record) == 1


def test_a_saved_model_is_not_followed():
    model, (ids, other) = build("mixtral").eval(), batches(2)
    with record_routing(model) as record:
        model(input_ids=ids)
    expected = model(input_ids=other).logits
    with replay_routing(model, drifted(record)):
        loaded = pickle.loads(pickle.dumps(model))
        assert torch.equal(loaded(input_ids=other).logits, expected)
    assert torch.equal(loaded(input_ids=other).logits, expected)
    with record_routing(loaded) as again:
        loaded(input_ids=ids)
    assert same(again.passes[0], record.passes[0])


def test_a_method_that_is_kept():
    model = build("mixtral").eval()
    router = model.model.layers[0].mlp.gate
    hidden = torch.randn(4, router.weight.shape[1])
    expected = router(hidden)
    with record_routing(model):
        kept = router.forward
    torch.testing.assert_close(kept(hidden), expected, rtol=0, atol=0)
