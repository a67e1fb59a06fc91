"""Cadence "token": a block absorbed one token at a time, evicting after each."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import lru_cache
from typing import TypeVar

import mlx.core as mx

from veloxfn.base import Retention, State
from veloxfn.ops.fusion import fused
from veloxfn.placement import seen_queries
from veloxfn.slots import arrival_rotations, arrivals, take_back, with_arrival_rotations, with_slots

__all__ = ["check_block", "most_tokens", "replay"]

S = TypeVar("S", bound=State)


# One lazy graph holds a block's steps; more than this is more arrays than a GPU's allocator tracks.
_MOST_TOKENS = 4096


def most_tokens(config: Retention) -> int:
    """Tokens that one block may have."""
    return _MOST_TOKENS if config.cadence == "token" else sys.maxsize


def check_block(config: Retention, keys: mx.array) -> None:
    """Raise if cadence "token" cannot take a block keys [N, S, D]."""
    count = keys.shape[1]
    if count > most_tokens(config):
        raise ValueError(
            f'cadence="token" takes blocks of at most {_MOST_TOKENS} tokens, got S = {count}: '
            f"feed it in parts and evaluate in between (how it is split does not matter)"
        )


def replay(
    absorb: Callable[..., S], evict: Callable[..., S], config: Retention, state: S, queries: mx.array | None
) -> S:
    """Take back the block that awaits eviction and give it to `absorb` and `evict` token by token.

    A token keeps the rotation it arrived with, that of its place in the block.

    Args:
        absorb: of the method.
        evict: of the method.
        config: settings of the method.
        state: a state after `absorb` with S > 1.
        queries: [N, G, S, D] of the block, or None.

    Returns:
        The state after the last token; the graph grows by one step per token.
    """
    slots = state.slots
    count = slots.arrived.shape[1]
    valid = slots.arrived >= 0
    keys, values = arrivals(slots)
    rotations = arrival_rotations(slots)
    state = take_back(state, count, budget=config.budget)
    for t in range(count):
        now = slice(t, t + 1)
        steady = state.slots.positions.shape[1] == config.budget + 1
        step = (_fused_step if steady else _step)(absorb, evict, config)
        asked = None if queries is None else queries[:, :, now]
        state = step(state, keys[:, now], values[:, now], rotations[:, now], asked, valid[:, now])
    return state


def _step(absorb: Callable[..., S], evict: Callable[..., S], config: Retention) -> Callable[..., S]:
    def step(
        state: S,
        keys: mx.array,
        values: mx.array,
        rotations: mx.array,
        queries: mx.array | None,
        valid: mx.array,
    ) -> S:
        state = absorb(config, state, keys, values, valid=valid)
        if rotations.shape[1]:
            state = with_slots(state, with_arrival_rotations(state.slots, rotations))
        if queries is not None:
            queries = seen_queries(config.placement, state.slots, queries)
        return evict(config, state, queries=queries)

    return step


@lru_cache(maxsize=64)
def _fused_step(absorb: Callable[..., S], evict: Callable[..., S], config: Retention) -> Callable[..., S]:
    """One step, traced once for all blocks."""
    return fused(_step(absorb, evict, config))
