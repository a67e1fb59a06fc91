"""Laws between methods, and laws of one method's own evidence, each under exactly its conditions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx
import numpy as np

from veloxfn import h2o, keyformer, streaming_llm
from veloxfn.base import Retention
from veloxfn.retention import retire
from veloxfn.testing.claims import Claims, claims_for
from veloxfn.testing.drive import AnyPolicy, AnyState, floats, kept, run, start, steps
from veloxfn.testing.laws.rows import same_columns, same_rows
from veloxfn.testing.oracle import MARGIN, Row, Token, choose, replay
from veloxfn.testing.streams import Stream

__all__ = [
    "law_attention_equals_queries",
    "law_common_key_shift_changes_nothing",
    "law_equal_keys_keep_the_newest",
    "law_h2o_keeps_streaming_rows_plus_one",
    "law_mass_counts_queries",
    "law_mass_ignores_grouping_below_budget",
    "law_retire_ranks_like_the_oracle",
    "law_retire_by_position_is_streaming_llm",
]


def law_h2o_keeps_streaming_rows_plus_one(budget: int, sink: int, stream: Stream) -> None:
    """h2o(sink=s, recent=B-s-1) at budget B keeps the rows of streaming_llm(budget=B-1, sink=s) and one more."""
    heavy = h2o.policy(h2o.Config(budget=budget, sink=sink, recent=budget - sink - 1))
    plain = streaming_llm.policy(streaming_llm.Config(budget=budget - 1, sink=sink))
    for row, (many, few) in enumerate(zip(kept(run(heavy, stream)), kept(run(plain, stream)), strict=True)):
        extra = sorted(set(many.positions.tolist()) - set(few.positions.tolist()))
        seen = len(stream.columns(row))
        assert set(few.positions.tolist()) <= set(many.positions.tolist()), (
            f"row {row}: streaming_llm keeps {few.positions.tolist()}, h2o only {many.positions.tolist()}"
        )
        expected = 1 if seen >= budget else 0
        assert len(extra) == expected, f"row {row}: h2o must keep {expected} row more, found {extra}"


def law_retire_by_position_is_streaming_llm(budget: int, sink: int, stream: Stream) -> None:
    """`retire` with importance = position keeps what streaming_llm keeps."""
    config = streaming_llm.Config(budget=budget, sink=sink)
    policy = streaming_llm.policy(config)
    state = start(policy, stream)
    for block in stream:
        absorbed = policy.absorb(state, block.keys, block.values, valid=block.valid)
        retired = absorbed
        if block.stop > block.start:
            retired = retire(absorbed, absorbed.slots.positions.astype(mx.float32), config)
        state = policy.evict(absorbed)
        same_rows(kept(state), kept(retired), f"retire by position after column {block.stop}")


def _masses(state: AnyState) -> list[dict[int, float]]:
    positions, mass = np.array(state.slots.positions), np.array(state.mass)
    return [
        {int(p): float(m) for p, m in zip(row, weights, strict=True) if p >= 0}
        for row, weights in zip(positions, mass, strict=True)
    ]


def law_mass_counts_queries(policy: AnyPolicy, stream: Stream) -> None:
    """Before any eviction, with decay 1 and true queries, a row's masses sum to its number of queries.

    Noise and temperature move weight between slots, they add none.
    """
    config = policy.config
    assert isinstance(config, h2o.Config | keyformer.Config)
    assert (getattr(config, "decay", 1.0), config.query_source) == (1.0, "true")
    for block, _, _, after in steps(policy, stream):
        for row, masses in enumerate(_masses(after)):
            seen = len(stream.columns(row, block.stop))
            if seen <= config.budget:
                total = sum(masses.values())
                assert abs(total - seen) <= MARGIN * max(1, seen), (
                    f"row {row}: {seen} queries, so the masses must sum to {seen}, found {total}: {masses}"
                )


def law_mass_ignores_grouping_below_budget(policy: AnyPolicy, stream: Stream, blocks: Sequence[int]) -> None:
    """While nothing is lost, a block leaves the mass that its tokens leave one by one.

    Lesson 2 (decay^(S-1-j) in the block path matches token by token).
    """
    if max(len(stream.columns(row)) for row in range(stream.rows)) > policy.config.budget:
        return
    one, other = run(policy, stream), run(policy, stream.regrouped(blocks))
    same_rows(kept(one), kept(other), f"blocks {stream.blocks} against {tuple(blocks)}")
    same_columns(one, other, list(range(stream.rows)), f"blocks {stream.blocks} against {tuple(blocks)}")


def law_common_key_shift_changes_nothing(policy: AnyPolicy, stream: Stream, shift: Sequence[float]) -> None:
    """Adding one vector to all keys leaves the kept positions, and the columns, of true queries as they were.

    For methods that rank by attention; keys that are compared or seen at their ranks are other keys.
    """
    config, claims = policy.config, claims_for(policy.config)
    assert claims.needs_queries
    assert not claims.compares_keys
    assert not claims.turns_keys
    moved = replace(stream, keys=(stream.keys + np.asarray(shift, dtype=np.float32)))
    if replay(config, stream)[1] <= MARGIN:
        return
    one, other = run(policy, stream), run(policy, moved)
    for row, (a, b) in enumerate(zip(kept(one), kept(other), strict=True)):
        assert a.positions.tolist() == b.positions.tolist(), (
            f"row {row}: with {list(shift)} added to all keys {b.positions.tolist()} are kept, "
            f"not {a.positions.tolist()}"
        )
    same_columns(one, other, list(range(stream.rows)), f"with {list(shift)} added to all keys")


def law_equal_keys_keep_the_newest(policy: AnyPolicy, stream: Stream, claims: Claims | None = None) -> None:
    """Where every candidate is equally important, exactly the sinks and the newest tokens stay.

    Lesson 10 (all-equal keys keep exactly B rows, the stated ones). For knorm, streaming_llm, h2o with decay 0,
    tova, and snapkv where a pool of equals is one of them.
    """
    claims = claims or claims_for(policy.config)
    budget, sink = policy.config.budget, policy.config.sink
    for row, found in enumerate(kept(run(policy, stream, claims))):
        seen = len(stream.columns(row))
        expected = [p for p in range(seen) if p < sink or p >= seen - (budget - sink)]
        assert found.positions.tolist() == expected, (
            f"row {row}: all importances are equal, so {expected} must stay, found {found.positions.tolist()}"
        )


def law_attention_equals_queries(policy: AnyPolicy, stream: Stream) -> None:
    """`attention=` with the weights that the queries give leads to the same rows and masses as `queries=`."""
    if replay(policy.config, stream)[1] <= MARGIN:
        return
    asked, told = start(policy, stream), start(policy, stream)
    for block in stream:
        padding = {} if block.valid is None else {"valid": block.valid}
        absorbed = policy.absorb(told, block.keys, block.values, **padding)
        if block.stop > block.start:
            told = policy.evict(absorbed, attention=_block_mass(absorbed, block.queries))
        asked = policy.update_batched(asked, block.keys, block.values, queries=block.queries, **padding)
        same_rows(kept(asked), kept(told), f"attention= against queries= after column {block.stop}")
        same_columns(asked, told, list(range(stream.rows)), "attention= against queries=")


def _block_mass(absorbed: AnyState, queries: mx.array) -> mx.array:
    """Weights summed over the block's counted queries, averaged over heads: [N, n]."""
    slots = absorbed.slots
    positions, arrived = np.array(slots.positions), np.array(slots.arrived)
    keys = floats(slots.keys).astype(np.float64)[:, : positions.shape[1]]
    mass = np.zeros(positions.shape)
    asking = floats(queries).astype(np.float64)
    for row, token in np.argwhere(arrived >= 0):
        seen = (positions[row] >= 0) & (positions[row] <= positions[row, arrived[row, token]])
        scores = asking[row, :, token] @ keys[row].T / np.sqrt(keys.shape[2])
        weights = np.where(seen, np.exp(scores - scores[:, seen].max(axis=1, keepdims=True)), 0.0)
        mass[row] += (weights / weights.sum(axis=1, keepdims=True)).mean(axis=0)
    return mx.array(mass.astype(np.float32))


