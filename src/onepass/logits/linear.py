"""`LinearLogits`: a linear head as a source of logits, which are computed in tiles and never materialized.

Users pass it to any function that takes logits; `losses.linear` passes it to the other losses.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from onepass.core.checks import Adapter, check_integer, described
from onepass.core.collectives import GatheredColumns, GatheredRows, Replicated
from onepass.core.dispatch import autocast_dtype, is_untraced, without_autocast
from onepass.core.invariance import is_batch_invariant
from onepass.core.options import Inputs, Options, PairOptions, PairRows
from onepass.core.shard import NOT_SHARDED, Group, Shard, shared_columns
from onepass.logits.few_rows import few_rows
from onepass.logits.head import HeadTensors, Settings
from onepass.logits.head_arguments import checked_adapter, checked_head
from onepass.logits.invariant_linear import linear
from onepass.logits.observer import Observer, observed
from onepass.logits.partitioned import gathered, rows_of_dtensor
from onepass.logits.row_groups import GroupTooLong
from onepass.logits.row_loss import RowLoss, StatisticsLoss
from onepass.logits.source import Count, Divisor, Fields, LogitsSource, LossFunction, TensorLogits, divided
from onepass.logits.tensor_like import TensorLike
from onepass.logits.tiled_divergence import TeacherDtypes, TeacherTensors, row_divergence, tiled_divergence
from onepass.logits.tiled_loss import tiled_loss
from onepass.logits.tiled_statistics import tiled_statistics
from onepass.logits.vocab_parallel import agreed, all_weights, group_of


def _versions(*tensors: Tensor | None) -> tuple[int, ...] | None:
    """How often the tensors were written to; None if that is not known."""
    if torch.compiler.is_compiling() or any(t is not None and t.is_inference() for t in tensors):
        return None
    return tuple([-1 if t is None else t._version for t in tensors])


class LinearLogits(TensorLike):
    """The logits ``hidden @ weight.T + bias``, for any function of onepass that takes logits.

    They are computed in tiles and never materialized, with one exception: in the cross-entropy (a mean or a sum, of a
    weight that is trained) of few rows on a GPU, logits of up to 0.3 GiB that take less time than the host needs for
    tiles are computed at once.

    Args:
        hidden: ``(..., H)``, float16, bfloat16, float32 or float64. Hidden states whose rows are not evenly spaced
            (``hidden[:, :-1]``) are copied.
        weight: ``(V, H)``, any strides, with the dtype of ``hidden``. Under autocast it may have any dtype, and the
            GEMMs have that of autocast. A DTensor is gathered once.
        bias: ``(V,)`` or None; the same holds for its dtype.
        logits_dtype: ``torch.float32`` keeps the result of the GEMMs in float32 where ``hidden`` and ``weight`` are
            bfloat16 or float16, which are not copied; the gradient of the logits is rounded to their dtype once. By
            default logits that `kl_div` compares with those of a teacher are float32, since rounding would hide the
            difference of near distributions; all others have the dtype of the GEMMs, as those of a linear layer.
        lora: ``(A, B, scaling)`` of a low-rank adapter, which adds ``scaling * (hidden @ A.T) @ B.T`` to the logits, or
            None. A is ``(R, H)`` and B ``(V, R)``, of any floating-point dtype; the GEMMs have that of the head. Its
            part of a tile is rounded to the dtype of the logits before the head's is added. The head is never merged
            with it. With ``vocab_group``, B has the rows of this process.
        max_memory: bytes of workspace, beyond inputs, results and gradients. The default follows from shapes alone, so
            that results do not depend on what else is in memory. On a GPU it is 0.65 GiB. If no gradient will be
            computed, it is up to 2.5 GiB where this holds all logits. A loss per row with a gradient of the weight
            takes all logits at once if they take at most 2.5 GiB more than a float32 sum of that gradient
            (``4 V H`` bytes, which several tiles need); else it takes this sum and tiles of ``8 V H`` bytes, from 1.1
            to 1.9 GiB. With ``vocab_group`` tiles have 1.18 GiB. ``logits_dtype=torch.float32`` adds up to 0.63 GiB.
        vocab_group: a process group, or a `DeviceMesh` with one dimension, whose processes hold the rows of weight and
            bias: contiguous ranges in the order of their ranks, not necessarily of the same size. ``weight`` and
            ``bias`` are then those of this process (of a DTensor, its local part). All processes pass the same hidden
            states, labels and options, and get the same results. They exchange a few numbers per row in the forward,
            and the gradient of the hidden states.
        vocab_size: with ``vocab_group``, V; rows of the weight from V on are padding. By default, all rows are classes.
        sequence_parallel: with ``vocab_group``, whether each process holds an equal part of the hidden states, along
            their first dimension. They are gathered, so that results have all rows, and their gradient is
            reduce-scattered.

    All tensors are differentiable. A gradient that is not needed costs neither time nor memory. The gradient of
    the weight is summed over tiles in float32 and rounded once.

    If only ``hidden`` requires a gradient (a frozen head), log-probs and all losses of log-probs take two GEMMs: the
    forward computes the derivative of each log-prob, which is kept in float32, and the backward multiplies it. This
    holds for one index per row, without ``max_memory`` or a support, not in float16 and outside of `torch.compile`.
    With a ``lora`` whose B is trained, log-probs take three GEMMs of a frozen head, as B's gradient needs the logits
    in the backward; losses whose gradient is computed in the forward take two.

    Rows that are masked or ignored take part in no GEMM, unless they are few, as above. The number of valid rows is
    read from the device once per call. This is not possible while a CUDA graph is captured: then all rows take part.

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype, shape or device.

    Example::

        logits = onepass.LinearLogits(hidden, lm_head.weight)
        log_probs, entropy = onepass.selective_log_softmax_and_entropy(logits, labels)
    """

    observer: Observer | None = None
    round_before_bias = False  # whether the bias is added to the rounded product, which rounds twice
    exact_weight = False  # see `Settings`

    columns = 0  # of this process, with padding, if the vocabulary is sharded
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
        if vocab_group is None and (vocab_size is not None or sequence_parallel):
            raise ValueError("vocab_group: expected a process group with vocab_size or sequence_parallel, got None")
        group = None if vocab_group is None else group_of(vocab_group, "vocab_group")
        if group is not None and vocab_size is None:
            vocab_size = rows_of_dtensor(weight, group)
        weight, bias, shape = checked_head(hidden, weight, bias, group)
        self.gemm_dtype = autocast_dtype(hidden) or hidden.dtype
        self.dtype = self.logits_dtype = self.wider(logits_dtype)
        self.widens = logits_dtype is None and self.gemm_dtype.itemsize == 2  # whether divergences take float32 logits
        self.max_memory = None if max_memory is None else check_integer(max_memory, "max_memory")
        vocab = shape[0]
        adapter = checked_adapter(lora, hidden, shape, group)
        if group is not None:
            hidden, weight, bias = self.sharded(hidden, weight, bias, group, vocab_size, bool(sequence_parallel))
            vocab = self.shard.vocab
            if adapter is not None:
                A, B, scaling = adapter
                A = Replicated.apply(A, self.shard.group) if sequence_parallel else A
                adapter = A, B[: self.shard.size], scaling
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
    ) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
        """Set the columns of this process. Returns all hidden states, and weight and bias without padding."""
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
        about, self.columns = [*hidden.shape, *options], len(weight)
        self.shard = agreed(about, len(weight), self.gemm_dtype, hidden.device, group, vocab_size, "vocab_group")
        if not all(self.shard.sizes):
            raise ValueError(f"vocab_size: expected a column on every rank, got {list(self.shard.sizes)} columns")
        self.sums_hidden = not sequence_parallel
        if self.shard.size < len(weight):  # else a slice would copy the gradient
            weight, bias = weight[: self.shard.size], None if bias is None else bias[: self.shard.size]
        if sequence_parallel:
            hidden = GatheredRows.apply(hidden, self.shard.group)
        return hidden, weight, bias

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
    def dtype_of_divergence(self) -> torch.dtype:
        """The dtype of logits that are compared with others, of which rounding would hide the difference."""
        return torch.float32 if self.widens else self.logits_dtype

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

    def with_columns(self, count: int) -> "LinearLogits | None":
        if hasattr(self.weight, "ds_shape") or self.shard.sizes:  # a parameter of ZeRO-3 is empty outside of the GEMMs
            return None
        bias = None if self.bias is None else self.bias[:count]
        lora = None if self.lora is None else (self.lora[0], self.lora[1][:count], self.lora[2])
        shape = torch.Size((*self.shape[:-1], count))
        return self.derived(weight=self.weight[:count], bias=bias, lora=lora, shape=shape)

    def with_bias(self, bias: Tensor) -> "LinearLogits | None":
        if (
            hasattr(self.bias, "ds_shape")
            or self.shard.sizes
            or bias.dtype != self.weight.dtype
            or bias.device != self.device
        ):
            return None
        return self.derived(bias=bias if self.bias is None else self.bias + bias)

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
        gathered_logits: Tensor = GatheredColumns.apply(logits, self.shard) if self.shard.sizes else logits
        return gathered_logits

    def untransformed_columns(self, row_mask: Tensor | None = None) -> Tensor:
        """`untransformed`, but only the columns that this process holds, and those of zeros for masked rows."""
        self.check_unchanged()
        hidden, weight, bias = self.hidden, self.weight, self.bias
        if row_mask is not None:  # a product with what a masked row holds may be NaN, even if its gradient is 0
            hidden = hidden.where(row_mask.bool().unsqueeze(-1), 0.0)
        low, up = self.low_rank(hidden)
        with gathered(weight, bias, up), without_autocast(hidden):
            if self.shard.sizes and self.sums_hidden:
                hidden, low = self.replicated(hidden, low)
            dtypes = self.gemm_dtype, self.logits_dtype
            parts = [None if t is None else t.to(dtypes[0]).to(dtypes[1]) for t in (hidden, weight, bias, low, up)]
            logits = linear(*parts[:3])  # type: ignore[arg-type]
            return logits if low is None else logits + linear(*parts[3:])  # type: ignore[arg-type]

    def transformed_by(self, options: Options) -> "Options | None":
        """The options of a loss, after the transform of these logits; None if their composition is no transform."""
        transform = self.transform.then(options.transform)
        return None if self.tensor is not None or transform is None else options._replace(transform=transform)

    def statistics(self, inputs: Inputs, options: Options) -> Fields:
        """See `LogitsSource.statistics`. This takes four GEMMs, forward and backward."""
        composed = self.transformed_by(options)
        if composed is None:
            return super().statistics(inputs, options)
        inputs = self.flat(inputs)
        fields = tiled_statistics(self.tensors(inputs.row_mask), inputs, self.settings, composed)
        rows = self.shape[:-1]
        return {name: f.reshape((*rows, *f.shape[1:])) for name, f in zip(options.names(), fields)}

    def loss(
        self,
        loss_fn: LossFunction | None,
        inputs: Inputs,
        options: Options,
        row_inputs: Sequence[Tensor],
        divisor: Divisor,
        linear: bool = False,
        groups: Sequence[int] | None = None,
    ) -> Tensor:
        """See `LogitsSource.loss`. This takes three GEMMs, or four with ``divisor=None`` and if the call is traced.

        With ``groups``, how many of the rows ``(N,)`` that are not masked belong to each, ``loss_fn`` computes the loss
        of every group; it gets the slice ``groups`` of those that it is called for, or none for all. If a tile does not
        hold one of them, this takes four GEMMs.
        """
        composed = self.transformed_by(options)
        if composed is None:
            logits = TensorLogits(self.materialize())
            return logits.loss(loss_fn, inputs, options, row_inputs, divisor, linear)
        # A Python function cannot be part of a registered operation. The loss of every group takes four GEMMs anyhow.
        if not self.is_eager or (groups is not None and divisor is None):
            return super().loss(loss_fn, inputs, options, row_inputs, divisor)
        small = few_rows(self, inputs) if loss_fn is None and divisor is not None else None
        if small is not None:
            return small.loss(loss_fn, inputs, composed, row_inputs, divisor, linear)
        given, asked, options = inputs, options, composed
        inputs = self.flat(inputs)
        index, row_mask = inputs[:2]
        rows = self.shape[:-1]
        flat = [i.reshape(rows.numel(), *i.shape[len(rows) :]) for i in row_inputs]
        if self.observer is not None and index is not None and index.dim() == 1:
            field = options.fields
            loss_fn, linear = loss_fn or (lambda fields: fields[field]), False
            loss_fn = observed(loss_fn, self.observer, options.names())
            options = options._replace(fields=" ".join(dict.fromkeys((*options.names(), "entropy", "is_top1"))))
            self.observer.begin(rows.numel() if row_mask is None else row_mask.bool().sum())
        row_loss = StatisticsLoss(
            loss_fn, options, self.gemm_dtype, inputs._replace(row_mask=None), flat, linear, groups
        )
        try:
            return self.tiled(row_loss, row_mask, divisor)
        except GroupTooLong:
            return super().loss(loss_fn, given, asked, row_inputs, divisor)

    def divergence(self, teacher: LogitsSource, read: PairRows, options: PairOptions, divisor: Divisor) -> Tensor:
        """See `LogitsSource.divergence`. The teacher is a constant, and may be a linear head too."""
        of_student = self.transform.then(options.student)
        shard = shared_columns(self.shard, teacher.shard, options.columns)
        is_tiled = not (self.shard.sizes or teacher.shard.sizes)
        if shard is not None:
            is_tiled = bool(self.shard.sizes) and self.is_eager
        if self.tensor is not None or of_student is None or not is_tiled:
            return super().divergence(teacher, read, options, divisor)
        if torch.is_grad_enabled() and teacher.requires_grad:
            raise ValueError(
                "teacher_logits: expected logits that require no gradient, as the student is a linear head; detach them"
            )
        options = options._replace(student=of_student)
        settings = self.settings._replace(logits_dtype=self.dtype_of_divergence)
        if shard is not None:
            options = options._replace(columns=shard.size)
        read = PairRows(*[None if t is None else t.reshape(-1) for t in read])
        head = teacher if isinstance(teacher, LinearLogits) and teacher.tensor is None else None
        of_head = None if head is None or head.shard != self.shard else head.transform.then(options.teacher)
        if head is not None and of_head is not None:
            options = options._replace(teacher=of_head)
            of = TeacherDtypes(head.gemm_dtype, head.dtype_of_divergence)
            of_teacher = TeacherTensors(*head.tensors())
        else:
            logits = (teacher.materialize() if shard is None else teacher.local_columns(shard)).detach()
            logits = logits.reshape(self.shape[:-1].numel(), logits.shape[-1])
            of = TeacherDtypes(teacher.dtype, teacher.dtype)
            of_teacher = TeacherTensors(logits if logits.stride(-1) == 1 else logits.contiguous())
        if self.is_eager:
            row_loss = row_divergence(self.gemm_dtype, of_teacher, of, read, options, self.shard, shard or NOT_SHARDED)
            return self.tiled(row_loss, read.row_mask, divisor, settings)
        read = read._replace(row_mask=None if read.row_mask is None else read.row_mask.bool())
        # Dynamo refuses a weight that student and teacher share.
        of_teacher = TeacherTensors(*[None if t is None else t.detach() for t in of_teacher])  # type: ignore[arg-type]
        loss = tiled_divergence(self.tensors(read.row_mask), of_teacher, read, of, settings, options)
        return divided(loss.reshape(self.shape[:-1]), divisor, self.dim() - 1)

    def local_columns(self, shard: Shard) -> Tensor:
        if self.tensor is not None or not self.shard.sizes:
            return super().local_columns(shard)
        return self.transformed(self.untransformed_columns())

    def flat(self, inputs: Inputs) -> Inputs:
        """The inputs with all rows in one dimension; index and class weights are those of this process's columns."""
        rows = self.shape[:-1]
        if len(rows) != 1:
            inputs = inputs.rows(lambda t: t.reshape(rows.numel(), *t.shape[len(rows) :]))
        return inputs.columns(self.shard.first, self.shard.first + self.shard.size) if self.shard.sizes else inputs

    def all_class_weights(self, weights: Tensor) -> Tensor:
        return all_weights(weights, self.columns, self.shard) if self.shard.sizes else weights

    def tiled(
        self, row_loss: RowLoss, row_mask: Tensor | None, divisor: Divisor, settings: Settings | None = None
    ) -> Tensor:
        """`tiled_loss` of all rows; without a divisor, it has the shape of the rows."""
        row_mask = None if row_mask is None else row_mask.bool()

        @cache
        def number() -> Tensor:
            found = divisor.number() if isinstance(divisor, Count) else divisor
            if isinstance(found, Tensor):
                return found.detach().reshape(()).to(self.device, row_loss.dtype)
            # Filled on the device: a copy from the host would synchronize.
            return torch.full((), found, dtype=row_loss.dtype, device=self.device)  # type: ignore[arg-type]

        of_sum = None if divisor is None else number
        loss = tiled_loss(self.tensors(row_mask), row_mask, row_loss, of_sum, settings or self.settings)
        return loss.reshape(self.shape[:-1]) if divisor is None else loss
