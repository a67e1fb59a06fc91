"""The reference: what each method keeps, in float64 NumPy, one row and one token at a time.

Four stages: score (how important is each candidate), select (which are lost), dispose (they are dropped), place (the
others keep their position). It is written from the methods' definitions and shares no code with them.

Matrix products round differently by block shape, so a library's choice is accepted when what it lost is within
`MARGIN`, relative, of what it could have lost instead; the oracle then follows it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from veloxfn import h2o, knorm, streaming_llm
from veloxfn.base import Retention
from veloxfn.testing.streams import Stream

__all__ = [
    "MARGIN",
    "SCORES",
    "Oracle",
    "Row",
    "Score",
    "Token",
    "Verdict",
    "choose",
    "replay",
    "score_h2o",
    "score_knorm",
    "score_streaming_llm",
]

MARGIN = 1e-5
Vector = npt.NDArray[np.float64]


@dataclass
class Token:
    """One candidate."""

    position: int
    key: Vector  # [D]
    mass: float = 0.0


@dataclass
class Row:
    """One row: what it keeps in temporal order, and how many arrivals it has counted."""

    tokens: list[Token] = field(default_factory=list)
    seen: int = 0


Score = Callable[[Retention, Row, int, Vector], list[float]]
"""(config, row with its arrivals appended, number of arrivals, queries [G, arrivals, D]) -> importance per token."""


@dataclass(frozen=True)
class Verdict:
    """What the oracle makes of one row after one block."""

    positions: list[int]
    importance: list[float]
    protected: list[bool]
    lost: list[int]  # positions that the oracle would lose
    slack: float  # relative distance between the strongest lost and the weakest unprotected survivor

    @property
    def survivors(self) -> list[int]:
        """Positions that the oracle would keep."""
        return [position for position in self.positions if position not in self.lost]

    def judge(self, kept: Iterable[int], *, margin: float = MARGIN, exact: bool = False) -> None:
        """Raise AssertionError unless keeping `kept` is right (within `margin`, unless `exact`)."""
        found = list(kept)
        strange = sorted(set(found) - set(self.positions))
        assert not strange, f"kept positions {strange} are not among the candidates {self.positions}"
        gone = [position for position in self.positions if position not in found]
        assert len(gone) == len(self.lost), (
            f"{len(self.lost)} of {len(self.positions)} candidates had to go, {len(gone)} went: {gone}; "
            f"expected {self.lost}"
        )
        if gone == self.lost:
            return
        table = dict(zip(self.positions, zip(self.importance, self.protected, strict=True), strict=True))
        facts = f"importance {[(p, round(w, 7)) for p, (w, _) in table.items()]}"
        saved = [position for position in gone if table[position][1]]
        assert not saved, f"protected positions {saved} were lost; expected {self.lost} to go; {facts}"
        assert not exact, f"lost {gone}, expected exactly {self.lost} (ties lose the oldest first); {facts}"
        lost = [table[position][0] for position in gone]
        stayed = [table[p][0] for p in found if not table[p][1]]
        assert not any(map(math.isnan, stayed)), f"a NaN saved a slot: lost {gone}, expected {self.lost}; {facts}"
        strongest, weakest = max((w for w in lost if not math.isnan(w)), default=-math.inf), min(stayed)
        assert strongest <= weakest + margin * max(abs(strongest), abs(weakest)), (
            f"lost {gone} with importance up to {strongest:.9g} while {weakest:.9g} stayed "
            f"(margin {margin:g} relative); expected {self.lost} to go; {facts}"
        )


def _attention(query: Vector, tokens: list[Token]) -> Vector:
    """Softmax of query . key / sqrt(D)."""
    scores = np.array([token.key for token in tokens]) @ query / math.sqrt(len(query))
    weights = np.exp(scores - scores.max())
    shares: Vector = weights / weights.sum()
    return shares


def _add_attention(row: Row, visible: int, queries: Vector, decay: float) -> None:
    """Decay all mass, then add one query's attention over the first `visible` tokens, averaged over heads [G, D]."""
    tokens = row.tokens[:visible]
    received = np.mean([_attention(query, tokens) for query in queries], axis=0)
    for token, share in zip(tokens, received, strict=True):
        token.mass = decay * token.mass + float(share)


def score_h2o(config: Retention, row: Row, arrivals: int, queries: Vector) -> list[float]:
    """Accumulated attention mass; age-normalised where the config says so."""
    assert isinstance(config, h2o.Config)
    proxy = config.query_source == "key_proxy"
    older = len(row.tokens) - arrivals
    for index in range(arrivals):
        own = older + index
        if not proxy:
            _add_attention(row, own + 1, queries[:, index], config.decay)
        elif own == 0:
            row.tokens[0].mass = 1.0
        else:
            _add_attention(row, own, row.tokens[own].key[None], config.decay)
    if not config.age_normalised:
        return [token.mass for token in row.tokens]
    ages = [row.seen - token.position - (1 if proxy else 0) for token in row.tokens]
    return [token.mass / max(1, age) for token, age in zip(row.tokens, ages, strict=True)]


