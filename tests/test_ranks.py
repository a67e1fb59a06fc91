"""Ranks of slots in time: the kernel against its reference and by counting."""

import mlx.core as mx
import numpy as np
import pytest

from veloxfn.ops.ranks import ranks


def case(rows, length, free, seed=0):
    draw = np.random.default_rng(seed)
    positions = np.stack([draw.permutation(5 * length)[:length] for _ in range(rows)]).astype(np.int32)
    positions[draw.random((rows, length)) < free] = -1
    return positions


@pytest.mark.parametrize("free", [0.0, 0.2, 1.0])
@pytest.mark.parametrize(("rows", "length"), [(1, 1), (2, 2), (3, 31), (2, 32), (2, 33), (2, 513), (1, 2049), (40, 7)])
def test_kernel_equals_reference_and_a_count(backend, rows, length, free):
    positions = case(rows, length, free)
    counted = (positions[:, None] < positions[..., None]) & (positions[:, None] >= 0)
    live = positions >= 0
    for have in (ranks(mx.array(positions), backend=backend), ranks(mx.array(positions), backend="reference")):
        assert have.dtype == mx.int32
        have = np.array(have)
        assert np.array_equal(have[live], counted.sum(axis=2)[live])
        assert (have[~live] < 0).all()


def test_by_hand(backend):
    assert ranks(mx.array([[7, -1, 0, 3]], mx.int32), backend=backend).tolist() == [[2, -1, 0, 1]]
    assert ranks(mx.zeros((3, 0), mx.int32), backend=backend).shape == (3, 0)


def test_another_type_is_refused(backend):
    with pytest.raises(TypeError, match="positions must be int32"):
        ranks(mx.array([[0, 1]], mx.int64), backend=backend)
