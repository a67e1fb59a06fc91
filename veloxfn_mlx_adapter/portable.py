"""A state and its configuration as a flat list of arrays, which is all that mlx_lm saves to disk."""

from __future__ import annotations

import dataclasses
import importlib
import json
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_map

import veloxfn
from veloxfn import Policy, Retention

__all__ = ["array_of", "config_of", "leaves", "record_of", "state_of", "written"]

_FORMAT = 1


def leaves(state: Any) -> list[mx.array]:
    """Arrays of a state, in the order of its fields; none for None."""
    if isinstance(state, mx.array):
        return [state]
    return [] if state is None else [leaf for part in state for leaf in leaves(part)]


def state_of(policy: Policy[Any], arrays: list[mx.array]) -> Any:
    """The state whose `leaves` are `arrays`; None for none.

    Raises:
        ValueError: the number of arrays is not that of the policy's state.
    """
    if not arrays:
        return None
    template = policy.init_state(1, arrays[0].shape[-1], arrays[1].shape[-1], dtype=arrays[0].dtype)
    wanted = len(leaves(template))
    if len(arrays) != wanted:
        raise ValueError(f"a {type(template).__module__}.State has {wanted} arrays, got {len(arrays)}")
    left = iter(arrays)
    return tree_map(lambda _: next(left), template)


def array_of(record: dict[str, Any]) -> mx.array:
    """A record of numbers, strings and lists as [bytes] uint8."""
    text = json.dumps({"format": _FORMAT, **record}, sort_keys=True)
    return mx.array(list(text.encode()), mx.uint8)


def record_of(array: mx.array) -> dict[str, Any]:
    """The record in an array that `array_of` made.

    Raises:
        ValueError: the array holds something else, or another format.
    """
    try:
        record = json.loads(bytes(cast(list[int], array.tolist())))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"the first array of a saved eviction cache is its uint8 record, got {array.dtype} {list(array.shape)}"
        ) from error
    if not isinstance(record, dict) or record.get("format") != _FORMAT:
        raise ValueError(f"a saved eviction cache must have format {_FORMAT}, got {str(record)[:60]}")
    return record


def written(value: Any) -> Any:
    """A config as plain data: a dataclass becomes its type's name and fields, a tuple a list."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: written(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"type": f"{type(value).__module__}:{type(value).__qualname__}", "fields": fields}
    if isinstance(value, tuple | list):
        return [written(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return {"type": f"{type(value).__module__}:{type(value).__qualname__}", "fields": None}


def config_of(data: Any) -> Retention:
    """The config that `written` described.

    Raises:
        ValueError: it belongs to no registered method.
    """
    value = _read(data)
    if not isinstance(value, Retention):
        raise ValueError(f"a saved eviction cache must name a method's config, got {data!r}")
    return value


def _read(data: Any) -> Any:
    if isinstance(data, list):
        return tuple(_read(item) for item in data)
    if not isinstance(data, dict):
        return data
    module, _, name = str(data.get("type")).partition(":")
    # A file may name only classes of veloxfn and of registered methods: nothing else is imported for it.
    known = {method.__name__ for method in veloxfn.METHODS.values()}
    kind = None
    if module in known or module.startswith("veloxfn."):
        kind = getattr(importlib.import_module(module), name, None)
    if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)) or data.get("fields") is None:
        raise ValueError(f"saved eviction cache: {module}:{name} is no setting of a method in veloxfn.METHODS")
    return kind(**{key: _read(item) for key, item in data["fields"].items()})
