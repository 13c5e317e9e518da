"""Small models of transformers, attached and as they are, and the comparison of a step of both."""

import warnings
from importlib import import_module

import pytest
import torch

import onepass

transformers = pytest.importorskip("transformers")
lazy_models = import_module("lazy_models")
VOCAB = lazy_models.VOCAB
TOLERANCE = 1e-6  # of the loss, and of the largest gradient


def warned(caught):
    return [str(w.message) for w in caught if issubclass(w.category, onepass.MaterializedLogits)]


def both(model, given, attach=onepass.attach, theirs=None):
    """`lazy_models.step` of the attached model, that of the model as it is, and the warnings of the former."""
    theirs = theirs or lazy_models.step(model, given)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with attach(model):
            ours = lazy_models.step(model, given)
    return ours, theirs, warned(caught)


def difference(ours, theirs):
    """Of the losses, relative, and of the gradients, relative to the largest one of the model."""
    (out, gradients), (expected, of_expected) = ours, theirs
    assert gradients.keys() == of_expected.keys()
    largest = max(g.abs().max() for g in of_expected.values())
    of_loss = (out.loss - expected.loss).abs() / expected.loss.abs()
    return max(of_loss, *[(g - of_expected[n]).abs().max() / largest for n, g in gradients.items()]).item()


def assert_same(ours, theirs, tolerance=TOLERANCE):
    assert difference(ours, theirs) <= tolerance


def is_lazy(out):
    return isinstance(out.logits, onepass.LinearLogits) and out.logits.tensor is None


def state(model):
    return {name: {k: id(v) for k, v in m.__dict__.items()} for name, m in model.named_modules()}


def made(kind, name, **changes):
    """A small model; ``changes`` are made to its configuration."""
    cls = getattr(transformers, name)
    config = transformers.AutoConfig.for_model(kind)
    lazy_models.shrink(config)
    for key, value in changes.items():
        setattr(config, key, value)
    torch.manual_seed(0)
    return cls(config).float().eval()


def llama(**changes):
    return made("llama", "LlamaForCausalLM", **changes)
