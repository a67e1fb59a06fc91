"""Policies with one fault each, built around real ones; every factory maps a budget to a policy.

`SUSPECTS` names, for each, the law that must catch it.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import wraps

import mlx.core as mx

from veloxfn import h2o, knorm, streaming_llm
from veloxfn.base import Policy
from veloxfn.retention import retire
from veloxfn.testing import claims_for
from veloxfn.testing.laws import law_grouping_does_not_matter, law_poison_stays_in_its_row

SUSPECTS: dict[str, tuple[Callable[[int], Policy], str]] = {}
ARGUMENTS = {
    law_grouping_does_not_matter.__name__: lambda stream: ((stream.tokens,),),
    law_poison_stays_in_its_row.__name__: lambda stream: (0, stream.tokens // 2, float("nan")),
}


def caught_by(law: str, claims=claims_for):
    """Enter a factory into `SUSPECTS`, with the claims of the policy it pretends to be."""

    def enter(factory):
        factory.claims = claims
        SUSPECTS[factory.__name__] = (factory, law)
        return factory

    return enter


def low_norm(budget: int, **settings) -> Policy:
    return knorm.policy(knorm.Config(**({"budget": budget, "sink": min(1, budget - 1)} | settings)))


def window(budget: int, sink: int = 1) -> Policy:
    return streaming_llm.policy(streaming_llm.Config(budget=budget, sink=min(sink, budget - 1)))


def altered(policy: Policy, *, absorb=None, evict=None, **others) -> Policy:
    """The policy with `absorb` or `evict` replaced, and `update_batched` made of them."""
    absorb, evict = absorb or policy.absorb, evict or policy.evict

    def update_batched(state, keys, values, *, queries=None, attention=None, valid=None):
        return evict(absorb(state, keys, values, valid=valid), queries=queries, attention=attention)

    return policy._replace(absorb=absorb, evict=evict, update_batched=update_batched, **others)


def after_evict(policy: Policy, change) -> Policy:
    """The policy with `change(state)` applied to what a non-empty `evict` returns."""

    @wraps(policy.evict)
    def evict(state, *, queries=None, attention=None):
        done = policy.evict(state, queries=queries, attention=attention)
        return done if state.slots.arrived.shape[1] == 0 else change(done)

    return altered(policy, evict=evict)


def ranked_by(policy: Policy, importance) -> Policy:
    """The policy with another importance."""

    @wraps(policy.evict)
    def evict(state, *, queries=None, attention=None):
        policy.evict(state, queries=queries, attention=attention)  # its errors
        return state if state.slots.arrived.shape[1] == 0 else retire(state, importance(state), policy.config)

    return altered(policy, evict=evict)


def with_slots(state, **leaves):
    return state._replace(slots=state.slots._replace(**leaves))


# What is kept


@caught_by("law_protected_survive")
def sink_ignored(budget: int) -> Policy:
    claimed = low_norm(budget, sink=min(2, budget - 1))
    return low_norm(budget, sink=0)._replace(config=claimed.config)


@caught_by("law_protected_survive")
def recent_ignored(budget: int) -> Policy:
    claimed = low_norm(budget, sink=0, recent=budget // 2)
    return low_norm(budget, sink=0)._replace(config=claimed.config)


@caught_by("law_global_best")
def tie_flipped(budget: int) -> Policy:
    """Equal norms lose the newest."""
    policy = low_norm(budget)
    return ranked_by(policy, lambda state: -state.norms - 1e-4 * state.slots.positions)


@caught_by("law_budget_holds")
def one_row_too_many(budget: int) -> Policy:
    return low_norm(budget + 1)._replace(config=low_norm(budget).config)


@caught_by("law_nothing_lost_below_budget")
def one_row_too_few(budget: int) -> Policy:
    return low_norm(max(1, budget - 1), sink=0)._replace(config=low_norm(budget, sink=0).config)


@caught_by("law_does_not_freeze")
def frozen(budget: int) -> Policy:
    """Every arrival is the weakest."""
    policy = low_norm(budget)
    return ranked_by(policy, lambda state: -state.slots.positions.astype(mx.float32))


@caught_by("law_follows_the_oracle")
def strongest_head(budget: int) -> Policy:
    """Heads are combined by their sum, not their mean: the same order here, other masses."""
    policy = h2o.policy(h2o.Config(budget=budget, sink=min(1, budget - 1)))

    def evict(state, *, queries=None, attention=None):
        done = policy.evict(state, queries=queries, attention=attention)
        if queries is None or queries.shape[2] == 0:
            return done
        return done._replace(mass=done.mass * queries.shape[1])

    return altered(policy, evict=evict)


@caught_by("law_grouping_does_not_matter", lambda config: replace(claims_for(config), split_invariant=True))
def claims_too_much(budget: int) -> Policy:
    return h2o.policy(h2o.Config(budget=budget, sink=0))


@caught_by("law_content_does_not_matter", lambda config: replace(claims_for(config), content_independent=True))
def secretly_looks_at_keys(budget: int) -> Policy:
    return low_norm(budget)


@caught_by("law_nan_never_saves_a_slot")
def nan_saves_a_slot(budget: int) -> Policy:
    policy = low_norm(budget)
    return ranked_by(policy, lambda state: mx.where(mx.isnan(state.norms), mx.inf, -state.norms))


# Rows


@caught_by("law_batch_equals_rows")
def rows_leak(budget: int) -> Policy:
    """Norms are centred over the batch."""
    policy = low_norm(budget)
    return ranked_by(policy, lambda state: state.norms.mean(axis=0, keepdims=True) - 2 * state.norms)


@caught_by("law_poison_stays_in_its_row")
def poison_spreads(budget: int) -> Policy:
    """Norms are divided by the largest of the batch."""
    policy = low_norm(budget)
    return ranked_by(policy, lambda state: -state.norms / mx.maximum(state.norms.max(), 1e-6))


@caught_by("law_counts")
def padding_counts(budget: int) -> Policy:
    policy = window(budget)
    return altered(policy, absorb=lambda state, keys, values, *, valid=None: policy.absorb(state, keys, values))


# Layout


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
