"""Float32 logits of bfloat16 and float16 heads: the result of the GEMM is never rounded, its gradient once."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import onepass
from definition import assert_close
from linear_cases import LOSSES, N, V, batch, exact, gradients, policy_loss
from onepass import kernels, reference
from onepass.backend import backend_of
from onepass.core.options import FieldGradients, Inputs, Options
from onepass.logits.head import Head, HeadTensors, Settings
from onepass.logits.tile_plan import Use, plan
from paths import interpreted

pytestmark = pytest.mark.usefixtures("uninitialised_memory_is_nan")
F32 = torch.float32
DTYPES = torch.bfloat16, torch.float16


def assert_rounded_once(got, expected, dtype):
    """Gradients of a norm that differs by no more than the roundings of a tile's gradient and of the result."""
    for g, e in zip(got, expected, strict=True):
        assert g.dtype == dtype
        # Triton's interpreter truncates to bfloat16.
        half = 0.5 if dtype == torch.float16 or not interpreted(g.device) else 1.0
        assert (g.double() - e.to(g.device)).norm() <= 1.5 * half * torch.finfo(dtype).eps * (e.norm() + 1e-3)


def head(parts, **options):
    return onepass.LinearLogits(*parts, logits_dtype=F32, **options)


@pytest.mark.pairs
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("loss", LOSSES)
def test_equals_the_loss_of_exact_logits(device, tile, loss, dtype):
    *parts, target = batch(device, dtype)
    reference = exact(*parts)
    expected = LOSSES[loss](F.linear(*reference), target)
    got = LOSSES[loss](head(parts), target)
    assert got.dtype == F32
    torch.testing.assert_close(got.double(), expected, rtol=2e-5, atol=2e-5)
    upstream = torch.rand(expected.shape, dtype=torch.float64).to(device) + 0.5
    found = gradients((got * upstream).sum(), parts)
    assert_rounded_once(found, gradients((expected * upstream).sum(), reference), dtype)
    with torch.no_grad():
        torch.testing.assert_close(LOSSES[loss](head(parts), target), got, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_policy_loss(device, tile, reduction):
    *parts, target = batch(device, torch.bfloat16)
    index, rows = target.clamp(min=0), torch.arange(N, device=device)
    mask = rows % 4 != 1
    g = torch.Generator().manual_seed(7)
    advantages, old = (torch.randn(N, generator=g).to(device) for _ in range(2))
    reference = exact(*parts)
    log_probs = F.linear(*reference).log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    s = SimpleNamespace(log_probs=log_probs.gather(-1, index[:, None])[:, 0], entropy=entropy)
    expected = policy_loss(s, advantages.double(), old.double())[mask].sum() / (
        1 if reduction == "none" else mask.sum()
    )
    got = onepass.linear_loss(
        parts[0], parts[1], index, policy_loss, advantages, old, bias=parts[2], row_mask=mask, reduction=reduction,
        logits_dtype=F32,
    ).sum()  # fmt: skip
    torch.testing.assert_close(got.double(), expected, rtol=2e-5, atol=2e-5)
    assert_rounded_once(gradients(got, parts), gradients(expected, reference), torch.bfloat16)


@pytest.mark.pairs
@pytest.mark.parametrize("direction", ["forward", "reverse", "jsd"])
@pytest.mark.parametrize("of", ["student", "both", "teacher"])
def test_teachers(device, tile, direction, of):
    """Near distributions, of which rounded logits lose the difference."""
    *parts, target = batch(device, torch.bfloat16, width=32)
    teacher = [(p.detach() + 0.02 * torch.randn_like(p)).requires_grad_(False) for p in parts]
    wide = {name: {"logits_dtype": F32 if of in (name, "both") else torch.bfloat16} for name in ("student", "teacher")}
    got = onepass.kl_div(
        onepass.LinearLogits(*parts, **wide["student"]), onepass.LinearLogits(*teacher, **wide["teacher"]),
        direction=direction, row_mask=target != -100,
    )  # fmt: skip
    reference = exact(*parts)
    logits = F.linear(*reference)
    theirs = F.linear(*(t.double() for t in teacher))
    if of != "both":
        rounded = (lambda x: x.bfloat16().double()) if of == "teacher" else (lambda x: x)
        theirs = theirs if of == "teacher" else theirs.bfloat16().double()
        logits = logits + (rounded(logits) - logits).detach()
    expected = onepass.kl_div(logits, theirs, direction=direction, row_mask=target != -100)
    # A product that is rounded to bfloat16 may round the other way.
    torch.testing.assert_close(got.double(), expected, rtol=1e-4 if of == "both" else 0.05, atol=1e-6)
    if of == "both":
        assert_rounded_once(gradients(got, parts), gradients(expected, reference), torch.bfloat16)


@pytest.mark.parametrize(
    "beta",
    [0.0, pytest.param(0.1, marks=pytest.mark.exhaustive), 0.5, pytest.param(0.9, marks=pytest.mark.exhaustive), 1.0],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_jsd_of_near_distributions(device, dtype, beta):
    """The gradient of hidden within 1e-2 of that of exact logits, where rounded ones are off by several times that.

    Divergences take float32 logits unless they are told otherwise.
    """
    g = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 64, generator=g) for n in (12 if interpreted(device) else 64, 509))
    hidden, weight = (t.to(dtype).to(device).requires_grad_() for t in (hidden, weight * 0.5))
    near = (hidden.detach() + 0.05 * torch.randn(hidden.shape, generator=g).to(device)).to(dtype)
    exact_parts = exact(hidden, weight)
    teacher = F.linear(near.double(), weight.detach().double())
    ends = {0.0: {"direction": "forward"}, 1.0: {"direction": "reverse"}}
    options = ends.get(beta, {"direction": "jsd", "beta": beta})

    def gradient_of(loss, part):
        return gradients(loss, (part,))[0].double()

    expected = gradient_of(onepass.kl_div(F.linear(*exact_parts), teacher, **options), exact_parts[0])
    errors = {}
    for wide in (None, F32, dtype):
        of = onepass.LinearLogits(near, weight.detach(), logits_dtype=wide)
        loss = onepass.linear_kl_div(hidden, weight, of, **options, logits_dtype=wide)
        errors[wide] = (gradient_of(loss, hidden) - expected).norm() / expected.norm()
    assert errors[None] == errors[F32] < 1e-2 and errors[dtype] > 3 * errors[F32], errors


