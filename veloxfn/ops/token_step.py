"""One token into a full cache and another out of it: bookkeeping, write, attention, eviction.

On a GPU a small cache is copied on the way, with the arrival in the slot that was free, so that nothing waits for
writes into it: two launches, one where no attention decides. That pays where launches cost the host more than bytes
cost the GPU: on an H200 a step was 1.1 to 1.5 times as fast up to 16 MiB of keys and values, and no faster at 32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from veloxfn import checks
from veloxfn.ops.admit import Columns, Entry, KeyNorm, Loss, admit, checked, columns_of, losing
from veloxfn.ops.attend import LANES, attend_step, fits, parts_of, plan_of, tempering
from veloxfn.ops.attention_mass import Temper
from veloxfn.ops.constants import NO_SCHEDULE, Schedule
from veloxfn.ops.evict_step import JOINING, Rule, evict_step
from veloxfn.ops.launch import MOST_SPREAD, Body, Kernel, backend_for, launch, spread_over

__all__ = ["ATTEND", "FINISH", "MOVE", "Moved", "copies", "reference", "token_step"]

_SAME_SEEN = "Same{{int(seen[threadgroup_position_in_grid.x]){}}}"
ATTEND = Kernel(
    "token_attend",
    (
        *("queries", "keys", "values", "positions", "heat", "names", "seen", "seed", "streams"),
        *("fresh_key", "fresh_value"),
    ),
    ("scratch", "keys_out", "values_out"),
    bodies=(Body("attend", (("newest", _SAME_SEEN.format(" + 1")),)),),
    absent=("until", "arrived"),
)
FINISH = Kernel(
    "token_finish",
    (
        *("positions", "seen", "first", "second", "first_fresh", "second_fresh", "fresh_keys", "seed", "streams"),
        "scratch",
    ),
    ("positions_out", "seen_out", "first_out", "second_out", "output"),
    bodies=(
        Body("admit"),
        Body(
            "evict_step",
            (
                ("positions", "positions_out"),
                ("seen", "seen_out"),
                ("mass", "first_out"),
                ("mass_out", "first_out"),
                ("noise", "second_out"),
                ("counted", _SAME_SEEN.format("")),
            ),
            behind=True,
        ),
    ),
    absent=("rotations", "arrived", "attention", "tau", "weights", "old_keys", "old_values", "fresh_values"),
    unmade=("slot", "rotations_out", "keys_out", "values_out"),
    most=MOST_SPREAD,
    alone=True,
)
MOVE = Kernel(
    "token_move",
    (*FINISH.inputs[:-1], "old_keys", "old_values", "fresh_values"),
    (*FINISH.outputs[:-1], "keys_out", "values_out"),
    bodies=(Body("admit"),),
    absent=("rotations",),
    unmade=("slot", "rotations_out"),
    most=MOST_SPREAD,
)

_MOST_BYTES = 17 * 2**20  # of keys and values, that are copied; half as many save fewer launches, without attention
_LEAST_PART = 2**14  # bytes that a threadgroup copies, about


class _Before(NamedTuple):
    """A cache, the token that comes into it, and the token's query."""

    keys: mx.array
    values: mx.array
    positions: mx.array
    seen: mx.array
    columns: Sequence[tuple[mx.array, Entry]]
    fresh_keys: mx.array
    fresh_values: mx.array
    queries: mx.array | None


class _How(NamedTuple):
    """The options of `token_step`."""

    output: bool
    scale: float | None
    temper: Temper | None
    decay: float
    per_query: bool
    schedule: Schedule | None
    keep_low: bool
    attended: bool
    sink: int
    recent: int


class Moved(NamedTuple):
    """A cache that a token came into and another left."""

    keys: mx.array  # [N, n, D]
    values: mx.array  # [N, n, Dv]
    positions: mx.array  # [N, n] int32
    seen: mx.array  # [N] int32
    columns: tuple[mx.array, ...]  # [N, n] float32 each
    output: mx.array | None  # [N, G, 1, Dv] in the dtype of the queries, where it was asked for


