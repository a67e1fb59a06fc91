"""Draws: what they are addressed by, and how they are distributed."""

import math

import mlx.core as mx
import numpy as np
import pytest

import veloxfn
from veloxfn import draws


def tokens(count, start=0):
    return mx.arange(start, start + count, dtype=mx.int32)[None]


def names(*numbers):
    return mx.array(numbers, dtype=mx.uint32)


@pytest.mark.parametrize("draw", [draws.uniform, draws.gumbel])
def test_lesson_7_a_draw_depends_on_its_address_alone(draw):
    whole = draw(3, names(5), tokens(100))
    for size in (1, 25):
        parts = [draw(3, names(5), tokens(size, start)) for start in range(0, 100, size)]
        assert mx.array_equal(whole, mx.concatenate(parts, axis=1))
    shuffled = mx.array(np.random.default_rng(0).permutation(100))
    assert mx.array_equal(draw(3, names(5), tokens(100)[:, shuffled]), whole[:, shuffled])


def test_lesson_6_every_part_of_the_address_counts():
    drawn = {
        (seed, stream): tuple(draws.gumbel(seed, names(stream), tokens(8))[0].tolist())
        for seed in (0, 1, 2**32, 2**64 - 1)
        for stream in (0, 1, 65536, 2**32 - 1)
    }
    assert len(set(drawn.values())) == 16
    assert drawn[0, 1] != drawn[1, 0]


def test_lesson_6_sequences_share_streams_and_heads_and_layers_do_not():
    drawn = draws.gumbel(0, veloxfn.streams(2, 3, layer=1), mx.broadcast_to(tokens(50), (6, 50)))
    assert mx.array_equal(drawn[:3], drawn[3:])
    other = draws.gumbel(0, veloxfn.streams(1, 3, layer=2), mx.broadcast_to(tokens(50), (3, 50)))
    assert len({tuple(row) for row in [*drawn[:3].tolist(), *other.tolist()]}) == 6


def test_the_order_of_coordinates_matters():
    one, two = names(1), names(2)
    assert draws.names(0, one, two).item() != draws.names(0, two, one).item()
    assert draws.names(0, one).item() != draws.names(0, one, names(0)).item()


def test_names_do_not_collide():
    a, b = mx.arange(512, dtype=mx.uint32)[:, None], mx.arange(512, dtype=mx.uint32)
    assert len(set(np.array(draws.names(7, a, b)).ravel().tolist())) == 512 * 512


def test_uniform_draws_are_uniform_and_independent():
    streams = mx.arange(64, dtype=mx.uint32)
    u = np.array(draws.uniform(1, streams, mx.broadcast_to(tokens(4096), (64, 4096))), np.float64)
    assert 0 < u.min() < 1e-4
    assert 1 - 1e-4 < u.max() < 1
    ordered = np.sort(u.ravel())
    distance = np.abs(ordered - (np.arange(ordered.size) + 0.5) / ordered.size).max()
    assert distance < 1.63 / math.sqrt(ordered.size), "Kolmogorov-Smirnov, 1 %"
    for one, other in ((u[:, :-1], u[:, 1:]), (u[:-1], u[1:]), (u[:, :-2], u[:, 2:]), (u[:, :2048], u[:, 2048:])):
        counts = np.histogram2d(one.ravel(), other.ravel(), bins=16, range=[[0, 1], [0, 1]])[0]
        expected = counts.sum() / 256
        assert ((counts - expected) ** 2 / expected).sum() < 330, "chi square of pairs, 255 degrees, 0.1 %"


def test_gumbel_draws_are_gumbel():
    g = np.array(draws.gumbel(2, mx.arange(16, dtype=mx.uint32), mx.broadcast_to(tokens(8192), (16, 8192))), np.float64)
    assert np.isfinite(g).all()
    assert abs(g.mean() - 0.57721566) < 0.015
    assert abs(g.var() - math.pi**2 / 6) < 0.03
    ordered = np.sort(g.ravel())
    below = np.exp(-np.exp(-ordered))
    distance = np.abs(below - (np.arange(ordered.size) + 0.5) / ordered.size).max()
    assert distance < 1.63 / math.sqrt(ordered.size)


def test_the_global_generator_is_neither_read_nor_moved():
    mx.random.seed(11)
    before = mx.random.uniform()
    mx.random.seed(11)
    one = draws.gumbel(0, names(0), tokens(5))
    after = mx.random.uniform()
    mx.random.seed(12)
    assert mx.array_equal(one, draws.gumbel(0, names(0), tokens(5)))
    assert before.item() == after.item()


def test_draws_pass_through_vmap():
    streams = names(4, 5, 6)
    mapped = mx.vmap(lambda name, position: draws.hashed_gumbel(name, position), in_axes=(0, None))(
        draws.names(0, streams), tokens(9)[0]
    )
    assert mx.array_equal(mapped, draws.gumbel(0, streams, mx.broadcast_to(tokens(9), (3, 9))))
