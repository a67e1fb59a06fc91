"""The only eviction: protect, select, dispose, free.

Slots are ranked by (class, importance, position), weakest first, with the classes free < NaN < unprotected < protected.
Ties lose oldest first, a NaN never saves a slot, and a protected slot goes last even against +inf.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar, cast

import mlx.core as mx

from veloxfn import evidence, ops
from veloxfn.base import Retention, Slots, State
from veloxfn.disposal import Dispose, drop
from veloxfn.ops.constants import Schedule, numbers
from veloxfn.ops.evict_step import importance_of, kept_by, updated_mass
from veloxfn.ops.weakest import order_of, shielded
from veloxfn.placement import seen_keys
from veloxfn.slots import gather_slots, settle, with_columns, with_slots

__all__ = [
    "Ranking",
    "attend_and_retire",
    "freed",
    "loss_of",
    "protected",
    "rank",
    "retire",
    "retire_by",
    "retire_by_query",
    "steps",
]

S = TypeVar("S", bound=State)


def protected(slots: Slots, *, sink: int, recent: int) -> mx.array:
    """Slots [N, n] bool of the first `sink` and the last `recent` arrivals of each row."""
    return shielded(slots.positions, slots.seen, sink=sink, recent=recent)


def rank(slots: Slots, importance: mx.array, *, sink: int, recent: int) -> mx.array:
    """One number per slot that orders by (class, importance, position), lowest = weakest.

    Args:
        slots: slots whose positions are below 2**30.
        importance: [N, n] float32; -0.0 equals 0.0, infinities are in order, NaN is a class of its own.
        sink: first arrivals that are protected.
        recent: last arrivals that are protected.

    Returns:
        [N, n] uint64, distinct for live slots: 2 bits of class, 32 of importance, 30 of position.
    """
    return order_of(importance, slots.positions, slots.seen, sink=sink, recent=recent)


def retire(state: S, importance: mx.array, config: Retention, *, dispose: Dispose = drop) -> S:
    """Free the weakest slots until the budget holds, and end the block.

    Args:
        state: any state; its columns go with their slots.
        importance: [N, n] float32 of every slot; higher stays.
        config: budget, sink, recent_rows and shared_heads.
        dispose: what becomes of the losers.

    Returns:
        The state with S = 0. Where n <= budget nothing is evicted. Else n = budget + 1, with a free slot in every row.

    Raises:
        ValueError: importance is not [N, n], or shared_heads does not divide the rows.
    """
    slots = state.slots
    rows, length = slots.positions.shape
    capacity = config.budget + 1
    if importance.shape != (rows, length):
        raise ValueError(f"importance must be [N, n] = [{rows}, {length}], got {list(importance.shape)}")
    if length < capacity:
        return settle(state)
    shared = _shared(importance.astype(mx.float32), config.shared_heads)
    if length == capacity:
        if slots.keys.shape[1] > capacity:  # of a larger budget before
            slots = slots._replace(
                keys=slots.keys[:, :capacity],
                values=slots.values[:, :capacity],
                rotations=slots.rotations[:, :capacity],
            )
            state = with_slots(state, slots)
        weakest = ops.weakest(shared, slots.positions, slots.seen, sink=config.sink, recent=config.recent_rows)
        left = mx.where(numbers(length) == weakest[:, None], -1, slots.positions)
        return freed(dispose(state, left), left)
    order = rank(slots, shared, sink=config.sink, recent=config.recent_rows)
    split = length - config.budget
    places = mx.argpartition(order, split, axis=1).astype(mx.int32)[:, split - 1 :]
    spare, kept = places[:, :1], mx.sort(places[:, 1:], axis=1)
    stays = mx.put_along_axis(mx.zeros(slots.positions.shape, mx.bool_), kept, mx.array(True), axis=1)
    state = dispose(state, mx.where(stays, slots.positions, -1))
    state = gather_slots(state, mx.concatenate([kept, spare], axis=1))
    free = numbers(capacity) == config.budget
    return freed(state, mx.where(free, -1, state.slots.positions))


class Ranking(NamedTuple):
    """How a method ranks by a column of its state; the arrays as in `veloxfn.ops.evict_step`."""

    column: str | None  # name of the column that takes in the attention; None = the attention alone, or age without it
    decay: float = 1.0  # what the column keeps per token
    counted: mx.array | None = None  # [N] int32, for a ranking per query
    noise: mx.array | None = None  # [N, n] float32, added `tau` times
    tau: mx.array | None = None  # [N] float32
    schedule: Schedule | None = None  # of tau, for kernels to make it
    keep_low: bool = False  # rank by the negative
    attended: bool = True  # by the attention; else the column does without
    temper: ops.Temper | None = None  # of the logits that the attention is made of
    dispose: Dispose = drop  # what becomes of the losers


def retire_by(state: S, config: Retention, ranking: Ranking, attention: mx.array | None = None) -> S:
    """`retire` by a column of the state that takes in the block's attention first; a step is one launch on a GPU.

    Args:
        state: any state; its columns go with their slots.
        config: budget, sink, recent_rows and shared_heads.
        ranking: what to rank by.
        attention: [N, n] of the block; None = 0.

    Returns:
        The state with S = 0.
    """
    slots, mass = state.slots, None if ranking.column is None else getattr(state, ranking.column)
    counted, noise, tau = ranking.counted, ranking.noise, ranking.tau
    if steps(state, config):
        mass, positions = ops.evict_step(
            slots.positions,
            slots.seen,
            mass,
            attention,
            arrived=slots.arrived,
            decay=ranking.decay,
            counted=counted,
            noise=noise,
            tau=tau,
            schedule=ranking.schedule,
            keep_low=ranking.keep_low,
            sink=config.sink,
            recent=config.recent_rows,
        )
        return _stepped(state, ranking, mass, positions)
    if mass is None:
        mass = mx.zeros(slots.positions.shape, mx.float32) if attention is None else attention
    else:
        mass = updated_mass(mass, attention, kept_by(slots.arrived, ranking.decay))
    if ranking.column is not None:
        state = with_columns(state, {ranking.column: mass})
    importance = importance_of(mass, slots.positions, counted=counted, noise=noise, tau=tau, keep_low=ranking.keep_low)
    return retire(state, importance, config, dispose=ranking.dispose)


def retire_by_query(
    state: S, config: Retention, ranking: Ranking, queries: mx.array | None, attention: mx.array | None
) -> S:
    """`retire_by` the block's attention, whatever it is known by; one token with its query is two launches on a GPU.

    Args:
        state: a state after `absorb`.
        config: placement, budget, sink, recent_rows and shared_heads.
        ranking: what to rank by.
        queries: [N, G, S, D] of the block, or None.
        attention: [N, n] of the block instead; without both the arriving keys act as queries.

    Returns:
        The state with S = 0.
    """
    slots = state.slots
    if queries is not None and attention is None and steps(state, config):
        keys = seen_keys(config.placement, slots)
        _, mass, positions = _attend_step(state, config, ranking, queries, keys, None, None, padded=True)
        return _stepped(state, ranking, mass, positions)
    received = evidence.received(
        slots, queries, attention, placement=config.placement, decay=ranking.decay, temper=ranking.temper
    )
    return retire_by(state, config, ranking, received)


def attend_and_retire(
    state: S,
    config: Retention,
    ranking: Ranking,
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    scale: float | None,
) -> tuple[mx.array, S]:
    """The attention of one token per row over its candidates, then `retire_by` it; two launches on a GPU.

    Args:
        state: a state after `absorb` of one token that is not padded.
        config: budget, sink, recent_rows and shared_heads.
        ranking: what to rank by.
        queries: [N, G, 1, D].
        keys: [N, n, D] as the query sees them.
        values: [N, n, Dv].
        scale: of the products; None = D ** -0.5.

    Returns:
        output [N, G, 1, Dv] and the state with S = 0.
    """
    if not steps(state, config):
        output, attention = ops.attend(queries, keys, values, state.slots.positions, scale=scale, temper=ranking.temper)
        return output, retire_by(state, config, ranking, attention if ranking.attended else None)
    made, mass, positions = _attend_step(state, config, ranking, queries, keys, values, scale, padded=False)
    return cast(mx.array, made), _stepped(state, ranking, mass, positions)


def _attend_step(
    state: State,
    config: Retention,
    ranking: Ranking,
    queries: mx.array,
    keys: mx.array,
    values: mx.array | None,
    scale: float | None,
    *,
    padded: bool,
) -> tuple[mx.array | None, mx.array, mx.array]:
    slots = state.slots
    return ops.attend_step(
        queries,
        keys,
        values,
        slots.positions,
        slots.seen,
        None if ranking.column is None else getattr(state, ranking.column),
        scale=scale,
        temper=ranking.temper,
        arrived=slots.arrived if padded else None,
        decay=ranking.decay,
        counted=ranking.counted,
        noise=ranking.noise,
        tau=ranking.tau,
        schedule=ranking.schedule,
        keep_low=ranking.keep_low,
        attended=ranking.attended,
        sink=config.sink,
        recent=config.recent_rows,
    )


def steps(state: State, config: Retention) -> bool:
    """Whether one token came to a full cache and at most one slot of each row goes, whatever the other rows do."""
    slots = state.slots
    full = slots.positions.shape[1] == slots.keys.shape[1] == config.budget + 1
    return full and slots.arrived.shape[1] == 1 and config.shared_heads == 1


def loss_of(config: Retention, ranking: Ranking) -> ops.Loss | None:
    """One token's eviction by a ranking without attention, for `slots.extend`; None where rows decide together."""
    if ranking.attended or config.shared_heads > 1:
        return None
    return ops.Loss(ranking.column is not None, ranking.keep_low, config.sink, config.recent_rows)


def _stepped(state: S, ranking: Ranking, mass: mx.array, positions: mx.array) -> S:
    if ranking.column is not None:
        state = with_columns(state, {ranking.column: mass})
    return freed(ranking.dispose(state, positions), positions)


def freed(state: S, positions: mx.array) -> S:
    """The state with these positions [N, n], and no block that awaits eviction."""
    return settle(with_slots(state, state.slots._replace(positions=positions)))


def _shared(importance: mx.array, heads: int) -> mx.array:
    """Importance [N, n] averaged over each `heads` consecutive rows."""
    if heads == 1:
        return importance
    rows, length = importance.shape
    if rows % heads:
        raise ValueError(f"shared_heads must divide the rows, got shared_heads={heads}, N={rows}")
    groups = importance.reshape(rows // heads, heads, length)
    return mx.broadcast_to(groups.mean(axis=1, keepdims=True), groups.shape).reshape(rows, length)
