"""Random numbers as a hash of their address: a 64-bit name and a position."""

from __future__ import annotations

import mlx.core as mx

from veloxfn.ops.fusion import fused

__all__ = ["hashed_gumbel", "hashed_uniform"]


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
