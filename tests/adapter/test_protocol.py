"""What mlx_lm does with a cache beside attending: copy, save, trim, count, refuse."""

import copy
import gc
import sys

import mlx.core as mx
import pytest
from mlx.utils import tree_map
from mlx_lm.generate import generate_step, maybe_quantize_kv_cache, speculative_generate_step
from mlx_lm.models import cache as mlx_lm_cache

import veloxfn
from veloxfn_mlx_adapter import EvictingCache, diagnostics, make_prompt_cache

METHODS = sorted(veloxfn.METHODS)


def same(first, second):
    return all(mx.array_equal(a, b) for a, b in zip(first.state, second.state, strict=True))


def test_lesson_24_state_is_set_during_chunked_prefill(tiny, caches_of, tokens):
    model = tiny()
    caches = caches_of(model, budget=16)
    for i in range(3):
        model(tokens(20, seed=i), cache=caches)
        mx.eval([cache.state for cache in caches])
        assert all(len(cache.state) > 6 for cache in caches)
    for cache in caches:  # writing it back replaces, it does not append
        before = cache.state
        cache.state = before
        assert cache.offset == 60
        assert all(mx.array_equal(a, b) for a, b in zip(cache.state, before, strict=True))


def test_lesson_26_kv_bits_are_refused(tiny, caches_of, tokens):
    model = tiny()
    caches = caches_of(model, budget=16)
    steps = generate_step(tokens(30)[0], model, prompt_cache=caches, kv_bits=4, quantized_kv_start=0, max_tokens=2)
    with pytest.raises(NotImplementedError, match="kv_bits=4 cannot be combined with eviction"):
        next(steps)
    maybe_quantize_kv_cache(caches, 0, 64, None)
    assert {type(cache) for cache in caches} == {EvictingCache}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("settled", [False, True])
def test_lesson_27_save_and_load_continue_bit_for_bit(tiny, caches_of, tokens, feed, tmp_path, method, settled):
    model, inputs = tiny(), tokens(80)
    caches = caches_of(model, method, budget=16, sink=2)
    feed(model, caches, inputs[:, :45], 20, 20)
    feed(model, caches, inputs[:, 45:50], 5)
    if settled:
        for cache in caches:
            cache.settle()
    file = str(tmp_path / "prompt.safetensors")
    mlx_lm_cache.save_prompt_cache(file, caches)
    loaded = mlx_lm_cache.load_prompt_cache(file)
    assert [type(cache) for cache in loaded] == [EvictingCache] * 2
    for before, after in zip(caches, loaded, strict=True):
        assert after.offset == 50
        assert after.config == before.config
        assert same(before, after)
    assert mx.array_equal(feed(model, loaded, inputs[:, 50:], 10), feed(model, caches, inputs[:, 50:], 10))


def test_lesson_27_an_empty_cache_saves_and_loads(tiny, caches_of, tokens, feed, tmp_path):
    model = tiny()
    file = str(tmp_path / "prompt.safetensors")
    mlx_lm_cache.save_prompt_cache(file, caches_of(model, budget=16))
    loaded = mlx_lm_cache.load_prompt_cache(file)
    assert all(cache.empty() for cache in loaded)
    expected = feed(model, caches_of(model, budget=16), tokens(40), 30)
    assert mx.array_equal(feed(model, loaded, tokens(40), 30), expected)


def test_a_state_of_mlx_lm_0_31_form_loads(tiny, caches_of, tokens, feed):
    model = tiny()
    caches = caches_of(model, budget=16)
    feed(model, caches, tokens(30), 30)
    made = EvictingCache.from_state(caches[0].state, caches[0].meta_state)
    assert same(made, caches[0])
    with pytest.raises(ValueError, match="has no meta_state, got '3'"):
        made.meta_state = "3"


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ([mx.zeros((3,))], "first array of a saved eviction cache is its uint8 record"),
        ([mx.array(list(b'{"format": 99}'), mx.uint8)], "must have format 2"),
    ],
)
def test_a_foreign_state_is_refused(state, message):
    with pytest.raises(ValueError, match=message):
        EvictingCache.from_state(state)


