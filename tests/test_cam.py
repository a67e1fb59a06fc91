"""CaM by hand-computed examples."""

import mlx.core as mx
import numpy as np
import pytest

import veloxfn
from veloxfn import cadence, cam, draws, h2o
from veloxfn.ops.merge_targets import merge_probability


def stream(count, rows=1, groups=1, dim=4, seed=0):
    a, b, c = mx.random.split(mx.random.key(seed), 3)
    keys, values = mx.random.normal((rows, count, dim), key=a), mx.random.normal((rows, count, 3), key=b)
    return keys, values, mx.random.normal((rows, groups, count, dim), key=c)


def run(config, keys, values, queries, blocks=None):
    policy = veloxfn.policy(config)
    state = policy.init_state(keys.shape[0], keys.shape[2], values.shape[2], dtype=keys.dtype)
    start = 0
    for count in blocks or [keys.shape[1]]:
        now = slice(start, start + count)
        state = policy.update_batched(state, keys[:, now], values[:, now], queries=queries[:, :, now])
        start += count
    return state


def held(config, state, row=0):
    """Values of the kept tokens by position."""
    positions, values = veloxfn.kept_positions(state)[row].tolist(), np.array(cam.get_kv(config, state)[1][row])
    return dict(zip(positions, values, strict=True))


def one_loser(**settings):
    """Five arrivals at budget 4: which is lost, what was held, what is held, masses of h2o before the eviction."""
    keys, values, queries = stream(5)
    config = cam.Config(**({"budget": 4, "sink": 1, "recent": 1, "gate": False} | settings))
    after = run(config, keys, values, queries)
    everything = run(h2o.Config(budget=5, sink=1, recent=1), keys, values, queries)
    lost = (set(range(5)) - set(held(config, after))).pop()
    return config, np.array(keys[0], np.float64), np.array(values[0]), lost, after, np.array(everything.mass[0])


@pytest.mark.parametrize("count", [1, 2, 32])
@pytest.mark.parametrize("merge", ["sum", "mean"])
def test_a_window_of_following_survivors_takes_equal_parts(count, merge):
    config, _, values, lost, after, _ = one_loser(target_count=count, merge=merge)
    targets = list(range(lost + 1, 5))[:count]
    for position, have in held(config, after).items():
        part = 1 / len(targets) if position in targets else 0
        assert np.allclose(have, (values[position] + part * values[lost]) / (1 + part), rtol=1e-6)


def test_the_papers_sum_only_adds():
    keys, values, queries = stream(5)
    config = cam.Config(budget=4, sink=1, recent=2, target_count=2, normalise=False, gate=False, cadence="token")
    after = held(config, run(config, keys, values, queries))
    lost = (set(range(5)) - set(after)).pop()
    want = {
        p: np.array(values[0, p]) + (np.array(values[0, lost]) / 2 if p in (lost + 1, lost + 2) else 0) for p in after
    }
    for position, have in after.items():
        assert np.allclose(have, want[position], rtol=1e-6)


