"""What the caches of a model hold, layer by layer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import veloxfn
from veloxfn import Policy, Retention

__all__ = ["Diagnosed", "LayerDiagnostics", "diagnostics", "method_name"]


@dataclass(frozen=True)
class LayerDiagnostics:
    """What the cache of one layer holds. The eviction that awaits the next call counts as done."""

    layer: int
    method: str
    layer_budget: int  # rows per kv head between calls
    tokens_seen: int  # per sequence
    tokens_kept: int  # rows per kv head
    kept_bytes: int  # keys and values of those rows, all heads and sequences
    full_bytes: int  # the same had nothing been evicted
    compression_ratio: float  # full_bytes / kept_bytes, 1.0 when empty


class Diagnosed:
    """A cache that tells what it holds; reading waits for the arrays. The eviction that is held back counts as done."""

    _policy: Policy[Any]
    _state: Any
    _layer: int

    @property
    def config(self) -> Retention:
        """Settings of the method."""
        return self._policy.config

    @property
    def method_state(self) -> Any:
        """The method's state, for `veloxfn.kept_positions` and the like; None before the first token."""
        return self._state

    @property
    def layer(self) -> int:
        """Index of the layer."""
        return self._layer

    @property
    def method(self) -> str:
        """Name of the method."""
        return method_name(self.config)

    @property
    def layer_budget(self) -> int:
        """Rows per kv head between calls."""
        return self.config.budget

    @property
    def tokens_seen(self) -> int:
        """Tokens of each sequence so far."""
        return 0 if self.method_state is None else cast(int, veloxfn.tokens_seen(self.method_state).max().item())

    @property
    def tokens_kept(self) -> int:
        """Rows per kv head, at most the budget."""
        if self.method_state is None:
            return 0
        return min(cast(int, veloxfn.tokens_kept(self.method_state).max().item()), self.config.budget)

    @property
    def kept_bytes(self) -> int:
        """Bytes of the keys and values of those rows, all heads and sequences."""
        return self.tokens_kept * self._bytes_per_token

    @property
    def full_bytes(self) -> int:
        """Bytes had nothing been evicted."""
        return self.tokens_seen * self._bytes_per_token

    @property
    def compression_ratio(self) -> float:
        """full_bytes / kept_bytes, 1.0 when empty."""
        return self.tokens_seen / self.tokens_kept if self.tokens_kept else 1.0

    @property
    def _bytes_per_token(self) -> int:
        """One row of keys and values in every head and sequence."""
        if self.method_state is None:
            return 0
        keys, values = self.method_state.slots.keys, self.method_state.slots.values
        return cast(int, keys.shape[0] * (keys.shape[2] * keys.dtype.size + values.shape[2] * values.dtype.size))


def diagnostics(caches: Iterable[Any]) -> list[LayerDiagnostics]:
    """What each evicting cache among `caches`, those of one model, holds; others are skipped."""
    return [
        LayerDiagnostics(
            layer=cache.layer,
            method=cache.method,
            layer_budget=cache.layer_budget,
            tokens_seen=cache.tokens_seen,
            tokens_kept=cache.tokens_kept,
            kept_bytes=cache.kept_bytes,
            full_bytes=cache.full_bytes,
            compression_ratio=cache.compression_ratio,
        )
        for cache in caches
        if isinstance(cache, Diagnosed)
    ]


def method_name(config: Retention) -> str:
    """The registry's name of a config's method, or its module's for one that is not registered."""
    for name, module in veloxfn.METHODS.items():
        if type(config) is module.Config:
            return name
    return type(config).__module__
