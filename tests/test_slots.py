"""Slots: where arrivals go, what stays where, rows as a batch."""

import mlx.core as mx
import pytest

import veloxfn
from veloxfn import h2o, knorm, ops, slots, streaming_llm


def tokens(first, count, rows=1, dim=2, dtype=mx.float32):
    """Keys [rows, count, dim] that name their token: first, first + 1, .."""
    line = mx.arange(first, first + count, dtype=mx.float32).astype(dtype)
    return mx.broadcast_to(line[None, :, None], (rows, count, dim))


def filled(config, count, rows=1):
    policy = veloxfn.policy(config)
    x = tokens(0, count, rows)
    return policy, policy.update_batched(policy.init_state(rows, 2, dtype=mx.float32), x, x)


def test_a_filling_buffer_is_preallocated_and_n_is_the_count():
    _, state = filled(streaming_llm.Config(budget=8), 3)
    assert state.slots.keys.shape == (1, 9, 2)
    assert state.slots.positions.tolist() == [[0, 1, 2]]
    assert state.slots.seen.tolist() == [3]


def test_at_full_budget_one_slot_is_free_and_the_next_token_goes_there():
    policy, state = filled(streaming_llm.Config(budget=4, sink=1), 6)
    assert sorted(state.slots.positions[0].tolist()) == [-1, 0, 3, 4, 5]
    free = state.slots.positions[0].tolist().index(-1)
    after = policy.absorb(state, tokens(6, 1), tokens(6, 1))
    assert after.slots.arrived.tolist() == [[free]]
    assert after.slots.positions[0, free].item() == 6
    assert after.slots.keys[0, free].tolist() == [6.0, 6.0]


def test_no_kept_slot_moves_in_a_one_token_step():
    policy, state = filled(streaming_llm.Config(budget=6, sink=2), 10)
    before = state.slots.positions[0].tolist()
    for t in range(10, 20):
        state = policy.update_batched(state, tokens(t, 1), tokens(t, 1))
        after = state.slots.positions[0].tolist()
        moved = [slot for slot in range(7) if after[slot] != before[slot]]
        assert len(moved) == 2, "only the written and the freed slot change"
        before = after


@pytest.mark.parametrize("have", [0, 2, 4, 5, 9])
@pytest.mark.parametrize("count", [1, 2, 5, 12])
def test_candidates_are_everything_kept_then_the_block_in_order(have, count):
    config = streaming_llm.Config(budget=4, sink=1)
    policy, state = filled(config, have)
    kept = [p for p in veloxfn.kept_positions(state)[0].tolist() if p >= 0]
    state = policy.absorb(state, tokens(have, count), tokens(have, count))
    keys, values = veloxfn.candidates(config, state)
    positions = state.slots.positions[0].tolist()
    assert keys.shape == values.shape == (1, len(kept) + count, 2)
    assert sorted(positions) == kept + list(range(have, have + count))
    assert keys[0, :, 0].tolist() == positions, "slot order of candidates is that of positions"
    if count > 1:
        tail = positions[-(count - 1) :]
        assert tail == list(range(have + 1, have + count))
        causal = veloxfn.candidate_mask(config, state)[0]
        lower_right = mx.tril(mx.ones((count, len(positions)), mx.bool_), k=len(positions) - count)
        if have < 4:
            assert mx.array_equal(causal, lower_right)
        assert causal.sum(axis=1).tolist() == lower_right.sum(axis=1).tolist()


def test_after_evict_candidates_are_what_get_kv_returns():
    config = streaming_llm.Config(budget=4, sink=1)
    policy, state = filled(config, 9)
    for have, want in zip(veloxfn.candidates(config, state), policy.get_kv(state), strict=True):
        assert mx.array_equal(have, want)
    assert policy.get_kv(state)[0][0, :, 0].tolist() == [0, 6, 7, 8]


