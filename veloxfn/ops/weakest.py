"""The slot that is freed next: lowest in the order of (class, importance, position).

Classes, first freed first: free < NaN < unprotected < protected. Ties lose oldest first, a NaN never saves a slot, and
a protected slot goes last even against +inf.
"""

from __future__ import annotations

import mlx.core as mx

from veloxfn import checks
from veloxfn.ops.launch import Kernel, backend_for, lanes_for, launch

__all__ = ["KERNEL", "order_of", "reference", "shielded", "weakest"]

KERNEL = Kernel("weakest", ("positions", "seen", "importance"), ("slot",), most=1024)

_POSITION_BITS = 30


def weakest(
    importance: mx.array,
    positions: mx.array,
    seen: mx.array,
    *,
    sink: int,
    recent: int,
    backend: str | None = None,
) -> mx.array:
    """Slot of the lowest rank in each row; a free one where there is one.

    Args:
        importance: [N, n] float32; -0.0 equals 0.0, infinities are in order, NaN is a class of its own.
        positions: [N, n] int32 of the slots, below 2**30, -1 = free.
        seen: [N] int32, arrivals so far.
        sink: first arrivals that are protected.
        recent: last arrivals that are protected.
        backend: see `veloxfn.ops.launch.backend_for`.

    Returns:
        [N] int32.
    """
    checks.slot_columns(positions, seen)
    checks.required("importance", importance, "[N, n]", positions.shape, mx.float32)
    backend = backend_for(backend)
    if backend == "reference":
        return reference(importance, positions, seen, sink=sink, recent=recent)
    rows, length = positions.shape
    return launch(
        KERNEL,
        backend,
        [positions, seen, importance],
        [((rows,), mx.int32)],
        template={"SINK": sink, "RECENT": recent},
        groups=(rows, 1, 1),
        threads=lanes_for(length),
    )[0]


def reference(importance: mx.array, positions: mx.array, seen: mx.array, *, sink: int, recent: int) -> mx.array:
    """`weakest` in MLX's own primitives."""
    return mx.argmin(order_of(importance, positions, seen, sink=sink, recent=recent), axis=1).astype(mx.int32)


def order_of(importance: mx.array, positions: mx.array, seen: mx.array, *, sink: int, recent: int) -> mx.array:
    """One number per slot, lowest = weakest: arguments as for `weakest`.

    Returns:
        [N, n] uint64, distinct for live slots: 2 bits of class, 32 of importance, 30 of position.
    """
    live, nan = positions >= 0, mx.isnan(importance)
    kind = mx.where(shielded(positions, seen, sink=sink, recent=recent), 3, mx.where(nan, 1, 2))
    bits = mx.view(mx.where(nan, 0.0, importance) + 0.0, mx.uint32)
    ordinal = mx.where(bits >> 31, 0xFFFFFFFF - bits, bits | 0x80000000)
    high = (kind.astype(mx.uint64) << 62) + (ordinal.astype(mx.uint64) << _POSITION_BITS)
    return mx.where(live, high + positions.astype(mx.uint64), 0)


def shielded(positions: mx.array, seen: mx.array, *, sink: int, recent: int) -> mx.array:
    """Live slots [N, n] bool of the first `sink` and the last `recent` arrivals."""
    return mx.logical_and(positions >= 0, mx.logical_or(positions < sink, positions >= seen[:, None] - recent))
