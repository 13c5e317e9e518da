"""`softmax_statistics` against the definition: random and hard inputs, forward and gradient, on every path."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import onepass
from definition import assert_close, assert_gradient_close, statistics
from inputs import HARD, INF, moved, split_rows
from onepass.backend import backend_of
from onepass.core.options import FieldGradients, Inputs, Options
from paths import interpreted

METRICS = ("is_top1", "log_sum_sq_probs", "mean_logit")
DIFFERENTIABLE = ("log_normalizer", "expected_logit", "selected", "weighted_logit")


def check(logits, index=None, *, row_mask=None, class_weights=None, seed=0, metrics=METRICS, **transforms):
    """Compare every field, and the gradient for random upstream gradients of all of them, with the definition."""
    logits = logits.detach().requires_grad_()
    metrics = tuple(m for m in metrics if m != "is_top1" or index is not None)
    got = onepass.softmax_statistics(
        logits, index, row_mask=row_mask, class_weights=class_weights, metrics=metrics, **transforms
    )
    exact = logits.detach().double().requires_grad_()
    expected = statistics(exact, index, row_mask=row_mask, class_weights=class_weights, **transforms)
    magnitude = expected["shift"].abs().nan_to_num(0, 0, 0).max().item() if logits.numel() else 0.0
    names = [n for n in (*DIFFERENTIABLE, "shift", "entropy", "log_probs", *metrics) if n in expected]
    for name in names:
        # A logit of size 1e4 that was scaled in float32 is off by a rounding of 1e4.
        scale = max(1.0, magnitude) if transforms or name in ("shift", "mean_logit", "weighted_logit") else None
        assert_close(getattr(got, name), expected[name].detach(), scale=scale, name=name)

    generator = torch.Generator().manual_seed(seed)
    ours, exactly, upstreams = [], [], []
    for name in DIFFERENTIABLE:
        if name in expected:
            upstream = torch.randn(expected[name].shape, generator=generator, dtype=torch.float64).to(logits.device)
            finite = expected[name].detach().isfinite() | expected[name].detach().isnan()
            upstream = torch.where(finite, upstream, 0.0)  # an infinite loss has no gradient to speak of
            ours.append(getattr(got, name))
            exactly.append(torch.where(finite, expected[name], 0.0))
            upstreams.append(upstream)
    upstreams32 = [u.to(o.dtype) for o, u in zip(ours, upstreams)]
    (gradient,) = torch.autograd.grad(ours, logits, upstreams32)
    (exact_gradient,) = torch.autograd.grad(exactly, exact, [u.double() for u in upstreams32])
    size = max([1.0, *(u.abs().max().item() for u in upstreams if u.numel())])
    slope = abs(transforms.get("logit_scale", 1.0)) / transforms.get("temperature", 1.0)
    repeats = 1 if index is None or index.dim() < logits.dim() else max(1, index.shape[-1])
    assert_gradient_close(gradient, exact_gradient, upstream=size * slope * repeats * (1 + magnitude / 16))
    return got, gradient


@st.composite
def cases(draw):
    rows = draw(st.lists(st.integers(0, 5), max_size=4).filter(lambda s: math.prod(s) <= 40))
    vocab = draw(st.sampled_from([1, 2, 3, 7, 8, 31, 64, 127, 255, 256, 257, 511, 1000, 1031, 4099]))
    layout = draw(st.sampled_from(["contiguous", "transposed", "sliced", "shifted", "expanded", "strided"]))
    dtype = draw(st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    magnitude = draw(st.sampled_from([0.1, 3.0, 50.0, 1e4]))
    uniform = lambda *shape: torch.rand(shape, generator=generator)  # noqa: E731
    normal = lambda *shape: (torch.randn(shape, generator=generator) * magnitude).to(dtype)  # noqa: E731
    if layout == "transposed" and len(rows) >= 2:
        logits = normal(*rows[::-1], vocab).permute(*reversed(range(len(rows))), len(rows))
    elif layout == "sliced" and rows:
        logits = normal(*rows[:-1], rows[-1] + 1, vocab)[..., :-1, :]
    elif layout == "shifted":
        logits = normal(*rows, vocab + 3)[..., 3:]
    elif layout == "expanded" and rows:
        logits = normal(*rows[:-1], 1, vocab).expand(*rows, vocab)
    elif layout == "strided":
        logits = normal(*rows, 2 * vocab)[..., ::2]
    else:
        logits = normal(*rows, vocab)
    many = draw(st.sampled_from([None, (), (1,), (5,)]))
    options = {"index": None}
    if many is not None:
        kind = draw(st.sampled_from([torch.int32, torch.int64]))
        options["index"] = torch.randint(vocab, (*rows, *many), generator=generator).to(kind)
    if draw(st.booleans()):
        options["temperature"] = draw(st.sampled_from([0.5, 0.7, 2.0]))
    if draw(st.booleans()):
        options["softcap"] = draw(st.sampled_from([5.0, 30.0]))
    if draw(st.booleans()):
        options["logit_scale"] = draw(st.sampled_from([0.25, 1.5, -1.0]))
    if draw(st.booleans()):
        options["row_mask"] = uniform(*rows) < 0.6
    weights = draw(st.sampled_from([None, 1.0 / vocab, "tensor"]))
    options["class_weights"] = uniform(vocab) * (uniform(vocab) < 0.8) / vocab if weights == "tensor" else weights
    return logits, options


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(case=cases())
def test_against_the_definition(device, case):
    logits, options = case
    check(
        moved(logits, device),
        **{k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in options.items()},
    )


@pytest.mark.pairs(unless=lambda device, vocab, splits, **_: device == "interpreter" and (vocab, splits) != (513, 4))
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("vocab", [513, 4096])
@pytest.mark.parametrize("hard", HARD)
def test_hard_inputs(device, monkeypatch, hard, vocab, dtype, splits):
    if interpreted(device) and (vocab, splits) != (513, 4):
        pytest.skip("once is enough for the interpreter")
    split_rows(monkeypatch, splits)
    x = torch.randn(3, vocab, generator=torch.Generator().manual_seed(0)).to(dtype)
    x = HARD[hard](x).to(device)
    index = torch.tensor([3, 3, 3], device=device)  # a finite logit in every case that has one
    for options in ({}, {"temperature": 0.7}, {"softcap": 30.0}):
        if "lowest" in hard and options:
            continue  # scaled beyond the dtype, which the definition in float64 is not
        got, gradient = check(x, index, **options)
        rows = torch.tensor([False, hard in ("a row of NaN", "one NaN", "one +inf", "a row of -inf"), False])
        if options.get("softcap") and hard in ("one +inf", "a row of -inf"):
            rows[:] = False  # a capped infinity is finite
        for value in (got.log_probs, got.entropy, gradient.sum(-1)):
            assert torch.equal(value.isnan().cpu(), rows), hard
        if not options.get("softcap"):
            assert (gradient[~rows.to(device)][x[~rows.to(device)] == -INF] == 0).all()


def test_target_of_probability_zero(device):
    """Torch's answer: the log-probability is -inf and its gradient p - 1."""
    x = torch.randn(2, 50, device=device)
    x[:, 7] = -INF
    x.requires_grad_()
    got = onepass.selective_log_softmax(x, torch.tensor([7, 3], device=device))
    assert got[0] == -INF and got[1].isfinite()
    (gradient,) = torch.autograd.grad(got, x, torch.ones_like(got))
    exact = x.detach().double().requires_grad_()
    log_p = exact.log_softmax(-1)[[0, 1], [7, 3]]
    (expected,) = torch.autograd.grad(log_p, exact, torch.ones_like(log_p))
    assert_gradient_close(gradient, expected)


