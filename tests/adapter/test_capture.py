"""The hook on mlx_lm's attention: there while a cache is alive, gone afterwards, and honest about what it sees."""

import gc
import importlib

import mlx.core as mx
import pytest
from mlx_lm.models import base, llama

import veloxfn
from veloxfn_mlx_adapter import EvictingCache, hook_installed, make_prompt_cache, query_capture, remove_hook

ORIGINAL = base.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def no_hook():
    gc.collect()
    assert not hook_installed()
    yield
    gc.collect()
    remove_hook()
    assert base.scaled_dot_product_attention is ORIGINAL


def test_the_hook_lives_as_long_as_a_cache(tiny, caches_of):
    caches = caches_of(tiny(), budget=16)
    assert llama.scaled_dot_product_attention is base.scaled_dot_product_attention is not ORIGINAL
    copied = caches[0].copy()
    del caches
    gc.collect()
    assert hook_installed()
    del copied
    gc.collect()
    assert not hook_installed()
    assert llama.scaled_dot_product_attention is base.scaled_dot_product_attention is ORIGINAL


def test_modules_loaded_later_are_hooked_and_restored(caches_of, tiny):
    caches = caches_of(tiny(), budget=16)
    late = importlib.reload(importlib.import_module("mlx_lm.models.helium"))
    assert late.scaled_dot_product_attention is base.scaled_dot_product_attention is not ORIGINAL
    del caches
    gc.collect()
    assert late.scaled_dot_product_attention is ORIGINAL


def test_query_capture_keeps_the_hook_in_a_block(tiny):
    with query_capture(tiny()):
        assert hook_installed()
        with query_capture():
            assert hook_installed()
        assert hook_installed()
    assert not hook_installed()


def test_other_caches_are_not_touched(tiny, caches_of, stock, tokens, feed):
    model = tiny()
    plain = feed(model, stock(model), tokens(40), 30)
    caches = caches_of(model, budget=16)
    assert hook_installed()
    assert mx.array_equal(feed(model, stock(model), tokens(40), 30), plain)
    assert mx.array_equal(model(tokens(5)), model(tokens(5)))
    assert caches[0].empty()


def test_without_the_hook_a_method_that_needs_queries_says_so(tiny, caches_of, tokens):
    model = tiny()
    caches = caches_of(model, budget=16)
    remove_hook()
    model(tokens(20), cache=caches)
    message = r"veloxfn.h2o ranks by the model's queries, but remove_hook\(\) was called; .* .layer 0, 20 tokens seen"
    with pytest.raises(RuntimeError, match=message):
        model(tokens(1), cache=caches)
    with pytest.raises(RuntimeError, match=message):
        caches[0].settle()
    with query_capture(model):
        fresh = caches_of(model, budget=16)
        model(tokens(20), cache=fresh)
        model(tokens(1), cache=fresh)


def test_a_method_without_queries_works_without_the_hook(tiny, caches_of, tokens):
    model = tiny()
    caches = caches_of(model, "knorm", budget=16)
    remove_hook()
    for count in (20, 1, 1):
        assert mx.isfinite(model(tokens(count), cache=caches)).all()


def test_attention_outside_the_hook_is_refused_up_front(tiny, caches_of, tokens, feed):
    model = tiny("gemma2", head_dim=8, query_pre_attn_scalar=8.0)
    with pytest.raises(ValueError, match=r"h2o ranks .* layer 0 of mlx_lm.models.gemma2.Model does not call"):
        caches_of(model, budget=16)
    gc.collect()
    assert not hook_installed()
    assert mx.isfinite(feed(model, caches_of(model, "knorm", budget=16), tokens(40), 30, 5)).all()


def test_attention_that_skips_the_hook_is_refused_at_the_next_call(tiny, caches_of, tokens, monkeypatch):
    model = tiny()
    caches = caches_of(model, budget=16)
    monkeypatch.setattr(llama, "scaled_dot_product_attention", ORIGINAL)
    model(tokens(20), cache=caches)
    with pytest.raises(RuntimeError, match=r"mlx_lm.models.llama.Model did not call mlx_lm's scaled_dot_product"):
        model(tokens(1), cache=caches)


def latent_attention(tiny):
    return tiny("deepseek_v3", kv_lora_rank=8, q_lora_rank=None, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8)


def test_latent_attention_is_refused_for_queries_and_works_without(tiny, caches_of, stock, tokens, feed):
    model = latent_attention(tiny)
    caches = caches_of(model, budget=16)
    model(tokens(20), cache=caches)
    with pytest.raises(RuntimeError, match="does not show them"):
        model(tokens(1), cache=caches)
    caches = caches_of(model, "knorm", budget=16)
    assert mx.array_equal(model(tokens(30), cache=caches), model(tokens(30), cache=stock(model)))
    assert mx.isfinite(feed(model, caches, tokens(10), 4)).all()


def test_captured_mass_is_the_models_attention(tiny, tokens):
    """One block from the start: the mass must be the column sums of the attention that the model computed."""
    for family, scale in (("llama", 8**-0.5), ("granite", 0.3)):
        model = tiny(
            family,
            attention_multiplier=0.3,
            embedding_multiplier=1.0,
            residual_multiplier=1.0,
            logits_scaling=1.0,
            attention_bias=False,
            mlp_bias=False,
        )
        caches = make_prompt_cache(model, veloxfn.policy(veloxfn.h2o.Config(budget=64)))
        seen = {}
        hooked = base.scaled_dot_product_attention
        module = importlib.import_module(f"mlx_lm.models.{family}")

        def spy(queries, keys, values, cache, scale, mask, seen=seen, hooked=hooked, **options):
            seen[id(cache)] = (queries, keys, scale)
            return hooked(queries, keys, values, cache=cache, scale=scale, mask=mask, **options)

        module.scaled_dot_product_attention = spy
        try:
            model(tokens(12, batch=2), cache=caches)
        finally:
            module.scaled_dot_product_attention = hooked
        for cache in caches:
            cache.settle()
            queries, keys, used = seen[id(cache)]
            assert used == pytest.approx(scale)
            scores = used * queries @ mx.repeat(keys, 2, axis=1).swapaxes(-1, -2)
            weights = mx.softmax(mx.where(mx.tri(12, dtype=mx.bool_), scores, -mx.inf), axis=-1)
            expected = weights.sum(axis=2).reshape(4, 2, 12).mean(axis=1)
            assert mx.allclose(cache.method_state.mass, expected, atol=1e-5)


def test_the_first_attention_call_after_an_update_counts():
    cache = EvictingCache(veloxfn.policy(veloxfn.h2o.Config(budget=16)))
    keys, _ = cache.update_and_fetch(mx.ones((1, 2, 4, 8)), mx.ones((1, 2, 4, 8)))
    queries = mx.random.normal((1, 4, 4, 8))
    cache.observe(queries, keys, 8**-0.5, "causal")
    cache.observe(queries + 1, keys, 8**-0.5, "causal")
    assert mx.array_equal(cache.state[-1], queries.reshape(2, 2, 4, 8))
