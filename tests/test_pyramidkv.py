"""PyramidKV: its layers, and one layer alone."""

import dataclasses

import mlx.core as mx
import pytest

import veloxfn
from veloxfn import budgets, h2o, knorm, pyramidkv, snapkv


def budgets_of(config):
    return tuple(layer.budget for layer in pyramidkv.layer_configs(config))


def test_the_papers_reading():
    config = pyramidkv.Config(layers=32, scorer=snapkv.Config(budget=128, window=8))
    assert config.beta == 20.0
    assert budgets_of(config) == budgets.pyramid(32, 128, beta=20.0, floor=8)
    assert {type(layer) for layer in pyramidkv.layer_configs(config)} == {snapkv.Config}
    assert {layer.window for layer in pyramidkv.layer_configs(config)} == {8}


def test_the_taper():
    config = pyramidkv.Config(layers=12, scorer=h2o.Config(budget=64, sink=4), taper=1.8)
    assert budgets_of(config) == budgets.pyramid(12, 64, taper=1.8, floor=5)
    assert [layer.recent_rows for layer in pyramidkv.layer_configs(config)] == [
        min(budget // 2, budget - 5) for budget in budgets_of(config)
    ]


def test_no_layer_gets_less_than_the_scorer_accepts():
    """Half of the mean is a fixed window: the last layers keep it, and one row more."""
    config = pyramidkv.Config(layers=6, scorer=h2o.Config(budget=20, sink=2, recent=10), taper=3.0)
    assert min(budgets_of(config)) == 13
    assert sum(budgets_of(config)) == 6 * 20
    tight = pyramidkv.Config(layers=8, scorer=snapkv.Config(budget=34, window=32))
    assert min(budgets_of(tight)) == 33
    assert sum(budgets_of(tight)) == 8 * 34


@pytest.mark.parametrize("shape", [{"beta": 1.0}, {"taper": 1.0}])
def test_flat_is_the_scorer(shape):
    scorer = h2o.Config(budget=24)
    config = pyramidkv.Config(layers=5, scorer=scorer, **shape)
    assert pyramidkv.layer_configs(config) == [scorer] * 5


def test_one_layer_alone_is_the_scorer_at_the_mean():
    scorer = knorm.Config(budget=6)
    config = pyramidkv.Config(layers=9, scorer=scorer)
    x = mx.random.normal((2, 30, 4), key=mx.random.key(0))
    states = [
        veloxfn.policy(each).update_batched(veloxfn.policy(each).init_state(2, 4, dtype=mx.float32), x, x)
        for each in (config, scorer)
    ]
    assert type(states[0]) is knorm.State
    assert mx.array_equal(states[0].slots.positions, states[1].slots.positions)
    assert mx.array_equal(pyramidkv.get_kv(config, states[0])[0], knorm.get_kv(scorer, states[1])[0])


def test_settings_without_a_scorer_are_those_of_snapkv():
    config = pyramidkv.Config(layers=4, budget=64, cadence="token")
    assert config.scorer == snapkv.Config(budget=64, cadence="token")
    assert (config.budget, config.sink, config.recent_rows, config.needs_queries) == (64, 0, 32, True)
    assert dataclasses.replace(config, layers=5).layers == 5
    assert hash(config) == hash(pyramidkv.Config(layers=4, scorer=snapkv.Config(budget=64, cadence="token")))


def test_a_scorer_may_be_anyones():
    """A module with the eight names is enough."""
    assert not pyramidkv.Config(layers=3, scorer=knorm.Config(budget=20)).needs_queries
