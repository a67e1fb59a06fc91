"""The parties of the comparison, each reduced to one call: advance by one block, evaluated, the old state let go.

- `ours`: a veloxfn policy.
- `peer_h2o`, `peer_knorm`, `peer_keyformer`, `peer_cam`, `peer_tova`: veloxquant-mlx's own batched functions, the
  fastest form of these methods there.
- `gathering`: StreamingLLM the usual way, K and V rebuilt in temporal order at every step.

All of them hold the same rows at the same budget, and every call evaluates the whole new state.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx

import veloxfn
from veloxfn import Policy, Retention

__all__ = [
    "HAS_PEER",
    "Block",
    "Shape",
    "Stream",
    "blocks",
    "gathering",
    "ours",
    "peer_cam",
    "peer_h2o",
    "peer_keyformer",
    "peer_knorm",
    "peer_tova",
]

HAS_PEER = importlib.util.find_spec("veloxquant_mlx") is not None

ROPE_BASE = 10000.0  # the peer's functions still take it; they rotate nothing
POOL = 32  # different one-token blocks that a stream goes round in


class Shape(NamedTuple):
    """Sizes of one case: rows [N], key and value dimension, query heads per row, kept rows."""

    rows: int = 8
    dim: int = 64
    heads: int = 1
    budget: int = 512


class Block(NamedTuple):
    """Arrivals of one call, evaluated."""

    keys: mx.array  # [N, S, D]
    values: mx.array  # [N, S, D]
    queries: mx.array  # [N, G, S, D]


def blocks(shape: Shape, tokens: int, dtype: mx.Dtype, *, count: int = 1, seed: int = 0) -> list[Block]:
    """`count` different blocks of `tokens` random arrivals."""
    made = []
    for key in mx.random.split(mx.random.key(seed), count):
        for_keys, for_values, for_queries = mx.random.split(key, 3)
        size = (shape.rows, tokens, shape.dim)
        asked = (shape.rows, shape.heads, tokens, shape.dim)
        made.append(
            Block(
                mx.random.normal(size, key=for_keys).astype(dtype),
                mx.random.normal(size, key=for_values).astype(dtype),
                mx.random.normal(asked, key=for_queries).astype(dtype),
            )
        )
    mx.eval(made)
    return made


class Stream:
    """A state that one call moves on; `mx.eval` sees all of the new state when nobody holds the old one any more.

    Args:
        step: (state, *inputs) -> state.
        state: the first one, at full budget.
        inputs: the calls' arguments, gone round in turn.
        kept: rows a state keeps, and tokens it has seen, for the check that eviction happens.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        state: Any,
        inputs: Sequence[tuple[mx.array, ...]],
        kept: Callable[[Any], tuple[int, int]],
    ) -> None:
        self._step, self._inputs, self._kept = step, inputs, kept
        self.state, self._turn = state, 0
        del state
        mx.eval(self.state)

    def __call__(self) -> None:
        """One call."""
        arguments = self._inputs[self._turn % len(self._inputs)]
        self._turn += 1
        self.state = self._step(self.state, *arguments)
        mx.eval(self.state)

    def check(self, budget: int) -> None:
        """Raise unless exactly the budget is kept and more was seen: a run that evicts nothing measures nothing."""
        kept, seen = self._kept(self.state)
        if not kept == budget < seen:
            raise RuntimeError(f"no eviction took place: kept {kept}, seen {seen}, budget {budget}")


class Traced:
    """`mx.compile` of a step that counts its traces."""

    def __init__(self, step: Callable[..., Any]) -> None:
        self.traces = 0

        def traced(*arguments: Any) -> Any:
            self.traces += 1
            return step(*arguments)

        self._compiled = mx.compile(traced)

    def __call__(self, *arguments: Any) -> Any:
        """The compiled step; a second trace in steady state would be timed as part of it, so it is an error."""
        result = self._compiled(*arguments)
        if self.traces > 1:
            raise RuntimeError("the compiled step was traced again")
        return result


def _prompt_length(budget: int) -> int:
    return budget + budget // 4 + 8


def _our_counts(state: Any) -> tuple[int, int]:
    kept, seen = veloxfn.tokens_kept(state), veloxfn.tokens_seen(state)
    return int(kept.max()), int(seen.min())


