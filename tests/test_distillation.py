"""Divergences from a teacher: its K best tokens, or its whole logits; forward and gradient, on every path."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import onepass
from definition import assert_close, assert_gradient_close, divergence, topk_divergence, transform
from inputs import HARD, INF, moved, split_rows
from onepass import reference
from onepass.backend import backend_of
from onepass.core.options import PairOptions, PairRows, Transform
from onepass.softmax.teacher_tokens import teacher_tokens
from paths import interpreted

DIRECTIONS = ("forward", "reverse", "jsd")
ROWS, VOCAB = 5, 301


@pytest.mark.parametrize("with_probs", (True, False))
@pytest.mark.parametrize("masks", (torch.bool, torch.int32, torch.float32, None))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32, torch.float64))
def test_teacher_tokens(device, dtype, masks, with_probs):
    """The kernel against plain PyTorch: strided inputs, log-probs that are -inf, NaN or underflow, every mask."""
    generator = torch.Generator().manual_seed(0)
    log_probs = torch.randn(3, 7, 60, generator=generator).mul(40).to(dtype)
    log_probs[0, 0, :3] = torch.tensor([-INF, math.nan, 0.0])
    ids = torch.randint(-5, 2**40, (3, 60, 7), generator=generator).transpose(1, 2)
    given = [log_probs[..., ::2], ids[..., ::2]]
    of_masks = [torch.randint(2, shape, generator=generator).to(masks or bool) for shape in ((3, 7), (3, 7, 30))]
    given += of_masks if masks else [None, None]
    expected = reference.teacher_tokens(*given, with_probs)
    found = teacher_tokens(*(None if t is None else t.to(device) for t in given), with_probs)
    same = not masks and dtype != torch.bfloat16
    assert [t is None for t in found] == [t is None for t in expected] == [False, False, same, not with_probs]
    for got, wanted in zip(found, expected):
        if wanted is not None:
            assert got.dtype == wanted.dtype and got.is_contiguous() and wanted.is_contiguous()
            torch.testing.assert_close(got.cpu(), wanted, rtol=1e-5, atol=0, equal_nan=True)  # exp of up to 100
    assert expected[1].any() and not expected[1].all() and not expected[0][~expected[1]].any()


@pytest.mark.parametrize("reduction", ("none", "mean"))
@pytest.mark.parametrize("linear", (False, True))
def test_a_teacher_of_inference_mode(device, linear, reduction):
    with torch.inference_mode():
        ids = torch.tensor([[1, 2], [3, 4]], device=device)
        log_probs = torch.full((2, 2), -1.0, device=device)
    x = torch.randn(2, 9, device=device, requires_grad=True)
    logits = onepass.LinearLogits(x, torch.eye(9, device=device)) if linear else x
    onepass.topk_kl_div(logits, ids, log_probs, reduction=reduction).sum().backward()
    assert x.grad.any()


def topk_batch(device, K, dtype=torch.float32, masks="none"):
    """Logits, a teacher's ids and log-probs, and a mask: padding ids are garbage where the mask is 0."""
    generator = torch.Generator().manual_seed(K)
    x = (torch.randn(ROWS, VOCAB, generator=generator) * 3).to(dtype)
    ids = torch.stack([torch.randperm(VOCAB, generator=generator)[:K] for _ in range(ROWS)])
    log_t = torch.randn(ROWS, VOCAB, generator=generator).mul(3).log_softmax(-1).gather(-1, ids)
    mask = None
    if masks == "rows":
        mask = torch.tensor([1, 0, 1, 1, 0])
        ids[1], log_t[4] = -100, float("nan")
    elif masks == "tokens":
        mask = torch.rand(ROWS, K, generator=generator) < 0.7
        mask[0], mask[1] = True, False
        ids, log_t = ids.where(mask, 10**9), log_t.where(mask, float("nan"))
    return x.to(device), ids.to(device), log_t.to(device), None if mask is None else mask.to(device)


