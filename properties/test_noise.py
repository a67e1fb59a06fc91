"""Noise: addressed by what it belongs to, distributed as it says; temperatures on schedule."""

import math

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from veloxfn import draws, keyformer
from veloxfn.testing import laws, normal_stream
from veloxfn.testing.checking import sample_streams
from veloxfn.testing.drive import live_positions, run
from veloxfn.testing.oracle import temperature
from veloxfn.testing.strategies import groupings, streams
from veloxfn.testing.streams import split

KINDS = [{"noise": "logit", "tau": 0.5}, {"noise": "additive", "tau": 2.0}]
KEYS = np.array([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.5], [0.5, 0.5], [0.0, -2.0], [2.0, 0.0]], dtype=np.float32)
QUERY = np.array([1.0, 0.75], dtype=np.float32)


@given(data=st.data())
def test_noise_ignores_grouping(data: st.DataObject) -> None:
    """Lesson 7: masses and draws of a block are those of its tokens one by one."""
    settings = data.draw(st.sampled_from([*KINDS, {"noise": "logit"}, {"noise": "none", "anneal_steps": 5}]))
    policy = keyformer.policy(keyformer.Config(budget=16, sink=0, anneal_from=2, **settings))
    stream = data.draw(streams(budget=5, min_tokens=1, max_tokens=16, padded=data.draw(st.booleans())))
    laws.law_mass_ignores_grouping_below_budget(policy, stream, data.draw(groupings(stream.tokens, budget=5)))


@pytest.mark.parametrize("settings", KINDS, ids=str)
@pytest.mark.parametrize("size", [4, 25, 100])
def test_noise_of_a_hundred_tokens_ignores_grouping(settings: dict, size: int) -> None:
    """Lesson 7: 1 x 100, 4 x 25 and 100 x 1 tokens give equal noise."""
    policy = keyformer.policy(keyformer.Config(budget=100, **settings))
    stream = normal_stream(0, tokens=100, groups=2)
    laws.law_mass_ignores_grouping_below_budget(policy, stream, split(100, size))


@pytest.mark.parametrize("settings", KINDS, ids=str)
@pytest.mark.parametrize("cadence", ["block", "token"])
def test_noise_differs_between_heads_and_layers(settings: dict, cadence: str) -> None:
    """Lesson 6."""
    config = keyformer.Config(budget=16, sink=1, recent=2, cadence=cadence, **settings)
    laws.law_noise_differs_between_streams(keyformer.policy(config))
    laws.law_seeds_and_streams_do_not_mix(config)


@pytest.mark.parametrize("settings", KINDS, ids=str)
def test_noise_does_not_depend_on_the_place_in_a_batch(settings: dict) -> None:
    """Lesson 6: row 0 alone, as the last of four, and among rows of other names."""
    policy = keyformer.policy(keyformer.Config(budget=8, sink=1, **settings))
    stream = normal_stream(1, rows=4, tokens=40, blocks=(11, 1, 28))
    expected = [row.tolist() for row in live_positions(run(policy, stream))]
    for order in ([3, 2, 1, 0], [2], [1, 1, 0, 3, 1]):
        found = [row.tolist() for row in live_positions(run(policy, stream.only(order)))]
        assert found == [expected[row] for row in order]


@pytest.mark.parametrize(
    "settings",
    [
        {"query_source": "key_proxy"},
        {"query_source": "key_proxy", "noise": "additive", "cadence": "token"},
        {"query_source": "key_proxy", "noise": "none", "tau": 0.5},
        {"shared_heads": 2, "cadence": "token"},
        {"shared_heads": 2, "noise": "additive", "seed": 2**64 - 1},
    ],
    ids=str,
)
def test_keyformer_in_rarer_settings_follows_the_oracle(settings: dict) -> None:
    for budget in (2, 5, 9):
        policy = keyformer.policy(keyformer.Config(budget=budget, sink=1, **settings))
        for stream in sample_streams(budget, policy.config.shared_heads):
            laws.law_follows_the_oracle(policy, stream)


def test_noise_ignores_global_randomness() -> None:
    config = keyformer.Config(budget=8, sink=1)
    laws.law_global_randomness_is_left_alone(keyformer.policy(config), normal_stream(2, tokens=30, blocks=(10, 20)))


def test_noisy_weights_average_to_softmax() -> None:
    laws.law_noisy_weights_average_to_softmax(KEYS, QUERY)
    laws.law_noisy_weights_average_to_softmax(KEYS[:2], 3 * QUERY)


