"""`route` as an operation of torch: losses, layouts, compilation, CUDA graphs, errors and counters of experts."""

from types import SimpleNamespace

import pytest
import torch

import onepass
from onepass.core.moe_options import RouterOptions
from onepass.moe import Routing, load_balancing_loss, route, router_z_loss, sigmoid_topk, softmax_topk
from paths import captured


def switch_loss(layers, k, mask):
    """As transformers spells it: over one-hot experts of all layers, and an attention mask of each."""
    p = torch.cat(layers).softmax(-1)
    chosen = torch.nn.functional.one_hot(p.topk(k)[1], p.shape[-1]).double()
    m = torch.ones(len(p)) if mask is None else mask.repeat(len(layers)).double()
    share = (chosen * m[:, None, None]).sum(0) / m.sum()
    return (share * ((p * m[:, None]).sum(0) / m.sum())).sum() * p.shape[-1]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("tokens", [20, 600])
def test_losses(device, masked, tokens):
    g = torch.Generator().manual_seed(3)
    exact = [torch.randn(tokens, 24, generator=g, dtype=torch.float64).requires_grad_() for _ in range(3)]
    mask = torch.rand(tokens, generator=g) > 0.4 if masked else None
    mine = [x.detach().float().to(device).requires_grad_() for x in exact]
    layers = [softmax_topk(x, 4, losses=True, token_mask=None if mask is None else mask.to(device)) for x in mine]
    kept = slice(None) if mask is None else mask
    for got, expected in (
        (load_balancing_loss(layers), switch_loss(exact, 4, mask)),
        (load_balancing_loss(layers[0]), switch_loss(exact[:1], 4, mask)),
        (router_z_loss(layers), torch.cat([x[kept] for x in exact]).logsumexp(-1).square().mean()),
    ):
        torch.testing.assert_close(got.cpu().double(), expected, rtol=1e-5, atol=1e-6)
        ours = torch.autograd.grad(got, mine, allow_unused=True, retain_graph=True)
        for o, e in zip(ours, torch.autograd.grad(expected, exact, allow_unused=True)):
            if e is not None:
                torch.testing.assert_close(o.cpu().double(), e, rtol=1e-4, atol=1e-8)


def test_losses_equal_those_of_transformers():
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    layers = tuple(torch.randn(2 * 30, 8, generator=torch.Generator().manual_seed(i)) for i in range(3))
    mask = torch.ones(2, 30)
    mask[1, 20:] = 0
    for attention in (None, mask):
        flat = None if attention is None else attention.view(-1)
        ours = load_balancing_loss([softmax_topk(x, 2, losses=True, token_mask=None if flat is None else flat.bool())
                                    for x in layers])  # fmt: skip
        theirs = mixtral.load_balancing_loss_func(layers, 8, 2, attention)
        torch.testing.assert_close(ours, theirs)


