"""`ratio_report`: how far a trainer's log-probs are from those of the sampler, for the logs of a trainer."""

import torch
from torch import Tensor

from onepass.core.checks import FLOATS, check_dense, check_mask, described, short

QUANTILES = (0.5, 0.9, 0.99)
NAMES = (
    "tokens", "mean_difference", "mean_abs_difference", *(f"abs_difference_p{100 * q:g}" for q in QUANTILES),
    "max_abs_difference", "mean_abs_ratio_error", "kl_k1", "kl_k2", "kl_k3", "effective_sample_size",
)  # fmt: skip


class RatioReport:
    """What `ratio_report` returns: numbers that stay on the device until they are read.

    Attributes:
        values: the numbers, float64, in the order of ``onepass.losses.ratio_report.NAMES``.
    """

    def __init__(self, values: Tensor) -> None:
        self.values = values

    def to_dict(self) -> dict[str, float]:
        """All numbers by name, in one copy from the device."""
        return dict(zip(NAMES, self.values.tolist()))

    def __repr__(self) -> str:
        return f"<RatioReport: {', '.join(NAMES)}>"  # the numbers may still be on their way

    def __str__(self) -> str:
        return "\n".join(f"{name:24} {value:.6g}" for name, value in self.to_dict().items())


@torch.no_grad()
def ratio_report(log_probs: Tensor, sampler_log_probs: Tensor, row_mask: Tensor | None = None) -> RatioReport:
    r"""Compare a trainer's log-probs of sampled tokens with those that the sampler reported.

    With the difference :math:`d` of a token's log-probs, trainer minus sampler, and the ratio :math:`r = e^d`, over the
    tokens that are not masked:

    - ``tokens``: their number;
    - ``mean_difference`` of :math:`d`; ``mean_abs_difference``, ``abs_difference_p50``, ``_p90``, ``_p99`` and
      ``max_abs_difference`` of :math:`|d|`, in nats. Quantiles are interpolated, as by `torch.quantile`;
    - ``mean_abs_ratio_error``: the mean of :math:`|r - 1|`;
    - ``kl_k1``, ``kl_k2``, ``kl_k3``: estimates of KL(sampler ‖ trainer), the means of :math:`-d`, :math:`d^2/2` and
      :math:`r - 1 - d`;
    - ``effective_sample_size``: :math:`(\sum r)^2 / (n \sum r^2)`, 1 if all ratios are equal, and NaN if one is
      infinite or all are 0.

    Args:
        log_probs: ``(...)``, floating-point, in nats.
        sampler_log_probs: ``(...)``, floating-point, in nats.
        row_mask: ``(...)``, bool or 0/1; tokens where it is 0 may have any log-probs.

    Returns:
        `RatioReport`, whose ``to_dict()`` has these numbers by name. They are float64, without a gradient, and stay on
        the device until they are read. All but ``tokens`` are NaN if all tokens are masked. A token to which the
        trainer gives the log-prob -inf has the ratio 0.

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype, shape or device.

    Reference: J. Schulman, "Approximating KL Divergence", http://joschu.net/blog/kl-approx.html.
    """
    for value, name in ((log_probs, "log_probs"), (sampler_log_probs, "sampler_log_probs")):
        if not isinstance(value, Tensor) or value.dtype not in FLOATS:
            raise TypeError(f"{name}: expected a floating-point tensor, got {described(value)}")
        check_dense(value, name)
    if sampler_log_probs.shape != log_probs.shape or sampler_log_probs.device != log_probs.device:
        raise ValueError(f"sampler_log_probs: expected the shape and device of log_probs, {short(log_probs)}, "
                         f"got {short(sampler_log_probs)}")  # fmt: skip
    if row_mask is not None:
        check_mask(row_mask, log_probs.shape, log_probs, "row_mask", "log_probs")
    difference = log_probs.double().flatten() - sampler_log_probs.double().flatten()
    kept = torch.ones_like(difference, dtype=torch.bool) if row_mask is None else row_mask.flatten() != 0
    count = kept.sum().double()
    d = difference.where(kept, 0.0)
    size, ratio = d.abs(), d.exp().where(kept, 0.0)

    def mean(values: Tensor) -> Tensor:
        return values.sum() / count

    spread = quantiles(size.where(kept, torch.inf), count.where(~size.isnan().any(), 0.0))  # as torch's, NaN if one is
    values = [count, mean(d), mean(size), *spread, mean((ratio - 1).abs().where(kept, 0.0))]
    values += [mean(-d), mean(d.square() / 2), mean((ratio - 1 - d).where(d != torch.inf, d).where(kept, 0.0))]
    # Of the ratios over the largest one: squares of the ratios themselves might overflow, or all be 0.
    log_ratio = d.where(kept, -torch.inf)
    scaled = (log_ratio - torch.cat([log_ratio, log_ratio.new_full((1,), -torch.inf)]).amax()).exp()
    return RatioReport(torch.stack([*values, scaled.sum().square() / (count * scaled.square().sum())]))


def quantiles(values: Tensor, count: Tensor) -> tuple[Tensor, ...]:
    """The `QUANTILES` and the maximum of the first ``count`` values in ascending order; NaN without any.

    The place of a quantile depends on ``count``, a tensor; `torch.quantile` takes a number.
    """
    if not len(values):
        return (count.new_full((), torch.nan),) * (len(QUANTILES) + 1)
    ordered = values.sort()[0]
    place = torch.stack([(count - 1) * q for q in (*QUANTILES, 1.0)])  # a tensor of numbers would be copied
    low, high = (ordered.gather(0, p.long().clamp(0, len(values) - 1)) for p in (place.floor(), place.ceil()))
    between = torch.where(high == low, low, low + (high - low) * (place - place.floor()))
    return between.where(count > 0, torch.nan).unbind()
