"""Whole methods on kernels: what they keep is what they keep on MLX's own primitives, and what the oracle keeps."""

import importlib
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

import veloxfn
from veloxfn import cam, h2o, keyformer, knorm, snapkv, streaming_llm, tova
from veloxfn.ops import launch
from veloxfn.placement import Contiguous, Rope
from veloxfn.testing import Stream, claims_for, fingerprint, laws, uniform_stream
from veloxfn.testing.drive import differences, floats, kept, live_positions, run, snapshot
from veloxfn.testing.laws.rows import same_columns, same_rows

# Budgets, protection, blocks and dtypes that differ little: each kind would be a kernel more to build.
FEW = {"budget": 5, "sink": 1, "recent": 1}
CONFIGS = {
    "h2o": h2o.Config(**FEW),
    "h2o-fading": h2o.Config(**FEW, decay=0.5),
    "h2o-observed": h2o.Config(**FEW, age_normalised=True),
    "h2o-token": h2o.Config(**FEW, cadence="token"),
    "keyformer-logit": keyformer.Config(**FEW, anneal_steps=9),
    "keyformer-logit-token": keyformer.Config(**FEW, anneal_steps=9, cadence="token"),
    "keyformer-additive": keyformer.Config(**FEW, noise="additive", anneal_steps=9),
    "keyformer-silent": keyformer.Config(**FEW, noise="none", anneal_steps=9),
    "tova": tova.Config(**FEW),
    "tova-token": tova.Config(**FEW, cadence="token"),
    "knorm": knorm.Config(**FEW),
    "knorm-token": knorm.Config(**FEW, cadence="token"),
    "streaming_llm": streaming_llm.Config(budget=5, sink=1),
    "cam": cam.Config(**FEW, target_count=2, gate=False),
    "cam-token": cam.Config(**FEW, target_count=2, gate=False, cadence="token"),
    "cam-nearest": cam.Config(**FEW, targets="nearest", merge="similarity"),
    "snapkv": snapkv.Config(budget=5, sink=0, window=2, kernel=3),
    "snapkv-token": snapkv.Config(budget=5, sink=0, window=2, kernel=3, cadence="token"),
    "h2o-contiguous": h2o.Config(**FEW, placement=Contiguous(Rope(dims=2))),
}
BLOCKS = {"one by one": (1,) * 14, "blocks": (4, 1, 4, 4, 1)}
configs = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def grid_stream(blocks, seed=0, padded=False):
    """Keys and queries on a grid on which products are exact: sqrt(D) = 2."""
    draw, tokens = np.random.default_rng(seed), sum(blocks)
    valid = np.ones((2, tokens), np.bool_)
    if padded:
        valid[0, :5], valid[1, 7] = False, False
    return Stream(
        keys=(draw.integers(-8, 9, (2, tokens, 4)) / 4).astype(np.float32),
        values=fingerprint(2, tokens, 5),
        queries=(draw.integers(-8, 9, (2, 2, tokens, 4)) / 4).astype(np.float32),
        valid=valid,
        blocks=blocks,
        dtype=mx.float16,
        exact=True,
    )


def assert_same_state(have, want, what, merged=False):
    assert [row.tolist() for row in live_positions(have)] == [row.tolist() for row in live_positions(want)], what
    if merged:
        assert np.allclose(floats(have.slots.values), floats(want.slots.values), rtol=1e-2, atol=1e-2), what
    else:
        same_rows(kept(want), kept(have), what)
    same_columns(want, have, [0, 1], what)


@configs
@pytest.mark.parametrize("blocks", BLOCKS.values(), ids=BLOCKS)
def test_the_same_is_kept(forced, monkeypatch, config, blocks):
    policy = veloxfn.policy(config)
    stream = grid_stream(blocks, padded=len(blocks) < 10)
    have = run(policy, stream)
    monkeypatch.setattr(launch, "FORCED", "reference")
    assert_same_state(have, run(policy, stream), "kernels against reference", not claims_for(config).bit_copies)


