"""Eviction at random, the yardstick of every other method: a method written from veloxfn's public pieces.

    importance_j = hash(seed, stream, position_j)      drawn once per token, as in knorm; sinks and recent are protected

The same prompt evicts the same tokens wherever it stands in a batch, however its tokens were grouped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx

from veloxfn import Policy, Retention, Slots, bind, checks, slots
from veloxfn.retention import retire

__all__ = ["Config", "State", "absorb", "evict", "init_state", "policy"]


@dataclass(frozen=True, kw_only=True)
class Config(Retention):
    """Settings of random eviction.

    Args:
        recent: last arrivals that are protected.
        seed: of the draws.
    """

    recent: int = 0
    seed: int = 0

    @property
    def recent_rows(self) -> int:
        """Last arrivals that are protected."""
        return self.recent

    def __post_init__(self) -> None:
        """Validate the settings."""
        super().__post_init__()
        checks.integer("recent", self.recent, low=0)
        checks.integer("seed", self.seed, low=0)
        checks.window(self.budget, self.sink, self.recent)


class State(NamedTuple):
    """Slots alone: a token's draw follows from its position."""

    slots: Slots


def _mixed(bits: mx.array) -> mx.array:
    """Spread uint32 numbers over all of uint32: two rounds of multiply and shift."""
    for factor in (0x7FEB352D, 0x846CA68B):
        bits = (bits ^ (bits >> 16)) * mx.array(factor, mx.uint32)
    return bits ^ (bits >> 15)


def _draws(config: Config, kept: Slots) -> mx.array:
    """One number [N, n] float32 in [0, 1) per slot."""
    row = _mixed(kept.streams + mx.array(config.seed * 0x9E3779B9 % 2**32, mx.uint32))
    bits = _mixed(row[:, None] ^ _mixed(kept.positions.astype(mx.uint32)))
    return (bits >> 8).astype(mx.float32) / 2**24


def init_state(
    config: Config,
    rows: int,
    key_dim: int,
    value_dim: int | None = None,
    *,
    dtype: mx.Dtype = mx.float16,
    streams: mx.array | None = None,
) -> State:
    """An empty state of `rows` streams."""
    return State(slots=slots.empty(config.budget, rows, key_dim, value_dim, dtype, streams, placement=config.placement))


def absorb(config: Config, state: State, keys: mx.array, values: mx.array, *, valid: mx.array | None = None) -> State:
    """Write a block; nothing is lost until `evict`."""
    return State(slots=slots.append(state.slots, keys, values, valid, budget=config.budget))


def evict(config: Config, state: State, *, queries: mx.array | None = None, attention: mx.array | None = None) -> State:
    """Free the slots with the lowest draws until the budget holds."""
    checks.no_evidence("random eviction", queries, attention)
    if state.slots.arrived.shape[1] == 0:
        return state
    return retire(state, _draws(config, state.slots), config)


def policy(config: Config) -> Policy[State]:
    """The functions of this module with `config` bound."""
    return bind(config, init_state, absorb, evict)
