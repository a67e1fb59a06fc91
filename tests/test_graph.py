"""What a step costs: its graph, its traces and its memory."""

import dataclasses
import io
import re
import subprocess
import sys

import mlx.core as mx
import pytest

import veloxfn
from veloxfn import cam, h2o, keyformer, knorm, ops, pyramidkv, snapkv, streaming_llm, tova

ROWS, DIM = 3, 8
CONFIGS = {
    "h2o": h2o.Config(budget=32),
    "h2o-decay": h2o.Config(budget=32, decay=0.9),
    "h2o-age": h2o.Config(budget=32, age_normalised=True),
    "h2o-proxy": h2o.Config(budget=32, query_source="key_proxy"),
    "keyformer": keyformer.Config(budget=32),
    "keyformer-additive": keyformer.Config(budget=32, noise="additive"),
    "cam": cam.Config(budget=32, sink=1, target_count=8),
    "cam-nearest": cam.Config(budget=32, sink=1, targets="nearest", merge="similarity", merge_keys=True),
    "tova": tova.Config(budget=32),
    "snapkv": snapkv.Config(budget=32, window=8),
    "pyramidkv": pyramidkv.Config(budget=32),
    "knorm": knorm.Config(budget=32),
    "streaming_llm": streaming_llm.Config(budget=32),
}
configs = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def block(config, count, rows=ROWS, dtype=mx.float32, seed=0):
    a, b, c = mx.random.split(mx.random.key(seed), 3)
    arrivals = {
        "keys": mx.random.normal((rows, count, DIM), key=a).astype(dtype),
        "values": mx.random.normal((rows, count, DIM), key=b).astype(dtype),
    }
    if config.needs_queries:
        arrivals["queries"] = mx.random.normal((rows, 2, count, DIM), key=c).astype(dtype)
    return arrivals


def full_state(config, rows=ROWS, dtype=mx.float32):
    policy = veloxfn.policy(config)
    state = policy.update_batched(policy.init_state(rows, DIM, dtype=dtype), **block(config, 70, rows, dtype, 1))
    mx.eval(state)
    return policy, state


def leaves(tree):
    return [tree] if isinstance(tree, mx.array) else [leaf for part in tree for leaf in leaves(part)]


def primitives(outputs):
    """Names of the graph's primitives."""
    text = io.StringIO()
    mx.export_to_dot(text, outputs)
    return re.findall(r'label ="(\w+)"', text.getvalue())


@configs
def test_the_graph_of_a_step_does_not_grow_with_rows_or_tokens_seen(config):
    """Lessons 39 and 40."""
    sizes = set()
    for rows, more in ((1, 0), (7, 0), (3, 40)):
        policy, state = full_state(config, rows)
        if more:
            state = policy.update_batched(state, **block(config, more, rows))
            mx.eval(state)
        arrivals = block(config, 1, rows)
        mx.eval(arrivals)
        after = policy.update_batched(state, **arrivals)
        sizes.add(len(primitives(leaves(after))))
    assert len(sizes) == 1, sizes
    assert sizes.pop() > 0


def test_lesson_37_the_graph_of_a_block_is_bounded():
    config = h2o.Config(budget=256)
    policy = h2o.policy(config)
    sizes = {}
    for count in (1, 4096):
        k = mx.zeros((4, count, 16))
        q = mx.zeros((4, 2, count, 16))
        mx.eval(k, q)
        state = policy.init_state(4, 16, dtype=mx.float32)
        sizes[count] = len(primitives(leaves(policy.update_batched(state, k, k, queries=q))))
    assert sizes[4096] < 64 * sizes[1], "a loop over tokens would have 4096 times as many"


def test_lesson_37_a_block_of_4096_tokens_keeps_no_matrix_of_queries_by_slots():
    config = h2o.Config(budget=256)
    policy = h2o.policy(config)
    rows, count, dim = 16, 4096, 16
    k, q = mx.zeros((rows, count, dim)), mx.zeros((rows, 1, count, dim))
    mx.eval(k, q)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval(policy.update_batched(policy.init_state(rows, dim, dtype=mx.float32), k, k, queries=q))
    peak = mx.get_peak_memory() - before
    assert peak < rows * count * count * 4 / 4, f"{peak / 2**20:.0f} MB"


@configs
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16])
def test_compiled_equals_eager_with_one_trace_in_steady_state(config, dtype):
    policy, state = full_state(config, dtype=dtype)
    traces = []

    def counted(state, arrivals):
        traces.append(1)
        return policy.update_batched(state, **arrivals)

    step = mx.compile(counted)
    eager = state
    for t in range(12):
        arrivals = block(config, 1, dtype=dtype, seed=10 + t)
        state, eager = step(state, arrivals), policy.update_batched(eager, **arrivals)
        assert type(state) is type(eager)
        for leaf, other in zip(leaves(state.slots), leaves(eager.slots), strict=True):
            assert leaf.dtype == other.dtype
            assert mx.array_equal(leaf, other)
        for leaf, other in zip(leaves(state[1:]), leaves(eager[1:]), strict=True):
            assert mx.allclose(leaf, other, rtol=1e-6)
    assert len(traces) == 1


@configs
def test_policy_functions_compile_as_they_are(config):
    policy, state = full_state(config)
    arrivals = block(config, 1, seed=3)
    keys, values, queries = arrivals["keys"], arrivals["values"], arrivals.get("queries")
    given = {} if queries is None else {"queries": queries}
    compiled = mx.compile(policy.update_batched)(state, keys, values, **given)
    assert mx.array_equal(compiled.slots.positions, policy.update_batched(state, **arrivals).slots.positions)
    absorbed = mx.compile(policy.absorb)(state, keys, values)
    assert mx.array_equal(mx.compile(policy.candidates)(absorbed)[0], policy.candidates(absorbed)[0])
    evicted = mx.compile(policy.evict)(absorbed, **given)
    assert mx.array_equal(mx.compile(policy.get_kv)(evicted)[1], policy.get_kv(evicted)[1])


