"""Batches of sequences of different lengths: each is what it would be alone."""

import copy

import mlx.core as mx
import pytest
from mlx_lm import batch_generate
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models.cache import KVCache

import veloxfn
from veloxfn import Contiguous, Rope, h2o, streaming_llm
from veloxfn_mlx_adapter import EvictingCache, make_prompt_cache

METHODS = sorted(veloxfn.METHODS)
LENGTHS = (5, 47, 17, 30)
STEP, BUDGET, ANSWER = 12, 16, 9


def prompts_of(*lengths, seed=0):
    return [mx.random.randint(0, 61, (n,), key=mx.random.key(seed + n)).tolist() for n in lengths]


def alone(model, caches, prompt, tokens=ANSWER, step=STEP):
    """The answer to one prompt, and its logprobs."""
    steps = generate_step(mx.array(prompt), model, prompt_cache=caches, max_tokens=tokens, prefill_step_size=step)
    found = [(token, logprobs) for token, logprobs in steps]
    return [token for token, _ in found], [logprobs for _, logprobs in found]


def together(model, prompts, make, tokens=ANSWER, **options):
    """Answers, logprobs and caches of all prompts by continuous batching; new ones join when `joins` says."""
    options = {"prefill_step_size": STEP, "prefill_batch_size": len(prompts), **options}
    generator = BatchGenerator(model, max_tokens=tokens, completion_batch_size=len(prompts), **options)
    uids = generator.insert(prompts, caches=[make() for _ in prompts])
    return collected(generator, uids)


def collected(generator, uids):
    answers, logprobs, caches = ({uid: [] for uid in uids} for _ in range(3))
    while responses := generator.next_generated():
        for response in responses:
            answers[response.uid].append(response.token)
            logprobs[response.uid].append(response.logprobs)
            if response.finish_reason:
                caches[response.uid] = response.prompt_cache
    generator.close()
    return [(answers[uid], logprobs[uid], caches[uid]) for uid in uids]


def kept(cache):
    cache = cache.copy()
    cache.settle()
    rows = veloxfn.kept_positions(cache.method_state).tolist()
    return [[position for position in row if position >= 0] for row in rows]


def assert_alike(batched, lone):
    """The same tokens, logprobs, kept positions, keys and values as alone."""
    (answer, logprobs, caches), (expected, wanted, own) = batched, lone
    assert answer == expected
    assert all(mx.allclose(a, b, atol=1e-4) for a, b in zip(logprobs, wanted, strict=True))
    for cache, other in zip(caches, own, strict=True):
        assert (cache.offset, cache.tokens_kept) == (other.offset, other.tokens_kept)
        assert kept(cache) == kept(other)
        other = other.copy()
        cache.settle()
        other.settle()
        for a, b in zip(cache.keys_and_values(), other.keys_and_values(), strict=True):
            assert mx.allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_lesson_34_prompts_of_a_batch_equal_separate_runs(tiny, caches_of, method):
    # Tokens that come twice have keys of one norm, up to how a BLAS rounds blocks of other shapes: none do.
    model, prompts = tiny(), [mx.random.permutation(61, key=mx.random.key(n))[:n].tolist() for n in LENGTHS]
    settings = {"window": 4} if method == "snapkv" else {}
    tokens = 1 if method == "knorm" else ANSWER

    def make():
        return caches_of(model, method, budget=BUDGET, sink=2, **settings)

    batch = together(model, prompts, make, tokens)
    for prompt, batched in zip(prompts, batch, strict=True):
        own = make()
        # The generator has fed the answer but its last token; so has generate_step, which runs one ahead.
        assert_alike(batched, (*alone(model, own, prompt, tokens), own))


@pytest.mark.parametrize("cadence", ["block", "token"])
@pytest.mark.parametrize("family", ["qwen3", "gpt_oss", "gemma3_text", "phi"])
def test_families_and_cadences(tiny, caches_of, family, cadence):
    model, prompts = tiny(family), prompts_of(3, 40, 21)

    def make():
        return caches_of(model, "h2o", budget=BUDGET, cadence=cadence)

    for prompt, (answer, _, caches) in zip(prompts, together(model, prompts, make), strict=True):
        own = make()
        expected, _ = alone(model, own, prompt)
        assert answer == expected
        for cache, other in zip(caches, own, strict=True):
            if isinstance(other, EvictingCache):
                assert kept(cache) == kept(other)


