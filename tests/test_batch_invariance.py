"""The batch-invariant mode: the results and gradients of a row, bit by bit, beside any other rows."""

import os
from importlib import import_module
from pkgutil import iter_modules

import numpy as np
import pytest
import torch

import forks
import onepass
from onepass import moe
from onepass.core import invariance
from onepass.core.invariance import is_batch_invariant
from onepass.logits.head import Head, HeadTensors, Settings
from onepass.logits.tile_plan import Use, plan
from paths import interpreted

ELEMENTWISE = (
    "softmax_gradient_kernel",
    "divergence_gradient_kernel",
    "scale_kernel",
    "row_weight_kernel",
    "row_average_kernel",
)
DTYPES = (torch.float32, torch.bfloat16)
FIELDS = {"metrics": ("is_top1", "log_sum_sq_probs", "mean_logit")}


@pytest.fixture(autouse=True)
def mode(monkeypatch):
    monkeypatch.setattr(invariance, "_enabled", True)


def statistics(x, t, teacher):
    s = onepass.softmax_statistics(x, t, class_weights=torch.linspace(0, 1, x.shape[-1], device=x.device), **FIELDS)
    return [f for f in vars(s).values() if isinstance(f, torch.Tensor)]


def topk(x, t, teacher):
    ids = torch.stack([t, (t + 5) % x.shape[-1]], -1)
    return [onepass.topk_kl_div(x, ids, ids * 0.0 - 1, reduction="none")]


def divergence(direction):
    return lambda x, t, teacher: [onepass.kl_div(x, teacher, direction=direction, reduction="none", temperature=0.7)]


