"""The losses of linear heads whose gradients come from exponentials of the logits, against materialized logits."""

import math
import warnings
from importlib import import_module

import pytest
import torch

import definition
import onepass
from linear_cases import OnCuda
from on_hopper import ON_HOPPER
from onepass import kernels, reference
from onepass.core.options import Inputs, Options
from onepass.integrations.trl_heads import fields_and_sum
from onepass.logits import tile_plan
from onepass.logits.head import Head, HeadTensors, Settings
from onepass.logits.observer import Metrics
from onepass.logits.row_loss import StatisticsLoss
from onepass.logits.tiled_loss import tiled_loss
from onepass.logits.tiles import Tile, empty_logits

module = import_module("onepass.kernels.linear_exponentials")


def test_which_heads_take_it(monkeypatch):
    """Not one with a bias, an adapter, wide logits, or a limit of memory."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(reference, "supports_linear_exponentials", lambda *_: True)
    h, w = torch.zeros(4, 8), torch.zeros(5, 8)
    given, options = Inputs(torch.zeros(4, dtype=torch.long)), Options("log_probs")
    settings = Settings(torch.float32, torch.float32)
    assert Head(HeadTensors(h, w), settings).writes_exponentials(given, options)
    for tensors, changed in (
        (HeadTensors(h, w, torch.zeros(5)), {}), (HeadTensors(h, w, None, h[:, :2], w[:, :2]), {}),
        (HeadTensors(h, w), {"max_memory": 2**20}), (HeadTensors(h, w), {"logits_dtype": torch.float64}),
        (HeadTensors(h, w), {"invariant_gemms": True}),
    ):  # fmt: skip
        assert not Head(tensors, settings._replace(**changed)).writes_exponentials(given, options)
    loss = StatisticsLoss(None, Options("log_probs entropy"), torch.float32, given)
    head = Head(HeadTensors(h, w), settings)
    assert not loss.takes_exponentials(head), "an entropy that has a gradient"
    assert StatisticsLoss(
        None, Options("log_probs entropy"), torch.float32, given, shown=("entropy",)
    ).takes_exponentials(head)


@pytest.fixture(params=["plain", pytest.param("hopper", marks=[ON_HOPPER, pytest.mark.gpu])])
def taken(request, monkeypatch):
    """The device and dtype of heads that take exponentials: as the reference defines them, or of a Hopper GPU."""
    backend, of = (reference, "cpu") if request.param == "plain" else (kernels, "cuda")
    if of == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "0")
        monkeypatch.setattr(
            reference, "supports_linear_exponentials",
            lambda dtype, rows, b, inputs, options: inputs.index is not None
            and inputs.index.dim() == 1
            and inputs[2:] == (None,) * 5
            and options.transform.softcap is None
            and {*options.names()} <= module.FIELDS,
        )  # fmt: skip
    monkeypatch.setattr(module, "LEAST_LOGITS", 1)
    calls, function = [], backend.linear_exponentials
    monkeypatch.setattr(backend, "linear_exponentials", lambda *given: calls.append(given) or function(*given))
    return torch.device(of), torch.float64 if of == "cpu" else torch.bfloat16, calls


def losses_of(logits, index, scores):
    """Losses of logits by name, and whether a linear head takes exponentials: always, never, or if it is frozen."""

    def of_log_probs():
        log_probs = onepass.selective_log_softmax(logits, index.clamp(min=0), row_mask=index >= 0)
        return (log_probs.sin() * scores).sum()

    return {
        "mean": (lambda: onepass.cross_entropy(logits, index), "always"),
        "sum": (lambda: onepass.cross_entropy(logits, index, reduction="sum", temperature=0.7), "always"),
        "rows": (lambda: (onepass.cross_entropy(logits, index, reduction="none") * scores).sum(), "always"),
        "smoothing": (lambda: onepass.cross_entropy(logits, index, label_smoothing=0.1), "never"),
        "z-loss": (lambda: onepass.cross_entropy(logits, index, z_loss_weight=0.1), "never"),
        "softcap": (lambda: onepass.cross_entropy(logits, index, softcap=9.0), "never"),
        "log-probs": (of_log_probs, "if frozen"),
    }


@pytest.mark.parametrize("frozen", (False, True), ids=("trained", "frozen"))
def test_losses_of_heads(taken, monkeypatch, frozen):
    """Loss and gradients equal those of materialized logits, in one tile and in several."""
    device, dtype, calls = taken
    g = torch.Generator().manual_seed(0)
    h, w, scores = (torch.randn(s, generator=g) for s in ((600, 64), (500, 64), (600,)))
    h, w, scores = h.to(device, dtype), w.to(device, dtype), scores.to(device)
    index = torch.randint(500, (600,), generator=g).to(device)
    index[::3] = -100
    for rows in (10**6, 300):
        monkeypatch.setattr("onepass.logits.tile_plan.in_waves", lambda count, most, width, of_pass: min(count, rows))  # noqa: B023
        monkeypatch.setattr("onepass.logits.tile_plan.equal", lambda count, most: min(count, rows))  # noqa: B023
        if rows < 600:
            monkeypatch.setattr("onepass.logits.tile_plan.default_memory", lambda *_: 1 << 25)
        for name in losses_of(torch.zeros(600, 500), index.cpu(), scores.cpu()):
            calls.clear()
            leaves = [t.detach().clone().requires_grad_() for t in (h, w)]
            leaves[1].requires_grad_(not frozen)
            loss, when = losses_of(onepass.LinearLogits(*leaves), index, scores)[name]
            loss = loss()
            loss.backward()
            expected = [t.detach().double().requires_grad_() for t in leaves]
            x = expected[0] @ expected[1].t()
            of = losses_of(x if dtype == torch.float64 else x.to(dtype).double(), index, scores.double())[name][0]()
            of.backward()
            close = {} if dtype == torch.float64 else {"rtol": 2e-2, "atol": 2e-2 * expected[0].grad.abs().max()}
            torch.testing.assert_close(loss.double(), of, **({"rtol": 1e-3, "atol": 1e-3} if close else {}))
            for leaf, value in zip(leaves, expected):
                if leaf.requires_grad:
                    torch.testing.assert_close(leaf.grad.double(), value.grad, **close)
            takes = when == "always" or (when == "if frozen" and frozen)
            assert bool(calls) == takes, (name, frozen)


@pytest.mark.parametrize("dtype_of_weight", ("that of the GEMMs", "float32"))
@pytest.mark.parametrize("reduction", ("mean", "none"))
def test_a_tile_whose_last_columns_are_in_the_memory_of_a_gradient(taken, monkeypatch, reduction, dtype_of_weight):
    """If only this makes one tile of all rows small enough, the peak of the memory is that of the other columns."""
    device, dtype, calls = taken
    wide = dtype_of_weight == "float32"
    if wide and device.type == "cpu":
        dtype = torch.bfloat16
    g = torch.Generator().manual_seed(0)
    h, w = (torch.randn(s, generator=g).to(device, dtype) for s in ((120, 128), (1001, 128)))
    index, scores = torch.randint(1001, (120,), generator=g).to(device), torch.rand(120, generator=g).to(device)
    index[:3], index[5] = torch.tensor([0, 1000, 511]), -100
    monkeypatch.setattr(tile_plan, "ONE_TILE", 0)
    leaves = [h.requires_grad_(), (w.float() if wide else w).requires_grad_()]

    def loss(logits):
        if reduction == "mean":
            return onepass.cross_entropy(logits, index)
        return (onepass.cross_entropy(logits, index, reduction="none") * scores).sum()

    with torch.autocast(device.type, dtype, enabled=wide):
        value = loss(onepass.LinearLogits(*leaves))
    value.backward()
    ((*_, out, rest),) = calls
    assert out.shape[1] % tile_plan.SPLIT == 0 and out.shape[1] + rest.shape[1] == 1001
    assert rest.numel() * dtype.itemsize <= out.shape[1] * 128 * leaves[1].element_size(), "overwritten too early"
    assert rest.shape[1] == 1001 - 512
    expected = [t.detach().double().requires_grad_() for t in leaves]
    x = expected[0] @ expected[1].t()
    of = loss(x if dtype == torch.float64 else x.to(dtype).double())
    of.backward()
    assert abs(value - of) < (1e-12 if dtype == torch.float64 else 1e-2)
    for leaf, about in zip(leaves, expected):
        most = about.grad.abs().max()
        close = {"rtol": 1e-9, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 2e-2, "atol": 2e-2 * most}
        torch.testing.assert_close(leaf.grad.double(), about.grad, **close)


def test_a_forward_that_is_planned_as_its_backward(taken, monkeypatch):
    """A loss that may draw random numbers has the same tiles in both, which the forward must have the memory for."""
    device, dtype, calls = taken
    g = torch.Generator().manual_seed(0)
    h, w = (torch.randn(s, generator=g).to(device, dtype) for s in ((120, 128), (1001, 128)))
    index = torch.randint(1001, (120,), generator=g).to(device)
    monkeypatch.setattr(tile_plan, "ONE_TILE", 0)
    loss = StatisticsLoss(lambda fields: fields["log_probs"].sin(), Options("log_probs"), dtype, Inputs(index))
    assert loss.may_draw
    tensors = HeadTensors(h.requires_grad_(), w.requires_grad_())
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch's, of a result that does not fit into its memory
        tiled_loss(tensors, None, loss, None, Settings(dtype, dtype)).sum().backward()
    assert len(calls) == 1 and calls[0][-1] is None
    expected = [t.detach().double().requires_grad_() for t in (h, w)]
    x = (expected[0] @ expected[1].t()).to(dtype).double()
    torch.log_softmax(x, 1).gather(1, index[:, None]).sin().sum().backward()
    for leaf, about in zip((h, w), expected):
        atol = 1e-12 if dtype == torch.float64 else 3e-2 * about.grad.abs().max()
        torch.testing.assert_close(leaf.grad.double(), about.grad, rtol=1e-9, atol=atol)


def test_rows_without_an_upstream_gradient(taken):
    """They add nothing to the gradients, even if they are NaN."""
    device, dtype, calls = taken
    g = torch.Generator().manual_seed(0)
    h, w = (torch.randn(s, generator=g).to(device, dtype) for s in ((300, 64), (50, 64)))
    index = torch.randint(50, (300,), generator=g).to(device)
    h[5, 0] = torch.inf
    leaves = [t.clone().requires_grad_() for t in (h, w)]
    losses = onepass.cross_entropy(onepass.LinearLogits(*leaves), index, reduction="none")
    assert losses[5].isnan() and losses.isfinite().sum() == 299
    losses[losses.isfinite()].sum().backward()
    assert calls
    h[5] = 0.0
    expected = [t.double().requires_grad_() for t in (h, w)]
    of = torch.nn.functional.cross_entropy(expected[0] @ expected[1].t(), index, reduction="none")
    of[torch.arange(300, device=device) != 5].sum().backward()
    close = {} if dtype == torch.float64 else {"rtol": 2e-2, "atol": 0.1}
    for leaf, value in zip(leaves, expected):
        torch.testing.assert_close(leaf.grad.double(), value.grad, **close)
    assert not leaves[0].grad[5].any()


def widths_of_products(device, monkeypatch):
    """The widths of products that workspace is asked for."""
    backend, widths = kernels if device.type == "cuda" else reference, []
    function = backend.exponentials_bytes
    monkeypatch.setattr(
        backend, "exponentials_bytes", lambda v, width, o: widths.append(width) or function(v, width, o)
    )
    return widths


def test_backwards_of_a_frozen_head(taken, monkeypatch):
    """The factors of its rows are kept for the next backward. A row that is NaN adds nothing if it is not used.

    Masked rows need the workspace of a product that is copied to its rows.
    """
    device, dtype, calls = taken
    widths = widths_of_products(device, monkeypatch)
    g = torch.Generator().manual_seed(0)
    h, w = (torch.randn(s, generator=g).to(device, dtype) for s in ((300, 64), (50, 64)))
    index = torch.randint(50, (300,), generator=g).to(device)
    mask = torch.arange(300, device=device) % 7 > 0
    h[5, 0] = torch.inf
    monkeypatch.setattr(tile_plan, "FROZEN", 0)
    monkeypatch.setattr(tile_plan, "ON_CPU", 0)
    for name in ("equal", "in_waves"):  # which would have tiles of one row
        monkeypatch.setattr(tile_plan, name, lambda count, *_: min(count, 128))
    leaf = h.clone().requires_grad_()
    log_probs = onepass.selective_log_softmax(onepass.LinearLogits(leaf, w), index, row_mask=mask)
    assert len(calls) > 1 and log_probs[5].isnan() and {*widths} == {64}
    upstreams = torch.randn(2, 300, generator=g).to(device, log_probs.dtype)
    upstreams[:, 5] = 0.0
    h[5] = 0.0
    expected = h.double().requires_grad_()
    for upstream in upstreams:
        (found,) = torch.autograd.grad(log_probs, leaf, upstream, retain_graph=True)
        x = (expected @ w.double().t()).to(dtype).double()
        x = torch.log_softmax(x, 1).gather(1, index[:, None])[:, 0]
        (value,) = torch.autograd.grad(x, expected, upstream.double() * mask)
        close = {} if dtype == torch.float64 else {"rtol": 2e-2, "atol": 0.1}
        torch.testing.assert_close(found.double(), value, **close)
        assert not found[5].any() and not found[~mask].any()


def test_small_upstream_gradients_of_a_frozen_head(taken, monkeypatch):
    """Of a class of probability 2**-79, whose row has a factor so small that its product with the gradient is 0."""
    device, _, calls = taken
    widths = widths_of_products(device, monkeypatch)
    h, w = torch.tensor([[1.0]], device=device), torch.tensor([[0.0], [79 * math.log(2)]], device=device)
    h, w = (t.new_zeros(len(t), 8).index_copy(1, t.new_zeros(1, dtype=torch.long), t) for t in (h, w))
    function = reference.linear_exponentials

    def shifted(*given):
        """As those of a Hopper GPU for a single row, which are relative to its own class."""
        factors = function(*given)
        given[5].mul_(2.0**79)
        return factors.mul_(2.0**-79)

    if device.type == "cpu":
        monkeypatch.setattr(reference, "linear_exponentials", shifted)
    leaf, index = h.to(torch.bfloat16).requires_grad_(), torch.zeros(1, dtype=torch.long, device=device)
    log_probs = onepass.selective_log_softmax(onepass.LinearLogits(leaf, w.to(torch.bfloat16)), index)
    assert calls and widths == [0]  # no product is kept beside the gradient
    log_probs.backward(torch.full_like(log_probs, 1e-22))
    torch.testing.assert_close(leaf.grad[0, 0].float(), -1e-22 * w.bfloat16()[1, 0].float(), rtol=1e-2, atol=0.0)


@pytest.mark.parametrize("width", (2048, 4096))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
def test_tiles_of_a_frozen_head(width, dtype):
    """The documented 1.3 GiB have room for 4096 rows, also of copied hidden states; a copy of the weight is extra."""
    with torch.device("meta"):
        hidden, weight = torch.empty(16384, width, dtype=dtype), torch.empty(151936, width, dtype=dtype)
    head = Head(HeadTensors(hidden, weight), Settings(torch.bfloat16, torch.bfloat16))
    head.hidden = OnCuda(hidden)
    rows = tile_plan.row_bytes(torch.empty(1)) + kernels.exponentials_bytes(151936, 0, Options("log_probs entropy"))
    found = tile_plan.plan([head], None, tile_plan.Use(rows, gradient=True, exponentials=True))
    assert found.rows == found.batch == 4096
    assert 4096 * (rows + 2 * 151936 + head.row_bytes(False)) <= 1.3 * 2**30
    assert tile_plan.plan([head], None, tile_plan.Use(gradient=True)).rows * 2 * 151936 <= 0.65 * 2**30


def test_metrics_beside_the_loss(taken):
    """An observer's entropy and accuracy have no gradient, so that a loss that is observed takes exponentials, too."""
    device, dtype, calls = taken
    g = torch.Generator().manual_seed(0)
    h, w = (torch.randn(s, generator=g).to(device, dtype) for s in ((300, 64), (50, 64)))
    index = torch.randint(50, (300,), generator=g).to(device)
    logits = onepass.LinearLogits(h.requires_grad_(), w.requires_grad_())
    logits.observer = Metrics()
    onepass.cross_entropy(logits, index).backward()
    assert calls
    found = logits.observer.read()
    x = (h @ w.t()).double()
    torch.testing.assert_close(
        found["entropy"].double(), definition.statistics(x)["entropy"].mean(), rtol=1e-2, atol=1e-2
    )
    accuracy = (x.argmax(-1) == index).double().mean()
    torch.testing.assert_close(found["mean_token_accuracy"].double(), accuracy, rtol=0, atol=1e-2)


