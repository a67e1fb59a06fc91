"""Reading a state: what the current block attends to, and what is kept."""

from __future__ import annotations

import mlx.core as mx

from veloxfn.base import Retention, State
from veloxfn.evidence import arrival_positions, visible_to
from veloxfn.placement import Contiguous, live_count, rope_for, rotate, seen_keys
from veloxfn.slots import contents, ordered

__all__ = ["candidate_mask", "candidates", "get_kv", "next_position"]


def candidates(config: Retention, state: State) -> tuple[mx.array, mx.array]:
    """What the block absorbed last attends to: everything kept before it and the whole block.

    Slots are in no temporal order, but all kept ones are older than the block and its tokens come last, in order (a
    single token at full budget: anywhere). So lower-right causal masking is exact, and no mask for one token; with
    padding, joined rows or a budget that was raised since, which leave free slots, use `candidate_mask`.

    Args:
        config: the method's config.
        state: a state after `absorb`; after `evict` the result is `get_kv`'s.

    Returns:
        keys [N, n, D] and values [N, n, Dv].
    """
    slots = state.slots
    if slots.arrived.shape[1] == 0:
        return get_kv(config, state)
    length = slots.positions.shape[1]
    values = slots.values if length == slots.values.shape[1] else slots.values[:, :length]
    return seen_keys(config.placement, slots), values


def candidate_mask(config: Retention, state: State) -> mx.array:
    """Which candidates each arrival of the block sees: live slots that are not later than itself.

    Returns:
        [N, S, n] bool in the slot order of `candidates`; all False for a padded arrival, whose output is to be ignored.
    """
    return visible_to(state.slots, arrival_positions(state.slots))


def get_kv(config: Retention, state: State) -> tuple[mx.array, mx.array]:
    """Kept keys and values in temporal order.

    Returns:
        keys [N, min(n, budget), D], placed as the config says, and values [N, min(n, budget), Dv], zeros in front where
        a row holds fewer tokens; `kept_positions` names the rows. With a block awaiting eviction nothing has been lost
        yet: all n slots.
    """
    slots = state.slots
    index, positions = ordered(slots)
    live = positions >= 0
    keys, values = contents(slots.keys, index), contents(slots.values, index)
    rope = rope_for(config.placement, slots)
    if rope is not None:
        start = mx.take_along_axis(slots.rotations, index, axis=1)
        keys = rotate(rope, keys, start=start, to=mx.cumsum(live.astype(mx.int32), axis=1) - 1)
    return mx.where(live[..., None], keys, 0), mx.where(live[..., None], values, 0)


def next_position(config: Retention, state: State) -> mx.array:
    """Position, in the model's rotary embedding, of each row's next token: [N] int32.

    The tokens seen, or under `Contiguous` the tokens kept, those of a block that awaits eviction up to the budget.
    """
    if not isinstance(config.placement, Contiguous):
        return state.slots.seen
    live = live_count(state.slots)
    return mx.minimum(live, config.budget) if state.slots.arrived.shape[1] else live
