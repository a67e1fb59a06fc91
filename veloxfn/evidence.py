"""What a method may rank by: attention mass from queries, and key norms."""

from __future__ import annotations

import mlx.core as mx

from veloxfn.base import Slots

__all__ = ["arrival_keys", "arrival_positions", "attention_mass", "key_norms", "visible_to"]

# Attention weights of one tile, in elements of 4 bytes: what stays in a CPU's cache, what fills a GPU.
_TILE_ELEMENTS = {mx.DeviceType.cpu: 2**19, mx.DeviceType.gpu: 2**24}
_TILE_QUERIES = 32  # at least: fewer would make a long block's graph large


def arrival_positions(slots: Slots) -> mx.array:
    """Positions [N, S] int32 of the block that awaits eviction, -1 = padded."""
    index = mx.maximum(slots.arrived, 0)
    return mx.where(slots.arrived >= 0, mx.take_along_axis(slots.positions, index, axis=1), -1)


def arrival_keys(slots: Slots) -> mx.array:
    """Keys [N, S, D] of the block that awaits eviction."""
    return mx.take_along_axis(slots.keys, mx.maximum(slots.arrived, 0)[..., None], axis=1)


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

    Works in tiles of queries, each over the slots that its last query can see, so that memory and graph stay bounded
    for any block. Products, weights and sums are float32.

    Args:
        slots: slots with S arrivals.
        queries: [N, G, S, D], one per arrival; padded ones count nothing.
        decay: weight of a query per later query.
        own: whether a query sees its own token; the very first token of a row always does.

    Returns:
        [N, n] float32.
    """
    rows, groups, count, dim = queries.shape
    length = slots.positions.shape[1]
    when = arrival_positions(slots)
    weights = (when >= 0).astype(mx.float32) / groups
    if decay != 1.0:
        later = slots.seen[:, None] - 1 - when
        weights = weights * mx.power(mx.array(decay, mx.float32), later.astype(mx.float32))
    until = when if own else mx.where(when > 0, when - 1, when)
    queries = mx.where((when >= 0)[:, None, :, None], queries.astype(mx.float32) * dim**-0.5, 0)
    keys = slots.keys[:, :length].astype(mx.float32).swapaxes(1, 2)
    tile = max(_TILE_QUERIES, _TILE_ELEMENTS[mx.default_device().type] // (rows * groups * length))
    mass = mx.zeros((rows, length), mx.float32)
    for start in range(0, count, tile):
        stop = min(start + tile, count)
        seen = length - count + stop  # slots behind this are later than the tile
        heads = queries[:, :, start:stop]
        if start:
            heads = mx.depends(heads, mass)  # one tile in memory at a time
        logits = heads.reshape(rows, groups * (stop - start), dim) @ keys[:, :, :seen]
        part = _mass_of_tile(
            logits.reshape(rows, groups, stop - start, seen),
            visible_to(slots, until[:, start:stop])[..., :seen],
            weights[:, start:stop],
        )
        mass = mass + (part if seen == length else mx.pad(part, [(0, 0), (0, length - seen)]))
    return mass


def _mass_of_tile(logits: mx.array, visible: mx.array, weights: mx.array) -> mx.array:
    """Weighted column sums [N, n] of softmax(logits [N, G, T, n]) over the visible [N, T, n] slots."""
    rows, groups, count, length = logits.shape
    # The lowest finite number, not -inf: a query that sees nothing has weight 0, and 0 * NaN would be NaN.
    lowest = mx.finfo(mx.float32).min
    shares = mx.softmax(mx.where(visible[:, None], logits, lowest), axis=-1)
    if count == 1:
        return mx.sum(shares * weights[:, None, :, None], axis=(1, 2))
    spread = mx.broadcast_to(weights[:, None], (rows, groups, count)).reshape(rows, 1, groups * count)
    return (spread @ shares.reshape(rows, groups * count, length)).squeeze(1)
