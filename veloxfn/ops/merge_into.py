"""Rows of the values replaced by what they become when losers are merged into them.

v_k <- (v_k + sum_l a_lk v_l) / (1 + sum_l a_lk)
"""

from __future__ import annotations

import mlx.core as mx

from veloxfn import checks
from veloxfn.ops.launch import Kernel, backend_for, launch

__all__ = ["KERNEL", "merge_into", "reference"]

KERNEL = Kernel("merge_into", ("values", "lost", "into", "weights"), ("out",))

_LANES, _SLOTS = 256, 32  # of a threadgroup


def merge_into(
    values: mx.array,
    lost: mx.array,
    into: mx.array,
    weights: mx.array,
    *,
    normalise: bool = True,
    backend: str | None = None,
) -> mx.array:
    """Merge the values of losers into those of their targets.

    Sums are float32, rounded once. What is not finite in a loser counts as 0. A target whose weights sum to 0 stays bit
    for bit, as do all other slots.

    Args:
        values: [N, C, Dv] of a floating dtype.
        lost: [N, L] int32, slots of the losers, none of which is a target.
        into: [N, K] int32, slots of the targets, all different.
        weights: [N, L, K] float32, not negative.
        normalise: divide by 1 + the sum of the weights.
        backend: see `veloxfn.ops.launch.backend_for`.

    Returns:
        [N, C, Dv] in the dtype of the values.

    Raises:
        ValueError: a wrong shape.
        TypeError: values of another dtype.
    """
    checks.array("values", values, "[N, C, Dv]", (None, None, None))
    checks.floating("the dtype of values", values.dtype)
    rows, size, dim = values.shape
    checks.array("lost", lost, "[N, L]", (rows, None))
    checks.array("into", into, "[N, K]", (rows, None))
    checks.array("weights", weights, "[N, L, K]", (rows, lost.shape[1], into.shape[1]))
    backend = backend_for(backend)
    if values.size == 0 or weights.size == 0:
        return values
    if backend == "reference":
        return reference(values, lost, into, weights, normalise=normalise)
    return launch(
        KERNEL,
        backend,
        [values, lost.astype(mx.int32), into.astype(mx.int32), weights.astype(mx.float32)],
        [(values.shape, values.dtype)],
        template={"T": values.dtype, "DV": dim, "NORMALISE": normalise},
        groups=(-(-size // _SLOTS), rows, 1),
        threads=_LANES,
    )[0]


def reference(
    values: mx.array, lost: mx.array, into: mx.array, weights: mx.array, *, normalise: bool = True
) -> mx.array:
    """`merge_into` in MLX's own primitives."""
    given, kept = (mx.take_along_axis(values, index[..., None], axis=1).astype(mx.float32) for index in (lost, into))
    columns = weights.swapaxes(1, 2)
    merged = kept + columns @ mx.where(mx.isfinite(given), given, 0)
    total = columns.sum(axis=2, keepdims=True)
    if normalise:
        merged = merged / (1 + total)
    merged = mx.where(total > 0, merged, kept)
    return mx.put_along_axis(values, into[..., None], merged.astype(values.dtype), axis=1)
