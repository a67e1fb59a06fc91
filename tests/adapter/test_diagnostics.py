"""What caches say they hold, as numbers and as a table."""

import mlx.core as mx
import pytest

import veloxfn
from veloxfn import Contiguous, cam, h2o, keyformer, knorm, streaming_llm
from veloxfn_mlx_adapter import EvictingCache, diagnostics, make_prompt_cache, rope_of
from veloxfn_mlx_adapter.diagnostics import Diagnosed, describe


class Held(Diagnosed):
    """A state of one's own to look at."""

    def __init__(self, policy, state, layer=0):
        self._policy, self._state, self._layer = policy, state, layer


def ragged(lengths, budget, heads=2, dtype=mx.float16, key_dim=4, value_dim=6):
    """A state whose sequences have seen different numbers of tokens, by left padding."""
    policy = veloxfn.policy(knorm.Config(budget=budget, sink=1))
    rows, longest = len(lengths) * heads, max(lengths)
    state = policy.init_state(rows, key_dim, value_dim, dtype=dtype)
    keys, values = (mx.random.normal((rows, longest, dim)).astype(dtype) for dim in (key_dim, value_dim))
    valid = mx.arange(longest)[None] >= longest - mx.repeat(mx.array(lengths), heads)[:, None]
    return policy, policy.absorb(state, keys, values, valid=valid)


@pytest.mark.parametrize("dtype", [mx.float16, mx.float32])
@pytest.mark.parametrize("evicted", [False, True])
def test_bytes_are_the_sum_over_the_live_rows_of_each_sequence(dtype, evicted):
    lengths, budget, heads = (40, 3, 16, 17), 16, 2
    policy, state = ragged(lengths, budget, heads, dtype)
    layer = diagnostics([Held(policy, policy.evict(state) if evicted else state)])[0]
    row = (4 + 6) * dtype.size * heads
    assert (layer.tokens_seen, layer.tokens_kept) == (40, 16)
    assert layer.full_bytes == sum(lengths) * row
    assert layer.kept_bytes == sum(min(length, budget) for length in lengths) * row
    assert layer.compression_ratio == sum(lengths) / (16 + 3 + 16 + 16)
    after = policy.evict(state)
    assert layer.kept_bytes == veloxfn.kept_bytes(after).item()
    live = mx.where(veloxfn.kept_positions(after) >= 0, 1, 0).sum().item()
    assert layer.kept_bytes == live * (4 + 6) * dtype.size


def test_bytes_of_sequences_that_joined_are_the_sum_of_theirs(tiny, caches_of, tokens, feed):
    model = tiny(dtype=mx.float16)
    alone = [caches_of(model, budget=16) for _ in range(3)]
    for caches, length in zip(alone, (40, 5, 20), strict=True):
        feed(model, caches, tokens(length, seed=length), length)
    singles = [diagnostics(caches)[1] for caches in alone]
    joined = EvictingCache.merge([caches[1] for caches in alone])
    layer = diagnostics([joined])[0]
    assert layer.kept_bytes == sum(single.kept_bytes for single in singles) == (16 + 5 + 16) * 2 * (8 + 8) * 2
    assert layer.full_bytes == sum(single.full_bytes for single in singles)
    assert (layer.tokens_seen, layer.tokens_kept) == (40, 16)
    joined.filter([1])
    assert diagnostics([joined])[0] == singles[1]


def test_bytes_above_two_gigabytes_are_counted():
    policy = veloxfn.policy(knorm.Config(budget=16))
    state = policy.init_state(2, 4, dtype=mx.float32)
    many = mx.full((2,), 2**30, mx.int32)
    held = Held(policy, state._replace(slots=state.slots._replace(seen=many)))
    assert held.full_bytes == 2 * 2**30 * 8 * 4


def test_an_empty_cache_has_zeros_and_the_ratio_one(tiny):
    caches = make_prompt_cache(tiny(), veloxfn.policy(streaming_llm.Config(budget=16)))
    for layer in diagnostics(caches):
        assert (layer.tokens_seen, layer.tokens_kept, layer.kept_bytes, layer.full_bytes) == (0, 0, 0, 0)
        assert layer.compression_ratio == 1.0
    assert describe(caches).splitlines()[-1].split() == ["total", "32", "0", "0", "0", "0", "1.00"]


def test_the_settings_of_the_method_are_told(tiny):
    config = cam.Config(budget=16, targets="nearest", merge="similarity", gate=False, recent=3)
    layer = diagnostics(make_prompt_cache(tiny(), veloxfn.policy(config)))[1]
    assert layer.settings["merge"] == "similarity"
    assert layer.settings["gate"] is False
    assert layer.settings["recent"] == 3
    assert layer.settings["cadence"] == "block"
    assert "budget" not in layer.settings
    hash(layer)


def test_describe_has_a_line_per_layer_and_their_sums(tiny, tokens, feed):
    model = tiny(dtype=mx.float16)
    policies = [veloxfn.policy(h2o.Config(budget=budget, age_normalised=True)) for budget in (16, 24)]
    caches = make_prompt_cache(model, policies)
    feed(model, caches, tokens(40, batch=2), 40)
    row = 2 * 2 * (8 + 8) * 2  # sequences, heads, key and value dimension, bytes
    lines = [
        "layer  method  budget  seen  kept  bytes kept  bytes full  ratio  settings",
        f"    0  h2o         16    40    16       {16 * row:,}       {40 * row:,}   2.50  age_normalised=True",
        f"    1  h2o         24    40    24       {24 * row:,}       {40 * row:,}   1.67  age_normalised=True",
        f"total              40    80    40       {40 * row:,}      {80 * row:,}   2.00",
    ]
    assert describe(caches) == "\n".join(lines)
    assert [cache.offset for cache in caches] == [40, 40], "looking changes nothing"


def test_describe_names_the_models_own_caches(tiny, tokens, feed):
    model = tiny("gemma3_text")
    caches = make_prompt_cache(model, veloxfn.policy(knorm.Config(budget=12)))
    feed(model, caches, tokens(40), 40)
    lines = describe(caches).splitlines()
    assert lines[1].split() == ["0", *["the", "model's", "own", "RotatingKVCache"], *("-",) * 6]
    assert lines[2].split()[:5] == ["1", "knorm", "12", "40", "12"]
    assert lines[5].split()[:4] == ["total", "24", "80", "24"]


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (cam.Config(budget=16), "targets=window merge=sum gate=True"),
        (cam.Config(budget=16, merge="off", gate=False), "targets=window merge=off gate=False"),
        (cam.Config(budget=16, cadence="token"), "cadence=token targets=window merge=sum gate=True"),
        (keyformer.Config(budget=16, seed=3), "noise=logit seed=3"),
        (h2o.Config(budget=16, sink=2, recent=5), "sink=2 recent=5"),
        (streaming_llm.Config(budget=16), ""),
    ],
)
def test_describe_tells_what_differs_from_the_defaults(config, told):
    policy = veloxfn.policy(config)
    line = describe([Held(policy, None)]).splitlines()[1]
    assert line.partition("1.00")[2].strip() == told


def test_describe_tells_a_placement_without_gaps(tiny):
    model = tiny()
    caches = make_prompt_cache(model, veloxfn.policy(knorm.Config(budget=12, placement=Contiguous(rope_of(model)))))
    assert describe(caches).splitlines()[1].endswith("placement=contiguous")


def test_describe_of_nothing():
    assert [line.split()[0] for line in describe([]).splitlines()] == ["layer", "total"]
