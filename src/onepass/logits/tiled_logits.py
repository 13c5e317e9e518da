"""`TiledLogits`: the statistics and the losses of the logits of a linear head, which are computed in tiles.

Its subclass `LinearLogits` has the tensors of the head.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo  # torch.compiler.disable imports Dynamo, and Triton, at once

from onepass.core.dispatch import refuse_forward_mode
from onepass.core.options import Inputs, Options, PairOptions, PairRows
from onepass.core.shard import NOT_SHARDED, shared_columns
from onepass.logits.head import HeadTensors, Settings
from onepass.logits.observer import Observer, observed
from onepass.logits.row_groups import GroupTooLong
from onepass.logits.row_loss import RowLoss, StatisticsLoss
from onepass.logits.small_head import small_logits, small_logits_of
from onepass.logits.source import Count, Divisor, Fields, LogitsSource, LossFunction, TensorLogits, over_divisor
from onepass.logits.tensor_like import TensorLike
from onepass.logits.tiled_divergence import TeacherDtypes, TeacherTensors, row_divergence, tiled_divergence
from onepass.logits.tiled_loss import tiled_loss
from onepass.logits.tiled_statistics import tiled_statistics


class TiledLogits(TensorLike):
    """Logits of a linear head, of which one tile at a time is in memory.

    Attributes:
        gemm_dtype, logits_dtype: of the operands of the GEMMs, and of their results.
        widens: whether divergences take float32 logits.
        observer: is shown the fields of all rows of a loss.
    """

    gemm_dtype: torch.dtype
    logits_dtype: torch.dtype
    widens: bool
    observer: Observer | None = None

    def tensors(self, row_mask: Tensor | None = None) -> HeadTensors:
        """The tensors of the head, with hidden states ``(N, H)``."""
        raise NotImplementedError

    @property
    def settings(self) -> Settings:
        """How the logits are computed."""
        raise NotImplementedError

    @property
    def dtype_of_divergence(self) -> torch.dtype:
        """The dtype of logits that are compared with others, of which rounding would hide the difference."""
        return torch.float32 if self.widens else self.logits_dtype

    @property
    def divides_late(self) -> bool:
        return self.gemm_dtype == torch.float16

    def transformed_by(self, options: Options) -> Options | None:
        """The options of a loss, after the transform of these logits; None if their composition is no transform."""
        transform = self.transform.then(options.transform)
        return None if self.tensor is not None or transform is None else options._replace(transform=transform)

    def statistics(self, inputs: Inputs, options: Options) -> Fields:
        """See `LogitsSource.statistics`. This takes four GEMMs, forward and backward."""
        composed = self.transformed_by(options)
        if composed is None:
            return super().statistics(inputs, options)
        inputs = self.flat(inputs)
        if inputs.row_mask is not None:
            inputs = inputs._replace(row_mask=inputs.row_mask.bool())  # torch finds no nonzero unsigned integers
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
        shown: Sequence[str] = (),
    ) -> Tensor:
        """See `LogitsSource.loss`. This takes three GEMMs, or four with ``divisor=None`` and if the call is traced.

        The fields that are ``shown`` have no gradient. With ``groups``, how many of the rows ``(N,)`` that are not
        masked belong to each, ``loss_fn`` computes the loss of every group; it gets the slice ``groups`` of those that
        it is called for, or none for all. If a tile does not hold one of them, this takes four GEMMs.
        """
        composed = self.transformed_by(options)
        if composed is None:
            logits = TensorLogits(self.materialize())
            return logits.loss(loss_fn, inputs, options, row_inputs, divisor, linear)
        if self.observer is not None and torch.compiler.is_compiling():
            return _untraced_loss(self, loss_fn, inputs, options, row_inputs, divisor, linear, groups, shown)
        # A Python function cannot be part of a registered operation. The loss of every group takes four GEMMs anyhow.
        if not self.is_eager or (groups is not None and divisor is None):
            return super().loss(loss_fn, inputs, options, row_inputs, divisor)
        small = small_logits(self, inputs.row_mask, 0, *inputs) if loss_fn is None and divisor is not None else None
        if small is not None:
            return TensorLogits(small).loss(loss_fn, inputs, composed, row_inputs, divisor, linear)
        given, asked, options = inputs, options, composed
        inputs = self.flat(inputs)
        index, row_mask = inputs[:2]
        rows = self.shape[:-1]
        flat = [i.reshape(math.prod(rows), *i.shape[len(rows) :]) for i in row_inputs]
        if self.observer is not None and index is not None and index.dim() == 1:
            field = options.fields
            loss_fn, linear = loss_fn or (lambda fields: fields[field]), False
            loss_fn = observed(loss_fn, self.observer, options.names())
            of_observer = tuple(n for n in ("entropy", "is_top1") if not options.wants(n))
            options = options._replace(fields=" ".join((*options.names(), *of_observer)))
            shown = (*shown, *of_observer)
            self.observer.begin(math.prod(rows) if row_mask is None else row_mask.bool().sum())
        row_loss = StatisticsLoss(
            loss_fn, options, self.gemm_dtype, inputs._replace(row_mask=None), flat, linear, groups, shown
        )
        try:
            return self.tiled(row_loss, row_mask, divisor)
        except GroupTooLong:
            return super().loss(loss_fn, given, asked, row_inputs, divisor)

    def at_once(self, index: Tensor, masked: int) -> Tensor | None:
        """See `LogitsSource.at_once`."""
        return small_logits_of(self, index, masked)

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
        read = read.rows(lambda t: t.reshape(-1))
        head = teacher if isinstance(teacher, TiledLogits) and teacher.tensor is None else None
        of_head = None if head is None or head.shard != self.shard else head.transform.then(options.teacher)
        if head is not None and of_head is not None:
            options = options._replace(teacher=of_head)
            of = TeacherDtypes(head.gemm_dtype, head.dtype_of_divergence)
            of_teacher = TeacherTensors(*head.tensors())
        else:
            logits = teacher.materialize() if shard is None else teacher.local_columns(shard)
            refuse_forward_mode(logits)
            logits = logits.detach()
            logits = logits.reshape(math.prod(self.shape[:-1]), logits.shape[-1])
            of = TeacherDtypes(teacher.dtype, teacher.dtype)
            of_teacher = TeacherTensors(logits if logits.stride(-1) == 1 else logits.contiguous())
        if self.is_eager:
            row_loss = row_divergence(self.gemm_dtype, of_teacher, of, read, options, self.shard, shard or NOT_SHARDED)
            return self.tiled(row_loss, read.row_mask, divisor, settings)
        read = read._replace(row_mask=None if read.row_mask is None else read.row_mask.bool())
        # Dynamo refuses a weight that student and teacher share.
        refuse_forward_mode(*of_teacher)
        of_teacher = TeacherTensors(*[None if t is None else t.detach() for t in of_teacher])  # type: ignore[arg-type]
        loss = tiled_divergence(self.tensors(read.row_mask), of_teacher, read, of, settings, options)
        return over_divisor(loss.reshape(self.shape[:-1]), divisor, self.dim() - 1)

    def flat(self, inputs: Inputs) -> Inputs:
        """The inputs with all rows in one dimension; index and class weights are those of this process's columns."""
        rows = self.shape[:-1]
        if len(rows) != 1:
            inputs = inputs.rows(lambda t: t.reshape(math.prod(rows), *t.shape[len(rows) :]))
        return inputs.columns(self.shard.first, self.shard.first + self.shard.size) if self.shard.sizes else inputs

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


@_disable_dynamo
def _untraced_loss(logits: TiledLogits, *arguments: Any) -> Tensor:
    """`TiledLogits.loss` outside of a compiled graph, for an observer, which keeps tensors in a Python object."""
    return logits.loss(*arguments)
