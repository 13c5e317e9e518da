"""What was silently wrong, hung or crashed, one test or more for each: every test here has failed before it was fixed.

The numbers are those of the list that they were reported in.
"""

import subprocess
import sys
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import onepass
from linear_cases import LOSSES as OF_HEADS
from linear_cases import V, batch, gradients, policy_loss
from onepass import reference
from onepass.backend import backend_of
from onepass.core.options import FieldGradients, Inputs, Options
from onepass.logits import tile_plan
from onepass.logits.head import Head, HeadTensors, Settings
from onepass.moe import Routing
from paths import interpreted
from test_torch import ALL, example

INF = float("inf")


def head(device, rows=12, width=16, vocab=40):
    g = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, width, generator=g).to(device).requires_grad_() for n in (rows, vocab))
    return hidden, weight, torch.randint(vocab, (rows,), generator=g).to(device)


def same(got, expected, parts, tolerance=1e-5):
    """Values and gradients of two losses of the same parts."""
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    for a, b in zip(gradients(got.sum(), parts), gradients(expected.sum(), parts), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


# 1. Strided labels and ids of linear heads.


def test_01_strided_labels(device):
    hidden, weight, target = head(device)
    wide = torch.full((len(target), 3), 10**6, device=device)
    wide[:, 1] = target
    same(onepass.linear_cross_entropy(hidden, weight, wide[:, 1]), F.cross_entropy(hidden @ weight.T, target),
         (hidden, weight))  # fmt: skip
    same(onepass.linear_cross_entropy(hidden, weight, target[3].expand(len(target))),
         F.cross_entropy(hidden @ weight.T, target[3].repeat(len(target))), (hidden, weight))  # fmt: skip


def test_01_strided_ids(device):
    hidden, weight, target = head(device)
    ids = (target.unsqueeze(-1) + torch.arange(16, device=device)) % len(weight)
    log_probs = torch.log_softmax(torch.randn(len(target), 8, device=device), -1) - 0.1
    same(onepass.linear_topk_kl_div(hidden, weight, ids[:, :8], log_probs),
         onepass.topk_kl_div(hidden @ weight.T, ids[:, :8].contiguous(), log_probs), (hidden, weight))  # fmt: skip


# 2. Biases of experts that are sliced or expanded.


@pytest.mark.parametrize("kind", ["sliced", "expanded"])
def test_02_biases_of_experts(device, kind):
    E, H, I = 4, 16, 8  # noqa: E741
    g = torch.Generator().manual_seed(0)
    new = lambda *shape: torch.randn(shape, generator=g).to(device)  # noqa: E731
    x, gate_up, down = new(6, H), new(E, 2 * I, H), new(E, H, I)
    biases = [new(E, 3 * n)[:, n : 2 * n] if kind == "sliced" else new(n).expand(E, n) for n in (2 * I, H)]
    routing = onepass.moe.route(new(6, E), 2)
    got = onepass.moe.expert_mlp(x, routing, gate_up, down, gate_up_bias=biases[0], down_bias=biases[1])
    whole = [b.contiguous() for b in biases]
    expected = onepass.moe.expert_mlp(x, routing, gate_up, down, gate_up_bias=whole[0], down_bias=whole[1])
    assert torch.equal(got, expected)
    got = onepass.moe.scattered_linear(x, gate_up, routing.experts, bias=biases[0])
    assert torch.equal(got, onepass.moe.scattered_linear(x, gate_up, routing.experts, bias=whole[0]))


# 3. Numbers of another type than those that a kernel was compiled with.


def test_03_int_and_then_float(device):
    x = torch.randn(5, 24, generator=torch.Generator().manual_seed(0)).to(device)
    y = x.roll(1, 0)

    calls = {
        "scale": (lambda v, x, y: onepass.moe.route(x, 3, scale=v).weights, (1, 2.5)),
        "eps": (lambda v, x, y: onepass.moe.route(x, 3, score="sigmoid", eps=v).weights, (0, 1e-20, 1, 0.5)),
        "softcap": (lambda v, x, y: onepass.entropy_from_logits(x, softcap=v), (30, 5.5, 1, 2.5)),
        "temperature": (lambda v, x, y: onepass.entropy_from_logits(x, temperature=v), (1, 2.5, 2)),
        "beta": (lambda v, x, y: onepass.kl_div(x, y, direction="jsd", beta=v), (0, 0.3, 1, 0.7)),
        "class_weights": (lambda v, x, y: onepass.softmax_statistics(x, class_weights=v).weighted_logit, (1, 0.25)),
    }
    for name, (make, values) in calls.items():
        got = [make(v, x, y).double() for v in values]
        for v, found in zip(values, got):  # in float64 no kernel is compiled
            torch.testing.assert_close(found, make(v, x.double(), y.double()).double(), rtol=1e-4, atol=1e-5, msg=name)
        assert not any(torch.equal(a, b) for a, b in pairwise(got)) or name == "eps", name
    doubled = onepass.moe.route(x, 3, scale=2).weights
    torch.testing.assert_close(doubled, 2 * onepass.moe.route(x, 3, scale=1).weights)


# 4. Tensors that are written to between forward and backward.


@pytest.mark.parametrize("what", ["index", "inputs", "teacher", "teacher head", "log_probs"])
def test_04_writing_before_the_backward(device, what):
    hidden, weight, target = head(device)
    advantages = torch.rand(12, device=device)
    teacher = torch.randn(12, 40, device=device)
    narrow = torch.randn(12, 6, device=device)
    ids = (target.unsqueeze(-1) + torch.arange(2, device=device)) % 40
    log_probs = torch.full((12, 2), -1.0, device=device)
    loss_fn = lambda s, a: -s.log_probs * a  # noqa: E731
    if what in ("index", "inputs"):
        loss = onepass.linear_loss(hidden, weight, target, loss_fn, advantages, reduction="none")
        written = target if what == "index" else advantages
    elif what == "teacher":
        loss = onepass.linear_kl_div(hidden, weight, teacher, reduction="none")
        written = teacher
    elif what == "teacher head":
        source = onepass.LinearLogits(narrow, torch.randn(40, 6, device=device))
        loss = onepass.linear_kl_div(hidden, weight, source, reduction="none")
        written = narrow
    else:
        loss = onepass.linear_topk_kl_div(hidden, weight, ids, log_probs, reduction="none")
        written = log_probs
    written.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.sum().backward()


# 5. Class weights and a target outside the vocabulary.


@pytest.mark.parametrize("from_head", [False, True], ids=["logits", "head"])
@pytest.mark.parametrize("outside", [40, -1, 2**40])
def test_05_class_weights_and_a_target_outside(device, raises_index_error, from_head, outside):
    hidden, weight, target = head(device)
    target[4] = outside
    weights = torch.rand(40, device=device)
    source = onepass.LinearLogits(hidden, weight) if from_head else hidden @ weight.T
    if raises_index_error:
        with pytest.raises(IndexError, match=f"target: .*got {outside} in row 4"):
            onepass.cross_entropy(source, target, class_weights=weights)
        return
    loss = onepass.cross_entropy(source, target, class_weights=weights, reduction="none")
    assert torch.equal(loss.isnan(), torch.arange(12, device=device) == 4)
    (gradient,) = torch.autograd.grad(loss.nansum(), hidden)
    mean = onepass.cross_entropy(source, target, class_weights=weights)
    assert mean.isnan() and gradient[5].isfinite().all()
    if device.type == "cuda":
        torch.cuda.synchronize()  # the context is still there


# 6. A parameter that the loss closes over, beside a head that is frozen.


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "trained"])
def test_06_a_parameter_that_the_loss_closes_over(device, frozen, reduction):
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