def test_temperature_flattens() -> None:
    laws.law_temperature_flattens(KEYS, QUERY)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"tau_init": 0.5, "tau_end": 4.0, "anneal_steps": 10},
        {"tau_init": 3.0, "tau_end": 1.0, "anneal_steps": 8},
        {"tau_init": 3.0, "tau_end": 1.0, "anneal_steps": 0},
        {"tau_init": 2.0, "tau_end": 2.0, "anneal_steps": 7},
        {"tau": 1.25},
    ],
    ids=str,
)
def test_temperature_schedule(settings: dict) -> None:
    """Lesson 5: at 0, T/2, T and 2T, and in between."""
    config = keyformer.Config(**settings)
    steps = config.anneal_steps
    times = sorted({0, 1, steps // 2, steps, 2 * steps, 10**6})
    found = np.array(keyformer.temperature(config, mx.array(times)))
    assert found == pytest.approx([temperature(config, time) for time in times], rel=1e-6)
    if "tau" in settings or steps == 0 or config.tau_init == config.tau_end:
        assert len(set(found.tolist())) == 1
    else:
        ends = {0: config.tau_init, steps: config.tau_end, 2 * steps: config.tau_end}
        ends[steps // 2] = (config.tau_init + config.tau_end) / 2
        for time, tau in ends.items():
            assert found[times.index(time)] == pytest.approx(tau, rel=1e-6)


@pytest.mark.parametrize("noise", ["logit", "additive"])
def test_temperature_follows_its_schedule_in_use(noise: str) -> None:
    """Lesson 5: every decision at time 0, T/2, T and 2T is that of the constant temperature of that time."""
    steps, tokens = 8, 24
    shared = {"budget": tokens, "sink": 0, "recent": 0, "noise": noise}
    annealed = keyformer.Config(**shared, tau_init=0.25, tau_end=4.0, anneal_steps=steps)
    stream = normal_stream(3, rows=3, tokens=tokens, groups=2)
    for time in (0, steps // 2, steps, 2 * steps):
        constant = keyformer.Config(**shared, tau=temperature(annealed, time))
        kept = {}
        for name, config in (("annealed", annealed), ("constant", constant)):
            if noise == "logit":  # what the query of that time adds to the masses
                states = [run(keyformer.policy(config), stream.head(count)) for count in (time, time + 1)]
                before, after = (np.array(state.mass) for state in states)
                kept[name] = after - np.pad(before, ((0, 0), (0, after.shape[1] - before.shape[1])))
            else:  # what a smaller budget, from that time on, lets go of first
                state = run(keyformer.policy(config), stream.head(time))
                small = keyformer.policy(keyformer.Config(**(vars(config) | {"budget": max(1, time // 2)})))
                block = stream.block(time, time + 1)
                after = small.update_batched(state, block.keys, block.values, queries=block.queries)
                kept[name] = [row.tolist() for row in live_positions(after)]
        if noise == "logit":
            assert np.allclose(kept["annealed"], kept["constant"], atol=2e-6), f"at time {time}"
        else:
            assert kept["annealed"] == kept["constant"], f"at time {time}"


def kolmogorov(sample: np.ndarray, distribution) -> float:
    """Largest distance between the sample's distribution function and the given one."""
    ordered = np.sort(sample.ravel().astype(np.float64))
    steps = np.arange(len(ordered) + 1) / len(ordered)
    exact = distribution(ordered)
    return float(max(np.abs(exact - steps[1:]).max(), np.abs(exact - steps[:-1]).max()))


DRAWN = (mx.arange(64, dtype=mx.uint32), mx.broadcast_to(mx.arange(2048, dtype=mx.int32), (64, 2048)))


@pytest.mark.parametrize("seed", [0, 1, 2**63])
def test_gumbel_draws_are_gumbel(seed: int) -> None:
    """Mean, variance and distribution function, over 64 streams of 2048 positions, to five standard errors."""
    sample = np.array(draws.gumbel(seed, *DRAWN)).astype(np.float64)
    count = sample.size
    assert np.isfinite(sample).all()
    assert abs(sample.mean() - np.euler_gamma) < 5 * math.sqrt(math.pi**2 / 6 / count)
    assert abs(sample.var() - math.pi**2 / 6) < 5 * math.sqrt(4.4 * (math.pi**2 / 6) ** 2 / count)
    assert kolmogorov(sample, lambda x: np.exp(-np.exp(-x))) < 2 / math.sqrt(count)


def test_logit_draws_are_gumbel() -> None:
    """Addressed by stream, head, query and slot."""
    heads, times, places = mx.arange(3)[:, None, None], mx.arange(300)[:, None], mx.arange(300, dtype=mx.int32)
    name = draws.names(7, mx.array(65537, mx.uint32), heads, times)
    sample = np.array(draws.hashed_gumbel(name, places)).astype(np.float64)
    assert kolmogorov(sample, lambda x: np.exp(-np.exp(-x))) < 2 / math.sqrt(sample.size)
    unit = np.exp(-np.exp(-sample))
    for axis in range(3):
        one, other = np.split(unit, [1], axis=axis) if axis == 0 else (None, None)
        pairs = (one, other[:1]) if axis == 0 else (np.delete(unit, 0, axis), np.delete(unit, -1, axis))
        assert_uniform_in_pairs(*pairs)


def assert_uniform_in_pairs(one: np.ndarray, other: np.ndarray, cells: int = 8) -> None:
    """A chi-squared test over cells x cells boxes, at five standard deviations."""
    table, _, _ = np.histogram2d(one.ravel(), other.ravel(), bins=cells, range=[[0, 1], [0, 1]])
    expected = one.size / cells**2
    assert expected > 20
    chi, freedom = ((table - expected) ** 2 / expected).sum(), cells**2 - 1
    assert chi < freedom + 5 * math.sqrt(2 * freedom), f"neighbouring draws are not independent: chi-squared {chi:.1f}"


def test_uniform_draws_are_uniform_alone_and_in_pairs() -> None:
    """Neighbours in position, stream and seed."""
    here = np.array(draws.uniform(0, *DRAWN))
    assert here.min() > 0
    assert here.max() < 1
    assert kolmogorov(here, lambda x: x) < 2 / math.sqrt(here.size)
    next_seed = np.array(draws.uniform(1, *DRAWN))
    for one, other in ((here[:, 1:], here[:, :-1]), (here[1:], here[:-1]), (here, next_seed)):
        assert_uniform_in_pairs(one, other)
