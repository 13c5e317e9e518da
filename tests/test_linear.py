"""The linear head against the same losses of logits that are there: values, gradients, tiles, memory, refusals."""

import contextlib
import os
import types

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import onepass
from definition import assert_close, statistics
from onepass.cli.demo import peak_memory
from onepass.head import gather, tiles
from onepass.head import loss as head_loss
from onepass.head import statistics as head_statistics
from onepass.head.tiles import Head, plan
from onepass.options import Options, PairOptions

N, H, V = 11, 19, 83
TILES = [1, 4, 1000]


@pytest.fixture(autouse=True)
def uninitialised_memory_is_nan():
    if torch.cuda.is_available():
        yield  # where not all of torch is deterministic
        return
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=TILES, ids=lambda n: f"tiles of {n}")
def tile(request, monkeypatch):
    return tiles_of(monkeypatch, request.param)


def tiles_of(monkeypatch, rows):
    monkeypatch.setattr(tiles, "equal", lambda count, most: max(1, min(count, most, rows)))
    return rows


def batch(device, dtype=torch.float32, rows=(N,), width=H, vocab=V, seed=0):
    """Hidden states, weight and bias that require gradients, and targets of which some are ignored."""
    g = torch.Generator().manual_seed(seed)
    shapes = ((*rows, width), (vocab, width), (vocab,))
    parts = [(torch.randn(s, generator=g) * scale).to(dtype).to(device) for s, scale in zip(shapes, (1, 0.5, 1))]
    target = torch.randint(vocab, rows, generator=g)
    target.view(-1)[2:4] = -100
    return *[p.requires_grad_() for p in parts], target.to(device)


def exact(*parts):
    return [p.detach().double().requires_grad_() for p in parts]


def gradients(loss, parts):
    return torch.autograd.grad(loss, parts, allow_unused=True)


def assert_all_close(got, expected, name="gradient"):
    """Norms, of sums over tiles in float32 (float64): every product is rounded in an order of its own."""
    for g, e in zip(got, expected, strict=True):
        bound = (1e-12 if g.dtype == torch.float64 else 2e-5) * (e.double().norm() + 1e-3)
        assert (g.double() - e.to(g.device).double()).norm() <= bound, name


# The same as of logits.

POLICY_INPUTS = ("advantages", "old_log_probs")


def policy_loss(s, advantages, old_log_probs):
    ratio = (s.log_probs - old_log_probs).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages) - 0.05 * s.entropy


def teacher_tokens(target):
    ids = torch.stack([target.clamp(min=0), (target.clamp(min=0) + 1) % V], dim=-1)
    return ids, -0.5 - torch.arange(2, device=target.device).expand_as(ids).float(), target != -100


def teacher_logits(target):
    g = torch.Generator().manual_seed(5)
    return torch.randn((*target.shape, V), generator=g).to(target.device)