# 7. Losses that do not couple rows, though a gradient of one row is NaN.


def test_07_no_coupling(device):
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


# 8. A loss that draws random numbers, whose backward computes it again.


def test_08_a_random_loss(device):
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


# 9. Linear heads neither wait for the device nor keep a CUDA graph from being captured.


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
def test_09_linear_heads_do_not_wait(monkeypatch, name):
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
def test_09_linear_heads_in_a_cuda_graph(name):
    hidden, weight, bias, target = batch("cuda", torch.float32)
    parts = hidden, weight, bias

    def step():
        return gradients(FORMS[name](onepass.LinearLogits(*parts), target).sum(), parts)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in range(2):
        torch.manual_seed(seed)
        with torch.no_grad():
            hidden.normal_()
            target[:2].random_(weight.shape[0])
        graph.replay()
        for a, b in zip(captured, step()):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


# 10. Programs of a row that wait for each other.


def in_one_or_two(vocab, dtype, rows=3):
    """Cross-entropy of a head whose tile is the logits that are wanted: hidden states of width 1."""
    hidden = torch.ones(rows, 1, device="cuda", dtype=dtype, requires_grad=True)
    g = torch.Generator("cuda").manual_seed(0)
    weight = torch.randn(vocab, 1, generator=g, device="cuda", dtype=torch.float32).to(dtype)
    target = torch.randint(vocab, (rows,), generator=g, device="cuda")
    loss = onepass.linear_cross_entropy(hidden, weight, target, max_memory=2**33)
    loss.backward()
    return loss, hidden.grad, F.cross_entropy(weight.double().T.expand(rows, vocab), target)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [2**24, 2**23, 262144, 151936])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_10_large_vocabularies(vocab, dtype):
    loss, gradient, expected = in_one_or_two(vocab, dtype)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)
    assert gradient.isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [151936, 327680])
def test_10_eight_streams(vocab):
    streams = [torch.cuda.Stream() for _ in range(8)]
    logits = [torch.randn(64, vocab, device="cuda", dtype=torch.bfloat16) for _ in streams]
    index = torch.randint(vocab, (64,), device="cuda")
    ones = torch.ones(64, device="cuda")
    kernels, options = sys.modules["onepass.kernels"], Options("log_probs")
    assert kernels.supports_fused_loss(logits[0], index, options)
    expected = [x.float().log_softmax(-1)[torch.arange(64), index] for x in logits]
    torch.cuda.synchronize()
    found = []
    for _ in range(2):
        given = [x.clone() for x in logits]
        torch.cuda.synchronize()
        found = []
        for x, stream in zip(given, streams):
            with torch.cuda.stream(stream):
                grads = FieldGradients(selected=ones)
                found.append(kernels.softmax_loss(x, Inputs(index), grads, options, x)[1])
        torch.cuda.synchronize()
    for got, wanted in zip(found, expected):
        torch.testing.assert_close(got, wanted)


