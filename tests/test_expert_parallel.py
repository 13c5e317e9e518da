"""MoE models whose experts are sharded over processes, by transformers' expert parallelism and by FSDP2."""

import functools
import json
import os
import sys
import types
from pathlib import Path

import pytest
import torch
import transformers
from packaging.version import Version

import forks
from onepass.integrations import expert_shards
from onepass.integrations import transformers_experts as integration

pytest.importorskip("peft")
WORKER = Path(__file__).parent / "expert_parallel_worker.py"


def has_implementations():
    return Version(transformers.__version__) >= Version("5.23")


def of(worker, *names):
    return [f"{worker}.{name}" for name in names]


FUNCTIONS = {
    "": {
        2: [
            *of("expert_parallel_worker", "of_two", "mixed_precision", "compiled", "sub_config"),
            *of("expert_exchange_worker", "without_rows", "own_exchange", "gradient_on_one_process",
                "weights_on_one_process", "unsupported"),
        ],
        4: of("expert_parallel_worker", "of_four"),
        1: of("expert_parallel_worker", "of_one"),
    },
    "more layouts": {4: of("expert_parallel_worker", "of_four_more")},
}  # fmt: skip


@forks.GROUP
@pytest.mark.skipif(not has_implementations(), reason="transformers chooses an EPImplementation from 5.23 on")
@pytest.mark.parametrize("names", [pytest.param(each, id=key, marks=[pytest.mark.exhaustive] if key else [])
                                   for key, each in FUNCTIONS.items()])  # fmt: skip
def test_as_one_process(tmp_path, names):
    """Losses and gradients of ten steps, and checkpoints; see the worker's layouts."""
    jobs = [dict(ranks=n, variants=[], functions=names[n]) for n in names]
    environment = os.environ | {"TRITON_INTERPRET": "", "OMP_NUM_THREADS": "1"}
    failed, printed = forks.run_file(WORKER, tmp_path, json.dumps(jobs), environment=environment, warnings=("ignore",))
    assert not failed, printed


