"""Time and memory of eviction steps, side by side with veloxquant-mlx and with a design that moves rows.

    python benchmarks/steps.py [--quick] [--only TEXT] [--json FILE]

Both sides of a ratio run in the same process and alternate; README.md in this folder says what each figure means.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import machine
import mlx.core as mx
import sides
import timing
from sides import Shape, Stream

import veloxfn
from veloxfn import cam, h2o, keyformer, knorm, streaming_llm, tova

SINK, RECENT, DECAY = 4, 16, 0.98  # the peer's own defaults, for both sides
SHAPE = Shape()
DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
AT_LEAST, AT_MOST = ">=", "<="


class Effort(NamedTuple):
    """How long to measure."""

    rounds: int
    calls: int
    block_rounds: int


FULL, QUICK = Effort(rounds=30, calls=20, block_rounds=3), Effort(rounds=8, calls=10, block_rounds=1)


class Row(NamedTuple):
    """One line of the report: a ratio of two sides, or one number with its unit."""

    case: str
    sizes: dict[str, Any]
    value: timing.Ratio | float
    unit: str
    target: tuple[str, float] | None = None
    sides: dict[str, timing.Spread] | None = None
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the target holds; None without a target."""
        if self.target is None:
            return None
        figure = self.value.median if isinstance(self.value, timing.Ratio) else self.value
        relation, bound = self.target
        return figure >= bound if relation == AT_LEAST else figure <= bound


def h2o_config(**settings: Any) -> h2o.Config:
    """H2O with the peer's settings; `settings` replace some of them."""
    return h2o.Config(**{"budget": SHAPE.budget, "sink": SINK, "recent": RECENT, "decay": DECAY, **settings})


def compare(
    case: str,
    parties: dict[str, Callable[[], Stream]],
    *,
    against: str,
    shape: Shape,
    dtype: str,
    effort: Effort,
    targets: dict[str, tuple[str, float]],
    tokens: int = 1,
) -> Iterator[Row]:
    """Rows `against` / party for every party but `against` and those whose name starts with it.

    Several forms of the other side (name, name + " ...") may take part: the fastest of them, round by round, counts.
    """
    streams = {name: make() for name, make in parties.items()}
    step = tokens == 1
    rounds = effort.rounds if step else effort.block_rounds
    seconds = timing.interleave(
        dict(streams), rounds=rounds, calls=effort.calls if step else 1, warmup=5 if step else 1
    )
    for stream in streams.values():
        stream.check(shape.budget)
    others = [figures for name, figures in seconds.items() if name.startswith(against)]
    fastest = [min(figures) for figures in zip(*others, strict=True)]
    spreads = {name: timing.spread(figures) for name, figures in seconds.items()}
    sizes = {**shape._asdict(), "tokens": tokens, "dtype": dtype}
    for name, figures in seconds.items():
        if name.startswith(against):
            continue
        pair = {name: spreads[name], **{n: s for n, s in spreads.items() if n.startswith(against)}}
        yield Row(f"{case}, {name}", sizes, timing.ratio(fastest, figures), "x", targets.get(name), pair)


def h2o_steps(effort: Effort) -> Iterator[Row]:
    """One token at full budget, compiled: the settings of the peer, then other evidence and settings."""
    for dtype, kind in DTYPES.items():
        own = partial(sides.ours, h2o_config(), SHAPE, kind, evidence="queries")
        peers = {"peer": partial(_peer, kind), "peer, not compiled": partial(_peer, kind, compiled=False)}
        targets = {"attention": (AT_LEAST, 6.0), "queries": (AT_LEAST, 4.0 if dtype == "float32" else 2.5)}
        asked: dict[str, Callable[[], Stream]] = {"queries": own, "attention": partial(own, evidence="attention")}
        more: dict[str, Callable[[], Stream]] = {
            "age-normalised, half recent": partial(
                sides.ours, h2o.Config(budget=SHAPE.budget, age_normalised=True), SHAPE, kind, evidence="queries"
            ),
            "key proxy": partial(sides.ours, h2o_config(query_source="key_proxy"), SHAPE, kind),
            "4 query heads": partial(sides.ours, h2o_config(), SHAPE._replace(heads=4), kind, evidence="queries"),
            "queries, not compiled": partial(own, compiled=False),
        }
        for parties, bounds in ((asked, targets), (more, {})):
            yield from compare(
                "h2o step", parties | peers, against="peer", shape=SHAPE, dtype=dtype, effort=effort, targets=bounds
            )