@configs
def test_the_oracle_agrees(forced, config):
    laws.law_follows_the_oracle(veloxfn.policy(config), grid_stream((1, 4, 1, 1, 1, 4), seed=1))


@configs
def test_equal_keys_lose_the_same_tokens(forced, monkeypatch, config):
    policy = veloxfn.policy(config)
    stream = uniform_stream(tokens=12, blocks=(1, 4, *[1] * 7), dtype=mx.float16)
    stream = replace(stream, queries=np.ones((2, 2, 12, 4), np.float32))
    have = run(policy, stream)
    monkeypatch.setattr(launch, "FORCED", "reference")
    assert_same_state(have, run(policy, stream), "equal keys", not claims_for(config).bit_copies)


@configs
def test_attend_gives_the_same(forced, monkeypatch, config):
    """`veloxfn.attend` below the budget, at it, and of blocks."""
    policy = veloxfn.policy(config)
    stream = grid_stream((1, 1, 4, 1, 1, 1, 4, 1), seed=3)
    state = policy.init_state(2, 4, 5, dtype=mx.float16)
    for block in stream:
        absorbed = policy.absorb(state, block.keys, block.values)
        monkeypatch.setattr(launch, "FORCED", forced)
        have, after = veloxfn.attend(policy, absorbed, block.queries, scale=0.25)
        monkeypatch.setattr(launch, "FORCED", "reference")
        want, state = veloxfn.attend(policy, absorbed, block.queries, scale=0.25)
        assert np.allclose(floats(have), floats(want), atol=2e-2)  # values up to 13: two roundings
        assert_same_state(after, state, f"to {block.stop}", not claims_for(config).bit_copies)


def test_keyformer_at_no_temperature_keeps_what_h2o_keeps(forced):
    stream = grid_stream((4, *[1] * 8), seed=4)
    noisy = keyformer.policy(keyformer.Config(budget=5, sink=1, noise="additive", tau=0.0, recent=1))
    laws.law_collapses(noisy, h2o.policy(h2o.Config(budget=5, sink=1, recent=1)), stream)


def test_a_disposal_of_ones_own_is_not_passed_over(forced, monkeypatch):
    """A block with cadence "token" is one launch only where nothing becomes of the losers."""
    ranking = h2o.ranking

    def given_to_the_first(state, left):
        slots = state.slots
        lost = ((left < 0) & (slots.positions >= 0))[..., None]
        gift = mx.sum(mx.where(lost, slots.values, 0), axis=1, keepdims=True)
        return state._replace(slots=slots._replace(values=slots.values + gift * (slots.positions == 0)[..., None]))

    monkeypatch.setattr(h2o, "ranking", lambda *given: ranking(*given)._replace(dispose=given_to_the_first))
    config = h2o.Config(**FEW, cadence="token", decay=0.875)  # no other test's: steps that were traced are kept
    policy, stream = h2o.policy(config), grid_stream((4, 4, 1, 4))
    have = run(policy, stream)
    monkeypatch.setattr(launch, "FORCED", "reference")
    want = run(policy, stream)
    assert_same_state(have, want, "kernels against reference", merged=True)
    assert not np.allclose(floats(want.slots.values)[:, 0], np.array(stream.values)[:, 0], atol=1.0)


# Methods that copy a small cache on the way of a token, where launches cost more than bytes.
COPYING = [name for name in CONFIGS if "contiguous" not in name and not name.startswith(("cam", "snapkv"))]