@pytest.mark.parametrize("bad", [-1, 50, 10**9, -(2**40)])
@pytest.mark.parametrize("many", [False, True], ids=["one index", "three indices"])
def test_index_outside_the_vocabulary(device, raises_index_error, bad, many):
    x = torch.randn(3, 50, device=device, requires_grad=True)
    index = torch.tensor([[4, 5, 6], [7, bad, 8], [9, 10, 11]], device=device)
    index = index if many else index[:, 1]
    if raises_index_error:
        with pytest.raises(IndexError, match=rf"index: expected values in \[0, 50\), got {bad} in row 1"):
            onepass.softmax_statistics(x, index)
        return
    got = onepass.softmax_statistics(x, index)
    loss = got.log_probs.sum() + got.entropy.sum()
    (gradient,) = torch.autograd.grad(loss, x)
    for value in (got.log_probs.reshape(3, -1), got.entropy.unsqueeze(-1), gradient):
        assert value[1].isnan().all() and value[[0, 2]].isfinite().all()


def test_index_outside_the_vocabulary_is_an_error_when_debugging(device, monkeypatch):
    monkeypatch.setattr("onepass.core.checks.DEBUG", True)
    x = torch.randn(2, 50, device=device)
    with pytest.raises(IndexError, match="got 50 in row 1"):
        onepass.softmax_statistics(x, torch.tensor([0, 50], device=device))
    with pytest.raises(IndexError, match=r"target: .*got -7 in row 0"):
        onepass.cross_entropy(x, torch.tensor([-7, 5], device=device))


