"""Bad input: an error that names the value and the rule, and a state that is still good."""

import math

import mlx.core as mx
import pytest

import veloxfn
from veloxfn import Retention, Rope, budgets, cam, h2o, keyformer, knorm, pyramidkv, snapkv, streaming_llm, tova

N, S, D, DV = 2, 3, 4, 5
METHODS = pytest.mark.parametrize("method", veloxfn.METHODS.values(), ids=veloxfn.METHODS)


def zeros(*shape, dtype=mx.float32):
    return mx.zeros(shape, dtype)


def evidence(method, count=S):
    return {"queries": zeros(N, 2, count, D)} if method.Config(budget=8).needs_queries else {}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: h2o.Config(budget=0), "budget must be >= 1, got 0"),
        (lambda: h2o.Config(budget=-3), "budget must be >= 1, got -3"),
        (lambda: h2o.Config(budget=2**40), r"budget must be <= 1073741822, got 1099511627776"),
        (lambda: h2o.Config(sink=-1), "sink must be >= 0, got -1"),
        (lambda: h2o.Config(recent=-2), "recent must be >= 0, got -2"),
        (lambda: h2o.Config(budget=8, sink=4, recent=4), r"sink=4 \+ recent=4 = 8, budget=8"),
        (lambda: h2o.Config(budget=4), r"sink=4 \+ recent=0 = 4, budget=4"),
        (lambda: h2o.Config(decay=1.5), r"decay must be a finite number in \[0.0, 1.0\], got 1.5"),
        (lambda: h2o.Config(decay=-0.1), "decay .* got -0.1"),
        (lambda: h2o.Config(decay=math.nan), "decay .* got nan"),
        (lambda: h2o.Config(age_normalised=True, decay=0.5), "age_normalised=True needs decay=1, got decay=0.5"),
        (lambda: h2o.Config(query_source="keys"), "'true', 'key_proxy'; got 'keys'"),
        (lambda: h2o.Config(cadence="step"), "'block', 'token'; got 'step'"),
        (lambda: h2o.Config(shared_heads=0), "shared_heads must be >= 1, got 0"),
        (lambda: knorm.Config(keep="mid"), "'low', 'high'; got 'mid'"),
        (lambda: knorm.Config(budget=8, recent=4), r"sink=4 \+ recent=4 = 8, budget=8"),
        (lambda: streaming_llm.Config(budget=4, sink=4), r"sink=4 \+ recent=0 = 4, budget=4"),
        (lambda: keyformer.Config(noise="gumbel"), "'logit', 'additive', 'none'; got 'gumbel'"),
        (lambda: keyformer.Config(tau=-1.0), r"tau must be a finite number in \[0.0, inf\], got -1.0"),
        (lambda: keyformer.Config(tau_end=math.nan), "tau_end must be a finite number .* got nan"),
        (lambda: keyformer.Config(tau=0.0), "tau must be >= 1e-06 with noise='logit', which divides by it, got 0"),
        (lambda: keyformer.Config(tau_init=0.0, noise="none"), "tau_init must be >= 1e-06 with noise='none'"),
        (lambda: keyformer.Config(tau=1.0, tau_end=3.0), "tau=1.0, tau_init=1.0, tau_end=3.0"),
        (lambda: keyformer.Config(anneal_steps=-1), "anneal_steps must be >= 0, got -1"),
        (lambda: keyformer.Config(anneal_from=-5), "anneal_from must be >= 0, got -5"),
        (lambda: keyformer.Config(seed=2**64), "seed must be <= 18446744073709551615, got 18446744073709551616"),
        (lambda: keyformer.Config(budget=8, recent=4), r"sink=4 \+ recent=4 = 8, budget=8"),
        (lambda: cam.Config(targets="next"), "'window', 'nearest'; got 'next'"),
        (lambda: cam.Config(merge="add"), "'sum', 'similarity', 'mean', 'off'; got 'add'"),
        (lambda: cam.Config(target_count=0), "target_count must be >= 1, got 0"),
        (lambda: cam.Config(normalise=False), "normalise=False .* needs cadence='token', got cadence='block'"),
        (lambda: cam.Config(normalise=False, merge="mean"), "normalise=False only adds, .* got merge='mean'"),
        (lambda: cam.Config(decay=2.0), r"decay must be a finite number in \[0.0, 1.0\], got 2.0"),
        (lambda: cam.Config(seed=-1), "seed must be >= 0, got -1"),
        (lambda: snapkv.Config(budget=16, window=16), r"sink=0 \+ window=16 = 16, budget=16"),
        (lambda: snapkv.Config(window=0), "window must be >= 1, got 0"),
        (lambda: snapkv.Config(kernel=4), "kernel must be odd, so that it has a middle, got 4"),
        (lambda: snapkv.Config(pooling="min"), "'mean', 'max'; got 'min'"),
        (lambda: tova.Config(budget=4, recent=4), r"sink=0 \+ recent=4 = 4, budget=4"),
        (lambda: tova.Config(recent=-1), "recent must be >= 0, got -1"),
        (lambda: pyramidkv.Config(scorer=pyramidkv.Config(layers=4)), "scorer must rank by itself, got Config"),
        (lambda: keyformer.Config(tau=1e-9), "tau must be >= 1e-06 with noise='logit', which divides by it, got 1e-09"),
        (lambda: keyformer.Config(tau=10**400), r"tau must be a finite number in \[0.0, inf\], got 1000"),
        (lambda: h2o.Config(decay=10**400), "decay must be a finite number .* got 1000"),
        (lambda: Rope(4, freqs=(1e-50, 1.0)), r"freqs\[0\] must be a finite number in \[1e-30, 1e\+30\], got 1e-50"),
        (lambda: Rope(4, base=10**400), "base must be a finite number .* got 1000"),
        (lambda: Rope(4, scale=1e300), r"scale must be a finite number in \[1e-30, 1e\+30\], got 1e\+300"),
        (lambda: pyramidkv.Config(layers=0), "layers must be >= 1, got 0"),
        (lambda: pyramidkv.Config(beta=0.5), r"beta must be a finite number in \[1.0, inf\], got 0.5"),
        (lambda: pyramidkv.Config(beta=20.0, taper=2.0), "exactly one of beta and taper, got beta=20.0, taper=2.0"),
        (
            lambda: pyramidkv.Config(budget=64, scorer=snapkv.Config(budget=128)),
            "budget is the scorer's, 128; got .*64",
        ),
        (lambda: budgets.pyramid(4, 8, beta=2.0, floor=9), "mean must be >= floor, got mean=8, floor=9"),
        (lambda: budgets.pyramid(4, 8, floor=2), "exactly one of beta and taper, got beta=None, taper=None"),
        (lambda: Rope(dims=7), "dims must be even, got 7"),
    ],
)
def test_lesson_13_nonsense_settings_name_the_value_and_the_rule(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: h2o.Config(budget=8.0), "budget must be an int, got 8.0"),
        (lambda: h2o.Config(budget=True), "budget must be an int, got True"),
        (lambda: h2o.Config(recent="4"), "recent must be an int, got '4'"),
        (lambda: h2o.Config(decay="1"), "decay must be a number, got '1'"),
        (lambda: h2o.Config(age_normalised=1), "age_normalised must be a bool, got 1"),
        (lambda: keyformer.Config(seed=1.5), "seed must be an int, got 1.5"),
        (lambda: cam.Config(gate="yes"), "gate must be a bool, got 'yes'"),
        (lambda: pyramidkv.Config(scorer="h2o"), "scorer must be Retention, got 'h2o'"),
        (lambda: pyramidkv.Config(scorer=Retention()), "Retention is the Config of no method module"),
        (lambda: h2o.Config(placement="absolute"), "placement must be Absolute or Contiguous, got 'absolute'"),
    ],
)
def test_settings_of_another_type(make, message):
    with pytest.raises(TypeError, match=message):
        make()


