"""Kernels that choose and copy: `weakest`, `evict_step`, `admit` and the noise, bit for bit as their references."""

import itertools
import math
import os

import mlx.core as mx
import numpy as np
import pytest

from veloxfn import draws, keyformer, ops
from veloxfn.ops import launch
from veloxfn.ops.admit import reference as admit_reference
from veloxfn.ops.evict_step import reference as evict_reference
from veloxfn.ops.key_norms import reference as norms_reference
from veloxfn.ops.noise import _keyed
from veloxfn.ops.weakest import KERNEL, shielded
from veloxfn.ops.weakest import reference as weakest_reference
from veloxfn.testing import emulation
from veloxfn.testing.drive import bits

DEEP = os.environ.get("HYPOTHESIS_PROFILE") == "deep"
SIZES = [1, 2, 31, 32, 33, 513, 2049, 4097]
ROWS = [1, 2, 512]
# Row lengths with batches: every length in a batch of two, every batch with a short and a long row; all of them deep.
SHAPES = list(itertools.product(ROWS, SIZES)) if DEEP else [(2, n) for n in SIZES[:-1]] + [(512, 33), (1, 4097)]
FAR = 2**20  # more recent tokens than there are: `seen - FAR` says which are protected


def on_cpu(function, *arguments, **options):
    """A reference, in MLX's CPU primitives whatever the default device is."""
    with mx.stream(mx.cpu):
        made = function(*arguments, **options)
        mx.eval(made)
    return made


def same(have, want):
    assert have.dtype == want.dtype
    assert have.shape == want.shape
    return np.array_equal(bits(have), bits(want))


def drawn(kind, rows, length, seed=0):
    """Importance [N, n] float32 of a kind."""
    draw = np.random.default_rng(seed)
    special = [0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 1e-42, -1e-42]
    numbers = {
        "normal": lambda: draw.standard_normal((rows, length)),
        "ties": lambda: draw.integers(-1, 2, (rows, length)) / 2,
        "equal": lambda: np.full((rows, length), 0.25),
        "nan": lambda: np.where(draw.random((rows, length)) < 0.5, np.nan, draw.standard_normal((rows, length))),
        "all nan": lambda: np.full((rows, length), np.nan),
        "special": lambda: draw.choice(special, (rows, length)),
        "infinite": lambda: np.full((rows, length), np.inf),
        "zeros": lambda: draw.choice([0.0, -0.0], (rows, length)),
    }[kind]()
    return mx.array(numbers.astype(np.float32))


KINDS = ["normal", "ties", "equal", "nan", "all nan", "special", "infinite", "zeros"]


def placed(protection, rows, length, seed=0):
    """Positions [N, n] in any order and arrivals seen [N], for a sink of 2 and FAR recent tokens.

    "one": all slots but one are protected; "all": every one; "free": some are free.
    """
    draw = np.random.default_rng(seed)
    positions = np.stack([draw.permutation(length) for _ in range(rows)]).astype(np.int32)
    positions = positions.reshape(rows, length) + 1000
    cut = {
        "none": np.full(rows, 10**6),
        "some": draw.integers(1000, 1000 + length, rows),
        "one": np.full(rows, 1001),
        "all": np.full(rows, 0),
        "free": np.full(rows, 10**6),
        "all free": np.full(rows, 10**6),
    }[protection]
    if protection == "free":
        positions[draw.random((rows, length)) < 0.3] = -1
        positions[0, -1] = -1  # the last slot of a row as well
    if protection == "all free":
        positions[:] = -1
    if protection == "some" and length > 2:
        positions[positions == 1001] = 1
    return mx.array(positions), mx.array((cut + FAR).astype(np.int32))


PROTECTIONS = ["none", "some", "one", "all", "free", "all free"]


@pytest.mark.parametrize(("rows", "length"), SHAPES)
def test_weakest_equals_its_reference(backend, rows, length):
    for number, (kind, protection) in enumerate(itertools.product(KINDS, PROTECTIONS)):
        if rows * length > 2**10 and not DEEP and number % 7:  # of large shapes every seventh
            continue
        importance = drawn(kind, rows, length, number)
        positions, seen = placed(protection, rows, length, number)
        have = ops.weakest(importance, positions, seen, sink=2, recent=FAR, backend=backend)
        want = on_cpu(weakest_reference, importance, positions, seen, sink=2, recent=FAR)
        assert same(have, want), (kind, protection)
        if protection == "one":
            where = np.take_along_axis(np.array(positions), np.array(have)[:, None], axis=1)
            assert (where == 1000).all(), "the only slot that is not protected"


