"""The law of the oracle: every eviction is one that the float64 reference would make."""

from __future__ import annotations

import numpy as np

from veloxfn.testing.claims import Claims, claims_for
from veloxfn.testing.drive import AnyPolicy, AnyState, live_positions, steps
from veloxfn.testing.oracle import MARGIN, Oracle, score_h2o
from veloxfn.testing.streams import Stream

__all__ = ["law_follows_the_oracle"]


def law_follows_the_oracle(policy: AnyPolicy, stream: Stream, claims: Claims | None = None) -> None:
    """After every block the kept set is the reference's, up to `MARGIN` where decisions round; h2o's mass agrees too.

    Exact, ties included, where the method's decisions are exact on the stream. With cadence "token" the stream is
    handed over one by one; that grouping does not matter then is a law of its own.
    Lesson 10 (ties lose the oldest), lesson 2 (decay), lesson 11 (protected rows).
    """
    claims = claims or claims_for(policy.config)
    config = policy.config
    if claims.score is None:
        return
    if config.cadence == "token":
        stream = stream.one_by_one()
    oracle = Oracle(config, stream.rows, claims.score)
    tied = stream.uniform and getattr(config, "decay", 1.0) == 0.0  # every weight is 1 / n, in any arithmetic
    exact = tied or (claims.exact and stream.exact)
    for block, _, _, after in steps(policy, stream, claims):
        part = slice(block.start, block.stop)
        verdicts = oracle.absorb(
            stream.keys[:, part].astype(np.float64),
            stream.queries[:, :, part].astype(np.float64),
            stream.valid[:, part],
        )
        found = [row.tolist() for row in live_positions(after)]
        for row, (verdict, positions) in enumerate(zip(verdicts, found, strict=True)):
            try:
                verdict.judge(positions, exact=exact)
            except AssertionError as wrong:
                raise AssertionError(f"row {row}, columns {block.start} .. {block.stop - 1}: {wrong}") from None
        oracle.settle(found)
        if claims.score is score_h2o:
            _check_mass(oracle, after)


def _check_mass(oracle: Oracle, after: AnyState) -> None:
    positions, mass = np.array(after.slots.positions), np.array(after.mass)
    for row, expected in enumerate(oracle.rows):
        found = {int(p): float(m) for p, m in zip(positions[row], mass[row], strict=True) if p >= 0}
        for token in expected.tokens:
            assert abs(found[token.position] - token.mass) <= 10 * MARGIN * max(1.0, token.mass), (
                f"row {row}: the mass of position {token.position} must be {token.mass:.7f}, "
                f"found {found[token.position]:.7f}"
            )
