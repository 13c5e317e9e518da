"""A head whose hidden states alone require a gradient: two GEMMs for any loss of one field of each row."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import onepass
from linear_cases import H, V, assert_all_close, batch, exact, gradients
from onepass.logits.gradients import times_rows
from paths import interpreted
from test_linear_cost import Products

FIELDS = {
    "log-probs": lambda logits, index, **o: onepass.selective_log_softmax(logits, index, **o),
    "entropy": lambda logits, index, **o: onepass.entropy_from_logits(logits, **o),
    "both, of which one is used": lambda logits, index, **o: onepass.selective_log_softmax_and_entropy(
        logits, index, **o
    )[0],
}
OPTIONS = {
    "plain": {},
    "transformed": dict(temperature=0.7, softcap=5.0, logit_scale=2.0),
    "masked": dict(row_mask=...),
}


def draw(device, dtype=torch.float32):
    hidden, weight, bias, target = batch(device, dtype)
    return hidden, weight.detach(), bias.detach(), target.abs() % V


def coupled(field):
    """A loss that couples rows, as DPO does: the gradient of a row follows from all of them."""
    half = len(field) // 2
    return -F.logsigmoid(field[:half].sum() - field[half:].sum()) + field.square().mean()


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", FIELDS)
def test_two_products(device, tile, name, options):
    hidden, weight, bias, index = draw(device)
    options = dict(OPTIONS[options])
    kept = len(index)
    if "row_mask" in options:
        options["row_mask"] = torch.arange(len(index), device=device) % 3 != 1
        kept = int(options["row_mask"].sum())
    with Products() as products:
        field = FIELDS[name](onepass.LinearLogits(hidden, weight, bias), index, **options)
        (found,) = gradients(coupled(field), (hidden,))
    assert products.multiplications == 2 * kept * H * V
    reference = exact(hidden)
    logits = F.linear(*reference, weight.double(), bias.double())
    expected = coupled(FIELDS[name](logits, index, **options))
    assert_all_close([field.sum().detach()], [FIELDS[name](logits, index, **options).sum().detach()], "field")
    assert_all_close([found], gradients(expected, reference))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_it_is_rounded_once(device, dtype):
    """No further from float64 than the gradient of a head whose bias is trained, which takes the other way."""
    if interpreted(device) and dtype == torch.bfloat16:
        pytest.skip("the interpreter does not round to the nearest bfloat16")
    hidden, weight, bias, index = draw(device, dtype)
    upstream = torch.randn(len(index), generator=torch.Generator().manual_seed(0)).to(device)
    reference = exact(hidden)
    logits = F.linear(*reference, weight.double(), bias.double())
    (expected,) = gradients((onepass.selective_log_softmax(logits, index) * upstream).sum(), reference)
    errors = []
    for other in (bias, bias.clone().requires_grad_()):
        field = onepass.selective_log_softmax(onepass.LinearLogits(hidden, weight, other), index)
        (found,) = gradients((field * upstream).sum(), (hidden,))
        assert found.dtype == dtype
        errors.append((found.double() - expected).norm() / expected.norm())
    assert errors[0] <= 1.1 * errors[1] + 1e-12


def test_an_entropy_with_a_gradient(device):
    """Whether it has one is known in the backward only, which then computes the logits again."""
    hidden, weight, bias, index = draw(device)
    reference = exact(hidden)
    of_exact = onepass.selective_log_softmax_and_entropy(F.linear(*reference, weight.double(), bias.double()), index)
    for both, count in ((False, 2), (True, 4), (False, 2)):
        with Products() as products:
            log_probs, entropy = onepass.selective_log_softmax_and_entropy(
                onepass.LinearLogits(hidden, weight, bias), index
            )
            (found,) = gradients(coupled(log_probs) + (0.1 * entropy.sum() if both else 0.0), (hidden,))
        expected = coupled(of_exact[0]) + (0.1 * of_exact[1].sum() if both else 0.0)
        assert_all_close([found], torch.autograd.grad(expected, reference, retain_graph=True))
        assert products.multiplications == count * len(index) * H * V


def test_checkpoints(device):
    """Two forwards of which each is computed again after the backward of another loss."""
    _, weight, bias, index = draw(device)
    first, second = (batch(device)[0].detach().requires_grad_() for _ in range(2))

    def call(hidden):
        return onepass.selective_log_softmax_and_entropy(onepass.LinearLogits(hidden, weight, bias), index)

    a, b = (checkpoint(call, hidden, use_reentrant=False) for hidden in (first, second))
    b[1].sum().backward()
    a[0].sum().backward()
    (of_a,), (of_b,) = (
        torch.autograd.grad(call(first)[0].sum(), first),
        torch.autograd.grad(call(second)[1].sum(), second),
    )
    assert_all_close([first.grad, second.grad], [of_a, of_b])


def test_an_upstream_gradient_of_nan_does_not_reach_masked_rows(device):
    hidden, weight, bias, index = draw(device)
    mask = torch.arange(len(index), device=device) % 3 != 1
    log_probs = onepass.selective_log_softmax(onepass.LinearLogits(hidden, weight, bias), index, row_mask=mask)
    torch.where(mask, log_probs / mask.float(), 0.0).sum().backward()  # 0 / 0 in the masked rows
    assert not hidden.grad[~mask].any() and hidden.grad.isfinite().all()


def test_every_backward_has_the_gradient_of_its_upstream(device):
    """Several backwards of one forward, and rows without an upstream gradient, whatever is in them."""
    hidden, weight, bias, index = draw(device)
    with torch.no_grad():
        hidden[1] = torch.nan
    log_probs = onepass.selective_log_softmax(onepass.LinearLogits(hidden, weight, bias), index)
    upstream = torch.ones_like(log_probs)
    upstream[1] = 0.0
    first, second = (torch.autograd.grad(log_probs, hidden, upstream * n, retain_graph=True)[0] for n in (1.0, 3.0))
    assert not first[1].any() and first.isfinite().all()
    torch.testing.assert_close(3 * first, second)
    (with_nan,) = torch.autograd.grad(log_probs, hidden, torch.ones_like(upstream))
    assert with_nan[1].isnan().all() and torch.equal(with_nan[2:], first[2:])


@pytest.mark.parametrize("why", ["several indices", "max_memory", "a trained bias", "a support"])
def test_where_the_backward_computes_it(device, why):
    hidden, weight, bias, index = draw(device)
    limit = 1 << 30 if why == "max_memory" else None
    bias = bias.requires_grad_() if why == "a trained bias" else bias
    index = torch.stack([index, (index + 1) % V], -1) if why == "several indices" else index
    support = torch.arange(V, device=device).expand(len(index), V) if why == "a support" else None
    with Products() as products:
        logits = onepass.LinearLogits(hidden, weight, bias, max_memory=limit)
        log_probs = onepass.selective_log_softmax(logits, index, support=support)
        (found,) = gradients(log_probs.square().sum(), (hidden,))
    assert products.multiplications == 3 * len(index) * H * V
    reference = exact(hidden)
    logits = F.linear(*reference, weight.double(), bias.double())
    assert_all_close([found], gradients(onepass.selective_log_softmax(logits, index).square().sum(), reference))


def test_trl_fused_heads(device):
    """As its trainers call them, with the entropy for their logs alone."""
    from onepass.integrations.trl_heads import ChunkedLogProbFunction

    hidden, weight, bias, index = draw(device)
    with Products() as products:
        log_probs, entropy, *_, is_top1 = ChunkedLogProbFunction.apply(
            hidden, weight, bias, index, 0.9, 4096, outputs=("log_probs", "entropy", "is_top1")
        )
        (found,) = gradients(coupled(log_probs), (hidden,))
    assert products.multiplications == 2 * len(index) * H * V
    reference = exact(hidden)
    logits = F.linear(*reference, weight.double(), bias.double())
    of_exact = onepass.selective_log_softmax_and_entropy(logits, index, temperature=0.9)
    assert_all_close([log_probs.detach(), entropy.detach()], [f.detach() for f in of_exact])
    assert_all_close([found], gradients(coupled(of_exact[0]), reference))
    assert torch.equal(is_top1, logits.argmax(-1) == index)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_rows_times_two_factors(device, dtype):
    """One after the other, rounded once; the product of both may be too small. A row with a factor of 0 becomes 0."""
    g = torch.Generator().manual_seed(0)
    matrix = torch.randn(9, 1030, generator=g)
    first, second = torch.randn(2, 9, generator=g)
    matrix[0], first[0], second[0] = matrix[0] * 2.0**79, 2.0**-79, 1e-22
    matrix[1], first[1] = torch.nan, 0.0
    matrix[2], second[2] = torch.inf, 0.0
    first[3], second[3] = torch.nan, 0.0
    given = [t.to(device) for t in (matrix, first, second)]
    out = torch.empty(9, 1030, dtype=dtype, device=device)
    assert times_rows(given[0], given[1], out, given[2]) is out
    expected = (matrix.double() * first.double()[:, None] * second.double()[:, None]).cpu()
    expected[1:4] = 0.0
    rtol = 1e-6 if dtype == torch.float32 else 2.0**-7  # the interpreter truncates
    torch.testing.assert_close(out.cpu().double(), expected, rtol=rtol, atol=0.0)
    alone = times_rows(given[0][4:], given[1][4:], torch.empty_like(out[4:])).cpu().double()
    torch.testing.assert_close(alone, expected[4:] / second[4:, None].double(), rtol=rtol, atol=0.0)
