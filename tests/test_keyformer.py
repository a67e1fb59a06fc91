"""Keyformer by hand-computed examples."""

import math

import mlx.core as mx
import numpy as np
import pytest

import veloxfn
from veloxfn import draws, h2o, keyformer

TAU = {"logit": 0.2, "additive": 3.0}  # at which noise decides much


def stream(count, rows=1, groups=1, dim=4, seed=0):
    a, b = mx.random.split(mx.random.key(seed))
    return mx.random.normal((rows, count, dim), key=a), mx.random.normal((rows, groups, count, dim), key=b)


def run(config, keys, queries, blocks=None, streams=None):
    policy = veloxfn.policy(config)
    state = policy.init_state(keys.shape[0], keys.shape[2], dtype=keys.dtype, streams=streams)
    start = 0
    for count in blocks or [keys.shape[1]]:
        now = slice(start, start + count)
        state = policy.update_batched(state, keys[:, now], keys[:, now], queries=queries[:, :, now])
        start += count
    return state


def softmax(logits):
    powers = np.exp(logits - np.max(logits))
    return powers / powers.sum()


def tempered(keys, queries, tau, zeta):
    """Masses by the definition: tau[t], zeta[g, t, j]."""
    mass = np.zeros(keys.shape[0])
    for t in range(keys.shape[0]):
        for g, head in enumerate(queries):
            logits = keys[: t + 1] @ head[t] / math.sqrt(keys.shape[1])
            mass[: t + 1] += softmax((logits + zeta[g, t, : t + 1]) / tau[t]) / len(queries)
    return mass


def test_lesson_5_the_schedule_at_its_start_middle_end_and_beyond():
    config = keyformer.Config(tau_init=2.0, tau_end=6.0, anneal_steps=100)
    assert keyformer.temperature(config, mx.array([0, 50, 100, 200])).tolist() == [2.0, 4.0, 6.0, 6.0]
    falling = keyformer.Config(tau_init=2.0, tau_end=1.0, anneal_steps=4)
    assert keyformer.temperature(falling, mx.array([0, 1, 4, 9])).tolist() == [2.0, 1.75, 1.0, 1.0]
    for constant in (keyformer.Config(tau=3.0), keyformer.Config(tau_init=3.0, tau_end=9.0, anneal_steps=0)):
        assert keyformer.temperature(constant, mx.array([0, 7])).tolist() == [3.0, 3.0]


def test_lesson_5_the_schedule_reaches_the_masses():
    keys, queries = stream(9, groups=2)
    config = keyformer.Config(budget=16, noise="none", tau_init=0.5, tau_end=4.0, anneal_steps=5, anneal_from=2)
    tau = [0.5 + min(max(0, t - 2), 5) * 3.5 / 5 for t in range(9)]
    want = tempered(np.array(keys[0], np.float64), np.array(queries[0], np.float64), tau, np.zeros((2, 9, 9)))
    for blocks in ([9], [1] * 9, [4, 5]):
        assert np.allclose(run(config, keys, queries, blocks).mass[0], want, rtol=1e-5)


def test_logit_noise_is_fresh_for_every_head_query_and_slot():
    keys, queries = stream(7, groups=3)
    config = keyformer.Config(budget=16, tau=1.5, seed=9)
    names = draws.names(9, mx.array(0, mx.uint32), mx.arange(3)[:, None], mx.arange(7)[None])
    zeta = np.array(draws.hashed_gumbel(names[..., None], mx.arange(7, dtype=mx.int32)), np.float64)
    assert len(set(zeta.ravel().tolist())) == zeta.size
    want = tempered(np.array(keys[0], np.float64), np.array(queries[0], np.float64), [1.5] * 7, zeta)
    for blocks in ([7], [1] * 7, [3, 4]):
        assert np.allclose(run(config, keys, queries, blocks).mass[0], want, rtol=1e-5)


@pytest.mark.parametrize("noise", ["logit", "additive"])
def test_lesson_7_noise_does_not_depend_on_the_grouping(noise):
    keys, queries = stream(100, rows=2, groups=2)
    config = keyformer.Config(budget=128, noise=noise, tau=2.0)
    runs = [run(config, keys, queries, blocks) for blocks in ([100], [25] * 4, [1] * 100)]
    for other in runs[1:]:
        assert np.allclose(runs[0].mass, other.mass, rtol=1e-4)
        assert mx.array_equal(runs[0].noise, other.noise)


@pytest.mark.parametrize("noise", ["logit", "additive"])
def test_lesson_6_streams_differ_and_batch_places_do_not(noise):
    keys, queries = stream(200, groups=2, dim=8)
    config = keyformer.Config(budget=32, noise=noise, tau=TAU[noise])
    four = run(config, mx.tile(keys, (4, 1, 1)), mx.tile(queries, (4, 1, 1, 1)), streams=veloxfn.streams(2, 2))
    kept = [tuple(row) for row in veloxfn.kept_positions(four).tolist()]
    assert kept[0] == kept[2]
    assert kept[1] == kept[3]
    assert kept[0] != kept[1]
    alone = run(config, keys, queries, streams=veloxfn.streams(1, 2)[1:])
    assert tuple(veloxfn.kept_positions(alone)[0].tolist()) == kept[3]


