"""One policy per layer: skipped layers, budgets of each, pyramids, and those by what attention changes."""

import mlx.core as mx
import pytest

import veloxfn
from veloxfn import budgets, h2o, knorm, pyramidkv, snapkv, streaming_llm
from veloxfn_mlx_adapter import make_prompt_cache
from veloxfn_mlx_adapter.cosines import layer_cosines
from veloxfn_mlx_adapter.policies import layer_policies


def rows_of(policies):
    return [None if policy is None else policy.config.budget for policy in policies]


@pytest.fixture
def model(tiny):
    return tiny(num_hidden_layers=6)


def test_a_name_with_settings_or_a_policy(model):
    policy = veloxfn.policy(knorm.Config(budget=16, keep="high"))
    for policies in (layer_policies(model, "knorm", budget=16, keep="high"), layer_policies(model, policy)):
        assert [each.config for each in policies] == [policy.config] * 6


def test_skipped_layers_keep_the_models_own_cache(model, tokens, feed):
    policies = layer_policies(model, "knorm", budget=16, skip=(0, 1))
    assert rows_of(policies) == [None, None, 16, 16, 16, 16]
    caches = make_prompt_cache(model, policies)
    feed(model, caches, tokens(40), 30)
    assert [type(cache).__name__ for cache in caches] == ["KVCache"] * 2 + ["EvictingCache"] * 4
    assert [cache.offset for cache in caches] == [40] * 6


def test_budgets_of_each_layer_that_evicts(model, tokens, feed):
    policies = layer_policies(model, "h2o", budgets=[32, 24, 16, 8], skip=[1, 5])
    assert rows_of(policies) == [32, None, 24, 16, 8, None]
    caches = make_prompt_cache(model, policies)
    feed(model, caches, tokens(50), 40)
    assert [caches[i].tokens_kept for i in (0, 2, 3, 4)] == [32, 24, 16, 8]


def test_only_layers_of_full_attention_evict(tiny):
    assert rows_of(layer_policies(tiny("gemma3_text"), "knorm", budgets=[12, 20])) == [None, 12, None, 20]
    assert rows_of(layer_policies(tiny("gemma3_text"), "knorm", budget=12, skip=[0, 1])) == [None, None, None, 12]


def test_a_pyramid_is_spread_over_the_layers_that_evict(model):
    scorer = snapkv.Config(budget=40, window=8)
    want = [layer.budget for layer in pyramidkv.layer_configs(pyramidkv.Config(layers=4, scorer=scorer, beta=4.0))]
    for policies in (
        layer_policies(model, "pyramidkv", budget=40, window=8, beta=4.0, skip=(0, 1)),
        layer_policies(model, veloxfn.policy(pyramidkv.Config(layers=6, scorer=scorer, beta=4.0)), skip=(0, 1)),
    ):
        assert rows_of(policies) == [None, None, *want]
        assert {type(policy.config) for policy in policies[2:]} == {snapkv.Config}
    assert sum(want) == 4 * 40
    tapered = layer_policies(model, "pyramidkv", scorer="h2o", budget=40, taper=1.5, age_normalised=True)
    assert rows_of(tapered) == list(budgets.pyramid(6, 40, taper=1.5, floor=5))
    assert all(policy.config.age_normalised for policy in tapered)


def test_budgets_by_what_attention_changes(model, tokens):
    prompt = tokens(60)
    cosines = layer_cosines(model, prompt)
    want = list(budgets.squeeze(cosines.values(), 32, 0.25, floor=5))
    assert rows_of(layer_policies(model, "h2o", budget=32, squeeze=cosines, p=0.25)) == want
    assert rows_of(layer_policies(model, "h2o", budget=32, squeeze=prompt, p=0.25)) == want
    assert rows_of(layer_policies(model, "h2o", budget=32, squeeze=prompt[0].tolist(), p=0.25)) == want
    assert sum(want) == 6 * 32
    assert len(set(want)) > 1
    skipped = rows_of(layer_policies(model, "h2o", budget=32, squeeze=cosines, p=0.25, skip=[0]))
    assert skipped == [None, *budgets.squeeze([cosines[i] for i in range(1, 6)], 32, 0.25, floor=5)]


