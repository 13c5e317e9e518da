"""Divergences between whole logits of a student and a teacher; forward and gradient, on every path."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import onepass
from definition import assert_close, assert_gradient_close, divergence, transform
from distillation_cases import DIRECTIONS, VOCAB, judged
from inputs import HARD, INF, moved, split_rows
from onepass import reference
from onepass.backend import backend_of
from onepass.core.options import PairOptions, PairRows, Transform
from paths import interpreted


def check_pair(student, teacher, mask=None, direction="forward", beta=0.5, vocab_size=None, **options):
    """Loss and both gradients against the definition in float64."""
    of_student = {k: options[k] for k in ("temperature", "softcap") if k in options}
    of_teacher = {"temperature": options.get("temperature", 1.0)}
    of_teacher |= {k[8:]: v for k, v in options.items() if k.startswith("teacher_")}
    ours = [x.detach().requires_grad_() for x in (student, teacher)]
    got = onepass.kl_div(
        *ours, row_mask=mask, direction=direction, beta=beta, vocab_size=vocab_size, reduction="none", **options
    )
    exact = [x.detach().double().requires_grad_() for x in (student, teacher)]
    logs = [transform(x[..., :vocab_size], **t).log_softmax(-1) for x, t in zip(exact, (of_student, of_teacher))]
    expected = divergence(logs[1], logs[0], direction, beta).sum(-1)
    if mask is not None:
        expected = expected.where(mask.bool(), 0.0)
    magnitude = max((x.detach().double().nan_to_num(0, 0, 0).abs().max().item() for x in ours if x.numel()), default=0)
    infinite = expected.detach() > 1e30  # of what float32 has no room for either
    scale = 10.0 + 2 * (magnitude if magnitude < 1e30 else 0) / options.get("temperature", 1.0)
    assert_close(got.masked_fill(infinite, INF), expected.detach().masked_fill(infinite, INF), scale=scale)
    assert (got[infinite] > 1e30).all()
    finite = ~infinite
    upstream = torch.linspace(0.5, 2, max(1, expected.numel()), device=got.device)[: expected.numel()]
    upstream = upstream.view(expected.shape).where(finite, 0.0).to(got.dtype)
    gradients = torch.autograd.grad(got, ours, upstream)
    for gradient, x in zip(gradients, torch.autograd.grad(expected, exact, upstream.double())):
        x = x.masked_fill(~finite.unsqueeze(-1), 0.0)  # an infinite loss has no gradient to speak of
        assert_gradient_close(gradient, x, upstream=2 * scale / options.get("temperature", 1.0))
    return got, gradients


@st.composite
def pairs(draw):
    rows = draw(st.lists(st.integers(0, 5), max_size=3).filter(lambda s: math.prod(s) <= 20))
    vocab = draw(st.sampled_from([1, 2, 7, 8, 31, 255, 256, 257, 1000, 1031, 4099]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))

    def logits():
        dtype = draw(st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]))
        values = torch.randn(*rows, vocab, generator=generator) * draw(st.sampled_from([0.1, 3.0, 50.0]))
        layout = draw(st.sampled_from(["contiguous", "shifted", "transposed", "strided"]))
        if layout == "shifted":
            values = F.pad(values, (3, 8))[..., 3 : 3 + vocab]
        elif layout == "transposed" and len(rows) >= 2:
            values = values.transpose(0, 1).contiguous().transpose(0, 1)
        elif layout == "strided":
            values = values.repeat_interleave(2, dim=-1)[..., ::2]
        return values.to(dtype)

    options = judged(draw(st.sampled_from(DIRECTIONS)), draw(st.sampled_from([0.0, 0.1, 0.5, 1.0])))
    for name, values in (("temperature", [0.7, 2.0]), ("softcap", [5.0, 30.0])):
        for of in ("", "teacher_"):
            if draw(st.booleans()):
                options[of + name] = draw(st.sampled_from(values))
    if draw(st.booleans()):
        options["vocab_size"] = draw(st.integers(1, vocab))
    mask = torch.rand(rows, generator=generator) < 0.6 if draw(st.booleans()) else None
    return logits(), logits(), mask, options


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(case=pairs())
def test_pair_against_the_definition(device, case):
    student, teacher, mask, options = case
    if options["direction"] == "jsd" and options["beta"] in (0.0, 1.0):
        named = {0.0: "forward", 1.0: "reverse"}[options["beta"]]
        x, y = moved(student, device), moved(teacher, device)
        rest = {k: v for k, v in options.items() if k not in ("direction", "beta")}
        assert torch.equal(onepass.kl_div(x, y, **options), onepass.kl_div(x, y, direction=named, **rest))
        return
    mask = None if mask is None else mask.to(device)
    check_pair(moved(student, device), moved(teacher, device), mask, **options)


@pytest.mark.pairs(unless=lambda device, vocab, splits, **_: device != "gpu" and (vocab, splits) != (513, 4))
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("vocab", [513, 4096])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("hard", HARD)
def test_pair_hard_inputs(device, monkeypatch, hard, direction, vocab, splits):
    """A hard student, a hard teacher, and both."""
    if device.type == "cpu" and (vocab, splits) != (513, 4):
        pytest.skip("once is enough on a CPU")
    split_rows(monkeypatch, 2 if interpreted(device) else splits)  # programs take milliseconds there
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(3, vocab, generator=generator) for _ in range(2))
    hard_x, hard_y = HARD[hard](x), HARD[hard](y)
    for student, teacher in ((hard_x, y), (x, hard_y), (hard_x, hard_y)):
        got, gradients = check_pair(student.to(device), teacher.to(device), direction=direction)
        invalid = hard in ("a row of NaN", "one NaN", "one +inf", "a row of -inf")
        assert got.isnan().tolist() == [False, invalid, False]
    if "-inf" in hard and hard != "a row of -inf":
        assert got.isfinite().all(), "what neither can produce contributes nothing"
        for gradient, logits in zip(gradients, (hard_x, hard_y)):
            assert (gradient[logits.to(device) == -INF] == 0).all()


@pytest.mark.parametrize("vocab", (VOCAB, 9000))
@pytest.mark.parametrize("direction", ("forward", "reverse"))
def test_states_of_columns_merge(device, direction, vocab):
    """The states of parts of the vocabulary, as the processes of a group exchange them, against all columns at once."""
    generator = torch.Generator().manual_seed(0)
    pair = [torch.randn(8, vocab, generator=generator).mul(3) for _ in range(2)]
    cut = (0, vocab // 3, vocab // 2, vocab)
    for x, row in zip(pair, (0, 4)):
        x[row, : cut[1]] = -INF  # a whole part
        x[row + 1] *= 1e4
        x[row + 2, cut[1] + 1] = math.nan
        x[row + 3, ::3] = -INF
    student, teacher = (x.to(device) for x in pair)
    row_mask = torch.tensor([1, 1, 1, 1, 1, 1, 1, 0], device=device)
    read = PairRows(row_mask)
    options = PairOptions(direction, 0.5, Transform(0.7), Transform(softcap=30.0))
    backend = backend_of(student, teacher)
    states = torch.stack(
        [backend.divergence_states(student[:, a:b], teacher[:, a:b], read, options) for a, b in itertools.pairwise(cut)]
    )
    found = backend.merge_divergences(states, student, teacher, read, options).cpu()
    expected = reference.divergence(*(x.double() for x in pair), PairRows(row_mask.cpu()), options)
    assert torch.equal(found.isfinite().all(0), expected.isfinite().all(0))
    for got, wanted in zip(found.T, expected.T):
        if wanted.isfinite().all():
            assert_close(got, wanted, scale=max(1.0, wanted.abs().max().item()))
        else:
            infinite, nothing = wanted[6] == INF, wanted[6].isnan()
            assert (got[6] == INF) == infinite and got[6].isnan() == nothing


def test_a_teacher_that_cannot_produce_what_the_student_does(device):
    x, y = torch.randn(2, 50, device=device), torch.randn(2, 50, device=device)
    y[0, 3] = -INF
    forward, reverse, jsd = (onepass.kl_div(x, y, direction=d, reduction="none") for d in DIRECTIONS)
    assert forward.isfinite().all() and jsd.isfinite().all() and reverse.tolist()[0] == INF and reverse[1].isfinite()


@pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
def test_kl_div_is_torchs(device, reduction):
    x, y = torch.randn(2, 4, 99, device=device), torch.randn(2, 4, 99, device=device)
    terms = F.kl_div(x.double().log_softmax(-1), y.double().log_softmax(-1), log_target=True, reduction="none")
    expected = {"sum": terms.sum(), "mean": terms.sum() / 8, "none": terms.sum(-1)}[reduction]
    assert_close(onepass.kl_div(x, y, reduction=reduction), expected)


@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
def test_jsd_is_trls(device, beta):
    """The generalised JSD as TRL's GKD trainer composes it of two `F.kl_div` and a logsumexp, mean over the rows."""
    x, y = torch.randn(4, 99, device=device), torch.randn(4, 99, device=device)
    s, t = (z.double().div(0.9).log_softmax(-1) for z in (x, y))
    mixture = torch.logsumexp(torch.stack([s + math.log1p(-beta), t + math.log(beta)]), dim=0)
    of_teacher, of_student = (F.kl_div(mixture, p, log_target=True, reduction="batchmean") for p in (t, s))
    expected = beta * of_teacher + (1 - beta) * of_student
    got = onepass.kl_div(x, y, direction="jsd", beta=beta, temperature=0.9, reduction="mean")
    assert_close(got, expected)
    ids = torch.arange(99, device=device).expand(4, 99)
    log_t = y.div(0.9).log_softmax(-1)
    topk = onepass.topk_kl_div(x, ids, log_t, direction="jsd", beta=beta, temperature=0.9, reduction="mean")
    assert_close(topk, expected)


