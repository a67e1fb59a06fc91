"""K-norm: keep the keys of low L2 norm, which draw high attention (Devoto et al. 2024, arXiv 2406.11430).

    norm_j = ||k_j||_2             once, at arrival, in float32
    importance_j = -norm_j         keep="low", the paper's finding;  +norm_j  keep="high", the ablation

Claims: path independent: the kept set is the sinks, the recent window and the global best of everything else seen, bit
for bit, however the arrivals were grouped, so both cadences are the same. Budgets nest for equal sink and recent.
Rotary embedding leaves norms unchanged.

Measured: on a trained model about what evicting at random with the same protection gives (KL 0.078 against 0.089 nats
over six texts, 0.100 against 0.096 over the first two); where low norms mark what is read, more than H2O keeps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx

from veloxfn import checks, ops, slots, stepping
from veloxfn.base import Policy, Retention, Slots
from veloxfn.binding import bind
from veloxfn.ops import KeyNorm
from veloxfn.reading import get_kv
from veloxfn.retention import Ranking, loss_of, retire_by
from veloxfn.steady import steady

__all__ = ["Config", "State", "init_state", "absorb", "evict", "update_batched", "get_kv", "policy"]


@dataclass(frozen=True, kw_only=True)
class Config(Retention):
    """Settings of K-norm.

    Args:
        recent: last arrivals that are protected.
        keep: "low" keeps low norms, "high" high ones.

    Raises:
        ValueError: a number outside its range, sink + recent >= budget, or an unknown `keep`.
    """

    recent: int = 0
    keep: str = "low"

    @property
    def recent_rows(self) -> int:
        """Last arrivals that are protected."""
        return self.recent

    def __post_init__(self) -> None:
        """Validate the settings."""
        super().__post_init__()
        checks.integer("recent", self.recent, low=0)
        checks.window(self.budget, self.sink, self.recent)
        checks.choice("keep", self.keep, ("low", "high"))


class State(NamedTuple):
    """Slots and the norm of each key."""

    slots: Slots
    norms: mx.array  # [N, n] float32


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
    >>> config = Config(budget=4, sink=1)
    >>> state = init_state(config, rows=1, key_dim=1, dtype=mx.float32)
    >>> keys = mx.array([9.0, 5.0, 2.0, 7.0, 1.0, 2.0]).reshape(1, 6, 1)
    >>> state = update_batched(config, state, keys, keys)
    >>> slots.kept_positions(state).tolist()
    [[0, 2, 4, 5]]
    """
    base = slots.empty(config.budget, rows, key_dim, value_dim, dtype, streams, placement=config.placement)
    return State(slots=base, norms=mx.zeros(base.positions.shape, mx.float32))


@steady
def absorb(config: Config, state: State, keys: mx.array, values: mx.array, *, valid: mx.array | None = None) -> State:
    """Write a block with its norms; nothing is lost until `evict`.

    Args:
        config: settings.
        state: a state whose last block was evicted.
        keys: [N, S, D] in the state's dtype.
        values: [N, S, Dv].
        valid: [N, S] bool, False = padded arrival, which is not stored and not counted; None = all valid.

    Raises:
        ValueError: a wrong shape, or the last block was not evicted.
        TypeError: another dtype than the state's.
    """
    return slots.extend(state, keys, values, valid, budget=config.budget, fresh=entries(config, state, keys))


@steady
def evict(config: Config, state: State, *, queries: mx.array | None = None, attention: mx.array | None = None) -> State:
    """Free the slots of the least important norms until the budget holds.

    Args:
        config: settings.
        state: a state after `absorb`; with S = 0 it is returned as it is.
        queries: must be None, as norms need no attention.
        attention: must be None.

    Raises:
        ValueError: queries or attention are given.
    """
    checks.no_evidence("knorm", queries, attention)
    if state.slots.arrived.shape[1] == 0:
        return state
    return retire_by(state, config, ranking(config, state))


def entries(config: Config, state: State, keys: mx.array) -> dict[str, ops.Entry]:
    """What the columns hold of tokens that arrive."""
    return {"norms": KeyNorm(keys)}


def ranking(config: Config, state: State, heads: int = 1) -> Ranking:
    """By what a state that has absorbed a block is ranked: the norms."""
    return Ranking("norms", attended=False, keep_low=config.keep == "low")


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
    """`evict` after `absorb`, arguments and errors as there; one token into a full cache loses another as it comes."""
    rules = stepping.Rules(entries, ranking)
    moved = stepping.moved(rules, config, state, keys, values, queries, valid, attention)
    if moved is not None:
        return moved[1]
    loses = loss_of(config, ranking(config, state))
    absorbed = slots.extend(
        state, keys, values, valid, budget=config.budget, loses=loses, fresh=entries(config, state, keys)
    )
    return evict(config, absorbed, queries=queries, attention=attention)


def policy(config: Config) -> Policy[State]:
    """The functions of this module with `config` bound."""
    return bind(config, init_state, absorb, evict, update_batched, get_kv)
