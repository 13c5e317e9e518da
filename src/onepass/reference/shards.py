"""The states of rows whose logits are sharded over the vocabulary, and their merge, in plain PyTorch."""

import torch
from torch import Tensor

from onepass.core.options import (
    PACKED,
    PAIR_NUMBERS,
    Inputs,
    Options,
    PairOptions,
    PairRows,
    Results,
    empty_pair_numbers,
    empty_results,
)
from onepass.core.shard import PAIR_STATE, Shard, per_row, state_fields
from onepass.reference.softmax import (
    FLOOR,
    active_rows,
    row_blocks,
    support_of,
    temperature_of,
    transformed,
    weights_of,
)


def shard_statistics(logits: Tensor, inputs: Inputs, options: Options) -> Tensor:
    """The state of every row of a vocabulary shard, ``(numbers, rows)``; see `state_fields`."""
    index, _, class_weights, temperature = inputs[:4]
    rows, vocab, K = logits.shape[:-1].numel(), logits.shape[-1], per_row(index, logits.dim())
    fields = state_fields(options, K)
    dtype = torch.promote_types(logits.dtype, torch.float32)
    states = logits.new_zeros((len(fields), rows), dtype=dtype)
    out = dict(zip(fields, states))
    selected, top1 = states[:0], states[:0]
    if index is not None:
        index = index.reshape(rows, K)
        place = fields.index("selected") if K else 0
        selected, top1 = states[place : place + K], states[place + K :]
        selected.fill_(torch.inf)
    if vocab == 0:
        out["max"].fill_(torch.finfo(dtype).min)
        return states
    for group, (x,) in row_blocks(logits, alone=options.invariant):
        z, _ = transformed(x, options.transform, dtype, temperature_of(temperature, group))
        allowed, _ = support_of(inputs, group, z)
        z = z if allowed is None else z.masked_fill(~allowed, -torch.inf)
        largest = z.amax(-1, keepdim=True).clamp(min=torch.finfo(dtype).min)  # finite, if all logits are -inf
        total = z.sum(-1)
        z = z - largest
        e = z.exp()
        out["max"][group], out["sum"][group] = largest[:, 0], e.sum(-1)
        if "expected" in out:
            out["expected"][group] = (e * z.clamp(min=FLOOR)).sum(-1)
        if "weighted" in out:
            c = torch.as_tensor(weights_of(class_weights, options, z), dtype=dtype, device=z.device).expand(z.shape)
            c = c if allowed is None else c * allowed
            out["weighted"][group] = torch.where(c == 0, 0, c * z).sum(-1)
            out["weights"][group] = c.sum(-1)
        if "tempered" in out:
            out["tempered"][group] = (z * options.sharpness).exp().sum(-1)
        if "total" in out:
            out["total"][group] = total
        if index is not None:
            inside = (index[group] >= 0) & (index[group] < vocab)
            safe = index[group].clamp(0, vocab - 1).long()
            chosen = z.gather(-1, safe)
            selected[:, group] = chosen.masked_fill(~inside, torch.inf).T
            if "top1" in out:
                top1[:, group] = (inside & (chosen == 0) & (safe == z.argmax(-1, keepdim=True))).to(dtype).T
    return states


def merge_shards(states: Tensor, logits: Tensor, inputs: Inputs, shard: Shard, options: Options) -> Results:
    """The statistics of every row from the states ``(ranks, numbers, rows)``; ``logits`` are those of one shard."""
    index, row_mask = inputs[:2]
    packed, per_index, is_top1 = results = empty_results(logits, index, options)
    rows, K = logits.shape[:-1].numel(), per_row(index, logits.dim())
    fields = state_fields(options, K)
    of = dict(zip(fields, states.unbind(1)))
    largest = of["max"].nan_to_num(nan=torch.finfo(states.dtype).min, posinf=torch.inf).amax(0)
    move = of["max"] - largest
    back = move.clamp(min=FLOOR)
    alpha = back.exp()
    total = (alpha * of["sum"]).sum(0)
    places = fields.index("selected") if K else 0
    chosen = states[:, places : places + K]
    held = chosen != torch.inf
    total = total.masked_fill(~held.any(0).all(0), torch.nan) if K else total
    total = total.where(total > 0, torch.nan)
    void = total - total
    out = dict(zip(PACKED, packed.view(len(PACKED), rows)))
    out["shift"].copy_(largest + void)
    out["log_normalizer"].copy_(total.log())
    if "expected" in of:
        expected = (alpha * (of["expected"] + of["sum"] * back)).sum(0) / total
        out["expected_logit"].copy_(expected)
        out["entropy"].copy_(total.log() - expected)
    if "weighted" in of:
        moved = torch.where(of["weights"] == 0, of["weighted"], of["weighted"] + of["weights"] * move)
        out["weighted_logit"].copy_(moved.sum(0) + void)
    if "tempered" in of:
        tempered = ((back * options.sharpness).exp() * of["tempered"]).sum(0).log() + void
        out["tempered_log_normalizer"].copy_(tempered)
        out["log_sum_sq_probs"].copy_(tempered - 2 * total.log())
    if "total" in of:
        out["mean_logit"].copy_(of["total"].sum(0) / shard.vocab + void)
    if per_index is not None:
        relative = torch.where(held, chosen + move.unsqueeze(1), 0).sum(0) + void
        per_index.view(rows, K).copy_((relative - total.log() if options.wants("log_probs") else relative).T)
    if is_top1 is not None:
        # The lower rank holds the lower columns. argmax returns the first.
        first = ((move == 0) & (of["sum"] > 0)).to(torch.int8).argmax(0)
        top1 = states[:, places + K :].gather(0, first.expand(1, K, rows))[0]
        is_top1.view(rows, K).copy_(((top1 > 0) & (total > 0)).T)
    active = active_rows(row_mask)
    if active is not None:
        packed.view(len(PACKED), rows).masked_fill_(~active, 0.0)
        for field in (per_index, is_top1):
            if field is not None:
                field.view(rows, K).masked_fill_(~active.unsqueeze(-1), 0)
    return results


def merge_divergences(states: Tensor, student: Tensor, teacher: Tensor, read: PairRows, options: PairOptions) -> Tensor:
    """`PAIR_NUMBERS` of every row from the states ``(ranks, numbers, rows)``; the logits are those of one shard."""
    packed = empty_pair_numbers(student, teacher)
    of = dict(zip(PAIR_STATE, states.unbind(1)))
    out = dict(zip(PAIR_NUMBERS, packed.view(len(PAIR_NUMBERS), -1)))
    back, sums, names = {}, {}, dict(zip("pq", options.ordered("student", "teacher")))
    for p, name in names.items():
        shift = of[f"{p}_max"].amax(0)
        back[p] = (of[f"{p}_max"] - shift).clamp(min=FLOOR)
        total = (back[p].exp() * of[f"{p}_sum"]).sum(0)
        sums[p] = total.where(total > 0, torch.nan)
        out[f"{name}_shift"].copy_(shift)
        out[f"{name}_log_normalizer"].copy_(sums[p].log())
    alpha = back["p"].exp()
    moved = alpha * (of["difference"] + of["p_sum"] * (back["p"] - back["q"]))
    kl = moved.masked_fill(alpha == 0, 0.0).sum(0) / sums["p"] - sums["p"].log() + sums["q"].log()
    out["divergence"].copy_(kl)
    out[f"{names['p']}_mean"].copy_(kl)
    out[f"{names['q']}_mean"].zero_()
    if read.row_mask is not None:
        packed.masked_fill_(~read.row_mask.bool(), 0.0)
    return packed
