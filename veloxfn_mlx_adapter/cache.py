"""A cache of one layer over a pure veloxfn state, in the form that mlx_lm's models expect."""

from __future__ import annotations

import copy
from functools import lru_cache
from typing import Any, cast

import mlx.core as mx

import veloxfn
from veloxfn import Contiguous, Policy, Retention
from veloxfn.slots import take_back
from veloxfn_mlx_adapter import capture, hosts, observed, portable, ragged, stepping
from veloxfn_mlx_adapter.batching import Batched
from veloxfn_mlx_adapter.lockstep import Lockstep

__all__ = ["EvictingCache", "policy_of"]


class EvictingCache(capture.AttentionObserver, Batched):
    """Key/value cache of one attention layer that keeps `budget` rows per kv head from call to call.

    A call returns everything kept before it and its own block, as mlx_lm's masks expect; the eviction that follows a
    block is held back until the next call. So a prompt fed in one call attends to all of itself, and the last block can
    be taken back exactly (`trim`). Rows are batch x kv heads. The sequences of a batch may have different lengths: see
    `merge`, `extend`, `filter`, `extract`, `prepare` and `finalize`, which mlx_lm's batch generation calls.

    Args:
        policy: a method with its config bound, as `veloxfn.policy` returns it.
        layer: index of the layer, which names its noise streams.
        owner: name of the model, for errors.
        counts_block: whether the model reads `offset` between `update_and_fetch` and its attention, where it is to
            count the block; only matters with `placement=Contiguous`.
        shard: which part of the layer's kv heads these are, where processes share them out; names their noise streams.
        alone: whether the mask of this cache is also that of later layers with caches of the model's own, which cannot
            read one of sequences of different lengths.
        lockstep: what the caches of one model share to notice a forward pass that broke off; None = nothing.
    """

    def __init__(
        self,
        policy: Policy[Any],
        *,
        layer: int = 0,
        owner: str = "the model",
        counts_block: bool = False,
        shard: int = 0,
        alone: bool = False,
        lockstep: Lockstep | None = None,
    ) -> None:
        self._policy = policy
        self._layer, self._shard = layer, shard
        self._owner = owner
        self._state: Any = None  # the method's; None before the first token
        self._queries: mx.array | None = None  # [N, G, S, D] of the block that awaits eviction
        self._next: Any = None  # the state after that eviction, where it was carried out already
        self._complaint = ""  # why attention showed no usable queries
        self._heads = 0
        self._sequences = ragged.Sequences()
        self._counts_block, self._attending, self._alone = counts_block, False, alone
        self._lockstep = lockstep
        capture.hold(self)

    # A forward pass: offset, make_mask, update_and_fetch, observe.

    @property
    def offset(self) -> int | mx.array:
        """Rotary position of the next token: tokens seen, with `placement=Contiguous` tokens kept.

        [B] int32 where the sequences of a batch differ; below 0 by the padding that comes first.
        """
        budget = self.config.budget if isinstance(self.config.placement, Contiguous) else None
        return self._sequences.offsets(budget, with_block=self._attending)

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | str | None:
        """The mask of the next N tokens over what `update_and_fetch` will return.

        Args:
            N: tokens of the call.
            return_array: whether the model needs an array.
            window_size: width of a sliding window.

        Returns:
            None for one token, "causal" for others, or [N, kept + N] bool aligned at the lower right; [B, 1, N, kept +
            N] bool where sequences differ in length.

        Raises:
            ValueError: a sliding window after an eviction: evicted rows leave gaps that differ from layer to layer.
        """
        seen, budget = self._sequences.longest, self.config.budget
        uneven = self._sequences.uneven(self._kept, budget, N)
        if window_size is not None and seen + N > window_size:
            if seen > budget or uneven:
                evicted = f"has evicted rows (budget {budget}, {seen} tokens seen)"
                why = evicted if seen > budget else "holds sequences of different lengths"
                raise ValueError(
                    f"{self._owner} asks for a sliding window of {window_size} over a cache that {why}; "
                    f"give such layers no policy: None"
                )
            here = mx.arange(seen + N)
            return (here <= here[seen:, None]) & (here > here[seen:, None] - window_size)
        if uneven:
            if self._alone:
                raise ValueError(
                    f"sequences of different lengths cannot share a batch where layers of {self._owner} evict and "
                    f"later ones of full attention keep its own caches, which read one mask: give each of them a "
                    f"policy, or none to the first"
                )
            return self._coming_mask(N)
        if N == 1:
            return None
        if not return_array:
            return "causal"
        kept = self._kept if N else self._rows
        return mx.arange(kept + N) <= mx.arange(kept, kept + N)[:, None]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Evict after the block before, then absorb this one.

        Args:
            keys: [B, Hkv, N, D], rotated.
            values: [B, Hkv, N, Dv].

        Returns:
            keys [B, Hkv, n, D] and values [B, Hkv, n, Dv] to attend to: the kept rows, then the N new ones in order.
            The first of those may sit in a slot between the kept rows, which causal masking does not notice.

        Raises:
            ValueError: other batch, heads or dimensions than before.
            TypeError: another dtype than before.
            RuntimeError: the method ranks by queries and attention did not show those of the block before, or another
                layer's cache has seen another number of tokens.
        """
        if keys.ndim != 4 or values.shape[:-1] != keys.shape[:-1]:
            raise ValueError(
                f"keys must be [B, Hkv, N, D] and values [B, Hkv, N, Dv], got {keys.shape} and {values.shape}"
            )
        batch, heads, count, dim = keys.shape
        blank = self._state is None and self._sequences.blank
        sequences = ragged.Sequences.new(batch) if blank else self._sequences
        if batch != len(sequences) or (self._state is not None and heads != self._heads):
            raise ValueError(
                f"this cache holds [B, Hkv] = [{len(sequences)}, {self._heads or heads}], got keys {keys.shape}; "
                f"sequences join and leave by extend and filter"
            )
        if count == 0:
            return (keys, values) if self._state is None else self._view()
        keys, values = (block.reshape(batch * heads, count, block.shape[3]) for block in (keys, values))
        sequences = sequences.fed(count)
        if self._lockstep is not None:
            self._lockstep.check(self._layer, before=self._sequences.seen, after=sequences.seen)
        valid = ragged.valid_of(sequences.spans, count)
        valid = None if valid is None else mx.repeat(valid, heads, axis=0)
        if self._state is None:
            state = self._fresh(batch, heads, dim, values.shape[2], keys.dtype)
            state, pair = stepping.absorbed(self._policy, state, keys, values, valid)
        elif self._next is not None and count == 1 and valid is None and stepping.is_full(self._policy, self._next):
            state, pair = stepping.absorbed_in_step(self._policy, self._next, keys, values)
        else:
            state, pair = stepping.absorbed(self._policy, self._after_eviction(), keys, values, valid)
        self._state, self._next, self._queries, self._complaint = state, None, None, ""
        self._heads, self._sequences, self._attending = heads, sequences, self._counts_block
        if self._lockstep is not None:
            self._lockstep.note(self._layer, sequences.seen)
        return self._per_head(pair)

    def observe(self, queries: mx.array, keys: mx.array, scale: float, mask: Any) -> Any:
        """Keep the block's queries [B, Hq, N, D] for the eviction that follows it.

        The first call after `update_and_fetch` counts: layers that share this cache attend to it later.
        """
        self._attending = False
        if self.config.needs_queries and self._pending and self._queries is None:
            cached = [len(self._sequences), self._heads, self._rows, self._state.slots.keys.shape[2]]
            self._complaint = observed.complaint(queries, keys, mask, cached=cached, arrivals=self._pending)
            if not self._complaint:
                self._queries = observed.per_row(queries, heads=self._heads, scale=scale)
        if self._next is None and not self._complaint and stepping.is_steady(self._policy, self._state):
            self._next = stepping.evicted_in_step(self._policy, self._state, self._queries)
        uneven = self._has_gaps() or observed.is_ragged(mask)
        if uneven and observed.can_be_replaced(mask) and keys.shape[-2] == self._rows:
            return ragged.visible(self._state, batch=len(self._sequences))
        return observed.fitted(mask, columns=keys.shape[-2], count=queries.shape[-2])

    def tied(self, output: mx.array) -> mx.array:
        """The output [B, Hq, N, Dv] of the attention, evaluated with the eviction that it made possible."""
        return output if self._next is None else mx.depends(output, stepping.bookkeeping(self._next))

    def keys_and_values(self) -> tuple[mx.array | None, mx.array | None]:
        """What `update_and_fetch` returned last, for layers that share this cache."""
        return (None, None) if self._state is None else self._view()

    @property
    def keys(self) -> mx.array | None:
        """Keys [B, Hkv, n, D] as `update_and_fetch` returned them last."""
        return self.keys_and_values()[0]

    @keys.setter
    def keys(self, tied: mx.array) -> None:
        """Evaluate what `tied` [B, Hkv, n, D] depends on before the keys; its content is not used."""
        held = self.keys
        if held is None or tied.shape != held.shape:
            shape = None if held is None else held.shape
            raise ValueError(f"keys can be set only to themselves, tied to other arrays: {shape}, got {tied.shape}")
        self._state = _with_keys_tied(self._state, tied)
        self._next = None if self._next is None else _with_keys_tied(self._next, tied)

    # Eviction, and what is refused.

    def settle(self) -> None:
        """Carry out the eviction that is held back; afterwards the last block cannot be taken back."""
        if self._pending:
            self._state = self._after_eviction()
            self._next, self._queries, self._complaint = None, None, ""
            self._sequences = self._sequences.settled()

    def is_trimmable(self) -> bool:
        """Whether any number of tokens can be taken back: while all that were seen came in the last call."""
        return not any(self._sequences.before())

    def trim(self, n: int) -> int:
        """Take back the last n tokens, exactly; all there are, where that is fewer and all came in the last call.

        Returns:
            How many were taken back.

        Raises:
            ValueError: n exceeds the block whose eviction is held back, and tokens came before it.
        """
        if self.is_trimmable():
            n = min(n, self._pending)
        if not 0 <= n <= self._pending:
            raise ValueError(
                f"trim takes back 0 to {self._pending} tokens, the last block, got {n}: "
                f"what the method noted of the tokens before it cannot be undone"
            )
        if n:
            left = self._pending - n
            sequences = self._sequences.taken_back(left)
            nothing = not sequences.longest and sequences.padding is None
            self._state = None if nothing else take_back(self._state, n, budget=self.config.budget)
            self._next = None
            self._queries = self._queries[:, :, :left] if left and self._queries is not None else None
            self._sequences, self._attending = sequences, False
            if self._lockstep is not None:
                self._lockstep.note(self._layer, self._sequences.seen)
        return n

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> None:
        """Refuse: the quantised cache would replace this one and evict nothing.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            f"kv_bits={bits} cannot be combined with eviction: drop kv_bits, or lower the budget of "
            f"{self.config.budget} rows"
        )

    # Saving, copying, sizes.

    @property
    def state(self) -> list[mx.array]:
        """All that a later process needs, as arrays: a uint8 record, the method's state, the block's queries."""
        record = {
            "config": portable.written(self.config),
            "layer": self._layer,
            "shard": self._shard,
            "owner": self._owner,
            "heads": self._heads,
            **self._sequences.record(),
            "counts_block": self._counts_block,
            "alone": self._alone,
            "queries": self._queries is not None,
        }
        return [portable.array_of(record), *self._arrays()]

    @state.setter
    def state(self, arrays: list[mx.array]) -> None:
        record, held = portable.record_of(arrays[0] if arrays else None), list(arrays[1:])
        bound: Policy[Any] | None = getattr(self, "_policy", None)
        same = bound is not None and portable.written(bound.config) == record["config"]
        policy = bound if bound is not None and same else policy_of(portable.config_of(record["config"]))
        queries = held.pop() if record["queries"] and held else None
        state = portable.state_of(policy, held)
        portable.check(record, policy, state, queries)
        sequences = ragged.Sequences.of(record)
        self._policy, self._state, self._queries = policy, state, queries
        self._layer, self._shard, self._owner = record["layer"], record["shard"], record["owner"]
        self._heads = record["heads"]
        self._sequences = sequences
        self._counts_block, self._alone, self._attending = record["counts_block"], record["alone"], False
        self._next, self._complaint = None, ""
        if bound is None:
            self._lockstep = None
            capture.hold(self)
        elif self._lockstep is not None:
            self._lockstep.note(self._layer, self._sequences.seen)

    @property
    def meta_state(self) -> str:
        """Nothing: `state` holds all. mlx-lm 0.31 asks for it."""
        return ""

    @meta_state.setter
    def meta_state(self, text: str) -> None:
        if text:
            raise ValueError(f"an eviction cache has no meta_state, got {text!r}")

    @classmethod
    def from_state(cls, state: list[mx.array], meta_state: Any = None) -> EvictingCache:
        """A cache over a saved `state`; mlx-lm 0.31 also passes a `meta_state`, which is ignored."""
        made = cls.__new__(cls)
        made.state = state
        return made

    def copy(self) -> EvictingCache:
        """An independent cache. Arrays never change, so both share them until one goes on."""
        made = type(self).__new__(type(self))
        made.__dict__.update(self.__dict__)
        made._lockstep = None
        capture.hold(made)
        return made

    __copy__ = copy

    def __setstate__(self, held: dict[str, Any]) -> None:
        self.__dict__.update(held)
        if self._lockstep is not None:
            self._lockstep.note(self._layer, self._sequences.seen)
        capture.hold(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> EvictingCache:
        made = self.copy()
        made._lockstep = copy.deepcopy(self._lockstep, memo)  # one for all caches that are copied together
        if made._lockstep is not None:
            made._lockstep.note(made._layer, made._sequences.seen)
        return made

    def size(self) -> int:
        """Tokens seen, as in mlx_lm's unbounded cache; of the longest sequence of a batch."""
        return self._sequences.longest

    def empty(self) -> bool:
        """Whether no token has been seen."""
        return self._sequences.longest == 0

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays held."""
        return sum(array.nbytes for array in self._arrays())

    # Inside.

    @property
    def _pending(self) -> int:
        """Tokens of the block whose eviction is held back."""
        return 0 if self._state is None else cast(int, self._state.slots.arrived.shape[1])

    @property
    def _rows(self) -> int:
        """Rows n of what `_view` returns."""
        length = 0 if self._state is None else cast(int, self._state.slots.positions.shape[1])
        return length if self._pending else min(length, self.config.budget)

    @property
    def _kept(self) -> int:
        """Rows that the next block will find."""
        length = 0 if self._state is None else cast(int, self._state.slots.positions.shape[1])
        return min(length, self.config.budget)

    def _has_gaps(self) -> bool:
        """Whether some of the rows that the block attends to are free."""
        return self._pending > 0 and min(self._sequences.live(self.config.budget)) < self._rows

    def _coming_mask(self, count: int) -> mx.array:
        """[B, 1, count, kept + count] for sequences of different lengths."""
        if self._pending and self._next is None:
            self._next = self._after_eviction()
        valid = ragged.valid_of(self._sequences.next_spans(count), count)
        batch, budget = len(self._sequences), self.config.budget
        return ragged.coming_mask(self._after_eviction(), valid, batch=batch, count=count, budget=budget)

    def _arrays(self) -> list[mx.array]:
        return portable.leaves(self._state) + ([] if self._queries is None else [self._queries])

    def _view(self) -> tuple[mx.array, mx.array]:
        return self._per_head(self._policy.candidates(self._state))

    def _per_head(self, pair: stepping.Pair) -> stepping.Pair:
        """Keys and values [N, n, ..] as [B, Hkv, n, ..]."""
        keys, values = (array.reshape(len(self._sequences), self._heads, *array.shape[1:]) for array in pair)
        return keys, values

    def _after_eviction(self) -> Any:
        """The state without a block that awaits eviction."""
        if self._next is not None or not self._pending:
            return self._state if self._next is None else self._next
        return stepping.evicted(self._policy, self._state, self._evidence())

    def _evidence(self) -> mx.array | None:
        """Queries of the block that awaits eviction, where the method ranks by them."""
        if self._pending and self._queries is None and self.config.needs_queries:
            if self._complaint:
                why = f"the attention of {self._owner} does not show them: {self._complaint}"
            elif capture.hook_installed():
                why = (
                    f"{self._owner} did not call mlx_lm's scaled_dot_product_attention with this cache "
                    f"(a model outside mlx_lm may need to run inside query_capture(model))"
                )
            else:
                why = "remove_hook() was called; make the caches anew, or run the model inside query_capture()"
            raise RuntimeError(
                f"{type(self.config).__module__} ranks by the model's queries, but {why} "
                f"(layer {self._layer}, {self._sequences.longest} tokens seen). knorm and streaming_llm need no queries"
            )
        return self._queries


def _with_keys_tied(state: Any, other: mx.array) -> Any:
    """The state whose keys are evaluated after `other`."""
    return state._replace(slots=state.slots._replace(keys=mx.depends(state.slots.keys, [other])))


@lru_cache(maxsize=128)
def policy_of(config: Retention) -> Policy[Any]:
    """One Policy per config, so that layers with equal settings share one compiled step."""
    return veloxfn.policy(config)


hosts.register(EvictingCache)
