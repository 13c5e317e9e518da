"""Recorded experts as the arrays of engines, and records and arrays that are refused."""

import numpy
import pytest
import torch

from onepass.moe import RoutingRecord, record_routing, replay_routing
from replay_cases import B, S, batches, build

transformers = pytest.importorskip("transformers", "5.13")
import lazy_models  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


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
        (ValueError, "passes: expected ids from -1 to 32767, got -5",
         lambda: RoutingRecord([[torch.tensor([[-5]], dtype=torch.int16)]])),
        (ValueError, r"record: expected as many layers and experts per token in each forward pass, got \[\(1, 1\), "
         r"\(1, 2\)\]", lambda: RoutingRecord([[torch.zeros(2, n).short()] for n in (1, 2)]).to_array()),
        (ValueError, "attention_mask: expected a sequence or more, got none", lambda: record.to_array(mask[:0])),
        (TypeError, "unsupported operand", lambda: record + 1),
        (TypeError, "arrays: expected integers", lambda: RoutingRecord.from_array(torch.zeros(1, 1, 1))),
        (ValueError, r"arrays: expected shape \(tokens", lambda: RoutingRecord.from_array([[1]])),
        (ValueError, "arrays: expected 2, one for", lambda: RoutingRecord.from_array(
            [torch.zeros(1, 1, 1).long()], mask)),
        (ValueError, "at most 5 rows for sequence 0, which has 7 tokens, got 6", lambda: RoutingRecord.from_array(
            [torch.zeros(6, 1, 1).long()] * 2, mask, starts=2)),
        (ValueError, "starts: expected at most 7, the tokens of sequence 0, got 8", lambda: RoutingRecord.from_array(
            [torch.zeros(0, 1, 1).long()] * 2, mask, starts=8)),
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
    with record_routing(router), pytest.raises(TypeError, match=r"recognized, got AfmoeTokenChoiceRouter.forward\("):
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