def test_temperatures_of_rows_are_not_rounded_for_the_narrower_logits():
    student, teacher = torch.randn(4, 9, dtype=torch.float64), torch.randn(4, 9)
    temperature = torch.rand(4, dtype=torch.float64) + 0.5
    for one, other in ((student, teacher), (teacher, student)):
        found = onepass.kl_div(one, other, temperature=temperature, reduction="none")
        expected = onepass.kl_div(one.double(), other.double(), temperature=temperature, reduction="none")
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_vocabularies_of_different_size(device):
    """A padded teacher, a padded student; gradients beyond the common columns are 0, whatever stands there."""
    x, y = torch.randn(3, 120, device=device), torch.randn(3, 131, device=device)
    x[:, 100:] = float("nan")
    x.requires_grad_()
    y.requires_grad_()
    for direction in DIRECTIONS:
        got = onepass.kl_div(x, y, direction=direction, vocab_size=100)
        a, b = torch.autograd.grad(got, (x, y))
        assert (a[:, 100:] == 0).all() and (b[:, 100:] == 0).all()
        cut = [z[:, :100].detach().requires_grad_() for z in (x, y)]
        expected = onepass.kl_div(*cut, direction=direction)
        assert torch.equal(got, expected)
        for gradient, same in zip((a, b), torch.autograd.grad(expected, cut)):
            assert torch.equal(gradient[:, :100], same)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("is_head", [False, True], ids=["logits", "a head"])
