"""Column mass of a block's attention, without its matrix.

    mass_j = sum_t weight_t mean_g softmax_j(q_gt . k_j / sqrt(D))      over the slots visible to t

The block is worked through in tiles of queries, each over the slots that its last query can see, so memory and graph
stay bounded. Products, weights and sums are float32 whatever the keys are.
"""

from __future__ import annotations

import mlx.core as mx

from veloxfn.ops.fusion import fused, on_gpu

__all__ = ["attention_mass", "reference"]

# Attention weights of one tile, in elements of 4 bytes: what stays in a CPU's cache, what fills a GPU.
_CPU_ELEMENTS, _GPU_ELEMENTS = 2**20, 2**22
_TILE_QUERIES = 32  # at least: fewer would make a long block's graph large


def attention_mass(
    queries: mx.array, keys: mx.array, positions: mx.array, until: mx.array, weights: mx.array | None = None
) -> mx.array:
    """Attention that every slot receives from a block of queries.

    A slot whose product with a query is not finite gets nothing from it and takes nothing from the others.

    Args:
        queries: [N, G, S, D].
        keys: [N, n, D].
        positions: [N, n] int32 of the slots, -1 = free. Slot n - S + t may be visible to the queries t .. S-1 only.
        until: [N, S] int32: query t sees the live slots at positions up to until[t]; one that sees none counts nothing.
        weights: [N, S] float32 of the queries; None = 1.

    Returns:
        [N, n] float32.
    """
    rows, groups, count, dim = queries.shape
    length = keys.shape[1]
    unit = 1.0
    if keys.dtype == queries.dtype == mx.float16 and not on_gpu():  # a float32 query times 2**112 could overflow
        keys, unit = _widened(keys), 2.0**112
    wide = keys.astype(mx.float32).swapaxes(1, 2)
    queries = queries.astype(mx.float32) * (unit * dim**-0.5)
    if count == 1 and weights is None:
        return _of_one_token(queries.squeeze(2) @ wide, positions, until)
    weights = mx.ones((rows, count), mx.float32) if weights is None else weights
    tile = max(_TILE_QUERIES, (_GPU_ELEMENTS if on_gpu() else _CPU_ELEMENTS) // (rows * groups * length))
    mass = mx.zeros((rows, length), mx.float32)
    for start in range(0, count, tile):
        stop = min(start + tile, count)
        seen = length - count + stop  # slots behind this are later than the tile
        heads, limit = queries[:, :, start:stop], until[:, start:stop, None]
        if start:
            heads, limit = mx.depends([heads, limit], [mass])  # one tile in memory at a time
        logits = heads.reshape(rows, groups * (stop - start), dim) @ wide[:, :, :seen]
        slots = positions[:, None, :seen]
        part = _of_tile(
            logits.reshape(rows, groups, stop - start, seen),
            (slots >= 0) & (slots <= limit),
            weights[:, start:stop] / groups,
        )
        mass = mass + (part if seen == length else mx.pad(part, [(0, 0), (0, length - seen)]))
    return mass


def reference(
    queries: mx.array, keys: mx.array, positions: mx.array, until: mx.array, weights: mx.array | None = None
) -> mx.array:
    """`attention_mass` by its definition: the whole [N, G, S, n] matrix, finite keys only."""
    logits = queries.astype(mx.float32) @ keys.astype(mx.float32)[:, None].swapaxes(2, 3) * queries.shape[3] ** -0.5
    slots = positions[:, None, :]
    visible = ((slots >= 0) & (slots <= until[:, :, None]))[:, None]
    shares = mx.where(visible, mx.softmax(mx.where(visible, logits, mx.finfo(mx.float32).min), axis=-1), 0)
    each = shares.mean(axis=1)
    return (each if weights is None else each * weights[:, :, None]).sum(axis=1)


def _of_one_token(logits: mx.array, positions: mx.array, until: mx.array) -> mx.array:
    """Mean over G of softmax(logits [N, G, n]) over the slots that one query per row sees: [N, n]."""
    live = (positions >= 0) & (positions <= until)
    if logits.shape[1] == 1:  # in [N, n] alone all of it fuses
        logits = logits.squeeze(1)
        return _powers(logits, live, 1.0)
    return mx.sum(_powers(logits, live[:, None], 1 / logits.shape[1]), axis=1)


def _powers(logits: mx.array, visible: mx.array, weight: float) -> mx.array:
    """`weight` times softmax over the last axis, 0 where nothing is visible."""
    powers = _exponentials(logits, visible)
    total = mx.sum(powers, axis=-1, keepdims=True)
    return powers * mx.where(total > 0, weight / total, 0)


@fused
def _of_tile(logits: mx.array, visible: mx.array, weights: mx.array) -> mx.array:
    """Weighted column sums [N, n] of softmax(logits [N, G, T, n]) over the visible [N, T, n] slots."""
    rows, groups, count, length = logits.shape
    powers = _exponentials(logits, visible[:, None])
    total = powers @ mx.ones((length, 1))  # faster than a sum
    scale = mx.where(total > 0, weights[:, None, :, None] / total, 0)
    spread = scale.reshape(rows, 1, groups * count)
    return (spread @ powers.reshape(rows, groups * count, length)).reshape(rows, length)


def _exponentials(logits: mx.array, visible: mx.array) -> mx.array:
    """exp(logits - their maximum) where visible and finite, else 0."""
    visible = visible & (mx.abs(logits) < mx.inf)
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
