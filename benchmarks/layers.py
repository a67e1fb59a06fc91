"""The parties of kernels.py: layers of a model, each with a full cache, that one evaluation moves on together.

A step takes a layer's state and one block, and returns (what a decoder reads, state). States are made at full budget
directly: only shapes, types and live slots matter for time, and a prompt of thousands of tokens per case would take
longer than the measurement.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import timing
from mlx.utils import tree_map
from sides import ROPE_BASE, Block, Shape, Traced, blocks

import veloxfn
from veloxfn import Retention, h2o, keyformer, ops, streaming_llm

__all__ = [
    "Layers",
    "attending_apart",
    "attending_only",
    "decoding",
    "full_state",
    "our_counts",
    "own",
    "peak_above_held",
    "peer",
    "peer_state",
    "peer_step",
    "ranks_by_output",
    "reading_all",
    "sdpa",
    "updating",
]

POOL = 8  # different one-token blocks that the layers go round in
BEFORE = 8  # tokens beyond the budget that a full state has seen
Step = Callable[..., Any]
Counts = Callable[[Any], tuple[int, int]]


class Layers:
    """Layers that one call moves on by one block each, everything evaluated at once, the old states let go.

    Args:
        step: (state, *inputs) -> (results, state), or results alone where `advance` is False.
        state: of one layer; every layer gets buffers of its own.
        count: layers.
        inputs: the blocks, gone round in turn.
        kept: rows a state keeps and tokens it has seen; None where nothing is evicted.
        advance: whether a call replaces the states.
        chained: whether a layer's query is what the layer before it returned, as in a model, in place of its block's.
    """

    def __init__(
        self,
        step: Step,
        state: Any,
        count: int,
        inputs: Sequence[tuple[mx.array, ...]],
        kept: Counts | None = None,
        *,
        advance: bool = True,
        chained: bool = False,
    ) -> None:
        self._step, self._inputs, self._kept, self._advance, self._chained = step, inputs, kept, advance, chained
        self.states, self._turn = [_copied(state) for _ in range(count)], 0
        del state
        mx.eval(self.states)
        self()  # traces, and builds kernels

    def __call__(self) -> None:
        """One call."""
        results = []
        for layer in range(len(self.states)):
            arguments = self._inputs[(self._turn + layer) % len(self._inputs)]
            if self._chained and results:
                arguments = (*arguments[:-1], results[-1])
            if self._advance:
                result, self.states[layer] = self._step(self.states[layer], *arguments)
            else:
                result = self._step(self.states[layer], *arguments)
            results.append(result)
        self._turn += 1
        mx.eval(results, self.states)

    def check(self, budget: int) -> None:
        """Raise unless every layer keeps exactly the budget and has seen more, where anything is evicted."""
        for state in self.states if self._kept else ():
            kept, seen = self._kept(state)
            if not kept == budget < seen:
                raise RuntimeError(f"no eviction took place: kept {kept}, seen {seen}, budget {budget}")


def _copied(tree: Any) -> Any:
    """The tree with arrays of its own."""
    return tree_map(lambda leaf: leaf + mx.zeros((), leaf.dtype) if isinstance(leaf, mx.array) else leaf, tree)


def full_state(config: Retention, shape: Shape, dtype: mx.Dtype) -> Any:
    """A state of the method at full budget: rows of a sliding window, columns of its own drawn from [0, 1)."""
    start = veloxfn.policy(config).init_state(shape.rows, shape.dim, dtype=dtype)
    window = streaming_llm.policy(
        streaming_llm.Config(budget=config.budget, sink=config.sink, placement=config.placement)
    )
    block = blocks(shape, config.budget + BEFORE, dtype)[0]
    slots = window.update_batched(window.init_state(shape.rows, shape.dim, dtype=dtype), block.keys, block.values).slots
    empty, length = start.slots.positions.shape[1], slots.positions.shape[1]
    columns = {
        name: mx.random.uniform(shape=(*column.shape[:-1], length), key=mx.random.key(7)).astype(column.dtype)
        for name, column in zip(start._fields[1:], start[1:], strict=True)
        if isinstance(column, mx.array) and column.ndim > 1 and column.shape[-1] == empty
    }
    state = start._replace(slots=slots, **columns)
    mx.eval(state)
    return state


def our_counts(state: Any) -> tuple[int, int]:
    """Rows kept and tokens seen of a veloxfn state."""
    return int(veloxfn.tokens_kept(state).max()), int(veloxfn.tokens_seen(state).min())


def ranks_by_output(config: Retention) -> bool:
    """Whether the method ranks by the mass that `ops.attend` returns beside the output."""
    return isinstance(config, h2o.Config) or (isinstance(config, keyformer.Config) and config.noise == "additive")


def _attention(queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
    scale = queries.shape[-1] ** -0.5
    return mx.fast.scaled_dot_product_attention(queries, keys[:, None], values[:, None], scale=scale)


def decoding(config: Retention) -> Step:
    """A whole step of a decoder's layer: write the token, attend, let go of the weakest slot."""
    policy = veloxfn.policy(config)

    def step(state: Any, keys: mx.array, values: mx.array, queries: mx.array) -> Any:
        return veloxfn.step(policy, state, keys, values, queries)

    return step


