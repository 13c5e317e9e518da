"""`VocabParallelLogits`: logits whose vocabulary is sharded over processes, as a source of logits.

Users pass it to any function that takes logits, or a DTensor that is sharded over its last dimension.
"""

import operator
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from onepass.core.checks import FLOATS, check_integer, described, is_debugging
from onepass.core.collectives import GatheredColumns, Sum, gathered_columns, process_group
from onepass.core.dispatch import constant_in_trace, is_plain, refuse_forward_mode
from onepass.core.options import Average, Inputs, Options, Transform
from onepass.core.shard import Group, Shard, leading
from onepass.logits.partitioned import in_order
from onepass.logits.source import WRAPPERS, Fields, LogitsSource, TensorLogits, over_row_temperature
from onepass.softmax.statistics import gather_logits, statistics_of


class VocabParallelLogits(LogitsSource):
    """Logits ``(..., V)`` of which every process holds some columns, for any function of onepass that takes logits.

    The processes of the group hold contiguous ranges of the vocabulary, in the order of their ranks and not necessarily
    of the same size. All of them must call the same functions with the same labels, masks and options, and get the same
    results. The forward exchanges a few float32 numbers per row; the backward exchanges nothing.

    Args:
        local_logits: ``(..., columns)``, the logits of this process; float16, bfloat16, float32 or float64, any
            strides.
        group: a `torch.distributed.ProcessGroup`, or a `DeviceMesh` with one dimension.
        vocab_size: the number V of classes. The columns from V on, which the last processes hold, are padding: their
            gradient is 0. By default, all columns are classes.

    Class weights may be given for all classes, or for the classes of this process.

    Raises:
        TypeError, ValueError: an argument has the wrong type or shape, or the processes do not agree on rows, dtype and
            vocabulary. The agreement is checked once for every shape, or in each call with ``ONEPASS_DEBUG=1``.

    Example::

        logits = onepass.VocabParallelLogits(hidden @ weight_shard.T, group)
        loss = onepass.cross_entropy(logits, labels)
    """

    def __init__(self, local_logits: Tensor, group: Group, vocab_size: int | None = None) -> None:
        if not isinstance(local_logits, Tensor) or hasattr(local_logits, "device_mesh"):
            raise TypeError(f"local_logits: expected a tensor, got {described(local_logits)}")
        if local_logits.dtype not in FLOATS or local_logits.dim() < 1:
            raise TypeError(
                f"local_logits: expected floating-point logits (..., columns), got {described(local_logits)}"
            )
        vocab_size = None if vocab_size is None else check_integer(vocab_size, "vocab_size")
        self.local_logits = local_logits
        *rows, columns = local_logits.shape
        about = local_logits.dtype, local_logits.device, group_of(group), vocab_size
        self.shard = agree_on_shard(rows, columns, *about, "group")
        self.shape = torch.Size((*local_logits.shape[:-1], self.shard.vocab))
        self.dtype, self.device = local_logits.dtype, local_logits.device

    @property
    def requires_grad(self) -> bool:
        return self.local_logits.requires_grad

    @property
    def is_eager(self) -> bool:
        return is_plain(self.local_logits)

    def __repr__(self) -> str:
        first = self.shard.first
        columns = f"[{first}, {first + self.shard.size})"
        return f"VocabParallelLogits(shape={tuple(self.shape)}, columns {columns} of this process)"

    def materialize(self) -> Tensor:
        """The logits of all processes, on each of them."""
        return GatheredColumns.apply(self.local_logits, self.shard)

    def local_columns(self, shard: Shard) -> Tensor:
        return self.local_logits

    def all_class_weights(self, weights: Tensor) -> Tensor:
        return all_weights(weights, self.local_logits.shape[-1], self.shard)

    def statistics(self, inputs: Inputs, options: Options) -> Fields:
        index = inputs.index
        if options.fields == "selected" and index is not None:  # no other logit is read
            selected = self.selected(index, options.transform)
            return {"selected": over_row_temperature(selected, inputs.temperature, inputs.row_mask)}
        return dict(zip(options.names(), self.fields(inputs, options)))

    def average_of_field(self, inputs: Inputs, options: Options, average: Average) -> Tensor | None:
        return self.fields(inputs, options, average)[0]

    def fields(self, inputs: Inputs, options: Options, average: Average | None = None) -> tuple[Tensor, ...]:
        """The fields of every row, or an average of the only one; see `statistics_of`."""
        first = self.shard.first
        local = inputs.columns(first, first + self.shard.size)
        refuse_forward_mode(self.local_logits)
        return statistics_of(
            self.local_logits, local, options, average=average, early=self.early_gradient, shard=self.shard
        )

    def selected(self, index: Tensor, transform: Transform) -> Tensor:
        """The transformed logits ``(..., K)`` of the classes ``index``, NaN outside the vocabulary."""
        size, place = self.shard.size, index - self.shard.first
        mine = (place >= 0) & (place < size)
        local = self.local_logits[..., :size]
        if size:
            found = gather_logits(local, place.masked_fill(~mine, 0), transform).where(mine, 0.0)
        else:  # zeros with a gradient, as on the other processes
            wide = torch.promote_types(self.dtype, torch.float32)
            found = local.sum(-1, keepdim=index.dim() == local.dim(), dtype=wide).expand(index.shape)
        outside = (index < 0) | (index >= self.shard.vocab)
        of_all: Tensor = Sum.apply(found, self.shard.group)
        return of_all.masked_fill(outside, torch.nan)


