"""Layer budgets."""

from itertools import pairwise

import pytest

from veloxfn import budgets


@pytest.mark.parametrize("layers", [1, 2, 3, 7, 32, 61])
@pytest.mark.parametrize(
    "shape", [{"beta": 1.0}, {"beta": 2.5}, {"beta": 20.0}, {"taper": 1.0}, {"taper": 1.7}, {"taper": 3.0}]
)
@pytest.mark.parametrize("floor", [0, 1, 5, 32])
def test_lesson_16_budgets_sum_exactly_never_increase_and_hold_the_floor(layers, shape, floor):
    before = None
    for mean in range(max(1, floor), floor + 40):
        rows = budgets.pyramid(layers, mean, floor=floor, **shape)
        assert len(rows) == layers
        assert sum(rows) == layers * mean
        assert all(a >= b for a, b in pairwise(rows))
        assert min(rows) >= floor
        assert before is None or all(a <= b for a, b in zip(before, rows, strict=True)), "monotone in the mean"
        before = rows


@pytest.mark.parametrize("shape", [{"beta": 1.0}, {"taper": 1.0}])
def test_flat_is_the_mean(shape):
    assert budgets.pyramid(5, 100, floor=10, **shape) == (100,) * 5


def test_a_single_layer_gets_the_mean():
    assert budgets.pyramid(1, 77, beta=20.0, floor=5) == (77,)


def test_the_papers_pyramid():
    """beta = 20, mean 128, window 8: the last layer has 6 rows above the window, the first 234, linear between."""
    rows = budgets.pyramid(32, 128, beta=20.0, floor=8)
    assert (rows[0], rows[-1]) == (242, 14)
    steps = [a - b for a, b in pairwise(rows)]
    assert max(steps) - min(steps) <= 2
    assert abs(sum(steps) - 228) == 0


def test_a_steep_taper_leaves_the_last_layers_at_the_floor():
    rows = budgets.pyramid(8, 20, taper=4.0, floor=5)
    assert rows[-3:] == (5, 5, 5)
    assert rows[0] > 2 * 20


def test_ties_go_to_the_earlier_layer():
    """Shares 97.5 and 2.5: the 98th row of the first and the third of the second claim 0.5 each."""
    assert budgets.pyramid(2, 100, beta=20.0, floor=50) == (148, 52)


def test_large_budgets_take_no_time_per_row():
    rows = budgets.pyramid(80, 2**24, beta=20.0, floor=32)
    assert sum(rows) == 80 * 2**24
