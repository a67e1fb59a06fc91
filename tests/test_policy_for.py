"""Methods by name."""

import pickle

import pytest

import veloxfn
from veloxfn import Contiguous, Rope, cam, h2o, keyformer, pyramidkv, snapkv


@pytest.mark.parametrize("name", veloxfn.METHODS)
def test_every_method_has_its_defaults_and_its_budget(name):
    assert veloxfn.policy_for(name).config == veloxfn.METHODS[name].Config()
    assert veloxfn.policy_for(name, budget=64).config == veloxfn.METHODS[name].Config(budget=64)


@pytest.mark.parametrize(
    ("name", "settings", "config"),
    [
        ("h2o", {"budget": 64, "age_normalised": True}, h2o.Config(budget=64, age_normalised=True)),
        ("h2o", {"placement": Contiguous(Rope(8))}, h2o.Config(placement=Contiguous(Rope(8)))),
        (
            "keyformer",
            {"noise": "additive", "tau": 6.0, "seed": 7},
            keyformer.Config(noise="additive", tau=6.0, seed=7),
        ),
        ("cam", {"targets": "nearest", "merge": "mean"}, cam.Config(targets="nearest", merge="mean")),
        (
            "pyramidkv",
            {"budget": 64, "beta": 5.0, "window": 16},
            pyramidkv.Config(beta=5.0, scorer=snapkv.Config(budget=64, window=16)),
        ),
        (
            "pyramidkv",
            {"budget": 64, "taper": 1.5, "recent": 8},
            pyramidkv.Config(taper=1.5, scorer=h2o.Config(budget=64, recent=8)),
        ),
        (
            "pyramidkv",
            {"scorer": "h2o", "layers": 9, "sink": 2, "cadence": "token"},
            pyramidkv.Config(layers=9, scorer=h2o.Config(sink=2, cadence="token")),
        ),
    ],
)
def test_settings_go_to_the_config_or_to_its_scorer(name, settings, config):
    policy = veloxfn.policy_for(name, **settings)
    assert policy.config == config
    assert policy._fields == veloxfn.policy(config)._fields


@pytest.mark.parametrize(
    ("name", "settings", "error", "message"),
    [
        ("lru", {}, ValueError, "name must be one of 'h2o', 'keyformer', .*; got 'lru'"),
        (7, {}, TypeError, r"name must be a str, got 7 \(int\)"),
        ("h2o", {"colour": 1}, ValueError, "colour: h2o has no such setting; it has budget, .*, query_source"),
        ("streaming_llm", {"recent": 3}, ValueError, "recent: streaming_llm has no such setting; it has budget, .*"),
        ("pyramidkv", {"scorer": "h2o", "window": 3}, ValueError, "window: h2o has no such setting"),
        ("pyramidkv", {"scorer": "lru"}, ValueError, "scorer must be one of 'h2o', .*; got 'lru'"),
        ("pyramidkv", {"scorer": h2o.Config()}, TypeError, r"scorer must be a str, got Config\(budget=512"),
        ("pyramidkv", {"scorer": "pyramidkv"}, ValueError, "scorer must rank by itself"),
        ("pyramidkv", {"beta": 0.5}, ValueError, r"beta must be a finite number in \[1.0, inf\], got 0.5"),
        ("h2o", {"scorer": "tova"}, ValueError, "scorer: h2o ranks by itself, got 'tova'"),
        ("h2o", {"budget": 3}, ValueError, "budget=3"),
        ("h2o", {"budget": "many"}, TypeError, "budget must be an int, got 'many'"),
        ("knorm", {"keep": "middle"}, ValueError, "keep must be one of 'low', 'high'; got 'middle'"),
    ],
)
def test_what_is_wrong_is_named_with_what_is_allowed(name, settings, error, message):
    with pytest.raises(error, match=message):
        veloxfn.policy_for(name, **settings)


def test_an_unknown_setting_can_be_told_from_a_bad_value():
    with pytest.raises(veloxfn.SettingError) as caught:
        veloxfn.policy_for("tova", noise="none")
    assert caught.value.setting == "noise"
    assert caught.value.reason.startswith("tova has no such setting; it has budget")
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
