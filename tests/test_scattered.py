"""`moe.scattered_linear` against one product for each token and expert, in every order of rows, and its modules."""

import itertools

import pytest
import torch

from onepass.moe import GLUMLP, ParallelExperts, Routing, expert_mlp, group_by_expert, scattered_linear

T, K, E, INPUTS, OUTPUTS = 11, 3, 5, 20, 36


def inputs(device, dtype, ids=lambda e: e):
    generator = torch.Generator().manual_seed(0)
    randn = lambda *shape: torch.randn(shape, dtype=torch.float64, generator=generator)  # noqa: E731
    experts = ids(torch.rand(T, E, generator=generator).argsort(-1)[:, :K])
    tensors = randn(T, INPUTS), randn(T * K, INPUTS), randn(E, OUTPUTS, INPUTS), randn(E, OUTPUTS), randn(T, K)
    return experts.to(device), [t.to(device, dtype).requires_grad_() for t in tensors]


def definition(x, weight, bias, experts, order, weights, grouped_in, grouped_out):
    """A slot at a time; ``order`` is that of grouped rows."""
    place = {slot: n for n, slot in enumerate(order.tolist())}
    rows = []
    for slot, e in enumerate(experts.flatten().tolist()):
        row = x[place[slot]] if grouped_in else x[slot // K]
        rows.append(weight[e] @ row + bias[e] if 0 <= e < E else 0 * (weight[0] @ row))
    rows = torch.stack(rows)
    if weights is not None:
        return (rows.view(T, K, -1) * weights.unsqueeze(-1)).sum(1)
    return rows[order.long()] if grouped_out else rows


@pytest.mark.pairs
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("ids", [lambda e: e, lambda e: torch.where(e == 2, -1, torch.where(e == 4, E, e))])
@pytest.mark.parametrize("grouped_in, grouped_out, weighted", [
    case for case in itertools.product((False, True), repeat=3) if not (case[1] and case[2])
])  # fmt: skip
def test_against_the_definition(device, grouped_in, grouped_out, weighted, ids, transposed):
    found = []
    for dtype, where in ((torch.float64, "cpu"), (torch.float32, device)):
        experts, (of_tokens, of_slots, weight, bias, weights) = inputs(where, dtype, ids)
        x, weights = of_slots if grouped_in else of_tokens, weights if weighted else None
        groups = group_by_expert(experts, E, x)
        if dtype == torch.float64:
            out = definition(x, weight, bias, experts, groups.order, weights, grouped_in, grouped_out)
        else:
            w = weight.mT if transposed else weight
            out = scattered_linear(x, w, experts, groups, bias=bias, weights=weights, transposed=transposed,
                                   grouped_in=grouped_in, grouped_out=grouped_out)  # fmt: skip
        wanted = [t for t in (x, weight, bias, weights) if t is not None]
        upstream = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape).to(out)
        found.append([out, *torch.autograd.grad(out, wanted, upstream)])
    for exact, got in zip(*found, strict=True):
        torch.testing.assert_close(got.cpu().double(), exact, rtol=1e-5, atol=1e-5)


def test_small_upstream_gradients_in_float16(device):
    """Products with the outputs are no numbers of float16."""
    found = []
    for dtype, where in ((torch.float64, "cpu"), (torch.float16, device)):
        experts, (x, _, weight, _, weights) = inputs(where, torch.float16)
        x, weight, weights = (0.1 * x).to(dtype), (0.1 * weight).to(dtype), weights.to(dtype)
        out = scattered_linear(x, weight, experts, weights=weights)
        upstream = torch.linspace(-1e-5, 1e-5, out.numel(), dtype=torch.float64).half().view(out.shape).to(out)
        found.append(torch.autograd.grad(out, weights, upstream)[0].cpu().double())
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-2 * found[0].abs().max().item())


def test_a_block_of_ones_own(device):
    """Two layers, grouped between, are the experts of `expert_mlp`; and `GLUMLP` is these."""
    experts, (x, *_, weights) = inputs(device, torch.float32)
    block = GLUMLP(INPUTS, 24, E, bias=True).to(device)
    with torch.no_grad():
        for p in block.parameters():
            p.normal_(generator=torch.Generator(device).manual_seed(1))
    routing = Routing(weights, experts, experts)
    groups = group_by_expert(experts, E, x)
    gate, up = block.experts(x, experts, groups, grouped_out=True).chunk(2, -1)
    a = torch.nn.functional.silu(gate) * up
    out = block.output_experts(a, experts, groups, grouped_in=True, weights=weights)
    torch.testing.assert_close(block(x, routing), out, rtol=1e-5, atol=1e-4)
    first, second = block.experts, block.output_experts
    same = expert_mlp(x, routing, first.weight, second.weight, gate_up_bias=first.bias, down_bias=second.bias)
    assert torch.equal(block(x, routing), same)


def test_without_groups_and_without_bias():
    experts, (x, *_) = inputs("cpu", torch.float32)
    layer = ParallelExperts(E, INPUTS, OUTPUTS)
    assert (
        layer.bias is None
        and str(layer) == f"ParallelExperts(num_experts={E}, output_size={OUTPUTS}, input_size={INPUTS})"
    )
    assert torch.equal(layer(x, experts), layer(x, experts, group_by_expert(experts, E, x)))


