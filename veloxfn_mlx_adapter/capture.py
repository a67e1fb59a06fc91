"""Hand the queries of a model's attention to the caches that observe it.

Models of `mlx_lm` (and of hosts of the same shape, see hosts.py) call `models.base.scaled_dot_product_attention` with
queries, keys, values and `cache=`. While any observing cache is alive that function, wherever a loaded module refers to
it, is replaced by one that shows the call to the cache first. For any other cache the replacement does nothing but call
the original, and with the last observing cache it goes. A model of one's own calls `attention` instead.
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

from veloxfn_mlx_adapter.hosts import ATTENTION, HOSTS, bases, of_hosts

__all__ = [
    "AttentionObserver",
    "attention",
    "hold",
    "hook_installed",
    "modules_of",
    "query_capture",
    "remove_hook",
    "uses_hook",
]

_TRIM = "trim_prompt_cache"
_lock = threading.RLock()
_tokens = itertools.count()
_holders: set[int] = set()
_outside: dict[str, ModuleType] = {}  # modules of models that are not a host's own
_swaps: dict[str, tuple[Callable[..., mx.array], Callable[..., mx.array]]] = {}  # host's base: original, replacement
_scanned: list[tuple[int, int]] = []  # how many modules there were when they were gone through
_trims: list[Callable[..., Any]] = []  # mlx_lm.generate's own trim_prompt_cache while it is replaced


class AttentionObserver:
    """A cache that is shown each attention call made with it."""

    def observe(self, queries: mx.array, keys: mx.array, scale: float, mask: Any) -> Any:
        """See queries [B, Hq, N, D] and keys [B, Hkv, n, D] before attention; return the mask to attend with."""
        raise NotImplementedError

    def tied(self, output: mx.array) -> mx.array:
        """The attention's output [B, Hq, N, Dv], depending on what the cache wants evaluated with it."""
        raise NotImplementedError


def attention(
    queries: mx.array, keys: mx.array, values: mx.array, *, cache: Any, scale: float, mask: Any = None, **options: Any
) -> mx.array:
    """MLX's attention, shown to the cache: what a model of no known host calls after `cache.update_and_fetch`.

    Args:
        queries: [B, Hq, N, D].
        keys: [B, Hkv, n, D], of `update_and_fetch`.
        values: [B, Hkv, n, Dv].
        cache: an `EvictingCache`, or any other cache or None, which sees nothing.
        scale: what the products are multiplied by.
        mask: what `cache.make_mask` returned.
        options: of `mx.fast.scaled_dot_product_attention`, such as `sinks`.

    Returns:
        [B, Hq, N, Dv].
    """
    return _shown(_plain, queries, keys, values, cache=cache, scale=scale, mask=mask, **options)


def _plain(
    queries: mx.array, keys: mx.array, values: mx.array, *, cache: Any, scale: float, mask: Any, **options: Any
) -> mx.array:
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask, **options)


def hook_installed() -> bool:
    """Whether attention calls of the loaded hosts are being shown to their caches now."""
    return bool(_holders)


def hold(owner: object) -> None:
    """Keep the hook installed for as long as `owner`, any object that can be weakly referenced, is alive."""
    weakref.finalize(owner, _release, _acquire((), thoroughly=False)).atexit = False


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
    found = list(bases())
    targets = {id(base) for base in found} | {id(getattr(base, ATTENTION)) for base in found}
    targets |= {id(function) for swap in _swaps.values() for function in swap} | {id(attention)}
    modules = [module for module in modules_of(layer) if module not in found]
    return any(id(value) in targets for module in modules for value in vars(module).values())


def _acquire(modules: Iterable[ModuleType], *, thoroughly: bool = True) -> int:
    """Hold the hook; modules are gone through only if some were loaded since, unless `thoroughly`."""
    with _lock:
        token = next(_tokens)
        _holders.add(token)
        _outside.update((module.__name__, module) for module in modules if module.__name__.split(".")[0] not in HOSTS)
        for base in bases():
            if base.__name__ not in _swaps:
                original = getattr(base, ATTENTION)
                _swaps[base.__name__] = (original, _observed(original))
        loaded = (len(sys.modules), len(_swaps))
        if thoroughly or _scanned != [loaded]:
            for swap in _swaps.values():
                _replace(*swap)
            _scanned[:] = [loaded]
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
    for original, replacement in _swaps.values():
        _replace(replacement, original)
    _swaps.clear()
    _outside.clear()
    _scanned.clear()


def _replace(old: Callable[..., mx.array], new: Callable[..., mx.array]) -> None:
    """Put `new` wherever a loaded module of a host, or one that was named, holds `old`."""
    for module in [*of_hosts(), *_outside.values()]:
        held = getattr(module, "__dict__", {})
        for name in [name for name, value in list(held.items()) if value is old]:
            setattr(module, name, new)


@functools.cache  # one replacement per original: what another patch put back late is still recognised
def _observed(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """The original function, showing its call to an observing cache first."""

    @functools.wraps(original)
    def attend(*arrays: Any, **options: Any) -> mx.array:
        return _shown(original, *arrays, **options)

    return attend


def _shown(
    attend: Callable[..., mx.array],
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    cache: Any,
    scale: float,
    mask: Any,
    **options: Any,
) -> mx.array:
    if not isinstance(cache, AttentionObserver):
        return attend(queries, keys, values, cache=cache, scale=scale, mask=mask, **options)
    mask = cache.observe(queries, keys, scale, mask)
    return cache.tied(attend(queries, keys, values, cache=cache, scale=scale, mask=mask, **options))
