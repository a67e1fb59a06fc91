"""Rotary embedding moved from one position to another.

    pair i of a vector is turned by the angle (to * scale * inverse_i) - (start * scale * inverse_i)

Both angles are rounded to float32, as the embedding rounds them; their difference is exact, its rounding carried along.
"""

from __future__ import annotations

from functools import cache

import mlx.core as mx

from veloxfn import checks
from veloxfn.ops.fusion import fused, on_gpu
from veloxfn.ops.launch import Kernel, backend_for, launch

__all__ = ["KERNEL", "reference", "rotate_by"]

KERNEL = Kernel("rotate_by", ("vectors", "start", "to", "inverse", "scale"), ("out",))

_LANES = 256


def rotate_by(
    vectors: mx.array,
    start: mx.array,
    to: mx.array,
    inverse: mx.array,
    *,
    scale: float = 1.0,
    traditional: bool = False,
    backend: str | None = None,
) -> mx.array:
    """Vectors rotated at `start` as the same embedding would have given them at `to`.

    Args:
        vectors: [.., n, D] of a floating dtype; turned in float32 and rounded once. Equal positions give them bit for
            bit.
        start: [.., n] int32, broadcast against the leading axes of the vectors.
        to: likewise.
        inverse: [dims / 2] or [1, dims / 2] float32, angle per position; the first dims dimensions are turned.
        scale: of the positions.
        traditional: pairs are (2 i, 2 i + 1); else (i, i + dims / 2).
        backend: see `veloxfn.ops.launch.backend_for`.

    Returns:
        [.., n, D] in the dtype of the vectors.

    Raises:
        ValueError: more dimensions to turn than the vectors have.
        TypeError: vectors of another dtype.
    """
    dim, dims = vectors.shape[-1], 2 * inverse.size
    checks.floating("the dtype of vectors", vectors.dtype)
    if dims > dim:
        raise ValueError(f"dims must be <= D, got dims={dims}, D={dim}")
    backend = backend_for(backend)
    if vectors.size == 0:  # MLX's CUDA back end divides by the size of what it fuses
        return vectors
    if backend == "reference":
        return reference(vectors, start, to, inverse, scale=scale, traditional=traditional)
    start, to = (mx.broadcast_to(place, vectors.shape[:-1]).reshape(-1) for place in (start, to))
    items = dims // 2 + (dim - dims + 1) // 2
    return launch(
        KERNEL,
        backend,
        [vectors, start.astype(mx.int32), to.astype(mx.int32), inverse.reshape(-1), _number(scale)],
        [(vectors.shape, vectors.dtype)],
        template={"T": vectors.dtype, "D": dim, "DIMS": dims, "TRADITIONAL": traditional},
        groups=(-(-start.size * items // _LANES), 1, 1),
        threads=_LANES,
    )[0]


@cache
def _number(scale: float) -> mx.array:
    return mx.array([scale], mx.float32)


def reference(
    vectors: mx.array,
    start: mx.array,
    to: mx.array,
    inverse: mx.array,
    *,
    scale: float = 1.0,
    traditional: bool = False,
) -> mx.array:
    """`rotate_by` in MLX's own primitives."""
    dims = 2 * inverse.size
    half = dims // 2
    part = vectors if dims == vectors.shape[-1] else vectors[..., :dims]
    sine, cosine = _sine_cosine(start[..., None], to[..., None], inverse, mx.array(scale, mx.float32))
    same = (start == to)[..., None, None]
    sign = mx.array([-1.0, 1.0])
    if traditional:
        pairs = part.reshape(*part.shape[:-1], half, 2)
        turned = _turned(pairs, pairs[..., ::-1], cosine[..., None], sine[..., None], sign, same)
    else:
        pairs = part.reshape(*part.shape[:-1], 2, half)
        turned = _turned(pairs, pairs[..., ::-1, :], cosine[..., None, :], sine[..., None, :], sign[:, None], same)
    turned = turned.reshape(part.shape)
    return turned if part is vectors else mx.concatenate([turned, vectors[..., dims:]], axis=-1)


@fused
def _turned(
    pairs: mx.array, partners: mx.array, cosine: mx.array, sine: mx.array, sign: mx.array, same: mx.array
) -> mx.array:
    """Each number times the cosine, plus or minus its partner times the sine; itself where `same`."""
    turned = pairs.astype(mx.float32) * cosine + partners.astype(mx.float32) * (sine * sign)
    return mx.where(same, pairs, turned.astype(pairs.dtype))


@fused
def _sine_cosine(start: mx.array, to: mx.array, inverse: mx.array, scale: mx.array) -> tuple[mx.array, mx.array]:
    """Sine and cosine of the angle from `start` to `to`."""
    later, earlier = (place.astype(mx.float32) * scale * inverse for place in (to, start))
    angle = later - earlier
    back = angle - later
    rest = (later - (angle - back)) - (earlier + back)  # what the difference lost to rounding
    if on_gpu():
        sine, cosine = mx.sin(angle), mx.cos(angle)
        return sine + rest * cosine, cosine - rest * sine
    # MLX's CPU back end calls the scalar functions, 16 ns per element each; multiplications and additions take 4 ns for
    # both. Reduced by multiples of pi in three parts, two of 5 bits, so that their products are exact: errors of 1.3e-7
    # up to 1e5 rad, 3e-7 up to 1e6.
    shifted = angle * 0.3183098861837907 + 12582912.0  # 1.5 * 2**23: the nearest integer is in the low bits
    turns = shifted - 12582912.0
    x = ((angle - turns * 3.125) - turns * 0.0166015625) + (turns * 8.908910206884e-6 + rest)
    x2 = x * x
    x4 = x2 * x2
    sine = x + x * x2 * ((-1.6666657058e-1 + x2 * 8.3330163531e-3) + x4 * (-1.9806546944e-4 + x2 * 2.5999029073e-6))
    cosine = (1.0 - 0.5 * x2) + x4 * (
        (4.1666655730e-2 + x2 * -1.3888568211e-3) + x4 * (2.4769240529e-5 + x2 * -2.6192481178e-7)
    )
    flip = mx.view(shifted, mx.uint32) << 31  # an odd multiple of pi changes both signs
    sine, cosine = (mx.view(mx.view(wave, mx.uint32) + flip, mx.float32) for wave in (sine, cosine))
    return sine, cosine
