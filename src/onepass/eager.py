"""The two operations in plain PyTorch: the path of CPUs and of float64, and the definition the kernels are held to.

Rows are walked in blocks, so that no second ``(rows, V)`` tensor is alive; sums run in the dtype of the results.
"""

from collections.abc import Iterator

import torch

from onepass.options import (
    PACKED,
    PAIR_NUMBERS,
    Options,
    PairOptions,
    Results,
    empty_pair_numbers,
    empty_results,
)

BLOCK_ELEMENTS = 1 << 20
FLOOR = -1e30  # of differences that are multiplied by their exp(), which is 0: 0·(-inf) would be NaN


def row_blocks(*tensors: torch.Tensor) -> Iterator[tuple[slice, list[torch.Tensor]]]:
    """Cut tensors of one shape ``(..., V)`` into views of some rows, ``(n, V)`` each; nothing is copied."""
    first, vocab = 0, tensors[0].shape[-1]
    try:
        matrices = [t.view(-1, vocab) for t in tensors]
    except RuntimeError:  # the rows of some tensor are not evenly spaced
        for parts in zip(*tensors):
            for rows, blocks in row_blocks(*parts):
                yield slice(first + rows.start, first + rows.stop), blocks
            first += parts[0][..., 0].numel()
        return
    step = max(1, BLOCK_ELEMENTS // vocab)
    for first in range(0, matrices[0].shape[0], step):
        blocks = [m[first : first + step] for m in matrices]
        yield slice(first, first + blocks[0].shape[0]), blocks


def transform(x: torch.Tensor, options: Options, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | float]:
    """The logits after scale, soft-cap and temperature, and the derivative of that."""
    inner, outer = options.transform()
    z = x.to(dtype) * inner
    if options.softcap is None:
        return z, inner
    z = z.tanh()
    return z * outer, (1 - z * z) * (inner * outer)


def active_rows(index: torch.Tensor | None, row_mask: torch.Tensor | None, options: Options) -> torch.Tensor | None:
    """``(rows,)``: False where a row is masked or ignored; None where no row is."""
    if options.ignore_index is not None and index is not None:
        return index.reshape(-1) != options.ignore_index
    return None if row_mask is None else row_mask.reshape(-1).bool()


def weights_of(class_weights: torch.Tensor | None, options: Options, like: torch.Tensor) -> torch.Tensor | float:
    return options.class_weight if class_weights is None else class_weights.to(like.dtype)


def out_of_range(index: torch.Tensor, active: torch.Tensor | None, vocab: int) -> torch.Tensor:
    """Where ``(rows, K)`` indices of rows that are not masked lie outside the vocabulary."""
    bad = (index < 0) | (index >= vocab)
    return bad if active is None else bad & active.unsqueeze(-1)


def softmax_statistics(
    logits: torch.Tensor,
    index: torch.Tensor | None,
    row_mask: torch.Tensor | None,
    class_weights: torch.Tensor | None,
    options: Options,
) -> Results:
    """The packed statistics, and of every index its logit (or log-prob) and whether it is the row's largest."""
    packed, chosen, is_top1 = results = empty_results(logits, index, options)
    rows = logits.shape[:-1].numel()
    if rows == 0:
        return results
    out = dict(zip(PACKED, packed.view(len(PACKED), rows)))
    out["kept"].fill_(1.0)
    active = active_rows(index, row_mask, options)
    bad = None
    if index is not None and chosen is not None:
        index = index.reshape(rows, index.numel() // rows)
        chosen = chosen.view(index.shape)
        bad = out_of_range(index, None, logits.shape[-1]).any(-1)
        index = index.clamp(0, logits.shape[-1] - 1).long()
    is_top1 = None if is_top1 is None or chosen is None else is_top1.view(chosen.shape)
    for group, (x,) in row_blocks(logits):
        z, _ = transform(x, options, packed.dtype)
        shift = z.amax(-1, keepdim=True)
        z = z - shift
        e = z.exp()
        total = e.sum(-1)
        if bad is not None:
            total.masked_fill_(bad[group], float("nan"))
        void = 0 * total  # NaN where the row has no distribution: it holds NaN or +inf, or -inf alone
        out["shift"][group] = shift[:, 0] + void
        out["log_normalizer"][group] = total.log()
        if options.wants("expected_logit") or options.wants("entropy"):
            expected = (e * z.clamp(min=FLOOR)).sum(-1) / total
            out["expected_logit"][group] = expected
            out["entropy"][group] = total.log() - expected
        if options.wants("weighted_logit"):
            c = weights_of(class_weights, options, z)
            # A weight of 0 leaves its logit out, also where the logit is -inf.
            out["weighted_logit"][group] = (
                torch.where(torch.as_tensor(c == 0, device=z.device), 0, c * z).sum(-1) + void
            )
        if options.wants("log_sum_sq_probs") or options.wants("tempered_log_normalizer"):
            tempered = (z * options.sharpness).exp().sum(-1).log() + void
            out["tempered_log_normalizer"][group] = tempered
            out["log_sum_sq_probs"][group] = tempered - 2 * total.log()
        if options.wants("mean_logit"):
            out["mean_logit"][group] = (z / z.shape[-1]).sum(-1) + shift[:, 0] + void
        if index is not None and chosen is not None:
            relative = z.gather(-1, index[group]) + void.unsqueeze(-1)
            if is_top1 is not None:
                is_top1[group] = (relative == 0) & (index[group] == z.argmax(-1, keepdim=True))
            chosen[group] = relative - total.log().unsqueeze(-1) if options.wants("log_probs") else relative
    if active is not None:
        packed.view(len(PACKED), rows).masked_fill_(~active, 0.0)
        for per_index in (chosen, is_top1):
            if per_index is not None:
                per_index.masked_fill_(~active.unsqueeze(-1), 0)
    return results


def softmax_gradient(
    logits: torch.Tensor,
    index: torch.Tensor | None,
    row_mask: torch.Tensor | None,
    class_weights: torch.Tensor | None,
    packed: torch.Tensor,
    grad_log_normalizer: torch.Tensor | None,
    grad_expected_logit: torch.Tensor | None,
    grad_weighted_logit: torch.Tensor | None,
    grad_tempered: torch.Tensor | None,
    grad_selected: torch.Tensor | None,
    options: Options,
    out: torch.Tensor,
) -> None:
    """Write the gradient with respect to the logits into ``out``, by the formula in `kernels.softmax_gradient`."""
    rows = logits.shape[:-1].numel()
    if rows == 0:
        return
    field = dict(zip(PACKED, packed.view(len(PACKED), rows, 1)))
    a, b, d, h = (
        packed.new_zeros(rows, 1) if g is None else g.reshape(-1, 1)
        for g in (grad_log_normalizer, grad_expected_logit, grad_weighted_logit, grad_tempered)
    )
    if grad_expected_logit is not None:
        expected = field["expected_logit"]
        a, b = (a + b * expected, -b) if options.wants("entropy") else (a + b * (1 - expected), b)
    idle = (a == 0) & (b == 0) & (d == 0) & (h == 0)
    active = active_rows(index, row_mask, options)
    if index is not None and grad_selected is not None:
        index = index.reshape(rows, index.numel() // rows).long()
        outside = (index < 0) | (index >= logits.shape[-1])
        w = grad_selected.reshape(index.shape)
        idle &= (w == 0).all(-1, keepdim=True)
        if options.wants("log_probs"):
            a = a - w.sum(-1, keepdim=True)
        index, w = index.masked_fill(outside, 0), w.masked_fill(outside, 0.0)
    if active is not None:
        idle |= ~active.unsqueeze(-1)
    for group, (x, g_out) in row_blocks(logits, out):
        z, slope = transform(x, options, packed.dtype)
        z = z - field["shift"][group]
        p = (z - field["log_normalizer"][group]).exp_()
        if grad_expected_logit is not None:
            g = p * (a[group] + b[group] * z.clamp_(min=FLOOR))
        else:
            g = p.mul_(a[group])
        if grad_tempered is not None:
            tempered = field["tempered_log_normalizer"][group]
            g = g + (z * options.sharpness - tempered).exp_() * (h[group] * options.sharpness)
        if grad_weighted_logit is not None:
            g += weights_of(class_weights, options, z) * d[group]
        if index is not None and grad_selected is not None:
            g.scatter_add_(-1, index[group], w[group])
        if not (isinstance(slope, float) and slope == 1.0):
            g *= slope
        g_out.copy_(g.masked_fill_(idle[group], 0.0))


def takes_in_one(logits: torch.Tensor, index: torch.Tensor | None, options: Options) -> bool:
    """There is no `softmax_loss` here: two reads cost no more than one."""
    return False


def scale_(x: torch.Tensor, scale: torch.Tensor) -> None:
    x.mul_(scale)


def log_ratio(p: torch.Tensor, log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """``log(p/q)``, and 0 where p is 0."""
    return torch.where(p == 0, 0.0, log_p - log_q)  # NaN stays


def mixture(log_p: torch.Tensor, log_q: torch.Tensor, w_p: float, w_q: float) -> tuple[torch.Tensor, ...]:
    """``P, log(P/M), Q, log(Q/M)`` of ``M = w_p·P + w_q·Q``."""
    p, q = log_p.exp(), log_q.exp()
    log_m = (w_p * p + w_q * q).log()
    return p, log_ratio(p, log_p, log_m), q, log_ratio(q, log_q, log_m)


def divergence(
    student: torch.Tensor, teacher: torch.Tensor, row_mask: torch.Tensor | None, options: PairOptions
) -> torch.Tensor:
    """`PAIR_NUMBERS` of every row, ``(len(PAIR_NUMBERS), ...)``, as `kernels.divergence` defines them."""
    packed = empty_pair_numbers(student, teacher)
    rows = student.shape[:-1].numel()
    out = dict(zip(PAIR_NUMBERS, packed.view(len(PAIR_NUMBERS), rows)))
    for group, pair in row_blocks(student, teacher) if rows else ():
        logs = {}
        for name, x, of_x in zip(("student", "teacher"), pair, (options.student, options.teacher)):
            z, _ = transform(x, of_x, packed.dtype)
            shift = z.amax(-1, keepdim=True)
            log_normalizer = (z - shift).logsumexp(-1, keepdim=True)
            logs[name] = z - shift - log_normalizer
            out[f"{name}_shift"][group] = shift[:, 0]
            out[f"{name}_log_normalizer"][group] = log_normalizer[:, 0]
        log_p, log_q = options.ordered(logs["student"], logs["teacher"])
        p_mean, q_mean = options.ordered(out["student_mean"], out["teacher_mean"])
        if options.direction == "jsd":
            w_p, w_q = options.weights
            p, p_ratio, q, q_ratio = mixture(log_p, log_q, w_p, w_q)
            p_mean[group], q_mean[group] = (p * p_ratio).sum(-1), (q * q_ratio).sum(-1)
            out["divergence"][group] = w_p * p_mean[group] + w_q * q_mean[group]
        else:
            p = log_p.exp()
            void = 0 * (p.sum(-1) + log_q.exp().sum(-1))
            p_mean[group] = out["divergence"][group] = (p * log_ratio(p, log_p, log_q)).sum(-1) + void
            q_mean[group] = 0.0
    if row_mask is not None:
        packed.masked_fill_(~row_mask.bool(), 0.0)
    return packed


def divergence_gradient(
    student: torch.Tensor,
    teacher: torch.Tensor,
    row_mask: torch.Tensor | None,
    packed: torch.Tensor,
    grad: torch.Tensor,
    of_teacher: bool,
    options: PairOptions,
    out: torch.Tensor,
) -> None:
    """Write the gradient of the student's logits (or the teacher's) into ``out``."""
    rows = student.shape[:-1].numel()
    field = dict(zip(PAIR_NUMBERS, packed.view(len(PAIR_NUMBERS), rows, 1)))
    grad = grad.reshape(-1, 1)
    idle = grad == 0
    if row_mask is not None:
        idle = idle | ~row_mask.reshape(-1, 1).bool()
    names, transforms = ("student", "teacher"), (options.student, options.teacher)
    if of_teacher:
        student, teacher, names, transforms = teacher, student, names[::-1], transforms[::-1]
    for group, (x, y, g_out) in row_blocks(student, teacher, out) if rows else ():
        (zx, slope), (zy, _) = (transform(t, o, packed.dtype) for t, o in zip((x, y), transforms))
        log_x, log_y = (
            z - field[f"{name}_shift"][group] - field[f"{name}_log_normalizer"][group]
            for z, name in zip((zx, zy), names)
        )
        mean = field[f"{names[0]}_mean"][group]
        if options.direction == "jsd":
            w_x, w_y = options.weights if of_teacher else options.weights[::-1]
            p, ratio, _, _ = mixture(log_x, log_y, w_x, w_y)
            g = w_x * p * (ratio - mean)
        elif options.ordered("student", "teacher")[0] == names[0]:
            p = log_x.exp()
            g = p * (log_ratio(p, log_x, log_y) - mean)
        else:
            g = log_x.exp() - log_y.exp()
        g_out.copy_((g * grad[group] * slope).masked_fill_(idle[group], 0.0))
