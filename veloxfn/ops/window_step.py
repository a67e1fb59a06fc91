"""The step of SnapKV: the attention of the last queries with one more, then the slot that loses.

    received_j = mean over the window's queries t of A[t, j]
    importance_j = received, its mean or maximum over the `kernel` past slots around j in time

A past slot is one that is older than the last `recent` arrivals.
"""

from __future__ import annotations

import mlx.core as mx

from veloxfn import checks
from veloxfn.ops.constants import numbers
from veloxfn.ops.fusion import fused
from veloxfn.ops.launch import Kernel, backend_for, lanes_for, launch
from veloxfn.ops.weakest import reference as weakest

__all__ = ["KERNEL", "observed", "pooled", "reference", "window_step"]

KERNEL = Kernel(
    "window_step",
    ("window", "attention", "positions", "seen", "arrived", "order"),
    ("window_out", "positions_out", "received"),
    most=1024,
)


def window_step(
    window: mx.array,
    attention: mx.array,
    positions: mx.array,
    seen: mx.array,
    arrived: mx.array,
    *,
    kernel: int,
    pooling: str,
    sink: int,
    recent: int,
    backend: str | None = None,
) -> tuple[mx.array, mx.array]:
    """A window of attention after one query, and positions after one eviction.

    Args:
        window: [N, w, n] float32, a ring: row p % w is the query at position p.
        attention: [N, n] float32 that the slots receive from the query of the token that arrived last.
        positions: [N, n] int32 of the slots, below 2**30, -1 = free.
        seen: [N] int32, arrivals so far.
        arrived: [N, 1] int32, slot of the token, which no earlier query has seen; -1 = padded: the window stays.
        kernel: past slots that are pooled, odd; 1 = no pooling.
        pooling: "mean" or "max" over them.
        sink: first arrivals that are protected.
        recent: last arrivals that are protected.
        backend: see `veloxfn.ops.launch.backend_for`.

    Returns:
        window [N, w, n], and positions [N, n] int32 with -1 for the weakest slot of each row: a free one where there is
        one, so that such a row loses nothing.

    Raises:
        ValueError: a wrong shape, no slots or no queries, an even kernel, an unknown pooling or a negative number.
        TypeError: an array of another type.
    """
    checks.slot_columns(positions, seen)
    rows, length = positions.shape
    checks.required("window", window, "[N, w, n]", (rows, None, length), mx.float32)
    checks.required("attention", attention, "[N, n]", (rows, length), mx.float32)
    checks.required("arrived", arrived, "[N, 1]", (rows, 1), mx.int32)
    if window.size == 0:
        raise ValueError(f"window must hold rows, queries and slots, got [N, w, n] = {list(window.shape)}")
    checks.odd("kernel", kernel)
    checks.choice("pooling", pooling, ("mean", "max"))
    for name, value in (("sink", sink), ("recent", recent)):
        checks.integer(name, value, low=0)
    backend = backend_for(backend)
    if backend == "reference":
        return reference(
            window, attention, positions, seen, arrived, kernel=kernel, pooling=pooling, sink=sink, recent=recent
        )
    made = launch(
        KERNEL,
        backend,
        [
            window,
            attention,
            positions,
            seen,
            arrived,
            None if kernel == 1 else mx.argsort(positions, axis=1).astype(mx.uint32),
        ],
        [(window.shape, mx.float32), (positions.shape, mx.int32), (positions.shape, mx.float32)],
        template={
            "KERNEL": _within(kernel, length),
            "HIGHEST": pooling == "max",
            "SINK": sink,
            "RECENT": recent,
        },
        groups=(rows, 1, 1),
        threads=lanes_for(length),
    )
    return made[0], made[1]


def reference(
    window: mx.array,
    attention: mx.array,
    positions: mx.array,
    seen: mx.array,
    arrived: mx.array,
    *,
    kernel: int,
    pooling: str,
    sink: int,
    recent: int,
) -> tuple[mx.array, mx.array]:
    """`window_step` in MLX's own primitives."""
    window = observed(window, attention[:, None], mx.where(arrived >= 0, seen[:, None] - 1, -1), arrived)
    importance = pooled(window, positions, seen, kernel=kernel, pooling=pooling, recent=recent)
    lost = weakest(importance, positions, seen, sink=sink, recent=recent)[:, None]
    return window, mx.where(numbers(positions.shape[1]) == lost, -1, positions)


def observed(window: mx.array, fresh: mx.array, when: mx.array, arrived: mx.array) -> mx.array:
    """A ring of attention with that of new queries.

    Args:
        window: [N, w, n] float32.
        fresh: [N, T, n] float32 of T <= w queries.
        when: [N, T] int32, their positions, -1 = none.
        arrived: [N, 1] int32, a slot that no query in the window has seen, -1 = none.

    Returns:
        [N, w, n].
    """
    size, count = window.shape[1], when.shape[1]
    if count == 1:
        return _observed(window, fresh, when[..., None], arrived[:, None], numbers(size)[:, None])
    window = mx.where(numbers(window.shape[2]) == arrived[:, None], 0.0, window)
    hits = (when % size)[:, None] == numbers(size)[:, None]
    hits = mx.logical_and(hits, (when >= 0)[:, None])  # [N, w, T]: at most one per ring row
    source = mx.argmax(hits, axis=2)[..., None]
    return mx.where(mx.any(hits, axis=2, keepdims=True), mx.take_along_axis(fresh, source, axis=1), window)


@fused
def _observed(window: mx.array, fresh: mx.array, when: mx.array, arrived: mx.array, rows: mx.array) -> mx.array:
    """The ring with one query: a pass over it, in place, where reading a row before it is written costs a copy."""
    old = mx.where(numbers(window.shape[2]) == arrived, 0.0, window)
    return mx.where(mx.logical_and(rows == when % window.shape[1], when >= 0), fresh, old)


def pooled(
    window: mx.array, positions: mx.array, seen: mx.array, *, kernel: int, pooling: str, recent: int
) -> mx.array:
    """Importance [N, n]: what slots received from the window, pooled in time; arguments as for `window_step`."""
    received = window.sum(axis=1) / window.shape[1]  # not `mean`, which rounds 1 / w first
    if kernel == 1:
        return received
    kernel = _within(kernel, positions.shape[1])
    past = mx.logical_and(positions >= 0, positions < seen[:, None] - recent)
    order = mx.argsort(positions, axis=1)
    past, column = (mx.take_along_axis(one, order, axis=1) for one in (past, received))
    low = 0.0 if pooling == "mean" else -mx.inf
    around = _neighbours(mx.where(past, column, low), kernel, low)
    if pooling == "max":
        found = mx.max(around, axis=0)
    else:
        found = mx.sum(around, axis=0) / mx.maximum(mx.sum(_neighbours(past, kernel, False), axis=0), 1)
    return mx.put_along_axis(received, order, found, axis=1)


def _within(kernel: int, length: int) -> int:
    """The kernel, or the least one that reaches from each of so many slots to all."""
    return min(kernel, 2 * length + 1)


def _neighbours(column: mx.array, kernel: int, fill: float | bool) -> mx.array:
    """`column` [N, n] shifted by each distance of the kernel: [kernel, N, n]."""
    half, length = kernel // 2, column.shape[1]
    wide = mx.pad(column, [(0, 0), (half, half)], constant_values=mx.array(fill, column.dtype))
    return mx.stack([wide[:, start : start + length] for start in range(kernel)])
