"""Merging: values and masses that losers hand over, and the gate."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from veloxfn import cam
from veloxfn.placement import Contiguous, Rope
from veloxfn.testing import laws, normal_stream
from veloxfn.testing.checking import sample_streams
from veloxfn.testing.drive import floats, live_positions, run
from veloxfn.testing.strategies import groupings, streams

TURNED = Contiguous(Rope(dims=2, base=100.0))
MERGES = [
    {"targets": "window", "merge": "sum"},
    {"targets": "window", "merge": "sum", "normalise": False, "cadence": "token"},
    {"targets": "window", "merge": "mean", "gate": False},
    {"targets": "window", "merge": "similarity"},
    {"targets": "nearest", "merge": "sum"},
    {"targets": "nearest", "merge": "similarity"},
    {"targets": "nearest", "merge": "mean", "gate": False},
    {"targets": "nearest", "merge": "mean", "merge_keys": True},
]


@given(data=st.data())
def test_value_mass_is_conserved(data: st.DataObject) -> None:
    budget = data.draw(st.integers(2, 8))
    sink = data.draw(st.integers(0, budget - 2))
    config = cam.Config(
        budget=budget,
        sink=sink,
        recent=data.draw(st.integers(1, budget - 1 - sink)),
        target_count=data.draw(st.integers(1, 4)),
        merge="sum",
        normalise=False,
        gate=False,
        cadence="token",
    )
    stream = data.draw(streams(budget=budget, padded=data.draw(st.booleans())))
    laws.law_value_mass_is_conserved(cam.policy(config), replace(stream, dtype=mx.float32))


@given(data=st.data())
def test_mass_is_handed_over(data: st.DataObject) -> None:
    budget = data.draw(st.integers(2, 8))
    tokens = data.draw(st.integers(1, 3 * budget + 4))
    config = cam.Config(
        budget=budget,
        sink=data.draw(st.integers(0, budget - 2)),
        targets="nearest",
        merge=data.draw(st.sampled_from(["similarity", "mean", "sum"])),
        gate=False,
        cadence=data.draw(st.sampled_from(["block", "token"])),
    )
    stream = normal_stream(
        data.draw(st.integers(0, 2**32 - 1)), tokens=tokens, blocks=data.draw(groupings(tokens, budget=budget))
    )
    laws.law_mass_is_handed_over(cam.policy(config), stream)


@pytest.mark.parametrize("settings", MERGES, ids=str)
@pytest.mark.parametrize("budget", [8, 32])
def test_merging_changes_values(settings: dict, budget: int) -> None:
    """Lesson 4; `merge="off"` changes none."""
    laws.law_merging_changes_values(cam.policy(cam.Config(budget=budget, **settings)))
    off = cam.policy(cam.Config(budget=budget, **(settings | {"merge": "off", "normalise": True})))
    with pytest.raises(AssertionError, match="nothing was merged"):
        laws.law_merging_changes_values(off)


@pytest.mark.parametrize("target_count", [1, 2, 8])
@pytest.mark.parametrize("seed", range(3))
def test_gate_opens_as_often_as_it_says(seed: int, target_count: int) -> None:
    stream = normal_stream(seed, rows=1, tokens=6, key_dim=4)
    config = cam.Config(budget=5, sink=0, recent=2, target_count=target_count, seed=seed)
    laws.law_gate_opens_as_often_as_it_says(stream.keys[0], stream.queries[0, 0], cam.policy(config))


def test_gate_is_open_above_the_mean_and_shut_without_mass() -> None:
    """Mass above the targets' mean: always. Mass 0 (a key that holds NaN): never, without a gate too if by nearness."""
    keys, queries = np.array([[2.0], [1.0], [-2.0]], dtype=np.float32), np.ones((3, 1), dtype=np.float32)
    config = cam.Config(budget=2, sink=0, recent=1)
    laws.law_gate_opens_as_often_as_it_says(keys, queries, cam.policy(config), rows=200)
    stream = normal_stream(0, rows=50, tokens=5, blocks=(5,))
    keys = stream.keys.copy()
    keys[:, 1] = np.nan
    for settings in ({"targets": "window"}, {"targets": "nearest"}, {"targets": "nearest", "gate": False}):
        config = cam.Config(budget=4, sink=0, recent=2, merge="mean", **settings)
        after = run(cam.policy(config), stream.with_keys(keys))
        found = live_positions(after)
        assert [row.tolist() for row in found] == [[0, 2, 3, 4]] * 50
        order = np.argsort(np.array(after.slots.positions), axis=1)[:, 1:]
        values = np.take_along_axis(floats(after.slots.values), order[..., None], axis=1)
        assert np.array_equal(values, stream.values[:, [0, 2, 3, 4]]), f"{settings}: something was merged"


@pytest.mark.parametrize("settings", MERGES, ids=str)
@pytest.mark.parametrize(
    "more", [{"decay": 0.5}, {"query_source": "key_proxy"}, {"shared_heads": 2}, {"placement": TURNED}], ids=str
)
def test_every_merge_follows_the_oracle(settings: dict, more: dict) -> None:
    """Targets, merges and gates with h2o's other settings."""
    policy = cam.policy(cam.Config(budget=6, sink=1, target_count=2, **settings, **more))
    for stream in sample_streams(6, policy.config.shared_heads):
        laws.law_follows_the_oracle(policy, stream)


def test_nearest_ties_go_to_the_oldest_behind_the_sinks() -> None:
    """D = 1, so that all cosines are 1: the loser's value and mass go to the first survivor that is no sink."""
    config = cam.Config(budget=4, sink=1, recent=2, targets="nearest", merge="mean", gate=False)
    stream = normal_stream(0, rows=1, tokens=5, key_dim=1, value_dim=3, blocks=(5,))
    stream = replace(stream, keys=np.ones_like(stream.keys), queries=np.zeros_like(stream.queries))
    after = run(cam.policy(config), stream)
    (kept,) = live_positions(after)
    (lost,) = set(range(5)) - set(kept.tolist())
    target = min(position for position in kept.tolist() if position >= 1)
    by_position = dict(zip(np.array(after.slots.positions)[0].tolist(), floats(after.slots.values)[0], strict=True))
    for position in kept.tolist():
        own = stream.values[0, position]
        expected = (own + stream.values[0, lost]) / 2 if position == target else own
        assert np.array_equal(by_position[position], expected), f"position {position}"
    laws.law_mass_is_handed_over(cam.policy(config), stream)
