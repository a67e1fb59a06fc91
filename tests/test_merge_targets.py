"""Which survivors take a loser, and with which weights: the kernel against its reference and by hand."""

import math

import mlx.core as mx
import numpy as np
import pytest

from veloxfn.ops.merge_targets import MergeRule, merge_targets

DTYPES = [mx.float32, mx.float16, mx.bfloat16]
RULES = {
    "window": MergeRule(following=4),
    "window, gate": MergeRule(following=4, seed=7),
    "long window, gate": MergeRule(following=1000, seed=7),
    "window, similar": MergeRule(following=40, similar=True, seed=2**63 + 5, whole=True),
    "nearest": MergeRule(nearest=True, sink=2, seed=7),
    "nearest, similar": MergeRule(nearest=True, similar=True, sink=1, whole=True),
}


def case(rows, length, dim=8, dtype=mx.float32, seed=0, free=0.1):
    """Rows at positions on a grid of keys, so that cosines tie; in each but the last a token goes."""
    draw = np.random.default_rng(seed)
    positions = np.stack([draw.permutation(3 * length)[:length] for _ in range(rows)]).astype(np.int32)
    positions[draw.random((rows, length)) < free] = -1
    left = positions.copy()
    for row in range(rows - 1):
        live = np.flatnonzero(positions[row] >= 0)
        if len(live):
            left[row, draw.choice(live)] = -1
    mass = draw.integers(0, 8, (rows, length)).astype(np.float32) / 4
    keys = draw.integers(-1, 2, (rows, length, dim)).astype(np.float32)
    values = draw.standard_normal((rows, length, 5)).astype(np.float32)
    streams = np.arange(rows, dtype=np.uint32) * 65536
    return [
        mx.array(positions),
        mx.array(left),
        mx.array(mass),
        mx.array(values).astype(dtype),
        mx.array(keys).astype(dtype),
        mx.array(streams),
    ]


def given(made, length):
    """Weight of each slot [N, n], whatever the order of the targets."""
    into, weights = np.array(made.into), np.array(made.weights)[:, 0]
    dense = np.zeros((into.shape[0], length), np.float32)
    for row in range(into.shape[0]):
        assert len({*into[row]}) == into.shape[1], "targets are different slots"
        assert (into[row] >= 0).all()
        assert (into[row] < length).all()
        dense[row, into[row]] = weights[row]
    return dense


def compared(rule, arguments, backend):
    have = merge_targets(rule, *arguments, backend=backend)
    want = merge_targets(rule, *arguments, backend="reference")
    positions, left = (np.array(one) for one in arguments[:2])
    gone = (positions >= 0) & (left < 0)
    loses = gone.any(axis=1)
    for made in (have, want):
        assert np.array_equal(np.array(made.lost)[loses, 0], gone.argmax(axis=1)[loses])
        for row in np.flatnonzero(loses):
            assert np.array(made.lost)[row, 0] not in np.array(made.into)[row][np.array(made.weights)[row, 0] > 0]
    dense, wanted = given(have, positions.shape[1]), given(want, positions.shape[1])
    assert np.array_equal(dense > 0, wanted > 0)
    assert np.allclose(dense, wanted, rtol=1e-5)
    assert not dense[~loses].any()
    assert mx.array_equal(have.mass, want.mass, equal_nan=True)
    return dense


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize(("rows", "length"), [(1, 2), (3, 31), (2, 32), (2, 33), (2, 513), (1, 2049), (5, 17)])
def test_kernel_equals_reference(backend, rule, rows, length):
    compared(rule, case(rows + 1, length), backend)


