"""Kernels that attend: `attend`, `attend_step`, `attention_mass`, against float64 and against their references."""

import importlib
import itertools
import math
import os

import mlx.core as mx
import numpy as np
import pytest

from veloxfn import draws, keyformer
from veloxfn.ops import Temper, attend, attend_step, attention_mass, evict_step
from veloxfn.ops.attend import reference as attend_reference
from veloxfn.ops.attention_mass import Recipe
from veloxfn.testing.drive import UNIT, bits

ATTEND = importlib.import_module("veloxfn.ops.attend")
MASS = importlib.import_module("veloxfn.ops.attention_mass")
DEEP = os.environ.get("HYPOTHESIS_PROFILE") == "deep"
FAR = 2**20  # more recent tokens than there are: `seen - FAR` says which are protected

DTYPES = [mx.float32, mx.float16, mx.bfloat16]
DIMS = [(32, 32), (64, 33), (80, 80), (96, 1), (128, 128), (256, 200)]
SIZES = [1, 2, 31, 32, 33, 513, 2049, 4097]
TEMPERS = ["plain", "warm", "noisy"]
HEADS = [(1, 1), (2, 1), (1, 3), (3, 4)]  # query heads and queries: of 12, a threadgroup takes 8 or 4

# Of masses. Logits of up to 60 are sums of up to 256 products, rounded to float32, and an exponential makes an absolute
# error of a logit a relative one of a weight: 256 roundings of 60 would be 9e-4, their random walk is 6e-5.
MASS_ERROR = {"rtol": 1e-4, "atol": 1e-7}
LOUD = {"rtol": 1e-3, "atol": 1e-6}  # logits of 1000
# Of outputs, in units of the largest value: masses' error, and the rounding to the dtype.
OUTPUT_ERROR = 2e-5


def unit_of(dtype):
    return OUTPUT_ERROR + (0 if dtype == mx.float32 else UNIT[dtype])


def on_cpu(function, *arguments, **options):
    """A reference, in MLX's CPU primitives whatever the default device is; float32 products on CUDA are TF32."""
    with mx.stream(mx.cpu):
        made = function(*arguments, **options)
        mx.eval(made)
    return made


def tempered(kind, rows, groups, count):
    tau = mx.linspace(0.5, 2.0, rows * count).reshape(rows, count)
    names = draws.names(3, mx.arange(rows)[:, None, None], mx.arange(groups)[:, None], mx.arange(count))
    return {"plain": None, "warm": Temper(tau), "noisy": Temper(tau, names)}[kind]


def case(rows, groups, count, length, dim, value_dim, dtype, *, seed=0, grid=False):
    """Queries as models make them, heads behind tokens; slots in any order, some free, some not finite."""
    draw = np.random.default_rng([seed, rows, groups, count, length, dim])

    def array(*shape):
        numbers = draw.integers(-8, 9, shape) / 4 if grid else draw.standard_normal(shape)
        return mx.array(numbers.astype(np.float32)).astype(dtype)

    queries = array(rows, count, groups, dim).swapaxes(1, 2)
    keys, values = array(rows, length + 3, dim)[:, 1 : length + 1], array(rows, length, value_dim)
    positions = np.stack([draw.permutation(length) for _ in range(rows)]).astype(np.int32).reshape(rows, length)
    if length > 2:
        positions[draw.random((rows, length)) < 0.1] = -1
        bad = draw.choice([0.0, math.inf, -math.inf, math.nan], (rows, length, 1), p=[0.91, 0.03, 0.03, 0.03])
        bad[:, :3] = 0.0
        keys = keys + mx.array(bad.astype(np.float32)).astype(dtype)
    until = np.sort(draw.integers(0, length, (rows, count)), axis=1).astype(np.int32)
    until[:, -1] = 2**30
    if count > 2:
        until[:, 0] = -1  # sees nothing
    return queries, keys, values, mx.array(positions), mx.array(until)


