"""The host emulation of kernels: what it computes, and what it must not let pass."""

import mlx.core as mx
import numpy as np
import pytest

from veloxfn.ops.launch import Kernel, source_of
from veloxfn.testing import emulation
from veloxfn.testing.emulation import KernelError, run, run_source

pytestmark = pytest.mark.skipif(not emulation.available(), reason="backend host needs g++ on Linux")

HEADER = source_of(Kernel("weakest", (), ()), "host")[0]
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
SUM = """
threadgroup float parts[32];
const uint lane = thread_position_in_threadgroup.x, lanes = threads_per_threadgroup.x;
float sum = 0;
for (int i = lane; i < values_shape[1]; i += lanes)
  sum += float(values[threadgroup_position_in_grid.x * values_shape[1] + i]);
sum = simd_sum(sum);
if (thread_index_in_simdgroup == 0) parts[simdgroup_index_in_threadgroup] = sum;
threadgroup_barrier(mem_flags::mem_threadgroup);
float all = 0;
for (uint i = 0; i < lanes / 32; i++) all += parts[i];
if (lane == 0) out[threadgroup_position_in_grid.x] = T(all);
"""


def one(body, inputs=(), output=((64,), mx.float32), *, template=None, groups=(1, 1, 1), threads=64, order=None):
    """The output `out` of a body; the inputs are called a, b, c."""
    (out,) = run_source(
        HEADER,
        body,
        ["a", "b", "c"][: len(inputs)],
        ["out"],
        list(inputs),
        [output],
        template=template or {},
        groups=groups,
        threads=threads,
        order=order,
    )
    return out


def bits(array):
    return np.array(mx.view(array, mx.uint16))


# ---- what it computes ----


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_a_reduction_of_any_width(dtype):
    for threads in (32, 64, 96, 256, 1024):
        values = mx.array(np.random.default_rng(threads).integers(-4, 5, (3, 777)).astype(np.float32)).astype(dtype)
        (out,) = run_source(
            HEADER,
            SUM,
            ["values"],
            ["out"],
            [values],
            [((3,), dtype)],
            template={"T": dtype},
            groups=(3, 1, 1),
            threads=threads,
        )
        assert out.dtype == dtype
        np.testing.assert_array_equal(np.array(out.astype(mx.float32)), np.array(values.astype(mx.float32).sum(1)))


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_every_16_bit_pattern_widens_as_in_mlx_and_comes_back(dtype):
    patterns = mx.arange(65536, dtype=mx.uint32).astype(mx.uint16)
    values = mx.view(patterns, dtype)
    at = "const uint i = threadgroup_position_in_grid.x * 256 + thread_position_in_threadgroup.x;"
    wide = one(
        f"{at} out[i] = float(a[i]);", [values], ((65536,), mx.float32), groups=(256, 1, 1), threads=256, order=0
    )
    np.testing.assert_array_equal(np.array(wide), np.array(values.astype(mx.float32)))  # a NaN equals a NaN
    back = one(f"{at} out[i] = a[i];", [wide], ((65536,), dtype), groups=(256, 1, 1), threads=256, order=0)
    number = ~np.isnan(np.array(wide))
    np.testing.assert_array_equal(bits(back)[number], np.array(patterns)[number])
    assert np.isnan(np.array(back.astype(mx.float32)))[~number].all()


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_floats_round_to_16_bits_as_in_mlx(dtype):
    # Around every tie of some exponents, into the subnormal numbers and beyond the largest.
    draw = np.random.default_rng(0)
    middle = (draw.integers(0, 1 << 16, 8192).astype(np.uint32) << 16) | 0x1000
    near = np.concatenate([middle, middle ^ 0x9000, middle + 1, middle - 1])
    any_bits = draw.integers(0, 1 << 32, 32768 - 1024, dtype=np.uint32)
    edges = np.array(
        [65504, 65519.996, 65520, 65536, 2**-24, 2**-25, 2**-25 * 1.001, 3 * 2**-25, 6.1e-5, 0], np.float32
    )
    special = np.resize(np.concatenate([edges, -edges, [np.inf, -np.inf, np.nan]]).astype(np.float32), 1024)
    floats = mx.array(np.concatenate([near, any_bits, special.view(np.uint32)]).view(np.float32))
    out = one(
        "const uint i = threadgroup_position_in_grid.x * 256 + thread_position_in_threadgroup.x; out[i] = a[i];",
        [floats],
        ((65536,), dtype),
        groups=(256, 1, 1),
        threads=256,
        order=0,
    )
    number = ~np.isnan(np.array(floats))
    np.testing.assert_array_equal(bits(out)[number], bits(floats.astype(dtype))[number])
    assert np.isnan(np.array(out.astype(mx.float32)))[~number].all()


