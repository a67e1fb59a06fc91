"""Interleaved timing: A B B A A B ..., one figure per round and side, ratios taken inside a round.

A machine that other work shares drifts by tens of per cent within seconds. Two sides that alternate see the same drift,
so their ratio is far steadier than either time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

__all__ = ["Ratio", "Spread", "interleave", "ratio", "spread"]


class Spread(NamedTuple):
    """Seconds per call of one side: the fastest round, the median, and the quartiles around it."""

    best: float
    median: float
    low: float
    high: float


class Ratio(NamedTuple):
    """How many times slower one side is than another.

    `median`, `low` and `high` are median and quartiles over the rounds; `best` compares the fastest round of each side,
    which is what a machine with nothing else to do would show.
    """

    median: float
    low: float
    high: float
    best: float


def interleave(
    sides: Mapping[str, Callable[[], None]], *, rounds: int, calls: int, warmup: int = 5
) -> dict[str, list[float]]:
    """Time the sides in turns.

    Args:
        sides: name -> one call that leaves nothing lazy behind.
        rounds: how often every side has its turn; the order is reversed every other round.
        calls: calls of one turn; the turn's figure is their median.
        warmup: calls of every side before the first round, not timed (compilation, caches).

    Returns:
        Seconds per call for every side, one figure per round.
    """
    for call in sides.values():
        for _ in range(warmup):
            call()
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds):
        for name in list(sides)[:: 1 if number % 2 == 0 else -1]:
            seconds[name].append(_turn(sides[name], calls))
    return seconds


def _turn(call: Callable[[], None], calls: int) -> float:
    taken = []
    for _ in range(calls):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def _quartiles(figures: Sequence[float]) -> tuple[float, float]:
    if len(figures) < 2:
        return figures[0], figures[0]
    low, _, high = statistics.quantiles(figures, n=4, method="inclusive")
    return low, high


def spread(figures: Sequence[float]) -> Spread:
    """The rounds of one side in four numbers."""
    low, high = _quartiles(figures)
    return Spread(best=min(figures), median=statistics.median(figures), low=low, high=high)


def ratio(slower: Sequence[float], faster: Sequence[float]) -> Ratio:
    """The rounds of two sides as one ratio: slower / faster, taken round by round."""
    each = [a / b for a, b in zip(slower, faster, strict=True)]
    low, high = _quartiles(each)
    return Ratio(median=statistics.median(each), low=low, high=high, best=min(slower) / min(faster))