@pytest.mark.gpu
def test_10_few_multiprocessors(monkeypatch):
    """On a small device, or a slice of one, two launches take the place of one whose programs wait."""
    from onepass.kernels import launch, layout

    logits = torch.empty(4, 151936, device="cuda", dtype=torch.bfloat16)
    index, options = torch.zeros(4, dtype=torch.long, device="cuda"), Options("log_probs")
    kernels = sys.modules["onepass.kernels"]
    assert kernels.supports_fused_loss(logits, index, options)
    monkeypatch.setattr(layout, "multiprocessors", lambda device: 14)
    monkeypatch.setattr(launch, "_launches", {})
    assert not kernels.supports_fused_loss(logits, index, options)
    loss, gradient, expected = in_one_or_two(151936, torch.bfloat16)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)
    assert gradient.isfinite().all()


# 11. The number of tiles, and with it every bit of the result, follows from shapes alone.


def test_11_tiles_do_not_follow_the_free_memory(monkeypatch):
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


class OnCuda:
    """Hidden states of which only their description is asked."""

    def __init__(self, hidden):
        self.shape, self.dtype, self.device, self.is_cuda = hidden.shape, hidden.dtype, torch.device("cuda", 0), True
        self.numel, self.element_size = hidden.numel, hidden.element_size


# 14. Two losses in one compiled graph of dynamic shapes.


def test_14_two_losses_in_one_graph(device):
    """Every loss twice, so that no number is met first within one of them."""
    if interpreted(device):
        pytest.skip("what is compiled is the same on both backends")

    def all_twice(x, t):
        return torch.stack([ALL[name](x, t) for name in [*ALL, *ALL]])

    torch._dynamo.reset()
    x, t = example(device)
    compiled = torch.compile(all_twice, fullgraph=True, backend="eager", dynamic=True)
    for rows in (8, 5):
        torch.testing.assert_close(compiled(x[:rows], t[:rows]), all_twice(x[:rows], t[:rows]))


# 16. Routers: one definition.


def test_16_logsumexp_of_infinity(device):
    logits = torch.randn(3, 8, device=device)
    logits[1, 2] = INF
    for score in ("softmax", "sigmoid", "sqrtsoftplus"):
        routing = onepass.moe.route(logits, 2, score=score, losses=True)
        assert torch.equal(routing.logsumexp.isnan().cpu(), torch.tensor([False, True, False])), score


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("groups", [{}, {"n_group": 4, "topk_group": 2, "group_score": "max"}], ids=["", "groups"])
def test_16_the_order_under_a_softcap_that_saturates(device, score, groups):
    g = torch.Generator().manual_seed(0)
    logits = (30 + 40 * torch.rand(64, 16, generator=g)).to(device)  # tanh of 6 to 14: 1 to the last bits
    routing = onepass.moe.route(logits, 4, score=score, softcap=5.0, **groups)
    chosen = logits.gather(-1, routing.experts)
    assert (chosen[:, :-1] >= chosen[:, 1:]).all()
    if not groups:
        assert torch.equal(routing.experts, logits.topk(4)[1])


# 17. Smaller ones.


def test_17_probabilities_for_log_probs():
    x, ids = torch.randn(3, 10), torch.tensor([[1, 2]] * 3)
    with pytest.raises(ValueError, match="teacher_log_probs: expected logarithms of probabilities"):
        onepass.topk_kl_div(x, ids, torch.full((3, 2), 0.4))
    assert onepass.topk_kl_div(x, ids, torch.full((3, 2), 0.4), row_mask=torch.zeros(3)) == 0  # masked: may be anything