def test_lesson_11_the_tightest_window_works():
    config = h2o.Config(budget=5, sink=2, recent=2)
    x = mx.random.normal((1, 20, 4), key=mx.random.key(0))
    state = h2o.update_batched(config, h2o.init_state(config, 1, 4, dtype=mx.float32), x, x, queries=x[:, None])
    assert {0, 1, 18, 19} < set(veloxfn.kept_positions(state)[0].tolist())


@METHODS
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"rows": 0}, ValueError, "rows must be >= 1, got 0"),
        ({"key_dim": 0}, ValueError, "key_dim must be >= 1, got 0"),
        ({"value_dim": -1}, ValueError, "value_dim must be >= 0, got -1"),
        ({"dtype": mx.int32}, TypeError, "dtype must be float32, float16 or bfloat16, got .*int32"),
        ({"streams": zeros(3).astype(mx.uint32)}, ValueError, r"streams must be \[N\] = \[2\], got \[3\]"),
        ({"streams": zeros(2)}, TypeError, "streams must be integers, got .*float32"),
    ],
)
def test_init_state(method, arguments, error, message):
    with pytest.raises(error, match=message):
        method.init_state(method.Config(budget=8), **{"rows": N, "key_dim": D} | arguments)


@METHODS
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"keys": zeros(N, D)}, ValueError, r"keys must be \[N, S, D\] = \[2, S, 4\], got \[2, 4\]"),
        ({"keys": zeros(3, S, D)}, ValueError, r"keys must be \[N, S, D\] = \[2, S, 4\], got \[3, 3, 4\]"),
        ({"keys": zeros(N, S, 8)}, ValueError, r"keys must be \[N, S, D\] = \[2, S, 4\], got \[2, 3, 8\]"),
        ({"values": zeros(N, S, D)}, ValueError, r"values must be \[N, S, Dv\] = \[2, 3, 5\], got \[2, 3, 4\]"),
        ({"values": zeros(N, 1, DV)}, ValueError, r"values must be \[N, S, Dv\] = \[2, 3, 5\], got \[2, 1, 5\]"),
        ({"keys": zeros(N, S, D, dtype=mx.float16)}, TypeError, "keys are .*float16, but the state holds .*float32"),
        ({"values": zeros(N, S, DV, dtype=mx.bfloat16)}, TypeError, "values are .*bfloat16, but the state .*float32"),
        ({"valid": mx.ones((N, 1), mx.bool_)}, ValueError, r"valid must be \[N, S\] = \[2, 3\], got \[2, 1\]"),
        ({"valid": mx.ones((N, S))}, TypeError, "valid must be bool, got .*float32"),
        ({"keys": [[0.0]]}, TypeError, r"keys must be an mx.array \[N, S, D\], got list"),
    ],
)
def test_bad_arrivals_leave_the_state_as_it_was(method, arguments, error, message):
    policy = method.policy(method.Config(budget=8))
    good = {"keys": zeros(N, S, D) + 1, "values": zeros(N, S, DV) + 2}
    state = policy.update_batched(policy.init_state(N, D, DV, dtype=mx.float32), **good, **evidence(method))
    before = [mx.array(leaf) for leaf in [*state.slots, *state[1:]]]
    with pytest.raises(error, match=message):
        policy.update_batched(state, **good | arguments, **evidence(method))
    for leaf, old in zip([*state.slots, *state[1:]], before, strict=True):
        assert mx.array_equal(leaf, old)
    state = policy.update_batched(state, **good, **evidence(method))
    assert state.slots.seen.tolist() == [2 * S, 2 * S]


