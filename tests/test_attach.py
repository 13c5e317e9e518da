"""When the logits of an attached model are lazy, and how it is restored, copied, wrapped and nested."""

import copy
import inspect
import io
import pickle
import threading
from contextlib import nullcontext
from functools import partial, wraps
from importlib import import_module
from types import MethodType

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map

import onepass
from attach_cases import assert_same, is_lazy, llama, state

pytest.importorskip("transformers")
lazy_models = import_module("lazy_models")

pytestmark = pytest.mark.usefixtures("eager")


@pytest.mark.parametrize("attach", [onepass.attach, lambda _: onepass.patch("transformers")], ids=["attach", "patch"])
def test_tensors_where_nothing_trains(attach):
    """Evaluation, generation and forwards without labels return tensors."""
    model = llama()
    given = lazy_models.inputs(model)
    ids = given["input_ids"]
    logits, loss = model(ids).logits, model(**given).loss
    text = model.generate(ids, max_new_tokens=4, do_sample=False)
    with attach(model):
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                out = model(**given)
            assert type(out.logits) is torch.Tensor
            torch.testing.assert_close((out.loss, out.logits), (loss.detach(), logits.detach()))
        out = model(ids)
        assert type(out.logits) is torch.Tensor and out.logits.requires_grad and out.loss is None
        assert model.generate(ids, max_new_tokens=4, do_sample=False).equal(text)
        assert is_lazy(model(**given))
        assert is_lazy(model(ids, labels=ids)) and is_lazy(model(ids, None, None, None, None, ids))
        assert type(model.lm_head(torch.zeros(1, 32, requires_grad=True))) is torch.Tensor
    assert type(model(**given).logits) is torch.Tensor


class OtherCrossEntropy(torch.autograd.Function):
    """The sum over all labels, of tensors alone, as other libraries compute it."""

    @staticmethod
    def forward(ctx, logits, labels):
        grad = logits.detach().softmax(-1)
        ctx.save_for_backward(grad.scatter_add(-1, labels.unsqueeze(-1), -torch.ones_like(grad)))
        return -logits.detach().log_softmax(-1).gather(-1, labels.unsqueeze(-1)).sum()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0], None


def other_cross_entropy(input, target, ignore_index=-100, reduction="mean", **options):
    kept = target != ignore_index
    return OtherCrossEntropy.apply(input, target.where(kept, 0)) / kept.sum()


def wrapped(input, target, ignore_index=-100, reduction="mean", **options):
    return other_cross_entropy(input, target, ignore_index)


OF_OTHERS = {
    "its own": other_cross_entropy,
    "a wrapper": wraps(torch.nn.functional.cross_entropy)(wrapped),  # with the `__module__` of torch's function
    "a callable": partial(other_cross_entropy),
}


@pytest.mark.parametrize("of_another", OF_OTHERS)
@pytest.mark.parametrize("attach", [onepass.attach, lambda _: onepass.patch("transformers")], ids=["attach", "patch"])
def test_a_cross_entropy_of_another_library(attach, of_another, monkeypatch):
    """It takes tensors only. A loss that is added to it would hide that it lost its gradient."""
    model = llama()
    given = lazy_models.inputs(model)
    monkeypatch.setattr(torch.nn.functional, "cross_entropy", OF_OTHERS[of_another])
    reason = "torch.nn.functional.cross_entropy is a function of (test_attach|an unknown module)"
    with pytest.warns(RuntimeWarning, match=reason) if attach is onepass.attach else nullcontext():
        attached = attach(model)
    with attached:
        out = model(**given)
        assert type(out.logits) is torch.Tensor
        (out.loss + model.lm_head.weight.sum()).backward()
        assert model.model.norm.weight.grad.any()
        monkeypatch.undo()
        assert is_lazy(model(**given))


def test_a_failed_forward():
    """The head is as before once a forward has failed."""
    model = llama()
    before = dict(model.lm_head.__dict__)
    given = lazy_models.inputs(model)
    with onepass.attach(model), onepass.patch("transformers"):
        with pytest.raises(RuntimeError):
            model(given["input_ids"], labels=given["labels"], attention_mask=torch.ones(3, 5, 7, 9))
        assert model.lm_head.__dict__ == before
        assert is_lazy(model(**given))


def test_restored():
    """Modules are as before, whether a forward had been replaced on the instance or not."""
    for replaced in (False, True):
        model = llama()
        if replaced:
            model.forward = partial(type(model).forward, model)
        before = state(model)
        attached = onepass.attach(model)
        assert state(model) != before
        during = state(model)
        assert is_lazy(model(**lazy_models.inputs(model)))
        assert state(model) == during
        attached.restore()
        assert state(model) == before
        attached.restore()
        assert state(model) == before