def test_a_squeezed_layer_keeps_what_the_windows_need(model):
    cosines = dict(enumerate([0.1, 0.2, 0.3, 0.9, 0.9, 0.9]))
    rows = rows_of(layer_policies(model, "snapkv", budget=48, window=30, squeeze=cosines, p=0.1))
    assert rows == [65, 65, 65, 31, 31, 31]


def test_equal_cosines_are_the_policy_itself(model):
    policy = veloxfn.policy(streaming_llm.Config(budget=16))
    policies = layer_policies(model, policy, squeeze=dict.fromkeys(range(6), 0.5), p=0.3)
    assert [each.config for each in policies] == [policy.config] * 6


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"policy": "lru"}, ValueError, "name must be one of 'h2o', .*; got 'lru'"),
        ({"policy": "knorm", "colour": 1}, ValueError, "colour: knorm has no such setting"),
        ({"policy": knorm.Config()}, TypeError, r"policy must be .* got Config; bind it: veloxfn.policy\(config\)"),
        ({"policy": veloxfn.policy(knorm.Config()), "keep": "low"}, ValueError, "settings go with the name.*got keep"),
        ({"skip": (0, 6)}, ValueError, "skip must be <= 5, got 6"),
        ({"skip": (-1,)}, ValueError, "skip must be >= 0, got -1"),
        ({"skip": 1}, TypeError, "skip must be a sequence of layers, got 1"),
        ({"skip": range(6)}, ValueError, "no layer is left to evict from: 6 layers have full attention, skip="),
        ({"budgets": [16] * 5}, ValueError, r"budgets must have one entry per layer that evicts, 6 of 0 .. 5, got 5"),
        ({"budgets": [16] * 6, "skip": (0, 1)}, ValueError, "that evicts, 4 of 2 .. 5, got 6"),
        ({"budgets": [16, 16, 3, 16, 16, 16]}, ValueError, "budget of layer 2: .*sink=4 .* budget=3"),
        ({"budgets": [16, 16, 3.5, 16, 16, 16]}, TypeError, "budget must be an int, got 3.5"),
        ({"budgets": 16}, TypeError, "budgets must be a sequence of ints, got 16"),
        ({"budgets": [16] * 6, "squeeze": {}, "p": 0.3}, ValueError, "in one way, got budgets and squeeze"),
        ({"policy": "pyramidkv", "budgets": [64] * 6}, ValueError, "in one way, got budgets and pyramidkv"),
        ({"p": 0.3}, ValueError, "squeeze and p go together, got p alone"),
        ({"squeeze": {0: 0.5}}, ValueError, "squeeze and p go together, got squeeze alone"),
        ({"squeeze": {0: 0.5, 3: 0.1}, "p": 0.3}, ValueError, r"every layer that evicts, \[1, 2, 4, 5\] are missing"),
        ({"squeeze": dict.fromkeys(range(6), 1.5), "p": 0.3}, ValueError, r"cosines\[0\] must be .* got 1.5"),
        ({"squeeze": [1, 2, 3], "p": 1.5}, ValueError, r"p must be a finite number in \[0.0, 1.0\], got 1.5"),
    ],
)
def test_what_is_wrong_is_said(model, arguments, error, message):
    with pytest.raises(error, match=message):
        layer_policies(model, arguments.pop("policy", "knorm"), **arguments)


def test_layers_that_share_a_budget_share_a_policy(model):
    """So that they share one compiled step."""
    policies = layer_policies(model, "h2o", budgets=[24, 16, 16, 16, 16, 16])
    assert policies[1] is policies[5]
    assert policies[0] is not policies[1]
    assert isinstance(policies[0].config, h2o.Config)


def test_logits_of_a_prompt_are_the_models_whatever_the_layers_keep(model, tokens, feed, stock):
    prompt = tokens(40)
    caches = make_prompt_cache(model, layer_policies(model, "h2o", budget=16, squeeze=prompt, p=0.4, skip=[0]))
    assert mx.allclose(feed(model, caches, prompt, 40), feed(model, stock(model), prompt, 40), atol=1e-5)
