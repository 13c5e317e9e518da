"""A linear head with a low-rank adapter: what a head with the merged weight computes, from the factors."""

from itertools import product

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import onepass
from linear_cases import LOSSES, H, N, V, assert_all_close, batch, exact, gradients
from onepass.cli.measure import peak_memory
from paths import interpreted
from test_linear_cost import Products, step_of

R, SCALING = 4, 1.5


def draw(device, dtype=torch.float32, **shape):
    """Hidden states, weight, bias and both factors, and targets."""
    hidden, weight, bias, target = batch(device, dtype, **shape)
    g = torch.Generator().manual_seed(7)
    A = torch.randn(R, hidden.shape[-1], generator=g).mul(0.3).to(dtype).to(device).requires_grad_()
    B = torch.randn(len(weight), R, generator=g).mul(0.3).to(dtype).to(device).requires_grad_()
    return (hidden, weight, bias, A, B), target


def head_of(parts, **options):
    hidden, weight, bias, A, B = parts
    return onepass.LinearLogits(hidden, weight, bias, lora=(A, B, SCALING), **options)


def logits_of(hidden, weight, bias, A, B):
    return F.linear(hidden, weight, bias) + SCALING * (hidden @ A.mT) @ B.mT


@pytest.mark.parametrize("loss", ["cross_entropy", "cross_entropy, none", "pair, masked", "topk_kl_div", "kl_div"])
def test_definition(device, tile, loss):
    parts, target = draw(device)
    reference = exact(*parts)
    got, expected = LOSSES[loss](head_of(parts), target), LOSSES[loss](logits_of(*reference), target)
    assert_all_close([got.detach().sum()], [expected.detach().sum()], "loss")
    assert_all_close(gradients(got.sum(), parts), gradients(expected.sum(), reference))


ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.03, torch.float16: 0.01}


WAYS = [("", dtype) for dtype in ROUNDING] + [
    ("wide", torch.bfloat16), ("wide", torch.float16), ("float32 factors", torch.bfloat16),
    ("autocast", torch.float32), ("invariant", torch.float32), ("compiled", torch.float32),
    ("materialized", torch.float64),
]  # fmt: skip


@pytest.mark.parametrize("how, dtype", WAYS, ids=str)
def test_every_way_to_compute_it(device, how, dtype):
    if interpreted(device) and how not in ("", "invariant"):
        pytest.skip("the same as on the eager path")
    parts, target = draw(device, dtype)
    if how == "float32 factors":
        parts = *parts[:3], *(t.detach().float().requires_grad_() for t in parts[3:])
    target = target.abs() % V

    def call(*parts):
        logits = head_of(parts, logits_dtype=torch.float32 if how == "wide" else None)
        logits = logits.materialize() if how == "materialized" else logits
        return onepass.cross_entropy(logits, target), onepass.selective_log_softmax(logits, target).square().mean()

    if how == "compiled":
        torch._dynamo.reset()
        call = torch.compile(call, fullgraph=True, backend="aot_eager")
    with torch.autocast(device.type, torch.bfloat16, enabled=how == "autocast"):
        if how == "invariant":
            with onepass.batch_invariant():
                found = call(*parts)
                found = [gradients(sum(found), parts), found]
        else:
            found = call(*parts)
            found = [gradients(sum(found), parts), found]
    reference = exact(*parts)
    logits = logits_of(*reference)
    log_probs = logits.log_softmax(-1).gather(-1, target.unsqueeze(-1)).squeeze(-1)
    expected = -log_probs.mean(), log_probs.square().mean()
    bound = ROUNDING[torch.bfloat16 if how == "autocast" else dtype]
    for g, e in zip([*found[0], *found[1]], [*gradients(sum(expected), reference), *expected], strict=True):
        assert (g.double() - e).norm() <= bound * e.norm()
    assert [g.dtype for g in found[0]] == [p.dtype for p in parts]


