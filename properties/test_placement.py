"""Contiguous placement, on every method of the registry and every kind of rope."""

import math
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import veloxfn
from veloxfn import Contiguous, Rope, knorm, pyramidkv, streaming_llm, tova
from veloxfn.placement import Absolute
from veloxfn.testing import laws, normal_stream
from veloxfn.testing.strategies import groupings, streams
from veloxfn.testing.streams import split
from veloxfn.testing.subjects import Subject, registry

DIM = 8
ROPES = {
    "half-split": Rope(8),
    "traditional": Rope(8, base=500.0, traditional=True),
    "partial": Rope(4, base=100.0),
    "partial-traditional": Rope(6, traditional=True, scale=0.5),
    "scaled": Rope(8, scale=0.25),
    "frequencies": Rope(8, freqs=(1.0, 7.3, 90.0, math.inf)),
}
SUBJECTS = [subject for subject in registry() if "contiguous" not in subject.name]
DTYPES = [mx.float32, mx.float16, mx.bfloat16]


def contiguous(policy, rope=ROPES["half-split"]):
    """The same method under contiguous placement."""
    config = policy.config
    if isinstance(config, pyramidkv.Config):
        scorer = replace(config.scorer, placement=Contiguous(rope))
        return pyramidkv.policy(
            pyramidkv.Config(layers=config.layers, scorer=scorer, beta=config.beta, taper=config.taper)
        )
    return veloxfn.policy(replace(config, placement=Contiguous(rope)))


def drawn(data: st.DataObject, subject: Subject):
    """A policy and a stream of unrotated vectors."""
    policy = contiguous(subject.make(data.draw(st.sampled_from(subject.budgets), label="budget")))
    policy = contiguous(policy, ROPES[data.draw(st.sampled_from(sorted(ROPES)), label="rope")])
    budget, rows = policy.config.budget, 2 * policy.config.shared_heads
    tokens = data.draw(st.integers(1, 4 * budget + 6), label="tokens")
    valid = np.ones((rows, tokens), dtype=np.bool_)
    if data.draw(st.booleans(), label="padded"):
        valid &= np.random.default_rng(data.draw(st.integers(0, 99), label="holes")).random((1, tokens)) < 0.8
        if policy.config.shared_heads == 1:
            valid[0] = np.roll(valid[0], 1)
    stream = normal_stream(
        data.draw(st.integers(0, 2**32 - 1), label="seed"),
        rows=rows,
        tokens=tokens,
        key_dim=DIM,
        groups=data.draw(st.integers(1, 2), label="groups"),
        blocks=data.draw(groupings(tokens, budget=budget), label="blocks"),
        dtype=data.draw(st.sampled_from(DTYPES), label="dtype"),
        valid=valid,
    )
    return policy, stream


@pytest.mark.parametrize("ours", SUBJECTS, ids=repr)
@given(data=st.data())
def test_unrotating_recovers_arrivals(ours: Subject, data: st.DataObject) -> None:
    laws.law_unrotating_recovers_arrivals(*drawn(data, ours))


@pytest.mark.parametrize("ours", SUBJECTS, ids=repr)
@given(data=st.data())
def test_eviction_closes_the_gap(ours: Subject, data: st.DataObject) -> None:
    laws.law_eviction_closes_the_gap(*drawn(data, ours))


@pytest.mark.parametrize("ours", SUBJECTS, ids=repr)
@given(data=st.data())
def test_a_decoder_sees_no_gaps(ours: Subject, data: st.DataObject) -> None:
    laws.law_decoder_sees_no_gaps(*drawn(data, ours))


@pytest.mark.parametrize("ours", SUBJECTS, ids=repr)
def test_rotated_blocks_may_be_regrouped(ours: Subject) -> None:
    policy = contiguous(ours.make(ours.roomy))
    config = policy.config
    token = {"cadence": "token"}
    scorer = {"scorer": replace(config.scorer, **token)} if isinstance(config, pyramidkv.Config) else {}
    policy = veloxfn.policy(replace(config, **token, **scorer))
    stream = normal_stream(1, rows=2 * config.shared_heads, tokens=60, key_dim=DIM, groups=2, blocks=(33, 20, 7))
    for blocks in (split(60, 1), (9, 51)):
        laws.law_rotated_blocks_may_be_regrouped(policy, stream, blocks)


@pytest.mark.parametrize("keep", ["low", "high"])
@given(data=st.data())
def test_placement_does_not_choose_by_norm(keep: str, data: st.DataObject) -> None:
    budget = data.draw(st.integers(2, 9), label="budget")
    rope = Rope(2, base=50.0)
    stream = data.draw(streams(budget=budget, padded=data.draw(st.booleans(), label="padded")), label="stream")
    if stream.key_dim < rope.dims:
        return
    settings = {"budget": budget, "sink": 1, "keep": keep}
    laws.law_placement_does_not_choose(
        knorm.policy(knorm.Config(placement=Contiguous(rope), **settings)),
        knorm.policy(knorm.Config(placement=Absolute(), **settings)),
        stream,
    )


@given(data=st.data())
def test_placement_does_not_choose_by_structure(data: st.DataObject) -> None:
    budget = data.draw(st.integers(2, 9), label="budget")
    stream = data.draw(streams(budget=budget, padded=data.draw(st.booleans(), label="padded")), label="stream")
    if stream.key_dim < 2:
        return
    settings = {"budget": budget, "sink": data.draw(st.integers(0, budget - 1), label="sink")}
    laws.law_placement_does_not_choose(
        streaming_llm.policy(streaming_llm.Config(placement=Contiguous(Rope(2)), **settings)),
        streaming_llm.policy(streaming_llm.Config(**settings)),
        stream,
    )


@pytest.mark.parametrize(("method", "evictions"), [("knorm", 10_000), ("streaming_llm", 1000), ("h2o", 1000)])
def test_rounding_does_not_accumulate(method: str, evictions: int) -> None:
    """Lesson 23."""
    config = veloxfn.METHODS[method].Config(budget=16, sink=2, placement=Contiguous(ROPES["frequencies"]))
    laws.law_rounding_does_not_accumulate(veloxfn.policy(config), evictions=evictions)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [8, 12])
@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_rotation_equals_the_models(rope: Rope, dim: int, dtype: mx.Dtype) -> None:
    """Lesson 20."""
    laws.law_rotation_equals_the_model(rope, dtype, dim=dim)


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_scores_depend_on_relative_positions(rope: Rope) -> None:
    laws.law_rotations_compose(rope, dim=DIM)


def test_placement_chooses_where_scores_look_at_positions() -> None:
    """False, and pinned: tova keeps the same tokens under both placements."""
    stream = normal_stream(0, rows=2, tokens=80, key_dim=DIM)
    stream = replace(stream, keys=3 * stream.keys)
    policy = tova.policy(tova.Config(budget=8, sink=1, placement=Contiguous(Rope(DIM))))
    with pytest.raises(AssertionError, match="placement must not choose"):
        laws.law_placement_does_not_choose(policy, tova.policy(replace(policy.config, placement=Absolute())), stream)
