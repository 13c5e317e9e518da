"""The loss of a row of logits, on a tile of rows: its value and, in place, the gradient of the tile."""

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, Protocol

import torch
from torch import Tensor

from onepass.checks import described
from onepass.dispatch import path_of
from onepass.head.tiles import INDEX, ROW, Rows
from onepass.options import NOT_DIFFERENTIABLE, PAIR_NUMBERS, Options, PairOptions, pick
from onepass.statistics import DEBUG, upstream_of

# Hidden states ``(N, H)``, weight, bias and the dtype of their products; or logits ``(N, V)``, None and None.
Source = tuple[tuple[Any, Any, Any], torch.dtype]
Found = tuple[Tensor, Sequence[Tensor | None]]


class RowLoss(Protocol):
    """
    Attributes:
        dtype: of the losses.
        heads: what makes the logits that it takes besides the first ones.
        row_bytes: of its own work on a row.
        inputs: differentiable tensors of the rows.
        tensors: all that it reads, those of ``heads`` and the ``inputs`` among them, for autograd to save.
    """

    dtype: torch.dtype
    heads: Sequence[Source]
    row_bytes: int
    inputs: Sequence[Tensor]

    @property
    def tensors(self) -> Sequence[Tensor | None]: ...

    def holding(self, tensors: Sequence[Tensor | None]) -> "RowLoss":
        """The same loss of other ``tensors``."""

    def __call__(self, logits: Sequence[Tensor], rows: Rows, row_mask: Tensor | None, scale: Tensor | None) -> Found:
        """The loss of ``rows``, ``(n,)``. With ``scale``, one number or one a row, also the gradients of
        ``Σ scale·loss``: that of the first logits is written over them, those of the loss's own inputs are returned.
        """


class StatisticsLoss:
    """``loss_fn(fields, *inputs)`` of the row vectors that a read leaves behind, differentiated by autograd.

    ``linear`` says that it is in the fields: then its gradient is known before the tile is read, which is read once.
    """

    heads: Sequence[Source] = ()

    def __init__(
        self,
        loss_fn: Callable[..., Tensor],
        options: Options,
        dtype: torch.dtype,
        index: Tensor | None,
        class_weights: Tensor | None = None,
        inputs: Sequence[Tensor] = (),
        linear: bool = False,
    ) -> None:
        self.loss_fn, self.options, self.index, self.linear = loss_fn, options, index, linear
        self.class_weights, self.inputs = class_weights, inputs
        self.dtype = torch.promote_types(dtype, torch.float32)
        numbers = sum(i[:1].numel() for i in inputs) + (index[:1].numel() if index is not None else 1)
        self.row_bytes = ROW + INDEX * numbers
        self.checked = not torch.is_grad_enabled()

    @property
    def tensors(self) -> Sequence[Tensor | None]:
        return [self.index, self.class_weights, *self.inputs]

    def holding(self, tensors: Sequence[Tensor | None]) -> "StatisticsLoss":
        other = copy(self)
        other.index, other.class_weights, *other.inputs = tensors  # type: ignore[assignment]
        return other

    def __call__(self, logits: Sequence[Tensor], rows: Rows, row_mask: Tensor | None, scale: Tensor | None) -> Found:
        x = logits[0]
        path, options = path_of(x), self.options
        index = None if self.index is None else rows.take(self.index)
        given = x, index, row_mask, self.class_weights
        inputs = [rows.take(i).detach() for i in self.inputs]
        in_one = scale is not None and self.linear and path.takes_in_one(x, index, options)
        if in_one:
            kept = x.new_ones(rows.n, dtype=self.dtype) if row_mask is None else row_mask.to(self.dtype)
            anywhere = {n: kept if n == "kept" else torch.zeros_like(kept) for n in options.names}
            _, upstream, _ = self.differentiated(anywhere, inputs, rows.n, row_mask, scale)
            results = path.softmax_loss(*given, upstream, options)
        else:
            results = path.softmax_statistics(*given, options)
        fields = dict(zip(options.names, pick(results, options)))
        if in_one or (scale is None and self.checked):
            with torch.no_grad():
                return self.rows(fields, inputs, rows.n, row_mask), ()
        if scale is None:
            return self.differentiated(fields, inputs, rows.n, row_mask, None)[0], ()
        loss, upstream, of_inputs = self.differentiated(fields, inputs, rows.n, row_mask, scale)
        path.softmax_gradient(*given, results[0], *upstream, options, x)
        return loss, of_inputs

    def differentiated(
        self,
        fields: dict[str, Tensor],
        inputs: Sequence[Tensor],
        count: int,
        row_mask: Tensor | None,
        scale: Any,
    ) -> tuple[Tensor, Sequence[Tensor | None], Sequence[Tensor | None]]:
        """The losses and, with ``scale``, the gradients of ``Σ scale·loss`` with respect to fields and inputs."""
        leaves = [n for n in fields if n not in NOT_DIFFERENTIABLE]
        fields |= {name: fields[name].detach().requires_grad_() for name in leaves}
        for part, whole in zip(inputs, self.inputs):
            part.requires_grad_(whole.requires_grad)
        variables = [fields[n] for n in leaves] + [i for i in inputs if i.requires_grad]
        watched = [t for t in (*fields.values(), *inputs) if not t.is_inference()]
        versions = [t._version for t in watched]
        with torch.enable_grad():
            loss = self.rows(fields, inputs, count, row_mask)
        if versions != [t._version for t in watched]:
            raise ValueError("loss_fn: expected a function that writes to none of its arguments, got one that does")
        grads: Sequence[Tensor | None] = [None] * len(variables)
        if loss.requires_grad:
            self.check(loss, variables)
            if scale is not None:
                grads = torch.autograd.grad(loss, variables, scale.expand_as(loss), allow_unused=True)
        rest = iter(grads[len(leaves) :])
        of_inputs = [next(rest) if i.requires_grad else None for i in inputs]
        return loss.detach(), upstream_of(dict(zip(leaves, grads))), of_inputs

    def rows(self, fields: dict[str, Tensor], inputs: Sequence[Tensor], count: int, row_mask: Tensor | None) -> Tensor:
        loss: Any = self.loss_fn(fields, *inputs)
        if not isinstance(loss, Tensor) or loss.shape != (count,) or not loss.is_floating_point():
            raise ValueError(f"loss_fn: expected a loss of every row, floating-point of shape ({count},), "
                             f"got {described(loss)}")  # fmt: skip
        return loss if row_mask is None else loss.masked_fill(~row_mask, 0.0)

    def check(self, loss: Tensor, variables: Sequence[Tensor]) -> None:
        """Of the first tile: nothing may be differentiated that is not an argument, nor any row depend on another."""
        if self.checked:
            return
        self.checked = True
        known = {id(v) for v in variables}
        nodes, seen = [loss.grad_fn], set()
        while nodes:
            node = nodes.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            leaf = getattr(node, "variable", None)
            if leaf is not None and id(leaf) not in known:
                raise ValueError(
                    "loss_fn: expected tensors that require a gradient among row_inputs, "
                    f"got one of shape {tuple(leaf.shape)} that the function closes over"
                )
            nodes += [following for following, _ in node.next_functions]
        if (DEBUG or loss.is_cpu) and len(loss) > 1:
            first = torch.zeros_like(loss).index_fill_(0, torch.zeros(1, dtype=torch.long, device=loss.device), 1.0)
            found = torch.autograd.grad(loss, variables, first, retain_graph=True, allow_unused=True)
            # A NaN tells of no coupling: it may be 0 times an infinite slope of another row.
            if any(g is not None and ((g[1:] != 0) & ~g[1:].isnan()).any() for g in found):
                raise ValueError(
                    "loss_fn: expected a loss of each row alone, got one whose first row depends on others; "
                    "take linear_softmax_statistics for losses that couple rows"
                )


