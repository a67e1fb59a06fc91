"""Laws of `veloxfn.attend`: attention over the candidates, and the state that `evict` gives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np

import veloxfn
from veloxfn.testing.claims import Claims, claims_for
from veloxfn.testing.drive import (
    UNIT,
    AnyPolicy,
    AnyState,
    Step,
    differences,
    evidence,
    floats,
    kept,
    leaves,
    live_positions,
    run,
    snapshot,
    start,
)
from veloxfn.testing.laws.blocks import _attention, _visible
from veloxfn.testing.laws.reference import law_follows_the_oracle
from veloxfn.testing.laws.rows import same_columns, same_rows
from veloxfn.testing.streams import Block, Stream, normal_stream

__all__ = ["law_attend_equals_evict", "law_compiled_attend_equals_eager"]

# Of outputs, in units of the largest value. Narrow dtypes: MLX's own attention rounds weights to them as well.
_ERROR = {mx.float32: 1e-4, mx.float16: 4 * UNIT[mx.float16], mx.bfloat16: 4 * UNIT[mx.bfloat16]}


def law_attend_equals_evict(policy: AnyPolicy, stream: Stream, claims: Claims | None = None) -> None:
    """`attend` gives attention over the candidates and the state that `evict` gives; the old state stays as it was.

    Kept positions are equal, but where a decision rounds and the oracle allows either; columns to a few roundings.
    """
    claims = claims or claims_for(policy.config)
    keys, values = stream.keys.copy(), stream.values.copy()
    keys[~stream.valid] = values[~stream.valid] = np.nan
    state, parted = start(policy, stream), False
    for number, block in enumerate(replace(stream, keys=keys, values=values)):
        padding = {} if block.valid is None else {"valid": block.valid}
        absorbed = policy.absorb(state, block.keys, block.values, **padding)
        before = snapshot(absorbed)
        # Half the scale, which is exact, in every other block.
        scale = 0.5 * stream.key_dim**-0.5 if number % 2 else None
        block = block if scale is None else block._replace(queries=block.queries * 0.5)
        asked = block.queries if scale is None else block.queries * 2
        padded = not bool(stream.valid[:, : block.stop].all())
        output, after = veloxfn.attend(policy, absorbed, asked, scale=scale, padded=padded)
        expected = policy.evict(absorbed, **evidence(claims, block))
        mx.eval([output, *leaves(after).values(), *leaves(expected).values()])
        what = f"attend, columns {block.start} .. {block.stop - 1}"
        told = differences(before, snapshot(absorbed))
        assert not told, f"{what}: the old state changed: {told}"
        _check_output(policy, Step(block, state, absorbed, after), output, stream, what)
        parted |= _part(claims, expected, after, what)
        state = expected
    if parted:
        law_follows_the_oracle(_attending(policy), stream, claims)


def _check_output(policy: AnyPolicy, one: Step, output: mx.array, stream: Stream, what: str) -> None:
    """Raise unless the output of every counted token is attention over what it sees, in the dtype of the queries."""
    queries = one.block.queries
    shape = (*queries.shape[:3], stream.value_dim)
    assert output.shape == shape, f"{what}: the output must be {shape}, found {output.shape}"
    assert output.dtype == queries.dtype, f"{what}: the output must be {queries.dtype}, found {output.dtype}"
    if one.block.stop == one.block.start:
        return
    keys, values = (floats(array) for array in policy.candidates(one.absorbed))
    live = np.asarray(_visible(one).any(axis=1))[..., None]
    keys, values = np.where(live, keys, 0.0), np.where(live, values, 0.0)
    expected = _attention(one, keys, values)
    counted = stream.valid[:, one.block.start : one.block.stop]
    error = np.abs(floats(output) - expected).swapaxes(1, 2)[counted]
    allowed = _ERROR[output.dtype] * (1 + np.abs(values).max(initial=0.0))
    assert (error <= allowed).all(), f"{what}: the output is off by {error.max():.3g}, not {allowed:.3g}"


def _part(claims: Claims, expected: AnyState, found: AnyState, what: str) -> bool:
    """Raise unless two states agree; whether a row keeps other tokens, which an oracle is to judge."""
    assert type(found) is type(expected), f"{what}: must return {type(expected).__name__}, found {type(found).__name__}"
    told = [
        f"{path}: {leaf.dtype} {leaf.shape} became {other.dtype} {other.shape}"
        for (path, leaf), other in zip(leaves(expected).items(), leaves(found).values(), strict=True)
        if (leaf.dtype, leaf.shape) != (other.dtype, other.shape)
    ]
    assert not told, f"{what}: the state is not that of evict: {told}"
    pairs = zip(live_positions(expected), live_positions(found), strict=True)
    alike = [row for row, (one, other) in enumerate(pairs) if np.array_equal(one, other)]
    rows: int = expected.slots.positions.shape[0]
    if len(alike) < rows and (claims.score is None or claims.exact):
        same_rows(kept(expected), kept(found), what)
    if alike:
        some, others = (veloxfn.take_rows(state, mx.array(alike)) for state in (expected, found))
        same_rows(kept(some), kept(others), what)
        same_columns(some, others, list(range(len(alike))), what)
    return len(alike) < rows


def _attending(policy: AnyPolicy) -> AnyPolicy:
    """The policy with `attend` in place of `evict`."""

    def evict(state: AnyState, *, queries: mx.array | None = None, **unused: Any) -> AnyState:
        if queries is None:
            rows, count = state.slots.arrived.shape
            queries = mx.zeros((rows, 1, count, state.slots.keys.shape[2]), state.slots.keys.dtype)
        return veloxfn.attend(policy, state, queries, padded=True)[1]

    return policy._replace(evict=evict)


def law_compiled_attend_equals_eager(policy: AnyPolicy, claims: Claims | None = None, *, tokens: int = 6) -> None:
    """`mx.compile` of `absorb` and `attend` traces once in steady state, and gives what the eager functions give."""
    claims = claims or claims_for(policy.config)
    budget, group = policy.config.budget, policy.config.shared_heads
    blocks = (budget + 2,) + (1,) * tokens
    stream = normal_stream(8, rows=2 * group, tokens=sum(blocks), groups=2, blocks=blocks, dtype=mx.float16)
    traces = 0

    def layer(state: AnyState, keys: mx.array, values: mx.array, queries: mx.array) -> tuple[mx.array, AnyState]:
        nonlocal traces
        traces += 1
        return veloxfn.attend(policy, policy.absorb(state, keys, values), queries)

    def call(function: Any, state: AnyState, block: Block) -> tuple[mx.array, AnyState]:
        output, state = function(state, block.keys, block.values, block.queries)
        mx.eval([output, *leaves(state).values()])
        return output, state

    compiled = mx.compile(layer)
    eager = quick = run(policy, stream.head(1), claims)
    for block in stream.tail(1):
        expected, eager = call(layer, eager, block)
        before = traces
        try:
            found, quick = call(compiled, quick, block)
        except (RuntimeError, ValueError) as error:
            raise AssertionError(f"absorb and attend cannot be compiled: {error}") from error
        assert traces == before + (block.start == 0), f"{tokens} steps of one shape must be traced once"
        off = np.abs(floats(found) - floats(expected)).max()
        allowed = _ERROR[mx.float16] * float(np.abs(stream.values).max())
        assert off <= allowed, f"compiled attention is off by {off:.3g}, not {allowed:.3g}"
        same_rows(kept(eager), kept(quick), "compiled attend against eager")
        same_columns(eager, quick, list(range(stream.rows)), "compiled attend against eager")
