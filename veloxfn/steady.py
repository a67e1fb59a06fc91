"""One token into a full cache, called as it is: the call is traced once, and no graph is built in Python per token.

On a GPU alone, where Python took longer than the launches: a plain call of h2o's `update_batched` builds its graph in
180 us, a traced one in 15. On a CPU there are seconds of compiling, and little to save.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, ParamSpec, TypeVar, cast

import mlx.core as mx

from veloxfn.base import Retention, Slots
from veloxfn.ops.launch import backend_for

__all__ = ["TRACING", "forget", "is_steady", "steady", "traced"]

P = ParamSpec("P")
T = TypeVar("T")

TRACING = ("metal", "cuda")  # back ends whose calls are traced


def steady(function: Callable[P, T]) -> Callable[P, T]:
    """A method's `absorb`, `evict` or `update_batched`, which is traced where a call is steady."""

    @wraps(function)
    def call(config: Any, state: Any, *block: Any, **evidence: Any) -> T:
        absorbed = not block and "keys" not in evidence
        if not is_steady(config, state, *block, *evidence.values(), absorbed=absorbed):
            return cast(Callable[..., T], function)(config, state, *block, **evidence)
        return traced(function, config)(state, *block, **evidence)

    return cast(Callable[P, T], call)


def is_steady(config: Any, state: Any, *given: Any, absorbed: bool) -> bool:
    """Whether a call is about one token at full budget, where shapes no longer change, and such calls are traced.

    Args:
        config: of the method.
        state: of the method, or anything else: that call is for the method itself to refuse.
        given: the block's keys [N, S, D], queries [N, G, S, D] and what else there is; arrays or None.
        absorbed: whether the state is to have absorbed the token.
    """
    if backend_for(None) not in TRACING or not isinstance(config, Retention):
        return False
    slots = getattr(state, "slots", None)
    if not isinstance(slots, Slots) or slots.arrived.shape[1] != absorbed:
        return False
    if not slots.positions.shape[1] == config.budget + 1 == slots.keys.shape[1] or slots.values.size == 0:
        return False  # of values without elements: MLX's CUDA back end divides by the size of what a trace fuses
    return all(one is None or (isinstance(one, mx.array) and (one.ndim < 3 or one.shape[-2] == 1)) for one in given)


def traced(function: Callable[..., T], *fixed: Any) -> Callable[..., T]:
    """`function` with its first arguments fixed, compiled, for the back end of now; within a trace it is inlined.

    Args:
        function: of arrays and trees of them.
        fixed: hashable.
    """
    return _traced(function, fixed, backend_for(None))


def forget() -> None:
    """Let go of all traces: for tests that change what a trace holds."""
    _traced.cache_clear()


@lru_cache(maxsize=256)
def _traced(function: Callable[..., T], fixed: tuple[Any, ...], backend: str) -> Callable[..., T]:
    del backend  # a trace keeps that of its making

    def call(*arrays: Any, **evidence: Any) -> T:
        return function(*fixed, *arrays, **evidence)

    compiled: Callable[..., T] = mx.compile(call)
    return compiled