def floats(array):
    return np.array(array.astype(mx.float32)).astype(np.float64)


def truth(queries, keys, values, positions, until, *, scale=None, temper=None, weights=None):
    """Output and mass in float64."""
    scale = queries.shape[3] ** -0.5 if scale is None else scale
    with np.errstate(invalid="ignore"):
        logits = np.einsum("ngsd,nmd->ngsm", floats(queries), floats(keys)) * scale
    slots = np.array(positions)[:, None, None]
    visible = (slots >= 0) & (slots <= np.array(until)[:, None, :, None]) & np.isfinite(logits)

    def shares(x):
        x = np.where(visible, x, -np.inf)
        top = x.max(axis=-1, keepdims=True)
        powers = np.where(visible, np.exp(x - np.where(np.isfinite(top), top, 0)), 0)
        return powers / np.maximum(powers.sum(axis=-1, keepdims=True), 1e-300)

    plain = shares(np.where(visible, logits, 0))
    mass = plain
    if temper is not None:
        noise = 0.0
        if temper.names is not None:
            noise = floats(draws.hashed_gumbel(temper.names[..., None], positions[:, None, None]))
        mass = shares((np.where(visible, logits, 0) + noise) / floats(temper.tau)[:, None, :, None])
    mass = mass.mean(axis=1)
    weighted = mass if weights is None else mass * floats(weights)[..., None]
    return np.einsum("ngsm,nmd->ngsd", plain, floats(values)), weighted.sum(axis=1)


def assert_near(have, want, values, positions):
    output, mass = (floats(array) for array in have)
    largest = max(1.0, float(mx.max(mx.abs(values.astype(mx.float32))).item()))
    assert np.allclose(output, want[0], rtol=0, atol=unit_of(have[0].dtype) * largest)
    assert np.allclose(mass, want[1], **MASS_ERROR)
    assert have[1].dtype == mx.float32
    assert (mass[np.array(positions) < 0] == 0).all(), "a free slot receives nothing"


