"""Arrays that never change, made once: one array for all steps of a full cache, not an op in each.

None is made by an op: inside an outer `mx.compile` that would be a tracer of the one trace.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Any

import mlx.core as mx

__all__ = ["absent", "constant", "numbers", "schedule"]

_MOST = 2**31 - 1


@lru_cache(maxsize=32)
def numbers(count: int) -> mx.array:
    """0 .. count - 1 as [count] int32."""
    return mx.array(list(range(count)), dtype=mx.int32)


@lru_cache(maxsize=64)
def constant(number: float, shape: tuple[int, ...] = (1,), dtype: mx.Dtype = mx.float32) -> mx.array:
    """The number in every element of `shape`, which is small."""
    nested: Any = number
    for size in reversed(shape):
        nested = [nested] * size
    return mx.array(nested, dtype)


@lru_cache(maxsize=64)
def schedule(first: float, rise: float, steps: int, start: int) -> mx.array:
    """The bits of two float32, and two numbers below 2**31: [4] uint32."""
    bits = [struct.unpack("I", struct.pack("f", number))[0] for number in (first, rise)]
    return mx.array([*bits, min(steps, _MOST), min(start, _MOST)], mx.uint32)


def absent(dtype: mx.Dtype) -> mx.array:
    """What stands in for an input that a kernel does not read."""
    return constant(0, (1,), dtype)
