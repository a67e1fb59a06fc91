"""One token into a full cache, called as it is: traced once, and what is kept is what the plain call keeps."""

import threading
from functools import lru_cache

import mlx.core as mx
import numpy as np
import pytest

import veloxfn
from veloxfn import Contiguous, Rope, h2o, knorm, pyramidkv, steady, streaming_llm
from veloxfn.binding import bind
from veloxfn.ops import launch
from veloxfn.testing import claims_for, laws, normal_stream
from veloxfn.testing.drive import differences, snapshot

TRACING = steady.TRACING
CONFIGS = {
    **{name: module.Config(budget=8) for name, module in veloxfn.METHODS.items() if name != "pyramidkv"},
    "h2o contiguous": h2o.Config(budget=8, placement=Contiguous(Rope(dims=4))),
    "h2o by proxy": h2o.Config(budget=8, query_source="key_proxy"),
    "h2o, cadence token": h2o.Config(budget=8, cadence="token", age_normalised=True),
}


@pytest.fixture
def tracing(monkeypatch):
    """Steady calls are traced with MLX's own primitives as well."""
    monkeypatch.setattr(steady, "TRACING", ("reference",))
    monkeypatch.setattr(launch, "FORCED", "reference")
    steady.forget()
    yield
    steady.forget()


@pytest.fixture
def traces(tracing, monkeypatch):
    """What was traced: every function that Python ran in a steady call."""
    found, run = [], steady._traced.__wrapped__

    def noting(function, fixed, backend):
        def noted(*arrays, **evidence):
            found.append(function.__name__)
            return function(*arrays, **evidence)

        return run(noted, fixed, backend)

    monkeypatch.setattr(steady, "_traced", lru_cache(noting))
    return found


def token(policy, seed, dtype=mx.float16, rows=2):
    keys, values, queries = (
        mx.random.normal((rows, *shape, 4), key=mx.random.key(seed + i)).astype(dtype)
        for i, shape in enumerate(((1,), (1,), (2, 1)))
    )
    return keys, values, queries, {"queries": queries} if policy.config.needs_queries else {}


def full(policy, dtype=mx.float16, rows=2):
    state = policy.init_state(rows, 4, dtype=dtype)
    for seed in range(policy.config.budget + 2):
        keys, values, _, evidence = token(policy, seed, dtype, rows)
        state = policy.update_batched(state, keys, values, **evidence)
    return state


@pytest.mark.parametrize("name", CONFIGS)
def test_the_laws_hold_of_traced_calls(tracing, name):
    policy, claims = veloxfn.policy(CONFIGS[name]), claims_for(CONFIGS[name])
    stream = normal_stream(tokens=16, key_dim=4, groups=2, blocks=(6, 4, 1, 1, 1, 2, 1))
    for law in (laws.law_follows_the_oracle, laws.law_attend_equals_evict, laws.law_inputs_are_untouched):
        law(policy, stream, claims)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_call_is_traced_once(traces, name):
    policy = veloxfn.policy(CONFIGS[name])
    state = full(policy)
    for seed in range(6):
        if seed == 1:
            traces.clear()
        keys, values, queries, evidence = token(policy, 100 + seed)
        state = policy.update_batched(state, keys, values, **evidence)
        _, state = veloxfn.step(policy, state, keys, values, queries)
        _, state = veloxfn.attend(policy, policy.absorb(state, keys, values), queries)
        state = policy.evict(policy.absorb(state, keys, values), **evidence)
        _, state = veloxfn.step(veloxfn.policy(policy.config), state, keys, values, queries)  # another Policy
    assert traces == [], "Python ran in a steady call"
    assert veloxfn.tokens_seen(state).tolist() == [40] * 2


def test_scale_and_dtype_have_traces_of_their_own(tracing, monkeypatch):
    policy = h2o.policy(h2o.Config(budget=8))
    for dtype in (mx.float16, mx.float32):
        state = full(policy, dtype)
        keys, values, queries, _ = token(policy, 100, dtype)
        for scale in (None, 0.25, 4, None):
            have, _ = veloxfn.step(policy, state, keys, values, queries, scale=scale)
            with monkeypatch.context() as patch:
                patch.setattr(steady, "TRACING", ())
                want, _ = veloxfn.step(policy, state, keys, values, queries, scale=scale)
            assert have.dtype == dtype
            assert np.allclose(have.astype(mx.float32), want.astype(mx.float32), atol=2e-3)


def test_a_trace_is_of_one_back_end(traces, monkeypatch):
    policy = knorm.policy(knorm.Config(budget=8))
    state = full(policy)
    keys, values, *_ = token(policy, 100)
    traces.clear()
    policy.update_batched(state, keys, values)
    assert not traces
    monkeypatch.setattr(steady, "TRACING", ("another",))
    monkeypatch.setattr(steady, "backend_for", lambda asked: "another")
    policy.update_batched(state, keys, values)
    assert traces == ["update_batched"]


