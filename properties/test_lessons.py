"""Faults that eviction libraries have shipped, on every method of the registry; the rest are named in the laws."""

import math

import mlx.core as mx
import numpy as np
import pytest

import veloxfn
from veloxfn import h2o
from veloxfn.testing import laws, normal_stream
from veloxfn.testing.drive import kept, live_positions, run
from veloxfn.testing.laws.rows import same_rows
from veloxfn.testing.streams import split
from veloxfn.testing.subjects import Subject, registry

METHODS = sorted(veloxfn.METHODS)
SUBJECTS = [subject for subject in registry() if subject.roomy >= 8]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "settings",
    [
        {"budget": 0},
        {"budget": -3},
        {"sink": -1},
        {"budget": 4, "sink": 4},
        {"cadence": "sometimes"},
        {"shared_heads": 0},
    ],
    ids=str,
)
def test_nonsense_settings_are_refused(method: str, settings: dict[str, object]) -> None:
    """Lesson 13: a ValueError that names the value."""
    name, value = list(settings.items())[-1]
    with pytest.raises(ValueError, match=str(value)) as caught:
        veloxfn.METHODS[method].Config(**settings)
    assert name in str(caught.value), f"the message must name {name}: {caught.value}"


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("h2o", {"decay": 1.5}),
        ("h2o", {"decay": -0.1}),
        ("h2o", {"decay": math.nan}),
        ("h2o", {"recent": -1}),
        ("h2o", {"query_source": "guess"}),
        ("h2o", {"age_normalised": True, "decay": 0.5}),
        ("h2o", {"budget": 8, "sink": 4, "recent": 4}),
        ("knorm", {"keep": "middle"}),
        ("knorm", {"recent": -1}),
        ("knorm", {"budget": 8, "sink": 4, "recent": 4}),
        ("keyformer", {"noise": "pink"}),
        ("keyformer", {"tau": -0.5}),
        ("keyformer", {"tau_init": math.nan}),
        ("keyformer", {"tau_end": -1.0}),
        ("keyformer", {"noise": "logit", "tau": 0}),
        ("keyformer", {"noise": "none", "tau": 0}),
        ("keyformer", {"anneal_steps": -1}),
        ("keyformer", {"anneal_from": -2}),
        ("keyformer", {"seed": -1}),
        ("keyformer", {"tau_end": 5.0, "tau": 3.0}),
        ("keyformer", {"budget": 8, "sink": 4, "recent": 4}),
        ("cam", {"targets": "all"}),
        ("cam", {"target_count": 0}),
        ("cam", {"merge": "add"}),
        ("cam", {"decay": 1.5}),
        ("cam", {"cadence": "block", "normalise": False}),
        ("snapkv", {"window": 0}),
        ("snapkv", {"kernel": 4}),
        ("snapkv", {"pooling": "median"}),
        ("snapkv", {"budget": 8, "sink": 4, "window": 4}),
        ("tova", {"recent": -1}),
        ("tova", {"budget": 8, "sink": 4, "recent": 4}),
        ("pyramidkv", {"layers": 0}),
        ("pyramidkv", {"beta": 0.5}),
        ("pyramidkv", {"taper": 0.9}),
    ],
    ids=str,
)
def test_nonsense_settings_of_a_method_are_refused(method: str, settings: dict[str, object]) -> None:
    """Lesson 13."""
    with pytest.raises(ValueError, match=str(list(settings.values())[-1])):
        veloxfn.METHODS[method].Config(**settings)


@pytest.mark.parametrize("ours", SUBJECTS, ids=repr)
def test_offset_counts_tokens_seen(ours: Subject) -> None:
    """Lesson 18: a 64-token prompt and 200 steps at budget 32 leave the next position at 264, or 32 without gaps."""
    policy = ours.make(32)
    rows = policy.config.shared_heads
    stream = normal_stream(0, rows=rows, tokens=264, blocks=(64, *split(200, 1)))
    state = run(policy, stream)
    following = 264 if isinstance(policy.config.placement, veloxfn.Absolute) else 32
    assert np.array(veloxfn.next_position(policy.config, state)).tolist() == [following] * rows
    assert [len(row) for row in live_positions(state)] == [32] * rows


@pytest.mark.parametrize("ours", SUBJECTS, ids=repr)
def test_state_over_budget_shrinks(ours: Subject) -> None:
    """Lesson 17."""
    stream = normal_stream(1, rows=ours.make(8).config.shared_heads, tokens=40, blocks=(9, 11, 1, 1, 2, 16))
    laws.law_state_over_budget_shrinks(ours.make(16), ours.make(8), stream)
    laws.law_budget_holds(ours.make(8), stream)


@pytest.mark.parametrize("ours", SUBJECTS, ids=repr)
def test_first_calls_of_one_then_sixty_three(ours: Subject) -> None:
    """Lesson 22: one token then 63, an empty call before and after, a later chunk smaller than the budget."""
    policy = ours.make(16)
    stream = normal_stream(2, rows=2 * policy.config.shared_heads, tokens=64, blocks=(1, 63))
    claims = ours.claims(policy)
    for blocks in ((1, 63), (0, 1, 0, 63, 0), (63, 1), (40, 5, 19)):
        for law in (
            laws.law_budget_holds,
            laws.law_protected_survive,
            laws.law_candidates,
            laws.law_follows_the_oracle,
        ):
            law(policy, stream.regrouped(blocks), claims)


@pytest.mark.parametrize("ours", SUBJECTS, ids=repr)
def test_same_prompt_at_any_place_in_a_batch(ours: Subject) -> None:
    """Lesson 6: the same rows and streams as first or last of a batch keep the same set."""
    policy = ours.make(8)
    group = policy.config.shared_heads
    stream = normal_stream(3, rows=4 * group, tokens=30, blocks=(11, 1, 18))
    order = [*range(3 * group, 4 * group), *range(3 * group)]
    one, other = kept(run(policy, stream)), kept(run(policy, stream.only(order)))
    same_rows([one[row] for row in order], other, "the last rows moved to the front")


def test_equal_keys_in_rows_of_different_streams() -> None:
    """Lesson 6: a row's stream is named by layer and head, not by its place."""
    assert veloxfn.streams(2, 3, layer=1).tolist() == [65536, 65537, 65538] * 2
    assert veloxfn.streams(1, 2).dtype == mx.uint32


@pytest.mark.parametrize(
    ("rows", "groups", "settings"),
    [(6, 2, {"decay": 0.99}), (12, 1, {"query_source": "key_proxy"})],
    ids=str,
)
def test_long_blocks_are_scored_like_short_ones(rows: int, groups: int, settings: dict[str, object]) -> None:
    """Lesson 37: a block of hundreds of tokens, worked through in tiles, has the reference's masses and choice."""
    policy = h2o.policy(h2o.Config(budget=64, **settings))
    stream = normal_stream(4, rows=rows, tokens=300, groups=groups, blocks=(20, 280))
    laws.law_follows_the_oracle(policy, stream)
