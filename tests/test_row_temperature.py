"""A temperature of each row, where a number is a temperature of all rows: against the logits divided beforehand."""

import re

import pytest
import torch

import onepass
from inputs import HARD
from linear_cases import N, V, assert_all_close, batch, exact, gradients, policy_loss
from onepass.backend import backend_of

pytestmark = pytest.mark.usefixtures("uninitialised_memory_is_nan")
TRANSFORMS = [{}, {"softcap": 5.0, "logit_scale": -0.7}]
K = 3


def capped(x, softcap=None, logit_scale=1.0):
    x = x * logit_scale
    return x if softcap is None else softcap * torch.tanh(x / softcap)


def parts_of(device, shape=(4, 5), vocab=V):
    g = torch.Generator().manual_seed(0)
    x, y = ((torch.randn(*shape, vocab, generator=g) * 3).to(device) for _ in range(2))
    ids = torch.randint(vocab, (*shape, K), generator=g)
    tensors = {
        "index": ids[..., 0], "ids": ids, "log_t": torch.randn(*shape, K, generator=g).log_softmax(-1) - 0.1,
        "mask": torch.rand(shape, generator=g) > 0.3, "T": torch.rand(shape, generator=g) * 2 + 0.3,
        "of_teacher": torch.rand(shape, generator=g) * 2 + 0.3,
    }  # fmt: skip
    return x, y, {n: t.to(device) for n, t in tensors.items()}


# Each of x, the teacher's logits, the other tensors, and the options of the transform.
FUNCTIONS = {
    "softmax_statistics": lambda x, y, p, **o: [
        f
        for f in vars(
            onepass.softmax_statistics(
                x, p["index"], class_weights=0.3, metrics=["is_top1", "log_sum_sq_probs", "mean_logit"], **o
            )
        ).values()
    ],
    "selective_log_softmax": lambda x, y, p, **o: onepass.selective_log_softmax(x, p["ids"], row_mask=p["mask"], **o),
    "entropy_from_logits": lambda x, y, p, **o: onepass.entropy_from_logits(x, row_mask=p["mask"], **o),
    "selective_log_softmax_and_entropy": lambda x, y, p, **o: onepass.selective_log_softmax_and_entropy(
        x, p["index"], **o
    ),
    "cross_entropy": lambda x, y, p, **o: onepass.cross_entropy(
        x, p["index"], row_mask=p["mask"], label_smoothing=0.1, z_loss_weight=0.01, **o
    ),
    "topk_kl_div": lambda x, y, p, **o: onepass.topk_kl_div(x, p["ids"], p["log_t"], reduction="none", **o),
    "topk_kl_div, renormalized": lambda x, y, p, **o: onepass.topk_kl_div(
        x, p["ids"], p["log_t"], renormalize=True, direction="jsd", row_mask=p["mask"], **o
    ),
}


def flat(found):
    return [found] if isinstance(found, torch.Tensor) else list(found)


@pytest.mark.pairs
@pytest.mark.parametrize("transform", TRANSFORMS, ids=["plain", "capped"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_of_logits(device, name, transform):
    x, y, p = parts_of(device)
    x.requires_grad_()
    (z,) = exact(x)
    got = flat(FUNCTIONS[name](x, y, p, temperature=p["T"], **transform))
    expected = flat(FUNCTIONS[name](capped(z, **transform) / p["T"].double().unsqueeze(-1), y, p))
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=1e-5, atol=1e-5)
    ours, theirs = ([f for f in found if f.requires_grad] for found in (got, expected))
    total = lambda fields: sum((n + 1) * f.sum() for n, f in enumerate(fields))  # noqa: E731
    assert_all_close(gradients(total(ours), (x,)), gradients(total(theirs), (z,)))


@pytest.mark.pairs
@pytest.mark.parametrize("transform", TRANSFORMS, ids=["plain", "capped"])
@pytest.mark.parametrize("direction", ["forward", "reverse", "jsd"])
@pytest.mark.parametrize("own", ["student", "teacher", "both", "shared"])
def test_divergences(device, direction, own, transform):
    x, y, p = parts_of(device)
    x, y = x.requires_grad_(), y.requires_grad_()
    options = {"student": {"teacher_temperature": 2.0}, "teacher": {}, "both": {}, "shared": {}}[own]
    options |= {"temperature": p["T"]} if own != "teacher" else {"temperature": 0.7}
    options |= {"teacher_temperature": p["of_teacher"]} if own in ("teacher", "both") else {}
    got = onepass.kl_div(x, y, direction=direction, row_mask=p["mask"], vocab_size=V - 3, **options, **transform)
    z, w = exact(x, y)
    of_student = options["temperature"]
    of_teacher = options.get("teacher_temperature", of_student)
    of_student, of_teacher = (t if isinstance(t, float) else t.double().unsqueeze(-1) for t in (of_student, of_teacher))
    expected = onepass.kl_div(
        capped(z, **transform) / of_student, w / of_teacher, direction=direction, row_mask=p["mask"], vocab_size=V - 3
    )
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-6)
    assert_all_close(gradients(got, (x, y)), gradients(expected, (z, w)))


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("direction", ["forward", "jsd"])
def test_distillation_loss(device, direction, renormalize):
    """Its cross-entropy has temperature 1."""
    x, _, p = parts_of(device)
    x.requires_grad_()
    (z,) = exact(x)
    options = dict(row_mask=p["mask"], direction=direction, renormalize=renormalize)
    got = onepass.distillation_loss(x, p["index"], p["ids"], p["log_t"], alpha=0.3, temperature=p["T"], **options)
    soft = onepass.topk_kl_div(z / p["T"].double().unsqueeze(-1), p["ids"], p["log_t"], **options)
    expected = 0.3 * soft + 0.7 * onepass.cross_entropy(z, p["index"], row_mask=p["mask"])
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-6)
    assert_all_close(gradients(got, (x,)), gradients(expected, (z,)))


