"""Every law on a handful of fixed streams: a quick verdict without pytest or Hypothesis."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import mlx.core as mx
import numpy as np

from veloxfn.testing.claims import Claims, claims_for
from veloxfn.testing.drive import AnyPolicy
from veloxfn.testing.laws import STANDALONE, UNIVERSAL, law_grouping_does_not_matter, law_poison_stays_in_its_row
from veloxfn.testing.streams import Stream, fingerprint, normal_stream, split

__all__ = ["check", "sample_streams"]


def sample_streams(budget: int, shared_heads: int = 1) -> Iterator[Stream]:
    """Fixed streams around a budget: normal and grid-valued, one by one and in blocks, padded, in all dtypes."""
    rows, tokens = 2 * shared_heads, 2 * budget + 5
    yield normal_stream(0, rows=rows, tokens=tokens, groups=2)
    yield normal_stream(1, rows=rows, tokens=tokens, blocks=(1, tokens - 1), dtype=mx.float16)
    yield _grid_stream(2, rows, tokens, (0, *split(tokens, 3), 0), mx.bfloat16)
    padded = _grid_stream(3, rows, tokens, split(tokens, budget + 1), mx.float32)
    valid = padded.valid.copy()
    valid[:shared_heads, : budget // 2 + 1] = False
    valid[shared_heads:, -2:] = False
    yield replace(padded, valid=valid)


def _grid_stream(seed: int, rows: int, tokens: int, blocks: tuple[int, ...], dtype: mx.Dtype) -> Stream:
    draw = np.random.default_rng(seed)
    return Stream(
        keys=(draw.integers(-3, 4, (rows, tokens, 4)) / 4).astype(np.float32),
        values=fingerprint(rows, tokens, 5),
        queries=(draw.integers(-3, 4, (rows, 2, tokens, 4)) / 4).astype(np.float32),
        valid=np.ones((rows, tokens), dtype=np.bool_),
        blocks=blocks,
        dtype=dtype,
        exact=True,
    )


def check(policy: AnyPolicy, claims: Claims | None = None, *, cost: bool = True) -> None:
    """Run the laws on `policy`, over a handful of fixed streams.

    `pytest properties --policy` draws many more streams, and adds what needs several budgets (`budgets_nest`).

    Args:
        policy: any method with its config bound.
        claims: what the method promises; methods of this package know theirs.
        cost: also run the laws that compile, trace and measure memory (some seconds).

    Raises:
        AssertionError: the first law that is broken, and how.
    """
    claims = claims or claims_for(policy.config)
    for stream in sample_streams(policy.config.budget, policy.config.shared_heads):
        for law in UNIVERSAL:
            law(policy, stream, claims)
        for size in (1, 3, stream.tokens):
            law_grouping_does_not_matter(policy, stream, split(stream.tokens, size), claims)
        if not stream.padded:
            for number in (float("nan"), float("inf"), -float("inf")):
                law_poison_stays_in_its_row(policy, stream, 0, stream.tokens // 2, number, claims)
    for law in STANDALONE if cost else STANDALONE[:2]:
        law(policy, claims=claims)
