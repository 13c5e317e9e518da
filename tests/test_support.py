"""The distribution of each row restricted to some classes, against logits that are -inf elsewhere."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import onepass
from linear_cases import N, V, assert_all_close, batch, exact, gradients, policy_loss
from onepass.backend import backend_of
from onepass.core.options import Inputs, Options
from onepass.core.support import check_support
from paths import interpreted

pytestmark = pytest.mark.usefixtures("uninitialised_memory_is_nan")
TRANSFORMS = {
    "plain": {},
    "capped": {"softcap": 5.0, "logit_scale": -0.7},
    "own temperatures": {"temperature": "own", "softcap": 30.0},
}
S = 9


class Problem:
    """Ids of every kind of row: all S, fewer, none, and rows that have all classes."""

    def __init__(self, device, rows=(2, 6), vocab=V, seed=0, dtype=torch.float32):
        g = torch.Generator().manual_seed(seed)
        count = torch.Size(rows).numel()
        ids = torch.stack([torch.randperm(vocab, generator=g)[:S] for _ in range(count)])
        lengths = torch.randint(1, S + 1, (count,), generator=g)
        lengths[1], lengths[2] = 0, S
        ids = ids.masked_fill(torch.arange(S) >= lengths[:, None], -1)
        full = torch.zeros(count, dtype=torch.bool)
        full[3] = True
        self.allowed = torch.zeros(count, vocab + 1, dtype=torch.bool).scatter_(1, ids % (vocab + 1), True)[:, :vocab]
        self.allowed = (self.allowed | full[:, None]).view(*rows, vocab).to(device)
        inside = ids.gather(1, (torch.arange(count) % lengths.clamp(min=1))[:, None])[:, 0].clamp(min=0)
        index = inside.where(torch.arange(count) % 4 != 0, torch.randint(vocab, (count,), generator=g))
        self.x = (torch.randn(*rows, vocab, generator=g) * 3).to(dtype).to(device).requires_grad_()
        self.index, self.ids, self.full = (t.view(*rows, *t.shape[1:]).to(device) for t in (index, ids, full))
        self.indices = torch.stack([self.index, (self.index + 3) % vocab, self.index], -1)
        self.mask = (torch.rand(rows, generator=g) > 0.3).to(device)
        self.own = (torch.rand(rows, generator=g) + 0.5).to(device)
        flat = [row[row >= 0] for row in ids]
        offsets = torch.tensor([0, *[len(row) for row in flat]]).cumsum(0)
        ragged = torch.cat(flat).to(device), offsets.to(device)
        self.forms = {"padded": (self.ids, self.full), "ragged": (*ragged, self.full)}
        self.valid = self.allowed.any(-1)

    def options(self, name):
        return {n: self.own if v == "own" else v for n, v in TRANSFORMS[name].items()}

    def exact(self, logits, temperature=1.0, softcap=None, logit_scale=1.0):
        z = logits * logit_scale
        z = z if softcap is None else softcap * torch.tanh(z / softcap)
        temperature = temperature.double().unsqueeze(-1) if isinstance(temperature, torch.Tensor) else temperature
        return (z / temperature).masked_fill(~self.allowed, -torch.inf)


FUNCTIONS = {
    "log_probs": lambda x, p, **o: [onepass.selective_log_softmax(x, p.index, row_mask=p.mask, **o)],
    "log_probs of K": lambda x, p, **o: [onepass.selective_log_softmax(x, p.indices, **o)],
    "entropy": lambda x, p, **o: [onepass.entropy_from_logits(x, row_mask=p.mask, **o)],
    "both": lambda x, p, **o: onepass.selective_log_softmax_and_entropy(x, p.index, **o),
    "statistics": lambda x, p, **o: [
        f
        for f in vars(
            onepass.softmax_statistics(
                x, p.indices, metrics=["is_top1", "log_sum_sq_probs"], row_mask=p.mask, **o
            )
        ).values()
        if f is not None
    ],
}  # fmt: skip


def total(fields, of):
    """A loss of the fields, in which what is infinite or NaN has no part."""
    found = 0.0
    for n, (field, like) in enumerate(zip(fields, of, strict=True)):
        if field.requires_grad:
            found = found + (n + 1) * field.where(like.isfinite(), 0.0).sum()
    return found


@pytest.mark.pairs
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_of_logits(device, name, transform):
    p = Problem(device)
    (z,) = exact(p.x)
    options = p.options(transform)
    expected = FUNCTIONS[name](p.exact(z, **options), p)
    (of_exact,) = gradients(total(expected, expected), (z,))
    found = {}
    for form, support in p.forms.items():
        got = FUNCTIONS[name](p.x, p, support=support, **options)
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a.double(), b.double(), rtol=1e-5, atol=2e-5, equal_nan=True)
        (gradient,) = gradients(total(got, expected), (p.x,))
        rows = p.valid  # the gradient of a row without any class means nothing
        assert_all_close([gradient[rows]], [of_exact[rows].masked_fill(~p.allowed[rows], 0.0)])
        assert not gradient[rows][~p.allowed[rows]].any()
        found[form] = [*got, gradient]
    for a, b in zip(*found.values(), strict=True):
        assert torch.equal(a.double().nan_to_num(7.0), b.double().nan_to_num(7.0)), "both forms are one"


@pytest.mark.pairs
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("form", ["padded", "ragged"])
def test_of_heads(device, tile, form, transform):
    p = Problem(device, rows=(N,))
    *parts, _ = batch(device)
    reference = exact(*parts)
    options = p.options(transform)
    logits = p.exact(torch.nn.functional.linear(*reference), **options)
    expected = onepass.selective_log_softmax_and_entropy(logits, p.index, row_mask=p.mask & p.valid)
    got = onepass.linear_selective_log_softmax_and_entropy(
        *parts[:2], p.index, bias=parts[2], row_mask=p.mask & p.valid, support=p.forms[form], **options
    )
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=2e-5)
    assert_all_close(gradients(total(got, expected), parts), gradients(total(expected, expected), reference))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_policy_loss(device, tile, reduction):
    p = Problem(device, rows=(N,))
    *parts, _ = batch(device)
    g = torch.Generator().manual_seed(7)
    advantages, old = (torch.randn(N, generator=g).to(device) for _ in range(2))
    mask = p.valid & p.allowed.gather(-1, p.index[:, None])[:, 0]  # where the sampler could have drawn it
    got = onepass.linear_loss(
        *parts[:2], p.index, policy_loss, advantages, old, bias=parts[2], row_mask=mask, support=p.forms["ragged"],
        reduction=reduction,
    )  # fmt: skip
    reference = exact(*parts)
    s = onepass.softmax_statistics(p.exact(torch.nn.functional.linear(*reference)), p.index, row_mask=mask)
    losses = policy_loss(s, advantages.double(), old.double()).where(mask, 0.0)
    expected = losses if reduction == "none" else losses.sum() / mask.sum()
    assert_all_close([got.detach()], [expected.detach()], "loss")
    assert_all_close(gradients(got.sum(), parts), gradients(expected.sum(), reference))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_dtypes(device, dtype):
    p = Problem(device, dtype=dtype)
    (z,) = exact(p.x)
    expected = onepass.selective_log_softmax(p.exact(z), p.index)
    got = onepass.selective_log_softmax(p.x, p.index, support=p.forms["padded"])
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=2e-5, equal_nan=True)
    (gradient,) = gradients(total([got], [expected]), (p.x,))
    (of_exact,) = gradients(total([expected], [expected]), (z,))
    torch.testing.assert_close(
        gradient[p.valid].double(), of_exact[p.valid].masked_fill(~p.allowed[p.valid], 0.0),
        rtol=1e-2 if dtype == torch.bfloat16 else 1e-3, atol=1e-4,
    )  # fmt: skip


@pytest.mark.parametrize("inplace", [False, True], ids=["", "in place"])
def test_layouts(device, inplace):
    """Logits with strides, of rows that do not merge; the gradient may overwrite them."""
    p = Problem(device, rows=(2, 6))
    around = torch.full((2, 7, V + 5), torch.nan, device=device)
    view = around[:, :6, 2 : V + 2].copy_(p.x.detach())
    expected = onepass.selective_log_softmax_and_entropy(p.x, p.index, support=p.forms["padded"])
    weights = torch.rand(2, 6, device=device)
    loss = lambda found: sum((f * weights)[p.valid & f.isfinite()].sum() for f in found)  # noqa: E731
    (gradient,) = gradients(loss(expected), (p.x,))
    leaf = view.detach().requires_grad_()
    got = onepass.selective_log_softmax_and_entropy(
        leaf * 1.0 if inplace else leaf, p.index, support=p.forms["padded"], inplace_backward=inplace
    )
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
    (found,) = gradients(loss(got), (leaf,))
    torch.testing.assert_close(found[p.valid], gradient[p.valid])
    assert around[:, 6:].isnan().all() and around[..., V + 2 :].isnan().all()


def test_all_classes_are_no_restriction(device):
    """By a flag, and by ids."""
    p = Problem(device, rows=(5,))
    everything = torch.arange(V, device=device).expand(5, V).contiguous()
    full = torch.ones(5, dtype=torch.bool, device=device)
    for support in (everything, everything.int(), (everything[:, :1], full),
                    (everything.reshape(-1), torch.arange(6, device=device) * V)):  # fmt: skip
        expected = onepass.selective_log_softmax_and_entropy(p.x, p.index)
        got = onepass.selective_log_softmax_and_entropy(p.x, p.index, support=support)
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
        found, wanted = (gradients(sum(f.sum() for f in s), (p.x,)) for s in (got, expected))
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_what_is_outside_of_the_support_is_not_read(device):
    """NaN there changes nothing."""
    p = Problem(device, rows=(6,))
    noisy = p.x.detach().masked_fill(~p.allowed, torch.nan).requires_grad_()
    for x in (p.x, noisy):
        x.grad = None
        found = onepass.selective_log_softmax_and_entropy(x, p.index, support=p.forms["padded"])
        total(found, [f.where(p.valid, torch.nan) for f in found]).backward()
    torch.testing.assert_close(noisy.grad[p.valid], p.x.grad[p.valid])
    if interpreted(device) or device.type == "cuda":
        assert not noisy.grad[p.valid].isnan().any()


def test_empty(device):
    x = torch.randn(0, V, device=device, requires_grad=True)
    ids = torch.zeros(0, 3, dtype=torch.long, device=device)
    found = onepass.entropy_from_logits(x, support=ids)
    assert found.shape == (0,) and gradients(found.sum(), (x,))[0].shape == x.shape
    y = torch.randn(2, V, device=device)
    nothing = torch.zeros(2, 0, dtype=torch.long, device=device)
    assert onepass.entropy_from_logits(y, support=nothing).isnan().all()


def test_ids_that_are_no_classes_are_never_read(device):
    """On a GPU, where a look would synchronize: the row is NaN; offsets beyond the ids end with them."""
    from onepass.backend import backend_of

    x = torch.randn(3, V, device=device)
    ids = torch.tensor([[1, 2], [3, V + 1000], [4, -7]], device=device)
    read = Inputs(support=ids.reshape(-1), starts=torch.tensor([0, 2, 4], device=device),
                  lengths=torch.tensor([2, 2, 100], device=device))  # fmt: skip
    packed = backend_of(x).softmax_statistics(x, read, Options("log_normalizer"))[0]
    assert packed[1].isnan().tolist() == [False, True, False]
    assert packed[1, 2] == 0  # one class


ONES = torch.ones(4, 3, dtype=torch.long)
BAD = {
    "a string": ("one", TypeError, "support: expected ids"),
    "floats": (torch.ones(4, 3), TypeError, "support: .*float32"),
    "a shape": (torch.ones(3, 3, dtype=torch.long), ValueError, r"support: expected ids of shape \(4, 'S'\)"),
    "full rows": ((ONES, torch.ones(3, dtype=torch.bool)), ValueError, "full rows of shape"),
    "offsets": ((torch.ones(9, dtype=torch.long), torch.arange(4)), ValueError, r"offsets of shape \(5,\)"),
    "offsets beyond": ((torch.arange(4), torch.tensor([0, 1, 2, 3, 9])), ValueError, "between 0 and 4"),
    "offsets down": ((torch.arange(4), torch.tensor([0, 2, 1, 3, 4])), ValueError, "ascending offsets"),
    "an id": (torch.tensor([[1], [2], [V], [3]]), IndexError, rf"ids in \[0, {V}\), or -1, got {V} in row 2"),
    "an id below": (torch.tensor([[1], [2], [-2], [3]]), IndexError, "got -2 in row 2"),
    "twice": (torch.tensor([[1, 2], [2, 2], [3, 4], [-1, -1]]), ValueError, "got 2 twice in row 1"),
    "another device": (torch.ones(4, 3, dtype=torch.long, device="meta"), ValueError, "support: expected device"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_one_clear_error(name):
    support, kind, message = BAD[name]
    x = torch.randn(4, V)
    with pytest.raises(kind, match=message):
        onepass.entropy_from_logits(x, support=support)
    if kind is not IndexError and name not in ("twice", "offsets beyond", "offsets down"):
        with pytest.raises(kind, match=message):
            check_support(support, x, None, False)


def test_a_metric_of_all_logits():
    with pytest.raises(ValueError, match="metrics: expected no 'mean_logit' with a support"):
        onepass.softmax_statistics(torch.randn(4, V), metrics=["mean_logit"], support=ONES[:, :1])


def test_written_to_before_the_backward(device):
    p = Problem(device)
    loss = onepass.entropy_from_logits(p.x, support=p.ids)[p.valid].sum()
    p.ids.fill_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_compiled(device):
    if interpreted(device):
        pytest.skip("what is compiled is the same on both backends")
    torch._dynamo.reset()
    p = Problem(device, rows=(N,))
    *parts, _ = batch(device)
    ids = p.ids.clamp(min=0)[:, :1]

    def call(hidden, weight, ids):
        logits = hidden @ weight.T
        found = onepass.selective_log_softmax_and_entropy(logits, ids[:, 0], support=ids)
        head = onepass.linear_selective_log_softmax_and_entropy(hidden, weight, ids[:, 0], support=ids)
        return sum(f.sum() for f in (*found, *head))

    expected = call(*parts[:2], ids)
    got = torch.compile(call, fullgraph=True, backend="aot_eager")(*parts[:2], ids)
    torch.testing.assert_close(got, expected)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_supports(device, data):
    """Ids, lengths, indices and options that nobody chose, against the definition."""
    rows, vocab = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 40))
    seed = data.draw(st.integers(0, 2**20))
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, vocab, generator=g) * 3
    lists = [data.draw(st.lists(st.integers(0, vocab - 1), unique=True, max_size=vocab)) for _ in range(rows)]
    full = torch.tensor([data.draw(st.booleans()) for _ in range(rows)])
    offsets = torch.tensor([0, *map(len, lists)]).cumsum(0)
    ids = torch.tensor([i for row in lists for i in row], dtype=torch.long)
    allowed = torch.stack([torch.isin(torch.arange(vocab), torch.tensor(row, dtype=torch.long)) for row in lists])
    allowed |= full[:, None]
    index = torch.randint(vocab, (rows,), generator=g)
    ours = x.to(device).requires_grad_()
    (z,) = exact(x)
    T = torch.rand(rows, generator=g) + 0.5
    support = tuple(t.to(device) for t in (ids, offsets, full))
    got = onepass.selective_log_softmax_and_entropy(ours, index.to(device), support=support, temperature=T.to(device))
    restricted = (z / T.double()[:, None]).masked_fill(~allowed, -torch.inf)
    expected = onepass.selective_log_softmax_and_entropy(restricted, index)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a.double().cpu(), b, rtol=1e-5, atol=2e-5, equal_nan=True)
    valid = allowed.any(-1)
    if not any((f.requires_grad and f.isfinite().any()) for f in expected):
        return
    (of_ours,) = gradients(total(got, [e.to(device) for e in expected]), (ours,))
    (of_exact,) = gradients(total(expected, expected), (z,))
    of_exact = of_exact[valid].masked_fill(~allowed[valid], 0.0)
    torch.testing.assert_close(
        of_ours.double().cpu()[valid], of_exact, rtol=2e-5, atol=2e-5
    )  # a difference of terms up to 14, of logits up to 20 that a GPU rounds in a product and not in its sum


def test_a_class_that_is_none_leaves_no_largest(device):
    """The row is NaN, and so none of its logits is the largest."""
    x = torch.tensor([[1.0, 2.0]], device=device)
    index, ids = torch.tensor([[-1, 1]], device=device), torch.tensor([[0, 1]], device=device)
    options = Options("selected is_top1 log_normalizer")
    _, selected, is_top1 = backend_of(x).softmax_statistics(x, Inputs(index, support=ids), options)
    assert selected.isnan().all() and not is_top1.any()
