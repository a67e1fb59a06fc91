"""mlx_lm's own tests of prompt caches, generation, batches and the server, run on eviction caches.

    pip install requests                  # test_server.py's; without it that file is left out
    python benchmarks/mlx_lm_suite.py [--quick] [--json FILE] [--columns NAME ...] [--files NAME ...]

The tests come with the source distribution of the installed mlx-lm, which pip downloads once into the user's cache
folder. They run in a process per file and column, with the demo model for the one that they name. Column "stock" has
mlx_lm's own caches: what passes there is the baseline. The others have eviction caches wherever mlx_lm makes a
`KVCache` and wherever a test does: with a budget that no test reaches, where all results must be as before, and with
one of 6 rows, where they must still be consistent: a batch with its sequences, a saved cache with the one in memory.

A test that fails on stock caches runs once more with `KVCache` in place of its `RotatingKVCache` (whose rounding, with
this model, exceeds a tolerance), and counts if it then passes, in all columns alike.

A test of the baseline that fails on eviction caches has one of the REASONS, found in what the caches were seen to
refuse, or is a fault; with any fault this script ends with status 1.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import machine
import reporting

__all__ = ["BASELINE", "FAULT", "PASSED", "REASONS", "Ended", "Verdict", "compare", "read", "report", "verdict"]

FILES = ("test_prompt_cache", "test_generate", "test_server")
COLUMNS = ("streaming_llm 4096", "h2o 4096", "streaming_llm 6", "h2o 6")
CHUNK = 8  # prefill_step_size of the tests' batches
UNBOUNDED = ("--unbounded",)  # for tests of the baseline that pass only without their rotating caches
LIMIT = 900  # seconds for a file in a column
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}

PASSED, BASELINE, FAULT = "passed", "fails on stock caches, too", "FAULT"
TRIM, QUANTISED, CHUNKS = "trim", "kv_bits", "chunks"
ROWS, STOCK, UNUSED = "rows", "stock classes", "not used"
DRAFTS = "drafts"
REASONS = {
    TRIM: "wants tokens back from before the last block; refused",
    QUANTISED: "wants the cache quantised; refused",
    ROWS: "counts on rows that are evicted, or asks for a sliding window over them, which is refused",
    STOCK: "puts the cache into, or compares it with, another class of mlx_lm's that it names",
    DRAFTS: "counts on the model's own drafts: made token by token, checked in a block, between which eviction differs",
    CHUNKS: "compares prompts cut into different chunks, after which eviction differs; passes with the same chunks",
}
# A mask of 16 rows held and 4 new ones; two caches of 5 and 7 rows back from a batch.
_COUNTED = ("TestPromptCache.test_make_mask_with_cache", "TestPromptCache.test_cache_list")
_DRAFTED = ("TestGenerate.test_stream_generate_speculative",)
_STOCK_CLASSES = re.compile(r"\b(Batch\w*|Rotating|Quantized|Chunked)KVCache\b")


class Ended(NamedTuple):
    """How a test ended, and what caches did meanwhile."""

    outcome: str  # passed, failed, skipped, unfinished
    error: str = ""
    line: str = ""  # of the test, where it failed
    stock: int = 0  # blocks that mlx_lm's own KVCache and BatchKVCache took
    ours: int = 0  # those that eviction caches took
    evicted: int = 0  # of these, those after which more tokens were seen than are kept
    trim: int = 0  # tokens that were not given back, or said to be beyond reach
    quantised: int = 0  # quantisations refused
    window: int = 0  # masks of a sliding window refused, after an eviction


class Verdict(NamedTuple):
    """What a test says of eviction caches."""

    kind: str  # PASSED, UNUSED, BASELINE, a key of REASONS, or FAULT
    error: str = ""
    evicted: bool = False


def read(path: Path) -> dict[str, Ended]:
    """What a column's process wrote, by test; empty if it wrote nothing."""
    if not path.exists():
        return {}
    told: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return {
        name: Ended(**{field: value for field, value in ended.items() if field in Ended._fields})
        for name, ended in told.items()
    }


