"""Tensors that lie in memory in every way, amid what must not be read or written."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

LAYOUTS = ("a slice", "every second", "transposed", "offset", "misaligned")
EXPANSIONS = ("expanded over rows", "expanded over columns")


class Laid:
    """A tensor of the values of ``tensor`` that lies in memory as ``layout`` says, amid what must not be read: NaN, ids
    of nothing, or zeros where no kernel can look what it reads (``harmless``)."""

    def __init__(self, tensor: Tensor, layout: str, *, harmless: bool = False) -> None:
        shape, last = tensor.shape, tensor.shape[-1]
        outside: Any = math.nan if tensor.is_floating_point() else True
        if tensor.dtype in (torch.int32, torch.int64):
            outside = 0 if harmless else 2**30 if tensor.dtype == torch.int32 else 2**40

        def around(*sizes: int) -> Tensor:
            return torch.full(sizes, outside, dtype=tensor.dtype, device=tensor.device)

        if layout == "a slice":
            view = around(*shape[:-1], last + 3)[..., :last]
        elif layout == "every second":
            view = around(*shape[:-1], 2 * last)[..., ::2]
        elif layout == "transposed":
            view = around(last, 3)[:, 1] if tensor.dim() == 1 else around(*shape[:-2], last, shape[-2] + 1).mT
            view = view if tensor.dim() == 1 else view[..., : shape[-2], :]
        elif layout == "offset":
            view = around(tensor.numel() + 4)[1 : 1 + tensor.numel()].view(shape)
        elif layout == "misaligned":  # each row in another way
            rows = tensor[..., 0].numel()
            view = around(rows * (last + 1) + 3)[3:].view(rows, last + 1)[:, :last].unflatten(0, shape[:-1] or (1,))
            view = view if tensor.dim() > 1 else view[0]
        elif layout == "expanded over rows":
            tensor = tensor[:1].expand(shape)
            view = around(1, *shape[1:-1], last + 3)[..., :last] if tensor.dim() > 1 else around(4)[:1]
            view.copy_(tensor[:1])
            view = view.expand(shape)
        else:
            tensor = tensor[..., :1].expand(shape)
            view = around(*shape[:-1], 2)[..., :1]
            view.copy_(tensor[..., :1])
            view = view.expand(shape)
        if 0 not in view.stride():
            view.copy_(tensor)
        self.view = view.detach()
        self.layout_of_view = view.dtype, view.shape, view.stride(), view.storage_offset()
        self.storage = view.untyped_storage()  # a view that was written over refuses to say where it lies
        self.plain = tensor.detach().clone(memory_format=torch.contiguous_format)
        self.before = self.memory().clone()
        same = (self.view == self.plain) | (self.view != self.view)  # NaN is not what it is
        assert self.view.shape == shape and same.all()

    def memory(self) -> Tensor:
        """The bytes of its storage."""
        return torch.empty(0, dtype=torch.uint8, device=self.storage.device).set_(self.storage)

    def is_untouched(self, inside: bool = True) -> bool:
        """Whether no byte changed, or none around the view."""
        if inside:
            return torch.equal(self.memory(), self.before)
        after, (dtype, *where) = self.memory().clone(), self.layout_of_view
        after.view(dtype).as_strided(*where).copy_(self.before.view(dtype).as_strided(*where))
        return torch.equal(after, self.before)


def tensors_of(values: dict[str, Any]) -> Iterator[str]:
    """The leaves that can be laid out in another way."""
    return (name for name, value in values.items() if isinstance(value, Tensor) and value.dim() and value.numel())
