"""What every process of test_vocab_parallel.py runs on a mesh of 2 x 2: FSDP2 over data, the head's vocabulary sharded.

A model is trained by four processes, of which those that differ in their data coordinate have different batches, and by
one process with all of them. Losses, gradients and parameters of every step are the same.
"""

import functools

import pytest
import torch
import torch._dynamo  # DTensors import it, which is done once, before processes are forked
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module

import onepass

VOCAB, WIDTH, STEPS = 37, 6, 2
BATCH = 4, 5  # of all processes
TOLERANCE = dict(rtol=1e-10, atol=1e-12)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    """Returns its logits or, if it has a loss of its own, calls that with hidden states, head and labels."""

    def __init__(self, loss=None):
        super().__init__()
        self.embed, self.output = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.blocks = nn.Sequential(Block(), Block())
        self.loss = loss

    def forward(self, ids, labels=None):
        hidden = self.blocks(self.embed(ids))
        if self.loss is None:
            return self.output(hidden)
        return self.loss(hidden, self.output.weight, self.output.bias, labels)


def model_of(loss=None):
    torch.manual_seed(0)  # the same on all processes
    return Model(loss).double()


@functools.cache
def batches():
    """Ids and labels of every step. Ignored labels are distributed unevenly over the processes."""
    generator = torch.Generator().manual_seed(1)
    ids, labels = torch.randint(VOCAB, (2, STEPS, *BATCH), generator=generator)
    labels[:, 0, :4] = -100
    return ids, labels


def step(model, optimizer, loss_of, ids, labels):
    """A step of training: the loss, and the parameters' gradients and values after it, by their names."""
    loss = loss_of(model, ids, labels)
    optimizer.zero_grad()
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    optimizer.step()
    return loss.detach(), gradients, dict(model.named_parameters())


def optimizer_of(model):
    return torch.optim.Adam(model.parameters(), lr=0.05, foreach=False)  # parameters of several meshes


@functools.cache
def of_one_process():
    model, (ids, labels) = model_of(), batches()
    optimizer = optimizer_of(model)

    def loss_of(model, ids, labels):
        return nn.functional.cross_entropy(model(ids).flatten(0, 1), labels.flatten())

    results = []
    for n in range(STEPS):
        loss, *named = step(model, optimizer, loss_of, ids[n], labels[n])
        results.append((loss, *({name: t.detach().clone() for name, t in of.items()} for of in named)))
    return results


