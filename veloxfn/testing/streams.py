"""Streams of arrivals as plain NumPy data, and how they are handed to a policy in blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

__all__ = ["Block", "Floats", "Stream", "fingerprint", "normal_stream", "split", "uniform_stream"]

Floats = npt.NDArray[np.float32]
_DIGIT = 32  # fingerprint digits stay below 256, the integers that bfloat16 holds exactly


class Block(NamedTuple):
    """Arrivals that are handed over in one call."""

    keys: mx.array  # [N, S, D]
    values: mx.array  # [N, S, Dv]
    queries: mx.array  # [N, G, S, D]
    valid: mx.array | None  # [N, S] bool, None = nothing is padded
    start: int  # column of the first arrival in the stream
    stop: int


@dataclass(frozen=True, eq=False)
class Stream:
    """N rows of T arrivals, and how they are grouped into blocks.

    Args:
        keys: [N, T, D] float32, every number exact in `dtype`.
        values: [N, T, Dv] float32, every number exact in `dtype`.
        queries: [N, G, T, D] float32, every number exact in `dtype`.
        valid: [N, T] bool, False = padded.
        blocks: arrivals per call; their sum is T; empty blocks may occur.
        dtype: what the policy sees.
        names: [N] uint32, each row's noise stream: a row keeps its name wherever it stands in a batch; 0 .. N-1 where
            none are given.
        exact: keys and queries lie on a grid on which dot products are exact.
        uniform: all keys of a row are equal, so that ties are exact for every method.
    """

    keys: Floats
    values: Floats
    queries: Floats
    valid: npt.NDArray[np.bool_]
    blocks: tuple[int, ...]
    dtype: mx.Dtype = mx.float32
    names: npt.NDArray[np.uint32] = field(default_factory=lambda: np.zeros(0, dtype=np.uint32))
    exact: bool = False
    uniform: bool = False

    def __post_init__(self) -> None:
        """Check what the laws rely on."""
        if sum(self.blocks) != self.tokens:
            raise ValueError(f"blocks must sum to T = {self.tokens}, got {self.blocks} = {sum(self.blocks)}")
        if len(self.names) != self.rows:
            object.__setattr__(self, "names", np.arange(self.rows, dtype=np.uint32))

    def __repr__(self) -> str:
        """Shapes and grouping; the numbers follow, so that a failing example can be read."""
        n, g, t, d = self.queries.shape
        head = f"Stream(N={n}, T={t}, D={d}, Dv={self.values.shape[2]}, G={g}, blocks={self.blocks}, dtype={self.dtype}"
        padded = f", padded={np.argwhere(~self.valid).tolist()}" if self.padded else ""
        keys = f", keys={self.keys.tolist()}" if self.keys.size <= 64 else ""
        return f"{head}{padded}{keys})"

    @property
    def rows(self) -> int:
        """N."""
        return int(self.keys.shape[0])

    @property
    def tokens(self) -> int:
        """T, padded arrivals included."""
        return int(self.keys.shape[1])

    @property
    def key_dim(self) -> int:
        """D."""
        return int(self.keys.shape[2])

    @property
    def value_dim(self) -> int:
        """Dv."""
        return int(self.values.shape[2])

    @property
    def padded(self) -> bool:
        """Whether any arrival is padded."""
        return not bool(self.valid.all())

    def columns(self, row: int, stop: int | None = None) -> npt.NDArray[np.intp]:
        """Column of each counted arrival of a row: entry p is where the token with position p came from."""
        return np.flatnonzero(self.valid[row, :stop])

    def array(self, numbers: Floats) -> mx.array:
        """`numbers` as the policy sees them."""
        return mx.array(numbers).astype(self.dtype)

    def row_names(self) -> mx.array:
        """The rows' noise streams, as `init_state` takes them."""
        return mx.array(self.names)

    def block(self, start: int, stop: int) -> Block:
        """The arrivals of columns start .. stop - 1."""
        valid = self.valid[:, start:stop]
        return Block(
            keys=self.array(self.keys[:, start:stop]),
            values=self.array(self.values[:, start:stop]),
            queries=self.array(self.queries[:, :, start:stop]),
            valid=mx.array(valid) if self.padded else None,
            start=start,
            stop=stop,
        )

    def __iter__(self) -> Iterator[Block]:
        """The blocks in order."""
        start = 0
        for size in self.blocks:
            yield self.block(start, start + size)
            start += size

    def regrouped(self, blocks: Sequence[int]) -> Stream:
        """The same arrivals in other blocks."""
        return replace(self, blocks=tuple(blocks))

    def one_by_one(self) -> Stream:
        """The same arrivals in blocks of one token."""
        return self.regrouped((1,) * self.tokens)

    def only(self, rows: Sequence[int]) -> Stream:
        """The given rows, in that order, under their own names."""
        index = np.asarray(rows, dtype=np.intp)
        return replace(
            self,
            keys=self.keys[index],
            values=self.values[index],
            queries=self.queries[index],
            valid=self.valid[index],
            names=self.names[index],
        )

    def head(self, blocks: int) -> Stream:
        """The first `blocks` blocks."""
        return self._slice(0, blocks)

    def tail(self, blocks: int) -> Stream:
        """All but the first `blocks` blocks."""
        return self._slice(blocks, len(self.blocks))

    def _slice(self, first: int, last: int) -> Stream:
        start, stop = sum(self.blocks[:first]), sum(self.blocks[:last])
        return replace(
            self,
            keys=self.keys[:, start:stop],
            values=self.values[:, start:stop],
            queries=self.queries[:, :, start:stop],
            valid=self.valid[:, start:stop],
            blocks=self.blocks[first:last],
        )

    def with_keys(self, keys: Floats) -> Stream:
        """Other keys, everything else unchanged; nothing is known about their ties."""
        return replace(self, keys=keys, exact=False, uniform=False)


