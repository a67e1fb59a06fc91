"""What the caches of a model hold, layer by layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, cast

import mlx.core as mx

import veloxfn
from veloxfn import Contiguous, Policy, Retention
from veloxfn.accounting import row_bytes

__all__ = ["Diagnosed", "LayerDiagnostics", "describe", "diagnostics", "method_name"]


@dataclass(frozen=True)
class LayerDiagnostics:
    """What the cache of one layer holds. The eviction that awaits the next call counts as done."""

    layer: int
    method: str
    layer_budget: int  # rows per kv head between calls
    tokens_seen: int  # of the longest sequence, padding not counted
    tokens_kept: int  # rows per kv head of the sequence that has most
    kept_bytes: int  # live keys and values, all heads and sequences
    full_bytes: int  # the same had nothing been evicted
    compression_ratio: float  # full_bytes / kept_bytes, 1.0 when empty
    settings: dict[str, Any] = field(default_factory=dict, hash=False)  # of the method beside its budget, by name


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
    def settings(self) -> dict[str, Any]:
        """Settings of the method beside its budget, by name."""
        names = [each.name for each in dataclasses.fields(self.config) if each.name != "budget"]
        return {name: getattr(self.config, name) for name in names}

    @property
    def tokens_seen(self) -> int:
        """Tokens of the longest sequence so far, padding not counted."""
        return 0 if self.method_state is None else cast(int, veloxfn.tokens_seen(self.method_state).max().item())

    @property
    def tokens_kept(self) -> int:
        """Rows per kv head, at most the budget, of the sequence that has most."""
        return 0 if self.method_state is None else cast(int, self._rows_kept().max().item())

    @property
    def kept_bytes(self) -> int:
        """Bytes of the live keys and values, all heads and sequences."""
        state = self.method_state
        return 0 if state is None else row_bytes(state) * cast(int, self._rows_kept().astype(mx.int64).sum().item())

    @property
    def full_bytes(self) -> int:
        """Bytes had nothing been evicted."""
        return 0 if self.method_state is None else cast(int, veloxfn.full_bytes(self.method_state).item())

    @property
    def compression_ratio(self) -> float:
        """full_bytes / kept_bytes, 1.0 when empty."""
        return _ratio(self.full_bytes, self.kept_bytes)

    def _rows_kept(self) -> mx.array:
        """Live slots [N] int32 once the eviction that is held back is carried out."""
        return mx.minimum(veloxfn.tokens_kept(self.method_state), self.config.budget)


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
            settings=cache.settings,
        )
        for cache in caches
        if isinstance(cache, Diagnosed)
    ]


_COLUMNS = ("layer", "method", "budget", "seen", "kept", "bytes kept", "bytes full", "ratio", "settings")
_ALWAYS = ("targets", "merge", "gate", "noise")  # told even where they are the default


def describe(caches: Iterable[Any]) -> str:
    """A table of what the caches of one model hold: one line per layer, then the sums of those that evict.

    Columns: layer, method (or the model's own cache), budget in rows per kv head, tokens seen and rows kept per kv head
    (of the longest sequence), bytes of the live keys and values, bytes of a full cache, their ratio, and the settings
    that differ from the method's defaults; CaM's merging and Keyformer's noise are always told.

    Args:
        caches: what `make_prompt_cache` returned, in the model's order.

    Returns:
        Lines without a line break at the end. Reading waits for the arrays.

    >>> print(describe(make_prompt_cache(model, policy)))  # doctest: +SKIP
    layer  method  budget  seen  kept  bytes kept  bytes full  ratio  settings
        0  h2o         32    51    32       8,192      13,056   1.59  age_normalised=True
        1  h2o         32    51    32       8,192      13,056   1.59  age_normalised=True
    total              64   102    64      16,384      26,112   1.59
    """
    lines: list[tuple[str, ...]] = [_COLUMNS]
    sums = [0] * 5
    for index, cache in enumerate(caches):
        if not isinstance(cache, Diagnosed):
            lines.append((f"{index}", f"the model's own {type(cache).__name__}", *("-",) * 6, ""))
            continue
        numbers = (cache.layer_budget, cache.tokens_seen, cache.tokens_kept, cache.kept_bytes, cache.full_bytes)
        lines.append((f"{cache.layer}", cache.method, *_cells(*numbers), _told(cache)))
        sums = [total + number for total, number in zip(sums, numbers, strict=True)]
    lines.append(("total", "", *_cells(*sums), ""))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if name in ("method", "settings") else cell.rjust(width)
            for name, cell, width in zip(_COLUMNS, line, widths, strict=True)
        ).rstrip()
        for line in lines
    )


def _cells(budget: int, seen: int, kept: int, kept_bytes: int, full_bytes: int) -> list[str]:
    """Five columns and the ratio of the last two."""
    ratio = _ratio(full_bytes, kept_bytes)
    return [f"{budget}", f"{seen}", f"{kept}", f"{kept_bytes:,}", f"{full_bytes:,}", f"{ratio:.2f}"]


def _ratio(full: int, kept: int) -> float:
    return full / kept if kept else 1.0


def _told(cache: Diagnosed) -> str:
    """The settings that are worth a word, as name=value."""
    defaults = {each.name: each.default for each in dataclasses.fields(cache.config)}
    words = []
    for name, value in cache.settings.items():
        if name == "placement":
            words += ["placement=contiguous"] if isinstance(value, Contiguous) else []
        elif name in _ALWAYS or value != defaults[name]:
            words.append(f"{name}={value}")
    return " ".join(words)


def method_name(config: Retention) -> str:
    """The registry's name of a config's method, or its module's for one that is not registered."""
    for name, module in veloxfn.METHODS.items():
        if type(config) is module.Config:
            return name
    return type(config).__module__