def _peer(kind: mx.Dtype, **options: Any) -> Stream:
    return sides.peer_h2o(SHAPE, kind, sink=SINK, recent=RECENT, decay=DECAY, **options)


def h2o_blocks(effort: Effort) -> Iterator[Row]:
    """A block of 2048 tokens on a full cache and as a first prompt, and the peer's own rule, token by token."""
    for tokens, cadence, dtypes in ((2048, "block", DTYPES), (1024, "token", ["float32"])):
        for dtype in dtypes:
            kind = DTYPES[dtype]
            own = partial(sides.ours, evidence="queries", tokens=tokens, compiled=False)
            parties: dict[str, Callable[[], Stream]] = {
                "queries": partial(own, h2o_config(cadence=cadence), SHAPE, kind),
                "peer": partial(_peer, kind, tokens=tokens, compiled=False),
                "peer, compiled step in a loop": partial(_peer, kind, tokens=tokens),
            }
            yield from compare(
                f"h2o block, cadence {cadence}",
                parties,
                against="peer",
                shape=SHAPE,
                dtype=dtype,
                effort=effort,
                targets={"queries": (AT_LEAST, 4.0)} if cadence == "block" else {},
                tokens=tokens,
            )
    prompt = partial(sides.ours, evidence="queries", tokens=2048, compiled=False, empty=True)
    parties = {
        "queries": partial(prompt, h2o_config(), SHAPE, mx.float32),
        "peer": partial(_peer, mx.float32, tokens=2048, compiled=False, empty=True),
    }
    yield from compare(
        "h2o prompt into an empty cache",
        parties,
        against="peer",
        shape=SHAPE,
        dtype="float32",
        effort=effort,
        targets={},
        tokens=2048,
    )


def knorm_steps(effort: Effort) -> Iterator[Row]:
    """One token and a block of 2048, compiled on both sides."""
    config = knorm.Config(budget=SHAPE.budget, sink=SINK)
    for tokens in (1, 2048):
        for dtype, kind in DTYPES.items():
            parties: dict[str, Callable[[], Stream]] = {
                "norms": partial(sides.ours, config, SHAPE, kind, tokens=tokens),
                "peer": partial(sides.peer_knorm, SHAPE, kind, sink=SINK, tokens=tokens),
            }
            yield from compare(
                "knorm step" if tokens == 1 else "knorm block",
                parties,
                against="peer",
                shape=SHAPE,
                dtype=dtype,
                effort=effort._replace(block_rounds=4 * effort.block_rounds),
                targets={"norms": (AT_LEAST, 2.0)} if tokens == 1 else {},
                tokens=tokens,
            )