def test_sums_conserve_the_total_value():
    keys, values, queries = stream(60, rows=3)
    config = cam.Config(budget=8, sink=1, recent=3, normalise=False, gate=False, cadence="token")
    state = run(config, keys, values, queries, [7, 13, 1, 39])
    assert np.allclose(cam.get_kv(config, state)[1].sum(axis=1), values.sum(axis=1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("merge", ["similarity", "mean", "sum"])
@pytest.mark.parametrize("merge_keys", [False, True])
def test_the_nearest_key_takes_the_loser_and_its_mass(merge, merge_keys):
    config, keys, values, lost, after, mass = one_loser(targets="nearest", merge=merge, merge_keys=merge_keys)
    unit = keys / np.linalg.norm(keys, axis=1, keepdims=True)
    cosine = {p: unit[p] @ unit[lost] for p in range(1, 5) if p != lost}
    target = max(cosine, key=cosine.get)
    w = np.clip(cosine[target], 0, 1) if merge == "similarity" else 0.5
    kept_keys = np.array(cam.get_kv(config, after)[0][0])
    for index, (position, have) in enumerate(held(config, after).items()):
        share = w if position == target else 0
        assert np.allclose(have, (1 - share) * values[position] + share * values[lost], rtol=1e-5, atol=1e-6)
        share = share if merge_keys else 0
        assert np.allclose(kept_keys[index], (1 - share) * keys[position] + share * keys[lost], rtol=1e-5, atol=1e-6)
    found = dict(zip(after.slots.positions[0].tolist(), after.mass[0].tolist(), strict=True))
    for position in range(5):
        if position != lost:
            gain = mass[lost] if position == target else 0
            assert abs(found[position] - mass[position] - gain) < 1e-5


def test_equal_keys_give_the_loser_all():
    x = mx.ones((1, 5, 4))
    values = mx.arange(5.0).reshape(1, 5, 1)
    config = cam.Config(budget=4, sink=1, recent=1, targets="nearest", merge="similarity", gate=False)
    after = held(config, run(config, x, values, x[:, None]))
    lost = (set(range(5)) - set(after)).pop()
    target = min(p for p in after if p >= 1)
    assert abs(after[target][0] - lost) < 1e-4, "similarity 1: the survivor's value is replaced, the oldest of equals"


def test_a_block_merges_all_its_losers_at_once():
    keys, values, queries = stream(30, rows=2, groups=2, seed=4)
    config = cam.Config(budget=9, sink=1, recent=3, target_count=3, gate=False)
    state = run(config, keys, values, queries)
    for row in range(2):
        kept = veloxfn.kept_positions(state)[row].tolist()
        weight, total = dict.fromkeys(kept, 1.0), {p: np.array(values[row, p], np.float64) for p in kept}
        for lost in set(range(30)) - set(kept):
            targets = [p for p in kept if p > lost][:3]
            for p in targets:
                weight[p] += 1 / len(targets)
                total[p] += np.array(values[row, lost], np.float64) / len(targets)
        for position, have in held(config, state, row).items():
            assert np.allclose(have, total[position] / weight[position], rtol=1e-5, atol=1e-6)


def test_the_gate_is_drawn_by_position():
    keys, values, queries = stream(60, rows=2, seed=5)
    config = cam.Config(budget=16, sink=1, recent=6, target_count=4, seed=3)
    plain = cam.Config(budget=16, sink=1, recent=6, merge="off")
    before, after = run(config, keys, values, queries, [16]), run(config, keys, values, queries, [16, 44])
    same = run(plain, keys, values, queries, [16, 44])
    assert mx.array_equal(after.slots.positions, same.slots.positions)
    assert veloxfn.tokens_kept(before).tolist() == [16, 16]
    uniform = np.array(draws.uniform(3, mx.array([0, 1], mx.uint32), mx.tile(mx.arange(60, dtype=mx.int32), (2, 1))))
    everything = run(h2o.Config(budget=60, sink=1, recent=6), keys, values, queries, [16, 44])
    opened = 0
    for row in range(2):
        kept = veloxfn.kept_positions(after)[row].tolist()
        mass = np.array(everything.mass[row], np.float64)
        touched = set()
        for lost in set(range(60)) - set(kept):
            targets = [p for p in kept if p > lost][:4]
            if uniform[row, lost] < min(1, mass[lost] / mass[targets].mean()):
                touched |= set(targets)
                opened += 1
        for position, have in held(config, after, row).items():
            assert np.array_equal(have, np.array(values[row, position])) == (position not in touched)
    assert 0 < opened < 88, "some losers are merged and some are dropped"


def test_merge_probability():
    mass, mean = mx.array([1.0, 3.0, 0.0, 2.0, 0.0, np.nan, 1.0]), mx.array([2.0, 2.0, 2.0, 0.0, 0.0, 1.0, np.nan])
    assert merge_probability(mass, mean).tolist() == [0.5, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    "settings", [{}, {"targets": "nearest", "merge": "similarity"}, {"targets": "nearest", "merge": "mean"}]
)
@pytest.mark.parametrize("blocks", [[100], [1] * 100, [30, 70]])
def test_lesson_4_the_gate_opens_on_ordinary_streams(settings, blocks):
    keys, values, queries = stream(100, rows=2, seed=6)
    config = cam.Config(budget=20, **settings)
    merged = run(config, keys, values, queries, blocks)
    off = run(cam.Config(budget=20, merge="off"), keys, values, queries, blocks)
    if config.targets == "window":
        assert mx.array_equal(merged.slots.positions, off.slots.positions)
    assert not np.allclose(cam.get_kv(config, merged)[1], cam.get_kv(config, off)[1], atol=1e-2)


@pytest.mark.parametrize("blocks", [[60], [1] * 60, [20, 40]])
def test_merge_off_is_h2o_bit_for_bit(blocks):
    keys, values, queries = stream(60, rows=2, groups=2)
    one = run(cam.Config(budget=16, merge="off"), keys, values, queries, blocks)
    other = run(h2o.Config(budget=16), keys, values, queries, blocks)
    for leaf, twin in zip([*one.slots, one.mass], [*other.slots, other.mass], strict=True):
        assert mx.array_equal(leaf, twin)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("settings", [{}, {"targets": "nearest", "merge": "similarity", "merge_keys": True}])
@pytest.mark.parametrize("blocks", [[40], [1] * 40])
def test_lesson_12_a_loser_that_is_not_finite_spoils_no_survivor(bad, settings, blocks):
    keys, values, queries = stream(40, seed=7)
    values = mx.where((mx.arange(40) == 5)[None, :, None], bad, values)
    config = cam.Config(budget=10, gate=False, **settings)
    state = run(config, keys, values, queries, blocks)
    for position, have in held(config, state).items():
        assert position == 5 or np.isfinite(have).all()


@pytest.mark.parametrize("gate", [True, False])
@pytest.mark.parametrize("blocks", [1, 8])
@pytest.mark.parametrize("settings", [{}, {"targets": "nearest", "merge": "mean"}])
def test_lesson_12_a_mass_that_is_not_a_number_stays_in_its_slot(settings, blocks, gate):
    keys, values, _ = stream(24, seed=9)
    config = cam.Config(budget=8, sink=1, recent=2, gate=gate, **settings)
    state = cam.init_state(config, 1, 4, 3, dtype=mx.float32)
    for start in range(0, 24, blocks):
        now = slice(start, start + blocks)
        state = cam.absorb(config, state, keys[:, now], values[:, now])
        weights = mx.where(state.slots.positions == 3, mx.nan, 1.0)
        state = cam.evict(config, state, attention=weights)
        held_mass = zip(state.slots.positions[0].tolist(), state.mass[0].tolist(), strict=True)
        assert all(np.isfinite(mass) for position, mass in held_mass if position not in (-1, 3))
    assert veloxfn.tokens_kept(state).tolist() == [8]
    assert 3 not in veloxfn.kept_positions(state)[0].tolist()


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_values_keep_their_dtype(dtype):
    keys, values, queries = (x.astype(dtype) for x in stream(40))
    for settings in ({}, {"targets": "nearest", "merge": "mean", "merge_keys": True}):
        state = run(cam.Config(budget=10, **settings), keys, values, queries)
        assert state.slots.values.dtype == state.slots.keys.dtype == dtype


def test_losers_of_a_long_block_are_merged_in_tiles(monkeypatch):
    keys, values, queries = stream(90, rows=2, seed=8)
    for settings in ({"target_count": 5}, {"targets": "nearest", "merge": "similarity", "merge_keys": True}):
        config = cam.Config(budget=12, gate=False, **settings)
        whole = run(config, keys, values, queries)
        with monkeypatch.context() as patch:
            patch.setattr("veloxfn.disposal._TILE_ELEMENTS", 2 * 12 * 7)
            tiled = run(config, keys, values, queries)
        for leaf, twin in zip([*whole.slots, whole.mass], [*tiled.slots, tiled.mass], strict=True):
            assert np.allclose(leaf, twin, rtol=1e-5, atol=1e-6)


def test_a_block_with_cadence_token_traces_one_step_of_a_full_cache(monkeypatch):
    made, make = [], cadence._step

    def counted(*arguments):
        made.append(arguments)
        return make(*arguments)

    monkeypatch.setattr(cadence, "_step", counted)
    config = cam.Config(budget=9, sink=2, cadence="token", seed=20_131)  # a trace of its own
    policy, block = cam.policy(config), mx.random.normal((2, 40, 8), key=mx.random.key(3))
    state = policy.update_batched(policy.init_state(2, 8, dtype=mx.float32), block, block, queries=block[:, None])
    assert len(made) == 2, "the first token's, and one for all that follow"
    alone = policy.init_state(2, 8, dtype=mx.float32)
    for t in range(40):
        part = block[:, t : t + 1]
        alone = policy.update_batched(alone, part, part, queries=part[:, None])
    for left, right in zip(cam.get_kv(config, state), cam.get_kv(config, alone), strict=True):
        assert mx.array_equal(left, right)
