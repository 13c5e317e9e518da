"""What torch builds on: torch.compile, fake tensors, export, autocast, inference mode, checkpointing, CUDA graphs;
memory and synchronisation."""

import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import onepass
from definition import assert_close, assert_gradient_close
from onepass.core.dispatch import flatten_arguments
from onepass.core.options import FieldGradients, Inputs, Options, PairOptions, PairRows, Transform, empty_results
from onepass.reference.softmax import BLOCK_ELEMENTS
from paths import captured, interpreted

ALL = {
    "cross_entropy": lambda x, t: onepass.cross_entropy(x, t),
    "cross_entropy, every option": lambda x, t: onepass.cross_entropy(
        x,
        t,
        class_weights=torch.linspace(0, 1, x.shape[-1], device=x.device),
        label_smoothing=0.1,
        z_loss_weight=0.1,
        softcap=9.0,
    ),
    "log_probs": lambda x, t: onepass.selective_log_softmax(x, t, temperature=0.7, row_mask=t != 3).sum(),
    "entropy": lambda x, t: onepass.entropy_from_logits(x).sum(),
    "pair": lambda x, t: sum(o.sum() for o in onepass.selective_log_softmax_and_entropy(x, t)),
    "statistics": lambda x, t: own_loss(x, t),
    "topk_kl_div": lambda x, t: onepass.topk_kl_div(x, *teacher(x, t), row_mask=t != 3, direction="jsd"),
    "topk_kl_div, renormalized": lambda x, t: onepass.topk_kl_div(x, *teacher(x, t), row_mask=t != 3, renormalize=True),
    "distillation_loss": lambda x, t: onepass.distillation_loss(
        x, t, *teacher(x, t), row_mask=t != 3, temperature=2.0, num_items=7
    ),
    "kl_div": lambda x, t: onepass.kl_div(x, x.detach(), row_mask=t != 3, teacher_temperature=2.0),
    "jsd": lambda x, t: onepass.kl_div(x, x.detach(), direction="jsd", teacher_softcap=9.0),
}


def teacher(x, t):
    """Ids and log-probs of two tokens a row."""
    ids = torch.stack([t, (t + 1) % x.shape[-1]], dim=-1)
    return ids, -0.5 - torch.arange(2, device=x.device).expand_as(ids)


def own_loss(x, t):
    s = onepass.softmax_statistics(x, t, class_weights=0.5, metrics=("is_top1", "log_sum_sq_probs", "mean_logit"))
    weight = s.is_top1 + s.log_sum_sq_probs.exp() + s.mean_logit
    return (weight * s.log_probs + s.entropy + s.weighted_logit + s.logsumexp**2).sum()


def example(device, dtype=torch.float32, rows=8, vocab=515):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, vocab, generator=generator).to(dtype).to(device)
    return logits.requires_grad_(), torch.randint(vocab, (rows,), generator=generator).to(device)


@pytest.mark.parametrize("loss", ALL)
@pytest.mark.parametrize(
    "dynamic", [False, pytest.param(True, marks=pytest.mark.exhaustive)], ids=["static", "dynamic"]
)
def test_compile_without_graph_breaks(dynamo, device, loss, dynamic):
    few = loss in ("cross_entropy", "topk_kl_div", "jsd")  # test_14 of test_defects_under_torch has all, dynamic
    if (dynamic and not few and device.type == "cpu") or (interpreted(device) and (dynamic or not few)):
        pytest.skip("what is compiled is the same on both backends")
    x, t = example(device)
    backend = "inductor" if device.type == "cuda" else "aot_eager"  # inductor wants a C++ compiler on a CPU
    compiled = torch.compile(ALL[loss], fullgraph=True, backend=backend, dynamic=dynamic)
    for rows in (8, 5) if dynamic else (8,):
        expected, got = ALL[loss](x[:rows], t[:rows]), compiled(x[:rows], t[:rows])
        assert_close(got.detach(), expected.detach().double(), scale=10.0)
        (exact,), (gradient,) = torch.autograd.grad(expected, x), torch.autograd.grad(got, x)
        assert_gradient_close(gradient, exact.double(), upstream=10.0)


