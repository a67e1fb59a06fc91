"""SnapKV: keep what an observation window of the last queries attends to (Li et al. 2024, arXiv 2404.14469).

    a_j = mean of A[t, j] over the last w queries t          A: mean over the query heads of a kv head
    importance_j = a pooled over the `kernel` past slots around j in time; the last w tokens are kept

A past slot is one that is older than the window. Pooling does not penalise edges: at both ends of the past it divides
by the slots that are there. The state carries the window from block to block, so a prompt that comes in pieces is
scored by its true last w queries.

Claims: split invariant with cadence "token". With cadence "block" the grouping does not matter as long as nothing was
evicted before the last block, however short that is.

Differs from the paper: the authors compress the prompt alone and let the cache grow from there; here decode steps evict
by the same rule, so the budget always holds. They sum over the window, which ranks alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, cast

import mlx.core as mx

from veloxfn import cadence, checks, ops, slots
from veloxfn.base import Policy, Retention, Slots
from veloxfn.binding import bind
from veloxfn.evidence import attention_mass, attention_of_last
from veloxfn.ops.window_step import observed, pooled
from veloxfn.reading import get_kv
from veloxfn.retention import freed, retire, steps
from veloxfn.steady import steady

__all__ = ["Config", "State", "init_state", "absorb", "evict", "update_batched", "get_kv", "policy"]


@dataclass(frozen=True, kw_only=True)
class Config(Retention):
    """Settings of SnapKV.

    Args:
        sink: first arrivals that are never evicted; the paper has none.
        window: w, last queries that are observed; their tokens are the recent window. None becomes 32, or
            budget - sink - 1 where that is less.
        kernel: past slots that are pooled, odd; 1 = no pooling.
        pooling: "mean" or "max" over them.

    Raises:
        ValueError: a number outside its range, an even kernel, or sink + window >= budget.
    """

    sink: int = 0
    window: int | None = None
    kernel: int = 5
    pooling: str = "mean"

    @property
    def recent_rows(self) -> int:
        """Last arrivals that are protected: the window."""
        return max(1, min(32, self.budget - self.sink - 1)) if self.window is None else self.window

    @property
    def needs_queries(self) -> bool:
        """Whether `evict` must be given the block's queries."""
        return True

    def __post_init__(self) -> None:
        """Validate the settings."""
        super().__post_init__()
        object.__setattr__(self, "window", self.recent_rows)
        checks.integer("window", self.window, low=1)
        checks.window(self.budget, self.sink, self.recent_rows, name="window")
        checks.odd("kernel", self.kernel)
        checks.choice("pooling", self.pooling, ("mean", "max"))


class State(NamedTuple):
    """Slots and the attention that each received from the last queries."""

    slots: Slots
    # [N, w, n] float32, a ring: row p % w is the query at position p; `evict` clears what an arrival's slot held.
    window: mx.array


def init_state(
    config: Config,
    rows: int,
    key_dim: int,
    value_dim: int | None = None,
    *,
    dtype: mx.Dtype = mx.float16,
    streams: mx.array | None = None,
) -> State:
    """An empty state of `rows` streams with keys of `key_dim` and values of `value_dim` (default key_dim).

    Args:
        config: settings.
        rows: N, normally batch x kv heads.
        key_dim: D.
        value_dim: Dv.
        dtype: of keys and values: float32, float16 or bfloat16.
        streams: [N] names of the noise streams, see `veloxfn.streams`; None = 0 .. N-1.

    >>> import mlx.core as mx
    >>> config = Config(budget=4, window=1, kernel=1)
    >>> state = init_state(config, rows=1, key_dim=1, dtype=mx.float32)
    >>> keys = mx.array([2.0, 3.0, 0.0, 4.0, 1.0, 0.0]).reshape(1, 6, 1)
    >>> state = update_batched(config, state, keys, keys, queries=mx.ones((1, 1, 6, 1)))
    >>> slots.kept_positions(state).tolist()
    [[0, 1, 3, 5]]
    """
    base = slots.empty(config.budget, rows, key_dim, value_dim, dtype, streams, placement=config.placement)
    return State(slots=base, window=mx.zeros((rows, config.recent_rows, 0), mx.float32))


