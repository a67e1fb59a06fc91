"""Laws of transformations: a step that is compiled or mapped keeps what the plain step keeps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map

from veloxfn import ops
from veloxfn.testing.claims import Claims, claims_for
from veloxfn.testing.drive import AnyPolicy, AnyState, evidence, kept, leaves, run, step
from veloxfn.testing.laws.rows import same_columns, same_rows
from veloxfn.testing.streams import normal_stream

__all__ = ["law_compiled_equals_eager", "law_mapped_equals_looped"]


def law_compiled_equals_eager(policy: AnyPolicy, claims: Claims | None = None, *, tokens: int = 12) -> None:
    """`mx.compile(update_batched)` traces once in steady state and keeps what the eager function keeps.

    Lesson 38 (nothing is evaluated inside an update), lesson 39 (work per step does not grow with the tokens seen).
    """
    claims = claims or claims_for(policy.config)
    budget, group = policy.config.budget, policy.config.shared_heads
    blocks = (budget + 2,) + (1,) * tokens
    stream = normal_stream(7, rows=2 * group, tokens=sum(blocks), blocks=blocks, dtype=mx.float16)
    traces = 0

    def update(state: AnyState, keys: mx.array, values: mx.array, given: dict[str, mx.array]) -> AnyState:
        nonlocal traces
        traces += 1
        return policy.update_batched(state, keys, values, **given)

    compiled = mx.compile(update)
    eager = run(policy, stream.head(1), claims)
    quick = eager
    for block in stream.tail(1):
        eager = step(policy, claims, eager, block)
        try:
            quick = compiled(quick, block.keys, block.values, evidence(claims, block))
            mx.eval(list(leaves(quick).values()))
        except (RuntimeError, ValueError) as error:
            raise AssertionError(f"update_batched cannot be compiled: {error}") from error
        assert type(quick) is type(eager), f"compiled code returns {type(quick).__name__}, not {type(eager).__name__}"
        same_rows(kept(eager), kept(quick), f"compiled against eager after column {budget + 2 + block.stop}")
        same_columns(eager, quick, list(range(stream.rows)), "compiled against eager")
    assert traces == 1, f"{tokens} steps of one shape must be traced once, found {traces} traces"


def law_mapped_equals_looped(policy: AnyPolicy, claims: Claims | None = None) -> None:
    """`mx.vmap(update_batched)` keeps what one call after the other keeps: over stacked states, or from a single one.

    Lesson 38 (nothing is evaluated inside an update).
    """
    claims = claims or claims_for(policy.config)
    full, group = policy.config.budget + 2, policy.config.shared_heads
    rows = 2 * group  # MLX maps some operations wrongly where an element has several rows
    streams = [normal_stream(seed, rows=rows, tokens=full + 4, blocks=(full, 1, 3)) for seed in (10, 11, 12)]
    states = [run(policy, stream.head(1), claims) for stream in streams]

    def update(state: AnyState, keys: mx.array, values: mx.array, given: dict[str, mx.array]) -> AnyState:
        return policy.update_batched(state, keys, values, **given)

    for start, stop in ((full, full + 1), (full + 1, full + 4)):
        blocks = [stream.block(start, stop) for stream in streams]
        arguments = [(b.keys, b.values, evidence(claims, b)) for b in blocks]
        what = f"columns {start} .. {stop - 1}"
        with_states = [(state, *rest) for state, rest in zip(states, arguments, strict=True)]
        _mapped_alike(update, with_states, f"states mapped, {what}")
        _mapped_alike(partial(update, states[0]), arguments, f"blocks mapped onto one state, {what}")
        states = [step(policy, claims, state, block) for state, block in zip(states, blocks, strict=True)]


def _mapped_alike(update: Callable[..., AnyState], arguments: list[tuple[Any, ...]], what: str) -> None:
    """Compare `update` mapped over stacked arguments with a call for each."""
    with ops.using("reference"):  # kernels have no vmap
        try:
            mapped = mx.vmap(update)(*tree_map(lambda *parts: mx.stack(list(parts)), *arguments))
            mx.eval(list(leaves(mapped).values()))
        except (RuntimeError, ValueError) as error:
            raise AssertionError(f"update_batched cannot be mapped: {error}") from error
    for index, given in enumerate(arguments):
        state = update(*given)
        one = tree_map(lambda leaf, index=index: leaf[index], mapped)
        same_rows(kept(state), kept(one), f"mapped against looped, {what}")
        same_columns(state, one, list(range(len(kept(state)))), f"mapped against looped, {what}")
