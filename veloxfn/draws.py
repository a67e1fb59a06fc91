"""Noise addressed by what it belongs to: (seed, stream, positions) -> the same draw, always.

A draw is a hash of its address, not the next number of a generator: how arrivals are grouped, where a row stands in a
batch and the global random state cannot matter, and rows of other streams are independent. Streams name layer and head
(`veloxfn.streams`).
"""

from __future__ import annotations

import mlx.core as mx

from veloxfn.ops.noise import hashed_gumbel, hashed_uniform, names

__all__ = ["gumbel", "hashed_gumbel", "names", "uniform"]


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
