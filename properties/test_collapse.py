"""The collapse lattice: one method is another, under exactly the conditions given here."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from veloxfn import cam, h2o, keyformer, pyramidkv, snapkv, tova
from veloxfn.testing import laws, normal_stream
from veloxfn.testing.strategies import groupings, streams

BUDGETS = st.integers(2, 8)
SEEDS = st.integers(0, 2**64 - 1)


@st.composite
def settings_of_h2o(draw: st.DrawFn) -> dict[str, object]:
    """Budget, sink, recent and cadence, as h2o and its relatives share them."""
    budget = draw(BUDGETS)
    sink = draw(st.integers(0, budget - 1))
    recent = draw(st.integers(0, budget - 1 - sink))
    cadence = draw(st.sampled_from(["block", "token"]))
    return {"budget": budget, "sink": sink, "recent": recent, "cadence": cadence}


def draw_stream(data: st.DataObject, budget: int):
    """A stream on the grid or a normal one."""
    if data.draw(st.booleans(), label="grid"):
        return data.draw(streams(budget=budget, padded=data.draw(st.booleans())), label="stream")
    tokens = data.draw(st.integers(1, 4 * budget + 6), label="tokens")
    return normal_stream(
        data.draw(st.integers(0, 2**32 - 1), label="seed"),
        tokens=tokens,
        groups=data.draw(st.integers(1, 3)),
        blocks=data.draw(groupings(tokens, budget=budget)),
    )


@given(data=st.data())
def test_keyformer_with_additive_noise_at_tau_0_is_h2o(data: st.DataObject) -> None:
    """For any seed and any key source; where the schedule has not left 0, too: 0 times a draw changes no bit."""
    shared = data.draw(settings_of_h2o(), label="settings")
    shared |= {"query_source": data.draw(st.sampled_from(["true", "key_proxy"]))}
    seed = data.draw(SEEDS, label="seed of the noise")
    late = {"tau_init": 0.0, "tau_end": 6.0, "anneal_from": 10_000}
    for constant in ({"tau": 0.0}, {"tau_init": 0.0, "tau_end": 0.0}, late):
        special = keyformer.policy(keyformer.Config(**shared, noise="additive", seed=seed, **constant))
        laws.law_collapses(special, h2o.policy(h2o.Config(**shared)), draw_stream(data, shared["budget"]), ["mass"])


@given(data=st.data())
def test_keyformer_without_noise_at_tau_1_is_h2o(data: st.DataObject) -> None:
    shared = data.draw(settings_of_h2o(), label="settings")
    shared |= {"query_source": data.draw(st.sampled_from(["true", "key_proxy"]))}
    special = keyformer.policy(keyformer.Config(**shared, noise="none", tau=1.0))
    laws.law_collapses(special, h2o.policy(h2o.Config(**shared)), draw_stream(data, shared["budget"]), ["mass"])


@given(data=st.data())
def test_cam_without_merging_is_h2o(data: st.DataObject) -> None:
    """With all of h2o's settings, whatever the targets and the gate."""
    shared = data.draw(settings_of_h2o(), label="settings")
    shared |= data.draw(
        st.sampled_from([{}, {"decay": 0.5}, {"age_normalised": True}, {"query_source": "key_proxy"}]), label="more"
    )
    off = {"targets": data.draw(st.sampled_from(["window", "nearest"])), "gate": data.draw(st.booleans())}
    special = cam.policy(cam.Config(**shared, **off, merge="off", seed=data.draw(SEEDS)))
    laws.law_collapses(special, h2o.policy(h2o.Config(**shared)), draw_stream(data, shared["budget"]), ["mass"])


@given(data=st.data())
def test_cam_into_a_window_keeps_the_positions_of_h2o(data: st.DataObject) -> None:
    """Without merged keys: what is ranked by does not change."""
    shared = data.draw(settings_of_h2o(), label="settings")
    merging = {
        "merge": data.draw(st.sampled_from(["sum", "similarity", "mean"])),
        "gate": data.draw(st.booleans()),
        "target_count": data.draw(st.integers(1, 4)),
    }
    sums = merging["merge"] == "sum" and shared["cadence"] == "token"
    merging["normalise"] = not sums or data.draw(st.booleans())
    special = cam.policy(cam.Config(**shared, **merging))
    laws.law_keeps_the_positions_of(special, h2o.policy(h2o.Config(**shared)), draw_stream(data, shared["budget"]))


