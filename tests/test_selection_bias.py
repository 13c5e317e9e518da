"""Balancing without an auxiliary loss: the rule, its effect, counts of micro-batches, a Trainer, two processes."""

import pytest
import torch

import forks
from onepass.moe import count_experts, record_routing, replay_routing, route, update_selection_bias

OF_TWO = """
import os, sys, torch, torch.distributed as dist
from onepass.moe import update_selection_bias
other = os.fork()
rank = 0 if other else 1
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=rank, world_size=2)
counts = torch.tensor([[9, 1, 2, 0], [0, 5, 4, 3]], dtype=torch.int32)
bias = torch.zeros(1, 4)
update_selection_bias(bias, counts[rank], 0.5, dist.group.WORLD)
alone = update_selection_bias(torch.zeros(4), counts[rank], 0.5)
assert bias.tolist() == [[-0.5, 0.0, 0.0, 0.5]], bias
assert alone.tolist() == [[-0.5, 0.5, 0.5, 0.5], [0.5, -0.5, -0.5, 0.0]][rank], alone
assert counts[0].tolist() == [9, 1, 2, 0]
dist.destroy_process_group()
if other:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]))
"""

pytestmark = pytest.mark.usefixtures("one_thread", "eager")


def test_the_rule(device):
    """DeepSeek's: the bias moves by the rate, against the sign of the load less the mean load."""
    g = torch.Generator().manual_seed(0)
    for dtype, of_counts in ((torch.float32, torch.int32), (torch.float64, torch.int64), (torch.float64, torch.int16)):
        bias, counts = torch.randn(9, generator=g).to(dtype), torch.randint(0, 9, (9,), generator=g).to(of_counts)
        counts[-1] += 8 * counts.sum() - 9 * counts[-1] if dtype == torch.float32 else 0  # it has the mean load
        expected = [b + 0.25 * ((c > 0) - (c < 0)) for b, c in zip(
            bias.double().tolist(), (counts.double().mean() - counts.double()).tolist())]  # fmt: skip
        given, before = bias.to(device), counts.clone()
        result = update_selection_bias(given, counts.to(device), 0.25)
        assert result is given and torch.equal(counts, before)
        torch.testing.assert_close(result.cpu(), torch.tensor(expected, dtype=dtype), rtol=0, atol=0)
    assert update_selection_bias(torch.ones(3), torch.zeros(3, dtype=torch.int32), 1).tolist() == [1, 1, 1]
    parameter = torch.nn.Parameter(torch.zeros(2))
    assert update_selection_bias(parameter, torch.tensor([3, 1]), 0.5).tolist() == [-0.5, 0.5]


def test_a_bias_that_is_a_dtensor(sharded):
    """As FSDP2 makes it where the bias is a parameter."""
    bias, counts = sharded(torch.zeros(4)), torch.tensor([9, 1, 2, 0])
    assert update_selection_bias(bias, counts, 0.5) is bias
    assert bias.full_tensor().tolist() == [-0.5, 0.5, 0.5, 0.5]


def test_it_balances_skewed_data():
    """200 steps; the loads of the next batches are then within 1.2 of the mean, from more than 2.5 times."""
    g = torch.Generator().manual_seed(0)
    skew, bias, found = torch.linspace(-1.5, 1.5, 8), torch.zeros(8), []
    for step in range(220):
        routing = route(torch.randn(2048, 8, generator=g) + skew, 2, score="sigmoid", selection_bias=bias)
        found.append(routing.counts.max() / routing.counts.float().mean())
        if step < 200:
            update_selection_bias(bias, routing.counts, 0.004)
    assert found[0] > 2.5 and max(found[200:]) < 1.2


@forks.GROUP
def test_two_processes(tmp_path):
    both = forks.run(OF_TWO, tmp_path / "store", folder=tmp_path)
    assert both.returncode == 0, both.stderr


BAD = {
    "bias: expected a floating-point tensor, got torch.int64": (torch.zeros(3).long(), torch.ones(3).int(), 1.0),
    "bias: expected a floating-point tensor, got torch.float8_e5m2": (
        torch.zeros(3).to(torch.float8_e5m2),
        torch.ones(3).int(),
        1.0,
    ),
    "bias: expected a tensor that is not expanded, got strides (0,)": (
        torch.zeros(1).expand(3),
        torch.ones(3).int(),
        1.0,
    ),
    "bias: expected float32 or float64, got torch.bfloat16, in which small updates are lost": (
        torch.zeros(3).bfloat16(),
        torch.ones(3).int(),
        1.0,
    ),
    "bias: expected one number for each expert, got shape ()": (torch.tensor(1.0), torch.ones(3).int(), 1.0),
    "bias: expected one number for each expert, got shape (0,)": (torch.zeros(0), torch.ones(3).int(), 1.0),
    "counts: expected a tensor of integers, got torch.float32": (torch.zeros(3), torch.ones(3), 1.0),
    "counts: expected device cpu, that of the bias, got meta": (torch.zeros(3), torch.ones(3).int().to("meta"), 1.0),
    "counts: expected shape (3,), got (4,)": (torch.zeros(3), torch.ones(4).int(), 1.0),
    "rate: expected a finite number of at least 0, got -1": (torch.zeros(3), torch.ones(3).int(), -1),
    "rate: expected a number, got '1'": (torch.zeros(3), torch.ones(3).int(), "1"),
}


