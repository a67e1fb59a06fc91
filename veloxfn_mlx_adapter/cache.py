"""An mlx_lm cache of one layer over a pure veloxfn state."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, cast

import mlx.core as mx
from mlx_lm.models import cache as mlx_lm_cache

import veloxfn
from veloxfn import Contiguous, Policy, Retention
from veloxfn.slots import take_back
from veloxfn_mlx_adapter import capture, observed, portable, stepping
from veloxfn_mlx_adapter.diagnostics import Diagnosed

__all__ = ["EvictingCache", "policy_of"]


class EvictingCache(mlx_lm_cache._BaseCache, capture.AttentionObserver, Diagnosed):  # type: ignore[misc]
    """Key/value cache of one attention layer that keeps `budget` rows per kv head from call to call.

    A call returns everything kept before it and its own block, as mlx_lm's masks expect; the eviction that follows a
    block is held back until the next call. So a prompt fed in one call attends to all of itself, and the last block can
    be taken back exactly (`trim`). Rows are batch x kv heads; the sequences of a batch have one length.

    Args:
        policy: a method with its config bound, as `veloxfn.policy` returns it.
        layer: index of the layer, which names its noise streams.
        owner: name of the model, for errors.
        counts_block: whether the model reads `offset` between `update_and_fetch` and its attention, where it is to
            count the block; only matters with `placement=Contiguous`.
    """

    def __init__(
        self, policy: Policy[Any], *, layer: int = 0, owner: str = "the model", counts_block: bool = False
    ) -> None:
        self._policy = policy
        self._layer = layer
        self._owner = owner
        self._state: Any = None  # the method's; None before the first token
        self._queries: mx.array | None = None  # [N, G, S, D] of the block that awaits eviction
        self._next: Any = None  # the state after that eviction, where attention has carried it out
        self._complaint = ""  # why attention showed no usable queries
        self._batch, self._heads, self._seen = 0, 0, 0
        self._counts_block, self._attending = counts_block, False
        capture.hold(self)

    # A forward pass: offset, make_mask, update_and_fetch, observe.

    @property
    def offset(self) -> int:
        """Rotary position of the next token: tokens seen, with `placement=Contiguous` tokens kept."""
        if not isinstance(self.config.placement, Contiguous):
            return self._seen
        return self._rows if self._attending else min(self._seen, self.config.budget)

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | str | None:
        """The mask of the next N tokens over what `update_and_fetch` will return.

        Args:
            N: tokens of the call.
            return_array: whether the model needs an array.
            window_size: width of a sliding window.

        Returns:
            None for one token, "causal" for others, or [N, kept + N] bool aligned at the lower right.

        Raises:
            ValueError: a sliding window after an eviction: evicted rows leave gaps that differ from layer to layer.
        """
        if window_size is not None and self._seen + N > window_size:
            if self._seen > self.config.budget:
                raise ValueError(
                    f"{self._owner} asks for a sliding window of {window_size} over a cache that has evicted rows "
                    f"(budget {self.config.budget}, {self._seen} tokens seen); give such layers no policy: None"
                )
            return cast(mx.array, mlx_lm_cache.create_causal_mask(N, self._seen, window_size=window_size))
        if N == 1:
            return None
        if not return_array:
            return "causal"
        kept = min(self._seen, self.config.budget) if N else self._rows
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
            RuntimeError: the method ranks by queries and attention did not show those of the block before.
        """
        if keys.ndim != 4 or values.shape[:-1] != keys.shape[:-1]:
            raise ValueError(
                f"keys must be [B, Hkv, N, D] and values [B, Hkv, N, Dv], got {keys.shape} and {values.shape}"
            )
        batch, heads, count, dim = keys.shape
        if self._state is not None and (batch, heads) != (self._batch, self._heads):
            raise ValueError(
                f"this cache holds [B, Hkv] = [{self._batch}, {self._heads}], got keys {keys.shape}: "
                f"sequences cannot join or leave a batch"
            )
        if count == 0:
            return (keys, values) if self._state is None else self._view()
        keys, values = (block.reshape(batch * heads, count, block.shape[3]) for block in (keys, values))
        if self._state is None:
            streams = veloxfn.streams(batch, heads, self._layer)
            state = self._policy.init_state(batch * heads, dim, values.shape[2], dtype=keys.dtype, streams=streams)
            state, pair = stepping.absorbed(self._policy, state, keys, values)
        elif self._next is not None and count == 1:
            state, pair = stepping.absorbed_in_step(self._policy, self._next, keys, values)
        else:
            state, pair = stepping.absorbed(self._policy, self._after_eviction(), keys, values)
        self._state, self._next, self._queries, self._complaint = state, None, None, ""
        self._batch, self._heads, self._seen = batch, heads, self._seen + count
        self._attending = self._counts_block
        return self._per_head(pair)

    def observe(self, queries: mx.array, keys: mx.array, scale: float, mask: Any) -> Any:
        """Keep the block's queries [B, Hq, N, D] for the eviction that follows it.

        The first call after `update_and_fetch` counts: layers that share this cache attend to it later.
        """
        self._attending = False
        if self.config.needs_queries and self._pending and self._queries is None:
            cached = [self._batch, self._heads, self._rows, self._state.slots.keys.shape[2]]
            self._complaint = observed.complaint(queries, keys, mask, cached=cached, arrivals=self._pending)
            if not self._complaint:
                self._queries = observed.per_row(queries, heads=self._heads, scale=scale)
        if self._next is None and not self._complaint and stepping.is_steady(self._policy, self._state):
            self._next = stepping.evicted_in_step(self._policy, self._state, self._queries)
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

    # Eviction, and what is refused. `merge` is absent: mlx_lm then serves sequences one by one.

    def settle(self) -> None:
        """Carry out the eviction that is held back; afterwards the last block cannot be taken back."""
        if self._pending:
            self._state = self._after_eviction()
            self._next, self._queries, self._complaint = None, None, ""

    def is_trimmable(self) -> bool:
        """Whether any number of tokens can be taken back: while all that were seen came in the last call."""
        return self._seen == self._pending

    def trim(self, n: int) -> int:
        """Take back the last n tokens, exactly.

        Returns:
            n.

        Raises:
            ValueError: n exceeds the block whose eviction is held back.
        """
        if not 0 <= n <= self._pending:
            raise ValueError(
                f"trim takes back 0 to {self._pending} tokens, the last block, got {n}: "
                f"what was evicted before it is gone"
            )
        if n:
            left = self._pending - n
            self._state, self._next = take_back(self._state, n, budget=self.config.budget), None
            self._queries = self._queries[:, :, :left] if left and self._queries is not None else None
            self._seen, self._attending = self._seen - n, False
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
            "owner": self._owner,
            "batch": self._batch,
            "heads": self._heads,
            "seen": self._seen,
            "counts_block": self._counts_block,
            "queries": self._queries is not None,
        }
        return [portable.array_of(record), *self._arrays()]

    @state.setter
    def state(self, arrays: list[mx.array]) -> None:
        record, held = portable.record_of(arrays[0]), list(arrays[1:])
        bound: Policy[Any] | None = getattr(self, "_policy", None)
        same = bound is not None and portable.written(bound.config) == record["config"]
        policy = bound if bound is not None and same else policy_of(portable.config_of(record["config"]))
        self._queries = held.pop() if record["queries"] else None
        self._state = portable.state_of(policy, held)
        self._policy, self._layer, self._owner = policy, record["layer"], record["owner"]
        self._batch, self._heads, self._seen = record["batch"], record["heads"], record["seen"]
        self._counts_block, self._attending = record["counts_block"], False
        self._next, self._complaint = None, ""
        if bound is None:
            capture.hold(self)

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
        capture.hold(made)
        return made

    __copy__ = copy

    def __deepcopy__(self, memo: dict[int, Any]) -> EvictingCache:
        return self.copy()

    def size(self) -> int:
        """Tokens seen, as in mlx_lm's unbounded cache."""
        return self._seen

    def empty(self) -> bool:
        """Whether no token has been seen."""
        return self._seen == 0

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

    def _arrays(self) -> list[mx.array]:
        return portable.leaves(self._state) + ([] if self._queries is None else [self._queries])

    def _view(self) -> tuple[mx.array, mx.array]:
        return self._per_head(self._policy.candidates(self._state))

    def _per_head(self, pair: stepping.Pair) -> stepping.Pair:
        """Keys and values [N, n, ..] as [B, Hkv, n, ..]."""
        keys, values = (array.reshape(self._batch, self._heads, *array.shape[1:]) for array in pair)
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
                f"(layer {self._layer}, {self._seen} tokens seen). knorm and streaming_llm need no queries"
            )
        return self._queries


def _with_keys_tied(state: Any, other: mx.array) -> Any:
    """The state whose keys are evaluated after `other`."""
    return state._replace(slots=state.slots._replace(keys=mx.depends(state.slots.keys, [other])))


@lru_cache(maxsize=128)
def policy_of(config: Retention) -> Policy[Any]:
    """One Policy per config, so that layers with equal settings share one compiled step."""
    return veloxfn.policy(config)


# `mlx_lm.models.cache.load_prompt_cache` looks classes up by name in its own module.
mlx_lm_cache.EvictingCache = EvictingCache