def test_17_memory_of_few_rows_on_a_cpu(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    hidden, weight, target = head("cpu", rows=4)
    assert onepass.linear_cross_entropy(hidden, weight, target, max_memory=2**20).isfinite()


def test_17_errors_are_short():
    x, t = torch.randn(3, 10), torch.tensor([1, 2, 3])
    long = [0.5] * 100_000
    for call in (
        lambda: onepass.cross_entropy(x, t, class_weights=long),
        lambda: onepass.cross_entropy(x, long),
        lambda: onepass.cross_entropy(x, t, reduction=long),
        lambda: onepass.cross_entropy(x, t, label_smoothing=long),
        lambda: onepass.kl_div(x, x, num_items=long),
        lambda: onepass.moe.route(x, long),
        lambda: onepass.entropy_from_logits(x, temperature=10**5000),
    ):
        with pytest.raises((TypeError, ValueError)) as error:
            call()
        assert len(str(error.value)) < 500


@pytest.mark.parametrize("value", [None, -100.5, "x", True, 2**64])
def test_17_ignore_index(value):
    x, t = torch.randn(3, 10), torch.tensor([1, 2, 3])
    with pytest.raises((TypeError, ValueError), match="ignore_index: expected"):
        onepass.cross_entropy(x, t, ignore_index=value)
    with pytest.raises((TypeError, ValueError), match="ignore_index: expected"):
        onepass.distillation_loss(x, t, t.unsqueeze(-1), -torch.ones(3, 1), ignore_index=value)


def test_17_beta_outside_jsd():
    x = torch.randn(3, 10)
    for direction in ("forward", "reverse"):
        with pytest.raises(ValueError, match="beta: expected direction='jsd' with it"):
            onepass.kl_div(x, x, direction=direction, beta=0.3)


def test_17_a_float_mask(device):
    x, t = torch.randn(4, 10, device=device), torch.tensor([1, 2, 3, 4], device=device)
    mask = torch.tensor([1.0, 0.0, 1.0, 0.0], device=device)
    for kind in (torch.float32, torch.bfloat16, torch.int32, torch.uint8):
        got = onepass.selective_log_softmax(x, t, row_mask=mask.to(kind))
        assert torch.equal(got, onepass.selective_log_softmax(x, t, row_mask=mask.bool()))
        routing = onepass.moe.route(x, 2, token_mask=mask.to(kind))
        assert torch.equal(routing.weights, onepass.moe.route(x, 2, token_mask=mask.bool()).weights)


def test_17_columns_of_the_teacher():
    with pytest.raises(ValueError, match=r"teacher_logits: expected 10 columns, those of the student, got 8"):
        onepass.kl_div(torch.randn(3, 10), torch.randn(3, 8))


def test_17_metrics_as_a_word():
    x, t = torch.randn(3, 10), torch.tensor([1, 2, 3])
    with pytest.raises(TypeError, match=r"metrics: expected a sequence of names, got 'is_top1'"):
        onepass.softmax_statistics(x, t, metrics="is_top1")


def test_17_labels_beyond_the_dtype_of_ids(device, raises_index_error):
    x = torch.randn(3, 10, device=device)
    ids = torch.tensor([[1], [2], [3]], dtype=torch.int32, device=device)
    labels = torch.tensor([1, 2**32 + 5, 3], device=device)
    call = lambda: onepass.distillation_loss(x, labels, ids, -torch.ones(3, 1, device=device))  # noqa: E731
    if raises_index_error:
        with pytest.raises(IndexError, match="4294967301 in row 1"):
            call()
    else:
        assert call().isnan()


def test_17_overlapping_logits_in_place():
    t = torch.tensor([1, 2, 3])
    for shape, strides in (((3, 10), (5, 1)), ((3, 10), (9, 1)), ((3, 10), (0, 1))):
        x = torch.randn(40).as_strided(shape, strides).requires_grad_()
        with pytest.raises(ValueError, match="inplace_backward: expected logits of which no two elements share memory"):
            onepass.cross_entropy(x, t, inplace_backward=True)
    apart = torch.randn(3, 12)[:, :10].requires_grad_()
    onepass.cross_entropy(apart, t, inplace_backward=True).backward()
    assert apart.grad.isfinite().all()


def test_17_forward_mode(device):
    x, t = torch.randn(3, 10, device=device), torch.tensor([1, 2, 3], device=device)
    hidden, weight, target = (p.detach() for p in head(device))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        of_head = torch.autograd.forward_ad.make_dual(hidden, torch.ones_like(hidden))
        for call in (
            lambda: onepass.cross_entropy(dual, t),
            lambda: onepass.kl_div(x, dual),
            lambda: onepass.moe.route(dual, 2),
            lambda: onepass.linear_cross_entropy(of_head, weight, target),
            lambda: onepass.linear_kl_div(of_head, weight, torch.randn(12, 40, device=device)),
        ):
            with pytest.raises(NotImplementedError, match="forward-mode"):
                call()
        onepass.cross_entropy(x, t)  # others may go on


def test_17_experts_of_no_choice(device):
    E, H, I = 4, 16, 8  # noqa: E741
    hidden = torch.randn(5, H, device=device, requires_grad=True)
    weights = torch.randn(E, 2 * I, H, device=device), torch.randn(E, H, I, device=device)
    none = Routing(torch.zeros(5, 0, device=device), torch.zeros(5, 0, dtype=torch.long, device=device), None)
    out = onepass.moe.expert_mlp(hidden, none, *weights)
    assert torch.equal(out, torch.zeros_like(out)) and out.shape == hidden.shape
    out.sum().backward()
    assert torch.equal(hidden.grad, torch.zeros_like(hidden))


@pytest.mark.parametrize(
    "value", [1e-40, 10**400, 10**5000, -(10**400), 1e39], ids=["1e-40", "10**400", "10**5000", "-10**400", "1e39"]
)
@pytest.mark.parametrize("name", ["temperature", "softcap"])
def test_17_numbers_that_float32_does_not_hold(name, value):
    with pytest.raises(ValueError, match=f"{name}: expected"):
        onepass.entropy_from_logits(torch.randn(3, 10), **{name: value})


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_17_a_dispatch_mode_sees_the_operations(device):
    x = torch.randn(3, 10, device=device, requires_grad=True)
    t = torch.tensor([1, 2, 3], device=device)
    with Seen() as seen:
        onepass.cross_entropy(x, t).backward()
        onepass.kl_div(x, x.detach())
        onepass.moe.route(x, 2)
    names = {name.split(".")[1] for name in seen.names if name.startswith("onepass.")}
    assert names == {"softmax_statistics", "softmax_gradient", "divergence", "route"}


def test_17_flops_are_counted(device):
    from torch.utils.flop_counter import FlopCounterMode

    hidden, weight, target = head(device)
    product = 2 * hidden.numel() * len(weight)
    E, I = 4, 8  # noqa: E741
    gate_up, down = (torch.randn(s, device=device, requires_grad=True) for s in ((E, 2 * I, 16), (E, 16, I)))
    routing = onepass.moe.route(torch.randn(12, E, device=device), 2)
    calls = {
        "three products": (lambda: onepass.linear_cross_entropy(hidden, weight, target), 3 * product),
        "four products": (lambda: onepass.linear_softmax_statistics(hidden, weight).entropy.sum(), 4 * product),
        "experts": (lambda: onepass.moe.expert_mlp(hidden, routing, gate_up, down).sum(), 3 * 6 * 24 * 16 * I),
        "scattered": (lambda: onepass.moe.scattered_linear(hidden, gate_up, routing.experts).sum(),
                      3 * 2 * 24 * 16 * 2 * I),
    }  # fmt: skip
    for name, (call, expected) in calls.items():
        with FlopCounterMode(display=False) as counter:
            call().backward()
        assert counter.get_total_flops() == expected, name


def test_17_selective_checkpointing(device):
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    x = torch.randn(3, 10, device=device, requires_grad=True)
    t = torch.tensor([1, 2, 3], device=device)
    saved = []

    def policy(ctx, op, *args, **kwargs):
        ours = "onepass::softmax_statistics" in op.name()
        saved.append(ours)
        return CheckpointPolicy.MUST_SAVE if ours else CheckpointPolicy.PREFER_RECOMPUTE

    loss = lambda x: onepass.cross_entropy(x * 2, t)  # noqa: E731
    contexts = lambda: create_selective_checkpoint_contexts(policy)  # noqa: E731
    checkpoint(loss, x, use_reentrant=False, context_fn=contexts).backward()
    (expected,) = torch.autograd.grad(loss(x), x)
    torch.testing.assert_close(x.grad, expected)
    assert any(saved)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_17_a_bias_that_is_rounded_twice(device, reduction):
    """In a loss of rows as in the statistics."""
    pytest.importorskip("trl")
    from onepass.integrations.trl_heads import TwiceRounded

    hidden, weight, bias, target = batch(device, torch.bfloat16)
    loss = onepass.cross_entropy(TwiceRounded(hidden, weight, bias), target, reduction=reduction)
    logits = F.linear(hidden, weight) + bias
    expected = onepass.cross_entropy(logits, target, reduction=reduction)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)