def group_along(mesh: Any, dim: int, name: str) -> Any:
    """The process group of a dimension of a mesh. The order of its ranks is that of the columns."""
    group = mesh.get_group(dim)
    if not in_order(mesh, dim):
        raise ValueError(f"{name}: expected a mesh with ascending ranks along the vocabulary, got {mesh}")
    return group


def group_of(group: Any, name: str = "group") -> Any:
    """The process group of a group, or of a `DeviceMesh` with one dimension."""
    if isinstance(group, dist.ProcessGroup):
        return group
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"{name}: expected a device mesh of one dimension, got one of {group.ndim}")
        return group_along(group, 0, name)
    raise TypeError(f"{name}: expected a ProcessGroup or a DeviceMesh, got {described(group)}")


NUMBERS = 32  # that processes exchange for the check; enough for 27 dimensions
_agreed: "WeakKeyDictionary[Any, dict[tuple[Any, ...], tuple[int, Any]]]" = WeakKeyDictionary()


def agree_on_shard(
    rows: Sequence[int], columns: int, dtype: torch.dtype, device: torch.device, group: Any, vocab_size: int | None,
    argument: str,
) -> Shard:  # fmt: skip
    """The columns that each process holds, after a check that the processes agree on everything else.

    ``argument`` is the name of the caller's argument that is the ``group``.

    Under `torch.compile` the result is computed while tracing and is a constant; the rows are not compared.
    """
    if torch.compiler.is_compiling():
        rows, columns = (), operator.index(columns)  # constants, if shapes are dynamic
        vocab_size = None if vocab_size is None else operator.index(vocab_size)
    found = shard_or_error(rows, columns, dtype, device, group.group_name, vocab_size, argument)
    if isinstance(found, str):
        raise ValueError(found)
    return Shard(*found)


def shard_of(
    rows: Sequence[int], columns: int, dtype: torch.dtype, device: torch.device, name: str, vocab_size: int | None,
    argument: str,
) -> tuple[int, tuple[int, ...], str]:  # fmt: skip
    """`agree_on_shard` with numbers and names as arguments."""
    group = process_group(name)
    # The key has only values that must agree, so that all processes find it or none does.
    about = (len(rows), *rows, -1 if vocab_size is None else vocab_size, FLOATS.index(dtype))
    known = _agreed.setdefault(group, {})
    if about in known and not is_debugging():
        before, shard = known[about]
        if columns != before:
            raise ValueError(
                f"vocab_size: expected {before} columns on rank {shard[0]}, as in an earlier call with the same rows "
                f"and vocab_size={vocab_size}, got {columns}; heads with other columns need another group or vocab_size"
            )
        return shard
    if len(about) >= NUMBERS:
        raise ValueError(f"logits: expected at most {NUMBERS - 4} dimensions of rows, got {len(rows)}")
    sent = torch.tensor(((*about, columns) + (0,) * NUMBERS)[:NUMBERS], device=device)
    of_ranks = [torch.empty_like(sent) for _ in range(dist.get_world_size(group))]
    dist.all_gather(of_ranks, sent, group=group)
    received = [r[: r[0] + 4] for r in torch.stack(of_ranks).tolist()]  # their number of dimensions comes first
    if any(r[:-1] != received[0][:-1] for r in received):
        text = "; ".join(f"{r[1:-3]}, {r[-3]}, {str(FLOATS[r[-2] % 4])[6:]} on rank {n}"
                         for n, r in enumerate(received))  # fmt: skip
        raise ValueError(
            f"{argument}: expected the same shape of the rows (of a head: of the hidden states, and then "
            "sequence_parallel, bytes of a logit, max_memory, and whether hidden and weight require a gradient), "
            f"vocab_size (-1 for None) and dtype on all ranks, got {text}"
        )
    sizes = [r[-1] for r in received]
    vocab = sum(sizes) if vocab_size is None else vocab_size
    if not 0 < vocab <= sum(sizes):
        raise ValueError(f"vocab_size: expected 1 to {sum(sizes)}, the columns of all ranks, got {vocab_size}")
    shard = dist.get_rank(group), tuple(leading(Shard(sizes=sizes), vocab).sizes), name
    known[about] = columns, shard
    return shard


def shard_or_error(*arguments: Any) -> tuple[int, tuple[int, ...], str] | str:
    """`shard_of`, or the text of its error, which torch would replace by one of its own while tracing."""
    try:
        return shard_of(*arguments)
    except ValueError as error:
        return str(error)


constant_in_trace(shard_or_error)


def all_weights(weights: Tensor, columns: int, shard: Shard) -> Tensor:
    """The class weights of all columns: these or, if they are those of this process, those of all processes.

    Those of the ``columns`` of this process may include its padding, or not.
    """
    if weights.shape not in ((shard.size,), (columns,)) or weights.shape == (shard.vocab,):
        return weights
    return gathered_columns(weights.detach(), shard)


def source_of_dtensor(logits: Any, name: str) -> LogitsSource:
    """The source for the rows of a DTensor that this process holds."""
    last = logits.dim() - 1
    if any(p.is_partial() for p in logits.placements):
        raise ValueError(f"{name}: expected a DTensor without partial sums, got placements {logits.placements}")
    sharded = [n for n, p in enumerate(logits.placements) if getattr(p, "dim", None) == last]
    if len(sharded) > 1 or not all(logits.placements[n].is_shard(last) for n in sharded):  # or strided shards
        raise ValueError(
            f"{name}: expected a vocabulary sharded over one mesh dimension, got placements {logits.placements}"
        )
    local = logits.to_local()
    if not sharded:
        return TensorLogits(local)
    return VocabParallelLogits(local, group_along(logits.device_mesh, sharded[0], name), logits.shape[-1])


WRAPPERS["DTensor"] = source_of_dtensor
