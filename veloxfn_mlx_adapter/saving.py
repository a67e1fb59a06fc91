"""Prompt caches on disk: mlx_lm's format, with a digest of the arrays and a check of what the file holds."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from os import PathLike, fspath
from typing import Any, Literal, cast, overload

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models import cache as mlx_lm_cache

from veloxfn import Policy, Retention, pyramidkv
from veloxfn_mlx_adapter.cache import EvictingCache, policy_of
from veloxfn_mlx_adapter.diagnostics import method_name
from veloxfn_mlx_adapter.lockstep import Lockstep
from veloxfn_mlx_adapter.prompt_cache import make_prompt_cache, stock_caches

__all__ = ["load_prompt_cache", "save_prompt_cache"]

_DIGEST = "veloxfn_sha256"


def save_prompt_cache(file: str | PathLike[str], caches: Sequence[Any], metadata: dict[str, str] | None = None) -> None:
    """Write the caches of a model as mlx_lm does, which can read the file, and a SHA-256 of the arrays beside them.

    Args:
        file: name, ending in .safetensors.
        caches: of `make_prompt_cache`, the model's own among them or not.
        metadata: strings to store in the file.
    """
    entries = tree_flatten([cache.state for cache in caches])
    digest = _digest({name: _as_saved(value) for name, value in cast(list[tuple[str, Any]], entries)})
    mlx_lm_cache.save_prompt_cache(fspath(file), list(caches), {**(metadata or {}), _DIGEST: digest})


@overload
def load_prompt_cache(
    file: str | PathLike[str],
    model: Any = None,
    policy: Policy[Any] | Sequence[Policy[Any] | None] | None = None,
    *,
    return_metadata: Literal[False] = False,
) -> list[Any]: ...


@overload
def load_prompt_cache(
    file: str | PathLike[str],
    model: Any = None,
    policy: Policy[Any] | Sequence[Policy[Any] | None] | None = None,
    *,
    return_metadata: Literal[True],
) -> tuple[list[Any], dict[str, str]]: ...


def load_prompt_cache(
    file: str | PathLike[str],
    model: Any = None,
    policy: Policy[Any] | Sequence[Policy[Any] | None] | None = None,
    *,
    return_metadata: bool = False,
) -> list[Any] | tuple[list[Any], dict[str, str]]:
    """Read the caches in a file of `save_prompt_cache`, this one or mlx_lm's, and check that they are what is wanted.

    Args:
        file: name, ending in .safetensors.
        model: the model that they are for: the file must have a cache for each of its layers, of the layer's kind.
        policy: what they were made with, as for `make_prompt_cache`: each layer's settings must equal the file's.
        return_metadata: whether to return the strings stored in the file as well.

    Returns:
        The caches, or the caches and the metadata.

    Raises:
        ValueError: the arrays are not those that were written, where the file says what they were; arrays that belong
            to no cache; or other layers, kinds or settings than `model` and `policy` have, with the difference.
        RuntimeError: MLX cannot read the file, for example because it is cut short.
    """
    name = fspath(file)
    _verify(name)
    caches, metadata = mlx_lm_cache.load_prompt_cache(name, return_metadata=True)
    if model is not None:
        made = stock_caches(model) if policy is None else make_prompt_cache(model, policy)
        _check_kinds(caches, made, may_evict=policy is None)
        if policy is not None:
            _check_configs(caches, [_config(cache) for cache in made])
    elif policy is not None:
        _check_configs(caches, _wanted(policy, caches))
    caches = _together(caches)
    if not return_metadata:
        return caches
    return caches, {key: text for key, text in dict(metadata or {}).items() if key != _DIGEST}


def _together(caches: list[Any]) -> list[Any]:
    """The same caches; those that evict notice from now on when a forward pass of their model breaks off."""
    lockstep, made = Lockstep(), list(caches)
    for i, cache in enumerate(caches):
        if isinstance(cache, EvictingCache):
            made[i] = EvictingCache(policy_of(cache.config), layer=cache.layer, lockstep=lockstep)
            made[i].state = cache.state
    return made


def _verify(name: str) -> None:
    """Raise if the file has a digest of its arrays and they are others."""
    arrays, metadata = cast(tuple[dict[str, mx.array], dict[str, str]], mx.load(name, return_metadata=True))
    # mlx_lm nests the metadata, at a place that depends on its version.
    told = [text for key, text in metadata.items() if key.rpartition(".")[2] == _DIGEST]
    if told and told[0] != (found := _digest(arrays)):
        raise ValueError(
            f"{name} is damaged: its arrays were written with SHA-256 {told[0][:12]}..., now they have {found[:12]}..."
        )


def _digest(arrays: dict[str, mx.array]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes."""
    total = hashlib.sha256()
    for name in sorted(arrays):
        array = arrays[name]
        total.update(f"{name} {array.dtype} {array.shape}\n".encode())
        total.update(memoryview(cast(Any, mx.contiguous(array).reshape(-1).view(mx.uint8))))
    return total.hexdigest()


