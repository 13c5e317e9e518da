"""Statistics and gradient in one launch, against the definition: what a linear head's cross-entropy runs on."""

import sys

import pytest
import torch

from definition import assert_close, assert_gradient_close, statistics
from inputs import HARD
from onepass import reference
from onepass.backend import backend_of
from onepass.core.options import NOT_DIFFERENTIABLE, Average, FieldGradients, Inputs, Options, Transform, pick

kernels = pytest.importorskip("onepass.kernels")
softmax_loss = sys.modules.get("onepass.kernels.softmax_loss")
ROWS, PLAIN = 7, Options("log_probs")


@pytest.fixture(autouse=True)
def only_kernels(device):
    if backend_of(torch.empty(0, device=device)) is reference:
        pytest.skip("the reference has no launch of both")


def check(logits, *, transforms=None, weights=None, row_mask=None, fields="log_probs"):
    """Fields and gradient for random upstream gradients, of which a row has none."""
    transforms = transforms or {}
    device, vocab = logits.device, logits.shape[-1]
    generator = torch.Generator().manual_seed(0)
    index = torch.randint(vocab, (ROWS,), generator=generator).to(device)
    options = Options(fields, Transform(**transforms))
    names = [n for n in options.names() if n not in NOT_DIFFERENTIABLE and n != "shift"]
    upstream = {n: torch.randn(ROWS, generator=generator).to(device) for n in names}
    for value in upstream.values():
        value[-1] = 0.0
    exact = logits.double().requires_grad_()
    expected = statistics(exact, index, row_mask=row_mask, class_weights=weights, **transforms)
    given = logits.clone(memory_format=torch.preserve_format)
    assert kernels.supports_fused_loss(given, index, options)
    grads = FieldGradients.of(" ".join(upstream), list(upstream.values()))
    results = kernels.softmax_loss(given, Inputs(index, row_mask, weights), grads, options, given)
    got = dict(zip(options.names(), pick(results, options)))
    magnitude = expected["shift"].abs().nan_to_num(0, 0, 0).max().item()
    for name in options.names():
        assert_close(got[name], expected[name].detach(), scale=max(1.0, magnitude), name=name)
    outputs = [torch.where(expected[n].isinf(), 0.0, expected[n]) for n in names]
    upstreams = [torch.where(expected[n].isinf(), 0.0, upstream[n].double()) for n in names]
    (gradient,) = torch.autograd.grad(outputs, exact, upstreams)
    gradient[-1] = 0.0  # also where the row is NaN
    slope = abs(transforms.get("logit_scale", 1.0)) / transforms.get("temperature", 1.0)
    finite = torch.stack([e.isfinite() | e.isnan() for e in (expected[n].detach() for n in names)]).all(0)
    assert_gradient_close(given[finite], gradient[finite], upstream=6.0 * slope * (1 + magnitude / 16))


def random(device, vocab, dtype=torch.float32):
    return (torch.randn(ROWS, vocab, generator=torch.Generator().manual_seed(1)) * 3).to(dtype).to(device)


def sizes(device):
    """One program a row, also the widest, and where programs run side by side, several."""
    return (264, 50264, 24576, 151936) if device.type == "cuda" else (8, 264, 1000)


@pytest.mark.parametrize("name", HARD)
def test_hard_inputs(device, name):
    for vocab in sizes(device)[1:]:
        logits = HARD[name](random("cpu", vocab)).to(device)
        check(logits)
        check(logits, fields="log_probs entropy is_top1")


def test_the_first_of_equal_maxima(device):
    for vocab in sizes(device):
        first, second = 3, vocab - 5
        logits = random(device, vocab).clamp(max=2.0)
        logits[:, first] = logits[:, second] = 4.0
        index = torch.tensor([first, second, 0, first, second, vocab - 1, first], device=device)
        options = Options("log_probs is_top1")
        grads = FieldGradients(selected=torch.ones(ROWS, device=device))
        is_top1 = kernels.softmax_loss(logits, Inputs(index), grads, options, logits)[2]
        assert is_top1.tolist() == (index == first).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dtypes(device, dtype):
    for vocab in sizes(device):
        check(random(device, vocab, dtype))


