"""What one attention call tells a cache: its queries as evidence, or why they are none."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

__all__ = ["can_be_replaced", "complaint", "fitted", "is_ragged", "per_row"]


def complaint(queries: mx.array, keys: mx.array, mask: Any, *, cached: list[int], arrivals: int) -> str:
    """Why the queries of this call do not show the attention that cached rows receive; "" if they do.

    Args:
        queries: [B, Hq, N, D].
        keys: [B, Hkv, n, D] that are attended to.
        mask: of the call.
        cached: shape [B, Hkv, n, D] of what the cache returned.
        arrivals: S, tokens of the block.
    """
    _, heads, _, dim = cached
    if list(keys.shape) != cached:
        return f"it attends to keys {list(keys.shape)}, not to the cached {cached}"
    if queries.shape[-1] != dim or queries.shape[-2] != arrivals or queries.shape[1] % heads:
        return (
            f"its queries {list(queries.shape)} are not [B, Hq, N, D] of the block: "
            f"Hq a multiple of {heads}, N = {arrivals}, D = {dim}"
        )
    if isinstance(mask, mx.array) and mask.dtype != mx.bool_:
        return "it adds an array to the scores, which the queries do not show"
    return ""


def per_row(queries: mx.array, *, heads: int, scale: float) -> mx.array:
    """Queries [B, Hq, N, D] as [B * Hkv, G, N, D] whose scores over sqrt(D) are the model's.

    A learned sink in the softmax (gpt_oss) is not among them: a method weighs tokens against each other, as if the
    model gave nothing to the sink.

    Args:
        queries: of the model.
        heads: Hkv.
        scale: what the model multiplies its scores by.
    """
    batch, all_heads, count, dim = queries.shape
    factor = scale * dim**0.5
    if abs(factor - 1) > 1e-6:
        queries = queries * factor
    return queries.reshape(batch * heads, all_heads // heads, count, dim)


def can_be_replaced(mask: Any) -> bool:
    """Whether a mask says only what is visible, so that the cache, which knows it, may say it in its place."""
    return not isinstance(mask, mx.array) or bool(mask.dtype == mx.bool_)


def is_ragged(mask: Any) -> bool:
    """Whether a mask is one for each sequence: its columns are the slots of the layer that made it, in their order."""
    return isinstance(mask, mx.array) and mask.ndim == 4


def fitted(mask: Any, *, columns: int, count: int) -> Any:
    """A mask made for a layer with another budget, for `columns` candidates of which the last `count` are the block.

    Kept rows are visible to the whole block, so only their number differs. Other masks are returned as they are.
    """
    if not isinstance(mask, mx.array) or mask.dtype != mx.bool_ or mask.shape[-1] == columns:
        return mask
    kept = mx.ones((*mask.shape[:-1], columns - count), mx.bool_)
    return mx.concatenate([kept, mask[..., mask.shape[-1] - count :]], axis=-1)
