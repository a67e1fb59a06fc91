"""The live slots of a row: how many there are, and the rank of each by position."""

from __future__ import annotations

import mlx.core as mx

from veloxfn import checks
from veloxfn.ops.launch import Kernel, backend_for, launch

__all__ = ["KERNEL", "live", "ranks", "reference"]

KERNEL = Kernel("ranks", ("positions", "order"), ("rank",))

_LANES = 256


def ranks(positions: mx.array, *, backend: str | None = None) -> mx.array:
    """Number of live slots at smaller positions.

    Args:
        positions: [N, n] int32 of the slots, -1 = free, the others different.
        backend: see `veloxfn.ops.launch.backend_for`.

    Returns:
        [N, n] int32; negative for a free slot.
    """
    rows, length = checks.slots_of(positions)
    backend = backend_for(backend)
    if backend == "reference" or positions.size == 0:
        return reference(positions)
    return launch(
        KERNEL,
        backend,
        [positions, mx.argsort(positions, axis=1).astype(mx.uint32)],
        [(positions.shape, mx.int32)],
        template={},
        groups=(rows, -(-length // _LANES), 1),
        threads=_LANES,
    )[0]


def reference(positions: mx.array) -> mx.array:
    """`ranks` in MLX's own primitives."""
    order = mx.argsort(positions, axis=1)
    place = mx.broadcast_to(mx.arange(positions.shape[1], dtype=mx.int32), positions.shape)
    free = positions.shape[1] - live(positions)
    return mx.put_along_axis(mx.zeros_like(place), order, place, axis=1) - free[:, None]


def live(positions: mx.array) -> mx.array:
    """Number of live slots among positions [N, n]: [N] int32."""
    if positions.shape[1] == 0:  # MLX's CUDA back end does not sum nothing
        return mx.zeros((positions.shape[0],), mx.int32)
    return (positions >= 0).sum(axis=1).astype(mx.int32)