def test_options(device):
    everything = "selected shift log_normalizer expected_logit weighted_logit is_top1"
    for vocab in sizes(device):
        logits = random(device, vocab)
        weights = torch.rand(vocab, generator=torch.Generator().manual_seed(2)).to(device)
        mask = torch.arange(ROWS, device=device) % 3 != 1
        check(logits, transforms={"softcap": 5.0, "temperature": 0.7, "logit_scale": -0.5})
        check(logits, weights=weights, fields=everything, row_mask=mask)
        check(logits, weights=weights, fields=everything.replace("selected", "log_probs"), transforms={"softcap": 9.0})
        check(logits, fields="log_probs entropy", row_mask=mask)
        check(logits, fields="selected entropy is_top1", transforms={"temperature": 0.3, "softcap": 5.0})


AVERAGES = {"mean": (-1.0, True), "sum": (0.5, False), "divisor": (1.0, False)}


LONG = (5, "sum"), (33, "mean"), (33, "divisor")  # seconds each, in the interpreter


@pytest.mark.parametrize("rows, name", [
    pytest.param(rows, name, marks=[pytest.mark.exhaustive] if (rows, name) in LONG else [])
    for rows in (1, 5, 33, 512) for name in AVERAGES
])  # fmt: skip
def test_the_average_of_few_rows_takes_one_launch(device, monkeypatch, rows, name):
    """Its gradient is bitwise that of three launches, for any upstream gradient of the last average."""
    if rows == 512 and device.type != "cuda":
        pytest.skip("takes long in the interpreter, which runs a program at a time")
    divisor = torch.tensor(3, device=device) if name == "divisor" else None
    launches = []
    for module in (softmax_loss, sys.modules["onepass.kernels.row_average"]):
        real = module.launch
        monkeypatch.setattr(module, "launch", lambda *a, f=real: (launches.append(a[0].__name__), f(*a))[1])
    for vocab in sizes(device)[1:2] if rows > 5 and device.type != "cuda" else sizes(device):
        generator = torch.Generator().manual_seed(rows)
        logits = (torch.randn(rows, vocab, generator=generator) * 3).bfloat16().to(device)
        index = torch.randint(vocab, (rows,), generator=generator).to(device)
        index[2::3], inside = -100, index.clone()
        outside = index.where(torch.arange(rows, device=device) != rows - 1, vocab)
        none = torch.full_like(index, -100)
        # Every guess, where some rows count and where none does; a wrong one elsewhere.
        for target, mask, masked, guesses in (
            (index, index, -100, (1.0, 2.0, torch.nan)), (inside, None, 0, (2.0,)), (outside, outside, -100, (2.0,)),
            (inside, index != -100, 0, (2.0,)), (none, none, -100, (1.0, 2.0, torch.nan)),
        ):  # fmt: skip
            average = Average(*AVERAGES[name], divisor, masked)
            if mask is None and average.counted:
                continue
            options, inputs = PLAIN._replace(masked=masked), Inputs(target, mask)
            for guess in guesses:
                last = None if guess == 1.0 else torch.tensor([5.0, 7.0, guess], device=device)
                found = []
                for few in (512, 0):
                    monkeypatch.setattr(softmax_loss, "FEW_ROWS", few)
                    out = torch.full_like(logits, 7.0)
                    launches.clear()
                    results, total, share = kernels.softmax_average(logits, inputs, average, last, options, out)
                    assert len(launches) == (1 if few else 3)
                    found.append((total, out, results[0][:2], results[1], share[:2]))
                assert_close(found[0][0], found[1][0])  # sums in another order
                for one, several in zip(found[0][1:], found[1][1:]):
                    assert torch.equal(one.nan_to_num(9.0), several.nan_to_num(9.0))