@pytest.mark.parametrize("version, registered", [("5.22.1", False), ("5.23.0", True)])
def test_the_exchange_is_registered_with_versions_that_have_others(version, registered, monkeypatch):
    module = pytest.importorskip("transformers.distributed.expert_parallel", reason="of transformers 5.23")
    interface = module.EPImplementationInterface
    names = {name: of for name, of in interface._global_mapping.items() if name != "onepass"}
    monkeypatch.setattr(interface, "_global_mapping", names)
    monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
    integration.register()
    assert ("onepass" in interface()) == registered


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_zero_3(family):
    """DeepSpeed's engine gathers parameters when they are read in its forward, and again for the backward."""
    import peft

    import onepass
    from test_experts_transformers import experts_of

    integration.register()
    generator = torch.Generator().manual_seed(1)
    hidden, ids = torch.randn(9, 24, generator=generator), torch.randint(6, (9, 2), generator=generator)
    weights, found = torch.rand(9, 2, generator=generator), []
    for implementation in ("eager", "onepass"):
        block = torch.nn.ModuleDict({"experts": experts_of(family)})
        config = peft.LoraConfig(
            r=3, init_lora_weights=False, target_modules=[],
            target_parameters=["experts.gate_up_proj", "experts.down_proj"],
        )  # fmt: skip
        torch.manual_seed(0)
        peft.inject_adapter_in_model(config, block)
        experts = block["experts"].get_base_layer()
        experts.config._experts_implementation = implementation
        x = hidden.clone().requires_grad_()
        with onepass.patch("transformers"):
            if implementation == "onepass":
                data = {p: p.data for p in block.parameters()}
                for number, p in enumerate(data):
                    p.ds_id, p.ds_shape, p.data = number, p.shape, torch.empty(0)
                for names, name in (((), "down_proj.lora_A"), (("lora_",), r"Experts\.gate_up_proj")):
                    for key, p in block.named_parameters():
                        p.data = data[p] if any(n in key for n in names) else p.data
                    with pytest.raises(
                        ValueError, match=rf"{name}: expected a parameter of shape \(.*, got \(0,\), as"
                    ):
                        block["experts"](x, ids, weights)
                for p in data:
                    p.data = data[p]
            out = block["experts"](x, ids, weights)
        out.sum().backward()
        found.append([out.detach(), x.grad, *(p.grad for name, p in block.named_parameters() if "lora" in name)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-5 * a.abs().max().item())


def test_an_adapter_of_more_experts_than_there_are_is_an_error():
    factors = torch.zeros(6, 4, 2), torch.zeros(6, 2, 3), 1.0
    with pytest.raises(
        NotImplementedError, match=r"an adapter of 6 experts, of which this process holds 3: .* in which no EPImpl"
    ):
        expert_shards.local_factors(torch.nn.Module(), "down_proj", torch.zeros(3, 4, 3), factors)


@pytest.mark.parametrize("wrap", [
    lambda forward: forward,
    lambda forward: functools.wraps(forward)(functools.partial(forward)),
    functools.partial,
    lambda forward: lambda *args: forward(*args),
    lambda forward: types.MethodType(forward, torch.nn.Module()),
    lambda forward: functools.partial(torch.utils.checkpoint.checkpoint, forward, use_reentrant=False),
    lambda forward: functools.partial(map, function=forward),
])  # fmt: skip
def test_the_implementation_of_experts_is_found_behind_wrappers_of_their_forward(wrap):
    module = pytest.importorskip("transformers.distributed.expert_parallel", reason="of transformers 5.23")

    class Implementation(module.EPImplementation):
        def __init__(self, experts, ep_mesh, tp_mesh):
            self.experts_forward = experts.forward
            self.ep_mesh, self.tp_mesh = ep_mesh, tp_mesh

    with pytest.MonkeyPatch.context() as m:
        names = module.EPImplementationInterface._global_mapping | {"of a test": Implementation}
        m.setattr(module.EPImplementationInterface, "_global_mapping", names)
        experts = torch.nn.Identity()
        assert expert_shards.implementation_of(experts) is None
        style = module.EpDispatchExpertsParallel()
        style.install_forward(experts, "ep", tp_mesh="tp", ep_implementation="of a test")
        other = style.install_forward(torch.nn.Identity(), "other", tp_mesh="other", ep_implementation="of a test")
    another, forward = other.forward, experts.forward
    for experts.forward in (wrap(forward), lambda *args: (another(*args), forward(*args))):
        found = expert_shards.implementation_of(experts)
        assert isinstance(found, Implementation) and (found.ep_mesh, found.tp_mesh) == ("ep", "tp")
    experts.forward, experts._old_forward = (lambda x: x), wrap(forward)
    assert expert_shards.implementation_of(experts) is found
    experts.forward = experts._old_forward = another
    assert expert_shards.implementation_of(experts) is None


def test_experts_of_torchtitan(monkeypatch):
    """`GroupedExperts` as its loop over experts computes them, one without rows, and padding that no expert has."""
    moe = pytest.importorskip("torchtitan.models.moe.moe")

    import onepass

    monkeypatch.setenv("TRITON_INTERPRET", "")  # which has no products of bfloat16
    generator = torch.Generator().manual_seed(1)
    experts = moe.GroupedExperts(dim=8, hidden_dim=12, num_experts=4, use_grouped_mm=True)
    with torch.no_grad():
        for p in experts.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.5)
    counts, found = torch.tensor([5, 0, 3, 9]), []
    x = torch.randn(20, 8, generator=generator)
    for grouped in (False, True):
        experts.zero_grad()
        leaf = x.clone().requires_grad_()
        weights = experts.w1, experts.w2, experts.w3
        with onepass.patch("torchtitan"):
            run = moe._run_experts_grouped_mm if grouped else moe._run_experts_for_loop
            assert not grouped or run.__module__.startswith("onepass")
            out = run(*weights, leaf, counts)
        out.square().sum().backward()
        found.append([out.detach(), leaf.grad, *(p.grad.clone() for p in weights)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(b, a, rtol=0, atol=4e-2 * a.abs().max().item())
