"""Losers merged into their targets: the kernel against its reference and by hand."""

import math

import mlx.core as mx
import numpy as np
import pytest

from veloxfn import cam, kept_positions
from veloxfn.ops import launch
from veloxfn.ops.merge_into import merge_into
from veloxfn.testing.streams import normal_stream

DTYPES = [mx.float32, mx.float16, mx.bfloat16]


def case(rows, size, dim, losers, targets, dtype, seed=0):
    draw = np.random.default_rng(seed)
    values = mx.array(draw.standard_normal((rows, size, dim)).astype(np.float32)).astype(dtype)
    slots = np.stack([draw.permutation(size)[: losers + targets] for _ in range(rows)]).astype(np.int32)
    weights = draw.random((rows, losers, targets)).astype(np.float32)
    weights *= draw.random((rows, losers, targets)) < 0.6
    return values, mx.array(slots[:, :losers]), mx.array(slots[:, losers:]), mx.array(weights)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize(
    ("rows", "size", "dim", "losers", "targets"),
    [(1, 2, 1, 1, 1), (3, 31, 5, 1, 7), (2, 33, 64, 1, 32), (2, 65, 8, 9, 40), (1, 513, 33, 100, 400)],
)
def test_kernel_equals_reference(backend, rows, size, dim, losers, targets, dtype, normalise):
    arguments = case(rows, size, dim, losers, targets, dtype)
    have = merge_into(*arguments, normalise=normalise, backend=backend)
    want = merge_into(*arguments, normalise=normalise, backend="reference")
    assert have.dtype == dtype
    if losers == 1:
        assert mx.array_equal(have, want), "one product and one sum, rounded alike"
    tolerance = {mx.float32: 1e-5, mx.float16: 2e-3, mx.bfloat16: 2e-2}[dtype]
    have, want, before = (np.array(x.astype(mx.float32)) for x in (have, want, arguments[0]))
    assert np.allclose(have, want, rtol=tolerance, atol=tolerance)
    for row in range(rows):
        into = np.array(arguments[2])[row][np.array(arguments[3])[row].sum(axis=0) > 0]
        others = np.setdiff1d(np.arange(size), into)
        assert np.array_equal(have[row, others], before[row, others])


def test_by_hand(backend):
    values = mx.array([[[1.0, 2.0], [3.0, -4.0], [5.0, 6.0]]])
    weights = mx.array([[[1.0, 0.0], [0.5, 0.0]]])
    lost, into = mx.array([[1, 2]], mx.int32), mx.array([[0, 1]], mx.int32)
    mean = merge_into(values, lost, into, weights, backend=backend)
    assert np.allclose(mean[0, 0], [(1 + 3 + 2.5) / 2.5, (2 - 4 + 3) / 2.5])
    total = merge_into(values, lost, into, weights, normalise=False, backend=backend)
    assert total[0, 0].tolist() == [6.5, 1.0]
    for merged in (mean, total):
        assert mx.array_equal(merged[0, 1:], values[0, 1:])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_does_not_leak(backend, bad, dtype):
    values, lost, into, weights = case(2, 20, 4, 3, 5, dtype)
    first = mx.put_along_axis(mx.zeros((2, 20), mx.bool_), lost[:, :1], mx.array(True), axis=1)
    poisoned = mx.where(first[..., None], mx.array(bad, dtype), values)
    weights = mx.where(mx.arange(3)[:, None] == 0, 0, weights)
    have = merge_into(poisoned, lost, into, weights, backend=backend)
    want = mx.where(first[..., None], poisoned, merge_into(values, lost, into, weights, backend=backend))
    assert mx.array_equal(have, want, equal_nan=True)
    assert mx.all(mx.isfinite(mx.take_along_axis(have, into[..., None], axis=1)))


def test_a_target_without_weight_stays_bit_for_bit(backend):
    values, lost, into, weights = case(1, 12, 3, 2, 4, mx.float32)
    values = mx.where(mx.arange(12)[None, :, None] == into[0, 0], math.nan, values)
    have = merge_into(values, lost, into, mx.zeros_like(weights), backend=backend)
    assert mx.array_equal(mx.view(have, mx.uint32), mx.view(values, mx.uint32))


def test_nothing_to_merge_and_nonsense(backend):
    values, lost, into, weights = case(2, 5, 3, 1, 2, mx.float32)
    assert merge_into(values, lost[:, :0], into, weights[:, :0], backend=backend) is values
    with pytest.raises(ValueError, match=r"weights must be \[N, L, K\] = \[2, 1, 2\]"):
        merge_into(values, lost, into, weights[:, :, :1], backend=backend)
    with pytest.raises(TypeError, match="the dtype of values must be float32"):
        merge_into(values.astype(mx.int32), lost, into, weights, backend=backend)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"gate": False, "merge": "mean"},
        {"gate": False, "normalise": False, "cadence": "token"},
        {"targets": "nearest", "merge": "similarity", "decay": 0.9},
        {"merge": "similarity", "merge_keys": True, "gate": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_cam_merges_a_loser_with_it(backend, monkeypatch, settings, dtype):
    config = cam.Config(budget=8, sink=1, target_count=3, **settings)
    stream = normal_stream(4, tokens=25, dtype=dtype)

    def decoded():
        state = cam.init_state(config, 2, 8, 6, dtype=dtype)
        for size in (9, *([1] * 14), 2):
            start = state.slots.seen[0].item()
            now = slice(start, start + size)
            keys, values, queries = (
                mx.array(x[..., now, :]).astype(dtype) for x in (stream.keys, stream.values, stream.queries)
            )
            state = cam.update_batched(config, state, keys, values, queries=queries)
        return state

    want = decoded()
    used = []
    monkeypatch.setattr("veloxfn.ops.merge_into", lambda *a, **b: used.append(1) or merge_into(*a, **b))
    monkeypatch.setattr(launch, "FORCED", backend)
    have = decoded()
    assert used
    assert mx.array_equal(kept_positions(have), kept_positions(want))
    for one, other in zip(cam.get_kv(config, have), cam.get_kv(config, want), strict=True):
        assert np.allclose(np.array(one.astype(mx.float32)), np.array(other.astype(mx.float32)), rtol=1e-2, atol=1e-2)