def test_17_class_weights_that_require_a_gradient():
    x, t = torch.randn(3, 10), torch.tensor([1, 2, 3])
    with pytest.raises(ValueError, match="class_weights: expected constants"):
        onepass.cross_entropy(x, t, class_weights=torch.rand(10, requires_grad=True))


def test_17_groups_of_another_path():
    """Groups that were made for a tensor that PyTorch multiplies have no tiles for a kernel."""
    code = (
        "import os; os.environ['TRITON_INTERPRET'] = '1'\n"
        "import torch, onepass\n"
        "x, w, ids = torch.randn(4, 8), torch.randn(3, 6, 8), torch.randint(3, (4, 2))\n"
        "groups = onepass.moe.group_by_expert(ids, 3, x.double())\n"
        "try:\n    onepass.moe.scattered_linear(x, w, ids, groups)\n"
        "except ValueError as error:\n    print(error)\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "groups.tile_expert: expected shape" in out


# 18. Found by somebody who tried to break it.


def test_18_options_in_tensors_that_change(device):
    x = torch.randn(6, 8, device=device)
    scale, k = torch.tensor(1.0), torch.tensor(2)
    once = onepass.moe.route(x, k, scale=scale).weights
    scale.fill_(3.0)
    torch.testing.assert_close(onepass.moe.route(x, k, scale=scale).weights, 3 * once)
    k.fill_(3)
    assert onepass.moe.route(x, k).weights.shape == (6, 3)


def test_18_no_tokens(device):
    experts = torch.zeros(0, 2, dtype=torch.long, device=device)
    routing = Routing(torch.zeros(0, 2, device=device), experts, None)
    weights = [torch.randn(s, device=device, requires_grad=True) for s in ((4, 16, 16), (4, 16, 8))]
    x = torch.zeros(0, 16, device=device)
    onepass.moe.expert_mlp(x, routing, *weights).sum().backward()
    onepass.moe.scattered_linear(x, weights[0], experts).sum().backward()
    assert all(torch.equal(w.grad, torch.zeros_like(w)) for w in weights)


def test_18_in_place_under_compile(device):
    torch._dynamo.reset()
    x, t = example(device)
    call = lambda x, t: onepass.cross_entropy(x * 1, t, inplace_backward=True)  # noqa: E731
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=True)
    torch.testing.assert_close(compiled(x, t), call(x, t))


def test_18_a_second_backward_in_place_under_hooks(device):
    x, t = example(device)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach(), lambda x: x):
        loss = onepass.cross_entropy(x * 1, t, inplace_backward=True)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"inplace_backward: a second backward|used after their gradient"):
        loss.backward()


def test_18_ids_of_tokens_that_are_not_given(device):
    """Of log-prob -inf, as of those that a mask leaves out, ids and the rows may be anything."""
    x = torch.randn(5, 33, device=device)
    x[1] = float("nan")
    x.requires_grad_()
    ids, log_probs = torch.zeros(5, 2, dtype=torch.long, device=device), torch.full((5, 2), -1.0, device=device)
    ids[0, 1], log_probs[0, 1] = -1, -INF
    ids[1], log_probs[1] = 10**6, -INF
    for renormalize in (False, True):
        options = {"renormalize": renormalize, "reduction": "none"}
        got = onepass.topk_kl_div(x, ids, log_probs, **options)
        expected = onepass.topk_kl_div(x, ids, log_probs, teacher_mask=log_probs.isfinite(), **options)
        (gradient,) = torch.autograd.grad(got.sum(), x)
        assert torch.equal(got, expected) and got[1] == 0
        assert gradient.isfinite().all() and (gradient[1] == 0).all()


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_18_a_bias_of_nan(device, score):
    if backend_of(torch.empty(0, device=device)) is not reference and device.type == "cpu":
        pytest.skip("the interpreter's maximum keeps a NaN, which that of a GPU drops")
    x = torch.randn(3, 8, device=device)
    bias = torch.zeros(8, device=device)
    bias[2] = float("nan")
    assert (onepass.moe.route(x, 7, score=score, selection_bias=bias).experts != 2).all()
    every = onepass.moe.route(x, 3, score=score, selection_bias=torch.full_like(bias, float("nan")))
    assert ((every.experts >= 0) & (every.experts < 8)).all() and every.counts.sum() == 9