@pytest.mark.parametrize("noise", ["logit", "additive"])
def test_lesson_6_seed_and_stream_are_different_things(noise):
    keys, queries = stream(200, dim=8)
    kept = {}
    for seed, name in ((0, 1), (1, 0), (0, 0), (1, 1)):
        config = keyformer.Config(budget=32, noise=noise, tau=TAU[noise], seed=seed)
        state = run(config, keys, queries, streams=mx.array([name], mx.uint32))
        kept[seed, name] = tuple(veloxfn.kept_positions(state)[0].tolist())
    assert len(set(kept.values())) == 4


@pytest.mark.parametrize("seed", [0, 1, 12345])
@pytest.mark.parametrize("cadence", ["block", "token"])
@pytest.mark.parametrize("blocks", [[60], [20, 40], [1] * 60])
@pytest.mark.parametrize("noise", ["additive", "none"])
def test_without_noise_it_is_h2o_bit_for_bit(seed, cadence, blocks, noise):
    keys, queries = stream(60, rows=3, groups=2, seed=seed)
    same = {"budget": 16, "sink": 2, "recent": 5, "cadence": cadence}
    tau = 0.0 if noise == "additive" else 1.0
    one = run(keyformer.Config(noise=noise, tau=tau, seed=seed, **same), keys, queries, blocks)
    other = run(h2o.Config(**same), keys, queries, blocks)
    for leaf, twin in zip([*one.slots, one.mass], [*other.slots, other.mass], strict=True):
        assert mx.array_equal(leaf, twin)


def test_additive_noise_ranks_by_mass_plus_the_tempered_draw():
    keys, queries = stream(12)
    config = keyformer.Config(budget=11, sink=1, recent=2, noise="additive", tau_init=1.0, tau_end=5.0, anneal_steps=8)
    mass = tempered(np.array(keys[0], np.float64), np.array(queries[0], np.float64), [1.0] * 12, np.zeros((1, 12, 12)))
    noise = np.array(draws.gumbel(0, mx.array([0], mx.uint32), mx.arange(12, dtype=mx.int32)[None]))[0]
    worth = mass + 5.0 * noise
    weakest = min(range(1, 10), key=lambda j: worth[j])
    state = run(config, keys, queries)
    assert veloxfn.kept_positions(state)[0].tolist() == [p for p in range(12) if p != weakest]
    held = dict(zip(state.slots.positions[0].tolist(), state.mass[0].tolist(), strict=True))
    for position, have in held.items():
        assert position < 0 or abs(have - mass[position]) < 1e-5, "the stored mass stays clean"


def test_a_late_riser_is_lost_by_greedy_sums_and_sometimes_saved_by_noise():
    """Position 2 is read by nobody at first; with noise it outlives many rows."""
    rows, count = 64, 120
    x = mx.random.normal((1, count, 8), key=mx.random.key(3))
    quiet = mx.where((mx.arange(count) == 2)[None, :, None], -4.0, 0.3 * x)
    keys = mx.tile(quiet, (rows, 1, 1))
    queries = mx.ones((rows, 1, count, 8))
    survived = {}
    for tau in (0.0, 6.0):
        config = keyformer.Config(budget=24, sink=2, recent=6, noise="additive", tau=tau, cadence="token")
        kept = np.array(veloxfn.kept_positions(run(config, keys, queries)))
        survived[tau] = (kept == 2).any(axis=1).mean()
    assert survived[0.0] == 0.0
    assert 0.05 < survived[6.0] < 0.95


def test_the_default_window_is_three_tenths():
    assert keyformer.Config().recent_rows == 153
    assert keyformer.Config(budget=6).recent_rows == 1
    assert keyformer.Config(budget=8, sink=7).recent_rows == 0


def test_key_proxy():
    keys, _ = stream(30, rows=2)
    for noise in ("logit", "additive", "none"):
        config = keyformer.Config(budget=12, noise=noise, query_source="key_proxy")
        policy = keyformer.policy(config)
        state = policy.update_batched(policy.init_state(2, 4, dtype=mx.float32), keys, keys)
        assert veloxfn.tokens_kept(state).tolist() == [12, 12]


@pytest.mark.parametrize("noise", ["logit", "additive", "none"])
def test_a_broken_key_gets_no_mass(noise):
    keys, queries = stream(10)
    keys = mx.where((mx.arange(10) == 4)[None, :, None], mx.nan, keys)
    state = run(keyformer.Config(budget=16, noise=noise, tau=1.0), keys, queries)
    assert state.mass[0, 4].item() == 0
    assert abs(state.mass.sum().item() - 10) < 1e-4