def test_masked_rows_are_not_read(device):
    x = torch.randn(4, 300, device=device)
    x[1] = float("nan")
    x.requires_grad_()
    mask = torch.tensor([True, False, True, False], device=device)
    index = torch.tensor([0, 999, 2, -100], device=device)
    got = onepass.softmax_statistics(x, index, row_mask=mask, class_weights=0.5, metrics=METRICS)
    for name in (*DIFFERENTIABLE, "shift", "entropy", "log_probs", *METRICS):
        assert (getattr(got, name)[~mask] == 0).all(), name
    loss = got.log_probs.sum() + got.entropy.sum() + got.weighted_logit.sum()
    (gradient,) = torch.autograd.grad(loss, x)
    assert (gradient[~mask] == 0).all() and gradient[mask].isfinite().all()


@pytest.mark.parametrize("shape", [(0, 10), (2, 0, 10), (1,), (5, 1), (0,)], ids=str)
def test_degenerate_shapes(device, shape):
    x = torch.randn(shape, device=device)
    index = torch.zeros(shape[:-1], dtype=torch.int64, device=device)
    if shape == (0,):
        with pytest.raises(ValueError, match=r"logits: expected shape \(\.\.\., V\) with 1 <= V < 2\*\*31, got \(0,\)"):
            onepass.softmax_statistics(x, index)
    else:
        check(x, index, class_weights=0.5)


def test_no_index_at_all_in_a_row(device):
    x = torch.randn(3, 300, device=device)
    got, _ = check(x, torch.zeros(3, 0, dtype=torch.int64, device=device))
    assert got.log_probs.shape == (3, 0) and got.entropy.isfinite().all()


@pytest.mark.parametrize("splits", [2, 8, 64])
@pytest.mark.parametrize("vocab", [257, 1000, 4099])
def test_a_row_split_over_programs(device, monkeypatch, vocab, splits):
    split_rows(monkeypatch, splits)
    x = torch.randn(3, vocab, device=device) * 5
    check(x, torch.tensor([0, vocab // 2, vocab - 1], device=device), class_weights=1 / vocab)


def test_few_rows_get_wide_programs_and_then_several():
    layout = pytest.importorskip("onepass.kernels.layout")
    device = torch.device("cpu")  # 8 multiprocessors, 4096 threads wanted
    programs = {rows: layout.programs_for(rows, 10**6, 8, device) for rows in (1, 2, 4, 5, 8, 16, 17, 10**6)}
    wide = {1: (1024, 4), 2: (1024, 2), 4: (1024, 1), 5: (1024, 1), 8: (512, 1), 16: (256, 1), 17: (256, 1)}
    assert programs == wide | {10**6: (256, 1)}
    assert layout.programs_for(1, 2 * 4 * 1024 * 8, 8, device) == (1024, 2), "a piece keeps four tiles"
    assert layout.programs_for(1, 100, 8, device) == (32, 1)


def test_bitwise_the_same_from_run_to_run(device):
    x = torch.randn(5, 20011, device=device, dtype=torch.bfloat16).requires_grad_()
    index = torch.randint(20011, (5, 4), device=device)
    runs = []
    for _ in range(3 if device.type == "cpu" else 20):
        got = onepass.softmax_statistics(x, index, class_weights=0.1, metrics=METRICS)
        values = [getattr(got, name) for name in (*DIFFERENTIABLE, "shift", *METRICS)]
        runs.append([*values, *torch.autograd.grad(got.log_probs.sum() + got.entropy.sum(), x)])
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0]))


def test_offsets_beyond_2_to_the_31(device):
    """Rows 2³⁰ elements apart: 6 GiB of addresses, of which a few pages are touched."""
    x = torch.empty(3, 2**30 + 5, dtype=torch.bfloat16, device=device)[:, :1001]
    x.copy_(torch.randn(3, 1001))
    assert x.stride(0) * 2 > 2**31
    check(x, torch.tensor([0, 500, 1000], device=device))
    x = x.detach().requires_grad_()
    log_p = onepass.selective_log_softmax(x, torch.tensor([0, 500, 1000], device=device), inplace_backward=True)
    (gradient,) = torch.autograd.grad(log_p.sum(), x)
    assert gradient.stride(0) == 2**30 + 5 and gradient.isfinite().all()


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements():
    rows, vocab = 17000, 131072
    x = torch.randn(rows, vocab, dtype=torch.bfloat16, device="cuda").requires_grad_()
    assert x.numel() > 2**31
    index = torch.randint(vocab, (rows,), device="cuda")
    log_p, entropy = onepass.selective_log_softmax_and_entropy(x, index)
    (gradient,) = torch.autograd.grad(log_p.sum() + entropy.sum(), x)
    for row in (0, 16383, 16384, rows - 1):
        one = x[row : row + 1].detach().double().requires_grad_()
        expected = statistics(one, index[row : row + 1])
        assert_close(log_p[row : row + 1], expected["log_probs"].detach())
        assert_close(entropy[row : row + 1], expected["entropy"].detach())
        (exact,) = torch.autograd.grad(expected["log_probs"].sum() + expected["entropy"].sum(), one)
        assert_gradient_close(gradient[row : row + 1], exact, upstream=20)