# Fields that are not asked for are not written, and what they hold is not the same from call to call.
EVERY_FIELD = (
    "shift log_normalizer expected_logit entropy weighted_logit log_sum_sq_probs mean_logit "
    "tempered_log_normalizer selected is_top1"
)


def test_an_option_may_be_a_symbolic_bool(dynamo, eager):
    """Dynamo traces what is compared with a symbolic number neither as True nor as False."""
    x, target = torch.randn(6, 16), torch.randint(16, (6,))

    def losses(x, n):
        sums = onepass.moe.route(x, 3, losses=n > 0).prob_sums
        return sums.sum() + onepass.cross_entropy(x, target, gradient_in_forward=n > 5)

    compiled = torch.compile(losses, backend="eager", dynamic=True, fullgraph=True)
    torch.testing.assert_close(compiled(x, 2), losses(x, 2))


@pytest.mark.parametrize("many", [(), (3,)], ids=["one index", "three indices"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_operations_are_well_formed(device, dtype, many):
    x, _ = example(device, dtype, rows=3, vocab=9)
    x = x.detach()
    index = torch.randint(9, (3, *many), device=device)
    mask = torch.tensor([True, False, True], device=device)
    weights = torch.rand(9, device=device)
    inputs, options = (
        Inputs(index, mask, weights, torch.rand(3, device=device) + 0.5),
        Options(EVERY_FIELD, Transform(softcap=5.0)),
    )
    arguments = tuple(flatten_arguments((x, inputs, options)))
    torch.library.opcheck(torch.ops.onepass.softmax_statistics.default, arguments)
    packed, selected, _ = torch.ops.onepass.softmax_statistics(*arguments)
    row = torch.randn_like(packed[0])
    upstream = FieldGradients(row, row, row, row, torch.randn_like(selected))
    arguments = tuple(flatten_arguments((x, inputs, packed, upstream, 9, options)))
    torch.library.opcheck(torch.ops.onepass.softmax_gradient.default, arguments)


@pytest.mark.pairs
@pytest.mark.parametrize("direction", ["forward", "reverse", "jsd"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_divergences_are_well_formed(device, dtype, direction):
    x, y = (torch.randn(3, 9).to(dtype).to(device) for _ in range(2))
    mask = torch.tensor([True, False, True], device=device)
    read = PairRows(mask, None, torch.rand(3, device=device) + 0.5)
    options = PairOptions(direction, 0.3, Transform(softcap=5.0), Transform(temperature=2.0), columns=7)
    arguments = tuple(flatten_arguments((x, y, read, options)))
    torch.library.opcheck(torch.ops.onepass.divergence.default, arguments)
    packed = torch.ops.onepass.divergence(*arguments)
    for needed in ([True, True], [False, True]):
        arguments = tuple(flatten_arguments((x, y, read, packed, torch.randn_like(packed[0]), needed, options)))
        torch.library.opcheck(torch.ops.onepass.divergence_gradient.default, arguments)


def test_fake_tensors():
    with FakeTensorMode():
        x = torch.empty(2, 5, 100, dtype=torch.bfloat16, requires_grad=True)
        t = torch.empty(2, 5, dtype=torch.int64)
        log_p, entropy = onepass.selective_log_softmax_and_entropy(x, t)
        assert log_p.shape == entropy.shape == (2, 5) and log_p.dtype == torch.float32
        (gradient,) = torch.autograd.grad(log_p.sum() + entropy.sum(), x)
        assert gradient.shape == x.shape and gradient.dtype == torch.bfloat16


def test_export():
    class Model(torch.nn.Module):
        def forward(self, x, t):
            return onepass.selective_log_softmax(x, t)

    x, t = example(torch.device("cpu"))
    program = torch.export.export(Model(), (x.detach(), t))
    assert torch.equal(program.module()(x.detach(), t), onepass.selective_log_softmax(x, t))


def gradient_of(loss, x):
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        return torch.autograd.grad(loss(x).square().sum(), x)[0]


def mixture(x, t):
    h = x[:, :16]
    routing = onepass.moe.route(x[:, :8], 2)
    weights = torch.linspace(-1, 1, 8 * 24 * 16, device=x.device).view(8, 24, 16)
    return onepass.moe.expert_mlp(h, routing, weights, weights.view(8, 2, 12, 16)[:, 1].mT.contiguous())


TRACED = ALL | {
    "route": lambda x, t: onepass.moe.route(x, 2).weights,
    "sums of route": lambda x, t: onepass.moe.route(x, 2, losses=True).prob_sums,
    "experts": mixture,
    "linear_cross_entropy": lambda x, t: onepass.linear_cross_entropy(x, x.detach()[:6].sin(), t % 6),
    "linear_kl_div": lambda x, t: onepass.linear_kl_div(x, x.detach()[:6].sin(), x.detach()[:, :6].cos()),
    "gradient of kl_div": lambda x, t: gradient_of(lambda x: onepass.kl_div(x, x.detach().sin()), x),
    "gradient of experts": lambda x, t: gradient_of(lambda x: mixture(x, t), x),
    "linear_selective_log_softmax_and_entropy": lambda x, t: sum(
        onepass.linear_selective_log_softmax_and_entropy(x, x.detach()[:6].sin(), t % 6)
    ),
}


@pytest.mark.filterwarnings("ignore:::torch.jit", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("loss", TRACED)
def test_a_trace_computes_again(device, loss, trained):
    """`torch.jit.trace` does not see what kernels compute, except in registered operations."""
    if device.type == "cuda" and loss.startswith("gradient of"):
        pytest.skip(
            "the backward of a GPU's tensors runs in another thread, which no trace sees, with torch's losses too"
        )
    x, t = example(device, rows=8, vocab=40)
    x = x.requires_grad_(trained)
    traced = torch.jit.trace(TRACED[loss], (x, t), check_trace=False)
    other, t = (x.detach().flip(0) * 2 + 1).requires_grad_(trained), t.flip(0)
    torch.testing.assert_close(traced(other, t), TRACED[loss](other, t))


def test_autocast_changes_nothing(device):
    x, t = example(device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        got = onepass.cross_entropy(x, t)
        (gradient,) = torch.autograd.grad(got, x)
    expected = onepass.cross_entropy(x, t)
    assert got.dtype == torch.float32 and torch.equal(got, expected)
    assert torch.equal(gradient, torch.autograd.grad(expected, x)[0])


def test_without_gradients(device):
    x, t = example(device)
    expected = onepass.cross_entropy(x, t)
    with torch.no_grad():
        got = onepass.cross_entropy(x, t)
        assert not got.requires_grad and torch.equal(got, expected)
    with torch.inference_mode():
        assert torch.equal(onepass.cross_entropy(x.clone(), t), expected)


@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
def test_activation_checkpointing(device, reentrant):
    x, t = example(device)
    head = lambda x: onepass.cross_entropy(x * 2, t)  # noqa: E731
    (expected,) = torch.autograd.grad(head(x), x)
    checkpoint(head, x, use_reentrant=reentrant).backward()
    assert torch.equal(x.grad, expected)


class Largest(TorchDispatchMode):
    """The size of the largest tensor that any operation made, views of ``known`` aside."""

    def __init__(self, known):
        super().__init__()
        self.known, self.numel = known.untyped_storage().data_ptr(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() != self.known:
                self.numel = max(self.numel, tensor.untyped_storage().nbytes() // tensor.element_size())
        return out


def test_the_cpu_path_keeps_no_second_copy_of_the_logits(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    x = torch.randn(40, 2, 100_000).transpose(0, 1)  # 8M elements whose rows do not merge
    with Largest(x) as largest:
        onepass.selective_log_softmax_and_entropy(x, torch.zeros(2, 40, dtype=torch.int64))
    assert largest.numel <= BLOCK_ELEMENTS < x.numel() // 4


class Exponentials(TorchDispatchMode):
    """Counts the exponentials that are computed."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        aten = torch.ops.aten
        if func.overloadpacket in (aten.exp, aten.exp_, aten._softmax, aten.softmax):
            self.count += args[0].numel()
        return func(*args, **(kwargs or {}))


def test_the_cpu_path_takes_one_exponential_for_loss_and_gradient(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    hidden, weight = torch.randn(20, 8, requires_grad=True), torch.randn(1000, 8, requires_grad=True)
    with Exponentials() as exponentials:
        onepass.linear_cross_entropy(hidden, weight, torch.arange(20)).backward()
    assert 20 * 1000 <= exponentials.count < 1.1 * 20 * 1000


@pytest.mark.gpu
@pytest.mark.parametrize("loss", ALL)
def test_extra_memory(loss):
    rows, vocab = 2048, 32000
    x, t = example(torch.device("cuda"), torch.bfloat16, rows, vocab)
    x = x.detach().requires_grad_()
    size = x.numel() * x.element_size()
    ALL[loss](x, t).backward()
    x.grad = None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = ALL[loss](x, t)
    forward = torch.cuda.max_memory_allocated() - before
    few = 256 * rows + 8 * vocab + 4096
    assert forward <= few, forward
    result.backward()
    granularity = 2**21  # of torch's allocator
    assert torch.cuda.max_memory_allocated() - before <= size + granularity + few


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [4, 2048])
@pytest.mark.parametrize("loss", [name for name in ALL if name != "cross_entropy, every option"])
def test_never_synchronises(loss, rows):
    x, t = example(torch.device("cuda"), torch.bfloat16, rows, 32000)
    x = x.detach().requires_grad_()
    ALL[loss](x, t).backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        ALL[loss](x, t).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert x.grad.isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [4, 2048])
@pytest.mark.parametrize("loss", ALL)
def test_cuda_graph(loss, rows):
    x, t = example(torch.device("cuda"), torch.bfloat16, rows, 32000)
    x = x.detach().requires_grad_()

    def step():
        x.grad = None
        result = ALL[loss](x, t)
        result.backward()
        return result

    graph, result = captured(step)
    for seed in range(3):
        torch.manual_seed(seed)
        with torch.no_grad():
            x.normal_()
            t.random_(32000)
        graph.replay()
        other = x.detach().clone().requires_grad_()
        expected = ALL[loss](other, t)
        expected.backward()
        assert torch.equal(result, expected) and torch.equal(x.grad, other.grad)


@pytest.mark.gpu
def test_a_launch_goes_to_the_device_of_the_logits():
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    x, t = example(torch.device("cuda:1"))
    loss = onepass.cross_entropy(x, t)
    loss.backward()
    assert loss.device == x.grad.device == x.device and x.grad.isfinite().all()


def test_results_are_described_before_they_are_computed(device):
    """The fake implementation and the real one give the same shapes, dtypes and strides."""
    x, t = example(device)
    options = Options("shift log_normalizer log_probs is_top1")
    described = empty_results(x, t, options)
    real = torch.ops.onepass.softmax_statistics(*flatten_arguments((x.detach(), Inputs(t), options)))
    assert [(r.shape, r.dtype, r.stride()) for r in real] == [(e.shape, e.dtype, e.stride()) for e in described]


def test_import_brings_torch_and_triton_alone():
    code = "import onepass, sys; print(*(m for m in sys.modules if '.' not in m))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = done.stdout.split()
    assert done.stderr == ""
    assert "onepass" in modules
    libraries = {"transformers", "trl", "peft", "datasets", "axolotl", "tokenizers", "pandas"}
    assert not (libraries | {"matplotlib", "typer", "rich"}) & set(modules)
