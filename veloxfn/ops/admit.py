"""One arrival per row into a full buffer: the bookkeeping."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from veloxfn.ops.constants import numbers
from veloxfn.ops.launch import Kernel, backend_for, lanes_for, launch

__all__ = ["KERNEL", "Admitted", "admit", "reference"]

KERNEL = Kernel(
    "admit",
    ("positions", "seen", "first", "first_fresh", "second", "second_fresh"),
    ("slot", "positions_out", "seen_out", "first_out", "second_out"),
)

_MOST_COLUMNS = 2


class Admitted(NamedTuple):
    """The bookkeeping of a row after an arrival."""

    slot: mx.array  # [N, 1] int32, the slot that the arrival was given
    positions: mx.array  # [N, n] int32
    seen: mx.array  # [N] int32
    columns: tuple[mx.array, ...]  # [N, n] float32 each


def admit(
    positions: mx.array,
    seen: mx.array,
    columns: Sequence[tuple[mx.array, mx.array]] = (),
    *,
    backend: str | None = None,
) -> Admitted:
    """Give the first free slot of each row to the token that arrives.

    Args:
        positions: [N, n] int32 of the slots, -1 = free; every row has a free one.
        seen: [N] int32, arrivals so far.
        columns: per-slot columns [N, n] float32, each with the arrival's entry [N] float32.
        backend: see `veloxfn.ops.launch.backend_for`.
    """
    backend = backend_for(backend)
    if backend == "reference" or len(columns) > _MOST_COLUMNS:
        return reference(positions, seen, columns)
    rows, length = positions.shape
    given = [array for column in columns for array in column]
    made = launch(
        KERNEL,
        backend,
        [positions, seen, *given, *[None] * (2 * _MOST_COLUMNS - len(given))],
        [
            ((rows, 1), mx.int32),
            (positions.shape, mx.int32),
            (seen.shape, mx.int32),
            *((column.shape, mx.float32) for column, _ in columns),
            *[None] * (_MOST_COLUMNS - len(columns)),
        ],
        template={"COLUMNS": len(columns)},
        groups=(rows, 1, 1),
        threads=lanes_for(length),
    )
    return Admitted(made[0], made[1], made[2], tuple(made[3:]))


def reference(positions: mx.array, seen: mx.array, columns: Sequence[tuple[mx.array, mx.array]] = ()) -> Admitted:
    """`admit` in MLX's own primitives."""
    slot = mx.argmin(positions, axis=1, keepdims=True).astype(mx.int32)
    here = numbers(positions.shape[1]) == slot
    return Admitted(
        slot,
        mx.where(here, seen[:, None], positions),
        seen + 1,
        tuple(mx.where(here, fresh[:, None], column) for column, fresh in columns),
    )
