"""Run a policy over a stream, and read states as plain NumPy data without the package's own readers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from veloxfn.base import Policy, Retention
from veloxfn.testing.claims import Claims, claims_for
from veloxfn.testing.oracle import turned
from veloxfn.testing.streams import Block, Floats, Stream

__all__ = [
    "UNIT",
    "AnyPolicy",
    "AnyState",
    "Kept",
    "Step",
    "as_seen",
    "bits",
    "describe",
    "differences",
    "evidence",
    "floats",
    "kept",
    "leaves",
    "live_positions",
    "run",
    "snapshot",
    "snapshot_of_live",
    "start",
    "step",
    "steps",
]

AnyPolicy: TypeAlias = Policy[Any]
AnyState: TypeAlias = Any
Bits = npt.NDArray[Any]

UNIT = {mx.float32: 2.0**-23, mx.float16: 2.0**-10, mx.bfloat16: 2.0**-7}
"""Distance from 1 to the next number of each dtype."""

_UNSIGNED = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}


class Kept(NamedTuple):
    """What one row keeps, in temporal order."""

    positions: npt.NDArray[np.int64]  # [m]
    keys: Bits  # [m, D] bit patterns
    values: Bits  # [m, Dv] bit patterns


class Step(NamedTuple):
    """One block on its way through a policy."""

    block: Block
    before: AnyState
    absorbed: AnyState
    after: AnyState


def bits(array: mx.array) -> Bits:
    """The bit patterns of an array, so that NaN equals NaN and -0.0 differs from 0.0."""
    if array.dtype == mx.bool_:
        return np.array(array)
    return np.array(mx.view(mx.contiguous(array), _UNSIGNED[array.dtype.size]))


def floats(array: mx.array) -> Floats:
    """An array as float32; exact for float16 and bfloat16."""
    return np.array(array.astype(mx.float32))


def leaves(state: AnyState) -> dict[str, mx.array]:
    """Every array of a state by its path: `slots.keys`, `mass`, ..."""
    return dict(_named(state, ""))


def _named(node: Any, path: str) -> Iterator[tuple[str, mx.array]]:
    if isinstance(node, mx.array):
        yield path, node
        return
    if isinstance(node, tuple):
        names = getattr(node, "_fields", range(len(node)))
        for name, child in zip(names, node, strict=True):
            yield from _named(child, f"{path}.{name}" if path else str(name))
        return
    if isinstance(node, dict):
        for name, child in node.items():
            yield from _named(child, f"{path}.{name}" if path else str(name))
        return
    raise AssertionError(f"a state holds arrays only, found {type(node).__name__} {node!r} at {path or 'its root'}")


def snapshot(state: AnyState) -> dict[str, tuple[mx.Dtype, Bits]]:
    """Copies of all leaves that later writes cannot reach."""
    return {path: (leaf.dtype, bits(leaf).copy()) for path, leaf in leaves(state).items()}


def snapshot_of_live(state: AnyState) -> dict[str, tuple[mx.Dtype, Bits]]:
    """The same with zeros where the slots' buffers hold what is of no meaning: in free slots."""
    slots = state.slots
    free = slots.keys.shape[1] - slots.positions.shape[1]
    live = mx.pad(slots.positions, [(0, 0), (0, free)], constant_values=-1) >= 0
    turned = mx.where(live, slots.rotations, 0) if slots.rotations.shape[1] else slots.rotations
    keys, values = (mx.where(live[..., None], buffer, 0) for buffer in (slots.keys, slots.values))
    return snapshot(state._replace(slots=slots._replace(keys=keys, values=values, rotations=turned)))


