"""Laws of broken input: NaN or an infinity in one key stays the problem of that key."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np

from veloxfn.testing.claims import Claims, claims_for
from veloxfn.testing.drive import AnyPolicy, differences, leaves, live_positions, run, snapshot
from veloxfn.testing.laws.budget import law_budget_holds, law_protected_survive
from veloxfn.testing.streams import Stream, normal_stream

__all__ = ["law_nan_never_saves_a_slot", "law_poison_stays_in_its_row"]


def law_poison_stays_in_its_row(
    policy: AnyPolicy, stream: Stream, row: int, column: int, number: float, claims: Claims | None = None
) -> None:
    """NaN or an infinity in one key: budget and sinks hold in its row, all other rows keep every bit.

    Lesson 12.
    """
    claims = claims or claims_for(policy.config)
    keys = stream.keys.copy()
    keys[row, column, 0] = number
    poisoned = replace(stream, keys=keys, exact=False, uniform=False)
    law_budget_holds(policy, poisoned, claims)
    law_protected_survive(policy, poisoned, claims)
    group = policy.config.shared_heads
    others = [other for other in range(stream.rows) if other // group != row // group]
    if not others:
        return
    clean, found = run(policy, stream, claims), run(policy, poisoned, claims)
    index = mx.array(others)
    told = differences(
        snapshot({path: leaf[index] for path, leaf in leaves(clean).items()}),
        snapshot({path: leaf[index] for path, leaf in leaves(found).items()}),
    )
    assert not told, f"{number} in row {row} changed the rows {others}: {told}"


def law_nan_never_saves_a_slot(policy: AnyPolicy, *, seed: int = 0, claims: Claims | None = None) -> None:
    """A key that holds NaN, in an unprotected place, is gone after three budgets of further arrivals.

    Lesson 12 (an argmin over NaN must not pick another slot for ever).
    """
    claims = claims or claims_for(policy.config)
    if not claims.nan_is_weak:
        return
    budget, sink = policy.config.budget, policy.config.sink
    group = policy.config.shared_heads
    stream = normal_stream(seed, rows=2 * group, tokens=sink + 1 + 3 * budget)
    keys = stream.keys.copy()
    keys[0, sink] = np.nan
    found = live_positions(run(policy, replace(stream, keys=keys), claims))[0].tolist()
    assert sink not in found, f"the key at position {sink} is NaN and still kept after {stream.tokens} tokens: {found}"