def test_get_kv_before_evict_shows_all_since_nothing_is_lost_yet():
    config = streaming_llm.Config(budget=4, sink=1)
    policy, state = filled(config, 4)
    state = policy.absorb(state, tokens(4, 3), tokens(4, 3))
    assert veloxfn.kept_positions(state).tolist() == [[0, 1, 2, 3, 4, 5, 6]]
    assert policy.get_kv(state)[0][0, :, 0].tolist() == [0, 1, 2, 3, 4, 5, 6]


def test_lesson_15_padded_arrivals_are_not_stored_not_counted_and_not_seen():
    config = streaming_llm.Config(budget=4, sink=1)
    policy = veloxfn.policy(config)
    valid = mx.array([[False, False, True, True], [True, True, True, True]])
    keys = mx.where(valid[..., None], tokens(0, 4, rows=2), mx.nan)
    state = policy.absorb(policy.init_state(2, 2, dtype=mx.float32), keys, keys, valid=valid)
    assert state.slots.positions.tolist() == [[-1, -1, 0, 1], [0, 1, 2, 3]]
    assert state.slots.arrived.tolist() == [[-1, -1, 2, 3], [0, 1, 2, 3]]
    mask = veloxfn.candidate_mask(config, state)
    assert mask[0].tolist() == [[False] * 4, [False] * 4, [False, False, True, False], [False, False, True, True]]
    assert mask[1].tolist() == mx.tril(mx.ones((4, 4), mx.bool_)).tolist()
    state = policy.evict(state)
    assert veloxfn.tokens_seen(state).tolist() == veloxfn.tokens_kept(state).tolist() == [2, 4]
    assert veloxfn.next_position(config, state).tolist() == [2, 4]
    assert veloxfn.kept_positions(state).tolist() == [[-1, -1, 0, 1], [0, 1, 2, 3]]
    kept = policy.get_kv(state)[0]
    assert kept[0].tolist() == [[0, 0], [0, 0], [2, 2], [3, 3]], "zeros in front, and no NaN of a padded token"


def test_a_ragged_row_fills_its_holes_before_it_evicts():
    config = streaming_llm.Config(budget=4, sink=1)
    policy = veloxfn.policy(config)
    valid = mx.array([[False, False, True, True], [True, True, True, True]])
    state = policy.update_batched(
        policy.init_state(2, 2, dtype=mx.float32), tokens(0, 4, 2), tokens(0, 4, 2), valid=valid
    )
    for step in range(1, 4):
        x = tokens(10 * step, 1, 2)
        state = policy.update_batched(state, x, x)
        assert veloxfn.tokens_kept(state).tolist() == [min(2 + step, 4), 4]
    assert veloxfn.kept_positions(state).tolist() == [[0, 2, 3, 4], [0, 4, 5, 6]]
    padded = policy.update_batched(state, x, x, valid=mx.array([[True], [False]]))
    assert veloxfn.kept_positions(padded).tolist() == [[0, 3, 4, 5], [0, 4, 5, 6]]
    assert padded.slots.seen.tolist() == [6, 7]


def test_take_rows_and_concat_rows_move_every_leaf_together():
    config = h2o.Config(budget=6, sink=1, recent=2)
    policy = veloxfn.policy(config)
    mx_keys = mx.random.normal((3, 9, 4), key=mx.random.key(1))
    state = policy.update_batched(policy.init_state(3, 4, dtype=mx.float32), mx_keys, mx_keys, queries=mx_keys[:, None])
    swapped = veloxfn.take_rows(state, mx.array([2, 0, 2]))
    assert type(swapped) is h2o.State
    for leaf, other in zip([*state.slots, state.mass], [*swapped.slots, swapped.mass], strict=True):
        assert mx.array_equal(other[0], leaf[2])
        assert mx.array_equal(other[1], leaf[0])
    joined = veloxfn.concat_rows(veloxfn.take_rows(state, mx.array([0])), veloxfn.take_rows(state, mx.array([1, 2])))
    for leaf, other in zip([*state.slots, state.mass], [*joined.slots, joined.mass], strict=True):
        assert mx.array_equal(leaf, other)


