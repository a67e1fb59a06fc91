"""`attach`: whatever mlx_lm asks a model for caches gets evicting ones, planned once; `detach` leaves no trace."""

import copy
import gc
import weakref

import mlx.core as mx
import pytest
from mlx.utils import tree_map
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models import llama
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

import veloxfn
from veloxfn import Contiguous, h2o, knorm, pyramidkv, streaming_llm
from veloxfn_mlx_adapter import EvictingCache, attach, detach, prompt_cache, remove_hook, ropes
from veloxfn_mlx_adapter import make_prompt_cache as make_evicting

H2O = veloxfn.policy(h2o.Config(budget=16, age_normalised=True))
KNORM = veloxfn.policy(knorm.Config(budget=24))


@pytest.fixture
def model():
    """A model of its own: nothing attached before, nothing left for others."""
    mx.random.seed(3)
    made = llama.Model(llama.ModelArgs("llama", 32, 2, 48, 4, 1e-5, 61, num_key_value_heads=2))
    made.update(tree_map(lambda weight: 4 * weight, made.parameters()))  # so that it does not repeat one token
    mx.eval(made.parameters())
    return made


def budgets(model):
    return [cache.layer_budget if isinstance(cache, EvictingCache) else None for cache in make_prompt_cache(model)]


def answer(model, prompt, count=12, **options):
    """Tokens of mlx_lm's own loop."""
    return [token for token, _ in generate_step(prompt, model, max_tokens=count, **options)]


def test_mlx_lm_gets_eviction_caches_until_detach(model):
    assert attach(model, H2O) is model.make_cache
    first, second = make_prompt_cache(model), make_prompt_cache(model)
    assert [cache.layer for cache in first] == [0, 1]
    assert all(isinstance(cache, EvictingCache) and cache.empty() for cache in first + second)
    assert not set(map(id, first)) & set(map(id, second))
    detach(model)
    assert "make_cache" not in vars(model)
    assert all(type(cache) is KVCache for cache in make_prompt_cache(model))


def test_generation_without_a_prompt_cache_is_that_with_one(model, tokens):
    prompt = tokens(40)[0]
    wanted = answer(model, prompt, prefill_step_size=8, prompt_cache=make_evicting(model, H2O))
    full = answer(model, prompt, prefill_step_size=8)
    with attach(model, H2O):
        assert answer(model, prompt, prefill_step_size=8) == wanted
        assert answer(model, prompt, prefill_step_size=8) == wanted  # caches are fresh every time
    assert answer(model, prompt, prefill_step_size=8) == full != wanted


def test_a_batch_answers_as_its_prompts_alone(model, tokens):
    prompts = [tokens(count, seed=count)[0].tolist() for count in (30, 41)]
    with attach(model, H2O):
        alone = [answer(model, mx.array(prompt), prefill_step_size=64) for prompt in prompts]
        generator = BatchGenerator(model, max_tokens=12, prefill_step_size=64)
        uids = generator.insert(prompts)
        found = {uid: [] for uid in uids}
        while responses := generator.next_generated():
            for response in responses:
                found[response.uid].append(response.token)
        generator.close()
    assert [found[uid] for uid in uids] == alone


def test_speculative_decoding_leaves_the_draft_model_alone(model, tokens):
    from mlx_lm.generate import speculative_generate_step

    prompt = tokens(40)[0]
    draft = llama.Model(model.args)
    with attach(model, H2O):
        steps = speculative_generate_step(prompt, model, draft, max_tokens=12, num_draft_tokens=2)
        assert [token for token, *_ in steps] == answer(model, prompt, prefill_step_size=512)


def test_the_model_is_looked_at_once(model, monkeypatch):
    looked = []
    probed = ropes.probed
    monkeypatch.setattr(ropes, "probed", lambda *arguments: looked.append(1) or probed(*arguments))
    rope = ropes.rope_of(model)
    with attach(model, veloxfn.policy(h2o.Config(budget=16, placement=Contiguous(rope)))):
        for _ in range(3):
            assert make_prompt_cache(model)[0].config.placement.rope == rope
    assert len(looked) == 1


def test_other_layers_keep_what_the_model_makes(tiny):
    model = tiny("gemma3_text")
    with attach(model, KNORM):
        kinds = [type(cache) for cache in make_prompt_cache(model)]
    assert kinds == [RotatingKVCache, EvictingCache] * 2
    assert type(make_prompt_cache(model)[1]) is KVCache


def test_layers_can_differ(model):
    with attach(model, [KNORM, None]):
        assert budgets(model) == [24, None]
    pyramid = pyramidkv.Config(layers=2, taper=2.0, scorer=h2o.Config(budget=32))
    with attach(model, veloxfn.policy(pyramid)):
        spread = budgets(model)
    assert sum(spread) == 64
    assert spread[0] > spread[1]


def test_attaching_again_replaces(model):
    attach(model, H2O)
    attach(model, KNORM)
    assert budgets(model) == [24, 24]
    detach(model)
    assert budgets(model) == [None, None]
    assert "make_cache" not in vars(model)


