"""Laws of the collapse lattice: under which settings one method is another, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from veloxfn import budgets
from veloxfn.testing.claims import claims_for
from veloxfn.testing.drive import AnyPolicy, AnyState, bits, kept, run, start, step
from veloxfn.testing.laws.rows import same_rows
from veloxfn.testing.oracle import MARGIN, dealt, replay
from veloxfn.testing.streams import Stream

__all__ = [
    "law_collapses",
    "law_grouping_before_eviction_does_not_matter",
    "law_keeps_the_positions_of",
    "law_pyramid",
]


def law_collapses(special: AnyPolicy, plain: AnyPolicy, stream: Stream, columns: Sequence[str] = ()) -> None:
    """After every block both keep the same positions, keys, values and `columns`, bit for bit."""
    one, other = start(special, stream), start(plain, stream)
    for block in stream:
        one, other = (
            step(policy, claims_for(policy.config), state, block) for policy, state in ((special, one), (plain, other))
        )
        what = f"{_name(special)} against {_name(plain)} after column {block.stop}"
        same_rows(kept(other), kept(one), what)
        for column in columns:
            for row, (a, b) in enumerate(zip(_live(other, column), _live(one, column), strict=True)):
                assert np.array_equal(a, b), f"{what}: {column} of row {row} must be the same bits, {a} became {b}"


def _name(policy: AnyPolicy) -> str:
    return type(policy.config).__module__.rsplit(".", 1)[-1]


def _live(state: AnyState, column: str) -> list[np.ndarray[tuple[int, ...], np.dtype[np.uint32]]]:
    """A column's bits at the live slots of each row, in temporal order."""
    numbers, positions = bits(getattr(state, column)), np.array(state.slots.positions)
    order = [np.argsort(row, kind="stable") for row in positions]
    return [row[..., index[found[index] >= 0]] for row, found, index in zip(numbers, positions, order, strict=True)]


def law_keeps_the_positions_of(special: AnyPolicy, plain: AnyPolicy, stream: Stream) -> None:
    """After every block both keep the same positions with the same keys and masses, whatever became of the values."""
    one, other = start(special, stream), start(plain, stream)
    for block in stream:
        one, other = (
            step(policy, claims_for(policy.config), state, block) for policy, state in ((special, one), (plain, other))
        )
        for row, (a, b) in enumerate(zip(kept(other), kept(one), strict=True)):
            assert a.positions.tolist() == b.positions.tolist(), (
                f"row {row} after column {block.stop}: {_name(plain)} keeps {a.positions.tolist()}, "
                f"{_name(special)} {b.positions.tolist()}"
            )
            assert np.array_equal(a.keys, b.keys), f"row {row} after column {block.stop}: keys changed"
        for row, (mass, found) in enumerate(zip(_live(other, "mass"), _live(one, "mass"), strict=True)):
            assert np.array_equal(mass, found), f"row {row} after column {block.stop}: masses changed"


def law_grouping_before_eviction_does_not_matter(policy: AnyPolicy, stream: Stream, blocks: Sequence[int]) -> None:
    """Other blocks keep the same rows, as long as in both groupings nothing is lost before the last block.

    The last block may be shorter than the window. Lesson 8 (no observation window anchored to the chunk).
    """
    budget, claims = policy.config.budget, claims_for(policy.config)
    for grouping in (stream.blocks, tuple(blocks)):
        held = stream.tokens - grouping[-1]
        assert held <= budget, f"blocks {grouping} lose tokens before the last one: {held} exceed the budget {budget}"
    if replay(policy.config, stream)[1] <= MARGIN:
        return
    one, other = run(policy, stream, claims), run(policy, stream.regrouped(blocks), claims)
    same_rows(kept(one), kept(other), f"blocks {stream.blocks} against {tuple(blocks)}")


def law_pyramid(layers: int, mean: int, floor: int, *, beta: float | None = None, taper: float | None = None) -> None:
    """Budgets over layers: exact sum, never increasing, floors held, never lower for a larger mean, as dealt by hand.

    Lesson 16 (a sum that drifts, layers below the floor, not monotone). Shares are exact where beta or taper is.
    """
    found = budgets.pyramid(layers, mean, beta=beta, taper=taper, floor=floor)
    shape = f"pyramid({layers}, {mean}, beta={beta}, taper={taper}, floor={floor}) = {found}"
    assert len(found) == layers, f"{shape}: one budget per layer"
    assert all(isinstance(rows, int) for rows in found), f"{shape}: budgets are integers"
    assert sum(found) == layers * mean, f"{shape}: the sum must be {layers * mean}, found {sum(found)}"
    assert list(found) == sorted(found, reverse=True), f"{shape}: never increasing"
    assert min(found) >= floor, f"{shape}: at least {floor}"
    more = budgets.pyramid(layers, mean + 1, beta=beta, taper=taper, floor=floor)
    assert all(a <= b for a, b in zip(found, more, strict=True)), f"{shape}: a larger mean lowers a layer: {more}"
    if 1.0 in (beta, taper) or layers == 1:
        assert set(found) == {mean}, f"{shape}: all layers must have {mean}"
    expected = dealt(layers, mean, floor, beta=beta, taper=taper)
    assert list(found) == expected, f"{shape}: dealt one by one, the budgets are {expected}"