def token_step(
    keys: mx.array,
    values: mx.array,
    positions: mx.array,
    seen: mx.array,
    columns: Sequence[tuple[mx.array, Entry]],
    fresh_keys: mx.array,
    fresh_values: mx.array,
    queries: mx.array | None = None,
    *,
    output: bool = False,
    scale: float | None = None,
    temper: Temper | None = None,
    decay: float = 1.0,
    per_query: bool = False,
    schedule: Schedule | None = None,
    keep_low: bool = False,
    attended: bool = True,
    sink: int,
    recent: int,
    backend: str | None = None,
) -> Moved:
    """`admit`, the writes, then `attend_step`, or `evict_step` without queries.

    Args:
        keys: [N, n, D], and every row has a free slot.
        values: [N, n, Dv].
        positions: [N, n] int32 of the slots, -1 = free.
        seen: [N] int32, arrivals before this one.
        columns: at most two per-slot columns [N, n] float32 with the arrival's entry, as for `admit`: the first is the
            mass, or what else is ranked by; none = by the attention, or by age.
        fresh_keys: [N, 1, D] of the token that arrives, in the dtype of the keys.
        fresh_values: [N, 1, Dv].
        queries: [N, G, 1, D] of that token; None = no attention.
        output: whether the attention's output is asked for.
        scale: of the products; None = D ** -0.5; not given without an output.
        temper: of the logits that the mass is made of; its recipe is for the token once it is there.
        decay: what the masses keep, as for `evict_step`.
        per_query: rank by mass per query that has seen the slot.
        schedule: of what the second column is added times to the importance; None = it is not.
        keep_low: rank by the negative.
        attended: whether the masses take in the attention.
        sink: first arrivals that are protected.
        recent: last arrivals that are protected.
        backend: see `veloxfn.ops.launch.backend_for`. On a GPU two launches, without queries one, which copy keys and
            values; several where the kernels do not take the shapes, the columns or the rule.

    Raises:
        ValueError: a wrong shape, an output without queries, a scale without an output, or a schedule without a second
            column.
        TypeError: an array of another type.
    """
    rows, length = checks.slots_of(positions)
    checks.array("keys", keys, "[N, n, D]", (rows, length, None))
    checks.array("values", values, "[N, n, Dv]", (rows, length, None))
    checks.operand("fresh_keys", fresh_keys, "[N, 1, D]", (rows, 1, keys.shape[2]), keys.dtype)
    checks.operand("fresh_values", fresh_values, "[N, 1, Dv]", (rows, 1, values.shape[2]), values.dtype)
    columns = checked(positions, seen, columns)
    if queries is None:
        if output:
            raise ValueError("output=True needs queries, got None")
    else:
        checks.attention(
            queries, keys, values, positions, None, *((None, None) if temper is None else (temper.tau, temper.names))
        )
        if queries.shape[2] != 1:
            raise ValueError(f"token_step takes the query of one token, got S = {queries.shape[2]}")
    if scale is not None:
        checks.number("scale", scale, low=0.0)
        if not output:
            raise ValueError(f"scale is for the output, which output=False does without, got scale={scale}")
    if schedule is not None and len(columns) < 2:
        raise ValueError(f"a schedule is of the second column, got {len(columns)}")
    backend = backend_for(backend)
    before = _Before(keys, values, positions, seen, columns, fresh_keys, fresh_values, queries)
    how = _How(output, scale, temper, decay, per_query, schedule, keep_low, attended, sink, recent)
    taken = None if backend == "reference" else _taken(before, how)
    if taken is None:
        return reference(before, how, backend)
    if queries is None:
        return _unattended(before, how, taken, backend)
    return _attended(before, queries, how, taken, backend)


def copies(keys: mx.array, values: mx.array, queries: mx.array | None) -> bool:
    """Whether a cache of such keys [N, n, D] and values is copied on the way, not written into.

    Nowhere but on CUDA (and where it is emulated).
    """
    most = _MOST_BYTES // 2 if queries is None else _MOST_BYTES
    small = keys.nbytes + values.nbytes <= most
    return small and backend_for(None) in ("cuda", "host") and _fits(keys, values, queries)


def _fits(keys: mx.array, values: mx.array, queries: mx.array | None) -> bool:
    if queries is not None:
        return queries.shape[1] > 0 and fits(queries, keys, values)
    return keys.shape[2] > 0 and values.shape[2] > 0 and keys.dtype == values.dtype


def _taken(before: _Before, how: _How) -> Columns | None:
    """The columns as the kernels take them; None where they do not: without attention they rank by a column or age."""
    if not _fits(before.keys, before.values, before.queries):
        return None
    if before.queries is None and (how.decay != 1.0 or how.per_query or how.schedule is not None):
        return None
    norms = all(entry.keys is before.fresh_keys for _, entry in before.columns if isinstance(entry, KeyNorm))
    return columns_of(before.columns) if norms else None


def _unattended(before: _Before, how: _How, taken: Columns, backend: str) -> Moved:
    """Without attention: one launch, in which all threadgroups of a row find what comes and goes, and copy a part."""
    keys, values, positions, seen, columns, fresh_keys, fresh_values, _ = before
    rows, length, dim = keys.shape
    wide = values.shape[2]
    lanes, slots = spread_over(length)
    units = length * (dim + wide) * keys.dtype.size // _LEAST_PART
    made = launch(
        MOVE,
        backend,
        [positions, seen, *taken.inputs[:4], fresh_keys, *taken.inputs[5:], keys, values, fresh_values],
        [
            (positions.shape, mx.int32),
            (seen.shape, mx.int32),
            *taken.outputs,
            (keys.shape, keys.dtype),
            (values.shape, values.dtype),
        ],
        template={
            **taken.template,
            **losing(Loss(bool(columns), how.keep_low, how.sink, how.recent)),
            "SLOTS": slots,
            "TURNED": False,
            "TELLS": False,
            "CARRIES": True,
            "T": keys.dtype,
            "DIMS": dim,
            "VALUE_DIMS": wide,
            "KEY_PACK": _pack(dim, keys.dtype),
            "VALUE_PACK": _pack(wide, keys.dtype),
        },
        groups=(rows, parts_of(rows, units), 1),
        threads=lanes,
    )
    left, after, *kept, keys, values = made
    return Moved(keys, values, left, after, tuple(kept), None)


