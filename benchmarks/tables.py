"""Fill the tables of RESULTS.md from the scripts' JSON files.

    python benchmarks/tables.py FILE.json [FILE.json ...] [--into benchmarks/RESULTS.md]

A file says which script wrote it. Its tables replace what lies between `<!-- table: NAME -->` and `<!-- end -->`;
tables whose script gave no file stay as they are.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import reporting
import timing
from steps import AT_MOST, Row

__all__ = ["attend", "duration", "figure", "fill", "kernels", "record", "tables_of"]

RESULTS = Path(__file__).with_name("RESULTS.md")
STEP = {
    "(attend + evict) / attention": "attend + evict",
    "(attend, then evict) / attention": "attend, then evict",
    "step / attention": "step",
    "peer / update": "peer / update",
    "peer / update, as both ship": "as both ship",
    "pure MLX / kernels, step": "pure MLX / step",
    "step / bytes of K and V": "step / bytes",
    "attention / bytes of K and V": "attention / bytes",
}
Told = dict[str, Any]
STEP_TARGET, FAILED_ABOVE = (AT_MOST, 1.3), 2.0  # attend + evict, times MLX's attention


def record(row: Row) -> Told:
    """A row for the JSON file."""
    figure = row.value.median if isinstance(row.value, timing.Ratio) else row.value
    return {
        "case": row.case,
        **row.sizes,
        "value": row.value._asdict() if isinstance(row.value, timing.Ratio) else row.value,
        "unit": row.unit,
        "target": None if row.target is None else f"{row.target[0]} {row.target[1]:.4g}",
        "met": row.met,
        "failed": row.target == STEP_TARGET and figure > FAILED_ABOVE,
        "seconds": {name: spread._asdict() for name, spread in (row.sides or {}).items()},
        "note": row.note,
    }


def duration(seconds: float) -> str:
    """For a person."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.1f} us"
    return f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"


def figure(told: Told | None, *, long: bool = False) -> str:
    """A record's value, with its target where it has one."""
    if told is None:
        return ""
    value = told["value"]
    shown = f"{value:.2f} {told['unit']}" if not isinstance(value, dict) else f"{value['median']:.2f}"
    if long and isinstance(value, dict):
        shown += f" ({value['low']:.2f} to {value['high']:.2f}), best {value['best']:.2f}"
    if told["target"] is None:
        return shown
    return f"{shown} {'**fails**' if told.get('failed') else 'met' if told['met'] else '**missed**'}"


def machine(told: Told) -> str:
    """Device, versions and what was left out, in one paragraph."""
    where = told["machine"]
    device = where.get("gpu", {}).get("device_name") or where["processor"]
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items() if version[0].isdigit())
    lines = [f"{device}, {where['cores']} cores, Python {where['python']}, {versions}."]
    if "bandwidth" in told:
        read, copied = (told["bandwidth"][way] / 1e12 for way in ("reading", "copying"))
        lines.append(f"A sum of a large array reads {read:.2f} TB/s, a copy moves {copied:.2f} TB/s.")
    if told.get("quick"):
        lines.append("**Tiny sizes: not to quote.**")
    if told.get("left_out"):
        lines.append(f"Not begun in the time given: {len(told['left_out'])} cases.")
    lines += [f"**Failed: {name}: {error}**" for name, error in told.get("errors", {}).items()]
    return "\n".join(lines)


def _size(told: Told) -> tuple[Any, ...]:
    return tuple(told[name] for name in ("method", "rows", "heads", "dim", "budget", "dtype"))


_TIMES = {
    "step": "step",
    "attend + evict": "attend + evict",
    "attention": "attention",
    "update": "update",
    "peer": "peer, faster form",
}
_SIZES = ("method", "N", "G", "D", "budget", "dtype")


def steps(rows: Iterable[Told]) -> str:
    """One line per case and mode."""
    found: dict[tuple[Any, ...], dict[str, Told]] = {}
    for told in rows:
        if told["group"] in ("step", "others"):
            found.setdefault((*_size(told), told["mode"]), {})[told["case"]] = told
    lines = [reporting.head(*_SIZES, "mode", *STEP.values(), *(f"{name}, time" for name in _TIMES))]
    for key, figures in found.items():
        seconds = {name: one for told in figures.values() for name, one in told["seconds"].items()}
        times = (duration(seconds[side]["median"]) if side in seconds else "" for side in _TIMES.values())
        lines.append(reporting.row(*key, *(figure(figures.get(name)) for name in STEP), *times))
    return "\n".join(lines)


def blocks(rows: Iterable[Told], group: str) -> str:
    """One line per figure."""
    lines = [reporting.head(*_SIZES, "tokens", "figure", "value (quartiles), best", "times", "")]
    for told in rows:
        if told["group"] == group:
            times = "; ".join(f"{name} {duration(one['median'])}" for name, one in told["seconds"].items())
            lines.append(
                reporting.row(*_size(told), told["tokens"], told["case"], figure(told, long=True), times, told["note"])
            )
    return "\n".join(lines)


