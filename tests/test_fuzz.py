"""Random calls in a random order, each against a definition in float64: what no test thought of.

An example is a list of calls, since launches are remembered from call to call. A call is a dict of plain values, of
which `fuzz_examples.problem` makes tensors: what a failure prints can be put into `fuzz_corpus.EXAMPLES` as it is. The
same examples for twenty seconds by default; with ``ONEPASS_FUZZ_SECONDS=3600`` as long as that with examples that
nobody has seen.
"""

import os
import random
import time
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from torch import Tensor

import onepass
from definition import assert_close, assert_gradient_close
from fuzz_corpus import EXAMPLES
from fuzz_examples import OF_EXPERTS, PLAIN, PROBLEMS, calls, examples, problem
from fuzz_problem import Problem, Spec
from layouts import Laid
from paths import interpreted

pytestmark = pytest.mark.usefixtures("one_thread")
SECONDS = float(os.environ.get("ONEPASS_FUZZ_SECONDS", 0))


def is_slow(device):
    """The interpreter takes a thousand times as long as eager, and a GPU has kernels to compile."""
    return interpreted(device) or device.type == "cuda"


# The check


def laid_out(tensor: Tensor, layout: str | None) -> Laid | None:
    return None if layout is None or not tensor.dim() or not tensor.numel() else Laid(tensor, layout)


def takes_kernels(spec: Spec, device: torch.device) -> bool:
    return spec["dtype"] != "float64" and (device.type == "cuda" or interpreted(device))


def check(spec: Spec, device: torch.device) -> dict[str, Tensor] | None:
    """Results and gradients of a call, compared with their definition."""
    spec = PLAIN | spec
    if interpreted(device) and spec["function"] in OF_EXPERTS and spec["dtype"] == "bfloat16":
        spec["dtype"] = "float32"  # the interpreter has no products of bfloat16
    p = problem(spec)
    laid = {n: laid_out(t.to(device), spec["layouts"].get(n)) for n, t in p.tensors.items()}
    values = {n: p.tensors[n].to(device) if each is None else each.view for n, each in laid.items()}
    exact = {n: t.detach().cpu().contiguous().clone() for n, t in values.items()}
    exact = {n: t.double().requires_grad_(n in p.grad) if t.is_floating_point() else t for n, t in exact.items()}
    values = {n: t.detach().requires_grad_(n in p.grad) for n, t in values.items()}
    if p.outside is not None and p.outside[0].any() and device.type == "cpu" and not takes_kernels(spec, device):
        with pytest.raises(IndexError, match=rf"^({p.outside[1]})\b"):
            p.call(values)
        return None
    got = p.call(values)
    written = bool(spec["options"].get("inplace_backward"))
    expected = p.define(exact)
    assert set(expected) <= set(got)
    for name, e in expected.items():
        assert got[name].shape == e.shape, f"{name}: {tuple(got[name].shape)}, expected {tuple(e.shape)}"
        compare(got[name].detach().cpu(), e.detach(), p.tolerance, name)
    found = {n: t.detach().clone() for n, t in got.items()}
    if not p.values_only:
        found |= gradients(p, values, exact, got, expected, spec["seed"])
    for n, each in laid.items():
        assert each is None or each.is_untouched(inside=not (written and n == "logits")), f"the memory of {n}"
    return found


def compare(got: Tensor, expected: Tensor, tolerance: Any, name: str) -> None:
    if isinstance(tolerance, tuple):
        assert_close(got, expected, scale=tolerance[0], name=name)
    else:
        compare_norms(got, expected, tolerance, name)


def compare_norms(got: Tensor, expected: Tensor, bound: float, name: str) -> None:
    got = got.double()
    odd, same = ~expected.isfinite(), (got == expected) | (got.isnan() & expected.isnan())
    error, norm = (got - expected)[~odd].norm(), expected[~odd].norm()
    if not (bool(same[odd].all()) and bool(error <= bound * (norm + 0.1 * max(1, expected.numel()) ** 0.5))):
        raise AssertionError(f"{name}: off by {error} of {norm}; got {got}, expected {expected}"[:2000])


