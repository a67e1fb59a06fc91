"""Contiguous placement in mlx_lm's models: the rope that is theirs, the offset they see, logits without gaps."""

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models import cache as mlx_lm_cache
from mlx_lm.models import llama
from mlx_lm.models.base import scaled_dot_product_attention

import veloxfn
from veloxfn import Absolute, Contiguous, Rope, h2o, knorm, pyramidkv, snapkv, streaming_llm
from veloxfn_mlx_adapter import EvictingCache, diagnostics, make_prompt_cache, rope_of

METHODS = sorted(veloxfn.METHODS)
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LONG = {
    "type": "longrope",
    "short_factor": [1.0] * 4,
    "long_factor": [1.0, 2.0, 3.0, 4.0],
    "original_max_position_embeddings": 64,
}
STABLELM = {"layer_norm_eps": 1e-5, "partial_rotary_factor": 0.5, "use_qkv_bias": False}
COHERE2 = {"layer_norm_eps": 1e-5, "layer_norm_bias": False, "logit_scale": 1.0, "sliding_window": 16}
ROTARY = {
    "llama": ("llama", {}, Rope(8)),
    "llama3": ("llama", {"rope_scaling": LLAMA3}, None),
    "yarn": ("qwen3", {"rope_scaling": YARN}, None),
    "linear": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, Rope(8, scale=0.25)),
    "longrope": ("phi3", {"rope_scaling": LONG}, Rope(8, freqs=(1.0, 20.0, 300.0, 4000.0))),
    "phi": ("phi", {}, Rope(4)),
    "stablelm": ("stablelm", STABLELM, Rope(4)),
    "cohere": ("cohere", {}, Rope(8, traditional=True)),
    "proportional": (
        "llama",
        {"rope_scaling": {"rope_type": "proportional", "partial_rotary_factor": 0.5}},
        Rope(8, freqs=(1.0, 10.0, float("inf"), float("inf"))),
    ),
}


def policy(model, module=streaming_llm, budget=12, layer=0, **settings):
    settings = {"sink": 2, **settings}
    return veloxfn.policy(module.Config(budget=budget, placement=Contiguous(rope_of(model, layer)), **settings))


def made(model, *arguments, **settings):
    return make_prompt_cache(model, policy(model, *arguments, **settings))


class TestRopeOf:
    @pytest.mark.parametrize("kind", ROTARY)
    def test_it_is_read_from_the_layers_module(self, tiny, kind):
        family, changes, expected = ROTARY[kind]
        model = tiny(family, **changes)
        rope = rope_of(model, 1)
        assert rope == rope_of(model)
        if expected is not None:
            assert (rope.dims, rope.traditional, rope.scale) == (expected.dims, expected.traditional, expected.scale)
            assert rope.freqs == pytest.approx(expected.freqs)
        module = model.layers[0].self_attn.rope
        vector = mx.random.normal((1, 1, 40, 8), key=mx.random.key(0))
        found = veloxfn.placement.rotate(rope, module(vector, offset=3), start=mx.arange(3, 43), to=mx.arange(40) * 7)
        expected = mx.concatenate([module(vector[:, :, i : i + 1], offset=7 * i) for i in range(40)], axis=2)
        assert mx.allclose(found, expected, atol=1e-4)

    def test_a_length_dependent_rope_is_refused(self, tiny):
        model = tiny(rope_scaling={"rope_type": "dynamic", "factor": 2.0})
        message = "DynamicNTKScalingRoPE, whose frequencies depend on the length"
        with pytest.raises(ValueError, match=message):
            rope_of(model)
        chosen = veloxfn.policy(streaming_llm.Config(budget=12, placement=Contiguous(Rope(8))))
        with pytest.raises(ValueError, match=message):
            make_prompt_cache(model, chosen)

    def test_no_rope_and_no_such_layer(self, tiny):
        model = tiny("smollm3", no_rope_layer_interval=2)
        with pytest.raises(
            ValueError, match=r"layer 1 of mlx_lm.models.smollm3.Model must have one rotary.*found none"
        ):
            rope_of(model, 1)
        with pytest.raises(ValueError, match="layer must be <= 1, got 2"):
            rope_of(model, 2)
        with pytest.raises(TypeError, match="layer must be an int, got None"):
            rope_of(model, None)


