"""The kernel that computes the statistics of a linear head in its GEMM, against the definition and as heads call it."""

import pytest
import torch

import definition
import onepass
from onepass import kernels, reference
from onepass.backend import backend_of
from onepass.core.options import PACKED, Inputs, Options, Transform, empty_results
from onepass.core.shard import state_fields
from onepass.logits import tiles
from paths import interpreted

pytestmark = pytest.mark.usefixtures("uninitialised_memory_is_nan")
FIELDS = {
    "pair": "log_probs entropy",
    "log-probs": "log_probs",
    "metrics": "selected expected_logit is_top1 log_sum_sq_probs mean_logit",
    "normalizers": "log_probs shift log_normalizer log_sum_sq_probs is_top1",
}
SHAPES = {"tiles": (130, 600, 72), "one tile": (5, 40, 16), "odd": (9, 1025, 64)}


@pytest.fixture
def place(device):
    """The device of the two paths that have the kernel, and the dtypes that it multiplies there."""
    if device.type == "cpu" and not interpreted(device):
        pytest.skip("plain PyTorch computes no statistics without logits")
    if device.type == "cuda" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("not measured on this device")
    return device


def dtypes(device):
    return (torch.float16,) if device.type == "cpu" else (torch.bfloat16, torch.float16)


def draw(device, shape, dtype, seed=0):
    rows, vocab, width = shape
    g = torch.Generator().manual_seed(seed)
    a, w = torch.randn(rows, width, generator=g), 4 * torch.randn(vocab, width, generator=g) / width**0.5
    bias, index = torch.randn(vocab, generator=g), torch.randint(vocab, (rows,), generator=g)
    return [t.to(dtype).to(device) for t in (a, w, bias)], index.to(device)


def computed(parts, inputs, options, rounds=True, twice=False):
    a, w, bias = parts
    results = empty_results(a.new_empty((len(a), 0)), inputs.index, options)
    kernels.linear_statistics(a, w.t(), bias, inputs, options, rounds, twice, results)
    return results


def logits_of(parts, rounds=True, twice=False):
    """In float64, of logits that are rounded as a linear layer rounds them."""
    a, w, bias = parts
    x = a.double() @ w.double().T
    x = x.to(a.dtype).double() if twice else x
    x = x if bias is None else x + bias.double()
    return x.to(a.dtype).double() if rounds else x


def check(results, expected, options, name):
    packed, selected, is_top1 = results
    for field in options.names():
        if field == "is_top1":
            assert torch.equal(is_top1, expected["is_top1"]), name
        elif field in ("log_probs", "selected"):
            definition.assert_close(selected, expected[field], scale=32.0, name=f"{name}, {field}")
        else:
            found = packed[PACKED.index(field)].view(expected[field].shape)
            definition.assert_close(found, expected[field], scale=32.0, name=f"{name}, {field}")