def test_rows_that_labels_mask():
    """The temperature of an ignored row may be anything, and that of a row of class 0 may not."""
    x, temperature = torch.randn(2, 5), torch.tensor([0.0, 1.0])
    got = onepass.cross_entropy(x, torch.tensor([-100, 1]), temperature=temperature)
    torch.testing.assert_close(got, onepass.cross_entropy(x[1:], torch.tensor([1])))
    with pytest.raises(ValueError, match=r"^temperature: "):
        onepass.cross_entropy(x, torch.tensor([0, 1]), temperature=temperature)


HEADS = {
    "cross_entropy": lambda x, p, **o: onepass.cross_entropy(x, p["index"], row_mask=p["mask"], **o),
    "cross_entropy, none": lambda x, p, **o: onepass.cross_entropy(x, p["index"], reduction="none", **o),
    "pair": lambda x, p, **o: torch.stack(onepass.selective_log_softmax_and_entropy(x, p["index"], **o)),
    "topk_kl_div": lambda x, p, **o: onepass.topk_kl_div(x, p["ids"], p["log_t"], row_mask=p["mask"], **o),
    "kl_div": lambda x, p, **o: onepass.kl_div(x, p["teacher"], teacher_temperature=1.0, row_mask=p["mask"], **o),
    "jsd": lambda x, p, **o: onepass.kl_div(x, p["teacher"], direction="jsd", teacher_temperature=1.0, **o),
    "jsd, none": lambda x, p, **o: onepass.kl_div(
        x, p["teacher"], direction="jsd", teacher_temperature=1.0, reduction="none", **o
    ),
}


@pytest.mark.pairs
@pytest.mark.parametrize("transform", TRANSFORMS, ids=["plain", "capped"])
@pytest.mark.parametrize("loss", HEADS)
def test_of_heads(device, tile, loss, transform):
    *parts, _ = batch(device, rows=(N,))
    _, teacher, p = parts_of(device, (N,))
    p["teacher"] = teacher
    reference = exact(*parts)
    logits = capped(torch.nn.functional.linear(*reference), **transform) / p["T"].double().unsqueeze(-1)
    expected = HEADS[loss](logits, p)
    got = HEADS[loss](onepass.LinearLogits(*parts), p, temperature=p["T"], **transform)
    assert_all_close([got.detach()], [expected.detach()], "loss")
    upstream = torch.rand(expected.shape, dtype=torch.float64).to(device) + 0.5
    assert_all_close(
        gradients((got * upstream).sum(), parts), gradients((expected * upstream).sum(), reference), "gradient"
    )


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_policy_loss(device, tile, reduction):
    *parts, target = batch(device)
    _, _, p = parts_of(device, (N,))
    index, mask = target.clamp(min=0), target != -100
    g = torch.Generator().manual_seed(7)
    advantages, old = (torch.randn(N, generator=g).to(device) for _ in range(2))
    got = onepass.linear_loss(
        *parts[:2], index, policy_loss, advantages, old, bias=parts[2], row_mask=mask, temperature=p["T"],
        reduction=reduction,
    )  # fmt: skip
    reference = exact(*parts)
    logits = torch.nn.functional.linear(*reference) / p["T"].double().unsqueeze(-1)
    s = onepass.softmax_statistics(logits, index)
    losses = policy_loss(s, advantages.double(), old.double()).where(mask, 0.0)
    expected = losses if reduction == "none" else losses.sum() / mask.sum()
    assert_all_close([got.detach()], [expected.detach()], "loss")
    assert_all_close(gradients(got.sum(), parts), gradients(expected.sum(), reference))


