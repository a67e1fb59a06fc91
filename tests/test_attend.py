"""`veloxfn.attend` by hand, and what a step with it launches on a GPU."""

import threading

import mlx.core as mx
import numpy as np
import pytest

import veloxfn
from veloxfn import Contiguous, Rope, cam, h2o, keyformer, knorm, ops, pyramidkv, snapkv, streaming_llm, tova
from veloxfn.ops.launch import backend_for
from veloxfn.retention import retire
from veloxfn.testing import claims_for, laws, normal_stream
from veloxfn.testing.drive import live_positions, run
from veloxfn.testing.launches import launches


def block(rows, groups, count, dim, dtype=mx.float32, seed=0):
    a, b, c = mx.random.split(mx.random.key(seed), 3)
    shape = (rows, count, dim)
    keys, values = (mx.random.normal(shape, key=key).astype(dtype) for key in (a, b))
    return keys, values, mx.random.normal((rows, groups, count, dim), key=c).astype(dtype)


def full(policy, rows=2, dim=8, dtype=mx.float32, count=30):
    keys, values, queries = block(rows, 2, count, dim, dtype, 1)
    given = {"queries": queries} if policy.config.needs_queries else {}
    return policy.update_batched(policy.init_state(rows, dim, dtype=dtype), keys, values, **given)


def test_two_tokens_by_hand():
    """Products 0 and log 3: weights 1/4 and 3/4."""
    policy = h2o.policy(h2o.Config(budget=8))
    keys = mx.array([[[0.0], [float(np.log(3.0))]]])
    values = mx.array([[[4.0, 0.0], [8.0, 1.0]]])
    state = policy.absorb(policy.init_state(1, 1, 2, dtype=mx.float32), keys, values)
    output, state = veloxfn.attend(policy, state, mx.ones((1, 1, 2, 1)))
    assert np.allclose(output, [[[[4.0, 0.0], [7.0, 0.75]]]], atol=1e-6)
    assert np.allclose(state.mass, [[1.25, 0.75]], atol=1e-6)
    assert state.slots.arrived.shape == (1, 0)


@pytest.mark.parametrize("name", veloxfn.METHODS)
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("count", [0, 1, 5, 40])
def test_shapes_and_dtypes(name, dtype, count):
    policy = veloxfn.policy(veloxfn.METHODS[name].Config(budget=32))
    state = policy.init_state(2, 8, 5, dtype=dtype)
    keys, values, queries = block(2, 3, count, 8, dtype)
    output, state = veloxfn.attend(policy, policy.absorb(state, keys, values[..., :5]), queries)
    assert output.shape == (2, 3, count, 5)
    assert output.dtype == dtype
    assert state.slots.arrived.shape == (2, 0)
    assert veloxfn.tokens_kept(state).tolist() == [min(count, policy.config.budget)] * 2


def test_queries_of_another_shape_are_refused():
    policy = tova.policy(tova.Config(budget=4))
    keys, values, queries = block(2, 3, 5, 8)
    state = policy.absorb(policy.init_state(2, 8, dtype=mx.float32), keys, values)
    for wrong in (queries[:, :, :4], queries[:1], queries[:, 0], queries[..., :7]):
        with pytest.raises(ValueError, match="queries"):
            veloxfn.attend(policy, state, wrong)


@pytest.mark.parametrize("module", [h2o, tova, keyformer, knorm, streaming_llm])
@pytest.mark.parametrize("count", [1, 3])
def test_a_row_that_was_padded_long_ago_is_read_as_if_alone(module, count):
    """Lesson 15: its free slots receive no attention; `padded` says that there may be some."""
    policy = module.policy(module.Config(budget=6))
    keys, values, queries = block(2, 1, 8 + count, 4)
    valid = mx.array([[True] * 8, [False] * 5 + [True] * 3])
    given = {"queries": queries[:, :, :8]} if policy.config.needs_queries else {}
    together = policy.init_state(2, 4, dtype=mx.float32)
    together = policy.update_batched(together, keys[:, :8], values[:, :8], valid=valid, **given)
    alone = policy.init_state(1, 4, dtype=mx.float32, streams=mx.array([1], mx.uint32))
    given = {"queries": queries[1:, :, 5:8]} if policy.config.needs_queries else {}
    alone = policy.update_batched(alone, keys[1:, 5:8], values[1:, 5:8], **given)
    now = slice(8, 8 + count)
    have, _ = veloxfn.attend(
        policy, policy.absorb(together, keys[:, now], values[:, now]), queries[:, :, now], padded=True
    )
    want, _ = veloxfn.attend(policy, policy.absorb(alone, keys[1:, now], values[1:, now]), queries[1:, :, now])
    assert np.allclose(have[1:], want, atol=1e-6)


