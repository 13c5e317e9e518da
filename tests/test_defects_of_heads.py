"""Defects of linear heads, which these tests showed before they were fixed."""

import pytest
import torch
import torch.nn.functional as F

import onepass
from defect_cases import INF, head, same
from linear_cases import LOSSES as OF_HEADS
from linear_cases import OnCuda, V, batch, gradients, policy_loss
from onepass import reference
from onepass.backend import backend_of
from onepass.core.options import Inputs, Options
from onepass.logits import tile_plan
from onepass.logits.head import Head, HeadTensors, Settings
from paths import captured, interpreted

# A parameter that the loss closes over, beside a head that is frozen.


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "trained"])
def test_a_parameter_that_the_loss_closes_over(device, frozen, reduction):
    hidden, weight, target = head(device)
    if frozen:
        hidden, weight = hidden.detach(), weight.detach()
    scale = torch.ones((), device=device, requires_grad=True)
    call = lambda: onepass.linear_loss(  # noqa: E731
        hidden, weight, target, lambda s: -s.log_probs * scale, reduction=reduction
    )
    with pytest.raises(ValueError, match="loss_fn: expected tensors that require a gradient among row_inputs"):
        call()
    with torch.no_grad():
        assert call().isfinite().all()  # where no gradient is asked for, none is lost


# Losses that do not couple rows, though a gradient of one row is NaN.


def test_no_coupling(device):
    hidden, weight, target = head(device)
    with torch.no_grad():
        hidden[3] = float("nan")
        weight[7], hidden[5] = 0.0, 0.0
        weight[7, 0] = hidden[5, 0] = 1e3  # a probability of 1
        target[5] = 7
    losses = {
        "z-loss": lambda s: s.logsumexp.square() - s.log_probs,
        "log(1 - p)": lambda s: torch.log(1 - s.log_probs.exp()),
    }
    for loss_fn in losses.values():
        assert onepass.linear_loss(hidden, weight, target, loss_fn, reduction="sum").isnan()
        loss = onepass.linear_loss(hidden, weight, target, loss_fn, reduction="none")
        assert loss[3].isnan() and loss[0].isfinite()
    if device.type == "cpu":
        with pytest.raises(ValueError, match="loss_fn: expected a loss of each row alone"):
            onepass.linear_loss(hidden[:3], weight, target[:3], lambda s: s.log_probs * s.log_probs.sum())


# A loss that draws random numbers, whose backward computes it again.


def test_a_random_loss(device):
    hidden, weight, target = head(device)

    def loss_fn(s):
        noise = torch.rand_like(s.log_probs)
        drawn.append(noise)
        return -s.log_probs * noise

    drawn = []
    torch.manual_seed(0)
    loss = onepass.linear_loss(hidden, weight, target, loss_fn, reduction="none")
    torch.rand(3, device=device)  # what others draw meanwhile
    state = torch.get_rng_state()
    got = gradients(loss.sum(), (hidden, weight))
    assert torch.equal(torch.get_rng_state(), state)
    first, again = drawn
    assert torch.equal(first, again)
    log_p = (hidden @ weight.T).log_softmax(-1).gather(-1, target.unsqueeze(-1)).squeeze(-1)
    for a, b in zip(got, gradients((-log_p * first).sum(), (hidden, weight))):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("masked", [False, True])