@pytest.mark.parametrize("field", ["log_probs", "entropy"])
def test_the_gradient_of_some_columns(device, field):
    """As of slices of a head. The others may have the largest logit of a row, or all that are not -inf."""
    x = torch.randn(4, 24, generator=torch.Generator().manual_seed(1)).to(device)
    x[0, :16], x[1, 16:], x[2] = 200.0, -torch.inf, -torch.inf
    index, backend = torch.tensor([1, 2, 3, 20], device=device), backend_of(x)
    options = Options(field)
    packed = backend.softmax_statistics(x, Inputs(index), options)[0]
    upstream = torch.tensor([1.0, -2.0, 3.0, 0.5], device=device)
    grads = FieldGradients(**{"selected" if field == "log_probs" else "expected_logit": upstream})
    whole, parts = torch.empty_like(x), [torch.empty(4, n, device=device) for n in (16, 8)]
    backend.softmax_gradient(x, Inputs(index), packed, grads, options, whole)
    for first, part in zip((0, 16), parts):
        columns = x[:, first : first + part.shape[1]].contiguous()
        inputs = Inputs(index).columns(first, first + part.shape[1])
        backend.softmax_gradient(columns, inputs, packed, grads, options, part)
    assert_close(torch.cat(parts, 1), whole)
    assert whole[[0, 1, 3]].isfinite().all() and whole[2].isnan().all()


def test_only_what_was_asked_for(device):
    x, index = torch.randn(2, 20, device=device), torch.tensor([1, 2], device=device)
    got = onepass.softmax_statistics(x, expected_logit=False)
    asked = ("expected_logit", "selected", "weighted_logit", *METRICS)
    assert [getattr(got, name) for name in asked] == [None] * 6
    with pytest.raises(ValueError, match="log_probs: expected statistics taken with an index"):
        _ = got.log_probs
    with pytest.raises(ValueError, match="entropy: expected statistics with expected_logit"):
        _ = got.entropy
    got = onepass.softmax_statistics(x, index, metrics=["mean_logit"])
    assert got.mean_logit is not None and got.is_top1 is None and got.log_sum_sq_probs is None
    with pytest.raises(AttributeError):
        got.shift = x  # frozen


def test_a_loss_of_ones_own(device):
    """The README's promise: any function of the statistics is a loss."""
    x, index = torch.randn(4, 77, device=device), torch.randint(77, (4,), device=device)
    a, b = x.clone().requires_grad_(), x.double().requires_grad_()

    def focal(log_p, entropy, logsumexp):
        return ((1 - log_p.exp()) ** 2 * -log_p + 0.1 * entropy + 1e-3 * logsumexp**2).sum()

    s = onepass.softmax_statistics(a, index)
    focal(s.log_probs, s.entropy, s.logsumexp).backward()
    e = statistics(b, index)
    focal(e["log_probs"], e["entropy"], b.logsumexp(-1)).backward()
    assert_gradient_close(a.grad, b.grad)


@pytest.mark.parametrize("V, rows", [(4, 3), (1003, 5), (4096, 2), (50000, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_only_the_first_of_equal_maxima_is_top1(device, dtype, V, rows):
    """As argmax: at any distance, across vectors, threads and the programs of a split row."""
    shifts = (1, 2, 7, V // 2, V - 1)
    if interpreted(device) and V > 1000:
        shifts = shifts[::2]
    x = torch.randn(rows, V).clamp(max=1.0).to(device, dtype)
    lowest = torch.full_like(x[:1], torch.finfo(dtype).min)
    for shift in shifts:
        tied = x.clone()
        first = torch.randint(V, (rows, 1), device=device)
        second = (first + shift) % V
        tied.scatter_(1, torch.cat([first, second], 1), 5.0)
        tied = torch.cat([tied, lowest])
        index = torch.cat([first, second, torch.randint(V, (rows, 1), device=device)], 1)
        index = torch.cat([index, torch.tensor([[0, 1, V - 1]], device=device)])
        expected = (index == tied.float().argmax(-1, keepdim=True)) & (tied.gather(1, index) == tied.amax(-1, True))
        got = onepass.softmax_statistics(tied, index, temperature=2.0, metrics=["is_top1"]).is_top1
        assert torch.equal(got, expected)
        got = [onepass.softmax_statistics(tied, i, metrics=["is_top1"]).is_top1 for i in index.T.contiguous()]
        assert torch.equal(torch.stack(got, 1), expected)
