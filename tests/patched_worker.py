"""What every process of test_vocab_parallel.py patches: losses of sharded vocabularies of other libraries."""

import importlib
import os
import sys
import types
from contextlib import contextmanager

import pytest
import torch
import torch._dynamo  # DTensors import it, which is done once, before processes are forked
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel

import onepass
from onepass.integrations import torch as of_torch
from onepass.integrations import torchtitan as of_torchtitan
from vocab_parallel_cases import ROWS, VOCAB, close, finite_rows, head_of, weights


def patched_torch(rank, ranks):
    """`torch.nn.functional.cross_entropy` of a DTensor, under `loss_parallel` and without it, by torch and patched."""
    mesh = init_device_mesh("cpu", (ranks,))
    x, target, _mask = finite_rows(torch.float32)
    x, target = x.flatten(0, 1), target.flatten()

    def results(placements, **options):
        logits = distribute_tensor(x.clone(), mesh, placements).requires_grad_()
        loss = torch.nn.functional.cross_entropy(logits, target, **options)
        assert isinstance(loss, DTensor) and loss.placements == (Replicate(),)
        loss.sum().backward()
        return loss.full_tensor().detach(), logits.grad.full_tensor()

    for reduction in ("mean", "sum", "none"):
        with loss_parallel():
            theirs = results([Shard(1)], reduction=reduction)
            with onepass.patch("torch") as patch:
                ours = results([Shard(1)], reduction=reduction)
        assert [r.name for r in patch.replaced if r.module == "torch.nn.functional"] == ["cross_entropy"], patch
        for a, b in zip(ours, theirs):
            close(a, b, 2e-6, f"torch, {reduction}")
    for options in (dict(label_smoothing=0.1), dict(weight=weights()), dict(weight=weights(), label_smoothing=0.2)):
        plain = x.clone().requires_grad_()
        expected = torch.nn.functional.cross_entropy(plain, target, **options)
        expected.backward()
        with onepass.patch("torch"):
            ours = results([Shard(1)], **options)
            assert torch.equal(torch.nn.functional.cross_entropy(plain, target, **options), expected)
        for a, b in zip(ours, (expected.detach(), plain.grad)):
            close(a, b, 2e-6, f"torch, {list(options)}")
    compiled_torch(x, target, mesh)


def compiled_torch(x, target, mesh):
    """A compiled function keeps torch's cross-entropy."""

    def loss_of(logits, target):
        return torch.nn.functional.cross_entropy(logits, target)

    def unreachable(*args, **kwargs):
        raise AssertionError("onepass computes the loss of a compiled function")

    logits = distribute_tensor(x, mesh, [Shard(1)])
    expected = torch.nn.functional.cross_entropy(x, target)
    with onepass.patch("torch"), pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(of_torch.losses, "cross_entropy", unreachable)
        with pytest.raises(AssertionError, match="onepass computes"):
            loss_of(logits, target)  # not compiled
        with loss_parallel():
            found = torch.compile(loss_of, backend="aot_eager")(logits, target)
    close(found.full_tensor(), expected, 2e-6, "torch, compiled")


def patched_torchtitan(rank, ranks):
    """torchtitan's loss, from the folder ``TORCHTITAN`` if that is set; else a stand-in for each form that it had."""
    real = os.environ.get("TORCHTITAN")
    if real:
        sys.path.insert(0, real)
        library = importlib.import_module("torchtitan.components.loss")
        return compare_torchtitan(rank, ranks, library)
    for package in "torchtitan", "torchtitan.components":
        sys.modules[package] = types.ModuleType(package)
        sys.modules[package].__path__ = []
        sys.modules[package].__spec__ = importlib.machinery.ModuleSpec(package, None, is_package=True)
    for version in ("0.2.1", "0.2.2", "0.3.0"):
        sys.modules["torchtitan"].__version__ = version
        library = torchtitan_of(version)
        sys.modules[library.__name__] = sys.modules["torchtitan.components"].loss = library
        compare_torchtitan(rank, ranks, library)
    sys.modules["torchtitan"].__version__ = "0.4.0"
    with onepass.patch("torchtitan") as patch:
        assert not patch.replaced and "from 0.2 to before 0.4" in str(patch), patch


def torchtitan_of(version):
    """Names and parameters of that version, and what they do."""
    library = types.ModuleType("torchtitan.components.loss")
    reduction = "mean" if version == "0.2.1" else "sum"

    def cross_entropy_loss(pred, labels):
        return torch.nn.functional.cross_entropy(pred.flatten(0, 1).float(), labels.flatten(), reduction=reduction)

    library.cross_entropy_loss = cross_entropy_loss
    if version != "0.2.1":
        library.IGNORE_INDEX = -100
    if version == "0.3.0":
        library.cross_entropy_loss = lambda pred, labels, *, global_vocab_size=None: of_backend(
            library, pred, labels, cross_entropy_loss
        )
        library.get_spmd_backend = lambda: library.backend
        library.spmd = types.SimpleNamespace(is_type_checking=lambda: library.checks)
        library.current_spmd_mesh = lambda: library.mesh
        library.spmd_mesh_size = lambda name: 1 if library.mesh is None else library.mesh[name].size()
        library.backend, library.checks, library.mesh = "partial_dtensor", False, None
    return library


