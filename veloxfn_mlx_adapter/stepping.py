"""The two halves of a cache's call as pure functions, eager and compiled: evict the block before, absorb this one."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import mlx.core as mx

from veloxfn import Policy
from veloxfn_mlx_adapter import portable

__all__ = ["Pair", "absorbed", "absorbed_in_step", "bookkeeping", "evicted", "evicted_in_step", "is_full", "is_steady"]

Pair = tuple[mx.array, mx.array]


def evicted(policy: Policy[Any], state: Any, queries: mx.array | None) -> Any:
    """The state after its block was scored and evicted."""
    return policy.evict(state, queries=queries)


def absorbed(
    policy: Policy[Any], state: Any, keys: mx.array, values: mx.array, valid: mx.array | None = None
) -> tuple[Any, Pair]:
    """The state with a block keys [N, S, D], values [N, S, Dv], and its candidates; valid [N, S] bool, False = padded.

    Masses and the like reach the logits only once the budget is full; the candidates are tied to them, so that
    evaluating logits evaluates all and no graph grows from token to token.
    """
    state = policy.absorb(state, keys, values, valid=valid)
    keys, values = mx.depends(list(policy.candidates(state)), bookkeeping(state))
    return state, (keys, values)


def is_steady(policy: Policy[Any], state: Any) -> bool:
    """Whether one token awaits eviction at full budget: shapes no longer change, so that steps are compiled."""
    return bool(state.slots.arrived.shape[1] == 1 and is_full(policy, state))


def is_full(policy: Policy[Any], state: Any) -> bool:
    """Whether all slots of the longest row are taken, but the one for the next token."""
    return bool(state.slots.positions.shape[1] == policy.config.budget + 1)


def evicted_in_step(policy: Policy[Any], state: Any, queries: mx.array | None) -> Any:
    """`evicted` for a steady state, compiled.

    Evaluated with the attention that shows the queries, not with the next call: there the scoring would still read the
    buffer that the next token is written into, and MLX would copy it.
    """
    return _compiled_evict(policy)(state, queries=queries)


def absorbed_in_step(policy: Policy[Any], state: Any, keys: mx.array, values: mx.array) -> tuple[Any, Pair]:
    """`absorbed` for one token after a steady state, compiled."""
    return _compiled_absorb(policy)(state, keys, values)


def bookkeeping(state: Any) -> list[mx.array]:
    """All leaves of a state but keys and values."""
    return portable.leaves(state)[2:]


@lru_cache(maxsize=128)
def _compiled_evict(policy: Policy[Any]) -> Callable[..., Any]:
    compiled: Callable[..., Any] = mx.compile(policy.evict)
    return compiled


@lru_cache(maxsize=128)
def _compiled_absorb(policy: Policy[Any]) -> Callable[..., tuple[Any, Pair]]:
    def step(state: Any, keys: mx.array, values: mx.array) -> tuple[Any, Pair]:
        return absorbed(policy, state, keys, values)

    compiled: Callable[..., tuple[Any, Pair]] = mx.compile(step)
    return compiled
