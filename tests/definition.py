"""The definition: the statistics in plain PyTorch and float64, differentiated by autograd, and how close is close."""

import torch


def transform(x, *, temperature=1.0, softcap=None, logit_scale=1.0):
    z = x * logit_scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    return z / temperature


def statistics(x, index=None, *, row_mask=None, class_weights=None, **transforms):
    """All fields of `SoftmaxStatistics` for float64 ``x``; terms of probability 0 are left out instead of 0·inf."""
    z = transform(x, **transforms)
    shift = z.detach().amax(-1)
    d = z - shift.unsqueeze(-1)  # NaN where the row is NaN, holds +inf, or is -inf alone
    zero = (z == float("-inf")) & shift.isfinite().unsqueeze(-1)
    finite = d.masked_fill(zero, 0.0)
    e = finite.exp().masked_fill(zero, 0.0)
    total = e.sum(-1)
    out = {
        "shift": shift + 0 * total.detach(),
        "log_normalizer": total.log(),
        "expected_logit": (e * finite).sum(-1) / total,
        "log_sum_sq_probs": e.square().sum(-1).log() - 2 * total.log(),
        "mean_logit": z.mean(-1) + 0 * total,
    }
    out["entropy"] = out["log_normalizer"] - out["expected_logit"]
    if class_weights is not None:
        c = torch.as_tensor(class_weights, dtype=x.dtype, device=x.device).expand(x.shape[-1])
        out["weighted_logit"] = (c * d.masked_fill(c == 0, 0.0)).sum(-1) + 0 * total.detach()
    if index is not None:
        shaped = (index if index.dim() == x.dim() else index.unsqueeze(-1)).long()
        chosen = d.gather(-1, shaped.clamp(0, x.shape[-1] - 1)) + 0 * total.unsqueeze(-1)
        out["selected"] = chosen.reshape(index.shape)
        out["is_top1"] = (out["selected"].detach() == 0) & (shaped == d.argmax(-1, keepdim=True)).reshape(index.shape)
        normalizer = out["log_normalizer"]
        out["log_probs"] = out["selected"] - (normalizer if index.dim() < x.dim() else normalizer.unsqueeze(-1))
    if row_mask is not None:
        for name, value in out.items():
            row = row_mask.bool().reshape(row_mask.shape + (1,) * (value.dim() - row_mask.dim()))
            out[name] = value.masked_fill(~row, 0)
    return out


def expectation(log_p, log_q):
    """The terms ``p·log(p/q)``; 0 where p is."""
    p = log_p.exp()
    return p * (log_p - log_q).masked_fill(p == 0, 0.0)


def divergence(log_t, log_s, direction, beta=0.5):
    """The terms of the divergence of a teacher and a student, given by their log-probabilities."""
    if direction == "forward":
        return expectation(log_t, log_s)
    if direction == "reverse":
        return expectation(log_s, log_t)
    m = beta * log_t.exp() + (1 - beta) * log_s.exp()
    log_m = m.masked_fill(m == 0, 1.0).log()
    return beta * expectation(log_t, log_m) + (1 - beta) * expectation(log_s, log_m)


def topk_divergence(x, ids, log_t, mask=None, *, temperature=1.0, direction="forward", beta=0.5, renormalize=False):
    """Of every row of float64 logits ``x``, over the tokens that a teacher gives."""
    given = log_t > -float("inf")
    if mask is not None:
        given = given & (mask.bool() if mask.dim() == ids.dim() else mask.bool().unsqueeze(-1))
    some = given.any(-1)
    ids, given, log_t = ids[some].long().where(given[some], 0), given[some], log_t[some].double()
    z = x[some] / temperature
    if renormalize:
        log_t = log_t.masked_fill(~given, -float("inf")).log_softmax(-1)
        log_s = z.gather(-1, ids).masked_fill(~given, -float("inf")).log_softmax(-1)
    else:
        log_s = z.log_softmax(-1).gather(-1, ids)
    # Tokens that are not given are taken out of what is differentiated, not only out of the sum.
    terms = divergence(log_t.masked_fill(~given, 0.0), log_s.masked_fill(~given, 0.0), direction, beta)
    return x.new_zeros(some.shape).masked_scatter(some, terms.masked_fill(~given, 0.0).sum(-1))


def assert_close(got, expected, *, scale=None, name="result"):
    """Within a few roundings of the results' own size, or of ``scale`` where terms of that size were added."""
    expected = expected.to(got.device)
    if got.dtype == torch.bool:
        assert torch.equal(got, expected), name
        return
    error = (got.double() - expected).abs()
    size = expected.abs().clamp(min=1.0 if scale is None else scale)
    bound = size * 64 * torch.finfo(got.dtype).eps + 1e-30
    equal = (got.double() == expected) | (got.isnan() & expected.isnan())
    worst = torch.where(equal, 0, error / bound).nan_to_num(float("inf"))
    assert (worst <= 1).all(), f"{name}: {worst.max():.3g} times the bound; got {got}, expected {expected}"


def assert_gradient_close(got, expected, upstream=1.0):
    """Within one rounding of the output's dtype, plus what float32 arithmetic leaves at the size of ``upstream``."""
    expected = expected.to(got.device)
    eps = torch.finfo(got.dtype).eps
    work = min(torch.finfo(torch.float32).eps, eps)
    bound = expected.abs() * (eps + 64 * work) + 64 * work * upstream + torch.finfo(got.dtype).tiny
    error = (got.double() - expected).abs()
    beyond = got.isinf() & (expected.abs() > torch.finfo(got.dtype).max) & (got.sign() == expected.sign())  # of float16
    equal = (got.double() == expected) | (got.isnan() & expected.isnan()) | beyond
    worst = torch.where(equal, 0, error / bound).nan_to_num(float("inf"))
    assert (worst <= 1).all(), f"gradient: {worst.max():.3g} times the bound; got {got}, expected {expected}"
