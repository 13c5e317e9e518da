"""The grouped GEMM whose warps have different roles, which Hopper GPUs run."""

from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch

from on_hopper import ON_HOPPER
from onepass.core.moe_options import Product
from onepass.moe import Routing, expert_mlp

pytest.importorskip("triton")
module = import_module("onepass.kernels.grouped_gemm")
hopper = import_module("onepass.kernels.grouped_gemm_hopper")
sort_by_expert = import_module("onepass.kernels.token_sort").sort_by_expert


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The launches of the kernel."""
    found: list[Any] = []
    monkeypatch.setattr(module, "hopper_plan", lambda *about: found.append(about) or hopper.hopper_plan(*about))
    return found


# Assignments, experts, columns and K; the rank of an adapter; whether the rows are weighted and scattered.
SHAPES = [
    (1024, 4, 256, 128, 0, False),
    (4096, 8, 2048, 512, 16, False),
    (3001, 5, 520, 1000, 0, True),
    (2500, 7, 384, 72, 72, True),
    (700, 6, 1288, 136, 64, False),
    (20000, 16, 264, 320, 128, True),
    (2000, 5, 516, 328, 0, False),  # rows of a result that do not start on 16 bytes
    (2000, 5, 516, 328, 16, True),
    (3200, 10, 2048, 512, 0, False),  # experts of 129 to 192 rows, from here on
    (2600, 8, 520, 1000, 0, True),
    (2250, 7, 384, 72, 0, True),
    (2900, 9, 516, 328, 0, False),
    (2900, 9, 516, 328, 24, True),
    (6400, 20, 264, 320, 0, True),
    (20800, 64, 1288, 328, 0, True),  # several tiles for each program
    (9000, 3, 520, 264, 0, False),  # more than 16 tiles of an expert
    (1500, 4, 256, 4160, 0, False),  # long rows
]


def tensors(shape: tuple[Any, ...], dtype: torch.dtype, by: str, lora_by: str) -> tuple[Any, ...]:
    """Sorted rows, a weight and an adapter that are contiguous in K or N, a bias, routing weights, and their groups.

    Expert 1 has no row, expert 0 has half of them, and two assignments are to experts out of range.
    """
    assignments, E, N, K, R, _ = shape

    def randn(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, device="cuda").to(dtype)

    def weight(columns: int, contiguous: str) -> torch.Tensor:
        w = randn(E, N, columns) * columns**-0.5
        return w if contiguous == "K" else w.mT.contiguous().mT

    torch.manual_seed(assignments)
    experts = torch.randint(-E, E, (assignments, 1), device="cuda").clamp(min=0)
    experts[experts == 1] = 0
    experts[5], experts[7] = E, -1
    x = randn(assignments, K + 8)[:, :K]  # rows with elements between them
    adapter = (randn(assignments, R), weight(R, lora_by)) if R else None
    routing = torch.rand(assignments, device="cuda")
    return x, weight(K, by), adapter, randn(E, N), routing, sort_by_expert(experts, E)


def definition(x: Any, w: Any, adapter: Any, bias: Any, routing: Any, groups: Any, scale: float) -> torch.Tensor:
    """In float64, the rows sorted by expert; NaN for assignments out of range."""
    out = torch.full((len(x), w.shape[1]), torch.nan, dtype=torch.float64, device=x.device)
    bounds = groups.offsets.tolist()
    for e in range(len(w)):
        rows = slice(bounds[e], bounds[e + 1])
        y = x[rows].double() @ w[e].double().T
        if bias is not None:
            y += bias[e].double()
        if adapter is not None:
            y += adapter[0][rows].double() @ adapter[1][e].double().T
        out[rows] = scale * y * (1 if routing is None else routing[groups.order[rows].long()].double()[:, None])
    return out


@pytest.mark.gpu
@ON_HOPPER
@pytest.mark.parametrize("lora_by", ["K", "N"])
@pytest.mark.parametrize("by", ["K", "N"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_its_definition(
    planned: list[Any], shape: tuple[Any, ...], dtype: torch.dtype, by: str, lora_by: str
) -> None:
    if shape[4] == 0 and lora_by == "N":
        pytest.skip("has no adapter")
    if shape[2] % 8 and "N" in (by, lora_by):
        pytest.skip("no descriptor reads such a weight")
    x, w, adapter, bias, routing, groups = tensors(shape, dtype, by, lora_by)
    weighted = shape[-1]
    scale = 0.5 if weighted else 1.0
    bias = bias if weighted or adapter is not None else None
    given = dict(adapter=adapter, bias=bias, scale=scale, scatter=weighted, weights=routing if weighted else None)
    untouched = torch.full((len(x), shape[2]), 7.0, device="cuda", dtype=dtype)
    found = module.grouped_gemm(x, w, groups, **given, out=untouched)
    assert planned, "another kernel was launched"
    if weighted:
        found = found[groups.order.long()]
    expected = definition(x, w, adapter, bias, routing if weighted else None, groups, scale)
    there = int(groups.offsets[-1])
    limit = 2.0 ** (-8 if dtype == torch.bfloat16 else -11)  # half a unit in the last place, and float32's sum
    error = (found[:there].double() - expected[:there]).abs()
    assert (error <= limit * expected[:there].abs() + 1e-4).all()
    assert (found[there:] == 7).all(), "rows of assignments out of range are not written"


@pytest.mark.gpu
@ON_HOPPER
@pytest.mark.parametrize("share", [0, 1])
@pytest.mark.parametrize("biased", [True, False])  # without a bias, a tile does not begin with zeros
@pytest.mark.parametrize("assignments", [2000, 40000])  # the second has several tiles for each program
def test_rows_that_are_not_finite_stay_alone(planned: list[Any], assignments: int, biased: bool, share: int) -> None:
    x, w, _, bias, _, groups = tensors((assignments, 4, 512, 520, 0, False), torch.bfloat16, "K", "K")
    bias = bias if biased else None
    expected = module.grouped_gemm(x, w, groups, bias=bias, share=share)
    x[::7] = torch.inf
    x[3::7] = torch.nan
    found = module.grouped_gemm(x, w, groups, bias=bias, share=share)
    assert planned, "another kernel was launched"
    there = int(groups.offsets[-1])
    finite = (x[groups.order.long()] if share else x).isfinite().all(1)[:there]
    assert torch.equal(found[:there][finite], expected[:there][finite])
    assert not found[:there][~finite].isfinite().any()


@pytest.mark.gpu
@ON_HOPPER
@pytest.mark.parametrize("options", [dict(), dict(glu=True), dict(scatter=True)], ids=str)
@pytest.mark.parametrize("columns", [512, 516])
@pytest.mark.parametrize("E", [6, 12])
def test_rows_in_the_order_of_their_experts(
    monkeypatch: pytest.MonkeyPatch, planned: list[Any], options: dict[str, Any], columns: int, E: int
) -> None:
    """As other processes send them, each sorted by expert: descriptors load and store ranges of them, others not."""
    torch.manual_seed(columns)
    of_process = [torch.randint(-1, E, (n, 1), device="cuda").clamp(min=0).sort(0)[0] for n in (900, 1100, 77)]
    ids = torch.cat(of_process)
    ids[1000] = E  # out of range, in the middle of a range
    groups = sort_by_expert(ids, E)
    x = torch.randn(2077, 200, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(E, 2 * columns, 200, device="cuda", dtype=torch.bfloat16)
    routing = torch.rand(2077, device="cuda") if options.get("scatter") else None
    out = torch.full((2077, columns if options.get("glu") else 2 * columns), 7.0, device="cuda", dtype=x.dtype)
    found = module.grouped_gemm(x, w, groups, share=1, weights=routing, **options, out=out.clone())
    assert planned
    monkeypatch.setattr(module, "hopper_reads", lambda *_, **__: None)
    assert torch.equal(found, module.grouped_gemm(x, w, groups, share=1, weights=routing, **options, out=out))


EXPERTS = [  # tokens, experts, experts of a token, sizes of hidden and intermediate states, rank, options
    (512, 4, 2, 256, 256, 0, dict()),
    (1000, 5, 2, 520, 392, 16, dict(activation="gelu")),
    (777, 4, 2, 1096, 264, 8, dict(activation="swiglu_clamped", transposed=True, interleaved=True)),
    (2000, 8, 2, 512, 512, 72, dict(activation="gelu_tanh", interleaved=True)),
    (3000, 16, 4, 384, 640, 64, dict(transposed=True, interleaved=True)),
    (1100, 7, 1, 320, 520, 0, dict(transposed=True)),
    (1100, 7, 1, 320, 520, 16, dict()),
    (4096, 64, 4, 256, 768, 16, dict()),
    (1000, 13, 2, 512, 264, 0, dict()),  # experts of 129 to 192 rows, from here on
    (1300, 16, 2, 520, 392, 0, dict(activation="gelu")),
    (3000, 10, 1, 320, 520, 0, dict(transposed=True)),
    (1000, 13, 2, 512, 264, 0, dict(activation="swiglu_clamped", transposed=True, interleaved=True)),
    (1000, 13, 2, 512, 264, 0, dict(activation="gelu_tanh", interleaved=True)),
    (1000, 13, 2, 512, 264, 16, dict()),
    (2600, 64, 4, 256, 768, 0, dict()),  # several tiles for each program
]


@pytest.mark.gpu
@ON_HOPPER
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", EXPERTS, ids=str)
def test_experts_equal_those_of_the_general_kernel(
    monkeypatch: pytest.MonkeyPatch, planned: list[Any], case: tuple[Any, ...], dtype: torch.dtype, bias: bool
) -> None:
    tokens, E, K, H, width, R, options = case
    torch.manual_seed(tokens)

    def leaf(*sizes: int) -> torch.Tensor:
        return (torch.randn(sizes, device="cuda") * sizes[-1] ** -0.5).to(dtype).requires_grad_()

    scores = torch.rand(tokens, E, device="cuda")
    scores[:, 1] = -1  # nobody selects this expert
    scores[: tokens // 2, 0] += 1
    ids = scores.topk(K, -1)[1]
    ids[5, 0], ids[7, 0] = E, -1
    weights = torch.rand(tokens, K, device="cuda", requires_grad=True)
    shapes = ((E, H, 2 * width), (E, width, H)) if options.get("transposed") else ((E, 2 * width, H), (E, H, width))
    leaves = [leaf(tokens, H), weights, *(leaf(*shape) for shape in shapes)]
    given: dict[str, Any] = {}
    if bias:
        given |= dict(gate_up_bias=leaf(E, 2 * width), down_bias=leaf(E, H))
        leaves += given.values()
    if R:
        adapters = leaf(E, R, H), leaf(E, 2 * width, R), leaf(E, R, width), leaf(E, H, R)
        given |= dict(lora_gate_up=(*adapters[:2], 2.0), lora_down=(*adapters[2:], 0.5))
        leaves += adapters
    routing = Routing(weights, ids, None)

    def results() -> list[torch.Tensor]:
        out = expert_mlp(leaves[0], routing, *leaves[2:4], **given, **options)
        return [out, *torch.autograd.grad(out, leaves, torch.ones_like(out))]

    found = results()
    with torch.no_grad():
        assert torch.equal(expert_mlp(leaves[0], routing, *leaves[2:4], **given, **options), found[0])
    products = {(False, True), (False, False)}  # whether they have an activation, and whether rows are gathered
    if options.get("interleaved") or not options.get("transposed"):
        products.add((True, True))
    assert {(p.glu, p.share > 0) for p, *_ in planned} == products, "another kernel was launched"
    monkeypatch.setattr(module, "hopper_reads", lambda *_, **__: None)
    monkeypatch.setattr(import_module("onepass.kernels.grouped_weight_gradient"), "is_for_hopper", lambda *_: False)
    for one, other in zip(found, results()):
        assert torch.equal(one, other) and other.isfinite().all()


@pytest.mark.gpu
@ON_HOPPER
@pytest.mark.parametrize("assignments", [800, 620])
def test_places_of_64_bits(monkeypatch: pytest.MonkeyPatch, assignments: int) -> None:
    """As for rows that are further apart than 32 bits reach."""
    found = []

    def plan(*about: Any) -> Any:
        plan = hopper.hopper_plan(*about)
        found.append(plan.constexprs["WORK"])
        return plan._replace(constexprs=dict(WORK=found[-1]._replace(FAR=far)))

    monkeypatch.setattr(module, "hopper_plan", plan)
    x, w, *_, groups = tensors((assignments, 4, 256, 512, 0, False), torch.bfloat16, "K", "K")
    results = []
    for far in (False, True):  # noqa: B007  (the plan reads it)
        import_module("onepass.kernels.launch").forget()
        results.append(module.grouped_gemm(x, w, groups, share=1, out=torch.zeros_like(x[:, :256])))
    assert [w.FAR for w in found] == [False] * 2
    assert torch.equal(*results)


@pytest.mark.gpu
@ON_HOPPER
@pytest.mark.parametrize("share", [0, 1])
def test_is_used(monkeypatch: pytest.MonkeyPatch, share: int) -> None:
    planned: list[Any] = []
    monkeypatch.setattr(module, "hopper_plan", lambda *about: planned.append(about) or hopper.hopper_plan(*about))
    x, w, *_, groups = tensors((700, 4, 256, 512, 0, False), torch.bfloat16, "K", "K")
    module.grouped_gemm(x, w, groups, share=share, glu=share > 0)
    assert planned


# Whether it takes a product.
PRODUCTS = {  # of four experts
    "gathered rows that are not aligned": (dict(share=2, glu=True, K=252), False),
    "few rows of an expert": (dict(assignments=256), False),
    "few gathered rows of an expert": (dict(share=2, glu=True, assignments=256), False),
    "enough rows of an expert": (dict(assignments=260), True),
    "float32": (dict(element=4), False),
    "rows of one step": (dict(K=64, x_row=64), False),
    "few columns": (dict(N=128), False),
    "rows that do not start on 16 bytes": (dict(x_row=260), False),
    "one row for all": (dict(x_row=0), False),
    "a rank that is not aligned": (dict(R=4), False),
    "sorted rows": (dict(), True),
    "many sorted rows": (dict(assignments=8192), True),
    "sorted rows that are long": (dict(K=7168, assignments=1024), True),
    "gathered rows": (dict(share=2, assignments=260), True),
    "gathered rows of an activation": (dict(share=2, glu=True), True),
    "half the columns of an activation": (dict(N=128, glu=True), True),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_that_it_takes(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(hopper, "SUPPORTED", True)
    monkeypatch.setattr(hopper.layout, "compute_capability", lambda *_: 90)
    product = Product(900, 12, 4, 256, 256, 0, 0, False, False, 1.0, module.PLAIN, 256, (), 2, torch.device("cpu"))
    changed, expected = PRODUCTS[name]
    assert hopper.is_for_hopper.__wrapped__(product._replace(**changed)) == expected
    monkeypatch.setattr(hopper.layout, "compute_capability", lambda *_: 100)
    assert not hopper.is_for_hopper.__wrapped__(product._replace(**changed))


def test_rows_that_are_far_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper.layout, "multiprocessors", lambda _: 132)
    monkeypatch.setattr(hopper.layout, "shared_memory", lambda: 227 * 1024)
    product = Product(2**16, 12, 4, 256, 256, 0, 2, False, False, 1.0, module.PLAIN, 2**16, (), 2, torch.device("cpu"))
    for changed, far in (
        (dict(), True),
        (dict(x_row=2**16 - 8), False),
        (dict(share=4), False),
        (dict(share=0), False),
    ):
        plan = hopper.hopper_plan(product._replace(**changed), ("K", 1, 1), ("", 0, 0))
        assert far == plan.constexprs["WORK"].FAR


def test_weights_that_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "is_for_hopper", lambda _: True)
    monkeypatch.setattr(hopper.layout, "has_tma", lambda *_: True)
    x, w, lora, low = torch.empty(8, 64), torch.empty(2, 32, 64), torch.empty(2, 8, 32).mT, torch.empty(8, 16)
    results = torch.empty(8, 32), None
    reads = partial(hopper.hopper_reads, None, results=results)
    for out in (torch.empty(8, 33)[:, 1:], torch.empty(8, 32, dtype=torch.bfloat16)):
        assert hopper.hopper_reads(None, x, w, None, "K", False, (None, out)) is None
    assert reads(x, w, None, "K", False) == (("K", 2048, 64), ("", 0, 0))
    assert reads(x, w.mT, (low, lora), "N", False) == (("N", 2048, 64), ("N", 256, 32))
    assert reads(x, w, None, "", False) is None
    assert reads(x[:, 1:], w, None, "K", False) is None
    assert reads(x, w, (low, lora[:, ::2]), "K", False) is None
    assert reads(x, w, (low, lora), "K", True) is None  # whose two halves no descriptor loads
    assert reads(x, w, (low[:, 1:9], lora), "K", False) is None
