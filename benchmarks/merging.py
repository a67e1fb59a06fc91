"""What merging does that dropping does not: CaM's rules, gate on and off, on streams made for and against them.

    python benchmarks/merging.py [--quick] [--rows N] [--json FILE] [--plot FILE]

Made-up streams of 256 tokens, one per row, cut to 64 rows one token at a time, then 32 queries that read what is left.
"redundant": tokens come from 32 clusters and share most of their key and of their value with the cluster; queries ask
for one cluster. "independent": keys, values and queries are normal. The loser is always h2o's; the rules differ in what
becomes of its value. Reported: the error of the attention output against the full cache, how far the sum of the kept
values is from the sum of all, and the share of rows that keep h2o's positions.
`ablations.py merging` is the same comparison on a real model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import machine
import mlx.core as mx
import reporting

import veloxfn
from veloxfn import Policy, cam, h2o

TOKENS, BUDGET, DIM, PROBES, CLUSTERS, SINK = 256, 64, 32, 32, 32, 4
GEOMETRIES = ("redundant", "independent")
OFF = "off (h2o)"
RULES: dict[str, dict[str, Any]] = {
    "window, plain sum": {"targets": "window", "merge": "sum", "normalise": False},
    "window, sum": {"targets": "window", "merge": "sum"},
    "window, similarity": {"targets": "window", "merge": "similarity"},
    "nearest, mean": {"targets": "nearest", "merge": "mean"},
    "nearest, similarity": {"targets": "nearest", "merge": "similarity"},
}
"""Normalised, "sum" and "mean" are the same rule: a loser's weight is 1 / targets, and all weights are divided by."""
COLUMNS = ("geometry", "rule", "gate", "output error", "value sum off by", "h2o's positions")


class Streams(NamedTuple):
    """Tokens of many rows, and queries that come after them."""

    queries: mx.array  # [N, T, D], the tokens' own
    keys: mx.array  # [N, T, D]
    values: mx.array  # [N, T, D]
    probes: mx.array  # [N, P, D]


class Cell(NamedTuple):
    """What one rule did in one geometry."""

    geometry: str
    rule: str
    gate: bool | None  # None = merging is off
    rows: int
    error: float  # mean over rows and probes of |y - full| / |full|
    error_margin: float  # half of its 95 % interval
    value_sum: float  # mean over rows of |sum of kept values - sum of all| / |sum of all|
    same_positions: float  # share of rows whose kept positions are h2o's


def make_streams(geometry: str, rows: int, *, seed: int = 0) -> Streams:
    """Streams of float32.

    Redundant: keys and values are their cluster's, normal(0, 1), plus normal(0, 0.3); queries are 1.5 times a cluster's
    key plus normal(0, 0.3). Independent: all normal(0, 1).
    """
    a, b, c, d = mx.random.split(mx.random.key(seed), 4)
    count = TOKENS + PROBES
    if geometry == "independent":
        keys, values, queries = (mx.random.normal((rows, count, DIM), key=key) for key in (a, b, c))
    else:
        centres = mx.random.normal((rows, CLUSTERS, 2 * DIM), key=a)
        drawn = mx.random.randint(0, CLUSTERS, (2, rows, count, 1), key=b)
        own = mx.take_along_axis(centres, drawn[0], axis=1) + 0.3 * mx.random.normal((rows, count, 2 * DIM), key=c)
        keys, values = mx.split(own, 2, axis=2)
        asked = mx.take_along_axis(centres[..., :DIM], drawn[1], axis=1)
        queries = 1.5 * asked + 0.3 * mx.random.normal((rows, count, DIM), key=d)
    return Streams(queries[:, :TOKENS], keys[:, :TOKENS], values[:, :TOKENS], queries[:, TOKENS:])


def methods() -> dict[tuple[str, bool | None], Policy[Any]]:
    """Policies by rule and gate, h2o first; all choose the same loser, one at a time."""
    shared = {"budget": BUDGET, "sink": SINK, "cadence": "token"}
    made: dict[tuple[str, bool | None], Policy[Any]] = {(OFF, None): veloxfn.policy(h2o.Config(**shared))}
    for rule, settings in RULES.items():
        for gate in (True, False):
            made[rule, gate] = veloxfn.policy(cam.Config(**shared, **settings, gate=gate))
    return made