def test_arithmetic_of_halves_rounds_every_step_and_with_floats_does_not():
    a, b = (mx.array(np.random.default_rng(i).normal(size=64), mx.float16) for i in (1, 2))
    body = "const uint i = thread_position_in_threadgroup.x; half x = a[i] * b[i] + a[i]; x -= b[i]; out[i] = x;"
    np.testing.assert_array_equal(np.array(one(body, [a, b], ((64,), mx.float16))), np.array(a * b + a - b))
    body = "const uint i = thread_position_in_threadgroup.x; out[i] = a[i] * float(b[i]) + 1.0;"
    wide = a.astype(mx.float32) * b.astype(mx.float32) + 1
    np.testing.assert_array_equal(np.array(one(body, [a, b])), np.array(wide))


SIMD = {
    "simd_sum(x)": lambda x, i: x.sum(),
    "simd_max(x)": lambda x, i: x.max(),
    "simd_min(x)": lambda x, i: x.min(),
    "simd_shuffle_xor(x, 5)": lambda x, i: x[i ^ 5],
    "simd_shuffle(x, 31 - thread_index_in_simdgroup)": lambda x, i: x[31 - i],
    "simd_shuffle_down(x, 3)": lambda x, i: x[np.where(i + 3 < 32, i + 3, i)],
    "simd_shuffle_up(x, 3)": lambda x, i: x[np.where(i >= 3, i - 3, i)],
    "simd_broadcast(x, 7)": lambda x, i: x[7],
    "simd_prefix_inclusive_sum(x)": lambda x, i: np.cumsum(x),
    "simd_prefix_exclusive_sum(x)": lambda x, i: np.cumsum(x) - x,
    "simd_all(x > -3)": lambda x, i: (x > -3).all(),
    "simd_any(x > 3)": lambda x, i: (x > 3).any(),
}


@pytest.mark.parametrize("dtype", [mx.float32, mx.int32])
def test_simd_operations(dtype):
    values = np.random.default_rng(3).integers(-4, 5, 128)
    lines = "".join(f"out[{k} * 128 + i] = {call};\n" for k, call in enumerate(SIMD))
    out = one(
        f"const uint i = thread_position_in_threadgroup.x; const T x = a[i];\n{lines}",
        [mx.array(values).astype(dtype)],
        ((len(SIMD), 128), dtype),
        template={"T": dtype},
        threads=128,
    )
    for row, (call, wanted) in zip(np.array(out), SIMD.items(), strict=True):
        groups = [np.broadcast_to(wanted(group, np.arange(32)), 32) for group in values.reshape(4, 32)]
        np.testing.assert_array_equal(row, np.concatenate(groups), err_msg=call)


def test_atomics():
    body = f"""
    threadgroup atomic_uint bins[8];
    const uint i = thread_position_in_threadgroup.x;
    if (i < 8) atomic_store_explicit(&bins[i], 0, memory_order_relaxed);
    {BARRIER}
    atomic_fetch_add_explicit(&bins[a[i] & 7], 1, memory_order_relaxed);
    {BARRIER}
    if (i < 8) out[i] = atomic_load_explicit(&bins[i], memory_order_relaxed);
    """
    values = np.random.default_rng(5).integers(0, 8, 256).astype(np.uint32)
    out = one(body, [mx.array(values)], ((8,), mx.uint32), threads=256)
    np.testing.assert_array_equal(np.array(out), np.bincount(values, minlength=8))