@METHODS
def test_a_second_absorb_before_evict(method):
    policy = method.policy(method.Config(budget=8))
    state = policy.absorb(policy.init_state(N, D, dtype=mx.float32), zeros(N, S, D), zeros(N, S, D))
    with pytest.raises(ValueError, match="evict before the next absorb: a block of 3 tokens awaits eviction"):
        policy.absorb(state, zeros(N, S, D), zeros(N, S, D))


@pytest.mark.parametrize("name", ["queries", "attention"])
@pytest.mark.parametrize("method", [knorm, streaming_llm])
def test_evidence_for_a_method_that_takes_none(method, name):
    policy = method.policy(method.Config(budget=8))
    state = policy.absorb(policy.init_state(N, D, dtype=mx.float32), zeros(N, S, D), zeros(N, S, D))
    with pytest.raises(ValueError, match=f"ranks without attention: {name} must be None"):
        policy.evict(state, **{name: zeros(N, 1, S, D) if name == "queries" else zeros(N, S)})


@pytest.mark.parametrize(
    ("settings", "given", "error", "message"),
    [
        ({}, {}, ValueError, r"pass queries \[N, G, S, D\] or attention \[N, n\] of the block, got neither"),
        ({}, {"queries": zeros(N, 1, S, D), "attention": zeros(N, S)}, ValueError, "got both"),
        ({}, {"queries": zeros(N, S, D)}, ValueError, r"\[N, G, S, D\] = \[2, G, 3, 4\], got \[2, 3, 4\]"),
        ({}, {"queries": zeros(N, 1, 1, D)}, ValueError, r"= \[2, G, 3, 4\], got \[2, 1, 1, 4\]"),
        ({}, {"queries": zeros(N, 2, S, 8)}, ValueError, r"= \[2, G, 3, 4\], got \[2, 2, 3, 8\]"),
        ({}, {"queries": zeros(3, 2, S, D)}, ValueError, r"= \[2, G, 3, 4\], got \[3, 2, 3, 4\]"),
        ({}, {"queries": zeros(N, 0, S, D)}, ValueError, "at least one head per row, got G = 0"),
        ({}, {"queries": zeros(N, 1, S, D, dtype=mx.int32)}, TypeError, "dtype of queries .* got .*int32"),
        ({}, {"attention": zeros(N, 7)}, ValueError, r"attention must be \[N, n\] = \[2, 3\], got \[2, 7\]"),
        ({"decay": 0.5}, {"attention": zeros(N, S)}, ValueError, "S = 3 > 1 .* got decay=0.5"),
        ({"cadence": "token"}, {"attention": zeros(N, S)}, ValueError, "S = 3 > 1 .* cadence='token'"),
        ({"query_source": "key_proxy"}, {"queries": zeros(N, 1, S, D)}, ValueError, "key_proxy.* must be None"),
        ({"query_source": "key_proxy"}, {"attention": zeros(N, S)}, ValueError, "key_proxy.* must be None"),
    ],
)
def test_h2o_evidence(settings, given, error, message):
    policy = h2o.policy(h2o.Config(budget=8, **settings))
    state = policy.absorb(policy.init_state(N, D, dtype=mx.float32), zeros(N, S, D), zeros(N, S, D))
    with pytest.raises(error, match=message):
        policy.evict(state, **given)
    assert state.slots.arrived.shape == (N, S), "the block still awaits eviction"


