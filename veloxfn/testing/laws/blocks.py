"""Laws of a block under way: what it attends to between `absorb` and `evict`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

import veloxfn
from veloxfn.testing.claims import Claims
from veloxfn.testing.drive import UNIT, AnyPolicy, Step, as_seen, bits, floats, kept, live_positions, steps
from veloxfn.testing.streams import Stream

__all__ = [
    "law_candidate_mask",
    "law_candidates",
    "law_causal_attention",
    "law_masked_attention",
    "law_queries_see_all_before_them",
]


Numbers = npt.NDArray[Any]


def law_candidates(policy: AnyPolicy, stream: Stream, claims: Claims | None = None) -> None:
    """Candidates are everything kept before plus the whole block, bit for bit; `arrived` says where its tokens are.

    Where keys are seen at their ranks, the slots hold the bits and the candidates are those keys, turned.
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
        turned = as_seen(policy.config, one.absorbed)
        if turned is not None:
            check_turned(turned, found_keys, positions >= 0, "candidates")
            key_bits = bits(slots.keys)
        held = kept(one.before)
        for row in range(stream.rows):
            columns = stream.columns(row, block.stop)
            new = np.flatnonzero(columns >= block.start)
            expected = sorted(live_positions(one.before)[row].tolist() + new.tolist())
            live = np.flatnonzero(positions[row] >= 0)
            assert sorted(positions[row, live].tolist()) == expected, (
                f"row {row}: candidates must be positions {expected}, found {sorted(positions[row, live].tolist())}"
            )
            live = live[np.argsort(positions[row, live])]
            for name, stored, old, sent in (
                ("key", key_bits, held[row].keys, keys),
                ("value", value_bits, held[row].values, values),
            ):
                expected_bits = np.concatenate([old, sent[row, columns[new]]])
                assert np.array_equal(stored[row, live], expected_bits), f"row {row}: a candidate's {name} is wrong"
            _check_arrived(row, arrived[row], positions[row], stream.valid[row, block.start : block.stop], new)


def check_turned(expected: Numbers, found: mx.array, live: Numbers, what: str) -> None:
    """Raise unless keys [N, n, D] are the expected ones, to the roundings of their dtype, in live slots."""
    error, size = np.abs(floats(found) - expected)[live], np.abs(expected)[live].max(initial=1.0)
    allowed = (UNIT[found.dtype] + 2.0**-17) * size  # the angle itself is rounded to float32
    assert (error <= allowed).all(), (
        f"{what}: keys turned to their ranks are off by {error.max():.3g}, not {allowed:.3g}"
    )


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


def _attention(one: Step, keys: Numbers, values: Numbers) -> Numbers:
    """What the block's queries receive from the slots they see, in float64: [N, G, S, Dv]; 0 for a padded token."""
    queries = floats(one.block.queries).astype(np.float64)
    seen = _visible(one)[:, None]
    scores = np.einsum("ngsd,nmd->ngsm", queries, keys) * keys.shape[2] ** -0.5
    scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - np.where(seen, scores, -1e30).max(axis=-1, keepdims=True))
    received: Numbers = np.einsum(
        "ngsm,nmd->ngsd", weights / np.maximum(weights.sum(axis=-1, keepdims=True), 1e-30), values
    )
    return received


def _check_attention(one: Step, found: mx.array, counted: Numbers, keys: mx.array, values: mx.array, how: str) -> None:
    live = np.asarray(_visible(one).any(axis=1))[..., None]
    expected = _attention(one, np.where(live, floats(keys), 0.0), np.where(live, floats(values), 0.0))
    error = np.abs(floats(found) - expected).swapaxes(1, 2)[counted]
    assert (error <= 1e-4 * (1 + np.abs(expected).swapaxes(1, 2)[counted])).all(), (
        f"columns {one.block.start} .. {one.block.stop - 1}: attention over the candidates {how} is off by "
        f"{error.max():.3g}"
    )


def law_causal_attention(policy: AnyPolicy, stream: Stream, claims: Claims | None = None) -> None:
    """Attention over the candidates, lower-right causal, equals the same sum over what was kept and arrived."""
    if stream.padded or stream.dtype != mx.float32:
        return
    for one in steps(policy, stream, claims):
        if one.block.stop == one.block.start:
            continue
        keys, values = policy.candidates(one.absorbed)
        found = mx.fast.scaled_dot_product_attention(
            one.block.queries,
            keys[:, None],
            values[:, None],
            scale=stream.key_dim**-0.5,
            mask="causal" if one.block.stop - one.block.start > 1 else None,
        )
        _check_attention(one, found, stream.valid[:, one.block.start : one.block.stop], keys, values, "causal")


def law_masked_attention(policy: AnyPolicy, stream: Stream, claims: Claims | None = None) -> None:
    """Attention under `candidate_mask` is right for every counted token, whatever padded arrivals hold, NaN included.

    Lesson 15 (ragged rows padded with anything must not receive attention).
    """
    if stream.dtype != mx.float32:
        return
    keys, values = stream.keys.copy(), stream.values.copy()
    keys[~stream.valid] = values[~stream.valid] = np.nan
    for one in steps(policy, replace(stream, keys=keys, values=values), claims):
        if one.block.stop == one.block.start:
            continue
        k, v = policy.candidates(one.absorbed)
        mask = veloxfn.candidate_mask(policy.config, one.absorbed)[:, None]
        found = mx.fast.scaled_dot_product_attention(
            one.block.queries, k[:, None], v[:, None], scale=stream.key_dim**-0.5, mask=mask
        )
        _check_attention(one, found, stream.valid[:, one.block.start : one.block.stop], k, v, "under candidate_mask")