@pytest.mark.parametrize(("sink", "recent"), [(0, 5), (4, 28)])
def test_weakest_protects_sinks_and_recent_tokens(backend, sink, recent):
    length = 33
    positions, seen = mx.arange(length, dtype=mx.int32)[None], mx.array([length], mx.int32)
    importance = mx.where(shielded(positions, seen, sink=sink, recent=recent), -1.0, 1.0)
    have = ops.weakest(importance, positions, seen, sink=sink, recent=recent, backend=backend)
    assert have.tolist() == [sink], "the oldest that is not protected"


# What the methods rank by: mass, attention, decay, counted, noise, keep_low.
RULES = {
    "h2o": "mass attention",
    "h2o-fading": "mass attention decay",
    "h2o-observed": "mass attention counted",
    "keyformer-additive": "mass attention noise",
    "tova": "attention",
    "knorm": "mass low",
    "streaming_llm": "",
    "everything": "mass attention decay counted noise low",
    "padded block": "mass",
}


def evidence(rule, rows, length, kind="ties", seed=0):
    """Mass and attention, and the options of a rule; on a grid, so that importances tie."""
    words = RULES[rule].split()
    some = {
        "mass": drawn(kind, rows, length, seed),
        "attention": mx.abs(drawn("ties", rows, length, seed + 1)),
        "decay": (0.5, 0.9, 0.0)[seed % 3],
        "counted": mx.full((rows,), 1000 + length // 2, mx.int32),  # younger slots: at least one query
        "noise": drawn("ties", rows, length, seed + 2),
    }
    given = {word: some[word] for word in words if word != "low"}
    if "decay" in given:
        given["arrived"] = mx.array(np.random.default_rng(seed).integers(-1, 2, (rows, 1)).astype(np.int32))
    if "noise" in given:
        given["tau"] = mx.linspace(2.0, 0.0, rows)
    return (given.pop("mass", None), given.pop("attention", None)), given | {"keep_low": "low" in words}


@pytest.mark.parametrize("rule", RULES)
def test_evict_step_equals_its_reference(backend, rule):
    for number, ((rows, length), protection) in enumerate(itertools.product(SHAPES, PROTECTIONS)):
        if rows * length > 2**10 and not DEEP and number % 5:
            continue
        kind = KINDS[number % len(KINDS)]
        (mass, attention), options = evidence(rule, rows, length, kind, number)
        positions, seen = placed(protection, rows, length, number)
        arguments = (positions, seen, mass, attention)
        have = ops.evict_step(*arguments, **options, sink=2, recent=FAR, backend=backend)
        want = on_cpu(evict_reference, *arguments, **options, sink=2, recent=FAR)
        where = (rows, length, protection, kind)
        assert same(have[1], want[1]), where
        nan = np.isnan(np.array(want[0]))
        assert np.array_equal(np.isnan(np.array(have[0])), nan), where
        assert np.array_equal(bits(have[0])[~nan], bits(want[0])[~nan]), where
        lost = (np.array(have[1]) != np.array(positions)).sum(axis=1)
        assert (lost == (np.array(positions) >= 0).all(axis=1)).all(), "one slot, or none where one is free"


@pytest.mark.parametrize("length", [1, 33, 513])
def test_no_temperature_is_no_noise_bit_for_bit(backend, length):
    positions, seen = placed("some", 3, length)
    mass, attention = drawn("normal", 3, length), mx.abs(drawn("normal", 3, length, 1))
    noise = draws.gumbel(7, mx.arange(3, dtype=mx.uint32), positions)
    options = {"sink": 2, "recent": FAR, "backend": backend}
    plain = ops.evict_step(positions, seen, mass, attention, **options)
    silent = ops.evict_step(positions, seen, mass, attention, noise=noise, tau=mx.zeros(3), **options)
    assert same(silent[0], plain[0])
    assert same(silent[1], plain[1])


@pytest.mark.parametrize("columns", [0, 1, 2, 3])
def test_admit_equals_its_reference(backend, columns):
    for number, (rows, length) in enumerate(SHAPES):
        draw = np.random.default_rng(number)
        positions = np.stack([draw.permutation(length) for _ in range(rows)]).astype(np.int32).reshape(rows, length)
        positions[np.arange(rows), draw.integers(0, length, rows)] = -1
        positions[draw.random((rows, length)) < 0.1 * (number % 2)] = -1
        seen = mx.array(draw.integers(length, 2**29, rows).astype(np.int32))
        given = [(drawn("special", rows, length, i), drawn("special", rows, 1, 9 + i)) for i in range(columns)]
        have = ops.admit(mx.array(positions), seen, given, backend=backend)
        want = on_cpu(admit_reference, mx.array(positions), seen, given)
        assert len(have.columns) == columns
        for one, other in zip((*have[:3], *have.columns), (*want[:3], *want.columns), strict=True):
            assert same(one, other), (rows, length)


@pytest.mark.parametrize(("ranked", "keep_low"), [(True, False), (True, True), (False, False)])
def test_a_loss_is_that_of_evict_step_after_the_arrival(backend, ranked, keep_low):
    for number, (rows, length) in enumerate(SHAPES):
        positions, seen = placed("some", rows, length, number)
        positions = mx.where(mx.arange(length) == length // 2, -1, positions)
        columns = [(drawn("special", rows, length, 1), drawn("special", rows, 1, 9)), (mx.zeros((rows, length)), 1.0)]
        columns = columns[: 2 if ranked else number % 3]
        loses = ops.Loss(ranked, keep_low, sink=number % 3, recent=number % 2)
        have = ops.admit(positions, seen, columns, loses=loses, backend=backend)
        one = ops.admit(positions, seen, columns, backend=backend)
        mass = one.columns[0] if ranked else None
        options = {"keep_low": keep_low, "sink": loses.sink, "recent": loses.recent}
        _, left = on_cpu(evict_reference, one.positions, one.seen, mass, None, **options)
        assert same(have.positions, left), (rows, length)
        assert same(have.positions, on_cpu(admit_reference, positions, seen, columns, None, loses).positions)
        assert same(have.slot, one.slot)
        assert same(have.seen, one.seen)
        assert all(same(*pair) for pair in zip(have.columns, one.columns, strict=True))


def test_a_loss_by_a_column_needs_one():
    with pytest.raises(ValueError, match="needs a column, got none"):
        ops.admit(mx.array([[0, -1]], mx.int32), mx.array([1], mx.int32), loses=ops.Loss(True, False, 0, 0))


# Of norms: sums of up to 256 squares in another order.
NORM_ERROR = {"rtol": 2e-6, "atol": 0.0}


@pytest.mark.parametrize(("dim", "dtype"), [(1, mx.float16), (80, mx.bfloat16), (256, mx.float32)])
def test_the_norm_of_an_arrival_is_that_of_a_block_bit_for_bit(backend, dim, dtype):
    draw = np.random.default_rng(dim)
    keys = mx.array(draw.standard_normal((70, 1, dim)).astype(np.float32)).astype(dtype)
    norms = ops.key_norms(keys, backend=backend)
    assert norms.shape == (70, 1)
    assert np.allclose(norms, on_cpu(norms_reference, keys), **NORM_ERROR)
    positions = mx.where(mx.arange(33) == 7, -1, mx.arange(33, dtype=mx.int32)) * mx.ones((70, 1), mx.int32)
    seen, column = mx.full((70,), 40, mx.int32), drawn("special", 70, 33)
    have = ops.admit(positions, seen, [(column, ops.KeyNorm(keys))], backend=backend)
    assert np.array_equal(have.slot, np.full((70, 1), 7))
    assert np.array_equal(bits(have.columns[0][:, 7]), bits(norms[:, 0]))
    others = np.arange(33) != 7
    assert np.array_equal(bits(have.columns[0])[:, others], bits(column)[:, others])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 60000.0, 0.0])
