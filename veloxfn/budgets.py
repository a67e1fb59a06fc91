"""How many rows each layer keeps: integers in, integers out."""

from __future__ import annotations

import heapq
import math
from fractions import Fraction

from veloxfn import checks

__all__ = ["pyramid"]


def pyramid(
    layers: int, mean: int, *, beta: float | None = None, taper: float | None = None, floor: int
) -> tuple[int, ...]:
    """Budgets that fall linearly from the first layer to the last (PyramidKV, arXiv 2406.02069).

    beta: the last layer has (mean - floor) / beta above the floor and the first what keeps the mean: the paper.
    taper: the first layer has (mean - floor) * (taper - 1) above the mean and the last as much below it; layers that
    would fall below the floor get the floor, and the others give what that costs, in proportion.

    The integers are dealt row by row above the floor, to the layer whose real share is largest against what it has been
    dealt (share / (2 dealt + 1)), so that they follow the shares exactly in the sum and never fall when the mean rises.

    Args:
        layers: how many.
        mean: rows per layer on average.
        beta: >= 1; 1 = the same for all. Give exactly one of beta and taper.
        taper: >= 1; 1 = the same for all.
        floor: least rows of a layer, 0 .. mean.

    Returns:
        `layers` integers: they sum to layers * mean, never increase, are at least `floor`, and none is lower for a
        larger mean.

    Raises:
        ValueError: a number outside its range, or both or neither of beta and taper.

    >>> pyramid(4, 100, beta=4.0, floor=20)
    (160, 120, 80, 40)
    >>> pyramid(4, 100, taper=1.5, floor=20)
    (140, 113, 87, 60)
    """
    checks.integer("layers", layers, low=1)
    checks.integer("floor", floor, low=0)
    checks.integer("mean", mean, low=1)
    if mean < floor:
        raise ValueError(f"mean must be >= floor, got mean={mean}, floor={floor}")
    shares = _shares(layers, beta, taper)
    if layers == 1:
        return (mean,)
    total = layers * (mean - floor)
    # What every layer has when all is dealt, whatever the ties: c (total - layers / 2) / sum(c) - 1 / 2, rounded down.
    least = [
        max(0, math.floor(share * (total - Fraction(layers, 2)) / sum(shares) - Fraction(1, 2))) for share in shares
    ]
    dealt = [
        (-share / (2 * rows + 1), layer, rows) for layer, (share, rows) in enumerate(zip(shares, least, strict=True))
    ]
    heapq.heapify(dealt)
    for _ in range(total - sum(least)):
        _, layer, rows = dealt[0]
        heapq.heapreplace(dealt, (-shares[layer] / (2 * rows + 3), layer, rows + 1))
    return tuple(floor + rows for _, _, rows in sorted(dealt, key=lambda claim: claim[1]))


def _shares(layers: int, beta: float | None, taper: float | None) -> list[Fraction]:
    """What each layer has above the floor, relative to the mean's, first layer first."""
    if (beta is None) == (taper is None):
        raise ValueError(f"give exactly one of beta and taper, got beta={beta}, taper={taper}")
    if beta is not None:
        checks.number("beta", beta, low=1.0)
        width = 1 - 1 / Fraction(beta)
    if taper is not None:
        checks.number("taper", taper, low=1.0)
        width = Fraction(taper) - 1
    return [max(Fraction(0), 1 + width * (1 - Fraction(2 * layer, max(1, layers - 1)))) for layer in range(layers)]