def test_cadence_token_does_not_mind_chunks(tiny, caches_of):
    model, prompts = tiny(), prompts_of(40, 13)

    def make():
        return caches_of(model, "h2o", budget=BUDGET, cadence="token")

    for prompt, batched in zip(prompts, together(model, prompts, make, prefill_step_size=7), strict=True):
        own = make()
        answer, _ = alone(model, own, prompt, step=64)
        assert [kept(cache) for cache in own][:1] == [kept(cache) for cache in batched[2]][:1]  # before chunks differ
        assert len(batched[0]) == len(answer) == ANSWER


def test_contiguous_placement_in_a_batch(tiny, caches_of):
    model, prompts = tiny(), prompts_of(4, 40, 19)
    config = streaming_llm.Config(budget=BUDGET, placement=Contiguous(Rope(dims=8, base=10000.0)))

    def make():
        return make_prompt_cache(model, veloxfn.policy(config))

    for prompt, batched in zip(prompts, together(model, prompts, make), strict=True):
        own = make()
        assert_alike(batched, (*alone(model, own, prompt), own))


@pytest.mark.parametrize("method", ["h2o", "keyformer", "snapkv"])
def test_rows_join_and_leave_while_others_decode(tiny, caches_of, method):
    model, prompts = tiny(), prompts_of(33, 6, 25, 50)

    def make():
        return caches_of(model, method, budget=BUDGET, sink=2)

    lengths = [20, 3, 8, 12]
    generator = BatchGenerator(model, prefill_step_size=STEP, prefill_batch_size=2, completion_batch_size=3)
    uids = generator.insert(prompts[:2], max_tokens=lengths[:2], caches=[make(), make()])
    answers, caches = {}, {}
    later = [1, 4]  # after so many rounds the third and the fourth prompt come
    for turn in range(60):
        if turn in later:
            i = 2 + later.index(turn)
            uids += generator.insert([prompts[i]], max_tokens=[lengths[i]], caches=[make()])
        for response in generator.next_generated():
            answers.setdefault(response.uid, []).append(response.token)
            if response.finish_reason:
                caches[response.uid] = response.prompt_cache
        if turn > max(later) and len(caches) == len(prompts):
            break
    generator.close()
    for uid, prompt, count in zip(uids, prompts, lengths, strict=True):
        own = make()
        expected, _ = alone(model, own, prompt, count)
        assert answers[uid] == expected
        assert [kept(cache) for cache in caches[uid]] == [kept(cache) for cache in own]


def test_a_cache_that_has_seen_something_goes_on_in_a_batch(tiny, caches_of, feed):
    model, prompts = tiny(), prompts_of(40, 9, 22)
    first, second = ([caches_of(model, budget=BUDGET) for _ in prompts] for _ in range(2))
    for caches in (*first[:2], *second[:2]):  # the third one is new
        feed(model, caches, mx.array([prompts_of(31)[0]]), 31)
    generator = BatchGenerator(model, max_tokens=ANSWER, prefill_step_size=STEP)
    uids = generator.insert(prompts, caches=copy.deepcopy(first))
    for found, prompt, own in zip(collected(generator, uids), prompts, second, strict=True):
        assert_alike(found, (*alone(model, own, prompt), own))


def test_batch_generate_evicts(smollm2):
    model, tokenizer = smollm2.model, smollm2.tokenizer
    texts = ["The sky is", "Once upon a time there was a lighthouse on a reef, and its keeper, an old man, said that"]
    prompts = [tokenizer.encode(text) for text in texts]
    policy = veloxfn.policy(h2o.Config(budget=12, age_normalised=True))
    made = [make_prompt_cache(model, policy) for _ in prompts]
    batch = batch_generate(model, tokenizer, prompts, prompt_caches=made, max_tokens=14, return_prompt_caches=True)
    for prompt, answer, caches in zip(prompts, batch.texts, batch.caches, strict=True):
        own = make_prompt_cache(model, policy)
        expected, _ = alone(model, own, prompt, 14, 2048)
        assert answer == tokenizer.decode(expected)
        assert all(cache.tokens_kept == 12 for cache in caches)
        assert [kept(cache) for cache in caches] == [kept(cache) for cache in own]


# The verbs themselves.


def fed(lengths, *, budget=8, config=None, heads=2, seed=0):
    """One cache per length, fed random keys with queries; blocks of 5."""
    made = []
    for place, length in enumerate(lengths):
        cache = EvictingCache(veloxfn.policy(config or h2o.Config(budget=budget, age_normalised=True)))
        k, v, q = arrays(length, heads, seed + place)
        for start in range(0, length, 5):
            step(cache, *(x[:, :, start : start + 5] for x in (k, v, q)))
        made.append(cache)
    return made


