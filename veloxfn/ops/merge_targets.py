"""Which survivors take the content of a token that lost its slot, and with which weights.

Its targets are the first survivors that follow it in time, or with `nearest` the one survivor, no sink, with the most
similar key, whose mass gains the loser's. Of m targets

    p = clamp(mass_i / mean mass of the targets, 0, 1)            loser i is merged with probability p
    a_ik = 1 / m, or w / (1 - w) / m with `similar`               w = cosine of the keys in [0, 1]
"""

from __future__ import annotations

from typing import NamedTuple, cast

import mlx.core as mx

from veloxfn import checks
from veloxfn.ops.key_norms import key_norms
from veloxfn.ops.launch import Kernel, backend_for, lanes_for, launch
from veloxfn.ops.noise import halves, hashed_uniform, names

__all__ = [
    "KERNEL",
    "MergeRule",
    "Merging",
    "Side",
    "finite",
    "merge_probability",
    "merge_targets",
    "merge_weights",
    "reference",
]

KERNEL = Kernel(
    "merge_targets",
    ("positions", "left", "mass", "values", "keys", "seed", "streams"),
    ("lost", "into", "weights", "mass_out"),
    most=1024,
)

_LEAST_OWN_SHARE = 2.0**-20  # of a survivor in a merge by similarity, so that equal keys divide by no zero
_LAST = 2**31 - 1


class MergeRule(NamedTuple):
    """How losers find their targets."""

    nearest: bool = False  # the one survivor with the most similar key; else those that follow in time
    following: int = 32  # survivors that follow and take a loser
    similar: bool = False  # weights by the cosine of the keys
    seed: int | None = None  # of the draws that let a loser be merged; None = every loser is
    sink: int = 0  # first arrivals that are never the nearest
    whole: bool = False  # a loser's key must be finite, too, as its value must

    @property
    def compares(self) -> bool:
        """Whether it looks at keys."""
        return self.nearest or self.similar


class Side(NamedTuple):
    """Losers or survivors, M of them per row, survivors in temporal order where there are several losers."""

    positions: mx.array  # [N, M] int32; -1 = a slot that only fills up
    mass: mx.array  # [N, M] float32
    keys: mx.array | None  # [N, M, D] as queries see them, where the rule compares them


class Merging(NamedTuple):
    """What `merge_into` takes, and the masses after."""

    lost: mx.array  # [N, 1] int32, slot of the loser; any slot where none is
    into: mx.array  # [N, K] int32, slots of its targets, all different, and of others that have no weight
    weights: mx.array  # [N, 1, K] float32
    mass: mx.array  # [N, n] float32