def masks_of(mask, ids):
    if mask is None:
        return {}
    return {"teacher_mask" if mask.dim() == ids.dim() else "row_mask": mask}


def check_topk(x, ids, log_t, mask, upstream=None, **options):
    ours, exact = x.clone().requires_grad_(), x.double().requires_grad_()
    got = onepass.topk_kl_div(ours, ids, log_t, **masks_of(mask, ids), reduction="none", **options)
    expected = topk_divergence(exact, ids, log_t, mask, **options)
    # A row is a sum of terms that cancel, each of the size of a log-probability.
    assert_close(got, expected.detach(), scale=10.0 + x.nan_to_num(0, 0, 0).abs().max().item())
    upstream = torch.linspace(0.5, 2, len(x), dtype=got.dtype, device=x.device) if upstream is None else upstream
    (gradient,) = torch.autograd.grad(got, ours, upstream)
    (exactly,) = torch.autograd.grad(expected, exact, upstream.double())
    magnitude = x.nan_to_num(0, 0, 0).abs().max().item()
    assert_gradient_close(gradient, exactly, upstream=20.0 * (1 + magnitude / 16) / options.get("temperature", 1.0))
    return got, gradient


def judged(direction, beta):
    """A direction, with a beta where that has a meaning."""
    return {"direction": direction} | ({"beta": beta} if direction == "jsd" else {})


@pytest.mark.pairs(unless=lambda device, temperature, **_: device == "interpreter" and temperature == 1.0)
@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("masks", ["none", "rows", "tokens"])
@pytest.mark.parametrize("renormalize", [False, True], ids=["whole", "renormalized"])
@pytest.mark.parametrize("K", [1, 5, 64, 128])
def test_topk_against_the_definition(device, K, renormalize, masks, temperature):
    if interpreted(device) and temperature == 1.0:
        pytest.skip("once is enough for the interpreter")
    for direction, dtype in itertools.product(DIRECTIONS, (torch.float32, torch.bfloat16, torch.float64)):
        x, ids, log_t, mask = topk_batch(device, K, dtype, masks)
        options = judged(direction, 0.3) | {"renormalize": renormalize, "temperature": temperature}
        check_topk(x, ids, log_t, mask, **options)


@pytest.mark.pairs
@pytest.mark.parametrize("renormalize", [False, True], ids=["whole", "renormalized"])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("hard", HARD)
def test_topk_hard_students(device, hard, direction, renormalize):
    x, ids, log_t, _ = topk_batch(device, 5)
    ids[:, 0], ids[:, 1] = 3, VOCAB - 1  # one of them is finite in every case that has a finite logit
    x = HARD[hard](x.cpu()).to(device)
    invalid = hard in ("a row of NaN", "one NaN", "one +inf", "a row of -inf")
    ids[1] = torch.tensor([3, VOCAB - 1, 5, 7, 9])
    if direction != "reverse" and "-inf" in hard and not invalid:
        # The teacher gives only what the student can produce: an infinite loss has no gradient to speak of.
        log_t = log_t.masked_fill(x.gather(-1, ids) == -INF, -INF)
    got, gradient = check_topk(x, ids, log_t, None, direction=direction, renormalize=renormalize)
    whole = not (renormalize and hard == "a row of -inf") or direction == "forward"
    if invalid and whole:
        assert got.isnan().tolist() == [False, True, False, False, False]
    assert (gradient[:, x[0] == -INF][[0, 2]] == 0).all()


