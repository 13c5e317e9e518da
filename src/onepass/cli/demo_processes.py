"""`onepass demo --processes`: a training run whose head is sharded over its vocabulary."""

import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.multiprocessing.spawn import spawn

import onepass
from onepass.cli.demo_curve import Curve, train
from onepass.cli.demo_head import HEADS, Head, Loss, mixed_precision
from onepass.cli.demo_model import Size, build_model
from onepass.core.collectives import Replicated


def train_sharded(head: str, size: Size, seed: int, windows: Tensor, processes: int) -> Curve:
    """What the first of the processes records. Each has all of the decoder and some rows of the head's weight."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(run, (processes, folder, head, size, seed, windows.cpu(), windows.device.type), processes)
        return torch.load(Path(folder, "curve"), weights_only=False)


def run(rank: int, ranks: int, folder: str, head: str, size: Size, seed: int, windows: Tensor, place: str) -> None:
    """Train in one of the processes; the first shows the progress, and saves the curve."""
    if place == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(max(1, torch.get_num_threads() // ranks))
    store = dist.FileStore(str(Path(folder, "store")), ranks)
    dist.init_process_group("nccl" if place == "cuda" else "gloo", store=store, rank=rank, world_size=ranks)
    model = build_model(size, seed, tied=False)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().tensor_split(ranks)[rank].clone())
    mesh = init_device_mesh(place, (ranks,))
    curve = train("onepass", sharded(head, mesh), model.to(place), windows.to(place), Console(quiet=rank > 0))
    if rank == 0:
        torch.save(curve, Path(folder, "curve"))
    dist.destroy_process_group()


def local_logits(model: Any, ids: Tensor) -> tuple[Tensor, ...]:
    # Each process has the gradient from its columns of the logits, and all of them need the sum.
    world: Any = dist.group.WORLD
    hidden = Replicated.apply(model.model(ids).last_hidden_state, world.group_name)
    return (model.lm_head(hidden),)


def logits_loss(group: DeviceMesh, logits: Tensor, labels: Tensor) -> Tensor:
    return onepass.cross_entropy(onepass.VocabParallelLogits(logits, group), labels)


def linear_loss(group: DeviceMesh, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    with mixed_precision(hidden.device):
        return onepass.linear_cross_entropy(hidden, weight, labels, vocab_group=group)


def linear_entropy(group: DeviceMesh, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    with mixed_precision(hidden.device):
        both = onepass.linear_selective_log_softmax_and_entropy(hidden, weight, labels, vocab_group=group)
        return both[1].mean()


def sharded(head: str, group: DeviceMesh) -> Head:
    """The head of one of the processes."""
    if head == "logits":
        return replace(HEADS[head], inputs=local_logits, losses={"onepass": partial(logits_loss, group)})
    entropies: dict[str, Loss] = {"onepass": partial(linear_entropy, group)}
    return replace(HEADS[head], losses={"onepass": partial(linear_loss, group)}, entropies=entropies)