def test_rows_apart(device):
    vocab = sizes(device)[1]
    padded = torch.full((ROWS, vocab + 8), float("nan"), device=device)
    padded[:, :vocab] = random(device, vocab)
    logits = padded[:, :vocab]
    check(logits)
    index = torch.zeros(ROWS, dtype=torch.long, device=device)
    grads = FieldGradients(selected=torch.ones(ROWS, device=device))
    kernels.softmax_loss(logits, Inputs(index), grads, PLAIN, logits)
    assert padded[:, vocab:].isnan().all() and logits.isfinite().all()


def test_an_index_outside_is_nan(device):
    logits = random(device, sizes(device)[1])
    index = torch.tensor([0, -1, 2, logits.shape[-1], 4, 5, 6], device=device)
    grads = FieldGradients(selected=torch.ones(ROWS, device=device))
    options, whole = Options("log_probs entropy is_top1"), logits.clone()
    index[5] = -100
    mask = torch.arange(ROWS, device=device) != 5
    results = kernels.softmax_loss(logits, Inputs(index, mask), grads, options, logits)
    log_probs, entropy, is_top1 = pick(results, options)
    bad = torch.tensor([1, 3], device=device)
    good = torch.tensor([0, 2, 4, 6], device=device)
    assert log_probs[bad].isnan().all() and entropy[bad].isnan().all() and logits[bad].isnan().all()
    assert log_probs[good].isfinite().all() and entropy[good].isfinite().all() and logits[good].isfinite().all()
    assert log_probs[5] == entropy[5] == 0 and not is_top1[5] and not logits[5].any()
    assert torch.equal(is_top1[good], index[good] == whole.argmax(-1)[good]) and not is_top1[bad].any()


def test_what_it_does_not_take(device):
    index = torch.zeros(ROWS, dtype=torch.long, device=device)
    options = PLAIN
    assert kernels.supports_fused_loss(random(device, 264), index, options)
    assert not kernels.supports_fused_loss(random(device, 263), index, options)
    assert not kernels.supports_fused_loss(random(device, 264), None, options)
    assert not kernels.supports_fused_loss(random(device, 264), index.unsqueeze(-1), options)
    assert not kernels.supports_fused_loss(random(device, 264), index, options._replace(fields="log_probs mean_logit"))


@pytest.mark.gpu
@pytest.mark.parametrize("fields", ["log_probs", "log_probs entropy is_top1", "log_probs is_top1 weighted_logit"])
def test_many_rows_are_the_same_every_time(fields):
    """More rows than run at once, so that programs wait for others that start later."""
    logits = torch.randn(3000, 50264, device="cuda", dtype=torch.bfloat16)
    index, largest = torch.randint(50264, (3000,), device="cuda"), logits.argmax(-1)
    index[::2] = largest[::2]
    weights, options = torch.rand(50264, device="cuda"), Options(fields)
    inputs = Inputs(index, None, weights if options.wants("weighted_logit") else None)
    ones, runs = torch.ones(3000, device="cuda"), []
    for _ in range(3):
        given = logits.clone()
        results = kernels.softmax_loss(given, inputs, FieldGradients(selected=ones), options, given)
        runs.append((given, *pick(results, options)))
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))
    got = dict(zip(options.names(), runs[0][1:], strict=True))
    log_p = torch.log_softmax(logits.float(), -1)
    torch.testing.assert_close(got["log_probs"], log_p.gather(-1, index.unsqueeze(-1)).squeeze(-1))
    if "is_top1" in got:
        assert torch.equal(got["is_top1"], index == largest)
    if "entropy" in got:
        torch.testing.assert_close(got["entropy"], -(log_p.exp() * log_p).sum(-1), rtol=1e-5, atol=1e-5)
