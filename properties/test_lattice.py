"""Laws between the package's methods, and of h2o's masses."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from veloxfn import cam, h2o, keyformer, knorm, snapkv, streaming_llm, tova
from veloxfn.testing import laws, normal_stream, uniform_stream
from veloxfn.testing.drive import live_positions, run
from veloxfn.testing.strategies import groupings, streams
from veloxfn.testing.streams import split

BUDGETS = st.integers(2, 8)


@given(data=st.data())
def test_h2o_keeps_streaming_rows_plus_one(data: st.DataObject) -> None:
    budget = data.draw(BUDGETS)
    sink = data.draw(st.integers(0, budget - 2))
    stream = data.draw(streams(budget=budget, padded=data.draw(st.booleans())))
    laws.law_h2o_keeps_streaming_rows_plus_one(budget, sink, stream)


@given(data=st.data())
def test_retire_by_position_is_streaming_llm(data: st.DataObject) -> None:
    budget = data.draw(BUDGETS)
    sink = data.draw(st.integers(0, budget - 1))
    stream = data.draw(streams(budget=budget, padded=data.draw(st.booleans())))
    laws.law_retire_by_position_is_streaming_llm(budget, sink, stream)


@given(data=st.data())
def test_retire_ranks_like_the_oracle(data: st.DataObject) -> None:
    """Lessons 10, 11, 12."""
    budget = data.draw(st.integers(1, 8))
    sink = data.draw(st.integers(0, budget - 1))
    config = knorm.Config(budget=budget, sink=sink, recent=data.draw(st.integers(0, budget - 1 - sink)))
    stream = data.draw(streams(budget=budget, padded=data.draw(st.booleans())))
    few = st.sampled_from([0.0, -0.0, 1.0, -1.0, float("nan"), float("inf"), -float("inf")])
    importance = data.draw(st.lists(few | st.floats(width=32, allow_subnormal=False), min_size=1, max_size=30))
    laws.law_retire_ranks_like_the_oracle(config, stream, importance)


@pytest.mark.parametrize("size", [1, 3, 20])
@pytest.mark.parametrize(
    "importance",
    [
        [0.0, -0.0],
        [-0.0, 0.0, 0.0],
        [1.0],
        [float("nan"), 1.0],
        [float("inf"), float("nan"), -float("inf"), 0.0],
        [-1.0, -2.0, 1e-30, -1e-30, 0.0],
        [3e38, -3e38, float("inf"), 1.0, 1.0000001],
    ],
    ids=str,
)
def test_retire_ranks_edge_cases(importance: list[float], size: int) -> None:
    """Lessons 10, 11, 12: signed zeros tie, NaN goes first, infinities and neighbours are in order."""
    stream = normal_stream(0, rows=2, tokens=20, blocks=split(20, size))
    for config in (knorm.Config(budget=4, sink=0), knorm.Config(budget=5, sink=1, recent=2)):
        laws.law_retire_ranks_like_the_oracle(config, stream, importance)


@given(data=st.data())
def test_mass_counts_queries(data: st.DataObject) -> None:
    budget = data.draw(st.integers(2, 20))
    cadence = data.draw(st.sampled_from(["block", "token"]))
    module, settings = data.draw(
        st.sampled_from(
            [(h2o, {}), (cam, {}), (keyformer, {"noise": "additive"}), (keyformer, {}), (keyformer, {"tau": 0.1})]
        )
    )
    policy = module.policy(module.Config(budget=budget, sink=0, cadence=cadence, **settings))
    stream = data.draw(streams(budget=budget, max_tokens=budget, padded=data.draw(st.booleans())))
    laws.law_mass_counts_queries(policy, stream)


@given(data=st.data())
def test_mass_ignores_grouping_below_budget(data: st.DataObject) -> None:
    """Lesson 2."""
    budget = 16
    source = data.draw(st.sampled_from(["true", "key_proxy"]))
    decay = data.draw(st.sampled_from([1.0, 0.9, 0.0]))
    policy = h2o.policy(h2o.Config(budget=budget, decay=decay, query_source=source))
    stream = data.draw(streams(budget=5, min_tokens=1, max_tokens=budget, padded=data.draw(st.booleans())))
    laws.law_mass_ignores_grouping_below_budget(policy, stream, data.draw(groupings(stream.tokens, budget=5)))


@given(data=st.data())
def test_common_key_shift_changes_nothing(data: st.DataObject) -> None:
    budget = data.draw(BUDGETS)
    module, settings = data.draw(
        st.sampled_from(
            [
                (h2o, {}),
                (cam, {}),
                (keyformer, {}),
                (keyformer, {"noise": "additive"}),
                (tova, {}),
                (snapkv, {"kernel": 3}),
            ]
        )
    )
    policy = module.policy(module.Config(budget=budget, sink=0, **settings))
    stream = data.draw(streams(budget=budget))
    laws.law_common_key_shift_changes_nothing(policy, stream, [0.5, -1.0, 2.0, 0.25][: stream.key_dim])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("cadence", ["block", "token"])
def test_common_key_shift_on_normal_streams(seed: int, cadence: str) -> None:
    policy = h2o.policy(h2o.Config(budget=8, sink=1, cadence=cadence))
    stream = normal_stream(seed, tokens=40, groups=2)
    laws.law_common_key_shift_changes_nothing(policy, stream, np.linspace(-1, 1, stream.key_dim).tolist())


@given(data=st.data())
def test_attention_equals_queries(data: st.DataObject) -> None:
    budget = data.draw(BUDGETS)
    token = data.draw(st.booleans())
    settings = data.draw(st.sampled_from([{}, {"decay": 0.5}] if token else [{}, {"age_normalised": True}]))
    module = data.draw(st.sampled_from([h2o, cam, keyformer, *([tova] if token else [])]))
    if module is keyformer:
        settings = {"noise": "additive", "tau": 1.5}
    if module is tova:
        settings = {}
    policy = module.policy(module.Config(budget=budget, sink=0, **settings))
    stream = data.draw(streams(budget=budget, padded=data.draw(st.booleans())))
    laws.law_attention_equals_queries(policy, stream.one_by_one() if token else stream)


@pytest.mark.parametrize(
    "policy",
    [
        knorm.policy(knorm.Config(budget=6, sink=2)),
        knorm.policy(knorm.Config(budget=6, sink=0, keep="high", recent=3)),
        streaming_llm.policy(streaming_llm.Config(budget=6, sink=2)),
        h2o.policy(h2o.Config(budget=6, sink=1, recent=0, decay=0.0)),
        h2o.policy(h2o.Config(budget=6, sink=1, recent=3, decay=0.0, cadence="token")),
        tova.policy(tova.Config(budget=6, sink=1)),
        tova.policy(tova.Config(budget=6, sink=1, shared_heads=2, cadence="token")),
        snapkv.policy(snapkv.Config(budget=6, sink=1, window=3, kernel=1)),
        snapkv.policy(snapkv.Config(budget=6, sink=1, window=2, kernel=3, pooling="max", cadence="token")),
    ],
    ids=["knorm", "knorm-high", "streaming_llm", "h2o", "h2o-token", "tova", "tova-shared", "snapkv", "snapkv-max"],
)
@pytest.mark.parametrize("size", [1, 5, 9, 30])
@pytest.mark.parametrize("level", [0.0, 0.5])
def test_equal_keys_keep_the_newest(policy, size: int, level: float) -> None:
    """Lesson 10."""
    blocks = split(30, size)
    laws.law_equal_keys_keep_the_newest(policy, uniform_stream(tokens=30, level=level, blocks=blocks))


def test_decay_lets_go_of_what_is_stale() -> None:
    """Lesson 2: on 1000 structured tokens, at least half of the kept rows come from the later half when decay < 1."""
    budget, tokens = 32, 1000
    stream = normal_stream(0, rows=2, tokens=tokens, key_dim=8, blocks=split(tokens, 8))
    keys, queries = stream.keys.copy(), stream.queries.copy()
    keys[:, ::10], keys[:, ::10, 0] = 0.0, 4.0  # every tenth token is a heavy hitter for the queries of its half
    keys[:, 500::10, 0] *= -1
    queries[..., 0] = np.where(np.arange(tokens) < 500, 4.0, -4.0)
    stream = replace(stream, keys=keys, queries=queries)
    late = {}
    for decay in (1.0, 0.95):
        policy = h2o.policy(h2o.Config(budget=budget, sink=0, recent=4, decay=decay))
        late[decay] = [int((row >= tokens // 2).sum()) for row in live_positions(run(policy, stream))]
    assert min(late[0.95]) >= budget // 2, f"with decay 0.95 only {late[0.95]} of {budget} rows are from the later half"


@pytest.mark.parametrize("budget", [2, 3, 8])
def test_one_evictable_slot_is_enough(budget: int) -> None:
    """Lesson 11: sink + recent = budget - 1 works, one more is refused."""
    for sink in range(budget):
        recent = budget - 1 - sink
        for module, more in ((h2o, {}), (knorm, {}), (keyformer, {}), (cam, {}), (tova, {})):
            policy = module.policy(module.Config(budget=budget, sink=sink, recent=recent, **more))
            for stream in (normal_stream(1, tokens=20), normal_stream(1, tokens=20, blocks=(3, 17))):
                laws.law_budget_holds(policy, stream)
                laws.law_protected_survive(policy, stream)
            with pytest.raises(ValueError, match=str(budget)):
                module.Config(budget=budget, sink=sink, recent=recent + 1)


def test_infinite_importance_does_not_evict_a_sink() -> None:
    """Lesson 11: +inf on every unprotected slot still loses an unprotected one."""
    policy = knorm.policy(knorm.Config(budget=4, sink=2, keep="high"))
    stream = normal_stream(2, tokens=12)
    keys = stream.keys.copy()
    keys[:, 2:] = np.inf
    laws.law_protected_survive(policy, stream.with_keys(keys))
    laws.law_budget_holds(policy, stream.with_keys(keys))
