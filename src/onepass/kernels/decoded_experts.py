"""The memory that quantized experts are decoded into, some of which stays decoded from a forward to its backward.

A layer decodes its two weights, gate_up and down, in chunks of experts, each of which overwrites the one before. In the
backward, down is needed first. So the last chunk of the forward is still there if the backward follows directly, as it
does under gradient checkpointing, where the forward of a layer is computed again just before its backward. If there is
room for more than the whole of down, some of gate_up's experts stay too.

Only the values of the last forward are kept, until a tensor is freed that this forward has saved for its backward. They
are found by the memory of this tensor, which belongs to no other call, so that they are used only in the backward that
they were decoded for.
"""

import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from onepass.core.moe_options import Groups
from onepass.core.quantized import Encoded, Weight
from onepass.kernels.decode import decode
from onepass.kernels.zeros import may_be_captured


class Chunk(NamedTuple):
    """Experts that are decoded at once."""

    first: int
    experts: int
    stays: bool  # whether it has memory of its own, while the other chunks of both weights overwrite each other


class DecodedExperts:
    """Decoded experts of the weights of a layer, in the order in which a forward needs them.

    Args:
        weights: those that are quantized get this object as their attribute ``decoded``, with their number.
    """

    def __init__(self, *weights: Weight) -> None:
        encoded = [w for w in weights if isinstance(w, Encoded)]
        self.chunks: list[list[Chunk]] = []  # of each weight
        self.memory: dict[bool, Tensor] = {}  # allocated when a chunk is decoded, by `Chunk.stays`
        self.there: dict[bool, tuple[int, Chunk]] = {}  # the number of a weight and its chunk that are in this memory
        if not encoded:
            return
        sizes = [max(1, w.format.rows * w.format.columns) for w in encoded]
        E, room = encoded[0].format.experts, encoded[0].format.max_memory // encoded[0].dtype.itemsize
        stay = 0  # experts of the first of two weights that remain while the second is decoded
        if len(encoded) == 2:
            stay = min(E, max(0, room - E * sizes[1]) // sizes[0])
        room -= stay * sizes[0]
        for number, (w, size) in enumerate(zip(encoded, sizes)):
            w.decoded = self, number
            done = 0 if number else stay
            # As few chunks of the other experts as there is room for, of equal sizes but for the last.
            count = -(-(E - done) // max(1, -(-(E - done) // max(1, room // size))))
            chunks = [Chunk(first, min(count, E - first), False) for first in range(done, E, max(1, count))]
            self.chunks.append([Chunk(0, done, True)] * (done > 0) + chunks)

    def of(self, weight: Encoded, number: int, groups: Groups) -> Iterator[tuple[int, Tensor]]:
        """Decode all experts of the weight ``number`` that have rows: yield the first of a chunk, and its values.

        The values of the next chunk may overwrite them.
        """
        f, chunks = weight.format, self.chunks[number]
        for chunk in sorted(chunks, key=lambda c: self.there.get(c.stays) != (number, c)):
            size = f.rows * f.columns
            is_there = self.there.get(chunk.stays) == (number, chunk)
            memory = self.memory.get(chunk.stays)
            needed = size * max(c.experts for c in chunks if c.stays == chunk.stays)
            if memory is None or (not is_there and memory.numel() < needed):
                del memory
                self.memory.pop(chunk.stays, None)
                memory = self.memory[chunk.stays] = torch.empty(needed, dtype=weight.dtype, device=weight.device)
            part = memory[: chunk.experts * size].view(chunk.experts, f.rows, f.columns)
            if not is_there:
                self.there[chunk.stays] = number, chunk
                decode(weight, part, chunk.first, groups.offsets)
            yield chunk.first, part.mT if f.flipped else part


def decoded_chunks(weight: Encoded, groups: Groups) -> Iterator[tuple[int, Tensor]]:
    """The first expert and the values of each chunk, in the memory that the weights of a layer share, if they do."""
    if weight.decoded is None:  # memory for this weight alone
        release(weight.data)
        return DecodedExperts(weight).of(weight, 0, groups)
    decoded, number = weight.decoded
    return decoded.of(weight, number, groups)


class Kept(NamedTuple):
    """The experts that the last forward on a device has decoded, until the tensor that it has saved is freed."""

    saved: "weakref.ref[Tensor]"  # whose callback ends this when the tensor is freed
    memory: Any  # a weak reference to the tensor's storage, which its views share: autograd may return a view
    stream: int
    decoded: DecodedExperts


_kept: dict[int, Kept] = {}  # by device


def keep_for(saved: Tensor, decoded: DecodedExperts) -> None:
    """Keep what a forward has decoded for the backward that it saves the tensor ``saved`` for.

    Nothing is kept while a CUDA graph is captured, since nothing that is allocated in its memory may outlive it.
    """
    if not decoded.there or may_be_captured(saved.device):
        return
    device = saved.get_device()

    def freed(reference: Any) -> None:
        kept = _kept.get(device)
        if kept is not None and kept.saved is reference:
            _kept.pop(device, None)

    memory = StorageWeakRef(saved.untyped_storage())
    _kept[device] = Kept(weakref.ref(saved, freed), memory, _stream(saved), decoded)


def kept_for(saved: Tensor, decoded: DecodedExperts) -> None:
    """Give ``decoded`` what the forward that saved the tensor ``saved`` has decoded, if it is still kept."""
    kept = _kept.pop(saved.get_device(), None)
    if kept is None or may_be_captured(saved.device) or kept.stream != _stream(saved):
        return
    if kept.memory == StorageWeakRef(saved.untyped_storage()):
        decoded.memory, decoded.there = kept.decoded.memory, kept.decoded.there


def release(like: Tensor) -> None:
    """Keep nothing any longer on the device of a tensor."""
    _kept.pop(like.get_device(), None)


def _stream(tensor: Tensor) -> int:
    return torch.cuda.current_stream(tensor.device).cuda_stream if tensor.is_cuda else 0
