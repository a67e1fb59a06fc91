"""A block of one-token steps in one launch: against its reference, against the steps themselves, against float64."""

import dataclasses
import importlib
import math

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from veloxfn import cadence, draws, h2o, kept_positions, keyformer, knorm, ops, tova
from veloxfn.ops import Temper, launch
from veloxfn.ops.fold_tokens import Noise, fits, fold_tokens
from veloxfn.placement import Contiguous, Rope
from veloxfn.testing import emulation
from veloxfn.testing.strategies import streams
from veloxfn.testing.streams import Stream, fingerprint, normal_stream, uniform_stream

MODULE = importlib.import_module("veloxfn.ops.fold_tokens")
# Of the tests that Hypothesis draws for, which share no fixture between examples.
BACKEND = "cuda" if mx.cuda.is_available() else "metal" if mx.metal.is_available() else "host"
DTYPES = [mx.float32, mx.float16, mx.bfloat16]


def case(rows, groups, count, budget, length, dim, value_dim=3, dtype=mx.float32, seed=0, padded=False):
    """A block behind `length` slots, one of them free where all have been filled.

    Keys and queries are grid-valued where the products stay exact, which they do where sqrt(D) is a power of two.
    """
    draw = np.random.default_rng(seed)

    def drawn(*shape):
        exact = math.log2(dim) % 2 == 0
        numbers = draw.integers(-8, 9, shape) / 4 if exact else draw.standard_normal(shape)
        return mx.array(numbers.astype(np.float32)).astype(dtype)

    positions = np.stack([draw.permutation(length) for _ in range(rows)]).astype(np.int32).reshape(rows, length)
    if length == budget + 1:
        positions[np.arange(rows), draw.integers(0, length, rows)] = -1
    arrays = {
        "keys": drawn(rows, budget + 1, dim),
        "values": drawn(rows, budget + 1, value_dim),
        "positions": mx.array(positions),
        "seen": mx.full((rows,), length, mx.int32),
        "fresh_keys": drawn(rows, count, dim),
        "fresh_values": mx.array(fingerprint(rows, count, 3 + value_dim)[..., :value_dim]).astype(dtype),
        "queries": drawn(rows, groups, count, dim) * 0.5,
    }
    masses = mx.array(draw.random((rows, length)).astype(np.float32))
    valid = mx.array(draw.random((rows, count)) < 0.6) if padded else None
    return arrays, masses, {"budget": budget, "sink": min(1, budget - 1), "recent": (budget - 1) // 3, "valid": valid}


def rule(name, masses, rows, groups, count):
    """Arguments of a method's rule."""
    tau = mx.linspace(0.5, 2.0, rows * count).reshape(rows, count)
    rows_of = mx.arange(rows, dtype=mx.uint32)
    names = draws.names(3, rows_of[:, None, None], mx.arange(groups)[:, None], mx.arange(count))
    length = masses.shape[1]  # CUDA crashes on a compiled function of empty arrays
    kept = draws.gumbel(1, rows_of, mx.arange(length)[None]) if length else masses
    drawn = draws.gumbel(2, rows_of, mx.arange(count)[None])
    return {
        "h2o": {"mass": masses},
        "h2o-fading": {"mass": masses, "decay": 0.9},
        "h2o-observed": {"mass": masses, "age_normalised": True},
        "tova": {},
        "keyformer-logit": {"mass": masses, "temper": Temper(tau, names)},
        "keyformer-silent": {"mass": masses, "temper": Temper(tau)},
        "keyformer-additive": {"mass": masses, "noise": Noise(tau, kept, drawn)},
    }[name]


RULES = ["h2o", "h2o-fading", "h2o-observed", "tova", "keyformer-logit", "keyformer-silent", "keyformer-additive"]


def assert_folded_alike(have, want, *, exact=False):
    """Positions, keys and values bit for bit; masses within 1e-5, or bit for bit."""
    for name in ("keys", "values", "positions"):
        assert mx.array_equal(getattr(have, name), getattr(want, name), equal_nan=name != "positions"), name
        assert getattr(have, name).dtype == getattr(want, name).dtype, name
    live = np.array(want.positions) >= 0
    for name in ("mass", "noise"):
        one, other = getattr(have, name), getattr(want, name)
        assert (one is None) == (other is None), name
        if one is not None:
            one, other = np.array(one)[live], np.array(other)[live]
            assert np.array_equal(one, other) if exact else np.allclose(one, other, rtol=1e-5, atol=1e-6), name


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize(
    ("rows", "groups", "count", "budget", "length", "dim", "dtype", "proxy", "padded"),
    [
        (2, 3, 17, 7, 8, 5, mx.float32, False, True),
        (2, 1, 23, 9, 0, 16, mx.float16, True, False),
        (1, 2, 9, 40, 35, 4, mx.bfloat16, False, False),
        (2, 1, 17, 7, 8, 4, mx.bfloat16, True, True),
    ],
)
def test_every_rule_equals_the_reference(backend, name, rows, groups, count, budget, length, dim, dtype, proxy, padded):
    arrays, masses, options = case(rows, groups, count, budget, length, dim, dtype=dtype, padded=padded)
    arrays["queries"] = None if proxy else arrays["queries"]
    options |= rule(name, masses, rows, groups, count)
    want = fold_tokens(**arrays, **options, backend="reference")
    assert_folded_alike(fold_tokens(**arrays, **options, backend=backend), want)
    kept = (want.positions >= 0).sum(axis=1)
    assert mx.all(kept <= budget)


@pytest.fixture(params=["keys in registers", "keys read anew"])
def held(request, monkeypatch):
    """Both ways of a kernel, wherever the keys fit."""
    if request.param == "keys read anew":
        monkeypatch.setattr(MODULE, "_HELD", {})


@pytest.mark.usefixtures("held")
@pytest.mark.parametrize("budget", [1, 2, 31, 32, 33])
@pytest.mark.parametrize(
    ("groups", "dim", "value_dim", "dtype"),
    [
        (1, 32, 1, mx.float16),
        (3, 64, 64, mx.float16),
        (1, 64, 5, mx.bfloat16),
        (3, 80, 7, mx.bfloat16),
        (1, 96, 128, mx.float32),
        (2, 128, 0, mx.float16),
        (1, 128, 3, mx.float16),
    ],
)
def test_sizes(backend, budget, groups, dim, value_dim, dtype):
    arrays, masses, options = case(2, groups, 9, budget, max(0, budget - 4), dim, value_dim, dtype)
    options |= {"mass": masses}
    assert_folded_alike(
        fold_tokens(**arrays, **options, backend=backend), fold_tokens(**arrays, **options, backend="reference")
    )


@pytest.mark.usefixtures("held")
@pytest.mark.parametrize(("lanes", "groups"), [(32, 1), (32, 5), (64, 1), (64, 4), (64, 9), (640, 1), (640, 9)])
def test_lanes_that_own_several_slots_and_more_heads_than_one_pass_takes(backend, monkeypatch, lanes, groups):
    monkeypatch.setattr(MODULE, "_LANES", lanes)
    arrays, masses, options = case(1, groups, 6, 150, 148, 16, dtype=mx.float16)
    options |= {"mass": masses}
    assert_folded_alike(
        fold_tokens(**arrays, **options, backend=backend), fold_tokens(**arrays, **options, backend="reference")
    )


def test_which_keys_stay_in_registers():
    def turns(budget, dim, size, heads=1, backend="cuda"):
        lanes, turns = MODULE._shape(budget, dim, heads, size, backend)
        assert turns == 0 or turns * lanes // 2 > budget
        return turns

    assert [turns(budget, 128, 2) for budget in (15, 512, 575, 576, 639, 640)] == [1, 3, 3, 5, 5, 0]
    assert [turns(512, dim, 2, heads) for dim, heads in ((64, 1), (64, 4), (128, 4), (256, 1))] == [3, 3, 3, 0]
    assert [turns(255, 128, size) for size in (2, 4)] == [2, 2]
    # A load of less than a word takes a register.
    assert [turns(575, dim, 2) for dim in (127, 126)] == [0, 3]
    assert [turns(1023, dim, 2) for dim in (63, 64)] == [0, 6]
    assert turns(15, 64, 2, backend="metal") == 0


@pytest.mark.usefixtures("held")
def test_buffers_that_hold_fewer_or_more_slots_than_the_budget(backend):
    for size in (5, 9, 31):
        arrays, masses, options = case(2, 1, 12, 20, 5, 16, dtype=mx.float16)
        options |= {"mass": masses}
        for name in ("keys", "values"):
            wide = mx.pad(arrays[name], [(0, 0), (0, 10), (0, 0)], constant_values=7)
            arrays[name] = wide[:, :size]
        have = fold_tokens(**arrays, **options, backend=backend)
        assert_folded_alike(have, fold_tokens(**arrays, **options, backend="reference"))


@pytest.mark.parametrize("value_dim", [0, 3])
@pytest.mark.parametrize("size", [0, 4])
def test_no_launch_gets_or_makes_an_empty_array(backend, monkeypatch, size, value_dim):
    def checked(kernel, chosen, inputs, outputs, **how):
        assert all(array is None or array.size for array in inputs)
        assert all(output is None or 0 not in output[0] for output in outputs)
        return launch.launch(kernel, chosen, inputs, outputs, **how)

    monkeypatch.setattr(MODULE, "launch", checked)
    arrays, _, options = case(2, 1, 9, 6, 0, 4, value_dim)
    arrays |= {"keys": mx.ones((2, size, 4)), "values": mx.ones((2, size, value_dim))}
    options |= rule("keyformer-additive", mx.zeros((2, 0)), 2, 1, 9)
    have = fold_tokens(**arrays, **options, backend=backend)
    assert_folded_alike(have, fold_tokens(**arrays, **options, backend="reference"))


def test_no_rows_need_no_kernel(backend, monkeypatch):
    monkeypatch.setattr(MODULE, "launch", None)
    arrays, masses, options = case(2, 1, 3, 4, 2, 4)
    none = {name: array[:0] for name, array in arrays.items()}
    folded = fold_tokens(**none, **options, mass=masses[:0], backend=backend)
    assert folded.keys.shape == (0, 5, 4)
    assert folded.positions.shape == folded.mass.shape == (0, 5)


def test_queries_of_another_dtype_and_buffers_of_another_size(backend):
    arrays, masses, options = case(2, 1, 9, 6, 4, 16, dtype=mx.float16)
    options |= {"mass": masses}
    want = fold_tokens(**arrays, **options, backend="reference")
    arrays["queries"] = arrays["queries"].astype(mx.float32)
    assert_folded_alike(fold_tokens(**arrays, **options, backend=backend), want)
    wide = {name: mx.pad(arrays[name], [(0, 0), (0, 9), (0, 0)]) for name in ("keys", "values")}
    assert_folded_alike(fold_tokens(**arrays | wide, **options, backend=backend), want)


@pytest.mark.parametrize("name", RULES)
def test_any_split_gives_the_same_bits(backend, name):
    rows, groups, count, budget = 2, 2, 21, 5
    arrays, masses, options = case(rows, groups, count, budget, 3, 8, padded=True)
    options |= rule(name, masses, rows, groups, count)
    whole = fold_tokens(**arrays, **options, backend=backend)
    state, start = arrays | {"mass": options.pop("mass", None), "noise": options.pop("noise", None)}, 0
    valid, temper = options.pop("valid"), options.pop("temper", None)
    for size in (1, 2, 7, 1, 10):
        now = slice(start, start + size)
        noise = state["noise"]
        folded = fold_tokens(
            **state
            | {name: arrays[name][:, now] for name in ("fresh_keys", "fresh_values")}
            | {
                "queries": arrays["queries"][:, :, now],
                "valid": valid[:, now],
                "noise": noise and noise._replace(tau=noise.tau[:, now], drawn=noise.drawn[:, now]),
                "temper": temper
                and Temper(temper.tau[:, now], temper.names if temper.names is None else temper.names[..., now]),
            },
            **options,
            backend=backend,
        )
        kept = {"keys": folded.keys, "values": folded.values, "positions": folded.positions, "mass": folded.mass}
        state |= kept | {"seen": state["seen"] + valid[:, now].sum(axis=1).astype(mx.int32)}
        state["noise"] = noise and noise._replace(kept=folded.noise)
        start += size
    assert_folded_alike(folded, whole, exact=True)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_lesson_12_a_bad_key_takes_nothing_from_the_other_slots(backend, bad, dtype):
    arrays, masses, options = case(2, 2, 14, 6, 7, 4, dtype=dtype)
    here = (mx.arange(14) == 4)[None, :, None] & (mx.arange(4) == 2)
    arrays["fresh_keys"] = mx.where(here, mx.array(bad, dtype), arrays["fresh_keys"])
    options |= {"mass": masses}
    have = fold_tokens(**arrays, **options, backend=backend)
    assert_folded_alike(have, fold_tokens(**arrays, **options, backend="reference"))
    assert mx.all(mx.isfinite(have.mass))


def test_a_mass_that_is_no_number_saves_no_slot(backend):
    arrays, masses, options = case(1, 1, 1, 4, 4, 4)
    options |= {"mass": mx.where(arrays["positions"] == 2, math.nan, masses + 5)}
    have = fold_tokens(**arrays, **options, backend=backend)
    assert 2 not in have.positions[0].tolist()


def test_no_tokens_and_no_valid_tokens_change_nothing(backend):
    arrays, masses, options = case(2, 1, 5, 4, 5, 4)
    options |= {"mass": masses}
    none = {"fresh_keys": (2, 0, 4), "fresh_values": (2, 0, 3), "queries": (2, 1, 0, 4)}
    still = fold_tokens(**arrays | {name: mx.zeros(shape) for name, shape in none.items()}, **options, backend=backend)
    padded = fold_tokens(**arrays, **options | {"valid": mx.zeros((2, 5), mx.bool_)}, backend=backend)
    for folded in (still, padded):
        for name in ("keys", "values", "positions"):
            assert mx.array_equal(getattr(folded, name), arrays[name])
        assert mx.array_equal(folded.mass, masses)


def test_nonsense_is_refused():
    arrays, _, options = case(1, 1, 3, 4, 5, 4)
    with pytest.raises(ValueError, match="n must be at most C and budget"):
        fold_tokens(**arrays, **options | {"budget": 3})
    with pytest.raises(ValueError, match=r"fresh_values must be \[N, S, Dv\]"):
        fold_tokens(**arrays | {"fresh_values": mx.zeros((1, 3, 9))}, **options)
    with pytest.raises(ValueError, match=r"no kernel for budget=4, D=2048, G=1"):
        fold_tokens(**case(1, 1, 3, 4, 5, 2048)[0], **options, backend="host")
    assert not fits(512, 512, 8)
    assert not fits(2**20, 64, 1)
    assert fits(4096, 128, 8)


# ---- As methods use it ----


def _config(module, **settings):
    return lambda budget: module.Config(budget=budget, sink=min(1, budget - 1), cadence="token", **settings)


METHODS = {
    "h2o": (h2o, _config(h2o)),
    "h2o-fading": (h2o, _config(h2o, decay=0.5, recent=0)),
    "h2o-proxy-observed": (h2o, _config(h2o, recent=0, query_source="key_proxy", age_normalised=True)),
    "tova": (tova, _config(tova)),
    "keyformer": (keyformer, _config(keyformer, tau_init=0.5, tau_end=4.0, anneal_steps=11, anneal_from=3, seed=5)),
    "keyformer-proxy": (keyformer, _config(keyformer, query_source="key_proxy", recent=0)),
    "keyformer-additive": (keyformer, _config(keyformer, noise="additive", anneal_steps=9, anneal_from=2, recent=0)),
    "keyformer-greedy": (keyformer, _config(keyformer, noise="additive", tau=0.0, recent=0)),
    "keyformer-silent": (keyformer, _config(keyformer, noise="none", recent=0)),
}


def driven(module, config, stream, blocks=None, state=None):
    """The state after a stream."""
    make = (stream.rows, stream.key_dim, stream.values.shape[2])
    state = module.init_state(config, *make, dtype=stream.dtype) if state is None else state
    start = 0
    for size in stream.blocks if blocks is None else blocks:
        now = slice(start, start + size)
        keys, values, queries = (
            mx.array(part).astype(stream.dtype)
            for part in (stream.keys[:, now], stream.values[:, now], stream.queries[:, :, now])
        )
        asked = None if getattr(config, "query_source", "true") == "key_proxy" else queries
        valid = mx.array(stream.valid[:, now]) if stream.padded else None
        state = module.update_batched(config, state, keys, values, queries=asked, valid=valid)
        start += size
    return state


def assert_states_alike(module, config, have, want, *, masses=True):
    assert mx.array_equal(kept_positions(have), kept_positions(want))
    for one, other in zip(module.get_kv(config, have), module.get_kv(config, want), strict=True):
        assert mx.array_equal(one, other, equal_nan=True)
    assert mx.array_equal(have.slots.seen, want.slots.seen)
    assert have.slots.arrived.shape[1] == 0
    assert [leaf.shape for leaf in have.slots] == [leaf.shape for leaf in want.slots]
    for name in {"mass", "noise"} & set(have._fields) if masses else ():
        columns = []
        for state in (have, want):
            order = mx.argsort(state.slots.positions, axis=1)
            live = mx.take_along_axis(state.slots.positions, order, axis=1) >= 0
            columns.append(mx.where(live, mx.take_along_axis(getattr(state, name), order, axis=1), 0))
        assert np.allclose(*columns, rtol=1e-5, atol=1e-6), name


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("blocks", [(40,), (1, 39), (9, 2, 29)])
def test_a_block_is_its_steps(backend, monkeypatch, name, padded, blocks):
    module, make = METHODS[name]
    valid = np.random.default_rng(1).random((2, 40)) < 0.7 if padded else None
    dtype = DTYPES[list(METHODS).index(name) % 3]
    stream, config = normal_stream(3, tokens=40, groups=2, valid=valid, dtype=dtype), make(7)
    want = driven(module, config, stream, (40,))
    monkeypatch.setattr(launch, "FORCED", backend)
    assert_states_alike(module, config, driven(module, config, stream, blocks), want)


@pytest.mark.parametrize("name", METHODS)
def test_equal_keys_lose_oldest_first_as_the_steps_do(backend, monkeypatch, name):
    module, make = METHODS[name]
    stream, config = uniform_stream(tokens=25, key_dim=16, value_dim=6), make(6)
    # Products that are exact, in whatever order a library sums them: equal keys are equal to every query.
    stream = dataclasses.replace(stream, queries=np.round(stream.queries * 4) / 4)
    want = driven(module, config, stream, (25,))
    monkeypatch.setattr(launch, "FORCED", backend)
    assert_states_alike(module, config, driven(module, config, stream, (11, 14)), want)


@pytest.mark.parametrize(("before", "after"), [(8, 5), (8, 7), (5, 8), (4, 4)])
@pytest.mark.parametrize("filled", [3, 6, 20])
def test_a_state_of_another_budget(backend, monkeypatch, before, after, filled):
    stream = normal_stream(5, tokens=30)
    for name in ("h2o", "keyformer-additive", "keyformer"):
        module, make = METHODS[name]
        start = driven(module, make(before), stream, (filled,))
        rest = normal_stream(6, tokens=15)
        want = driven(module, make(after), rest, (15,), start)
        with monkeypatch.context() as patch:
            patch.setattr(launch, "FORCED", backend)
            have = driven(module, make(after), rest, (15,), start)
        assert_states_alike(module, make(after), have, want)


@pytest.mark.parametrize("name", ["h2o", "tova", "keyformer", "keyformer-additive"])
@pytest.mark.parametrize("padded", [False, True])
def test_update_batched_folds_the_block_as_it_came(backend, monkeypatch, name, padded):
    module, make = METHODS[name]
    folds = []
    monkeypatch.setattr(cadence, "fold_tokens", lambda *a, **k: folds.append((a, k)) or fold_tokens(*a, **k))
    monkeypatch.setattr(launch, "FORCED", backend)
    config, state = make(5), module.init_state(make(5), 2, 4, 3, dtype=mx.float32)
    keys, values = mx.random.normal((2, 9, 4)), mx.random.normal((2, 9, 3))
    valid = mx.ones((2, 9), mx.bool_) if padded else None
    module.update_batched(config, state, keys, values, queries=keys[:, None], valid=valid)
    module.evict(config, module.absorb(config, state, keys, values, valid=valid), queries=keys[:, None])
    (own, options), (taken_back, others) = folds
    assert own[0] is state.slots.keys
    assert own[4] is keys
    assert own[5] is values
    assert options["valid"] is valid
    assert taken_back[4] is not keys
    assert others["valid"] is not None, "a state that holds the block does not say whether it is padded"


def test_a_block_beyond_the_limit_of_a_graph(backend, monkeypatch):
    config = METHODS["h2o"][1](3)
    monkeypatch.setattr(emulation, "ORDERS", 1)
    stream = normal_stream(7, rows=1, tokens=4200, key_dim=4, value_dim=3)
    want = driven(h2o, config, stream, (2100, 2100))
    with ops.using("reference"):
        assert cadence.most_tokens(config) == 4096
    monkeypatch.setattr(launch, "FORCED", backend)
    assert cadence.most_tokens(config) > 4200
    assert_states_alike(h2o, config, driven(h2o, config, stream, (4200,)), want)


def test_who_keeps_the_limit(backend, monkeypatch):
    monkeypatch.setattr(launch, "FORCED", backend)
    rope = Contiguous(Rope(2))
    for config in (
        h2o.Config(cadence="token", shared_heads=2),
        h2o.Config(cadence="token", placement=rope),
        knorm.Config(cadence="token"),
    ):
        assert cadence.most_tokens(config) == 4096
    config = h2o.Config(budget=2, sink=0, cadence="token")
    keys = mx.zeros((1, 4097, 2048), mx.float16)
    state = h2o.absorb(config, h2o.init_state(config, 1, 2048), keys, keys)
    with pytest.raises(ValueError, match="at most 4096 tokens, got S = 4097"):
        h2o.evict(config, state, queries=keys[:, None])


# ---- Against float64 ----


def weights_of(logits, visible):
    """Softmax over visible finite entries, float64."""
    visible = visible & np.isfinite(logits)
    top = np.max(np.where(visible, logits, -np.inf), axis=-1, keepdims=True)
    powers = np.exp(np.where(visible, logits - np.where(np.isfinite(top), top, 0), -np.inf))
    return powers / np.maximum(powers.sum(axis=-1, keepdims=True), 1e-300)


@pytest.mark.skipif(BACKEND == "host" and not emulation.available(), reason="host needs g++ on Linux")
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
@pytest.mark.parametrize(
    "name", ["h2o", "h2o-fading", "h2o-observed", "tova", "keyformer-silent", "keyformer-additive"]
)
def test_each_step_frees_a_weakest_slot_and_a_block_is_its_steps(name, data):
    budget = data.draw(st.sampled_from([1, 2, 3, 5, 9]))
    stream: Stream = data.draw(streams(budget=budget, min_tokens=1, max_tokens=14, padded=True, dims=[4]))
    rows, groups, count = stream.queries.shape[:3]
    sink, recent = data.draw(st.integers(0, (budget - 1) // 2)), data.draw(st.integers(0, (budget - 1) // 2))
    proxy = data.draw(st.booleans())
    groups = 1 if proxy else min(groups, 2)
    # One kernel for each of three kinds.
    stream = dataclasses.replace(
        stream, queries=stream.queries[:, :groups], values=stream.values[..., :1], dtype=DTYPES[0 if proxy else groups]
    )
    masses = mx.zeros((rows, 0))
    options = rule(name, masses, rows, groups, count)
    keys, values = (mx.array(part).astype(stream.dtype) for part in (stream.keys, stream.values))
    queries = None if proxy else mx.array(stream.queries).astype(stream.dtype)
    asked = np.array(stream.keys[:, None] if proxy else stream.queries, np.float64)
    valid = np.array(stream.valid)
    folded = MODULE.Folded(
        mx.zeros((rows, budget + 1, keys.shape[2]), stream.dtype),
        mx.zeros((rows, budget + 1, values.shape[2]), stream.dtype),
        mx.zeros((rows, 0), mx.int32),
        options.get("mass"),
        masses,
    )
    whole = fold_tokens(
        *folded[:3], mx.zeros((rows,), mx.int32), keys, values, queries,
        budget=budget, sink=sink, recent=recent, valid=mx.array(valid), backend=BACKEND, **options,
    )  # fmt: skip
    seen = np.zeros(rows, np.int32)
    for t in range(count):
        now = slice(t, t + 1)
        temper, noise = options.get("temper"), options.get("noise")
        tau = None if temper is None and noise is None else np.array((temper or noise).tau)[:, t]
        before = folded
        folded = fold_tokens(
            *before[:3], mx.array(seen), keys[:, now], values[:, now], None if proxy else queries[:, :, now],
            budget=budget, sink=sink, recent=recent, valid=mx.array(valid[:, now]), backend=BACKEND,
            **options | {
                "mass": before.mass if "mass" in options else None,
                "temper": temper and Temper(temper.tau[:, now]),
                "noise": noise and Noise(noise.tau[:, now], before.noise, noise.drawn[:, now]),
            },
        )  # fmt: skip
        length = folded.positions.shape[1]
        for row in range(rows):
            old = np.full(length, -1)
            old[: before.positions.shape[1]] = np.array(before.positions)[row]
            new = np.array(folded.positions)[row]
            if not valid[row, t]:
                assert np.array_equal(old, new)
                continue
            slot = int(np.argmin(old))
            assert old[slot] == -1
            old[slot] = seen[row]
            held = np.array(folded.keys.astype(mx.float32), np.float64)[row, :length]
            assert np.array_equal(held[slot], np.array(stream.keys)[row, t])
            visible = (old >= 0) & ((old < seen[row]) | (not proxy) | (seen[row] == 0))
            logits = asked[row, :, t] @ held.T * held.shape[1] ** -0.5 / (tau[row] if temper else 1.0)
            received = weights_of(logits, visible).mean(axis=0)
            mass = np.zeros(length)
            if "mass" in options:
                mass[: before.positions.shape[1]] = np.array(before.mass, np.float64)[row]
                mass[slot] = 0
                mass = mass * options.get("decay", 1.0) + received
                assert np.allclose(np.array(folded.mass)[row][old >= 0], mass[old >= 0], rtol=1e-5, atol=1e-6)
            else:
                mass = received
            seen[row] += 1
            if options.get("age_normalised"):
                mass = mass / np.maximum(seen[row] - proxy - old, 1)
            if noise:
                mass = mass + tau[row] * np.array(folded.noise, np.float64)[row]
            if (old >= 0).sum() <= budget:
                assert np.array_equal(old, new)
                continue
            able = (old >= sink) & (old < seen[row] - recent)
            lost = np.flatnonzero(old != new)
            assert len(lost) == 1
            assert new[lost[0]] == -1
            assert able[lost[0]]
            least = mass[able].min()
            assert mass[lost[0]] <= least + 1e-5 * max(1.0, abs(least))
            if stream.uniform and not noise and not options.get("age_normalised") and "mass" not in options:
                assert old[lost[0]] == old[able & (mass <= least + 1e-9)].min(), "ties lose oldest first"
    assert_folded_alike(whole, folded, exact=True)
