"""`ops.token_step`, which copies a cache on the way, and the methods' steps by it: what writes into a cache give."""

from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest

import veloxfn
from veloxfn import draws, h2o, keyformer, knorm, ops, streaming_llm, tova
from veloxfn.ops import Gumbel, KeyNorm, Temper
from veloxfn.ops.attention_mass import Recipe
from veloxfn.ops.constants import Schedule
from veloxfn.testing.drive import bits, floats

RISING = Schedule(1.0, 2.0, 9, 3)


def cache(rows, length, dim, wide, heads, dtype, *, free=1, seed=0):
    """A cache with free slots, a token that arrives and its query, near nothing that would be a tie."""
    draw = np.random.default_rng(seed)

    def normal(*shape):
        return mx.array(draw.standard_normal(shape).astype(np.float32)).astype(dtype)

    positions = np.stack([draw.permutation(length) for _ in range(rows)]).astype(np.int32)
    for row in positions:
        row[draw.permutation(length)[:free]] = -1
    return SimpleNamespace(
        keys=normal(rows, length, dim),
        values=normal(rows, length, wide),
        positions=mx.array(positions),
        seen=mx.array(np.arange(rows) + length + 5, mx.int32),
        mass=mx.array(draw.random((rows, length)), mx.float32),
        noise=mx.array(draw.random((rows, length)), mx.float32),
        streams=mx.arange(7, 7 + rows, dtype=mx.uint32),
        fresh_keys=normal(rows, 1, dim),
        fresh_values=normal(rows, 1, wide),
        queries=normal(rows, heads, 1, dim),
    )


def tempered(a, *, noisy):
    """Temperature and noise of the arrival's query."""
    heads = a.queries.shape[1]
    when = a.seen[:, None, None]
    names = draws.names(11, a.streams[:, None, None], mx.arange(heads)[:, None], when)
    recipe = Recipe(a.seen + 1, RISING, 11 if noisy else None, a.streams)
    return Temper(RISING.at(a.seen)[:, None], names if noisy else None, recipe)


RULES = {
    "h2o": lambda a: {"columns": [(a.mass, 0.0)], "queries": a.queries, "output": True},
    "h2o-fading": lambda a: {"columns": [(a.mass, 0.0)], "queries": a.queries, "decay": 0.5},
    "h2o-observed": lambda a: {"columns": [(a.mass, 0.0)], "queries": a.queries, "per_query": True, "output": True},
    "tova": lambda a: {"columns": [], "queries": a.queries, "output": True},
    "keyformer-additive": lambda a: {
        "columns": [(a.mass, 0.0), (a.noise, Gumbel(7, a.streams))],
        "queries": a.queries,
        "schedule": RISING,
        "output": True,
    },
    "keyformer-logit": lambda a: {
        "columns": [(a.mass, 0.0), (a.noise, 0.0)],
        "queries": a.queries,
        "temper": tempered(a, noisy=True),
        "output": True,
        "scale": 0.25,
    },
    "keyformer-silent": lambda a: {
        "columns": [(a.mass, 1.5)],
        "queries": a.queries,
        "temper": tempered(a, noisy=False),
    },
    "knorm": lambda a: {"columns": [(a.mass, KeyNorm(a.fresh_keys))], "keep_low": True},
    "knorm-attend": lambda a: {
        "columns": [(a.mass, KeyNorm(a.fresh_keys))],
        "keep_low": True,
        "attended": False,
        "queries": a.queries,
        "output": True,
    },
    "given": lambda a: {"columns": [(a.mass, a.noise[:, :1]), (a.noise, a.mass[:, :1])]},
    "streaming": lambda a: {"columns": []},
    "streaming-attend": lambda a: {"columns": [], "queries": a.queries, "output": True, "attended": False},
}


def stepped(a, rule, backend, **more):
    options = RULES[rule](a)
    columns, queries = options.pop("columns"), options.pop("queries", None)
    made = ops.token_step(
        a.keys,
        a.values,
        a.positions,
        a.seen,
        columns,
        a.fresh_keys,
        a.fresh_values,
        queries,
        sink=1,
        recent=2,
        backend=backend,
        **(options | more),
    )
    mx.eval([array for array in made if isinstance(array, mx.array)], made.columns)
    return made


def on_cpu(a, rule, **more):
    with mx.stream(mx.cpu):
        return stepped(a, rule, "reference", **more)