def of_backend(library, pred, labels, of_tensor):
    """The loss of logits that are sharded: a tensor, as from torchtitan 0.3 on."""
    sharded = isinstance(pred, DTensor) or (library.backend == "spmd_types" and library.mesh is not None)
    if sharded and not isinstance(pred, DTensor):
        pred = DTensor.from_local(pred, library.mesh, [Shard(2)], shape=(*ROWS, VOCAB), stride=(4 * VOCAB, VOCAB, 1))
    labels = labels.full_tensor() if isinstance(labels, DTensor) else labels
    return of_tensor(pred.full_tensor() if sharded else pred, labels)


@contextmanager
def spmd_types(library, mesh):
    """Within it, torchtitan takes plain tensors for shards."""
    if hasattr(library, "backend"):
        library.backend, library.mesh = "spmd_types", mesh
        yield
        library.backend, library.mesh = "partial_dtensor", None
        return
    utils = importlib.import_module("torchtitan.distributed.utils")
    utils.set_spmd_backend("spmd_types")
    with importlib.import_module("torchtitan.distributed.spmd_types").set_current_spmd_mesh(mesh):
        yield
    utils.set_spmd_backend("partial_dtensor")


def compare_torchtitan(rank, ranks, library):
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
    if os.environ.get("TORCHTITAN") and hasattr(library, "get_spmd_backend"):
        importlib.import_module("torchtitan.distributed.utils").set_spmd_backend("partial_dtensor")
    x, target, _mask = finite_rows(torch.float32)
    target[2, 1] = -100
    whole = lambda dtype: x.to(dtype, copy=True)  # noqa: E731
    sharded = lambda dtype: distribute_tensor(x.to(dtype, copy=True), mesh, [Shard(2)])  # noqa: E731

    def results(of, dtype, **options):
        logits = of(dtype).requires_grad_()
        with loss_parallel():
            loss = library.cross_entropy_loss(logits, target, **options)
            loss.backward()
        return loss.detach(), logits.grad

    def of_all():
        found = [results(of, dtype) for of in (whole, sharded) for dtype in (torch.float32, torch.bfloat16)]
        if hasattr(library, "get_spmd_backend"):
            with spmd_types(library, mesh):
                found.append(results(lambda dtype: sharded(dtype).to_local(), torch.float32, global_vocab_size=VOCAB))
        return found

    theirs, original, calls = of_all(), library.cross_entropy_loss, []
    with onepass.patch("torchtitan") as patch, pytest.MonkeyPatch.context() as monkeypatch:
        assert [r.name for r in patch.replaced if r.module == library.__name__] == ["cross_entropy_loss"], patch
        computed = of_torchtitan.cross_entropy
        monkeypatch.setattr(
            of_torchtitan, "cross_entropy", lambda *args, **options: calls.append(args) or computed(*args, **options)
        )
        ours = of_all()
        assert len(calls) == len(ours)
        both = [distribute_tensor(t, mesh, [Replicate()]) for t in (x, target)]
        library.cross_entropy_loss(*both)
        assert len(calls) == len(ours)  # not of replicated logits
        monkeypatch.undo()
        compiled = torch.compile(lambda *args: library.cross_entropy_loss(*args), backend="aot_eager")
        for of in (whole, sharded):
            with loss_parallel():
                found, expected = (f(of(torch.float32), target) for f in (compiled, original))
            found, expected = (t.full_tensor() if isinstance(t, DTensor) else t for t in (found, expected))
            close(found, expected, 4e-6, "torchtitan, compiled")
    assert library.cross_entropy_loss is original
    for n, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        for found, expected in zip(a, b):
            assert type(found) is type(expected) and found.dtype == expected.dtype, (n, found, expected)
            found, expected = (t.full_tensor() if isinstance(t, DTensor) else t for t in (found, expected))
            close(found, expected, 2e-2 if found.dtype == torch.bfloat16 else 4e-6, f"torchtitan, {n}")