def merge_targets(
    rule: MergeRule,
    positions: mx.array,
    left: mx.array,
    mass: mx.array,
    values: mx.array,
    keys: mx.array | None,
    streams: mx.array,
    *,
    backend: str | None = None,
) -> Merging:
    """The targets of the one token of each row that an eviction takes.

    A loser whose mass or content is not finite is not merged.

    Args:
        rule: how targets are found.
        positions: [N, n] int32 of the slots before, below 2**30, -1 = free, the others different.
        left: [N, n] int32 after, -1 = free: the same but for at most one slot of each row.
        mass: [N, n] float32.
        values: [N, n, Dv].
        keys: [N, n, D] as queries see them; None where the rule neither compares them nor asks for whole losers.
        streams: [N] uint32, names of the streams of draws.
        backend: see `veloxfn.ops.launch.backend_for`.

    Returns:
        Slots, weights and masses: K = 1 with `nearest`, else min(following, n - 1).

    Raises:
        ValueError: a wrong shape, no slots, keys are missing, or a number of the rule that is out of its range.
        TypeError: an array of another type.
    """
    _check_rule(rule)
    rows, length = checks.slots_of(positions)
    if positions.size == 0:
        raise ValueError(f"positions must hold rows and slots, got [N, n] = {list(positions.shape)}")
    checks.required("left", left, "[N, n]", (rows, length), mx.int32)
    checks.required("mass", mass, "[N, n]", (rows, length), mx.float32)
    checks.required("streams", streams, "[N]", (rows,), mx.uint32)
    checks.array("values", values, "[N, n, Dv]", (rows, length, None))
    checks.floating("the dtype of values", values.dtype)
    if keys is not None:
        checks.array("keys", keys, "[N, n, D]", (rows, length, None))
        checks.floating("the dtype of keys", keys.dtype)
    elif rule.compares or rule.whole:
        raise ValueError(f"{rule} needs keys")
    backend = backend_for(backend)
    if backend == "reference" or values.size == 0 or (keys is not None and keys.size == 0):
        return reference(rule, positions, left, mass, values, keys, streams)
    targets = _targets(rule, length)
    made = launch(
        KERNEL,
        backend,
        [
            positions,
            left,
            mass,
            values,
            keys if rule.compares or rule.whole else None,
            None if rule.seed is None else halves(rule.seed),
            None if rule.seed is None else streams,
        ],
        [
            ((rows, 1), mx.int32),
            ((rows, targets), mx.int32),
            ((rows, 1, targets), mx.float32),
            (mass.shape, mx.float32) if rule.nearest else None,
        ],
        template={
            "T": values.dtype,
            "TK": mx.float32 if keys is None else keys.dtype,
            "D": 0 if keys is None else keys.shape[2],
            "DV": values.shape[2],
            "TARGETS": targets,
            "NEAREST": rule.nearest,
            "SIMILAR": rule.similar,
            "GATED": rule.seed is not None,
            "WHOLE": rule.whole,
            "SINK": rule.sink,
        },
        groups=(rows, 1, 1),
        threads=lanes_for(length),
    )
    return Merging(made[0], made[1], made[2], made[3] if rule.nearest else mass)


def _check_rule(rule: MergeRule) -> None:
    checks.integer("following", rule.following, low=1, high=2**30)
    checks.integer("sink", rule.sink, low=0)
    if rule.seed is not None:
        checks.integer("seed", rule.seed, low=0, high=2**64 - 1)


def _targets(rule: MergeRule, length: int) -> int:
    return 1 if rule.nearest else min(rule.following, length - 1)


def reference(
    rule: MergeRule,
    positions: mx.array,
    left: mx.array,
    mass: mx.array,
    values: mx.array,
    keys: mx.array | None,
    streams: mx.array,
) -> Merging:
    """`merge_targets` in MLX's own primitives."""
    gone = mx.logical_and(positions >= 0, left < 0)
    lost = mx.argmax(gone, axis=1, keepdims=True).astype(mx.int32)
    seen = keys if rule.compares else None

    def side(index: mx.array, column: mx.array) -> Side:
        places, masses = (mx.take_along_axis(one, index, axis=1) for one in (column, mass))
        return Side(places, masses, None if seen is None else mx.take_along_axis(seen, index[..., None], axis=1))

    loser = side(lost, mx.where(gone, positions, -1))
    if rule.nearest:
        cosines = _cosines(cast(mx.array, loser.keys), cast(mx.array, seen)).squeeze(1)
        able = mx.logical_and(left >= rule.sink, mx.isfinite(cosines))
        cosines = mx.where(able, cosines, -2.0)
        best = cosines == mx.max(cosines, axis=1, keepdims=True)
        into = mx.argmin(mx.where(best, left, _LAST), axis=1, keepdims=True)  # ties: the oldest
    else:
        later = mx.where(left > loser.positions, left, _LAST)
        count = _targets(rule, left.shape[1])
        into = mx.argpartition(later, count - 1, axis=1)[:, :count]
    whole = [values, keys] if rule.whole else [values]
    content = [mx.take_along_axis(cast(mx.array, one), lost[..., None], axis=1) for one in whole]
    merged, shares = merge_weights(rule, streams, loser, side(into, left), finite(*content))
    if rule.nearest:
        given = mx.where(merged > 0, loser.mass[..., None], 0).squeeze(1)
        mass = mx.put_along_axis(mass, into, mx.take_along_axis(mass, into, axis=1) + given, axis=1)
    return Merging(lost, into.astype(mx.int32), shares, mass)