def test_a_tensor_of_one_temperature_is_that_number(device):
    x, _, p = parts_of(device)
    for loss in ("cross_entropy", "selective_log_softmax", "topk_kl_div"):
        ours, theirs = (FUNCTIONS[loss](x, None, p, temperature=t) for t in (torch.full_like(p["T"], 2.0), 2.0))
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", HARD)
def test_hard_inputs(device, name):
    x = HARD[name](parts_of("cpu", (9,), 400)[0]).to(device)
    _, _, p = parts_of(device, (9,), 400)
    if "lowest" in name:
        p["T"].clamp_(min=1)  # the lowest number over less than 1 is -inf
    (z,) = exact(x)
    x.requires_grad_()
    got = onepass.selective_log_softmax_and_entropy(x, p["index"], temperature=p["T"])
    expected = onepass.selective_log_softmax_and_entropy(z / p["T"].double().unsqueeze(-1), p["index"])
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a.double(), b.detach(), rtol=1e-5, atol=1e-2 if "1e4" in name else 1e-4,
                                   equal_nan=True)  # fmt: skip


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf"), 1e-45])
def test_what_is_no_temperature(device, raises_index_error, bad):
    """An error where a look at the values costs nothing; else the row is NaN, and no other one."""
    x, y, p = parts_of(device, (4,))
    x.requires_grad_()
    p["T"][1] = bad
    keep = torch.tensor([True, False, True, True], device=device)
    calls = {
        "log_probs": lambda **o: onepass.selective_log_softmax(x, p["index"], **o),
        "kl_div": lambda **o: onepass.kl_div(x, y, reduction="none", **o),
        "renormalized": lambda **o: onepass.topk_kl_div(
            x, p["ids"], p["log_t"], renormalize=True, reduction="none", **o
        ),
    }
    for name, call in calls.items():
        masked = call(temperature=p["T"], row_mask=keep)
        assert masked[1] == 0 and masked.isfinite().all(), name
        (grad,) = torch.autograd.grad(masked.sum(), x)
        assert not grad[1].any() and grad.isfinite().all(), name
        if x.is_cpu:
            with pytest.raises(ValueError, match="temperature: expected finite numbers above 0"):
                call(temperature=p["T"])
        else:
            got = call(temperature=p["T"])
            assert got[1].isnan() and got[keep].isfinite().all(), name


@pytest.mark.parametrize("bad", [1e-60, 1e60])
def test_a_temperature_that_float32_cannot_hold(device, bad):
    x = torch.randn(2, 5, device=device)
    temperature = torch.tensor([bad, 1.0], dtype=torch.float64, device=device)
    if not x.is_cpu:
        assert onepass.entropy_from_logits(x, temperature=temperature).isnan().tolist() == [True, False]
        return
    with pytest.raises(ValueError, match=re.escape(f"got {bad:g}")):
        onepass.entropy_from_logits(x, temperature=temperature)


def test_bad_temperatures_in_the_backends(device):
    """What a GPU computes of them, on every path."""
    from onepass.core.options import Inputs, Options

    x, _, p = parts_of(device, (4,))
    p["T"][1], p["T"][3] = -1.0, 0.0
    packed = backend_of(x).softmax_statistics(x, Inputs(temperature=p["T"]), Options("log_normalizer"))[0]
    assert packed[1].isnan().tolist() == [False, True, False, True]


def test_an_infinite_temperature_where_values_are_not_checked(device, monkeypatch):
    """As on a GPU, and under torch.compile: of the logits that are selected, which no kernel divides."""
    monkeypatch.setattr("onepass.logits.source.LogitsSource.checks_values", False)
    x, _, p = parts_of(device, (2,))
    p["T"][0] = torch.inf
    got = onepass.topk_kl_div(x, p["ids"], p["log_t"], renormalize=True, reduction="none", temperature=p["T"])
    assert got.isnan().tolist() == [True, False]


def test_written_to_before_the_backward(device):
    x, y, p = parts_of(device)
    x.requires_grad_()
    for loss in (onepass.entropy_from_logits(x, temperature=p["T"]).sum(), onepass.kl_div(x, y, temperature=p["T"])):
        p["T"].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("loss", ["cross_entropy", "jsd"])
def test_compiled(device, loss):
    if device.type == "cpu" and backend_of(torch.empty(0)).__name__.endswith("kernels"):
        pytest.skip("what is compiled is the same on both backends")
    torch._dynamo.reset()
    *parts, _ = batch(device)
    _, teacher, p = parts_of(device, (N,))

    def call(hidden, weight, T):
        logits = hidden @ weight.T
        head = HEADS[loss](onepass.LinearLogits(hidden, weight), p | {"teacher": teacher}, temperature=T)
        return head + onepass.kl_div(logits, teacher, temperature=T) + HEADS["pair"](logits, p, temperature=T).sum()

    expected = call(*parts[:2], p["T"])
    got = torch.compile(call, fullgraph=True, backend="aot_eager")(*parts[:2], p["T"])
    torch.testing.assert_close(got, expected)
    assert_all_close(gradients(got, parts[:2]), gradients(expected, parts[:2]))