LOSSES = {
    "cross-entropy": lambda x, t, teacher: [onepass.cross_entropy(x, t, reduction="none", z_loss_weight=0.1)],
    "smooth": lambda x, t, teacher: [onepass.cross_entropy(x, t, reduction="none", label_smoothing=0.1, softcap=9.0)],
    "log-probs and entropy": lambda x, t, teacher: onepass.selective_log_softmax_and_entropy(x, t),
    "log-probs of ids": lambda x, t, teacher: [onepass.selective_log_softmax(x, torch.stack([t, t // 2, t], -1))],
    "statistics": statistics,
    "forward": divergence("forward"),
    "reverse": divergence("reverse"),
    "jsd": divergence("jsd"),
    "top-K": topk,
}


def parts_of(total, seed=0):
    """Ids of rows: all in another order, and some of every size."""
    g = torch.Generator().manual_seed(seed)
    order = torch.randperm(total, generator=g)
    sizes = [total, 1, 2, 3, 5, 8, 13, 64, 100, 200, 257, 1000, 2048, 4096, 5000]
    if total < 10:  # in the interpreter, or on a CPU
        sizes = [1, total // 2]
    return [order] + [torch.randperm(total, generator=g)[:n].clone() for n in sizes if n <= total]


def differences(f, rows, constants, total, parts):
    """How many of ``parts`` get other bits than within all rows, of results and of the first row's gradients."""
    g = torch.Generator().manual_seed(1)
    found = 0
    device = rows[0].device
    upstream = {}

    def run(ids):
        own = [r.detach()[ids.to(device)].clone() for r in rows]
        own[0].requires_grad_()
        results = f(*own, *constants)
        loss = 0
        for n, r in enumerate(results):
            if r.is_floating_point() and r.requires_grad:
                whole = upstream.setdefault(n, torch.randn((total, *r.shape[1:]), generator=g).to(r))
                loss = loss + (r * whole[ids.to(device)]).sum()
        (grad,) = torch.autograd.grad(loss, own[0])
        return [r.detach() for r in results] + [grad]

    whole = run(torch.arange(total))
    assert not any(r.isnan().any() for r in whole if r.is_floating_point())
    for ids in parts:
        found += any(not torch.equal(w[ids.to(device)], p) for w, p in zip(whole, run(ids), strict=True))
    return found


def logits(device, total, vocab, dtype):
    g = torch.Generator().manual_seed(0)
    x, teacher = ((torch.randn(total, vocab, generator=g) * 4).to(dtype).to(device) for _ in range(2))
    return x, torch.randint(vocab, (total,), generator=g).to(device), teacher


@pytest.mark.pairs(
    unless=lambda device, vocab, dtype, **_: device == "interpreter" and (dtype == torch.bfloat16) == (vocab == 10000)
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", (10000, 4099), ids=("aligned", "odd"))
@pytest.mark.parametrize("name", LOSSES)
def test_logits(device, name, vocab, dtype):
    if interpreted(device) and (dtype == torch.bfloat16) == (vocab == 10000):
        pytest.skip("the interpreter runs each vocabulary in one dtype")
    total = 300 if device.type == "cuda" else 5
    rows = logits(device, total, vocab, dtype)
    assert differences(LOSSES[name], rows, (), total, parts_of(total)) == 0


def test_logits_differ_without_it(device, monkeypatch):
    """So that the other tests can fail."""
    if not interpreted(device) and device.type == "cpu":
        pytest.skip("on a CPU rows hardly differ")
    monkeypatch.setattr(invariance, "_enabled", False)
    total = 2000 if device.type == "cuda" else 12
    rows = logits(device, total, 32000, torch.float32)
    assert differences(LOSSES["log-probs and entropy"], rows, (), total, parts_of(total)) > 0


@pytest.mark.pairs(unless=lambda device, dtype, **_: device == "interpreter" and dtype == torch.bfloat16)
@pytest.mark.parametrize("dtype", (*DTYPES, "float32 logits"))
@pytest.mark.parametrize("name", LOSSES)
def test_heads(device, name, dtype):
    wide, dtype = dtype == "float32 logits", torch.bfloat16 if dtype == "float32 logits" else dtype
    if interpreted(device):
        if dtype == torch.bfloat16 and not wide:
            pytest.skip("the interpreter runs the other two")
        dtype = torch.float16 if wide else dtype  # it multiplies the bits of bfloat16 numbers
    total, width, vocab = (300, 136, 4099) if device.type == "cuda" else (5, 24, 139)
    g = torch.Generator().manual_seed(0)
    hidden, weight, bias, teacher = (
        torch.randn(*shape, generator=g).to(dtype).to(device)
        for shape in ((total, width), (vocab, width), (vocab,), (total, width))
    )
    target = torch.randint(vocab, (total,), generator=g).to(device)
    weight.requires_grad_()

    def f(h, t, of_teacher, w, b):
        head = onepass.LinearLogits(h, w, b, logits_dtype=torch.float32 if wide else None)
        return LOSSES[name](head, t, onepass.LinearLogits(of_teacher, w.detach()))

    assert differences(f, (hidden, target, teacher), (weight, bias), total, parts_of(total)) == 0


@pytest.fixture
def invariant_products(device):
    """Skip the interpreter, whose products are NumPy's, where those of a row depend on its place among others."""
    if interpreted(device):
        a, order = np.random.default_rng(0).standard_normal((32, 32), dtype=np.float32), np.arange(32)[::-1]
        if (np.matmul(a[order], a) != np.matmul(a, a)[order]).any():
            pytest.skip("NumPy's product of a row depends on its place among others on this CPU")


def test_heads_of_any_width(device, invariant_products):
    """The order of a sum must not follow from where a row lies: rows of an odd width start anywhere."""
    for width, vocab in ((17, 17), (33, 3), (129, 5)):
        g = torch.Generator().manual_seed(0)
        hidden, weight = (torch.randn(n, width, generator=g).to(device) for n in (9, vocab))
        target = torch.randint(vocab, (9,), generator=g).to(device)

        def f(h, t, w):
            return LOSSES["log-probs and entropy"](onepass.LinearLogits(h, w), t, None)

        assert differences(f, (hidden, target), (weight,), 9, parts_of(9)) == 0


def test_a_frozen_head_with_a_gradient_and_without(device):
    """The statistics of float32 logits are the same, bit for bit."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 16, generator=generator).to(device) for n in (40, 264))
    target = torch.arange(40, device=device) * 5
    with torch.no_grad():
        expected = onepass.linear_selective_log_softmax_and_entropy(hidden, weight, target)
    found = onepass.linear_selective_log_softmax_and_entropy(hidden.requires_grad_(), weight, target)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_materialized_logits(device):
    total, width, vocab = 40 if device.type == "cuda" else 6, 24, 64
    g = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, width, generator=g).to(device) for n in (total, vocab))

    def f(h, w):
        return [onepass.LinearLogits(h, w).materialize()]

    assert differences(f, (hidden,), (weight,), total, parts_of(total)) == 0


ROUTERS = {
    "softmax": {},
    "sigmoid in groups": {"score": "sigmoid", "n_group": 4, "topk_group": 2, "scale": 2.5},
    "sqrt-softplus": {"score": "sqrtsoftplus"},
    "after": {"score_after_topk": True, "softcap": 5.0},
}


@pytest.mark.pairs
@pytest.mark.parametrize(
    "experts, dtype", ((64, torch.float32), (100, torch.float32), (64, torch.bfloat16)), ids=("aligned", "odd", "half")
)
@pytest.mark.parametrize("name", ROUTERS)
def test_routers(device, name, experts, dtype):
    total = 300 if device.type == "cuda" else 9
    g = torch.Generator().manual_seed(0)
    x = torch.randn(total, experts, generator=g).to(device, dtype)

    def f(x):
        routing = moe.route(x, 6, **ROUTERS[name])
        return [routing.weights, routing.experts]

    assert differences(f, (x,), (), total, parts_of(total)) == 0


@pytest.mark.parametrize("family", ("Qwen3Moe", "DeepseekV3"))
def test_gates(device, invariant_products, family):
    transformers = pytest.importorskip("transformers")
    sizes = dict(hidden_size=64, moe_intermediate_size=16, num_experts=16, n_routed_experts=16, num_experts_per_tok=4)
    config = getattr(transformers, f"{family}Config")(**sizes, **({"n_group": 4} if family == "DeepseekV3" else {}))
    module = __import__(f"transformers.models.{config.model_type}.modeling_{config.model_type}", fromlist=["_"])
    router = next(v for n, v in vars(module).items() if n.startswith(family) and n.lower().endswith("topkrouter"))
    block = router(config).to(device)
    torch.manual_seed(0)
    for p in block.parameters():
        torch.nn.init.normal_(p)
    hidden = torch.randn(40, 64, device=device)

    def f(h):
        routing = moe.route_block(block, h)
        return [routing.weights, routing.experts]

    assert differences(f, (hidden,), (), 40, parts_of(40)) == 0


def test_launches_do_not_depend_on_the_number_of_rows(monkeypatch):
    """The constants that a kernel is compiled with, on the tensors of 1 and of 5000 rows."""
    plans, device = import_module("onepass.kernels.launch"), torch.device("cpu")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    seen: list = []

    def record(plan_for, about, tensors, repeated=None):
        plan = plan_for(*about)
        # Strides, and whether counts are added to those of other programs.
        own = {n: v for n, v in plan.constexprs.items() if n not in ("ALONE", "A_ROW", "OUT_ROW")}
        seen.append((plan.kernel, own, plan.num_warps))

    for module in iter_modules(import_module("onepass.kernels").__path__, "onepass.kernels."):
        if hasattr(import_module(module.name), "launch") and module.name != plans.__name__:
            monkeypatch.setattr(import_module(module.name), "launch", record)

    def launches(rows):
        seen.clear()
        x, y = (torch.zeros(rows, 4099, device=device, requires_grad=True) for _ in range(2))
        for name, f in LOSSES.items():
            try:
                results = f(x, torch.zeros(rows, dtype=torch.long), y.detach())
            except Exception as e:
                raise AssertionError(name) from e
            sum(r.sum() for r in results if r.requires_grad).backward()
        onepass.linear_cross_entropy(x[:, :24], torch.zeros(331, 24, requires_grad=True), torch.zeros(rows).long())
        moe.route(x[:, :64], 6).weights.sum().backward()
        of_half = torch.zeros(rows, 64, dtype=torch.bfloat16, requires_grad=True)
        moe.route(of_half, 6).weights.sum().backward()
        return list(seen)

    few, many = launches(1), launches(5000)
    names = {kernel.fn.__name__ for kernel, *_ in few}
    assert names >= {
        "softmax_statistics_kernel",
        "divergence_kernel",
        "routing_kernel",
        "topk_routing_kernel",
        "row_gemm_kernel",
    }
    assert [f for f, m in zip(few, many, strict=True) if f != m and f[0].fn.__name__ not in ELEMENTWISE] == []


@pytest.mark.gpu
@pytest.mark.parametrize("what", ("logits", "head", "router"))
def test_every_size_of_large_batches(what):
    """Sizes from 1 to 8192, of which the larger are drawn."""
    device, total = torch.device("cuda"), 8192
    g = torch.Generator().manual_seed(0)
    sizes = [*range(1, 70), *torch.randint(70, total, (60,), generator=g).tolist(), 128, 256, 512, 1024, 2048, 4096]
    parts = [torch.randperm(total, generator=g)[:n].clone() for n in sizes]
    if what == "logits":
        x = torch.randn(total, 32000, device=device).mul_(4).bfloat16()
        rows = x, torch.randint(32000, (total,), device=device), x.flip(0)
        assert differences(LOSSES["log-probs and entropy"], rows, (), total, parts) == 0
    elif what == "router":
        x = torch.randn(total, 256, device=device)
        assert differences(lambda x: [moe.route(x, 8).weights], (x,), (), total, parts) == 0
    else:
        hidden, weight = (torch.randn(n, 1024, device=device).bfloat16() for n in (total, 32000))
        rows = hidden, torch.randint(32000, (total,), device=device), hidden.flip(0)

        def f(h, t, of_teacher, w):
            return LOSSES["log-probs and entropy"](onepass.LinearLogits(h, w), t, None)

        assert differences(f, rows, (weight / 8,), total, parts) == 0


def test_a_backward_after_the_mode(device):
    """A head computes its logits again in the backward, as its forward did."""
    g = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 24, generator=g).to(device).requires_grad_() for n in (9, 331))
    target = torch.randint(331, (9,), generator=g).to(device)

    def grad(ids):
        own = hidden.detach()[ids].requires_grad_()
        with onepass.batch_invariant():
            loss = onepass.linear_cross_entropy(own, weight, target[ids], reduction="none").sum()
        with onepass.batch_invariant(False):
            return torch.autograd.grad(loss, own)[0]

    assert torch.equal(grad(torch.arange(9))[:2], grad(torch.arange(2)))


def test_no_tile_is_a_slice_of_the_vocabulary():
    """How many slices there are would depend on the number of rows."""
    with torch.device("meta"):
        tensors = HeadTensors(torch.empty(1000, 127), torch.empty(5003, 127))
    settings = Settings(torch.float32, torch.float32, 12_000_000)
    of_modes = [Head(tensors, settings._replace(invariant_gemms=invariant)) for invariant in (False, True)]
    assert [plan([head], None, Use(known=True)).sliced for head in of_modes] == [True, False]


def test_switch(monkeypatch):
    with onepass.batch_invariant(False):
        assert not is_batch_invariant()
        with pytest.raises(KeyError), onepass.batch_invariant():
            assert is_batch_invariant()
            raise KeyError
        assert not is_batch_invariant()
        onepass.batch_invariant()
        assert is_batch_invariant()
    assert is_batch_invariant()
    with onepass.batch_invariant(False):
        mode = onepass.batch_invariant()
        for _ in range(3):
            with mode:
                assert is_batch_invariant()
            assert not is_batch_invariant()
        with mode, mode:
            assert is_batch_invariant()
        assert not is_batch_invariant()
    with pytest.raises(TypeError, match="enabled: expected a bool, got 'on'"):
        onepass.batch_invariant("on")


@pytest.mark.parametrize("enabled", (True, False))
def test_as_a_decorator(enabled):
    with onepass.batch_invariant(not enabled):

        @onepass.batch_invariant(enabled)
        def mode(*values, last):
            assert is_batch_invariant() == enabled
            return *values, last

        assert is_batch_invariant() != enabled
        assert mode.__name__ == "mode"
        for _ in range(2):
            assert mode(1, 2, last=3) == (1, 2, 3)
            assert is_batch_invariant() != enabled
        with pytest.raises(TypeError):
            mode()
        assert is_batch_invariant() != enabled


def test_one_decorator_for_several_functions():
    with onepass.batch_invariant(False):
        decorator = onepass.batch_invariant()
        modes = [decorator(lambda: is_batch_invariant()) for _ in range(2)]
        assert not is_batch_invariant()
        assert [mode() for mode in modes] == [True, True]
        with decorator:
            assert decorator(is_batch_invariant)()
        assert not is_batch_invariant()


def generator():
    yield


async def coroutine():
    pass


async def asynchronous_generator():
    yield


@pytest.mark.parametrize(
    "function",
    [generator, coroutine, asynchronous_generator, int, 3],
    ids=["generator", "coroutine", "both", "class", "number"],
)
def test_what_cannot_be_decorated(function):
    """The body of a generator or a coroutine runs when its call has ended, and with it the mode."""
    with onepass.batch_invariant(False), pytest.raises(TypeError, match="function: expected a function that is no"):
        onepass.batch_invariant()(function)


def test_hidden_states_of_any_strides(device):
    hidden, weight = torch.randn(16, 7, device=device).t(), torch.randn(16, 41, device=device).t()
    target = torch.arange(7, device=device)
    with onepass.batch_invariant():
        got = onepass.linear_cross_entropy(hidden, weight, target)
    torch.testing.assert_close(got, torch.nn.functional.cross_entropy(hidden @ weight.t(), target))


@forks.GROUP
@pytest.mark.parametrize("value", ("0", "1"))
def test_environment(tmp_path, value):
    code = "from onepass.core.invariance import is_batch_invariant as on; print(int(on()))"
    found = forks.run(code, folder=tmp_path, environment=os.environ | {"ONEPASS_BATCH_INVARIANT": value})
    assert found.stdout.strip() == value, found.stderr


@forks.GROUP
@pytest.mark.parametrize("name", ("ONEPASS_BATCH_INVARIANT", "ONEPASS_DEBUG"))
def test_an_environment_that_means_nothing(tmp_path, name):
    found = forks.run("import onepass", folder=tmp_path, environment=os.environ | {name: "true"})
    assert found.returncode and f"ValueError: {name}: expected 0 or 1, got 'true'" in found.stderr


def test_compiled(device):
    """A compiled function follows the mode."""
    if interpreted(device):
        pytest.skip("slow in the interpreter")
    x, t, _ = logits(device, 40, 4099, torch.float32)

    @torch.compile(fullgraph=True)
    def f(x, t):
        return onepass.selective_log_softmax_and_entropy(x, t)

    for on in (True, False):
        with onepass.batch_invariant(on):
            expected = onepass.selective_log_softmax_and_entropy(x, t)
            assert all(torch.equal(a, b) for a, b in zip(f(x, t), expected))