@pytest.mark.parametrize("renormalize", [False, True], ids=["whole", "renormalized"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_topk_tokens_that_the_teacher_does_not_give(device, direction, renormalize):
    """-inf contributes exactly 0, one token of a row or all of them, as if it were masked."""
    x, ids, log_t, _ = topk_batch(device, 5)
    log_t[0, 2:4], log_t[2] = -INF, -INF
    options = {"direction": direction, "renormalize": renormalize}
    got, gradient = check_topk(x, ids, log_t, None, **options)
    masked, same = check_topk(x, ids, log_t.masked_fill(log_t == -INF, 0.0), log_t != -INF, **options)
    assert torch.equal(got, masked) and torch.equal(gradient, same)
    assert got[2] == 0 and (gradient[2] == 0).all()


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_student_that_cannot_produce_what_the_teacher_does(device, direction):
    x, ids, log_t, _ = topk_batch(device, 5)
    x[0, ids[0, 1]] = -INF
    got = onepass.topk_kl_div(x, ids, log_t, direction=direction, reduction="none")
    expected = topk_divergence(x.double(), ids, log_t, direction=direction)
    assert (got[0] == INF) == (direction == "forward")
    assert_close(got, expected)


def test_topk_magnitudes(device):
    x, ids, log_t, _ = topk_batch(device, 5)
    for direction, renormalize in itertools.product(DIRECTIONS, (False, True)):
        check_topk(x * 1e4, ids, log_t, None, direction=direction, renormalize=renormalize)
        check_topk(x, ids, log_t * 1e3, None, direction=direction, renormalize=renormalize)


@pytest.mark.parametrize("renormalize", [False, True], ids=["whole", "renormalized"])
@pytest.mark.parametrize("bad", [-1, VOCAB, 10**9])
def test_topk_ids_outside_the_vocabulary(device, raises_index_error, bad, renormalize):
    x, ids, log_t, _ = topk_batch(device, 5)
    ids[2, 3] = bad
    x.requires_grad_()
    if raises_index_error:
        with pytest.raises(IndexError, match=rf"teacher_ids: expected values in \[0, {VOCAB}\), got {bad} in row 2"):
            onepass.topk_kl_div(x, ids, log_t, renormalize=renormalize)
        return
    got = onepass.topk_kl_div(x, ids, log_t, renormalize=renormalize, reduction="none")
    assert got.isnan().tolist() == [row == 2 for row in range(ROWS)]
    others = [0, 1, 3, 4]
    (gradient,) = torch.autograd.grad(got[others].sum(), x)
    assert gradient[others].isfinite().all()


def test_renormalize_reads_the_given_logits_alone(device):
    x, ids, log_t, _ = topk_batch(device, 5)
    poisoned = torch.full_like(x, float("nan")).scatter(-1, ids, x.gather(-1, ids))
    got = onepass.topk_kl_div(poisoned, ids, log_t, renormalize=True)
    assert torch.equal(got, onepass.topk_kl_div(x, ids, log_t, renormalize=True)) and got.isfinite()


def test_rows_without_a_token_are_not_read(device):
    x, ids, log_t, _ = topk_batch(device, 5)
    x[1] = float("nan")
    mask = torch.tensor([1, 0, 1, 1, 1], device=device)
    x.requires_grad_()
    loss = onepass.topk_kl_div(x, ids, log_t, **masks_of(mask, ids))
    (gradient,) = torch.autograd.grad(loss, x)
    assert loss.isfinite() and (gradient[1] == 0).all() and gradient.isfinite().all()


def seed_loss(gathered, teacher_log_probs, mask):
    """The kernel that top-K distillation began with, as its comments define it: normalised over all K gathered
    logits, the teacher taken as it is, masked tokens left out of the sum alone."""
    log_s = gathered - gathered.logsumexp(-1, keepdim=True)
    return (teacher_log_probs.exp() * (teacher_log_probs - log_s) * mask).sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_seed_is_reproduced(device, dtype):
    """Gathered logits are a vocabulary of K tokens. With the gather inside, ``renormalize`` is the same where the
    teacher is normalised and rows are masked as a whole."""
    generator = torch.Generator().manual_seed(0)
    gathered = (torch.randn(2, 7, 20, generator=generator) * 3).to(dtype).to(device).requires_grad_()
    exact = gathered.detach().double().requires_grad_()
    log_t = torch.randn(2, 7, 20, generator=generator).log_softmax(-1).sub(0.3).to(dtype).to(device)
    mask = (torch.rand(2, 7, 20, generator=generator) < 0.7).to(device)
    ids = torch.arange(20, device=device).expand(2, 7, 20)
    expected = seed_loss(exact, log_t.double(), mask)
    for given_mask in (mask, mask.int(), mask.float()):
        got = onepass.topk_kl_div(gathered, ids, log_t, **masks_of(given_mask, ids), reduction="sum")
        assert_close(got, expected.detach(), scale=100.0)
    upstream = torch.tensor(0.7, dtype=dtype, device=device)
    (gradient,) = torch.autograd.grad(got, gathered, upstream)
    assert_gradient_close(gradient, torch.autograd.grad(expected, exact, upstream.double())[0], upstream=4.0)

    x = (torch.randn(2, 7, VOCAB, generator=generator) * 3).to(dtype).to(device).requires_grad_()
    exact = x.detach().double().requires_grad_()
    ids = torch.rand(2, 7, VOCAB, generator=generator).topk(20).indices.to(device)
    rows = mask[..., :1].expand(2, 7, 20)
    expected = seed_loss(exact.gather(-1, ids), log_t.double().log_softmax(-1), rows)
    got = onepass.topk_kl_div(x, ids, log_t.log_softmax(-1), teacher_mask=rows, renormalize=True, reduction="sum")
    assert_close(got, expected.detach(), scale=100.0)
    (gradient,) = torch.autograd.grad(got, x)
    assert_gradient_close(gradient, torch.autograd.grad(expected, exact)[0], upstream=4.0)


@pytest.mark.pairs
@pytest.mark.parametrize("renormalize", [False, True], ids=["whole", "renormalized"])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("masks", ["none", "tokens"])
def test_distillation_loss(device, masks, reduction, temperature, renormalize):
    x, ids, log_t, mask = topk_batch(device, 5, masks=masks)
    labels = torch.tensor([3, 4, -100, 0, VOCAB - 1], device=device)
    labels[0] = -100  # a row with a teacher and no label
    ours, exact = x.clone().requires_grad_(), x.double().requires_grad_()
    options = {"temperature": temperature, "renormalize": renormalize, "direction": "jsd", "beta": 0.2}
    got = onepass.distillation_loss(
        ours, labels, ids, log_t, **masks_of(mask, ids), alpha=0.3, reduction=reduction, **options
    )
    soft = topk_divergence(exact, ids, log_t, mask, **options)
    hard = F.cross_entropy(exact, labels, reduction="none")
    if reduction == "mean":
        rows = ROWS if mask is None else mask.any(-1).sum()
        soft, hard = soft.sum() / rows, hard.sum() / 3
    elif reduction == "sum":
        soft, hard = soft.sum(), hard.sum()
    expected = 0.3 * soft + 0.7 * hard
    assert_close(got, expected.detach(), scale=20.0)
    (gradient,) = torch.autograd.grad(got.sum(), ours)
    assert_gradient_close(gradient, torch.autograd.grad(expected.sum(), exact)[0], upstream=4.0)


def test_accumulation_over_micro_batches(device):
    """``num_items`` of the whole batch: the micro-batches add up to it, however unevenly they are filled."""
    x, ids, log_t, mask = topk_batch(device, 5, masks="tokens")
    labels = torch.tensor([3, -100, 5, -100, 0], device=device)
    items = mask.any(-1).sum()
    for call in (
        lambda r, n: onepass.topk_kl_div(x[r], ids[r], log_t[r], teacher_mask=mask[r], num_items=n),
        lambda r, n: onepass.distillation_loss(x[r], labels[r], ids[r], log_t[r], teacher_mask=mask[r], num_items=n),
        lambda r, n: onepass.kl_div(x[r], x[r].flip(-1), row_mask=mask[r].any(-1), num_items=n),
    ):
        whole = call(slice(0, ROWS), items)
        parts = call(slice(0, 2), int(items)) + call(slice(2, ROWS), float(items))
        torch.testing.assert_close(parts, whole)
    mean = onepass.topk_kl_div(x, ids, log_t, **masks_of(mask, ids), reduction="mean")
    torch.testing.assert_close(mean, onepass.topk_kl_div(x, ids, log_t, **masks_of(mask, ids), num_items=items))


def test_nothing_to_learn_from(device):
    x, ids, log_t, _ = topk_batch(device, 5)
    x.requires_grad_()
    none = torch.zeros(ROWS, dtype=torch.bool, device=device)
    ignored = torch.full((ROWS,), -100, device=device)
    for loss in (
        onepass.topk_kl_div(x, ids, log_t, **masks_of(none, ids), reduction="mean"),
        onepass.topk_kl_div(x, ids, log_t, **masks_of(none, ids), reduction="mean", renormalize=True),
        onepass.distillation_loss(x, ignored, ids, log_t, row_mask=none),
        onepass.kl_div(x, x.detach() * 2, row_mask=none, reduction="mean"),
    ):
        assert loss == 0 and (torch.autograd.grad(loss, x)[0] == 0).all()
    for loss in (
        onepass.topk_kl_div(x[:0], ids[:0], log_t[:0]),
        onepass.topk_kl_div(x, ids[:, :0], log_t[:, :0], renormalize=True),
        onepass.kl_div(x[:0], x[:0].detach(), reduction="mean"),
    ):
        assert loss == 0 and torch.autograd.grad(loss, x)[0].shape == x.shape


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


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_gradcheck(direction):
    generator = torch.Generator().manual_seed(0)
    double = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    x, y = double(3, 11).requires_grad_(), double(3, 11).requires_grad_()
    ids, log_t = torch.tensor([[1, 5, 10], [0, 3, 3], [7, 8, 9]]), double(3, 3).log_softmax(-1)
    labels = torch.tensor([2, -100, 3])
    options = judged(direction, 0.3)
    assert torch.autograd.gradcheck(
        lambda x, y: onepass.kl_div(x, y, softcap=3.0, teacher_temperature=2.0, **options), (x, y)
    )
    for renormalize in (False, True):
        both = options | {"renormalize": renormalize, "temperature": 1.5}
        assert torch.autograd.gradcheck(lambda x: onepass.topk_kl_div(x, ids, log_t, **both), (x,))  # noqa: B023
        assert torch.autograd.gradcheck(
            lambda x: onepass.distillation_loss(x, labels, ids, log_t, **both),  # noqa: B023
            (x,),
        )


def test_no_second_derivative(device):
    x, y = torch.randn(2, 9, device=device, requires_grad=True), torch.randn(2, 9, device=device)
    with pytest.raises(RuntimeError, match="second derivatives"):
        torch.autograd.grad(onepass.kl_div(x, y), x, create_graph=True)


def test_modules_are_the_functions(device):
    x, ids, log_t, mask = topk_batch(device, 5, masks="tokens")
    options = {"direction": "jsd", "beta": 0.3, "temperature": 2.0, "reduction": "mean"}
    module = onepass.TopKKLDivLoss(renormalize=True, **options)
    assert torch.equal(
        module(x, ids, log_t, teacher_mask=mask),
        onepass.topk_kl_div(x, ids, log_t, **masks_of(mask, ids), renormalize=True, **options),
    )
    assert "direction='jsd'" in repr(module)
    y = x.flip(-1)
    module = onepass.KLDivLoss(vocab_size=200, teacher_temperature=3.0, **options)
    expected = onepass.kl_div(x, y, vocab_size=200, teacher_temperature=3.0, **options)
    assert torch.equal(module(x, y), expected)
    assert torch.equal(
        module(x, y, num_items=7), onepass.kl_div(x, y, num_items=7, vocab_size=200, teacher_temperature=3.0, **options)
    )


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
