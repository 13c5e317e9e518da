"""The experts of models of transformers, recorded and replayed: losses, gradients, checkpointing, arrays of engines."""

import contextlib
import copy
import gc
import pickle
from functools import partial

import numpy
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import onepass
from onepass.moe import RoutingRecord, record_routing, replay_routing

transformers = pytest.importorskip("transformers", "5.13")
import lazy_models  # noqa: E402

FAMILIES = {
    "qwen3_moe": "Qwen3MoeForCausalLM", "mixtral": "MixtralForCausalLM", "deepseek_v3": "DeepseekV3ForCausalLM",
    "gpt_oss": "GptOssForCausalLM", "glm4_moe": "Glm4MoeForCausalLM",
}  # fmt: skip
# Of other forms: the weights over all experts, a bias that the block passes, and tokens in two dimensions.
OTHERS = {"llama4": "Llama4ForCausalLM", "minimax_m2": "MiniMaxM2ForCausalLM", "afmoe": "AfmoeForCausalLM"}
every_family = pytest.mark.parametrize("family", FAMILIES)
B, S = 2, 7
_built = {}


def build(family):
    """A model in which choices are far apart. DeepSeek-V3 and GLM-4 have a first layer without experts."""
    if family not in _built:
        cls = getattr(transformers, (FAMILIES | OTHERS)[family])
        config = cls.config_class()
        lazy_models.shrink(config)
        config.num_key_value_heads = 4  # of DeepSeek-V3, as many as there are heads
        torch.manual_seed(1)
        model = cls(config).float()
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "correction_bias" in name or name.endswith(("gate.weight", "router.weight")):
                tensor.data.normal_(std=0.5)
        _built[family] = model.train()
    return copy.deepcopy(_built[family])


pytestmark = pytest.mark.usefixtures("one_thread")


def batches(n=1):
    g = torch.Generator().manual_seed(3)
    return [torch.randint(3, lazy_models.VOCAB, (B, S - i), generator=g) for i in range(n)]


def losses(model, inputs):
    return [model(input_ids=ids, labels=ids, use_cache=False).loss for ids in inputs]


def gradients(model):
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


def same(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b))


def drifted(record):
    """Another choice of every layer, which no router would make."""

    def other(ids):
        g = torch.Generator().manual_seed(len(ids))
        return torch.rand(len(ids), 4, generator=g).argsort(-1)[:, : ids.shape[-1]].short()

    return RoutingRecord([[other(ids) for ids in layers] for layers in record.passes])


def backward(found, order):
    if order == "joint":
        sum(found).backward()
    for n in {"first to last": range(len(found)), "last to first": reversed(range(len(found)))}.get(order, ()):
        found[n].backward()


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


def close(got, expected):
    """As sums of micro-batches in another order are."""
    assert len(got) == len(expected)
    for a, b in zip(got, expected):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-7)


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


def test_padding_packing_and_missing_positions():
    """Arrays of an engine in a batch with padding on either side, or packed, take their places; others are -1."""
    model = build("qwen3_moe").eval()
    g = torch.Generator().manual_seed(0)
    sequences = [torch.randint(3, lazy_models.VOCAB, (n,), generator=g) for n in (7, 4, 1)]
    arrays = []
    for ids in sequences:
        with record_routing(model) as record:
            model(input_ids=ids[None])
        arrays.append(record.to_array())
        assert arrays[-1].shape == (len(ids) - 1, 2, 2) and arrays[-1].dtype == numpy.int16
    assert numpy.array_equal(record.to_array(dtype=torch.uint8), arrays[-1].astype(numpy.uint8))
    for left in (True, False):
        ids, mask = torch.zeros(3, 7, dtype=torch.long), torch.zeros(3, 7, dtype=torch.long)
        for b, tokens in enumerate(sequences):
            at = slice(7 - len(tokens), 7) if left else slice(len(tokens))
            ids[b, at], mask[b, at] = tokens, 1
        with record_routing(model) as record:
            model(input_ids=ids, attention_mask=mask)
        assert all(numpy.array_equal(a, b) for a, b in zip(record.to_array(mask), arrays, strict=True))
        given = RoutingRecord.from_array(arrays, mask)
        assert all(numpy.array_equal(a, b) for a, b in zip(given.to_array(mask), arrays, strict=True))
        for layer, recorded in zip(given.passes[0], record.passes[0]):
            told = layer.view(3, 7, 2)
            for b, tokens in enumerate(sequences):
                at = slice(7 - len(tokens), 6) if left else slice(len(tokens) - 1)
                assert torch.equal(told[b, at], recorded.view(3, 7, 2)[b, at])
            assert (told == -1).sum() == 2 * (21 - sum(len(tokens) - 1 for tokens in sequences))
        with replay_routing(model, given) as replay:
            model(input_ids=ids, attention_mask=mask)
        assert replay.changed == 0
    lengths = [len(tokens) for tokens in sequences]
    position_ids = torch.cat([torch.arange(n) for n in lengths])[None]
    with record_routing(model) as record:
        model(input_ids=torch.cat(sequences)[None], position_ids=position_ids)
    packed = record.to_array(lengths=lengths)
    assert all(numpy.array_equal(a, b) for a, b in zip(packed, arrays, strict=True))
    given = RoutingRecord.from_array([a[2:] for a in packed[:2]], lengths=lengths[:2], starts=2)
    told = given.passes[0][1]
    assert (told == -1).all(-1).nonzero().view(-1).tolist() == [0, 1, 6, 7, 8, 10]
    assert torch.equal(told[2:6], record.passes[0][1][2:6]) and torch.equal(told[9], record.passes[0][1][9])


