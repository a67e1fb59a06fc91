"""Laws of what is kept: how many, which ones always, and that the cache never freezes."""

from __future__ import annotations

import numpy as np

from veloxfn.testing.claims import Claims, claims_for
from veloxfn.testing.drive import AnyPolicy, bits, kept, live_positions, run, step, steps
from veloxfn.testing.streams import Stream, normal_stream

__all__ = [
    "law_budget_holds",
    "law_does_not_freeze",
    "law_kept_rows_are_bit_copies",
    "law_nothing_lost_below_budget",
    "law_protected_survive",
    "law_state_over_budget_shrinks",
]


def law_budget_holds(policy: AnyPolicy, stream: Stream, claims: Claims | None = None) -> None:
    """After every block a row keeps min(what it had + what arrived, budget) tokens, each once.

    Lesson 8 (the budget is not derived again per chunk), lesson 10 (ties keep exactly B rows), lesson 14 (a block
    larger than the budget does not empty the cache), lesson 22 (blocks of any size, one token first).
    """
    budget = policy.config.budget
    for block, before, _, after in steps(policy, stream, claims):
        valid = stream.valid[:, block.start : block.stop].sum(axis=1)
        rows = zip(live_positions(before), live_positions(after), valid, strict=True)
        for row, (old, new, arrived) in enumerate(rows):
            expected = min(len(old) + int(arrived), budget)
            assert len(new) == expected, (
                f"row {row} after column {block.stop}: expected {expected} kept tokens "
                f"({len(old)} kept + {arrived} arrivals, budget {budget}), found {len(new)}: {new.tolist()}"
            )
            assert len(set(new.tolist())) == len(new), f"row {row} keeps a token twice: {new.tolist()}"


def law_nothing_lost_below_budget(policy: AnyPolicy, stream: Stream, claims: Claims | None = None) -> None:
    """While a row has seen at most `budget` tokens, it keeps all of them."""
    budget = policy.config.budget
    for block, _, _, after in steps(policy, stream, claims):
        for row, found in enumerate(live_positions(after)):
            seen = len(stream.columns(row, block.stop))
            if seen <= budget:
                assert found.tolist() == list(range(seen)), (
                    f"row {row} saw {seen} tokens within the budget of {budget} and must keep 0 .. {seen - 1}, "
                    f"found {found.tolist()}"
                )


def law_protected_survive(policy: AnyPolicy, stream: Stream, claims: Claims | None = None) -> None:
    """The first `sink` and the last `recent` arrivals of a row are kept.

    Lesson 3 (the newest row is not evicted before anything attended to it), lesson 8 (sinks do not drift), lesson 11
    (sink + recent = budget - 1 works).
    """
    sink, recent = policy.config.sink, policy.config.recent_rows
    for block, _, absorbed, after in steps(policy, stream, claims):
        for row, (candidates, found) in enumerate(zip(live_positions(absorbed), live_positions(after), strict=True)):
            seen = len(stream.columns(row, block.stop))
            must = [p for p in candidates.tolist() if p < sink or p >= seen - recent]
            gone = sorted(set(must) - set(found.tolist()))
            assert not gone, (
                f"row {row} after {seen} tokens: protected positions {gone} were lost "
                f"(sink={sink}, recent={recent}); kept {found.tolist()}"
            )
            newest = [p for p in range(max(0, seen - recent), seen) if p not in candidates.tolist()]
            assert not newest, f"row {row} after {seen} tokens: recent positions {newest} are no candidates"


def law_kept_rows_are_bit_copies(policy: AnyPolicy, stream: Stream, claims: Claims | None = None) -> None:
    """A kept row holds, bit for bit, the key and value that arrived at its position.

    Lesson 19 (every stored key is a key that arrived), lesson 30 (no other dtype on the way).
    """
    claims = claims or claims_for(policy.config)
    if not claims.bit_copies:
        return
    keys, values = bits(stream.array(stream.keys)), bits(stream.array(stream.values))
    for block, _, _, after in steps(policy, stream, claims):
        for row, found in enumerate(kept(after)):
            columns = stream.columns(row, block.stop)
            assert len(found.positions) == 0 or found.positions.max() < len(columns), (
                f"row {row} saw {len(columns)} tokens but keeps positions {found.positions.tolist()}"
            )
            for name, stored, arrived in (("keys", found.keys, keys), ("values", found.values, values)):
                wrong = np.flatnonzero((stored != arrived[row, columns[found.positions]]).any(axis=1))
                assert len(wrong) == 0, (
                    f"row {row} after column {block.stop}: the {name} at positions "
                    f"{found.positions[wrong].tolist()} are not those that arrived there"
                )


def law_does_not_freeze(policy: AnyPolicy, *, seed: int = 0, claims: Claims | None = None) -> None:
    """After a long random stream the kept set is not the first B tokens, and later tokens have entered.

    Lesson 1 (200 random tokens at budget 32 must not keep 0 .. 31; most of the newest recent window is kept).
    """
    claims = claims or claims_for(policy.config)
    if claims.may_freeze:
        return
    budget, sink, recent = policy.config.budget, policy.config.sink, policy.config.recent_rows
    tokens = 6 * budget + 8
    shared = policy.config.shared_heads
    stream = normal_stream(seed, rows=2 * shared, tokens=tokens, key_dim=8, value_dim=6)
    for row, found in enumerate(live_positions(run(policy, stream, claims))):
        late = [p for p in found.tolist() if p >= tokens // 2]
        least = max(1, recent // 2 + 1 if recent else 0) if budget > sink else 0
        assert found.tolist() != list(range(budget)), (
            f"row {row}: after {tokens} random tokens the cache still holds the first {budget}"
        )
        assert len(late) >= least, (
            f"row {row}: after {tokens} random tokens only {late} of {found.tolist()} come from the later half, "
            f"expected at least {least} (recent={recent})"
        )


def law_state_over_budget_shrinks(roomy: AnyPolicy, policy: AnyPolicy, stream: Stream) -> None:
    """A state that was filled under a larger budget holds the smaller one after its next block.

    Lesson 17.
    """
    claims = claims_for(policy.config)
    half = len(stream.blocks) // 2
    state = run(roomy, stream.head(half), claims)
    budget = policy.config.budget
    for block in stream.tail(half):
        old, state = live_positions(state), step(policy, claims, state, block)
        for row, (before, found) in enumerate(zip(old, live_positions(state), strict=True)):
            expected = min(budget, len(before) + block.stop - block.start)
            assert block.stop == block.start or len(found) == expected, (
                f"row {row} held {len(before)} rows from a budget of {roomy.config.budget}; after a block of "
                f"{block.stop - block.start} a budget of {budget} allows {expected}, found {found.tolist()}"
            )