class MyRoPE(nn.Module):
    """A rotary embedding that rope_of has never seen: every position counts twice."""

    def __call__(self, x, offset=0):
        return mx.fast.rope(x, 8, traditional=False, base=10000.0, scale=2.0, offset=offset)


class TestTheRopeIsChecked:
    @pytest.mark.parametrize(
        ("rope", "message"),
        [
            (Rope(8, base=500.0), r"not that of layer 0 .*: base=500.0 \(the layer's: 10000.0\)"),
            (Rope(4), r"dims=4 \(the layer's: 8\)"),
            (Rope(8, traditional=True), r"traditional=True \(the layer's: False\)"),
            (Rope(8, scale=0.5), r"scale=0.5 \(the layer's: 1.0\)"),
            (Rope(8, freqs=(1.0, 2.0, 3.0, 4.0)), r"freqs=\(1, 2, .., 4\) \(the layer's: None\)"),
            (Rope(16), r"dims=16 \(the layer's: 8\)"),
        ],
        ids=str,
    )
    def test_another_rope_is_refused(self, tiny, rope, message):
        chosen = veloxfn.policy(knorm.Config(budget=12, placement=Contiguous(rope)))
        with pytest.raises(ValueError, match=message):
            make_prompt_cache(tiny(), chosen)

    def test_the_same_rope_in_other_words(self, tiny):
        rope = Rope(8, freqs=tuple(10000.0 ** (i / 4) for i in range(4)))
        make_prompt_cache(tiny(), veloxfn.policy(knorm.Config(budget=12, placement=Contiguous(rope))))

    def test_an_unknown_module_needs_a_rope_by_hand_that_its_keys_confirm(self, tiny, tokens, feed):
        model = llama.Model(tiny(num_hidden_layers=1).args)
        model.layers[0].self_attn.rope = MyRoPE()
        with pytest.raises(ValueError, match=r"rope_of does not know, .*MyRoPE; build the veloxfn.Rope by hand"):
            rope_of(model)
        wrong, right = (
            veloxfn.policy(streaming_llm.Config(budget=12, placement=Contiguous(rope)))
            for rope in (Rope(8), Rope(8, scale=2.0))
        )
        with pytest.raises(ValueError, match=r"rotates with .*MyRoPE, and its keys do not turn as Rope\(dims=8"):
            make_prompt_cache(model, wrong)
        assert mx.isfinite(feed(model, make_prompt_cache(model, right), tokens(40), 20)).all()

    def test_learned_positions_are_refused(self, tiny):
        sizes = {"n_ctx": 1024, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 1024}
        model = tiny("gpt2", layer_norm_epsilon=1e-5, **sizes)
        chosen = veloxfn.policy(knorm.Config(budget=12, placement=Contiguous(Rope(8))))
        with pytest.raises(ValueError, match=r"caches as values depends on the position \(latent keys"):
            make_prompt_cache(model, chosen)

    def test_latent_keys_are_refused(self, tiny):
        sizes = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
        experts = {"n_routed_experts": None, "n_shared_experts": None, "moe_intermediate_size": 16}
        model = tiny("deepseek_v3", **sizes, **experts)
        chosen = veloxfn.policy(knorm.Config(budget=12, placement=Contiguous(Rope(4, traditional=True))))
        with pytest.raises(ValueError, match=r"caches as values depends on the position \(latent keys"):
            make_prompt_cache(model, chosen)

    def test_a_rope_that_the_evicting_layers_do_not_use(self, tiny):
        model = tiny("cohere2", **COHERE2, sliding_window_pattern=2)
        with pytest.raises(ValueError, match=r"the evicting layers of mlx_lm.models.cohere2.Model do not rotate"):
            made(model)

    def test_global_and_sliding_layers_have_ropes_of_their_own(self, tiny, tokens, feed):
        model = tiny("gemma3_text", rope_theta=777.0, rope_local_base_freq=55.0)
        assert [rope_of(model, i).base for i in range(4)] == [55.0, 777.0, 55.0, 777.0]
        caches = made(model, layer=1)
        feed(model, caches, tokens(40), 30)
        assert [cache.offset for cache in caches] == [40, 12, 40, 12]
        with pytest.raises(ValueError, match=r"not that of layer 1 of .*: base=55.0 \(the layer's: 777.0\)"):
            made(model, layer=0)

    def test_layers_without_positions_turn_nothing(self, tiny, tokens, feed):
        model = tiny("smollm3", no_rope_layer_interval=2, num_hidden_layers=4)
        caches = made(model)
        assert mx.isfinite(feed(model, caches, tokens(40), 30)).all()
        assert [cache.offset for cache in caches] == [12] * 4
        for cache in caches[1::2]:
            cache.settle()
            keys, _ = cache.keys_and_values()
            order = mx.argsort(cache.method_state.slots.positions, axis=1)[:, -12:, None]
            assert mx.array_equal(keys[0], mx.take_along_axis(cache.method_state.slots.keys, order, axis=1))


