"""Dispose: what becomes of the losers' values, keys and masses."""

from __future__ import annotations

import math
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from veloxfn import cam, draws
from veloxfn.base import Retention
from veloxfn.testing.oracle.rows import Row, Token, Vector

__all__ = ["dispose"]

_COSINE = 3e-7  # rounding of a cosine in float32


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
    gifts = [gift for loser in losers for gift in _gifts(config, row, loser, survivors, margin)]
    merged = {}
    for token in survivors:
        if received := [gift for gift in gifts if gift.target is token]:
            merged[token.position] = _merged(received, token, config)
    for token in survivors:
        if token.position in merged:
            token.value, token.key, token.merged, token.allowance = merged[token.position]
    if config.targets == "nearest":
        for gift in gifts:
            if not gift.doubtful:
                gift.target.mass += gift.loser.mass


def _merged(gifts: list[_Gift], token: Token, config: cam.Config) -> tuple[Vector, Vector, float, float]:
    """Value and key of a survivor after the gifts, the size of the numbers added, and how far off they may be."""
    parts = [token.value, token.key] + [part for gift in gifts for part in (gift.loser.value, gift.loser.key)]
    size = max(float(np.abs(part).max(initial=0.0)) for part in parts) * (1 + len(gifts))
    if any(gift.doubtful for gift in gifts):
        return token.value, token.key, size, math.inf
    total = 1.0
    if config.normalise or config.merge != "sum":
        total += sum(gift.weight for gift in gifts)
    value = (token.value + sum(gift.weight * gift.loser.value for gift in gifts)) / total
    key = token.key
    if config.merge_keys:
        key = (token.key + sum(gift.weight * gift.loser.key for gift in gifts)) / total
    return value, key, size, 2 * size * sum(gift.spread for gift in gifts) / total


def _gifts(config: cam.Config, row: Row, loser: Token, survivors: list[Token], margin: float) -> list[_Gift]:
    targets, tied = _targets(config, loser, survivors)
    if not targets and not tied:
        return []
    if tied:
        return [
            _Gift(loser, target, 0.0, 0.0, True) for target in tied if any(_gate(config, row, loser, [target], margin))
        ]
    opens, near = _gate(config, row, loser, targets, margin)
    if not opens and not near:
        return []
    gifts = []
    for target in targets:
        weight, spread = 1.0, 0.0
        if config.merge == "similarity":
            cosine = _cosine(loser, target)
            likeness = min(1.0, max(0.0, cosine)) if math.isfinite(cosine) else 0.0
            rest = max(1.0 - likeness, 2.0**-20)
            weight = likeness / rest
            spread = _COSINE / rest**2
        gifts.append(_Gift(loser, target, weight / len(targets), spread / len(targets), near))
    return gifts


def _targets(config: cam.Config, loser: Token, survivors: list[Token]) -> tuple[list[Token], list[Token]]:
    """The loser's targets; or, where rounding decides between them, the targets that it may have."""
    if config.targets == "window":
        later = [token for token in survivors if token.position > loser.position]
        return later[: config.target_count], []
    likeness = [(_cosine(loser, token), token) for token in survivors if token.position >= config.sink]
    likeness = [(cosine, token) for cosine, token in likeness if math.isfinite(cosine)]
    if not likeness:
        return [], []
    best = max(cosine for cosine, _ in likeness)
    close = [token for cosine, token in likeness if cosine >= best - 2 * _COSINE]
    return ([], close) if len(close) > 1 else (close, [])


def _cosine(one: Token, other: Token) -> float:
    length = math.sqrt(float(one.key @ one.key)) * math.sqrt(float(other.key @ other.key))
    return float(one.key @ other.key) / length if length > 0 else math.nan


def _gate(config: cam.Config, row: Row, loser: Token, targets: list[Token], margin: float) -> tuple[bool, bool]:
    """Whether the loser is merged, and whether rounding decides about it."""
    if not config.gate:
        return True, False
    mean = sum(token.mass for token in targets) / len(targets)
    if math.isnan(mean) or math.isnan(loser.mass):
        return False, False
    chance = min(1.0, max(0.0, loser.mass / mean)) if mean > 0 else float(loser.mass > 0)
    place = mx.array([[loser.position]], mx.int32)
    draw = float(np.array(draws.uniform(config.seed, mx.array([row.stream], mx.uint32), place)).item())
    return draw < chance, abs(draw - chance) <= 10 * margin