def arrays(length, heads=2, seed=0, batch=1):
    shape = (batch, heads, length, 4)
    k, v = (mx.random.normal(shape, key=mx.random.key(2 * seed + i)) for i in range(2))
    q = mx.random.normal((batch, 2 * heads, length, 4), key=mx.random.key(1000 + seed))
    return k, v, q


def step(cache, k, v, q):
    mask = cache.make_mask(k.shape[2])
    keys, values = cache.update_and_fetch(k, v)
    mask = cache.observe(q, keys, 0.5, mask)
    return cache.tied(mx.fast.scaled_dot_product_attention(q, keys, values, scale=0.5, mask=mask))


@pytest.mark.parametrize("lengths", [(3,), (3, 3), (3, 20), (0, 20, 5), (8, 9, 0), (0, 0)])
def test_merge_then_extract_is_what_went_in(lengths):
    caches = fed(lengths)
    merged = EvictingCache.merge(caches)
    assert merged.size() == max(lengths)
    for i, (length, cache) in enumerate(zip(lengths, caches, strict=True)):
        back = merged.extract(i)
        assert back.size() == length
        cache.settle()
        back.settle()
        if length:
            assert len(back.state) == len(cache.state)
            assert kept(back) == kept(cache)
            assert all(
                mx.array_equal(a, b) for a, b in zip(back.keys_and_values(), cache.keys_and_values(), strict=True)
            )


@pytest.mark.parametrize("blocks", [(1, 1, 1), (3,), (7, 1), (1, 6, 2)])
def test_every_sequence_attends_to_its_own_rows_only(blocks):
    lengths = (3, 20, 0, 8)
    batch, single = EvictingCache.merge(fed(lengths)), fed(lengths)
    for turn, count in enumerate(blocks):
        k, v, q = arrays(count, seed=90 + turn, batch=len(lengths))
        output = step(batch, k, v, q)
        for i, cache in enumerate(single):
            own = step(cache, k[i : i + 1], v[i : i + 1], q[i : i + 1])
            assert mx.allclose(output[i : i + 1], own, atol=1e-5), (turn, i)
    assert [kept(batch.extract(i)) for i in range(4)] == [kept(cache) for cache in single]


def test_the_mask_is_right_where_the_model_does_not_call_the_hooked_attention():
    lengths, config = (3, 20, 8, 30), streaming_llm.Config(budget=8)
    batch, single = EvictingCache.merge(fed(lengths, config=config)), fed(lengths, config=config)
    for turn, count in enumerate((1, 4, 1, 1, 9, 1)):
        k, v, q = arrays(count, seed=70 + turn, batch=len(lengths))
        mask = batch.make_mask(count)
        keys, values = batch.update_and_fetch(k, v)
        output = mx.fast.scaled_dot_product_attention(q, keys, values, scale=0.5, mask=mask)
        for i, cache in enumerate(single):
            own = step(cache, k[i : i + 1], v[i : i + 1], q[i : i + 1])
            assert mx.allclose(output[i : i + 1], own, atol=1e-5), (turn, i)


@pytest.mark.parametrize("side", ["left", "right", "right without lengths"])
def test_padding_is_as_if_it_were_not_there(side):
    lengths = (4, 11, 1)
    longest = max(lengths)
    padding = [longest - length for length in lengths]
    batch, single = EvictingCache.merge(fed((0, 0, 0))), fed((0, 0, 0))
    k, v, q = arrays(longest, seed=5, batch=3)
    blocks = (longest,) if side == "right without lengths" else (5, longest - 5)
    if side == "left":
        batch.prepare(left_padding=padding)
        assert batch.offset.tolist() == [-n for n in padding]
    else:
        batch.prepare(right_padding=padding, lengths=None if "without" in side else list(lengths))
    start = 0
    for count in blocks:
        here = slice(start, start + count)
        output = step(batch, k[:, :, here], v[:, :, here], q[:, :, here])
        assert mx.isfinite(output).all()
        for i, cache in enumerate(single):
            low, high = (padding[i], longest) if side == "left" else (0, lengths[i])
            own = slice(max(start, low), min(start + count, high))
            if own.start < own.stop:
                expected = step(cache, *(x[i : i + 1, :, own] for x in (k, v, q)))
                found = output[i : i + 1, :, own.start - start : own.stop - start]
                assert mx.allclose(found, expected, atol=1e-5), (start, i)
        start += count
    batch.finalize()
    assert batch.offset.tolist() == list(lengths)
    for i, cache in enumerate(single):
        assert kept(batch.extract(i)) == kept(cache)
    k, v, q = arrays(1, seed=6, batch=3)
    output = step(batch, k, v, q)
    for i, cache in enumerate(single):
        assert mx.allclose(output[i : i + 1], step(cache, k[i : i + 1], v[i : i + 1], q[i : i + 1]), atol=1e-5)


