"""`RoutingRecord`: the experts that the routers of a model selected, and the arrays in which inference engines return
them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from onepass.core.checks import check_integer, described
from onepass.moe.router import INTEGERS

DTYPES = (torch.int16, torch.uint8)
LARGEST = torch.iinfo(torch.int16).max


class RoutingRecord:
    """The experts of each token, by forward pass and by layer, from `record_routing` and for `replay_routing`.

    A record is a sequence of forward passes: ``len(record)`` is their number, ``record[1]`` or ``record[:2]`` is a
    record of some of them, and ``record + other`` concatenates records, such as those of the micro-batches of a step.

    Attributes:
        passes: for each forward pass, for each layer with a router, the experts ``(T, K)`` of its T tokens, int16. An
            id of -1 leaves the choice to the router. T is 0 for a layer that the pass did not compute.

    Raises:
        TypeError, ValueError: ``passes`` are not such tensors, of any integer dtype.
    """

    def __init__(self, passes: Sequence[Sequence[Tensor]] = ()) -> None:
        if not isinstance(passes, Sequence) or not all(isinstance(layers, Sequence) for layers in passes):
            raise TypeError(f"passes: expected a sequence of sequences of tensors, got {described(passes)}")
        self.passes: list[list[Tensor]] = [[_ids(of_layer) for of_layer in layers] for layers in passes]

    def __len__(self) -> int:
        return len(self.passes)

    def __getitem__(self, index: int | slice) -> RoutingRecord:
        return RoutingRecord(self.passes[index] if isinstance(index, slice) else [self.passes[index]])

    def __add__(self, other: RoutingRecord) -> RoutingRecord:
        if not isinstance(other, RoutingRecord):
            return NotImplemented
        return RoutingRecord(self.passes + other.passes)

    def to(self, device: torch.device | str) -> RoutingRecord:
        """A record whose tensors are on the device."""
        return RoutingRecord([[ids.to(device) for ids in layers] for layers in self.passes])

    def to_array(
        self, attention_mask: Tensor | None = None, *, lengths: Sequence[int] | None = None,
        dtype: torch.dtype = torch.int16,
    ) -> Any:  # fmt: skip
        """The experts in the layout in which vLLM and SGLang return them.

        An array has the shape ``(tokens - 1, layers, K)``, where layers are those with a router: an engine runs no
        forward pass for the last token that it samples. The passes of a ``generate``, for the prompt and for each
        further token, are concatenated. For these, pass the ``attention_mask`` of all tokens, including the last;
        without it, the array has no row for the last token of the record. Each pass must have the sequences in the same
        order: beam search reorders them, and then arrays have experts of other sequences.

        Args:
            attention_mask: ``(B, S)``, the mask of B sequences that are padded on the left or right.
            lengths: the number of tokens of each sequence, for sequences that are packed into one row. Tokens after the
                last sequence are padding.
            dtype: int16, or uint8 if there are at most 256 experts and no id is -1.

        Returns:
            A NumPy array for each sequence, in a list; one array without ``attention_mask`` and ``lengths``, where all
            tokens are one sequence.

        Raises:
            TypeError, ValueError: an argument has the wrong type, dtype or shape, does not agree with the number of
                tokens of the record, or uint8 cannot represent an id.
        """
        if dtype not in DTYPES:
            raise ValueError(f"dtype: expected torch.int16 or torch.uint8, got {described(dtype)}")
        if not self.passes:
            raise ValueError("record: expected at least one forward pass, got none")
        batch = _sequences(attention_mask)[0] if attention_mask is not None else 1
        lengths = None if lengths is None else _numbers(lengths, "lengths")
        if not batch:
            raise ValueError("attention_mask: expected a sequence or more, got none")
        for layers in self.passes:
            if layers and len(layers[0]) % batch:
                raise ValueError(f"attention_mask: expected as many tokens in each of {batch} sequences, got a forward "
                                 f"pass of {len(layers[0])}")  # fmt: skip
            shapes = {tuple(ids.shape) for ids in layers}
            if len(shapes) != 1:
                raise ValueError("record: expected as many tokens and experts in each layer of a forward pass, "
                                 f"got the shapes {sorted(shapes)}")  # fmt: skip
        kinds = {(len(layers), layers[0].shape[1]) for layers in self.passes}
        if len(kinds) != 1:
            raise ValueError("record: expected as many layers and experts per token in each forward pass, got "
                             f"{sorted(kinds)}")  # fmt: skip
        parts = [torch.stack([ids.cpu().view(batch, -1, ids.shape[-1]) for ids in p], 2) for p in self.passes]
        joined = torch.cat(parts, 1)  # (B, S, layers, K)
        found = joined.shape[1]
        if attention_mask is not None and attention_mask.shape[1] - found not in (0, 1):
            raise ValueError(f"attention_mask: expected {found} or {found + 1} tokens, the first {found} of which the "
                             f"record has, got shape {tuple(attention_mask.shape)}")  # fmt: skip
        if attention_mask is None and lengths is not None and sum(lengths) - found > 1:
            raise ValueError(f"lengths: expected at most {found + 1} tokens, got {sum(lengths)}")
        if dtype == torch.uint8 and joined.numel() and not 0 <= int(joined.min()) <= int(joined.max()) < 256:
            raise ValueError("dtype: expected torch.int16 for ids below 0 or above 255, got torch.uint8")
        flat, places = joined.flatten(0, 1), _places(found, attention_mask, lengths)
        arrays = [flat[at[:-1]].to(dtype).numpy() for at in places]
        return arrays[0] if attention_mask is None and lengths is None else arrays

    @classmethod
    def from_array(
        cls, arrays: Any, attention_mask: Tensor | None = None, *, lengths: Sequence[int] | None = None,
        starts: int | Sequence[int] = 0,
    ) -> RoutingRecord:  # fmt: skip
        """A record of one forward pass over sequences whose experts an inference engine has returned.

        Positions for which the arrays have no row get the id -1, so that the router selects their experts. These are
        the last token of a sequence, for which an engine runs no forward pass; prompts, if an engine returns only
        completions; and padding.

        Args:
            arrays: ``(rows, layers, K)``, integers, for each sequence, in a list. Without ``attention_mask`` and
                ``lengths``, one array, for a pass over ``starts + rows + 1`` tokens. The layers are those with a
                router, or all layers of the decoder, of which those without a router are not read.
            attention_mask, lengths: as in `to_array`.
            starts: the number of tokens of each sequence before its first row, such as the length of the prompt.

        Raises:
            TypeError, ValueError: an argument has the wrong type, dtype, shape or value, or a sequence is shorter than
                its array.
        """
        lengths = None if lengths is None else _numbers(lengths, "lengths")
        if attention_mask is None and lengths is None:
            arrays = [arrays]
        if not isinstance(arrays, Iterable):
            raise TypeError(f"arrays: expected one for each sequence, got {described(arrays)}")
        rows = [_rows(array) for array in arrays]
        if not rows:
            raise ValueError("arrays: expected at least one, got none")
        if len({r.shape[1:] for r in rows}) > 1:
            raise ValueError("arrays: expected the same layers and experts per token in all, got "
                             f"{sorted({tuple(r.shape[1:]) for r in rows})}")  # fmt: skip
        if isinstance(starts, Sequence) or getattr(starts, "ndim", 0) > 0:
            first = _numbers(starts, "starts")
        else:
            first = [check_integer(starts, "starts", 0)] * len(rows)
        if len(first) != len(rows):
            raise ValueError(f"starts: expected {len(rows)} numbers, got {starts}")
        batch, width = (1, 0) if attention_mask is None else _sequences(attention_mask)
        if lengths is not None:
            width = sum(lengths)
        elif attention_mask is None:
            width = first[0] + len(rows[0]) + 1
        places = _places(width, attention_mask, lengths)
        if len(places) != len(rows):
            raise ValueError(f"arrays: expected {len(places)}, one for each sequence, got {len(rows)}")
        experts = torch.full((batch * width, *rows[0].shape[1:]), -1, dtype=torch.int16)
        for n, (at, array, start) in enumerate(zip(places, rows, first)):
            if start > len(at):
                raise ValueError(f"starts: expected at most {len(at)}, the tokens of sequence {n}, got {start}")
            if start + len(array) > len(at):
                raise ValueError(f"arrays: expected at most {len(at) - start} rows for sequence {n}, which has "
                                 f"{len(at)} tokens, got {len(array)}")  # fmt: skip
            experts[at[start : start + len(array)]] = array
        return cls([experts.transpose(0, 1).contiguous().unbind(0)])


def _ids(ids: Any) -> Tensor:
    """Experts ``(T, K)`` as int16."""
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.dtype not in INTEGERS:
        raise TypeError(f"passes: expected integer tensors (T, K), the experts of each layer, got {described(ids)}")
    if ids.is_cpu:
        check_ids(ids.numpy(), "passes")
    if ids.dtype in (torch.int16, torch.int8, torch.uint8):
        return ids.to(torch.int16)
    # On a GPU nothing is read. An id out of range is clamped, since its lower 16 bits may be the id of an expert.
    return ids.long().clamp(-2, LARGEST).to(torch.int16)


def check_ids(ids: Any, name: str) -> None:
    """Raise unless all ids, a NumPy array or a tensor, are -1 or fit into int16."""
    low, high = (int(ids.min()), int(ids.max())) if all(ids.shape) else (0, 0)
    if low < -1 or high > LARGEST:
        raise ValueError(f"{name}: expected ids from -1 to {LARGEST}, got {low} to {high}")


def _rows(array: Any) -> Tensor:
    """An array of an engine, as a tensor."""
    if getattr(getattr(array, "dtype", None), "kind", "") in ("i", "u"):
        ids = array  # of NumPy
    else:
        try:
            ids = torch.as_tensor(array)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(f"arrays: expected integers (tokens - 1, layers, K), got {described(array)}") from error
        if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
            raise TypeError(f"arrays: expected integers, got {described(ids)}")
        ids = ids.cpu().long()
    if ids.ndim != 3:
        raise ValueError(f"arrays: expected shape (tokens - 1, layers, K), got {tuple(ids.shape)}")
    check_ids(ids, "arrays")
    if not isinstance(ids, Tensor):  # torch takes no big-endian array, and none with a negative stride
        ids = torch.from_numpy(ids.astype("int64"))
    return ids.to(torch.int16)


def _numbers(values: Any, name: str) -> list[int]:
    """A sequence of numbers of tokens."""
    if isinstance(values, str) or not (isinstance(values, Sequence) or getattr(values, "ndim", 0) == 1):
        raise TypeError(f"{name}: expected a sequence of ints, got {described(values)}")
    return [check_integer(n, name, 0) for n in values]


def _sequences(attention_mask: Any) -> tuple[int, int]:
    """``(B, S)`` of a mask."""
    if not isinstance(attention_mask, Tensor):
        raise TypeError(f"attention_mask: expected a tensor, got {described(attention_mask)}")
    if attention_mask.dim() != 2:
        raise ValueError(f"attention_mask: expected shape (B, S), got {tuple(attention_mask.shape)}")
    return attention_mask.shape[0], attention_mask.shape[1]


def _places(width: int, attention_mask: Tensor | None, lengths: Sequence[int] | None) -> list[Tensor]:
    """The tokens of each sequence, among those of a pass, of which each sequence has ``width``."""
    if attention_mask is not None:
        if lengths is not None:
            raise ValueError("lengths: expected None beside an attention_mask, got both")
        inside = [row.nonzero().view(-1) for row in attention_mask.cpu() != 0]
        return [at + b * width for b, at in enumerate(inside)]
    if lengths is None:
        return [torch.arange(width)]
    ends = accumulate(lengths)
    return [torch.arange(end - n, end) for n, end in zip(lengths, ends)]