def test_experts_of_generated_tokens():
    """The passes of the prompt and of each further token are joined, and replayed in one pass of the whole."""
    model = build("qwen3_moe").eval()
    ids, mask = batches()[0], torch.ones(B, S, dtype=torch.long)
    ids[1, :3], mask[1, :3] = 0, 0
    with record_routing(model) as record:
        out = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=4, min_new_tokens=4, do_sample=False,
                             use_cache=True)  # fmt: skip
    assert len(record) == 4
    mask = torch.cat([mask, torch.ones(B, 4, dtype=torch.long)], 1)
    arrays = record.to_array(mask)
    assert [a.shape for a in arrays] == [(S + 3, 2, 2), (S, 2, 2)]
    with replay_routing(model, RoutingRecord.from_array(arrays, mask)) as replay, record_routing(model) as again:
        model(input_ids=out, attention_mask=mask)
    assert replay.changed == 0
    assert all(numpy.array_equal(a, b) for a, b in zip(again.to_array(mask), arrays))


def test_arrays_of_all_layers_of_the_decoder():
    """Engines return rows, of zeros, for layers without experts too."""
    model, inputs = build("deepseek_v3").eval(), batches()
    with record_routing(model) as record:
        expected = losses(model, inputs)
    whole = RoutingRecord([[torch.zeros_like(record.passes[0][0]), *record.passes[0]]])
    with replay_routing(model, whole):
        assert same(losses(model, inputs), expected)
    with pytest.raises(ValueError, match=r"record: expected 1 layers, those with a router, or all.* got 0"):
        replay_routing(model, RoutingRecord([[]])).__enter__()


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


