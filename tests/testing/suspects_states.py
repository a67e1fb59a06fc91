"""Policies with wrong states, side effects or costs; one fault each."""

import random

import mlx.core as mx
from suspect_kit import after_evict, altered, caught_by, low_norm, ranked_by, window, with_slots

from veloxfn import h2o
from veloxfn.base import Policy


@caught_by("law_kept_rows_are_bit_copies")
def renumbered(budget: int) -> Policy:
    """Positions become ranks after every eviction."""

    def ranks(state):
        positions = state.slots.positions
        order = mx.argsort(mx.argsort(positions, axis=1), axis=1).astype(mx.int32)
        free = (positions < 0).sum(axis=1, keepdims=True).astype(mx.int32)
        return with_slots(state, positions=mx.where(positions < 0, -1, order - free))

    return after_evict(window(budget), ranks)


@caught_by("law_counts")
def seen_is_kept(budget: int) -> Policy:
    """The number of tokens seen is capped at the budget."""
    return after_evict(window(budget), lambda state: with_slots(state, seen=mx.minimum(state.slots.seen, budget)))


@caught_by("law_shapes_and_dtypes")
def dtype_changed(budget: int) -> Policy:
    return after_evict(window(budget), lambda state: with_slots(state, values=state.slots.values.astype(mx.float32)))


@caught_by("law_shapes_and_dtypes")
def number_in_the_state(budget: int) -> Policy:
    return after_evict(window(budget), lambda state: with_slots(state, seen=budget))


@caught_by("law_kept_rows_are_bit_copies")
def rows_rounded(budget: int) -> Policy:
    return after_evict(window(budget), lambda state: with_slots(state, keys=state.slots.keys * 1.125))


@caught_by("law_get_kv_is_temporal")
def read_in_slot_order(budget: int) -> Policy:
    policy = window(budget)

    def get_kv(state):
        length = min(state.slots.positions.shape[1], budget)
        return state.slots.keys[:, :length], state.slots.values[:, :length]

    return policy._replace(get_kv=get_kv)


@caught_by("law_candidates")
def evicts_before_attention(budget: int) -> Policy:
    """A block is cut to the budget before anything attended to it."""
    policy = window(budget)

    def absorb(state, keys, values, *, valid=None):
        absorbed = policy.absorb(state, keys, values, valid=valid)
        if keys.shape[1] == 0:
            return absorbed
        early = policy.evict(absorbed)
        return with_slots(early, arrived=mx.full(absorbed.slots.arrived.shape, -1, dtype=mx.int32))

    return altered(policy, absorb=absorb)


# Purity


@caught_by("law_inputs_are_untouched")
def writes_in_place(budget: int) -> Policy:
    policy = window(budget)

    def absorb(state, keys, values, *, valid=None):
        absorbed = policy.absorb(state, keys, values, valid=valid)
        if keys.shape[1]:
            state.slots.keys[:, 0] = 7.0
        return absorbed

    return altered(policy, absorb=absorb)


@caught_by("law_errors_change_nothing")
def half_updated_after_an_error(budget: int) -> Policy:
    policy = window(budget)

    def absorb(state, keys, values, *, valid=None):
        before = mx.array(state.slots.seen)
        state.slots.seen[:] = before + 1
        absorbed = policy.absorb(with_slots(state, seen=before), keys, values, valid=valid)
        state.slots.seen[:] = before
        return absorbed

    return altered(policy, absorb=absorb)


@caught_by("law_errors_change_nothing")
def casts_silently(budget: int) -> Policy:
    policy = window(budget)

    def absorb(state, keys, values, *, valid=None):
        kind = state.slots.keys.dtype
        return policy.absorb(state, keys.astype(kind), values.astype(kind), valid=valid)

    return altered(policy, absorb=absorb)


@caught_by("law_empty_block_is_a_no_op")
def empty_block_fades(budget: int) -> Policy:
    policy = h2o.policy(h2o.Config(budget=budget, sink=min(1, budget - 1)))

    def evict(state, *, queries=None, attention=None):
        done = policy.evict(state, queries=queries, attention=attention)
        return done._replace(mass=done.mass * 0.5)

    return altered(policy, evict=evict)