def train(model, mesh, loss_of, what):
    """Train on this process's part of the batches, and compare every step with one process."""
    optimizer, (ids, labels) = optimizer_of(model), batches()
    replicas, rank = mesh["data"].size(), mesh["data"].get_local_rank()
    rows = slice(rank * BATCH[0] // replicas, (rank + 1) * BATCH[0] // replicas)
    for n, expected in enumerate(of_one_process()):
        items = (labels[n] != -100).sum() / replicas  # FSDP2 averages gradients over the processes
        loss, *found = step(model, optimizer, functools.partial(loss_of, items=items), ids[n, rows], labels[n, rows])
        dist.all_reduce(loss, group=mesh["data"].get_group())
        torch.testing.assert_close(loss / replicas, expected[0], **TOLERANCE, msg=f"{what}, loss {n}")
        for part, of_part, of_expected in zip(("gradient", "parameter"), found, expected[1:]):
            assert of_part.keys() == of_expected.keys()
            for name, tensor in of_part.items():
                right = shard_like(tensor, of_expected[name], mesh)
                about = f"{what}, {part} {name}, {n}"
                torch.testing.assert_close(tensor.detach().full_tensor(), right, **TOLERANCE, msg=about)


def shard_like(tensor, whole, mesh):
    """The expected tensor or, of a parameter that is only a shard of the vocabulary to FSDP2, that shard of it."""
    return whole if tensor.shape == whole.shape else whole.chunk(2)[mesh["tensor"].get_local_rank()]


def shard_body(model, mesh):
    for block in model.blocks:
        fully_shard(block, mesh=mesh)


def linear_loss(mesh, **options):
    def loss(hidden, weight, bias, labels, items):
        return onepass.linear_cross_entropy(
            hidden, weight, labels, bias=bias, num_items=items, vocab_group=mesh["tensor"], **options
        )

    return loss


def shard_head(model, mesh, of_dtensors):
    """Make the head's parameters this process's rows: DTensors on the mesh's tensor dimension, or plain tensors."""
    tensor_mesh = mesh["tensor"]
    for name, parameter in list(model.output.named_parameters()):
        shard = distribute_tensor(parameter.detach(), tensor_mesh, [Shard(0)])
        shard = shard if of_dtensors else shard.to_local().clone()
        setattr(model.output, name, nn.Parameter(shard))


def linear_heads(rank, ranks):
    """`vocab_group=`, with weight and bias that are DTensors or plain tensors before FSDP2 shards them, too.

    The loss is computed within the module that FSDP2 has made whole, or outside of any: then the parameters are still
    sharded over the data dimension.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    loss = linear_loss(mesh)
    for of_dtensors in (True, False):
        for where in ("inside", "after", "outside"):
            holder = {}

            def within(hidden, weight, bias, labels, where=where, holder=holder):
                return loss(hidden, weight, bias, labels, holder["items"]) if where == "inside" else hidden

            model = model_of(within)
            shard_head(model, mesh, of_dtensors)
            shard_body(model, mesh["data"])
            if where == "outside":  # FSDP2 gathers them in a forward of the head, which is never called
                fully_shard(model.output, mesh=mesh["data"])
            fully_shard(model, mesh=mesh["data"])

            def loss_of(model, ids, labels, items, where=where, holder=holder):
                holder["items"] = items
                found = model(ids, labels)
                if where == "inside":
                    return found
                weight, bias = model.output.weight, model.output.bias
                sharded = isinstance(weight, DTensor) and "data" in weight.device_mesh.mesh_dim_names
                assert sharded == (where == "outside")
                return loss(found, weight, bias, labels, items)

            train(model, mesh, loss_of, f"linear head, {of_dtensors=}, {where}")


def logits_of_a_head(rank, ranks):
    """Logits as torchtitan makes them: a DTensor from `ColwiseParallel`, by onepass and by torch's `loss_parallel`."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))

    def of_onepass(model, ids, labels, items):
        logits = model(ids)
        assert isinstance(logits, DTensor) and logits.placements == (Shard(2),)
        return onepass.cross_entropy(logits, labels, num_items=items)

    def of_torch(model, ids, labels, items):
        logits = model(ids).flatten(0, 1)
        with loss_parallel():
            loss = nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum")
            return (loss / items).to_local()

    for loss_of in (of_onepass, of_torch):
        model = model_of()
        head = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
        parallelize_module(model, mesh["tensor"], {"output": head})
        shard_body(model, mesh["data"])
        fully_shard(model, mesh=mesh["data"])
        with onepass.patch("torch"):
            train(model, mesh, loss_of, f"logits, {loss_of.__name__}")


def fully_shard_head(mesh):
    """A head that is sharded over both dimensions of the mesh."""
    head = nn.Sequential(nn.Linear(WIDTH, VOCAB))
    parallelize_module(head, mesh["tensor"], {"0": ColwiseParallel()})
    return fully_shard(head, mesh=mesh["data"])[0]


def unsupported(rank, ranks):
    """Meshes and placements that cannot be used are an error that says so."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    other = init_device_mesh("cpu", (4,))
    hidden, labels, whole = torch.zeros(3, WIDTH), torch.zeros(3, dtype=torch.long), torch.zeros(VOCAB, WIDTH)

    def loss(weight, group):
        return onepass.linear_cross_entropy(hidden, weight, labels, vocab_group=group)

    for placements in ([Shard(0), Replicate()], [Replicate(), Shard(1)]):
        with pytest.raises(ValueError, match=r"weight: expected a DTensor with rows sharded over vocab_group, got \("):
            loss(distribute_tensor(whole, mesh, placements), mesh["tensor"])
    for weight, group in (
        (distribute_tensor(whole, mesh, [Shard(0), Shard(0)]), other),
        (distribute_tensor(whole, other, [Shard(0)]), mesh["tensor"]),
    ):
        with pytest.raises(ValueError, match=r"vocab_group: expected the processes of one dimension of the mesh of we"):
            loss(weight, group)
    with pytest.raises(ValueError, match="vocab_group: expected a device mesh of one dimension, got one of 2"):
        loss(whole, mesh)
    with pytest.raises(TypeError, match=r"hidden: expected a plain tensor with vocab_group, got a DTensor; pass hidd"):
        rows = distribute_tensor(hidden, mesh["tensor"], [Replicate()])
        onepass.linear_cross_entropy(rows, whole, labels, vocab_group=mesh["tensor"])

    # As the logits of a weight that FSDP2 has sharded further: their columns are no contiguous range.
    strided = type(fully_shard_head(mesh).weight.placements[0])(1, split_factor=2)
    columns = torch.zeros(3, 10)
    for wrong in (
        DTensor.from_local(columns, mesh, [strided, Shard(1)], run_check=False),
        DTensor.from_local(columns, mesh["tensor"], [strided], run_check=False),
        distribute_tensor(whole, mesh, [Shard(1), Shard(1)]),
    ):
        with pytest.raises(ValueError, match=r"logits: expected a vocabulary sharded over one mesh dimension, got pl"):
            onepass.cross_entropy(wrong, torch.zeros(wrong.shape[0], dtype=torch.long))
