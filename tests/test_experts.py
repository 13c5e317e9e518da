"""`moe.expert_mlp` against a definition that takes one token at a time, against transformers' experts, and PEFT's."""

import os
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from onepass.moe import Routing, expert_mlp, group_by_expert, scattered_linear

ACTIVATIONS = {
    "silu": lambda g, u: F.silu(g) * u,
    "gelu": lambda g, u: F.gelu(g) * u,
    "gelu_tanh": lambda g, u: F.gelu(g, approximate="tanh") * u,
    "swiglu_clamped": lambda g, u: (u.clamp(-7, 7) + 1) * g.clamp(max=7) * torch.sigmoid(1.702 * g.clamp(max=7)),
}


def definition(hidden, routing, gate_up, down, activation="silu", gate_up_bias=None, down_bias=None, transposed=False,
               interleaved=False, lora_gate_up=None, lora_down=None):  # fmt: skip
    """Float64, a token and an expert at a time."""

    def weight(w, lora, e):
        w = w[e].T if transposed else w[e]
        return w if lora is None else w + lora[2] * lora[1][e] @ lora[0][e]

    rows = []
    for x, weights, experts in zip(hidden, routing.weights, routing.experts):
        total = torch.zeros_like(x)
        for w, e in zip(weights, experts.tolist()):
            if 0 <= e < len(gate_up):
                h = weight(gate_up, lora_gate_up, e) @ x + (0 if gate_up_bias is None else gate_up_bias[e])
                gate, up = (h[::2], h[1::2]) if interleaved else h.chunk(2)
                y = weight(down, lora_down, e) @ ACTIVATIONS[activation](gate, up)
                total = total + w * (y + (0 if down_bias is None else down_bias[e]))
        rows.append(total)
    return torch.stack(rows) if rows else hidden * 1.0


def inputs(T=9, H=20, I=24, E=5, K=2, biased=False, rank=0, transposed=False, seed=0):  # noqa: E741
    generator = torch.Generator().manual_seed(seed)
    randn = lambda *shape: torch.randn(shape, dtype=torch.float64, generator=generator) * 0.5  # noqa: E731
    of = {"hidden": randn(T, H), "weights": torch.rand(T, K, dtype=torch.float64, generator=generator)}
    of["gate_up"] = randn(E, H, 2 * I) if transposed else randn(E, 2 * I, H)
    of["down"] = randn(E, I, H) if transposed else randn(E, H, I)
    if biased:
        of |= {"gate_up_bias": randn(E, 2 * I), "down_bias": randn(E, H)}
    if rank:
        of |= {"a1": randn(E, rank, H), "b1": randn(E, 2 * I, rank), "a2": randn(E, rank, I), "b2": randn(E, H, rank)}
    experts = torch.rand(T, E, generator=generator).argsort(-1)[:, :K]
    return of, experts


def run(function, of, experts, **options):
    """The result, and gradients of all that requires one, for one upstream gradient."""
    of = dict(of)
    adapters = {}
    for name, a, b, scale in (("lora_gate_up", "a1", "b1", 0.7), ("lora_down", "a2", "b2", 1.3)):
        if a in of:
            adapters[name] = of[a], of[b], scale
    biases = {name: of[name] for name in ("gate_up_bias", "down_bias") if name in of}
    routing = SimpleNamespace(weights=of["weights"], experts=experts)
    out = function(of["hidden"], routing, of["gate_up"], of["down"], **biases, **adapters, **options)
    wanted = {name: t for name, t in of.items() if t.requires_grad}
    upstream = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape)
    if not wanted:
        return out, {}
    found = torch.autograd.grad(out, list(wanted.values()), upstream.to(out), allow_unused=True)
    return out, dict(zip(wanted, found))


def leaves(of, dtype, device, frozen=()):
    return {
        name: t.to(device, torch.float32 if name == "weights" and dtype != torch.float64 else dtype)
        .detach().requires_grad_(name not in frozen)
        for name, t in of.items()
    }  # fmt: skip


