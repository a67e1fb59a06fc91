"""Euclidean norms of keys."""

from __future__ import annotations

import math

import mlx.core as mx

from veloxfn.ops.launch import Kernel, backend_for, launch

__all__ = ["KERNEL", "key_norms", "reference"]

KERNEL = Kernel("key_norms", ("keys",), ("norms",))

_LANES = 256


def key_norms(keys: mx.array, *, backend: str | None = None) -> mx.array:
    """Norm of each key in float32; the same for the same key whatever the block, bit for bit.

    Args:
        keys: [.., D].
        backend: see `veloxfn.ops.launch.backend_for`.

    Returns:
        [..] float32.
    """
    backend = backend_for(backend)
    if backend == "reference" or not keys.size:
        return reference(keys)
    count = math.prod(keys.shape[:-1])
    return launch(
        KERNEL,
        backend,
        [keys.reshape(count, keys.shape[-1])],
        [(tuple(keys.shape[:-1]), mx.float32)],
        template={"T": keys.dtype},  # no word of the body: MLX tells built kernels apart by it
        groups=(-(-count // (_LANES // 32)), 1, 1),
        threads=_LANES,
    )[0]


def reference(keys: mx.array) -> mx.array:
    """`key_norms` in MLX's own primitives."""
    return mx.linalg.norm(keys.astype(mx.float32), axis=-1)