@pytest.mark.parametrize("rule", [RULES["window, similar"], RULES["nearest"]], ids=["window", "nearest"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [1, 40, 128])
def test_keys_of_any_type_and_size(backend, rule, dtype, dim):
    for seed in range(3):
        compared(rule, case(4, 40, dim, dtype, seed), backend)


def test_every_rule_merges_at_times_and_the_gate_refuses_at_times(backend):
    for name, rule in RULES.items():
        merged = [given(merge_targets(rule, *case(20, 24), backend=backend), 24).any(axis=1)[:-1]]
        assert np.any(merged), name
        if rule.seed is not None:
            assert not np.all(merged), name


def test_by_hand(backend):
    """The token at position 4 goes; 5, 8 and 9 come after it."""
    positions = mx.array([[9, 4, -1, 0, 5, 8, 2]], mx.int32)
    left = mx.array([[9, -1, -1, 0, 5, 8, 2]], mx.int32)
    mass = mx.array([[4.0, 1.0, 0.0, 9.0, 2.0, 3.0, 5.0]])
    keys = mx.array([[[0, 2], [1, 0], [0, 0], [3, 0], [3, 4], [4, 3], [0, 0]]], mx.float32)
    streams, values = mx.array([0], mx.uint32), mx.zeros((1, 7, 1))

    def made(rule):
        merging = merge_targets(rule, positions, left, mass, values, keys, streams, backend=backend)
        return given(merging, 7)[0].tolist(), merging

    third = float(np.float32(1 / 3))
    assert made(MergeRule(following=32))[0] == [third, 0, 0, 0, third, third, 0]
    assert made(MergeRule(following=2))[0] == [0, 0, 0, 0, 0.5, 0.5, 0]
    assert np.allclose(made(MergeRule(following=2, similar=True))[0], [0, 0, 0, 0, 0.75, 2.0, 0])
    weights, merging = made(MergeRule(nearest=True))
    assert weights == [0, 0, 0, 1, 0, 0, 0]
    assert merging.mass.tolist() == [[4, 1, 0, 10, 2, 3, 5]]
    assert made(MergeRule(nearest=True, sink=1))[0] == [0, 0, 0, 0, 0, 1, 0]
    assert mx.array_equal(made(MergeRule(following=2))[1].mass, mass)


def test_equal_cosines_go_to_the_oldest(backend):
    positions = mx.array([[7, 3, 5, 1]], mx.int32)
    left = mx.array([[7, 3, 5, -1]], mx.int32)
    keys = mx.array([[[1, 1], [2, 2], [4, 4], [1, 1]]], mx.float32)
    made = merge_targets(
        MergeRule(nearest=True), positions, left, mx.ones((1, 4)), keys, keys, mx.array([0], mx.uint32), backend=backend
    )
    assert given(made, 4).tolist() == [[0, 1, 0, 0]]


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", ["mass of the loser", "value of the loser", "key of the loser", "masses", "keys"])
def test_what_is_not_finite_is_not_merged_and_does_not_leak(backend, rule, bad, place):
    arguments = case(5, 20, seed=3, free=0.0)
    gone = ((arguments[0] >= 0) & (arguments[1] < 0))[..., None]
    ill = mx.array(np.random.default_rng(1).random((5, 20, 1)) < 0.4) & ~gone if place.endswith("s") else gone
    which = 2 if "mass" in place else 3 if "value" in place else 4
    ill = ill.squeeze(2) if which == 2 else ill
    arguments[which] = mx.where(ill, bad, arguments[which])
    dense = compared(rule, arguments, backend)
    if "mass of" in place or "value of" in place or (rule.whole and "key of" in place):
        assert not dense.any()
    assert np.isfinite(dense).all()


def test_positions_that_repeat_are_nonsense_that_stays_in_its_row(backend):
    positions, left = mx.array([[5, 5, 5, 1]] * 2, mx.int32), mx.array([[5, 5, 5, -1]] * 2, mx.int32)
    made = merge_targets(
        MergeRule(following=1),
        positions,
        left,
        mx.ones((2, 4)),
        mx.ones((2, 4, 1)),
        None,
        mx.zeros((2,), mx.uint32),
        backend=backend,
    )
    assert made.into.shape == (2, 1)
    assert mx.all((made.into >= 0) & (made.into < 3))


def test_rows_are_independent(backend):
    arguments = case(6, 30, seed=5)
    for rule in RULES.values():
        together = given(merge_targets(rule, *arguments, backend=backend), 30)
        for row in (0, 4):
            alone = merge_targets(rule, *(one[row : row + 1] for one in arguments), backend=backend)
            assert np.array_equal(given(alone, 30)[0], together[row])


def test_nonsense_is_refused(backend):
    positions, left, mass, values, keys, streams = case(2, 6)
    with pytest.raises(ValueError, match=r"left must be \[N, n\] = \[2, 6\]"):
        merge_targets(MergeRule(), positions, left[:, :5], mass, values, None, streams, backend=backend)
    with pytest.raises(ValueError, match="needs keys"):
        merge_targets(MergeRule(nearest=True), positions, left, mass, values, None, streams, backend=backend)
    for name, rule in {
        "following must be >= 1": MergeRule(following=0),
        "sink must be >= 0": MergeRule(nearest=True, sink=-1),
        "seed must be <= ": MergeRule(seed=2**64),
    }.items():
        with pytest.raises(ValueError, match=name):
            merge_targets(rule, positions, left, mass, values, keys, streams, backend=backend)
    with pytest.raises(ValueError, match=r"positions must hold rows and slots, got \[N, n\] = \[2, 0\]"):
        merge_targets(MergeRule(), *(one[:, :0] for one in (positions, left, mass, values, keys)), streams)
    for missing, name in enumerate(("positions", "left", "mass", "values")):
        given = [None if i == missing else one for i, one in enumerate((positions, left, mass, values))]
        with pytest.raises(TypeError, match=f"{name} must be an mx.array"):
            merge_targets(MergeRule(), *given, keys, streams, backend=backend)
    with pytest.raises(TypeError, match=r"streams must be an mx\.array"):
        merge_targets(MergeRule(seed=1), positions, left, mass, values, keys, None, backend=backend)
    with pytest.raises(TypeError, match="mass must be float32"):
        merge_targets(MergeRule(), positions, left, mass.astype(mx.float16), values, None, streams, backend=backend)
    with pytest.raises(TypeError, match="the dtype of keys must be float32"):
        merge_targets(MergeRule(), positions, left, mass, values, keys.astype(mx.int32), streams, backend=backend)
