"""Metrics beside a loss: an object that is shown the fields of all rows, tile by tile."""

from collections.abc import Sequence
from typing import Protocol

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
