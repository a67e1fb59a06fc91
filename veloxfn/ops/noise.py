"""Random numbers as a hash of their address: a 64-bit name and a position."""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx

from veloxfn.ops.fusion import fused

__all__ = ["halves", "hashed_gumbel", "hashed_uniform", "names"]

# Odd and below 2**63, the largest integer that MLX takes as a constant.
_STEP, _FIRST, _SECOND = 0x1E3779B97F4A7C15, 0x3C79AC492BA7B653, 0x1C69B3F74AC4AE35


@fused
def hashed_gumbel(name: mx.array, positions: mx.array) -> mx.array:
    """Gumbel(0, 1) draws for uint64 names and int32 positions, broadcast against each other; float32, finite."""
    return -mx.log(-mx.log(_unit(_keyed(name, positions))))


@fused
def hashed_uniform(name: mx.array, positions: mx.array) -> mx.array:
    """Uniform draws likewise, float32 in (0, 1): neither 0 nor 1."""
    return _unit(_keyed(name, positions))


def _keyed(name: mx.array, positions: mx.array) -> mx.array:
    """32 random bits of (64-bit name, position): for each name, a bijection of the positions."""
    low, high = name.astype(mx.uint32), (name >> 32).astype(mx.uint32)
    x = positions.astype(mx.uint32) + low
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) + high  # + and not ^, which is not exact under vmap
    x = (x ^ (x >> 16)) * 0x846CA68B
    x = (x ^ (x >> 15)) * 0x7FEB352D
    return x ^ (x >> 16)


def _unit(bits: mx.array) -> mx.array:
    """32 bits as a float32 in (0, 1): the middle of one of 2**23 equal intervals, so neither 0 nor 1."""
    return ((bits >> 9).astype(mx.float32) + 0.5) * 2.0**-23


def names(seed: int, *coordinates: mx.array) -> mx.array:
    """One 64-bit name per address (seed, coordinate, coordinate, ...); the order of the coordinates matters.

    Args:
        seed: 0 .. 2**64 - 1.
        coordinates: non-negative integers, broadcast against each other.

    Returns:
        uint64 in the shape that they broadcast to.
    """
    name = _mixed(halves(seed)[:2].view(mx.uint64).squeeze() + _STEP)
    for coordinate in coordinates:
        name = _mixed(name + (coordinate.astype(mx.uint64) + 1) * _STEP)
    return name


@lru_cache(maxsize=64)
def halves(seed: int) -> mx.array:
    """The lower and upper 32 bits of a seed, then two zeros: [4] uint32.

    Two would be 8 bytes. MLX's CUDA back end keeps arrays of that size in one managed page, which every number that the
    CPU writes takes back from the GPU: a kernel that reads it then waits for 30 us.
    """
    return mx.array([seed & 0xFFFFFFFF, seed >> 32, 0, 0], mx.uint32)


def _mixed(x: mx.array) -> mx.array:
    """A bijection of uint64 in which every bit of the result depends on all of the argument."""
    x = (x ^ (x >> 27)) * _FIRST
    x = (x ^ (x >> 33)) * _SECOND
    return x ^ (x >> 27)
