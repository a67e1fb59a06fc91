"""What happens to the tokens that lose their slot: forgotten, or merged into survivors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar, cast

import mlx.core as mx

from veloxfn import draws
from veloxfn.base import State
from veloxfn.evidence import key_norms
from veloxfn.ops.launch import backend_for
from veloxfn.ops.merge_into import merge_into
from veloxfn.placement import ranks, rope_for, rotate, seen_keys
from veloxfn.slots import with_slots

if TYPE_CHECKING:
    from veloxfn import cam

__all__ = ["Dispose", "drop", "merge", "merge_probability"]

S = TypeVar("S", bound=State)

_LEAST_OWN_SHARE = 2.0**-20  # of a survivor in a merge by similarity, so that equal keys divide by no zero
_TILE_ELEMENTS = 2**22  # pairs of loser and survivor that are looked at together


class Dispose(Protocol):
    """A disposal rule: the state with the losers' content used, before their slots are freed."""

    def __call__(self, state: S, lost: mx.array, /) -> S:
        """Use what the slots `lost` [N, n] bool hold; every slot that is not lost and not free survives."""
        ...


def drop(state: S, lost: mx.array, /) -> S:
    """Forget the losers."""
    return state


class _Side(NamedTuple):
    """Losers or survivors of an eviction, M of them per row, in temporal order where that matters."""

    places: mx.array  # [N, M] int32, slots
    positions: mx.array  # [N, M] int32; -1 = a slot that only fills up
    mass: mx.array  # [N, M] float32
    content: mx.array  # [N, M, Dv] float32 values, or [N, M, Dv + D] with the keys that are merged, too
    keys: mx.array  # [N, M, D] float32, as queries see them; D = 0 where nothing asks for them


