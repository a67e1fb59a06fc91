"""Laws that only hold where a method claims them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from veloxfn.testing.claims import Claims, claims_for
from veloxfn.testing.drive import AnyPolicy, kept, live_positions, run
from veloxfn.testing.laws.rows import decides_clearly, same_rows
from veloxfn.testing.streams import Stream

__all__ = [
    "law_budgets_nest",
    "law_content_does_not_matter",
    "law_global_best",
    "law_grouping_does_not_matter",
    "law_path_independent",
]


def law_grouping_does_not_matter(
    policy: AnyPolicy, stream: Stream, blocks: Sequence[int], claims: Claims | None = None
) -> None:
    """Split invariance: other blocks of the same arrivals keep the same rows, bit for bit.

    A method whose decisions are not exact is held to it where the reference's smallest margin is clear of rounding.
    Lesson 2 (decay over a block matches token by token), lesson 7 (nothing depends on chunking), lesson 8, lesson 22.
    """
    claims = claims or claims_for(policy.config)
    if not claims.split_invariant or not decides_clearly(policy, stream, claims):
        return
    one, other = run(policy, stream, claims), run(policy, stream.regrouped(blocks), claims)
    same_rows(kept(one), kept(other), f"blocks {stream.blocks} against {tuple(blocks)}")


def law_global_best(policy: AnyPolicy, stream: Stream, claims: Claims | None = None) -> None:
    """What is kept is the protected rows plus the best of everything seen, ties losing the oldest."""
    claims = claims or claims_for(policy.config)
    if claims.worth is None or not stream.exact:
        return
    budget, sink, recent = policy.config.budget, policy.config.sink, policy.config.recent_rows
    for row, found in enumerate(live_positions(run(policy, stream, claims))):
        columns = stream.columns(row)
        seen = len(columns)
        worth = claims.worth(stream.keys[row, columns].astype(np.float64)).tolist()
        ranked = sorted((sink <= p < seen - recent, -worth[p], -p) for p in range(seen))  # best first
        expected = sorted(-entry[2] for entry in ranked[:budget])
        assert found.tolist() == expected, (
            f"row {row}: the best {budget} of {seen} (sink={sink}, recent={recent}) are {expected}, "
            f"found {found.tolist()}; importance {np.round(worth, 6).tolist()}"
        )


def law_path_independent(
    policy: AnyPolicy, stream: Stream, blocks: Sequence[int], claims: Claims | None = None
) -> None:
    """Path independence is split invariance and global best together."""
    claims = claims or claims_for(policy.config)
    if claims.path_independent:
        law_grouping_does_not_matter(policy, stream, blocks, claims)
        law_global_best(policy, stream, claims)


def law_budgets_nest(
    make: Callable[[int], AnyPolicy], stream: Stream, budget: int, claims: Claims | None = None
) -> None:
    """What budget B keeps, budget B + 1 keeps too."""
    small, large = make(budget), make(budget + 1)
    claims = claims or claims_for(small.config)
    if not claims.budgets_nest or (small.config.sink, small.config.recent_rows) != (
        large.config.sink,
        large.config.recent_rows,
    ):
        return
    rows = zip(live_positions(run(small, stream, claims)), live_positions(run(large, stream, claims)), strict=True)
    for row, (few, many) in enumerate(rows):
        gone = sorted(set(few.tolist()) - set(many.tolist()))
        assert not gone, (
            f"row {row}: budget {budget} keeps {few.tolist()}, "
            f"budget {budget + 1} loses {gone} of them: {many.tolist()}"
        )


def law_content_does_not_matter(policy: AnyPolicy, stream: Stream, claims: Claims | None = None) -> None:
    """Other keys, values and queries keep the same positions."""
    claims = claims or claims_for(policy.config)
    if not claims.content_independent:
        return
    grown = stream.values[:, ::-1] * (1 + np.arange(stream.values.shape[1]) % 3)[:, None]
    other = replace(stream, keys=-stream.keys[:, ::-1], values=grown, queries=stream.queries[:, :, ::-1] + 1)
    pairs = zip(live_positions(run(policy, stream, claims)), live_positions(run(policy, other, claims)), strict=True)
    for row, (one, two) in enumerate(pairs):
        assert one.tolist() == two.tolist(), (
            f"row {row}: other keys keep other positions: {one.tolist()} against {two.tolist()}"
        )
