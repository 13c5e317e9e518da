"""Losses of groups of rows from a linear head: three GEMMs where a tile holds a group, and four where it does not."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import onepass
from linear_cases import H, N, V, assert_all_close, batch, exact, gradients, tiles_of
from onepass.logits.row_groups import RowGroups
from test_linear_cost import Products

LENGTHS = [3, 1, 4, 0, 3]
MASKS = {"all rows": None, "masked": [1, 0, 1, 0, 1, 1, 0, 1, 0, 0, 1]}  # of the second group all


def coupled(s, factors, groups):
    """A loss of each group in which its rows multiply each other, with a gradient in every argument."""
    return torch.sigmoid(groups.mean(s.log_probs * factors)) + 0.1 * groups.sum(s.entropy).square()


def expected(hidden, weight, target, factors, mask, lengths=LENGTHS):
    """The same, of the logits and one group after the other."""
    p = F.linear(hidden, weight).log_softmax(-1)
    log_probs, entropy = p.gather(-1, target.unsqueeze(-1)).squeeze(-1), -(p.exp() * p).sum(-1)
    losses, first = [], 0
    for length in lengths:
        rows = torch.arange(first, first + length, device=hidden.device)
        rows = rows if mask is None else rows[mask[rows]]
        mean, total = (log_probs * factors)[rows].mean(), entropy[rows].sum()
        losses.append(torch.sigmoid(mean) + 0.1 * total.square() if len(rows) else p.new_zeros(()))
        first += length
    kept = sum(loss.requires_grad for loss in losses)
    return torch.stack(losses), max(kept, 1)


def draw(device, mask, dtype=torch.float32):
    hidden, weight, _, target = batch(device, dtype)
    factors = torch.linspace(-1, 1, N, device=device).requires_grad_()
    return hidden, weight, target % V, factors, None if mask is None else torch.tensor(mask, device=device).bool()


@pytest.mark.parametrize("mask", MASKS)
def test_three_products(device, tile, mask):
    hidden, weight, target, factors, mask = draw(device, MASKS[mask])
    with Products() as products:
        loss = onepass.linear_loss(hidden, weight, target, coupled, factors, row_mask=mask, groups=LENGTHS)
        found = gradients(loss, (hidden, weight, factors))
    kept = N if mask is None else int(mask.sum())
    longest = max(LENGTHS) if mask is None else 2
    assert products.multiplications == (3 if tile >= longest else 4) * kept * H * V
    reference = exact(hidden, weight, factors)
    losses, count = expected(*reference[:2], target, reference[2], mask)
    assert_all_close([loss.detach()], [losses.detach().sum() / count], "loss")
    assert_all_close(found, gradients(losses.sum() / count, reference))


@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("given", ["(1, N)", "a tensor", "one row", "no row", "no group"])
def test_shapes_and_reductions(reduction, given):
    hidden, weight, target, factors, _ = draw("cpu", None, torch.float64)
    lengths = LENGTHS
    if given == "one row":
        hidden, target, factors, lengths = hidden[0], target[0], factors[0], [1]
    elif given == "(1, N)":
        hidden, target, factors = hidden.view(1, N, H), target.view(1, N), factors.view(1, N)
    elif given.startswith("no"):
        hidden, target, factors, lengths = hidden[:0], target[:0], factors[:0], [0, 0] if given == "no row" else []
    groups = torch.tensor(lengths, dtype=torch.int32) if given == "a tensor" else lengths
    loss = onepass.linear_loss(hidden, weight, target, coupled, factors, groups=groups, reduction=reduction)
    assert loss.shape == (() if reduction == "sum" else (len(lengths),))
    if not lengths or not sum(lengths):
        assert not loss.any() and not torch.autograd.grad(loss.sum(), weight)[0].any()
        return
    losses, _ = expected(hidden.reshape(-1, H), weight, target.flatten(), factors.flatten(), None, lengths)
    torch.testing.assert_close(loss, losses.sum() if reduction == "sum" else losses)
    torch.testing.assert_close(*(torch.autograd.grad(x.sum(), weight)[0] for x in (loss, losses)))


def test_batches_of_tiles(monkeypatch):
    """Where logits are wider than the GEMMs, the gradient of several tiles is one GEMM."""
    tiles_of(monkeypatch, 4)
    hidden, weight, target, factors, _ = draw("cpu", None)
    half = [t.detach().bfloat16().requires_grad_() for t in (hidden, weight)]
    with Products() as products:
        loss = onepass.linear_loss(*half, target, coupled, factors, groups=LENGTHS, logits_dtype=torch.float32)
        found = gradients(loss, (*half, factors))
    assert products.multiplications == 3 * N * H * V
    reference = exact(*half, factors)
    losses, count = expected(*reference[:2], target, reference[2], None)
    for g, e in zip(found, gradients(losses.sum() / count, reference)):
        assert (g.double() - e).norm() <= 0.02 * e.norm()


def test_what_a_group_is_given():
    """A tile has whole groups, in their order; masked rows are not in a sum."""
    hidden, weight, target, factors, mask = draw("cpu", MASKS["masked"])
    seen = []

    def loss(s, factors, groups):
        seen.append((groups.ids.tolist(), groups.lengths.tolist()))
        pair = torch.stack([factors, factors + 1], -1)
        torch.testing.assert_close(groups.sum(pair)[:, 1] - groups.sum(pair)[:, 0], groups.lengths.float())
        return groups.sum(s.log_probs) + groups.sum(torch.ones_like(factors))

    with torch.no_grad():
        onepass.linear_loss(hidden, weight, target, loss, factors, row_mask=mask, groups=LENGTHS)
        assert seen == [([0, 0, 2, 2, 2, 4], [2, 0, 3, 0, 1])]
        rows = onepass.linear_loss(
            hidden, weight, target, loss, factors, row_mask=mask, groups=LENGTHS, reduction="none"
        )
    assert seen[1][1] == seen[0][1] and rows[1] == rows[3] == 0


def test_groups_are_independent():
    hidden, weight, target, factors, _ = draw("cpu", None)

    def loss(s, factors, groups):
        return groups.sum(s.log_probs) * s.log_probs.sum()

    with pytest.raises(ValueError, match="loss_fn: expected a loss of each group alone"):
        onepass.linear_loss(hidden, weight, target, loss, factors, groups=LENGTHS)
    with pytest.raises(ValueError, match=r"loss_fn: expected a loss of every group, floating-point of shape \(5,\)"):
        onepass.linear_loss(hidden, weight, target, lambda s, _, groups: s.log_probs, factors, groups=LENGTHS)


# The recipes, against TRL's formulas.

spec = spec_from_file_location("preference_losses", Path(__file__).parents[1] / "examples" / "preference_losses.py")
recipes = module_from_spec(spec)
spec.loader.exec_module(recipes)
CHOSEN, REJECTED = [2, 1, 3], [1, 2, 2]  # tokens of each sequence


def trl_method(module, name):
    pytest.importorskip("trl", minversion="1.16")
    module = pytest.importorskip(f"trl.experimental.{module}.{module}_trainer")
    return getattr(getattr(module, f"{module.__name__.split('.')[-2].upper()}Trainer"), name)


def of_trl(name, chosen, rejected, reference):
    """The losses of each pair from the log-probs of its tokens, as TRL has them, in the dtype of these."""
    sums, means = ([torch.stack([f(t) for t in side]) for side in (chosen, rejected)] for f in (torch.sum, torch.mean))
    this = SimpleNamespace(
        alpha=0.0, loss_type="simpo", simpo_gamma=0.5, beta=2.0, label_smoothing=0.0,
        accelerator=SimpleNamespace(device="cpu"),
    )  # fmt: skip
    if name == "dpo":
        of_reference = [torch.stack([t.sum() for t in side]) for side in reference]
        return -F.logsigmoid(0.1 * ((sums[0] - of_reference[0]) - (sums[1] - of_reference[1])))
    if name == "simpo":
        return trl_method("cpo", "cpo_loss")(this, *means)[0]
    this.beta = 0.1
    odds = trl_method("orpo", "odds_ratio_loss")(this, *means)[0]
    return -torch.cat(chosen).mean() - odds.to(means[0].dtype)


@pytest.mark.parametrize("name", ["dpo", "simpo", "orpo"])
def test_recipes_of_pairs(name):
    lengths = [n for pair in zip(CHOSEN, REJECTED) for n in pair]
    hidden, weight, _, target = batch("cpu", torch.float64)
    side = torch.cat([torch.full((n,), 1.0 - 2 * (k % 2)) for k, n in enumerate(lengths)]).double()
    reference = -torch.rand(N, generator=torch.Generator().manual_seed(1)).double()
    share = (side > 0) * len(CHOSEN) / sum(CHOSEN)
    inputs = {"dpo": (side, reference), "simpo": (side,), "orpo": (side, share)}[name]
    groups = [a + b for a, b in zip(CHOSEN, REJECTED)]
    loss = onepass.linear_loss(hidden, weight, target % V, getattr(recipes, name), *inputs, groups=groups)
    log_probs = F.linear(hidden, weight).log_softmax(-1).gather(-1, (target % V).unsqueeze(-1)).squeeze(-1)
    parts, of_reference = log_probs.split(lengths), reference.split(lengths)
    theirs = of_trl(name, parts[::2], parts[1::2], (of_reference[::2], of_reference[1::2])).mean()
    tolerance = 1e-5 if name == "orpo" else 1e-10  # whose odds TRL computes in float32
    torch.testing.assert_close(loss, theirs, rtol=tolerance, atol=tolerance)
    for ours, other in zip(gradients(loss, (hidden, weight)), gradients(theirs, (hidden, weight))):
        torch.testing.assert_close(ours, other, rtol=tolerance, atol=tolerance)


def test_recipe_of_gspo():
    """TRL's GRPO with sequence-level importance sampling and ``loss_type="grpo"``, of padded sequences."""
    lengths, T = [4, 2, 5], 5
    hidden, weight, _, target = batch("cpu", torch.float64)
    log_probs = F.linear(hidden, weight).log_softmax(-1).gather(-1, (target % V).unsqueeze(-1)).squeeze(-1)
    old = log_probs.detach() + torch.linspace(-1, 1, N).double()
    advantages = torch.tensor([1.0, -0.5, 2.0]).double()
    of_rows = advantages.repeat_interleave(torch.tensor(lengths))
    loss = onepass.linear_loss(hidden, weight, target % V, recipes.gspo, of_rows, old, groups=lengths)
    mask = (torch.arange(T) < torch.tensor(lengths).unsqueeze(-1)).double()
    ratios = [F.pad(t, (0, T - len(t))) for t in (log_probs - old).split(lengths)]
    coef = ((torch.stack(ratios) * mask).sum(-1) / mask.sum(-1)).exp().unsqueeze(-1)
    per_token = -torch.min(coef * advantages.unsqueeze(-1), coef.clamp(0.8, 1.2) * advantages.unsqueeze(-1))
    theirs = ((per_token * mask).sum(-1) / mask.sum(-1)).mean()
    torch.testing.assert_close(loss, theirs)
    for ours, other in zip(gradients(loss, (hidden, weight)), gradients(theirs, (hidden, weight))):
        torch.testing.assert_close(ours, other, rtol=1e-10, atol=1e-10)


