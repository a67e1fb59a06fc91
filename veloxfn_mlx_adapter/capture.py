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

_NAME = "scaled_dot_product_attention"
_lock = threading.RLock()
_tokens = itertools.count()
_holders: set[int] = set()
_outside: dict[str, ModuleType] = {}  # modules of models that are not mlx_lm's own
_swap: list[Callable[..., mx.array]] = []  # [original, replacement] while installed


class AttentionObserver:
    """A cache that is shown each attention call made with it."""

    def observe(self, queries: mx.array, keys: mx.array, scale: float, mask: Any) -> Any:
        """See queries [B, Hq, N, D] and keys [B, Hkv, n, D] before attention; return the mask to attend with."""
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
        return token


def _release(token: int) -> None:
    with _lock:
        if token in _holders:
            _holders.discard(token)
            if not _holders:
                _restore()


def _restore() -> None:
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
        if isinstance(cache, AttentionObserver):
            mask = cache.observe(queries, keys, scale, mask)
        return original(queries, keys, values, cache=cache, scale=scale, mask=mask, **options)

    return attend