def close(got, expected, tolerance=2e-6):
    out, grads = got
    exact, exact_grads = expected
    assert list(grads) == list(exact_grads)
    for name, a, b in [("out", out, exact), *[(n, grads[n], exact_grads[n]) for n in grads]]:
        b = torch.zeros(a.shape, dtype=torch.float64) if b is None else b
        scale = max(b.abs().max().item() if b.numel() else 0, 1e-3)
        assert torch.isfinite(a).all(), name
        assert (a.cpu().double() - b).abs().max().item() <= tolerance * scale if a.numel() else True, name


CASES = {
    "silu": {},
    "gelu": dict(activation="gelu"),
    "gelu, biased, adapters": dict(activation="gelu_tanh", biased=True, rank=4),
    "gpt-oss": dict(activation="swiglu_clamped", biased=True, transposed=True, interleaved=True, H=40, T=21),
    "transposed, adapters": dict(transposed=True, rank=3, I=40, E=3),
    "interleaved, adapters": dict(interleaved=True, rank=17, I=70, H=33),
    "adapters of a high rank": dict(rank=130, I=40),
    "all biased": dict(activation="swiglu_clamped", biased=True, rank=2, interleaved=True, transposed=True),
    "one expert": dict(E=1, K=1, T=40),
    "one expert a token": dict(K=1, T=50, biased=True, rank=3),
    "more experts than tokens": dict(E=37, K=6, T=3),
    "no width": dict(I=0, biased=True),
    "no hidden": dict(H=0),
    "no token": dict(T=0, biased=True, rank=2),
}


def split(case):
    options = {name: case[name] for name in ("activation", "transposed", "interleaved") if name in case}
    return {n: v for n, v in case.items() if n not in ("activation", "interleaved")}, options


@pytest.mark.parametrize("name", CASES)
def test_against_the_definition(device, name):
    sizes, options = split(CASES[name])
    of, experts = inputs(**sizes)
    expected = run(definition, leaves(of, torch.float64, "cpu"), experts, **options)
    got = run(expert_mlp, leaves(of, torch.float32, device), experts.to(device), **options)
    close(got, expected)


@pytest.mark.parametrize("name", ["gelu, biased, adapters", "gpt-oss"])
def test_float64(name):
    sizes, options = split(CASES[name])
    of, experts = inputs(**sizes)
    expected = run(definition, leaves(of, torch.float64, "cpu"), experts, **options)
    close(run(expert_mlp, leaves(of, torch.float64, "cpu"), experts, **options), expected, 1e-12)


@pytest.mark.parametrize("gates, upstream", [(400, 1), (0.003, 1e-5)])
def test_float16(device, gates, upstream):
    """Squares of large gates and products with small upstream gradients are no numbers of float16."""
    of, experts = inputs()
    of["gate_up"][:, :24] *= gates
    of["down"] /= max(gates, 1)
    of = {name: t.half().double() for name, t in of.items()}
    found = []
    for function, where, dtype in ((definition, "cpu", torch.float64), (expert_mlp, device, torch.float16)):
        tensors = leaves(of, dtype, where)
        routing = SimpleNamespace(weights=tensors["weights"], experts=experts.to(where))
        out = function(tensors["hidden"], routing, tensors["gate_up"], tensors["down"], activation="gelu_tanh")
        up = (upstream * torch.linspace(-1, 1, out.numel(), dtype=torch.float64)).half().view(out.shape).to(out)
        names = ["weights", "hidden", "gate_up"] if upstream == 1 else ["weights"]
        grads = torch.autograd.grad(out, [tensors[n] for n in names], up)
        found.append([t.cpu().double() for t in (out, *grads)])
    for exact, got in zip(*found, strict=True):
        torch.testing.assert_close(got, exact, rtol=0, atol=1e-2 * exact.abs().max().item())


