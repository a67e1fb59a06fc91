"""SnapKV by hand-computed examples."""

import math

import mlx.core as mx
import numpy as np
import pytest

import veloxfn
from veloxfn import snapkv, tova


def run(config, keys, queries, blocks, valid=None):
    policy = veloxfn.policy(config)
    state = policy.init_state(keys.shape[0], keys.shape[2], dtype=keys.dtype)
    start = 0
    for count in blocks:
        now = slice(start, start + count)
        given = {} if valid is None else {"valid": valid[:, now]}
        state = policy.update_batched(state, keys[:, now], keys[:, now], queries=queries[:, :, now], **given)
        start += count
    return state


def weights_of(keys, queries):
    """Causal attention [T, T] of one row, mean over heads, float64."""
    k, q = np.array(keys[0], np.float64), np.array(queries[0], np.float64)
    logits = q @ k.T / math.sqrt(k.shape[1])
    logits[:, np.triu(np.ones(logits.shape[1:], bool), 1)] = -np.inf
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return (powers / powers.sum(axis=-1, keepdims=True)).mean(axis=0)


def stream(count, rows=1, groups=2, seed=0):
    a, b = mx.random.split(mx.random.key(seed))
    return mx.random.normal((rows, count, 4), key=a), 2 * mx.random.normal((rows, groups, count, 4), key=b)


def expected(config, keys, queries):
    """Positions kept by the definition, for a prompt of which nothing was evicted before."""
    count, window = keys.shape[1], config.window
    mass = weights_of(keys, queries)[-window:].mean(axis=0)[: count - window]
    half = config.kernel // 2
    around = [mass[max(0, j - half) : j + half + 1] for j in range(len(mass))]
    pooled = [part.mean() if config.pooling == "mean" else part.max() for part in around]
    best = sorted(range(len(mass)), key=lambda j: (j >= config.sink, -pooled[j], -j))
    return sorted(best[: config.budget - window]) + list(range(count - window, count))


@pytest.mark.parametrize("pooling", ["mean", "max"])
@pytest.mark.parametrize("kernel", [1, 3, 5, 7])
@pytest.mark.parametrize("sink", [0, 2])
@pytest.mark.parametrize(
    ("blocks", "budget"),
    [([40], 15), ([5, 35], 15), ([9, 4, 27], 15), ([37, 3], 37), ([39, 1], 39), ([3, 8, 26, 3], 37)],
)
def test_a_prompt_is_scored_by_its_true_last_queries_however_it_was_grouped(pooling, kernel, sink, blocks, budget):
    keys, queries = stream(40)
    config = snapkv.Config(budget=budget, sink=sink, window=6, kernel=kernel, pooling=pooling)
    state = run(config, keys, queries, blocks)
    assert veloxfn.kept_positions(state)[0].tolist() == expected(config, keys, queries)


def test_the_window_is_a_ring_of_the_last_queries_and_moves_with_the_slots():
    keys, queries = stream(25)
    config = snapkv.Config(budget=12, window=4, kernel=1)
    state = run(config, keys, queries, [9] + [1] * 16)
    columns = dict(zip(state.slots.positions[0].tolist(), np.array(state.window[0]).T, strict=True))
    kept = [p for p in veloxfn.kept_positions(state)[0].tolist() if p >= 0]
    assert 24 in kept
    for ring_row in range(4):
        query = max(p for p in range(25) if p % 4 == ring_row)
        assert columns[24][ring_row] == 0 or query == 24, "a query before the token did not see it"
        assert 0 < sum(columns[p][ring_row] for p in kept) <= 1 + 1e-6


def test_a_prompt_below_the_window_and_rows_of_different_lengths():
    keys, queries = stream(9, rows=2)
    valid = mx.array([[False] * 4 + [True] * 5, [True] * 9])
    config = snapkv.Config(budget=6, window=3, kernel=3)
    both = run(config, keys, queries, [9], valid)
    alone = run(config, keys[:1, 4:], queries[:1, :, 4:], [5])
    full = run(config, keys[1:], queries[1:], [9])
    assert veloxfn.kept_positions(both).tolist() == [[-1, 0, 1, 2, 3, 4], veloxfn.kept_positions(full)[0].tolist()]
    order = [both.slots.positions[0].tolist().index(p) for p in range(5)]
    assert np.allclose(np.array(both.window[0])[:, order], np.array(alone.window[0]), rtol=1e-5)


def test_pooling_does_not_penalise_the_edges():
    """Past weights 2 2 1 1 1 pool to 2, 5/3, 4/3, 1, 1, so the older of the last two goes.

    Divided by the kernel at the edges, too, they would be 4/3, 5/3, 4/3, 1, 2/3, and the last one would go.
    """
    keys = mx.log(mx.array([2.0, 2, 1, 1, 1, 1])).reshape(1, 6, 1)
    config = snapkv.Config(budget=5, window=1, kernel=3)
    assert veloxfn.kept_positions(run(config, keys, mx.ones((1, 1, 6, 1)), [6])).tolist() == [[0, 1, 2, 4, 5]]


def test_with_one_query_and_no_pooling_it_is_tova_with_a_recent_token():
    keys, queries = stream(60, rows=2, seed=3)
    one = run(snapkv.Config(budget=9, sink=2, window=1, kernel=1), keys, queries, [20] + [1] * 40)
    other = run(tova.Config(budget=9, sink=2, recent=1), keys, queries, [20] + [1] * 40)
    assert mx.array_equal(veloxfn.kept_positions(one), veloxfn.kept_positions(other))


def test_decoding_keeps_the_budget():
    keys, queries = stream(200, seed=4)
    state = run(snapkv.Config(budget=40), keys, queries, [100] + [1] * 100)
    assert veloxfn.tokens_kept(state).tolist() == [40]
    assert set(range(168, 200)) <= set(veloxfn.kept_positions(state)[0].tolist())


def test_the_window_shrinks_with_a_small_budget_unless_it_was_asked_for():
    assert snapkv.Config().window == 32
    assert snapkv.Config(budget=16).window == 15
    assert snapkv.Config(budget=16, sink=4).window == 11
