"""Layer budgets."""

from itertools import pairwise, permutations, product

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


def within(numbers, groups):
    """Sum of squared distances to the groups' means, in float64."""
    parts = [[number for number, group in zip(numbers, groups, strict=True) if group == each] for each in set(groups)]
    return sum((number - sum(part) / len(part)) ** 2 for part in parts for number in part)


@pytest.mark.parametrize(
    "numbers",
    [
        [0.1, 0.9, 0.2, 0.8, 0.5, 0.55, 0.3],
        [0.99, 0.991, 0.9905, 0.2, 0.21, 0.97, 0.98],
        [-1.0, 1.0, 0.0, 0.5, -0.5, 0.25],
        [0.3, 0.3, 0.3, 0.3, 0.9, 0.1, 0.2],
        [0.5] * 4 + [0.6] * 2 + [0.7, 0.75],
    ],
)
def test_no_grouping_of_all_is_better(numbers):
    groups = budgets.clusters(numbers)
    best = min(within(numbers, other) for other in product(range(3), repeat=len(numbers)))
    assert within(numbers, groups) == pytest.approx(best, abs=1e-15)
    assert set(groups) == {0, 1, 2}


def test_groups_are_in_order_and_follow_the_numbers():
    numbers = [0.9, 0.1, 0.5, 0.95, 0.15]
    for order in permutations(range(5)):
        assert budgets.clusters([numbers[i] for i in order]) == tuple((2, 0, 1, 2, 0)[i] for i in order)


def test_of_equal_groupings_the_highest_group_is_the_smallest():
    """0, 1, 2, 3: two of them share a group, which two is all the same."""
    assert budgets.clusters([0.0, 0.25, 0.5, 0.75]) == (0, 0, 1, 2)


def test_differences_that_a_sum_of_squares_in_float64_loses():
    numbers = [0.75 + i * 2.0**-52 for i in (0, 1, 100, 101, 200, 201)]
    assert budgets.clusters(numbers) == (0, 0, 1, 1, 2, 2)


def test_the_least_useful_layers_keep_p_and_the_others_share_the_rest():
    """20 of 100 rows in two layers of five: 160 rows freed for three, 53 each and one over, for the first."""
    assert budgets.squeeze([0.99, 0.2, 0.3, 0.98, 0.6], 100, 0.2) == (20, 154, 153, 20, 153)
    assert budgets.squeeze([0.99, 0.2, 0.3, 0.98, 0.6], 100, 0.2, floor=32) == (32, 146, 145, 32, 145)
    assert budgets.squeeze([0.99, 0.2, 0.3, 0.98, 0.6], 100, 0.0, floor=0) == (0, 167, 167, 0, 166)


def test_a_share_is_rounded_not_cut():
    """0.35 of 100 is 34.999.. in floating point."""
    assert budgets.squeeze([0.1, 0.2, 0.9], 100, 0.35) == (133, 132, 35)


@pytest.mark.parametrize("cosines", [[0.7], [0.7] * 9, [1, 1.0, 1]])
@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_equal_cosines_give_uniform_budgets(cosines, p):
    assert budgets.squeeze(cosines, 64, p) == (64,) * len(cosines)


def test_two_cosines_make_two_groups():
    assert budgets.squeeze([0.9, 0.1, 0.9, 0.1], 10, 0.5) == (5, 15, 5, 15)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([], 64, 0.3), ValueError, "cosines must have one number per layer, got none"),
        (([0.1, 1.5], 64, 0.3), ValueError, r"cosines\[1\] must be a finite number in \[-1.0, 1.0\], got 1.5"),
        (([0.1, float("nan")], 64, 0.3), ValueError, r"cosines\[1\] must be a finite number"),
        (([0.1, "a"], 64, 0.3), TypeError, r"cosines\[1\] must be a number, got 'a'"),
        (([0.1], 0, 0.3), ValueError, "mean must be >= 1, got 0"),
        (([0.1], 64, 1.3), ValueError, r"p must be a finite number in \[0.0, 1.0\], got 1.3"),
        (([0.1], 64, -0.1), ValueError, "got -0.1"),
    ],
)
def test_a_squeeze_against_the_rules(arguments, error, message):
    with pytest.raises(error, match=message):
        budgets.squeeze(*arguments)


def test_a_mean_below_the_floor():
    with pytest.raises(ValueError, match="mean must be >= floor, got mean=4, floor=5"):
        budgets.squeeze([0.1, 0.2], 4, 0.5, floor=5)
    with pytest.raises(ValueError, match="floor must be >= 0, got -1"):
        budgets.squeeze([0.1, 0.2], 4, 0.5, floor=-1)


def test_two_hundred_layers_take_no_minute():
    cosines = [(i * 37 % 101) / 101 for i in range(200)]
    assert sum(budgets.squeeze(cosines, 2**24, 0.3)) == 200 * 2**24
