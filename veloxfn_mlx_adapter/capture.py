"""Hand the queries of mlx_lm's attention to the caches that observe it.

`mlx_lm` models call `mlx_lm.models.base.scaled_dot_product_attention(queries, keys, values, cache=...)`. While any
observing cache is alive that function, wherever a loaded module refers to it, is replaced by one that shows the call to
the cache first. For any other cache the replacement does nothing but call the original, and with the last observing
cache it goes.
"""

from __future__ import annotations

import functools
import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import mlx.core as mx
from mlx_lm.models import base

__all__ = ["AttentionObserver", "hold", "hook_installed", "modules_of", "query_capture", "remove_hook", "uses_hook"]

_NAME, _TRIM = "scaled_dot_product_attention", "trim_prompt_cache"
_lock = threading.RLock()
_tokens = itertools.count()
_holders: set[int] = set()
_outside: dict[str, ModuleType] = {}  # modules of models that are not mlx_lm's own
_swap: list[Callable[..., mx.array]] = []  # [original, replacement] while installed
_trims: list[Callable[..., Any]] = []  # mlx_lm.generate's own trim_prompt_cache while it is replaced


class AttentionObserver:
    """A cache that is shown each attention call made with it."""

    def observe(self, queries: mx.array, keys: mx.array, scale: float, mask: Any) -> Any:
        """See queries [B, Hq, N, D] and keys [B, Hkv, n, D] before attention; return the mask to attend with."""
        raise NotImplementedError

    def tied(self, output: mx.array) -> mx.array:
        """The attention's output [B, Hq, N, Dv], depending on what the cache wants evaluated with it."""
        raise NotImplementedError


def hook_installed() -> bool:
    """Whether attention calls are being shown to their caches now."""
    return bool(_swap)


def hold(owner: object) -> None:
    """Keep the hook installed for as long as `owner`, any object that can be weakly referenced, is alive."""
    weakref.finalize(owner, _release, _acquire(())).atexit = False


@contextmanager
def query_capture(model: Any = None) -> Iterator[None]:
    """Keep the hook installed inside a `with` block, whatever caches come and go.

    Args:
        model: a model whose own modules are hooked too, where they are not mlx_lm's.
    """
    token = _acquire(() if model is None else modules_of(model))
    try:
        yield
    finally:
        _release(token)


def remove_hook() -> None:
    """Restore the original function everywhere now; caches that need queries say so when they are used again."""
    with _lock:
        _holders.clear()
        _restore()


def modules_of(model: Any) -> list[ModuleType]:
    """The Python modules that define the classes of `model` and of its layers."""
    names = {cls.__module__ for part in model.modules() for cls in type(part).__mro__}
    return [sys.modules[name] for name in sorted(names) if name in sys.modules]


def uses_hook(layer: Any) -> bool:
    """Whether a module of `layer` refers to the hooked function, so that it can be called there."""
    targets = {id(base), id(getattr(base, _NAME)), *map(id, _swap)}
    modules = [module for module in modules_of(layer) if module is not base]
    return any(id(value) in targets for module in modules for value in vars(module).values())


def _acquire(modules: Iterable[ModuleType]) -> int:
    with _lock:
        token = next(_tokens)
        _holders.add(token)
        _outside.update((module.__name__, module) for module in modules if not _of_mlx_lm(module.__name__))
        if not _swap:
            original = getattr(base, _NAME)
            _swap.extend((original, _observed(original)))
        _replace(*_swap)
        _rewind_exactly()
        return token


def _release(token: int) -> None:
    with _lock:
        if token in _holders:
            _holders.discard(token)
            if not _holders:
                _restore()


def _rewind_exactly() -> None:
    """Let speculative decoding take back tokens from observing caches.

    mlx_lm rewinds through `trim_prompt_cache`, which silently does nothing unless *any* number of tokens can be taken
    back. A cache that evicts can take back its last block, which is all that is asked for, and raises beyond it.
    """
    generate = sys.modules.get("mlx_lm.generate")
    original = getattr(generate, _TRIM, None)
    if generate is None or original is None or _trims:
        return

    @functools.wraps(original)
    def trim_prompt_cache(cache: list[Any], num_tokens: int) -> Any:
        if not any(isinstance(layer, AttentionObserver) for layer in cache):
            return original(cache, num_tokens)
        taken = [layer.trim(num_tokens) for layer in cache]
        return taken[0]

    _trims.append(original)
    setattr(generate, _TRIM, trim_prompt_cache)


def _restore() -> None:
    if _trims:
        setattr(sys.modules["mlx_lm.generate"], _TRIM, _trims.pop())
    if _swap:
        original, replacement = _swap
        _replace(replacement, original)
        _swap.clear()
        _outside.clear()


def _of_mlx_lm(name: str) -> bool:
    return name == "mlx_lm" or name.startswith("mlx_lm.")


def _replace(old: Callable[..., mx.array], new: Callable[..., mx.array]) -> None:
    """Put `new` wherever a loaded module of mlx_lm, or one that was named, holds `old`."""
    loaded = [module for name, module in list(sys.modules.items()) if _of_mlx_lm(name)]
    for module in [*loaded, *_outside.values()]:
        held = getattr(module, "__dict__", {})
        for name in [name for name, value in list(held.items()) if value is old]:
            setattr(module, name, new)


@functools.cache  # one replacement per original: what another patch put back late is still recognised
def _observed(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """The original function, showing its call to an observing cache first."""

    @functools.wraps(original)
    def attend(
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        cache: Any,
        scale: float,
        mask: Any,
        **options: Any,
    ) -> mx.array:
        if not isinstance(cache, AttentionObserver):
            return original(queries, keys, values, cache=cache, scale=scale, mask=mask, **options)
        mask = cache.observe(queries, keys, scale, mask)
        return cache.tied(original(queries, keys, values, cache=cache, scale=scale, mask=mask, **options))

    return attend