@pytest.mark.parametrize("message", BAD)
def test_one_clear_error(message):
    with pytest.raises((TypeError, ValueError)) as error:
        update_selection_bias(*BAD[message])
    assert message in str(error.value)


@pytest.fixture(scope="module")
def models():
    """Tiny models of transformers, by family."""
    pytest.importorskip("transformers", "5.13")
    import replay_cases

    return replay_cases


def test_counts_of_micro_batches(models):
    """Until the update, those of all passes that train, each once; replayed ones as the keyword says."""
    model, inputs = models.build("deepseek_v3"), models.batches(3)
    with record_routing(model) as record:
        models.losses(model, inputs)
    chosen = [torch.cat(p).long().flatten().bincount(minlength=4) for p in record.passes]
    other = models.drifted(record)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    router = model.model.layers[1].mlp.gate
    before = router.e_score_correction_bias.clone()
    with count_experts(model) as counts, count_experts(model, replayed=False) as natural:
        assert counts.counts == []
        for loss in models.losses(model, inputs[:2]):
            loss.backward()
        assert counts.counts[0].tolist() == natural.counts[0].tolist() == (chosen[0] + chosen[1]).tolist()
        with replay_routing(model, other[2:]):
            models.losses(model, inputs[2:])[0].backward()
        replayed = torch.cat(other.passes[2]).long().flatten().bincount(minlength=4)
        assert counts.counts[0].tolist() == (chosen[0] + chosen[1] + replayed).tolist()
        assert natural.counts[0].tolist() == (chosen[0] + chosen[1]).tolist()
        total = counts.counts[0].clone()
        counts.update(0.125)
        assert counts.counts == [] and len(natural.counts) == 1
        model.eval()
        models.losses(model, inputs)
        assert counts.counts == []
        counts.update(0.125)
    expected = update_selection_bias(before.clone(), total, 0.125)
    assert torch.equal(router.e_score_correction_bias, expected) and not torch.equal(expected, before)
    with pytest.raises(TypeError, match="model: expected routers with a selection bias, got MixtralForCausalLM"):
        count_experts(models.build("mixtral")).__enter__()


@pytest.mark.parametrize("how", ["cast", "assigned"])
def test_a_bias_that_is_replaced(how, models):
    """A cast and a state that is assigned replace the tensor of the bias."""
    model, inputs = models.build("deepseek_v3"), models.batches()
    router = model.model.layers[1].mlp.gate
    with count_experts(model) as counts:
        if how == "cast":
            model.bfloat16()
            router.e_score_correction_bias = router.e_score_correction_bias.float()
        else:
            model.load_state_dict({name: t.clone() for name, t in model.state_dict().items()}, assign=True)
        models.losses(model, inputs)
        before, loads = router.e_score_correction_bias.clone(), counts.counts[0].clone()
        counts.update(0.5)
    expected = update_selection_bias(before.clone(), loads, 0.5)
    assert torch.equal(router.e_score_correction_bias, expected) and not torch.equal(expected, before)


def test_a_trainer_updates_after_each_step(models, tmp_path, monkeypatch):
    import transformers

    from onepass.integrations import SelectionBiasCallback

    model = models.build("glm4_moe")
    router, seen = model.model.layers[1].mlp.gate, []
    before = router.e_score_correction_bias.clone()

    def spy(bias, counts, rate, group):
        seen.append(counts.sum().item())
        return update_selection_bias(bias, counts, rate, group)

    monkeypatch.setattr("onepass.moe.selection_bias.update_selection_bias", spy)
    args = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=3, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        report_to="none", save_strategy="no", learning_rate=0.0, use_cpu=True, gradient_checkpointing=True,
    )  # fmt: skip
    data = [{"input_ids": ids, "labels": ids} for batch in models.batches(1) * 6 for ids in batch]
    transformers.Trainer(model, args, train_dataset=data, callbacks=[SelectionBiasCallback(0.125)]).train()
    assert seen == [2 * 2 * models.S * 2] * 3  # micro-batches, sequences, tokens, experts
    moved = (router.e_score_correction_bias - before) / 0.125
    assert moved.abs().max() >= 1
    torch.testing.assert_close(moved, moved.round(), rtol=0, atol=1e-5)
    assert "forward" not in vars(router)
    with pytest.raises(ValueError, match="rate"):
        SelectionBiasCallback(-1.0)
    two = [SelectionBiasCallback(0.125), SelectionBiasCallback(0.25)]
    with pytest.raises(ValueError, match="got two"):
        transformers.Trainer(model, args, train_dataset=data, callbacks=two).train()
    assert "forward" in vars(router)  # tokens are still counted for the run that ended in an error
    seen.clear()
    transformers.Trainer(model, args, train_dataset=data, callbacks=[SelectionBiasCallback(0.125)]).train()
    assert len(seen) == 3 and "forward" not in vars(router)