def test_a_random_loss_of_a_head_whose_gradient_takes_memory(masked, device):
    """The tiles of the forward, which needs less memory, are those of the backward."""
    hidden, weight = torch.randn(700, 64, device=device).bfloat16(), torch.randn(200, 64, device=device)
    weight = weight.bfloat16().requires_grad_()
    given = torch.ones(700, device=device, requires_grad=True)
    target = torch.zeros(700, dtype=torch.long, device=device)
    mask = torch.arange(700, device=device) % 100 > 0 if masked else None
    tiles = []

    def loss_fn(s, given):
        tiles.append(len(given))
        return given * torch.rand_like(given) - 0 * s.log_probs

    with pytest.raises(ValueError, match="max_memory: expected at least") as error:
        onepass.linear_loss(hidden, weight, target, loss_fn, given, row_mask=mask, reduction="none", max_memory=1)
    most = int(str(error.value).split("at least ")[1].split()[0]) + 200_000  # about a hundred rows
    loss = onepass.linear_loss(hidden, weight, target, loss_fn, given, row_mask=mask, reduction="none", max_memory=most)
    loss.sum().backward()
    assert len(tiles) > 2 and tiles[: len(tiles) // 2] == tiles[len(tiles) // 2 :]
    torch.testing.assert_close(given.grad, loss.detach())  # the loss is linear in what is given, 1


# Linear heads neither wait for the device nor keep a CUDA graph from being captured.


def teacher_of(t):
    """Logits as `linear_cases.teacher_logits`, made where they are needed."""
    return torch.arange(t.numel() * V, device=t.device).view(*t.shape, V).remainder(17) / 5.0


FORMS = {name: form for name, form in OF_HEADS.items() if "kl_div" not in name or "topk" in name} | {
    "kl_div": lambda x, t: onepass.kl_div(x, teacher_of(t), row_mask=t != -100),
    "kl_div, none": lambda x, t: onepass.kl_div(x, teacher_of(t), reduction="none", vocab_size=V - 7),
    "kl_div, reverse": lambda x, t: onepass.kl_div(x, teacher_of(t), direction="reverse", temperature=2.0),
    "jsd": lambda x, t: onepass.kl_div(x, teacher_of(t), direction="jsd", softcap=5.0, num_items=3),
    "linear_loss": lambda x, t: onepass.linear_loss(
        x.hidden, x.weight, t.clamp(min=0), policy_loss, t.float(), -t.float().abs() / 50, bias=x.bias
    ),
    "linear_loss, sum, masked": lambda x, t: onepass.linear_loss(
        x.hidden, x.weight, t.clamp(min=0), lambda s: s.entropy, row_mask=t >= 0, reduction="sum"
    ),
    "linear_loss, none": lambda x, t: onepass.linear_loss(
        x.hidden, x.weight, t.clamp(min=0), lambda s: s.entropy, reduction="none"
    ),
    "linear_loss, num_items": lambda x, t: onepass.linear_loss(
        x.hidden, x.weight, None, lambda s: s.logsumexp, num_items=torch.tensor(7)
    ),
    "statistics": lambda x, t: onepass.linear_softmax_statistics(x.hidden, x.weight, t.clamp(min=0)).log_probs,
    "linear head as teacher": lambda x, t: onepass.linear_kl_div(
        x.hidden, x.weight, onepass.LinearLogits(x.hidden.detach(), x.weight.detach())
    ),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMS)
def test_linear_heads_do_not_wait(monkeypatch, name):
    """But for the documented count of the rows that are kept, where some are masked."""
    hidden, weight, bias, target = batch("cuda", torch.bfloat16)
    x = onepass.LinearLogits(hidden, weight, bias)
    counted = tile_plan.valid_rows

    def documented(row_mask):
        torch.cuda.set_sync_debug_mode("default")
        try:
            return counted(row_mask)
        finally:
            torch.cuda.set_sync_debug_mode("error")

    FORMS[name](x, target).sum().backward()
    monkeypatch.setattr(tile_plan, "valid_rows", documented)
    torch.cuda.set_sync_debug_mode("error")
    try:
        FORMS[name](x, target).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMS)
def test_linear_heads_in_a_cuda_graph(name):
    hidden, weight, bias, target = batch("cuda", torch.float32)
    parts = hidden, weight, bias

    def step():
        return gradients(FORMS[name](onepass.LinearLogits(*parts), target).sum(), parts)

    graph, results = captured(step)
    for seed in range(2):
        torch.manual_seed(seed)
        with torch.no_grad():
            hidden.normal_()
            target[:2].random_(weight.shape[0])
        graph.replay()
        for a, b in zip(results, step()):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


# The number of tiles, and with it every bit of the result, follows from shapes alone.


