"""What a state holds against what a full cache would hold: tokens, bytes, ratios."""

from __future__ import annotations

import mlx.core as mx

from veloxfn.base import State
from veloxfn.placement import live_count

__all__ = [
    "allocated_bytes",
    "compression_ratio",
    "full_bytes",
    "kept_bytes",
    "row_bytes",
    "tokens_kept",
    "tokens_seen",
]


def tokens_seen(state: State) -> mx.array:
    """Arrivals so far, padded ones not counted: [N] int32."""
    return state.slots.seen


def tokens_kept(state: State) -> mx.array:
    """Live slots: [N] int32."""
    return live_count(state.slots)


def kept_bytes(state: State) -> mx.array:
    """Bytes of the live keys and values of all rows: [] int64."""
    return tokens_kept(state).astype(mx.int64).sum() * row_bytes(state)


def full_bytes(state: State) -> mx.array:
    """Bytes that a cache without eviction would hold: [] int64."""
    return tokens_seen(state).astype(mx.int64).sum() * row_bytes(state)


def allocated_bytes(state: State) -> int:
    """Bytes of the key and value buffers."""
    return state.slots.keys.nbytes + state.slots.values.nbytes


def compression_ratio(state: State) -> mx.array:
    """full_bytes / kept_bytes, 1.0 when empty: [] float32."""
    kept, seen = (tokens(state).astype(mx.int64).sum() for tokens in (tokens_kept, tokens_seen))
    return mx.where(kept > 0, seen / mx.maximum(kept, 1), 1.0)


def row_bytes(state: State) -> int:
    """Bytes of the key and the value of one token in one row."""
    slots = state.slots
    return slots.keys.shape[2] * slots.keys.dtype.size + slots.values.shape[2] * slots.values.dtype.size
