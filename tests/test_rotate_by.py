"""Rotation by a difference of positions: the kernel against its reference, against float64 and MLX's own embedding."""

import math

import mlx.core as mx
import numpy as np
import pytest

from veloxfn import Contiguous, Rope, h2o, placement
from veloxfn.ops import launch
from veloxfn.ops.rotate_by import rotate_by
from veloxfn.placement import rotate
from veloxfn.testing.streams import normal_stream

DTYPES = {mx.float32: 2e-6, mx.float16: 2e-3, mx.bfloat16: 1.6e-2}


def case(shape, dims, dtype, seed=0, furthest=3000):
    draw = np.random.default_rng(seed)
    vectors = mx.array(draw.standard_normal(shape).astype(np.float32)).astype(dtype)
    start, to = (mx.array(draw.integers(0, furthest, shape[:-1]).astype(np.int32)) for _ in range(2))
    inverse = mx.array((10000.0 ** (-np.arange(dims // 2) / (dims // 2))).astype(np.float32))
    return vectors, start, to, inverse


def exact(vectors, start, to, inverse, scale, traditional):
    """The rotation in float64, by angles that are rounded to float32 before their difference is taken."""
    x, half = np.array(vectors.astype(mx.float32), np.float64), inverse.size
    angles = [
        (np.array(place, np.float32)[..., None] * np.float32(scale) * np.array(inverse).reshape(-1)).astype(np.float64)
        for place in (to, start)
    ]
    angle = angles[0] - angles[1]
    first, second = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if traditional else (slice(half), slice(half, 2 * half))
    )
    turned = x.copy()
    turned[..., first] = x[..., first] * np.cos(angle) - x[..., second] * np.sin(angle)
    turned[..., second] = x[..., second] * np.cos(angle) + x[..., first] * np.sin(angle)
    return turned


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("traditional", [False, True])
@pytest.mark.parametrize(
    ("shape", "dims"),
    [((1, 1, 2), 2), ((2, 31, 8), 8), ((3, 33, 7), 4), ((2, 2, 1, 64), 64), ((2, 65, 80), 32), ((1, 513, 5), 2)],
)
def test_kernel_equals_reference_and_float64(backend, shape, dims, traditional, dtype):
    arguments = case(shape, dims, dtype)
    options = {"scale": 0.5, "traditional": traditional}
    have = rotate_by(*arguments, **options, backend=backend)
    assert have.dtype == dtype
    assert have.shape == shape
    for want in (rotate_by(*arguments, **options, backend="reference"), exact(*arguments, **options)):
        want = np.array(want.astype(mx.float32) if isinstance(want, mx.array) else want)
        assert np.allclose(np.array(have.astype(mx.float32)), want, rtol=0, atol=4 * DTYPES[dtype])
    assert mx.array_equal(have[..., dims:], arguments[0][..., dims:]), "the other dimensions stay"


def test_far_positions_lose_nothing(backend):
    vectors, start, _, inverse = case((2, 40, 16), 16, mx.float32, furthest=1_000_000)
    to = mx.maximum(start - 17, 0)
    have = rotate_by(vectors, start, to, inverse, backend=backend)
    assert np.allclose(have, exact(vectors, start, to, inverse, 1.0, False), rtol=0, atol=2e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, 1.0])
def test_equal_positions_give_the_vector_bit_for_bit(backend, dtype, bad):
    vectors, start, to, inverse = case((2, 9, 6), 6, dtype)
    vectors = mx.where(mx.arange(6) == 2, mx.array(bad, dtype), vectors)
    still = mx.arange(9) % 2 == 0
    to = mx.where(still, start, mx.where(to == start, to + 1, to))
    have = rotate_by(vectors, start, to, inverse, backend=backend)
    width = mx.uint32 if dtype == mx.float32 else mx.uint16
    same = mx.all(mx.view(have, width) == mx.view(vectors, width), axis=-1)
    assert mx.array_equal(same | ~still, mx.ones((2, 9), mx.bool_))
    assert not mx.any(same & ~still)


def test_positions_broadcast(backend):
    vectors, start, to, inverse = case((2, 3, 1, 8), 8, mx.float32)
    some, there = start[:, :1], to[:1, :1]
    have = rotate_by(vectors, some, there, inverse, backend=backend)
    full = [mx.broadcast_to(place, start.shape) for place in (some, there)]
    assert mx.array_equal(have, rotate_by(vectors, *full, inverse, backend=backend))


def test_there_and_back(backend):
    vectors, start, to, inverse = case((2, 50, 32), 32, mx.float32)
    there = rotate_by(vectors, start, to, inverse, backend=backend)
    assert np.allclose(rotate_by(there, to, start, inverse, backend=backend), vectors, atol=5e-6)


def test_it_is_the_embedding_of_mlx(backend):
    dims, count = 16, 30
    vectors = case((1, count, dims), dims, mx.float32)[0]
    for traditional in (False, True):
        rope = Rope(dims, base=500.0, traditional=traditional, scale=0.25)
        far = mx.fast.rope(vectors, dims, traditional=traditional, base=500.0, scale=0.25, offset=100)
        near = mx.fast.rope(vectors, dims, traditional=traditional, base=500.0, scale=0.25, offset=3)
        places = mx.arange(count, dtype=mx.int32)[None]
        have = rotate_by(
            far,
            places + 100,
            places + 3,
            placement._inverse(rope),
            scale=0.25,
            traditional=traditional,
            backend=backend,
        )
        assert np.allclose(have, near, atol=3e-5)


def test_nonsense_is_refused():
    vectors, start, to, inverse = case((1, 2, 4), 4, mx.float32)
    with pytest.raises(ValueError, match="dims must be <= D, got dims=4, D=3"):
        rotate_by(vectors[..., :3], start, to, inverse)
    with pytest.raises(TypeError, match="the dtype of vectors must be float32"):
        rotate_by(vectors.astype(mx.int32), start, to, inverse)
    nothing = mx.zeros((1, 0, 4))
    assert rotate_by(nothing, mx.zeros((1, 0)), mx.zeros((1, 0)), inverse).shape == (1, 0, 4)


@pytest.mark.parametrize("traditional", [False, True])
def test_contiguous_placement_uses_it(backend, monkeypatch, traditional):
    rope = Rope(4, base=50.0, traditional=traditional)
    config = h2o.Config(budget=6, sink=1, placement=Contiguous(rope))
    stream = normal_stream(2, tokens=20, key_dim=8)

    def kept():
        state = h2o.init_state(config, 2, 8, 6, dtype=mx.float32)
        for t in range(0, 20, 4):
            keys, values, queries = (
                mx.array(x[..., t : t + 4, :]) for x in (stream.keys, stream.values, stream.queries)
            )
            state = h2o.update_batched(config, state, keys, values, queries=queries)
        return h2o.get_kv(config, state)

    want = kept()
    monkeypatch.setattr(launch, "FORCED", backend)
    for one, other in zip(kept(), want, strict=True):
        assert np.allclose(one, other, atol=1e-5)
    turned = rotate(rope, want[0], start=mx.zeros((2, 6), mx.int32), to=mx.ones((2, 6), mx.int32))
    assert not np.allclose(turned, want[0])