def other_steps(effort: Effort) -> Iterator[Row]:
    """One token of Keyformer, CaM and TOVA against the peer's, each side compiled where it can be."""
    schedule = {"tau_init": 1.0, "tau_end": 2.0, "anneal_steps": 256}
    noisy = keyformer.Config(budget=SHAPE.budget, sink=SINK, recent=RECENT, noise="additive", **schedule)
    merging = cam.Config(budget=SHAPE.budget, sink=SINK, recent=0, targets="nearest", merge="similarity")
    cases: dict[str, dict[str, Callable[[mx.Dtype], Stream]]] = {
        "keyformer step, additive": {
            "queries": lambda kind: sides.ours(noisy, SHAPE, kind, evidence="queries"),
            "key proxy": lambda kind: sides.ours(replace(noisy, query_source="key_proxy"), SHAPE, kind),
            "peer": lambda kind: sides.peer_keyformer(SHAPE, kind, sink=SINK, recent=RECENT, **schedule),
        },
        "keyformer step, logit": {
            "queries": lambda kind: sides.ours(replace(noisy, noise="logit"), SHAPE, kind, evidence="queries"),
            "peer's additive": lambda kind: sides.peer_keyformer(SHAPE, kind, sink=SINK, recent=RECENT, **schedule),
        },
        "cam step, nearest, no gate": {
            "queries": lambda kind: sides.ours(replace(merging, gate=False), SHAPE, kind, evidence="queries"),
            "peer": lambda kind: sides.peer_cam(SHAPE, kind, sink=SINK, merge="sim_weighted", gate=False),
        },
        "cam step, nearest, gate": {
            "queries": lambda kind: sides.ours(merging, SHAPE, kind, evidence="queries"),
            "peer": lambda kind: sides.peer_cam(SHAPE, kind, sink=SINK, merge="sim_weighted", gate=True),
        },
        "cam step, window": {
            "queries": lambda kind: sides.ours(cam.Config(budget=SHAPE.budget), SHAPE, kind, evidence="queries"),
            "peer's nearest": lambda kind: sides.peer_cam(SHAPE, kind, sink=SINK, merge="sim_weighted", gate=True),
        },
        "tova step": {
            "queries": lambda kind: sides.ours(
                tova.Config(budget=SHAPE.budget, sink=SINK), SHAPE, kind, evidence="queries"
            ),
            "peer": lambda kind: sides.peer_tova(SHAPE, kind, sink=SINK),
        },
    }
    for case, parties in cases.items():
        for dtype in ("float32", "float16"):
            made = {name: partial(make, DTYPES[dtype]) for name, make in parties.items()}
            yield from compare(case, made, against="peer", shape=SHAPE, dtype=dtype, effort=effort, targets={})


def budget_growth(effort: Effort) -> Iterator[Row]:
    """How much slower StreamingLLM's compiled step gets when the budget grows 8 times, next to a design that copies."""
    small, large = 256, 2048
    for rows, dim, target in ((8, 64, (AT_MOST, 2.0)), (32, 128, None)):
        streams: dict[str, Stream] = {}
        for budget in (small, large):
            shape = Shape(rows=rows, dim=dim, budget=budget)
            config = streaming_llm.Config(budget=budget, sink=SINK)
            streams[f"slots, budget {budget}"] = sides.ours(config, shape, mx.float32)
            streams[f"copying, budget {budget}"] = sides.gathering(shape, mx.float32, sink=SINK)
        seconds = timing.interleave(dict(streams), rounds=effort.rounds, calls=effort.calls)
        for name, stream in streams.items():
            stream.check(int(name.rsplit(" ", 1)[1]))
        sizes = {"rows": rows, "dim": dim, "budgets": [small, large], "tokens": 1, "dtype": "float32"}
        for design in ("slots", "copying"):
            pair = {f"budget {b}": seconds[f"{design}, budget {b}"] for b in (large, small)}
            yield Row(
                f"streaming_llm step, {rows} x {dim}, {design}: budget {large} against {small}",
                sizes,
                timing.ratio(*pair.values()),
                "x slower",
                target if design == "slots" else None,
                {name: timing.spread(figures) for name, figures in pair.items()},
            )


