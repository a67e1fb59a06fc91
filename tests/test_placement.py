"""Contiguous placement by hand: what is stored, what is seen, where the next token goes."""

import importlib
import math

import mlx.core as mx
import numpy as np
import pytest

import veloxfn
from veloxfn import Absolute, Contiguous, Rope, h2o, knorm, ops, placement, streaming_llm, tova
from veloxfn.placement import ranks, rotate, seen_keys
from veloxfn.slots import append, empty, take_back

QUARTER = Rope(2, freqs=(2 / math.pi,))  # a quarter turn per position
COMPASS = {0: (1, 0), 1: (0, 1), 2: (-1, 0), 3: (0, -1)}


def close(found, expected):
    return np.allclose(np.array(found), np.array(expected), atol=1e-6)


def streaming(budget=4, sink=1, rope=QUARTER):
    return streaming_llm.Config(budget=budget, sink=sink, placement=Contiguous(rope))


def arriving(place):
    """The key of a token that the model rotates at `place`, from (1, 0)."""
    return mx.array([[[math.cos(place * math.pi / 2), math.sin(place * math.pi / 2)]]])


def decode(config, state, count):
    for _ in range(count):
        key = arriving(veloxfn.next_position(config, state).item())
        state = streaming_llm.update_batched(config, state, key, key)
    return state


class TestSettings:
    @pytest.mark.parametrize(
        ("make", "error", "message"),
        [
            (lambda: Rope(3), ValueError, "dims must be even, got 3"),
            (lambda: Rope(0), ValueError, "dims must be >= 2, got 0"),
            (lambda: Rope(4.0), TypeError, "dims must be an int, got 4.0"),
            (lambda: Rope(4, base=0.0), ValueError, "base must be a finite number in .* got 0.0"),
            (lambda: Rope(4, base=math.nan), ValueError, "base must be a finite number"),
            (lambda: Rope(4, scale=-1.0), ValueError, "scale must be a finite number in .* got -1.0"),
            (lambda: Rope(4, traditional=1), TypeError, "traditional must be a bool, got 1"),
            (lambda: Rope(4, freqs=(1.0,)), ValueError, "freqs must be dims / 2 = 2 numbers, got 1"),
            (lambda: Rope(4, freqs=[1.0, 2.0]), TypeError, "freqs must be tuple, got"),
            (lambda: Rope(4, freqs=(1.0, 0.0)), ValueError, r"freqs\[1\] must be a finite number in .* got 0.0"),
            (lambda: Rope(4, freqs=(math.nan, 1.0)), ValueError, r"freqs\[0\] must be a finite number"),
            (lambda: Rope(4, base=500.0, freqs=(1.0, 2.0)), ValueError, "give one of them, got base=500.0"),
            (lambda: Contiguous(10000.0), TypeError, "rope must be Rope, got 10000.0"),
            (lambda: h2o.Config(placement=Rope(4)), TypeError, "placement must be Absolute or Contiguous, got Rope"),
        ],
    )
    def test_nonsense_is_refused(self, make, error, message):
        with pytest.raises(error, match=message):
            make()

    def test_more_rotated_dims_than_the_key_has(self):
        with pytest.raises(ValueError, match="dims must be <= the key dimension, got dims=8, D=4"):
            knorm.init_state(knorm.Config(placement=Contiguous(Rope(8))), 1, 4)
        with pytest.raises(ValueError, match="got dims=8, D=4"):
            rotate(Rope(8), mx.ones((1, 4)), start=mx.zeros((1,)), to=mx.ones((1,)))

    def test_a_state_of_the_other_placement(self):
        here, there = streaming(), streaming_llm.Config(budget=4, sink=1)
        key = mx.ones((1, 1, 2), mx.float16)
        for made, used in ((here, there), (there, here)):
            state = streaming_llm.update_batched(made, streaming_llm.init_state(made, 1, 2), key, key)
            with pytest.raises(ValueError, match=f"placement={type(used.placement).__name__} needs slots that hold"):
                streaming_llm.get_kv(used, state)
        with pytest.raises(ValueError, match="one placement, got rotations of 5 and 0 slots"):
            veloxfn.concat_rows(streaming_llm.init_state(here, 1, 2), streaming_llm.init_state(there, 1, 2))


