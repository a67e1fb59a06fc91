"""Laws of layout: positions, counts, shapes and dtypes of every state a policy returns."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

import veloxfn
from veloxfn.placement import Absolute
from veloxfn.testing.claims import Claims
from veloxfn.testing.drive import AnyPolicy, AnyState, as_seen, bits, kept, leaves, start, steps
from veloxfn.testing.laws.blocks import check_turned
from veloxfn.testing.streams import Floats, Stream

__all__ = ["law_counts", "law_get_kv_is_temporal", "law_positions_name_arrivals", "law_shapes_and_dtypes"]


_KINDS = {"positions": mx.int32, "arrived": mx.int32, "seen": mx.int32, "rotations": mx.int32, "streams": mx.uint32}


def law_positions_name_arrivals(policy: AnyPolicy, stream: Stream, claims: Claims | None = None) -> None:
    """Positions are -1 or arrival indices below `seen`, no two alike in a row; n <= budget + 1 after `evict`."""
    for block, _, _, after in steps(policy, stream, claims):
        positions = np.array(after.slots.positions)
        assert positions.shape[1] <= policy.config.budget + 1, (
            f"positions must be [N, n] with n <= budget + 1 = {policy.config.budget + 1}, found {positions.shape}"
        )
        assert (positions >= -1).all(), f"a free slot has position -1, found {positions.min()}"
        for row, found in enumerate(positions):
            live, seen = found[found >= 0], len(stream.columns(row, block.stop))
            assert len(np.unique(live)) == len(live), f"row {row} names a position twice: {found.tolist()}"
            assert len(live) == 0 or live.max() < seen, (
                f"row {row} saw {seen} tokens but names position {live.max()}: {found.tolist()}"
            )


def law_get_kv_is_temporal(policy: AnyPolicy, stream: Stream, claims: Claims | None = None) -> None:
    """`get_kv` and `kept_positions` list the kept rows in temporal order, padded at the front with zeros and -1."""
    for _, _, _, after in steps(policy, stream, claims):
        keys, values = policy.get_kv(after)
        positions = np.array(veloxfn.kept_positions(after))
        width = min(after.slots.positions.shape[1], policy.config.budget)
        n, _, d = after.slots.keys.shape
        for name, found, expected in (
            ("keys", keys.shape, (n, width, d)),
            ("values", values.shape, (n, width, after.slots.values.shape[2])),
            ("kept_positions", positions.shape, (n, width)),
        ):
            assert tuple(found) == expected, f"get_kv: {name} must be {expected}, found {tuple(found)}"
        key_bits, value_bits = bits(keys), bits(values)
        turned = _temporal(as_seen(policy.config, after), after, width)
        if turned is not None:
            check_turned(turned, keys, positions >= 0, "get_kv")
        for row, own in enumerate(kept(after)):
            free = width - len(own.positions)
            expected_row = [-1] * free + own.positions.tolist()
            assert positions[row].tolist() == expected_row, (
                f"row {row}: kept_positions must be strictly increasing behind the padding, "
                f"expected {expected_row}, found {positions[row].tolist()}"
            )
            for name, found_bits, expected_bits in (
                ("keys", key_bits[row], own.keys),
                ("values", value_bits[row], own.values),
            ):
                assert not found_bits[:free].any(), f"row {row}: the {free} padded {name} of get_kv must be zero"
                assert (name == "keys" and turned is not None) or np.array_equal(found_bits[free:], expected_bits), (
                    f"row {row}: get_kv's {name} are not the kept"
                )
        for name, seen, got in zip(("keys", "values"), policy.candidates(after), (key_bits, value_bits), strict=True):
            assert np.array_equal(bits(seen), got), (
                f"after evict (S = 0) candidates must be get_kv's, the {name} differ"
            )


def _temporal(keys: Floats | None, state: AnyState, width: int) -> Floats | None:
    """Keys [N, n, D] of the slots in the order of `get_kv`."""
    if keys is None:
        return None
    order = np.argsort(np.array(state.slots.positions), axis=1, kind="stable")[:, keys.shape[1] - width :]
    return np.take_along_axis(keys, order[..., None], axis=1)


def law_counts(policy: AnyPolicy, stream: Stream, claims: Claims | None = None) -> None:
    """`seen`, `tokens_seen`, `tokens_kept`, `next_position` and the byte counters tell the truth.

    Lesson 18 (the next position is the number of tokens seen, not of rows kept, but where keys are seen at their
    ranks), lesson 35 (bytes follow the arrays'
    item size and count K and V), lesson 15 (padded arrivals do not count).
    """
    for block, _, absorbed, after in steps(policy, stream, claims):
        seen = [len(stream.columns(row, block.stop)) for row in range(stream.rows)]
        for name, state in (("absorb", absorbed), ("evict", after)):
            found = np.array(state.slots.seen).tolist()
            assert found == seen, f"after {name}: seen must be {seen}, found {found}"
        _check_accounting(policy, after, seen)


def _check_accounting(policy: AnyPolicy, state: AnyState, seen: list[int]) -> None:
    live = [len(row.positions) for row in kept(state)]
    keys, values = state.slots.keys, state.slots.values
    following = seen if isinstance(policy.config.placement, Absolute) else live
    width = (keys.shape[2] + values.shape[2]) * keys.dtype.size
    for name, found, expected in (
        ("tokens_seen", np.array(veloxfn.tokens_seen(state)).tolist(), seen),
        ("tokens_kept", np.array(veloxfn.tokens_kept(state)).tolist(), live),
        ("next_position", np.array(veloxfn.next_position(policy.config, state)).tolist(), following),
        ("kept_bytes", _number(veloxfn.kept_bytes(state)), float(sum(live) * width)),
        ("full_bytes", _number(veloxfn.full_bytes(state)), float(sum(seen) * width)),
        ("allocated_bytes", _number(veloxfn.allocated_bytes(state)), float(keys.nbytes + values.nbytes)),
    ):
        assert found == expected, f"{name} must be {expected}, found {found}"
    ratio = _number(veloxfn.compression_ratio(state))
    expected_ratio = sum(seen) / sum(live) if sum(live) else 1.0
    assert abs(ratio - expected_ratio) <= 1e-5 * expected_ratio, (
        f"compression_ratio must be full / kept = {expected_ratio}, found {ratio}"
    )


def _number(value: object) -> float:
    return float(value.item()) if isinstance(value, mx.array) else float(value)  # type: ignore[arg-type]


def law_shapes_and_dtypes(policy: AnyPolicy, stream: Stream, claims: Claims | None = None) -> None:
    """Every leaf keeps its dtype and has leading axis N; buffers are [N, budget + 1, ..] in the dtype that arrived.

    Lesson 30 (bf16 in, bf16 kept), lesson 39 (nothing in a state grows with the tokens seen).
    """
    empty = start(policy, stream)
    names = [(path, leaf.dtype) for path, leaf in leaves(empty).items()]
    kind = type(empty)
    for name, dtype in _KINDS.items():
        found_dtype = getattr(empty.slots, name).dtype
        assert found_dtype == dtype, f"slots.{name} must be {dtype}, found {found_dtype}"
    capacity = policy.config.budget + 1
    for block, _, absorbed, after in steps(policy, stream, claims):
        for stage, state in (("absorb", absorbed), ("evict", after)):
            assert type(state) is kind, f"{stage} must return a {kind.__name__}, found {type(state).__name__}"
            found = [(path, leaf.dtype) for path, leaf in leaves(state).items()]
            assert found == names, f"{stage} changed leaves or dtypes: expected {names}, found {found}"
            for path, leaf in leaves(state).items():
                assert leaf.shape[:1] == (stream.rows,), (
                    f"{stage}: leaf {path} must have leading axis N = {stream.rows}, found {leaf.shape}"
                )
        slots = after.slots
        for name, shape, expected in (
            ("keys", slots.keys.shape, (stream.rows, capacity, stream.key_dim)),
            ("values", slots.values.shape, (stream.rows, capacity, stream.value_dim)),
            ("arrived", slots.arrived.shape, (stream.rows, 0)),
            ("seen", slots.seen.shape, (stream.rows,)),
            ("streams", slots.streams.shape, (stream.rows,)),
        ):
            assert tuple(shape) == expected, (
                f"after column {block.stop}: slots.{name} must be {expected}, found {tuple(shape)}"
            )
        for name, array in (("keys", slots.keys), ("values", slots.values), ("get_kv", policy.get_kv(after)[0])):
            assert array.dtype == stream.dtype, f"{name} must stay {stream.dtype}, found {array.dtype}"
        assert np.array_equal(np.array(slots.streams), np.array(stream.names)), "the rows' streams changed"