def merge(config: cam.Config) -> Dispose:
    """The rule that folds the values (and keys, where the config says so) of the losers into their targets.

    Loser i has m targets; each takes the weight a: 1 / m with merge "sum" and "mean", w / (1 - w) / m with
    "similarity", w = cosine of the keys, clipped to [0, 1]. A survivor becomes (v + sum a v_i) / (1 + sum a), or
    v + sum a v_i with "sum" and normalise=False. Whether a loser is merged at all is drawn with `merge_probability`.
    A loser whose mass or content is not finite is dropped; a survivor that takes nothing stays bit for bit.
    """

    def dispose(state: Any, lost: mx.array) -> Any:
        seen = seen_keys(config.placement, state.slots) if config.compares_keys or config.merge_keys else None
        losers = _losers(config, state, seen, lost)
        survivors = _survivors(config, state, seen, lost, losers)
        rows, count = survivors.places.shape
        tile = max(1, _TILE_ELEMENTS // (rows * count))
        taken = mx.zeros((rows, count, 1 + losers.content.shape[2]), mx.float32)
        mass = survivors.mass
        for start in range(0, losers.places.shape[1], tile):
            part = _Side(*(column[:, start : start + tile] for column in losers))
            if start:
                part = part._replace(mass=mx.depends([part.mass], [taken])[0])  # one tile in memory at a time
            merged, weights = _weights(config, state, part, survivors)
            content = mx.concatenate([mx.ones((*part.mass.shape, 1)), _finite(part.content)], axis=2)
            taken = taken + weights.swapaxes(1, 2) @ content
            mass = mass + (_finite(part.mass)[:, None] @ merged).squeeze(1)
        alone = (losers.places, weights) if losers.places.shape[1] == 1 else None
        return _given(config, state, survivors, taken, mass, alone)

    return dispose


def merge_probability(mass: mx.array, mean: mx.array) -> mx.array:
    """Chance that a loser is merged: clamp(mass / mean mass of its targets, 0, 1).

    NaN gives 0; where the targets have no mass it is 1 for a loser with mass, else 0.
    """
    ratio = mass / mean
    ratio = mx.where(mx.isnan(ratio), 0.0, mx.clip(ratio, 0.0, 1.0))
    return mx.where(mean == 0, (mass > 0).astype(mx.float32), ratio)


def _losers(config: cam.Config, state: cam.State, seen: mx.array | None, lost: mx.array) -> _Side:
    length = lost.shape[1]
    if length == config.budget + 1:
        index = mx.argmax(lost, axis=1, keepdims=True)
    else:
        index = mx.argsort(mx.where(lost, state.slots.positions, -1), axis=1)[:, config.budget :]
    found = _side(config, state, seen, index)
    return found._replace(positions=mx.where(mx.take_along_axis(lost, index, axis=1), found.positions, -1))


def _survivors(config: cam.Config, state: cam.State, seen: mx.array | None, lost: mx.array, losers: _Side) -> _Side:
    """All survivors; in a step, with one loser, only those that can be its targets."""
    positions = mx.where(lost, -1, state.slots.positions)
    length = lost.shape[1]
    if length > config.budget + 1:
        index = mx.argsort(positions, axis=1)[:, length - config.budget :]
    elif config.targets == "window":
        count = min(config.target_count, config.budget)
        later = mx.where(positions > losers.positions, positions, mx.iinfo(mx.int32).max)
        index = mx.argpartition(later, count - 1, axis=1)[:, :count]
    else:
        cosines = _cosines(losers.keys, cast(mx.array, seen)).squeeze(1)
        able = (positions >= config.sink) & mx.isfinite(cosines)
        cosines = mx.where(able, cosines, -2.0)
        best = cosines == mx.max(cosines, axis=1, keepdims=True)
        index = mx.argmin(mx.where(best, positions, mx.iinfo(mx.int32).max), axis=1, keepdims=True)  # ties: the oldest
    found = _side(config, state, seen, index)
    return found._replace(positions=mx.take_along_axis(positions, index, axis=1))


def _side(config: cam.Config, state: cam.State, seen: mx.array | None, index: mx.array) -> _Side:
    """The slots `index` [N, M]; `seen` are the keys [N, n, D] of all slots, None where nothing asks for them."""
    slots = state.slots

    def pick(buffer: mx.array) -> mx.array:
        return mx.take_along_axis(buffer, index[..., None], axis=1).astype(mx.float32)

    content, keys = pick(slots.values), mx.zeros((*index.shape, 0), mx.float32)
    if seen is not None:
        keys = pick(seen)
    if config.merge_keys:
        content = mx.concatenate([content, keys], axis=2)
    positions, mass = (mx.take_along_axis(column, index, axis=1) for column in (slots.positions, state.mass))
    return _Side(index, positions, mass, content, keys)


def _weights(config: cam.Config, state: cam.State, losers: _Side, survivors: _Side) -> tuple[mx.array, mx.array]:
    """Which losers are merged into which survivors, and with which weight: two [N, L, K] float32."""
    cosines = _cosines(losers.keys, survivors.keys) if config.compares_keys else mx.array(0.0)
    targets = _targets(config, losers, survivors, cosines).astype(mx.float32)
    count = mx.maximum(targets.sum(axis=2), 1)
    merged = mx.all(mx.isfinite(losers.content), axis=2) & mx.isfinite(losers.mass)
    if config.gate:
        mean = (targets @ _finite(survivors.mass)[..., None]).squeeze(2) / count
        drawn = draws.uniform(config.seed, state.slots.streams, losers.positions)
        merged = merged & (drawn < merge_probability(losers.mass, mean))
    targets = targets * merged[..., None]
    weights = targets / count[..., None]
    if config.merge == "similarity":
        share = mx.clip(mx.where(mx.isnan(cosines), 0.0, cosines), 0.0, 1.0)
        weights = weights * (share / mx.maximum(1 - share, _LEAST_OWN_SHARE))
    return targets, weights


def _finite(column: mx.array) -> mx.array:
    """The column with 0 for what is not finite, so that a product gives it no weight."""
    return mx.where(mx.isfinite(column), column, 0)


def _targets(config: cam.Config, losers: _Side, survivors: _Side, cosines: mx.array) -> mx.array:
    """Whether each survivor is a target of each loser: [N, L, K] bool."""
    mine, theirs = losers.positions[..., None], survivors.positions[:, None]
    numbers = mx.arange(survivors.places.shape[1])
    if config.targets == "window":
        later = (theirs > mine) & (mine >= 0)
        before = later.shape[2] - later.sum(axis=2, keepdims=True)
        return later & ((numbers < before + config.target_count) | (later.shape[2] <= config.target_count))
    able = (theirs >= config.sink) & (mine >= 0) & mx.isfinite(cosines)
    nearest = mx.argmax(mx.where(able, cosines, -2.0), axis=2, keepdims=True)  # ties: the oldest
    return able & (numbers == nearest)


def _cosines(some: mx.array, others: mx.array) -> mx.array:
    """Cosine similarity of keys [N, L, D] with keys [N, K, D]: [N, L, K]; NaN where a key is zero or not finite."""
    others = others.astype(mx.float32)
    products = some @ others.swapaxes(1, 2)
    return products / (key_norms(some)[..., None] * key_norms(others)[:, None])


def _given(
    config: cam.Config,
    state: cam.State,
    survivors: _Side,
    taken: mx.array,
    mass: mx.array,
    alone: tuple[mx.array, mx.array] | None,
) -> cam.State:
    """The state with what the survivors took: weights, then their weighted content [N, K, 1 + ..].

    `alone` are slot [N, 1] and weights [N, 1, K] of the loser, where there is but one.
    """
    slots, index = state.slots, survivors.places
    weight, content = taken[..., :1], survivors.content + taken[..., 1:]
    normalise = config.normalise or config.merge != "sum"
    if normalise:
        content = content / (1 + weight)
    content = mx.where(weight > 0, content, survivors.content)

    def put(buffer: mx.array, fresh: mx.array) -> mx.array:
        return mx.put_along_axis(buffer, index[..., None], fresh.astype(buffer.dtype), axis=1)

    values, keys = mx.split(content, [slots.values.shape[2]], axis=2)
    if alone is not None and backend_for(None) != "reference":
        merged = merge_into(slots.values, alone[0], index, alone[1], normalise=normalise)
    else:
        merged = put(slots.values, values)
    slots = slots._replace(values=merged)
    if config.merge_keys:
        if rope := rope_for(config.placement, slots):  # back to where each survivor's key was rotated
            rank, rotation = (
                mx.take_along_axis(column[:, : state.mass.shape[1]], index, axis=1)
                for column in (ranks(slots), slots.rotations)
            )
            stored = mx.take_along_axis(slots.keys, index[..., None], axis=1)
            keys = mx.where(weight > 0, rotate(rope, keys, start=rank, to=rotation), stored)
        slots = slots._replace(keys=put(slots.keys, keys))
    if config.targets == "nearest":
        state = state._replace(mass=mx.put_along_axis(state.mass, index, mass, axis=1))
    return with_slots(state, slots)
