"""Laws of purity: inputs stay as they were, errors change nothing, an empty block is a no-op, no global randomness."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import numpy as np

from veloxfn.testing.claims import Claims, claims_for
from veloxfn.testing.drive import (
    AnyPolicy,
    AnyState,
    bits,
    differences,
    evidence,
    leaves,
    run,
    snapshot,
    snapshot_of_live,
    start,
    step,
)
from veloxfn.testing.streams import Block, Stream, normal_stream

__all__ = [
    "law_empty_block_is_a_no_op",
    "law_errors_change_nothing",
    "law_evict_is_idempotent",
    "law_global_randomness_is_left_alone",
    "law_inputs_are_untouched",
]


def law_inputs_are_untouched(policy: AnyPolicy, stream: Stream, claims: Claims | None = None) -> None:
    """`absorb`, `evict`, `update_batched`, `candidates` and `get_kv` write into nothing they were given.

    An old state stays valid: running the same block on it again gives the same bits.
    """
    claims = claims or claims_for(policy.config)
    state = start(policy, stream)
    for block in stream:
        padding: dict[str, Any] = {} if block.valid is None else {"valid": block.valid}
        arrays = {name: a for name, a in block._asdict().items() if isinstance(a, mx.array)}
        given = {"state": snapshot(state), "arguments": snapshot(arrays)}
        absorbed = policy.absorb(state, block.keys, block.values, **padding)
        halfway = snapshot(absorbed)
        policy.candidates(absorbed)
        after = policy.evict(absorbed, **evidence(claims, block))
        result = snapshot(after)
        mx.eval(policy.get_kv(after))
        whole = snapshot(step(policy, claims, state, block))
        again = policy.evict(policy.absorb(state, block.keys, block.values, **padding), **evidence(claims, block))
        for what, before, found in (
            ("the state given to absorb", given["state"], snapshot(state)),
            ("the arrays given", given["arguments"], snapshot(arrays)),
            ("the state given to evict", halfway, snapshot(absorbed)),
            ("the state given to get_kv", result, snapshot(after)),
            ("a second run from the old state", result, snapshot(again)),
            ("a second run of update_batched", whole, snapshot(step(policy, claims, state, block))),
        ):
            told = differences(before, found)
            assert not told, f"columns {block.start} .. {block.stop - 1}: {what} changed: {told}"
        state = after


def law_evict_is_idempotent(policy: AnyPolicy, stream: Stream, claims: Claims | None = None) -> None:
    """`update_batched` is `evict` after `absorb`, and `evict` of an evicted state (S = 0) changes nothing.

    The former but for what the buffers hold in free slots.
    """
    claims = claims or claims_for(policy.config)
    state = start(policy, stream)
    for block in stream:
        padding: dict[str, Any] = {} if block.valid is None else {"valid": block.valid}
        parts = policy.evict(policy.absorb(state, block.keys, block.values, **padding), **evidence(claims, block))
        whole = step(policy, claims, state, block)
        told = differences(snapshot_of_live(parts), snapshot_of_live(whole))
        assert not told, f"update_batched differs from evict after absorb: {told}"
        none = stream.block(block.stop, block.stop)
        for what, again in (
            ("without evidence", policy.evict(whole) if not claims.needs_queries else whole),
            ("with no queries left", policy.evict(whole, **evidence(claims, none))),
        ):
            told = differences(snapshot(whole), snapshot(again))
            assert not told, f"evict at S = 0, {what}, must be a no-op: {told}"
        state = whole


def law_empty_block_is_a_no_op(policy: AnyPolicy, stream: Stream, claims: Claims | None = None) -> None:
    """A block of no tokens changes no bit of the state, before the first arrival and after any other.

    Lesson 22 (empty call before and after the first).
    """
    claims = claims or claims_for(policy.config)
    state = start(policy, stream)
    for block in (None, *stream):
        if block is not None:
            state = step(policy, claims, state, block)
        column = 0 if block is None else block.stop
        none = stream.block(column, column)
        before = snapshot(state)
        absorbed = policy.absorb(state, none.keys, none.values)
        variants: dict[str, dict[str, mx.array]] = {"queries": evidence(claims, none)}
        if claims.takes_attention:
            variants["attention"] = {"attention": mx.zeros(absorbed.slots.positions.shape)}
        for name, given in variants.items():
            told = differences(before, snapshot(policy.evict(absorbed, **given)))
            assert not told, f"an empty block with {name} after column {column} must be a no-op: {told}"
        told = differences(before, snapshot(step(policy, claims, state, none)))
        assert not told, f"update_batched of an empty block after column {column} must be a no-op: {told}"
        keys, values = policy.candidates(absorbed)
        kept_keys, kept_values = policy.get_kv(state)
        for name, found, expected in (("keys", keys, kept_keys), ("values", values, kept_values)):
            assert np.array_equal(bits(found), bits(expected)), (
                f"candidates of an empty block after column {column} must be what is kept, the {name} differ"
            )


def law_errors_change_nothing(policy: AnyPolicy, stream: Stream, claims: Claims | None = None) -> None:
    """Wrong shapes, dtypes and evidence raise ValueError or TypeError, and the old state stays valid, bit for bit.

    Lesson 13 (nonsense is refused), lesson 30 (a dtype mix is an error, never a cast).
    """
    claims = claims or claims_for(policy.config)
    state = run(policy, stream, claims)
    before = snapshot(state)
    good = normal_stream(5, rows=stream.rows, tokens=1, key_dim=stream.key_dim, value_dim=stream.value_dim)
    block = Block(*(_cast(part, stream.dtype) for part in next(iter(good))))
    expected = snapshot(step(policy, claims, state, block))
    for what, error, named, call in _bad_calls(policy, claims, state, block):
        try:
            mx.eval(list(leaves(call()).values()))
        except error as raised:
            message = str(raised)
        else:
            raise AssertionError(f"{what} must raise {error}, nothing was raised")
        unsaid = [word for word in named if word not in message] if message else ["anything"]
        assert not unsaid, f"the error for {what} must name {named}, it says {message!r}"
        told = differences(before, snapshot(state))
        assert not told, f"after the error for {what} the old state changed: {told}"
    told = differences(expected, snapshot(step(policy, claims, state, block)))
    assert not told, f"after errors the same block gives another state: {told}"


def _cast(part: Any, dtype: mx.Dtype) -> Any:
    return part.astype(dtype) if isinstance(part, mx.array) else part


_Bad = tuple[str, type[Exception] | tuple[type[Exception], ...], tuple[str, ...], Callable[[], AnyState]]


def _bad_calls(policy: AnyPolicy, claims: Claims, state: AnyState, block: Block) -> Iterator[_Bad]:
    keys, values, queries = block.keys, block.values, block.queries
    asked = evidence(claims, block)
    other = mx.float16 if keys.dtype != mx.float16 else mx.float32
    wide = mx.concatenate([keys, keys], axis=2)
    any_error = (ValueError, TypeError)

    def update(k: mx.array, v: mx.array, **more: mx.array) -> Callable[[], AnyState]:
        return lambda: policy.update_batched(state, k, v, **(asked | more))

    both = (str(other).rsplit(".", 1)[-1], str(keys.dtype).rsplit(".", 1)[-1])
    rows, _, key_dim = keys.shape
    more_keys, more_values = mx.concatenate([keys, keys[:1]]), mx.concatenate([values, values[:1]])
    two_values, two_flags = mx.concatenate([values, values], axis=1), mx.ones((rows, 2), mx.bool_)
    yield f"keys of {other} for a state of {keys.dtype}", TypeError, both, update(keys.astype(other), values)
    yield f"values of {other} for a state of {keys.dtype}", TypeError, both, update(keys, values.astype(other))
    yield "keys of twice the key dimension", any_error, (str(2 * key_dim), str(key_dim)), update(wide, values)
    yield "one row too many", any_error, (str(rows + 1), str(rows)), update(more_keys, more_values)
    yield "keys of rank 2", any_error, (), update(keys[:, 0], values)
    yield "one value too many", any_error, (), update(keys, two_values)
    yield "a mask of two tokens for one", any_error, (), update(keys, values, valid=two_flags)
    if claims.needs_queries:
        yield "missing queries", any_error, ("queries",), lambda: policy.update_batched(state, keys, values)
        twice = mx.concatenate([queries, queries], axis=2)
        yield "queries of two tokens for one", any_error, ("queries",), update(keys, values, queries=twice)
        yield "queries of rank 3", any_error, ("queries",), update(keys, values, queries=queries[:, 0])
    if claims.takes_queries and not claims.needs_queries:
        policy.update_batched(state, keys, values, queries=queries)  # raises where the claim is false
    if not claims.takes_queries:
        yield "queries for a method that takes none", any_error, (), update(keys, values, queries=queries)


def law_global_randomness_is_left_alone(policy: AnyPolicy, stream: Stream, claims: Claims | None = None) -> None:
    """The global random states of MLX, NumPy and Python are neither moved nor read."""
    claims = claims or claims_for(policy.config)
    results = []
    for seed in (1, 2):
        with _seeded(seed):
            results.append(snapshot(run(policy, stream, claims)))
    told = differences(results[0], results[1])
    assert not told, f"another global seed gives another state, so global randomness was read: {told}"


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed all global generators, fail if the body moves one, and put back what was there."""
    saved = _mlx_key(), np.random.get_state(), random.getstate()
    try:
        mx.random.seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        before = _global_states()
        yield
        for name, state in _global_states().items():
            assert state == before[name], f"the global state of {name} moved"
    finally:
        high, low = saved[0]
        mx.random.seed((high << 32) | low)
        np.random.set_state(saved[1])
        random.setstate(saved[2])


def _mlx_key() -> list[int]:
    state: Any = mx.random.state
    return [int(word) for word in np.array(state[0])]


def _global_states() -> dict[str, str]:
    return {"mx.random": str(_mlx_key()), "numpy.random": _numpy_state(), "random": str(random.getstate())}


def _numpy_state() -> str:
    _, words, place, *_ = np.random.get_state(legacy=True)
    return f"{np.asarray(words).tolist()} {place}"
