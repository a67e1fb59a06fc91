"""SnapKV's step: the kernel against its reference and by hand."""

import math

import mlx.core as mx
import numpy as np
import pytest

from veloxfn.ops.window_step import window_step

SETTINGS = {"kernel": 5, "pooling": "mean", "sink": 1, "recent": 3}


def case(rows, length, size=4, seed=0, free=0.1, grid=False):
    """Rows that have seen twice their slots, some free; the last token of the last row is padded."""
    draw = np.random.default_rng(seed)
    seen = 2 * length + np.arange(rows, dtype=np.int32)
    positions = np.stack([draw.permutation(2 * length - 1)[:length] for _ in range(rows)]).astype(np.int32)
    positions[draw.random((rows, length)) < free] = -1
    arrived = draw.integers(0, length, (rows, 1)).astype(np.int32)
    np.put_along_axis(positions, arrived, seen[:, None] - 1, axis=1)
    positions[-1, arrived[-1, 0]] = -1
    arrived[-1] = -1

    def shares(*shape):
        made = draw.integers(0, 4, shape) / 8 if grid else draw.random(shape)
        return mx.array(made.astype(np.float32))

    window, attention = shares(rows, size, length), shares(rows, length)
    return [window, attention, *(mx.array(one.astype(np.int32)) for one in (positions, seen, arrived))]


def compared(arguments, backend, **settings):
    settings = {**SETTINGS, **settings}
    window, positions = window_step(*arguments, **settings, backend=backend)
    wanted, left = window_step(*arguments, **settings, backend="reference")
    assert mx.array_equal(window, wanted, equal_nan=True)
    assert mx.array_equal(positions, left)
    return window, positions


@pytest.mark.parametrize("pooling", ["mean", "max"])
@pytest.mark.parametrize("kernel", [1, 3, 7, 101])
@pytest.mark.parametrize(("rows", "length"), [(1, 1), (1, 2), (3, 31), (2, 32), (3, 33), (2, 513), (1, 2049)])
def test_kernel_equals_reference(backend, rows, length, kernel, pooling):
    for grid in (False, True):
        compared(case(rows + 1, length, grid=grid), backend, kernel=kernel, pooling=pooling)


@pytest.mark.parametrize("size", [1, 3, 6, 7, 32, 40])
def test_windows_of_any_size(backend, size):
    """On a grid as well, where ties occur: a mean is a sum divided, not multiplied by what 1 / w rounds to."""
    for seed in range(4):
        compared(case(3, 40, size, seed), backend, recent=size)
        for kernel in (1, 3):
            compared(case(60, 5, size, seed, free=0.0, grid=True), backend, kernel=kernel, sink=0, recent=1)


def test_a_full_row_loses_one_and_only_the_padded_or_open_ones_none(backend):
    arguments = case(6, 64, free=0.0)
    _, positions = compared(arguments, backend)
    lost = ((arguments[2] >= 0) & (positions < 0)).sum(axis=1).tolist()
    assert lost == [1] * 5 + [0]
    arguments = case(6, 64, free=0.3)
    assert mx.array_equal(compared(arguments, backend)[1], arguments[2])


