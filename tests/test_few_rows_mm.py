"""`few_rows_mm`, the gradient of a head's weight for few rows, and the kernel that computes it on Hopper GPUs."""

from importlib import import_module
from typing import Any

import pytest
import torch

import onepass
from on_hopper import ON_HOPPER
from onepass.logits import small_head

pytest.importorskip("triton")
module = import_module("onepass.kernels.few_rows_mm")
hopper = import_module("onepass.kernels.few_rows_mm_hopper")
# Rows, V and H: one part and several, columns of all programs and of some, and none for some of the programs.
SHAPES = [
    (1, 8, 8),
    (64, 136, 264),
    (65, 5000, 256),
    (128, 20000, 520),
    (129, 17000, 1288),
    (200, 9000, 4096),
    (256, 33000, 896),
    (256, 2056, 7000),
]


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The launches of the kernel, which computes products of all sizes."""
    found: list[Any] = []
    monkeypatch.setattr(module, "hopper_plan", lambda *about: found.append(about) or hopper.hopper_plan(*about))
    for name, least in {"LEAST": 0, "LEAST_ROWS": 1, "BUSY": 0.0}.items():
        monkeypatch.setattr(hopper, name, least)
    return found


def operand(rows: int, columns: int, dtype: torch.dtype, padding: int) -> torch.Tensor:
    """A matrix in a larger one, which is NaN elsewhere."""
    whole = torch.full((rows + 64, columns + padding), torch.nan, dtype=dtype, device="cuda")
    whole[:rows, :columns] = torch.randn(rows, columns, device="cuda")
    return whole[:rows, :columns]


@pytest.mark.gpu
@ON_HOPPER
@pytest.mark.parametrize("padding", [0, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_its_definition(
    planned: list[Any], shape: tuple[int, int, int], dtype: torch.dtype, padding: int
) -> None:
    rows, V, H = shape
    torch.manual_seed(V)
    a, b = operand(rows, V, dtype, padding), operand(rows, H, dtype, padding)
    found = module.few_rows_mm(a, b)
    assert planned, "another kernel was launched"
    expected = a.double().t() @ b.double()
    torch.testing.assert_close(found.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-3)
    assert torch.equal(found, module.few_rows_mm(a, b))  # the order of the sum does not vary


@pytest.mark.gpu
@ON_HOPPER
def test_what_torch_computes(planned: list[Any]) -> None:
    """What descriptors cannot load, too many rows, other dtypes, and negated views."""
    a, b = (torch.randn(256, n, device="cuda", dtype=torch.bfloat16) for n in (512, 264))
    shifted = torch.randn(256 * 512 + 1, device="cuda", dtype=torch.bfloat16)[1:].view(256, 512)
    few = [(a[:, :500].contiguous(), b), (a, b[:, :260].contiguous()), (a[:, ::2], b), (a.t().contiguous().t(), b)]
    others = [(shifted, b), (a.float(), b.float()), (a.new_empty(0, 512), b[:0]), (a, torch._neg_view(b))]
    for x, y in (*few, *others, (a.repeat(2, 1)[:257], b.repeat(2, 1)[:257])):
        torch.testing.assert_close(module.few_rows_mm(x, y), torch.mm(x.t(), y))
    assert not planned
    module.few_rows_mm(a, b)
    assert planned


@pytest.mark.gpu
@ON_HOPPER
def test_of_a_head(planned: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients of a head of few rows, some of them masked, with hidden states that are NaN."""
    monkeypatch.setattr(small_head, "SMALL_ON", ("cuda",))
    torch.manual_seed(0)
    hidden, weight = (torch.randn(n, 264, device="cuda", dtype=torch.bfloat16) / 8 for n in (200, 4096))
    labels = torch.randint(4096, (200,), device="cuda")
    labels[::7] = -100
    expected = weight.double().requires_grad_()
    kept = labels != -100
    torch.nn.functional.cross_entropy(hidden.double()[kept] @ expected.t(), labels[kept]).backward()
    hidden[~kept] = torch.nan
    weight.requires_grad_()
    onepass.linear_cross_entropy(hidden, weight, labels).backward()
    assert planned, "another kernel was launched"
    error = (weight.grad.double() - expected.grad).norm() / expected.grad.norm()
    assert error < 0.01, error


def test_in_pytorch() -> None:
    a, b = torch.randn(5, 7, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    expected = sum(torch.outer(x, y) for x, y in zip(a, b))
    torch.testing.assert_close(onepass.reference.few_rows_mm(a, b), expected)
    torch.testing.assert_close(module.few_rows_mm(a, b), expected)


@pytest.mark.parametrize(
    ("H", "multiprocessors", "programs"), [(4096, 132, 128), (896, 132, 132), (7168, 132, 112), (256, 78, 78)]
)
def test_all_programs_of_a_strip(monkeypatch: pytest.MonkeyPatch, H: int, multiprocessors: int, programs: int) -> None:
    monkeypatch.setattr(hopper.layout, "multiprocessors", lambda device: multiprocessors)
    assert hopper.programs_of(H, torch.device("cuda")) == programs


@pytest.mark.parametrize(
    ("rows", "V", "H", "taken"),
    [
        (256, 128256, 4096, True),
        (65, 151936, 896, True),
        (64, 128256, 4096, False),
        (257, 128256, 4096, False),
        (256, 32000, 4096, False),  # a small product
        (256, 1 << 20, 384, False),  # a quarter of the columns of all programs would be empty
        (256, 1 << 20, 34000, False),  # more strips than multiprocessors
        (256, 128256, 4100, False),
        (256, 128260, 4096, False),
    ],
)
def test_where_it_is_faster(monkeypatch: pytest.MonkeyPatch, rows: int, V: int, H: int, taken: bool) -> None:
    answers = {"multiprocessors": 132, "compute_capability": 90, "has_tma": True}
    for name, answer in answers.items():
        monkeypatch.setattr(hopper.layout, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(hopper, "SUPPORTED", True)
    a, b = (torch.empty(rows, n, dtype=torch.bfloat16, device="meta") for n in (V, H // 8 * 8 + 8))
    b = b[:, :H]
    assert hopper.is_for_hopper(a, b) == taken
    zeros, ints = torch._efficientzerotensor(a.shape, dtype=a.dtype, device="meta"), (a.short(), b.short())
    others = (a.float(), b.float()), (a, b.half()), (a.half(), b), ints, (zeros, b), (a, torch._neg_view(b))
    for x, y in (*others, (a, b[:-1]), (a[:-1], b)):
        assert not hopper.is_for_hopper(x, y)
