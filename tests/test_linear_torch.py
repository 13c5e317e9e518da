"""How torch uses a linear head, and parameters as people have them."""

import contextlib
import re
import types

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import onepass
from linear_cases import (
    LOSSES,
    N,
    V,
    assert_all_close,
    batch,
    exact,
    gradients,
    teacher_logits,
)
from onepass.core.dispatch import flatten_arguments
from onepass.core.options import FieldGradients, Inputs, Options, PairOptions, PairRows, Transform
from onepass.logits import partitioned as gather
from onepass.logits.head import HeadTensors, Settings
from onepass.logits.tiled_divergence import TeacherDtypes, TeacherTensors
from paths import captured, interpreted

pytestmark = pytest.mark.usefixtures("uninitialised_memory_is_nan")


# Parameters as people have them.


def test_tied_embeddings(device):
    _, weight, _, target = batch(device)
    ids = torch.arange(N, device=device)
    (w,) = exact(weight)
    loss = onepass.linear_cross_entropy(F.embedding(ids, weight).tanh(), weight, target)
    expected = F.cross_entropy(F.embedding(ids, w).tanh() @ w.t(), target)
    loss.backward()
    assert_all_close([weight.grad], gradients(expected, (w,)))


def test_gradients_accumulate(device):
    hidden, weight, bias, target = batch(device)
    for _ in range(2):
        onepass.linear_cross_entropy(hidden, weight, target, bias=bias).backward()
    parts = exact(hidden, weight, bias)
    expected = gradients(2 * F.cross_entropy(F.linear(*parts), target), parts)
    assert_all_close([hidden.grad, weight.grad, bias.grad], expected)


def test_sharded_weights_are_gathered_once(sharded):
    hidden, weight, bias, target = batch("cpu")
    shards = sharded(weight).requires_grad_()
    onepass.linear_cross_entropy(hidden, shards, target, bias=bias).backward()
    expected = gradients(onepass.linear_cross_entropy(hidden, weight, target, bias=bias), (weight,))
    assert type(shards.grad) is type(shards) and shards.grad.placements == shards.placements
    assert_all_close([shards.grad.full_tensor()], expected)


@pytest.mark.parametrize("loss", ["cross_entropy", "pair", "kl_div, none"])
def test_parameters_that_are_whole_only_while_they_are_used(device, monkeypatch, loss):
    """As ZeRO-3's: their data is empty outside of a context."""
    hidden, weight, bias, target = batch(device)
    target = target.abs() % V
    parts = exact(hidden, weight, bias)
    data, used = weight.detach().clone(), []
    accumulator = weight.expand_as(weight).grad_fn.next_functions[0][
        0
    ]  # ZeRO-3 has hooks on it, made while it was whole
    weight.data, weight.ds_shape, weight.ds_id = torch.empty(0, device=device), data.shape, 0

    @contextlib.contextmanager
    def whole(parameters):
        (weight,) = [p for p in parameters if hasattr(p, "ds_id")]
        used.append(weight)
        weight.data = data
        yield
        weight.data = torch.empty(0, device=device)

    zero = types.SimpleNamespace(GatheredParameters=whole)
    monkeypatch.setitem(__import__("sys").modules, "deepspeed", types.SimpleNamespace(zero=zero))
    monkeypatch.setitem(__import__("sys").modules, "deepspeed.zero", zero)
    expected = gradients(LOSSES[loss](F.linear(*parts), target).sum(), parts)
    for hook in (None, whole):
        onepass.gather_parameters(hook)
        try:
            got = LOSSES[loss](onepass.LinearLogits(hidden, weight, bias), target).sum()
            found = gradients(got, (hidden, weight, bias))
        finally:
            onepass.gather_parameters(None)
        assert_all_close(found, expected)
    assert accumulator is not None and used and gather._gather is None


# How torch uses it.

TRACED = [
    "cross_entropy",
    "cross_entropy, every option",
    "pair, masked",
    "topk_kl_div",
    "policy",
    "kl_div, logits",
    "kl_div, none",
]


def traced(loss, hidden, weight, bias, target):
    if loss == "policy":
        return onepass.linear_loss(
            hidden, weight, target, lambda s: s.entropy - s.log_probs, bias=bias, row_mask=target != -100
        )
    if loss.startswith("kl_div"):
        teacher = onepass.LinearLogits(hidden.detach(), weight.detach().flip(0))
        teacher = F.linear(hidden, weight.flip(0)).detach() if "logits" in loss else teacher
        reduction = "none" if "none" in loss else "mean"
        return onepass.linear_kl_div(
            hidden, weight, teacher, row_mask=target != -100, bias=bias, reduction=reduction
        ).sum()
    return LOSSES[loss](onepass.LinearLogits(hidden, weight, bias), target).sum()


@pytest.mark.parametrize("loss", TRACED)
def test_compile_without_graph_breaks(dynamo, device, loss):
    if interpreted(device) and loss not in ("cross_entropy", "kl_div, logits"):
        pytest.skip("what is compiled is the same on both backends")
    *parts, target = batch(device)
    backend = "inductor" if device.type == "cuda" else "aot_eager"
    compiled = torch.compile(traced, fullgraph=True, backend=backend)
    expected, got = traced(loss, *parts, target), compiled(loss, *parts, target)
    assert_all_close([got.detach()], [expected.detach()], "loss")
    assert_all_close(gradients(got, parts), gradients(expected, parts))


