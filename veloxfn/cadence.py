"""Cadence "token": a block absorbed one token at a time, evicting after each."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar, cast

import mlx.core as mx

from veloxfn.base import Retention, Slots, State
from veloxfn.binding import ranking_of
from veloxfn.disposal import drop
from veloxfn.ops import Temper
from veloxfn.ops.fold_tokens import Noise, fits, fold_tokens
from veloxfn.ops.fusion import fused
from veloxfn.ops.launch import backend_for
from veloxfn.placement import Absolute, seen_queries
from veloxfn.slots import (
    arrival_positions,
    arrival_rotations,
    arrivals,
    settle,
    take_back,
    with_arrival_rotations,
    with_columns,
    with_room,
    with_slots,
)

if TYPE_CHECKING:
    from veloxfn.retention import Ranking

__all__ = ["Block", "check_block", "most_tokens", "replay"]

S = TypeVar("S", bound=State)


# One lazy graph holds a block's steps; more than this is more arrays than a GPU's allocator tracks.
_MOST_TOKENS = 4096


def most_tokens(config: Retention) -> int:
    """Tokens that one block may have."""
    return _MOST_TOKENS if config.cadence == "token" and _foldable(config) is None else sys.maxsize


def check_block(config: Retention, keys: mx.array) -> None:
    """Raise if cadence "token" cannot take a block keys [N, S, D]."""
    count = keys.shape[1]
    if count > most_tokens(config):
        raise ValueError(_too_long(count))


def _too_long(count: int) -> str:
    return (
        f'cadence="token" takes blocks of at most {_MOST_TOKENS} tokens, got S = {count}: '
        f"feed it in parts and evaluate in between (how it is split does not matter)"
    )


class Block(NamedTuple, Generic[S]):
    """A block as it came, and the state before it."""

    state: S
    keys: mx.array  # [N, S, D]
    values: mx.array  # [N, S, Dv]
    valid: mx.array | None  # [N, S] bool, None = all valid


def replay(
    absorb: Callable[..., S],
    evict: Callable[..., S],
    config: Retention,
    state: S,
    queries: mx.array | None,
    block: Block[S] | None = None,
) -> S:
    """Take back the block that awaits eviction and give it to `absorb` and `evict` token by token.

    A token keeps the rotation it arrived with, that of its place in the block. On a GPU, H2O, TOVA and Keyformer with
    absolute placement and independent rows take all tokens in one launch.

    Args:
        absorb: of the method.
        evict: of the method.
        config: settings of the method.
        state: a state after `absorb` with S > 1.
        queries: [N, G, S, D] of the block, or None.
        block: what was absorbed, by whoever still has it: so nobody waits for the state to hold the whole block.

    Returns:
        The state after the last token; where it is not one launch, the graph grows by one step per token.

    Raises:
        ValueError: more than 4096 tokens, and heads or dimensions that no kernel takes.
    """
    slots = state.slots
    count = slots.arrived.shape[1]
    if block is None or block.state.slots.keys.shape[1] != config.budget + 1:  # of another budget before
        block = Block(take_back(state, count, budget=config.budget), *arrivals(slots), slots.arrived >= 0)
    tokens = _Tokens(block.keys, block.values, arrival_rotations(slots), queries, block.valid)
    heads = 1 if queries is None else queries.shape[1]
    rule = None
    ranking = _foldable(config, evict)
    if ranking is not None and fits(config.budget, slots.keys.shape[2], heads):
        rule = _rule_of(ranking(config, state, heads), slots)
    if rule is None and count > _MOST_TOKENS:
        raise ValueError(_too_long(count))
    state = block.state
    for t in range(count):
        length, size = state.slots.positions.shape[1], state.slots.keys.shape[1]
        if rule is not None and length <= config.budget + 1:  # else of a larger budget before
            return _folded(config, state, tokens.after(t), rule.after(t))
        if 0 < length <= config.budget < min(size, length + count - t):
            # The graph of a full cache for all steps, traced once.
            state, length = with_room(state, config.budget + 1), config.budget + 1
        backend = backend_for(None)
        fuses = length == config.budget + 1 and backend != "host"  # which cannot be traced
        step = _fused_step(absorb, evict, config, backend) if fuses else _step(absorb, evict, config)
        state = step(state, *tokens.token(t))
    return state


class _Tokens(NamedTuple):
    """Arrivals to come."""

    keys: mx.array  # [N, S, D]
    values: mx.array  # [N, S, Dv]
    rotations: mx.array | None  # [N, S] int32, where the placement is contiguous
    queries: mx.array | None  # [N, G, S, D]
    valid: mx.array | None  # [N, S] bool

    def token(self, t: int) -> _Tokens:
        """Arrival t."""
        return self._part(slice(t, t + 1))

    def after(self, t: int) -> _Tokens:
        """The arrivals from t on."""
        return self._part(slice(t, None)) if t else self

    def _part(self, now: slice) -> _Tokens:
        queries = None if self.queries is None else self.queries[:, :, now]
        rotations = None if self.rotations is None else self.rotations[:, now]
        valid = None if self.valid is None else self.valid[:, now]
        return _Tokens(self.keys[:, now], self.values[:, now], rotations, queries, valid)


def _step(absorb: Callable[..., S], evict: Callable[..., S], config: Retention) -> Callable[..., S]:
    def step(
        state: S,
        keys: mx.array,
        values: mx.array,
        rotations: mx.array | None,
        queries: mx.array | None,
        valid: mx.array | None,
    ) -> S:
        state = absorb(config, state, keys, values, valid=valid)
        if rotations is not None:
            state = with_slots(state, with_arrival_rotations(state.slots, rotations))
        if queries is not None:
            queries = seen_queries(config.placement, state.slots, queries)
        return evict(config, state, queries=queries)

    return step


@lru_cache(maxsize=512)
def _fused_step(absorb: Callable[..., S], evict: Callable[..., S], config: Retention, backend: str) -> Callable[..., S]:
    """One step, traced once for all blocks and each back end."""
    return fused(_step(absorb, evict, config))


# ---- All tokens in one launch ----


class _Rule(NamedTuple):
    """How a method ranks, for each token of a block."""

    ranking: Ranking
    temper: Temper | None  # of the block
    noise: Noise | None  # of the block

    def after(self, t: int) -> _Rule:
        """The rule of the tokens from t on."""
        if t == 0:
            return self
        temper, noise = self.temper, self.noise
        if temper is not None:
            temper = Temper(temper.tau[:, t:], None if temper.names is None else temper.names[..., t:])
        if noise is not None:
            noise = noise._replace(tau=noise.tau[:, t:], drawn=noise.drawn[:, t:])
        return self._replace(temper=temper, noise=noise)


def _foldable(config: Retention, evict: Callable[..., Any] | None = None) -> Callable[..., Ranking] | None:
    """What the method's module says it ranks by, where a block can be one launch here; `evict` is the module's own."""
    if backend_for(None) == "reference" or config.shared_heads > 1 or not isinstance(config.placement, Absolute):
        return None
    if config.merges_losers:
        return None
    if not (config.needs_queries or getattr(config, "query_source", None) == "key_proxy"):
        return None
    return ranking_of(config, evict)


def _rule_of(ranking: Ranking, slots: Slots) -> _Rule | None:
    """The rule of the block that awaits eviction; None where `fold_tokens` has none."""
    if not ranking.attended or ranking.keep_low or ranking.column not in (None, "mass") or ranking.dispose is not drop:
        return None
    noise = None
    if ranking.noise is not None and ranking.schedule is not None:
        tau = ranking.schedule.at(mx.maximum(arrival_positions(slots), 0))
        drawn = mx.take_along_axis(ranking.noise, mx.maximum(slots.arrived, 0), axis=1)
        noise = Noise(tau, ranking.noise, drawn)
    return _Rule(ranking, ranking.temper, noise)


def _folded(config: Retention, state: S, tokens: _Tokens, rule: _Rule) -> S:
    """The state after a block that it has not absorbed."""
    slots, noise, valid = state.slots, rule.noise, tokens.valid
    if noise is not None:
        noise = noise._replace(kept=cast(Any, state).noise)
    folded = fold_tokens(
        slots.keys,
        slots.values,
        slots.positions,
        slots.seen,
        tokens.keys,
        tokens.values,
        tokens.queries,
        budget=config.budget,
        sink=config.sink,
        recent=config.recent_rows,
        mass=getattr(state, "mass", None),
        decay=rule.ranking.decay,
        age_normalised=rule.ranking.counted is not None,
        temper=rule.temper,
        noise=noise,
        valid=valid,
    )
    slots = slots._replace(
        keys=folded.keys,
        values=folded.values,
        positions=folded.positions,
        seen=slots.seen + (tokens.keys.shape[1] if valid is None else valid.sum(axis=1).astype(mx.int32)),
    )
    if folded.positions.shape[1] > state.slots.positions.shape[1]:
        state = with_room(state, folded.positions.shape[1])
    columns = {name: one for name, one in (("mass", folded.mass), ("noise", folded.noise)) if one is not None}
    return settle(with_columns(with_slots(state, slots), columns))
