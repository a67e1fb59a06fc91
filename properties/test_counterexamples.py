"""What is not claimed, each pinned by the smallest input that shows it."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from veloxfn import h2o, knorm, streaming_llm
from veloxfn.base import Retention
from veloxfn.testing import Oracle, Stream, claims_for, fingerprint, laws, normal_stream, replay
from veloxfn.testing.drive import live_positions, run
from veloxfn.testing.streams import split


def one_row(keys: Sequence[float], queries: Sequence[float], blocks: Sequence[int] | None = None) -> Stream:
    """One row with D = 1."""
    tokens = len(keys)
    return Stream(
        keys=np.array(keys, dtype=np.float32)[None, :, None],
        values=fingerprint(1, tokens, 3),
        queries=np.array(queries, dtype=np.float32)[None, None, :, None],
        valid=np.ones((1, tokens), dtype=np.bool_),
        blocks=split(tokens, 1) if blocks is None else tuple(blocks),
    )


def kept_by(module, config: Retention, stream: Stream) -> list[int]:
    """What the library keeps, after making sure that the oracle keeps the same by a clear margin."""
    expected, slack = replay(config, stream)
    assert slack > 0.05, f"a counterexample must not hang on rounding, slack {slack}"
    found = live_positions(run(module.policy(config), stream))[0].tolist()
    assert found == expected[0], f"the oracle keeps {expected[0]}, found {found}"
    return found


def test_h2o_with_block_cadence_depends_on_the_grouping() -> None:
    keys, queries = [1, -2, 2, -2], [0, -1, 1, -2]
    config = h2o.Config(budget=2, sink=0, recent=1)
    assert not claims_for(config).split_invariant
    assert kept_by(h2o, config, one_row(keys, queries)) == [0, 3]
    assert kept_by(h2o, config, one_row(keys, queries, [4])) == [1, 3]
    with pytest.raises(AssertionError, match="must keep"):
        laws.law_grouping_does_not_matter(
            h2o.policy(config), one_row(keys, queries), [4], replace(claims_for(config), split_invariant=True)
        )


def test_h2o_with_token_cadence_does_not() -> None:
    keys, queries = [1, -2, 2, -2], [0, -1, 1, -2]
    config = h2o.Config(budget=2, sink=0, recent=1, cadence="token")
    for blocks in ([1, 1, 1, 1], [4], [1, 3], [2, 0, 2]):
        assert kept_by(h2o, config, one_row(keys, queries, blocks)) == [0, 3]


def test_h2o_kept_sets_do_not_nest_in_the_budget() -> None:
    stream = one_row([2, -1, -2, 2, 1], [-2, -2, -1, 1, 1])
    few = kept_by(h2o, h2o.Config(budget=2, sink=0, recent=1), stream)
    many = kept_by(h2o, h2o.Config(budget=3, sink=0, recent=1), stream)
    assert (few, many) == ([3, 4], [0, 1, 4])
    assert not claims_for(h2o.Config(budget=2, sink=0)).budgets_nest


def test_h2o_is_not_path_independent() -> None:
    """The token with the most attention of all can be lost early, even one token at a time."""
    stream = one_row([-1, 0, -2, -1], [2, 2, -1, 2])
    config = h2o.Config(budget=2, sink=0, recent=1, cadence="token")
    assert not claims_for(config).path_independent
    everything = Oracle(h2o.Config(budget=4, sink=0), 1)
    everything.absorb(stream.keys.astype(float), stream.queries.astype(float), stream.valid)
    mass = [token.mass for token in everything.rows[0].tokens]
    assert int(np.argmax(mass)) == 1
    assert kept_by(h2o, config, stream) == [0, 3]


def test_h2o_depends_on_content() -> None:
    config = h2o.Config(budget=2, sink=0, recent=1)
    assert not claims_for(config).content_independent
    assert kept_by(h2o, config, one_row([0, 2, 0], [0, 2, 2])) == [1, 2]
    assert kept_by(h2o, config, one_row([2, 0, 0], [0, 2, 2])) == [0, 2]


def test_key_proxy_without_a_recent_window_freezes() -> None:
    """Lesson 1: the documented trap; every arrival starts weakest. The default settings do not freeze."""
    config = h2o.Config(budget=32, sink=0, recent=0, query_source="key_proxy")
    assert claims_for(config).may_freeze
    stream = normal_stream(0, rows=1, tokens=200)
    assert live_positions(run(h2o.policy(config), stream))[0].tolist() == list(range(32))
    default = h2o.Config(budget=32)
    assert not claims_for(default).may_freeze
    laws.law_does_not_freeze(h2o.policy(default))


def test_knorm_nests_only_with_the_same_recent_window() -> None:
    stream = one_row([0, 1, 2, 2, 2], [0] * 5)
    few, many = (
        live_positions(run(knorm.policy(knorm.Config(budget=b, sink=0, recent=r)), stream))[0].tolist()
        for b, r in ((2, 0), (3, 2))
    )
    assert (few, many) == ([0, 1], [0, 3, 4])


def test_knorm_stays_path_independent_with_a_recent_window() -> None:
    """A token competes once, when it leaves the window: the grouping cannot matter."""
    keys = [3, 1, 2, 1, 0, 3, 1, 2]
    policy = knorm.policy(knorm.Config(budget=4, sink=1, recent=2))
    for blocks in ([8], [1] * 8, [5, 3], [2, 1, 5], [7, 1]):
        assert live_positions(run(policy, one_row(keys, keys, blocks)))[0].tolist() == [0, 4, 6, 7]


def test_streaming_llm_claims_everything() -> None:
    claims = claims_for(streaming_llm.Config(budget=4, sink=1))
    assert claims.path_independent
    assert claims.budgets_nest
    assert claims.content_independent
