"""The law of the oracle: every eviction is one that the float64 reference would make."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np

from veloxfn.placement import Absolute
from veloxfn.testing.claims import Claims, claims_for
from veloxfn.testing.drive import UNIT, AnyPolicy, AnyState, floats, live_positions, steps
from veloxfn.testing.oracle import MARGIN, Oracle
from veloxfn.testing.streams import Stream

__all__ = ["law_follows_the_oracle"]


def law_follows_the_oracle(policy: AnyPolicy, stream: Stream, claims: Claims | None = None) -> None:
    """After every block the kept set is the reference's, up to `MARGIN` where decisions round; so are masses.

    Merged values (and keys) are the reference's to a few roundings of their dtype, where neither the choice of the
    target nor the gate hangs on rounding; everything else is a bit copy.
    Keys that are turned are rounded to their dtype once more, which widens the margin for float16 and bfloat16.
    Exact, ties included, where the method's decisions are exact on the stream. With cadence "token" the stream is
    handed over one by one; that grouping does not matter then is a law of its own.
    Lesson 10 (ties lose the oldest), lesson 2 (decay), lesson 11 (protected rows), lesson 4 (a gate that opens).
    """
    claims = claims or claims_for(policy.config)
    config = policy.config
    if claims.score is None:
        return
    if config.cadence == "token":
        stream = stream.one_by_one()
    margin = max(MARGIN, 16 * UNIT[stream.dtype]) if claims.turns_keys and stream.dtype != mx.float32 else MARGIN
    oracle = Oracle(config, stream.rows, claims.score, stream.names, margin)
    tied = stream.uniform and claims.ties_exactly  # every weight is 1 / n, in any arithmetic
    exact = tied or (claims.exact and stream.exact)
    for block, _, _, after in steps(policy, stream, claims):
        part = slice(block.start, block.stop)
        verdicts = oracle.absorb(
            stream.keys[:, part].astype(np.float64),
            stream.queries[:, :, part].astype(np.float64),
            stream.valid[:, part],
            stream.values[:, part].astype(np.float64),
        )
        found = [row.tolist() for row in live_positions(after)]
        for row, (verdict, positions) in enumerate(zip(verdicts, found, strict=True)):
            try:
                verdict.judge(positions, margin=margin, exact=exact)
            except AssertionError as wrong:
                raise AssertionError(f"row {row}, columns {block.start} .. {block.stop - 1}: {wrong}") from None
        oracle.settle(found)
        if not claims.bit_copies:
            _follow_contents(oracle, after, merges_keys=getattr(config, "merge_keys", False))
        _check_rotations(oracle, after)
        if hasattr(after, "mass"):
            _check_mass(oracle, after)


def _follow_contents(oracle: Oracle, after: AnyState, *, merges_keys: bool) -> None:
    """Check values and keys of all kept tokens, then take the library's numbers over: roundings do not add up."""
    positions = np.array(after.slots.positions)
    values, keys = (floats(buffer).astype(np.float64) for buffer in (after.slots.values, after.slots.keys))
    unit = UNIT[after.slots.values.dtype]
    for row, expected in enumerate(oracle.rows):
        places = {int(position): slot for slot, position in enumerate(positions[row]) if position >= 0}
        for token in expected.tokens:
            slot = places[token.position]
            for name, own, stored in (
                ("value", token.value, values[row, slot]),
                ("key", token.key, keys[row, slot]),
            ):
                merges = name == "value" or merges_keys
                allowed = token.allowance + 4 * unit * token.merged if merges else 0.0
                error = np.abs(stored - own).max(initial=0.0)
                assert error <= allowed, (
                    f"row {row}: the {name} of position {token.position} must be {own.tolist()}, "
                    f"found {stored.tolist()} (off by {error:.3g}, allowed {allowed:.3g})"
                )
            token.value, token.key = values[row, slot], keys[row, slot]


def _check_rotations(oracle: Oracle, after: AnyState) -> None:
    if isinstance(oracle.config.placement, Absolute):
        return
    positions, rotations = np.array(after.slots.positions), np.array(after.slots.rotations)
    for row, expected in enumerate(oracle.rows):
        found = {int(p): int(r) for p, r in zip(positions[row], rotations[row], strict=False) if p >= 0}
        for token in expected.tokens:
            assert found[token.position] == token.rotation, (
                f"row {row}: position {token.position} arrived at rank {token.rotation}, "
                f"its rotation is {found[token.position]}"
            )


def _check_mass(oracle: Oracle, after: AnyState) -> None:
    positions, mass = np.array(after.slots.positions), np.array(after.mass)
    for row, expected in enumerate(oracle.rows):
        found = {int(p): float(m) for p, m in zip(positions[row], mass[row], strict=True) if p >= 0}
        for token in expected.tokens:
            if math.isinf(token.allowance):
                token.mass = found[token.position]
            assert abs(found[token.position] - token.mass) <= 10 * oracle.margin * max(1.0, token.mass), (
                f"row {row}: the mass of position {token.position} must be {token.mass:.7f}, "
                f"found {found[token.position]:.7f}"
            )