@pytest.mark.parametrize("rows", [0, 1, 700])
@pytest.mark.parametrize("outside", [0, 5])
def test_rows_that_are_grouped_already_are_not_sorted(device, rows, outside):
    """Counts give the groups that a sort gives, of experts without rows too, and those give the same experts."""
    counts = torch.tensor([0, rows, 3, 0, rows // 2], dtype=torch.int64 if outside else torch.int32)
    ids = torch.arange(E).repeat_interleave(counts.long())
    experts = torch.cat([ids, torch.full((outside,), E)]).unsqueeze(1).to(device)
    generator = torch.Generator().manual_seed(2)
    x, first, second = (
        torch.randn(n, generator=generator).to(device) for n in ((len(experts), 4), (E, 6, 4), (E, 4, 3))
    )
    expected, found = group_by_expert(experts, E, x), group_by_expert(experts, E, x, counts=counts.to(device))
    tiles = expected.tile_list[:-2].view(-1, 5)
    used = (tiles[:, 0] < E).nonzero().flatten()  # the rows of unused tiles are not read
    for name, a, b in zip(expected._fields, expected, found):
        if name == "tile_list":
            a, b = (torch.cat([t[:-2].view(-1, 5)[used].flatten(), t[-2:]]) for t in (a, b))
        assert a.dtype == b.dtype and torch.equal(a, b), name
    routing = Routing(torch.ones(len(experts), 1, device=device), experts, counts)
    with pytest.MonkeyPatch.context() as m:
        m.setattr("onepass.moe.experts.group_by_expert", pytest.fail)
        out = expert_mlp(x, routing, first, second, groups=found)
    assert torch.equal(out, expert_mlp(x, routing, first, second))


@pytest.mark.parametrize("counts, message", [
    ([1, 2], r"counts: expected an int32 or int64 tensor, got \[1, 2\] \(list\)"),
    (torch.ones(E), "counts: expected an int32 or int64 tensor, got torch.float32"),
    (torch.tensor([3, 1]), r"counts: expected shape \(5,\), got \(2,\)"),
    (torch.tensor([2, 2, 0, 0, 0]), r"counts: expected those of experts, .* got \[2, 2, 0, 0, 0\] for experts with \["),
    (torch.tensor([3, 1, 0, 0, 0], device="meta"), "counts: expected device cpu"),
])  # fmt: skip
def test_errors_of_counts(counts, message):
    with pytest.raises((TypeError, ValueError), match=message):
        group_by_expert(torch.tensor([[0], [0], [0], [1], [E]]), E, torch.zeros(1), counts=counts)
    for ids in ([[1], [0], [0], [0]], [[-1], [0], [0], [0], [1]]):
        with pytest.raises(ValueError, match=r"counts: .* for unsorted experts"):
            group_by_expert(torch.tensor(ids), E, torch.zeros(1), counts=torch.tensor([3, 1, 0, 0, 0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_autocast(monkeypatch, dtype):
    monkeypatch.setenv("TRITON_INTERPRET", "")  # which has no products of bfloat16
    experts, (x, _, weight, bias, weights) = inputs("cpu", dtype)
    tensors = x, weight, bias, weights
    expected = scattered_linear(x, weight, experts, bias=bias, weights=weights)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = scattered_linear(x, weight, experts, bias=bias, weights=weights)
    assert out.dtype == (torch.float64 if dtype == torch.float64 else torch.bfloat16)
    upstream = torch.linspace(-1, 1, out.numel()).view(out.shape)
    found = [(y, *torch.autograd.grad(y, tensors, upstream.to(y))) for y in (out, expected)]
    for got, exact in zip(*found, strict=True):
        assert (got - exact).abs().max() <= (0 if dtype == torch.float64 else 3e-2) * exact.abs().max()


GROUPS = group_by_expert(torch.zeros(T, K, dtype=torch.long), E, torch.zeros(1))


@pytest.mark.parametrize("change, message", [
    (dict(x=torch.zeros(3)), "x: expected a floating-point tensor"),
    (dict(x=torch.zeros(T + 1, INPUTS)), "x: expected shape"),
    (dict(weight=torch.zeros(E, OUTPUTS, INPUTS).half()), "weight: expected a tensor of torch.float32, that of x"),
    (dict(weight=torch.zeros(OUTPUTS, INPUTS)), "weight: expected a tensor of three dimensions"),
    (dict(weight=torch.zeros(0, OUTPUTS, INPUTS)), "weight: expected one expert or more, got shape"),
    (dict(experts=torch.zeros(T, K)), "experts: expected an int32 or int64"),
    (dict(experts=torch.zeros(T, K), groups=GROUPS), "experts: expected an int32 or int64"),
    (dict(bias=torch.zeros(E, 3)), "bias: expected shape"),
    (dict(bias=torch.zeros(E, OUTPUTS).double()), "bias: expected a tensor of torch.float32, that of x"),
    (dict(weights=torch.zeros(T, K).int()), "weights: expected a floating-point tensor"),
    (dict(groups=torch.zeros(T * K)), "groups: expected what `group_by_expert` returns"),
    (dict(weights=torch.zeros(T, 1)), "weights: expected shape"),
    (dict(weights=torch.zeros(T, K), grouped_out=True), "grouped_out: expected False"),
    (dict(groups=group_by_expert(torch.zeros(T, K, dtype=torch.long), E + 1, torch.zeros(1))), "groups.offsets"),
])  # fmt: skip
def test_errors(change, message):
    experts, (x, _, weight, *_) = inputs("cpu", torch.float32)
    with pytest.raises((TypeError, ValueError), match=message):
        scattered_linear(**(dict(x=x, weight=weight, experts=experts) | change))