# A latin square of the kernel's templates, each run with a third of the lengths: every pair of dtype, dims, length and
# temper occurs.
TEMPLATES = [
    (DTYPES[k], DIMS[d], TEMPERS[(d + 2 * k) % 3], HEADS[(d + d // 3 + k) % 4], SIZES[(d + k) % 3 :: 3])
    for d in range(6)
    for k in range(3)
]
if DEEP:
    TEMPLATES = [(*some, SIZES) for some in itertools.product(DTYPES, DIMS, TEMPERS, HEADS)]


@pytest.mark.parametrize(("dtype", "dims", "temper", "heads", "sizes"), TEMPLATES)
def test_attend_is_right(backend, dtype, dims, temper, heads, sizes):
    groups, count = heads
    for number, length in enumerate(sizes):
        rows = [1, 2, 5][number % 3] if length < 2000 else 1
        many = groups * count * length * max(dims) > 2**21  # a second in the emulation
        if many and backend == "host" and not DEEP:
            length, rows = 700, 1
        given = case(rows, groups, count, length, *dims, dtype)
        how = tempered(temper, rows, groups, count)
        want = truth(*given, temper=how)
        have = attend(*given, temper=how, backend=backend)
        assert have[0].dtype == dtype
        assert have[0].shape == (rows, groups, count, dims[1])
        assert_near(have, want, given[2], given[3])
        assert_near(on_cpu(attend_reference, *given, temper=how), want, given[2], given[3])


@pytest.mark.parametrize("rows", [512, 511])
@pytest.mark.parametrize("temper", TEMPERS if DEEP else ["plain", "noisy"])
def test_attend_of_many_rows(backend, rows, temper):
    given = case(rows, 2, 1, 33, 32, 32, mx.float32)
    how = tempered(temper, rows, 2, 1)
    assert_near(attend(*given, temper=how, backend=backend), truth(*given, temper=how), given[2], given[3])


@pytest.mark.parametrize(("groups", "count"), [(128, 1), (5, 25), (129, 1), (3, 43)])
def test_attend_of_many_heads(backend, groups, count):
    """Up to 128 by the kernels, more by the reference."""
    given = case(1, groups, count, 70, 32, 5, mx.float32)
    assert_near(attend(*given, backend=backend), truth(*given), given[2], given[3])


@pytest.mark.parametrize("temper", TEMPERS if DEEP else ["plain", "noisy"])
def test_a_long_block_without_padding_goes_through_mlx(backend, temper):
    """Products exact in TF32."""
    queries, keys, values, positions, until = block(2, 3, 65, 120, 64, mx.float16, padded=False)
    keys = mx.where(mx.abs(keys) < math.inf, keys, 1)
    how = tempered(temper, 2, 3, 65)
    for scale in (None, 0.0625):
        have = attend(queries, keys, values, positions, scale=scale, temper=how, backend=backend)
        assert_near(have, truth(queries, keys, values, positions, until, scale=scale, temper=how), values, positions)


@pytest.mark.parametrize("temper", TEMPERS)
@pytest.mark.parametrize("elements", [1, 7 * 40 * 4, 2**22])
def test_the_reference_by_tiles(monkeypatch, temper, elements):
    monkeypatch.setattr(ATTEND, "_MATRIX_ELEMENTS", elements)
    given = case(2, 2, 17, 40, 32, 5, mx.float32)
    how = tempered(temper, 2, 2, 17)
    have = on_cpu(attend, *given, temper=how, backend="reference")
    assert_near(have, truth(*given, temper=how), given[2], given[3])


@pytest.mark.parametrize(("dtype", "scale"), [(mx.float32, 0.03), (mx.float16, 3.0)])
def test_the_scale_is_that_of_the_products(backend, dtype, scale):
    given = case(2, 3, 2, 40, 64, 33, dtype)
    want = truth(*given, scale=scale)
    assert_near(attend(*given, scale=scale, backend=backend), want, given[2], given[3])
    assert_near(on_cpu(attend_reference, *given, scale=scale), want, given[2], given[3])


def test_without_until_the_queries_are_the_last_slots_or_one_token_anywhere(backend):
    queries, keys, values, _, _ = case(2, 2, 3, 40, 32, 32, mx.float32, grid=True)
    positions = mx.where(mx.arange(40) == 3, -1, mx.arange(40, dtype=mx.int32)) * mx.ones((2, 1), mx.int32)
    have = attend(queries, keys, values, positions, backend=backend)
    want = truth(queries, keys, values, positions, positions[:, 37:])
    assert_near(have, want, values, positions)
    one, anywhere = queries[:, :, :1], mx.where(positions < 0, -1, 39 - positions)
    have = attend(one, keys, values, anywhere, backend=backend)
    assert_near(have, truth(one, keys, values, anywhere, mx.full((2, 1), 99)), values, anywhere)


@pytest.mark.parametrize("temper", TEMPERS if DEEP else ["plain", "noisy"])
def test_queries_that_see_nothing_give_zeros(backend, temper):
    queries, keys, values, positions, until = case(2, 2, 3, 40, 32, 32, mx.float32)
    how = tempered(temper, 2, 2, 3)
    for some in ((positions, mx.full(until.shape, -1)), (mx.full(positions.shape, -1), until)):
        output, mass = attend(queries, keys, values, *some, temper=how, backend=backend)
        assert not mx.any(output), "not -0.0 either, nor NaN"
        assert not mx.any(mass)
        assert not mx.any(attention_mass(queries, keys, *some, None, how, backend=backend))
    broken = mx.full(keys.shape, math.inf, keys.dtype)
    output, mass = attend(queries, broken, values, positions, until, temper=how, backend=backend)
    assert not mx.any(output)
    assert not mx.any(mass)


@pytest.mark.parametrize("temper", TEMPERS if DEEP else ["plain", "noisy"])
def test_what_a_query_does_not_see_does_not_drown_what_it_sees(backend, monkeypatch, temper):
    """A later slot and a free one whose weights would be e**300 of the others."""
    monkeypatch.setattr(MASS, "_TILE_QUERIES", 20)
    monkeypatch.setattr(MASS, "_KERNEL_ELEMENTS", 1)
    queries, keys, values, positions, until = block(2, 3, 24, 90, 64, mx.float16)
    loud = mx.full((1, 90, 64), 100.0, mx.float16)
    queries = mx.abs(queries)
    keys = mx.where(((mx.arange(90) == 80) | (positions < 0))[..., None], loud, keys)
    positions = mx.where(mx.arange(90) == 80, 80, positions)
    how = tempered(temper, 2, 3, 24)
    want = truth(queries, keys, values, positions, until, temper=how)
    assert (want[1][:, :70].max(axis=1) > 0.5).all(), "of the queries before it"
    assert np.allclose(attention_mass(queries, keys, positions, until, None, how, backend=backend), want[1], **LOUD)
    assert_near(attend(queries, keys, values, positions, until, temper=how, backend=backend), want, values, positions)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("count", [1, 40])  # parts of a row; a tile of products
def test_a_product_that_its_temperature_makes_infinite_takes_part_in_no_mass(backend, dtype, count):
    keys = np.ones((1, 48, 4), np.float32)
    keys[0, 1], keys[0, 2, 0] = 50, 3e38  # a heavy one; finite, but not over 0.25
    keys, queries = mx.array(keys).astype(dtype), mx.ones((1, 1, count, 4), dtype)
    positions = mx.arange(48, dtype=mx.int32)[None]
    until, temper = mx.arange(48 - count, 48, dtype=mx.int32)[None], Temper(mx.full((1, count), 0.25))
    mass = on_cpu(attention_mass, queries, keys, positions, until, None, temper, backend="reference")
    assert mass[0, 1].item() == pytest.approx(count)
    assert mass[0, 2].item() == 0
    have = attention_mass(queries, keys, positions, until, None, temper, backend=backend)
    assert np.allclose(floats(have), floats(mass), **MASS_ERROR)
    if count == 1:
        values, seen = mx.ones((1, 48, 4), dtype), mx.array([48])
        _, mass, left = attend_step(
            queries, keys, values, positions, seen, mx.ones((1, 48)), temper=temper, sink=0, recent=1, backend=backend
        )
        assert mass[0, 1].item() == 2
        assert left.tolist() == [[-1, *range(1, 48)]]


def test_equal_keys_receive_equal_masses(backend):
    keys = mx.full((1, 700, 32), 0.25, mx.float16)
    given = mx.ones((1, 4, 1, 32), mx.float16), keys, keys, mx.arange(700, dtype=mx.int32)[None]
    output, mass = attend(*given, backend=backend)
    assert len(np.unique(np.array(mass))) == 1
    assert mx.array_equal(output, mx.full(output.shape, 0.25, mx.float16))


STEPS = {
    "h2o": "mass",
    "h2o-fading": "mass decay",
    "h2o-observed": "mass counted",
    "keyformer-logit": "mass noisy",
    "keyformer-silent": "mass warm",
    "keyformer-additive": "mass noise",
    "tova": "",
}


def rule(name, rows, groups, positions, seed=0):
    """Mass and options of `attend_step`, on a grid."""
    words, length = STEPS[name].split(), positions.shape[1]
    draw = np.random.default_rng(seed)
    mass = mx.array(draw.integers(0, 4, (rows, length)).astype(np.float32) / 2) if "mass" in words else None
    options = {
        "decay": 0.9 if "decay" in words else 1.0,
        "arrived": mx.arange(rows, dtype=mx.int32)[:, None] - 1 if "decay" in words else None,  # the first one padded
        "counted": mx.full((rows,), length + 1, mx.int32) if "counted" in words else None,
        "noise": draws.gumbel(5, mx.arange(rows), positions) if "noise" in words else None,
        "tau": mx.linspace(0.0, 2.0, rows) if "noise" in words else None,
    }
    return mass, tempered(next((word for word in words if word in TEMPERS), "plain"), rows, groups, 1), options


@pytest.mark.parametrize("name", STEPS)
def test_attend_step_loses_what_the_reference_loses(backend, name):
    """Keys and queries on a grid with exact products: equal keys tie bit for bit, others differ clearly."""
    sizes = list(itertools.product([1, 2, 512], SIZES)) if DEEP else [(3, n) for n in (1, 2, 31, 33, 300)] + [(1, 1025)]
    for number, (rows, length) in enumerate(sizes):
        queries, keys, values, _, _ = case(rows, 2, 1, length, 64, 33, mx.float16, grid=True, seed=number)
        draw = np.random.default_rng(number)
        # Few different keys: ties; all of them equal in one of the cases.
        keys = keys[:, :3][:, mx.array(draw.integers(0, min(length, 3) if number != 2 else 1, length))]
        positions = np.stack([draw.permutation(length) for _ in range(rows)]).astype(np.int32).reshape(rows, length)
        if length > 5:
            positions[0, 4] = -1  # a row that loses nothing
        positions = mx.array(positions)
        mass, temper, options = rule(name, rows, 2, positions, number)
        queries = queries * 0.25
        # All but one are protected in the second row.
        last = mx.where(mx.arange(rows) == 1, 3, length) + FAR
        given = (queries, keys, values, positions, last.astype(mx.int32), mass)
        more = options | {"temper": temper, "sink": 2, "recent": FAR}
        have = attend_step(*given, **more, backend=backend)
        want = on_cpu(attend_step, *given, **more, backend="reference")
        assert np.array_equal(have[2], want[2]), (rows, length)
        assert np.allclose(have[1], want[1], rtol=1e-5, atol=1e-6)
        assert np.allclose(floats(have[0]), floats(want[0]), rtol=0, atol=2 * unit_of(mx.float16))


@pytest.mark.parametrize("name", STEPS)
def test_attend_step_is_attend_and_then_evict_step(backend, name):
    queries, keys, values, positions, _ = case(2, 2, 1, 70, 64, 33, mx.float16)
    mass, temper, options = rule(name, 2, 2, positions)
    options |= {"sink": 2, "recent": FAR}
    seen = mx.array([60, 70], mx.int32) + FAR
    padded = options["arrived"]
    until = None if padded is None else mx.where(padded >= 0, mx.full(padded.shape, 2**30, mx.int32), -1)
    output, attention = attend(queries, keys, values, positions, until, temper=temper, backend=backend)
    want = evict_step(positions, seen, mass, attention, **options, backend=backend)
    have = attend_step(queries, keys, values, positions, seen, mass, temper=temper, **options, backend=backend)
    assert np.array_equal(bits(have[0]), bits(output))
    assert np.array_equal(have[2], want[1])
    # One text in two kernels, which CUDA and Metal may contract differently.
    assert np.array_equal(have[1], want[0]) if backend == "host" else np.allclose(have[1], want[0], rtol=1e-6)


def test_keyformer_at_no_temperature_is_h2o_bit_for_bit(backend):
    queries, keys, values, positions, _ = case(3, 2, 1, 70, 64, 33, mx.float16)
    seen, mass = mx.full((3,), 60 + FAR, mx.int32), mx.random.uniform(shape=(3, 70), key=mx.random.key(0))
    options = {"sink": 2, "recent": FAR, "backend": backend}
    plain = attend_step(queries, keys, values, positions, seen, mass, **options)
    noise = draws.gumbel(5, mx.arange(3), positions)
    silent = attend_step(queries, keys, values, positions, seen, mass, noise=noise, tau=mx.zeros(3), **options)
    for one, other in zip(silent, plain, strict=True):
        assert np.array_equal(bits(one), bits(other))


@pytest.mark.parametrize("noise", ["none", "logit"])
@pytest.mark.parametrize("groups", [9, 1] if DEEP else [9])
def test_kernels_make_the_temper_of_the_newest_token_themselves(backend, noise, groups):
    """What they make is what they are given otherwise, bit for bit."""
    config = keyformer.Config(
        budget=80, noise=noise, tau_init=0.4, tau_end=2.0, anneal_steps=50, anneal_from=30, seed=11
    )
    queries, keys, values, positions, _ = case(4, groups, 1, 70, 64, 33, mx.float16)
    seen, streams = mx.array([1, 40, 70, 5000], mx.int32), mx.array([0, 1, 2**17 + 3, 2**32 - 1], mx.uint32)
    tau = keyformer.temperature(config, mx.maximum(seen - 1 - config.anneal_from, 0))[:, None]
    heads = mx.arange(groups)[:, None]
    names = draws.names(config.seed, streams[:, None, None], heads, (seen - 1)[:, None, None])
    names = names if noise == "logit" else None
    recipe = Recipe(seen, keyformer.schedule_of(config), config.seed if noise == "logit" else None, streams)
    given, made = Temper(tau, names), Temper(tau, names, recipe)
    until = mx.full((4, 1), 2**30)
    want = truth(queries, keys, values, positions, until, temper=given)
    last = (positions, seen, mx.zeros(positions.shape))
    calls = {
        "attend": lambda temper: attend(queries, keys, values, positions, temper=temper, backend=backend),
        "step": lambda temper: attend_step(
            queries, keys, values, *last, temper=temper, sink=1, recent=2, backend=backend
        ),
    }
    assert_near(calls["attend"](made), want, values, positions)
    for name, call in calls.items():
        for one, other in zip(call(made), call(given), strict=True):
            # Two kernels, which CUDA and Metal may contract differently.
            assert np.allclose(floats(one), floats(other), rtol=0 if backend == "host" else 1e-5, atol=0), name


@pytest.mark.parametrize(("keep_low", "massive"), [(False, False), (False, True), (True, True)])
def test_attend_step_of_a_ranking_without_attention(backend, keep_low, massive):
    """K-norm's and StreamingLLM's."""
    for length in (5, 33, 513):
        queries, keys, values, positions, _ = case(3, 2, 1, length, 64, 33, mx.float16)
        seen = mx.full((3,), length, mx.int32)
        draw = np.random.default_rng(length)
        mass = mx.array(draw.integers(0, 4, (3, length)).astype(np.float32)) if massive else None
        options = {"keep_low": keep_low, "sink": 1, "recent": 3}
        given = (queries, keys, values, positions, seen, mass)
        have = attend_step(*given, attended=False, **options, backend=backend)
        want = evict_step(positions, seen, mass, **options, backend="reference")
        assert np.array_equal(have[2], want[1])
        assert np.array_equal(have[1], want[0])
        output = truth(queries, keys, values, positions, mx.full((3, 1), 2**30))[0]
        assert np.allclose(floats(have[0]), output, rtol=0, atol=4 * unit_of(mx.float16))


def test_attend_step_refuses_nonsense(backend):
    queries, keys, values, positions, _ = case(1, 2, 2, 9, 32, 32, mx.float32)
    seen, options = mx.array([9], mx.int32), {"sink": 0, "recent": 0, "backend": backend}
    with pytest.raises(ValueError, match="one token, got S = 2"):
        attend_step(queries, keys, values, positions, seen, None, **options)
    with pytest.raises(ValueError, match="noise and tau go together"):
        attend_step(queries[:, :, :1], keys, values, positions, seen, None, tau=mx.ones(1), **options)
    with pytest.raises(ValueError, match="noise and tau go together"):
        evict_step(positions, seen, None, noise=mx.zeros((1, 9)), **options)


def block(rows, groups, count, length, dim, dtype, seed=0, padded=True):
    """The arrivals of a block come last, in order; before them slots in any order. Products are exact in TF32."""
    queries, keys, values, _, _ = case(rows, groups, count, length, dim, 1, mx.bfloat16, seed=seed)
    draw = np.random.default_rng(seed)
    kept = length - count
    positions = np.stack([draw.permutation(kept) for _ in range(rows)]).reshape(rows, kept)
    if padded:
        positions[draw.random(positions.shape) < 0.2] = -1
    own = np.broadcast_to(np.arange(kept, length), (rows, count)).copy()
    own[:, 1 if padded else count :: 7] = -1
    positions = np.concatenate([positions, own], axis=1).astype(np.int32)
    return queries.astype(dtype), keys.astype(dtype), values, mx.array(positions), mx.array(own.astype(np.int32))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("temper", TEMPERS)
@pytest.mark.parametrize(
    ("rows", "groups", "count", "length", "dim", "dtype"),
    [
        (2, 4, 8, 70, 80, mx.float32),  # few: by attend's kernels
        (2, 2, 17, 17, 80, mx.float32),  # more: by tiles of 5
        (1, 3, 40, 513, 64, mx.bfloat16),
        (3, 5, 33, 161, 96, mx.float16),
    ],
)
def test_attention_mass_is_right(backend, monkeypatch, weighted, temper, rows, groups, count, length, dim, dtype):
    monkeypatch.setattr(MASS, "_TILE_QUERIES", 5)
    monkeypatch.setattr(MASS, "_KERNEL_ELEMENTS", 1)
    queries, keys, values, positions, until = block(rows, groups, count, length, dim, dtype)
    how = tempered(temper, rows, groups, count)
    weights = mx.linspace(0.1, 1.0, rows * count).reshape(rows, count) if weighted else None
    have = attention_mass(queries, keys, positions, until, weights, how, backend=backend)
    want = truth(queries, keys, values, positions, until, temper=how, weights=weights)[1]
    assert have.shape == positions.shape
    assert np.allclose(have, want, **MASS_ERROR)
    assert not mx.any(mx.where(positions < 0, have, 0))
    reference = on_cpu(attention_mass, queries, keys, positions, until, weights, how, backend="reference")
    assert np.allclose(reference, want, **MASS_ERROR)


@pytest.mark.parametrize("temper", TEMPERS if DEEP else ["noisy"])
def test_tiles_and_single_passes_agree(backend, monkeypatch, temper):
    """However a block is cut, and whichever kernels take it."""
    queries, keys, _, positions, until = block(2, 3, 24, 90, 64, mx.float16)
    how = tempered(temper, 2, 3, 24)
    want = attention_mass(queries, keys, positions, until, None, how, backend=backend)
    for tile, few in ((1, 32), (7, 32), (23, 32), (24, 32), (5, 128)):
        monkeypatch.setattr(MASS, "_TILE_QUERIES", tile)
        monkeypatch.setattr(MASS, "_KERNEL_ELEMENTS", 1)
        monkeypatch.setattr(MASS, "_FEW_QUERIES", few)
        have = attention_mass(queries, keys, positions, until, None, how, backend=backend)
        assert np.allclose(have, want, rtol=1e-5, atol=1e-7), (tile, few)


def test_every_length_through_tiles(backend, monkeypatch):
    monkeypatch.setattr(MASS, "_TILE_QUERIES", 16)
    monkeypatch.setattr(MASS, "_KERNEL_ELEMENTS", 1)
    monkeypatch.setattr(MASS, "_FEW_QUERIES", 0)
    sizes = [*SIZES, 9001, 16384]  # the last two: 32 slots a lane, as many as there are registers for
    for length, rows in [*((n, 1 if n > 999 else 2) for n in sizes), (40, 512 if backend != "host" or DEEP else 130)]:
        count = min(length, 17 if length < 9000 else 3)
        queries, keys, values, positions, until = block(rows, 2, count, length, 32, mx.float16, seed=length)
        have = attention_mass(queries, keys, positions, until, backend=backend)
        assert np.allclose(have, truth(queries, keys, values, positions, until)[1], **MASS_ERROR), length
