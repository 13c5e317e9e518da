"""Operations that compute lazy logits once, with one warning, also those that change them in place."""

import math
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import onepass
from lazy_logits_cases import (
    BIAS,
    LAZY,
    LOSSES,
    ROW_MASK,
    ROWS,
    V,
    assert_same_loss,
    both,
    close,
    outcome,
    parts_of,
    targets,
)

pytestmark = pytest.mark.usefixtures("eager")

# Operations, and the name that the warning gives each.

OTHER = {
    "softmax": (lambda z: z.softmax(-1), "softmax"),
    "torch.softmax": (lambda z: torch.softmax(z, -1), "softmax"),
    "F.log_softmax": (lambda z: F.log_softmax(z, dim=-1), "log_softmax"),
    "argmax": (lambda z: z.argmax(-1), "argmax"),
    "torch.argmax": (lambda z: torch.argmax(z, dim=-1), "argmax"),
    "topk": (lambda z: z.topk(3).values, "topk"),
    "max": (lambda z: torch.max(z, -1).values, "max"),
    "logsumexp": (lambda z: torch.logsumexp(z, -1), "logsumexp"),
    "mean": (lambda z: z.mean(), "mean"),
    "sum": (lambda z: torch.sum(z, dim=0), "sum"),
    "transpose": (lambda z: z.transpose(1, 2), "transpose"),
    "permute": (lambda z: torch.permute(z, (2, 0, 1)), "permute"),
    "T": (lambda z: z.mT, "mT"),
    "minus": (lambda z: z - 1.0, "__sub__"),
    "a number minus": (lambda z: 1.0 - z, "__sub__"),
    "sub": (lambda z: torch.sub(z, 1.0), "sub"),
    "negative": (lambda z: -z, "__neg__"),
    "power": (lambda z: z**2, "__pow__"),
    "number to the power": (lambda z: 2.0**z, "__pow__"),
    "absolute": (lambda z: abs(z), "__abs__"),
    "a number over": (lambda z: 1.0 / z, "__truediv__"),
    "remainder": (lambda z: z % 2, "__mod__"),
    "floor division": (lambda z: z.detach() // 2, "__floordiv__"),
    "rounded division": (lambda z: torch.div(z, 0.5, rounding_mode="floor"), "div"),
    "less": (lambda z: z < 0, "__lt__"),
    "equal": (lambda z: z == 0, "__eq__"),
    "greater, of a tensor": (lambda z: torch.zeros(V) > z, "gt"),
    "mul_": (lambda z: z.mul_(2.0), "mul_"),
    "masked_fill": (lambda z: z.masked_fill(ROW_MASK[..., None], -1.0), "masked_fill"),
    "masked_fill_": (lambda z: z.masked_fill_(ROW_MASK[..., None], -1.0), "masked_fill_"),
    "where": (lambda z: torch.where(ROW_MASK[..., None], z, -1.0), "where"),
    "gather": (lambda z: z.gather(-1, targets(z)[..., None]), "gather"),
    "matmul": (lambda z: z @ torch.ones(V, 2), "__matmul__"),
    "matmul from the left": (lambda z: torch.ones(3, 5) @ z, "matmul"),
    "torch.matmul": (lambda z: torch.matmul(z, torch.ones(V)), "matmul"),
    "einsum": (lambda z: torch.einsum("btv,v->bt", z, BIAS), "einsum"),
    "cat": (lambda z: torch.cat([z, z], 1), "cat"),
    "stack": (lambda z: torch.stack((z, torch.zeros(*ROWS, V))), "stack"),
    "a column": (lambda z: z[..., 3], "indexing"),
    "columns": (lambda z: z[..., 2:5], "indexing"),
    "chosen columns": (lambda z: z[:, :, [1, 2]], "indexing"),
    "a mask of logits": (lambda z: z[torch.ones(*ROWS, V, dtype=torch.bool)], "indexing"),
    "rows and columns": (lambda z: z[torch.arange(2), torch.arange(2), torch.arange(2)], "indexing"),
    "a new dimension": (lambda z: z[None], "indexing"),
    "a mask of numpy": (lambda z: z[ROW_MASK.numpy(), :2], "indexing"),
    "a mask as a list": (lambda z: z[ROW_MASK.tolist(), :2], "indexing"),
    "unsqueeze at the end": (lambda z: z.unsqueeze(-1), "unsqueeze"),
    "squeeze of two": (lambda z: z.squeeze((0, 1)), "squeeze"),
    "squeeze of all": (lambda z: z.squeeze(), "squeeze"),
    "flatten of all": (lambda z: z.flatten(), "flatten"),
    "flatten of the end": (lambda z: torch.flatten(z, 1), "flatten"),
    "other sizes": (lambda z: z.view(V, -1), "reshape"),
    "another dtype of the same bytes": (lambda z: z.detach().view(torch.int32), "view"),
    "double": (lambda z: z.double(), "to(torch.float64, cpu)"),
    "to an integer": (lambda z: z.to(torch.int64), "to(torch.int64, cpu)"),
    "times a tensor": (lambda z: z * BIAS, "mul"),
    "a tensor times": (lambda z: BIAS * z, "mul"),
    "times a parameter": (lambda z: z * torch.tensor(2.0, requires_grad=True), "mul"),
    "times itself": (lambda z: z * z, "mul"),
    "over a tensor": (lambda z: z / torch.full((1,), 2.0), "div"),
    "a tensor over": (lambda z: BIAS / z, "div"),
    "plus a number": (lambda z: z + 1.5, "add"),
    "plus a tensor": (lambda z: z + torch.ones(*ROWS, V), "add"),
    "plus itself": (lambda z: z + z, "add"),
    "plus more dimensions": (lambda z: z + BIAS.reshape(1, 1, 1, V), "add"),
    "plus a multiple": (lambda z: torch.add(z, BIAS, alpha=2), "add"),
    "a multiple, to a tensor": (lambda z: torch.add(BIAS, z, alpha=2), "add"),
    "a bias after a scale": (lambda z: z * 2 + BIAS, "add"),
    "tanh of a soft-cap": (lambda z: (2 * z.tanh()).tanh(), "tanh"),
    "a soft-cap times a negative number": (lambda z: z.tanh() * -2, "mul"),
    "times infinity": (lambda z: z * math.inf, "mul"),
    "dropout": (lambda z: F.dropout(z, 0.0), "dropout"),
    "added in place to a tensor": (lambda z: torch.zeros(*ROWS, V).add_(z), "add_"),
    "in place of a tensor": (lambda z: _in_place(z), "mul_"),
    "out": (lambda z: torch.mul(z.detach(), 2.0, out=torch.empty(*ROWS, V)), "mul"),
    "linear": (lambda z: nn.Linear(V, 2)(z).mul(0), "linear"),
    "mse_loss": (lambda z: nn.MSELoss()(z, torch.zeros(*ROWS, V)), "mse_loss"),
    "probability targets": (
        lambda z: F.cross_entropy(z.view(-1, V), torch.full((10, V), 1 / V)),
        "cross_entropy",
    ),
    "classes in the second dimension": (
        lambda z: nn.CrossEntropyLoss(ignore_index=1)(z, torch.arange(2 * V).reshape(2, V) % 5),
        "cross_entropy",
    ),
    "a deprecated argument": (
        lambda z: F.cross_entropy(z.view(-1, V), targets(z).view(-1), reduce=False),
        "cross_entropy",
    ),
}


def _in_place(z):
    tensor = torch.ones(*ROWS, V)
    tensor.mul_(z)
    return tensor


@pytest.mark.filterwarnings("ignore:.*size_average and reduce:UserWarning")
@pytest.mark.parametrize("name", OTHER)
def test_any_other_operation(name):
    """The tensor's result and gradient, with one warning that names the operation and the line that called it."""
    operation, of = OTHER[name]
    parts = parts_of()
    ours, theirs = both(parts)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", onepass.MaterializedLogits)
        got = operation(ours)
    caught = [w for w in caught if issubclass(w.category, onepass.MaterializedLogits)]
    assert len(caught) == 1, [str(w.message) for w in caught]
    assert str(caught[0].message).startswith(f"onepass: {of} computes all logits, ("), caught[0].message
    assert caught[0].filename == __file__
    expected = operation(theirs)
    assert type(got) is torch.Tensor and got.dtype == expected.dtype and got.shape == expected.shape
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert got.requires_grad == expected.requires_grad
    if got.requires_grad:
        for g, e in zip(outcome(got.sum(), parts)[1], outcome(expected.sum(), parts)[1]):
            torch.testing.assert_close(g, e, rtol=1e-5, atol=1e-4, equal_nan=True)


def test_one_warning_for_all_operations():
    """The logits are computed once. What was derived from them before has not been computed."""
    parts = parts_of()
    ours, theirs = both(parts)
    earlier = ours * 0.5
    with pytest.warns(onepass.MaterializedLogits) as caught:
        assert ours.argmax(-1).equal(theirs.argmax(-1))
        tensor = ours.materialize()
        for operation, _ in OTHER.values():
            if operation not in (OTHER["mul_"][0], OTHER["masked_fill_"][0]):
                operation(ours)
        for operation in LAZY.values():
            result = operation(ours)
            close(result.materialize() if isinstance(result, onepass.LinearLogits) else result, operation(theirs))
    assert len([w for w in caught if w.category is onepass.MaterializedLogits]) == 1
    assert ours.materialize() is tensor
    for loss in LOSSES.values():
        assert_same_loss(loss, ours, theirs, parts)
    assert earlier.tensor is None
    with pytest.warns(onepass.MaterializedLogits, match=r"onepass: argmax computes all logits, \(2, 5, 11\)"):
        earlier.argmax(-1)


CHANGES = {
    "setitem": lambda z: z.__setitem__((..., slice(3, 5)), -1e4),
    "setitem of rows": lambda z: z.__setitem__(ROW_MASK, 0.0),
    "mul_": lambda z: z.mul_(0.5),
    "masked_fill_": lambda z: z.masked_fill_(torch.arange(V) < 4, -5.0),
}


@pytest.mark.parametrize("change", [
    lambda z: z.unsqueeze_(0), lambda z: z.transpose_(0, 1), lambda z: torch.squeeze(z.unsqueeze_(1), 1).unsqueeze_(0),
    lambda z: setattr(z, "data", z.data[:1]),
])  # fmt: skip
def test_the_shape_changed_in_place(change):
    lazy, tensor = both(parts_of())
    with pytest.warns(onepass.MaterializedLogits):
        change(tensor), change(lazy)
    assert lazy.shape == tensor.shape and lazy.dtype == tensor.dtype and len(lazy) == len(tensor)
    target = torch.arange(tensor.shape[:-1].numel()).view(tensor.shape[:-1]) % tensor.shape[-1]
    found, expected = (onepass.selective_log_softmax(z, target) for z in (lazy, tensor))
    torch.testing.assert_close(found, expected)


def test_operators_in_place_keep_dtype_and_shape():
    """As of a tensor: an operand of a wider dtype is rounded, and one of more dimensions is an error."""
    lazy, tensor = both(parts_of(dtype=torch.bfloat16))
    other = torch.linspace(-1, 1, tensor.numel()).view(tensor.shape)
    with pytest.warns(onepass.MaterializedLogits):
        tensor -= other
        lazy -= other
    assert lazy.dtype == tensor.dtype == torch.bfloat16 and torch.equal(lazy.materialize(), tensor)
    lazy, tensor = both(parts_of())
    with pytest.raises(RuntimeError, match="shape"):
        tensor += torch.ones(2, *tensor.shape)
    with pytest.raises(RuntimeError, match="shape"), pytest.warns(onepass.MaterializedLogits):
        lazy += torch.ones(2, *tensor.shape)


@pytest.mark.parametrize("name", CHANGES)
def test_changed_in_place(name):
    """The losses see what was written, and so does what is derived from the logits afterwards."""
    parts = parts_of()
    for then in (lambda z: z, lambda z: z / 2, lambda z: z.float()[..., :-1, :]):
        results = []
        for z in both(parts):
            if isinstance(z, torch.Tensor):
                CHANGES[name](z)
            else:
                with pytest.warns(onepass.MaterializedLogits) as caught:
                    CHANGES[name](z)
                    then(z)
                assert len(caught) == 1
            results.append(then(z))
        for loss in LOSSES.values():
            assert_same_loss(loss, *results, parts)


def test_materialized_where_gradients_are_disabled():
    """The tensor keeps its graph for later uses, as one that the head had returned; the results there are constants."""
    for disabled in (torch.no_grad, torch.inference_mode):
        parts = parts_of()
        weight, lazy = parts[1], onepass.LinearLogits(*parts)
        with disabled(), pytest.warns(onepass.MaterializedLogits, match="here without a gradient"):
            assert not lazy.softmax(-1).requires_grad
        (got,) = torch.autograd.grad(lazy.logsumexp(-1).sum(), weight)
        close(got, torch.autograd.grad(F.linear(*parts).logsumexp(-1).sum(), weight)[0])


@pytest.mark.filterwarnings("ignore::onepass.MaterializedLogits")
def test_a_sum_with_0_is_another_tensor():
    lazy, tensor = both(parts_of())
    for logits in (lazy, tensor):
        logits.max()
        (logits + 0).mul_(3.0)
    torch.testing.assert_close(lazy.materialize(), tensor)
    torch.testing.assert_close(7.0 // lazy, 7.0 // tensor)
    torch.testing.assert_close(7.0 % lazy, 7.0 % tensor)


@pytest.mark.parametrize(
    "key", [(slice(None), -1, slice(None)), (slice(None),) * 3, (..., 0, 0, 0), (0, 0, 0)], ids=str
)
@pytest.mark.filterwarnings("ignore::onepass.MaterializedLogits")
def test_an_index_with_too_many_dimensions(key):
    """Also if there are as many rows as hidden features, so that the index would fit the hidden states."""
    lazy = onepass.LinearLogits(torch.randn(8, 8), torch.randn(V, 8))
    with pytest.raises(IndexError, match="too many indices"):
        lazy[key]


@pytest.mark.filterwarnings("ignore:.*copy construct:UserWarning")
@pytest.mark.parametrize("convert", [torch.as_tensor, torch.tensor, np.asarray])
def test_conversions(convert):
    """All logits at once, with one warning, which says if a gradient is lost. NumPy's are errors then."""
    for rows in (3, 0):
        lazy = onepass.LinearLogits(torch.randn(rows, 8), torch.randn(V, 8))
        with pytest.warns(onepass.MaterializedLogits) as caught:
            found = convert(lazy)
        assert len(caught) == 1 and found.shape == (rows, V)
        torch.testing.assert_close(torch.as_tensor(found), lazy.materialize(), rtol=0, atol=0)
    lazy, tensor = both(parts_of())
    if convert is np.asarray:
        with pytest.warns(onepass.MaterializedLogits), pytest.raises(RuntimeError, match="requires grad"):
            convert(lazy)
    else:
        with pytest.warns(onepass.MaterializedLogits, match="a conversion, whose result has no gradient, computes all"):
            found = convert(lazy)
        torch.testing.assert_close(found, tensor.detach())
        torch.testing.assert_close(torch.as_tensor(lazy), tensor.detach())
        assert lazy.materialize().requires_grad


def test_inference_mode(no_warning):
    with torch.inference_mode():
        lazy, tensor = both(parts_of())
        assert lazy.is_inference() == tensor.is_inference()
        torch.testing.assert_close(lazy.materialize(), tensor)
        torch.testing.assert_close(both(parts_of())[0][:, -1].materialize(), tensor[:, -1])
    hidden, *others = parts_of()
    with torch.inference_mode():
        made = onepass.LinearLogits(hidden * 1.0, *others)
    assert torch.equal(made.materialize(), F.linear(hidden, *others)) and not made.materialize().requires_grad