def targets(rows: Iterable[Told]) -> str:
    """How many cases meet each target, and the worst."""
    found: dict[tuple[str, str], list[Told]] = {}
    for told in rows:
        if told["target"] is not None:
            found.setdefault((told["case"], told["target"]), []).append(told)
    lines = [reporting.head("figure", "target", "cases", "met", "failed", "worst", "median of the medians")]
    for (case, target), all_told in found.items():
        each = sorted(
            told["value"]["median"] if isinstance(told["value"], dict) else told["value"] for told in all_told
        )
        worst = each[0] if target.startswith(">=") else each[-1]
        met, failed = (sum(bool(told.get(name)) for told in all_told) for name in ("met", "failed"))
        lines.append(reporting.row(case, target, len(each), met, failed, f"{worst:.2f}", f"{each[len(each) // 2]:.2f}"))
    return "\n".join(lines)


def launch_table(told: Told) -> str:
    """Launches of a compiled step, and the copies that may come on top."""
    lines = [reporting.head("step", "launches", "copies that may come on top", "kernels")]
    for name, one in told["launches"].items():
        names = ", ".join("Compiled" if kernel.startswith("Compiled") else kernel for kernel in one["kernels"])
        lines.append(reporting.row(name, len(one["kernels"]), len(one["possible copies"]), names))
    return "\n".join(lines)


def traced(told: Told) -> str:
    """What the GPU really ran for one layer."""
    if told.get("layers", 1) != 1:
        raise ValueError(f"the table of launches is of one layer, got a run of {told['layers']}")
    lines = [reporting.head("method", "step", "kernels", "copies", "fills", "GPU time", "names")]
    for one in told["rows"]:
        counts = (one[name] for name in ("method", "step", "launches", "copies", "fills"))
        lines.append(reporting.row(*counts, duration(one["seconds"]), ", ".join(one["kernels"])))
    return "\n".join(lines)


def attend(told: Told) -> str:
    """The table of attend.py."""
    lines = [reporting.head("N", "G", "D", "budget", "dtype", "figure", "value (quartiles), best", "times")]
    for one in told["rows"]:
        times = "; ".join(f"{name} {duration(side['median'])}" for name, side in one["seconds"].items())
        sizes = (one[name] for name in ("rows", "heads", "dim", "budget", "dtype"))
        lines.append(reporting.row(*sizes, one["case"], figure(one, long=True), times))
    return "\n".join(lines)


def tables_of(told: Told) -> dict[str, str]:
    """The tables of a file by their names in RESULTS.md.

    Raises:
        ValueError: a file of another script.
    """
    script = told.get("script")
    if script == "attend":
        return {"attend machine": machine(told), "attend targets": targets(told["rows"]), "attend": attend(told)}
    if script == "launch_trace":
        return {"launch trace": traced(told)}
    if script != "kernels":
        raise ValueError(f"a file of attend.py, kernels.py or launch_trace.py is needed, not of script = {script!r}")
    rows = told["rows"]
    return {
        "kernels machine": machine(told),
        "kernels targets": targets(rows),
        "kernels launches": launch_table(told),
        "kernels steps": steps(rows),
        "kernels chain": blocks(rows, "chain"),
        "kernels token": blocks(rows, "token"),
        "kernels mass": blocks(rows, "mass"),
        "kernels prompt": blocks(rows, "prompt"),
    }


def kernels(told: Told) -> str:
    """All tables of kernels.py."""
    return "\n\n".join(f"### {name}\n\n{table}" for name, table in tables_of(told).items()) + "\n"


def fill(text: str, tables: dict[str, str]) -> str:
    """The text with these tables in their places.

    Raises:
        ValueError: a table that has no place.
    """
    for name, table in tables.items():
        place = re.compile(rf"(<!-- table: {re.escape(name)} -->\n).*?(<!-- end -->)", re.DOTALL)
        text, times = place.subn(partial(_around, table), text)
        if times != 1:
            raise ValueError(f"the text has {times} places for the table {name!r}, it needs one")
    return text


def _around(table: str, found: re.Match[str]) -> str:
    return f"{found[1]}{table}\n{found[2]}"


def merged(first: Told, second: Told) -> Told:
    """Two runs of kernels.py or attend.py as one: the second's figures, the first's where the second has none."""

    def label(told: Told) -> tuple[Any, ...]:
        return (*_size({"method": "", **told}), told.get("group"), told.get("mode"), told["case"])

    have = {label(told) for told in second["rows"]}
    return {**first, **second, "rows": second["rows"] + [told for told in first["rows"] if label(told) not in have]}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", help="of the three scripts; later ones win")
    parser.add_argument(
        "--into", type=Path, default=RESULTS, metavar="FILE", help="default: RESULTS.md beside this file"
    )
    options = parser.parse_args(arguments)
    runs: dict[str, Told] = {}
    for path in options.files:
        told = json.loads(path.read_text(encoding="utf-8"))
        script = told.get("script")
        runs[script] = merged(runs[script], told) if script in ("attend", "kernels") and script in runs else told
    text = options.into.read_text(encoding="utf-8")
    for told in runs.values():
        text = fill(text, tables_of(told))
    options.into.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
