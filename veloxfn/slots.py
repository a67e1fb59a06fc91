"""Pure operations on slots: create, append, order, take and join rows.

A state is a NamedTuple with `slots` first, then per-slot columns (slot axis last), then an optional nested `row` of
per-row leaves; every leaf has the leading axis N. The functions here move all of them together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import mlx.core as mx

from veloxfn import checks, ops
from veloxfn.base import Slots, State
from veloxfn.ops.admit import entries_of
from veloxfn.ops.constants import numbers
from veloxfn.placement import Absolute, Contiguous, Placement, check_dims, live_count

__all__ = [
    "append",
    "arrival_positions",
    "arrival_rotations",
    "arrivals",
    "arrive",
    "concat_rows",
    "contents",
    "empty",
    "extend",
    "gather_slots",
    "kept_positions",
    "map_columns",
    "ordered",
    "settle",
    "shrink",
    "streams",
    "take_back",
    "take_rows",
    "with_arrival_rotations",
    "with_columns",
    "with_room",
    "with_slots",
]

S = TypeVar("S", bound=State)


def streams(batch: int, heads: int, layer: int = 0) -> mx.array:
    """Name the noise streams of one layer: layer * 65536 + head, the same for every sequence of a batch.

    Args:
        batch: sequences.
        heads: kv heads, at most 65536.
        layer: index of the layer.

    Returns:
        [batch * heads] uint32, sequence by sequence.

    >>> streams(2, 3, layer=1).tolist()
    [65536, 65537, 65538, 65536, 65537, 65538]
    """
    checks.integer("batch", batch, low=1)
    checks.integer("heads", heads, low=1)
    checks.integer("layer", layer, low=0)
    if heads > 65536 or layer > 65535:
        raise ValueError(f"streams holds up to 65536 heads and layers, got heads={heads}, layer={layer}")
    return mx.tile(mx.arange(heads, dtype=mx.uint32) + layer * 65536, batch)


def empty(
    budget: int,
    rows: int,
    key_dim: int,
    value_dim: int | None,
    dtype: mx.Dtype,
    streams: mx.array | None,
    *,
    placement: Placement = Absolute(),  # noqa: B008 (frozen)
) -> Slots:
    """Slots of `rows` streams that have seen nothing, with room for budget + 1 tokens each.

    A method that is to work with `placement=Contiguous(rope)` passes its config's placement.
    """
    checks.integer("rows", rows, low=1)
    checks.integer("key_dim", key_dim, low=1)
    value_dim = key_dim if value_dim is None else value_dim
    checks.integer("value_dim", value_dim, low=0)
    checks.floating("dtype", dtype)
    if isinstance(placement, Contiguous):
        check_dims(placement.rope, key_dim)
    if streams is None:
        streams = mx.arange(rows, dtype=mx.uint32)
    checks.array("streams", streams, "[N]", (rows,))
    if not mx.issubdtype(streams.dtype, mx.integer):
        raise TypeError(f"streams must be integers, got {streams.dtype}")
    return Slots(
        keys=mx.zeros((rows, budget + 1, key_dim), dtype),
        values=mx.zeros((rows, budget + 1, value_dim), dtype),
        positions=mx.zeros((rows, 0), mx.int32),
        arrived=mx.zeros((rows, 0), mx.int32),
        seen=mx.zeros((rows,), mx.int32),
        streams=streams.astype(mx.uint32),
        rotations=mx.zeros((rows, budget + 1 if isinstance(placement, Contiguous) else 0), mx.int32),
    )


def extend(
    state: S,
    keys: mx.array,
    values: mx.array,
    valid: mx.array | None,
    *,
    budget: int,
    loses: ops.Loss | None = None,
    fresh: Mapping[str, ops.Entry] | None = None,
) -> S:
    """`append`, and every per-slot column with the arrivals' entries; one token into a full buffer is three launches.

    Args:
        state: a state whose last block was evicted.
        keys: [N, S, D] in the dtype of the slots.
        values: [N, S, Dv] likewise.
        valid: [N, S] bool, False = padded; None = all valid.
        budget: rows that the caller keeps.
        loses: the eviction that one token into a full buffer calls for, taken in the same launch, ranked by the column
            of its first entry.
        fresh: for each column by its name, the arrivals' entries: [N, .., S], a number, the norms of their keys or
            addressed draws; None = there are no columns.

    Returns:
        The state with `arrived` [N, S], S = 0 where the eviction was taken; errors as `append`.
    """
    slots = state.slots
    checks.block(slots, keys, values, valid)
    count = keys.shape[1]
    fresh = {} if fresh is None else fresh
    columns = {name: getattr(state, name) for name in fresh}
    one = count == 1 and valid is None and slots.positions.shape[1] == slots.keys.shape[1] == budget + 1
    if one and all(column.ndim == 2 for column in columns.values()):
        turned = slots.rotations.shape[1] > 0
        admitted = ops.admit(
            slots.positions,
            slots.seen,
            [(column, fresh[name]) for name, column in columns.items()],
            rotations=slots.rotations if turned else None,
            loses=loses,
        )
        index = admitted.slot[..., None]
        if keys.shape == values.shape:
            index = mx.broadcast_to(index, keys.shape)  # once for both
        slots = slots._replace(
            keys=mx.put_along_axis(slots.keys, index, keys, axis=1),
            values=mx.put_along_axis(slots.values, index, values, axis=1),
            positions=admitted.positions,
            arrived=admitted.slot,
            seen=admitted.seen,
            rotations=slots.rotations if admitted.rotations is None else admitted.rotations,
        )
        state = with_columns(with_slots(state, slots), dict(zip(columns, admitted.columns, strict=True)))
        return state if loses is None else settle(state)
    slots = append(slots, keys, values, valid, budget=budget)
    if count == 0:
        return with_slots(state, slots)
    coming = arrival_positions(slots)
    grown = {name: arrive(slots, column, entries_of(fresh[name], coming)) for name, column in columns.items()}
    return with_columns(with_slots(state, slots), grown)


def arrival_positions(slots: Slots) -> mx.array:
    """Positions [N, S] int32 of the block that awaits eviction, -1 = padded."""
    valid = slots.arrived >= 0
    if valid.shape[1] == 1:
        return mx.where(valid, slots.seen[:, None] - 1, -1)
    from_here = mx.cumsum(valid.astype(mx.int32), axis=1, reverse=True)
    return mx.where(valid, slots.seen[:, None] - from_here, -1)


def append(slots: Slots, keys: mx.array, values: mx.array, valid: mx.array | None, *, budget: int) -> Slots:
    """Write a block of arrivals; nothing is lost.

    While the buffer has room the block goes behind the last slot. A buffer whose slots are all taken has a free slot in
    every row: the first arrival goes there, in place, and the others behind the last slot. A padded arrival leaves its
    slot free.

    Args:
        slots: slots whose last block was evicted.
        keys: [N, S, D] in the dtype of the slots.
        values: [N, S, Dv] likewise.
        valid: [N, S] bool, False = padded; None = all valid.
        budget: rows that the caller keeps; the buffer grows to budget + 1 rows where it is smaller.

    Returns:
        Slots with `arrived` [N, S].

    Raises:
        ValueError: a wrong shape, or a block absorbed earlier was not evicted yet.
        TypeError: a dtype other than the slots'.
    """
    checks.block(slots, keys, values, valid)
    rows, count, _ = keys.shape
    if count == 0:
        return slots
    length, room = slots.positions.shape[1], max(slots.keys.shape[1], budget + 1)
    if valid is None:
        positions = slots.seen[:, None] if count == 1 else slots.seen[:, None] + mx.arange(count, dtype=mx.int32)
        seen = slots.seen + count
    else:
        keys, values = mx.where(valid[..., None], keys, 0), mx.where(valid[..., None], values, 0)
        after = slots.seen[:, None] + mx.cumsum(valid.astype(mx.int32), axis=1)
        positions, seen = mx.where(valid, after - 1, -1), after[:, -1]
    full = length == slots.keys.shape[1] == room
    buffers = [(slots.keys, keys), (slots.values, values)]
    if slots.rotations.shape[1]:
        index = mx.arange(count, dtype=mx.int32) if valid is None else mx.maximum(positions - slots.seen[:, None], 0)
        rotations = mx.broadcast_to(live_count(slots)[:, None] + index, (rows, count))
        buffers.append((slots.rotations[..., None], rotations[..., None]))
    if full:
        free = mx.argmin(slots.positions, axis=1, keepdims=True)
        tail = mx.broadcast_to(mx.arange(length, length + count - 1, dtype=mx.int32), (rows, count - 1))
        arrived = _behind(free.astype(mx.int32), tail)
        stored = [
            _behind(mx.put_along_axis(buffer, free[..., None], fresh[:, :1], axis=1), fresh[:, 1:])
            for buffer, fresh in buffers
        ]
    else:
        arrived = mx.broadcast_to(mx.arange(length, length + count, dtype=mx.int32), (rows, count))
        stored = [_write(buffer, fresh, length, room) for buffer, fresh in buffers]
    arrived = arrived if valid is None else mx.where(valid, arrived, -1)
    positions = _extended(slots.positions, arrived, positions, in_place=full)
    rotations = stored[2].squeeze(-1) if len(stored) > 2 else slots.rotations
    return Slots(stored[0], stored[1], positions, arrived, seen, slots.streams, rotations)


def _behind(column: mx.array, fresh: mx.array) -> mx.array:
    """`fresh` [N, m, ..] behind `column` [N, n, ..]; the column itself, not a copy, where m = 0."""
    return mx.concatenate([column, fresh], axis=1) if fresh.shape[1] else column


def _write(buffer: mx.array, fresh: mx.array, start: int, room: int) -> mx.array:
    """`fresh` at rows start .. of the buffer, or of a larger one where it does not fit."""
    rows, size, dim = buffer.shape
    if start + fresh.shape[1] > room:
        return mx.concatenate([buffer[:, :start], fresh], axis=1)
    if size < room:
        buffer = mx.concatenate([buffer, mx.zeros((rows, room - size, dim), buffer.dtype)], axis=1)
    return mx.slice_update(buffer, fresh, mx.array([start]), axes=(1,))


def arrive(slots: Slots, column: mx.array, fresh: mx.array | float) -> mx.array:
    """Extend a per-slot column by the arrivals of `slots`.

    Args:
        slots: what `append` returned.
        column: [N, .., n] of the state before.
        fresh: the arrivals' entries, broadcast to [N, .., S].

    Returns:
        [N, .., n'] for the slots of now.
    """
    count = slots.arrived.shape[1]
    in_place = slots.positions.shape[1] - column.shape[-1] < count
    fresh = mx.broadcast_to(mx.array(fresh, column.dtype), (*column.shape[:-1], count))
    return _extended(column, slots.arrived, fresh, in_place=in_place)


def _extended(column: mx.array, arrived: mx.array, fresh: mx.array, *, in_place: bool) -> mx.array:
    """`fresh` [N, .., S] behind `column` [N, .., n]; with `in_place` its first entry at slot arrived[:, 0]."""
    if in_place:
        first = mx.expand_dims(arrived[:, :1], tuple(range(1, column.ndim - 1)))
        column = mx.where(numbers(column.shape[-1]) == first, fresh[..., :1], column)
        fresh = fresh[..., 1:]
    return mx.concatenate([column, fresh], axis=-1) if fresh.shape[-1] else column


def take_back(state: S, tokens: int, *, budget: int) -> S:
    """The state as if the last arrivals of the block that awaits eviction had never come.

    Exact, because nothing was lost: a block's tokens lie behind the kept slots, in order, and only its first may sit in
    a slot that was free before.

    Args:
        state: a state after `absorb`.
        tokens: how many arrivals to take back, 0 .. S, padded ones counted.
        budget: rows that `evict` keeps.

    Returns:
        A state with S - tokens arrivals awaiting eviction.

    Raises:
        ValueError: more tokens than the block has.
    """
    slots = state.slots
    count = slots.arrived.shape[1]
    checks.integer("tokens", tokens, low=0)
    if tokens > count:
        raise ValueError(f"only the block that awaits eviction can be taken back, {count} tokens, got {tokens}")
    if tokens == 0:
        return state
    left, length = count - tokens, slots.positions.shape[1] - tokens
    if left == 0 and length >= budget:
        length += 1  # the slot of the first arrival, which was free before
    seen = slots.seen - (slots.arrived[:, left:] >= 0).sum(axis=1).astype(mx.int32)
    positions = slots.positions[:, :length]
    size = max(length, budget + 1)
    slots = slots._replace(
        keys=slots.keys[:, :size],
        values=slots.values[:, :size],
        positions=mx.where(positions < seen[:, None], positions, -1),
        arrived=slots.arrived[:, :left],
        seen=seen,
        rotations=slots.rotations[:, :size],
    )
    return map_columns(lambda column: column[..., :length], with_slots(state, slots))


def with_columns(state: S, columns: Mapping[str, mx.array]) -> S:
    """The same state with other per-slot columns, by name."""
    return _replace(state, **columns) if columns else state


def with_slots(state: S, slots: Slots) -> S:
    """The same state over other slots."""
    return _replace(state, slots=slots)


def arrivals(slots: Slots) -> tuple[mx.array, mx.array]:
    """Keys [N, S, D] and values [N, S, Dv] of the block that awaits eviction; padded ones are any slot's."""
    index = mx.maximum(slots.arrived, 0)
    return contents(slots.keys, index), contents(slots.values, index)


def contents(buffer: mx.array, index: mx.array) -> mx.array:
    """Rows `index` [N, m] int32 of a buffer [N, C, D]: [N, m, D].

    Copied as a whole: take_along_axis goes element by element, up to three times slower.
    """
    rows, size, dim = buffer.shape
    flat = (index + mx.arange(rows, dtype=mx.int32)[:, None] * size).reshape(-1)
    return buffer.reshape(rows * size, dim)[flat].reshape(*index.shape, dim)


def arrival_rotations(slots: Slots) -> mx.array | None:
    """Positions [N, S] int32 that the keys of the block arrived rotated at; None where the slots hold none."""
    if slots.rotations.shape[1] == 0:
        return None
    return mx.take_along_axis(slots.rotations, mx.maximum(slots.arrived, 0), axis=1)


def with_arrival_rotations(slots: Slots, rotations: mx.array) -> Slots:
    """The same slots whose one arrival per row came rotated at `rotations` [N, 1] int32."""
    here = numbers(slots.rotations.shape[1]) == slots.arrived
    return slots._replace(rotations=mx.where(here, rotations, slots.rotations))


def settle(state: S) -> S:
    """The same state with no block awaiting eviction."""
    slots = state.slots
    return with_slots(state, slots._replace(arrived=mx.zeros((slots.arrived.shape[0], 0), mx.int32)))


def gather_slots(state: S, keep: mx.array) -> S:
    """Keep the slots `keep` [N, m] int32 in that order, for keys, values, positions and every column."""
    slots = state.slots

    def select(column: mx.array) -> mx.array:
        index = keep.reshape(keep.shape[0], *(1,) * (column.ndim - 2), keep.shape[1])
        return mx.take_along_axis(column, mx.broadcast_to(index, (*column.shape[:-1], keep.shape[1])), axis=-1)

    slots = slots._replace(
        keys=contents(slots.keys, keep),
        values=contents(slots.values, keep),
        positions=select(slots.positions),
        rotations=select(slots.rotations) if slots.rotations.shape[1] else slots.rotations,
    )
    return map_columns(select, with_slots(state, slots))


def shrink(state: S, length: int) -> S:
    """The state without the slots that are free in every row, the others in temporal order, free ones first.

    Args:
        state: a state whose last block was evicted.
        length: slots that stay; no row may hold more tokens.

    Returns:
        A state with n = length.
    """
    slots = state.slots
    size, missing = slots.keys.shape[1], slots.keys.shape[1] - length
    index = mx.argsort(slots.positions, axis=1)[:, slots.positions.shape[1] - length :].astype(mx.int32)
    state = gather_slots(state, index)
    slots = state.slots._replace(
        keys=mx.pad(state.slots.keys, [(0, 0), (0, missing), (0, 0)]),
        values=mx.pad(state.slots.values, [(0, 0), (0, missing), (0, 0)]),
    )
    if slots.rotations.shape[1]:
        slots = slots._replace(rotations=mx.pad(slots.rotations, [(0, 0), (0, size - slots.rotations.shape[1])]))
    return with_slots(state, slots)


def with_room(state: S, length: int) -> S:
    """The state with free slots, whose columns are 0, behind those that it has: n = length, at least 1 before."""
    slots = state.slots
    more = length - slots.positions.shape[1]
    positions = mx.pad(slots.positions, [(0, 0), (0, more)], constant_values=-1)
    state = with_slots(state, slots._replace(positions=positions))
    return map_columns(lambda column: mx.pad(column, [(0, 0)] * (column.ndim - 1) + [(0, more)]), state)


def map_columns(function: Callable[[mx.array], mx.array], state: S) -> S:
    """Apply `function` to every per-slot column of a state beside `slots`; `row` stays."""
    names = [name for name in _fields(state) if name not in ("slots", "row")]
    return _replace(state, **{name: function(getattr(state, name)) for name in names})


def ordered(slots: Slots) -> tuple[mx.array, mx.array]:
    """Slots in temporal order, free ones first.

    Returns:
        index [N, m] and positions [N, m] int32, m = n with a block awaiting eviction, else min(n, budget).
    """
    length, size = slots.positions.shape[1], slots.keys.shape[1]
    kept = length if slots.arrived.shape[1] else min(length, size - 1)
    index = mx.argsort(slots.positions, axis=1)[:, length - kept :]
    return index, mx.take_along_axis(slots.positions, index, axis=1)


def kept_positions(state: State) -> mx.array:
    """Arrival index of each kept token, in the order of `get_kv`.

    Returns:
        [N, min(n, budget)] int32, increasing; -1 in front where a row holds fewer tokens. With a block awaiting
        eviction nothing has been lost yet and all n slots are named.
    """
    return ordered(state.slots)[1]


def take_rows(state: S, indices: mx.array) -> S:
    """The rows `indices` [M] int of a state, in that order (repeats allowed): beam search, batch filtering.

    Indices are not checked against N, which would have to wait for them; one out of range gives a row of any content.

    Raises:
        ValueError: indices of another rank.
        TypeError: indices that are not integers.
    """
    checks.array("indices", indices, "[M]", (None,))
    if not mx.issubdtype(indices.dtype, mx.integer):
        raise TypeError(f"indices must be integers, got {indices.dtype}")
    return cast(S, _map_leaves(lambda leaf: leaf[indices], state))


def concat_rows(first: S, second: S) -> S:
    """The rows of `first`, then those of `second`: two states of one method and budget, both evicted.

    Columns are padded with free slots to the longer of the two.

    Raises:
        ValueError: a block awaits eviction, or budgets, dimensions or columns differ.
        TypeError: states of different methods or dtypes.
    """
    if type(first) is not type(second):
        raise TypeError(f"states of one method are joined, got {type(first)} and {type(second)}")
    for state in (first, second):
        if count := state.slots.arrived.shape[1]:
            raise ValueError(f"evict before joining rows: a block of {count} tokens awaits eviction")
    for name in ("keys", "values"):
        a, b = getattr(first.slots, name), getattr(second.slots, name)
        if a.dtype != b.dtype:
            raise TypeError(f"{name} of both states must share a dtype, got {a.dtype} and {b.dtype}")
        if a.shape[1:] != b.shape[1:]:
            raise ValueError(
                f"{name} of both states must agree in [C, D], got {list(a.shape[1:])} and {list(b.shape[1:])}"
            )
    turned, other = (state.slots.rotations.shape[1] for state in (first, second))
    if turned != other:
        raise ValueError(f"both states must have one placement, got rotations of {turned} and {other} slots")
    length = max(first.slots.positions.shape[1], second.slots.positions.shape[1])
    return cast(
        S, _zip_leaves(lambda a, b: mx.concatenate([a, b], axis=0), _padded(first, length), _padded(second, length))
    )


def _padded(state: S, length: int) -> S:
    """A state whose columns are extended to `length` by free slots."""
    missing = length - state.slots.positions.shape[1]
    if missing == 0:
        return state

    def pad(column: mx.array, value: int = 0) -> mx.array:
        return mx.pad(column, [(0, 0)] * (column.ndim - 1) + [(0, missing)], constant_values=value)

    slots = state.slots._replace(positions=pad(state.slots.positions, -1))
    return map_columns(pad, with_slots(state, slots))


def _fields(state: State) -> tuple[str, ...]:
    return cast(tuple[str, ...], cast(Any, state)._fields)


def _replace(state: S, **leaves: Any) -> S:
    return cast(S, cast(Any, state)._replace(**leaves))


def _map_leaves(function: Callable[[mx.array], mx.array], tree: Any) -> Any:
    if isinstance(tree, mx.array):
        return function(tree)
    return type(tree)(*(_map_leaves(function, leaf) for leaf in tree))


def _zip_leaves(function: Callable[[mx.array, mx.array], mx.array], first: Any, second: Any) -> Any:
    if isinstance(first, mx.array):
        return function(first, second)
    return type(first)(*(_zip_leaves(function, a, b) for a, b in zip(first, second, strict=True)))
