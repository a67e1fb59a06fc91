"""Take back the last tokens of a block that awaits eviction."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from veloxfn.base import State
from veloxfn.slots import map_columns, with_slots

__all__ = ["take_back"]


def take_back(state: State, tokens: int, *, budget: int) -> State:
    """The state as if the last `tokens` arrivals of its block had never come.

    Exact, because `absorb` loses nothing and puts a block's tokens behind the kept slots, in order; only its first
    may sit in a slot that was free before.

    Args:
        state: after `absorb`, before `evict`, without padded arrivals.
        tokens: 1 .. S.
        budget: rows that `evict` keeps.

    Returns:
        A state with S - tokens arrivals awaiting eviction.
    """
    slots: Any = state.slots
    count, length, capacity = slots.arrived.shape[1], slots.positions.shape[1], budget + 1
    remaining = length - tokens
    if tokens == count and remaining + 1 >= capacity:
        remaining += 1  # the slot that the first arrival took becomes free again
    size = max(remaining, capacity)
    seen = slots.seen - tokens
    positions = slots.positions[:, :remaining]
    slots = slots._replace(
        keys=slots.keys[:, :size],
        values=slots.values[:, :size],
        positions=mx.where(positions < seen[:, None], positions, -1),
        arrived=slots.arrived[:, : count - tokens],
        seen=seen,
    )
    return map_columns(lambda column: column[..., :remaining], with_slots(state, slots))
