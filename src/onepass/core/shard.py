"""The state of the rows of a vocabulary shard: the numbers that the ranks of a group exchange, and their order.

`kernels` and `reference` write and merge states, `softmax.shards` exchanges them.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from onepass.core.options import Options

Group = ProcessGroup | DeviceMesh  # a mesh has one dimension


class Shard(NamedTuple):
    """The columns of the vocabulary that the ranks of a group hold: contiguous ranges, in the order of the ranks.

    Without ``sizes``, this process holds all of the vocabulary.
    """

    rank: int = 0  # of this process
    sizes: Sequence[int] = ()  # of all ranks; 0 if a rank holds only padding
    group: str = ""  # the name of the process group

    @property
    def size(self) -> int:
        """The number of columns of this process."""
        return self.sizes[self.rank]

    @property
    def first(self) -> int:
        """The first column of this process."""
        return sum(self.sizes[: self.rank])

    @property
    def vocab(self) -> int:
        """The number of columns of all processes."""
        return sum(self.sizes)

    @property
    def ranks(self) -> int:
        """The number of processes."""
        return len(self.sizes)


NOT_SHARDED = Shard()


def leading(shard: Shard, columns: int) -> Shard:
    """The shard of the leading ``columns`` of the vocabulary."""
    sizes = [max(0, min(size, columns - sum(shard.sizes[:n]))) for n, size in enumerate(shard.sizes)]
    return shard._replace(sizes=tuple(sizes))


def shared_columns(first: Shard, second: Shard, columns: int | None) -> Shard | None:
    """The shard of the leading ``columns`` (None for all) of two sources of logits, one of which may have all columns.

    None if neither is sharded, or if both are, but not in the same way.
    """
    shards = [leading(s, s.vocab if columns is None else columns) for s in (first, second) if s.sizes]
    return shards[0] if shards and shards[0] == shards[-1] else None


def per_row(index: Tensor | None, dim: int, none: int = 0) -> int:
    """K for an index ``(..., K)`` of logits with ``dim`` dimensions, 1 for ``(...)``, ``none`` for None."""
    if index is None:
        return none
    return 1 if index.dim() < dim else index.shape[-1]


@lru_cache
def state_fields(options: Options, K: int) -> tuple[str, ...]:
    """The numbers of a row's state, in order.

    ``max``, the largest logit, which is subtracted in all others; ``sum`` of exp(); ``expected``, the logits' sum
    weighted by exp(); ``weighted``, their sum weighted by class weights; ``weights``, the sum of these; ``tempered``,
    the sum of exp() at the second temperature; ``total``, the sum of the logits themselves. Then ``selected``, K times:
    +inf where another rank holds the class; and K times ``top1``: 1 if the class is the first maximum of the shard.
    """
    fields = ["max", "sum"]
    if options.wants("expected_logit") or options.wants("entropy"):
        fields.append("expected")
    if options.wants("weighted_logit"):
        fields += ["weighted", "weights"]
    if options.wants("log_sum_sq_probs") or options.wants("tempered_log_normalizer"):
        fields.append("tempered")
    if options.wants("mean_logit"):
        fields.append("total")
    fields += ["selected"] * K
    return tuple(fields + (["top1"] * K if options.wants("is_top1") else []))


def state_size(options: Options, K: int) -> int:
    """The number of `state_fields`, for a K that may be symbolic."""
    return len(state_fields(options, 0)) + (2 if options.wants("is_top1") else 1) * K


# The state of a row of some columns of P and Q, for KL(P ‖ Q): of each, the largest logit, which is subtracted in the
# others, and the sum of exp(); and the sum of the logits' differences, weighted by exp() of those of P.
PAIR_STATE = ("p_max", "p_sum", "q_max", "q_sum", "difference")
