"""One arrival per row into a full buffer: the bookkeeping."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from veloxfn import checks
from veloxfn.ops.constants import constant, numbers
from veloxfn.ops.evict_step import reference as evict_step
from veloxfn.ops.key_norms import key_norms
from veloxfn.ops.launch import MOST_SPREAD, Kernel, Output, Template, backend_for, launch, spread_over
from veloxfn.ops.noise import halves, hashed_gumbel, names
from veloxfn.ops.ranks import live

__all__ = [
    "KERNEL",
    "Admitted",
    "Columns",
    "Entry",
    "Gumbel",
    "KeyNorm",
    "Loss",
    "admit",
    "columns_of",
    "entries_of",
    "losing",
    "reference",
]

KERNEL = Kernel(
    "admit",
    (
        "positions",
        "seen",
        "first",
        "second",
        "first_fresh",
        "second_fresh",
        "fresh_keys",
        "seed",
        "streams",
        "rotations",
    ),
    ("slot", "positions_out", "seen_out", "first_out", "second_out", "rotations_out"),
    absent=("old_keys", "old_values", "fresh_values"),  # token_step's
    unmade=("keys_out", "values_out"),
    most=MOST_SPREAD,
)


class KeyNorm(NamedTuple):
    """Entries of arrivals: the norms of their keys."""

    keys: mx.array  # [N, S, D]


class Gumbel(NamedTuple):
    """Entries of arrivals: Gumbel draws addressed by (seed, stream, position)."""

    seed: int
    streams: mx.array  # [N] uint32


Entry = mx.array | float | KeyNorm | Gumbel


class Loss(NamedTuple):
    """That the weakest slot is freed, as `evict_step` without attention finds it."""

    ranked: bool  # by the first column; else all are alike, so that the oldest goes
    keep_low: bool  # by its negative
    sink: int
    recent: int


def losing(loses: Loss | None) -> Template:
    """The kernel's constants of a loss."""
    return {
        "LOSES": loses is not None,
        "RANKED": loses is not None and loses.ranked,
        "KEEP_LOW": loses is not None and loses.keep_low,
        "SINK": 0 if loses is None else loses.sink,
        "RECENT": 0 if loses is None else loses.recent,
    }


class Admitted(NamedTuple):
    """The bookkeeping of a row after an arrival, and a loss where one was asked for."""

    slot: mx.array  # [N, 1] int32, the slot that the arrival was given
    positions: mx.array  # [N, n] int32
    seen: mx.array  # [N] int32
    columns: tuple[mx.array, ...]  # [N, n] float32 each
    rotations: mx.array | None  # [N, n] int32, where they were given


def admit(
    positions: mx.array,
    seen: mx.array,
    columns: Sequence[tuple[mx.array, Entry]] = (),
    *,
    rotations: mx.array | None = None,
    loses: Loss | None = None,
    backend: str | None = None,
) -> Admitted:
    """Give the first free slot of each row to the token that arrives.

    Args:
        positions: [N, n] int32 of the slots, -1 = free; every row has a free one.
        seen: [N] int32, arrivals so far.
        columns: per-slot columns [N, n] float32, each with the arrival's entry: [N, 1] float32, a number, `KeyNorm` of
            the arriving keys [N, 1, D], or `Gumbel`.
        rotations: [N, n] int32, positions that keys arrived rotated at; the arrival's is the number of tokens there.
        loses: which slot is freed then, the arrival's own among them; None = none.
        backend: see `veloxfn.ops.launch.backend_for`.

    Raises:
        ValueError: a wrong shape, or a loss is ranked by a column and there is none.
    """
    backend = backend_for(backend)
    if loses is not None and loses.ranked and not columns:
        raise ValueError("a loss that is ranked by the first column needs a column, got none")
    checks.operand("rotations", rotations, "[N, n]", positions.shape, mx.int32)
    columns = checked(positions, seen, columns)
    taken = None if backend == "reference" else columns_of(columns)
    if taken is None:
        return reference(positions, seen, columns, rotations, loses)
    rows, length = positions.shape
    lanes, slots = spread_over(length)
    keys = taken.inputs[4]
    made = launch(
        KERNEL,
        backend,
        [positions, seen, *taken.inputs, rotations],
        [
            ((rows, 1), mx.int32),
            (positions.shape, mx.int32),
            (seen.shape, mx.int32),
            *taken.outputs,
            None if rotations is None else (rotations.shape, mx.int32),
        ],
        template={
            **taken.template,
            "DIMS": 1 if keys is None else keys.shape[2],
            "T": mx.float32 if keys is None else keys.dtype,
            "TURNED": rotations is not None,
            **losing(loses),
            "SLOTS": slots,
            "TELLS": True,
            "CARRIES": False,
            **dict.fromkeys(("VALUE_DIMS", "KEY_PACK", "VALUE_PACK"), 1),
        },
        groups=(rows, 1, 1),
        threads=lanes,
    )
    turned = None if rotations is None else made.pop()
    return Admitted(made[0], made[1], made[2], tuple(made[3:]), turned)


