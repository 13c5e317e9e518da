"""Divergences from the K best tokens of a teacher, and distillation; forward and gradient, on every path."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

import onepass
from definition import assert_close, assert_gradient_close, topk_divergence
from distillation_cases import DIRECTIONS, ROWS, VOCAB, judged, masks_of, topk_batch
from inputs import HARD, INF
from onepass import reference
from onepass.softmax.teacher_tokens import teacher_tokens
from paths import interpreted


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


def loss_of_gathered(gathered, teacher_log_probs, mask):
    """Top-K distillation over gathered logits: normalized over all K, the teacher as it is, masked tokens only left out
    of the sum."""
    log_s = gathered - gathered.logsumexp(-1, keepdim=True)
    return (teacher_log_probs.exp() * (teacher_log_probs - log_s) * mask).sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_equals_the_loss_of_gathered_logits(device, dtype):
    """Gathered logits are a vocabulary of K tokens. With the gather inside, ``renormalize`` is the same where the
    teacher is normalised and rows are masked as a whole."""
    generator = torch.Generator().manual_seed(0)
    gathered = (torch.randn(2, 7, 20, generator=generator) * 3).to(dtype).to(device).requires_grad_()
    exact = gathered.detach().double().requires_grad_()
    log_t = torch.randn(2, 7, 20, generator=generator).log_softmax(-1).sub(0.3).to(dtype).to(device)
    mask = (torch.rand(2, 7, 20, generator=generator) < 0.7).to(device)
    ids = torch.arange(20, device=device).expand(2, 7, 20)
    expected = loss_of_gathered(exact, log_t.double(), mask)
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
    expected = loss_of_gathered(exact.gather(-1, ids), log_t.double().log_softmax(-1), rows)
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


@pytest.mark.parametrize("loss", ["topk_kl_div", "distillation_loss"])
def test_a_mean_over_rows_of_both_masks(device, loss):
    """It counts the rows that neither mask leaves out."""
    x, ids, log_t, _ = topk_batch(device, 3)
    rows = torch.tensor([True, False, True, True, False], device=device)
    tokens = torch.ones_like(ids, dtype=torch.bool)
    tokens[2] = False
    of = (
        {"target": torch.zeros(len(x), dtype=torch.int64, device=device), "alpha": 1.0} if loss != "topk_kl_div" else {}
    )
    function = getattr(onepass, loss)
    options = of | {"teacher_ids": ids, "teacher_log_probs": log_t, "row_mask": rows, "teacher_mask": tokens}
    every = onepass.topk_kl_div(x, ids, log_t, reduction="none")
    assert_close(function(x, **options), every[[0, 3]].mean())


@pytest.mark.usefixtures("one_thread")
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


def test_a_part_of_weight_0_is_left_out(device):
    """An infinite one, since a logit is -inf, would make the sum NaN."""
    x = torch.tensor([[0.0, float("-inf"), 1.0]], device=device, requires_grad=True)
    first, second, log_probs = (torch.tensor(v, device=device) for v in ([0], [1], [[-0.1]]))
    for target, ids, alpha in ((first, second, 0.0), (second, first, 1.0)):
        found = onepass.distillation_loss(x, target, ids.unsqueeze(-1), log_probs, alpha=alpha)
        of_teacher = onepass.topk_kl_div(x, ids.unsqueeze(-1), log_probs)
        expected = of_teacher if alpha else onepass.cross_entropy(x, target)
        assert found.isfinite() and torch.equal(found, expected)
        gradients = [torch.autograd.grad(loss, x)[0] for loss in (found, expected)]
        torch.testing.assert_close(*gradients, rtol=0, atol=1e-7)
