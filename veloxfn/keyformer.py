"""Keyformer: heavy hitters under Gumbel noise and a rising temperature (Adnan et al. 2024, arXiv 2403.09054).

    tau(t) = tau_init + min(t, anneal_steps) * (tau_end - tau_init) / anneal_steps
    noise="logit", the paper:     mass_j += softmax_j((x_tj + zeta_tj) / tau(t))       importance_j = mass_j
    noise="additive":             mass_j += softmax_j(x_tj)         importance_j = mass_j + tau(t) * zeta_j
    noise="none":                 mass_j += softmax_j(x_tj / tau(t))                  importance_j = mass_j

x_tj = q_t . k_j / sqrt(D), over the query heads of a kv head the mean of the softmax; zeta ~ Gumbel(0, 1). Greedy sums
lose a token that is read little at first and much later; noise keeps some of those, at the cost of heavy hitters.
The draws are addressed, by (seed, stream, query head, query, slot) in "logit" and by (seed, stream, token) in
"additive": grouping, batch place and the global random state do not matter, heads and layers differ. The attention that
the model computes is never touched.

Claims: split invariant with cadence "token", not with cadence "block". noise="additive" with tau = 0 is h2o with plain
sums bit for bit; so is noise="none" with tau = 1.

Differs from the paper: "additive", one frozen draw per token in place of a fresh one per query and slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx

from veloxfn import cadence, checks, draws, ops, slots, stepping
from veloxfn.base import Policy, Retention, Slots
from veloxfn.binding import bind
from veloxfn.ops import Gumbel, Temper
from veloxfn.ops.attention_mass import Recipe
from veloxfn.ops.constants import Schedule, numbers
from veloxfn.reading import get_kv
from veloxfn.retention import Ranking, retire_by_query
from veloxfn.slots import arrival_positions
from veloxfn.steady import steady

__all__ = ["Config", "State", "init_state", "absorb", "evict", "update_batched", "get_kv", "policy"]

_TAU_INIT, _TAU_END = 1.0, 2.0
_LEAST_DIVISOR = 1e-6  # of logits, which stay finite in float32


@dataclass(frozen=True, kw_only=True)
class Config(Retention):
    """Settings of Keyformer.

    Args:
        recent: last arrivals that are protected; None = min(0.3 budget, budget - sink - 1).
        noise: "logit" (the paper), "additive" (one draw per token, added to its mass) or "none".
        tau_init: temperature of the first query.
        tau_end: temperature after `anneal_steps` queries.
        anneal_steps: queries from one to the other; 0 = constant at tau_init.
        anneal_from: tokens before the schedule starts. The prompt's length is the paper's: the prompt is scored at
            tau_init and the schedule follows the answer. `veloxfn generate` sets it for noise "logit", unless given.
        tau: a constant temperature in place of the schedule.
        seed: of the noise, 0 .. 2**64 - 1.
        query_source: "true" ranks by the queries passed to `evict`. "key_proxy" takes the arriving keys for queries
            over the slots before them; on a trained model it ranks worse than chance.

    Raises:
        ValueError: a number outside its range, sink + recent >= budget, tau beside a schedule, or a temperature of 0
            where logits are divided by it.
    """

    recent: int | None = None
    noise: str = "logit"
    tau_init: float = _TAU_INIT
    tau_end: float = _TAU_END
    anneal_steps: int = 256
    anneal_from: int = 0
    tau: float | None = None
    seed: int = 0
    query_source: str = "true"

    @property
    def recent_rows(self) -> int:
        """Last arrivals that are protected."""
        default = max(0, min(int(0.3 * self.budget), self.budget - self.sink - 1))
        return default if self.recent is None else self.recent

    @property
    def needs_queries(self) -> bool:
        """Whether `evict` must be given the block's queries (or attention)."""
        return self.query_source == "true"

    @property
    def temperatures(self) -> tuple[float, float]:
        """First and last temperature."""
        return (self.tau_init, self.tau_end) if self.tau is None else (self.tau, self.tau)

    def __post_init__(self) -> None:
        """Validate the settings."""
        super().__post_init__()
        if self.recent is not None:
            checks.integer("recent", self.recent, low=0)
        checks.window(self.budget, self.sink, self.recent_rows)
        checks.choice("noise", self.noise, ("logit", "additive", "none"))
        for name in ("tau_init", "tau_end") if self.tau is None else ("tau",):
            checks.number(name, getattr(self, name), low=0.0)
            if getattr(self, name) < _LEAST_DIVISOR and self.noise != "additive":
                raise ValueError(
                    f"{name} must be >= {_LEAST_DIVISOR} with noise={self.noise!r}, which divides by it, "
                    f"got {getattr(self, name)}"
                )
        if self.tau is not None and (self.tau_init, self.tau_end) != (_TAU_INIT, _TAU_END):
            raise ValueError(
                f"tau is a constant temperature, it cannot stand beside a schedule: got tau={self.tau}, "
                f"tau_init={self.tau_init}, tau_end={self.tau_end}"
            )
        checks.integer("anneal_steps", self.anneal_steps, low=0, high=2**31 - 1)
        checks.integer("anneal_from", self.anneal_from, low=0, high=2**31 - 1)
        checks.integer("seed", self.seed, low=0, high=2**64 - 1)
        checks.choice("query_source", self.query_source, ("true", "key_proxy"))