def test_atomics_of_a_device_array():
    body = "atomic_fetch_max_explicit((device atomic_uint*)(out + {}), 2u, memory_order_relaxed);"
    init = "if (threadgroup_position_in_grid.x == 0 && thread_position_in_threadgroup.x == 0) out[0] = 0;"
    assert one(init + body.format(0), output=((1,), mx.uint32), order=0).item() == 2
    with pytest.raises(KernelError, match="index 1 of device array 'out'"):
        one(body.format(1), output=((1,), mx.uint32))


def test_groups_and_threads_are_numbered_as_in_metal():
    body = """
    const uint3 g = threadgroup_position_in_grid, n = threadgroups_per_grid;
    const uint at = (g.z * n.y + g.y) * n.x + g.x, i = thread_position_in_threadgroup.x;
    out[at * threads_per_threadgroup.x + i] =
        ((g.x * 10 + g.y) * 10 + g.z) * 1000 + simdgroup_index_in_threadgroup * 100 + thread_index_in_simdgroup;
    """
    out = np.array(one(body, output=((4, 3, 2, 64), mx.uint32), groups=(2, 3, 4)))
    z, y, x, i = np.indices(out.shape)
    np.testing.assert_array_equal(out, ((x * 10 + y) * 10 + z) * 1000 + i // 32 * 100 + i % 32)


@pytest.mark.parametrize("dtype", [mx.bool_, mx.uint8, mx.int32, mx.uint32, mx.int64, mx.uint64])
def test_integers_scalars_and_templates(dtype):
    values = mx.array(np.random.default_rng(1).integers(0, 2, (8, 8))).astype(dtype)
    body = """
    const uint i = thread_position_in_threadgroup.x;
    static_assert(N == 8 && YES && !NO, "template");
    out[i] = b != 0 ? T(a[i]) : T(a_shape[0] + a_ndim);
    """
    template = {"T": dtype, "N": 8, "YES": True, "NO": False}
    out = one(body, [values, mx.array(1)], ((8, 8), dtype), template=template)
    assert out.dtype == dtype
    assert mx.array_equal(out, values)
    zero = one(body, [values, mx.array(0)], ((8, 8), dtype), template=template)
    assert mx.array_equal(zero, mx.full((8, 8), 10).astype(dtype))


def test_a_slice_is_read_in_its_own_order():
    whole = mx.arange(256).reshape(16, 16)
    out = one("const uint i = thread_position_in_threadgroup.x; out[i] = a[i];", [whole[::2, ::2].T], ((64,), mx.int32))
    assert mx.array_equal(out, whole[::2, ::2].T.reshape(-1))


def test_a_kernel_of_the_package_by_name():
    kernel = Kernel("weakest", ("importance", "positions", "seen"), ("slot",))
    importance = mx.array([[3.0, 1.0, 2.0]])
    positions = mx.array([[0, 1, 2]], dtype=mx.int32)
    (slot,) = run(
        kernel,
        [importance, positions, mx.array([3], dtype=mx.int32)],
        [((1,), mx.int32)],
        template={"SINK": 0, "RECENT": 1},
        groups=(1, 1, 1),
        threads=32,
    )
    assert slot.item() == 1


# ---- what it must not let pass ----


def test_a_missing_barrier_is_found():
    body = f"""
    threadgroup float shared[64];
    const uint i = thread_position_in_threadgroup.x;
    shared[i] = a[i];
    {BARRIER}
    out[i] = shared[63 - i];
    """
    values = mx.arange(64, dtype=mx.float32)
    assert mx.array_equal(one(body, [values]), values[::-1])
    with pytest.raises(KernelError, match=r"kernel: a race: \d+ elements of out differ.* first at \[0\]"):
        one(body.replace(BARRIER, ""), [values])


def test_a_missing_second_barrier_is_found():
    """Memory that is used again while others still read it."""
    body = f"""
    threadgroup float shared[64];
    const uint i = thread_position_in_threadgroup.x;
    shared[i] = a[i];
    {BARRIER}
    const float first = shared[63 - i];
    {BARRIER}
    shared[i] = first;
    {BARRIER}
    out[i] = shared[63 - i];
    """
    values = mx.arange(64, dtype=mx.float32)
    assert mx.array_equal(one(body, [values]), values)
    with pytest.raises(KernelError, match="a race"):
        one(body.replace(BARRIER, "", 2).replace("shared[63 - i];", f"shared[63 - i]; {BARRIER}", 1), [values])
    missing = body.replace(f"const float first = shared[63 - i];\n    {BARRIER}", "const float first = shared[63 - i];")
    with pytest.raises(KernelError, match="a race"):
        one(missing, [values])


def test_a_race_between_threadgroups_is_found():
    with pytest.raises(KernelError, match="a race"):
        one("out[0] = threadgroup_position_in_grid.x;", output=((1,), mx.float32), groups=(4, 1, 1))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("out[i + 1] = 1;", r"index 64 of device array 'out', which has 64 elements \(lane 63"),
        ("out[int(i) - 1] = 1;", r"index -1 of device array 'out'.*\(lane 0 "),
        ("out[i] = a[i + 60];", r"index 64 of device array 'a'"),
        ("auto row = a + 32; row += i; out[i] = *row;", r"index 64 of device array 'a'"),
        ("auto row = out + 60; row[i] = 1;", r"index 64 of device array 'out'"),
        ("out[i] = a_shape[1];", r"index 1 of device array 'a_shape', which has 1"),
        ("float to[4]; load_floats<4>(a + 64, to); out[i] = to[0];", r"index 64 of device array 'a'"),
        ("float to[4]; load_floats<4>(a + 1, to); out[i] = to[0];", r"misaligned: load_floats<4> from index 1"),
        ("out[i] = load_packed<float, 4, 8>(a + 60, 4).at[0];", r"index 64 of device array 'a'"),
        ("out[i] = load_packed<float, 4, 8>(a + 2, 4).at[0];", r"misaligned: load_packed<4> from index 6"),
        ("threadgroup float t[64]; t[i + 1] = 1;", r"index 64 of array 'float \[64\]' at kernel.metal"),
        ("threadgroup float t[64]; out[i] = t[i + 1];", r"index 64 of array 'float \[64\]'"),
        ("threadgroup float t[2][32]; out[i] = t[0][i];", r"index 32 of array 'float \[32\]'"),
        ("float own[4]; own[i] = 1; out[i] = own[0];", r"index 4 of array 'float \[4\]'.*\(lane 4 "),
    ],
)
def test_an_index_out_of_bounds_is_found(line, said):
    with pytest.raises(KernelError, match=said):
        one(f"const uint i = thread_position_in_threadgroup.x; {line}", [mx.zeros(64)], order=0)