TRAINED = {
    # what requires a gradient: the GEMMs of a reduced loss, and of log-probs with a gradient of any loss
    "hidden weight A B": (3, 4),
    "hidden weight": (3, 4),
    "hidden A B": (2, 3),
    "hidden A": (2, 2),
    "hidden": (2, 2),
    "A": (1, 1),
    "B": (1, 2),
}


@pytest.mark.parametrize("trained", TRAINED)
def test_products(device, trained):
    """Those of the weight's size; each comes with one of the adapter's rank, or is not needed beside it."""
    parts, target = draw(device)
    names = ("hidden", "weight", "bias", "A", "B")
    for name, part in zip(names, parts):
        part.requires_grad_(name in trained.split())
    target = target.abs() % V
    losses = {
        "cross_entropy": lambda x: onepass.cross_entropy(x, target),
        "log_probs": lambda x: onepass.selective_log_softmax(x, target).square().sum(),
    }
    for count, (name, loss) in zip(TRAINED[trained], losses.items(), strict=True):
        with Products() as products:
            found = gradients(loss(head_of(parts)), [p for p in parts if p.requires_grad])
        large = products.multiplications // (N * H * V)
        assert large == count, name
        rest = products.multiplications - count * N * H * V
        assert rest <= 4 * N * R * (V + H) and N * R * V * 4 < N * H * V  # so that they are not counted as large
        reference = exact(*parts)
        of = gradients(loss(logits_of(*reference)), [r for r, p in zip(reference, parts) if p.requires_grad])
        assert_all_close(found, of, name)


def test_rows_and_columns():
    parts, target = draw("cpu", torch.float64, rows=(2, 3))
    logits, expected = head_of(parts), logits_of(*parts)
    bias = torch.linspace(0, 1, V - 5, dtype=torch.float64)
    got = onepass.selective_log_softmax(logits[:, 1:, : V - 5] + bias, target[:, 1:] % 7)
    of = onepass.selective_log_softmax(expected[:, 1:, : V - 5] + bias, target[:, 1:] % 7)
    torch.testing.assert_close(got, of)
    for a, b in zip(gradients(got.sum(), parts), gradients(of.sum(), parts)):
        torch.testing.assert_close(a, b)
    assert not logits.detach().requires_grad
    with torch.no_grad():
        parts[4].add_(1)
    with pytest.raises(RuntimeError, match="expected hidden states and parameters as they were"):
        onepass.entropy_from_logits(logits)


def test_a_teacher_with_an_adapter(device):
    (hidden, weight, _, A, B), _ = draw(device)
    teacher = onepass.LinearLogits(hidden.detach(), weight.detach(), lora=(A.detach(), B.detach(), SCALING))
    got = onepass.linear_kl_div(hidden, weight, teacher)
    x, w, of_teacher = hidden.double(), weight.double(), [t.detach().double() for t in (hidden, weight, A, B)]
    logits = logits_of(of_teacher[0], of_teacher[1], None, *of_teacher[2:])
    log_p = logits.log_softmax(-1)
    expected = (log_p.exp() * (log_p - F.linear(x, w).log_softmax(-1))).sum(-1).mean()
    assert_all_close([got.detach()], [expected.detach()], "loss")
    assert_all_close(gradients(got, (hidden, weight)), gradients(expected, (hidden, weight)))


@pytest.mark.parametrize("loss", ["cross_entropy", "pair"])
def test_max_memory_is_kept_on_a_cpu(monkeypatch, loss):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    vocab = 5003
    parts, target = draw("cpu", torch.bfloat16, rows=(300,), width=16, vocab=vocab)
    target = target.abs() % vocab
    least = 2**26 + 2**19 + 8 * vocab * (16 + R)
    max_memory = least + 2**21
    x = head_of(parts, max_memory=max_memory)

    def step():
        for part in parts:
            part.grad = None
        step_of(loss, x, target)

    step()
    assert peak_memory(step, torch.device("cpu")) <= max_memory + sum(p.nbytes for p in parts)


