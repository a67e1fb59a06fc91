"""Arrays that never change, made once: one array for all steps of a full cache, not an op in each.

None is made by an op: inside an outer `mx.compile` that would be a tracer of the one trace.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Any, NamedTuple

import mlx.core as mx

__all__ = ["NO_SCHEDULE", "Schedule", "bits", "constant", "numbers"]


def bits(number: float) -> int:
    """The bits of a float32 that is not negative, for a template: names of kernels take no sign."""
    return int(struct.unpack("i", struct.pack("f", number + 0.0))[0])


@lru_cache(maxsize=512)
def numbers(count: int) -> mx.array:
    """0 .. count - 1 as [count] int32."""
    return mx.array(list(range(count)), dtype=mx.int32)


_FEW = 1024  # elements of a constant that is kept


@lru_cache(maxsize=64)
def constant(number: float, shape: tuple[int, ...] = (1,), dtype: mx.Dtype = mx.float32) -> mx.array:
    """The number in every element of `shape`, which is small."""
    nested: Any = number
    for size in reversed(shape):
        nested = [nested] * size
    return mx.array(nested, dtype)


class Schedule(NamedTuple):
    """A temperature that goes from `first` to `last` over `steps` queries from `start` on; 0 steps = constant."""

    first: float
    last: float
    steps: int
    start: int

    def at(self, t: mx.array) -> mx.array:
        """The temperature of the query at position t >= 0, in the shape of `t`: float32."""
        if self.steps == 0 or self.first == self.last:
            few = t.size <= _FEW
            return constant(self.first, tuple(t.shape)) if few else mx.full(t.shape, self.first, mx.float32)
        done = mx.clip(t - self.start, 0, self.steps).astype(mx.float32) / self.steps
        return self.first + done * (self.last - self.first)

    @property
    def template(self) -> dict[str, int | bool]:
        """As kernels take it, whose constants have no sign."""
        rise = self.last - self.first
        return {
            "FIRST": bits(self.first),
            "RISE": bits(abs(rise)),
            "FALLS": rise < 0,
            "STEPS": self.steps if rise else 0,
            "START": self.start,
        }


NO_SCHEDULE = Schedule(0.0, 0.0, 0, 0)
