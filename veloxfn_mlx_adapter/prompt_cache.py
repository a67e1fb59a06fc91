"""Make eviction caches for a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

from mlx_lm.models import cache as mlx_lm_cache

from veloxfn import Contiguous, Policy, Retention, pyramidkv
from veloxfn_mlx_adapter import capture, ropes
from veloxfn_mlx_adapter.cache import EvictingCache, policy_of
from veloxfn_mlx_adapter.diagnostics import method_name

__all__ = ["make_prompt_cache"]


def make_prompt_cache(model: Any, policy: Policy[Any] | Sequence[Policy[Any] | None]) -> list[Any]:
    """One cache per layer of `model`, for `mlx_lm.generate(..., prompt_cache=...)` and whatever else takes one.

    Layers of full attention get an `EvictingCache`; sliding-window, recurrent and other layers keep the model's own.

    Args:
        model: an `mlx_lm` model.
        policy: a method with its config bound (`veloxfn.policy(config)`) for all layers, or one entry per layer, with
            None where the model's own cache stays. A `pyramidkv` policy for all layers is spread over those that
            evict. With `placement=Contiguous(rope)` the rope is checked against each layer; a layer that does not
            rotate, in a model where others do, is seen without gaps all the same.

    Returns:
        The caches, in the model's order.

    Raises:
        ValueError: a sequence of another length than the layers, no layer to evict from, a method that ranks by
            queries on a model whose attention does not show them, a rope that is not the layer's, or a pyramid over
            another number of layers.
        TypeError: something that is no policy.

    >>> caches = make_prompt_cache(model, veloxfn.policy(veloxfn.h2o.Config(budget=256)))  # doctest: +SKIP
    """
    caches: list[Any] = mlx_lm_cache.make_prompt_cache(model)
    full = [type(cache) is mlx_lm_cache.KVCache for cache in caches]
    policies = _per_layer(_spread(policy, full), len(caches))
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
        probes = _placed(model, caches, policies, wanted)
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
            caches[i] = EvictingCache(chosen, layer=i, owner=owner, counts_block=i in probes and probes[i].counts_block)
    return caches


def _spread(policy: Any, full: list[bool]) -> Any:
    """A pyramid for all layers as one policy per layer, the budgets over the `full` ones; others as they are."""
    if not isinstance(policy, Policy) or type(policy.config) is not pyramidkv.Config:
        return policy
    layers = sum(full)
    if policy.config.layers != layers:
        raise ValueError(f"pyramidkv's layers must be those that evict, {layers}, got layers={policy.config.layers}")
    configs = iter(pyramidkv.layer_configs(policy.config))
    return [policy_of(next(configs)) if is_full else None for is_full in full]


def _placed(
    model: Any, caches: list[Any], policies: list[Policy[Any] | None], wanted: list[int]
) -> dict[int, ropes.LayerProbe]:
    """Check each `Contiguous` policy against its layer; in place of that of a layer without positions, one for it."""
    chosen = {i: cast(Policy[Any], policies[i]) for i in wanted}
    turned = [i for i in wanted if isinstance(chosen[i].config.placement, Contiguous)]
    if not turned:
        return {}
    owner = f"{type(model).__module__}.{type(model).__name__}"
    if len(list(getattr(model, "layers", []))) != len(policies):
        raise ValueError(f"placement=Contiguous needs one cache per layer of {owner}, got {len(policies)} caches")
    kinds = (mlx_lm_cache.KVCache, mlx_lm_cache.RotatingKVCache)
    probes = ropes.probed(model, [i for i, cache in enumerate(caches) if type(cache) in kinds])
    rotating = [i for i, probe in probes.items() if probe.rotates()]
    for i in turned:
        ropes.refuse_latent(model, probes[i])
    if not set(turned) & set(rotating):
        raise ValueError(
            f"placement=Contiguous is for rotary embeddings: the evicting layers of {owner} do not rotate their keys"
        )
    for i in turned:
        probe = probes[i]
        if i in rotating:
            ropes.refuse(model, probe, cast(Contiguous, chosen[i].config.placement).rope)
        else:
            policies[i] = _without_positions(chosen[i], i, owner)
        if "late" in probe.asks or ("after" in probe.asks and not probe.shows_queries):
            raise ValueError(
                f"layer {i} of {owner} reads its cache's offset after its attention, where placement=Contiguous "
                f"cannot tell the tokens of the block from the place of the next one; use placement=Absolute()"
            )
    unasked = [i for i in rotating if not probes[i].asks]
    offsets = {(chosen[i].config.budget if i in turned else None) for i in probes}
    if unasked and len(offsets) > 1:
        raise ValueError(
            f"layers {unasked} of {owner} are rotated at the offset of another layer's cache: with "
            f"placement=Contiguous all layers must share one budget, and none keep the model's own cache"
        )
    return probes


def _without_positions(policy: Policy[Any], layer: int, owner: str) -> Policy[Any]:
    """The same policy, turning nothing."""
    config = dataclasses.replace(policy.config, placement=Contiguous(ropes.STILL))
    try:
        return policy_of(config)
    except TypeError:
        raise ValueError(
            f"layer {layer} of {owner} does not rotate its keys: give it {policy.config!r} with "
            f"placement=Absolute(), or None"
        ) from None


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