def test_norms_of_keys_that_hold_anything(backend, bad):
    keys = mx.where(mx.arange(40) == 33, bad, mx.zeros((3, 5, 40))).astype(mx.float16)
    have, want = ops.key_norms(keys, backend=backend), on_cpu(norms_reference, keys)
    assert have.shape == (3, 5)
    assert np.allclose(have, want, **NORM_ERROR, equal_nan=True)


@pytest.mark.parametrize(("rows", "length"), SHAPES)
def test_an_arrival_is_rotated_at_the_number_of_tokens_there(backend, rows, length):
    for protection in ("free", "all free"):
        positions, seen = placed(protection, rows, length, 5)
        positions = mx.where(mx.arange(length) == length - 1, -1, positions)
        rotations = positions + 7
        have = ops.admit(positions, seen, rotations=rotations, backend=backend)
        want = on_cpu(admit_reference, positions, seen, (), rotations)
        assert same(have.rotations, want.rotations)
        entry = np.take_along_axis(np.array(have.rotations), np.array(have.slot), axis=1)
        assert np.array_equal(entry[:, 0], (np.array(positions) >= 0).sum(axis=1))
        assert (np.array(have.rotations) != np.array(rotations)).sum() <= rows


@pytest.mark.parametrize("seed", [0, 7, 2**32, 2**64 - 1])
def test_admit_draws_what_the_draws_say(backend, seed):
    rows, length = 40, 33
    positions = mx.where(mx.arange(length) == 5, -1, mx.arange(length, dtype=mx.int32)) * mx.ones((rows, 1), mx.int32)
    seen = mx.array(np.random.default_rng(0).integers(length, 2**29, rows).astype(np.int32))
    streams = mx.array([0, 1, 2**16, 2**32 - 1] * 10, mx.uint32)
    columns = [(mx.ones((rows, length)), 0.0), (mx.zeros((rows, length)), ops.Gumbel(seed, streams))]
    have = ops.admit(positions, seen, columns, backend=backend)
    want = on_cpu(draws.gumbel, seed, streams, seen[:, None])
    assert np.allclose(have.columns[1][:, 5:6], want, rtol=2e-6, atol=2e-6)
    assert not mx.any(have.columns[0][:, 5])
    assert mx.sum(have.columns[0]).item() == rows * (length - 1)
    assert mx.sum(mx.abs(have.columns[1]) > 0).item() == rows


