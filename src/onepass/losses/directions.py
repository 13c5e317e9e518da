"""The direction of a divergence between teacher and student, checked; for all distillation losses."""

from onepass.core.checks import check_choice, check_number
from onepass.core.options import DIRECTIONS, Direction

BETA = 0.5  # the default; only a Jensen-Shannon divergence has another


def check_direction(direction: Direction, beta: float) -> tuple[Direction, float]:
    """Check the arguments; a Jensen-Shannon divergence with ``beta`` 0 is "forward" and with 1 "reverse".

    What is returned may be passed again.
    """
    check_choice(direction, "direction", DIRECTIONS)
    beta = check_number(beta, "beta", 0, 1, open_low=False)
    if direction == "jsd" and beta in (0.0, 1.0):
        return ("reverse" if beta else "forward"), BETA
    if direction != "jsd" and beta != BETA:
        raise ValueError(f"beta: expected direction='jsd' with it, got beta={beta} with direction={direction!r}")
    return direction, beta
