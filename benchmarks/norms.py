"""Where K-norm has an advantage and where it has none: keys of low norm that are read much, and isotropic keys.

    python benchmarks/norms.py [--quick] [--rows N] [--json FILE] [--plot FILE]

Made-up streams of 512 tokens, one per row, cut to 32 or 64 rows, then 32 queries that read what is left.
"low norm, high attention": every key but 8 carries a long component against the queries, as sinks and keys of low norm
do in trained models; the 8 planted ones lack it, are short, and receive most attention. "isotropic": keys and queries
are normal, and a key's norm says nothing of the direction that queries ask for. Reported: the share of the full cache's
attention that falls on kept rows, the share of planted tokens kept, and the error of the attention output.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import machine
import mlx.core as mx
import random_eviction
import reporting

import veloxfn
from veloxfn import Policy, h2o, knorm, streaming_llm

TOKENS, DIM, PROBES, PLANTED, SINK = 512, 64, 32, 8, 4
AGAINST = 8.0  # length of the component against the queries; the rest of a key is about as long
PLANTED_GEOMETRY, ISOTROPIC = GEOMETRIES = ("low norm, high attention", "isotropic")
COLUMNS = ("geometry", "budget", "method", "attention kept", "planted kept (95 %)", "output error")


class Streams(NamedTuple):
    """Tokens of many rows, and queries that come after them."""

    queries: mx.array  # [N, T, D], the tokens' own
    keys: mx.array  # [N, T, D]
    values: mx.array  # [N, T, D]
    probes: mx.array  # [N, P, D]
    planted: mx.array  # [N, T] bool


class Cell(NamedTuple):
    """What one method did in one setting; means over rows with half the width of their 95 % interval."""

    geometry: str
    budget: int
    method: str
    rows: int
    planted_kept: int  # of 8 * rows
    attention: float
    attention_margin: float
    error: float
    error_margin: float

    @property
    def recall(self) -> reporting.Interval:
        """Share of planted tokens kept."""
        return reporting.wilson(self.planted_kept, PLANTED * self.rows)


def make_streams(geometry: str, rows: int, *, seed: int = 0) -> Streams:
    """Streams of float32 with values normal(0, 1).

    Planted: keys normal(0, 1) - 8 u for a unit vector u of the row, without the second term for 8 tokens outside the
    sinks and the last 64; queries normal(0, 0.5) + 5 u. Isotropic: keys and queries normal(0, 1), and "planted" are 8
    ordinary tokens.
    """
    a, b, c, d, e = mx.random.split(mx.random.key(seed), 5)
    shape = (rows, TOKENS, DIM)
    u = mx.random.normal((rows, 1, DIM), key=a)
    u = u / mx.linalg.norm(u, axis=-1, keepdims=True)
    lottery = mx.random.uniform(shape=(rows, TOKENS - SINK - 64), key=b)
    chosen = lottery <= mx.sort(lottery, axis=1)[:, PLANTED - 1 : PLANTED]
    planted = mx.pad(chosen, [(0, 0), (SINK, 64)])
    keys = mx.random.normal(shape, key=c)
    if geometry == PLANTED_GEOMETRY:
        keys = mx.where(planted[..., None], keys, keys - AGAINST * u)
    asked = mx.random.normal((rows, TOKENS + PROBES, DIM), key=d)
    if geometry == PLANTED_GEOMETRY:
        asked = 0.5 * asked + 5.0 * u
    values = mx.random.normal(shape, key=e)
    return Streams(asked[:, :TOKENS], keys, values, asked[:, TOKENS:], planted)


def methods(budget: int) -> dict[str, Policy[Any]]:
    """The methods by name, all with 4 sinks."""
    shared = {"budget": budget, "sink": SINK}
    return {
        "knorm, keep low": veloxfn.policy(knorm.Config(**shared)),
        "knorm, keep high": veloxfn.policy(knorm.Config(**shared, keep="high")),
        "h2o": veloxfn.policy(h2o.Config(**shared, recent=0)),
        "streaming_llm": veloxfn.policy(streaming_llm.Config(**shared)),
        "random": random_eviction.policy(random_eviction.Config(**shared)),
    }


def weights(queries: mx.array, keys: mx.array) -> mx.array:
    """Attention [N, S, n] of queries [N, S, D] over keys [N, n, D]."""
    return mx.softmax(queries @ keys.swapaxes(1, 2) / math.sqrt(DIM), axis=-1)


def run(policy: Policy[Any], streams: Streams, geometry: str, method: str) -> Cell:
    """Feed the tokens in blocks of 64 and let the probes read what is left."""
    rows = streams.keys.shape[0]
    state = policy.init_state(rows, DIM, dtype=mx.float32)
    for start in range(0, TOKENS, 64):
        now = slice(start, start + 64)
        evidence = {"queries": streams.queries[:, None, now]} if policy.config.needs_queries else {}
        state = policy.update_batched(state, streams.keys[:, now], streams.values[:, now], **evidence)
        mx.eval(state)
    positions, (keys, values) = veloxfn.kept_positions(state), policy.get_kv(state)
    full = weights(streams.probes, streams.keys)
    attention = mx.take_along_axis(mx.mean(full, axis=1), positions, axis=1).sum(axis=1)
    wanted, output = full @ streams.values, weights(streams.probes, keys) @ values
    error = mx.mean(mx.linalg.norm(output - wanted, axis=-1) / mx.linalg.norm(wanted, axis=-1), axis=1)
    margin = reporting.Z / math.sqrt(rows)
    return Cell(
        geometry,
        policy.config.budget,
        method,
        rows,
        planted_kept=int(mx.take_along_axis(streams.planted, positions, axis=1).sum().item()),
        attention=mx.mean(attention).item(),
        attention_margin=margin * mx.std(attention).item(),
        error=mx.mean(error).item(),
        error_margin=margin * mx.std(error).item(),
    )


def measure(budgets: tuple[int, ...], rows: int) -> Iterator[Cell]:
    """One cell per geometry, budget and method; all methods read the same streams."""
    for geometry, budget in itertools.product(GEOMETRIES, budgets):
        streams = make_streams(geometry, rows)
        for method, policy in methods(budget).items():
            yield run(policy, streams, geometry, method)


def line(cell: Cell) -> str:
    """A cell as one line of the table."""
    attention = f"{cell.attention:.3f} ± {cell.attention_margin:.3f}"
    error = f"{cell.error:.3f} ± {cell.error_margin:.3f}"
    return reporting.row(cell.geometry, cell.budget, cell.method, attention, cell.recall, error)


def report(cells: list[Cell]) -> dict[str, Any]:
    """Everything measured, for the JSON file."""
    setting = {"tokens": TOKENS, "dim": DIM, "probes": PROBES, "planted": PLANTED, "sink": SINK, "against": AGAINST}
    return {"setting": setting, "cells": [{**cell._asdict(), "recall": cell.recall._asdict()} for cell in cells]}


def plot(cells: list[Cell], path: Path) -> None:
    """Attention kept, one panel per geometry and budget."""
    budgets = sorted({cell.budget for cell in cells})
    drawn, axes = reporting.figure(len(GEOMETRIES), len(budgets), width=3.6, height=2.2, sharex=True, sharey=True)
    for (row, geometry), (column, budget) in itertools.product(enumerate(GEOMETRIES), enumerate(budgets)):
        panel = axes[row][column]
        shown = [cell for cell in reversed(cells) if (cell.geometry, cell.budget) == (geometry, budget)]
        panel.barh(
            [cell.method for cell in shown],
            [cell.attention for cell in shown],
            xerr=[cell.attention_margin for cell in shown],
            color="#9bb8d3",
            ecolor="#1f3b57",
        )
        panel.set_title(f"{geometry}: budget {budget}", fontsize=9)
    drawn.supxlabel("share of the full cache's attention on kept rows (line: 95 %)", fontsize=9)
    reporting.save(drawn, path)


def main(arguments: list[str] | None = None) -> None:
    parser = reporting.parser(__doc__, quick="budget 32, 16 rows")
    parser.add_argument("--rows", type=int, help="streams per cell (default 200; quick: 16)")
    options = parser.parse_args(arguments)
    rows = options.rows or (16 if options.quick else 200)
    print(reporting.head(*COLUMNS))
    cells = []
    for cell in measure((32,) if options.quick else (32, 64), rows):
        cells.append(cell)
        print(line(cell), flush=True)
    reporting.write(options.json, **report(cells))
    if options.plot:
        plot(cells, options.plot)


if __name__ == "__main__":
    machine.prefer_openblas()
    main()
