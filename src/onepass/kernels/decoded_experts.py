"""The memory that quantized experts are decoded into, some of which stays decoded from a forward to its backward.

A layer decodes its two weights, gate_up and down, in chunks of experts, each of which overwrites the one before. In the
backward, down is needed first. So the last chunk of the forward is still there if the backward follows directly, as it
does under gradient checkpointing, where the forward of a layer is computed again just before its backward. If there is
room for more than the whole of down, some of gate_up's experts stay too.

Only the values of the last forward are kept. They are found by the memory of a tensor that this forward has saved for
its backward, which belongs to no other call. So they are used only in the backward that they were decoded for.
"""

import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from onepass.core.moe_options import Groups
from onepass.core.quantized import Encoded, Weight
from onepass.kernels.decode import decode
from onepass.kernels.zeros import GRAPHS

ALIGNMENT = 64  # in elements, of the chunks in memory


class Chunk(NamedTuple):
    """Experts that are decoded at once, and their place in memory, in elements."""

    first: int
    experts: int
    place: int


class DecodedExperts:
    """Decoded experts of the weights of a layer, in the order in which a forward needs them.

    Args:
        weights: those that are quantized get this object as their attribute ``decoded``, with their number.
    """

    def __init__(self, *weights: Weight) -> None:
        encoded = [w for w in weights if isinstance(w, Encoded)]
        self.chunks: list[list[Chunk]] = []  # of each weight
        self.size = 0
        self.memory: Tensor | None = None  # allocated when it is needed
        self.there: dict[int, tuple[int, Chunk]] = {}  # at each place, the number of a weight and its decoded chunk
        if not encoded:
            return
        sizes = [max(1, w.format.rows * w.format.columns) for w in encoded]
        E, room = encoded[0].format.experts, encoded[0].format.max_memory // encoded[0].dtype.itemsize
        stay = 0  # experts of the first of two weights that remain while the second is decoded
        if len(encoded) == 2:
            stay = min(E, max(0, room - E * sizes[1] - ALIGNMENT) // sizes[0])
        back = -(-stay * sizes[0] // ALIGNMENT) * ALIGNMENT
        for number, (w, size) in enumerate(zip(encoded, sizes)):
            w.decoded = self, number
            done = 0 if number else stay
            most = max(1, (room - back) // size)
            count = -(-(E - done) // max(1, -(-(E - done) // most)))
            chunks = [Chunk(first, min(count, E - first), back) for first in range(done, E, max(1, count))]
            self.chunks.append([Chunk(0, done, 0)] * (done > 0) + chunks)
            self.size = max(self.size, back + count * size)

    def of(self, weight: Encoded, number: int, groups: Groups) -> Iterator[tuple[int, Tensor]]:
        """Decode all experts of the weight ``number`` that have rows: yield the first of a chunk, and its values.

        The values of the next chunk may overwrite them.
        """
        f = weight.format
        if self.memory is None:
            self.memory = torch.empty(self.size, dtype=weight.dtype, device=weight.device)
        for chunk in sorted(self.chunks[number], key=lambda c: self.there.get(c.place) != (number, c)):
            size = chunk.experts * f.rows * f.columns
            part = self.memory[chunk.place : chunk.place + size].view(chunk.experts, f.rows, f.columns)
            if self.there.get(chunk.place) != (number, chunk):
                self.there[chunk.place] = number, chunk
                decode(weight, part, chunk.first, groups.offsets)
            yield chunk.first, part.mT if f.flipped else part


def decoded_chunks(weight: Encoded, groups: Groups) -> Iterator[tuple[int, Tensor]]:
    """See `DecodedExperts.of`."""
    decoded, number = weight.decoded or (DecodedExperts(weight), 0)
    return decoded.of(weight, number, groups)


class Kept(NamedTuple):
    """The experts that the last forward on a device has decoded."""

    saved: Any  # a weak reference to the memory of the tensor that the forward has saved
    stream: int
    decoded: DecodedExperts


_kept: dict[int, Kept] = {}  # by device


def keep_for(saved: Tensor, decoded: DecodedExperts) -> None:
    """Keep what a forward has decoded for the backward that it saves the tensor ``saved`` for.

    Nothing is kept while a CUDA graph is captured, since nothing that is allocated in its memory may outlive it.
    """
    graphs = GRAPHS in sys.modules or (saved.is_cuda and torch.cuda.is_current_stream_capturing())
    if decoded.there and not graphs:
        _kept[saved.get_device()] = Kept(StorageWeakRef(saved.untyped_storage()), _stream(saved), decoded)


def kept_for(saved: Tensor, decoded: DecodedExperts) -> None:
    """Give ``decoded`` what the forward that saved the tensor ``saved`` has decoded, if it is still kept."""
    kept = _kept.pop(saved.get_device(), None)
    if kept is not None and kept.saved == StorageWeakRef(saved.untyped_storage()) and kept.stream == _stream(saved):
        decoded.memory, decoded.there = kept.decoded.memory, kept.decoded.there


def release(like: Tensor) -> None:
    """Keep nothing any longer on the device of a tensor."""
    _kept.pop(like.get_device(), None)


def _stream(tensor: Tensor) -> int:
    return torch.cuda.current_stream(tensor.device).cuda_stream if tensor.is_cuda else 0
