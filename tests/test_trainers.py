"""TRL's trainers with and without the patch: the same losses and gradients, from our functions."""

from collections import Counter
from importlib import import_module

import pytest
import torch

import onepass
from onepass.integrations.patching import LIBRARIES, plan

trl = pytest.importorskip("trl")
pytest.importorskip("datasets")
trainers = import_module("trainers")

VERSION = tuple(int(part) for part in trl.__version__.split(".")[:2])
HEAD, PAIR = {"ChunkedLogProbFunction"}, {"selective_log_softmax", "entropy_from_logits"}
# What each trainer of this version calls.
if VERSION >= (1, 16):
    USED = dict.fromkeys(("sft", "dpo", "kto", "grpo", "rloo"), HEAD) | {"distillation": {"_chunked_divergence_loss"}}
elif VERSION >= (1, 10):
    USED = {"sft": {"_chunked_cross_entropy_loss"}, "dpo": PAIR, "grpo": PAIR}
else:
    USED = {"sft": {"ForCausalLMLoss", "entropy_from_logits"}, "dpo": PAIR, "grpo": PAIR}


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    """As a user's CPU has it."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.fixture
def calls(monkeypatch):
    """How often each replacement was called."""
    count = Counter()

    def counted(name, function):
        def call(*args, **kwargs):
            count[name] += 1
            return function(*args, **kwargs)

        if not isinstance(function, type):
            return call
        if not hasattr(function, "apply"):  # a class that only answers `isinstance`
            return function
        return type(name, (), {"apply": staticmethod(counted(name, function.apply))})

    for library in LIBRARIES:
        module = import_module(f"onepass.integrations.{library}")
        targets = [t._replace(replacement=counted(t.name, t.replacement)) for t in module.TARGETS]
        monkeypatch.setattr(module, "TARGETS", targets)
    return count


def assert_same(ours, theirs):
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", USED)
def test_five_steps(name, tmp_path, calls):
    theirs = trainers.train(getattr(trainers, name), tmp_path / "theirs")
    assert not calls and len(theirs) == trainers.STEPS
    with onepass.patch() as patched:
        ours = trainers.train(getattr(trainers, name), tmp_path / "ours")
    assert_same(ours, theirs)
    assert len({norm for _, norm in ours}) == trainers.STEPS  # it learns
    assert all(calls[used] >= trainers.STEPS for used in USED[name]), calls
    # Every place holds its original again.
    assert patched.replaced and set(patched.replaced) <= set(plan().replaced)


# Inductor would take a minute, and changes nothing about what is traced.
OPTIONS = [
    {"gradient_checkpointing": True},
    pytest.param({"torch_compile": True, "torch_compile_backend": "aot_eager", "max_steps": 2},
                 marks=pytest.mark.exhaustive),
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: next(iter(o)))
def test_checkpointing_and_compile(options, tmp_path, calls):
    as_it_is = {name: value for name, value in options.items() if "compile" not in name}  # a compiler takes long
    theirs = trainers.train(trainers.sft, tmp_path / "theirs", **as_it_is)
    torch.compiler.reset()
    with onepass.patch():
        ours = trainers.train(trainers.sft, tmp_path / "ours", **options)
    assert_same(ours, theirs)
    assert calls
