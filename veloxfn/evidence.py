"""What a method may rank by: attention mass from queries, and key norms."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from veloxfn import ops
from veloxfn.base import Slots
from veloxfn.placement import Absolute, seen_keys
from veloxfn.slots import arrival_positions

if TYPE_CHECKING:
    from veloxfn.placement import Placement

__all__ = [
    "arrival_positions",
    "attention_mass",
    "attention_of_last",
    "key_norms",
    "received",
    "visible_to",
]


def visible_to(slots: Slots, until: mx.array) -> mx.array:
    """Live slots at positions up to `until` [N, T]: [N, T, n] bool."""
    positions = slots.positions[:, None]
    return mx.logical_and(positions >= 0, positions <= until[..., None])


def key_norms(keys: mx.array) -> mx.array:
    """Euclidean norm in float32 of keys [.., D]: [..]."""
    return ops.key_norms(keys)


def attention_mass(
    slots: Slots,
    queries: mx.array,
    *,
    placement: Placement | None = None,
    decay: float = 1.0,
    own: bool = True,
    temper: ops.Temper | None = None,
) -> mx.array:
    """Attention that every slot receives from the block that awaits eviction.

    mass_j = sum_t decay^(later queries than t) mean_g softmax_j(q_gt . k_j / sqrt(D)) over the slots visible to t.

    Args:
        slots: slots with S arrivals.
        queries: [N, G, S, D], one per arrival; padded ones count nothing.
        placement: where the keys are seen; None = as they arrived.
        decay: weight of a query per later query.
        own: whether a query sees its own token; the very first token of a row always does.
        temper: temperature and noise of the logits.

    Returns:
        [N, n] float32.
    """
    when = arrival_positions(slots)
    weights = None
    if decay != 1.0 and when.shape[1] > 1:
        later = slots.seen[:, None] - 1 - when
        weights = mx.power(mx.array(decay, mx.float32), later.astype(mx.float32))
    until = when if own else mx.where(when > 0, when - 1, when)
    return ops.attention_mass(
        queries, seen_keys(placement or Absolute(), slots), slots.positions, until, weights, temper
    )


def received(
    slots: Slots,
    queries: mx.array | None,
    attention: mx.array | None,
    *,
    placement: Placement,
    decay: float = 1.0,
    temper: ops.Temper | None = None,
) -> mx.array:
    """Attention [N, n] float32 that every slot receives from the block that awaits eviction, whatever it is known by.

    Args:
        slots: slots with S arrivals.
        queries: [N, G, S, D] of the block, or None.
        attention: [N, n] of the block instead, or None; without both the arriving keys act as queries over the slots
            before them.
        placement: where the keys are seen.
        decay: weight of a query per later query.
        temper: temperature and noise of the logits.
    """
    if attention is not None:
        return attention.astype(mx.float32)
    own = queries is not None
    if queries is None:
        index = mx.maximum(slots.arrived, 0)[..., None]
        queries = mx.take_along_axis(seen_keys(placement, slots), index, axis=1)[:, None]
    return attention_mass(slots, queries, placement=placement, decay=decay, own=own, temper=temper)


def attention_of_last(
    slots: Slots, queries: mx.array, count: int, *, placement: Placement
) -> tuple[mx.array, mx.array]:
    """Attention of the last `count` counted queries of the block that awaits eviction, each by itself.

    Args:
        slots: slots with S arrivals.
        queries: [N, G, S, D] of the block.
        count: T, at most S.
        placement: where the keys are seen.

    Returns:
        mean over the heads [N, T, n] float32, and the queries' positions [N, T] int32, oldest first; -1 and zeros in
        front where a row has fewer.
    """
    when = arrival_positions(slots)
    if when.shape[1] > 1:
        index = mx.argsort(when, axis=1)[:, when.shape[1] - count :]
        queries = mx.take_along_axis(queries, index[:, None, :, None], axis=2)
        when = mx.take_along_axis(when, index, axis=1)
    return ops.attention_rows(queries, seen_keys(placement, slots), slots.positions, when), when