@pytest.mark.parametrize("call", ["update", "step", "attend", "absorb", "evict"])
def test_what_is_refused_is_refused_as_ever_and_nothing_is_lost(tracing, monkeypatch, call):
    """The error of the plain call, from the first time on and again once there is a trace."""
    policy = h2o.policy(h2o.Config(budget=8))
    state = full(policy)
    before = snapshot(state)
    keys, values, queries, _ = token(policy, 100)
    full_by_one = policy.absorb(state, keys, values)
    calls = {
        "update": lambda keys, values, queries, **more: policy.update_batched(
            state, keys, values, queries=queries, **more
        ),
        "step": lambda *block, **more: veloxfn.step(policy, state, *block, **more),
        "absorb": lambda keys, values, queries, **more: policy.absorb(state, keys, values, **more),
        "evict": lambda keys, values, queries, **more: policy.evict(full_by_one, queries=queries, **more),
        "attend": lambda keys, values, queries, **more: veloxfn.attend(policy, full_by_one, queries, **more),
    }
    bad = [
        ((keys.astype(mx.float32), values, queries), {}),
        ((keys[:1], values, queries), {}),
        ((keys, values[..., :3], queries), {}),
        ((keys, values, queries[..., :3]), {}),
        ((keys, values, queries.astype(mx.int32)), {}),
        ((keys, values, None), {}),
        ((np.array(keys), values, queries), {}),
        *(
            [((keys, values, queries), {"valid": mx.ones((3, 1), mx.bool_)})]
            if call in ("update", "step", "absorb")
            else []
        ),
        *(((keys, values, queries), {"scale": scale}) for scale in (-1.0, "1", True, []) if call in ("step", "attend")),
    ]
    for _ in range(2):
        for block, more in bad:
            with monkeypatch.context() as patch:
                patch.setattr(steady, "TRACING", ())
                wanted = outcome(calls[call], block, more)
            assert outcome(calls[call], block, more) == wanted
        calls[call](keys, values, queries)
    assert not differences(before, snapshot(state))


def outcome(call, block, more):
    """The error, or that there is none."""
    try:
        call(*block, **more)
    except Exception as error:  # whatever it is, both calls are to raise it
        return type(error), str(error)
    return None


def test_keywords_and_inner_traces(traces):
    policy = h2o.policy(h2o.Config(budget=8))
    state = full(policy)
    keys, values, queries, _ = token(policy, 100)
    for _ in range(2):  # the first is a trace of its own
        traces.clear()
        wanted = policy.update_batched(state, keys=keys, values=values, queries=queries)
    assert not traces
    outer = mx.compile(lambda state, keys, values, queries: policy.update_batched(state, keys, values, queries=queries))
    mapped = mx.vmap(lambda keys: policy.update_batched(state, keys, values, queries=queries).slots.positions)
    assert not differences(snapshot(wanted), snapshot(outer(state, keys, values, queries)))
    assert mapped(mx.stack([keys, keys])).tolist() == [wanted.slots.positions.tolist()] * 2


def test_a_method_of_ones_own_is_called_plainly(tracing):
    """It may look at its arrays, which a trace forbids."""
    looked = []

    def evict(config, state, **evidence):
        looked.append(state.slots.seen.tolist())
        return h2o.evict(config, state, **evidence)

    config = h2o.Config(budget=8)
    policy = bind(config, h2o.init_state, h2o.absorb, evict)
    state = full(policy)
    keys, values, queries, _ = token(policy, 100)
    _, state = veloxfn.step(policy, state, keys, values, queries)
    _, state = veloxfn.attend(policy, policy.absorb(state, keys, values), queries)
    assert looked[-2:] == [[11, 11], [12, 12]]


def test_pyramids_trace_their_scorer(traces):
    policy = veloxfn.policy(pyramidkv.Config(layers=1, scorer=h2o.Config(budget=8)))
    state = full(policy)
    traces.clear()
    keys, values, _, evidence = token(policy, 100)
    policy.update_batched(state, keys, values, **evidence)
    assert not traces


def test_threads_have_traces_of_their_own(tracing):
    """MLX's streams belong to a thread."""
    policy, found = knorm.policy(knorm.Config(budget=8)), []

    def work():
        state = full(policy)
        found.append(state.slots.positions.tolist())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [full(policy).slots.positions.tolist()] * 4


def test_values_without_elements_are_not_traced(traces):
    """MLX's CUDA back end divides by the size of what a trace fuses."""
    policy = knorm.policy(knorm.Config(budget=2, sink=0))
    state = policy.init_state(1, 4, 0)
    for _ in range(5):
        state = policy.update_batched(state, mx.ones((1, 1, 4), mx.float16), mx.ones((1, 1, 0), mx.float16))
    assert not traces
    assert veloxfn.tokens_kept(state).tolist() == [2]


def test_nothing_else_is_traced(traces):
    """Below the budget and blocks change shapes; a CPU compiles for seconds."""
    policy = streaming_llm.policy(streaming_llm.Config(budget=8))
    block = mx.ones((2, 3, 4), mx.float16)
    state = policy.update_batched(policy.init_state(2, 4), block, block)
    state = policy.update_batched(state, block[:, :1], block[:, :1])
    for _ in range(3):
        state = policy.update_batched(state, block, block)
    assert not traces
    assert "reference" not in TRACING