def test_18_a_loss_that_writes_to_its_arguments(device):
    hidden, weight, target = head(device)
    ones = torch.ones(12, device=device)
    losses = {
        "a field": (lambda s: (s.shift.zero_(), -s.log_probs)[1], ()),
        "an input": (lambda s, a: (a.mul_(2), -s.log_probs * a)[1], (ones,)),
    }
    for name, (loss_fn, inputs) in losses.items():
        with pytest.raises(ValueError, match="loss_fn: expected a function that writes to none of its arguments"):
            onepass.linear_loss(hidden, weight, target, loss_fn, *inputs)
        assert name
    with pytest.raises(ValueError, match="loss_fn: expected a loss of every row, floating-point"):
        onepass.linear_loss(hidden, weight, target, lambda s: s.log_probs.long())


def test_18_layers_of_different_k(device):
    x = torch.randn(6, 8, device=device)
    layers = [onepass.moe.route(x, k, losses=True) for k in (2, 4)]
    for loss in (onepass.moe.load_balancing_loss, onepass.moe.router_z_loss):
        with pytest.raises(ValueError, match="routing: expected the same number of experts per token in all layers"):
            loss(layers)


# 20. Found by somebody who tried to break the redesign.


def test_20_items_in_a_tensor_are_traced(device):
    x, t = example(device)
    compiled = torch.compile(lambda x, n: onepass.cross_entropy(x, t, num_items=n), fullgraph=True, backend="aot_eager")
    for n in (torch.tensor(3.0), torch.tensor([3]), torch.tensor(3)):
        torch.testing.assert_close(compiled(x, n), onepass.cross_entropy(x, t, num_items=3))
        torch._dynamo.reset()


@pytest.mark.parametrize("value", [-2, float("nan"), True])
def test_20_items_in_a_tensor_are_checked(value):
    with pytest.raises((TypeError, ValueError), match="num_items: expected"):
        onepass.cross_entropy(torch.randn(2, 5), torch.tensor([1, 2]), num_items=torch.tensor(value))


def test_20_a_weight_without_bound_of_a_class_that_no_row_has(device):
    x, t = torch.randn(4, 7, device=device, requires_grad=True), torch.tensor([-100, 3, 3, 3], device=device)
    weights = torch.rand(7, device=device).index_fill(0, torch.tensor(0, device=device), INF)
    same(onepass.cross_entropy(x, t, class_weights=weights), F.cross_entropy(x, t, weight=weights), (x,))


@pytest.mark.parametrize("renormalize", [False, True])
def test_20_a_teacher_of_nan_is_not_a_teacher_that_is_absent(device, renormalize):
    x, ids = torch.randn(4, 7, device=device), torch.zeros(4, 1, dtype=torch.long, device=device)
    log_probs = torch.full((4, 1), float("nan"), device=device)
    head = torch.eye(7, device=device)
    assert onepass.topk_kl_div(x, ids, log_probs, renormalize=renormalize).isnan()
    assert onepass.linear_topk_kl_div(x, head, ids, log_probs, renormalize=renormalize).isnan()


def test_20_no_rows_and_little_memory(device):
    x, t = torch.zeros(0, 7, device=device), torch.zeros(0, dtype=torch.long, device=device)
    assert onepass.linear_cross_entropy(x, torch.eye(7, device=device), t, reduction="sum", max_memory=1 << 16) == 0


def test_20_a_head_that_student_and_teacher_share(device):
    if interpreted(device):
        pytest.skip("what is compiled is the same on both backends")
    hidden, weight, _ = head(device)
    other = torch.randn_like(hidden)

    def loss(hidden, weight):
        return onepass.linear_kl_div(hidden, weight, onepass.LinearLogits(other, weight))

    weight = weight.detach()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    same(compiled(hidden, weight), loss(hidden, weight), (hidden,))


# Found by trying to break it: gradients of -inf that overflow, and dtypes and transforms of torch.


def test_a_large_upstream_gradient_of_an_entropy(device):
    logits = torch.tensor([[0.3, -torch.inf, 1.0, -0.5]], device=device).requires_grad_()
    (grad,) = torch.autograd.grad(onepass.entropy_from_logits(logits).sum() * 1e9, logits)
    z = logits.detach().double()
    p = z.softmax(-1)
    log_p = torch.where(p > 0, p.log(), 0.0)
    expected = -p * (log_p - (p * log_p).sum(-1, keepdim=True)) * 1e9
    torch.testing.assert_close(grad.double(), expected, rtol=1e-5, atol=100.0)