@torch.compiler.set_stance("force_eager")  # Megatron and verl compile theirs, which needs a C++ compiler
def patched_megatron(rank, ranks):
    """Megatron-core's two cross-entropies, original and patched, with a target that is no token."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.fusions import fused_cross_entropy

    parallel_state.initialize_model_parallel(ranks)
    group = parallel_state.get_tensor_model_parallel_group()
    x, target, _mask = finite_rows(torch.float32)
    x, target = x[..., : VOCAB - VOCAB % ranks], target.clamp(0, VOCAB - ranks)
    size = x.shape[-1] // ranks
    local = x[..., rank * size : (rank + 1) * size]
    weights = torch.rand(ROWS, generator=torch.Generator().manual_seed(7)).index_fill(0, torch.tensor([1]), 0.0)

    def results(function, target, *rest):
        logits = local.clone().requires_grad_()
        loss = function(logits, target, *rest)
        (loss * weights).sum().backward()
        return loss.detach() * (weights > 0), logits.grad

    def of_all():
        plain = tensor_parallel.vocab_parallel_cross_entropy
        found = [results(plain, t) for t in (target, target.index_fill(0, torch.tensor([1]), -100))]
        found.append(results(plain, target, 0.1))
        return [*found, results(fused_cross_entropy.fused_vocab_parallel_cross_entropy, target, group)]

    theirs = of_all()
    with onepass.patch("megatron") as patch:
        names = {f"{r.module}.{r.name}" for r in patch.replaced}
        assert "megatron.core.tensor_parallel.vocab_parallel_cross_entropy" in names, names
        ours = of_all()
    assert tensor_parallel.vocab_parallel_cross_entropy.__module__.startswith("megatron.")
    for n, (a, b) in enumerate(zip(ours, theirs)):
        for what, found, expected in zip(("loss", "gradient"), a, b):
            # Megatron's fused one rounds its gradient to bfloat16.
            close(found, expected, 4e-3 if (what, n) == ("gradient", 3) else 4e-6, f"megatron, {what} {n}")
    patched_verl(x, local, target)
    parallel_state.destroy_model_parallel()


def patched_verl(x, local, target):
    """verl's functions, from the folder ``VERL`` if that is set; else stand-ins of the same names and parameters."""
    real = os.environ.get("VERL")
    for name in ("verl", "verl.utils"):  # without what these import
        sys.modules[name] = package = types.ModuleType(name)
        package.__path__ = [os.path.join(real or "nowhere", *name.split("."))]
        package.__version__ = "0.9.1"
        package.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    names = "verl.utils.megatron.tensor_parallel", "verl.utils.kernel.linear_cross_entropy"
    if not real:
        for name in names:
            sys.modules[name] = types.ModuleType(name)
        sys.modules[names[0]].vocab_parallel_entropy = lambda vocab_parallel_logits: None
        sys.modules[names[0]].vocab_parallel_log_probs_from_logits = lambda logits, labels: None
        sys.modules[names[1]].linear_cross_entropy = lambda *args, **kwargs: None
    sharded, head = map(importlib.import_module, names)
    expected = onepass.selective_log_softmax_and_entropy(x.requires_grad_(), target)
    functions = (sharded.vocab_parallel_log_probs_from_logits, (target,)), (sharded.vocab_parallel_entropy, ())
    theirs = [function(local.clone(), *rest) for function, rest in functions]
    with onepass.patch("verl") as patch:
        assert len([r for r in patch.replaced if r.module in names]) == 3, patch
        logits = local.detach().clone().requires_grad_()
        ours = sharded.vocab_parallel_log_probs_from_logits(logits, target), sharded.vocab_parallel_entropy(logits)
        for found, other, right in zip(ours, theirs, expected):
            close(found.detach(), right.detach(), 4e-6, "verl")
            if real:
                close(found.detach(), other.detach(), 4e-6, "verl, theirs")
        (ours[0].sum() + ours[1].sum()).backward()
        (expected[0].sum() + expected[1].sum()).backward()
        first = dist.get_rank() * logits.shape[-1]
        close(logits.grad, x.grad[..., first : first + logits.shape[-1]], 8e-6, "verl, gradient")
        parts = head_of(torch.float32)[0][:2]
        size = VOCAB // dist.get_world_size() + 1
        whole = onepass.linear_selective_log_softmax_and_entropy(*parts, target.reshape(ROWS), temperature=0.7)
        mine = parts[1].detach()[dist.get_rank() * size :][:size].clone()
        found = head.linear_cross_entropy(parts[0], mine, target, 0.7, "none", dist.group.WORLD)
        for a, b in zip(found, whole):
            close(a.detach(), b.detach().flatten(), 4e-6, "verl, head")
        # The gradient of the hidden states is summed by the caller; a label that is no class is masked by the caller.
        labels = target.reshape(ROWS).clone()
        labels[0, 0] = -100
        hidden, leaf = (parts[0].detach().clone().requires_grad_() for _ in range(2))
        scale = torch.linspace(-1, 1, labels.numel())
        log_probs, entropy = head.linear_cross_entropy(hidden, mine, labels, 0.7, "none", dist.group.WORLD)
        assert log_probs.isfinite().all() and entropy.isfinite().all()
        ((log_probs * scale).where(labels.flatten() != -100, 0.0).sum() + (entropy * scale).sum()).backward()
        dist.all_reduce(hidden.grad)
        whole = onepass.linear_selective_log_softmax_and_entropy(
            leaf, parts[1].detach(), labels.clamp(min=0), temperature=0.7
        )
        log_probs, entropy = (t.flatten() for t in whole)
        ((log_probs * scale).where(labels.flatten() != -100, 0.0).sum() + (entropy * scale).sum()).backward()
        close(hidden.grad, leaf.grad, 8e-6, "verl, head, gradient")