def memory(effort: Effort) -> Iterator[Row]:
    """Extra memory of one block of 4096 tokens, and growth of the peak over 1000 steps."""
    del effort  # memory does not depend on how often one looks
    tokens, steps = 4096, 1000
    for dtype, kind in DTYPES.items():
        block = sides.ours(h2o_config(), SHAPE, kind, evidence="queries", tokens=tokens, compiled=False)
        block()
        extra = _peak_above_active(block) / 2**20
        block.check(SHAPE.budget)
        whole = SHAPE.rows * tokens * (tokens + SHAPE.budget) * 4 / 2**20
        sizes = {**SHAPE._asdict(), "tokens": tokens, "dtype": dtype}
        note = f"all weights S x n at once: {whole:.0f} MiB"
        yield Row("h2o block, extra memory at its peak", sizes, extra, "MiB", (AT_MOST, whole / 4), note=note)

        step = sides.ours(h2o_config(), SHAPE, kind, evidence="queries")
        sizes = {**SHAPE._asdict(), "tokens": 1, "dtype": dtype}
        early = max(_peak_above_active(step) for _ in range(100)) / 2**20
        held = mx.get_active_memory()
        late = max(_peak_above_active(step) for _ in range(steps)) / 2**20
        growth = late - early + (mx.get_active_memory() - held) / 2**20
        note = f"K and V: {veloxfn.allocated_bytes(step.state) / 2**20:.2f} MiB"
        yield Row("h2o step, extra memory at its peak", sizes, early, "MiB", note=note)
        yield Row(f"h2o step, growth over {steps} steps", sizes, growth, "MiB", (AT_MOST, 0.01))


def _peak_above_active(call: Callable[[], None]) -> int:
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    call()
    return mx.get_peak_memory() - before


GROUPS: dict[str, Callable[[Effort], Iterator[Row]]] = {
    "h2o step": h2o_steps,
    "h2o block": h2o_blocks,
    "knorm": knorm_steps,
    "others": other_steps,
    "budget": budget_growth,
    "memory": memory,
}
NEED_PEER = ("h2o step", "h2o block", "knorm", "others")


def line(row: Row) -> str:
    """A row as one line of a Markdown table."""
    sizes = row.sizes
    if isinstance(row.value, timing.Ratio):
        ratio = row.value
        figure = f"{ratio.median:.2f} {row.unit} ({ratio.low:.2f} to {ratio.high:.2f}), best {ratio.best:.2f}"
    else:
        figure = f"{row.value:.2f} {row.unit}"
    target = "" if row.target is None else f"{row.target[0]} {row.target[1]:.4g} {'met' if row.met else 'MISSED'}"
    times = "; ".join(f"{name} {_time(s.best)} / {_time(s.median)}" for name, s in (row.sides or {}).items())
    return f"| {row.case} | {sizes['dtype']} | {sizes['tokens']} | {figure} | {target} | {times or row.note} |"


def _time(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"


HEAD = (
    "| case | dtype | tokens | figure (quartiles), of the best rounds | target | time per call: best / median |\n"
    + 6 * "|---"
    + "|"
)


def report(rows: list[Row]) -> dict[str, Any]:
    """Everything measured, for the JSON file."""
    return {
        "machine": machine.describe("veloxfn", "veloxquant-mlx"),
        "settings": {"sink": SINK, "recent": RECENT, "decay": DECAY},
        "rows": [
            {
                "case": row.case,
                **row.sizes,
                "value": row.value._asdict() if isinstance(row.value, timing.Ratio) else row.value,
                "unit": row.unit,
                "target": None if row.target is None else f"{row.target[0]} {row.target[1]:.4g}",
                "met": row.met,
                "seconds": {name: spread._asdict() for name, spread in (row.sides or {}).items()},
                "note": row.note,
            }
            for row in rows
        ],
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--quick", action="store_true", help="few rounds: a look, not a figure to quote")
    parser.add_argument("--only", default="", help=f"groups whose name contains this: {', '.join(GROUPS)}")
    options = parser.parse_args(arguments)
    wanted = {name: group for name, group in GROUPS.items() if options.only in name}
    if not wanted:
        parser.error(f"--only {options.only!r} names none of: {', '.join(GROUPS)}")
    print(json.dumps(machine.describe("veloxfn", "veloxquant-mlx")), flush=True)
    print(HEAD, flush=True)
    rows = []
    for name, group in wanted.items():
        if name in NEED_PEER and not sides.HAS_PEER:
            print(f"| {name} | | | left out: veloxquant-mlx is not installed | | |")
            continue
        for row in group(QUICK if options.quick else FULL):
            rows.append(row)
            print(line(row), flush=True)
    if options.json:
        options.json.write_text(json.dumps(report(rows), indent=1) + "\n")


if __name__ == "__main__":
    machine.prefer_openblas()
    main()
