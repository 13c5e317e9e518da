"""Views, copies and other names of lazy logits share memory, and see changes in place, as those of a tensor do."""

import operator

import pytest
import torch
import torch.nn.functional as F

import onepass
from lazy_logits_cases import BIAS, ROWS, V, both, close, parts_of, targets

pytestmark = pytest.mark.usefixtures("eager")


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
