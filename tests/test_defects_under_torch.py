"""Defects under compilation, hooks, modes and transforms of torch, which these tests showed before they were fixed."""

from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import onepass
from defect_cases import head, same
from paths import interpreted
from test_torch import ALL, example

# Two losses in one compiled graph of dynamic shapes.


def test_two_losses_in_one_graph(device):
    """Every loss twice, so that no number is met first within one of them."""
    if interpreted(device):
        pytest.skip("what is compiled is the same on both backends")

    def all_twice(x, t):
        return torch.stack([ALL[name](x, t) for name in [*ALL, *ALL]])

    torch._dynamo.reset()
    x, t = example(device)
    compiled = torch.compile(all_twice, fullgraph=True, backend="eager", dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows in (7, 5):  # not all rows, whose number is also that of the tensor that is sliced
            torch.testing.assert_close(compiled(x[:rows], t[:rows]), all_twice(x[:rows], t[:rows]))


def test_forward_mode(device):
    x, t = torch.randn(3, 10, device=device), torch.tensor([1, 2, 3], device=device)
    hidden, weight, target = (p.detach() for p in head(device))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        of_head = torch.autograd.forward_ad.make_dual(hidden, torch.ones_like(hidden))
        for call in (
            lambda: onepass.cross_entropy(dual, t),
            lambda: onepass.kl_div(x, dual),
            lambda: onepass.moe.route(dual, 2),
            lambda: onepass.linear_cross_entropy(of_head, weight, target),
            lambda: onepass.linear_kl_div(of_head, weight, torch.randn(12, 40, device=device)),
        ):
            with pytest.raises(NotImplementedError, match="forward-mode"):
                call()
        onepass.cross_entropy(x, t)  # others may go on


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_dispatch_mode_sees_the_operations(device):
    x = torch.randn(3, 10, device=device, requires_grad=True)
    t = torch.tensor([1, 2, 3], device=device)
    with Seen() as seen:
        onepass.cross_entropy(x, t).backward()
        onepass.kl_div(x, x.detach())
        onepass.moe.route(x, 2)
    names = {name.split(".")[1] for name in seen.names if name.startswith("onepass.")}
    assert names == {"softmax_statistics", "softmax_gradient", "divergence", "route"}


def test_flops_are_counted(device):
    from torch.utils.flop_counter import FlopCounterMode

    hidden, weight, target = head(device)
    product = 2 * hidden.numel() * len(weight)
    E, I = 4, 8  # noqa: E741
    gate_up, down = (torch.randn(s, device=device, requires_grad=True) for s in ((E, 2 * I, 16), (E, 16, I)))
    routing = onepass.moe.route(torch.randn(12, E, device=device), 2)
    calls = {
        "three products": (lambda: onepass.linear_cross_entropy(hidden, weight, target), 3 * product),
        "four products": (lambda: onepass.linear_softmax_statistics(hidden, weight).entropy.sum(), 4 * product),
        "experts": (lambda: onepass.moe.expert_mlp(hidden, routing, gate_up, down).sum(), 3 * 6 * 24 * 16 * I),
        "scattered": (lambda: onepass.moe.scattered_linear(hidden, gate_up, routing.experts).sum(),
                      3 * 2 * 24 * 16 * 2 * I),
    }  # fmt: skip
    for name, (call, expected) in calls.items():
        with FlopCounterMode(display=False) as counter:
            call().backward()
        assert counter.get_total_flops() == expected, name


def test_selective_checkpointing(device):
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    x = torch.randn(3, 10, device=device, requires_grad=True)
    t = torch.tensor([1, 2, 3], device=device)
    saved = []

    def policy(ctx, op, *args, **kwargs):
        ours = "onepass::softmax_statistics" in op.name()
        saved.append(ours)
        return CheckpointPolicy.MUST_SAVE if ours else CheckpointPolicy.PREFER_RECOMPUTE

    loss = lambda x: onepass.cross_entropy(x * 2, t)  # noqa: E731
    contexts = lambda: create_selective_checkpoint_contexts(policy)  # noqa: E731
    checkpoint(loss, x, use_reentrant=False, context_fn=contexts).backward()
    (expected,) = torch.autograd.grad(loss(x), x)
    torch.testing.assert_close(x.grad, expected)
    assert any(saved)


def test_in_place_under_compile(device):
    torch._dynamo.reset()
    x, t = example(device)
    call = lambda x, t: onepass.cross_entropy(x * 1, t, inplace_backward=True)  # noqa: E731
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=True)
    torch.testing.assert_close(compiled(x, t), call(x, t))


