"""K-norm by hand-computed examples."""

import mlx.core as mx
import pytest

import veloxfn
from veloxfn import knorm


def run(config, norms, blocks=None):
    keys = mx.array(norms, dtype=mx.float32).reshape(1, -1, 1)
    state = knorm.init_state(config, 1, 1, dtype=mx.float32)
    start = 0
    for count in blocks or [keys.shape[1]]:
        now = slice(start, start + count)
        state = knorm.update_batched(config, state, keys[:, now], keys[:, now])
        start += count
    return veloxfn.kept_positions(state)[0].tolist()


def test_low_norms_are_kept_and_high_ones_with_the_ablation():
    norms = [5.0, 1.0, 9.0, 2.0, 8.0, 3.0]
    assert run(knorm.Config(budget=3, sink=0), norms) == [1, 3, 5]
    assert run(knorm.Config(budget=3, sink=0, keep="high"), norms) == [0, 2, 4]
    assert run(knorm.Config(budget=3, sink=1), norms) == [0, 1, 3]


def test_the_norm_is_of_the_key_and_in_float32():
    config = knorm.Config(budget=4, sink=0)
    keys = mx.array([[[3.0, 4.0], [-6.0, 8.0], [300.0, 400.0]]], dtype=mx.float16)
    state = knorm.update_batched(config, knorm.init_state(config, 1, 2), keys, keys)
    assert state.norms.tolist() == [[5.0, 10.0, 500.0]]
    assert state.norms.dtype == mx.float32


@pytest.mark.parametrize("blocks", [[1] * 9, [9], [4, 5], [8, 1], [0, 3, 6]])
@pytest.mark.parametrize("cadence", ["block", "token"])
def test_ties_keep_the_newest_however_the_arrivals_are_grouped(blocks, cadence):
    assert run(knorm.Config(budget=4, sink=1, cadence=cadence), [1.0] * 9, blocks) == [0, 6, 7, 8]


@pytest.mark.parametrize("cadence", ["block", "token"])
@pytest.mark.parametrize("blocks", [[1] * 14, [14], [3, 8, 3], [13, 1]])
def test_a_recent_window_keeps_the_path_independence(blocks, cadence):
    """A token competes once it leaves the window, whenever that is noticed: sinks, window, best of the rest."""
    norms = [float(x) for x in [4, 9, 1, 7, 7, 2, 8, 3, 9, 5, 6, 1, 7, 2]]
    assert run(knorm.Config(budget=5, sink=1, recent=2, cadence=cadence), norms, blocks) == [0, 2, 11, 12, 13]
    assert run(knorm.Config(budget=6, sink=1, recent=2, cadence=cadence), norms, blocks) == [0, 2, 5, 11, 12, 13]
