"""One call of a cache as a pure function: evict after the block before, absorb this one, read."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import mlx.core as mx

from veloxfn import Policy
from veloxfn_mlx_adapter import portable

__all__ = ["Pair", "absorbed", "advance", "evicted"]

Pair = tuple[mx.array, mx.array]


def evicted(policy: Policy[Any], state: Any, queries: mx.array | None) -> Any:
    """The state after its block was scored and evicted."""
    return policy.evict(state) if queries is None else policy.evict(state, queries=queries)


def absorbed(policy: Policy[Any], state: Any, keys: mx.array, values: mx.array) -> tuple[Any, Pair]:
    """The state with a block keys [N, S, D], values [N, S, Dv], and its candidates.

    Masses and the like reach the logits only once the budget is full; the candidates are tied to them, so that
    evaluating logits evaluates all and no graph grows from token to token.
    """
    state = policy.absorb(state, keys, values)
    _, _, *bookkeeping = portable.leaves(state)
    keys, values = mx.depends(list(policy.candidates(state)), bookkeeping)
    return state, (keys, values)


def advance(
    policy: Policy[Any], state: Any, queries: mx.array | None, keys: mx.array, values: mx.array
) -> tuple[Any, Pair]:
    """`absorbed` after `evicted`, compiled where shapes no longer change: one token after one token, budget full."""
    steady = (
        keys.shape[1] == 1
        and state.slots.arrived.shape[1] == 1
        and state.slots.positions.shape[1] == policy.config.budget + 1
    )
    if not steady:
        return absorbed(policy, evicted(policy, state, queries), keys, values)
    given = {} if queries is None else {"queries": queries}
    return _compiled(policy)(state, keys, values, **given)


@lru_cache(maxsize=128)
def _compiled(policy: Policy[Any]) -> Callable[..., tuple[Any, Pair]]:
    def step(state: Any, keys: mx.array, values: mx.array, queries: mx.array | None = None) -> tuple[Any, Pair]:
        return absorbed(policy, evicted(policy, state, queries), keys, values)

    compiled: Callable[..., tuple[Any, Pair]] = mx.compile(step)
    return compiled
