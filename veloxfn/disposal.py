"""What happens to the tokens that lose their slot: forgotten, or merged into survivors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import mlx.core as mx

from veloxfn import ops
from veloxfn.base import Slots, State
from veloxfn.ops.merge_targets import MergeRule, Side, finite, merge_weights
from veloxfn.placement import Rope, ranks, rope_for, rotate, seen_keys
from veloxfn.slots import with_slots

if TYPE_CHECKING:
    from veloxfn import cam

__all__ = ["Dispose", "drop", "merge"]

S = TypeVar("S", bound=State)

_TILE_ELEMENTS = 2**22  # pairs of loser and survivor that are looked at together


class Dispose(Protocol):
    """A disposal rule: the state with the losers' content used, before their slots are freed."""

    def __call__(self, state: S, left: mx.array, /) -> S:
        """Use what the losers hold.

        Args:
            state: before the eviction, the losers still in it.
            left: [N, n] int32, its positions after: -1 where a slot was free, or loses its token.
        """
        ...


def drop(state: S, left: mx.array, /) -> S:
    """Forget the losers."""
    return state


def merge(config: cam.Config) -> Dispose:
    """The rule that folds the values (and keys, where the config says so) of the losers into their targets.

    Loser i has m targets; each takes the weight a: 1 / m with merge "sum" and "mean", w / (1 - w) / m with
    "similarity", w = cosine of the keys, clipped to [0, 1]. A survivor becomes (v + sum a v_i) / (1 + sum a), or
    v + sum a v_i with "sum" and normalise=False. Whether a loser is merged at all is drawn with
    `veloxfn.ops.merge_targets.merge_probability`.
    A loser whose mass or content is not finite is dropped; a survivor that takes nothing stays bit for bit.
    """
    rule = MergeRule(
        nearest=config.targets == "nearest",
        following=config.target_count,
        similar=config.merge == "similarity",
        seed=config.seed if config.gate else None,
        sink=config.sink,
        whole=config.merge_keys,
    )

    def dispose(state: Any, left: mx.array) -> Any:
        slots = state.slots
        rope = rope_for(config.placement, slots) if config.merge_keys else None
        seen = seen_keys(config.placement, slots) if rule.compares or config.merge_keys else None
        if left.shape[1] == config.budget + 1 and rope is None:
            return _one_merged(config, rule, state, left, seen)
        return _merged(config, rule, state, left, seen, rope)

    return dispose


def _divides(config: cam.Config) -> bool:
    return config.normalise or config.merge != "sum"


def _one_merged(config: cam.Config, rule: MergeRule, state: Any, left: mx.array, seen: mx.array | None) -> Any:
    """The state after an eviction of one token per row, keys where they arrived."""
    slots = state.slots
    made = ops.merge_targets(rule, slots.positions, left, state.mass, slots.values, seen, slots.streams)

    def merged(buffer: mx.array) -> mx.array:
        return ops.merge_into(buffer, made.lost, made.into, made.weights, normalise=_divides(config))

    slots = slots._replace(values=merged(slots.values), keys=merged(slots.keys) if config.merge_keys else slots.keys)
    return with_slots(state._replace(mass=made.mass), slots)


# ---- Any number of losers ----


class _Tokens(NamedTuple):
    """Losers or survivors of an eviction, M of them per row, in temporal order."""

    places: mx.array  # [N, M] int32, slots
    side: Side
    content: mx.array  # [N, M, Dv] float32 values, or [N, M, Dv + D] with the keys that are merged, too


def _merged(
    config: cam.Config, rule: MergeRule, state: Any, left: mx.array, seen: mx.array | None, rope: Rope | None
) -> Any:
    """The state after an eviction of any number of tokens."""
    slots = state.slots
    gone = mx.where(left < 0, slots.positions, -1)
    losers, survivors = (
        _tokens(config, state, column, mx.argsort(column, axis=1)[:, first:], seen)
        for column, first in ((gone, config.budget), (left, left.shape[1] - config.budget))
    )
    rows, count = survivors.places.shape
    tile = max(1, _TILE_ELEMENTS // (rows * count))
    taken = mx.zeros((rows, count, 1 + losers.content.shape[2]), mx.float32)
    mass = survivors.side.mass
    for start in range(0, losers.places.shape[1], tile):
        now = slice(start, start + tile)
        positions, masses, keys = losers.side
        part = Side(positions[:, now], masses[:, now], None if keys is None else keys[:, now])
        if start:
            part = part._replace(mass=mx.depends([part.mass], [taken])[0])  # one tile in memory at a time
        content = losers.content[:, now]
        targets, shares = merge_weights(rule, slots.streams, part, survivors.side, finite(content))
        content = mx.concatenate([mx.ones((*part.mass.shape, 1)), _or_zero(content)], axis=2)
        taken = taken + shares.swapaxes(1, 2) @ content
        mass = mass + (_or_zero(part.mass)[:, None] @ targets).squeeze(1)
    if rule.nearest:
        state = state._replace(mass=mx.put_along_axis(state.mass, survivors.places, mass, axis=1))
    return with_slots(state, _given(config, slots, survivors, taken, rope))


def _tokens(config: cam.Config, state: Any, column: mx.array, index: mx.array, seen: mx.array | None) -> _Tokens:
    """The slots `index` [N, M], with their positions from `column`."""

    def pick(buffer: mx.array) -> mx.array:
        return mx.take_along_axis(buffer, index[..., None], axis=1).astype(mx.float32)

    keys = None if seen is None else pick(seen)
    content = pick(state.slots.values)
    if config.merge_keys and keys is not None:
        content = mx.concatenate([content, keys], axis=2)
    positions, mass = (mx.take_along_axis(one, index, axis=1) for one in (column, state.mass))
    return _Tokens(index, Side(positions, mass, keys), content)


def _or_zero(column: mx.array) -> mx.array:
    """The column with 0 for what is not finite, so that a product gives it no weight."""
    return mx.where(mx.isfinite(column), column, 0)


def _given(config: cam.Config, slots: Slots, survivors: _Tokens, taken: mx.array, rope: Rope | None) -> Slots:
    """The slots with what the survivors took: weights, then their weighted content [N, K, 1 + ..]."""
    index = survivors.places
    weight, content = taken[..., :1], survivors.content + taken[..., 1:]
    if _divides(config):
        content = content / (1 + weight)
    content = mx.where(weight > 0, content, survivors.content)

    def put(buffer: mx.array, fresh: mx.array) -> mx.array:
        return mx.put_along_axis(buffer, index[..., None], fresh.astype(buffer.dtype), axis=1)

    values, keys = mx.split(content, [slots.values.shape[2]], axis=2)
    if config.merge_keys:
        if rope is not None:  # back to where each survivor's key was rotated
            length = slots.positions.shape[1]
            rank, rotation = (
                mx.take_along_axis(column[:, :length], index, axis=1) for column in (ranks(slots), slots.rotations)
            )
            stored = mx.take_along_axis(slots.keys, index[..., None], axis=1)
            keys = mx.where(weight > 0, rotate(rope, keys, start=rank, to=rotation), stored)
        slots = slots._replace(keys=put(slots.keys, keys))
    return slots._replace(values=put(slots.values, values))