@pytest.mark.parametrize("dims", [8, 6])  # a multiple of 4, and none
def test_a_packed_load_gives_zeros_behind_the_end_of_a_row(dims):
    body = f"""
    const uint i = thread_position_in_threadgroup.x;
    const auto x = load_packed<float, 4, {dims}>(a + i % 2 * {dims}, i / 2 * 4);
    out[i] = x.at[0] + 10.0f * x.at[1] + 100.0f * x.at[2] + 1000.0f * x.at[3];
    """
    rows = [[row * 8 + d if d < dims else 0 for d in range(16)] for row in range(2)]
    expected = [
        sum(rows[i % 2][d] * 10**k if (d := i // 2 * 4 + k) < dims else 0 for k in range(4)) if i < 8 else 0
        for i in range(32)
    ]
    flat = mx.array([row * 8 + d for row in range(2) for d in range(dims)] + [0.0] * (64 - 2 * dims), mx.float32)
    assert one(body, [flat], output=((32,), mx.float32), threads=32).tolist() == expected


def test_the_process_goes_on_after_an_error():
    good = "const uint i = thread_position_in_threadgroup.x; out[i] = simd_sum(a[i]);"
    with pytest.raises(KernelError):
        one(good, [mx.ones(63)])
    assert mx.array_equal(one(good, [mx.ones(64)]), mx.full((64,), 32.0))


def test_more_than_32_kb_are_refused():
    body = "threadgroup float t[{}]; const uint i = thread_position_in_threadgroup.x; t[i] = i; out[i] = t[i];"
    assert mx.array_equal(one(body.format(8192)), mx.arange(64))
    with pytest.raises(KernelError, match="32772 bytes of threadgroup memory, more than the 32768"):
        one(body.format(8193))


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            f"if (i < 40) {BARRIER}",
            "lane 39 waits in the threadgroup_barrier at kernel.metal:1 while lane 40 has ended",
        ),
        (f"if (i == 3) return; {BARRIER}", "while lane 3 has ended"),
        ("if (i < 3) simd_sum(1.0f);", "waits in the simd operation at kernel.metal:1 while lane 3 has ended"),
        (f"if (i < 3) simd_sum(1.0f); {BARRIER}", "waits in the simd operation .* while lane 3 waits"),
        (
            f"if (i < 32) {BARRIER}\nelse {BARRIER}",
            "different threadgroup barriers, lane 0 at kernel.metal:1 and lane 32",
        ),
        ("if (i & 1) simd_sum(1.0f); else simd_max(1.0f);", "meet in different operations"),
        ("simd_shuffle(1.0f, 32);", "reads lane 32 of 32"),
    ],
)
def test_divergence_is_reported(body, said):
    with pytest.raises(KernelError, match=said):
        one(f"const uint i = thread_position_in_threadgroup.x; {body}")


