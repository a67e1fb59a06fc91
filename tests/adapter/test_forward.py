"""What a model sees of the caches: logits, offsets, masks, families, batches."""

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models import cache as mlx_lm_cache

import veloxfn
from veloxfn_mlx_adapter import EvictingCache, make_prompt_cache

FAMILIES = ["llama", "qwen2", "qwen3", "phi3", "phi", "gemma", "starcoder2", "cohere", "gemma3_text", "gpt_oss"]
METHODS = sorted(veloxfn.METHODS)


def continuation(model, prompt, count, **options):
    return [token for token, _ in generate_step(prompt, model, max_tokens=count, **options)]


@pytest.mark.parametrize("family", FAMILIES)
def test_budget_above_the_prompt_generates_what_mlx_lm_generates(tiny, caches_of, tokens, family):
    model, prompt = tiny(family), tokens(37)[0]
    expected = continuation(model, prompt, 12, prefill_step_size=16)
    caches = caches_of(model, budget=64, sink=2)
    assert continuation(model, prompt, 12, prefill_step_size=16, prompt_cache=caches) == expected


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("budget", [6, 16, 64])
def test_lesson_21_logits_of_a_one_call_prompt_do_not_depend_on_the_budget(
    tiny, caches_of, stock, tokens, family, method, budget
):
    model, prompt = tiny(family), tokens(40)
    assert mx.array_equal(
        model(prompt, cache=caches_of(model, method, budget=budget, sink=2)), model(prompt, cache=stock(model))
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_under_eviction_logits_are_finite_and_differ(tiny, caches_of, stock, tokens, feed, family):
    model, inputs = tiny(family), tokens(60)
    caches = caches_of(model, budget=12, sink=2)
    evicted, full = feed(model, caches, inputs, 30, 20), feed(model, stock(model), inputs, 30, 20)
    assert mx.isfinite(evicted).all()
    assert mx.array_equal(evicted[:, :30], full[:, :30])
    assert not mx.allclose(evicted[:, 30:], full[:, 30:])


@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss"])
def test_lesson_33_sliding_window_layers_keep_their_own_cache(tiny, caches_of, stock, family):
    model = tiny(family)
    own, ours = stock(model), caches_of(model, budget=16, sink=2)
    for kept, cache in zip(own, ours, strict=True):
        assert type(cache) is (EvictingCache if type(kept) is mlx_lm_cache.KVCache else type(kept))
    assert {type(cache).__name__ for cache in ours} == {"EvictingCache", "RotatingKVCache"}


@pytest.mark.parametrize("method", METHODS)
def test_lesson_18_offset_counts_tokens_seen(tiny, caches_of, tokens, feed, method):
    model = tiny()
    caches = caches_of(model, method, budget=32, **({"beta": 1.0} if method == "pyramidkv" else {}))
    feed(model, caches, tokens(264), 64)
    for cache in caches:
        assert cache.offset == 264
        cache.settle()
        assert veloxfn.tokens_kept(cache.method_state).tolist() == [32, 32]
        assert veloxfn.tokens_seen(cache.method_state).tolist() == [264, 264]


@pytest.mark.parametrize("method", METHODS)
def test_lesson_19_every_kept_key_is_one_that_arrived(tiny, caches_of, stock, tokens, feed, method):
    model, inputs = tiny(), tokens(50)
    # The first layer's keys depend on tokens and positions only, so the full cache holds what arrived.
    full, caches = stock(model), caches_of(model, method, budget=10, sink=2)
    feed(model, full, inputs, 50)
    feed(model, caches, inputs, 20, 9)
    caches[0].settle()
    state = caches[0].method_state
    keys, values = veloxfn.policy(caches[0].config).get_kv(state)
    where = veloxfn.kept_positions(state)
    arrived_keys, arrived_values = (array[0] for array in full[0].keys_and_values())
    for row in range(2):
        assert mx.allclose(keys[row], arrived_keys[row][where[row]], atol=1e-5)
        if method != "cam":  # which merges values
            assert mx.allclose(values[row], arrived_values[row][where[row]], atol=1e-5)


@pytest.mark.parametrize("pieces", [[1, 63], [40, 3, 7], [1], [64], [5, 5, 5, 5, 5]])
@pytest.mark.parametrize("method", METHODS)
def test_lesson_22_any_chunking_runs_and_holds_the_budget(tiny, caches_of, tokens, feed, method, pieces):
    model = tiny()
    caches = caches_of(model, method, budget=16, sink=2)
    logits = feed(model, caches, tokens(64), *pieces)
    assert mx.isfinite(logits).all()
    for cache in caches:
        cache.settle()
        assert cache.offset == 64
        assert veloxfn.tokens_kept(cache.method_state).tolist() == [16, 16]


@pytest.mark.parametrize("method", METHODS)
def test_lesson_22_an_empty_call_changes_nothing(method):
    plain, mixed = (EvictingCache(veloxfn.policy(veloxfn.METHODS[method].Config(budget=16))) for _ in range(2))
    nothing = mx.zeros((1, 2, 0, 8))
    assert mixed.update_and_fetch(nothing, nothing)[0].shape == (1, 2, 0, 8)
    assert mixed.empty()
    for i, count in enumerate((20, 9, 1, 1)):
        block = mx.random.normal((1, 2, count, 8), key=mx.random.key(i))
        queries = mx.random.normal((1, 4, count, 8), key=mx.random.key(10 + i))
        for cache in (plain, mixed):
            keys, _ = cache.update_and_fetch(block, block)
            cache.observe(queries, keys, 8**-0.5, None)
        rows, _ = mixed.update_and_fetch(nothing, nothing)
        assert mixed.make_mask(0, return_array=True).shape == (0, rows.shape[2])
        mixed.observe(nothing, rows, 8**-0.5, None)
        assert mixed.offset == plain.offset
        for ours, theirs in zip(mixed.state, plain.state, strict=True):
            assert mx.array_equal(ours, theirs)


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        *((method, {}) for method in METHODS),
        ("keyformer", {"noise": "additive"}),
        ("cam", {"targets": "nearest", "merge": "similarity"}),
    ],
)
def test_lesson_34_rows_of_a_batch_equal_separate_runs(tiny, caches_of, feed, method, settings):
    """Noise does not depend on the place in the batch either."""
    model = tiny(vocab_size=211)  # no token twice: equal tokens have equal norms, up to rounding
    inputs = mx.stack([mx.random.permutation(211, key=mx.random.key(row))[:70] for row in range(3)])
    settings = {"budget": 16, "sink": 2, **settings}
    together = caches_of(model, method, **settings)
    logits = feed(model, together, inputs, 33, 20)
    for row in range(3):
        alone = caches_of(model, method, **settings)
        assert mx.allclose(feed(model, alone, inputs[row : row + 1], 33, 20), logits[row : row + 1], atol=1e-4)
        for one, all_of_them in zip(alone, together, strict=True):
            kept = veloxfn.kept_positions(all_of_them.method_state)[2 * row : 2 * row + 2]
            assert veloxfn.kept_positions(one.method_state).tolist() == kept.tolist()


