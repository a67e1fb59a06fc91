"""Budgets by the usefulness of layers: exact sums, floors, monotone, and the best grouping."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from veloxfn import budgets

GRID = st.integers(-64, 64).map(lambda number: number / 64)  # so that equal cosines happen
COSINES = st.lists(GRID | st.floats(-1.0, 1.0), min_size=1, max_size=20)
SHARES = st.floats(0.0, 1.0) | st.sampled_from([0.0, 0.3, 0.5, 1.0])


@given(cosines=COSINES, p=SHARES, floor=st.integers(0, 12), room=st.integers(0, 200))
def test_squeezed_budgets_sum_exactly_and_hold_the_floor(cosines: list[float], p: float, floor: int, room: int) -> None:
    mean = max(1, floor + room)
    rows = budgets.squeeze(cosines, mean, p, floor=floor)
    assert len(rows) == len(cosines)
    assert sum(rows) == len(cosines) * mean
    assert min(rows) >= floor
    larger = budgets.squeeze(cosines, mean + 1, p, floor=floor)
    assert all(before <= after for before, after in zip(rows, larger, strict=True)), "monotone in the mean"


@given(cosines=COSINES, p=SHARES, mean=st.integers(1, 200))
def test_only_the_most_alike_layers_lose_rows(cosines: list[float], p: float, mean: int) -> None:
    rows, groups = budgets.squeeze(cosines, mean, p), budgets.clusters(cosines)
    if len(set(cosines)) == 1:
        assert set(rows) == {mean}
        return
    least = [row for row, group in zip(rows, groups, strict=True) if group == max(groups)]
    others = [row for row, group in zip(rows, groups, strict=True) if group != max(groups)]
    assert len(set(least)) == 1
    assert max(least) <= mean <= min(others)
    assert max(others) - min(others) <= 1
    assert others == sorted(others, reverse=True), "what does not divide goes to the earlier layers"
    assert abs(least[0] - p * mean) <= 0.5 + 1e-9 or least[0] == 1


@given(numbers=COSINES, order=st.randoms(use_true_random=False))
def test_groups_are_intervals_whatever_the_order(numbers: list[float], order: object) -> None:
    groups = dict(zip(numbers, budgets.clusters(numbers), strict=True))
    for number, group in zip(numbers, budgets.clusters(numbers), strict=True):
        assert groups[number] == group, "equal numbers share a group"
    ranked = [groups[number] for number in sorted(groups)]
    assert ranked == sorted(ranked)
    assert set(ranked) == set(range(min(3, len(groups))))
    shuffled = list(numbers)
    order.shuffle(shuffled)  # type: ignore[attr-defined]
    assert budgets.clusters(shuffled) == tuple(groups[number] for number in shuffled)


@given(numbers=st.lists(GRID | st.floats(-1.0, 1.0), min_size=1, max_size=6))
def test_no_grouping_has_smaller_squares(numbers: list[float]) -> None:
    """Against every assignment to three groups, in float64."""

    def squares(groups: tuple[int, ...]) -> float:
        total = 0.0
        for each in set(groups):
            part = [number for number, group in zip(numbers, groups, strict=True) if group == each]
            center = sum(part) / len(part)
            total += sum((number - center) ** 2 for number in part)
        return total

    best = min(squares(groups) for groups in product(range(3), repeat=len(numbers)))
    assert squares(budgets.clusters(numbers)) <= best + 1e-12