@pytest.fixture
def group():
    """A group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")
def test_dtensors_of_different_vocabularies(group):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh, hidden = init_device_mesh("cpu", (1,)), torch.randn(3, 4)
    for vocab in (11, 12, 11):
        weight = distribute_tensor(torch.randn(vocab, 4), mesh, [Shard(0)])
        found = onepass.linear_cross_entropy(hidden, weight, torch.arange(3), vocab_group=group)
        torch.testing.assert_close(found, F.cross_entropy(hidden @ weight.full_tensor().T, torch.arange(3)))


@pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")
@pytest.mark.parametrize("wrapped", [{"target_modules": ["q_proj", "lm_head"]},
                                     {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}])  # fmt: skip
@pytest.mark.parametrize("unit", ["model", "head"])
def test_heads_that_fsdp_shards_again(group, wrapped, unit):
    """An adapter on the head, and a head that is trained beside adapters: their parameters go after the forward."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh, ids, found = init_device_mesh("cpu", (1,)), torch.arange(12).view(2, 6), []
    bias = torch.linspace(0, 3, 31)
    sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    for attached in (False, True):
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=31, **sizes))
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, init_lora_weights=False, **wrapped))
        head = model.base_model.model.lm_head
        head.register_forward_hook(lambda head, given, logits: logits + bias)  # before its parameters go
        if attached:
            onepass.attach(model)
        for part in (head, model)[unit == "model" :]:
            fully_shard(part, mesh=mesh, reshard_after_forward=True)
        out = model(input_ids=ids, labels=ids)
        assert isinstance(out.logits, onepass.LinearLogits) == attached
        loss = onepass.entropy_from_logits(out.logits[..., :29]).sum()
        loss = loss + onepass.entropy_from_logits(out.logits + bias).sum()
        loss = loss + out.loss + onepass.entropy_from_logits(out.logits).mean()
        loss.backward()
        grads = {n: p.grad.full_tensor() for n, p in model.named_parameters() if p.grad is not None}
        found.append((loss.detach(), grads))
    assert any("lm_head" in name for name in found[0][1])
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")
def test_a_head_of_tensor_parallelism(group):
    """Its style takes and returns DTensors."""
    transformers = pytest.importorskip("transformers")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh, ids, found = init_device_mesh("cpu", (1,)), torch.arange(12).view(2, 6), []
    sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    for attached in (False, True):
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=31, **sizes))
        parallelize_module(model, mesh, {"lm_head": ColwiseParallel(output_layouts=Replicate())})
        if attached:
            onepass.attach(model)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        found.append((loss.detach(), model.lm_head.weight.grad.full_tensor()))
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")
def test_sharded_parameters(group):
    """DTensors, as of FSDP2, and a sharded vocabulary with padding; test_vocab_parallel.py has several processes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    parts, target = draw("cpu", torch.float64)
    reference = exact(*parts)
    target = target.abs() % (V - 3)
    hidden, weight, bias, A, B = reference
    expected = F.cross_entropy(logits_of(hidden, weight[: V - 3], bias[: V - 3], A, B[: V - 3]), target)
    of = gradients(expected, reference)
    for sharded, parallel in product([False, True], repeat=2):
        given, rows = [p.detach().clone() for p in parts], parts[0].shape[0]
        if sharded:
            mesh = init_device_mesh("cpu", (1,))
            given[1:] = [distribute_tensor(p, mesh, [Shard(0)]) for p in given[1:]]
        given = [p.requires_grad_() for p in given]
        options = dict(vocab_group=group, vocab_size=V - 3, sequence_parallel=parallel) if not sharded else {}
        x = head_of((given[0].view(1, rows, H), *given[1:]), **options)
        got = onepass.cross_entropy(x if not sharded else x[..., : V - 3], target.view(1, rows))
        torch.testing.assert_close(got, expected)
        for g, e in zip(gradients(got, given), of):
            torch.testing.assert_close(g.full_tensor() if hasattr(g, "full_tensor") else g, e)
