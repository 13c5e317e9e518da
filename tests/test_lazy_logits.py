"""What models do with logits before the loss: `onepass.LinearLogits` and a tensor of logits give the same numbers.

Operations that keep the logits lazy give no warning. All others compute the logits once, with one warning.
"""

import copy
import math
import operator
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import onepass

ROWS, H, V = (2, 5), 6, 11
BIAS = torch.linspace(-1, 1, V)
ROW_MASK = torch.tensor([[True, False, True, True, False], [False, True, True, False, True]])
INDEX = torch.tensor([0, 3, 3])


def parts_of(device="cpu", dtype=torch.float32, bias=True, rows=ROWS):
    """Hidden states, weight and bias, which require gradients."""
    g = torch.Generator().manual_seed(0)
    shapes = [((*rows, H), 1.5), ((V, H), 1.0), ((V,), 1.0)][: 3 if bias else 2]
    return [(torch.randn(s, generator=g) * scale).to(dtype).to(device).requires_grad_() for s, scale in shapes]


def both(parts):
    """Lazy logits, and the tensor that they stand for."""
    return onepass.LinearLogits(*parts), F.linear(*parts)


def targets(z):
    count = z.shape[:-1].numel()
    return (torch.arange(count, device=z.device) * 7 % z.shape[-1]).reshape(z.shape[:-1])


def tokens(z):
    ids = torch.stack([targets(z), (targets(z) + 1) % z.shape[-1]], -1)
    return ids, -0.7 - torch.arange(2, device=z.device).expand_as(ids).float()


def teacher(z):
    g = torch.Generator().manual_seed(1)
    return torch.randn(*z.shape[:-1], V, generator=g)[..., : z.shape[-1]].to(z.device)


