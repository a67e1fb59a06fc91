"""Laws of contiguous placement, on streams whose keys a model rotates at `next_position`.

The numbers of a `Stream` stand for vectors before rotation; `rotated_steps` rotates each block as a decoder does, with
`mx.fast.rope`. What a query must see is computed from the unrotated vectors, so nothing here turns a key twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import mlx.core as mx
import numpy as np
import numpy.typing as npt

import veloxfn
from veloxfn.placement import Contiguous, Rope, rotate
from veloxfn.testing.claims import Claims, claims_for
from veloxfn.testing.drive import AnyPolicy, AnyState, bits, evidence, floats, kept, leaves, live_positions, start
from veloxfn.testing.oracle import turned
from veloxfn.testing.streams import Block, Floats, Stream, normal_stream

__all__ = [
    "ROUNDING",
    "law_decoder_sees_no_gaps",
    "law_eviction_closes_the_gap",
    "law_placement_does_not_choose",
    "law_rotated_blocks_may_be_regrouped",
    "law_rotation_equals_the_model",
    "law_rotations_compose",
    "law_rounding_does_not_accumulate",
    "law_unrotating_recovers_arrivals",
    "rope_at",
    "rotated_steps",
]

ROUNDING = {mx.float32: 2e-5, mx.float16: 2e-3, mx.bfloat16: 1.6e-2}
"""What one turn may differ by, relative to the largest number: some roundings, and angles of a few hundred rad."""

Numbers = npt.NDArray[np.int64]


def rope_at(rope: Rope, vectors: mx.array, positions: mx.array) -> mx.array:
    """Vectors [.., D] rotated at positions [..] by `mx.fast.rope`, as a model does it."""
    if vectors.size == 0:
        return vectors
    freqs = None if rope.freqs is None else mx.array(rope.freqs)
    flat = mx.fast.rope(
        vectors.reshape(-1, 1, vectors.shape[-1]),
        rope.dims,
        traditional=rope.traditional,
        base=rope.base if freqs is None else None,
        scale=rope.scale,
        offset=mx.broadcast_to(positions, vectors.shape[:-1]).reshape(-1),
        freqs=freqs,
    )
    return flat.reshape(vectors.shape)


class RotatedStep(NamedTuple):
    """One block, rotated at `next_position`, on its way through a policy."""

    block: Block  # keys and queries as the model hands them over
    before: AnyState
    absorbed: AnyState
    after: AnyState
    places: Numbers  # [N, T] position that each column so far was rotated at, 0 where padded


def rotated_steps(policy: AnyPolicy, rope: Rope, stream: Stream, claims: Claims | None = None) -> Iterator[RotatedStep]:
    """The blocks of a stream, rotated at next_position + index in the block."""
    claims = claims or claims_for(policy.config)
    state = start(policy, stream)
    places = np.zeros((stream.rows, stream.tokens), dtype=np.int64)
    for block in stream:
        counted = stream.valid[:, block.start : block.stop]
        first = np.array(veloxfn.next_position(policy.config, state))[:, None]
        places[:, block.start : block.stop] = np.where(counted, first + np.cumsum(counted, axis=1) - 1, 0)
        where = mx.array(places[:, block.start : block.stop])
        handed = block._replace(
            keys=rope_at(rope, block.keys, where), queries=rope_at(rope, block.queries, where[:, None])
        )
        padding = {} if block.valid is None else {"valid": block.valid}
        absorbed = policy.absorb(state, handed.keys, handed.values, **padding)
        after = policy.evict(absorbed, **evidence(claims, handed))
        mx.eval(list(leaves(after).values()))
        yield RotatedStep(handed, state, absorbed, after, places)
        state = after


def rope_of(policy: AnyPolicy) -> Rope:
    """The rope of a policy under contiguous placement."""
    return cast(Contiguous, policy.config.placement).rope


def law_unrotating_recovers_arrivals(policy: AnyPolicy, stream: Stream, claims: Claims | None = None) -> None:
    """A survivor turned back from its rank is the key that arrived; stored keys are bit copies of arrivals.

    Lesson 19 (offset, rotation and rank agree), lesson 20 (the rope is the model's).
    """
    rope, claims = rope_of(policy), claims or claims_for(policy.config)
    if not _keeps_keys(policy, claims):
        return
    arrivals: list[Any] = []
    for step in rotated_steps(policy, rope, stream, claims):
        arrivals.append(step.block.keys)
        handed = mx.concatenate(arrivals, axis=1)
        stored, seen = bits(handed), floats(policy.get_kv(step.after)[0])
        for row, found in enumerate(kept(step.after)):
            columns = stream.columns(row, step.block.stop)[found.positions]
            wrong = np.flatnonzero((found.keys != stored[row, columns]).any(axis=1))
            assert len(wrong) == 0, (
                f"row {row} after column {step.block.stop}: the keys stored at positions "
                f"{found.positions[wrong].tolist()} are not those that arrived there"
            )
            for rank, column in enumerate(columns):
                key = seen[row, seen.shape[1] - len(columns) + rank].astype(np.float64)
                back = turned(rope, key, step.places[row, column] - rank)
                _near(
                    floats(handed[row, column]), back, stream.dtype, f"row {row}, column {column} seen at rank {rank}"
                )


def _near(expected: Floats, found: Any, dtype: mx.Dtype, what: str) -> None:
    error, scale = float(np.abs(expected - found).max(initial=0)), max(1.0, float(np.abs(expected).max(initial=0)))
    assert error <= ROUNDING[dtype] * scale, (
        f"{what}: expected within {ROUNDING[dtype]:g} of the largest number, {scale:g}, found an error of {error:g}"
    )


def law_rounding_does_not_accumulate(policy: AnyPolicy, *, evictions: int, claims: Claims | None = None) -> None:
    """After any number of one-token evictions a survivor is seen with the error of one turn.

    Lesson 23.
    """
    rope, claims = rope_of(policy), claims or claims_for(policy.config)
    budget, rows = policy.config.budget, policy.config.shared_heads
    stream = normal_stream(11, rows=rows, tokens=2 * budget, key_dim=rope.dims, blocks=(2 * budget,))
    *_, last = rotated_steps(policy, rope, stream, claims)
    state = last.after
    again = normal_stream(12, rows=rows, tokens=256, key_dim=rope.dims)
    update = mx.compile(policy.update_batched)
    place = veloxfn.next_position(policy.config, state)[:, None]
    blocks = [
        block._replace(keys=rope_at(rope, block.keys, place), queries=rope_at(rope, block.queries, place[:, None]))
        for block in again
    ]
    stored: dict[tuple[int, int], Any] = {}
    for turn in range(evictions):
        block = blocks[turn % len(blocks)]
        state = update(state, block.keys, block.values, **evidence(claims, block))
        if turn % 64 == 0:
            mx.eval(list(leaves(state).values()))
        if turn in (0, evictions - 1):
            _seen_once_turned(policy, rope, state, f"after {turn + 1} evictions")
            for row, found in enumerate(kept(state)):
                for position, key in zip(found.positions.tolist(), found.keys, strict=True):
                    before = stored.setdefault((row, position), key)
                    assert np.array_equal(before, key), f"row {row}: the key at position {position} was rewritten"


def _seen_once_turned(policy: AnyPolicy, rope: Rope, state: AnyState, what: str) -> None:
    seen = floats(policy.get_kv(state)[0])
    positions, rotations = np.array(state.slots.positions), np.array(state.slots.rotations)
    stored = floats(state.slots.keys)
    for row in range(len(positions)):
        live = np.flatnonzero(positions[row] >= 0)
        for rank, slot in enumerate(live[np.argsort(positions[row, live])]):
            expected = turned(rope, stored[row, slot].astype(np.float64), rank - int(rotations[row, slot]))
            found = seen[row, seen.shape[1] - len(live) + rank]
            _near(found, expected, state.slots.keys.dtype, f"{what}: row {row}, position {positions[row, slot]}")


def law_eviction_closes_the_gap(policy: AnyPolicy, stream: Stream, claims: Claims | None = None) -> None:
    """After an eviction older rows have not moved, later ones moved up, and the next position is the number of rows.

    A row that is where it arrived is seen bit for bit as it arrived: so are the sinks, for ever. For one token all
    later rows moved up by one.
    """
    rope, claims = rope_of(policy), claims or claims_for(policy.config)
    for step in rotated_steps(policy, rope, stream, claims):
        config = policy.config
        counts = [len(found) for found in live_positions(step.after)]
        offset = np.array(veloxfn.next_position(config, step.after)).tolist()
        assert offset == counts, f"the next position must be the number of kept tokens {counts}, found {offset}"
        early = np.array(veloxfn.next_position(config, step.absorbed)).tolist()
        assert early == counts, f"before the eviction the next position must be {counts} already, found {early}"
        keys = policy.get_kv(step.after)[0]
        seen, floated, length = bits(keys), floats(keys), keys.shape[1]
        offered = floats(policy.get_kv(step.absorbed)[0])
        pairs = zip(live_positions(step.absorbed), kept(step.after), strict=True)
        for row, (before, found) in enumerate(pairs):
            lost = np.setdiff1d(before, found.positions)
            passed = np.searchsorted(lost, found.positions)  # older ones lost: so far each moves up
            for rank, up in enumerate(passed if _keeps_keys(policy, claims) else []):
                was = offered[row, offered.shape[1] - len(before) + rank + up].astype(np.float64)
                now = floated[row, length - len(found.positions) + rank]
                _near(
                    now,
                    turned(rope, was, -int(up)),
                    stream.dtype,
                    f"row {row}: the key of position {found.positions[rank]}, moved up by {up}",
                )
            places = step.places[row, stream.columns(row, step.block.stop)[found.positions]]
            still = np.flatnonzero(places == np.arange(len(places)))
            assert set(range(min(config.sink, len(places)))) <= set(still.tolist()), (
                f"row {row}: the first {config.sink} tokens must be seen where they arrived, found them at {places}"
            )
            mine = seen[row, length - len(places) :]
            wrong = still[(mine[still] != found.keys[still]).any(axis=1)]
            assert len(wrong) == 0, f"row {row}: keys that have not moved must be seen as they are: {wrong.tolist()}"


def law_placement_does_not_choose(policy: AnyPolicy, absolute: AnyPolicy, stream: Stream) -> None:
    """A method that does not look at the rotation of keys keeps the same tokens under either placement."""
    claims = claims_for(policy.config)
    state, other = start(policy, stream), start(absolute, stream)
    for block in stream:
        padding = {} if block.valid is None else {"valid": block.valid}
        asked = evidence(claims, block)
        state = policy.update_batched(state, block.keys, block.values, **asked, **padding)
        other = absolute.update_batched(other, block.keys, block.values, **asked, **padding)
        found, expected = ([row.tolist() for row in live_positions(one)] for one in (state, other))
        assert found == expected, f"placement must not choose: Absolute keeps {expected}, Contiguous {found}"


def law_decoder_sees_no_gaps(policy: AnyPolicy, stream: Stream, claims: Claims | None = None) -> None:
    """A decoder that rotates at `next_position` attends as one that rotates all kept keys anew, at their ranks.

    Values come from the slots; keys of the other decoder from the unrotated stream.
    """
    rope, claims = rope_of(policy), claims or claims_for(policy.config)
    if not _keeps_keys(policy, claims):
        return
    raw, asked = stream.array(stream.keys), stream.array(stream.queries)
    for step in rotated_steps(policy, rope, stream, claims):
        if step.block.stop == step.block.start:
            continue
        keys, values = policy.candidates(step.absorbed)
        mask = veloxfn.candidate_mask(policy.config, step.absorbed)
        positions = np.array(step.absorbed.slots.positions)
        for row, slots in enumerate(positions):
            live = np.flatnonzero(slots >= 0)
            live = live[np.argsort(slots[live])]
            columns = stream.columns(row, step.block.stop)[slots[live]]
            own = np.flatnonzero(stream.valid[row, step.block.start : step.block.stop])
            if len(own) == 0:
                continue
            ranks = mx.arange(len(live))
            fresh = rope_at(rope, raw[row, mx.array(columns)], ranks)
            queries = asked[row, :, step.block.start : step.block.stop][:, mx.array(own)]
            queries = rope_at(rope, queries, ranks[len(live) - len(own) :])
            index = mx.array(live)
            visible = mask[row][mx.array(own)][:, index]
            expected = _attended(queries, fresh, values[row][index], visible)
            handed = step.block.queries[row][:, mx.array(own)]
            found = _attended(handed, keys[row][index], values[row][index], visible)
            _near(floats(expected), floats(found), stream.dtype, f"row {row}, block to column {step.block.stop}")


def _keeps_keys(policy: AnyPolicy, claims: Claims) -> bool:
    return claims.bit_copies or not getattr(policy.config, "merge_keys", True)


def _attended(queries: mx.array, keys: mx.array, values: mx.array, visible: mx.array) -> mx.array:
    """Attention [G, S, Dv] in float32."""
    queries, keys, values = (array.astype(mx.float32) for array in (queries, keys, values))
    logits = queries @ keys.T / math.sqrt(keys.shape[-1])
    return mx.softmax(mx.where(visible, logits, -mx.inf), axis=-1) @ values


def law_rotated_blocks_may_be_regrouped(
    policy: AnyPolicy, stream: Stream, blocks: Sequence[int], claims: Claims | None = None
) -> None:
    """Cadence "token": other blocks, whose keys come rotated at other positions, keep the same tokens.

    Where a decision is closer than rounding, columns that differ by rounding may part: `stream` is to be clear of that.
    """
    rope = rope_of(policy)
    assert policy.config.cadence == "token", f'this is a law of cadence="token", got {policy.config.cadence!r}'
    *_, one = rotated_steps(policy, rope, stream, claims)
    *_, other = rotated_steps(policy, rope, stream.regrouped(blocks), claims)
    found, expected = ([row.tolist() for row in live_positions(step.after)] for step in (other, one))
    assert found == expected, f"blocks {stream.blocks} keep {expected}, blocks {tuple(blocks)} keep {found}"


def law_rotation_equals_the_model(rope: Rope, dtype: mx.Dtype, *, dim: int, seed: int = 0, reach: int = 300) -> None:
    """Turning from one position to another gives what the model's rope gives there; no turn gives the bits back.

    Lesson 20 (scaled frequencies, partial dims, traditional pairs).
    """
    draws = mx.random.split(mx.random.key(seed), 3)
    vectors = mx.random.normal((2, 40, dim), key=draws[0])
    before, after = (mx.random.randint(0, reach, (2, 40), key=draw) for draw in draws[1:])
    handed, wanted = (rope_at(rope, vectors, place).astype(dtype) for place in (before, after))
    found = rotate(rope, handed, start=before, to=after)
    assert found.dtype == dtype, f"dtype must stay {dtype}, found {found.dtype}"
    _near(floats(wanted), floats(found), dtype, f"{rope} from one position to another")
    still = rotate(rope, handed, start=before, to=before)
    assert np.array_equal(bits(still), bits(handed)), f"{rope}: a turn by nothing must give the bits back"
    rest = slice(rope.dims, None)
    assert np.array_equal(bits(found[..., rest]), bits(handed[..., rest])), f"{rope}: dims behind {rope.dims} must stay"


def law_rotations_compose(rope: Rope, *, dim: int, seed: int = 0, shift: int = 100) -> None:
    """Scores depend on relative positions only: moving query and key by the same number of places changes none."""
    draws = mx.random.split(mx.random.key(seed), 4)
    queries, keys = (mx.random.normal((30, dim), key=draw) for draw in draws[:2])
    at, there = (mx.random.randint(0, 200, (30,), key=draw) for draw in draws[2:])
    scores = (rope_at(rope, queries, at) * rope_at(rope, keys, there)).sum(axis=-1)
    moved = rotate(rope, rope_at(rope, queries, at), start=at, to=at + shift)
    beside = rotate(rope, rope_at(rope, keys, there), start=there, to=there + shift)
    _near(floats(scores), floats((moved * beside).sum(axis=-1)), mx.float32, f"{rope} moved by {shift}")
