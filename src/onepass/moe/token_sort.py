"""`group_by_expert`: assignments (pairs of a token and an expert) sorted by expert, as grouped GEMMs require them."""

import torch
from torch import Tensor

from onepass.backend import backend_of
from onepass.core.checks import (
    FLOATS,
    INDEX_DTYPES,
    check_device,
    check_index_dtype,
    check_integer,
    described,
    is_debugging,
)
from onepass.core.dispatch import is_plain, operation
from onepass.core.moe_options import Groups


def group_by_expert(experts: Tensor, num_experts: int, like: Tensor, *, counts: Tensor | None = None) -> Groups:
    """Sort the pairs of a token and an expert by expert, for any number of `expert_mlp` and `scattered_linear` calls.

    Args:
        experts: ``(T, K)``, int32 or int64, the ids of every token's experts. Out-of-range ids are ignored.
        num_experts: the number E of experts.
        like: a tensor of the device and dtype of the GEMMs, float16, bfloat16, float32 or float64.
        counts: ``(E,)``, int32 or int64, how often each expert occurs in ``experts``, if these are already in ascending
            order, as for rows that other processes have sent. Nothing is then sorted. Out-of-range ids must come last.

    Returns:
        ``Groups``, to be passed to `expert_mlp` or `scattered_linear`: its ``order`` is the stable sort, int32.

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype, shape, device or value. On a CPU and with
            ``ONEPASS_DEBUG=1``, also if ``counts`` is not that of ``experts``; elsewhere, results are then wrong.
    """
    check_assignments(experts)
    num_experts = check_integer(num_experts, "num_experts", 1)
    if not isinstance(like, Tensor) or like.dtype not in FLOATS:
        raise TypeError(f"like: expected a floating-point tensor, got {described(like)}")
    check_device(experts, like, "experts", "like")
    if counts is not None:
        check_counts(counts, experts, num_experts)
    return Groups(*_sort(experts, like, num_experts, counts))


def experts_of_rows(counts: Tensor, rows: int) -> Tensor:
    """The expert ``(rows, 1)`` of each row, where they are grouped and ``counts`` ``(E,)``, int64, are each expert's.

    Rows behind those of the last expert have the id E, which is out of range.
    """
    return torch.searchsorted(counts.cumsum(0), torch.arange(rows, device=counts.device), right=True).unsqueeze(1)


def check_assignments(experts: Tensor) -> None:
    if not isinstance(experts, Tensor) or experts.dtype not in INDEX_DTYPES or experts.dim() != 2:
        raise TypeError(f"experts: expected an int32 or int64 tensor (T, K), got {described(experts)}")


def check_counts(counts: Tensor, experts: Tensor, num_experts: int) -> None:
    check_index_dtype(counts, "counts")
    if counts.shape != (num_experts,):
        raise ValueError(f"counts: expected shape ({num_experts},), got {tuple(counts.shape)}")
    check_device(counts, experts, "counts", "experts")
    if is_plain(counts, experts) and (is_debugging() or counts.is_cpu):
        ids = experts.flatten()
        inside = (ids >= 0) & (ids < num_experts)
        grouped = torch.where(inside, ids, num_experts).diff().ge(0).all()
        found = torch.bincount(ids[inside], minlength=num_experts)
        if not grouped or not torch.equal(found, counts.long()):
            raise ValueError(
                "counts: expected those of experts, which is in ascending order with out-of-range ids last, "
                f"got {counts.tolist()} for {'' if grouped else 'unsorted '}experts with {found.tolist()}"
            )


def check_groups(groups: Groups, experts: Tensor, num_experts: int, like: Tensor) -> None:
    """Raise unless ``groups`` may be what `group_by_expert` returns for these arguments. Its values are not read."""
    if not isinstance(groups, Groups):
        raise TypeError(f"groups: expected what `group_by_expert` returns, got {described(groups)}")
    for name, size in zip(Groups._fields, sizes_of(experts, num_experts, like)):
        t = getattr(groups, name)
        if not isinstance(t, Tensor):
            raise TypeError(f"groups.{name}: expected a tensor, got {described(t)}")
        if t.shape != (size,):
            raise ValueError(f"groups.{name}: expected shape {(size,)}, got {tuple(t.shape)}")
        if t.dtype != torch.int32:
            raise TypeError(f"groups.{name}: expected int32, got {t.dtype}")
        check_device(t, like, f"groups.{name}", "the rows")


def sizes_of(experts: Tensor, num_experts: int, like: Tensor) -> tuple[int, ...]:
    """The sizes of the fields of `Groups`."""
    count = experts.numel()
    return count, num_experts + 1, backend_of(like).size_of_tile_list(count, num_experts), count


def _like_sort(experts: Tensor, like: Tensor, num_experts: int, counts: Tensor | None) -> tuple[Tensor, ...]:
    return tuple(experts.new_empty(n, dtype=torch.int32) for n in sizes_of(experts, num_experts, like))


@operation("onepass::group_by_expert", _like_sort)
def _sort(
    experts: Tensor, like: Tensor, num_experts: int, counts: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    groups: Groups = backend_of(like).sort_by_expert(experts, num_experts, counts)
    return tuple(groups)  # type: ignore[return-value]