def test_compiled_with_the_least_memory(dynamo):
    """The minimum that the error states is enough for the backward too."""
    g = torch.Generator().manual_seed(0)
    hidden, weight, teacher = (torch.randn(n, m, generator=g).bfloat16() for n, m in ((6, 3), (13, 3), (6, 13)))
    parts = hidden.requires_grad_(), weight.requires_grad_()

    def loss(max_memory):
        logits = onepass.LinearLogits(*parts, max_memory=max_memory)
        return onepass.kl_div(logits, teacher, direction="reverse", reduction="sum")

    compiled = torch.compile(loss, backend="aot_eager")
    with pytest.raises(Exception, match="max_memory: expected at least") as caught:
        compiled(1)
    least = int(re.search(r"at least (\d+)", str(caught.value))[1])
    assert_all_close(gradients(compiled(least), parts), gradients(loss(None), parts))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_operations_are_well_formed(device, dtype):
    if interpreted(device):
        pytest.skip("what is registered is the same on both backends")
    hidden, weight, bias, target = (x.detach() for x in batch(device, dtype))
    options = Options(
        "selected log_normalizer expected_logit entropy weighted_logit shift is_top1 log_sum_sq_probs "
        "tempered_log_normalizer mean_logit"
    )
    tensors, inputs = HeadTensors(hidden, weight, bias), Inputs(target % V, target != -100)
    arguments = tuple(flatten_arguments((tensors, inputs, False, Settings(dtype, dtype), options)))
    torch.library.opcheck(torch.ops.onepass.linear_statistics.default, arguments)
    packed, _, _ = torch.ops.onepass.linear_statistics(*arguments)
    row = torch.randn_like(packed[0])
    upstream = FieldGradients(row, row, row, row, row)
    for needed in ([True] * 3 + [False] * 2, [False, True] + [False] * 3):
        arguments = tuple(
            flatten_arguments((tensors, inputs, packed, upstream, needed, Settings(dtype, dtype), options))
        )
        torch.library.opcheck(torch.ops.onepass.linear_gradient.default, arguments)


@pytest.mark.parametrize("own_head", [False, True], ids=["logits", "a head"])
def test_divergences_are_well_formed(device, own_head):
    if interpreted(device):
        pytest.skip("what is registered is the same on both backends")
    hidden, weight, bias, target = (x.detach() for x in batch(device, torch.bfloat16))
    teacher = TeacherTensors(hidden[:, :7], weight[:, :7]) if own_head else TeacherTensors(teacher_logits(target))
    options = PairOptions("jsd", 0.3, Transform(softcap=5.0), columns=V - 3)
    settings = (
        TeacherDtypes(teacher.teacher.dtype, teacher.teacher.dtype),
        Settings(torch.bfloat16, torch.bfloat16),
        options,
    )
    tensors = HeadTensors(hidden, weight, bias), teacher, PairRows(target != -100)
    arguments = tuple(flatten_arguments((*tensors, [True] * 3 + [False] * 2, *settings)))
    torch.library.opcheck(torch.ops.onepass.linear_divergence.default, arguments)
    grad = torch.rand(N, device=device)
    for needed in ([True] * 3 + [False] * 2, [False, True] + [False] * 3):
        arguments = tuple(flatten_arguments((*tensors, grad, needed, *settings)))
        torch.library.opcheck(torch.ops.onepass.linear_divergence_gradient.default, arguments)


def test_inference_mode_and_checkpointing(device):
    hidden, weight, bias, target = batch(device)
    call = lambda h: onepass.linear_cross_entropy(h, weight, target, bias=bias)  # noqa: E731
    with torch.inference_mode():
        value = call(hidden)
    loss = checkpoint(call, hidden, use_reentrant=False)
    assert_all_close([value], [loss.detach()], "loss")
    assert_all_close(gradients(loss, (hidden, weight)), gradients(call(hidden), (hidden, weight)))


META = {
    "mean": lambda h, w, t: onepass.linear_cross_entropy(h, w, t),
    "rows": lambda h, w, t: onepass.linear_cross_entropy(h, w, t, reduction="none").sum(),
    "statistics": lambda h, w, t: onepass.linear_selective_log_softmax_and_entropy(h, w, t, row_mask=t > 0)[0].sum(),
    "own loss": lambda h, w, t: onepass.linear_loss(h, w, t, lambda s: -s.log_probs, row_mask=t > 0),
    "groups": lambda h, w, t: onepass.linear_loss(h, w, t, lambda s, g: -g.sum(s.log_probs), groups=[3, 5]),
}


@pytest.mark.parametrize("loss", META.values(), ids=META)
def test_tensors_without_memory(loss, monkeypatch):
    """How many rows are masked cannot be read: shapes alone are computed."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with torch.device("meta"):
        h, w = torch.empty(8, 16, requires_grad=True), torch.empty(50, 16, requires_grad=True)
        result = loss(h, w, torch.empty(8, dtype=torch.int64))
        assert result.is_meta and result.shape == ()
        result.backward()
    assert h.grad.shape == h.shape and w.grad.shape == w.shape


@pytest.mark.gpu
def test_cuda_graph():
    hidden, weight, bias, target = batch("cuda", rows=(64,), width=64, vocab=1000)
    static = [hidden.detach().requires_grad_(), weight, bias]

    def step():
        for p in static:
            p.grad = None
        onepass.linear_cross_entropy(static[0], weight, target, bias=bias).backward()

    graph, _ = captured(step)
    for seed in (1, 2):
        others = batch("cuda", rows=(64,), width=64, vocab=1000, seed=seed)
        static[0].data.copy_(others[0])
        target.copy_(others[3])
        graph.replay()
        parts = exact(*static)
        expected = gradients(F.cross_entropy(F.linear(*parts), target), parts)
        assert_all_close([p.grad for p in static], expected)