def test_free_slots_lie_at_one_place_in_all_heads_until_a_row_evicts():
    """What one mask for all heads rests on."""
    batch = EvictingCache.merge(fed((3, 20, 8, 12), budget=16))
    for turn, count in enumerate((1, 5, 1, 1, 9, 1, 1, 1, 1)):
        k, v, q = arrays(count, seed=30 + turn, batch=4)
        step(batch, k, v, q)
        slots = batch.method_state.slots
        free = (slots.positions < 0).reshape(4, 2, -1)
        assert mx.array_equal(free[:, 0], free[:, 1])
        batch.copy().settle()


def test_filter_drops_slots_that_only_longer_sequences_used():
    batch = EvictingCache.merge(fed((3, 60, 5), budget=64))
    assert batch.keys.shape[2] == 60
    batch.filter([2, 0])
    assert batch.offset.tolist() == [5, 3]
    assert batch.keys.shape[2] == 5
    batch.filter(mx.array([1]))
    assert (batch.offset, batch.keys.shape[2]) == (3, 3)


def test_filter_keeps_the_block_that_can_be_taken_back():
    batch, single = EvictingCache.merge(fed((20, 12))), fed((20, 12))[1]
    k, v, q = arrays(4, seed=8, batch=2)
    step(batch, k, v, q)
    step(single, k[1:], v[1:], q[1:])
    batch.filter([1])
    assert batch.trim(3) == single.trim(3) == 3
    batch.settle()
    single.settle()
    assert kept(batch) == kept(single)


def test_extend_joins_two_batches():
    first, second, single = EvictingCache.merge(fed((3, 20))), EvictingCache.merge(fed((9, 0), seed=2)), fed((3, 20))
    first.extend(second)
    assert first.offset.tolist() == [3, 20, 9, 0]
    assert kept(first.extract(1)) == kept(single[1])
    empty = EvictingCache(veloxfn.policy(h2o.Config(budget=8, age_normalised=True)))
    empty.extend(first)
    assert empty.offset.tolist() == [0, 3, 20, 9, 0]


def test_what_cannot_be_joined_is_refused():
    cache = fed((9,))[0]
    other = EvictingCache(veloxfn.policy(h2o.Config(budget=9, age_normalised=True)))
    with pytest.raises(ValueError, match="caches of one config are joined, got Config"):
        cache.extend(other)
    with pytest.raises(ValueError, match="caches of one layer are joined, got 0 and 3"):
        EvictingCache.merge([cache, EvictingCache(veloxfn.policy(cache.config), layer=3)])
    with pytest.raises(TypeError, match="joins others of its kind, got int"):
        cache.extend(3)
    with pytest.raises(TypeError, match="joins others of its kind, got KVCache"):
        EvictingCache.merge([KVCache(), cache])
    with pytest.raises(ValueError, match="one cache or more, got none"):
        EvictingCache.merge([])
    with pytest.raises(ValueError, match="one number of kv heads are joined, got 2 and 3"):
        cache.extend(fed((4,), heads=3)[0])
    with pytest.raises(IndexError, match=r"indices 0 to 0, got \[1\]"):
        cache.filter([1])
    with pytest.raises(IndexError, match=r"indices 0 to 0, got \[\]"):
        cache.filter([])
    with pytest.raises(ValueError, match="left_padding comes before all tokens, but 9 were seen"):
        cache.prepare(left_padding=[1])
    with pytest.raises(ValueError, match=r"one count >= 0 for each of 1 sequences, got \[1, 2\]"):
        cache.prepare(lengths=[1, 2])
    with pytest.raises(ValueError, match=r"got \[-1\]"):
        cache.prepare(lengths=[-1])
    with pytest.raises(ValueError, match=r"holds \[B, Hkv\] = \[1, 2\], got keys \(3, 2, 1, 4\)"):
        cache.update_and_fetch(mx.zeros((3, 2, 1, 4)), mx.zeros((3, 2, 1, 4)))
    assert cache.size() == 9