def ours(
    config: Retention,
    shape: Shape,
    dtype: mx.Dtype,
    *,
    evidence: str = "none",
    tokens: int = 1,
    compiled: bool = True,
    empty: bool = False,
) -> Stream:
    """A stream of veloxfn updates.

    Args:
        config: of the method, with the budget of `shape`.
        shape: sizes.
        dtype: of keys, values and queries.
        evidence: "queries", "attention" (a decoder's own weights, [N, n]) or "none".
        tokens: of every block.
        compiled: whether the step runs under `mx.compile`.
        empty: whether every call starts from an empty state, as a prompt does, instead of a full one.
    """
    policy: Policy[Any] = veloxfn.policy(config)
    first = policy.init_state(shape.rows, shape.dim, dtype=dtype)

    def update(state: Any, block: Block) -> Any:
        if evidence == "none":
            return policy.update_batched(state, block.keys, block.values)
        return policy.update_batched(state, block.keys, block.values, queries=block.queries)

    inputs: list[tuple[mx.array, ...]] = [
        tuple(block) for block in blocks(shape, tokens, dtype, count=POOL if tokens == 1 else 1, seed=1)
    ]
    if evidence == "attention":
        weights = mx.softmax(4 * mx.random.normal((POOL, shape.rows, shape.budget + 1), key=mx.random.key(2)), axis=-1)
        inputs = [(keys, values, part) for (keys, values, _), part in zip(inputs, weights, strict=False)]
        mx.eval(inputs)

    def step(state: Any, keys: mx.array, values: mx.array, third: mx.array) -> Any:
        if evidence == "attention":
            return policy.update_batched(state, keys, values, attention=third)
        return update(state, Block(keys, values, third))

    if empty:
        return Stream(lambda _, *arguments: step(first, *arguments), first, inputs, _our_counts)
    state = update(first, blocks(shape, _prompt_length(shape.budget), dtype)[0])
    return Stream(Traced(step) if compiled else step, state, inputs, _our_counts)


def _peer_counts(state: Any) -> tuple[int, int]:
    return state[0].shape[1], int(state[-1])


def peer_h2o(
    shape: Shape,
    dtype: mx.Dtype,
    *,
    sink: int,
    recent: int,
    decay: float,
    tokens: int = 1,
    compiled: bool = True,
    empty: bool = False,
) -> Stream:
    """A stream of veloxquant-mlx's `h2o_update_batched`.

    Its evidence is the arriving key in place of the query, one per row. Its `next_pos` goes in as an array, so that
    `mx.compile` traces the step once. It takes a block token by token and evaluates every 32 tokens, so a block cannot
    be compiled as a whole; with `compiled` and tokens > 1 the compiled one-token step is looped instead, evaluated at
    the same interval.
    """
    from veloxquant_mlx.quantizers.h2o import h2o_update_batched

    def step(state: Any, keys: mx.array, values: mx.array) -> Any:
        *columns, position = state
        return h2o_update_batched(
            *columns, keys, values, sink, shape.budget, ROPE_BASE, position, grace=recent, decay=decay
        )

    start = (None, None, None, None, mx.array(0, mx.int32))
    inputs = [block[:2] for block in blocks(shape, tokens, dtype, count=POOL if tokens == 1 else 1, seed=1)]
    if empty:
        return Stream(lambda _, *arguments: step(start, *arguments), start[-1], inputs, _peer_counts)
    state = step(start, *blocks(shape, _prompt_length(shape.budget), dtype)[0][:2])
    if not compiled:
        return Stream(step, state, inputs, _peer_counts)
    one = Traced(step)
    return Stream(one if tokens == 1 else _looped(one), state, inputs, _peer_counts)


def _looped(step: Callable[..., Any], interval: int = 32) -> Callable[..., Any]:
    """A block as a loop of one-token steps."""

    def loop(state: Any, keys: mx.array, values: mx.array) -> Any:
        for t in range(keys.shape[1]):
            state = step(state, keys[:, t : t + 1], values[:, t : t + 1])
            if (t + 1) % interval == 0:
                mx.eval(state)
        return state

    return loop


def peer_knorm(shape: Shape, dtype: mx.Dtype, *, sink: int, tokens: int = 1) -> Stream:
    """A stream of veloxquant-mlx's `knorm_update_batched`, compiled; the count of tokens seen is kept beside it."""
    from veloxquant_mlx.quantizers.knorm import knorm_update_batched

    def step(state: Any, keys: mx.array, values: mx.array) -> Any:
        *columns, seen = state
        columns = knorm_update_batched(*columns, keys, values, shape.budget, sink, 0, "low")
        return (*columns, seen + keys.shape[1])

    blank = mx.zeros((shape.rows, 0, shape.dim), dtype)
    state = (blank, blank, mx.zeros((shape.rows, 0)), mx.array(0, mx.int32))
    state = step(state, *blocks(shape, _prompt_length(shape.budget), dtype)[0][:2])
    inputs = [block[:2] for block in blocks(shape, tokens, dtype, count=POOL if tokens == 1 else 1, seed=1)]
    return Stream(Traced(step), state, inputs, _peer_counts)


