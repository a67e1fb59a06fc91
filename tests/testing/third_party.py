"""Two right policies as a third party writes them: one on the package's building blocks, one on MLX alone."""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from veloxfn import streaming_llm
from veloxfn.base import Policy, Retention, Slots
from veloxfn.retention import retire
from veloxfn.testing import Claims


class EvenConfig(Retention):
    """Nothing to add."""


def keep_even(budget: int) -> Policy:
    """Tokens at even positions outlive those at odd ones; a method is one importance."""
    plain = streaming_llm.policy(streaming_llm.Config(budget=budget, sink=min(1, budget - 1)))
    config = EvenConfig(budget=budget, sink=min(1, budget - 1))

    def evict(state, *, queries=None, attention=None):
        plain.evict(state, queries=queries, attention=attention)  # its errors
        if state.slots.arrived.shape[1] == 0:
            return state
        return retire(state, 1.0 - (state.slots.positions % 2).astype(mx.float32), config)

    def update_batched(state, keys, values, *, queries=None, attention=None, valid=None):
        return evict(plain.absorb(state, keys, values, valid=valid), queries=queries, attention=attention)

    return plain._replace(config=config, evict=evict, update_batched=update_batched)


keep_even.claims = Claims(
    takes_queries=False,
    split_invariant=True,
    worth=lambda keys: 1.0 - np.arange(len(keys)) % 2,
    budgets_nest=True,
    content_independent=True,
    exact=True,
    block_without_loop=True,
)


@dataclass(frozen=True, kw_only=True)
class Fifo(Retention):
    """First in, first out."""

    sink: int = 0


class FifoState(NamedTuple):
    slots: Slots


def _init(config, rows, key_dim, value_dim=None, *, dtype=mx.float16, streams=None):
    room, none = config.budget + 1, mx.zeros((rows, 0), dtype=mx.int32)
    names = mx.arange(rows, dtype=mx.uint32) if streams is None else streams
    keys, values = (mx.zeros((rows, room, dim), dtype=dtype) for dim in (key_dim, value_dim or key_dim))
    return FifoState(Slots(keys, values, none, none, mx.zeros((rows,), dtype=mx.int32), names, none))


def _absorb(config, state, keys, values, *, valid=None):
    slots = state.slots
    rows, count, _ = keys.shape
    for name, given, own in (("keys", keys, slots.keys), ("values", values, slots.values)):
        if given.dtype != own.dtype:
            raise TypeError(f"{name} are {given.dtype}, the state holds {own.dtype}")
        if given.shape != (own.shape[0], count, own.shape[2]):
            raise ValueError(f"{name} must be {(own.shape[0], count, own.shape[2])}, got {given.shape}")
    if valid is not None and valid.shape != (rows, count):
        raise ValueError(f"valid must be {(rows, count)}, got {valid.shape}")
    if count == 0:
        return state
    counted = mx.ones((rows, count), dtype=mx.bool_) if valid is None else valid
    order = slots.seen[:, None] + mx.cumsum(counted.astype(mx.int32), axis=1)
    fresh = mx.where(counted, order - 1, -1)
    # Live slots to the back, in order, so that the arrivals follow them; at most budget are live.
    length = min(slots.positions.shape[1], config.budget)
    index = mx.broadcast_to(mx.arange(length), (rows, length))
    if slots.positions.shape[1] > config.budget:
        index = mx.argsort(slots.positions, axis=1)[:, -length:]
    joined = [
        mx.concatenate(
            [mx.take_along_axis(old, index[..., None], axis=1), mx.where(counted[..., None], new, 0)], axis=1
        )
        for old, new in ((slots.keys, keys), (slots.values, values))
    ]
    positions = mx.concatenate([mx.take_along_axis(slots.positions, index, axis=1), fresh], axis=1)
    places = mx.broadcast_to(mx.arange(length, length + count, dtype=mx.int32), fresh.shape)
    return FifoState(
        Slots(
            *joined,
            positions,
            mx.where(counted, places, -1),
            slots.seen + counted.sum(axis=1),
            slots.streams,
            slots.rotations,
        )
    )


def _evict(config, state, *, queries=None, attention=None):
    slots = state.slots
    if slots.arrived.shape[1] == 0:
        return state
    room, length = config.budget + 1, slots.positions.shape[1]
    none = mx.zeros((slots.arrived.shape[0], 0), dtype=mx.int32)
    if length < room:
        missing = [(0, 0), (0, room - length), (0, 0)]
        keys, values = mx.pad(slots.keys, missing), mx.pad(slots.values, missing)
        return FifoState(slots._replace(keys=keys, values=values, arrived=none))
    index = mx.argsort(slots.positions, axis=1)[:, length - room :]
    keys, values = (mx.take_along_axis(buffer, index[..., None], axis=1) for buffer in (slots.keys, slots.values))
    positions = mx.take_along_axis(slots.positions, index, axis=1)
    positions = mx.where(mx.arange(room) == 0, -1, positions)
    return FifoState(slots._replace(keys=keys, values=values, positions=positions, arrived=none))


def _update(config, state, keys, values, *, queries=None, attention=None, valid=None):
    return _evict(config, _absorb(config, state, keys, values, valid=valid), queries=queries, attention=attention)


def _get_kv(config, state):
    positions = state.slots.positions
    kept = min(positions.shape[1], config.budget)
    index = mx.argsort(positions, axis=1)[:, positions.shape[1] - kept :]
    live = mx.take_along_axis(positions, index, axis=1)[..., None] >= 0
    buffers = state.slots.keys, state.slots.values
    return tuple(mx.where(live, mx.take_along_axis(buffer, index[..., None], axis=1), 0) for buffer in buffers)


def _candidates(config, state):
    if state.slots.arrived.shape[1] == 0:
        return _get_kv(config, state)
    return state.slots.keys, state.slots.values


def fifo(budget: int) -> Policy:
    """The last `budget` arrivals; gathers in every step, and says so."""
    config = Fifo(budget=budget)
    functions = (_init, _absorb, _candidates, _evict, _update, _get_kv)
    return Policy(config, *(partial(function, config) for function in functions))


fifo.claims = Claims(
    split_invariant=True,
    worth=lambda keys: np.arange(len(keys), dtype=float),
    budgets_nest=True,
    content_independent=True,
    exact=True,
    in_place=False,
    block_without_loop=True,
)