LOSSES = {
    "F.cross_entropy": lambda z, **_: F.cross_entropy(z.reshape(-1, z.shape[-1]), targets(z).reshape(-1)),
    "cross_entropy": lambda z, **o: onepass.cross_entropy(z, targets(z), **o),
    "kl_div": lambda z, **o: onepass.kl_div(z, teacher(z), **({"teacher_temperature": 1.0} | o)),
    "topk_kl_div": lambda z, **o: onepass.topk_kl_div(z, *tokens(z), **o),
    "entropy": lambda z, **o: onepass.entropy_from_logits(z, **o).sum(),
}
LAZY = {
    "times a number": lambda z: z * 0.5,
    "a number times": lambda z: 2 * z,
    "a negative number": lambda z: z * -1.5,
    "times numpy": lambda z: z * np.float32(0.5),
    "numpy times": lambda z: np.float32(0.5) * z,
    "times a constant": lambda z: z * torch.tensor(0.5),
    "a constant times": lambda z: torch.tensor(0.5, dtype=torch.float64) * z,
    "over a number": lambda z: z / 0.7,
    "over a constant": lambda z: z / torch.tensor(2),
    "augmented": lambda z: _augmented(z),
    "scales": lambda z: z * 3 / 2 * 0.1,
    "soft-cap": lambda z: torch.tanh(z / 3.0) * 3.0,
    "soft-cap, then scales": lambda z: 0.5 * (4 * torch.tanh(z * 0.2 / 4)) / 0.8,
    "tanh": lambda z: z.tanh(),
    "functions": lambda z: torch.mul(torch.tanh(torch.div(z, 5.0)), 5.0),
    "more functions": lambda z: torch.true_divide(torch.multiply(0.5, torch.divide(z, 0.9)), 2.0),
    "methods": lambda z: z.div(2.0).tanh().mul(3.0).multiply(0.5).true_divide(1.5).divide(2),
    "float": lambda z: z.float(),
    "to dtype": lambda z: z.to(torch.float32),
    "to dtype by name": lambda z: z.to(dtype=torch.float32, non_blocking=True),
    "to device": lambda z: z.to(z.device),
    "to device and dtype": lambda z: z.to(str(z.device), torch.float32),
    "to another": lambda z: z.to(torch.zeros(1, device=z.device)),
    "contiguous": lambda z: z.contiguous(),
    "clone": lambda z: z.clone(),
    "torch.clone": lambda z: torch.clone(z),
    "view": lambda z: z.view(-1, V),
    "view of a size": lambda z: z.view(torch.Size((10, V))),
    "reshape": lambda z: z.reshape(5, 2, -1),
    "torch.reshape": lambda z: torch.reshape(z, (-1, z.size(-1))),
    "reshape by name": lambda z: torch.reshape(z, shape=(-1, V)),
    "flatten": lambda z: z.flatten(0, 1),
    "torch.flatten": lambda z: torch.flatten(z, end_dim=-2),
    "unsqueeze": lambda z: z.unsqueeze(1),
    "unsqueeze from the end": lambda z: z.unsqueeze(-2),
    "squeeze": lambda z: z.unsqueeze(0).squeeze(0),
    "squeeze of no dimension": lambda z: torch.squeeze(z, 1),
    "shifted": lambda z: z[..., :-1, :],
    "shifted rows": lambda z: z[:, 1:],
    "contiguous shifted rows": lambda z: z[..., :-1, :].contiguous().view(-1, V),
    "an index": lambda z: z[1],
    "an index from the end": lambda z: z[:, -1],
    "an index of every dimension of rows": lambda z: z[1, 2],
    "an index and all columns": lambda z: z[0, :, :],
    "indices": lambda z: z[:, INDEX.to(z.device)],
    "indices and all columns": lambda z: z[:, INDEX.to(z.device), :],
    "a list": lambda z: z[:, [0, 3]],
    "a list of the first rows": lambda z: z[[1, 0, 1]],
    "a constant index": lambda z: z[:, torch.tensor(2)],
    "a mask": lambda z: z[ROW_MASK.to(z.device)],
    "a mask of the first rows": lambda z: z[torch.tensor([False, True])],
    "a mask and columns": lambda z: z[ROW_MASK.to(z.device), :7],
    "a mask, then columns": lambda z: z[ROW_MASK.to(z.device)][:, :2],
    "ellipsis": lambda z: z[...],
    "ellipsis at the end": lambda z: z[1:, ...],
    "ellipsis in the middle": lambda z: z[0, ..., :],
    "steps": lambda z: z[:, ::2],
    "a slice of the vocabulary": lambda z: z[..., :7],
    "a slice of rows and of the vocabulary": lambda z: z[:, 1:, :-3],
    "a longer slice of the vocabulary": lambda z: z[..., : V + 5],
    "a bias": lambda z: z + BIAS.to(z.device),
    "a bias in front": lambda z: BIAS.to(z.device) + z,
    "a bias of two dimensions": lambda z: z + BIAS.to(z.device)[None],
    "a bias by function": lambda z: torch.add(z, BIAS.to(z.device)),
    "a bias, then a scale": lambda z: (z + BIAS.to(z.device)) * 0.5,
    "zero": lambda z: 0 + z + 0.0,
    "cast, cut, scaled and shifted": lambda z: (z.float()[..., :9] / 0.8)[..., :-1, :].contiguous().view(-1, 9),
}


def _augmented(z):
    z = z * 1.0
    z = z / 2.0
    return z


def close(got, expected, atol=1e-5, rtol=1e-5):
    torch.testing.assert_close(got, expected, rtol=rtol, atol=atol)


def outcome(loss, parts):
    return loss.detach(), torch.autograd.grad(loss, parts, allow_unused=True, retain_graph=True)


def assert_same_loss(loss, ours, theirs, parts, **tolerances):
    got, expected = outcome(loss(ours), parts), outcome(loss(theirs), parts)
    close(got[0].double(), expected[0].double(), **tolerances)
    for g, e in zip(got[1], expected[1]):
        close(g, torch.zeros_like(g) if e is None else e, **tolerances)