def assert_same(have, want, dtype, what):
    for name in ("keys", "values", "positions", "seen"):
        assert np.array_equal(bits(getattr(have, name)), bits(getattr(want, name))), (what, name)
    for one, other in zip(have.columns, want.columns, strict=True):
        assert one.dtype == mx.float32
        assert np.allclose(one, other, rtol=1e-5, atol=1e-5), what
    assert (have.output is None) == (want.output is None)
    if want.output is not None:
        assert have.output.dtype == dtype
        error = 1e-5 if dtype == mx.float32 else 2e-2
        assert np.allclose(floats(have.output), floats(want.output), rtol=error, atol=error), what


# N, n, D, Dv, G: one part and several, odd dimensions, parts nearly empty, heads of one threadgroup and of two.
SHAPES = [(2, 2, 4, 5, 2), (1, 33, 8, 8, 1), (3, 129, 64, 32, 3), (1, 600, 16, 16, 12), (2, 1025, 8, 16, 8)]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_copy_on_the_way_gives_what_writes_give(backend, rule, shape):
    dtype = (mx.float16, mx.float32, mx.bfloat16)[(len(rule) + shape[1]) % 3]
    a = cache(*shape, dtype, free=1 if shape[1] < 5 else 3)
    before = [np.array(bits(array)) for array in (a.keys, a.values, a.positions, a.mass)]
    assert_same(stepped(a, rule, backend), on_cpu(a, rule), dtype, rule)
    after = [bits(array) for array in (a.keys, a.values, a.positions, a.mass)]
    assert all(map(np.array_equal, before, after)), "the old cache changed"


@pytest.mark.parametrize(
    ("rule", "heads", "kernels"),
    [
        ("h2o", 9, ["token_attend", "token_finish"]),
        ("h2o", 129, ["admit", "mass_block", "evict_step"]),
        ("knorm", 1, ["token_move"]),
        ("knorm-attend", 1, ["token_attend", "token_finish"]),
        ("given", 1, ["token_move"]),
    ],
)
def test_two_launches_or_one_and_more_for_more_heads_than_a_kernel_takes(backend, launched, rule, heads, kernels):
    a = cache(2, 40, 8, 8, heads, mx.float32)
    assert_same(stepped(a, rule, backend), on_cpu(a, rule), mx.float32, heads)
    assert [name for name, _ in launched] == kernels


def test_equal_keys_lose_the_oldest_and_nan_is_no_protection(backend):
    a = cache(2, 40, 8, 8, 2, mx.float16)
    a.keys, a.fresh_keys, a.mass = mx.ones_like(a.keys), mx.ones_like(a.fresh_keys), mx.zeros_like(a.mass)
    assert_same(stepped(a, "h2o", backend), on_cpu(a, "h2o"), mx.float16, "ties")
    a.mass = mx.where(a.positions == 20, mx.array(float("nan")), a.mass)
    have = stepped(a, "streaming-attend", backend)
    assert not np.isnan(floats(have.output)).any()
    have = stepped(a, "h2o", backend)
    assert (20 not in np.array(have.positions)) == bool((a.positions == 20).any())


def test_norms_of_another_key_are_taken_as_they_are_given(backend):
    a = cache(2, 40, 8, 8, 1, mx.float32)
    other = mx.full(a.fresh_keys.shape, 3.0)
    made = ops.token_step(
        a.keys,
        a.values,
        a.positions,
        a.seen,
        [(a.mass, KeyNorm(other))],
        a.fresh_keys,
        a.fresh_values,
        sink=0,
        recent=0,
        backend=backend,
    )
    free = np.array(a.positions) < 0
    assert np.allclose(np.array(made.columns[0])[free], 3.0 * 8**0.5)


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"keys": mx.zeros((1, 3, 8))}, ValueError, r"keys must be \[N, n, D\]"),
        ({"values": mx.zeros((1, 40, 8, 1))}, ValueError, "values must be"),
        ({"fresh_keys": mx.zeros((2, 1, 4))}, ValueError, "fresh_keys must be"),
        ({"fresh_values": mx.zeros((2, 1, 8), mx.float16)}, TypeError, "fresh_values must be float32, got"),
        ({"positions": mx.zeros((2, 40))}, TypeError, "positions must be int32"),
        ({"queries": mx.zeros((2, 1, 3, 8))}, ValueError, "one token, got S = 3"),
        ({"mass": mx.zeros((2, 39))}, ValueError, "column 0 must be"),
        ({"more": {"scale": -1.0}}, ValueError, "scale must be"),
        ({"more": {"scale": 1.0, "output": False}}, ValueError, "scale is for the output"),
        ({"more": {"schedule": RISING}}, ValueError, "second column, got 1"),
    ],
)
def test_nonsense_is_refused_by_name(change, error, said):
    a = cache(2, 40, 8, 8, 1, mx.float32)
    more = change.pop("more", {})
    for name, value in change.items():
        setattr(a, name, value)
    with pytest.raises(error, match=said):
        stepped(a, "h2o", "reference", **more)