def test_tiles_do_not_follow_the_free_memory(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    shapes = set()
    for free in (2**40, 2**31, 2**28):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, 2**40))
        monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: {})
        with torch.device("meta"):
            hidden = torch.empty(8192, 512, dtype=torch.bfloat16)
            weight = torch.empty(151936, 512, dtype=torch.bfloat16)
        monkeypatch.setattr(tile_plan, "ON_CPU", 0)
        part = Head(HeadTensors(hidden, weight), Settings(torch.bfloat16, torch.bfloat16))
        part.hidden = OnCuda(hidden)
        for trained in (False, True):
            for final in (False, True):
                use = tile_plan.Use(weight_gradient=trained, final=final)
                shapes.add((trained, final, tile_plan.plan([part], None, use)[1:]))
    assert len(shapes) == 4


def test_memory_of_few_rows_on_a_cpu(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    hidden, weight, target = head("cpu", rows=4)
    assert onepass.linear_cross_entropy(hidden, weight, target, max_memory=2**20).isfinite()


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_bias_that_is_rounded_twice(device, reduction):
    """In a loss of rows as in the statistics."""
    pytest.importorskip("trl")
    from onepass.integrations.trl_heads import TwiceRounded

    hidden, weight, bias, target = batch(device, torch.bfloat16)
    loss = onepass.cross_entropy(TwiceRounded(hidden, weight, bias), target, reduction=reduction)
    logits = F.linear(hidden, weight) + bias
    expected = onepass.cross_entropy(logits, target, reduction=reduction)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)


