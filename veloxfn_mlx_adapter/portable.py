"""A state and its configuration as a flat list of arrays, which is all that mlx_lm saves to disk."""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Iterator
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_map

import veloxfn
from veloxfn import Policy, Retention

__all__ = ["array_of", "check", "config_of", "leaves", "record_of", "state_of", "written"]

_FORMAT = 2
_KINDS = {  # of a record's fields
    "config": dict,
    "layer": int,
    "shard": int,
    "owner": str,
    "heads": int,
    "seen": list,
    "spans": list,
    "padding": list | None,
    "counts_block": bool,
    "alone": bool,
    "queries": bool,
}


def leaves(state: Any) -> list[mx.array]:
    """Arrays of a state, in the order of its fields; none for None."""
    if isinstance(state, mx.array):
        return [state]
    return [] if state is None else [leaf for part in state for leaf in leaves(part)]


def state_of(policy: Policy[Any], arrays: list[mx.array]) -> Any:
    """The state whose `leaves` are `arrays`; None for none.

    Raises:
        ValueError: the number of arrays is not that of the policy's state, or the first two are no keys and values.
    """
    if not arrays:
        return None
    sizes = [f"{array.dtype} {list(array.shape)}" for array in arrays[:2]]
    if len(sizes) < 2 or any(array.ndim != 3 or not mx.issubdtype(array.dtype, mx.floating) for array in arrays[:2]):
        raise ValueError(f"a saved eviction cache begins with keys and values [N, C, D], got {', '.join(sizes)}")
    template = policy.init_state(1, arrays[0].shape[-1], arrays[1].shape[-1], dtype=arrays[0].dtype)
    wanted = len(leaves(template))
    if len(arrays) != wanted:
        raise ValueError(f"a {type(template).__module__}.State has {wanted} arrays, got {len(arrays)}")
    left = iter(arrays)
    return tree_map(lambda _: next(left), template)


def check(record: dict[str, Any], policy: Policy[Any], state: Any, queries: mx.array | None) -> None:
    """Raise unless a saved record, state and queries belong together.

    Args:
        record: of the file.
        policy: of the config in it.
        state: what `state_of` made of its arrays.
        queries: [N, G, S, D] of the block that awaits eviction, or None.

    Raises:
        ValueError: they do not, with what differs.
    """
    batch, heads, seen = len(record["seen"]), record["heads"], max(record["seen"])
    if state is None:
        if seen:
            raise ValueError(f"a saved eviction cache of {seen} tokens has no state")
        return
    slots, rows, budget = state.slots, batch * heads, policy.config.budget
    template = policy.init_state(rows, slots.keys.shape[-1], slots.values.shape[-1], dtype=slots.keys.dtype)
    for name, array, made in _named(state, template):
        if array.dtype != made.dtype or array.ndim != made.ndim or array.shape[0] != rows:
            raise ValueError(
                f"{name} of a saved eviction cache must be {made.dtype} with {made.ndim} axes and {rows} rows, got "
                f"{array.dtype} {list(array.shape)}"
            )
    length, block = slots.positions.shape[1], slots.arrived.shape[1]
    sizes = {"keys": slots.keys.shape[1], "values": slots.values.shape[1]}
    if max(block, 1) + budget < length or any(size < length or size < budget + 1 for size in sizes.values()):
        raise ValueError(
            f"a saved eviction cache of budget {budget} with a block of {block} tokens cannot hold {length} slots in "
            f"buffers of {sizes}"
        )
    if queries is not None:
        wanted = (rows, block, slots.keys.shape[2])
        fits = queries.ndim == 4 and (queries.shape[0], *queries.shape[2:]) == wanted and queries.shape[1] > 0
        if not fits or not mx.issubdtype(queries.dtype, mx.floating):
            raise ValueError(f"queries must be floats [N, G, S, D] = {wanted}, got {queries.dtype} {queries.shape}")
    for name, column in zip(state._fields, state, strict=True):
        if name not in ("slots", "row") and column.shape[-1] != length:
            raise ValueError(f"{name} of a saved eviction cache must have {length} slots, got {list(column.shape)}")
    told = mx.repeat(mx.array(record["seen"], mx.int32), heads)
    if not mx.array_equal(slots.seen, told).item():
        raise ValueError(f"a saved eviction cache says that it saw {record['seen']} tokens, its state says otherwise")
    for name, places, below in (("positions", slots.positions, seen), ("arrived", slots.arrived, length)):
        order = mx.sort(places, axis=1)
        distinct = (order[:, 1:] > order[:, :-1]) | (order[:, 1:] < 0)
        if places.size and not (((places >= -1) & (places < below)).all() & distinct.all()).item():
            raise ValueError(f"{name} of a saved eviction cache must be -1 or distinct in 0 .. {below - 1}")
    here = mx.arange(block)
    starts, stops = (mx.repeat(mx.array(ends, mx.int32), heads)[:, None] for ends in zip(*record["spans"], strict=True))
    if not mx.array_equal((here >= starts) & (here < stops), slots.arrived >= 0).item():
        raise ValueError(f"spans of a saved eviction cache must name the tokens that arrived, got {record['spans']}")