def test_a_second_backward_in_place_under_hooks(device):
    x, t = example(device)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach(), lambda x: x):
        loss = onepass.cross_entropy(x * 1, t, inplace_backward=True)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"inplace_backward: a second backward|used after their gradient"):
        loss.backward()


def test_items_in_a_tensor_are_traced(device):
    x, t = example(device)
    compiled = torch.compile(lambda x, n: onepass.cross_entropy(x, t, num_items=n), fullgraph=True, backend="aot_eager")
    for n in (torch.tensor(3.0), torch.tensor([3]), torch.tensor(3)):
        torch.testing.assert_close(compiled(x, n), onepass.cross_entropy(x, t, num_items=3))
        torch._dynamo.reset()


def test_a_default_dtype_of_float64(device):
    logits, target = torch.randn(3, 5, device=device), torch.tensor([1, -100, 4], device=device)
    torch.set_default_dtype(torch.float64)
    try:
        for options in ({}, {"label_smoothing": 0.1}, {"z_loss_weight": 0.1}):
            assert onepass.cross_entropy(logits, target, **options).dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_vmap_on_a_cpu(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    logits = torch.randn(4, 3, 6)
    found = torch.func.vmap(lambda x: onepass.softmax_statistics(x).entropy)(logits)
    torch.testing.assert_close(found, onepass.entropy_from_logits(logits))


def test_a_loss_of_rows_under_a_checkpoint(device):
    """The checkpoint unpacks each saved tensor once."""
    hidden, weight, target = head(device)

    def loss(hidden, weight):
        return onepass.linear_cross_entropy(hidden, weight, target, reduction="none")

    same(checkpoint(loss, hidden, weight, use_reentrant=False), loss(hidden, weight), (hidden, weight))


def test_results_can_be_changed_in_place(device):
    """A view of what a backward reads could not be: torch raises an error then."""
    x = torch.randn(4, 7, device=device, requires_grad=True)
    index = torch.arange(4, device=device)
    calls = (
        lambda: [onepass.kl_div(x, torch.ones_like(x), reduction="none")],
        lambda: [onepass.entropy_from_logits(x)],
        lambda: onepass.selective_log_softmax_and_entropy(x, index),
    )
    for call in calls:
        plain = sum((n + 2) * r.sum() for n, r in enumerate(call()))
        found = call()
        for n, result in enumerate(found):
            result *= n + 2
        wanted, got = (torch.autograd.grad(t, x)[0] for t in (plain, sum(r.sum() for r in found)))
        torch.testing.assert_close(got, wanted)


def test_labels_of_a_subclass_do_not_change_later_losses(monkeypatch):
    from onepass.softmax import statistics

    class Labels(torch.Tensor):
        pass

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(statistics, "_last", {})
    x, target = torch.randn(3, 5, requires_grad=True), torch.arange(3)
    onepass.cross_entropy(x, target.as_subclass(Labels)).backward()
    assert type(onepass.cross_entropy(x, target)) is torch.Tensor
    assert all(type(kept) is torch.Tensor for kept in statistics._last.values())


@pytest.mark.parametrize("way", ["mode", "compiled jvp", "compiled"])
@pytest.mark.parametrize("name", ["cross_entropy", "route", "expert_mlp"])
def test_forward_mode_of_registered_operations(name, way):
    """Torch itself drops the tangents of their inputs."""
    weights, target = (torch.randn(4, 6, 5), torch.randn(4, 5, 3)), torch.arange(3)
    routing = onepass.moe.Routing(torch.rand(3, 2), torch.randint(4, (3, 2)), None)
    function = {
        "cross_entropy": lambda x: onepass.cross_entropy(x, target),
        "route": lambda x: onepass.moe.route(x, 2).weights,
        "expert_mlp": lambda x: onepass.moe.expert_mlp(x, routing, *weights),
    }[name]
    x = torch.randn(3, 5)
    torch._dynamo.reset()
    with pytest.raises(NotImplementedError, match="forward-mode"):
        if way == "mode":
            with Seen():
                torch.func.jvp(function, (x,), (x,))
        elif way == "compiled jvp":
            torch.compile(lambda x: torch.func.jvp(function, (x,), (x,)), backend="eager")(x)
        else:
            with torch.autograd.forward_ad.dual_level():
                dual = torch.autograd.forward_ad.make_dual(x, x)
                torch.compile(function, backend="eager")(dual)


@pytest.mark.parametrize(
    "name", ["temperature", "one temperature", "num_items", "class_weights", "teacher_log_probs", "teacher"]
)
def test_forward_mode_of_what_is_constant(name):
    x, target = torch.randn(3, 5), torch.arange(3)
    function, at = {
        "temperature": (lambda t: onepass.selective_log_softmax(x, target, temperature=t), torch.ones(3)),
        "one temperature": (lambda t: onepass.selective_log_softmax(x, target, temperature=t), torch.tensor(2.0)),
        "num_items": (lambda n: onepass.cross_entropy(x, target, num_items=n), torch.tensor(3.0)),
        "class_weights": (lambda c: onepass.cross_entropy(x, target, class_weights=c), torch.ones(5)),
        "teacher_log_probs": (lambda p: onepass.topk_kl_div(x, target[:, None], p), -torch.ones(3, 1)),
        "teacher": (lambda t: onepass.linear_kl_div(torch.ones(3, 2), torch.ones(5, 2), t), x),
    }[name]
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(function, (at,), (torch.ones_like(at),))


def test_anomaly_mode_finds_no_nan_in_a_masked_row():
    x, index = torch.randn(2, 5, requires_grad=True), torch.tensor([[0, 1], [2, 3]])
    mask = torch.tensor([True, False])
    with torch.autograd.detect_anomaly(check_nan=True):
        loss = onepass.topk_kl_div(x, index, torch.full((2, 2), -1.0), row_mask=mask, renormalize=True)
        loss.backward()
    assert x.grad.isfinite().all() and not x.grad[1].any()


def test_groups_under_another_default_device():
    from onepass.logits.row_groups import ids_of

    with torch.device("meta"):
        assert ids_of([1, 3], torch.device("cpu")).tolist() == [0, 1, 1, 1]


@pytest.mark.parametrize("weighted", [False, True])
def test_experts_of_meta_tensors(weighted, monkeypatch):
    """As for the other operations, shapes and dtypes follow, forward and backward, and no value is read."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # in which meta tensors are taken for those of a GPU
    normal = partial(torch.randn, device="meta", requires_grad=True)
    x, gate_up, down = normal(2, 4, 6), normal(3, 10, 6), normal(3, 6, 5)
    routing = onepass.moe.route(normal(2, 4, 3), 2)
    out = onepass.moe.expert_mlp(x, routing, gate_up, down)
    rows, weights = x.flatten(0, 1), routing.weights.flatten(0, 1) if weighted else None
    scattered = onepass.moe.scattered_linear(rows, gate_up, routing.experts.flatten(0, 1), weights=weights)
    assert out.shape == x.shape and scattered.shape == ((8, 10) if weighted else (16, 10))
    (out.sum() + scattered.sum()).backward()
    assert all(t.is_meta and t.grad.shape == t.shape and t.grad.is_meta for t in (x, gate_up, down))


def test_a_dtensor_among_plain_tensors():
    dist = torch.distributed
    if not dist.is_available():
        pytest.skip("torch without distributed")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        target = distribute_tensor(torch.arange(3), init_device_mesh("cpu", (1,)), [Replicate()])
        with pytest.raises(TypeError, match=r"target: expected a tensor, got a DTensor of \(3,\)"):
            onepass.cross_entropy(torch.randn(3, 5), target)
        with pytest.raises(TypeError, match=r"router_logits: expected a tensor, got a DTensor of \(3,\)"):
            onepass.moe.route(target.float(), 1)
    finally:
        dist.destroy_process_group()