def test_an_eviction_of_ones_own_is_used():
    """A policy with the Config of a method and another `evict`."""
    policy = h2o.policy(h2o.Config(budget=6, sink=0, recent=0))

    def evict(state, *, queries=None, attention=None):
        return retire(state, -state.slots.positions.astype(mx.float32), policy.config)

    odd = policy._replace(evict=evict)
    state = full(policy)
    keys, values, queries = block(2, 2, 1, 8)
    _, state = veloxfn.attend(odd, odd.absorb(state, keys, values), queries)
    assert all(30 not in row for row in live_positions(state)), "the newest is lost"


@pytest.mark.parametrize("config", [h2o.Config(budget=6, shared_heads=2), tova.Config(budget=6, shared_heads=2)])
def test_heads_that_share_a_choice_keep_the_same(config):
    policy = veloxfn.policy(config)
    state = full(policy, rows=4)
    keys, values, queries = block(4, 2, 1, 8)
    absorbed = policy.absorb(state, keys, values)
    _, after = veloxfn.attend(policy, absorbed, queries)
    positions = [row.tolist() for row in live_positions(after)]
    assert positions[0] == positions[1]
    assert positions[2] == positions[3]
    want = [row.tolist() for row in live_positions(policy.evict(absorbed, queries=queries))]
    assert positions == want


@pytest.mark.parametrize(
    "config",
    [
        h2o.Config(budget=6, sink=1),
        keyformer.Config(budget=6, sink=1),
        snapkv.Config(budget=6, sink=1, window=2),
        pyramidkv.Config(layers=2, scorer=h2o.Config(budget=6)),
        cam.Config(budget=6, sink=1, target_count=2),
    ],
    ids=["h2o", "keyformer", "snapkv", "pyramidkv", "cam"],
)
def test_a_decoder_with_attend_keeps_what_update_batched_keeps(config):
    policy = veloxfn.policy(config)
    stream = normal_stream(5, tokens=20, groups=2, blocks=(3, 1, 7, *[1] * 9))
    state = policy.init_state(2, stream.key_dim, stream.value_dim, dtype=mx.float32)
    for part in stream:
        _, state = veloxfn.attend(policy, policy.absorb(state, part.keys, part.values), part.queries)
    want = run(policy, stream, claims_for(config))
    assert [row.tolist() for row in live_positions(state)] == [row.tolist() for row in live_positions(want)]


def test_the_law_catches_an_attention_that_is_wrong(monkeypatch):
    """Not of a policy: of `attend` itself."""
    policy = h2o.policy(h2o.Config(budget=5, sink=1))
    stream = normal_stream(6, tokens=16, groups=2, blocks=(3, 1, 5, *[1] * 7))
    laws.law_attend_equals_evict(policy, stream)
    right = veloxfn.attend

    def faults():
        yield "output is off", lambda output, state: (output + 0.01, state)
        yield "the output must be", lambda output, state: (output.astype(mx.float16), state)
        yield "column mass", lambda output, state: (output, state._replace(mass=state.mass * 1.01))
        yield (
            "the state is not that of evict",
            lambda output, state: (
                output,
                state._replace(mass=state.mass.astype(mx.float16)),
            ),
        )

    for said, fault in faults():
        monkeypatch.setattr(veloxfn, "attend", lambda *a, fault=fault, **o: fault(*right(*a, **o)))
        with pytest.raises(AssertionError, match=said):
            laws.law_attend_equals_evict(policy, stream)


