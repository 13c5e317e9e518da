"""The softmax operations of `onepass.kernels` in plain PyTorch: statistics, gradients and scaling.

Rows are processed in blocks, so that no second ``(rows, V)`` tensor is allocated. Sums have the dtype of the results.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from onepass.core.options import PACKED, FieldGradients, Inputs, Options, Results, Transform, empty_results
from onepass.core.support import entries, of_each_row

BLOCK_ELEMENTS = 1 << 20
IN_CACHE = 1 << 18  # of one thread, in whose cache a block stays. Several wait for each other after every operation.
OF_SUMS = {"shift", "log_normalizer", "log_probs", "selected", "is_top1"}  # fields that need no other sum of a row
FLOOR = -1e18  # differences are clamped to this before they are multiplied by their exp(): 0·(-inf) is NaN


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
    elements = IN_CACHE if torch.get_num_threads() == 1 else BLOCK_ELEMENTS
    step = 1 if alone else max(1, elements // vocab)
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
        slope = slope_of_tanh(z) * (inner * outer)
        z = z.tanh() * outer
    if temperature is None:
        return z, slope
    t = temperature.where((temperature > 0) & (temperature < torch.inf), torch.nan).unsqueeze(-1)
    return z / t, slope / t


def slope_of_tanh(z: Tensor) -> Tensor:
    """The derivative of tanh, which is ``1 - tanh(z)**2`` without the cancellation where that is next to 1."""
    e = z.abs().mul_(-2).exp_()
    square = (e + 1).square_()
    return e.mul_(4).div_(square)


def less(z: Tensor, shift: Tensor, x: Tensor, room: Tensor | None) -> Tensor:
    """``z - shift``, in ``room`` if there is one. Else ``z`` is overwritten, unless it is ``x``, the logits."""
    if room is not None:
        return torch.sub(z, shift, out=room)
    return z - shift if z is x else z.sub_(shift)


def softmax(z: Tensor, x: Tensor, room: Tensor | None) -> Tensor:
    """The softmax of ``z``, in ``room`` if there is one. Else ``z`` is overwritten, unless it is ``x``, the logits.

    This takes torch less time than exponentials alone. The results add up to 1 only roughly, since torch divides them
    by a sum of many numbers, one after the other. Whatever it divides by, the sum of ``exp(z - max(z))`` is that of the
    results, divided by the largest of them.
    """
    room = room if room is not None or z is x else z
    return torch.softmax(z, -1) if room is None else torch.softmax(z, -1, out=room)


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
    (n, ids), V = entries(every, starts, counts), like.shape[-1]
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


def active_rows(row_mask: Tensor | None, masked: int = 0) -> Tensor | None:
    """``(rows,)``, bool: False for masked rows. None if there is no mask or, on a CPU, no masked row."""
    active = None if row_mask is None else row_mask.reshape(-1) != masked
    return None if active is None or (active.is_cpu and active.all()) else active


def weights_of(class_weights: Tensor | None, options: Options, like: Tensor) -> Tensor | float:
    """The class weights, or the weight of every class."""
    return options.class_weight if class_weights is None else class_weights.to(like.dtype)


def is_in_range(index: Tensor, vocab: int) -> bool:
    """Whether all indices lie in the vocabulary. False where to look would synchronize a GPU."""
    if not index.is_cpu or not index.numel():
        return index.is_cpu
    low, high = index.aminmax()
    return int(low) >= 0 and int(high) < vocab


def out_of_range(index: Tensor, active: Tensor | None, vocab: int) -> Tensor:
    """``(rows, K)``, bool: whether an index of a row that is not masked lies outside the vocabulary."""
    bad = (index < 0) | (index >= vocab)
    return bad if active is None else bad & active.unsqueeze(-1)


def idle_rows(idle: Tensor, active: Tensor | None) -> Tensor | None:
    """``(rows, 1)``: which rows have a gradient of 0, whatever their logits are. None if there are none, on a CPU."""
    idle = idle if active is None else idle | ~active.unsqueeze(-1)
    return None if idle.is_cpu and not idle.any() else idle


def softmax_statistics(logits: Tensor, inputs: Inputs, options: Options) -> Results:
    """The packed statistics and, for every index, its logit (or log-prob) and whether it is the largest of its row."""
    return read_rows(logits, inputs, options)


def read_rows(
    logits: Tensor, inputs: Inputs, options: Options, upstream: Tensor | None = None, out: Tensor | None = None
) -> Results:
    """The `softmax_statistics`.

    If the log-probs are the only field, their gradients ``upstream`` may be given: the `softmax_gradient` is then
    written to ``out``, which may be the logits, while a block of rows is in the cache.
    """
    index, row_mask, class_weights, temperature = inputs[:4]
    packed, per_index, is_top1 = results = empty_results(logits, index, options)
    rows, vocab = logits.shape[:-1].numel(), logits.shape[-1]
    if rows == 0:
        return results
    field = dict(zip(PACKED, packed.view(len(PACKED), rows, 1)))
    shift, total = field["shift"], field["log_normalizer"]
    active, bad = active_rows(row_mask, options.masked), None
    if index is not None and per_index is not None:
        index = index.reshape(rows, index.numel() // rows)
        per_index = per_index.view(index.shape)
        is_top1 = None if is_top1 is None else is_top1.view(index.shape)
        if not is_in_range(index, vocab):
            outside = out_of_range(index, None, vocab)
            index, bad = index.masked_fill(outside, 0), outside.any(-1, keepdim=True)
        index = index.long()
    w: Tensor | None = None
    if upstream is not None and index is not None:
        w = of_rows(upstream, index)
        idle, minus = idle_rows((w == 0).all(-1, keepdim=True), active), -w.sum(-1, keepdim=True)
    of_sums = OF_SUMS.issuperset(options.names())
    room: Tensor | None = None  # memory of a block: that of the first, and no other is larger
    for group, (x, *rest) in row_blocks(*((logits,) if out is None else (logits, out)), alone=options.invariant):
        z, slope = transformed(x, options.transform, packed.dtype, temperature_of(temperature, group))
        allowed, none = support_of(inputs, group, z)
        z = z if allowed is None else z.masked_fill(~allowed, -torch.inf)
        if none is not None:
            bad = shift.new_zeros(rows, 1, dtype=torch.bool) if bad is None else bad
            bad[group] |= none.unsqueeze(-1)
        shift[group] = top = z.amax(-1, keepdim=True)
        if index is not None and per_index is not None:
            place = index[group]
            per_index[group] = z.gather(-1, place).sub_(top)
            if is_top1 is not None:
                is_top1[group] = place == z.argmax(-1, keepdim=True)
        to = rest[0] if rest else x
        written = w is not None and to.dtype == z.dtype
        if of_sums:
            p = softmax(z, x, to if written else None if room is None else room[: len(z)])
            room = p if room is None and z is x and not written else room
        else:
            p = torch.softmax(z, -1)
        largest = p.amax(-1, keepdim=True)
        total[group] = sums = p.sum(-1, keepdim=True).div_(largest)
        if w is not None:
            sums = sums if bad is None else sums.masked_fill(bad[group], torch.nan)
            p.mul_(sums.log().neg_().exp_().div_(largest).mul_(minus[group]))  # in the order of `softmax_gradient`
            p.scatter_add_(-1, place, w[group])
            finish(p, slope, None if idle is None else idle[group], to)
        if of_sums:
            continue
        is_logits = z is x
        z = less(z, top, x, None if room is None else room[: len(z)])
        room = z if room is None and is_logits else room
        if options.wants("expected_logit") or options.wants("entropy"):
            field["expected_logit"][group] = p.mul_(z.clamp(min=FLOOR)).sum(-1, keepdim=True).div_(largest)
        if options.wants("weighted_logit"):
            c = weights_of(class_weights, options, z)
            c = c if allowed is None else allowed * c
            # A class of weight 0 is left out even if its logit is -inf.
            weighted = torch.where(torch.as_tensor(c == 0, device=z.device), 0, c * z)
            field["weighted_logit"][group] = weighted.sum(-1, keepdim=True)
        if options.wants("log_sum_sq_probs") or options.wants("tempered_log_normalizer"):
            field["tempered_log_normalizer"][group] = (z * options.sharpness).exp_().sum(-1, keepdim=True).log_()
        if options.wants("mean_logit"):
            field["mean_logit"][group] = (z / vocab).sum(-1, keepdim=True) + top
    if bad is not None:
        total.masked_fill_(bad, torch.nan)
    void = 0 * total  # NaN if the row defines no distribution: a logit is NaN or +inf, or all are -inf
    if not of_sums:
        field["expected_logit"].div_(total)
        for name in ("weighted_logit", "tempered_log_normalizer", "mean_logit"):
            field[name].add_(void)
        field["entropy"].copy_(total.log() - field["expected_logit"])
        field["log_sum_sq_probs"].copy_(field["tempered_log_normalizer"] - 2 * total.log())
    shift.add_(void)
    total.log_()
    if per_index is not None:
        per_index.add_(void)
        if is_top1 is not None:
            is_top1 &= per_index == 0
        if options.wants("log_probs"):
            per_index.sub_(total)
    if active is not None:
        packed.view(len(PACKED), rows).masked_fill_(~active, 0.0)
        for of_index in (per_index, is_top1):
            if of_index is not None:
                of_index.masked_fill_(~active.unsqueeze(-1), 0)
    return results


def of_rows(grad: Tensor, index: Tensor) -> Tensor:
    """The upstream gradients of the index; one number is that of all rows."""
    return grad.reshape(index.shape) if grad.dim() else grad.expand(index.shape)


def finish(g: Tensor, slope: Tensor | float, idle: Tensor | None, out: Tensor) -> None:
    """Write the gradient ``(n, V)`` of logits to ``out``, from that of their transform; 0 where ``idle``."""
    if isinstance(slope, Tensor) or slope != 1.0:
        g.mul_(slope)
    if idle is not None:
        g.masked_fill_(idle, 0.0)
    if g.data_ptr() != out.data_ptr():
        out.copy_(g)


def softmax_gradient(
    logits: Tensor, inputs: Inputs, packed: Tensor, grads: FieldGradients, options: Options, out: Tensor,
    again: bool = False,
) -> None:  # fmt: skip
    """Write the gradient with respect to the logits into ``out``, by the formula in `kernels.softmax_gradient`.

    With ``again``, ``out`` was written for the second number of ``grads.row_weight``, and may be right already; the
    third becomes the upstream gradient.
    """
    index, row_mask, class_weights, temperature = inputs[:4]
    rows = logits.shape[:-1].numel()
    if rows == 0:
        return
    if again and logits.is_cpu and grads.row_weight is not None and grads.selected is not None:
        first = grads.selected.reshape(-1)[0]  # all are the same
        row_weight = grads.row_weight.data  # saved for a second backward, which must not find it modified
        row_weight[2] = first
        if bool(first * row_weight[0] == row_weight[1]):
            return
    field = dict(zip(PACKED, packed.view(len(PACKED), rows, 1)))
    a, b, d, h = (packed.new_zeros(rows, 1) if g is None else g.reshape(-1, 1) for g in grads[:4])
    if grads.expected_logit is not None:
        expected = field["expected_logit"]
        a, b = (a + b * expected, -b) if options.wants("entropy") else (a + b * (1 - expected), b)
    zero = (a == 0) & (b == 0) & (d == 0) & (h == 0)
    w: Tensor | None = None
    if index is not None and grads.selected is not None:
        index = index.reshape(rows, index.numel() // rows).long()
        outside = (index < 0) | (index >= logits.shape[-1])
        w = of_rows(grads.selected if grads.row_weight is None else grads.selected * grads.row_weight[0], index)
        if inputs.support is not None:
            w = w.where(in_support(inputs, index), 0.0)
        zero &= (w == 0).all(-1, keepdim=True)
        if options.wants("log_probs"):
            a = a - w.sum(-1, keepdim=True)
        index, w = index.masked_fill(outside, 0), w.masked_fill(outside, 0.0)
    idle = idle_rows(zero, active_rows(row_mask, options.masked))
    factor = field["log_normalizer"].neg().exp_()  # the probability of the largest logit
    needs_z = grads.expected_logit is not None or grads.tempered_log_normalizer is not None
    for group, (x, to) in row_blocks(logits, out, alone=options.invariant):
        z, slope = transformed(x, options.transform, packed.dtype, temperature_of(temperature, group))
        allowed, _ = support_of(inputs, group, z)
        z = z if allowed is None else z.masked_fill(~allowed, -torch.inf)
        room = to if to.dtype == z.dtype else None
        if not needs_z:
            g = scaled_softmax(z, x, room, field["shift"][group], factor[group], a[group])
        else:
            z = less(z, field["shift"][group], x, None)
            g = z.exp() if room is None else torch.exp(z, out=room)
            scale = a[group] * factor[group]
            if grads.expected_logit is not None:
                scale = z.clamp(min=FLOOR).mul_(b[group] * factor[group]).add_(scale)
            g.mul_(scale)
        if grads.tempered_log_normalizer is not None:
            tempered = field["tempered_log_normalizer"][group]
            g += (z * options.sharpness - tempered).exp_() * (h[group] * options.sharpness)
        if grads.weighted_logit is not None:
            g += weights_of(class_weights, options, z) * d[group]
        of_row = None if idle is None else idle[group]
        if allowed is not None:
            of_row = ~allowed if of_row is None else of_row | ~allowed
        if index is not None and w is not None:
            g.scatter_add_(-1, index[group], w[group])
        finish(g, slope, of_row, to)


def scaled_softmax(
    z: Tensor, x: Tensor, room: Tensor | None, shift: Tensor, factor: Tensor, scale: Tensor
) -> Tensor:  # fmt: skip
    """``exp(z - shift) * factor * scale`` of rows ``(n, V)``; ``shift`` is at least their largest number."""
    top = z.amax(-1, keepdim=True)
    p = softmax(z, x, room)
    largest = p.amax(-1, keepdim=True)
    empty = top == -torch.inf  # the largest logit of such a row may be in another slice of the vocabulary
    if not empty.is_cpu or empty.any():
        p.masked_fill_(empty, 0.0)
        largest.masked_fill_(empty, 1.0)
    return p.mul_((factor / largest).mul_(scale).mul_((top - shift).exp_()))


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


def few_rows_mm(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a.t() @ b``, rounded once."""
    return torch.mm(a.t(), b)


def scale(x: Tensor, factor: Tensor, out: Tensor, other: Tensor | None = None) -> None:
    """Write ``other * (factor * x)``, rounded once, to ``out``, which may be ``x``. A row with a factor of 0 is 0."""
    if other is None:
        torch.mul(x, factor.unsqueeze(-1) if factor.dim() else factor, out=out)
    else:
        torch.mul(x * factor.unsqueeze(-1), other.unsqueeze(-1), out=out)
    for each in (factor, other):
        if each is not None and each.dim():
            out.masked_fill_((each == 0).unsqueeze(-1), 0.0)
