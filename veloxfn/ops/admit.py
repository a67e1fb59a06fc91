"""One arrival per row into a full buffer: the bookkeeping, then the rows of keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from veloxfn.ops.launch import Kernel, absent, backend_for, lanes_for, launch
from veloxfn.ops.slot_numbers import numbers

__all__ = ["ADMIT", "PLACE_ROWS", "Admitted", "admit", "place_rows", "reference", "reference_rows"]

ADMIT = Kernel(
    "admit",
    ("positions", "seen", "first", "first_fresh", "second", "second_fresh"),
    ("slot", "positions_out", "seen_out", "first_out", "second_out"),
)
PLACE_ROWS = Kernel("place_rows", ("keys", "values", "fresh_keys", "fresh_values", "slot"), ("keys_out", "values_out"))

_MOST_COLUMNS = 2
_LANES = 256
_ELEMENTS = 8  # of a row of streams that one lane copies


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
    none = absent(mx.float32)
    padded = [*columns, *[(none, none)] * (_MOST_COLUMNS - len(columns))]
    made = launch(
        ADMIT,
        backend,
        [positions, seen, *(array for column in padded for array in column)],
        [
            ((rows, 1), mx.int32),
            (positions.shape, mx.int32),
            (seen.shape, mx.int32),
            *((column.shape, mx.float32) for column, _ in padded),
        ],
        template={"COLUMNS": len(columns)},
        groups=(rows, 1, 1),
        threads=lanes_for(length),
    )
    return Admitted(made[0], made[1], made[2], tuple(made[3 : 3 + len(columns)]))


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


def place_rows(
    keys: mx.array,
    values: mx.array,
    fresh_keys: mx.array,
    fresh_values: mx.array,
    slot: mx.array,
    *,
    backend: str | None = None,
) -> tuple[mx.array, mx.array]:
    """Keys and values with one row of each replaced.

    MLX writes in place where it may: on a CPU and with Metal one row moves. Its CUDA back end copies buffers that were
    evaluated before; there both buffers are copied with the new rows in one launch in place of four.

    Args:
        keys: [N, C, D].
        values: [N, C, Dv] in the dtype of the keys.
        fresh_keys: [N, 1, D] in the dtype of the keys.
        fresh_values: [N, 1, Dv].
        slot: [N, 1] int32, the row that each is written to.
        backend: see `veloxfn.ops.launch.backend_for`.

    Returns:
        keys [N, C, D] and values [N, C, Dv].
    """
    backend = backend_for(backend)
    if backend in ("reference", "metal") or not values.shape[2]:
        return reference_rows(keys, values, fresh_keys, fresh_values, slot)
    dtype = keys.dtype
    wide = [_wide(array) for array in (keys, values, fresh_keys, fresh_values)]
    if len({array.dtype for array in wide}) > 1:
        wide = [keys, values, fresh_keys, fresh_values]
    rows, size, dim = wide[0].shape
    most = size * max(dim, wide[1].shape[2])
    made = launch(
        PLACE_ROWS,
        backend,
        [*wide, slot],
        [(wide[0].shape, wide[0].dtype), (wide[1].shape, wide[1].dtype)],
        template={"D": dim, "DV": wide[1].shape[2]},
        groups=(-(-most // (_LANES * _ELEMENTS)), rows, 1),
        threads=_LANES,
    )
    return made[0].view(dtype), made[1].view(dtype)


def reference_rows(
    keys: mx.array, values: mx.array, fresh_keys: mx.array, fresh_values: mx.array, slot: mx.array
) -> tuple[mx.array, mx.array]:
    """`place_rows` in MLX's own primitives."""
    index = slot[..., None]
    return (
        mx.put_along_axis(keys, index, fresh_keys, axis=1),
        mx.put_along_axis(values, index, fresh_values, axis=1),
    )


def _wide(array: mx.array) -> mx.array:
    """The same bytes as uint64 where the last axis has a whole number of them."""
    return array.view(mx.uint64) if array.shape[-1] * array.dtype.size % 8 == 0 else array