def test_shapes_and_layouts(device):
    x = torch.randn(4, 6, 10, generator=torch.Generator().manual_seed(0)).to(device)
    flat = route(x.reshape(24, 10), 3)
    got = route(x, 3, losses=True)
    assert got.weights.shape == got.experts.shape == (4, 6, 3) and got.logsumexp.shape == (4, 6)
    assert torch.equal(got.experts.view(24, 3), flat.experts) and torch.equal(got.weights.view(24, 3), flat.weights)
    for other in (x.transpose(0, 1), x[:, 1:], x[..., 1:9], x.transpose(1, 2).contiguous().transpose(1, 2), x[0, 0]):
        view = other.detach().requires_grad_()
        plain = other.detach().clone(memory_format=torch.contiguous_format).requires_grad_()
        a, b = route(view, 3), route(plain, 3)
        assert torch.equal(a.experts, b.experts)
        torch.testing.assert_close(a.weights, b.weights, atol=1e-6, rtol=1e-6)  # sums run over other lanes
        grads = [torch.autograd.grad(r.weights.square().sum(), p)[0] for r, p in ((a, view), (b, plain))]
        torch.testing.assert_close(*grads, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("shape", [(0, 8), (0, 3, 8), (3, 0, 8)])
def test_no_tokens(device, shape):
    x = torch.empty(shape, device=device, requires_grad=True)
    routing = route(x, 2, losses=True)
    assert routing.weights.shape == (*shape[:-1], 2) and (routing.counts == 0).all() and (routing.prob_sums == 0).all()
    assert torch.autograd.grad(routing.weights.sum(), x)[0].shape == shape


def test_upstream_of_any_layout(device):
    x = torch.randn(50, 16, generator=torch.Generator().manual_seed(0)).to(device).requires_grad_()
    grads = []
    for reduce in (lambda w: w.sum(), lambda w: w.mul(torch.ones_like(w)).sum(), lambda w: w.t().contiguous().sum()):
        grads.append(torch.autograd.grad(reduce(route(x, 3, renormalize=False).weights), x)[0])
    assert torch.equal(grads[0], grads[1]) and torch.equal(grads[0], grads[2])


def test_the_same_every_time(device):
    x = torch.randn(3000, 64, generator=torch.Generator().manual_seed(0)).to(device)
    a, b = (route(x, 6, losses=True) for _ in range(2))
    assert all(torch.equal(p, q) for p, q in zip(a[:5], b))


def traced(x, bias, mask):
    routing = sigmoid_topk(x, 3, selection_bias=bias, n_group=4, topk_group=2, scale=1.5, token_mask=mask, losses=True)
    scale = routing.counts.float().mean() + routing.experts.float().mean()
    replayed = route(x, 3, experts=routing.experts.flip(0), token_mask=mask, count_changed=True)
    loss = routing.weights.square().sum() + router_z_loss(routing) + load_balancing_loss(routing)
    return loss * scale + replayed.weights.square().sum() * replayed.changed


def test_compile_without_graph_breaks(dynamo, device):
    x = torch.randn(40, 16, generator=torch.Generator().manual_seed(0)).to(device).requires_grad_()
    bias, mask = torch.randn(16).to(device), (torch.arange(40) % 4 != 0).to(device)
    backend = "inductor" if device.type == "cuda" else "aot_eager"
    got = torch.compile(traced, fullgraph=True, backend=backend)(x, bias, mask)
    expected = traced(x, bias, mask)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(*(torch.autograd.grad(v, x)[0] for v in (got, expected)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_operations_are_well_formed(device, dtype):
    options = RouterOptions(3, "sigmoid", 4, 2, sums=True)
    x = torch.randn(20, 16, device=device, dtype=dtype)
    bias, mask = torch.randn(16, device=device), torch.arange(20, device=device) % 3 != 0
    torch.library.opcheck(torch.ops.onepass.route, (x, bias, mask, None, *options))
    weights, experts, _, prob_sums, logsumexp, _ = torch.ops.onepass.route(x, bias, mask, None, *options)
    given, options = experts.flip(0).short(), options._replace(count_changed=True)
    torch.library.opcheck(torch.ops.onepass.route, (x, bias, mask, given, *options))
    arguments = x, given.long(), mask, given, weights, prob_sums, logsumexp, *options
    torch.library.opcheck(torch.ops.onepass.route_gradient, arguments)


@pytest.mark.gpu
def test_cuda_graph():
    x = torch.randn(500, 64, device="cuda", requires_grad=True)

    def step():
        x.grad = None
        routing = sigmoid_topk(x, 6, n_group=8, topk_group=4, losses=True)
        (routing.weights.square().sum() + router_z_loss(routing)).backward()
        return routing

    graph, held = captured(step)
    gradient = x.grad
    for seed in range(2):
        x.data.copy_(torch.randn(500, 64, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        got = [t.clone() for t in (*held[:5], gradient)]
        assert all(torch.equal(a, b) for a, b in zip(got, (*step()[:5], x.grad)))


BAD = {
    "router_logits: expected a float16": lambda x: route(x.long(), 2),
    "router_logits: expected at most 1024 experts, got 1025": lambda x: route(torch.zeros(1, 1025), 2),
    "router_logits: expected a tensor, got [[1.0]]": lambda x: route([[1.0]], 1),
    "k: expected 1 to 8, got 9": lambda x: route(x, 9),
    "k: expected 1 to 8, got 0": lambda x: route(x, 0),
    "k: expected an int, got 2.0": lambda x: route(x, 2.0),
    "k: expected at most the 2 experts of 1 groups, got 3": lambda x: route(x, 3, n_group=4, topk_group=1),
    "n_group: expected a divisor of 8 experts, got 3": lambda x: route(x, 2, n_group=3),
    "topk_group: expected 1 to 4, got 5": lambda x: route(x, 2, n_group=4, topk_group=5),
    "group_score: expected 'max' for groups of one expert": lambda x: route(x, 2, n_group=8, topk_group=4),
    "group_score: expected one of 'top2_sum', 'max', got 'sum'": lambda x: route(x, 2, group_score="sum"),
    "score: expected one of 'softmax', 'sigmoid', 'sqrtsoftplus', got 'relu'": lambda x: route(x, 2, score="relu"),
    "selection_bias: expected shape (8,), got (7,)": lambda x: route(x, 2, selection_bias=torch.zeros(7)),
    "selection_bias: expected a floating-point tensor": lambda x: route(x, 2, selection_bias=torch.arange(8)),
    "token_mask: expected shape (4,), got (5,)": lambda x: route(x, 2, token_mask=torch.ones(5, dtype=torch.bool)),
    "token_mask: expected a bool": lambda x: route(x, 2, token_mask=torch.ones(4, dtype=torch.complex64)),
    "softcap: expected a finite number above 0, got 0.0": lambda x: route(x, 2, softcap=0.0),
    "eps: expected a finite number of at least 0, got -1.0": lambda x: route(x, 2, eps=-1.0),
    "scale: expected a number, got '1'": lambda x: route(x, 2, scale="1"),
    "routing: expected one or more from route(..., losses=True)": lambda x: load_balancing_loss(route(x, 2)),
}


def test_options_that_were_right_once_are_checked_by_type():
    x = torch.zeros(4, 8)
    route(x, 1, scale=1.0)
    with pytest.raises(TypeError, match="k: expected an int, got True"):
        route(x, True, scale=1.0)
    with pytest.raises(TypeError, match="scale: expected a number"):
        route(x, 1, scale=[1.0])


@pytest.mark.parametrize("message", BAD)
def test_one_clear_error(message):
    with pytest.raises((TypeError, ValueError)) as error:
        BAD[message](torch.randn(4, 8))
    assert message in str(error.value)


def test_the_shorthands():
    x, bias = torch.randn(5, 8), torch.randn(8)
    for a, b in (
        (softmax_topk(x, 2, renormalize=False), route(x, 2, renormalize=False)),
        (sigmoid_topk(x, 2, selection_bias=bias, n_group=4, topk_group=2, scale=2.0),
         route(x, 2, score="sigmoid", selection_bias=bias, n_group=4, topk_group=2, scale=2.0)),
    ):  # fmt: skip
        assert isinstance(a, Routing) and torch.equal(a.weights, b.weights) and torch.equal(a.experts, b.experts)
    assert onepass.moe.route is route


def fake_cuda(monkeypatch, zeros, stream, capturing):
    """Have `zeros` believe that the CPU is a GPU."""
    cuda = SimpleNamespace(current_device=lambda: 0, is_current_stream_capturing=lambda: capturing[0])
    on_cpu = lambda *shape, dtype, device: torch.zeros(*shape, dtype=dtype)  # noqa: E731
    monkeypatch.setattr(zeros, "torch", SimpleNamespace(
        zeros=on_cpu, cuda=cuda, int32=torch.int32, inference_mode=torch.inference_mode,
    ))  # fmt: skip
    active = SimpleNamespace(get_current_stream=lambda index: stream[0])
    monkeypatch.setattr(zeros, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(zeros, "_rows", {})
    monkeypatch.setattr(zeros, "GRAPHS", "no module")


def test_counters_are_cleared_and_handed_out_once(monkeypatch):
    zeros = pytest.importorskip("onepass.kernels.zeros")
    stream, capturing, cuda = [1], [False], torch.device("cuda", 0)
    fake_cuda(monkeypatch, zeros, stream, capturing)
    rows = [zeros.zeros(6, cuda) for _ in range(150)]
    assert all(r.shape == (6,) and r.dtype == torch.int32 and r.data_ptr() % 16 == 0 for r in rows)
    assert len({r.untyped_storage().data_ptr() for r in rows}) == 3  # 64 rows each
    for n, r in enumerate(rows):
        r += n
    assert [r.tolist() for r in rows] == [[n] * 6 for n in range(150)]
    assert all(r._version == 1 for r in rows)  # autograd would take the change of one for a change of all
    storages = {r.untyped_storage().data_ptr() for r in rows}
    stream[0] = 2  # it waits for no other
    with torch.inference_mode():
        other = zeros.zeros(6, cuda)
    assert other.untyped_storage().data_ptr() not in storages and not other.is_inference()
    stream[0], capturing[0] = 1, True  # a replay has to clear them
    captured = zeros.zeros(6, cuda)
    assert captured.untyped_storage().data_ptr() not in storages and captured.untyped_storage().nbytes() == 24


@pytest.mark.gpu
@pytest.mark.parametrize("experts, k", [(64, 6), (8, 2), (40, 16), (9, 2)])
@pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])
def test_counts_of_many_calls(experts, k, half):
    """On two streams. The counts of 8 experts were wrong when Triton was told by a mask what to count."""
    x = torch.randn(5000, experts, device="cuda", dtype=torch.bfloat16 if half else torch.float32)
    streams = torch.cuda.Stream(), torch.cuda.current_stream()
    torch.cuda.synchronize()
    found = []
    for n in range(150):
        with torch.cuda.stream(streams[n % 2]):
            found.append(route(x[: 4000 + n], k))
    torch.cuda.synchronize()
    for r in found:
        assert torch.equal(r.counts, torch.bincount(r.experts.flatten(), minlength=experts).int())