@caught_by("law_global_randomness_is_left_alone")
def reads_global_randomness(budget: int) -> Policy:
    policy = low_norm(budget)
    return ranked_by(policy, lambda state: mx.random.normal(state.norms.shape))


@caught_by("law_global_randomness_is_left_alone")
def moves_global_randomness(budget: int) -> Policy:
    def roll(state):
        random.random()
        return state

    return after_evict(window(budget), roll)


# Cost


@caught_by("law_step_moves_no_rows")
def gathers_every_step(budget: int) -> Policy:
    """Slots are put into temporal order after every step."""

    def sort(state):
        order = mx.argsort(state.slots.positions, axis=1)
        slots = state.slots
        return with_slots(
            state,
            keys=mx.take_along_axis(slots.keys, _padded(order, slots.keys.shape[1])[..., None], axis=1),
            values=mx.take_along_axis(slots.values, _padded(order, slots.keys.shape[1])[..., None], axis=1),
            positions=mx.take_along_axis(slots.positions, order, axis=1),
        )

    return after_evict(window(budget), sort)


def _padded(order: mx.array, room: int) -> mx.array:
    rest = mx.broadcast_to(mx.arange(order.shape[1], room, dtype=order.dtype), (order.shape[0], room - order.shape[1]))
    return mx.concatenate([order, rest], axis=1)


@caught_by("law_compiled_equals_eager")
def waits_for_the_device(budget: int) -> Policy:
    def wait(state):
        state.slots.seen.sum().item()
        return state

    return after_evict(window(budget), wait)


@caught_by("law_block_has_no_loop")
def loops_over_tokens(budget: int) -> Policy:
    policy = window(budget)

    def update_batched(state, keys, values, *, queries=None, attention=None, valid=None):
        for t in range(keys.shape[1]):
            counted = None if valid is None else valid[:, t : t + 1]
            state = policy.update_batched(state, keys[:, t : t + 1], values[:, t : t + 1], valid=counted)
        return state

    return policy._replace(update_batched=update_batched)


@caught_by("law_graph_does_not_grow_with_rows")
def loops_over_rows(budget: int) -> Policy:
    policy = low_norm(budget)

    def importance(state):
        return mx.concatenate([-state.norms[row : row + 1] for row in range(state.norms.shape[0])], axis=0)

    return ranked_by(policy, importance)


@caught_by("law_no_selection_below_budget")
def always_selects(budget: int) -> Policy:
    def look(state):
        first = mx.argmin(state.slots.positions, axis=1, keepdims=True)
        return with_slots(state, positions=mx.where(first >= 0, state.slots.positions, -1))

    return after_evict(window(budget), look)


@caught_by("law_memory_is_flat")
def remembers_everything(budget: int) -> Policy:
    old: list[mx.array] = []

    def keep(state):
        old.append(state.slots.keys)
        return state

    return after_evict(window(budget), keep)


# Attention


@caught_by("law_attend_equals_evict")
def candidates_in_temporal_order(budget: int) -> Policy:
    """Candidates in another order than the slots, whose positions say what a query sees."""
    policy = h2o.policy(h2o.Config(budget=budget, sink=min(1, budget - 1)))

    def candidates(state):
        found = policy.candidates(state)
        if state.slots.arrived.shape[1] == 0:
            return found
        order = mx.argsort(state.slots.positions, axis=1)[..., None]
        keys, values = (mx.take_along_axis(array, order, axis=1) for array in found)
        return keys, values

    return policy._replace(candidates=candidates)


@caught_by("law_compiled_attend_equals_eager")
def candidates_wait_for_the_device(budget: int) -> Policy:
    policy = window(budget)

    def candidates(state):
        state.slots.seen.sum().item()
        return policy.candidates(state)

    return policy._replace(candidates=candidates)