def test_noise_does_not_depend_on_the_place_in_a_batch():
    config = veloxfn.keyformer.Config(budget=8, noise="additive", tau=0.5)
    one = fed((20,), config=config, seed=3)[0]
    batch = EvictingCache.merge(fed((20, 20, 20), config=config, seed=1))  # the third has seed 3
    assert kept(batch.extract(2)) == kept(one)
    assert kept(batch.extract(0)) != kept(one)


def test_a_batch_saves_and_loads(tmp_path):
    from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache

    batch = EvictingCache.merge(fed((3, 20, 8)))
    batch.prepare(lengths=[2, 4, 1], right_padding=[2, 0, 3])
    k, v, q = arrays(4, seed=8, batch=3)
    step(batch, *(x[:, :, :2] for x in (k, v, q)))
    save_prompt_cache(str(tmp_path / "batch.safetensors"), [batch])
    (loaded,) = load_prompt_cache(str(tmp_path / "batch.safetensors"))
    outputs = [step(cache, *(x[:, :, 2:] for x in (k, v, q))) for cache in (batch, loaded)]
    assert mx.array_equal(*outputs)
    assert loaded.offset.tolist() == batch.offset.tolist() == [5, 24, 9]


# Layers that differ, and use against the rules.


def merged(model, policies, lengths=(3, 12)):
    """Caches of each prompt alone, and one batch of them all."""
    single = [make_prompt_cache(model, policies) for _ in lengths]
    for caches, prompt in zip(single, prompts_of(*lengths), strict=True):
        model(mx.array([prompt]), cache=caches)
    return single, [EvictingCache.merge(layer) for layer in zip(*copy.deepcopy(single), strict=True)]


@pytest.mark.parametrize("budgets", [(9, 2), (2, 9), (20, 4), (5, 30)])
@pytest.mark.parametrize("method", ["h2o", "streaming_llm"])
def test_layers_of_different_budgets_each_have_their_own_mask(tiny, tokens, method, budgets):
    model = tiny()
    policies = [veloxfn.policy_for(method, budget=budget, sink=0) for budget in budgets]
    single, batch = merged(model, policies, (3, 12, 7))
    for turn, count in enumerate((1, 1, 4, 1, 1)):
        inputs = tokens(count, batch=3, seed=turn)
        found = model(inputs, cache=batch)
        for i, caches in enumerate(single):
            assert mx.allclose(found[i], model(inputs[i : i + 1], cache=caches)[0], atol=1e-4), (turn, i)
    for i, caches in enumerate(single):
        assert [kept(cache.extract(i)) for cache in batch] == [kept(cache) for cache in caches]


def test_layers_that_read_the_mask_of_one_that_evicts_are_kept_from_ragged_batches(tiny, tokens):
    from mlx_lm.models.cache import BatchKVCache

    model, policy = tiny(), veloxfn.policy(streaming_llm.Config(budget=6))
    single = [make_prompt_cache(model, [policy, None]) for _ in range(2)]
    for caches, prompt in zip(single, prompts_of(3, 12), strict=True):
        model(mx.array([prompt]), cache=caches)
    batch = [EvictingCache.merge([c[0] for c in single]), BatchKVCache.merge([c[1] for c in single])]
    with pytest.raises(ValueError, match="sequences of different lengths cannot share a batch where layers of mlx_lm"):
        model(tokens(1, batch=2), cache=batch)
    single, _ = [make_prompt_cache(model, [None, policy]) for _ in range(2)], None
    for caches, prompt in zip(single, prompts_of(3, 12), strict=True):
        model(mx.array([prompt]), cache=caches)
    batch = [BatchKVCache.merge([c[0] for c in single]), EvictingCache.merge([c[1] for c in single])]
    found = model(tokens(1, batch=2), cache=batch)
    for i, caches in enumerate(single):
        assert mx.allclose(found[i], model(tokens(1, batch=2)[i : i + 1], cache=caches)[0], atol=1e-4)