def test_a_file_cannot_name_other_classes():
    from veloxfn_mlx_adapter import portable

    with pytest.raises(ValueError, match="os:path is no setting of a method"):
        portable.config_of({"type": "os:path", "fields": {}})
    with pytest.raises(ValueError, match=r"subprocess:Popen is no setting"):
        portable.config_of({"type": "subprocess:Popen", "fields": {"args": "true"}})


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("taken", [0, 1, 3, 5])
@pytest.mark.parametrize("before", [0, 3, 10, 16, 17, 30])
def test_lesson_28_taking_back_within_the_last_block_is_exact(method, taken, before):
    settings = {"age_normalised": True} if method == "h2o" else {}
    config = veloxfn.METHODS[method].Config(budget=16, sink=2, **settings)
    trimmed, straight = (EvictingCache(veloxfn.policy(config)) for _ in range(2))
    keys, values, queries = (mx.random.normal((1, heads, 60, 8), key=mx.random.key(heads)) for heads in (2, 3, 4))
    values = values[:, :2]

    def feed(cache, start, stop):
        if start < stop:
            shown, _ = cache.update_and_fetch(keys[:, :, start:stop], values[:, :, start:stop])
            cache.observe(queries[:, :, start:stop], shown, 8**-0.5, None)

    end = before + 5 - taken
    for cache in (trimmed, straight):
        feed(cache, 0, before)
    feed(trimmed, before, before + 5)
    assert trimmed.trim(taken) == taken
    feed(straight, before, end)
    assert trimmed.offset == straight.offset == end
    for start, stop in ((end, end), (end, end + 7), (end + 7, end + 8), (end + 8, end + 9)):
        for cache in (trimmed, straight):
            feed(cache, start, stop)
            cache.settle()
        if straight.method_state is None:
            continue
        ours, theirs = (veloxfn.kept_positions(cache.method_state).tolist() for cache in (trimmed, straight))
        # A slot that the first arrival took and gave back stays free, where the other cache has no such slot.
        assert [[p for p in row if p >= 0] for row in ours] == [[p for p in row if p >= 0] for row in theirs]
        for got, expected in zip(trimmed.keys_and_values(), straight.keys_and_values(), strict=True):
            assert mx.array_equal(got[:, :, got.shape[2] - expected.shape[2] :], expected)


def test_lesson_28_taking_back_more_is_refused(tiny, caches_of, tokens):
    model = tiny()
    caches = caches_of(model, budget=16)
    assert all(cache.is_trimmable() for cache in caches)
    model(tokens(30), cache=caches)
    assert all(cache.is_trimmable() for cache in caches)
    model(tokens(4), cache=caches)
    assert not any(cache.is_trimmable() for cache in caches)
    assert mlx_lm_cache.trim_prompt_cache(caches, 5) == 0
    for n in (5, -1):
        with pytest.raises(ValueError, match=f"trim takes back 0 to 4 tokens, the last block, got {n}"):
            caches[0].trim(n)
    caches[0].settle()
    with pytest.raises(ValueError, match="trim takes back 0 to 0 tokens"):
        caches[0].trim(1)


def lively(model, seed):
    """Weights large enough that the most likely token changes from step to step."""
    draws = iter(mx.random.split(mx.random.key(seed), 200))
    model.update(tree_map(lambda leaf: 0.4 * mx.random.normal(leaf.shape, key=next(draws)), model.parameters()))
    return model


@pytest.mark.parametrize("budget", [16, 500])
@pytest.mark.parametrize("method", METHODS)
def test_speculative_decoding_takes_back_what_was_rejected(method, budget, tiny, caches_of, stock, tokens):
    """The tokens of plain decoding below the budget, and the rewound offset of mlx_lm's own cache always."""
    model, draft, prompt = lively(tiny(), 1), lively(tiny(num_hidden_layers=1), 2), tokens(40)[0]
    expected = [token for token, _ in generate_step(prompt, model, max_tokens=20)]
    assert len(set(expected)) > 5
    offsets, said = [], []
    for run in (caches_of(model, method, budget=budget), stock(model)):
        steps = list(speculative_generate_step(prompt, model, draft, max_tokens=20, prompt_cache=run + stock(draft)))
        said.append([int(token) for token, _, _ in steps])
        offsets.append(run[0].offset)
        assert sum(not from_draft for _, _, from_draft in steps) > 5, "the draft was rejected now and then"
    assert said[1] == expected
    if budget == 500:
        assert said[0] == expected
        assert offsets[0] == offsets[1]
    assert offsets[0] in (59, 60, 61, 62, 63)