def differences(expected: dict[str, tuple[mx.Dtype, Bits]], found: dict[str, tuple[mx.Dtype, Bits]]) -> list[str]:
    """The leaves in which two snapshots differ, each with what differs."""
    told = [f"{path} is missing" for path in expected.keys() - found.keys()]
    told += [f"{path} is new" for path in found.keys() - expected.keys()]
    for path in expected.keys() & found.keys():
        (dtype, numbers), (other_dtype, other) = expected[path], found[path]
        if dtype != other_dtype or numbers.shape != other.shape:
            told.append(f"{path}: {dtype} {numbers.shape} became {other_dtype} {other.shape}")
        elif not np.array_equal(numbers, other):
            where = np.argwhere(numbers != other)[0].tolist()
            told.append(f"{path}: {int((numbers != other).sum())} numbers differ, the first at {where}")
    return sorted(told)


def live_positions(state: AnyState) -> list[npt.NDArray[np.int64]]:
    """Positions of the live slots of each row, in temporal order, read from the slots themselves."""
    positions = np.array(state.slots.positions).astype(np.int64)
    return [np.sort(row[row >= 0]) for row in positions]


def kept(state: AnyState) -> list[Kept]:
    """What each row holds, in temporal order, read from the slots themselves."""
    positions = np.array(state.slots.positions).astype(np.int64)
    keys, values = bits(state.slots.keys), bits(state.slots.values)
    rows = []
    for row in range(positions.shape[0]):
        slots = np.flatnonzero(positions[row] >= 0)
        slots = slots[np.argsort(positions[row, slots], kind="stable")]
        rows.append(Kept(positions[row, slots], keys[row, slots], values[row, slots]))
    return rows


def as_seen(config: Retention, state: AnyState) -> Floats | None:
    """Keys [N, n, D] as queries see them, turned to their ranks in float64 (0 in free slots); None = as stored."""
    rope = getattr(config.placement, "rope", None)
    if rope is None:
        return None
    positions, rotations = np.array(state.slots.positions), np.array(state.slots.rotations)
    seen = floats(state.slots.keys)[:, : positions.shape[1]]
    for row in range(len(positions)):
        live = np.flatnonzero(positions[row] >= 0)
        for rank, slot in enumerate(live[np.argsort(positions[row, live])]):
            seen[row, slot] = turned(rope, seen[row, slot].astype(np.float64), rank - rotations[row, slot])
        seen[row, positions[row] < 0] = 0.0
    return seen


def describe(state: AnyState) -> str:
    """Kept positions of every row, for messages."""
    return "; ".join(f"row {row}: {found.tolist()}" for row, found in enumerate(live_positions(state)))


def start(policy: AnyPolicy, stream: Stream) -> AnyState:
    """An empty state for the rows of a stream."""
    return policy.init_state(
        stream.rows, stream.key_dim, stream.value_dim, dtype=stream.dtype, streams=stream.row_names()
    )


def evidence(claims: Claims, block: Block) -> dict[str, mx.array]:
    """The keyword arguments of `evict` for a block: queries where the method needs them."""
    return {"queries": block.queries} if claims.needs_queries else {}


def step(policy: AnyPolicy, claims: Claims, state: AnyState, block: Block) -> AnyState:
    """One `update_batched`."""
    padding = {} if block.valid is None else {"valid": block.valid}
    state = policy.update_batched(state, block.keys, block.values, **evidence(claims, block), **padding)
    mx.eval(list(leaves(state).values()))
    return state


def run(policy: AnyPolicy, stream: Stream, claims: Claims | None = None, state: AnyState | None = None) -> AnyState:
    """The state after all blocks of a stream."""
    claims = claims or claims_for(policy.config)
    state = start(policy, stream) if state is None else state
    for block in stream:
        state = step(policy, claims, state, block)
    return state


def steps(policy: AnyPolicy, stream: Stream, claims: Claims | None = None) -> Iterator[Step]:
    """Every block with the states before it, after `absorb` and after `evict`."""
    claims = claims or claims_for(policy.config)
    state = start(policy, stream)
    for block in stream:
        padding = {} if block.valid is None else {"valid": block.valid}
        absorbed = policy.absorb(state, block.keys, block.values, **padding)
        after = policy.evict(absorbed, **evidence(claims, block))
        mx.eval(list(leaves(after).values()))
        yield Step(block, state, absorbed, after)
        state = after