def test_concat_rows_pads_a_shorter_state_with_free_slots_and_goes_on():
    config = streaming_llm.Config(budget=4, sink=1)
    policy, short = filled(config, 2)
    _, long = filled(config, 9)
    state = veloxfn.concat_rows(short, long)
    assert veloxfn.kept_positions(state).tolist() == [[-1, -1, 0, 1], [0, 6, 7, 8]]
    for step in range(3):
        x = tokens(20 + step, 1, 2)
        state = policy.update_batched(state, x, x)
    assert veloxfn.kept_positions(state).tolist() == [[0, 2, 3, 4], [0, 9, 10, 11]]
    keys = policy.get_kv(state)[0][:, :, 0].tolist()
    assert keys == [[0, 20, 21, 22], [0, 20, 21, 22]]


def test_concat_rows_refuses_what_does_not_fit():
    policy, state = filled(streaming_llm.Config(budget=4, sink=1), 3)
    waiting = policy.absorb(state, tokens(3, 1), tokens(3, 1))
    with pytest.raises(ValueError, match="evict before joining rows: a block of 1 tokens"):
        veloxfn.concat_rows(state, waiting)
    with pytest.raises(ValueError, match=r"\[5, 2\] and \[9, 2\]"):
        veloxfn.concat_rows(state, filled(streaming_llm.Config(budget=8, sink=1), 3)[1])
    with pytest.raises(TypeError, match="one method"):
        veloxfn.concat_rows(state, filled(knorm.Config(budget=4, sink=1), 3)[1])
    half = streaming_llm.init_state(streaming_llm.Config(budget=4, sink=1), 1, 2, dtype=mx.float16)
    with pytest.raises(TypeError, match=r"float32 and .*float16"):
        veloxfn.concat_rows(state, half)
    with pytest.raises(TypeError, match="integers"):
        veloxfn.take_rows(state, mx.array([0.0]))


def test_lesson_17_a_state_over_budget_shrinks_and_one_under_budget_grows():
    large, small = streaming_llm.Config(budget=9, sink=1), streaming_llm.Config(budget=4, sink=1)
    for seen in (3, 7, 9, 10, 15):
        _, state = filled(large, seen)
        state = streaming_llm.update_batched(small, state, tokens(seen, 1), tokens(seen, 1))
        live = [p for p in veloxfn.kept_positions(state)[0].tolist() if p >= 0]
        assert live == [0, *range(max(1, seen - 2), seen + 1)]
        for t in range(seen + 1, seen + 20):
            state = streaming_llm.update_batched(large, state, tokens(t, 1), tokens(t, 1))
        live = [p for p in veloxfn.kept_positions(state)[0].tolist() if p >= 0]
        assert live == [0, *range(seen + 12, seen + 20)]
        assert [int(x) for x in streaming_llm.get_kv(large, state)[0][0, :, 0].tolist()] == live


def test_lesson_14_a_block_larger_than_the_budget_leaves_a_full_cache():
    _, state = filled(streaming_llm.Config(budget=4, sink=1), 100)
    assert veloxfn.kept_positions(state).tolist() == [[0, 97, 98, 99]]


def test_lesson_22_empty_calls_and_odd_blocks():
    config = streaming_llm.Config(budget=8, sink=2)
    policy = veloxfn.policy(config)
    state, t = policy.init_state(1, 2, dtype=mx.float32), 0
    for count in (0, 1, 63, 0, 3, 1, 0):
        state = policy.update_batched(state, tokens(t, count), tokens(t, count))
        t += count
    assert veloxfn.kept_positions(state).tolist() == [[0, 1, 62, 63, 64, 65, 66, 67]]
    assert policy.get_kv(state)[1][0, :, 0].tolist() == [0, 1, 62, 63, 64, 65, 66, 67]


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_lesson_30_the_dtype_is_kept_and_value_width_is_its_own(dtype):
    policy = veloxfn.policy(streaming_llm.Config(budget=4, sink=1))
    for value_dim in (0, 3):
        state = policy.init_state(2, 2, value_dim, dtype=dtype)
        for count in (3, 4, 1):
            state = policy.update_batched(state, tokens(0, count, 2, 2, dtype), tokens(0, count, 2, value_dim, dtype))
        keys, values = policy.get_kv(state)
        assert keys.dtype == values.dtype == dtype
        assert (keys.shape, values.shape) == ((2, 4, 2), (2, 4, value_dim))


