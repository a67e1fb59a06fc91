"""The shapes and types that every method shares; nothing here computes.

Letters: N rows (batch x kv heads), n slots with a position entry, C = budget + 1 slots allocated, S arrivals of one
block, D and Dv key and value dimension, G query heads per kv head.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

import mlx.core as mx

from veloxfn import checks
from veloxfn.placement import Absolute, Contiguous

__all__ = ["Absorb", "Candidates", "Evict", "GetKV", "InitState", "Policy", "Retention", "Slots", "State", "Update"]


class Slots(NamedTuple):
    """One place per kept token; slots never move in a one-token step, so their order is not temporal.

    What the buffers hold in a free slot is of no meaning.
    """

    keys: mx.array  # [N, C, D]
    values: mx.array  # [N, C, Dv]
    positions: mx.array  # [N, n] int32, arrival index of each slot, -1 = free
    arrived: mx.array  # [N, S] int32, slot of each token of the block absorbed last, -1 = padded; S = 0 after evict
    seen: mx.array  # [N] int32, arrivals so far
    streams: mx.array  # [N] uint32, names the row's noise stream
    rotations: mx.array  # [N, C] int32, position each key arrived rotated at; else [N, 0]


@runtime_checkable
class State(Protocol):
    """A method's state: a NamedTuple with `slots` first, then its per-slot columns, then an optional nested `row`."""

    @property
    def slots(self) -> Slots:
        """The kept tokens."""
        ...


@dataclass(frozen=True, kw_only=True)
class Retention:
    """What every method's Config has.

    Args:
        budget: rows kept per stream after `evict`, sinks and recent ones included; 1 .. 2**30 - 2. A state allocates
            budget + 1 rows at once.
        placement: where a kept key is seen: `Absolute()` keeps the position it arrived with, `Contiguous(rope)` turns
            it to its rank among the kept ones.
        cadence: "block" scores and evicts a block at once; "token" absorbs it one token at a time, evicting after each:
            one lazy graph of S steps, or on a GPU one launch with H2O, TOVA and Keyformer at absolute positions and
            independent rows.
        shared_heads: consecutive rows that share one kept set (their importance is averaged); such rows have the same
            `valid`. 1 = independent.
        sink: first arrivals of a row that are never evicted.

    Raises:
        ValueError: a number outside its range, or sink + recent >= budget.
        TypeError: a value of another type.
    """

    budget: int = 512
    placement: Absolute | Contiguous = field(default_factory=Absolute)
    cadence: str = "block"
    shared_heads: int = 1
    sink: int = 4

    @property
    def recent_rows(self) -> int:
        """Last arrivals of a row that are protected."""
        return 0

    @property
    def needs_queries(self) -> bool:
        """Whether `evict` must be given the block's queries (or attention)."""
        return False

    @property
    def merges_losers(self) -> bool:
        """Whether what is evicted leaves something in the rows that stay."""
        return False

    def __post_init__(self) -> None:
        """Validate what all methods share."""
        checks.integer("budget", self.budget, low=1, high=2**30 - 2)
        checks.choice("cadence", self.cadence, ("block", "token"))
        checks.integer("shared_heads", self.shared_heads, low=1)
        checks.integer("sink", self.sink, low=0)
        checks.instance("placement", self.placement, Absolute, Contiguous)


S = TypeVar("S", bound=State)
S_co = TypeVar("S_co", bound=State, covariant=True)
S_contra = TypeVar("S_contra", bound=State, contravariant=True)


class InitState(Protocol[S_co]):
    """`init_state` with the config bound."""

    def __call__(
        self,
        rows: int,
        key_dim: int,
        value_dim: int | None = None,
        *,
        dtype: mx.Dtype = ...,
        streams: mx.array | None = None,
    ) -> S_co:
        """An empty state of `rows` streams."""
        ...


class Absorb(Protocol[S]):
    """`absorb` with the config bound."""

    def __call__(self, state: S, keys: mx.array, values: mx.array, *, valid: mx.array | None = None) -> S:
        """Write keys [N, S, D] and values [N, S, Dv]; nothing is lost yet."""
        ...


class Candidates(Protocol[S_contra]):
    """`candidates` with the config bound."""

    def __call__(self, state: S_contra) -> tuple[mx.array, mx.array]:
        """What the block absorbed last attends to: keys [N, n, D] and values [N, n, Dv]."""
        ...


class Evict(Protocol[S]):
    """`evict` with the config bound."""

    def __call__(self, state: S, *, queries: mx.array | None = None, attention: mx.array | None = None) -> S:
        """Fold the evidence of the block, then free the weakest slots until the budget holds."""
        ...


class Update(Protocol[S]):
    """`update_batched` with the config bound."""

    def __call__(
        self,
        state: S,
        keys: mx.array,
        values: mx.array,
        *,
        queries: mx.array | None = None,
        attention: mx.array | None = None,
        valid: mx.array | None = None,
    ) -> S:
        """`evict` after `absorb`."""
        ...


class GetKV(Protocol[S_contra]):
    """`get_kv` with the config bound."""

    def __call__(self, state: S_contra) -> tuple[mx.array, mx.array]:
        """Kept keys [N, min(n, budget), D] and values [.., Dv] in temporal order."""
        ...


class Policy(NamedTuple, Generic[S]):
    """A method with its config bound: pure functions over one kind of state."""

    config: Retention
    init_state: InitState[S]
    absorb: Absorb[S]
    candidates: Candidates[S]
    evict: Evict[S]
    update_batched: Update[S]
    get_kv: GetKV[S]