@pytest.mark.parametrize("frozen", [
    ("gate_up", "down", "gate_up_bias", "down_bias"), ("hidden",), ("weights", "a1"), ("down", "b2", "hidden"),
    ("hidden", "weights", "gate_up", "down", "gate_up_bias", "down_bias", "a1", "b1", "a2"),
], ids="+".join)  # fmt: skip
def test_what_is_frozen_has_no_gradient_and_changes_no_other(device, frozen):
    of, experts = inputs(biased=True, rank=4)
    expected = run(definition, leaves(of, torch.float64, "cpu", frozen), experts)
    close(run(expert_mlp, leaves(of, torch.float32, device, frozen), experts.to(device)), expected)


IDS = {
    "out of range": lambda e: torch.where(e == 1, 99, torch.where(e == 2, -3, e)),
    "none in range": lambda e: e + 5,
    "all to one": lambda e: torch.full_like(e, 3),
    "twice the same": lambda e: e[:, :1].expand_as(e).contiguous(),
}


@pytest.mark.pairs
@pytest.mark.parametrize("ids", IDS)
@pytest.mark.parametrize("rank, K", [(0, 2), (2, 2), (2, 1)])
def test_any_ids(device, ids, rank, K):
    of, experts = inputs(T=19, K=K, biased=True, rank=rank)
    experts = IDS[ids](experts)
    with_a_graph = lambda hidden, *a, **o: definition(hidden, *a, **o) + 0 * hidden  # noqa: E731
    expected = run(with_a_graph, leaves(of, torch.float64, "cpu"), experts)
    close(run(expert_mlp, leaves(of, torch.float32, device), experts.to(device)), expected)


@pytest.mark.parametrize("bad, activation", [(float("inf"), "silu")] + [(float("nan"), name) for name in ACTIVATIONS])
def test_a_row_that_is_no_number_stays_alone(device, bad, activation):
    """It reaches its own result and the gradients of its experts' weights; no row or expert beside it in a tile."""
    of, experts = inputs(T=40, E=4, K=1, biased=True, rank=2)
    tensors = leaves(of, torch.float32, device)
    clean, expected = run(expert_mlp, tensors, experts.to(device), activation=activation)
    with torch.no_grad():
        tensors["hidden"][7] = bad
    out, grads = run(expert_mlp, tensors, experts.to(device), activation=activation)
    rows = torch.arange(40, device=device) != 7
    others = torch.arange(4, device=device) != experts[7, 0].item()
    assert out[7].isnan().all() and torch.equal(out[rows], clean[rows])
    for name, grad in grads.items():
        kept = rows if name in ("hidden", "weights") else others
        assert torch.equal(grad[kept], expected[name][kept]), name
        assert grad[~kept].isnan().any() or name == "down_bias"


@pytest.mark.pairs
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("first_is_sorted", [False, True])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_gradients_of_weights_leave_out_the_rows_of_other_experts(device, bad, first_is_sorted, transposed):
    """Also in tiles of the largest size, whose last rows are those of the next expert, or of none."""
    if device.type != "cuda" and not os.environ.get("TRITON_INTERPRET"):
        pytest.skip("a kernel is called")
    weight_gradient = pytest.importorskip("onepass.kernels.grouped_weight_gradient").weight_gradient
    E, K, N = 4, 2, 264
    generator = torch.Generator().manual_seed(0)
    experts = torch.multinomial(torch.tensor([0.3, 0.0, 0.4, 0.3, 0.2]), 700, True, generator=generator)
    experts = torch.where(experts == E, -1, experts).view(-1, K).to(device)  # no process has the last; none chose 1
    groups = group_by_expert(experts, E, torch.empty(0, device=device))
    gathered, rows = (torch.randn(n, N, generator=generator).to(device, torch.float16) for n in (350, 700))
    ends = groups.offsets.tolist()
    rows[ends[2], 3] = rows[ends[4] :] = bad  # the first row of the third expert, and rows that belong to none
    rows_of = groups.order.long() // K
    operands = (rows, gathered) if first_is_sorted else (gathered, rows)
    like = torch.empty(E, N, N, dtype=torch.float16, device=device)
    share = {"share_b" if first_is_sorted else "share_a": K}
    found = weight_gradient(*operands, like, groups, **share, transposed=transposed)
    for e in range(E):
        some = slice(ends[e], ends[e + 1])
        of_expert = rows[some].double(), gathered[rows_of[some]].double()
        left, right = of_expert if first_is_sorted != transposed else of_expert[::-1]
        torch.testing.assert_close(found[e].double(), left.T @ right, atol=0.05, rtol=0.01, equal_nan=True)


