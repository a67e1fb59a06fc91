"""H2O: keep the heavy hitters of accumulated attention, and the recent tokens (Zhang et al. 2023, arXiv 2306.14048).

    mass_j <- decay * mass_j + A[t, j]      for every query t since j arrived, its own included
    A[t, j] = softmax_j(q_t . k_j / sqrt(D)), mean over the query heads of a kv head
    importance_j = mass_j,  or mass_j / (seen - position_j) with age_normalised

Claims: split invariant with cadence "token"; not with cadence "block", where a block is scored before it is evicted.
Before the first eviction, with decay 1 and true queries, the masses of a row sum to its number of queries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx

from veloxfn import cadence, checks, ops, slots, stepping
from veloxfn.base import Policy, Retention, Slots
from veloxfn.binding import bind
from veloxfn.reading import get_kv
from veloxfn.retention import Ranking, retire_by_query
from veloxfn.steady import steady

__all__ = ["Config", "State", "init_state", "absorb", "evict", "update_batched", "get_kv", "policy"]


@dataclass(frozen=True, kw_only=True)
class Config(Retention):
    """Settings of H2O.

    Args:
        recent: last arrivals that are protected; None = min(budget // 2, budget - sink - 1), the paper's half.
        decay: what a query keeps of the mass before it, in [0, 1]; 1 is the paper.
        age_normalised: rank by mass per query that has seen the slot (observed attention); better where a prompt
            arrives in blocks, since plain sums favour the old. Needs decay = 1.
        query_source: "true" ranks by the queries (or attention) passed to `evict`. "key_proxy" takes the arriving keys
            for queries over the slots before them; on a trained model it ranks worse than chance.

    With plain sums, recent = 0 and "key_proxy" every arrival starts weakest: the first rows are kept for ever.

    Raises:
        ValueError: a number outside its range, sink + recent >= budget, or age_normalised with decay != 1.
    """

    recent: int | None = None
    decay: float = 1.0
    age_normalised: bool = False
    query_source: str = "true"

    @property
    def recent_rows(self) -> int:
        """Last arrivals that are protected."""
        default = max(0, min(self.budget // 2, self.budget - self.sink - 1))
        return default if self.recent is None else self.recent

    @property
    def needs_queries(self) -> bool:
        """Whether `evict` must be given the block's queries (or attention)."""
        return self.query_source == "true"

    def __post_init__(self) -> None:
        """Validate the settings."""
        super().__post_init__()
        if self.recent is not None:
            checks.integer("recent", self.recent, low=0)
        checks.window(self.budget, self.sink, self.recent_rows)
        checks.number("decay", self.decay, low=0.0, high=1.0)
        checks.flag("age_normalised", self.age_normalised)
        checks.choice("query_source", self.query_source, ("true", "key_proxy"))
        if self.age_normalised and self.decay != 1.0:
            raise ValueError(f"age_normalised=True needs decay=1, got decay={self.decay}")


class State(NamedTuple):
    """Slots and the attention each has received."""

    slots: Slots
    mass: mx.array  # [N, n] float32


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
    >>> config = Config(budget=8)
    >>> state = init_state(config, rows=2, key_dim=4, dtype=mx.float32)
    >>> x = mx.ones((2, 20, 4))
    >>> state = update_batched(config, state, x, x, queries=x[:, None])
    >>> slots.kept_positions(state)[0].tolist()
    [0, 1, 2, 3, 4, 17, 18, 19]
    """
    base = slots.empty(config.budget, rows, key_dim, value_dim, dtype, streams, placement=config.placement)
    return State(slots=base, mass=mx.zeros(base.positions.shape, mx.float32))


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
    state = slots.extend(state, keys, values, valid, budget=config.budget, fresh=entries(config, state, keys))
    cadence.check_block(config, keys)
    return state


@steady
def evict(config: Config, state: State, *, queries: mx.array | None = None, attention: mx.array | None = None) -> State:
    """Add the block's attention to the masses, then free the weakest slots until the budget holds.

    Args:
        config: settings.
        state: a state after `absorb`; with S = 0 it is returned as it is.
        queries: [N, G, S, D] of the block, G query heads per row; required with query_source "true" unless
            `attention` is given.
        attention: [N, n] instead: weights of the block's queries, summed over the queries, averaged over the heads,
            in the slot order of `candidates`. For S > 1 only with decay = 1 and cadence "block".

    Raises:
        ValueError: missing or contradicting evidence, or a wrong shape.
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
    check_evidence("h2o", config, state.slots, queries, attention)
    if config.cadence == "token" and count > 1:
        return cadence.replay(absorb, evict, config, state, queries, block)
    return retire_by_query(state, config, ranking(config, state), queries, attention)


def entries(config: Config, state: State, keys: mx.array) -> dict[str, ops.Entry]:
    """What the columns hold of tokens that arrive."""
    return {"mass": 0.0}


def ranking(config: Config, state: State, heads: int = 1) -> Ranking:
    """By what a state that has absorbed a block is ranked."""
    base = state.slots
    return Ranking("mass", decay=config.decay, counted=_counted(config, base))


def check_evidence(
    method: str, config: Config, base: Slots, queries: mx.array | None, attention: mx.array | None
) -> None:
    """Raise unless the evidence of the block is what the config ranks by."""
    count, refused = base.arrived.shape[1], ""
    if count > 1 and (config.decay != 1.0 or config.cadence == "token"):
        refused = (
            f"it sums over the block: with S = {count} > 1 it needs decay=1 and cadence='block', "
            f"got decay={config.decay}, cadence={config.cadence!r}"
        )
    checks.evidence(method, base, queries, attention, proxy=config.query_source == "key_proxy", refused=refused)


def _counted(config: Config, base: Slots) -> mx.array | None:
    """Queries [N] that a token at position 0 has been seen by, where masses are ranked per query."""
    if not config.age_normalised:
        return None
    return base.seen - 1 if config.query_source == "key_proxy" else base.seen


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