def test_a_rewind_beyond_the_last_block_is_loud(tiny, stock, tokens):
    model, prompt = lively(tiny(), 1), tokens(40)[0]
    policy = veloxfn.policy(veloxfn.streaming_llm.Config(budget=16))
    draft = lively(tiny(num_hidden_layers=1), 2)
    caches = make_prompt_cache(model, policy) + make_prompt_cache(draft, policy)
    with pytest.raises(ValueError, match="trim takes back 0 to 1 tokens, the last block"):
        list(speculative_generate_step(prompt, model, draft, max_tokens=20, prompt_cache=caches, num_draft_tokens=5))


def test_the_rewind_is_mlx_lms_own_again_without_our_caches(tiny, caches_of):
    generate = sys.modules["mlx_lm.generate"]
    gc.collect()
    original = generate.trim_prompt_cache
    caches = caches_of(tiny(), budget=16)
    assert generate.trim_prompt_cache is not original
    del caches
    gc.collect()
    assert generate.trim_prompt_cache is original is mlx_lm_cache.trim_prompt_cache


def test_lesson_29_deep_copies_are_independent(tiny, caches_of, tokens, feed):
    model, inputs = tiny(), tokens(60)
    caches = caches_of(model, budget=16)
    feed(model, caches, inputs[:, :41], 20, 20)
    copies = copy.deepcopy(caches)
    assert all(same(a, b) for a, b in zip(caches, copies, strict=True))
    first = feed(model, copies, inputs[:, 41:])
    assert caches[0].offset == 41
    assert mx.array_equal(feed(model, caches, inputs[:, 41:]), first)
    assert all(same(a, b) for a, b in zip(caches, copies, strict=True))
    assert copy.copy(caches[0]).offset == caches[0].copy().offset == 60


def test_lesson_31_nothing_sends_attention_down_another_path(tiny, caches_of):
    cache = caches_of(tiny(), budget=16)[0]
    assert not hasattr(cache, "bits")
    assert not hasattr(cache, "__len__")
    assert not hasattr(cache, "__bool__")
    assert not isinstance(cache, mlx_lm_cache.KVCache)


def test_lesson_32_one_cache_list_serves_two_calls(tiny, caches_of, tokens):
    model, prompt = tiny(), tokens(40)[0]
    caches = caches_of(model, budget=16)
    first = [token for token, _ in generate_step(prompt, model, max_tokens=10, prompt_cache=caches)]
    assert caches[0].offset == 40 + 10  # the call after the last token returned was made already
    again = [token for token, _ in generate_step(prompt[:7], model, max_tokens=10, prompt_cache=caches)]
    assert caches[0].offset == 40 + 10 + 7 + 10
    assert len(first) == len(again) == 10
    for cache in caches:
        cache.settle()
        assert veloxfn.kept_positions(cache.method_state)[:, :4].tolist() == [[0, 1, 2, 3]] * 2
        assert veloxfn.tokens_kept(cache.method_state).tolist() == [16, 16]


def test_lesson_35_nbytes_are_the_arrays_bytes(tiny, caches_of, tokens, feed):
    model = tiny(dtype=mx.bfloat16)
    caches = caches_of(model, budget=16)
    assert caches[0].nbytes == 0
    feed(model, caches, tokens(40), 20, 20)
    assert caches[0].nbytes == sum(array.nbytes for array in caches[0].state[1:])
    slots = caches[0].method_state.slots
    assert caches[0].nbytes > slots.keys.nbytes + slots.values.nbytes


def test_lesson_35_diagnostics_count_keys_and_values_of_all_heads(tiny, caches_of, tokens, feed):
    model = tiny(dtype=mx.float16)
    caches = caches_of(model, budget=16)
    empty = diagnostics(caches)[1]
    assert (empty.layer, empty.tokens_seen, empty.compression_ratio) == (1, 0, 1.0)
    feed(model, caches, tokens(40, batch=2), 40)
    for cache, layer in zip(caches, diagnostics(caches), strict=True):
        assert cache.tokens_kept == layer.tokens_kept, "the eviction that is held back counts as done"
        assert (layer.method, layer.layer_budget, layer.tokens_seen, layer.tokens_kept) == ("h2o", 16, 40, 16)
        row = 2 * 2 * (8 + 8) * 2  # sequences, heads, key and value dimension, bytes
        assert (layer.kept_bytes, layer.full_bytes) == (16 * row, 40 * row)
        assert layer.compression_ratio == 2.5


