"""Attention of a few queries, each by itself: the rows of the matrix whose columns `attention_mass` sums."""

from __future__ import annotations

import mlx.core as mx

from veloxfn.ops.weights import ready, softmax

__all__ = ["attention_rows", "reference"]


def attention_rows(queries: mx.array, keys: mx.array, positions: mx.array, until: mx.array) -> mx.array:
    """Attention of each query, averaged over the heads of its group.

    A slot whose product with a query is not finite gets nothing from it and takes nothing from the others.

    Args:
        queries: [N, G, T, D].
        keys: [N, n, D].
        positions: [N, n] int32 of the slots, -1 = free.
        until: [N, T] int32: query t sees the live slots at positions up to until[t]; one that sees none gives zeros.

    Returns:
        [N, T, n] float32.
    """
    rows, groups, count, dim = queries.shape
    queries, wide = ready(queries, keys)
    logits = (queries.reshape(rows, groups * count, dim) @ wide).reshape(rows, groups, count, -1)
    slots = positions[:, None]
    visible = mx.logical_and(slots >= 0, slots <= until[..., None])
    return mx.sum(softmax(logits, visible[:, None], 1 / groups), axis=1)


def reference(queries: mx.array, keys: mx.array, positions: mx.array, until: mx.array) -> mx.array:
    """`attention_rows` by its definition, finite keys only."""
    logits = queries.astype(mx.float32) @ keys.astype(mx.float32)[:, None].swapaxes(2, 3) * queries.shape[3] ** -0.5
    visible = mx.logical_and(positions[:, None] >= 0, positions[:, None] <= until[..., None])[:, None]
    shares = mx.softmax(mx.where(visible, logits, mx.finfo(mx.float32).min), axis=-1)
    return mx.where(visible, shares, 0).mean(axis=1)
