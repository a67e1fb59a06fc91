"""Every method in both readings on a model: the trained one answers, and a long prompt stays bounded."""

import dataclasses
import io

import mlx.core as mx
import mlx_lm
import pytest

import veloxfn
from veloxfn import Contiguous, cam, h2o, keyformer, knorm, pyramidkv, snapkv, streaming_llm, tova
from veloxfn_mlx_adapter import diagnostics, make_prompt_cache, rope_of

TEXT = (
    "The river rises in the hills above the town and runs for sixty miles to the sea. In spring the water is high and "
    "brown, and the farmers watch it day and night. In summer children bathe below the bridge. The old mill at the "
    "bend ground corn until the war; now it is a museum, and a school class comes to see its wheel every week."
)

READINGS = {
    "h2o": lambda budget: h2o.Config(budget=budget),
    "h2o key proxy": lambda budget: h2o.Config(budget=budget, query_source="key_proxy", decay=0.98, recent=budget // 2),
    "keyformer": lambda budget: keyformer.Config(budget=budget, anneal_from=60),
    "keyformer additive": lambda budget: keyformer.Config(budget=budget, noise="additive", tau_init=2.0, tau_end=6.0),
    "cam": lambda budget: cam.Config(budget=budget),
    "cam sums": lambda budget: cam.Config(
        budget=budget, recent=budget - 5, normalise=False, cadence="token", target_count=8
    ),
    "cam nearest": lambda budget: cam.Config(budget=budget, targets="nearest", merge="similarity", merge_keys=True),
    "snapkv": lambda budget: snapkv.Config(budget=budget, window=budget // 4),
    "tova": lambda budget: tova.Config(budget=budget),
    "tova one set": lambda budget: tova.Config(budget=budget, shared_heads=3),
    "pyramidkv": lambda budget: pyramidkv.Config(layers=30, scorer=snapkv.Config(budget=budget, window=budget // 4)),
    "pyramidkv taper": lambda budget: pyramidkv.Config(layers=30, scorer=h2o.Config(budget=budget), taper=1.5),
    "knorm": lambda budget: knorm.Config(budget=budget, recent=budget // 2),
    "streaming_llm": lambda budget: streaming_llm.Config(budget=budget),
}
readings = pytest.mark.parametrize("reading", READINGS)


def words_of(text):
    return [word.strip(".,;:!?\"'()") for word in text.split()]


def answer(smollm2, config, tokens=16):
    caches = make_prompt_cache(smollm2.model, veloxfn.policy(config))
    text = mlx_lm.generate(
        smollm2.model, smollm2.tokenizer, TEXT, max_tokens=tokens, prompt_cache=caches, prefill_step_size=32
    )
    return text, caches


@readings
def test_the_trained_model_answers_in_english_within_the_budget(smollm2, reading):
    text, caches = answer(smollm2, READINGS[reading](48))
    assert sum(word.isalpha() for word in words_of(text)) >= 7, text
    layers = diagnostics(caches)
    assert sum(layer.tokens_kept for layer in layers) == 30 * 48
    assert all(layer.tokens_kept == layer.layer_budget < layer.tokens_seen for layer in layers)


def test_keyformer_without_temperature_writes_what_h2o_writes_byte_for_byte(smollm2):
    windows = {"budget": 40, "recent": 12}
    plain, _ = answer(smollm2, h2o.Config(**windows), tokens=24)
    for seed in (0, 5):
        quiet, _ = answer(smollm2, keyformer.Config(noise="additive", tau=0.0, seed=seed, **windows), tokens=24)
        assert quiet.encode() == plain.encode()
    same, _ = answer(smollm2, keyformer.Config(noise="none", tau=1.0, **windows), tokens=24)
    assert same.encode() == plain.encode()


def test_merging_reaches_the_model_and_switched_off_it_is_h2o(smollm2):
    plain, before = answer(smollm2, h2o.Config(budget=40))
    off, off_caches = answer(smollm2, cam.Config(budget=40, merge="off"))
    assert off.encode() == plain.encode()
    _, after = answer(smollm2, cam.Config(budget=40))
    layer = 12
    values = [caches[layer].keys_and_values()[1] for caches in (before, off_caches, after)]
    assert mx.array_equal(values[0], values[1])
    assert not mx.allclose(values[0], values[2], atol=1e-3)


def test_a_flat_pyramid_writes_what_its_scorer_writes(smollm2):
    scorer = snapkv.Config(budget=40, window=8)
    plain, _ = answer(smollm2, scorer)
    flat, _ = answer(smollm2, pyramidkv.Config(layers=30, scorer=scorer, beta=1.0))
    _, caches = answer(smollm2, pyramidkv.Config(layers=30, scorer=scorer))
    assert flat.encode() == plain.encode()
    budgets = [layer.layer_budget for layer in diagnostics(caches)]
    assert budgets == sorted(budgets, reverse=True)
    assert budgets[0] > budgets[-1]


def unevaluated(caches):
    """Primitives that the states still wait for."""
    text = io.StringIO()
    mx.export_to_dot(text, *[array for cache in caches for array in cache.state])
    return text.getvalue().count("label =")


@pytest.mark.parametrize("reading", [reading for reading in READINGS if reading != "cam sums"])
def test_a_prompt_of_3000_tokens_at_a_quarter_stays_bounded(tiny, tokens, reading):
    """Lesson 37: the graph does not grow with the tokens, the rows hold, the logits are finite."""
    config = READINGS[reading](750)
    if hasattr(config, "layers"):
        config = dataclasses.replace(config, layers=4)
    if config.shared_heads > 1:
        config = dataclasses.replace(config, shared_heads=2)
    model = tiny("llama", num_hidden_layers=4)
    caches = make_prompt_cache(model, veloxfn.policy(config))
    text = tokens(3000)
    for start in range(0, 3000, 512):
        mx.eval(model(text[:, start : start + 512], cache=caches), [cache.state for cache in caches])
    waiting = []
    for _ in range(6):
        logits = model(text[:, :1], cache=caches)
        mx.eval(logits)
        waiting.append(unevaluated(caches))
    assert mx.all(mx.isfinite(logits))
    assert len(set(waiting[1:])) == 1, f"nothing may pile up from step to step: {waiting}"
    assert sum(cache.tokens_kept for cache in caches) == 4 * 750


@pytest.mark.parametrize("method", ["streaming_llm", "h2o", "keyformer", "cam", "snapkv", "tova", "knorm", "pyramidkv"])
def test_every_method_answers_without_gaps(smollm2, method):
    placement = Contiguous(rope_of(smollm2.model))
    more = {"layers": 30} if method == "pyramidkv" else {}
    config = veloxfn.METHODS[method].Config(budget=48, placement=placement, **more)
    text, caches = answer(smollm2, config)
    assert sum(word.isalpha() for word in words_of(text)) >= 7, text
    assert all(cache.offset == cache.config.budget for cache in caches)
