"""What every process of test_mean_group.py runs: means over a group, against those of one process that has all rows."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import onepass
from border_call import Case, parameters
from border_cases import CASES

ROWS = 7
# How many rows each process has, and whether all rows of the second are masked.
VARIANTS = {1: [([7], False)], 2: [([5, 2], False), ([4, 3], True)], 3: [([4, 0, 3], False), ([3, 2, 2], True)]}
# Lengths of groups are not divided as rows are.
REDUCED = [c for c in CASES if "mean_group" in parameters(c.function) and c.arguments.get("groups") is None]


def arguments_of(case: Case) -> dict[str, object]:
    """Of a mean over `ROWS` rows, in float64."""
    generator, found = torch.Generator().manual_seed(0), {}
    for name, value in case.values().items():
        if isinstance(value, Tensor) and value.dim():
            value = value.detach()
            if len(value) == 3:  # the rows of a case
                value = value.repeat(3, *[1] * (value.dim() - 1))[:ROWS]
            if value.is_floating_point():
                value = value.double() + 0.1 * torch.rand(value.shape, generator=generator).double()
                value = value.clamp(max=0) if name == "teacher_log_probs" else value
            value.requires_grad_(name in case.grad)
        found[name] = value
    for name in ("num_items", "reduction", "row_mask", "teacher_mask", "logits_dtype"):
        found.pop(name, None)
    return found


def part(value: object, rows: slice) -> object:
    """The rows of a tensor that has all rows; any other value unchanged."""
    if not isinstance(value, Tensor) or value.shape[:1] != (ROWS,):
        return value
    return value.detach()[rows].clone().requires_grad_(value.requires_grad)


def results(case: Case, values: dict[str, object]) -> tuple[Tensor, list[Tensor]]:
    """The loss and the gradients."""
    loss, tensors = case.call(values), [values[n] for n in case.grad]
    found = torch.autograd.grad(loss, tensors, allow_unused=True)
    return loss.detach(), [torch.zeros_like(t) if g is None else g for t, g in zip(tensors, found)]


def added(tensor: Tensor, group: object = None) -> Tensor:
    """The sum over the processes."""
    total = tensor.contiguous().clone()
    dist.all_reduce(total, group=group)
    return total


def every_loss(rank: int, ranks: int) -> None:
    for case in REDUCED:
        for sizes, masked in VARIANTS[ranks]:
            values, (first, size) = arguments_of(case), (sum(sizes[:rank]), sizes[rank])
            rows, at = torch.arange(ROWS), slice(first, first + size)
            if masked:
                values["row_mask"] = (rows < sizes[0] - 1) | (rows >= sizes[0] + sizes[1])
            mine = {n: part(v, at) for n, v in values.items()}  # before a gradient is written over logits
            expected, gradients = results(case, values)
            assert expected.isfinite() and expected != 0, case
            found, of_mine = results(case, mine | {"mean_group": dist.group.WORLD})
            wanted, got = {"loss": expected}, {"loss": added(found)}
            for name, whole, grad in zip(case.grad, gradients, of_mine, strict=True):
                split = whole.shape[:1] == (ROWS,)
                wanted[name], got[name] = whole[at] if split else whole, grad if split else added(grad)
            difference = {n: (got[n] - wanted[n]).abs().max().item() for n in got if wanted[n].numel()}
            assert max(difference.values()) < 1e-12, f"{case}, {sizes}, {masked=}: {difference}"


def nothing_to_count(rank: int, ranks: int) -> None:
    """Where all rows of all processes are masked, a mean is what it is on one process."""
    x, target = torch.randn(3, 9, requires_grad=True), torch.full((3,), -100)
    assert onepass.cross_entropy(x, target, mean_group=dist.group.WORLD).isnan()
    loss = onepass.kl_div(x, x.detach().flip(0), row_mask=target > 0, mean_group=dist.group.WORLD)
    loss.backward()
    assert loss == 0 and not x.grad.any()


def compiled(rank: int, ranks: int) -> None:
    """In one graph; a group and a mesh."""
    generator = torch.Generator().manual_seed(rank)
    hidden, weight = (torch.randn(*s, generator=generator).requires_grad_() for s in ((3 + rank, 6), (11, 6)))
    target, mask = torch.arange(3 + rank), torch.arange(3 + rank) != 1
    mesh, group = init_device_mesh("cpu", (ranks,)), dist.group.WORLD
    functions = (
        lambda h, w: onepass.cross_entropy(h @ w.T, target, row_mask=mask, mean_group=group),
        lambda h, w: onepass.linear_cross_entropy(h, w, target, class_weights=torch.arange(11.0), mean_group=mesh),
        lambda h, w: onepass.kl_div(h @ w.T, torch.ones(3 + rank, 11), mean_group=group),
    )

    def call(h: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        return [function(h, w) for function in functions]

    expected = call(hidden, weight)
    found = torch.compile(call, fullgraph=True, backend="aot_eager")(hidden, weight)
    torch.testing.assert_close(found, expected)
    both = [torch.autograd.grad(a + 2 * b + 3 * c, (hidden, weight)) for a, b, c in (found, expected)]
    torch.testing.assert_close(*both)


def of_a_mesh(rank: int, ranks: int) -> None:
    """Rows over one dimension of a mesh, the vocabulary over the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "vocab"))
    row, column = mesh["rows"].get_local_rank(), mesh["vocab"].get_local_rank()
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(*s, generator=generator).double().requires_grad_() for s in ((ROWS, 6), (11, 6)))
    teacher, ids = torch.randn(ROWS, 11, generator=generator).double(), torch.tensor([[1, 5], [7, 10]] * 4)[:ROWS]
    target = torch.randint(11, (ROWS,), generator=generator)
    target[1] = -100
    weights = torch.rand(11, generator=generator)
    log_probs = torch.full((ROWS, 2), -1.0).double()
    rows, columns = (slice(5), slice(5, ROWS))[row], (slice(4), slice(4, 11))[column]
    losses = (
        lambda x, r, **o: onepass.cross_entropy(x, target[r], **o),
        lambda x, r, **o: onepass.cross_entropy(
            x, target[r], class_weights=weights, label_smoothing=0.1, z_loss_weight=0.1, **o
        ),
        lambda x, r, **o: onepass.distillation_loss(x, target[r], ids[r], log_probs[r], temperature=2.0, **o),
        lambda x, r, **o: onepass.kl_div(x, teacher[r], row_mask=target[r] >= 0, **o),
    )
    for loss in losses:
        whole = loss(onepass.LinearLogits(hidden, weight), slice(None))
        of_hidden, of_weight = torch.autograd.grad(whole, (hidden, weight))
        for sharded in (True, False):  # the head, or its logits
            h, w = (t.detach().requires_grad_() for t in (hidden[rows], weight[columns]))
            logits = (
                onepass.LinearLogits(h, w, vocab_group=mesh["vocab"])
                if sharded
                else onepass.VocabParallelLogits(h @ w.T, mesh["vocab"])
            )
            mine = loss(logits, rows, mean_group=mesh["rows"])
            gradients = torch.autograd.grad(mine, (h, w))
            torch.testing.assert_close(added(mine.detach(), mesh["rows"].get_group()), whole.detach())
            torch.testing.assert_close(added(gradients[1], mesh["rows"].get_group()), of_weight[columns])
            of_hidden_here = gradients[0] if sharded else added(gradients[0], mesh["vocab"].get_group())
            torch.testing.assert_close(of_hidden_here, of_hidden[rows])

    overlap = "mean_group: expected no other process of vocab_group than this one, since .*, got [24] of its processes"
    for group in (mesh["vocab"], dist.group.WORLD):
        refused(lambda: losses[0](logits, rows, mean_group=group), ValueError, overlap)  # noqa: B023
    refused(lambda: losses[0](logits, rows, mean_group=mesh), ValueError, "mean_group: expected a device mesh of one")


