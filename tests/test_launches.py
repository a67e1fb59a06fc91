"""The counter of launches, on graphs whose launches are known."""

import mlx.core as mx
import pytest

from veloxfn import knorm, ops
from veloxfn.ops import fusion, launch
from veloxfn.testing.launches import forced, launches

X, INDEX = mx.ones((4, 8)), mx.zeros((4, 1), mx.int32)
DOUBLE = mx.fast.metal_kernel(
    name="double_it",
    input_names=["x"],
    output_names=["y"],
    source="y[thread_position_in_grid.x] = 2 * x[thread_position_in_grid.x];",
)


def double(x):
    return DOUBLE(
        inputs=[x],
        grid=(x.size, 1, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[x.shape],
        output_dtypes=[x.dtype],
    )[0]


KNOWN = {
    "nothing": (lambda x: x, []),
    "views": (lambda x: x.T[None, 2:6, :1].squeeze(0), []),
    "a split": (lambda x: mx.split(x, 2), []),
    "two steps": (lambda x: mx.exp(x) + 1, ["Exp", "Add"]),
    "two steps, compiled": (mx.compile(lambda x: mx.exp(x) + 1), ["CompiledExpBroadcastAdd"]),
    "a compiled chain with two results": (
        mx.compile(lambda x: (mx.exp(x), mx.exp(x) + 1)),
        ["CompiledExpBroadcastAdd"],
    ),
    "a chain cut by a sum": (
        mx.compile(lambda x: 2 * mx.exp(x).sum(axis=1) + 1),
        ["Exp", "Sum", "CompiledBroadcastMultiplyBroadcastAdd"],
    ),
    "a concatenation copies each part": (lambda x: mx.concatenate([x, x, x]), ["Concatenate"] * 3),
    "zeros are written": (lambda x: mx.zeros((3, 4)), ["Full"]),
    "a shared part counts once": (lambda x: (lambda y: [y @ x.T, y * 2])(mx.exp(x)), ["Exp", "Matmul", "Multiply"]),
    "results without elements": (lambda x: (mx.exp(x), mx.zeros((4, 0))), ["Exp"]),
    "a dictionary": (lambda x: {"a": [mx.exp(x)], "b": (mx.argmin(x, axis=1),)}, ["Exp", "ArgReduce"]),
}


@pytest.mark.parametrize(("function", "kernels"), KNOWN.values(), ids=KNOWN)
@pytest.mark.parametrize("backend", [None, "reference", "metal"])
def test_launches_of_known_graphs(function, kernels, backend):
    assert sorted(launches(function, X, backend=backend).kernels) == sorted(kernels)


def test_a_custom_kernel_is_counted_without_a_gpu():
    def step(x):
        return double(double(mx.exp(x)) + 1)

    have = launches(step, X, backend="metal")
    assert have.kernels == ("Exp", "CustomKernel", "Add", "CustomKernel")
    assert have.copies == ()


def test_a_custom_kernel_inside_a_compiled_function_is_counted():
    have = launches(mx.compile(lambda x: double(mx.exp(x) + 1) * 2 + 1), X, backend="metal")
    assert [name.startswith("Compiled") for name in have.kernels] == [True, False, True]
    assert have.kernels[1] == "CustomKernel"


def test_copies_that_may_come_on_top_are_named():
    assert launches(lambda x: x.T.reshape(-1), X).copies == ("Transpose -> Reshape",)
    assert launches(lambda x: x.reshape(-1), X).copies == ()
    assert launches(lambda x: mx.exp(x.T).reshape(-1), X).copies == ()
    assert launches(lambda x: mx.contiguous(x[:, 1:][None]), X).copies == ("Slice -> Contiguous",)
    assert launches(lambda x: double(x[:, :2]), X, backend="metal").copies == ("Slice -> CustomKernel",)
    assert "-> ScatterAxis" in launches(lambda x: mx.put_along_axis(x, INDEX, x[:, :1], axis=1), X).copies


def test_a_forced_back_end_reaches_every_op_and_is_taken_back():
    before, device = launch.backend_for, fusion.on_gpu
    with forced("metal"):
        assert launch.backend_for(None) == "metal"
        assert launch.backend_for("host") == "host"
        assert fusion.on_gpu()
    with forced("reference"):
        assert launch.backend_for(None) == "reference"
        assert fusion.on_gpu is device
    assert (launch.backend_for, fusion.on_gpu) == (before, device)
    with pytest.raises(RuntimeError, match="boom"), forced("cuda"):
        raise RuntimeError("boom")
    assert (launch.backend_for, fusion.on_gpu) == (before, device)
    with pytest.raises(ValueError, match="backend must be one of"), forced("tpu"):
        pass


def test_a_whole_step_is_counted_without_being_computed():
    policy = knorm.policy(knorm.Config(budget=16))
    x = mx.random.normal((2, 24, 8), key=mx.random.key(0))
    state = policy.update_batched(policy.init_state(2, 8, dtype=mx.float32), x, x)
    with ops.using("reference"):  # a kernel of its own is not fused with anything
        plain = launches(policy.update_batched, state, x[:, :1], x[:, :1])
        compiled = launches(mx.compile(policy.update_batched), state, x[:, :1], x[:, :1])
    assert 0 < len(compiled.kernels) < len(plain.kernels)
