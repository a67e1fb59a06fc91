"""An mlx_lm cache of one layer over a pure veloxfn state."""

from __future__ import annotations

from typing import Any, cast

import mlx.core as mx
from mlx_lm.models import cache as mlx_lm_cache

import veloxfn
from veloxfn import Policy
from veloxfn_mlx_adapter import capture, portable
from veloxfn_mlx_adapter.rollback import take_back

__all__ = ["EvictingCache", "needs_queries"]


def needs_queries(config: veloxfn.Retention) -> bool:
    """Whether a method with this config ranks by the model's queries."""
    wanted = getattr(config, "needs_queries", None)
    return bool(getattr(config, "query_source", None) == "true" if wanted is None else wanted)


class EvictingCache(mlx_lm_cache._BaseCache, capture.AttentionObserver):  # type: ignore[misc]
    """Key/value cache of one attention layer that holds `budget` rows per kv head between calls.

    A call returns everything kept before it and its own block, as mlx_lm's masks expect; the eviction that follows a
    block is held back until the next call. So a prompt fed in one call attends to all of itself, and the last block can
    be taken back exactly (`trim`). Rows are batch x kv heads; a batch has one length.

    Args:
        policy: a method with its config bound, as `veloxfn.policy` returns it.
        layer: index of the layer, which names its noise streams.
        owner: name of the model, for errors.
    """

    def __init__(self, policy: Policy[Any], *, layer: int = 0, owner: str = "the model") -> None:
        self._policy = policy
        self._layer = layer
        self._owner = owner
        self._state: Any = None  # the method's state; None before the first token
        self._queries: mx.array | None = None  # [N, G, S, D] of the block awaiting eviction
        self._missing = ""  # why the block has no queries, where that is known
        self._batch, self._heads, self._offset = 0, 0, 0
        capture.hold(self)

    @property
    def config(self) -> veloxfn.Retention:
        """Settings of the method."""
        return self._policy.config

    @property
    def method_state(self) -> Any:
        """The method's state, for `veloxfn.kept_positions` and the like; None before the first token."""
        return self._state

    # What a forward pass calls, in this order.

    @property
    def offset(self) -> int:
        """Tokens seen by each row: the rotary position of the next one."""
        return self._offset

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """The mask of the next N tokens over what `update_and_fetch` will return.

        Args:
            N: tokens of the call.
            return_array: whether the model needs an array.
            window_size: width of a sliding window; only while it spans all tokens, or nothing was evicted.

        Returns:
            None for one token, "causal" for others, or [N, kept + N] bool aligned at the lower right.

        Raises:
            ValueError: a sliding window after an eviction: evicted rows leave gaps that differ from layer to layer.
        """
        if window_size is not None and self._offset + N > window_size:
            if self._offset > self._budget:
                raise ValueError(
                    f"{self._owner} asks for a sliding window of {window_size} over a cache that has evicted rows "
                    f"(budget {self._budget}, {self._offset} tokens seen); give that layer None for a policy"
                )
            return cast(mx.array, mlx_lm_cache.create_causal_mask(N, self._offset, window_size=window_size))
        if N == 1:
            return None
        if not return_array:
            return "causal"
        kept = min(self._offset, self._budget) if N else self._columns
        return mx.arange(kept + N) <= mx.arange(kept, kept + N)[:, None]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Evict after the block before, then absorb this one.

        Args:
            keys: [B, Hkv, N, D], rotated.
            values: [B, Hkv, N, Dv].

        Returns:
            keys [B, Hkv, n, D] and values [B, Hkv, n, Dv] to attend to: the kept rows, then the N new ones in order.

        Raises:
            ValueError: other batch, heads or dimensions than before.
            TypeError: another dtype than before.
            RuntimeError: the method ranks by queries and attention did not show those of the block before.
        """
        if keys.ndim != 4 or values.shape[:-1] != keys.shape[:-1]:
            raise ValueError(
                f"keys must be [B, Hkv, N, D] and values [B, Hkv, N, Dv], got {list(keys.shape)}, {list(values.shape)}"
            )
        batch, heads, count, key_dim = keys.shape
        if self._state is not None and (batch, heads) != (self._batch, self._heads):
            raise ValueError(
                f"this cache holds [B, Hkv] = [{self._batch}, {self._heads}], got keys {list(keys.shape)}; "
                f"sequences do not join or leave a batch"
            )
        if count == 0:
            return (keys, values) if self._state is None else self._view()
        self.settle()
        if self._state is None:
            streams = veloxfn.streams(batch, heads, self._layer)
            self._state = self._policy.init_state(
                batch * heads, key_dim, values.shape[-1], dtype=keys.dtype, streams=streams
            )
            self._batch, self._heads = batch, heads
        rows = (batch * heads, count)
        self._state = self._policy.absorb(
            self._state, keys.reshape(*rows, key_dim), values.reshape(*rows, values.shape[-1])
        )
        self._offset += count
        # Logits do not depend on masses and the like before the budget is full; without this tie their graph would
        # grow with every decoded token.
        _, _, *bookkeeping = portable.leaves(self._state)
        k, v = mx.depends(list(self._view()), bookkeeping)
        return k, v

    def observe(self, queries: mx.array, keys: mx.array, scale: float, mask: Any) -> Any:
        """Keep queries [B, Hq, N, D] of the block for the eviction that follows it.

        A layer that reads another one's cache is not evidence for it: the first call after `update_and_fetch` counts.
        """
        if needs_queries(self._policy.config) and self._pending and self._queries is None:
            self._missing = self._unusable(queries, keys, mask)
            if not self._missing:
                batch, heads, count, dim = queries.shape
                factor = scale * dim**0.5
                if abs(factor - 1) > 1e-6:  # methods divide by sqrt(D), whatever the model does
                    queries = queries * factor
                self._queries = queries.reshape(batch * self._heads, heads // self._heads, count, dim)
        if isinstance(mask, mx.array) and mask.dtype == mx.bool_ and mask.shape[-1] != keys.shape[-2]:
            return self._fitted(mask, keys.shape[-2], queries.shape[-2])
        return mask

    def keys_and_values(self) -> tuple[mx.array | None, mx.array | None]:
        """What `update_and_fetch` returned last, for layers that share this layer's cache."""
        return (None, None) if self._state is None else self._view()

    @property
    def keys(self) -> mx.array | None:
        """Keys [B, Hkv, n, D] as `update_and_fetch` returned them last."""
        return self.keys_and_values()[0]

    @keys.setter
    def keys(self, tied: mx.array) -> None:
        """Evaluate whatever `tied` depends on before the keys; its content is not used."""
        self._tie("keys", tied)

    @property
    def values(self) -> mx.array | None:
        """Values [B, Hkv, n, Dv] as `update_and_fetch` returned them last."""
        return self.keys_and_values()[1]

    @values.setter
    def values(self, tied: mx.array) -> None:
        """Evaluate whatever `tied` depends on before the values; its content is not used."""
        self._tie("values", tied)

    # Eviction, and what is refused.

    def settle(self) -> None:
        """Carry out the eviction that is held back; afterwards the last block cannot be taken back."""
        if not self._pending:
            return
        if needs_queries(self._policy.config):
            if self._queries is None:
                raise RuntimeError(self._no_queries())
            self._state = self._policy.evict(self._state, queries=self._queries)
        else:
            self._state = self._policy.evict(self._state)
        self._queries, self._missing = None, ""

    def is_trimmable(self) -> bool:
        """Whether any number of the tokens seen can be taken back: while all came in the last call, or none has."""
        return self._offset == self._pending

    def trim(self, n: int) -> int:
        """Take back the last n tokens, exactly.

        Returns:
            n.

        Raises:
            ValueError: n exceeds the block whose eviction is held back.
        """
        if not 0 <= n <= self._pending:
            raise ValueError(
                f"trim takes back at most the last block of {self._pending} tokens, got {n}: "
                f"rows evicted before it are gone"
            )
        if n:
            self._state = take_back(self._state, n, budget=self._budget)
            self._offset -= n
            left = self._pending
            self._queries = None if self._queries is None or not left else self._queries[:, :, :left]
        return n

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> None:
        """Refuse: a quantised cache would replace this one and evict nothing.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            f"kv_bits={bits} cannot be combined with eviction: drop kv_bits, or lower the budget ({self._budget} rows)"
        )

    # State, copies, sizes.

    @property
    def state(self) -> list[mx.array]:
        """Everything a later process needs, as arrays: a uint8 record, the state's leaves, the block's queries."""
        record = {
            "config": portable.written(self._policy.config),
            "layer": self._layer,
            "owner": self._owner,
            "batch": self._batch,
            "heads": self._heads,
            "offset": self._offset,
            "queries": self._queries is not None,
        }
        return [portable.array_of(record), *self._arrays()]

    @state.setter
    def state(self, arrays: list[mx.array]) -> None:
        record, held = portable.record_of(arrays[0]), list(arrays[1:])
        config = portable.config_of(record["config"])
        policy = getattr(self, "_policy", None)
        if policy is None or policy.config != config:
            policy = veloxfn.policy(config)
        queries = held.pop() if record["queries"] else None
        state = None
        if held:
            keys, values = held[:2]
            template = policy.init_state(keys.shape[0], keys.shape[2], values.shape[2], dtype=keys.dtype)
            state = portable.restored(template, held)
        known = bool(getattr(self, "_policy", None))
        self._policy, self._layer, self._owner = policy, record["layer"], record["owner"]
        self._state, self._queries, self._missing = state, queries, ""
        self._batch, self._heads, self._offset = record["batch"], record["heads"], record["offset"]
        if not known:
            capture.hold(self)

    @property
    def meta_state(self) -> str:
        """Nothing: `state` holds all (mlx-lm 0.31 asks)."""
        return ""

    @meta_state.setter
    def meta_state(self, text: str) -> None:
        if text:
            raise ValueError(f"an eviction cache has no meta_state, got {text!r}")

    @classmethod
    def from_state(cls, state: list[mx.array], meta_state: Any = None) -> EvictingCache:
        """A cache over a saved `state`; `meta_state` is ignored (mlx-lm 0.31 passes one)."""
        made = cls.__new__(cls)
        made.state = state
        return made

    def copy(self) -> EvictingCache:
        """An independent cache; arrays are immutable, so they are shared until one of the two goes on."""
        made = type(self).__new__(type(self))
        made.__dict__.update(self.__dict__)
        capture.hold(made)
        return made

    __copy__ = copy

    def __deepcopy__(self, memo: dict[int, Any]) -> EvictingCache:
        return self.copy()

    def size(self) -> int:
        """Tokens seen, as in mlx_lm's unbounded cache."""
        return self._offset

    def empty(self) -> bool:
        """Whether no token has been seen."""
        return self._offset == 0

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays held."""
        return sum(array.nbytes for array in self._arrays())

    # Inside.

    @property
    def _budget(self) -> int:
        return self._policy.config.budget

    @property
    def _pending(self) -> int:
        """Tokens of the block whose eviction is held back."""
        return 0 if self._state is None else cast(int, self._state.slots.arrived.shape[1])

    @property
    def _columns(self) -> int:
        """Rows of what `_view` returns."""
        length = 0 if self._state is None else cast(int, self._state.slots.positions.shape[1])
        return length if self._pending else min(length, self._budget)

    def _arrays(self) -> list[mx.array]:
        return portable.leaves(self._state) + ([] if self._queries is None else [self._queries])

    def _view(self) -> tuple[mx.array, mx.array]:
        """Candidates as [B, Hkv, n, D] and [B, Hkv, n, Dv]."""
        keys, values = self._policy.candidates(self._state)
        head = (self._batch, self._heads, keys.shape[1])
        return keys.reshape(*head, keys.shape[2]), values.reshape(*head, values.shape[2])

    def _tie(self, name: str, tied: mx.array) -> None:
        current = self.keys_and_values()[("keys", "values").index(name)]
        if current is None or tied.shape != current.shape:
            shape = None if current is None else list(current.shape)
            raise ValueError(f"{name} can be set only to tie an evaluation to them: shape {shape}, got {list(tied.shape)}")
        slots = self._state.slots
        slots = slots._replace(**{name: mx.depends(getattr(slots, name), [tied])})
        self._state = self._state._replace(slots=slots)

    def _unusable(self, queries: mx.array, keys: mx.array, mask: Any) -> str:
        """Why this attention call is no evidence, or ""."""
        wanted = [self._batch, self._heads, self._columns, self._state.slots.keys.shape[2]]
        if list(keys.shape) != wanted:
            return f"it attends to keys {list(keys.shape)}, not to the cached {wanted}"
        if queries.shape[-1] != wanted[-1] or queries.shape[-2] != self._pending or queries.shape[1] % self._heads:
            return (
                f"its queries {list(queries.shape)} are not [B, Hq, N, D] of the block: Hq a multiple of "
                f"{self._heads}, N = {self._pending}, D = {wanted[-1]}"
            )
        if isinstance(mask, mx.array) and mask.dtype != mx.bool_:
            return "it adds an array to the scores, which the queries do not show"
        return ""

    def _no_queries(self) -> str:
        name = type(self._policy.config).__module__.rpartition(".")[2]
        if self._missing:
            why = f"the attention of {self._owner} cannot be read: {self._missing}"
        elif capture.hook_installed():
            why = f"{self._owner} did not call mlx_lm's scaled_dot_product_attention with this cache"
        else:
            why = "the query hook was removed; make caches anew, or wrap the call in query_capture()"
        return (
            f"{name} ranks by the model's queries, but {why}. Layer {self._layer}, {self._offset} tokens seen. "
            f"Methods without queries (knorm, streaming_llm) work with any attention"
        )

    def _fitted(self, mask: mx.array, columns: int, count: int) -> mx.array:
        """A mask made for a layer with another budget: all kept rows are visible, the block is causal."""
        block = mask[..., mask.shape[-1] - count :]
        kept = mx.ones((*mask.shape[:-1], columns - count), mx.bool_)
        return mx.concatenate([kept, block], axis=-1)


# `mlx_lm.models.cache.load_prompt_cache` looks classes up by name in its own module.
mlx_lm_cache.EvictingCache = EvictingCache