@pytest.mark.parametrize("name", ["gate_up", "weights"])
def test_another_layout_after_a_valid_call(name):
    """It is refused as in a first call."""
    tensors = dict(
        x=torch.randn(4, 6), weights=torch.rand(4, 2), gate_up=torch.randn(3, 10, 6), down=torch.randn(3, 6, 5)
    )
    experts = torch.randint(3, (4, 2))

    def call(x, weights, gate_up, down):
        return expert_mlp(x, Routing(weights, experts, None), gate_up, down)

    call(**tensors)
    with pytest.raises(TypeError, match=r"expected a dense tensor, got a torch\.sparse_coo one"):
        call(**tensors | {name: tensors[name].to_sparse()})


@pytest.mark.parametrize("rank", [0, 2])
def test_compiled_without_a_break(device, rank):
    torch._dynamo.reset()
    of, experts = inputs(biased=True, rank=rank)
    tensors = leaves(of, torch.float32, device)
    expected = run(expert_mlp, tensors, experts.to(device))
    backend = "inductor" if device.type == "cuda" else "aot_eager"
    names = list(tensors)

    def traced(experts, *values):
        of = dict(zip(names, values))
        adapters = {}
        if rank:
            adapters = {"lora_gate_up": (of["a1"], of["b1"], 0.7), "lora_down": (of["a2"], of["b2"], 1.3)}
        routing = Routing(of["weights"], experts, experts)
        biases = {name: of[name] for name in ("gate_up_bias", "down_bias")}
        return expert_mlp(of["hidden"], routing, of["gate_up"], of["down"], **biases, **adapters)

    out = torch.compile(traced, fullgraph=True, backend=backend)(experts.to(device), *tensors.values())
    upstream = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape).to(out)
    got = out, dict(zip(names, torch.autograd.grad(out, list(tensors.values()), upstream)))
    close(got, (expected[0].cpu().double(), {n: g.cpu().double() for n, g in expected[1].items()}))


