"""A token that is read little at first and matters late: who still has it when it matters?

    python benchmarks/late_riser.py [--quick] [--rows N] [--json FILE] [--plot FILE]

Made-up streams, one per row. Every query before the burst gives a weight of about 1 to each ordinary token, of 20 to
budget / 8 heavy ones and `early` to one token planted at position budget / 4; the last 32 queries, the burst, look for
the planted token and give it about four fifths of their attention over the full cache. Regimes: "late riser" (early =
0.1) and "stable" (early = 20, heavy from the start). Reported: the share of rows that hold the planted token after
budget / 2 evictions and when the burst begins, the error of the attention output against the full cache in the burst
and in the 32 steps before it, and bytes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import machine
import mlx.core as mx
import random_eviction
import reporting

import veloxfn
from veloxfn import Policy, cam, h2o, keyformer, knorm, snapkv, streaming_llm, tova

DIM, BURST, SINK = 32, 32, 4
HEAVY = 20.0  # weight of a heavy token before the burst; ordinary tokens have about 1
EARLY = {"late riser": 0.1, "stable": HEAVY}  # of the planted token
SHARE = 0.8  # of a burst query's attention, if all other logits were 0
TAUS = (0.0, 2.0, 6.0)
COLUMNS = (
    "regime",
    "tokens",
    "budget",
    "method",
    "held after budget / 2 evictions",
    "held at the burst (95 %)",
    "error before the burst",
    "error in the burst",
    "bytes per row",
)


class Setting(NamedTuple):
    """One cell's sizes."""

    tokens: int
    budget: int
    regime: str

    @property
    def planted(self) -> int:
        """Position of the planted token: behind the sinks, in the older half of the first full cache."""
        return self.budget // 4

    @property
    def recent(self) -> int:
        """Protected recent rows of every method: a quarter of the budget."""
        return self.budget // 4

    @property
    def heavy(self) -> list[int]:
        """Positions of the heavy tokens: spread over the older half of the stream, well behind the planted one."""
        count, first = self.budget // 8, self.planted + 8  # further away than SnapKV pools
        return [first + i * (self.tokens // 2 - first) // count for i in range(count)]


class Streams(NamedTuple):
    """Tokens of many rows."""

    queries: mx.array  # [N, T, D]
    keys: mx.array  # [N, T, D]
    values: mx.array  # [N, T, D]


class Cell(NamedTuple):
    """What one method did in one setting."""

    tokens: int
    budget: int
    regime: str
    method: str
    rows: int
    survived_early: int  # held after budget / 2 evictions
    survived: int  # held when the burst begins
    error_before: float  # mean over rows of |y - full| / |full| in the 32 steps before the burst
    error_before_deviation: float  # of that mean
    error: float  # the same in the burst
    error_deviation: float
    kept_bytes: int
    full_bytes: int

    @property
    def early_survival(self) -> reporting.Interval:
        """Share of rows that hold the planted token after budget / 2 evictions."""
        return reporting.wilson(self.survived_early, self.rows)

    @property
    def survival(self) -> reporting.Interval:
        """Share of rows that hold the planted token when the burst begins."""
        return reporting.wilson(self.survived, self.rows)


def make_streams(setting: Setting, rows: int, *, seed: int = 0) -> Streams:
    """Queries, keys and values [N, T, D], float32.

    A logit is q . k / sqrt(D). Coordinate 0 carries the early logits: log(early) for the planted key, log(20) for the
    heavy and normal(0, 0.3) for the others, asked for by every query before the burst. Coordinate 1 carries the
    burst's: only the planted key has it, only the burst's queries ask for it. The other coordinates are normal(0, 0.5)
    on both sides, which adds about normal(0, 0.24) to every logit. Values are normal(0, 1).
    """
    a, b, c, d = mx.random.split(mx.random.key(seed), 4)
    shape = (rows, setting.tokens, DIM)
    place = mx.arange(setting.tokens)[None, :]
    planted, burst = place == setting.planted, place >= setting.tokens - BURST
    wanted = math.log(SHARE / (1 - SHARE) * setting.tokens)
    ordinary = 0.3 * mx.random.normal(shape[:2], key=a)
    heavy = mx.where((place[..., None] == mx.array(setting.heavy)).any(axis=2), math.log(HEAVY), ordinary)
    heavy = mx.where(planted, math.log(EARLY[setting.regime]), heavy)
    rising = mx.broadcast_to(mx.where(planted, wanted, 0.0), shape[:2])
    asked = math.sqrt(DIM)
    early, late = (mx.broadcast_to(mx.where(on, asked, 0.0), shape[:2]) for on in (~burst, burst))

    def with_leading(first: mx.array, second: mx.array, key: mx.array) -> mx.array:
        noise = 0.5 * mx.random.normal((*shape[:2], DIM - 2), key=key)
        return mx.concatenate([first[..., None], second[..., None], noise], axis=2)

    return Streams(with_leading(early, late, b), with_leading(heavy, rising, c), mx.random.normal(shape, key=d))


def methods(setting: Setting) -> dict[str, Policy[Any]]:
    """The methods by name, all with the same budget, sinks and recent window."""
    sizes = {"budget": setting.budget, "sink": SINK}
    shared = {**sizes, "recent": setting.recent}

    def noisy(noise: str, tau: float) -> Policy[Any]:
        return veloxfn.policy(keyformer.Config(**shared, noise=noise, tau=tau))

    return {
        "h2o": veloxfn.policy(h2o.Config(**shared)),
        **{f"additive, tau {tau:g}": noisy("additive", tau) for tau in TAUS},
        **{f"logit, tau {tau:g}": noisy("logit", tau) for tau in TAUS if tau > 0},  # a logit is divided by tau
        # Dividing by tau alone makes weights more equal: that without noise.
        **{f"none, tau {tau:g}": noisy("none", tau) for tau in TAUS if tau > 0},
        "logit, tau 1 to 2": veloxfn.policy(keyformer.Config(**shared)),
        "cam": veloxfn.policy(cam.Config(**shared)),
        "tova": veloxfn.policy(tova.Config(**shared)),
        "snapkv": veloxfn.policy(snapkv.Config(**sizes, window=setting.recent)),
        "knorm": veloxfn.policy(knorm.Config(**shared)),
        "streaming_llm": veloxfn.policy(streaming_llm.Config(**sizes)),
        "random": random_eviction.policy(random_eviction.Config(**shared)),
    }


def attention(queries: mx.array, keys: mx.array, values: mx.array, mask: str | None = None) -> mx.array:
    """Output [N, S, D] of queries [N, S, D] over keys and values [N, n, D]."""
    return mx.fast.scaled_dot_product_attention(
        queries[:, None], keys[:, None], values[:, None], scale=DIM**-0.5, mask=mask
    )[:, 0]


def _stepper(policy: Policy[Any]) -> Callable[[Any, Streams], tuple[Any, mx.array]]:
    def step(state: Any, now: Streams) -> tuple[Any, mx.array]:
        state = policy.absorb(state, now.keys, now.values)
        output = attention(now.queries, *policy.candidates(state))
        asked = now.queries[:, None] if policy.config.needs_queries else None
        return policy.evict(state, queries=asked), output

    return mx.compile(step)


def run(policy: Policy[Any], streams: Streams, setting: Setting, method: str) -> Cell:
    """Feed the streams token by token, rows as independent noise streams."""
    rows = streams.keys.shape[0]

    def part(start: int, stop: int) -> Streams:
        return Streams(*(array[:, start:stop] for array in streams))

    first = part(0, setting.budget)  # nothing is evicted yet, so that one block is the same as single tokens
    evidence = {"queries": first.queries[:, None]} if policy.config.needs_queries else {}
    state = policy.init_state(rows, DIM, dtype=mx.float32)
    state = policy.update_batched(state, first.keys, first.values, **evidence)
    step, outputs, held = _stepper(policy), [], {}
    early, late = setting.budget * 3 // 2, setting.tokens - BURST
    for place in range(setting.budget, setting.tokens):
        if place in (early, late):
            held[place] = int((veloxfn.kept_positions(state) == setting.planted).any(axis=1).sum().item())
        state, output = step(state, part(place, place + 1))
        mx.eval(state, output)
        outputs.append(output)
    last = part(setting.tokens - 2 * BURST, setting.tokens).queries
    full = attention(last, streams.keys, streams.values, "causal")
    evicted = mx.concatenate(outputs[-2 * BURST :], axis=1)
    error = mx.unflatten(mx.linalg.norm(evicted - full, axis=-1) / mx.linalg.norm(full, axis=-1), 1, (2, BURST))
    errors, deviations = mx.mean(error, axis=(0, 2)), mx.std(mx.mean(error, axis=2), axis=0) / math.sqrt(rows)
    (before, during), (deviation_before, deviation_during) = errors.tolist(), deviations.tolist()
    return Cell(
        setting.tokens,
        setting.budget,
        setting.regime,
        method,
        rows,
        survived_early=held[early],
        survived=held[late],
        error_before=before,
        error_before_deviation=deviation_before,
        error=during,
        error_deviation=deviation_during,
        kept_bytes=int(veloxfn.kept_bytes(state).item()) // rows,
        full_bytes=int(veloxfn.full_bytes(state).item()) // rows,
    )


def measure(settings: list[Setting], rows: int) -> Iterator[Cell]:
    """One cell per setting and method; the methods of a setting read the same streams."""
    for setting in settings:
        streams = make_streams(setting, rows)
        for method, policy in methods(setting).items():
            yield run(policy, streams, setting, method)


def line(cell: Cell) -> str:
    """A cell as one line of the table."""
    size = f"{cell.kept_bytes} of {cell.full_bytes}"
    errors = [
        f"{error:.2f} ± {reporting.Z * deviation:.2f}"
        for error, deviation in (
            (cell.error_before, cell.error_before_deviation),
            (cell.error, cell.error_deviation),
        )
    ]
    return reporting.row(
        cell.regime, cell.tokens, cell.budget, cell.method, cell.early_survival, cell.survival, *errors, size
    )


def report(cells: list[Cell]) -> dict[str, Any]:
    """Everything measured, for the JSON file."""
    constants = {"dim": DIM, "burst": BURST, "sink": SINK, "heavy": HEAVY, "early": EARLY, "share": SHARE}
    told = [
        {
            **cell._asdict(),
            "early_survival": cell.early_survival._asdict(),
            "survival": cell.survival._asdict(),
        }
        for cell in cells
    ]
    return {"setting": constants, "cells": told}


def plot(cells: list[Cell], path: Path) -> None:
    """Survival with intervals, one panel per regime and size."""
    sizes = sorted({(cell.tokens, cell.budget) for cell in cells})
    drawn, axes = reporting.figure(len(EARLY), len(sizes), width=3.2, height=3.2, sharex=True, sharey=True)
    for (row, regime), (column, size) in itertools.product(enumerate(EARLY), enumerate(sizes)):
        panel = axes[row][column]
        shown = [cell for cell in cells if (cell.regime, cell.tokens, cell.budget) == (regime, *size)]
        for place, cell in enumerate(reversed(shown)):
            rate, low, high = cell.survival
            panel.barh(place, cell.early_survival.value, color="#dce7f0")
            panel.barh(place, rate, color="#7fa3c4")
            panel.plot([low, high], [place, place], color="#1f3b57", linewidth=2)
        panel.set_yticks(range(len(shown)), [cell.method for cell in reversed(shown)])
        panel.set_xlim(0, 1.02)
        panel.set_title(f"{regime}: {size[0]} tokens, budget {size[1]}", fontsize=9)
    caption = "rows that hold the planted token:\npale after budget / 2 evictions, dark at the burst (95 %)"
    drawn.supxlabel(caption, fontsize=9)
    reporting.save(drawn, path)


def main(arguments: list[str] | None = None) -> None:
    parser = reporting.parser(__doc__, quick="256 tokens, budget 32, 64 rows")
    parser.add_argument("--rows", type=int, help="streams per cell (default 400; quick: 64)")
    options = parser.parse_args(arguments)
    sizes = [(256, 32)] if options.quick else list(itertools.product((256, 512), (32, 64)))
    rows = options.rows or (64 if options.quick else 400)
    settings = [Setting(tokens, budget, regime) for regime in EARLY for tokens, budget in sizes]
    print(reporting.head(*COLUMNS))
    cells = []
    for cell in measure(settings, rows):
        cells.append(cell)
        print(line(cell), flush=True)
    reporting.write(options.json, **report(cells))
    if options.plot:
        plot(cells, options.plot)


if __name__ == "__main__":
    machine.prefer_openblas()
    main()
