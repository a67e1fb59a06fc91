"""H2O by hand-computed examples; the laws and the oracle are in `properties/`."""

import math

import mlx.core as mx
import numpy as np
import pytest

import veloxfn
from veloxfn import h2o


def softmax(logits):
    powers = np.exp(logits - np.max(logits))
    return powers / powers.sum()


def stream(count, rows=1, groups=1, dim=4, seed=0):
    a, b = mx.random.split(mx.random.key(seed))
    return mx.random.normal((rows, count, dim), key=a), mx.random.normal((rows, groups, count, dim), key=b)


def run(config, keys, queries, blocks=None, **evidence):
    state = h2o.init_state(config, keys.shape[0], keys.shape[2], dtype=keys.dtype)
    start = 0
    for count in blocks or [keys.shape[1]]:
        now = slice(start, start + count)
        given = evidence or {"queries": queries[:, :, now]}
        state = h2o.update_batched(config, state, keys[:, now], keys[:, now], **given)
        start += count
    return state


def masses(state, row=0):
    """Mass by position."""
    pairs = zip(state.slots.positions[row].tolist(), state.mass[row].tolist(), strict=True)
    return {position: mass for position, mass in pairs if position >= 0}


def test_mass_is_the_summed_attention_of_every_query_since_arrival():
    keys, queries = stream(3, groups=2)
    state = run(h2o.Config(budget=8), keys, queries)
    k, q = np.array(keys[0], np.float64), np.array(queries[0], np.float64)
    want = np.zeros(3)
    for t in range(3):
        for head in q:
            want[: t + 1] += softmax(k[: t + 1] @ head[t] / math.sqrt(4)) / 2
    assert np.allclose(state.mass[0], want, rtol=1e-6)


def test_a_block_and_single_tokens_agree_before_the_first_eviction():
    keys, queries = stream(20, rows=2, groups=3)
    block = run(h2o.Config(budget=32), keys, queries)
    tokens = run(h2o.Config(budget=32), keys, queries, blocks=[1] * 20)
    assert np.allclose(block.mass, tokens.mass, rtol=1e-5)
    assert np.allclose(block.mass.sum(axis=1), 20, rtol=1e-6)


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.98])
@pytest.mark.parametrize("source", ["true", "key_proxy"])
def test_lesson_2_decay_in_a_block_matches_token_by_token(decay, source):
    keys, queries = stream(13, rows=2)
    config = h2o.Config(budget=32, decay=decay, query_source=source)
    given = {} if source == "true" else {"valid": None}
    block = run(config, keys, queries, blocks=[5, 8], **given)
    tokens = run(config, keys, queries, blocks=[1] * 13, **given)
    assert np.allclose(block.mass, tokens.mass, rtol=1e-5, atol=1e-12)


