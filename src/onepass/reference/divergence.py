"""Divergences between two rows of logits in plain PyTorch, by the formulas in `kernels.divergence`."""

from math import log

import torch
from torch import Tensor

from onepass.core.options import PAIR_NUMBERS, PairOptions, PairRows, empty_pair_numbers
from onepass.core.shard import PAIR_STATE
from onepass.reference.softmax import row_blocks, temperature_of, transformed


def log_ratio(p: Tensor, log_p: Tensor, log_q: Tensor) -> Tensor:
    """``log(p/q)``, but 0 where p is 0."""
    return torch.where(p == 0, 0.0, log_p - log_q)  # NaN propagates


def mixture(log_p: Tensor, log_q: Tensor, w_p: float, w_q: float) -> tuple[Tensor, ...]:
    """``P, log(P/M), Q, log(Q/M)`` for ``M = w_p·P + w_q·Q``."""
    p, q = log_p.exp(), log_q.exp()
    log_m = torch.logaddexp(log_p + log(w_p), log_q + log(w_q))  # finite even if w_p·P underflows
    return p, log_ratio(p, log_p, log_m), q, log_ratio(q, log_q, log_m)


def divergence(student: Tensor, teacher: Tensor, read: PairRows, options: PairOptions) -> Tensor:
    """`PAIR_NUMBERS` of every row, ``(len(PAIR_NUMBERS), ...)``, as `kernels.divergence` defines them."""
    packed = empty_pair_numbers(student, teacher)
    _divergence(student, teacher, read, packed, options, known=False)
    return packed


def write_means(student: Tensor, teacher: Tensor, read: PairRows, packed: Tensor, options: PairOptions) -> None:
    """Write the means of JSD and the divergence into ``packed``, which has the normalizers.

    If the logits are some columns of the vocabulary, they are sums over these columns.
    """
    _divergence(student, teacher, read, packed, options, known=True)


def _divergence(
    student: Tensor, teacher: Tensor, read: PairRows, packed: Tensor, options: PairOptions, known: bool
) -> None:
    """Write `PAIR_NUMBERS`. If ``known``, the normalizers are there already."""
    rows = student.shape[:-1].numel()
    out = dict(zip(PAIR_NUMBERS, packed.view(len(PAIR_NUMBERS), rows)))
    if not student.shape[-1]:  # of a rank that has none of the columns
        for name in ("student_mean", "teacher_mean", "divergence"):
            out[name].zero_()
        return
    for group, pair in row_blocks(student, teacher, alone=options.invariant) if rows else ():
        logs = {}
        for name, x, of_x, t in zip(("student", "teacher"), pair, (options.student, options.teacher), read[1:]):
            z, _ = transformed(x, of_x, packed.dtype, temperature_of(t, group))
            if not known:
                shift = z.amax(-1)
                out[f"{name}_shift"][group] = shift
                out[f"{name}_log_normalizer"][group] = (z - shift.unsqueeze(-1)).logsumexp(-1)
            shift, normalizer = (out[f"{name}_{n}"][group].unsqueeze(-1) for n in ("shift", "log_normalizer"))
            logs[name] = z - shift - normalizer
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
    if read.row_mask is not None:
        packed.masked_fill_(~read.row_mask.bool(), 0.0)


def divergence_states(student: Tensor, teacher: Tensor, read: PairRows, options: PairOptions) -> Tensor:
    """The state of every row of a vocabulary shard, ``(len(PAIR_STATE), rows)``, for KL(P ‖ Q)."""
    rows, vocab = student.shape[:-1].numel(), student.shape[-1]
    dtype = empty_pair_numbers(student[:0], teacher[:0]).dtype
    states = student.new_zeros((len(PAIR_STATE), rows), dtype=dtype)
    out = dict(zip(PAIR_STATE, states))
    lowest = torch.finfo(dtype).min
    out["p_max"].fill_(lowest)
    out["q_max"].fill_(lowest)
    for group, pair in row_blocks(student, teacher, alone=options.invariant) if rows and vocab else ():
        of_pair = zip(pair, (options.student, options.teacher), read[1:])
        zs = [transformed(x, of_x, dtype, temperature_of(t, group))[0] for x, of_x, t in of_pair]
        difference = {}
        for name, z in zip("pq", options.ordered(*zs)):
            largest = z.amax(-1).clamp(min=lowest)  # finite, if all logits are -inf
            difference[name] = z - largest.unsqueeze(-1)
            out[f"{name}_max"][group], out[f"{name}_sum"][group] = largest, difference[name].exp().sum(-1)
        p = difference["p"].exp()
        out["difference"][group] = (p * log_ratio(p, difference["p"], difference["q"])).sum(-1)
    return states


def divergence_gradient(
    student: Tensor,
    teacher: Tensor,
    read: PairRows,
    packed: Tensor,
    grad: Tensor,
    of_teacher: bool,
    options: PairOptions,
    out: Tensor,
) -> None:
    """Write the gradient with respect to the student's logits, or the teacher's if ``of_teacher``, into ``out``."""
    rows = student.shape[:-1].numel()
    field = dict(zip(PAIR_NUMBERS, packed.view(len(PAIR_NUMBERS), rows, 1)))
    grad = grad.reshape(-1, 1)
    idle = grad == 0
    if read.row_mask is not None:
        idle = idle | ~read.row_mask.reshape(-1, 1).bool()
    names, transforms = ("student", "teacher"), ((options.student, read[1]), (options.teacher, read[2]))
    if of_teacher:
        student, teacher, names, transforms = teacher, student, names[::-1], transforms[::-1]
    for group, (x, y, g_out) in row_blocks(student, teacher, out, alone=options.invariant) if rows else ():
        (zx, slope), (zy, _) = (
            transformed(of, o, packed.dtype, temperature_of(t, group)) for of, (o, t) in zip((x, y), transforms)
        )
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
