"""Dispose: what becomes of the losers' values, keys and masses."""

from __future__ import annotations

import math
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from veloxfn import cam, draws
from veloxfn.base import Retention
from veloxfn.placement import Absolute
from veloxfn.testing.oracle.rows import MARGIN, Row, Token, Vector, seen_key, turned

__all__ = ["dispose"]


@dataclass(frozen=True)
class _Eviction:
    """One eviction of one row."""

    config: cam.Config
    row: Row
    survivors: list[Token]
    seen: dict[int, Vector]  # keys by position, as the block's queries saw them
    margin: float
    cosine: float  # rounding of a cosine


@dataclass(frozen=True)
class _Gift:
    """What one loser adds to one survivor."""

    loser: Token
    target: Token
    weight: float
    spread: float  # how far off the weight may be
    doubtful: bool  # whether it is given at all, or to this target, hangs on rounding


def dispose(config: Retention, row: Row, losers: list[Token], survivors: list[Token], margin: float) -> None:
    """Merge the losers of one eviction into the survivors, all at once, where the config says so."""
    for token in survivors:
        token.merged, token.allowance = 0.0, 0.0
    if not isinstance(config, cam.Config) or config.merge == "off":
        return
    turns = not isinstance(config.placement, Absolute)
    cosine = max(2e-6 if turns else 3e-7, margin / 8 if margin > MARGIN else 0.0)
    seen = {token.position: seen_key(config, token, rank) for rank, token in enumerate(row.tokens)}
    now = _Eviction(config, row, survivors, seen, margin, cosine)
    gifts = [gift for loser in losers for gift in _gifts(now, loser)]
    merged = {}
    for token in survivors:
        if received := [gift for gift in gifts if gift.target is token]:
            merged[token.position] = _merged(now, received, token)
    for token in survivors:
        if token.position in merged:
            token.value, token.key, token.merged, token.allowance = merged[token.position]
    if config.targets == "nearest":
        for gift in gifts:
            if not gift.doubtful:
                gift.target.mass += gift.loser.mass


def _merged(now: _Eviction, gifts: list[_Gift], token: Token) -> tuple[Vector, Vector, float, float]:
    """Value and key of a survivor after the gifts, the size of the numbers added, and how far off they may be.

    Keys are merged as they are seen, then turned back to where the survivor's was rotated.
    """
    config, rope = now.config, getattr(now.config.placement, "rope", None)
    parts = [token.value, token.key] + [part for gift in gifts for part in (gift.loser.value, gift.loser.key)]
    size = max(float(np.abs(part).max(initial=0.0)) for part in parts) * (1 + len(gifts))
    if any(gift.doubtful for gift in gifts):
        return token.value, token.key, size, math.inf
    divided = config.normalise or config.merge != "sum"
    total = 1.0 + (sum(gift.weight for gift in gifts) if divided else 0.0)
    value = (token.value + sum(gift.weight * gift.loser.value for gift in gifts)) / total
    seen = (now.seen[token.position] + sum(gift.weight * now.seen[gift.loser.position] for gift in gifts)) / total
    off = 0.0
    for gift in gifts:
        changes = (gift.loser.value - divided * value, now.seen[gift.loser.position] - divided * seen)
        off += 2 * gift.spread / total * max(float(np.abs(change).max(initial=0.0)) for change in changes)
    if not config.merge_keys:
        return value, token.key, size, off
    if rope is None:
        return value, seen, size, off
    rank = [other.position for other in now.row.tokens].index(token.position)
    return value, turned(rope, seen, token.rotation - rank), size, off + size * (2.0**-17 + now.cosine)


def _gifts(now: _Eviction, loser: Token) -> list[_Gift]:
    targets, tied = _targets(now, loser)
    if tied:
        open_to = [target for target in tied if any(_gate(now, loser, [target]))]
        return [_Gift(loser, target, 0.0, 0.0, True) for target in open_to]
    if not targets:
        return []
    opens, near = _gate(now, loser, targets)
    if not opens and not near:
        return []
    gifts = []
    for target in targets:
        weight, spread = 1.0, 0.0
        if now.config.merge == "similarity":
            cosine = _cosine(now, loser, target)
            likeness = min(1.0, max(0.0, cosine)) if math.isfinite(cosine) else 0.0
            rest = max(1.0 - likeness, 2.0**-20)
            weight = likeness / rest
            spread = now.cosine / rest**2
        gifts.append(_Gift(loser, target, weight / len(targets), spread / len(targets), near))
    return gifts


def _targets(now: _Eviction, loser: Token) -> tuple[list[Token], list[Token]]:
    """The loser's targets; or, where rounding decides between them, the targets that it may have."""
    if now.config.targets == "window":
        later = [token for token in now.survivors if token.position > loser.position]
        return later[: now.config.target_count], []
    likeness = [(_cosine(now, loser, token), token) for token in now.survivors if token.position >= now.config.sink]
    likeness = [(cosine, token) for cosine, token in likeness if math.isfinite(cosine)]
    if not likeness:
        return [], []
    best = max(cosine for cosine, _ in likeness)
    close = [token for cosine, token in likeness if cosine >= best - 2 * now.cosine]
    return ([], close) if len(close) > 1 else (close, [])


def _cosine(now: _Eviction, one: Token, other: Token) -> float:
    """Cosine of two keys as they are seen; NaN where one is 0."""
    first, second = now.seen[one.position], now.seen[other.position]
    length = math.sqrt(float(first @ first)) * math.sqrt(float(second @ second))
    return float(first @ second) / length if length > 0 else math.nan


def _gate(now: _Eviction, loser: Token, targets: list[Token]) -> tuple[bool, bool]:
    """Whether the loser is merged, and whether rounding decides about it."""
    if not now.config.gate:
        return True, False
    mean = sum(token.mass for token in targets) / len(targets)
    if math.isnan(mean) or math.isnan(loser.mass):
        return False, False
    chance = min(1.0, max(0.0, loser.mass / mean)) if mean > 0 else float(loser.mass > 0)
    place = mx.array([[loser.position]], mx.int32)
    draw = float(np.array(draws.uniform(now.config.seed, mx.array([now.row.stream], mx.uint32), place)).item())
    return draw < chance, abs(draw - chance) <= 10 * now.margin