def test_survivors_are_seen_at_their_ranks_and_the_next_token_behind_them():
    config = streaming()
    state = streaming_llm.init_state(config, 1, 2, dtype=mx.float32)
    places = []
    for _ in range(10):
        places.append(veloxfn.next_position(config, state).item())
        state = decode(config, state, 1)
        keys, _ = streaming_llm.get_kv(config, state)
        assert close(keys[0], [COMPASS[rank] for rank in range(len(keys[0]))])
    assert places == [0, 1, 2, 3, 4, 4, 4, 4, 4, 4]
    assert veloxfn.kept_positions(state).tolist() == [[0, 7, 8, 9]]
    live = state.slots.positions >= 0
    assert sorted(mx.where(live, state.slots.rotations, -1)[0].tolist()) == [-1, 0, 4, 4, 4]


def test_keys_are_stored_as_they_arrived():
    config = streaming()
    state = decode(config, streaming_llm.init_state(config, 1, 2, dtype=mx.float32), 9)
    index = {position: slot for slot, position in enumerate(state.slots.positions[0].tolist()) if position >= 0}
    for position in (6, 7, 8):
        slot = index[position]
        assert state.slots.rotations[0, slot].item() == 4
        assert mx.array_equal(state.slots.keys[0, slot], arriving(4)[0, 0])


def test_a_block_is_seen_where_the_model_rotated_it():
    config = streaming()
    state = decode(config, streaming_llm.init_state(config, 1, 2, dtype=mx.float32), 7)
    block = mx.concatenate([arriving(place) for place in (4, 5, 6)], axis=1)
    absorbed = streaming_llm.absorb(config, state, block, block)
    keys, _ = veloxfn.candidates(config, absorbed)
    assert ranks(absorbed.slots).tolist()[0][-2:] == [5, 6]
    assert mx.array_equal(keys[:, -2:], block[:, 1:]), "not turned, so bit for bit"
    assert veloxfn.next_position(config, absorbed).tolist() == [4]
    state = streaming_llm.evict(config, absorbed)
    assert close(streaming_llm.get_kv(config, state)[0][0], [COMPASS[rank] for rank in range(4)])
    assert veloxfn.kept_positions(state).tolist() == [[0, 7, 8, 9]]


def test_padded_arrivals_take_no_place():
    config = streaming()
    state = streaming_llm.init_state(config, 2, 2, dtype=mx.float32)
    valid = mx.array([[True, False, True], [False, True, True]])
    keys = mx.concatenate([arriving(0), arriving(0), arriving(1)], axis=1)
    keys = mx.concatenate([keys, keys], axis=0)
    state = streaming_llm.update_batched(config, state, keys, keys, valid=valid)
    assert veloxfn.next_position(config, state).tolist() == [2, 2]
    live = state.slots.positions >= 0
    assert mx.where(live, state.slots.rotations[:, :3], -1).tolist() == [[0, -1, 1], [-1, 0, 1]]
    seen, _ = streaming_llm.get_kv(config, state)
    for row in range(2):
        assert close(seen[row], [(0, 0), COMPASS[0], COMPASS[1]])


def test_arrivals_taken_back_leave_nothing():
    config = streaming()
    state = decode(config, streaming_llm.init_state(config, 1, 2, dtype=mx.float32), 7)
    block = mx.concatenate([arriving(4), arriving(5)], axis=1)
    for left in (0, 1):
        again = take_back(streaming_llm.absorb(config, state, block, block), 2 - left, budget=4)
        assert again.slots.rotations.shape == again.slots.keys.shape[:2]
        again = streaming_llm.evict(config, again)
        plain = state if left == 0 else streaming_llm.update_batched(config, state, block[:, :1], block[:, :1])
        for one, other in zip(
            streaming_llm.get_kv(config, decode(config, again, 2)),
            streaming_llm.get_kv(config, decode(config, plain, 2)),
            strict=True,
        ):
            assert mx.array_equal(one, other)