@pytest.fixture
def no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error", onepass.MaterializedLogits)
        yield


@pytest.mark.parametrize("bias", [True, False], ids=["bias", ""])
@pytest.mark.parametrize("name", LAZY)
def test_lazy(name, bias, monkeypatch, no_warning):
    """The loss, the gradients and the materialized logits of every lazy operation."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    parts = parts_of(bias=bias)
    ours, theirs = (LAZY[name](z) for z in both(parts))
    assert isinstance(ours, onepass.LinearLogits) and ours.tensor is None
    assert (ours.shape, ours.dtype, ours.device) == (theirs.shape, theirs.dtype, theirs.device)
    for loss in LOSSES.values():
        assert_same_loss(loss, ours, theirs, parts)
    assert ours.tensor is None
    close(ours.materialize(), theirs)


@pytest.mark.parametrize("name", ["soft-cap, then scales", "a mask and columns", "a bias, then a scale", "shifted"])
def test_lazy_on_every_path(name, device, no_warning):
    parts = parts_of(device)
    ours, theirs = (LAZY[name](z) for z in both(parts))
    assert_same_loss(LOSSES["cross_entropy"], ours, theirs, parts, atol=1e-4)


@pytest.fixture(autouse=True)
def eager(monkeypatch, request):
    """As a user's CPU has it, for the tests that do not run on every path."""
    if "device" not in request.fixturenames:
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def test_no_change_of_the_original(no_warning):
    """Every operation returns a new object."""
    parts = parts_of()
    ours, theirs = both(parts)
    for operation in LAZY.values():
        operation(ours)
    assert ours.shape == theirs.shape and ours.transform == type(ours).transform
    assert_same_loss(LOSSES["cross_entropy"], ours, theirs, parts)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "cast",
    [
        lambda z, dtype: z.float(),
        lambda z, dtype: z.to(torch.float32),
        lambda z, dtype: z.float().to(dtype).float(),
        lambda z, dtype: z.to(torch.zeros((), dtype=torch.float32)),
        lambda z, dtype: z.to(z.device, torch.float32),
    ],
)
def test_casts(cast, dtype, no_warning):
    """Losses compute in float32, whatever the dtype; a materialized tensor has the dtype of the last cast."""
    parts = parts_of(dtype=dtype)
    ours, theirs = (cast(z, dtype) for z in both(parts))
    assert ours.dtype == theirs.dtype == torch.float32 and ours.tensor is None
    for loss in LOSSES.values():
        assert_same_loss(loss, ours, theirs, parts, atol=2e-2, rtol=2e-2)
    close(ours.materialize(), theirs)  # and of the same dtype


@pytest.mark.parametrize("to", ["half", "bfloat16"])
def test_casts_to_fewer_bits(to, no_warning):
    """A loss sees the logits as they were before such a cast."""
    parts = parts_of()
    ours, theirs = both(parts)
    cast, of_tensor = getattr(ours, to)(), getattr(theirs, to)()
    assert cast.dtype == of_tensor.dtype and ours.dtype == torch.float32
    assert_same_loss(LOSSES["cross_entropy"], cast, theirs, parts)
    close(cast.materialize(), of_tensor)


def test_the_dtype_of_a_sum_with_a_bias_under_autocast(no_warning):
    """That of torch: autocast casts the operands of a GEMM, not those of a sum."""
    hidden, weight, bias = parts_of()
    with torch.autocast("cpu", torch.bfloat16):
        z, expected = onepass.LinearLogits(hidden, weight) + bias, F.linear(hidden, weight) + bias
        assert z.dtype == z.materialize().dtype == expected.dtype == torch.float32
    torch.testing.assert_close(z.materialize(), expected, rtol=2e-2, atol=2e-2 * expected.abs().max().item())


