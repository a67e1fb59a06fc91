"""Steps, blocks and prompts on a GPU: veloxfn's kernels beside its own pure MLX, the peer, MLX's attention, the bytes.

    python benchmarks/kernels.py [--quick] [--only GROUP,GROUP] [--minutes 8] [--json FILE] [--markdown FILE]

The sides of a ratio take turns in one process; RESULTS.md says what the figures are. Results are written after every
case; when the minutes are over, no further case is begun. --quick takes tiny sizes and runs on a CPU too, where all ops
are pure MLX.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import layers
import machine
import mlx.core as mx
import sides
import tables
import timing
from layers import Bandwidth, Layers
from sides import Shape, Traced, blocks
from steps import AT_LEAST, AT_MOST, DTYPES, Row

import veloxfn
from veloxfn import Contiguous, Retention, Rope, cadence, cam, h2o, keyformer, knorm, ops, snapkv, streaming_llm, tova
from veloxfn.ops.fusion import on_gpu
from veloxfn.testing.launches import forced, launches

SINK, RECENT, DECAY = 4, 16, 0.98  # the peer's own defaults, for both sides


class Effort(NamedTuple):
    """How long to measure, and how large."""

    rounds: int
    calls: int
    many_calls: int  # of one evaluation of many layers
    many: int  # layers of one evaluation
    block: int  # tokens of a block
    loop: int  # tokens that the peer's loop is measured on
    prompt: int
    large: int  # megabytes of the array that the bandwidth is measured on


FULL = Effort(9, 10, 4, 16, block=2048, loop=256, prompt=3200, large=4096)
QUICK = Effort(2, 2, 1, 2, block=96, loop=32, prompt=120, large=16)


class Case(NamedTuple):
    """A method at one size."""

    method: str
    shape: Shape
    dtype: str

    @property
    def name(self) -> str:
        """For a person."""
        rows, dim, heads, budget = self.shape
        return f"{self.method}, N {rows}, G {heads}, D {dim}, budget {budget}, {self.dtype}"

    @property
    def sizes(self) -> dict[str, Any]:
        """For the report."""
        return {**self.shape._asdict(), "dtype": self.dtype, "method": self.method}

    @property
    def kind(self) -> mx.Dtype:
        """The type itself."""
        return DTYPES[self.dtype]


def config_of(method: str, budget: int, **more: Any) -> Retention:
    """Settings of a method by its name here; the peer's where it has the method."""
    recent = min(RECENT, budget // 4)
    makers: dict[str, Callable[..., Retention]] = {
        "h2o": partial(h2o.Config, sink=SINK, recent=recent, decay=DECAY),
        "h2o age-normalised": partial(h2o.Config, age_normalised=True),
        "keyformer logit": partial(keyformer.Config, sink=SINK, recent=recent),
        "keyformer additive": partial(keyformer.Config, sink=SINK, recent=recent, noise="additive"),
        "keyformer none": partial(keyformer.Config, sink=SINK, recent=recent, noise="none"),
        "knorm": partial(knorm.Config, sink=SINK),
        "streaming_llm": partial(streaming_llm.Config, sink=SINK),
        "tova": tova.Config,
        "cam": cam.Config,
        "cam nearest": partial(cam.Config, targets="nearest", merge="similarity"),
        "snapkv": partial(snapkv.Config, window=2 * recent),
        "h2o contiguous": partial(h2o.Config, placement=CONTIGUOUS),
        "streaming_llm contiguous": partial(streaming_llm.Config, placement=CONTIGUOUS),
    }
    return makers[method](budget=budget, **more)


CONTIGUOUS = Contiguous(Rope(dims=16))
METHODS = ("h2o", "keyformer additive", "keyformer logit", "knorm", "streaming_llm")
SEVERAL_LAUNCHES = ("cam", "cam nearest", "snapkv", "h2o contiguous", "streaming_llm contiguous")
MORE_METHODS = (*SEVERAL_LAUNCHES, "tova", "h2o age-normalised")
PLAIN_PEER, PLAIN_UPDATE = "peer, not compiled", "update, not compiled"
PEERS = {"h2o": "h2o", "keyformer additive": "keyformer", "keyformer logit": "keyformer", "knorm": "knorm"}


def step_cases(*, quick: bool) -> list[Case]:
    """The sizes that have a target."""
    if quick:
        return [Case("h2o", Shape(2, 16, 2, 64), "float16"), Case("keyformer additive", Shape(2, 16, 1, 64), "float32")]
    return [
        Case("h2o", Shape(32, 128, 1, 2048), "float16"),
        Case("h2o", Shape(32, 128, 1, 8192), "float16"),
        *(Case(method, Shape(32, 128, 1, 2048), "float16") for method in METHODS if method != "h2o"),
        Case("h2o age-normalised", Shape(32, 64, 1, 2048), "float16"),
        Case("h2o", Shape(8, 64, 1, 512), "float16"),
        Case("h2o", Shape(256, 128, 1, 2048), "float16"),
        Case("h2o", Shape(32, 128, 4, 2048), "float16"),
        Case("h2o", Shape(32, 128, 1, 2048), "bfloat16"),
        Case("h2o", Shape(32, 128, 1, 2048), "float32"),
        Case("keyformer additive", Shape(32, 128, 1, 8192), "float16"),
        Case("h2o", Shape(32, 64, 1, 8192), "bfloat16"),
    ]


def other_step_cases(*, quick: bool) -> list[Case]:
    """All the others, those first that differ most from what was measured already."""
    if quick:
        methods = ("keyformer logit", "knorm", "streaming_llm", *MORE_METHODS)
        return [Case(method, Shape(2, 16, 1, 64), "float32") for method in methods]
    done = set(step_cases(quick=False))
    every = [Case(method, Shape(32, 128, 1, 2048), "float16") for method in MORE_METHODS]
    every += [
        Case(method, Shape(rows, dim, 1, budget), dtype)
        for dim, dtype in ((128, "float16"), (64, "float16"), (128, "bfloat16"), (64, "bfloat16"))
        for budget in (2048, 512, 8192)
        for rows in (32, 8, 256)
        for method in METHODS
    ]
    return [case for case in every if case not in done]


def layer_count(case: Case, effort: Effort) -> int:
    """Layers of one evaluation: fewer where many would not fit beside the peer's copies."""
    each = 2 * case.shape.rows * case.shape.budget * case.shape.dim * case.kind.size
    return max(2, min(effort.many, 2**32 // each))


def steps_of(case: Case, effort: Effort, bandwidth: Bandwidth, *, bounds: bool) -> Iterator[Row]:
    """One token at full budget: latency of one evaluated step, and many layers in one evaluation."""
    config, shape, kind = config_of(case.method, case.shape.budget), case.shape, case.kind
    floor = 2 * shape.rows * (shape.budget + 1) * shape.dim * kind.size / bandwidth.reading
    many = layer_count(case, effort)
    for count, mode in ((1, "one step an evaluation"), (many, f"{many} layers an evaluation")):
        parties: dict[str, Layers] = {
            "step": layers.own(layers.decoding, config, shape, kind, count),
            "attend + evict": layers.own(layers.attending_only, config, shape, kind, count),
            "update": layers.own(layers.updating, config, shape, kind, count),
            "attention": layers.sdpa(shape, kind, count),
        }
        if layers.ranks_by_output(config):
            parties["attend, then evict"] = layers.own(layers.attending_apart, config, shape, kind, count)
        with forced("reference"):
            parties["step, pure MLX"] = layers.own(layers.decoding, config, shape, kind, count)
        if sides.HAS_PEER and case.method in PEERS:
            made = partial(layers.peer, PEERS[case.method], shape, kind, count, **_peer_settings(config))
            for compiled in (True, False):
                if not (compiled and PEERS[case.method] == "keyformer"):
                    parties["peer" if compiled else PLAIN_PEER] = made(compiled=compiled)
            parties[PLAIN_UPDATE] = layers.own(layers.updating, config, shape, kind, count, compiled=False)
        calls = effort.calls if count == 1 else effort.many_calls
        seconds = timing.interleave(dict(parties), rounds=effort.rounds, calls=calls, warmup=3)
        for party in parties.values():
            party.check(shape.budget)
        peaks = {name: layers.peak_above_held(parties[name]) / 2**20 / count for name in parties}
        yield from _step_rows(case, mode, count, seconds, peaks, floor, bounds=bounds)
        del parties
        _tidy()


def chain_cases(*, quick: bool) -> list[Case]:
    """Steps of layers that wait for each other."""
    if quick:
        return [Case("h2o", Shape(2, 16, 1, 64), "float16")]
    shapes = [
        Shape(8, 64, 1, 512),
        *(Shape(rows, 128, 1, budget) for rows, budget in ((8, 512), (32, 512), (32, 2048))),
    ]
    grouped = Shape(8, 128, 4, 2048)
    return [Case(method, shape, "float16") for shape in (*shapes, grouped) for method in ("h2o", "knorm")]


def chained_steps(case: Case, effort: Effort, bandwidth: Bandwidth, *, bounds: bool) -> Iterator[Row]:
    """One token through layers each of which takes the output of the one before as its query."""
    del bandwidth, bounds
    config, shape, kind, count = config_of(case.method, case.shape.budget), case.shape, case.kind, effort.many
    parties = {
        "step": layers.own(layers.decoding, config, shape, kind, count, chained=True),
        "attention": layers.sdpa(shape, kind, count, chained=True),
    }
    with forced("reference"):
        parties["step, pure MLX"] = layers.own(layers.decoding, config, shape, kind, count, chained=True)
    seconds = timing.interleave(dict(parties), rounds=effort.rounds, calls=effort.many_calls, warmup=3)
    for party in parties.values():
        party.check(shape.budget)
    each = {name: [figure / count for figure in figures] for name, figures in seconds.items()}
    sizes = {**case.sizes, "tokens": 1, "mode": f"{count} layers, one after the other", "layers": count}
    for name, slower, faster in (
        ("step / attention", "step", "attention"),
        ("pure MLX / kernels, step", "step, pure MLX", "step"),
    ):
        pair = {side: timing.spread(each[side]) for side in (slower, faster)}
        yield Row(name, sizes, timing.ratio(each[slower], each[faster]), "x", None, pair)


def _peer_settings(config: Retention) -> dict[str, Any]:
    return {"sink": config.sink, "recent": config.recent_rows, "decay": DECAY}


def _step_rows(
    case: Case,
    mode: str,
    count: int,
    seconds: dict[str, list[float]],
    peaks: dict[str, float],
    floor: float,
    *,
    bounds: bool,
) -> Iterator[Row]:
    """The figures of one mode; seconds and peaks are given per layer."""
    each = {name: [figure / count for figure in figures] for name, figures in seconds.items()}
    sizes = {**case.sizes, "tokens": 1, "mode": mode, "layers": count, "floor_seconds": floor}

    def against(name: str, slower: str, faster: str, target: tuple[str, float] | None = None) -> Row:
        pair = {slower: timing.spread(each[slower]), faster: timing.spread(each[faster])}
        note = f"floor {tables.duration(floor)}; memory at its peak, per layer: " + ", ".join(
            f"{side} {peaks[side]:.2f} MiB" for side in (slower, faster)
        )
        return Row(name, sizes, timing.ratio(each[slower], each[faster]), "x", target, pair, note)

    # One evaluation of one layer waits for the host most of the time, MLX's attention alone as well: targets are about
    # many, the one beside attention about methods of two launches at the sizes that it is stated for.
    many = bounds and count > 1
    stated = case.shape.rows == 32 and case.shape.budget >= 2048 and case.method not in SEVERAL_LAUNCHES
    bound = tables.STEP_TARGET if many and stated else None
    yield against("(attend + evict) / attention", "attend + evict", "attention", bound)
    if "attend, then evict" in each:
        yield against("(attend, then evict) / attention", "attend, then evict", "attention")
    yield against("step / attention", "step", "attention")
    peers = [name for name in each if name.startswith("peer")]
    if peers:
        each["peer, faster form"] = [min(figures) for figures in zip(*(each[name] for name in peers), strict=True)]
        peaks = {**peaks, "peer, faster form": min(peaks[name] for name in peers)}
        yield against("peer / update", "peer, faster form", "update", (AT_LEAST, 8.0) if many else None)
        yield against("peer / update, as both ship", PLAIN_PEER, PLAIN_UPDATE, (AT_LEAST, 8.0) if many else None)
    yield against("pure MLX / kernels, step", "step, pure MLX", "step")
    for name in ("step", "attend + evict", "update", "attention"):
        spread = timing.spread(each[name])
        value = timing.Ratio(*(figure / floor for figure in (spread.median, spread.low, spread.high, spread.best)))
        yield Row(
            f"{name} / bytes of K and V", sizes, value, "x", None, {name: spread}, f"floor {tables.duration(floor)}"
        )


def _tidy() -> None:
    gc.collect()
    mx.clear_cache()


def block_cases(*, quick: bool) -> list[Case]:
    """Blocks with cadence "token"."""
    if quick:
        return [Case("h2o", Shape(2, 16, 1, 32), "float32")]
    wide, narrow = Shape(32, 128, 1, 512), Shape(8, 64, 1, 512)
    return [
        Case("h2o", wide, "float16"),
        Case("h2o", narrow, "float16"),
        Case("keyformer additive", wide, "float16"),
        Case("keyformer logit", wide, "float16"),
        Case("h2o", wide._replace(budget=2048), "float16"),
        Case("h2o", wide, "bfloat16"),
        Case("h2o", narrow, "float32"),
        Case("knorm", wide, "float16"),
        Case("tova", wide, "float16"),
    ]


def token_blocks(case: Case, effort: Effort, bandwidth: Bandwidth, *, bounds: bool) -> Iterator[Row]:
    """A block by cadence "token", against the peer's loop, measured on fewer tokens and scaled."""
    del bandwidth
    config, shape, kind = config_of(case.method, case.shape.budget, cadence="token"), case.shape, case.kind
    state = layers.full_state(config, shape, kind)
    block = blocks(shape, effort.block, kind, seed=1)
    call = Layers(layers.updating(config), state, 1, block, layers.our_counts)
    sizes = {**case.sizes, "tokens": effort.block, "mode": "cadence token"}
    parties: dict[str, Callable[[], None]] = {"kernels": call}
    method = PEERS.get(case.method)
    if sides.HAS_PEER and method:
        step = layers.peer_step(method, shape, **_peer_settings(config))
        begun, short = layers.peer_state(method, shape, kind), blocks(shape, effort.loop, kind, seed=1)
        parties["peer, its own loop"] = Layers(step, begun, 1, short)
        if method != "keyformer":
            parties["peer, its compiled step in a loop"] = Layers(_looped(Traced(step)), begun, 1, short)
    seconds = timing.interleave(parties, rounds=min(3, effort.rounds), calls=1, warmup=1)
    call.check(shape.budget)
    scale = effort.block / effort.loop
    loops = [[scale * figure for figure in seconds[name]] for name in parties if name.startswith("peer")]
    own = timing.spread(seconds["kernels"])
    note = f"memory at its peak {layers.peak_above_held(call) / 2**20:.1f} MiB"
    if loops:
        fastest = [min(figures) for figures in zip(*loops, strict=True)]
        target = (AT_LEAST, 50.0) if bounds and case.method != "knorm" else None
        scaled = f"peer measured on {effort.loop} tokens, times {scale:g}; {note}"
        pair = {"kernels": own, "peer, scaled": timing.spread(fastest)}
        yield Row("peer's loop / block", sizes, timing.ratio(fastest, seconds["kernels"]), "x", target, pair, scaled)
    else:
        yield Row("block", sizes, own.median * 1e3, "ms", None, {"kernels": own}, note)
    with _pure():
        call()
        plain = timing.interleave({"pure MLX": call}, rounds=1, calls=1, warmup=0)["pure MLX"]
    pair = {"pure MLX": timing.spread(plain), "kernels": own}
    yield Row("pure MLX / kernels, block", sizes, timing.ratio(plain, [own.median]), "x", None, pair)


def _looped(step: Callable[..., Any], interval: int = 32) -> Callable[..., Any]:
    """A block as a loop of one-token steps, evaluated as often as the peer evaluates its own."""

    def loop(state: Any, keys: mx.array, values: mx.array, queries: mx.array) -> Any:
        for t in range(keys.shape[1]):
            _, state = step(state, keys[:, t : t + 1], values[:, t : t + 1], queries)
            if (t + 1) % interval == 0:
                mx.eval(state)
        return (), state

    return loop


@contextmanager
def _pure() -> Iterator[None]:
    """Pure MLX inside; a step that was traced with kernels is traced anew, and again behind it."""
    cadence._fused_step.cache_clear()
    with forced("reference"):
        yield
    cadence._fused_step.cache_clear()


def mass_cases(*, quick: bool) -> list[Case]:
    """Blocks whose attention mass is wanted."""
    if quick:
        return [Case("mass", Shape(2, 16, 2, 32), "float32")]
    return [
        Case("mass", Shape(32, 128, 1, 2048), "float16"),
        Case("mass", Shape(32, 128, 4, 2048), "float16"),
        Case("mass", Shape(32, 128, 1, 2048), "bfloat16"),
        Case("mass", Shape(8, 64, 4, 512), "float16"),
        Case("mass", Shape(8, 64, 4, 512), "float32"),
        Case("mass", Shape(8, 128, 4, 8192), "float16"),
    ]


def block_mass(case: Case, effort: Effort, bandwidth: Bandwidth, *, bounds: bool) -> Iterator[Row]:
    """`attention_mass` of a block over budget + block keys against MLX's causal attention over the same."""
    del bandwidth
    shape, kind, length = case.shape, case.kind, case.shape.budget + effort.block
    kept = blocks(shape, length, kind)[0]
    queries = blocks(shape, effort.block, kind, seed=1)[0].queries
    keys, values = kept.keys, kept.values
    positions = mx.contiguous(mx.broadcast_to(mx.arange(length, dtype=mx.int32), (shape.rows, length)))
    until = mx.contiguous(positions[:, shape.budget :])
    mx.eval(positions, until)
    scale = shape.dim**-0.5

    def attention() -> None:
        mx.eval(
            mx.fast.scaled_dot_product_attention(queries, keys[:, None], values[:, None], scale=scale, mask="causal")
        )

    def mass(backend: str | None = None) -> None:
        mx.eval(ops.attention_mass(queries, keys, positions, until, backend=backend))

    parties: dict[str, Callable[[], None]] = {
        "as chosen": mass,
        "tiles of matrices": partial(mass, "reference"),
        "attention": attention,
    }
    if on_gpu():
        parties["kernel"] = partial(mass, "metal" if mx.metal.is_available() else "cuda")
    calls = max(1, effort.calls // 10)
    seconds = timing.interleave(parties, rounds=min(5, effort.rounds), calls=calls, warmup=2)
    peaks = {name: layers.peak_above_held(call) / 2**20 for name, call in parties.items()}
    sizes = {**case.sizes, "tokens": effort.block, "mode": "attention_mass"}
    for name in parties:
        if name != "attention":
            pair = {side: timing.spread(seconds[side]) for side in (name, "attention")}
            note = ", ".join(f"{side} {peaks[side]:.1f} MiB" for side in pair)
            target = (AT_MOST, 5.0) if bounds and name == "as chosen" else None
            value = timing.ratio(seconds[name], seconds["attention"])
            yield Row(
                f"attention_mass, {name} / attention", sizes, value, "x", target, pair, f"memory at its peak: {note}"
            )


def prompt_cases(*, quick: bool) -> list[Case]:
    """Prompts with cadence "token"."""
    methods = ("h2o", "tova", "keyformer additive", "keyformer logit", "keyformer none", "cam", "snapkv")
    shape = Shape(2, 16, 2, 48) if quick else Shape(32, 128, 4, 512)
    return [Case(method, shape, "float32" if quick else "float16") for method in methods]


def prompts(case: Case, effort: Effort, bandwidth: Bandwidth, *, bounds: bool) -> Iterator[Row]:
    """A prompt into an empty cache, evicting after each token: it completes, in what time and memory."""
    del bandwidth, bounds
    config, shape, kind = config_of(case.method, case.shape.budget, cadence="token"), case.shape, case.kind
    policy = veloxfn.policy(config)
    block = blocks(shape, effort.prompt, kind)[0]
    start = policy.init_state(shape.rows, shape.dim, dtype=kind)
    mx.eval(start)
    taken = []
    for _ in range(2):  # the first builds kernels
        state = None
        _tidy()
        mx.synchronize()
        held = mx.get_active_memory()
        mx.reset_peak_memory()
        begun = time.perf_counter()
        state = policy.update_batched(start, block.keys, block.values, queries=block.queries)
        mx.eval(state)
        mx.synchronize()
        taken.append(time.perf_counter() - begun)
        peak = (mx.get_peak_memory() - held) / 2**20
        if taken[0] > 15:
            break
    kept, seen = layers.our_counts(state)
    sound = all(bool(mx.isfinite(leaf.astype(mx.float32)).all()) for leaf in policy.get_kv(state))
    if not (kept == shape.budget and seen == effort.prompt and sound):
        raise RuntimeError(f"the prompt ended wrongly: kept {kept}, seen {seen}, finite {sound}")
    sizes = {**case.sizes, "tokens": effort.prompt, "mode": "prompt, cadence token"}
    note = f"the first call {taken[0] * 1e3:.1f} ms; memory at its peak {peak:.1f} MiB; kept {kept} of {seen}, finite"
    pair = {"prompt": timing.spread(taken[-1:])}
    yield Row("prompt", {**sizes, "peak_mib": peak}, taken[-1] * 1e3, "ms", None, pair, note)


Runner = Callable[..., Iterator[Row]]
GROUPS: dict[str, tuple[Callable[..., list[Case]], Runner]] = {
    "mass": (mass_cases, block_mass),
    "token": (block_cases, token_blocks),
    "step": (step_cases, steps_of),
    "chain": (chain_cases, chained_steps),
    "prompt": (prompt_cases, prompts),
    "others": (other_step_cases, steps_of),
}


def launch_counts() -> dict[str, dict[str, Any]]:
    """Launches of a compiled step of each method, read off its graph with the machine's own back end.

    Those of a cache that is too large to be copied, then, where they differ, of a small one.
    """
    token_step: Any = importlib.import_module("veloxfn.ops.token_step")  # the package's name for it is the function
    shape, most = Shape(2, 64, 1, 64), token_step._MOST_BYTES
    block = blocks(shape, 1, mx.float16)[0]
    told: dict[str, dict[str, Any]] = {}
    try:
        for size, method in product(("", ", small"), (*METHODS, *MORE_METHODS)):
            token_step._MOST_BYTES = most if size else 0
            config = config_of(method, shape.budget)
            state = layers.full_state(config, shape, mx.float16)
            absorbed = veloxfn.policy(config).absorb(state, block.keys, block.values)
            for name, make, begun in (
                ("step", layers.decoding, state),
                ("attend + evict", layers.attending_only, absorbed),
                ("update", layers.updating, state),
            ):
                found = launches(mx.compile(make(config)), begun, *block)
                one = {"kernels": list(found.kernels), "possible copies": list(found.copies)}
                if told.get(f"{method}, {name}") != one:
                    told[f"{method}, {name}{size}"] = one
    finally:
        token_step._MOST_BYTES = most
    return told


def brief(told: list[dict[str, Any]]) -> str:
    """The records of one case and mode in one line."""
    figures = []
    for one in told:
        value, verdict = one["value"], ""
        if one["target"] is not None:
            verdict = f" [{one['target']} {'FAILED' if one['failed'] else 'met' if one['met'] else 'MISSED'}]"
        shown = f"{value['median']:.2f}" if isinstance(value, dict) else f"{value:.1f} {one['unit']}"
        figures.append(f"{one['case']} {shown}{verdict}")
    return f"{told[0]['mode']}: {'; '.join(figures)}"


def gpu() -> dict[str, Any]:
    """What MLX says of the default device."""
    return {name: value for name, value in mx.device_info().items() if isinstance(value, (str, int, float))}


class Run:
    """Cases one after the other, written after each, none begun when the time is over."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._effort = QUICK if options.quick else FULL
        self._bounds = on_gpu() and not options.quick
        self._begun = time.monotonic()
        self._records: list[dict[str, Any]] = []
        self.errors: dict[str, str] = {}
        self._left_out: list[str] = []
        self._bandwidth = layers.reading_all(self._effort.large)
        self._launches: dict[str, Any] = {}
        self._attempt("launches", lambda: self._launches.update(launch_counts()))

    def groups(self, names: list[str]) -> None:
        """All cases of these groups."""
        for group in names:
            cases, runner = GROUPS[group]
            for case in cases(quick=self._options.quick)[: self._options.first]:
                label = f"{group}: {case.name}"
                if time.monotonic() - self._begun > 60 * self._options.minutes:
                    self._left_out.append(label)
                    continue
                self._attempt(label, partial(self._case, group, case, runner))
                _tidy()
                self.write()
        self.write()

    def _case(self, group: str, case: Case, runner: Runner) -> None:
        print(f"{group}: {case.name}", flush=True)
        made: dict[str, list[dict[str, Any]]] = {}
        try:
            for row in runner(case, self._effort, self._bandwidth, bounds=self._bounds):
                told = tables.record(row._replace(sizes={"group": group, **row.sizes}))
                self._records.append(told)
                made.setdefault(told["mode"], []).append(told)
        finally:
            for records in made.values():
                print(f"  {brief(records)}", flush=True)

    def _attempt(self, label: str, call: Callable[[], None]) -> None:
        """One case; an error in it is told and the next one goes on."""
        try:
            call()
        except Exception as error:
            self.errors[label] = f"{type(error).__name__}: {error}"
            traceback.print_exc()
            print(f"ERROR in {label}: {self.errors[label]}", flush=True)

    def report(self) -> dict[str, Any]:
        """Everything so far."""
        return {
            "script": "kernels",
            "quick": self._options.quick,
            "machine": {**machine.describe("veloxfn", "mlx-cuda-13", "veloxquant-mlx"), "gpu": gpu()},
            "settings": {"sink": SINK, "recent": RECENT, "decay": DECAY, "rounds": self._effort.rounds},
            "bandwidth": self._bandwidth._asdict(),
            "launches": self._launches,
            "seconds": time.monotonic() - self._begun,
            "left_out": self._left_out,
            "errors": self.errors,
            "rows": self._records,
        }

    def write(self) -> None:
        """The files that were asked for."""
        told = self.report()
        if self._options.json:
            self._options.json.write_text(json.dumps(told, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        if self._options.markdown:
            self._options.markdown.write_text(tables.kernels(told), encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny sizes and few rounds: not to quote")
    parser.add_argument("--only", default=",".join(GROUPS), help=f"groups, comma between: {', '.join(GROUPS)}")
    parser.add_argument("--minutes", type=float, default=8.0, help="no case is begun after so many (default 8)")
    parser.add_argument("--first", type=int, metavar="K", help="the first K cases of each group")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table to this file")
    options = parser.parse_args(arguments)
    names = [name.strip() for name in options.only.split(",")]
    if unknown := [name for name in names if name not in GROUPS]:
        parser.error(f"--only {', '.join(unknown)} names none of: {', '.join(GROUPS)}")
    if not (on_gpu() or options.quick):
        parser.error("the full sizes need a GPU; --quick runs anywhere")
    if not sides.HAS_PEER:
        print("veloxquant-mlx is not installed: its figures are left out", flush=True)
    run = Run(options)
    run.groups(names)
    told = run.report()
    print(json.dumps({name: told[name] for name in ("machine", "bandwidth", "seconds", "left_out", "errors")}))
    return 1 if run.errors else 0


if __name__ == "__main__":
    machine.prefer_openblas()
    sys.exit(main())
