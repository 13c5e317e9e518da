"""The softmax operations of `onepass.kernels` in plain PyTorch: statistics, gradients, means and scaling.

Rows are processed in blocks, so that no second ``(rows, V)`` tensor is allocated. Sums have the dtype of the results.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from onepass.core.options import PACKED, Average, FieldGradients, Inputs, Options, Results, Transform, empty_results
from onepass.core.support import of_each_row

BLOCK_ELEMENTS = 1 << 20
OF_SUMS = {"shift", "log_normalizer", "log_probs", "selected", "is_top1"}  # fields that need no other sum of a row
FLOOR = -1e30  # differences are clamped to this before they are multiplied by their exp(): 0·(-inf) is NaN


def row_blocks(*tensors: Tensor, alone: bool = False) -> Iterator[tuple[slice, list[Tensor]]]:
    """Divide tensors of one shape ``(..., V)`` into views ``(n, V)`` of some rows each, of one if each is ``alone``.

    Nothing is copied.
    """
    first, vocab = 0, tensors[0].shape[-1]
    try:
        matrices = [t.view(-1, vocab) for t in tensors]
    except RuntimeError:  # the rows of some tensor are not evenly spaced
        for parts in zip(*tensors):
            for rows, blocks in row_blocks(*parts, alone=alone):
                yield slice(first + rows.start, first + rows.stop), blocks
            first += parts[0][..., 0].numel()
        return
    step = 1 if alone else max(1, BLOCK_ELEMENTS // vocab)
    for first in range(0, matrices[0].shape[0], step):
        blocks = [m[first : first + step] for m in matrices]
        yield slice(first, first + blocks[0].shape[0]), blocks


def transformed(
    x: Tensor, transform: Transform, dtype: torch.dtype, temperature: Tensor | None = None
) -> tuple[Tensor, Tensor | float]:
    """The logits ``(n, V)`` after their transform, and its derivative; ``temperature`` ``(n,)`` is that of each row.

    Without a transform these are the logits themselves, or a copy in another dtype.
    """
    inner, outer = transform.factors()
    z = x.to(dtype)
    z = z if inner == 1.0 else z * inner
    slope: Tensor | float = inner
    if transform.softcap is not None:
        z = z.tanh()
        z, slope = z * outer, (1 - z * z) * (inner * outer)
    if temperature is None:
        return z, slope
    t = temperature.where((temperature > 0) & (temperature < torch.inf), torch.nan).unsqueeze(-1)
    return z / t, slope / t


def softmax_of(z: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """The softmax of ``z`` ``(n, V)``, and the largest of each row of ``z`` and of the softmax, ``(n, 1)``.

    On a CPU, torch's softmax takes less time than `exp` alone. It loses digits in the sum of long rows, which cancel
    where its results are divided by their largest: that is the exponential of a logit relative to the largest logit.
    """
    p = torch.softmax(z, -1, out=out) if out is not None else torch.softmax(z, -1)
    return p, z.amax(-1, keepdim=True), p.amax(-1, keepdim=True)


def temperature_of(temperature: Tensor | None, rows: slice) -> Tensor | None:
    """The temperatures ``(n,)`` of some rows."""
    return None if temperature is None else temperature.reshape(-1)[rows]


def support_of(inputs: Inputs, rows: slice, like: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """``(n, V)``: which classes of some rows are in their support; ``(n,)``: whether an id is that of no class."""
    if inputs.support is None:
        return None, None
    every, starts, lengths = of_each_row(inputs.support, inputs.starts, inputs.lengths)
    starts, lengths = starts[rows].long().clamp(0, len(every)), lengths[rows].long()
    counts = lengths.clamp(min=0).minimum(len(every) - starts)
    n = torch.arange(len(lengths), device=like.device).repeat_interleave(counts)
    place = torch.arange(len(n), device=like.device) - (counts.cumsum(0) - counts)[n] + starts[n]
    ids, V = every[place].long(), like.shape[-1]
    allowed = torch.zeros(like.shape, dtype=torch.bool, device=like.device)
    inside = (ids >= 0) & (ids < V)
    allowed[n[inside], ids[inside]] = True
    outside = torch.zeros(len(lengths), dtype=torch.bool, device=like.device)
    outside[n[ids >= V]] = True
    return allowed | (lengths < 0).unsqueeze(-1), outside


def in_support(inputs: Inputs, index: Tensor) -> Tensor:
    """``(rows, K)``: whether the classes are in the support of their row, which may be counted from any class."""
    found = torch.zeros(index.shape, dtype=torch.bool, device=index.device)
    every, starts, lengths = of_each_row(inputs.support, inputs.starts, inputs.lengths)  # type: ignore[arg-type]
    for row, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist())):
        ids = every[start : start + max(length, 0)]
        found[row] = True if length < 0 else torch.isin(index[row], ids)
    return found


def active_rows(row_mask: Tensor | None) -> Tensor | None:
    """``(rows,)``, bool: False for masked rows. None if there is no mask."""
    return None if row_mask is None else row_mask.reshape(-1).bool()


def weights_of(class_weights: Tensor | None, options: Options, like: Tensor) -> Tensor | float:
    """The class weights, or the weight of every class."""
    return options.class_weight if class_weights is None else class_weights.to(like.dtype)


def out_of_range(index: Tensor, active: Tensor | None, vocab: int) -> Tensor:
    """``(rows, K)``, bool: whether an index of a row that is not masked lies outside the vocabulary."""
    bad = (index < 0) | (index >= vocab)
    return bad if active is None else bad & active.unsqueeze(-1)


def softmax_statistics(logits: Tensor, inputs: Inputs, options: Options) -> Results:
    """The packed statistics and, for every index, its logit (or log-prob) and whether it is the largest of its row."""
    index, row_mask, class_weights, temperature = inputs[:4]
    packed, per_index, is_top1 = results = empty_results(logits, index, options)
    rows = logits.shape[:-1].numel()
    if rows == 0:
        return results
    out = dict(zip(PACKED, packed.view(len(PACKED), rows)))
    active = active_rows(row_mask)
    bad = None
    if index is not None and per_index is not None:
        index = index.reshape(rows, index.numel() // rows)
        per_index = per_index.view(index.shape)
        bad = out_of_range(index, None, logits.shape[-1]).any(-1)
        index = index.clamp(0, logits.shape[-1] - 1).long()
    is_top1 = None if is_top1 is None or per_index is None else is_top1.view(per_index.shape)
    room: Tensor | None = None  # memory for the softmax of a block: that of the first, and no other is larger
    for group, (x,) in row_blocks(logits, alone=options.invariant):
        z, _ = transformed(x, options.transform, packed.dtype, temperature_of(temperature, group))
        allowed, outside = support_of(inputs, group, z)
        z = z if allowed is None else z.masked_fill(~allowed, -torch.inf)
        p, shift, largest = softmax_of(z, room[: len(z)] if room is not None else None)
        room = p if room is None else room
        total = p.sum(-1) / largest[:, 0]
        for none in (None if bad is None else bad[group], outside):
            if none is not None:
                total.masked_fill_(none, float("nan"))
        void = 0 * total  # NaN if the row defines no distribution: a logit is NaN or +inf, or all are -inf
        if index is not None:
            relative = z.gather(-1, index[group]) - shift + void.unsqueeze(-1)
        if not OF_SUMS.issuperset(options.names()):
            z = z - shift if z is x else z.sub_(shift)
        out["shift"][group] = shift[:, 0] + void
        out["log_normalizer"][group] = total.log()
        if options.wants("expected_logit") or options.wants("entropy"):
            expected = p.mul_(z.clamp(min=FLOOR)).sum(-1) / (total * largest[:, 0])
            out["expected_logit"][group] = expected
            out["entropy"][group] = total.log() - expected
        if options.wants("weighted_logit"):
            c = weights_of(class_weights, options, z)
            c = c if allowed is None else allowed * c
            # A class of weight 0 is left out even if its logit is -inf.
            out["weighted_logit"][group] = (
                torch.where(torch.as_tensor(c == 0, device=z.device), 0, c * z).sum(-1) + void
            )
        if options.wants("log_sum_sq_probs") or options.wants("tempered_log_normalizer"):
            tempered = (z * options.sharpness).exp().sum(-1).log() + void
            out["tempered_log_normalizer"][group] = tempered
            out["log_sum_sq_probs"][group] = tempered - 2 * total.log()
        if options.wants("mean_logit"):
            out["mean_logit"][group] = (z / z.shape[-1]).sum(-1) + shift[:, 0] + void
        if index is not None and per_index is not None:
            if is_top1 is not None:
                is_top1[group] = (relative == 0) & (index[group] == z.argmax(-1, keepdim=True))
            per_index[group] = relative - total.log().unsqueeze(-1) if options.wants("log_probs") else relative
    if active is not None:
        packed.view(len(PACKED), rows).masked_fill_(~active, 0.0)
        for field in (per_index, is_top1):
            if field is not None:
                field.masked_fill_(~active.unsqueeze(-1), 0)
    return results


def softmax_gradient(
    logits: Tensor, inputs: Inputs, packed: Tensor, grads: FieldGradients, options: Options, out: Tensor,
    again: bool = False,
) -> None:  # fmt: skip
    """Write the gradient with respect to the logits into ``out``, by the formula in `kernels.softmax_gradient`.

    With ``again``, ``out`` was written for the second number of ``grads.share``, and may be right already.
    """
    index, row_mask, class_weights, temperature = inputs[:4]
    rows = logits.shape[:-1].numel()
    if rows == 0:
        return
    if again and logits.is_cpu and grads.share is not None and grads.selected is not None:
        first = grads.selected.reshape(-1)[:1]  # all are the same
        if bool(first * grads.share[0] == grads.share[1]):
            return
    field = dict(zip(PACKED, packed.view(len(PACKED), rows, 1)))
    a, b, d, h = (packed.new_zeros(rows, 1) if g is None else g.reshape(-1, 1) for g in grads[:4])
    if grads.expected_logit is not None:
        expected = field["expected_logit"]
        a, b = (a + b * expected, -b) if options.wants("entropy") else (a + b * (1 - expected), b)
    idle = (a == 0) & (b == 0) & (d == 0) & (h == 0)
    active = active_rows(row_mask)
    if index is not None and grads.selected is not None:
        index = index.reshape(rows, index.numel() // rows).long()
        outside = (index < 0) | (index >= logits.shape[-1])
        w = grads.selected.reshape(index.shape)
        w = w if grads.share is None else w * grads.share[0]
        if inputs.support is not None:
            w = w.where(in_support(inputs, index), 0.0)
        idle &= (w == 0).all(-1, keepdim=True)
        if options.wants("log_probs"):
            a = a - w.sum(-1, keepdim=True)
        index, w = index.masked_fill(outside, 0), w.masked_fill(outside, 0.0)
    if active is not None:
        idle |= ~active.unsqueeze(-1)
    some_idle = not idle.is_cpu or bool(idle.any())  # to look would synchronize a GPU
    needs_z = grads.expected_logit is not None or grads.tempered_log_normalizer is not None
    for group, (x, g_out) in row_blocks(logits, out, alone=options.invariant):
        z, slope = transformed(x, options.transform, packed.dtype, temperature_of(temperature, group))
        allowed, _ = support_of(inputs, group, z)
        z = z if allowed is None else z.masked_fill(~allowed, -torch.inf)
        shift, log_normalizer = field["shift"][group], field["log_normalizer"][group]
        to = g_out if g_out.dtype == z.dtype and g_out.data_ptr() != x.data_ptr() else None
        p, top, largest = softmax_of(z, to)
        # The logits may be a slice of the vocabulary, and the statistics those of the whole row.
        empty = top == -torch.inf
        factor = (top - shift - log_normalizer).exp() / largest.masked_fill(empty, 1.0)
        if not empty.is_cpu or empty.any():
            p.masked_fill_(empty, 0.0)
        if needs_z:
            z = z - shift if z is x else z.sub_(shift)
        if grads.expected_logit is not None:
            g = p.mul_(factor * (a[group] + b[group] * z.clamp(min=FLOOR)))
        else:
            g = p.mul_(factor * a[group])
        if grads.tempered_log_normalizer is not None:
            tempered = field["tempered_log_normalizer"][group]
            g = g + (z * options.sharpness - tempered).exp_() * (h[group] * options.sharpness)
        if grads.weighted_logit is not None:
            g += weights_of(class_weights, options, z) * d[group]
        if index is not None and grads.selected is not None:
            g.scatter_add_(-1, index[group], w[group])
        if not (isinstance(slope, float) and slope == 1.0):
            g *= slope
        if some_idle or allowed is not None:
            g.masked_fill_(idle[group] if allowed is None else idle[group] | ~allowed, 0.0)
        if g is not g_out:
            g_out.copy_(g)


def supports_early_gradient(logits: Tensor, inputs: Inputs) -> bool:
    """Return False: a host that computes gains nothing from a backward that has less to launch."""
    return False


def supports_fused_loss(logits: Tensor, index: Tensor | None, options: Options) -> bool:
    """Return False: the tiles of a head are too large to stay in a cache between statistics and gradient."""
    return False


def reads_once(logits: Tensor, inputs: Inputs, options: Options) -> bool:
    """Whether one softmax serves statistics and gradient, see `softmax_loss`. On a GPU, the gradient may be in vain."""
    index = inputs.index
    plain = options.fields == "log_probs" and inputs.support is None and options.transform.softcap is None
    return logits.is_cpu and plain and index is not None and index.dim() == logits.dim() - 1 and logits.numel() > 0


def softmax_loss(logits: Tensor, inputs: Inputs, grads: FieldGradients, options: Options, out: Tensor) -> Results:
    """Return the `softmax_statistics` of the logits, and write their `softmax_gradient` to ``out``.

    If `reads_once`, the softmax of a block of rows is computed once, for both, and ``out`` is not the logits.
    """
    if not reads_once(logits, inputs, options) or out is logits:
        results = softmax_statistics(logits, inputs, options)
        softmax_gradient(logits, inputs, results[0], grads, options, out)
        return results
    index, row_mask, _, temperature = inputs[:4]
    packed, log_probs, _ = results = empty_results(logits, index, options)
    rows, vocab = log_probs.numel(), logits.shape[-1]  # type: ignore[union-attr]
    of_row = log_probs.view(rows)  # type: ignore[union-attr]
    numbers = dict(zip(PACKED, packed.view(len(PACKED), rows)))
    upstream = grads.selected.reshape(rows)  # type: ignore[union-attr]
    target = index.reshape(rows, 1).long()  # type: ignore[union-attr]
    active = active_rows(row_mask)
    room: Tensor | None = None
    for group, (x, to) in row_blocks(logits, out, alone=options.invariant):
        z, slope = transformed(x, options.transform, packed.dtype, temperature_of(temperature, group))
        place, w = target[group], upstream[group].unsqueeze(-1)
        outside = (place < 0) | (place >= vocab)
        place = place.masked_fill(outside, 0)
        if to.dtype == z.dtype:
            room = to
        elif room is None or len(room) != len(z):
            room = torch.empty_like(z)
        p, top, largest = softmax_of(z, room)
        total = (p.sum(-1, keepdim=True) / largest).masked_fill_(outside, float("nan"))
        void = 0 * total  # NaN if the row defines no distribution, see `softmax_statistics`
        shift, log_normalizer = top + void, total.log()
        numbers["shift"][group] = shift.squeeze(-1)
        numbers["log_normalizer"][group] = log_normalizer.squeeze(-1)
        of_row[group] = (z.gather(-1, place) - top + void - log_normalizer).squeeze(-1)
        # In the order of `softmax_gradient`, whose result is bitwise the same.
        p.mul_((top - shift - log_normalizer).exp() / largest * -w)
        p.scatter_add_(-1, place, w.masked_fill(outside, 0.0))
        if not (isinstance(slope, float) and slope == 1.0):
            p.mul_(slope)
        idle = w == 0 if active is None else (w == 0) | ~active[group].unsqueeze(-1)
        if bool(idle.any()):
            p.masked_fill_(idle, 0.0)
        if p is not to:
            to.copy_(p)
    if active is not None:
        packed.view(len(PACKED), rows).masked_fill_(~active, 0.0)
        of_row.masked_fill_(~active, 0.0)
    return results


def selected_logits(logits: Tensor, index: Tensor, transform: Transform) -> Tensor:
    """The transformed logits of the classes ``index``, ``(..., K)``, in the dtype of the fields; NaN outside."""
    inside = index.clamp(0, logits.shape[-1] - 1)
    selected = logits.gather(-1, inside.long())
    z, _ = transformed(selected, transform, torch.promote_types(selected.dtype, torch.float32))
    return z.masked_fill(inside != index, float("nan"))


def selected_logits_gradient(logits: Tensor, index: Tensor, grad: Tensor, transform: Transform) -> Tensor:
    """The gradient of the logits, from that of `selected_logits`, rounded once to their dtype."""
    inside = index.clamp(0, logits.shape[-1] - 1).long()
    _, slope = transformed(logits.gather(-1, inside), transform, grad.dtype)
    grad = (grad * slope).masked_fill((grad == 0) | (inside != index), 0.0)  # the logit of such a token may be NaN
    out = torch.empty_like(logits, memory_format=torch.contiguous_format)
    K, V = index.shape[-1], logits.shape[-1]
    flat = out.view(-1, V)
    inside, grad = inside.reshape(len(flat), K), grad.reshape(len(flat), K)
    for group, (part,) in row_blocks(flat):
        part.copy_(torch.zeros_like(part, dtype=grad.dtype).scatter_add_(-1, inside[group], grad[group]))
    return out


def teacher_tokens(
    log_probs: Tensor, ids: Tensor, row_mask: Tensor | None, teacher_mask: Tensor | None, with_probs: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """``(safe ids, given, masked log-probs, probabilities)`` of a teacher's tokens, ``(..., K)`` each."""
    dtype = torch.promote_types(log_probs.dtype, torch.float32)
    same = row_mask is None and teacher_mask is None and log_probs.dtype == dtype
    masked = log_probs if same else log_probs.to(dtype, copy=True, memory_format=torch.contiguous_format)
    if row_mask is not None:
        masked.masked_fill_((row_mask == 0).unsqueeze(-1), -torch.inf)
    if teacher_mask is not None:
        masked.masked_fill_(teacher_mask == 0, -torch.inf)
    probs = masked.exp().contiguous() if with_probs else None
    given = (masked != -torch.inf if probs is None else probs != 0).contiguous()
    return (ids * given).contiguous(), given, None if same else masked, probs


