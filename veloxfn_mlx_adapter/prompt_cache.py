"""Make eviction caches for a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from mlx_lm.models import cache as mlx_lm_cache

from veloxfn import Policy, Retention
from veloxfn_mlx_adapter import capture
from veloxfn_mlx_adapter.cache import EvictingCache
from veloxfn_mlx_adapter.diagnostics import method_name

__all__ = ["make_prompt_cache"]


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
    budgets = {
        chosen.config.budget if chosen is not None else None
        for chosen, is_full in zip(policies, full, strict=True)
        if is_full
    }
    with capture.query_capture(model):
        for i in wanted:
            chosen = cast(Policy[Any], policies[i])
            if len(budgets) > 1 and not capture.uses_hook(layers[i] if len(layers) == len(caches) else model):
                raise ValueError(
                    f"layers of {owner} share one mask and do not call mlx_lm's scaled_dot_product_attention, which "
                    f"fits it to each: give all full-attention layers one budget, got {sorted(budgets, key=str)}"
                )
            if chosen.config.needs_queries and not capture.uses_hook(
                layers[i] if len(layers) == len(caches) else model
            ):
                raise ValueError(
                    f"{method_name(chosen.config)} ranks by the model's queries, but layer {i} of {owner} does not "
                    f"call mlx_lm's scaled_dot_product_attention, which shows them; "
                    f"methods without queries (knorm, streaming_llm) work with it"
                )
            caches[i] = EvictingCache(chosen, layer=i, owner=owner)
    return caches


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