def test_an_output_needs_queries():
    with pytest.raises(ValueError, match="output=True needs queries"):
        stepped(cache(1, 3, 8, 8, 1, mx.float32), "streaming", "reference", output=True)


# ---- methods ----


def test_an_absorb_or_evict_of_ones_own_is_used():
    policy = h2o.policy(h2o.Config(budget=5, sink=1, recent=1))
    x = mx.random.normal((1, 9, 4), key=mx.random.key(0))
    state = policy.update_batched(policy.init_state(1, 4, dtype=mx.float32), x[:, :8], x[:, :8], queries=x[:, None, :8])
    called = []

    def absorb(state, keys, values, *, valid=None):
        called.append("absorb")
        return policy.absorb(state, keys, values, valid=valid)

    def evict(state, **evidence):
        called.append("evict")
        return policy.evict(state, **evidence)

    for own in (policy._replace(absorb=absorb), policy._replace(evict=evict)):
        veloxfn.step(own, state, x[:, 8:], x[:, 8:], x[:, None, 8:])
    assert called == ["absorb", "evict"]


@pytest.mark.parametrize("module", [h2o, keyformer, tova, knorm, streaming_llm])
def test_what_absorb_and_evict_refuse_is_refused(forced, module):
    policy = module.policy(module.Config(budget=6))
    x = mx.random.normal((1, 9, 4), key=mx.random.key(0))
    given = {"queries": x[:, None, :8]} if policy.config.needs_queries else {}
    state = policy.update_batched(policy.init_state(1, 4, dtype=mx.float32), x[:, :8], x[:, :8], **given)
    token, query = x[:, 8:], x[:, None, 8:]
    for keys, values, queries, error in (
        (token.astype(mx.float16), token, query, TypeError),
        (token[..., :3], token, query, ValueError),
        (token, token[..., :3], query, ValueError),
        (token, token, query[..., :3], ValueError),
        (token, token, query[:, :0], ValueError),
        (token, token, query.astype(mx.int32), TypeError),
        (token[..., 0], token, query, ValueError),
        (token[None], token, query, ValueError),
        (token, token[0], query, ValueError),
        (token, token, query[0], ValueError),
        ([[[0.0] * 4]], token, query, TypeError),
        (token, token, [0.0] * 4, TypeError),
        (token, token, None, (TypeError, ValueError)),
    ):
        with pytest.raises(error):
            veloxfn.step(policy, state, keys, values, queries)
        if queries is query:
            with pytest.raises(error):
                policy.update_batched(state, keys, values, **({"queries": query} if given else {}))
    wrong = {} if given else {"queries": query}
    with pytest.raises(ValueError, match="attention"):
        policy.update_batched(state, token, token, **wrong)
    waiting = policy.absorb(state, token, token)
    with pytest.raises(ValueError, match="evict before the next absorb"):
        veloxfn.step(policy, waiting, token, token, query)


def test_a_padded_token_of_step_is_not_stored():
    policy = h2o.policy(h2o.Config(budget=6))
    x = mx.random.normal((2, 9, 4), key=mx.random.key(0))
    state = policy.update_batched(policy.init_state(2, 4, dtype=mx.float32), x[:, :8], x[:, :8], queries=x[:, None, :8])
    valid = mx.array([[True], [False]])
    _, after = veloxfn.step(policy, state, x[:, 8:], x[:, 8:], x[:, None, 8:], valid=valid)
    assert after.slots.seen.tolist() == [9, 8]
    assert [8 in row for row in after.slots.positions.tolist()] == [True, False]
