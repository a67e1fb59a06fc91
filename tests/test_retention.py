"""The one eviction rule: protection, order, ties, budgets."""

import math

import mlx.core as mx
import pytest

from veloxfn import h2o, streaming_llm
from veloxfn.base import Slots
from veloxfn.ops import weakest
from veloxfn.retention import protected, rank, retire

INF, NAN = math.inf, math.nan


def slots_at(positions, seen=None):
    """Slots of one row at the given positions, with keys that name them."""
    positions = mx.array([positions], dtype=mx.int32)
    keys = positions[..., None].astype(mx.float32)
    seen = mx.array([max(positions[0].tolist()) + 1 if seen is None else seen], dtype=mx.int32)
    return Slots(
        keys,
        keys + 0,
        positions,
        mx.zeros((1, 1), mx.int32),
        seen,
        mx.zeros((1,), mx.uint32),
        mx.zeros((1, 0), mx.int32),
    )


def order_of(positions, importance, sink=0, recent=0):
    """Positions weakest first, live ones only."""
    slots = slots_at(positions)
    order = mx.argsort(rank(slots, mx.array([importance]), sink=sink, recent=recent), axis=1)[0].tolist()
    return [positions[slot] for slot in order if positions[slot] >= 0]


def retired(positions, importance, **settings):
    config = h2o.Config(**settings)
    slots = slots_at(positions)
    state = retire(h2o.State(slots, mx.array([importance])), mx.array([importance]), config)
    return sorted(p for p in state.slots.positions[0].tolist() if p >= 0), state


def test_lesson_10_ties_lose_oldest_first_whatever_the_slot_order():
    assert order_of([3, 0, 2, 1], [1.0, 1.0, 1.0, 1.0]) == [0, 1, 2, 3]
    assert order_of([3, 0, 2, 1], [0.0, -0.0, 0.0, -0.0]) == [0, 1, 2, 3]


def test_importance_orders_over_the_whole_range_of_float32():
    values = [-INF, -3e38, -1.0, -1e-45, 0.0, 1e-45, 1.0, 3e38, INF]
    positions = [4, 8, 1, 0, 7, 3, 2, 6, 5]
    assert order_of(positions, values) == positions


def test_lesson_12_a_nan_never_saves_a_slot_and_never_costs_a_sink():
    assert order_of([0, 1, 2, 3], [0.0, NAN, -INF, 1.0]) == [1, 2, 0, 3]
    assert order_of([0, 1, 2, 3], [NAN, NAN, NAN, 5.0], sink=1) == [1, 2, 3, 0]


def test_lesson_11_a_protected_slot_goes_last_even_against_infinity():
    assert order_of([0, 1, 2, 3], [-INF, INF, INF, -5.0], sink=1, recent=1) == [1, 2, 0, 3]


def test_free_slots_rank_below_everything():
    slots = slots_at([-1, 0, 1])
    assert weakest(mx.array([[INF, -INF, NAN]]), slots.positions, slots.seen, sink=0, recent=0).tolist() == [0]


def test_protected_are_the_first_and_the_last_arrivals():
    slots = slots_at([0, 5, -1, 1, 9, 8], seen=10)
    assert protected(slots, sink=2, recent=2).tolist() == [[True, False, False, True, True, True]]
    assert not protected(slots, sink=0, recent=0).any()


@pytest.mark.parametrize("size", [5, 6, 9])
def test_exactly_the_budget_stays_when_all_are_equal(size):
    kept, state = retired(list(range(size)), [1.0] * size, budget=4, sink=1, recent=1)
    assert kept == [0, *range(size - 3, size)]
    assert state.slots.positions.shape == (1, 5)
    assert state.slots.arrived.shape == (1, 0)
    for slot, position in enumerate(state.slots.positions[0].tolist()):
        if position >= 0:
            assert state.slots.keys[0, slot, 0].item() == position, "keys move with their slot"


def test_nothing_is_evicted_within_the_budget():
    kept, state = retired([0, 1, 2], [1.0, NAN, 0.0], budget=4, sink=1)
    assert kept == [0, 1, 2]
    assert state.mass.shape == (1, 3)


def test_columns_go_with_their_slots():
    _, state = retired([0, 1, 2, 3, 4, 5], [9.0, 1.0, 8.0, 2.0, 7.0, 3.0], budget=3, sink=0, recent=0)
    pairs = {(p, m) for p, m in zip(state.slots.positions[0].tolist(), state.mass[0].tolist(), strict=True) if p >= 0}
    assert pairs == {(0, 9.0), (2, 8.0), (4, 7.0)}


def test_importance_by_position_is_streaming_llm():
    config = streaming_llm.Config(budget=4, sink=1)
    policy = streaming_llm.policy(config)
    state = other = policy.init_state(1, 1, dtype=mx.float32)
    for t in range(12):
        x = mx.full((1, 1, 1), t, mx.float32)
        state = policy.update_batched(state, x, x)
        absorbed = policy.absorb(other, x, x)
        other = retire(absorbed, absorbed.slots.positions.astype(mx.float32), config)
        assert mx.array_equal(state.slots.positions, other.slots.positions)


def test_dispose_sees_the_losers_before_they_go():
    for size in (5, 8):
        seen = []

        def dispose(state, left, seen=seen):
            seen.append(mx.where(left < 0, state.slots.positions, -1)[0].tolist())
            return state

        importance = mx.arange(size, dtype=mx.float32)[None]
        state = h2o.State(slots_at(list(range(size))), importance)
        retire(state, importance, h2o.Config(budget=4, sink=0, recent=0), dispose=dispose)
        assert sorted(p for p in seen[0] if p >= 0) == list(range(size - 4))


def test_shared_heads_average_importance_over_whole_groups():
    keys = mx.zeros((4, 6, 1))
    positions = mx.broadcast_to(mx.arange(6, dtype=mx.int32), (4, 6))
    none = mx.zeros((4, 0), mx.int32)
    slots = Slots(keys, keys, positions, positions[:, :1], mx.full((4,), 6, mx.int32), mx.zeros((4,), mx.uint32), none)
    importance = mx.array([[9, 0, 0, 0, 0, 0], [0, 0, 0, 4, 0, 0], [0, 8, 0, 0, 0, 0], [0, 0, 0, 0, 0, 3]], mx.float32)
    config = h2o.Config(budget=2, sink=0, recent=0, shared_heads=2)
    state = retire(h2o.State(slots, importance), importance, config)
    kept = [sorted(p for p in row if p >= 0) for row in state.slots.positions.tolist()]
    assert kept == [[0, 3], [0, 3], [1, 5], [1, 5]]
    with pytest.raises(ValueError, match="shared_heads=3, N=4"):
        retire(h2o.State(slots, importance), importance, h2o.Config(budget=2, sink=0, shared_heads=3))


def test_importance_of_another_shape_is_refused():
    slots = slots_at([0, 1, 2])
    with pytest.raises(ValueError, match=r"importance must be \[N, n\] = \[1, 3\], got \[1, 2\]"):
        retire(h2o.State(slots, mx.zeros((1, 3))), mx.zeros((1, 2)), h2o.Config(budget=2, sink=0))
