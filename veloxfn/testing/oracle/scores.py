"""Score: how important each method finds each candidate."""

from __future__ import annotations

import math
from collections.abc import Callable

import mlx.core as mx
import numpy as np

from veloxfn import cam, draws, h2o, keyformer, knorm, pyramidkv, snapkv, streaming_llm, tova
from veloxfn.base import Retention
from veloxfn.testing.oracle.rows import Row, Vector, attention, logits, softmax

__all__ = [
    "SCORES",
    "Score",
    "recent_rows",
    "score_h2o",
    "score_keyformer",
    "score_knorm",
    "score_pyramidkv",
    "score_snapkv",
    "score_streaming_llm",
    "score_tova",
    "temperature",
]

Score = Callable[[Retention, Row, int, Vector], list[float]]
"""(config, row with its arrivals appended, number of arrivals, queries [G, arrivals, D]) -> importance per token."""


def recent_rows(config: Retention) -> int:
    """Last arrivals that are protected."""
    room = config.budget - config.sink - 1
    if isinstance(config, pyramidkv.Config):
        return recent_rows(config.scorer)
    if isinstance(config, snapkv.Config):
        return min(32, room) if config.window is None else config.window
    if isinstance(config, keyformer.Config) and config.recent is None:
        return max(0, min(int(0.3 * config.budget), room))
    if isinstance(config, h2o.Config) and config.recent is None:
        return max(0, min(config.budget // 2, room))
    return int(getattr(config, "recent", config.recent_rows))


def _receive(row: Row, shares: Vector, decay: float = 1.0) -> None:
    """Decay all mass, then add one query's attention over the first tokens."""
    for token, share in zip(row.tokens, shares, strict=False):
        token.mass = decay * token.mass + float(share)


def score_h2o(config: Retention, row: Row, arrivals: int, queries: Vector) -> list[float]:
    """Accumulated attention mass; age-normalised where the config says so."""
    assert isinstance(config, h2o.Config)
    proxy = config.query_source == "key_proxy"
    older = len(row.tokens) - arrivals
    for index in range(arrivals):
        own = older + index
        if not proxy:
            _receive(row, attention(config, row, own + 1, queries[:, index]), config.decay)
        elif own == 0:
            row.tokens[0].mass = 1.0
        else:
            _receive(row, attention(config, row, own, row.tokens[own].key[None]), config.decay)
    if not config.age_normalised:
        return [token.mass for token in row.tokens]
    ages = [row.seen - token.position - (1 if proxy else 0) for token in row.tokens]
    return [token.mass / max(1, age) for token, age in zip(row.tokens, ages, strict=True)]


def temperature(config: keyformer.Config, time: int) -> float:
    """Keyformer's schedule, its Eq. 10: linear from tau_init at time 0 to tau_end at anneal_steps, then constant."""
    if config.tau is not None:
        return config.tau
    if config.anneal_steps == 0:
        return config.tau_init
    return config.tau_init + min(time, config.anneal_steps) * (config.tau_end - config.tau_init) / config.anneal_steps


def score_keyformer(config: Retention, row: Row, arrivals: int, queries: Vector) -> list[float]:
    """Mass of softmax((x + noise) / tau), or h2o's mass plus tau times one draw per token."""
    assert isinstance(config, keyformer.Config)
    proxy = config.query_source == "key_proxy"
    older, first = len(row.tokens) - arrivals, row.seen - arrivals
    heads = 1 if proxy else queries.shape[0]
    zeta = _zeta(config, row, heads, list(range(first, row.seen)))
    for index in range(arrivals):
        own = older + index
        if proxy and own == 0:
            row.tokens[0].mass = 1.0
            continue
        visible = own if proxy else own + 1
        asking = row.tokens[own].key[None] if proxy else queries[:, index]
        tau = 1.0 if config.noise == "additive" else temperature(config, max(0, first + index - config.anneal_from))
        rows = [
            softmax((logits(config, row, visible, query) + zeta[head, index, :visible]) / tau)
            for head, query in enumerate(asking)
        ]
        _receive(row, np.mean(rows, axis=0))
    mass = [token.mass for token in row.tokens]
    if config.noise != "additive":
        return mass
    tau = temperature(config, max(0, row.seen - 1 - config.anneal_from))
    places = mx.array([[token.position for token in row.tokens]], mx.int32)
    noise = np.array(draws.gumbel(config.seed, mx.array([row.stream], mx.uint32), places))[0]
    return [own + tau * float(draw) for own, draw in zip(mass, noise, strict=True)]


def _zeta(config: keyformer.Config, row: Row, heads: int, times: list[int]) -> Vector:
    """Noise on the logits [heads, times, tokens]."""
    places = [token.position for token in row.tokens]
    if config.noise != "logit" or not times:
        return np.zeros((heads, len(times), len(places)))
    named = draws.names(
        config.seed, mx.array(row.stream, mx.uint32), mx.arange(heads)[:, None], mx.array(times, mx.int32)[None]
    )
    return np.array(draws.hashed_gumbel(named[..., None], mx.array(places, mx.int32))).astype(np.float64)


def score_knorm(config: Retention, row: Row, arrivals: int, queries: Vector) -> list[float]:
    """Key norm, low or high."""
    assert isinstance(config, knorm.Config)
    sign = -1.0 if config.keep == "low" else 1.0
    return [sign * math.sqrt(float(token.key @ token.key)) for token in row.tokens]


def score_streaming_llm(config: Retention, row: Row, arrivals: int, queries: Vector) -> list[float]:
    """Position."""
    return [float(token.position) for token in row.tokens]


def score_snapkv(config: Retention, row: Row, arrivals: int, queries: Vector) -> list[float]:
    """Attention of the row's last queries, pooled over the tokens before them."""
    assert isinstance(config, snapkv.Config)
    window, reach = recent_rows(config), config.kernel // 2
    older = len(row.tokens) - arrivals
    for index in range(arrivals):
        shares = attention(config, row, older + index + 1, queries[:, index])
        seen = {token.position: float(share) for token, share in zip(row.tokens, shares, strict=False)}
        row.window = [*row.window, seen][-window:]
    past = [token.position for token in row.tokens if token.position < row.seen - window]
    means = [float(np.mean([seen[position] for seen in row.window])) for position in past]
    pool = max if config.pooling == "max" else _mean
    pooled = [pool(means[max(0, place - reach) : place + reach + 1]) for place in range(len(past))]
    return pooled + [math.inf] * (len(row.tokens) - len(past))


def _mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers)


def score_tova(config: Retention, row: Row, arrivals: int, queries: Vector) -> list[float]:
    """Attention of the row's last query."""
    assert isinstance(config, tova.Config)
    if arrivals == 0:
        return [0.0] * len(row.tokens)  # nothing asked, nothing to lose
    return [float(share) for share in attention(config, row, len(row.tokens), queries[:, -1])]


def score_pyramidkv(config: Retention, row: Row, arrivals: int, queries: Vector) -> list[float]:
    """Its scorer's."""
    assert isinstance(config, pyramidkv.Config)
    return SCORES[type(config.scorer)](config.scorer, row, arrivals, queries)


SCORES: dict[type[Retention], Score] = {
    cam.Config: score_h2o,
    h2o.Config: score_h2o,
    keyformer.Config: score_keyformer,
    knorm.Config: score_knorm,
    pyramidkv.Config: score_pyramidkv,
    snapkv.Config: score_snapkv,
    streaming_llm.Config: score_streaming_llm,
    tova.Config: score_tova,
}