def test_models_that_add_to_their_scores_need_one_budget(tiny, tokens):
    latent = tiny("deepseek_v3", kv_lora_rank=8, q_lora_rank=None, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8)
    one, other = (veloxfn.policy(streaming_llm.Config(budget=budget, sink=0)) for budget in (9, 4))
    for policies in ([one, other], [one, None], [None, one]):
        with pytest.raises(ValueError, match=r"layers 0 to 1 of mlx_lm\.models\.deepseek_v3\.Model add an array"):
            make_prompt_cache(latent, policies)
    single, batch = merged(latent, [other, other], (3, 7))
    for turn in range(3):
        found = latent(tokens(1, batch=2, seed=turn), cache=batch)
        for i, caches in enumerate(single):
            own = latent(tokens(1, batch=2, seed=turn)[i : i + 1], cache=caches)
            assert mx.allclose(found[i], own[0], atol=1e-4)


def test_filter_takes_indices_and_nothing_else():
    for given in ([True, False], mx.array([True, False]), [0.7], ["0"], "01", None, mx.array(0), mx.array([[0]])):
        batch = EvictingCache.merge(fed((3, 12)))
        with pytest.raises(TypeError, match="indices must be"):
            batch.filter(given)
        assert batch.offset.tolist() == [3, 12]


def test_a_filter_that_is_refused_changes_nothing():
    batch = EvictingCache(veloxfn.policy(h2o.Config(budget=8)))
    batch.prepare(lengths=[2, 6], right_padding=[4, 0])
    k, v, _ = arrays(6, batch=2)
    batch.update_and_fetch(k, v)  # attention never shows its queries
    batch.finalize()
    with pytest.raises(RuntimeError, match="ranks by the model's queries"):
        batch.filter([0])
    assert batch.offset.tolist() == [2, 6]
    assert batch.keys.shape[0] == 2


def test_what_was_settled_by_a_filter_is_not_offered_to_be_taken_back():
    batch = EvictingCache.merge(fed((0, 0)))
    batch.prepare(lengths=[2, 6], right_padding=[4, 0])
    step(batch, *arrays(6, batch=2))
    batch.finalize()
    assert batch.is_trimmable()  # all came in this block
    single = batch.extract(0)
    batch.filter([0])
    for cache in (single, batch):
        assert cache.size() == 2
        assert not cache.is_trimmable()
        with pytest.raises(ValueError, match="takes back 0 to 0 tokens, the last block, got 1"):
            cache.trim(1)
        assert cache.size() == 2


def test_padding_against_the_rules():
    batch = EvictingCache.merge(fed((0, 0)))
    with pytest.raises(ValueError, match=r"must have one sum, got \[3, 1\] and \[1, 1\]"):
        batch.prepare(lengths=[3, 1], right_padding=[1, 1])
    with pytest.raises(ValueError, match=r"one count >= 0 for each of 2 sequences, got \[\]"):
        batch.prepare(left_padding=[])
    batch.prepare(lengths=mx.array([3, 1]), right_padding=[0, 2])
    step(batch, *arrays(3, batch=2))
    with pytest.raises(RuntimeError, match="call finalize before the next ones"):
        step(batch, *arrays(1, batch=2))
    batch.finalize()
    step(batch, *arrays(1, batch=2))
    assert batch.offset.tolist() == [4, 2]


def test_merge_compares_all_caches_not_only_the_first():
    empty = EvictingCache(veloxfn.policy(h2o.Config(budget=8, age_normalised=True)))
    with pytest.raises(ValueError, match="one number of kv heads are joined, got 2 and 4"):
        EvictingCache.merge([empty, *fed((4,), heads=2), *fed((4,), heads=4)])
    with pytest.raises(ValueError, match="one shard of one model are joined, got 0 and 1"):
        EvictingCache.merge([empty, EvictingCache(veloxfn.policy(empty.config), shard=1)])


def test_nothing_seen_saves_and_loads():
    cache = EvictingCache(veloxfn.policy(streaming_llm.Config(budget=8)))
    cache.update_and_fetch(mx.ones((1, 2, 3, 4)), mx.ones((1, 2, 3, 4)))
    assert cache.trim(5) == 3
    loaded = EvictingCache.from_state(cache.state)
    assert loaded.empty()
    loaded.update_and_fetch(mx.ones((3, 2, 1, 4)), mx.ones((3, 2, 1, 4)))
    cache.update_and_fetch(mx.ones((3, 2, 1, 4)), mx.ones((3, 2, 1, 4)))
    padded = EvictingCache(veloxfn.policy(streaming_llm.Config(budget=8)))
    padded.prepare(left_padding=[5, 4])
    padded.update_and_fetch(mx.ones((2, 2, 3, 4)), mx.ones((2, 2, 3, 4)))
    assert EvictingCache.from_state(padded.state).offset.tolist() == [-2, -1]