def test_a_record_of_another_number_of_experts():
    model, (ids,) = build("mixtral").eval(), batches()
    with record_routing(model) as record:
        model(input_ids=ids)
    other = RoutingRecord([[ids_.view(len(ids_) // 2, -1) for ids_ in p] for p in record.passes])
    with replay_routing(model, other), pytest.raises(ValueError, match=r"record: expected 14 tokens of 2 experts"):
        model(input_ids=ids)


def test_arrays_that_torch_does_not_take():
    array = numpy.arange(24).reshape(4, 2, 3)
    expected = RoutingRecord.from_array(torch.tensor(array)).passes[0]
    for same in (array.astype(">i4"), array[::-1].copy()[::-1], array.astype("uint64"), numpy.asfortranarray(array)):
        found = RoutingRecord.from_array(same).passes[0]
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_errors():
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=11))  # fmt: skip
    unknown = build("mixtral")
    unknown.model.layers[1].mlp.gate = type("MyRouter", (torch.nn.Linear,), {})(32, 4)
    model, (ids,) = build("mixtral").eval(), batches()
    with record_routing(model) as record:
        model(input_ids=ids)
    mask = torch.ones(B, S)
    for error, match, call in (
        (TypeError, "which has none|LlamaForCausalLM", lambda: record_routing(llama).__enter__()),
        (TypeError, "got MyRouter in MixtralSparseMoeBlock", lambda: replay_routing(unknown, record).__enter__()),
        (TypeError, "model: expected a model of transformers, got 3", lambda: record_routing(3).__enter__()),
        (TypeError, "record: expected a RoutingRecord, got", lambda: replay_routing(model, [1]).__enter__()),
        (ValueError, "dtype: expected torch.int16 or", lambda: record.to_array(mask, dtype=torch.int32)),
        (ValueError, "attention_mask: expected 7 or 8 tokens", lambda: record.to_array(torch.ones(B, 9))),
        (TypeError, "attention_mask: expected a tensor", lambda: record.to_array([1])),
        (ValueError, "lengths: expected at most 15 tokens, got 16", lambda: record.to_array(lengths=[9, 7])),
        (ValueError, "lengths: expected None beside", lambda: record.to_array(mask, lengths=[9, 7])),
        (ValueError, "at least one forward pass", lambda: RoutingRecord().to_array()),
        (ValueError, "record: expected as many tokens and experts in each layer of a forward pass, got the shapes",
         lambda: RoutingRecord([[torch.zeros(n, 1).short() for n in (0, 2)]]).to_array()),
        (TypeError, "passes: expected integer tensors", lambda: RoutingRecord([[torch.zeros(2, 1)]])),
        (TypeError, "passes: expected integer tensors", lambda: RoutingRecord([[torch.zeros(2).long()]])),
        (ValueError, "passes: expected ids from -1 to 32767, got 0 to 65537",
         lambda: RoutingRecord([[torch.tensor([[0, 65537]])]])),
        (ValueError, "passes: expected ids from -1 to 32767, got 40000",
         lambda: RoutingRecord([[torch.tensor([[40000]], dtype=torch.uint16)]])),
        (TypeError, "unsupported operand", lambda: record + 1),
        (TypeError, "arrays: expected integers", lambda: RoutingRecord.from_array(torch.zeros(1, 1, 1))),
        (ValueError, r"arrays: expected shape \(tokens", lambda: RoutingRecord.from_array([[1]])),
        (ValueError, "arrays: expected 2, one for", lambda: RoutingRecord.from_array(
            [torch.zeros(1, 1, 1).long()], mask)),
        (ValueError, "at most 5 rows for sequence 0, which has 7 tokens, got 6", lambda: RoutingRecord.from_array(
            [torch.zeros(6, 1, 1).long()] * 2, mask, starts=2)),
        (ValueError, "starts: expected 2 numbers", lambda: RoutingRecord.from_array(
            [torch.zeros(6, 1, 1).long()] * 2, mask, starts=[2])),
        (ValueError, "arrays: expected ids from -1 to 32767, got 0 to 70000",
         lambda: RoutingRecord.from_array([[[0, 70000]]])),
        (ValueError, "arrays: expected ids from -1 to 32767, got -2", lambda: RoutingRecord.from_array([[[-2]]])),
        (ValueError, "arrays: expected ids from -1 to 32767, got 18446744073709551615",
         lambda: RoutingRecord.from_array(numpy.full((1, 1, 1), 2**64 - 1, dtype="uint64"))),
        (TypeError, "arrays: expected integers", lambda: RoutingRecord.from_array(None)),
        (TypeError, "arrays: expected integers", lambda: RoutingRecord.from_array(["x"], torch.ones(1, 2))),
        (TypeError, "arrays: expected one for each sequence", lambda: RoutingRecord.from_array(3, torch.ones(1, 2))),
        (TypeError, "starts: expected an int", lambda: RoutingRecord.from_array([[[1]]], starts=1.5)),
        (TypeError, "starts: expected an int", lambda: RoutingRecord.from_array([[[1]]], starts=None)),
        (TypeError, "starts: expected an int", lambda: RoutingRecord.from_array([[[1]]], starts=[True])),
        (TypeError, "lengths: expected a sequence", lambda: RoutingRecord.from_array([[[[1]]]], lengths=3)),
        (ValueError, "lengths: expected 0 or more, got -2", lambda: RoutingRecord.from_array([[[[1]]]], lengths=[-2])),
        (TypeError, "lengths: expected an int", lambda: record.to_array(lengths=[1.5])),
        (ValueError, "attention_mask: expected as many tokens in each of 5",
         lambda: record.to_array(torch.ones(5, 2))),
        (ValueError, "arrays: expected the same layers", lambda: RoutingRecord.from_array(
            [torch.zeros(6, n, 1).long() for n in (1, 2)], mask)),
    ):  # fmt: skip
        with pytest.raises(error, match=match):
            call()
    router = build("afmoe").model.layers[1].mlp.router
    with record_routing(router), pytest.raises(TypeError, match=r"recognised, got AfmoeTokenChoiceRouter.forward\("):
        router(torch.randn(3, 32), torch.zeros(4))
    free = RoutingRecord.from_array([a[:-1] for a in record.to_array(mask)], mask)
    with pytest.raises(ValueError, match=r"dtype: expected torch.int16 for ids below 0"):
        free.to_array(mask, dtype=torch.uint8)
    with (
        replay_routing(model, record),
        pytest.raises(ValueError, match=r"record: expected 12 tokens of 2 experts.* got .14, 2."),
    ):
        model(input_ids=ids[:, 1:])
    with replay_routing(model, record + record[:0]):
        model(input_ids=ids)
        with pytest.raises(ValueError, match="every forward pass of the model, got 1 and another"):
            model(input_ids=ids)