def gradients(
    p: Problem, values: dict[str, Tensor], exact: dict[str, Tensor], got: dict[str, Tensor],
    expected: dict[str, Tensor], number: int,
) -> dict[str, Tensor]:  # fmt: skip
    """Of each tensor, for one upstream gradient of each result; none through what is infinite."""
    names = [n for n in expected if expected[n].requires_grad and got[n].requires_grad]
    infinite = [expected[n].detach().isinf() for n in names]
    if not names or any(i.dim() == 0 and i for i in infinite):
        return {}
    generator = torch.Generator().manual_seed(number)
    upstream = [torch.rand(i.shape, generator=generator).add(0.5).masked_fill(i, 0.0) for i in infinite]
    ours = [u.to(got[n]) for u, n in zip(upstream, names)]
    found = torch.autograd.grad([got[n] for n in names], [values[n] for n in p.grad], ours, allow_unused=True)
    true = torch.autograd.grad(
        [torch.where(i, 0.0, expected[n]) for i, n in zip(infinite, names)],
        [exact[n] for n in p.grad],
        [u.cpu().double() for u in ours],
        allow_unused=True,
    )
    results = {}
    for name, g, e in zip(p.grad, found, true):
        g, e = (torch.zeros_like(exact[name]) if x is None else x.detach().cpu() for x in (g, e))
        results[f"gradient of {name}"] = g
        assert g.shape == e.shape, f"gradient of {name}"
        if any(i.any() for i in infinite):  # the definition has no gradient there, and may have none beside it
            g, e = (torch.where(e.isnan(), 0.0, x) for x in (g, e))
        if isinstance(p.tolerance, tuple):
            assert_gradient_close(g, e, upstream=p.tolerance[1] * 1.5)
        else:
            compare_norms(g, e, p.tolerance, f"gradient of {name}")
    return results


def run(example: list[Spec], device: torch.device) -> None:
    """Each call, and the first once more: what was kept of the others must not change it."""
    first, *_ = [check(spec, device) for spec in example]
    again = check(example[0], device) if len(example) > 1 else first
    for name in first or ():
        assert torch.equal(first[name].nan_to_num(), again[name].nan_to_num()), f"{name}, the second time"


# Tests

UNTIMED: dict[str, Any] = {"deadline": None, "suppress_health_check": list(HealthCheck), "database": None}
QUICK: dict[str, Any] = {"derandomize": True, "phases": (Phase.explicit, Phase.generate), **UNTIMED}


@pytest.mark.parametrize("name", EXAMPLES)
def test_known_defects(device, name):
    run(EXAMPLES[name], device)


@pytest.mark.parametrize("value", [1e-40, 10**400, 1e-320], ids=["1e-40", "10**400", "1e-320"])
@pytest.mark.parametrize("prefix", ["", "teacher_"], ids=["student", "teacher"])
def test_a_temperature_that_float32_cannot_divide_by(device, value, prefix):
    x = torch.randn(3, 10, device=device)
    given = {f"{prefix}temperature": value}
    calls = [lambda: onepass.kl_div(x, x, **given)]
    if not prefix:
        calls += [lambda: onepass.entropy_from_logits(x, **given), lambda: onepass.softmax_statistics(x, **given)]
    for call in calls:
        with pytest.raises(ValueError, match=f"^{prefix}temperature: ") as error:
            call()
        assert len(str(error.value)) < 500


@pytest.mark.parametrize("shape, strides", [((3, 10), (5, 1)), ((2, 3, 8), (8, 8, 1)), ((3, 8), (7, 1))])
def test_logits_that_overlap_are_not_written_over(device, shape, strides):
    x = torch.randn(64, device=device).as_strided(shape, strides)
    before = x.clone()
    target = torch.zeros(shape[:-1], dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match=r"^inplace_backward: "):
        onepass.cross_entropy(x.requires_grad_(), target, inplace_backward=True)
    assert torch.equal(x.detach(), before)
    view = torch.randn(64, device=device).as_strided((3, 10), (12, 1)).requires_grad_()  # which do not
    onepass.cross_entropy(view, target.flatten()[:3], inplace_backward=True).backward()


@pytest.mark.parametrize("function", sorted(PROBLEMS))
def test_random_calls(device, function):
    @settings(max_examples=4 if is_slow(device) else 20, **QUICK)
    @given(spec=calls(function))
    def of_function(spec):
        check(spec, device)

    of_function()


def test_random_calls_in_a_random_order(device):
    @settings(max_examples=10 if is_slow(device) else 40, **QUICK)
    @given(example=examples())
    def in_order(example):
        run(example, device)

    in_order()


@pytest.mark.skipif(not SECONDS, reason="ONEPASS_FUZZ_SECONDS says for how long")
def test_calls_that_nobody_has_seen(device):
    """What fails is printed, as small as it can be made: it belongs into `fuzz_corpus.EXAMPLES`."""
    end = time.monotonic() + SECONDS / 2  # there are two paths on any machine
    while time.monotonic() < end:
        number = random.SystemRandom().randrange(2**32)

        @seed(number)
        @settings(max_examples=50, print_blob=False, **UNTIMED)
        @given(example=examples())
        def unseen(example):
            run(example, device)

        unseen()