def test_streams_name_layer_and_head_not_the_place_in_the_batch():
    assert veloxfn.streams(2, 2, layer=3).tolist() == [196608, 196609, 196608, 196609]
    assert veloxfn.streams(1, 1).dtype == mx.uint32
    with pytest.raises(ValueError, match="heads=70000"):
        veloxfn.streams(1, 70000)


@pytest.mark.parametrize("have", [0, 2, 3, 4, 5, 11])
@pytest.mark.parametrize("count", [1, 3, 8])
def test_take_back_is_as_if_the_tokens_had_never_come(have, count):
    config = streaming_llm.Config(budget=4, sink=1)
    policy, state = filled(config, have)
    whole = policy.absorb(state, tokens(have, count), tokens(have, count))
    for taken in range(count + 1):
        back = slots.take_back(whole, taken, budget=4)
        fewer = policy.absorb(state, tokens(have, count - taken), tokens(have, count - taken))
        assert back.slots.seen.tolist() == [have + count - taken]
        for now in (back, fewer):
            assert (
                veloxfn.kept_positions(now)[0].max().item() == have + count - taken - 1 if have + count > taken else 1
            )
        live = [[p for p in veloxfn.kept_positions(now)[0].tolist() if p >= 0] for now in (back, fewer)]
        assert live[0] == live[1]
        after = [policy.evict(now) for now in (back, fewer)]
        for step in range(3):
            x = tokens(100 + step, 2)
            after = [policy.update_batched(now, x, x) for now in after]
            assert mx.array_equal(policy.get_kv(after[0])[0], policy.get_kv(after[1])[0])
    with pytest.raises(ValueError, match=f"{count} tokens, got {count + 1}"):
        slots.take_back(whole, count + 1, budget=4)


@pytest.mark.parametrize("sizes", [(4, 6), (4, 8), (8, 4), (4, 5), (6, 3)])
@pytest.mark.parametrize("count", [2, 3, 5])
def test_cadence_token_is_split_invariant_across_a_change_of_budget(sizes, count):
    before, after = (h2o.Config(budget=size, sink=1, recent=1, cadence="token") for size in sizes)
    keys = mx.random.normal((1, 11 + count, 4), key=mx.random.key(count))
    state = h2o.init_state(before, 1, 4, dtype=mx.float32)
    state = h2o.update_batched(before, state, keys[:, :11], keys[:, :11], queries=keys[:, None, :11])
    whole = h2o.update_batched(after, state, keys[:, 11:], keys[:, 11:], queries=keys[:, None, 11:])
    for t in range(11, 11 + count):
        now = slice(t, t + 1)
        state = h2o.update_batched(after, state, keys[:, now], keys[:, now], queries=keys[:, None, now])
    kept = [[p for p in veloxfn.kept_positions(each)[0].tolist() if p >= 0] for each in (whole, state)]
    assert kept[0] == kept[1]
    assert veloxfn.kept_positions(whole).shape[1] <= sizes[1]


def test_a_smaller_budget_shows_at_once():
    large, small = streaming_llm.Config(budget=8, sink=1), streaming_llm.Config(budget=4, sink=1)
    _, state = filled(large, 3)
    for t in (3, 4):
        state = streaming_llm.update_batched(small, state, tokens(t, 1), tokens(t, 1))
    assert veloxfn.kept_positions(state).tolist() == [[0, 2, 3, 4]]
    assert streaming_llm.get_kv(small, state)[0].shape == (1, 4, 2)


def test_lesson_37_cadence_token_refuses_a_block_that_one_graph_cannot_hold():
    config = h2o.Config(budget=8, cadence="token")
    x = mx.zeros((1, 4097, 2))
    with ops.using("reference"), pytest.raises(ValueError, match="at most 4096 tokens, got S = 4097"):
        h2o.update_batched(config, h2o.init_state(config, 1, 2, dtype=mx.float32), x, x, queries=x[:, None])