def verdict(name: str, stock: Ended, ours: Ended, again: Ended | None = None) -> Verdict:
    """Compare how a test ended on stock caches, on eviction caches, and there `again` with prompts cut alike."""
    evicted = ours.evicted > 0
    if stock.outcome != "passed":
        return Verdict(BASELINE, ours.error, evicted)
    if ours.outcome == "passed":
        if ours.trim:  # a test that goes on after a refusal may pass for no reason
            return Verdict(TRIM, "passes, but no token was taken back", evicted)
        return Verdict(PASSED if ours.ours else UNUSED, "", evicted)
    causes = {
        STOCK: _STOCK_CLASSES.search(ours.line) or _STOCK_CLASSES.search(ours.error),
        QUANTISED: ours.quantised,
        TRIM: ours.trim,
        ROWS: evicted and (ours.window or name.endswith(_COUNTED)),
        DRAFTS: evicted and name.endswith(_DRAFTED),
        CHUNKS: evicted and again is not None and again.outcome == "passed" and again.evicted,
    }
    found = [kind for kind, seen in causes.items() if seen and ours.outcome == "failed"]
    return Verdict(found[0] if found else FAULT, ours.error or ours.outcome, evicted)


def compare(
    stock: Mapping[str, Ended], ours: Mapping[str, Ended], again: Mapping[str, Ended] | None = None
) -> dict[str, Verdict]:
    """A verdict for each test of the baseline's run, those that never ran on eviction caches being faults."""
    never = Ended("never ran")
    return {name: verdict(name, stock[name], ours.get(name, never), (again or {}).get(name)) for name in stock}


def unpacked(folder: Path) -> Path:
    """The tests of the installed mlx-lm's version, unpacked into `folder`; pip downloads them once.

    Raises:
        SystemExit: pip cannot.
    """
    sys.path.append(str(Path(__file__).parents[1] / "tests" / "adapter"))
    import families

    version = importlib.metadata.version("mlx-lm")
    try:
        archive = families._source(version)
    except families.UnavailableError as error:
        sys.exit(str(error))
    with tarfile.open(archive) as packed:
        members = [member for member in packed.getmembers() if member.name.split("/")[1:2] == ["tests"]]
        packed.extractall(folder, members, filter="data")
    return folder / f"mlx_lm-{version}" / "tests"


def run(file: Path, column: str, *options: str) -> dict[str, Ended]:
    """The tests of a file in one column, in a process of their own."""
    with tempfile.TemporaryDirectory() as made:
        out = Path(made) / "ended.json"
        script = str(Path(__file__).with_name("mlx_lm_column.py"))
        command = [sys.executable, "-W", "ignore", script, str(file), column, str(out), *options]
        try:
            environment = {**os.environ, **OFFLINE}
            done = subprocess.run(
                command, timeout=LIMIT, env=environment, capture_output=True, text=True, errors="replace"
            )
        except subprocess.TimeoutExpired:
            print(f"{file.stem}, {column}: stopped after {LIMIT} s", file=sys.stderr)
        else:
            if done.returncode:
                print(f"{file.stem}, {column}: {done.stderr[-2000:]}", file=sys.stderr)
        return read(out)


def rerun(file: Path, column: str, tests: list[str], unbounded: list[str]) -> dict[str, Ended]:
    """Some tests again, prompts cut alike, each with the rotating caches that it had before."""
    ended: dict[str, Ended] = {}
    for options in ((), UNBOUNDED):
        chosen = [test for test in tests if (test in unbounded) == bool(options)]
        if chosen:
            ended.update(run(file, column, *options, "--chunk", str(CHUNK), "--only", *chosen))
    return ended


def cell(told: Verdict) -> str:
    """A verdict in a table."""
    if told.kind == PASSED:
        return "passed, evicting" if told.evicted else "passed"
    return told.kind


