"""`LinearLogits`: a linear head as a source of logits, which are computed in tiles and never materialized.

Users pass it to any function that takes logits; `losses.linear` passes it to the other losses.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from onepass.core.checks import Adapter, check_bool, check_integer, described
from onepass.core.collectives import GatheredColumns, GatheredRows, Replicated
from onepass.core.dispatch import autocast_dtype, is_untraced, without_autocast
from onepass.core.invariance import is_batch_invariant
from onepass.core.shard import Group, Shard
from onepass.logits.head import HeadTensors, Settings
from onepass.logits.head_arguments import checked_adapter, checked_head
from onepass.logits.invariant_linear import linear
from onepass.logits.partitioned import gathered, rows_of_dtensor
from onepass.logits.tiled_logits import TiledLogits
from onepass.logits.vocab_parallel import agree_on_shard, all_weights, group_of


def _versions(*tensors: Tensor | None) -> tuple[int, ...] | None:
    """How often the tensors were written to; None if that is not known."""
    if torch.compiler.is_compiling() or any(t is not None and t.is_inference() for t in tensors):
        return None
    return tuple([-1 if t is None else t._version for t in tensors])


def first_rows(
    count: int, weight: Tensor, bias: Tensor | None, adapter: Adapter | None
) -> tuple[Tensor, Tensor | None, Adapter | None]:
    """The parameters of the first classes."""
    bias = None if bias is None else bias[:count]
    return weight[:count], bias, None if adapter is None else (adapter[0], adapter[1][:count], adapter[2])


class LinearLogits(TiledLogits):
    """The logits ``hidden @ weight.T + bias``, for any function of onepass that takes logits.

    They are computed in tiles, each with the logits of some rows, and never materialized as a whole. There is one
    exception: in a mean or sum of the cross-entropy of few rows on a GPU, with a weight that requires a gradient, all
    logits are computed at once if they take up to 0.3 GiB, and less time than launching the kernels of tiles would.

    Args:
        hidden: ``(..., H)``, float16, bfloat16, float32 or float64. Hidden states whose rows are not evenly spaced
            (``hidden[:, :-1]``) are copied.
        weight: ``(V, H)``, any strides, with the dtype of ``hidden``. Under autocast it may have any dtype, and the
            GEMMs have the dtype of autocast. A DTensor is gathered once.
        bias: ``(V,)`` or None, with the same rules for its dtype.
        logits_dtype: ``torch.float32`` keeps the result of the GEMMs in float32 if ``hidden`` and ``weight`` are
            bfloat16 or float16. These are not copied; the gradient of the logits is rounded to their dtype once. By
            default, logits that `kl_div` compares with those of a teacher are float32, since rounding would hide the
            difference between nearly equal distributions. All others have the dtype of the GEMMs, as in a linear layer.
        lora: ``(A, B, scaling)`` of a low-rank adapter, which adds ``scaling * (hidden @ A.T) @ B.T`` to the logits, or
            None. A is ``(R, H)`` and B ``(V, R)``, of any floating-point dtype; the GEMMs have the dtype of the head.
            The contribution of the adapter to a tile is rounded to the dtype of the logits before that of the head is
            added. The adapter is never merged into the weight. With ``vocab_group``, B has the rows of this process.
        max_memory: bytes of workspace, beyond inputs, results and gradients. The default follows from shapes alone, so
            that results do not depend on what else is in memory. On a GPU it is 0.65 GiB. If no gradient will be
            computed, it is up to 2.5 GiB if this is enough for all logits. A loss, unlike statistics, with a gradient
            of the weight computes all logits at once if they take at most 2.5 GiB more than a float32 sum of that
            gradient (``4 V H`` bytes, which several tiles need). Otherwise the workspace is this sum and tiles of
            ``6.25 V H`` bytes, from 1.65 to 2 GiB. With ``vocab_group``, tiles have 1.18 GiB.
            ``logits_dtype=torch.float32`` adds up to 0.63 GiB.
        vocab_group: a process group, or a `DeviceMesh` with one dimension, whose processes hold the rows of weight and
            bias: contiguous ranges in the order of their ranks, not necessarily of the same size. ``weight`` and
            ``bias`` are then those of this process (of a DTensor, its local part). All processes pass the same hidden
            states, labels and options, and get the same results. They exchange a few numbers per row in the forward,
            and the gradient of the hidden states.
        vocab_size: the number V of classes, if the weight has more rows: those from V on are padding, which no softmax
            includes, and their gradient is 0. Class weights may be given for all rows. With ``vocab_group``, V is the
            number of classes of all processes.
        sequence_parallel: with ``vocab_group``, whether each process holds an equal part of the hidden states, along
            their first dimension. They are gathered, so that results have all rows, and their gradient is
            reduce-scattered.

    All tensors are differentiable. A gradient that is not needed costs neither time nor memory. The gradient of
    the weight is summed over tiles in float32 and rounded once.

    If only ``hidden`` requires a gradient (a frozen head), log-probs and all losses of log-probs take two GEMMs: the
    forward computes and saves the derivative of each log-prob in float32, and the backward multiplies it by the
    upstream gradient. This holds for one index per row, without ``max_memory`` or a support, not in float16, and
    outside of `torch.compile`. With a ``lora`` whose B is trained, log-probs of a frozen head take three GEMMs, since
    the gradient of B needs the logits in the backward; losses whose gradient is computed in the forward take two.

    The GEMMs exclude rows that are masked or ignored, except in the case of few rows above. For this, the number of
    valid rows is read from the device once per call. This is not possible while a CUDA graph is captured: all rows are
    then included.

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype, shape or device.

    Example::

        logits = onepass.LinearLogits(hidden, lm_head.weight)
        log_probs, entropy = onepass.selective_log_softmax_and_entropy(logits, labels)
    """

    round_before_bias = False  # whether the bias is added to the rounded product, which rounds twice
    exact_weight = False  # see `Settings`

    columns = 0  # of this process, with padding, if there may be some
    sums_hidden = False  # whether the gradient of the hidden states is summed over the processes

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        lora: Adapter | None = None,
        logits_dtype: torch.dtype | None = None,
        max_memory: int | None = None,
        vocab_group: Group | None = None,
        vocab_size: int | None = None,
        sequence_parallel: bool = False,
    ) -> None:
        sequence_parallel = check_bool(sequence_parallel, "sequence_parallel")
        if vocab_group is None and sequence_parallel:
            raise ValueError("vocab_group: expected a process group with sequence_parallel, got None")
        group = None if vocab_group is None else group_of(vocab_group, "vocab_group")
        if group is not None and vocab_size is None:
            vocab_size = rows_of_dtensor(weight, group)
        weight, bias, shape = checked_head(hidden, weight, bias, group)
        self.gemm_dtype = autocast_dtype(hidden) or hidden.dtype
        self.dtype = self.logits_dtype = self.wider(logits_dtype)
        self.widens = logits_dtype is None and self.gemm_dtype.itemsize == 2  # whether divergences take float32 logits
        self.max_memory = None if max_memory is None else check_integer(max_memory, "max_memory", 1)
        vocab = rows = shape[0]
        adapter = checked_adapter(lora, hidden, shape, group)
        if group is not None:
            hidden = self.sharded(hidden, weight, bias, group, vocab_size, sequence_parallel)
            vocab, rows = self.shard.vocab, self.shard.size
            if adapter is not None and sequence_parallel:
                adapter = Replicated.apply(adapter[0], self.shard.group), *adapter[1:]
        elif vocab_size is not None:
            vocab = rows = check_integer(vocab_size, "vocab_size", 1, shape[0])
            self.columns = shape[0]
            if rows < shape[0] and any(hasattr(t, "ds_shape") for t in (weight, bias, *(adapter or ()))):
                raise ValueError("vocab_size: expected parameters that are not partitioned, got those of ZeRO-3")
        if rows < shape[0]:  # else the backward of a slice would copy the gradient
            with torch.enable_grad():  # a gradient may be needed later
                weight, bias, adapter = first_rows(rows, weight, bias, adapter)
        self.hidden, self.weight, self.bias, self.lora = hidden, weight, bias, adapter
        self.shape = torch.Size((*hidden.shape[:-1], vocab))
        self.device = hidden.device
        self.versions = _versions(*self.parts())

    def wider(self, logits_dtype: torch.dtype | None) -> torch.dtype:
        """The dtype of the logits."""
        if logits_dtype is None or logits_dtype == self.gemm_dtype:
            return self.gemm_dtype
        if logits_dtype != torch.float32 or self.gemm_dtype.itemsize > 2:
            expected = "None" if self.gemm_dtype.itemsize > 2 else "torch.float32 or None"
            raise ValueError(
                f"logits_dtype: expected {expected} for GEMMs in {self.gemm_dtype}, got {described(logits_dtype)}"
            )
        return logits_dtype

    def sharded(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, group: Any, vocab_size: int | None,
        sequence_parallel: bool,
    ) -> Tensor:  # fmt: skip
        """Set the columns of this process. Returns all hidden states."""
        vocab_size = None if vocab_size is None else check_integer(vocab_size, "vocab_size")
        if hasattr(hidden, "device_mesh"):
            raise TypeError(
                "hidden: expected a plain tensor with vocab_group, got a DTensor; pass hidden.to_local(), "
                "and sequence_parallel=True if its rows are sharded over vocab_group"
            )
        if hasattr(weight, "ds_shape") or hasattr(bias, "ds_shape"):
            raise ValueError("vocab_group: expected parameters that are not partitioned again, got those of ZeRO-3")
        if sequence_parallel and hidden.dim() < 2:
            raise ValueError(f"hidden: expected shape (n, ..., H) with sequence_parallel, got {tuple(hidden.shape)}")
        options = int(sequence_parallel), self.logits_dtype.itemsize, self.max_memory or -1
        # The tiles, and whether the backward exchanges anything, follow from what requires a gradient.
        about, self.columns = [*hidden.shape, *options, hidden.requires_grad, weight.requires_grad], len(weight)
        of_gemm = self.gemm_dtype, hidden.device
        self.shard = agree_on_shard(about, self.columns, *of_gemm, group, vocab_size, "vocab_group")
        if not all(self.shard.sizes):
            raise ValueError(f"vocab_size: expected a column on every rank, got {list(self.shard.sizes)} columns")
        self.sums_hidden = not sequence_parallel
        return GatheredRows.apply(hidden, self.shard.group) if sequence_parallel else hidden

    def parts(self) -> tuple[Tensor | None, ...]:
        """All tensors that the logits are computed from."""
        return self.hidden, self.weight, self.bias, *(() if self.lora is None else self.lora[:2])

    @property
    def requires_grad(self) -> bool:
        return any(t is not None and t.requires_grad for t in self.parts())

    def is_inference(self) -> bool:
        return any(t is not None and t.is_inference() for t in self.parts())

    @property
    def is_eager(self) -> bool:
        return is_untraced(*self.parts())

    def __repr__(self) -> str:
        state = "not materialized" if self.tensor is None else "materialized"
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, {state})"

    def tensors(self, row_mask: Tensor | None = None) -> HeadTensors:
        """The tensors of the head, with hidden states ``(N, H)``."""
        self.check_unchanged()
        hidden = self.hidden.reshape(-1, self.hidden.shape[-1])
        low, up = self.low_rank(hidden, row_mask)
        if self.sums_hidden and torch.compiler.is_compiling():  # registered operations do not communicate
            hidden, low = self.replicated(hidden, low)
        return HeadTensors(hidden, self.weight, self.bias, low, up)

    def replicated(self, hidden: Tensor, low: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """``hidden`` and ``low``, with gradients that are summed over the processes."""
        group = self.shard.group
        return Replicated.apply(hidden, group), None if low is None else Replicated.apply(low, group)

    def low_rank(self, hidden: Tensor, row_mask: Tensor | None = None) -> tuple[Tensor | None, Tensor | None]:
        """Hidden states in the rank of the adapter, in the dtype of the GEMMs and times the scaling, and its B."""
        if self.lora is None:
            return None, None
        A, B, scaling = self.lora
        with gathered(A), without_autocast(hidden):
            hidden = hidden.to(self.gemm_dtype)
            # The gradient of A sums over all rows, and the product of 0 and what a masked row holds may be NaN.
            if row_mask is not None and A.requires_grad and torch.is_grad_enabled():
                hidden = hidden.where(row_mask.bool().unsqueeze(-1), 0.0)
            return linear(hidden, (A * scaling).to(self.gemm_dtype)), B

    @property
    def settings(self) -> Settings:
        """How the logits are computed."""
        sums_hidden = self.sums_hidden and not torch.compiler.is_compiling()
        return Settings(
            self.gemm_dtype, self.logits_dtype, self.max_memory, self.round_before_bias, self.exact_weight, self.shard,
            sums_hidden, is_batch_invariant(),
        )  # fmt: skip

    def with_rows(self, of: Callable[[Tensor], Tensor]) -> "LinearLogits":
        hidden = of(self.hidden)
        return self.derived(hidden=hidden, shape=torch.Size((*hidden.shape[:-1], self.shape[-1])))

    def shares_rows(self, new: "LinearLogits") -> bool:
        if self.is_whole or torch.compiler.is_compiling():
            return True
        return new.hidden.untyped_storage()._cdata == self.hidden.untyped_storage()._cdata

    def with_columns(self, count: int) -> "LinearLogits | None":
        if hasattr(self.weight, "ds_shape") or self.shard.sizes:  # a parameter of ZeRO-3 is empty outside of the GEMMs
            return None
        weight, bias, lora = first_rows(count, self.weight, self.bias, self.lora)
        return self.derived(weight=weight, bias=bias, lora=lora, shape=torch.Size((*self.shape[:-1], count)))

    def with_bias(self, bias: Tensor) -> "LinearLogits | None":
        if (
            hasattr(self.bias, "ds_shape")
            or self.shard.sizes
            or bias.dtype != self.weight.dtype
            or bias.device != self.device
        ):
            return None
        dtype = torch.promote_types(self.dtype, bias.dtype)  # another one than that of the logits under autocast
        return self.derived(bias=bias if self.bias is None else self.bias + bias, dtype=dtype)

    def detach(self) -> Any:
        """The same logits as constants."""
        if self.tensor is not None:
            return self.tensor.detach()
        new: LinearLogits = self.changed()
        new.make_constant()
        return self.viewed(new)

    def make_constant(self) -> None:
        bias = None if self.bias is None else self.bias.detach()
        lora = None if self.lora is None else (self.lora[0].detach(), self.lora[1].detach(), self.lora[2])
        self.hidden, self.weight, self.bias, self.lora = self.hidden.detach(), self.weight.detach(), bias, lora

    def __getstate__(self) -> dict[str, Any]:
        # The tensors of a copy have versions of their own.
        return {name: value for name, value in self.__dict__.items() if name != "versions"}

    def derived(self, **attributes: Any) -> Any:
        """`changed`, with other tensors."""
        self.check_unchanged()
        new = self.changed(**attributes)
        new.is_whole = self.is_whole and "weight" not in attributes and new.hidden.is_contiguous()
        if "versions" in new.__dict__:
            new.versions = _versions(*new.parts())
        return new

    def check_unchanged(self) -> None:
        """Raise if hidden states, parameters or logits were written to since the logits were made."""
        self.check_unwritten()
        made = self.__dict__.get("versions")
        now = made if made is None else _versions(*self.parts())
        if now is not None and made != now:
            raise RuntimeError(
                "logits: expected hidden states and parameters as they were when the head was called, got some that "
                "were written to since (by an optimizer's step, say); call logits.materialize() before"
            )

    def untransformed(self) -> Tensor:
        """All logits, computed by an ordinary linear layer."""
        logits = self.untransformed_columns()
        return GatheredColumns.apply(logits, self.shard) if self.shard.sizes else logits

    def untransformed_columns(self) -> Tensor:
        """`untransformed`, but only the columns that this process holds."""
        self.check_unchanged()
        hidden, weight, bias = self.hidden, self.weight, self.bias
        low, up = self.low_rank(hidden)
        with gathered(weight, bias, up), without_autocast(hidden):
            if self.shard.sizes and self.sums_hidden:
                hidden, low = self.replicated(hidden, low)
            dtypes = self.gemm_dtype, self.logits_dtype
            parts = [None if t is None else t.to(dtypes[0]).to(dtypes[1]) for t in (hidden, weight, bias, low, up)]
            logits = linear(*parts[:3])  # type: ignore[arg-type]
            return logits if low is None else logits + linear(*parts[3:])  # type: ignore[arg-type]

    def local_columns(self, shard: Shard) -> Tensor:
        if self.tensor is not None or not self.shard.sizes:
            return super().local_columns(shard)
        return self.transformed(self.untransformed_columns())

    def all_class_weights(self, weights: Tensor) -> Tensor:
        if self.shard.sizes:
            return all_weights(weights, self.columns, self.shard)
        return weights[: self.shape[-1]] if weights.shape == (self.columns,) else weights