def test_budgets_that_change():
    """Rotations go with their keys to a larger budget and to a smaller one."""
    small, large = streaming(4), streaming(6)
    state = streaming_llm.init_state(small, 1, 2, dtype=mx.float32)
    for config, count in ((small, 7), (large, 5), (small, 1), (small, 3), (large, 1)):
        state = decode(config, state, count)
        assert state.slots.rotations.shape == state.slots.keys.shape[:2]
        seen, _ = streaming_llm.get_kv(config, state)
        kept = range(veloxfn.tokens_kept(state).item())
        assert close(seen[0, -len(kept) :], [COMPASS[rank % 4] for rank in kept])


def test_rows_that_are_taken_and_joined_bring_their_rotations():
    config = streaming()
    state = streaming_llm.init_state(config, 2, 2, dtype=mx.float32)
    key = mx.concatenate([arriving(0), arriving(3)], axis=0)
    state = streaming_llm.update_batched(config, state, key, key)
    for _ in range(6):
        place = veloxfn.next_position(config, state)[0].item()
        key = mx.concatenate([arriving(place)] * 2, axis=0)
        state = streaming_llm.update_batched(config, state, key, key)
    joined = veloxfn.concat_rows(veloxfn.take_rows(state, mx.array([1])), veloxfn.take_rows(state, mx.array([0])))
    for one, other in zip(streaming_llm.get_kv(config, state), streaming_llm.get_kv(config, joined), strict=True):
        assert mx.array_equal(one[::-1], other)


def test_cadence_token_scores_a_block_as_if_it_came_one_by_one():
    """The keys of a block come rotated behind what was kept before it, the queries too; both are moved up together."""
    rope = Rope(4, base=3.0)
    config = tova.Config(budget=5, sink=1, cadence="token", placement=Contiguous(rope))
    raw, asked = mx.random.normal((2, 30, 4), key=mx.random.key(0)), mx.random.normal((2, 30, 4), key=mx.random.key(1))

    def run(sizes):
        state, start = tova.init_state(config, 2, 4, dtype=mx.float32), 0
        for size in sizes:
            place = veloxfn.next_position(config, state)[:, None] + mx.arange(size)
            turned = [
                rotate(rope, x[:, start : start + size], start=mx.zeros_like(place), to=place) for x in (raw, asked)
            ]
            values = raw[:, start : start + size]
            state = tova.update_batched(config, state, turned[0], values, queries=turned[1][:, None])
            start += size
        return veloxfn.kept_positions(state).tolist(), tova.get_kv(config, state)

    kept, (keys, values) = run([1] * 30)
    other, (other_keys, other_values) = run([12, 11, 7])
    assert kept == other
    assert mx.array_equal(values, other_values)
    assert mx.allclose(keys, other_keys, atol=1e-5)