def test_detach(no_warning):
    parts = parts_of()
    ours, theirs = both(parts)
    for detached in (ours.detach(), torch.detach(ours), (ours * 2).detach() / 2):
        assert not detached.requires_grad and ours.requires_grad
        loss = LOSSES["cross_entropy"](detached)
        assert not loss.requires_grad
        close(loss, LOSSES["cross_entropy"](theirs).detach())
    # As a constant beside the logits themselves, and as the teacher.
    assert_same_loss(lambda z: onepass.kl_div(z * 0.5, z.detach()), ours, theirs, parts)


@pytest.mark.parametrize("rows", [(2, 5), (5,), ()], ids=str)
def test_attributes(rows, no_warning):
    ours, theirs = both(parts_of(dtype=torch.bfloat16, rows=rows))
    assert (ours.shape, ours.dtype, ours.device) == (theirs.shape, theirs.dtype, theirs.device)
    assert ours.size() == theirs.size() and ours.size(-1) == ours.size(dim=-1) == V and ours.size(0) == theirs.size(0)
    assert ours.dim() == ours.ndim == theirs.ndim and ours.numel() == theirs.numel() and len(ours) == len(theirs)
    assert ours.is_floating_point() and ours.is_contiguous() and ours.element_size() == theirs.element_size()
    assert ours.requires_grad and ours.is_cpu and not ours.is_cuda
    assert not hasattr(ours, "not_of_a_tensor") and not hasattr(ours, "__cuda_array_interface__")
    with pytest.raises(AttributeError, match="'LinearLogits' object has no attribute 'not_of_a_tensor'"):
        _ = ours.not_of_a_tensor


def test_rows_by_iteration(no_warning):
    parts = parts_of()
    ours, theirs = both(parts)
    for a, b in zip(ours, theirs, strict=True):
        assert_same_loss(LOSSES["cross_entropy"], a, b, parts)


# Everything else: the operation, and the name that the warning gives it.

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


