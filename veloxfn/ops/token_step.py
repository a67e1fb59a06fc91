"""One token into a full cache and another out of it: bookkeeping, write, attention, eviction.

On a GPU one launch: a threadgroup copies its row, with the arrival in the slot that was free, attends to it and lets go
of the weakest slot. That pays where rows are short, and launches cost the host more than bytes cost the GPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from veloxfn import checks
from veloxfn.ops.admit import Columns, Entry, KeyNorm, admit, checked, columns_of
from veloxfn.ops.attend import attend_step, heads_together, plan_of, tempering
from veloxfn.ops.attention_mass import Temper
from veloxfn.ops.constants import NO_SCHEDULE, Schedule
from veloxfn.ops.evict_step import NO_PARTS, UNIT, Rule, evict_step
from veloxfn.ops.launch import Body, Kernel, Output, backend_for, launch

__all__ = ["KERNEL", "KEYS_ALONE", "UNATTENDED", "Moved", "one_launch", "reference", "token_step"]

_ROW = "threadgroup_position_in_grid.x"
_ADMITTED = (("positions", "positions_out"),)


def _attending(values: str) -> Body:
    """`attend`, of what `admit` wrote, between whose writes and these reads it has a barrier."""
    shape = ("keys_shape", "positions_shape")
    return Body(
        "attend",
        (*_ADMITTED, ("keys", "keys_out"), ("values", values), shape, ("newest", f"Same{{int(seen[{_ROW}]) + 1}}")),
    )


_EVICTING = Body(
    "evict_step",
    (
        *_ADMITTED,
        ("seen", "seen_out"),
        ("mass", "first_out"),
        ("mass_out", "first_out"),
        ("noise", "second_out"),
        ("counted", f"Same{{int(seen[{_ROW}])}}"),
        ("scratch_shape", "Same{1}"),  # parts
    ),
    behind=True,
)
_ADMITTING = ("positions", "seen", "first", "second", "first_fresh", "second_fresh", "fresh_keys", "seed", "streams")
KERNEL = Kernel(
    "token_step",
    (*_ADMITTING, "old_keys", "old_values", "fresh_values", "queries", "heat", "names"),
    ("keys_out", "values_out", "positions_out", "seen_out", "first_out", "second_out", "scratch", "output"),
    bodies=(Body("admit"), _attending("values_out"), _EVICTING),
    absent=("rotations", "until", "arrived", "attention", "tau", "weights"),
    unmade=("slot", "rotations_out"),
    most=512,
)
KEYS_ALONE = KERNEL._replace(name="token_step_keys", bodies=(Body("admit"), _attending("keys_out"), _EVICTING))
UNATTENDED = KERNEL._replace(
    name="token_step_unattended",
    inputs=KERNEL.inputs[:-3],
    bodies=(Body("admit"), _EVICTING),
)

_MOST_BYTES = 20 * 2**20  # of keys and values, that are copied
_MOST_ROW = 264 * 2**10  # of one row, by one threadgroup
_MOST_HEADS = 2  # with so many bytes of a row; half as many with more
_MOST_DIM = 256
_LANES = 512
_MOST_SLOTS = 8  # of a lane at a time


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
        scale: of the products; None = D ** -0.5.
        temper: of the logits that the mass is made of; its recipe is for the token once it is there.
        decay: what the masses keep, as for `evict_step`.
        per_query: rank by mass per query that has seen the slot.
        schedule: of what the second column is added times to the importance; None = it is not.
        keep_low: rank by the negative.
        attended: whether the masses take in the attention.
        sink: first arrivals that are protected.
        recent: last arrivals that are protected.
        backend: see `veloxfn.ops.launch.backend_for`. On a GPU one launch where `one_launch` says so, else several.

    Raises:
        ValueError: a wrong shape, an output without queries, or a schedule without a second column.
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
    if schedule is not None and len(columns) < 2:
        raise ValueError(f"a schedule is of the second column, got {len(columns)}")
    backend = backend_for(backend)
    before = _Before(keys, values, positions, seen, columns, fresh_keys, fresh_values, queries)
    how = _How(output, scale, temper, decay, per_query, schedule, keep_low, attended, sink, recent)
    if backend != "reference" and _fits(keys, values, queries) and (taken := _taken(before, how)) is not None:
        return _whole(before, how, taken, backend)
    return reference(before, how, backend)


def one_launch(keys: mx.array, values: mx.array, queries: mx.array | None) -> bool:
    """Whether a cache of such keys [N, n, D] and values is to be copied by one launch, not written into by several.

    Nowhere but on CUDA (and where it is emulated).
    """
    size = keys.nbytes + values.nbytes
    several = queries is not None and queries.shape[1] > _MOST_HEADS
    small = size <= _MOST_BYTES and size <= (_MOST_ROW // 2 if several else _MOST_ROW) * keys.shape[0]
    return backend_for(None) in ("cuda", "host") and small and _fits(keys, values, queries)


def _fits(keys: mx.array, values: mx.array, queries: mx.array | None) -> bool:
    dim, wide = keys.shape[2], values.shape[2]
    if not (0 < dim <= _MOST_DIM and 0 < wide <= _MOST_DIM and keys.dtype == values.dtype):
        return False
    if queries is None:
        return True
    heads = queries.shape[1]
    return heads > 0 and queries.dtype == keys.dtype and heads <= heads_together(heads, dim, wide)


def _taken(before: _Before, how: _How) -> Columns | None:
    """The columns as the kernel takes them; None where it does not: it has one schedule, and norms of the one key."""
    norms = all(entry.keys is before.fresh_keys for _, entry in before.columns if isinstance(entry, KeyNorm))
    return columns_of(before.columns) if norms and (how.schedule is None or how.temper is None) else None


def _whole(before: _Before, how: _How, taken: Columns, backend: str) -> Moved:
    """In one launch."""
    keys, values, positions, seen, columns, fresh_keys, fresh_values, queries = before
    rows, length, dim = keys.shape
    wide, attended = values.shape[2], how.attended and queries is not None
    draws = taken.inputs[5:]  # seed and streams
    template: dict[str, int | bool | mx.Dtype] = {**NO_PARTS, **(how.schedule or NO_SCHEDULE).template, "UNIT": UNIT}
    scratch: Output | None = None
    output: Output | None = None
    asked: list[mx.array | None] = []
    kernel = UNATTENDED
    if queries is not None:
        kernel = KERNEL if how.output else KEYS_ALONE
        heads = queries.shape[1]
        scale = dim**-0.5 if how.scale is None else how.scale
        plan = plan_of(
            rows, heads, 1, dim, wide if how.output else None, length, keys.dtype, attended, how.temper, scale, 1, _LANES
        )
        scratch = plan.scratch
        output = ((rows, heads, 1, wide), queries.dtype) if how.output else None
        template |= {**plan.joining, **plan.template, "WEIGHTED": False, "LIMITED": False, "GUARDED": False}
        heat, names, _, seed, streams = tempering(how.temper, rows, heads, 1)
        asked = [queries, heat, names]
        if how.schedule is not None:
            template |= how.schedule.template
        draws = draws if seed is None else [seed, streams]
    decays = how.decay != 1.0
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
            kernel,
            backend,
            [positions, seen, *taken.inputs[:4], fresh_keys, *draws, keys, values, fresh_values, *asked],
            [
                (keys.shape, keys.dtype),
                (values.shape, values.dtype),
                (positions.shape, mx.int32),
                (seen.shape, mx.int32),
                *taken.outputs,
                scratch,
                output,
            ],
            template={
                **template,
                **taken.template,
                **rule.template(
                    massive=bool(columns), attended=attended, stores=bool(columns) and (attended or decays)
                ),
                "T": keys.dtype,
                "DIMS": dim,
                "VALUE_DIMS": wide,
                "KEY_PACK": _pack(dim, keys.dtype),
                "VALUE_PACK": _pack(wide, keys.dtype),
                "TURNED": False,
                "LOSES": False,
                "RANKED": False,
                "CARRIES": True,
                "SLOTS": _slots(length),
            },
            groups=(rows, 1, 1),
            threads=_LANES,
        )
    )
    keys, values, positions, seen = (next(made) for _ in range(4))
    kept = tuple(next(made) for _ in columns)
    if scratch is not None:
        next(made)
    return Moved(keys, values, positions, seen, kept, next(made, None))


def _pack(dims: int, dtype: mx.Dtype) -> int:
    """Elements of a load of 16 bytes at most, which divide the dimensions."""
    return math.gcd(dims, 16 // dtype.size)


def _slots(length: int) -> int:
    """Slots that a lane has at a time, for rounds alike."""
    rounds = -(-length // (_MOST_SLOTS * _LANES))
    return max(1, -(-length // (rounds * _LANES)))


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
            scale=how.scale if how.output else None,
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
