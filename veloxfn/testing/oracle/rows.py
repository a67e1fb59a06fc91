"""Rows as the reference sees them, and the attention of a query over one."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from veloxfn.base import Retention

__all__ = ["MARGIN", "Row", "Token", "Vector", "attention", "logits", "seen_key", "softmax", "turned"]

MARGIN = 1e-5
Vector = npt.NDArray[np.float64]


@dataclass
class Token:
    """One candidate."""

    position: int
    key: Vector  # [D], as it arrived
    value: Vector = field(default_factory=lambda: np.zeros(0))  # [Dv]
    rotation: int = 0  # where the model's rotary embedding put its key
    mass: float = 0.0
    merged: float = 0.0  # size of the numbers that the last eviction merged in it; 0 = none, it is a bit copy
    allowance: float = 0.0  # how far off its value and key may be by what decided that; inf = by anything


@dataclass
class Row:
    """One row: what it keeps in temporal order, how many arrivals it has counted, and what its last queries saw."""

    tokens: list[Token] = field(default_factory=list)
    seen: int = 0
    stream: int = 0
    window: list[dict[int, float]] = field(default_factory=list)  # of each of the last queries, attention by position


def turned(rope: Any, vector: Vector, steps: float) -> Vector:
    """`vector` [D] rotated by `steps` positions of a `placement.Rope`."""
    half = rope.dims // 2
    periods = rope.freqs or [rope.base ** (2 * pair / rope.dims) for pair in range(half)]
    angles = steps * rope.scale / np.array(periods)
    first = np.arange(half) * 2 if rope.traditional else np.arange(half)
    second = first + (1 if rope.traditional else half)
    result = vector.copy()
    result[first] = vector[first] * np.cos(angles) - vector[second] * np.sin(angles)
    result[second] = vector[first] * np.sin(angles) + vector[second] * np.cos(angles)
    return result


def seen_key(config: Retention, token: Token, rank: int) -> Vector:
    """The key of the token of that rank as queries see it."""
    rope = getattr(config.placement, "rope", None)
    return token.key if rope is None else turned(rope, token.key, rank - token.rotation)


def logits(config: Retention, row: Row, visible: int, query: Vector) -> Vector:
    """Scores query . key / sqrt(D) over the first `visible` tokens: [visible]."""
    keys = np.array([seen_key(config, token, rank) for rank, token in enumerate(row.tokens[:visible])])
    products: Vector = keys @ query / math.sqrt(len(query))
    return products


def softmax(scores: Vector) -> Vector:
    """exp(scores) over their sum."""
    weights = np.exp(scores - scores.max())
    shares: Vector = weights / weights.sum()
    return shares


def attention(config: Retention, row: Row, visible: int, queries: Vector) -> Vector:
    """Attention of one query [G, D] over the first `visible` tokens, averaged over its heads: [visible]."""
    heads = [softmax(logits(config, row, visible, query)) for query in queries]
    mean: Vector = np.mean(heads, axis=0)
    return mean