def test_unwrapped_by_accelerate():
    """Accelerate removes the functions around a forward that have a `__wrapped__`, and must not remove ours."""
    from accelerate.utils import extract_model_from_parallel
    from accelerate.utils.operations import convert_outputs_to_fp32

    model = llama()
    with onepass.attach(model):
        model._original_forward = model.forward
        model.forward = MethodType(convert_outputs_to_fp32(model.forward.__func__), model)
        extract_model_from_parallel(model, keep_fp32_wrapper=False)
        assert is_lazy(model(**lazy_models.inputs(model)))


def test_signature():
    """Trainers inspect it for the columns of their data."""
    model = llama()
    before = inspect.signature(model.forward)
    with onepass.attach(model):
        assert inspect.signature(model.forward) == before


def test_nested():
    """A second attachment is an error; the patch beside it changes nothing."""
    model = llama()
    given = lazy_models.inputs(model)
    theirs, before = lazy_models.step(model, given), state(model)
    outer = onepass.attach(model)
    with pytest.raises(ValueError, match=r"^model: expected a model that is not attached"):
        onepass.attach(nn.Sequential(model))
    with onepass.patch("transformers"):
        ours = lazy_models.step(model, given)
        assert is_lazy(ours[0])
        assert_same(ours, theirs)
    outer.restore()
    assert state(model) == before
    with onepass.patch("transformers"), onepass.patch("transformers"), onepass.attach(model):
        ours = lazy_models.step(model, given)
        assert is_lazy(ours[0])
    assert_same(ours, theirs)
    assert state(model) == before and type(model(**given).logits) is torch.Tensor


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies(copied):
    """A copy of an attached model trains its own parameters."""
    model = llama()
    given = lazy_models.inputs(model)
    theirs = lazy_models.step(model, given)
    model.zero_grad()
    with onepass.attach(model):
        other = copied(model)
    ours = lazy_models.step(other, given)
    assert_same(ours, theirs)
    assert all(p.grad is None for p in model.parameters())
    assert type(model(**given).logits) is torch.Tensor


def test_transforms_of_functions():
    """`torch.func` knows tensors only, which the head then returns."""
    model = llama(tie_word_embeddings=False).eval()
    given = lazy_models.inputs(model)
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters):
        return torch.func.functional_call(model, parameters, (), given).loss

    expected = torch.func.grad(loss)(parameters)
    with onepass.attach(model):
        torch.testing.assert_close(torch.func.grad(loss)(parameters), expected)
        assert isinstance(model(**given).logits, onepass.LinearLogits)


@pytest.mark.parametrize("transform", [
    lambda z: torch.func.vmap(lambda row: row.softmax(-1))(z),
    lambda z: torch.func.vmap(lambda row: 2 * row, in_dims=1)(z),
    lambda z: torch.func.grad(lambda t: t.pow(2).sum())(z),
    lambda z: torch.func.vjp(lambda t: t.sin(), z),
])  # fmt: skip
def test_transforms_of_the_logits_of_a_model_take_a_tensor(transform):
    model = llama()
    with onepass.attach(model):
        logits = model(**lazy_models.inputs(model)).logits
        with pytest.raises(TypeError, match=r"^logits: expected a tensor .* call logits.materialize\(\) before"):
            transform(logits)
        transform(logits.materialize())


@pytest.mark.filterwarnings("ignore::onepass.MaterializedLogits")
def test_numbers_files_and_copies_of_logits_are_those_of_a_tensor():
    model = llama()
    given = lazy_models.inputs(model)
    expected = model(**given).logits
    with onepass.attach(model):
        one = model(**given).logits.detach()[:1, :1, :1]
        assert float(one) == pytest.approx(expected[0, 0, 0].item(), abs=1e-5) and int(one) == int(expected[0, 0, 0])
        with pytest.raises((ValueError, RuntimeError), match="convert"):
            float(model(**given).logits)
        for copied in (
            lambda z: pickle.loads(pickle.dumps(z)),
            lambda z: loaded(z),
            lambda z: copy.deepcopy(z.detach()),
            lambda z: copy.copy(z).materialize(),
        ):
            found = copied(model(**given).logits)
            assert type(found) is torch.Tensor
            torch.testing.assert_close(found, expected)
        with pytest.raises(RuntimeError, match="explicitly by the user"):  # torch's, of every result with a gradient
            copy.deepcopy(model(**given).logits)


def loaded(saved):
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file)


def test_metrics_of_a_compiled_model():
    model = llama()
    given = lazy_models.inputs(model)
    with onepass.attach(model, metrics=True) as attached:
        lazy_models.step(model, given)
        expected = attached.metrics()
        torch.compile(model, backend="eager")(**given).loss.backward()
        found = attached.metrics()
    assert found.keys() == expected.keys() and found
    for name, metric in expected.items():
        torch.testing.assert_close(found[name], metric)


