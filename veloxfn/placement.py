"""Where a kept key is seen by the queries that come later.

Keys arrive rotated by the model and are stored as they arrived. Under `Contiguous` they are turned when they are read,
once, from the position that they were rotated at to their rank among the kept ones: rounding never accumulates.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias, cast

import mlx.core as mx

from veloxfn import checks
from veloxfn.ops.fusion import on_gpu
from veloxfn.ops.ranks import live
from veloxfn.ops.ranks import ranks as rank_slots
from veloxfn.ops.rotate_by import rotate_by

if TYPE_CHECKING:
    from veloxfn.base import Slots

__all__ = [
    "Absolute",
    "Contiguous",
    "Placement",
    "Rope",
    "live_count",
    "ranks",
    "rotate",
    "seen_keys",
    "seen_queries",
]


_SMALLEST, _LARGEST = 1e-30, 1e30  # of an embedding's numbers: their quotients are finite in float32


@dataclass(frozen=True)
class Absolute:
    """Survivors keep the position and the rotation they arrived with; the model's offset is the tokens seen."""


@dataclass(frozen=True)
class Rope:
    """A rotary embedding: pair i of a vector at position p is turned by p * scale / freqs[i].

    Args:
        dims: leading dimensions that are rotated, even; the others stay.
        base: freqs[i] = base ** (2 i / dims), unless `freqs` is given.
        freqs: dims / 2 of them, as in `mx.fast.rope`: periods over 2 pi; inf = never turned.
        traditional: pairs are (2 i, 2 i + 1); else (i, i + dims / 2).
        scale: of the positions.

    Raises:
        ValueError: a number outside its range, or base beside freqs.
        TypeError: a value of another type.
    """

    dims: int
    base: float = 10000.0
    freqs: tuple[float, ...] | None = None
    traditional: bool = False
    scale: float = 1.0

    def __post_init__(self) -> None:
        """Validate the settings."""
        checks.integer("dims", self.dims, low=2)
        if self.dims % 2:
            raise ValueError(f"dims must be even, got {self.dims}")
        for name, value in (("base", self.base), ("scale", self.scale)):
            checks.number(name, value, low=_SMALLEST, high=_LARGEST)
        checks.flag("traditional", self.traditional)
        if self.freqs is None:
            return
        if self.base != 10000.0:
            raise ValueError(f"freqs take the place of base: give one of them, got base={self.base} and freqs")
        checks.instance("freqs", self.freqs, tuple)
        if len(self.freqs) != self.dims // 2:
            raise ValueError(f"freqs must be dims / 2 = {self.dims // 2} numbers, got {len(self.freqs)}")
        for i, freq in enumerate(self.freqs):
            if freq != math.inf:
                checks.number(f"freqs[{i}]", freq, low=_SMALLEST, high=_LARGEST)


@dataclass(frozen=True)
class Contiguous:
    """Survivors are seen at ranks 0, 1, 2 .. without gaps; the model's offset is their number.

    Args:
        rope: the model's rotary embedding, by which the keys arrive rotated.
    """

    rope: Rope

    def __post_init__(self) -> None:
        """Validate the type."""
        checks.instance("rope", self.rope, Rope)


Placement: TypeAlias = Absolute | Contiguous


def live_count(slots: Slots) -> mx.array:
    """Tokens that the slots hold: [N] int32."""
    return live(slots.positions)


def ranks(slots: Slots) -> mx.array:
    """Number of live slots at smaller positions, for each slot: [N, n] int32; negative for a free one."""
    return rank_slots(slots.positions)


def seen_keys(placement: Placement, slots: Slots) -> mx.array:
    """Keys [N, n, D] of the slots as queries see them.

    Raises:
        ValueError: the slots were made for another placement.
    """
    length = slots.positions.shape[1]
    keys = slots.keys if length == slots.keys.shape[1] else slots.keys[:, :length]
    rope = rope_for(placement, slots)
    return keys if rope is None else rotate(rope, keys, start=slots.rotations[:, :length], to=ranks(slots))


def seen_queries(placement: Placement, slots: Slots, queries: mx.array) -> mx.array:
    """The query [N, G, 1, D] of one arrival, rotated as its key, as it is at that key's rank.

    Raises:
        ValueError: the slots were made for another placement.
    """
    rope = rope_for(placement, slots)
    if rope is None:
        return queries
    start = mx.take_along_axis(slots.rotations, mx.maximum(slots.arrived, 0), axis=1)
    newest = live_count(slots)[:, None] - 1
    return rotate(rope, queries, start=start[:, None], to=newest[:, None])


def rope_for(placement: Placement, slots: Slots) -> Rope | None:
    """The embedding by which the keys of `slots` are to be turned, None for none.

    Raises:
        ValueError: the slots were made for another placement.
    """
    turned = isinstance(placement, Contiguous)
    if turned != (slots.rotations.shape[1] > 0):
        made = "slots that hold rotations" if turned else "slots that hold none"
        raise ValueError(
            f"placement={type(placement).__name__} needs {made}: "
            f"init_state must pass placement=config.placement to slots.empty"
        )
    return placement.rope if isinstance(placement, Contiguous) else None


def rotate(rope: Rope, vectors: mx.array, *, start: mx.array, to: mx.array) -> mx.array:
    """Vectors rotated at positions `start` as the same embedding would have given them at `to`.

    The angle is the difference of the two that the embedding takes in float32. Where both positions are equal, the
    vector is returned bit for bit.

    Args:
        rope: the embedding.
        vectors: [.., n, D] of a floating dtype; they are turned in float32 and rounded once.
        start: [.., n] int32, broadcast against `to` and the leading axes of the vectors.
        to: likewise.

    Returns:
        [.., n, D] in the dtype of the vectors.

    Raises:
        ValueError: the embedding rotates more dimensions than the vectors have.
    """
    check_dims(rope, vectors.shape[-1])
    return rotate_by(vectors, start, to, _inverse(rope), scale=rope.scale, traditional=rope.traditional)


def check_dims(rope: Rope, key_dim: int) -> None:
    """Raise ValueError if the embedding rotates more dimensions than keys have."""
    if rope.dims > key_dim:
        raise ValueError(f"the rope's dims must be <= the key dimension, got dims={rope.dims}, D={key_dim}")


def _inverse(rope: Rope) -> mx.array:
    """1 / freqs [dims / 2] or [1, dims / 2] float32, as `mx.fast.rope` takes them."""
    half = rope.dims // 2
    if rope.freqs is not None:
        return mx.array([1.0 / _rounded(freq) for freq in rope.freqs], mx.float32)
    if on_gpu():
        return _powers(rope.base, half)
    # MLX's own exp, which on a CPU is not the nearest float32. The reshape keeps a compiled step from fusing it into
    # the turn, where it would be taken for each key anew.
    return mx.exp(mx.arange(0, -half, -1, dtype=mx.float32) * (math.log(rope.base) / half)).reshape(1, half)


@lru_cache(maxsize=16)
def _powers(base: float, half: int) -> mx.array:
    """Powers base ** (-i / half) as a constant [half] float32: not a transfer in each step."""
    return mx.array([base ** (-i / half) for i in range(half)], mx.float32)


def _rounded(number: float) -> float:
    """The nearest float32."""
    return cast(float, struct.unpack("f", struct.pack("f", number))[0])