@pytest.mark.parametrize("method", METHODS)
def test_layers_name_their_noise_streams(tiny, caches_of, tokens, feed, method):
    model = tiny()
    caches = caches_of(model, method, budget=16)
    feed(model, caches, tokens(8, batch=2), 8)
    assert caches[1].method_state.slots.streams.tolist() == veloxfn.streams(2, 2, 1).tolist()


def test_lesson_6_the_noise_of_layers_and_heads_differs_and_that_of_sequences_does_not(tiny, caches_of, tokens, feed):
    model = tiny()
    caches = caches_of(model, "keyformer", budget=16, noise="additive")
    feed(model, caches, mx.tile(tokens(8), (2, 1)), 8)
    drawn = [tuple(row) for cache in caches for row in cache.method_state.noise.tolist()]
    assert len(drawn) == 8
    assert len(set(drawn)) == 4, "two layers of two heads"
    assert drawn[:2] == drawn[2:4]


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_lesson_30_the_models_dtype_is_kept(tiny, caches_of, tokens, feed, dtype):
    model = tiny(dtype=dtype)
    caches = caches_of(model, budget=16)
    assert feed(model, caches, tokens(30), 20).dtype == dtype
    for cache in caches:
        assert {array.dtype for array in cache.keys_and_values()} == {dtype}


def test_masks_have_kept_and_new_columns(tiny, caches_of, tokens, feed):
    model = tiny()
    caches = caches_of(model, budget=16)
    assert caches[0].make_mask(1) is None
    assert caches[0].make_mask(5) == "causal"
    assert caches[0].make_mask(3, return_array=True).tolist() == [[True, False, False], [True, True, False], [True] * 3]
    feed(model, caches, tokens(40), 40)
    mask = caches[0].make_mask(3, return_array=True)
    assert mask.shape == (3, 16 + 3)
    assert mask.sum(axis=1).tolist() == [17, 18, 19]
    keys, _ = caches[0].update_and_fetch(mx.zeros((1, 2, 3, 8)), mx.zeros((1, 2, 3, 8)))
    assert keys.shape == (1, 2, 19, 8)


def test_a_sliding_window_over_evicted_rows_is_refused(tiny, caches_of, tokens, feed):
    model = tiny()
    caches = caches_of(model, budget=16)
    feed(model, caches, tokens(12), 12)
    assert caches[0].make_mask(2, window_size=64) == "causal"
    assert caches[0].make_mask(2, window_size=4).sum(axis=1).tolist() == [4, 4]
    feed(model, caches, tokens(12), 12)
    with pytest.raises(ValueError, match=r"sliding window of 4 over a cache that has evicted rows .budget 16"):
        caches[0].make_mask(2, window_size=4)


def test_layers_may_have_different_budgets(tiny, tokens, feed):
    model = tiny("phi3")
    policies = [veloxfn.policy(veloxfn.h2o.Config(budget=budget, sink=2)) for budget in (24, 8)]
    caches = make_prompt_cache(model, policies)
    assert mx.isfinite(feed(model, caches, tokens(60), 30, 20)).all()
    for cache in caches:
        cache.settle()
    assert [veloxfn.tokens_kept(cache.method_state).tolist() for cache in caches] == [[24] * 2, [8] * 2]


def test_array_masks_fit_layers_with_another_budget(tiny, tokens, feed, monkeypatch):
    model = tiny()
    policies = [veloxfn.policy(veloxfn.h2o.Config(budget=budget, sink=2)) for budget in (24, 8)]
    plain = feed(model, make_prompt_cache(model, policies), tokens(60), 30, 20)
    monkeypatch.setattr(
        "mlx_lm.models.llama.create_attention_mask",
        lambda h, cache, **_: cache.make_mask(h.shape[1], return_array=True),
    )
    arrays = feed(model, make_prompt_cache(model, policies), tokens(60), 30, 20)
    assert mx.allclose(arrays, plain, atol=1e-5)


def test_a_layer_without_a_policy_keeps_the_models_cache(tiny, tokens, feed):
    model = tiny()
    caches = make_prompt_cache(model, [None, veloxfn.policy(veloxfn.knorm.Config(budget=16))])
    assert [type(cache).__name__ for cache in caches] == ["KVCache", "EvictingCache"]
    assert mx.isfinite(feed(model, caches, tokens(40), 30)).all()
