"""What models do with logits between their head and their loss, for logits that are not materialized.

`LinearLogits` inherits these operations. A scale, a soft-cap, a bias, a cast, and an index or another shape of the rows
only change the source. Any other operation computes the logits once, with a warning, and is applied to that tensor.
"""

import math
import warnings
from collections.abc import Callable, Iterator
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from onepass.core.caller import stacklevel_outside
from onepass.core.options import IDENTITY, Transform
from onepass.logits.indexing import count_of_columns, is_view, split_index
from onepass.logits.operators import Operators, as_tensor, is_in_place, is_lazy
from onepass.logits.source import LogitsSource
from onepass.reference.softmax import transformed


class MaterializedLogits(UserWarning):
    """The warning for an operation that computes all logits of `LinearLogits`."""


TORCH_FUNCTIONS: dict[Any, Callable[..., Any]] = {}  # losses of torch, and functions that return None if they cannot


class TensorLike(Operators, LogitsSource):
    """Logits ``(..., V)`` with some methods of a tensor.

    Views do not share memory. Once logits are changed in place, using logits that would share memory with them, if they
    were tensors, is an error: a view of the changed logits, or the logits of which a view was changed.

    Attributes:
        transform: of the logits of the linear layer, before any transform that a loss applies.
        tensor: the logits, once they are materialized. All operations then act on them.
        is_whole: whether a tensor of these logits would be contiguous: they are no slice.
        writes: how often logits and their views were changed in place, one number that all of them share; None if there
            is no view.
        seen: how many of these changes this object has, which is all unless another one was changed.
    """

    transform: Transform = IDENTITY
    tensor: Tensor | None = None
    is_whole = True
    writes: list[int] | None = None
    seen = 0
    __array_priority__ = 1000  # a number of numpy leaves its operators to this class, as with a tensor

    def untransformed(self) -> Tensor:
        """The logits of the linear layer as a tensor."""
        raise NotImplementedError

    def with_rows(self, of: Callable[[Tensor], Tensor]) -> "TensorLike":
        """The logits of rows that ``of`` indexes or reshapes. It is applied to a tensor ``(..., n)`` for any n."""
        raise NotImplementedError

    def shares_rows(self, new: Any) -> bool:
        """Whether other rows that `with_rows` has returned would be a view of these if both were tensors."""
        raise NotImplementedError

    def with_columns(self, count: int) -> "TensorLike | None":
        """The first ``count`` columns, or None."""
        raise NotImplementedError

    def with_bias(self, bias: Tensor) -> "TensorLike | None":
        """The logits plus a bias ``(V,)``, or None."""
        raise NotImplementedError

    def changed(self, **attributes: Any) -> Any:
        """A copy with other attributes; without a gradient where gradients are disabled, as of any operation."""
        self.check_unwritten()
        new = object.__new__(type(self))
        new.__dict__ |= self.__dict__ | {"writes": None, "seen": 0} | attributes
        if not torch.is_grad_enabled() and new.requires_grad:
            new.make_constant()
        return new

    def viewed(self, new: Any) -> Any:
        """``new``, logits that would share memory with these if they were tensors."""
        if self.writes is None:
            self.writes = [0]
        new.writes, new.seen = self.writes, self.seen
        return new

    def written(self) -> None:
        """Note a change in place, which may be one of the shape."""
        if self.tensor is not None:
            self.shape, self.dtype = self.tensor.shape, self.tensor.dtype
        if self.writes is not None:
            self.writes[0] += 1
            self.seen = self.writes[0]

    def check_unwritten(self) -> None:
        """Raise if logits that would share memory with these have been changed in place."""
        if self.writes is not None and self.writes[0] != self.seen:
            raise RuntimeError(
                "logits: expected logits that share no memory with others that were changed in place, got some whose "
                "view was changed, or a view of some that were; clone() the view before, or call logits.materialize() "
                "before the view is made"
            )

    def is_inference(self) -> bool:
        """Whether the logits are computed from tensors that were made in inference mode."""
        raise NotImplementedError

    def make_constant(self) -> None:
        """Detach the tensors that the logits are computed from."""
        raise NotImplementedError

    def materialize(self) -> Tensor:
        """The logits as a tensor, differentiable. They are computed once, in the dtype of the logits.

        Whatever is computed from this object later reads that tensor: a divergence, too, which else has float32 logits.
        """
        self.check_unwritten()
        if self.tensor is None:
            # The graph is recorded even if gradients are disabled: the tensor may be used where they are enabled.
            with torch.inference_mode(False), torch.set_grad_enabled(not self.is_inference()):
                self.tensor = self.transformed(self.untransformed())
        return self.tensor

    def transformed(self, logits: Tensor) -> Tensor:
        """The logits after the transform, in the dtype of this object."""
        if self.transform != IDENTITY:
            logits = transformed(logits, self.transform, torch.promote_types(logits.dtype, torch.float32))[0]
        return logits.to(self.dtype)

    def materialize_for(self, name: str) -> Tensor:
        """`materialize`, with a warning that names the operation."""
        if self.tensor is None:
            graph = "" if torch.is_grad_enabled() or not self.requires_grad else ", here without a gradient"
            warnings.warn(
                f"onepass: {name} computes all logits, {tuple(self.shape)}{graph}; logits.materialize() does so "
                "without a warning [OP001]",
                MaterializedLogits,
                stacklevel=stacklevel_outside("onepass.", "torch."),
            )
        return self.materialize()

    # Attributes of a tensor that cost nothing.

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        return self.shape.numel()

    def is_floating_point(self) -> bool:
        return True

    def is_contiguous(self, **_: Any) -> bool:
        return self.is_whole if self.tensor is None else self.tensor.is_contiguous()

    def element_size(self) -> int:
        return self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    # Conversions, which would else read one number at a time. NumPy's are errors if the logits require a gradient, as
    # of a tensor. Those of torch (`torch.tensor`, `torch.as_tensor`) take only values from what is no tensor.

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self.materialize_for("a conversion by NumPy").__array__(*args, **kwargs)

    def __dlpack__(self, **kwargs: Any) -> Any:
        lost = ", whose result has no gradient," if self.requires_grad else ""
        return self.materialize_for(f"a conversion{lost}").detach().__dlpack__(**kwargs)

    def __dlpack_device__(self) -> Any:
        return torch.empty(0, device=self.device).__dlpack_device__()

    # Casts and copies.

    def contiguous(self, **_: Any) -> Any:
        if self.tensor is not None or self.is_whole:
            return self
        return self.changed(is_whole=True)  # a copy, as of a slice of a tensor

    def clone(self, **_: Any) -> Any:
        return self.changed(is_whole=True) if self.tensor is None else self.tensor.clone()

    def float(self) -> Any:
        return self.to(torch.float32)

    def half(self) -> Any:
        return self.to(torch.float16)

    def bfloat16(self) -> Any:
        return self.to(torch.bfloat16)

    def double(self) -> Any:
        return self.to(torch.float64)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """A cast to another dtype changes the dtype of a materialized tensor only; losses compute in float32."""
        others = [*args, kwargs.get("device"), kwargs.get("dtype"), kwargs.get("other")]
        dtypes = [o.dtype if isinstance(o, Tensor) else o for o in others]
        dtype = next((d for d in dtypes if isinstance(d, torch.dtype)), self.dtype)
        devices = [o.device if isinstance(o, Tensor) else o for o in others]
        kinds = str, int, torch.device
        device = next((torch.device(d) for d in devices if type(d) is not bool and isinstance(d, kinds)), self.device)
        copies = kwargs.get("copy", [a for a in args if type(a) is bool][1:] == [True])
        same = device.type == self.device.type and device.index in (None, self.device.index)
        if self.tensor is not None or not same or not dtype.is_floating_point or torch.float64 in (dtype, self.dtype):
            if same and dtype == self.dtype:
                return self.clone() if copies else self
            return self.materialize_for(f"to({dtype}, {device})").to(*args, **kwargs)
        return self.changed(dtype=dtype) if copies or dtype != self.dtype else self

    # The rows.

    def view(self, *shape: Any, **kwargs: Any) -> Any:
        if kwargs or isinstance(shape[0], torch.dtype):
            return self.materialize_for("view").view(*shape, **kwargs)
        return self.reshape(*shape)

    def reshape(self, *shape: Any, **kwargs: Any) -> Any:
        shape = (*shape, *kwargs.values())
        sizes = list(shape[0] if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape)
        whole = all(isinstance(n, int) for n in sizes) and sizes.count(-1) <= 1
        if whole and -1 in sizes:
            rest = math.prod(n for n in sizes if n != -1)
            sizes[sizes.index(-1)] = self.numel() // rest if rest else 0
        if self.tensor is not None or not whole or not sizes or sizes[-1] != self.shape[-1]:
            return self.materialize_for("reshape").reshape(*shape)
        new = self.with_rows(lambda t: t.reshape(*sizes[:-1], t.shape[-1]))
        return self.viewed(new) if self.shares_rows(new) else new

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Any:
        if self.tensor is not None or end_dim % self.dim() == self.dim() - 1 != start_dim % self.dim():
            return self.materialize_for("flatten").flatten(start_dim, end_dim)
        new = self.with_rows(lambda t: t.flatten(start_dim, end_dim))
        return self.viewed(new) if self.shares_rows(new) else new

    def squeeze(self, dim: int | tuple[int, ...] | None = None) -> Any:
        if self.tensor is not None or not isinstance(dim, int) or dim % self.dim() == self.dim() - 1:
            return self.materialize_for("squeeze").squeeze(*([] if dim is None else [dim]))
        return self.viewed(self.with_rows(lambda t: t.squeeze(dim)))

    def unsqueeze(self, dim: int) -> Any:
        if self.tensor is not None or dim % (self.dim() + 1) == self.dim():
            return self.materialize_for("unsqueeze").unsqueeze(dim)
        return self.viewed(self.with_rows(lambda t: t.unsqueeze(dim)))

    def __getitem__(self, key: Any) -> Any:
        parts = [*key] if isinstance(key, tuple) else [key]
        found = None if self.tensor is not None else split_index(parts, self.dim())
        columns = None if found is None else count_of_columns(found[1], self.shape[-1])
        if found is None or columns is None:
            return self.materialize_for("indexing")[key]
        rows = found[0]
        source: TensorLike | None = self
        if columns < self.shape[-1]:
            source = self.with_columns(columns)
        if source is None:
            return self.materialize_for("indexing")[key]
        new = source.with_rows(lambda t: t[rows]) if rows else source
        return new if new is self or not is_view(rows) else self.viewed(new)

    def __iter__(self) -> Iterator[Any]:
        return (self[n] for n in range(len(self)))

    # The transform, and a bias.

    def mul(self, other: Any) -> Any:
        number = _number(other)
        scaled = None if number is None or self.tensor is not None else self.transform.times(number)
        if scaled is None:
            return self.materialize_for("mul") * as_tensor(other)
        return self.changed(transform=scaled)

    def div(self, other: Any, *, rounding_mode: str | None = None) -> Any:
        number = _number(other) if rounding_mode is None else None
        scaled = None
        if number and math.isfinite(1 / number) and self.tensor is None:
            scaled = self.transform.times(1 / number)
        if scaled is None:
            return torch.div(self.materialize_for("div"), as_tensor(other), rounding_mode=rounding_mode)
        return self.changed(transform=scaled)

    def tanh(self) -> Any:
        if self.tensor is not None or self.transform.softcap is not None:
            return self.materialize_for("tanh").tanh()
        inner = self.transform.factors()[0]
        return self.changed(transform=Transform(1.0, 1.0, inner))

    def add(self, other: Any, *, alpha: Any = 1) -> Any:
        if _number(other) == 0 and self.tensor is None:
            return self.changed()
        is_bias = isinstance(other, Tensor) and other.numel() == other.shape[-1:].numel() == self.shape[-1]
        is_bias = is_bias and 0 < other.dim() <= self.dim()
        found = None
        if is_bias and alpha == 1 and self.tensor is None and self.transform == IDENTITY:
            found = self.with_bias(other.reshape(-1))
        return torch.add(self.materialize_for("add"), as_tensor(other), alpha=alpha) if found is None else found

    multiply = __mul__ = __rmul__ = mul
    divide = true_divide = __truediv__ = div
    __add__ = __radd__ = add

    @property
    def data(self) -> Any:
        return self.materialize_for("data").data

    @data.setter
    def data(self, value: Any) -> None:
        self.materialize_for("data").data = as_tensor(value)  # which keeps the graph, as a tensor does
        self.written()

    def become(self, result: Any) -> Any:
        """Take the result of an operation in place, so that other names of this object see it too."""
        if isinstance(result, TensorLike):
            kept = {"writes": self.writes, "seen": self.seen}
            self.__dict__ |= result.__dict__ | kept
        else:
            self.tensor = result
        self.written()
        return self

    def __bool__(self) -> bool:
        return bool(self.materialize_for("bool"))

    def __float__(self) -> Any:
        return float(self.materialize_for("float"))

    def __int__(self) -> Any:
        return int(self.materialize_for("int"))

    def __contains__(self, value: Any) -> bool:
        return value in self.materialize_for("in")

    # Everything else.

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(Tensor, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        found = getattr(self.materialize_for(name), name)
        if not is_in_place(name):
            return found

        def apply(*args: Any, **kwargs: Any) -> Any:
            result = found(*args, **kwargs)
            self.written()
            return result

        return apply

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in TORCH_FUNCTIONS:
            result = TORCH_FUNCTIONS[function](*args, **kwargs)
            if result is not None:
                return result
        name = getattr(function, "__name__", str(function))
        bare = name[2:-2] if name.startswith("__") else name  # "mul_" is another operation
        if bare in ("rmul", "radd"):
            bare = bare[1:]
        if bare in ("mul", "multiply", "add") and len(args) == 2 and not kwargs and not isinstance(args[0], TensorLike):
            args = args[::-1]
        if bare in LAZY and args and isinstance(args[0], TensorLike) and "out" not in kwargs:
            return getattr(args[0], bare)(*args[1:], **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            plain, options = tree_map(lambda a: as_tensor(a, name), (args, kwargs), is_leaf=is_lazy)
            result = function(*plain, **options)
        for changed in (kwargs.get("out"), args[0] if args and is_in_place(name) else None):
            if isinstance(changed, TensorLike):
                changed.written()
        return result


LAZY = frozenset(
    ("contiguous", "clone", "detach", "float", "half", "bfloat16", "double", "to", "view", "reshape", "flatten")
    + ("squeeze", "unsqueeze", "mul", "multiply", "div", "divide", "true_divide", "tanh", "add")
)  # the methods that torch also has as functions


def _number(value: Any) -> float | None:
    """A finite number as a float; None for anything else, and for a tensor that is not a constant on the CPU."""
    if isinstance(value, Tensor):
        if value.dim() or not value.is_cpu or value.requires_grad or type(value) is not Tensor:
            return None
        value = value.item()
    is_number = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if is_number else None
