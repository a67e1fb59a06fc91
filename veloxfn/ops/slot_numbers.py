"""The numbers of the slots."""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx

__all__ = ["numbers"]


@lru_cache(maxsize=32)
def numbers(count: int) -> mx.array:
    """0 .. count - 1 as a constant [count] int32: one array for all steps of a full cache, not an op in each."""
    return mx.array(list(range(count)), dtype=mx.int32)
