"""Find the module of a config, and bind a config to a method's functions."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any, TypeVar

import mlx.core as mx

from veloxfn import reading
from veloxfn.base import Policy, Retention, State

__all__ = ["attended_of", "bind", "entries_of", "is_own", "module_of", "ranking_of"]

S = TypeVar("S", bound=State)
Pair = tuple[mx.array, mx.array]


def bind(
    config: Retention,
    init_state: Callable[..., S],
    absorb: Callable[..., S],
    evict: Callable[..., S],
    update_batched: Callable[..., S] | None = None,
    get_kv: Callable[..., Pair] = reading.get_kv,
    candidates: Callable[..., Pair] = reading.candidates,
) -> Policy[S]:
    """A Policy whose functions are those given with `config` as their first argument.

    `update_batched` is `evict` after `absorb` unless it is given.
    """

    def update(
        config: Retention, state: S, keys: mx.array, values: mx.array, *, valid: mx.array | None = None, **evidence: Any
    ) -> S:
        return evict(config, absorb(config, state, keys, values, valid=valid), **evidence)

    return Policy(
        config=config,
        init_state=partial(init_state, config),
        absorb=partial(absorb, config),
        candidates=partial(candidates, config),
        evict=partial(evict, config),
        update_batched=partial(update_batched or update, config),
        get_kv=partial(get_kv, config),
    )


def module_of(config: Retention) -> ModuleType:
    """The method module that defines the type of `config`.

    Raises:
        TypeError: that module is no method: its `Config` is another type, or it has no `policy`.
    """
    module = sys.modules.get(type(config).__module__)
    if module is None or getattr(module, "Config", None) is not type(config) or not hasattr(module, "policy"):
        raise TypeError(f"{type(config).__module__}.{type(config).__qualname__} is the Config of no method module")
    return module


def is_own(policy: Policy[Any]) -> bool:
    """Whether the policy's functions are as veloxfn's module of its config binds them."""
    module = sys.modules.get(type(policy.config).__module__)
    if module is None or not module.__name__.startswith("veloxfn."):
        return False
    bound = {"absorb": policy.absorb, "evict": policy.evict}
    candidates = getattr(policy.candidates, "func", None) is reading.candidates
    return candidates and all(getattr(one, "func", one) is getattr(module, name, None) for name, one in bound.items())


def ranking_of(config: Retention, evict: Callable[..., Any] | None = None) -> Callable[..., Any] | None:
    """`ranking` of the module that defines the type of `config`; None where it has none, or `evict` is not its own."""
    return _hook("ranking", config, evict)


def attended_of(config: Retention, evict: Callable[..., Any]) -> Callable[..., Any] | None:
    """`attended`, likewise."""
    return _hook("attended", config, evict)


def entries_of(config: Retention, absorb: Callable[..., Any]) -> Callable[..., Any] | None:
    """`entries` of the module that defines the type of `config`; None where it has none, or `absorb` is not its own."""
    module = sys.modules.get(type(config).__module__)
    return getattr(module, "entries", None) if absorb is getattr(module, "absorb", None) else None


def _hook(name: str, config: Retention, evict: Callable[..., Any] | None) -> Callable[..., Any] | None:
    module = sys.modules.get(type(config).__module__)
    return getattr(module, name, None) if evict in (None, getattr(module, "evict", None)) else None
