"""Laws of rows: no row looks at another, its place in a batch does not matter, padded arrivals are invisible."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import mlx.core as mx
import numpy as np

import veloxfn
from veloxfn.testing.claims import Claims, claims_for
from veloxfn.testing.drive import AnyPolicy, AnyState, Kept, kept, leaves, run
from veloxfn.testing.oracle import MARGIN, replay
from veloxfn.testing.streams import Stream

__all__ = [
    "decides_clearly",
    "law_batch_equals_rows",
    "law_concat_rows_round_trip",
    "law_padding_is_invisible",
    "law_rows_may_be_reordered",
    "same_rows",
]


def same_rows(expected: list[Kept], found: list[Kept], what: str) -> None:
    """Raise unless two lists of kept rows agree bit for bit."""
    assert len(expected) == len(found), f"{what}: expected {len(expected)} rows, found {len(found)}"
    for row, (a, b) in enumerate(zip(expected, found, strict=True)):
        assert a.positions.tolist() == b.positions.tolist(), (
            f"{what}: row {row} must keep {a.positions.tolist()}, found {b.positions.tolist()}"
        )
        for name, one, other in (("keys", a.keys, b.keys), ("values", a.values, b.values)):
            wrong = np.flatnonzero((one != other).any(axis=1))
            assert len(wrong) == 0, f"{what}: row {row}: {name} differ at positions {a.positions[wrong].tolist()}"


def same_columns(expected: AnyState, found: AnyState, rows: list[int], what: str) -> None:
    """Raise unless the per-slot columns of live slots agree with `expected[rows]` (within `MARGIN`, relative)."""
    slots_of = [_temporal(state) for state in (expected, found)]
    for path, leaf in leaves(expected).items():
        if path.startswith(("slots.", "row.")) or leaf.shape[-1] != expected.slots.positions.shape[1]:
            continue
        other = leaves(found)[path]
        mine, theirs = np.array(leaf.astype(mx.float32)), np.array(other.astype(mx.float32))
        for row, source in enumerate(rows):
            a, b = mine[source][..., slots_of[0][source]], theirs[row][..., slots_of[1][row]]
            assert np.allclose(a, b, rtol=10 * MARGIN, atol=1e-6, equal_nan=True), (
                f"{what}: column {path} of row {row} must be {a.tolist()}, found {b.tolist()}"
            )


def _temporal(state: AnyState) -> list[np.ndarray[tuple[int], np.dtype[np.intp]]]:
    positions = np.array(state.slots.positions)
    order = np.argsort(positions, axis=1, kind="stable")
    return [index[row[index] >= 0] for row, index in zip(positions, order, strict=True)]


def law_batch_equals_rows(policy: AnyPolicy, stream: Stream, claims: Claims | None = None) -> None:
    """A batch keeps what its rows keep when each runs alone, columns included.

    Lesson 9 (batched equals per-row), lesson 34 (rows beyond the first are not dropped). With shared heads the unit is
    the group of rows.
    """
    claims = claims or claims_for(policy.config)
    group = policy.config.shared_heads
    together = run(policy, stream, claims)
    for first in range(0, stream.rows, group):
        members = list(range(first, first + group))
        alone = run(policy, stream.only(members), claims)
        what = f"rows {members} alone against the same rows of a batch of {stream.rows}"
        same_rows([kept(together)[row] for row in members], kept(alone), what)
        same_columns(together, alone, members, what)


def law_rows_may_be_reordered(policy: AnyPolicy, stream: Stream, claims: Claims | None = None) -> None:
    """Reversing (or repeating) the rows of a batch halfway, with `take_rows`, moves results and changes none.

    Lesson 6 (the same prompt keeps the same set wherever it stands in a batch).
    """
    claims = claims or claims_for(policy.config)
    group = policy.config.shared_heads
    groups = stream.rows // group
    order = [row for g in [*reversed(range(groups)), 0] for row in range(g * group, (g + 1) * group)]
    half = len(stream.blocks) // 2
    middle = run(policy, stream.head(half), claims)
    taken = veloxfn.take_rows(middle, mx.array(order))
    _leading_axis(taken, len(order), "take_rows")
    moved = run(policy, stream.only(order).tail(half), claims, taken)
    names, expected = np.array(moved.slots.streams).tolist(), stream.names[order].tolist()
    assert names == expected, f"rows taken in the order {order} must keep their streams {expected}, found {names}"
    straight = kept(run(policy, stream, claims))
    same_rows([straight[row] for row in order], kept(moved), f"rows taken in the order {order}")


def law_concat_rows_round_trip(policy: AnyPolicy, stream: Stream, claims: Claims | None = None) -> None:
    """Rows that ran apart, at different lengths, are joined by `concat_rows` and go on as if alone."""
    claims = claims or claims_for(policy.config)
    group = policy.config.shared_heads
    if stream.rows < 2 * group:
        return
    half = len(stream.blocks) // 2
    first, second = list(range(group)), list(range(group, stream.rows))
    late, early = stream.only(first).tail(half), stream.only(second).head(half)
    fresh = policy.init_state(group, stream.key_dim, stream.value_dim, dtype=stream.dtype, streams=late.row_names())
    ahead = run(policy, early, claims)
    joined = veloxfn.concat_rows(fresh, ahead)
    _leading_axis(joined, stream.rows, "concat_rows")
    same_rows(kept(fresh) + kept(ahead), kept(joined), "concat_rows")
    found = kept(run(policy, stream.tail(half), claims, joined))
    expected = kept(run(policy, late, claims)) + kept(run(policy, stream.only(second), claims))
    same_rows(expected, found, "rows of different lengths, joined by concat_rows, then fed together")
    apart = veloxfn.take_rows(joined, mx.array(second))
    same_rows(kept(ahead), kept(apart), "take_rows after concat_rows")


def _leading_axis(state: AnyState, rows: int, what: str) -> None:
    for path, leaf in leaves(state).items():
        assert leaf.shape[0] == rows, f"{what}: leaf {path} must have leading axis {rows}, found {leaf.shape}"


def law_padding_is_invisible(policy: AnyPolicy, stream: Stream, claims: Claims | None = None) -> None:
    """Padded arrivals change nothing: other numbers in them, or leaving them out, give the same rows.

    Lesson 15 (ragged rows padded with anything must not receive attention, count or stay).
    """
    claims = claims or claims_for(policy.config)
    holes = ~stream.valid
    expected = run(policy, stream, claims)
    for filler in (100.0, float("nan")):
        keys, values, queries = stream.keys.copy(), stream.values.copy(), stream.queries.copy()
        keys[holes] = values[holes] = filler
        queries.swapaxes(1, 2)[holes] = filler
        other = run(policy, replace(stream, keys=keys, values=values, queries=queries), claims)
        what = f"padded arrivals holding {filler}"
        same_rows(kept(expected), kept(other), what)
        same_columns(expected, other, list(range(stream.rows)), what)
    group = policy.config.shared_heads
    for first in range(0, stream.rows, group):
        members = list(range(first, first + group))
        if (stream.valid[members] != stream.valid[first]).any():
            continue
        alone = run(policy, _without_padding(stream.only(members)), claims)
        what = f"rows {members} without their padded arrivals"
        try:
            same_rows(kept(alone), [kept(expected)[row] for row in members], what)
        except AssertionError:
            if decides_clearly(policy, stream.only(members), claims):
                raise
            continue  # slots in another order sum differently, which may part near ties
        same_columns(expected, alone, members, what)


def decides_clearly(policy: AnyPolicy, stream: Stream, claims: Claims) -> bool:
    """Whether two correct runs must agree: decisions are exact, or no decision was near a tie."""
    if claims.exact and stream.exact:
        return True
    return claims.score is None or replay(policy.config, stream, claims.score)[1] > MARGIN


def _without_padding(stream: Stream) -> Stream:
    columns = stream.columns(0)
    edges = np.cumsum([0, *stream.blocks])
    blocks = tuple(int(stream.valid[0, a:b].sum()) for a, b in pairwise(edges))
    return replace(
        stream,
        keys=stream.keys[:, columns],
        values=stream.values[:, columns],
        queries=stream.queries[:, :, columns],
        valid=stream.valid[:, columns],
        blocks=blocks,
    )
