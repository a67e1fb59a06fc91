"""Hypothesis strategies: streams on an exactly representable grid, so that ties really happen.

Keys are multiples of 1/4 between -2 and 2: exact in float16 and bfloat16, with exact dot products in float32. Tokens
draw their key from a small palette, so equal keys, equal norms and all-equal rows are common.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from veloxfn.base import Retention
from veloxfn.testing.streams import Floats, Stream, fingerprint, split

__all__ = [
    "GRID",
    "budgets",
    "dtypes",
    "grid_keys",
    "groupings",
    "key_dims",
    "poisoned",
    "poisons",
    "streams",
    "valid_masks",
]

GRID = 0.25
_STEPS = 8
KEY_DIMS = (1, 2, 4)
VALUE_DIMS = (3, 4, 5)


def budgets(*, low: int = 1, high: int = 9) -> st.SearchStrategy[int]:
    """Tiny budgets."""
    return st.integers(low, high)


def key_dims(config: Retention) -> tuple[int, ...]:
    """Key dimensions that the placement's rotary embedding can rotate."""
    rope = getattr(config.placement, "rope", None)
    return tuple(dim for dim in KEY_DIMS if rope is None or dim >= rope.dims)


def dtypes() -> st.SearchStrategy[mx.Dtype]:
    """What keys and values arrive in."""
    return st.sampled_from([mx.float32, mx.float16, mx.bfloat16])


@st.composite
def grid_keys(draw: st.DrawFn, rows: int, tokens: int, key_dim: int, *, palette: int = 5) -> Floats:
    """Keys [rows, tokens, key_dim] out of at most `palette` vectors on the grid; one vector = all equal."""
    size = draw(st.integers(1, palette))
    colours = draw(hnp.arrays(np.int8, (size, key_dim), elements=st.integers(-_STEPS, _STEPS)))
    picks = draw(hnp.arrays(np.int8, (rows, tokens), elements=st.integers(0, size - 1), fill=st.integers(0, size - 1)))
    return (colours.astype(np.float32) * np.float32(GRID))[picks.astype(np.intp)]


@st.composite
def groupings(draw: st.DrawFn, tokens: int, *, budget: int = 4, empty: bool = True) -> tuple[int, ...]:
    """Ways to hand over `tokens` arrivals: one by one, at once, 1 then the rest, larger than the budget, any cut."""
    kind = draw(st.sampled_from(["one by one", "at once", "one first", "large", "cuts"]))
    if tokens == 0 or kind == "at once":
        blocks: Sequence[int] = (tokens,)
    elif kind == "one by one":
        blocks = split(tokens, 1)
    elif kind == "one first":
        blocks = (1, tokens - 1)
    elif kind == "large":
        blocks = split(tokens, budget + draw(st.integers(1, 3)))
    else:
        cuts = sorted(draw(st.lists(st.integers(0, tokens), max_size=6)))
        blocks = tuple(int(step) for step in np.diff([0, *cuts, tokens]))
    kept = [size for size in blocks if size]
    for place in draw(st.lists(st.integers(0, len(kept)), max_size=2)) if empty else []:
        kept.insert(place, 0)
    return tuple(kept) if kept else (0,)


@st.composite
def valid_masks(draw: st.DrawFn, rows: int, tokens: int) -> npt.NDArray[np.bool_]:
    """Which arrivals count [rows, tokens]: left padding, right padding, holes, whole rows."""
    mask = np.ones((rows, tokens), dtype=np.bool_)
    for row in range(rows):
        kind = draw(st.sampled_from(["full", "left", "right", "holes"]))
        if kind == "left":
            mask[row, : draw(st.integers(0, tokens))] = False
        elif kind == "right":
            mask[row, tokens - draw(st.integers(0, tokens)) :] = False
        elif kind == "holes":
            mask[row] = draw(hnp.arrays(np.bool_, (tokens,)))
    return mask


@st.composite
def streams(
    draw: st.DrawFn,
    *,
    budget: int = 4,
    min_rows: int = 1,
    max_rows: int = 3,
    row_multiple: int = 1,
    min_tokens: int = 0,
    max_tokens: int | None = None,
    padded: bool = False,
    empty: bool = True,
    blocks: Sequence[int] | None = None,
    dims: Sequence[int] = KEY_DIMS,
) -> Stream:
    """Grid-valued streams with fingerprint values, long enough to evict.

    Args:
        draw: given by Hypothesis.
        budget: rows kept; lengths and groupings are drawn around it.
        min_rows: least N, in units of `row_multiple`.
        max_rows: largest N, in units of `row_multiple`.
        row_multiple: N is a multiple of it (a method's `shared_heads`).
        min_tokens: least T.
        max_tokens: largest T; 3 * budget + 6 by default.
        padded: some arrivals are padded (the same ones in all rows of a group of `row_multiple`).
        empty: empty blocks may occur.
        blocks: a fixed grouping; T is its sum.
        dims: what D is drawn from; a rotary embedding needs enough of them.
    """
    rows = row_multiple * draw(st.integers(min_rows, max_rows))
    longest = max(min_tokens, 3 * budget + 6 if max_tokens is None else max_tokens)
    tokens = sum(blocks) if blocks is not None else draw(st.integers(min_tokens, longest))
    key_dim, value_dim = draw(st.sampled_from(dims)), draw(st.sampled_from(VALUE_DIMS))
    groups = draw(st.integers(1, 3))
    keys = draw(grid_keys(rows, tokens, key_dim))
    queries = draw(grid_keys(rows, groups * tokens, key_dim)).reshape(rows, groups, tokens, key_dim)
    valid = np.ones((rows, tokens), dtype=np.bool_)
    if padded:
        valid = np.repeat(draw(valid_masks(rows // row_multiple, tokens)), row_multiple, axis=0)
    return Stream(
        keys=keys,
        values=fingerprint(rows, tokens, value_dim),
        queries=queries,
        valid=valid,
        blocks=draw(groupings(tokens, budget=budget, empty=empty)) if blocks is None else tuple(blocks),
        dtype=draw(dtypes()),
        exact=True,
        uniform=bool((keys == keys[:1, :1]).all()) if keys.size else True,
    )


def poisons() -> st.SearchStrategy[float]:
    """Numbers that a broken layer may produce."""
    return st.sampled_from([np.nan, np.inf, -np.inf])


@st.composite
def poisoned(draw: st.DrawFn, stream: Stream) -> tuple[Stream, int, int]:
    """The stream with NaN or an infinity in one key, the row and the column where."""
    row, column = draw(st.integers(0, stream.rows - 1)), draw(st.integers(0, stream.tokens - 1))
    keys = stream.keys.copy()
    keys[row, column, draw(st.integers(0, stream.key_dim - 1))] = draw(poisons())
    return replace(stream, keys=keys, exact=False, uniform=False), row, column