def peer_keyformer(
    shape: Shape, dtype: mx.Dtype, *, sink: int, recent: int, tau_init: float, tau_end: float, anneal_steps: int
) -> Stream:
    """A stream of veloxquant-mlx's `keyformer_update_batched`.

    Additive noise, the arriving key in place of the query. It draws from a Python count of steps, so `mx.compile` would
    trace it anew at every step: it runs uncompiled.
    """
    from veloxquant_mlx.quantizers.keyformer import keyformer_update_batched

    settings = (sink, shape.budget, recent, tau_init, tau_end, anneal_steps, ROPE_BASE)

    def step(state: Any, keys: mx.array, values: mx.array) -> Any:
        *columns, count = state
        *columns, _, count = keyformer_update_batched(
            *columns, keys, values, *settings, count, count, list(range(shape.rows))
        )
        return (*columns, count)

    state = step((None, None, None, None, None, 0), *blocks(shape, _prompt_length(shape.budget), dtype)[0][:2])
    inputs = [block[:2] for block in blocks(shape, 1, dtype, count=POOL, seed=1)]
    return Stream(step, state, inputs, _peer_counts)


def peer_cam(shape: Shape, dtype: mx.Dtype, *, sink: int, merge: str, gate: bool) -> Stream:
    """A stream of veloxquant-mlx's `cam_update_batched`: the nearest survivor, the arriving key in place of the query.

    Without the gate it is compiled; with it, it draws from a Python count of steps and cannot be.
    """
    from veloxquant_mlx.quantizers.cam import cam_update_batched

    settings = (sink, shape.budget, merge, False, gate, list(range(shape.rows)))

    def step(state: Any, keys: mx.array, values: mx.array) -> Any:
        *columns, seen, count = state
        *columns, seen, count = cam_update_batched(*columns, keys, values, *settings, seen, count)
        return (*columns, seen, count)

    start = (None, None, None, None, mx.array(0, mx.int32), 0)
    state = step(start, *blocks(shape, _prompt_length(shape.budget), dtype)[0][:2])
    inputs = [block[:2] for block in blocks(shape, 1, dtype, count=POOL, seed=1)]
    return Stream(step if gate else Traced(step), state, inputs, lambda state: (state[0].shape[1], int(state[-2])))


def peer_tova(shape: Shape, dtype: mx.Dtype, *, sink: int) -> Stream:
    """A stream of veloxquant-mlx's batched TOVA update, compiled: the arriving key in place of the query."""
    from veloxquant_mlx.quantizers.tova import _tova_update_batched

    def step(state: Any, keys: mx.array, values: mx.array) -> Any:
        held, seen = state[:2], state[2]
        return (*_tova_update_batched(*held, keys, values, sink, shape.budget), seen + keys.shape[1])

    start = (None, None, mx.array(0, mx.int32))
    state = step(start, *blocks(shape, _prompt_length(shape.budget), dtype)[0][:2])
    inputs = [block[:2] for block in blocks(shape, 1, dtype, count=POOL, seed=1)]
    return Stream(Traced(step), state, inputs, _peer_counts)


def gathering(shape: Shape, dtype: mx.Dtype, *, sink: int) -> Stream:
    """StreamingLLM with rows in temporal order (sinks, the rest but its oldest, the arrival): copies all rows."""

    def step(state: Any, keys: mx.array, values: mx.array) -> Any:
        kept_keys, kept_values, positions, seen = state
        place = mx.broadcast_to(seen, (shape.rows, 1))

        def moved(column: mx.array, fresh: mx.array) -> mx.array:
            return mx.concatenate([column[:, :sink], column[:, sink + 1 :], fresh], axis=1)

        return moved(kept_keys, keys), moved(kept_values, values), moved(positions, place), seen + 1

    full = blocks(shape, shape.budget, dtype)[0]
    positions = mx.broadcast_to(mx.arange(shape.budget, dtype=mx.int32), (shape.rows, shape.budget))
    state = (full.keys, full.values, positions, mx.array(shape.budget, mx.int32))
    inputs = [block[:2] for block in blocks(shape, 1, dtype, count=POOL, seed=1)]
    del full
    return Stream(Traced(step), state, inputs, _peer_counts)
