"""The two operations in plain PyTorch: the path of CPUs and of float64, and the definition the kernels are held to.

Rows are walked in blocks, so that no second ``(rows, V)`` tensor is alive; sums run in the dtype of the results.
"""

from collections.abc import Iterator

import torch

from onepass.options import PACKED, Options, Results, empty_results

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
        if options.wants("log_sum_sq_probs"):
            out["log_sum_sq_probs"][group] = e.square().sum(-1).log() - 2 * total.log()
        if options.wants("mean_logit"):
            out["mean_logit"][group] = (z / z.shape[-1]).sum(-1) + shift[:, 0] + void
        if index is not None and chosen is not None:
            relative = z.gather(-1, index[group]) + void.unsqueeze(-1)
            if is_top1 is not None:
                is_top1[group] = relative == 0
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
    grad_selected: torch.Tensor | None,
    options: Options,
    out: torch.Tensor,
) -> None:
    """Write the gradient with respect to the logits into ``out``, by the formula in `kernels.softmax_gradient`."""
    rows = logits.shape[:-1].numel()
    if rows == 0:
        return
    field = dict(zip(PACKED, packed.view(len(PACKED), rows, 1)))
    a, b, d = (
        packed.new_zeros(rows, 1) if g is None else g.reshape(-1, 1)
        for g in (grad_log_normalizer, grad_expected_logit, grad_weighted_logit)
    )
    if grad_expected_logit is not None:
        expected = field["expected_logit"]
        a, b = (a + b * expected, -b) if options.wants("entropy") else (a + b * (1 - expected), b)
    idle = (a == 0) & (b == 0) & (d == 0)
    active = active_rows(index, row_mask, options)
    if index is not None and grad_selected is not None:
        index = index.reshape(rows, index.numel() // rows).clamp(0, logits.shape[-1] - 1).long()
        w = grad_selected.reshape(index.shape)
        idle &= (w == 0).all(-1, keepdim=True)
        if options.wants("log_probs"):
            a = a - w.sum(-1, keepdim=True)
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
        if grad_weighted_logit is not None:
            g += weights_of(class_weights, options, z) * d[group]
        if index is not None and grad_selected is not None:
            g.scatter_add_(-1, index[group], w[group])
        if not (isinstance(slope, float) and slope == 1.0):
            g *= slope
        g_out.copy_(g.masked_fill_(idle[group], 0.0))