def test_a_float16_gradient_that_only_its_mean_can_hold(device):
    """The gradients of tiles are scaled once, at the end, so that they are kept in float32 until then."""
    hidden = torch.zeros(8, 2, dtype=torch.float16, device=device, requires_grad=True)
    weight = torch.tensor([[6e4, 0.0], [-6e4, 0.0], [-6e4, 0.0], [-6e4, 0.0]], dtype=torch.float16, device=device)
    target = torch.tensor([0, 0, 1, 1] * 2, device=device)
    onepass.cross_entropy(onepass.LinearLogits(hidden, weight), target).backward()
    h, w = hidden.detach().double().requires_grad_(), weight.double()
    F.cross_entropy(h @ w.t(), target).backward()
    torch.testing.assert_close(hidden.grad.double(), h.grad, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("magnitude", [2.0**17, 2.0**-27])
@pytest.mark.parametrize("more", [{}, {"label_smoothing": 0.1}, {"z_loss_weight": 1e-3}], ids=str)
def test_the_float16_mean_of_any_class_weights(magnitude, more, device):
    """It does not depend on the magnitude of the weights, and nor does the rounding of the gradient of the logits."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 8, generator=generator).to(device, torch.float16) for n in (12, 19))
    weights, target = torch.rand(19, generator=generator).to(device) + 0.5, torch.arange(12, device=device)
    found = []
    for scale in (1.0, magnitude):
        leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        loss = onepass.linear_cross_entropy(*leaves, target, class_weights=weights * scale, **more)
        found.append(gradients(loss, leaves))
    for one, other in zip(*found):
        assert torch.equal(one, other) and one.count_nonzero()


@pytest.mark.parametrize("more", [{}, {"reduction": "none"}, {"groups": [6, 6]}, {"groups": [6, 6], "max_memory": 1}])
def test_a_loss_function_under_autocast(more, device):
    """It is called without autocast, also where the logits of all rows are computed first."""
    hidden, weight, target = head(device)
    dtypes = []

    def loss_fn(s, *groups):
        product = s.log_probs.unsqueeze(0) @ s.log_probs.detach().unsqueeze(1)
        dtypes.append(product.dtype)
        return groups[0].sum(s.log_probs) if groups else s.log_probs

    more = dict(more)
    if "max_memory" in more:  # enough for a row and for no group
        with pytest.raises(ValueError, match="max_memory: expected at least") as error:
            onepass.linear_loss(hidden, weight, target, loss_fn, **more)
        more["max_memory"] = int(str(error.value).split("at least ")[1].split()[0]) + 6000
    with torch.autocast(device.type, torch.bfloat16):
        onepass.linear_loss(hidden, weight, target, loss_fn, **more)
    assert dtypes and set(dtypes) == {torch.float32}


def with_groups(loss_fn):
    """A loss function of groups that sums those of rows."""
    return lambda s, *inputs: inputs[-1].sum(loss_fn(s, *inputs[:-1]))


def test_a_loss_that_writes_to_its_arguments(device):
    hidden, weight, target = head(device)
    ones = torch.ones(12, device=device)
    writes_to_a_field = (lambda s: (s.shift.zero_(), -s.log_probs)[1]), ()
    writes_to_an_input = (lambda s, a: (a.mul_(2), -s.log_probs * a)[1]), (ones,)
    for loss_fn, inputs in (writes_to_a_field, writes_to_an_input):
        for context in (torch.enable_grad, torch.no_grad):
            for more in ({}, {"reduction": "none"}, {"groups": [12], "max_memory": 1 << 30}):
                with context(), pytest.raises(ValueError, match="loss_fn: expected a function that writes to none"):
                    onepass.linear_loss(hidden, weight, target, with_groups(loss_fn) if "groups" in more else loss_fn,
                                        *inputs, **more)  # fmt: skip
    with pytest.raises(ValueError, match="loss_fn: expected a loss of every row, floating-point"):
        onepass.linear_loss(hidden, weight, target, lambda s: s.log_probs.long())


def test_no_rows_and_little_memory(device):
    x, t = torch.zeros(0, 7, device=device), torch.zeros(0, dtype=torch.long, device=device)
    assert onepass.linear_cross_entropy(x, torch.eye(7, device=device), t, reduction="sum", max_memory=1 << 16) == 0


def test_a_head_that_student_and_teacher_share(device):
    if interpreted(device):
        pytest.skip("what is compiled is the same on both backends")
    hidden, weight, _ = head(device)
    other = torch.randn_like(hidden)

    def loss(hidden, weight):
        return onepass.linear_kl_div(hidden, weight, onepass.LinearLogits(other, weight))

    weight = weight.detach()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    same(compiled(hidden, weight), loss(hidden, weight), (hidden,))


def test_a_linear_loss_of_top_1(device):
    """Its gradient is known before the tile is read, and one of its fields is bool."""
    hidden, weight, target = head(device)
    x, options, seen, calls = onepass.LinearLogits(hidden, weight), Options("log_probs entropy is_top1"), {}, []

    def log_probs_of(fields):
        calls.append(1)
        assert fields["is_top1"].dtype == torch.bool  # in every call
        seen.update(fields)
        return fields["log_probs"]

    loss = x.loss(log_probs_of, Inputs(target), options, (), 1.0, linear=True)
    same(loss, F.log_softmax(hidden @ weight.mT, -1).gather(1, target[:, None]).sum(), (hidden, weight))
    logits = (hidden @ weight.mT).detach()
    assert torch.equal(seen["is_top1"], logits.argmax(-1) == target)
    torch.testing.assert_close(seen["entropy"].detach(), torch.distributions.Categorical(logits=logits).entropy())
    assert len(calls) == (1 if backend_of(hidden) is reference else 2)  # once before the tile is read


@pytest.mark.parametrize("loss", ["mean", "none", "statistics", "kl_div"])
def test_a_masked_row_of_nan_and_an_adapter(device, loss):
    hidden, weight, target = head(device)
    A, B = (torch.randn(shape, device=device).requires_grad_() for shape in ((2, 16), (40, 2)))
    mask = torch.arange(len(target), device=device) != 2
    target = target.where(mask, -100)

    def of(hidden):
        x = onepass.LinearLogits(hidden, weight, lora=(A, B, 2.0))
        if loss == "kl_div":
            return onepass.kl_div(x, torch.ones(12, 40, device=device), row_mask=mask)
        if loss == "statistics":
            return sum(onepass.selective_log_softmax_and_entropy(x, target.clamp(min=0), row_mask=mask)).sum()
        return onepass.cross_entropy(x, target, reduction=loss).sum()

    bad = hidden.detach().masked_fill(~mask[:, None], float("nan")).requires_grad_()
    for value in (float("nan"), INF):
        bad = hidden.detach().masked_fill(~mask[:, None], value).requires_grad_()
        for got, expected in zip(
            gradients(of(bad), (bad, weight, A, B)), gradients(of(hidden), (hidden, weight, A, B))
        ):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