class TestWhatTheModelSees:
    @pytest.mark.parametrize("method", METHODS)
    def test_lesson_18_offset_is_the_tokens_kept(self, tiny, caches_of, tokens, feed, method):
        model = tiny()
        caches = caches_of(model, method, budget=32, placement=Contiguous(rope_of(model)))
        feed(model, caches, tokens(64 + 100), 64)
        for cache, told in zip(caches, diagnostics(caches), strict=True):
            assert cache.offset == told.layer_budget == told.tokens_kept
            assert cache.size() == told.tokens_seen == 164
            assert not cache.empty()

    @pytest.mark.parametrize("kind", ROTARY)
    @pytest.mark.parametrize("pieces", [(30,), (7, 23), (1, 29)])
    def test_logits_are_those_of_the_kept_tokens_alone(self, tiny, stock, tokens, feed, kind, pieces):
        """In one layer, keys depend on their token alone: no gap is left if a fresh run over the kept ones agrees."""
        family, changes, _ = ROTARY[kind]
        model = tiny(family, num_hidden_layers=1, **changes)
        inputs = tokens(46)
        caches = made(model)
        feed(model, caches, inputs[:, :45], *pieces)
        kept = [0, 1, *range(35, 45)]
        alone = model(inputs[:, mx.array([*kept, 45])], cache=stock(model))[:, -1]
        found = model(inputs[:, 45:], cache=caches)[:, -1]
        caches[0].settle()
        assert mx.allclose(found, alone, atol=2e-5)
        far = make_prompt_cache(model, veloxfn.policy(streaming_llm.Config(budget=12, sink=2)))
        feed(model, far, inputs[:, :45], *pieces)
        assert not mx.allclose(model(inputs[:, 45:], cache=far)[:, -1], alone, atol=2e-5), "the gap is seen otherwise"

    def test_a_block_sees_the_kept_tokens_and_itself(self, tiny, stock, tokens, feed):
        model = tiny(num_hidden_layers=1)
        inputs = tokens(40)
        caches = made(model)
        feed(model, caches, inputs[:, :33], 30)
        found = model(inputs[:, 33:], cache=caches)
        kept = [0, 1, *range(23, 33)]
        alone = model(inputs[:, mx.array([*kept, *range(33, 40)])], cache=stock(model))[:, -7:]
        assert mx.allclose(found, alone, atol=2e-5)

    @pytest.mark.parametrize("kind", ROTARY)
    def test_budget_above_the_prompt_changes_nothing(self, tiny, stock, tokens, feed, kind):
        family, changes, _ = ROTARY[kind]
        model, inputs = tiny(family, **changes), tokens(50)
        caches = made(model, h2o, budget=64)
        assert mx.array_equal(feed(model, caches, inputs, 20, 13), feed(model, stock(model), inputs, 20, 13))

    @pytest.mark.parametrize("method", METHODS)
    def test_generation_past_the_budget(self, tiny, caches_of, tokens, method):
        model = tiny()
        caches = caches_of(model, method, budget=16, sink=2, placement=Contiguous(rope_of(model)))
        steps = list(generate_step(tokens(40)[0], model, max_tokens=40, prompt_cache=caches, prefill_step_size=16))
        assert all(mx.isfinite(logprobs).all() for _, logprobs in steps)
        assert all(cache.offset == cache.layer_budget for cache in caches)

    def test_sequences_of_a_batch_do_not_meet(self, tiny, caches_of, tokens, feed):
        model, inputs = tiny(), tokens(40, batch=2)
        placement = Contiguous(rope_of(model))
        together = feed(model, caches_of(model, budget=12, sink=2, placement=placement), inputs, 25)
        for row in range(2):
            caches = caches_of(model, budget=12, sink=2, placement=placement)
            assert mx.allclose(feed(model, caches, inputs[row : row + 1], 25), together[row : row + 1], atol=1e-4)

    def test_masks_are_as_wide_as_the_keys(self, tiny, tokens, feed):
        model = tiny()
        caches = made(model)
        feed(model, caches, tokens(30), 30)
        for cache in caches:
            assert cache.make_mask(1) is None
            assert cache.make_mask(5) == "causal"
            mask = cache.make_mask(5, return_array=True)
            assert mask.shape == (5, 12 + 5)
            assert mx.array_equal(mask, mlx_lm_cache.create_causal_mask(5, cache.offset))
            with pytest.raises(ValueError, match=r"sliding window of 16 .*30 tokens seen"):
                cache.make_mask(1, window_size=16)


