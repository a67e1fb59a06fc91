"""Cadence "token": a block absorbed one token at a time, evicting after each."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import mlx.core as mx

from veloxfn.base import Retention, State
from veloxfn.slots import arrivals, take_back

__all__ = ["replay"]

S = TypeVar("S", bound=State)


# One lazy graph holds a block's steps; more than this is more arrays than a GPU's allocator tracks.
_MOST_TOKENS = 4096


def replay(step: Callable[..., S], config: Retention, state: S, queries: mx.array | None) -> S:
    """Take back the block that awaits eviction and give it to `step`, `update_batched` of its method, token by token.

    Args:
        step: called as step(state, keys, values, queries=.., valid=..) with one token.
        config: settings of the method.
        state: a state after `absorb` with S > 1.
        queries: [N, G, S, D] of the block, or None.

    Returns:
        The state after the last token; the graph grows by one step per token.

    Raises:
        ValueError: S > 4096.
    """
    slots = state.slots
    count = slots.arrived.shape[1]
    if count > _MOST_TOKENS:
        raise ValueError(
            f'cadence="token" takes blocks of at most {_MOST_TOKENS} tokens, got S = {count}: '
            f"feed it in parts and evaluate in between (how it is split does not matter)"
        )
    valid = slots.arrived >= 0
    keys, values = arrivals(slots)
    state = take_back(state, count, budget=config.budget)
    for t in range(count):
        now = slice(t, t + 1)
        asked = None if queries is None else queries[:, :, now]
        state = step(state, keys[:, now], values[:, now], queries=asked, valid=valid[:, now])
    return state