@pytest.mark.parametrize("kinds", [("gumbel",), ("norm",), ("gumbel", "norm"), ("zero", "norm")])
def test_entries_in_any_order(backend, kinds):
    positions, seen = mx.array([[0, -1, 1], [-1, 0, 1]], mx.int32), mx.array([2, 2], mx.int32)
    keys = mx.random.normal((2, 1, 40), key=mx.random.key(0))
    some = {"norm": ops.KeyNorm(keys), "gumbel": ops.Gumbel(3, mx.arange(2, dtype=mx.uint32)), "zero": 0.0}
    columns = [(drawn("normal", 2, 3, i), some[kind]) for i, kind in enumerate(kinds)]
    have = ops.admit(positions, seen, columns, backend=backend)
    want = on_cpu(admit_reference, positions, seen, columns)
    for one, other in zip(have.columns, want.columns, strict=True):
        assert np.allclose(one, other, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(
    "settings",
    [
        {"tau_init": 0.5, "tau_end": 2.0, "anneal_steps": 9},
        {"tau_init": 3.0, "tau_end": 0.7, "anneal_steps": 7, "anneal_from": 4},
        {"tau_init": 0.1, "anneal_steps": 0},
        {"tau": 0.3},
        {"tau": 0.0},
        {"tau_init": 0.0, "tau_end": 1.0, "anneal_steps": 2**31 - 1},
        {"anneal_from": 2**31 - 1},
    ],
)
def test_a_schedule_is_its_temperatures_bit_for_bit(backend, settings):
    config = keyformer.Config(budget=8, noise="additive", **settings)
    seen = mx.array([1, 2, 5, 8, 9, 10, 11, 40, 2**20], mx.int32)
    tau = on_cpu(keyformer.temperature, config, mx.maximum(seen - 1 - config.anneal_from, 0))
    positions, mass = mx.zeros((9, 33), mx.int32) + mx.arange(33, dtype=mx.int32), drawn("normal", 9, 33)
    noise, options = drawn("normal", 9, 33, 1), {"sink": 0, "recent": 0, "backend": backend}
    given = ops.evict_step(positions, seen, mass, noise=noise, tau=tau, **options)
    made = ops.evict_step(
        positions, seen, mass, noise=noise, tau=tau, schedule=keyformer.schedule_of(config), **options
    )
    assert same(made[1], given[1])
    first, rise, falls, steps, start = keyformer.schedule_of(config).template.values()
    source = f"""
        const uint lane = thread_position_in_threadgroup.x;
        const float rise = as_type<float>({rise}u);
        const float first = as_type<float>({first}u);
        if (lane < uint(seen_shape[0])) {{
          made[lane] = temperature(first, {int(falls)} ? -rise : rise, {steps}, {start}, seen[lane] - 1);
        }}
    """
    have = probe(backend, source, {"made": (seen.shape, mx.float32)}, seen=seen)
    assert same(have[0], tau)


def probe(backend, source, outputs, **inputs):
    """A body behind the header that all kernels have, over 256 lanes."""
    header = launch.source_of(KERNEL, backend)[0]
    if backend == "host":
        return emulation.run_source(
            header,
            source,
            list(inputs),
            list(outputs),
            list(inputs.values()),
            list(outputs.values()),
            template={},
            groups=(1, 1, 1),
            threads=256,
        )
    make = mx.fast.metal_kernel if backend == "metal" else mx.fast.cuda_kernel
    call = make(
        name=f"probe_{'_'.join(outputs)}",
        input_names=list(inputs),
        output_names=list(outputs),
        header=header,
        source=source,
    )
    return call(
        inputs=list(inputs.values()),
        grid=(256, 1, 1),
        threadgroup=(256, 1, 1),
        output_shapes=[shape for shape, _ in outputs.values()],
        output_dtypes=[dtype for _, dtype in outputs.values()],
    )


def test_noise_is_that_of_the_draws(backend):
    count = 20_000
    draw = np.random.default_rng(0)
    positions = draw.integers(-1, 2**30, count).astype(np.int32)
    positions[:300] = np.arange(-1, 299)
    names = draw.integers(0, 2**64, count, dtype=np.uint64)
    names[:4] = [0, 1, 2**64 - 1, 2**32]
    source = """
        const uint lane = thread_position_in_threadgroup.x;
        for (uint i = lane; i < uint(positions_shape[0]); i += 256) {
          drawn_bits[i] = keyed(names[2 * i], names[2 * i + 1], positions[i]);
          gumbel[i] = hashed_gumbel(names[2 * i], names[2 * i + 1], positions[i]);
        }
    """
    have, gumbel = probe(
        backend,
        source,
        {"drawn_bits": ((count,), mx.uint32), "gumbel": ((count,), mx.float32)},
        positions=mx.array(positions),
        names=mx.array(names).view(mx.uint32),
    )
    arguments = mx.array(names), mx.array(positions)
    assert mx.array_equal(have, on_cpu(_keyed, *arguments)), "the bits exactly"
    assert np.allclose(gumbel, on_cpu(draws.hashed_gumbel, *arguments), rtol=2e-6, atol=2e-6)
    assert mx.all(mx.isfinite(gumbel))


def test_names_are_those_of_the_draws(backend):
    draw = np.random.default_rng(1)
    streams, heads, when = (mx.array(draw.integers(0, 2**32, 256, dtype=np.uint32)) for _ in range(3))
    streams = mx.where(mx.arange(256) < 2, mx.array([0, 2**32 - 1] * 128, mx.uint32), streams)
    source = """
        const uint i = thread_position_in_threadgroup.x;
        const ulong name = named(named(named(name_of(seed), streams[i]), heads[i]), when[i]);
        name_low[i] = uint(name);
        name_high[i] = uint(name >> 32);
    """
    for seed in (0, 1, 2**32, 2**64 - 1):
        low, high = probe(
            backend,
            source,
            {"name_low": ((256,), mx.uint32), "name_high": ((256,), mx.uint32)},
            seed=mx.array([seed & 0xFFFFFFFF, seed >> 32], mx.uint32),
            streams=streams,
            heads=heads,
            when=when,
        )
        want = on_cpu(draws.names, seed, streams, heads, when)
        assert mx.array_equal(low, want.astype(mx.uint32))
        assert mx.array_equal(high, (want >> 32).astype(mx.uint32))
