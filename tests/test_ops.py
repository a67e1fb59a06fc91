"""Ops against their references."""

import math

import mlx.core as mx
import numpy as np
import pytest

from veloxfn import draws
from veloxfn.ops import Temper, attention_mass, attention_rows, fusion
from veloxfn.ops.attention_mass import reference
from veloxfn.ops.attention_rows import reference as rows_reference
from veloxfn.ops.weights import _exp, _widened


def case(rows, groups, count, length, dim, dtype, seed=0):
    """A block of `count` arrivals behind `length - count` kept slots, some of them free."""
    a, b, c = mx.random.split(mx.random.key(seed), 3)
    queries = mx.random.normal((rows, groups, count, dim), key=a).astype(dtype)
    keys = (2 * mx.random.normal((rows, length, dim), key=b)).astype(dtype)
    free = mx.random.bernoulli(0.2, (rows, length), key=c)
    positions = mx.where(free, -1, mx.arange(length, dtype=mx.int32))
    until = mx.broadcast_to(mx.arange(length - count, length, dtype=mx.int32), (rows, count))
    weights = mx.linspace(0.1, 1.0, count)[None] * mx.ones((rows, 1))
    return queries, keys, positions, until, weights


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize(
    ("rows", "groups", "count", "length", "dim"),
    [
        (1, 1, 1, 1, 1),
        (2, 3, 1, 31, 5),
        (2, 1, 33, 33, 8),
        (3, 2, 65, 100, 8),
        (1, 2, 513, 700, 4),
        (4, 2, 300, 1000, 4),
        (8, 4, 97, 300, 8),
    ],
)
def test_attention_mass_equals_its_reference(rows, groups, count, length, dim, dtype):
    arguments = case(rows, groups, count, length, dim, dtype)
    have, want = attention_mass(*arguments), reference(*arguments)
    assert have.dtype == mx.float32
    assert have.shape == (rows, length)
    assert np.allclose(have, want, rtol=2e-5, atol=1e-7)
    assert mx.all(mx.where(arguments[2] < 0, have == 0, True)), "a free slot receives nothing"


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize(
    ("rows", "groups", "count", "length"), [(2, 3, 1, 31), (1, 1, 1, 1), (2, 2, 65, 100), (4, 2, 300, 1000)]
)
def test_tempered_attention_mass_equals_its_reference(rows, groups, count, length, noisy, dtype):
    arguments = case(rows, groups, count, length, 4, dtype)
    names = draws.names(5, mx.arange(rows * groups * count, dtype=mx.uint32).reshape(rows, groups, count))
    temper = Temper(mx.linspace(0.3, 3.0, rows * count).reshape(rows, count), names if noisy else None)
    have, want = attention_mass(*arguments, temper), reference(*arguments, temper)
    assert np.allclose(have, want, rtol=5e-5, atol=1e-7)
    plain = attention_mass(*arguments)
    assert count == length == 1 or not np.allclose(have, plain, rtol=1e-2), "the temperature is used"


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize(
    ("rows", "groups", "count", "length"), [(1, 1, 1, 1), (2, 3, 1, 31), (3, 2, 7, 33), (2, 1, 32, 513)]
)
def test_attention_rows_are_the_terms_of_the_mass(rows, groups, count, length, dtype):
    queries, keys, positions, until, _ = case(rows, groups, count, length, 8, dtype)
    have = attention_rows(queries, keys, positions, until)
    assert have.shape == (rows, count, length)
    assert have.dtype == mx.float32
    assert np.allclose(have, rows_reference(queries, keys, positions, until), rtol=2e-5, atol=1e-7)
    assert np.allclose(have.sum(axis=1), attention_mass(queries, keys, positions, until), rtol=2e-5, atol=1e-6)


def test_a_query_that_sees_nothing_counts_nothing():
    queries, keys, positions, until, weights = case(2, 2, 3, 9, 4, mx.float32)
    assert attention_mass(queries, keys, positions, mx.full(until.shape, -1), weights).abs().sum().item() == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16])
def test_lesson_12_a_bad_key_takes_nothing_from_the_other_slots(bad, dtype):
    queries, keys, _, until, weights = case(1, 2, 4, 12, 4, dtype)
    positions = mx.arange(12, dtype=mx.int32)[None]
    poison = mx.where((mx.arange(12) == 5)[None, :, None], bad, keys)
    have = attention_mass(queries, poison.astype(dtype), positions, until, weights)
    want = attention_mass(queries, keys, mx.where(positions == 5, -1, positions), until, weights)
    assert np.allclose(have, want, rtol=1e-5)


def test_wide_queries_over_float16_keys_do_not_overflow():
    keys = mx.array([[[1.0, 0.0], [0.0, 1.0]]], dtype=mx.float16)
    queries = mx.array([[[[1e6, 0.0]]]])
    mass = attention_mass(queries, keys, mx.array([[0, 1]]), mx.array([[1]]))
    assert np.allclose(mass, [[1.0, 0.0]])


def test_exp_of_non_positive_numbers(monkeypatch):
    monkeypatch.setattr("veloxfn.ops.weights.on_gpu", lambda: False)
    x = mx.concatenate([-mx.linspace(0, 87, 100_001), mx.array([0.0, -0.0, -1e-30, -100.0, -1e30, -math.inf])])
    want = np.exp(np.maximum(np.array(x, np.float64), -87.0))
    error = np.abs(np.array(_exp(x), np.float64) / want - 1)
    assert np.all(error < 3e-7 + 8e-8 * np.minimum(-np.array(x, np.float64), 87.0))
    assert _exp(mx.array([0.0])).item() == 1.0


def test_widened_float16_is_exact_for_every_bit_pattern():
    half = mx.view(mx.arange(2**16, dtype=mx.uint32).astype(mx.uint16), mx.float16)
    wide, unit = _widened(half), 2.0**112
    finite = np.array(mx.isfinite(half))
    assert np.array_equal(np.array(mx.isnan(wide)), np.array(mx.isnan(half)))
    assert np.array_equal(np.array(mx.isinf(wide)), np.array(mx.isinf(half)))
    assert np.array_equal(np.array(wide)[finite].astype(np.float64) * unit, np.array(half)[finite].astype(np.float64))


def test_fused_is_the_function_itself_where_nothing_can_be_built(monkeypatch):
    calls = []
    square = fusion.fused(lambda x: calls.append(1) or x * x)
    monkeypatch.setattr(fusion, "_has_compiler", lambda: False)
    monkeypatch.setattr(fusion, "on_gpu", lambda: False)
    for _ in range(2):
        assert square(mx.array([3.0])).item() == 9.0
    assert len(calls) == 2, "not compiled: called each time"
