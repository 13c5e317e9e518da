"""What models do with logits before the loss: `onepass.LinearLogits` and a tensor of logits give the same numbers."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import onepass
from lazy_logits_cases import LAZY, LOSSES, ROWS, V, assert_same_loss, both, close, outcome, parts_of, targets

pytestmark = pytest.mark.usefixtures("eager")


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


def test_operations_where_gradients_are_disabled(no_warning):
    lazy = onepass.LinearLogits(*parts_of())
    with torch.no_grad():
        for constant in (lazy / 2, lazy.clone(), lazy[..., :-1, :], lazy.float() * 3):
            assert not constant.requires_grad
    assert lazy.requires_grad and (lazy / 2).requires_grad
