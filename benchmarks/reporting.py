"""What the experiments share: their options, intervals, Markdown tables, JSON and figures."""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import machine

__all__ = ["Interval", "figure", "head", "mean", "parser", "row", "save", "wilson", "write"]

Z = 1.959964  # 95 % of a normal distribution lie within Z deviations


class Interval(NamedTuple):
    """A figure and its 95 % confidence interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})"


def wilson(hits: int, trials: int) -> Interval:
    """The rate hits / trials with Wilson's score interval.

    Raises:
        ValueError: no trials, or more hits than trials.
    """
    if trials < 1 or not 0 <= hits <= trials:
        raise ValueError(f"a rate needs 0 <= hits <= trials and trials >= 1, got {hits} of {trials}")
    rate = hits / trials
    centre = (rate + Z * Z / (2 * trials)) / (1 + Z * Z / trials)
    half = Z / (1 + Z * Z / trials) * math.sqrt(rate * (1 - rate) / trials + Z * Z / (4 * trials * trials))
    # The ends are exact: rounding must not leave a rate of 0 or 1 outside its interval.
    return Interval(rate, 0.0 if hits == 0 else centre - half, 1.0 if hits == trials else centre + half)


def mean(values: Sequence[float]) -> Interval:
    """The mean of independent values with its interval, Student's t for up to eight values.

    Raises:
        ValueError: fewer than two values.
    """
    if len(values) < 2:
        raise ValueError(f"an interval needs at least 2 values, got {len(values)}")
    deviations = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365}
    half = deviations.get(len(values), Z) * statistics.stdev(values) / math.sqrt(len(values))
    centre = statistics.fmean(values)
    return Interval(centre, centre - half, centre + half)


def head(*columns: str) -> str:
    """The first two lines of a Markdown table."""
    return f"| {' | '.join(columns)} |\n{len(columns) * '|---'}|"


def row(*cells: object) -> str:
    """One line of a Markdown table; floats with three digits behind the point."""
    return f"| {' | '.join(f'{cell:.3f}' if isinstance(cell, float) else str(cell) for cell in cells)} |"


def parser(doc: str | None, *, quick: str) -> argparse.ArgumentParser:
    """A parser with the options that every experiment takes; `quick` says what --quick does."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--quick", action="store_true", help=f"{quick}: not to quote")
    made.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file")
    made.add_argument("--plot", type=Path, metavar="FILE", help="draw the figures (needs matplotlib)")
    return made


def write(path: Path | None, *packages: str, **content: Any) -> None:
    """Write content with the machine's description as JSON; nothing without a path."""
    if path is not None:
        told = {"machine": machine.describe("veloxfn", *packages), **content}
        path.write_text(json.dumps(told, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def figure(rows: int, columns: int, *, width: float = 4.0, height: float = 3.0, **options: Any) -> tuple[Any, Any]:
    """A figure and its [rows, columns] axes, drawn without a display."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    size = (width * columns, height * rows)
    return pyplot.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False, **options)


def save(drawn: Any, path: Path) -> None:
    """Write a figure and forget it."""
    from matplotlib import pyplot

    drawn.savefig(path, dpi=120)
    pyplot.close(drawn)
