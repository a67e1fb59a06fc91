"""Laws of merging: what becomes of the losers' values and masses."""

from __future__ import annotations

import math

import numpy as np

from veloxfn import cam
from veloxfn.testing.claims import Claims, claims_for
from veloxfn.testing.drive import AnyPolicy, floats, kept, live_positions, run, steps
from veloxfn.testing.oracle import MARGIN, Oracle
from veloxfn.testing.streams import Floats, Stream, normal_stream

__all__ = [
    "law_gate_opens_as_often_as_it_says",
    "law_mass_is_handed_over",
    "law_merging_changes_values",
    "law_value_mass_is_conserved",
]


def law_value_mass_is_conserved(policy: AnyPolicy, stream: Stream, claims: Claims | None = None) -> None:
    """The values of a row sum to those of all its arrivals: sums, not normalised, no gate, every loser with a target.

    A recent window gives every loser a later survivor.
    """
    config = policy.config
    assert isinstance(config, cam.Config)
    assert (config.merge, config.normalise, config.gate, config.targets) == ("sum", False, False, "window")
    assert config.recent_rows > 0
    for block, _, _, after in steps(policy, stream, claims):
        positions = np.array(after.slots.positions)
        values = floats(after.slots.values)[:, : positions.shape[1]].astype(np.float64)
        for row in range(stream.rows):
            columns = stream.columns(row, block.stop)
            total = stream.values[row, columns].astype(np.float64)
            found = values[row, positions[row] >= 0].sum(axis=0)
            error = np.abs(found - total.sum(axis=0)).max(initial=0.0)
            assert error <= 1e-5 * (1 + np.abs(total).sum()), (
                f"row {row} after column {block.stop}: values must sum to {total.sum(axis=0)}, found {found}"
            )


def law_mass_is_handed_over(policy: AnyPolicy, stream: Stream, claims: Claims | None = None) -> None:
    """With targets="nearest", no gate and decay 1 the masses of a row sum to its number of queries for ever.

    Every loser must find a target: finite keys other than 0, and a survivor behind the sinks.
    """
    config = policy.config
    assert isinstance(config, cam.Config)
    assert (config.targets, config.gate, config.decay, config.query_source) == ("nearest", False, 1.0, "true")
    assert config.merge != "off"
    assert config.sink + 1 < config.budget
    assert (np.abs(stream.keys).max(axis=-1) > 0).all()
    for block, _, _, after in steps(policy, stream, claims):
        positions, mass = np.array(after.slots.positions), np.array(after.mass)
        for row in range(stream.rows):
            seen, total = len(stream.columns(row, block.stop)), float(mass[row, positions[row] >= 0].sum())
            assert abs(total - seen) <= 10 * MARGIN * max(1, seen), (
                f"row {row} after column {block.stop}: {seen} queries, so the masses must sum to {seen}, found {total}"
            )


def law_merging_changes_values(policy: AnyPolicy, *, seed: int = 0, claims: Claims | None = None) -> None:
    """On an ordinary stream, values that are kept differ from those that arrived there, in every row.

    Lesson 4 (a gate that can never open).
    """
    claims = claims or claims_for(policy.config)
    stream = normal_stream(seed, rows=2 * policy.config.shared_heads, tokens=4 * policy.config.budget + 8)
    for row, found in enumerate(kept(run(policy, stream, claims))):
        arrived = stream.values[row, stream.columns(row)[found.positions]]
        changed = (found.values.view(np.float32) != arrived).any(axis=1)
        assert changed.any(), (
            f"row {row}: {stream.tokens} ordinary tokens at a budget of {policy.config.budget} and nothing was merged"
        )


def law_gate_opens_as_often_as_it_says(keys: Floats, queries: Floats, policy: AnyPolicy, rows: int = 2000) -> None:
    """Over `rows` noise streams, the first loser is merged with probability clamp(mass / mean target mass, 0, 1).

    Args:
        keys: [T, D] of one row, T = budget + 1.
        queries: [T, D].
        policy: CaM with targets="window" and the gate.
        rows: noise streams; the frequency may be off by five standard deviations.
    """
    tokens, config = len(keys), policy.config
    assert isinstance(config, cam.Config)
    assert tokens == config.budget + 1
    assert config.gate
    assert config.targets == "window"
    one = Oracle(config, 1)
    (verdict,) = one.absorb(
        keys[None].astype(np.float64), queries[None, None].astype(np.float64), np.ones((1, tokens), dtype=np.bool_)
    )
    (loser,) = verdict.lost
    masses = {token.position: token.mass for token in one.rows[0].tokens}
    targets = [position for position in verdict.survivors if position > loser][: config.target_count]
    mean = sum(masses[position] for position in targets) / len(targets)
    chance = min(1.0, masses[loser] / mean)
    values = np.zeros((1, tokens, 1), dtype=np.float32)
    values[0, loser] = 1.0
    stream = Stream(
        keys=np.repeat(keys[None], rows, axis=0),
        values=np.repeat(values, rows, axis=0),
        queries=np.repeat(queries[None, None], rows, axis=0),
        valid=np.ones((rows, tokens), dtype=np.bool_),
        blocks=(tokens,),
    )
    after = run(policy, stream)
    assert all(found.tolist() == verdict.survivors for found in live_positions(after))
    live = np.array(after.slots.positions) >= 0
    given = np.where(live[..., None], floats(after.slots.values)[:, : live.shape[1]], 0.0)
    merged = float((given != 0).any(axis=(1, 2)).mean())
    allowed = 5 * math.sqrt(chance * (1 - chance) / rows)
    assert abs(merged - chance) <= allowed, (
        f"mass {masses[loser]:.4f} against a mean of {mean:.4f}: the gate must open in {chance:.4f} of {rows} streams, "
        f"it opened in {merged:.4f}"
    )