def attending_only(config: Retention) -> Step:
    """Attend and let go of the weakest slot, over a token that is written already: masses and positions change.

    Values change as well where losers are merged into them.
    """
    policy = veloxfn.policy(config)

    def step(state: Any, keys: mx.array, values: mx.array, queries: mx.array) -> Any:
        del keys, values
        output, (slots, *columns) = veloxfn.attend(policy, state, queries)
        return output, slots.positions, [*columns, *([slots.values] if config.merges_losers else [])]

    return step


def attending_apart(config: Retention) -> Step:
    """The same by `ops.attend` and `evict(attention=...)`, as a decoder with an attention of its own does."""
    policy = veloxfn.policy(config)

    def step(state: Any, keys: mx.array, values: mx.array, queries: mx.array) -> Any:
        del keys, values
        output, mass = ops.attend(queries, *veloxfn.candidates(config, state), state.slots.positions)
        slots, *columns = policy.evict(state, attention=mass)
        return output, slots.positions, [*columns, *([slots.values] if config.merges_losers else [])]

    return step


def updating(config: Retention) -> Step:
    """Write the token, score by its query and let go of the weakest slot: no attention output, as the peer does."""
    policy = veloxfn.policy(config)

    def step(state: Any, keys: mx.array, values: mx.array, queries: mx.array) -> Any:
        evidence = {"queries": queries} if config.needs_queries else {}
        return (), policy.update_batched(state, keys, values, **evidence)

    return step


def own(
    make: Callable[[Retention], Step],
    config: Retention,
    shape: Shape,
    dtype: mx.Dtype,
    count: int,
    *,
    chained: bool = False,
    compiled: bool = True,
) -> Layers:
    """Layers of a veloxfn method under one of the steps above."""
    state, step = full_state(config, shape, dtype), make(config)
    step = Traced(step) if compiled else step
    if make in (attending_only, attending_apart):
        block = blocks(shape, 1, dtype, seed=3)[0]
        state = veloxfn.policy(config).absorb(state, block.keys, block.values)
        return Layers(step, state, count, _inputs(shape, dtype), advance=False)
    return Layers(step, state, count, _inputs(shape, dtype), our_counts, chained=chained)


def _inputs(shape: Shape, dtype: mx.Dtype) -> list[Block]:
    return blocks(shape, 1, dtype, count=POOL, seed=1)


def sdpa(
    shape: Shape,
    dtype: mx.Dtype,
    count: int,
    *,
    more: int = 1,
    wrapped: Callable[[Step], Step] | None = None,
    chained: bool = False,
) -> Layers:
    """MLX's own attention of one query over budget + `more` rows, nothing written and nothing let go."""
    block = blocks(shape, shape.budget + more, dtype)[0]

    def step(state: Any, keys: mx.array, values: mx.array, queries: mx.array) -> mx.array:
        del keys, values
        return _attention(queries, *state)

    made = step if wrapped is None else wrapped(step)
    return Layers(made, (block.keys, block.values), count, _inputs(shape, dtype), advance=False, chained=chained)