def finite(*content: mx.array) -> mx.array:
    """Tokens [N, M] whose content, [N, M, ..] each, is finite."""
    found = [mx.all(mx.isfinite(one), axis=2) for one in content]
    return found[0] if len(found) == 1 else mx.logical_and(*found)


def merge_weights(
    rule: MergeRule, streams: mx.array, losers: Side, survivors: Side, whole: mx.array
) -> tuple[mx.array, mx.array]:
    """Which losers are merged into which survivors, and with which weight.

    Args:
        rule: how targets are found.
        streams: [N] uint32.
        losers: L of them; only those at positions >= 0 are merged.
        survivors: K of them.
        whole: [N, L] bool, whether a loser's content is finite.

    Returns:
        1 or 0, and weights: two [N, L, K] float32.
    """
    cosines = mx.array(0.0)
    if rule.compares:
        cosines = _cosines(cast(mx.array, losers.keys), cast(mx.array, survivors.keys))
    targets = _targets_of(rule, losers.positions, survivors.positions, cosines).astype(mx.float32)
    count = mx.maximum(targets.sum(axis=2), 1)
    merged = mx.logical_and(whole, mx.isfinite(losers.mass))
    if rule.seed is not None:
        masses = mx.where(mx.isfinite(survivors.mass), survivors.mass, 0)
        mean = (targets @ masses[..., None]).squeeze(2) / count
        drawn = hashed_uniform(names(rule.seed, streams)[:, None], losers.positions)
        merged = mx.logical_and(merged, drawn < merge_probability(losers.mass, mean))
    targets = targets * merged[..., None]
    shares = targets / count[..., None]
    if rule.similar:
        share = mx.clip(mx.where(mx.isnan(cosines), 0.0, cosines), 0.0, 1.0)
        shares = shares * (share / mx.maximum(1 - share, _LEAST_OWN_SHARE))
    return targets, shares


def merge_probability(mass: mx.array, mean: mx.array) -> mx.array:
    """Chance that a loser is merged: clamp(mass / mean mass of its targets, 0, 1).

    NaN gives 0; where the targets have no mass it is 1 for a loser with mass, else 0.
    """
    ratio = mass / mean
    ratio = mx.where(mx.isnan(ratio), 0.0, mx.clip(ratio, 0.0, 1.0))
    return mx.where(mean == 0, (mass > 0).astype(mx.float32), ratio)


def _targets_of(rule: MergeRule, losers: mx.array, survivors: mx.array, cosines: mx.array) -> mx.array:
    """Whether each survivor is a target of each loser: [N, L, K] bool."""
    mine, theirs = losers[..., None], survivors[:, None]
    places = mx.arange(survivors.shape[1])
    if not rule.nearest:
        later = mx.logical_and(theirs > mine, mine >= 0)
        if later.shape[2] <= rule.following:
            return later
        before = later.shape[2] - later.sum(axis=2, keepdims=True)
        return mx.logical_and(later, places < before + rule.following)
    able = mx.logical_and(mx.logical_and(theirs >= rule.sink, mine >= 0), mx.isfinite(cosines))
    nearest = mx.argmax(mx.where(able, cosines, -2.0), axis=2, keepdims=True)  # ties: the oldest
    return mx.logical_and(places == nearest, able)


def _cosines(some: mx.array, others: mx.array) -> mx.array:
    """Cosine similarity of keys [N, L, D] with keys [N, K, D]: [N, L, K]; NaN where a key is zero or not finite."""
    some, others = some.astype(mx.float32), others.astype(mx.float32)
    products = some @ others.swapaxes(1, 2)
    return products / (key_norms(some)[..., None] * key_norms(others)[:, None])