def compiled_of_a_mesh(rank: int, ranks: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "vocab"))
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(*s, generator=generator).double().requires_grad_() for s in ((4, 6), (5, 6)))
    target = torch.tensor([1, -100, 7, 9]) if mesh["rows"].get_local_rank() else torch.tensor([-100, 0, 3, 3])

    def call(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return onepass.linear_cross_entropy(hidden, weight, target, vocab_group=mesh["vocab"], mean_group=mesh["rows"])

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    found, expected = (torch.autograd.grad(f(hidden, weight), (hidden, weight)) for f in (compiled, call))
    torch.testing.assert_close(found, expected)


def refused(call, error: type[Exception], message: str) -> None:
    import pytest

    with pytest.raises(error, match=f"^{message}"):
        call()


def every_error(rank: int, ranks: int) -> None:
    """The option with another that it contradicts, or what is no group."""
    for case in REDUCED:
        plain, group = arguments_of(case), {"mean_group": dist.group.WORLD}
        for wrong, got in (
            ({"reduction": "sum"}, "reduction='sum'"), ({"reduction": "none"}, "reduction='none'"),
            ({"num_items": 3}, "num_items=3"), ({"num_items": torch.tensor(3)}, "num_items=torch.int64 of shape"),
        ):  # fmt: skip
            expected = f"mean_group: expected reduction='mean' without num_items, got {got}"
            refused(lambda: case.call(plain | group | wrong), ValueError, expected)  # noqa: B023
        for wrong in ("data", 3, dist.GroupMember.NON_GROUP_MEMBER, True):
            expected = "mean_group: expected a ProcessGroup or a DeviceMesh, got "
            refused(lambda: case.call(plain | {"mean_group": wrong}), TypeError, expected)  # noqa: B023