class Operations(TorchDispatchMode):
    """Keeps the operations of onepass that are called, with their arguments."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "onepass":
            self.calls.append((function, args))
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("trains", [True, False])
def test_operations_are_well_formed(device, trains):
    """A compiler allocates what the fake implementations say."""
    of, experts = inputs(rank=2 if trains else 0)
    tensors = leaves(of, torch.float32, device, frozen=() if trains else of)
    with Operations() as of_step:
        run(expert_mlp, tensors, experts.to(device))
        y = scattered_linear(tensors["hidden"], tensors["gate_up"], experts.to(device), weights=tensors["weights"])
        if trains:
            y.sum().backward()
    names = {f.name().partition("::")[2] for f, _ in of_step.calls}
    both = {"expert_mlp", "scattered_linear", "group_by_expert"}
    assert names == both | ({"expert_mlp_gradient", "scattered_linear_gradient"} if trains else set())
    for function, arguments in of_step.calls:
        torch.library.opcheck(function, arguments, test_utils=("test_schema", "test_faketensor"))


def test_autocast_takes_all_but_the_weights_of_the_routing(device):
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("the interpreter has no products of bfloat16")
    of, experts = inputs(T=30)
    exact, grads = run(definition, leaves(of, torch.float64, "cpu"), experts)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        out, found = run(expert_mlp, leaves(of, torch.float32, device), experts.to(device))
    assert out.dtype == torch.bfloat16 and {g.dtype for g in found.values()} == {torch.float32}
    for a, b in [(out, exact), *zip(found.values(), grads.values())]:
        assert (a.cpu().double() - b).abs().max() < 3e-2 * b.abs().max()


def test_autocast_leaves_float64_alone():
    of, experts = inputs()
    tensors = leaves(of, torch.float64, "cpu")
    expected = run(expert_mlp, tensors, experts)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, grads = run(expert_mlp, tensors, experts)
    assert out.dtype == torch.float64 and torch.equal(out, expected[0])
    assert all(torch.equal(grads[name], g) for name, g in expected[1].items())


def test_leading_dimensions_and_strides(device):
    of, experts = inputs(T=12)
    of = {n: t.to(device, torch.float32) for n, t in of.items()}
    routing = Routing(of["weights"], experts.to(device), experts)
    expected = expert_mlp(of["hidden"], routing, of["gate_up"], of["down"])
    shaped = Routing(of["weights"].view(3, 4, -1), experts.to(device).view(3, 4, -1), experts)
    got = expert_mlp(of["hidden"].view(3, 4, -1), shaped, of["gate_up"], of["down"])
    assert got.shape == (3, 4, 20) and torch.equal(got.view(12, -1), expected)
    hidden = of["hidden"].T.contiguous().T
    gate_up, down = of["gate_up"].mT.contiguous().mT, of["down"].permute(1, 2, 0).contiguous().permute(2, 0, 1)
    assert not hidden.is_contiguous() and not gate_up.is_contiguous() and down.stride(2) != 1
    torch.testing.assert_close(expert_mlp(hidden, routing, gate_up, down), expected)
    again = expert_mlp(of["hidden"], routing._replace(experts=routing.experts.int()), of["gate_up"], of["down"])
    assert torch.equal(again, expected)


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements():
    """The last tokens, whose rows lie beyond, are as they are alone."""
    T, H, I, E, K = 66000, 64, 2080, 16, 8  # noqa: E741
    assert T * K * 2 * I > 2**31
    randn = lambda *shape: (torch.randn(*shape, device="cuda") * 0.1).bfloat16()  # noqa: E731
    hidden, weights, upstream = randn(T, H), torch.rand(T, K, device="cuda"), randn(T, H)
    both = randn(E, 2 * I, H), randn(E, H, I)
    ids = torch.rand(T, E, device="cuda").topk(K).indices
    found = []
    for rows in (slice(None), slice(T - 50, T)):
        leaves = hidden[rows].detach().requires_grad_(), weights[rows].detach().requires_grad_()
        out = expert_mlp(leaves[0], Routing(leaves[1], ids[rows], ids), *both)
        found.append([t[-50:] for t in (out, *torch.autograd.grad(out, leaves, upstream[rows]))])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2 * b.abs().max().item())


def test_second_derivatives_are_refused():
    of, experts = inputs()
    tensors = leaves(of, torch.float32, "cpu")
    out = expert_mlp(
        tensors["hidden"], Routing(tensors["weights"], experts, experts), tensors["gate_up"], tensors["down"]
    )
    with pytest.raises(RuntimeError, match="second derivatives"):
        torch.autograd.grad(out.sum(), tensors["hidden"], create_graph=True)


BAD = {
    "activation: expected one of 'silu'": dict(activation="relu"),
    "hidden: expected a floating-point tensor": dict(hidden=torch.zeros(9, 20, dtype=torch.long)),
    "routing.experts: expected an int32 or int64 tensor": dict(experts=torch.zeros(9, 2)),
    "routing.experts: expected shape (9, 'K')": dict(experts=torch.zeros(8, 2, dtype=torch.long)),
    "routing.weights: expected shape (9, 2)": dict(weights=torch.zeros(9, 3)),
    "gate_up_weight: expected a tensor of three dimensions": dict(gate_up=torch.zeros(48, 20)),
    "gate_up_weight: expected shape (5, 48, 20)": dict(gate_up=torch.zeros(5, 46, 20)),
    "gate_up_weight: expected one expert or more, got shape (0, 48, 20)": dict(
        gate_up=torch.zeros(0, 48, 20), down=torch.zeros(0, 20, 24)
    ),
    "down_weight: expected shape (5, 20, 24)": dict(down=torch.zeros(5, 21, 24)),
    "down_weight: expected torch.float32, that of hidden, got torch.float16": dict(down=torch.zeros(5, 20, 24).half()),
    "gate_up_bias: expected shape (5, 48)": dict(gate_up_bias=torch.zeros(48)),
    "lora_down[0]: expected shape (5, 'R', 24)": dict(lora_down=(torch.zeros(5, 3, 20), torch.zeros(5, 20, 3), 1.0)),
    "lora_down[1]: expected shape (5, 20, 3)": dict(lora_down=(torch.zeros(5, 3, 24), torch.zeros(5, 20, 4), 1.0)),
    "limit: expected a finite number above 0": dict(limit=0.0),
    "hidden: expected a floating-point tensor (..., H), got [1.0] (list)": dict(hidden=[1.0]),
    "routing.weights: expected a floating-point tensor, got None": dict(weights=None),
    "gate_up_weight: expected a tensor of three dimensions, got None": dict(gate_up=None),
    "lora_down: expected (A, B, scaling)": dict(lora_down=(torch.zeros(5, 3, 24), torch.zeros(5, 20, 3))),
    "lora_gate_up: expected (A, B, scaling)": dict(lora_gate_up=(torch.zeros(5, 3, 20), None, 1.0)),
    "lora_gate_up[2]: expected a number": dict(lora_gate_up=(torch.zeros(5, 3, 20), torch.zeros(5, 48, 3), "1")),
}  # fmt: skip


@pytest.mark.parametrize("message", BAD)
def test_one_clear_error(message):
    of, experts = inputs()
    given = {n: t.float() for n, t in of.items()} | {"experts": experts} | BAD[message]
    routing = SimpleNamespace(weights=given.pop("weights"), experts=given.pop("experts"))
    with pytest.raises((TypeError, ValueError)) as error:
        expert_mlp(given.pop("hidden"), routing, given.pop("gate_up"), given.pop("down"), **given)
    assert message in str(error.value)


def test_a_single_token_without_a_dimension():
    of, experts = inputs()
    both = of["gate_up"], of["down"]
    expected = expert_mlp(of["hidden"], Routing(of["weights"], experts, None), *both)[3]
    got = expert_mlp(of["hidden"][3], Routing(of["weights"][3], experts[3], None), *both)
    torch.testing.assert_close(got, expected)


def test_sizes_that_fit_only_transposed_weights():
    """They are checked again where they were valid in a call with the other layout, and in another dtype."""
    of, experts = inputs(transposed=True)
    arguments = of["hidden"], Routing(of["weights"], experts, None), of["gate_up"], of["down"]
    expert_mlp(*arguments, transposed=True)
    with pytest.raises(ValueError, match="gate_up_weight: expected shape"):
        expert_mlp(*arguments)
    with pytest.raises(TypeError, match=r"down_weight: expected torch\.float64, that of hidden"):
        expert_mlp(*arguments[:3], of["down"].float(), transposed=True)


def test_what_is_no_routing():
    with pytest.raises(TypeError, match="routing: expected a Routing"):
        expert_mlp(torch.zeros(3, 4), torch.zeros(3, 2), torch.zeros(2, 6, 4), torch.zeros(2, 4, 3))


def test_bitwise_reproducible(device):
    of, experts = inputs(T=200, E=3, biased=True, rank=2)
    results = [run(expert_mlp, leaves(of, torch.float32, device), experts.to(device)) for _ in range(2)]
    for a, b in zip(*([out, *grads.values()] for out, grads in results)):
        assert torch.equal(a, b)


def test_memory_of_a_forward_and_of_frozen_weights(monkeypatch):
    """No gradient is allocated that nobody needs; each would be as large as the weights of all experts."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    hidden, routing = torch.randn(2, 8, requires_grad=True), Routing(torch.ones(2, 1), torch.tensor([[0], [3]]), None)
    gate_up, down = torch.randn(64, 64, 8), torch.randn(64, 8, 32)
    with torch.profiler.profile(profile_memory=True) as profile:
        expert_mlp(hidden, routing, gate_up, down).sum().backward()
    assert max(e.self_cpu_memory_usage for e in profile.key_averages()) < down.nbytes / 2
