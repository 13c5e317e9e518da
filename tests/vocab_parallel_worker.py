"""What every process of test_vocab_parallel.py runs: losses of sharded logits against those of all logits."""

import datetime
import gc
import importlib.machinery
import itertools
import math
import os
import signal
import sys
import traceback

import pytest
import torch
import torch.distributed as dist

import onepass
from onepass.core.options import Transform
from onepass.logits import gradients
from onepass.logits.vocab_parallel import VocabParallelLogits, _agreed
from references import search_fewer_modules
from vocab_parallel_cases import CASES, ROWS, SPLITS, VOCAB, close, finite_rows, head_of, rows_of, weights

PLACE = torch.device("cpu")  # of what is sharded; everything that it is compared with is computed on a CPU


def results_of(case, x, target, mask, gradient):
    results = CASES[case](x, target, mask)
    results = list(results) if isinstance(results, (tuple, list)) else [results]
    if not gradient:
        return results
    generator = torch.Generator().manual_seed(4)
    used = [r for r in results if r.requires_grad]
    upstream = [torch.randn(r.shape, generator=generator).to(r) for r in used]
    torch.autograd.backward(used, upstream)
    return results


def compare(case, rank, ranks, dtype, padding, hard):
    """Values and gradients of one case on this process's columns, which are views of other memory."""
    group = dist.group.WORLD
    x, target, mask = (rows_of if hard else finite_rows)(dtype)
    first = sum(SPLITS[ranks][:rank])
    size = SPLITS[ranks][rank]
    whole = x.clone().requires_grad_()
    local = x[..., first : first + size]
    if padding and rank >= ranks - 2:  # on the last two ranks; the last may hold nothing else
        local = torch.cat([local, torch.full((*ROWS, 3), math.nan if rank == ranks - 1 else 7.0, dtype=dtype)], -1)
        if rank == ranks - 2 and ranks > 1:
            local = local[..., :size]
    local = torch.stack([local, local]).to(PLACE)[0].detach().requires_grad_()
    expected = results_of(case, whole, target, mask, True)
    logits = VocabParallelLogits(local, group, VOCAB)
    assert logits.shape == whole.shape
    inputs = target.to(PLACE), mask.to(PLACE)
    found = results_of(case, logits, *inputs, True)
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-6}[dtype]
    for n, (a, b) in enumerate(zip(found, expected, strict=True)):
        close(a.detach(), b.detach(), tolerance, f"{case}, result {n}")
    of_gradient = 2e-2 if dtype == torch.bfloat16 else tolerance * 4
    close(local.grad[..., :size], whole.grad[..., first : first + size], of_gradient, f"{case}, gradient")
    assert not local.grad[..., size:].any(), case
    with torch.no_grad():
        constant = results_of(case, VocabParallelLogits(local.detach(), group, VOCAB), *inputs, False)
    for a, b in zip(constant, found):
        assert torch.equal(a.nan_to_num(), b.detach().nan_to_num()), f"{case} without a gradient"


LINEAR = CASES


def policy(s, advantages, old):
    ratio = (s.log_probs - old).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages) - 0.01 * s.entropy


def policy_loss(hidden, weight, bias, target, mask, **options):
    generator = torch.Generator().manual_seed(8)
    advantages, old = (torch.randn(ROWS, generator=generator, dtype=torch.float64) for _ in range(2))
    return onepass.linear_loss(
        hidden, weight, target.clamp(min=0), policy, advantages.to(hidden), old.sub(3).to(hidden),
        bias=bias, row_mask=mask, **options,
    )  # fmt: skip