def test_a_default_dtype_of_float64(device):
    logits, target = torch.randn(3, 5, device=device), torch.tensor([1, -100, 4], device=device)
    torch.set_default_dtype(torch.float64)
    try:
        for options in ({}, {"label_smoothing": 0.1}, {"z_loss_weight": 0.1}):
            assert onepass.cross_entropy(logits, target, **options).dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_vmap_on_a_cpu(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    logits = torch.randn(4, 3, 6)
    found = torch.func.vmap(lambda x: onepass.softmax_statistics(x).entropy)(logits)
    torch.testing.assert_close(found, onepass.entropy_from_logits(logits))


@pytest.mark.parametrize("masked", [False, True])
def test_an_ignore_index_that_int32_cannot_hold(device, masked):
    """Torch would compare with 0, what is left of it in 32 bits."""
    logits, target = torch.randn(3, 33, device=device), torch.tensor([0, 1, 2], device=device)
    options = {"row_mask": torch.ones(3, device=device)} if masked else {}
    loss = onepass.cross_entropy(logits, target.int(), ignore_index=2**40, **options)
    torch.testing.assert_close(loss, F.cross_entropy(logits, target))


def test_inplace_backward_of_empty_logits(device):
    logits = torch.randn(16, 0, device=device).requires_grad_()
    target = torch.zeros(0, dtype=torch.long, device=device)
    onepass.cross_entropy((logits * 1).T, target, reduction="sum", inplace_backward=True).backward()
    assert logits.grad.shape == (16, 0)


def test_one_upstream_gradient_of_several_ids(device):
    """A number is the gradient of all ids of all rows; the kernel must not read beyond it."""
    logits, index = torch.randn(3, 7, device=device), torch.tensor([[0, 6], [3, 3], [5, 1]], device=device)
    backend, inputs, options = backend_of(logits), Inputs(index), Options("log_probs")
    packed, found, expected = backend.softmax_statistics(logits, inputs, options)[0], logits * 0, logits * 0
    number = torch.full((1,), 0.5, device=device)[0]
    backend.softmax_gradient(logits, inputs, packed, FieldGradients(selected=number), options, found)
    every = FieldGradients(selected=number.expand(3, 2).contiguous())
    backend.softmax_gradient(logits, inputs, packed, every, options, expected)
    assert expected.any() and torch.equal(found, expected)


def test_a_loss_of_rows_under_a_checkpoint(device):
    """The checkpoint unpacks each saved tensor once."""
    hidden, weight, target = head(device)

    def loss(hidden, weight):
        return onepass.linear_cross_entropy(hidden, weight, target, reduction="none")

    same(checkpoint(loss, hidden, weight, use_reentrant=False), loss(hidden, weight), (hidden, weight))


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


@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
def test_jsd_of_a_probability_that_underflows(device, beta):
    z = torch.tensor([[0.0, -103.0, 0.3], [0.0, -200.0, 1.0]], device=device, requires_grad=True)
    t = torch.tensor([[0.0, -200.0, 1.0], [0.0, -103.5, 0.3]], device=device)
    loss = onepass.kl_div(z, t, direction="jsd", beta=beta, reduction="none")
    exact = z.detach().double().requires_grad_()
    p, q = exact.softmax(-1), t.double().softmax(-1)
    m = beta * q + (1 - beta) * p
    expected = beta * (q * (q.log() - m.log())).sum(-1) + (1 - beta) * (p * (p.log() - m.log())).sum(-1)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)
    for a, b in zip(gradients(loss.sum(), (z,)), gradients(expected.sum(), (exact,))):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-6)


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


def test_codes_under_autocast_are_no_weights(device):
    codes = torch.ones(2, 16, 64, device=device)
    hidden, down = torch.randn(4, 64, device=device), torch.randn(2, 64, 8, device=device)
    ids = torch.zeros(4, 1, dtype=torch.int64, device=device)
    routing = Routing(torch.ones(4, 1, device=device), ids, None)
    for dtype in (torch.float8_e4m3fn, torch.uint8, torch.complex64):
        of_dtype = codes.to(dtype)
        with torch.autocast(device.type, torch.bfloat16):
            with pytest.raises(TypeError, match="gate_up_weight: expected"):
                onepass.moe.expert_mlp(hidden, routing, of_dtype, down)
            with pytest.raises(TypeError, match="down_bias: expected"):
                onepass.moe.expert_mlp(hidden, routing, codes, down, down_bias=of_dtype[:, 0])
            with pytest.raises(TypeError, match="weight: expected"):
                onepass.moe.scattered_linear(hidden, of_dtype, ids)


def test_a_gradient_of_nan_and_an_id_that_is_out_of_range(device):
    ids = torch.tensor([[0, 5], [1, 0]], device=device)
    weights = torch.rand(2, 2, device=device).requires_grad_()
    out = onepass.moe.scattered_linear(
        torch.randn(2, 4, device=device), torch.randn(2, 3, 4, device=device), ids, weights=weights
    )
    (grad,) = torch.autograd.grad(out, weights, torch.tensor([[float("nan")], [1.0]], device=device).expand(2, 3))
    assert grad[0, 0].isnan() and grad[0, 1] == 0 and grad[1].isfinite().all()


def test_results_can_be_changed_in_place(device):
    """A view of what a backward reads could not be: torch raises an error then."""
    x = torch.randn(4, 7, device=device, requires_grad=True)
    index = torch.arange(4, device=device)
    calls = (
        lambda: [onepass.kl_div(x, torch.ones_like(x), reduction="none")],
        lambda: [onepass.entropy_from_logits(x)],
        lambda: onepass.selective_log_softmax_and_entropy(x, index),
    )
    for call in calls:
        plain = sum((n + 2) * r.sum() for n, r in enumerate(call()))
        found = call()
        for n, result in enumerate(found):
            result *= n + 2
        wanted, got = (torch.autograd.grad(t, x)[0] for t in (plain, sum(r.sum() for r in found)))
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("value", [float("-inf"), -1.0, float("nan")])
def test_an_additive_mask(value):
    mask, x = torch.tensor([0.0, value, 0.0]), torch.randn(3, 5)
    ids, log_probs = torch.zeros(3, 1, dtype=torch.int64), torch.full((3, 1), -1.0)
    calls = {
        "row_mask": [lambda: onepass.cross_entropy(x, torch.arange(3), row_mask=mask),
                     lambda: onepass.ratio_report(x[:, 0], x[:, 1], row_mask=mask)],
        "teacher_mask": [lambda: onepass.topk_kl_div(x, ids, log_probs, teacher_mask=mask.unsqueeze(-1))],
    }  # fmt: skip
    if value == -1:
        calls["row_mask"] += [lambda: onepass.cross_entropy(x, torch.arange(3), row_mask=mask.int())]
    for name, of_name in calls.items():
        for call in of_name:
            with pytest.raises(ValueError, match=f"{name}: expected 1 for what to read and 0 for the rest, got"):
                call()


