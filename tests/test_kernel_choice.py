"""Which back end an op takes."""

import mlx.core as mx
import pytest

from veloxfn import ops
from veloxfn.ops import launch
from veloxfn.ops.launch import BACKENDS, backend_for
from veloxfn.ops.merge_targets import MergeRule

THERE = {"metal": mx.metal.is_available(), "cuda": mx.cuda.is_available()}
POSITIONS, SEEN, KEYS = mx.array([[0, 1, 2]], mx.int32), mx.array([3], mx.int32), mx.ones((1, 3, 4))
STREAMS = mx.array([0], mx.uint32)
QUERIES, UNTIL = mx.ones((1, 1, 1, 4)), mx.array([[3]], mx.int32)
STEP = {"sink": 0, "recent": 0}
POOL = {"kernel": 3, "pooling": "mean"}
CALLS = {
    "admit": lambda **asked: ops.admit(mx.array([[0, -1, 1]], mx.int32), SEEN, **asked),
    "attend": lambda **asked: ops.attend(QUERIES, KEYS, KEYS, POSITIONS, **asked),
    "attend_step": lambda **asked: ops.attend_step(QUERIES, KEYS, KEYS, POSITIONS, SEEN, None, **STEP, **asked),
    "attention_mass": lambda **asked: ops.attention_mass(QUERIES, KEYS, POSITIONS, UNTIL, **asked),
    "evict_step": lambda **asked: ops.evict_step(POSITIONS, SEEN, None, **STEP, **asked),
    "merge_targets": lambda **asked: ops.merge_targets(
        MergeRule(), POSITIONS, mx.array([[-1, 1, 2]], mx.int32), mx.ones((1, 3)), KEYS, None, STREAMS, **asked
    ),
    "window_step": lambda **asked: ops.window_step(
        mx.ones((1, 2, 3)),
        mx.ones((1, 3)),
        POSITIONS,
        SEEN,
        mx.array([[2]], mx.int32),
        kernel=3,
        pooling="mean",
        **STEP,
        **asked,
    ),
    "token_step": lambda **asked: ops.token_step(
        KEYS, KEYS, mx.array([[0, -1, 1]], mx.int32), SEEN, [], KEYS[:, :1], KEYS[:, :1], QUERIES, **STEP, **asked
    ),
    "ranks": lambda **asked: ops.ranks(POSITIONS, **asked),
    "weakest": lambda **asked: ops.weakest(mx.ones((1, 3)), POSITIONS, SEEN, **STEP, **asked),
}
calls = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


@calls
def test_an_unknown_name_is_refused(call):
    with pytest.raises(ValueError, match=r"backend must be one of .*got 'vulkan'"):
        call(backend="vulkan")


@pytest.mark.parametrize("missing", [name for name, there in THERE.items() if not there] or ["neither"])
@calls
def test_a_missing_one_is_an_error_that_names_it(call, missing):
    if missing != "neither":
        with pytest.raises(RuntimeError, match=f"backend='{missing}' needs MLX with {missing}"):
            call(backend=missing)


def test_the_default_follows_the_device(monkeypatch):
    gpu = next((name for name, there in THERE.items() if there), "reference")
    with mx.stream(mx.cpu):
        assert backend_for(None) == "reference"
    if gpu != "reference":
        with mx.stream(mx.gpu):
            assert backend_for(None) == gpu
    for name in ("metal", "cuda", "none"):  # on machines that are not this one
        monkeypatch.setattr(launch, "on_gpu", lambda: True)
        monkeypatch.setattr(mx.metal, "is_available", lambda name=name: name == "metal")
        monkeypatch.setattr(mx.cuda, "is_available", lambda name=name: name == "cuda")
        assert backend_for(None) == ("reference" if name == "none" else name)
        monkeypatch.setattr(launch, "on_gpu", lambda: False)
        assert backend_for(None) == "reference"


@pytest.mark.parametrize("name", BACKENDS)
def test_tests_can_force_one_that_a_caller_still_overrides(monkeypatch, name):
    monkeypatch.setattr(launch, "FORCED", name)
    assert backend_for(None) == name
    assert backend_for("reference") == "reference"


@calls
def test_the_kernel_is_run(backend, call, launched):
    """An asked-for back end is not passed over in silence."""
    mx.eval(call(backend=backend))
    assert {asked for _, asked in launched} == {backend}
    launched.clear()
    mx.eval(call(backend="reference"))
    assert not launched
