"""The only eviction: protect, select, dispose, free.

Slots are ranked by (class, importance, position), weakest first, with the classes free < NaN < unprotected < protected.
Ties lose oldest first, a NaN never saves a slot, and a protected slot goes last even against +inf.
"""

from __future__ import annotations

from typing import TypeVar

import mlx.core as mx

from veloxfn import ops
from veloxfn.base import Retention, Slots, State
from veloxfn.disposal import Dispose, drop
from veloxfn.ops.constants import numbers
from veloxfn.ops.evict_step import importance_of, updated_mass
from veloxfn.ops.weakest import order_of, shielded
from veloxfn.slots import gather_slots, settle, with_columns, with_slots

__all__ = ["protected", "rank", "retire", "retire_by"]

S = TypeVar("S", bound=State)


def protected(slots: Slots, *, sink: int, recent: int) -> mx.array:
    """Slots [N, n] bool of the first `sink` and the last `recent` arrivals of each row."""
    return shielded(slots.positions, slots.seen, sink=sink, recent=recent)


def rank(slots: Slots, importance: mx.array, *, sink: int, recent: int) -> mx.array:
    """One number per slot that orders by (class, importance, position), lowest = weakest.

    Args:
        slots: slots whose positions are below 2**30.
        importance: [N, n] float32; -0.0 equals 0.0, infinities are in order, NaN is a class of its own.
        sink: first arrivals that are protected.
        recent: last arrivals that are protected.

    Returns:
        [N, n] uint64, distinct for live slots: 2 bits of class, 32 of importance, 30 of position.
    """
    return order_of(importance, slots.positions, slots.seen, sink=sink, recent=recent)


def retire(state: S, importance: mx.array, config: Retention, *, dispose: Dispose = drop) -> S:
    """Free the weakest slots until the budget holds, and end the block.

    Args:
        state: any state; its columns go with their slots.
        importance: [N, n] float32 of every slot; higher stays.
        config: budget, sink, recent_rows and shared_heads.
        dispose: what becomes of the losers.

    Returns:
        The state with S = 0. Where n <= budget nothing is evicted. Else n = budget + 1, with a free slot in every row.

    Raises:
        ValueError: importance is not [N, n], or shared_heads does not divide the rows.
    """
    slots = state.slots
    rows, length = slots.positions.shape
    capacity = config.budget + 1
    if importance.shape != (rows, length):
        raise ValueError(f"importance must be [N, n] = [{rows}, {length}], got {list(importance.shape)}")
    if length < capacity:
        return settle(state)
    shared = _shared(importance.astype(mx.float32), config.shared_heads)
    live = slots.positions >= 0
    if length == capacity:
        if slots.keys.shape[1] > capacity:  # of a larger budget before
            slots = slots._replace(
                keys=slots.keys[:, :capacity],
                values=slots.values[:, :capacity],
                rotations=slots.rotations[:, :capacity],
            )
            state = with_slots(state, slots)
        weakest = ops.weakest(shared, slots.positions, slots.seen, sink=config.sink, recent=config.recent_rows)
        lost = live & (numbers(length) == weakest[:, None])
        state = dispose(state, lost)
        return _freed(state, mx.where(lost, -1, slots.positions))
    order = rank(slots, shared, sink=config.sink, recent=config.recent_rows)
    split = length - config.budget
    places = mx.argpartition(order, split, axis=1).astype(mx.int32)[:, split - 1 :]
    spare, kept = places[:, :1], mx.sort(places[:, 1:], axis=1)
    lost = live & mx.put_along_axis(mx.ones(live.shape, mx.bool_), kept, mx.array(False), axis=1)
    state = gather_slots(dispose(state, lost), mx.concatenate([kept, spare], axis=1))
    free = numbers(capacity) == config.budget
    return _freed(state, mx.where(free, -1, state.slots.positions))


def retire_by(
    state: S,
    config: Retention,
    column: str | None,
    attention: mx.array | None = None,
    *,
    decay: mx.array | None = None,
    counted: mx.array | None = None,
    noise: mx.array | None = None,
    tau: mx.array | None = None,
    keep_low: bool = False,
) -> S:
    """`retire` by a column of the state that takes in the block's attention first; a step is one launch on a GPU.

    Args:
        state: any state; its columns go with their slots.
        config: budget, sink, recent_rows and shared_heads.
        column: name of the column; None = none, ranks by the attention alone, or by age without it.
        attention: [N, n] of the block; None = 0.
        decay: [N] float32, what the column keeps.
        counted: [N] int32, for a ranking per query; None = by sums.
        noise: [N, n] float32 that is added `tau` times.
        tau: [N] float32.
        keep_low: rank by the negative.

    Returns:
        The state with S = 0.
    """
    slots, mass = state.slots, None if column is None else getattr(state, column)
    if slots.positions.shape[1] == slots.keys.shape[1] == config.budget + 1 and config.shared_heads == 1:
        mass, positions = ops.evict_step(
            slots.positions,
            slots.seen,
            mass,
            attention,
            decay=decay,
            counted=counted,
            noise=noise,
            tau=tau,
            keep_low=keep_low,
            sink=config.sink,
            recent=config.recent_rows,
        )
        return _freed(state if column is None else with_columns(state, {column: mass}), positions)
    if mass is None:
        mass = mx.zeros(slots.positions.shape, mx.float32) if attention is None else attention
    else:
        mass = updated_mass(mass, attention, decay)
    if column is not None:
        state = with_columns(state, {column: mass})
    importance = importance_of(mass, slots.positions, counted=counted, noise=noise, tau=tau, keep_low=keep_low)
    return retire(state, importance, config)


def _freed(state: S, positions: mx.array) -> S:
    return settle(with_slots(state, state.slots._replace(positions=positions)))


def _shared(importance: mx.array, heads: int) -> mx.array:
    """Importance [N, n] averaged over each `heads` consecutive rows."""
    if heads == 1:
        return importance
    rows, length = importance.shape
    if rows % heads:
        raise ValueError(f"shared_heads must divide the rows, got shared_heads={heads}, N={rows}")
    groups = importance.reshape(rows // heads, heads, length)
    return mx.broadcast_to(groups.mean(axis=1, keepdims=True), groups.shape).reshape(rows, length)
