"""Bad input: an error that names the value and the rule, and a state that is still good."""

import math

import mlx.core as mx
import pytest

import veloxfn
from veloxfn import h2o, knorm, streaming_llm

N, S, D, DV = 2, 3, 4, 5
METHODS = pytest.mark.parametrize("method", veloxfn.METHODS.values(), ids=veloxfn.METHODS)


def zeros(*shape, dtype=mx.float32):
    return mx.zeros(shape, dtype)


def evidence(method, count=S):
    return {"queries": zeros(N, 2, count, D)} if method is h2o else {}


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