def score_knorm(config: Retention, row: Row, arrivals: int, queries: Vector) -> list[float]:
    """Key norm, low or high."""
    assert isinstance(config, knorm.Config)
    sign = -1.0 if config.keep == "low" else 1.0
    return [sign * math.sqrt(float(token.key @ token.key)) for token in row.tokens]


def score_streaming_llm(config: Retention, row: Row, arrivals: int, queries: Vector) -> list[float]:
    """Position."""
    return [float(token.position) for token in row.tokens]


SCORES: dict[type[Retention], Score] = {
    h2o.Config: score_h2o,
    knorm.Config: score_knorm,
    streaming_llm.Config: score_streaming_llm,
}


def _recent(config: Retention) -> int:
    given = getattr(config, "recent", 0)
    return int(min(config.budget // 2, config.budget - config.sink - 1) if given is None else given)


def choose(config: Retention, row: Row, importance: list[float]) -> Verdict:
    """Select: the weakest go, ranked by (protected, not NaN, importance, position)."""
    recent = _recent(config)
    protected = [t.position < config.sink or t.position >= row.seen - recent for t in row.tokens]
    facts = list(zip(importance, protected, row.tokens, strict=True))
    ranked = sorted(
        (shield, not math.isnan(worth), 0.0 if math.isnan(worth) else worth, token.position)
        for worth, shield, token in facts
    )
    count = max(0, len(row.tokens) - config.budget)
    lost = sorted(entry[3] for entry in ranked[:count])
    slack = math.inf
    if 0 < count < len(ranked):
        (shield, real, strongest, _), (other_shield, other_real, weakest, _) = ranked[count - 1], ranked[count]
        if (shield, real) == (other_shield, other_real):
            slack = (weakest - strongest) / max(abs(weakest), abs(strongest), 1e-300) if weakest > strongest else 0.0
    return Verdict([t.position for t in row.tokens], importance, protected, lost, slack)


class Oracle:
    """The reference for a whole batch: feed blocks with `absorb`, read verdicts, say with `settle` what was kept.

    Args:
        config: one of the package's methods (see `SCORES`).
        rows: N.
        score: importance of a third party's method.
    """

    def __init__(self, config: Retention, rows: int, score: Score | None = None) -> None:
        """Start with empty rows."""
        self.config = config
        self.score = score or SCORES[type(config)]
        self.rows = [Row() for _ in range(rows)]

    def absorb(self, keys: Vector, queries: Vector, valid: npt.NDArray[np.bool_]) -> list[Verdict]:
        """One block: keys [N, S, D], queries [N, G, S, D], valid [N, S]. A row without arrivals is left alone."""
        scored: list[list[float]] = []
        for row, arriving, asking, counted in zip(self.rows, keys, queries, valid, strict=True):
            for key in arriving[counted]:
                row.tokens.append(Token(row.seen, key))
                row.seen += 1
            arrivals = int(counted.sum())
            scored.append(self.score(self.config, row, arrivals, asking[:, counted]) if row.tokens else [])
        shared = self.config.shared_heads
        verdicts = []
        for first in range(0, len(self.rows), shared):
            group = scored[first : first + shared]
            mean = [sum(column) / len(group) for column in zip(*group, strict=True)]
            verdicts += [choose(self.config, row, mean) for row in self.rows[first : first + shared]]
        return verdicts

    def settle(self, kept: Iterable[Iterable[int]]) -> None:
        """Dispose and place: only the tokens at the kept positions stay, where they are."""
        for row, positions in zip(self.rows, kept, strict=True):
            staying = set(positions)
            row.tokens = [token for token in row.tokens if token.position in staying]


def replay(config: Retention, stream: Stream, score: Score | None = None) -> tuple[list[list[int]], float]:
    """The oracle's own run over a stream.

    Returns:
        Kept positions per row, and the smallest relative slack of any decision: below `MARGIN` another correct
        run may have parted from this one.
    """
    if config.cadence == "token":
        stream = stream.one_by_one()
    oracle = Oracle(config, stream.rows, score)
    tightest, first = math.inf, 0
    for size in stream.blocks:
        part = slice(first, first + size)
        verdicts = oracle.absorb(
            stream.keys[:, part].astype(np.float64),
            stream.queries[:, :, part].astype(np.float64),
            stream.valid[:, part],
        )
        tightest = min([tightest, *(verdict.slack for verdict in verdicts)])
        oracle.settle([verdict.survivors for verdict in verdicts])
        first += size
    return [[token.position for token in row.tokens] for row in oracle.rows], tightest
