"""Attend and evict in pure MLX on a CPU, against MLX's attention alone over the same rows.

    python benchmarks/attend.py [--quick] [--dtypes float32,float16,bfloat16] [--json FILE]

One query per row and head over budget + 1 rows of keys and values that are written already. Ours gives the output,
adds the mass that every slot received, and frees the weakest (H2O, compiled); attention alone gives the output, plainly
and compiled: the faster of the two counts, round by round.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import layers
import machine
import mlx.core as mx
import reporting
import timing
from sides import Shape, Traced
from steps import AT_MOST, DTYPES, Row
from tables import duration, figure, record

from veloxfn import h2o

TARGET = (AT_MOST, 1.25)  # of float32
SHAPES = [
    Shape(rows, dim, heads, budget)
    for rows in (8, 32)
    for dim in (64, 128)
    for budget in (512, 2048, 8192)
    for heads in (1, 4)
]
QUICK = [Shape(2, 16, heads, 64) for heads in (1, 4)]


def compare(shape: Shape, dtype: str, *, rounds: int, most_calls: int, bound: bool) -> Iterator[Row]:
    """(attend + evict) / attention at one size, and what each needs in memory."""
    config, kind = h2o.Config(budget=shape.budget), DTYPES[dtype]
    parties = {
        "attend + evict": layers.own(layers.attending_only, config, shape, kind, 1),
        "attention": layers.sdpa(shape, kind, 1),
        "attention, compiled": layers.sdpa(shape, kind, 1, wrapped=Traced),
    }
    calls = max(1, min(most_calls, 2**25 // (shape.rows * shape.budget * shape.dim)))
    seconds = timing.interleave(dict(parties), rounds=rounds, calls=calls)
    fastest = [min(pair) for pair in zip(seconds["attention"], seconds["attention, compiled"], strict=True)]
    value = timing.ratio(seconds["attend + evict"], fastest)
    peaks = ", ".join(f"{name} {layers.peak_above_held(party) / 2**20:.2f} MiB" for name, party in parties.items())
    spreads = {name: timing.spread(figures) for name, figures in seconds.items()}
    sizes = {**shape._asdict(), "dtype": dtype, "tokens": 1}
    target = TARGET if bound and dtype == "float32" else None
    yield Row("(attend + evict) / attention", sizes, value, "x", target, spreads, f"memory at its peak: {peaks}")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny sizes and few rounds: not to quote")
    parser.add_argument("--dtypes", default=",".join(DTYPES), help=f"comma between (default {','.join(DTYPES)})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file")
    options = parser.parse_args(arguments)
    dtypes = options.dtypes.split(",")
    if unknown := [dtype for dtype in dtypes if dtype not in DTYPES]:
        parser.error(f"--dtypes {', '.join(unknown)}: none of {', '.join(DTYPES)}")
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    try:
        measure(options, dtypes)
    finally:
        mx.set_default_device(before)


def measure(options: argparse.Namespace, dtypes: list[str]) -> None:
    """All sizes, written after each."""
    print(json.dumps(machine.describe("veloxfn")), flush=True)
    print(reporting.head("N", "G", "D", "budget", "dtype", "(attend + evict) / attention", "times"), flush=True)
    rows: list[dict[str, Any]] = []
    effort = {"rounds": 2, "most_calls": 2} if options.quick else {"rounds": 11, "most_calls": 20}
    for dtype in dtypes:
        for shape in QUICK if options.quick else SHAPES:
            for row in compare(shape, dtype, bound=not options.quick, **effort):
                told = record(row)
                rows.append(told)
                times = "; ".join(f"{name} {duration(side['median'])}" for name, side in told["seconds"].items())
                sizes = (shape.rows, shape.heads, shape.dim, shape.budget, dtype)
                print(reporting.row(*sizes, figure(told, long=True), times), flush=True)
            mx.clear_cache()
            reporting.write(options.json, script="attend", quick=options.quick, rows=rows)


if __name__ == "__main__":
    machine.prefer_openblas()
    main()
