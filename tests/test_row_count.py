"""The number of valid rows that is known before a linear head runs: `onepass.logits.valid_rows`."""

from importlib import import_module

import pytest
import torch

import onepass
from onepass.integrations import lazy_logits
from onepass.logits.valid_rows import RowCount, expecting, valid_rows

transformers = pytest.importorskip("transformers")
of_transformers = import_module("onepass.integrations.transformers")
V, H = 29, 8
LABELS = {
    "some": lambda t: t.masked_fill(torch.arange(t.numel(), device=t.device).view_as(t) % 3 == 0, -100),
    "all": lambda t: t,
    "none": lambda t: torch.full_like(t, -100),
}


def batch(device):
    g = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(*shape, generator=g).to(device).requires_grad_() for shape in ((2, 6, H), (V, H)))
    return hidden, weight, torch.randint(V, (2, 6), generator=g).to(device)


def step(hidden, weight, labels, **options):
    """The patched loss of transformers and its gradients."""
    logits = onepass.LinearLogits(hidden, weight)
    loss = of_transformers.ForCausalLMLoss(logits, labels, V, **options)
    return loss, *torch.autograd.grad(loss, (hidden, weight))


@pytest.fixture
def reads(monkeypatch):
    """The numbers that were known."""
    found, read = [], RowCount.read
    monkeypatch.setattr(RowCount, "read", lambda self: found.append(read(self)) or found[-1])
    return found


@pytest.mark.parametrize("name", LABELS)
def test_counted_labels(device, reads, name):
    hidden, weight, labels = batch(device)
    labels = LABELS[name](labels)
    expected = step(hidden, weight, labels)
    assert reads == []
    token = lazy_logits._counted.set(lazy_logits.start_count(labels))
    try:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("error")  # which does not count an event
        found = step(hidden, weight, labels)
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
        lazy_logits._counted.reset(token)
    assert reads == [int((labels[:, 1:] != -100).sum())]
    for ours, theirs in zip(found, expected):
        assert torch.equal(ours, theirs) or (ours.isnan().all() and theirs.isnan().all())


def test_a_single_valid_row(device, reads):
    hidden, weight, labels = batch(device)
    only = torch.full_like(labels, -100)
    only[1, 3] = labels[1, 3]
    loss, *found = step(hidden, weight, only)
    expected = torch.nn.functional.cross_entropy(hidden[1, 2:3] @ weight.T, only[1, 3:4])
    for ours, theirs in zip((loss, *found), (expected, *torch.autograd.grad(expected, (hidden, weight)))):
        torch.testing.assert_close(ours, theirs)


def changed(labels):
    labels[0, 1:3] = -100
    return {"labels": labels}


OTHERS = {
    "written to": changed,
    "a copy": lambda labels: {"labels": labels.clone()},
    "another ignore_index": lambda labels: {"labels": labels, "ignore_index": 3},
    "shifted already": lambda labels: {"labels": labels, "shift_labels": labels},
}


@pytest.mark.parametrize("name", OTHERS)
def test_labels_that_were_not_counted(device, reads, name):
    hidden, weight, labels = batch(device)
    token = lazy_logits._counted.set(lazy_logits.start_count(labels))
    try:
        given = OTHERS[name](labels)
        found = step(hidden, weight, **given)
    finally:
        lazy_logits._counted.reset(token)
    assert reads == []
    for ours, theirs in zip(found, step(hidden, weight, **given)):
        assert torch.equal(ours, theirs)


def test_a_patched_model_counts_its_labels(reads, monkeypatch):
    """Before its layers run, and for no other forward."""
    config = transformers.LlamaConfig(
        vocab_size=V, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config)
    labels = LABELS["some"](torch.arange(12).view(2, 6))
    order, begin = [], RowCount.__init__
    monkeypatch.setattr(RowCount, "__init__", lambda self, *given: order.append("count") or begin(self, *given))
    model.model.register_forward_pre_hook(lambda *_: order.append("layers"))
    expected = model(input_ids=labels.clamp(0), labels=labels).loss
    with onepass.patch("transformers"):
        loss = model(input_ids=labels.clamp(0), labels=labels).loss
        assert order == ["layers", "count", "layers"] and reads == [8]
        with torch.no_grad():
            model(input_ids=labels.clamp(0), labels=labels)
        model(input_ids=labels.clamp(0))
    assert len(order) == 5 and lazy_logits._counted.get() is None
    torch.testing.assert_close(loss, expected)


def test_a_wrong_number_is_seen_in_debug_mode(device, monkeypatch):
    monkeypatch.setattr("onepass.core.checks.DEBUG", True)
    mask = torch.arange(8, device=device) % 2 == 0
    with expecting(RowCount(mask[1:], 8)), pytest.raises(RuntimeError, match="row_mask: expected 3 valid rows, got 4"):
        valid_rows(mask)
    with expecting(RowCount(mask[1:], 7)):  # another number of rows
        assert valid_rows(mask).tolist() == [0, 2, 4, 6]
