"""Make eviction caches for a model, and tell what they hold."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
from mlx_lm.models import cache as mlx_lm_cache

import veloxfn
from veloxfn import Policy, Retention
from veloxfn_mlx_adapter import capture
from veloxfn_mlx_adapter.cache import EvictingCache

__all__ = ["LayerDiagnostics", "diagnostics", "make_prompt_cache"]


@dataclass(frozen=True)
class LayerDiagnostics:
    """What the cache of one layer holds, per sequence of the batch where nothing else is said."""

    layer: int
    method: str
    layer_budget: int  # rows per kv head between calls
    tokens_seen: int
    tokens_kept: int  # rows per kv head now, the block that awaits its eviction included
    kept_bytes: int  # keys and values of those rows, all heads and sequences
    full_bytes: int  # the same had nothing been evicted
    compression_ratio: float  # full_bytes / kept_bytes, 1.0 when empty


def make_prompt_cache(model: Any, policy: Policy[Any] | Sequence[Policy[Any] | None]) -> list[Any]:
    """One cache per layer of `model`, for `mlx_lm.generate(..., prompt_cache=...)` and whatever else takes one.

    Layers of full attention get an `EvictingCache`; sliding-window, recurrent and other layers keep the model's own.

    Args:
        model: an `mlx_lm` model.
        policy: a method with its config bound (`veloxfn.policy(config)`) for all layers, or one entry per layer, with
            None where the model's own cache stays.

    Returns:
        The caches, in the model's order.

    Raises:
        ValueError: a sequence of another length than the layers, no layer to evict from, or a method that ranks by
            queries on a model whose attention does not show them.
        TypeError: something that is no policy.

    >>> caches = make_prompt_cache(model, veloxfn.policy(veloxfn.h2o.Config(budget=256)))  # doctest: +SKIP
    """
    caches: list[Any] = mlx_lm_cache.make_prompt_cache(model)
    policies = _per_layer(policy, len(caches))
    full = [type(cache) is mlx_lm_cache.KVCache for cache in caches]
    owner = f"{type(model).__module__}.{type(model).__name__}"
    wanted = [i for i, chosen in enumerate(policies) if chosen is not None and full[i]]
    if not wanted:
        kinds = ", ".join(sorted({type(cache).__name__ for cache in caches}))
        raise ValueError(
            f"{owner} has no layer to evict from: policies are for caches of type KVCache, "
            f"{len(caches)} layers have {kinds}, {sum(p is not None for p in policies)} have a policy"
        )
    layers = list(getattr(model, "layers", []))
    with capture.query_capture(model):
        for i in wanted:
            chosen = cast(Policy[Any], policies[i])
            if chosen.config.needs_queries and not capture.uses_hook(
                layers[i] if len(layers) == len(caches) else model
            ):
                raise ValueError(
                    f"{_method(chosen.config)} ranks by the model's queries, but layer {i} of {owner} does not call "
                    f"mlx_lm's scaled_dot_product_attention, which shows them; "
                    f"methods without queries (knorm, streaming_llm) work with it"
                )
            caches[i] = EvictingCache(chosen, layer=i, owner=owner)
    return caches


def diagnostics(caches: Iterable[Any]) -> list[LayerDiagnostics]:
    """What each `EvictingCache` among `caches` holds; reading it waits for the arrays.

    Args:
        caches: caches of one model; others are skipped.
    """
    return [_layer(i, cache) for i, cache in enumerate(caches) if isinstance(cache, EvictingCache)]


def _layer(index: int, cache: EvictingCache) -> LayerDiagnostics:
    config, state = cache.config, cache.method_state
    if state is None:
        return LayerDiagnostics(index, _method(config), config.budget, 0, 0, 0, 0, 1.0)
    return LayerDiagnostics(
        layer=index,
        method=_method(config),
        layer_budget=config.budget,
        tokens_seen=cache.offset,
        tokens_kept=int(_number(veloxfn.tokens_kept(state).max())),
        kept_bytes=int(_number(veloxfn.kept_bytes(state))),
        full_bytes=int(_number(veloxfn.full_bytes(state))),
        compression_ratio=_number(veloxfn.compression_ratio(state)),
    )


def _number(array: mx.array) -> float:
    return cast(float, array.item())


def _method(config: Retention) -> str:
    for name, module in veloxfn.METHODS.items():
        if type(config) is module.Config:
            return name
    return type(config).__module__


def _per_layer(policy: Any, layers: int) -> list[Policy[Any] | None]:
    policies = [policy] * layers if isinstance(policy, Policy) else policy
    if not isinstance(policies, list | tuple):
        kind = type(policies).__name__
        raise TypeError(f"policy must be a veloxfn.Policy or one per layer, got {kind}{_hint(policies)}")
    if len(policies) != layers:
        raise ValueError(f"policies must have one entry per cache of the model: {layers}, got {len(policies)}")
    for i, chosen in enumerate(policies):
        if chosen is not None and not isinstance(chosen, Policy):
            kind = type(chosen).__name__
            raise TypeError(f"policies[{i}] must be a veloxfn.Policy or None, got {kind}{_hint(chosen)}")
    return list(policies)


def _hint(value: Any) -> str:
    return "; bind it: veloxfn.policy(config)" if isinstance(value, Retention) else ""