@configs
def test_lesson_42_a_thousand_steps_keep_peak_memory_flat(config):
    rows = 256
    policy, state = full_state(config, rows)
    arrivals = block(config, 1, rows)
    mx.eval(arrivals)
    step = mx.compile(lambda state, arrivals: policy.update_batched(state, **arrivals))
    held, peaks = [], []
    for _ in range(4):
        mx.reset_peak_memory()
        for _ in range(250):
            state = step(state, arrivals)
            mx.eval(state)
        mx.synchronize()
        held.append(mx.get_active_memory())
        peaks.append(mx.get_peak_memory())
    # Which of a step's small buffers overlap is up to the scheduler: some 10 kB, while a step needs 200 kB and more.
    # The smallest array of a step has 256 elements: one kept by each of 250 steps would be 256 kB.
    assert max(held[1:]) - held[0] < 64_000, f"memory grows with the steps: {held}"
    assert max(peaks[1:]) - held[0] <= 1.25 * (peaks[0] - held[0]), peaks


@pytest.mark.skipif(mx.cuda.is_available(), reason="MLX's CUDA back end copies evaluated buffers that it writes into")
def test_lesson_42_a_step_writes_in_place():
    """A step over buffers of 64 MB, whose old state is let go of, takes next to no new memory."""
    config = streaming_llm.Config(budget=2**15 - 1)
    policy = streaming_llm.policy(config)
    x = mx.zeros((1, 2**15, 256))
    state = policy.update_batched(policy.init_state(1, 256, dtype=mx.float32), x, x)
    mx.eval(state)
    one = x[:, :1] + 0
    del x
    mx.eval(one)
    state = policy.update_batched(state, one, one)
    mx.eval(state)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    for _ in range(3):
        state = policy.update_batched(state, one, one)
        mx.eval(state)
    assert mx.get_peak_memory() - before < 2**22
    assert int(state.slots.seen[0]) == 2**15 + 4


@pytest.mark.parametrize("name", ["h2o", "keyformer", "cam", "tova", "snapkv"])
def test_lesson_39_update_batched_never_holds_a_block_that_goes_token_by_token(name):
    """With cadence "token" it needs less memory than `evict` after `absorb`, by the whole block or more."""
    policy = veloxfn.policy(dataclasses.replace(CONFIGS[name], cadence="token"))
    state, keys = policy.init_state(4, 32, dtype=mx.float32), mx.random.normal((4, 300, 32))
    mx.eval(state, keys)

    def peak(call):
        mx.eval(call())  # traces and compiles
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        mx.eval(call())
        return mx.get_peak_memory() - before

    whole = peak(lambda: policy.update_batched(state, keys, keys, queries=keys[:, None]))
    parts = peak(lambda: policy.evict(policy.absorb(state, keys, keys), queries=keys[:, None]))
    assert whole <= parts - 2 * keys.nbytes, "keys and values of the block"


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16])
def test_with_attention_given_no_key_is_read(dtype):
    """Keys and values enter only the write of the new row: nothing else of a step has a buffer among its inputs."""
    policy, state = full_state(h2o.Config(budget=32), dtype=dtype)
    one = mx.zeros((ROWS, 1, DIM), dtype)
    mass = mx.ones((ROWS, 33)) / 33
    readers = []

    def note(graph):
        if graph["type"] == "primitive" and (ROWS, 33, DIM) in [tuple(shape) for _, shape, _ in graph["inputs"]]:
            readers.append(graph["name"])

    def step(keys, values, positions, seen, stored_mass):
        slots = state.slots._replace(keys=keys, values=values, positions=positions, seen=seen)
        after = policy.update_batched(h2o.State(slots, stored_mass), one, one, attention=mass)
        return after.slots.keys, after.slots.values, after.slots.positions, after.mass

    slots = state.slots
    mx.export_function(note, step, slots.keys, slots.values, slots.positions, slots.seen, state.mass)
    assert readers == ["ScatterAxis", "ScatterAxis"], readers


def test_lesson_41_nothing_is_ranked_while_nothing_can_be_evicted():
    policy = h2o.policy(h2o.Config(budget=32))
    x = mx.zeros((2, 5, DIM))
    state = policy.update_batched(policy.init_state(2, DIM, dtype=mx.float32), x, x, queries=x[:, None])
    names = primitives(leaves(state))
    assert names
    assert not {"ArgReduce", "ArgPartition", "ArgSort"} & set(names)


@configs
def test_states_pass_through_vmap(config):
    policy, state = full_state(config, rows=4)
    arrivals = block(config, 1, rows=4)

    def one(state, arrivals):
        state, arrivals = (lift(tree) for tree in (state, arrivals))
        return [leaf[0] for leaf in leaves(policy.update_batched(state, **arrivals))]

    def lift(tree):
        if isinstance(tree, mx.array):
            return tree[None]
        if isinstance(tree, dict):
            return {name: lift(leaf) for name, leaf in tree.items()}
        return type(tree)(*(lift(leaf) for leaf in tree))

    with ops.using("reference"):
        mapped = mx.vmap(one)(state, arrivals)
    for leaf, other in zip(mapped, leaves(policy.update_batched(state, **arrivals)), strict=True):
        assert mx.allclose(leaf, other, rtol=1e-5)


def test_importing_the_library_needs_neither_mlx_lm_nor_hypothesis():
    names = ("mlx_lm", "hypothesis", "pytest", "transformers", "numpy")
    code = f"import sys, veloxfn; print([name for name in {names} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
