"""What is not claimed, each pinned by the smallest input that shows it."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from veloxfn import cam, h2o, keyformer, knorm, snapkv, streaming_llm, tova
from veloxfn.base import Retention
from veloxfn.placement import Absolute, Contiguous, Rope
from veloxfn.testing import Oracle, Stream, claims_for, fingerprint, laws, normal_stream, replay
from veloxfn.testing.drive import live_positions, run
from veloxfn.testing.oracle import softmax
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


def two_heads(keys: Sequence[float], first: Sequence[float], second: Sequence[float], blocks=None) -> Stream:
    """One row with D = 1 and two query heads."""
    queries = np.array([first, second], dtype=np.float32)[None, :, :, None]
    return replace(one_row(keys, first, blocks), queries=queries)


def denies(law, policy, *arguments, **claimed) -> None:
    """The law fails if `claimed` is claimed, and it is not."""
    claims = claims_for(policy.config)
    assert all(getattr(claims, name) != value for name, value in claimed.items())
    with pytest.raises(AssertionError):
        law(policy, *arguments, replace(claims, **claimed))


def test_keyformer_with_noise_on_the_logits_is_not_h2o_at_small_tau() -> None:
    """Small tau makes the noisy choice sharp; it does not take the noise away."""
    stream = one_row([-2, 1, -2], [2, 1, 0])
    shared = {"budget": 2, "sink": 0, "recent": 1}
    assert kept_by(keyformer, keyformer.Config(**shared, noise="logit", tau=0.05), stream) == [1, 2]
    assert kept_by(h2o, h2o.Config(**shared), stream) == [0, 2]


def test_keyformer_with_block_cadence_depends_on_the_grouping() -> None:
    keys, queries = [2, -2, -1, -2], [2, -1, 0, 0]
    config = keyformer.Config(budget=2, sink=0, recent=1, tau=1.0)
    assert kept_by(keyformer, config, one_row(keys, queries)) == [1, 3]
    assert kept_by(keyformer, config, one_row(keys, queries, [4])) == [0, 3]
    denies(
        laws.law_grouping_does_not_matter, keyformer.policy(config), one_row(keys, queries), [4], split_invariant=True
    )


def test_keyformer_kept_sets_do_not_nest_in_the_budget() -> None:
    stream = one_row([1, -1, -1, 2, 0], [2, -2, -2, 2, 2])
    shared = {"sink": 0, "recent": 1, "tau": 1.0}
    few, many = (kept_by(keyformer, keyformer.Config(budget=budget, **shared), stream) for budget in (2, 3))
    assert (few, many) == ([3, 4], [0, 1, 4])
    assert not claims_for(keyformer.Config(budget=2, **shared)).budgets_nest


def test_keyformer_with_additive_noise_is_not_path_independent() -> None:
    """Token 1 is worth the most of all four, noise included, and is lost before its mass has grown."""
    stream = one_row([2, -2, 1, 1], [-2, -1, -2, -1])
    config = keyformer.Config(budget=2, sink=0, recent=1, noise="additive", tau=1.0, cadence="token")
    assert not claims_for(config).path_independent
    everything = Oracle(replace(config, budget=4), 1)
    (verdict,) = everything.absorb(stream.keys.astype(float), stream.queries.astype(float), stream.valid)
    assert int(np.argmax(verdict.importance)) == 1
    assert kept_by(keyformer, config, stream) == [0, 3]


def test_additive_noise_can_save_a_broken_key() -> None:
    """A key that holds NaN has mass 0 for ever, and its frozen draw outweighs the masses of the others."""
    config = keyformer.Config(budget=4, sink=0, recent=1, noise="additive", tau=4.0, seed=3)
    policy, claims = keyformer.policy(config), claims_for(config)
    assert not claims.nan_is_weak
    with pytest.raises(AssertionError, match="NaN and still kept"):
        laws.law_nan_never_saves_a_slot(policy, claims=replace(claims, nan_is_weak=True))
    silent = keyformer.Config(budget=4, sink=0, recent=1, noise="additive", tau=0.0, seed=3)
    laws.law_nan_never_saves_a_slot(keyformer.policy(silent), claims=replace(claims, nan_is_weak=True))


def test_snapkv_depends_on_chunking_once_something_was_evicted() -> None:
    """One by one, token 1 goes with the fourth token, before the last queries that look at it arrive."""
    keys, queries = [2, -1, 0, -2, -2], [0, 1, 2, -2, 0]
    config = snapkv.Config(budget=3, window=2, kernel=1)
    assert kept_by(snapkv, config, one_row(keys, queries)) == [2, 3, 4]
    assert kept_by(snapkv, config, one_row(keys, queries, [5])) == [1, 3, 4]
    assert kept_by(snapkv, config, one_row(keys, queries, [3, 2])) == [1, 3, 4]
    denies(laws.law_grouping_does_not_matter, snapkv.policy(config), one_row(keys, queries), [5], split_invariant=True)


def test_pooling_can_save_a_broken_key() -> None:
    """A key that holds NaN gets nothing itself; pooled with a heavy sink beside it, it outranks what comes later."""
    stream = one_row([2, np.nan, 0, 0, 0, 0, 0, 0], [2] * 8)
    for kernel, kept in ((1, [0, 6, 7]), (3, [0, 1, 7])):
        config = snapkv.Config(budget=3, sink=1, window=1, kernel=kernel)
        assert claims_for(config).nan_is_weak is (kernel == 1)
        assert live_positions(run(snapkv.policy(config), stream))[0].tolist() == kept


def test_group_mean_does_not_commute_with_max_pooling() -> None:
    """Heads are averaged before pooling; pooled head by head, token 2 would go instead of token 0."""
    keys, first, second = [1, -1, -2, 1], [0, -2, -1, 2], [1, -1, -2, -1]
    config = snapkv.Config(budget=3, window=1, kernel=3, pooling="max")
    assert kept_by(snapkv, config, two_heads(keys, first, second, [4])) == [1, 2, 3]
    heads = [softmax(np.array(keys) * query) for query in (2.0, -1.0)]
    pooled = np.mean([[max(row[0:2]), max(row[0:3]), max(row[1:3])] for row in heads], axis=0)
    assert int(np.argmin(pooled)) == 2


def test_snapkv_and_tova_kept_sets_do_not_nest_in_the_budget() -> None:
    """One query orders the keys alike whatever is kept; several heads or queries, averaged, do not."""
    stream = one_row([1, -2, 2, 2, 2], [0, -2, 1, 1, -2])
    few, many = (kept_by(snapkv, snapkv.Config(budget=b, window=2, kernel=1), stream) for b in (3, 4))
    assert (few, many) == ([0, 3, 4], [1, 2, 3, 4])
    stream = two_heads([-1, -2, 2, 0], [0, -1, 0, 1], [0, 2, -1, -1])
    few, many = (kept_by(tova, tova.Config(budget=b), stream) for b in (2, 3))
    assert (few, many) == ([1, 3], [0, 1, 2])
    for config in (snapkv.Config(budget=3, window=2), tova.Config(budget=2)):
        assert not claims_for(config).budgets_nest


def test_tova_with_block_cadence_depends_on_the_grouping() -> None:
    keys, queries = [0, 2, 1, -2], [-2, 0, 2, -2]
    config = tova.Config(budget=2)
    assert kept_by(tova, config, one_row(keys, queries)) == [2, 3]
    assert kept_by(tova, config, one_row(keys, queries, [4])) == [0, 3]
    denies(laws.law_grouping_does_not_matter, tova.policy(config), one_row(keys, queries), [4], split_invariant=True)


def test_cam_into_the_nearest_does_not_keep_the_positions_of_h2o() -> None:
    """The mass that a loser hands over feeds the ranking."""
    stream = one_row([0, -2, -2, 0], [0, -1, 0, -1])
    shared = {"budget": 2, "sink": 0, "recent": 1}
    nearest = cam.Config(**shared, targets="nearest", merge="mean", gate=False)
    assert kept_by(cam, nearest, stream) == [2, 3]
    assert kept_by(h2o, h2o.Config(**shared), stream) == [0, 3]
    assert kept_by(cam, replace(nearest, merge="off"), stream) == [0, 3]
    assert kept_by(cam, replace(nearest, targets="window"), stream) == [0, 3]
    with pytest.raises(AssertionError, match="masses changed"):
        laws.law_keeps_the_positions_of(cam.policy(nearest), h2o.policy(h2o.Config(**shared)), stream)


def test_cam_does_not_keep_bit_copies() -> None:
    policy = cam.policy(cam.Config(budget=2, sink=0, recent=1, gate=False))
    denies(laws.law_kept_rows_are_bit_copies, policy, one_row([0, 0, 0], [0, 0, 0]), bit_copies=True)


@pytest.mark.parametrize(("module", "seed"), [(h2o, 11), (tova, 0)], ids=["h2o", "tova"])
def test_the_same_keys_in_other_blocks_are_other_keys_under_contiguous_placement(module, seed: int) -> None:
    """The grouping says where the model rotated them: token cadence is split invariant for keys rotated accordingly."""
    config = module.Config(budget=3, sink=0, cadence="token", placement=Contiguous(Rope(dims=2)))
    stream = normal_stream(seed, rows=1, tokens=6, key_dim=2, value_dim=3)
    denies(laws.law_grouping_does_not_matter, module.policy(config), stream, [6], split_invariant=True)
    absolute = module.policy(replace(config, placement=Absolute()))
    laws.law_grouping_does_not_matter(absolute, stream, [6])