class Late(llama.Attention):
    """Asks the cache for its offset at another moment than mlx_lm's models do."""

    when = "after"
    leads = False
    first = 0  # offset of the first layer's cache

    def __call__(self, x, mask=None, cache=None):
        B, L, _ = x.shape
        queries, keys, values = (
            projection(x).reshape(B, L, -1, self.head_dim).transpose(0, 2, 1, 3)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.leads:
            Late.first = cache.offset
        offset = Late.first if self.when == "shared" else cache.offset
        keys = self.rope(keys, offset=offset)
        queries = self.rope(queries, offset=offset) if self.when != "after" else queries
        keys, values = cache.update_and_fetch(keys, values)
        if self.when == "after":
            queries = self.rope(queries, offset=cache.offset - L)
        output = scaled_dot_product_attention(queries, keys, values, cache=cache, scale=self.scale, mask=mask)
        if self.when == "late":
            _ = cache.offset
        return self.o_proj(output.transpose(0, 2, 1, 3).reshape(B, L, -1))


def asking(model, when):
    """The same model, whose attention asks for the offset at `when`."""
    other = llama.Model(model.args)
    other.update(model.parameters())
    for i, layer in enumerate(other.layers):
        attention = Late(model.args)
        attention.leads = i == 0
        attention.update(layer.self_attn.parameters())
        attention.when = when
        layer.self_attn = attention
    return other


class TestModelsThatAskLate:
    @pytest.mark.parametrize("lengths", [(30,), (30, 4, 1, 3)])
    def test_between_update_and_attention_the_offset_counts_the_block(self, tiny, tokens, feed, lengths):
        model, inputs = tiny(), tokens(44)
        other = asking(model, "after")
        expected = feed(model, made(model, h2o), inputs, *lengths)
        caches = made(other, h2o)
        assert mx.array_equal(feed(other, caches, inputs, *lengths), expected)
        arrays = [cache.state for cache in caches]
        again = [EvictingCache.from_state(state) for state in arrays]
        assert mx.array_equal(other(inputs[:, :3], cache=again), other(inputs[:, :3], cache=caches))

    def test_after_attention_is_refused(self, tiny):
        with pytest.raises(ValueError, match=r"layer 0 of .* reads its cache's offset after its attention"):
            made(asking(tiny(), "late"))

    def test_one_offset_for_all_layers_needs_one_budget(self, tiny, tokens, feed):
        model, inputs = tiny(), tokens(40)
        other = asking(model, "shared")
        caches = made(other)
        expected = feed(model, made(model), inputs, 20)
        assert mx.allclose(feed(other, caches, inputs, 20), expected, atol=1e-5)
        for policies in ([policy(other), policy(other, budget=14)], [policy(other), None]):
            with pytest.raises(ValueError, match="rotated at the offset of another layer's cache"):
                make_prompt_cache(other, policies)


class TestProtocol:
    @pytest.mark.parametrize("settled", [False, True])
    @pytest.mark.parametrize("rope", ["llama", "llama3", "proportional"])
    def test_save_and_load_continue_bit_for_bit(self, tiny, tokens, feed, tmp_path, rope, settled):
        family, changes, _ = ROTARY[rope]
        model, inputs = tiny(family, **changes), tokens(80)
        caches = made(model, h2o)
        feed(model, caches, inputs[:, :50], 40)
        if settled:
            for cache in caches:
                cache.settle()
        mlx_lm_cache.save_prompt_cache(str(tmp_path / "cache.safetensors"), caches)
        loaded = mlx_lm_cache.load_prompt_cache(str(tmp_path / "cache.safetensors"))
        for one, other in zip(caches, loaded, strict=True):
            assert one.config == other.config
            assert one.offset == other.offset == 12
            assert one.size() == other.size() == 50
        assert mx.array_equal(feed(model, loaded, inputs[:, 50:], 9), feed(model, caches, inputs[:, 50:], 9))

    @pytest.mark.parametrize("taken", [1, 3, 5])
    def test_lesson_28_a_rewound_block_was_never_there(self, tiny, tokens, feed, taken):
        model, inputs = tiny(), tokens(60)
        trimmed, straight = made(model, h2o), made(model, h2o)
        for caches in (trimmed, straight):
            feed(model, caches, inputs[:, :30], 20)
        model(tokens(5, seed=9) if taken == 5 else inputs[:, 30:35], cache=trimmed)
        for cache in trimmed:
            assert cache.trim(taken) == taken
            assert cache.offset == 12
            assert cache.size() == 35 - taken
        if taken < 5:
            model(inputs[:, 30 : 35 - taken], cache=straight)
        rest = inputs[:, 35 - taken :]
        found, expected = feed(model, trimmed, rest, 4), feed(model, straight, rest, 4)
        assert mx.allclose(found, expected, atol=1e-5)

    def test_below_the_budget_a_rewind_moves_the_offset(self, tiny, tokens):
        model = tiny()
        caches = made(model)
        model(tokens(9), cache=caches)
        assert [cache.trim(4) for cache in caches] == [4, 4]
        assert [cache.offset for cache in caches] == [5, 5]

    def test_copies_go_their_own_way(self, tiny, tokens, feed):
        model, inputs = tiny(), tokens(50)
        caches = made(model)
        feed(model, caches, inputs[:, :30], 20)
        copies = [cache.copy() for cache in caches]
        first = feed(model, caches, inputs[:, 30:], 10)
        assert mx.array_equal(feed(model, copies, inputs[:, 30:], 10), first)


class TestPyramid:
    def test_budgets_are_spread_over_the_evicting_layers(self, tiny, tokens, feed):
        model = tiny(num_hidden_layers=3)
        scorer = snapkv.Config(budget=16, window=4, placement=Contiguous(rope_of(model)))
        config = pyramidkv.Config(layers=3, scorer=scorer, beta=4.0)
        caches = make_prompt_cache(model, veloxfn.policy(config))
        budgets = [layer.budget for layer in pyramidkv.layer_configs(config)]
        assert [cache.layer_budget for cache in caches] == budgets
        assert sum(budgets) == 48
        assert budgets[0] > budgets[2]
        assert mx.isfinite(feed(model, caches, tokens(60), 40)).all()
        assert [cache.offset for cache in caches] == budgets

    def test_sliding_layers_take_no_share(self, tiny):
        config = pyramidkv.Config(layers=2, scorer=snapkv.Config(budget=16, window=4))
        caches = make_prompt_cache(tiny("gemma3_text"), veloxfn.policy(config))
        assert [getattr(cache, "layer_budget", None) for cache in caches][::2] == [None, None]
        assert sum(cache.layer_budget for cache in caches[1::2]) == 32

    def test_another_number_of_layers_is_refused(self, tiny):
        config = pyramidkv.Config(layers=3, scorer=snapkv.Config(budget=16, window=4))
        with pytest.raises(ValueError, match="pyramidkv's layers must be those that evict, 2, got layers=3"):
            make_prompt_cache(tiny(), veloxfn.policy(config))


def test_the_demo_model_goes_on_past_the_budget(smollm2):
    model, tokenizer = smollm2.model, smollm2.tokenizer
    assert rope_of(model) == Rope(64, base=100000.0)
    caches = made(model, h2o, budget=48, age_normalised=True)
    text = mlx_lm.generate(
        model, tokenizer, "Once upon a time there was", max_tokens=80, prompt_cache=caches, prefill_step_size=32
    )
    assert {cache.offset for cache in caches} == {48}
    words = [word.strip(".,;!?\"'") for word in text.split()]
    assert sum(word.isalpha() for word in words) >= 40


def test_absolute_placement_is_not_probed(tiny, monkeypatch):
    model = tiny("gpt_oss")
    monkeypatch.setattr(type(model), "__call__", lambda *_, **__: pytest.fail("the model was run"))
    caches = make_prompt_cache(model, veloxfn.policy(knorm.Config(budget=12, placement=Absolute())))
    assert caches[1].offset == 0
