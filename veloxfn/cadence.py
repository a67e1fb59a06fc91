"""Cadence "token": a block absorbed one token at a time, evicting after each."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import mlx.core as mx

from veloxfn.base import Retention, State
from veloxfn.slots import map_columns, with_slots

__all__ = ["replay", "token_by_token"]

S = TypeVar("S", bound=State)


def token_by_token(
    step: Callable[..., S],
    state: S,
    keys: mx.array,
    values: mx.array,
    queries: mx.array | None,
    valid: mx.array | None,
) -> S:
    """Feed a block [N, S, ..] to `step` one token at a time; the graph grows by one step per token."""
    for t in range(keys.shape[1]):
        now = slice(t, t + 1)
        state = step(
            state,
            keys[:, now],
            values[:, now],
            queries=None if queries is None else queries[:, :, now],
            valid=None if valid is None else valid[:, now],
        )
    return state


def replay(step: Callable[..., S], config: Retention, state: S, queries: mx.array | None) -> S:
    """Take back the block that awaits eviction and feed it to `step` one token at a time."""
    slots = state.slots
    count, length, capacity = slots.arrived.shape[1], slots.positions.shape[1], config.budget + 1
    first = length - count  # slot of the first arrival, unless it took the free slot of a full buffer
    before = first + 1 if first + 1 >= capacity else first
    size = max(before, capacity)
    valid = slots.arrived >= 0
    seen = slots.seen - valid.sum(axis=1).astype(mx.int32)
    places = mx.concatenate(
        [mx.maximum(slots.arrived[:, :1], 0), mx.broadcast_to(mx.arange(first + 1, length), (len(seen), count - 1))],
        axis=1,
    ).astype(mx.int32)
    keys, values = (mx.take_along_axis(buffer, places[..., None], axis=1) for buffer in (slots.keys, slots.values))
    earlier = slots.positions[:, :before]
    slots = slots._replace(
        keys=slots.keys[:, :size],
        values=slots.values[:, :size],
        positions=mx.where(earlier < seen[:, None], earlier, -1),
        arrived=slots.arrived[:, :0],
        seen=seen,
    )
    state = map_columns(lambda column: column[..., :before], with_slots(state, slots))
    return token_by_token(step, state, keys, values, queries, valid)