def row_gemm(a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Write ``a @ b + bias``, rounded once, to ``out``. Each row is a product of its own, from memory of its own.

    Else its alignment, and with it the order of the sum, would follow from the rows before it.
    """
    wide = torch.promote_types(a.dtype, torch.float32)
    b, bias = b.to(wide), None if bias is None else bias.to(wide)
    for row, to in zip(a.to(wide), out):
        product = row.clone() @ b
        to.copy_(product if bias is None else product + bias)


def row_share(logits: Tensor, row_mask: Tensor | None, average: Average, guess: Tensor | None = None) -> Tensor:
    """What every row of the logits counts for in an average, and that times ``guess``, ``(2,)``; see `Average`."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    part = torch.full((), average.factor, dtype=dtype, device=logits.device)
    if average.counted:
        part = part / (logits.shape[:-1].numel() if row_mask is None else (row_mask != 0).sum())
    if average.divisor is not None:
        part = part / average.divisor.to(dtype)
    return torch.stack([part, part if guess is None else (part * guess).to(dtype)])


def row_sum(values: Tensor, row_mask: Tensor | None, share: Tensor) -> Tensor:
    """The sum of ``values`` over the rows that are not masked, times the first number of ``share``."""
    return (values if row_mask is None else values.where(row_mask != 0, 0.0)).sum() * share[0]


def scale(x: Tensor, factor: Tensor, out: Tensor) -> None:
    """Write ``factor * x``, rounded once, to ``out``, which may be ``x``."""
    torch.mul(x, factor, out=out)