@pytest.mark.parametrize("shape", [{"beta": 1.0}, {"taper": 1.0}, {"beta": 20.0}], ids=str)
@pytest.mark.parametrize(
    ("module", "settings", "columns"),
    [
        (snapkv, {"window": 2, "kernel": 3}, ["window"]),
        (h2o, {"sink": 1}, ["mass"]),
        (keyformer, {"sink": 1, "noise": "additive", "cadence": "token"}, ["mass", "noise"]),
    ],
    ids=["snapkv", "h2o", "keyformer"],
)
def test_pyramidkv_is_its_scorer(module, settings: dict, columns: list[str], shape: dict) -> None:
    """Flat on every layer; one layer alone at the mean budget whatever the shape."""
    scorer = module.Config(budget=8, **settings)
    config = pyramidkv.Config(layers=3, scorer=scorer, **shape)
    layers = pyramidkv.layer_configs(config)
    assert (layers == [scorer] * 3) is (1.0 in shape.values())
    assert sum(layer.budget for layer in layers) == 3 * scorer.budget
    for seed, blocks in enumerate([(30,), (1,) * 30, (9, 1, 20)]):
        stream = normal_stream(seed, tokens=30, groups=2, blocks=blocks)
        laws.law_collapses(pyramidkv.policy(config), module.policy(scorer), stream, columns)


@given(data=st.data())
def test_tova_is_h2o_without_memory(data: st.DataObject) -> None:
    """One token at a time, with one query head or equal heads: h2o(decay=0) with no sink and no recent window."""
    budget = data.draw(BUDGETS)
    token = data.draw(st.booleans(), label="cadence token")
    cadence = {"cadence": "token"} if token else {}
    stream = draw_stream(data, budget)
    heads = data.draw(st.integers(1, 3), label="equal heads")
    stream = replace(stream, queries=np.repeat(stream.queries[:, :1], heads, axis=1))
    stream = stream if token else stream.one_by_one()
    special = tova.policy(tova.Config(budget=budget, sink=0, recent=0, **cadence))
    plain = h2o.policy(h2o.Config(budget=budget, sink=0, recent=0, decay=0.0, age_normalised=False, **cadence))
    laws.law_collapses(special, plain, stream)


@given(data=st.data())
def test_snapkv_with_a_window_of_one_is_tova(data: st.DataObject) -> None:
    """Without pooling, with equal sinks: tova(recent=1), in blocks and one by one."""
    budget = data.draw(BUDGETS)
    shared = {"budget": budget, "sink": data.draw(st.integers(0, budget - 2))}
    shared["cadence"] = data.draw(st.sampled_from(["block", "token"]))
    pooling = data.draw(st.sampled_from(["mean", "max"]))
    special = snapkv.policy(snapkv.Config(**shared, window=1, kernel=1, pooling=pooling))
    laws.law_collapses(special, tova.policy(tova.Config(**shared, recent=1)), draw_stream(data, budget))


@given(data=st.data())
def test_snapkv_is_chunked_at_will_before_the_first_eviction(data: st.DataObject) -> None:
    """The last chunk may be shorter than the window; the head is fed in any chunks, as nothing is lost in it."""
    budget = data.draw(st.integers(3, 9))
    window = data.draw(st.integers(1, budget - 1))
    config = snapkv.Config(
        budget=budget,
        window=window,
        kernel=data.draw(st.sampled_from([1, 3, 5])),
        pooling=data.draw(st.sampled_from(["mean", "max"])),
    )
    held, last = data.draw(st.integers(1, budget), label="held"), data.draw(st.integers(1, 12), label="last")
    stream = normal_stream(data.draw(st.integers(0, 2**32 - 1)), tokens=held + last, groups=2, blocks=(held + last,))
    blocks = (*data.draw(groupings(held, budget=budget)), last)
    laws.law_grouping_before_eviction_does_not_matter(snapkv.policy(config), stream, blocks)
    laws.law_grouping_before_eviction_does_not_matter(snapkv.policy(config), stream.regrouped(blocks), (held, last))


@given(
    layers=st.integers(1, 12),
    floor=st.integers(0, 9),
    room=st.integers(1, 25),
    shape=st.sampled_from(
        [{"beta": 1.0}, {"beta": 2.0}, {"beta": 20.0}, {"taper": 1.0}, {"taper": 1.5}, {"taper": 2.0}, {"taper": 3.25}]
    ),
)
def test_pyramid(layers: int, floor: int, room: int, shape: dict[str, float]) -> None:
    """Lesson 16."""
    laws.law_pyramid(layers, floor + room, floor, **shape)