def peer_state(method: str, shape: Shape, dtype: mx.Dtype) -> Any:
    """A state of veloxquant-mlx's batched functions at full budget."""
    block = blocks(shape, shape.budget, dtype)[0]
    drawn = mx.random.uniform(shape=(shape.rows, shape.budget), key=mx.random.key(7))
    positions = mx.broadcast_to(mx.arange(shape.budget, dtype=mx.int32), drawn.shape)
    if method == "h2o":
        return (block.keys, block.values, drawn, positions, mx.array(shape.budget, mx.int32))
    if method == "keyformer":
        return (block.keys, block.values, drawn, drawn, positions, shape.budget)
    return (block.keys, block.values, drawn, mx.array(shape.budget, mx.int32))


def peer_step(method: str, shape: Shape, *, sink: int, recent: int, decay: float) -> Step:
    """A step of veloxquant-mlx's `h2o_update_batched`, `keyformer_update_batched` or `knorm_update_batched`.

    `sides.py` says what they compute. Keyformer's draws from a Python count of steps and cannot be compiled.
    """
    if method == "h2o":
        from veloxquant_mlx.quantizers.h2o import h2o_update_batched

        def h2o_step(state: Any, keys: mx.array, values: mx.array, *_: mx.array) -> Any:
            *columns, count = state
            after = h2o_update_batched(
                *columns, keys, values, sink, shape.budget, ROPE_BASE, count, grace=recent, decay=decay
            )
            return (), after

        return h2o_step
    if method == "keyformer":
        from veloxquant_mlx.quantizers.keyformer import keyformer_update_batched

        schedule = keyformer.Config(budget=shape.budget, noise="additive")
        settings = (sink, shape.budget, recent, *schedule.temperatures, schedule.anneal_steps, ROPE_BASE)

        def keyformer_step(state: Any, keys: mx.array, values: mx.array, *_: mx.array) -> Any:
            *columns, count = state
            *columns, _, count = keyformer_update_batched(
                *columns, keys, values, *settings, count, count, list(range(shape.rows))
            )
            return (), (*columns, count)

        return keyformer_step
    from veloxquant_mlx.quantizers.knorm import knorm_update_batched

    def knorm_step(state: Any, keys: mx.array, values: mx.array, *_: mx.array) -> Any:
        *columns, seen = state
        columns = knorm_update_batched(*columns, keys, values, shape.budget, sink, 0, "low")
        return (), (*columns, seen + keys.shape[1])

    return knorm_step


def peer(method: str, shape: Shape, dtype: mx.Dtype, count: int, *, compiled: bool, **settings: Any) -> Layers:
    """Layers of the peer's method."""
    step = peer_step(method, shape, **settings)
    return Layers(
        Traced(step) if compiled else step,
        peer_state(method, shape, dtype),
        count,
        _inputs(shape, dtype),
        lambda state: (state[0].shape[1], int(state[-1])),
    )


class Bandwidth(NamedTuple):
    """Bytes per second of a plain pass over a large array."""

    reading: float  # a sum
    copying: float  # read and written


def reading_all(megabytes: int, *, rounds: int = 5) -> Bandwidth:
    """Bandwidth of a sum and of a copy of one array of that size, the best of some rounds."""
    large = mx.random.uniform(shape=(megabytes * 2**18,)).astype(mx.float32)
    mx.eval(large)
    one = mx.array(1.0)
    seconds = timing.interleave(
        {"sum": lambda: mx.eval(large.sum()), "copy": lambda: mx.eval(large + one)}, rounds=rounds, calls=3, warmup=2
    )
    return Bandwidth(large.nbytes / min(seconds["sum"]), 2 * large.nbytes / min(seconds["copy"]))


def peak_above_held(call: Callable[[], None]) -> int:
    """Bytes that one call needs beyond what is held before it."""
    mx.synchronize()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    call()
    mx.synchronize()
    return max(0, mx.get_peak_memory() - before)
