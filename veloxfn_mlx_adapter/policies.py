"""One policy per layer of a model: other budgets, or none, for some layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from mlx_lm.models import cache as mlx_lm_cache

import veloxfn
from veloxfn import Policy, Retention, checks, pyramidkv
from veloxfn_mlx_adapter.cache import policy_of
from veloxfn_mlx_adapter.cosines import layer_cosines
from veloxfn_mlx_adapter.prompt_cache import stock_caches

__all__ = ["layer_policies"]


def layer_policies(
    model: Any,
    policy: Policy[Any] | str,
    *,
    budgets: Sequence[int] | None = None,
    squeeze: Any = None,
    p: float | None = None,
    skip: Sequence[int] = (),
    **settings: Any,
) -> list[Policy[Any] | None]:
    """One policy per layer of `model`, for `make_prompt_cache`: a method at budgets of its own in each layer.

    Layers that evict are those of full attention that are not skipped; all others keep the model's own cache. Without
    `budgets` and `squeeze` each has the policy's budget. A `pyramidkv` policy is spread over them, whatever its layers.

    Args:
        model: an `mlx_lm` model.
        policy: a method with its config bound, or its name.
        budgets: rows of each layer that evicts, first layer first.
        squeeze: give less to the layers that attention changes least (`veloxfn.budgets.squeeze`), the policy's budget
            on average: what `layer_cosines` returned, or the tokens of a prompt to measure.
        p: with squeeze: share of the budget that those layers keep, 0 .. 1.
        skip: layers that keep the model's own cache; K-norm's authors skip (0, 1).
        settings: with a name: those of the method, as `veloxfn.policy_for` takes them.

    Returns:
        A policy for each layer that evicts, None for the others, in the model's order.

    Raises:
        ValueError: a layer that the model does not have, no layer left, budgets of another number than the layers that
            evict or below what the method's windows need, several ways to set budgets, or what `policy_for`,
            `layer_cosines` and `budgets.squeeze` refuse.
        TypeError: something that is no policy, or no sequence.

    >>> policies = layer_policies(model, "knorm", budget=256, skip=(0, 1))  # doctest: +SKIP
    >>> policies = layer_policies(model, "h2o", budget=256, squeeze=prompt, p=0.8)  # doctest: +SKIP
    >>> policies = layer_policies(model, "pyramidkv", scorer="h2o", budget=256, taper=1.5)  # doctest: +SKIP
    """
    chosen = _bound(policy, settings)
    caches = stock_caches(model)
    evicting = _evicting(caches, skip)
    rows = _rows(model, chosen.config, evicting, budgets, squeeze, p)
    if isinstance(chosen.config, pyramidkv.Config):
        layers = pyramidkv.layer_configs(dataclasses.replace(chosen.config, layers=len(evicting)))
        bound = [policy_of(config) for config in layers]
    elif rows is None:
        bound = [chosen] * len(evicting)
    else:
        bound = [_resized(chosen.config, budget, layer) for budget, layer in zip(rows, evicting, strict=True)]
    policies = dict(zip(evicting, bound, strict=True))
    return [policies.get(i) for i in range(len(caches))]


def _bound(policy: Any, settings: dict[str, Any]) -> Policy[Any]:
    if isinstance(policy, str):
        return veloxfn.policy_for(policy, **settings)
    if not isinstance(policy, Policy):
        hint = "; bind it: veloxfn.policy(config)" if isinstance(policy, Retention) else ""
        raise TypeError(f"policy must be a veloxfn.Policy or the name of a method, got {type(policy).__name__}{hint}")
    if settings:
        raise ValueError(f"settings go with the name of a method, not with a policy: got {', '.join(settings)}")
    return policy


def _evicting(caches: list[Any], skip: Any) -> list[int]:
    """Layers of full attention that are not skipped."""
    if not isinstance(skip, Sequence) or isinstance(skip, str):
        raise TypeError(f"skip must be a sequence of layers, got {skip!r}")
    for layer in skip:
        checks.integer("skip", layer, low=0, high=len(caches) - 1)
    full = [i for i, cache in enumerate(caches) if type(cache) is mlx_lm_cache.KVCache]
    evicting = [i for i in full if i not in skip]
    if not evicting:
        raise ValueError(f"no layer is left to evict from: {len(full)} layers have full attention, skip={tuple(skip)}")
    return evicting


def _rows(
    model: Any, config: Retention, evicting: list[int], budgets: Any, squeeze: Any, p: float | None
) -> Sequence[int] | None:
    """The budget of each layer that evicts; None = the method's own."""
    given = [name for name, value in (("budgets", budgets), ("squeeze", squeeze)) if value is not None]
    if isinstance(config, pyramidkv.Config):
        given.append("pyramidkv")
    if len(given) > 1:
        raise ValueError(f"layers get their budgets in one way, got {' and '.join(given)}")
    if (squeeze is None) != (p is None):
        raise ValueError(f"squeeze and p go together, got {'p' if squeeze is None else 'squeeze'} alone")
    if squeeze is not None and p is not None:
        cosines = squeeze if isinstance(squeeze, Mapping) else layer_cosines(model, squeeze, layers=evicting)
        if missing := [i for i in evicting if i not in cosines]:
            raise ValueError(f"squeeze must have the cosine of every layer that evicts, {missing} are missing")
        least = pyramidkv.least_budget(config)
        return veloxfn.budgets.squeeze([cosines[i] for i in evicting], config.budget, p, floor=least)
    if budgets is None:
        return None
    if not isinstance(budgets, Sequence):
        raise TypeError(f"budgets must be a sequence of ints, got {budgets!r}")
    if len(budgets) != len(evicting):
        raise ValueError(
            f"budgets must have one entry per layer that evicts, {len(evicting)} of {evicting[0]} .. {evicting[-1]}, "
            f"got {len(budgets)}"
        )
    return budgets


def _resized(config: Retention, budget: int, layer: int) -> Policy[Any]:
    try:
        return policy_of(dataclasses.replace(config, budget=budget))
    except ValueError as error:
        raise ValueError(f"budget of layer {layer}: {error}") from error
