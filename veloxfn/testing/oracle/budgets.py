"""Budgets over layers: rows dealt one by one, in exact fractions."""

from __future__ import annotations

from fractions import Fraction

__all__ = ["dealt"]


def dealt(layers: int, mean: int, floor: int, *, beta: float | None = None, taper: float | None = None) -> list[int]:
    """Budgets of a pyramid: every layer has `floor`, and the rest goes to the largest share / (2 dealt + 1).

    Shares above the floor fall linearly from the first layer to the last. With `beta` the last one is
    (mean - floor) / beta and the first 2 (mean - floor) minus that. With `taper` they are (mean - floor) * taper and
    (mean - floor) * (2 - taper); negative ones count 0, and the others give what that costs in proportion.
    """
    room = Fraction(mean - floor)
    if beta is not None:
        last = room / Fraction(beta)
    else:
        assert taper is not None
        last = room - room * (Fraction(taper) - 1)
    first = 2 * room - last
    shares = [first + (last - first) * Fraction(layer, max(1, layers - 1)) for layer in range(layers)]
    if layers == 1:
        shares = [room]
    above = [max(Fraction(0), share) for share in shares]
    shares = [share * layers * room / sum(above) for share in above] if room else above
    given = [0] * layers
    for _ in range(layers * (mean - floor)):
        given[max(range(layers), key=lambda layer: (shares[layer] / (2 * given[layer] + 1), -layer))] += 1
    return [floor + rows for rows in given]
