"""Laws of cost, read from the graph of a step: what it touches, how often it is traced, what memory it takes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from veloxfn.testing.claims import Claims, claims_for
from veloxfn.testing.drive import AnyPolicy, AnyState, evidence, leaves, run
from veloxfn.testing.streams import Block, Stream, normal_stream

__all__ = [
    "Primitive",
    "law_block_has_no_loop",
    "law_graph_does_not_grow_with_rows",
    "law_memory_is_flat",
    "law_no_selection_below_budget",
    "law_step_moves_no_rows",
    "primitives",
]

_VIEWS = {
    "AsStrided", "Broadcast", "BroadcastAxes", "Depends", "ExpandDims", "Flatten", "Reshape", "Slice", "Split",
    "Squeeze", "StopGradient", "Transpose", "Unflatten", "View",
}  # fmt: skip
_CASTS = {"AsType", "BitwiseBinary", "Equal", "Select"}  # the latter widen float16 by moving its bits
_WRITES = {"DynamicSliceUpdate", "Scatter", "ScatterAxis", "SliceUpdate"}
_READS = {"DynamicSlice", "Gather", "GatherAxis"}
_PRODUCTS = {"AddMM", "GatherMM", "Matmul", "ScaledDotProductAttention", "CustomKernel"}
_ROTATIONS = {"Add", "Concatenate", "Multiply", "RoPE"}
_NORMS = {"Square", "Reduce"}
_SELECTIONS = {"ArgPartition", "ArgReduce", "ArgSort", "Partition", "Sort"}


@dataclass(frozen=True)
class Primitive:
    """One operation of a traced graph."""

    name: str
    inputs: tuple[tuple[str, tuple[int, ...]], ...]  # (array, shape)
    outputs: tuple[tuple[str, tuple[int, ...]], ...]


def primitives(function: Callable[..., Any], *arguments: mx.array) -> list[Primitive]:
    """The operations that a call of `function` would run, in order; arrays in, arrays out, nothing is computed.

    Raises:
        AssertionError: `mx.export_function` cannot export it, so neither can a user who ships the step as a file.
    """
    found: list[Primitive] = []

    def note(event: dict[str, Any]) -> None:
        if event["type"] == "primitive":
            inputs = tuple((name, tuple(shape)) for name, shape, _ in event["inputs"])
            outputs = tuple((name, tuple(shape)) for name, shape, _ in event["outputs"])
            found.append(Primitive(event["name"], inputs, outputs))

    try:
        mx.export_function(note, function, *arguments)
    except (RuntimeError, ValueError) as error:
        raise AssertionError(f"the step cannot be exported: {error} (mx.logical_not can be, `~` cannot)") from error
    return found


def step_primitives(policy: AnyPolicy, claims: Claims, state: AnyState, block: Block) -> list[Primitive]:
    """The operations of one `update_batched`."""
    own, given = list(leaves(state).values()), evidence(claims, block)
    arrays = [*own, block.keys, block.values, *given.values()]

    def flattened(*inputs: mx.array) -> tuple[mx.array, ...]:
        before = _rebuilt(state, list(inputs[: len(own)]))
        keys, values, *rest = inputs[len(own) :]
        after = policy.update_batched(before, keys, values, **dict(zip(given, rest, strict=True)))
        return tuple(leaves(after).values())

    return primitives(flattened, *arrays)


def _rebuilt(node: Any, arrays: list[mx.array]) -> Any:
    """`node` with its arrays replaced, in order, by those popped from the front of `arrays`."""
    if isinstance(node, mx.array):
        return arrays.pop(0)
    if hasattr(node, "_fields"):
        return type(node)(*(_rebuilt(child, arrays) for child in node))
    if isinstance(node, dict):
        return {name: _rebuilt(child, arrays) for name, child in node.items()}
    return tuple(_rebuilt(child, arrays) for child in node)


def _settled(policy: AnyPolicy, stream: Stream, claims: Claims) -> tuple[AnyState, Block]:
    """A state after all but the last block of a stream, and that block."""
    state = run(policy, stream.head(len(stream.blocks) - 1), claims)
    last = stream.block(stream.tokens - stream.blocks[-1], stream.tokens)
    return state, last


def law_step_moves_no_rows(policy: AnyPolicy, claims: Claims | None = None) -> None:
    """At full budget no operation of a one-token step touches O(nD) elements beyond the scoring product.

    Views, in-place writes of single rows into the buffers and gathers of single rows are free. One product may read the
    stored keys, cast to float32 for it where they are narrower and turned where they are seen at their ranks, and only
    where the method scores keys at all; one product more and the keys' norms where it compares keys.
    """
    claims = claims or claims_for(policy.config)
    if not claims.in_place or policy.config.budget < 4:  # below that, one row is not small against n rows
        return
    budget, group = policy.config.budget, policy.config.shared_heads
    width = 8 * (budget + 1)  # n D is far above n^2 and above every per-slot column
    for dtype in (mx.float32, mx.float16):
        blocks = (budget + 1, 1, 1)
        stream = normal_stream(
            2, rows=2 * group, tokens=budget + 3, key_dim=width, value_dim=width, blocks=blocks, dtype=dtype
        )
        state, block = _settled(policy, stream, claims)
        graph = step_primitives(policy, claims, state, block)
        heavy = stream.rows * budget * width // 2
        told = _moved(graph, heavy, claims)
        assert not told, (
            f"a one-token step at budget {budget}, D = {width}, {dtype} touches O(nD) elements (over {heavy}): {told}"
        )


def _moved(graph: list[Primitive], heavy: int, claims: Claims) -> list[str]:
    readers: dict[str, list[Primitive]] = {}
    for one in graph:
        for name, _ in one.inputs:
            readers.setdefault(name, []).append(one)
    told, products, norms = [], 0, 0
    for one in graph:
        big_in = [size for _, shape in one.inputs if (size := math.prod(shape)) > heavy]
        big_out = [size for _, shape in one.outputs if (size := math.prod(shape)) > heavy]
        if not big_in and not big_out:
            continue
        if one.name in _VIEWS or (one.name in _READS and not big_out):
            continue
        if one.name in _WRITES and len(big_in) == 1 and math.prod(one.inputs[0][1]) > heavy:
            continue
        if claims.scores_keys and one.name in _PRODUCTS and not big_out:
            products += 1
            continue
        if claims.compares_keys and one.name in _NORMS:
            norms += 1
            continue
        if claims.scores_keys and _is_read(one, readers, claims):
            continue
        told.append(f"{one.name} {[s for _, s in one.inputs]} -> {[s for _, s in one.outputs]}")
    needed = 2 if claims.compares_keys else 1
    if products > needed:
        told.append(f"{products} products read the stored keys, needed: {needed}")
    if norms > len(_NORMS):
        told.append(f"norms of the stored keys are taken in {norms} operations, {len(_NORMS)} are needed")
    return told


def _is_read(one: Primitive, readers: dict[str, list[Primitive]], claims: Claims) -> bool:
    """Whether this is a cast, a claimed rotation, or a part of one, and only products (or norms) read what comes out.

    A rotation is elementwise but for its swapped pairs and the dimensions that are not rotated.
    """
    changes = _CASTS | _VIEWS | (_ROTATIONS if claims.turns_keys else set())
    ends = _PRODUCTS | (_NORMS if claims.compares_keys else set())
    followers = [reader for name, _ in one.outputs for reader in readers.get(name, [])]
    return (
        (one.name in changes or (claims.turns_keys and one.name.startswith("Compiled")))
        and bool(followers)
        and all(reader.name in ends or _is_read(reader, readers, claims) for reader in followers)
    )


def law_no_selection_below_budget(policy: AnyPolicy, claims: Claims | None = None) -> None:
    """A step that stays within the budget runs no sort and no argmin.

    Lesson 41 (no eviction machinery while nothing can be evicted). Where keys are seen at their ranks, the ranks take
    one sort.
    """
    claims = claims or claims_for(policy.config)
    budget, group = policy.config.budget, policy.config.shared_heads
    if budget < 2:
        return
    stream = normal_stream(3, rows=group, tokens=budget, blocks=(budget - 1, 1))
    state, block = _settled(policy, stream, claims)
    found = [one.name for one in step_primitives(policy, claims, state, block) if one.name in _SELECTIONS]
    if claims.turns_keys and claims.scores_keys and "ArgSort" in found:
        found.remove("ArgSort")
    assert not found, f"token {budget} of a budget of {budget} needs no selection, the step runs {found}"


def law_block_has_no_loop(policy: AnyPolicy, claims: Claims | None = None) -> None:
    """The graph of a block does not grow with the tokens of the block.

    Lesson 37 (a long prompt must not build one graph per token).
    """
    claims = claims or claims_for(policy.config)
    if not claims.block_without_loop:
        return
    full, group = policy.config.budget + 2, policy.config.shared_heads
    sizes = {}
    for size in (32, 256):
        stream = normal_stream(4, rows=group, tokens=full + size, blocks=(full, size))
        state, block = _settled(policy, stream, claims)
        sizes[size] = len(step_primitives(policy, claims, state, block))
    assert sizes[256] <= 2 * sizes[32], f"operations per block grow with its tokens: {sizes}"


def law_graph_does_not_grow_with_rows(policy: AnyPolicy, claims: Claims | None = None) -> None:
    """The graph of a step is the same for 1 and for 8 groups of rows: no loop over heads.

    Lesson 40.
    """
    claims = claims or claims_for(policy.config)
    found = {}
    full = policy.config.budget + 2
    for groups in (1, 8):
        rows = groups * policy.config.shared_heads
        stream = normal_stream(6, rows=rows, tokens=full + 1, blocks=(full, 1))
        state, block = _settled(policy, stream, claims)
        found[groups] = Counter(one.name for one in step_primitives(policy, claims, state, block))
    more = {name: (found[1][name], count) for name, count in found[8].items() if count > found[1][name]}
    assert sum(found[8].values()) <= sum(found[1].values()) + 8, f"operations grow with the rows (1, 8 groups): {more}"


def law_memory_is_flat(policy: AnyPolicy, claims: Claims | None = None, *, tokens: int = 1000) -> None:
    """A thousand one-token steps take no more memory than the first hundred, and no step copies the buffers.

    A method that merges writes rows that the same evaluation has read: MLX copies the buffers that they are in.

    Lesson 42 (peak memory over 1000 steps is flat), lesson 39.
    """
    claims = claims or claims_for(policy.config)
    budget, group = policy.config.budget, policy.config.shared_heads
    width = max(8, (1 << 16) // (budget + 1))  # 256 KiB per buffer and row: copies stand out against scratch
    stream = normal_stream(8, rows=group, tokens=budget + 4, key_dim=width, value_dim=width, blocks=(budget + 2, 1, 1))
    _, *blocks = stream
    state = run(policy, stream, claims)
    buffer, peaks = state.slots.keys.nbytes, []
    for count in (100, tokens - 100):
        mx.clear_cache()
        mx.reset_peak_memory()
        floor = mx.get_active_memory()
        for index in range(count):
            block = blocks[index % 2]
            state = policy.update_batched(state, block.keys, block.values, **evidence(claims, block))
            mx.eval(list(leaves(state).values()))  # the old state is let go of before this: its buffers are free
        peaks.append(mx.get_peak_memory() - floor)
    early, late = peaks
    # MLX's CUDA back end copies evaluated buffers that it writes into: there only growth from step to step is a fault.
    copies = mx.cuda.is_available() and mx.default_device().type == mx.DeviceType.gpu
    assert late <= early + (8 * buffer if copies else buffer // 8), (
        f"memory above the state grew from {early} bytes in the first 100 steps to {late} in the next {tokens - 100}"
    )
    scratch = buffer // 2 if claims.in_place and not claims.scores_keys else 2 * buffer
    scratch += 0 if claims.bit_copies else buffer
    if claims.in_place and not copies:
        assert late <= scratch, f"a step takes {late} bytes beside the state, allowed {scratch} (a buffer has {buffer})"