def test_lesson_36_size_means_tokens_as_in_mlx_lm(tiny, caches_of, stock, tokens, feed):
    model = tiny()
    ours, theirs = caches_of(model, budget=16), stock(model)
    for caches in (ours, theirs):
        assert caches[0].empty()
        feed(model, caches, tokens(40), 40)
        assert not caches[0].empty()
    assert ours[0].size() == theirs[0].size() == ours[0].offset == 40


def test_layers_can_share_keys_and_values(tiny, caches_of, tokens, feed):
    cache = caches_of(tiny(), budget=16)[0]
    assert cache.keys is None
    assert cache.keys_and_values() == (None, None)
    feed(tiny(), caches := caches_of(tiny(), budget=16), tokens(40), 30)
    block = mx.random.normal((1, 2, 3, 8))
    returned = caches[0].update_and_fetch(block, block)
    for one, other in zip(returned, caches[0].keys_and_values(), strict=True):
        assert mx.array_equal(one, other)
    caches[0].keys = mx.depends(caches[0].keys, [mx.exp(block)])
    assert mx.array_equal(caches[0].keys, returned[0])
    with pytest.raises(ValueError, match="keys can be set only to themselves"):
        caches[0].keys = block


def test_values_may_have_another_width_or_none():
    for width in (0, 3):
        cache = EvictingCache(veloxfn.policy(veloxfn.knorm.Config(budget=16)))
        for count in (30, 1, 1, 5):
            keys, values = cache.update_and_fetch(mx.zeros((1, 2, count, 8)), mx.zeros((1, 2, count, width)))
            mx.eval(keys, values)
        assert keys.shape == (1, 2, 21, 8)
        assert values.shape == (1, 2, 21, width)
        assert EvictingCache.from_state(cache.state).offset == 37


@pytest.mark.parametrize(
    ("keys", "values", "error", "message"),
    [
        (mx.zeros((1, 2, 8)), mx.zeros((1, 2, 8)), ValueError, r"keys must be \[B, Hkv, N, D\]"),
        (mx.zeros((1, 2, 3, 8)), mx.zeros((1, 2, 2, 8)), ValueError, r"keys must be \[B, Hkv, N, D\]"),
        (mx.zeros((2, 2, 1, 8)), mx.zeros((2, 2, 1, 8)), ValueError, "sequences join and leave by extend and filter"),
        (mx.zeros((1, 2, 1, 4)), mx.zeros((1, 2, 1, 8)), ValueError, "4"),
        (mx.zeros((1, 2, 1, 8), mx.float16), mx.zeros((1, 2, 1, 8), mx.float16), TypeError, "float16"),
    ],
)
def test_a_refused_call_leaves_the_cache_as_it_was(keys, values, error, message):
    cache = EvictingCache(veloxfn.policy(veloxfn.knorm.Config(budget=16)))
    cache.update_and_fetch(mx.ones((1, 2, 20, 8)), mx.ones((1, 2, 20, 8)))
    before = cache.copy()
    with pytest.raises(error, match=message):
        cache.update_and_fetch(keys, values)
    assert cache.offset == 20
    assert same(cache, before)


@pytest.mark.parametrize(
    ("policies", "error", "message"),
    [
        (veloxfn.knorm.Config(budget=16), TypeError, r"got Config; bind it: veloxfn.policy\(config\)"),
        ([veloxfn.policy(veloxfn.knorm.Config(budget=16))], ValueError, "one entry per cache of the model: 2, got 1"),
        ([None, None], ValueError, "has no layer to evict from"),
        ([None, 3], TypeError, r"policies\[1\] must be a veloxfn.Policy or None, got int"),
        ("h2o", TypeError, "policy must be a veloxfn.Policy or one per layer, got str"),
    ],
)
def test_wrong_policies_are_refused(tiny, policies, error, message):
    with pytest.raises(error, match=message):
        make_prompt_cache(tiny(), policies)
