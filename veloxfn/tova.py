"""TOVA: keep what the current token attends to (Oren et al. 2024, arXiv 2401.06104).

    importance_j = A[t, j]      of the last query t alone, mean over the query heads of a kv head

Memoryless: what earlier queries attended to counts for nothing. `shared_heads` = kv heads is the authors' one kept set
for all heads of a layer.

Claims: split invariant with cadence "token"; not with cadence "block", where only the block's last query evicts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx

from veloxfn import cadence, checks, ops, slots, stepping
from veloxfn.base import Policy, Retention, Slots
from veloxfn.binding import bind
from veloxfn.evidence import attention_of_last
from veloxfn.reading import get_kv
from veloxfn.retention import Ranking, retire_by, retire_by_query
from veloxfn.steady import steady

__all__ = ["Config", "State", "init_state", "absorb", "evict", "update_batched", "get_kv", "policy"]


@dataclass(frozen=True, kw_only=True)
class Config(Retention):
    """Settings of TOVA.

    Args:
        sink: first arrivals that are never evicted; the paper has none.
        recent: last arrivals that are protected; the paper has none.

    Raises:
        ValueError: a number outside its range, or sink + recent >= budget.
    """

    sink: int = 0
    recent: int = 0

    @property
    def recent_rows(self) -> int:
        """Last arrivals that are protected."""
        return self.recent

    @property
    def needs_queries(self) -> bool:
        """Whether `evict` must be given the block's queries (or attention)."""
        return True

    def __post_init__(self) -> None:
        """Validate the settings."""
        super().__post_init__()
        checks.integer("recent", self.recent, low=0)
        checks.window(self.budget, self.sink, self.recent)


class State(NamedTuple):
    """Slots alone: nothing is remembered."""

    slots: Slots


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
    >>> config = Config(budget=2)
    >>> state = init_state(config, rows=1, key_dim=1, dtype=mx.float32)
    >>> keys = mx.array([3.0, 1.0, 2.0]).reshape(1, 3, 1)
    >>> state = update_batched(config, state, keys, keys, queries=mx.ones((1, 1, 3, 1)))
    >>> slots.kept_positions(state).tolist()
    [[0, 2]]
    """
    return State(slots=slots.empty(config.budget, rows, key_dim, value_dim, dtype, streams, placement=config.placement))


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
        ValueError: a wrong shape, the last block was not evicted, or S > 4096 with cadence "token" where a block is not
            one launch.
        TypeError: another dtype than the state's.
    """
    state = slots.extend(state, keys, values, valid, budget=config.budget)
    cadence.check_block(config, keys)
    return state


@steady
def evict(config: Config, state: State, *, queries: mx.array | None = None, attention: mx.array | None = None) -> State:
    """Free the slots that the last query attends to least until the budget holds.

    Args:
        config: settings.
        state: a state after `absorb`; with S = 0 it is returned as it is.
        queries: [N, G, S, D] of the block, G query heads per row; required unless `attention` is given.
        attention: [N, n] instead, for S = 1: the query's weights averaged over the heads, in the slot order of
            `candidates`.

    Raises:
        ValueError: missing or contradicting evidence, attention with S > 1, or a wrong shape.
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
    one = "" if count == 1 else f"only the last query counts, and attention= sums over S = {count}"
    checks.evidence("tova", state.slots, queries, attention, refused=one)
    if config.cadence == "token" and count > 1:
        return cadence.replay(absorb, evict, config, state, queries, block)
    if count == 1:
        return retire_by_query(state, config, ranking(config, state), queries, attention)
    if queries is not None:
        attention = attention_of_last(state.slots, queries, 1, placement=config.placement)[0].squeeze(1)
    return retire_by(state, config, ranking(config, state), attention)


def entries(config: Config, state: State, keys: mx.array) -> dict[str, ops.Entry]:
    """What the columns hold of tokens that arrive: there are none."""
    return {}


def ranking(config: Config, state: State, heads: int = 1) -> Ranking:
    """By what a state that has absorbed a block is ranked: the attention alone."""
    return Ranking(None)


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
    rules = stepping.Rules(entries, ranking)
    moved = stepping.moved(rules, config, state, keys, values, queries, valid, attention)
    if moved is not None:
        return moved[1]
    absorbed = absorb(config, state, keys, values, valid=valid)
    return _evicted(config, absorbed, queries, attention, cadence.Block(state, keys, values, valid))


def policy(config: Config) -> Policy[State]:
    """The functions of this module with `config` bound."""
    return bind(config, init_state, absorb, evict, update_batched, get_kv)