def _as_saved(value: Any) -> mx.array:
    """A leaf of a state as the array that mlx_lm writes for it."""
    if isinstance(value, mx.array):
        return value
    if isinstance(value, str):
        return mx.array([ord(character) for character in value])
    return mx.array([] if value is None else value)


def _check_kinds(caches: list[Any], made: list[Any], *, may_evict: bool) -> None:
    """Raise unless each cache is of the kind that was made for its layer, or evicts in place of a `KVCache`."""
    if len(caches) != len(made):
        raise ValueError(f"the file has caches of {len(caches)} layers, the model has {len(made)}")
    for i, (cache, other) in enumerate(zip(caches, made, strict=True)):
        instead = may_evict and type(cache) is EvictingCache and type(other) is mlx_lm_cache.KVCache
        if type(cache) is not type(other) and not instead:
            raise ValueError(f"layer {i}: {type(cache).__name__} in the file, {type(other).__name__} for the model")
        if isinstance(cache, EvictingCache) and cache.layer != i:
            raise ValueError(f"layer {i}: the file has the cache of layer {cache.layer} in its place")


def _wanted(policy: Any, caches: list[Any]) -> list[Retention | None]:
    """Settings by layer, where no model says which layers evict: in the file they may be those that see all tokens."""
    if not isinstance(policy, Policy):
        return [None if each is None else each.config for each in policy]
    full = [type(cache) in (EvictingCache, mlx_lm_cache.KVCache) for cache in caches]
    config = policy.config
    if type(config) is not pyramidkv.Config:
        return [config if each else None for each in full]
    if config.layers != sum(full):
        raise ValueError(f"the file has caches of {sum(full)} layers that evict, the policy has layers={config.layers}")
    configs = iter(pyramidkv.layer_configs(config))
    return [next(configs) if each else None for each in full]


def _config(cache: Any) -> Retention | None:
    return cache.config if isinstance(cache, EvictingCache) else None


def _check_configs(caches: list[Any], wanted: list[Retention | None]) -> None:
    """Raise unless each evicting cache has the settings wanted of its layer, None for one that does not evict."""
    if len(caches) != len(wanted):
        raise ValueError(f"the file has caches of {len(caches)} layers, the policy has {len(wanted)}")
    for i, (cache, config) in enumerate(zip(caches, wanted, strict=True)):
        held = _config(cache)
        if held is None and type(cache) is not mlx_lm_cache.KVCache:
            continue  # a window, a recurrence: there no policy applies
        if held is None and config is not None:
            raise ValueError(f"layer {i}: {type(cache).__name__} in the file, {method_name(config)} in the policy")
        if held != config:
            raise ValueError(f"layer {i}: {'; '.join(_differences(held, config))}")


def _differences(held: Any, wanted: Any, name: str = "") -> Iterator[str]:
    """Each setting that differs, as `name=value in the file, name=value in the policy`."""
    if type(held) is not type(wanted) or not dataclasses.is_dataclass(held):
        held, wanted = (method_name(each) if isinstance(each, Retention) else each for each in (held, wanted))
        label = f"{name}=" if name else ""
        yield f"{label}{held} in the file, {label}{wanted} in the policy"
        return
    for field in dataclasses.fields(held):
        ours, theirs = getattr(held, field.name), getattr(wanted, field.name)
        if ours != theirs:
            yield from _differences(ours, theirs, f"{name}.{field.name}" if name else field.name)