class State(NamedTuple):
    """Slots, the attention each has received, and each token's own draw."""

    slots: Slots
    mass: mx.array  # [N, n] float32
    noise: mx.array  # [N, n] float32, Gumbel draws frozen at arrival; zeros unless noise="additive"


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
    >>> config = Config(budget=8, noise="additive", tau=0.0, recent=3)
    >>> state = init_state(config, rows=1, key_dim=4, dtype=mx.float32)
    >>> x = mx.ones((1, 20, 4))
    >>> state = update_batched(config, state, x, x, queries=x[:, None])
    >>> slots.kept_positions(state).tolist()
    [[0, 1, 2, 3, 4, 17, 18, 19]]
    """
    base = slots.empty(config.budget, rows, key_dim, value_dim, dtype, streams, placement=config.placement)
    nothing = mx.zeros(base.positions.shape, mx.float32)
    return State(slots=base, mass=nothing, noise=nothing)


def temperature(config: Config, t: mx.array) -> mx.array:
    """Temperature after t >= 0 queries of the schedule, in the shape of `t`: float32.

    >>> import mlx.core as mx
    >>> temperature(Config(tau_init=1.0, tau_end=3.0, anneal_steps=4), mx.array([0, 2, 4, 8])).tolist()
    [1.0, 2.0, 3.0, 3.0]
    """
    return schedule_of(config)._replace(start=0).at(t)


@steady
def absorb(config: Config, state: State, keys: mx.array, values: mx.array, *, valid: mx.array | None = None) -> State:
    """Write a block, with a draw for each token; nothing is lost until `evict`.

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
        attention: [N, n] instead, with noise "additive": weights of the block's queries, summed over the queries,
            averaged over the heads, in the slot order of `candidates`. For S > 1 only with cadence "block".

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
    base = state.slots
    count = base.arrived.shape[1]
    if count == 0:
        return state
    refused = ""
    if config.noise != "additive":
        refused = f"noise={config.noise!r} changes the logits of each query"
    elif count > 1 and config.cadence == "token":
        refused = f"it sums over the block: S = {count} > 1 needs cadence='block'"
    proxy = config.query_source == "key_proxy"
    checks.evidence("keyformer", base, queries, attention, proxy=proxy, refused=refused)
    if config.cadence == "token" and count > 1:
        return cadence.replay(absorb, evict, config, state, queries, block)
    heads = 1 if queries is None else queries.shape[1]
    return retire_by_query(state, config, ranking(config, state, heads), queries, attention)


def entries(config: Config, state: State, keys: mx.array) -> dict[str, ops.Entry]:
    """What the columns hold of tokens that arrive: no mass, and a draw."""
    return {"mass": 0.0, "noise": Gumbel(config.seed, state.slots.streams) if config.noise == "additive" else 0.0}


def ranking(config: Config, state: State, heads: int = 1) -> Ranking:
    """By what a state that has absorbed a block of queries with `heads` heads per row is ranked."""
    base = state.slots
    if config.noise != "additive":
        return Ranking("mass", temper=temper_of(config, base, heads))
    schedule = schedule_of(config)
    return Ranking("mass", noise=state.noise, tau=schedule.at(base.seen - 1), schedule=schedule)


def temper_of(config: Config, base: Slots, heads: int) -> Temper | None:
    """Temperature and noise of the block's logits."""
    if config.noise == "additive":
        return None
    when = arrival_positions(base)
    schedule = schedule_of(config)
    tau = schedule.at(when)
    recipe = Recipe(base.seen, schedule, config.seed if config.noise == "logit" else None, base.streams)
    if config.noise == "none":
        return Temper(tau, None, recipe)
    head = numbers(heads)[:, None]
    names = draws.names(config.seed, base.streams[:, None, None], head, mx.maximum(when, 0)[:, None])
    return Temper(tau, names, recipe)


def schedule_of(config: Config) -> Schedule:
    """The temperature's schedule."""
    return Schedule(*config.temperatures, config.anneal_steps, config.anneal_from)


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