@pytest.mark.parametrize("fields", FIELDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_definition(place, shape, fields):
    for n, dtype in enumerate(dtypes(place)):
        parts, index = draw(place, SHAPES[shape], dtype, n)
        g = torch.Generator().manual_seed(5)
        mask = (torch.rand(len(index), generator=g) > 0.2).to(place)
        temperature = (0.5 + torch.rand(len(index), generator=g)).to(place)
        for rounds, softcap, own, bias in ((True, None, None, True), (False, 9.0, temperature, True),
                                           (False, None, temperature, False), (True, 9.0, None, False)):  # fmt: skip
            given = parts if bias else [*parts[:2], None]
            options = Options(FIELDS[fields], Transform(1.0, softcap, 0.9))
            found = computed(given, Inputs(index, mask, None, own), options, rounds)
            x = logits_of(given, rounds)
            t = 1.0 if own is None else own.double().unsqueeze(-1)
            expected = definition.statistics(x, index, row_mask=mask, softcap=softcap, logit_scale=0.9, temperature=t)
            if place.type == "cuda" and rounds:  # sums in another order may be rounded to the other side
                for field in options.names():
                    if field in ("log_probs", "selected"):
                        torch.testing.assert_close(found[1].double(), expected[field], rtol=2e-2, atol=0.15)
                continue
            check(found, expected, options, f"{dtype}, {rounds}, {softcap}")


@pytest.mark.parametrize("rounds", (True, False), ids=("rounded", "wide"))
def test_hard_rows(place, rounds):
    """NaN and infinite rows, blocks of -inf, logits of 1e4, indices outside of the vocabulary, and equal maxima."""
    for dtype in dtypes(place):
        (a, w, bias), index = draw(place, (12, 700, 64), dtype)
        bias[:300] = -torch.inf  # a whole tile
        a[0] = torch.nan
        a[1, 0] = torch.inf
        a[2] *= 300 if dtype == torch.bfloat16 else 30
        index[3], index[4], index[5] = 700, -1, 2**40
        w[600], w[650], bias[600], bias[650] = w[610], w[610], bias[610], bias[610]
        index[6:9] = torch.tensor([600, 610, 650])
        a[6:9] = 3 * w[610]
        index[9] = 5  # of probability 0
        options = Options("log_probs entropy is_top1")
        found = computed((a, w, bias), Inputs(index), options, rounds)
        inside = (index >= 0) & (index < 700)
        x = logits_of((a, w, bias), rounds)
        expected = definition.statistics(x, index.where(inside, 0))
        for field in options.names():
            of = expected[field]
            expected[field] = of & inside if field == "is_top1" else of.masked_fill(~inside, torch.nan)
        rows = [0, 1, 3, 4, 5]
        assert found[1][rows].isnan().all() and not found[2][rows].any()
        assert found[1][9] == -torch.inf
        assert found[2][6:9].tolist() == [True, False, False]
        rest = [2, 6, 7, 8, 10, 11]
        tolerance = dict(rtol=1e-2, atol=0.3) if place.type == "cuda" and rounds else dict(rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(found[1][rest].double(), expected["log_probs"][rest], **tolerance)


def test_bias_after_rounding(place):
    parts, index = draw(place, (9, 300, 64), torch.float16)
    options = Options("log_probs")
    twice = computed(parts, Inputs(index), options, True, True)[1]
    once = computed(parts, Inputs(index), options, True, False)[1]
    expected = definition.statistics(logits_of(parts, True, True), index)["log_probs"]
    assert (twice - expected).abs().mean() < 0.5 * (once - expected).abs().mean()


@pytest.mark.parametrize("fields", FIELDS)
def test_states(place, fields):
    """Of the columns of a process, as `shard_statistics` computes them from logits."""
    (a, w, bias), index = draw(place, (33, 600, 64), torch.float16)
    index[:5] = torch.tensor([-4, 600, 1000, -100, 0])
    options, inputs = Options(FIELDS[fields]), Inputs(index)
    x = (a.float() @ w.float().T + bias.float()).contiguous()
    expected = kernels.shard_statistics(x, inputs, options)
    found = torch.full((len(state_fields(options, 1)), 33), torch.nan, device=place)
    kernels.linear_statistics(a, w.t(), bias, inputs, options, False, False, (found, None, None), True)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)


def test_operands(place):
    """Every layout of the weight, rows that do not start on 16 bytes, and the dtypes and inputs that it refuses."""
    (a, w, bias), index = draw(place, (20, 304, 48), torch.float16)
    options, inputs = Options("log_probs entropy"), Inputs(index)
    expected = computed((a, w, bias), inputs, options)[1]
    wide = torch.zeros(20, 51, dtype=a.dtype, device=place)
    for first in (0, 1):
        hidden = wide[:, first : first + 48].copy_(a)
        assert torch.equal(computed((hidden, w, bias), inputs, options)[1], expected)
    columns = w.t().contiguous().t()
    assert kernels.supports_linear_statistics(a.dtype, columns.t(), inputs, options)
    torch.testing.assert_close(computed((a, columns, bias), inputs, options)[1], expected)

    def supports(dtype=a.dtype, weight=w, given=inputs, options=options):
        return kernels.supports_linear_statistics(dtype, weight.t(), given, options)

    assert supports()
    assert not any(supports(weight=of) for of in (w[:, 1:], w[:, ::2], w.float()))
    assert not supports(torch.float32, w.float())
    assert not any(supports(given=g) for g in (Inputs(index.view(10, 2)), inputs._replace(support=index)))
    assert not supports(options=Options("log_probs weighted_logit"))
    assert not reference.supports_linear_statistics(a.dtype, w.t(), inputs, options)
    assert computed((a[:0], w, bias), Inputs(index[:0]), options)[1].shape == (0,)


def test_the_reference_is_the_definition(device):
    for dtype in (torch.float64, torch.float32):
        parts, index = draw(device, (7, 50, 16), dtype)
        options = Options("log_probs entropy")
        results = empty_results(parts[0].new_empty((7, 0)), index, options)
        reference.linear_statistics(parts[0], parts[1].t(), parts[2], Inputs(index), options, True, False, results)
        expected = definition.statistics(logits_of(parts), index)
        definition.assert_close(results[1], expected["log_probs"], scale=32.0)


LOSSES = {
    "log-probs": lambda x, t: onepass.selective_log_softmax(x, t),
    "cross-entropy": lambda x, t: onepass.cross_entropy(x, t, z_loss_weight=0.1),
    "of each row": lambda x, t: onepass.linear_loss(x.hidden, x.weight, t, lambda s: -s.log_probs * s.entropy),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_heads_call_it_without_a_gradient(place, loss, monkeypatch):
    """And no logits are materialized; with a gradient, results are those of logits."""
    (a, w, _), index = draw(place, (40, 600, 64), torch.float16)
    w.requires_grad_()
    called, of_backend = [], kernels.linear_statistics
    monkeypatch.setattr(kernels, "linear_statistics", lambda *given: called.append(given) or of_backend(*given))
    with_gradient = LOSSES[loss](onepass.LinearLogits(a, w), index)
    assert bool(called) == (loss == "log-probs")  # the backward of which computes the logits again
    called.clear()

    def no_logits(*_):
        raise AssertionError("logits are materialized")

    monkeypatch.setattr(tiles, "empty_logits", no_logits)
    with torch.no_grad():
        found = LOSSES[loss](onepass.LinearLogits(a, w), index)
    assert called
    torch.testing.assert_close(found, with_gradient, rtol=2e-3, atol=2e-3)
    assert backend_of(a) is kernels


def test_masked_rows_and_tiles(place, monkeypatch):
    """Rows that are masked are left out, and several tiles give what one does."""
    (a, w, _), index = draw(place, (40, 600, 64), torch.float16)
    mask = torch.arange(40, device=place) % 3 != 0
    with torch.no_grad():
        expected = onepass.selective_log_softmax_and_entropy(onepass.LinearLogits(a, w), index)
        least = 1 << 21
        found = onepass.selective_log_softmax_and_entropy(
            onepass.LinearLogits(a, w, max_memory=least), index, row_mask=mask
        )
    for f, e in zip(found, expected):
        torch.testing.assert_close(f, e.where(mask, 0.0))