def _named(state: Any, template: Any, name: str = "state") -> Iterator[tuple[str, mx.array, mx.array]]:
    """Each array of a state with its name, beside that of another state."""
    if isinstance(state, mx.array):
        yield name, state, template
    else:
        for field, part, made in zip(state._fields, state, template, strict=True):
            yield from _named(part, made, field)


def array_of(record: dict[str, Any]) -> mx.array:
    """A record of numbers, strings and lists as [bytes] uint8."""
    text = json.dumps({"format": _FORMAT, **record}, sort_keys=True)
    return mx.array(list(text.encode()), mx.uint8)


def record_of(array: Any) -> dict[str, Any]:
    """The record in an array that `array_of` made.

    Raises:
        ValueError: the array holds something else, or another format.
    """
    try:
        record = json.loads(bytes(cast(list[int], array.tolist())))
    except (AttributeError, TypeError, ValueError) as error:
        got = f"{array.dtype} {list(array.shape)}" if isinstance(array, mx.array) else f"{type(array).__name__}"
        raise ValueError(f"the first array of a saved eviction cache is its uint8 record, got {got}") from error
    if not isinstance(record, dict) or record.get("format") != _FORMAT:
        raise ValueError(f"a saved eviction cache must have format {_FORMAT}, got {str(record)[:60]}")
    if missing := _KINDS.keys() - record.keys():
        raise ValueError(f"the record of a saved eviction cache lacks {', '.join(sorted(missing))}")
    for name, kind in _KINDS.items():
        value = record[name]
        if not isinstance(value, kind) or (kind is int and not _is_count(value)):
            raise ValueError(f"{name} of a saved eviction cache is no {_called(kind)}: {str(value)[:60]}")
    batch = len(record["seen"])
    padding = record["padding"] or [[0] * batch, None, None]
    counts = [record["seen"], *padding[:1], *(part for part in padding[1:] if part is not None)]
    if not batch or len(padding) != 3 or not all(_are_counts(part, batch) for part in counts):
        raise ValueError(f"seen and padding of a saved eviction cache must be one count per sequence, got {counts}")
    spans = record["spans"]
    if len(spans) != batch or not all(_are_counts(span, 2) and span[0] <= span[1] for span in spans):
        raise ValueError(f"spans of a saved eviction cache must be a start and a stop per sequence, got {spans}")
    return record


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _are_counts(values: Any, count: int) -> bool:
    return isinstance(values, list) and len(values) == count and all(map(_is_count, values))


def _called(kind: Any) -> str:
    return "count" if kind is int else str(getattr(kind, "__name__", kind))


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
    try:
        value = _read(data)
    except (AttributeError, ModuleNotFoundError, TypeError) as error:
        raise ValueError(f"the config of a saved eviction cache cannot be read: {error}") from error
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