def test_a_teacher_that_is_padded_further(device, direction, is_head):
    """Than the student, whose columns are all compared."""
    hidden, weight = torch.randn(4, 8, device=device), torch.randn(70, 8, device=device)
    teacher = torch.randn(4, 90, device=device)
    student = onepass.LinearLogits(hidden, weight) if is_head else hidden @ weight.t()
    got = onepass.kl_div(student, teacher, vocab_size=70, direction=direction)
    torch.testing.assert_close(got, onepass.kl_div(hidden @ weight.t(), teacher[:, :70], direction=direction))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_dtype_of_a_head_and_a_teacher_of_float64(reduction):
    hidden, weight, teacher = torch.randn(4, 8), torch.randn(70, 8), torch.randn(4, 70, dtype=torch.float64)
    got = onepass.kl_div(onepass.LinearLogits(hidden, weight), teacher, reduction=reduction)
    assert got.dtype == torch.float64
    expected = onepass.kl_div((hidden @ weight.t()).double(), teacher, reduction=reduction)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("splits", [1, 8])
def test_bitwise_the_same_from_run_to_run(device, monkeypatch, splits):
    split_rows(monkeypatch, splits)
    x, y = (torch.randn(3, 20011, device=device, dtype=torch.bfloat16).requires_grad_() for _ in range(2))
    for direction in DIRECTIONS:
        runs = []
        for _ in range(2 if device.type == "cpu" else 20):
            loss = onepass.kl_div(x, y, direction=direction)
            runs.append((loss, *torch.autograd.grad(loss, (x, y))))
        assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0]))


@pytest.mark.parametrize("direction", ["forward", "jsd"])
def test_what_hooks_unpack_may_be_stored_by_columns(device, direction):
    def unpack(t):
        return t.mT.contiguous().mT if t.dim() > 1 else t

    student, teacher = torch.randn(2, 6, 9, device=device).requires_grad_().unbind()
    expected = torch.autograd.grad(onepass.kl_div(student, teacher, direction=direction), student)[0]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
        loss = onepass.kl_div(student, teacher, direction=direction)
    assert torch.equal(torch.autograd.grad(loss, student)[0], expected)


def test_no_second_derivative(device):
    x, y = torch.randn(2, 9, device=device, requires_grad=True), torch.randn(2, 9, device=device)
    with pytest.raises(RuntimeError, match="second derivatives"):
        torch.autograd.grad(onepass.kl_div(x, y), x, create_graph=True)


def test_pair_offsets_beyond_2_to_the_31(device):
    """Rows 2³⁰ elements apart: 6 GiB of addresses, of which a few pages are touched."""
    x = torch.empty(3, 2**30 + 8, dtype=torch.bfloat16, device=device)[:, :1001]
    x.copy_(torch.randn(3, 1001))
    check_pair(torch.randn(3, 1001, device=device), x)


@pytest.mark.gpu
def test_pair_of_more_than_2_to_the_31_elements():
    rows, vocab = 17000, 131072
    x = torch.randn(rows, vocab, dtype=torch.bfloat16, device="cuda").requires_grad_()
    y = torch.randn(rows, vocab, dtype=torch.bfloat16, device="cuda")
    assert x.numel() > 2**31
    for direction in ("forward", "jsd"):
        loss = onepass.kl_div(x, y, direction=direction, reduction="none")
        (gradient,) = torch.autograd.grad(loss.sum(), x)
        for row in (0, 16383, 16384, rows - 1):
            s, t = (z[row].detach().double() for z in (x, y))
            s.requires_grad_()
            expected = divergence(t.log_softmax(-1), s.log_softmax(-1), direction).sum()
            assert_close(loss[row], expected.detach())
            assert_gradient_close(gradient[row], torch.autograd.grad(expected, s)[0], upstream=20)
