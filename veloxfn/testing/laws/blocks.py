"""Laws of a block under way: what it attends to between `absorb` and `evict`."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

import veloxfn
from veloxfn.testing.claims import Claims
from veloxfn.testing.drive import AnyPolicy, Step, bits, floats, live_positions, steps
from veloxfn.testing.streams import Stream

__all__ = ["law_candidate_mask", "law_candidates", "law_causal_attention", "law_queries_see_all_before_them"]


Numbers = npt.NDArray[Any]


def law_candidates(policy: AnyPolicy, stream: Stream, claims: Claims | None = None) -> None:
    """Candidates are everything kept before plus the whole block, bit for bit; `arrived` says where its tokens are.

    Lesson 21 (nothing is evicted inside the call), lesson 14 (a block larger than the budget is a candidate in full).
    """
    keys, values = bits(stream.array(stream.keys)), bits(stream.array(stream.values))
    for one in steps(policy, stream, claims):
        block, slots = one.block, one.absorbed.slots
        found_keys, found_values = policy.candidates(one.absorbed)
        positions, arrived = np.array(slots.positions), np.array(slots.arrived)
        size = block.stop - block.start
        assert arrived.shape == (stream.rows, size), (
            f"arrived must be [N, S] = {(stream.rows, size)}, found {arrived.shape}"
        )
        if size == 0:
            continue
        n = positions.shape[1]
        assert found_keys.shape[:2] == found_values.shape[:2] == (stream.rows, n), (
            f"candidates must be [N, n = {n}, ..], found {found_keys.shape} and {found_values.shape}"
        )
        key_bits, value_bits = bits(found_keys), bits(found_values)
        for row in range(stream.rows):
            columns = stream.columns(row, block.stop)
            new = np.flatnonzero(columns >= block.start)
            expected = sorted(live_positions(one.before)[row].tolist() + new.tolist())
            live = np.flatnonzero(positions[row] >= 0)
            assert sorted(positions[row, live].tolist()) == expected, (
                f"row {row}: candidates must be positions {expected}, found {sorted(positions[row, live].tolist())}"
            )
            source = columns[positions[row, live]]
            for name, stored, sent in (("key", key_bits, keys), ("value", value_bits, values)):
                assert np.array_equal(stored[row, live], sent[row, source]), f"row {row}: a candidate's {name} is wrong"
            _check_arrived(row, arrived[row], positions[row], stream.valid[row, block.start : block.stop], new)


def _check_arrived(row: int, places: Numbers, positions: Numbers, counted: Numbers, new: Numbers) -> None:
    assert (places[~counted] == -1).all(), f"row {row}: padded arrivals have arrived = -1, found {places.tolist()}"
    assert (places[counted] >= 0).all(), f"row {row}: counted arrivals have a slot, found {places.tolist()}"
    named = positions[places[counted]].tolist()
    assert named == new.tolist(), f"row {row}: arrived names positions {named}, expected {new.tolist()}"


def _visible(one: Step) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """[N, S, n]: live slots not later than the token itself; nothing for a padded token."""
    positions, arrived = np.array(one.absorbed.slots.positions), np.array(one.absorbed.slots.arrived)
    own = np.where(arrived >= 0, np.take_along_axis(positions, np.maximum(arrived, 0), axis=1), -1)
    return (positions[:, None, :] >= 0) & (positions[:, None, :] <= own[:, :, None])


def law_candidate_mask(policy: AnyPolicy, stream: Stream, claims: Claims | None = None) -> None:
    """`candidate_mask` shows a token every live slot up to its own, a padded token nothing, nobody a free slot."""
    for one in steps(policy, stream, claims):
        if one.block.stop == one.block.start:
            continue
        mask = veloxfn.candidate_mask(policy.config, one.absorbed)
        assert mask.dtype == mx.bool_, f"candidate_mask must be bool, found {mask.dtype}"
        found, expected = np.array(mask), _visible(one)
        assert found.shape == expected.shape, f"candidate_mask must be {expected.shape}, found {found.shape}"
        wrong = np.argwhere(found != expected)
        assert len(wrong) == 0, (
            f"candidate_mask is wrong at (row, token, slot) {wrong[:5].tolist()}: "
            f"positions {np.array(one.absorbed.slots.positions).tolist()}, "
            f"arrived {np.array(one.absorbed.slots.arrived).tolist()}"
        )


def law_queries_see_all_before_them(policy: AnyPolicy, stream: Stream, claims: Claims | None = None) -> None:
    """Without padding, lower-right causal masking over the candidates' slot order is exact; for one token no mask is.

    Lesson 21 (a mask made before the cache saw the keys stays right), lesson 22 (one token first, then many).
    """
    if stream.padded:
        return
    for one in steps(policy, stream, claims):
        size = one.block.stop - one.block.start
        if size == 0:
            continue
        n = one.absorbed.slots.positions.shape[1]
        causal = np.arange(n)[None, :] <= np.arange(n - size, n)[:, None]
        for row, seen in enumerate(_visible(one)):
            assert np.array_equal(seen, causal), (
                f"row {row}, columns {one.block.start} .. {one.block.stop - 1}: with {n} candidates, lower-right "
                f"causal masking shows slots {[np.flatnonzero(line).tolist() for line in causal]}, the tokens must see "
                f"{[np.flatnonzero(line).tolist() for line in seen]}"
            )


def law_causal_attention(policy: AnyPolicy, stream: Stream, claims: Claims | None = None) -> None:
    """Attention over the candidates equals attention over what was kept and arrived, computed in float64."""
    if stream.padded or stream.dtype != mx.float32:
        return
    for one in steps(policy, stream, claims):
        size = one.block.stop - one.block.start
        if size == 0:
            continue
        keys, values = policy.candidates(one.absorbed)
        queries = one.block.queries
        scale = stream.key_dim**-0.5
        scores = np.einsum("ngsd,nmd->ngsm", floats(queries).astype(np.float64), floats(keys)) * scale
        scores = np.where(_visible(one)[:, None], scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        expected = np.einsum("ngsm,nmd->ngsd", weights, floats(values))
        found = mx.fast.scaled_dot_product_attention(
            queries, keys[:, None], values[:, None], scale=scale, mask="causal" if size > 1 else None
        )
        assert np.allclose(floats(found), expected, rtol=1e-4, atol=1e-4), (
            f"columns {one.block.start} .. {one.block.stop - 1}: attention over the candidates is off by "
            f"{np.abs(floats(found) - expected).max():.3g}"
        )