class TestRotate:
    def test_a_quarter_turn(self):
        vector = mx.array([[2.0, 3.0]])
        found = rotate(QUARTER, vector, start=mx.array([5]), to=mx.array([4]))
        assert close(found, [(3, -2)])

    def test_pairs(self):
        vector = mx.array([[1.0, 2.0, 3.0, 4.0, 9.0]])
        one, two = mx.array([0]), mx.array([1])
        rope = {"freqs": (2 / math.pi, 1 / math.pi)}  # a quarter and a half turn
        assert close(rotate(Rope(4, **rope), vector, start=one, to=two), [(-3, -2, 1, -4, 9)])
        assert close(rotate(Rope(4, traditional=True, **rope), vector, start=one, to=two), [(-2, 1, -3, -4, 9)])
        assert close(rotate(Rope(4, scale=2.0, **rope), vector, start=one, to=two), [(-1, 2, -3, 4, 9)])

    @pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
    def test_equal_positions_give_the_bits_back(self, dtype):
        vector = mx.array([[-0.0, math.inf, math.nan, -1.5], [0.0, -math.inf, 1.0, math.nan]], dtype)
        place = mx.array([7, 70000])
        found = rotate(Rope(4), vector, start=place, to=place)
        unsigned = mx.uint32 if dtype == mx.float32 else mx.uint16
        assert found.dtype == dtype
        assert mx.array_equal(mx.view(found, unsigned), mx.view(vector, unsigned))

    def test_far_positions(self):
        """Sine and cosine stay right where angles are large."""
        start, to = mx.array([131072, 100003, 65536, 9, 1000003]), mx.array([0, 4, 65535, 131072, 2])
        vector = mx.broadcast_to(mx.array([1.0, 0.0]), (5, 2))
        found = np.array(rotate(Rope(2), vector, start=start, to=to)).astype(np.float64)
        angle = (np.array(to) - np.array(start)).astype(np.float64)
        assert np.allclose(found, np.stack([np.cos(angle), np.sin(angle)], axis=1), atol=2e-7)

    def test_compiled_and_mapped(self):
        rope = Rope(4, base=50.0, traditional=True)
        vectors = mx.random.normal((3, 6, 8), key=mx.random.key(0))
        start, to = (mx.random.randint(0, 50, (3, 6), key=mx.random.key(seed)) for seed in (1, 2))

        def turn(vectors, start, to):
            return rotate(rope, vectors, start=start, to=to)

        expected = turn(vectors, start, to)
        assert mx.allclose(mx.compile(turn)(vectors, start, to), expected, atol=1e-6)
        with ops.using("reference"):
            assert mx.allclose(mx.vmap(turn)(vectors, start, to), expected, atol=1e-6)

    def test_queries_of_several_heads(self):
        queries = mx.random.normal((2, 3, 5, 4), key=mx.random.key(0))
        start, to = mx.array([[1], [2]]), mx.arange(10).reshape(2, 5)
        found = rotate(Rope(4), queries, start=start[:, None], to=to[:, None])
        for row in range(2):
            for head in range(3):
                alone = rotate(Rope(4), queries[row, head], start=mx.broadcast_to(start[row], (5,)), to=to[row])
                assert mx.allclose(found[row, head], alone, atol=1e-6)


def test_ranks_count_older_live_slots():
    slots = empty(5, 1, 2, None, mx.float32, None, placement=Contiguous(QUARTER))
    keys = mx.ones((1, 4, 2))
    slots = append(slots, keys, keys, mx.array([[True, False, True, True]]), budget=5)
    live = slots.positions >= 0
    assert mx.where(live, ranks(slots), -1).tolist() == [[0, -1, 1, 2]]
    moved = slots._replace(positions=mx.array([[7, -1, 3, 9]]))
    assert mx.where(live, ranks(moved), -1).tolist() == [[1, -1, 0, 2]]


def test_absolute_placement_sees_what_is_stored():
    config = h2o.Config(budget=4, sink=1)
    assert config.placement == Absolute()
    state = h2o.init_state(config, 1, 2, dtype=mx.float32)
    x = mx.random.normal((1, 3, 2), key=mx.random.key(0))
    state = h2o.absorb(config, state, x, x)
    assert state.slots.rotations.shape == (1, 0)
    assert mx.array_equal(seen_keys(config.placement, state.slots), x)
    assert veloxfn.next_position(config, state).tolist() == [3]


@pytest.mark.parametrize("gpu", [False, True])
def test_both_ways_to_take_sine_and_cosine(monkeypatch, gpu):
    """The polynomials of a CPU, and MLX's functions on a GPU: run here by their definition."""
    turning = importlib.import_module("veloxfn.ops.rotate_by")
    for module in (placement, turning):
        monkeypatch.setattr(module, "on_gpu", lambda: gpu)
    rope = Rope(8, base=500.0, scale=0.5)
    start, to = mx.array([[0, 7, 4000, 12], [5, 5, 1, 90000]]), mx.array([[9, 0, 3, 12], [3999, 4, 1, 2]])
    inverse = placement._inverse(rope)
    assert np.allclose(np.array(inverse), 500.0 ** (-np.arange(4) / 4), rtol=5e-7)
    found = turning._sine_cosine.__wrapped__(start[..., None], to[..., None], inverse, mx.array(0.5))
    frequencies = np.array(inverse)
    angles = [np.float32(0.5) * np.array(place)[..., None].astype(np.float32) * frequencies for place in (to, start)]
    exact = angles[0].astype(np.float64) - angles[1].astype(np.float64)
    for one, expected in zip(found, (np.sin(exact), np.cos(exact)), strict=True):
        assert np.allclose(np.array(one), expected, atol=4e-7)
