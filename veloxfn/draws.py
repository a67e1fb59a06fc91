"""Noise addressed by what it belongs to: (seed, stream, positions) -> the same draw, always.

A draw is a hash of its address, not the next number of a generator: how arrivals are grouped, where a row stands in a
batch and the global random state cannot matter, and rows of other streams are independent. Streams name layer and head
(`veloxfn.streams`).
"""

from __future__ import annotations

import mlx.core as mx

from veloxfn.ops.noise import hashed_gumbel, hashed_uniform

__all__ = ["gumbel", "hashed_gumbel", "names", "uniform"]

# Odd and below 2**63, the largest integer that MLX takes as a constant.
_STEP, _FIRST, _SECOND = 0x1E3779B97F4A7C15, 0x3C79AC492BA7B653, 0x1C69B3F74AC4AE35


def names(seed: int, *coordinates: mx.array) -> mx.array:
    """One 64-bit name per address (seed, coordinate, coordinate, ...); the order of the coordinates matters.

    Args:
        seed: 0 .. 2**64 - 1.
        coordinates: non-negative integers, broadcast against each other.

    Returns:
        uint64 in the shape that they broadcast to.
    """
    name = _mixed(mx.array([seed & 0xFFFFFFFF, seed >> 32], mx.uint32).view(mx.uint64).squeeze() + _STEP)
    for coordinate in coordinates:
        name = _mixed(name + (coordinate.astype(mx.uint64) + 1) * _STEP)
    return name


def uniform(seed: int, streams: mx.array, positions: mx.array) -> mx.array:
    """Uniform draws in (0, 1), one per token.

    Args:
        seed: 0 .. 2**64 - 1.
        streams: [N] uint32.
        positions: [N, n] int32; a free slot's (-1) draw means nothing.

    Returns:
        [N, n] float32, neither 0 nor 1.
    """
    return hashed_uniform(names(seed, streams)[:, None], positions)


def gumbel(seed: int, streams: mx.array, positions: mx.array) -> mx.array:
    """Gumbel(0, 1) draws, one per token: arguments as for `uniform`; [N, n] float32, all finite."""
    return hashed_gumbel(names(seed, streams)[:, None], positions)


def _mixed(x: mx.array) -> mx.array:
    """A bijection of uint64 in which every bit of the result depends on all of the argument."""
    x = (x ^ (x >> 27)) * _FIRST
    x = (x ^ (x >> 33)) * _SECOND
    return x ^ (x >> 27)