LOSSES = {
    "cross_entropy": lambda x, t: onepass.cross_entropy(x, t),
    "cross_entropy, sum": lambda x, t: onepass.cross_entropy(x, t, reduction="sum", softcap=9.0, logit_scale=0.5),
    "cross_entropy, every option": lambda x, t: onepass.cross_entropy(
        x, t, torch.linspace(0, 1, V, device=t.device), label_smoothing=0.1, z_loss_weight=0.1, temperature=2.0
    ),
    "cross_entropy, none": lambda x, t: onepass.cross_entropy(x, t, reduction="none", z_loss_weight=0.1),
    "cross_entropy, smooth": lambda x, t: onepass.cross_entropy(x, t, label_smoothing=0.2),
    "pair": lambda x, t: torch.stack(onepass.selective_log_softmax_and_entropy(x, t.abs() % V, softcap=9.0)),
    "pair, masked": lambda x, t: torch.stack(
        onepass.selective_log_softmax_and_entropy(x, t, row_mask=t != -100, temperature=0.7)
    ),
    "entropy": lambda x, t: onepass.entropy_from_logits(x, row_mask=(t != -100).int()),
    "topk_kl_div": lambda x, t: onepass.topk_kl_div(x, *teacher_tokens(t), temperature=2.0),
    "topk_kl_div, renormalized": lambda x, t: onepass.topk_kl_div(x, *teacher_tokens(t), renormalize=True),
    "distillation_loss": lambda x, t: onepass.distillation_loss(x, t, *teacher_tokens(t), temperature=2.0),
    "kl_div": lambda x, t: onepass.kl_div(x, teacher_logits(t), t != -100, reduction="mean"),
    "kl_div, none": lambda x, t: onepass.kl_div(x, teacher_logits(t), t != -100, reduction="none", vocab_size=V - 7),
    "kl_div, reverse": lambda x, t: onepass.kl_div(x, teacher_logits(t), direction="reverse", temperature=2.0),
    "jsd": lambda x, t: onepass.kl_div(x, teacher_logits(t), direction="jsd", softcap=5.0, num_items=3),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("loss", LOSSES)
def test_equals_the_loss_of_logits(device, tile, loss, dtype):
    hidden, weight, bias, target = batch(device, dtype)
    h, w, b = exact(hidden, weight, bias)
    expected = LOSSES[loss](F.linear(h, w, b), target)
    got = LOSSES[loss](onepass.LinearLogits(hidden, weight, bias), target)
    assert got.dtype == dtype
    assert_all_close([got.detach()], [expected.detach()], "loss")
    upstream = torch.rand(expected.shape, dtype=torch.float64).to(device) + 0.5
    assert_all_close(
        gradients((got * upstream).sum(), (hidden, weight, bias)), gradients((expected * upstream).sum(), (h, w, b))
    )
    with torch.no_grad():
        assert_all_close([LOSSES[loss](onepass.LinearLogits(hidden, weight, bias), target)], [expected], "no_grad")


@pytest.mark.parametrize("loss", ["cross_entropy, every option", "cross_entropy, none", "pair, masked", "kl_div"])
def test_masks_that_only_the_kernels_see_to(device, tile, monkeypatch, loss):
    """As while a CUDA graph is captured, when nobody can say how many rows are kept."""
    hidden, weight, bias, target = batch(device)
    expected = LOSSES[loss](onepass.LinearLogits(hidden, weight, bias), target)
    for module in (head_loss, head_statistics, tiles):
        monkeypatch.setattr(module, "defers", lambda row_mask: True)
    got = LOSSES[loss](onepass.LinearLogits(hidden, weight, bias), target)
    assert_all_close([got.detach()], [expected.detach()], "loss")
    parts = hidden, weight, bias
    assert_all_close(gradients(got.sum(), parts), gradients(expected.sum(), parts))


@pytest.mark.parametrize("many", [False, True], ids=["one index", "three indices"])
def test_statistics_and_their_gradients(device, tile, many):
    hidden, weight, bias, target = batch(device, rows=(3, 4))
    mask = target != -100
    index = target.clamp(min=0)
    index = torch.stack([index, (index + 5) % V, index], dim=-1) if many else index
    options = {"temperature": 0.7, "softcap": 9.0, "logit_scale": 1.5}
    weights = torch.linspace(-1, 1, V, device=device)
    metrics = ("is_top1", "log_sum_sq_probs", "mean_logit")
    s = onepass.linear_softmax_statistics(
        hidden, weight, index, bias=bias, row_mask=mask, class_weights=weights, metrics=metrics, **options
    )
    parts = exact(hidden, weight, bias)
    expected = statistics(F.linear(*parts), index, row_mask=mask, class_weights=weights.double(), **options)
    ours, theirs = 0.0, 0.0
    for i, name in enumerate(vars(s)):
        assert_close(getattr(s, name), expected[name].detach(), scale=60.0, name=name)
        if name in ("log_normalizer", "expected_logit", "selected", "weighted_logit"):
            ours, theirs = ours + (i + 1) * getattr(s, name).sum(), theirs + (i + 1) * expected[name].sum()
    assert_all_close(gradients(ours, (hidden, weight, bias)), gradients(theirs, parts))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none", "num_items"])
def test_a_policy_loss(device, tile, reduction):
    hidden, weight, bias, target = batch(device, rows=(2, 6))
    g = torch.Generator().manual_seed(1)
    advantages = torch.randn(target.shape, generator=g).to(device).requires_grad_()
    mask = target != -100
    with torch.no_grad():
        old = (
            onepass.linear_selective_log_softmax_and_entropy(hidden, weight, target, bias=bias, row_mask=mask)[0] + 0.1
        )
    options = {"num_items": 7} if reduction == "num_items" else {"reduction": reduction}
    got = onepass.linear_loss(hidden, weight, target, policy_loss, advantages, old, bias=bias, row_mask=mask, **options)
    h, w, b, a = exact(hidden, weight, bias, advantages)
    s = onepass.softmax_statistics(F.linear(h, w, b), target, row_mask=mask)
    rows = policy_loss(s, a, old.double()) * mask
    expected = {"mean": rows.sum() / mask.sum(), "sum": rows.sum(), "none": rows, "num_items": rows.sum() / 7}[
        reduction
    ]
    assert_all_close([got.detach()], [expected.detach()], "loss")
    assert_all_close(
        gradients((got * 3).sum(), (hidden, weight, bias, advantages)), gradients((expected * 3).sum(), (h, w, b, a))
    )


@pytest.mark.parametrize("direction", ["forward", "reverse", "jsd"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_teacher_with_a_head_of_its_own(device, tile, direction, reduction):
    hidden, weight, bias, target = batch(device)
    states, others, _, _ = batch(device, width=H + 4, seed=3)
    teacher = onepass.LinearLogits(states.detach(), others.detach())
    options = {"direction": direction, "reduction": reduction, "teacher_temperature": 2.0}
    got = onepass.linear_kl_div(hidden, weight, teacher, target != -100, bias=bias, **options)
    parts = exact(hidden, weight, bias)
    expected = onepass.kl_div(
        F.linear(*parts), F.linear(states.double(), others.double()).detach(), target != -100, **options
    )
    assert_all_close([got.detach()], [expected.detach()], "loss")
    assert_all_close(gradients(got.sum(), (hidden, weight, bias)), gradients(expected.sum(), parts))


def test_the_shorthands(device):
    hidden, weight, bias, target = batch(device)
    x = onepass.LinearLogits(hidden, weight, bias)
    ids, log_probs, mask = teacher_tokens(target)
    class_weights = torch.rand(V, device=device)
    module = onepass.LinearCrossEntropyLoss(class_weights, label_smoothing=0.1, reduction="sum")
    pairs = [
        (onepass.linear_topk_kl_div(hidden, weight, ids, log_probs, mask, bias=bias, direction="jsd"),
         onepass.topk_kl_div(x, ids, log_probs, mask, direction="jsd")),
        (module(hidden, weight, target, bias),
         onepass.cross_entropy(x, target, class_weights, label_smoothing=0.1, reduction="sum")),
        (onepass.linear_cross_entropy(hidden, weight, target), F.cross_entropy(F.linear(hidden, weight), target)),
    ]  # fmt: skip
    for got, expected in pairs:
        assert_all_close([got.detach()], [expected.detach()], "loss")
    assert "label_smoothing=0.1" in repr(module) and "class_weights" in module.state_dict()


# What is not needed costs nothing.


class Products(TorchDispatchMode):
    """Counts the multiplications of matrix products, and the rows of what has as many columns as logits."""

    def __init__(self):
        super().__init__()
        self.multiplications, self.rows = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            a, b = args[-2:]
            self.multiplications += a.shape[0] * a.shape[1] * b.shape[1]
        if isinstance(result, torch.Tensor) and result.dim() == 2 and V <= result.shape[1] < V + 16:
            self.rows = max(self.rows, result.shape[0])
        return result


@pytest.mark.parametrize("loss", ["cross_entropy", "pair, masked", "kl_div", "topk_kl_div"])
def test_rows_left_out_take_part_in_no_product(device, tile, loss):
    rows = 40
    hidden, weight, bias, target = batch(device, rows=(rows,))
    kept = int((target != -100).sum())
    assert kept < rows
    with Products() as products:
        gradients(LOSSES[loss](onepass.LinearLogits(hidden, weight, bias), target).sum(), (hidden, weight, bias))
    count = 4 if loss == "pair, masked" else 3
    assert products.multiplications == count * kept * H * V
    if tile < rows and loss != "kl_div":  # which makes its teacher here
        assert products.rows <= H < rows  # the logits never exist; H × V is the weight, turned


@pytest.mark.parametrize("frozen", ["weight", "hidden", "bias"])
@pytest.mark.parametrize("loss", ["cross_entropy", "pair", "kl_div, none"])
def test_what_is_frozen_has_no_product(device, frozen, loss):
    parts = dict(zip(("hidden", "weight", "bias"), batch(device)[:3]))
    target = batch(device)[3].abs() % V
    parts[frozen].requires_grad_(False)
    with Products() as products:
        LOSSES[loss](onepass.LinearLogits(**parts), target).sum().backward()
    reads = 1 if loss == "cross_entropy" else 2
    kept = (target != -100).sum()
    assert products.multiplications == (reads + 1 + (frozen == "bias")) * kept * H * V
    reference = dict(zip(parts, exact(*parts.values())))
    LOSSES[loss](F.linear(*reference.values()), target).sum().backward()
    for name, part in parts.items():
        if name == frozen:
            assert part.grad is None
        else:
            assert_all_close([part.grad], [reference[name].grad], name)


@pytest.mark.parametrize("rows", [(0,), (2, 0), (1,)])
@pytest.mark.parametrize("width, vocab", [(1, 1), (3, 2), (19, 5)])
def test_small_shapes(device, rows, width, vocab):
    hidden, weight, bias, _ = batch(device, rows=rows, width=width, vocab=vocab)
    target = torch.zeros(rows, dtype=torch.long, device=device)
    got = onepass.linear_cross_entropy(hidden, weight, target, bias=bias, reduction="sum")
    parts = exact(hidden, weight, bias)
    expected = F.cross_entropy(F.linear(*parts).view(-1, vocab), target.view(-1), reduction="sum")
    assert_all_close([got.detach()], [expected.detach()], "loss")
    assert_all_close(gradients(got, (hidden, weight, bias)), gradients(expected, parts))


def test_all_rows_ignored(device):
    hidden, weight, bias, target = batch(device)
    target[:] = -100
    assert onepass.linear_cross_entropy(hidden, weight, target, bias=bias).isnan()  # as in torch
    total = onepass.linear_cross_entropy(hidden, weight, target, bias=bias, reduction="sum")
    assert total == 0
    for gradient, part in zip(gradients(total, (hidden, weight, bias)), (hidden, weight, bias)):
        assert gradient.shape == part.shape and (gradient == 0).all()


def test_any_layout(device):
    hidden, weight, bias, target = batch(device, rows=(3, 5))
    h, w, b = exact(hidden, weight, bias)
    columns = weight.detach().t().contiguous().t().requires_grad_()
    got = onepass.linear_cross_entropy(hidden[:, :-1], columns, target[:, 1:], bias=bias)
    expected = F.cross_entropy(F.linear(h[:, :-1], w, b).flatten(0, 1), target[:, 1:].flatten())
    assert_all_close(gradients(got, (hidden, columns, bias)), gradients(expected, (h, w, b)))


# Precision.


def skip_interpreter(device):
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("the interpreter does not round to the nearest bfloat16")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("loss", ["cross_entropy", "pair", "kl_div"])
def test_no_further_from_float64_than_torch(device, monkeypatch, dtype, loss):
    """Gradients, of one tile and of many, against torch's own path in the same dtype."""
    skip_interpreter(device)
    hidden, weight, bias, target = batch(device, dtype, rows=(512,), width=64)
    parts = exact(hidden, weight, bias)
    expected = gradients(LOSSES[loss](F.linear(*parts), target).sum(), parts)
    x = F.linear(hidden, weight, bias).float()
    eager = {
        "cross_entropy": lambda: F.cross_entropy(x, target),
        "pair": lambda: torch.stack(log_softmax_and_entropy(9.0 * torch.tanh(x / 9.0), target.abs() % V)).sum(),
        "kl_div": lambda: torch_kl(x, teacher_logits(target), target != -100),
    }[loss]()
    theirs = gradients(eager, (hidden, weight, bias))
    for rows in (1000, 7):
        tiles_of(monkeypatch, rows)
        got = gradients(LOSSES[loss](onepass.LinearLogits(hidden, weight, bias), target).sum(), (hidden, weight, bias))
        for name, g, t, e in zip(("hidden", "weight", "bias"), got, theirs, expected):
            assert g.dtype == dtype
            ours, torchs = ((x.double() - e).norm().item() for x in (g, t))
            assert ours <= 1.05 * torchs, (name, rows, ours, torchs)


def log_softmax_and_entropy(x, target):
    log_p = x.log_softmax(-1)
    return log_p.gather(-1, target.unsqueeze(-1)).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


def torch_kl(x, teacher, kept):
    rows = F.kl_div(x.log_softmax(-1), teacher.log_softmax(-1), reduction="none", log_target=True).sum(-1)
    return (rows * kept).sum() / kept.sum()


def test_a_loss_scale_keeps_float16_gradients(device):
    """Gradients of a mean over many rows vanish in float16 unless the scale of the loss meets them first."""
    hidden, weight, _, _ = batch(device, torch.float16, rows=(64,))
    target = torch.zeros(64, dtype=torch.long, device=device)
    loss = onepass.linear_loss(hidden, weight, target, lambda s: -s.log_probs, num_items=2.0**20, bias=None)
    got = gradients(loss * 2.0**16, (hidden, weight))
    parts = exact(hidden, weight)
    expected = gradients(F.cross_entropy(F.linear(*parts), target, reduction="sum") / 16, parts)
    for g, e in zip(got, expected):
        assert (g.double() - e).norm() <= 2e-3 * e.norm()


def test_autocast(device, tile):
    """Products in bfloat16, parameters and their gradients in float32, which is where the sums stay."""
    skip_interpreter(device)
    hidden, weight, bias, target = batch(device, rows=(40,))
    with torch.autocast(device.type, torch.bfloat16):
        got = onepass.linear_cross_entropy(hidden, weight, target, bias=bias)
        expected = F.cross_entropy(F.linear(hidden, weight, bias).float(), target)
    ours, theirs = (gradients(loss, (hidden, weight, bias)) for loss in (got, expected))
    parts = exact(hidden, weight, bias)
    best = gradients(F.cross_entropy(F.linear(*parts), target), parts)
    for g, t, e in zip(ours, theirs, best):
        assert g.dtype == torch.float32
        assert (g.double() - e).norm() <= 1.05 * (t.double() - e).norm()


HARD = {
    "a masked half of the vocabulary": lambda h, w, b: (h, w, b.index_fill(0, torch.arange(V // 2), -float("inf"))),
    "magnitudes of 1e4": lambda h, w, b: (h * 1e2, w * 1e2, b),
    "a row of NaN": lambda h, w, b: (h.index_fill(0, torch.tensor([1]), float("nan")), w, b),
    "a row of infinities": lambda h, w, b: (h.index_fill(0, torch.tensor([1]), float("inf")), w.abs(), b),
    "zeros": lambda h, w, b: (h * 0, w, b * 0),
}


@pytest.mark.parametrize("inputs", HARD)
def test_hard_inputs(device, tile, inputs):
    hidden, weight, bias, target = batch("cpu")
    hard = [x.detach().to(device).requires_grad_() for x in HARD[inputs](hidden, weight, bias)]
    target = target.to(device) % V  # of the upper half where the lower is masked
    target = torch.where(target < V // 2, target + V // 2, target)
    got = onepass.linear_selective_log_softmax_and_entropy(hard[0], hard[1], target, bias=hard[2])
    with torch.no_grad():
        logits = F.linear(*(x.double() for x in hard))
    expected = statistics(logits, target)
    for value, name in zip(got, ("log_probs", "entropy")):
        assert_close(value.detach(), expected[name], scale=1e4 if "1e4" in inputs else 10.0, name=name)
    if "row" in inputs:  # the other rows' hidden states still have their gradients
        (gradient,) = gradients(sum(o.sum() for o in got), hard[:1])
        assert gradient[1].isnan().any() and gradient[[0, 2]].isfinite().all()
    else:
        parts = exact(*hard)
        theirs = onepass.selective_log_softmax_and_entropy(F.linear(*parts), target)
        ours = gradients(sum(o.sum() for o in got), hard)
        for g, e in zip(ours, gradients(sum(o.sum() for o in theirs), parts)):
            assert (g.double() - e).norm() <= 1e-3 * (e.norm() + 1e-3)


def test_an_index_outside_the_vocabulary(device, raises_index_error):
    hidden, weight, _, target = batch(device)
    target[5] = V
    if raises_index_error:
        with pytest.raises(IndexError, match=rf"target: expected values in \[0, {V}\), got {V} in row 5"):
            onepass.linear_cross_entropy(hidden, weight, target)
        with pytest.raises(IndexError, match="index: expected"):
            onepass.linear_softmax_statistics(hidden, weight, target, row_mask=target != -100)
    else:
        loss = onepass.linear_cross_entropy(hidden, weight, target, reduction="none")
        assert loss[5].isnan() and loss[[0, 1, 2, 3, 4, 6]].isfinite().all()


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


def test_sharded_weights_are_gathered_once():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    hidden, weight, bias, target = batch("cpu")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        sharded = distribute_tensor(weight.detach(), mesh, [Shard(0)]).requires_grad_()
        loss = onepass.linear_cross_entropy(hidden, sharded, target, bias=bias)
        loss.backward()
        expected = gradients(onepass.linear_cross_entropy(hidden, weight, target, bias=bias), (weight,))
        assert isinstance(sharded.grad, DTensor) and sharded.grad.placements == (Shard(0),)
        assert_all_close([sharded.grad.full_tensor()], expected)
    finally:
        torch.distributed.destroy_process_group()


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
        return onepass.linear_kl_div(hidden, weight, teacher, target != -100, bias=bias, reduction=reduction).sum()
    return LOSSES[loss](onepass.LinearLogits(hidden, weight, bias), target).sum()


@pytest.mark.parametrize("loss", TRACED)
def test_compile_without_graph_breaks(device, loss):
    torch._dynamo.reset()
    *parts, target = batch(device)
    backend = "inductor" if device.type == "cuda" else "aot_eager"
    compiled = torch.compile(traced, fullgraph=True, backend=backend)
    expected, got = traced(loss, *parts, target), compiled(loss, *parts, target)
    assert_all_close([got.detach()], [expected.detach()], "loss")
    assert_all_close(gradients(got, parts), gradients(expected, parts))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_operations_are_well_formed(device, dtype):
    hidden, weight, bias, target = (x.detach() for x in batch(device, dtype))
    options = Options(
        "selected log_normalizer expected_logit entropy weighted_logit kept shift is_top1 log_sum_sq_probs "
        "tempered_log_normalizer mean_logit"
    )
    arguments = (hidden, weight, bias, target % V, target != -100, None)
    settings = (dtype, None, *options)
    torch.library.opcheck(torch.ops.onepass.linear_statistics.default, (*arguments, *settings))
    packed, _, _ = torch.ops.onepass.linear_statistics(*arguments, *settings)
    row = torch.randn_like(packed[0])
    upstream = (packed, row, row, row, row, row)
    for needed in ((True, True, True), (False, True, False)):
        torch.library.opcheck(
            torch.ops.onepass.linear_gradient.default, (*arguments, *upstream, list(needed), *settings)
        )


@pytest.mark.parametrize("own_head", [False, True], ids=["logits", "a head"])
def test_divergences_are_well_formed(device, own_head):
    hidden, weight, bias, target = (x.detach() for x in batch(device, torch.bfloat16))
    teacher = (hidden[:, :7], weight[:, :7], None) if own_head else (teacher_logits(target), None, None)
    kinds = torch.bfloat16, teacher[0].dtype
    settings = (V - 3, *kinds, None, *PairOptions("jsd", 0.3, softcap=5.0))
    tensors = (hidden, weight, bias, *teacher, target != -100)
    torch.library.opcheck(torch.ops.onepass.linear_divergence.default, (*tensors, *settings))
    grad = torch.rand(N, device=device)
    for needed in ((True, True, True), (False, True, False)):
        arguments = (*tensors, grad, list(needed), *settings)
        torch.library.opcheck(torch.ops.onepass.linear_divergence_gradient.default, arguments)


def test_inference_mode_and_checkpointing(device):
    hidden, weight, bias, target = batch(device)
    call = lambda h: onepass.linear_cross_entropy(h, weight, target, bias=bias)  # noqa: E731
    with torch.inference_mode():
        value = call(hidden)
    loss = checkpoint(call, hidden, use_reentrant=False)
    assert_all_close([value], [loss.detach()], "loss")
    assert_all_close(gradients(loss, (hidden, weight)), gradients(call(hidden), (hidden, weight)))


@pytest.mark.gpu
def test_cuda_graph():
    hidden, weight, bias, target = batch("cuda", rows=(64,), width=64, vocab=1000)
    static = [hidden.detach().requires_grad_(), weight, bias]

    def step():
        for p in static:
            p.grad = None
        onepass.linear_cross_entropy(static[0], weight, target, bias=bias).backward()

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for seed in (1, 2):
        others = batch("cuda", rows=(64,), width=64, vocab=1000, seed=seed)
        static[0].data.copy_(others[0])
        target.copy_(others[3])
        graph.replay()
        parts = exact(*static)
        expected = gradients(F.cross_entropy(F.linear(*parts), target), parts)
        assert_all_close([p.grad for p in static], expected)


# Memory.

SHAPES = [(1, 64, 50257), (300, 64, 50257), (1000, 127, 5003), (4096, 256, 1000), (64, 1024, 32000), (777, 65, 151936)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
def test_plans_keep_to_the_memory(shape, trained):
    rows, width, vocab = shape
    with torch.device("meta"):
        head = Head(torch.empty(rows, width, dtype=torch.bfloat16), torch.empty(vocab, width, dtype=torch.bfloat16),
                    None, torch.bfloat16)  # fmt: skip
    for megabytes in (40, 100, 400, 4000):
        total = 4 * vocab * width * trained
        try:
            cut = plan([head], None, trained, megabytes * 10**6)
        except ValueError as error:
            assert "max_memory: expected at least" in str(error)
            least = int(str(error).split()[4])
            assert least > megabytes * 10**6 and plan([head], None, trained, least).rows == 1
            continue
        several = cut.rows < rows
        assert cut.rows * (head.padded_vocab * 2) + total * several <= megabytes * 10**6
        assert sum(r.n for r in cut.cut()) == rows
        if several:  # tiles are as large as they may be, or as equal tiles of whole blocks are
            assert -(-rows // cut.rows) <= 2 * -(
                -rows * (head.padded_vocab * 2 + 576) // (megabytes * 10**6 - total - 2**17)
            )


@pytest.mark.parametrize("shape", [(300, 64, 5003), (64, 256, 32000)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("loss", ["cross_entropy", "pair", "kl_div"])
def test_max_memory_is_kept_on_a_cpu(monkeypatch, shape, dtype, loss):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    rows, width, vocab = shape
    hidden, weight, _, target = batch("cpu", dtype, (rows,), width, vocab)
    target = target.abs() % vocab
    least = 2**26 + 2**18 + 8 * vocab * width * (dtype == torch.bfloat16)
    for max_memory in (least + 2**21, least + 2**25, None):
        x = onepass.LinearLogits(hidden, weight, max_memory=max_memory)

        def step(x=x):
            hidden.grad = weight.grad = None
            step_of(loss, x, target)

        step()
        peak = peak_memory(step, torch.device("cpu"))  # before or after there are gradients
        assert peak <= (max_memory or 2**27) + hidden.nbytes + weight.nbytes, (peak, max_memory)


def step_of(loss, x, target):
    if loss == "kl_div":
        onepass.kl_div(x, onepass.LinearLogits(x.hidden.detach(), x.weight.detach())).backward()
    elif loss == "pair":
        torch.stack(onepass.selective_log_softmax_and_entropy(x, target)).sum().backward()
    else:
        onepass.cross_entropy(x, target).backward()


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
@pytest.mark.parametrize("loss", ["cross_entropy", "pair", "kl_div", "masked"])
def test_max_memory_is_kept(shape, trained, loss):
    rows, width, vocab = shape
    hidden, weight, _, target = batch("cuda", torch.bfloat16, (rows,), width, vocab)
    target = target.abs() % vocab
    if loss == "masked":
        target[::2] = -100
    weight.requires_grad_(trained)
    least = 4 * vocab * width * trained
    for max_memory in (least + 3 * 2**20, least + 40 * 2**20, least + 400 * 2**20, None):
        x = onepass.LinearLogits(hidden, weight, max_memory=max_memory)

        def step(x=x):
            step_of(loss, x, target)

        step()  # compiles, and makes the products' own workspace
        hidden.grad = weight.grad = None
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        gradient_bytes = sum(p.grad.numel() * 2 for p in (hidden, weight) if p.grad is not None)
        extra = torch.cuda.max_memory_allocated() - before - gradient_bytes
        hidden.grad = weight.grad = None
        assert extra <= (max_memory or 2**32), (extra, max_memory)


@pytest.mark.gpu
def test_our_own_choice_fits_what_is_free():
    """Where little is left the tiles get smaller: here the default workspace alone would be more than there is."""
    vocab = 151936
    hidden, weight, _, target = batch("cuda", torch.bfloat16, (8192,), 512, vocab)
    target = target.abs() % vocab
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(hidden.device).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 1.6 * 2**30) / total)
    try:
        loss = onepass.linear_cross_entropy(hidden, weight, target)
        loss.backward()
        assert loss.isfinite()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


# What is refused.


def test_one_backward(device):
    hidden, weight, bias, target = batch(device)
    loss = onepass.linear_cross_entropy(hidden, weight, target, bias=bias)
    gradients_of = lambda: torch.autograd.grad(loss, hidden, retain_graph=True)  # noqa: E731
    gradients_of()
    with pytest.raises(RuntimeError, match="reduction='none'"):
        gradients_of()
    rows = onepass.linear_cross_entropy(hidden, weight, target, bias=bias, reduction="none").sum()
    first, second = (torch.autograd.grad(rows, hidden, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    with pytest.raises(RuntimeError, match="second derivatives"):
        torch.autograd.grad(rows, hidden, create_graph=True)


LEARNED = torch.ones(1, requires_grad=True)
BAD_FUNCTIONS = {
    "a sum": (lambda s: s.log_probs.sum(), "loss_fn: expected a loss of every row"),
    "no tensor": (lambda s: 1.0, r"loss_fn: expected a loss of every row, shape \(11,\), got float"),
    "a closure": (lambda s: s.log_probs * LEARNED, "among row_inputs"),
    "coupled rows": (lambda s: s.log_probs - s.log_probs.mean(), "loss of each row alone"),
}


@pytest.mark.parametrize("function", BAD_FUNCTIONS)
def test_loss_functions_that_cannot_be(function):
    hidden, weight, _, target = batch("cpu")
    loss_fn, message = BAD_FUNCTIONS[function]
    with pytest.raises(ValueError, match=message):
        onepass.linear_loss(hidden, weight, target % V, loss_fn)


def linear(**changes):
    hidden, weight, bias, _ = batch("cpu")
    return onepass.LinearLogits(**({"hidden": hidden, "weight": weight, "bias": bias} | changes))


BAD_ARGUMENTS = {
    "hidden: expected a floating-point tensor, got torch.int64": lambda: linear(hidden=torch.ones(2, H).long()),
    "weight: expected a floating-point tensor, got None": lambda: linear(weight=None),
    r"weight: expected shape \(V, H\) for hidden states \(..., H\), got \(83, 18\)": lambda: linear(
        weight=torch.ones(V, H - 1)
    ),
    r"bias: expected shape \(83,\), got \(82,\)": lambda: linear(bias=torch.ones(V - 1)),
    "weight: expected torch.float32, the dtype of hidden, got torch.bfloat16": lambda: linear(
        weight=torch.ones(V, H, dtype=torch.bfloat16)
    ),
    "max_memory: expected a number of bytes or None, got 1.5": lambda: linear(max_memory=1.5),
    "max_memory: expected at least [0-9]+ bytes": lambda: onepass.entropy_from_logits(linear(max_memory=1000)),
    "row_inputs: expected tensors, got 3": lambda: onepass.linear_loss(*batch("cpu")[:2], None, policy_loss, 3),
    r"row_inputs: expected shapes \(11, '...'\), got \(4,\)": lambda: onepass.linear_loss(
        *batch("cpu")[:2], None, policy_loss, torch.ones(4)
    ),
    r"row_mask: expected shape \(11,\), got \(3,\)": lambda: onepass.entropy_from_logits(
        linear(), row_mask=torch.ones(3, dtype=torch.bool)
    ),
    "temperature: expected a finite number above 0": lambda: onepass.entropy_from_logits(linear(), temperature=0.0),
    "inplace_backward: expected a tensor of logits": lambda: onepass.entropy_from_logits(
        linear(), inplace_backward=True
    ),
    "inplace_backward: expected a tensor of logits, got LinearLogits": lambda: onepass.cross_entropy(
        linear(), torch.zeros(N, dtype=torch.long), inplace_backward=True
    ),
    "teacher_logits: expected no gradient": lambda: onepass.kl_div(linear(), linear()),
    "teacher_logits: expected a tensor": lambda: onepass.kl_div(torch.ones(N, V), linear()),
    "num_items: expected None": lambda: onepass.linear_loss(
        *batch("cpu")[:2], None, policy_loss, reduction="none", num_items=3
    ),
}


@pytest.mark.parametrize("message", BAD_ARGUMENTS)
def test_one_clear_error(message):
    with pytest.raises((TypeError, ValueError), match=message):
        BAD_ARGUMENTS[message]()
