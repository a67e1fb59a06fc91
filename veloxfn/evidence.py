"""What a method may rank by: attention mass from queries, and key norms."""

from __future__ import annotations

import mlx.core as mx

from veloxfn import ops
from veloxfn.base import Slots

__all__ = ["arrival_positions", "attention_mass", "key_norms", "visible_to"]


def arrival_positions(slots: Slots) -> mx.array:
    """Positions [N, S] int32 of the block that awaits eviction, -1 = padded."""
    valid = slots.arrived >= 0
    if valid.shape[1] == 1:
        return mx.where(valid, slots.seen[:, None] - 1, -1)
    from_here = mx.cumsum(valid.astype(mx.int32), axis=1, reverse=True)
    return mx.where(valid, slots.seen[:, None] - from_here, -1)


def visible_to(slots: Slots, until: mx.array) -> mx.array:
    """Live slots at positions up to `until` [N, T]: [N, T, n] bool."""
    positions = slots.positions[:, None]
    return (positions >= 0) & (positions <= until[..., None])


def key_norms(keys: mx.array) -> mx.array:
    """Euclidean norm in float32 of keys [.., D]: [..]."""
    return mx.linalg.norm(keys.astype(mx.float32), axis=-1)


def attention_mass(slots: Slots, queries: mx.array, *, decay: float = 1.0, own: bool = True) -> mx.array:
    """Attention that every slot receives from the block that awaits eviction.

    mass_j = sum_t decay^(later queries than t) mean_g softmax_j(q_gt . k_j / sqrt(D)) over the slots visible to t.

    Args:
        slots: slots with S arrivals.
        queries: [N, G, S, D], one per arrival; padded ones count nothing.
        decay: weight of a query per later query.
        own: whether a query sees its own token; the very first token of a row always does.

    Returns:
        [N, n] float32.
    """
    length = slots.positions.shape[1]
    when = arrival_positions(slots)
    weights = None
    if decay != 1.0 and when.shape[1] > 1:
        later = slots.seen[:, None] - 1 - when
        weights = mx.power(mx.array(decay, mx.float32), later.astype(mx.float32))
    until = when if own else mx.where(when > 0, when - 1, when)
    keys = slots.keys if length == slots.keys.shape[1] else slots.keys[:, :length]
    return ops.attention_mass(queries, keys, slots.positions, until, weights)
