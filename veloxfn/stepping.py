"""A token into a full cache and another out of it, in the few launches of a cache that is small enough to be copied."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import mlx.core as mx

from veloxfn import checks, ops
from veloxfn.base import Retention, Slots, State
from veloxfn.disposal import drop
from veloxfn.ops.token_step import copies
from veloxfn.placement import Absolute
from veloxfn.retention import Ranking
from veloxfn.slots import with_columns, with_slots

__all__ = ["Rules", "moved"]

S = TypeVar("S", bound=State)


class Rules(NamedTuple):
    """What a method's module says of a token, as functions of its config."""

    entries: Callable[..., Mapping[str, ops.Entry]]  # (config, state, keys [N, S, D]) -> of the arrivals, by column
    ranking: Callable[..., Ranking]  # (config, state that has absorbed the token, query heads per row)


def moved(
    rules: Rules,
    config: Retention,
    state: S,
    keys: mx.array,
    values: mx.array,
    queries: mx.array | None,
    valid: mx.array | None,
    attention: mx.array | None = None,
    *,
    output: bool = False,
    scale: float | None = None,
) -> tuple[mx.array | None, S] | None:
    """`absorb`, attention and `evict` of one token by `ops.token_step`; None where the cache is not to be copied.

    What is None here is also what `absorb` and `evict` are to refuse.

    Args:
        rules: of the method.
        config: of the method.
        state: a state whose last block was evicted.
        keys: [N, S, D] of the block.
        values: [N, S, Dv].
        queries: [N, G, S, D], or None.
        valid: [N, S] bool, or None.
        attention: [N, n], or None.
        output: whether the attention's output is asked for; else a method that does without attention takes no queries.
        scale: of the products; None = D ** -0.5.

    Returns:
        output [N, G, 1, Dv] or None, and the state with S = 0.

    Raises:
        ValueError: as `absorb`.
        TypeError: likewise.
    """
    slots = state.slots
    rows, length = slots.positions.shape
    full = length == slots.keys.shape[1] == config.budget + 1 and slots.arrived.shape[1] == 0
    one = isinstance(keys, mx.array) and keys.ndim == 3 and keys.shape[1] == 1
    if not (full and one) or valid is not None or attention is not None:
        return None
    if config.shared_heads > 1 or not isinstance(config.placement, Absolute):
        return None
    if queries is not None and not (isinstance(queries, mx.array) and queries.ndim == 4):
        return None
    if queries is not None and queries.shape != (rows, queries.shape[1], 1, keys.shape[2]):
        return None
    if not copies(slots.keys, slots.values, queries):
        return None
    checks.block(slots, keys, values, valid)
    # What the ranking looks at: the state once the token is there, as far as it is known before.
    coming = slots._replace(seen=slots.seen + 1, arrived=slots.seen[:, None])
    ranking = rules.ranking(config, with_slots(state, coming), 1 if queries is None else queries.shape[1])
    entries = rules.entries(config, state, keys)
    columns = {name: getattr(state, name) for name in entries}
    asked = output or ranking.attended
    if asked != (queries is not None) or ranking.attended != config.needs_queries:
        return None
    if not _takes(ranking, columns, coming, state):
        return None
    made = ops.token_step(
        slots.keys,
        slots.values,
        slots.positions,
        slots.seen,
        [(column, entries[name]) for name, column in columns.items()],
        keys,
        values,
        queries,
        output=output,
        scale=scale,
        temper=ranking.temper,
        decay=ranking.decay,
        per_query=ranking.counted is not None,
        schedule=ranking.schedule,
        keep_low=ranking.keep_low,
        attended=ranking.attended,
        sink=config.sink,
        recent=config.recent_rows,
    )
    slots = slots._replace(keys=made.keys, values=made.values, positions=made.positions, seen=made.seen)
    return made.output, with_columns(with_slots(state, slots), dict(zip(columns, made.columns, strict=True)))


def _takes(ranking: Ranking, columns: Mapping[str, mx.array], coming: Slots, state: Any) -> bool:
    """Whether `ops.token_step` ranks so: by the first column, per query of all that came, with the second's noise."""
    names = list(columns)
    if any(column.ndim != 2 for column in columns.values()) or len(names) > 2 or ranking.dispose is not drop:
        return False
    if ranking.column != (names[0] if names else None):
        return False
    if not (ranking.counted is None or ranking.counted is coming.seen):
        return False
    recipe = None if ranking.temper is None else ranking.temper.recipe
    if ranking.temper is not None and (recipe is None or recipe.seen is not coming.seen):
        return False
    if ranking.noise is None:
        return True
    return len(names) == 2 and ranking.schedule is not None and ranking.noise is getattr(state, names[1])