def weights(queries: mx.array, keys: mx.array) -> mx.array:
    """Attention [N, S, n] of queries [N, S, D] over keys [N, n, D]."""
    return mx.softmax(queries @ keys.swapaxes(1, 2) / math.sqrt(DIM), axis=-1)


def measure(rows: int) -> Iterator[Cell]:
    """One cell per geometry, rule and gate; all rules read the same streams."""
    for geometry in GEOMETRIES:
        streams = make_streams(geometry, rows)
        wanted = weights(streams.probes, streams.keys) @ streams.values
        total = streams.values.sum(axis=1)
        plain = None
        for (rule, gate), policy in methods().items():
            state = policy.init_state(rows, DIM, dtype=mx.float32)
            state = policy.update_batched(state, streams.keys, streams.values, queries=streams.queries[:, None])
            mx.eval(state)
            positions, (keys, values) = veloxfn.kept_positions(state), policy.get_kv(state)
            plain = positions if plain is None else plain
            output = weights(streams.probes, keys) @ values
            error = mx.mean(mx.linalg.norm(output - wanted, axis=-1) / mx.linalg.norm(wanted, axis=-1), axis=1)
            off = mx.linalg.norm(values.sum(axis=1) - total, axis=-1) / mx.linalg.norm(total, axis=-1)
            yield Cell(
                geometry,
                rule,
                gate,
                rows,
                error=mx.mean(error).item(),
                error_margin=reporting.Z * mx.std(error).item() / math.sqrt(rows),
                value_sum=mx.mean(off).item(),
                same_positions=mx.mean((positions == plain).all(axis=1).astype(mx.float32)).item(),
            )


def line(cell: Cell) -> str:
    """A cell as one line of the table."""
    gate = {None: "", True: "on", False: "off"}[cell.gate]
    error = f"{cell.error:.3f} ± {cell.error_margin:.3f}"
    return reporting.row(
        cell.geometry, cell.rule, gate, error, f"{cell.value_sum:.2g}", f"{100 * cell.same_positions:.0f} %"
    )


def report(cells: list[Cell]) -> dict[str, Any]:
    """Everything measured, for the JSON file."""
    setting = {"tokens": TOKENS, "budget": BUDGET, "dim": DIM, "probes": PROBES, "clusters": CLUSTERS, "sink": SINK}
    return {"setting": setting, "rules": RULES, "cells": [cell._asdict() for cell in cells]}


def plot(cells: list[Cell], path: Path) -> None:
    """Output error by rule, with the gate on and off, one panel per geometry."""
    drawn, axes = reporting.figure(1, len(GEOMETRIES), width=4.2, height=3, sharey=True)
    names = [OFF, *RULES]
    for panel, geometry in zip(axes[0], GEOMETRIES, strict=True):
        for cell in cells:
            if cell.geometry == geometry:
                place = len(names) - 1 - names.index(cell.rule) + {None: 0.0, True: 0.2, False: -0.2}[cell.gate]
                colour = {None: "#c9c9c9", True: "#9bb8d3", False: "#d3a69b"}[cell.gate]
                panel.barh(place, cell.error, height=0.38, color=colour, xerr=cell.error_margin, ecolor="#1f3b57")
        panel.set_yticks(range(len(names)), names[::-1])
        panel.set_title(geometry, fontsize=9)
    drawn.supxlabel("error of the attention output (blue: gate on, red: gate off; line: 95 %)", fontsize=9)
    reporting.save(drawn, path)


def main(arguments: list[str] | None = None) -> None:
    parser = reporting.parser(__doc__, quick="16 rows")
    parser.add_argument("--rows", type=int, help="streams per cell (default 200; quick: 16)")
    options = parser.parse_args(arguments)
    print(reporting.head(*COLUMNS))
    cells = []
    for cell in measure(options.rows or (16 if options.quick else 200)):
        cells.append(cell)
        print(line(cell), flush=True)
    reporting.write(options.json, **report(cells))
    if options.plot:
        plot(cells, options.plot)


if __name__ == "__main__":
    machine.prefer_openblas()
    main()
