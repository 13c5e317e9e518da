"""Metrics that are computed along with a loss: an object that gets the fields of all rows, tile by tile."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from onepass.logits.source import Fields, LossFunction


class Observer(Protocol):
    """An object that is shown the fields of all rows of a loss."""

    def begin(self, count: Tensor | int) -> None:
        """A loss of ``count`` rows that are not masked begins."""

    def add(self, fields: Fields) -> None:
        """The fields of a tile, among them ``entropy`` and ``is_top1``. Those of masked rows are 0."""


def observed(loss_fn: LossFunction, observer: Observer, names: Sequence[str]) -> LossFunction:
    """A loss function of the fields ``names`` that also shows all fields of a tile to the observer."""

    def loss(fields: Fields, *row_inputs: Tensor) -> Tensor:
        observer.add({name: f.detach() for name, f in fields.items()})
        return loss_fn({name: fields[name] for name in names}, *row_inputs)

    return loss


class Metrics:
    """Sums over tokens, on the device: of the entropy, of the tokens that are the argmax, and their number."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor | int] = {}

    def begin(self, count: Tensor | int) -> None:
        self.sums["num_tokens"] = self.sums.get("num_tokens", 0) + count

    def add(self, fields: dict[str, Tensor]) -> None:
        for name, field in (("entropy", "entropy"), ("mean_token_accuracy", "is_top1")):
            self.sums[name] = self.sums.get(name, 0) + fields[field].sum()

    def read(self) -> dict[str, Tensor]:
        """The means since the last call, and the number of tokens."""
        sums, self.sums = self.sums, {}
        if not sums:
            return {}
        tokens = torch.as_tensor(sums["num_tokens"])
        means = {name: torch.as_tensor(sums.get(name, 0)) / tokens for name in ("entropy", "mean_token_accuracy")}
        return means | {"num_tokens": tokens}


class Once:
    """Metrics of the first loss of a forward; those of further losses of the same logits are left out."""

    def __init__(self, metrics: Metrics) -> None:
        self.metrics, self.losses, self.backward = metrics, 0, -1

    def begin(self, count: Tensor | int) -> None:
        self.losses += 1
        if self.losses == 1:
            self.backward = torch._C._current_graph_task_id()  # of a checkpoint's recomputation, else -1
            self.metrics.begin(count)

    def add(self, fields: dict[str, Tensor]) -> None:
        # The backward of a loss of each row computes its tiles again.
        if self.losses == 1 and torch._C._current_graph_task_id() == self.backward:
            self.metrics.add(fields)