def checked(
    positions: mx.array, seen: mx.array, columns: Sequence[tuple[mx.array, Entry]]
) -> list[tuple[mx.array, Entry]]:
    """The columns, entries that are numbers other than 0 as arrays; raises unless all have their shapes and types."""
    checks.slot_columns(positions, seen, **{f"column {number}": column for number, (column, _) in enumerate(columns)})
    return [(column, _checked(entry, positions.shape[0])) for column, entry in columns]


def _checked(entry: Entry, rows: int) -> Entry:
    if isinstance(entry, mx.array):
        checks.operand("an entry", entry, "[N, 1]", (rows, 1), mx.float32)
    elif isinstance(entry, KeyNorm):
        checks.array("keys", entry.keys, "[N, 1, D]", (rows, 1, None))
    elif isinstance(entry, Gumbel):
        checks.operand("streams", entry.streams, "[N]", (rows,), mx.uint32)
    else:
        return constant(float(entry), (rows, 1)) if entry else 0.0
    return entry


class Columns(NamedTuple):
    """Columns and entries as the kernel takes them."""

    inputs: list[mx.array | None]  # first, second, first_fresh, second_fresh, fresh_keys, seed, streams
    outputs: list[Output | None]  # first_out, second_out
    template: Template


def columns_of(columns: Sequence[tuple[mx.array, Entry]]) -> Columns | None:
    """What `checked` gave, for the kernel; None where it takes no such columns."""
    kinds = [_kind(entry) for _, entry in columns]
    if len(columns) > 2 or kinds[:1] == [_DRAWN] or kinds[1:] == [_NORM]:
        return None
    kinds += [0] * (2 - len(kinds))
    entries = [entry for _, entry in columns] + [0.0] * (2 - len(columns))
    draw = next((entry for entry in entries if isinstance(entry, Gumbel)), None)
    nothing = [None] * (2 - len(columns))
    return Columns(
        [
            *(column for column, _ in columns),
            *nothing,
            *(entry if isinstance(entry, mx.array) else None for entry in entries),
            next((entry.keys for entry in entries if isinstance(entry, KeyNorm)), None),
            None if draw is None else halves(draw.seed),
            None if draw is None else draw.streams,
        ],
        [*((column.shape, mx.float32) for column, _ in columns), *nothing],
        {"FIRST_ENTRY": kinds[0], "SECOND_ENTRY": kinds[1]},
    )


_GIVEN, _ZERO, _NORM, _DRAWN = 1, 2, 3, 4


def _kind(entry: Entry) -> int:
    if isinstance(entry, KeyNorm):
        return _NORM
    if isinstance(entry, Gumbel):
        return _DRAWN
    return _GIVEN if isinstance(entry, mx.array) else _ZERO


def reference(
    positions: mx.array,
    seen: mx.array,
    columns: Sequence[tuple[mx.array, Entry]] = (),
    rotations: mx.array | None = None,
    loses: Loss | None = None,
) -> Admitted:
    """`admit` in MLX's own primitives."""
    slot = mx.argmin(positions, axis=1, keepdims=True).astype(mx.int32)
    here = numbers(positions.shape[1]) == slot
    coming, after = seen[:, None], seen + 1
    left = mx.where(here, coming, positions)
    admitted = tuple(mx.where(here, entries_of(entry, coming), column) for column, entry in columns)
    if loses is not None:
        mass = admitted[0] if loses.ranked else None
        _, left = evict_step(left, after, mass, None, keep_low=loses.keep_low, sink=loses.sink, recent=loses.recent)
    return Admitted(
        slot,
        left,
        after,
        admitted,
        None if rotations is None else mx.where(here, live(positions)[:, None], rotations),
    )


def entries_of(entry: Entry, coming: mx.array) -> mx.array | float:
    """The entries of arrivals at positions `coming` [N, S]: [N, S] float32, or a number."""
    if isinstance(entry, KeyNorm):
        return key_norms(entry.keys)
    if isinstance(entry, Gumbel):
        return hashed_gumbel(names(entry.seed, entry.streams)[:, None], coming)
    return entry