def test_max_memory():
    model = llama()
    given = lazy_models.inputs(model)
    with onepass.attach(model, max_memory=2**20):
        out, _ = lazy_models.step(model, given)
        assert out.logits.max_memory == 2**20
    with onepass.attach(model, max_memory=1), pytest.raises(ValueError, match=r"^max_memory: expected at least"):
        lazy_models.step(model, given)
    for wrong in (0, 1.5, "1"):
        with pytest.raises((TypeError, ValueError), match=r"^max_memory: expected"):
            onepass.attach(model, max_memory=wrong)
    with pytest.raises(TypeError, match=r"^model: expected a torch.nn.Module, got"):
        onepass.attach("model")
    assert "forward" not in model.__dict__


def test_mapped_by_pytree():
    """A function of tensors acts on the hidden states: rows, casts and constants are those of the logits."""
    model = llama()
    given = lazy_models.inputs(model)
    with onepass.attach(model):
        expected = model(**given).logits.materialize()
        logits = model(**given).logits
    rows, constant = tree_map(lambda t: t[:1], logits), tree_map(torch.detach, logits)
    assert rows.shape == rows.materialize().shape and torch.equal(rows.materialize(), expected[:1])
    assert rows.requires_grad and not constant.requires_grad and not constant.materialize().requires_grad
    assert torch.equal(constant.materialize(), expected)
    for function in (lambda t: t.argmax(-1), lambda t: t[..., :3], torch.isnan):
        with pytest.raises(TypeError, match=r"logits: expected hidden states, .*call logits.materialize\(\) before"):
            tree_map(function, logits)
    logits.materialize()
    assert torch.equal(tree_map(lambda t: t.argmax(-1), logits), expected.argmax(-1))
    assert torch.equal(tree_map(lambda t: t[:1], logits), expected[:1])


def test_threads():
    """A head stays lazy in the thread whose forward trains, until the last such forward has ended."""
    model = llama()
    given = lazy_models.inputs(model)
    entered, left = threading.Event(), threading.Event()
    found = {}

    def pause(*_):
        if threading.current_thread().name == "first":
            entered.set()
            left.wait(30)

    def forward(name):
        found[name] = type(model(**given).logits)

    with onepass.attach(model):
        hook = model.model.norm.register_forward_pre_hook(pause)
        first = threading.Thread(target=forward, args=("first",), name="first")
        first.start()
        assert entered.wait(30)
        with torch.no_grad():
            forward("evaluation")
        forward("second")
        left.set()
        first.join()
        hook.remove()
    assert issubclass(found["first"], onepass.LinearLogits) and issubclass(found["second"], onepass.LinearLogits)
    assert found["evaluation"] is torch.Tensor and type(model(**given).logits) is torch.Tensor


def test_a_wrapper_around_an_attached_forward():
    """It is kept when the model is restored, and the model's own forward runs within it."""
    model = llama()
    given = lazy_models.inputs(model)
    attached = onepass.attach(model)
    inner, calls = model.forward, []
    model.forward = lambda *args, **kwargs: calls.append(1) or inner(*args, **kwargs)
    assert is_lazy(model(**given))
    attached.restore()
    assert type(model(**given).logits) is torch.Tensor and len(calls) == 2


def test_a_wrapper_around_an_earlier_attachment():
    """It calls the model's own forward, also once the model is attached again."""
    model = llama()
    given = lazy_models.inputs(model)
    before = set(model.__dict__)
    attached = onepass.attach(model)
    inner = model.forward
    model.forward = lambda *args, **kwargs: inner(*args, **kwargs)
    attached.restore()
    with onepass.attach(model):
        assert is_lazy(model(**given))
    assert type(model(**given).logits) is torch.Tensor and set(model.__dict__) == {*before, "forward"}
    attached = onepass.attach(model)
    del model.forward
    attached.restore()
    assert set(model.__dict__) == before


def test_a_copy_can_be_restored():
    model = llama()
    given = lazy_models.inputs(model)
    with onepass.attach(model, metrics=True) as attached:
        other = copy.deepcopy(model)
        lazy_models.step(other, given)
        assert attached.metrics() == {}, "those of the copy"
    with onepass.attach(other):
        assert is_lazy(other(**given))
    assert type(other(**given).logits) is torch.Tensor and "forward" not in other.__dict__


@pytest.mark.parametrize("model", [torch.nn.Linear(2, 2), torch.nn.Sequential()], ids=["a layer", "nothing"])
def test_a_model_without_a_head_is_a_warning(model):
    with pytest.warns(RuntimeWarning, match=r"^model: expected a head .* has no output embedding \[OP006\]$"):
        onepass.attach(model).restore()