def compare_linear(case, rank, ranks, dtype, padding, tiled, sequence):
    """A head of which this process holds some rows of the weight, and some hidden states if ``sequence``."""
    group = dist.group.WORLD
    gradients.ROWS_OF_PART = 2048 if tiled else 2  # several tiles, or several parts of one
    (hidden, weight, bias), target, mask = head_of(dtype)
    wide = {"logits_dtype": torch.float32} if dtype == torch.bfloat16 else {}  # sums of ranks are rounded once more
    first, size = sum(SPLITS[ranks][:rank]), SPLITS[ranks][rank]
    extra = 3 if padding and rank == ranks - 1 else 0
    rows = slice(rank * ROWS[0] // ranks, (rank + 1) * ROWS[0] // ranks) if sequence else slice(None)
    local = [hidden.detach()[rows].clone(), *(t.detach()[first : first + size] for t in (weight, bias))]
    local[1:] = [torch.cat([t, torch.full((extra, *t.shape[1:]), math.nan, dtype=dtype)]) for t in local[1:]]
    local = [t.to(PLACE).requires_grad_() for t in local]
    options = dict(vocab_group=group, vocab_size=VOCAB, sequence_parallel=sequence) | wide

    def results(parts, **options):
        inputs = target.to(parts[0].device), mask.to(parts[0].device)
        if case == "policy":
            found = [policy_loss(*parts, *inputs, **options)]
        else:
            found = LINEAR[case](onepass.LinearLogits(*parts, **options), *inputs)
        found = list(found) if isinstance(found, (tuple, list)) else [found]
        generator = torch.Generator().manual_seed(4)
        used = [r for r in found if r.requires_grad]
        torch.autograd.backward(used, [torch.randn(r.shape, generator=generator).to(r) for r in used])
        return found

    if tiled:
        try:
            results(local, max_memory=1, **options)
            raise AssertionError("max_memory is ignored")
        except ValueError as error:
            least = int(str(error).split("at least ")[1].split(" ")[0])
        options["max_memory"] = least + 2000
    expected, found = results((hidden, weight, bias), **wide), results(local, **options)
    tolerance = {torch.float64: 1e-12, torch.float32: 4e-6, torch.bfloat16: 3e-2}[dtype]
    for n, (a, b) in enumerate(zip(found, expected, strict=True)):
        close(a.detach(), b.detach(), tolerance, f"{case}, result {n}")
    wanted = [hidden.grad[rows], weight.grad[first : first + size], bias.grad[first : first + size]]
    for name, of, grad in zip(("hidden", "weight", "bias"), local, wanted):
        close(of.grad[: len(grad)], grad, tolerance, f"{case}, gradient of {name}")
        assert not of.grad[len(grad) :].any(), f"{case}, padding of {name}"
    if not tiled:  # with frozen parameters, the forward may compute the derivative of a field
        alone = local[0].detach().requires_grad_()
        results([alone, *(t.detach() for t in local[1:])], **options)
        close(alone.grad, wanted[0], tolerance, f"{case}, gradient of hidden, frozen head")


def merge_gradcheck(rank, ranks):
    """Each rank's columns, with all upstream gradients, against finite differences of the whole."""
    x, target, _mask = finite_rows(torch.float64)
    first, size = sum(SPLITS[ranks][:rank]), SPLITS[ranks][rank]
    local = x[..., first : first + size].clone().requires_grad_()
    statistics = onepass.softmax_statistics(
        VocabParallelLogits(local, dist.group.WORLD), target.clamp(min=0), class_weights=weights(x).double()
    )
    fields = [f for f in vars(statistics).values() if f is not None and f.requires_grad]
    directions = torch.randn(len(fields), generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    (grad,) = torch.autograd.grad([f.sum() * d for f, d in zip(fields, directions)], local)
    names = [n for n, f in vars(statistics).items() if f is not None and f.requires_grad]

    def value(x):
        s = onepass.softmax_statistics(x, target.clamp(min=0), class_weights=weights(x).double())
        # The shift has no gradient, so that it is held fixed.
        parts = {n: getattr(s, n) for n in names}
        return sum((parts[n].sum() * d for n, d in zip(names, directions)), torch.zeros((), dtype=torch.float64))

    step = 1e-6
    for row, column in ((0, 0), (5, size // 2), (11, size - 1)):
        delta = torch.zeros(math.prod(ROWS), VOCAB, dtype=torch.float64)
        at = x.view(-1, VOCAB)[row]
        if first + column == at.argmax():
            continue  # the shift moves with it
        delta[row, first + column] = step
        numeric = (value(x + delta.view_as(x)) - value(x - delta.view_as(x))) / (2 * step)
        assert abs(numeric - grad.view(-1, size)[row, column]) < 1e-6, (row, column)


def hard_pairs(rank, ranks):
    """Both sides have hard rows and need a gradient; one of them may have all columns, or be sharded in another way."""
    groups, shares = [dist.new_group(range(ranks)) for _ in range(2)], (SPLITS[ranks], SPLITS[ranks][::-1])
    sides = list(itertools.product((None, 0, 1), (None, 0)))
    if os.environ.get("TRITON_INTERPRET") == "1":
        sides = [(0, 0)]
    for dtype, tolerance in ((torch.float32, 8e-6), (torch.float64, 1e-12)):
        x, _target, mask = rows_of(dtype)
        y = rows_of(dtype, seed=7)[0].flip(0).roll(1, 1)
        for direction, splits in itertools.product(("forward", "reverse", "jsd"), sides):
            whole = [t.clone().requires_grad_() for t in (x, y)]
            expected = onepass.kl_div(*whole, row_mask=mask, direction=direction, reduction="none")
            finite = expected.detach().isfinite() & (mask != 0)
            expected[finite].sum().backward()
            parts, slices = [], []
            for t, split in zip((x, y), splits):
                sizes = None if split is None else shares[split]
                columns = slice(None) if sizes is None else slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
                parts.append(t[..., columns].to(PLACE, copy=True).requires_grad_())
                slices.append(columns)
            pair = [p if s is None else VocabParallelLogits(p, groups[s]) for p, s in zip(parts, splits)]
            found = onepass.kl_div(*pair, row_mask=mask.to(PLACE), direction=direction, reduction="none")
            close(found.detach(), expected.detach(), tolerance, f"{direction}, {splits}")
            found[finite.to(PLACE)].sum().backward()
            for p, w, columns in zip(parts, whole, slices):
                close(p.grad.cpu()[finite], w.grad[finite][..., columns], tolerance, f"{direction}, {splits}, gradient")


def materialized(rank, ranks):
    """All logits of a sharded head, and the gradients of what is computed from them, also of sequence parallelism."""
    first, size = sum(SPLITS[ranks][:rank]), SPLITS[ranks][rank]
    for sequence in (False, True):
        (hidden, weight, bias), _target, _mask = head_of(torch.float64)
        rows = slice(rank * ROWS[0] // ranks, (rank + 1) * ROWS[0] // ranks) if sequence else slice(None)
        parts = [
            t.detach()[s].clone() for t, s in zip((hidden, weight, bias), (rows, *[slice(first, first + size)] * 2))
        ]
        local = [t.requires_grad_() for t in parts]
        logits = onepass.LinearLogits(*local, vocab_group=dist.group.WORLD, sequence_parallel=sequence).materialize()
        expected = torch.nn.functional.linear(hidden, weight, bias)
        close(logits.detach(), expected.detach(), 1e-12, "materialized")
        logits.sin().sum().backward(), expected.sin().sum().backward()
        wanted = hidden.grad[rows], weight.grad[first : first + size], bias.grad[first : first + size]
        for name, of, grad in zip(("hidden", "weight", "bias"), local, wanted):
            close(of.grad, grad, 1e-12, f"materialized, gradient of {name}, {sequence=}")


def disagreement(rank, ranks):
    """Shapes on which processes disagree are an error on all of them."""
    group = dist.group.WORLD
    for rows, dtype, vocab in (((3 + rank,), torch.float32, None), ((3,), (torch.float32, torch.bfloat16)[rank], None),
                               ((5,), torch.float32, 7 + rank)):  # fmt: skip
        try:
            VocabParallelLogits(torch.zeros(*rows, 6, dtype=dtype), group, vocab)
        except ValueError as error:
            assert "on all ranks, got" in str(error), error
        else:
            raise AssertionError((rows, dtype, vocab))
    half = [torch.zeros(n, 6, dtype=torch.bfloat16) for n in (3, 7)]
    for options in ({"max_memory": 2**28 + rank}, {"logits_dtype": torch.float32 if rank else None}):
        try:
            onepass.LinearLogits(*half, vocab_group=group, **options)
        except ValueError as error:
            assert "on all ranks, got" in str(error), error
        else:
            raise AssertionError(options)
    for which in (0, 1):  # what is trained on one process alone
        tensors = [t.clone().requires_grad_(rank == 0 and n == which) for n, t in enumerate(half)]
        with pytest.raises(ValueError, match="whether hidden and weight require a gradient"):
            onepass.LinearLogits(*tensors, vocab_group=group)
    for wrong, match in (("group", TypeError), (None, TypeError)):
        try:
            VocabParallelLogits(torch.zeros(3, 6), wrong)
        except match as error:
            assert str(error).startswith("group: expected"), error
        else:
            raise AssertionError(wrong)
    try:
        VocabParallelLogits(torch.zeros(4, 6), group, 13)
    except ValueError as error:
        assert "vocab_size: expected 1 to 12" in str(error)
    else:
        raise AssertionError("vocab_size")


def dtensor(rank, ranks):
    """Of a vocabulary that no number of ranks divides, and rows that are sharded over another dimension of the mesh."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    x, target, mask = finite_rows(torch.float32)
    mesh = init_device_mesh("cpu", (ranks,))
    for placement in (Shard(2), Replicate()):
        whole = x.clone().requires_grad_()
        expected = onepass.cross_entropy(whole, target, row_mask=mask)
        expected.backward()
        sharded = distribute_tensor(x.clone(), mesh, [placement]).requires_grad_()
        found = onepass.cross_entropy(sharded, target, row_mask=mask)
        found.backward()
        close(found.detach(), expected.detach(), 1e-6, "dtensor")
        close(sharded.grad.full_tensor(), whole.grad, 1e-6, "dtensor, gradient")
        both = onepass.selective_log_softmax_and_entropy(sharded, target.clamp(min=0))
        for a, b in zip(both, onepass.selective_log_softmax_and_entropy(x, target.clamp(min=0))):
            close(a.detach(), b, 2e-6, "dtensor")


def mesh(rank, ranks):
    """A head from a `DeviceMesh`, whose weight is a DTensor."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    (hidden, weight, _bias), target, _mask = head_of(torch.float32)
    of_mesh = init_device_mesh("cpu", (ranks,))
    sharded = distribute_tensor(weight.detach(), of_mesh, [Shard(0)]).requires_grad_()
    mine = hidden.detach().clone().requires_grad_()
    found = onepass.linear_cross_entropy(mine, sharded, target, vocab_group=of_mesh)
    expected = onepass.linear_cross_entropy(hidden, weight, target)
    found.backward(), expected.backward()
    close(found.detach(), expected.detach(), 1e-6, "mesh")
    close(sharded.grad.full_tensor(), weight.grad, 2e-6, "mesh, weight")
    close(mine.grad, hidden.grad, 2e-6, "mesh, hidden")


def unlike_operands(rank, ranks):
    """Tiles are the same on all processes, whether their kernels can read the weight or not, and for unequal shards."""
    generator = torch.Generator().manual_seed(11)
    hidden, weight = (torch.randn(n, 8, generator=generator).half() for n in (40, 700))
    index = torch.randint(700, (40,), generator=generator)
    expected = onepass.selective_log_softmax_and_entropy(onepass.LinearLogits(hidden.double(), weight.double()), index)
    for size, shift in ((350, rank), (100, 0)):  # from an address that is no multiple of 16 bytes on the second
        _agreed.clear()
        rows = slice(0, size) if rank == 0 else slice(size, 700)
        flat = torch.empty(weight[rows].numel() + 1, dtype=torch.half)
        mine = flat[shift : shift + weight[rows].numel()].view(-1, 8).copy_(weight[rows])
        options = dict(vocab_group=dist.group.WORLD)
        with torch.no_grad():
            with pytest.raises(ValueError) as error:
                onepass.linear_selective_log_softmax_and_entropy(hidden, mine, index, max_memory=1, **options)
            options["max_memory"] = int(str(error.value).split("at least ")[1].split(" ")[0]) + 10_000
            found = onepass.linear_selective_log_softmax_and_entropy(hidden, mine, index, **options)
        for a, b in zip(found, expected):
            close(a, b.to(a.dtype), 2e-3, f"{size}, {shift}")


def few_columns(rank, ranks):
    """A divergence over fewer columns than the first process holds, so that the others compare none."""
    generator = torch.Generator().manual_seed(12)
    hidden, weight = (torch.randn(n, 4, generator=generator) for n in (3, 12))
    teacher = torch.randn(3, 12, generator=generator)
    mine, whole = weight[6 * rank : 6 * rank + 6].clone().requires_grad_(), weight.clone().requires_grad_()
    found = onepass.linear_kl_div(hidden, mine, teacher, vocab_size=5, vocab_group=dist.group.WORLD)
    expected = onepass.linear_kl_div(hidden, whole, teacher, vocab_size=5)
    found.backward(), expected.backward()
    close(found.detach(), expected.detach(), 4e-6, "few columns")
    close(mine.grad, whole.grad[6 * rank : 6 * rank + 6], 4e-6, "few columns, gradient")


def second_backward(rank, ranks):
    """A gradient may be written to before another backward through the same loss."""
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(rank)).requires_grad_()
    loss = onepass.cross_entropy(VocabParallelLogits(x, dist.group.WORLD), torch.tensor([1, 7, 3]))
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    kept = first.clone()
    first.mul_(2)
    close(torch.autograd.grad(loss, x)[0], kept, 1e-12, "second backward")


def odd_shards(rank, ranks):
    """A process with padding alone, no class per row, class weights with padding or without, and a mesh in disorder."""
    from torch.distributed.device_mesh import DeviceMesh

    group, mine = dist.group.WORLD, slice(5 * rank, 5 * rank + 5)
    whole = torch.randn(3, 10, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    ids, log_probs = torch.tensor([[0, 1]] * 3), torch.full((3, 2), -1.0, dtype=torch.float64)
    x, y = whole[:, mine].clone().requires_grad_(), whole[:, :5].clone().requires_grad_()
    found = onepass.topk_kl_div(VocabParallelLogits(x, group, 5), ids, log_probs, renormalize=True)
    expected = onepass.topk_kl_div(y, ids, log_probs, renormalize=True)
    found.backward(), expected.backward()
    close(found.detach(), expected.detach(), 1e-12, "padding alone")
    close(x.grad, y.grad if rank == 0 else torch.zeros(3, 5, dtype=x.dtype), 1e-12, "padding alone, gradient")
    none, _agreed[group] = ids[:, :0], {}
    both = onepass.selective_log_softmax_and_entropy(VocabParallelLogits(whole[:, mine], group), none)
    right = onepass.selective_log_softmax_and_entropy(whole, none)
    for a, b in zip(both, right):
        close(a, b, 1e-12, "no class")
    assert onepass.topk_kl_div(VocabParallelLogits(whole[:, mine], group), none, log_probs[:, :0]) == 0
    weights_of_all = torch.arange(1.0, 11, dtype=torch.float64)
    target, of_head = torch.tensor([1, 7, 3]), torch.eye(3, dtype=torch.float64)
    expected = onepass.cross_entropy(whole[:, :8], target, class_weights=weights_of_all[:8])
    _agreed[group] = {}
    for given in (weights_of_all[mine], weights_of_all[:8][mine]):
        for logits in (
            VocabParallelLogits(whole[:, mine], group, 8),
            onepass.LinearLogits(of_head, whole[:, mine].T.contiguous(), vocab_group=group, vocab_size=8),
        ):
            close(onepass.cross_entropy(logits, target, class_weights=given), expected, 1e-12, "class weights")
    outside = VocabParallelLogits(whole[:, mine], group, 8).selected(torch.tensor([[-1, 0, 7, 8, 9]] * 3), Transform())
    assert outside.isnan().tolist() == [[True, False, False, True, True]] * 3
    with pytest.raises(ValueError, match=r"^group: expected a mesh with ascending ranks along the vocabulary"):
        VocabParallelLogits(whole[:, mine], DeviceMesh("cpu", [1, 0]))
    for wrong in (0, -3, 11):
        with pytest.raises(ValueError, match=r"^vocab_size: expected 1 to 10, the columns of all ranks"):
            VocabParallelLogits(whole[:, mine], group, wrong)


def one_rank_fails(rank, ranks):
    logits = VocabParallelLogits(torch.zeros(3, 6), dist.group.WORLD)
    if rank == 1:
        raise RuntimeError("only here")
    onepass.entropy_from_logits(logits)


def function_named(name):
    """A function of this file, or ``file.function`` of another one."""
    module, _, function = name.rpartition(".")
    return getattr(importlib.import_module(module), function) if module else globals()[name]


def main(rank, ranks, path, what):
    torch.set_num_threads(1)
    if what.get("gpu") or os.environ.get("TRITON_INTERPRET"):  # gradients of few logits in the forward too
        importlib.import_module("onepass.kernels.softmax_gradient").LEAST_EARLY = 0
    timeout = datetime.timedelta(seconds=what.get("timeout", 60))
    backend = "gloo"
    if what.get("gpu"):  # processes may share one, which NCCL refuses
        global PLACE
        gpus = torch.cuda.device_count()
        PLACE, backend = torch.device("cuda", rank % gpus), "nccl" if gpus >= ranks else "gloo"
        torch.cuda.set_device(PLACE)
    dist.init_process_group(backend, init_method=f"file://{path}", rank=rank, world_size=ranks, timeout=timeout)
    failures = []
    first, step = what.get("share", (0, 1))
    for number, (dtype_name, padding, hard) in enumerate(what["variants"]):
        _agreed.clear()  # the same head has other padding
        for case in what.get("cases") or [*CASES][(first + number) % step :: step]:
            try:
                compare(case, rank, ranks, getattr(torch, dtype_name), padding, hard)
            except Exception:
                failures.append(f"{case} {dtype_name} padding={padding} hard={hard}\n{traceback.format_exc()}")
                if len(failures) > 2:
                    break
    for number, (dtype_name, padding, tiled, sequence) in enumerate(what.get("linear", ())):
        _agreed.clear()
        for case in what.get("cases") or [*LINEAR, "policy"][(first + number) % step :: step]:
            try:
                compare_linear(case, rank, ranks, getattr(torch, dtype_name), padding, tiled, sequence)
            except Exception:
                failures.append(f"{case} {dtype_name} {padding=} {tiled=} {sequence=}\n{traceback.format_exc()}")
                if len(failures) > 2:
                    break
    for name in what.get("functions", ()):
        try:
            function_named(name)(rank, ranks)
        except Exception:
            failures.append(f"{name}\n{traceback.format_exc()}")
    if failures:
        print(f"rank {rank} of {ranks}:", *failures, sep="\n", flush=True)
        os._exit(1)
    dist.destroy_process_group()


def fork(jobs, folder):
    """Run every job in processes of its own, which are forked after everything is imported."""
    for name in {name for job in jobs for name in job.get("functions", ())}:
        function_named(name)
        if name == "dtensor":  # which imports both, for seconds
            importlib.import_module("torch._dynamo")
            importlib.import_module("torch.distributed.tensor")
    search_fewer_modules(pytest.MonkeyPatch())
    gc.freeze()
    failed = 0
    for number, job in enumerate(jobs):
        children = []
        for rank in range(job["ranks"]):
            child = os.fork()
            if child == 0:
                signal.alarm(200)  # ends it: groups that a mesh makes wait half an hour for a process that has failed
                try:
                    main(rank, job["ranks"], f"{folder}/store{number}", job)
                except BaseException:
                    traceback.print_exc()
                    os._exit(1)
                os._exit(0)
            children.append(child)
        failed += sum(os.waitpid(child, 0)[1] != 0 for child in children)
    return failed


if __name__ == "__main__":
    import json

    if os.environ.get("TRITON_INTERPRET") == "1":
        from paths import quick_interpreter

        quick_interpreter(pytest.MonkeyPatch())
        for case in "statistics 1", "kl_div whole 0":  # kernels are prepared once, and not in each process
            logits, *inputs = finite_rows(torch.float32)
            results_of(case, logits.requires_grad_(), *inputs, True)
    sys.exit(fork(json.loads(sys.argv[2]), sys.argv[1]))
