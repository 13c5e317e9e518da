"""The gradients of experts' weights by a kernel whose warps have different roles, which Hopper GPUs run."""

from importlib import import_module
from itertools import pairwise
from typing import Any

import pytest
import torch

from on_hopper import ON_HOPPER

pytest.importorskip("triton")
module = import_module("onepass.kernels.grouped_weight_gradient")
hopper = import_module("onepass.kernels.grouped_weight_gradient_hopper")
sort_by_expert = import_module("onepass.kernels.token_sort").sort_by_expert
# Tokens, experts, experts of a token, and columns of the operand whose rows are sorted and of the other.
SHAPES = [
    (512, 4, 2, 256, 128),
    (1000, 5, 2, 520, 72),
    (2500, 7, 1, 136, 1288),
    (333, 40, 4, 264, 264),
    (9, 3, 2, 512, 512),
]


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The launches of the kernel."""
    found: list[Any] = []
    monkeypatch.setattr(module, "hopper_plan", lambda *about: found.append(about) or hopper.hopper_plan(*about))
    return found


def operands(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Rows that are sorted by expert, rows of tokens, and groups in which expert 1 has no rows, and expert 0 many."""
    tokens, E, K, columns, others = shape
    torch.manual_seed(tokens)
    ids = torch.rand(tokens, E, device="cuda").topk(K, -1)[1]
    ids[ids == 1] = 0
    ids[3, 0], ids[5, 0] = E, -1
    x = torch.randn(tokens * K, columns + 8, device="cuda").to(dtype)[:, :columns]  # with elements between rows
    return x, torch.randn(tokens, others, device="cuda").to(dtype), sort_by_expert(ids, E)