def law_retire_ranks_like_the_oracle(config: Retention, stream: Stream, importance: Sequence[float]) -> None:
    """`retire` of any importance, by position, loses what the reference loses, exactly: NaN, infinities, signed zeros.

    Lesson 10, lesson 11, lesson 12. The importance of position p is importance[p % len(importance)].
    """
    policy = streaming_llm.policy(streaming_llm.Config(budget=config.budget, sink=0))
    table = np.asarray(importance, dtype=np.float32)
    state = start(policy, stream)
    for block in stream:
        absorbed = policy.absorb(state, block.keys, block.values, valid=block.valid)
        state = absorbed
        if block.stop > block.start:
            positions = np.array(absorbed.slots.positions)
            state = retire(absorbed, mx.array(table[positions % len(table)]), config)
        for row, (before, after) in enumerate(zip(kept(absorbed), kept(state), strict=True)):
            reference = Row(
                [Token(int(p), np.zeros(1)) for p in before.positions], len(stream.columns(row, block.stop))
            )
            worth = [float(table[p % len(table)]) for p in before.positions]
            verdict = choose(config, reference, worth)
            facts = list(zip(verdict.positions, worth, verdict.protected, strict=True))
            assert after.positions.tolist() == verdict.survivors, (
                f"row {row} after column {block.stop}: retire must lose {verdict.lost} of (position, importance, "
                f"protected) {facts}, kept {after.positions.tolist()}"
            )