def test_fields_beside_a_sum(taken):
    """TRL's SFT logs fields of the rows whose log-probs it sums, which have no gradient."""
    device, dtype, calls = taken
    g = torch.Generator().manual_seed(0)
    h, w = (torch.randn(s, generator=g).to(device, dtype) for s in ((300, 64), (50, 64)))
    index, valid = torch.randint(50, (300,), generator=g).to(device), torch.arange(300, device=device) % 3 > 0
    leaves = [t.clone().requires_grad_() for t in (h, w)]
    logits = onepass.LinearLogits(*leaves)
    found = fields_and_sum("log_probs entropy is_top1", logits, index, valid, (1.0, None, 1.0))
    found["log_probs"][valid].sum().backward()
    assert calls
    expected = [t.double().requires_grad_() for t in (h, w)]
    x = (expected[0] @ expected[1].t()).to(dtype).double()
    of = definition.statistics(x, index)
    of["log_probs"][valid].sum().backward()
    close = {} if dtype == torch.float64 else {"rtol": 2e-2, "atol": 0.1}
    for name, values in found.items():
        torch.testing.assert_close(values[valid].double(), of[name][valid].double().detach(), **close)
        assert not values[~valid].any()
    for leaf, about in zip(leaves, expected):
        torch.testing.assert_close(leaf.grad.double(), about.grad, **close)


def test_masked_rows_without_a_valid_one(taken):
    """Where rows are masked on the device, an upstream gradient that is infinite reaches none of them."""
    device, dtype, calls = taken
    h, w = (torch.ones(s, device=device, dtype=dtype) for s in ((300, 64), (50, 64)))
    head = Head(HeadTensors(h, w), Settings(dtype, dtype))
    row_loss = StatisticsLoss(
        None, Options("log_probs"), dtype, Inputs(torch.zeros(300, dtype=torch.long, device=device))
    )
    out = empty_logits(head, 300, 50, dtype)
    tile = Tile([head], tile_plan.Rows(slice(0, 300), 300), slice(None), [h], [out])
    mask = torch.zeros(300, dtype=torch.bool, device=device)
    loss, _ = row_loss(tile, mask, lambda _: torch.tensor(float("inf"), device=device), out, iter(()))
    assert calls and not loss.any() and not tile.row_factors.any() and not out.any()