def test_lesson_2_with_decay_half_of_what_is_kept_is_recent():
    """1000 tokens whose topic turns every 100: each query attends to the tokens of its own topic."""
    noise, _ = stream(1000, dim=16, seed=3)
    topic = mx.eye(16)[mx.arange(1000) // 100][None]
    keys, queries = 3 * topic + 0.3 * noise, 4 * topic[:, None]
    later = {}
    for decay in (1.0, 0.98):
        state = run(h2o.Config(budget=64, decay=decay, recent=8, cadence="token"), keys, queries)
        later[decay] = int((veloxfn.kept_positions(state) >= 500).sum())
    assert later[0.98] >= 32
    assert later[1.0] < later[0.98], "plain sums never shrink"


def test_lesson_1_the_default_does_not_freeze():
    keys, queries = stream(200, dim=8, seed=1)
    for cadence in ("block", "token"):
        state = run(h2o.Config(budget=32, cadence=cadence), keys, queries, blocks=[1] * 200)
        assert set(range(184, 200)) < set(veloxfn.kept_positions(state)[0].tolist())


def test_lesson_1_the_documented_freeze_of_the_key_proxy_without_a_window():
    keys, _ = stream(200, dim=8, seed=1)
    config = h2o.Config(budget=32, sink=4, recent=0, query_source="key_proxy")
    state = run(config, keys, None, blocks=[1] * 200, valid=None)
    assert veloxfn.kept_positions(state)[0].tolist() == list(range(32))


def test_lesson_3_the_newest_row_has_been_attended_to_when_it_is_ranked():
    keys, _ = stream(8, dim=8, seed=2)
    queries = 4 * keys[:, None]  # each query looks at its own token
    state = run(h2o.Config(budget=4, sink=1, recent=0), keys, queries, blocks=[1] * 8)
    assert 7 in veloxfn.kept_positions(state)[0].tolist()
    assert masses(state)[7] > 0


def test_key_proxy_sees_the_stored_keys_without_its_own_and_starts_at_zero():
    keys, _ = stream(3, dim=4)
    state = run(h2o.Config(budget=8, query_source="key_proxy"), keys, None, valid=None)
    k = np.array(keys[0], np.float64)
    want = np.array([1.0, 0.0, 0.0])
    for t in (1, 2):
        want[:t] += softmax(k[:t] @ k[t] / 2)
    assert np.allclose(state.mass[0], want, rtol=1e-6)


def test_age_normalised_ranks_by_mass_per_query():
    keys = mx.zeros((1, 6, 2))
    queries = mx.zeros((1, 1, 6, 2))  # uniform attention: mass_j = sum of 1 / (t + 1) over t >= j
    plain = run(h2o.Config(budget=3, sink=0, recent=0), keys, queries)
    aged = run(h2o.Config(budget=3, sink=0, recent=0, age_normalised=True), keys, queries)
    assert veloxfn.kept_positions(plain).tolist() == [[0, 1, 2]]
    assert veloxfn.kept_positions(aged).tolist() == [[0, 1, 2]]
    late = mx.zeros((1, 6, 2)) + mx.array([0, 0, 0, 0, 1.0, 0])[None, :, None]
    looks = mx.broadcast_to(mx.array([4.0, 4.0]), (1, 1, 6, 2))
    assert 4 not in veloxfn.kept_positions(run(h2o.Config(budget=1, sink=0, recent=0), late, looks * 0.1)).tolist()[0]
    rate = h2o.Config(budget=1, sink=0, recent=0, age_normalised=True)
    assert veloxfn.kept_positions(run(rate, late, looks)).tolist() == [[4]]


def test_attention_given_equals_attention_computed():
    keys, queries = stream(9, rows=2, groups=2)
    config = h2o.Config(budget=6, sink=1, recent=2)
    policy = h2o.policy(config)
    state = policy.init_state(2, 4, dtype=mx.float32)
    twin = state
    for t in range(9):
        now = slice(t, t + 1)
        twin = policy.absorb(twin, keys[:, now], keys[:, now])
        k, _ = policy.candidates(twin)
        logits = queries[:, :, now] @ k[:, None].swapaxes(2, 3) / 2
        mask = veloxfn.candidate_mask(config, twin)[:, None]
        mass = mx.softmax(mx.where(mask, logits, -mx.inf), axis=-1).sum(axis=2).mean(axis=1)
        twin = policy.evict(twin, attention=mass)
        state = policy.update_batched(state, keys[:, now], keys[:, now], queries=queries[:, :, now])
        assert mx.array_equal(state.slots.positions, twin.slots.positions)
        assert np.allclose(state.mass, twin.mass, rtol=1e-5)


def test_attention_of_a_whole_block():
    keys, queries = stream(9, rows=2)
    config = h2o.Config(budget=6, sink=1, recent=2)
    policy = h2o.policy(config)
    absorbed = policy.absorb(policy.init_state(2, 4, dtype=mx.float32), keys, keys)
    logits = queries[:, 0] @ policy.candidates(absorbed)[0].swapaxes(1, 2) / 2
    weights = mx.softmax(mx.where(veloxfn.candidate_mask(config, absorbed), logits, -mx.inf), axis=-1)
    given = policy.evict(absorbed, attention=weights.sum(axis=1))
    asked = policy.evict(absorbed, queries=queries)
    assert mx.array_equal(given.slots.positions, asked.slots.positions)


@pytest.mark.parametrize("count", [2, 7, 40])
def test_token_cadence_does_the_same_however_the_arrivals_are_grouped(count):
    keys, queries = stream(40, rows=2, groups=2, seed=5)
    config = h2o.Config(budget=12, cadence="token")
    one = run(config, keys, queries, blocks=[1] * 40)
    many = run(config, keys, queries, blocks=[count] * (40 // count) + [40 % count])
    for leaf, other in zip([*one.slots, one.mass], [*many.slots, many.mass], strict=True):
        assert mx.array_equal(leaf, other)


def test_padded_queries_count_nothing_even_if_they_are_nan():
    keys, queries = stream(6, rows=2)
    valid = mx.array([[False, False, True, True, True, True], [True] * 6])
    config = h2o.Config(budget=8)
    bad = mx.where(valid[:, None, :, None], queries, mx.nan)
    policy = h2o.policy(config)
    ragged = policy.update_batched(policy.init_state(2, 4, dtype=mx.float32), keys, keys, queries=bad, valid=valid)
    alone = run(config, keys[:1, 2:], queries[:1, :, 2:])
    assert np.allclose(ragged.mass[0, 2:], alone.mass[0], rtol=1e-6)
    assert ragged.mass[0, :2].tolist() == [0, 0]
    assert np.allclose(ragged.mass.sum(axis=1), [4, 6], rtol=1e-6)


def test_empty_block_is_a_no_op_attention_included():
    keys, queries = stream(9)
    config = h2o.Config(budget=6, sink=1, recent=2)
    state = run(config, keys, queries)
    none = keys[:, :0]
    for given in ({}, {"queries": queries[:, :, :0]}, {"attention": mx.ones(state.mass.shape)}):
        after = h2o.update_batched(config, state, none, none, **given)
        for leaf, other in zip([*state.slots, state.mass], [*after.slots, after.mass], strict=True):
            assert mx.array_equal(leaf, other)


def test_lesson_37_a_long_block_is_scored_in_tiles():
    """The same mass as from one big matrix, at a size that needs many tiles."""
    keys, queries = stream(700, groups=2, dim=8, seed=7)
    state = run(h2o.Config(budget=700), keys, queries)
    logits = np.array(queries[0], np.float64) @ np.array(keys[0], np.float64).T / math.sqrt(8)
    logits[:, np.triu(np.ones((700, 700), bool), 1)] = -np.inf
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    assert np.allclose(state.mass[0], weights.mean(axis=0).sum(axis=0), rtol=1e-4)
