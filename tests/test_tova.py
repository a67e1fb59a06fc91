"""TOVA by hand-computed examples."""

import mlx.core as mx
import numpy as np
import pytest

import veloxfn
from veloxfn import h2o, tova


def run(config, keys, queries, blocks):
    policy = veloxfn.policy(config)
    state = policy.init_state(keys.shape[0], keys.shape[2], dtype=keys.dtype)
    start = 0
    for count in blocks:
        now = slice(start, start + count)
        state = policy.update_batched(state, keys[:, now], keys[:, now], queries=queries[:, :, now])
        start += count
    return state


def line(*numbers):
    """Keys or queries of one row with D = 1."""
    return mx.array(numbers).reshape(1, -1, 1)


def test_only_the_last_query_counts():
    keys = line(5.0, 1.0, 3.0, 2.0)
    assert veloxfn.kept_positions(run(tova.Config(budget=2), keys, mx.ones((1, 1, 4, 1)), [4])).tolist() == [[0, 2]]
    against = line(1.0, 1.0, 1.0, -1.0)[:, None]  # the last query likes low keys, whatever the others liked
    assert veloxfn.kept_positions(run(tova.Config(budget=2), keys, against, [4])).tolist() == [[1, 3]]


def test_the_newest_token_can_be_the_weakest_unless_it_is_protected():
    keys, looks = line(3.0, 2.0, 0.0), mx.ones((1, 1, 3, 1))
    assert veloxfn.kept_positions(run(tova.Config(budget=2), keys, looks, [1, 1, 1])).tolist() == [[0, 1]]
    assert veloxfn.kept_positions(run(tova.Config(budget=2, recent=1), keys, looks, [1, 1, 1])).tolist() == [[0, 2]]
    keys = line(0.0, 2.0, 3.0)
    assert veloxfn.kept_positions(run(tova.Config(budget=2, sink=1), keys, looks, [1, 1, 1])).tolist() == [[0, 2]]


def test_heads_are_averaged_after_their_softmax():
    """Head 0 puts all its weight on position 0; head 1 prefers 1 over 2 by little: 0, then 1 stay."""
    keys = mx.array([[[10.0, 0.0], [0.0, 0.6], [0.0, 0.5]]])
    queries = mx.array([[[10.0, 0.0]], [[0.0, 1.0]]])[None] * mx.ones((1, 2, 3, 2))
    assert veloxfn.kept_positions(run(tova.Config(budget=2), keys, queries, [3])).tolist() == [[0, 1]]


def test_one_kept_set_for_the_heads_of_a_layer():
    """Row 0 likes position 0 strongly, row 1 position 1 weakly: together they keep 0."""
    keys = mx.array([[[4.0], [0.0], [0.0]], [[0.0], [0.5], [0.0]]])
    looks = mx.ones((2, 1, 3, 1))
    alone = veloxfn.kept_positions(run(tova.Config(budget=1), keys, looks, [3])).tolist()
    shared = veloxfn.kept_positions(run(tova.Config(budget=1, shared_heads=2), keys, looks, [3])).tolist()
    assert (alone, shared) == ([[0], [1]], [[0], [0]])


def test_a_padded_last_query_is_not_the_last():
    keys, queries = line(5.0, 1.0, 3.0, 9.0), line(1.0, 1.0, 1.0, -1.0)[:, None]
    config = tova.Config(budget=2)
    valid = mx.array([[True, True, True, False]])
    state = tova.update_batched(
        config, tova.init_state(config, 1, 1, dtype=mx.float32), keys, keys, queries=queries, valid=valid
    )
    assert veloxfn.kept_positions(state).tolist() == [[0, 2]]


@pytest.mark.parametrize("cadence", ["block", "token"])
def test_one_by_one_it_is_h2o_that_forgets_everything(cadence):
    a, b = mx.random.split(mx.random.key(0))
    keys, queries = mx.random.normal((2, 40, 4), key=a), mx.random.normal((2, 1, 40, 4), key=b)
    one = run(tova.Config(budget=7, cadence=cadence), keys, queries, [1] * 40)
    other = run(h2o.Config(budget=7, sink=0, recent=0, decay=0.0), keys, queries, [1] * 40)
    assert mx.array_equal(one.slots.positions, other.slots.positions)
    assert mx.array_equal(one.slots.keys, other.slots.keys)


def test_attention_of_one_token_equals_its_query():
    keys, queries = mx.random.normal((2, 6, 4), key=mx.random.key(1)), mx.random.normal((2, 3, 6, 4))
    config = tova.Config(budget=4)
    policy = tova.policy(config)
    asked = told = run(config, keys[:, :5], queries[:, :, :5], [5])
    asked = policy.update_batched(asked, keys[:, 5:], keys[:, 5:], queries=queries[:, :, 5:])
    absorbed = policy.absorb(told, keys[:, 5:], keys[:, 5:])
    logits = np.array(queries[:, :, 5] @ absorbed.slots.keys.swapaxes(1, 2)) / 2
    weights = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    told = policy.evict(absorbed, attention=mx.array(weights.mean(axis=1)))
    assert mx.array_equal(asked.slots.positions, told.slots.positions)