# A compiled step of one token at full budget launches five kernels: admit, the key and the value written, attention in
# two, the last of which evicts.
GPU = "cuda" if mx.cuda.is_available() else "metal"  # whose kernels MLX puts into a graph without a GPU
STEPS = {
    "h2o": h2o.Config(budget=16),
    "h2o-fading": h2o.Config(budget=16, decay=0.9),
    "h2o-observed": h2o.Config(budget=16, age_normalised=True),
    "tova": tova.Config(budget=16),
    "keyformer": keyformer.Config(budget=16),
    "keyformer-constant": keyformer.Config(budget=16, tau=1.5),
    "keyformer-additive": keyformer.Config(budget=16, noise="additive", anneal_from=9),
    "keyformer-greedy": keyformer.Config(budget=16, noise="additive", tau=0.0),
    "keyformer-silent": keyformer.Config(budget=16, noise="none"),
    "knorm": knorm.Config(budget=16),
    "knorm-high": knorm.Config(budget=16, keep="high"),
    "streaming_llm": streaming_llm.Config(budget=16),
    "cam-off": cam.Config(budget=16, merge="off"),
}
# CaM also looks for targets, and gives them the loser's value, and its key where it says so. SnapKV evicts in a launch
# of its own, after a sort in time where it pools. Keys that are seen without gaps are sorted, ranked and turned first.
MORE = {
    "cam": (7, cam.Config(budget=16)),
    "cam-observed": (7, cam.Config(budget=16, age_normalised=True, gate=False)),
    "cam-similar": (7, cam.Config(budget=16, merge="similarity")),
    "cam-nearest": (7, cam.Config(budget=16, targets="nearest", merge="similarity")),
    "cam-keys": (8, cam.Config(budget=16, merge_keys=True)),
    "snapkv": (7, snapkv.Config(budget=16)),
    "snapkv-max": (7, snapkv.Config(budget=16, window=4, pooling="max")),
    "snapkv-alone": (6, snapkv.Config(budget=16, kernel=1)),
    "h2o-contiguous": (8, h2o.Config(budget=16, placement=Contiguous(Rope(dims=8)))),
    "streaming_llm-contiguous": (8, streaming_llm.Config(budget=16, placement=Contiguous(Rope(dims=4)))),
}


@pytest.mark.parametrize(
    ("most", "config"), [*((5, config) for config in STEPS.values()), *MORE.values()], ids=[*STEPS, *MORE]
)
@pytest.mark.parametrize("dtype", [mx.float16, mx.float32])
def test_a_step_is_few_launches(most, config, dtype):
    policy = veloxfn.policy(config)
    state = full(policy, dtype=dtype)
    keys, values, queries = block(2, 2, 1, 8, dtype)

    def step(state, keys, values, queries):
        return veloxfn.attend(policy, policy.absorb(state, keys, values), queries)

    found = launches(mx.compile(step), state, keys, values, queries, backend=GPU)
    assert len(found.kernels) <= most, found.kernels
    assert set(found.copies) <= {"-> ScatterAxis"}, "the buffers are written in place, and nothing else is copied"


@pytest.mark.parametrize(
    ("count", "copied", "config"),
    [
        (3, 1, knorm.Config(budget=16)),
        (3, 1, knorm.Config(budget=16, keep="high")),
        (3, 1, streaming_llm.Config(budget=16)),
        (3, 3, streaming_llm.Config(budget=16, placement=Contiguous(Rope(dims=4)))),
        (5, 2, h2o.Config(budget=16)),
        (5, 2, tova.Config(budget=16)),
        (5, 2, keyformer.Config(budget=16)),
    ],
)
def test_an_update_is_the_write_and_one_launch_or_three(count, copied, config):
    """What needs no attention loses a slot where the arrival is given one. On CUDA so small a cache is copied."""
    policy = veloxfn.policy(config)
    state = full(policy, dtype=mx.float16)
    keys, values, queries = block(2, 2, 1, 8, mx.float16)

    def update(state, keys, values, queries):
        given = {"queries": queries} if config.needs_queries else {}
        return policy.update_batched(state, keys, values, **given)

    found = launches(mx.compile(update), state, keys, values, queries, backend=GPU)
    assert len(found.kernels) == (copied if GPU == "cuda" else count), found.kernels
    assert set(found.copies) <= {"-> ScatterAxis"}


