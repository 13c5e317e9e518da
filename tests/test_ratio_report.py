"""`ratio_report` against its formulas in float64, one number at a time."""

import math

import pytest
import torch

import onepass
from onepass.losses.ratio_report import NAMES


def defined(log_probs, sampler, mask):
    d = (log_probs.double() - sampler.double())[mask]
    r, n = d.exp(), len(d) or math.nan
    of_size = [d.abs().quantile(q).item() if len(d) else math.nan for q in (0.5, 0.9, 0.99, 1.0)]
    values = [len(d), d.sum() / n, d.abs().sum() / n, *of_size, (r - 1).abs().sum() / n]
    values += [-d.sum() / n, d.square().sum() / 2 / n, (r - 1 - d).sum() / n, r.sum() ** 2 / (n * (r * r).sum())]
    return dict(zip(NAMES, map(float, values), strict=True))


def same(found, expected):
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-12, abs=1e-15, nan_ok=True), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("rows", [(1,), (2,), (7, 31), (1000,)])
def test_the_formulas(device, rows, dtype):
    generator = torch.Generator().manual_seed(sum(rows))
    log_probs = -torch.rand(rows, generator=generator).mul(9).to(dtype)
    sampler = (log_probs + torch.randn(rows, generator=generator) * 0.1).to(dtype)
    for mask in (None, torch.rand(rows, generator=generator) < 0.6, torch.ones(rows).int()):
        given = log_probs.clone().requires_grad_(), sampler.clone()
        if mask is not None:  # what is masked may be anything
            given[1][mask == 0] = math.nan
        report = onepass.ratio_report(*(t.to(device) for t in given), None if mask is None else mask.to(device))
        kept = torch.ones(rows, dtype=torch.bool) if mask is None else mask != 0
        same(report.to_dict(), defined(log_probs, sampler, kept))
        assert not report.values.requires_grad and report.values.device.type == device.type


def test_equal_log_probs(device):
    x = -torch.rand(20, device=device)
    found = onepass.ratio_report(x, x).to_dict()
    assert found.pop("tokens") == 20 and found.pop("effective_sample_size") == 1
    assert set(found.values()) == {0.0}


@pytest.mark.parametrize("rest", [[400.0], [-400.0], [700.0], [-800.0, -math.inf]], ids=str)
def test_the_effective_sample_size_of_any_magnitude(device, rest):
    """It is that of the ratios over the largest one, of which neither the squares nor the sum leave float64."""
    largest = max(rest)
    for masked in (False, True):
        given = torch.tensor([largest, *rest, 900.0 if masked else largest], dtype=torch.float64, device=device)
        mask = torch.tensor([True] * (len(given) - 1) + [not masked], device=device)
        found = onepass.ratio_report(given, torch.zeros_like(given), mask).to_dict()
        equal = 1 + rest.count(largest) + (not masked)
        assert found["effective_sample_size"] == equal / (len(given) - masked)
    for given in ([math.inf, 0.0], [-math.inf, -math.inf]):
        report = onepass.ratio_report(torch.tensor(given, device=device), torch.zeros(2, device=device))
        assert math.isnan(report.to_dict()["effective_sample_size"])


@pytest.mark.parametrize("rows", [0, 5])
def test_no_token_is_left(device, rows):
    x = -torch.rand(rows, device=device)
    found = onepass.ratio_report(x, x, torch.zeros(rows, dtype=torch.bool, device=device)).to_dict()
    assert found.pop("tokens") == 0 and all(math.isnan(v) for v in found.values())


def test_a_token_that_the_trainer_rules_out(device):
    """Its ratio is 0, and KL(sampler ‖ trainer) is infinite."""
    trainer, sampler = torch.tensor([-1.0, -math.inf], device=device), torch.tensor([-1.0, -2.0], device=device)
    found = onepass.ratio_report(trainer, sampler).to_dict()
    assert found["kl_k1"] == found["kl_k3"] == found["max_abs_difference"] == math.inf
    assert found["mean_abs_ratio_error"] == 0.5 and found["effective_sample_size"] == 0.5


@pytest.mark.parametrize("masked", [False, True])
def test_a_token_of_nan(device, masked):
    """All but the number of tokens are then NaN, as in `torch.quantile`, also where masked tokens follow."""
    trainer = torch.tensor([0.0, -1.0, math.nan, -2.0], device=device)
    mask = torch.tensor([True, True, True, not masked], device=device)
    sampler = torch.full_like(trainer, -1.5)
    same(onepass.ratio_report(trainer, sampler, mask).to_dict(), defined(trainer, sampler, mask))


def test_a_token_that_the_sampler_cannot_give(device):
    """Its ratio is infinite, and so are the estimates of the divergence, of which none is the NaN of inf - inf."""
    trainer, sampler = torch.tensor([-1.0, -2.0], device=device), torch.tensor([-math.inf, -2.0], device=device)
    report = onepass.ratio_report(trainer, sampler).to_dict()
    assert report["kl_k1"] == -math.inf and report["kl_k2"] == report["kl_k3"] == math.inf


def test_what_it_prints():
    x = -torch.rand(3)
    printed = str(onepass.ratio_report(x, x)).splitlines()
    assert [line.split()[0] for line in printed] == list(NAMES) and printed[0].split()[1] == "3"


@pytest.mark.gpu
def test_nothing_waits_for_the_device():
    x = -torch.rand(3000, device="cuda")
    onepass.ratio_report(x, x, x < -0.1)
    torch.cuda.set_sync_debug_mode("error")
    try:
        report = onepass.ratio_report(x, x, x < -0.1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert report.to_dict()["tokens"] == (x < -0.1).sum().item()
