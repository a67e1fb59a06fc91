"""How many rows each layer keeps: integers in, integers out."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from fractions import Fraction
from itertools import accumulate, combinations, pairwise

from veloxfn import checks

__all__ = ["clusters", "pyramid", "squeeze"]


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


def squeeze(cosines: Iterable[float], mean: int, p: float, *, floor: int = 1) -> tuple[int, ...]:
    """Budgets by what attention changes in each layer (SqueezeAttention, arXiv 2404.04793).

    A layer is the less useful the more alike the hidden states before and after its attention are. The layers fall into
    three groups by `clusters`; those of the least useful one get p * mean rows, rounded, or the floor, and the others
    share what that frees: rows that do not divide go to the earlier ones of them. One group, as with equal cosines,
    gets the mean.

    Measured: on a model of 30 layers and 135M parameters equal budgets lose less (one text, KL: h2o 0.045, p = 0.8
    0.057, p = 0.4 0.120): 27 layers are of the least useful group, and the other three get more rows than the text has.

    Args:
        cosines: of each layer, first layer first: mean over the tokens of a prompt of the cosine between the hidden
            state before the attention and that after it with the residual, -1 .. 1.
        mean: rows per layer on average.
        p: share of the mean that the least useful layers keep, 0 .. 1; 1 = the same for all.
        floor: least rows of a layer, 0 .. mean.

    Returns:
        One integer per layer: they sum to layers * mean, are at least `floor`, and none is lower for a larger mean.

    Raises:
        ValueError: no layers, or a number outside its range.
        TypeError: a number of another type.

    >>> squeeze([0.2, 0.5, 0.55, 0.9, 0.95], 100, 0.4)
    (140, 140, 140, 40, 40)
    """
    cosines = list(cosines)
    if not cosines:
        raise ValueError("cosines must have one number per layer, got none")
    for layer, cosine in enumerate(cosines):
        checks.number(f"cosines[{layer}]", cosine, low=-1.0, high=1.0)
    checks.integer("mean", mean, low=1)
    checks.number("p", p, low=0.0, high=1.0)
    checks.integer("floor", floor, low=0)
    if mean < floor:
        raise ValueError(f"mean must be >= floor, got mean={mean}, floor={floor}")
    groups = clusters(cosines)
    least = max(groups)
    if least == 0:
        return (mean,) * len(cosines)
    low = max(floor, round(Fraction(p) * mean))
    useful = [layer for layer, group in enumerate(groups) if group != least]
    share, left = divmod(len(cosines) * mean - (len(cosines) - len(useful)) * low, len(useful))
    dealt = {layer: share + (place < left) for place, layer in enumerate(useful)}
    return tuple(dealt.get(layer, low) for layer in range(len(cosines)))


def clusters(numbers: Sequence[float]) -> tuple[int, ...]:
    """One-dimensional 3-means, exactly: the grouping with the least sum of squared distances to the groups' means.

    Of groupings that are equally good it is the one with the fewest numbers in the highest group, then in the middle
    one. Equal numbers share a group, so that there may be fewer than three.

    Args:
        numbers: finite.

    Returns:
        The group of each, 0 = the lowest.

    >>> clusters([0.9, 0.1, 0.5, 0.95, 0.15])
    (2, 0, 1, 2, 0)
    """
    values = sorted(set(numbers))
    if len(values) <= 3:
        return tuple(values.index(number) for number in numbers)
    ratios = [Fraction(value) for value in values]
    scale = math.lcm(*(ratio.denominator for ratio in ratios))
    counts = [sum(number == value for number in numbers) for value in values]
    count = [0, *accumulate(counts)]
    total = [0, *accumulate(int(ratio * scale) * times for ratio, times in zip(ratios, counts, strict=True))]

    def explained(cuts: tuple[int, int]) -> Fraction:  # what the grouping takes off the sum of squares, scaled
        ends = pairwise((0, *cuts, len(values)))
        parts = [Fraction((total[stop] - total[start]) ** 2, count[stop] - count[start]) for start, stop in ends]
        return parts[0] + parts[1] + parts[2]

    middle, high = max(combinations(range(1, len(values)), 2), key=lambda cuts: (explained(cuts), cuts[1], cuts[0]))
    return tuple((number >= values[middle]) + (number >= values[high]) for number in numbers)