def test_attend_without_until_takes_the_newest_tokens_wherever_they_are():
    """At full budget the first token of a block lies in the slot that was free, in front of older ones."""
    policy = h2o.policy(h2o.Config(budget=4, sink=0, recent=1))
    state = policy.init_state(1, 8, dtype=mx.float32)
    stream = mx.random.normal((1, 12, 8), key=mx.random.key(0))
    for t in range(9):
        token = stream[:, t : t + 1]
        _, state = veloxfn.attend(policy, policy.absorb(state, token, token), token[:, None])
    block = stream[:, 9:]
    state = policy.absorb(state, block, block)
    keys, values = policy.candidates(state)
    output, mass = ops.attend(block[:, None], keys, values, state.slots.positions)
    want = mx.fast.scaled_dot_product_attention(
        block[:, None], keys[:, None], values[:, None], scale=8**-0.5, mask=veloxfn.candidate_mask(policy.config, state)
    )
    assert mx.allclose(output, want, atol=1e-6)
    assert mx.allclose(mass.sum(), mx.array(3.0), atol=1e-5)


@pytest.mark.parametrize("method", [snapkv, cam, knorm, h2o])
def test_one_token_never_sees_a_slot_that_a_smaller_budget_left_free(method):
    small, large = (method.policy(method.Config(budget=budget)) for budget in (8, 12))
    stream = mx.random.normal((2, 12, 8), key=mx.random.key(1))
    state = small.init_state(2, 8, dtype=mx.float32)
    state = small.update_batched(
        state, stream[:, :11], stream[:, :11], queries=stream[:, None, :11] if small.config.needs_queries else None
    )
    token = stream[:, 11:]
    state = large.absorb(state, token, token)
    keys, values = large.candidates(state)
    mask = veloxfn.candidate_mask(large.config, state)[:, None]
    want = mx.fast.scaled_dot_product_attention(
        token[:, None], keys[:, None], values[:, None], scale=8**-0.5, mask=mask
    )
    assert not mask.all()
    assert mx.allclose(veloxfn.attend(large, state, token[:, None])[0], want, atol=1e-6)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("method", [snapkv, h2o])
def test_the_output_has_the_type_of_the_queries(method, count):
    policy = method.policy(method.Config(budget=8))
    x = mx.random.normal((1, count, 8), key=mx.random.key(2))
    state = policy.absorb(policy.init_state(1, 8, dtype=mx.float32), x, x)
    assert veloxfn.attend(policy, state, x[:, None].astype(mx.float16))[0].dtype == mx.float16


def test_nonsense_is_refused_by_name():
    policy = h2o.policy(h2o.Config(budget=8))
    x = mx.zeros((1, 1, 8))
    state = policy.absorb(policy.init_state(1, 8, dtype=mx.float32), x, x)
    for queries, scale, error, said in (
        (mx.zeros((1, 0, 1, 8)), None, ValueError, "G=0"),
        (mx.zeros((1, 1, 1, 8), mx.int32), None, TypeError, "int32"),
        (mx.zeros((1, 1, 1, 4)), None, ValueError, "queries must be"),
        (x[:, None], float("nan"), ValueError, "scale"),
        (x[:, None], -1.0, ValueError, "scale"),
    ):
        with pytest.raises(error, match=said):
            veloxfn.attend(policy, state, queries, scale=scale)
    keys, positions = mx.zeros((1, 9, 8)), mx.zeros((1, 9), mx.int32)
    for arguments, error, said in (
        ((x[:, None], keys, keys[:, :5], positions), ValueError, r"values must be \[N, n, Dv\] = \[1, 9, Dv\]"),
        ((x[:, None], keys[:, :4], keys[:, :4], positions), ValueError, "positions must be"),
        ((x[:, None], keys, keys, positions.astype(mx.int64)), TypeError, "positions must be int32"),
        ((x[:, None], keys, keys, positions, mx.zeros((2, 1), mx.int32)), ValueError, "until must be"),
    ):
        with pytest.raises(error, match=said):
            ops.attend(*arguments)
    seen = mx.zeros((1,), mx.int32)
    with pytest.raises(ValueError, match=r"mass must be \[N, n\] = \[1, 9\], got \[1, 8\]"):
        ops.evict_step(positions, seen, mx.zeros((1, 8)), sink=0, recent=0)
    with pytest.raises(TypeError, match="mass must be float32, got"):
        ops.evict_step(positions, seen, mx.zeros((1, 9), mx.float16), sink=0, recent=0)


def test_a_back_end_is_used_in_its_own_thread_only():
    inside, leave = threading.Event(), threading.Event()

    def other():
        with ops.using("host"):
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with ops.using("reference"):
        thread.start()
        assert inside.wait(10)
        assert backend_for(None) == "reference"
    before = backend_for(None)
    leave.set()
    thread.join()
    assert backend_for(None) == before != "host"