@pytest.mark.parametrize(
    ("config", "given", "message"),
    [
        (tova.Config(budget=8), {}, r"tova .* queries \[N, G, S, D\] of the block, got neither"),
        (
            tova.Config(budget=8),
            {"attention": zeros(N, S)},
            "only the last query counts, and attention= sums over S = 3",
        ),
        (snapkv.Config(budget=8), {}, r"snapkv .* queries \[N, G, S, D\] of the block, got neither"),
        (snapkv.Config(budget=8), {"attention": zeros(N, S)}, "the window needs each query by itself"),
        (pyramidkv.Config(budget=8), {"attention": zeros(N, S)}, "the window needs each query by itself"),
        (keyformer.Config(budget=8), {"attention": zeros(N, S)}, "noise='logit' changes the logits of each query"),
        (keyformer.Config(budget=8, noise="none"), {"attention": zeros(N, S)}, "noise='none' changes the logits"),
        (keyformer.Config(budget=8, noise="additive", cadence="token"), {"attention": zeros(N, S)}, "S = 3 > 1"),
        (keyformer.Config(budget=8, noise="additive"), {}, r"keyformer .* or attention \[N, n\] .* got neither"),
        (keyformer.Config(budget=8, query_source="key_proxy"), {"attention": zeros(N, S)}, "key_proxy.* must be None"),
        (cam.Config(budget=8), {}, r"cam .* or attention \[N, n\] of the block, got neither"),
        (cam.Config(budget=8, decay=0.5), {"attention": zeros(N, S)}, "cam .* S = 3 > 1 .* got decay=0.5"),
    ],
)
def test_evidence_of_the_other_methods(config, given, message):
    policy = veloxfn.policy(config)
    state = policy.absorb(policy.init_state(N, D, dtype=mx.float32), zeros(N, S, D), zeros(N, S, D))
    with pytest.raises(ValueError, match=message):
        policy.evict(state, **given)
    assert state.slots.arrived.shape == (N, S), "the block still awaits eviction"