def fingerprint(rows: int, tokens: int, value_dim: int) -> Floats:
    """Values [N, T, Dv] that name their row and column: a kept row tells which token it is.

    The leading entries are column % 32, column // 32 and the row; they stay exact in every supported dtype.
    """
    column = np.broadcast_to(np.arange(tokens), (rows, tokens))
    row = np.broadcast_to(np.arange(rows)[:, None], (rows, tokens))
    digits = [column % _DIGIT, column // _DIGIT, row]
    filler = [(column * (3 + i) + row) % 7 - 3 for i in range(max(0, value_dim - 3))]
    return np.stack((digits + filler)[:value_dim], axis=-1).astype(np.float32)


def split(tokens: int, size: int) -> tuple[int, ...]:
    """Blocks of `size` tokens, the last one shorter where `tokens` is no multiple."""
    whole, rest = divmod(tokens, size)
    return (size,) * whole + ((rest,) if rest else ())


def _rounded(numbers: npt.NDArray[np.float64], dtype: mx.Dtype) -> Floats:
    return np.array(mx.array(numbers.astype(np.float32)).astype(dtype).astype(mx.float32))


def normal_stream(
    seed: int = 0,
    *,
    rows: int = 2,
    tokens: int = 40,
    key_dim: int = 8,
    value_dim: int = 6,
    groups: int = 1,
    blocks: Sequence[int] | None = None,
    dtype: mx.Dtype = mx.float32,
    valid: npt.NDArray[np.bool_] | None = None,
) -> Stream:
    """Normal keys and queries, fingerprint values; near ties are unlikely, exact ones absent."""
    draw = np.random.default_rng(seed)
    return Stream(
        keys=_rounded(draw.standard_normal((rows, tokens, key_dim)), dtype),
        values=fingerprint(rows, tokens, value_dim),
        queries=_rounded(draw.standard_normal((rows, groups, tokens, key_dim)), dtype),
        valid=np.ones((rows, tokens), dtype=np.bool_) if valid is None else valid,
        blocks=(1,) * tokens if blocks is None else tuple(blocks),
        dtype=dtype,
    )


def uniform_stream(
    *,
    rows: int = 2,
    tokens: int = 40,
    key_dim: int = 4,
    value_dim: int = 5,
    level: float = 0.5,
    blocks: Sequence[int] | None = None,
    dtype: mx.Dtype = mx.float32,
) -> Stream:
    """All keys of all rows equal: only the tie rule decides."""
    return Stream(
        keys=np.full((rows, tokens, key_dim), level, dtype=np.float32),
        values=fingerprint(rows, tokens, value_dim),
        queries=np.ones((rows, 1, tokens, key_dim), dtype=np.float32),
        valid=np.ones((rows, tokens), dtype=np.bool_),
        blocks=(1,) * tokens if blocks is None else tuple(blocks),
        dtype=dtype,
        exact=True,
        uniform=True,
    )