def test_sums_of_bools_and_integers():
    groups = RowGroups(torch.tensor([0, 0, 2]), 3, torch.tensor([True, True, False]))
    for dtype in (torch.bool, torch.int64):
        of = torch.ones(3, dtype=dtype)
        assert groups.sum(of).tolist() == [2.0, 0.0, 0.0] and groups.mean(of).tolist() == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_long_groups_of_16_bit_numbers(dtype):
    groups = onepass.RowGroups(torch.zeros(70000, dtype=torch.int64), 1)
    ones = torch.ones(70000, dtype=dtype, requires_grad=True)
    assert groups.mean(ones).item() == 1 and groups.mean(ones).dtype == dtype
    small = torch.full((70000,), 0.125, dtype=dtype)
    assert groups.sum(small).item() == small.sum().item()
    groups.mean(ones).backward()
    assert torch.equal(ones.grad, torch.full_like(ones, 1 / 70000))


def test_what_has_no_entry_for_each_row():
    """It would be read out of bounds, since torch does not check the lengths."""
    groups = onepass.RowGroups(torch.tensor([0, 0, 1, 1, 1]), 2)
    for per_row in (torch.ones(2), torch.ones(9), torch.ones(2, 5), torch.tensor(1.0)):
        for function in (groups.sum, groups.mean):
            with pytest.raises(ValueError, match=r"per_row: expected shape \(5, ...\), a number or more for each row"):
                function(per_row)
    with pytest.raises(TypeError, match="per_row: expected a tensor of real numbers, got"):
        groups.sum([1.0] * 5)
    with pytest.raises(TypeError, match="per_row: expected a tensor of real numbers, got"):
        groups.sum(torch.ones(5, dtype=torch.complex64))
    with pytest.raises(TypeError, match="ids: expected an int64 tensor"):
        onepass.RowGroups([0, 1], 2)
    with pytest.raises(TypeError, match="row_mask: expected a bool tensor of shape"):
        onepass.RowGroups(torch.tensor([0, 1]), 2, torch.ones(2))
    h, w = torch.randn(6, 4), torch.randn(5, 4, requires_grad=True)
    with pytest.raises(ValueError, match="per_row: expected shape"):  # one advantage per sequence, not per token
        onepass.linear_loss(
            h, w, torch.zeros(6, dtype=torch.int64), lambda s, advantages, groups: -groups.mean(advantages[:2]),
            torch.ones(6), groups=[3, 3],
        )  # fmt: skip