def test_by_hand(backend):
    """Slots hold positions 4 0 2 1 3; the token at 4 came last, to slot 0, where an old column was left."""
    positions, seen = mx.array([[4, 0, 2, 1, 3]], mx.int32), mx.array([5], mx.int32)
    arrived = mx.array([[0]], mx.int32)
    window = mx.array([[[9.0, 4.0, 1.0, 8.0, 0.0], [9.0, 9.0, 9.0, 9.0, 9.0]]])
    attention = mx.array([[0.5, 4.0, 7.0, 0.0, 2.0]])
    settings = {"sink": 0, "recent": 1, "backend": backend}
    # Position 4 is row 0 of the ring; what slots have received: 0: 6.5, 1: 4.5, 2: 8, 3: 5.5, 4: 0.25.
    now, left = window_step(window, attention, positions, seen, arrived, kernel=1, pooling="mean", **settings)
    assert now.tolist() == [[[0.5, 4, 7, 0, 2], [0, 9, 9, 9, 9]]]
    assert left.tolist() == [[4, 0, 2, -1, 3]]
    # Of the past, 0 to 3: 0: (6.5 + 4.5) / 2, 1: 19 / 3, 2: 18 / 3, 3: 13.5 / 2.
    _, left = window_step(window, attention, positions, seen, arrived, kernel=3, pooling="mean", **settings)
    assert left.tolist() == [[4, -1, 2, 1, 3]]
    # 0: 6.5, the others 8, 8, 8.
    _, left = window_step(window, attention, positions, seen, arrived, kernel=3, pooling="max", **settings)
    assert left.tolist() == [[4, -1, 2, 1, 3]]
    # All of the past alike: the oldest that no sink protects.
    settings["sink"] = 2
    _, left = window_step(window, attention, positions, seen, arrived, kernel=9, pooling="max", **settings)
    assert left.tolist() == [[4, 0, -1, 1, 3]]


@pytest.mark.parametrize("pooling", ["mean", "max"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kernel", [1, 3])
def test_what_is_not_finite(backend, bad, kernel, pooling):
    arguments = case(4, 20, free=0.0)
    ill = mx.array(np.random.default_rng(3).random((4, 20)) < 0.2)
    arguments[1] = mx.where(ill, bad, arguments[1])
    compared(arguments, backend, kernel=kernel, pooling=pooling)


def test_a_kernel_that_reaches_beyond_all_slots(backend):
    arguments = case(3, 20, free=0.0)
    wide = compared(arguments, backend, kernel=41)
    assert mx.array_equal(compared(arguments, backend, kernel=2**40 + 1)[1], wide[1])


def test_all_protected_but_one(backend):
    arguments = case(2, 9, free=0.0)
    positions = mx.array([[0, 1, 2, 3, 4, 17, 16, 15, 14]] * 2, mx.int32)
    arguments[2:] = [positions, mx.array([18, 18], mx.int32), mx.array([[5], [5]], mx.int32)]
    for kernel in (1, 5):
        _, left = compared(arguments, backend, kernel=kernel, sink=4, recent=4)
        assert left.tolist() == [[0, 1, 2, 3, -1, 17, 16, 15, 14]] * 2


def test_nonsense_is_refused(backend):
    window, attention, positions, seen, arrived = case(2, 6)
    with pytest.raises(ValueError, match=r"window must be \[N, w, n\] = \[2, w, 6\]"):
        window_step(window[..., :5], attention, positions, seen, arrived, **SETTINGS, backend=backend)
    with pytest.raises(ValueError, match="kernel must be odd"):
        window_step(window, attention, positions, seen, arrived, **{**SETTINGS, "kernel": 4}, backend=backend)
    with pytest.raises(ValueError, match="pooling must be one of"):
        window_step(window, attention, positions, seen, arrived, **{**SETTINGS, "pooling": "sum"}, backend=backend)
    with pytest.raises(ValueError, match=r"window must hold rows, queries and slots, got \[N, w, n\] = \[2, 0, 6\]"):
        window_step(window[:, :0], attention, positions, seen, arrived, **SETTINGS, backend=backend)
    with pytest.raises(TypeError, match=r"recent must be an int, got 1\.5"):
        window_step(window, attention, positions, seen, arrived, **{**SETTINGS, "recent": 1.5}, backend=backend)
    for missing in range(5):
        given = [None if i == missing else one for i, one in enumerate((window, attention, positions, seen, arrived))]
        name = ("window", "attention", "positions", "seen", "arrived")[missing]
        with pytest.raises(TypeError, match=f"{name} must be an mx.array"):
            window_step(*given, **SETTINGS, backend=backend)
    with pytest.raises(TypeError, match="arrived must be int32"):
        window_step(window, attention, positions, seen, arrived.astype(mx.int64), **SETTINGS, backend=backend)
