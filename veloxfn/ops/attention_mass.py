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
    queries: mx.array, keys: mx.array, positions: mx.array, until: mx.array, weights: mx.array
) -> mx.array:
    """Attention that every slot receives from a block of queries.

    A slot whose product with a query is not finite gets nothing from it and takes nothing from the others.

    Args:
        queries: [N, G, S, D].
        keys: [N, n, D].
        positions: [N, n] int32 of the slots, -1 = free. Slot n - S + t may be visible to the queries t .. S-1 only.
        until: [N, S] int32: query t sees the live slots at positions up to until[t].
        weights: [N, S] float32 of the queries; a query that sees nothing counts nothing.

    Returns:
        [N, n] float32.
    """
    rows, groups, count, dim = queries.shape
    length = keys.shape[1]
    unit = 1.0
    if keys.dtype == mx.float16 and not on_gpu():
        keys, unit = _widened(keys), 2.0**112
    wide = keys.astype(mx.float32).swapaxes(1, 2)
    queries = queries.astype(mx.float32) * (unit * dim**-0.5)
    weights = weights * (1 / groups)
    tile = max(_TILE_QUERIES, (_GPU_ELEMENTS if on_gpu() else _CPU_ELEMENTS) // (rows * groups * length))
    columns = _columns if count == 1 else _fused_columns  # one-token shapes change while a cache fills
    mass = mx.zeros((rows, length), mx.float32)
    for start in range(0, count, tile):
        stop = min(start + tile, count)
        seen = length - count + stop  # slots behind this are later than the tile
        heads, limit = queries[:, :, start:stop], until[:, start:stop, None]
        if start:
            heads, limit = mx.depends([heads, limit], [mass])  # one tile in memory at a time
        logits = heads.reshape(rows, groups * (stop - start), dim) @ wide[:, :, :seen]
        slots = positions[:, None, :seen]
        part = columns(
            logits.reshape(rows, groups, stop - start, seen),
            (slots >= 0) & (slots <= limit),
            weights[:, start:stop],
        )
        mass = mass + (part if seen == length else mx.pad(part, [(0, 0), (0, length - seen)]))
    return mass


def reference(queries: mx.array, keys: mx.array, positions: mx.array, until: mx.array, weights: mx.array) -> mx.array:
    """`attention_mass` by its definition: the whole [N, G, S, n] matrix, finite keys only."""
    logits = queries.astype(mx.float32) @ keys.astype(mx.float32)[:, None].swapaxes(2, 3) * queries.shape[3] ** -0.5
    slots = positions[:, None, :]
    visible = ((slots >= 0) & (slots <= until[:, :, None]))[:, None]
    shares = mx.where(visible, mx.softmax(mx.where(visible, logits, mx.finfo(mx.float32).min), axis=-1), 0)
    return (shares.mean(axis=1) * weights[:, :, None]).sum(axis=1)


def _columns(logits: mx.array, visible: mx.array, weights: mx.array) -> mx.array:
    """Weighted column sums [N, n] of softmax(logits [N, G, T, n]) over the visible [N, T, n] slots."""
    rows, groups, count, length = logits.shape
    visible = visible[:, None] & (mx.abs(logits) < mx.inf)
    top = mx.max(mx.where(visible, logits, mx.finfo(mx.float32).min), axis=-1, keepdims=True)
    powers = mx.where(visible, _exp(logits - top), 0)
    # A product is the faster sum for a block, a plain sum for one token.
    total = mx.sum(powers, axis=-1, keepdims=True) if count == 1 else powers @ mx.ones((length, 1))
    scale = mx.where(total > 0, weights[:, None, :, None] / total, 0)
    if groups * count == 1:
        return (powers * scale).reshape(rows, length)
    spread = scale.reshape(rows, 1, groups * count)
    return (spread @ powers.reshape(rows, groups * count, length)).reshape(rows, length)


_fused_columns = fused(_columns)


def _exp(x: mx.array) -> mx.array:
    """e**x for x <= 0, relative error 2e-7 + 8e-8 |x|; below -87 that of -87.

    MLX's CPU back end calls the scalar function, 16 ns per element and the largest cost of a step; compiled, this
    takes 3 ns, since it is multiplications and additions alone. On a GPU it is `mx.exp`.
    """
    if on_gpu():
        return mx.exp(x)
    y = mx.maximum(x, -87.0) * 1.4426950408889634
    shifted = y + 12582912.0  # 1.5 * 2**23: the nearest integer is in the low bits of the mantissa
    f = y - (shifted - 12582912.0)
    # 2**f on [-1/2, 1/2], Taylor
    power = 1.0 + f * (
        0.6931471806
        + f * (0.2402265070 + f * (0.0555041087 + f * (0.0096181291 + f * (0.0013333558 + f * 0.0001540353))))
    )
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