# torch's own loss.


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True], ids=["", "class weights"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_cross_entropy_of_torch(reduction, weighted, smoothing, device, no_warning):
    parts = parts_of(device)
    ours, theirs = (z.view(-1, V) for z in both(parts))
    target = targets(ours)
    target[2] = target[5] = 3  # ignored below, besides those that have this class
    options = dict(
        weight=torch.linspace(0, 1, V, device=device) if weighted else None, reduction=reduction,
        label_smoothing=smoothing, ignore_index=3,
    )  # fmt: skip
    upstream = torch.linspace(0.5, 1.5, 10, device=device)
    for loss in (lambda z: F.cross_entropy(z, target, **options), lambda z: nn.CrossEntropyLoss(**options)(z, target)):
        assert loss(ours).shape == loss(theirs).shape
        weighed = lambda z, loss=loss: (loss(z) * upstream).sum()  # noqa: E731
        assert_same_loss(weighed, ours, theirs, parts, atol=5e-5)
    assert ours.tensor is None


def test_cross_entropy_of_one_row(no_warning):
    parts = parts_of(rows=())
    assert_same_loss(lambda z: F.cross_entropy(z, torch.tensor(4)), *both(parts), parts)


def test_cross_entropy_of_bad_targets():
    ours, theirs = (z.view(-1, V) for z in both(parts_of()))
    for z in (ours, theirs):
        with pytest.raises(IndexError):
            F.cross_entropy(z, torch.full((10,), V))
    for target in (torch.zeros(9, dtype=torch.int64), torch.zeros(10, dtype=torch.bool)):
        with pytest.raises(Exception) as expected:
            F.cross_entropy(theirs, target)
        with pytest.warns(onepass.MaterializedLogits), pytest.raises(type(expected.value)):
            F.cross_entropy(onepass.LinearLogits(*parts_of()).view(-1, V), target)


# A transform of the logits, and that of the loss.

TRANSFORMS = {
    "scale": lambda z: z * 0.5,
    "soft-cap": lambda z: torch.tanh(z / 3) * 3,
    "soft-cap and scales": lambda z: torch.tanh(z * 0.4) * 2 / 0.7,
    "negative scale": lambda z: z * -0.5,
    "nothing": lambda z: z,
}
OPTIONS = [
    {"temperature": 0.7},
    {"softcap": 2.0},
    {"logit_scale": 1.7},
    {"temperature": 0.7, "softcap": 2.0, "logit_scale": 1.7},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: " ".join(o))
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transform_of_a_loss(name, options, no_warning):
    """The loss applies its transform after that of the logits; two soft-caps need the logits themselves."""
    parts = parts_of()
    for of, loss in LOSSES.items():
        if of == "F.cross_entropy":
            continue
        ours, theirs = (TRANSFORMS[name](z) for z in both(parts))
        assert_same_loss(lambda z, loss=loss: loss(z, **options), ours, theirs, parts)
        assert (ours.tensor is not None) == ("soft-cap" in name and "softcap" in options)


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("direction", ["forward", "reverse", "jsd"])
def test_transforms_of_student_and_teacher(name, direction, no_warning):
    parts = parts_of()
    options = dict(direction=direction, temperature=0.7, teacher_temperature=1.3, teacher_softcap=4.0)
    of_teacher = [torch.randn(*ROWS, 3), torch.randn(V, 3)]
    teachers = [TRANSFORMS[name](z) for z in both(of_teacher)]
    students = [(z / 2) for z in both(parts)]
    losses = [onepass.kl_div(s, t, **options) for s, t in zip(students, teachers)]
    close(losses[0], losses[1])
    for g, e in zip(*[torch.autograd.grad(loss, parts) for loss in losses]):
        close(g, e)


def test_statistics_of_transformed_logits(no_warning):
    parts = parts_of()
    found = [
        onepass.softmax_statistics(TRANSFORMS["soft-cap and scales"](z), targets(z), temperature=0.5)
        for z in both(parts)
    ]
    for field in ("log_probs", "entropy", "log_normalizer"):
        close(getattr(found[0], field), getattr(found[1], field))


def test_copies_of_constants():
    """Logits of tensors that are no results of an operation can be copied."""
    parts = parts_of()
    lazy = onepass.LinearLogits(*parts) * 0.5
    close(copy.deepcopy(lazy).materialize(), lazy.materialize())
    assert copy.copy(onepass.LinearLogits(*parts)).tensor is None


def test_compiled(no_warning):
    """The operations are traced."""
    parts = parts_of()

    def loss(hidden, weight, bias, lazy):
        z = onepass.LinearLogits(hidden, weight, bias) if lazy else F.linear(hidden, weight, bias)
        z = (torch.tanh(z.float() / 3.0) * 3.0)[..., :-1, :].contiguous().view(-1, V)
        return onepass.cross_entropy(z, targets(z))

    torch.compiler.reset()
    got = outcome(torch.compile(loss, backend="aot_eager")(*parts, True), parts)
    expected = outcome(loss(*parts, False), parts)
    for g, e in zip((got[0], *got[1]), (expected[0], *expected[1])):
        close(g, e)


# What somebody who tried to break lazy logits found.


def test_materialized_where_gradients_are_disabled():
    """The tensor keeps its graph for later uses, as one that the head had returned; the results there are constants."""
    for disabled in (torch.no_grad, torch.inference_mode):
        parts = parts_of()
        weight, lazy = parts[1], onepass.LinearLogits(*parts)
        with disabled(), pytest.warns(onepass.MaterializedLogits, match="here without a gradient"):
            assert not lazy.softmax(-1).requires_grad
        (got,) = torch.autograd.grad(lazy.logsumexp(-1).sum(), weight)
        close(got, torch.autograd.grad(F.linear(*parts).logsumexp(-1).sum(), weight)[0])


def test_operations_where_gradients_are_disabled(no_warning):
    lazy = onepass.LinearLogits(*parts_of())
    with torch.no_grad():
        for constant in (lazy / 2, lazy.clone(), lazy[..., :-1, :], lazy.float() * 3):
            assert not constant.requires_grad
    assert lazy.requires_grad and (lazy / 2).requires_grad


@pytest.mark.parametrize("which", (0, 1, 2))
def test_tensors_that_were_written_to(which):
    """An error, instead of logits that the head never had."""
    parts = parts_of()
    lazy, earlier = onepass.LinearLogits(*parts), onepass.LinearLogits(*parts)
    expected = earlier.materialize()
    rows = lazy[..., :-1, :]
    with torch.no_grad():
        parts[which].mul_(2.0)
    for use in (
        lazy.materialize,
        lambda: lazy[..., 1:, :],
        rows.materialize,
        lambda: onepass.entropy_from_logits(lazy),
    ):
        with pytest.raises(RuntimeError, match=r"^logits: expected hidden states and parameters as they were"):
            use()
    assert earlier.materialize() is expected


def test_in_place_under_another_name(no_warning):
    lazy = other = onepass.LinearLogits(*parts_of())
    lazy *= 2.0
    assert other is lazy and other.transform.logit_scale == 2.0
    copied = lazy + 0
    copied /= 2.0
    assert lazy.transform.logit_scale == 2.0 and copied.transform.logit_scale == 1.0


IN_PLACE = {
    "-=": lambda z: operator.isub(z, BIAS), "- number": lambda z: operator.isub(z, 0.5),
    "**=": lambda z: operator.ipow(z, 2), "%=": lambda z: operator.imod(z, 3.0),
    "//=": lambda z: operator.ifloordiv(z, 0.3), "+=": lambda z: operator.iadd(z, BIAS),
    ".data": lambda z: setattr(z, "data", z.data.clamp(-0.1, 0.1)),
}  # fmt: skip


@pytest.mark.parametrize("name", IN_PLACE)
@pytest.mark.filterwarnings("ignore::onepass.MaterializedLogits")
def test_every_name_sees_a_change(name):
    parts = parts_of()
    lazy, tensor = both(parts)
    for logits in (lazy, tensor):
        IN_PLACE[name](logits)  # and forget what it returns
    found, expected = (F.cross_entropy(z.flatten(0, 1), targets(z).flatten()) for z in (lazy, tensor))
    torch.testing.assert_close(found, expected)
    if name != "//=":  # which has no gradient
        for ours, theirs in zip(torch.autograd.grad(found, parts), torch.autograd.grad(expected, parts)):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.filterwarnings("ignore::onepass.MaterializedLogits")
@pytest.mark.parametrize("name", ["iadd", "isub", "imul", "itruediv", "ipow"])
def test_views_of_materialized_logits_see_a_change(name):
    """As those of a tensor do."""
    found = []
    for z in both(parts_of()):
        z = z.detach()
        z = z if isinstance(z, torch.Tensor) else onepass.LinearLogits(z.hidden, z.weight, z.bias)
        (z if isinstance(z, torch.Tensor) else z.materialize()).argmax(-1)
        view, same = z[1:], z
        z = getattr(operator, name)(z, 2)
        found.append([torch.as_tensor(view) + 0, same[:] + 0, z[:] + 0])
    for ours, theirs in zip(*found, strict=True):
        close(ours, theirs)


SLICES = {
    "reshape to the same rows": lambda z: z[:, -1].reshape(-1, z.shape[-1]),
    "flatten of one dimension": lambda z: z[:, -1].flatten(0, 0),
    "contiguous of a copy": lambda z: (copied := z[:, 1:].clone(), copied.contiguous())[1],
    "reshape of rows apart": lambda z: z[:, 1:].reshape(-1, z.shape[-1]),
}


@pytest.mark.parametrize("name", SLICES)
def test_a_view_of_a_slice(name):
    """It shares memory with the slice where a tensor would; then the original is an error once the view has changed."""
    hidden, weight = torch.randn(2, 3, 4), torch.randn(5, 4)
    tensor, lazy = hidden @ weight.T, onepass.LinearLogits(hidden, weight)
    theirs, ours, before = SLICES[name](tensor), SLICES[name](lazy), tensor.clone()
    theirs *= 2
    ours *= 2
    close(ours.materialize(), theirs)
    if torch.equal(tensor, before):
        close(lazy.materialize(), tensor)
    else:
        with pytest.raises(RuntimeError, match="share no memory"):
            lazy.materialize()


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
        torch.testing.assert_close(lazy, lazy)
        assert lazy.materialize().requires_grad


COPIES = (
    lambda z: z.contiguous(), lambda z: z.clone(), lambda z: z.to(torch.float32, copy=True),
    lambda z: z.to("cpu", torch.float32, False, True),
)  # fmt: skip


@pytest.mark.parametrize("copied", COPIES)
def test_a_copy_is_not_the_original(copied, no_warning):
    lazy = onepass.LinearLogits(*parts_of())[:, :-1]
    copy = copied(lazy)
    copy /= 2.0
    close(copy.materialize() * 2.0, lazy.materialize())


def test_contiguous_logits_are_not_copied(no_warning):
    for lazy, tensor in zip((whole := onepass.LinearLogits(*parts_of()), whole[:1], whole[:, :-1], whole[..., :3]),
                            (z := torch.zeros(*ROWS, V), z[:1], z[:, :-1], z[..., :3])):  # fmt: skip
        assert lazy.is_contiguous() == tensor.is_contiguous() == (lazy.contiguous() is lazy)
        assert lazy.contiguous().is_contiguous() and lazy.contiguous().contiguous().shape == tensor.shape
    with torch.no_grad():
        assert whole.contiguous().requires_grad


SHARED = {
    "of a slice": (lambda z: z[:, -1], lambda v: v.mul_(2.0)),
    "of another shape": (lambda z: z.view(-1, V), lambda v: operator.setitem(v, (slice(None), 3), -1e4)),
    "by an operator": (lambda z: z[:, :-1], lambda v: operator.itruediv(v, 2.0)),
    "of a slice of a slice": (lambda z: z[:, 1:][:, :1], lambda v: operator.itruediv(v, 2.0)),
    "of an alias": (lambda z: z.detach(), lambda v: operator.imul(v, 2.0)),
    "as a result": (lambda z: z.unsqueeze(0), lambda v: torch.mul(torch.ones(V), 2.0, out=v)),
}  # fmt: skip


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("which", ["view", "base"])
@pytest.mark.filterwarnings("ignore::onepass.MaterializedLogits", "ignore:.*was resized:UserWarning")
def test_a_view_or_its_base_that_was_changed_in_place(name, which):
    """A tensor would show the change in both. Here the one that was not changed is an error, and not the old logits."""
    view, change = SHARED[name]
    with torch.no_grad():
        base = onepass.LinearLogits(*parts_of())
        derived = view(base)
        changed, other = (derived, base) if which == "view" else (base, derived)
        change(changed)
        changed.materialize()
        for use in (other.materialize, lambda: other * 2 + 1, lambda: onepass.entropy_from_logits(other)):
            with pytest.raises(RuntimeError, match="logits: expected logits that share no memory with others"):
                use()


@pytest.mark.filterwarnings("ignore::onepass.MaterializedLogits")
def test_a_copy_or_a_view_of_a_tensor_that_was_changed_in_place():
    lazy, tensor = both(parts_of())
    for logits in (lazy, tensor):
        for copied in (logits.clone(), logits[:, :-1].contiguous(), logits[:, [0]], logits * 1.0):
            copied /= 2.0
    torch.testing.assert_close(lazy.materialize(), tensor)
    with torch.no_grad():
        lazy[:, -1].mul_(2.0)
        torch.testing.assert_close(lazy[:, -1], 2 * tensor[:, -1])


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
