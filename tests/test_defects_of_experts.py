"""Defects of routers and experts, which these tests showed before they were fixed."""

import pytest
import torch

import onepass
from defect_cases import INF
from linear_cases import gradients
from onepass import reference
from onepass.backend import backend_of
from onepass.moe import Routing

# Biases of experts that are sliced or expanded.


@pytest.mark.parametrize("kind", ["sliced", "expanded"])
def test_biases_of_experts(device, kind):
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


# Routers: one definition.


def test_logsumexp_of_infinity(device):
    logits = torch.randn(3, 8, device=device)
    logits[1, 2] = INF
    for score in ("softmax", "sigmoid", "sqrtsoftplus"):
        routing = onepass.moe.route(logits, 2, score=score, losses=True)
        assert torch.equal(routing.logsumexp.isnan().cpu(), torch.tensor([False, True, False])), score


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("groups", [{}, {"n_group": 4, "topk_group": 2, "group_score": "max"}], ids=["", "groups"])
def test_the_order_under_a_softcap_that_saturates(device, score, groups):
    g = torch.Generator().manual_seed(0)
    logits = (30 + 40 * torch.rand(64, 16, generator=g)).to(device)  # tanh of 6 to 14: 1 to the last bits
    routing = onepass.moe.route(logits, 4, score=score, softcap=5.0, **groups)
    chosen = logits.gather(-1, routing.experts)
    assert (chosen[:, :-1] >= chosen[:, 1:]).all()
    if not groups:
        assert torch.equal(routing.experts, logits.topk(4)[1])


def test_experts_of_no_choice(device):
    E, H, I = 4, 16, 8  # noqa: E741
    hidden = torch.randn(5, H, device=device, requires_grad=True)
    weights = torch.randn(E, 2 * I, H, device=device), torch.randn(E, H, I, device=device)
    none = Routing(torch.zeros(5, 0, device=device), torch.zeros(5, 0, dtype=torch.long, device=device), None)
    out = onepass.moe.expert_mlp(hidden, none, *weights)
    assert torch.equal(out, torch.zeros_like(out)) and out.shape == hidden.shape
    out.sum().backward()
    assert torch.equal(hidden.grad, torch.zeros_like(hidden))


def test_groups_of_another_path(device):
    """Groups that were made for a tensor that PyTorch multiplies have no tiles for a kernel."""
    x, weight = torch.randn(4, 8, device=device), torch.randn(3, 6, 8, device=device)
    if backend_of(x) is reference:
        pytest.skip("PyTorch multiplies both")
    ids = torch.randint(3, (4, 2), device=device)
    groups = onepass.moe.group_by_expert(ids, 3, x.double())
    with pytest.raises(ValueError, match=r"groups\.tile_list: expected shape"):
        onepass.moe.scattered_linear(x, weight, ids, groups)


def test_options_in_tensors_that_change(device):
    x = torch.randn(6, 8, device=device)
    scale, k = torch.tensor(1.0), torch.tensor(2)
    once = onepass.moe.route(x, k, scale=scale).weights
    scale.fill_(3.0)
    torch.testing.assert_close(onepass.moe.route(x, k, scale=scale).weights, 3 * once)
    k.fill_(3)
    assert onepass.moe.route(x, k).weights.shape == (6, 3)


def test_no_tokens(device):
    experts = torch.zeros(0, 2, dtype=torch.long, device=device)
    routing = Routing(torch.zeros(0, 2, device=device), experts, None)
    weights = [torch.randn(s, device=device, requires_grad=True) for s in ((4, 16, 16), (4, 16, 8))]
    x = torch.zeros(0, 16, device=device)
    onepass.moe.expert_mlp(x, routing, *weights).sum().backward()
    onepass.moe.scattered_linear(x, weights[0], experts).sum().backward()
    assert all(torch.equal(w.grad, torch.zeros_like(w)) for w in weights)


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_a_bias_of_nan(device, score):
    if backend_of(torch.empty(0, device=device)) is not reference and device.type == "cpu":
        pytest.skip("the interpreter's maximum keeps a NaN, which that of a GPU drops")
    x = torch.randn(3, 8, device=device)
    bias = torch.zeros(8, device=device)
    bias[2] = float("nan")
    assert (onepass.moe.route(x, 7, score=score, selection_bias=bias).experts != 2).all()
    every = onepass.moe.route(x, 3, score=score, selection_bias=torch.full_like(bias, float("nan")))
    assert ((every.experts >= 0) & (every.experts < 8)).all() and every.counts.sum() == 9


def test_layers_of_different_k(device):
    x = torch.randn(6, 8, device=device)
    layers = [onepass.moe.route(x, k, losses=True) for k in (2, 4)]
    for loss in (onepass.moe.load_balancing_loss, onepass.moe.router_z_loss):
        with pytest.raises(ValueError, match="routing: expected the same number of experts per token in all layers"):
            loss(layers)


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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_gradients_of_rounded_weights_in_float64(eager, dtype):
    """The products of float64 are summed before their sum is rounded to the dtype of the routing weights."""
    x, ids = torch.tensor([[1.0, 0.0]], dtype=torch.float64), torch.zeros(1, 1, dtype=torch.long)
    weight = torch.tensor([[[1e10, 0.0], [-1e10 + 1, 0.0]]], dtype=torch.float64)
    w = torch.ones(1, 1, dtype=dtype, requires_grad=True)
    y = onepass.moe.scattered_linear(x, weight, ids, weights=w)
    (of_scattered,) = torch.autograd.grad(y.sum(), w)
    gate_up = torch.tensor([[[1.0, 0.0]] * 4], dtype=torch.float64)
    silu = torch.nn.functional.silu(x)[0, 0].item()
    y = onepass.moe.expert_mlp(x, Routing(w, ids, None), gate_up, weight)
    (of_mlp,) = torch.autograd.grad(y.sum(), w)
    exact = torch.tensor([1.0, silu], dtype=torch.float64).to(dtype)
    torch.testing.assert_close(torch.stack([of_scattered, of_mlp]).flatten(), exact, rtol=1e-5, atol=0)