def test_blocks_nest(model):
    attach(model, KNORM)
    with attach(model, H2O):
        assert budgets(model) == [16, 16]
    assert budgets(model) == [None, None]  # the block replaced what was attached before it
    with attach(model, H2O):
        with attach(model, KNORM):
            assert budgets(model) == [24, 24]
        assert budgets(model) == [16, 16]
        attach(model, KNORM)
        assert budgets(model) == [24, 24]
    assert "make_cache" not in vars(model)
    with attach(model, H2O), attach(model, KNORM):
        detach(model)
        assert budgets(model) == [None, None]
    assert "make_cache" not in vars(model)


def test_a_block_detaches_after_an_error(model):
    with pytest.raises(KeyError), attach(model, H2O):
        raise KeyError
    assert budgets(model) == [None, None]


def test_detach_restores_a_make_cache_of_the_instance(model):
    def own():
        return [KVCache(), RotatingKVCache(max_size=8)]

    model.make_cache = own
    attach(model, H2O)
    assert [type(cache) for cache in make_prompt_cache(model)] == [EvictingCache, RotatingKVCache]
    attach(model, KNORM)
    assert [type(cache) for cache in make_prompt_cache(model)] == [EvictingCache, RotatingKVCache]
    detach(model)
    assert model.make_cache is own


def test_make_prompt_cache_looks_through_an_attachment(model):
    with attach(model, [H2O, None]):
        assert [cache.layer_budget for cache in make_evicting(model, KNORM)] == [24, 24]
        placed = veloxfn.policy(streaming_llm.Config(budget=16, placement=Contiguous(ropes.rope_of(model))))
        assert [type(cache) for cache in make_evicting(model, [None, placed])] == [KVCache, EvictingCache]
        assert all(type(cache) is KVCache for cache in prompt_cache.stock_caches(model))


def test_weights_and_parameters_are_left_alone(model):
    before = dict(model.parameters())
    with attach(model, H2O):
        assert dict(model.parameters()).keys() == before.keys()
        model.freeze()
        model.update(model.parameters())


def test_nothing_keeps_the_model_alive(model, request):
    made = llama.Model(model.args)
    attach(made, H2O)
    left = weakref.ref(made)
    make = made.make_cache
    gc.disable()
    try:
        del made
        assert left() is None
    finally:
        gc.enable()
    with pytest.raises(ReferenceError, match="the model that these caches were attached to is gone"):
        make()


def test_a_copied_model_makes_eviction_caches(model):
    with attach(model, H2O):
        copied = copy.deepcopy(model)
        assert budgets(copied) == [16, 16]


def test_a_model_without_make_cache_of_its_class(model, tiny):
    assert not hasattr(llama.Model, "make_cache") or type(model).make_cache is not None
    phi = tiny("phi")
    assert not hasattr(type(phi), "make_cache")
    with attach(phi, H2O):
        assert budgets(phi) == [16, 16]
        attach(phi, KNORM)
        assert budgets(phi) == [24, 24]
    assert not hasattr(phi, "make_cache")


@pytest.mark.parametrize(
    ("policy", "error", "message"),
    [
        (h2o.Config(budget=16), TypeError, "bind it: veloxfn.policy"),
        ([H2O], ValueError, "one entry per cache of the model: 2, got 1"),
        ([None, None], ValueError, "has no layer to evict from"),
        (veloxfn.policy(pyramidkv.Config(layers=3)), ValueError, "pyramidkv's layers must be those that evict, 2"),
        (veloxfn.policy(h2o.Config(placement=Contiguous(veloxfn.Rope(4)))), ValueError, "is not that of layer 0"),
    ],
)
def test_what_is_refused_leaves_the_model_as_it_was(model, policy, error, message):
    with pytest.raises(error, match=message):
        attach(model, policy)
    assert "make_cache" not in vars(model)
    with attach(model, KNORM):
        with pytest.raises(error, match=message):
            attach(model, policy)
        assert budgets(model) == [24, 24]


def test_queries_that_cannot_be_had_are_refused_at_once(tiny):
    model = tiny("gemma2", head_dim=8, query_pre_attn_scalar=8.0)
    with pytest.raises(ValueError, match="h2o ranks by the model's queries"):
        attach(model, H2O)
    with attach(model, KNORM):
        assert budgets(model) == [24, 24]


def test_caches_made_after_remove_hook_are_shown_their_queries(model, tokens):
    with attach(model, H2O):
        wanted = answer(model, tokens(40)[0], prefill_step_size=8)
        remove_hook()
        assert answer(model, tokens(40)[0], prefill_step_size=8) == wanted


def test_what_is_no_model_is_refused(model):
    for thing, message in ((None, "got NoneType"), ((model, None), r"got tuple; mlx_lm.load returns \(model, tok")):
        with pytest.raises(TypeError, match=message):
            attach(thing, H2O)
        with pytest.raises(TypeError, match=message):
            make_evicting(thing, H2O)


def test_detaching_nothing_is_an_error(model):
    with pytest.raises(ValueError, match=r"no eviction caches are attached to mlx_lm\.models\.llama\.Model$"):
        detach(model)
    with attach(model, H2O):
        model.make_cache = list
        with pytest.raises(ValueError, match="its make_cache is <class 'list'>"):
            detach(model)
    assert model.make_cache is list