@pytest.mark.gpu
@ON_HOPPER
@pytest.mark.parametrize("sorted_first", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_its_definition(
    planned: list[Any], shape: tuple[int, ...], dtype: torch.dtype, sorted_first: bool
) -> None:
    _, E, K, columns, others = shape
    x, y, groups = operands(shape, dtype)
    if sorted_first:
        found = module.weight_gradient(x, y, x.new_empty(E, columns, others), groups, share_b=K)
    else:
        found = module.weight_gradient(y, x, x.new_empty(E, others, columns), groups, share_a=K)
    assert planned, "another kernel was launched"
    bounds = groups.offsets.tolist()
    for e in range(E):
        rows = slice(bounds[e], bounds[e + 1])
        of_x, of_y = x[rows].double(), y[groups.order[rows].long() // K].double()
        expected = of_x.T @ of_y if sorted_first else of_y.T @ of_x
        limit = 2.0 ** (-8 if dtype == torch.bfloat16 else -11)  # half a unit in the last place, and float32's sum
        assert ((found[e].double() - expected).abs() <= limit * expected.abs() + 1e-3).all()
    assert (found[1] == 0).all(), "of an expert without rows"


@pytest.mark.gpu
@ON_HOPPER
@pytest.mark.parametrize("sorted_first", [True, False])
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_rows_that_are_not_finite_stay_with_their_expert(planned: list[Any], value: float, sorted_first: bool) -> None:
    """The last step of an expert must not read rows of the next one, also not to multiply them by zeros."""
    x, y, groups = operands((900, 6, 2, 512, 256), torch.bfloat16)

    def gradient() -> torch.Tensor:
        if sorted_first:
            return module.weight_gradient(x, y, x.new_empty(6, 512, 256), groups, share_b=2)
        return module.weight_gradient(y, x, x.new_empty(6, 256, 512), groups, share_a=2)

    expected, bounds = gradient(), groups.offsets.tolist()
    tokens = groups.order.long() // 2
    used = [tokens[a:b] for a, b in pairwise(bounds)]
    x[bounds[2] : bounds[3]] = value
    x[bounds[-1] :] = value
    y[0] = value  # also what a row that is not there would be read from
    found = gradient()
    assert planned, "another kernel was launched"
    others = [e for e in (0, 1, 3, 4, 5) if not (used[e] == 0).any()]
    assert len(others) >= 3 and torch.equal(found[others], expected[others])
    assert not found[2].isfinite().any()


@pytest.mark.gpu
@ON_HOPPER
@pytest.mark.parametrize("sorted_first", [True, False])
def test_experts_of_every_number_of_rows_at_the_end_of_a_step(planned: list[Any], sorted_first: bool) -> None:
    counts = torch.tensor([31, 32, 33, 0, 63, 64, 65, 95, 96, 97, 127, 128, 129, 1], device="cuda")
    ids = torch.arange(len(counts), device="cuda").repeat_interleave(counts).unsqueeze(1)
    ids = ids[torch.randperm(len(ids), device="cuda", generator=torch.Generator("cuda").manual_seed(1))]
    groups, E = sort_by_expert(ids, len(counts)), len(counts)
    x, y = (torch.randn(len(ids), n, device="cuda", dtype=torch.bfloat16) for n in (264, 200))
    if sorted_first:
        found = module.weight_gradient(x, y, x.new_empty(E, 264, 200), groups, share_b=1)
    else:
        found = module.weight_gradient(y, x, x.new_empty(E, 200, 264), groups, share_a=1).mT
    assert planned, "another kernel was launched"
    bounds = groups.offsets.tolist()
    for e, (begin, end) in enumerate(pairwise(bounds)):
        expected = x[begin:end].double().T @ y[groups.order[begin:end].long()].double()
        assert ((found[e].double() - expected).abs() <= 2.0**-8 * expected.abs() + 1e-3).all(), e


@pytest.mark.gpu
@ON_HOPPER
def test_equals_the_general_kernel_for_more_than_two_to_the_31_elements(
    monkeypatch: pytest.MonkeyPatch, planned: list[Any]
) -> None:
    x, y, groups = operands((3000, 130, 4, 4096, 4096), torch.bfloat16)
    like = torch.empty(130, 4096, 4096, device="cuda", dtype=torch.bfloat16)
    found = module.weight_gradient(x, y, like, groups, share_b=4)
    assert found.numel() > 2**31 and planned
    monkeypatch.setattr(module, "is_for_hopper", lambda *_: False)
    assert torch.equal(found, module.weight_gradient(x, y, like, groups, share_b=4))


ROWS = torch.empty(64, 136, dtype=torch.bfloat16)
# The shape of the gradient, whether the first operand is sorted, the other operand; whether the kernel is for it.
GRADIENTS = {
    "the first is sorted": ((4, 264, 136), True, ROWS, True),
    "the second is sorted": ((4, 136, 264), False, ROWS, True),
    "few columns of the sorted operand": ((4, 128, 136), True, ROWS, False),
    "few columns of the other": ((4, 264, 64), True, ROWS, False),
    "float32": ((4, 264, 136), True, ROWS.float(), False),
    "rows of the result that do not start on 16 bytes": ((4, 264, 132), True, ROWS, False),
    "rows that do not start on 16 bytes": (
        (4, 264, 136),
        True,
        torch.empty(64, 140, dtype=torch.bfloat16)[:, :136],
        False,
    ),
    "columns that are not whole 16 bytes": ((4, 260, 136), True, ROWS, False),
    "an operand that does not": ((4, 264, 128), True, ROWS[:, 1:129], False),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_that_it_computes(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(hopper, "SUPPORTED", True)
    monkeypatch.setattr(hopper.layout, "compute_capability", lambda *_: 90)
    *about, expected = GRADIENTS[name]
    assert hopper.is_for_hopper(*about) == expected
    monkeypatch.setattr(hopper, "SUPPORTED", False)
    assert not hopper.is_for_hopper(*about)
    monkeypatch.setattr(hopper, "SUPPORTED", True)
    monkeypatch.setattr(hopper.layout, "compute_capability", lambda *_: 100)
    assert not hopper.is_for_hopper(*about)
