"""The only eviction: protect, select, dispose, free.

Slots are ranked by (class, importance, position), weakest first, with the classes free < NaN < unprotected < protected.
Ties lose oldest first, a NaN never saves a slot, and a protected slot goes last even against +inf.
"""

from __future__ import annotations

from typing import TypeVar

import mlx.core as mx

from veloxfn.base import Retention, Slots, State
from veloxfn.disposal import Dispose, drop
from veloxfn.slots import gather_slots, numbers, settle, with_slots

__all__ = ["protected", "rank", "retire", "weakest"]

S = TypeVar("S", bound=State)

_POSITION_BITS = 30


def protected(slots: Slots, *, sink: int, recent: int) -> mx.array:
    """Slots [N, n] bool of the first `sink` and the last `recent` arrivals of each row."""
    positions, seen = slots.positions, slots.seen[:, None]
    return (positions >= 0) & ((positions < sink) | (positions >= seen - recent))


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
    live, nan = slots.positions >= 0, mx.isnan(importance)
    kind = mx.where(protected(slots, sink=sink, recent=recent), 3, mx.where(nan, 1, 2))
    bits = mx.view(mx.where(nan, 0.0, importance) + 0.0, mx.uint32)
    ordinal = mx.where(bits >> 31, 0xFFFFFFFF - bits, bits | 0x80000000)
    high = (kind.astype(mx.uint64) << 62) + (ordinal.astype(mx.uint64) << _POSITION_BITS)
    return mx.where(live, high + slots.positions.astype(mx.uint64), 0)


def weakest(order: mx.array) -> mx.array:
    """Slot of the lowest rank: [N, n] uint64 -> [N, 1] int32."""
    return mx.argmin(order, axis=1, keepdims=True).astype(mx.int32)


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
    order = rank(slots, shared, sink=config.sink, recent=config.recent_rows)
    live = slots.positions >= 0
    if length == capacity:
        if slots.keys.shape[1] > capacity:  # of a larger budget before
            slots = slots._replace(
                keys=slots.keys[:, :capacity],
                values=slots.values[:, :capacity],
                rotations=slots.rotations[:, :capacity],
            )
            state = with_slots(state, slots)
        lost = live & (numbers(length) == weakest(order))
        state = dispose(state, lost)
        return _freed(state, mx.where(lost, -1, slots.positions))
    split = length - config.budget
    places = mx.argpartition(order, split, axis=1).astype(mx.int32)[:, split - 1 :]
    spare, kept = places[:, :1], mx.sort(places[:, 1:], axis=1)
    lost = live & mx.put_along_axis(mx.ones(live.shape, mx.bool_), kept, mx.array(False), axis=1)
    state = gather_slots(dispose(state, lost), mx.concatenate([kept, spare], axis=1))
    free = numbers(capacity) == config.budget
    return _freed(state, mx.where(free, -1, state.slots.positions))


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