def test_labels_of_a_subclass_do_not_change_later_losses(monkeypatch):
    from onepass.softmax import statistics

    class Labels(torch.Tensor):
        pass

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(statistics, "_last", {})
    x, target = torch.randn(3, 5, requires_grad=True), torch.arange(3)
    onepass.cross_entropy(x, target.as_subclass(Labels)).backward()
    assert type(onepass.cross_entropy(x, target)) is torch.Tensor
    assert all(type(kept) is torch.Tensor for kept in statistics._last.values())


@pytest.mark.parametrize("name", ["temperature", "class_weights", "teacher_log_probs", "teacher"])
def test_forward_mode_of_what_is_constant(name):
    x, target = torch.randn(3, 5), torch.arange(3)
    function, at = {
        "temperature": (lambda t: onepass.selective_log_softmax(x, target, temperature=t), torch.ones(3)),
        "class_weights": (lambda c: onepass.cross_entropy(x, target, class_weights=c), torch.ones(5)),
        "teacher_log_probs": (lambda p: onepass.topk_kl_div(x, target[:, None], p), -torch.ones(3, 1)),
        "teacher": (lambda t: onepass.linear_kl_div(torch.ones(3, 2), torch.ones(5, 2), t), x),
    }[name]
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(function, (at,), (torch.ones_like(at),))


def test_anomaly_mode_finds_no_nan_in_a_masked_row():
    x, index = torch.randn(2, 5, requires_grad=True), torch.tensor([[0, 1], [2, 3]])
    mask = torch.tensor([True, False])
    with torch.autograd.detect_anomaly(check_nan=True):
        loss = onepass.topk_kl_div(x, index, torch.full((2, 2), -1.0), row_mask=mask, renormalize=True)
        loss.backward()
    assert x.grad.isfinite().all() and not x.grad[1].any()


def test_groups_under_another_default_device():
    from onepass.logits.row_groups import ids_of

    with torch.device("meta"):
        assert ids_of([1, 3], torch.device("cpu")).tolist() == [0, 1, 1, 1]


def test_groups_of_experts_end_with_the_process_group():
    """They are of one process here: the groups of an earlier process group are unknown to the next."""
    from onepass.core.collectives import sum_of_all_ranks
    from onepass.integrations.expert_shards import tensor_group

    dist = torch.distributed
    if not dist.is_available():
        pytest.skip("torch without distributed")
    for _ in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            group = tensor_group(1)
            assert tensor_group(1) is group
            assert sum_of_all_ranks(torch.ones(2), group.group_name).tolist() == [1, 1]
        finally:
            dist.destroy_process_group()


def test_compiled_experts_know_other_numbers_of_tokens(dynamo, device):
    """One graph for all numbers of tokens but the first, and for training too."""
    from torch._dynamo.testing import CompileCounterWithBackend

    g = torch.Generator().manual_seed(0)
    logits = torch.randn(9, 4, generator=g).to(device)
    weight, gate_up, down = (
        torch.randn(s, generator=g).to(device).requires_grad_() for s in ((4, 8, 8), (4, 12, 8), (4, 8, 6))
    )
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(backend=counter, dynamic=None, fullgraph=True)
    def compiled(x, experts, weights):
        routing = Routing(weights, experts, None)
        return onepass.moe.scattered_linear(x, weight, experts), onepass.moe.expert_mlp(x, routing, gate_up, down)

    for n in (3, 5, 7, 9):
        x, routing = torch.randn(n, 8, generator=g).to(device), onepass.moe.route(logits[:n], 2)
        found = compiled(x, routing.experts, routing.weights)
        expected = (onepass.moe.scattered_linear(x, weight, routing.experts),
                    onepass.moe.expert_mlp(x, routing, gate_up, down))  # fmt: skip
        of = [gradients(sum(y.sum() for y in ys), (weight, gate_up, down)) for ys in (found, expected)]
        torch.testing.assert_close([*found, *of[0]], [*expected, *of[1]])
    assert counter.frame_count == 2


def test_a_dtensor_among_plain_tensors():
    dist = torch.distributed
    if not dist.is_available():
        pytest.skip("torch without distributed")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        target = distribute_tensor(torch.arange(3), init_device_mesh("cpu", (1,)), [Replicate()])
        with pytest.raises(TypeError, match=r"target: expected a tensor, got a DTensor of \(3,\)"):
            onepass.cross_entropy(torch.randn(3, 5), target)
        with pytest.raises(TypeError, match=r"router_logits: expected a tensor, got a DTensor of \(3,\)"):
            onepass.moe.route(target.float(), 1)
    finally:
        dist.destroy_process_group()