@pytest.mark.parametrize("name", CONFIGS)
def test_step_is_attend_after_absorb(forced, monkeypatch, name):
    """Below the budget, at it, and of blocks, whatever it launches."""
    policy = veloxfn.policy(CONFIGS[name])
    stream = grid_stream((1, 1, 4, 1, 1, 1, 4, 1), seed=3)
    state = policy.init_state(2, 4, 5, dtype=mx.float16)
    for block in stream:
        before = snapshot(state)
        monkeypatch.setattr(launch, "FORCED", forced)
        have, after = veloxfn.step(policy, state, block.keys, block.values, block.queries, scale=0.25)
        mx.eval(have, after)
        assert not differences(before, snapshot(state)), "the old state changed"
        monkeypatch.setattr(launch, "FORCED", "reference")
        absorbed = policy.absorb(state, block.keys, block.values)
        want, state = veloxfn.attend(policy, absorbed, block.queries, scale=0.25)
        assert np.allclose(floats(have), floats(want), atol=2e-2)
        assert_same_state(after, state, f"to {block.stop}", name.startswith("cam"))


@pytest.mark.parametrize("name", CONFIGS)
def test_one_token_into_a_full_cache_is_two_launches_or_one(forced, launched, name):
    policy = veloxfn.policy(CONFIGS[name])
    stream = grid_stream((8, 1), seed=5)
    state = policy.init_state(2, 4, 5, dtype=mx.float16)
    first, last = stream
    given = [{"queries": block.queries} if policy.config.needs_queries else {} for block in stream]
    state = policy.update_batched(state, first.keys, first.values, **given[0])
    mx.eval(state)
    launched.clear()
    policy.update_batched(state, last.keys, last.values, **given[1])
    veloxfn.step(policy, state, last.keys, last.values, last.queries)
    copied = forced in ("cuda", "host") and name in COPYING
    attended = ["token_attend", "token_finish"]
    kernels = [*(attended if policy.config.needs_queries else ["token_move"]), *attended]
    assert ([name for name, _ in launched] == kernels) == copied, launched
    assert any(name.startswith("token_") for name, _ in launched) == copied


@pytest.mark.parametrize(
    ("policy", "times", "kernels"),
    [
        (h2o.policy(h2o.Config(budget=5, sink=1, recent=1)), 1, ["token_attend", "token_finish"]),
        (knorm.policy(knorm.Config(budget=5, sink=1)), 2, ["token_move"]),
    ],
    ids=["h2o", "knorm"],
)
def test_a_cache_too_large_to_be_copied_is_written_into(forced, launched, monkeypatch, policy, times, kernels):
    """Without attention half as large a one is."""
    module = importlib.import_module("veloxfn.ops.token_step")  # the package's name for it is the function
    first, last = grid_stream((8, 1), seed=5)
    given = [{"queries": block.queries} if policy.config.needs_queries else {} for block in (first, last)]
    state = policy.update_batched(policy.init_state(2, 4, 5, dtype=mx.float16), first.keys, first.values, **given[0])
    most = times * (state.slots.keys.nbytes + state.slots.values.nbytes)
    for limit, copied in ((most, True), (most - 1, False)):
        monkeypatch.setattr(module, "_MOST_BYTES", limit)
        launched.clear()
        policy.update_batched(state, last.keys, last.values, **given[1])
        assert (launched == [(name, forced) for name in kernels]) == (copied and forced != "metal")


@pytest.mark.parametrize(
    "config",
    [
        h2o.Config(budget=5, sink=1, recent=1, shared_heads=2),
        h2o.Config(budget=5, sink=1, recent=1, query_source="key_proxy"),
        h2o.Config(budget=5, sink=1, recent=1, placement=Contiguous(Rope(dims=2))),
    ],
    ids=["shared", "proxy", "contiguous"],
)
def test_what_these_launches_cannot_do_is_done_by_others(forced, launched, config):
    policy = h2o.policy(config)
    stream = grid_stream((8, 1), seed=5)
    first, last = stream
    given = {"queries": first.queries} if config.needs_queries else {}
    state = policy.update_batched(policy.init_state(2, 4, 5, dtype=mx.float16), first.keys, first.values, **given)
    launched.clear()
    veloxfn.step(policy, state, last.keys, last.values, last.queries)
    assert launched
    assert not any(name.startswith("token_") for name, _ in launched)