def test_lanes_may_end_where_nobody_waits_for_them():
    body = "const uint i = thread_position_in_threadgroup.x; if (i >= 32) return; out[i] = simd_sum(1.0f);"
    assert mx.array_equal(one(body)[:32], mx.full((32,), 32.0))


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_what_is_not_written_is_nan(dtype):
    out = one(
        "if (thread_position_in_threadgroup.x < 3) out[thread_position_in_threadgroup.x] = 1;", output=((64,), dtype)
    )
    np.testing.assert_array_equal(np.isnan(np.array(out.astype(mx.float32))), np.arange(64) >= 3)


def test_what_is_not_written_is_no_usual_integer():
    out = np.array(one("if (thread_position_in_threadgroup.x == 0) out[0] = 1;", output=((64,), mx.int32)))
    assert out[0] == 1
    assert (out[1:] == 0x7FC07FC0).all()


@pytest.mark.parametrize("kind", ["float", "uint"])
def test_threadgroup_memory_does_not_begin_at_zero(kind):
    body = f"threadgroup {kind} t[64]; const uint i = thread_position_in_threadgroup.x; t[i] += 1; out[i] = t[i];"
    if kind == "uint":
        with pytest.raises(KernelError, match="a race"):
            one(body, output=((64,), mx.uint32))
    else:
        assert mx.isnan(one(body, order=0)).all()


def test_inputs_cannot_be_written():
    with pytest.raises(RuntimeError, match="read-only"):
        one("a[0] = 1;", [mx.zeros(64)])


def test_double_is_no_word_of_metal():
    with pytest.raises(RuntimeError, match="g\\+\\+ does not take the kernel"):
        one("double x = 1; out[0] = x;")


def test_orders_can_be_chosen():
    body = "if (thread_index_in_simdgroup == 0) out[0] = simdgroup_index_in_threadgroup;"
    seen = {one(body, output=((1,), mx.float32), threads=1024, order=order).item() for order in range(12)}
    assert {0.0, 31.0} < seen
    with pytest.raises(KernelError, match="between orders 0 and 5"):
        one(body, output=((1,), mx.float32), threads=1024, order=[0, 5])


def test_wrong_calls():
    with pytest.raises(ValueError, match="threads=33"):
        one("", threads=33)
    with pytest.raises(ValueError, match="threads=2048"):
        one("", threads=2048)
    with pytest.raises(ValueError, match="groups"):
        one("", groups=(0, 1, 1))
    with pytest.raises(ValueError, match="1 inputs and 1 outputs"):
        run_source(HEADER, "", [], ["o"], [mx.ones(1)], [((1,), mx.int32)], template={}, groups=(1, 1, 1), threads=32)


def test_without_a_compiler_it_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(emulation, "kept_files", lambda: tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"needs g\+\+ on Linux"):
        one("// a text that was never built\nout[0] = 1;")
