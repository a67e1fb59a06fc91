"""Attention weights over visible slots: the pieces that the ops which rank by attention share."""

from __future__ import annotations

import mlx.core as mx

from veloxfn.ops.fusion import fused, on_gpu

__all__ = ["exponentials", "ready", "softmax"]


def ready(
    queries: mx.array, keys: mx.array, *, grows: bool = False, scale: float | None = None
) -> tuple[mx.array, mx.array]:
    """Queries [.., D] and keys [N, n, D] as float32 [.., D] and [N, D, n], whose product is the logits.

    `grows` says that the queries will become much larger; `scale` of the products is D ** -0.5 unless given.
    """
    unit = queries.shape[-1] ** -0.5 if scale is None else scale
    # A float32 query, or one that grows, times 2**112 could overflow.
    if keys.dtype == queries.dtype == mx.float16 and not grows and not on_gpu():
        keys, unit = _widened(keys), unit * 2.0**112
    return queries.astype(mx.float32) * unit, keys.astype(mx.float32).swapaxes(1, 2)


def softmax(logits: mx.array, visible: mx.array, weight: float = 1.0) -> mx.array:
    """`weight` times softmax over the visible and finite entries of the last axis, 0 where nothing is visible."""
    powers = exponentials(logits, visible)
    total = mx.sum(powers, axis=-1, keepdims=True)
    return powers * mx.where(total > 0, weight / total, 0)


def exponentials(logits: mx.array, visible: mx.array) -> mx.array:
    """exp(logits - their maximum) where visible and finite, else 0."""
    visible = mx.logical_and(visible, mx.abs(logits) < mx.inf)
    top = mx.max(mx.where(visible, logits, mx.finfo(mx.float32).min), axis=-1, keepdims=True)
    return mx.where(visible, _exp(logits - top), 0)


def _exp(x: mx.array) -> mx.array:
    """e**x for x <= 0, relative error 3e-7 + 8e-8 |x|; below -87 that of -87.

    MLX's CPU back end calls the scalar function, 16 ns per element and the largest cost of a step; compiled, this
    takes 3 ns, since it is multiplications and additions alone. On a GPU it is `mx.exp`.
    """
    if on_gpu():
        return mx.exp(x)
    y = mx.maximum(x, -87.0) * 1.4426950408889634
    shifted = y + 12582912.0  # 1.5 * 2**23: the nearest integer is in the low bits of the mantissa
    f = y - (shifted - 12582912.0)
    # 2**f on [-1/2, 1/2]: Taylor, paired so that few of MLX's fused kernels, at most 11 deep, are needed.
    f2 = f * f
    low = (1.0 + f * 0.6931471806) + f2 * (0.2402265070 + f * 0.0555041087)
    power = low + f2 * f2 * ((0.0096181291 + f * 0.0013333558) + f2 * 0.0001540353)
    exponent = (mx.view(shifted, mx.int32) << 23) + 0x3F800000
    return power * mx.view(exponent, mx.float32)


@fused
def _widened(half: mx.array) -> mx.array:
    """float16 as float32, divided by 2**112; infinities and NaN stay what they are.

    MLX's CPU back end converts float16 one branch at a time; moving the bits is exact and takes a quarter of that.
    """
    bits = mx.view(half, mx.uint16).astype(mx.uint32)
    moved = ((bits & 0x8000) << 16) | ((bits & 0x7FFF) << 13)
    return mx.view(mx.where((bits & 0x7C00) == 0x7C00, moved | 0x7F800000, moved), mx.float32)
