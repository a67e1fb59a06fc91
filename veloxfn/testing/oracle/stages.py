"""The four stages over a batch: score, select, dispose, place."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from veloxfn.base import Retention
from veloxfn.testing.oracle.disposal import dispose
from veloxfn.testing.oracle.rows import MARGIN, Row, Token, Vector
from veloxfn.testing.oracle.scores import SCORES, Score, recent_rows
from veloxfn.testing.streams import Stream

__all__ = ["Oracle", "Verdict", "choose", "replay"]


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


def choose(config: Retention, row: Row, importance: list[float]) -> Verdict:
    """Select: the weakest go, ranked by (protected, not NaN, importance, position)."""
    recent = recent_rows(config)
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
        names: the rows' noise streams; 0 .. N-1 where none are given.
        margin: relative error of the library's importance that is put down to rounding.
    """

    def __init__(
        self,
        config: Retention,
        rows: int,
        score: Score | None = None,
        names: Iterable[int] | None = None,
        margin: float = MARGIN,
    ) -> None:
        """Start with empty rows."""
        self.margin = margin
        self.config = config
        self.score = score or SCORES[type(config)]
        self.rows = [Row(stream=int(name)) for name in (range(rows) if names is None else names)]

    def absorb(
        self, keys: Vector, queries: Vector, valid: npt.NDArray[np.bool_], values: Vector | None = None
    ) -> list[Verdict]:
        """One block: keys [N, S, D], queries [N, G, S, D], valid [N, S], values [N, S, Dv].

        A row without arrivals is left alone.
        """
        held = np.zeros((*keys.shape[:2], 0)) if values is None else values
        scored: list[list[float]] = []
        for row, arriving, held_by, asking, counted in zip(self.rows, keys, held, queries, valid, strict=True):
            for key, value in zip(arriving[counted], held_by[counted], strict=True):
                row.tokens.append(Token(row.seen, key, value, rotation=len(row.tokens)))
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
        """Dispose and place: the tokens at the kept positions stay, with what they are given of the others."""
        for row, positions in zip(self.rows, kept, strict=True):
            staying = set(positions)
            survivors = [token for token in row.tokens if token.position in staying]
            losers = [token for token in row.tokens if token.position not in staying]
            dispose(self.config, row, losers, survivors, self.margin)
            row.tokens = survivors


def replay(config: Retention, stream: Stream, score: Score | None = None) -> tuple[list[list[int]], float]:
    """The oracle's own run over a stream.

    Returns:
        Kept positions per row, and the smallest relative slack of any decision: below `MARGIN` another correct
        run may have parted from this one.
    """
    if config.cadence == "token":
        stream = stream.one_by_one()
    oracle = Oracle(config, stream.rows, score, stream.names)
    tightest, first = math.inf, 0
    for size in stream.blocks:
        part = slice(first, first + size)
        verdicts = oracle.absorb(
            stream.keys[:, part].astype(np.float64),
            stream.queries[:, :, part].astype(np.float64),
            stream.valid[:, part],
            stream.values[:, part].astype(np.float64),
        )
        tightest = min([tightest, *(verdict.slack for verdict in verdicts)])
        oracle.settle([verdict.survivors for verdict in verdicts])
        first += size
    return [[token.position for token in row.tokens] for row in oracle.rows], tightest
