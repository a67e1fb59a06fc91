"""What mlx_lm's batch generation does with a cache: sequences join, leave and are padded."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Self

import mlx.core as mx

import veloxfn
from veloxfn.slots import shrink
from veloxfn_mlx_adapter import ragged
from veloxfn_mlx_adapter.diagnostics import Diagnosed
from veloxfn_mlx_adapter.lockstep import Lockstep

__all__ = ["Batched"]


class Batched(Diagnosed):
    """A cache of one layer whose rows are those of several sequences."""

    _next: Any
    _queries: mx.array | None
    _complaint: str
    _heads: int
    _sequences: ragged.Sequences
    _attending: bool
    _lockstep: Lockstep | None
    _shard: int
    _counts_block: bool
    copy: Callable[[], Self]
    settle: Callable[[], None]
    _after_eviction: Callable[[], Any]
    _kept: Any  # int

    @classmethod
    def merge(cls, caches: Sequence[Self]) -> Self:
        """One cache of the sequences of all `caches`, those of one layer.

        Raises:
            ValueError: no caches, or caches of different settings, layers, heads or dimensions.
            TypeError: something else among them.
        """
        if not caches:
            raise ValueError("merge joins one cache or more, got none")
        for other in caches:
            cls._check_kind(other)
        first = next((cache for cache in caches if cache._state is not None), caches[0])
        for other in caches:
            first._agree(other)
        made = caches[0].copy()
        if len(caches) > 1:
            made._join(caches)
        made._follow(caches[0]._lockstep, ("merge", *(id(cache._lockstep) for cache in caches)))
        return made

    def extend(self, other: Self) -> None:
        """Let the sequences of another cache of this layer join; errors as `merge`."""
        self._check_kind(other)
        self._agree(other)
        self._join([self, other])
        if self._lockstep is not None:
            self._lockstep.note(self._layer, self._sequences.seen)

    def filter(self, batch_indices: Any) -> None:
        """Keep the sequences `batch_indices`, ints or an array of them, in that order.

        Raises:
            IndexError: an index outside of the batch, or none.
            TypeError: something else than indices, such as a mask.
        """
        batch = len(self._sequences)
        indices = _indices(batch_indices, batch)
        longest = min(self._sequences.taken(indices).longest, self.config.budget)
        if longest < self._kept:
            self.settle()  # before anything changes: it may be refused
        if self._state is not None and indices != list(range(batch)):
            rows = ragged.rows_of(indices, self._heads)
            self._state = veloxfn.take_rows(self._state, rows)
            self._next = None if self._next is None else veloxfn.take_rows(self._next, rows)
            self._queries = None if self._queries is None else self._queries[rows]
        self._sequences = self._sequences.taken(indices)
        self._shrink()
        if self._lockstep is not None:
            self._lockstep.note(self._layer, self._sequences.seen)

    def extract(self, idx: int) -> Self:
        """An own cache of one sequence, with its last block evicted, as if it had been alone all the time."""
        made = self.copy()
        made.filter([idx])
        if len(self._sequences) > 1:
            made.settle()
            made._shrink()
        made._follow(self._lockstep, ("extract", idx))
        return made

    def prepare(
        self,
        *,
        left_padding: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        right_padding: Sequence[int] | None = None,
    ) -> None:
        """Say which of the tokens to come are padding, until `finalize`; padded tokens do not exist for the cache.

        Args:
            left_padding: so many tokens of each sequence come before its own; only while the cache is empty.
            lengths: so many tokens follow that are its own, over as many calls as there are.
            right_padding: so many padded ones come last; with `lengths` not needed, without them in one call.

        Raises:
            ValueError: padding on the left of tokens that were seen, or another number of sequences than before.
        """
        self._sequences = self._sequences.prepared(left_padding, lengths, right_padding)

    def finalize(self) -> None:
        """All tokens that `prepare` spoke of have come."""
        self._sequences = dataclasses.replace(self._sequences, padding=None)

    def _fresh(self, batch: int, heads: int, key_dim: int, value_dim: int, dtype: mx.Dtype) -> Any:
        streams = veloxfn.streams(batch, heads, self._layer) + self._shard * heads
        return self._policy.init_state(batch * heads, key_dim, value_dim, dtype=dtype, streams=streams)

    @classmethod
    def _check_kind(cls, other: Any) -> None:
        if not isinstance(other, cls):
            raise TypeError(f"an {cls.__name__} joins others of its kind, got {type(other).__name__}")

    def _agree(self, other: Self) -> None:
        """Raise unless the sequences of another cache can join."""
        for name in ("layer", "config"):
            if getattr(self, name) != getattr(other, name):
                raise ValueError(
                    f"caches of one {name} are joined, got {getattr(self, name)} and {getattr(other, name)}"
                )
        if (self._shard, self._counts_block) != (other._shard, other._counts_block):
            raise ValueError(f"caches of one shard of one model are joined, got {self._shard} and {other._shard}")
        if self._state is not None and other._state is not None and self._heads != other._heads:
            raise ValueError(f"caches of one number of kv heads are joined, got {self._heads} and {other._heads}")

    def _join(self, caches: Sequence[Self]) -> None:
        """Hold the sequences of all caches, this one perhaps among them."""
        held = [cache for cache in caches if cache._state is not None]
        sequences = ragged.Sequences.together([cache._sequences for cache in caches])
        if held:
            slots, heads = held[0]._state.slots, held[0]._heads
            sizes = (slots.keys.shape[2], slots.values.shape[2], slots.keys.dtype)
            states = [
                self._fresh(len(cache._sequences), heads, *sizes) if cache._state is None else cache._after_eviction()
                for cache in caches
            ]
            self._state, self._heads = ragged.joined(states), heads
        self._next, self._queries, self._complaint = None, None, ""
        self._sequences, self._attending = sequences, False

    def _follow(self, lockstep: Lockstep | None, made: Hashable) -> None:
        """Keep step with what else is made in the same way from the caches of a lockstep."""
        self._lockstep = None if lockstep is None else lockstep.heir(made, self._layer, self._sequences.seen)

    def _shrink(self) -> None:
        """Without slots that are free in all sequences, which longer ones left behind; nothing awaits eviction then."""
        longest = min(self._sequences.longest, self.config.budget)
        if longest < self._kept:
            self._state = shrink(self._state, longest) if longest else None


def _indices(given: Any, batch: int) -> list[int]:
    """Places 0 .. batch - 1 that `filter` was given."""
    if isinstance(given, mx.array):
        if given.ndim != 1 or not mx.issubdtype(given.dtype, mx.integer):
            raise TypeError(f"indices must be ints [M], got {given.dtype} {list(given.shape)}")
        given = given.tolist()
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise TypeError(f"indices must be a sequence of ints, got {given!r}")
    if any(isinstance(i, bool) or not hasattr(i, "__index__") for i in given):
        raise TypeError(f"indices must be ints, got {list(given)}")
    indices = [operator.index(i) for i in given]
    if not indices or not all(-batch <= i < batch for i in indices):
        raise IndexError(f"a batch of {batch} sequences has the indices 0 to {batch - 1}, got {indices}")
    return [i % batch for i in indices]