def report(columns: Mapping[str, Mapping[str, Verdict]]) -> Iterable[str]:
    """Lines: the numbers of each column, then the tests that are not simply passed in all."""
    kinds = (PASSED, *REASONS, FAULT, UNUSED, BASELINE)
    yield reporting.head("column", "passed", "of these, evicting", *kinds[1:])
    for column, verdicts in columns.items():
        counts = Counter(told.kind for told in verdicts.values())
        evicting = sum(told.kind == PASSED and told.evicted for told in verdicts.values())
        yield reporting.row(column, counts[PASSED], evicting, *(counts[kind] for kind in kinds[1:]))
    yield ""
    yield reporting.head("test", *columns)
    for name in next(iter(columns.values())):
        row = [verdicts[name] for verdicts in columns.values()]
        if any(told.kind not in (PASSED, UNUSED, BASELINE) for told in row):
            yield reporting.row(name, *(cell(told) for told in row))
    yield ""
    yield from (f"- {kind}: {why}" for kind, why in REASONS.items())
    for column, verdicts in columns.items():
        for name, told in verdicts.items():
            if told.kind == FAULT:
                yield f"- fault in {name}, {column}: {told.error}"


class Measured(NamedTuple):
    """What ran."""

    ended: dict[str, dict[str, Ended]]  # by column, "stock" among them, and test
    verdicts: dict[str, dict[str, Verdict]]  # by column and test
    unbounded: list[str]  # tests that ran without their rotating caches


def measure(folder: Path, files: Iterable[str], columns: Iterable[str]) -> Measured:
    """Run the files of tests in `folder` on stock caches and in each column.

    Raises:
        SystemExit: a file whose tests do not even begin on stock caches.
    """
    made = Measured({column: {} for column in ("stock", *columns)}, {column: {} for column in columns}, [])
    for name in files:
        file = folder / f"{name}.py"
        baseline = run(file, "stock")
        if not baseline:
            sys.exit(f"{name} did not begin")
        lost = [test for test, found in baseline.items() if found.outcome == "failed" and found.stock]
        other = run(file, "stock", *UNBOUNDED, "--only", *lost) if lost else {}
        changed = [test for test, found in other.items() if found.outcome == "passed"]
        baseline |= {test: other[test] for test in changed}
        made.unbounded.extend(changed)
        made.ended["stock"].update(baseline)
        for column, verdicts in made.verdicts.items():
            ours = run(file, column)
            ours |= run(file, column, *UNBOUNDED, "--only", *changed) if changed else {}
            failed = [test for test, found in compare(baseline, ours).items() if found.kind == FAULT and found.evicted]
            again = rerun(file, column, failed, changed) if failed else {}
            verdicts.update(compare(baseline, ours, again))
            made.ended[column].update(ours)
            print(f"{name}, {column}: {len(ours)} tests", file=sys.stderr, flush=True)
    return made


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the tests of prompt caches alone, in two columns")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write how all tests ended to this file")
    parser.add_argument("--columns", nargs="+", default=COLUMNS, help='"method budget" each')
    parser.add_argument("--files", nargs="+", default=FILES, choices=FILES, help="test files")
    options = parser.parse_args(arguments)
    files, columns = (FILES[:1], ("streaming_llm 4096", "h2o 6")) if options.quick else (options.files, options.columns)
    if importlib.util.find_spec("requests") is None and "test_server" in files:
        print("test_server is left out: it needs the package requests", file=sys.stderr)
        files = tuple(name for name in files if name != "test_server")
    with tempfile.TemporaryDirectory() as folder:
        made = measure(unpacked(Path(folder)), files, columns)
    print("\n".join(report(made.verdicts)))
    tests: dict[str, dict[str, Any]] = {name: {} for name in made.ended["stock"]}
    for column, ended in made.ended.items():
        for name, found in ended.items():
            kind = {"kind": made.verdicts[column][name].kind} if column in made.verdicts else {}
            tests[name][column] = kind | {field: value for field, value in found._asdict().items() if value}
    reporting.write(options.json, "mlx-lm", reasons=REASONS, without_rotating_caches=made.unbounded, tests=tests)
    sys.exit(any(found.kind == FAULT for verdicts in made.verdicts.values() for found in verdicts.values()))


if __name__ == "__main__":
    machine.prefer_openblas()
    main()