def test_twenty_times_nearer_to_float64(device):
    """Log-probs of logits of a magnitude of 30."""
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(256, 64, generator=g).bfloat16().to(device)
    weight = (torch.randn(997, 64, generator=g) * 1.25).bfloat16().to(device)
    index = torch.randint(997, (256,), generator=g).to(device)
    z = hidden.double() @ weight.double().T
    assert 25 < z.abs().max() < 80
    expected = z.log_softmax(-1).gather(-1, index[:, None])[:, 0]
    errors = [
        (onepass.selective_log_softmax(onepass.LinearLogits(hidden, weight, logits_dtype=d), index) - expected).abs()
        for d in (None, F32)
    ]
    assert errors[0].mean() > 20 * errors[1].mean() and errors[0].max() > 20 * errors[1].max()


def test_materialized_and_transformed(device):
    *parts, _ = batch(device, torch.bfloat16)
    logits = head(parts)
    assert logits.dtype == F32 and logits.element_size() == 4
    expected = F.linear(*exact(*parts))
    torch.testing.assert_close(logits.materialize().double(), expected, rtol=1e-5, atol=1e-5)
    half = head(parts)[:, : V // 2] / 2
    assert half.dtype == F32
    index = torch.zeros(N, dtype=torch.long, device=device)
    got = onepass.selective_log_softmax(half, index)
    torch.testing.assert_close(got.double(), (expected[:, : V // 2] / 2).log_softmax(-1)[:, 0], rtol=1e-5, atol=1e-5)


def test_frozen_parts(device, tile):
    for frozen in range(3):
        *parts, target = batch(device, torch.bfloat16)
        parts[frozen].requires_grad_(False)
        reference = exact(*parts)
        expected = LOSSES["cross_entropy"](F.linear(*reference), target)
        got = LOSSES["cross_entropy"](head(parts), target)
        kept = [n for n in range(3) if n != frozen]
        found = gradients(got, [parts[n] for n in kept])
        assert_rounded_once(found, gradients(expected, [reference[n] for n in kept]), torch.bfloat16)


def test_autocast(device):
    """Factors in float32, GEMMs in bfloat16, logits in float32."""
    *parts, target = batch(device)
    with torch.autocast(device.type, torch.bfloat16):
        logits = head(parts)
    assert logits.dtype == F32 and logits.gemm_dtype == torch.bfloat16
    rounded = [p.detach().bfloat16() for p in parts]
    got, expected = onepass.cross_entropy(logits, target), onepass.cross_entropy(head(rounded), target)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


def test_compiled(device):
    if backend_of(torch.empty(0, device=device)) is not reference:
        pytest.skip("what is compiled is the same on both backends")
    *parts, target = batch(device, torch.bfloat16)
    teacher = head([p.detach() for p in parts]) * 0.9
    for loss in (lambda h, w, b: onepass.linear_cross_entropy(h, w, target, bias=b, logits_dtype=F32),
                 lambda h, w, b: onepass.linear_kl_div(h, w, teacher, bias=b, logits_dtype=F32)):  # fmt: skip
        torch._dynamo.reset()
        expected, got = loss(*parts), torch.compile(loss, backend="aot_eager")(*parts)
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(gradients(got, parts), gradients(expected, parts), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("dtype, wide", [(F32, torch.bfloat16), (F32, torch.float64), (torch.float64, F32),
                                         (torch.bfloat16, torch.float16), (torch.bfloat16, "float32")])  # fmt: skip
def test_other_dtypes_are_an_error(dtype, wide):
    hidden, weight, _, target = batch("cpu", dtype)
    with pytest.raises((TypeError, ValueError), match="logits_dtype: expected"):
        onepass.linear_cross_entropy(hidden, weight, target, logits_dtype=wide)


def test_the_dtype_of_the_gemms_is_the_default():
    hidden, weight, _, target = batch("cpu")
    expected = onepass.linear_cross_entropy(hidden, weight, target)
    assert onepass.linear_cross_entropy(hidden, weight, target, logits_dtype=F32) == expected


# The kernels, into a tensor of another dtype.


@pytest.mark.parametrize("vocab", [40, 83, 1000])
def test_gradients_into_another_dtype(device, vocab):
    backend = backend_of(torch.empty(0, device=device))
    g = torch.Generator().manual_seed(0)
    logits = (torch.randn(7, -(-vocab // 8) * 8, generator=g) * 3).to(device)[:, :vocab]
    index = torch.randint(vocab, (7,), generator=g).to(device)
    options, read = Options("log_probs"), Inputs(index, torch.arange(7, device=device) != 2)
    grads = FieldGradients(selected=torch.randn(7, generator=g).to(device))
    kept, expected = logits.clone(), torch.empty(logits.shape, device=device)
    packed = backend.softmax_statistics(logits, read, options)
    backend.softmax_gradient(logits, read, packed[0], grads, options, expected)
    for launch in ("two", "one"):
        if launch == "one" and not (backend is kernels and kernels.supports_fused_loss(logits, index, options)):
            continue
        out = torch.full((7, -(-vocab // 8) * 8), torch.nan, dtype=torch.bfloat16, device=device)[:, :vocab]
        if launch == "two":
            backend.softmax_gradient(logits, read, packed[0], grads, options, out)
        else:
            results = backend.softmax_loss(logits, read, grads, options, out)
            assert_close(results[1], packed[1].double(), name="log_probs")
        torch.testing.assert_close(out.float(), expected, rtol=2.0**-7, atol=1e-6)
        assert torch.equal(logits, kept)


# Memory.


@pytest.mark.parametrize("shape", [(300, 64, 50257), (4096, 256, 1000), (64, 1024, 32000), (777, 65, 151936)], ids=str)
@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
def test_plans_keep_to_the_memory(shape, trained):
    rows, width, vocab = shape
    with torch.device("meta"):
        hidden, weight = (torch.empty(n, width, dtype=torch.bfloat16) for n in (rows, vocab))

    def plan_of(limit, **use):
        of = Head(HeadTensors(hidden, weight), Settings(torch.bfloat16, F32, limit))
        return plan([of], None, Use(weight_gradient=trained, gradient=True, **use))

    for megabytes in (2, 40, 100, 400, 4000):
        total = 4 * vocab * width * trained
        try:
            cut = plan_of(megabytes * 10**6)
        except ValueError as error:
            least = int(str(error).split()[4])
            assert least > megabytes * 10**6 and plan_of(least).rows == 1
            continue
        needed = 4 * vocab * cut.rows + 2 * vocab * cut.batch + total * (cut.batch < rows)
        assert needed <= megabytes * 10**6 and cut.rows <= cut.batch <= max(rows, 1)
        parts = list(cut.row_tiles())
        assert sum(r.n for r in parts) == rows and max(r.n for r in parts) == cut.rows
        known = plan_of(megabytes * 10**6, known=True)
        if known.sliced:
            assert 6 * rows * known.columns + 4 * rows * width <= megabytes * 10**6


def test_the_default_adds_the_tile(monkeypatch):
    """One GEMM of the weight's gradient where bfloat16 logits have one, and at most 0.63 GiB more."""
    from linear_cases import OnCuda

    with torch.device("meta"):
        hidden, weight = (torch.empty(n, 4096, dtype=torch.bfloat16) for n in (8192, 151936))
    shapes = {}
    for wide in (torch.bfloat16, F32):
        of = Head(HeadTensors(hidden, weight), Settings(torch.bfloat16, wide))
        of.hidden = OnCuda(hidden)
        shapes[wide] = plan([of], None, Use(weight_gradient=True, gradient=True))
    assert shapes[F32].batch == shapes[torch.bfloat16].batch == 8192
    with torch.device("meta"):
        hidden, weight = (torch.empty(n, 2048, dtype=torch.bfloat16) for n in (32768, 151936))
    of = Head(HeadTensors(hidden, weight), Settings(torch.bfloat16, torch.bfloat16))
    of.hidden = OnCuda(hidden)
    assert plan([of], None, Use(weight_gradient=True, gradient=True)).rows == 6144  # `in_waves`
    assert shapes[F32].rows * 151936 * 4 <= 0.63 * 2**30 and shapes[F32].rows == 1024


@pytest.mark.pairs
@pytest.mark.parametrize("trained, masked", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("dtype, wide", [(torch.bfloat16, None), (torch.float16, F32), (F32, None)])
@pytest.mark.parametrize("loss", ("mean", "rows", "fields"))
def test_the_least_memory_is_enough(loss, dtype, wide, trained, masked):
    """For the forward, and for the backward of a forward that it was enough for."""
    hidden, weight = torch.randn(30, 16).to(dtype).requires_grad_(), torch.randn(50, 16).to(dtype)
    weight.requires_grad_(trained)
    target, mask = torch.randint(50, (30,)), torch.arange(30) % 2 == 0 if masked else None
    options = dict(row_mask=mask, logits_dtype=wide)

    def of(max_memory):
        if loss == "fields":
            both = onepass.linear_selective_log_softmax_and_entropy
            return sum(f.sum() for f in both(hidden, weight, target, max_memory=max_memory, **options))
        reduction = "mean" if loss == "mean" else "none"
        return onepass.linear_cross_entropy(
            hidden, weight, target, max_memory=max_memory, reduction=reduction, **options
        ).sum()

    with pytest.raises(ValueError, match="max_memory: expected at least") as error:
        of(1)
    of(int(str(error.value).split("at least ")[1].split(" ")[0])).backward()


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("loss", ("cross-entropy", "kl_div", "mean"))
def test_no_valid_row(device, loss, dtype):
    hidden, weight = (torch.randn(n, 16, device=device).to(dtype).requires_grad_() for n in (5, 33))
    if loss == "kl_div":
        masked = torch.zeros(5, dtype=torch.bool, device=device)
        got = onepass.linear_kl_div(hidden, weight, torch.randn(5, 33, device=device), row_mask=masked)
    else:
        ignored = torch.full((5,), -100, device=device)
        reduction = "mean" if loss == "mean" else "sum"
        got = onepass.linear_cross_entropy(hidden, weight, ignored, reduction=reduction, logits_dtype=F32)
    assert got.isnan() if loss == "mean" else got == 0
    assert not any(g.any() for g in gradients(got, (hidden, weight)))


def test_an_attached_model_of_float64():
    """Its logits are not narrowed."""
    transformers = pytest.importorskip("transformers")
    sizes = dict(vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4)
    model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**sizes)).double()
    ids = torch.randint(99, (2, 9))
    expected = model(input_ids=ids, labels=ids).loss
    with onepass.attach(model, logits_dtype=F32):
        torch.testing.assert_close(model(input_ids=ids, labels=ids).loss, expected)


@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
def test_an_attached_model(autocast):
    """Its training loss is that of float32 logits; what evaluation sees is not changed."""
    transformers = pytest.importorskip("transformers")
    sizes = dict(vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4)
    torch.manual_seed(0)
    dtype = torch.float32 if autocast else torch.bfloat16
    model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**sizes), dtype=dtype)
    with torch.no_grad():
        model.lm_head.weight.mul_(60)
    ids = torch.randint(99, (2, 9))
    mixed = torch.autocast("cpu", torch.bfloat16, enabled=autocast)
    with torch.no_grad(), mixed:
        logits = model(input_ids=ids).logits
        hidden = model.model(input_ids=ids).last_hidden_state
    with torch.no_grad():
        wide = F.linear(hidden.bfloat16().float(), model.lm_head.weight.bfloat16().float())
    expected, rounded = (F.cross_entropy(x[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten()) for x in (wide, logits))
    with onepass.attach(model, logits_dtype=F32):
        with mixed:
            out = model(input_ids=ids, labels=ids)
        assert out.logits.dtype == F32
        torch.testing.assert_close(out.loss, expected, rtol=2e-6, atol=2e-6)
        assert abs(out.loss - expected) < 0.1 * abs(rounded - expected)
        out.loss.backward()
        assert model.lm_head.weight.grad.dtype == dtype
        with torch.no_grad(), mixed:
            assert torch.equal(model(input_ids=ids).logits, logits)
    with pytest.raises(ValueError, match=r"logits_dtype: expected torch\.float32 or None, got torch\.float16"):
        onepass.attach(model, logits_dtype=torch.float16)