class DivergenceLoss:
    """The divergence of rows of logits and a teacher's: logits that are there, or a head of its own."""

    heads: Sequence[Source] = ()
    inputs: Sequence[Tensor] = ()

    def __init__(self, dtype: torch.dtype, teacher: Source, options: PairOptions, vocab: int) -> None:
        (logits, weight, _), teacher_dtype = teacher
        self.options, self.vocab = options, vocab
        self.dtype = torch.promote_types(torch.promote_types(dtype, teacher_dtype), torch.float32)
        self.row_bytes = ROW
        self.teacher: Tensor | None = None
        if weight is None:
            self.teacher = logits
            self.row_bytes += logits.shape[-1] * logits.element_size()  # where rows are left out
        else:
            self.heads = (teacher,)

    @property
    def tensors(self) -> Sequence[Tensor | None]:
        return [self.teacher] if not self.heads else self.heads[0][0]

    def holding(self, tensors: Sequence[Tensor | None]) -> "DivergenceLoss":
        other = copy(self)
        if self.heads:
            other.heads = ((tuple(tensors), self.heads[0][1]),)  # type: ignore[assignment]
        else:
            (other.teacher,) = tensors
        return other

    def __call__(self, logits: Sequence[Tensor], rows: Rows, row_mask: Tensor | None, scale: Tensor | None) -> Found:
        x = logits[0]
        teacher = logits[1] if self.teacher is None else rows.take(self.teacher)
        student, teacher = x[:, : self.vocab], teacher[:, : self.vocab]
        path = path_of(student, teacher)
        packed = path.divergence(student, teacher, row_mask, self.options)
        if scale is not None:
            grad = scale.expand(rows.n)
            path.divergence_gradient(student, teacher, row_mask, packed, grad, False, self.options, student)
            x[:, self.vocab :] = 0
        return packed[PAIR_NUMBERS.index("divergence")], ()