def _attended(before: _Before, queries: mx.array, how: _How, taken: Columns, backend: str) -> Moved:
    """The launches of `attend_step`: the first copies the parts of a row that it attends to, the second admits."""
    keys, values, positions, seen, columns, fresh_keys, fresh_values, _ = before
    rows, length, dim = keys.shape
    wide, heads = values.shape[2], queries.shape[1]
    scale = dim**-0.5 if how.scale is None else how.scale
    shown = wide if how.output else None
    plan = plan_of(rows, heads, 1, dim, shown, length, keys.dtype, how.attended, how.temper, scale)
    heat, names, _, seed, streams = tempering(how.temper, rows, heads, 1)
    now = None if how.temper is None else seen
    scratch, keys, values = launch(
        ATTEND,
        backend,
        [queries, keys, values, positions, heat, names, now, seed, streams, fresh_keys, fresh_values],
        [plan.scratch, (keys.shape, keys.dtype), (values.shape, values.dtype)],
        template={
            **plan.template,
            "LIMITED": False,
            "GUARDED": False,
            "CARRIES": True,
            "APART": 0 if how.output else wide,
            "PACK": _pack(wide, keys.dtype),
        },
        groups=(rows, plan.parts, plan.chunks),
        threads=LANES,
    )
    norm = taken.inputs[4]
    lanes, slots = spread_over(length)
    rule = Rule(
        None,
        how.decay,
        seen if how.per_query else None,
        None if how.schedule is None else columns[1][0],
        None,
        how.schedule,
        how.keep_low,
        how.sink,
        how.recent,
    )
    made = iter(
        launch(
            FINISH,
            backend,
            [positions, seen, *taken.inputs, scratch],
            [
                (positions.shape, mx.int32),
                (seen.shape, mx.int32),
                *taken.outputs,
                ((rows, heads, 1, wide), queries.dtype) if how.output else None,
            ],
            template={
                **taken.template,
                **plan.joining,
                **(how.schedule or NO_SCHEDULE).template,
                **losing(None),
                **rule.template(
                    massive=bool(columns),
                    attended=how.attended,
                    stores=bool(columns) and (how.attended or how.decay != 1.0),
                ),
                "SLOTS": slots,
                "TURNED": False,
                "WEIGHTED": False,
                "TELLS": False,
                "CARRIES": False,
                "DIMS": 1 if norm is None else norm.shape[2],
                **dict.fromkeys(("VALUE_DIMS", "KEY_PACK", "VALUE_PACK"), 1),
            },
            groups=(rows, 1, 1),
            threads=max(lanes, JOINING),
        )
    )
    left, after = next(made), next(made)
    kept = tuple(next(made) for _ in columns)
    return Moved(keys, values, left, after, kept, next(made, None))


def _pack(dims: int, dtype: mx.Dtype) -> int:
    """Elements of a load of 16 bytes at most, which divide the dimensions."""
    return math.gcd(dims, 16 // dtype.size)


def reference(before: _Before, how: _How, backend: str = "reference") -> Moved:
    """In several ops, which write keys and values where they are if nobody else holds them."""
    keys, values, positions, seen, columns, fresh_keys, fresh_values, queries = before
    admitted = admit(positions, seen, columns, backend=backend)
    index = admitted.slot[..., None]
    keys = mx.put_along_axis(keys, index, fresh_keys, axis=1)
    values = mx.put_along_axis(values, index, fresh_values, axis=1)
    kept = admitted.columns
    mass = kept[0] if kept else None
    counted = admitted.seen if how.per_query else None
    noise = None if how.schedule is None else kept[1]
    tau = None if how.schedule is None else how.schedule.at(admitted.seen - 1)
    output = None
    if queries is None:
        after, left = evict_step(
            admitted.positions,
            admitted.seen,
            mass,
            decay=how.decay,
            counted=counted,
            noise=noise,
            tau=tau,
            schedule=how.schedule,
            keep_low=how.keep_low,
            sink=how.sink,
            recent=how.recent,
            backend=backend,
        )
    else:
        output, after, left = attend_step(
            queries,
            keys,
            values if how.output else None,
            admitted.positions,
            admitted.seen,
            mass,
            scale=how.scale,
            temper=how.temper,
            decay=how.decay,
            counted=counted,
            noise=noise,
            tau=tau,
            schedule=how.schedule,
            keep_low=how.keep_low,
            attended=how.attended,
            sink=how.sink,
            recent=how.recent,
            backend=backend,
        )
    return Moved(keys, values, left, admitted.seen, (after, *kept[1:]) if kept else (), output)