@steady
def absorb(config: Config, state: State, keys: mx.array, values: mx.array, *, valid: mx.array | None = None) -> State:
    """Write a block; nothing is lost until `evict`.

    Args:
        config: settings.
        state: a state whose last block was evicted.
        keys: [N, S, D] in the state's dtype, as the model's attention sees them.
        values: [N, S, Dv].
        valid: [N, S] bool, False = padded arrival, which is not stored and not counted; None = all valid.

    Raises:
        ValueError: a wrong shape, the last block was not evicted, or S > 4096 with cadence "token".
        TypeError: another dtype than the state's.
    """
    state = slots.extend(state, keys, values, valid, budget=config.budget)
    cadence.check_block(config, keys)
    # The first arrival may take a slot that was free; `evict` clears its column.
    missing = state.slots.positions.shape[1] - state.window.shape[2]
    return state._replace(window=mx.pad(state.window, [(0, 0), (0, 0), (0, missing)])) if missing else state


@steady
def evict(config: Config, state: State, *, queries: mx.array | None = None, attention: mx.array | None = None) -> State:
    """Note the attention of the block's last queries, then free the weakest slots until the budget holds.

    Args:
        config: settings.
        state: a state after `absorb`; with S = 0 it is returned as it is.
        queries: [N, G, S, D] of the block, G query heads per row; required.
        attention: must be None: the window needs each query by itself.

    Raises:
        ValueError: missing queries, attention is given, or a wrong shape.
    """
    return _evicted(config, state, queries, attention)


def _evicted(
    config: Config,
    state: State,
    queries: mx.array | None,
    attention: mx.array | None,
    block: cadence.Block[State] | None = None,
) -> State:
    """`evict`; `block` is the one that the state has absorbed."""
    count = state.slots.arrived.shape[1]
    if count == 0:
        return state
    checks.evidence("snapkv", state.slots, queries, attention, refused="the window needs each query by itself")
    if config.cadence == "token" and count > 1:
        return cadence.replay(absorb, evict, config, state, queries, block)
    base, queries = state.slots, cast(mx.array, queries)
    if count == 1:
        return attended(config, state, attention_mass(base, queries, placement=config.placement))
    ring = state.window.shape[1]  # of the config that the state was made with: another budget may mean another window
    fresh, when = attention_of_last(base, queries, min(count, ring), placement=config.placement)
    return _retired(config, state, observed(state.window, fresh, when, base.arrived[:, :1]))


def attended(config: Config, state: State, attention: mx.array) -> State:
    """`evict` of one token per row, by the attention [N, n] float32 that its query gives to the slots."""
    base = state.slots
    if not steps(state, config):
        fresh, when = attention[:, None], slots.arrival_positions(base)
        return _retired(config, state, observed(state.window, fresh, when, base.arrived))
    window, positions = ops.window_step(
        state.window,
        attention,
        base.positions,
        base.seen,
        base.arrived,
        kernel=config.kernel,
        pooling=config.pooling,
        sink=config.sink,
        recent=config.recent_rows,
    )
    return freed(state._replace(window=window), positions)


def _retired(config: Config, state: State, window: mx.array) -> State:
    """The state with this window, its weakest slots free."""
    base, state = state.slots, state._replace(window=window)
    if base.positions.shape[1] <= config.budget:
        return slots.settle(state)
    importance = pooled(
        window,
        base.positions,
        base.seen,
        kernel=config.kernel,
        pooling=config.pooling,
        recent=config.recent_rows,
    )
    return retire(state, importance, config)


@steady
def update_batched(
    config: Config,
    state: State,
    keys: mx.array,
    values: mx.array,
    *,
    queries: mx.array | None = None,
    attention: mx.array | None = None,
    valid: mx.array | None = None,
) -> State:
    """`evict` after `absorb`, arguments and errors as there."""
    absorbed = absorb(config, state, keys, values, valid=valid)
    return _evicted(config, absorbed, queries, attention, cadence.Block(state, keys, values, valid))


def policy(config: Config) -> Policy[State]:
    """The functions of this module with `config` bound."""
    return bind(config, init_state, absorb, evict, update_batched, get_kv)
